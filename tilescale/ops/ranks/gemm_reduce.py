"""``matmul_all_reduce(x, w)``: act(Σ over ranks of x · w + bias) on every rank, the same bits on each, in one
kernel. Each rank holds columns of x and rows of w, so it has a part of every element.

Each tile of the result has an owner. Blocks multiply the next rank's tiles, then those of the one behind it,
and the own ones last; a tile is rounded to the operands' dtype, stored, and put to its owner while the block
multiplies on. When a block has put all its tiles it adds the own ones that it computed, in the order of
ranks, finishes them and puts them to everyone; then it copies what arrives into the result. Small products
are computed apart: `matmul`, then one shot or two of `all_reduce`, with bias and activation inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import tilescale.language as T
from tilescale.ops import gemm, host
from tilescale.ops.gemm_kernels import activated, ceil_div, load, panelled
from tilescale.ops.ranks import fp8, reduce
from tilescale.ops.ranks.case import Case, Expected, RankOp
from tilescale.ops.ranks.gemm_scatter import RAGGED, SMALL, Config, draw
from tilescale.ops.ranks.gemms import (
    alone,
    biased,
    checked,
    chosen,
    configured,
    constants,
    depth,
    inner_of,
    knobs,
    library_sum,
    product,
    reference_sum,
    tiles,
    worthwhile,
)
from tilescale.ops.ranks.groups import Group, share, team_of
from tilescale.ops.ranks.workspace import workspace


@functools.cache
def choose(M: int, N: int, K: int, world: int, dtype: str, units: int = 132) -> Config:
    """For M rows and a rank's share K of the inner extent: fused where every rank's tiles fill the GPU. By a
    model, as `gather_gemm.choose`."""
    cut = tiles(M, N, K, dtype, units)
    fused = worthwhile(M, N, K) and ceil_div(M, cut["BM"]) * ceil_div(N, cut["BN"]) >= max(units // 2, world)
    return Config(fused=fused, **cut)


# ---- the kernel


def gemm_reduce(
    M: int, N: int, K: int | None, align: int, world: int, BM: int, BN: int, BK: int, stages: int,
    threads: int, blocks: int, panel: int, slab: int, dtype: str, out: str, trans_b: bool, bias: bool,
    activation: str,
) -> Any:  # fmt: skip
    """C (M, N) = act(Σ over ranks of A · op(W) + bias). A (M, K); W (K, N) or (N, K); K None: known to the
    call, a multiple of ``align``. Tile q is rank q % world's, its number q // world. own (world, number, BM,
    BN): this rank's parts, by owner; parts: all ranks' for the own tiles; sums: all owners' tiles."""
    tall, across = ceil_div(M, BM), ceil_div(N, BN)
    each = ceil_div(tall * across, world)
    shift = -(world - 1) * each % blocks
    whole = each * world == tall * across  # all ranks have equally many tiles
    k_extent = T.dynamic("K", multiple_of=align) if K is None else K
    b_shape, b_tile = ((N, k_extent), (BN, BK)) if trans_b else ((k_extent, N), (BK, BN))

    @T.macro
    def add_up(own, parts, add, sums, C, number, row, col, rank, n, part, total):
        """The own tile at (row, col), finished: in sums, and in C."""
        for s in T.serial(BM // slab):
            T.clear(total)
            for r in T.serial(n):
                if r == rank:
                    T.copy(own[rank, number, s * slab, 0], part)
                else:
                    T.copy(parts[r, number, s * slab, 0], part)
                for i, j in T.Parallel(slab, BN):
                    total[i, j] += T.cast(part[i, j], "float32")
            if bias or activation:
                for i, j in T.Parallel(slab, BN):
                    x = total[i, j] + add[col + j] if bias else total[i, j]
                    total[i, j] = activated(x, activation)
            T.copy(total, sums[rank, number, s * slab, 0])
            T.copy(total, C[row + s * slab, col])

    @T.prim_func
    def gemm_ar(
        A: T.Tensor((M, k_extent), dtype),
        W: T.Tensor(b_shape, dtype),
        add: T.Tensor((N if bias else 1,), out),
        own: T.Tensor((world, each, BM, BN), dtype),
        parts: T.SymmTensor((world, each, BM, BN), dtype),
        sums: T.SymmTensor((world, each, BM, BN), out),
        given: T.Signal((each,)),
        done: T.Signal((world, each)),
        C: T.Tensor((M, N), out),
    ):
        with T.Kernel(blocks, threads=threads) as b, T.Scale("device") as (rank, n):
            x, w = T.alloc_shared((BM, BK), dtype), T.alloc_shared(b_tile, dtype)
            acc = T.alloc_fragment((BM, BN), "float32")
            for tile in T.Persistent(world * each, blocks, b):
                owner, number = (rank + 1 + tile // each) % world, tile % each
                if whole or number * world + owner < tall * across:
                    i, j = panelled(number * world + owner, tall, across, panel)
                    T.clear(acc)
                    for k in T.Pipelined(T.ceildiv(k_extent, BK), num_stages=stages):
                        load(A, W, x, w, i * BM, j * BN, k * BK, False, trans_b)
                        T.gemm(x, w, acc, transpose_B=trans_b)
                    T.copy(acc, own[owner, number, 0, 0])
                    if owner != rank:
                        T.copy(
                            own[owner, number, 0:BM, 0:BN],
                            parts[rank, number, 0:BM, 0:BN],
                            dst=owner,
                            signal=given[number],
                            blocking=False,
                        )
            part, total = T.alloc_fragment((slab, BN), dtype), T.alloc_fragment((slab, BN), "float32")
            # the tiles whose own part this block has computed
            for number in T.Persistent(each, blocks, (b + shift) % blocks):
                if whole or number * world + rank < tall * across:
                    i, j = panelled(number * world + rank, tall, across, panel)
                    T.wait(given[number], n - 1)
                    add_up(own, parts, add, sums, C, number, i * BM, j * BN, rank, n, part, total)
                    for hop in T.serial(1, n):
                        T.copy(
                            sums[rank, number, 0:BM, 0:BN],
                            sums[rank, number, 0:BM, 0:BN],
                            dst=(rank + hop) % n,
                            signal=done[rank, number],
                            blocking=False,
                        )
            slice_ = T.alloc_fragment((slab, BN), out)
            for tile in T.Persistent((world - 1) * each, blocks, b):
                owner, number = (rank + 1 + tile // each) % world, tile % each
                if whole or number * world + owner < tall * across:
                    i, j = panelled(number * world + owner, tall, across, panel)
                    T.wait(done[owner, number])
                    for s in T.serial(BM // slab):
                        T.copy(sums[owner, number, s * slab, 0], slice_)
                        T.copy(slice_, C[i * BM + s * slab, j * BN])

    return gemm_ar


# ---- what people call


@host.checked
def matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "",
    *,
    scale_x: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
    group: Group = None,
    inner: int | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """act(Σ over ranks of x · w + bias), the same bits on every rank. Each rank's part is summed in float32
    and rounded to x's dtype; the parts are added in float32 in the order of ranks and rounded once.
    Collective.

    Args:
        x: all M rows, this rank's columns (M, K) of bfloat16, float16 or float32. w: this rank's rows (K, N),
            contiguous or the transpose of something contiguous.
        bias: (N,) of the result's dtype, added once, alike on all ranks. activation: "relu", "gelu" (by erf)
            or "silu".
        scale_x, scale_w: of 8-bit floats, as `fp8_matmul` takes them for x and w: float32, one number each or
            one a block of 128; the steps are taken one after the other then, and parts have the result's
            dtype.
        group: who takes part, see `groups.team_of`; all ranks without.
        inner: all ranks' K together, split as torch.chunk does; without it every rank has as many.
        out: (M, N), contiguous, takes the result. out_dtype: of the result; x's without, or float32.
        config: how the work is done, where the choice by the shape is not wanted; alike on all ranks.

    Raises:
        TileValueError, TileTypeError: shapes, dtypes or groups that do not fit.
    """
    team = team_of(group)
    if fp8.asked(x, scale_x, scale_w, "matmul_all_reduce"):
        assert scale_x is not None and scale_w is not None
        inner_of(inner, x.shape[1], team)
        own_part = fp8.part(x, w, scale_x, scale_w, bias, activation, out, out_dtype)
        c = host.result(out, tuple(own_part.shape), own_part.dtype, x)
        if c.numel():
            size = own_part.numel() * own_part.element_size()
            way = reduce.choose(size, team.size, "rank", False)
            reduce.reduced(own_part, c, team, way, bias, activation)
        return c
    given = checked("matmul_all_reduce", x, w, bias, activation, out, out_dtype, empty=inner is not None)
    M, N = given.rows, given.N
    K, align = inner_of(inner, given.K, team)
    c = host.result(out, (M, N), given.out, given.x)
    if M == 0:
        return c
    if team.size == 1:
        return gemm.matmul(x, w, bias, activation, out=c)
    how = config or configured(team, "matmul_all_reduce", choose, M, given, K)
    if not how.fused:
        way = reduce.choose(M * N * x.element_size(), team.size, "rank", False)
        reduce.reduced(product(given.x, w), c, team, way, bias, activation)
        return c
    space, each = workspace(team), ceil_div(ceil_div(M, how.BM) * ceil_div(N, how.BN), team.size)
    shape = (team.size, each, how.BM, how.BN)
    parts, sums = space.tensors(x, (shape, x.dtype), (shape, c.dtype))
    flags = space.counters(1 + team.size, each)
    what = constants(how, given, c, bias, activation, team.size, M=M, **depth(K, align))
    args = (given.x, given.w, biased(bias, c), x.new_empty(shape), parts, sums, flags[0], flags[1:], c)
    host.launch(gemm_reduce, args, **what)
    return c


# ---- what is right, and what it is measured against


def reference(everyone: list[dict[str, Any]]) -> list[Expected]:
    return [reference_sum(everyone)] * len(everyone)


def by_library(
    x: torch.Tensor,
    w: torch.Tensor,
    group: Any,
    bias: torch.Tensor | None = None,
    activation: str = "",
    **scaled: Any,
) -> Callable[[], Any]:
    """torch.mm, then torch.distributed's all-reduce in place (rounding where the library does), then bias and
    activation."""

    def add(part: torch.Tensor, group: Any) -> Callable[[], Any]:
        return lambda: (torch.distributed.all_reduce(part, group=group), part)[1]

    return library_sum(x, w, group, bias, activation, add, scaled)


OP = RankOp(
    name="matmul_all_reduce",
    run=matmul_all_reduce,
    draw=draw,
    reference=reference,
    **chosen(choose, inner=True),
    knobs=knobs(tuple({"slab": n} for n in (8, 16, 32))),
    alike=True,
    cases=(
        *SMALL,
        Case({"M": 700, "N": 200, "K": 9, "bias": True, "activation": "silu"}, small=True),
        *RAGGED,
        *(
            Case({"M": m, "N": n, "K": k}, bar=1.0)
            for m, n, k in (
                (8192, 8192, 8192),
                (16, 8192, 28672),
                (512, 8192, 28672),
                (2048, 8192, 28672),
            )
        ),
    ),
    peers={"library": by_library},
    alone=alone,
    flops=lambda world, M, N, K, **_: 2.0 * M * N * share(K, world),
    remote=lambda world, M, N, dtype="bfloat16", **_: (
        2.0 * (world - 1) / world * M * N * getattr(torch, dtype).itemsize
    ),
)
