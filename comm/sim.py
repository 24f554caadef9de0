"""The backend of simulated ranks: threads of one process that take turns, with plain memory as symmetric
memory.

One rank runs at a time. It hands over where it has to wait for others (a barrier, an allocation, a launch
that ranks make together), where it sleeps and where it ends, always to the next rank that can go on: the same
program gives the same run, and nothing else of the process needs locks for the ranks' sake. When nobody can
go on, everyone who waits is told so at once; no time limit is needed.

Memory from ``empty`` is filled with a pattern that says "nobody has written this". What a host writes is
found by comparing: a granule that differs from the pattern has been written. The pattern of a float dtype is
a NaN that no arithmetic makes, that of a 32- or 64-bit integer one odd value, each seen element by element;
8- and 16-bit integers and bool are seen in aligned words of eight bytes, since any one of their values may be
meant.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from tilescale import env
from tilescale.comm.backend import Allocation, Block, Team
from tilescale.comm.bootstrap import World
from tilescale.errors import CommError, Loc

PAGE = 4096
_FLOAT_PATTERNS = {
    "float64": (8, 0x7FFDE5C3A1B2D4F6),
    "float32": (4, 0x7FE5C3A1),
    "float16": (2, 0x7FA5),
    "bfloat16": (2, 0x7FE5),
    "float8_e4m3fn": (1, 0xFF),
    "float8_e5m2": (1, 0xFD),
}
_WORD = (8, 0xA5C3E1D2B4968778)
_PATTERNS = {**_FLOAT_PATTERNS, "int32": (4, 0xA5C3E1D2), "uint32": (4, 0xA5C3E1D2)}

_local = threading.local()
#: Worlds whose ranks are running in this process; grows and shrinks, so that whoever remembers things for a
#: world can tell.
epoch = 0
_running = 0


_sleep = time.sleep  # while ranks run, the module's own may be another


def here() -> SimRank | None:
    """The simulated rank whose thread this is; None in threads that are none.

    Raises:
        CommError: a thread that a simulated rank started by itself, which has no turns.
    """
    rank = rank_of_thread()
    if rank is None and _running and threading.current_thread() is not threading.main_thread():
        raise CommError(
            "this thread is not a rank: simulated ranks are threads that take turns, and those that they "
            "start have none",
            hint="call tilescale and tilescale.comm in the rank's own thread",
        )
    return rank


def rank_of_thread() -> SimRank | None:
    """The same, and None in all other threads."""
    return getattr(_local, "rank", None)


class Broken(Exception):
    """What runs the ranks has failed itself, for the reason that is its cause: no rank goes on."""


class RankStopped(BaseException):
    """Unwinds a rank whose job has ended for another reason. Not an Exception: no program has to handle
    it."""


def call_site() -> Loc | None:
    """The statement of the user's code that is under way: the innermost frame that is none of ours, nor
    generated."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _ours(frame):
        frame = frame.f_back
    return None if frame is None else Loc(frame.f_code.co_filename, frame.f_lineno)


def _ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[
        0
    ] == "tilescale" or frame.f_code.co_filename.startswith("<call of")


@dataclass
class Arrival:
    """A rank at a meeting: what it calls, what it brings, and where in the user's code."""

    rank: int
    what: str
    offer: Any
    loc: Loc | None

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.what}" + (f" at {self.loc}" if self.loc else "")


