"""Attention with fewer key heads than query heads (Ainslie et al., "GQA", 2023) and rotary positions (Su et
al., "RoFormer", 2021), whose heads are split over ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tilescale import comm, ops
from tilescale.errors import TileValueError
from tilescale.nn import context as contexts
from tilescale.nn import groups, packed, products
from tilescale.nn.linear import ColumnParallelLinear, RowParallelLinear
from tilescale.nn.operations import call, define, straight
from tilescale.nn.parameters import Parallel, Woven
from tilescale.ops.attention_shapes import by_tokens
from tilescale.ops.ranks.groups import number_of


class SharedHeadsLinear(ColumnParallelLinear):
    """The product of queries, keys and values where several ranks have query heads of one key head.

    The rows of a key head, behind those of its query heads, are split over these ranks as over any others: no
    row is there twice, neither in a checkpoint nor in an optimizer. For a product they give each other what
    is not for themselves, so that each has the rows of its own query heads and all of the key head's, the
    same bits on all of them. Gradients go back the same way: a key head's is the sum of theirs, added in the
    order of ranks.

    Args:
        features: of a token. each: query heads of a key head; a multiple of ``sharing``. kv_heads: times
            ``sharing`` they are the ranks. sharing: how many ranks use one key head. bias and further ones:
            as `ColumnParallelLinear`'s.
    """

    def __init__(
        self, features: int, each: int, kv_heads: int, head_dim: int, sharing: int, bias: bool, **how: Any
    ):
        super().__init__(features, (each + 2) * kv_heads * head_dim, bias, **how)
        at = self.rank % sharing
        first = self.rank - at
        members = groups.team(self.group_name).members[first : first + sharing]
        self.sharers = groups.name_of(comm.team(members))
        queries, both = each * head_dim, 2 * head_dim
        own, run = queries // sharing, (queries + both) // sharing
        # Rank r uses query rows from r · own on and has rows from r · run on. So what others need of its rows
        # begins at (r + 1) · own: the last (r + 1) · (run - own), which are at most ``both``.
        self.given, self.gathered = min(both, run), sharing * min(both, run)

        def pieces(first: int, end: int, mine: bool) -> Iterator[tuple[bool, slice]]:
            """Where these rows of the head lie: in what is gathered, or in this rank's part (True)."""
            for owner in range(first // run, -(-end // run)):
                low, high = max(first, owner * run), min(end, (owner + 1) * run)
                here = mine and owner == at
                shift = owner * run if here else (owner + 1) * (run - self.given)
                yield here, slice(low - shift, high - shift)

        self.used = [*pieces(at * own, (at + 1) * own, True), *pieces(queries, queries + both, False)]

    def local(self, name: str) -> Any:
        """The rows that this rank multiplies by, with the gradient of its part."""
        part = super().local(name)
        if part is None:
            return None
        last = part[part.shape[0] - self.given :]
        others = call.all_gather(last, self.gathered, self.sharers)
        return torch.cat([(part if here else others)[rows] for here, rows in self.used])


class ParallelAttention(Parallel):
    """Causal or full attention: queries, keys and values are one product, whose weight has the rows of each
    key head with those of its query heads: q … q, k, v of the first key head, then the second's.

    A checkpoint of the unsharded layer has ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``, which
    ``load_state_dict`` takes and `full_state_dict` gives.

    Args:
        features: of a token. heads: of queries; a multiple of ``kv_heads`` and of the ranks.
        kv_heads: a multiple of the ranks, or a divisor of them: n / kv_heads ranks share a key head then
            (`SharedHeadsLinear`), and 2 · head_dim is a multiple of their number.
        head_dim: features / heads without. bias: of queries, keys and values; ``out_bias``: of the output.
        rotary: the base of rotary positions, or None: no positions, or those that ``forward`` gets.
        causal: a token sees those up to its own place. scale: of the scores; head_dim ** -0.5 without.
        group, sequence_parallel, keep_gathered: as `ColumnParallelLinear`'s.
        context: another group, whose ranks each have a part of every sequence, as many tokens each;
            parameters are alike on its ranks, and gradients are averaged or added over them as over other
            batches.
        context_by: "ring", keys and values go round, or "ulysses", rows are exchanged for heads.
        layout: which tokens of a sequence a rank of n in ``context`` has: "contiguous", the r-th of n chunks,
            or "zigzag", the r-th and the r-th but one to the last of 2n, as much to do for all under a causal
            mask.

    bfloat16 and float16 go to `ops.flash_attention` and its gradients. float32 and float64, which these do
    not take, go to torch's scaled_dot_product_attention.
    """

    def __init__(
        self, features: int, heads: int, kv_heads: int | None = None, head_dim: int | None = None, *,
        bias: bool = False, out_bias: bool = False, rotary: float | None = 10000.0, causal: bool = True,
        scale: float | None = None, group: Any = None, sequence_parallel: bool = True,
        keep_gathered: bool = False, context: Any = None, context_by: str = "ring",
        layout: str = "contiguous", device: Any = None, dtype: Any = None,
    ):  # fmt: skip
        super().__init__(group)
        if context_by not in contexts.WAYS or layout not in contexts.LAYOUTS:
            raise TileValueError(
                f"context_by={context_by!r}, layout={layout!r}",
                expected=f"one of {contexts.WAYS}, one of {contexts.LAYOUTS}",
            )
        self.context = None if context is None else groups.name_of(context)
        self.context_by, self.layout = context_by, layout
        features, heads = number_of(features, "features"), number_of(heads, "heads", least=1)
        kv_heads = heads if kv_heads is None else number_of(kv_heads, "kv_heads", least=1)
        given, head_dim = head_dim, features // heads if head_dim is None else head_dim
        head_dim = number_of(head_dim, "head_dim", least=1)
        if given is None and features % heads:
            raise TileValueError(
                f"features={features} of {heads} heads", expected="a multiple of the heads, or a head_dim"
            )
        if heads % kv_heads or head_dim % 2:
            raise TileValueError(
                f"{heads} heads of {head_dim}, {kv_heads} of keys",
                expected="heads a multiple of those of keys, an even head_dim",
            )
        self.features, self.heads, self.kv_heads, self.head_dim = features, heads, kv_heads, head_dim
        self.each = heads // kv_heads
        self.sharing = _sharing(heads, kv_heads, head_dim, self.ranks)
        self.local_heads, self.local_kv_heads = heads // self.ranks, max(1, kv_heads // self.ranks)
        self.rotary, self.causal = rotary, causal
        self.scale = head_dim**-0.5 if scale is None else scale
        if not self.scale > 0:  # as the operations say it, of all dtypes
            raise TileValueError(f"scale={scale}", expected="a positive number")
        self.sequence_parallel = sequence_parallel
        how: dict[str, Any] = {
            "group": group, "sequence_parallel": sequence_parallel, "device": device, "dtype": dtype
        }  # fmt: skip
        more = how | {"keep_gathered": keep_gathered}
        self.qkv_proj = (
            ColumnParallelLinear(features, (heads + 2 * kv_heads) * head_dim, bias, **more)
            if self.sharing == 1
            else SharedHeadsLinear(features, self.each, kv_heads, head_dim, self.sharing, bias, **more)
        )
        self.o_proj = RowParallelLinear(heads * head_dim, features, out_bias, **how)
        for name in ("weight", "bias") if bias else ("weight",):
            self.woven[f"qkv_proj.{name}"] = self._woven(name)

    def _woven(self, name: str) -> Woven:
        sizes = (self.each * self.head_dim, self.head_dim, self.head_dim)
        ways = (functools.partial(way, sizes) for way in (_by_heads, _by_kinds))
        return Woven(tuple(f"{x}_proj.{name}" for x in "qkv"), *ways)

    def forward(
        self, x: Tensor, batch: int = 1, rows: int | None = None,
        positions: tuple[Tensor, Tensor] | None = None, starts: Tensor | None = None,
        longest: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of ``batch`` sequences of equal length, one behind another, or of packed ones.

        Args:
            x: (m, features), this rank's rows (all rows, where x is alike on all ranks).
            rows: as `ColumnParallelLinear.forward` takes them.
            positions: cosines and sines of this rank's tokens, each (length, head_dim) or (batch, length,
                head_dim), the second half of the last axis like the first, instead of those by ``rotary``.
            starts: sequences of different lengths, packed: the row of all rows where each begins and where
                the last one ends, (sequences + 1,) of int32, alike on all ranks; rotary positions begin anew
                in each. longest: the rows of the longest one, or more; without it the host waits for them.

        Returns:
            (m, features), or all rows.

        Raises:
            TileValueError, TileTypeError: what does not fit; ``starts`` with a batch or a ``context``.
        """
        if not isinstance(batch, int) or batch < 1:
            batch = number_of(batch, "batch", least=1)
        h = self.qkv_proj(x, rows)
        if x.dim() != 2 or h.shape[0] % batch:
            raise TileValueError(
                f"ParallelAttention of {tuple(x.shape)}, {h.shape[0]} rows in all, batch={batch}",
                expected="x (m, features), all rows a multiple of the batch",
            )
        length = h.shape[0] // batch
        if starts is not None:
            if batch != 1 or self.context is not None:
                raise TileValueError(
                    f"starts with batch={batch}, context={self.context!r}",
                    expected="one of the three: packed sequences, a batch, sequences cut among ranks",
                )
            packed.check(starts)
            most = int(starts.diff().max()) if longest is None else longest
            own = call.sequences(starts, length, most)
        if positions is None and self.rotary is not None:
            at = None
            if starts is not None:
                at = packed.places(starts, own)
            elif self.context is not None:
                at = contexts.places(length, self.context, self.layout, h.device)
            positions = angles(length, self.head_dim, self.rotary, h, at)
        cos, sin = positions or (None, None)
        heads = self.local_heads
        q, k, v = call.rotary_heads(h, cos, sin, heads, self.local_kv_heads, batch)
        if starts is not None:
            o = packed.attention(q, k, v, starts, own, most, self.causal, self.scale).transpose(1, 2)
        elif self.context is None:
            o = attention(q, k, v, self.causal, self.scale)
        else:
            way = (self.context_by, self.layout, self.context)
            o = contexts.attention(q, k, v, self.causal, self.scale, *way).transpose(1, 2)
        made: Tensor = self.o_proj(o.reshape(batch * length, heads * self.head_dim))
        return made

    def set_parts(self, q: Any, k: Any, v: Any, o: Any) -> None:
        """Fills the parameters from an unsharded layer's four linears."""
        for name in ("weight", "bias") if q.bias is not None else ("weight",):
            whole = self.woven[f"qkv_proj.{name}"].weave(*(getattr(p, name) for p in (q, k, v)))
            self.qkv_proj.set_whole(name, whole)
        for name in ("weight", "bias") if o.bias is not None else ("weight",):
            self.o_proj.set_whole(name, getattr(o, name))

    def extra_repr(self) -> str:
        return f"{self.heads} heads, {self.kv_heads} of keys, of {self.head_dim}, causal={self.causal}"


def _by_heads(sizes: tuple[int, ...], *parts: Tensor) -> Tensor:
    """Rows of queries, keys and values, so many of each key head, one key head's behind the other's."""
    found = [p.unflatten(0, (-1, size)) for p, size in zip(parts, sizes, strict=True)]
    return torch.cat(found, 1).flatten(0, 1)


def _by_kinds(sizes: tuple[int, ...], whole: Tensor) -> tuple[Tensor, ...]:
    """`_by_heads` undone."""
    return tuple(p.flatten(0, 1) for p in whole.unflatten(0, (-1, sum(sizes))).split(sizes, 1))


def _sharing(heads: int, kv_heads: int, dim: int, ranks: int) -> int:
    """How many ranks use one key head.

    Raises:
        TileValueError: ranks to which these heads do not go.
    """

    def fits(n: int) -> bool:
        few = n % kv_heads == 0 and 2 * dim % (n // kv_heads) == 0
        return heads % n == 0 and (kv_heads % n == 0 or few)

    if not fits(ranks):
        raise TileValueError(
            f"heads={heads}, kv_heads={kv_heads}, head_dim={dim} on {ranks} ranks",
            expected="heads a multiple of the ranks; kv_heads a multiple of the ranks, too, or a divisor of "
            "them, where 2 · head_dim is a multiple of ranks / kv_heads",
            hint=f"a group of {next(n for n in range(ranks, 0, -1) if fits(n))}",
        )
    return max(1, ranks // kv_heads)


def angles(
    length: int, dim: int, base: float, like: Tensor, places: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines (length, dim / 2) of places, 0 to length - 1 where none are given, in float32
    (float64 of float64), on ``like``'s device. Angles themselves are float64's: float32 would be off by 1e-3
    at place 10,000. Those of 0 to length - 1 are kept for the layers to come, but for what a CUDA graph
    captures: they would be there when it is replayed, and no earlier."""
    device, kind = like.device, torch.promote_types(like.dtype, torch.float32)
    if places is not None:
        return _turned(places, dim, base, kind)
    on_gpu = device.type == "cuda"
    if not straight((like,)) or on_gpu and torch.cuda.is_current_stream_capturing():
        return _turned(torch.arange(length, device=device), dim, base, kind)
    stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
    return _in_order(length, dim, base, kind, device, stream)


def _turned(places: Tensor, dim: int, base: float, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    steps = base ** -(torch.arange(0, dim, 2, dtype=torch.float64, device=places.device) / dim)
    turn = places.double()[:, None] * steps
    return turn.cos().to(kind), turn.sin().to(kind)


@functools.lru_cache(maxsize=8)
def _in_order(
    length: int, dim: int, base: float, kind: torch.dtype, device: torch.device, stream: int
) -> tuple[Tensor, Tensor]:
    """Of each stream its own: another one would not wait for them."""
    with torch.inference_mode(False):  # gradients are to keep them later
        return _turned(torch.arange(length, device=device), dim, base, kind)


def _keep_angles(ctx: Any, inputs: Any, output: Any) -> None:
    _, cos, sin, *_ = inputs
    ctx.save_for_backward(cos, sin)


def _turned_back(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    return call.rotary_heads_backward(*grads, *ctx.saved_tensors), *(None,) * 5


def _heads_like(
    h: Tensor, cos: Tensor | None, sin: Tensor | None, heads: int, kv_heads: int, batch: int
) -> tuple[Tensor, ...]:
    length, dim = h.shape[0] // batch, h.shape[1] // (heads + 2 * kv_heads)
    return tuple(h.new_empty(batch, n, length, dim) for n in (heads, kv_heads, kv_heads))


@define(
    "rotary_heads",
    "(Tensor h, Tensor? cos, Tensor? sin, int heads, int kv_heads, int batch) -> (Tensor, Tensor, Tensor)",
    _heads_like,
    _keep_angles,
    _turned_back,
)
def rotary_heads(
    h: Tensor, cos: Tensor | None, sin: Tensor | None, heads: int, kv_heads: int, batch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.rotary_heads`; angles have no gradients."""
    return ops.rotary_heads(h.contiguous(), cos, sin, heads=heads, kv_heads=kv_heads, batch=batch)


@define(
    "rotary_heads_backward",
    "(Tensor dq, Tensor dk, Tensor dv, Tensor? cos, Tensor? sin) -> Tensor",
    lambda dq, dk, dv, cos, sin: dq.new_empty(
        dq.shape[0] * dq.shape[2], (dq.shape[1] + 2 * dk.shape[1]) * dq.shape[3]
    ),
)
def rotary_heads_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor | None, sin: Tensor | None
) -> Tensor:
    """`ops.rotary_heads_backward`."""
    return ops.rotary_heads_backward(dq.contiguous(), dk.contiguous(), dv.contiguous(), cos, sin)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """softmax(scale · q · kᵀ) · v of q (batch, heads, length, dim), k and v with a divisor of its heads:
    (batch, length, heads, dim), so that rows of tokens are no copy of it."""
    if q.dtype in (torch.bfloat16, torch.float16):
        made: Tensor = call.attention(q, k, v, causal, scale)[0]
        return made
    made = scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return made.transpose(1, 2)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, ctx.causal, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, do: Tensor, _: Tensor) -> tuple[Any, ...]:
    found = call.attention_backward(do, *ctx.saved_tensors, ctx.causal, ctx.scale)
    return *products.wanted(ctx, *found), None, None


@define(
    "attention",
    "(Tensor q, Tensor k, Tensor v, bool causal, float scale) -> (Tensor, Tensor)",
    lambda q, k, v, causal, scale: (
        q.new_empty(by_tokens(q.shape)), q.new_empty(q.shape[:-1], dtype=torch.float32)
    ),
    _keep,
    _backward,
)  # fmt: skip
def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """`ops.flash_attention` by token."""
    given = (t.contiguous() for t in (q, k, v))
    return ops.flash_attention(*given, causal=causal, scale=scale, by_token=True)


@define(
    "attention_backward",
    "(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, bool causal, float scale) "
    "-> (Tensor, Tensor, Tensor)",
    lambda do, q, k, v, *_: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)),
)
def flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.attention_gradients` by token."""
    given = (t.contiguous() for t in (do, q, k, v, o, lse))
    return ops.attention_gradients(*given, causal=causal, scale=scale, by_token=True)
