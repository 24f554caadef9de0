"""``ring_attention_backward(do, q, k, v, o, lse)``: the gradients of `ring_attention`, of this rank's rows.

Each rank computes dq of its own queries over everyone's keys, and dk and dv of its own keys over everyone's
queries. It pulls what it needs, as the forward does: keys and values, and the queries, their gradients and
two numbers of each. So no part of a sum crosses ranks: every sum has one block and one order, as on one GPU
(`attention_gradients`), and costs its seven products. A pass of five products would have to send each rank's
parts of all dk and dv back, and its blocks would have to add to dq in turn.

Two kernels do it. The one of dq pulls everything, keys and values first, while it computes: its three
products take longer than all bytes cross, but for short sequences. The one of dk and dv finds its queries in
place. So it waits for nobody, needs no warps that pull, and keeps the registers that those would take: its
accumulators have 256 columns in all. The price is symmetric memory for the queries and their gradients of
the whole sequence, beside the keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilescale.errors import TileValueError
from tilescale.ops import attention_backward, host
from tilescale.ops.case import random_like
from tilescale.ops.gemm_kernels import ceil_div
from tilescale.ops.ranks import measure, ring, ring_gradient_kernels, sequence
from tilescale.ops.ranks.case import Case, Pick, RankOp
from tilescale.ops.ranks.groups import Group, team_of
from tilescale.ops.ranks.workspace import workspace


@dataclass(frozen=True)
class Tiles:
    """Queries and keys of a tile, threads of a block, stages of the rings; ``ahead``: of keys, as
    `attention_backward.key_gradients` has it."""

    BM: int
    BN: int
    threads: int = 256
    stages: int = 2
    ahead: int = 0


@dataclass(frozen=True)
class Config:
    """The tiles of queries that walk over keys, and of keys that walk over queries, blocks that stay, rows of
    a head that one pull moves: a multiple of the latter's queries."""

    queries: Tiles
    keys: Tiles
    blocks: int = 132
    high: int = 256


def choose(dim: int, each: int, heads: int, units: int = 132) -> Config:
    """For chunks of ``each`` rows of so many heads together: the tiles of `attention_gradients`. Warps that
    pull take registers from those that compute: what is left suffices neither for two rounds' products at
    once nor for tiles of 128 rows and more than 192 columns."""
    by_query = {**attention_backward.query_tiles(dim, each, heads, units), "stages": 2}
    if dim > 192:
        by_query |= {"BM": 64, "BN": 32, "threads": 128}
    return Config(Tiles(**by_query), Tiles(**attention_backward.key_tiles(dim, False)), units)


