"""Exhaustive exploration: the same outcomes as enumeration, known numbers of classes, faults that one
interleaving shows, replay."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.sim.interleavings import (
    blocks_of,
    drawn,
    drawn_for_ranks,
    enumerated,
    made,
    ranks_of,
    reduced,
)
from tilescale.compiler.checks.run import check, launch
from tilescale.errors import TileValueError

S = 4


def shared(count: int) -> dict:
    return {"x": np.zeros(2, np.int32), "y": np.zeros(2, np.int32), "kept": np.zeros((count, 8), np.int32)}


def symmetric(count: int) -> dict:
    kept, x = np.zeros((8, 2), np.int32), np.zeros((2, 2), np.int32)
    return {"A": [np.full(2, 1 + r, np.int32) for r in range(count)], "x": x, "kept": kept}


def explored(programs: list) -> tuple[int, bool]:
    report = check(blocks_of(programs), 1, shared(len(programs)), schedule="exhaustive")
    return report.traces, report.complete


# ---- with and without reduction


@pytest.mark.parametrize("seed", [1, 3, 6, 13, 14, 17, 22, 25, 28, 41, 53, 54])
def test_reduction_loses_no_outcome_among_blocks(seed: int):
    """Seeds whose programs have more than one outcome, and few enough interleavings."""
    count, length = (3, 2) if seed % 4 == 0 else (2, 3)
    launched = made(blocks_of(drawn(seed, count, length)), 1, shared(count))
    everything, runs = enumerated(launched)
    found, report = reduced(launched)
    assert found == everything and len(found) > 1
    assert report.complete and report.traces <= runs


@pytest.mark.parametrize("seed", [2, 13, 17, 24, 26, 30, 46, 49, 53, 55])
def test_reduction_loses_no_outcome_among_ranks(seed: int):
    """Remote writes land early and late, at each peer by itself."""
    launched = made(ranks_of(drawn_for_ranks(seed, 2, 2)), 2, symmetric(2))
    everything, runs = enumerated(launched)
    found, report = reduced(launched)
    assert found == everything and len(found) > 1
    assert report.complete and report.traces <= runs


# ---- how many classes there are


def test_writers_of_different_elements_are_one_class():
    assert explored([[("set", 0, 1)], [("set", 1, 1)]]) == (1, True)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_updates_of_one_element_come_in_every_order(n: int):
    assert explored([[("add", 0, 1)]] * n) == (math.factorial(n), True)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_readers_of_one_element_see_its_writer_or_not(n: int):
    """`readers(n)` of Abdulla et al., POPL 2014: 2ⁿ."""
    assert explored([[("set", 0, 1)], *[[("get", 0)]] * n]) == (2**n, True)


@pytest.mark.parametrize("n,enough", [(2, 1), (2, 2), (3, 1), (3, 2), (3, 3), (4, 4)])
def test_additions_commute_and_a_wait_sees_any_that_are_enough(n: int, enough: int):
    waiter = [("wait", 0, enough, "ge")]
    assert explored([[("signal", 0, 1, "add")]] * n + [waiter]) == (
        sum(math.comb(n, k) for k in range(enough, n + 1)),
        True,
    )


def test_stored_signals_come_in_every_order():
    """Three stores of one counter, and a wait for the value of one: the wait stands behind that store and
    before the next."""
    stores = [[("signal", 0, value, "set")] for value in (1, 2, 3)]
    assert explored(stores) == (6, True)
    # with the wait: in each of the six orders it comes behind store 1 and before the next, or never
    assert explored([*stores, [("wait", 0, 1, "eq")]]) == (6 + 4, True)


@pytest.mark.parametrize("n,classes", [(2, 5), (3, 12), (4, 28), (5, 64)])
def test_the_last_zero(n: int, classes: int):
    """`lastzero(n)` of Abdulla et al., POPL 2014: (n + 3) · 2ⁿ⁻² classes, 64 for five writers."""

    @T.prim_func
    def main(a: T.Tensor((n + 1,), "int32"), out: T.Tensor((1,), "int32")):
        with T.Kernel(n + 1) as b:
            i = T.alloc_var("int32")
            if b == 0:
                i = n
                while a[i] != 0:
                    i -= 1
                out[0] = i
            else:
                a[b] = a[b - 1] + 1

    report = check(main, 1, {"a": np.zeros(n + 1, np.int32)}, schedule="exhaustive")
    assert (report.traces, report.complete) == (classes, True)


def test_what_is_ordered_is_one_class():
    """Puts, signals and waits of a ring of three ranks, barriers, and remote writes that must have landed by
    then."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "int32"),
        box: T.SymmTensor((2, S), "int32"),
        got: T.Signal((2,)),
        B: T.Tensor((2, S), "int32"),
    ):
        with T.Kernel(1), T.Scale("device") as rank, world:
            T.copy(A, box[0, 0:S], dst=(rank + 1) % world)
            T.copy(A, box[1, 0:S], dst=(rank + 2) % world, signal=got[1])
            T.signal(got[0], dst=(rank + 1) % world)
            T.wait(got[0])
            T.wait(got[1])
            T.copy(box, B)
            T.barrier()
            T.copy(A, box[0, 0:S], dst=(rank + 1) % world)

    args = {"A": [np.full(S, r, np.int32) for r in range(3)]}
    report = check(main, 3, args, schedule="exhaustive")
    assert report and report.complete and report.traces == 1, report


