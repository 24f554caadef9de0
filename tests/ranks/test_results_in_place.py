"""``out=`` of collectives that shares memory with x: NCCL's forms in place are right, the others are refused
by every rank, wherever the tensors begin and whichever way the call goes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ranks.harness import run_ranks
from tilescale import comm, ops
from tilescale.errors import TileValueError

N = 3
#: name → ways
WAYS: dict[str, tuple[str | None, ...]] = {
    "all_gather": (None, "kernel", "packets", "engine"),
    "reduce_scatter": (None, "kernel", "packets", "engine"),
    "all_reduce": (None, "packets", "two_packets", "one_shot", "two_shot"),
    "broadcast": (None, "packets", "direct", "relayed"),
    "all_to_all": (None, "kernel"),
}


def filled(rows: int, begin: int, rank: int) -> torch.Tensor:
    """(rows, 4) of numbers that tell their rank, which begin at a number of any memory."""
    whole = torch.empty(rows * 4 + 8)[begin : begin + rows * 4].view(rows, 4)
    return whole.copy_(torch.arange(rows * 4).view(rows, 4) + 100 * (rank + 1))


def in_place(name: str, how: str | None, begin: int) -> None:
    rank, size = comm.rank(), comm.world_size()
    before = [filled(2 * size, begin, r) for r in range(size)]
    x, rows = (
        before[rank].clone() if begin == 0 else filled(2 * size, begin, rank),
        slice(2 * rank, 2 * rank + 2),
    )
    if name == "all_gather":
        want = torch.cat([before[r][2 * r : 2 * r + 2] for r in range(size)])
        got = ops.all_gather(x[rows], out=x, how=how)
    elif name == "reduce_scatter":
        want = x.clone()
        want[rows] = sum(b[rows] for b in before)
        got = ops.reduce_scatter(x, out=x[rows], how=how)
        assert torch.equal(got, want[rows])
    elif name == "all_reduce":
        want, got = sum(before, torch.zeros(())), ops.all_reduce(x, out=x, how=how)
    else:
        want, got = before[1], ops.broadcast(x, 1, out=x.view(2 * size, 4), how=how)
    assert torch.equal(x, want), (name, how, begin, x, want)
    assert got.data_ptr() >= x.data_ptr()


def overlapping(name: str, how: str | None, begin: int) -> None:
    """One row further than in place."""
    rank, size = comm.rank(), comm.world_size()
    both = filled(2 * size + 1, begin, rank)
    x, out, kept = both[:-1], both[1:], both.clone()
    if name == "all_gather":
        x = x[2 * rank : 2 * rank + 2]
    elif name == "reduce_scatter":
        out = out[2 * rank : 2 * rank + 2]
    more = {"broadcast": {"root": 0}}.get(name, {})
    with pytest.raises(TileValueError) as refused:
        getattr(ops, name)(x, out=out, how=how, **more)
    text = str(refused.value)
    assert f"{name}: x and out share memory" in text and f"write instead: {name}(x.clone(), out=out)" in text
    assert ("in place" in text) == (name != "all_to_all") and torch.equal(both, kept)


def work() -> bool:
    comm.init()
    for name, ways in WAYS.items():
        for how in ways:
            for begin in (0, 1, 4):
                if name != "all_to_all":
                    in_place(name, how, begin)
                overlapping(name, how, begin)
    comm.barrier()
    return True


def uneven() -> bool:
    """Ranks of fewer rows, of none, and rows that lie between those of the other."""
    comm.init()
    rank, size = comm.rank(), comm.world_size()
    for rows, how in itertools.product((2, 4), (None, "engine")):
        each = -(-rows // size)
        own = slice(min(rows, rank * each), min(rows, (rank + 1) * each))
        x = filled(rows, 0, rank)
        ops.all_gather(x[own], rows=rows, out=x, how=how)
        assert torch.equal(
            x, torch.cat([c + 100 * (r + 1) for r, c in enumerate(filled(rows, 0, -1).split(each))])
        )
        x = filled(rows, 0, rank)
        ops.reduce_scatter(x, out=x[own], how=how)
        assert torch.equal(x[own], sum(filled(rows, 0, r)[own] for r in range(size)))
    stripes = filled(4, 0, rank)
    with pytest.raises(TileValueError, match="share memory"):
        ops.broadcast(stripes[::2], 0, out=stripes[1:3])
    ops.broadcast(stripes[::2].narrow(0, 0, 1), 0, out=stripes[1:2])
    comm.barrier()
    return True


@pytest.mark.parametrize("run", [work, uneven])
def test_on_processes(run: Callable[[], bool]):
    assert run_ranks(N, run) == [True] * N


@pytest.mark.parametrize("run", [work, uneven])
def test_on_simulated_ranks(ranks: Any, run: Callable[[], bool]):
    assert ranks(N, target="sim").call(run) == [True] * N
