"""What authors fix by hand, on the GPU itself: schedules of pipelined loops, and which thread runs which
iteration."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.gpu import device
from tests.unit.layout import test_asked
from tests.unit.passes import test_manual_stages

pytestmark = [pytest.mark.gpu]
SCHEDULES = [
    {"order": [0, 1, 2], "stage": [0, 0, 2]}, {"order": [1, 2, 0], "stage": [0, 0, 1], "num_stages": 4},
    {"order": [0, 1], "stage": [0, 1], "group": [[0], [1, 2]]},
]  # fmt: skip
SUMS = [
    {"order": [0, 1, 2, 3, 4], "stage": [0, 0, 2, 2, 2]},
    {"order": [3, 4, 0, 1, 2], "stage": [0, 0, 1, 1, 1]},
    {"order": [1, 0, 2, 4, 3], "stage": [0, 0, 1, 1, 1], "num_stages": 3},
    {"order": [0, 1, 2, 3, 4], "stage": [0, 1, 1, 1, 1]},
]


@pytest.mark.parametrize("words", SCHEDULES, ids=str)
def test_products(words: dict[str, Any]):
    device.agree(test_manual_stages.product(**words), test_manual_stages.PRODUCT)


@pytest.mark.parametrize("words", SUMS, ids=str)
def test_sums(words: dict[str, Any]):
    """Of 64 threads: copies ahead by cp.async. Whole numbers, whose products and sums are exact: nvcc makes
    fused multiply-adds."""
    whole = {name: np.rint(4 * array) for name, array in test_manual_stages.SUMS.items()}
    device.agree(test_manual_stages.scaled(**words), whole, exact=True)


@pytest.mark.parametrize("test", [t for n, t in vars(test_asked).items() if n in (
    "test_neighbours_stay_with_their_iteration", "test_a_second_fragment_takes_it_over",
)])  # fmt: skip
def test_layouts(test: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(test_asked, "agree", device.agree)
    test()


@pytest.mark.parametrize(
    "layout", [test_asked.ROWS, test_asked.COLUMNS, test_asked.TWICE], ids=["rows", "columns", "copies"]
)
def test_iterations(layout: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(test_asked, "agree", device.agree)
    test_asked.test_iterations_run_where_the_author_says(layout)
