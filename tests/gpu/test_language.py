"""Sums in vectors, annotated layouts, shuffles and named barriers on the GPU itself: the emulator's tests,
run where they are meant for."""

from __future__ import annotations

import pytest

from tests.gpu import device
from tests.kernels import refused
from tests.unit.cuda import test_neighbours
from tests.unit.cuda.emulated import data, empty
from tests.unit.cuda.test_neighbours import (  # noqa: F401
    check_single,
    several,
    single,
    test_products_leave_in_pairs,
    test_where_alignment_is_not_known,
    tiles,
    whole_numbers,
)
from tests.unit.cuda.test_promises import args, product
from tests.unit.layout import test_made
from tests.unit.layout.test_made import (  # noqa: F401
    test_what_agrees_with_the_hardware_keeps_it,
    test_what_does_not_agree_is_kept_and_said,
)
from tests.unit.ops import test_vote
from tests.unit.ops.test_shuffle import halves, handed_on, shuffles, sums, wanted
from tests.unit.test_nan_left_out import both, odd_rows
from tilescale.errors import TileValueError


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' ``agree``, with the GPU in the emulator's place."""
    monkeypatch.setattr(test_neighbours, "agree", device.agree)
    monkeypatch.setattr(test_made, "agree", device.agree)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int32"])
def test_tiles_are_added(dtype: str):
    device.agree(tiles(dtype), {"A": data((64, 64), dtype, 1), "C": data((5, 64, 64), dtype, 2)})


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_two_and_four_at_once(count: int, dtype: str):
    device.agree(several(count, dtype), {"A": data((32, 64), dtype, 1), "C": data((6, 32, 64), dtype, 2)})


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int8", "uint16", "int64"])
@pytest.mark.parametrize("width", [32, 8])
def test_shuffles(dtype: str, width: int):
    args = {"A": data((64,), dtype, 1), "C": empty((5, 64), dtype)}
    assert (
        device.run(shuffles(dtype, width), args)["C"].view("u1") == wanted(args["A"], width).view("u1")
    ).all()


def test_a_sum_over_a_warp():
    device.agree(sums(), {"A": data((4, 128), "float32", 1), "C": empty((4, 4), "float32")})


@pytest.mark.parametrize("first", [1, 7, 13])
def test_meetings_of_some_threads(first: int):
    device.agree(halves(first), {"A": data((256,), "int32", 1), "C": empty((2, 256), "int32")}, exact=True)


@pytest.mark.parametrize("scale, threads", [("thread", 64), ("warp", 128), ("warpgroup", 256)])
def test_arriving_without_waiting(scale: str, threads: int):
    args = {"A": data((4, threads // 2), "int32", 1), "B": empty((4, threads // 2), "int32")}
    device.agree(handed_on(scale, threads), args, exact=True)


def test_votes_and_shuffles_of_some_lanes():
    n = test_vote.N
    for kernel, rows in ((test_vote.votes, 8), (test_vote.halves, 6)):
        device.agree(kernel, {"A": data((n,), "int32", 1), "C": empty((rows, n), "int64")}, exact=True)


def test_nan_in_extremes():
    device.agree(
        both, {"A": odd_rows(), "B": empty((2, 3, 8), "float32")}
    )  # NaNs by value: their bits differ


@pytest.mark.parametrize("multiple", [1, 4, 8])
def test_promised_extents(multiple: int):
    device.agree(product(multiple), args())


def test_a_broken_promise():
    with refused(TileValueError, "n is 68, the extent of axis 1 of B", expected="a multiple of 8"):
        device.run(product(8), args(n=68))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_sums_of_single_elements(dtype: str):
    check_single(dtype, device.run(single(dtype), whole_numbers(dtype)))
