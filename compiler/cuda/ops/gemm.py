"""T.gemm on NVIDIA's GPUs. 16-bit floats, 8-bit floats and integers, and float32 where it may be cut to tf32
go to mma.sync: warps cut the accumulator by the policy, each loops over 16 × 8 tiles of its part; operands
come by ldmatrix where rows are 16-byte chunks (of fewer bits than 16 or more: rows along k), else element by
element. All other dtypes (float32 among them) are summed by multiply-adds (gpu/ops/gemm.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.gpu.ops import gemm as shared
from tilescale.compiler.gpu.ops.gemm import Operand, both_operands, clamped, unrolled
from tilescale.compiler.gpu.places import Registers, digit
from tilescale.compiler.ir.contexts import LayoutContext, StageContext
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ir.multiples import multiple
from tilescale.compiler.ir.scales import WARP
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ir.target import Target
from tilescale.compiler.layout import Fragment, Shared, tensor_cores
from tilescale.compiler.layout.infer import Demand
from tilescale.compiler.layout.instructions import mma_a
from tilescale.compiler.layout.loops import bits_of, element_dtype, in_registers
from tilescale.compiler.layout.products import extents, mma_fragments, operands_of, swizzled
from tilescale.compiler.layout.spread import ceil_div
from tilescale.compiler.layout.tensor_cores import cut, has_mma, kind_of
from tilescale.compiler.passes.stage_operands import is_whole
from tilescale.compiler.tvm_compat import sym, tirx
from tilescale.errors import InternalError

if TYPE_CHECKING:
    from tilescale.compiler.cuda.lower import Lowering as CudaLowering

ZERO = tirx.IntImm("int32", 0)
#: a warp with so few tiles, and so many steps, would wait for each of its products before the next one of the
#: same tile: every second step has sums of its own
FEW, LONG = 2, 8


def by_tensor_cores(call: Any, threads: int, target: Target) -> bool:
    """Whether warps make a product by mma.sync."""
    return target.matrix_products and threads % WARP == 0 and has_mma(call)


# ---- layouts


def held_left(call: Any, cx: StageContext) -> bool:
    """Whether tensor cores can take A from where it lies: a whole fragment, as deep as whole instructions,
    that no product writes (accumulators have another order of slots)."""
    a, b = call.args[:2]
    if call.attrs["trans_a"]:
        return False
    whole = is_whole(a) and len(a.source.ty.shape) == 2 and a.source.ty.storage_scope == "local.fragment"
    deep = extents(call)[2] % tensor_cores.depth(bits_of(a.source)) == 0
    return whole and deep and not a.source.same_as(b.source) and a.source not in cx.accumulators


def computed_twice(call: Any, threads: int) -> bool:
    """Whether warps side by side would each compute a left operand of 8 bits for themselves, byte by byte.
    Through shared memory it is computed once, 16 bytes at a time: int4 that is widened, 4096³ in tiles of
    32 × 32 on four warps, took 0.80 ms on an H200, and 1.38 from registers."""
    m, n, _ = extents(call)
    _, rows, _ = mma_fragments(m, n, threads, int(call.attrs["policy"]))[0]
    return bits_of(call.args[0].source) == 8 and rows < threads // WARP


def operand_fragment(m: int, k: int, bits: int, warps: int, wm: int, wn: int) -> Fragment:
    """A from registers: every warp of a row of warps has the whole depth of its rows."""
    own = mma_a(bits).repeated(1, k // tensor_cores.depth(bits)).repeated(0, m // (16 * wm))
    return own.repeated(0, wm, "thread").copied(wn).copied(warps // (wm * wn))


def shared_layouts(call: Any) -> dict[Any, Shared]:
    """Operands of tensor cores lie in boxes under the widest swizzle: ldmatrix reads eight rows without a
    bank conflict."""
    made = {
        r.source: swizzled(r, along)
        for r, along in operands_of(call)
        if element_dtype(r.source) != "float32" or cut(call)
    }
    return {b: layout for b, layout in made.items() if layout is not None}


# ---- thread IR


def _mma(
    cx: CudaLowering, call: Any, a: Registers | Operand, b: Operand, c: Registers, acc: Any, k: int
) -> Any:
    """For each step of k: this warp's tiles of A (an `Operand`, or `Registers` that have them) and B into
    registers, and their products. PTX ISA 9.0, "mma.m16n8k8", "mma.m16n8k16", "mma.m16n8k32"."""
    bits = bits_of(b.place.buf)
    depth, each = 256 // bits, 32 // bits
    down, across = tiles_along(c.layout, 0, 16), tiles_along(c.layout, 1, 8)
    lane = tirx.Var("lane", "int32")
    row0, col0 = tirx.Var("row0", "int32"), tirx.Var("col0", "int32")
    binds = [tirx.Bind(lane, cx.thread() % WARP)]
    cx.bind_range(lane, WARP)
    for var, axis, size in ((row0, 0, 16), (col0, 1, 8)):
        begin = warp_start(cx, c.layout, axis, size)
        cx.bound(var, begin)
        binds.append(tirx.Bind(var, begin))
    held = isinstance(a, Registers)
    steps = ceil_div(k, depth)
    apart = 2 if down * across <= FEW and steps >= LONG and steps % 2 == 0 else 1
    step = tirx.Var("k", "int32")
    cx.bind_range(step, steps // apart)
    name = f"ts::mma_m16n8k{depth}_{kind_of(call)}"

    def products(into: Any, at: Any) -> list[Any]:
        """One step's."""
        b_regs = tirx.decl_buffer(
            (across * 2 * each,), element_dtype(b.place.buf), "b", scope="local", layout=None
        )
        k0, loads = at * depth, []
        if isinstance(a, Registers):
            a_regs = a.buf
        else:
            a_dtype = element_dtype(a.place.buf)
            a_regs = tirx.decl_buffer((down * 4 * each,), a_dtype, "a", scope="local", layout=None)
            loads = [
                tirx.AllocBuffer(a_regs),
                *load_tiles(cx, a, a_regs, row0, k0, k, down, lane, each, is_a=True),
            ]
        load_b = load_tiles(cx, b, b_regs, col0, k0, k, across, lane, each, is_a=False)
        i, j = tirx.Var("i", "int32"), tirx.Var("j", "int32")
        left = (i * steps + at if held else i) * (4 * each)
        operands = (into, i * (4 * across) + j * 4), (a_regs, left), (b_regs, j * (2 * each))
        addresses = [tirx.address_of(tirx.BufferLoad(buf, [place])) for buf, place in operands]
        product = tirx.Evaluate(tirx.call_extern("void", name, *addresses), call.span)
        return [
            *loads,
            tirx.AllocBuffer(b_regs),
            *load_b,
            unrolled(i, down, unrolled(j, across, product)),
        ]

    sums, begin, end = [acc], [], []
    if apart == 2:
        sums.append(tirx.decl_buffer((c.layout.slots,), str(acc.ty.dtype), "odd", scope="local", layout=None))
        u, v = tirx.Var("u", "int32"), tirx.Var("u", "int32")
        none = tirx.BufferStore(sums[1], tirx.const(0, str(acc.ty.dtype)), [u], call.span)
        both = tirx.BufferLoad(acc, [v]) + tirx.BufferLoad(sums[1], [v])
        begin = [tirx.AllocBuffer(sums[1]), unrolled(u, c.layout.slots, none)]
        end = [unrolled(v, c.layout.slots, tirx.BufferStore(acc, both, [v], call.span))]
    body = sequence(
        [s for n in range(apart) for s in products(sums[n], step * apart + n if apart > 1 else step)]
    )
    kind = tirx.ForKind.UNROLLED if held else tirx.ForKind.SERIAL  # registers have constant indices alone
    loop = tirx.For(step, ZERO, tirx.IntImm("int32", steps // apart), kind, body, span=call.span)
    return sequence([*binds, *begin, loop, *end])


def chunked(o: Operand) -> bool:
    """Whether the neighbours of a stored row that ldmatrix takes always are one aligned 16-byte chunk. An
    executor's own tile begins at a multiple of that (passes/allocate_shared.py)."""
    last = o.axes[1]
    layout = o.place.layout
    each = 128 // layout.bits
    stored = o.rows if o.across else o.cols
    if last != len(layout.shape) - 1 or stored % each or (o.across and layout.bits != 16):
        return False
    others = (p for p in layout.pieces if not (p.axis == last and p.unit == 1))
    return (
        multiple(sym.Analyzer(), o.start, each)
        and layout.vector(last) >= each
        and all(p.stride % each == 0 for p in others)
    )


def tiles_along(fragment: Fragment, axis: int, size: int) -> int:
    """How many of the instruction's tiles a warp has along an axis."""
    warps = 1
    for p in fragment.pieces:
        if p.axis == axis and p.to == "thread" and p.stride >= WARP:
            warps *= p.extent
    return fragment.shape[axis] // (size * warps)


def warp_start(cx: CudaLowering, fragment: Fragment, axis: int, size: int) -> Any:
    total: Any = ZERO
    for p in fragment.pieces:
        if p.axis == axis and p.to == "thread" and p.stride * p.extent > WARP:
            if p.stride < WARP:  # lanes and warps merged into one digit
                low = WARP // p.stride
                total = total + digit(
                    cx.thread(), WARP, p.extent // low, p.stride * p.extent == fragment.threads
                ) * (p.unit * low)
            else:
                total = (
                    total
                    + digit(cx.thread(), p.stride, p.extent, p.stride * p.extent == fragment.threads) * p.unit
                )
    return cx.analyzer.simplify(total)


def load_tiles(
    cx: CudaLowering,
    o: Operand,
    regs: Any,
    first: Any,
    k0: Any,
    k: int,
    count: int,
    lane: Any,
    each: int,
    is_a: bool,
) -> list[Any]:
    """This warp's tiles of an operand for one step: 16 rows of A, 8 columns of B each."""
    size = 16 if is_a else 8
    if chunked(o) and k % (8 * each) == 0 and (is_a or count % 2 == 0):
        return [_by_matrices(cx, o, regs, first, k0, count, lane, each, is_a)]
    t = tirx.Var("t", "int32")
    u = tirx.Var("u", "int32")
    number = 4 * each if is_a else 2 * each
    cx.bind_range(t, count)
    cx.bind_range(u, number)
    pair, word = u % each, u // each
    if is_a:  # words: the two halves of the rows first, then those of k
        row, at = lane // 4 + word % 2 * 8, lane % 4 * each + pair + word // 2 * (4 * each)
    else:
        row, at = lane // 4, lane % 4 * each + pair + word * (4 * each)
    index = clamped(cx, cx.analyzer.simplify(first + t * size + row), o.rows)
    deep = cx.analyzer.simplify(k0 + at)
    inside = cx.analyzer.can_prove(deep < k)
    safe = deep if inside else tirx.min(deep, tirx.IntImm("int32", k - 1))
    value: Any = tirx.BufferLoad(o.place.buf, [cx.analyzer.simplify(o.at(index, safe))])
    if not inside:
        value = tirx.if_then_else(deep < k, value, tirx.const(0, str(value.ty)))
    return [unrolled(t, count, unrolled(u, number, tirx.BufferStore(regs, value, [t * number + u])))]


def _by_matrices(
    cx: CudaLowering, o: Operand, regs: Any, first: Any, k0: Any, count: int, lane: Any, each: int, is_a: bool
) -> Any:
    """ldmatrix.x4: lane l gives the address of row l % 8 of matrix l / 8, which takes the place of register l
    / 8 (PTX ISA 9.0, "ldmatrix"). A: matrices run over the halves of the rows, then of k. B: over the halves
    of k, then over two neighbouring tiles. A row of 16 bytes has ``4 * each`` elements, of which every lane
    gets those of one register: as the operands of mma have them."""
    t = tirx.Var("t", "int32")
    tiles = count if is_a else count // 2
    cx.bind_range(t, tiles)
    low, high = lane // 8 % 2, lane // 16
    line, half = (low, high) if is_a else (high, low)  # which 8 of the rows (columns of B), which 8 of k
    stored_by_k = o.across
    row = first + t * 16 + line * 8
    deep = k0 + half * (4 * each)
    if stored_by_k:
        deep = deep + lane % 8
        edge = o.rows - 8
    else:
        row = row + lane % 8
        edge = o.rows - 1
    row = cx.analyzer.simplify(row)
    if not cx.analyzer.can_prove(row <= edge):
        row = tirx.min(row, tirx.IntImm("int32", edge))
    source = tirx.address_of(
        tirx.BufferLoad(o.place.buf, [cx.analyzer.simplify(o.at(row, cx.analyzer.simplify(deep)))])
    )
    target = tirx.address_of(tirx.BufferLoad(regs, [t * (4 * each)]))
    name = "ts::ldmatrix_x4_trans" if stored_by_k else "ts::ldmatrix_x4"
    if not isinstance(o.place.layout, Shared):
        raise InternalError("ldmatrix from elsewhere than shared memory")
    return unrolled(t, tiles, tirx.Evaluate(tirx.call_extern("void", name, target, source)))


# ---- what is registered


@lowers("cuda", "gemm")
class Gemm(shared.Gemm["CudaLowering"]):
    def stage(self, call: Any, cx: StageContext) -> list[Any] | None:
        threads = cx.executor.threads
        warps = by_tensor_cores(call, threads, cx.program.target) and not computed_twice(call, threads)
        return shared.stage(call, cx, from_registers=warps and held_left(call, cx))

    def layouts(self, call: Any, cx: LayoutContext) -> list[Any]:
        """The accumulator's fragments, best first."""
        m, n, _ = extents(call)
        threads, policy = cx.executor_of(call).threads, int(call.attrs["policy"])
        c, loc = call.args[2].source, loc_of(call.span)
        if not by_tensor_cores(call, threads, cx.target):
            return super().layouts(call, cx)
        out = []
        for f, wm, wn in mma_fragments(m, n, threads, policy):
            what = f"T.gemm (mma.sync, {wm} × {wn} warps)"
            demands = [Demand(c, f, what, loc)]
            if in_registers(call.args[0].source):
                left = call.args[0].source
                held = operand_fragment(f.shape[0], extents(call)[2], bits_of(left), threads // WARP, wm, wn)
                demands.append(Demand(left, held, f"{what}'s left operand", loc))
            out.append(demands)
        return out

    def shared_layouts(self, call: Any) -> dict[Any, Any]:
        return shared_layouts(call)

    def product(self, call: Any, cx: CudaLowering, acc: Any, inner: str) -> Any:
        if not by_tensor_cores(call, cx.executor.threads, cx.target):
            return super().product(call, cx, acc, inner)
        a, b = both_operands(cx, call)
        return _mma(cx, call, a, b, cx.registers_of(call.args[2].source), acc, extents(call)[2])