@host.checked
def ring_attention_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "contiguous",
    starts: torch.Tensor | None = None,
    group: Group = None,
    rows: int | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv of this rank's rows, of the inputs' dtype; the same bits from run to run. Collective.

    Args:
        do: the gradient of o. o, lse: what `ring_attention` gave.
        q, k, v, causal, scale, layout, starts, group, rows: what it was called with.
        out: takes the results. config: how the work is done, where the choice by the shape is not wanted;
            alike on all ranks.

    Raises:
        TileValueError, TileTypeError: shapes, dtypes, layouts or groups that do not fit.
    """
    team = team_of(group)
    by_query, what = (q, do, o), "ring_attention_backward"
    given = sequence.checked(what, by_query, (k, v), team, layout, rows, scale, starts)
    sequence.checked_sums(what, lse, q, given)
    named = zip(out or (None,) * 3, (q, k, v), ("dq", "dk", "dv"), strict=True)
    dq, dk, dv = (host.result(x, tuple(t.shape), t.dtype, t, n) for x, t, n in named)
    chunks = given.chunks
    if chunks.rows == 0:
        return dq, dk, dv
    if team.size == 1:
        more: dict[str, Any] = {"causal": causal, "scale": scale, "out": (dq, dk, dv)}
        if starts is not None:
            more |= {"q_starts": starts, "k_starts": starts, "longest": (chunks.rows, chunks.rows)}
        return attention_backward.attention_gradients(do, q, k, v, o, lse, **more)
    units = host.units(q.device)
    how = config or choose(given.dim, chunks.each, given.batch * given.heads, units)
    high = min(how.high, chunks.each)
    if high < chunks.each and high % how.keys.BM:
        raise TileValueError(f"high={high}", expected=f"a multiple of {how.keys.BM}, the queries of a tile")
    of_keys = (chunks.world * chunks.parts, given.batch * given.kv_heads, chunks.each, given.dim)
    of_queries = (of_keys[0], given.batch * given.heads, *of_keys[2:])
    table = ring_gradient_kernels.numbers_of(chunks, of_queries[1], high, how.keys.BM)
    space = workspace(team)
    wanted = [(of_keys, q.dtype)] * 2 + [(of_queries, q.dtype)] * 2 + [(table, torch.float32)]
    keys, values, queries, grads, numbers = space.tensors(q, *wanted, what="q")
    for to, x in ((keys, k), (values, v), (queries, q), (grads, do)):
        sequence.into_chunks(to, x, given, team.rank)  # before this rank enters the launch
    what_all = given.constants(q, causal)
    # also where there are no rows: the table says so
    numbered = {n: x for n, x in what_all.items() if n not in ("kv_heads", "scale", "causal")}
    args: tuple[Any, ...] = (o, do, lse, numbers, team.rank)
    host.launch(ring_gradient_kernels.query_numbers, args, **numbered, tile=how.keys.BM, high=high)
    seen: tuple[Any, ...] = ()
    keys_seen: tuple[Any, ...] = ()
    if starts is not None:
        seen = (sequence.seen(starts, given, team.rank, causal),)
        keys_seen = (sequence.seen(starts, given, team.rank, causal, keys=True),)
    counters = space.counters(of_keys[0], of_keys[1] + 1)
    args = (q, keys, values, do, queries, grads, numbers, counters, dq, *seen, *keys_seen)
    taken = by_queries(how, given)
    host.launch(ring_gradient_kernels.query_gradients, args, **what_all, **taken, tile=how.keys.BM)
    if k.numel():
        tiles = {**vars(how.keys), "high": high}
        tiles["longest_first"] = attention_backward.is_longest_first(
            causal, chunks.parts * ceil_div(chunks.each, how.keys.BN), of_keys[1], units
        )
        args = (queries, k, v, grads, numbers, dk, dv, team.rank, *keys_seen)
        host.launch(ring_gradient_kernels.key_gradients, args, **what_all, **tiles)
    return dq, dk, dv


def by_queries(how: Config, given: sequence.Operands) -> dict[str, Any]:
    """What the kernel of dq takes."""
    tiles = dict(vars(how.queries))
    del tiles["ahead"]
    forward = ring.Config(**tiles, blocks=how.blocks, high=how.high)
    return ring.taken(forward, given)


# ---- what is right, and what it is measured against


#: queries whose scores a drawing rank has at once
AT_ONCE = 2048


def draw(**shape: Any) -> dict[str, Any]:
    """A rank's rows of normal random inputs, and what the forward left of them, in float32."""
    made = sequence.draw(**shape)
    whole = sequence.draw(**{**shape, "rank": 0, "world": 1})
    packed, rank, world = "starts" in made, shape.get("rank", 0), shape.get("world", 1)
    chunks = sequence.Chunks(shape["length"], world, 1 + (shape.get("layout") == "zigzag"))
    q, k, v = (x.transpose(0, 1)[None] if packed else x for x in (made["q"], whole["k"], whole["v"]))
    o, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    mask = ring.mask_of(q, chunks, rank, made["causal"], made.get("starts"))
    for rows in torch.arange(q.shape[2], device=q.device).split(AT_ONCE):
        for b in range(q.shape[0]):
            for h in range(q.shape[1]):
                key, value = (x[b, h * k.shape[1] // q.shape[1]].float() for x in (k, v))
                s = q[b, h, rows].float() @ key.T * q.shape[-1] ** -0.5
                if mask is not None:
                    s.masked_fill_(~mask[rows], -torch.inf)
                total = s.logsumexp(-1)
                lse[b, h, rows] = total
                o[b, h, rows] = (s.sub_(total[:, None]).exp_() @ value).to(o.dtype)
    grads = sequence.draw(**{**shape, "seed": shape.get("seed", 0) + 500})["q"]
    if packed:
        o, lse = o[0].transpose(0, 1).contiguous(), lse[0]
    return {"do": grads, **made, "o": o, "lse": lse}


def reference(everyone: list[dict[str, Any]]) -> list[Any]:
    first = everyone[0]
    starts, causal = first.get("starts"), first["causal"]
    do, q, k, v, o = (sequence.together(everyone, name) for name in ("do", "q", "k", "v", "o"))
    lse = sequence.together(everyone, "lse", 1 if starts is not None else 2)
    want = attention_backward.reference(do, q, k, v, o, lse, causal, starts, starts)
    axis = 0 if starts is not None else 2
    return sequence.apart(want, (axis,) * 3, everyone)


def by_library(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any, causal: bool, rows: int,
    layout: str = "contiguous", starts: torch.Tensor | None = None, **_: Any,
) -> Callable[[], Any]:  # fmt: skip
    """torch's gradients of attention over keys and values that were gathered before, then
    torch.distributed's sums of everyone's dk and dv."""
    distributed = torch.distributed
    chunks = sequence.Chunks(rows, distributed.get_world_size(group), 1 + (layout == "zigzag"))
    packed, axis, rank = starts is not None, 2 if starts is None else 0, distributed.get_rank(group)

    def by_head(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1)[None] if packed else x

    whole = [ring.gathered(x, chunks, axis, group)() for x in (k, v)]
    with measure.beside(q), torch.enable_grad():
        leaves = [x.detach().clone().requires_grad_() for x in (q, *whole)]
        queries, keys, values = map(by_head, leaves)
        o = ring.attended(queries, keys, values, chunks, rank, causal, starts)
    sums = [ring.scattered(x, chunks, rank, axis, group) for x in (k, v)]

    def call() -> Any:
        dq, *others = torch.autograd.grad(o, leaves, by_head(do), retain_graph=True, materialize_grads=True)
        return dq, *(add(x) for add, x in zip(sums, others, strict=True))

    return call


def alone(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    causal: bool, rows: int, **_: Any,
) -> Any:  # fmt: skip
    """Our gradients of as many products: without a causal mask, over the keys that a query sees on
    average."""
    if q.numel() == 0:
        return lambda: None
    if q.dim() == 3:
        do, q, k, v, o = (x.transpose(0, 1)[None].contiguous() for x in (do, q, k, v, o))
        lse = lse[None]
    keys = max(1, rows // 2 if causal else rows)
    k, v = (random_like(x, *x.shape[:2], keys, x.shape[3]) for x in (k, v))
    return lambda: attention_backward.attention_gradients(do, q, k, v, o, lse)


def flops(
    world: int, length: int, heads: int, dim: int, batch: int = 1, causal: bool = False, **_: Any
) -> float:
    return attention_backward.flops(batch, heads, length, dim, causal=causal) / world


def remote(world: int, length: int, heads: int, dim: int, kv_heads: int = 0, **shape: Any) -> float:
    """Of a rank's keys and values, queries and their gradients, which go to all others that need them."""
    pairs = ((kv_heads or heads), heads)
    return sum(ring.remote(world, length, heads, dim, kv_heads=n, **shape) for n in pairs)


def pick(
    world: int, length: int, heads: int, dim: int, batch: int = 1, layout: str = "contiguous",
    units: int = 132, **_: Any,
) -> Pick:  # fmt: skip
    parts = 1 + (layout == "zigzag")
    each = ceil_div(length, parts * world)
    tiles = parts * ceil_div(each, choose(dim, each, batch * heads, units).queries.BM)
    return Pick("fused", min(units, tiles * batch * heads))


_FEW = {"config": Config(Tiles(32, 16, 128), Tiles(16, 32, 128), 3, 16)}
SMALL: tuple[dict[str, Any], ...] = (
    {"length": 40, "heads": 1, "dim": 24, "causal": True},
    {"length": 80, "heads": 2, "kv_heads": 1, "dim": 16, "causal": True, "layout": "zigzag"},
    {"length": 50, "heads": 2, "kv_heads": 1, "dim": 16, "packed": 3},
    {"length": 2, "heads": 1, "dim": 40, "batch": 2, "layout": "zigzag", "dtype": "float16"},
    {"length": 70, "heads": 1, "dim": 16, "packed": 4, "causal": True, "layout": "zigzag"},
)

OP = RankOp(
    name="ring_attention_backward",
    run=ring_attention_backward,
    draw=draw,
    reference=reference,
    pick=pick,
    ways=lambda **_: {"fused": {}},
    cases=(
        *(Case({**shape, **_FEW}, small=True) for shape in SMALL),
        Case({"length": 30, "heads": 1, "dim": 8, "layout": "zigzag", "batch": 2}, small=True),
        *(Case({**shape, "length": 20 * shape["length"], "dim": 64}) for shape in SMALL),
        *(Case({**SMALL[1], "length": 2000, "dim": dim}) for dim in (128, 192, 256)),
        *(Case(shape, bar=1.0) for shape in ring.BENCH),
    ),
    peers={"library": by_library},
    alone=alone,
    flops=flops,
    remote=remote,
)
