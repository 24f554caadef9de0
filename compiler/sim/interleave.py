"""One interleaving of a launch, chosen step by step and recorded: what each step touched, and what had to
come before it.

A *process* is an executor, or the writes of an executor that are on their way to one peer: their landing is a
step of its own. A process is *enabled* when its next step would do something: a wait whose condition holds, a
release whose writes have landed, a loop that polls and for which something has changed since its last,
fruitless round.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tilescale.compiler.sim import diagnose
from tilescale.compiler.sim.observe import Observer
from tilescale.compiler.sim.polling import held
from tilescale.compiler.sim.schedule import RELEASING, Delivery, Schedule
from tilescale.errors import TileValueError

if TYPE_CHECKING:
    from tilescale.compiler.sim.counters import Counter
    from tilescale.compiler.sim.flights import Put
    from tilescale.compiler.sim.machine import Executor, Machine, Meeting
    from tilescale.compiler.sim.memory import Storage
    from tilescale.compiler.sim.packets import Packets

#: (executor,), or (executor, peer) for its writes on their way there
Process = tuple[int, ...]

#: what accesses touch: the elements as the clocks see them (a write counts when it is issued), and as values
#: (when it has landed)
SEEN, VALUE = 1, 2
_LAYERS = {"land": VALUE}
_HARMLESS = {("read", "read"), ("read", "load"), ("load", "read"), ("load", "load")}
_HARMLESS |= {("put", "put"), ("take", "take")}
_HARMLESS |= {("add", "add"), ("wait", "wait"), ("wait", "peek"), ("peek", "wait"), ("peek", "peek")}


@dataclass(frozen=True)
class Touch:
    """What a step touched. key: which memory or counter, the same in every run. Of memory box: for each axis
    the first index and the one behind the last, in an array of ``shape``; or cells: the flat indices, where
    they are no box or the memory is seen in several ways."""

    key: tuple[Any, ...]
    mode: str
    layers: int
    box: tuple[tuple[int, int], ...] = ()
    shape: tuple[int, ...] = ()
    cells: Any = None

    def conflicts(self, other: Touch) -> bool:
        """Whether the order of the two may say something."""
        if self.key != other.key or not self.layers & other.layers or (self.mode, other.mode) in _HARMLESS:
            return False
        if self.cells is None and other.cells is None:
            return all(a < d and c < b for (a, b), (c, d) in zip(self.box, other.box, strict=True))
        return bool(np.intersect1d(self._flat(), other._flat()).size)

    def _flat(self) -> Any:
        if self.cells is not None:
            return self.cells
        count = int(np.prod(self.shape))
        return np.arange(count).reshape(self.shape)[tuple(slice(a, b) for a, b in self.box)].ravel()


@dataclass
class Event:
    """A step of a process. follows: events that had to come before it, beside its process's own; condition:
    the wait that it ended, as (counter, initial value, comparison, value); asleep: the last event before
    which it had no reason to run (a polling loop), and what that loop polls; sent: its signals, as (counter,
    amount, op)."""

    process: Process
    touches: list[Touch] = field(default_factory=list)
    follows: list[int] = field(default_factory=list)
    condition: tuple[tuple[Any, ...], int, str, int] | None = None
    ordered: bool = False
    asleep: tuple[int, tuple[Touch, ...]] | None = None
    sent: list[tuple[tuple[Any, ...], int, str]] = field(default_factory=list)

    def conflicts(self, other: Event) -> bool:
        return any(a.conflicts(b) for a in self.touches for b in other.touches)


@dataclass
class Round:
    """A round of a ``while``: the event in which it began, what the executor held then, what it has read
    since, and whether that was all."""

    start: int
    held: bytes
    reads: list[Touch] = field(default_factory=list)
    pure: bool = True


class Interleaving(Schedule, Observer):
    """Follows ``deviations`` (index of a step → process) from the default: whoever has waited for its turn
    for longest. Listens to the machine that it drives, and gathers ``events``."""

    late = True

    def __init__(self, deviations: dict[int, Process] | None = None):
        self.deviations = deviations or {}
        self.events: list[Event] = []
        self.stuck: list[Event] = []  # what those who wait at the end would do
        self.taken: dict[int, Process] = {}  # where this run left the default
        self.turn: dict[Process, int] = {}  # process → its last event
        self.joins: dict[Process, list[int]] = {}  # what must come before a process's next event
        self.posts: dict[Process, list[int]] = {}  # the events that issued the writes on their way
        self.rounds: dict[tuple[int, int], Round] = {}
        self.resting: dict[
            int, tuple[int, tuple[Touch, ...]]
        ] = {}  # executor → since when its loop polls in vain, and what
        self.arrived: dict[Any, list[int]] = {}
        self.draining = False

    @property
    def shown(self) -> str:
        return f"exhaustive:{text_of(self.taken)}"

    # -- the schedule
    # ---------------------------------------------------------------------------------------------
    def pick(self, ready: list[Executor], deliveries: Collection[Delivery]) -> Executor | Delivery | None:
        able: dict[Process, Executor | Delivery] = {(ex.number,): ex for ex in ready if self._able(ex)}
        able.update({one: one for one in deliveries})
        if not able:
            return self._nobody(ready)
        default = min(able, key=lambda p: (self.turn.get(p, -1), p))
        process = self.choose(len(self.events), able, default)
        if process is None:
            return None
        if process != default:
            self.taken[len(self.events)] = process
        chosen = able[process]
        self._begin(process, chosen if not isinstance(chosen, tuple) else None)
        return chosen

    def choose(self, index: int, able: dict[Process, Any], default: Process) -> Process | None:
        """Who does step ``index``; None ends the run.

        Raises:
            TileValueError: the choices do not belong to this launch.
        """
        process = self.deviations.get(index, default)
        if process not in able:
            raise TileValueError(
                f"step {index} of this schedule is taken by {spelled(process)}, who cannot run there",
                expected="the choices of a finding, with the same kernel, ranks and arguments",
            )
        return process

    def _able(self, ex: Executor) -> bool:
        if ex.awaits is not None:
            from tilescale.compiler.sim.counters import COMPARE

            counter, cmp, value = ex.awaits
            return COMPARE[cmp](counter.value, value)
        if ex.takes is not None:
            box, number, key = ex.takes
            return box.there(number, key)
        if ex.outbox and (ex.intent in RELEASING or ex.pulls in ex.outbox):
            return False
        if ex.number not in self.resting:
            return True
        since, polled = self.resting[ex.number]
        return any(
            t.conflicts(p)
            for e in self.events[since:]
            if e.process != (ex.number,)
            for t in e.touches
            for p in polled
        )

    def _nobody(self, ready: list[Executor]) -> Executor | None:
        """Nobody's next step does anything: those who wait block, and polling loops poll for ever."""
        self.draining = True
        for ex in ready:
            if ex.awaits is not None:
                counter, cmp, value = ex.awaits
                stuck = Event((ex.number,), [Touch(counter.key, "wait", VALUE)])
                self._wait(stuck, ex.machine, counter, cmp, value)
                self.stuck.append(stuck)
                return ex
            if ex.takes is not None:
                self.stuck.append(Event((ex.number,), [_packets(*ex.takes, "take")]))
                return ex
        if ready:
            ready[0].machine.report.add(diagnose.polling(ready[0].machine, ready))
        return None

    def _begin(self, process: Process, ex: Executor | None) -> None:
        event = Event(process, follows=self.joins.pop(process, []))
        if ex is None:
            event.follows.append(self.posts[process][0])
        elif ex.intent in RELEASING:
            event.follows += [k for p, k in self.turn.items() if len(p) == 2 and p[0] == ex.number]
        elif ex.pulls is not None:
            event.follows += [k for p, k in self.turn.items() if p == (ex.number, ex.pulls)]
        if ex is not None and (asleep := self.resting.pop(ex.number, None)) is not None:
            event.asleep = asleep
            event.touches += asleep[1]  # it goes on because of what changed there
        self.turn[process] = len(self.events)
        self.events.append(event)

    # -- what the machine tells
    # -----------------------------------------------------------------------------------
    def accessed(self, ex: Executor, storage: Storage, key: Any, mode: str, posted: bool) -> None:
        if mode == "update" or self.draining or not (storage.is_global or storage.scope.startswith("shared")):
            return  # an atomic operation tells what it does by itself; fragments are the executor's own
        layers = SEEN if posted else _LAYERS.get(mode, SEEN | VALUE)
        self._touch(ex, _touch(storage, key, "write" if mode == "land" else mode, layers))

    def _touch(self, ex: Executor | Put, touch: Touch) -> None:
        if self.draining:
            return
        self.events[-1].touches.append(touch)
        for (number, _), turn in self.rounds.items():
            if number == ex.number:
                if touch.mode in ("read", "load", "peek"):
                    turn.reads.append(touch)
                else:
                    turn.pure = False

    def posted(self, ex: Executor, peer: int) -> None:
        self.posts.setdefault((ex.number, peer), []).append(len(self.events) - 1)

    def landed(self, ex: Executor, peer: int) -> None:
        self.posts[ex.number, peer].pop(0)

    def signalled(self, ex: Executor | Put, counter: Counter, amount: int, op: str) -> None:
        ordered = counter.slot in ex.machine.prepared.ordered
        self._touch(ex, Touch(counter.key, "signal" if ordered else "add", VALUE))
        if not self.draining:
            self.events[-1].sent.append((counter.key, amount, op))

    def peeked(self, ex: Executor, counter: Counter) -> None:
        self._touch(ex, Touch(counter.key, "peek", VALUE))

    def observed(self, ex: Executor, site: Any, counter: Counter, cmp: str, value: int) -> None:
        self._touch(ex, Touch(counter.key, "wait", VALUE))
        self._wait(self.events[-1], ex.machine, counter, cmp, value)

    def _wait(self, event: Event, machine: Machine, counter: Counter, cmp: str, value: int) -> None:
        event.condition = (counter.key, counter.history[0].value, cmp, value)
        event.ordered = counter.slot in machine.prepared.ordered

    def put(self, ex: Executor, box: Packets, key: Any, site: Any, owner: int) -> None:
        number = ex.rank.memory[box.key[-1]].number(ex.machine)
        self._touch(ex, _packets(box, number, key, "put"))

    def took(self, ex: Executor, box: Packets, key: Any, site: Any) -> None:
        self._touch(ex, _packets(box, box.number(ex.machine), key, "take"))

    def came(self, ex: Executor, site: Any, meeting: Meeting) -> None:
        arrived = self.arrived.setdefault(meeting.key, [])
        arrived.append(len(self.events) - 1)
        if len(meeting.came) == meeting.expected:
            for other, _ in meeting.came:
                if other.number not in meeting.gone:
                    self.joins.setdefault((other.number,), []).extend(arrived)
            arrived.clear()
        self._impure(ex)

    def forked(self, ex: Executor, child: Executor) -> None:
        self.joins.setdefault((child.number,), []).append(len(self.events) - 1)
        self._impure(ex)

    def ended(self, ex: Executor) -> None:
        if ex.parent is not None:
            self.joins.setdefault((ex.parent.number,), []).append(len(self.events) - 1)

    def turned(self, ex: Executor, loop: int) -> None:
        """A round that only read, and after which the executor holds what it held before: the next one is the
        same until somebody changes what it read, and until then nobody could tell whether it runs."""
        now = held(ex)
        last = self.rounds.get((ex.number, loop))
        if last is not None and last.pure and last.reads and last.held == now:
            self.resting[ex.number] = (last.start + 1, tuple(last.reads))
        self.rounds[ex.number, loop] = Round(len(self.events) - 1, now)

    def _impure(self, ex: Executor) -> None:
        for (number, _), turn in self.rounds.items():
            if number == ex.number:
                turn.pure = False


