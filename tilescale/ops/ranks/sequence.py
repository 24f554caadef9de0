"""How a sequence is cut among ranks, for attention.

Contiguous: rank r of n has the r-th of n chunks of rows, as torch.chunk cuts them (`groups.share`). Zig-zag:
it has the r-th and the r-th but one to the last of 2n such chunks, one behind the other; under a causal mask
all ranks have equally much to do then. Chunks are equally long but for the last ones, which may have fewer
rows or none. A rank's second chunk has rows only where the first one is whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import tilescale.language as T
from tilescale.comm.backend import Team
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import host
from tilescale.ops.attention import DTYPES
from tilescale.ops.case import Expected, generator, normal
from tilescale.ops.ranks.groups import share

LAYOUTS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Chunks:
    """``rows`` rows among ``world`` ranks, each of which has ``parts`` chunks."""

    rows: int
    world: int
    parts: int

    @property
    def each(self) -> int:
        """Rows of a chunk but the last ones'."""
        return share(self.rows, self.world * self.parts)

    def chunk(self, rank: Any, part: Any) -> Any:
        """The number of a rank's chunk in the sequence; also of device values."""
        if self.parts == 1:
            return rank
        last = 2 * self.world - 1 - rank
        if isinstance(part, int):
            return last if part else rank
        return T.if_then_else(part == 0, rank, last)

    def count(self, chunk: int) -> int:
        """How many rows a chunk has."""
        return max(0, min(self.each, self.rows - chunk * self.each))

    def held(self, rank: int) -> int:
        """How many rows a rank has."""
        return sum(self.count(self.chunk(rank, p)) for p in range(self.parts))

    def places(self, rank: int, device: Any = "cpu") -> torch.Tensor:
        """Where a rank's rows lie in the sequence."""
        starts = [self.chunk(rank, p) for p in range(self.parts)]
        runs = [torch.arange(self.count(c), device=device) + c * self.each for c in starts]
        return torch.cat(runs)


def cut(rows: int | None, mine: int, team: Team, layout: str, what: str) -> Chunks:
    """All ranks' rows, ``rows``, or as many on each rank as here.

    Raises:
        TileValueError: a layout that is none, or this rank has another number of rows than its share.
    """
    if layout not in LAYOUTS:
        raise TileValueError(f"layout={layout!r}", expected=" or ".join(f'"{x}"' for x in LAYOUTS))
    chunks = Chunks(mine * team.size if rows is None else rows, team.size, 1 + (layout == "zigzag"))
    if mine != chunks.held(team.rank):
        raise TileValueError(
            f"{what} has {mine} rows on rank {team.rank} of {team.size}, of rows={chunks.rows} in all",
            expected=f"{chunks.held(team.rank)}: {layout}, in chunks of {chunks.each}",
        )
    return chunks


def whole(parts: list[torch.Tensor], chunks: Chunks, axis: int) -> torch.Tensor:
    """The sequence from all ranks' rows, in the order of ranks."""
    places = torch.cat([chunks.places(r, parts[0].device) for r in range(chunks.world)])
    return torch.cat(parts, axis).index_select(axis, places.argsort())


def own(x: torch.Tensor, chunks: Chunks, rank: int, axis: int) -> torch.Tensor:
    """A rank's rows of the sequence."""
    return x.index_select(axis, chunks.places(rank, x.device))


# ---- operands


@dataclass(frozen=True)
class Operands:
    """What attention over a cut sequence is about: its extents, and how its rows are cut."""

    packed: bool
    batch: int
    heads: int
    kv_heads: int
    dim: int
    chunks: Chunks
    scale: float

    @property
    def axis(self) -> int:
        """That of rows, of q and the like."""
        return 0 if self.packed else 2

    def constants(self, q: torch.Tensor, causal: bool) -> dict[str, Any]:
        """What kernels are made of."""
        made = {"heads": self.heads, "kv_heads": self.kv_heads, "dim": self.dim, "batch": self.batch}
        made |= {"rows": self.chunks.rows, "world": self.chunks.world, "parts": self.chunks.parts}
        return made | {
            "packed": self.packed,
            "dtype": host.dtype_name(q),
            "scale": self.scale,
            "causal": causal,
        }


def checked(
    what: str,
    by_query: tuple[torch.Tensor, ...],
    by_key: tuple[torch.Tensor, ...],
    team: Team,
    layout: str,
    rows: int | None,
    scale: float | None,
    starts: torch.Tensor | None,
) -> Operands:
    """The operands of attention over a sequence that is cut among ranks: tensors of queries' shape, q first,
    and of keys'.

    Raises:
        TileValueError, TileTypeError: shapes, dtypes or a layout that do not fit.
    """
    (q, *like_q), (k, *like_k) = by_query, by_key
    packed = starts is not None
    dtypes = {host.dtype_name(t) for t in (*by_query, *by_key)}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        raise TileTypeError(f"{what} of {', '.join(sorted(dtypes))}", expected="one of " + ", ".join(DTYPES))
    shapes = f"{what} of q {tuple(q.shape)}, k {tuple(k.shape)}"
    axes = "(rows, heads, dim)" if packed else "(batch, heads, rows, dim)"
    alike = all(t.shape == q.shape for t in like_q) and all(t.shape == k.shape for t in like_k)
    if q.dim() != (3 if packed else 4) or k.dim() != q.dim() or not alike:
        raise TileValueError(shapes, expected=f"{axes}, those of queries alike and those of keys")
    batch, axis = 1 if packed else q.shape[0], 0 if packed else 2
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[-1]
    if q.shape[axis] != k.shape[axis] or dim != k.shape[-1] or not packed and k.shape[0] != batch:
        raise TileValueError(shapes, expected="as many rows of queries as of keys, one batch, one dim")
    if 0 in (heads, kv_heads, batch, dim) or heads % kv_heads or dim % 8 or dim > 256:
        raise TileValueError(
            shapes, expected="heads a multiple of k's, a head dimension that is a multiple of 8 up to 256"
        )
    if starts is not None and (starts.dim() != 1 or starts.dtype != torch.int32 or len(starts) < 2):
        raise TileValueError(f"starts is {tuple(starts.shape)} of {starts.dtype}", expected="(n + 1,) int32")
    if scale is not None and not scale > 0:
        raise TileValueError(f"scale={scale}", expected="a positive number")
    if not all(t.is_contiguous() for t in (*by_query, *by_key)):
        raise TileValueError("a tensor is not contiguous", expected="contiguous tensors")
    chunks = cut(rows, q.shape[axis], team, layout, "q")
    return Operands(packed, batch, heads, kv_heads, dim, chunks, float(scale or dim**-0.5))


