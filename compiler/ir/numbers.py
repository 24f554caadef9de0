"""Integers that expressions are known to be."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.tvm_compat import tirx


def constant(value: Any) -> int | None:
    """The integer that an extent or an index is, where it is one."""
    if isinstance(value, int):
        return value
    return int(value.value) if isinstance(value, tirx.IntImm) else None


_analyzer: list[Any] = []


def simplify(value: Any) -> Any:
    """An expression simplified; Python ints stay."""
    if isinstance(value, int):
        return value
    if not _analyzer:
        from tilescale.compiler.tvm_compat import sym

        _analyzer.append(sym.Analyzer())
    e = _analyzer[0].simplify(value)
    known = constant(e)
    return known if known is not None else e
