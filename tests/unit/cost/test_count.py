"""Work counted from tile IR against closed forms and against plain enumeration."""

from __future__ import annotations

import math
from typing import Any

import pytest

import tilescale.language as T
from tests.gpu.gemms import gemm
from tests.kernels import refused
from tilescale.compiler import cost
from tilescale.compiler.cost import Gemm
from tilescale.errors import TileValueError

N = T.dynamic("n")


def test_a_gemm_exactly():
    c = cost.count(gemm(4096, 2048, 1024).trace())
    assert (c.grid, c.blocks, c.threads, c.longest) == ((8, 32), 256, 256, 1.0)
    assert (
        c.work.matrix == {Gemm("bfloat16", 128, 256, 64): 16}
        and c.total.matrix_flops == 2 * 4096 * 2048 * 1024
    )
    assert c.work.read == {"A": 128 * 1024 * 2, "B": 1024 * 256 * 2} and c.work.written == {
        "C": 128 * 256 * 2
    }
    assert c.least_bytes == 2 * (4096 * 1024 + 1024 * 2048 + 4096 * 2048)
    (loop,) = c.loops
    assert (loop.entries, loop.rounds, loop.stages, loop.work.read) == (
        1,
        16,
        4,
        {"A": 128 * 64 * 2, "B": 64 * 256 * 2},
    )
    assert c.shared_bytes == 4 * (128 * 64 + 64 * 256) * 2 and c.fragment_bytes == 128 * 256 * 4


