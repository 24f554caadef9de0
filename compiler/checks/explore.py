"""Every interleaving of a small launch, up to equivalence: stateless search with dynamic partial-order
reduction.

Two steps depend on each other when their order may say something: they touch the same elements or counter,
and not both only read (what each touched is known when it has run, see interleave.py). Interleavings that
order all dependent steps alike lead to the same state and the same findings; one of each class (a
Mazurkiewicz trace) is run. A run gives the happens-before of its steps; where a step could as well have come
before one that it depends on (they race), a run in which it does is due: the backtrack sets of Flanagan and
Godefroid (Dynamic partial-order reduction for model checking software, POPL 2005), in the form of source sets
(Abdulla, Aronis, Jonsson and Sagonas, Optimal dynamic partial order reduction, POPL 2014). Sleep sets
(Godefroid, Partial-order methods for the verification of concurrent systems, LNCS 1032, 1996) end runs whose
class is known.

The state is not kept but run again from the beginning. Steps of the same class of counters that are only
added to and waited for with ``ge`` or ``gt`` commute: which additions a wait has seen is decided by the order
of each with the wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tilescale.compiler.findings import Report
from tilescale.compiler.ir.signals import OPS
from tilescale.compiler.sim.counters import COMPARE
from tilescale.compiler.sim.interleave import Event, Interleaving, Process
from tilescale.errors import InternalError

if TYPE_CHECKING:
    from tilescale.compiler.checks.run import Launch

#: steps after which a run is too long to be explored: its races are looked for, its end is not seen
DEPTH = 5_000


@dataclass
class Node:
    """A state on the way of the current run. chosen: who takes the next step; due: whose steps are to be
    explored from here; done, asleep: whose are known from here, with what they did; asleep those that other
    runs have covered."""

    chosen: Process
    due: set[Process]
    asleep: dict[Process, Event]
    done: dict[Process, Event] = field(default_factory=dict)


class Guided(Interleaving):
    """A run that follows ``nodes`` and then adds to them, the default among those who do not sleep."""

    def __init__(self, nodes: list[Node]):
        super().__init__()
        self.nodes = nodes
        self.pruned = self.cut = False  # ended because all of its class is known; because it is too long

    def choose(self, index: int, able: dict[Process, Any], default: Process) -> Process | None:
        if index < len(self.nodes):
            if self.nodes[index].chosen not in able:
                raise InternalError(
                    f"step {index} of an interleaving cannot be taken by {self.nodes[index].chosen}"
                )
            return self.nodes[index].chosen
        if index == DEPTH:
            self.cut = True
            return None
        asleep: dict[Process, Event] = {}
        if self.nodes:
            last, event = self.nodes[-1], self.events[-1]
            known = {**last.asleep, **last.done}
            asleep = {p: e for p, e in known.items() if p != last.chosen and not e.conflicts(event)}
        awake = [p for p in able if p not in asleep]
        if not awake:
            self.pruned = True
            return None
        chosen = default if default in awake else min(awake, key=lambda p: (self.turn.get(p, -1), p))
        self.nodes.append(Node(chosen, {chosen}, asleep))
        return chosen


def exhaust(launch: Launch, into: Report, bound: int, progress: Callable[[], None] | None = None) -> bool:
    """Runs a launch under one schedule after another until one of every class was run, or ``bound`` runs were
    made; findings and the number of classes go into the report.

    Returns:
        whether the classes that were run are all: not where the bound ended the search, or a run was too
            long.
    """
    nodes: list[Node] = []
    whole = True
    for _ in range(bound):
        guided, seen = Guided(nodes), Report()
        launch.run(guided, into=seen)
        for finding in seen.findings:
            into.add(finding)
        into.runs += 1
        into.traces = (into.traces or 0) + (not guided.pruned and not guided.cut)
        whole = whole and not guided.cut
        if progress is not None:
            progress()
        _due(guided.events + guided.stuck, nodes)
        if not _next(nodes, guided.events):
            return whole
    return False


def _next(nodes: list[Node], events: list[Event]) -> bool:
    """Makes the deepest choice that is due and not known; False where none is."""
    while nodes:
        node = nodes[-1]
        node.done[node.chosen] = events[len(nodes) - 1]
        rest = sorted(p for p in node.due if p not in node.done and p not in node.asleep)
        if rest:
            node.chosen = rest[0]
            return True
        nodes.pop()
    return False


def _due(events: list[Event], nodes: list[Node]) -> None:
    """From every race of a run: whose step is due before the earlier one of the two."""
    before: list[int] = []  # as bits: the events that happen before each
    last: dict[Process, int] = {}
    touched: dict[tuple[Any, ...], list[int]] = {}
    for i, event in enumerate(events):
        seen = 0
        for j in [*event.follows, *([last[event.process]] if event.process in last else [])]:
            seen |= before[j] | 1 << j
        own, racing = seen, []
        for j in sorted({j for t in event.touches for j in touched.get(t.key, ())}, reverse=True):
            # a wait that others can end and undo again races with each of their signals, not with the last
            # alone
            if own >> j & 1 or (seen >> j & 1 and not event.ordered):
                continue
            if event.conflicts(events[j]):
                racing.append(j)
                seen |= before[j] | 1 << j
        before.append(seen)
        last[event.process] = i
        for key in {t.key for t in event.touches}:
            touched.setdefault(key, []).append(i)
        for j in racing:
            _reverse(events, before, nodes[j], j, i)


def _reverse(events: list[Event], before: list[int], node: Node, j: int, i: int) -> None:
    """Event i could have come before event j: some process whose step leads there is due in the state before
    j."""
    free = [k for k in range(j + 1, i) if not before[k] >> j & 1]
    if not _able(events, [*range(j), *free], i):
        return
    way = [*free, i]
    first = [k for n, k in enumerate(way) if not any(before[k] >> e & 1 for e in way[:n])]
    able = {events[k].process for k in first}
    if not able & node.due:
        node.due.add(events[i].process if i in first else events[first[0]].process)


def _able(events: list[Event], history: list[int], i: int) -> bool:
    """Whether event i could have come behind the events of ``history`` alone."""
    event = events[i]
    if event.condition is not None:
        counter, value, cmp, wanted = event.condition
        for k in history:
            for key, amount, op in events[k].sent:
                if key == counter:
                    value = OPS[op](value, amount)
        return COMPARE[cmp](value, wanted)
    for taken in (t for t in event.touches if t.mode == "take"):
        there = np.zeros(taken.shape, bool)
        for t in (t for k in history for t in events[k].touches if t.mode == "put" and t.key == taken.key):
            there[tuple(slice(a, b) for a, b in t.box)] = True
        if not there[tuple(slice(a, b) for a, b in taken.box)].all():
            return False
    if event.asleep is not None:
        since, polled = event.asleep
        others = [events[k] for k in history if k >= since and events[k].process != event.process]
        return any(t.conflicts(p) for e in others for t in e.touches for p in polled)
    return True
