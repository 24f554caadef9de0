"""Packets between ranks that are processes."""

from __future__ import annotations

import numpy as np
import pytest

import tilescale
import tilescale.language as T
from tests.ranks.harness import RanksFailed, run_ranks
from tests.unit.ops.test_packets import all_to_all, given
from tilescale import comm


@pytest.mark.parametrize("n, dtype", [(2, "float32"), (3, "bfloat16"), (4, "int8")])
def test_every_rank_gets_what_each_has_put_in_every_launch(n: int, dtype: str):
    made = tilescale.compile(all_to_all(n, 3, 16, dtype, blocks=3), target="cpu")
    X = given(n, (3, 3, 16), dtype)

    def work():
        comm.init()
        rank = comm.rank()
        box = comm.packets((n, 3, 3, 16), dtype, like="numpy")
        for step in range(5):
            x, y = np.roll(X[rank], step, 0), np.zeros_like(X[rank])
            made(x, box, y)
            want = np.stack([np.roll(X[peer], step, 0)[rank] for peer in range(n)])
            assert (y.view(np.uint8) == want.view(np.uint8)).all(), step

    run_ranks(n, work)
