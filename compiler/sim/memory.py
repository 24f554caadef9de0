"""Memory with a memory: beside every element the epochs of its last write, and of the reads and atomic
updates since.

An *event* is one access by one statement: a number, behind which stand the executor, its clock at that time
and what to say of it. An event of executor e at clock c happens before executor f's next step exactly when
f's vector clock has at least c at e (Lamport 1978, Mattern 1989). Per element one last write is enough, since
a write that is no race follows everything before it; reads and atomic updates may be concurrent among
themselves and lie in as many planes as it takes (the scheme of FastTrack, Flanagan and Freund, PLDI 2009,
with planes in place of per-element vectors).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tilescale.compiler.ir.contexts import Site
from tilescale.compiler.sim import mbarriers, polling

if TYPE_CHECKING:
    from tilescale.compiler.sim.machine import Executor

#: events that are not of a kernel: memory that nothing wrote, and what the host wrote before the launch
UNWRITTEN, HOST = 0, 1
#: atomic operations that do one half of an update alone, or order nothing: they collide with what an update
#: collides with
HALVES = ("load", "store", "add")


class Events:
    """All accesses of a run: who and when as arrays, so that whole tiles are checked at once; what to say of
    them as a list."""

    def __init__(self) -> None:
        self.who = np.zeros(1024, np.int32)
        self.clock = np.zeros(1024, np.int64)
        self.said: list[tuple[Any, ...]] = [(), ()]

    def add(self, ex: Executor, site: Site, mode: str, key: Any) -> int:
        number = len(self.said)
        if number == len(self.who):
            self.who, self.clock = np.resize(self.who, 2 * number), np.resize(self.clock, 2 * number)
        self.who[number], self.clock[number] = ex.number, ex.now
        self.said.append((ex.name, site, mode, key))
        return number


class Shadow:
    """What is known of the elements of one piece of memory. ``cells``: the smallest element under which it is
    seen.

    tracked: accesses of several executors are compared; else only what was written is remembered. reads:
    whether reads are remembered as well (useless where the kernel never writes). key: which memory it is, in
    every run. viewed: there are views that see it in another shape or dtype.
    """

    def __init__(
        self, cells: int, events: Events, *, tracked: bool, written: bool, key: tuple[Any, ...], viewed: bool
    ):
        self.events, self.tracked, self.key, self.viewed = events, tracked, key, viewed
        self.last = np.zeros(cells, np.int32)  # UNWRITTEN
        if written:
            self.last.fill(HOST)
        self.whole = written  # every cell has been written
        self.reads: list[Any] = []
        self.updates: list[Any] = []
        self.flying: Any = None  # the product in flight that writes here, see flights.py
        self.stored: list[Any] = []  # the author's stores by TMA that may still read here, see mbarriers.py
        self.looks: list[Any] | None = (
            None  # of a tile that TMA fills: who read it with which fence behind that, see mbarriers.py
        )

    def access(
        self, ex: Executor, shape: tuple[int, ...], key: Any, mode: str, site: Site, storage: Storage
    ) -> None:
        """Records the access of ``key`` (anything that indexes an array of ``shape``) and what it collides
        with. ``mode``: "read", "write", or of an atomic operation "update", "load", "store" or "add"."""
        half, mode = mode, "update" if mode in HALVES else mode
        last = self.last.reshape(shape)
        event = self.events.add(ex, site, mode, key) if self.tracked else 0
        if not self.tracked and half in ("write", "store"):
            last[key] = HOST
            self.whole = self.whole or self.last.size == 1
            return
        there = last[key]
        if half not in ("write", "store") and not self.whole and not site.keeps:
            # Here and below zeros are counted, which takes NumPy a third of any() and all() on small tiles.
            if there == UNWRITTEN if type(there) is np.int32 else np.count_nonzero(there) < there.size:
                event_of_read = event or self.events.add(ex, site, mode, key)
                ex.machine.read_early(ex, storage, site, event_of_read, np.asarray(there) == UNWRITTEN)
            elif 8 * there.size >= self.last.size:  # else looking costs more than it saves
                self.whole = np.count_nonzero(self.last) == self.last.size
        if not self.tracked:
            if half not in ("read", "load"):
                last[key] = HOST
            return
        self._conflicts(ex, there, storage, event, "write")
        if mode != "update":
            for plane in self.updates:
                self._conflicts(ex, plane.reshape(shape)[key], storage, event, "update")
        if mode != "read":
            for plane in self.reads:
                self._conflicts(ex, plane.reshape(shape)[key], storage, event, "read")
        if mode == "write":
            last[key] = event
            for plane in (*self.reads, *self.updates):
                plane.reshape(shape)[key] = 0
        else:
            self._remember(ex, self.reads if mode == "read" else self.updates, shape, key, event)
            if (
                half != "load" and mode == "update"
            ):  # what is updated is written, and ordered by its own plane
                now = last[key]
                last[key] = np.where(now == UNWRITTEN, HOST, now)

    def _remember(
        self, ex: Executor, planes: list[Any], shape: tuple[int, ...], key: Any, event: int
    ) -> None:
        """Into the first plane where nothing is forgotten: what stands there happened before, so that whoever
        is ordered behind this access is ordered behind that one."""
        for plane in planes:
            view = plane.reshape(shape)
            if self._unordered(ex, view[key]) is None:
                view[key] = event
                return
        fresh = np.zeros(self.last.shape, np.int32)
        fresh.reshape(shape)[key] = event
        planes.append(fresh)

    def _unordered(self, ex: Executor, ids: Any) -> Any:
        """Where events do not happen before the executor's next step; None where all do."""
        if type(ids) is np.int32:  # of one cell, as most accesses by scalar code are
            first, alike = ids.item(), True
        elif ids.size:
            first = ids.item(0)
            alike = ids.size == 1 or np.count_nonzero(ids == first) == ids.size
        else:
            return None
        if alike:
            # What no kernel did (`UNWRITTEN`, `HOST`) happens before everything.
            if first <= HOST:
                return None
            who = self.events.who.item(first)
            if self.events.clock.item(first) <= ex.known.item(who) or ex.shares and who == ex.number:
                return None
            return np.ones(ids.shape, bool)
        by = self.events.who[ids]
        bad = self.events.clock[ids] > ex.known[by]
        if ex.shares:  # what it did itself stands in no clock yet
            bad &= by != ex.number
        return bad if np.count_nonzero(bad) else None

    def _conflicts(self, ex: Executor, ids: Any, storage: Storage, event: int, other: str) -> None:
        bad = self._unordered(ex, ids)
        if bad is not None:
            ex.machine.raced(storage, event, np.asarray(ids), np.asarray(bad), other)


