"""What is recorded of a launch: traffic, logical time, and the file for Perfetto."""

from __future__ import annotations

import numpy as np
import pytest

import tilescale.language as T
from tests.trace_events import validated
from tilescale.compiler.checks.run import launch
from tilescale.compiler.sim.record import LOCAL, REMOTE
from tilescale.compiler.sim.timeline import SIGNAL_BYTES, Timeline, chrome, write

S = 64


def exchange():
    """Every rank puts its vector to the next, pulls the one of the next but one, and waits."""

    @T.prim_func
    def main(
        A: T.SymmTensor((S,), "float32"),
        box: T.SymmTensor((S,), "float32"),
        got: T.Signal((2,)),
        B: T.Tensor((2, S), "float32"),
    ):
        with T.Kernel(1), T.Scale("device") as rank, world:
            T.copy(A, box, dst=(rank + 1) % world, signal=got[1])
            T.copy(A, B[0, 0:S], src=(rank + 2) % world)
            T.wait(got[1])
            T.copy(box, B[1, 0:S])
            T.barrier()

    return main


def recorded(kernel, ranks: int = 1, args: dict | None = None, **options) -> Timeline:
    done = launch(kernel, ranks, args, record=True, **options)
    assert done.report, done.report
    assert done.timeline is not None and done.traffic is done.timeline.traffic
    return done.timeline


A3 = {"A": [np.full(S, r, np.float32) for r in range(3)]}


def test_traffic_by_pairs_of_ranks():
    traffic = recorded(exchange(), 3, A3).traffic
    put, pull = S * 4 + SIGNAL_BYTES, S * 4
    # rank r puts to r+1, with a signal; what it pulls from r+2 goes from there to r, which is r+2's next
    for r in range(3):
        after, before = (r + 1) % 3, (r + 2) % 3
        assert (
            traffic.bytes[r, after] == put + pull
            and traffic.messages[r, after] == 3
            and traffic.pulls[r, after] == 1
        )
        assert traffic.bytes[r, before] == traffic.messages[r, before] == 0 and traffic.bytes[r, r] == 0
    assert "rank 2  520 (3)    0 (0)        ·" in str(traffic)


def test_nothing_is_recorded_unless_asked():
    done = launch(exchange(), 3, A3)
    assert done.timeline is None and done.traffic is None


@pytest.mark.parametrize("order", ["random", "adversary", "exhaustive:-"])
def test_logical_time_does_not_depend_on_the_schedule(order: str):
    def seen(timeline: Timeline):
        slices = sorted(
            (s.rank, s.thread, s.start, s.duration, s.kind, s.name, s.line) for s in timeline.slices
        )
        return slices, sorted((a.source, a.target) for a in timeline.arrows), sorted(timeline.flight)

    assert seen(recorded(exchange(), 3, A3)) == seen(recorded(exchange(), 3, A3, order=order, seed=2))


