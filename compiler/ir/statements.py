"""Statements made of statements."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.tvm_compat import tirx


def sequence(stmts: list[Any]) -> Any:
    """One statement out of many."""
    if not stmts:
        return tirx.Evaluate(tirx.IntImm("int32", 0))
    return stmts[0] if len(stmts) == 1 else tirx.SeqStmt(stmts)
