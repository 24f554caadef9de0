"""The backend of ranks on one machine: POSIX shared memory, through the C runtime (tilescale/native/heap.c).

Every rank has one segment; every rank maps all of them side by side. Names in /dev/shm
(``ts-<job>-<rank>``) exist only until all ranks have mapped; launchers sweep what killed ranks left of them.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence

from tilescale import env, native
from tilescale.comm import bootstrap, journal, machines
from tilescale.comm.bootstrap import World
from tilescale.errors import CommError

LETTER = 512  # TS_MAIL
PAGE = 4096
MAX_RANKS = 128
MAX_TEAMS = 32
_SLICE_NS = 50_000_000  # how long C waits before Python looks for Ctrl-C
_LOOK_EVERY = 1.0  # seconds between looks at a launcher's processes


def _ranks(numbers: Sequence[int]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


class _Absent:
    """Which ranks will never call init(): our launcher has seen them end, or another launcher has no process
    for them."""

    def __init__(self, world: World):
        self.world = world
        self._next = time.monotonic() + _LOOK_EVERY
        self._before: set[int] = set()  # without a process at the last look

    def look(self, missing: Sequence[int]) -> list[int]:
        """Those of ``missing`` that have ended."""
        if self.world.launcher == "tilescale":
            return sorted(journal.ended(self.world.job) & set(missing))
        if not missing or time.monotonic() < self._next:
            return []
        # Twice, since a launcher may still be starting its ranks when the first of them looks.
        self._next = time.monotonic() + _LOOK_EVERY
        before, self._before = self._before, bootstrap.absent(self.world)
        return sorted(before & self._before & set(missing))


class Shm:
    """This rank's part of the job's shared memory.

    Construction is collective: it returns when all ranks have mapped all segments. ``segment`` is in bytes,
    the control area at its head included. Raises CommError when a rank does not come within the wait limit,
    has died, or has other sizes, when ranks are on several machines, or when /dev/shm is full.
    """

    #: how many ranks share a GPU: here none has one
    sharing = 1

    def __init__(self, world: World, segment: int):
        if world.local_size != world.size:
            machines.check(world, _Absent(world).look)
        self.world = world
        self._lib = native.library()
        native.configure(world.size)
        self.control = int(self._lib.ts_heap_control_bytes())
        self.segment = -(-segment // PAGE) * PAGE
        if self.segment < self.control + PAGE:
            raise CommError(
                f"a symmetric heap of {segment} bytes a rank",
                expected=f"more than {self.control + PAGE} bytes, of which {self.control} are the runtime's",
                hint="TILESCALE_HEAP_SIZE=64M",
            )
        self._err, self._said = ctypes.create_string_buffer(2048), ctypes.create_string_buffer(1024)
        self._pid = os.getpid()
        self._join()
        self.base = int(self._lib.ts_heap_base())

    def _text(self) -> str:
        return self._err.value.decode(errors="replace")

    def _join(self) -> None:
        w, size = self.world, ctypes.c_int32(len(self._err))
        if (
            self._lib.ts_heap_create(
                w.job.encode(), w.rank, w.size, ctypes.c_int64(self.segment), self._err, size
            )
            < 0
        ):
            raise CommError(
                f"rank {w.rank}: {self._text()}",
                hint="make /dev/shm larger (docker run --shm-size=2g) or the heap smaller "
                "(TILESCALE_HEAP_SIZE)",
            )
        limit = env.WAIT_TIMEOUT.get()
        deadline = time.monotonic() + limit
        absent = _Absent(w)
        try:
            while (rc := self._lib.ts_heap_join(ctypes.c_int64(_SLICE_NS), self._err, size)) == 0:
                missing = self._missing()
                if gone := absent.look(missing):
                    verb = "has" if len(gone) == 1 else "have"
                    raise CommError(
                        f"rank {w.rank}: in init(): {_ranks(gone)} {verb} ended without a call of init()",
                        expected="init() on every rank of the job",
                    )
                if time.monotonic() > deadline:
                    whom = _ranks(missing) if missing else "the other ranks to map its segment"
                    raise CommError(f"rank {w.rank}: waited {limit:g} s in init() for {whom}")
            if rc < 0:
                raise CommError(f"rank {w.rank}: in init(): {self._text()}")
        except BaseException as e:
            self._lib.ts_heap_give_up(str(e).encode(errors="replace")[:500])
            if w.size > 1:
                time.sleep(0.2)  # those who wait for this rank's name find it, and why it is of no use
            self._lib.ts_heap_close(1)
            raise

    def _missing(self) -> list[int]:
        """The ranks whose segments are not mapped yet."""
        gone = (ctypes.c_uint8 * MAX_RANKS)()
        self._lib.ts_heap_missing(gone)
        return [r for r in range(self.world.size) if gone[r]]

    # ---- letters between hosts

    def exchange(self, members: Sequence[int], letter: bytes, what: str) -> list[bytes]:
        """Every member gives a letter (at most LETTER bytes) and gets everybody's, in the order of
        ``members``.

        ``what`` names the call for messages. Raises CommError when a member does not come within the wait
        limit, has ended, or somebody has stopped the job.
        """
        letter = letter.ljust(LETTER, b"\0")
        if len(members) == 1:
            return [letter]
        n = len(members)
        ids = (ctypes.c_int32 * n)(*members)
        out = ctypes.create_string_buffer(n * LETTER)
        if self._lib.ts_stopped(self._err, len(self._err)):
            raise CommError(f"rank {self.world.rank}: {what}: {self._text()}")
        self._lib.ts_mail_post(n, ids, letter)
        limit = env.WAIT_TIMEOUT.get()
        deadline = time.monotonic() + limit
        size = ctypes.c_int32(len(self._err))
        while (rc := self._lib.ts_mail_wait(n, ids, out, ctypes.c_int64(_SLICE_NS), self._err, size)) == 0:
            if time.monotonic() > deadline:
                late = (ctypes.c_uint8 * n)()
                self._lib.ts_mail_missing(n, ids, late)
                whom = _ranks([m for m, is_late in zip(members, late, strict=True) if is_late])
                raise self._failure(f"rank {self.world.rank}: waited {limit:g} s in {what} for {whom}")
        if rc < 0:
            raise self._failure(f"rank {self.world.rank}: in {what}: {self._text()}")
        raw = out.raw
        letters = [raw[i * LETTER : (i + 1) * LETTER] for i in range(n)]
        letters[list(members).index(self.world.rank)] = letter
        return letters

    def _failure(self, text: str) -> CommError:
        self.stop(text)
        return CommError(text)

    def say(self, slot: int, mark: int, what: bytes) -> str:
        """See `Backend.say`, of this rank's team number ``slot``."""
        out = self._said
        return out.value.decode() if self._lib.ts_team_say(slot, mark, what, out, len(out)) else ""

    def stop(self, why: str) -> None:
        """Tells every rank to stop waiting, and why; the first to call it is heard."""
        if os.getpid() == self._pid:
            self._lib.ts_stop_others(why.encode(errors="replace")[:2000])

    # ---- going on without ranks that have died

    def recover(self) -> None:
        """From now on a thread stops the job within a second when a rank has died.

        Raises:
            CommError: ranks are on several nodes, or there is no thread to be had.
        """
        if self.world.local_size != self.world.size:
            raise CommError(
                "init(recover=True) with ranks on several nodes", expected="all ranks on one machine"
            )
        if self._lib.ts_heap_watch():
            raise CommError("no thread that looks for ranks that have died")

    def broken(self) -> bool:
        """Whether the job has been stopped, which it is here where a rank has died."""
        self._lib.ts_heap_look()
        return bool(self._lib.ts_stopped(self._err, len(self._err)))

    def remaining(self) -> list[int]:
        """The ranks that go on, this one among them: each has called this, and all others have ended. The
        same on all of them.

        Raises:
            CommError: a rank neither comes nor ends within the wait limit.
        """
        here = (ctypes.c_uint8 * MAX_RANKS)()
        limit = env.WAIT_TIMEOUT.get()
        deadline = time.monotonic() + limit
        while not self._lib.ts_heap_remaining(ctypes.c_int64(_SLICE_NS), here):
            if time.monotonic() > deadline:
                raise CommError(
                    f"rank {self.world.rank}: waited {limit:g} s in finalize() for the other ranks to end or "
                    "to call finalize() too",
                    expected="all ranks that go on without one that has died call it",
                )
        return [r for r in range(self.world.size) if here[r]]

    def announce(self) -> None:
        """Writes into the launcher's journal that this process ends, before the others can see it."""
        if os.getpid() == self._pid:
            self._lib.ts_heap_announce()

    def leave(self, unmap: bool) -> None:
        """Ends this rank's part. ``unmap`` only when nothing in this process points into the heap any
        more."""
        if os.getpid() == self._pid:
            self._lib.ts_heap_close(int(unmap))

    # ---- memory

    #: the GPU that tensors lie on: none
    device = None

    def settle(self) -> None:
        """Launches return when they are complete: nothing is under way."""

    def stamp(self, rank: int, at: int) -> int:
        """Where in this process the stamp at ``at`` of a world rank's segment lies: in the memory itself."""
        return self.address(rank, at)

    def team_bytes(self, size: int) -> int:
        """What a team of so many ranks takes of each segment beside its slot in the control area."""
        return 0

    def back(self, offset: int, size: int) -> None:
        """Gives ``[offset, offset + size)`` of this rank's segment real memory. Raises OSError when there is
        none."""
        rc = self._lib.ts_heap_back(ctypes.c_int64(offset), ctypes.c_int64(size))
        if rc:
            raise OSError(rc, os.strerror(rc))

    def tag(self, offset: int, size: int, slot: int | None) -> None:
        """Tells the launcher which team's memory ``[offset, offset + size)`` is; None: nobody's."""
        self._lib.ts_heap_tag(ctypes.c_int64(offset), ctypes.c_int64(size), 0 if slot is None else slot + 1)

    def address(self, rank: int, offset: int) -> int:
        """Where ``offset`` of world rank ``rank``'s segment lies in this process."""
        return self.base + rank * self.segment + offset

    def locate(self, address: int) -> tuple[int, int] | None:
        """The world rank and offset of an address in the heap; None elsewhere."""
        at = address - self.base
        return divmod(at, self.segment) if 0 <= at < self.segment * self.world.size else None

    def make_team(self, slot: int, members: Sequence[int], slots: Sequence[int], at: int = 0) -> None:
        """Team ``slot`` of this rank; ``slots`` are the numbers that each member gave it. Raises OSError when
        memory is out."""
        n = len(members)
        rc = self._lib.ts_team_make(slot, n, (ctypes.c_int32 * n)(*members), (ctypes.c_int32 * n)(*slots))
        if rc:
            raise OSError(rc, os.strerror(rc))
