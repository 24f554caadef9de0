"""How the operations of compiler/ops/print.py are done on the CPU."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder.values import as_expr
from tilescale.compiler.cpu.lower import Lowering as CpuLowering
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ops.print import dtype_code
from tilescale.compiler.tvm_compat import ir, tirx


@lowers("cpu", "print")
def lower_print(call: Any, cx: CpuLowering) -> Any:
    value = call.args[0]
    site = cx.site("text" if isinstance(value, ir.StringImm) else "print", str(call.attrs["msg"]), call)
    if isinstance(value, ir.StringImm):
        return cx.call("ts_print_i64", site, tirx.IntImm("int64", 0))
    if not isinstance(value, ir.TensorRegion):
        e = cx.scalar(value)
        if "float" in str(e.ty):
            return cx.call("ts_print_f64", site, tirx.Cast("float64", e))
        return cx.call("ts_print_i64", site, tirx.Cast("int64", e))
    v = cx.view(value)
    kept = [k for k, d in enumerate(call.attrs["dropped"]) if not d]
    rank = len(kept)
    sizes = tirx.decl_buffer((2 * rank + 1,), "int64", "sizes", data_alignment=8, layout=None, scope="local")
    stmts: list[Any] = [tirx.AllocBuffer(sizes)]
    for k, (extent, stride) in enumerate((v.shape[axis], v.strides[axis]) for axis in kept):
        for at, number in ((k, extent), (rank + k, stride)):
            wide = tirx.IntImm("int64", number) if isinstance(number, int) else tirx.Cast("int64", number)
            stmts.append(tirx.BufferStore(sizes, wide, [tirx.IntImm("int32", at)]))
    where = tirx.address_of(tirx.BufferLoad(v.buf, [v.offset]))
    shape = tirx.address_of(tirx.BufferLoad(sizes, [tirx.IntImm("int32", 0)]))
    strides = tirx.address_of(tirx.BufferLoad(sizes, [tirx.IntImm("int32", rank)]))
    stmts.append(
        cx.call("ts_print_buf", site, where, as_expr(dtype_code(v.dtype)), as_expr(rank), shape, strides)
    )
    return sequence(stmts)