@pytest.mark.parametrize("m, n, k", [(1000, 600, 100), (129, 257, 65), (100, 4100, 64)])
def test_what_lies_outside_is_not_moved(m: int, n: int, k: int):
    c = cost.count(gemm(m, n, k).trace())
    high, wide = -(-m // 128), -(-n // 256)
    total = c.total
    assert total.read["A"] == pytest.approx(m * k * 2 * wide, rel=0.05) and total.read["B"] == pytest.approx(
        n * k * 2 * high, rel=0.05
    )
    assert total.written["C"] == pytest.approx(m * n * 2, rel=1e-6)


@pytest.mark.parametrize("m, n, blocks", [(4096, 4096, 132), (2000, 1000, 20)])
def test_blocks_that_stay_do_the_same_work(m: int, n: int, blocks: int):
    once, stays = cost.count(gemm(m, n, 512).trace()), cost.count(gemm(m, n, 512, blocks=blocks).trace())
    assert stays.total.matrix_flops == pytest.approx(once.total.matrix_flops, rel=1e-6)
    assert stays.loops[0].entries == pytest.approx(once.blocks / blocks)
    assert stays.total.read["B"] == pytest.approx(once.total.read["B"], rel=0.02)


def causal(S: int, BM: int, BN: int) -> Any:
    @T.prim_func
    def kernel(A: T.Tensor((S, 64), "float16"), B: T.Tensor((S, 64), "float16")):
        with T.Kernel(T.ceildiv(S, BM), threads=128) as bx:
            a, b, s = (
                T.alloc_shared((BM, 64), "float16"),
                T.alloc_shared((BN, 64), "float16"),
                T.alloc_fragment((BM, BN), "float32"),
            )
            T.copy(A[bx * BM, 0], a)
            for t in T.Pipelined(T.ceildiv((bx + 1) * BM, BN), num_stages=2):
                T.copy(B[t * BN, 0], b)
                T.gemm(a, b, s, transpose_B=True, clear_accum=True)
                if t * BN > 0:
                    for i, j in T.Parallel(BM, BN):
                        s[i, j] = T.exp2(s[i, j] * 0.5)

    return kernel


@pytest.mark.parametrize("S, BM, BN", [(2048, 64, 64), (65536, 64, 32), (512, 128, 64)])
def test_triangles_are_means_over_blocks(S: int, BM: int, BN: int):
    c = cost.count(causal(S, BM, BN).trace())
    rounds = [-(-(bx + 1) * BM // BN) for bx in range(S // BM)]
    exact = S // BM <= 512
    assert c.loops[0].rounds == pytest.approx(sum(rounds) / len(rounds), rel=1e-9 if exact else 0.02)
    assert c.longest == pytest.approx(max(rounds) / (sum(rounds) / len(rounds)), rel=0.05)
    later = sum(r - 1 for r in rounds) * BM * BN
    assert c.total.special == pytest.approx(later, rel=0.1) and c.total.element == pytest.approx(
        later, rel=0.1
    )


def test_elementwise_kernels():
    @T.prim_func
    def kernel(A: T.Tensor((N, 40), "float16"), B: T.Tensor((N, 40), "float32"), by: T.float32):
        with T.Kernel(T.ceildiv(N, 16), threads=64) as bx:
            for i, j in T.Parallel(16, 64):
                if j < 40:
                    B[bx * 16 + i, j] = T.exp(A[bx * 16 + i, j] * by + 1.0)

    c = cost.count(kernel.trace(), {"n": 1000})
    assert c.grid == (63,) and c.tensors == {"A": 80_000, "B": 160_000}
    assert c.total.read["A"] == pytest.approx(80_000, rel=0.1) and c.total.written["B"] == pytest.approx(
        160_000, rel=0.1
    )
    assert c.total.element == pytest.approx(2 * c.total.special) and c.least_bytes <= 240_000
    with refused(TileValueError, "the grid of kernel depends on"):
        cost.count(kernel.trace())


def test_executors_reductions_and_peers():
    @T.prim_func
    def kernel(A: T.Tensor((128, 64), "float32"), S: T.SymmTensor((128, 64), "float32")):
        with T.Kernel(2, threads=128):
            t, total = T.alloc_fragment((128, 64), "float32"), T.alloc_fragment((128,), "float32")
            T.copy(A, t)
            T.reduce_sum(t, total, dim=1)
            with T.Scale("warp") as (warp, warps):
                own = T.alloc_shared((64,), "float32")
                T.fill(own, 1)
                for i in T.serial(warps):
                    A[warp, i] = 1.0
            with T.Scale("device") as (rank, world):
                T.copy(A, S, dst=0)

    c = cost.count(kernel.trace())
    assert c.work.element == 128 * 64 and c.work.written == {"A": 4 * 4 * 4}
    assert c.shared_bytes == 4 * 64 * 4  # each warp has one
    assert c.work.remote == 128 * 64 * 4 and c.work.read["A"] == 2 * 128 * 64 * 4


def test_what_memory_decides_is_counted_once_and_said():
    @T.prim_func
    def kernel(L: T.Tensor((8,), "int32"), A: T.Tensor((4096,), "float32")):
        with T.Kernel(8, threads=32) as bx:
            for k in T.serial(L[bx]):
                for i in T.Parallel(32):
                    A[k * 32 + i] = A[k * 32 + i] + 1.0

    c = cost.count(kernel.trace())
    assert (
        c.work.element == 32
        and len(c.notes) == 1
        and "a loop whose length memory decides is counted once" in c.notes[0]
    )


def test_the_roofline():
    h200 = cost.machine_of("sm_90a")
    assert h200 is not None and h200.name == "H200" and cost.machine_of("sm_86") is None
    big = cost.roofline(cost.count(gemm(8192, 8192, 8192).trace()), h200)
    assert (
        big.bound == "tensor cores"
        and big.seconds == pytest.approx(2 * 8192**3 / 989e12)
        and big.intensity > big.balance
    )
    thin = cost.roofline(cost.count(gemm(16, 8192, 8192, BM=64).trace()), h200)
    assert thin.bound == "memory" and thin.seconds == pytest.approx(
        2 * (8192 * 8192 + 2 * 16 * 8192) / 4.8e12, rel=0.01
    )
    assert math.isclose(h200.vector_rate, 61.8e12, rel_tol=0.01)  # 67 TFLOP/s at the highest clock
