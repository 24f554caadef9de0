"""Symbols that stand in no parameter's shape by themselves, ``n`` of ``T.Tensor((n + 1,), …)``: the launcher
reads extents, so the extent gets a name of its own, and the symbol is what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import lcm
from typing import Any

from tilescale.language.annotations import TensorSpec
from tilescale.language.dtypes import Narrow
from tilescale.language.symbolic import Const, Sym, SymExpr, linear, replaced, settle


@dataclass
class Solved:
    """Attributes:
    symbols: name → the expression that it is. extents: (parameter, axis) → the name of that extent. strides:
        the same of strides.
    """

    symbols: dict[str, Any] = field(default_factory=dict)
    extents: dict[tuple[str, int], Sym] = field(default_factory=dict)
    strides: dict[tuple[str, int], Sym] = field(default_factory=dict)

    def spec(self, name: str, spec: Any) -> Any:
        """A parameter's declaration by what was solved."""
        if not self.symbols or not isinstance(spec, TensorSpec):
            return spec
        shape = tuple(
            self.extents.get((name, axis), replaced(e, self.symbols)) for axis, e in enumerate(spec.shape)
        )
        strides = spec.strides
        if strides is not None:
            strides = tuple(
                self.strides.get((name, axis), replaced(s, self.symbols)) for axis, s in enumerate(strides)
            )
        slots = None if spec.slots is None else tuple(replaced(s, self.symbols) for s in spec.slots)
        return replace(spec, shape=shape, strides=strides, slots=slots, declared=spec)


def solve(specs: Mapping[str, Any]) -> Solved:
    """What follows from the extents of parameters. ``n + b`` and ``n * a`` say what n is where nothing has n
    by itself; ``n * a + b`` does not, since the launcher looks at multiples of extents alone."""
    made, tensors = Solved(), {n: s for n, s in specs.items() if isinstance(s, TensorSpec)}
    values = [settle(e) for s in tensors.values() for e in (*s.shape, *(s.strides or ()))]
    alone = {e.name for e in values if isinstance(e, Sym)}
    for name, spec in tensors.items():
        for axis, e in enumerate(spec.shape):
            bytes_of = spec.slots if isinstance(spec.of, Narrow) and axis == len(spec.shape) - 1 else None
            found = linear(bytes_of[axis] if bytes_of is not None else e)
            if found is None or spec.kind == "packets":
                continue
            symbol, factor, offset = found
            known = symbol.name in alone or symbol.name in made.symbols or isinstance(symbol, Const)
            if known or factor < 1 or offset and (factor > 1 or bytes_of is not None):
                continue
            multiple = symbol.multiple_of * factor if not offset else 1
            by = Fraction(factor)
            if bytes_of is not None:  # of numbers, two a byte: their count is even
                by, multiple = by / 2, lcm(multiple, 2) // 2
            extent = made.extents[name, axis] = Sym(f"{name}_{axis}", symbol.dtype, multiple)
            made.symbols[symbol.name] = _divided(extent - offset if offset else extent, by)
        for axis, e in enumerate(spec.strides or ()):  # of numbers, two a byte: half of what its author says
            if not isinstance(spec.of, Narrow) or not isinstance(e, SymExpr) or e.op != "//":
                continue
            symbol = settle(e.args[0])
            if isinstance(symbol, Sym) and symbol.name not in alone and symbol.name not in made.symbols:
                stride = made.strides[name, axis] = Sym(f"{name}_stride_{axis}", symbol.dtype)
                made.symbols[symbol.name] = stride * 2
    return made


def _divided(e: Any, by: Fraction) -> Any:
    """``e / by``, which is whole."""
    whole = e if by.numerator == 1 else e // by.numerator
    return whole if by.denominator == 1 else whole * by.denominator
