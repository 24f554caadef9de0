"""Copies by the tensor memory accelerator (PTX ISA 9.0, "cp.async.bulk.tensor"): boxes of a tensor into the
swizzled tiles of a ring's stage, and out of a swizzled tile into a tensor. What lies outside the tensor is
read as zeros, which count among the bytes that the barrier expects, and never written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilescale.compiler.gpu.build import at
from tilescale.compiler.gpu.places import widened
from tilescale.compiler.ir.lowerings import Lowering, lowers
from tilescale.compiler.ir.nests import long_axes
from tilescale.compiler.ir.scales import WARPGROUP
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout import Shared
from tilescale.compiler.layout.loops import bits_of
from tilescale.compiler.layout.shared import boxed, widest_swizzle
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import InternalError

if TYPE_CHECKING:
    from tilescale.compiler.cuda.lower import Lowering as CudaLowering


@dataclass(frozen=True)
class TensorMap:
    """A tensor map (CUtensorMap) of a parameter, encoded by the launcher for the pointer and the extents of
    each call.

    param: the parameter's index. box: extents of the tile, outermost axis first like the tensor's shape.
    swizzle: bytes, 0, 32, 64 or
    128. l2: bytes that a miss brings into the L2 cache, 0, 64, 128 or 256; a box's rows have 128 at most, and
    with 256 products of 16 rows, which are bound by reading the other operand, took 3 % longer. Elements
    outside read zero. A copy's coordinates may be negative, but the one along the innermost axis must come to
    a multiple of 16 bytes: anything else stops the kernel as an illegal instruction.
    """

    param: int
    box: tuple[int, ...]
    swizzle: int = 0
    l2: int = 128


def box_rows(rows: int, shares: int = 1) -> int:
    """Rows of one box: the most that divide a tile's into as many equal shares, at most 256, whole groups of
    the swizzle."""
    return max(n for n in range(8, 257, 8) if rows % (n * shares) == 0)


def stored(region: Any) -> Shared:
    """The layout of a tile that TMA stores: boxes under the widest swizzle, which threads also write without
    bank conflicts."""
    shape, bits = [int(e) for e in region.source.ty.shape], bits_of(region.source)
    return boxed(shape, bits, widest_swizzle(shape[-1], bits))


@lowers("cuda", "tma_load")
def lower_tma_load(call: Any, cx: CudaLowering) -> Any:
    """One copy for each box of the tile; where blocks of the cluster share it, for each box of this block's
    share, into all of them."""
    src, dst = call.args[:2]
    shared = str(call.attrs.get("multicast", ""))
    function, blocks = (
        ("ts::tma_load_multicast", [cx.cluster_mask(shared)]) if shared else ("ts::tma_load", [])
    )
    stage = cx.scalar(dst.region[0].min)
    full = at(cx.barriers[int(call.attrs["ring"])].full, stage)
    shape, first = (
        [int(k) for k in of] for of in zip(*((r.extent, r.min) for r in dst.region[1:]), strict=True)
    )
    out = []
    for tile, name, coordinates in boxes(cx, dst.source, src, shape, [stage], shared, first=first):
        out.append(
            tirx.Evaluate(
                tirx.call_extern("void", function, tile, name, full, *blocks, *coordinates), call.span
            )
        )
    return sequence(out)


@lowers("cuda", "tma_store")
class TmaStore(Lowering["CudaLowering"]):
    """One store for each box of the tile, all by one thread, as one group; or those of its rows by each
    warpgroup's first (passes/stores_by_warpgroup.py)."""

    def shared_layouts(self, call: Any) -> dict[Any, Any]:
        return {call.args[0].source: stored(call.args[0])}

    def lower(self, call: Any, cx: CudaLowering) -> Any:
        return _leaves(cx, call, call.args[0], call.args[1], "ts::tma_store")


@lowers("cuda", "tma_reduce")
class TmaReduce(Lowering["CudaLowering"]):
    """The same for an atomic update of a tensor by a tile: each element is one, relaxed (PTX ISA,
    "cp.reduce.async.bulk.tensor")."""

    def shared_layouts(self, call: Any) -> dict[Any, Any]:
        return {call.args[1].source: stored(call.args[1])}

    def lower(self, call: Any, cx: CudaLowering) -> Any:
        return _leaves(cx, call, call.args[1], call.args[0], f"ts::tma_reduce_{call.attrs['kind']}")


def _leaves(cx: CudaLowering, call: Any, src: Any, dst: Any, function: str) -> Any:
    groups = int(call.attrs.get("groups", 1))
    part = (cx.warpgroup() if groups > 1 else None, groups)
    out: list[Any] = []
    for tile, name, coordinates in boxes(
        cx, src.source, dst, [int(e) for e in src.source.ty.shape], [], part=part
    ):
        out.append(tirx.Evaluate(tirx.call_extern("void", function, name, tile, *coordinates), call.span))
    out.append(tirx.Evaluate(tirx.call_extern("void", "ts::bulk_commit"), call.span))
    return tirx.IfThenElse(_issuer(cx, groups), sequence(out), None, call.span)


