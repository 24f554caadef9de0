"""Loops that LLVM must not make vectors of.

In a loop whose index is a remainder by a power of two beside a term that a loop around it changes,

    for i in range(128): total[i] += s[k % 2 * 128 + (i + 1) % 128]

LLVM 22 loads neighbours as if the remainder were not there: it takes (i + 1) & 127 for a counter of 7 bits
that does not wrap, and its check for that is lost. Such loops stay scalar: whoever compiles a function that
has one asks LLVM for no vectors of its own. Ours are explicit, and not concerned.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.tvm_compat import ir, structural_walk, tirx

LOOPS = (tirx.For, tirx.While)
#: expressions that keep the low bits of a number, or leave some behind
CUTS = (tirx.FloorMod, tirx.Mod, tirx.BitwiseAnd, tirx.RShift)


def has_masked_loop(func: Any) -> bool:
    """Whether an innermost serial loop of a function cuts a number down that its rounds may change."""
    found: list[Any] = []

    def loop(f: Any) -> None:
        inner: list[Any] = []
        structural_walk(f.body, (LOOPS, inner.append))
        scalar = isinstance(f, tirx.While) or f.kind == tirx.ForKind.SERIAL
        if scalar and not inner and _cuts(f):
            found.append(f)

    structural_walk(func.body, (LOOPS, loop))
    return bool(found)


def _cuts(loop: Any) -> bool:
    """Its rounds' names and what memory holds may be another number in each."""
    own: set[Any] = {loop.loop_var} if isinstance(loop, tirx.For) else set()
    structural_walk(loop.body, (tirx.Bind, lambda s: own.add(s.var)))
    changes: list[Any] = []

    def changing(e: Any) -> None:
        structural_walk(e, (ir.Var, lambda v: changes.append(v) if v in own else None))
        structural_walk(e, (ir.TensorLoad, changes.append))

    def cast(e: Any) -> None:
        if _bits(e) and 0 < _bits(e) < _bits(e.value):
            changing(e.value)

    structural_walk(loop.body, (CUTS, lambda e: changing(e)))
    structural_walk(loop.body, (tirx.Cast, cast))
    return bool(changes)


def _bits(e: Any) -> int:
    """Of an integer; 0 of any other number."""
    name = str(e.ty).removeprefix("u")
    return int(name[3:]) if name.startswith("int") and name[3:].isdigit() else 0
