"""Counters of signals: what was sent to them, and what a wait acquires of it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tilescale.compiler.findings import Where
from tilescale.compiler.ir.contexts import Site
from tilescale.compiler.ir.signals import OPS
from tilescale.compiler.sim import diagnose, numerics

if TYPE_CHECKING:
    from tilescale.compiler.sim.machine import Block, Executor

COMPARE: dict[str, Callable[[int, int], bool]] = {
    "ge": operator.ge,
    "eq": operator.eq,
    "gt": operator.gt,
    "ne": operator.ne,
    "le": operator.le,
    "lt": operator.lt,
}


@dataclass(frozen=True)
class Sent:
    """One signal of a counter: the value behind it, which ``op`` with what it was, who sent it where at which
    own time, what it releases by itself, and together with those whose release sequence it continues. block:
    its sender's (None: nobody sent it)."""

    value: int
    op: str
    amount: int
    who: int
    at: int
    clock: Any
    joined: Any
    where: Where | None = None
    block: Block | None = None

    def acquired(self, ex: Executor, reach: str) -> bool:
        """Whether a wait at the scale ``reach`` acquires what it releases. Release and acquire pair up only
        where the scope of each takes in the other: a wait at the scale of the grid makes what its own rank
        released visible, and no other rank's."""
        mine, its = ex.block, self.block
        if reach == "device" or its is None:
            return True
        if its.rank is not mine.rank:
            return False
        return reach == "grid" or its is mine or (reach == "cta_cluster" and its.cluster == mine.cluster)


class Counter:
    """One counter of a signal. Its history tells a wait whose signals made the value that it saw, and no more
    than those."""

    def __init__(
        self, name: str, value: int, clocks: int, home: tuple[Any, ...], slot: int, index: tuple[int, ...]
    ):
        self.name, self.value, self.home, self.slot = name, value, home, slot
        self.key = (*home, slot, *index)
        self.waiters: list[Executor] = []
        nothing = np.zeros(clocks, np.int64)
        self.history = [Sent(value, "set", value, 0, 0, nothing, nothing)]
        self.ops: set[str] = set()
        self.grows = True  # nothing but additions of what is not negative, so that their order says nothing

    def signal(self, ex: Executor, amount: int, op: str, site: Site) -> None:
        """A release: everything before it in the executor, and what that had acquired, comes before a wait
        that sees the value."""
        for observer in ex.machine.observers:
            observer.signalled(ex, self, amount, op)
        ex.machine.polling.changed()
        machine = ex.machine
        if self.ops - {
            op
        }:  # the order of two of one kind says nothing, that of stores aside, who have one sender
            other = next((s for s in self.history if s.where and s.op != op and s.at > ex.vc[s.who]), None)
            if other is not None and other.where is not None:
                machine.report.add(
                    diagnose.mixed(
                        ex.where(site, self.name), (op, amount), other.where, (other.op, other.amount)
                    )
                )
        machine.signals.setdefault(ex.number, []).append(machine.note(self, site, amount=amount, does=op))
        self.ops.add(op)
        self.grows = self.grows and op == "add" and amount >= 0
        self.value = numerics.wrap(OPS[op](self.value, amount), "int64")
        at = ex.now
        clock = ex.release()
        # an update continues the release sequence of those before it; a store starts anew
        joined = clock if op == "set" else np.maximum(clock, self.history[-1].joined)
        self.history.append(
            Sent(self.value, op, amount, ex.number, at, clock, joined, ex.where(site, self.name), ex.block)
        )
        for waiter in self.waiters:
            ex.machine.wake(waiter)
        self.waiters.clear()

    def observe(self, ex: Executor, cmp: str, value: int, reach: str) -> bool:
        """Whether the condition holds; if so the executor acquires what must have come for it to hold, and no
        more: what else is there is there by luck. And of that what a wait at the scale ``reach`` hears."""
        holds = COMPARE[cmp]
        if not holds(self.value, value):
            return False
        if self.grows and cmp in ("ge", "gt"):
            self._acquire_fewest(ex, lambda total: holds(total, value), reach)
            return True
        if (self.ops, cmp) in (({"max"}, "ge"), ({"max"}, "gt"), ({"min"}, "le"), ({"min"}, "lt")):
            self._acquire_one(ex, lambda given: holds(given, value), reach)
            return True
        first = 0
        for k in range(
            len(self.history) - 1, -1, -1
        ):  # no older value than one that already happened before this wait
            if self.history[k].at <= ex.vc[self.history[k].who]:
                first = k
                break
        last = next(k for k in range(first, len(self.history)) if holds(self.history[k].value, value))
        if reach == "device":
            ex.acquire(self.history[last].joined)
            return True
        for sent in reversed(
            self.history[: last + 1]
        ):  # its release sequence, those of it whom the wait hears
            if sent.acquired(ex, reach):
                ex.acquire(sent.clock)
            if sent.op == "set":
                break
        return True

    def _acquire_one(self, ex: Executor, enough: Callable[[int], bool], reach: str) -> None:
        """Of maxima (of minima) one that is enough by itself must have come: one that already happened before
        this wait, else the first of this run."""
        found = [sent for sent in self.history if enough(sent.amount)]
        if all(sent.at > ex.vc[sent.who] for sent in found) and found[0].acquired(ex, reach):
            ex.acquire(found[0].clock)

    def _acquire_fewest(self, ex: Executor, enough: Callable[[int], bool], reach: str) -> None:
        """Additions may come in any order: those that already happened before this wait count, then as many
        others as it takes, in the order of this run."""
        total, others = self.history[0].value, []
        for sent in self.history[1:]:
            if sent.at <= ex.vc[sent.who]:
                total += sent.amount
            else:
                others.append(sent)
        for sent in others:
            if enough(total):
                return
            if sent.acquired(ex, reach):
                ex.acquire(sent.clock)
            total += sent.amount


class Counters:
    """The counters of one signal in one memory. ``slot``: the buffer's, which tells signals of one name
    apart."""

    def __init__(self, name: str, values: Any, clocks: int, home: tuple[Any, ...], slot: int):
        self.name, self.clocks, self.home, self.slot = name, clocks, home, slot
        self.shape = values.shape
        self.values = values
        self.made: dict[tuple[int, ...], Counter] = {}

    def at(self, index: tuple[int, ...]) -> Counter | None:
        """The counter of that index; None outside."""
        if not all(0 <= i < n for i, n in zip(index, self.shape, strict=True)):
            return None
        if index not in self.made:
            name = f"{self.name}[{', '.join(map(str, index))}]"
            self.made[index] = Counter(
                name, int(self.values[index]), self.clocks, self.home, self.slot, index
            )
        return self.made[index]
