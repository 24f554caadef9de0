"""``mla_decode(q, cache, lengths)``: multi-head latent attention, one query token a sequence (DeepSeek-V2, 2024, §2.1, in its absorbed
form). All heads attend to one latent vector a token, whose first ``latent`` numbers are keys and values at once and whose others (the
rotary part) are keys alone:

    o[b, h] = softmax(scale · q[b, h] · kv[b, :n]ᵀ) · kv[b, :n, :latent],   n = lengths[b].

A block has 64 heads of one sequence and a part of its context. Parts are equally long in all sequences, so that those of ragged contexts
balance; where there may be several, a second kernel adds them up, in their order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import tilescale.language as T
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import host
from tilescale.ops.case import ROUNDING, Case, Expected, Op, expected, generator, normal, summed

LOG2_E = 1.4426950408889634
DTYPES = ("bfloat16", "float16")
#: tokens of a tile, and of a round
TILE, ROUND = 64, 128
#: blocks of a sequence that fetch its tokens together
CLUSTER = 1


# ---- kernels


def decode(
    heads: int, latent: int, rope: int, scale: float, dtype: str, page: int, parts: int, BH: int, cluster: int = 1, BN: int = TILE
) -> Any:  # fmt: skip
    """q (batch, heads, latent + rope) over a cache (batch, most, latent + rope), or over pages (pages, page, latent + rope) of which Table
    (batch, most pages) has each sequence's. A part has ``share`` rounds of two tiles. One part: O (batch, heads, latent). More: each
    block's part of O, divided by its own total, (parts, batch, heads, latent) in float32, and log2 of that total (parts, batch, heads);
    parts without tokens are not written."""
    batch, rows, pages, width = T.dynamic("batch"), T.dynamic("rows"), T.dynamic("pages"), latent + rope
    factor, least, half, alone = scale * LOG2_E, -T.infinity("float32"), latent // 2, T.GemmWarpPolicy.FullRow
    wide = half, half, rope
    q_type, lengths_type = T.Tensor((batch, heads, width), dtype), T.Tensor((batch,), "int32")
    out_type = T.Tensor((batch, heads, latent), dtype) if parts == 1 else T.Tensor((parts, batch, heads, latent), "float32")
    sums_type = T.Tensor((parts, batch, heads), "float32")

    @T.macro
    def body(Q, KV, Table, Lengths, O, Sums, share):
        with T.Kernel(block=(heads // BH, parts, batch), cta_cluster=cluster, threads=256) as (group, part, b):
            q, p = T.alloc_shared((BH, width), dtype), T.alloc_shared((BH, BN), dtype)
            tiles = [[T.alloc_shared((BN, n), dtype) for n in wide] for _ in range(2)]
            s, mass = ([T.alloc_fragment((BH, BN), "float32") for _ in range(2)] for _ in range(2))
            o = [T.alloc_fragment((BH, half), "float32") for _ in range(2)]
            top, was, own, shift, keep, total = ([T.alloc_fragment((BH,), "float32") for _ in range(2)] for _ in range(6))
            most, fall, sums = ([T.alloc_shared((BH,), "float32") for _ in range(2)] for _ in range(3))
            length, first = Lengths[b], part * share
            rounds = T.max(T.min(T.ceildiv(length, 2 * BN) - first, share), 0)
            T.copy(Q[b, group * BH, 0], q)
            T.fill(most[1], least)
            for k in range(2):
                T.clear(o[k])
                T.clear(mass[k])
                T.fill(own[k], least)
            for t in T.Pipelined(rounds, num_stages=1):
                for k in range(2):
                    now = (2 * (first + t) + k) * BN
                    at = T.if_then_else(now < length, now, now - k * BN)  # behind the last tile: the one before, which is masked
                    where, row = (Table[b, at // page], at % page) if page else (b, at)
                    for n in range(3):
                        T.copy(KV[where, row, n * half], tiles[k][n])
                for k in range(2):
                    for n in range(3):
                        T.gemm(q[:, n * half : n * half + wide[n]], tiles[k][n], s[k], False, True, alone, clear_accum=n == 0)
                for k in range(2):
                    at = (2 * (first + t) + k) * BN
                    for i, j in T.Parallel(BH, BN):
                        s[k][i, j] = T.if_then_else(at + j < length, s[k][i, j], least)
                    T.copy(most[1 - k], was[k])
                    T.copy(was[k], top[k])
                    T.reduce_max(s[k], top[k], dim=1, clear=False)
                    for i in T.Parallel(BH):
                        shift[k][i] = top[k][i] * factor
                        keep[k][i] = T.__exp2(own[k][i] * factor - shift[k][i])  # how much the own sum shrinks
                        own[k][i] = top[k][i]
                        fall[k][i] = T.__exp2(was[k][i] * factor - shift[k][i])  # how much o does
                        most[k][i] = top[k][i]
                    for i, j in T.Parallel(BH, BN):
                        s[k][i, j] = T.__exp2(s[k][i, j] * factor - shift[k][i])
                    T.copy(s[k], p)
                    for n in range(2):
                        for i, j in T.Parallel(BH, half):
                            o[n][i, j] *= fall[k][i]
                    for n in range(2):
                        T.gemm(p, tiles[k][n], o[n], policy=alone)
                    for i, j in T.Parallel(BH, BN):
                        mass[k][i, j] = mass[k][i, j] * keep[k][i] + s[k][i, j]
                T.barrier()  # p and most may be written again
            for k in range(2):
                T.reduce_sum(mass[k], total[k], dim=1)
                for i in T.Parallel(BH):
                    sums[k][i] = T.if_then_else(total[k][i] > 0, total[k][i] * T.__exp2((own[k][i] - most[1][i]) * factor), 0.0)
            for i in T.Parallel(BH):
                fall[0][i] = T.if_then_else(sums[0][i] + sums[1][i] > 0, 1.0 / (sums[0][i] + sums[1][i]), 0.0)  # nothing without tokens
            for n in range(2):
                for i, j in T.Parallel(BH, half):
                    o[n][i, j] *= fall[0][i]
                if parts == 1:
                    T.copy(o[n], O[b, group * BH, n * half])
                elif rounds > 0:
                    T.copy(o[n], O[part, b, group * BH, n * half])
            if parts > 1 and rounds > 0:
                for i in T.Parallel(BH):
                    Sums[part, b, group * BH + i] = T.log2(sums[0][i] + sums[1][i]) + most[1][i] * factor

    if page:

        @T.prim_func
        def mla_decode_pages(
            Q: q_type, KV: T.Tensor((rows, page, width), dtype), Table: T.Tensor((batch, pages), "int32"), Lengths: lengths_type,
            O: out_type, Sums: sums_type, share: T.int32,
        ):  # fmt: skip
            body(Q, KV, Table, Lengths, O, Sums, share)

        return mla_decode_pages

    @T.prim_func
    def mla_decode(
        Q: q_type, KV: T.Tensor((batch, rows, width), dtype), Lengths: lengths_type, O: out_type, Sums: sums_type, share: T.int32
    ):
        body(Q, KV, None, Lengths, O, Sums, share)

    return mla_decode


def combine(heads: int, latent: int, dtype: str, parts: int, threads: int = 128) -> Any:
    """O = the O of the parts that there are, weighted by their totals, in order."""
    batch = T.dynamic("batch")

    @T.prim_func
    def mla_combine(
        P: T.Tensor((parts, batch, heads, latent), "float32"), Sums: T.Tensor((parts, batch, heads), "float32"),
        Lengths: T.Tensor((batch,), "int32"), O: T.Tensor((batch, heads, latent), dtype), share: T.int32,
    ):  # fmt: skip
        with T.Kernel(heads, batch, threads=threads) as (h, b):
            top, total, weight = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("float32")
            o = T.alloc_fragment((latent,), "float32")
            count = T.min(T.ceildiv(Lengths[b], ROUND * share), parts)
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


# ---- what people call


@functools.cache
def plan(batch: int, groups: int, rounds: int, units: int) -> tuple[tuple[int, int, int], ...]:
    """Which sequences go into a launch, from one to another, and into how many parts their contexts are cut there, so that ``units``
    multiprocessors, each with a block, end together: all alike, or the last ones, which would not fill a wave, finer than the others.
    Counted in rounds' times: a block begins and ends for one, parts for one more, adding one up takes 0.02, a second launch two."""

    def time(sequences: int, k: int) -> float:
        blocks = sequences * groups * k
        return -(-blocks // units) * (-(-rounds // k) + (2 if k > 1 else 1)) + (0.02 * blocks if k > 1 else 0.0)

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
    q: torch.Tensor, cache: torch.Tensor, lengths: torch.Tensor, *, latent: int = 512, scale: float | None = None,
    table: torch.Tensor | None = None, longest: int | None = None, parts: int | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """One step of decoding, o (batch, heads, latent) of q's dtype; the same bits from run to run.

    Args:
        q: (batch, heads, width) of bfloat16 or float16. cache: (batch, most, width) of q's dtype, or, with ``table``, pages
            (pages, page, width) of a multiple of 64 tokens. What lies in a tile of 64 tokens behind a sequence's last one is read, and must
            be finite. lengths: (batch,) int32, on the device. table: (batch, most pages) int32, which page has a sequence's next tokens.
        latent: how many of the width's numbers are values. scale: of the scores; width ** -0.5 without.
        longest: the greatest length, where it is less than the cache has room for (what lies behind it is not read). parts: how many
            parts the longest context has; what fills the GPU where all are equally long, without. More of them balance contexts that
            differ.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    dtype = host.dtype_name(q)
    if q.dim() != 3 or cache.dim() != 3 or q.shape[-1] != cache.shape[-1] or not 0 < latent < q.shape[-1]:
        raise TileValueError(
            f"q {tuple(q.shape)}, cache {tuple(cache.shape)}, latent={latent}",
            expected="(batch, heads, width), (batch or pages, tokens, width)",
        )
    if dtype not in DTYPES or cache.dtype != q.dtype:
        raise TileTypeError(f"mla_decode of {dtype} over {host.dtype_name(cache)}", expected="both bfloat16 or both float16")
    batch, heads, width = q.shape
    page = cache.shape[1] if table is not None else 0
    if table is None and cache.shape[0] != batch or tuple(lengths.shape) != (batch,) or table is not None and table.shape[0] != batch:
        raise TileValueError(f"{batch} queries, a cache of {cache.shape[0]}, {tuple(lengths.shape)} lengths", expected="one batch")
    if any(t is not None and t.dtype != torch.int32 for t in (lengths, table)):
        raise TileTypeError("lengths or a table of another dtype", expected="int32")
    if page % TILE or not all(t.is_contiguous() for t in (q, cache, lengths) + (() if table is None else (table,))):
        raise TileValueError(f"pages of {page} tokens, or a tensor that is not contiguous", expected=f"multiples of {TILE}, contiguous")
    if 0 in (*q.shape, *cache.shape):
        raise TileValueError(f"q {tuple(q.shape)}, cache {tuple(cache.shape)}", expected="extents of 1 at least")
    BH = 64 if heads % 64 == 0 else next(b for b in (32, 16, 8, 4, 2, 1) if heads % b == 0)
    o = host.result(out, (batch, heads, latent), q.dtype, q)
    most = longest or (cache.shape[1] if table is None else page * table.shape[1])
    rounds = -(-most // ROUND)
    launches = plan(batch, heads // BH, rounds, host.multiprocessors(q.device)) if parts is None else ((0, batch, min(parts, rounds)),)
    what = {"heads": heads, "latent": latent, "dtype": dtype}
    cluster = CLUSTER if heads // BH % CLUSTER == 0 else 1
    more = {"rope": width - latent, "scale": float(scale or width**-0.5), "page": page, "BH": BH, "cluster": cluster}
    for first, last, cuts in launches:
        some, share = slice(first, last), -(-rounds // cuts)
        sums = torch.empty(cuts, last - first, heads, dtype=torch.float32, device=q.device)
        part = o[some] if cuts == 1 else torch.empty(*sums.shape, latent, dtype=torch.float32, device=q.device)
        held = (cache[some],) if table is None else (cache, table[some])
        host.launch(decode, (q[some], *held, lengths[some], part, sums, share), **what, **more, parts=cuts)
        if cuts > 1:
            host.launch(combine, (part, sums, lengths[some], o[some], share), **what, parts=cuts)
    return o


# ---- what is right, and what it is measured against


def draw(
    batch: int, heads: int, context: int, latent: int = 512, rope: int = 64, dtype: str = "bfloat16", page: int = 0, ragged: bool = False,
    parts: int = 0, device: Any = "cpu", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """``ragged``: contexts of one token to ``context``. With pages of ``page`` tokens they lie in a random order among others."""
    g, width = generator(device, seed), latent + rope
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    if ragged:
        lengths = torch.randint(1, context + 1, (batch,), generator=g, device=device, dtype=torch.int32)
    made: dict[str, Any] = {"q": normal((batch, heads, width), dtype, g), "lengths": lengths, "latent": latent, "scale": 2 * width**-0.5}
    if page:
        count = -(-context // page)
        made["cache"] = normal((batch * count + 3, page, width), dtype, g)
        made["table"] = torch.randperm(batch * count + 3, generator=g, device=device)[: batch * count].to(torch.int32).view(batch, count)
    else:
        made["cache"] = normal((batch, context, width), dtype, g)
    return {**made, "parts": parts} if parts else made


def reference(
    q: torch.Tensor, cache: torch.Tensor, lengths: torch.Tensor, latent: int, scale: float, table: torch.Tensor | None = None,
    parts: int | None = None,
) -> tuple[Expected, ...]:  # fmt: skip
    """In float64, sequence by sequence. Scores are off by their sum's roundings and so, relatively, are their exponentials, which are
    rounded to q's dtype before they are multiplied: roundings that add up as their root."""
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
        noises.append(plain * (2 * off + 2.0**-18) + unit * torch.minimum(plain, 8 * (p.square() @ v.square()).sqrt()))
    return (expected(torch.stack(values), q.dtype, noise=torch.stack(noises)),)


def in_torch(
    q: torch.Tensor, cache: torch.Tensor, lengths: torch.Tensor, latent: int, scale: float, table: torch.Tensor | None = None, **_: Any
) -> Callable[[], Any]:
    """Two batched products and a softmax; a paged cache is gathered first, by the preparation."""
    kv = cache if table is None else cache[table.long()].flatten(1, 2)
    hidden = torch.arange(kv.shape[1], device=q.device) >= lengths[:, None, None]
    mask = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -torch.inf)
    return lambda: torch.baddbmm(mask, q, kv.transpose(1, 2), alpha=scale).softmax(-1) @ kv[..., :latent]


