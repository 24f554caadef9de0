"""Launches on teams: entry and exit flags, fingerprints, signals, barriers of all ranks, and how failures
spread."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

import numpy
import pytest
import torch

import tilescale
import tilescale.comm as comm
import tilescale.language as T
from tests.ranks.harness import RankFailure, RanksFailed, run_ranks
from tests.unit.native_kernels import (
    DEVICE,
    EVENTS,
    F32,
    I32,
    I64,
    INT,
    KEEP,
    SIGNAL,
    SYMM,
    TENSOR,
    UNORDERED,
    WAITS,
    P,
    kernel,
)  # fmt: skip
from tilescale import native

SHORT = {"TILESCALE_WAIT_TIMEOUT": "0.4"}
X, S = P(SYMM, F32, [("def", 0)], True, "x"), P(SIGNAL, I64, [("def", 1)], True, "s")

# Each rank puts its number (plus the step) into its right neighbour's x, signals, and waits for its own.
RING = """
BLOCK {
  int64_t me = a[3], n = a[4]; float* x = (void*)a[0];
  float* y = ts_peer(ctx, x, (int32_t)((me + 1) % n), 0);
  for (int64_t i = bx * 16; i < bx * 16 + 16; i++) y[i] = (float)(me + a[2]);
  ts_signal(ctx, ts_peer(ctx, (int64_t*)a[1] + bx, (int32_t)((me + 1) % n), 0), 1, 0);
  ts_wait(ctx, (int64_t*)a[1] + bx, 1, 1, 1);
  for (int64_t i = bx * 16; i < bx * 16 + 16; i++) if (x[i] != (float)((me + n - 1) % n + a[2])) return 1;
  return 0;
}
GRID(a[5] / 16, 1, 1)
"""
RING_SITES = ["copy|x|ring.py|4|T.copy(x, x, dst=right)", "wait|s|ring.py|6|T.wait(s[b], cmp='eq')"]


def ring(name: str = "ring(n=16)", **more: int) -> Callable[..., None]:
    return kernel(
        RING, [X, S, P(INT, I64)], nsyms=2, flags=WAITS | DEVICE, sites=RING_SITES, name=name, **more
    )


def failures(n: int, work: Callable[[], object], seconds: float = 4.0, **env: str) -> dict[int, RankFailure]:
    with pytest.raises(RanksFailed) as e:
        run_ranks(n, work, env=env)
    assert e.value.seconds < seconds
    return {f.rank: f for f in e.value.failures}


@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_many_launches_without_host_barriers(n: int, threads: str) -> None:
    def work() -> None:
        comm.init()
        f, x, s = ring(), comm.zeros(64), comm.signals(4)
        for step in range(200):
            f(x, s, step)
            assert (x == (comm.rank() - 1) % n + step).all()
            assert (s == 0).all()  # they count from zero in each launch: the wait is for exactly 1

    run_ranks(n, work, env={"TILESCALE_NUM_THREADS": threads})


def test_ranks_at_different_pace() -> None:
    """Whatever host code does before and after a launch needs no barrier."""

    def work() -> None:
        comm.init()
        f, x, s = ring(), comm.zeros(16), comm.signals(1)
        for step in range(30):
            if (comm.rank() + step) % 3 == 0:
                time.sleep(0.002)
            x.fill_(-1)
            f(x, s, step)
            assert (x == (comm.rank() - 1) % 3 + step).all()

    run_ranks(3, work)


def test_many_waiting_blocks_on_many_ranks() -> None:
    def work() -> None:
        comm.init()
        f, x, s = ring(), comm.zeros(16 * 512), comm.signals(512)
        for step in range(3):
            f(x, s, step)

    run_ranks(8, work)


def test_a_rank_that_is_not_touched_need_not_have_entered() -> None:
    """Rank 1 launches late; rank 0's block, which touches nobody, has ended long before."""
    source = "BLOCK { if (a[1] == 0) *(float*)a[0] = 1; return 0; } GRID(1, 1, 1)"

    def work() -> float:
        comm.init()
        f, x, ran = kernel(source, [X], nsyms=2, flags=DEVICE), comm.zeros(1), comm.zeros(1, "float64")
        comm.barrier()
        if comm.rank() == 1:
            time.sleep(0.3)
            ran[0] = comm.peer(x, 0)[0].item()
        f(x)
        return ran[0].item()

    assert run_ranks(2, work)[1] == 1


