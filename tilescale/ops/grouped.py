"""``grouped_matmul(a, b, sizes)``: rows of one matrix in groups, each group times a matrix of its own (the
experts of a mixture). With ``gate`` the product is the first of a gated layer (`gated_activation`): a tile of
the gate's columns and one of those that it scales are summed side by side, so only their product is stored.

How long the groups are is known on the device alone. Blocks stay and take one tile after another, group by
group; each counts the tiles of the groups as it goes. There are as many rounds as there could be tiles at
most, and those behind the last tile do nothing. A tile never reaches into the next group: rows behind its
group's end are computed and not stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilescale.language as T
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import host
from tilescale.ops.activations import GATES, IN_TORCH, activated
from tilescale.ops.case import Case, Expected, Op, expected, generator, normal, summed
from tilescale.ops.gemm_kernels import ceil_div, panelled

DTYPES = ("bfloat16", "float16")
#: how many shares of the tiles there are for each multiprocessor, where other kernels keep some of them
SHARES = 6


def share_of(block: Any, tiles: Any, blocks: int, shares: int) -> tuple[Any, Any]:
    """The first tile of a block's share and the end of it, in steps of ``blocks``: the first ``blocks``
    blocks share half of the tiles, the next ones half of the rest, and so on, the last ones what is left.

    A multiprocessor takes the next share when it is through with one. So where another kernel keeps some of
    them for up to half of the time, the others take more shares, and all end within one of the last ones. A
    block that begins costs a filled ring and an awaited store, some 4 µs, `SHARES` - 1 times.
    """
    if shares == 1:
        return block, tiles
    level = block // blocks
    stop = T.if_then_else(level == shares - 1, tiles, tiles - (tiles >> (level + 1)))
    return tiles - (tiles >> level) + block % blocks, stop


# ---- the kernel


def of_tiles(BM: int, BN: int, BK: int, K: int, n: int, stages: int, trans_b: bool, gate: str) -> Any:
    """Macros of one tile of C = A · B: ``multiply`` adds to ``acc``, one accumulator or those of the gate and
    of the rest, from A's rows from ``row`` on and B's matrix of a group, and gates them; ``leave`` writes C's
    rows from ``first`` on, those in front of ``end``."""

    @T.macro
    def multiply(A, row, B, group, col, a, b, acc):
        for k in T.Pipelined(T.ceildiv(K, BK), num_stages=stages):
            T.copy(A[row, k * BK], a)
            for h in range(len(b)):
                if trans_b:
                    T.copy(B[group, h * n + col, k * BK], b[h])
                else:
                    T.copy(B[group, k * BK, h * n + col], b[h])
            for h in range(len(b)):
                T.gemm(a, b[h], acc[h], transpose_B=trans_b)
        if gate:
            for i, j in T.Parallel(BM, BN):
                acc[0][i, j] = activated(acc[0][i, j], gate, True) * acc[1][i, j]

    @T.macro
    def leave(acc, C, first, end, col):
        if first + BM <= end:
            T.copy(acc[0], C[first, col])
        else:
            for i, j in T.Parallel(BM, BN):
                if first + i < end:
                    C[first + i, col + j] = acc[0][i, j]

    return multiply, leave


def grouped(
    N: int,
    K: int,
    G: int,
    BM: int,
    BN: int,
    BK: int,
    stages: int,
    threads: int,
    panel: int,
    blocks: int,
    dtype: str,
    trans_b: bool,
    gate: str,
    shares: int,
) -> Any:
    """C's rows of each group of ``sizes`` (G,): A's rows (M, K), any number of them, times the group's B (G,
    K, N), or (G, N, K). By ``blocks`` blocks that take one tile after another, in panels of ``panel`` rows of
    tiles of a group; or by ``shares`` times as many, see `share_of`. ``gate``: C (M, N / 2) is that
    activation of the first half of the columns times the second half."""
    n = N // 2 if gate else N
    M, wide = T.dynamic("M"), ceil_div(n, BN)
    multiply, leave = of_tiles(BM, BN, BK, K, n, stages, trans_b, gate)

    @T.prim_func
    def grouped(
        A: T.Tensor((M, K), dtype),
        B: T.Tensor((G, N, K) if trans_b else (G, K, N), dtype),
        sizes: T.Tensor((G,), "int32"),
        C: T.Tensor((M, n), dtype),
    ):
        with T.Kernel(blocks * shares, threads=threads) as block:
            a, high = T.alloc_shared((BM, BK), dtype), (BN, BK) if trans_b else (BK, BN)
            b = [T.alloc_shared(high, dtype) for _ in range(1 + bool(gate))]
            acc = [T.alloc_fragment((BM, BN), "float32") for _ in b]
            # the group that has come, its first row and first tile, its rows
            group, row, before, size = (T.alloc_var("int32") for _ in range(4))
            size = sizes[0]
            if shares == 1:
                # Rows of tiles: a group has less than one tile that is not full.
                tiles = T.min(M, T.ceildiv(M, BM) + G) * wide
            else:  # their number, which what is left of them is a part of
                tiles = T.alloc_var("int32", 0)
                for g in T.serial(G):
                    tiles = tiles + T.ceildiv(sizes[g], BM) * wide
            for tile in T.serial(*share_of(block, tiles, blocks, shares), step=blocks):
                while group < G and tile >= before + T.ceildiv(size, BM) * wide:
                    before = before + T.ceildiv(size, BM) * wide
                    row = row + size
                    group = group + 1
                    size = sizes[group]  # zero behind the last one
                if group < G:
                    down, bx = panelled(tile - before, T.ceildiv(size, BM), wide, panel)
                    first, end = row + down * BM, row + size
                    for part in acc:
                        T.clear(part)
                    multiply(A, first, B, group, bx * BN, a, b, acc)
                    leave(acc, C, first, end, bx * BN)

    return grouped


# ---- what people call


def stacked(b: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Matrices (G, K, N) as they lie one behind another, and whether what lies there are their transposes.
    Those that are neither way contiguous are copied."""
    trans_b = not b.is_contiguous()
    return (b.transpose(1, 2) if trans_b else b).contiguous(), trans_b