def flops(batch: int, heads: int, context: int, latent: int = 512, rope: int = 64, ragged: bool = False, **_: Any) -> float:
    return 2.0 * batch * heads * context * (2 * latent + rope) * (0.5 if ragged else 1.0)


OP = Op(
    name="mla_decode",
    run=mla_decode,
    draw=draw,
    reference=reference,
    cases=(
        *(Case({"latent": 64, "rope": 16, **s}, small=True) for s in (
            {"batch": 2, "heads": 16, "context": 150, "ragged": True}, {"batch": 3, "heads": 4, "context": 300, "page": 64, "ragged": True},
            {"batch": 1, "heads": 16, "context": 1},
            {"batch": 2, "heads": 16, "context": 200, "ragged": True, "parts": 3, "dtype": "float16"},
            {"batch": 2, "heads": 64, "context": 90, "page": 128, "ragged": True, "parts": 2},
        )),
        *(Case({"heads": h, **s, "dtype": d}) for h in (16, 128) for d in DTYPES for s in (
            {"batch": 3, "context": 1000, "ragged": True}, {"batch": 7, "context": 777, "page": 64, "ragged": True},
            {"batch": 2, "context": 4096, "page": 256}, {"batch": 40, "context": 600, "ragged": True, "parts": 1},
            {"batch": 1, "context": 63},
        )),
        *(Case({"batch": b, "heads": 128, "context": 8192, **s}, bar=1.0) for b, s in (
            (132, {}), (64, {}), (200, {}), (132, {"ragged": True, "parts": 4}), (132, {"page": 64}),
            (132, {"page": 64, "ragged": True, "parts": 4}),
        )),
    ),
    peers={"torch": in_torch},
    flops=flops,
    moved=lambda batch, context, latent=512, rope=64, ragged=False, **_: 2.0 * batch * context * (latent + rope) * (0.5 if ragged else 1.0),
)  # fmt: skip
