"""Reductions and scans in the language: every axis, with and without clear, every dtype, parts of tiles."""

from __future__ import annotations

import pytest
import torch

import tilescale.language as T
from tests.kernels import refused, run
from tilescale.errors import TileTypeError, TileValueError

OPS = {
    "sum": lambda x, d: x.sum(d),
    "max": lambda x, d: x.amax(d),
    "min": lambda x, d: x.amin(d),
    "prod": lambda x, d: x.prod(d),
    "abssum": lambda x, d: x.abs().sum(d),
    "absmax": lambda x, d: x.abs().amax(d),
}
JOIN = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
    "abssum": torch.add,
    "absmax": torch.maximum,
}
DTYPES = (
    "int8",
    "uint8",
    "int16",
    "int32",
    "int64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float16",
    "bfloat16",
    "float32",
    "float64",
)


@pytest.mark.parametrize("name", DTYPES)
def test_every_axis_with_and_without_clear(name: str):
    """(3, 8, 20) along each of its axes into int64 or float64 results; integers, so that every order of
    addition agrees."""
    shape = (3, 8, 20)
    result = "float64" if "float" in name else "int64"
    narrow = ("int8", "uint8", "int16", "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16")
    ops = [op for op in OPS if op != "prod" or name not in narrow]

    def make(axis):
        left = tuple(e for k, e in enumerate(shape) if k != axis)

        @T.prim_func
        def kernel(A: T.Tensor(shape, name), C: T.Tensor((len(ops), 2, *left), result)):
            with T.Kernel(1):
                t = T.alloc_shared(shape, name)
                T.copy(A, t)
                for k, op in enumerate(ops):
                    out = T.alloc_fragment(left, name)
                    T.reduce(t, out, op, dim=axis)
                    T.copy(out, C[k, 0, 0 : left[0], 0 : left[1]])
                    T.fill(out, 1)
                    T.reduce(t, out, op, dim=axis - 3, clear=False)
                    T.copy(out, C[k, 1, 0 : left[0], 0 : left[1]])

        return kernel, left

    a = torch.randint(0 if name == "uint8" else -2, 3, shape).to(getattr(torch, name))
    for axis in range(3):
        kernel, left = make(axis)
        c = torch.zeros(len(ops), 2, *left, dtype=getattr(torch, result))
        run(kernel)(a, c)
        for k, op in enumerate(ops):
            want = OPS[op](a.to(c.dtype), axis)
            again = JOIN[op](want, torch.ones_like(want))
            if name.startswith("float8"):
                want, again = (v.float().to(a.dtype).to(c.dtype) for v in (want, again))
            assert c[k, 0].equal(want), (name, axis, op)
            assert c[k, 1].equal(again), (name, axis, op, "clear=False")


def test_shapes_of_results_parts_of_tiles_and_bits():
    @T.prim_func
    def kernel(A: T.Tensor((8, 32), "int32"), C: T.Tensor((5, 32), "int32")):
        with T.Kernel(1):
            t = T.alloc_fragment((8, 32), "int32")
            T.copy(A, t)
            keep, row = T.alloc_fragment((8, 1), "int32"), T.alloc_fragment((1, 32), "int32")
            T.reduce_sum(t, keep, dim=1)
            for i in T.Parallel(8):
                C[0, i] = keep[i, 0]
            T.reduce_bitxor(t, row, dim=0)
            T.copy(row, C[1, 0])
            part = T.alloc_fragment((4,), "int32")
            T.reduce_max(t[2:6, 8:20], part, dim=1)
            T.copy(part, C[2, 0:4])
            T.reduce_bitand(t[0:4, 0:32], row[0, 0:32], dim=0)
            T.copy(row, C[3, 0])
            one = T.alloc_fragment((1,), "int32")
            T.reduce_bitor(t[3, 0:32], one)
            C[4, 0] = one[0]

    a = torch.randint(-(2**30), 2**30, (8, 32), dtype=torch.int32)
    c = torch.zeros(5, 32, dtype=torch.int32)
    run(kernel)(a, c)
    x = a.numpy()
    import numpy as np

    assert c[0, :8].equal(a.sum(1).int())
    assert c[1].tolist() == np.bitwise_xor.reduce(x, 0).tolist()
    assert c[2, :4].equal(a[2:6, 8:20].amax(1))
    assert c[3].tolist() == np.bitwise_and.reduce(x[:4], 0).tolist()
    assert c[4, 0] == np.bitwise_or.reduce(x[3])


