"""Embeddings whose words are split over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tilescale.nn import products
from tilescale.nn.operations import call, define
from tilescale.nn.parameters import Parallel, split


class VocabParallelEmbedding(Parallel):
    """A table of which each rank has some of the words. A rank looks up what it has, and ranks add up.

    Args:
        vocabulary: of the whole table, a multiple of the ranks. features: of a word.
        group: as `ColumnParallelLinear`'s. sequence_parallel: each rank gets its rows; else all get all.
    """

    weight: nn.Parameter

    def __init__(
        self, vocabulary: int, features: int, *, group: Any = None, sequence_parallel: bool = True,
        device: Any = None, dtype: Any = None,
    ):  # fmt: skip
        super().__init__(group)
        self.vocabulary, self.features, self.sequence_parallel = vocabulary, features, sequence_parallel
        self.place("weight", (vocabulary, features), 0, {"device": device, "dtype": dtype})
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `torch.nn.Embedding` draws them for the whole; ranks need the same seed."""
        self.drawn("weight", nn.init.normal_)

    def forward(self, tokens: Tensor) -> Tensor:
        """Of tokens (M, …), alike on all ranks: (m, …, features), this rank's part of the first axis as
        torch.chunk splits it; not sequence parallel: (M, …, features).

        Raises:
            TileValueError: a token that is no word, on the processor.
        """
        weight = self.local("weight")
        each = split(self.vocabulary, self.ranks, "vocabulary")
        at = call.own_places(tokens, self.rank * each, self.vocabulary)
        here = (at >= 0) & (at < each)
        found = nn.functional.embedding(torch.where(here, at, 0), weight) * here[..., None].to(weight.dtype)
        op = call.reduce_scatter if self.sequence_parallel else call.all_reduce
        made: Tensor = op(found, self.group_name)
        return made

    def extra_repr(self) -> str:
        return f"{self.vocabulary}, {self.features}"


@define(
    "own_places",
    "(Tensor tokens, int first, int vocabulary) -> Tensor",
    lambda tokens, *_: tokens.new_empty(tokens.shape),
)
def own_places(tokens: Tensor, first: int, vocabulary: int) -> Tensor:
    """Numbers of words, counted from ``first`` on."""
    products.numbered(tokens, vocabulary, "a token")
    return tokens - first
