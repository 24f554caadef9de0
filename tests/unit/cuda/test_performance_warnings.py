"""What makes a kernel slow because of how it is written is a warning at its line. That nothing of the house's own
warns is seen where all of it is compiled (corpus.compiled)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import tilescale
from tests.gpu.gemms import gemm
from tilescale import PerformanceWarning, advice
from tilescale.compiler.advice import Advice
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.passes import pipeline

WIDE = {"M": 768, "N": 512, "K": 256, "BM": 128, "BN": 256, "BK": 64}


def advised(kernel: Any, arch: str = "sm_90a") -> list[Advice]:
    program, _ = pipeline.run(kernel.trace(), keep=False, passes=pipeline.gpu_passes(arch))
    return [n for n in program.notes if isinstance(n, Advice)]


@pytest.mark.parametrize(
    "how, reason, hint",
    [
        ({"threads": 512, "BM": 256}, "512 threads is no 1, 2 or 3 warpgroups", "threads=128, 256 or 384, and tiles"),
        ({"threads": 64, "BN": 128}, "64 threads is no 1, 2 or 3 warpgroups", "threads=128"),
    ],
)
def test_threads_that_wgmma_cannot_use(how: dict[str, Any], reason: str, hint: str):
    (said,) = advised(gemm(**WIDE | {"stages": 2} | how))
    assert reason in said and hint in said.hint


def test_what_no_number_of_threads_mends():
    assert advised(gemm(**WIDE, stages=2, threads=256)) == []
    assert advised(gemm(**WIDE | {"BM": 32, "BN": 64}, stages=2, threads=128)) == []


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILESCALE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(advice, "_registry", {})


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
def test_it_is_warned_of_at_the_line_cold_and_warm(cold: None):
    kernel = gemm(**WIDE | {"BM": 64, "BN": 64}, stages=2, threads=64)
    for cached in (False, True):
        with pytest.warns(PerformanceWarning, match="write instead: threads=128") as seen:
            assert tilescale.compile(kernel, target="cuda:sm_90a").from_cache == cached
        (one,) = [w for w in seen if w.category is PerformanceWarning]
        assert one.filename == gemm.__code__.co_filename and "T.Kernel(" in Path(one.filename).read_text().splitlines()[one.lineno - 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerformanceWarning)
        with pytest.raises(PerformanceWarning):
            tilescale.compile(kernel, target="cuda:sm_90a")
        with advice.withheld():
            tilescale.compile(kernel, target="cuda:sm_90a")


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
def test_spills_are_warned_of(cold: None):
    with pytest.warns(PerformanceWarning, match="bytes of each thread's registers lie in memory.*\\n  write instead: smaller tiles"):
        kernel = tilescale.compile(gemm(**WIDE, stages=2, threads=128), target="cuda:sm_90a")
    assert kernel.resources["spill_stores"] > 64


def test_a_place_is_warned_of_once(cold: None):
    said = {"slow": [{"text": "k is slow", "file": __file__, "line": 1, "hint": "something else"}]}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        advice.give(said)
        advice.give(said)
    assert [str(w.message) for w in seen] == ["k is slow\n  write instead: something else"]