def test_floats_add_in_a_fixed_order_and_nans_of_maxima():
    @T.prim_func
    def kernel(A: T.Tensor((16, 1000), "float32"), C: T.Tensor((3, 16), "float32")):
        with T.Kernel(1):
            t, s = T.alloc_shared((16, 1000), "float32"), T.alloc_fragment((16,), "float32")
            T.copy(A, t)
            T.reduce_sum(t, s, dim=1)
            T.copy(s, C[0, 0])
            T.reduce_max(t, s, dim=1)
            T.copy(s, C[1, 0])
            T.reduce_min(t, s, dim=1)
            T.copy(s, C[2, 0])

    a = torch.randn(16, 1000) * torch.logspace(-3, 3, 16)[:, None]
    made = run(kernel)
    c, again = torch.zeros(3, 16), torch.zeros(3, 16)
    made(a, c)
    made(a, again)
    assert c.equal(again)
    exact = a.double().sum(1)
    assert ((c[0] - exact).abs() <= 1000 * 2**-24 * a.double().abs().sum(1)).all()
    assert c[1].equal(a.amax(1)) and c[2].equal(a.amin(1))
    a[:] = -float("inf")
    made(a, c)
    assert c[1].tolist() == [-float("inf")] * 16


@pytest.mark.parametrize("name", ["int32", "int64", "float16", "bfloat16", "float32", "float64"])
def test_scans_both_ways_along_every_axis(name: str):
    shape = (5, 6, 18)

    @T.prim_func
    def kernel(A: T.Tensor(shape, name), C: T.Tensor((3, 2, 2, *shape), name), D: T.Tensor((18,), name)):
        with T.Kernel(1):
            t, u = T.alloc_shared(shape, name), T.alloc_fragment(shape, name)
            for axis in range(3):
                for way in range(2):
                    T.copy(A, t)
                    T.cumsum(t, u, dim=axis, reverse=bool(way))
                    T.copy(u, C[axis, way, 0, 0:5, 0:6, 0:18])
                    T.cummax(t, dim=axis - 3, reverse=bool(way))  # in place
                    T.copy(t, C[axis, way, 1, 0:5, 0:6, 0:18])
            line = T.alloc_shared((18,), name)
            T.copy(A[2, 3, 0:18], line)
            T.cumsum(line)
            T.copy(line, D)

    a = torch.randint(-3, 4, shape).to(getattr(torch, name))
    c, d = torch.zeros(3, 2, 2, *shape, dtype=a.dtype), torch.zeros(18, dtype=a.dtype)
    run(kernel)(a, c, d)
    for axis in range(3):
        for way in range(2):
            x = a.double().flip(axis) if way else a.double()
            want = [x.cumsum(axis), x.cummax(axis).values]
            want = [w.flip(axis) for w in want] if way else want
            assert c[axis, way].double().equal(torch.stack(want)), (axis, way)
    assert d.double().equal(a[2, 3].double().cumsum(0))


def test_what_reductions_refuse():
    def refuse(kind, message, statement, **more):
        @T.prim_func
        def kernel(A: T.Tensor((16, 16), "float32")):
            with T.Kernel(1):
                t, row = T.alloc_shared((4, 8), "float32"), T.alloc_fragment((8,), "float32")
                statement(A, t, row)

        with refused(kind, message, **more):
            kernel.trace()

    v, t = TileValueError, TileTypeError
    refuse(
        v,
        "reducing t (4, 8) along axis 1 gives (4,), and row has (8,)",
        lambda A, t, row: T.reduce_sum(t, row, dim=1),
        at="T.reduce_sum(t, row, dim=1)",
    )
    refuse(
        v, "axis 2 of t, which has 2", lambda A, t, row: T.reduce_max(t, row, dim=2), expected="-2 ≤ dim < 2"
    )
    refuse(
        v,
        "there is no reduction 'mean'",
        lambda A, t, row: T.reduce(t, row, "mean", dim=0),
        expected="sum, max",
    )
    refuse(
        t, "A is not a tile of this block", lambda A, t, row: T.reduce_sum(A, row), write="T.alloc_fragment"
    )
    refuse(
        t, "reduce_bitor of float32", lambda A, t, row: T.reduce_bitor(t, row, dim=0), expected="an integer"
    )
    refuse(v, "axis 3 of t", lambda A, t, row: T.cumsum(t, dim=3))
    refuse(v, "T.cumsum: t has a tile of (4, 8) and row one of (8,)", lambda A, t, row: T.cumsum(t, row))
    refuse(t, "A is not a tile", lambda A, t, row: T.cummax(A))
