"""Small pieces of thread IR."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.tvm_compat import tirx


def at(buffer: Any, index: Any) -> Any:
    """The address of an element."""
    return tirx.address_of(tirx.BufferLoad(buffer, [index]))


def call(name: str, *args: Any, span: Any = None) -> Any:
    return tirx.Evaluate(tirx.call_extern("void", f"ts::{name}", *args), span)


def cast(value: Any, dtype: str) -> Any:
    return value if str(value.ty) == dtype else tirx.Cast(dtype, value)


def all_of(tests: list[Any]) -> Any:
    made = tests[0]
    for t in tests[1:]:
        made = tirx.And(made, t)
    return made
