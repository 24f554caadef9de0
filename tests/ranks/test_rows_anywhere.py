"""Rows that begin anywhere in their storage, none of them, and views that are conjugated when they are read."""

from __future__ import annotations

import torch

from tests.ranks.harness import run_ranks
from tilescale import comm, ops
from tilescale.ops.ranks.groups import rows_of


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
