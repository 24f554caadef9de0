"""``matmul_reduce_scatter(x, w)``: the rows of Σ over ranks of x · w that are this rank's, in one kernel.
Each rank holds columns of x and rows of w, so it has a part of every element.

Blocks multiply tiles of all ranks' rows in turn (`gemms.turn`). Another rank's tile is rounded to the
operands' dtype, stored, and put to its owner while the block multiplies on. An own tile comes late enough for
the others' parts to be there: they follow the operands through their ring and are added to the accumulators,
in the order of distance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import tilescale.language as T
from tilescale.comm.backend import Team
from tilescale.ops import host
from tilescale.ops.gemm_kernels import ceil_div, finish, load, panelled
from tilescale.ops.prepared import Plan
from tilescale.ops.ranks import fp8, gemm_engine, scatter
from tilescale.ops.ranks.case import Case, Expected, RankOp
from tilescale.ops.ranks.gemms import (
    add_parts,
    added_up,
    alone,
    alone_there,
    bias_of,
    biased,
    by_copies,
    checked,
    chosen,
    configured,
    constants,
    counted,
    depth,
    draw_inner,
    even,
    in_turn,
    inner_of,
    knobs,
    lead_of,
    library_sum,
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
from tilescale.ops.ranks.groups import Group, rows_of, share, team_of
from tilescale.ops.ranks.workspace import Workspace


@dataclass(frozen=True)
class Config:
    """How it is computed. ``fused``: in one kernel, or apart; ``engine``: apart, where copy engines move the
    parts of one rank while the next one's are multiplied. Then: tiles, stages of the ring, threads of a
    block, blocks that stay; tiles of a run, which lie in panels of so many rows of tiles, and how many runs
    of other ranks' tiles come in front of the first own one (`gemms.turn`); warps of a block that put."""

    fused: bool = True
    BM: int = 128
    BN: int = 256
    BK: int = 64
    stages: int = 4
    threads: int = 256
    blocks: int = 132
    panel: int = 4
    run: int = 32
    lead: int = 12
    engine: bool = False
    warps: int = 2


@functools.cache
def choose(M: int, N: int, K: int, world: int, dtype: str, units: int = 132) -> Config:
    """For M rows of the result and a rank's share K of the inner extent: fused where each rank's rows fill a
    tile. By a model, as `gather_gemm.choose`. On 4 H200 one warp that puts, and whole waves, took 463 and 143
    µs of 8192 × 8192 × 8192 and 4096 × 4096 × 10752, two warps and all blocks 482 and 159; on 2 one warp took
    270 of the latter, two 284 (2026-11-26): puts queue in front of the product's loads, and links take what
    one warp a block has."""
    fused = worthwhile(M, N, K, dtype) and share(M, world) >= 64
    cut = tiles(M, N, K, dtype, units)
    count = ceil_div(share(M, world), cut["BM"]) * ceil_div(N, cut["BN"])
    if world > 2:
        cut["blocks"] = even(count * world, cut["blocks"])
    return Config(fused=fused, warps=1, **cut, **in_turn(count, cut["blocks"], world))


def crossing(count: int, dtype: torch.dtype) -> torch.dtype:
    """In which dtype a rank's part of another one's rows, ``count`` numbers, crosses where the steps are
    taken one after the other. Twice the bytes of so few cost little, and the sum is rounded once: rounded
    parts made the greatest error of 688 × 512 on two GPUs 2.6 times that of one rounding (2026-11-27)."""
    return torch.float32 if count * torch.float32.itemsize <= scatter.TINY else dtype


# ---- the kernel


