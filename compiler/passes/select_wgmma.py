"""Which products are wgmma's (PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix Multiply"): of rings that a
producer fills, or of tiles that threads fill. And what stands in the way of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilescale.compiler.advice import reason
from tilescale.compiler.ir.buffers import views_of
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import REGISTRY
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.scales import WARPGROUP
from tilescale.compiler.layout import tensor_cores
from tilescale.compiler.layout.loops import bits_of, element_dtype, in_registers
from tilescale.compiler.layout.products import extents, swizzled, wgmma_fragments
from tilescale.compiler.layout.sparse import sparse_fragments, unfit_sparse
from tilescale.compiler.layout.viewed import carries
from tilescale.compiler.ops.wgmma import FREE, wgmma
from tilescale.compiler.passes.annotated import layouts
from tilescale.compiler.passes.products import has_producer
from tilescale.compiler.passes.roles import calls
from tilescale.compiler.passes.stage_operands import again, is_whole
from tilescale.compiler.tvm_compat import ir, structural_map, tirx

ROWS = 64


#: the policies by which warpgroups lie below one another, and side by side (T.GemmWarpPolicy)
FULL_ROW, FULL_COL = 1, 2


#: columns of a product that mma.sync does as well where its left operand lies in registers
NARROW = 16


def no_wgmma(call: Any, program: TileProgram) -> str | None:
    """Why a product is not one of wgmma; None where it is."""
    return unfit_product(call, program) or unfit_parts(call, program.launch.threads)


def unfit_product(call: Any, program: TileProgram) -> str | None:
    """The same, whatever the number of threads."""

    a, b, c = call.args[:3]
    rings = program.schedule.ring_of
    sparse = call.op.name == "ts.gemm_sp"
    what = "T.gemm_sp" if sparse else "T.gemm"
    if why := tensor_cores.no_wgmma(call):
        return why
    if str(call.attrs["executor"]) != "block":
        return f"{what} inside a T.Scale"
    if constant(call.args[3]) is None:
        hint = f"T.clear({c.source.name}) in front of the loop, and {what} without clear_accum"
        return reason(f"{what} with a condition for clear_accum", hint)
    if not (in_registers(c.source) and is_whole(c) and len(c.source.ty.shape) == 2):
        return reason(
            f"{what} into what is no whole fragment",
            "an accumulator that is a T.alloc_fragment of two axes, whole",
        )
    if sparse and (why := unfit_sparse(call)):
        return why
    over = views_of(program.func.body)
    for r in (a, b):
        if why := _unfit_view(r, over):
            return f"{what} of {why}"
        shape = r.source.ty.shape
        axes = list(zip(r.region, shape, strict=True))[1 if r.source in rings else 0 :]
        if len(axes) != 2 or not all(_has_descriptor(r, k, x, int(e)) for k, (x, e) in enumerate(axes)):
            return f"{what} of a part of {r.source.name}"
        if in_registers(r.source) and (
            r is b or call.attrs["trans_a"] or r.source.ty.storage_scope != "local.fragment"
        ):
            hint = f"T.copy of {r.source.name} into a shared tile, which T.gemm reads instead"
            return reason(f"T.gemm of {r.source.name}, which lies in registers", hint)
        if in_registers(r.source) and bits_of(r.source) not in (8, 16):
            hint = f"T.copy of {r.source.name} into a shared tile, which T.gemm reads instead"
            return reason(f"T.gemm of {element_dtype(r.source)} from registers", hint)
    k, step = int(a.region[-2 if call.attrs["trans_a"] else -1].extent), tensor_cores.depth(bits_of(a.source))
    return (
        reason(f"{what} over {k} numbers", f"tiles that are a multiple of {step} long along k")
        if k % step
        else None
    )


def unfit_parts(call: Any, threads: int) -> str | None:
    """Why warpgroups of so many threads cannot share a product that is otherwise wgmma's; None where they
    can."""

    sparse = call.op.name == "ts.gemm_sp"
    if (sparse_fragments if sparse else wgmma_fragments)(call, threads):
        return None
    m, n, k = extents(call)
    return f"{'T.gemm_sp' if sparse else 'T.gemm'} of {m} × {n} × {k} on {threads} threads"


def _unfit_view(operand: Any, over: dict[Any, list[Any]]) -> str | None:
    """Why the swizzle of an operand cannot be that of its views, or of what it is a view of; None where it
    can."""
    tile = operand.source
    if in_registers(tile):
        return None
    if any(tile.same_as(view) for views in over.values() for view in views):
        return f"{tile.name}, which is a view of another tile"
    layout = swizzled(operand, True) if tile in over else None
    if layout is not None and not carries(layout, tile, over):
        return f"{tile.name}, whose swizzle a view of it cannot have"
    return None


def _has_descriptor(operand: Any, axis: int, part: Any, extent: int) -> bool:
    """Whether a matrix descriptor can name this part of an operand's rows or columns: all of them, or, in
    shared memory, whole rows of the swizzle's pattern, or whole boxes (PTX ISA 9.0, "Matrix Descriptor
    Format": the pattern begins where the matrix does)."""

    first, count = constant(part.min), constant(part.extent)
    if first == 0 and count == extent:
        return True
    if (
        first is None
        or count is None
        or in_registers(operand.source)
        or (layout := swizzled(operand, True)) is None
    ):
        return False
    unit = 8 if axis == 0 else layout.swizzle * 8 // layout.bits
    return first % unit == 0 and count % unit == 0


