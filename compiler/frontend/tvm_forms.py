"""Statements as TVM's script has them: ``with T.While(c):`` and ``T.let(v, x)``."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder.values import Variable
from tilescale.compiler.ir import source
from tilescale.errors import TileSyntaxError, TileTypeError


def While(condition: Any) -> None:
    """``with T.While(c):`` is ``while c:``. A kernel is rewritten so before it runs (frontend/rewrite.py);
    what comes here is another use.

    Raises:
        TileSyntaxError: always.
    """
    raise TileSyntaxError(
        f"T.While({condition}) by itself",
        loc=source.current(),
        expected="with T.While(condition): in a kernel or a T.macro",
        hint="while condition:",
    )


def let(var: Any, value: Any) -> None:
    """``v = T.int32()``, then ``T.let(v, x)``: v has the value of x from here on.

    Raises:
        TileTypeError: what is no cell.
    """
    if not isinstance(var, Variable):
        raise TileTypeError(
            f"T.let of {var}",
            loc=source.current(),
            expected="a cell, of T.int32() or T.alloc_var",
            hint="a name: v = x",
        )
    var.store(value)


def loop_break() -> None:
    """``break``, as a word: leaves the innermost loop of the device.

    Raises:
        TileSyntaxError: what it leaves is a loop of Python's, or none, or one that cannot be left.
    """
    from tilescale.compiler.frontend.hooks import Hooks

    if Hooks().break_():
        raise TileSyntaxError(
            "T.loop_break leaves a loop of Python's, or none",
            loc=source.current(),
            hint="break, in a loop over T.serial",
        )