def test_signals_that_are_kept_live_on() -> None:
    source = """BLOCK { int64_t* s = (void*)a[0]; ts_signal(ctx, ts_peer(ctx, s, (int32_t)((a[2] + 1) % a[3]), 0), 1, 0);
      ts_wait(ctx, s, a[1], 1, 0); return 0; } GRID(1, 1, 1)"""

    def work() -> list[int]:
        comm.init()
        s, f = (
            comm.signals(1),
            kernel(source, [P(KEEP, I64, [1], True, "s"), P(INT, I64)], flags=WAITS | DEVICE),
        )
        for step in range(1, 20):
            f(s, step)
        return s.tolist()

    assert run_ranks(2, work) == [[19], [19]]


@pytest.mark.parametrize("threads", ["1", "2"])
def test_barriers_of_all_blocks_of_all_ranks(threads: str) -> None:
    source = """BLOCK { int64_t* x = (void*)a[0]; int64_t me = a[1], n = a[2];
      for (int k = 1; k <= 10; k++) {
        for (int r = 0; r < n; r++) ((int64_t*)ts_peer(ctx, x, r, 0))[me * 5 + bx] = k;
        ts_barrier(ctx, 6, 1, 0);
        for (int i = 0; i < n * 5; i++) if (x[i] != k) return 1;
        ts_barrier(ctx, 6, 1, 0); }
      return 0; } GRID(5, 1, 1)"""

    def work() -> None:
        comm.init()
        f = kernel(source, [P(SYMM, I64, [None], True, "x")], flags=WAITS | DEVICE)
        x = comm.zeros(20, "int64")
        for _ in range(20):
            f(x)

    run_ranks(4, work, env={"TILESCALE_NUM_THREADS": threads})


def test_a_block_meets_its_twins() -> None:
    source = """BLOCK { int64_t* x = (void*)a[0]; int64_t me = a[1], n = a[2];
      for (int k = 1; k <= 10; k++) {
        for (int r = 0; r < n; r++) ((int64_t*)ts_peer(ctx, x, r, 0))[bx * 8 + me] = k;
        ts_team_sync(ctx, 0);
        for (int i = 0; i < n; i++) if (x[bx * 8 + i] != k) return 1;
        ts_team_sync(ctx, 0); }
      return 0; } GRID(7, 1, 1)"""

    def work() -> None:
        comm.init()
        f = kernel(source, [P(SYMM, I64, [56], True, "x")], flags=WAITS | DEVICE)
        x = comm.zeros(56, "int64")
        for _ in range(20):
            f(x)

    run_ranks(3, work)


def test_teams_launch_on_their_own() -> None:
    def work() -> tuple[list[float], float]:
        comm.init()
        half = comm.team([0, 2] if comm.rank() % 2 == 0 else [3, 1])
        assert half is not None
        f, g = ring(), ring("other", fingerprint=5)
        x, s = comm.zeros(16, team=half), comm.signals(1, team=half)
        y, t = comm.zeros(16), comm.signals(1)
        for step in range(20):
            (f if comm.rank() % 2 else g)(x, s, step)  # the halves launch different kernels at the same time
            g(y, t, step)
        with pytest.raises(ValueError, match="^TS:team:1:-1:ranks (0 2|3 1):ranks 0 1 2 3$"):
            f(x, t, 0)
        return x[:1].tolist(), y[0].item()

    left = [[20.0], [19.0], [19.0], [20.0]]  # the team rank of the left neighbour, plus 19
    assert [r[0] for r in run_ranks(4, work)] == left


# ---- ranks that launch different things


def mismatch(work: Callable[[], object]) -> str:
    """Both ranks must fail soon; the text of the one that found out."""
    failed = failures(2, work)
    assert set(failed) == {0, 1} and all(f.kind == "RuntimeError" for f in failed.values()), failed
    return next(f.text for f in failed.values() if "stopped the job" not in f.text)


