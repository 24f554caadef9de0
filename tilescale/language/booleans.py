"""Words that are true or false."""

from __future__ import annotations

import numbers
from typing import Any

from tilescale.errors import TileTypeError


def require_bools(**words: Any) -> None:
    """Raises TileTypeError for a word that is neither True nor False (nor 1, 0): ``clear="no"`` would count
    as true."""
    for name, value in words.items():
        numpys = type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
        if not numpys and not (isinstance(value, numbers.Integral) and value in (0, 1)):
            from tilescale.compiler.ir import source

            raise TileTypeError(f"{name}={value!r}", loc=source.current(), expected="True or False")
