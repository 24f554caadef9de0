"""``matmul_all_reduce(x, w)``: act(Σ over ranks of x · w + bias) on every rank, the same bits on each, in one
kernel. Each rank holds columns of x and rows of w, so it has a part of every element.

Each tile of the result has an owner. Blocks multiply tiles of all owners in turn (`gemms.turn`). Another
owner's tile is rounded to the operands' dtype, stored, and put to its owner while the block multiplies on. An
own tile comes late enough for the others' parts to be there: they follow the operands through their ring and
are added to the accumulators, in the order of distance. The finished tile is stored and put to everyone. When
a block has computed all its tiles it copies what arrives into the result. Small products
are computed apart: `matmul`, then one shot or two of `all_reduce`, with bias and activation inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import tilescale.language as T
from tilescale.comm.backend import Team
from tilescale.ops import host
from tilescale.ops.gemm_kernels import ceil_div, finish, load, panelled
from tilescale.ops.prepared import Plan
from tilescale.ops.ranks import fp8, gemm_engine, reduce
from tilescale.ops.ranks.case import Case, Expected, RankOp
from tilescale.ops.ranks.gemm_scatter import RAGGED, SMALL, Config, draw
from tilescale.ops.ranks.gemms import (
    add_parts,
    added_up,
    alone,
    alone_there,
    biased,
    by_copies,
    checked,
    chosen,
    configured,
    constants,
    counted,
    depth,
    in_turn,
    inner_of,
    knobs,
    lead_of,
    library_sum,
    load_packed,
    nothing,
    packed_of,
    packed_shape,
    places,
    product,
    reference_sum,
    store_packed,
    tiles,
    told,
    turn,
    worthwhile,
)
from tilescale.ops.ranks.groups import Group, share, team_of
from tilescale.ops.ranks.workspace import Workspace


@functools.cache
def choose(M: int, N: int, K: int, world: int, dtype: str, units: int = 132) -> Config:
    """For M rows and a rank's share K of the inner extent: fused where every rank's tiles take more than one
    wave; in one wave no tile is computed while another one crosses. On 2 H100 the steps apart were 1.09 times
    as fast at M = 256, N = 8192, K = 28672, as fast at M = 512, and 0.93 and 0.90 at 1024 and 2048."""
    cut = tiles(M, N, K, dtype, units)
    count = ceil_div(M, cut["BM"]) * ceil_div(N, cut["BN"])
    fused = worthwhile(M, N, K, dtype) and count >= world and count > units
    count = ceil_div(ceil_div(M, cut["BM"]) * ceil_div(N, cut["BN"]), world)
    return Config(fused=fused, warps=1, **cut, **in_turn(count, cut["blocks"], world, soon=True))


# ---- the kernel


def gemm_reduce(
    M: int, N: int, K: int | None, align: int, world: int, BM: int, BN: int, BK: int, stages: int,
    threads: int, blocks: int, panel: int, run: int, lead: int, warps: int, dtype: str, out: str,
    trans_b: bool, bias: bool, activation: str,
) -> Any:  # fmt: skip
    """C (M, N) = act(Σ over ranks of A · op(W) + bias). A (M, K); W (K, N) or (N, K); K None: known to the
    call, a multiple of ``align``. Tile t is rank t % world's, its number t // world. own[h - 1]: this rank's
    parts of the tiles of the rank h behind it; parts[h - 1]: those of the rank h in front of this one, for
    the own tiles; mine: the own tiles, finished; sums[h - 1]: those of the rank h behind this one."""
    tall, across = ceil_div(M, BM), ceil_div(N, BN)
    count = ceil_div(tall * across, world)
    whole = count * world == tall * across and count % run == 0
    lead = lead_of(count, run, lead, world)
    k_extent = T.dynamic("K", multiple_of=align) if K is None else K
    b_shape, b_tile = ((N, k_extent), (BN, BK)) if trans_b else ((k_extent, N), (BK, BN))
    packed, finished = packed_shape(BM, BN, b_tile), packed_shape(BM, BN, (1, 256))

    @T.prim_func
    def gemm_ar(
        A: T.Tensor((M, k_extent), dtype),
        W: T.Tensor(b_shape, dtype),
        add: T.Tensor((N if bias else 1,), out),
        own: T.Tensor((world - 1, count, *packed), dtype),
        parts: T.SymmTensor((world - 1, count, *packed), dtype),
        mine: T.Tensor((1, count, *finished), out),
        sums: T.SymmTensor((world - 1, count, *finished), out),
        arrived: T.Signal((count,)),
        done: T.Signal((world - 1, count)),
        C: T.Tensor((M, N), out),
    ):
        with (
            T.Kernel(blocks, threads=threads, awaited=True, comm_warps=warps) as b,
            T.Scale("device") as (rank, n),
        ):
            x, w = T.alloc_shared((BM, BK), dtype), T.alloc_shared(b_tile, dtype)
            acc = T.alloc_fragment((BM, BN), "float32")
            for place in T.Persistent(places(count, run, world), blocks, b, rotate=run % blocks):
                hop, number = turn(place, count, run, lead, world)
                owner = (rank + hop) % world
                if whole or (number < count and number * world + owner < tall * across):
                    i, j = panelled(number * world + owner, tall, across, panel)
                    T.clear(acc)
                    for k in T.Pipelined(T.ceildiv(k_extent, BK), num_stages=stages):
                        load(A, W, x, w, i * BM, j * BN, k * BK, False, trans_b)
                        T.gemm(x, w, acc, transpose_B=trans_b)
                    # bounds that show that nothing lies outside
                    h, q = T.max(T.min(hop - 1, world - 2), 0), T.max(T.min(number, count - 1), 0)
                    if hop > 0:
                        store_packed(acc, own, h, q)
                        T.copy(
                            own[h, q, 0 : packed[0], 0 : packed[1]],
                            parts[h, q, 0 : packed[0], 0 : packed[1]],
                            dst=(rank + hop) % n,
                            signal=arrived[q],
                            blocking=False,
                        )
                    else:
                        add_parts(acc, parts, w, arrived, q, world - 1, stages)
                        finish(acc, add if bias else None, C, i * BM, j * BN, activation, False)
                        store_packed(acc, mine, 0, q)
                        for at in T.serial(world - 1):
                            T.copy(
                                mine[0, q, 0 : finished[0], 0 : finished[1]],
                                sums[at, q, 0 : finished[0], 0 : finished[1]],
                                dst=(rank + world - 1 - at) % n,
                                signal=done[at, q],
                                blocking=False,
                            )
            for tile in T.Persistent((world - 1) * count, blocks, b):
                number, at = tile // (world - 1), tile % (world - 1)
                owner = (rank + 1 + at) % world
                if whole or number * world + owner < tall * across:
                    i, j = panelled(number * world + owner, tall, across, panel)
                    T.wait(done[at, number])
                    load_packed(acc, sums, at, number)
                    finish(acc, None, C, i * BM, j * BN, "", False)

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
    """act(Σ over ranks of x · w + bias), the same bits on every rank. Each rank's part is summed in float32.
    Each tile is added by one rank: the others' parts, rounded to x's dtype, to its own one, in float32 and in
    a fixed order; it is rounded once. Collective.

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
    if fp8.asked(x, scale_x, scale_w, config, "matmul_all_reduce"):
        assert scale_x is not None and scale_w is not None
        inner_of(inner, x.shape[1], team)
        own_part = fp8.part(x, w, scale_x, scale_w, bias, activation, out, out_dtype)
        c = host.result(out, tuple(own_part.shape), own_part.dtype, x)
        if c.numel():
            size = own_part.numel() * own_part.element_size()
            way = reduce.choose(size, team.size, "rank", False, host.units(x.device))
            reduce.reduced(own_part, c, team, way, bias, activation)
        return c
    return added_up("matmul_all_reduce", _plan, team, x, w, bias, activation, inner, out, out_dtype, config)


