"""The tile programs that exchange rows for heads: ``hand_out`` puts each rank's rows of all heads to the
ranks of those heads, ``bring_back`` pulls them from there.

What lies in symmetric memory is a row of rows: of a rank's heads the whole sequence, (batch, its heads, rows)
one behind the other, or, packed, (rows, its heads). So attention works on it as it is, also where the last
ranks have fewer heads. A warp moves neighbouring rows of a head at once, or, packed, one row of a head.

Who releases and who acquires: a rank touches another one only when that has reached the launch, so what its
stream did before is done, attention included. A launch is complete on a rank when everything aimed at it has
landed, or has been read. So neither kernel signals anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilescale.language as T
from tilescale.ops.gemm_kernels import ceil_div
from tilescale.ops.ranks.ring_gradient_kernels import of_rank
from tilescale.ops.ranks.ring_kernels import View
from tilescale.ops.ranks.sequence import Chunks

#: rows that a warp moves at once, and numbers
ROWS, NUMBERS = 8, 32


@dataclass(frozen=True)
class Moved:
    """Heads that go to ranks: ``count`` of them, ``most`` a rank, in order, the last ranks fewer or none. A
    tensor has a head for ``copies`` neighbouring ones."""

    count: int
    most: int
    copies: int = 1

    def held(self, rank: int) -> int:
        """How many heads a rank has."""
        return max(0, min(self.most, self.count - rank * self.most))

    def where(self, head: Any) -> tuple[Any, Any, Any]:
        """A head's rank, how many that has, and the head's place among them."""
        rank = head // self.most
        return rank, T.min(self.most, self.count - rank * self.most), head % self.most


@dataclass(frozen=True)
class Heads:
    """Heads of queries in units of ``unit`` neighbours that share a head of keys; each rank has equally many
    units but the last ones, and one head of keys for each of its units."""

    heads: int
    kv_heads: int
    world: int
    unit: int

    @property
    def queries(self) -> Moved:
        return Moved(self.heads, ceil_div(self.heads // self.unit, self.world) * self.unit)

    @property
    def keys(self) -> Moved:
        units = self.heads // self.unit
        return Moved(units, ceil_div(units, self.world), self.heads // self.kv_heads // self.unit)


def split(heads: int, kv_heads: int, world: int) -> Heads:
    """As few heads a rank as there can be, of these as few copies of keys."""
    group = heads // kv_heads
    found = [Heads(heads, kv_heads, world, u) for u in range(group, 0, -1) if group % u == 0]
    return min(found, key=lambda h: h.queries.most)


@dataclass(frozen=True)
class Way:
    """How rows are numbered: those of a rank's tensor, and those in symmetric memory. ``together``: how many
    a warp moves at once."""

    chunks: Chunks
    batch: int
    packed: bool
    together: int

    @property
    def pieces(self) -> int:
        return ceil_div(self.chunks.each, self.together)

    @property
    def of_head(self) -> int:
        """Pieces of a head."""
        return self.batch * self.chunks.parts * self.pieces

    def piece(self, n: Any, rank: Any) -> tuple[Any, ...]:
        """A head's ``n``th piece: its sequence in the batch, its first row in the rank's tensor, that row's
        place in the sequence, and how many rows there are from it on: none, or fewer, in the last ones."""
        c = self.chunks
        part, row = n // self.pieces % c.parts, n % self.pieces * self.together
        chunk = c.chunk(rank, part)
        left = View(c, False, False).held(chunk) - row
        return n // (c.parts * self.pieces), part * c.each + row, chunk * c.each + row, left

    def own(self, x: Any, b: Any, head: Any, row: Any) -> Any:
        """A row of a rank's tensor."""
        return x[row, head, 0] if self.packed else x[b, head, row, 0]

    def at(self, b: Any, held: Any, head: Any, place: Any) -> Any:
        """Where a row of one of a rank's ``held`` heads lies in symmetric memory."""
        rows = self.chunks.rows
        return place * held + head if self.packed else (b * held + head) * rows + place


