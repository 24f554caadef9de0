"""The same kernels on the simulator and on the CPU target."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import run
from tilescale.compiler.checks.run import launch
from tilescale.compiler.sim import numerics

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTS = ("int8", "uint8", "int32", "int64")


def both(kernel: Any, **args: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every argument as the simulator and as the CPU leave it."""
    done = launch(kernel, 1, args)
    assert done.report, done.report
    mine = {name: a.copy() if isinstance(a, np.ndarray) else a for name, a in args.items()}
    run(kernel)(*mine.values())
    return done.arrays[0], mine


def draw(dtype: str, *shape: int) -> Any:
    wide = np.random.default_rng(7).standard_normal(shape) * 4
    return numerics.encode(wide, dtype) if dtype in FLOATS else wide.astype(numerics.storage(dtype))


def ulps(got: Any, want: Any) -> float:
    """The largest difference in places of ``want``'s dtype."""
    wide, near = got.astype(np.float64), want.astype(np.float64)
    places = ml_dtypes.finfo(want.dtype).eps * np.maximum(
        np.abs(near), float(ml_dtypes.finfo(want.dtype).tiny)
    )
    return float(np.max(np.abs(wide - near) / places))


@pytest.mark.parametrize("dtype", FLOATS)
def test_elementwise_floats(dtype: str):
    @T.prim_func
    def main(A: T.Tensor((9, 40), dtype), B: T.Tensor((9, 40), dtype), C: T.Tensor((9, 40), dtype)):
        with T.Kernel(2) as b:
            for i, j in T.Parallel(5, 40):
                x, y = A[b * 5 + i, j], B[b * 5 + i, j]
                C[b * 5 + i, j] = T.if_then_else(
                    x > y, T.exp(x - y * T.cast(0.5, dtype)), T.max(x, y) / (T.abs(x) + T.cast(1, dtype))
                )

    a, b = draw(dtype, 9, 40), draw(dtype, 40, 9).reshape(9, 40)[::-1].copy()
    sim, cpu = both(main, A=a, B=b, C=np.zeros((9, 40), a.dtype))
    assert ulps(cpu["C"], sim["C"]) <= 2


@pytest.mark.parametrize("dtype", INTS)
def test_elementwise_integers(dtype: str):
    @T.prim_func
    def main(A: T.Tensor((64,), dtype), B: T.Tensor((64,), dtype), C: T.Tensor((4, 64), dtype)):
        with T.Kernel(1):
            for i in T.Parallel(64):
                C[0, i] = A[i] * B[i] - A[i]
                C[1, i] = A[i] // T.max(B[i], T.cast(1, dtype)) + A[i] % T.max(B[i], T.cast(1, dtype))
                C[2, i] = (A[i] & B[i]) ^ (A[i] | B[i])
                C[3, i] = T.min(A[i], B[i]) >> 1

    a, b = (
        np.random.default_rng(s).integers(0 if dtype[0] == "u" else -20, 20, 64).astype(dtype)
        for s in range(2)
    )
    sim, cpu = both(main, A=a, B=b, C=np.zeros((4, 64), dtype))
    assert (sim["C"] == cpu["C"]).all()


@pytest.mark.parametrize(
    ("dtype", "acc"),
    [("float32", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16"), ("int8", "int32")],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_products(dtype: str, acc: str, transposed: bool):
    @T.prim_func
    def main(
        A: T.Tensor((32, 48), dtype),
        B: T.Tensor((16, 48) if transposed else (48, 16), dtype),
        C: T.Tensor((32, 16), acc),
    ):
        with T.Kernel(1):
            a = T.alloc_shared((32, 48), dtype)
            b = T.alloc_shared((16, 48) if transposed else (48, 16), dtype)
            c = T.alloc_fragment((32, 16), acc)
            T.copy(A, a)
            T.copy(B, b)
            T.copy(C, c)
            T.gemm(a, b, c, transpose_B=transposed)
            T.copy(c, C)

    a, b, c = draw(dtype, 32, 48), draw(dtype, *((16, 48) if transposed else (48, 16))), draw(acc, 32, 16)
    sim, cpu = both(main, A=a, B=b, C=c)
    if acc == "int32":
        assert (sim["C"] == cpu["C"]).all()
        return
    wide = [x.astype(np.float64) for x in (a, b.T if transposed else b, c, sim["C"], cpu["C"])]
    # Of a float32 sum in any order.
    summed = 48 * 2.0**-24 * (np.abs(wide[0]) @ np.abs(wide[1]) + np.abs(wide[2]))
    rounded = float(ml_dtypes.finfo(c.dtype).eps) * np.abs(wide[3])
    assert (np.abs(wide[3] - wide[4]) <= summed + rounded).all()


@pytest.mark.parametrize("op", ["sum", "max", "min", "abssum", "absmax"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_reductions_and_scans(op: str, dtype: str):
    @T.prim_func
    def main(A: T.Tensor((12, 50), dtype), R: T.Tensor((12,), dtype), S: T.Tensor((12, 50), dtype)):
        with T.Kernel(1):
            x, r = T.alloc_fragment((12, 50), dtype), T.alloc_fragment((12,), dtype)
            T.copy(A, x)
            T.reduce(x, r, op, 1)
            T.copy(r, R)
            T.cumsum(x, dim=1, reverse=True)
            T.copy(x, S)

    zeros = np.zeros((12,), numerics.storage(dtype)), np.zeros((12, 50), numerics.storage(dtype))
    sim, cpu = both(main, A=draw(dtype, 12, 50), R=zeros[0], S=zeros[1])
    for name in ("R", "S"):
        np.testing.assert_allclose(
            sim[name].astype(np.float64),
            cpu[name].astype(np.float64),
            rtol=2e-3 if dtype == "float16" else 1e-4,
            atol=1e-3,
        )
    if op in ("max", "min", "absmax") or dtype == "int32":
        assert (sim["R"] == cpu["R"]).all()
