"""What the static checks prove, what they refute and how they say it, and what they leave open."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

import tilescale.language as T
from tests.kernels import refused, run
from tests.ranks.faulty.kernels import CASES
from tilescale import log
from tilescale.compiler import driver, static
from tilescale.compiler.static import COMPILE_BUDGET, check, require, static_report
from tilescale.compiler.static.judge import Judge
from tilescale.compiler.static.obligations import PROVEN, REFUTED, UNKNOWN
from tilescale.errors import TileValueError

S = 32


def of(kernel: Any, kind: str, **options: Any) -> list[Any]:
    return [o for o in check(kernel, **options) if o.kind == kind]


def the(kernel: Any, kind: str, status: str, **options: Any) -> Any:
    found = [o for o in of(kernel, kind, **options) if o.status == status]
    assert found, [str(o) for o in of(kernel, kind, **options)]
    return found[0]


# ---- T.Parallel


def nest(index: Any, lanes: int = 64, extent: int = 64) -> Any:
    @T.prim_func
    def main(A: T.Tensor((128,), "float32"), k: T.int32):
        with T.Kernel(2) as b:
            tile = T.alloc_shared((extent,), "float32")
            T.clear(tile)
            for i in T.Parallel(lanes):
                tile[index(i, b, k)] = A[i]
            T.copy(tile, A[0:extent])

    return main


@pytest.mark.parametrize(
    "index",
    [
        lambda i, b, k: i,
        lambda i, b, k: 63 - i,
        lambda i, b, k: i // 8 * 8 + (7 - i % 8),
        lambda i, b, k: i % 8 * 8 + i // 8,
        lambda i, b, k: (i + b * 5) % 64,
        lambda i, b, k: (i + k) % 64,
    ],
)
def test_iterations_with_elements_of_their_own(index: Any):
    assert {o.status for o in check(nest(index))} == {PROVEN}


@pytest.mark.parametrize(
    ("index", "shown"),
    [
        (lambda i, b, k: i // 2, "tile[0] with b = 0, i = 0, i' = 1"),
        (lambda i, b, k: i % 32, "i' = "),
        (lambda i, b, k: T.max(i, 5), "tile[5]"),
        (lambda i, b, k: 0, "tile[0]"),
    ],
)
def test_iterations_that_collide(index: Any, shown: str):
    found = the(nest(index), "collision", REFUTED)
    assert shown in str(found.counterexample)
    assert found.finding().kind == "collision" and "T.serial" in str(found.finding())


def test_one_iteration_alone_may_write_an_element():
    @T.prim_func
    def main(A: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            tile = T.alloc_shared((S,), "float32")
            for i in T.Parallel(S):
                tile[i] = A[i]
                if i == 3:
                    A[0] = A[i]

    assert {o.status for o in check(main) if o.kind != "collision"} == {PROVEN}
    assert the(main, "collision", PROVEN)


def test_a_neighbour_that_another_iteration_writes():
    @T.prim_func
    def main(A: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            tile = T.alloc_shared((S + 1,), "float32")
            T.clear(tile)
            for i in T.Parallel(S):
                tile[i] = tile[i + 1] * 2
            T.copy(tile[0:S], A)

    found = the(main, "collision", REFUTED)
    assert "another reads it" in found.text and found.other is not None


def test_what_memory_says_is_left_open():
    @T.prim_func
    def main(A: T.Tensor((S,), "int32"), B: T.Tensor((S,), "int32")):
        with T.Kernel(1):
            for i in T.Parallel(S):
                B[A[i]] = i

    assert "memory" in the(main, "collision", UNKNOWN).reason


# ---- tiles


def test_an_index_outside_a_tile_is_refused_with_its_counterexample():
    @T.prim_func
    def main(A: T.Tensor((S,), "float32")):
        with T.Kernel(4) as b:
            tile = T.alloc_shared((S,), "float32")
            T.clear(tile)
            for i in T.Parallel(S):
                tile[i + b] = A[i]
            T.copy(tile, A)

    with refused(
        TileValueError,
        "tile[34] with b = 3, i = 31",
        at="tile[i + b] = A[i]",
        expected="an access lies inside its tile",
    ):
        run(main)


def test_a_number_of_the_callers_refutes_nothing_until_it_is_known():
    kernel = nest(lambda i, b, k: i + k, lanes=32, extent=32)
    open_ = the(kernel, "bounds", UNKNOWN)
    assert open_.reason == "fails for k = 1, and not for all arguments" and "tile[32]" in str(
        open_.counterexample
    )
    run(kernel)  # compiles
    assert "tile[34]" in str(the(kernel, "bounds", REFUTED, values={"k": 3}).counterexample)
    assert all(o.status == PROVEN for o in of(kernel, "bounds", values={"k": 0}))


def test_an_assertion_is_believed():
    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), k: T.int32):
        with T.Kernel(1):
            tile = T.alloc_shared((S,), "float32")
            T.device_assert(k >= 0)
            T.device_assert(k < 8)
            for i in T.Parallel(S):
                if i >= 8:
                    tile[i - k] = A[i]

    assert {o.status for o in of(main, "bounds")} == {PROVEN}


def test_accesses_of_tensors_are_classified():
    m = T.dynamic("m")

    @T.prim_func
    def main(A: T.Tensor((m, 64), "float32"), B: T.Tensor((128, 64), "float32")):
        with T.Kernel(T.ceildiv(m, 32), 2) as (x, y):
            tile = T.alloc_shared((32, 32), "float32")
            T.copy(A[x * 32, y * 32], tile)  # the last rows may lie outside
            T.copy(B[y * 32, y * 32], tile)

    said = check(main)
    assert (said.inside, said.guarded) == (1, 1)
    assert {o.status for o in said} == {PROVEN}


# ---- coverage


def test_barriers_begin_by_themselves():
    """At the scale of the block, too: nobody writes them, and TMA's copies name them."""

    @T.prim_func
    def main(A: T.Tensor((256, 64), "float16"), B: T.Tensor((256, 64), "float16")):
        with T.Kernel(1, threads=128):
            a, m = T.alloc_shared((64, 64), "float16"), T.alloc_barrier(128)
            for k in T.serial(4):
                T.tma_copy(A[k * 64, 0], a, barrier=m)
                T.barrier_arrive(m)
                T.barrier_wait(m, k % 2)
                T.copy(a, B[k * 64, 0])

    found = of(main, "coverage")
    assert found and REFUTED not in {o.status for o in found}


