"""What `moe_dispatch` and `moe_combine` share: what a dispatch leaves behind, and how both are drawn."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilescale.comm.backend import Team
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import grouped, host
from tilescale.ops.case import generator, normal, random_like
from tilescale.ops.ranks import expert_kernels, flat
from tilescale.ops.ranks.case import Pick
from tilescale.ops.ranks.groups import share

#: bytes that the threads of a warp move at once, 16 each
LINE = 512
#: lines that a warp which moves a row reads at a time
MOVED = 16
#: bytes of a stage of a warp's ring at most, of all rings of a block, and stages at most
STAGE, ROOM, STAGES = 16 << 10, 216 << 10, 8
#: where a workspace keeps what came, with the number of its slot behind
PLACE = "experts"


@dataclass(frozen=True)
class Dispatched:
    """What `moe_dispatch` brought to this rank, and where its own tokens are. Tensors have room for all that
    could come; how much of it has come the host never knows.

    Attributes:
        rows: (R, H), R = ranks · tokens: the tokens that came, each once, in the order of ranks and of their
            tokens there; behind ``starts[-1]`` of them undefined. Symmetric memory, which the group's next
            `moe_dispatch` into the same slot overwrites.
        scales: (R, S) of float32, theirs; None without. In the same memory.
        sizes: (local,) of int32: how many tokens each of this rank's experts got.
        index: (P,) of int32: the row of each pair of a token and its expert, in the order of experts, then
            of rows, as ``sizes`` cuts them: `expanded` gives these rows. 0 behind the last one. In the same
            memory.
        starts: (ranks + 1,) of int32: the first row of each rank.
        meta: (R, 2, K) of int32: of each row its pairs, in the order of its router's choices, −1 behind the
            last one, and the bits of their weights. In the memory of ``rows``.
        experts, weights: (t, K): the own tokens' experts, of int32, and their weights, of float32.
        pairs: (t, K) of int32: which pair each one is at its rank, −1 for none. slots: (t, ranks) of int32:
            which of this rank's rows each token is at each rank, −1 where it did not go. begins: (ranks,) of
            int32: this rank's first row at each rank.
        num_experts: of all ranks. tokens: a rank's at most.
        team: the ranks.
        plan: what dispatches of the same choices have in common (`like=`), and no others.
        slot: which of the group's memories ``rows`` and the others lie in.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    sizes: torch.Tensor
    index: torch.Tensor
    starts: torch.Tensor
    meta: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    pairs: torch.Tensor
    slots: torch.Tensor
    begins: torch.Tensor
    num_experts: int
    tokens: int
    team: Team
    plan: object
    slot: int = 0

    @property
    def place(self) -> str:
        """The name of that memory."""
        return f"{PLACE} {self.slot}"

    def counted(self, pairs: int | None = None) -> Dispatched:
        """The same with room for the pairs that came alone, one at least: ``index``, and with it what
        `expanded` gives and `moe_combine` takes, ends behind the last one. The host waits for their number
        where ``pairs`` does not say it, so a CUDA graph cannot capture this.

        Raises:
            TileValueError: ``pairs`` is no number of rows that ``index`` can have.
        """
        pairs = max(1, int(self.sizes.sum())) if pairs is None else pairs
        if not 1 <= pairs <= max(1, len(self.index)):
            raise TileValueError(f"pairs={pairs}", expected=f"1 to {len(self.index)}")
        return replace(self, index=self.index[:pairs])

    def expanded(
        self, rows: torch.Tensor | None = None, *, out: torch.Tensor | None = None, blocks: int | None = None
    ) -> torch.Tensor:
        """(P, …): the row of each pair, as `grouped_matmul` takes them with ``sizes``; behind the last pair
        undefined. The host waits for nothing.

        Args:
            rows: (R, …), contiguous, instead of ``self.rows``: their ``scales``, say.
            out: (P, …), contiguous, takes the result.
            blocks: multiprocessors that the kernel keeps at most.

        Raises:
            TileValueError, TileTypeError: what does not fit.
        """
        rows, P = self.rows if rows is None else rows, len(self.index)
        if rows.shape[0] != self.rows.shape[0] or not rows.is_contiguous():
            raise TileValueError(
                f"rows {tuple(rows.shape)}", expected=f"({self.rows.shape[0]}, …), contiguous"
            )
        made = host.result(out, (P, *rows.shape[1:]), rows.dtype, rows)
        return expand(rows, self.index, self.sizes, made, blocks)


