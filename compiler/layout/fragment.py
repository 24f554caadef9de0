"""Fragments: a tile spread over the registers of threads. Which threads hold an element, and in which of
their slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from tilescale.compiler.ir import source
from tilescale.compiler.layout.pieces import Piece, canonical, check_axes, evaluate, is_injective, radix, span
from tilescale.errors import TileValueError


@dataclass(frozen=True)
class Fragment:
    """``shape`` elements over ``threads`` threads.

    Element ``index`` lies in slot ``slot(index)`` of the threads ``thread(index) + copies``, modulo their
    number. ``first_thread``: how many threads behind the first one the pieces begin, also modulo that number.
    Two fragments are equal exactly when they are the same map.

    Raises:
        TileValueError: the pieces do not cut the axes, or two elements fall into one slot of a thread.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    threads: int
    first_thread: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "pieces", canonical(self.pieces))
        check_axes(self.shape, self.pieces)
        if any(p.to not in ("thread", "slot") or (p.axis is None and p.to != "thread") for p in self.pieces):
            raise TileValueError(
                f"a fragment of {self.pieces}", expected="pieces to a thread or a slot, copies in threads"
            )
        if not is_injective(self.pieces):
            raise TileValueError(
                f"two elements of a fragment {self.shape} share a slot",
                expected="strides that do not overlap",
            )
        if span(self.pieces, "thread") > self.threads:
            raise TileValueError(
                f"a fragment over {span(self.pieces, 'thread')} threads", expected=f"at most {self.threads}"
            )

    # -- the map
    # ------------------------------------------------------------------------------------------------------
    def thread(self, *index: Any) -> Any:
        """The first thread that holds an element; arrays are taken element by element."""
        made = evaluate(self.pieces, "thread", index)
        return (made + self.first_thread) % self.threads if self.first_thread else made

    def slot(self, *index: Any) -> Any:
        """The slot of its threads' registers that holds an element."""
        return evaluate(self.pieces, "slot", index)

    @property
    def copies(self) -> tuple[int, ...]:
        """How far the threads that hold the same element are from the first one, which is 0."""
        out = [0]
        for p in self.pieces:
            if p.axis is None:
                out = [o + k * p.stride for k in range(p.extent) for o in out]
        return tuple(sorted(out))

    @property
    def slots(self) -> int:
        """Slots that a thread needs."""
        return span(self.pieces, "slot")

    @property
    def covers(self) -> bool:
        """Whether every slot of every thread holds an element."""
        whole = prod(self.shape) * len(self.copies) == self.threads * self.slots
        return whole and radix(self.pieces, "thread") is not None and radix(self.pieces, "slot") is not None

    def index(self, thread: Any, slot: Any) -> tuple[Any, ...]:
        """The element in a slot of a thread: the inverse of the map.

        Raises:
            TileValueError: the fragment leaves slots or threads empty, so that not all have one.
        """
        by_thread, by_slot = radix(self.pieces, "thread"), radix(self.pieces, "slot")
        thread = (thread - self.first_thread) % self.threads if self.first_thread else thread
        if by_thread is None or by_slot is None or not self.covers:
            raise TileValueError(
                f"the inverse of a fragment {self.shape} that leaves slots empty", expected="one that covers"
            )
        out: list[Any] = [0] * len(self.shape)
        for digits, place in ((by_thread, thread), (by_slot, slot)):
            for p in digits:
                if p.axis is not None:
                    out[p.axis] = out[p.axis] + place // p.stride % p.extent * p.unit
        return tuple(out)

    def holders(self) -> Any:
        """For people and tests: int array (threads, slots) of row-major element numbers, -1 where there is
        none."""
        out = np.full((self.threads, self.slots), -1, np.int64)
        index = np.indices(self.shape)
        for copy in self.copies:
            out[(self.thread(*index) + copy) % self.threads, self.slot(*index)] = np.arange(
                prod(self.shape)
            ).reshape(self.shape)
        return out

    # -- new ones from old
    # --------------------------------------------------------------------------------------------
    def permuted(self, order: Sequence[int]) -> Fragment:
        """The same places with the axes in another order: axis k of the result is axis ``order[k]`` of this
        one."""
        where = {axis: k for k, axis in enumerate(order)}
        pieces = [p if p.axis is None else replace(p, axis=where[p.axis]) for p in self.pieces]
        return Fragment(tuple(self.shape[k] for k in order), tuple(pieces), self.threads, self.first_thread)

    def reduced(self, axis: int) -> Fragment:
        """What is left of the map when an axis is summed away: its digits in slots are added up within a
        thread, its digits in threads become copies, since a sum across threads leaves the result in all of
        them."""
        pieces = []
        for p in self.pieces:
            if p.axis == axis:
                if p.to == "thread":
                    pieces.append(replace(p, axis=None))
            else:
                pieces.append(replace(p, axis=p.axis - 1) if p.axis is not None and p.axis > axis else p)
        shape = self.shape[:axis] + self.shape[axis + 1 :]
        return Fragment(shape, packed(pieces), self.threads, self.first_thread)

    def expanded(self, axis: int, extent: int) -> Fragment:
        """A new axis in front of ``axis``, all in slots of the threads that hold the element."""
        moved = [
            replace(p, axis=p.axis + 1) if p.axis is not None and p.axis >= axis else p for p in self.pieces
        ]
        pieces = (*moved, Piece(axis, 1, extent, "slot", self.slots))
        return Fragment(
            (*self.shape[:axis], extent, *self.shape[axis:]), pieces, self.threads, self.first_thread
        )

    def repeated(self, axis: int, times: int, to: str = "slot") -> Fragment:
        """The tile ``times`` over along an axis: further slots of the same threads, or (``to="thread"``)
        further threads."""
        stride = self.slots if to == "slot" else self.threads
        pieces = (*self.pieces, Piece(axis, self.shape[axis], times, to, stride))
        shape = (*self.shape[:axis], self.shape[axis] * times, *self.shape[axis + 1 :])
        return Fragment(shape, pieces, self.threads * (times if to == "thread" else 1))

    def copied(self, times: int) -> Fragment:
        """The same elements again in ``times`` groups of threads."""
        return Fragment(
            self.shape, (*self.pieces, Piece(None, 0, times, "thread", self.threads)), self.threads * times
        )

    def repeat(
        self, repeats: Sequence[int], repeat_on_thread: bool = False, lower_dim_first: bool = True
    ) -> Fragment:
        """`repeated` along every axis at once: the tile ``repeats[k]`` times over along axis k, numbered from
        the last axis on, or from the first (``lower_dim_first=False``).

        Raises:
            TileValueError: anything but a positive number for each axis.
        """
        given = list(repeats) if isinstance(repeats, (list, tuple)) else []
        if len(given) != len(self.shape) or not all(map(_positive, given)):
            raise TileValueError(
                f"repeat({repeats!r}) of a fragment of {self.shape}", loc=source.current(),
                expected=f"{len(self.shape)} positive numbers, one an axis",
            )  # fmt: skip
        made, axes = self, range(len(self.shape))
        for axis in reversed(axes) if lower_dim_first else axes:
            made = made.repeated(axis, repeats[axis], "thread" if repeat_on_thread else "slot")
        return made

    def replicate(self, times: int) -> Fragment:
        """The same as `copied`.

        Raises:
            TileValueError: no positive number.
        """
        if not _positive(times):
            raise TileValueError(
                f"replicate({times!r}) of a fragment", loc=source.current(), expected="a positive number"
            )
        return self.copied(times)

    def get_thread_size(self) -> int:
        """`threads`, by TileLang's name."""
        return self.threads

    def is_equal(self, other: Any) -> bool:
        """Whether another fragment is the same map, by TileLang's name."""
        return bool(self == other)

    def map_forward_thread(self, indices: Sequence[Any]) -> Any:
        """`thread` of an element, by TileLang's name."""
        return self.thread(*indices)

    def holds(self, other: Fragment) -> bool:
        """Whether every thread that needs an element by ``other`` has it here: then no data has to move
        between threads."""
        if self.shape != other.shape or self.threads != other.threads:
            return False
        index = np.indices(self.shape)
        mine = np.stack([(self.thread(*index) + c) % self.threads for c in self.copies])
        theirs = np.stack([(other.thread(*index) + c) % other.threads for c in other.copies])
        return bool((theirs[:, None] == mine[None]).any(axis=1).all())

    def vector(self, axis: int) -> int:
        """How many neighbours along an axis lie in neighbouring slots of one thread: what one vector access
        can move."""
        for p in self.pieces:
            if p.axis == axis and p.unit == 1:
                return p.extent if p.to == "slot" and p.stride == 1 else 1
        return 1

    def across(self, axis: int) -> tuple[int, ...]:
        """The strides, in threads, of the shuffles that a reduction along ``axis`` takes: one for each power
        of two, and a digit that is none of them as its whole."""
        out: list[int] = []
        for p in self.pieces:
            if p.axis == axis and p.to == "thread":
                out += (
                    [p.stride << k for k in range(p.extent.bit_length() - 1)]
                    if p.extent & (p.extent - 1) == 0
                    else [p.stride]
                )
        return tuple(sorted(out))


