"""What products of several ranks share: their operands' checks, and how they are cut."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import gemm, host
from tilescale.ops.gemm_kernels import ceil_div

#: where K · N · M of a rank's product is less, the two steps are taken apart: kernels for few rows, and for
#: shares of k, are faster than one that overlaps
LITTLE = 1 << 28


class Operands(NamedTuple):
    """x's rows, w as its rows lie in memory, whether those are its columns, the extents, the result's
    dtype."""

    x: torch.Tensor
    w: torch.Tensor
    trans_b: bool
    rows: int
    N: int
    K: int
    out: torch.dtype


def checked(
    what: str,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> Operands:
    """The operands of a product.

    Raises:
        TileValueError, TileTypeError: shapes, dtypes or an activation that do not fit.
    """
    if x.dim() != 2:
        raise TileValueError(f"x of {what} has {x.dim()} axes", expected="a matrix")
    w, trans_b = host.matrix(w, f"w of {what}")
    (rows, K), (K2, N) = x.shape, (w.shape[::-1] if trans_b else w.shape)
    if K != K2:
        raise TileValueError(f"{what} of ({rows}, {K}) by ({K2}, {N})", expected="x (m, K), w (K, N)")
    if x.dtype != w.dtype or host.dtype_name(x) not in gemm.DTYPES:
        raise TileTypeError(
            f"{what} of {host.dtype_name(x)} by {host.dtype_name(w)}",
            expected="one of " + ", ".join(gemm.DTYPES) + " for both",
        )
    if activation not in gemm.ACTIVATIONS:
        raise TileValueError(
            f"activation={activation!r}", expected=", ".join(repr(a) for a in gemm.ACTIVATIONS)
        )
    kind = out.dtype if out is not None and out_dtype is None else out_dtype or x.dtype
    if kind not in (x.dtype, torch.float32):
        raise TileTypeError(f"a result of {kind}", expected=f"{x.dtype} or torch.float32")
    if bias is not None and (tuple(bias.shape) != (N,) or bias.dtype != kind):
        raise TileValueError(f"bias is {tuple(bias.shape)} of {bias.dtype}", expected=f"({N},) of {kind}")
    if 0 in (N, K):
        raise TileValueError(f"{what} of ({rows}, {K}) by ({K}, {N})", expected="N and K of 1 at least")
    return Operands(x.contiguous(), w, trans_b, rows, N, K, kind)


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(1, dtype=dtype, device=device)


def biased(bias: torch.Tensor | None, c: torch.Tensor) -> torch.Tensor:
    """The bias, or a number that a kernel without one takes in its place and does not read."""
    return _nothing(c.dtype, c.device) if bias is None else bias


def tiles(M: int, N: int, K: int, dtype: str, units: int) -> dict[str, Any]:
    """Tiles for M × N that stay on ``units`` multiprocessors: those that take the least time in whole waves,
    by what one GPU was measured with (`gemm.TILES`)."""
    if dtype == "float32":
        cut = {"BM": 64, "BN": 64, "BK": 32, "stages": 3, "threads": 128}
    else:
        found = []
        for (BM, BN), (step, threads, stages) in gemm.TILES.items():
            waves = ceil_div(ceil_div(M, BM) * ceil_div(N, BN), units)
            cut = {"BM": BM, "BN": BN, "BK": 64, "stages": stages, "threads": threads}
            found.append((waves * step, -BN, cut))
        cut = min(found, key=lambda f: f[:2])[2]
    blocks = min(units, ceil_div(M, cut["BM"]) * ceil_div(N, cut["BN"]))
    return {**cut, "blocks": blocks}


def worthwhile(M: int, N: int, K: int) -> bool:
    """Whether so much is computed that one kernel for both steps may pay."""
    return M >= 128 and M * N * K >= LITTLE
