"""Instrumented kernels for CUDA on the emulated GPU: what they log, and the timeline that it becomes."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.trace_events import validated
from tests.unit.cuda.emulated import empty
from tests.unit.cuda.row_kernels import of_tokens, spread
from tests.unit.cuda.test_communicator import arguments, pushed
from tests.unit.cuda.test_emulated_ranks import SMALL, example, f32, zeros
from tilescale.compiler import driver, emulator
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.emulator import EmulationError
from tilescale.compiler.passes import pipeline
from tilescale.compiler.sim.timeline import Timeline, chrome
from tilescale.launch import overlap
from tilescale.launch.trace import merged
from tilescale.native import build
from tilescale.native.events import Event, _index, _spans
from tilescale.native.gpu_log import GpuLog, Sample, Span
from tilescale.ops.ranks import expert_kernels
from tilescale.packets import length

#: what the traced kernels are called in the runtime's table
NUMBER = -7
needs_nvcc = pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")


def lowered(kernel: Any, arch: str = "sm_90a", *, instrument: bool = True) -> tuple[Any, Any]:
    program, _ = pipeline.run(kernel.trace(), target(arch))
    return Lowering(program, instrument=instrument).run(), program


def log_of(kernel: Any, args: list[dict[str, Any]], arch: str = "sm_90a", seed: int = 0) -> list[list[Event]]:
    """A launch's events, a list for each rank, as the runtime reads them from a GPU's log."""
    made, program = lowered(kernel, arch)
    log = emulator.Log()
    emulator.run_ranks(made, program, args, seed, log)
    build.kernels[NUMBER] = (made.name, list(made.sites))
    out = []
    for rank in range(len(args)):
        spans = tuple(
            Span(1000 * e.begin, 1000 * e.end, e.amount, e.site, e.peer, e.block, e.thread, NUMBER, 0)
            for e in log.events
            if e.rank == rank
        )
        own = list(_spans(GpuLog(0, spans, 0, (Sample(0, 0, 1),))))
        out.append(sorted(own, key=lambda e: e.ns))
    del build.kernels[NUMBER]
    return out


def timeline_of(events: list[list[Event]]) -> Timeline:
    logs = [{"rank": r, "lost": 0, "events": [asdict(e) for e in own]} for r, own in enumerate(events)]
    (timeline,) = merged(logs, len(events))
    validated(chrome([timeline]))
    return timeline


def kinds(timeline: Timeline, rank: int) -> Counter[str]:
    return Counter(s.kind for s in timeline.slices if s.rank == rank)


def test_a_ring_of_puts():
    """Three blocks a rank, one copy, signal and wait each; the last copy is cut off by the tensor's end."""
    args = [
        {"A": f32((600,), r), "inbox": f32((600,), 9), "arrived": zeros(3), "B": empty((600,), "float32")}
        for r in range(2)
    ]
    timeline = timeline_of(log_of(example("05_ring_shift", "kernel", 600, block=256), args))
    for rank in range(2):
        assert kinds(timeline, rank) == {"kernel": 3, "copy": 3, "signal": 3, "wait": 3 + 3 + 3}
        copies = sorted(s.more["bytes"] for s in timeline.slices if s.kind == "copy" and s.rank == rank)
        assert copies == [88 * 4, 1024, 1024]
    assert timeline.traffic.bytes.tolist() == [[0, 2400 + 24], [2400 + 24, 0]]
    names = Counter(s.name for s in timeline.slices if s.kind == "wait")
    assert names == {"arrived[0]": 2, "arrived[1]": 2, "arrived[2]": 2, "entry": 6, "exit": 6}
    for wait in (s for s in timeline.slices if s.name.startswith("arrived") and s.kind == "wait"):
        assert wait.name == f"arrived[{wait.more['block']}]"
        puts = [
            s
            for s in timeline.slices
            if s.kind == "copy" and s.rank != wait.rank and s.more["block"] == wait.more["block"]
        ]
        assert len(puts) == 1 and puts[0].start < puts[0].end < wait.end
    (launch,) = overlap.launches(timeline)
    assert launch == (timeline.start, timeline.end)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_gather_then_multiply(arch: str):
    args = [
        {
            "X": f32((2, 32, 32), r),
            "W": f32((32, 16), 5),
            "C": empty((2, 32, 16), "float32"),
            "here": zeros(2, 2),
        }
        for r in range(2)
    ]
    timeline = timeline_of(log_of(example("08_ag_gemm", "kernel", 32, 16, 32, 2, **SMALL), args, arch))
    for rank in range(2):
        found = kinds(timeline, rank)
        assert found["gemm"] == 4 and found["copy"] == 2 and found["signal"] == 2, found
    moved = {(k.source, k.target): k.bytes for k in overlap.links(timeline)}
    assert moved == {(0, 1): 32 * 32 * 4, (1, 0): 32 * 32 * 4}


