"""Tiles and loops of T.Scale's executors, on the GPU itself."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import device
from tests.unit.language import test_tiles_in_scales as tiles
from tests.unit.passes import test_tile_owners as owners

pytestmark = [pytest.mark.gpu]
TILES = (
    tiles.test_a_shared_tile_of_a_warpgroup_is_its_own,
    tiles.test_the_warps_of_a_warpgroup_share_its_tile,
    tiles.test_each_threads_own,
    tiles.test_operations_on_own_tiles_and_the_blocks_behind_them_in_the_same_bytes,
    tiles.test_a_block_of_the_cluster_reaches_the_same_executors_tile,
)
NUMBERS = (
    owners.test_single_elements_and_numbers_may_be_read_where_all_threads_hold_them,
    owners.test_results_of_reductions_are_read_by_every_warp,
    owners.test_variables_of_an_executor_and_of_a_block_that_only_reaches_further,
)


@pytest.mark.parametrize("test", TILES)
def test_tiles(test: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiles, "agree", device.agree)
    test()


@pytest.mark.parametrize("test", NUMBERS)
def test_numbers(test: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(owners, "agree", device.agree)
    test()


@pytest.mark.parametrize(
    "scale, rows, ring", [("warp", 16, False), ("warpgroup", 64, False), ("warp", 32, True)]
)
def test_pipelined_loops(scale: str, rows: int, ring: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiles, "agree", device.agree)
    tiles.test_a_pipelined_loop_below_the_block_copies_ahead_or_says_why_not(scale, rows, ring)
