"""``gated_activation(h)``: the gate of a gated layer (Shazeer, "GLU Variants Improve Transformer", 2020).
Rows have the gate's columns first, then those that it scales: ``y = act(h[:, :n]) · h[:, n:]``.

How many rows count may be known on the device alone (``sizes``, as `grouped_matmul` takes them): blocks stay
and walk over those that do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import tilescale.language as T
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import host
from tilescale.ops.activations import GATES, IN_TORCH, RUN, activated, is_short
from tilescale.ops.case import Case, Expected, Op, expected, generator, normal
from tilescale.ops.gemm_kernels import ceil_div
from tilescale.ops.rows import BYTES, error

DTYPES = ("bfloat16", "float16", "float32", "float64")
#: elements of a block's tile, of a row of it at most, threads
TILE, THREADS = 2048, 256


# ---- the kernels


def cut(n: int) -> tuple[int, int, int]:
    """Rows and columns of a block's tile, in whole vectors of eight, and how many tiles have a row."""
    wide = ceil_div(n, TILE)
    width = ceil_div(ceil_div(n, wide), 8) * 8
    return max(1, TILE // width), width, ceil_div(n, width)


def walk(n: int, blocks: int, tile: Any) -> Any:
    """A macro: ``tile(tensors, row, column, stop)`` for each tile of the rows that ``sizes`` (groups,) add up
    to, or of ``m`` where there are no groups. ``stop``: None where all rows of the tile count."""
    rows, width, wide = cut(n)

    @T.macro
    def walked(tensors, sizes, m):
        with T.Kernel(blocks, threads=THREADS) as block:
            stop = T.alloc_var("int32", T.if_then_else(sizes.shape[0] > 0, 0, m))
            for g in T.serial(sizes.shape[0]):
                stop = stop + sizes[g]
            for t in T.serial(block, T.ceildiv(stop, rows) * wide, step=blocks):
                if t // wide * rows + rows <= stop:
                    tile(tensors, t // wide * rows, t % wide * width, None)
                else:
                    tile(tensors, t // wide * rows, t % wide * width, stop)

    return walked


def gate(n: int, activation: str, dtype: str, blocks: int) -> Any:
    """Y (m, n) of H (m, 2, n), computed in float32 (float64 of float64): of the rows that sizes (groups,) add
    up to, others stay as they are; of all where there are no groups."""
    m, groups, acc = T.dynamic("m"), T.dynamic("groups"), "float64" if dtype == "float64" else "float32"
    rows, width, _ = cut(n)

    @T.macro
    def tile(tensors, row, column, stop):
        H, Y = tensors
        for i, j in T.Parallel(rows, width):
            if stop is None or row + i < stop:
                x, u = T.cast(H[row + i, 0, column + j], acc), T.cast(H[row + i, 1, column + j], acc)
                Y[row + i, column + j] = T.cast(activated(x, activation, is_short(dtype)) * u, dtype)

    walked = walk(n, blocks, tile)

    @T.prim_func
    def gated_activation(
        H: T.Tensor((m, 2, n), dtype), sizes: T.Tensor((groups,), "int32"), Y: T.Tensor((m, n), dtype)
    ):
        walked((H, Y), sizes, m)

    return gated_activation


# ---- what people call


@functools.cache
def no_sizes(device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.int32, device=device)


def launch(
    factory: Callable[..., Any],
    given: tuple[torch.Tensor, ...],
    activation: str,
    sizes: torch.Tensor | None,
    made: torch.Tensor,
) -> torch.Tensor:
    m, n = made.shape[0], given[-1].shape[1] // 2
    if m * n:
        device = made.device
        blocks = 8 * host.multiprocessors(device)
        sizes = no_sizes(device) if sizes is None else sizes
        args = (*(t.view(m, -1, n) if t.shape[1] > n else t for t in given), sizes)
        args = (*args, made.view(m, -1, n) if made.shape[1] > n else made)
        host.launch(factory, args, n=n, activation=activation, dtype=host.dtype_name(made), blocks=blocks)
    return made


def check(what: str, h: torch.Tensor, activation: str, sizes: torch.Tensor | None) -> None:
    if activation not in GATES:
        raise TileValueError(f"activation={activation!r}", expected=", ".join(repr(x) for x in GATES))
    if host.dtype_name(h) not in DTYPES:
        raise TileTypeError(f"{what} of {host.dtype_name(h)}", expected="one of " + ", ".join(DTYPES))
    if h.dim() != 2 or h.shape[1] % 2 or not h.is_contiguous():
        lies = "" if h.is_contiguous() else ", not contiguous"
        raise TileValueError(f"{what} of {tuple(h.shape)}{lies}", expected="(m, 2n), contiguous")
    if sizes is not None and (sizes.dim() != 1 or not len(sizes) or sizes.dtype != torch.int32):
        raise TileValueError(
            f"sizes is {tuple(sizes.shape)} of {host.dtype_name(sizes)}", expected="(groups,) of int32"
        )


def gated_columns(c: torch.Tensor, gate: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """act(gate) · up (M, N / 2) of a product c (M, N) whose columns come in turn, `RUN` of each; contiguous,
    as ``out`` is, which takes it."""
    y = host.result(out, (c.shape[0], c.shape[1] // 2), c.dtype, c)
    gated_activation(c.view(-1, 2 * RUN), gate, out=y.view(-1, RUN))
    return y


@host.checked
def gated_activation(
    h: torch.Tensor,
    activation: str = "silu",
    *,
    sizes: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """act(h[:, :n]) · h[:, n:], computed in float32 (float64 of float64) and rounded once.

    Args:
        h: (m, 2n), contiguous, of bfloat16, float16, float32 or float64.
        activation: "silu", "gelu" (by erf) or "relu".
        sizes: (groups,) of int32, contiguous, on the same device, which the host never looks at: only so many
            rows count as they add up to, m at most. Others stay as they are.
        out: (m, n), contiguous, takes the result; without it rows that do not count are undefined.

    Raises:
        TileValueError, TileTypeError: shapes, dtypes or words that do not fit.
    """
    check("gated_activation", h, activation, sizes)
    y = host.result(out, (h.shape[0], h.shape[1] // 2), h.dtype, h)
    return launch(gate, (h,), activation, sizes, y)


# ---- what is right, and what it is measured against


def draw(
    m: int,
    n: int,
    dtype: str = "bfloat16",
    activation: str = "silu",
    sizes: tuple[int, ...] = (),
    device: Any = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Normal random rows, all of which count."""
    made: dict[str, Any] = {
        "h": normal((m, 2 * n), dtype, generator(device, seed), 2.0),
        "activation": activation,
    }
    if sizes:
        made["sizes"] = torch.tensor(sizes, dtype=torch.int32, device=device)
    return made


def reference(h: torch.Tensor, activation: str, sizes: torch.Tensor | None = None) -> tuple[Expected, ...]:
    """In float64. exp and erf are off by a few roundings of what they are computed in."""
    x, u = h.double().chunk(2, 1)
    y = IN_TORCH[activation](x) * u
    return (expected(y, h.dtype, noise=(x * u).abs() * error(h.dtype) * 16),)


def in_turns(product: Expected, gate: str, dtype: torch.dtype) -> Expected:
    """What a gate leaves of a product whose columns come in turn, `RUN` of each; what the product may be off
    it passes on by its slope, which is 1.13 at most."""
    (x, u), (nx, nu) = (t.unflatten(1, (-1, 2, RUN)).unbind(2) for t in (product.value, product.allowed))
    y = IN_TORCH[gate](x)
    noise = 1.13 * nx * (u.abs() + nu) + y.abs() * nu + (x * u).abs() * 2.0**-20
    return expected((y * u).flatten(1), dtype, noise=noise.flatten(1))


def in_torch(h: torch.Tensor, activation: str, sizes: torch.Tensor | None = None) -> Callable[[], Any]:
    def call() -> torch.Tensor:
        x, u = h.chunk(2, 1)
        return IN_TORCH[activation](x) * u

    return call


def cases(every: bool = True) -> tuple[Case, ...]:
    """Those of the gradients too, which have fewer pairs of dtype and gate."""
    small: list[dict[str, Any]] = [
        {"m": 7, "n": 24, "dtype": d, "activation": a}
        for k, d in enumerate(DTYPES)
        for a in (GATES if every else (GATES[k % len(GATES)],))
    ] + [
        {"m": 3, "n": 33},
        {"m": 2, "n": 1100, "dtype": "float16"},
        {"m": 90, "n": 8, "sizes": (5, 0, 70, 15)},
        {"m": 90, "n": 1030, "sizes": (0, 90), "dtype": "float32"},
    ]
    gpu: list[dict[str, Any]] = [{"m": m, "n": n} for m, n in ((1000, 1001), (333, 4096), (1, 20000))]
    gpu += [{"m": 3000, "n": 2048, "sizes": (150,) * 20}]
    return (
        *(Case(s, small=True) for s in small),
        *(Case(s) for s in gpu),
        *(Case({"m": m, "n": n}, bar=1.0) for m, n in ((32768, 2048), (8192, 14336), (4096, 4096))),
    )


OP = Op(
    name="gated_activation",
    run=gated_activation,
    draw=draw,
    reference=reference,
    cases=cases(),
    peers={"torch": in_torch},
    moved=lambda m, n, dtype="bfloat16", **_: 3.0 * m * n * BYTES[dtype],
)
