"""T.gemm_sp on NVIDIA's GPUs: mma.sp of 16-bit floats (PTX ISA 9.0, "mma.sp", "Sparse matrix storage"); any
other is written out and multiplied as a whole (gpu/ops/gemm_sp.py).

Fragments of what A keeps are those of a product half as deep; B's are two of them. Each row's places of 32
elements are 32 bits: of a quad's threads the first two hold them (selector 0), the even one those of the
first 16 elements, the odd one those of the others, of row g in the lower half of the register and of row g +
8 in the upper half. Where a tile leaves the tensor, A is zero and so are the places, which PTX calls
undefined: rows that are never stored, or products with zeros of B.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.cuda.ops import gemm
from tilescale.compiler.gpu.ops import gemm_sp as shared
from tilescale.compiler.gpu.ops.gemm import into_shared, operand, unrolled
from tilescale.compiler.ir.contexts import LayoutContext, StageContext
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ir.nests import matrix_axes
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.scales import WARP
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ir.target import Target
from tilescale.compiler.layout.infer import Demand
from tilescale.compiler.layout.loops import element_dtype, in_registers
from tilescale.compiler.layout.products import mma_fragments, operands_of, swizzled
from tilescale.compiler.layout.sparse import COVERED, dense_shape
from tilescale.compiler.layout.tensor_cores import HALVES, KINDS
from tilescale.compiler.passes.stage_operands import is_whole
from tilescale.compiler.tvm_compat import tirx

if TYPE_CHECKING:
    from tilescale.compiler.cuda.lower import Lowering as CudaLowering

#: steps of k that one instruction has
DEPTH = 32
ZERO = tirx.IntImm("int32", 0)


def _has_mma(call: Any, threads: int, target: Target) -> bool:
    a, b, c, _, e = call.args
    kinds = element_dtype(a.source) == element_dtype(b.source) and element_dtype(a.source) in HALVES
    deep = dense_shape(call)[1] % DEPTH == 0 and dense_shape(call)[0] % 16 == 0
    return target.matrix_products and threads % WARP == 0 and kinds and deep


def shared_layouts(call: Any) -> dict[Any, Any]:
    made = {r.source: swizzled(r, along) for r, along in operands_of(call)}
    return {b: layout for b, layout in made.items() if layout is not None}


def _float_sums(cx: CudaLowering, call: Any, c: Any) -> tuple[Any, list[Any], list[Any]]:
    """The accumulator in float32, what fills it in front and what takes it back behind."""
    dtype, slots, clear = element_dtype(c.buf), c.layout.slots, constant(call.args[3])
    own = dtype == "float32"
    acc = c.buf if own else tirx.decl_buffer((slots,), "float32", f"{c.name}_sum", scope="local", layout=None)
    head: list[Any] = [] if own else [tirx.AllocBuffer(acc, {}, call.span)]
    u, v = tirx.Var("u", "int32"), tirx.Var("u", "int32")
    zero = tirx.BufferStore(acc, tirx.const(0, "float32"), [u], call.span)
    held = (
        None
        if own
        else tirx.BufferStore(acc, tirx.Cast("float32", tirx.BufferLoad(c.buf, [u])), [u], call.span)
    )
    start = tirx.IfThenElse(cx.scalar(call.args[3]), zero, held) if clear is None else zero if clear else held
    if start is not None:
        head.append(unrolled(u, slots, start))
    back = tirx.BufferStore(c.buf, tirx.Cast(dtype, tirx.BufferLoad(acc, [v])), [v], call.span)
    return acc, head, [] if own else [unrolled(v, slots, back)]


def _places(cx: CudaLowering, call: Any, into: Any, row0: Any, step: Any, lane: Any, down: int) -> Any:
    """A thread's register of places for each 16 rows."""
    e = call.args[4]
    place, axes = cx.memory_of(e.source), matrix_axes(e)
    mins = [cx.scalar(r.min) for r in e.region]
    rows, each = int(e.region[axes[0]].extent), COVERED[element_dtype(e.source)]
    t = tirx.Var("t", "int32")
    cx.bind_range(t, down)

    def read(row: Any, column: Any) -> Any:
        index = list(mins)
        index[axes[0]], index[axes[1]] = index[axes[0]] + row, index[axes[1]] + column
        return tirx.Cast("uint32", tirx.BufferLoad(place.buf, [cx.analyzer.simplify(place.flat(index))]))

    def sixteen(row: Any) -> Any:
        """The bits of 16 elements of a row."""
        row = cx.analyzer.simplify(row)
        if not cx.analyzer.can_prove(row < rows):
            row = tirx.min(row, tirx.IntImm("int32", rows - 1))
        odd, low = lane % 2, tirx.const(0xFFFF, "uint32")
        if each == 16:
            return tirx.bitwise_and(read(row, step * 2 + odd), low)
        if each == 32:
            return tirx.bitwise_and(tirx.shift_right(read(row, step), tirx.Cast("uint32", odd * 16)), low)
        first, second = (read(row, step * 4 + odd * 2 + h) for h in (0, 1))
        return tirx.bitwise_or(first, tirx.shift_left(second, tirx.const(8, "uint32")))

    upper = tirx.shift_left(sixteen(row0 + t * 16 + lane // 4 + 8), tirx.const(16, "uint32"))
    made = tirx.bitwise_or(sixteen(row0 + t * 16 + lane // 4), upper)
    return unrolled(t, down, tirx.BufferStore(into, made, [t], call.span))


# ---- what is registered


@lowers("cuda", "gemm_sp")
class GemmSp(shared.GemmSp["CudaLowering"]):
    demands = True

    def stage(self, call: Any, cx: StageContext) -> list[Any] | None:
        """Operands in shared memory, the accumulator a whole fragment."""
        a, b, c, clears, e = call.args
        if not _has_mma(call, cx.executor.threads, cx.program.target):
            return super().stage(call, cx)
        own = in_registers(c.source) and is_whole(c) and len(c.source.ty.shape) == 2
        moved = [r for r in (a, b, e) if in_registers(r.source)]
        before, operands = into_shared(call, cx, (a, b, e), moved)
        if own:
            return [*before, cx.again(call, [*operands[:2], c, clears, operands[2]])] if before else None
        shape = [int(c.region[x].extent) for x in matrix_axes(c)]
        tile = cx.tile(f"{c.source.name}_part", shape, element_dtype(c.source), "local.fragment", call.span)
        if not constant(clears):
            before.append(cx.copy(c, tile, call))
        return [*before, cx.again(call, [*operands[:2], tile, clears, operands[2]]), cx.copy(tile, c, call)]

    def layouts(self, call: Any, cx: LayoutContext) -> list[Any]:
        """The accumulator's fragments, best first."""
        m, n = (int(call.args[2].region[k].extent) for k in matrix_axes(call.args[2]))
        threads = cx.executor_of(call).threads
        cuts = mma_fragments(m, n, threads, int(call.attrs["policy"]))
        return [
            [Demand(call.args[2].source, f, f"T.gemm_sp (mma.sp, {wm} × {wn} warps)", loc_of(call.span))]
            for f, wm, wn in cuts
        ]

    def shared_layouts(self, call: Any) -> dict[Any, Any]:
        return shared_layouts(call)

    def lower(self, call: Any, cx: CudaLowering) -> Any:
        """C += A · op(B) by mma.sp, in steps of 32 along k."""
        a, b = (
            operand(cx, call.args[0], bool(call.attrs["trans_a"])),
            operand(cx, call.args[1], not bool(call.attrs["trans_b"])),
        )
        c = cx.registers_of(call.args[2].source)
        kind, k = KINDS[element_dtype(a.place.buf)], dense_shape(call)[1]
        down, across = gemm.tiles_along(c.layout, 0, 16), gemm.tiles_along(c.layout, 1, 8)
        lane, step = tirx.Var("lane", "int32"), tirx.Var("k", "int32")
        row0, col0 = tirx.Var("row0", "int32"), tirx.Var("col0", "int32")
        binds = [tirx.Bind(lane, cx.thread() % WARP)]
        cx.bind_range(lane, WARP)
        cx.bind_range(step, k // DEPTH)
        for var, axis, size in ((row0, 0, 16), (col0, 1, 8)):
            begin = gemm.warp_start(cx, c.layout, axis, size)
            cx.bound(var, begin)
            binds.append(tirx.Bind(var, begin))

        def local(n: int, dtype: str, name: str) -> Any:
            return tirx.decl_buffer((n,), dtype, name, scope="local", layout=None)

        dtype = element_dtype(a.place.buf)
        kept, where = local(down * 8, dtype, "a"), local(down, "uint32", "places")
        halves = [local(across * 4, dtype, name) for name in ("b", "b_next")]
        loads = [
            tirx.AllocBuffer(kept),
            *gemm.load_tiles(cx, a, kept, row0, step * 16, k // 2, down, lane, 2, is_a=True),
        ]
        for h, regs in enumerate(halves):
            loads += [
                tirx.AllocBuffer(regs),
                *gemm.load_tiles(cx, b, regs, col0, step * DEPTH + 16 * h, k, across, lane, 2, is_a=False),
            ]
        loads += [tirx.AllocBuffer(where), _places(cx, call, where, row0, step, lane, down)]
        acc, head, tail = _float_sums(cx, call, c)
        i, j = tirx.Var("i", "int32"), tirx.Var("j", "int32")

        def at(buf: Any, index: Any) -> Any:
            return tirx.address_of(tirx.BufferLoad(buf, [index]))

        operands = [
            at(acc, i * (4 * across) + j * 4),
            at(kept, i * 8),
            *(at(regs, j * 4) for regs in halves),
            tirx.BufferLoad(where, [i]),
        ]
        product = tirx.Evaluate(tirx.call_extern("void", f"ts::mma_sp_m16n8k32_{kind}", *operands), call.span)
        products = unrolled(i, down, unrolled(j, across, product))
        loop = tirx.For(
            step,
            ZERO,
            tirx.IntImm("int32", k // DEPTH),
            tirx.ForKind.SERIAL,
            sequence([*loads, products]),
            span=call.span,
        )
        return sequence([*head, *binds, loop, *tail])