# ---- what it finds


def needle(n: int):
    """Only if the blocks run one after another, the last one first, does block 0 reach its assertion."""

    @T.prim_func
    def main(x: T.Tensor((1,), "int32")):
        with T.Kernel(n) as b:
            if T.atomic_load(x[0]) == n - 1 - b:
                T.atomic_store(x[0], n - b)
                T.device_assert(b != 0, "all of them, backwards")

    return main


def test_a_fault_of_one_interleaving_is_found():
    args = {"x": np.zeros(1, np.int32)}
    for order in ("random", "adversary"):
        assert check(needle(5), 1, args, schedule=order, seeds=40)
    report = check(needle(5), 1, args, schedule="exhaustive")
    assert report.kinds == {"assertion"} and report.complete


def test_a_finding_names_its_interleaving():
    args = {"x": np.zeros(1, np.int32)}
    (finding,) = check(needle(4), 1, args, schedule="exhaustive").findings
    choices = finding.schedule.split(", ")[0]
    assert choices.startswith("exhaustive:")
    again = launch(needle(4), 1, args, order=choices)
    assert [str(f) for f in again.report.findings] == [str(finding)]
    assert check(needle(4), 1, args, schedule=choices).kinds == {"assertion"}
    with pytest.raises(TileValueError, match="step 2 of this schedule is taken by 77"):
        launch(needle(4), 1, args, order="exhaustive:2.77")
    with pytest.raises(TileValueError, match="no choices of a schedule: '2;77'"):
        launch(needle(4), 1, args, order="exhaustive:2;77")


def test_other_processes_explore_alike():
    """Nothing depends on addresses or on the order of hashes."""
    code = (
        "import numpy as np\n"
        "from tests.unit.sim.interleavings import drawn_for_ranks, ranks_of\n"
        "from tests.unit.sim.test_explore import symmetric\n"
        "from tilescale.compiler.checks.run import check\n"
        "for order in ('exhaustive', 'adversary', 'random'):\n"
        "    report = check(ranks_of(drawn_for_ranks(5, 2, 3)), 2, symmetric(2), schedule=order)\n"
        "    print(report.runs, report.traces, *report.findings)\n"
    )
    texts = set()
    for seed in ("1", "2"):
        environ = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        made = subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
        )
        texts.add(made.stdout)
    assert len(texts) == 1 and "exhaustive:" in texts.pop()


def test_the_bound_is_said():
    report = check(needle(5), 1, {"x": np.zeros(1, np.int32)}, schedule="exhaustive", bound=7)
    assert report.complete is False and report.runs == 8  # one in turn
    assert str(report) == "no finding in 8 runs: 7 classes of interleavings, and others were not run"
    assert check(needle(5), 1, {"x": np.zeros(1, np.int32)}).complete is None
    whole = check(needle(3), 1, {"x": np.full(1, 9, np.int32)}, schedule="exhaustive")
    assert str(whole) == "no finding in 2 runs: 1 class of interleavings, which are all"


def test_runs_that_are_too_long_are_not_called_complete(monkeypatch: pytest.MonkeyPatch):
    from tilescale.compiler.checks import explore

    monkeypatch.setattr(explore, "DEPTH", 6)
    report = check(needle(5), 1, {"x": np.zeros(1, np.int32)}, schedule="exhaustive")
    assert report.complete is False and report.traces == 0


# ---- loops that poll


def polling(stores: bool):
    @T.prim_func
    def main(X: T.Tensor((S,), "int32"), flag: T.Tensor((1,), "int32"), B: T.Tensor((S,), "int32")):
        with T.Kernel(2) as b:
            if b == 0:
                T.fill(X, 7)
                if stores:
                    T.atomic_store(flag[0], 1)
            else:
                seen = T.alloc_var("int32")
                while seen == 0:
                    seen = T.atomic_load(flag[0])
                T.copy(X, B)

    return main


def test_a_loop_that_polls_is_run_until_nothing_new_can_come_of_it():
    report = check(polling(True), 1, {"flag": np.zeros(1, np.int32)}, schedule="exhaustive")
    assert report and report.complete and report.traces <= 4, report


def test_a_loop_that_polls_for_ever():
    report = check(polling(False), 1, {"flag": np.zeros(1, np.int32)}, schedule="exhaustive", limit=2000)
    assert report.kinds == {"endless"} and report.complete
    assert (
        any("nobody is left who could change what it reads" in f.message for f in report.findings)
        or len(report.findings) == 1
    )


# ---- remote writes on their way


