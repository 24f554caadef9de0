"""Expert primitives as thread IR: what the author wrote is what is printed. Order: arrivals release and waits
acquire in each thread that makes them (mbarrier.arrive and try_wait, default semantics, scope of the block);
TMA's writes are complete, and visible to who waited, when their bytes are counted (complete_tx). A proxy
fence stands where the author put it.

Another block of the cluster. An arrival at its barrier releases at the scope of the cluster
(``mbarrier.arrive.release.cluster.shared::cluster``), and threads wait for a barrier of
T.alloc_cluster_barrier with acquire at that scope (``mbarrier.try_wait.acquire.cluster``): releases and
acquires synchronize where the scope of each includes the other's thread (PTX ISA 9.0, "Parallel
Synchronization and Communication Instructions: mbarrier"; "Memory Consistency Model", "Morally strong
operations" and "Release and Acquire Patterns"). So what a thread wrote before it arrived, into memory of
either block or of the GPU, is there for who has waited. Arrivals at the own block's barrier release at the
scope of the block: none but its threads wait for it. What they have acquired of other blocks they hand on, as
causality order is transitive. Blocks begin and end with their cluster (`cuda/clusters.py`), so that a barrier
is initialised when others arrive, and still there.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from tilescale.compiler.cuda.ops import tma
from tilescale.compiler.gpu.build import at, call
from tilescale.compiler.gpu.places import widened
from tilescale.compiler.ir.lowerings import Lowering, lowers
from tilescale.compiler.ir.multicast import leading, mask_of
from tilescale.compiler.ir.nests import long_axes
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout.loops import bits_of
from tilescale.compiler.layout.shared import boxed, strided, widest_swizzle
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import TileSyntaxError, TileValueError

if TYPE_CHECKING:
    from tilescale.compiler.cuda.lower import Lowering as CudaLowering
    from tilescale.compiler.gpu.state import State

#: of a box: where it lies in a tile, the tensor map, its coordinates
_Place = tuple[Any, Any, list[Any]]
#: bytes that a box begins at a multiple of in shared memory (PTX ISA, "cp.async.bulk.tensor")
ROW = 128


def _hopper(cx: CudaLowering, what: str) -> None:
    if not cx.target.counting_barriers:
        raise TileSyntaxError(f"T.{what} needs sm_90, and this is {cx.target.arch}", loc=cx.here)


def barrier_at(cx: CudaLowering, region: Any, node: Any) -> Any:
    """A barrier's address."""
    buf, flat, tests, _ = cx.access(region.source, [r.min for r in region.region], node, True)
    if tests:
        raise TileValueError(
            f"{region.source.name}: an index that may lie outside",
            loc=cx.here,
            expected="for example b[k % stages]",
        )
    return at(buf, flat)


@lowers("cuda", "mbarrier_arrive")
def mbarrier_arrive(node: Any, cx: CudaLowering) -> Any:
    _hopper(cx, "mbarrier_arrive")
    if len(node.args) > 1:
        block = widened(cx.scalar(node.args[1]), "int32")
        return call("mbarrier_arrive_at", barrier_at(cx, node.args[0], node), block, span=node.span)
    return call("mbarrier_arrive", barrier_at(cx, node.args[0], node), span=node.span)


@lowers("cuda", "mbarrier_expect_tx")
def mbarrier_expect_tx(node: Any, cx: CudaLowering) -> Any:
    _hopper(cx, "mbarrier_expect_tx")
    count = widened(cx.scalar(node.args[1]), "int32")
    return cx.once(call("mbarrier_expect_tx", barrier_at(cx, node.args[0], node), count, span=node.span))


@lowers("cuda", "mbarrier_wait_parity")
def mbarrier_wait_parity(node: Any, cx: CudaLowering) -> Any:
    _hopper(cx, "mbarrier_wait_parity")
    parity = widened(cx.scalar(node.args[1]), "int32")
    name = "mbarrier_wait_cluster" if node.args[0].source in cx.among_blocks else "mbarrier_wait"
    return call(name, barrier_at(cx, node.args[0], node), parity, span=node.span)