@dataclass
class Ending:
    """How a rank ended: with a value, or with an exception. ``told``: the traceback of the first to fail."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    told: traceback.TracebackException | None = None


@dataclass(eq=False)
class Twins:
    """An allocation: whose team's it is, its number among that team's, every member's memory, which any
    tensor of it keeps alive, and the call that made it."""

    members: tuple[int, ...]
    number: int
    memory: dict[int, Any]
    what: str = ""


class SimBlock(Block):
    """A rank's part of an allocation: page-aligned plain memory, and which granules of it nobody has written
    yet (None: all are)."""

    __slots__ = ("granule", "memory", "pattern", "twins", "unwritten")

    def __init__(self, nbytes: int):
        import numpy

        raw = numpy.zeros(-(-(nbytes + 8) // PAGE) * PAGE + PAGE, numpy.uint8)
        start = -raw.__array_interface__["data"][0] % PAGE
        self.memory = raw[start : start + -(-nbytes // 8) * 8]
        super().__init__(raw.__array_interface__["data"][0] + start, nbytes, None)
        self.granule, self.pattern = 1, 0
        self.unwritten: Any = None
        self.twins: Twins

    def poison(self, dtype: str) -> None:
        """As nobody has written it."""
        import numpy

        self.granule, self.pattern = _PATTERNS.get(dtype, _WORD)
        self._granules()[:] = self.pattern
        self.unwritten = numpy.ones(len(self.memory) // self.granule, bool)

    def _granules(self) -> Any:
        return self.memory.view(f"u{self.granule}")

    def _look(self) -> Any:
        """What is unwritten now; None where nothing is."""
        if self.unwritten is not None:
            self.unwritten &= self._granules() == self.pattern
            if not self.unwritten.any():
                self.unwritten = None
        return self.unwritten

    def mask(self, address: int, shape: tuple[int, ...], itemsize: int) -> Any:
        """For a row-major tensor at ``address``: which elements nobody has written; None where all are
        written."""
        import numpy

        unwritten = self._look()
        if unwritten is None:
            return None
        at = address - self.address
        count = int(numpy.prod(shape, dtype=numpy.int64)) * itemsize
        some, first = self._touched(at, count)
        each = numpy.repeat(unwritten[some], self.granule)[first : first + count]
        mask = all_of_each(each, itemsize).reshape(shape)
        return mask if mask.any() else None

    def _touched(self, at: int, count: int) -> tuple[slice, int]:
        """The granules that have some of ``count`` bytes from ``at``, and where in the first of them these
        begin."""
        return slice(at // self.granule, -(-(at + count) // self.granule)), at % self.granule

    def wrote(self, address: int, shape: tuple[int, ...], itemsize: int, left: Any) -> None:
        """A launch wrote the tensor at ``address``, except for the elements in ``left`` (None: all of it may
        count as written)."""
        import numpy

        unwritten = self.unwritten
        if unwritten is None:
            return
        count = int(numpy.prod(shape, dtype=numpy.int64)) * itemsize
        some, first = self._touched(address - self.address, count)
        each = numpy.repeat(unwritten[some], self.granule)
        each[first : first + count] = False if left is None else numpy.repeat(left.reshape(-1), itemsize)
        unwritten[some] = all_of_each(each, self.granule)


def all_of_each(flags: Any, n: int) -> Any:
    """For each run of n flags whether all of them hold. Runs of a word's size are compared as words: a
    reduction over so short an axis takes ten times as long."""
    if n in (1, 2, 4, 8):
        return flags.view(f"u{n}") == int.from_bytes(b"\1" * n, "little")
    return flags.reshape(-1, n).all(-1)


class SimRank:
    """One rank's face: a :class:`tilescale.comm.backend.Backend`."""

    def __init__(self, job: SimWorld, rank: int):
        self.job, self.rank = job, rank
        self.place = World(rank, job.size, rank, job.size, job.name, "tilescale")
        self.joined = False
        self._begin()

    def _begin(self) -> None:
        """Nothing has been allocated, and there is the team of all ranks alone."""
        self.world = Team(tuple(range(self.job.size)), self.rank, 0)
        self.teams = {self.world.members: self.world}
        self.said: dict[tuple[int, ...], int] = {}  # how many calls, of each team
        self.blocks: weakref.WeakSet[SimBlock] = weakref.WeakSet()

    def init(self) -> None:
        """Joins the job; collective."""
        if not self.joined:
            self.meet(self.world, "init()")
            self.joined = True

    def fresh(self, dtype: str) -> Callable[[Block], Any] | None:
        return lambda block: block.poison(dtype)  # type: ignore[attr-defined]

    def allocate(
        self, team: Team, nbytes: int, what: str, fill: Callable[[Block], Any] | None = None
    ) -> Block:
        mine = SimBlock(nbytes)
        if fill is not None:
            fill(mine)

        def agree(blocks: Sequence[SimBlock]) -> Sequence[SimBlock]:
            number = self.job.allocations.get(team.members, 0)
            self.job.allocations[team.members] = number + 1
            made = Twins(
                team.members, number, {r: b.memory for r, b in zip(team.members, blocks, strict=True)}, what
            )
            for block in blocks:
                block.twins = made
            return blocks

        block: SimBlock = self.job.meet(self.rank, team.members, what, mine, agree)
        self.blocks.add(block)
        return block

    def find(self, address: int) -> tuple[Allocation, Block] | None:
        for block in self.blocks:
            if block.address <= address < block.address + max(1, block.nbytes):
                return Allocation(self.teams[block.twins.members], block.twins.number, block.nbytes), block
        return None

    def is_peers(self, address: int) -> bool:
        """Whether an address lies in another rank's memory."""
        others = (b for rank in self.job.ranks if rank is not self for b in rank.blocks)
        return any(b.address <= address < b.address + max(1, b.nbytes) for b in others)

    def peer_block(self, allocation: Allocation, own: Block, rank: int) -> Block:
        assert isinstance(own, SimBlock)
        memory = own.twins.memory[allocation.team.members[rank]]
        return Block(memory.__array_interface__["data"][0], own.nbytes, None, own)

    def meet(self, team: Team, what: str) -> None:
        self.job.meet(self.rank, team.members, what)

    def make_team(self, members: tuple[int, ...]) -> Team:
        if members not in self.teams:
            self.job.meet(self.rank, members, f"team({list(members)})")
            self.teams[members] = Team(members, members.index(self.rank), len(self.teams))
        return self.teams[members]

    def say(self, team: Team, mark: int, what: bytes) -> str:
        call = self.said[team.members] = self.said.get(team.members, 0) + 1
        told = self.job.said.setdefault((team.members, call), {})
        told[self.rank] = what
        other = next((r for r, text in told.items() if text != what), None)
        if len(told) == team.size:
            del self.job.said[team.members, call]
        if other is None:
            return ""
        return (
            f"in collective call {call} of their team ranks {self.rank} and {other} call different things: "
            f"rank {self.rank}: {what.decode()} | rank {other}: {told[other].decode()}"
        )

    def stop(self, why: str) -> None:
        self.job.stop(CommError(f"rank {self.rank} stopped the job: {why}"))

    def finalize(self) -> None:
        self.meet(self.world, "finalize()")
        self.job.said.clear()
        self.joined = False
        self._begin()

    def leave(self) -> None:
        """Nothing has to be told: the turn goes on when the thread ends."""