def test_roles_of_a_hopper_kernel_log_for_themselves():
    """Consumers have products, the producer its loads and waits, the warps that put have the copies: each on a
    thread of its own, one span a loop."""
    timeline = timeline_of(log_of(pushed(128, 64, 128, 2), arguments(128, 64, 128, 2)))
    lanes = {(s.kind, timeline.threads[s.rank, s.thread].partition(", ")[2]) for s in timeline.slices}
    assert {
        ("gemm", ""),
        ("load", "producer"),
        ("copy", "copies"),
        ("signal", "copies"),
        ("kernel", ""),
    } <= lanes
    assert ("wait", "producer") in lanes and not {("gemm", "producer"), ("copy", "")} & lanes
    for rank in range(2):
        found = kinds(timeline, rank)
        assert found["gemm"] == found["load"] == 4 and found["copy"] == found["signal"] == 4, found
    assert all(s.file.endswith("test_communicator.py") and s.line > 0 for s in timeline.slices)
    assert any("waited for stages" in s.more for s in timeline.slices if s.kind == "gemm")
    moved = {(k.source, k.target): k.bytes for k in overlap.links(timeline)}
    assert moved == {(0, 1): 128 * 128 * 2, (1, 0): 128 * 128 * 2}


def test_arrows_go_from_signals_to_the_waits_that_they_end():
    """Counters of two axes, whose index the program computes."""
    timeline = timeline_of(log_of(pushed(128, 64, 128, 2), arguments(128, 64, 128, 2)))
    waits = {s.name for s in timeline.slices if s.kind == "wait" and s.name.startswith("here")}
    assert waits == {"here[0, 0]", "here[0, 1]", "here[1, 0]", "here[1, 1]"}
    assert timeline.arrows
    for arrow in timeline.arrows:
        assert (
            arrow.name in waits and arrow.source[0] != arrow.target[0] and arrow.source[2] < arrow.target[2]
        )


def test_a_counters_index():
    assert [_index("2, 3", k) for k in (0, 2, 3, 5)] == ["0, 0", "0, 2", "1, 0", "1, 2"]
    assert _index("?, 4", 9) == "2, 1" and _index("2, ?", 9) == "at 9" and _index("", 0) == ""
    assert _index("?", 7) == "7"


def test_packets():
    args = [
        {"A": f32((300,), r), "box": zeros(length((3, 512), 32)), "B": empty((300,), "float32")}
        for r in range(3)
    ]
    timeline = timeline_of(log_of(example("15_small_all_reduce", "kernel", 300, 3), args))
    for rank in range(3):
        puts = [s for s in timeline.slices if s.kind == "put_packets" and s.more["peer"] == rank]
        gets = [s for s in timeline.slices if s.kind == "get_packets" and s.rank == rank]
        assert {s.rank for s in puts} == {0, 1, 2} and gets and kinds(timeline, rank)["put_packets"]
        assert max(s.end for s in gets) > max(s.start for s in puts)
    moved = timeline.traffic.bytes
    assert (moved[~np.eye(3, dtype=bool)] == moved[0, 1]).all() and moved[0, 1] >= 300 // 2 * 16


