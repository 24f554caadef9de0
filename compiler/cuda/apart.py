"""Consuming warpgroups with code of their own.

Where a product has fewer rows than a block's warpgroups could take, one of them runs it and what is computed over its accumulator, and the
others skip both (layout.Fragment.turn says which). With one text for all of them these are branches, and ptxas awaits every product where
ways meet. So each warpgroup gets a copy of the consumers' text: what it skips is not in it, and what it issues stays under way across
what others do. Meetings stand in all copies in the same order, since they stand outside of what is skipped.

A wait for products names how many of those issued later may still run. That number is the warpgroup's own: what it skipped is not in its
queue (`Apart.await_own`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tilescale.compiler.cuda.places import digit
from tilescale.compiler.frontend.builder import sequence
from tilescale.compiler.layout import Fragment
from tilescale.compiler.layout.infer import Executor
from tilescale.compiler.passes.roles import calls
from tilescale.compiler.tvm_compat import tirx

WARP, WARPGROUP = 32, 128


def is_apart(program: Any, consumer: Any, threads: int) -> bool:
    """Whether the warpgroups of a consumer get code of their own: some product is one of them's alone, and none is awaited where it is
    issued, by a number that would have to be another in each."""
    found = [c for c in calls(consumer) if c.op.name == "ts.gemm" and "wgmma" in c.attrs]
    few = [c for c in found if int(c.args[2].source.ty.shape[0]) < program.layouts[c.args[2].source].shape[0]]
    return threads > WARPGROUP and bool(few) and all(int(c.attrs["wgmma"]) < 0 for c in found)


class Apart:
    """Mixed into the lowering: who runs a statement where warpgroups have code of their own."""

    threads: int
    tid: Any
    executor: Executor
    analyzer: Any
    stmt: Any
    bind_range: Any
    #: the warpgroup whose code is being made; None where all run the same
    group: int | None = None
    #: the thread's number in it
    lane: Any = None
    #: how many threads behind the first one the fragments of the current statement begin
    turn: int = 0
    #: the products under way, and whether this warpgroup issued them
    flying: list[bool]

    def apart(self, consumer: Any) -> Any:
        """A consumer's body, once for each warpgroup."""
        bodies = []
        for self.group in range(self.threads // WARPGROUP):
            self.flying, self.lane = [], tirx.Var("lane", "int32")
            self.bind_range(self.lane, WARPGROUP)
            bodies.append(sequence([tirx.Bind(self.lane, self.tid - self.group * WARPGROUP), self.stmt(consumer)]))
        self.group = None
        made = bodies.pop()
        for g in reversed(range(len(bodies))):
            made = tirx.IfThenElse(self.tid < (g + 1) * WARPGROUP, bodies[g], made)
        return made

    @contextlib.contextmanager
    def turned(self, turn: int) -> Iterator[None]:
        """Inside, threads are counted from the one at which fragments begin that are turned so far."""
        outer, self.turn = self.turn, turn
        yield
        self.turn = outer

    def block_thread(self) -> Any:
        """The thread's number in the block, counted from where the current statement's fragments begin."""
        if self.group is not None:
            first = (self.group * WARPGROUP - self.turn) % self.threads
            return self.lane + first if first else self.lane
        return (self.tid + (self.threads - self.turn)) % self.threads if self.turn else self.tid

    def own(self, test: Any) -> bool | None:
        """Whether a test on threads holds for this warpgroup; None where it does not say."""
        if self.group is None:
            return None
        made = self.analyzer.simplify(test)
        return bool(made.value) if isinstance(made, tirx.IntImm) else None

    def skips(self, held: Fragment, shape: Any, thread: Any) -> bool:
        """Whether this warpgroup has nothing but padding of a fragment."""
        for p in held.pieces:
            reach = p.unit * p.extent
            if p.axis is None or p.to != "thread" or p.stride < WARP or reach != held.shape[p.axis] or shape[p.axis] % p.unit:
                continue
            mine = digit(thread, p.stride, p.extent, p.stride * p.extent == held.threads)
            if self.own(mine < int(shape[p.axis]) // p.unit) is False:
                return True
        return False

    def await_own(self, pending: int) -> int | None:
        """How many of this warpgroup's products may still run where all but the last ``pending`` of the text are awaited; None where it
        issued none of those that are."""
        if self.group is None:
            return pending
        done, self.flying = self.flying[: len(self.flying) - pending], self.flying[len(self.flying) - pending :]
        return sum(self.flying) if any(done) else None
