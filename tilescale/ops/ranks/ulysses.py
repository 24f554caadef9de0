"""``ulysses_attention(q, k, v)``: attention over a sequence that is cut among ranks, which exchange rows for
heads: each rank gets all rows of its heads, computes their attention as on one GPU, and gives the rows back
(Jacobs et al., "DeepSpeed Ulysses", 2023).

Against `ring_attention` it moves fewer bytes where keys have as many heads as queries, since every row goes
to one rank alone, works on whole sequences, whose causal mask needs no balance, and holds a rank's heads of
the sequence in symmetric memory, not all of them. It computes nothing while rows cross, and more ranks than
heads do not help it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilescale.comm.backend import Team
from tilescale.errors import TileValueError
from tilescale.ops import attention, host
from tilescale.ops.case import random_like
from tilescale.ops.ranks import flat, ring, sequence, ulysses_kernels
from tilescale.ops.ranks.case import Case, Pick, RankOp
from tilescale.ops.ranks.groups import Group, number_of, team_of
from tilescale.ops.ranks.ulysses_kernels import Moved, split
from tilescale.ops.ranks.workspace import workspace

#: of a block of the exchange
THREADS = 512


@host.checked
def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "contiguous",
    starts: torch.Tensor | None = None,
    longest: int | None = None,
    group: Group = None,
    rows: int | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    blocks: int | None = None,
    threads: int = THREADS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale · q·kᵀ)·v of this rank's queries over the keys of all ranks, of the inputs' dtype, and
    the logarithms of the sums of exp(scale · scores), float32; the same bits from run to run. Collective.

    Args:
        q, k, v, causal, scale, layout, starts, group, rows: as `ring_attention` has them. Heads need not
            divide among ranks, and a head of keys goes to every rank that has any of its heads of queries.
        longest: with ``starts`` the rows of the longest sequence, where the host knows them: fewer blocks
            look for rows then.
        out: takes the results.
        blocks: multiprocessors that the exchange keeps at most. threads: of its blocks.

    Raises:
        TileValueError, TileTypeError: shapes, dtypes, layouts or groups that do not fit.
    """
    team = team_of(group)
    given = sequence.checked("ulysses_attention", (q,), (k, v), team, layout, rows, scale, starts)
    to = out or (None, None)
    numbers = (given.heads, q.shape[0]) if given.packed else tuple(q.shape[:3])
    o = host.result(to[0], tuple(q.shape), q.dtype, q)
    lse = host.result(to[1], numbers, torch.float32, q, "lse")
    if given.chunks.rows == 0:
        return o, lse
    most = longest_of(longest, given)
    more: dict[str, Any] = {"causal": causal, "scale": given.scale}
    if given.packed:
        more |= {"q_starts": starts, "k_starts": starts, "longest": most}
    if team.size == 1:
        return attention.flash_attention(q, k, v, **more, out=(o, lse))
    heads = Held(given, team)
    space, wanted = workspace(team), [heads.queries, heads.keys, heads.keys, heads.queries]
    tables = space.tensors(
        q, *((of.shape, q.dtype) for of in wanted), (heads.queries.sums, torch.float32), what="q"
    )
    what = heads.exchange(q, blocks, threads, gradients=False)
    host.launch(ulysses_kernels.hand_out, (q, k, v, *tables[:3]), **what)
    if heads.queries.count:
        whole = [of.whole(x) for of, x in zip(wanted, tables[:4], strict=True)]
        found = whole[3], heads.queries.whole_sums(tables[4])
        attention.flash_attention(*whole[:3], **more, out=found)
    back = o, lse.view(given.batch, given.heads, -1, 1)
    host.launch(ulysses_kernels.bring_back, (*tables[3:], *back), **what)
    return o, lse


def longest_of(longest: int | None, given: sequence.Operands) -> int:
    """The most rows of a sequence.

    Raises:
        TileTypeError, TileValueError: said where sequences are not packed, or no number of rows.
    """
    if longest is None:
        return given.chunks.rows
    if not given.packed:
        raise TileValueError(f"longest={longest}", expected="a number of rows, with starts=")
    return min(number_of(longest, "longest", least=1), given.chunks.rows)


