"""The report of a kernel's resources and bound, as people read it."""

from __future__ import annotations

from pathlib import Path

import pytest

import tilescale
import tilescale.language as T
from tests.gpu.gemms import gemm
from tests.kernels import refused
from tests.unit.cuda.test_launcher import needs_nvcc
from tests.unit.cuda.test_promises import product
from tilescale.errors import TileValueError
from tilescale.kernel import NoResources

N = T.dynamic("n")


@T.prim_func
def add(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32")):
    with T.Kernel(T.ceildiv(N, 1024), threads=128) as bx:
        for i in T.Parallel(1024):
            B[bx * 1024 + i] = B[bx * 1024 + i] + A[bx * 1024 + i]


@needs_nvcc
def test_a_gemm(tmp_path: Path):
    made = tilescale.compile(gemm(4096, 4096, 4096, 128, 128, 64, 4, 256), target="cuda:sm_90a")
    report = made.report(latency=0.200)
    text = str(report)
    assert report.roofline.bound == "tensor cores" and report.share == pytest.approx(0.1390 / 0.2, rel=0.01)
    assert report.waves == pytest.approx(1024 / (132 * made.resources["blocks"]))
    for line in (
        f"{made.resources['registers']} a thread; spills 0 B stored, 0 B loaded",
        "32 × 32 = 1,024 blocks on 132 multiprocessors:",
        "137.4 GFLOP of bfloat16, in tiles of 128×128×64",
        "67.11 MB read and 33.55 MB written at least; tiles move 2.181 GB",
        "64 rounds of 32.77 kB (line ",
        "stages         4 (line ",
        "a by TMA (line ",
        "C_staged → C by TMA (line ",
        "1365 FLOP/B; H200 is balanced at 206",
        "139 µs, by tensor cores at the peak of H200",
        "200 µs (687.2 TFLOP/s): 69% of the bound",
    ):
        assert line in text, text
    assert (
        report.loops == [{"line": report.loops[0]["line"], "asked": 4, "stages": {"a, b": 4}, "ahead": True}]
        and not report.notes
    )
    loaded = tilescale.load(made.export(tmp_path / "gemm.tsk")).report(latency=0.2)
    assert loaded.copies == report.copies and "by TMA" in str(loaded)
    assert (
        loaded.count is None
        and loaded.share is None
        and "registers" in str(loaded)
        and "products" not in str(loaded)
    )


@needs_nvcc
def test_symbolic_extents_are_given():
    made = tilescale.compile(add, target="cuda:sm_80")
    text = str(made.report(n=1 << 24))
    assert "16384 blocks on 108 multiprocessors" in text and "16.78 M operations" in text
    assert "98.74 µs, by memory at the peak of A100 80GB" in text and "measured" not in text
    with refused(TileValueError, "the grid of add depends on"):
        made.report()


def test_a_processor_has_no_bound():
    report = tilescale.compile(add, target="cpu").report(n=1000)
    assert report.roofline is None and report.waves is None
    assert "8 kB read and 4 kB written at least" in str(report) and "bound" not in str(report)


@needs_nvcc
def test_what_became_of_copies_and_stages():
    """A product whose rows no call promises: what the author asked for and does not get is said, with the
    reason, also from the disk cache."""
    made = tilescale.compile(product(1), target="cuda:sm_90a")
    text = str(made.report(m=256, n=256, k=256))
    assert "A → a by threads, element by element (line " in text and "c → C by threads" in text
    assert (
        "none of the 3 asked for: each round copies, then computes (line " in text and "3 stages" not in text
    )
    assert "note           gemm does without TMA (line " in text and "multiple_of=8) promises it" in text
    made = tilescale.compile(product(4), target="cuda:sm_80")
    assert "by cp.async, 8 bytes at a time" in str(made.report(m=256, n=256, k=256))
    again = tilescale.compile(product(1), target="cuda:sm_90a")
    assert again.report(m=256, n=256, k=256).notes and again.compiled["copies"][0]["of"] == "A → a"


@needs_nvcc
def test_fewer_stages_than_were_asked_for():
    made = tilescale.compile(gemm(512, 512, 512, 128, 128, 64, 12, 256), target="cuda:sm_90a")
    text = str(made.report())
    assert "of 12 asked for (line " in text and any(
        "12 were asked for" in note for note in made.report().notes
    ), text


def test_what_a_report_refuses():
    made = tilescale.compile(add, target="cpu")
    for wrong in (-5, "x", 1.5):
        with refused(TileValueError, f"add has no report with n={wrong!r}", expected="0 or more"):
            made.report(n=wrong)
    assert made.report(n=0).count.blocks == 0
    with refused(TileValueError, "has no extent 'm'", expected="n"):
        made.report(m=3)
    with refused(
        NoResources, "add is a kernel of the target cpu, which takes nothing of a GPU", write='target="cuda"'
    ):
        _ = made.resources
    assert not hasattr(made, "resources")
