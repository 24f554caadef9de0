"""Allocation in symmetric memory: collective, at equal offsets on all ranks of a team, and collected when all
have dropped it.

How ranks agree. Each collective call on a team is one exchange of letters: what is asked for, as text (so
that a difference can be shown), and numbers. An allocation proposes the lowest free offset at or after
``start``; when proposals differ (a rank may be in other teams, with memory of their own) the largest becomes
the next ``start``, until all propose the same.

How memory is freed. A dropped tensor is stamped, at the entry to the team's next collective call, with that
call's number, in the last word of its memory on this rank. After the exchange of call n, a rank reads the
others' stamps: all between 1 and n means free. Every rank sees the same stamps up to n, so all decide alike;
later stamps (of ranks that are ahead) do not count. What call n freed is handed out from call n + 1 on: until
then slower ranks may still be reading the stamps.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tilescale.comm import bootstrap
from tilescale.comm.backend import Allocation, Block, Team
from tilescale.comm.bootstrap import World
from tilescale.comm.extents import Extents
from tilescale.comm.shm import LETTER, MAX_TEAMS, PAGE, Shm
from tilescale.errors import CommError

if TYPE_CHECKING:
    from tilescale.comm.arena import Arena

_NUMBERS = 4
_LETTER = struct.Struct(f"<{_NUMBERS}q{LETTER - 8 * _NUMBERS}s")


class Heap:
    """This rank's symmetric heap over a backend."""

    def __init__(self, memory: Shm | Arena):
        self.memory = memory
        self.teams: dict[tuple[int, ...], Team] = {}
        self._free, self._backed = Extents(), Extents()
        self._free.add(memory.control, memory.segment)
        self._allocations: dict[int, Allocation] = {}
        everyone = tuple(range(memory.world.size))
        self.world = Team(everyone, memory.world.rank, 0)
        memory.make_team(0, everyone, [0] * len(everyone))
        self.teams[everyone] = self.world
        self._slots = iter(range(1, MAX_TEAMS))
        #: whether ranks may go on without one that has died
        self.recovers = False
        self._lock = threading.RLock()  # threads of a program that allocate: one call at a time

    @property
    def place(self) -> World:
        """This rank among the ranks."""
        return self.memory.world

    @property
    def sharing(self) -> int:
        """How many ranks share a GPU, at most."""
        return self.memory.sharing

    def fresh(self, dtype: str) -> None:
        """New memory is left as it is."""

    # ---- agreement

    def _exchange(self, members: tuple[int, ...], what: str, *numbers: int) -> list[tuple[int, ...]]:
        """Exchanges ``numbers`` with the members; all must be doing ``what``."""
        padded = numbers + (0,) * (_NUMBERS - len(numbers))
        text = what.encode()[: LETTER - 8 * _NUMBERS - 1]
        letters = [
            _LETTER.unpack(x) for x in self.memory.exchange(members, _LETTER.pack(*padded, text), what)
        ]
        texts = [x[-1].rstrip(b"\0").decode(errors="replace") for x in letters]
        if len(set(texts)) > 1:
            told = "; ".join(f"rank {m}: {t}" for m, t in zip(members, texts, strict=True))
            message = f"ranks that must do the same do different things: {told}"
            self.memory.stop(message)
            raise CommError(
                message, expected="the same calls of tilescale.comm in the same order on every rank of a team"
            )
        return [x[: len(numbers)] for x in letters]

    def _enter(self, team: Team) -> None:
        """To be called at the start of each collective call, before its first exchange."""
        self.memory.settle()
        for a in team.freed:
            self._free.add(a.offset, a.offset + a.size)
        team.freed.clear()
        team.calls += 1
        while team.dropped:
            a = team.dropped.popleft()
            self._word(self.memory.world.rank, a).value = team.calls
            team.stamped.append(a)

    def _word(self, rank: int, a: Allocation) -> ctypes.c_int64:
        return ctypes.c_int64.from_address(self.memory.stamp(rank, a.stamp_at))

    def _collect(self, team: Team) -> None:
        """To be called once in each collective call, after its first exchange (whose acquire makes the stamps
        visible)."""
        keep = []
        for a in team.stamped:
            if all(0 < self._word(m, a).value <= team.calls for m in team.members):
                self.memory.tag(a.offset, a.size, None)
                del self._allocations[a.offset]
                team.freed.append(a)
            else:
                keep.append(a)
        team.stamped[:] = keep

    def meet(self, team: Team, what: str) -> None:
        """A host barrier of the team: returns when all its ranks have called it."""
        with self._lock:
            self._enter(team)
            self._exchange(team.members, what)
            self._collect(team)

    # ---- memory

    def _agree_on_offset(self, team: Team, size: int, what: str) -> int:
        start, collected = 0, False
        while True:
            at = self._free.first_fit(size, start)
            answers = [x[0] for x in self._exchange(team.members, what, -1 if at is None else at)]
            if not collected:
                self._collect(team)
                collected = True
            if -1 in answers:
                full = [m for m, x in zip(team.members, answers, strict=True) if x == -1]
                raise CommError(
                    f"{what}: the symmetric heap of rank {full[0]} has no {size} bytes in one piece; "
                    f"{self._free.total()} of {self.memory.segment - self.memory.control} bytes are free "
                    "here",
                    hint="TILESCALE_HEAP_SIZE=4G, or drop tensors: what all ranks have dropped is freed at "
                    "a later call",
                )
            start = max(answers)
            if min(answers) == start:
                return start

    def _back(self, offset: int, size: int) -> int:
        """The errno of giving these bytes memory, 0 when they have it."""
        for lo, hi in self._backed.missing(offset, offset + size):
            try:
                self.memory.back(lo, hi - lo)
            except OSError as e:
                return e.errno or -1
            self._backed.add(lo, hi)
        return 0

    def allocate(
        self, team: Team, nbytes: int, what: str, fill: Callable[[Block], Any] | None = None
    ) -> Block:
        """``nbytes`` at the same offset on every rank of the team; collective.

        ``fill`` writes this rank's memory; it has happened on every rank when this returns on any. Raises
        CommError when ranks ask for different things, or memory is out.
        """
        with self._lock:
            return self._allocate(team, nbytes, what, fill)

    def _allocate(self, team: Team, nbytes: int, what: str, fill: Callable[[Block], Any] | None) -> Block:
        size = -(-(nbytes + 8) // PAGE) * PAGE
        self._enter(team)
        offset = self._agree_on_offset(team, size, what)
        self._free.remove(offset, offset + size)
        allocation = Allocation(team, offset, size)
        error = self._back(offset, size)
        block = Block(
            self.memory.address(self.memory.world.rank, offset), nbytes, None, device=self.memory.device
        )
        if not error:
            self._word(self.memory.world.rank, allocation).value = 0
            if fill is not None:
                fill(block)
                self.memory.settle()
        errors = [x[0] for x in self._exchange(team.members, what, error)]
        if any(errors):
            self._free.add(offset, offset + size)
            bad = next(i for i, e in enumerate(errors) if e)
            raise CommError(
                f"{what}: rank {team.members[bad]} has no memory for {size} bytes in /dev/shm: "
                f"{os.strerror(errors[bad])}",
                hint="make /dev/shm larger (docker run --shm-size=8g), or allocate less",
            )
        self.memory.tag(offset, size, team.slot)
        block._allocation = allocation
        allocation.block = weakref.ref(block)
        self._allocations[offset] = allocation
        return block

    def find(self, address: int) -> tuple[Allocation, Block] | None:
        """The allocation that an address of this rank's own memory lies in, with its living block."""
        place = self.memory.locate(address)
        if place is None or place[0] != self.memory.world.rank:
            return None
        for a in self._allocations.values():
            if a.offset <= place[1] < a.offset + a.size:
                block = a.block() if a.block is not None else None
                return (a, block) if block is not None else None
        return None

    def peer_block(self, allocation: Allocation, own: Block, rank: int) -> Block:
        """The twin of ``own`` in the memory of the team's ``rank``."""
        if allocation.team.members[rank] == self.memory.world.rank:
            return own
        return Block(
            self.memory.address(allocation.team.members[rank], allocation.offset),
            own.nbytes,
            None,
            own,
            self.memory.device,
        )

    def alive(self) -> int:
        """How many allocations have views in this process."""
        return sum(a.block is not None and a.block() is not None for a in self._allocations.values())

    # ---- teams

    def make_team(self, members: tuple[int, ...]) -> Team:
        """The team of ``members`` (world ranks, this one among them); collective among them the first time,
        then remembered."""
        with self._lock:
            if members not in self.teams:
                self._make_team(members)
            return self.teams[members]

    def _make_team(self, members: tuple[int, ...]) -> None:
        slot = next(self._slots, -1)
        what = f"team({list(members)})"
        slots = [x[0] for x in self._exchange(members, what, slot)]
        if -1 in slots:
            raise CommError(
                f"{what}: rank {members[slots.index(-1)]} is in {MAX_TEAMS} teams already",
                expected="at most that many",
            )
        team = Team(members, members.index(self.memory.world.rank), slot)
        error, size = 0, self.memory.team_bytes(len(members))
        at = self._agree_on_offset(team, size, what) if size else 0
        if size:
            self._free.remove(at, at + size)
        try:
            self.memory.make_team(slot, members, slots, at)
        except OSError as e:
            error = e.errno or -1
        # Nobody may look into a slot before its owner has given it memory.
        errors = [x[0] for x in self._exchange(members, what, error)]
        if any(errors):
            raise CommError(f"{what}: no memory in /dev/shm: {os.strerror(next(filter(None, errors)))}")
        self.teams[members] = team

    def say(self, team: Team, mark: int, what: bytes) -> str:
        return self.memory.say(team.slot, mark, what)

    # ---- the end

    def stop(self, why: str) -> None:
        """Tells all ranks to stop waiting."""
        self.memory.stop(why)

    def recover(self) -> None:
        """Makes it possible to go on without a rank that has died."""
        self.memory.recover()
        self.recovers = True

    def finalize(self) -> World | None:
        """Leaves the job, together with all other ranks: with those that are left where one has died and that
        was asked for. Then this rank's place among them."""
        place = None
        if self.recovers and self.memory.broken():
            left, was = self.memory.remaining(), self.place
            place = bootstrap.among(was, left)
        else:
            self.meet(self.world, "finalize()")
        self.memory.leave(unmap=self.alive() == 0)
        return place

    def leave(self) -> None:
        """The process ends. The others keep this rank's memory mapped: nothing is awaited."""
        self.memory.announce()
        self.memory.leave(unmap=False)
