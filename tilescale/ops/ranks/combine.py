"""``moe_combine(y, sent)``: what the experts made of each token comes back and is added up, times the weights
of its router.

Each rank adds up its own experts' rows of a token in float32, in the router's order, and puts one row to the
token's rank, which adds its own experts' part and then the ranks' rows in their order: every run gives the
same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from tilescale.comm.backend import Team
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import host
from tilescale.ops.case import ROUNDING, Case, Expected, expected, summed
from tilescale.ops.ranks import combine_kernels, experts, flat
from tilescale.ops.ranks.case import Pick, RankOp
from tilescale.ops.ranks.dispatch import moe_dispatch, of_pairs
from tilescale.ops.ranks.experts import STAGES, Dispatched, exchanged, is_sent
from tilescale.ops.ranks.groups import Group, number_of, share
from tilescale.ops.ranks.workspace import workspace

#: of a block, and lines that each of its warps reads of each of `NEAR` rows at once: 128 registers a thread
THREADS, LINES = 512, 4


@host.checked
def moe_combine(
    y: torch.Tensor,
    sent: Dispatched,
    *,
    weighted: bool = True,
    out: torch.Tensor | None = None,
    blocks: int | None = None,
    stages: int | None = None,
) -> torch.Tensor:
    """Of each of this rank's tokens the sum of its experts' rows, times their weights. Collective among the
    ranks of the dispatch.

    Args:
        y: (P, H) of bfloat16, float16, float32 or float64, contiguous: a row of each pair, in the order of
            ``sent.index``. H may be another one than that of the dispatch.
        sent: what `moe_dispatch` gave; the group has dispatched nothing into its slot since but ``like``
            this.
        weighted: False: the weights are all one.
        out: (t, H), contiguous, takes the result.
        blocks: multiprocessors that the kernel keeps at most.
        stages: 0: threads read rows, and put their sums. More, 8 at most: rows go through rings of so many,
            of each warp that puts, and TMA puts the sums; where tokens are few, or rows no multiples of 16
            bytes, threads do. None: as was measured for the shape, else 0.

    Returns:
        (t, H) of y's dtype, added in float32 (float64 of float64). A rank's part that crosses to another is
        rounded once. Zero where a token has no experts.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    if stages is not None and (stages := number_of(stages, "stages")) > STAGES:
        raise TileValueError(f"stages={stages}", expected=f"{STAGES} at most")
    is_sent(sent, "sent of moe_combine")
    P, (t, K), team = len(sent.index), sent.experts.shape, sent.team
    if y.dim() != 2 or y.shape[0] != P or y.shape[1] == 0:
        raise TileValueError(
            f"moe_combine of {tuple(y.shape)}", expected=f"({P}, H): a row of each pair that sent.index lists"
        )
    if y.dtype not in flat.SUMMED:
        raise TileTypeError(
            f"moe_combine of {host.dtype_name(y)}", expected="bfloat16, float16, float32 or float64"
        )
    space = workspace(team)
    latest(sent)
    H, W = y.shape[1], team.size
    c = host.result(out, (t, H), y.dtype, y)
    if sent.tokens == 0:
        return c
    y = flat.aligned(y)
    landing = flat.landing(c).view(c.shape)
    blocks = flat.bound(blocks)

    def prepared() -> tuple[Any, int]:
        """The kernel, and how many parts of rows each rank gives back."""
        bound, asked = experts.kept("moe_combine", y, K, sent.num_experts, sent.tokens, team, blocks, stages)
        units = flat.multiprocessors(y.device, bound)
        how, givers = shared_out(H, y.element_size(), sent.tokens, W, units)
        rings = asked or 0 if givers else 0
        if rings:
            how = experts.cut(H, y.element_size(), 1, 1, lines(K, rings, givers))
        parts = sent.tokens * how.cut
        what = {
            "H": H,
            "K": K,
            "world": W,
            "wide": how.wide,
            "steps": how.steps,
            "cut": how.cut,
            "givers": givers,
            "stages": rings,
            "blocks": max(1, min(units, -(-parts * max(1, W - 1) // (THREADS // 32)))),
            "threads": THREADS,
            "dtype": host.dtype_name(y),
            "weighted": weighted,
        }
        return host.kernel(combine_kernels.combine, host.target_of(y.device), **what), parts

    key = ("moe_combine", y.device, y.dtype, H, K, sent.tokens, weighted, blocks, stages)
    kernel, parts = space.plans.of(key, prepared)
    (meta,) = space.tensors(y, (tuple(sent.meta.shape), torch.int32), apart=sent.place)  # it may have moved
    (back,) = space.tensors(y, ((W, sent.tokens, H), y.dtype), what="y")
    kernel(y, meta, sent.starts, sent.slots, back, space.counters(W, parts), landing)
    flat.landed(landing.view(-1), c)
    return c


def shared_out(H: int, itemsize: int, tokens: int, world: int, units: int) -> tuple[experts.Cut, int]:
    """How rows are cut, and how many warps of a block put: half of them where there is more to put than
    warps (4096 tokens × 7168 on 4 H200: 597 µs, 623 where all put, then take; 2026-11-26)."""
    warps, put = THREADS // 32 * units, tokens * max(1, world - 1)
    split = world > 1 and put > warps
    return experts.cut(H, itemsize, put, warps, LINES), THREADS // 64 if split else 0


def lines(K: int, stages: int, givers: int) -> int:
    """How many lines of rows a ring's stage holds, of each of as many pairs as have a place there, beside the
    tile that TMA puts from."""
    tiles = stages * min(K, combine_kernels.STAGED) + 1
    return max(1, min(LINES, experts.ROOM // (givers * tiles * experts.LINE)))


def latest(sent: Dispatched) -> None:
    """Raises TileValueError where what a dispatch left in its slot is there no more."""
    if workspace(sent.team).owner.get(sent.place) is not sent.plan:
        raise TileValueError(
            "moe_combine of tokens behind whose dispatch the group has dispatched others",
            expected="the latest dispatch; moe_dispatch(…, like=sent) makes it so again",
        )


# ---- what is right, and what it is measured against


def answered(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, group: Group = None, **drawn: Any
) -> tuple[torch.Tensor, Dispatched]:
    """A dispatch, and what its experts, each of which is a factor, make of it."""
    sent = moe_dispatch(x, experts, weights, group=group, **drawn)
    pair = torch.arange(len(sent.index), device=x.device)
    expert = torch.searchsorted(sent.sizes.cumsum(0), pair, right=True) + sent.team.rank * len(sent.sizes)
    return (of_pairs(sent).float() * factor(expert)[:, None]).to(x.dtype), sent


def factor(expert: torch.Tensor) -> torch.Tensor:
    """What an expert multiplies by."""
    return 1 + (expert % 13) / 8.0


def there_and_back(
    out: torch.Tensor | None = None,
    group: Group = None,
    blocks: int | None = None,
    stages: int | None = None,
    **drawn: Any,
) -> torch.Tensor:
    """What tests compare."""
    return moe_combine(*answered(**drawn, group=group), out=out, blocks=blocks, stages=stages)


def reference(everyone: list[dict[str, Any]]) -> list[Expected]:
    """In float64, of rows that the experts rounded."""
    W, E = len(everyone), everyone[0]["num_experts"]
    local, found = share(E, W), []
    for rank, a in enumerate(everyone):
        x, ids, w = a["x"], a["experts"].long(), a["weights"].double()
        rows = (x.float()[:, None] * factor(ids)[..., None]).to(x.dtype).double()
        terms = rows * (w * (ids >= 0))[..., None]
        total, noise = terms.sum(1), summed(terms.abs().sum(1), ids.shape[1])
        for d in range(W):
            part = (terms * (ids // local == d)[..., None]).sum(1)
            noise = noise + (part.abs() * ROUNDING[x.dtype] if d != rank else 0)
        found.append(expected(total, x.dtype, noise=noise * 1.01))
    return found


#: the latest dispatch of what is timed
_latest: weakref.WeakKeyDictionary[Team, Dispatched] = weakref.WeakKeyDictionary()


def made_last(sent: Dispatched) -> None:
    """Remembers a dispatch behind which calls are timed."""
    _latest[sent.team] = sent


def last_made(team: Team) -> Dispatched:
    """The latest of those."""
    return _latest[team]


def timed(
    out: torch.Tensor | None = None, blocks: int | None = None, stages: int | None = None, **drawn: Any
) -> Callable[[], torch.Tensor]:
    """The call that is timed, its dispatch and experts made before. A combine needs the group's latest
    dispatch, so that of the last set serves all of them: each moves its own rows, to the same places."""
    y, sent = answered(**drawn)
    made_last(sent)
    return lambda: moe_combine(y, last_made(sent.team), out=out, blocks=blocks, stages=stages)


def by_library(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    group: Any,
    **_: Any,
) -> Callable[[], Any]:
    """torch.distributed's all-to-all of rows that are added up on the ranks of the experts, and index_add
    here; the numbers are known before."""
    order, sent, got = exchanged(experts, num_experts, group)
    tokens, there = torch.cat(order), experts // share(num_experts, len(order))
    terms = factor(experts.long())[..., None].float() * x.float()[:, None]
    terms = terms.to(x.dtype).float() * weights[..., None]
    packed = torch.cat([(terms[o] * (there[o] == d)[..., None]).sum(1) for d, o in enumerate(order)]).to(
        x.dtype
    )
    answers = x.new_empty(sum(got), x.shape[1])
    torch.distributed.all_to_all_single(answers, packed, got, sent, group=group)
    back, out = torch.empty_like(packed), torch.zeros_like(x, dtype=torch.float32)

    def call() -> Any:
        torch.distributed.all_to_all_single(back, answers, sent, got, group=group)
        return out.zero_().index_add_(0, tokens, back.float()).to(x.dtype)

    return call


def pick(world: int, units: int = 132, **shape: Any) -> Pick:
    return Pick("kernel", min(units, -(-shape["tokens"] // 4)))


#: small cases of rings: several rounds of a warp, rows in parts, ranks that get little
RINGS: tuple[dict[str, Any], ...] = (
    {"tokens": 19, "hidden": 24, "topk": 2, "experts": 8, "blocks": 1, "stages": 3},
    {"tokens": 18, "hidden": 1_100, "topk": 2, "experts": 4, "blocks": 1, "stages": 2, "uneven": True},
    {"tokens": 21, "hidden": 10, "topk": 2, "experts": 5, "choice": "drop", "blocks": 1, "stages": 4},
)

OP = RankOp(
    name="moe_combine",
    run=there_and_back,
    draw=experts.draw,
    reference=reference,
    pick=pick,
    shape_of=lambda world, **shape: experts.shape_of(**shape),
    ways=lambda **_: {"kernel": {"stages": 0}, "rings": {"stages": 3}},
    base=lambda **_: {"blocks": None, "stages": None},
    knobs=lambda **_: (tuple({"stages": n} for n in (0, 2, 3)), flat.BLOCKS),
    cases=(
        *(Case(shape, small=True) for shape in (*RINGS, *experts.SMALL)),
        *(Case(shape, bar=1.0) for shape in experts.MEASURED),
    ),
    peers={"library": by_library},
    remote=experts.remote,
    timed=timed,
    same=False,
)
