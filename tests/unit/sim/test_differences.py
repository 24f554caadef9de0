"""Differences between the simulator and the CPU target that the fuzzer found, made small. Each runs on both and must agree to the bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import refused, run
from tilescale.compiler.sim.run import launch
from tilescale.errors import LaunchError, TileTypeError

UNSIGNED = ("uint8", "uint16", "uint32", "uint64")


def agree(kernel: Any, args: dict[str, Any], *, found: tuple[str, ...] = ()) -> dict[str, Any]:
    """What both targets make of the arguments; the simulator finds nothing but ``found``."""
    done = launch(kernel, 1, args)
    assert done.report.kinds == set(found), done.report
    mine = {name: a.copy() if isinstance(a, np.ndarray) else a for name, a in args.items()}
    run(kernel)(*mine.values())
    for name, a in done.arrays[0].items():
        wide = a.astype(np.float64) if "float" in str(a.dtype) else a
        np.testing.assert_array_equal(wide, mine[name].astype(wide.dtype), err_msg=name)
    return mine


def zeros(*shape: int, dtype: Any = np.float32) -> Any:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_unsigned_integers_wrap(dtype: str):
    @T.prim_func
    def main(A: T.Tensor((64,), dtype), B: T.Tensor((64,), dtype), C: T.Tensor((7, 64), dtype)):
        with T.Kernel(1):
            for i in T.Parallel(64):
                C[0, i] = (A[i] * T.cast(4, dtype)) // T.cast(4, dtype)
                C[1, i] = A[i] + B[i]
                C[2, i] = A[i] - B[i]
                C[3, i] = A[i] * B[i] - B[i] * T.cast(3, dtype)
                C[4, i] = -A[i]
                C[5, i] = T.cast(3, dtype) - T.cast(5, dtype) + B[i]
                C[6, i] = T.truncdiv(A[i], T.max(T.abs(B[i]), T.cast(1, dtype)))

    draw = np.random.default_rng(0)
    a, b = (draw.integers(0, np.iinfo(dtype).max, 64, dtype, endpoint=True) for _ in range(2))
    c = agree(main, {"A": a, "B": b, "C": zeros(7, 64, dtype=dtype)})["C"]
    with np.errstate(over="ignore"):
        assert (c[:5] == [(a * np.array(4, dtype)) // np.array(4, dtype), a + b, a - b, a * b - b * np.array(3, dtype), -a]).all()
    assert c[5, 0] == (int(b[0]) - 2) % 2 ** (8 * b.itemsize)


def test_a_fill_reads_its_value_once():
    """Also where the value is an element of the tile that is filled."""

    @T.prim_func
    def main(C: T.Tensor((4, 8), "int32")):
        with T.Kernel(1):
            t = T.alloc_shared((4, 8), "int32")
            for i, j in T.Parallel(4, 8):
                t[i, j] = i * 8 + j + 1
            T.fill(t[1:3, 0:8], 3 - t[1, 1])
            T.copy(t, C)

    assert (agree(main, {"C": zeros(4, 8, dtype=np.int32)})["C"][1:3] == 3 - 10).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_a_nan_wins_in_max_and_min(dtype: str):
    @T.prim_func
    def main(A: T.Tensor((16,), dtype), B: T.Tensor((16,), dtype), C: T.Tensor((5, 16), dtype)):
        with T.Kernel(1):
            for i in T.Parallel(16):
                C[0, i] = T.max(A[i], B[i])
                C[1, i] = T.min(A[i], B[i])
                C[2, i] = T.max(A[i], B[i] - A[i])
                C[3, i] = T.max(A[i], T.cast(0, dtype))
                C[4, i] = T.min(T.cast(0, dtype), A[i])

    some = [np.nan, np.inf, -np.inf, -3.0]
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    a, b = (np.array(v).astype(kind) for v in ([x for x in some for _ in some], [y for _ in some for y in some]))
    c = agree(main, {"A": a, "B": b, "C": zeros(5, 16, dtype=kind)})["C"].astype(np.float64)
    either = np.isnan(a.astype(np.float64)) | np.isnan(b.astype(np.float64))
    assert (np.isnan(c[:2]) == either).all() and (np.isnan(c[3:]) == np.isnan(a.astype(np.float64))).all()


def test_functions_of_small_floats_are_rounded_where_they_are_stored():
    @T.prim_func
    def main(A: T.Tensor((32,), "float16"), C: T.Tensor((32,), "float32"), D: T.Tensor((32,), "float16")):
        with T.Kernel(1):
            for i in T.Parallel(32):
                C[i] = T.sqrt(A[i])
                D[i] = T.sqrt(A[i])

    a = np.random.default_rng(1).uniform(0, 4, 32).astype(np.float16)
    out = agree(main, {"A": a, "C": zeros(32), "D": zeros(32, dtype=np.float16)})
    assert (out["C"] == np.sqrt(a.astype(np.float32))).all() and (out["C"] != out["D"]).any()


def test_a_cast_rounds_what_arithmetic_left_unrounded():
    """float16 holds every float8, and not every sum of two."""

    @T.prim_func
    def main(A: T.Tensor((8,), "float8_e5m2"), C: T.Tensor((8,), "float32")):
        with T.Kernel(1):
            for i in T.Parallel(8):
                C[i] = T.cast(A[i] / T.cast(1.75, "float8_e5m2"), "float16")

    agree(main, {"A": np.arange(8).astype(ml_dtypes.float8_e5m2), "C": zeros(8)})


def test_a_branch_that_is_never_taken_may_read_anything():
    @T.prim_func
    def main(C: T.Tensor((12,), "int32"), D: T.Tensor((12,), "int32")):
        with T.Kernel(1):
            t = T.alloc_shared((12,), "int32")
            T.fill(t, 3)
            for i in T.Parallel(12):
                C[i] = T.if_then_else(i < 12, t[i], t[i] + 1)
                if i >= 12:
                    D[i] = t[i]
                else:
                    D[i] = t[i] * 2

    agree(main, {"C": zeros(12, dtype=np.int32), "D": zeros(12, dtype=np.int32)})


def test_a_named_product_of_a_converted_index():
    """TVM's interval analysis fails on such a binding; it is hidden from it."""

    @T.prim_func
    def main(C: T.Tensor((8, 4), "float32")):
        with T.Kernel(3) as b:
            for i, j in T.Parallel(8, 4):
                x = T.max(T.if_then_else(i < j, T.cast(b, "float32"), T.cast(b, "float32")), T.cast(i, "float32") * T.cast(b, "float32"))
                C[i, j] = (T.max(x, T.cast(j, "float32")) + T.cast(j, "float32") * x) * T.if_then_else(i == j, x, T.cast(i, "float32"))

    done = launch(main, 1, {"C": zeros(8, 4)})
    assert done.report.kinds <= {"race"}  # three blocks write the same elements; what is asked here is that it compiles
    run(main)


