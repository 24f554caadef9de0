"""Tensors at addresses that a kernel reads (ops/pointer.py)."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.tvm_compat import ir, register_op

POINTED = "ts.tensor_at"
register_op(POINTED, pure=True)


def address_of(declared: Any) -> Any:
    """The address of the tensor that a DeclBuffer declares; None where it declares a view."""
    data = declared.data
    return data.args[1] if isinstance(data, ir.Call) and data.op.name == POINTED else None
