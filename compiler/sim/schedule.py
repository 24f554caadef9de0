"""Who runs next: a schedule chooses among the executors that can, at every point where another one could notice."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tilescale.errors import TileValueError

if TYPE_CHECKING:
    from tilescale.compiler.sim.machine import Executor

#: choices of one executor in a row before another one gets a turn, so that a loop that polls does not starve whom it polls for
PATIENCE = 50


class RoundRobin:
    """Everyone in turn, in the order of ranks and blocks."""

    late = False  #: whether remote writes land only when something orders them

    def pick(self, ready: list[Executor]) -> int:
        return 0  # whoever ran goes to the end of the list


class Random:
    """Anyone, drawn with a seed."""

    late = False

    def __init__(self, seed: int):
        self.draw = random.Random(seed)

    def pick(self, ready: list[Executor]) -> int:
        return self.draw.randrange(len(ready))


class Adversary:
    """Whoever is awaited comes last: executors about to signal run only when nobody else can, those that stopped waiting run at once,
    remote writes land as late as the order allows. Among equals priorities drawn with the seed decide, and change now and then."""

    late = True

    def __init__(self, seed: int):
        self.draw = random.Random(seed)
        self.priority: dict[int, float] = {}
        self.last, self.streak = -1, 0

    def pick(self, ready: list[Executor]) -> int:
        best = min(range(len(ready)), key=lambda k: self._rank(ready[k]))
        if ready[best].number == self.last:
            self.streak += 1
            if self.streak > PATIENCE and len(ready) > 1:
                best = self.draw.randrange(len(ready))
        if ready[best].number != self.last:
            self.last, self.streak = ready[best].number, 0
        if self.draw.random() < 0.1:
            self.priority[ready[self.draw.randrange(len(ready))].number] = self.draw.random()
        return best

    def _rank(self, ex: Executor) -> tuple[int, float]:
        if ex.number not in self.priority:
            self.priority[ex.number] = self.draw.random()
        return ({"resume": 0, "signal": 2}.get(ex.intent, 1), self.priority[ex.number])


SCHEDULES = ("round_robin", "random", "adversary")


def make(name: str, seed: int) -> RoundRobin | Random | Adversary:
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
    raise TileValueError(f"there is no schedule {name!r}", expected="one of " + ", ".join(SCHEDULES))
