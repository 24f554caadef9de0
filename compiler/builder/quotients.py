"""Quotients of float32 where a kernel asks for fast math: products with the fast reciprocal, of which many
that share a divisor need one. And what TVM must not fold: by zero there are infinities, and no number."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder.state import asks_for
from tilescale.compiler.tvm_compat import ir, is_expr, tirx
from tilescale.language.funcs import FAST_MATH


def reciprocal(a: Any, b: Any) -> Any:
    """What ``a`` is multiplied with in the place of ``a / b``; None where it is divided: a kernel that asks
    for nothing, another dtype, a constant, by which it costs no more."""
    floats = all(not is_expr(x) or str(x.ty) == "float32" for x in (a, b))
    if not floats or not is_expr(b) or isinstance(b, tirx.FloatImm) or not asks_for(FAST_MATH):
        return None
    return ir.Call("ts.math.__rcp", [b], ret_ty=ir.PrimType("float32"))


def is_float(value: Any) -> bool:
    """Whether it is an expression of floats, no constant."""
    return is_expr(value) and not isinstance(value, tirx.FloatImm) and "float" in str(value.ty)


def is_zero(value: Any) -> bool:
    """Whether it is a constant zero."""
    return (
        value == 0
        if isinstance(value, (int, float))
        else isinstance(value, (tirx.FloatImm, tirx.IntImm)) and value.value == 0
    )
