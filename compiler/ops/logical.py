"""``T.any_of`` and ``T.all_of``: whether one element of a tile, or each, is not zero; of several conditions,
whether one holds, or all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.values import Buffer, Region, binary, truth
from tilescale.compiler.ir import source
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ops import alloc, loops
from tilescale.compiler.ops.base import of_iterations, region, show
from tilescale.compiler.ops.choices import chain
from tilescale.compiler.ops.math import if_then_else
from tilescale.compiler.ops.reduce import fold_tile
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import TileSyntaxError, TileTypeError

#: So many elements are read in one expression, which is a value anywhere, also in a `while` and around copies
#: that run ahead. More of them are read in a loop in front of the statement.
IN_ONE_EXPRESSION = 32


def any_of(*conditions: Any) -> Any:
    """Whether one of the conditions holds. A tile or a part of it (``A[i, :]``) stands for its elements,
    which hold where they are not zero.

    Raises:
        TileTypeError: counters of a signal; a part of a fragment whose extents are not constants.
        TileSyntaxError: a part of a fragment in T.Parallel or T.vectorized.
    """
    return chain(tuple(_condition(c, "any_of") for c in conditions), tirx.Or, stop_on=True)


def all_of(*conditions: Any) -> Any:
    """Whether all conditions hold. A tile or a part of it (``A[i, :]``) stands for its elements, which hold
    where they are not zero.

    Raises:
        TileTypeError, TileSyntaxError: as of :func:`any_of`.
    """
    return chain(tuple(_condition(c, "all_of") for c in conditions), tirx.And, stop_on=False)


def _condition(value: Any, word: str) -> Callable[[], Any]:
    return lambda: _of_tile(value, word) if isinstance(value, (Buffer, Region)) else value


def _of_tile(tile: Any, word: str) -> Any:
    of = region(tile, f"the tile of T.{word}")
    if of.buffer.kind == "signal":
        raise TileTypeError(
            f"T.{word} of {of.name}, which is a signal",
            loc=source.current(),
            hint=f"T.wait({of.name}[i], value=…) for each counter",
        )
    if of.buffer.scope.startswith("local.fragment"):
        return _of_fragment(of, word)
    join = tirx.Or if word == "any_of" else tirx.And
    counts = [constant(e) for e in of.shape]
    known = [c for c in counts if c is not None]
    if len(known) == len(counts) and prod(known) <= IN_ONE_EXPRESSION:
        return functools.reduce(join, [truth(_element(of, at)) for at in product(*map(range, known))])
    found = alloc.alloc_var("bool", word == "all_of")
    bld.current().give_name(found.buffer, word)
    for at in loops.grid(*of.shape).trace(()):
        found.store(join(found.load(), truth(_element(of, at if isinstance(at, tuple) else (at,)))))
    return found.load()


def _of_fragment(of: Region, word: str) -> Any:
    """A fragment lies spread over threads: one and zero for each element, reduced along one axis after the
    other."""
    loc = source.current()
    if loop := of_iterations():
        raise TileSyntaxError(
            f"T.{word} of a fragment in {loop}, whose iterations are of elements: one thread runs each",
            loc=loc,
            expected="single elements",
            hint=f"T.{word}({of.name}…) in front of the loop, or a tile of T.alloc_shared",
        )
    shape = [constant(e) for e in of.shape]
    if any(e is None for e in shape):
        raise TileTypeError(
            f"T.{word} of a part of {of.name} of shape {show(of.shape)}, which lies in registers", loc=loc,
            expected="constant extents", hint=f"T.{word} of all of {of.name}, with the rest filled",
        )  # fmt: skip
    flags = bld.current().give_name(alloc.alloc_fragment(tuple(shape) or (1,), "int32"), word)
    for at in loops.Parallel(*flags.shape).trace(()):
        index = at if isinstance(at, tuple) else (at,)
        flags[index] = if_then_else(truth(_element(of, index[: len(shape)])), 1, 0)
    while flags.shape != (1,):
        left = bld.current().give_name(alloc.alloc_fragment(flags.shape[:-1] or (1,), "int32"), word)
        fold_tile(flags, left, "max" if word == "any_of" else "min")
        flags = left
    return truth(flags[0])


def _element(of: Region, at: tuple[Any, ...]) -> Any:
    """The element of a region at indices along the axes that it has."""
    left = iter(at)
    return of.buffer[
        tuple(
            low if dropped else binary("+", low, next(left))
            for low, dropped in zip(of.mins, of.dropped, strict=True)
        )
    ]