class SimWorld:
    """The ranks of one simulated job.

    Args:
        size: how many. name: what the job is called.

    Attributes:
        checking: whoever started the ranks may leave here what their launches are to do (tilescale.simulator
            reads it).
        hosts: who follows what host code does with symmetric memory (tilescale.hosts); None: nobody.
        turn: the rank that runs. threads: of the ranks.
        enter, leave: called in a rank's thread with its number whenever its turn begins and before it ends.
        ended: called when every rank has ended.
        disagree: makes the error for ranks that wait for one another in different calls, from those that wait
            and from those that ended; by default a CommError.
    """

    def __init__(self, size: int, name: str = "sim"):
        self.size, self.name = size, name
        self.checking: Any = None
        self.hosts: Any = None
        self.enter: Callable[[int], None] = lambda rank: None
        self.leave: Callable[[int], None] = lambda rank: None
        self.ended: Callable[[], None] = lambda: None
        self.disagree: Callable[[list[Arrival], list[int]], BaseException] = disagreement
        self.ranks = [SimRank(self, r) for r in range(size)]
        self.allocations: dict[tuple[int, ...], int] = {}
        #: calls that not all ranks of a team have come to: its members and the call's number → what each said
        self.said: dict[tuple[tuple[int, ...], int], dict[int, bytes]] = {}
        self.endings: list[Ending] = []
        self.turn = 0
        self.threads: list[threading.Thread] = []
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._ready = set(range(size))
        self._meetings: dict[tuple[int, ...], dict[int, Arrival]] = {}
        self._answers: dict[int, tuple[Any, BaseException | None]] = {}
        self._stopped: BaseException | None = None
        self._done = threading.Event()
        self._fault: BaseException | None = None  # what ended the job from inside
        self._slept = 0.0  # seconds, since others last could go on

    # -- the job
    # --------------------------------------------------------------------------------------------------
    def run(self, work: Callable[[int], Any]) -> list[Ending]:
        """``work(rank)`` on every rank; how each ended, in rank order. A rank that raises, or calls
        ``sys.exit`` with anything but success, ends those that wait for it (their error is a RankStopped).

        Raises:
            Broken: an error of our own (``enter``, ``leave``, ``hosts``), behind which nobody's turn comes;
            threads of ranks are left.
        """
        global epoch, _running
        made = (
            threading.Thread(target=self._thread, args=(r, work), name=f"rank {r}", daemon=True)
            for r in range(self.size)
        )
        threads = self.threads = list(made)
        epoch, _running = epoch + 1, _running + 1
        try:
            for thread in threads:
                thread.start()
            self._turns[0].release()
            while not self._done.wait(0.1):  # in slices, so that Ctrl-C is heard
                pass
            if self._fault is not None:
                raise Broken(f"{type(self._fault).__name__} between the turns of ranks") from self._fault
            for thread in threads:
                thread.join()
        finally:
            epoch, _running = epoch + 1, _running - 1
        self.ended()
        return sorted(self.endings, key=lambda e: e.rank)

    def _thread(self, rank: int, work: Callable[[int], Any]) -> None:
        _local.rank = self.ranks[rank]
        ending = Ending(rank)
        self._turns[rank].acquire()
        self.turn = rank
        try:
            self._begin(rank)
            ending.value = work(rank)
        except BaseException as error:  # noqa: BLE001  # whatever ends a rank is its ending
            ending.error = error
            if failed(error) and all(e.told is None for e in self.endings):
                ending.told = traceback.TracebackException.from_exception(error)
                self._stopped = self._stopped or RankStopped(f"rank {rank} failed")
        if self._fault is not None:
            return
        with contextlib.suppress(BaseException), self._between():
            self._look(rank, None)
            if self.hosts is not None:
                self.hosts.thread_ends()
            self.leave(rank)
            self.endings.append(ending)
            self._ready.discard(rank)
            self._next(rank)

    @contextlib.contextmanager
    def _between(self) -> Iterator[None]:
        """Our own work between turns: an error of it, which would leave nobody with a turn, ends the job."""
        try:
            yield
        except BaseException as error:
            self._fault = self._fault or error
            self._stopped = self._stopped or RankStopped("the job is broken")
            self._done.set()
            raise

    def _begin(self, rank: int) -> None:
        with self._between():
            self.enter(rank)
        if self._stopped is not None:
            raise self._stopped

    def _hand_over(self, rank: int) -> None:
        """Others run until it is this rank's turn again."""
        with self._between():
            self._look(rank, call_site())
            self.leave(rank)
            self._next(rank)
        self._turns[rank].acquire()
        self.turn = rank
        with self._between():
            self.enter(rank)

    def _look(self, rank: int, at: Loc | None) -> None:
        if self.hosts is not None:
            self.hosts.looked(rank, at)

    def _next(self, rank: int) -> None:
        """The turn goes to the next rank that can go on."""
        for other in (*range(rank + 1, self.size), *range(rank + 1)):
            if other in self._ready:
                self._turns[other].release()
                return
        waiting = [a for meeting in self._meetings.values() for a in meeting.values()]
        if not waiting:
            self._done.set()
            return
        error = self._stopped or self.disagree(
            sorted(waiting, key=lambda a: a.rank), sorted(e.rank for e in self.endings)
        )
        self._release(waiting, [None] * len(waiting), error)
        self._next(rank)

    def _release(
        self, arrivals: Sequence[Arrival], answers: Sequence[Any], error: BaseException | None
    ) -> None:
        """Those who waited can go on, with their answers or with an error."""
        for arrival, answer in zip(arrivals, answers, strict=True):
            self._answers[arrival.rank] = (answer, error)
            self._ready.add(arrival.rank)
        met = {a.rank for a in arrivals}
        self._meetings = {m: came for m, came in self._meetings.items() if not met & set(came)}

    def stop(self, error: BaseException) -> None:
        """Everyone who waits, or comes to wait, is given this error; the first counts."""
        if self._stopped is None:
            self._stopped = error
            waiting = [a for meeting in self._meetings.values() for a in meeting.values()]
            self._release(waiting, [None] * len(waiting), error)

    def sleep(self, rank: int, seconds: float) -> None:
        """``time.sleep`` of a rank, perhaps one that polls for what another one does: all others that can go
        on do, before it does.

        Raises:
            CommError: it has slept for TILESCALE_WAIT_TIMEOUT seconds in all while nobody else could go on.
        """
        if self._ready == {rank}:
            _sleep(seconds)
            self._slept += seconds
            if self._slept > env.WAIT_TIMEOUT.get():
                self.stop(
                    CommError(
                        f"rank {rank} has slept for {self._slept:g} s while all other ranks waited for it "
                        "or had ended"
                    )
                )
        else:
            self._slept = 0.0
            self._hand_over(rank)
        if self._stopped is not None:
            raise self._stopped

    # -- meetings
    # -------------------------------------------------------------------------------------------------
    def meet(
        self,
        rank: int,
        members: tuple[int, ...],
        what: str,
        offer: Any = None,
        act: Callable[[list[Any]], Sequence[Any]] | None = None,
        orders: bool = True,
    ) -> Any:
        """Waits until all members have come with the same ``what``; the last one calls ``act`` with all
        offers, in the order of members, and each member gets its entry of the result. ``orders``: what their
        hosts do behind it comes behind what any did before.

        Raises:
            what ``disagree`` makes, on all ranks that wait, where they call different things or some will
            never come.
        """
        if self._stopped is not None:
            raise self._stopped
        meeting = self._meetings.setdefault(members, {})
        meeting[rank] = Arrival(rank, what, offer, call_site())
        came = [meeting[m] for m in members if m in meeting]
        if any(a.what != what for a in came):
            self._release(came, [None] * len(came), self.disagree(sorted(came, key=lambda a: a.rank), []))
        elif len(came) == len(members):
            self._look(rank, meeting[rank].loc)
            answers: Sequence[Any] = [None] * len(came)
            error: BaseException | None = None
            try:
                answers = answers if act is None else act([a.offer for a in came])
            except Exception as e:  # noqa: BLE001  # it is everybody's
                error = e
            if self.hosts is not None and orders:
                self.hosts.met(members)
            self._release(came, answers, error)
        else:
            self._ready.discard(rank)
            self._hand_over(rank)
        answer, error = self._answers.pop(rank)
        if error is not None:
            raise error.with_traceback(None)  # several ranks may raise it, each from its own place
        return answer


def failed(error: BaseException) -> bool:
    """Whether what ended a rank is a failure: ``sys.exit()`` and ``sys.exit(0)`` are none."""
    return not (isinstance(error, SystemExit) and error.code in (None, 0)) and not isinstance(
        error, RankStopped
    )


def disagreement(waiting: list[Arrival], ended: list[int]) -> BaseException:
    """Ranks that wait for one another in different calls, or for ranks that have ended."""
    told = "; ".join(map(str, waiting))
    if len({a.what for a in waiting}) > 1:
        return CommError(
            f"ranks that must do the same do different things: {told}",
            expected="the same calls of tilescale.comm in the same order on every rank of a team",
        )
    gone = (
        f", and {'rank' if len(ended) == 1 else 'ranks'} {', '.join(map(str, ended))} ended without that call"
        if ended
        else ""
    )
    return CommError(f"nobody can go on: {told}{gone}", expected="the same calls on every rank of a team")
