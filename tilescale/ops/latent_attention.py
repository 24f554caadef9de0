"""``mla_decode(q, cache, lengths)``: multi-head latent attention, one query token a sequence (DeepSeek-V2,
2024, §2.1, in its absorbed form). All heads attend to one latent vector a token, whose first ``latent``
numbers are keys and values at once and whose others (the rotary part) are keys alone:

    o[b, h] = softmax(scale · q[b, h] · kv[b, :n]ᵀ) · kv[b, :n, :latent],   n = lengths[b].

A block has 64 heads of one sequence and a part of its context. Where there may be several parts, a second
kernel adds them up, in their order. Contexts that differ are begun longest first, so that the GPU's
multiprocessors end together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import tilescale.language as T
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import host
from tilescale.ops.case import ROUNDING, Case, Expected, Op, expected, generator, normal, summed

LOG2_E = 1.4426950408889634
DTYPES = ("bfloat16", "float16")
#: tokens of a tile, of which a round has two; half as many where a block has less shared memory than a
#: Hopper's
TILE = 64
ENOUGH = 227 << 10
#: exponents of two are counted from a score that was greatest once, as long as none exceeds it by more:
#: exponentials stay below 2^8
SLACK = 8.0
#: columns of the queries, beside the rotary part, that stay in registers, which spares shared memory reads; a
#: swizzled box has as many
KEPT = 64
#: blocks of a sequence that fetch its tokens together
CLUSTER = 2


# ---- kernels


class Half(NamedTuple):
    """What a block has for one of a round's two tiles, and for one half of the result's columns."""

    #: both halves of its tile's values, and the rotary part
    kv: Any
    #: of the queries what its scores have in registers: the rotary part, and the last columns in front of it
    q: Any
    o: Any
    s: Any
    #: the exponentials of its tile as its own product has them, and as the other half's does
    w: Any
    p: Any
    #: the score from which exponents count, before this tile and with it; how much what was summed before
    #: shrinks by it, and by the other's; the exponentials' sum
    prev_max: Any
    row_max: Any
    shrink: Any
    peer_scale: Any
    total: Any
    #: for the other half, in shared memory: ``row_max``, ``shrink``, the whole sum
    most: Any
    fall: Any
    sums: Any


def half(BH: int, BN: int, wide: int, kept: int, rope: int, dtype: str) -> Half:
    """``kept``: so many of the queries' last values stay in registers. Exponentials do where products are a
    warpgroup's own, which have 64 rows; those of warps that share rows would have all columns of the operand
    in each warp."""
    kv = [T.alloc_shared((BN, n), dtype) for n in (wide, wide, rope)]
    o, s, *q = (
        T.alloc_fragment((BH, n), kind)
        for n, kind in ((wide, "float32"), (BN, "float32"), (rope, dtype), (kept, dtype))
        if n
    )
    w, p = (
        make((BH, BN), dtype)
        for make in (T.alloc_fragment if BN == BH == TILE else T.alloc_shared, T.alloc_shared)
    )
    return Half(
        kv, q, o, s, w, p, *(make((BH,), "float32") for make in [T.alloc_fragment] * 5 + [T.alloc_shared] * 3)
    )


@T.macro
def hide(s, at, length):
    if at + s.shape[1] > length:
        for i, j in T.Parallel(*s.shape):
            s[i, j] = T.if_then_else(at + j < length, s[i, j], -T.infinity("float32"))


@T.macro
def rise(h, before, factor):
    """From which score exponents count, and how much what was summed before shrinks by it."""
    T.copy(before.most, h.prev_max)
    T.reduce_max(h.s, h.row_max, dim=1, nan_propagate=True)
    for i in T.Parallel(h.s.shape[0]):
        h.row_max[i] = T.if_then_else(
            (h.row_max[i] - h.prev_max[i]) * factor > SLACK, h.row_max[i], h.prev_max[i]
        )
        h.shrink[i] = T.__exp2((h.prev_max[i] - h.row_max[i]) * factor)
        h.total[i] *= h.shrink[i] * h.peer_scale[i]
        h.fall[i] = h.shrink[i]
        h.most[i] = h.row_max[i]


@T.macro
def weigh(h, factor):
    for i, j in T.Parallel(*h.s.shape):
        h.s[i, j] = T.__exp2(h.s[i, j] * factor - h.row_max[i] * factor)
    T.copy(h.s, h.w)
    T.copy(h.w, h.p)


@T.macro
def shrink(o, by):
    for i, j in T.Parallel(*o.shape):
        if by[i] != 1.0:
            o[i, j] *= by[i]


def decode(
    heads: int,
    latent: int,
    rope: int,
    scale: float,
    dtype: str,
    page: int,
    parts: int,
    BH: int,
    BN: int,
    cluster: int = 1,
) -> Any:
    """q (batch, heads, latent + rope) over a cache (batch, most, latent + rope), or over pages (pages, page,
    latent + rope) of which Table (batch, most pages) has each sequence's. Order (batch,): the sequences in
    the order in which they are begun. A part has ``share`` rounds of two tiles. One part: O (batch, heads,
    latent). More: each block's part of O, divided by its own total, (parts, batch, heads, latent) in float32,
    and log2 of that total (parts, batch, heads); parts without tokens are not written."""
    batch, rows, pages, width = T.dynamic("batch"), T.dynamic("rows"), T.dynamic("pages"), latent + rope
    factor, wide, alone = scale * LOG2_E, latent // 2, T.GemmWarpPolicy.FullRow
    # With pages, who copies needs registers.
    kept = KEPT if BN == BH == TILE and wide > KEPT and not page else 0
    held = (rows, page, width) if page else (batch, rows, width)
    made, made_type = (
        ((batch, heads, latent), dtype) if parts == 1 else ((parts, batch, heads, latent), "float32")
    )

    @T.prim_func
    def mla_decode(
        Q: T.Tensor((batch, heads, width), dtype),
        KV: T.Tensor(held, dtype),
        Table: T.Tensor((batch, pages), "int32"),
        Lengths: T.Tensor((batch,), "int32"),
        Order: T.Tensor((batch,), "int32"),
        O: T.Tensor(made, made_type),
        Sums: T.Tensor((parts, batch, heads), "float32"),
        share: T.int32,
    ):
        with T.Kernel(block=(heads // BH, parts, batch), cta_cluster=cluster, threads=256) as (
            group,
            part,
            turn,
        ):
            q = T.alloc_shared((BH, latent - kept), dtype)
            one, two = halves = [half(BH, BN, wide, kept, rope, dtype) for _ in range(2)]
            b = Order[turn]
            length, first = Lengths[b], part * share
            rounds = T.max(T.min(T.ceildiv(length, 2 * BN) - first, share), 0)
            T.copy(Q[b, group * BH, 0], q)
            T.fill(two.most, -T.infinity("float32"))
            for h in halves:
                for n in range(len(h.q)):
                    T.copy(Q[b, group * BH, latent - n * kept], h.q[n])
                T.clear(h.o)
                T.clear(h.total)
                T.fill(h.peer_scale, 1.0)
            T.barrier()
            for t in T.Pipelined(rounds, num_stages=1):
                now = 2 * (first + t) * BN
                for k, n in ((0, 2), (1, 2), (0, 0), (0, 1), (1, 1), (1, 0)):  # as their memory is free again
                    # Behind the last: it again, masked.
                    at = T.if_then_else(now + k * BN < length, now + k * BN, now)
                    T.copy(
                        KV[((Table[b, at // page], at % page) if page else (b, at)) + (n * wide,)],
                        halves[k].kv[n],
                    )
                for h, order in (one, (0, 1)), (two, (1, 0)):
                    T.gemm(h.q[0], h.kv[2], h.s, transpose_B=True, policy=alone, clear_accum=True)
                    for n in order:
                        if n * kept:
                            T.gemm(h.q[1], h.kv[1][:, wide - kept :], h.s, transpose_B=True, policy=alone)
                        own = wide - n * kept
                        T.gemm(
                            q[:, n * wide : n * wide + own],
                            h.kv[n][:, :own],
                            h.s,
                            transpose_B=True,
                            policy=alone,
                        )
                hide(one.s, now, length)
                hide(two.s, now + BN, length)
                rise(one, two, factor)
                weigh(one, factor)
                shrink(one.o, one.shrink)
                T.gemm(one.w, one.kv[0], one.o, policy=alone)
                T.copy(one.fall, two.peer_scale)
                rise(two, one, factor)
                shrink(two.o, two.peer_scale)
                T.gemm(one.p, one.kv[1], two.o, policy=alone)
                T.copy(two.fall, one.peer_scale)
                shrink(one.o, one.peer_scale)
                T.copy(two.most, two.row_max)  # so that exponentials stand behind the product
                weigh(two, factor)
                shrink(two.o, two.shrink)
                T.gemm(two.p, two.kv[0], one.o, policy=alone)
                T.gemm(two.w, two.kv[1], two.o, policy=alone)
                for h in halves:
                    T.reduce_sum(h.s, h.total, dim=1, clear=False)
            for h in halves:
                for i in T.Parallel(BH):
                    h.sums[i] = h.total[i] * (one.peer_scale[i] if h is one else 1.0)
            for i in T.Parallel(BH):  # nothing for a sequence without tokens
                one.fall[i] = T.if_then_else(
                    one.sums[i] + two.sums[i] > 0, 1.0 / (one.sums[i] + two.sums[i]), 0.0
                )
            for k in range(2):
                shrink(halves[k].o, one.fall)
                if parts == 1 or rounds > 0:
                    T.copy(halves[k].o, O[((b,) if parts == 1 else (part, b)) + (group * BH, k * wide)])
            if parts > 1 and rounds > 0:
                for i in T.Parallel(BH):
                    Sums[part, b, group * BH + i] = T.log2(one.sums[i] + two.sums[i]) + two.most[i] * factor

    return mla_decode


def combine(heads: int, latent: int, dtype: str, parts: int, BN: int, threads: int = 128) -> Any:
    """O = the O of the parts that there are, weighted by their totals, in order."""
    batch = T.dynamic("batch")

    @T.prim_func
    def mla_combine(
        P: T.Tensor((parts, batch, heads, latent), "float32"),
        Sums: T.Tensor((parts, batch, heads), "float32"),
        Lengths: T.Tensor((batch,), "int32"),
        O: T.Tensor((batch, heads, latent), dtype),
        share: T.int32,
    ):
        with T.Kernel(heads, batch, threads=threads) as (h, b):
            top, total, weight = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("float32")
            o = T.alloc_fragment((latent,), "float32")
            count = T.min(T.ceildiv(Lengths[b], 2 * BN * share), parts)
            top = -T.infinity("float32")
            for k in T.serial(count):
                top = T.max(top, Sums[k, b, h])
            T.clear(o)
            for k in T.serial(count):
                weight = T.exp2(Sums[k, b, h] - top)
                total += weight
                for j in T.Parallel(latent):
                    o[j] += P[k, b, h, j] * weight
            for j in T.Parallel(latent):
                O[b, h, j] = T.cast(o[j] * T.if_then_else(total > 0, 1.0 / total, 0.0), dtype)

    return mla_combine


def longest_first(threads: int = 128) -> Any:
    """Order = the sequences by falling length, equal ones by their numbers: a sequence's place is how many
    come before it."""
    batch = T.dynamic("batch")

    @T.prim_func
    def mla_order(Lengths: T.Tensor((batch,), "int32"), Order: T.Tensor((batch,), "int32")):
        with T.Kernel(T.ceildiv(batch, threads), threads=threads) as block:
            own, place = T.alloc_fragment((threads,), "int32"), T.alloc_fragment((threads,), "int32")
            T.copy(Lengths[block * threads], own)
            T.clear(place)
            for j in T.serial(batch):
                for k in T.Parallel(threads):
                    earlier = T.if_then_else(
                        j < block * threads + k, Lengths[j] >= own[k], Lengths[j] > own[k]
                    )
                    place[k] += T.if_then_else(earlier, 1, 0)
            for k in T.Parallel(threads):
                if block * threads + k < batch:
                    Order[place[k]] = block * threads + k

    return mla_order


# ---- what people call


@functools.cache
def as_they_are(batch: int, device: torch.device) -> torch.Tensor:
    """The sequences in the order of their numbers."""
    return torch.arange(batch, dtype=torch.int32, device=device)


@functools.cache
def plan(batch: int, groups: int, rounds: int, units: int) -> tuple[tuple[int, int, int], ...]:
    """Which sequences go into a launch, from one to another, and into how many parts their contexts are cut
    there, so that ``units`` multiprocessors, each with a block, end together: all alike, or the last ones,
    which would not fill a wave, finer than the others. Counted in rounds' times: a block begins and ends for
    one, parts for one more, adding one up takes 0.02, a second launch two."""

    def time(sequences: int, k: int) -> float:
        blocks = sequences * groups * k
        return -(-blocks // units) * (-(-rounds // k) + (2 if k > 1 else 1)) + (
            0.02 * blocks if k > 1 else 0.0
        )

    cuts = range(1, max(1, min(rounds // 2, 32)) + 1)
    k = min(cuts, key=lambda k: time(batch, k))
    whole = batch * groups // units * units // groups  # sequences in full waves
    if 0 < whole < batch:
        last = min(cuts, key=lambda k: time(batch - whole, k))
        if time(whole, 1) + time(batch - whole, last) + 2 < time(batch, k):
            return (0, whole, 1), (whole, batch, last)
    return ((0, batch, k),)


@host.checked
def mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    lengths: torch.Tensor,
    *,
    latent: int = 512,
    scale: float | None = None,
    table: torch.Tensor | None = None,
    longest: int | None = None,
    parts: int | None = None,
    ragged: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One step of decoding, o (batch, heads, latent) of q's dtype; the same bits from run to run.

    Args:
        q: (batch, heads, width) of bfloat16 or float16. cache: (batch, most, width) of q's dtype, or, with
            ``table``, pages (pages, page, width) of a multiple of 64 tokens. What lies in a tile of 64 tokens
            behind a sequence's last one is read, and must be finite. lengths: (batch,) int32, on the device;
            none above what the cache has, which is not looked at. table: (batch, most pages) int32, which
            page has a sequence's next tokens.
        latent: how many of the width's numbers are values. scale: of the scores; width ** -0.5 without.
        longest: the greatest length, where it is less than the cache has room for (what lies behind it is not
            read). parts: how many parts the longest context has; what fills the GPU where all are equally
            long, without. ragged: contexts differ much; the longest are begun first, which a kernel in front
            finds out.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    dtype = host.dtype_name(q)
    if (
        q.dim() != 3
        or cache.dim() != 3
        or q.shape[-1] != cache.shape[-1]
        or not 0 < latent < q.shape[-1]
        or latent % 2
    ):
        raise TileValueError(
            f"q {tuple(q.shape)}, cache {tuple(cache.shape)}, latent={latent}",
            expected="(batch, heads, width), (batch or pages, tokens, width), an even number of values",
        )
    if dtype not in DTYPES or cache.dtype != q.dtype:
        raise TileTypeError(
            f"mla_decode of {dtype} over {host.dtype_name(cache)}", expected="both bfloat16 or both float16"
        )
    batch, heads, width = q.shape
    page = cache.shape[1] if table is not None else 0
    if (
        table is None
        and cache.shape[0] != batch
        or tuple(lengths.shape) != (batch,)
        or table is not None
        and table.shape[0] != batch
    ):
        raise TileValueError(
            f"{batch} queries, a cache of {cache.shape[0]}, {tuple(lengths.shape)} lengths",
            expected="one batch",
        )
    if any(t is not None and t.dtype != torch.int32 for t in (lengths, table)):
        raise TileTypeError("lengths or a table of another dtype", expected="int32")
    if page % TILE or not all(
        t.is_contiguous() for t in (q, cache, lengths) + (() if table is None else (table,))
    ):
        raise TileValueError(
            f"pages of {page} tokens, or a tensor that is not contiguous",
            expected=f"multiples of {TILE}, contiguous",
        )
    if 0 in (*q.shape, *cache.shape):
        raise TileValueError(
            f"q {tuple(q.shape)}, cache {tuple(cache.shape)}", expected="extents of 1 at least"
        )
    BH = 64 if heads % 64 == 0 else next(b for b in (32, 16, 8, 4, 2, 1) if heads % b == 0)
    o = host.result(out, (batch, heads, latent), q.dtype, q)
    most = longest or (cache.shape[1] if table is None else page * table.shape[1])
    BN = TILE if host.shared_memory(q.device) >= ENOUGH else TILE // 2
    rounds = -(-most // (2 * BN))
    units = host.multiprocessors(q.device)
    if parts is None and ragged and batch * heads // BH > units:
        parts = 1  # the shorter ones fill what the longest leave
    launches = plan(batch, heads // BH, rounds, units) if parts is None else ((0, batch, min(parts, rounds)),)
    what = {"heads": heads, "latent": latent, "dtype": dtype, "BN": BN}
    cluster = CLUSTER if heads // BH % CLUSTER == 0 else 1
    more = {
        "rope": width - latent,
        "scale": float(scale or width**-0.5),
        "page": page,
        "BH": BH,
        "cluster": cluster,
    }
    for first, last, cuts in launches:
        some, share = slice(first, last), -(-rounds // cuts)
        sums = torch.empty(cuts, last - first, heads, dtype=torch.float32, device=q.device)
        part = (
            o[some] if cuts == 1 else torch.empty(*sums.shape, latent, dtype=torch.float32, device=q.device)
        )
        held = (cache[some], lengths[some].view(-1, 1)) if table is None else (cache, table[some])
        order = as_they_are(last - first, q.device)
        if ragged:
            host.launch(longest_first, (lengths[some], order := torch.empty_like(lengths[some])))
        host.launch(
            decode, (q[some], *held, lengths[some], order, part, sums, share), **what, **more, parts=cuts
        )
        if cuts > 1:
            host.launch(combine, (part, sums, lengths[some], o[some], share), **what, parts=cuts)
    return o


# ---- what is right, and what it is measured against


def draw(
    batch: int,
    heads: int,
    context: int,
    latent: int = 512,
    rope: int = 64,
    dtype: str = "bfloat16",
    page: int = 0,
    ragged: bool = False,
    parts: int = 0,
    device: Any = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """``ragged``: contexts of one token to ``context``. With pages of ``page`` tokens they lie in a random
    order among others."""
    g, width = generator(device, seed), latent + rope
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    if ragged:
        lengths = torch.randint(1, context + 1, (batch,), generator=g, device=device, dtype=torch.int32)
    made: dict[str, Any] = {
        "q": normal((batch, heads, width), dtype, g),
        "lengths": lengths,
        "latent": latent,
        "scale": 2 * width**-0.5,
    }
    if page:
        count = -(-context // page)
        made["cache"] = normal((batch * count + 3, page, width), dtype, g)
        made["table"] = (
            torch.randperm(batch * count + 3, generator=g, device=device)[: batch * count]
            .to(torch.int32)
            .view(batch, count)
        )
    else:
        made["cache"] = normal((batch, context, width), dtype, g)
    return {**made, **({"parts": parts} if parts else {}), **({"ragged": True} if ragged else {})}


def reference(
    q: torch.Tensor,
    cache: torch.Tensor,
    lengths: torch.Tensor,
    latent: int,
    scale: float,
    table: torch.Tensor | None = None,
    **_: Any,
) -> tuple[Expected, ...]:
    """In float64, sequence by sequence. Scores are off by their sum's roundings and so, relatively, are their
    exponentials, which are rounded to q's dtype before they are multiplied: roundings that add up as their
    root."""
    unit, values, noises = ROUNDING[q.dtype], [], []
    for b, n in enumerate(lengths.tolist()):
        kv = (cache[b] if table is None else cache[table[b].long()].flatten(0, 1))[:n].double()
        x, v = q[b].double(), kv[:, :latent]
        s = x @ kv.T * scale
        p = s.softmax(-1)
        off = summed(x.abs() @ kv.abs().T * scale, kv.shape[1]).amax(-1, keepdim=True)
        off = off + (s - s.amax(-1, keepdim=True)).abs().amax() * 2.0**-21
        plain = p @ v.abs()
        values.append(p @ v)
        noises.append(
            plain * (2 * off + 2.0**-18) + unit * torch.minimum(plain, 8 * (p.square() @ v.square()).sqrt())
        )
    return (expected(torch.stack(values), q.dtype, noise=torch.stack(noises)),)


def in_torch(
    q: torch.Tensor,
    cache: torch.Tensor,
    lengths: torch.Tensor,
    latent: int,
    scale: float,
    table: torch.Tensor | None = None,
    **_: Any,
) -> Callable[[], Any]:
    """Two batched products and a softmax; a paged cache is gathered first, by the preparation."""
    kv = cache if table is None else cache[table.long()].flatten(1, 2)
    hidden = torch.arange(kv.shape[1], device=q.device) >= lengths[:, None, None]
    mask = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -torch.inf)
    return lambda: torch.baddbmm(mask, q, kv.transpose(1, 2), alpha=scale).softmax(-1) @ kv[..., :latent]


def flops(
    batch: int, heads: int, context: int, latent: int = 512, rope: int = 64, ragged: bool = False, **_: Any
) -> float:
    return 2.0 * batch * heads * context * (2 * latent + rope) * (0.5 if ragged else 1.0)


OP = Op(
    name="mla_decode",
    run=mla_decode,
    draw=draw,
    reference=reference,
    cases=(
        *(
            Case({"latent": 64, "rope": 16, **s}, small=True)
            for s in (
                {"batch": 2, "heads": 16, "context": 150, "ragged": True},
                {"batch": 3, "heads": 4, "context": 300, "page": 64, "ragged": True},
                {"batch": 1, "heads": 16, "context": 1},
                {"batch": 2, "heads": 16, "context": 200, "ragged": True, "parts": 3, "dtype": "float16"},
                {"batch": 2, "heads": 64, "context": 90, "page": 128, "ragged": True, "parts": 2},
                {"batch": 2, "heads": 128, "context": 150, "ragged": True},
            )
        ),
        *(
            Case({"heads": h, **s, "dtype": d})
            for h in (16, 128)
            for d in DTYPES
            for s in (
                {"batch": 3, "context": 1000, "ragged": True},
                {"batch": 7, "context": 777, "page": 64, "ragged": True},
                {"batch": 2, "context": 4096, "page": 256},
                {"batch": 40, "context": 600, "ragged": True, "parts": 1},
                {"batch": 1, "context": 63},
            )
        ),
        *(
            Case({"batch": b, "heads": 128, "context": 8192, **s}, bar=1.0)
            for b, s in (
                (132, {}),
                (64, {}),
                (200, {}),
                (132, {"ragged": True}),
                (132, {"page": 64}),
                (132, {"page": 64, "ragged": True}),
            )
        ),
    ),
    peers={"torch": in_torch},
    flops=flops,
    moved=lambda batch, context, latent=512, rope=64, ragged=False, **_: (
        2.0 * batch * context * (latent + rope) * (0.5 if ragged else 1.0)
    ),
)
