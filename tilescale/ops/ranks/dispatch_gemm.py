"""``dispatch_grouped_matmul(x, w, experts, weights, num_experts=E)``: the first product of experts that are
split among ranks, in one kernel with the rows' way to it.

Apart, four launches follow each other: `plan`, `dispatch`, `expand` and `grouped_matmul`. In one kernel a
block's spare warps move rows beside its products: they send own tokens to their experts' ranks, and put what
came into the order of pairs. Tiles wait for exactly the rows that they read. Experts are taken in their order
by everyone, so a rank sends the tokens of each rank's first expert first, and the products of one expert
cover the way of the next ones' rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import tilescale.language as T
from tilescale.comm.backend import Team
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import grouped, host
from tilescale.ops.activations import GATES
from tilescale.ops.case import Case, Expected, generator, normal
from tilescale.ops.gemm_kernels import ceil_div, panelled
from tilescale.ops.ranks import dispatch, flat, picks
from tilescale.ops.ranks import experts as of_ranks
from tilescale.ops.ranks.case import RankOp
from tilescale.ops.ranks.experts import Dispatched
from tilescale.ops.ranks.groups import Group, number_of, share, team_of
from tilescale.ops.ranks.workspace import workspace

#: where a workspace keeps the rows of pairs
PAIRS = "pairs"


@dataclass(frozen=True)
class Config:
    """How it is computed. ``fused``: in one kernel, or apart, where nothing else here counts. Then: tiles,
    stages of the ring, threads of a block, rows of tiles in a panel, blocks that stay, warps of each that
    move rows."""

    fused: bool = True
    BM: int = 128
    BN: int = 128
    BK: int = 64
    stages: int = 4
    threads: int = 256
    panel: int = 16
    blocks: int = 132
    warps: int = 3


@functools.cache
def choose(pairs: int, local: int, N: int, gate: str, units: int = 132) -> Config:
    """For room for so many pairs of ``local`` experts, whose matrices have N columns (with the gate's): the
    tiles of `grouped_matmul`. Apart: on four H200 one kernel took 1.03 times as long, of 4096 tokens."""
    wide = N // 2 if gate else N
    BM = 64 if pairs <= 64 * local else 128
    BN = 128 if wide <= 128 or BM == 64 else 256
    stages = 4 if BM == 128 and wide > 128 else 6
    return Config(
        False, BM, BN // 2 if gate else BN, 64, stages, threads=128 if BM == 64 else 256, blocks=units
    )


# ---- the kernel


def dispatch_gemm(
    H: int, N: int, E: int, world: int, BM: int, BN: int, BK: int, stages: int, threads: int, panel: int,
    blocks: int, warps: int, dtype: str, trans_b: bool, gate: str,
) -> Any:  # fmt: skip
    """C (P, N, or N / 2 with a ``gate``): each pair's row of X of some rank, times its expert's B (local, H,
    N), or (local, N, H), as `grouped.grouped` multiplies. ``order``, ``steps`` and ``index`` are those of
    `expert_kernels.plan`. ``rows`` (R, H) gets the tokens that come, ``Y`` (L, H) the row of each pair, where
    each expert begins a row of tiles: a tile never reads rows of the next expert, which may be on their way.

    ``told`` counts the rows that arrived in each step, and behind those, of each row of tiles, the rows that
    lie in ``Y``.

    Who has seen what. A row that is put comes before its signal, which releases it, at the scope of the
    system; a wait for the signals of all of a step's rows acquires them, so what is copied behind it, from
    ``rows`` to ``Y``, is what was sent. The copy's own signal releases the row of ``Y`` alike, also to other
    blocks, and a tile's wait for its rows acquires them in front of its loads. Those are TMA's, and the
    compiler puts a proxy fence between (docs/ARCHITECTURE.md, "Hopper"). Nobody writes a row of ``rows`` or
    ``Y`` twice in a launch, and all of them are awaited, so a rank's own end is the end of the launch.

    Nobody waits for ever. All blocks of all ranks are resident and take the experts e in their order: send,
    await step e, copy, await tiles of e. What arrives in step e is sent in step e, in front of all waits of
    that step, and what tiles of e read is copied in front of all waits for tiles of e. So of all blocks
    whoever is in the first step of all, and there in front of the first of the two waits, goes on.
    """
    n, local = N // 2 if gate else N, ceil_div(E, world)
    t, Q, R, P, L, U = (T.dynamic(x) for x in ("t", "Q", "R", "P", "L", "U"))
    wide = ceil_div(n, BN)
    multiply, leave = grouped.of_tiles(BM, BN, BK, H, n, stages, trans_b, gate)

    @T.macro
    def move(X, order, steps, index, rows, Y, told, e, block, rank):
        """This block's part of step e: its own tokens to their experts, and what came to its pairs."""
        for q in T.serial(steps[e, 0] + block, steps[e + 1, 0], step=blocks):
            i, there, to = order[q, 0], order[q, 1], order[q, 2]
            T.copy(
                X[i : i + 1, 0:H], rows[to : to + 1, 0:H], dst=there, signal=told[e], blocking=False
            )  # fmt: skip
        T.wait(told[e], steps[e, 3])  # acquires all rows whose first expert is e; earlier steps' before
        for p in T.serial(steps[e, 1] + block, steps[e + 1, 1], step=blocks):
            come, y = index[p], steps[e, 2] * BM + p - steps[e, 1]
            T.copy(
                rows[come : come + 1, 0:H], Y[y : y + 1, 0:H], dst=rank, signal=told[local + y // BM],
                blocking=False,
            )  # fmt: skip

    @T.prim_func
    def moe_dispatch_gemm(
        X: T.Tensor((t, H), dtype),
        order: T.Tensor((Q, 4), "int32"),
        steps: T.Tensor((local + 1, 4), "int32"),
        index: T.Tensor((P,), "int32"),
        B: T.Tensor((local, N, H) if trans_b else (local, H, N), dtype),
        rows: T.SymmTensor((R, H), dtype),
        Y: T.SymmTensor((L, H), dtype),
        told: T.Signal((U,)),
        C: T.Tensor((P, n), dtype),
    ):
        with (
            T.Kernel(blocks, threads=threads, awaited=True, comm_warps=warps) as block,
            T.Scale("device") as (rank, ranks),
        ):
            a, high = T.alloc_shared((BM, BK), dtype), (BN, BK) if trans_b else (BK, BN)
            b = [T.alloc_shared(high, dtype) for _ in range(1 + bool(gate))]
            acc = [T.alloc_fragment((BM, BN), "float32") for _ in b]
            for e in T.serial(local):
                move(X, order, steps, index, rows, Y, told, e, block, rank)
                top, tall = steps[e, 2], steps[e + 1, 2] - steps[e, 2]
                # all experts' tiles go round the blocks
                begin = (block + blocks - top * wide % blocks) % blocks
                for tile in T.serial(begin, tall * wide, step=blocks):
                    down, bx = panelled(tile, tall, wide, panel)
                    first, end = steps[e, 1] + down * BM, steps[e + 1, 1]
                    for part in acc:
                        T.clear(part)
                    T.wait(told[local + top + down], T.min(BM, end - first))  # acquires the tile's rows
                    multiply(Y, (top + down) * BM, B, e, bx * BN, a, b, acc)
                    leave(acc, C, first, end, bx * BN)

    return moe_dispatch_gemm


# ---- what people call


@host.checked
def dispatch_grouped_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    num_experts: int,
    gate: str = "",
    tokens: int | None = None,
    slot: int = 0,
    group: Group = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, Dispatched]:
    """`moe_dispatch`, then `grouped_matmul` of the pairs' rows with this rank's experts. Collective.

    Args:
        x: (t, H) of bfloat16 or float16; t may differ between ranks, H may not. 8-bit floats with scales go
            by `moe_dispatch`.
        w: (local, H, N), this rank's share of all experts, contiguous or the transpose of a contiguous
            (local, N, H).
        experts, weights, num_experts, tokens, slot, group: as `moe_dispatch` takes them.
        gate: as in `grouped_matmul`: the result has N / 2 columns.
        out: (P, N), contiguous, takes the rows.
        config: how the work is done, where the choice by the shape is not wanted; alike on all ranks.

    Returns:
        (P, N): a row of each pair of a token and one of this rank's experts, in the order of ``index``,
        undefined behind the last one, summed in float32 and rounded once; and what `moe_dispatch` gives.

    Raises:
        TileValueError, TileTypeError: shapes, dtypes or groups that do not fit.
    """
    team, most = team_of(group), x.shape[0] if tokens is None else number_of(tokens, "tokens")
    weights = torch.ones_like(experts, dtype=torch.float32) if weights is None else weights
    dispatch.fits(x, experts, weights, None, most)
    num_experts, slot = number_of(num_experts, "num_experts", least=1), number_of(slot, "slot")
    local, (_, P) = (
        share(num_experts, team.size),
        of_ranks.room(most, experts.shape[1], num_experts, team.size),
    )
    if w.dim() != 3 or w.shape[:2] != (local, x.shape[1]) or w.shape[2] == 0:
        raise TileValueError(
            f"dispatch_grouped_matmul of {tuple(x.shape)} by {tuple(w.shape)}",
            expected=f"w ({local}, {x.shape[1]}, N): this rank's of {num_experts} experts, as many matrices "
            "on all ranks",
        )
    if x.dtype != w.dtype or host.dtype_name(x) not in grouped.DTYPES:
        raise TileTypeError(
            f"dispatch_grouped_matmul of {host.dtype_name(x)} by {host.dtype_name(w)}",
            expected="bfloat16 or float16 for both",
        )
    N = w.shape[2]
    if gate and (gate not in GATES or N % 2):
        raise TileValueError(
            f"gate={gate!r} of {N} columns", expected="an even number of them, " + ", ".join(map(repr, GATES))
        )
    c = host.result(out, (P, N // 2 if gate else N), x.dtype, x)
    ids, weights = host.narrowed(experts), weights.contiguous()
    how = config or _configured(team, x, w, P, gate)
    if not how.fused or most == 0:
        sent = dispatch.moe_dispatch(
            x, ids, weights, num_experts=num_experts, tokens=most, slot=slot, group=team
        )
        return grouped.grouped_matmul(sent.expanded(), w, sent.sizes, gate=gate, out=c), sent
    sent, order, steps = dispatch.listed(x, ids, weights, num_experts, most, team, slot, how.BM)
    return multiplied(x, w, sent, order, steps, c, gate, how), sent


def multiplied(
    x: torch.Tensor, w: torch.Tensor, sent: Dispatched, order: torch.Tensor, steps: torch.Tensor,
    c: torch.Tensor, gate: str, how: Config,
) -> torch.Tensor:  # fmt: skip
    """c, the products of all pairs, in one kernel with the way of x to them, as `dispatch.listed` says."""
    a, (b, trans_b) = flat.aligned(x), grouped.stacked(w)
    local, tall, space = len(sent.sizes), len(sent.index) // how.BM + len(sent.sizes), workspace(sent.team)
    # rows behind an expert's last one are read, and what they give is not stored
    (of_pairs,) = space.tensors(x, ((tall * how.BM, x.shape[1]), x.dtype), apart=PAIRS, clear=True)
    what = {k: v for k, v in vars(how).items() if k != "fused"}
    what |= {"H": x.shape[1], "N": w.shape[2], "E": sent.num_experts, "world": sent.team.size}
    args = (a, order, steps, sent.index, b, sent.rows, of_pairs, space.counters(local + tall), c)
    host.launch(dispatch_gemm, args, dtype=host.dtype_name(x), trans_b=trans_b, gate=gate, **what)
    return c


def _configured(team: Team, x: torch.Tensor, w: torch.Tensor, P: int, gate: str) -> Config:
    """What was measured for this shape, or as `choose` says."""
    local, H, N = w.shape
    model = choose(P, local, N, gate, flat.multiprocessors(x.device, None))
    kept = picks.found(
        team, OP.name, x.device, pairs=P, local=local, H=H, N=N, gate=gate, dtype=host.dtype_name(x)
    )
    return picks.applied(kept, model, x.device)


# ---- what is right, and what it is measured against


def draw(
    tokens: int,
    hidden: int,
    topk: int,
    experts: int,
    inner: int,
    gate: str = "",
    trans: bool = False,
    dtype: str = "bfloat16",
    choice: str = "",
    uneven: bool = False,
    rank: int = 0,
    world: int = 1,
    device: Any = "cpu",
    seed: int = 0,
    **config: Any,
) -> dict[str, Any]:
    """A rank's tokens, and its experts of ``inner`` columns (and as many of the gate's); ``config``: fields
    of a `Config`."""
    made = of_ranks.draw(
        tokens, hidden, topk, experts, dtype=dtype, choice=choice, uneven=uneven, rank=rank, world=world,
        device=device, seed=seed,
    )  # fmt: skip
    g, n = generator(device, 1000 * seed + 500 + rank), inner * (2 if gate else 1)
    local = share(experts, world)
    w = normal((local, n, hidden) if trans else (local, hidden, n), dtype, g, hidden**-0.5)
    made |= {"w": w.transpose(1, 2) if trans else w, "gate": gate}
    if config:
        of = of_ranks.room(tokens, made["experts"].shape[1], experts, world)[1]
        made["config"] = replace(choose(of, local, n, gate), fused=True, **config)
    return made


def pairs_that_came(out: torch.Tensor | None = None, **drawn: Any) -> torch.Tensor:
    """The rows, zero behind the last pair; what tests compare."""
    y, sent = dispatch_grouped_matmul(**drawn, out=out)
    y[torch.arange(len(y), device=y.device) >= sent.sizes.sum()] = 0
    return y


def seen(given: tuple[torch.Tensor, Dispatched]) -> torch.Tensor:
    """What a call gave, zero behind the last pair."""
    y, sent = given
    there = torch.arange(len(y), device=y.device) < sent.sizes.sum()
    return y.where(there[:, None], y.new_zeros(()))


def reference(everyone: list[dict[str, Any]]) -> list[Expected]:
    """In float64, expert by expert."""
    W, E, found = len(everyone), everyone[0]["num_experts"], []
    local = share(E, W)
    for r, (a, rows) in enumerate(zip(everyone, dispatch.reference(everyone), strict=True)):
        held = range(r * local, r * local + local)
        sizes = torch.tensor([sum(int((o["experts"] == e).sum()) for o in everyone) for e in held])
        (y,) = grouped.reference(rows.value.to(a["x"].dtype), a["w"], sizes, a["gate"])
        found.append(y)
    return found


def by_library(
    x: torch.Tensor,
    w: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    tokens: int,
    gate: str,
    group: Any,
    **_more: Any,
) -> Callable[[], Any]:
    """torch.distributed's all-to-all of rows, once a rank, whose numbers are known before, as the places of
    all pairs are; then torch's own grouped product."""
    order, sent, got = of_ranks.exchanged(experts, num_experts, group)
    packed, K = torch.cat(order), experts.shape[1]
    ids = experts[packed].contiguous()
    of_rows, rows = ids.new_empty(sum(got), K), x.new_empty(sum(got), x.shape[1])
    torch.distributed.all_to_all_single(of_rows, ids, got, sent, group=group)
    sizes, pairs = of_ranks.in_order(of_rows, num_experts, group)
    index = pairs // K
    _, P = of_ranks.room(tokens, K, num_experts, len(order))
    out = x.new_zeros(P, w.shape[2] // (2 if gate else 1))

    def call() -> Any:
        torch.distributed.all_to_all_single(rows, x[packed], got, sent, group=group)
        out[: len(index)] = grouped.torch_grouped(rows[index], w, sizes, gate)()
        return out

    return call


def _model(world: int, units: int, shape: dict[str, Any]) -> Config:
    local, n = share(shape["experts"], world), shape["inner"] * (2 if shape.get("gate") else 1)
    _, P = of_ranks.room(shape["tokens"], min(shape["topk"], shape["experts"]), shape["experts"], world)
    return choose(P, local, n, shape.get("gate", ""), units)


def kept_by(
    world: int, tokens: int, hidden: int, topk: int, experts: int, inner: int, gate: str = "",
    dtype: str = "bfloat16", **_more: Any,
) -> dict[str, Any]:  # fmt: skip
    _, P = of_ranks.room(tokens, min(topk, experts), experts, world)
    N = inner * (2 if gate else 1)
    return {"pairs": P, "local": share(experts, world), "H": hidden, "N": N, "gate": gate, "dtype": dtype}


_FEW = {"BM": 64, "BN": 64, "BK": 32, "stages": 2, "threads": 128, "blocks": 5, "panel": 2}
SMALL: tuple[dict[str, Any], ...] = (
    {"tokens": 37, "hidden": 64, "topk": 2, "experts": 8, "inner": 40},
    {"tokens": 40, "hidden": 40, "topk": 3, "experts": 7, "inner": 72, "gate": "silu", "uneven": True},
    {"tokens": 90, "hidden": 72, "topk": 2, "experts": 6, "inner": 33, "choice": "one", "trans": True},
    {"tokens": 12, "hidden": 33, "topk": 4, "experts": 12, "inner": 16, "choice": "few"},
    {"tokens": 1, "hidden": 24, "topk": 1, "experts": 5, "inner": 8, "dtype": "float16"},
    {"tokens": 30, "hidden": 24, "topk": 8, "experts": 9, "inner": 20, "choice": "drop", "gate": "gelu"},
)
#: larger ones, in one kernel
ON_GPUS: tuple[dict[str, Any], ...] = tuple(
    {"tokens": 900, "hidden": 1032, "topk": 4, "experts": 16, "inner": 520, **more}
    for more in (
        {"gate": "silu"},
        {"gate": "gelu", "trans": True, "choice": "one"},
        {"choice": "few", "dtype": "float16"},
        {"choice": "drop", "uneven": True, "trans": True},
    )
) + ({"tokens": 60, "hidden": 1032, "topk": 4, "experts": 16, "inner": 520, "gate": "silu"},)
MEASURED: tuple[dict[str, Any], ...] = (
    {"tokens": 4096, "hidden": 7168, "topk": 8, "experts": 64, "inner": 2048, "gate": "silu"},
    {"tokens": 1024, "hidden": 7168, "topk": 8, "experts": 64, "inner": 2048, "gate": "silu"},
    {"tokens": 4096, "hidden": 4096, "topk": 2, "experts": 8, "inner": 14336, "gate": "silu"},
)

_WAYS, _PICK = of_ranks.fused_or_apart(_model)
OP = RankOp(
    name="dispatch_grouped_matmul",
    run=pairs_that_came,
    draw=draw,
    reference=reference,
    pick=_PICK,
    ways=_WAYS,
    base=lambda world, units=132, **shape: dict(vars(_model(world, units, shape))),
    knobs=lambda **_: (({"fused": True}, {"fused": False}), tuple({"warps": n} for n in (1, 2, 3))),
    shape_of=kept_by,
    asked=lambda table: {"config": Config(**table)},
    cases=(
        *(Case({**_FEW, **s}, small=True) for s in SMALL),
        *(Case(s, small=True) for s in SMALL[:2]),
        *(Case({**s, "warps": 3}) for s in ON_GPUS),
        *(Case(s, bar=1.0) for s in MEASURED),
    ),
    peers={"library": by_library},
    remote=lambda world, tokens, hidden, topk, experts, dtype="bfloat16", **_: of_ranks.remote(
        world, tokens, hidden, topk, experts, dtype
    ),
    alone=of_ranks.alone,
    flops=lambda world, tokens, hidden, topk, inner, gate="", **_: (
        2.0 * tokens * topk * hidden * inner * (2 if gate else 1)
    ),  # fmt: skip
    timed=lambda out=None, **a: lambda: dispatch_grouped_matmul(**a, out=out),
    seen=seen,
)
