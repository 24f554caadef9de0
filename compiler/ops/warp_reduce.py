"""A value of all lanes of a warp, on each of them: five exchanges, each with the lane whose number differs in
one bit. Every lane adds the same numbers in the same order, so all have the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.values import as_expr, binary, dtype_of
from tilescale.compiler.ir import source
from tilescale.compiler.ir.scales import WARP
from tilescale.compiler.ops import math
from tilescale.compiler.ops.alloc import alloc_var
from tilescale.compiler.ops.mma_sync import whole_warps
from tilescale.compiler.ops.reducer import require_apart
from tilescale.compiler.ops.shuffle import shfl_xor
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import TileTypeError


def warp_reduce_sum(value: Any) -> Any:
    """The sum over the warp's lanes, each step rounded to the value's dtype; of integers modulo 2 ** bits.

    Raises:
        TileTypeError: no number. TileValueError: fewer lanes than a warp has. TileSyntaxError: outside a
        thread's code, or in T.Parallel.
    """
    dtype = str(_numbers("T.warp_reduce_sum", value))
    if not dtype.startswith("int"):
        return _reduced("T.warp_reduce_sum", value, lambda a, b: binary("+", a, b))
    wide = f"u{dtype}"  # whose sums may go round
    made = _reduced(
        "T.warp_reduce_sum", math.reinterpret(as_expr(value), wide), lambda a, b: binary("+", a, b)
    )
    return tirx.reinterpret(dtype, made)


def warp_reduce_max(value: Any) -> Any:
    """The greatest of the warp's lanes, as `T.max` has it. As :func:`warp_reduce_sum`."""
    _numbers("T.warp_reduce_max", value)
    return _reduced("T.warp_reduce_max", value, math.max)


def warp_reduce_min(value: Any) -> Any:
    """The least of the warp's lanes, as `T.min` has it. As :func:`warp_reduce_sum`."""
    _numbers("T.warp_reduce_min", value)
    return _reduced("T.warp_reduce_min", value, math.min)


def warp_reduce_bitand(value: Any) -> Any:
    """The bits that are set on all of the warp's lanes; of integers and conditions. As
    :func:`warp_reduce_sum`."""
    return _bits("T.warp_reduce_bitand", value, "&")


def warp_reduce_bitor(value: Any) -> Any:
    """The bits that are set on one of the warp's lanes or more. As :func:`warp_reduce_bitand`."""
    return _bits("T.warp_reduce_bitor", value, "|")


def _numbers(what: str, value: Any) -> Any:
    dtype = dtype_of(value)
    if str(dtype) == "bool":
        raise TileTypeError(
            f"{what} of conditions", loc=source.current(), expected="numbers",
            hint="T.any_sync, T.all_sync, or T.popcount of T.ballot_sync",
        )  # fmt: skip
    return dtype


def _bits(what: str, value: Any, op: str) -> Any:
    dtype = str(dtype_of(value))
    if dtype != "bool" and "int" not in dtype:
        raise TileTypeError(f"{what} of {dtype}", loc=source.current(), expected="an integer or a condition")
    return _reduced(what, value, lambda a, b: binary(op, a, b))


def _reduced(what: str, value: Any, op: Callable[[Any, Any], Any]) -> Any:
    whole_warps(what)
    require_apart(what, value)
    held = alloc_var(dtype_of(value), value)
    bld.current().give_name(held.buffer, "reduced")
    lanes = WARP // 2
    while lanes:
        there = shfl_xor(held.load(), lanes)
        held.store(op(held.load(), there))
        lanes //= 2
    return held.load()
