"""``matmul(a, b)``: products of matrices in any order of memory, with a bias and an activation behind them.

One tile program for all of it. Where the product has few rows (a batch of tokens times a layer's weights) it
is bound by reading b, and C is computed transposed, so that b's columns take the 64 rows that the tensor
cores have at least, and a's few rows their narrow side. A product whose tiles fill no whole waves of the GPU
is cut along k, in equal shares of all steps (`Config.stream`) or of each tile's (`Config.split`): partial
sums go to memory and are added in order, by the block that has a tile's last steps or by a second kernel.

Rows that are no multiples of 16 bytes TMA cannot fetch. By a few vectors such operands are multiplied without
tensor cores (`thin`). Others are first written anew with longer rows, unless so little is computed that
threads had better load them one number at a time (`plan`).

One kernel serves all numbers of rows of a class, where a's rows lie one behind another; where its columns do,
there is one for each number, since TMA has to know that they begin at multiples of 16 bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from tilescale.comm import sim
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import host, thin
from tilescale.ops.activations import ACTIVATIONS, IN_TORCH
from tilescale.ops.case import Case, Expected, Op, expected, generator, normal, summed
from tilescale.ops.gemm_kernels import ceil_div, combine, filled, persistent, product, streamed
from tilescale.ops.prepared import Plan, Plans, signature

DTYPES = ("bfloat16", "float16", "float32")

# ---- configurations


@dataclass(frozen=True)
class Config:
    """How a product is cut: tiles, stages of the ring, threads of a block, shares of k, rows of tiles in a
    panel, C transposed or not; ``blocks``: so many that take one tile after another, 0: a block for each
    tile; ``stream``: they share tiles too, so that all have equally many steps of k (no more blocks than are
    resident at once); ``cluster``: so many blocks fetch b's tiles together where they stay, otherwise a's."""

    BM: int = 128
    BN: int = 256
    BK: int = 64
    stages: int = 4
    threads: int = 256
    split: int = 1
    panel: int = 8
    swap: bool = False
    blocks: int = 0
    stream: bool = False
    cluster: int = 1


#: rows and columns of a tile → microseconds that 64 steps of k take on an H200, threads and stages
TILES = {
    (128, 256): (0.66, 256, 4),
    (128, 192): (0.52, 256, 4),
    (128, 128): (0.38, 256, 6),
    (128, 64): (0.25, 256, 8),
}
#: the same of tiles that are only taken whole: by blocks that stay, or as Cᵀ's, two blocks together, where
#: all of them run at once
LARGE = {(192, 192): (0.76, 384, 4), (320, 128): (0.86, 256, 4)}
#: microseconds of 128 steps of a tile of 64 columns of Cᵀ
NARROW = 0.3
#: bytes that memory gives in a microsecond; microseconds that a kernel takes to add shares of k, and bytes of
#: them in one
MEMORY, ADDING, ADDED = 3.7e6, 3.5, 3e6


#: microseconds by which such tiles end later than those that TMA stores
ENDING = 0.7
#: rows of a tile of Cᵀ at most, and bytes of shared memory for its stages
TALL, RING = 256, 200 << 10
#: microseconds that a thread takes for a number of an operand that it loads by itself, and for a place of the
#: tile where there is none
PLAIN, NONE = 0.09, 0.02
#: microseconds that a kernel takes at least which writes operands anew; numbers that it moves together →
#: bytes in a microsecond
WIDENING, WIDENED = 2.5, {1: 2.6e6, 2: 2.6e6, 4: 3.5e6}


def choose(
    M: int, N: int, K: int, dtype: str, units: int = 132, trans_a: bool = False, trans_b: bool = False
) -> Config:
    """The configuration for a class of shapes on a GPU of ``units`` multiprocessors: of tiles of several
    widths, whole or in shares of k, those that take the least time by what was measured on an H200
    (docs/history/gemm.md). Blocks that share tiles (`Config.stream`) were never the fastest there."""
    if dtype == "float32":
        return Config(BM=64 if M <= 64 else 128, BN=64 if N <= 64 else 128, BK=32, stages=3, panel=0)
    return timed(M, N, K, units, trans_a, trans_b)[1]


def timed(M: int, N: int, K: int, units: int, trans_a: bool, trans_b: bool) -> tuple[float, Config]:
    """`choose` for 16-bit operands whose rows TMA fetches, and the microseconds that it expects."""
    if min(M, N) <= 64:
        few = 16 if min(M, N) <= 16 else 32 if min(M, N) <= 32 else 64
        swap = M <= 64
        narrow = Config(
            BM=few if swap else 64, BN=64 if swap else few, BK=128, stages=8, threads=128, panel=0, swap=swap
        )
        time, split = shares(M, N, K, ceil_div(N if swap else M, 64), 128, NARROW, units)
        # as many of a's bytes as of b's: two blocks fetch them together
        # Short ones: several blocks beside each other.
        narrow = replace(narrow, stages=max(2, min(8, ceil_div(ceil_div(K, 128), split))))
        pairs = narrow.BM == 64 and swap and not trans_b and split == 1 and ceil_div(N, 64) % 2 == 0
        return time, replace(narrow, split=split, cluster=2 if pairs else 1)
    found: list[tuple[float, Config]] = []
    for (BM, BN), (step, threads, stages) in TILES.items():
        tiles = ceil_div(M, BM) * ceil_div(N, BN)
        time, split = shares(M, N, K, tiles, 64, step, units)
        how = Config(BM=BM, BN=BN, threads=threads, stages=stages, split=split)
        if split == 1 and (tiles > units or BN > 128):
            how = replace(how, panel=16, blocks=units, cluster=together(M, N, K, BM, BN, units))
        found.append((time, how))
    for (BM, BN), (step, threads, stages) in LARGE.items():
        tiles = ceil_div(M, BM) * ceil_div(N, BN)
        time = max(ceil_div(tiles, units) * ceil_div(K, 64) * step, (M + N) * K * 2 / MEMORY)
        how = Config(BM=BM, BN=BN, threads=threads, stages=stages, panel=16)
        if BM == 192:
            found.append((time, replace(how, blocks=units, cluster=together(M, N, K, BM, BN, units))))
        elif (
            tiles <= units and not trans_a
        ):  # halves of 160 columns begin within a swizzled box of a transposed operand
            found.append((time, replace(how, panel=0, swap=True, cluster=2)))
    if M % 128 and M <= 2 * TALL and not trans_a:
        found += [fitted(M, N, K, BN, True, units) for BN in (64, 128)]
    if (
        N % 64 and N <= 2 * TALL and trans_b
    ):  # parts of a swizzled box of a transposed operand take twice as long
        found += [fitted(N, M, K, BM, False, units) for BM in (64, 128)]
    return min(found, key=lambda f: f[0])


def fitted(M: int, N: int, K: int, BN: int, swap: bool, units: int) -> tuple[float, Config]:
    """Microseconds and configuration of tiles of Cᵀ whose narrow side is as long as M, or a part of it,
    needs; without ``swap`` of C's, M and N changed about."""
    high = ceil_div(M, TALL)
    BM = filled(ceil_div(M, high), 16)
    step = (0.10 + 0.15 * BM / 128) if BN == 64 else (0.12 + 0.26 * BM / 128)
    time, split = shares(M, N, K, high * ceil_div(N, BN), 64, step, units)
    stages = min(8, RING // ((BM + BN) * 128))
    how = Config(
        BM=BM if swap else BN,
        BN=BN if swap else BM,
        threads=2 * BN,
        stages=stages,
        split=split,
        panel=0,
        swap=swap,
    )
    return time + ENDING, how


@functools.cache
def plan(
    M: int, N: int, K: int, dtype: str, units: int, trans_a: bool, trans_b: bool
) -> tuple[Config, int, int]:
    """The configuration, and what a's and b's rows are filled up to multiples of before (1: they stay as they
    are)."""
    how = choose(M, N, K, dtype, units, trans_a, trans_b)
    rows, size = ((M if trans_a else K), (K if trans_b else N)), ((M * K), (K * N))
    odd = [row % 8 != 0 for row in rows]
    if dtype == "float32" or not any(odd):
        return how, 1, 1
    side = math.gcd(8, *(row for row, o in zip(rows, odd, strict=True) if o))
    copied = sum(4 * n for n, o in zip(size, odd, strict=True) if o)
    time = timed(M, N, K, units, trans_a, trans_b)[0] + WIDENING + copied / WIDENED[side]
    if side > 1:  # cp.async takes them ahead
        step = NONE * (how.BM + how.BN) / side
    else:
        numbers = min(M, how.BM) + min(N, how.BN)
        step = PLAIN * numbers + NONE * (how.BM + how.BN - numbers)
    waves = ceil_div(ceil_div(M, how.BM) * ceil_div(N, how.BN) * how.split, units if side > 1 else 4 * units)
    if (
        side == 2 and waves > 1 and min(M, N) > 64
    ):  # words of four bytes keep the threads busy where no block is idle
        step *= 2.5
    how = replace(how, BK=min(how.BK, filled(K, 32)))  # nothing is loaded for steps that there are not
    steps = ceil_div(ceil_div(K, how.BK), how.split)
    if waves * steps * step * how.BK / how.threads < time:
        # Copies of few rows wait for memory: several blocks beside each other, with rings that leave room.
        if min(M, N) <= 64:
            split = shares(M, N, K, ceil_div(N if how.swap else M, 64), 128, 1.0, 3 * units)[1]
            how = replace(how, split=split, stages=min(4, how.stages), cluster=1)
        return how, 1, 1
    a, b = ((64 if row >= 512 else 8) if o else 1 for row, o in zip(rows, odd, strict=True))
    return choose(M, N, K, dtype, units, trans_a, trans_b), a, b


def together(M: int, N: int, K: int, BM: int, BN: int, units: int) -> int:
    """Blocks that fetch b's tiles together. Rows that begin within a line of the L2 cache take twice its
    accesses: half are saved, unless pairs of tiles fill more waves than tiles do."""
    high, wide = ceil_div(M, BM), ceil_div(N, BN)
    more = ceil_div(ceil_div(high, 2) * wide, units // 2) > ceil_div(high * wide, units)
    return 2 if (N % 64 or K % 64) and M > BM and units % 2 == 0 and not more else 1


def shares(M: int, N: int, K: int, tiles: int, BK: int, step: float, units: int) -> tuple[float, int]:
    """Microseconds of a product in ``tiles``, and in how many shares of k they are that few."""

    def time(split: int) -> float:
        adding = ADDING + split * M * N * 8 / ADDED if split > 1 else 0.0
        return (
            max(
                ceil_div(tiles * split, units) * ceil_div(ceil_div(K, BK), split) * step,
                (M + N) * K * 2 / MEMORY,
            )
            + adding
        )

    return min((time(split), split) for split in (1, 2, 4, 8, 16, 32, 64, 128) if split <= ceil_div(K, BK))


# ---- what people call


@host.checked
def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "",
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: Config | thin.Thin | None = None,
) -> torch.Tensor:
    """act(a · b + bias), summed in float32 and rounded once; the same bits from run to run.

    Args:
        a, b: (M, K) and (K, N) of bfloat16, float16 or float32, each contiguous or the transpose of something
            contiguous.
        bias: (N,) of the result's dtype. activation: "relu", "gelu" (by erf) or "silu".
        out: (M, N), contiguous, takes the result. out_dtype: of the result; a's without, or float32.
        config: how the work is cut, where the choice by the shape's class is not wanted; a `Thin` for few
            rows or columns of 16-bit floats.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    key = None
    if config is None:
        given = signature(a), signature(b), signature(bias), signature(out)
        key = *given, activation, out_dtype, sim.here() is None
    plan = _plans.of(key, lambda: _plan(a, b, bias, activation, out, out_dtype, config))
    c: torch.Tensor = plan.result(out, a)
    plan.run(a, b, bias, c)
    return c


_plans = Plans()


class Operands(NamedTuple):
    """What a product is asked for: a and b as they lie in memory, whether those are their transposes,
    extents, the result's dtype."""

    a: torch.Tensor
    b: torch.Tensor
    trans_a: bool
    trans_b: bool
    M: int
    N: int
    K: int
    kind: torch.dtype


def checked(
    what: str, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: str,
    out: torch.Tensor | None, out_dtype: torch.dtype | None,
) -> Operands:  # fmt: skip
    """The operands of a product.

    Raises:
        TileValueError, TileTypeError: shapes, dtypes or an activation that do not fit.
    """
    (a, trans_a), (b, trans_b) = host.matrix(a, "a"), host.matrix(b, "b")
    M, K = reversed(a.shape) if trans_a else a.shape
    K2, N = reversed(b.shape) if trans_b else b.shape
    if K != K2:
        raise TileValueError(f"{what} of ({M}, {K}) by ({K2}, {N})", expected="a (M, K), b (K, N)")
    if a.dtype != b.dtype or host.dtype_name(a) not in DTYPES:
        raise TileTypeError(
            f"{what} of {host.dtype_name(a)} by {host.dtype_name(b)}",
            expected="one of " + ", ".join(DTYPES) + " for both",
        )
    if activation not in ACTIVATIONS:
        raise TileValueError(f"activation={activation!r}", expected=", ".join(repr(x) for x in ACTIVATIONS))
    kind = out.dtype if out is not None and out_dtype is None else out_dtype or a.dtype
    if kind not in (a.dtype, torch.float32):
        raise TileTypeError(f"a result of {kind}", expected=f"{a.dtype} or torch.float32")
    if bias is not None and (tuple(bias.shape) != (N,) or bias.dtype != kind):
        raise TileValueError(f"bias is {tuple(bias.shape)} of {bias.dtype}", expected=f"({N},) of {kind}")
    if 0 in (M, N, K):
        raise TileValueError(f"{what} of ({M}, {K}) by ({K}, {N})", expected="extents of 1 at least")
    return Operands(a, b, trans_a, trans_b, M, N, K, kind)


def _plan(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: str, out: torch.Tensor | None,
    out_dtype: torch.dtype | None, config: Config | thin.Thin | None,
) -> Plan:  # fmt: skip
    """What `matmul` does: of a, b, the bias and the result."""
    a, b, trans_a, trans_b, M, N, K, kind = checked("matmul", a, b, bias, activation, out, out_dtype)
    host.taking(out, (M, N), kind)
    few = host.dtype_name(a) != "float32" and thin.fits(M, N, K, a, b)
    if isinstance(config, thin.Thin) or config is None and few and (a.shape[1] % 2 or b.shape[1] % 2):
        if not few:
            wrong = f"{config} for ({M}, {N}, {K}) of {host.dtype_name(a)}"
            raise TileValueError(wrong, expected=f"16-bit floats, {thin.FEW} rows or columns at most")
        cut = config if isinstance(config, thin.Thin) else None

        def thinly(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, c: torch.Tensor) -> None:
            a, b = host.lying(a, trans_a), host.lying(b, trans_b)
            by_few(a, b, added(bias), c, trans_a, trans_b, activation, cut)

        return Plan((M, N), kind, thinly)
    align_a, align_b = 1, 1
    if config is not None:
        how = config
    else:
        how, align_a, align_b = plan(
            M, N, K, host.dtype_name(a), host.multiprocessors(a.device), trans_a, trans_b
        )
    what = {
        "M": M if trans_a else None,
        "N": N,
        "K": K,
        "dtype": host.dtype_name(a),
        "trans_a": trans_a,
        "trans_b": trans_b,
    }
    tail = {"out": host.dtype_of(kind), "bias": bias is not None, "activation": activation}
    if not how.stream:
        what |= {"align_a": align_a, "align_b": align_b}
    launches = launched(how, what, tail, host.target_of(a.device))

    def run(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, c: torch.Tensor) -> None:
        a, b = host.lying(a, trans_a), host.lying(b, trans_b)
        if align_a > 1 or align_b > 1:
            a, b = lengthened(a, b, align_a, align_b)
        launches(a, b, added(bias), c)

    return Plan((M, N), kind, run)


def added(bias: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return () if bias is None else (bias.contiguous(),)


def by_few(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: tuple[Any, ...],
    c: torch.Tensor,
    trans_a: bool,
    trans_b: bool,
    activation: str,
    how: thin.Thin | None,
) -> None:
    """The launches of a product with few rows or columns."""
    (M, N), swap = c.shape, c.shape[0] < c.shape[1]
    K = a.shape[0] if trans_a else a.shape[1]
    along, across = (trans_b, trans_a) if swap else (not trans_a, not trans_b)
    how = how or thin.cut(max(M, N), min(M, N), K, along, host.multiprocessors(a.device))
    tail: dict[str, Any] = {"out": host.dtype_name(c), "bias": bool(bias), "activation": activation}
    what = {
        "M": M if swap or trans_a else None,
        "N": N,
        "K": K,
        "few": min(M, N),
        "swap": swap,
        "along": along,
        "across": across,
    }
    what |= {"dtype": host.dtype_name(a), **how._asdict()}
    given = (*thin.words(b if swap else a), *thin.words(a if swap else b))
    if how.split == 1:
        host.launch(thin.vectors, (*given, *bias, c), **what, **tail)
        return
    partial = torch.empty(how.split, M, filled(N, 4), dtype=torch.float32, device=c.device)
    host.launch(thin.vectors, (*given, partial), **what, **{**tail, "bias": False, "activation": ""})
    host.launch(combine, (partial, *bias, c), M=M if trans_a else None, N=N, split=how.split, **tail)


def lengthened(
    a: torch.Tensor, b: torch.Tensor, align_a: int, align_b: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operands, those with a multiple that their rows are to be written anew, zeros behind their rows."""
    given: list[torch.Tensor] = [a, b]
    args: list[Any] = []
    for k, align in enumerate((align_a, align_b)):
        if align > 1:
            t = given[k] if given[k].data_ptr() % 8 == 0 else given[k].clone()
            given[k] = torch.empty(t.shape[0], filled(t.shape[1], align), dtype=t.dtype, device=t.device)
            args += [*thin.words(t), given[k].view(torch.uint64), t.shape[1]]
    if args:
        host.launch(
            thin.widened, tuple(args), both=len(args) > 4, shifted=any(C % thin.WORD for C in args[3::4])
        )
    return given[0], given[1]


def launched(
    how: Config, what: dict[str, Any], tail: dict[str, Any], target: str
) -> Callable[[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor], None]:
    """The launches of a configuration, of a, b, the bias and c. ``what``: extents, dtype and order of the
    operands; ``tail``: what is done with the sums."""
    cut = dict(vars(how))
    blocks, stream, split, swap, cluster = (
        cut.pop(name) for name in ("blocks", "stream", "split", "swap", "cluster")
    )
    if blocks and (split > 1 or swap and not stream) or stream and not blocks:
        raise TileValueError(
            f"{how}", expected="blocks=0 with split, and with swap where it is not stream; blocks with stream"
        )
    if cluster > 1 and (stream or blocks % cluster):
        raise TileValueError(f"{how}", expected="cluster=1, or blocks in whole clusters, without stream")
    if stream:
        # A step for each, however few rows.
        blocks = min(blocks, ceil_div(what["N"], how.BN) * ceil_div(what["K"], how.BK))
        cut["panel"] = max(1, how.panel)
        kernel = host.kernel(streamed, target, **what, **cut, blocks=blocks, swap=swap, **tail)

        def in_turn(a: Any, b: Any, bias: tuple[Any, ...], c: Any) -> None:
            tile = (how.BN, how.BM) if swap else (how.BM, how.BN)
            partial = torch.empty(blocks, *tile, dtype=torch.float32, device=c.device)
            ready = torch.zeros(blocks, dtype=torch.int32, device=c.device)
            kernel(a, b, *bias, partial, ready, c)

        return in_turn
    if blocks:
        kernel = host.kernel(persistent, target, **what, **cut, blocks=blocks, cluster=cluster, **tail)
    elif split == 1:
        kernel = host.kernel(product, target, **what, **cut, split=split, swap=swap, cluster=cluster, **tail)
    else:
        plain = {**tail, "bias": False, "activation": ""}
        parts = host.kernel(product, target, **what, **cut, split=split, swap=swap, cluster=cluster, **plain)
        sums = host.kernel(combine, target, M=what["M"], N=what["N"], split=split, **tail)

        def in_shares(a: Any, b: Any, bias: tuple[Any, ...], c: Any) -> None:
            wide = filled(c.shape[1], 4)
            partial = torch.empty(split, c.shape[0], wide, dtype=torch.float32, device=c.device)
            parts(a, b, partial)
            sums(partial, *bias, c)

        return in_shares
    return lambda a, b, bias, c: kernel(a, b, *bias, c)


# ---- what is right, and what it is measured against


def draw(
    M: int,
    N: int,
    K: int,
    dtype: str = "bfloat16",
    trans_a: bool = False,
    trans_b: bool = False,
    bias: bool = False,
    activation: str = "",
    out: str = "",
    device: Any = "cpu",
    seed: int = 0,
    **config: Any,
) -> dict[str, Any]:
    """Normal random operands; ``trans_a``, ``trans_b``: transposes of contiguous ones; ``config``: fields of
    a `Config`."""
    g = generator(device, seed)
    a = normal((K, M), dtype, g).T if trans_a else normal((M, K), dtype, g)
    b = normal((N, K), dtype, g).T if trans_b else normal((K, N), dtype, g)
    made: dict[str, Any] = {"a": a, "b": b, "activation": activation}
    if bias:
        made["bias"] = normal((N,), out or dtype, g)
    if out:
        made["out_dtype"] = getattr(torch, out)
    if config:
        made["config"] = Config(**config)
    return made


def reference(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "",
    out_dtype: torch.dtype | None = None,
    config: Config | thin.Thin | None = None,
) -> tuple[Expected, ...]:
    """In float64. The derivatives of all activations are below 1.13, so that what the sum is off reaches the
    result by that much."""
    x, y = a.double(), b.double()
    total, magnitude = x @ y, x.abs() @ y.abs()
    if bias is not None:
        total, magnitude = total + bias.double(), magnitude + bias.double().abs()
    act = IN_TORCH[activation]
    noise = summed(magnitude, x.shape[1] + 1) * 1.13 + (total.abs() * 2.0**-21 if activation else 0.0)
    return (expected(act(total), out_dtype or a.dtype, noise=noise),)


def cublas(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "", **_: Any
) -> Callable[[], Any]:
    """torch.mm, or torch.addmm where there is a bias; the activation as an operation of its own."""
    out = torch.empty(a.shape[0], b.shape[1], device=a.device, dtype=a.dtype)
    act = IN_TORCH[activation]
    if bias is None:
        return lambda: act(torch.mm(a, b, out=out))
    return lambda: act(torch.addmm(bias, a, b, out=out))


def _cases() -> tuple[Case, ...]:
    """Every transpose and dtype, every epilogue, every class of shape, ragged ones first; then the shapes
    that are measured."""
    small: list[dict[str, Any]] = []
    for dtype in DTYPES:
        for ta, tb in ((False, False), (False, True), (True, False), (True, True)):
            small.append(
                {"M": 40 if ta else 33, "N": 72, "K": 104, "dtype": dtype, "trans_a": ta, "trans_b": tb}
            )
    tail: dict[str, Any] = {"M": 33, "N": 72, "K": 104, "bias": True}
    small += [{**tail, "activation": act, "out": "float32"} for act in ACTIVATIONS]
    small += [{**tail, "activation": act, "dtype": "float16"} for act in ACTIVATIONS]
    small += [
        {**tail, "M": 130, "activation": "relu"},
        {**tail, "activation": "gelu", "split": 3, "BM": 64, "BN": 128, "BK": 16},
    ]
    small += [{**tail, "M": 5, "split": 2, "swap": True, "BM": 16, "BN": 64, "threads": 128}]
    pair = {**tail, "M": 70, "N": 200, "swap": True, "BM": 64, "BN": 64, "threads": 128, "cluster": 2}
    small += [
        pair,
        *({**pair, "M": 100, "BM": 96, "BN": 128, "threads": 256, "out": out} for out in ("", "float32")),
    ]
    stay = {
        **tail,
        "M": 72,
        "N": 200,
        "BM": 64,
        "BN": 64,
        "BK": 32,
        "threads": 128,
        "panel": 2,
        "blocks": 3,
        "activation": "silu",
    }
    small += [{**stay, "trans_a": ta} for ta in (False, True)] + [
        {**stay, "M": 136, "blocks": 4, "cluster": 2}
    ]
    share: dict[str, Any] = {**stay, "K": 200, "stream": True}
    small += [
        share,
        {**share, "trans_b": True, "blocks": 8, "activation": ""},
        {**share, "trans_a": True, "blocks": 13, "bias": False},
    ]
    small += [{**share, "M": 12, "N": 72, "BM": 16, "blocks": 5, "swap": True}]
    small += [{"M": 1, "N": 1, "K": 1}, {"M": 7, "N": 9, "K": 13}]
    # rows that are written anew: of both operands, of one; few columns; tiles as high as M; shares that are
    # spread over threads
    small += [{"M": 70, "N": 77, "K": 1001}, {"M": 75, "N": 136, "K": 1000, "trans_a": True}]
    small += [
        {"M": 150, "N": 72, "K": 1003, "trans_b": True},
        {"M": 130, "N": 30, "K": 136, "trans_b": True, "out": "float32"},
    ]
    # Fewer steps than a tile has.
    small += [
        {"M": 27, "N": 77, "K": 21},
        {"M": 150, "N": 71, "K": 42, "trans_b": True},
    ]
    small += [{"M": 70, "N": 9, "K": 1001, "bias": True, "activation": "relu"}]
    # few rows or columns that begin anywhere: every order of both operands, whole and in shares
    for ta, tb in ((False, False), (False, True), (True, False), (True, True)):
        turned = {"trans_a": ta, "trans_b": tb}
        small += [{"M": 3, "N": 77, "K": 101, **turned}, {"M": 75, "N": 5, "K": 103, "bias": True, **turned}]
    small += [
        {"M": 1, "N": 37, "K": 2101, "dtype": "float16", "trans_b": tb, "activation": "silu", "bias": True}
        for tb in (False, True)
    ]
    small += [
        {"M": 2, "N": 3, "K": 17003, "trans_b": True, "bias": True, "activation": "relu"},
        {"M": 3, "N": 2, "K": 5, "out": "float32"},
    ]
    small += [
        {
            "M": 5,
            "N": 70,
            "K": 1100,
            "bias": True,
            "split": 17,
            "swap": True,
            "BM": 16,
            "BN": 64,
            "threads": 128,
        }
    ]
    ragged = [
        (1, 8, 8),
        (16, 1000, 4104),
        (64, 520, 2056),
        (100, 3000, 520),
        (257, 264, 200),
        (1000, 776, 520),
        (4096, 512, 1024),
    ]
    ragged += [(129, 1032, 4096), (300, 9000, 72)]
    gpu = [
        {"M": m, "N": n, "K": k, "dtype": d, "trans_b": tb}
        for m, n, k in ragged
        for d in DTYPES
        for tb in (False, True)
    ]
    odd = [
        (333, 777, 555),
        (129, 4096, 4096),
        (100, 100, 20001),
        (2, 35, 6001),
        (1001, 2003, 1005),
        (9001, 13, 1000),
        (3000, 5, 777),
    ]
    odd += [(40, 2001, 1003)]
    gpu += [
        {"M": m, "N": n, "K": k, "trans_a": ta, "trans_b": tb}
        for m, n, k in odd
        for ta in (False, True)
        for tb in (False, True)
    ]
    gpu += [
        {"M": 1000, "N": 776, "K": 520, "bias": True, "activation": act, "trans_a": True}
        for act in ACTIVATIONS
    ]
    cut = {"N": 520, "K": 4104, "bias": True, "split": 3, "stages": 3, "BM": 64, "BN": 128}
    stay = {"M": 1000, "N": 1032, "K": 520, "BN": 128, "panel": 3, "blocks": 7}
    both = [(ta, tb) for ta in (False, True) for tb in (False, True)]
    gpu += [
        {**stay, "trans_a": ta, "trans_b": tb, "bias": ta, "activation": "gelu" if tb else ""}
        for ta, tb in both
    ]
    gpu += [{"M": m, **cut, "swap": swap} for m in (64, 70) for swap in (False, True)]
    gpu += [
        {"M": 650, "N": 1000, "K": 520, "BM": 320, "BN": 128, "swap": True, "cluster": 2, "trans_b": tb}
        for tb in (False, True)
    ]
    share = {**stay, "blocks": 132, "stream": True, "panel": 16}
    gpu += [
        {**share, "M": m, "K": k, "trans_b": tb, "bias": tb}
        for m in (256, 1000, 3000)
        for k in (520, 8192)
        for tb in (False, True)
    ]
    gpu += [
        {**stay, "blocks": 132, "cluster": 2, "trans_b": tb, "BN": n}
        for tb in (False, True)
        for n in (128, 192)
    ]
    gpu += [
        {**stay, "blocks": 132, "cluster": c, "BM": 192, "BN": 192, "threads": 384, "trans_b": c > 1}
        for c in (1, 2)
    ]
    gpu += [{**share, "M": 1000, "K": 4104, "trans_a": True, "BN": 256, "stages": 4, "activation": "gelu"}]
    gpu += [
        {**share, "M": 16, "N": 4096, "K": 4096, "BM": 16, "BN": 64, "BK": 128, "threads": 128, "swap": True}
    ]
    large = [
        (8192, 8192, 8192),
        (4096, 4096, 4096),
        (8192, 7168, 8192),
        (16384, 16384, 8192),
        (4096, 22016, 4096),
    ]
    few = [(16, 8192, 8192), (64, 8192, 8192), (256, 8192, 8192)]
    bench = [{"M": m, "N": n, "K": k} for m, n, k in large]
    bench += [{"M": m, "N": n, "K": k, "trans_b": tb} for m, n, k in few for tb in (False, True)]
    # Tiles that fill no whole waves.
    waves = [
        (384, 8192, 8192),
        (640, 8192, 8192),
        (1024, 4096, 8192),
        (3000, 3000, 3000),
    ]
    bench += [
        {"M": m, "N": n, "K": k}
        for m, n, k in (*waves, (128, 2048, 16384), (16, 1024, 16384), (16, 4096, 4096))
    ]
    return (
        *(Case(s, small=True) for s in small),
        *(Case(s) for s in gpu),
        *(Case(s, bar=1.0) for s in bench),
    )


def _bytes(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


OP = Op(
    name="matmul",
    run=matmul,
    draw=draw,
    reference=reference,
    cases=_cases(),
    peers={"cuBLAS": cublas},
    flops=lambda M, N, K, **_: 2.0 * M * N * K,
    moved=lambda M, N, K, dtype="bfloat16", **_: float(_bytes(dtype) * (M * K + K * N + M * N)),
)
