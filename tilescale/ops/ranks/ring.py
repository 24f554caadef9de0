"""``ring_attention(q, k, v)``: attention over a sequence that is cut among ranks, in one kernel. Each rank
keeps its queries and walks over everyone's keys and values, its own first, with the running softmax in
registers (Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers", 2023).

Keys and values do not travel from rank to rank: each rank pulls them from their owners, the rank's before it
first, so that all ranks read from different ones. Where all ranks reach each other directly, as GPUs of one
host do, that takes as many bytes of each link as a ring. It needs no slot that is free again: no rank waits
until another one has read, and chunks that no query of the rank sees are not pulled. The price is symmetric
memory for the keys and values of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilescale.ops import attention, host
from tilescale.ops.case import random_like
from tilescale.ops.gemm_kernels import ceil_div
from tilescale.ops.ranks import sequence
from tilescale.ops.ranks.case import Case, Pick, RankOp
from tilescale.ops.ranks.gemms import counted
from tilescale.ops.ranks.groups import Group, filled, gather_into, scatter_into, team_of
from tilescale.ops.ranks.ring_kernels import ring
from tilescale.ops.ranks.workspace import workspace


@dataclass(frozen=True)
class Config:
    """Queries and keys of a tile, threads of a block, stages of the rings, blocks that stay, rows of a head
    that one pull moves."""

    BM: int = 128
    BN: int = 128
    threads: int = 256
    stages: int = 2
    blocks: int = 132
    high: int = 256


def choose(dim: int, causal: bool, each: int, units: int = 132) -> Config:
    """For chunks of ``each`` rows: the tiles of `flash_attention`, where registers suffice for blocks that
    stay."""
    tile = attention.tile_of(dim, causal, queries=each, keys=each, units=units)
    return Config(tile.BM, tile.BN, tile.threads, max(2, tile.stages), units)


@host.checked
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "contiguous",
    starts: torch.Tensor | None = None,
    group: Group = None,
    rows: int | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale · q·kᵀ)·v of this rank's queries over the keys of all ranks, of the inputs' dtype, and
    the logarithms of the sums of exp(scale · scores), float32; the same bits from run to run. Collective.

    Args:
        q: this rank's rows of the sequence, (batch, heads, rows, dim) of bfloat16 or float16. k, v: (batch,
            kv_heads, rows, dim); each of them serves heads / kv_heads neighbouring heads. dim is a multiple
            of 8, 256 at most.
        causal: a query sees the keys up to its own place in the whole sequence.
        scale: of the scores, positive; dim ** -0.5 without.
        layout: which rows a rank of n has: "contiguous", the r-th of n chunks; "zigzag", the r-th and then
            the r-th but one to the last of 2n, by which a causal mask leaves all ranks as much to do
            (`sequence.Chunks`).
        starts: sequences one behind the other: q is (rows, heads, dim), k and v (rows, kv_heads, dim), the
            second result (heads, rows), and starts (count + 1,) int32 say where each begins and the last
            ends, in places of all ranks' rows together, alike on all ranks.
        group: who takes part, see `groups.team_of`; all ranks without.
        rows: all ranks' rows together, where they do not have equally many.
        out: takes the results. config: how the work is done, where the choice by the shape is not wanted;
            alike on all ranks.

    Raises:
        TileValueError, TileTypeError: shapes, dtypes, layouts or groups that do not fit.
    """
    team = team_of(group)
    given = sequence.checked("ring_attention", (q,), (k, v), team, layout, rows, scale, starts)
    to = out or (None, None)
    numbers = (given.heads, q.shape[0]) if given.packed else tuple(q.shape[:3])
    o = host.result(to[0], tuple(q.shape), q.dtype, q)
    lse = host.result(to[1], numbers, torch.float32, q, "lse")
    chunks = given.chunks
    if chunks.rows == 0:
        return o, lse
    if team.size == 1:
        ends = {"q_starts": starts, "k_starts": starts, "longest": chunks.rows} if given.packed else {}
        return attention.flash_attention(q, k, v, causal=causal, scale=scale, out=(o, lse), **ends)
    how = counted(config or choose(given.dim, causal, chunks.each, host.units(q.device)), Config)
    space, heads = workspace(team), given.batch * given.kv_heads
    shape = (chunks.world * chunks.parts, heads, chunks.each, given.dim)
    keys, values = space.tensors(q, (shape, q.dtype), (shape, q.dtype), what="q")
    sequence.into_chunks(keys, k, given, team.rank)  # before this rank enters the launch
    sequence.into_chunks(values, v, given, team.rank)
    what = {**given.constants(q, causal), **taken(how, given)}
    bounds = () if starts is None else (sequence.seen(starts, given, team.rank, causal),)
    host.launch(ring, (q, keys, values, space.counters(*shape[:2]), o, lse, *bounds), **what)
    return o, lse


