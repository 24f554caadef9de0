"""T.argmax, T.argmin and T.topk on every target, against lists sorted by Python: dtypes, ties, NaN, zeros of
both signs, infinities, ragged shapes, every axis, executors below the block."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import tilescale.language as T
from tests.kernels import refused
from tests.kernels import run as compiled
from tests.unit.cuda import emulated
from tilescale.compiler.checks.run import launch
from tilescale.compiler.sim import numerics
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError

TARGETS = ("cpu", "sim", "sm_80", "sm_90a")
FLOATS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")


def as_torch(array: Any) -> Any:
    """A tensor on an array's memory."""
    dtype = getattr(torch, str(array.dtype))
    return (
        torch.from_numpy(array.view(np.uint8).reshape(*array.shape, array.itemsize))
        .view(dtype)
        .reshape(array.shape)
    )


def run(kernel: Any, args: dict[str, Any], target: str) -> dict[str, Any]:
    """What a launch leaves in its arguments."""
    args = {name: a.copy() for name, a in args.items()}
    if target == "cpu":
        compiled(kernel)(*(as_torch(a) for a in args.values()))
        return args
    if target == "sim":
        return launch(kernel, 1, args).arrays[0]
    return emulated.run(kernel, args, target, 0)


def picks(array: Any, axis: int, k: int, least: bool = False) -> tuple[Any, Any]:
    """The first ``k`` along an axis and their indices: NaN, then by value, then by index."""
    lines = np.moveaxis(array, axis, -1)
    chosen = np.zeros((*lines.shape[:-1], k), np.int32)
    for where in np.ndindex(lines.shape[:-1]):
        line = [float(x) if "float" in str(array.dtype) else int(x) for x in lines[where]]
        order = sorted(
            range(len(line)),
            key=lambda n: (0, 0) if math.isnan(line[n]) else (1, line[n] if least else -line[n]),
        )
        chosen[where] = order[:k]
    return np.moveaxis(np.take_along_axis(lines, chosen, -1), -1, axis), np.moveaxis(chosen, -1, axis)


def kernel_of(shape: tuple[int, ...], dtype: str, axis: int, k: int, threads: int, where: str) -> Any:
    """T.argmax and T.argmin along an axis, T.topk along the last; what it looks through and the results lie
    in ``where``."""
    left = shape[:axis] + shape[axis + 1 :] or (1,)
    top = (*shape[:-1], k)
    alloc = T.alloc_fragment if where == "fragment" else T.alloc_shared

    @T.prim_func
    def kernel(
        A: T.Tensor(shape, dtype),
        V: T.Tensor(left, dtype),
        I: T.Tensor(left, "int32"),
        W: T.Tensor(left, dtype),
        J: T.Tensor(left, "int32"),
        X: T.Tensor(top, dtype),
        K: T.Tensor(top, "int32"),
    ):
        with T.Kernel(1, threads=threads):
            a, v, i = alloc(shape, dtype), alloc(left, dtype), alloc(left, "int32")
            x, n = alloc(top, dtype), alloc(top, "int32")
            T.copy(A, a)
            T.argmax(a, v, i, dim=axis)
            T.copy(v, V)
            T.copy(i, I)
            T.argmin(a, v, i, dim=axis - len(shape))
            T.copy(v, W)
            T.copy(i, J)
            T.topk(a, x, n, k)
            T.copy(x, X)
            T.copy(n, K)

    return kernel


def check(
    a: Any, dtype: str, axis: int, k: int, target: str, threads: int = 64, where: str = "shared"
) -> None:
    made = kernel_of(a.shape, dtype, axis, k, threads, where)
    left = a.shape[:axis] + a.shape[axis + 1 :] or (1,)
    shapes = {"V": left, "I": left, "W": left, "J": left, "X": (*a.shape[:-1], k), "K": (*a.shape[:-1], k)}
    args = {
        "A": a,
        **{name: emulated.empty(s, "int32" if name in "IJK" else dtype) for name, s in shapes.items()},
    }
    got = run(made, args, target)
    for names, (values, indices) in (
        ("VI", picks(a, axis, 1)),
        ("WJ", picks(a, axis, 1, least=True)),
        ("XK", picks(a, a.ndim - 1, k)),
    ):
        for name, want in zip(names, (values, indices), strict=True):
            want = np.ascontiguousarray(want.reshape(got[name].shape))
            # -0.0 and NaN too, to the bit.
            assert np.asarray(got[name]).tobytes() == want.tobytes(), (
                target,
                dtype,
                name,
                got[name],
                want,
            )


