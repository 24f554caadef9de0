"""Where an iteration of a nest finds an element of a fragment: in which slot, and whether its thread has it
at all.

The loop's own layout is a fragment over the iterations: thread and slot of an iteration. An access fits if
every thread that runs an iteration holds the element that it touches, in a slot that is the same for all
threads. Where indices are the loop's variables the digits say so; all others are counted, over all threads
and slots: nothing is assumed of the expressions but that they can be evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from tilescale.compiler.ir import numeric
from tilescale.compiler.layout.fragment import Fragment
from tilescale.compiler.layout.pieces import Piece, canonical, radix
from tilescale.compiler.layout.walked import Walk, walk
from tilescale.compiler.tvm_compat import ir, tirx


@dataclass(frozen=True)
class Loop:
    """How the iterations of a nest are shared: iteration ``i`` runs where ``fragment`` has element ``i +
    shifts``. The fragment may be larger than the nest: what lies outside ``extents`` does not run."""

    vars: tuple[Any, ...]
    extents: tuple[int, ...]
    fragment: Fragment
    shifts: tuple[int, ...]

    @cached_property
    def digits(self) -> list[Piece]:
        """The slots' digits, the slowest first: the loops that a thread runs."""
        found = radix(self.fragment.pieces, "slot")
        assert found is not None
        return list(reversed(found))

    @cached_property
    def thread_digits(self) -> list[Piece]:
        """The threads' digits."""
        found = radix(self.fragment.pieces, "thread")
        assert found is not None
        return found

    @cached_property
    def counts(self) -> tuple[int, ...]:
        return tuple(p.extent for p in self.digits)

    @cached_property
    def values(self) -> tuple[list[Any], Any]:
        """The nest's indices, int arrays (threads, rounds), and where they lie inside the nest, bool
        (threads, rounds)."""
        threads = np.arange(self.fragment.threads)[:, None]
        slots = np.zeros((1, prod(self.counts)), np.int64)
        for p, at in zip(self.digits, self._counters(), strict=True):
            slots = slots + at[None] * p.stride
        index = self.fragment.index(threads, slots)
        shape = np.broadcast_shapes(threads.shape, slots.shape)
        made = [np.broadcast_to(np.asarray(i) - s, shape) for i, s in zip(index, self.shifts, strict=True)]
        inside = np.ones(shape, bool)
        for i, extent in zip(made, self.extents, strict=True):
            inside &= (i >= 0) & (i < extent)
        return made, inside

    def _counters(self) -> list[Any]:
        """The value of each digit in every round, the last one fastest."""
        grid = np.indices(self.counts) if self.counts else np.zeros((0, 1), np.int64)
        return [g.ravel() for g in grid]

    @property
    def covers(self) -> bool:
        return self.fragment.covers


@dataclass(frozen=True)
class Slots:
    """Where an access finds its element: slot ``base + Σ digit · coefficient`` (over ``Loop.digits``) if it
    is that regular, else ``table``, one slot a round. ``dynamic``: what an index adds that is known only at
    run time: (index, unit, extent, stride)."""

    base: int
    coefficients: tuple[int, ...] | None
    table: tuple[int, ...]
    dynamic: tuple[tuple[Any, int, int, int], ...] = ()


def idle(loop: Loop, axis: int, wave: int) -> Any | None:
    """The digit of the threads of which some have nothing but padding along an axis, and all others none;
    None where padding lies otherwise, or inside a ``wave``, whose threads run in step."""
    extent, reach = loop.extents[axis], loop.fragment.shape[axis]
    top = max((p for p in loop.thread_digits if p.axis == axis), key=lambda p: p.unit, default=None)
    if (
        top is None
        or loop.shifts[axis]
        or reach <= extent
        or top.unit * top.extent != reach
        or top.stride < wave
        or extent % top.unit
    ):
        return None
    return top


def is_replicated(fragment: Fragment) -> bool:
    """Whether every thread holds the whole tile."""
    return all(p.axis is None or p.to == "slot" for p in fragment.pieces)


def seen_by(fragment: Fragment, threads: int) -> Fragment:
    """A fragment as the threads of an executor see it: what all threads of a block hold, all threads of a
    warp hold."""
    if fragment.threads == threads or not is_replicated(fragment):
        return fragment
    kept = tuple(p for p in fragment.pieces if p.axis is not None)
    return Fragment(fragment.shape, (*kept, Piece(None, 0, threads, "thread", 1)), threads)