def _plan(
    team: Team, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, activation: str,
    inner: int | None, out: torch.Tensor | None, out_dtype: torch.dtype | None, config: Config | None,
) -> Plan:  # fmt: skip
    """What `matmul_all_reduce` does: of the team's memory, x, w, the bias and the result."""
    given = checked("matmul_all_reduce", x, w, bias, activation, out, out_dtype, empty=inner is not None)
    M, N, world, dtype = given.rows, given.N, team.size, x.dtype
    K, align = inner_of(inner, given.K, team)
    result = (M, N), given.out
    host.taking(out, *result)
    if M == 0:
        return Plan(*result, nothing)
    if world == 1:
        return Plan(*result, alone_there(activation))
    how = counted(config or configured(team, "matmul_all_reduce", choose, M, given, K), Config)
    if how.engine:
        return Plan(*result, by_copies(gemm_engine.reduced, given, M, activation))
    if not how.fused:
        way = reduce.choose(M * N * dtype.itemsize, world, "rank", False, host.units(x.device))
        added = 0 if bias is None else N
        add = reduce.reducing(M * N, dtype, given.out, x.device, team, way, added, activation)
        return Plan(*result, lambda space, x, w, bias, c: add(space, product(x.contiguous(), w), c, bias))
    trans_b = told(given, inner, team).trans_b
    count = ceil_div(ceil_div(M, how.BM) * ceil_div(N, how.BN), world)
    others = (world - 1, count)
    shape = (*others, *packed_of("matmul_all_reduce", how, trans_b))
    finished = packed_shape(how.BM, how.BN, (1, 256))
    what = constants(how, given, bias, activation, world, M=M, **depth(K, align)) | {"trans_b": trans_b}
    kernel = host.kernel(gemm_reduce, host.target_of(x.device), **what)

    def run(space: Workspace, x: torch.Tensor, w: torch.Tensor, bias: Any, c: torch.Tensor) -> None:
        parts, sums = space.tensors(x, (shape, dtype), ((*others, *finished), c.dtype))
        own, mine = x.new_empty(shape), c.new_empty(1, count, *finished)
        flags = space.counters(world, count)
        given = x.contiguous(), host.lying(w, trans_b), biased(bias, c)
        kernel(*given, own, parts, mine, sums, flags[0], flags[1:], c)

    return Plan(*result, run)


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
    knobs=knobs(
        tuple({"warps": n} for n in (1, 2)),
        tuple({"run": n} for n in (4, 8, 16, 32)),
        tuple({"lead": n} for n in (4, 8, 12, 24)),
    ),
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
