"""What an author fixes of a T.Parallel nest: which thread runs which iteration. ``loop_layout=`` stands on
the nest's outermost loop as text, which every pass that rebuilds the loop carries on with its other
annotations."""

from __future__ import annotations

import functools
import json
from typing import Any

from tilescale.compiler.layout.fragment import Fragment
from tilescale.compiler.layout.match import Loop
from tilescale.compiler.layout.pieces import Piece


def written(fragment: Fragment) -> str:
    """A fragment as text."""
    pieces = [[p.axis, p.unit, p.extent, p.to, p.stride] for p in fragment.pieces]
    return json.dumps([list(fragment.shape), pieces, fragment.threads, fragment.first_thread])


@functools.lru_cache(maxsize=64)
def read(text: str) -> Fragment:
    """The fragment that `written` wrote."""
    shape, pieces, threads, first_thread = json.loads(text)
    return Fragment(tuple(shape), tuple(Piece(*p) for p in pieces), threads, first_thread)


def loop_of(nest: Any) -> Loop | None:
    """The loop that the author asks for; None where the compiler is free."""
    if not nest.layout:
        return None
    return Loop(tuple(nest.vars), tuple(nest.extents), read(nest.layout), tuple(0 for _ in nest.vars))


def longer(text: str, axis: int, count: int) -> str:
    """The layout of a nest whose iterations become ``count`` neighbours each along ``axis``, which stay where
    the iteration was."""
    old = read(text)
    pieces = [
        Piece(
            p.axis,
            p.unit * (count if p.axis == axis else 1),
            p.extent,
            p.to,
            p.stride * (count if p.to == "slot" else 1),
        )
        for p in old.pieces
    ]
    shape = tuple(e * (count if k == axis else 1) for k, e in enumerate(old.shape))
    return written(
        Fragment(shape, (Piece(axis, 1, count, "slot", 1), *pieces), old.threads, old.first_thread)
    )
