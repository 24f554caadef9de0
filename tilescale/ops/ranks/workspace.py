"""Symmetric memory that the kernels of operations work in.

Symmetric memory is allocated by all ranks of a team together, so an operation cannot take some whenever it
likes: each team has one `Workspace`, a piece of memory and a set of counters, which all operations of the
team share. Launches of a team are one sequence, and each is complete when everything aimed at this rank has
landed; so the next launch may use the same bytes.

An operation whose result stays in symmetric memory until its next call keeps a piece apart, by a name.

Both grow to the largest that was asked for, and grow on all ranks at the same call, because what an operation
asks for follows from what all ranks agree on (extents, dtypes, the size of the team), in the same order of
calls. A rank that calls something else is named by the allocation or by the launch.

A workspace lives as long as its team, which is until `comm.finalize`, or until `release`. A CUDA graph holds
addresses: memory that a captured launch uses is kept when the workspace outgrows it. Growing itself is a call
of the hosts and cannot be captured.
"""

from __future__ import annotations

import ctypes
import functools
import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from tilescale import comm, native
from tilescale.comm.backend import Team
from tilescale.errors import CommError, TileValueError
from tilescale.ops.prepared import Plans
from tilescale.ops.ranks.groups import Group, same_device, team_of

#: bytes by which a workspace grows, and where the tensors in it begin
STEP, ALIGN = 2 << 20, 256
#: where a workspace keeps its counters
COUNTERS = "counters"

_of_team: weakref.WeakKeyDictionary[Team, Workspace] = weakref.WeakKeyDictionary()


def workspace(team: Team) -> Workspace:
    """The team's, made empty at its first operation.

    Raises:
        TileValueError: a team, which a result may have kept, of a job that was left.
    """
    if team not in _of_team:
        comm.team(team)
        _of_team[team] = Workspace(team)
    return _of_team[team]


def release(group: Group = None) -> None:
    """Gives back the symmetric memory of a group's operations; collective. The next operation takes new
    memory. CUDA graphs that were captured before must not be replayed."""
    _of_team.pop(team_of(group), None)


def size(group: Group = None) -> int:
    """Bytes of symmetric memory that a group's operations hold on this rank, as on each other one: pieces of
    memory, counters and boxes of packets, also those that a CUDA graph keeps."""
    found = _of_team.get(team_of(group))
    return 0 if found is None else found.size


def _dropped(teams: Iterable[Team]) -> None:
    for team in teams:
        _of_team.pop(team, None)


comm.at_finalize(_dropped)