def is_sent(value: Any, what: str) -> None:
    """Refuses what no dispatch gave.

    Raises:
        TileTypeError: it is something else.
    """
    if not isinstance(value, Dispatched):
        raise TileTypeError(f"{what} is {type(value).__name__}", expected="what moe_dispatch gave")


@dataclass(frozen=True)
class Cut:
    """How warps share rows: ``cut`` parts of each, ``steps`` times ``wide`` elements in a part."""

    wide: int
    steps: int
    cut: int


@functools.cache
def cut(columns: int, itemsize: int, rows: int, warps: int, lines: int) -> Cut:
    """For ``rows`` rows on ``warps`` warps, each moving ``lines`` lines at once at most. Where rows are
    fewer than warps they have several parts."""
    size = columns * itemsize
    parts = max(1, min(-(-size // LINE), warps // max(1, rows)))
    piece = -(-size // parts)
    steps = -(-piece // (lines * LINE))
    wide = min(size, -(-piece // (steps * LINE)) * LINE)
    return Cut(wide // itemsize, steps, -(-size // (steps * wide)))


@functools.cache
def ring(columns: int, itemsize: int, stages: int) -> tuple[Cut, int]:
    """The parts of rows that lie in a stage of a warp's ring, `STAGE` bytes at most, and how many warps of a
    block have such rings: as many as shared memory has room for, fours up to 16."""
    each = max(1, 16 // itemsize)
    parts = -(-columns * itemsize // STAGE)
    wide = -(-columns // (parts * each)) * each
    warps = ROOM // (stages * wide * itemsize)
    return Cut(min(wide, columns), 1, -(-columns // wide)), max(1, min(16, warps // 4 * 4 or warps))


def shape_of(
    tokens: int, hidden: int, topk: int, experts: int, dtype: str = "bfloat16", **_: Any
) -> dict[str, Any]:
    """What choices of `moe_dispatch` and `moe_combine` are kept by (`picks`)."""
    return {"tokens": tokens, "hidden": hidden, "topk": topk, "experts": experts, "dtype": dtype}


def kept(
    name: str, x: torch.Tensor, K: int, E: int, tokens: int, team: Team, blocks: int | None,
    stages: int | None,
) -> tuple[int | None, int | None]:  # fmt: skip
    """Blocks and stages of rings as a caller asks for them, else as they were measured, None where neither
    is so."""
    of = shape_of(tokens, x.shape[1], K, E, host.dtype_name(x))
    found = flat.kept(team, name, x, blocks, **of)
    return found["blocks"], found.get("stages") if stages is None else stages


def planned(tokens: int, K: int, E: int, units: int) -> tuple[int, int]:
    """How many tokens a block of `plan` finds places for at once, and how many blocks: as few tokens as they
    can be, 32 at least, of which the masks take 32 KB at most."""
    most = max(32, (8 << 10) * 32 // (E * K) // 32 * 32)
    chunk = min(most, -(-max(1, tokens) // (32 * units)) * 32)
    return chunk, max(1, min(units, -(-tokens // chunk)))


def expand(
    rows: torch.Tensor, index: torch.Tensor, sizes: torch.Tensor, made: torch.Tensor,
    blocks: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """made (P, …): the row of ``rows`` (R, …) that ``index`` (P,) names, of each pair that ``sizes`` count.
    All contiguous."""
    P, inner = len(index), math.prod(rows.shape[1:]) * rows.element_size()
    if P * inner == 0:
        return made
    kind, _ = flat.words(inner)
    x = flat.aligned(rows).view(-1).view(kind).view(rows.shape[0], -1)
    landing = flat.landing(made)
    blocks = min(2 * flat.multiprocessors(x.device, blocks), -(-P // 8))
    how = cut(x.shape[1], x.element_size(), 8 * blocks, 8 * blocks, MOVED)  # whole rows, also where P is less
    what = {"H": x.shape[1], "wide": how.wide, "steps": how.steps, "blocks": blocks, "threads": 256}
    what["dtype"] = host.dtype_name(x)
    args = (x, index, sizes, landing.view(kind).view(P, -1))
    host.launch(expert_kernels.expand, args, **what)
    flat.landed(landing, made)
    return made


def counting(sizes: torch.Tensor) -> Callable[[], int]:
    """How many pairs ``sizes`` add up to: a function that waits for the number. On a GPU it crosses to the
    host behind what was launched so far, so that the host has not to wait for what it launches next."""
    if not sizes.is_cuda:
        return lambda: int(sizes.sum())
    there = torch.empty(1, dtype=torch.int64, pin_memory=True)
    there.copy_(sizes.sum().view(1), non_blocking=True)
    done = torch.cuda.current_stream(sizes.device).record_event()

    def number() -> int:
        done.synchronize()
        return int(there)

    return number


def choices(sent: Dispatched, marks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each pair (P,) which of its token's choices it is, int32, and its weight, float32 or float64; both
    undefined behind the last one.

    Args:
        marks: (R, S), contiguous: of each row what went with its token (``scales``): its experts, which
            float32 holds exactly, its weights, and of float64 what float32 leaves of them.
    """
    (P,), K = sent.index.shape, sent.experts.shape[1]
    choice, weight = sent.index.new_empty(P), marks.new_empty(P, dtype=dtype)
    blocks = max(1, min(host.units(marks.device), -(-marks.shape[0] // 256)))
    what = {"K": K, "S": marks.shape[1], "E": sent.num_experts, "world": sent.team.size}
    what |= {"blocks": blocks, "threads": 256, "dtype": host.dtype_name(weight)}
    args = (marks, sent.meta, sent.starts, sent.team.rank, choice, weight)
    host.launch(expert_kernels.choices, args, **what)
    return choice, weight


def room(tokens: int, topk: int, experts: int, ranks: int) -> tuple[int, int]:
    """How many rows and pairs could come to a rank: each rank's tokens, each to as many of its experts as it
    can choose."""
    return tokens * ranks, tokens * ranks * min(topk, share(experts, ranks))


def tokens_of(rank: int, tokens: int, world: int, uneven: bool) -> int:
    """How many tokens a drawn rank has: all ``tokens``, or uneven: the first rank has none, the last one
    all."""
    return tokens * rank // max(1, world - 1) if uneven else tokens


def draw(
    tokens: int,
    hidden: int,
    topk: int,
    experts: int,
    dtype: str = "bfloat16",
    choice: str = "",
    uneven: bool = False,
    rank: int = 0,
    world: int = 1,
    device: Any = "cpu",
    seed: int = 0,
    **more: Any,
) -> dict[str, Any]:
    """A rank's tokens and their experts. ``choice``: "" some experts are liked by all; "one": all tokens
    choose the last one first; "few": half of the experts get nothing; "drop": some choices are none."""
    g = generator(device, 1000 * seed + rank)
    t = tokens_of(rank, tokens, world, uneven)
    liked = torch.randn(1, experts, generator=generator(device, seed + 77), device=device)
    logits = torch.randn(t, experts, generator=g, device=device) + liked
    if choice == "one":
        logits[:, -1] = 100
    if choice == "few":
        logits[:, : experts // 2] = -100
    found = logits.softmax(-1).topk(min(topk, experts))
    ids, weights = found.indices.to(torch.int32), found.values / found.values.sum(-1, keepdim=True)
    if choice == "drop":
        none = torch.rand(ids.shape, generator=g, device=device) < 0.4
        ids = ids.masked_fill(none, -1)
    return {
        "x": normal((t, hidden), dtype, g),
        "experts": ids,
        "weights": weights.float().contiguous(),
        "num_experts": experts,
        "tokens": tokens,
        **more,
    }


def remote(
    world: int, tokens: int, hidden: int, topk: int, experts: int, dtype: str = "bfloat16", **_: Any
) -> float:
    """Bytes of the rows that leave a rank, where each of its tokens chooses at random: of a token with k
    experts out of E a rank with e of them gets one with the probability 1 − C(E − e, k) / C(E, k)."""
    local, missed = share(experts, world), 1.0
    for k in range(topk):
        missed *= max(0, experts - local - k) / (experts - k)
    return (world - 1) * (1 - missed) * tokens * hidden * float(getattr(torch, dtype).itemsize)


#: cases that both are tested with
SMALL: tuple[dict[str, Any], ...] = (
    {"tokens": 37, "hidden": 24, "topk": 2, "experts": 8},
    {"tokens": 40, "hidden": 10, "topk": 3, "experts": 7, "dtype": "float32", "uneven": True, "blocks": 1},
    {"tokens": 1, "hidden": 33, "topk": 1, "experts": 5, "dtype": "float16"},
    {"tokens": 10, "hidden": 72, "topk": 2, "experts": 6, "choice": "one"},
    {"tokens": 12, "hidden": 16, "topk": 4, "experts": 12, "choice": "few"},
    {"tokens": 11, "hidden": 24, "topk": 8, "experts": 9, "choice": "drop", "uneven": True},
    {"tokens": 5, "hidden": 1100, "topk": 2, "experts": 2},
    {"tokens": 1, "hidden": 700, "topk": 2, "experts": 4},
)
#: and measured with
MEASURED: tuple[dict[str, Any], ...] = (
    {"tokens": 4096, "hidden": 7168, "topk": 8, "experts": 256},
    {"tokens": 128, "hidden": 7168, "topk": 8, "experts": 256},
    {"tokens": 1024, "hidden": 4096, "topk": 4, "experts": 64},
    {"tokens": 8192, "hidden": 2048, "topk": 6, "experts": 64},
)


# ---- what peers and picks of these operations share


def exchanged(
    experts: torch.Tensor, num_experts: int, group: Any
) -> tuple[list[torch.Tensor], list[int], list[int]]:
    """What torch's all-to-all of rows, once a rank, takes: the tokens for each rank, how many those are, and
    how many come from each. −1 is no expert's."""
    world = torch.distributed.get_world_size(group)
    there = experts // share(num_experts, world)  # −1 stays so
    order = [(there == d).any(-1).nonzero()[:, 0] for d in range(world)]
    sent = [len(o) for o in order]
    counts = torch.tensor(sent, dtype=torch.int64, device=experts.device)
    come = torch.empty_like(counts)
    torch.distributed.all_to_all_single(come, counts, group=group)
    return order, sent, come.tolist()


def in_order(ids: torch.Tensor, num_experts: int, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the experts of rows that came: how many pairs each of this rank's has, and the pairs in the order of
    experts, as places in ``ids``."""
    world, me = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    local = share(num_experts, world)
    mine = torch.where(ids // local == me, ids - me * local, local).flatten()
    sizes = torch.bincount(mine, minlength=local + 1)[:local].to(torch.int32)
    return sizes, mine.argsort(stable=True)[: int(sizes.sum())]


def alone(
    x: torch.Tensor, w: torch.Tensor, experts: torch.Tensor, world: int, gate: str = "", **_: Any
) -> Callable[[], Any]:
    """The library's grouped product of as many pairs, evenly many of each expert."""
    each = -(-experts.numel() // len(w))
    sizes = torch.full((len(w),), each, dtype=torch.int32, device=x.device)
    return grouped.torch_grouped(random_like(x, each * len(w), x.shape[1]), w, sizes, gate)


def fused_or_apart(model: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The ways and the pick of an operation whose configuration, which ``model(world, units, shape)`` gives,
    says whether it is in one kernel."""

    def ways(world: int, units: int = 132, **shape: Any) -> dict[str, dict[str, Any]]:
        how = model(world, units, shape)
        return {way: {"config": replace(how, fused=way == "fused")} for way in ("fused", "apart")}

    def pick(world: int, units: int = 132, kept: Any = None, **shape: Any) -> Pick:
        picked = replace(model(world, units, shape), **(kept or {}))
        return Pick("fused" if picked.fused else "apart", picked.blocks)

    return ways, pick
