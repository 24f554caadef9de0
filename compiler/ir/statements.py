"""Statements made of statements."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.tvm_compat import tirx


def sequence(stmts: list[Any]) -> Any:
    """One statement out of many. TVM drops what does nothing from a SeqStmt, and refuses one of which a
    single statement is left."""
    left = [s for s in stmts if not (isinstance(s, tirx.Evaluate) and isinstance(s.value, tirx.IntImm))]
    if not left:
        return tirx.Evaluate(tirx.IntImm("int32", 0))
    return left[0] if len(left) == 1 else tirx.SeqStmt(left)


def statements(s: Any) -> list[Any]:
    """The statements that one consists of; itself where it is no sequence."""
    return list(s.seq) if isinstance(s, tirx.SeqStmt) else [s]
