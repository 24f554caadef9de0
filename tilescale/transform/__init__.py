"""TileLang's module of passes: what programs take from it. The passes themselves are the compiler's own."""

from __future__ import annotations

from tilescale.compat import PassConfigKey, simplify_prim_func

__all__ = ["PassConfigKey", "simplify_prim_func"]