def taken(how: Config, given: sequence.Operands) -> dict[str, Any]:
    """A Config's fields as the kernel takes them: of blocks as many as there are tiles; and how many heads'
    tiles blocks go through together, as many as fill them."""
    tiles = given.chunks.parts * ceil_div(given.chunks.each, how.BM)
    every, shared = given.batch * given.heads, given.heads // given.kv_heads
    side = min(every, ceil_div(ceil_div(how.blocks, tiles), shared) * shared)
    high = min(how.high, given.chunks.each)
    return {**vars(how), "blocks": min(how.blocks, tiles * every), "side": side, "high": high}


# ---- what is right, and what it is measured against


def reference(everyone: list[dict[str, Any]]) -> list[Any]:
    first = everyone[0]
    starts, causal = first.get("starts"), first["causal"]
    q, k, v = (sequence.together(everyone, name) for name in "qkv")
    axes = (0, 1) if starts is not None else (2, 2)
    return sequence.apart(attention.reference(q, k, v, causal, starts, starts), axes, everyone)


def places_among_equal(chunks: sequence.Chunks) -> torch.Tensor:
    """Where the rows of the sequence lie among all ranks' rows, filled up to equally many."""
    each, held = chunks.parts * chunks.each, [chunks.held(r) for r in range(chunks.world)]
    kept = torch.cat([torch.arange(n) + r * each for r, n in enumerate(held)])
    return kept[torch.cat([chunks.places(r) for r in range(chunks.world)]).argsort()]


def gathered(x: torch.Tensor, chunks: sequence.Chunks, axis: int, group: Any) -> Callable[[], torch.Tensor]:
    """The sequence that x is a part of, by the library's gather."""
    padded = filled(x.transpose(0, axis).contiguous(), chunks.parts * chunks.each)
    every = padded.new_empty(chunks.world * padded.shape[0], *padded.shape[1:])
    at = places_among_equal(chunks).to(x.device)

    def call() -> torch.Tensor:
        gather_into(every, padded, group)
        return every.index_select(0, at).transpose(0, axis)

    return call


