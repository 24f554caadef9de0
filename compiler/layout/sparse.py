"""The same of products whose left operand keeps two of each four neighbours (PTX ISA 9.0, "Sparse matrix
storage")."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.nests import matrix_axes
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.layout.loops import in_registers
from tilescale.compiler.layout.products import swizzled, wgmma_fragments

#: steps of k that one register says the places of
HELD = 64


def unfit_sparse(call: Any) -> str | None:
    """Why a product whose dtypes wgmma.sp has is none of its; None where it is one."""
    a, b, _, _, e = call.args
    if any(in_registers(r.source) for r in (a, b, e)):
        return "T.gemm_sp of operands in registers"
    last = matrix_axes(e)[1]
    if constant(e.region[last].min) != 0 or constant(e.region[last].extent) != int(e.source.ty.shape[last]):
        return f"T.gemm_sp with a part of {e.source.name}'s columns"
    k = dense_shape(call)[1]
    if k % HELD:
        return f"T.gemm_sp of {k} steps along k, of which wgmma.sp's places come in {HELD}"
    layout = swizzled(b, bool(call.attrs["trans_b"]))
    if call.attrs["trans_b"] and (layout is None or layout.swizzle < 64):
        return f"T.gemm_sp of {b.source.name}, whose rows are shorter than the 64 bytes of one product"
    return None


def sparse_fragments(call: Any, threads: int) -> list[tuple[Any, int, int]]:
    """Every way to cut an accumulator among the warpgroups, each of which has rows of its own."""
    m = dense_shape(call)[0]
    return [f for f in wgmma_fragments(call, threads) if f[0].shape[0] == m and not f[0].first_thread]


#: dtype of the places → how many elements of a row one number says the places in
COVERED = {"uint8": 8, "int16": 16, "uint16": 16, "int32": 32, "uint32": 32}


def dense_shape(call: Any) -> tuple[int, int]:
    """M and K."""
    rows, columns = (int(call.args[0].region[k].extent) for k in matrix_axes(call.args[0]))
    return (columns, 2 * rows) if call.attrs["trans_a"] else (rows, 2 * columns)
