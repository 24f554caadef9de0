"""Copies to other ranks that go on beside their block: what their signal tells, and of what it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tilescale.compiler.checks.run import check, launch
from tilescale.errors import TileError, TileSyntaxError, TileTypeError, TileValueError

S = 16
SCHEDULES = pytest.mark.parametrize("schedule", ["round_robin", "random", "adversary"])


def exchange(body: Callable[..., Any], blocks: int = 1) -> Any:
    """``body`` on every rank, with a tensor, its neighbour, an inbox and two counters."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        inbox: T.SymmTensor((2, S), "float32"),
        got: T.Signal((2,)),
        B: T.Tensor((2, S), "float32"),
    ):
        with T.Kernel(blocks) as b:
            with T.Scale("device") as (rank, n):
                body(A, inbox, got, B, (rank + 1) % n, b)

    return main


@T.macro
def plain(A, inbox, got, B, peer, b):
    T.copy(A, inbox[0, 0:S], dst=peer, signal=got[0], blocking=False)
    T.wait(got[0])
    T.copy(inbox[0, 0:S], B[0, 0:S])


@T.macro
def both_told_by_the_second(A, inbox, got, B, peer, b):
    T.copy(A, inbox[0, 0:S], dst=peer, signal=got[0], blocking=False)
    T.copy(A, inbox[1, 0:S], dst=peer, signal=got[1], blocking=False)
    T.wait(got[1])
    T.copy(inbox, B)
    T.wait(got[0])


@T.macro
def forwarded(A, inbox, got, B, peer, b):
    T.copy(A, inbox[0, 0:S], dst=peer, signal=got[0], blocking=False)
    T.wait(got[0])
    T.copy(inbox[0, 0:S], inbox[1, 0:S], dst=peer, signal=got[1], blocking=False)
    T.wait(got[1])
    T.copy(inbox, B)


@T.macro
def source_written_behind(A, inbox, got, B, peer, b):
    T.copy(A, inbox[0, 0:S], dst=peer, signal=got[0], blocking=False)
    T.fill(A, 0)
    T.wait(got[0])


@T.macro
def told_by_another_signal(A, inbox, got, B, peer, b):
    T.copy(A, inbox[0, 0:S], dst=peer, signal=got[0], blocking=False)
    T.signal(got[1], dst=peer)
    T.wait(got[1])
    T.copy(inbox[0, 0:S], B[0, 0:S])
    T.wait(got[0])


@T.macro
def tells_of_a_blocking_copy(A, inbox, got, B, peer, b):
    T.copy(A, inbox[1, 0:S], dst=peer)
    T.copy(A, inbox[0, 0:S], dst=peer, signal=got[0], blocking=False)
    T.wait(got[0])
    T.copy(inbox, B)


@T.macro
def in_front_of_its_wait(A, inbox, got, B, peer, b):
    T.copy(A, inbox[0, 0:S], dst=peer, signal=got[0], blocking=False)
    T.copy(inbox[0, 0:S], B[0, 0:S])
    T.wait(got[0])


@T.macro
def two_blocks(A, inbox, got, B, peer, b):
    if b == 0:
        T.copy(A, inbox[0, 0:S], dst=peer, signal=got[0], blocking=False)
    if b == 1:
        T.wait(got[0])
        T.copy(inbox[0, 0:S], B[0, 0:S])


@SCHEDULES
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("body", "blocks"), [(plain, 1), (both_told_by_the_second, 1), (forwarded, 1), (two_blocks, 2)]
)
def test_its_signal_tells_of_it_and_of_those_before(body: Any, blocks: int, ranks: int, schedule: str):
    report = check(exchange(body, blocks), ranks, schedule=schedule, seeds=5)
    assert not report.findings, report


@pytest.mark.parametrize(
    "body",
    [source_written_behind, told_by_another_signal, tells_of_a_blocking_copy, in_front_of_its_wait],
)
def test_what_nothing_orders_is_a_race(body: Any):
    report = check(exchange(body), 2, schedule="random", seeds=10)
    assert "race" in report.kinds, report


def test_values_arrive():
    a = [np.arange(S, dtype=np.float32) + 100 * r for r in range(3)]
    for seed in range(6):
        made = launch(exchange(forwarded), 3, {"A": a}, order="random", seed=seed)
        for r in range(3):
            want = [a[(r - 1) % 3], a[(r - 2) % 3]]
            assert np.array_equal(made.arrays[r]["B"], np.stack(want))


# ---- what is refused


@T.macro
def here_alone(A, inbox, got, B, peer, b):
    T.copy(A, B[0, 0:S], blocking=False)


@T.macro
def nobody_told(A, inbox, got, B, peer, b):
    T.copy(A, inbox[0, 0:S], dst=peer, blocking=False)


@T.macro
def pulled(A, inbox, got, B, peer, b):
    T.copy(inbox[0, 0:S], B[0, 0:S], src=peer, blocking=False)


@T.macro
def by_a_warp(A, inbox, got, B, peer, b):
    with T.Scale("warp"):
        T.copy(A, inbox[0, 0:S], dst=peer, signal=got[0], blocking=False)


@T.macro
def of_a_tile(A, inbox, got, B, peer, b):
    a = T.alloc_shared((S,), "float32")
    T.copy(A, a)
    T.copy(a, inbox[0, 0:S], dst=peer, signal=got[0], blocking=False)


@T.macro
def no_bool(A, inbox, got, B, peer, b):
    T.copy(A, inbox[0, 0:S], dst=peer, signal=got[0], blocking="no")


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        (here_alone, TileSyntaxError, "nobody is told of"),
        (nobody_told, TileSyntaxError, "nobody is told of"),
        (pulled, TileSyntaxError, "nobody is told of"),
        (by_a_warp, TileSyntaxError, "a non-blocking copy of a warp"),
        (of_a_tile, TileTypeError, "which is no tensor"),
        (no_bool, TileTypeError, "blocking='no'"),
    ],
)
def test_what_it_needs_is_said(body: Any, kind: type[TileError], text: str):
    with pytest.raises(kind, match=text) as error:
        exchange(body).trace()
    assert error.value.loc is not None and error.value.expected


@pytest.mark.parametrize("warps", [-1, 4, True, 1.5, "2"])
def test_how_many_warps_there_can_be(warps: Any):
    @T.prim_func
    def main(A: T.Tensor((S,), "float32")):
        with T.Kernel(1, comm_warps=warps):
            T.fill(A, 0)

    with pytest.raises(TileValueError, match="comm_warps="):
        main.trace()


@pytest.mark.parametrize("depth", [0, 3, 16, True, "2"])
def test_how_deep_they_can_be(depth: Any):
    @T.prim_func
    def main(A: T.Tensor((S,), "float32")):
        with T.Kernel(1, comm_depth=depth):
            T.fill(A, 0)

    with pytest.raises(TileValueError, match="comm_depth="):
        main.trace()
