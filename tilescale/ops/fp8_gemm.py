"""``fp8_matmul(a, b, scale_a, scale_b)``: products of 8-bit floats that are numbers times a scale, one for a
whole tensor or one a block.

Hopper's tensor cores sum such products with about 13 bits behind the point of the largest of them. Where that
matters the sum of every 128 steps of k is formed by itself and added in float32: so with one scale a block,
where it has to be scaled anyway, and with one a tensor unless ``fast`` is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import tilescale.language as T
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import host
from tilescale.ops.case import Case, Expected, Op, expected, generator, normal, summed
from tilescale.ops.gemm_kernels import ceil_div, panelled

#: steps of k that have a scale of their own, and columns of b
BLOCK = 128
#: numbers of the shortest vector that TMA brings into a ring, and what its first one's column is a multiple
#: of: 128 and 16 bytes
VECTOR, CHUNK = 32, 4
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
RESULTS = ("bfloat16", "float16", "float32")


# ---- kernels


def by_tensor(
    M: int,
    N: int,
    K: int,
    BM: int,
    BN: int,
    parts: int,
    stages: int,
    threads: int,
    panel: int,
    stay: int,
    left: str,
    right: str,
    out: str,
    fast: bool,
) -> Any:
    """C = (A · Bᵀ) · SA · SB: A (M, K), B (N, K), C (M, N) of ``out``, SA and SB one float32 each. ``stay``
    blocks take one tile after another, 0: as many as there are tiles, in panels of ``panel`` rows of tiles. A
    round has ``parts`` sums of 128 steps: one is added while the tensor cores form the next."""
    high, wide = ceil_div(M, BM), ceil_div(N, BN)
    count, deep = min(stay or high * wide, high * wide), parts * BLOCK
    rounds = range(parts)  # sums of a round

    @T.prim_func
    def fp8_gemm(
        A: T.Tensor((M, K), left),
        B: T.Tensor((N, K), right),
        SA: T.Tensor((1,), "float32"),
        SB: T.Tensor((1,), "float32"),
        C: T.Tensor((M, N), out),
    ):
        with T.Kernel(count, threads=threads) as block:
            a, b = (
                [T.alloc_shared((extent, BLOCK), dtype) for _ in rounds]
                for extent, dtype in ((BM, left), (BN, right))
            )
            acc = T.alloc_fragment((BM, BN), "float32")
            part = [acc if fast else T.alloc_fragment((BM, BN), "float32") for _ in range(min(parts, 2))]
            factor = SA[0] * SB[0]
            for tile in T.Persistent(high * wide, count, block):
                by, bx = panelled(tile, high, wide, panel)
                T.clear(acc)
                for k in T.Pipelined(T.ceildiv(K, deep), num_stages=stages):
                    for p in rounds:
                        T.copy(A[by * BM, k * deep + p * BLOCK], a[p])
                        T.copy(B[bx * BN, k * deep + p * BLOCK], b[p])
                        T.gemm(a[p], b[p], part[p % len(part)], transpose_B=True, clear_accum=not fast)
                        for q in [] if fast else added(p, parts):
                            for i, j in T.Parallel(BM, BN):
                                acc[i, j] += part[q % len(part)][i, j]
                for i, j in T.Parallel(BM, BN):
                    acc[i, j] *= factor
                T.copy(acc, C[by * BM, bx * BN])

    return fp8_gemm


def by_block(
    M: int,
    N: int,
    K: int,
    BM: int,
    BN: int,
    parts: int,
    stages: int,
    threads: int,
    panel: int,
    stay: int,
    left: str,
    right: str,
    out: str,
) -> Any:
    """C = the sum over blocks of k of (A · Bᵀ) · SA · SB: A (M, K) with a scale for each row and 128 steps of
    k, SA (K / 128, M); B (N, K) with one for 128 rows and 128 steps, SB (N / 128, K / 128). The rows of SA
    and SB are some numbers longer where TMA wants that. A tile of BN columns, 64, 128 or 192, has columns of
    two blocks at most. The rest is as in `by_tensor`. Scales come with the operands that they are of, as
    vectors of TMA's: those of the tile's rows, and of b's block the one of this step among its neighbours."""
    steps, groups = ceil_div(K, BLOCK), ceil_div(N, BLOCK)
    high, wide = ceil_div(M, BM), ceil_div(N, BN)
    count, deep = min(stay or high * wide, high * wide), parts * BLOCK
    # Blocks of b that a tile's columns are of; sums of a round.
    sides, rounds = (
        range(ceil_div(BN, BLOCK)),
        range(parts),
    )

    @T.prim_func
    def fp8_gemm_blocks(
        A: T.Tensor((M, K), left),
        B: T.Tensor((N, K), right),
        SA: T.Tensor((steps, whole_chunks(M)), "float32"),
        SB: T.Tensor((groups, whole_chunks(steps)), "float32"),
        C: T.Tensor((M, N), out),
    ):
        with T.Kernel(count, threads=threads) as block:
            a, b = (
                [T.alloc_shared((extent, BLOCK), dtype) for _ in rounds]
                for extent, dtype in ((BM, left), (BN, right))
            )
            sa = [T.alloc_shared((BM,), "float32") for _ in rounds]
            sb = [[T.alloc_shared((VECTOR,), "float32") for _ in sides] for _ in rounds]
            acc, part = (
                T.alloc_fragment((BM, BN), "float32"),
                [T.alloc_fragment((BM, BN), "float32") for _ in range(min(parts, 2))],
            )
            row = [T.alloc_fragment((BM,), "float32") for _ in rounds]
            column = [[T.alloc_fragment((1,), "float32") for _ in sides] for _ in rounds]
            for tile in T.Persistent(high * wide, count, block):
                by, bx = panelled(tile, high, wide, panel)
                group = bx * BN // BLOCK
                edge = (
                    (group + 1) * BLOCK - bx * BN
                ) // 64  # blocks of b begin at multiples of 64 columns of a tile
                T.clear(acc)
                for k in T.Pipelined(T.ceildiv(K, deep), num_stages=stages):
                    for p in rounds:
                        at = k * parts + p
                        T.copy(A[by * BM, at * BLOCK], a[p])
                        T.copy(B[bx * BN, at * BLOCK], b[p])
                        T.copy(SA[at, by * BM : (by + 1) * BM], sa[p])
                        for s in sides:
                            T.copy(
                                SB[group + s, at // CHUNK * CHUNK : at // CHUNK * CHUNK + VECTOR], sb[p][s]
                            )
                        T.gemm(a[p], b[p], part[p % len(part)], transpose_B=True, clear_accum=True)
                        T.copy(sa[p], row[p])
                        for s in sides:
                            column[p][s][0] = sb[p][s][at % CHUNK]
                        for q in added(p, parts):
                            for i, j in T.Parallel(BM, BN):
                                acc[i, j] += part[q % len(part)][i, j] * (
                                    row[q][i] * either(j // 64 < edge, column[q])
                                )
                T.copy(acc, C[by * BM, bx * BN])

    return fp8_gemm_blocks


def added(p: int, parts: int) -> list[int]:
    """Which sums of a round are added behind the issue of product ``p``: the one before it, and behind the
    last its own."""
    return [*range(max(0, p - 1), p), *([p] if p == parts - 1 else [])]


def either(first: Any, column: list[Any]) -> Any:
    """The scale of a column of a tile: of the first of the blocks that its columns are of, or of the
    second."""
    return column[0][0] if len(column) == 1 else T.if_then_else(first, column[0][0], column[1][0])


def whole_chunks(count: int) -> int:
    """So many numbers that rows of them begin at multiples of 16 bytes, as TMA needs them."""
    return ceil_div(count, CHUNK) * CHUNK


# ---- configurations


@dataclass(frozen=True)
class Config:
    """How a product is cut: tiles, sums of 128 steps in a round, stages of the ring (a round each), threads
    of a block, rows of tiles in a panel, blocks that take one tile after another (0: one a tile)."""

    BM: int = 128
    BN: int = 256
    parts: int = 1
    stages: int = 4
    threads: int = 256
    panel: int = 8
    stay: int = 0


def choose(M: int, N: int, fast: bool, blocks: bool, units: int = 132) -> Config:
    """The configuration for a class of shapes on a GPU of ``units`` multiprocessors (docs/history/fp8.md says
    what else was measured)."""
    if M <= 64:
        return Config(BM=64, BN=64 if ceil_div(N, 128) < units else 128, stages=8, threads=128)
    if ceil_div(M, 128) * ceil_div(N, 192) < units:
        return Config(BN=128, stages=6)
    return Config(BN=256, stay=units) if fast else Config(BN=128, parts=2, stages=3, stay=units)


# ---- what people call


@host.checked
def fp8_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    fast: bool = False,
    config: Config | None = None,
) -> torch.Tensor:
    """a · b, each times its scales, rounded once to the result's dtype; the same bits from run to run.

    Args:
        a, b: (M, K) and (K, N) of 8-bit floats. They are multiplied where they lie if a's rows and b's
        columns are contiguous, copied else. scale_a, scale_b: float32, one number each; or (M, K / 128) and
        (K / 128, N / 128), rounded up: one for 128 steps of k of a row
            of a, and of 128 columns of b. They are read where they lie if columns are contiguous and
            multiples of 16 bytes, copied else.
        out: (M, N), contiguous, takes the result. out_dtype: of the result, bfloat16 (without), float16 or
            float32.
        fast: with one scale each, all of k is summed by the tensor cores, on Hopper with 13 bits behind the
            point.
        config: how the work is cut, where the choice by the shape's class is not wanted.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or 0 in (*a.shape, *b.shape):
        raise TileValueError(
            f"fp8_matmul of {tuple(a.shape)} by {tuple(b.shape)}", expected="a (M, K), b (K, N)"
        )
    left, right = host.dtype_name(a), host.dtype_name(b)
    if left not in FLOAT8 or right not in FLOAT8:
        raise TileTypeError(f"fp8_matmul of {left} by {right}", expected=" or ".join(FLOAT8))
    (M, K), N = a.shape, b.shape[1]
    kind = out.dtype if out is not None and out_dtype is None else out_dtype or torch.bfloat16
    c = host.result(out, (M, N), kind, a)
    if host.dtype_name(c) not in RESULTS:
        raise TileTypeError(f"a result of {host.dtype_name(c)}", expected=", ".join(RESULTS))
    if scale_a.dtype != torch.float32 or scale_b.dtype != torch.float32:
        raise TileTypeError(
            f"scales of {host.dtype_name(scale_a)} and {host.dtype_name(scale_b)}", expected="float32"
        )
    whole = scale_a.numel() == scale_b.numel() == 1
    how = config or chosen(M, N, fast and whole, not whole, host.multiprocessors(a.device))
    what = {"M": M, "N": N, "K": K, **vars(how), "left": left, "right": right, "out": host.dtype_name(c)}
    rows, columns = a.contiguous(), b.T.contiguous()
    if whole:
        host.launch(by_tensor, (rows, columns, scale_a.reshape(1), scale_b.reshape(1), c), **what, fast=fast)
        return c
    steps = ceil_div(K, BLOCK)
    if tuple(scale_a.shape) != (M, steps) or tuple(scale_b.shape) != (steps, ceil_div(N, BLOCK)):
        raise TileValueError(
            f"scales of {tuple(scale_a.shape)} and {tuple(scale_b.shape)}",
            expected=f"one number each, or ({M}, {steps}) and ({steps}, {ceil_div(N, BLOCK)})",
        )
    if fast:
        raise TileValueError(
            "fast=True with scales of blocks, whose sums are formed one by one", expected="fast=False"
        )
    if how.BN not in (64, 128, 192):
        raise TileValueError(f"a tile of {how.BN} columns with scales of blocks", expected="64, 128 or 192")
    host.launch(by_block, (rows, columns, in_rows(scale_a.T), in_rows(scale_b.T), c), **what)
    return c


def in_rows(scales: torch.Tensor) -> torch.Tensor:
    """Scales as `by_block` takes them: rows one behind another, of `whole_chunks`. They are copied if they do
    not lie so."""
    missing = whole_chunks(scales.shape[1]) - scales.shape[1]
    return torch.nn.functional.pad(scales, (0, missing)) if missing else scales.contiguous()


chosen = functools.lru_cache(maxsize=None)(choose)


# ---- what is right, and what it is measured against


def draw(
    M: int,
    N: int,
    K: int,
    left: str = FLOAT8[0],
    right: str = FLOAT8[0],
    blocks: bool = False,
    fast: bool = False,
    rows: bool = False,
    out: str = "bfloat16",
    device: Any = "cpu",
    seed: int = 0,
    **config: Any,
) -> dict[str, Any]:
    """Normal random operands, and scales between 1/2 and 2; ``rows``: the blocks' scales of a lie row by
    row."""
    g = generator(device, seed)
    a, b = normal((M, K), left, g), normal((N, K), right, g).T
    scales = lambda *shape: torch.exp2(torch.rand(shape, generator=g, device=device) * 2 - 1)  # noqa: E731
    steps = ceil_div(K, BLOCK)
    if blocks:
        scale_a, scale_b = (
            scales(M, steps) if rows else scales(steps, M).T,
            scales(ceil_div(N, BLOCK), steps).T,
        )
    else:
        scale_a, scale_b = scales(1), scales(1)
    made: dict[str, Any] = {
        "a": a,
        "b": b,
        "scale_a": scale_a,
        "scale_b": scale_b,
        "out_dtype": getattr(torch, out),
        "fast": fast,
    }
    return made | ({"config": Config(**config)} if config else {})


def reference(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    fast: bool = False,
    config: Config | None = None,
) -> tuple[Expected, ...]:
    """In float64. On a GPU each number in an instruction's sum of 32 products is cut 13 bits behind the point
    of the largest: together less than 2^-12 of the sum of all magnitudes; where all of k is summed so, the
    sum itself grows, and what is cut off points one way."""
    K, N = b.shape
    wide = lambda s, axis, extent: s.double().repeat_interleave(BLOCK, axis).narrow(axis, 0, extent)  # noqa: E731
    if scale_a.numel() == 1:
        x, y = a.double() * scale_a.double(), b.double() * scale_b.double()
    else:
        x, y = a.double() * wide(scale_a, 1, K), b.double() * wide(wide(scale_b, 0, K), 1, N)
    total, magnitude = x @ y, x.abs() @ y.abs()
    noise = summed(magnitude, K + 1) + total.abs() * 2.0**-22
    if a.device.type == "cuda":
        noise = noise + magnitude * 2.0 ** (-11 if fast else -12)
    return (expected(total, out_dtype, noise=noise),)


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    fast: bool = False,
    **_: Any,
) -> Callable[[], Any]:
    """torch._scaled_mm, with the same scales and the same way to sum."""
    one = scale_a.numel() == 1
    first, second = (scale_a.reshape(()), scale_b.reshape(())) if one else (scale_a, scale_b)
    return lambda: torch._scaled_mm(
        a, b, scale_a=first, scale_b=second, out_dtype=out_dtype, use_fast_accum=fast
    )


def _cases() -> tuple[Case, ...]:
    """Both formats, both scalings, both ways to sum, ragged; then the shapes that are measured."""
    tiles = {"BM": 64, "BN": 64, "stages": 2, "threads": 128}
    small: list[dict[str, Any]] = [
        {"M": 33, "N": 72, "K": 104, "left": x, "right": y, **tiles} for x in FLOAT8 for y in FLOAT8
    ]
    small += [{"M": 33, "N": 72, "K": 144, "fast": True, "out": out, **tiles} for out in RESULTS]
    small += [{"M": 33, "N": 136, "K": 272, "blocks": True, "rows": rows, **tiles} for rows in (False, True)]
    small += [{"M": 130, "N": 400, "K": 144, "blocks": True, "BN": 192, "stages": 2}]
    small += [{"M": 300, "N": 136, "K": 144, "stages": 2, "stay": 2}]
    small += [
        {"M": 100, "N": 136, "K": 400, "blocks": b, **tiles, "parts": 2, "stay": 3} for b in (False, True)
    ]
    turns = {"BM": 128, "BN": 64, "stages": 2, "threads": 256, "stay": 2}
    small += [
        {"M": 130, "N": 72, "K": 400, "blocks": b, **turns, "parts": parts}
        for b in (False, True)
        for parts in (1, 2)
    ]
    ways: list[dict[str, Any]] = [{}, {"fast": True}, {"blocks": True}]
    ways.append({"blocks": True, "rows": True, "right": FLOAT8[1], "out": "float32"})
    ragged = [
        (1, 128, 128),
        (70, 264, 208),
        (1000, 776, 1104),
        (257, 1032, 4096),
        (33, 40, 100),
        (2500, 3000, 400),
    ]
    gpu = [{"M": m, "N": n, "K": k, **how} for m, n, k in ragged for how in ways]
    cuts: list[dict[str, Any]] = [
        {"BN": 128, "parts": 2, "stages": 3},
        {"BM": 192, "BN": 128, "threads": 384, "stages": 5},
        {"BN": 192},
    ]
    gpu += [
        {"M": 1000, "N": 776, "K": 1104, "blocks": b, **cut, "stay": 20}
        for cut in cuts
        for b in (False, True)
    ]
    large = [(8192, 8192, 8192), (4096, 4096, 4096), (4096, 7168, 2048), (64, 8192, 8192)]
    bench = [
        {"M": m, "N": n, "K": k, **how} for m, n, k in large for how in ({"fast": True}, {}, {"blocks": True})
    ]
    return (
        *(Case(s, small=True) for s in small),
        *(Case(s) for s in gpu),
        *(Case(s, bar=1.0) for s in bench),
    )


OP = Op(
    name="fp8_matmul",
    run=fp8_matmul,
    draw=draw,
    reference=reference,
    cases=_cases(),
    peers={"torch._scaled_mm": scaled_mm},
    flops=lambda M, N, K, **_: 2.0 * M * N * K,
    moved=lambda M, N, K, out="bfloat16", **_: float(M * K + K * N + M * N * (4 if out == "float32" else 2)),
)
