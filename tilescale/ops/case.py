"""What tests and benchmarks know of an operation: how to draw its arguments, what is right, which peers it
has, on which shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

#: half the distance between neighbours, relative to the number: what one rounding may be off
ROUNDING = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e5m2: 2.0**-3,
}
#: the smallest normal number, below which roundings are absolute
TINY = {torch.float16: 2.0**-14, torch.float8_e4m3fn: 2.0**-6, torch.float8_e5m2: 2.0**-14}


@dataclass(frozen=True)
class Case:
    """A shape that an operation is tested or measured on.

    Attributes:
        shape: what `Op.draw` takes: extents, dtypes by name, options.
        small: so few elements that the simulator and the CPU run it too.
        bar: a benchmark, and how many times as fast as the first peer it has to be; None: a test.
    """

    shape: Mapping[str, Any]
    small: bool = False
    bar: float | None = None

    def __str__(self) -> str:
        return " ".join(f"{k}={v}" for k, v in self.shape.items())


@dataclass(frozen=True)
class Expected:
    """A result in float64, and by how much each element may differ from it."""

    value: torch.Tensor
    allowed: torch.Tensor


@dataclass(frozen=True)
class Op:
    """An operation with everything that its tests and benchmarks need.

    Attributes:
        run: what people call; takes drawn arguments by name and ``out=``, the tensor (or the tuple of them)
            that takes the results, which it returns; without it allocates them.
        draw: (shape's items by name, device=, seed=) → the arguments, random ones.
        reference: the arguments → the results as `Expected`, in the order of ``run``'s.
        peers: name → from the arguments a call without any, all preparations made. The first is what a case's
        bar speaks of. flops, moved: of one call, from the shape's items: floating-point operations, and bytes
        that memory has to move at least.
        launches: how many kernels a call launches at most (a test counts them).
    """

    name: str
    run: Callable[..., Any]
    draw: Callable[..., dict[str, Any]]
    reference: Callable[..., tuple[Expected, ...]]
    cases: tuple[Case, ...]
    peers: Mapping[str, Callable[..., Callable[[], Any]]] = field(default_factory=dict)
    flops: Callable[..., float] = lambda **_: 0.0
    moved: Callable[..., float] = lambda **_: 0.0


def expected(value: torch.Tensor, dtype: torch.dtype, *, noise: torch.Tensor | float = 0.0) -> Expected:
    """A float64 result that is stored in ``dtype``: rounded once, on top of ``noise``, the absolute error of
    what it is computed from."""
    unit = ROUNDING[dtype]
    allowed = value.abs() * unit * 1.01 + noise * (1 + unit) + TINY.get(dtype, 2.0**-126) * unit
    return Expected(value, torch.as_tensor(allowed))


def summed(magnitude: torch.Tensor, terms: int) -> torch.Tensor:
    """What a sum of ``terms`` numbers in float32 may be off, in any order, from the sum of their magnitudes:
    random roundings add up as their root, of which eight times is never seen; short sums cannot be off by
    more than each of their roundings."""
    return magnitude * (2.0**-24 * min(8 * terms**0.5, terms + 1))


def worst(got: torch.Tensor, want: Expected) -> float:
    """The greatest error, as a multiple of what is allowed; infinite where one is a NaN and the other is
    none."""
    a, b = got.double(), want.value.to(got.device)
    alike = (a == b) | (a.isnan() & b.isnan())
    ratio = torch.where(alike, 0.0, (a - b).abs() / want.allowed.to(got.device))
    return float(torch.where(ratio.isnan(), torch.inf, ratio).max()) if got.numel() else 0.0


def as_tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def copied(results: Any) -> Any:
    """Results that a later call does not touch; it may take them as ``out=``."""
    return tuple(r.clone() for r in results) if isinstance(results, tuple) else results.clone()


def normal(shape: Iterable[int], dtype: str, draw: torch.Generator, scale: float = 1.0) -> torch.Tensor:
    """Normal random numbers on the generator's device, drawn in float32."""
    made = torch.randn(tuple(shape), generator=draw, device=draw.device, dtype=torch.float32)
    return (made * scale if scale != 1 else made).to(getattr(torch, dtype))


def random_like(x: torch.Tensor, *shape: int) -> torch.Tensor:
    """Normal random numbers of x's dtype on its device, for what is timed alone: of ones a product takes less
    power, and so a GPU less time."""
    return torch.randn(shape, device=x.device).to(x.dtype)


def generator(device: Any, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)
