"""Barriers with phases and copies by TMA on the simulator: right programs have no finding, wrong ones have
one."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tilescale.compiler.checks.run import check, launch
from tilescale.compiler.static import REFUTED
from tilescale.compiler.static import check as prove
from tilescale.errors import TileError

ROUNDS, STAGES = 5, 2


def relay(
    full_wait: bool = True,
    empty_wait: bool = True,
    count: int = 32,
    size: int = 256,
    arrive: bool = True,
    early: bool = False,
    fence: str = "in front",
) -> Any:
    """One warp fills stages by TMA, the other doubles them into C."""

    @T.prim_func
    def relay(A: T.Tensor((ROUNDS, 64), "float32"), C: T.Tensor((ROUNDS, 64), "float32")):
        with T.Kernel(1, threads=64):
            stage = T.alloc_shared((STAGES, 1, 64), "float32")
            full, empty = T.alloc_barrier([32] * STAGES), T.alloc_barrier([count] * STAGES)
            with T.Scale("warp") as (w, n):
                if w == 0:
                    for k in T.serial(ROUNDS):
                        if empty_wait:
                            T.mbarrier_wait_parity(empty[k % STAGES], k // STAGES % 2 ^ 1)
                        T.mbarrier_expect_tx(full[k % STAGES], size)
                        T.tma_copy(A[k : k + 1, 0:64], stage[k % STAGES, :, :], barrier=full[k % STAGES])
                        T.mbarrier_arrive(full[k % STAGES])
                else:
                    for k in T.serial(ROUNDS):
                        if full_wait:
                            T.mbarrier_wait_parity(full[k % STAGES], k // STAGES % 2)
                        if early:
                            T.mbarrier_arrive(empty[k % STAGES])
                        for i in T.Parallel(64):
                            C[k, i] = stage[k % STAGES, 0, i] * 2
                        if fence == "in front":
                            T.fence_proxy_async()
                        if arrive and not early:
                            T.mbarrier_arrive(empty[k % STAGES])
                        if fence == "behind":
                            T.fence_proxy_async()

    return relay


def args() -> dict[str, Any]:
    return {
        "A": np.arange(ROUNDS * 64, dtype=np.float32).reshape(ROUNDS, 64),
        "C": np.full((ROUNDS, 64), np.nan, np.float32),
    }


def test_a_relay():
    assert check(relay(), 1, args(), seeds=20).findings == []
    assert (launch(relay(), 1, args()).arrays[0]["C"] == args()["A"] * 2).all()
    assert prove(relay()).of(REFUTED) == []


FAULTS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "the reader does not wait": ({"full_wait": False}, {"race"}),
    "the writer does not wait": ({"empty_wait": False}, {"race"}),
    "a stage is released before it is read": ({"early": True}, {"race"}),
    "nobody releases": ({"arrive": False}, {"deadlock"}),
    "a phase expects more threads": ({"count": 64}, {"deadlock"}),
    "a phase expects fewer threads": ({"count": 16}, {"schedule"}),
    "more bytes are announced than come": ({"size": 512}, {"deadlock"}),
    "fewer bytes are announced than come": ({"size": 128}, {"schedule"}),
    "a stage is given back without a proxy fence": ({"fence": "none"}, {"schedule"}),
    "the proxy fence comes behind the arrival": ({"fence": "behind"}, {"schedule"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault: str):
    options, kinds = FAULTS[fault]
    found = {f.kind for f in check(relay(**options), 1, args(), seeds=10).findings}
    assert found & kinds, found


def test_what_is_no_barrier_is_refused():
    def refuse(statement: Any, message: str) -> None:
        @T.prim_func
        def kernel(A: T.Tensor((8, 64), "float32")):
            with T.Kernel(1, threads=64):
                tile, half = T.alloc_shared((8, 64), "float32"), T.alloc_shared((8, 64), "float16")
                statement(A, tile, half, T.alloc_barrier(1))

        with pytest.raises(TileError, match=message):
            kernel.trace()

    refuse(
        lambda A, t, h, b: T.mbarrier_arrive(t[0, 0]), "barrier of T.alloc_barrier|T.mbarrier_arrive is given"
    )
    refuse(lambda A, t, h, b: T.alloc_barrier(0), "alloc_barrier")
    refuse(lambda A, t, h, b: T.tma_copy(A, t), "without barrier=")
    refuse(lambda A, t, h, b: T.tma_copy(t, A, barrier=b[0]), "with barrier=")
    refuse(lambda A, t, h, b: T.tma_copy(A, h, barrier=b[0]), "float32 into float16")
    refuse(lambda A, t, h, b: T.tma_copy(t, A, reduce="xor"), "reduce='xor'")
    refuse(lambda A, t, h, b: T.tma_copy(t, A, reduce="max"), "reduce='max' of float32")
    refuse(lambda A, t, h, b: T.inc_max_nreg(100), "100 registers")
    refuse(lambda A, t, h, b: T.inc_max_nreg(104), "between warpgroups")


def test_exploration_does_not_claim_to_have_seen_all():
    assert check(relay(), 1, args(), schedule="exhaustive").complete is False


def stored(wait: str = "in front", group: bool = True, last: bool = True) -> Any:
    """A tile is written and stored by TMA, round after round."""

    @T.prim_func
    def stored(A: T.Tensor((ROUNDS, 64), "float32"), C: T.Tensor((ROUNDS, 64), "float32")):
        with T.Kernel(1, threads=64):
            tile = T.alloc_shared((1, 64), "float32")
            for k in T.serial(ROUNDS):
                if wait == "in front":
                    T.tma_store_wait(0, read=True)
                T.copy(A[k : k + 1, 0:64], tile)
                if wait == "behind the write":
                    T.tma_store_wait(0, read=True)
                T.fence_proxy_async()
                T.sync_threads()
                T.tma_copy(tile, C[k : k + 1, 0:64])
                if group:
                    T.tma_store_arrive()
            if last:
                T.tma_store_wait(0)

    return stored


def test_a_store_is_awaited_before_its_tile_is_written_again():
    assert check(stored(), 1, args()).findings == []
    for faulty in ({"wait": "nowhere"}, {"wait": "behind the write"}, {"group": False}):
        (*found, first) = reversed(check(stored(**faulty), 1, args()).findings)
        assert first.kind == "schedule" and "is written while the store by TMA of line" in str(first), (
            faulty,
            str(first),
        )
        assert "T.tma_store_wait(0, read=True)" in first.hint and {w.what for w in first.others} == {
            "T.tma_copy"
        }
    (found,) = check(stored(last=False), 1, args()).findings
    assert "may still read its tile when the block ends" in str(found)


def test_the_proxy_fence_is_told_where_it_belongs():
    (found,) = check(relay(fence="none"), 1, args()).findings
    assert "with no proxy fence between the two" in str(found)
    assert "T.fence_proxy_async() behind that read, in front of the arrival" in found.hint


@pytest.mark.parametrize(
    "fault, kind, hint",
    [
        (
            "the reader does not wait",
            "race",
            "T.mbarrier_wait_parity(full[0], 0) in front of this, with the parity of the round",
        ),
        (
            "the writer does not wait",
            "race",
            "T.mbarrier_wait_parity(empty[0], 0) in front of this, with the parity of the round",
        ),
        (
            "a stage is released before it is read",
            "race",
            "T.mbarrier_arrive(empty[0]) at line {early} behind that access",
        ),
        ("nobody releases", "deadlock", "T.mbarrier_arrive(empty[0]) by 32 threads more"),
        (
            "a phase expects more threads",
            "deadlock",
            "T.mbarrier_arrive(empty[0]) by 32 threads more, or T.alloc_barrier for as many",
        ),
    ],
)
def test_a_hint_names_the_barrier_and_its_phase(fault: str, kind: str, hint: str):
    lines, first = inspect.getsourcelines(relay)
    early = first + next(k for k, text in enumerate(lines) if "if early:" in text) + 1
    hints = [f.hint for f in check(relay(**FAULTS[fault][0]), 1, args(), seeds=10).findings if f.kind == kind]
    assert any(hint.format(early=early) in h for h in hints), hints


def test_bytes_that_do_not_come_have_a_hint():
    @T.prim_func
    def kernel(A: T.Tensor((1, 64), "float32"), C: T.Tensor((1, 64), "float32")):
        with T.Kernel(1, threads=32):
            tile, full = T.alloc_shared((1, 64), "float32"), T.alloc_barrier(32)
            T.mbarrier_expect_tx(full[0], 512)
            T.tma_copy(A, tile, barrier=full[0])
            T.mbarrier_arrive(full[0])
            T.mbarrier_wait_parity(full[0], 0)
            T.copy(tile, C)

    (found,) = check(kernel, 1, {}).findings
    assert (
        "0 arrivals and 256 bytes are missing" in str(found)
        and "T.mbarrier_expect_tx for as many bytes as come" in found.hint
    )


def test_a_tile_of_tma_that_nobody_awaits_is_not_to_be_cleared():
    found = check(relay(full_wait=False), 1, args(), seeds=10).findings
    (early,) = [f for f in found if f.kind == "uninitialised"]
    assert early.fix is None and "T.mbarrier_wait_parity in front of this" in early.hint
