"""Instrumented kernels on the GPU, and `tilescale trace --target cuda` with two ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import tilescale
from tests.gpu.gemms import gemm
from tests.gpu.jobs import ROOT
from tests.gpu.test_ranks import KEPT
from tests.trace_events import validated
from tilescale import native

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
M, N, K, BM, BN = 512, 768, 1024, 128, 256
BLOCKS = (M // BM) * (N // BN)


@pytest.fixture(autouse=True)
def empty_log() -> Iterator[None]:
    native.clear_events()
    yield
    native.clear_events()


def operands() -> tuple[Any, Any, Any]:
    a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((M, K), (K, N)))
    return a, b, torch.empty(M, N, device="cuda", dtype=torch.bfloat16)


def spans() -> list[tuple[str, int, int]]:
    """(kind, begin, end) of what was logged, in the host's ns."""
    begun: dict[Any, list[int]] = {}
    out = []
    for e in native.events():
        key = (e.block, e.site, e.thread)
        if e.phase == "begin":
            begun.setdefault(key, []).append(e.ns)
        else:
            out.append((e.kind, begun[key].pop(0), e.ns))
    assert not any(begun.values())
    return out


def test_blocks_and_loops_of_products_and_how_clocks_agree():
    run, (a, b, c) = tilescale.compile(gemm(M, N, K, BM, BN), target="cuda", instrument=True), operands()
    before = time.monotonic_ns()
    for _ in range(5):  # from the third on by a graph of the launcher's
        run(a, b, c)
    torch.cuda.synchronize()
    after = time.monotonic_ns()
    torch.testing.assert_close(c, a @ b, rtol=2e-2, atol=1e-1)
    found = spans()
    (log,) = native.gpu_logs()
    assert Counter(kind for kind, _, _ in found)["kernel"] == 5 * BLOCKS
    assert Counter(kind for kind, _, _ in found)["gemm"] == 5 * BLOCKS
    slack = log.within + log.tick + 1000
    assert all(before - slack <= begin <= end <= after + slack for _, begin, end in found), (
        before,
        after,
        min(begin for _, begin, _ in found),
        max(end for _, _, end in found),
        log.samples,
    )
    assert 0 < log.within < 100_000 and log.lost == 0 and log.tick > 0


def test_replayed_graphs_log():
    run, (a, b, c) = tilescale.compile(gemm(M, N, K, BM, BN), target="cuda", instrument=True), operands()
    run(a, b, c)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(a, b, c)
    native.clear_events()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert Counter(kind for kind, _, _ in spans())["kernel"] == 3 * BLOCKS


def test_a_kernel_first_launched_in_a_capture_compares_clocks_too():
    run, (a, b, c) = tilescale.compile(gemm(M, N, 2 * K, BM, BN), target="cuda", instrument=True), operands()
    a, b = torch.cat([a, a], 1), torch.cat([b, b], 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(a, b, c)
    graph.replay()
    torch.cuda.synchronize()
    assert Counter(kind for kind, _, _ in spans())["kernel"] == BLOCKS


def test_two_ranks(tmp_path: Path):
    """On one GPU they take turns; what was sent, and what came before what, is the same as on two."""
    command = [sys.executable, "-m", "tilescale.launch", "trace", "-n", "2", "--target", "cuda"]
    command += ["-o", str(tmp_path / "trace.json"), "--svg", str(tmp_path / "trace.svg")]
    command += ["examples/08_ag_gemm.py", "--m", "256", "--n", "256", "--k", "256"]
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    own = {"TILESCALE_HEAP_SIZE": "128M", "TILESCALE_WAIT_TIMEOUT": "20"}
    ran = subprocess.run(
        command, env=os.environ | kept | own, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    clocks = re.findall(
        r"rank (\d): GPU \d+'s clock, in steps of \d+ ns, is known to ± ([\d.]+) µs", ran.stdout
    )
    assert [rank for rank, _ in clocks] == ["0", "1"], ran.stdout
    events = validated(tmp_path / "trace.json")
    sent: Counter[tuple[int, int]] = Counter()
    for e in events:
        if e["ph"] == "X" and e["cat"] == "copy" and "peer" in e["args"]:
            sent[e["pid"], e["args"]["peer"]] += e["args"]["bytes"]
    part = 256 * 256 * 2  # of bfloat16
    launches = max(1, sent[0, 1] // part)
    assert sent == {(0, 1): launches * part, (1, 0): launches * part}, sent
    waits = [
        e for e in events if e["ph"] == "X" and e["cat"] == "wait" and e["name"].startswith("wait here[")
    ]
    signals = [e for e in events if e["ph"] == "X" and e["cat"] == "signal"]
    # The clocks of both ranks are within some µs: no wait ends before the first signal for it was begun.
    slack = 2 * max(float(within) for _, within in clocks) + 2
    for wait in waits:
        others = [s["ts"] for s in signals if s["pid"] != wait["pid"]]
        assert min(others) <= wait["ts"] + wait["dur"] + slack
    ElementTree.fromstring((tmp_path / "trace.svg").read_text(encoding="utf-8"))