def test_different_kernels() -> None:
    def work() -> None:
        comm.init()
        x, s = comm.zeros(16), comm.signals(1)
        ring()(x, s, 0)
        ring("ring(n=16)" if comm.rank() else "star(n=16)", fingerprint=1 + comm.rank())(x, s, 1)

    text = mismatch(work)
    assert "in launch 2 of their team ranks" in text and "launched different kernels" in text
    assert re.search(r"rank 0: star\(n=16\); x float32\(16,\) at heap offset \d+; s int64\(1,\)", text), text
    assert "rank 1: ring(n=16); x float32(16,)" in text


def test_different_constants() -> None:
    def work() -> None:
        comm.init()
        ring(f"ring(n={16 + comm.rank()})", fingerprint=7 + comm.rank())(comm.zeros(16), comm.signals(1), 1)

    text = mismatch(work)
    assert (
        "the same kernel with different code or constants" in text
        and "ring(n=16);" in text
        and "ring(n=17);" in text
    )


def test_different_shapes_and_offsets() -> None:
    def shapes() -> None:
        comm.init()
        ring()(comm.zeros(64)[: 16 + 16 * comm.rank()], comm.signals(4), 1)

    def offsets() -> None:
        comm.init()
        x, y, s = comm.zeros(16), comm.zeros(16), comm.signals(1)
        ring()(y if comm.rank() else x, s, 1)

    assert "the same kernel with different shapes of symmetric arguments" in mismatch(shapes)
    text = mismatch(offsets)
    assert "the same kernel with symmetric arguments at different heap offsets" in text
    assert len(set(re.findall(r"x float32\(16,\) at heap offset (\d+)", text))) == 2


def test_a_mismatch_is_found_though_nobody_is_touched() -> None:
    def work() -> None:
        comm.init()
        kernel(
            "BLOCK { return 0; } GRID(1, 1, 1)",
            [X],
            nsyms=2,
            flags=DEVICE,
            fingerprint=comm.rank(),
            name="quiet",
        )(comm.zeros(4))

    assert "the same kernel with different code or constants" in mismatch(work)


def test_ordinary_arguments_may_differ() -> None:
    source = "BLOCK { ts_peer(ctx, (void*)a[0], (int32_t)((a[2] + 1) % a[3]), 0); return 0; } GRID(1, 1, 1)"

    def work() -> None:
        comm.init()
        f = kernel(source, [P(SYMM, F32, [4]), P(TENSOR, F32, [None])], flags=DEVICE)
        f(comm.zeros(4), torch.zeros(3 + comm.rank()))

    run_ranks(2, work)


# ---- failures


def test_a_signal_that_never_comes() -> None:
    source = """BLOCK { ts_peer(ctx, (void*)a[0], (int32_t)((a[1] + 1) % a[2]), 0);
      if (a[1] == 1 && bx == 3) ts_wait(ctx, (int64_t*)a[0] + 2, 5, 0, 1); return 0; } GRID(4, 1, 1)"""

    def work() -> None:
        comm.init()
        f = kernel(
            source,
            [P(SIGNAL, I64, [4], True, "s")],
            flags=WAITS | DEVICE,
            sites=["copy|s|m.py|1|", "wait|s|m.py|8|"],
        )
        f(comm.signals(4))

    failed = failures(3, work, **SHORT)
    assert set(failed) == {0, 1, 2}
    told = "rank 1, block (3, 0, 0): waited 0.4 s for s[2]: expected >= 5, the value is 0 (m.py:8)"
    assert failed[1].text == f"TS:run:1:{told}" or "stopped the job" in failed[1].text
    assert any(told in f.text for f in failed.values())


def test_a_launch_that_another_rank_never_makes() -> None:
    def work() -> None:
        comm.init()
        x, s = comm.zeros(16), comm.signals(1)
        ring()(x, s, 0)
        if comm.rank() == 0:
            ring()(x, s, 1)
        else:
            time.sleep(1)

    text = failures(2, work, **SHORT)[0].text
    assert (
        "rank 0, block (0, 0, 0): waited 0.4 s for rank 1 to reach launch 2 of their team (ring(n=16))"
        in text
    )
    assert "rank 1 is in no launch; its last one here was 1: ring(n=16); x float32(16,)" in text


