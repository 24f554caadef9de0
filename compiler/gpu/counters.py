"""Counters in shared memory (T.alloc_signal), and the shared memory of other blocks, where a target reaches
it.

Order. A counter is added to, or set, by one thread for its executor, whose threads synchronize in front of
that (passes/insert_barriers.py): what all of them did happens before the release, by cumulativity. One thread
waits, with acquire, and the executor's threads synchronize behind it. The scope is the block's for counters
that a block signals itself, the cluster's inside ``T.Scale("cta_cluster")``, on both sides.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.gpu.build import all_of
from tilescale.compiler.gpu.build import call as do
from tilescale.compiler.gpu.places import InShared, widened
from tilescale.compiler.gpu.state import State
from tilescale.compiler.ir.signals import COMPARISONS
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.tvm_compat import tirx


class Counters(State):
    """Mixed into the lowering."""

    def elsewhere(self, buffer: Any, block: Any) -> Any:
        """A buffer's address in another block of the cluster."""
        raise self.refused("the shared memory of another block", "clusters")

    def cluster_barrier(self, call: Any) -> Any:
        """``T.barrier`` of the cluster's blocks."""
        raise self.refused("T.barrier of a cluster", "clusters")

    def cluster_copy(self, call: Any, nest: Any) -> Any:
        """A nest one side of which is another block's shared memory."""
        writes = str(call.attrs["side"]) == "dst"
        tile = call.args[1 if writes else 0].source
        own = self.shared_of(tile)
        there = tirx.decl_buffer(
            own.buf.ty.shape, str(own.buf.ty.dtype), f"{own.name}_there", scope="shared", layout=None
        )
        place = InShared(there, own.layout, own.shape, own.base, own.name)
        self.remote = (tile, writes, place)
        body = self.nest(nest)
        self.remote = None
        return sequence([tirx.DeclBuffer(there, call.span, data=self.elsewhere(own.buf, call.args[2])), body])

    def shared_signal(self, call: Any) -> Any:
        """``T.signal`` of a T.alloc_signal."""
        buf, index, tests = self.counter(call.args[0], call)
        before: list[Any] = []
        if len(call.args) > 2:
            there = tirx.decl_buffer(
                buf.ty.shape,
                "int64",
                f"{self.places[call.args[0].source].name}_there",
                scope="shared",
                layout=None,
            )
            before, buf = [tirx.DeclBuffer(there, call.span, data=self.elsewhere(buf, call.args[2]))], there
        at = tirx.address_of(tirx.BufferLoad(buf, [index]))
        done = do(
            f"shared_signal_{call.attrs['op']}<{self._wide(call)}>",
            at,
            widened(self.scalar(call.args[1]), "int64"),
            span=call.span,
        )
        return self.once(sequence([*before, self._inside(done, tests, call)]))

    def shared_wait(self, call: Any) -> Any:
        """``T.wait`` for one."""
        buf, index, tests = self.counter(call.args[0], call)
        at = tirx.address_of(tirx.BufferLoad(buf, [index]))
        compare = tirx.IntImm("int32", COMPARISONS.index(str(call.attrs["cmp"])))
        value = widened(self.scalar(call.args[1]), "int64")
        heard = tirx.call_extern(
            "bool", f"ts::shared_wait<{self._wide(call)}>", at, value, compare, self.record()
        )
        late = self.fail(
            "wait",
            call,
            f"T.wait for {self.places[call.args[0].source].name} took longer than TILESCALE_WAIT_TIMEOUT",
        )
        return self.once(self._inside(tirx.IfThenElse(tirx.Not(heard), late, None, call.span), tests, call))

    def shared_test(self, call: Any) -> Any:
        """``T.test`` of one, as a value."""
        buf, index, tests = self.counter(call.args[0], call)
        compare = tirx.IntImm("int32", COMPARISONS.index(str(call.attrs["cmp"])))
        at, value = (
            tirx.address_of(tirx.BufferLoad(buf, [index])),
            widened(self.scalar(call.args[1]), "int64"),
        )
        if tests:
            name = self.places[call.args[0].source].name
            raise self.refused(
                f"T.test of a counter that may lie outside {name}", "an index that a loop or an `if` bounds"
            )
        return tirx.call_extern("int32", f"ts::shared_test<{self._wide(call)}>", at, value, compare)

    def _wide(self, call: Any) -> str:
        return "true" if str(call.attrs["reach"]) == "cta_cluster" else "false"

    def _inside(self, done: Any, tests: list[Any], call: Any) -> Any:
        if not tests:
            return done
        return tirx.IfThenElse(
            all_of(tests), done, self.fail("bounds", call, "a counter outside its T.alloc_signal")
        )

    def zeroing(self) -> list[Any]:
        """The counters' zeros, by all threads."""
        made, threads = [], self.threads + self.extra
        for buffer, words in self.zeroed:
            for first in range(0, words, threads):
                store = tirx.BufferStore(
                    buffer, tirx.IntImm("int64", 0), [self.tid + first if first else self.tid]
                )
                inside = self.tid < tirx.IntImm("int32", words - first)
                made.append(store if words - first >= threads else tirx.IfThenElse(inside, store, None))
        return made
