"""``grouped_matmul_combine(y, w, sent)``: the last product of experts that are split among ranks, in one
kernel with the rows' way back.

Apart, two launches follow each other: `grouped_matmul` and `combine`. In one kernel tiles are taken in panels
of columns, all experts' tiles of a panel before those of the next. What is complete then is a part of every
row. So some blocks, which multiply nothing, bring one panel back while the others compute the next one. All
blocks together bring the last one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import tilescale.language as T
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import grouped, host
from tilescale.ops.case import ROUNDING, Case, Expected, expected, normal, summed
from tilescale.ops.case import generator as generator_of
from tilescale.ops.gemm_kernels import ceil_div, panelled
from tilescale.ops.ranks import combine, dispatch, flat, picks
from tilescale.ops.ranks import experts as of_ranks
from tilescale.ops.ranks.case import RankOp
from tilescale.ops.ranks.combine_kernels import bringing
from tilescale.ops.ranks.experts import Dispatched, is_sent
from tilescale.ops.ranks.groups import share
from tilescale.ops.ranks.workspace import workspace

#: rows that are added up before one signal tells of them
GROUP = 8


@dataclass(frozen=True)
class Config:
    """How it is computed. ``fused``: in one kernel, or apart, where nothing else here counts. Then: tiles,
    stages of the ring, threads of a block, rows of tiles that stand together, blocks that stay; ``columns``
    of tiles in a panel, ``movers`` of the blocks, which bring panels back while the others multiply, and
    ``step``, columns that a warp adds up at once."""

    fused: bool = True
    BM: int = 128
    BN: int = 256
    BK: int = 64
    stages: int = 4
    threads: int = 256
    panel: int = 16
    blocks: int = 132
    columns: int = 4
    movers: int = 12
    step: int = 512


@functools.cache
def choose(pairs: int, local: int, N: int, units: int = 132) -> Config:
    """For room for so many pairs of ``local`` experts and N columns: the tiles of `grouped_matmul`. Apart:
    on four H200 one kernel took 1.5 times as long, of 4096 tokens and 44 blocks that move rows."""
    BM = 64 if pairs <= 64 * local else 128
    BN = 128 if N <= 128 or BM == 64 else 256
    stages, threads = 4 if BM == 128 and N > 128 else 6, 128 if BM == 64 else 256
    columns = max(1, min(1024, N) // BN)
    return Config(False, BM, BN, 64, stages, threads, 16, units, columns, max(1, units // 11), min(512, BN))


# ---- the kernel


def gemm_combine(
    H: int, K: int, topk: int, E: int, world: int, BM: int, BN: int, BK: int, stages: int, threads: int,
    panel: int, blocks: int, columns: int, movers: int, step: int, group: int, dtype: str, trans_b: bool,
    weighted: bool,
) -> Any:  # fmt: skip
    """C (t, H): what `combine_kernels.combine` makes of Y (P, H), which gets the products of A's rows (P, K)
    with their experts' B (local, K, H), or (local, H, K), as `grouped.grouped` makes them.

    ``done`` counts each panel's tiles. A block counts a tile behind the products of its next one, when it has
    been stored for long: nobody waits for a store.

    Who has seen what. A tile's count releases its store to all blocks of the rank, and the wait for all tiles
    of a panel acquires them: who brings a panel back reads what was stored. What ranks signal to each other
    is what they signal in `combine`, panel by panel.

    Nobody waits for ever. Blocks that multiply wait for nobody until they are through. The others take panels
    in the order in which they are computed, on all ranks. Within a panel half of their warps put, which wait
    for nobody (`combine_kernels.combine`); all blocks are resident.
    """
    local, wide, makers = ceil_div(E, world), ceil_div(H, BN), blocks - movers
    panels, part = ceil_div(wide, columns), columns * BN
    t, R, P, q, u = (T.dynamic(x) for x in ("t", "R", "P", "q", "u"))
    multiply, leave = grouped.of_tiles(BM, BN, BK, K, H, stages, trans_b, "")
    bring = bringing(topk, world, step, part // step, 1, group, threads // 64, dtype, weighted)

    @T.prim_func
    def moe_gemm_combine(
        A: T.Tensor((P, K), dtype),
        B: T.Tensor((local, H, K) if trans_b else (local, K, H), dtype),
        sizes: T.Tensor((local,), "int32"),
        meta: T.Tensor((R, 2, topk), "int32"),
        starts: T.Tensor((world + 1,), "int32"),
        slots: T.Tensor((t, world), "int32"),
        Y: T.Tensor((P, H), dtype),
        back: T.SymmTensor((world, q, H), dtype),
        done: T.Signal((panels,)),
        arrived: T.Signal((world, u)),
        C: T.Tensor((t, H), dtype),
    ):
        with T.Kernel(blocks, threads=threads, awaited=True) as block:
            a, b = T.alloc_shared((BM, BK), dtype), T.alloc_shared((BN, BK) if trans_b else (BK, BN), dtype)
            acc = T.alloc_fragment((BM, BN), "float32")
            # tiles so far, the first row of an expert, the panel of a tile that is not counted yet
            tiles, row, last = T.alloc_var("int32", 0), T.alloc_var("int32", 0), T.alloc_var("int32", -1)
            if block >= movers:
                for ce in T.serial(panels * local):  # one loop, which takes fewer registers than two
                    c, e = ce // local, ce % local
                    across, tall = T.min(columns, wide - c * columns), T.ceildiv(sizes[e], BM)
                    if e == 0:
                        row = 0
                    begin = (block - movers + makers - tiles % makers) % makers
                    for tile in T.serial(begin, tall * across, step=makers):
                        down, bx = panelled(tile, tall, across, panel)
                        first, end, col = row + down * BM, row + sizes[e], (c * columns + bx) * BN
                        T.clear(acc)
                        multiply(A, first, B, e, col, a, [b], [acc])
                        if last >= 0:
                            with T.Scale("grid"):
                                T.signal(done[last])
                        last = c
                        leave([acc], Y, first, end, col)
                    tiles = tiles + tall * across
                    row = row + sizes[e]
                if last >= 0:
                    with T.Scale("grid"):
                        T.signal(done[last])
            high = T.alloc_var("int32", 0)  # rows of tiles
            for e in T.serial(local):
                high = high + T.ceildiv(sizes[e], BM)
            for c in T.serial(panels):
                count = T.if_then_else(c == panels - 1, blocks, movers)
                if block < count:
                    with T.Scale("grid"):
                        T.wait(done[c], high * T.min(columns, wide - c * columns))
                    counters = c * T.ceildiv(q, group)  # of the panels in front
                    bring(Y, meta, starts, slots, back, arrived, C, block, count, c * part, counters)

    return moe_gemm_combine


# ---- what people call


@host.checked
def grouped_matmul_combine(
    y: torch.Tensor,
    w: torch.Tensor,
    sent: Dispatched,
    *,
    weighted: bool = True,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """`grouped_matmul` of the pairs' rows with this rank's experts, then `moe_combine`. Collective among the
    ranks of the dispatch.

    Args:
        y: (P, K) of bfloat16 or float16, contiguous: a row of each pair, in the order of ``sent.index``.
        w: (local, K, H), this rank's experts, contiguous or the transpose of a contiguous (local, H, K).
        sent, weighted, out: as `moe_combine` takes them.
        config: how the work is done, where the choice by the shape is not wanted; alike on all ranks.

    Returns:
        (t, H): of each token the sum of its experts' products, which are rounded once, times their weights.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    is_sent(sent, "sent of grouped_matmul_combine")
    P, (t, topk), team, local = len(sent.index), sent.experts.shape, sent.team, len(sent.sizes)
    if y.dim() != 2 or w.dim() != 3 or y.shape[0] != P or w.shape[:2] != (local, y.shape[1]) or 0 in w.shape:
        raise TileValueError(
            f"grouped_matmul_combine of {tuple(y.shape)} by {tuple(w.shape)}",
            expected=f"({P}, K), a row of each pair that sent.index lists, by ({local}, K, H)",
        )
    if y.dtype != w.dtype or host.dtype_name(y) not in grouped.DTYPES:
        raise TileTypeError(
            f"grouped_matmul_combine of {host.dtype_name(y)} by {host.dtype_name(w)}",
            expected="bfloat16 or float16 for both",
        )
    (_, K, H), W, space = w.shape, team.size, workspace(team)
    how = config or _configured(sent, w)
    if how.fused and not 0 < how.movers < how.blocks:
        raise TileValueError(
            f"movers={how.movers} of blocks={how.blocks}",
            expected="one at least, and fewer than blocks: the others multiply",
        )
    if how.fused and how.columns * how.BN % how.step:
        raise TileValueError(
            f"step={how.step} of panels of columns * BN = {how.columns} * {how.BN} columns",
            expected="panels of whole steps",
        )
    if not how.fused or sent.tokens == 0 or P == 0:
        made = grouped.grouped_matmul(y, w, sent.sizes)
        return combine.moe_combine(made, sent, weighted=weighted, out=out)
    combine.latest(sent)
    c = host.result(out, (t, H), y.dtype, y)
    a, (b, trans_b) = flat.aligned(y), grouped.stacked(w)
    landing = flat.landing(c).view(c.shape)
    panels = ceil_div(ceil_div(H, how.BN), how.columns)
    units = -(-sent.tokens // GROUP)
    (meta,) = space.tensors(y, (sent.meta.shape, torch.int32), apart=sent.place)  # it may have moved
    (back,) = space.tensors(y, ((W, sent.tokens, H), y.dtype), what="y")
    counters = space.counters(panels + W * panels * units)
    what = {k: v for k, v in vars(how).items() if k != "fused"}
    what |= {"H": H, "K": K, "topk": topk, "E": sent.num_experts, "world": W, "group": GROUP}
    args = (
        a, b, sent.sizes, meta, sent.starts, sent.slots, y.new_empty(P, H), back, counters[:panels],
        counters[panels:].view(W, panels * units), landing,
    )  # fmt: skip
    of_dtype = {"dtype": host.dtype_name(y), "trans_b": trans_b, "weighted": weighted}
    host.launch(gemm_combine, args, **what, **of_dtype)
    flat.landed(landing.view(-1), c)
    return c


def _configured(sent: Dispatched, w: torch.Tensor) -> Config:
    """What was measured for this shape, or as `choose` says."""
    (local, K, N), P = w.shape, len(sent.index)
    model = choose(P, local, N, flat.multiprocessors(w.device, None))
    kept = picks.found(sent.team, OP.name, w.device, pairs=P, local=local, K=K, N=N, dtype=host.dtype_name(w))
    return picks.applied(kept, model, w.device)


# ---- what is right, and what it is measured against


def draw(
    tokens: int,
    hidden: int,
    topk: int,
    experts: int,
    inner: int,
    trans: bool = False,
    dtype: str = "bfloat16",
    choice: str = "",
    uneven: bool = False,
    weighted: bool = True,
    rank: int = 0,
    world: int = 1,
    device: Any = "cpu",
    seed: int = 0,
    **config: Any,
) -> dict[str, Any]:
    """A rank's tokens, of ``inner`` features each, and its experts, which make ``hidden`` of them;
    ``config``: fields of a `Config`."""
    made = of_ranks.draw(
        tokens, inner, topk, experts, dtype=dtype, choice=choice, uneven=uneven, rank=rank, world=world,
        device=device, seed=seed,
    )  # fmt: skip
    g, local = generator_of(device, 1000 * seed + 500 + rank), share(experts, world)
    w = normal((local, hidden, inner) if trans else (local, inner, hidden), dtype, g, inner**-0.5)
    made |= {"w": w.transpose(1, 2) if trans else w, "weighted": weighted}
    if config:
        _, pairs = of_ranks.room(tokens, made["experts"].shape[1], experts, world)
        made["config"] = replace(choose(pairs, local, hidden), fused=True, **config)
    return made


def there_and_back(
    w: torch.Tensor, weighted: bool, config: Config | None = None, out: torch.Tensor | None = None,
    **drawn: Any,
) -> torch.Tensor:  # fmt: skip
    """A dispatch, and the products of what came, on their way back; what tests compare."""
    sent = dispatch.moe_dispatch(**drawn)
    return grouped_matmul_combine(dispatch.of_pairs(sent), w, sent, weighted=weighted, out=out, config=config)


def timed(
    w: torch.Tensor, weighted: bool, config: Config | None = None, out: torch.Tensor | None = None,
    **drawn: Any,
) -> Callable[[], torch.Tensor]:  # fmt: skip
    """The call that is timed, behind a dispatch. It needs the group's latest one, which is that of the last
    set for all of them: each moves its own rows, to the same places."""
    sent = dispatch.moe_dispatch(**drawn)
    y = dispatch.of_pairs(sent)
    combine.made_last(sent)
    return lambda: grouped_matmul_combine(
        y, w, combine.last_made(sent.team), weighted=weighted, out=out, config=config
    )


def reference(everyone: list[dict[str, Any]]) -> list[Expected]:
    """In float64, of products that are rounded once, and of ranks' parts that are."""
    W, local, found = len(everyone), share(everyone[0]["num_experts"], len(everyone)), []
    for rank, a in enumerate(everyone):
        x, ids = a["x"], a["experts"].long()
        weights = (a["weights"].double() if a["weighted"] else 1.0) * (ids >= 0)
        total = torch.zeros(len(x), a["w"].shape[2], dtype=torch.float64, device=x.device)
        size, noise = torch.zeros_like(total), torch.zeros_like(total)
        for d, other in enumerate(everyone):
            part = torch.zeros_like(total)
            for e in range(local):
                token, which = (ids == d * local + e).nonzero(as_tuple=True)
                if not len(token):
                    continue
                rows, matrix = x[token].double(), other["w"][e].double()
                made, factor = rows @ matrix, weights[token, which, None]
                once = expected(made, x.dtype, noise=summed(rows.abs() @ matrix.abs(), x.shape[1])).allowed
                part.index_add_(0, token, made * factor)
                noise.index_add_(0, token, once * factor)
                size.index_add_(0, token, made.abs() * factor)
            total += part
            noise += (part.abs() + noise) * ROUNDING[x.dtype] * 1.01 if d != rank else 0
        noise = noise + summed(size + noise, ids.shape[1] + W)
        found.append(expected(total, x.dtype, noise=noise))
    return found


def by_library(
    x: torch.Tensor,
    w: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    weighted: bool,
    group: Any,
    **_more: Any,
) -> Callable[[], Any]:
    """torch's own grouped product, sums of each row's pairs, and torch.distributed's all-to-all of those,
    once a rank; all numbers and places are known before."""
    order, sent, got = of_ranks.exchanged(experts, num_experts, group)
    tokens, K = torch.cat(order), experts.shape[1]

    def brought(rows: torch.Tensor) -> torch.Tensor:
        found = rows.new_empty(sum(got), *rows.shape[1:])
        torch.distributed.all_to_all_single(found, rows[tokens].contiguous(), got, sent, group=group)
        return found

    ids, factor, rows = (
        brought(experts),
        brought(weights if weighted else torch.ones_like(weights)),
        brought(x),
    )
    sizes, index = of_ranks.in_order(ids, num_experts, group)
    row, scale = index // K, factor.flatten()[index][:, None]
    pairs, H = rows[row], w.shape[2]
    back = x.new_empty(len(tokens), H)

    def call() -> Any:
        made = grouped.torch_grouped(pairs, w, sizes)()
        sums = torch.zeros(sum(got), H, dtype=torch.float32, device=x.device)
        sums.index_add_(0, row, made.float() * scale)
        torch.distributed.all_to_all_single(back, sums.to(x.dtype), sent, got, group=group)
        out = torch.zeros(len(x), H, dtype=torch.float32, device=x.device)
        return out.index_add_(0, tokens, back.float()).to(x.dtype)

    return call


def _model(world: int, units: int, shape: dict[str, Any]) -> Config:
    _, P = of_ranks.room(shape["tokens"], min(shape["topk"], shape["experts"]), shape["experts"], world)
    return choose(P, share(shape["experts"], world), shape["hidden"], units)


def kept_by(
    world: int, tokens: int, hidden: int, topk: int, experts: int, inner: int, dtype: str = "bfloat16",
    **_more: Any,
) -> dict[str, Any]:  # fmt: skip
    _, P = of_ranks.room(tokens, min(topk, experts), experts, world)
    return {"pairs": P, "local": share(experts, world), "K": inner, "N": hidden, "dtype": dtype}


_FEW = {
    "BM": 64, "BN": 64, "BK": 32, "stages": 2, "threads": 128, "blocks": 5, "panel": 2, "columns": 1,
    "movers": 2, "step": 64,
}  # fmt: skip
SMALL: tuple[dict[str, Any], ...] = (
    {"tokens": 37, "hidden": 136, "topk": 2, "experts": 8, "inner": 40},
    {"tokens": 40, "hidden": 72, "topk": 3, "experts": 7, "inner": 64, "trans": True, "uneven": True},
    {"tokens": 90, "hidden": 200, "topk": 2, "experts": 6, "inner": 24, "choice": "one", "columns": 2},
    {"tokens": 12, "hidden": 33, "topk": 4, "experts": 12, "inner": 16, "choice": "few", "weighted": False},
    {"tokens": 1, "hidden": 24, "topk": 1, "experts": 5, "inner": 8, "dtype": "float16"},
    {"tokens": 30, "hidden": 140, "topk": 8, "experts": 9, "inner": 20, "choice": "drop", "movers": 4},
)
ON_GPUS: tuple[dict[str, Any], ...] = tuple(
    {"tokens": 900, "hidden": 2056, "topk": 4, "experts": 16, "inner": 520, **more}
    for more in (
        {},
        {"trans": True, "choice": "one"},
        {"choice": "few", "dtype": "float16"},
        {"choice": "drop", "uneven": True, "trans": True},
    )
) + ({"tokens": 60, "hidden": 1032, "topk": 4, "experts": 16, "inner": 520},)
MEASURED: tuple[dict[str, Any], ...] = (
    {"tokens": 4096, "hidden": 7168, "topk": 8, "experts": 64, "inner": 2048},
    {"tokens": 1024, "hidden": 7168, "topk": 8, "experts": 64, "inner": 2048},
    {"tokens": 4096, "hidden": 4096, "topk": 2, "experts": 8, "inner": 14336},
)

_WAYS, _PICK = of_ranks.fused_or_apart(_model)
OP = RankOp(
    name="grouped_matmul_combine",
    run=there_and_back,
    draw=draw,
    reference=reference,
    pick=_PICK,
    ways=_WAYS,
    base=lambda world, units=132, **shape: dict(vars(_model(world, units, shape))),
    knobs=lambda **_: (
        ({"fused": True}, {"fused": False}),
        tuple({"movers": n} for n in (8, 12, 16, 24)),
        tuple({"columns": n} for n in (2, 4, 8)),
    ),
    shape_of=kept_by,
    asked=lambda table: {"config": Config(**table)},
    cases=(
        *(Case({**_FEW, **s}, small=True) for s in SMALL),
        *(Case(s, small=True) for s in SMALL[:2]),
        *(Case({**s, "panel": 16}) for s in ON_GPUS),
        *(Case(s, bar=1.0) for s in MEASURED),
    ),
    peers={"library": by_library},
    remote=lambda world, tokens, hidden, topk, experts, dtype="bfloat16", **_: of_ranks.remote(
        world, tokens, hidden, topk, experts, dtype
    ),
    alone=of_ranks.alone,
    flops=lambda world, tokens, hidden, topk, inner, **_: 2.0 * tokens * topk * hidden * inner,
    timed=timed,
    same=False,
)
