"""Launches and their indices: grids that are too large, the index of a block along each axis of its cluster;
counters are no memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale
import tilescale.language as T
from tests.kernels import refused, run
from tests.unit.cuda.emulated import agree
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError


def clusters(dims: tuple[int, ...], axes: int) -> Any:
    shape = tuple(2 * d for d in dims)

    @T.prim_func
    def two(O: T.Tensor((64, 4), "int32")):
        with T.Kernel(*shape, threads=32, cta_cluster=dims) as b:
            with T.Scale("grid") as (g, _):
                with T.Scale("cta_cluster") as (x, y), n:
                    O[g, 0], O[g, 1], O[g, 3] = x, y, n

    @T.prim_func
    def three(O: T.Tensor((64, 4), "int32")):
        with T.Kernel(*shape, threads=32, cta_cluster=dims) as b:
            with T.Scale("grid") as (g, _):
                with T.Scale("cta_cluster") as ((x, y, z), n):
                    O[g, 0], O[g, 1], O[g, 2], O[g, 3] = x, y, z, n

    return two if axes == 2 else three


@pytest.mark.parametrize("dims, axes", [((2, 2), 2), ((4, 1), 2), ((2, 1, 2), 3), ((1, 2), 3)])
def test_the_index_along_each_axis_of_a_cluster(dims: tuple[int, ...], axes: int):
    kernel, o = clusters(dims, axes), np.full((64, 4), -1, np.int32)
    there = agree(kernel, {"O": o}, exact=True)["O"]
    run(kernel)(o)
    assert np.array_equal(o, there)
    dx, dy, dz = (*dims, 1, 1)[:3]
    gx, gy = 2 * dx, 2 * dy if len(dims) > 1 else 1
    gz = 2 * dz if len(dims) > 2 else 1
    for g in range(gx * gy * gz):
        x, y, z = g % gx % dx, g // gx % gy % dy, g // (gx * gy) % dz
        assert o[g].tolist() == [x, y, z if axes == 3 else -1, dx * dy * dz]


def test_names_that_do_not_fit_a_scale():
    def refuse(body: Any, expected: str = "the own index and the count", **launch: Any) -> None:
        @T.prim_func
        def kernel(O: T.Tensor((8,), "int32")):
            with T.Kernel(4, 4, threads=64, **launch) as (bx, by):
                body()

        with refused(TileSyntaxError, "gives two values", expected=expected):
            kernel.trace()

    @T.macro
    def few_axes():
        with T.Scale("cta_cluster") as (x,), n:
            pass

    @T.macro
    def three():
        with T.Scale("cta_cluster") as (x, y, n):
            pass

    @T.macro
    def of_warps():
        with T.Scale("warp") as (x, y), n:
            pass

    refuse(few_axes, "along each axis of the cluster", cta_cluster=(2, 2))
    refuse(three, "along each axis of the cluster", cta_cluster=(2, 2))
    refuse(of_warps)


def test_grids_of_too_many_blocks():
    def trace(*grid: Any) -> None:
        @T.prim_func
        def kernel(O: T.Tensor((8,), "int32")):
            with T.Kernel(*grid):
                O[0] = 1

        kernel.trace()

    for grid in ((2**31,), (2**40, 2), (2**16, 2**15), (2**11, 2**10, 2**10)):
        with refused(
            TileValueError,
            "the grid has extent" if grid[0] >= 2**31 else "a grid of ",
            expected="fewer than 2³¹ blocks",
        ):
            trace(*grid)
    trace(2**31 - 1)

    @T.prim_func
    def of_the_call(O: T.Tensor((8,), "int32"), n: T.int32, m: T.int32):
        with T.Kernel(n, m, cta_cluster=(2, 1)) as (bx, by):
            if bx + by == 0:
                O[0] = 1

    o = np.zeros(8, np.int32)
    for target in ("cpu", "sim"):
        kernel = tilescale.compile(of_the_call, target=target)
        for grid in ((-2, 1), (2**16, 2**15), (3, 1)):
            with pytest.raises(TileValueError, match="cannot be launched" if grid != (3, 1) else "clusters"):
                kernel(o, *grid)
        kernel(o, 2, 3)
    with pytest.raises(TileValueError, match="too large for the simulator"):
        kernel(o, 2**14, 2**14)


def test_counters_are_no_memory():
    def refuse(kind: str, write: str, statement: Any) -> None:
        @T.prim_func
        def kernel(S: T.Signal((4,)), O: T.Tensor((8,), "int64")):
            with T.Kernel(1):
                own = T.alloc_signal(2)
                statement(S, own, O)

        with refused(
            TileTypeError,
            f"T.atomic_{kind} of S, which is a signal" if "S[i]" in write else "which is a signal",
            write=write,
        ):
            kernel.trace()

    refuse("load", "T.wait(S[i]", lambda S, own, O: T.atomic_load(S[0]))
    refuse("load", "T.wait(own[i]", lambda S, own, O: T.atomic_load(own[0]))
    refuse("add", "T.signal(S[i]", lambda S, own, O: T.atomic_add(S[0], 1))
    refuse("store", 'T.signal(S[i], value, op="set")', lambda S, own, O: T.atomic_store(S[0], 1))
    refuse("add", "T.signal(own[i]", lambda S, own, O: T.atomic_add(own[1], 1, return_prev=True))