def gemm_scatter(
    M: int, N: int, K: int | None, align: int, world: int, BM: int, BN: int, BK: int, stages: int,
    threads: int, blocks: int, panel: int, run: int, lead: int, warps: int, dtype: str, out: str,
    trans_b: bool, bias: bool, activation: str,
) -> Any:  # fmt: skip
    """C (m, N) = act(Σ over ranks of A · op(W) + bias), rows rank · share(M, world) and on. A (M, K); W (K,
    N) or (N, K); K None: known to the call, a multiple of ``align``. own[h - 1]: this rank's parts for the
    rank h behind it; parts[h - 1]: those of the rank h in front of this one, which it puts there."""
    each = share(M, world)
    tall, across = ceil_div(each, BM), ceil_div(N, BN)
    count, whole = tall * across, tall * across % run == 0
    lead = lead_of(count, run, lead, world)
    k_extent = T.dynamic("K", multiple_of=align) if K is None else K
    b_shape, b_tile = ((N, k_extent), (BN, BK)) if trans_b else ((k_extent, N), (BK, BN))
    packed = packed_shape(BM, BN, b_tile)

    @T.prim_func
    def gemm_rs(
        A: T.Tensor((M, k_extent), dtype),
        W: T.Tensor(b_shape, dtype),
        add: T.Tensor((N if bias else 1,), out),
        own: T.Tensor((world - 1, count, *packed), dtype),
        parts: T.SymmTensor((world - 1, count, *packed), dtype),
        arrived: T.Signal((count,)),
        C: T.Tensor((T.dynamic("m"), N), out),
    ):
        with (
            T.Kernel(blocks, threads=threads, awaited=True, comm_warps=warps) as b,
            T.Scale("device") as (rank, n),
        ):
            x, w = T.alloc_shared((BM, BK), dtype), T.alloc_shared(b_tile, dtype)
            acc = T.alloc_fragment((BM, BN), "float32")
            for place in T.Persistent(places(count, run, world), blocks, b, rotate=run % blocks):
                hop, number = turn(place, count, run, lead, world)
                if whole or number < count:
                    owner = (rank + hop) % world
                    i, j = panelled(number, tall, across, panel)
                    T.clear(acc)
                    for k in T.Pipelined(T.ceildiv(k_extent, BK), num_stages=stages):
                        load(A, W, x, w, owner * each + i * BM, j * BN, k * BK, False, trans_b)
                        T.gemm(x, w, acc, transpose_B=trans_b)
                    if hop > 0:
                        # bounds that show that nothing lies outside
                        h, q = T.min(hop - 1, world - 2), T.max(T.min(number, count - 1), 0)
                        store_packed(acc, own, h, q)
                        T.copy(
                            own[h, q, 0 : packed[0], 0 : packed[1]],
                            parts[h, q, 0 : packed[0], 0 : packed[1]],
                            dst=(rank + hop) % n,
                            signal=arrived[q],
                            blocking=False,
                        )
                    else:
                        add_parts(acc, parts, w, arrived, number, world - 1, stages)
                        finish(acc, add if bias else None, C, i * BM, j * BN, activation, False)

    return gemm_rs


# ---- what people call