def _touch(storage: Storage, key: Any, mode: str, layers: int) -> Touch:
    """An access of memory as the elements that it covers."""
    shadow = storage.shadow
    if not shadow.viewed and all(isinstance(k, (slice, int, np.integer)) for k in key):
        box = tuple((k.start, k.stop) if isinstance(k, slice) else (int(k), int(k) + 1) for k in key)
        return Touch(shadow.key, mode, layers, box, storage.shape)
    flat = np.arange(len(shadow.last)).reshape(storage.cells)
    return Touch(shadow.key, mode, layers, cells=np.unique(flat[key]))


def _packets(box: Packets, number: int, key: Any, mode: str) -> Touch:
    """The packets of a launch that are put or taken."""
    return Touch((*box.key, number), mode, VALUE, tuple((k.start, k.stop) for k in key), box.shape)


# ---- choices as text


def spelled(process: Process) -> str:
    return "/".join(map(str, process))


def text_of(taken: dict[int, Process]) -> str:
    """Where a run left the default, as ``exhaustive:<this>`` replays it: ``4.2,9.1/0`` is step 4 by executor
    2, and step 9 the landing of a write of executor 1 at its peer 0; ``-`` is the default itself."""
    return ",".join(f"{index}.{spelled(process)}" for index, process in sorted(taken.items())) or "-"


def replay(text: str) -> Interleaving:
    """The schedule that ``text`` spells.

    Raises:
        TileValueError: the text spells none.
    """
    try:
        parts = [part.split(".") for part in text.split(",")] if text != "-" else []
        return Interleaving(
            {int(index): tuple(int(n) for n in process.split("/")) for index, process in parts}
        )
    except ValueError:
        raise TileValueError(
            f"no choices of a schedule: {text!r}", expected="exhaustive:<what a finding says>"
        ) from None
