"""Interleaving of an emulated cluster: its blocks, their roles and their warps are functions in threads of
their own, of which one runs at a time. Who comes next is drawn; copies arrive in between, with an odd seed at
any time, with an even one only when nobody else can go on. Of six seeds the second pair lets the producer run
ahead as far as it can, the third the consumers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np

from tilescale.compiler.emulator.copies import EmulationError

STEPS = 1_000_000


class _Ended(BaseException):
    """Another role failed."""


class Turn:
    """A semaphore at zero. Turns change at every step, which by threading.Semaphore, written in Python, takes
    half as much time again."""

    def __init__(self) -> None:
        self._given: SimpleQueue[None] = SimpleQueue()
        self.release = functools.partial(self._given.put, None)
        self.acquire = self._given.get


@dataclass
class Role:
    run: Callable[[], None]
    turn: Turn = field(default_factory=Turn)
    ready: Callable[[], bool] | None = None
    ended: bool = False


class Interleaving:
    """Who of a cluster's blocks and of their roles runs: one at a time. A role may start others and goes on
    when they have ended."""

    def __init__(self, draw: Any, seed: int):
        self.draw, self.late, self.haste = draw, seed % 2 == 0, seed // 2 % 3
        self.roles: list[Role] = []
        self.threads: list[threading.Thread] = []
        self.current: Role | None = None
        #: given back to who runs the roles, when all have ended or one has failed
        self.over = Turn()
        self.error: Exception | None = None
        self.stop, self.steps = False, 0
        #: copies under way, into any of the blocks
        self.loads: list[Any] = []
        #: named barriers of blocks, and the cluster's → arrivals, how often they met
        self.meetings: dict[Any, list[int]] = {}
        #: counters in shared memory → what was released there
        self.handed: dict[Any, Any] = {}

    def together(self, functions: list[Callable[[], None]]) -> None:
        """Runs roles until all have ended."""
        mine = [Role(f) for f in functions]
        self.roles += mine
        started = [threading.Thread(target=self._role, args=(r,), daemon=True) for r in mine]
        self.threads += started
        for t in started:
            t.start()
        if self.current is not None:
            self.yields(lambda: all(r.ended for r in mine))
            return
        self.steps = 0
        try:
            self._hand_over(None)
            self.over.acquire()
            if self.error is not None:
                error, self.error = self.error, None
                try:
                    raise error
                finally:
                    del error  # which refers to this frame
        finally:
            self.stop, self.current = True, None
            for r in self.roles:
                r.turn.release()
            for t in self.threads:
                t.join()
            self.stop, self.roles, self.threads = False, [], []

    def close(self) -> None:
        """Lets go of the blocks, which refer to it."""
        self.loads, self.meetings, self.handed = [], {}, {}

    def _role(self, r: Role) -> None:
        r.turn.acquire()
        with np.errstate(all="ignore"):
            try:
                if not self.stop:
                    r.run()
            except _Ended:
                pass
            except Exception as error:  # noqa: BLE001 (raised again where the block runs)
                self.error = error
            r.ended = True
            if self.stop:
                return
            self.roles.remove(r)
            if self.error is None:
                self._hand_over(None)
            else:
                self.over.release()

    def _hand_over(self, mine: Role | None) -> bool:
        """Chooses who comes next, in the thread of the role that gives the turn away, ``mine``: many steps go
        to who has made the last one, and change no thread. Returns whether it is ``mine``."""
        try:
            chosen = self._chosen()
        except Exception as error:  # noqa: BLE001 (raised again where the block runs)
            self.error, chosen = error, None
        if chosen is mine and mine is not None:
            return True
        (self.over if chosen is None else chosen.turn).release()
        return False

    def _chosen(self) -> Role | None:
        """Who comes next, behind the copies that arrive before; None where all have ended."""
        while self.steps < STEPS:
            self.steps += 1
            ready = [r for r in self.roles if r.ready is None or r.ready()]
            if not self.roles:
                return None
            deliver = bool(self.loads) and (not ready or not self.late and self.draw.random() < 0.3)
            if deliver:
                self.loads.pop(int(self.draw.integers(len(self.loads)))).arrive()
                continue
            if not ready:
                raise EmulationError(
                    "no role of the block can go on: each waits for a phase that does not end"
                )
            self.current = self._next(ready)
            return self.current
        raise EmulationError("the roles of the block do not end")

    def _next(self, ready: list[Role]) -> Role:
        """Who comes next; now and then somebody else than who is in haste, lest others starve."""
        if self.haste and self.draw.random() < 0.95:
            return ready[0] if self.haste == 1 else ready[-1]
        return ready[int(self.draw.integers(len(ready)))]

    def yields(self, ready: Callable[[], bool] | None = None) -> None:
        """Gives the turn away, until ``ready``."""
        r = self.current
        if r is None:
            if ready is not None and not ready():
                raise EmulationError("a wait outside the roles of a block")
            return
        r.ready = ready
        if not self._hand_over(r):
            r.turn.acquire()
            if self.stop:
                raise _Ended
        r.ready = None

    def meet(self, key: Any, count: int, arriving: int, done: Callable[[], None]) -> None:
        """So many threads arrive and wait until ``count`` have; the last one calls ``done``."""
        arrived = self.meetings.setdefault(key, [0, 0])
        turn = arrived[1]
        self.arrive(key, count, arriving)
        if arrived[1] > turn:
            done()
        self.yields(lambda: arrived[1] > turn)

    def arrive(self, key: Any, count: int, arriving: int) -> bool:
        """So many threads arrive. Returns whether they were the last."""
        arrived = self.meetings.setdefault(key, [0, 0])
        arrived[0] += arriving
        if arrived[0] > count:
            raise EmulationError(f"{arrived[0]} threads meet at a barrier of {count}")
        if arrived[0] == count:
            arrived[0], arrived[1] = 0, arrived[1] + 1
            return True
        return False
