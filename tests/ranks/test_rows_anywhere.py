"""Rows that begin anywhere in their storage, none of them, and views that are conjugated when they are read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tests.ranks.harness import run_ranks
from tilescale import comm, ops
from tilescale.ops.ranks.groups import rows_of


def odd(rows: int, columns: int) -> torch.Tensor:
    """(rows, columns) of −1 that begin at 16 bytes, in a storage that does not."""
    memory = np.full(rows * columns + 8, -1, np.float32)
    begin = next(k for k in range(1, 5) if (memory.ctypes.data + 4 * k) % 16 == 4)
    made = torch.from_numpy(memory[begin:])[3 : 3 + rows * columns].view(rows, columns)
    assert made.data_ptr() % 16 == 0 and made.storage_offset() % 4
    return made


def work() -> bool:
    comm.init()
    rank, size = comm.rank(), comm.world_size()
    odd = torch.arange(13, dtype=torch.bfloat16)[1:].view(4, 3)
    first = min(4, 2 * rank)
    assert torch.equal(ops.all_gather(odd[first : first + rows_of(rank, 4, size)], rows=4), odd)
    raw = torch.arange(200, dtype=torch.uint8)
    for begin in range(16):
        mine = raw[begin:][16 - begin : 112 - begin]  # at 16 bytes, or where its storage begins
        for how in (None, "engine"):
            assert torch.equal(ops.all_gather(mine, how=how).view(size, -1), mine.expand(size, -1))
    z = torch.complex(torch.arange(6.0) + rank, torch.arange(6.0)).conj()
    for how in (None, "engine"):
        every = ops.all_gather(z, how=how).view(size, 6)
        assert torch.equal(every.real, torch.arange(6.0) + torch.arange(size)[:, None])
        assert torch.equal(every.imag, -torch.arange(6.0).expand(size, 6))
    assert torch.equal(ops.broadcast(z, 1).imag, -torch.arange(6.0))
    comm.barrier()
    return True


def test_rows_begin_anywhere():
    assert run_ranks(3, work) == [True] * 3


def storages() -> bool:
    """Operands and results in storages that begin anywhere; rows of which there are none."""
    comm.init()
    rank, size = comm.rank(), comm.world_size()
    every = torch.arange(size * 64.0).view(-1, 8)
    rows = slice(8 * rank, 8 * rank + 8)
    ways: dict[Callable[..., torch.Tensor], tuple[str, ...]] = {
        ops.all_gather: ("packets", "kernel", "engine"),
        ops.reduce_scatter: ("packets", "kernel", "engine"),
        ops.all_reduce: ("packets", "two_packets", "one_shot", "two_shot"),
        ops.broadcast: ("packets", "direct", "relayed"),
    }
    for call, hows in ways.items():
        x = every[rows] if call == ops.all_gather else every
        want = every if call in (ops.all_gather, ops.broadcast) else size * every
        want = want[rows] if call == ops.reduce_scatter else want
        for how in hows:
            out, given = odd(*want.shape), odd(*x.shape).copy_(x)
            assert torch.equal(call(given, out=out, how=how), want) and torch.equal(out, want), (call, how)
    out, sizes = odd(4 * size, 8), torch.full((size,), 4, dtype=torch.int32)
    ops.all_to_all(odd(4 * size, 8).fill_(rank), sizes, rows=4 * size, out=out)
    assert torch.equal(out, torch.arange(size).repeat_interleave(4)[:, None].expand(-1, 8).float())
    for t in (8, 0 if rank == 1 else 8):  # and none, from an odd place on
        x = odd(8, 8).copy_(every[rows])[:t]
        x = x if t else torch.ones(9)[3:3].view(0, 8)
        experts = torch.arange(t, dtype=torch.int32).view(t, 1) % size
        sent = ops.moe_dispatch(x, experts, num_experts=size, tokens=8)
        made = odd(*sent.expanded().shape).copy_(sent.expanded())
        assert torch.equal(ops.moe_combine(made, sent), x)
    return True


def test_storages_begin_anywhere():
    assert run_ranks(3, storages) == [True] * 3


def one_number() -> bool:
    """A single number of every second one, as an operand and as a result."""
    comm.init()
    rank, size = comm.rank(), comm.world_size()
    for dtype in (torch.float32, torch.complex128, torch.uint8):
        x = torch.full((size, 2), rank + 1).to(dtype)[:1, 1]
        want = torch.arange(1, size + 1).to(dtype)
        for how in ("kernel", "engine"):
            assert torch.equal(ops.all_gather(x, how=how), want)
        for how in ("direct", "relayed"):
            assert torch.equal(
                ops.broadcast(x, 1, how=how, out=torch.zeros(3, dtype=dtype)[::2][:1]), want[1:2]
            )
    assert ops.all_reduce(x.float()[:, None], out=torch.zeros(1, 2)[:, :1]) == sum(range(1, size + 1))
    return True


def test_a_number_has_any_stride():
    assert run_ranks(3, one_number) == [True] * 3
