"""Blocks of a cluster and executors of a block, as thread IR: who they are, whose shared memory they reach, counters there
(include/ts/cluster.cuh). A block's rank along an axis is its index modulo the cluster's extent, and its number in the cluster counts x
first (PTX ISA, "%cluster_ctarank").

Order. A counter is added to, or set, by one thread for its executor, whose threads meet in front of that (passes/fences.py): what all
of them did happens before the release, by cumulativity. One thread waits, with acquire, and the executor's threads meet behind it. The
scope is the block's for counters that a block signals itself, the cluster's inside ``T.Scale("cta_cluster")``, on both sides. Other
blocks' shared memory is written by plain stores, which such a release or ``barrier.cluster`` (arrive releases, wait acquires, by
every thread) orders. A block whose memory others reach begins and ends with its cluster: nobody touches it before its counters are zero,
or when it has gone (CUDA C++ Programming Guide, "Distributed Shared Memory").
"""

from __future__ import annotations

from math import prod
from typing import Any

from tilescale.compiler.gpu.build import all_of
from tilescale.compiler.gpu.build import call as do
from tilescale.compiler.gpu.places import InShared, widened
from tilescale.compiler.ir.signals import COMPARISONS
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ir.target import Target
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx
from tilescale.errors import TileSyntaxError

AXES = "xyz"


