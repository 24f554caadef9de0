"""What makes a kernel slow because of how it is written is a warning at its line. That nothing of the house's
own warns is seen where all of it is compiled (corpus.compiled)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import tilescale
import tilescale.language as T
from tests.gpu.gemms import gemm
from tilescale import PerformanceWarning, advice
from tilescale.compiler.advice import Advice
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.passes import pipeline

WIDE = {"M": 768, "N": 512, "K": 256, "BM": 128, "BN": 256, "BK": 64}


def advised(kernel: Any, arch: str = "sm_90a") -> list[Advice]:
    program, _ = pipeline.run(kernel.trace(), target(arch))
    return [n for n in program.notes if isinstance(n, Advice)]


@pytest.mark.parametrize(
    "how, reason, hint",
    [
        (
            {"threads": 512, "BM": 256},
            "512 threads is no 1, 2 or 3 warpgroups",
            "threads=128, 256 or 384, and tiles",
        ),
        ({"threads": 64, "BN": 128}, "64 threads is no 1, 2 or 3 warpgroups", "threads=128"),
    ],
)
def test_threads_that_wgmma_cannot_use(how: dict[str, Any], reason: str, hint: str):
    (said,) = advised(gemm(**WIDE | {"stages": 2} | how))
    assert reason in said and hint in said.hint


def product(
    dtype: str = "float16",
    tile: str = "",
    sums: str = "float32",
    clear: str = "in front",
    by: str = "tile",
    trans_b: bool = False,
    step: int = 64,
) -> Any:
    """C = A · B, in which one thing costs it wgmma. ``tile``: the dtype of A's tile. ``clear``, ``by``: how
    sums begin, what is multiplied."""
    M = N = K = 128

    @T.prim_func
    def product(
        A: T.Tensor((M, K), dtype),
        B: T.Tensor((N, K) if trans_b else (K, N), tile or dtype),
        C: T.Tensor((M, N), sums),
    ):
        with T.Kernel(1, threads=128):
            a, b = (
                T.alloc_shared((M, step), tile or dtype),
                T.alloc_shared((N, step) if trans_b else (step, N), tile or dtype),
            )
            acc, rows, total = (
                T.alloc_fragment((M, N), sums),
                T.alloc_fragment((step, N), dtype),
                T.alloc_fragment((M,), "float32"),
            )
            if clear == "in front":
                T.clear(acc)
            T.clear(total)
            for k in T.Pipelined(K // step, num_stages=2):
                T.copy(A[0, k * step], a)
                T.copy(B[0, k * step] if trans_b else B[k * step, 0], b)
                if by == "reduce":
                    T.reduce_sum(a, total, dim=1)
                if by == "registers":
                    T.copy(b, rows)
                    T.gemm(a, rows, acc)
                else:
                    T.gemm(
                        a, b, acc, transpose_B=trans_b, clear_accum=k == 0 if clear == "condition" else False
                    )
            T.copy(acc, C)

    return product


@pytest.mark.parametrize(
    "kernel, reason, hint",
    [
        (gemm(100, 100, 100, BM=64, BN=64, threads=128), "rows of A are not known to be a multiple of 16 bytes", "A padded to rows of a multiple of 8"),
        (gemm(512, 512, 512, stages=9), "has 4 stages where 9 were asked for", "num_stages=4, or smaller tiles"),
        (product(sums="float16"), "T.gemm of float16 by float16 into float16", "an accumulator of float32"),
        (product(clear="condition"), "a condition for clear_accum", "T.clear(acc) in front of the loop, and T.gemm without clear_accum"),
        (product(tile="bfloat16"), "the copy of A changes the dtype", "a tile of float16, and the change of dtype"),
        (product(dtype="int8", sums="int32"), "T.gemm of int8, which wgmma takes with", "B as (N, K), and transpose_B=True"),
        (product(by="registers"), "T.gemm of rows, which lies in registers", "T.copy of rows into a shared tile"),
        (product(by="reduce"), "T.reduce reads a", "T.copy of a into a fragment, which T.reduce reads instead"),
    ],
    ids=str,
)  # fmt: skip
def test_what_was_written_so_that_it_does_without_the_engines(kernel: Any, reason: str, hint: str):
    (said,) = advised(kernel)
    assert reason in said and hint in said.hint and said.loc is not None


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_rows_that_no_call_promises(arch: str):
    K = T.dynamic("K")

    @T.prim_func
    def sums(
        A: T.Tensor((64, K), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")
    ):
        with T.Kernel(1, threads=128):
            a, b, acc = (
                T.alloc_shared((64, 64), "float16"),
                T.alloc_shared((64, 64), "float16"),
                T.alloc_fragment((64, 64), "float32"),
            )
            T.clear(acc)
            T.copy(B, b)
            for k in T.Pipelined(T.ceildiv(K, 64), num_stages=2):
                T.copy(A[0, k * 64], a)
                T.gemm(a, b, acc)
            T.copy(acc, C)

    (said,) = advised(sums, arch)
    assert "rows of A" in said and f"T.dynamic(…, multiple_of={8 if arch == 'sm_90a' else 2})" in said.hint


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_a_pipelined_loop_below_the_block(arch: str):
    @T.prim_func
    def below(A: T.Tensor((2, 256, 64), "float16"), C: T.Tensor((2, 64, 64), "float16")):
        with T.Kernel(1, threads=256):
            with T.Scale("warpgroup") as (w, n):
                a, sums = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float16")
                T.clear(sums)
                for k in T.Pipelined(4, num_stages=2):
                    T.copy(A[w, k * 64, 0], a)
                    for i, j in T.Parallel(64, 64):
                        sums[i, j] += a[i, j]
                T.copy(sums, C[w, 0, 0])

    assert advised(below, arch) == []


def test_a_pipelined_loop_below_a_block_whose_rings_have_a_producer():
    @T.prim_func
    def both(
        A: T.Tensor((128, 256), "bfloat16"),
        B: T.Tensor((256, 64), "bfloat16"),
        X: T.Tensor((4, 8, 64), "bfloat16"),
        C: T.Tensor((128, 64), "float32"),
        S: T.Tensor((4, 64), "float32"),
    ):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((128, 64), "bfloat16"), T.alloc_shared((64, 64), "bfloat16")
            acc = T.alloc_fragment((128, 64), "float32")
            T.clear(acc)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[0, k * 64], a)
                T.copy(B[k * 64, 0], b)
                T.gemm(a, b, acc)
            T.copy(acc, C)
            with T.Scale("warp") as (w, n):
                x, sums = T.alloc_shared((64,), "bfloat16"), T.alloc_fragment((64,), "float32")
                T.clear(sums)
                for k in T.Pipelined(8, num_stages=2):
                    T.copy(X[w, k, 0:64], x)
                    for j in T.Parallel(64):
                        sums[j] += x[j]
                T.copy(sums, S[w, 0:64])

    (said,) = advised(both)
    assert "once for each executor below the block" in said and said.hint.startswith(
        "T.Pipelined outside of the T.Scale"
    )
    assert said.loc is not None


def test_what_keeps_all_of_it_is_silent():
    assert advised(product()) == [] and advised(product(dtype="int8", sums="int32", trans_b=True)) == []


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
        assert (
            one.filename == gemm.__code__.co_filename
            and "T.Kernel(" in Path(one.filename).read_text().splitlines()[one.lineno - 1]
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerformanceWarning)
        with pytest.raises(PerformanceWarning):
            tilescale.compile(kernel, target="cuda:sm_90a")
        with advice.withheld():
            tilescale.compile(kernel, target="cuda:sm_90a")


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
def test_spills_are_warned_of(cold: None):
    with pytest.warns(
        PerformanceWarning,
        match="bytes of each thread's registers lie in memory.*\\n  write instead: smaller tiles",
    ):
        kernel = tilescale.compile(gemm(**WIDE, stages=2, threads=128), target="cuda:sm_90a")
    assert kernel.resources["spill_stores"] > 64


def test_a_place_is_warned_of_once(cold: None):
    said = {"slow": [{"text": "k is slow", "file": __file__, "line": 1, "hint": "something else"}]}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        advice.give(said)
        advice.give(said)
    assert [str(w.message) for w in seen] == ["k is slow\n  write instead: something else"]
