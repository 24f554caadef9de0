"""A gather that crosses beside what its caller launches until he asks for it."""

from __future__ import annotations

import pytest
import torch

from tests.ranks.harness import run_ranks
from tilescale import comm, ops
from tilescale.ops.ranks.gather import begin
from tilescale.ops.ranks.groups import rows_of, team_of
from tilescale.ops.ranks.workspace import workspace

COLUMNS = 5


def whole(rows: int, turn: int) -> torch.Tensor:
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(turn))


def work(rows: int, least: int) -> bool:
    """Two gathers one behind the other, each with sums of all ranks inside, and what is left of the first result
    when the second one is begun. Whether they lay in the group's memory."""
    comm.init()
    rank, size = comm.rank(), comm.world_size()
    first = min(rows, rank * -(-rows // size))
    kept = []
    for turn in range(2):
        every = whole(rows, turn)
        result = begin(every[first : first + rows_of(rank, rows, size)], rows, least=least)
        for _ in range(2):  # of the group's memory, too
            total = ops.all_reduce(torch.full((rows, COLUMNS), rank + 1.0))
            assert bool((total == size * (size + 1) / 2).all())
        found = result()
        assert torch.equal(found, every)
        kept.append(found.clone())
    assert torch.equal(kept[0], whole(rows, 0))
    memory = workspace(team_of(None))._memory.get("gather")
    comm.barrier()
    return memory is not None


@pytest.mark.parametrize(
    "ranks, rows, least, beside",
    [(1, 7, 0, False), (2, 8, 0, True), (3, 7, 0, True), (3, 2, 0, True), (2, 8, 1 << 20, False)],
)
def test_a_gather_that_is_begun_early(ranks: int, rows: int, least: int, beside: bool):
    assert run_ranks(ranks, work, rows, least) == [beside] * ranks