def test_products_and_reductions_of_parts_at_run_time_offsets():
    @T.prim_func
    def main(A: T.Tensor((8, 8), "float32"), C: T.Tensor((4,), "float32"), D: T.Tensor((8, 8), "float32"), n: T.int32):
        with T.Kernel(1):
            a, r, s = T.alloc_shared((8, 8), "float32"), T.alloc_shared((4, 8), "float32"), T.alloc_fragment((4,), "float32")
            T.copy(A, a)
            T.clear(r)
            T.reduce_sum(a[n : n + 4, 0:8], s, dim=1)
            T.copy(s, C)
            T.gemm(a[n : n + 4, 0:8], a, r)
            T.gemm(r[0:4, 0:4], r, a[n : n + 4, 0:8])
            T.cumsum(a[n : n + 4, 0:8])
            T.copy(a, D)

    a = np.random.default_rng(2).integers(-2, 3, (8, 8)).astype(np.float32)
    agree(main, {"A": a, "C": zeros(4), "D": zeros(8, 8), "n": 3})
    with pytest.raises(LaunchError, match="lies outside"):
        run(main)(a, zeros(4), zeros(8, 8), 5)
    assert "out-of-bounds" in launch(main, 1, {"A": a, "n": 5}).report.kinds


def test_a_view_of_a_strided_tensor_is_refused():
    @T.prim_func
    def main(A: T.StridedTensor((4, 4), (8, 2), "int32"), C: T.Tensor((16,), "int32")):
        with T.Kernel(1):
            flat = T.view(A, (16,))
            T.copy(flat, C)

    with refused(TileTypeError, "T.StridedTensor", at="T.view(A, (16,))", write="copy it into an allocation"):
        main.trace()


def test_copies_over_the_edge_of_a_tile_are_cut():
    """On the CPU nothing is written outside; the simulator says so as well."""

    @T.prim_func
    def main(C: T.Tensor((8,), "int32"), n: T.int32):
        with T.Kernel(1):
            t, u = T.alloc_shared((8,), "int32"), T.alloc_shared((4,), "int32")
            T.fill(t, 1)
            T.fill(u, 5)
            T.copy(u, t[n : n + 4])
            T.copy(t, C)

    c = agree(main, {"C": zeros(8, dtype=np.int32), "n": 6}, found=("out-of-bounds",))["C"]
    assert c.tolist() == [1] * 6 + [5] * 2
