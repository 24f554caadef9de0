"""A tile belongs to the block or to the executors of the T.Scale that allocates it: every other use is
refused, on all targets alike."""

from __future__ import annotations

import numpy as np
import pytest

import tilescale
import tilescale.language as T
from tests.kernels import refused
from tests.unit.cuda.emulated import agree
from tilescale.errors import TileValueError

TARGETS = ("sim", "cpu", "cuda:sm_90a")
SPREAD = "f is spread over 256 threads and touched by a warp"


def within(statement, scale="warpgroup", threads=256):
    """A fragment of the block's, used by one executor of a narrower scope."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float32"), D: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=threads):
            f, r = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64,), "float32")
            s = T.alloc_shared((64, 64), "float32")
            T.copy(A, f)
            with T.Scale(scale) as (w, n):
                if w == 0:
                    statement(f, r, s, D)

    return kernel


@T.macro
def tripled(f, r, s, D):
    for i, j in T.Parallel(64, 64):
        f[i, j] = f[i, j] * 3


@T.macro
def read_by_elements(f, r, s, D):
    for i, j in T.Parallel(64, 64):
        D[i, j] = f[i, j]


@T.macro
def viewed(f, r, s, D):
    v = T.view(f, (64, 64), "int32")
    T.clear(v)


@T.macro
def one_element(f, r, s, D):
    f[3, 4] = 1.0


WHOLE = {
    "copy from": lambda f, r, s, D: T.copy(f, D),
    "copy to": lambda f, r, s, D: T.copy(D, f),
    "copy to shared": lambda f, r, s, D: T.copy(f, s),
    "fill": lambda f, r, s, D: T.fill(f, 2),
    "clear": lambda f, r, s, D: T.clear(f),
    "reduce": lambda f, r, s, D: T.reduce_sum(f, r, dim=1),
    "cumsum": lambda f, r, s, D: T.cumsum(f, dim=1),
    "product": lambda f, r, s, D: T.gemm(s, s, f),
    "atomics": lambda f, r, s, D: T.atomic_add(D, f),
    "print": lambda f, r, s, D: T.print(f),
    "elementwise": tripled,
    "read": read_by_elements,
    "view": viewed,
    "one element": one_element,
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_fragment_of_the_block_is_no_warpgroups(name: str):
    for target in TARGETS if name == "copy from" else TARGETS[1:2]:
        with refused(TileValueError, "", write="inside the T.Scale, or in shared memory") as error:
            tilescale.compile(within(WHOLE[name]), target=target)
        assert "is spread over 256 threads and touched by a warpgroup of 128" in error.text, error.text


def test_nor_a_warps_nor_a_threads():
    for scale, threads in (("warp", 32), ("thread", 1)):
        with refused(
            TileValueError,
            f"f is spread over 256 threads and touched by a {scale} of {threads}",
            at="T.clear(f)",
        ):
            tilescale.compile(within(WHOLE["clear"], scale), target="cuda:sm_90a")


def test_a_destination_of_a_reduction_is_looked_at_too():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=256):
            r = T.alloc_fragment((64,), "float32")
            with T.Scale("warpgroup") as (w, n):
                f = T.alloc_fragment((64, 64), "float32")
                T.copy(A, f)
                T.reduce_sum(f, r, dim=1)

    with refused(
        TileValueError,
        "r is spread over 256 threads and touched by a warpgroup of 128",
        at="T.reduce_sum(f, r, dim=1)",
    ):
        kernel.check(ranks=1, seeds=1)


def test_an_executor_that_is_the_whole_block_has_the_blocks_tiles():
    rng = np.random.default_rng(0)
    args = {"A": rng.standard_normal((64, 64), dtype=np.float32), "D": np.zeros((64, 64), np.float32)}
    assert np.array_equal(agree(within(WHOLE["copy from"], threads=128), args)["D"], args["A"])


def test_single_elements_and_numbers_may_be_read_where_all_threads_hold_them():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), D: T.Tensor((4, 32), "float32")):
        with T.Kernel(1, threads=128):
            f, r = T.alloc_fragment((64,), "float32"), T.alloc_fragment((1,), "float32")
            v = T.alloc_var("float32", 2.0)
            T.copy(A, f)
            T.reduce_max(f, r, dim=0)
            v = v + 1.0
            with T.Scale("warp") as (w, n):
                if r[0] > 0:
                    for i in T.Parallel(32):
                        D[w, i] = r[0] * v + w

    args = {"A": np.arange(64, dtype=np.float32), "D": np.zeros((4, 32), np.float32)}
    assert np.array_equal(
        agree(kernel, args)["D"], np.repeat(63 * 3 + np.arange(4, dtype=np.float32)[:, None], 32, 1)
    )


def one_read(extent: int, product: bool = False):
    @T.prim_func
    def kernel(A: T.Tensor((extent, extent), "float32"), D: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=128):
            s, f = T.alloc_shared((extent, extent), "float32"), T.alloc_fragment((extent, extent), "float32")
            T.copy(A, s)
            T.copy(s, f)
            if product:
                T.gemm(s, s, f)
            with T.Scale("warp") as (w, n):
                D[w] = f[w, 3]

    return kernel


def test_single_elements_are_read_of_small_fragments_alone():
    args = {"A": np.arange(16, dtype=np.float32).reshape(4, 4), "D": np.zeros(4, np.float32)}
    assert agree(one_read(4), args)["D"].tolist() == [3, 7, 11, 15]
    message = "f is spread over 128 threads and touched by a warp of 32"
    for target in TARGETS:
        with refused(TileValueError, message, at="D[w] = f[w, 3]"):
            tilescale.compile(one_read(64), target=target)
    with refused(TileValueError, message, at="D[w] = f[w, 3]"):  # what a product lays otherwise
        tilescale.compile(one_read(4, product=True), target="cuda:sm_90a")


def test_a_variable_of_the_block_is_not_set_below_it():
    @T.prim_func
    def kernel(C: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=256):
            v = T.alloc_var("int32")
            v = 5
            with T.Scale("warp") as (w, n):
                if w == 3:
                    v = 9
                C[w] = v

    for target in TARGETS:
        with refused(
            TileValueError,
            'v belongs to the block and is set in T.Scale("warp")',
            at="v = 9",
            write="allocate v inside",
        ):
            tilescale.compile(kernel, target=target)


def test_nor_a_local_tile():
    @T.prim_func
    def kernel(C: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=256):
            v = T.alloc_local((8,), "float32")
            T.clear(v)
            with T.Scale("warp") as (w, n):
                u = T.alloc_local((8,), "float32")
                T.copy(v, u)
                with T.Scale("thread"):
                    u[0] = 1.0
                T.copy(u, C)

    with refused(
        TileValueError, 'u belongs to T.Scale("warp") and is set in T.Scale("thread")', at="u[0] = 1.0"
    ):
        tilescale.compile(kernel, target="cpu")


def test_variables_of_an_executor_and_of_a_block_that_only_reaches_further():
    @T.prim_func
    def kernel(C: T.Tensor((2, 8), "int32")):
        with T.Kernel(2, threads=256, cta_cluster=2) as b:
            v = T.alloc_var("int32")
            with T.Scale("cta_cluster") as (c, m):
                v = c + 1
            with T.Scale("warp") as (w, n):
                u = T.alloc_var("int32")
                u = v * 10
                u += w
                C[b, w] = u

    want = (np.arange(2)[:, None] + 1) * 10 + np.arange(8)[None, :]
    assert np.array_equal(agree(kernel, {"C": np.zeros((2, 8), np.int32)})["C"], want)


def test_a_tile_of_a_scale_is_not_used_behind_it():
    def make(allocate):
        @T.prim_func
        def kernel(D: T.Tensor((64, 64), "float32")):
            with T.Kernel(1, threads=256):
                with T.Scale("warpgroup") as (w, n):
                    f = allocate((64, 64), "float32")
                    T.copy(D, f)
                T.copy(f, D)

        return kernel

    for allocate in (T.alloc_fragment, T.alloc_shared, T.alloc_local):
        for target in TARGETS:
            with refused(
                TileValueError,
                'f is allocated inside T.Scale("warpgroup")',
                at="T.copy(f, D)",
                write="in front of the T.Scale",
            ):
                tilescale.compile(make(allocate), target=target)
    with refused(TileValueError, 'f is allocated inside T.Scale("warpgroup")', at="T.copy(f, D)"):
        make(T.alloc_shared).check(ranks=1, seeds=1)


def test_nor_a_name():
    def make(value):
        @T.prim_func
        def kernel(D: T.Tensor((8,), "int32")):
            with T.Kernel(1, threads=256):
                with T.Scale("warp") as (w, n):
                    x = D[w] + 1
                    D[w] = x
                D[0] = value(w, x)

        return kernel

    for name, value in (("w", lambda w, x: w), ("x", lambda w, x: x * 2)):
        for target in TARGETS:
            with refused(
                TileValueError,
                f'{name} is another value for each warp of T.Scale("warp")',
                at="D[0] = value(w, x)",
            ):
                tilescale.compile(make(value), target=target)


def test_nor_in_the_next_scale_of_that_name():
    @T.prim_func
    def kernel(D: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=256):
            with T.Scale("warpgroup") as (w, n):
                f = T.alloc_fragment((64, 64), "float32")
                T.copy(D, f)
            with T.Scale("warpgroup") as (w, n):
                if w == 0:
                    T.copy(f, D)

    with refused(
        TileValueError,
        "f is allocated inside",
        at="T.copy(f, D)",
        expected='every use inside that T.Scale("warpgroup")',
    ):
        tilescale.compile(kernel, target="cpu")


def test_results_of_reductions_are_read_by_every_warp():
    @T.prim_func
    def kernel(A: T.Tensor((64, 8), "float32"), D: T.Tensor((4, 2), "float32"), E: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=128):
            f, r = T.alloc_fragment((64, 8), "float32"), T.alloc_fragment((8,), "float32")
            T.copy(A, f)
            T.reduce_sum(f, r, dim=0)
            with T.Scale("warp") as (w, n):
                D[w, 0] = r[w] + r[7 - w]
                if r[w] > r[7]:
                    D[w, 1] = 1.0
            for i in T.Parallel(8):
                r[i] = r[i] * 2
            T.copy(r, E)

    a = np.random.default_rng(1).integers(-9, 9, (64, 8)).astype(np.float32)
    sums = a.sum(0)
    got = agree(kernel, {"A": a, "D": np.zeros((4, 2), np.float32), "E": np.zeros(8, np.float32)}, exact=True)
    assert np.array_equal(
        got["D"], np.stack([sums[:4] + sums[:3:-1], sums[:4] > sums[7]], 1)
    ) and np.array_equal(got["E"], sums * 2)
