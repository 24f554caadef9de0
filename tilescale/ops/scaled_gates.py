"""``scaled_gate_backward(dy, h, scale)``: the gradients of rows ``scale · gated_activation(h)``, and those
rows themselves: what the backward of an expert's second product takes, whose rows count as much as a router
says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilescale.language as T
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import gated, gated_backward, host
from tilescale.ops.activations import IN_TORCH, activated, is_short, slope
from tilescale.ops.case import Case, Expected, Op, expected, generator
from tilescale.ops.gated import THREADS, cut
from tilescale.ops.rows import BYTES, error

# ---- the kernel


def gradients(n: int, activation: str, dtype: str, blocks: int) -> Any:
    """Of rows H (m, 2, n), DY (m, n) and scale (m,), as far as sizes (groups,) add up, or all where there are
    no groups: DH (m, 2, n), Y (m, n), scale times the gated rows, and DS (m,), the sums of DY times them
    without their scale."""
    m, groups, acc = T.dynamic("m"), T.dynamic("groups"), "float64" if dtype == "float64" else "float32"
    rows, width, wide = cut(n)
    numbers = T.Tensor((m,), acc)

    @T.macro
    def tile(DY, H, scale, DH, Y, DS, row, stop):
        told, total = T.alloc_fragment((rows, width), acc), T.alloc_fragment((rows,), acc)
        parts = [T.alloc_fragment((rows, width), acc) for _ in range(3)]  # of the gate, of the rest, of Y
        T.clear(told)
        for t in T.serial(wide):
            at = t * width
            for i, j in T.Parallel(rows, width):
                x, u = T.cast(H[row + i, 0, at + j], acc), T.cast(H[row + i, 1, at + j], acc)
                dy, part = T.cast(DY[row + i, at + j], acc), activated(x, activation, is_short(dtype))
                told[i, j] += dy * part * u
                parts[0][i, j] = dy * scale[row + i] * u * slope(x, activation, is_short(dtype))
                parts[1][i, j] = dy * scale[row + i] * part
                parts[2][i, j] = scale[row + i] * part * u
            for half in range(2):
                for i, j in T.Parallel(rows, width):
                    if stop is None or row + i < stop:
                        DH[row + i, half, at + j] = T.cast(parts[half][i, j], dtype)
            for i, j in T.Parallel(rows, width):
                if stop is None or row + i < stop:
                    Y[row + i, at + j] = T.cast(parts[2][i, j], dtype)
        T.reduce_sum(told, total, dim=1)
        for i in T.Parallel(rows):
            if stop is None or row + i < stop:
                DS[row + i] = total[i]

    @T.prim_func
    def scaled_gate_gradients(
        DY: T.Tensor((m, n), dtype),
        H: T.Tensor((m, 2, n), dtype),
        scale: numbers,
        sizes: T.Tensor((groups,), "int32"),
        DH: T.Tensor((m, 2, n), dtype),
        Y: T.Tensor((m, n), dtype),
        DS: numbers,
    ):
        with T.Kernel(blocks, threads=THREADS) as block:
            stop = T.alloc_var("int32", T.if_then_else(groups > 0, 0, m))
            for g in T.serial(groups):
                stop = stop + sizes[g]
            for r in T.serial(block, T.ceildiv(stop, rows), step=blocks):
                if r * rows + rows <= stop:
                    tile(DY, H, scale, DH, Y, DS, r * rows, None)
                else:
                    tile(DY, H, scale, DH, Y, DS, r * rows, stop)

    return scaled_gate_gradients


# ---- what people call


@host.checked
def scaled_gate_backward(
    dy: torch.Tensor,
    h: torch.Tensor,
    scale: torch.Tensor,
    activation: str = "silu",
    *,
    sizes: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients by h and by scale of ``scale[:, None] · gated_activation(h)``, and these rows.

    Args:
        dy: (m, n), of h's dtype. h: (m, 2n), as `gated_activation` takes it. Both contiguous.
        scale: (m,) of float32, float64 where h is float64.
        activation, sizes: as in `gated_activation`; rows that do not count stay as they are.
        out: takes the results.

    Returns:
        dh (m, 2n); the rows (m, n), rounded once; dscale (m,) of scale's dtype.

    Raises:
        TileValueError, TileTypeError: shapes, dtypes or words that do not fit.
    """
    gated.check("scaled_gate_backward", h, activation, sizes)
    (m, n), kind = (h.shape[0], h.shape[1] // 2), torch.promote_types(h.dtype, torch.float32)
    if tuple(dy.shape) != (m, n) or dy.dtype != h.dtype or not dy.is_contiguous():
        raise TileValueError(
            f"dy is {tuple(dy.shape)} of {host.dtype_name(dy)}",
            expected=f"{(m, n)} of {host.dtype_name(h)}, contiguous",
        )
    if tuple(scale.shape) != (m,) or scale.dtype != kind:
        what = f"scale is {tuple(scale.shape)} of {host.dtype_name(scale)}"
        raise TileTypeError(what, expected=f"{(m,)} of {str(kind).removeprefix('torch.')}")
    to = out or (None, None, None)
    dh = host.result(to[0], tuple(h.shape), h.dtype, h, "dh")
    y = host.result(to[1], (m, n), h.dtype, h, "y")
    ds = host.result(to[2], (m,), kind, h, "dscale")
    if m * n:
        given = gated.no_sizes(h.device) if sizes is None else sizes
        args = (dy, h.view(m, 2, n), scale.contiguous(), given, dh.view(m, 2, n), y, ds)
        blocks = 8 * host.multiprocessors(h.device)
        what_ = {"n": n, "activation": activation, "dtype": host.dtype_name(h), "blocks": blocks}
        host.launch(gradients, args, **what_)
    return dh, y, ds


# ---- what is right, and what it is measured against


def draw(m: int, n: int, device: Any = "cpu", seed: int = 0, **more: Any) -> dict[str, Any]:
    """As `gated_backward.draw`, and scales."""
    made = gated_backward.draw(m, n, device=device, seed=seed, **more)
    kind = torch.promote_types(made["h"].dtype, torch.float32)
    g = generator(device, seed + 2)
    return {**made, "scale": torch.rand(m, generator=g, device=device, dtype=torch.float32).to(kind)}


def reference(
    dy: torch.Tensor,
    h: torch.Tensor,
    scale: torch.Tensor,
    activation: str,
    sizes: torch.Tensor | None = None,
) -> tuple[Expected, ...]:
    """In float64."""
    s = scale.double()[:, None]
    (dh,) = gated_backward.reference((dy.double() * s), h, activation)
    x, u = h.double().chunk(2, 1)
    part, unit, n = IN_TORCH[activation](x) * u, error(h.dtype), dy.shape[1]
    terms = dy.double() * part
    told = terms.abs().sum(1) + (dy.double() * x * u).abs().sum(1)
    noise = told * unit * (24 + min(8 * n**0.5, n + 1))
    return (
        expected(dh.value, h.dtype, noise=dh.allowed - expected(dh.value, h.dtype).allowed),
        expected(part * s, h.dtype, noise=(x * u * s).abs() * unit * 20),
        expected(terms.sum(1), scale.dtype, noise=noise),
    )


def in_torch(
    dy: torch.Tensor, h: torch.Tensor, scale: torch.Tensor, activation: str, sizes: Any = None
) -> Callable[[], Any]:
    """What layers do by torch's operations, one after another."""
    back = gated_backward.IN_TORCH_BACK[activation]

    def call() -> tuple[torch.Tensor, ...]:
        x, u = h.chunk(2, 1)
        part, s = IN_TORCH[activation](x), scale[:, None].to(h.dtype)
        y, d = part * u, dy * s
        return torch.cat([back(d * u, x), d * part], 1), y * s, (y.float() * dy.float()).sum(1)

    return call


OP = Op(
    name="scaled_gate_backward",
    run=scaled_gate_backward,
    draw=draw,
    reference=reference,
    cases=tuple(c for c in gated.cases(every=False) if not c.bar)
    + tuple(Case({"m": m, "n": n}, bar=1.0) for m, n in ((32768, 2048), (8192, 14336))),
    peers={"torch": in_torch},
    moved=lambda m, n, dtype="bfloat16", **_: 6.0 * m * n * BYTES[dtype],
)
