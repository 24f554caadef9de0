"""CUDA's own functions that a kernel calls by name: ``T.call_extern("uint32", "__popc", x)``. Those that the
language has under a name of its own are that, on every target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilescale.compiler.ops import math, shuffle, vote, warp_reduce
from tilescale.compiler.tvm_compat import is_expr

_MASKED: dict[str, Callable[..., Any]] = {
    "__match_any_sync": vote.match_any_sync,
    "__ballot_sync": vote.ballot_sync,
    "__any_sync": vote.any_sync,
    "__all_sync": vote.all_sync,
    "__shfl_sync": shuffle.shfl_sync,
    "__shfl_xor_sync": shuffle.shfl_xor,
    "__shfl_up_sync": shuffle.shfl_up,
    "__shfl_down_sync": shuffle.shfl_down,
}
_REDUCED = {
    "__reduce_add_sync": warp_reduce.warp_reduce_sum,
    "__reduce_max_sync": warp_reduce.warp_reduce_max,
    "__reduce_min_sync": warp_reduce.warp_reduce_min,
    "__reduce_and_sync": warp_reduce.warp_reduce_bitand,
    "__reduce_or_sync": warp_reduce.warp_reduce_bitor,
}
_PLAIN = {
    "__popc": math.popcount, "__popcll": math.popcount, "__clz": math.clz, "__clzll": math.clz,
    "__ldg": getattr(math, "__ldg"), "__expf": getattr(math, "__exp"), "__logf": getattr(math, "__log"),
    "expf": math.exp, "exp2f": math.exp2, "logf": math.log, "log2f": math.log2, "sqrtf": math.sqrt,
    "rsqrtf": math.rsqrt, "tanhf": math.tanh, "powf": math.pow, "fabsf": math.abs, "floorf": math.floor,
    "ceilf": math.ceil, "fmaf": math.ieee_fmaf,
}  # fmt: skip
_BITS = {
    "__float_as_int": "int32", "__float_as_uint": "uint32", "__int_as_float": "float32",
    "__uint_as_float": "float32",
}  # fmt: skip


def _toward_zero(x: Any) -> Any:
    """A float32 as the nearest float16 of no larger magnitude."""
    near = math.cast(x, "float16")
    past = math.abs(math.cast(near, "float32")) > math.abs(x)
    less = math.reinterpret(math.cast(math.reinterpret(near, "uint16") - 1, "uint16"), "float16")
    return math.if_then_else(past, less, near)


def known(name: str, args: list[Any]) -> Callable[..., Any] | None:
    """What a function of CUDA's is in the language for these arguments; None of any other."""
    if name in _MASKED:
        return lambda mask, *rest: _MASKED[name](*rest, mask=mask)
    if name in _REDUCED and args and not is_expr(args[0]) and args[0] in (0xFFFFFFFF, -1):
        return lambda mask, value: _REDUCED[name](value)
    if name in _BITS:
        return lambda value: math.reinterpret(value, _BITS[name])
    if name == "__float2half_rz":
        return _toward_zero
    return _PLAIN.get(name)
