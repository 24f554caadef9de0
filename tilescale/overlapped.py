"""A checked job's launches with ``ordered=False``, gathered to be run overlapped, see
compiler/checks/overlap.py.

Each runs in turn first, which gives the results that the program goes on with. A team's window of them ends
where its hosts meet, an ordered launch included, where one of its ranks launches with another team, where a
host reads a counter, and with the program; it then runs as often as the launches themselves do. A window that
is full runs, too, and the next one begins with its last launches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tilescale.arguments import Call
from tilescale.comm import sim

if TYPE_CHECKING:
    from tilescale.compiler.checks.overlap import Step, Touch
    from tilescale.compiler.checks.run import Result

#: bytes that the arguments of a window may have: those that lie further back are no longer kept
MOST_BYTES = 1 << 29


class Windows:
    """The windows of a job, one a team. ``job``: its ranks. number: of the launch that is made now. run: runs
    a window's launches overlapped; it gets in words whose they are."""

    def __init__(self, job: sim.SimWorld, number: Callable[[], int], run: Callable[[list[Step], str], None]):
        self.job, self.number, self.run = job, number, run
        self.steps: dict[tuple[int, ...], list[Step]] = {}
        self.marks: dict[tuple[int, ...], list[bytes]] = {}
        self.left: dict[
            tuple[int, ...], dict[int, Any]
        ] = {}  # address → what the window's last launch that knows it left there
        self.fresh: dict[tuple[int, ...], int] = {}  # how many of the launches have not been run overlapped
        self.whose: dict[tuple[int, ...], str] = {}
        self.seen: set[bytes] = set()

    def begin(
        self, prepared: Any, calls: Sequence[Call[Any]], members: tuple[int, ...], mark: bytes, whose: str
    ) -> Step:
        """A launch of a ``prepared`` program is about to run: its arguments as they are, and what hosts did
        in front of it."""
        from tilescale.compiler.checks.overlap import Step
        from tilescale.compiler.checks.run import Launch

        for other in [m for m in self.steps if m != members and set(m) & set(members)]:
            self.end(other)
        launch = Launch(prepared, [c.values() for c in calls], whose=whose)
        launch.keep()
        places = [{name: a.address for name, a in c.tensors.items() if a.block is not None} for c in calls]
        step = Step(launch, self.number(), places, loc=calls[0].loc)
        step.touches = [self._touches(rank) for rank in members]
        if self._polled(step, calls):
            self.end(members)
        left = self.left.get(members, {})
        for k, here in enumerate(places):
            arrays = launch.bound[k].arrays
            each = {name: _differs(arrays[name], left[at]) for name, at in here.items() if at in left}
            step.changed.append({name: changed for name, changed in each.items() if changed.any()})
        told = [(t.address, t.writes, str(t.loc)) for touches in step.touches for t in touches]
        self.whose[members] = whose
        self.marks.setdefault(members, []).append(
            mark + hashlib.blake2b(repr(told).encode(), digest_size=8).digest()
        )
        return step

    def _touches(self, rank: int) -> list[Touch]:
        from tilescale.compiler.checks.overlap import Touch

        made, hosts = [], self.job.hosts
        for twins, owner, access in hosts.recent.pop(rank, {}).values():
            memory = twins.memory[owner]
            mask = hosts.whole(access, len(memory))
            made.append(
                Touch(memory.__array_interface__["data"][0], mask, access.writes, access.what, access.loc)
            )
        return made

    @staticmethod
    def _polled(step: Step, calls: Sequence[Call[Any]]) -> bool:
        """Whether a host has read a counter of this launch, and so may know what others did."""
        signals = {p["name"] for p in calls[0].kernel.params if p["kind"] == "signal"}
        read = [t for touches in step.touches for t in touches if not t.writes]
        for k, here in enumerate(step.places):
            for low, size in (
                (at, step.launch.bound[k].arrays[name].nbytes) for name, at in here.items() if name in signals
            ):
                if any(t.mask[max(low - t.address, 0) : max(low + size - t.address, 0)].any() for t in read):
                    return True
        return False

    def made(self, step: Step, members: tuple[int, ...], done: Result, whole: bool) -> bool:
        """The launch has run in turn; ``whole``: with no finding. Returns whether it will be run with those
        beside it."""
        from tilescale.compiler.checks.overlap import MOST_EXECUTORS, MOST_LAUNCHES, fits

        mark = self.marks[members].pop()
        if not whole or not step.launch.made.program.params:
            self.end(members)
            return False
        steps = self.steps.setdefault(members, [])
        beside = not steps or (fits(steps, step) and steps[-1].executors + step.executors <= MOST_EXECUTORS)
        if not beside:
            self.end(members)
            steps = self.steps.setdefault(members, [])
        elif len(steps) == MOST_LAUNCHES or not self._room([*steps, step]):
            self._run(members)
            keep = steps[-(MOST_LAUNCHES // 2) :]
            while len(keep) > 1 and not self._room([*keep, step]):
                keep = keep[1:]
            self.marks[members] = self.marks[members][-len(keep) :]
            steps = self.steps[members] = keep
        steps.append(step)
        self.marks.setdefault(members, []).append(mark)
        self.fresh[members] = self.fresh.get(members, 0) + 1
        left = self.left.setdefault(members, {})
        for here, arrays in zip(step.places, done.arrays, strict=True):
            left.update({at: arrays[name] for name, at in here.items()})
        return beside and step.executors <= MOST_EXECUTORS

    @staticmethod
    def _room(steps: Sequence[Step]) -> bool:
        from tilescale.compiler.checks.overlap import MOST_EXECUTORS

        size = sum(a.nbytes for s in steps for b in s.launch.bound.values() for a in b.arrays.values())
        return size <= MOST_BYTES and sum(s.executors for s in steps) <= MOST_EXECUTORS

    def met(self, ranks: Sequence[int]) -> None:
        """Hosts have met: windows of theirs end."""
        for members in [m for m in self.steps if set(m) & set(ranks)]:
            self.end(members)

    def finish(self) -> None:
        """The program is over."""
        for members in list(self.steps):
            self.end(members)

    def end(self, members: tuple[int, ...]) -> None:
        """A window ends: what is new in it runs."""
        self._run(members)
        self.steps.pop(members, None)
        self.marks.pop(members, None)
        self.left.pop(members, None)
        self.fresh.pop(members, None)

    def _run(self, members: tuple[int, ...]) -> None:
        steps = self.steps.get(members, [])
        mark = b"".join(self.marks.get(members, []))
        if not self.fresh.get(members) or mark in self.seen:
            return
        self.fresh[members] = 0
        self.seen.add(mark)
        self.run(steps, self.whose[members])


def _differs(now: Any, before: Any) -> Any:
    """The elements of an array whose bytes are others than they were."""
    import numpy

    if now.shape != before.shape or now.dtype != before.dtype:
        return numpy.zeros(now.shape, bool)  # seen as something else, and so not in one window
    size = (*now.shape, now.itemsize)
    mine, its = (numpy.ascontiguousarray(a).reshape(-1).view("u1").reshape(size) for a in (now, before))
    return (mine != its).any(-1)
