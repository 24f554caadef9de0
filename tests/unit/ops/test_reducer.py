"""T.alloc_reducer on every target: sums along the axes of a T.Parallel nest, over several rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.ops.test_argmax import TARGETS, run
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError

RNG = np.random.default_rng(17)


@T.prim_func
def product(A: T.Tensor((40, 90), "float32"), x: T.Tensor((90,), "float32"), y: T.Tensor((40,), "float32")):
    with T.Kernel(T.ceildiv(40, 16), threads=64) as bx:
        total = T.alloc_reducer(16, "float32", replication="all")
        a, b = T.alloc_fragment((16, 32), "float32"), T.alloc_fragment((32,), "float32")
        T.clear(total)
        for k in T.Pipelined(T.ceildiv(90, 32), num_stages=2):
            T.copy(A[bx * 16, k * 32], a)
            T.copy(x[k * 32], b)
            for i, j in T.Parallel(16, 32):
                total[i] += a[i, j] * b[j]
        T.finalize_reducer(total)
        T.copy(total, y[bx * 16])


@T.prim_func
def two_axes(A: T.Tensor((4, 8, 16), "int32"), B: T.Tensor((8,), "int32")):
    with T.Kernel(1, threads=32):
        total, a = T.alloc_reducer((8,), "int32"), T.alloc_fragment((4, 8, 16), "int32")
        T.copy(A, a)
        T.fill(total, 3)
        for i, j, k in T.Parallel(4, 8, 16):
            total[j] += a[i, j, k]
        T.finalize_reducer(total)
        T.copy(total, B)


@pytest.mark.parametrize("target", TARGETS)
def test_a_product_by_sums(target: str):
    a, x = RNG.standard_normal((40, 90)).astype("float32"), RNG.standard_normal(90).astype("float32")
    out = run(product, {"A": a, "x": x, "y": np.full(40, np.nan, "float32")}, target)
    np.testing.assert_allclose(out["y"], a.astype(float) @ x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("target", TARGETS)
def test_sums_along_two_axes(target: str):
    a = RNG.integers(-9, 9, (4, 8, 16), dtype="int32")
    out = run(two_axes, {"A": a, "B": np.full(8, -1, "int32")}, target)
    assert (out["B"] == 3 + a.sum((0, 2))).all()


def refusing(how: str) -> Any:
    @T.prim_func
    def kernel(A: T.Tensor((8, 8), "float32")):
        with T.Kernel(1, threads=32):
            f = T.alloc_fragment((8,), "float32")
            r = T.alloc_reducer(
                (8,),
                "float32",
                op="max" if how == "op" else "sum",
                replication="some" if how == "who" else "all",
            )
            T.clear(r)
            if how == "outside":
                r[0] += 1
            if how == "again":
                T.finalize_reducer(f)
            for i, j in T.Parallel(8, 8):
                if how == "times":
                    r[i] *= 2
                if how == "place":
                    r[i + 1] += 1
                if how == "condition":
                    if i > j:
                        r[i] += 1
            if how == "axis":
                for i in T.Parallel(8):
                    r[i] += 1

    return kernel


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("op", TileValueError, "op='max'"),
        ("who", TileValueError, "replication='some'"),
        ("outside", TileSyntaxError, "outside of T.Parallel"),
        ("condition", TileSyntaxError, "outside of T.Parallel"),
        ("again", TileTypeError, "T.finalize_reducer of f"),
        ("times", TileTypeError, "which is a sum"),
        ("place", TileTypeError, "is added to at"),
        ("axis", TileTypeError, "along no axis"),
    ],
)
def test_refusals(how: str, kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        refusing(how).trace()
