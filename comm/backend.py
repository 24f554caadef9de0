"""What stands behind tilescale.comm on a rank: one backend a file.

heap.py   ranks are processes of one machine, memory is POSIX shared memory (shm.py), or GPUs' (arena.py:
symm_mem.py, nvshmem.py) sim.py    ranks are threads of one process that take turns, for the simulator
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from tilescale.comm.bootstrap import World


@dataclass(eq=False)
class Team:
    """Some ranks of the world, in order. Made by ``tilescale.comm.team``; ``slot`` is this rank's number for
    it."""

    members: tuple[int, ...]
    rank: int
    slot: int
    calls: int = 0  # collective calls so far
    # Since the last call; finalizers append.
    dropped: deque[Allocation] = field(default_factory=deque, repr=False)
    # Dropped here, perhaps not everywhere.
    stamped: list[Allocation] = field(default_factory=list, repr=False)
    freed: list[Allocation] = field(default_factory=list, repr=False)  # decided in the last call

    @property
    def size(self) -> int:
        return len(self.members)


@dataclass(frozen=True)
class Outside:
    """What ``tilescale.comm.team`` gives a rank that is not among these: it is false, and no operation takes
    it. None would mean all ranks there."""

    members: tuple[int, ...]

    def __bool__(self) -> bool:
        return False


@dataclass(eq=False)
class Allocation:
    """``size`` bytes at ``offset`` of every member's segment, whole pages; the last eight bytes are the
    stamp's."""

    team: Team
    offset: int
    size: int
    block: weakref.ref[Block] | None = None

    @property
    def stamp_at(self) -> int:
        return self.offset + self.size - 8


class Block:
    """The memory behind a tensor: NumPy and torch keep it alive for as long as any view of it lives.

    A block of a peer's memory keeps its own rank's block alive too, so that nobody frees what this rank may
    still reach for. ``device``: the GPU whose memory it is, or through which it is reached; None for the
    host's.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_allocation", "_owner", "address", "device", "nbytes")

    def __init__(
        self,
        address: int,
        nbytes: int,
        allocation: Allocation | None,
        owner: Block | None = None,
        device: int | None = None,
    ):
        self.address, self.nbytes, self._allocation, self._owner, self.device = (
            address,
            nbytes,
            allocation,
            owner,
            device,
        )
        if device is None:
            self.__array_interface__ = {
                "version": 3,
                "data": (address, False),
                "shape": (nbytes,),
                "typestr": "|u1",
            }

    def __del__(self) -> None:
        allocation = self._allocation
        if allocation is not None:
            allocation.team.dropped.append(allocation)


class Backend(Protocol):
    """A rank's part of its job. Calls with a team are collective among it."""

    #: the teams that this rank is in, by their members
    teams: dict[tuple[int, ...], Team]

    @property
    def place(self) -> World:
        """This rank among the ranks."""

    @property
    def world(self) -> Team:
        """The team of all ranks."""

    def fresh(self, dtype: str) -> Callable[[Block], Any] | None:
        """What puts memory of ``dtype`` that nobody has written yet into its first state; None: nothing
        does."""

    def allocate(
        self, team: Team, nbytes: int, what: str, fill: Callable[[Block], Any] | None = None
    ) -> Block:
        """``nbytes`` on every rank of the team; ``fill`` has written them on every rank when this returns on
        any."""

    def find(self, address: int) -> tuple[Allocation, Block] | None:
        """The allocation that an address of this rank's own memory lies in, with its living block."""

    def peer_block(self, allocation: Allocation, own: Block, rank: int) -> Block:
        """The twin of ``own`` in the memory of the team's ``rank``."""

    def meet(self, team: Team, what: str) -> None:
        """A barrier of the team's hosts."""

    def make_team(self, members: tuple[int, ...]) -> Team:
        """The team of these ranks, this one among them."""

    def say(self, team: Team, mark: int, what: bytes) -> str:
        """This rank's host makes its next call of a collective on a team, of which ``what`` says all that is
        alike on its ranks, and ``mark`` is a hash of 31 bits. Nobody waits. Empty where no rank that has come
        to this call makes another one, else who makes which: of two ranks the later one learns it."""

    def stop(self, why: str) -> None:
        """Ends the waits of all ranks."""

    def finalize(self) -> World | None:
        """Leaves the job together with all other ranks; this rank's place among those that are left where one
        has died and they go on."""

    def leave(self) -> None:
        """The process ends: nothing is awaited."""
