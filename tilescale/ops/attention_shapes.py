"""What attention and its gradients share: how their tensors lie."""

from __future__ import annotations

from typing import Any

import torch

import tilescale.language as T

LOG2_E = 1.4426950408889634
DTYPES = ("bfloat16", "float16")


def wide_of(dim: int, halved: bool = False) -> int:
    """Columns of a tile of a head: whole steps of the tensor cores, which take 16 of them at a time.
    ``halved``: beyond 128 columns two warpgroups have half of them each, whole boxes of 64."""
    return -(-dim // 128) * 128 if halved and dim > 128 else -(-dim // 16) * 16


class Shape:
    """Where a block finds its rows: in tensors (batch, heads, length, dim), or, packed, (tokens, heads, dim)
    with each sequence's start. ``tile``: queries of a tile in the table of numbers a query, whose last tile
    is filled up. ``by_token``: results, and their gradients, are (batch, length, heads, dim)."""

    def __init__(
        self, heads: int, kv_heads: int, dim: int, packed: bool, tile: int = 64, wide: int = 0,
        by_token: bool = False,
    ):  # fmt: skip
        self.by_token = by_token
        self.heads, self.kv_heads, self.dim, self.packed, self.tile_rows = heads, kv_heads, dim, packed, tile
        self.queries, self.keys, self.blocks, self.ends = (
            T.dynamic(n) for n in ("queries", "keys", "blocks", "ends")
        )
        self.batch = self.ends - 1 if packed else T.dynamic("batch")
        self.wide = wide or wide_of(dim)

    def rows(self, length: Any, heads: int, dim: int = 0) -> tuple[Any, ...]:
        return (
            (length, heads, dim or self.dim) if self.packed else (self.batch, heads, length, dim or self.dim)
        )

    @property
    def numbers(self) -> Any:
        """A query's numbers, by tiles: its log-sum-exp times log2 e, infinite where there is no query, and
        its delta."""
        return T.Tensor(
            (self.ends - 1 if self.packed else self.batch, self.heads, 2, self.blocks, self.tile_rows),
            "float32",
        )

    def tile(self, x: Any, b: Any, h: Any, row: Any, count: int) -> Any:
        """Rows of a head, zeros behind their dim columns."""
        return x[row : row + count, h, 0 : self.wide] if self.packed else x[b, h, row, 0]

    def of_tokens(self, heads: int) -> tuple[Any, ...]:
        """The shape of results."""
        return (
            (self.batch, self.queries, heads, self.dim) if self.by_token else self.rows(self.queries, heads)
        )

    def of_token(self, x: Any, b: Any, h: Any, row: Any, count: int) -> Any:
        """`tile` of results."""
        return x[b, row : row + count, h, 0 : self.wide] if self.by_token else self.tile(x, b, h, row, count)

    def span(self, starts: Any, b: Any, length: Any) -> tuple[Any, Any]:
        """The first row of sequence b, and how many it has."""
        return (starts[b], starts[b + 1] - starts[b]) if self.packed else (0, length)


def by_tokens(shape: Any) -> tuple[int, ...]:
    """(batch, length, heads, dim) of (batch, heads, length, dim)."""
    batch, heads, length, dim = shape
    return batch, length, heads, dim


def folded(
    causal: bool, by_query: tuple[torch.Tensor, ...], by_key: tuple[torch.Tensor, ...]
) -> tuple[int, int, Any, Any]:
    """Heads, heads of keys, and the tensors (batch, heads, rows, …) as sequences of one head where that is
    the same: the queries of heads that share keys follow one another where no mask counts them. One kernel
    serves all numbers of heads so, and tiles are filled better."""
    batch, heads, queries = by_query[0].shape[:3]
    kv_heads = by_key[0].shape[1]
    # A causal kernel of one head is up to 9 % slower than that of the heads as they are (H200). 65535: blocks
    # along the grid's last axis.
    if causal or batch * kv_heads > 65535:
        return heads, kv_heads, by_query, by_key
    rows = heads // kv_heads * queries
    queried = tuple(t.view(batch * kv_heads, 1, rows, *t.shape[3:]) for t in by_query)
    return 1, 1, queried, tuple(t.view(batch * kv_heads, 1, *t.shape[2:]) for t in by_key)


def sequences(lengths: int, batch: int, packed: bool, g: torch.Generator) -> list[int]:
    return (
        torch.randint(1, lengths + 1, (batch,), generator=g, device=g.device).tolist()
        if packed
        else [lengths] * batch
    )


def rows_of_head(x: torch.Tensor, starts: torch.Tensor | None, b: int, h: int) -> torch.Tensor:
    """The rows of one sequence and head, (length, dim), or (length,) of log-sum-exps."""
    if starts is None:
        return x[b, h]
    first, last = int(starts[b]), int(starts[b + 1])
    return x[h, first:last] if x.dim() == 2 else x[first:last, h]


def hidden(queries: int, keys: int, device: Any) -> torch.Tensor:
    """Where a query does not see a key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1)