def checked_sums(what: str, lse: torch.Tensor, q: torch.Tensor, given: Operands) -> None:
    """The log-sum-exps that a forward gave.

    Raises:
        TileValueError, TileTypeError: another shape or dtype.
    """
    if lse.dtype != torch.float32:
        raise TileTypeError(f"{what} of an lse of {host.dtype_name(lse)}", expected="float32")
    wanted = (given.heads, q.shape[0]) if given.packed else tuple(q.shape[:3])
    if tuple(lse.shape) != wanted or not lse.is_contiguous():
        raise TileValueError(f"{what} of an lse of {tuple(lse.shape)}", expected=f"{wanted}, contiguous")


def into_chunks(to: torch.Tensor, x: torch.Tensor, given: Operands, rank: int) -> None:
    """This rank's rows of x at their place in ``to`` (chunks, batch · heads, rows of a chunk, …), zeros
    behind them: what is none is multiplied by zero."""
    by_head = x.transpose(0, 1) if given.packed else x.flatten(0, 1)
    for part in range(given.chunks.parts):
        chunk, first = given.chunks.chunk(rank, part), part * given.chunks.each
        count = given.chunks.count(chunk)
        to[chunk, :, :count].copy_(by_head[:, first : first + count])
        if count < given.chunks.each:
            to[chunk, :, count:].zero_()


def seen(starts: torch.Tensor, given: Operands, rank: int, causal: bool, keys: bool = False) -> torch.Tensor:
    """(2, rows) int32: the first key that each of this rank's queries sees, and the one behind the last; with
    ``keys`` the first query that sees each of its keys, and the one behind the last."""
    at = given.chunks.places(rank, starts.device).to(torch.int32)
    which = torch.searchsorted(starts, at, right=True).clamp(1, len(starts) - 1)
    first, stop = starts[which - 1], starts[which]
    if causal:
        first, stop = (at, stop) if keys else (first, at + 1)
    return torch.stack([first, stop]).contiguous()


# ---- what is right


def draw(
    length: int,
    heads: int,
    dim: int,
    batch: int = 1,
    kv_heads: int = 0,
    causal: bool = False,
    layout: str = "contiguous",
    packed: int = 0,
    dtype: str = "bfloat16",
    rank: int = 0,
    world: int = 1,
    device: Any = "cpu",
    seed: int = 0,
    **more: Any,
) -> dict[str, Any]:
    """A rank's rows of normal random inputs. ``packed``: so many sequences."""
    g, kv_heads = generator(device, 1000 * seed), kv_heads or heads
    chunks = Chunks(length, world, 1 + (layout == "zigzag"))
    shapes = [(length, n, dim) if packed else (batch, n, length, dim) for n in (heads, kv_heads, kv_heads)]
    drawn = [normal(shape, dtype, g) for shape in shapes]
    axis = 0 if packed else 2
    made: dict[str, Any] = {
        name: own(x, chunks, rank, axis) for name, x in zip("qkv", drawn, strict=True)
    } | {"causal": causal, "rows": length, **more}
    if layout != "contiguous":
        made["layout"] = layout
    if packed:
        cuts = torch.randint(0, length + 1, (packed - 1,), generator=g, device=device).sort().values
        made["starts"] = torch.nn.functional.pad(cuts, (1, 1)).to(torch.int32)
        made["starts"][-1] = length
    return made


def drawn_chunks(everyone: list[dict[str, Any]]) -> Chunks:
    """How the sequence of drawn arguments is cut."""
    return Chunks(everyone[0]["rows"], len(everyone), 1 + (everyone[0].get("layout") == "zigzag"))


def together(everyone: list[dict[str, Any]], name: str, axis: int | None = None) -> torch.Tensor:
    """All ranks' rows of an argument, as the sequence has them, along their axis or that of q."""
    packed = "starts" in everyone[0]
    axis = axis if axis is not None else 0 if packed else 2
    return whole([a[name] for a in everyone], drawn_chunks(everyone), axis)


def apart(results: tuple[Expected, ...], axes: tuple[int, ...], everyone: list[dict[str, Any]]) -> list[Any]:
    """What each rank has of results of the whole sequence, whose rows lie along these axes."""
    chunks = drawn_chunks(everyone)
    return [
        tuple(
            Expected(own(r.value, chunks, rank, axis), own(r.allowed, chunks, rank, axis))
            for r, axis in zip(results, axes, strict=True)
        )
        for rank in range(len(everyone))
    ]
