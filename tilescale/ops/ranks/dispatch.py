"""``moe_dispatch(x, experts, weights, num_experts=E)``: each token to the ranks of the experts that its
router chose, once a rank.

Two launches: `plan` counts and finds everyone's places, `dispatch` stores rows there, and lists them by
expert. Nothing is asked of the host, so all of it replays in a CUDA graph with other choices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilescale.comm.backend import Team
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import host
from tilescale.ops.case import Case, Expected
from tilescale.ops.ranks import expert_kernels, experts, flat
from tilescale.ops.ranks.case import Pick, RankOp
from tilescale.ops.ranks.experts import STAGES, Dispatched, exchanged, is_sent
from tilescale.ops.ranks.groups import Group, number_of, share, team_of
from tilescale.ops.ranks.workspace import workspace

#: warps of a block that move rows through registers, and those that tell of them
MOVERS, TELLERS = 8, 8
#: stages of rings where nothing is asked for, and bytes of a row from which on rows go through them on GPUs
#: with TMA: 4096 tokens × 7168 of bfloat16 on 4 H200 524 µs where threads take 533, on 32 multiprocessors 523
#: and 560; rows of 4 KB 343 and 332 (2026-11-26)
RINGED, LARGE = 3, 8 << 10


@host.checked
def moe_dispatch(
    x: torch.Tensor,
    experts: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    *,
    num_experts: int | None = None,
    scales: torch.Tensor | None = None,
    tokens: int | None = None,
    like: Dispatched | None = None,
    slot: int = 0,
    group: Group = None,
    blocks: int | None = None,
    stages: int | None = None,
) -> Dispatched:
    """Sends each of this rank's tokens to the ranks of its experts, once to each. Drop-free. Collective.

    Args:
        x: (t, H) of any dtype, 8-bit floats included; t may differ between ranks, H may not.
        experts: (t, K) of int32 or int64: the numbers of each token's experts, all different but for −1,
            which is none. Expert e is on rank e // ceil(num_experts / ranks).
        weights: (t, K) of float32, which travel with the tokens for `moe_combine`; ones without.
        num_experts: of all ranks, alike on all.
        scales: (t, S) of float32, which go with the tokens: of the blocks of 8-bit floats.
        tokens: the most that any rank has, alike on all ranks; without it all have as many.
        like: another x of as many tokens goes where those of this dispatch went (its gradients, say):
            instead of experts, weights, num_experts, tokens, slot and group.
        slot: what comes lies in memory of this number, which dispatches into other slots leave alone; alike
            on all ranks.
        group: who takes part, see `groups.team_of`; all ranks without.
        blocks: multiprocessors that the kernel keeps at most.
        stages: 0: threads move rows. More, 8 at most: TMA puts them from rings of so many rows, or parts of
            rows, of each warp's; where rows are no multiples of 16 bytes threads do. None: as was measured
            for the shape, else 3 on GPUs with TMA for rows of 8 KB or more, else 0.

    Raises:
        TileValueError, TileTypeError: shapes, dtypes or groups that do not fit.
    """
    if stages is not None and (stages := number_of(stages, "stages")) > STAGES:
        raise TileValueError(f"stages={stages}", expected=f"{STAGES} at most")
    if like is not None:
        if not (experts is weights is num_experts is tokens is group is None) or slot:
            raise TileValueError("moe_dispatch with like= and a choice of experts", expected="one of the two")
        is_sent(like, "like of moe_dispatch")
        fits(x, like.experts, like.weights, scales, like.tokens)
        return _sent(x.contiguous(), scales, like, blocks, stages)
    if experts is None or num_experts is None:
        raise TileValueError("moe_dispatch without experts", expected="experts and num_experts, or like=")
    most = x.shape[0] if tokens is None else number_of(tokens, "tokens")
    weights = torch.ones_like(experts, dtype=torch.float32) if weights is None else weights
    fits(x, experts, weights, scales, most)
    where = planned(experts, weights, num_experts, most, slot, group, blocks)
    return _sent(x.contiguous(), scales, where, blocks, stages)


def planned(
    experts: torch.Tensor, weights: torch.Tensor, num_experts: int, tokens: int, slot: int = 0,
    group: Group = None, blocks: int | None = None, out: tuple[torch.Tensor, ...] = (), known: bool = False,
) -> Dispatched:  # fmt: skip
    """Where everyone's tokens go, for `moe_dispatch`'s ``like=``: its first launch, and nothing that came.

    Args:
        out: takes ``pairs``, ``slots``, ``begins``, ``sizes`` and ``starts``, contiguous, of int32. known:
            they are there, as a call with the same arguments left them, so that nothing is launched.

    Raises:
        TileTypeError, TileValueError: no experts, or a slot that there is not.
    """
    num_experts, slot = number_of(num_experts, "num_experts", least=1), number_of(slot, "slot")
    ids, weights = host.narrowed(experts), weights.contiguous()
    return _planned(ids, weights, num_experts, tokens, team_of(group), slot, blocks, out, known)


def fits(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor | None, most: int
) -> None:
    t = x.shape[0]
    two = x.dim() == 2 and experts.dim() == 2 and x.shape[1] > 0 and experts.shape[1] > 0
    alike = two and experts.shape[0] == t and weights.shape == experts.shape
    if not alike or (scales is not None and (scales.dim() != 2 or scales.shape[0] != t)):
        also = "" if scales is None else f", scales {tuple(scales.shape)}"
        raise TileValueError(
            f"moe_dispatch of {tuple(x.shape)}, experts {tuple(experts.shape)}, weights "
            f"{tuple(weights.shape)}{also}",
            expected="x (t, H), experts and weights (t, K), scales (t, S)",
        )
    if experts.dtype not in (torch.int32, torch.int64) or weights.dtype != torch.float32:
        raise TileTypeError(
            f"experts of {host.dtype_name(experts)}, weights of {host.dtype_name(weights)}",
            expected="int32 or int64, and float32",
        )
    if scales is not None and (scales.dtype != torch.float32 or scales.shape[1] == 0):
        raise TileTypeError(
            f"scales of {host.dtype_name(scales)}, {tuple(scales.shape)}", expected="float32, one at least"
        )
    if t > most:
        raise TileValueError(f"{t} tokens, tokens={most}", expected="tokens= the most that any rank has")


def _planned(
    ids: torch.Tensor, weights: torch.Tensor, E: int, most: int, team: Any, slot: int, blocks: int | None,
    out: tuple[torch.Tensor, ...], known: bool,
) -> Dispatched:  # fmt: skip
    """Where everyone's tokens go. What stands for what comes is nothing yet."""
    (t, K), W = ids.shape, team.size
    new = lambda *shape: ids.new_empty(shape)  # noqa: E731
    pairs, slots, begins, sizes, starts = out or (new(t, K), new(t, W), new(W), new(share(E, W)), new(W + 1))
    made = Dispatched(
        rows=ids, scales=None, sizes=sizes, index=ids, starts=starts, meta=ids, experts=ids, weights=weights,
        pairs=pairs, slots=slots, begins=begins, num_experts=E, tokens=most, team=team, plan=object(),
        slot=slot,
    )  # fmt: skip
    if known:
        return made
    space, C, blocks = workspace(team), expert_kernels.told(E, W), flat.bound(blocks)

    def prepared() -> tuple[Any, int]:
        """The kernel, and how many blocks it has."""
        chunk, cut = experts.planned(most, K, E, flat.multiprocessors(ids.device, blocks))
        what = {"K": K, "E": E, "world": W, "chunk": chunk, "blocks": cut, "threads": 256}
        return host.kernel(expert_kernels.plan, host.target_of(ids.device), **what), cut

    kernel, cut = space.plans.of(("the plan of moe_dispatch", ids.device, K, E, most, blocks), prepared)
    kernel(ids, new(cut, C), space.box(ids, C), pairs, slots, begins, sizes, starts)
    return made