@lowers("cuda", "tma_copy")
class TmaCopy(Lowering["CudaLowering"]):
    def shared_layouts(self, call: Any) -> dict[Any, Any]:
        """The swizzled boxes of a tile that TMA reads or writes, stages in front; rows one behind the other
        where it copies one row."""
        tile = call.args[1 if len(call.args) > 2 else 0]
        var, bits = tile.source, bits_of(tile.source)
        shape = [int(e) for e in var.ty.shape]
        if _is_row(tile):
            if shape[-1] * bits % (8 * ROW):
                raise TileValueError(
                    f"{var.name} has rows of {shape[-1]} {var.ty.dtype}, which TMA copies one by one",
                    loc=loc_of(call.span),
                    expected=f"a multiple of {ROW} bytes",
                )
            return {var: strided(shape, bits)}
        width = widest_swizzle(shape[-1], bits) if len(shape) in (2, 3) else 0
        if not width or shape[-2] % 8:
            raise TileValueError(
                f"{var.name} is a tile of {tuple(shape)} {var.ty.dtype}, which TMA has no swizzle for",
                loc=loc_of(call.span),
                expected="(rows, columns) or (stages, rows, columns), rows a multiple of 8 and each a "
                "multiple of 32 bytes",
            )
        made = boxed((shape[-2], shape[-1]), bits, width)
        return {var: made.staged(shape[0]) if len(shape) == 3 else made}

    def insists(self, call: Any) -> bool:
        return True

    def lower(self, call: Any, cx: CudaLowering) -> Any:
        """One instruction a box, all by one thread."""
        _hopper(cx, "tma_copy")
        src, dst = call.args[:2]
        loads = len(call.args) > 2
        tile, tensor = (dst, src) if loads else (src, dst)
        shape = [int(e) for e in tile.source.ty.shape]
        row = constant(tensor.source.ty.shape[-1])
        if row is None or row * bits_of(tensor.source) // 8 % 16 or list(tensor.source.ty.strides):
            raise TileValueError(
                f"rows of {tensor.source.name} are not known to be a multiple of 16 bytes", loc=cx.here
            )
        barrier = [barrier_at(cx, call.args[2], call)] if loads else []
        if _is_row(tile):
            return self._issued(call, cx, self._row(cx, tile, tensor), barrier)
        rows, cols = tile.region[-2:]
        width = cx.shared_of(tile.source).layout.swizzle * 8 // bits_of(tile.source) or shape[-1]
        first, count = cx.analyzer.simplify(cx.scalar(cols.min)), constant(cols.extent) or 0
        boxes = count % width == 0 and cx.proven(tirx.EQ(first % width, 0))
        whole = constant(rows.min) == 0 and constant(rows.extent) == shape[-2] and boxes
        if not whole or len(shape) == 3 and constant(tile.region[0].extent) != 1:
            raise TileValueError(
                f"T.tma_copy of a part of {tile.source.name}",
                loc=cx.here,
                expected=f"a whole tile, one stage of it, or all rows of a multiple of {width} columns",
            )
        stage = [cx.scalar(tile.region[0].min)] if len(shape) == 3 else []
        found = list(tma.boxes(cx, tile.source, tensor, [shape[-2], count], stage, first=(0, first)))
        return self._issued(call, cx, found, barrier)

    def _issued(self, call: Any, cx: CudaLowering, found: list[_Place], barrier: list[Any]) -> Any:
        """The boxes, by one thread. A copy that blocks of the cluster share is the first one's of them, into
        the same place of all of their shared memory, whose barriers at the same place get the bytes (PTX ISA
        9.0, "cp.async.bulk.tensor", .multicast::cluster); a block that is not among them makes its own.
        Order: bytes release TMA's writes in each block as in this one, and who waits for its own barrier
        acquires them. That a block's tile is free is the author's to say, by an arrival at the first block's
        barrier; blocks begin and end with their cluster."""
        mask = mask_of(call)
        alone = sequence([self._box(call, *box, barrier) for box in found])
        if not mask:
            return cx.once(alone)
        blocks = [*barrier, tirx.IntImm("int32", mask)]
        into_all = sequence([self._box(call, *box, blocks, "tma_load_multicast") for box in found])
        rank = cx.scalar(call.args[3])
        among = tirx.bitwise_and(tirx.shift_right(tirx.IntImm("int32", mask), rank), tirx.IntImm("int32", 1))
        every = mask == (1 << prod(cx.program.launch.cluster)) - 1
        apart = None if every else tirx.IfThenElse(tirx.EQ(among, tirx.IntImm("int32", 0)), alone, None)
        return cx.once(tirx.IfThenElse(tirx.EQ(rank, tirx.IntImm("int32", leading(mask))), into_all, apart))

    def _box(
        self,
        call: Any,
        place: Any,
        name: Any,
        coordinates: list[Any],
        barrier: list[Any],
        load: str = "tma_load",
    ) -> Any:
        if barrier:
            made = tirx.call_extern("void", f"ts::{load}", place, name, *barrier, *coordinates)
        else:
            function = f"tma_reduce_{call.attrs['reduce']}" if str(call.attrs["reduce"]) else "tma_store"
            made = tirx.call_extern("void", f"ts::{function}", name, place, *coordinates)
        return tirx.Evaluate(made, call.span)

    def _row(self, cx: CudaLowering, tile: Any, tensor: Any) -> list[_Place]:
        """A whole row of a tile, in boxes of as many numbers as one can have."""
        place, count = cx.shared_of(tile.source), int(tile.source.ty.shape[-1])
        if long_axes(tensor)[-1:] != [len(tensor.region) - 1] or constant(tile.region[-1].extent) != count:
            raise TileValueError(
                f"T.tma_copy of a part of a row of {tile.source.name}, or of a column",
                loc=cx.here,
                expected="a whole row of the tile, and a part of a row of the tensor",
            )
        starts = [cx.scalar(r.min) for r in tensor.region]
        first = [cx.scalar(r.min) for r in tile.region]
        each = max(n for n in range(1, 257) if count % n == 0 and n * bits_of(tile.source) % (8 * ROW) == 0)
        name = tma.map_of(cx, tensor.source, (*(1 for _ in starts[:-1]), each), 0)
        out: list[_Place] = []
        for k in range(0, count, each):
            where = at(place.buf, cx.analyzer.simplify(place.flat([*first[:-1], first[-1] + k])))
            out.append((where, name, [cx.analyzer.simplify(starts[-1] + k), *reversed(starts[:-1])]))
        return out