def seen_by_two():
    """Rank 0 puts to both others and then signals itself; they look without waiting."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "int32"),
        box: T.SymmTensor((S,), "int32"),
        got: T.Signal((1,)),
        B: T.Tensor((S,), "int32"),
    ):
        with T.Kernel(1), T.Scale("device") as rank, world:
            if rank == 0:
                T.copy(A, box, dst=1)
                T.copy(A, box, dst=2)
                T.signal(got[0])
                T.wait(got[0])
            else:
                T.signal(got[0])
                T.wait(got[0])
                T.copy(box, B)

    args = {"A": np.full(S, 5, np.int32), "box": np.zeros(S, np.int32)}
    return main, args


def test_writes_land_early_and_late_at_each_peer():
    kernel, args = seen_by_two()
    outcomes, report = reduced(made(kernel, 3, args))
    values = {
        n: np.frombuffer(data, np.int32)[0]
        for arrays, _ in outcomes
        for n, data in [((r, k), d) for r, k, d in arrays if k == "B"]
    }
    assert set(values) == {(0, "B"), (1, "B"), (2, "B")}
    pairs = set()
    for arrays, _ in outcomes:
        left = {(r, k): np.frombuffer(d, np.int32) for r, k, d in arrays if k == "B"}
        pairs.add((int(left[1, "B"][0]), int(left[2, "B"][0])))
    assert pairs == {(0, 0), (0, 5), (5, 0), (5, 5)}
    assert report.complete and report.kinds == {"race"}


def test_the_adversary_lands_writes_peer_by_peer():
    """Among its runs are those in which one peer sees the write and the other does not yet."""
    kernel, args = seen_by_two()
    pairs = set()
    for seed in range(60):
        done = launch(kernel, 3, args, order="adversary", seed=seed)
        pairs.add((int(done.arrays[1]["B"][0]), int(done.arrays[2]["B"][0])))
    assert {(0, 0), (0, 5), (5, 0)} <= pairs


def test_a_pull_sees_what_its_executor_put_there():
    @T.prim_func
    def main(A: T.Tensor((S,), "int32"), box: T.SymmTensor((S,), "int32"), B: T.Tensor((S,), "int32")):
        with T.Kernel(1), T.Scale("device") as rank, world:
            T.copy(A, box, dst=(rank + 1) % world)
            T.copy(box, B, src=(rank + 1) % world)

    args = {"A": [np.full(S, 1 + r, np.int32) for r in range(2)]}
    report = check(main, 2, args, schedule="exhaustive")
    assert report and report.complete and report.traces == 1
    for order in ("round_robin", "adversary"):
        done = launch(main, 2, args, order=order)
        assert [int(out["B"][0]) for out in done.arrays] == [1, 2]


def test_news_passed_on_brings_the_writes_along():
    """Rank 0 puts to rank 2 and signals rank 1, which signals rank 2: a release orders the writes to all
    peers."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "int32"),
        box: T.SymmTensor((S,), "int32"),
        got: T.Signal((1,)),
        B: T.Tensor((S,), "int32"),
    ):
        with T.Kernel(1), T.Scale("device") as rank, world:
            if rank == 0:
                T.copy(A, box, dst=2)
                T.signal(got[0], dst=1)
            if rank == 1:
                T.wait(got[0])
                T.signal(got[0], dst=2)
            if rank == 2:
                T.wait(got[0])
                T.copy(box, B)

    args = {"A": np.full(S, 3, np.int32)}
    report = check(main, 3, args, schedule="exhaustive")
    assert report and report.complete and report.traces == 1, report
    assert check(main, 3, args, schedule="adversary", seeds=20)


def test_warps_update_a_shared_tile_in_every_order():
    """Two updates by each of two warps: six orders, and each update is a step of its own."""

    @T.prim_func
    def main(out: T.Tensor((2, 2), "int32")):
        with T.Kernel(1, threads=64):
            x = T.alloc_shared((1,), "int32")
            T.fill(x, 0)
            with T.Scale("warp") as w, warps:
                out[w, 0] = T.atomic_add(x[0], 1, return_prev=True)
                out[w, 1] = T.atomic_add(x[0], 1, return_prev=True)

    outcomes, report = reduced(made(main))
    assert len(outcomes) == report.traces == 6 and report.complete and report


def test_a_load_orders_nothing_behind_it():
    """Block 1 stores where block 0 has loaded: that says nothing of what block 0 did before its load."""

    @T.prim_func
    def main(
        flag: T.Tensor((1,), "int32"),
        X: T.Tensor((S,), "int32"),
        Y: T.Tensor((S,), "int32"),
        B: T.Tensor((1,), "int32"),
    ):
        with T.Kernel(2) as b:
            if b == 0:
                T.fill(X, 1)
                B[0] = T.atomic_load(flag[0])
            else:
                T.atomic_store(flag[0], 1)
                T.copy(X, Y)

    given = {"flag": np.zeros(1, np.int32), "X": np.zeros(S, np.int32)}
    for order in ("round_robin", "random"):
        for seed in range(4):
            assert launch(main, 1, given, order=order, seed=seed).report.kinds == {"race"}
