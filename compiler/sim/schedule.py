"""Who runs next: a schedule chooses among the executors that can and the remote writes on their way, at every
point where another executor could notice."""

from __future__ import annotations

import heapq
import random
from collections.abc import Collection
from typing import TYPE_CHECKING

from tilescale.errors import TileValueError

if TYPE_CHECKING:
    from tilescale.compiler.sim.machine import Executor

#: choices of one executor in a row before another one gets a turn, so that a loop that polls does not starve
#: whom it polls for
PATIENCE = 50

#: the turn of a wait that is held back, behind those about to signal
HELD = 3

#: remote writes of an executor (by number) on their way to a peer
Delivery = tuple[int, int]


class Schedule:
    """``pick`` chooses who of ``ready`` runs, or whose oldest write of ``deliveries`` lands; None ends the
    run. ``ready`` is one list for a whole run: whom ``pick`` chose leaves it, others come at its end, and
    nobody's intent changes in it."""

    late = False  #: whether remote writes land only when the schedule says so or something orders them

    def pick(self, ready: list[Executor], deliveries: Collection[Delivery]) -> Executor | Delivery | None:
        raise NotImplementedError

    @property
    def shown(self) -> str:
        """The schedule as findings name it."""
        raise NotImplementedError


class RoundRobin(Schedule):
    """Everyone in turn, in the order of ranks and blocks."""

    def pick(self, ready: list[Executor], deliveries: Collection[Delivery]) -> Executor | Delivery | None:
        return ready[0]  # whoever ran goes to the end of the list

    @property
    def shown(self) -> str:
        return "round_robin"


class Random(Schedule):
    """Anyone, drawn with a seed."""

    def __init__(self, seed: int):
        self.draw, self.seed = random.Random(seed), seed

    def pick(self, ready: list[Executor], deliveries: Collection[Delivery]) -> Executor | Delivery | None:
        return ready[self.draw.randrange(len(ready))]

    @property
    def shown(self) -> str:
        return f"random, seed {self.seed}"


class Adversary(Schedule):
    """Whoever is awaited comes last: executors about to signal run only when nobody else can, those that
    stopped waiting run at once; or, where others may undo what a wait waits for, whoever waits is held back
    behind all signals, as the seed draws it. Remote writes land as late as the order allows: before their
    executor releases, and then to one peer after another, in an order that the seed draws, so that whoever
    else can run sees those of one peer and not yet those of another. Among equals priorities drawn with the
    seed decide, and change now and then."""

    late = True

    def __init__(self, seed: int):
        self.draw, self.seed = random.Random(seed), seed
        self.priority: dict[int, float] = {}
        self.last, self.streak = -1, 0
        self.queue: list[
            tuple[int, float, int, Executor]
        ] = []  # a heap of those in `ready`, and of entries that are no longer `ranked`
        self.ranked: dict[int, tuple[int, float, int, Executor]] = {}  # executor → its entry
        self.known, self.arrivals = 0, 0

    def pick(self, ready: list[Executor], deliveries: Collection[Delivery]) -> Executor | Delivery | None:
        chosen = self._pick(ready, deliveries)
        self.known = len(ready)
        if not isinstance(chosen, tuple):
            del self.ranked[chosen.number]
            self.known -= 1
        return chosen

    def _pick(self, ready: list[Executor], deliveries: Collection[Delivery]) -> Executor | Delivery:
        for ex in ready[self.known :]:
            self.arrivals += 1
            self._rank(ex, self.arrivals)
        while self.ranked.get(self.queue[0][3].number) is not self.queue[0]:
            heapq.heappop(self.queue)
        best = self.queue[0][3]
        if best.number == self.last:
            self.streak += 1
            if (
                self.streak > PATIENCE
            ):  # what it polls for may be another's step, or a write on its way: no write is late for ever
                others = len(ready) + len(deliveries)
                chosen = self.draw.randrange(others) if others > 1 else 0
                if chosen >= len(ready):
                    return list(deliveries)[chosen - len(ready)]
                best = ready[chosen]
        if best.number != self.last:
            self.last, self.streak = best.number, 0
        if self.draw.random() < 0.1:
            drawn = self.draw.random()
            other = ready[self.draw.randrange(len(ready))]
            self.priority[other.number] = drawn
            self._rank(other, self.ranked[other.number][2])
        if best.intent in RELEASING and len(best.outbox) > 1:
            return best.number, self.draw.choice(list(best.outbox))
        return best

    @property
    def shown(self) -> str:
        return f"adversary, seed {self.seed}"

    def _turn(self, ex: Executor) -> int:
        """Who comes at once (0), before (1) and with those about to signal (2), and behind them (3). A wait
        that others may end and undo again looks at once or last, as drawn: what ends it may pass by while it
        is held back."""
        if (
            ex.awaits is not None
            and ex.awaits[0].slot in ex.machine.prepared.ordered
            and self.draw.random() < 0.5
        ):
            return HELD
        return {"resume": 0, "signal": 2}.get(ex.intent, 1)

    def _rank(self, ex: Executor, arrival: int) -> None:
        """Puts an executor into the queue; an older entry of it counts no longer. Among equal priorities who
        came first is first."""
        if ex.number not in self.priority:
            self.priority[ex.number] = self.draw.random()
        entry = (self._turn(ex), self.priority[ex.number], arrival, ex)
        self.ranked[ex.number] = entry
        heapq.heappush(self.queue, entry)


#: what an executor is about to do when its next step releases: all that it posted has landed by then
RELEASING = frozenset(("signal", "meet", "atomic", "fork", "end"))

#: ``exhaustive`` runs one interleaving of every class, see explore.py; ``exhaustive:<choices>`` one that a
#: finding names
SCHEDULES = ("round_robin", "random", "adversary", "exhaustive")


def make(name: str, seed: int) -> Schedule:
    """The schedule of that name.

    Raises:
        TileValueError: there is none.
    """
    if name == "round_robin":
        return RoundRobin()
    if name == "random":
        return Random(seed)
    if name == "adversary":
        return Adversary(seed)
    if name.startswith("exhaustive:"):
        from tilescale.compiler.sim.interleave import replay

        return replay(name.removeprefix("exhaustive:"))
    raise TileValueError(f"there is no schedule {name!r}", expected="one of " + ", ".join(SCHEDULES))