@lowers("cuda", "await_stores")
def lower_await_stores(call: Any, cx: CudaLowering) -> Any:
    """A thread that issued stores waits until they have read their tile. Whoever writes it behind the barrier
    that follows comes after those reads: they are complete where the wait ends, and the barrier orders the
    waiter before everyone who writes what it stored. Where the stores are to be complete, their writes are
    visible to the waiter (PTX ISA, "cp.async.bulk.wait_group"): an atomic update that it makes behind that
    releases them, and who synchronizes with it comes behind them."""
    name = "ts::bulk_wait<0>" if int(call.attrs["complete"]) else "ts::bulk_wait_read<0>"
    wait = tirx.Evaluate(tirx.call_extern("void", name), call.span)
    return tirx.IfThenElse(_issuer(cx, int(call.attrs.get("groups", 1))), wait, None, call.span)


def _issuer(cx: CudaLowering, groups: int) -> Any:
    return tirx.EQ(cx.tid % WARPGROUP if groups > 1 else cx.tid, tirx.IntImm("int32", 0))


def boxes(
    cx: CudaLowering,
    tile: Any,
    region: Any,
    shape: list[int],
    stage: list[Any],
    shared: str = "",
    part: tuple[Any, int] = (None, 1),
    first: Sequence[Any] = (0, 0),
) -> Iterator[tuple[Any, Any, list[Any]]]:
    """The boxes of a copy between a tile of ``shape`` in shared memory and a region of a tensor: where each
    lies in the tile, the tensor map, and its coordinates, the innermost first. ``shared``: axes of the
    cluster along which blocks share the tile: its own part. ``part``: which of how many parts of the tile's
    rows. ``first``: the row and column of a larger tile where that of ``shape`` begins, whole groups of its
    swizzle."""
    if len(shape) == 1:
        yield _part_of_row(cx, tile, region, shape[0], stage)
        return
    place, tensor = cx.shared_of(tile), region.source
    layout, (rows, cols) = place.layout, shape
    if not layout.swizzle and cols * layout.bits != 128:
        raise InternalError(f"{place.name} is copied by TMA and has no swizzle", loc=cx.here)
    wide, blocks = layout.swizzle * 8 // layout.bits or cols, cx.cluster_size(shared)
    which, parts = part
    # A part is some of the boxes side by side, or of those one below the other.
    by_columns = parts == 1 and cols % (wide * blocks) == 0
    down = box_rows(rows, 1 if by_columns else blocks * parts)
    high, broad = (rows, cols // blocks) if by_columns else (rows // (blocks * parts), cols)
    own = which if parts > 1 else cx.cluster_rank(shared)
    first_row, first_col = (0, own * broad) if by_columns else (own * high, 0)
    axes = long_axes(region)
    name = map_of(
        cx,
        tensor,
        tuple({axes[0]: down, axes[1]: wide}.get(k, 1) for k in range(len(region.region))),
        layout.swizzle,
    )
    starts = [cx.scalar(r.min) for r in region.region]
    for r in range(0, high, down):
        for c in range(0, broad, wide):
            where, row, col = list(starts), first_row + widened(r, "int32"), first_col + widened(c, "int32")
            where[axes[0]], where[axes[1]] = where[axes[0]] + row, where[axes[1]] + col
            linear = cx.analyzer.simplify(place.linear([*stage, row + first[0], col + first[1]]))
            yield at(place.buf, linear), name, [cx.analyzer.simplify(w) for w in reversed(where)]


def map_of(cx: CudaLowering, tensor: Any, box: tuple[int, ...], swizzle: int) -> Any:
    """The name of the tensor map for boxes of a tensor."""
    param = next(k for k, p in enumerate(cx.program.params) if p.var.same_as(tensor))
    return cx.tensor_map(TensorMap(param, box, swizzle), f"{tensor.name}_map")


def _part_of_row(
    cx: CudaLowering, tile: Any, region: Any, count: int, stage: list[Any]
) -> tuple[Any, Any, list[Any]]:
    """The one box of a tile that is so many neighbours of a row, which lie in the tile as they come."""
    place = cx.shared_of(tile)
    name = map_of(cx, region.source, (*(1 for _ in region.region[:-1]), count), 0)
    where = at(place.buf, cx.analyzer.simplify(place.linear([*stage, tirx.IntImm("int32", 0)])))
    return where, name, [cx.analyzer.simplify(cx.scalar(r.min)) for r in reversed(region.region)]
