"""How the author's CUDA text is called (compiler/ops/extern.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.gpu.cprinter import EXTERN
from tilescale.compiler.gpu.places import InShared
from tilescale.compiler.ir.buffers import read_buffers
from tilescale.compiler.ir.contexts import LayoutContext
from tilescale.compiler.ir.lowerings import Lowering, lowers
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.layout.infer import Demand
from tilescale.compiler.layout.spread import replicated
from tilescale.compiler.tvm_compat import ir, tirx
from tilescale.errors import TileValueError

if TYPE_CHECKING:
    from tilescale.compiler.cuda.lower import Lowering as CudaLowering


@lowers("cuda", "call_extern")
class CallExtern(Lowering["CudaLowering"]):
    def layouts(self, call: Any, cx: LayoutContext) -> list[Any]:
        return [in_order(call, call.args, f"T.call_extern of {call.attrs['function']}", cx)]

    def lower(self, call: Any, cx: CudaLowering) -> Any:
        """The call as it is written; pointers are the addresses of first elements."""
        args, result = [], None
        for value, mode in zip(call.args, str(call.attrs["modes"]).split(","), strict=False):
            if mode == "=":
                result = value if value.source in read_buffers(cx.program.func.body) else None
                continue
            args.append(cx.scalar(value) if mode == "v" else address(cx, value, "w" in mode, call))
        gives = "void" if result is None else str(result.source.ty.dtype)
        made = tirx.call_extern(gives, str(call.attrs["function"]), *args)
        done = ir.Call(made.op, list(made.args), attrs={EXTERN: 1}, ret_ty=made.ty)
        if result is None:
            return tirx.Evaluate(done, call.span)
        buf, flat, _, _ = cx.access(result.source, [r.min for r in result.region], call, True)
        return tirx.BufferStore(buf, done, [flat], call.span)


def in_order(call: Any, operands: Any, what: str, cx: LayoutContext) -> list[Demand]:
    """That operands in memory of a thread's own lie there in the order of their elements."""
    threads, loc = cx.executor_of(call).threads, loc_of(call.span)
    pointed = [a.source for a in operands if isinstance(a, ir.TensorRegion)]
    own = {b: tuple(int(e) for e in b.ty.shape) for b in pointed if b.ty.storage_scope == "local"}
    return [Demand(b, replicated(shape, threads), what, loc) for b, shape in own.items()]


def address(cx: CudaLowering, region: Any, writes: bool, node: Any) -> Any:
    """Where a region begins.

    Raises:
        TileValueError: elements behind it lie elsewhere: of a tile under a swizzle.
    """
    buf, flat, _, place = cx.access(region.source, [r.min for r in region.region], node, writes)
    if isinstance(place, InShared) and place.layout.swizzle:
        raise TileValueError(
            f"a pointer to {place.name}, whose elements are swizzled", loc=cx.here,
            expected="memory in row-major order",
            hint=f"T.annotate_layout({{{place.name}: tilescale.layout.make_linear_layout({place.name})}})",
        )  # fmt: skip
    return tirx.address_of(tirx.BufferLoad(buf, [flat]))
