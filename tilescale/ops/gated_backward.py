"""The gradient of `gated_activation`: what becomes of dy on its way back through the gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilescale.language as T
from tilescale.errors import TileValueError
from tilescale.ops import gated, host
from tilescale.ops.activations import IN_TORCH, activated, is_short, slope
from tilescale.ops.case import Expected, Op, expected, generator, normal
from tilescale.ops.gated import cut, walk
from tilescale.ops.rows import BYTES, error

# ---- the kernel


def gradients(n: int, activation: str, dtype: str, blocks: int) -> Any:
    """DH (m, 2, n) of DY (m, n) and H (m, 2, n), as `gated.gate`."""
    m, groups, acc = T.dynamic("m"), T.dynamic("groups"), "float64" if dtype == "float64" else "float32"
    rows, width, _ = cut(n)

    @T.macro
    def tile(tensors, row, column, stop):
        DY, H, DH = tensors
        parts = [T.alloc_fragment((rows, width), acc) for _ in range(2)]  # of the gate, and of the rest
        for i, j in T.Parallel(rows, width):
            x, u = T.cast(H[row + i, 0, column + j], acc), T.cast(H[row + i, 1, column + j], acc)
            dy = T.cast(DY[row + i, column + j], acc)
            parts[0][i, j] = dy * u * slope(x, activation, is_short(dtype))
            parts[1][i, j] = dy * activated(x, activation, is_short(dtype))
        for half in range(2):
            for i, j in T.Parallel(rows, width):
                if stop is None or row + i < stop:
                    DH[row + i, half, column + j] = T.cast(parts[half][i, j], dtype)

    walked = walk(n, blocks, tile)

    @T.prim_func
    def gated_activation_gradients(
        DY: T.Tensor((m, n), dtype),
        H: T.Tensor((m, 2, n), dtype),
        sizes: T.Tensor((groups,), "int32"),
        DH: T.Tensor((m, 2, n), dtype),
    ):
        walked((DY, H, DH), sizes, m)

    return gated_activation_gradients


# ---- what people call


@host.checked
def gated_activation_backward(
    dy: torch.Tensor,
    h: torch.Tensor,
    activation: str = "silu",
    *,
    sizes: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of `gated_activation` by h, (m, 2n), of dy (m, n), contiguous and of h's dtype. The other
    words are those of `gated_activation`.

    Raises:
        TileValueError, TileTypeError: shapes, dtypes or words that do not fit.
    """
    gated.check("gated_activation_backward", h, activation, sizes)
    if tuple(dy.shape) != (h.shape[0], h.shape[1] // 2) or dy.dtype != h.dtype or not dy.is_contiguous():
        raise TileValueError(
            f"dy is {tuple(dy.shape)} of {host.dtype_name(dy)}",
            expected=f"{(h.shape[0], h.shape[1] // 2)} of {host.dtype_name(h)}, contiguous",
        )
    return gated.launch(gradients, (dy, h), activation, sizes, host.result(out, tuple(h.shape), h.dtype, h))


# ---- what is right, and what it is measured against


def draw(m: int, n: int, device: Any = "cpu", seed: int = 0, **more: Any) -> dict[str, Any]:
    """As `gated.draw`, and dy."""
    made = gated.draw(m, n, device=device, seed=seed, **more)
    return {"dy": normal((m, n), host.dtype_name(made["h"]), generator(device, seed + 1)), **made}


def reference(
    dy: torch.Tensor, h: torch.Tensor, activation: str, sizes: torch.Tensor | None = None
) -> tuple[Expected, ...]:
    """By torch's autograd in float64."""
    a = h.detach().double().clone().requires_grad_()
    x, u = a.chunk(2, 1)
    (dh,) = torch.autograd.grad(IN_TORCH[activation](x) * u, a, dy.double())
    x, u, by = x.detach(), u.detach(), dy.double().abs()
    noise = torch.cat([by * u.abs() * (1 + x.abs()), by * x.abs()], 1) * error(h.dtype) * 16
    return (expected(dh, h.dtype, noise=noise),)


#: the gradient of an activation in torch: (dy, x) → dx
IN_TORCH_BACK: dict[str, Callable[..., torch.Tensor]] = {
    "silu": torch.ops.aten.silu_backward,
    "gelu": torch.ops.aten.gelu_backward,
    "relu": lambda dy, x: torch.ops.aten.threshold_backward(dy, x, 0),
}


def in_torch(
    dy: torch.Tensor, h: torch.Tensor, activation: str, sizes: torch.Tensor | None = None
) -> Callable[[], Any]:
    """What torch's autograd runs, without its bookkeeping, which no graph captures."""
    back = IN_TORCH_BACK[activation]

    def call() -> torch.Tensor:
        x, u = h.chunk(2, 1)
        return torch.cat([back(dy * u, x), dy * IN_TORCH[activation](x)], 1)

    return call


OP = Op(
    name="gated_activation_backward",
    run=gated_activation_backward,
    draw=draw,
    reference=reference,
    cases=gated.cases(every=False),
    peers={"torch": in_torch},
    moved=lambda m, n, dtype="bfloat16", **_: 5.0 * m * n * BYTES[dtype],
)