def _positive(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def packed(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """The same pieces with slots numbered without the gaps that a reduction leaves, in the order that they
    had."""
    out, step = [p for p in pieces if p.to != "slot"], 1
    for p in sorted((p for p in pieces if p.to == "slot"), key=lambda p: p.stride):
        out.append(replace(p, stride=step))
        step *= p.extent
    return tuple(out)


def row_major(shape: Sequence[int], threads: int, vector: int = 1) -> Fragment:
    """Threads side by side along the last axis, each with ``vector`` neighbours: what coalesced access to
    global memory asks for. Elements that the threads do not cover in one sweep take further slots; threads
    that are too many hold copies.

    Raises:
        TileValueError: the tile cannot be cut evenly among the threads.
    """
    pieces, left, slot, unit = [], threads, 1, vector
    if shape[-1] % vector:
        raise TileValueError(f"rows of {shape[-1]} elements in vectors of {vector}", expected="a divisor")
    if vector > 1:
        pieces.append(Piece(len(shape) - 1, 1, vector, "slot", 1))
        slot = vector
    for axis in range(len(shape) - 1, -1, -1):
        rest = shape[axis] // unit
        share = _share(rest, left)
        if share is None:
            raise TileValueError(
                f"a tile of {tuple(shape)} over {threads} threads", expected="extents that divide one another"
            )
        if share > 1:
            pieces.append(Piece(axis, unit, share, "thread", threads // left))
        if rest > share:
            pieces.append(Piece(axis, unit * share, rest // share, "slot", slot))
            slot *= rest // share
        left //= share
        unit = 1
    if left > 1:
        pieces.append(Piece(None, 0, left, "thread", threads // left))
    return Fragment(tuple(shape), tuple(pieces), threads)


def _share(extent: int, threads: int) -> int | None:
    """How many threads an axis takes: all that there are, or as many as it has elements; None where neither
    divides the other."""
    if extent % threads == 0:
        return threads
    return extent if threads % extent == 0 else None