def _is_row(tile: Any) -> bool:
    """Whether a part of a tile is one row of it."""
    return all(constant(r.extent) == 1 for r in tile.region[:-1])


@lowers("cuda", "tma_store_arrive")
def tma_store_arrive(node: Any, cx: CudaLowering) -> Any:
    _hopper(cx, "tma_store_arrive")
    return cx.once(call("bulk_commit", span=node.span))


@lowers("cuda", "tma_store_wait")
def tma_store_wait(node: Any, cx: CudaLowering) -> Any:
    _hopper(cx, "tma_store_wait")
    name = "bulk_wait_read" if int(node.attrs["read"]) else "bulk_wait"
    return cx.once(call(f"{name}<{int(node.attrs['count'])}>", span=node.span))


def initialised(cx: State, barriers: list[tuple[Any, list[int]]]) -> list[Any]:
    """One thread sets up the author's barriers, before the block's threads synchronize."""
    if not barriers:
        return []

    def number(n: int) -> Any:
        return tirx.IntImm("int32", n)

    made = [
        call("mbarrier_init", at(buffer, number(k)), number(n))
        for buffer, counts in barriers
        for k, n in enumerate(counts)
    ]
    return [
        tirx.IfThenElse(
            tirx.EQ(cx.tid, tirx.IntImm("int32", 0)), sequence([*made, call("fence_mbarrier_init")]), None
        )
    ]
