"""ops.dispatch_grouped_matmul and ops.grouped_matmul_combine beside the launches that they are made of, and
what they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tilescale import comm, ops
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops.ranks import dispatch_gemm, gemm_combine
from tilescale.ops.ranks.dispatch_gemm import Config

HOW = Config(BM=64, BN=64, BK=32, stages=2, threads=128, panel=2, blocks=3, warps=2)
SHAPE = {"tokens": 21, "hidden": 24, "topk": 3, "experts": 8, "inner": 16, "gate": "silu"}


def both_ways(choice: str) -> list[bool]:
    """Whether what comes back to the tokens, and what is known of the dispatch, has the same bits."""
    comm.init()
    drawn = dispatch_gemm.draw(**SHAPE, choice=choice, uneven=True, rank=comm.rank(), world=comm.world_size())
    same = []
    for config in (HOW, replace(HOW, fused=False)):
        y, sent = ops.dispatch_grouped_matmul(**drawn, config=config, slot=1)
        came = int(sent.sizes.sum())
        y = y.where(torch.arange(len(y))[:, None] < came, 0)
        back = ops.moe_combine(y, sent)
        again = ops.moe_dispatch(drawn["x"] + 1, like=sent).expanded()[:came]
        rows, last = sent.index[:came], int(sent.starts[-1])
        same.append([y, back, again, rows, sent.meta[:last, 0], sent.sizes, sent.starts, sent.begins])
    return [a.equal(b) for a, b in zip(*same, strict=True)]


@pytest.mark.parametrize("choice", ["", "one", "drop"])
def test_the_same_as_apart(ranks: Any, choice: str):
    assert all(map(all, ranks(3, target="sim").call(both_ways, choice)))


BACK = gemm_combine.Config(
    BM=64, BN=64, BK=32, stages=2, threads=128, panel=2, blocks=3, columns=1, movers=1, step=64
)


def back_both_ways(choice: str) -> bool:
    """Whether what comes back has the same bits in one kernel and apart."""
    comm.init()
    shape = {k: v for k, v in SHAPE.items() if k != "gate"} | {"hidden": 136}
    drawn = gemm_combine.draw(**shape, choice=choice, uneven=True, rank=comm.rank(), world=comm.world_size())
    found = [
        gemm_combine.there_and_back(**drawn, config=config) for config in (BACK, replace(BACK, fused=False))
    ]
    return found[0].equal(found[1])


@pytest.mark.parametrize("choice", ["", "one", "drop"])
def test_the_way_back_is_the_same_as_apart(ranks: Any, choice: str):
    assert all(ranks(3, target="sim").call(back_both_ways, choice))


def refusals() -> list[str]:
    comm.init()
    drawn = dispatch_gemm.draw(**SHAPE, rank=comm.rank(), world=comm.world_size())
    wrong: list[tuple[type[Exception], dict[str, Any]]] = [
        (TileValueError, {"w": drawn["w"][:3]}),
        (TileValueError, {"num_experts": 0}),
        (TileValueError, {"gate": "tanh"}),
        (TileValueError, {"tokens": 3}),
        (TileTypeError, {"w": drawn["w"].half()}),
        (TileTypeError, {"x": drawn["x"].float(), "w": drawn["w"].float()}),
    ]
    told = []
    for kind, other in wrong:
        with pytest.raises(kind) as error:
            ops.dispatch_grouped_matmul(**{**drawn, **other})
        told.append(str(error.value))
    y, sent = ops.dispatch_grouped_matmul(**drawn)
    w = torch.ones(4, 16, 24).bfloat16()
    back = ops.grouped_matmul_combine
    for kind, call in (
        (TileValueError, lambda: back(y[1:], w, sent)),
        (TileValueError, lambda: back(y, w[:, 1:], sent)),
        (TileTypeError, lambda: back(y, w.half(), sent)),
        (TileValueError, lambda: back(y, w, sent, config=replace(BACK, movers=3))),
        (TileValueError, lambda: back(y, w, sent, config=replace(BACK, step=48))),
    ):
        with pytest.raises(kind) as error:
            call()
        told.append(str(error.value))
    return told


def five_experts() -> float:
    """The layer's error on two ranks, the second of which has two experts and room for a third."""
    comm.init()
    rank, g = comm.rank(), torch.Generator().manual_seed(3)
    up, down = (torch.randn(6, *s, generator=g).bfloat16() for s in ((16, 24), (24, 16)))
    up[5:] = down[5:] = float("nan")
    x, ids = torch.randn(4, 16, generator=g).bfloat16(), torch.tensor([[0, 4], [3, 1], [4, 2], [4, 3]])
    own, mine = slice(3 * rank, 3 * rank + 3), slice(2 * rank, 2 * rank + 2)
    sent = ops.moe_dispatch(x[mine], ids[mine].int(), torch.ones(2, 2), num_experts=5)
    assert sent.sizes.tolist() == [[1, 1, 1], [2, 3, 0]][rank]
    h = ops.grouped_matmul(sent.expanded(), up[own], sent.sizes)
    out = ops.moe_combine(ops.grouped_matmul(h, down[own], sent.sizes), sent)
    want = sum(x.float()[mine, None] @ (up.float() @ down.float())[ids[mine, k]] for k in range(2))[:, 0]
    return float((out - want).abs().max() / want.abs().max())


def test_experts_that_ranks_do_not_divide(ranks: Any):
    """All ranks have as many matrices; what lies behind the last expert is never read."""
    assert max(ranks(2, target="sim").call(five_experts)) < 0.02


def test_refusals(ranks: Any):
    told = "\n".join(ranks(2, target="sim").call(refusals)[0])
    for part in (
        "w (4, 24, N): this rank's of 8 experts, as many matrices on all ranks",
        "num_experts=0",
        "gate='tanh'",
        "float16",
        "movers=3 of blocks=3",
        "step=48 of panels of columns * BN = 1 * 64 columns",
    ):
        assert part in told, told
