"""``w4a16_matmul(a, w, scales)``: 16-bit activations times 4-bit weights, which are turned into 16-bit floats
in registers.

The product is computed transposed, Cᵀ = W · Aᵀ: the weights are the tensor cores' left operand, which may lie
in registers, and a few rows of activations are their narrow side. In a word lie eight weights that one thread
needs, two of them at a time in the places of two 16-bit floats: ``word >> 4p & 0x000f000f | 0x43004300`` is a
pair of bfloat16 numbers 128 + v, from which 128 + zero is subtracted exactly. A group's sum of products is
scaled in float32, so the weights themselves are never rounded.
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
from tilescale.ops.gemm_kernels import ceil_div, combine, filled

#: weights that share a scale and a zero, in a row
GROUP = 128
#: words of a group
WORDS = GROUP // 8
#: rows whose words of a group lie together
ROWS = 8
#: rows of a panel, whose groups lie one behind the other
PANEL = 64
#: weights of a row that a word of each of four threads has
PART = 32
#: dtype → the bits of two numbers whose last four bits of the fraction count ones, and that number
MAGIC = {"bfloat16": (0x43004300, 128), "float16": (0x64006400, 1024)}
#: what zeros are without zeros
MIDDLE = 8


def order(device: Any = None) -> torch.Tensor:
    """Where in its group each weight of a row comes from: (word, nibble) → k. The words 4t … 4t + 3 hold what
    thread t of four needs, word 4t + c of the 32 from 32c on, those that mma's left operand has in thread t:
    2t, 2t + 1, 2t + 8, 2t + 9, … in the nibbles 0, 4, 1, 5, 2, 6, 3, 7 (PTX ISA 9.0, "Matrix Fragments for
    mma.m16n8k16", and wgmma's, which are the same)."""
    t, c, pair, half = torch.meshgrid(*[torch.arange(n, device=device) for n in (4, 4, 4, 2)], indexing="ij")
    k = 32 * c + 2 * t + 8 * pair + half
    made = torch.empty(WORDS, 8, dtype=torch.int64, device=device)
    made[(4 * t + c), (pair + 4 * half)] = k
    return made


def pack(values: torch.Tensor, *, panels: bool = True) -> torch.Tensor:
    """Weights (N, K) from 0 to 15, of any integer dtype, as ``w4a16_matmul`` takes them: (ceil(N / 8), K) of
    int32, in a row the groups of eight rows of weights, one behind the other: a group's words of the first
    row, of the second, … What one instruction of a warp loads, 16 bytes for each thread, is one piece of
    memory so.

    With ``panels`` (ceil(N / 64) · K / 16, 128): of 64 rows, eight pieces, a group lies together, and the
    groups of a panel one behind the other, so that what a block reads at a time is one piece of memory too.

    Raises:
        TileValueError: K is no multiple of 128.
    """
    if values.dim() != 2 or values.shape[1] % GROUP:
        raise TileValueError(f"weights of {tuple(values.shape)}", expected=f"(N, K), K a multiple of {GROUP}")
    padded = torch.nn.functional.pad(values.to(torch.int64), (0, 0, 0, -values.shape[0] % ROWS))
    groups = padded.reshape(-1, ROWS, padded.shape[1] // GROUP, GROUP)[..., order(values.device)]
    words = sum(groups[..., k] << (4 * k) for k in range(8))
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    words = words.transpose(1, 2).reshape(words.shape[0], -1)
    return paneled(words) if panels else words


def paneled(words: torch.Tensor) -> torch.Tensor:
    """Words (ceil(N / 8), K) as panels."""
    high = PANEL // ROWS
    padded = torch.nn.functional.pad(words, (0, 0, 0, -words.shape[0] % high))
    return padded.reshape(-1, high, padded.shape[1] // GROUP, GROUP).transpose(1, 2).reshape(-1, GROUP)


def shapes(N: int, K: int) -> dict[bool, tuple[int, int]]:
    """The shapes of packed weights, without and with panels."""
    return {False: (ceil_div(N, ROWS), K), True: (ceil_div(N, PANEL) * K // 16, GROUP)}


def place(first: Any, group: Any, groups: int, panels: bool) -> tuple[Any, Any]:
    """Where the words of a group begin, of the rows from ``first`` on, of ``groups`` in all."""
    if panels:
        return (first // PANEL * groups + group) * (PANEL // ROWS) + first % PANEL // ROWS, 0
    return first // ROWS, group * GROUP


# ---- the kernel


def product(
    M: int,
    N: int,
    K: int,
    BM: int,
    BN: int,
    groups: int,
    stages: int,
    threads: int,
    split: int,
    cluster: int,
    pdl: bool,
    dtype: str,
    out: str,
    zeros: bool,
    panels: bool,
) -> Any:
    """C (split, M, N) = A (M, K) · dequantised Wᵀ (packed: ceil(N / 8), K), each a sum over its share of the
    groups, ``groups`` of them in a stage. Scales, zeros: (K // 128, N). ``cluster`` blocks side by side read
    equal activations, which TMA brings all of them at once."""
    steps = ceil_div(K // GROUP, split * groups)
    own = steps * groups
    magic, base = MAGIC[dtype]

    @T.macro
    def body(A, W, scales, zeros, C):
        blocks = ceil_div(N, BN * cluster) * cluster
        with T.Kernel(blocks, T.ceildiv(M, BM), split, threads=threads, cta_cluster=cluster, pdl=pdl) as (
            bx,
            by,
            bz,
        ):
            a = [T.alloc_shared((BM, GROUP), dtype) for _ in range(groups)]
            w = [T.alloc_shared((BN // ROWS, GROUP), "int32") for _ in range(groups)]
            words = T.alloc_fragment((BN, WORDS), "int32")
            scale, zero = T.alloc_shared((own, BN), dtype), T.alloc_shared((own, BN), "uint8")
            offset, acc = T.alloc_fragment((BN,), dtype), T.alloc_fragment((BN, BM), "float32")
            weights = [T.alloc_fragment((BN, GROUP), dtype) for _ in range(min(groups, 2))]
            part = [T.alloc_fragment((BN, BM), "float32") for _ in range(min(groups, 2))]
            pairs = [T.view(t, (BN, GROUP // 2), "int32") for t in weights]
            T.copy(scales[bz * own, bx * BN], scale)
            if zeros is not None:
                T.copy(zeros[bz * own, bx * BN], zero)
            T.clear(acc)
            for step in T.Pipelined(steps, num_stages=stages):
                for g in range(groups):
                    group = (bz * steps + step) * groups + g
                    row, column = place(bx * BN, group, K // GROUP, panels)
                    T.copy(W[row, column], w[g])
                    T.copy(A[by * BM, group * GROUP], a[g])
                for g in range(groups + 1):
                    if g < groups:
                        for i, j in T.Parallel(BN, WORDS):
                            words[i, j] = w[g][i // ROWS, i % ROWS * WORDS + j]
                        for i, p in T.Parallel(BN, GROUP // 2):
                            pairs[g % 2][i, p] = (
                                words[i, p % 4 * 4 + p // 16] >> (p // 4 % 4 * 4)
                            ) & 0x000F000F | magic
                        if zeros is not None:
                            for i in T.Parallel(BN):
                                offset[i] = T.cast(T.cast(zero[step * groups + g, i], "int32") + base, dtype)
                        for i, k in T.Parallel(BN, GROUP):
                            weights[g % 2][i, k] = weights[g % 2][i, k] - (
                                T.cast(base + MIDDLE, dtype) if zeros is None else offset[i]
                            )
                        T.gemm(weights[g % 2], a[g], part[g % 2], transpose_B=True, clear_accum=True)
                    if g > 0:  # the group before, whose product ran meanwhile
                        for i, j in T.Parallel(BN, BM):
                            acc[i, j] = acc[i, j] + part[(g - 1) % 2][i, j] * T.cast(
                                scale[step * groups + g - 1, i], "float32"
                            )
            for i, j in T.Parallel(BN, BM):
                C[bz, by * BM + j, bx * BN + i] = acc[i, j]

    return declared(body, M, N, K, (split, M, filled(N, 4) if split > 1 else N), dtype, out, zeros, panels)


@T.macro
def activations(A: Any, a: Any, warp: Any, at: Any):
    """A group's of the warp; the last row in place of those that are none, so that no load has a
    condition."""
    rows, given = a.shape[1], A.shape[0]
    if given in (1, rows):
        T.copy(A[0, at], a[warp, :, :])
    else:
        for i, j in T.Parallel(rows, GROUP):
            a[warp, i, j] = A[T.min(i, given - 1), at + j]


def streamed(
    M: int,
    N: int,
    K: int,
    BN: int,
    rows: int,
    warps: int,
    ahead: int,
    early: int,
    pdl: bool,
    dtype: str,
    zeros: bool,
    panels: bool,
) -> Any:
    """The same for at most 16 rows of A, at the speed of memory: C (M, N) is written once.

    A block has ``BN`` columns of C. Each warp takes ``rows`` of them and every so many-th group of k, and
    works alone to the end: words go from memory into registers, ``ahead`` groups of them under way, become
    the product's left operand there, and meet the group's activations in a tile of the warp's own. Then the
    warps' sums are added, in order.
    """
    tiles = BN // rows
    shares = warps // tiles
    own = ceil_div(K // GROUP, shares * ahead) * ahead  # groups of a warp
    BM, width, whole = M if M == 1 else 8 if M <= 8 else 16, GROUP // max(early, 1), early < 0
    held = own * shares * GROUP if whole else GROUP  # of k in a tile of activations
    magic, base = MAGIC[dtype]

    @T.macro
    def body(A, W, scales, zeros, C):
        with T.Kernel(T.ceildiv(N, BN), threads=32 * warps, pdl=pdl) as bx:
            a, sums = (
                T.alloc_shared((1 if whole else warps, BM, held), dtype),
                T.alloc_shared((shares, BN, BM), "float32"),
            )
            ready: Any = T.alloc_signal((1,)) if whole else None
            with T.Scale("warp") as (warp, _):
                first, share = bx * BN + warp % tiles * rows, warp // tiles
                later = T.alloc_fragment((BM, width), dtype)
                words = [T.alloc_fragment((rows, WORDS), "int32") for _ in range(ahead)]
                scale = [T.alloc_fragment((rows,), dtype) for _ in range(ahead)]
                zero = [T.alloc_fragment((rows,), "uint8") for _ in range(ahead)]
                offset, weights = (
                    T.alloc_fragment((rows,), dtype),
                    [T.alloc_fragment((rows, PART), dtype) for _ in range(2)],
                )
                pairs = [T.view(t, (rows, PART // 2), "int32") for t in weights]
                part, acc = T.alloc_fragment((rows, BM), "float32"), T.alloc_fragment((rows, BM), "float32")

                def load(n, k):
                    group = k * shares + share
                    row, column = place(first, group, K // GROUP, panels)
                    for i, j in T.Parallel(rows, WORDS):
                        words[n][i, j] = W[row + i // ROWS, column + i % ROWS * WORDS + j]
                    T.copy(scales[group, first], scale[n])
                    if zeros is not None:
                        T.copy(zeros[group, first], zero[n])

                def fetch(k, piece):
                    T.copy(A[0, (k * shares + share) * GROUP + piece * width], later)

                def multiply(k, n, more):
                    """Group k + n; ``more``: there are others behind those whose words are under way."""
                    if zeros is not None:
                        for i in T.Parallel(rows):
                            offset[i] = T.cast(T.cast(zero[n][i], "int32") + base, dtype)
                    for c in range(GROUP // PART):
                        at = c * PART + (((k + n) * shares + share) * GROUP if whole else 0)
                        for i, p in T.Parallel(rows, PART // 2):
                            pairs[c % 2][i, p] = (
                                words[n][i, p % 4 * 4 + c] >> (p // 4 * 4)
                            ) & 0x000F000F | magic
                        for i, j in T.Parallel(rows, PART):
                            weights[c % 2][i, j] = weights[c % 2][i, j] - (
                                T.cast(base + MIDDLE, dtype) if zeros is None else offset[i]
                            )
                        T.gemm(
                            weights[c % 2],
                            a[0 if whole else warp, :, at : at + PART],
                            part,
                            transpose_B=True,
                            clear_accum=c == 0,
                        )
                        if (
                            early > 0 and (c + 1) * PART % width == 0
                        ):  # the next group's piece takes this one's place
                            piece = c * PART // width
                            if more or n + 1 < ahead:
                                T.copy(later, a[warp, :, piece * width : piece * width + width])
                            if more or n + 1 + (piece + 1) // early < ahead:
                                fetch(k + n + 1 + (piece + 1) // early, (piece + 1) % early)
                                T.barrier()  # else ptxas moves the loads behind later products
                    for i, j in T.Parallel(rows, BM):
                        acc[i, j] = acc[i, j] + part[i, j] * T.cast(scale[n][i], "float32")
                    if early == 0 and (more or n + 1 < ahead):
                        activations(A, a, warp, ((k + n + 1) * shares + share) * GROUP)
                    if more:
                        load(n, k + n + ahead)
                        T.barrier()

                T.clear(acc)
                for n in range(ahead):
                    load(n, n)
                if whole:
                    chunk = held // warps
                    T.copy(A[0, warp * chunk], a[0, :, warp * chunk : warp * chunk + chunk])
                    T.signal(ready[0])
                    T.wait(ready[0], warps)
                else:
                    activations(A, a, warp, share * GROUP)
                if early > 0:
                    fetch(1, 0)
                for step in T.serial(own // ahead - 1):
                    for n in range(ahead):
                        multiply(step * ahead, n, True)
                for n in range(ahead):
                    multiply(own - ahead, n, False)
                for i, j in T.Parallel(rows, BM):
                    sums[share, warp % tiles * rows + i, j] = acc[i, j]
            for i, j in T.Parallel(BN, BM):
                C[j, bx * BN + i] = functools.reduce(
                    lambda x, y: x + y, [sums[s, i, j] for s in range(shares)]
                )

    return declared(body, M, N, K, (M, N), dtype, dtype, zeros, panels)


def declared(
    body: Any,
    M: int,
    N: int,
    K: int,
    result: tuple[int, ...],
    dtype: str,
    out: str,
    zeros: bool,
    panels: bool,
) -> Any:
    """The kernel of ``body(A, W, scales, zeros or None, C)``."""
    packed, scaled = shapes(N, K)[panels], (K // GROUP, N)

    @T.prim_func
    def w4a16(
        A: T.Tensor((M, K), dtype),
        W: T.Tensor(packed, "int32"),
        scales: T.Tensor(scaled, dtype),
        C: T.Tensor(result, out),
    ):
        body(A, W, scales, None, C)

    @T.prim_func
    def w4a16_zeros(
        A: T.Tensor((M, K), dtype),
        W: T.Tensor(packed, "int32"),
        scales: T.Tensor(scaled, dtype),
        zeros: T.Tensor(scaled, "uint8"),
        C: T.Tensor(result, out),
    ):
        body(A, W, scales, zeros, C)

    return w4a16_zeros if zeros else w4a16


# ---- what people call


@dataclass(frozen=True)
class Config:
    """How the work is cut. BN: columns of the result in a tile.

    With ``warps``, for at most 16 rows, `streamed`: so many in a block, each with ``rows`` columns, ``ahead``
    groups of which it has under way, at least two; activations come in ``early`` pieces of a group, each
    while the one before is multiplied (0: when they are needed, -1: all before the first product); ``pdl``:
    begins while the launch in front ends. Else `product`: ``BM`` rows of a in a tile, ``groups`` in a stage
    (from two on the weights of one are computed under the product of the other), stages of the rings, threads
    of a block, shares of k, blocks of a cluster.
    """

    BN: int = 64
    warps: int = 0
    rows: int = 16
    ahead: int = 2
    early: int = 1
    pdl: int = 1
    BM: int = 16
    groups: int = 1
    stages: int = 4
    threads: int = 128
    split: int = 1
    cluster: int = 1


#: what each kernel takes of a `Config`
STREAMED = ("BN", "warps", "rows", "ahead", "early", "pdl")
PIPELINED = ("BM", "BN", "groups", "stages", "threads", "split", "cluster", "pdl")


@functools.cache
def chosen(M: int, N: int, K: int, processors: int = 132) -> Config:
    """The configuration for a class of shapes."""
    if M <= 16:
        BN = next((b for b in (64, 32) if 10 * ceil_div(N, b) >= 9 * processors), 16 if M == 1 else 32)
        rows, most, early = (16, 32, -1 if K <= 1 << 15 else 1) if M == 1 else (BN, 512 // BN, 0)
        shares = 1 << max(1, K // GROUP // 2).bit_length() - 1  # each warp has two groups
        return Config(BN=BN, warps=min(most, BN // rows * shares), rows=rows, early=early)
    # shares of k, so many that all multiprocessors have some, of four steps each at least
    if M <= 64:
        split = min(processors // ceil_div(N, 64), K // GROUP // 4)
        return Config(BM=32 if M <= 32 else 64, split=max(split, 2 if K >= 4096 else 1))
    groups = 4 if K % 512 == 0 else 2
    split = min(processors // (ceil_div(N, 64) * ceil_div(M, 128)), K // GROUP // (2 * groups))
    return Config(BM=128, threads=256, groups=groups, stages=1 if groups == 4 else 2, split=max(1, split))


@host.checked
def w4a16_matmul(
    a: torch.Tensor,
    w: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """a · Wᵀ with W[n, k] = (value[n, k] - zero[k // 128, n]) · scale[k // 128, n]; summed in float32 and
    rounded once.

    Args:
        a: (M, K) of bfloat16 or float16, contiguous, K a multiple of 128. w: of int32, made by `pack`, in
            panels or not.
        scales: (K // 128, N) of a's dtype. zeros: (K // 128, N) of uint8, from 0 to 15; without them all are
            8.
        out: (M, N) of a's dtype, contiguous, takes the result. config: how the work is cut, where the own
            choice is not wanted.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    tables = [x for x in (scales, zeros) if x is not None]
    if (
        any(x.dim() != 2 or not x.is_contiguous() for x in (a, w, *tables))
        or a.shape[1] % GROUP
        or 0 in a.shape
    ):
        raise TileValueError(
            f"a of {tuple(a.shape)}, w of {tuple(w.shape)}",
            expected=f"contiguous matrices, a of (M, K), K a multiple of {GROUP}",
        )
    (M, K), N = a.shape, scales.shape[1]
    panels = tuple(w.shape) != shapes(N, K)[False]
    if tuple(w.shape) != shapes(N, K)[panels] or any(tuple(x.shape) != (K // GROUP, N) for x in tables):
        raise TileValueError(
            f"a of {tuple(a.shape)}, w of {tuple(w.shape)}, scales of {tuple(scales.shape)}",
            expected=f"w {shapes(N, K)[False]}, or {shapes(N, K)[True]} in panels, scales and zeros "
            f"({K // GROUP}, N), contiguous",
        )
    name = host.dtype_name(a)
    if (
        name not in MAGIC
        or w.dtype != torch.int32
        or scales.dtype != a.dtype
        or zeros is not None
        and zeros.dtype != torch.uint8
    ):
        raise TileTypeError(
            f"a of {name}, w of {host.dtype_name(w)}, scales of {host.dtype_name(scales)}",
            expected="a and scales of bfloat16 or float16, w of int32, zeros of uint8",
        )
    c = host.result(out, (M, N), a.dtype, a)
    how = config or chosen(M, N, K, host.multiprocessors(a.device))
    inputs = (a, w, scales) if zeros is None else (a, w, scales, zeros)
    fields = STREAMED if how.warps else PIPELINED
    what = {
        "M": M,
        "N": N,
        "K": K,
        **{f: getattr(how, f) for f in fields},
        "dtype": name,
        "zeros": zeros is not None,
        "panels": panels,
    }
    if panels and PANEL % how.BN:
        raise TileValueError(f"{how} for weights in panels of {PANEL} rows", expected="BN that divides them")
    if how.warps:
        if M > 16:
            raise TileValueError(f"{how} for {M} rows", expected="at most 16 rows")
        host.launch(streamed, (*inputs, c), **what)
        return c
    if how.split == 1:
        host.launch(product, (*inputs, c.view(1, M, N)), **what, out=name)
        return c
    partial = torch.empty(how.split, M, filled(N, 4), dtype=torch.float32, device=a.device)
    host.launch(product, (*inputs, partial), **what, out="float32")
    host.launch(combine, (partial, c), M=M, N=N, split=how.split, out=name, bias=False, activation="")
    return c


# ---- what is right, and what it is measured against


def unpack(w: torch.Tensor, N: int, K: int) -> torch.Tensor:
    """The weights (N, K) from 0 to 15 that `pack` made words of."""
    if tuple(w.shape) != shapes(N, K)[False]:
        w = w.reshape(-1, K // GROUP, PANEL // ROWS, GROUP).transpose(1, 2).reshape(-1, K)
    nibbles = (
        torch.stack([(w >> (4 * k)) & 15 for k in range(8)], -1)
        .reshape(w.shape[0], -1, ROWS, WORDS, 8)
        .transpose(1, 2)
    )
    made = torch.empty(*nibbles.shape[:3], GROUP, dtype=torch.int32, device=w.device)
    made[..., order(w.device)] = nibbles
    return made.reshape(ROWS * w.shape[0], -1)[:N]


def dequantised(w: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    """The weights (N, K) in float64."""
    spread = lambda x: x.T.double().repeat_interleave(GROUP, 1)  # noqa: E731
    return (
        unpack(w, scales.shape[1], scales.shape[0] * GROUP).double()
        - (MIDDLE if zeros is None else spread(zeros))
    ) * spread(scales)


def draw(
    M: int,
    N: int,
    K: int,
    dtype: str = "bfloat16",
    zeros: bool = False,
    device: Any = "cpu",
    seed: int = 0,
    panels: bool = True,
    **config: int,
) -> dict[str, Any]:
    """Normal random activations, weights and zeros from 0 to 15, scales around 0.1; ``config``: fields of a
    `Config`."""
    g = generator(device, seed)
    made: dict[str, Any] = {
        "a": normal((M, K), dtype, g),
        "w": torch.randint(
            -(1 << 31), 1 << 31, shapes(N, K)[panels], generator=g, device=device, dtype=torch.int64
        ).to(torch.int32),
        "scales": (torch.rand(K // GROUP, N, generator=g, device=device) * 0.1 + 0.05).to(
            getattr(torch, dtype)
        ),
    }
    if zeros:
        made["zeros"] = torch.randint(0, 16, (K // GROUP, N), generator=g, device=device, dtype=torch.uint8)
    if config:
        made["config"] = Config(**config)
    return made


def reference(
    a: torch.Tensor,
    w: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[Expected, ...]:
    """In float64."""
    x, y = a.double(), dequantised(w, scales, zeros)
    return (expected(x @ y.T, a.dtype, noise=summed(x.abs() @ y.abs().T, 2 * a.shape[1])),)


def cublas(
    a: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None, **_: Any
) -> Callable[[], Any]:
    """torch.mm of a and of weights that were made 16-bit floats before."""
    y = dequantised(w, scales, zeros).to(a.dtype)
    out = torch.empty(a.shape[0], y.shape[0], device=a.device, dtype=a.dtype)
    return lambda: torch.mm(a, y.T, out=out)


def _cases() -> tuple[Case, ...]:
    small: list[dict[str, Any]] = [
        {"M": 1, "N": 72, "K": 256},
        {"M": 13, "N": 64, "K": 384, "dtype": "float16", "zeros": True},
        {"M": 5, "N": 40, "K": 128, "zeros": True},
        {"M": 11, "N": 76, "K": 1152, "warps": 4, "rows": 32, "early": 2, "zeros": True, "dtype": "float16"},
        {"M": 1, "N": 72, "K": 896, "warps": 8, "early": -1, "zeros": True},
        {"M": 20, "N": 64, "K": 640, "split": 3, "BM": 32, "stages": 2},
        {"M": 3, "N": 72, "K": 640, "groups": 2, "stages": 2, "split": 2, "zeros": True},
        {"M": 70, "N": 72, "K": 640, "BM": 128, "groups": 2, "stages": 2, "threads": 256, "split": 1},
        {"M": 70, "N": 136, "K": 256, "zeros": True},
        {"M": 1, "N": 72, "K": 896, "warps": 8, "early": -1, "zeros": True, "panels": False},
        {"M": 11, "N": 136, "K": 1152, "warps": 2, "rows": 64, "early": 0, "panels": False},
        {"M": 20, "N": 136, "K": 640, "split": 3, "BM": 32, "stages": 2, "panels": False},
    ]
    ragged = [
        (1, 520, 1024),
        (3, 8192, 8192),
        (16, 1000, 4224),
        (33, 264, 4096),
        (64, 264, 4096),
        (128, 1032, 4096),
        (300, 520, 640),
    ]
    gpu = [
        {"M": m, "N": n, "K": k, "dtype": d, "zeros": z}
        for m, n, k in ragged
        for d in MAGIC
        for z in (False, True)
    ]
    gpu += [
        {"M": m, "N": n, "K": k, "dtype": "bfloat16", "zeros": True, "panels": False} for m, n, k in ragged
    ]
    bars = {1: 3.0, 5: 2.37, 8: 2.37, 12: 2.37, 16: 2.5, 128: 1.0}
    bench = [
        ({"M": m, "N": 8192, "K": 8192, "zeros": z}, bar) for m, bar in bars.items() for z in (False, True)
    ]
    return (
        *(Case(s, small=True) for s in small),
        *(Case(s) for s in gpu),
        *(Case(s, bar=bar) for s, bar in bench),
    )


OP = Op(
    name="w4a16_matmul",
    run=w4a16_matmul,
    draw=draw,
    reference=reference,
    cases=_cases(),
    peers={"cuBLAS bf16": cublas},
    flops=lambda M, N, K, **_: 2.0 * M * N * K,
    moved=lambda M, N, K, **_: N * K / 2 + N * K / GROUP * 2 + 2.0 * M * (N + K),
)
