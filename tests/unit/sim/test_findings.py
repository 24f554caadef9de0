"""What findings say: one fault is one finding, both accesses are named, and the order that is missing."""

from __future__ import annotations

import numpy as np
import pytest

import tilescale.language as T
from tilescale.compiler.checks.run import check, launch

S = 16
SCHEDULES = pytest.mark.parametrize("schedule", ["round_robin", "random", "adversary"])


def exchange(*, sent: int = S, wait: bool = False, right: int = 1, late: bool = True):
    """Everyone puts ``sent`` elements to its right neighbour, signals ``right`` ranks further, and reads all
    S of what it got."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        inbox: T.SymmTensor((S,), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((S,), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(A[0:sent], inbox[0:sent], dst=(rank + 1) % world)
                T.signal(got[0], dst=(rank + right) % world)
                if wait:
                    T.wait(got[0])
                T.copy(inbox, B)
                if not wait and late:
                    T.wait(got[0])

    return main


@SCHEDULES
def test_a_read_before_the_write_is_one_race(schedule: str):
    """Whoever comes first: the read that finds nothing written, and the write that comes later, are one
    fault."""
    report = check(exchange(), 3, schedule=schedule, seeds=10)
    assert [f.kind for f in report.findings] == ["race"], report


def test_a_read_too_early_says_what_it_did_not_await():
    reports = [launch(exchange(), 2, order="random", seed=s).report for s in range(20)]
    (early, *_) = [f for report in reports for f in report.findings if "before rank" in f.message]
    assert early.where.what == "T.copy" and early.where.region == "inbox[0:16]"
    assert (
        "signals got[0] behind it" in early.message and "no wait for that comes before this" in early.message
    )
    assert (
        early.hint.startswith("T.wait(got[0], …) of line ")
        and early.fix is not None
        and early.fix.how == "move before"
    )


def test_a_read_of_old_values_that_awaits_the_news_nowhere_is_too_early_as_well():
    """What lies there before says nothing: the writer tells the reader's rank, and the reader does not
    listen."""
    old = {"inbox": np.zeros(S, np.float32)}
    reports = [launch(exchange(late=False), 2, old, order="random", seed=k).report for k in range(20)]
    races = [f for report in reports for f in report.findings if f.kind == "race"]
    assert any("before rank" in f.message for f in races)
    for f in races:
        assert "this reads inbox[0:16]" in f.message and "signals got[0] behind it" in f.message
        assert f.hint == "T.wait(got[0], …) before this"


def test_a_read_of_old_values_in_front_of_the_wait_may_be_meant():
    old = {"inbox": np.zeros(S, np.float32)}
    found = [f for k in range(20) for f in launch(exchange(), 2, old, order="random", seed=k).report.findings]
    late = next(f for f in found if f.message.startswith("this writes"))
    assert late.hint.startswith(
        "T.wait(got[0], …) in front of that read, if it is to see what is written here; else T.signal(s[i], dst="
    )


def test_what_nobody_ever_writes_is_told_beside_the_race():
    """Half of what is read too early comes later; the other half never."""
    report = check(exchange(sent=S // 2), 3, seeds=5)
    assert report.kinds == {"race", "uninitialised"}
    (never,) = (f for f in report.findings if f.kind == "uninitialised")
    assert never.where.region == f"inbox[{S // 2}:{S}]"


def test_a_signal_for_someone_else():
    (found,) = check(exchange(wait=True, right=2), 3, seeds=5).findings
    assert "and nobody tells rank" in found.message


def test_a_wait_that_ends_without_the_signal():
    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        parts: T.SymmTensor((3, S), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((3, S), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                for r in T.serial(world):
                    T.copy(A, parts[rank, 0:S], dst=r, signal=got[0])
                T.wait(got[0], 2)
                T.copy(parts, B)

    (found,) = check(main, 3, seeds=5).findings
    assert "the wait for got[0] ≥ 2 at line" in found.message and "ends without that" in found.message
    assert "as many signals as must have come" in found.hint


@pytest.mark.parametrize(
    ("op", "sign", "cmp", "awaits"), [("max", 1, "ge", 2), ("max", 1, "gt", 2), ("min", -1, "le", None)]
)
def test_of_maxima_the_hint_is_the_value_that_one_signal_alone_brings(
    op: str, sign: int, cmp: str, awaits: int | None
):
    """Their sum says nothing. A wait for less than a value is none that the edit could be made of."""
    value = 0 if cmp == "gt" else sign

    @T.prim_func
    def raised(X: T.SymmTensor((2,), "int32"), got: T.Signal((1,)), Y: T.Tensor((1,), "int32")):
        with T.Kernel(1), T.Scale("device") as (rank, n):
            if rank < 2:
                T.copy(Y, X[rank : rank + 1], dst=2)
                T.signal(got[0], sign * (rank + 1), op=op, dst=2)
            if rank == 2:
                T.wait(got[0], value, cmp=cmp)
                Y[0] = X[1]

    report = check(
        raised,
        ranks=3,
        args={"Y": np.zeros(1, np.int32), "X": np.zeros(2, np.int32)},
        schedule="random",
        seeds=5,
    )
    races = [f for f in report.findings if f.kind == "race"]
    assert races and all("a value that rank 1, block 0's signal alone brings" in f.hint for f in races), (
        report
    )
    assert {f.fix and f.fix.text for f in races} == {awaits and f"T.wait(got[0], {awaits})"}


@pytest.mark.parametrize(
    ("scale", "who", "says"),
    [
        ("warp", 1, "T.sync_threads(1, 64)"),
        ("thread", 1, "T.sync_warp()"),
        ("thread", 40, "T.sync_threads(1, 64)"),
    ],
)
def test_a_race_within_a_block_says_where_its_executors_can_meet(scale: str, who: int, says: str):
    @T.prim_func
    def shares(Y: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((1,), "int32")
            with T.Scale(scale) as (me, n):
                if me == 0:
                    tile[0] = 1
                if me == who:
                    Y[0] = tile[0]

    report = check(shares, schedule="random", seeds=3)
    (found,) = [f for f in report.findings if f.kind == "race"]
    assert f"{says} between" in found.hint, found


def test_one_counter_of_two_is_never_awaited():
    def kernel(both: bool):
        @T.prim_func
        def main(
            A: T.Tensor((S,), "float32"),
            inbox: T.SymmTensor((2, S), "float32"),
            got: T.Signal((2,)),
            B: T.Tensor((2, S), "float32"),
        ):
            with T.Kernel(1):
                with T.Scale("device") as rank, world:
                    T.copy(A, inbox[0, 0:S], dst=(rank + 1) % world, signal=got[0])
                    T.copy(A, inbox[1, 0:S], dst=(rank + 1) % world, signal=got[1])
                    T.wait(got[1])  # the first copy comes before the second one's signal
                    if both:
                        for k in T.serial(2):
                            T.wait(got[k])
                    T.copy(inbox, B)

        return main

    (found,) = check(kernel(False), 2, seeds=3).findings
    assert (
        found.kind == "unawaited"
        and found.message.startswith("got[0] is signalled")
        and "signal=got[0]" in str(found)
    )
    assert check(kernel(True), 2, seeds=3)


@SCHEDULES
@pytest.mark.parametrize("ordered", [False, True])
def test_stores_and_additions_of_one_counter(ordered: bool, schedule: str):
    """Rank 0 stores, rank 1 adds: a race, unless the one follows the other. One sender's own are in order."""

    @T.prim_func
    def main(got: T.Signal((1,)), go: T.Signal((1,)), B: T.Tensor((1,), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                if rank == 0:
                    T.signal(got[0], 5, op="set", dst=0)
                    T.signal(got[0], 1, dst=0)
                    T.signal(go[0], dst=1)
                    T.wait(got[0], 6)
                else:
                    if ordered:
                        T.wait(go[0])
                    T.signal(got[0], 1, dst=0)
                    T.wait(go[0])

    report = check(main, 2, schedule=schedule, seeds=6)
    assert not [f for f in report.findings if f.kind == "race"] if ordered else "race" in report.kinds, report
    if not ordered:
        assert any("stores 5" in str(f) and "got[0]" in str(f) for f in report.findings), report


def test_who_did_not_come_to_a_barrier():
    @T.prim_func
    def main(B: T.Tensor((4,), "float32")):
        with T.Kernel(4) as b:
            B[b] = 1
            if b != 2:
                T.sync_grid()

    (found,) = launch(main).report.findings
    assert (
        found.kind == "deadlock"
        and "4 must come to T.barrier, 3 have come, and rank 0, block 2 ended without it" in found.message
    )


def test_a_cluster_waits_for_its_own_blocks_alone():
    @T.prim_func
    def main(B: T.Tensor((4,), "float32")):
        with T.Kernel(block=(4,), cta_cluster=2) as b:
            B[b] = 1
            with T.Scale("cta_cluster") as c, blocks:
                if c == 0:
                    T.barrier()

    (found,) = launch(main).report.findings
    assert "block 1 ended without it" in found.message and "wait for one another" not in found.message


def test_an_endless_launch_names_its_loop():
    @T.prim_func
    def main(B: T.Tensor((1,), "int32")):
        with T.Kernel(1):
            x = T.alloc_var("int32")
            x = 0
            while x >= 0:
                B[0] = x

    (found,) = launch(main, limit=500).report.findings
    assert found.kind == "endless" and "while x >= 0" in str(found)


def test_late_writes_land_after_a_while():
    """A loop that polls memory races, and ends: the adversary delays a write, and not forever."""

    @T.prim_func
    def main(one: T.Tensor((1,), "int32"), flag: T.SymmTensor((1,), "int32"), B: T.Tensor((1,), "int32")):
        with T.Kernel(1):
            seen = T.alloc_var("int32")
            with T.Scale("device") as rank, world:
                T.copy(one, flag, dst=(rank + 1) % world)
                seen = 0
                while seen == 0:
                    seen = flag[0]
                B[0] = seen

    given = {"flag": np.zeros(1, np.int32), "one": np.ones(1, np.int32)}
    assert check(main, 2, given, seeds=4).kinds == {"race"}


def test_an_operation_reads_before_it_writes():
    """A running maximum over what nobody initialised."""

    @T.prim_func
    def main(A: T.Tensor((S, S), "float32"), B: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            x, top = T.alloc_fragment((S, S), "float32"), T.alloc_fragment((S,), "float32")
            T.copy(A, x)
            T.reduce_max(x, top, dim=1, clear=False)
            T.copy(top, B)

    (found,) = launch(main).report.findings
    assert (
        found.kind == "uninitialised" and found.where.region == "top[0:16]" and "T.clear(top)" in found.hint
    )


def test_a_rank_read_from_a_tensor():
    """dst= and src= may be elements of a tensor: behind two operands they name ranks."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "int32"),
        to: T.Tensor((1,), "int32"),
        inbox: T.SymmTensor((S,), "int32"),
        got: T.Signal((1,)),
        B: T.Tensor((S,), "int32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(A, inbox, dst=to[0], signal=got[0])
                T.wait(got[0])
                T.copy(inbox, B, src=to[0])

    given = {
        "A": [np.full(S, r, np.int32) for r in range(3)],
        "to": [np.array([(r + 1) % 3], np.int32) for r in range(3)],
    }
    done = launch(main, 3, given)
    assert done.report, done.report
    assert [int(a["inbox"][0]) for a in done.arrays] == [2, 0, 1]
    assert [int(a["B"][0]) for a in done.arrays] == [0, 1, 2]


@SCHEDULES
@pytest.mark.parametrize("stores", [False, True])
@pytest.mark.parametrize("scale", ["grid", "device"])
def test_a_wait_acquires_at_its_own_scale(scale: str, stores: bool, schedule: str):
    """A wait at the scale of the grid ends by another rank's signal, and makes nothing of that rank
    visible."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        inbox: T.SymmTensor((S,), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((S,), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(A, inbox, dst=(rank + 1) % world)
                T.signal(got[0], 1, "set" if stores else "add", dst=(rank + 1) % world)
            with T.Scale(scale):
                T.wait(got[0])
            T.copy(inbox, B)

    report = check(main, 2, schedule=schedule, seeds=5)
    if scale == "device":
        assert report, report
    else:
        (found,) = report.findings
        assert found.kind == "race" and "the wait for got[0] ≥ 1 at line" in found.message
        assert "stands at the scale of the grid" in found.message and found.hint.startswith(
            'the wait inside T.Scale("device")'
        )


def test_a_wait_of_the_grid_hears_its_own_rank():
    """One block awaits the other rank and tells its neighbour, which hears all of that at the scale of the
    grid."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        inbox: T.SymmTensor((S,), "float32"),
        got: T.Signal((2,)),
        B: T.Tensor((S,), "float32"),
    ):
        with T.Kernel(2) as b:
            if b == 0:
                with T.Scale("device") as rank, world:
                    T.copy(A, inbox, dst=(rank + 1) % world, signal=got[0])
                    T.wait(got[0])
                with T.Scale("grid"):
                    T.signal(got[1])
            else:
                with T.Scale("grid"):
                    T.wait(got[1])
                T.copy(inbox, B)

    report = check(main, 2, seeds=5)
    assert report, report


@pytest.mark.parametrize("schedule", ["adversary", "exhaustive"])
def test_a_grid_that_cannot_be_resident_is_not_run(schedule: str):
    """No target runs it: one finding, and no second run."""

    @T.prim_func
    def main(A: T.Tensor((T.dynamic("n"),), "float32")):
        with T.Kernel(A.shape[0], threads=1024) as b, T.Scale("grid"):
            A[b] = 0
            T.barrier()

    report = check(main, 1, {"A": np.ones(3000, np.float32)}, schedule=schedule, seeds=10)
    assert [f.kind for f in report.findings] == ["not-resident"] and report.runs == 1
    assert check(main, 1, {"A": np.ones(8, np.float32)}, schedule="random", seeds=2).runs == 3
    made = launch(main, 1, {"A": np.ones(3000, np.float32)}, record=True)
    assert made.report.kinds == {"not-resident"} and made.arrays[0]["A"].all()


def test_what_nobody_awaits_is_told_last():
    report = check(exchange(late=False), 3, {"inbox": np.zeros(S, np.float32)}, seeds=3)
    assert [f.kind for f in report.findings][-1] == "unawaited" and report.findings[0].kind == "race", report


@pytest.mark.parametrize("count", [-1, 0, 7, 29, 30, 31, 32, 33])
def test_shifts_by_less_than_nothing_or_by_all_bits(count: int):
    @T.prim_func
    def main(n: T.int32, A: T.Tensor((4,), "int32"), B: T.Tensor((8,), "int32")):
        with T.Kernel(1):
            B[0] = A[0] << n
            B[1] = A[1] >> n
            for i in T.Parallel(3):
                B[2 + i] = A[i] << (n + i)
                B[5 + i] = A[1] >> (n + i)

    a = np.array([5, -5, -1, 0], np.int32)
    made = launch(main, 1, {"n": count, "A": a, "B": np.zeros(8, np.int32)})
    bad = [not 0 <= n < 32 for n in (count, count, *range(count, count + 3), *range(count, count + 3))]
    want = [int(a[0]), int(a[1]), *map(int, a[:3]), *[int(a[1])] * 3]
    for k, (n, out) in enumerate(
        zip((count, count, *range(count, count + 3), *range(count, count + 3)), bad, strict=True)
    ):
        left = k == 0 or 2 <= k < 5
        want[k] = ((0 if left else -1) if out else want[k] << n if left else want[k] >> n) & 0xFFFFFFFF
    assert (made.arrays[0]["B"].astype(np.int64) & 0xFFFFFFFF).tolist() == want
    found = made.report.findings
    assert made.report.kinds == ({"arithmetic"} if any(bad) else set()) and len(found) == len(
        {f.loc for f in found}
    )
    assert all("int32 has 32 bits and is shifted by" in f.message and "0 ≤ n < 32" in f.hint for f in found)


def test_a_counter_outside_has_a_hint():
    @T.prim_func
    def main(k: T.int32, f: T.Signal((4,))):
        with T.Kernel(1), T.Scale("device") as rank, world:
            T.signal(f[k], dst=rank)
            T.wait(f[0])

    found = next(f for f in check(main, 2, {"k": 4}, seeds=1).findings if f.kind == "out-of-bounds")
    assert "f[4] lies outside f, whose shape is (4,)" in found.message and "0 ≤ index < 4" in found.hint
