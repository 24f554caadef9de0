"""How the operations of compiler/ops/thread_copies.py are done on the GPU: as the author wrote them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.cuda.ops.mbarrier import barrier_at
from tilescale.compiler.gpu.build import at, call
from tilescale.compiler.gpu.places import InShared
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.layout.loops import bits_of
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import TileSyntaxError, TileValueError

if TYPE_CHECKING:
    from tilescale.compiler.cuda.lower import Lowering as CudaLowering

#: neighbours that every layout of shared memory keeps together
CHUNK = 16


@lowers("cuda", "thread_copy")
def thread_copy(node: Any, cx: CudaLowering) -> Any:
    """One cp.async; what lies outside of the tensor arrives as zeros, of which nothing is read."""
    to, frm = node.args
    size = int(constant(to.region[-1].extent) or 0) * bits_of(to.source) // 8
    place = cx.shared_of(to.source)
    target, index, tests, _ = cx.access(to.source, [r.min for r in to.region], node, True)
    rows = [constant(e) for e in place.shape]
    whole = isinstance(rows[-1], int) and rows[-1] * bits_of(to.source) // 8 % size == 0
    if tests or not whole or not isinstance(place, InShared):
        raise TileValueError(
            f"T.ptx_cp_async into {to.source.name} at an index that may lie outside",
            loc=cx.here,
            expected="an index that is known to lie inside, in rows of whole copies",
        )
    source, where, outside, _ = cx.access(frm.source, [r.min for r in frm.region], node, False)
    operands = [at(target, index), at(source, where)]
    if outside:
        test = outside[0]
        for t in outside[1:]:
            test = tirx.And(test, t)
        operands.append(tirx.Select(test, tirx.IntImm("int32", size), tirx.IntImm("int32", 0)))
    return call(f"cp_async<{size}>", *operands, span=node.span)


@lowers("cuda", "thread_copies")
def thread_copies(node: Any, cx: CudaLowering) -> Any:
    pending = int(node.attrs["pending"])
    return call("cp_async_commit" if pending < 0 else f"cp_async_wait<{pending}>", span=node.span)


@lowers("cuda", "thread_copies_arrive")
def thread_copies_arrive(node: Any, cx: CudaLowering) -> Any:
    if not cx.target.counting_barriers:
        raise TileSyntaxError(
            f"T.cp_async_barrier_noinc needs sm_90, and this is {cx.target.arch}", loc=cx.here
        )
    return call("cp_async_arrive", barrier_at(cx, node.args[0], node), span=node.span)
