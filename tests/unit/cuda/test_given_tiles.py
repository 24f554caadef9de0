"""Tiles of shared memory that the author fills and adds to a tensor: TMA reads them where they lie."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree
from tests.unit.cuda.test_attention_backward import FAULTS, arguments, loop_of, shows
from tests.unit.cuda.test_hopper import lowered
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.layout import make_linear_layout

WIDE = 64


def sums(rounds: int, loop: str = "tile", also: str = "") -> Any:
    """For each block x: C[n] += Yᵀ·Bₓ with Y = Bₓ·Aₙᵀ - vₙ as bfloat16, and Dₓ += sum of Y·Aₙ. ``loop``: by
    what C is updated. ``also``: what else becomes of the tile that C takes."""

    @T.prim_func
    def sums(
        A: T.Tensor((rounds * 64, WIDE), "bfloat16"),
        V: T.Tensor((rounds, 64), "float32"),
        B: T.Tensor((256, WIDE), "bfloat16"),
        C: T.Tensor((rounds * 64 - 20, WIDE), "float32"),
        D: T.Tensor((256, WIDE), "float32"),
    ):
        with T.Kernel(2, threads=256) as bx:
            a, b = T.alloc_shared((64, WIDE), "bfloat16"), T.alloc_shared((128, WIDE), "bfloat16")
            v, whole = T.alloc_shared((64,), "float32"), T.alloc_shared((128, 64), "bfloat16")
            x, y = T.alloc_fragment((128, 64), "float32"), T.alloc_fragment((128, 64), "bfloat16")
            c, d = T.alloc_fragment((64, WIDE), "float32"), T.alloc_fragment((128, WIDE), "float32")
            given, last = T.alloc_shared((64, WIDE), "float32"), T.alloc_shared((128, WIDE), "float32")
            if also == "laid":
                T.annotate_layout({given: make_linear_layout(given)})
            T.copy(B[bx * 128, 0], b)
            T.clear(d)
            for n in T.Pipelined(rounds, num_stages=2):
                T.copy(A[n * 64, 0], a)
                T.copy(V[n, 0], v)
                T.gemm(b, a, x, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(128, 64):
                    x[i, j] = x[i, j] - v[j]
                T.copy(x, y)
                T.copy(y, whole)
                T.gemm(whole, b, c, transpose_A=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                T.gemm(y, a, d)
                if also == "inside":
                    inner = T.alloc_shared((64, WIDE), "float32")
                    T.copy(c, inner)
                    T.atomic_add(C[n * 64, 0], inner)
                elif loop == "tile":
                    T.copy(c, given)
                    T.atomic_add(C[n * 64, 0], given)
                else:
                    for i, j in T.Parallel(64, WIDE):
                        T.atomic_add(C[n * 64 + i, j], c[i, j])
                if also == "read":
                    for i, j in T.Parallel(128, WIDE):
                        d[i, j] += given[i % 64, j] * 0
            T.copy(d, last)
            T.atomic_add(D[bx * 128, 0], last)

    return sums


def given_arguments(rounds: int) -> dict[str, Any]:
    made = arguments(rounds)
    return {**made, "D": np.arange(256 * WIDE, dtype="float32").reshape(256, WIDE) % 7}


def read_by_tma(text: str) -> set[str]:
    return set(re.findall(r"ts::tma_reduce_add\(\w+, &(\w+)\[", text))


@pytest.mark.parametrize("loop", ["tile", "threads"])
@pytest.mark.parametrize("rounds, seed", [(1, 0), (2, 1), (4, 2)])
def test_tma_reads_them(loop: str, rounds: int, seed: int):
    """The last one takes the bytes of the loop's. Threads may update a tensor in front of all of TMA's."""
    kernel = sums(rounds, loop)
    made, program = lowered(kernel)
    text = print_kernel(made).text
    assert read_by_tma(text) == ({"given", "last"} if loop == "tile" else {"last"}) and program.notes == []
    assert ("ts::red_add" in text) == (loop == "threads")
    agree(kernel, given_arguments(rounds), seed=seed, exact=True)


def test_threads_meet_twice_a_round():
    """Neither for the reads of the round before, which are awaited in front of a barrier that is there."""
    text = loop_of(print_kernel(lowered(sums(6))[0]).text)
    assert text.count("ts::barrier_sync") == 2 and text.count("ts::bulk_wait_read<0>") == 1
    assert text.index("ts::bulk_wait_read") < text.index("reads whole") < text.index("ts::tma_reduce_add")


@pytest.mark.parametrize("also", ["read", "laid", "inside"])
def test_tiles_that_something_else_needs_stay_the_threads(also: str):
    """The other updates are theirs then, too: each releases what came before it."""
    kernel = sums(2, also=also)
    text = print_kernel(lowered(kernel)[0]).text
    assert read_by_tma(text) == {"last"} and "ts::red_add4_f32(" in text
    agree(kernel, given_arguments(2), exact=True)


@pytest.mark.parametrize("fault", [f for f in FAULTS if f != "numbers of another round"])
def test_faults_are_found(fault: str):
    assert shows(sums(4), given_arguments(4), fault)
