"""Numbers that ranks exchange so that they decide alike: a board in symmetric memory, on which each rank
writes its own line for all."""

from __future__ import annotations

from collections.abc import Sequence


def ranks() -> int:
    """How many ranks there are; joins them where there are several. Collective then."""
    from tilescale import comm

    if comm.world_size() > 1:
        comm.init()
    return comm.world_size()


def rank() -> int:
    from tilescale import comm

    return comm.rank()


def table(values: Sequence[float]) -> list[list[float]]:
    """``values`` of every rank, by rank; equally many on all. Collective."""
    from tilescale import comm

    n = ranks()
    if n == 1:
        return [list(values)]
    me = comm.rank()
    board = comm.empty((n, len(values)), "float64", like="numpy")
    for r in range(n):
        comm.peer(board, r)[me, :] = values
    comm.barrier()  # releases this rank's lines, acquires the others'
    out = board.tolist()
    # The board is given back when all have dropped it, and that is noticed at a later collective call: nobody
    # reads it by then.
    return out


def largest(values: Sequence[float]) -> list[float]:
    """For each place the largest of all ranks' values: equal on all ranks. Collective."""
    return [max(column) for column in zip(*table(values), strict=True)]


def first(values: Sequence[float]) -> list[float]:
    """Rank 0's values, on all ranks. Collective."""
    return table(values)[0]
