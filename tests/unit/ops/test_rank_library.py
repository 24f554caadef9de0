"""tilescale.ops of several ranks on simulated ranks, under orders that look for faults: every small case
against float64; what is refused; the lists."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import tilescale.ops
from tests.unit.ops.rank_cases import right, run
from tilescale import comm
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import HOME, MODULES, RANK_MODULES, load_ranks
from tilescale.ops.case import as_tuple, worst
from tilescale.ops.ranks import gather_gemm, gemm_reduce, gemm_scatter, ring_backward
from tilescale.ops.ranks.case import Case
from tilescale.ops.ranks.groups import rows_of, share


def _on(world: int) -> list[Any]:
    """All small cases on so many ranks."""
    return [
        pytest.param(
            m, c, world, id=f"{load_ranks(m).name}: {c}-{world}",
            marks=[pytest.mark.slow] if k > (1 if world == 1 else 7) and not {"engine", "abreast"} & {*c.shape} else [],
        )
        for m in RANK_MODULES
        for k, c in enumerate(c for c in load_ranks(m).cases if c.small)
    ]  # fmt: skip


# the first eight cases of each, alone the first two, and newer ones; the others under the marker slow
@pytest.mark.parametrize("module, case, world", [*_on(3), *_on(1)])
def test_meaning(ranks: Any, module: str, case: Case, world: int):
    """Within what rounding explains, the same bits twice, nothing beside the result touched."""
    op = load_ranks(module)
    again = case == op.cases[0]  # new data in the same memory, too
    results = ranks(world, target="sim").call(run, module, dict(case.shape), seeds=1 + again)
    right(results, case, alike=op.alike)


@pytest.mark.parametrize("module", RANK_MODULES)
def test_lists(module: str):
    """Each operation is tested small and ragged and is measured, with something to be measured against."""
    op = load_ranks(module)
    assert len({str(c) for c in op.cases}) == len(op.cases), "a case stands in the list twice"
    assert any(c.small for c in op.cases) and any(c.bar for c in op.cases) and "library" in op.peers
    for c in op.cases:
        assert not (c.small and c.bar)
        if c.bar:
            assert op.remote(world=4, **c.shape) > 0 and op.pick(world=4, **c.shape).way in op.ways(
                world=4, **c.shape
            )


def test_names():
    assert set(HOME.values()) == {*MODULES, *RANK_MODULES}
    assert all(HOME[name].startswith("ranks.") == (HOME[name] in RANK_MODULES) for name in HOME)


def test_rows_are_split_as_torch_splits_them():
    for rows in (0, 1, 2, 5, 7, 8, 64, 5000):
        for world in range(1, 9):
            parts = [len(p) for p in torch.arange(rows).chunk(world)] if rows else []
            parts += [0] * (world - len(parts))
            assert [rows_of(r, rows, world) for r in range(world)] == parts[:world], (rows, world)
            assert share(rows, world) * world >= rows


def refusals() -> list[str]:
    """What each wrong call of a rank is told."""
    comm.init()
    x, w = torch.ones(4, 8), torch.ones(8, 6)
    gather, product = tilescale.ops.all_gather, tilescale.ops.all_gather_matmul
    add, scatter, spread = tilescale.ops.all_reduce, tilescale.ops.reduce_scatter, tilescale.ops.broadcast
    product_sum = tilescale.ops.matmul_all_reduce
    q, sums = torch.ones(1, 2, 6, 8).bfloat16(), torch.zeros(1, 2, 6)
    backward, heads = tilescale.ops.ring_attention_backward, tilescale.ops.ulysses_attention
    odd = ring_backward.Config(ring_backward.Tiles(64, 16), ring_backward.Tiles(16, 64), high=5)
    wrong: list[tuple[type[Exception], Any]] = [
        (TileTypeError, lambda: gather([1.0])),
        (TileTypeError, lambda: gather(x, group=[0, 1])),
        (TileTypeError, lambda: gather(x, group="tp")),
        (TileValueError, lambda: gather(torch.tensor(1.0))),
        (TileValueError, lambda: gather(x, rows=100)),
        (TileValueError, lambda: gather(x, out=torch.ones(4, 8))),
        (TileTypeError, lambda: gather(x, out=torch.ones(8, 8).double())),
        (TileValueError, lambda: gather(x, how="library")),
        (TileValueError, lambda: product(x, torch.ones(7, 6))),
        (TileTypeError, lambda: product(x, w.double())),
        (TileValueError, lambda: product(x, w, activation="tanh")),
        (TileValueError, lambda: product(x, w, torch.ones(5))),
        (TileTypeError, lambda: product(x, w, out_dtype=torch.float16)),
        (TileValueError, lambda: product(torch.ones(8), w)),
        (TileValueError, lambda: product(x, w, config=gather_gemm.Config(BM=64, high=48))),
        (TileValueError, lambda: product(x, w, config=gather_gemm.Config(wide=4, groups=2))),
        *(
            (TileValueError, lambda of=of: product(x, w, config=gather_gemm.Config(**of)))
            for of in ({"high": 0}, {"wide": 0}, {"groups": 0}, {"blocks": -1})
        ),
        (TileValueError, lambda: product_sum(x, w, config=gemm_reduce.Config(run=0))),
        (
            TileValueError,
            lambda: tilescale.ops.matmul_reduce_scatter(x, w, config=gemm_scatter.Config(lead=-1)),
        ),
        (TileTypeError, lambda: add(x.int())),
        (TileValueError, lambda: add(x, order="any way")),
        (TileValueError, lambda: add(x, how="library")),
        (TileValueError, lambda: add(x, how="three_shot")),
        (TileTypeError, lambda: scatter(x.int())),
        (TileValueError, lambda: scatter(torch.tensor(1.0))),
        (TileValueError, lambda: scatter(x, out=x)),
        (TileValueError, lambda: spread(x, 2)),
        (TileValueError, lambda: spread(x, how="library")),
        (TileValueError, lambda: product_sum(x, w, inner=9)),
        (TileValueError, lambda: product_sum(x, w, inner=0)),
        (TileValueError, lambda: product_sum(torch.ones(4, 0), torch.ones(0, 6))),
        (TileValueError, lambda: backward(q, q, q, q, q, sums[:, :1])),
        (TileTypeError, lambda: backward(q, q, q, q, q, sums.double())),
        (TileValueError, lambda: backward(q[:, :, :4], q, q, q, q, sums)),
        (TileValueError, lambda: backward(q, q, q, q, q, sums, config=odd)),
        (TileValueError, lambda: heads(q, q, q, layout="striped")),
        (TileValueError, lambda: heads(q, q[:, :, :4], q)),
        (TileTypeError, lambda: heads(q, q.float(), q)),
        (TileValueError, lambda: heads(q, q, q, longest=6)),
        (TileValueError, lambda: tilescale.ops.ulysses_attention_backward(q, q, q, q, q, sums[..., :5])),
    ]
    told = []
    for kind, call in wrong:
        with pytest.raises(kind) as error:
            call()
        told.append(str(error.value))
    return told


def test_refusals(ranks: Any):
    texts = ranks(2, target="sim").call(refusals)
    told = "\n".join(texts[0])
    for part in (
        "root=2 of 2 ranks",
        "order='any way'",
        "inner=9",
        '"one_shot", "two_shot"',
        "group=[0, 1]",
        "rows=100",
        "expected: (8, 8), contiguous",
        "activation='tanh'",
        "process group",
        "expected: a multiple of 16, the queries of a tile",
        "an lse of (1, 1, 6)",
        "layout='striped'",
        "longest=6",
        "wide=0 of a Config\n  expected: 1 at least",
        "lead=-1 of a Config\n  expected: 0 at least",
        "whole steps of BK=64: of K=8 one has 4",
    ):
        assert part in told, told


def test_pieces_of_rows_reach_into_no_other_row_of_tiles():
    """A tile of whole rows of one rank awaits the pieces that begin in it."""
    for K, M, dtype in itertools.product(
        (100, 680, 2560, 3072, 5120, 6144), (512, 8192), ("bfloat16", "float32")
    ):
        how = gather_gemm.choose(M, 4096, K, 4, dtype)
        assert how.BM % how.high == 0, how


def in_a_team(module: str, shape: dict[str, Any]) -> Any:
    """The operation on ranks 2 and 0 of 3, in this order, while rank 1 does nothing."""
    comm.init()
    op, team = load_ranks(module), comm.team([2, 0])
    if not team:
        with pytest.raises(TileTypeError, match="group"):
            op.run(**op.draw(**shape), group=[2, 0])
        return None
    everyone = [op.draw(**shape, rank=r, world=2) for r in range(2)]
    want = op.reference(everyone)[team.rank]
    got = op.run(**everyone[team.rank], group=team)
    return all(worst(g, w) <= 1 for g, w in zip(as_tuple(got), as_tuple(want), strict=True))


@pytest.mark.parametrize("module", RANK_MODULES)
def test_a_team(ranks: Any, module: str):
    case = next(c for c in load_ranks(module).cases if c.small)
    assert ranks(3, target="sim").call(in_a_team, module, dict(case.shape)) == [True, None, True]
