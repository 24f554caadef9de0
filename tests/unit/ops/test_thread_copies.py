"""T.ptx_cp_async under a predicate, in T.Parallel, and by TVM's pointers, where threads copy."""

from __future__ import annotations

import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import refused
from tests.unit.ops.test_argmax import TARGETS, run
from tilescale.errors import TileTypeError


@T.prim_func
def rows(A: T.Tensor((8, 30), "float16"), B: T.Tensor((2, 8, 32), "float16")):
    with T.Kernel(1, threads=128):
        first, then = T.alloc_shared((8, 32), "float16"), T.alloc_shared((8, 32), "float16")
        for i, j in T.Parallel(8, 16):
            T.ptx_cp_async(
                T.tvm_access_ptr(T.type_annotation("float16"), first.data, i * 32 + j * 2, 2, 2),
                T.tvm_access_ptr(T.type_annotation("float16"), A.data, i * 30 + j * 2, 2, 1),
                2,
                predicate=T.And(j < 15, i < 7),
            )
        t = T.get_thread_binding()
        T.ptx_cp_async(
            T.access_ptr(then[t // 16, t % 16 * 2], "w", 2),
            T.access_ptr(A[t // 16, t % 16 * 2], "r", 2),
            2,
            predicate=T.And(t % 16 < 15, t < 100),
        )
        T.ptx_commit_group()
        T.ptx_wait_group(0)
        T.sync_threads()
        T.copy(first, B[0, :, :])
        T.copy(then, B[1, :, :])


@pytest.mark.parametrize("target", [t for t in TARGETS if t != "cpu"])  # which has none of its own
def test_zeros_where_the_predicate_does_not_hold(target: str):
    a = np.random.default_rng(3).standard_normal((8, 30)).astype(np.float16)
    out = run(rows, {"A": a, "B": np.full((2, 8, 32), np.nan, np.float16)}, target)["B"]
    want = np.zeros((2, 8, 32), np.float16)
    want[0, :7, :30], want[1, :, :30] = a[:7], a
    want[1].reshape(-1)[200:] = 0
    np.testing.assert_array_equal(out, want)


def test_a_pointer_is_of_the_memory_s_dtype():
    @T.prim_func
    def kernel(A: T.Tensor((8, 30), "float16")):
        with T.Kernel(1):
            T.tvm_access_ptr(T.type_annotation("float32"), A.data, 0, 4, 1)

    with refused(TileTypeError, "T.tvm_access_ptr of float32", expected="X.data"):
        kernel.trace()
