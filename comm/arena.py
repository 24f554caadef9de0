"""Symmetric memory on GPUs: one arena a rank, of which this process can address all; allocated by
`heap.Heap`, as host memory is.

The hosts' own part stays in POSIX shared memory (shm.py): letters, the word that stops the job, what ranks
launched. There too lie the stamps of dropped tensors, which hosts read. At the head of an arena, and for
later teams somewhere in it, lie the words by which launches meet (compiler/cuda/include/ts/team.cuh); the C
runtime gets the table of arenas (tilescale/native/gpu_team.c).

Hosts speak to hosts only when their GPUs are done: every collective call settles the device first, so memory
that is freed, filled or read behind one is at rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence
from typing import ClassVar

from tilescale import env, log, native
from tilescale.comm.bootstrap import World
from tilescale.comm.shm import PAGE, Shm
from tilescale.comm.tensors import has_torch
from tilescale.errors import CommError

#: arenas are whole numbers of these: a GPU's pages
GRAIN = 2 << 20


class Arena:
    """What a `Heap` stands on where memory is a GPU's. Subclasses map the arenas.

    Construction is collective. ``segment`` is in bytes. Raises CommError where ranks do not come, the GPUs
    cannot reach each other's memory, or memory is out.
    """

    #: of errors
    name = "a GPU's symmetric memory"
    #: the page of the hosts' memory that GPUs read
    _mapped = 0
    #: whether ranks may go on without one that has died
    recovers = True
    #: how many ranks share a GPU: of all GPUs the most, so that all ranks choose alike
    sharing = 1
    #: the GPU of this process, once it has one: what it has there stays
    _own: ClassVar[int | None] = None

    def __init__(self, world: World, segment: int):
        self.world = world
        self._lib = native.library()
        self.control = self.team_bytes(world.size)
        self.segment = -(-max(segment, self.control + GRAIN) // GRAIN) * GRAIN
        stamps = -(-self.segment // PAGE * 8 // PAGE) * PAGE
        self.host = Shm(world, int(self._lib.ts_heap_control_bytes()) + stamps + PAGE)
        self._lib.ts_gpu_forget()  # what failed in a job before: it would fail this one
        try:
            self.device: int | None = self._choose_device()
            self.bases = self._map()
            self._clear(0, self.control)
            self.gathered(b"ready")  # nobody tells a rank anything before its words are zero
        except BaseException as error:
            self.host.stop(f"rank {world.rank}: {self.name}: {error}")
            self.host.leave(unmap=True)
            raise
        self._tell()

    # ---- what subclasses give

    def _map(self) -> list[int]:
        """Allocates this rank's arena on ``self.device`` and gives the addresses of all ranks' in this
        process. Collective."""
        raise NotImplementedError

    # ---- set-up

    def gathered(self, mine: bytes) -> list[bytes]:
        """Every rank's ``mine`` (at most LETTER bytes), in rank order; collective."""
        return [letter.rstrip(b"\0") for letter in self.host.exchange(range(self.world.size), mine, "init()")]

    def _choose_device(self) -> int:
        """Ranks of a machine share out the GPUs that they see by their number; perhaps each sees one of its
        own. Collective.

        Raises:
            CommError: torch is not installed, or sees no GPU.
        """
        if not has_torch():
            raise CommError(
                "symmetric memory on GPUs needs torch, which is not installed", hint="TILESCALE_TARGET=cpu"
            )
        import torch

        count = torch.cuda.device_count()
        if not count:
            raise CommError("torch sees no GPU on this machine", hint="TILESCALE_TARGET=cpu")
        # Several nodes here are on one machine (shm.py has made sure): each rank takes a GPU of its own.
        several = self.world.local_size < self.world.size
        device: int = (self.world.rank if several else self.world.local_rank) % count
        device = Arena._own = device if Arena._own is None else Arena._own
        torch.cuda.set_device(device)
        torch.cuda.current_stream(device)  # makes the context
        name = str(getattr(torch.cuda.get_device_properties(device), "uuid", device)).encode()
        names = self.gathered(name)
        self.sharing = max(map(names.count, names))
        if self.sharing > 1:
            log.say(
                "info",
                f"{self.sharing} ranks share a GPU, and take turns there unless NVIDIA's MPS runs: "
                "milliseconds a launch; operations of several ranks keep a part of its multiprocessors each",
                once=True,
            )
        return device

    def _tell(self) -> None:
        """Hands the table of arenas to the C runtime, with the word that launches look at while they wait."""
        n, bases = self.world.size, (ctypes.c_int64 * self.world.size)(*self.bases)
        limit = int(env.WAIT_TIMEOUT.get() * 1e9)
        words = (self.segment, self.control, self._map_stop_word(), limit)
        if self._lib.ts_gpu_heap(n, self.world.rank, bases, *(ctypes.c_int64(w) for w in words)):
            raise CommError("no memory for the table of the symmetric heap")

    def _map_stop_word(self) -> int:
        """The address by which GPUs read the word that stops the job; 0 where they cannot."""
        import torch

        at = int(self._lib.ts_stop_word())
        first = at // PAGE * PAGE
        if at and int(torch.cuda.cudart().cudaHostRegister(first, PAGE, 0)) == 0:
            self._mapped = first
            return at
        log.say(
            "info",
            "GPUs cannot read the word that stops a job: their waits end by their own limit",
            once=True,
        )
        return 0

    def settle(self) -> None:
        """Returns when this rank's GPU has done all it was given. Raises CommError with what a launch said
        that failed."""
        import torch

        try:
            torch.cuda.synchronize(self.device)  # whichever thread asks, and whatever device is current there
        except RuntimeError as error:
            why = self._says() or str(error).split("\n")[0]
            self.host.stop(why)
            raise CommError(why) from None
        if why := self._says():  # of a wait that was given up, behind which the GPU goes on
            self.host.stop(why)
            raise CommError(why)

    def _says(self) -> str:
        """What a launch of this rank said that failed; empty where none has."""
        text = ctypes.create_string_buffer(4096)
        return text.value.decode(errors="replace") if self._lib.ts_gpu_says(text, len(text)) else ""

    # ---- going on without ranks that have died

    def recover(self) -> None:
        """See :meth:`Shm.recover`. Launches that wait in vain end without taking the GPU from this process.

        Raises:
            CommError: besides, where the memory is NVSHMEM's, whose ranks cannot be left.
        """
        if not self.recovers:
            raise CommError(
                f"init(recover=True) with symmetric memory by {self.name}", hint="TILESCALE_HEAP=symm_mem"
            )
        self.host.recover()
        self._lib.ts_gpu_recover(ctypes.c_int32(1))

    def broken(self) -> bool:
        """See :meth:`Shm.broken`."""
        return self.host.broken()

    def remaining(self) -> list[int]:
        """See :meth:`Shm.remaining`, when this rank's GPU has done what it was given."""
        with contextlib.suppress(CommError):
            self.settle()
        return self.host.remaining()

    # ---- what the hosts say to each other

    def exchange(self, members: Sequence[int], letter: bytes, what: str) -> list[bytes]:
        """See :meth:`Shm.exchange`."""
        return self.host.exchange(members, letter, what)

    def say(self, slot: int, mark: int, what: bytes) -> str:
        """See :meth:`Shm.say`."""
        return self.host.say(slot, mark, what)

    def stop(self, why: str) -> None:
        """Tells every rank to stop waiting, and why."""
        self.host.stop(self._says() or why)

    def announce(self) -> None:
        """See :meth:`Shm.announce`."""
        self.host.announce()

    def leave(self, unmap: bool) -> None:
        """Ends this rank's part, when its GPU has done what it was given: others may wait for that."""
        with contextlib.suppress(
            CommError
        ):  # told when the process ends (tilescale/cuda.py), and to the others by now
            self.settle()
        self._lib.ts_gpu_close()
        if self._mapped:
            import torch

            torch.cuda.cudart().cudaHostUnregister(self._mapped)
        self.host.leave(unmap)

    # ---- memory

    def back(self, offset: int, size: int) -> None:
        """The GPU's memory is there; the stamps' is made. Raises OSError where there is none."""
        low, high = (self.host.control + at // PAGE * 8 for at in (offset, offset + size))
        low, high = low // PAGE * PAGE, -(-high // PAGE) * PAGE
        self.host.back(low, high - low)

    def stamp(self, rank: int, at: int) -> int:
        """Where in this process the stamp of the page at ``at`` of a world rank's arena lies."""
        return self.host.address(rank, self.host.control + at // PAGE * 8)

    def tag(self, offset: int, size: int, slot: int | None) -> None:
        """Tells the launcher which team's memory this is; None: nobody's."""
        self._lib.ts_gpu_tag(ctypes.c_int64(offset), ctypes.c_int64(size), 0 if slot is None else slot + 1)

    def address(self, rank: int, offset: int) -> int:
        """Where ``offset`` of a world rank's arena lies in this process."""
        return self.bases[rank] + offset

    def locate(self, address: int) -> tuple[int, int] | None:
        """The world rank and offset of an address in an arena; None elsewhere."""
        for rank, base in enumerate(self.bases):
            if 0 <= address - base < self.segment:
                return rank, address - base
        return None

    # ---- teams

    def team_bytes(self, size: int) -> int:
        """What a team of so many ranks takes of each arena, in whole pages."""
        return -(-int(self._lib.ts_gpu_control_bytes(size)) // PAGE) * PAGE

    def make_team(self, slot: int, members: Sequence[int], slots: Sequence[int], at: int = 0) -> None:
        """Team ``slot`` of this rank, whose words lie at ``at`` of each arena. Raises OSError when memory is
        out."""
        self.host.make_team(slot, members, slots)
        if slot:  # the world's are the arena's head
            self._clear(at, self.team_bytes(len(members)))
        self._lib.ts_gpu_team_at(slot, ctypes.c_int64(at))

    def _clear(self, at: int, size: int) -> None:
        from tilescale.comm import tensors
        from tilescale.comm.backend import Block

        tensors.fill(
            Block(self.address(self.world.rank, at), size, None, device=self.device),
            (size,),
            "uint8",
            "torch",
            0,
        )
        self.settle()


def job_file(world: World, what: str) -> str:
    """A name for a file that ranks of this job meet at, in the machine's folder for such."""
    import tempfile

    return os.path.join(tempfile.gettempdir(), f"ts-{world.job}-{what}")
