"""``ulysses_attention_backward(do, q, k, v, o, lse)``: the gradients of `ulysses_attention`, of this rank's
rows. Rows are exchanged for heads as in the forward, o, its gradient and the log-sum-exps too; each rank
computes the gradients of its heads as on one GPU (`attention_gradients`) and gives their rows back. Where
several ranks have used a head of keys, each has a part of its gradients, rounded to their dtype; they are
added up in the order of ranks, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilescale.ops import attention_backward, host
from tilescale.ops.case import Expected, expected, random_like
from tilescale.ops.ranks import flat, measure, ring, ring_backward, sequence, ulysses, ulysses_kernels
from tilescale.ops.ranks.case import Case, RankOp
from tilescale.ops.ranks.groups import Group, team_of
from tilescale.ops.ranks.workspace import workspace


@host.checked
def ulysses_attention_backward(
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
    longest: int | None = None,
    group: Group = None,
    rows: int | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    deterministic: bool = True,
    blocks: int | None = None,
    threads: int = ulysses.THREADS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv of this rank's rows, of the inputs' dtype; unless ``deterministic`` is False the same
    bits from run to run. Collective.

    Args:
        do: the gradient of o. o, lse: what `ulysses_attention` gave.
        q, k, v, causal, scale, layout, starts, longest, group, rows: what it was called with.
        out: takes the results.
        deterministic: False: as `attention_gradients` has it.
        blocks: multiprocessors that the exchange keeps at most. threads: of its blocks.

    Raises:
        TileValueError, TileTypeError: shapes, dtypes, layouts or groups that do not fit.
    """
    team, name = team_of(group), "ulysses_attention_backward"
    given = sequence.checked(name, (q, do, o), (k, v), team, layout, rows, scale, starts)
    sequence.checked_sums(name, lse, q, given)
    named = zip(out or (None,) * 3, (q, k, v), ("dq", "dk", "dv"), strict=True)
    dq, dk, dv = (host.result(x, tuple(t.shape), t.dtype, t, n) for x, t, n in named)
    if given.chunks.rows == 0:
        return dq, dk, dv
    more: dict[str, Any] = {"causal": causal, "scale": given.scale, "deterministic": deterministic}
    most = ulysses.longest_of(longest, given)
    if given.packed:
        more |= {"q_starts": starts, "k_starts": starts, "longest": (most, most)}
    if team.size == 1:
        return attention_backward.attention_gradients(do, q, k, v, o, lse, **more, out=(dq, dk, dv))
    heads = ulysses.Held(given, team)
    wanted = [heads.queries, heads.keys, heads.keys]
    # q, k, v, o, do; dq, dk, dv
    wanted = [*wanted, heads.queries, heads.queries, *wanted]
    *tables, sums = workspace(team).tensors(
        q, *((of.shape, q.dtype) for of in wanted), (heads.queries.sums, torch.float32), what="q"
    )
    what = heads.exchange(q, blocks, threads, gradients=True)
    numbers = lse.view(given.batch, given.heads, -1, 1)
    host.launch(ulysses_kernels.hand_out, (q, k, v, o, do, numbers, *tables[:5], sums), **what)
    if heads.queries.count:
        whole = [of.whole(x) for of, x in zip(wanted, tables, strict=True)]
        by_head = whole[4], *whole[:4], heads.queries.whole_sums(sums)
        attention_backward.attention_gradients(*by_head, **more, out=tuple(whole[5:]))
    host.launch(ulysses_kernels.bring_back, (*tables[5:], dq, dk, dv), **what)
    return dq, dk, dv


# ---- what is right, and what it is measured against


def reference(everyone: list[dict[str, Any]]) -> list[Any]:
    """That of ring attention; where a head of keys has several copies, the sum of theirs, which are rounded
    before."""
    q, k = everyone[0]["q"], everyone[0]["k"]
    copies = ulysses_kernels.split(q.shape[1], k.shape[1], len(everyone)).keys.copies
    apart = [a | {n: a[n].repeat_interleave(copies, 1) for n in "kv"} for a in everyone]

    def added(x: Expected) -> Expected:
        value, off = (t.unflatten(1, (-1, copies)).sum(2) for t in (x.value, x.allowed))
        return expected(value, q.dtype, noise=off)

    found = ring_backward.reference(apart)
    return found if copies == 1 else [(dq, *map(added, others)) for dq, *others in found]


def by_library(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any, causal: bool, rows: int,
    layout: str = "contiguous", starts: torch.Tensor | None = None, **_: Any,
) -> Callable[[], Any]:  # fmt: skip
    """torch.distributed's all-to-all around torch's gradients of attention, whose forward has kept what it
    needs of whole sequences."""
    library = ulysses.Library(q, k, group, rows, layout)
    with measure.beside(q), torch.enable_grad():
        leaves = [library.apart(library.by_head(x)).requires_grad_() for x in (q, k, v)]
        o = library.attention(leaves, causal, starts)
    ways = library.split.queries, library.split.keys, library.split.keys

    def call() -> Any:
        grad = library.apart(library.by_head(do))
        found = torch.autograd.grad(o, leaves, grad, retain_graph=True, materialize_grads=True)
        return tuple(library.together(x, way) for x, way in zip(found, ways, strict=True))

    return call


def alone(q: torch.Tensor, k: torch.Tensor, causal: bool, rows: int, world: int, **_: Any) -> Any:
    """Our gradients of one rank's share of the heads."""
    q, k = ulysses.share_of(q, k, rows, world)
    o, lse = random_like(q, *q.shape), q.new_full(q.shape[:3], 10.0, dtype=torch.float32)
    return lambda: attention_backward.attention_gradients(q, q, k, k, o, lse, causal=causal)


def remote(**shape: Any) -> float:
    """q, k, v, o, its gradient and the sums go to the ranks of their heads, dq, dk and dv come back."""
    queries, keys = ulysses.crossing(**shape)
    return 4 * queries + 4 * keys + queries * 2 / shape["dim"]


OP = RankOp(
    name="ulysses_attention_backward",
    run=ulysses_attention_backward,
    draw=ring_backward.draw,
    reference=reference,
    pick=ulysses.pick,
    ways=lambda **_: {"kernel": {}},
    base=lambda **_: {"blocks": None},
    knobs=lambda **_: (flat.BLOCKS,),
    cases=(
        *(Case({**shape, **ulysses.FEW}, small=True) for shape in ulysses.SMALL[:4]),
        *(Case({**shape, "length": 20 * shape["length"], "dim": 64}) for shape in ulysses.SMALL),
        *(Case(shape, bar=1.0) for shape in ring.BENCH),
    ),
    peers={"library": by_library},
    alone=alone,
    flops=ring_backward.flops,
    remote=remote,
)
