"""TileLang's module of one pass, by the names that programs take from it."""

from __future__ import annotations

from typing import Any

from tilescale.compat import simplify_prim_func

__all__ = ["apply_simplify", "simplify_prim_func"]


def apply_simplify(stmt: Any) -> Any:
    """The kernel itself: every program is simplified as it is compiled."""
    return stmt