def scattered(
    x: torch.Tensor, chunks: sequence.Chunks, rank: int, axis: int, group: Any
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The other way: of what all ranks have for the whole sequence this rank's rows of the sum, of x's shape,
    by the library's reduce-scatter."""
    of_row = x.transpose(0, axis).shape[1:]
    part = x.new_empty(chunks.parts * chunks.each, *of_row)
    every = x.new_zeros(chunks.world * len(part), *of_row)
    at = places_among_equal(chunks).to(x.device)

    def call(whole: torch.Tensor) -> torch.Tensor:
        every.index_copy_(0, at, whole.transpose(0, axis))
        scatter_into(part, every, group)
        return part[: chunks.held(rank)].transpose(0, axis)

    return call


def mask_of(q: torch.Tensor, chunks: sequence.Chunks, rank: int, causal: bool, starts: Any) -> Any:
    """Which keys of the whole sequence this rank's queries see; None: all."""
    if not causal and starts is None:
        return None
    at, keys = chunks.places(rank, q.device)[:, None], torch.arange(chunks.rows, device=q.device)
    mask = keys <= at if causal else keys == keys.expand(len(at), -1)
    if starts is None:
        return mask
    return mask & (torch.searchsorted(starts, at, right=True) == torch.searchsorted(starts, keys, right=True))


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunks: sequence.Chunks, rank: int, causal: bool,
    starts: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """torch's attention of a rank's queries, (batch, heads, rows, dim), over the whole sequence; under a
    causal mask a chunk after the other, which needs no mask in memory."""
    attention_of = torch.nn.functional.scaled_dot_product_attention
    if not causal or starts is not None:
        return attention_of(q, k, v, attn_mask=mask_of(q, chunks, rank, causal, starts), enable_gqa=True)
    # Only a benchmark asks for this, and the import brings all of torch's compiler: as long as torch itself.
    from torch.nn.attention.bias import causal_lower_right

    found = [q[:, :, :0]]
    for part in range(chunks.parts):
        chunk, first = chunks.chunk(rank, part), part * chunks.each
        if count := chunks.count(chunk):
            stop = chunk * chunks.each + count
            bias = causal_lower_right(count, stop)
            mine = q[:, :, first : first + count]
            found.append(attention_of(mine, k[:, :, :stop], v[:, :, :stop], attn_mask=bias, enable_gqa=True))
    return torch.cat(found, 2)


def by_library(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any, causal: bool, rows: int,
    layout: str = "contiguous", starts: torch.Tensor | None = None, **_: Any,
) -> Callable[[], Any]:  # fmt: skip
    """torch.distributed's gather of keys and values, then torch's attention."""
    distributed = torch.distributed
    chunks = sequence.Chunks(rows, distributed.get_world_size(group), 1 + (layout == "zigzag"))
    packed = starts is not None
    keys, values = (gathered(x, chunks, 0 if packed else 2, group) for x in (k, v))
    rank = distributed.get_rank(group)

    def by_head(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1)[None] if packed else x

    def call() -> Any:
        o = attended(by_head(q), by_head(keys()), by_head(values()), chunks, rank, causal, starts)
        return o[0].transpose(0, 1) if packed else o

    return call


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, rows: int, **_: Any) -> Any:
    """Our attention of as many products: without a causal mask, over the keys that a query sees on
    average."""
    if q.dim() == 3:
        q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (q, k, v))
    keys = max(1, rows // 2 if causal else rows)
    k, v = (random_like(x, *x.shape[:2], keys, x.shape[3]) for x in (k, v))
    return lambda: attention.flash_attention(q, k, v)


def flops(
    world: int, length: int, heads: int, dim: int, batch: int = 1, causal: bool = False, **_: Any
) -> float:
    return attention.flops(batch, heads, length, dim, causal=causal) / world


def remote(
    world: int, length: int, heads: int, dim: int, batch: int = 1, kv_heads: int = 0, causal: bool = False,
    layout: str = "contiguous", **_: Any,
) -> float:  # fmt: skip
    """Of a rank's keys and values, which go to all others; under a causal mask to those who see them, the
    mean over ranks."""
    part = (0.75 if layout == "zigzag" else 0.5) if causal else 1.0
    return part * (world - 1) * 4.0 * batch * (kv_heads or heads) * length / world * dim


def pick(
    world: int, length: int, heads: int, dim: int, batch: int = 1, causal: bool = False,
    layout: str = "contiguous", units: int = 132, **_: Any,
) -> Pick:  # fmt: skip
    parts = 1 + (layout == "zigzag")
    how = choose(dim, causal, ceil_div(length, parts * world), units)
    tiles = parts * ceil_div(ceil_div(length, parts * world), how.BM)
    return Pick("fused", min(units, tiles * batch * heads))


_FEW = {"config": Config(64, 16, 128, 2, 3, 16)}
SMALL: tuple[dict[str, Any], ...] = (
    {"length": 70, "heads": 2, "kv_heads": 1, "dim": 16},
    {"length": 50, "heads": 1, "dim": 24, "causal": True},
    {"length": 100, "heads": 2, "kv_heads": 1, "dim": 16, "causal": True, "layout": "zigzag"},
    {"length": 2, "heads": 1, "dim": 40, "batch": 2, "causal": True, "layout": "zigzag"},
    {"length": 48, "heads": 1, "dim": 8, "layout": "zigzag", "batch": 2, "dtype": "float16"},
    {"length": 90, "heads": 1, "dim": 16, "packed": 4, "causal": True, "layout": "zigzag"},
    {"length": 50, "heads": 2, "kv_heads": 1, "dim": 16, "packed": 3},
)
BENCH: tuple[dict[str, Any], ...] = tuple(
    {"length": n, "heads": 32, "kv_heads": kv, "dim": 128, "causal": causal, "layout": layout}
    for n in (8192, 32768, 131072)
    for kv in (8, 32)
    for causal, layout in ((False, "contiguous"), (True, "zigzag"))
)

OP = RankOp(
    name="ring_attention",
    run=ring_attention,
    draw=sequence.draw,
    reference=reference,
    pick=pick,
    ways=lambda **_: {"fused": {}},
    cases=(
        *(Case({**shape, **_FEW}, small=True) for shape in SMALL),
        Case({"length": 60, "heads": 1, "dim": 32, "causal": True, "layout": "zigzag"}, small=True),
        *(Case({**shape, "length": 20 * shape["length"], "dim": 64}) for shape in SMALL),
        *(Case(shape, bar=1.0) for shape in BENCH),
    ),
    peers={"library": by_library},
    alone=alone,
    flops=flops,
    remote=remote,
)