def hard(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    """Few different values, so that most are equal to others; of floats NaN, infinities and zeros of both
    signs, and a line of each alone."""
    draw = np.random.default_rng(seed)
    if "float" not in dtype:
        low, high = (0, 1) if dtype == "bool" else numerics.limits(dtype)
        few = [low, high, *(() if dtype == "bool" else (0, 1, high - 1, high // 2))]
        return np.array([few[n] for n in draw.integers(0, len(few), math.prod(shape))], dtype).reshape(shape)
    top = float("inf") if dtype != "float8_e4m3fn" else 448.0
    few = np.array([0.0, -0.0, 1.5, -1.5, top, -top, 0.5])
    a = few[draw.integers(0, len(few), shape)]
    a[draw.random(shape) < 0.02] = math.nan
    rows = a.reshape(-1, shape[-1])
    for row, value in zip(rows, (math.nan, -top, top, -0.0), strict=False):
        row[:] = value
    return numerics.encode(a, dtype)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_every_dtype_with_ties_nan_zeros_and_infinities(dtype: str, target: str):
    check(hard((9, 50), dtype), dtype, 1, 5, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("where", ["shared", "fragment"])
@pytest.mark.parametrize(
    "shape, axis, k",
    [
        ((1,), 0, 1),
        ((7,), 0, 7),
        ((300,), 0, 3),
        ((3, 5), 0, 5),
        ((33, 6), 0, 1),
        ((1, 40), 1, 2),
        ((40, 1), 1, 1),
        ((3, 4, 18), 1, 4),
        ((3, 4, 18), 0, 1),
        ((70, 3), 0, 3),
        ((2, 70), 0, 8),
    ],
    ids=str,
)
def test_ragged_shapes_and_every_axis(shape: tuple[int, ...], axis: int, k: int, where: str, target: str):
    check(hard(shape, "float32", 1), "float32", axis, k, target, 64, where)


@pytest.mark.parametrize("threads", [1, 8, 32, 96, 100, 256])
def test_blocks_of_any_size(threads: int):
    for shape, axis in (((6, 45), 1), ((6, 300), 0)):
        check(hard(shape, "float16", 2), "float16", axis, 4, "sm_80", threads)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("scale", ["thread", "warp", "warpgroup"])
def test_executors_below_the_block(scale: str, target: str):
    """Each has a line of its own, and its own tiles."""
    width = {"thread": 1, "warp": 32, "warpgroup": 128}[scale]
    threads = {"thread": 16, "warp": 128, "warpgroup": 256}[scale]
    each = threads // width

    @T.prim_func
    def kernel(
        A: T.Tensor((each, 2, 20), "float32"),
        V: T.Tensor((each, 2, 3), "float32"),
        I: T.Tensor((each, 2, 3), "int32"),
        W: T.Tensor((each, 20), "float32"),
        J: T.Tensor((each, 20), "int32"),
    ):
        with T.Kernel(1, threads=threads), T.Scale(scale) as (n, _):
            a, v, i = (
                T.alloc_shared((2, 20), "float32"),
                T.alloc_fragment((2, 3), "float32"),
                T.alloc_shared((2, 3), "int32"),
            )
            w, j = T.alloc_shared((20,), "float32"), T.alloc_fragment((20,), "int32")
            T.copy(A[n, 0:2, 0:20], a)
            T.topk(a, v, i, 3)
            T.copy(v, V[n, 0:2, 0:3])
            T.copy(i, I[n, 0:2, 0:3])
            T.argmin(a, w, j, 0)
            T.copy(w, W[n, 0:20])
            T.copy(j, J[n, 0:20])

    a = hard((each, 2, 20), "float32", 3)
    shapes = {"V": (each, 2, 3), "I": (each, 2, 3), "W": (each, 20), "J": (each, 20)}
    got = run(
        kernel,
        {"A": a, **{k: emulated.empty(s, "int32" if k in "IJ" else "float32") for k, s in shapes.items()}},
        target,
    )
    for names, (values, indices) in (("VI", picks(a, 2, 3)), ("WJ", picks(a, 1, 1, least=True))):
        assert got[names[0]].tobytes() == values.reshape(got[names[0]].shape).tobytes()
        assert (got[names[1]] == indices.reshape(got[names[1]].shape)).all()


@pytest.mark.parametrize("target", TARGETS)
def test_parts_of_tiles_in_a_loop_that_copies_ahead(target: str):
    """Indices count from where the part begins; results go into rows of a tile."""

    @T.prim_func
    def kernel(
        A: T.Tensor((4, 8, 64), "float32"), V: T.Tensor((4, 6, 2), "float32"), I: T.Tensor((4, 6), "int32")
    ):
        with T.Kernel(1, threads=64):
            a, v, n, i = (
                T.alloc_shared((8, 64), "float32"),
                T.alloc_shared((8, 2), "float32"),
                T.alloc_shared((8, 2), "int32"),
                T.alloc_shared((4, 6), "int32"),
            )
            w = T.alloc_fragment((6,), "float32")
            for k in T.Pipelined(4, num_stages=3):
                T.copy(A[k, 0:8, 0:64], a)
                T.topk(a[1:7, 10:30], v[2:8, 0:2], n[2:8, 0:2], 2)
                T.copy(v[2:8, 0:2], V[k, 0:6, 0:2])
                T.argmax(a[1:7, 10:30], w, i[k, 0:6])
            T.copy(i, I)

    a = hard((4, 8, 64), "float32", 4)
    got = run(
        kernel,
        {"A": a, "V": emulated.empty((4, 6, 2), "float32"), "I": emulated.empty((4, 6), "int32")},
        target,
    )
    values, indices = picks(a[:, 1:7, 10:30], 2, 2)
    assert got["V"].tobytes() == values.tobytes() and (got["I"] == indices[..., 0]).all()


def test_what_does_not_fit():
    def refuse(kind: type, message: str, statement: Any, **more: Any) -> None:
        @T.prim_func
        def kernel(A: T.Tensor((4, 8), "float32"), n: T.int32):
            with T.Kernel(1, threads=32):
                t, v, i = (
                    T.alloc_shared((4, 8), "float32"),
                    T.alloc_shared((4, 2), "float32"),
                    T.alloc_shared((4, 2), "int32"),
                )
                r, q, h = (
                    T.alloc_shared((4,), "float32"),
                    T.alloc_shared((4,), "int32"),
                    T.alloc_shared((4,), "float16"),
                )
                z, p = T.alloc_shared((4, 8), "int32"), T.alloc_shared((4,), "int64")
                statement(A, n, t, v, i, r, q, h, z, p)

        with refused(kind, message, **more):
            kernel.trace()

    v, t = TileValueError, TileTypeError
    refuse(
        v,
        "T.topk of k=9 along the last axis of t, which has 8 elements",
        lambda A, n, t, v, i, *_: T.topk(t, v, i, 9),
        expected="1 ≤ k ≤ 8",
        at="T.topk(t, v, i, 9)",
    )
    refuse(v, "T.topk of k=0", lambda A, n, t, v, i, *_: T.topk(t, v, i, 0), expected="1 ≤ k ≤ 8")
    refuse(t, "T.topk of k=", lambda A, n, t, v, i, *_: T.topk(t, v, i, n), expected="known at compile time")
    refuse(t, "T.topk of k=True", lambda A, n, t, v, i, *_: T.topk(t, v, i, True), expected="a whole number")
    refuse(
        v,
        "T.topk of t (4, 8) with k=3 gives values of (4, 3), and v has (4, 2)",
        lambda A, n, t, v, i, *_: T.topk(t, v, i, 3),
        expected="v of (4, 3)",
    )
    refuse(
        v,
        "T.argmax of t (4, 8) along axis 1 gives indices of (4,), and i has (4, 2)",
        lambda A, n, t, v, i, r, *_: T.argmax(t, r, i),
        expected="i of (4,)",
    )
    refuse(
        v,
        "axis 2 of t, which has 2",
        lambda A, n, t, v, i, r, q, *_: T.argmin(t, r, q, dim=2),
        expected="-2 ≤ dim < 2",
    )
    refuse(
        t,
        "T.argmin of t gives values of float32, and h is of float16",
        lambda A, n, t, v, i, r, q, h, *_: T.argmin(t, h, q),
        expected="float32",
    )
    refuse(
        t,
        "T.argmax of t gives indices of int32, and p is of int64",
        lambda A, n, t, v, i, r, q, h, z, p: T.argmax(t, r, p),
        expected="int32",
    )
    refuse(
        v,
        "T.argmax puts values and indices into q",
        lambda A, n, t, v, i, r, q, h, z, p: T.argmax(z, q, q),
        expected="two tiles",
    )
    refuse(
        t,
        "A is not a tile of this block",
        lambda A, n, t, v, i, r, q, *_: T.argmax(A, r, q),
        write="T.alloc_shared",
    )


def test_a_line_is_not_written_where_it_is_read():
    @T.prim_func
    def kernel(A: T.Tensor((4, 8), "int32")):
        with T.Kernel(1, threads=32):
            t, i = T.alloc_shared((4, 8), "int32"), T.alloc_shared((4,), "int32")
            T.copy(A, t)
            T.argmax(t, t[0:4, 0], i)

    with refused(
        TileValueError, "T.argmax writes elements of t that it also reads", expected="no element in common"
    ):
        launch(kernel, 1, {"A": emulated.empty((4, 8), "int32")})


def test_no_single_iteration_of_a_nest_has_a_line():
    @T.prim_func
    def kernel(A: T.Tensor((4, 8), "float32")):
        with T.Kernel(1, threads=32):
            t, v, i = (
                T.alloc_shared((4, 8), "float32"),
                T.alloc_shared((4,), "float32"),
                T.alloc_shared((4,), "int32"),
            )
            for row in T.Parallel(4):
                T.argmax(t[row, 0:8], v[row], i[row])

    with refused(TileSyntaxError, "T.argmax of a tile in T.Parallel, whose iterations are of elements"):
        kernel.trace()


@pytest.mark.parametrize("scale", ["block", "warpgroup", "warp"])
def test_a_tile_that_was_looked_through_is_written_again(scale: str):
    """Threads of an executor have met in between, and the emulator knows it of several who read one
    element."""
    each = {"block": 1, "warpgroup": 2, "warp": 8}[scale]

    @T.prim_func
    def kernel(
        A: T.Tensor((3, each, 2, 20), "float32"),
        V: T.Tensor((3, each, 2, 3), "float32"),
        I: T.Tensor((3, each, 2, 3), "int32"),
    ):
        with T.Kernel(1, threads=256), T.Scale(scale) as (n, _):
            a, v, i = (
                T.alloc_shared((2, 20), "float32"),
                T.alloc_shared((2, 3), "float32"),
                T.alloc_shared((2, 3), "int32"),
            )
            for k in T.serial(3):
                T.copy(A[k, n, 0:2, 0:20], a)
                T.topk(a, v, i, 3)
                for r, c in T.Parallel(2, 20):
                    a[r, c] = 0 - a[r, c]
                T.topk(a, v, i, 3)
                T.copy(v, V[k, n, 0:2, 0:3])
                T.copy(i, I[k, n, 0:2, 0:3])

    a = emulated.data((3, each, 2, 20), "float32")
    for target in ("sim", "sm_80", "sm_90a"):
        got = run(
            kernel,
            {
                "A": a,
                "V": emulated.empty((3, each, 2, 3), "float32"),
                "I": emulated.empty((3, each, 2, 3), "int32"),
            },
            target,
        )
        values, indices = picks(-a, 3, 3)
        assert got["V"].tobytes() == values.tobytes() and (got["I"] == indices).all()
