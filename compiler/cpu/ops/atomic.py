"""How the operations of compiler/ops/atomic.py are done on the CPU."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cpu import convert as conversions
from tilescale.compiler.cpu import move
from tilescale.compiler.cpu.lower import Lowering as CpuLowering
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ir.operations import VOID
from tilescale.compiler.tvm_compat import ir, tirx


@lowers("cpu", "atomic")
def lower_atomic(call: Any, cx: CpuLowering) -> Any:
    v = cx.view(call.args[0])
    value = call.args[1]
    frm = cx.view(value) if isinstance(value, ir.TensorRegion) else None
    fixed = None if frm is not None else cx.scalar(value)

    def one(target: Any, source_index: Any) -> Any:
        operand = fixed if frm is None else conversions.load(frm.buf, source_index, frm.dtype)
        return on_cpu(v, str(call.attrs["kind"]), target, operand)

    if str(call.ty) != str(VOID):
        cx._require_inside(v, call.args[0])
        return conversions.decode(one(v.offset, None), v.dtype)
    return move.each(cx, v, frm, lambda target, src: tirx.Evaluate(one(target, src)))


def on_cpu(v: Any, kind: str, target: Any, operand: Any) -> Any:
    """The update of the element ``target`` of a view, as thread IR for the CPU: the value before, as it lies
    in memory. All of them are sequentially consistent (native/atomics.c), also on memory that another process
    maps."""
    storage = conversions.storage_dtype(v.dtype)
    passed = "uint16" if storage == "float16" else storage  # half has no one calling convention in C
    stored = conversions.encode(operand, v.dtype)
    stored = stored if passed == storage else tirx.reinterpret(passed, stored)
    where = tirx.address_of(tirx.BufferLoad(v.buf, [target]))
    raw = tirx.call_extern(passed, f"ts_atomic_{kind}_{v.dtype}", where, stored)
    return raw if passed == storage else tirx.reinterpret(storage, raw)
