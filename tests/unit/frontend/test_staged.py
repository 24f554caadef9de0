"""T.Pipelined(num_stages=…) around T.ws: tiles and barriers that go to and fro have the stages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.ops.test_argmax import run
from tilescale.compiler.ir.operations import operations
from tilescale.compiler.tvm_compat import structural_walk, tirx

RNG = np.random.default_rng(11)


def product(
    M: int, N: int, K: int, stages: int, *, late: bool = False, scratch: bool = False, behind: bool = False,
    seldom: bool = False, viewed: bool = False, again: int = 0, width: int = 64,
) -> Any:  # fmt: skip
    """C = A B by one tile of each, which one warpgroup copies and the other multiplies.

    late: a round waits for the phase of the round before alone, scratch: it hands over something else besides,
    behind: the tile is read again behind the loop, seldom: a barrier has no phase in some rounds, viewed: the
    tile is read under another name, again: the loop runs so often.
    """
    turns = T.serial if again else range

    @T.prim_func
    def main(A: T.Tensor((M, K), "float16"), B: T.Tensor((K, N), "float16"), C: T.Tensor((M, N), "float16")):
        with T.Kernel(T.ceildiv(N, 64), T.ceildiv(M, 64), threads=256) as (bx, by):
            a, b = T.alloc_shared((64, width), "float16"), T.alloc_shared((width, 64), "float16")
            c, more = T.alloc_fragment((64, 64), "float32"), T.alloc_shared((4,), "int32")
            kept = T.alloc_shared((4,), "int32")
            ready, done = T.alloc_barrier(128), T.alloc_barrier(128)
            with T.ws(1):
                T.clear(c)
            for _ in turns(again or 1):
                for k in T.Pipelined(T.ceildiv(K, width), num_stages=stages):
                    with T.ws(0):
                        T.barrier_wait(done, (k + 1) % 2)
                        T.tma_copy(A[by * 64, k * width], a, barrier=ready)
                        T.tma_copy(B[k * width, bx * 64], b, barrier=ready)
                        if scratch:
                            T.fill(more, k)
                        if not seldom or k < 7:
                            T.barrier_arrive(ready)
                    with T.ws(1):
                        T.barrier_wait(ready, (k + 1) % 2 if late else k % 2)
                        T.gemm(T.reshape(a, (64, width)) if viewed else a, b, c)
                        if scratch:
                            T.copy(more, kept)
                        T.barrier_arrive(done)
            with T.ws(1):
                if behind:
                    T.gemm(a, b, c)
                T.copy(c, C[by * 64, bx * 64])

    return main


def shapes(kernel: Any) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}

    def look(s: Any) -> None:
        found[s.buffer.name] = [int(e) for e in s.buffer.ty.shape]

    structural_walk(kernel.trace().func.body, (tirx.AllocBuffer, look))
    return found


@pytest.mark.parametrize("target", ["sim", "sm_90a"])
@pytest.mark.parametrize("stages", [2, 3])
def test_products_by_stages(stages: int, target: str):
    """Of seven rounds, so that no number of stages divides them."""
    M, N, K = 64, 128, 7 * 64
    a, b = RNG.standard_normal((M, K)).astype("float16"), RNG.standard_normal((K, N)).astype("float16")
    kernel = product(M, N, K, stages)
    out = run(kernel, {"A": a, "B": b, "C": np.full((M, N), np.nan, "float16")}, target)
    np.testing.assert_allclose(
        out["C"].astype(float), a.astype(float) @ b.astype(float), rtol=1e-2, atol=1e-1
    )
    found = shapes(kernel)
    assert found["a"] == found["b"] == [stages, 64, 64] and found["ready"] == found["done"] == [stages]


def test_a_copy_waits_for_the_product_so_many_rounds_before():
    waits = [
        str(c.args[1])
        for c, op in operations(product(64, 64, 448, 3).trace().func.body)
        if op.name == "mbarrier_wait_parity"
    ]
    assert sorted(w.split("//")[1] for w in waits) == [" 3 % 2", " 3 + 1) % 2"], waits


@pytest.mark.parametrize(
    "how",
    [
        {"late": True}, {"scratch": True}, {"behind": True}, {"seldom": True}, {"again": 2}, {"viewed": True},
        {"width": 512},  # 3 stages of 128 KB
    ],
    ids=str,
)  # fmt: skip
def test_what_hands_over_otherwise_stays_as_it_is_written(how: dict[str, Any]):
    found = shapes(product(64, 64, 1024, 3, **how))
    assert found["a"] == [64, how.get("width", 64)] and found["ready"] == [1]


def test_two_loops_have_stages_of_their_own():
    @T.prim_func
    def kernel(A: T.Tensor((64, 256), "float16"), B: T.Tensor((64, 256), "float16")):
        with T.Kernel(1, threads=256):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            f, ready, done = T.alloc_fragment((64, 64), "float16"), T.alloc_barrier(128), T.alloc_barrier(128)
            g, there, gone = T.alloc_fragment((64, 64), "float16"), T.alloc_barrier(128), T.alloc_barrier(128)
            for k in T.Pipelined(4, num_stages=2):
                with T.ws(0):
                    T.barrier_wait(done, (k + 1) % 2)
                    T.tma_copy(A[0, k * 64], a, barrier=ready)
                    T.barrier_arrive(ready)
                with T.ws(1):
                    T.barrier_wait(ready, k % 2)
                    T.copy(a, f)
                    T.copy(f, B[0, k * 64])
                    T.barrier_arrive(done)
            for k in T.Pipelined(3, num_stages=3):
                with T.ws(1):
                    T.barrier_wait(gone, (k + 1) % 2)
                    T.tma_copy(A[0, k * 64 + 64], b, barrier=there)
                    T.barrier_arrive(there)
                with T.ws(0):
                    T.barrier_wait(there, k % 2)
                    T.copy(b, g)
                    for i, j in T.Parallel(64, 64):
                        g[i, j] = -g[i, j]
                    T.barrier_arrive(gone)

    found = shapes(kernel)
    assert found["a"] == [2, 64, 64] and found["b"] == [3, 64, 64] and found["there"] == [3]
    x = RNG.standard_normal((64, 256)).astype("float16")
    assert (run(kernel, {"A": x, "B": np.zeros_like(x)}, "sim")["B"] == x).all()