def test_a_rank_that_ends_instead_of_launching() -> None:
    def work() -> None:
        comm.init()
        x, s = comm.zeros(16), comm.signals(1)
        if comm.rank() == 0:
            ring()(x, s, 1)

    text = failures(2, work)[0].text
    assert "waited for rank 1 in launch 1 of their team (ring(n=16)), and rank 1 has ended" in text


#: waits for a signal that nobody sends, or looks for it in a loop; rank 0's step is 1
LISTEN = "BLOCK { if (a[1]) ts_wait(ctx, (int64_t*)a[0], 1, 0, 0); return 0; } GRID(1, 1, 1)"
POLL = "BLOCK { volatile int64_t* s = (int64_t*)a[0]; while (a[1] && !*s) ts_poll(ctx); return 0; } GRID(1, 1, 1)"


def listening(source: str, flags: int, **env: str) -> str:
    """What rank 0 says of rank 1, which ends instead of launching (unordered: beside its own launch)."""

    def work() -> None:
        comm.init()
        made = kernel(
            source,
            [P(SIGNAL, I64, [1], True, "s"), P(INT, I64)],
            flags=flags,
            sites=["wait|s|m.py|4|"],
            name="listen",
        )
        s = comm.signals(1)
        if comm.rank() == 0 or flags & UNORDERED:
            made(s, int(comm.rank() == 0))

    return failures(2, work, **env)[0].text


def test_a_rank_that_ends_while_others_listen() -> None:
    text = listening(LISTEN, WAITS | DEVICE)
    assert (
        "rank 0, block (0, 0, 0): waited for s[0]: expected >= 1, the value is 0, and rank 1 has ended (m.py:4)"
        in text
    )
    assert "rank 0, block (0, 0, 0): is in a loop that looks at memory, and rank 1 has ended" in listening(
        POLL, WAITS | DEVICE
    )
    late = listening(LISTEN, WAITS | DEVICE | UNORDERED, **SHORT)  # its signal may have been on its way
    assert "waited 0.4 s for s[0]: expected >= 1, the value is 0, and rank 1 has ended" in late


def test_a_rank_that_is_killed_in_a_launch() -> None:
    def work() -> None:
        comm.init()
        x, s = comm.zeros(16), comm.signals(1)
        for step in range(1_000_000):
            if comm.rank() == 1 and step == 50:
                os.kill(os.getpid(), signal.SIGKILL)
            ring()(x, s, step)

    failed = failures(3, work)
    assert failed[1].text == "killed by SIGKILL"
    assert any("rank 1 (process" in f.text and "has died" in f.text for f in failed.values()), failed


def test_an_exception_on_one_rank_ends_launches_of_the_others() -> None:
    def work() -> None:
        comm.init()
        x, s = comm.zeros(16), comm.signals(1)
        if comm.rank() == 1:
            raise ValueError("out of data")
        ring()(x, s, 1)

    failed = failures(3, work)
    assert all("rank 1 stopped the job: ValueError: out of data" in failed[r].text for r in (0, 2)), failed


def test_an_assertion_on_one_rank_ends_all() -> None:
    source = """BLOCK { if (a[1] == 1) ts_fail(ctx, 0); ts_wait(ctx, (int64_t*)a[0], 1, 0, 1); return 0; } GRID(1, 1, 1)"""

    def work() -> None:
        comm.init()
        sites = ["assert||m.py|3|n > 0", "wait|s|m.py|4|"]
        kernel(source, [P(SIGNAL, I64, [1], True, "s")], flags=WAITS | DEVICE, sites=sites)(comm.signals(1))

    failed = failures(3, work)
    assert failed[1].text == "TS:run:0:rank 1, block (0, 0, 0): assert failed: n > 0 (m.py:3)"
    assert all(
        "rank 1 stopped the job: rank 1, block (0, 0, 0): assert failed: n > 0" in failed[r].text
        for r in (0, 2)
    )


def test_a_rank_out_of_range() -> None:
    source = "BLOCK { ts_peer(ctx, (void*)a[0], (int32_t)a[1], 0); return 0; } GRID(1, 1, 1)"

    def work() -> None:
        comm.init()
        f = kernel(source, [P(SYMM, F32, [1]), P(INT, I32)], flags=DEVICE, sites=["copy|x|m.py|7|"])
        x = comm.zeros(1)
        f(x, 1)
        f(x, 2)

    text = " ".join(f.text for f in failures(2, work).values())
    assert re.search(
        r"rank [01], block \(0, 0, 0\): rank 2 is out of range: the team has 2 ranks \(m.py:7\)", text
    ), text


