"""``T.put``: one number into a peer's memory, as ``T.copy`` of one element from a tile that holds it."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder.values import Buffer, Region, convert
from tilescale.compiler.ir import source
from tilescale.compiler.ops.base import element, is_tile, of_iterations
from tilescale.errors import TileSyntaxError, TileTypeError


def put(
    value: Any,
    target: Any,
    dst: Any = None,
    signal: Any = None,
    signal_value: Any = None,
    signal_op: str | None = None,
) -> None:
    """Stores a number in an element of rank ``dst``'s memory, once for each executor: ``T.put(count,
    sizes[rank], dst=r, signal=s[0])``.

    Args:
        value: a number, converted to the element's dtype. target: one element of a ``T.SymmTensor`` (of
            shared memory in a cluster).
        dst: the rank (block, inside ``T.Scale("cta_cluster")``) that owns the element. signal, signal_value,
        signal_op: a counter of that rank, signalled when the number is there, as in ``T.copy``.

    Raises:
        TileTypeError: a tile for the number, or more than one element. TileSyntaxError: no rank, or an
        iteration of T.Parallel.
    """
    from tilescale.compiler.ops.alloc import alloc_fragment
    from tilescale.compiler.ops.copy import copy

    loc = source.current()
    if isinstance(value, (Buffer, Region)):
        raise TileTypeError(
            "T.put of a tile", loc=loc, expected="a number", hint="T.copy(tile, A[i], dst=rank)"
        )
    if not is_tile(target):
        raise TileTypeError(f"T.put into {target!r}", loc=loc, expected="an element A[i] of a T.SymmTensor")
    if dst is None:
        raise TileSyntaxError(
            "T.put without dst=",
            loc=loc,
            expected="the rank whose memory it is",
            hint="A[i] = value in the own memory",
        )
    if loop := of_iterations():
        raise TileSyntaxError(
            f"T.put in {loop}",
            loc=loc,
            hint="a tile of the numbers, and T.copy(tile, A[i], dst=rank) behind the loop",
        )
    if signal is None and (signal_value is not None or signal_op is not None):
        word = "signal_value" if signal_value is not None else "signal_op"
        raise TileSyntaxError(
            f"{word}= of T.put without signal=", loc=loc, hint=f"T.put(…, dst=rank, signal=s[i], {word}=…)"
        )
    to = element(target, "the target of T.put")
    held = alloc_fragment((1,), to.dtype)
    held.store((0,), convert(value, to.dtype))
    copy(
        held,
        Region(to.buffer, to.mins, to.extents, (*[True] * (len(to.extents) - 1), False)),
        dst=dst,
        signal=signal,
        value=signal_value,
        signal_op=signal_op,
    )
