"""Gathers and scatters by copy engines, piece by piece. On processes without GPUs each copy is a plain one, at
the same place of the same sequence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed.tensor  # assert_close imports it: once here, not in each of the forked ranks

import tilescale
from tests.ranks.harness import RanksFailed, run_ranks
from tilescale import comm, ops
from tilescale.errors import TileValueError
from tilescale.ops.ranks import engine, gather_gemm, scatter
from tilescale.ops.ranks.groups import rows_of, share, team_of

# What copies brought is compared bit for bit with what kernels give, both compiled alike. The same operations run
# optimised in test_rank_ops.py.
pytestmark = pytest.mark.usefixtures("unoptimised")

#: rows of all ranks, columns: whole vectors, ragged, fewer rows than ranks, more than a block's numbers
SHAPES = ((12, 16), (10, 7), (2, 5), (36, 4096))


@contextmanager
def many_pieces() -> Iterator[None]:
    """As if copies cost nothing, so that parts are cut as long as they can be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "COPY", 0.0)
        yield


def drawn(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return (10 * x).to(dtype)


def own(rows: int) -> slice:
    first = min(rows, comm.rank() * share(rows, comm.world_size()))
    return slice(first, first + rows_of(comm.rank(), rows, comm.world_size()))


def gathers(rows: int, columns: int, dtype: torch.dtype, call: int) -> None:
    """Into new memory, a given result, in place, and symmetric memory."""
    every = drawn(rows, columns, dtype, call)
    x = every[own(rows)]
    assert torch.equal(ops.all_gather(x, rows=rows, how="engine"), every)
    out = torch.zeros_like(every)
    assert ops.all_gather(x, rows=rows, out=out, how="engine") is out and torch.equal(out, every)
    out.zero_()
    out[own(rows)] = x
    ops.all_gather(out[own(rows)], rows=rows, out=out, how="engine")
    assert torch.equal(out, every)
    reached = comm.empty((rows, columns), dtype)
    reached.zero_()
    assert torch.equal(ops.all_gather(x, rows=rows, out=reached, how="engine"), every)
    comm.barrier()


def sums(rows: int, columns: int, dtype: torch.dtype, call: int) -> None:
    """The bits that kernels give: into new memory, in place, with what follows a product."""
    x = drawn(rows, columns, dtype, 100 * call + comm.rank())
    want = ops.reduce_scatter(x, how="kernel")
    assert torch.equal(ops.reduce_scatter(x, how="engine"), want)
    kept = x.clone()
    ops.reduce_scatter(x, out=x[own(rows)], how="engine")
    kept[own(rows)] = want
    assert torch.equal(x, kept)
    bias, made = drawn(1, columns, dtype, call)[0], []
    for way in ("engine", "kernel"):
        made.append(torch.full_like(want, -1))
        scatter.scattered(kept, made[-1], rows, team_of(None), bias, "silu", way=way)
    assert torch.equal(*made)


def both() -> bool:
    """Many calls in a row, others that use the workspace between them."""
    comm.init()
    for k, (rows, columns) in enumerate(SHAPES):
        for dtype in (torch.float32, torch.bfloat16):
            gathers(rows, columns, dtype, k)
            ops.all_reduce(torch.ones(rows, columns), how="two_shot")
            sums(rows, columns, dtype, k)
        gathers(rows, columns, torch.int8, k)
        sums(rows, columns, torch.float64, k)
    none = torch.empty(0, 7)
    assert ops.all_gather(none, how="engine").shape == ops.reduce_scatter(none, how="engine").shape == (0, 7)
    return True


def both_in_pieces() -> bool:
    comm.init()
    world = max(2, comm.world_size())
    with many_pieces():
        assert len(engine.gathers(1 << 16, world)) > world and len(engine.sums(1 << 16, 16, 4, world)) > 1
        return both()


@pytest.mark.parametrize(
    "world", [pytest.param(1, marks=pytest.mark.slow), 2, 3, pytest.param(4, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("run", [both, both_in_pieces])
def test_on_processes(run: Any, world: int):
    assert run_ranks(world, run, timeout=120) == [True] * world


def products() -> bool:
    """Rows of each rank behind its own step, of uneven parts; the gathered rows where they are wanted."""
    comm.init()
    rank, world = comm.rank(), comm.world_size()
    config = gather_gemm.Config(fused=False, engine=True)
    for M in (12, 7, 2):
        every, w = drawn(M, 16, torch.float32, M), drawn(16, 8, torch.float32, 50 + rank)
        mine = every[own(M)]
        for whole in (False, True):
            made, rows, _ = gather_gemm.product_and_rows(
                mine, w, activation="relu", rows=M, config=config, whole=whole
            )
            torch.testing.assert_close(made, (every @ w).relu(), rtol=1e-4, atol=1e-3)
            theirs = [k for k in range(M) if not own(M).start <= k < own(M).stop]
            assert torch.equal(rows[theirs], every[theirs]) and (not whole or torch.equal(rows, every))
    return world > 1


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_products_by_engines(world: int):
    assert run_ranks(world, products, timeout=120) == [True] * world


def in_the_result() -> bool:
    """x, w or the bias in rows of out that are written before the last copy and the last product."""
    comm.init()
    x, w, bias = (torch.ones(*shape) for shape in ((2, 4), (4, 4), (4,)))
    for k, name in enumerate(("x", "w", "bias")):
        out = torch.zeros(2 * comm.world_size(), 4)
        args = [x, w, bias]
        args[k] = out[: args[k].shape[0]] if name != "bias" else out[0]
        with pytest.raises(TileValueError, match=f"engine=True: {name} and out share memory"):
            ops.all_gather_matmul(*args, out=out, config=gather_gemm.Config(fused=False, engine=True))
        assert not out.any()
    return True


def test_operands_that_lie_in_the_result_are_refused():
    assert run_ranks(3, in_the_result, timeout=60) == [True] * 3


def far() -> list[str]:
    """Where memory is not addressed: what is refused, and what is chosen."""
    comm.init()
    told, x = [], torch.ones(4, 8)
    config = gather_gemm.Config(fused=False, engine=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "able", lambda: False)
        for call in (
            lambda: tilescale.ops.all_gather(x, how="engine"),
            lambda: tilescale.ops.reduce_scatter(x, how="engine"),
            lambda: tilescale.ops.all_gather_matmul(x, torch.ones(8, 8), config=config),
        ):
            with pytest.raises(TileValueError, match="engine") as error:
                call()
            told.append(str(error.value))
    return told


def test_far_memory_is_refused_by_name():
    for gathered, scattered, multiplied in run_ranks(2, far):
        assert "TILESCALE_REMOTE" in gathered and '"engine"' not in scattered
        assert "TILESCALE_REMOTE=nvshmem" in multiplied


def different(call: str) -> Any:
    """Rank 1 has more rows."""
    comm.init()
    x, config = torch.ones(2 * comm.rank() + 4, 8), gather_gemm.Config(fused=False, engine=True)
    if call == "multiplied":
        return ops.all_gather_matmul(x, torch.ones(8, 8), config=config)
    return getattr(ops, call)(x, how="engine")


@pytest.mark.parametrize(
    "call, differ",
    [
        ("all_gather", "ranks [01] and [01] call different things"),
        ("reduce_scatter", "ranks [01] and [01] call different things"),
        ("multiplied", "with different shapes of symmetric arguments"),
    ],
)
def test_ranks_that_bring_different_shapes_are_told(call: str, differ: str):
    with pytest.raises(RanksFailed, match=f"{differ}: rank"):
        run_ranks(2, different, call)
