"""Products of several ranks of 8-bit floats with scales: `fp8_matmul` and a collective, one after the other.
What crosses in front of a product is 8 bits wide; parts of sums have the result's dtype. No kernel has both
steps yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilescale.comm.backend import Team
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import fp8_gemm, host
from tilescale.ops.activations import ACTIVATIONS
from tilescale.ops.case import Expected, generator, normal
from tilescale.ops.gemm_kernels import ceil_div
from tilescale.ops.ranks.gather import all_gather
from tilescale.ops.ranks.gather import by_library as gathering
from tilescale.ops.ranks.groups import Group, total


def asked(
    x: torch.Tensor, scale_x: torch.Tensor | None, scale_w: torch.Tensor | None, config: Any, what: str
) -> bool:
    """Whether a call's operands are of 8 bits.

    Raises:
        TileTypeError, TileValueError: scales without them, or they without scales; a Config for them; an x
        that is no matrix.
    """
    small = host.dtype_name(x) in fp8_gemm.FLOAT8
    if small != (scale_x is not None) or small != (scale_w is not None):
        raise TileTypeError(
            f"{what} of {host.dtype_name(x)} {'without' if small else 'with'} scales",
            expected="scale_x and scale_w with 8-bit floats, and with nothing else",
        )
    if small and config is not None:
        raise TileTypeError(
            f"config= of {what} of {host.dtype_name(x)}",
            expected="none: the product and what moves its rows are apart there",
        )
    if small and x.dim() != 2:
        raise TileValueError(f"x of {what} has {x.dim()} axes", expected="a matrix")
    return small


def gathered(
    x: torch.Tensor,
    w: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    team: Team,
    group: Group,
    rows: int | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """concat(x of all ranks) · w with their scales; scales of x's blocks are gathered, too."""
    if bias is not None or activation:
        raise TileValueError(
            "bias or activation of a product of 8-bit floats, whose kernel has neither",
            expected="both behind the call",
        )
    M = total(rows, x.shape[0], team, "x")
    if M == 0:
        return host.result(out, (0, w.shape[1]), out_dtype or torch.bfloat16, x)
    whole = all_gather(x.contiguous(), group=group, rows=M)
    if scale_x.numel() > 1 or scale_x.dim() == 2:
        scale_x = all_gather(scale_x.contiguous(), group=group, rows=M)
    made: torch.Tensor = fp8_gemm.fp8_matmul(whole, w, scale_x, scale_w, out=out, out_dtype=out_dtype)
    return made


def part(
    x: torch.Tensor,
    w: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """A rank's part of a sum, rounded to the result's dtype.

    Raises:
        TileTypeError, TileValueError: dtypes, a bias or an activation that do not fit.
    """
    kind = out.dtype if out is not None and out_dtype is None else out_dtype or torch.bfloat16
    if str(kind).removeprefix("torch.") not in fp8_gemm.RESULTS:
        raise TileTypeError(f"a result of {kind}", expected=", ".join(fp8_gemm.RESULTS))
    if activation not in ACTIVATIONS:
        raise TileValueError(f"activation={activation!r}", expected=", ".join(map(repr, ACTIVATIONS)))
    if bias is not None and (tuple(bias.shape) != (w.shape[1],) or bias.dtype != kind):
        raise TileValueError(
            f"bias is {tuple(bias.shape)} of {bias.dtype}", expected=f"({w.shape[1]},) of {kind}"
        )
    if x.shape[1] == 0:
        return torch.zeros(x.shape[0], w.shape[1], dtype=kind, device=x.device)
    made: torch.Tensor = fp8_gemm.fp8_matmul(x, w, scale_x, scale_w, out_dtype=kind)
    return made


# ---- what is right, and what it is measured against


def gathered_by_library(
    x: torch.Tensor,
    w: torch.Tensor,
    M: int,
    group: Any,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    **more: Any,
) -> Callable[[], Any]:
    """torch.distributed's all-gather of bytes, and of scales of blocks, then torch._scaled_mm."""
    kind = more.get("out_dtype", torch.bfloat16)
    rows = gathering(x.view(torch.uint8), group, M)
    scales = gathering(scale_x, group, M) if scale_x.dim() == 2 else lambda: scale_x
    return lambda: fp8_gemm.scaled_mm(rows().view(x.dtype), w, scales(), scale_w, kind)()


def draw(
    rows: int, N: int, K: int, scales: str, out: str, device: Any, seed: int, rank: int, common: bool
) -> dict[str, Any]:
    """A rank's operands. ``scales``: "tensor" or "blocks"; ``common``: one number for all ranks' x."""
    g, alike = generator(device, 1000 * seed + rank), generator(device, 1000 * seed + 998)
    steps = ceil_div(K, fp8_gemm.BLOCK)

    def drawn(g: Any, *shape: int) -> torch.Tensor:
        return torch.exp2(torch.rand(shape, generator=g, device=device) * 2 - 1)

    made = {"x": normal((rows, K), fp8_gemm.FLOAT8[0], g), "w": normal((N, K), fp8_gemm.FLOAT8[0], g).T}
    if scales == "blocks":
        made["scale_x"], made["scale_w"] = (
            drawn(g, rows, steps),
            drawn(g, ceil_div(N, fp8_gemm.BLOCK), steps).T,
        )
    else:
        made["scale_x"], made["scale_w"] = drawn(alike if common else g, 1), drawn(g, 1)
    return made | ({"out_dtype": getattr(torch, out)} if out else {})


def reference(a: dict[str, Any], x: torch.Tensor, scale_x: torch.Tensor) -> Expected:
    """A product in float64, rounded to the result's dtype."""
    kind = a.get("out_dtype", torch.bfloat16)
    return fp8_gemm.reference(x, a["w"], scale_x, a["scale_w"], kind)[0]