def test_waits_last_until_their_signal_is_sent():
    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        box: T.SymmTensor((S,), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((S,), "float32"),
    ):
        with T.Kernel(1), T.Scale("device") as rank, world:
            if rank == 0:
                T.copy(A, box, dst=1)
                T.signal(got[0], dst=1)
            else:
                T.wait(got[0])
                T.copy(box, B)

    timeline = recorded(main, 2, {"A": np.zeros(S, np.float32)})
    kinds = {(s.rank, s.kind): s for s in timeline.slices}
    put, signal, wait, copy = kinds[0, "copy"], kinds[0, "signal"], kinds[1, "wait"], kinds[1, "copy"]
    assert (
        (put.start, put.duration) == (0, S * 4 // REMOTE)
        and put.more["bytes"] == S * 4
        and put.name == "box[0:64]"
    )
    assert (signal.start, signal.duration) == (put.end, 1)
    assert (wait.start, wait.end) == (0, signal.end + 1) and wait.more["condition"] == "ge 1"
    assert (copy.start, copy.duration) == (wait.end, -(-2 * S * 4 // LOCAL)) and copy.more[
        "bytes"
    ] == S * 4  # read and written, moved once
    (arrow,) = timeline.arrows
    assert arrow.source == (0, 0, signal.start) and arrow.target == (1, 0, signal.end)
    assert timeline.waits == [wait]
    assert wait.line == signal.line + 2 and wait.file == __file__
    assert sorted(timeline.flight) == [(0, 0, S * 4), (0, signal.start, -S * 4)]
    said = timeline.summary()
    assert (
        f"got at {__file__}:{wait.line}: {wait.duration} steps in 1 wait, at most {wait.duration} for got[0] (rank 1, block 0)"
        in said
    )


def test_copies_that_go_on_beside_their_block_signal_in_its_row():
    @T.prim_func
    def main(
        A: T.SymmTensor((S,), "float32"),
        box: T.SymmTensor((2, S), "float32"),
        got: T.Signal((2,)),
        B: T.Tensor((2, S), "float32"),
    ):
        with T.Kernel(1), T.Scale("device") as rank, world:
            T.copy(A, box[0, 0:S], dst=(rank + 1) % world, signal=got[0], blocking=False)
            T.copy(A, box[1, 0:S], src=(rank + 1) % world, signal=got[1], blocking=False)
            T.wait(got[0])
            T.wait(got[1])
            T.copy(box, B)

    timeline = recorded(main, 2, {"A": [np.full(S, r, np.float32) for r in range(2)]})
    assert set(timeline.threads) == {(0, 0), (1, 0)}
    for r in range(2):
        signals = [s for s in timeline.slices if (s.rank, s.kind) == (r, "signal")]
        assert [(s.name, s.more["peer"]) for s in signals] == [("got[0]", 1 - r), ("got[1]", r)]
        assert timeline.traffic.bytes[r, 1 - r] == 2 * S * 4 + SIGNAL_BYTES
    assert len(timeline.arrows) == 4 and sum(n for _, _, n in timeline.flight) == 0


def test_of_several_additions_the_last_that_is_needed_ends_a_wait():
    """Rank r signals after r + 1 copies; a wait for two of three signals lasts until the second is sent."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), box: T.SymmTensor((S,), "float32"), got: T.Signal((1,))):
        with T.Kernel(1), T.Scale("device") as rank, world:
            for _ in T.serial(rank + 1):
                T.copy(A, box, dst=(rank + 1) % world)
            T.signal(got[0], dst=0)
            if rank == 0:
                T.wait(got[0], 2)

    for order in ("round_robin", "adversary"):
        timeline = recorded(main, 3, {"A": np.zeros(S, np.float32)}, order=order)
        (arrow,) = timeline.arrows
        assert arrow.source[0] == 1


def test_barriers_end_together_and_warps_have_threads():
    @T.prim_func
    def main(A: T.Tensor((2, S), "float32"), B: T.Tensor((2, S), "float32")):
        with T.Kernel(2, threads=64) as b:
            with T.Scale("warp") as w, warps:
                if w == 0:
                    T.copy(A[b, 0:S], B[b, 0:S])
            with T.Scale("grid"):
                if b == 0:
                    T.copy(B[0, 0:S], A[0, 0:S])
                T.barrier()

    timeline = recorded(main, 1, {"A": np.zeros((2, S), np.float32)})
    barriers = [s for s in timeline.slices if s.kind == "barrier"]
    assert (
        len(barriers) == 2 and len({s.end for s in barriers}) == 1 and len({s.start for s in barriers}) == 2
    )
    assert {"block 0", "block 0, warp 0", "block 0, warp 1", "block 1"} <= set(timeline.threads.values())
    warp = next(s for s in timeline.slices if timeline.threads[0, s.thread] == "block 0, warp 0")
    after = next(
        s for s in timeline.slices if s.kind == "copy" and timeline.threads[0, s.thread] == "block 0"
    )
    assert after.start == warp.end  # the block goes on when its warps have ended
    validated(chrome([timeline]))


def test_atomics_follow_one_another():
    @T.prim_func
    def main(x: T.Tensor((1,), "int32")):
        with T.Kernel(3):
            T.atomic_add(x[0], 1)

    timeline = recorded(main, 1, {"x": np.zeros(1, np.int32)})
    assert sorted(s.start for s in timeline.slices) == [0, 1, 2] and {s.kind for s in timeline.slices} == {
        "atomic"
    }


def test_the_file_is_what_viewers_expect(tmp_path):
    timeline = recorded(exchange(), 3, A3)
    write(tmp_path / "trace.json", [timeline, timeline], apart=10)
    events = validated(tmp_path / "trace.json")
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in slices} == {0, 1, 2} and len(slices) == 2 * len(timeline.slices)
    assert sum(e["ph"] == "s" for e in events) == 2 * 3
    second = slices[len(slices) // 2 :]
    assert min(e["ts"] for e in second) == timeline.end + 10
    put = next(e for e in slices if e["args"].get("direction") == "put")
    assert (
        put["args"]["bytes"] == S * 4
        and put["args"]["at"].startswith(f"{__file__}:")
        and put["args"]["kernel"] == "main"
    )
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "rank 0",
        "rank 1",
        "rank 2",
    }
    levels = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == 0]
    assert max(levels) >= S * 4 and levels[-1] == 0


def test_a_wait_that_nothing_ends_is_there_too():
    @T.prim_func
    def main(got: T.Signal((1,)), other: T.Signal((1,))):
        with T.Kernel(1), T.Scale("device") as rank, world:
            T.signal(other[0], dst=(rank + 1) % world)
            if rank == 0:
                T.wait(got[0])
            T.signal(got[0], dst=1)
            T.wait(other[0])

    done = launch(main, 2, record=True)
    assert "deadlock" in done.report.kinds and done.timeline is not None
    (stuck,) = [s for s in done.timeline.slices if s.more.get("ended") is False]
    assert (stuck.rank, stuck.kind, stuck.name) == (0, "wait", "got[0]")
    validated(chrome([done.timeline]))


def test_packets_cross_with_the_number_of_their_launch():
    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), box: T.Packets((3, S), "float32"), B: T.Tensor((S,), "float32")):
        with T.Kernel(1), T.Scale("device") as rank, world:
            T.put_packets(A, box[rank, :], dst=(rank + 1) % world)
            T.get_packets(box[(rank + 2) % world, :], B)

    timeline = recorded(main, 3, A3)
    for r in range(3):
        assert timeline.traffic.bytes[r, (r + 1) % 3] == 2 * S * 4 and timeline.traffic.messages[r].sum() == 1
    puts, gets = ([s for s in timeline.slices if s.kind == kind] for kind in ("put_packets", "get_packets"))
    assert len(puts) == len(gets) == 3 and all(s.duration == 2 * S * 4 // REMOTE for s in puts)
    for get in gets:
        put = next(s for s in puts if s.rank == (get.rank + 2) % 3)
        assert get.start + get.duration == max(put.start + put.duration, get.start) + 1