@host.checked
def matmul_reduce_scatter(
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
    """act(Σ over ranks of x · w + bias), of which each rank gets its rows. Each rank's part is summed in
    float32. In one kernel the others' are rounded to x's dtype and added to the own one; taken apart, all are
    rounded, or none where a rank's rows are a megabyte of float32 at most. They are added in float32 and in a
    fixed order, the same bits from run to run. Collective.

    Args:
        x: all M rows, this rank's columns (M, K) of bfloat16, float16 or float32. w: this rank's rows (K, N),
            contiguous or the transpose of something contiguous.
        bias: (N,) of the result's dtype, added once. activation: "relu", "gelu" (by erf) or "silu".
        scale_x, scale_w: of 8-bit floats, as `fp8_matmul` takes them for x and w: float32, one number each or
            one a block of 128; the steps are taken one after the other then, and parts have the result's
            dtype.
        group: who takes part, see `groups.team_of`; all ranks without.
        inner: all ranks' K together, split as torch.chunk does; without it every rank has as many.
        out: (m, N), contiguous, takes the result. out_dtype: of the result; x's without, or float32.
        config: how the work is done, where the choice by the shape is not wanted; alike on all ranks.

    Returns:
        (m, N): rows r·c to min((r + 1)·c, M) on rank r of n, c = ceil(M / n), as torch.chunk splits them.

    Raises:
        TileValueError, TileTypeError: shapes, dtypes or groups that do not fit.
    """
    team = team_of(group)
    if fp8.asked(x, scale_x, scale_w, config, "matmul_reduce_scatter"):
        assert scale_x is not None and scale_w is not None
        inner_of(inner, x.shape[1], team)
        own_part, M = fp8.part(x, w, scale_x, scale_w, bias, activation, out, out_dtype), x.shape[0]
        c = host.result(out, (rows_of(team.rank, M, team.size), w.shape[1]), own_part.dtype, x)
        if M:
            scatter.scattered(own_part, c, M, team, bias, activation)
        return c
    return added_up(
        "matmul_reduce_scatter", _plan, team, x, w, bias, activation, inner, out, out_dtype, config
    )


def _plan(
    team: Team, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, activation: str,
    inner: int | None, out: torch.Tensor | None, out_dtype: torch.dtype | None, config: Config | None,
) -> Plan:  # fmt: skip
    """What `matmul_reduce_scatter` does: of the team's memory, x, w, the bias and the result."""
    given = checked("matmul_reduce_scatter", x, w, bias, activation, out, out_dtype, empty=inner is not None)
    M, N, world, dtype = given.rows, given.N, team.size, x.dtype
    K, align = inner_of(inner, given.K, team)
    result = (rows_of(team.rank, M, world), N), given.out
    host.taking(out, *result)
    if M == 0:
        return Plan(*result, nothing)
    if world == 1:
        return Plan(*result, alone_there(activation))
    how = counted(config or configured(team, "matmul_reduce_scatter", choose, M, given, K), Config)
    if how.engine:
        return Plan(*result, by_copies(gemm_engine.scattered, given, M, activation))
    if not how.fused:
        added, kind = 0 if bias is None else N, crossing(share(M, world) * N, dtype)
        add = scatter.scattering(M, N, kind, given.out, x.device, team, added, activation)
        return Plan(
            *result, lambda space, x, w, bias, c: add(space, product(x.contiguous(), w, kind), c, bias)
        )
    trans_b = told(given, inner, team).trans_b
    count = ceil_div(share(M, world), how.BM) * ceil_div(N, how.BN)
    shape = (world - 1, count, *packed_of("matmul_reduce_scatter", how, trans_b))
    what = constants(how, given, bias, activation, world, M=M, **depth(K, align)) | {"trans_b": trans_b}
    kernel = host.kernel(gemm_scatter, host.target_of(x.device), **what)

    def run(space: Workspace, x: torch.Tensor, w: torch.Tensor, bias: Any, c: torch.Tensor) -> None:
        (parts,) = space.tensors(x, (shape, dtype))
        arrived, own = space.counters(count), x.new_empty(shape)
        kernel(x.contiguous(), host.lying(w, trans_b), biased(bias, c), own, parts, arrived, c)

    return Plan(*result, run)


# ---- what is right, and what it is measured against


def draw(
    M: int,
    N: int,
    K: int,
    dtype: str = "bfloat16",
    trans_b: bool = False,
    bias: bool = False,
    activation: str = "",
    out: str = "",
    scales: str = "",
    rank: int = 0,
    world: int = 1,
    device: Any = "cpu",
    seed: int = 0,
    **config: Any,
) -> dict[str, Any]:
    """M rows of a rank's columns out of K; ``config``: fields of a `Config`."""
    if scales:
        made = fp8.draw(M, N, rows_of(rank, K, world), scales, out, device, seed, rank, common=False)
        made |= {"inner": K, "activation": activation}
        return made | bias_of(bias, N, out or "bfloat16", device, seed)
    made = draw_inner(M, N, K, dtype, trans_b, bias, activation, out, rank, world, device, seed)
    return made | ({"config": Config(**config)} if config else {})


def reference(everyone: list[dict[str, Any]]) -> list[Expected]:
    return scatter.by_rank(reference_sum(everyone), len(everyone))


def by_library(
    x: torch.Tensor,
    w: torch.Tensor,
    group: Any,
    bias: torch.Tensor | None = None,
    activation: str = "",
    **scaled: Any,
) -> Callable[[], Any]:
    """torch.mm, then torch.distributed's reduce-scatter (rounding where the library does), then bias and
    activation."""
    return library_sum(x, w, group, bias, activation, scatter.by_library, scaled)


def by_torch(
    x: torch.Tensor,
    w: torch.Tensor,
    group: Any,
    bias: torch.Tensor | None = None,
    activation: str = "",
    **scaled: Any,
) -> Callable[[], Any]:
    """torch.ops.symm_mem.fused_matmul_reduce_scatter, which takes rows that the ranks divide on GPUs, without
    an epilogue."""
    world = torch.distributed.get_world_size(group)
    behind = bias is not None or activation or "scale_x" in scaled
    if x.device.type != "cuda" or x.shape[0] % world or behind:
        raise NotImplementedError("PyTorch's fused operation takes equal parts on GPUs, and no epilogue")
    import torch.distributed._symmetric_memory as symm_mem

    symm_mem.enable_symm_mem_for_group(group.group_name)
    return lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, group.group_name)