class Clusters:
    """Mixed into the lowering. ``axes``: those along which blocks are looked at, some of "xyz"."""

    program: Any
    arch: str
    target: Target
    raw: Any
    tid: Any
    threads: int
    extra: int
    places: dict[Any, Any]
    zeroed: list[tuple[Any, int]]
    by_hand: list[tuple[Any, list[int]]]
    remote: Any
    nest: Any
    once: Any
    refused: Any
    scalar: Any
    access: Any
    fail: Any
    record: Any
    proven: Any
    analyzer: Any

    def cluster_size(self, axes: str) -> int:
        """How many blocks there are along ``axes``."""
        return prod(n for a, n in zip(AXES, self.program.launch.cluster, strict=True) if a in axes)

    def _rank_along(self, axis: int) -> Any:
        return tirx.floormod(self.raw[axis], tirx.IntImm("int32", self.program.launch.cluster[axis]))

    def cluster_rank(self, axes: str) -> Any:
        """This block's number among those along ``axes``."""
        made, stride = tirx.IntImm("int32", 0), 1
        for k, n in enumerate(self.program.launch.cluster):
            if AXES[k] in axes and n > 1:
                made, stride = made + self._rank_along(k) * stride, stride * n
        return made

    def cluster_peer(self, axes: str, number: Any) -> Any:
        """The rank in the cluster of the block with a number among those along ``axes``, as this block sees them."""
        dims = self.program.launch.cluster
        made, stride, unit = tirx.IntImm("int32", 0), 1, 1
        last = max((k for k, n in enumerate(dims) if AXES[k] in axes and n > 1), default=-1)
        for k, n in enumerate(dims):
            if n == 1:
                continue
            if AXES[k] in axes:
                part = number if unit == 1 else tirx.floordiv(number, tirx.IntImm("int32", unit))
                made = made + (part if k == last else tirx.floormod(part, tirx.IntImm("int32", n))) * stride
                unit *= n
            else:
                made = made + self._rank_along(k) * stride
            stride *= n
        return made

    def cluster_mask(self, axes: str) -> Any:
        """A bit for each block that a copy along ``axes`` reaches (PTX ISA, "cp.async.bulk.tensor", ctaMask)."""
        dims = self.program.launch.cluster
        bits, base, stride = {0}, tirx.IntImm("int32", 0), 1
        for k, n in enumerate(dims):
            if AXES[k] in axes:
                bits = {b + i * stride for b in bits for i in range(n)}
            elif n > 1:
                base = base + self._rank_along(k) * stride
            stride *= n
        mask = tirx.IntImm("int32", sum(1 << b for b in bits))
        return mask if isinstance(base, tirx.IntImm) else tirx.shift_left(mask, base)

    # -- others' memory -----------------------------------------------------------------------------------------------
    def cluster_copy(self, call: Any, nest: Any) -> Any:
        """A nest one side of which is another block's shared memory."""
        writes = str(call.attrs["side"]) == "dst"
        tile = call.args[1 if writes else 0].source
        own = self.places[tile]
        there = tirx.decl_buffer(own.buf.ty.shape, str(own.buf.ty.dtype), f"{own.name}_there", scope="shared", layout=None)
        place = InShared(there, own.layout, own.shape, own.base, own.name)
        self.remote = (tile, writes, place)
        body = self.nest(nest)
        self.remote = None
        return sequence([tirx.DeclBuffer(there, call.span, data=self._elsewhere(own.buf, call.args[2])), body])

    def _elsewhere(self, buffer: Any, block: Any) -> Any:
        """A buffer's address in another block."""
        number = widened(self.scalar(block), "int32")
        address = tirx.call_extern("handle", "ts::cluster_address", tirx.buffer_data(buffer), number)
        return tirx.reinterpret(ir.PointerType(ir.PrimType(str(buffer.ty.dtype)), "shared"), address)

    # -- counters and meetings ----------------------------------------------------------------------------------------
    def shared_signal(self, call: Any) -> Any:
        """``T.signal`` of a T.alloc_signal."""
        buf, index, tests = self._shared_counter(call)
        before: list[Any] = []
        if len(call.args) > 2:
            there = tirx.decl_buffer(buf.ty.shape, "int64", f"{self.places[call.args[0].source].name}_there", scope="shared", layout=None)
            before, buf = [tirx.DeclBuffer(there, call.span, data=self._elsewhere(buf, call.args[2]))], there
        at = tirx.address_of(tirx.BufferLoad(buf, [index]))
        done = do(f"shared_signal_{call.attrs['op']}<{self._wide(call)}>", at, widened(self.scalar(call.args[1]), "int64"), span=call.span)
        return self.once(sequence([*before, self._inside(done, tests, call)]))

    def shared_wait(self, call: Any) -> Any:
        """``T.wait`` for one."""
        buf, index, tests = self._shared_counter(call)
        at = tirx.address_of(tirx.BufferLoad(buf, [index]))
        compare = tirx.IntImm("int32", COMPARISONS.index(str(call.attrs["cmp"])))
        value = widened(self.scalar(call.args[1]), "int64")
        heard = tirx.call_extern("bool", f"ts::shared_wait<{self._wide(call)}>", at, value, compare, self.record())
        late = self.fail("wait", call, f"T.wait for {self.places[call.args[0].source].name} took longer than TILESCALE_WAIT_TIMEOUT")
        return self.once(self._inside(tirx.IfThenElse(tirx.Not(heard), late, None, call.span), tests, call))

    def shared_test(self, call: Any) -> Any:
        """``T.test`` of one, as a value."""
        buf, index, tests = self._shared_counter(call)
        compare = tirx.IntImm("int32", COMPARISONS.index(str(call.attrs["cmp"])))
        at, value = tirx.address_of(tirx.BufferLoad(buf, [index])), widened(self.scalar(call.args[1]), "int64")
        if tests:
            name = self.places[call.args[0].source].name
            raise self.refused(f"T.test of a counter that may lie outside {name}", "an index that a loop or an `if` bounds")
        return tirx.call_extern("int32", f"ts::shared_test<{self._wide(call)}>", at, value, compare)

    def _wide(self, call: Any) -> str:
        return "true" if str(call.attrs["reach"]) == "cta_cluster" else "false"

    def _shared_counter(self, call: Any) -> tuple[Any, Any, list[Any]]:
        region = call.args[0]
        buf, flat, tests, _ = self.access(region.source, [r.min for r in region.region], call, True)
        return buf, flat, tests

    def _inside(self, done: Any, tests: list[Any], call: Any) -> Any:
        if not tests:
            return done
        return tirx.IfThenElse(all_of(tests), done, self.fail("bounds", call, "a counter outside its T.alloc_signal"))

    def cluster_barrier(self, call: Any) -> Any:
        """``T.barrier`` of the cluster's blocks: of all their threads, as each executor comes here; where engines copy between blocks
        (cuda/bulk.py), what each did comes before what an engine does behind it."""
        proxy = [do("fence_proxy_async", span=call.span)] if int(call.attrs.get("proxy", 0)) else []
        return sequence([*proxy, do("cluster_sync", span=call.span)])

    def cluster_ends(self) -> tuple[list[Any], list[Any]]:
        """What a block does before and behind all else: counters are zero, and the cluster meets where its blocks reach each other."""
        from tilescale.compiler.cuda.ops.mbarrier import initialised

        # before sm_90 blocks of a cluster are blocks like others, unless they have to do with each other
        call = next(iter(meets_cluster(self.program.func.body)), None) if not self.target.clusters else None
        if call is not None:
            raise TileSyntaxError(f"clusters need sm_90, and this is {self.target.arch}", loc=loc_of(call.span), hint='target="cpu"')
        begins = initialised(self, self.by_hand)
        threads = self.threads + self.extra
        for buffer, words in self.zeroed:
            for first in range(0, words, threads):
                store = tirx.BufferStore(buffer, tirx.IntImm("int64", 0), [self.tid + first if first else self.tid])
                inside = self.tid < tirx.IntImm("int32", words - first)
                begins.append(store if words - first >= threads else tirx.IfThenElse(inside, store, None))
        if reaches_blocks(self.program.func.body):
            return [*begins, do("cluster_sync")], [do("cluster_sync")]
        return ([*begins, tirx.Evaluate(tirx.call_extern("void", "__syncthreads"))] if begins else []), []


def meets_cluster(body: Any) -> list[Any]:
    """The operations of a kernel at the scale of the cluster that have to do with its other blocks."""
    found: list[Any] = []

    def look(call: Any) -> None:
        if call.op.name in ("ts.copy", "ts.signal", "ts.wait", "ts.barrier") and str(call.attrs["reach"]) == "cta_cluster":
            if call.op.name != "ts.copy" or str(call.attrs["side"]):
                found.append(call)

    structural_walk(body, (ir.Call, look))
    return found


def reaches_blocks(body: Any) -> bool:
    """Whether a kernel touches the shared memory of other blocks of its cluster."""
    found: list[Any] = []

    def look(call: Any) -> None:
        if call.op.name in ("ts.copy", "ts.signal") and str(call.attrs["reach"]) == "cta_cluster":
            if call.op.name == "ts.copy" and str(call.attrs["side"]) or call.op.name == "ts.signal" and len(call.args) > 2:
                found.append(call)

    structural_walk(body, (ir.Call, look))
    return bool(found)
