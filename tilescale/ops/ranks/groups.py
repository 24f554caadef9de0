"""Who takes part in an operation, and which rows are whose."""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch

from tilescale import comm
from tilescale.comm.backend import Team
from tilescale.errors import TileTypeError, TileValueError

#: None: all ranks; else a process group, a mesh of one axis, or a team
Group = Any


def team_of(group: Group) -> Team:
    """The team of the ranks that take part, this one among them; made the first time that they are named,
    which is collective among them.

    Args:
        group: None (all ranks), a torch ProcessGroup, a DeviceMesh of one axis, or what `comm.team` returns.

    Raises:
        TileTypeError, TileValueError: something else, or this rank is not in it.
        CommError: `comm.init()` has not been called.
    """
    made: Any
    if group is None:
        made = comm.world_team()
    elif isinstance(group, (list, tuple, range)):
        raise TileTypeError(
            f"group={group!r}",
            expected="None, a ProcessGroup, a DeviceMesh of one axis or a team",
            hint="group=tilescale.comm.team(ranks), made once",
        )
    else:
        made = comm.team(group)
    if not isinstance(made, Team):
        raise TileValueError(
            f"rank {comm.rank()} calls an operation of a group that it is not in",
            expected="the call on the group's ranks alone",
        )
    return made


def process_group(group: Group) -> Any:
    """That of a mesh of one axis; anything else as it is."""
    return group.get_group() if type(group).__name__ == "DeviceMesh" else group


def members_of(group: Any) -> tuple[int, ...] | None:
    """The ranks of a process group, in their order; None of one that was destroyed."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return None
    try:
        return tuple(distributed.get_process_group_ranks(group))
    except (KeyError, RuntimeError, ValueError):  # as versions of torch say that there is no such group
        return None


def library(group: Group, team: Team, x: torch.Tensor) -> Any:
    """The process group with these ranks in this order, whose library (NCCL on GPUs, gloo) may take a call of
    x; None where there is none."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    group = process_group(group)
    found = group if isinstance(group, distributed.ProcessGroup) else distributed.group.WORLD
    name = str(distributed.get_backend(found))
    on_gpu = x.device.type != "cpu"
    reached = name not in ("nccl", "gloo") or (name == "nccl") == on_gpu
    return found if reached and tuple(distributed.get_process_group_ranks(found)) == team.members else None


def gather_into(whole: torch.Tensor, x: torch.Tensor, group: Any) -> None:
    """The library's gather of equal parts, by the name that this version of torch has for it."""
    distributed = torch.distributed
    getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)(whole, x, group=group)


def scatter_into(part: torch.Tensor, x: torch.Tensor, group: Any) -> None:
    """The library's reduce-scatter of equal parts."""
    distributed = torch.distributed
    getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)(part, x, group=group)


def share(rows: int, ranks: int) -> int:
    """Rows of each rank but the last ones, which have fewer or none: ceil(rows / ranks)."""
    return -(-rows // ranks)


def rows_of(rank: int, rows: int, ranks: int) -> int:
    """How many of ``rows`` a rank has."""
    each = share(rows, ranks)
    return max(0, min(each, rows - rank * each))


def span_of(rank: int, rows: int, ranks: int) -> slice:
    """Which of all rows those are."""
    first = min(rows, rank * share(rows, ranks))
    return slice(first, first + rows_of(rank, rows, ranks))


def filled(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x with zeros behind its rows, where it has fewer: parts as the library takes them, all alike."""
    missing = rows - x.shape[0]
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def number_of(value: Any, what: str, least: int = 0) -> int:
    """A number of things that a caller says.

    Raises:
        TileTypeError, TileValueError: no integer, or a smaller one than ``least``.
    """
    try:
        made = operator.index(value)
    except TypeError:
        raise TileTypeError(f"{what}={value!r}", expected="an int") from None
    if made < least:
        raise TileValueError(f"{what}={made}", expected=f"{least} at least")
    return made


def total(rows: int | None, mine: int, team: Team, what: str) -> int:
    """All ranks' rows: ``rows``, or as many on each rank as here.

    Raises:
        TileTypeError, TileValueError: ``rows`` is no number of rows, or this rank has another number of them
        than its share.
    """
    if rows is None:
        return mine * team.size
    rows = number_of(rows, "rows")
    want = rows_of(team.rank, rows, team.size)
    if mine != want:
        raise TileValueError(
            f"{what} has {mine} rows on rank {team.rank} of {team.size}, of rows={rows} in all",
            expected=f"{want}: rank r has rows r·{share(rows, team.size)} and on, as torch.chunk splits them",
        )
    return rows


def same_device(tensor: torch.Tensor, memory: torch.Tensor, what: str) -> None:
    """Ranks reach each other's memory on one kind of device.

    Raises:
        TileTypeError: ``tensor`` lies elsewhere than symmetric memory.
    """
    if tensor.device != memory.device:
        raise TileTypeError(
            f"{what} lies on {tensor.device}, the ranks' symmetric memory on {memory.device}",
            expected=f"a tensor on {memory.device}",
            hint="TILESCALE_TARGET=cuda puts symmetric memory on GPUs, cpu into the machine's memory",
        )