def everywhere(indices: Sequence[Any], fragment: Fragment) -> Slots:
    """The slot of an element of a replicated fragment, computed when the kernel runs."""
    return Slots(
        0,
        None,
        (),
        tuple((indices[p.axis], p.unit, p.extent, p.stride) for p in fragment.pieces if p.axis is not None),
    )


def match(loop: Loop, indices: Sequence[Any], fragment: Fragment, writes: bool) -> Slots | str:
    """Where the iterations of ``loop`` find ``fragment[indices]``, or why they do not."""
    found = by_digits(loop, indices, fragment, writes) or by_counting(loop, indices, fragment, writes)
    if isinstance(found, str) and is_replicated(fragment):
        every = is_replicated(loop.fragment) and loop.fragment.threads == fragment.threads
        if not writes or every:  # who holds a copy of the element runs the iteration
            return everywhere(indices, fragment)
    return found


def by_digits(loop: Loop, indices: Sequence[Any], fragment: Fragment, writes: bool) -> Slots | str | None:
    """The common case without counting: every index is a variable of the loop, shifted like the loop, and the
    loop's threads are the fragment's, digit by digit. None where that is not so: then nothing is said."""
    if loop.fragment.threads != fragment.threads or loop.fragment.first_thread != fragment.first_thread:
        return None
    where: dict[int, int] = {}
    base = 0
    for axis, e in enumerate(indices):
        k = next((k for k, v in enumerate(loop.vars) if isinstance(e, ir.Var) and e.same_as(v)), None)
        if k is None:
            if not isinstance(e, tirx.IntImm) or any(
                p.axis == axis and p.to == "thread" for p in fragment.pieces
            ):
                return None
            at = int(e.value)
            if not 0 <= at < fragment.shape[axis]:
                return None
            base += sum(at // p.unit % p.extent * p.stride for p in fragment.pieces if p.axis == axis)
        elif k in where or loop.shifts[k] or loop.fragment.shape[k] != fragment.shape[axis]:
            return None
        else:
            where[k] = axis
    mine = [
        replace(p, axis=where.get(p.axis)) if p.axis is not None else p
        for p in loop.fragment.pieces
        if p.to == "thread"
    ]
    if writes and any(
        p.axis is not None and p.axis not in where for p in loop.fragment.pieces if p.to == "thread"
    ):
        return None
    if canonical(mine) != canonical(p for p in fragment.pieces if p.to == "thread"):
        # with as many copies and no padding, other digits are another map
        whole = all(loop.extents[k] == loop.fragment.shape[k] for k in where)
        same = sum(p.axis is None for p in mine) == 0 and fragment.copies == (0,)
        return (
            "a thread needs an element that another thread has"
            if whole and same and len(where) == len(loop.vars)
            else None
        )
    coefficients = []
    for p in loop.digits:
        if p.axis not in where:
            coefficients.append(0)
            continue
        own = [
            q
            for q in fragment.pieces
            if q.axis == where[p.axis] and q.to == "slot" and q.unit <= p.unit < q.unit * q.extent
        ]
        if not own or p.unit % own[0].unit or p.unit * p.extent > own[0].unit * own[0].extent:
            return None
        coefficients.append(own[0].stride * (p.unit // own[0].unit))
    return Slots(base, tuple(coefficients), ())


#: what was counted, by all that decides it: several passes ask the same
_COUNTED: dict[Any, Slots | str] = {}


def by_counting(loop: Loop, indices: Sequence[Any], fragment: Fragment, writes: bool) -> Slots | str:
    """The same for any index that can be evaluated, over all threads and rounds."""
    names = tuple(v.name for v in loop.vars)
    if len(set(names)) < len(names) or any(numeric.variables(e) - set(loop.vars) for e in indices):
        return _counted(loop, indices, fragment, writes)
    key = (names, loop.extents, loop.shifts, loop.fragment, tuple(map(str, indices)), fragment, writes)
    if (known := _COUNTED.get(key)) is not None:
        return known
    found = _counted(loop, indices, fragment, writes)
    if isinstance(found, str) or not found.dynamic:
        if len(_COUNTED) > 256:
            _COUNTED.clear()
        _COUNTED[key] = found
    return found


def _counted(loop: Loop, indices: Sequence[Any], fragment: Fragment, writes: bool) -> Slots | str:
    if loop.fragment.threads != fragment.threads:
        return "it is spread over other threads"
    values, inside = loop.values
    env = dict(zip(loop.vars, values, strict=True))
    at: list[Any] = []
    dynamic: list[tuple[Any, int, int, int]] = []
    for axis, e in enumerate(indices):
        try:
            at.append(np.broadcast_to(np.asarray(numeric.evaluate(e, env)), inside.shape))
        except numeric.Unknown:
            walked = walk(e, loop.vars, loop.extents, fragment.shape[axis])
            moved = None if walked is None else _moved(walked, [p for p in fragment.pieces if p.axis == axis])
            if walked is None or moved is None:
                return "its index is not known before the kernel runs"
            dynamic += moved
            at.append(np.broadcast_to(np.asarray(numeric.evaluate(walked.own, env)), inside.shape))
    outside = [(i < 0) | (i >= n) for i, n in zip(at, fragment.shape, strict=True)]
    good = inside & ~np.any(outside, axis=0) if outside else inside
    held = np.asarray(fragment.thread(*at)) if at else np.zeros(inside.shape, np.int64)
    threads = np.arange(fragment.threads)[:, None]
    holds = np.zeros(inside.shape, bool)
    for copy in fragment.copies:
        holds |= (held + copy) % fragment.threads == threads
    if not holds[good].all():
        return "a thread needs an element that another thread has"
    if writes and not _all_copies(loop, fragment, held, good):
        return "not every thread that has a copy of the element would write it"
    slots = np.broadcast_to(np.asarray(fragment.slot(*at)) if at else np.zeros((), np.int64), inside.shape)
    return _slots(loop, slots, good, tuple(dynamic))


def _moved(walked: Walk, pieces: Sequence[Piece]) -> list[tuple[Any, int, int, int]] | None:
    """What the step of an index adds to its element's slot; None where it would be another thread's. The step
    is a multiple of the grain and the rest is less than it: no digit below the grain changes, and none above
    it takes a carry."""
    moved = []
    for p in pieces:
        if walked.grain % (p.unit * p.extent) == 0:
            continue
        whole = p.unit % walked.grain == 0 or (
            walked.grain % p.unit == 0 and p.extent % (walked.grain // p.unit) == 0
        )
        if p.to == "thread" or not whole:
            return None
        moved.append((walked.step, p.unit, p.extent, p.stride))
    return moved


def _all_copies(loop: Loop, fragment: Fragment, held: Any, good: Any) -> bool:
    """Whether an iteration runs in every thread that holds the element it writes: as many threads as there
    are copies, since each of them was found to hold it."""
    return not good.any() or len(loop.fragment.copies) >= len(fragment.copies)


def _slots(loop: Loop, slots: Any, good: Any, dynamic: tuple[tuple[Any, int, int, int], ...]) -> Slots | str:
    rounds = slots.shape[1]
    table = np.zeros(rounds, np.int64)
    for r in range(rounds):
        mine = slots[good[:, r], r]
        if mine.size and not (mine == mine[0]).all():
            return "its slot differs from thread to thread"
        table[r] = mine[0] if mine.size else -1
    counters = loop._counters()
    known = table >= 0
    if not known.any():
        return Slots(0, tuple(0 for _ in counters), tuple(0 for _ in table), dynamic)
    base, coefficients = _linear(table, known, counters)
    if coefficients is None:
        return Slots(0, None, tuple(int(max(t, 0)) for t in table), dynamic)
    return Slots(base, coefficients, tuple(int(max(t, 0)) for t in table), dynamic)


def _linear(table: Any, known: Any, counters: list[Any]) -> tuple[int, tuple[int, ...] | None]:
    """``table`` as a linear function of the counters, where it is one and stays a slot in every round."""
    first = int(np.flatnonzero(known)[0])
    if first != 0:
        return 0, None
    base = int(table[0])
    coefficients = []
    for counter in counters:
        only = np.ones(len(table), bool)
        for other in counters:
            only &= other == (1 if other is counter else 0)
        where = np.flatnonzero(only)
        if not len(where):
            coefficients.append(0)
        elif not known[where[0]]:
            coefficients.append(0)
        else:
            coefficients.append(int(table[where[0]]) - base)
    made = base + sum(
        (c * k for c, k in zip(counters, coefficients, strict=True)), np.zeros(len(table), np.int64)
    )
    return (
        (base, tuple(coefficients))
        if (made[known] == table[known]).all() and (made >= 0).all()
        else (0, None)
    )