class Storage:
    """A tensor or a tile: the elements, and what is known of them. Views share the shadow."""

    def __init__(
        self, name: str, dtype: str, data: Any, shadow: Shadow, *, scope: str, owner: tuple[Any, ...] = ()
    ):
        self.name, self.dtype, self.data, self.shadow = name, dtype, data, shadow
        self.scope, self.owner = scope, owner
        self.shape: tuple[int, ...] = data.shape
        self.ring: Any = None  # the ring whose stages it holds, see rings.py
        self.shared = ""  # for findings: that an element is a byte of two 4-bit numbers
        self.is_global = scope.startswith("global")
        self.is_common = scope.startswith(("global", "shared"))  # others may see it
        parts = len(shadow.last) // max(1, data.size)
        self.cells = (*self.shape, parts) if parts > 1 else self.shape

    def record(self, ex: Executor, key: Any, mode: str, site: Site, posted: bool = False) -> None:
        """An access of the elements that ``key`` indexes. ``posted``: a write that lands later."""
        if self.ring is not None:
            self.ring.touched(ex, self, key, mode, site)
        if self.shadow.flying is not None and self.shadow.flying.number != ex.number:
            self.shadow.flying.touched(ex, self, key, mode, site)
        if self.shadow.stored and mode != "read":
            mbarriers.overwritten(ex, self, key, site)
        if self.shadow.looks is not None and mode == "read":
            mbarriers.looked(ex, self, key, site)
        if self.is_common:
            if mode in ("write", "add"):
                ex.machine.polling.changed()
            elif ex.polled is not None:
                polling.looked(ex, self, key)
        shadow = self.shadow
        if shadow.whole and not shadow.tracked:
            return
        for observer in ex.machine.observers if shadow.tracked else ():
            observer.accessed(ex, self, key, "update" if mode in HALVES else mode, posted)
        shadow.access(ex, self.cells, key, mode, site, self)


def elements(bad: Any, cells: tuple[int, ...], key: Any) -> Any:
    """For each element whether one of its cells is bad."""
    return bad.any(axis=-1) if isinstance(key, tuple) and len(cells) > len(key) else bad


def describe(name: str, key: Any, bad: Any = None) -> str:
    """``X[0:64, 3]``: the rectangle around the elements that ``key`` indexes (those where ``bad`` holds)."""
    parts = []
    for axis, k in enumerate(key if isinstance(key, tuple) else (key,)):
        if isinstance(k, slice):
            low, high = k.start, k.stop
            if bad is not None and bad.ndim == len(key):
                hit = np.flatnonzero(bad.any(axis=tuple(a for a in range(bad.ndim) if a != axis)))
                if hit.size:
                    low, high = low + int(hit[0]), low + int(hit[-1]) + 1
        elif isinstance(k, np.ndarray):
            chosen = k
            if bad is not None and bad.shape == np.broadcast_shapes(bad.shape, k.shape):
                chosen = np.broadcast_to(k, bad.shape)[bad]
            low, high = int(chosen.min()), int(chosen.max()) + 1
        else:
            low, high = int(k), int(k) + 1
        parts.append(str(low) if high == low + 1 else f"{low}:{high}")
    return f"{name}[{', '.join(parts)}]"