_FEW = {
    "BM": 64,
    "BN": 64,
    "BK": 32,
    "stages": 2,
    "threads": 128,
    "blocks": 5,
    "panel": 2,
    "run": 2,
    "lead": 4,
}
#: what is drawn by `draw`: in one kernel, where small shapes would be taken apart, or as they are picked
SMALL = (
    *(
        Case({**_FEW, **shape}, small=True)
        for shape in (
            {"M": 192, "N": 72, "K": 96},
            {"M": 128, "N": 64, "K": 100, "bias": True, "activation": "gelu"},
            {"M": 100, "N": 72, "K": 50, "dtype": "float32", "trans_b": True},
            {"M": 77, "N": 40, "K": 33, "dtype": "float16", "bias": True, "out": "float32"},
            {"M": 2, "N": 30, "K": 20, "activation": "silu"},
            {"M": 300, "N": 100, "K": 72, "trans_b": True, "blocks": 132},
        )
    ),
    *(
        Case({"M": m, "N": 72, "K": k, "scales": scales, **more}, small=True)
        for scales in ("tensor", "blocks")
        for m, k, more in ((77, 400, {}), (5, 2, {"bias": True, "activation": "relu"}))
    ),
    Case({"M": 33, "N": 40, "K": 300, "scales": "tensor", "out": "float32"}, small=True),
    *(
        Case(shape, small=True)
        for shape in (
            {"M": 70, "N": 40, "K": 64},
            {"M": 5, "N": 72, "K": 40, "bias": True, "activation": "relu"},
            {"M": 20, "N": 24, "K": 2, "bias": True, "out": "float32"},
        )
    ),
    *(
        Case({**shape, "engine": True}, small=True)
        for shape in (
            {"M": 192, "N": 72, "K": 104, "bias": True, "activation": "relu"},
            {"M": 77, "N": 41, "K": 33, "dtype": "float16", "out": "float32"},
            {"M": 2, "N": 30, "K": 2, "trans_b": True},
        )
    ),
)
RAGGED = tuple(
    Case({"M": m, "N": n, "K": k, "trans_b": tb})
    for m, n, k in ((5000, 1000, 1000), (1024, 2048, 4096), (3, 1000, 1000), (333, 520, 2056))
    for tb in (False, True)
)

OP = RankOp(
    name="matmul_reduce_scatter",
    run=matmul_reduce_scatter,
    draw=draw,
    reference=reference,
    **chosen(choose, inner=True),
    knobs=knobs(
        tuple({"warps": n} for n in (1, 2)),
        tuple({"run": n} for n in (8, 16, 32)),
        tuple({"lead": n} for n in (4, 8, 12, 24)),
    ),
    cases=(
        *SMALL,
        *RAGGED,
        *(
            Case({"M": m, "N": n, "K": k}, bar=1.0)
            for m, n, k in (
                (8192, 8192, 8192),
                (4096, 4096, 10752),
                (512, 8192, 28672),
                (2048, 8192, 28672),
                (8192, 8192, 28672),
            )
        ),
    ),
    peers={"library": by_library, "torch": by_torch},
    alone=alone,
    flops=lambda world, M, N, K, **_: 2.0 * M * N * share(K, world),
    remote=lambda world, M, N, dtype="bfloat16", **_: float(
        (world - 1) * share(M, world) * N * getattr(torch, dtype).itemsize
    ),
)
