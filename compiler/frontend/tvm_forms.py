"""Statements as TVM's script has them: ``with T.While(c):``, ``with T.If(c):``, ``T.let(v, x)``,
``T.thread_return()``."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.values import Variable
from tilescale.compiler.ir import source
from tilescale.errors import TileSyntaxError, TileTypeError


def While(condition: Any) -> None:
    """``with T.While(c):`` is ``while c:``. A kernel is rewritten so before it runs (frontend/frames.py);
    what comes here is another use.

    Raises:
        TileSyntaxError: always.
    """
    _by_itself(f"While({condition})", "while condition:")


def If(condition: Any) -> None:
    """``with T.If(c):`` around ``with T.Then():`` and ``with T.Else():`` is ``if c:`` and ``else:``.

    Raises:
        TileSyntaxError: another use.
    """
    _by_itself(f"If({condition})", "if condition:")


def Then() -> None:
    """The first side of ``with T.If(c):``.

    Raises:
        TileSyntaxError: another use.
    """
    _by_itself("Then()", "if condition:")


def Else() -> None:
    """The other side of ``with T.If(c):``.

    Raises:
        TileSyntaxError: another use.
    """
    _by_itself("Else()", "if condition:")


def _by_itself(word: str, hint: str) -> None:
    loop = word.startswith("While")
    raise TileSyntaxError(
        f"T.{word} by itself",
        loc=source.current(),
        expected="with T.While(condition): in a kernel or a T.macro"
        if loop
        else "in a kernel or a T.macro, with T.If(condition): around with T.Then(): and with T.Else():",
        hint=hint,
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


def thread_return() -> None:
    """``return`` of the kernel, as a word: the block, or what of it comes here, leaves out the rest. Unlike
    ``return`` it may stand in a macro.

    Raises:
        TileSyntaxError: outside T.Kernel; in T.Parallel and its like, or in a T.Scale below the block.
    """
    from tilescale.compiler.frontend.hooks import Hooks

    b = bld.current()
    if b.launch is None:
        raise TileSyntaxError(
            "T.thread_return outside T.Kernel",
            loc=source.current(),
            expected="a block that leaves out the rest of the kernel",
            hint="return",
        )
    Hooks.leave(b.frames, "T.thread_return")
