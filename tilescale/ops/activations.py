"""Activations behind products: in kernels, and in torch, by the words that operations take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilescale.language as T
from tilescale.errors import TileValueError

ACTIVATIONS = ("", "relu", "gelu", "silu")
#: those that gate
GATES = tuple(a for a in ACTIVATIONS if a)
#: columns that come in turn where a product's epilogue is a gate: so many of the gate, as many that it
#: scales. A run of 16-bit floats is one vector of 16 bytes
RUN = 8

#: act(x) in torch
IN_TORCH: dict[str, Callable[[Any], Any]] = {
    "": lambda x: x, "relu": torch.relu, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu
}  # fmt: skip


def activated(x: Any, activation: str, quick: bool = False) -> Any:
    """The activation of a number within a kernel: relu, gelu (the exact one, by erf) or silu. ``quick``: by
    the fast exponential and reciprocal, for results that are rounded to 16 bits. They are off by a share of
    2⁻²⁰ where the number is near 16, and by less where it is nearer to 0."""
    if activation == "relu":
        return T.max(x, 0.0)
    if activation == "gelu":
        return 0.5 * x * (1.0 + T.erf(x * 0.7071067811865476))
    if activation == "silu":
        return x * sigmoid(x, True) if quick else x / (1.0 + T.exp(-x))
    return x


def slope(x: Any, activation: str, quick: bool = False) -> Any:
    """The derivative of `activated`."""
    if activation == "relu":
        return T.if_then_else(x > 0, 1.0, 0.0)
    if activation == "gelu":
        bell = 0.3989422804014327 * (T.__exp if quick else T.exp)(-0.5 * x * x)
        return 0.5 * (1.0 + T.erf(x * 0.7071067811865476)) + x * bell
    part = sigmoid(x, quick)
    return part * (1.0 + x * (1.0 - part))


def sigmoid(x: Any, quick: bool) -> Any:
    return T.fast_rcp(1.0 + T.__exp(-x)) if quick else 1.0 / (1.0 + T.exp(-x))


def is_short(dtype: Any) -> bool:
    """Whether results are rounded to 16 bits."""
    return str(dtype) in ("bfloat16", "float16")


def turns_in_torch(c: torch.Tensor, gate: str) -> torch.Tensor:
    """act(gate) · up of a product whose columns come in turn, by torch's operations."""
    x, u = c.unflatten(1, (-1, 2, RUN)).unbind(2)
    made: torch.Tensor = (IN_TORCH[gate](x) * u).flatten(1)
    return made


def check_turns(what: str, N: int, activation: str, gate: str) -> None:
    """Refuses a gate in a product's epilogue that has none.

    Raises:
        TileValueError: columns that do not come in turn, another word, an activation beside it.
    """
    if gate not in GATES or N % (2 * RUN) or activation:
        beside = f", activation={activation!r}" if activation else ""
        raise TileValueError(
            f"{what} of {N} columns, gate={gate!r}{beside}",
            expected=f"a multiple of {2 * RUN} columns, one of {', '.join(map(repr, GATES))}, no activation",
        )
