"""Products of a warpgroup whose left operand keeps two of each four neighbours along k: wgmma.mma_async.sp
(PTX ISA 9.0, "Sparse wgmma.mma_async", "Sparse matrix storage").

What A keeps lies in shared memory like a dense operand half as deep, B like any other; one instruction takes
32 bytes of A's rows and 64 of B's. Where A's numbers belong is a register of each thread, in the rows that
its warp has of the accumulator (g = lane / 4, t = lane % 4):

- 16-bit operands, 32 steps of k: of rows g (lower half) and g + 8 (upper half) the 16 places of k from 16 ·
  (t % 2) on. The *selector* says which two threads of each four are asked: 0 the first, 1 the last. So one
  register serves two instructions, t counting in both.
- 8-bit operands, 64 steps of k: of row g + 8 · (t % 2) the 32 places of k from 32 · (t / 2) on; all four are
  asked.

T.gemm_sp's E has four bits for each four places in the order of k, whatever the dtype of its words, so a
thread reads its 16 or 32 bits as they lie.

The registers of places are read until the product is complete, like those of a left operand, and ptxas (13.0)
does not know it: in a loop that it did not unroll it wrote the next round's places over them, and results
were wrong (in the SASS: PRMT into a product's register in front of WARPGROUP.DEPBAR). So in a loop whose
products are awaited a round late, those of the round before are awaited in front of the reads
(`gpu_schedule._late_round`), across which ptxas does not move the wait, and every wait for products is
followed by an instruction that has the registers as operands (``ts::wgmma_read``), so that nothing else is
put there. tests/unit/cuda/sass.py finds what does not keep to that.

float32 has no such product: of tf32 the instruction keeps one number in each two, which is another pattern
than two in each four.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from tilescale.compiler.cuda.wgmma import ROWS, columns, described, kept, moved, own_part, parts, wait_asked
from tilescale.compiler.gpu.build import at
from tilescale.compiler.gpu.build import call as do
from tilescale.compiler.gpu.kernel import placed
from tilescale.compiler.gpu.ops.gemm import operand, unrolled
from tilescale.compiler.ir.nests import matrix_axes
from tilescale.compiler.ir.scales import WARP, WARPGROUP
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout.loops import bits_of, element_dtype
from tilescale.compiler.layout.sparse import COVERED, HELD, dense_shape
from tilescale.compiler.layout.tensor_cores import depth, kind_of
from tilescale.compiler.tvm_compat import tirx

if TYPE_CHECKING:
    from tilescale.compiler.cuda.lower import Lowering as CudaLowering


def emit(cx: CudaLowering, call: Any) -> Any:
    """C += A · op(B): this warpgroup's part, in steps of k; then the wait that the call asks for."""
    k, n = dense_shape(call)[1], int(call.args[2].region[matrix_axes(call.args[2])[1]].extent)
    a = operand(cx, call.args[0], bool(call.attrs["trans_a"]))
    b = operand(cx, call.args[1], not bool(call.attrs["trans_b"]))
    held = cx.registers_of(call.args[2].source)
    down, across = parts(held.layout)
    own_m, own_n = held.layout.shape[0] // down, n // across
    blocks = own_m // ROWS
    _, row, col, binds = own_part(cx, held, cx.analyzer.simplify(cx.thread() // WARPGROUP), own_m, own_n)
    descriptors, named = described(cx, [("a", a, row), ("b", b, col)])
    bits = b.place.layout.bits
    each, words = 2 * depth(bits), k // HELD
    where = tirx.decl_buffer((blocks * words,), "uint32", "places", scope="local", layout=None)
    cx.asked.append(where)
    first_keeps, steps = kept(cx, call), list[Any]()
    for step in range(k // each):
        word, selector = step * each // HELD, step * each % HELD // each
        kinds = f"k{each}_{kind_of(call)}_{int(a.across)}{int(b.across)}_s{selector}"
        for block, (first, wide) in itertools.product(range(blocks), columns(cx, own_n)):
            left, right = (
                moved(cx, descriptors[0], a, block * ROWS, step * each // 2),
                moved(cx, descriptors[1], b, first, step * each),
            )
            into = at(held.buf, tirx.IntImm("int32", (block * own_n + first) // 2))
            keep = tirx.IntImm("int32", 1) if step else first_keeps
            places = at(where, tirx.IntImm("int32", block * words + word))
            function = f"ts::wgmma_sp_m64n{wide}{kinds}"
            steps.append(
                tirx.Evaluate(tirx.call_extern("void", function, into, left, right, places, keep), call.span)
            )
    issued = [
        *_places(cx, call, where, row, blocks, words),
        do("wgmma_fence", span=call.span),
        *steps,
        do("wgmma_commit", span=call.span),
    ]
    return sequence([*binds, *named, *issued, *wait_asked(cx, call)])


def _places(cx: CudaLowering, call: Any, into: Any, row: Any, blocks: int, words: int) -> list[Any]:
    """A thread's registers of places: for each 64 rows of its warpgroup, and each 64 steps of k. They live
    through the kernel."""
    e = call.args[4]
    place, axes = cx.shared_of(e.source), matrix_axes(e)
    mins, each = [cx.scalar(r.min) for r in e.region], COVERED[element_dtype(e.source)]
    wide = 16 if bits_of(call.args[0].source) == 16 else 32  # bits that are read at once
    dtype = f"uint{wide}"
    size = place.layout.bytes * 8 // wide
    view, declared = placed(
        cx.arena, f"{place.name}_bits", dtype, size, cx.program.arena[e.source][0], call.span
    )
    cx.head.append(declared)
    thread, lane = cx.thread() % WARPGROUP, cx.thread() % WARP
    block, word = tirx.Var("i", "int32"), tirx.Var("j", "int32")
    cx.bind_range(block, blocks)
    cx.bind_range(word, words)
    first = tirx.Var("row", "int32")
    begin = row + thread // WARP * 16 + lane // 4 + (lane % 2 * 8 if wide == 32 else tirx.IntImm("int32", 0))
    cx.bound(first, begin)

    def read(more: int) -> Any:
        """The bits of a row, from place ``wide · part`` of k on."""
        part = word * (HELD // wide) + (lane % 4 if wide == 16 else lane % 4 // 2)
        index = list(mins)
        index[axes[0]] = index[axes[0]] + first + block * ROWS + more
        index[axes[1]] = index[axes[1]] + part * wide // each
        made = place.flat([cx.analyzer.simplify(x) for x in index])
        made = made * (each // wide) if each >= wide else made // (wide // each)
        if each > wide:  # one number has several parts
            made = made + part % (each // wide)
        return tirx.Cast("uint32", tirx.BufferLoad(view, [cx.analyzer.simplify(made)]))

    value = read(0)
    if wide == 16:
        value = tirx.bitwise_or(value, tirx.shift_left(read(8), tirx.const(16, "uint32")))
    store = tirx.BufferStore(into, value, [block * words + word], call.span)
    loads = [tirx.Bind(first, begin), unrolled(block, blocks, unrolled(word, words, store))]
    u = tirx.Var("u", "int32")
    cx.head += [
        tirx.AllocBuffer(into, {}, call.span),
        unrolled(u, blocks * words, tirx.BufferStore(into, tirx.const(0, "uint32"), [u])),
    ]
    return loads