def is_narrow(call: Any) -> bool:
    """Whether a product is left to mma.sync: its left operand is computed by the threads anew, for few
    columns, or of 32 bits for few rows. A warp's mma follows the computation of its operand instruction by
    instruction; a warpgroup's would wait for all four warps, and for itself, each time."""
    a, _, c = call.args[:3]
    if call.op.name != "ts.gemm" or call.attrs["trans_a"] or a.source.ty.storage_scope != "local.fragment":
        return False
    rows, columns = (int(e) for e in c.source.ty.shape[-2:])
    return columns <= NARROW if bits_of(a.source) == 16 else bits_of(a.source) == 32 and rows < ROWS


#: multiply-adds of a product below which a warpgroup would rather wait for nobody
WORTH = 64 * 64 * 32


#: copies whose ends the author awaits
BY_HAND = ("ts.tma_copy", "ts.thread_copy")


def select_wgmma(program: TileProgram) -> TileProgram:
    """The program, whose products are wgmma's where they can be."""
    if not has_producer(program):
        return _without_producer(program) if program.target.group_products else program

    def able(c: Any) -> bool:
        return REGISTRY[c.op.name].multiplies and not is_narrow(c) and no_wgmma(c, program) is None

    return _marked(program, able)


def _without_producer(program: TileProgram) -> TileProgram:
    """A program without a producer, whose threads fill its tiles: products that are large enough to be worth
    a proxy fence behind what threads write. Rows that one warpgroup alone would have are cut among all along
    the columns: nobody computes beside it. All products of an accumulator are made by the same instructions,
    so one that wgmma cannot do keeps the others."""
    products = [c for c in calls(program.func.body) if REGISTRY[c.op.name].multiplies]
    by_hand = {r.source for c in calls(program.func.body) if c.op.name in BY_HAND for r in c.args[:2]}
    fixed = by_hand | {tile for tile, *_ in layouts(program)}

    def side_by_side(c: Any) -> Any:
        return again(c, list(c.args), {"policy": FULL_COL}).value if _of_one(c) else c

    def fit(c: Any) -> bool:
        m, n, k = extents(c)
        return (
            c.op.name == "ts.gemm"
            and "wg_wait" not in c.attrs
            and m * n * k >= WORTH
            and not any(r.source in fixed for r in c.args[:3])
            and not is_narrow(c)
            and no_wgmma(side_by_side(c), program) is None
        )

    kept = {c.args[2].source for c in products if not fit(c)}
    return _marked(program, lambda c: c in products and c.args[2].source not in kept, side_by_side)


def _marked(
    program: TileProgram, able: Callable[[Any], bool], cut: Callable[[Any], Any] = lambda c: c
) -> TileProgram:
    products = [cut(c) for c in calls(program.func.body) if able(c)]
    first = _first_threads(products, program.launch.threads)

    def mark(s: Any) -> Any:
        c = s.value
        if not isinstance(c, ir.Call) or not able(c):
            return s
        c = cut(c)
        return tirx.Evaluate(
            wgmma(c, FREE, **({"first_thread": first[c.args[2].source]} if _of_one(c) else {})), s.span
        )

    return program.with_body(structural_map(program.func.body, (tirx.Evaluate, mark)))


def _of_one(call: Any) -> bool:
    """Whether one warpgroup alone has a product's accumulator, by FullRow."""
    return int(call.attrs["policy"]) == FULL_ROW and int(call.args[2].source.ty.shape[0]) == ROWS


def _first_threads(products: list[Any], threads: int) -> dict[Any, int]:
    """Accumulators that one warpgroup alone has → its first thread. They go to the warpgroups in turn, in the
    order of their first products; those that are multiplied from one operand in registers go together."""
    together: dict[Any, list[Any]] = {}
    by: dict[Any, Any] = {}
    for c in products:
        if not _of_one(c):
            continue
        held, tile = c.args[0].source, c.args[2].source
        mine = together.setdefault(tile, [tile])
        other = together[by.setdefault(held, tile)] if in_registers(held) else mine
        if other is not mine:
            other += mine
            together.update(dict.fromkeys(mine, other))
    order = list({id(tiles): tiles for tiles in together.values()}.values())
    return {tile: k * WARPGROUP % threads for k, tiles in enumerate(order) for tile in tiles}