def test_what_is_symmetric() -> None:
    def work() -> None:
        comm.init()
        f = kernel("BLOCK { return 0; } GRID(1, 1, 1)", [P(SYMM, F32, [None])])
        x = comm.zeros(100)
        f(x)
        f(x[10:20])
        with pytest.raises(
            TypeError, match="^TS:notsymm:0:-1:symmetric memory of this rank:an ordinary tensor$"
        ):
            f(torch.zeros(4))
        with pytest.raises(
            TypeError, match="^TS:notsymm:0:-1:symmetric memory of this rank:a view of another rank's memory$"
        ):
            f(comm.peer(x, 1 - comm.rank()))
        comm.barrier()

    run_ranks(2, work)


def test_alone_a_failed_launch_does_no_lasting_harm() -> None:
    source = "BLOCK { int64_t* s = (void*)a[0]; ts_signal(ctx, s, 1, 0); ts_wait(ctx, s, a[1], 1, 0); return 0; } GRID(1, 1, 1)"

    def work() -> None:
        comm.init()
        s = comm.signals(1)
        f = kernel(source, [P(SIGNAL, I64, [1], True, "s"), P(INT, I64)], flags=WAITS | DEVICE)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="expected == 2, the value is 1"):
                f(s, 2)
            f(s, 1)

    run_ranks(1, work, env={"TILESCALE_WAIT_TIMEOUT": "0.1"})


# ---- unordered launches, and the log


def test_unordered_launches_do_not_wait_for_anybody() -> None:
    source = "BLOCK { ((float*)ts_peer(ctx, (void*)a[0], (int32_t)((a[1] + 1) % a[2]), 0))[0] += 1; return 0; } GRID(1, 1, 1)"

    def work() -> float:
        comm.init()
        f, x = kernel(source, [P(SYMM, F32, [1], True)], flags=DEVICE | UNORDERED), comm.zeros(1)
        if comm.rank() == 0:  # nobody else launches, so who waited would wait for ever
            f(x)
            f(x)
        comm.barrier()
        return x[0].item()

    assert run_ranks(2, work) == [0, 2]


def test_traffic_between_ranks() -> None:
    source = """BLOCK { int32_t to = (int32_t)((a[1] + 1) % a[2]); ts_event(ctx, 0, 0, to, 400);
      ts_peer(ctx, (void*)a[0], to, 0); ts_event(ctx, 0, 1, to, 400); return 0; } GRID(3, 1, 1)"""

    def work() -> object:
        comm.init()
        f = kernel(source, [P(SYMM, F32, [1])], flags=DEVICE | EVENTS, sites=["copy|x|m.py|7|"])
        x = comm.zeros(1)
        team = comm.team([1, 0] if comm.rank() < 2 else [2])
        y = comm.zeros(1, team=team)
        f(x)
        native.clear_events()
        f(y)
        return native.traffic(), {(e.kind, e.rank) for e in native.events()}

    assert run_ranks(3, work) == [
        ({1: (1200, 3)}, {("copy", 1)}), ({0: (1200, 3)}, {("copy", 0)}), ({2: (1200, 3)}, {("copy", 2)}),
    ]  # fmt: skip


def test_a_kernel_that_reaches_nobody_knows_its_rank() -> None:
    """Without a symmetric argument there is no team to ask: ranks count among all, as on the simulator."""

    @tilescale.jit(target="cpu")
    def who():
        @T.prim_func
        def main(A: T.Tensor((2,), "int32")):
            with T.Kernel(1):
                with T.Scale("device") as (rank, world):
                    A[0] = rank
                    A[1] = world

        return main

    def work() -> list[int]:
        seen = numpy.zeros(2, "int32")
        comm.init()
        who()(seen)
        return seen.tolist()

    assert run_ranks(3, work) == [[0, 3], [1, 3], [2, 3]]
    alone = numpy.zeros(2, "int32")
    who()(alone)
    assert alone.tolist() == [0, 1]
