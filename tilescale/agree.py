"""Numbers that ranks exchange so that they decide alike: a board in symmetric memory, on which each rank
writes its own line for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilescale.comm.backend import Team


def ranks() -> int:
    """How many ranks there are; joins them where there are several. Collective then."""
    from tilescale import comm

    if comm.world_size() > 1:
        comm.init()
    return comm.world_size()


def rank() -> int:
    from tilescale import comm

    return comm.rank()


def table(values: Sequence[float], team: Team | None = None) -> list[list[float]]:
    """``values`` of every rank of a team (all ranks without), by rank; equally many on all. Collective."""
    from tilescale import comm

    n = team.size if team is not None else ranks()
    if n == 1:
        return [list(values)]
    me = team.rank if team is not None else comm.rank()
    board = comm.empty((n, max(1, len(values))), "float64", like=_kind(), team=team)
    for r in range(n):
        line = comm.peer(board, r)[me, : len(values)]
        line[:] = line.new_tensor(values) if hasattr(line, "new_tensor") else values
    comm.barrier(team)  # releases this rank's lines, acquires the others'
    out: list[list[float]] = board[:, : len(values)].tolist()
    # The board is given back when all have dropped it, and that is noticed at a later collective call: nobody
    # reads it by then.
    return out


def _kind() -> str:
    """Of tensors by which the host reaches symmetric memory."""
    from tilescale import comm

    memory = getattr(comm.behind(), "memory", None)
    return "numpy" if getattr(memory, "device", None) is None else "torch"


def largest(values: Sequence[float]) -> list[float]:
    """For each place the largest of all ranks' values: equal on all ranks. Collective."""
    return [max(column) for column in zip(*table(values), strict=True)]


def first(values: Sequence[float]) -> list[float]:
    """Rank 0's values, on all ranks. Collective."""
    return table(values)[0]
