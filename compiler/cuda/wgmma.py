"""Products of a warpgroup: wgmma.mma_async (PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix
Multiply-Accumulate").

Operands in shared memory are named by matrix descriptors, which walk the boxes that TMA wrote. One whose rows
run along k ("K-major") is stepped along k within a swizzled row, whose address bits the hardware permutes;
one whose rows run along m or n ("MN-major") by whole groups of rows. The left operand may lie in registers
instead. Accumulators are registers that the tensor cores write until ``wait_group`` says otherwise, and a
left operand is read until then: nothing may touch them in between, and the compiler is told so by naming them
all behind that wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.gpu.build import at
from tilescale.compiler.gpu.build import call as do
from tilescale.compiler.gpu.places import Registers, digit
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.scales import WARPGROUP
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout.loops import bits_of
from tilescale.compiler.layout.tensor_cores import depth, kind_of
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import InternalError

if TYPE_CHECKING:
    from tilescale.compiler.cuda.lower import Lowering as CudaLowering
    from tilescale.compiler.gpu.ops.gemm import Operand

ROWS = 64
#: the named barrier of warpgroup 0's turns; the others' follow it
TURNS = 8
#: slots of a fragment behind whose computation a wait is kept: the last ones, or, where the fragment has
#: several times the slots of the product that is awaited, so that the product ends long before it is
#: computed, the last of such a part
PINNED = 4
#: registers of a multiprocessor, and those that ptxas wants beside an instruction's accumulator
BLOCK_REGISTERS, BESIDE = 65536, 26


def emit(
    cx: CudaLowering, call: Any, a: Registers | Operand, b: Operand, extents: tuple[int, int, int]
) -> Any:
    """C += op(A) · op(B): this warpgroup's part, in steps of k; then the wait that the call asks for. ``a``
    is an operand in shared memory or `Registers`."""
    m, n, k = extents
    held = cx.registers_of(call.args[2].source)
    down, across = parts(held.layout)
    own_m, own_n = held.layout.shape[0] // down, n // across
    blocks = own_m // ROWS
    with cx.counted_from(held.layout.first_thread):
        number = cx.analyzer.simplify(cx.thread() // WARPGROUP)
        skipped = cx.skips(held.layout, (m, n), cx.thread())
    cx.flying.append(not skipped)
    cx.computed = cx.computed if skipped else None
    if skipped:
        return sequence([])
    group, row, col, binds = own_part(cx, held, number, own_m, own_n)
    shared = [("b", b, col)] if isinstance(a, Registers) else [("a", a, row), ("b", b, col)]
    descriptors, named = described(cx, shared)
    binds += named
    bits = b.place.layout.bits
    each = depth(bits)
    layout_a = "r" if isinstance(a, Registers) else int(a.across)
    kinds = f"k{each}_{kind_of(call)}_{layout_a}{int(b.across)}"
    first_keeps = kept(cx, call)
    steps = []
    for step in range(k // each):
        for block in range(blocks):
            if isinstance(a, Registers):  # a step is four registers, behind those of the steps before
                left = at(a.buf, tirx.IntImm("int32", (block * (k // each) + step) * (4 * 32 // bits)))
            else:
                left = moved(cx, descriptors[0], a, block * ROWS, step * each)
            keep = tirx.IntImm("int32", 1) if step else first_keeps
            for first, wide in columns(cx, own_n):
                right = moved(cx, descriptors[-1], b, first, step * each)
                into = at(held.buf, tirx.IntImm("int32", (block * own_n + first) // 2))
                steps.append(
                    tirx.Evaluate(
                        tirx.call_extern("void", f"ts::wgmma_m64n{wide}{kinds}", into, left, right, keep),
                        call.span,
                    )
                )
    issued = [do("wgmma_fence", span=call.span), *steps, do("wgmma_commit", span=call.span)]
    if (
        own_m * down > m and cx.group is None
    ):  # some warpgroups have padding alone; nothing is in flight where their ways join
        issued.append(awaited(cx, [call.args[2]], 0, call.span))
        mine = digit(group, 1, down, across == 1) < m // own_m
        return sequence([*binds, tirx.IfThenElse(mine, sequence(issued), None)])
    return sequence([*binds, *issued, *wait_asked(cx, call)])


def kept(cx: CudaLowering, call: Any) -> Any:
    """Whether a product's first step adds to what its accumulator has, as an int: a constant, or what a
    condition of the device says (of a product by hand)."""
    clear = constant(call.args[3])
    if clear is not None:
        return tirx.IntImm("int32", int(not clear))
    return tirx.Cast("int32", tirx.Not(cx.scalar(call.args[3])))


def own_part(
    cx: CudaLowering, held: Registers, number: Any, own_m: int, own_n: int
) -> tuple[Any, Any, Any, list[Any]]:
    """The number of the thread's warpgroup among those that share an accumulator, the first row and column of
    its part, and what binds the number, where no one has named it yet. ``number``: its value."""
    down, across = parts(held.layout)
    zero = tirx.IntImm("int32", 0)
    group: Any = tirx.Var("warpgroup", "int32")
    if down * across == 1:
        return group, zero, zero, []
    binds = []
    if cx.role == "consumer" and cx.executor.name == "block" and not held.layout.first_thread:
        group = cx.warpgroup()
    else:
        binds.append(tirx.Bind(group, number))
        cx.bind_range(group, down * across)
    return group, digit(group, 1, down, across == 1) * own_m, digit(group, down, across, True) * own_n, binds


def columns(cx: CudaLowering, n: int) -> list[tuple[int, int]]:
    """The columns that one instruction each takes of a warpgroup's part of n, (first, how many): all, or
    equal parts where the registers that a thread has at launch do not hold an accumulator of all (ptxas
    C7602): 128 of three warpgroups and a producer's. What `more_registers` adds counts for the kernel's
    allocation, not for an instruction's."""
    at_launch = BLOCK_REGISTERS // (cx.threads + cx.extra) // 8 * 8
    count = -(-(n // 2) // (at_launch - BESIDE))
    wide = n if count == 1 else -(-n // count // 16) * 16  # integers take multiples of 16
    return [(first, min(wide, n - first)) for first in range(0, n, wide)]


def described(cx: CudaLowering, operands: list[tuple[str, Any, Any]]) -> tuple[list[Any], list[Any]]:
    """The matrix descriptors of operands in shared memory, and what binds them: (name, operand, its first row
    or column). Where a producer fills rings they follow from the stage. Elsewhere tiles lie where they lie,
    and many products of a loop would have all of theirs in registers."""
    descriptors, binds = [], []
    function = "matrix_descriptor" if cx.role == "consumer" else "descriptor_here"
    for name, o, first in operands:
        if not o.place.layout.swizzle:
            raise InternalError(f"wgmma of {o.place.name}, which is not swizzled", loc=cx.here)
        var = tirx.Var(f"{name}_desc", "uint64")
        start = at(o.place.buf, cx.analyzer.simplify(linear(o, first, tirx.IntImm("int32", 0))))
        binds.append(
            tirx.Bind(
                var,
                tirx.call_extern("uint64", f"ts::{function}<{o.place.layout.swizzle}>", start, _leading(o)),
            )
        )
        descriptors.append(var)
    return descriptors, binds


def wait_asked(cx: CudaLowering, call: Any) -> list[Any]:
    """The wait that a product asks for where it stands: for itself (0), for all but so many, for none (below
    0)."""
    pending = int(call.attrs["pending"])
    if pending > 0:
        return [do(f"wgmma_wait<{pending}>", span=call.span)]
    return [awaited(cx, [call.args[2]], 0, call.span)] if pending == 0 else []


def parts(fragment: Any) -> tuple[int, int]:
    """How many warpgroups share an accumulator along m and along n."""
    found = [1, 1]
    for p in fragment.pieces:
        if p.to == "thread" and p.axis is not None and p.stride * p.extent > WARPGROUP:
            found[p.axis] *= p.extent * p.stride // max(p.stride, WARPGROUP)
    return found[0], found[1]


def linear(o: Operand, i: Any, k: Any) -> Any:
    """The flat index of ``(i, k)`` of an operand in front of the swizzle, which descriptors leave to the
    hardware."""
    index = list(o.mins)
    first, second = (k, i) if o.across else (i, k)
    for axis, x in zip(o.axes, (first, second), strict=True):
        index[axis] = index[axis] + x
    return o.place.linear(index)


def moved(cx: CudaLowering, descriptor: Any, o: Operand, i: int, k: int) -> Any:
    """The descriptor of the part of an operand that begins at ``(i, k)``: addresses count 16 bytes. Adding
    stays within the 14 bits of the address, since shared memory ends below 2**18 bytes."""

    def number(x: int) -> Any:
        return tirx.IntImm("int32", x)

    distance = cx.analyzer.simplify(linear(o, number(i), number(k)) - linear(o, number(0), number(0)))
    units = int(distance) * o.place.layout.bits // 8 // 16
    return descriptor + tirx.IntImm("uint64", units) if units else descriptor


def _leading(o: Operand) -> Any:
    """The leading dimension byte offset: between boxes, where the operand is stored with its rows as columns;
    else of no meaning."""
    layout = o.place.layout
    wide = layout.swizzle * 8 // layout.bits
    return tirx.IntImm("int32", int(o.place.shape[-2]) * wide * layout.bits // 8 if o.across else 16)


def awaited(
    cx: CudaLowering, tiles: Any, pending: int, span: Any = None, behind: Any = (), straight: bool = False
) -> Any:
    """``wait_group``, and the accumulators and operands in registers named behind it. ``behind``: what is
    computed in front of it. ``straight``: what follows reads them in no branch."""
    out = []
    there = [(t, cx.places[t.source]) for t in tiles]
    in_threads = [(t, place) for t, place in there if isinstance(place, Registers)]
    # Other tiles are operands.
    product = max((place.layout.slots for t, place in in_threads if bits_of(t.source) == 32), default=0)
    for tile in behind:
        held = cx.registers_of(tile.source)
        slots = held.layout.slots // max(1, held.layout.slots // product if product else 1)
        for k in range(min(slots, PINNED)):
            last = at(held.buf, tirx.IntImm("int32", slots - 1 - k))
            out.append(
                tirx.Evaluate(
                    tirx.call_extern("void", "ts::wgmma_behind", last, at(cx.arena, tirx.IntImm("int32", 0))),
                    span,
                )
            )
    out.append(
        do(
            f"wgmma_wait<{pending}, false>" if straight and not pending else f"wgmma_wait<{pending}>",
            span=span,
        )
    )
    for _, place in in_threads:
        function = f"ts::wgmma_arrived<{place.layout.slots}>"
        out.append(tirx.Evaluate(tirx.call_extern("void", function, tirx.buffer_data(place.buf)), span))
    for places in cx.asked:  # of sparse operands (wgmma_sp.py)
        function, arena = f"ts::wgmma_read<{int(places.ty.shape[0])}>", at(cx.arena, tirx.IntImm("int32", 0))
        out.append(tirx.Evaluate(tirx.call_extern("void", function, tirx.buffer_data(places), arena), span))
    return sequence(out)


def computed(held: Registers) -> list[Any]:
    """What keeps everything that follows behind the computation of a tile in registers."""
    named = tirx.call_extern("void", f"ts::wgmma_arrived<{held.layout.slots}>", tirx.buffer_data(held.buf))
    return [tirx.Evaluate(named), do("block_ends")]


def ping_pong(cx: CudaLowering, what: str, span: Any) -> Any:
    """A turn at the tensor cores taken or given (`ops.wgmma.PingPongBarrier`): a named barrier for each
    warpgroup, at which it waits for the one before it in the circle, which arrives without waiting. Each
    barrier sees as many arrivals as waits: "first" arrives for the last warpgroup, whose last "pass" it is
    that "last" waits for. The barrier's number is one a warp: behind one of a lane's own, ptxas computes what
    follows, such as matrix descriptors, in each lane."""
    groups = cx.threads // WARPGROUP

    def number(x: int) -> Any:
        return tirx.IntImm("int32", x)

    mine = cx.warpgroup()

    def named(name: str, which: Any) -> Any:
        barrier = tirx.call_extern("void", f"ts::{name}", which + TURNS, number(2 * WARPGROUP))
        return tirx.Evaluate(barrier, span)

    if what == "take":
        return named("barrier_sync", mine)
    if what == "pass":
        return named("barrier_arrive", (mine + 1) % groups)
    if what == "first":
        return tirx.IfThenElse(tirx.EQ(mine, number(groups - 1)), named("barrier_arrive", number(0)), None)
    return tirx.IfThenElse(tirx.EQ(mine, number(0)), named("barrier_sync", number(0)), None)


def function_text(name: str) -> str:
    """The definition of ``ts::wgmma_m64n…`` or ``ts::wgmma_sp_m64n…``, whose operands PTX lists one by one.
    Printed with the kernels that call it."""
    sparse = name.startswith("wgmma_sp_")
    shape, *kinds, trans = name.removeprefix("wgmma_").removeprefix("sp_").split("_")
    selector = trans.removeprefix("s")
    if sparse:
        *kinds, trans = kinds
    n = int(shape.partition("n")[2].partition("k")[0])
    count = n // 2
    whole = kinds[0] in ("s8", "u8")
    sums, ctype, letter = ("s32", "int", "r") if whole else ("f32", "float", "f")
    # the factors of A and B are 1, the transposes of those in shared memory an option of 16-bit operands
    across = "".join(f", {t}" for t in trans.replace("r", "")) if kinds[0] in ("f16", "bf16") else ""
    options = "" if whole else f", 1, 1{across}"
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+{letter}"(d[{i}])' for i in range(count))
    rows = _folded(operands, 12)
    body = "\n".join(f'      "{part}"' for part in _folded(registers, 24))
    instruction = (
        f"wgmma.mma_async{'.sp' if sparse else ''}.sync.aligned.{shape}.{sums}.{kinds[0]}.{kinds[-1]}"
    )
    held = trans[0] == "r"
    b, keep = (count + 4, count + 5) if held else (count + 1, count + 3 if sparse else count + 2)
    where = f"%{b}, %{b + 1}, {selector}" if sparse else f"%{b}"
    left = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}" if held else f"%{count}"
    inputs = ", ".join(f'"r"(r[{i}])' for i in range(4)) if held else '"l"(a)'
    more = '"r"(*places), ' if sparse else ""
    load = "  uint32_t r[4];\n  memcpy(r, a, sizeof(r));\n" if held else ""
    return (
        f"// d += a · b of one warpgroup, or d = a · b where `keep` is zero.\n"
        f"__device__ __forceinline__ void {name}({ctype}* d, {'const void*' if held else 'uint64_t'} a, "
        "uint64_t b, "
        f"{'const uint32_t* places, ' if sparse else ''}int keep) {{\n{load}"
        f'  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{keep}, 0; {instruction} {{"\n'
        f"{body}\n"
        f'      "}}, {left}, {where}, p{options}; }}"\n'
        f"      : {(chr(10) + '        ').join(rows)}\n"
        f'      : {inputs}, "l"(b), {more}"r"(keep));\n'
        f"}}"
    )


def _folded(text: str, each: int) -> list[str]:
    """A list with commas, cut into lines of ``each``."""
    items = text.split(", ")
    lines = [", ".join(items[k : k + each]) for k in range(0, len(items), each)]
    return [line + ("," if k + 1 < len(lines) else "") for k, line in enumerate(lines)]
