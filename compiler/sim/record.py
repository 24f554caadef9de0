"""Listens to a run and makes its timeline, in logical time.

Logical time is Lamport's (Time, clocks, and the ordering of events in a distributed system, CACM 1978), with
lengths: every executor has a clock of *steps*, its operations take the steps below, and a wait lasts until
the signal that ends it was sent (those sent earliest count first), a barrier until the last has come, an
atomic operation until the one before it on that element has ended. What a schedule of the simulator happened
to choose is not in it, as far as the program's result does not depend on it; what T.Parallel computes takes
no time. A step stands for roughly a nanosecond of one block of an H100: 1/132 of its memory's, its links' and
its tensor cores' pace.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tilescale.compiler.sim.flights import Put
from tilescale.compiler.sim.observe import Observer
from tilescale.compiler.sim.timeline import SIGNAL_BYTES, Arrow, Slice, Timeline, Traffic
from tilescale.language.dtypes import BITS
from tilescale.packets import words

if TYPE_CHECKING:
    from tilescale.compiler.ir.contexts import Site
    from tilescale.compiler.ir.operations import TileOp
    from tilescale.compiler.sim.counters import Counter
    from tilescale.compiler.sim.machine import Executor, Machine, Meeting
    from tilescale.compiler.sim.memory import Storage
    from tilescale.compiler.sim.packets import Packets

#: what a step moves within a rank and between ranks, in bytes, and what it multiplies, in operations
LOCAL, REMOTE, FLOPS = 24, 4, 8192


class Recorder(Observer):
    """What happens in one run, executor by executor."""

    def __init__(self, name: str, ranks: int):
        self.timeline = Timeline(name, Traffic(ranks))
        self.clock: dict[int, int] = {}
        self.site: dict[int, Site] = {}
        self.sent: dict[
            Any, list[tuple[int, int, tuple[int, int, int]]]
        ] = {}  # counter → (amount, sent when, by whom)
        self.since: dict[int, int] = {}  # executor → when its wait began
        self.meeting: dict[Any, list[tuple[Executor, Site, int]]] = {}
        self.flying: dict[int, int] = {}  # executor → its bytes on their way
        self.arrived: dict[Any, Any] = {}  # box of packets → when each came
        self.updated: dict[tuple[Any, int], int] = {}  # (memory, element) → when its last update ended

    def _now(self, ex: Executor) -> int:
        if ex.number not in self.clock:
            self.clock[ex.number] = 0
            below = "".join(
                f", {scale}" if index is None else f", {scale} {index}" for scale, index in ex.path
            )
            block = ex.block.shown
            shown = block[0] if len(block) == 1 else block
            self.timeline.threads[ex.rank.number, self._thread(ex)] = f"block {shown}{below}"
        return self.clock[ex.number]

    def _thread(self, ex: Executor) -> int:
        """An executor's number within its rank."""
        machine = ex.machine
        each = math.prod(machine.grid) * machine.prepared.executors
        return ex.number - 1 - ex.rank.number * each

    def _slice(
        self, ex: Executor, kind: str, name: str, site: Site | None, start: int, duration: int, **more: Any
    ) -> None:
        loc = None if site is None else site.loc
        file, line = (loc.file, loc.line) if loc else ("", 0)
        made = Slice(kind, name, ex.rank.number, self._thread(ex), start, duration, file, line, more)
        self.timeline.slices.append(made)
        self.clock[ex.number] = start + duration

    # -- operations
    # -----------------------------------------------------------------------------------------------
    def performed(self, ex: Executor, op: TileOp, site: Site, owner: int | None, accesses: list[Any]) -> None:
        self.site[ex.number] = site
        if op.observed or ex.lanes is not None:
            return
        start = self._now(ex)
        owned = [(view, mode, owner if remote else None) for view, mode, remote, _ in accesses]
        moved = [(view, mode, whose, *_extent(ex, view, whose)) for view, mode, whose in owned]
        if not moved:
            return
        far = next(
            (m for m in moved if m[2] is not None and m[0].reach == "device" and m[2] != ex.rank.number), None
        )
        if far is not None:
            self._transfer(ex, site, far, start, op.spelling)
            return
        counts = [count for *_, count, _ in moved]
        nbytes = sum(count * width(view) for view, _, _, count, _ in moved)
        cost = -(-nbytes // LOCAL)
        if (
            op.moves
        ):  # memory reads and writes them, and they move once; of ranks' copies the far side is told
            view, _, _, count, _ = max(moved, key=lambda m: (m[2] is not None, m[1] == "read"))
            nbytes = count * width(view)
        if op.multiplies and len(counts) >= 3:  # |A||B||C| = (MNK)²; C is written, which comes last
            cost = int(2 * math.sqrt(math.prod(float(c) for c in (*counts[:2], counts[-1])))) // FLOPS
        regions = ", ".join(
            f"{'reads' if mode == 'read' else 'writes'} {region}" for _, mode, _, _, region in moved
        )
        self._slice(ex, op.spelling, moved[-1][-1], site, start, max(1, cost), bytes=nbytes, regions=regions)

    def _transfer(self, ex: Executor, site: Site, far: tuple[Any, ...], start: int, name: str) -> None:
        view, mode, peer, count, region = far
        me, nbytes = ex.rank.number, count * width(view)
        pulled = mode == "read"
        source, target = (peer, me) if pulled else (me, peer)
        self.timeline.traffic.add(source, target, nbytes, pulled=pulled)
        cost = max(1, -(-nbytes // REMOTE))
        self._slice(
            ex,
            name,
            region,
            site,
            start,
            cost,
            bytes=nbytes,
            peer=peer,
            direction="pull" if pulled else "put",
        )
        self.timeline.flight.append((me, start, nbytes))
        if pulled:
            self.timeline.flight.append((me, start + cost, -nbytes))
        else:  # known to be there when the executor next releases
            self.flying[ex.number] = self.flying.get(ex.number, 0) + nbytes

    def accessed(self, ex: Executor, storage: Storage, key: Any, mode: str, posted: bool) -> None:
        if mode not in ("load", "atomic"):
            return
        cells = [(storage.shadow.key, int(c)) for c in np.ravel_multi_index(key, storage.shape).ravel()]
        start = max([self._now(ex), *(self.updated.get(c, 0) for c in cells)])
        self._slice(ex, "atomic", storage.name, self.site.get(ex.number), start, 1, elements=len(cells))
        if mode == "atomic":
            self.updated.update(dict.fromkeys(cells, start + 1))
            self._released(ex)

    # -- signals and waits
    # ----------------------------------------------------------------------------------------
    def signalled(self, ex: Executor | Put, counter: Counter, amount: int, op: str) -> None:
        if isinstance(ex, Put):  # a row of whom it goes on beside
            ex = ex.ex
        start, home = self._now(ex), counter.home[0]
        self._released(ex)
        self._slice(
            ex, "signal", counter.name, self.site.get(ex.number), start, 1, value=amount, op=op, peer=home
        )
        self.timeline.traffic.add(ex.rank.number, home, SIGNAL_BYTES)
        by = (ex.rank.number, self._thread(ex), start)
        self.sent.setdefault(counter.key, []).append((amount, start + 1, by))

    def waits(self, ex: Executor, site: Site, counter: Counter) -> None:
        self.since[ex.number] = self._now(ex)

    def observed(self, ex: Executor, site: Site, counter: Counter, cmp: str, value: int) -> None:
        start = self.since.pop(ex.number)
        ending = self._ending(counter, cmp, value)
        when = start if ending is None else max(start, ending[1])
        self._slice(ex, "wait", counter.name, site, start, when - start + 1, condition=f"{cmp} {value}")
        if ending is not None:
            target = (ex.rank.number, self._thread(ex), when)
            self.timeline.arrows.append(Arrow(counter.name, ending[2], target))

    def _ending(self, counter: Counter, cmp: str, value: int) -> tuple[int, int, tuple[int, int, int]] | None:
        """The signal that ended a wait: of additions the first behind which there were enough, in the order
        of time; else the last."""
        from tilescale.compiler.sim.counters import COMPARE

        sent = self.sent.get(counter.key, [])
        if not (counter.grows and cmp in ("ge", "gt")):
            return sent[-1] if sent else None
        total = counter.history[0].value
        if COMPARE[cmp](total, value):
            return None
        for one in sorted(sent, key=lambda s: s[1:]):
            total += one[0]
            if COMPARE[cmp](total, value):
                return one
        return None

    # -- packets
    # --------------------------------------------------------------------------------------------------
    def put(self, ex: Executor, box: Packets, key: Any, site: Site, owner: int) -> None:
        start, nbytes = self._now(ex), 8 * words(box.dense) * math.prod(k.stop - k.start for k in key)
        self.timeline.traffic.add(ex.rank.number, owner, nbytes)
        cost = max(1, -(-nbytes // (LOCAL if owner == ex.rank.number else REMOTE)))
        self._slice(
            ex, "put_packets", box.part(key), site, start, cost, bytes=nbytes, peer=owner, direction="put"
        )
        arrived = self.arrived.setdefault(box.key, np.zeros(box.shape, np.int64))
        arrived[key] = start + cost

    def awaits(self, ex: Executor, box: Packets, key: Any, site: Site) -> None:
        self.since[ex.number] = self._now(ex)

    def took(self, ex: Executor, box: Packets, key: Any, site: Site) -> None:
        start = self.since.pop(ex.number)
        end = max(start, int(self.arrived[box.key][key].max()))
        self._slice(ex, "get_packets", box.part(key), site, start, end - start + 1)

    # -- meetings
    # -------------------------------------------------------------------------------------------------
    def came(self, ex: Executor, site: Site, meeting: Meeting) -> None:
        came = self.meeting.setdefault(meeting.key, [])
        came.append((ex, site, self._now(ex)))
        self._released(ex)
        if len(came) == meeting.expected:
            end = max(when for *_, when in came) + 1
            for other, there, when in came:
                if other.number in meeting.gone:
                    continue
                self._slice(
                    other, "barrier", str(meeting.key[0]), there, when, end - when, executors=meeting.expected
                )
            came.clear()

    def forked(self, ex: Executor, child: Executor) -> None:
        start = self._now(ex)
        self._now(child)
        self.clock[child.number] = start

    def ended(self, ex: Executor) -> None:
        now = self._now(ex)
        self._released(ex)
        if ex.parent is not None:
            self.clock[ex.parent.number] = max(self._now(ex.parent), now)

    def _released(self, ex: Executor) -> None:
        """What the executor put has arrived."""
        if nbytes := self.flying.pop(ex.number, 0):
            self.timeline.flight.append((ex.rank.number, self._now(ex), -nbytes))

    def finish(self, machine: Machine) -> Timeline:
        """The timeline; waits that nothing ended last to its end."""
        end = max([int(self.timeline.end), *self.clock.values()])
        for ex in machine.blocked:
            if ex.waiting is not None and not ex.children:
                start = self.since.get(ex.number, self._now(ex))
                name = ex.waiting.counter.name if ex.waiting.counter is not None else ex.waiting.site.what
                self._slice(
                    ex,
                    "wait",
                    name,
                    ex.waiting.site,
                    start,
                    max(1, end - start),
                    condition=ex.waiting.text,
                    ended=False,
                )
        return self.timeline


def width(view: Any) -> int:
    """Bytes of an element."""
    return -(-BITS[view.dtype] // 8)


def _extent(ex: Executor, view: Any, owner: int | None) -> tuple[int, str]:
    """How many elements of a region lie inside its memory, and the region as text."""
    storage = view.storage(ex, owner)
    key, _, _ = view.cut(ex, storage)
    shown = ", ".join(f"{k.start}:{k.stop}" if k.stop != k.start + 1 else str(k.start) for k in key)
    return math.prod(k.stop - k.start for k in key), f"{storage.name}[{shown}]"