class Workspace:
    """A team's symmetric memory for its operations, which are called in the same order on all its ranks."""

    def __init__(self, team: Team):
        self._team = weakref.ref(team)  # the table's keys are to die with the heap
        self._behind = weakref.ref(comm.behind())
        #: what calls of the team's operations do
        self.plans = Plans()
        self._memory: dict[str, Any] = {}
        #: by the name of a piece and a dtype the piece as numbers of that
        self._numbers: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._boxes: dict[tuple[int, torch.dtype, str], Any] = {}
        self._kept: list[Any] = []  # outgrown, in a CUDA graph
        #: by the name of a piece that is kept apart: whose result lies there now
        self.owner: dict[str, object] = {}
        self._captured = False
        self._stream: int | None = None  # that used the memory last

    @property
    def team(self) -> Team:
        team = self._team()
        assert team is not None
        return team

    def say(self, mark: int, what: bytes) -> str:
        """See `comm.backend.Backend.say`."""
        team, behind = self.team, self._behind()
        return "" if team.size == 1 or behind is None else behind.say(team, mark, what)

    @property
    def size(self) -> int:
        """Bytes."""
        held = [*self._memory.values(), *self._boxes.values(), *self._kept]
        return sum(t.numel() * t.element_size() for t in held)

    def tensors(
        self,
        like: torch.Tensor,
        *wanted: tuple[tuple[int, ...], torch.dtype],
        what: str = "x",
        apart: str = "",
        clear: bool = False,
    ) -> list[torch.Tensor]:
        """Symmetric tensors of these shapes and dtypes, side by side, whose contents are undefined. All calls
        share their memory, but for those that name one ``apart``, which share it with others of that name.
        ``clear``: no element is one that was never written: memory is zero when it is new.

        Raises:
            TileTypeError: ``like``, an operand, lies on another device than symmetric memory.
            TileValueError: memory has to grow while a CUDA graph is being captured.
        """
        places, size = _side_by_side(wanted)
        memory = self._memory.get(apart)
        if memory is None or memory.numel() < size:
            memory = None  # so that the table alone holds the one that is dropped
            memory = self._grown(apart, size, torch.uint8)
            if clear:
                memory.zero_()
        same_device(like, memory, what)
        self._order(memory)
        made = []
        for shape, dtype, strides, first in places:
            numbers = self._as(apart, dtype)
            made.append(numbers.as_strided(shape, strides, numbers.storage_offset() + first))
        return made

    def counters(self, *shape: int) -> torch.Tensor:
        """What a ``T.Signal(shape)`` takes: zero, as each launch leaves them."""
        count = math.prod(shape)
        counters = self._memory.get(COUNTERS)
        if counters is None or counters.numel() < count:
            counters = None
            counters = self._grown(COUNTERS, count, None)
        made: torch.Tensor = counters.as_strided(shape, _strides(shape))
        return made

    def _as(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A piece as numbers."""
        found = self._numbers.get((name, dtype))
        if found is None:
            found = self._numbers[name, dtype] = self._memory[name].view(dtype)
        return found

    def box(self, like: torch.Tensor, columns: int, dense: str = "") -> torch.Tensor:
        """What a ``T.Packets((team's size, columns), like's dtype)`` takes; with a word for ``dense`` a dense
        one, apart from those of other words. Boxes are kept: one for each number of columns, dtype and word,
        of which operations ask for few. A kernel that takes a box of another kernel's shape may share it:
        each takes all packets that come, so that none is left to the next."""
        key = (columns, like.dtype, dense)
        if key not in self._boxes:
            team = self._team()
            assert team is not None
            _refuse_capture()
            shape = (team.size, columns)
            made = comm.packets(shape, like.dtype, dense=bool(dense), like="torch", team=team)
            same_device(like, made, "x")
            self._boxes[key] = made
        found: torch.Tensor = self._boxes[key]
        return found

    def _grown(self, name: str, count: int, dtype: torch.dtype | None) -> Any:
        """A larger piece; the old one is dropped first, so that the heap has room for both only where a graph
        needs both."""
        team = self.team
        _refuse_capture()
        for key in [k for k in self._numbers if k[0] == name]:
            del self._numbers[key]
        if (old := self._memory.pop(name, None)) is not None:
            if self._captured:
                self._kept.append(old)
            del old
            comm.barrier(team)  # collects what all ranks have dropped
        if dtype is None:
            made = comm.signals((-(-count // 512) * 512,), like="torch", team=team)
        else:
            made = comm.empty((-(-count // STEP) * STEP,), dtype, like="torch", team=team)
        self._memory[name] = made
        return made

    def _order(self, memory: torch.Tensor) -> None:
        """Launches on several streams are one sequence; so is what an operation copies into this memory
        before its launch, by torch."""
        if not memory.is_cuda:
            return
        if torch.cuda.is_current_stream_capturing():
            self._captured = True
        stream = torch.cuda.current_stream(memory.device).cuda_stream
        if stream != self._stream and native.library().ts_gpu_order(ctypes.c_int64(stream)):
            raise CommError("the streams of two operations of several ranks cannot be ordered")
        self._stream = stream


@functools.lru_cache(maxsize=4096)
def _side_by_side(
    wanted: tuple[tuple[tuple[int, ...], torch.dtype], ...],
) -> tuple[tuple[tuple[tuple[int, ...], torch.dtype, tuple[int, ...], int], ...], int]:
    """Of tensors of these shapes and dtypes: shape, dtype, strides, and the number of which it begins in
    memory of its dtype; and the bytes of all."""
    places, at = [], 0
    for shape, dtype in wanted:
        places.append((tuple(shape), dtype, _strides(shape), at // dtype.itemsize))
        at += -(-math.prod(shape) * dtype.itemsize // ALIGN) * ALIGN
    return tuple(places), at


@functools.lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return tuple(math.prod(max(1, n) for n in shape[k + 1 :]) for k in range(len(shape)))


def _refuse_capture() -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise TileValueError(
            "an operation needs more symmetric memory while a CUDA graph is being captured",
            hint="call it once with the same shapes before the capture, on all ranks",
        )
