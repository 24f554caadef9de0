"""Blocks of a cluster on NVIDIA's GPUs, as thread IR: whose shared memory a block reaches, and where they
meet (include/ts/cluster.cuh). A block's rank along an axis is its index modulo the cluster's extent, and its
number in the cluster counts x first (PTX ISA, "%cluster_ctarank").

Order. That of counters: gpu/counters.py. Other blocks' shared memory is written by plain stores, which such a
release or ``barrier.cluster`` (arrive releases, wait acquires, by every thread) orders. A block whose memory
others reach begins and ends with its cluster: nobody touches it before its counters are zero, or when it has
gone (CUDA C++ Programming Guide, "Distributed Shared Memory").
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cuda.ops.mbarrier import initialised
from tilescale.compiler.gpu import lower
from tilescale.compiler.gpu.blocks import AXES
from tilescale.compiler.gpu.build import call as do
from tilescale.compiler.gpu.places import widened
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx
from tilescale.errors import TileSyntaxError


class Clusters(lower.Lowering):
    """Mixed into the lowering. ``axes``: those along which blocks are looked at, some of "xyz"."""

    by_hand: list[tuple[Any, list[int]]]

    def cluster_peer(self, axes: str, number: Any) -> Any:
        """The rank in the cluster of the block with a number among those along ``axes``, as this block sees
        them."""
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
                made = made + self.rank_along(k) * stride
            stride *= n
        return made

    def cluster_mask(self, axes: str) -> Any:
        """A bit for each block that a copy along ``axes`` reaches (PTX ISA, "cp.async.bulk.tensor",
        ctaMask)."""
        dims = self.program.launch.cluster
        bits, base, stride = {0}, tirx.IntImm("int32", 0), 1
        for k, n in enumerate(dims):
            if AXES[k] in axes:
                bits = {b + i * stride for b in bits for i in range(n)}
            elif n > 1:
                base = base + self.rank_along(k) * stride
            stride *= n
        mask = tirx.IntImm("int32", sum(1 << b for b in bits))
        return mask if isinstance(base, tirx.IntImm) else tirx.shift_left(mask, base)

    # -- others' memory
    # -----------------------------------------------------------------------------------------------
    def elsewhere(self, buffer: Any, block: Any) -> Any:
        """A buffer's address in another block."""
        number = widened(self.scalar(block), "int32")
        address = tirx.call_extern("handle", "ts::cluster_address", tirx.buffer_data(buffer), number)
        return tirx.reinterpret(ir.PointerType(ir.PrimType(str(buffer.ty.dtype)), "shared"), address)

    # -- counters and barriers
    # ----------------------------------------------------------------------------------------
    def cluster_barrier(self, call: Any) -> Any:
        """``T.barrier`` of the cluster's blocks: of all their threads, as each executor comes here."""
        return do("cluster_sync", span=call.span)

    def around(self) -> tuple[list[Any], list[Any]]:
        """What a block does before and behind all else: counters are zero, and the cluster synchronizes where
        its blocks reach each other."""
        # before sm_90 blocks of a cluster are blocks like others, unless they have to do with each other
        call = (
            next(iter(cluster_operations(self.program.func.body)), None) if not self.target.clusters else None
        )
        if call is not None:
            raise TileSyntaxError(
                f"clusters need sm_90, and this is {self.target.arch}",
                loc=loc_of(call.span),
                hint='target="cpu"',
            )
        begins = [*initialised(self, self.by_hand), *self.zeroing()]
        if reaches_blocks(self.program.func.body):
            return [*begins, do("cluster_sync")], [do("cluster_sync")]
        return ([*begins, tirx.Evaluate(tirx.call_extern("void", "__syncthreads"))] if begins else []), []


_OF_CLUSTERS = (
    "ts.remote_copy",
    "ts.signal",
    "ts.wait",
    "ts.barrier",
    "ts.cluster_arrive",
    "ts.cluster_wait",
    "ts.mbarrier_arrive",
    "ts.tma_copy",
)


#: operation → with how many operands it touches memory of another block
_ELSEWHERE = {"ts.remote_copy": 0, "ts.signal": 3, "ts.mbarrier_arrive": 2, "ts.tma_copy": 4}


def cluster_operations(body: Any) -> list[Any]:
    """The operations of a kernel at the scale of the cluster that have to do with its other blocks."""
    found: list[Any] = []

    def look(call: Any) -> None:
        if call.op.name in _OF_CLUSTERS:
            if str(call.attrs["reach"]) == "cta_cluster":
                found.append(call)

    structural_walk(body, (ir.Call, look))
    return found


def reaches_blocks(body: Any) -> bool:
    """Whether a kernel touches the shared memory of other blocks of its cluster."""
    found: list[Any] = []

    def look(call: Any) -> None:
        elsewhere = _ELSEWHERE.get(call.op.name)
        if elsewhere is not None and len(call.args) >= elsewhere:
            if str(call.attrs["reach"]) == "cta_cluster":
                found.append(call)

    structural_walk(body, (ir.Call, look))
    return bool(found)