@host.checked
def grouped_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    sizes: torch.Tensor,
    *,
    gate: str = "",
    beside: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The first sizes[0] rows of a times b[0], the next sizes[1] rows times b[1], …; summed in float32 and
    rounded once.

    Args:
        a: (M, K) of bfloat16 or float16, contiguous. b: (G, K, N), contiguous or the transpose of a
            contiguous (G, N, K).
        sizes: (G,) of int32 on the same device, which the host never looks at; they add up to M at most. Rows
            behind them stay as they are.
        gate: "silu", "gelu" (by erf) or "relu": the result is (M, N / 2), this function of the first half of
            the columns times the second half, of float32 sums.
        beside: other kernels keep some multiprocessors meanwhile (another stream's communication): the work
            is cut so that those which are free do more of it.
        out: takes the result, contiguous; without it rows behind the groups are undefined.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    if (
        a.dim() != 2
        or b.dim() != 3
        or not a.is_contiguous()
        or sizes.shape != b.shape[:1]
        or a.shape[1] != b.shape[1]
    ):
        raise TileValueError(
            f"grouped_matmul of {tuple(a.shape)} by {tuple(b.shape)} in groups of {tuple(sizes.shape)}",
            expected="a (M, K), contiguous, b (G, K, N), sizes (G,)",
        )
    if a.dtype != b.dtype or host.dtype_name(a) not in DTYPES or sizes.dtype != torch.int32:
        raise TileTypeError(
            f"grouped_matmul of {host.dtype_name(a)} by {host.dtype_name(b)}, sizes of "
            f"{host.dtype_name(sizes)}",
            expected="bfloat16 or float16 for both, int32 for the sizes",
        )
    (M, K), (G, _, N) = a.shape, b.shape
    if 0 in (N, K, G):
        raise TileValueError(
            f"grouped_matmul of {tuple(a.shape)} by {tuple(b.shape)}",
            expected="extents of 1 at least, but of rows",
        )
    if gate and gate not in GATES or gate and N % 2:
        raise TileValueError(
            f"gate={gate!r} of {N} columns", expected="an even number of them, " + ", ".join(map(repr, GATES))
        )
    b, trans_b = stacked(b)
    wide = N // 2 if gate else N
    c = host.result(out, (M, wide), a.dtype, a)
    BM = 64 if M <= 64 * G else 128
    BN = 128 if wide <= 128 or BM == 64 else 256
    if gate:
        BN //= 2  # two tiles of them
    cut = {
        "BM": BM,
        "BN": BN,
        "BK": 64,
        "stages": 4 if BM == 128 and wide > 128 else 6,
        "threads": 128 if BM == 64 else 256,
        "panel": 16,
    }
    cut |= {"blocks": host.multiprocessors(a.device), "shares": SHARES if beside else 1}
    what = {"N": N, "K": K, "G": G, "dtype": host.dtype_name(a), "trans_b": trans_b, "gate": gate}
    if M:
        host.launch(grouped, (a, b, sizes, c), **what, **cut)
    return c


# ---- what is right, and what it is measured against


def draw(
    sizes: tuple[int, ...],
    N: int,
    K: int,
    dtype: str = "bfloat16",
    trans_b: bool = False,
    gate: str = "",
    beside: bool = False,
    device: Any = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Normal random operands. Those of a gate are scaled, so that it is neither open nor shut."""
    g = generator(device, seed)
    G, M = len(sizes), sum(sizes)
    scale = K**-0.5 if gate else 1.0
    b = normal((G, N, K), dtype, g, scale).transpose(1, 2) if trans_b else normal((G, K, N), dtype, g, scale)
    return {
        "a": normal((M, K), dtype, g),
        "b": b,
        "sizes": torch.tensor(sizes, dtype=torch.int32, device=device),
        **({"gate": gate} if gate else {}),
        **({"beside": True} if beside else {}),
    }


def reference(
    a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor, gate: str = "", beside: bool = False
) -> tuple[Expected, ...]:
    """In float64, group by group. What a sum is off a gate passes on by its slope, which is 1.13 at most."""
    total = torch.zeros(a.shape[0], b.shape[2], dtype=torch.float64, device=a.device)
    magnitude, row = torch.zeros_like(total), 0
    for k, n in enumerate(sizes.tolist()):
        x, y = a[row : row + n].double(), b[k].double()
        total[row : row + n], magnitude[row : row + n] = x @ y, x.abs() @ y.abs()
        row += n
    noise = summed(magnitude, a.shape[1])
    if not gate:
        return (expected(total, a.dtype, noise=noise),)
    (x, u), (nx, nu) = total.chunk(2, 1), noise.chunk(2, 1)
    y = IN_TORCH[gate](x)
    noise = 1.13 * nx * (u.abs() + nu) + y.abs() * nu + (x * u).abs() * 2.0**-20
    return (expected(y * u, a.dtype, noise=noise),)


def torch_grouped(a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor, gate: str = "") -> Callable[[], Any]:
    """torch's own (CUTLASS); it takes where the groups end. On processors group by group: there it takes
    some shapes alone."""
    ends = sizes.cumsum(0, dtype=torch.int32)
    grouped: Any = torch._grouped_mm

    def call() -> Any:
        if a.is_cuda:
            y = grouped(a, b, offs=ends)
        else:
            y = a.new_zeros(a.shape[0], b.shape[2])
            for w, begin, end in zip(b, [0, *ends.tolist()], ends.tolist(), strict=False):
                y[begin:end] = a[begin:end] @ w
        if gate:
            x, u = y.chunk(2, 1)
            y = IN_TORCH[gate](x) * u
        return y

    return call


def _cases() -> tuple[Case, ...]:
    small: list[dict[str, Any]] = [
        {"sizes": (5, 0, 70, 1), "N": 72, "K": 104},
        {"sizes": (5, 0, 70, 1), "N": 72, "K": 104, "trans_b": True, "dtype": "float16"},
        {"sizes": (200, 3), "N": 40, "K": 64, "dtype": "float16"},
        {"sizes": (0, 0, 9), "N": 264, "K": 24, "trans_b": True},
        {"sizes": (1,), "N": 8, "K": 8},
        {"sizes": (5, 0, 70, 300, 1), "N": 72, "K": 104, "beside": True},
        {"sizes": (5, 0, 70, 1), "N": 72, "K": 104, "gate": "silu"},
        {"sizes": (200, 3), "N": 80, "K": 64, "trans_b": True, "gate": "gelu", "dtype": "float16"},
        {"sizes": (9, 300), "N": 272, "K": 24, "gate": "relu"},
    ]
    ragged = [(1000, 1, 0, 517, 128, 129), (3,) * 40, (4096,), (0, 700), (64, 128, 256, 512, 1, 2, 3, 0)]
    gpu: list[dict[str, Any]] = [
        {"sizes": s, "N": n, "K": k, "trans_b": tb}
        for s in ragged
        for n, k in ((520, 264), (1032, 1000))
        for tb in (False, True)
    ]
    gpu += [
        {"sizes": s, "N": 1040, "K": 264, "trans_b": tb, "gate": "silu"}
        for s in ragged
        for tb in (False, True)
    ]
    even, uneven = (1024,) * 8, (3000, 17, 1200, 800, 2048, 127, 0, 1000)
    bench: list[dict[str, Any]] = [
        {"sizes": s, "N": 4096, "K": 4096, "trans_b": tb}
        for s in (even, uneven, (64,) * 32)
        for tb in (False, True)
    ]
    bench += [{"sizes": s, "N": 4096, "K": 7168, "gate": "silu"} for s in ((2048,) * 16, (128,) * 16)]
    return (
        *(Case(s, small=True) for s in small),
        *(Case(s) for s in gpu),
        *(Case(s, bar=1.0) for s in bench),
    )


OP = Op(
    name="grouped_matmul",
    run=grouped_matmul,
    draw=draw,
    reference=reference,
    cases=_cases(),
    peers={"torch._grouped_mm": torch_grouped},
    flops=lambda sizes, N, K, **_: 2.0 * sum(sizes) * N * K,
    moved=lambda sizes, N, K, **_: 2.0 * (sum(sizes) * (K + N) + sum(1 for s in sizes if s) * K * N),
)