@T.macro
def put(Own, Whole, way, moved, x, b, head, row, place):
    """Rows of a rank's tensor to the rank of a head."""
    rank, held, slot = moved.where(head)
    T.copy(way.own(Own, b, head // moved.copies, row), x)
    T.copy(x, Whole[way.at(b, held, slot, place), 0], dst=rank)


@T.macro
def get(Own, Whole, way, moved, x, b, head, row, place):
    """Rows of one of a tensor's heads from its rank, or the sum of its copies', in their order."""
    if moved.copies == 1:
        rank, held, slot = moved.where(head)
        T.copy(Whole[way.at(b, held, slot, place), 0], x, src=rank)
        T.copy(x, way.own(Own, b, head, row))
    else:
        total = T.alloc_fragment(x.shape, "float32")
        T.clear(total)
        for copy in T.serial(moved.copies):
            rank, held, slot = moved.where(head * moved.copies + copy)
            T.copy(Whole[way.at(b, held, slot, place), 0], x, src=rank)
            for i, j in T.Parallel(*x.shape):
                total[i, j] += T.cast(x[i, j], "float32")
        T.copy(total, way.own(Own, b, head, row))


@T.macro
def move_all(move, Own, Whole, way, moved, copies, dtype, warp, warps, rank, world):
    """Moves a rank's rows of all heads, of which ``copies`` are moved at once, those of the next rank
    first."""
    columns, heads = Own.shape[-1], moved.count // copies
    x, y = T.alloc_fragment((way.together, columns), dtype), T.alloc_fragment((1, columns), dtype)
    for n in T.serial(warp, heads * way.of_head, step=warps):
        head = (n // way.of_head + (rank + 1) % world * moved.most // copies) % heads
        b, row, place, left = way.piece(n % way.of_head, rank)
        if left >= way.together:
            move(Own, Whole, way, moved, x, b, head, row, place)
        else:
            for i in T.serial(left):
                move(Own, Whole, way, moved, y, b, head, row + i, place + i)


class Exchange:
    """What both kernels know: the ways of rows and of numbers, and the tensors of a rank and in symmetric
    memory."""

    def __init__(
        self, heads: int, kv_heads: int, unit: int, dim: int, batch: int, rows: int, world: int, parts: int,
        packed: bool, dtype: str,
    ):  # fmt: skip
        chunks, self.split = Chunks(rows, world, parts), Heads(heads, kv_heads, world, unit)
        self.rows = Way(chunks, batch, packed, 1 if packed else min(ROWS, max(1, chunks.each)))
        self.numbers = Way(chunks, batch, False, min(NUMBERS, max(1, chunks.each)))
        q, k = (of_rank(h, dim, batch, packed, dtype)[0] for h in (heads, kv_heads))
        #: of queries, of keys, and the log-sum-exps: a rank's
        self.own = q, k, T.Tensor((batch, heads, q.shape[0 if packed else 2], 1), "float32")
        queries, keys = (batch * rows * m.most for m in (self.split.queries, self.split.keys))
        #: and in symmetric memory
        self.whole = (
            *(T.SymmTensor((n, dim), dtype) for n in (queries, keys)),
            T.SymmTensor((queries, 1), "float32"),
        )


@T.macro
def exchanged(e, move, gathered, by_query, by_key, sums, dtype, blocks, threads):
    """Moves all pairs of a rank's tensor and its whole; ``gathered``: copies of a head of keys at once."""
    queries, keys, world = e.split.queries, e.split.keys, e.split.world
    with T.Kernel(blocks, threads=threads) as block, T.Scale("device") as (rank, _):
        with T.Scale("warp") as (w, of):
            warp, warps = w * blocks + block, of * blocks
            for Own, Whole in by_query:
                move_all(move, Own, Whole, e.rows, queries, 1, dtype, warp, warps, rank, world)
            for Own, Whole in by_key:
                copies = keys.copies if gathered else 1
                move_all(move, Own, Whole, e.rows, keys, copies, dtype, warp, warps, rank, world)
            for Own, Whole in sums:
                move_all(move, Own, Whole, e.numbers, queries, 1, "float32", warp, warps, rank, world)


def hand_out(blocks: int, threads: int, gradients: bool, dtype: str, **shape: Any) -> Any:
    """This rank's rows of q, k and v, and for the ``gradients`` of o, its gradient and the log-sum-exps, to
    the ranks of their heads."""
    e = Exchange(dtype=dtype, **shape)
    (q, k, sums), (qs, ks, all_sums) = e.own, e.whole

    @T.prim_func
    def ulysses_hand_out(Q: q, K: k, V: k, Qs: qs, Ks: ks, Vs: ks):
        exchanged(e, put, False, ((Q, Qs),), ((K, Ks), (V, Vs)), (), dtype, blocks, threads)

    @T.prim_func
    def ulysses_hand_out_gradients(
        Q: q, K: k, V: k, O: q, dO: q, Lse: sums, Qs: qs, Ks: ks, Vs: ks, Os: qs, dOs: qs, Sums: all_sums
    ):  # fmt: skip
        by_query = (Q, Qs), (O, Os), (dO, dOs)
        exchanged(e, put, False, by_query, ((K, Ks), (V, Vs)), ((Lse, Sums),), dtype, blocks, threads)

    return ulysses_hand_out_gradients if gradients else ulysses_hand_out


def bring_back(blocks: int, threads: int, gradients: bool, dtype: str, **shape: Any) -> Any:
    """This rank's rows of o and the log-sum-exps, or of the ``gradients``, from the ranks of their heads.
    Where several ranks, or units of one, have used a head of keys, its gradients are added up in their
    order."""
    e = Exchange(dtype=dtype, **shape)
    (q, k, sums), (qs, ks, all_sums) = e.own, e.whole

    @T.prim_func
    def ulysses_bring_back(Os: qs, Sums: all_sums, O: q, Lse: sums):
        exchanged(e, get, True, ((O, Os),), (), ((Lse, Sums),), dtype, blocks, threads)

    @T.prim_func
    def ulysses_bring_back_gradients(dQs: qs, dKs: ks, dVs: ks, dQ: q, dK: k, dV: k):
        exchanged(e, get, True, ((dQ, dQs),), ((dK, dKs), (dV, dVs)), (), dtype, blocks, threads)

    return ulysses_bring_back_gradients if gradients else ulysses_bring_back