def listed(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, E: int, most: int, team: Team, slot: int,
    high: int,
) -> tuple[Dispatched, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Where everyone's tokens go, with memory for their rows, of which none has come, what `dispatch` tells
    beside them, and the lists of `plan` for tiles of ``high`` rows: ``order`` and ``steps``."""
    (t, K), W, H = ids.shape, team.size, x.shape[1]
    (R, P), local, new = experts.room(most, K, E, W), share(E, W), ids.new_empty
    pairs, slots, begins, sizes, starts = new(t, K), new(t, W), new(W), new(local), new(W + 1)
    order, steps = new(t * min(K, W), 4), new(local + 1, 4)
    space = workspace(team)
    meta, index, rows = _memory(space, x, f"{experts.PLACE} {slot}", R, P, K, ((R, H), x.dtype))
    made = Dispatched(
        rows=rows, scales=None, sizes=sizes, index=index, starts=starts, meta=meta, experts=ids,
        weights=weights, pairs=pairs, slots=slots, begins=begins, num_experts=E, tokens=most, team=team,
        plan=object(), slot=slot,
    )  # fmt: skip
    space.owner[made.place] = made.plan
    C = expert_kernels.told(E, W, high)
    chunk, cut = experts.planned(most, K, E, flat.multiprocessors(x.device, None))
    args = (ids, weights, new(cut, C), space.box(ids, C), pairs, slots, begins, sizes, starts, order, steps)
    what = {"K": K, "E": E, "world": W, "chunk": chunk, "blocks": cut, "threads": 256, "high": high}
    host.launch(expert_kernels.plan, (*args, meta, index), **what)
    return made, order, steps


def _memory(space: Any, like: torch.Tensor, place: str, R: int, P: int, K: int, *more: Any) -> Any:
    """What a combine reads lies first, in the same place for rows of any size."""
    return space.tensors(like, ((R, 2, K), torch.int32), ((P,), torch.int32), *more, apart=place)


def _sent(
    x: torch.Tensor, scales: torch.Tensor | None, where: Dispatched, blocks: int | None,
    stages: int | None = None,
) -> Dispatched:  # fmt: skip
    """``where`` with the rows of x, which went there."""
    team, K, S = where.team, where.experts.shape[1], 0 if scales is None else scales.shape[1]
    (_, H), W, E, most = x.shape, team.size, where.num_experts, where.tokens
    R, P = experts.room(most, K, E, W)
    space, blocks = workspace(team), flat.bound(blocks)
    of_scales = ((R if S else 1, max(S, 1)), torch.float32)
    meta, index, rows, marks = _memory(space, x, where.place, R, P, K, ((R, H), x.dtype), of_scales)
    space.owner[where.place] = where.plan
    z = x.new_empty((1, 1), dtype=torch.float32) if scales is None else scales.contiguous()

    def prepared() -> tuple[Any, torch.dtype]:
        """The kernel, and what it takes the rows as."""
        kind, _ = flat.words(H * x.element_size())
        bound, asked = experts.kept("moe_dispatch", x, K, E, most, team, blocks, stages)
        wide, units = H * x.element_size() // kind.itemsize, flat.multiprocessors(x.device, bound)
        warps, rings = MOVERS, RINGED if ringed(x.shape[1] * x.element_size(), x.device) else 0
        rings = rings if asked is None else asked
        how = experts.cut(wide, kind.itemsize, most, warps * units, experts.MOVED)
        if rings:
            how, warps = experts.ring(wide, kind.itemsize, rings)
        what = {
            "H": wide,
            "K": K,
            "E": E,
            "S": S,
            "world": W,
            "wide": how.wide,
            "steps": how.steps,
            "cut": how.cut,
            "movers": warps,
            "stages": rings,
            "blocks": max(1, min(units, -(-how.cut * most // warps))),
            "threads": 32 * (warps + TELLERS),
            "dtype": host.dtype_of(kind),
        }
        return host.kernel(expert_kernels.dispatch, host.target_of(x.device), **what), kind

    if most:
        key = ("moe_dispatch", x.device, x.dtype, H, K, E, S, most, blocks, stages)
        kernel, kind = space.plans.of(key, prepared)
        args = (where.experts, where.weights, where.pairs, where.slots, where.begins, where.sizes)
        kernel(flat.aligned(x).view(kind), z, *args, rows.view(kind), marks, meta, index)
    kept = {k: v for k, v in vars(where).items() if k not in ("rows", "scales", "meta", "index")}
    return Dispatched(rows=rows, scales=marks if S else None, meta=meta, index=index, **kept)


def ringed(row: int, device: torch.device) -> bool:
    """Whether rows of so many bytes go through rings where nothing else is asked for."""
    return row >= LARGE and device.type == "cuda" and host.has_clusters(device)


# ---- what is right, and what it is measured against


def pairs_that_came(out: torch.Tensor | None = None, group: Group = None, **drawn: Any) -> torch.Tensor:
    """(P, H): the row of each pair, zero behind the last one; what tests compare."""
    found = of_pairs(moe_dispatch(**drawn, group=group))
    return found if out is None else out.copy_(found)


def of_pairs(sent: Dispatched) -> torch.Tensor:
    """(P, H): the row of each pair, with zeros behind the last one."""
    there = torch.arange(len(sent.index), device=sent.rows.device) < sent.sizes.sum()
    return sent.expanded().where(there[:, None], sent.rows.new_zeros(()))


def reference(everyone: list[dict[str, Any]]) -> list[Expected]:
    """The rows of each rank's pairs."""
    W, E, K = len(everyone), everyone[0]["num_experts"], everyone[0]["experts"].shape[1]
    local, (_, P) = share(E, W), experts.room(everyone[0]["tokens"], K, E, W)
    found = []
    for r in range(W):
        pieces = [
            a["x"][(a["experts"] == e).nonzero()[:, 0]].double()
            for e in range(r * local, min(E, r * local + local))
            for a in everyone
        ]
        whole = everyone[0]["x"].new_zeros((P, everyone[0]["x"].shape[1]), dtype=torch.float64)
        came = torch.cat(pieces) if pieces else whole[:0]
        whole[: len(came)] = came
        found.append(Expected(whole, torch.zeros_like(whole)))
    return found


def timed(out: Any = None, **drawn: Any) -> Callable[[], Dispatched]:
    """The call that is timed, without a result of its own."""
    return lambda: moe_dispatch(**drawn)


def seen(sent: Dispatched) -> torch.Tensor:
    """The rows that came, with zeros behind them."""
    there = torch.arange(len(sent.rows), device=sent.rows.device) < sent.starts[-1]
    return sent.rows.where(there[:, None], sent.rows.new_zeros(()))


def by_library(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    tokens: int,
    group: Any,
    **_: Any,
) -> Callable[[], Any]:
    """torch.distributed's all-to-all of packed rows, whose numbers are known before: the bytes alone."""
    world = torch.distributed.get_world_size(group)
    order, sent, got = exchanged(experts, num_experts, group)
    packed = x[torch.cat(order)]
    out = x.new_zeros(world * tokens, x.shape[1])

    def call() -> Any:
        torch.distributed.all_to_all_single(out[: sum(got)], packed, got, sent, group=group)
        return out

    return call


def pick(world: int, units: int = 132, **shape: Any) -> Pick:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    way = "rings" if ringed(2 * shape["hidden"], device) else "threads"
    return Pick(way, min(units, -(-shape["tokens"] // 4)))


#: small cases of rings: several rounds of a warp, rows in parts, rows that TMA cannot put, one token
RINGS: tuple[dict[str, Any], ...] = (
    {"tokens": 70, "hidden": 24, "topk": 2, "experts": 8, "blocks": 1, "stages": 3},
    {"tokens": 9, "hidden": 10_000, "topk": 2, "experts": 4, "blocks": 1, "stages": 2, "uneven": True},
    {"tokens": 12, "hidden": 10, "topk": 2, "experts": 5, "choice": "drop", "stages": 4},
    {"tokens": 1, "hidden": 64, "topk": 1, "experts": 5, "stages": 3},
)

OP = RankOp(
    name="moe_dispatch",
    run=pairs_that_came,
    draw=experts.draw,
    reference=reference,
    pick=pick,
    shape_of=lambda world, **shape: experts.shape_of(**shape),
    ways=lambda **_: {"threads": {"stages": 0}, "rings": {"stages": RINGED}},
    base=lambda **_: {"blocks": None, "stages": None},
    knobs=lambda **_: (tuple({"stages": n} for n in (0, 3, 4)), flat.BLOCKS),
    cases=(
        *(Case(shape, small=True) for shape in (*RINGS[:2], *experts.SMALL, *RINGS[2:])),
        *(Case(shape, bar=1.0) for shape in experts.MEASURED),
    ),
    peers={"library": by_library},
    remote=experts.remote,
    timed=timed,
    seen=seen,
)