def test_code_of_plain_kernels_has_no_trace_and_sites_are_theirs():
    """A kernel is printed the same whether others were instrumented before it; its instrumented twin has its
    statements, in order, among those that log."""
    kernel = pushed(128, 64, 128, 2)
    first = print_kernel(lowered(kernel, instrument=False)[0]).text
    logs = print_kernel(lowered(kernel)[0]).text
    again = driver.source_text(kernel.trace(), "cuda", "cuda:sm_90a")
    assert first == again and "ts::log" not in first and "trace.cuh" not in first
    assert "ts::log_span(" in logs and "#include <ts/trace.cuh>" in logs
    kept = [line.strip() for line in logs.splitlines() if "log" not in line and "began" not in line]
    kept_lines = iter(kept)
    body = [
        line.strip() for line in first.splitlines() if line.strip().startswith(("ts::mbarrier", "ts::wgmma"))
    ]
    assert body and all(any(line == other for other in kept_lines) for line in body)


def test_a_log_is_asked_for():
    made, program = lowered(pushed(128, 64, 128, 2))
    with pytest.raises(EmulationError, match="log=Log"):
        emulator.run_ranks(made, program, arguments(128, 64, 128, 2))


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_instrumented_kernels_compile_and_keep_products_in_flight(arch: str):
    kernel = (
        pushed(512, 256, 512, 2) if arch == "sm_90a" else example("15_small_all_reduce", "kernel", 300, 3)
    )
    code = print_kernel(lowered(kernel, arch)[0])
    made = toolchain.compile_cubin(code, arch)
    assert not made.serialised and b"ts_clock" in made.code


@pytest.mark.parametrize("stages", [1, 3])
def test_copies_of_warps_in_a_loop_are_one_span_a_rank(stages: int):
    """Of each warp and rank one, with the bytes of all its rows; by threads and by TMA from a ring."""
    args = [{**a, "rows": empty((3 * 23, 64), "float32")} for a in of_tokens(3)]
    timeline = timeline_of(log_of(spread(stages, 3), args))
    for rank, a in enumerate(args):
        goes = a["slots"] >= 0  # token i is that of warp i // 2 % 2 of block i % 2
        want = sorted(
            (d, 256 * int(goes[w::4, d].sum())) for w in range(4) for d in range(3) if goes[w::4, d].any()
        )
        copies = [s for s in timeline.slices if s.kind == "copy" and s.rank == rank]
        assert sorted((s.more.get("peer", rank), s.more["bytes"]) for s in copies) == want
        assert all(s.start < s.end for s in copies)


@pytest.mark.parametrize("looped", [False, True])
def test_puts_of_single_threads_in_a_loop_are_not_logged(looped: bool):
    """Outside of loops each is a slice."""

    @T.prim_func
    def told(index: T.SymmTensor((96,), "int32")):
        with T.Kernel(1, threads=32), T.Scale("device") as (rank, n), T.Scale("thread") as (i, of):
            if looped:
                for u in T.serial(i, 96, step=of):
                    T.put(u + 100 * rank, index[u], dst=(rank + 1) % n)
            else:
                T.put(i + 100 * rank, index[i], dst=(rank + 1) % n)

    args = [{"index": empty((96,), "int32")} for _ in range(2)]
    timeline = timeline_of(log_of(told, args))
    for rank in range(2):
        assert kinds(timeline, rank)["copy"] == (0 if looped else 32)


@needs_nvcc
@pytest.mark.parametrize("stages", [0, 3])
def test_a_dispatch_that_logs_compiles(stages: int):
    kernel = expert_kernels.dispatch(
        H=896, K=8, E=64, S=0, world=4, wide=896 if stages else 448, steps=1 if stages else 2, cut=1,
        movers=4, stages=stages, blocks=32, threads=256, dtype="int64",
    )  # fmt: skip
    text = print_kernel(lowered(kernel)[0]).text
    assert text.count("ts::log_joined(") >= 2 and "ts::log_joins(" in text
    toolchain.compile_cubin(print_kernel(lowered(kernel)[0]), "sm_90a")