def test_a_nest_that_leaves_out_what_is_read():
    @T.prim_func
    def main(A: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            tile = T.alloc_shared((S,), "float32")
            for i in T.Parallel(S - 1):
                tile[i] = A[i]
            T.copy(tile, A)

    found = the(main, "coverage", REFUTED)
    assert "tile[31]" in str(found.counterexample) and found.other is not None
    with refused(TileValueError, "tile is read where nothing has written it: tile[31]", at="T.copy(tile, A)"):
        run(main)


def test_rounds_and_parts_that_cover_together():
    @T.prim_func
    def main(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1):
            tile, other = T.alloc_shared((64,), "float32"), T.alloc_shared((64,), "float32")
            for k in T.serial(4):
                T.copy(A[k * 16 : k * 16 + 16], tile[k * 16 : k * 16 + 16])
            T.copy(A[0:32], other[0:32])
            T.copy(A[32:64], other[32:64])
            T.copy(tile, B)
            T.copy(other, B)

    assert {o.status for o in of(main, "coverage")} == {PROVEN}


def test_a_first_round_that_reads_what_a_later_one_writes():
    @T.prim_func
    def main(A: T.Tensor((4, S), "float32"), B: T.Tensor((4, S), "float32")):
        with T.Kernel(1):
            tile = T.alloc_shared((S,), "float32")
            for k in T.serial(4):
                T.copy(tile, B[k, 0:S])
                T.copy(A[k, 0:S], tile)

    assert "k = 0" in str(the(main, "coverage", REFUTED).counterexample)


def test_a_product_that_clears_in_its_first_round_reads_nothing():
    @T.prim_func
    def main(A: T.Tensor((S, S), "float32"), B: T.Tensor((S, S), "float32")):
        with T.Kernel(1):
            a, acc = T.alloc_shared((S, S), "float32"), T.alloc_fragment((S, S), "float32")
            for k in T.serial(4):
                T.copy(A, a)
                T.gemm(a, a, acc, clear_accum=k == 0)
            T.copy(acc, B)

    assert not check(main).of(REFUTED)


# ---- ranks


def ring(step: Any, needed: Any = lambda n: 1) -> Any:
    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        inbox: T.SymmTensor((S,), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((S,), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, n:
                T.copy(A, inbox, dst=step(rank, n), signal=got[0])
                T.wait(got[0], needed(n))
                T.copy(inbox, B)

    return main


@pytest.mark.parametrize(
    "step", [lambda r, n: (r + 1) % n, lambda r, n: (r + n - 1) % n, lambda r, n: n - 1 - r]
)
def test_rings_are_proven_for_every_number_of_ranks(step: Any):
    assert {o.status for o in check(ring(step))} == {PROVEN}


def test_a_rank_that_is_not_there():
    kernel = ring(lambda r, n: r + 1)
    found = the(kernel, "peer", REFUTED)
    assert str(found.counterexample) == "dst=2 of 2 with n = 2, rank = 1"
    assert "dst=5 of 5" in str(the(kernel, "peer", REFUTED, ranks=5).counterexample)
    with refused(
        TileValueError,
        "names a rank that is not there",
        at="T.copy(A, inbox, dst=step(rank, n), signal=got[0])",
    ):
        require(kernel)


def test_a_kernel_for_two_ranks_is_no_fault_of_three():
    kernel = ring(lambda r, n: 1 - r)
    assert the(kernel, "peer", UNKNOWN).counterexample is not None
    assert {o.status for o in check(kernel, ranks=2)} == {PROVEN}
    assert the(kernel, "peer", REFUTED, ranks=3)
    assert not check(kernel, world=4).of(REFUTED)  # a team may have two


@pytest.mark.parametrize("write", [True, False])
def test_a_ranks_part_that_is_not_there_is_told_and_stops_nothing(write: bool):
    @T.prim_func
    def main(A: T.Tensor((4,), "float32"), B: T.SymmTensor((2, 4), "float32")):
        with T.Kernel(1), T.Scale("device") as (rank, n):
            if write:
                T.copy(A, B[rank, 0:4], dst=(rank + 1) % n)
            else:
                T.copy(B[rank, 0:4], A, src=(rank + 1) % n)

    made = the(main, "part", REFUTED, ranks=3)
    assert (
        str(made.counterexample).startswith("B[2, 0:4]")
        and ("is dropped" if write else "gives zeros") in made.text
    )
    assert the(main, "part", PROVEN, ranks=2)
    assert driver.on_ranks(main.trace(), 3) == {"3": None}
    assert [f.kind for f in main.check(ranks=3, args={}, seeds=1).findings if f.kind == "out-of-bounds"] == [
        "out-of-bounds"
    ]


def test_waits_are_counted():
    short = the(ring(lambda r, n: (r + 1) % n, lambda n: n + 1), "wait", REFUTED)
    assert "got[0] ≥ " in str(short.counterexample)
    nobody = the(ring(lambda r, n: n - 1), "wait", REFUTED, ranks=4)
    assert nobody.counterexample.values["rank"] == 0
    assert the(ring(lambda r, n: (r + 1) % n, lambda n: n), "wait", REFUTED, ranks=2)
    # One rank alone gets what it sends.
    assert not check(ring(lambda r, n: (r + 1) % n, lambda n: n)).of(REFUTED)


def test_two_writers_of_one_region():
    kernel = ring(lambda r, n: 0)
    assert "rank' = " in str(the(kernel, "overlap", REFUTED, ranks=3).counterexample)
    assert {o.status for o in of(kernel, "overlap", ranks=1)} == {PROVEN}


def test_callers_of_two_ranks_may_pass_two_numbers():
    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), inbox: T.SymmTensor((S,), "float32"), peer: T.int32):
        with T.Kernel(1):
            with T.Scale("device"):
                T.copy(A, inbox, dst=peer)

    assert not check(main).of(REFUTED) and not check(main, ranks=3).of(REFUTED)


def test_writes_between_which_a_meeting_stands():
    def make(meet: bool) -> Any:
        @T.prim_func
        def main(A: T.Tensor((S,), "float32"), inbox: T.SymmTensor((S,), "float32")):
            with T.Kernel(2) as b:
                with T.Scale("device") as rank, n:
                    if b == 0:
                        T.copy(A, inbox, dst=rank)
                    if meet:
                        T.barrier()
                    if b == 1:
                        T.copy(A, inbox, dst=rank)

        return main

    assert the(make(False), "overlap", REFUTED)
    assert not check(make(True)).of(REFUTED)


# ---- the corpus, the report, the budget

SEEN = {
    "a_counter_that_is_not_there",
    "a_producer_whose_empty_signal_is_missing",
    "a_stencil_in_place",
    "a_transpose_in_place",
    "accumulator_not_cleared",
    "everyone_is_the_root",
    "iterations_share_an_element",
    "off_by_one_peer",
    "one_stage_too_few",
    "running_maximum_not_initialised",
    "tiles_wider_than_their_distance",
    "two_ranks_own_the_border",
    "two_writers",
    "waits_for_too_many",
}
#: where the text shows what follows from the fault, and a run the fault itself
OTHERWISE = {"everyone_is_the_root": "race"}


def programs(built: Any) -> list[Any]:
    return built if isinstance(built, list) else [built]  # one a rank, or one for all


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_corpus(case: Any):
    """No repaired twin is refuted, and the faults that show in the text are, by the simulator's name."""
    for ranks in (None, case.ranks):
        for kernel in programs(case.build(case.ranks, False)):
            assert not check(kernel, COMPILE_BUDGET, ranks=ranks).of(REFUTED)
    if case.name in SEEN:
        found = static_report(case.build(case.ranks, True), ranks=case.ranks)
        assert OTHERWISE.get(case.name, case.kind) in {f.kind for f in found}
        assert all(f.loc is not None and "faulty" in f.loc.file for f in found)
        assert "at compile time" in str(found[0])


def test_known_arguments_of_the_corpus():
    case = next(c for c in CASES if c.name == "index_outside_a_tile")
    assert [f.kind for f in static_report(case.build(1, True), 1, case.args(1))] == ["out-of-bounds"]


def test_a_spent_budget_refutes_nothing():
    said = check(ring(lambda r, n: r + 1), steps=0)
    assert said.cut_short and not said.of(REFUTED) and not said.of(PROVEN)


def test_a_pause_of_the_process_changes_nothing_that_is_found(monkeypatch: pytest.MonkeyPatch):
    """A collection of garbage, say: a budget of time would end by it."""
    kernel = ring(lambda r, n: r + 1)
    steps = check(kernel, COMPILE_BUDGET).steps
    asked, paused = Judge.prover, list[float]()

    def pauses(self: Judge, conds: Any) -> Any:
        if not paused:
            paused.append(time.thread_time() + 0.15)
            while time.thread_time() < paused[0]:
                pass
        return asked(self, conds)

    monkeypatch.setattr(Judge, "prover", pauses)
    said = check(kernel, COMPILE_BUDGET)
    assert paused and said.of(REFUTED) and not said.cut_short and said.steps == steps


def test_a_budget_that_ends_too_early_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    kernel = ring(lambda r, n: (r + 1) % n)
    told = "main: the static checks spent their 20 steps and left the rest open"
    require(kernel, steps=20)
    assert f"warning: {told}; `tilescale check` has 100 times as many" in capfd.readouterr().err
    monkeypatch.setattr(log, "_said", set())
    with log.own_kernel():  # as the library's own operations are compiled
        require(kernel, steps=20)
    assert not capfd.readouterr().err
    monkeypatch.setattr(static.check, "__defaults__", (20,))
    assert told in kernel.check(ranks=2, args={}, seeds=1).unchecked
    monkeypatch.setattr(static.require, "__defaults__", (None, None, 20))
    assert told in run(nest(lambda i, b, k: i)).report().notes


def test_a_long_program_keeps_to_the_budget():
    @T.prim_func
    def main(A: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            tile = T.alloc_shared((S,), "float32")
            for i in list(range(3000)):  # so many statements, no loop
                tile[i % S] = A[(i * 7) % S]

    said = check(main.trace(), 6_000)
    assert said.cut_short and not said.of(REFUTED)


def test_counters_that_are_raised_too():
    @T.prim_func
    def main(s: T.Signal((1,))):
        with T.Kernel(1):
            with T.Scale("device"):
                T.signal(s[0], 5, op="max")
                T.wait(s[0], 5)

    assert not check(main).of(REFUTED)


def test_the_solver_stays_away_from_compilations():
    code = (
        "import sys\nfrom tests.ranks.faulty.kernels import CASES\nfrom tilescale.compiler.static import require\n"
        "for c in CASES[:12]:\n    require(c.build(c.ranks, False))\nassert 'z3' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_table():
    text = check(ring(lambda r, n: (r + 1) % n)).table()
    assert "proven" in text and "peer" in text and "wait" in text


def test_printed_it_is_the_table_and_what_is_wrong():
    found = check(ring(lambda r, n: r + 1), ranks=4)
    assert str(found).startswith(found.table()) and "Obligation(" not in str(found)
    assert ": peer: " in str(found) and len(found.of("refuted")) > 0
