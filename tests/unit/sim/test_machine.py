"""Schedules, clocks and reports: what the simulator promises beside right results."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

import tilescale
import tilescale.language as T
from tests.kernels import scheduled
from tests.leftovers import nothing_left
from tilescale.compiler.checks.run import check, launch
from tilescale.compiler.sim.counters import Counters
from tilescale.compiler.sim.machine import Block, Executor, Machine
from tilescale.compiler.sim.memory import Storage
from tilescale.compiler.sim.schedule import Adversary
from tilescale.errors import TileTypeError, TileValueError

S = 16


def gossip(n: int, wait_for: int):
    """Everyone puts a part to everyone and counts it; rank 0 goes on behind ``wait_for`` of them."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "int32"),
        parts: T.SymmTensor((n, S), "int32"),
        got: T.Signal((1,)),
        order: T.Tensor((n,), "int32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(A, parts[rank, 0:S], dst=0)
                T.signal(got[0], dst=0)
                if rank == 0:
                    T.wait(got[0], wait_for)
                    for r in T.serial(world):
                        order[r] = parts[r, 0]

    return main


def args(n: int) -> dict:
    return {"A": [np.full(S, 1 + r, np.int32) for r in range(n)]}


@pytest.mark.parametrize("order", ["round_robin", "random", "adversary"])
def test_one_seed_is_one_run(order: str):
    def seen(seed: int) -> str:
        done = launch(gossip(4, 1), 4, args(4), order=order, seed=seed)
        return str(done.arrays[0]["order"]) + str(done.report)

    assert [seen(s) for s in range(6)] == [seen(s) for s in range(6)]


def test_seeds_are_different_runs():
    runs = {
        str(launch(gossip(4, 1), 4, args(4), order="random", seed=s).arrays[0]["order"]) for s in range(20)
    }
    assert len(runs) > 1


def test_a_wait_acquires_no_more_than_it_waits_for():
    """Whatever the order: behind one of three signals two parts are unordered, though they may be there by
    luck."""
    for seed in range(10):
        report = launch(gossip(3, 1), 3, args(3), order="random", seed=seed).report
        assert "race" in report.kinds, report
    assert check(gossip(3, 3), 3, args(3), seeds=20)


def test_the_adversary_delivers_late():
    """In turn the copy is there when it is read too early; against the adversary it is not."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "int32"),
        inbox: T.SymmTensor((S,), "int32"),
        got: T.Signal((1,)),
        B: T.Tensor((S,), "int32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(A, inbox, dst=(rank + 1) % world)
                T.copy(inbox, B)
                T.signal(got[0], dst=(rank + 1) % world)
                T.wait(got[0])

    late = [launch(main, 2, args(2), order="adversary", seed=s) for s in range(5)]
    assert all((out["B"] == 0).all() for done in late for out in done.arrays)
    assert all("race" in done.report.kinds for done in late)


def test_atomics_publish():
    """A flag that is stored and loaded atomically orders what stands around it; a plain one does not."""

    def flagged(atomic: bool):
        @T.prim_func
        def main(X: T.Tensor((S,), "int32"), flag: T.Tensor((1,), "int32"), B: T.Tensor((S,), "int32")):
            with T.Kernel(2) as b:
                if b == 0:
                    for i in T.Parallel(S):
                        X[i] = i
                    if atomic:
                        T.atomic_store(flag[0], 1)
                    else:
                        flag[0] = 1
                else:
                    seen = T.alloc_var("int32")
                    while seen == 0:
                        if atomic:
                            seen = T.atomic_load(flag[0])
                        else:
                            seen = flag[0]
                    T.copy(X, B)

        return main

    given = {"flag": np.zeros(1, np.int32)}
    assert check(flagged(True), 1, given, seeds=10)
    assert "race" in check(flagged(False), 1, given, seeds=2).kinds


def test_a_loop_that_polls_forever_is_endless():
    @T.prim_func
    def main(flag: T.Tensor((1,), "int32"), B: T.Tensor((1,), "int32")):
        with T.Kernel(1):
            x = T.alloc_var("int32")
            while x == 0:
                x = T.atomic_load(flag[0])
            B[0] = x

    (found,) = launch(
        main, 1, {"flag": np.zeros(1, np.int32)}
    ).report.findings  # far below the limit of steps
    assert (
        found.kind == "endless" and "polls for ever flag[0] (memory of rank 0), which is 0" in found.message
    )
    assert "T.wait" in found.hint and found.loc.line == main.func.__code__.co_firstlineno + 4


@pytest.mark.parametrize("schedule", ["round_robin", "random", "adversary", "exhaustive"])
def test_polls_that_nobody_ends_are_endless_at_once(schedule: str):
    """Whoever still waits is named too; a round that takes a lock in vain changes nothing either."""

    @T.prim_func
    def main(lock: T.Tensor((1,), "int32"), B: T.SymmTensor((1,), "int32"), got: T.Signal((1,))):
        with T.Kernel(1), T.Scale("device") as rank, world:
            if rank == 0:
                T.wait(got[0])
            else:
                held = T.alloc_var("int32", 1)
                while held == 1:
                    held = T.atomic_max(lock[0], 1, return_prev=True)
                T.signal(got[0], dst=0)

    report = check(main, 2, {"lock": np.ones(1, np.int32)}, schedule=schedule, seeds=3)
    found = next(f for f in report.findings if f.kind == "endless")
    assert "polls for ever lock[0] (memory of rank 1), which is 1" in found.message
    assert [w.what for w in found.others] == ["T.wait, which waits"], report
    assert check(main, 2, {"lock": np.zeros(1, np.int32)}, schedule=schedule, seeds=3)


@pytest.mark.parametrize("schedule", ["round_robin", "random", "adversary", "exhaustive"])
def test_polls_for_what_is_on_its_way_end(schedule: str):
    """Everybody polls, and what they poll for comes, late: there and back."""

    @T.prim_func
    def main(flag: T.SymmTensor((2,), "int32"), B: T.Tensor((1,), "int32")):
        with T.Kernel(1), T.Scale("device") as rank, world:
            one = T.alloc_shared((1,), "int32")
            one[0] = 1
            if rank == 0:
                T.copy(one, flag[0:1], dst=1)
                while flag[1] == 0:
                    pass
            else:
                while flag[0] == 0:
                    pass
                T.copy(one, flag[1:2], dst=0)
            B[0] = 1

    report = check(main, 2, {"flag": np.zeros(2, np.int32)}, schedule=schedule, seeds=5)
    assert "endless" not in report.kinds, report


def test_a_limit_of_steps_ends_what_changes_for_ever():
    @T.prim_func
    def main(B: T.Tensor((1,), "int32")):
        with T.Kernel(1):
            x = T.alloc_var("int32", 1)
            while x > 0:
                x = x % 7 + 1
            B[0] = x

    for report in (main.check(limit=100), tilescale.compile(main, target="sim").check(limit=100)):
        (found,) = report.findings
        assert found.kind == "endless" and "100 steps" in found.message


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_schedule_says_what_the_program_says(depth: int):
    @T.prim_func
    def main(
        A: T.Tensor((40, 100), "float16"), B: T.Tensor((100, 48), "float16"), C: T.Tensor((40, 48), "float32")
    ):
        with T.Kernel(T.ceildiv(48, 32), T.ceildiv(40, 32), threads=128) as (bx, by):
            a, b = T.alloc_shared((32, 32), "float16"), T.alloc_shared((32, 32), "float16")
            acc = T.alloc_fragment((32, 32), "float32")
            T.clear(acc)
            for k in T.Pipelined(T.ceildiv(100, 32), num_stages=3):
                T.copy(A[by * 32, k * 32], a)
                T.copy(B[k * 32, bx * 32], b)
                T.gemm(a, b, acc)
            T.copy(acc, C[by * 32, bx * 32])

    plain, staged = launch(main), launch(scheduled(main, depth))
    assert plain.report and staged.report
    assert (plain.arrays[0]["C"] == staged.arrays[0]["C"]).all()
    a, b = (plain.arrays[0][name].astype(np.float64) for name in "AB")
    np.testing.assert_allclose(plain.arrays[0]["C"], a @ b, rtol=1e-6, atol=1e-6)


def test_ranks_that_launch_different_things():
    report = check([gossip(2, 1), gossip(2, 2)], 2, args(2))
    assert report.kinds == {"different-programs"}
    assert "rank 1 launches main" in str(report)


def test_warps_that_share_a_tile_race_where_nothing_orders_them():
    def kernel(shared: bool):
        @T.prim_func
        def main(B: T.Tensor((2, S), "int32")):
            with T.Kernel(1, threads=64):
                tile = T.alloc_shared((2, S), "int32")
                with T.Scale("warp") as w, warps:
                    T.fill(tile[0 if shared else w, 0:S], w)
                T.copy(tile if not shared else tile[0:1, 0:S], B if not shared else B[0:1, 0:S])

        return main

    assert check(kernel(False))
    assert check(kernel(True)).kinds == {"race"}


def test_prints_say_who():
    @T.prim_func
    def main(A: T.Tensor((4,), "float32")):
        with T.Kernel(2) as b:
            if b == 1:
                T.print(A[1], "second")
                T.print(A[0:2], "both")

    a = np.arange(4, dtype=np.float32)
    line = main.func.__code__.co_firstlineno + 4
    heads = [f"block (1, 0, 0) {__file__}:{line + k}: " for k in (0, 1)]
    want = [f"{heads[0]}second = 1", f"{heads[1]}both = float32(2)\n[0, 1]"]
    assert launch(main, 1, {"A": a}).printed == want
    assert launch(main, 2, {"A": a}).printed == [f"rank {r} {text}" for r in (0, 1) for text in want]


def test_arguments_are_checked():
    with pytest.raises(TileTypeError, match="A is float64"):
        launch(gossip(2, 1), 2, {"A": np.zeros(S)})
    with pytest.raises(TileValueError, match="axis 0 of A has extent 3"):
        launch(gossip(2, 1), 2, {"A": np.zeros(3, np.int32)})
    with pytest.raises(TileTypeError, match="no parameter 'Z'"):
        launch(gossip(2, 1), 2, {"Z": 1})
    with pytest.raises(TileValueError, match="no schedule"):
        launch(gossip(2, 1), 2, args(2), order="nobody")


def test_a_view_shares_what_is_known_of_its_elements():
    def kernel(halves: int):
        @T.prim_func
        def main(B: T.Tensor((S,), "int32")):
            with T.Kernel(1):
                wide = T.alloc_shared((S,), "int32")
                narrow = T.view(wide, (2 * S,), "int16")
                T.fill(narrow[0 : halves * S], 1)
                T.copy(wide, B)

        return main

    done = launch(kernel(2))
    assert done.report and (done.arrays[0]["B"] == 0x10001).all()
    assert f"wide[{S // 2}:{S}]" in str(check(kernel(1)))


def test_the_adversary_chooses_whom_a_look_at_everybody_would_choose():
    """Beside it a plain one: the least of all that are ready, by intent and priority. Executors come, go, and
    change their intent outside."""

    @dataclass(eq=False)
    class One:
        number: int
        intent: str = "run"
        awaits: None = None
        outbox: dict[int, list[int]] = field(default_factory=dict)

    class Plain(Adversary):
        def _pick(self, ready, deliveries):
            for ex in ready:
                if ex.number not in self.priority:
                    self.priority[ex.number] = self.draw.random()
            best = min(
                ready, key=lambda ex: ({"resume": 0, "signal": 2}.get(ex.intent, 1), self.priority[ex.number])
            )
            self.queue = [(0, 0.0, 0, best)]
            self.ranked = {ex.number: self.queue[0] if ex is best else (0, 0.0, 0, ex) for ex in ready}
            self.known = len(ready)
            return super()._pick(ready, deliveries)

        def _rank(self, ex, arrival):
            pass

    for seed in range(5):
        one, other, world = Adversary(seed), Plain(seed), random.Random(seed)
        ready, away = [One(n) for n in range(1, 30)], []
        for _ in range(2000):
            landing = [(world.randrange(30), 0) for _ in range(world.randrange(4))]
            chosen = one.pick(ready, landing)
            assert chosen == other.pick(ready, landing)
            if isinstance(chosen, tuple):
                continue
            ready.remove(chosen)
            chosen.intent = world.choice(["run", "run", "wait", "signal", "meet", "copy"])
            chosen.outbox = {p: [] for p in range(world.randrange(3))}
            (away if world.random() < 0.3 and ready else ready).append(chosen)
            if away and world.random() < 0.3:
                back = away.pop(world.randrange(len(away)))
                back.intent = "resume"
                ready.append(back)


def test_a_run_is_gone_when_it_is_over():
    """With all of its memory: whoever knows its machine is let go of, in runs that end, wait for ever or are
    cut off too."""
    kinds = (Machine, Block, Executor, Storage, Counters)
    for program, wait_for in ((gossip(3, 3), 3), (gossip(3, 4), 4)):
        with nothing_left(*kinds):
            assert bool(launch(program, 3, args(3), record=True).report) == (wait_for == 3)
            check(program, 3, args(3), seeds=2)
    with nothing_left(*kinds):
        assert check(gossip(2, 2), 2, args(2), schedule="exhaustive").complete


def test_a_run_of_roles_and_rings_is_gone_when_it_is_over():
    @T.prim_func
    def product(
        A: T.Tensor((64, 96), "float16"), B: T.Tensor((96, 32), "float16"), C: T.Tensor((64, 32), "float32")
    ):
        with T.Kernel(2, threads=128) as block:
            a, b = T.alloc_shared((32, 32), "float16"), T.alloc_shared((32, 32), "float16")
            c = T.alloc_fragment((32, 32), "float32")
            T.clear(c)
            for k in T.Pipelined(3, num_stages=2):
                T.copy(A[block * 32, k * 32], a)
                T.copy(B[k * 32, 0], b)
                T.gemm(a, b, c)
            T.copy(c, C[block * 32, 0])

    with nothing_left(Machine, Block, Executor, Storage, Counters):
        assert check(product, level="both", seeds=2)
        assert check(product, level="scheduled", arch="sm_90a", seeds=2)


@pytest.mark.parametrize("learns", [False, True])
def test_threads_that_learn_nothing_share_a_clock(monkeypatch: pytest.MonkeyPatch, learns: bool):
    """Thousands of clocks of thousands of places each would be most of a launch's time and memory."""
    clocks, joined = [], Machine._joined

    def look(machine: Machine, child: Executor, parent: Executor) -> None:
        clocks.append(child.known)  # kept, so that none takes another's place in memory
        joined(machine, child, parent)

    @T.prim_func
    def main(A: T.Tensor((128,), "int32")):
        with T.Kernel(1, threads=64):
            came, tile = T.alloc_signal(1), T.alloc_shared((64,), "int32")
            with T.Scale("thread") as (t, n):
                tile[t] = t
                A[t] = tile[t]
                if learns:
                    T.signal(came[0])
                    T.wait(came[0], n)
            with T.Scale("thread") as (t, n):
                A[64 + t] = tile[63 - t]  # what other threads have written, and their end orders

    monkeypatch.setattr(Machine, "_joined", look)
    done = launch(main, 1, {})
    assert not done.report.findings and done.arrays[0]["A"].tolist() == [*range(64), *range(63, -1, -1)]
    first, second = clocks[:64], clocks[64:]
    assert len({id(c) for c in first}) == (64 if learns else 1) and len({id(c) for c in second}) == 1


def test_threads_that_share_a_clock_race_as_others_do():
    @T.prim_func
    def main(A: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((32,), "int32")
            with T.Scale("thread") as (t, n):
                tile[t] = t
                tile[t] = tile[t] + 1  # its own
                A[t] = tile[(t + 1) % n]

    assert {f.kind for f in check(main, 1, {}, seeds=2).findings} == {"race"}