class Part:
    """A rank's heads of tensors that lie in symmetric memory."""

    def __init__(self, given: sequence.Operands, moved: Moved, rank: int):
        self.given, self.count, rows = given, moved.held(rank), given.chunks.rows
        self.shape = (given.batch * rows * moved.most, given.dim)
        self.sums = (self.shape[0], 1)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Of these heads the whole sequence, as attention takes it."""
        rows, batch, dim = self.given.chunks.rows, self.given.batch, self.given.dim
        there = x[: batch * self.count * rows]
        if self.given.packed:
            return there.view(rows, self.count, dim)
        return there.view(batch, self.count, rows, dim)

    def whole_sums(self, x: torch.Tensor) -> torch.Tensor:
        """The log-sum-exps of the same."""
        rows, batch = self.given.chunks.rows, self.given.batch
        there = x[: batch * self.count * rows]
        return there.view(self.count, rows) if self.given.packed else there.view(batch, self.count, rows)


class Held:
    """How heads are split among a team, and what this rank has of them."""

    def __init__(self, given: sequence.Operands, team: Team):
        self.given, self.split = given, split(given.heads, given.kv_heads, team.size)
        self.queries = Part(given, self.split.queries, team.rank)
        self.keys = Part(given, self.split.keys, team.rank)

    def exchange(self, q: torch.Tensor, blocks: int | None, threads: int, gradients: bool) -> dict[str, Any]:
        """What the exchange's kernels are made of."""
        made = self.given.constants(q, False)
        del made["scale"], made["causal"]
        rows = self.given.batch * self.given.heads * self.given.chunks.parts * self.given.chunks.each
        most = max(1, -(-rows // (threads // 32 * ulysses_kernels.ROWS)))
        made |= {"unit": self.split.unit, "threads": threads, "gradients": gradients}
        return made | {"blocks": min(flat.multiprocessors(q.device, blocks), most)}


# ---- what is right, and what it is measured against


class Library:
    """The exchange as torch.distributed has it: all-to-all of uneven parts, and copies into and out of them.
    Tensors are (batch, heads, this rank's rows, dim), or packed ones."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, group: Any, rows: int, layout: str):
        self.group, self.packed = group, q.dim() == 3
        self.rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        self.split = split(q.shape[1], k.shape[1], world)
        self.chunks = sequence.Chunks(rows, world, 1 + (layout == "zigzag"))
        self.held = [self.chunks.held(r) for r in range(world)]
        self.order = torch.cat([self.chunks.places(r) for r in range(world)]).to(q.device)

    def by_head(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, heads, dim) as the others, a head of keys for each unit of heads of queries."""
        x = x.transpose(0, 1)[None] if self.packed else x
        return x.repeat_interleave(self.moved(x).count // x.shape[1], 1)

    def moved(self, x: torch.Tensor) -> Moved:
        """How a tensor's heads go to ranks."""
        return self.split.queries if x.shape[1] == self.split.heads else self.split.keys

    def sizes(self, moved: Moved) -> tuple[list[int], list[int]]:
        """Rows of heads that go to each rank, and that come from each."""
        ranks, mine = range(len(self.held)), moved.held(self.rank)
        return [moved.held(r) * self.held[self.rank] for r in ranks], [mine * n for n in self.held]

    def apart(self, x: torch.Tensor) -> torch.Tensor:
        """All rows of the rank's heads."""
        moved, (batch, _, _, dim) = self.moved(x), x.shape
        sent, got = self.sizes(moved)
        given = x.permute(1, 2, 0, 3).reshape(-1, batch, dim).contiguous()
        came = x.new_empty(sum(got), batch, dim)
        torch.distributed.all_to_all_single(came, given, got, sent, group=self.group)
        mine = moved.held(self.rank)
        parts = [p.view(mine, n, batch, dim) for p, n in zip(came.split(got), self.held, strict=True)]
        whole = torch.cat(parts, 1).index_select(1, self.order.argsort())
        return whole.permute(2, 0, 1, 3).contiguous()

    def together(self, x: torch.Tensor, moved: Moved) -> torch.Tensor:
        """The other way: of all rows of the rank's heads this rank's rows of all heads, the sum of copies."""
        batch, _, _, dim = x.shape
        got, sent = self.sizes(moved)
        parts = x.permute(2, 1, 0, 3).index_select(0, self.order).split(self.held)
        given = torch.cat([p.transpose(0, 1).reshape(-1, batch, dim) for p in parts]).contiguous()
        came = x.new_empty(sum(got), batch, dim)
        torch.distributed.all_to_all_single(came, given, got, sent, group=self.group)
        whole = came.view(moved.count, self.held[self.rank], batch, dim).permute(2, 0, 1, 3)
        whole = whole.unflatten(1, (-1, moved.copies)).sum(2)
        return whole[0].transpose(0, 1) if self.packed else whole

    def attention(self, by_head: list[torch.Tensor], causal: bool, starts: torch.Tensor | None) -> Any:
        """torch's, of whole sequences."""
        if by_head[0].shape[1] == 0:
            return by_head[0] * 1
        whole = sequence.Chunks(self.chunks.rows, 1, 1)
        mask = None if starts is None else ring.mask_of(by_head[0], whole, 0, causal, starts)
        return torch.nn.functional.scaled_dot_product_attention(
            *by_head, attn_mask=mask, is_causal=causal and mask is None, enable_gqa=True
        )


def by_library(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any, causal: bool, rows: int,
    layout: str = "contiguous", starts: torch.Tensor | None = None, **_: Any,
) -> Callable[[], Any]:  # fmt: skip
    """torch.distributed's all-to-all around torch's attention."""
    library = Library(q, k, group, rows, layout)

    def call() -> Any:
        given = [library.apart(library.by_head(x)) for x in (q, k, v)]
        return library.together(library.attention(given, causal, starts), library.split.queries)

    return call


def share_of(q: torch.Tensor, k: torch.Tensor, rows: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random numbers in the shape of all rows of one rank's share of the heads."""
    how, batch = split(q.shape[1], k.shape[1], world), 1 if q.dim() == 3 else q.shape[0]
    made = (random_like(q, batch, m.most, rows, q.shape[-1]) for m in (how.queries, how.keys))
    return next(made), next(made)


def alone(q: torch.Tensor, k: torch.Tensor, causal: bool, rows: int, world: int, **_: Any) -> Any:
    """Our attention of one rank's share of the heads."""
    q, k = share_of(q, k, rows, world)
    return lambda: attention.flash_attention(q, k, k, causal=causal)


def crossing(
    world: int, length: int, heads: int, dim: int, kv_heads: int = 0, batch: int = 1, **_: Any
) -> tuple[float, float]:
    """Bytes that leave a rank of a tensor of queries' shape, and of keys'."""
    how, row = (
        split(heads, kv_heads or heads, world),
        2.0 * batch * dim * length / world * (world - 1) / world,
    )
    return row * how.queries.count, row * how.keys.count


def remote(**shape: Any) -> float:
    """q, k and v go to the ranks of their heads, o and its sums come back."""
    queries, keys = crossing(**shape)
    return 2 * queries + 2 * keys + queries * 2 / shape["dim"]


def pick(units: int = 132, blocks: int | None = None, **_: Any) -> Pick:
    return Pick("kernel", min(units, blocks or units))


FEW = {"blocks": 2, "threads": 64}
SMALL: tuple[dict[str, Any], ...] = (
    {"length": 26, "heads": 6, "dim": 8, "causal": True},
    {"length": 60, "heads": 2, "kv_heads": 1, "dim": 16, "layout": "zigzag"},
    {"length": 45, "heads": 4, "kv_heads": 2, "dim": 24, "packed": 3, "causal": True},
    {"length": 2, "heads": 2, "kv_heads": 1, "dim": 8, "batch": 2, "dtype": "float16"},
    {"length": 30, "heads": 3, "dim": 8, "packed": 2, "layout": "zigzag"},
)

OP = RankOp(
    name="ulysses_attention",
    run=ulysses_attention,
    draw=sequence.draw,
    reference=ring.reference,
    pick=pick,
    ways=lambda **_: {"kernel": {}},
    base=lambda **_: {"blocks": None},
    knobs=lambda **_: (flat.BLOCKS,),
    cases=(
        *(Case({**shape, **FEW}, small=True) for shape in SMALL),
        *(Case({**shape, "length": 20 * shape["length"], "dim": 64}) for shape in SMALL),
        *(Case(shape, bar=1.0) for shape in ring.BENCH),
    ),
    peers={"library": by_library},
    alone=alone,
    flops=ring.flops,
    remote=remote,
)
