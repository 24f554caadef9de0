"""T.ws: what each warpgroup does, written into loops that all share, on the simulator and the emulator."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.ops.test_argmax import run
from tilescale.errors import TileSyntaxError, TileValueError

RNG = np.random.default_rng(5)

ROOT = Path(__file__).resolve().parents[3]


def product(M: int, N: int, K: int, stages: int, copies: int, computes: int) -> Any:
    """C = A B: one warpgroup copies into stages, the other multiplies."""

    @T.prim_func
    def main(A: T.Tensor((M, K), "float16"), B: T.Tensor((K, N), "float16"), C: T.Tensor((M, N), "float16")):
        with T.Kernel(T.ceildiv(N, 64), T.ceildiv(M, 64), threads=256) as (bx, by):
            a = T.alloc_shared((stages, 64, 64), "float16")
            b = T.alloc_shared((stages, 64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            full, empty = T.alloc_barrier([128] * stages), T.alloc_barrier([128] * stages)
            with T.ws(computes):
                T.clear(c)
            for k in T.serial(T.ceildiv(K, 64)):
                s = k % stages
                with T.ws(copies):
                    T.barrier_wait(empty[s], (k // stages + 1) % 2)
                    T.tma_copy(A[by * 64, k * 64], a[s, :, :], barrier=full[s])
                    T.tma_copy(B[k * 64, bx * 64], b[s, :, :], barrier=full[s])
                    T.barrier_arrive(full[s])
                with T.ws(computes):
                    T.barrier_wait(full[s], k // stages % 2)
                    T.gemm(a[s, :, :], b[s, :, :], c)
                    T.barrier_arrive(empty[s])
            with T.ws(computes):
                T.copy(c, C[by * 64, bx * 64])

    return main


@pytest.mark.parametrize("target", ["sim", "sm_90a"])
@pytest.mark.parametrize("how", [(1, 0, 1), (2, 1, 0)], ids=str)
def test_one_copies_and_one_multiplies(how: tuple[int, int, int], target: str):
    M, N, K = 64, 128, 192
    a, b = RNG.standard_normal((M, K)).astype("float16"), RNG.standard_normal((K, N)).astype("float16")
    args = {"A": a, "B": b, "C": np.full((M, N), np.nan, "float16")}
    out = run(product(M, N, K, *how), args, target)
    np.testing.assert_allclose(
        out["C"].astype(float), a.astype(float) @ b.astype(float), rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize("target", ["cpu", "sim", "sm_90a"])
def test_each_warpgroup_has_its_part(target: str):
    @T.prim_func
    def kernel(A: T.Tensor((3, 64), "float32"), B: T.Tensor((3, 64), "float32")):
        with T.Kernel(1, threads=384):
            f, g = T.alloc_fragment((64,), "float32"), T.alloc_fragment((64,), "float32")
            for r in T.serial(3):
                with T.ws(2):
                    T.copy(A[r, 0], f)
                if r == 1:
                    with T.ws(0):
                        T.fill(g, 5)
                        T.copy(g, B[r, 0])
                with T.ws(2):
                    for i in T.Parallel(64):
                        f[i] = f[i] * 2
                    if r != 1:
                        T.copy(f, B[r, 0])

    a = RNG.standard_normal((3, 64)).astype("float32")
    out = run(kernel, {"A": a, "B": np.full((3, 64), np.nan, "float32")}, target)
    assert (out["B"] == np.stack([a[0] * 2, np.full(64, 5, "float32"), a[2] * 2])).all()


def refusing(how: str) -> Any:
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=96 if how == "threads" else 256):
            f, s = T.alloc_fragment((64,), "float32"), T.alloc_shared((64,), "float32")
            if how == "all":
                T.clear(f)
            if how == "number":
                with T.ws(2):
                    T.clear(f)
            if how == "scale":
                with T.Scale("warp"):
                    with T.ws(0):
                        T.clear(f)
            with T.ws(0):
                T.clear(f)
            if how == "between":
                T.copy(A, f)
            with T.ws(1):
                T.clear(s)

    return kernel


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("number", TileValueError, r"T.ws\(2\) of a block of 256 threads"),
        ("threads", TileValueError, "a block of 96 threads"),
        ("scale", TileSyntaxError, "in T.Scale"),
        ("between", TileSyntaxError, "all threads of the block do this"),
        ("all", TileSyntaxError, "f is set by warpgroups, and touched by all threads of the block, too"),
    ],
)
def test_refusals(how: str, kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        refusing(how).trace()


@pytest.mark.parametrize("target", ["sim", "sm_90a"])
def test_a_copy_of_all_threads_between(target: str):
    @T.prim_func
    def kernel(A: T.Tensor((3, 64), "float32"), B: T.Tensor((2, 3, 64), "float32")):
        with T.Kernel(1, threads=256):
            s, f = T.alloc_shared((64,), "float32"), T.alloc_fragment((64,), "float32")
            g = T.alloc_fragment((64,), "float32")
            with T.ws(1):
                T.fill(g, 10)
            with T.ws(0):
                T.clear(f)
            for k in T.serial(3):
                T.copy(A[k, 0], s)
                with T.ws(1):
                    for i in T.Parallel(64):
                        g[i] += s[63 - i]
                    T.copy(g, B[1, k, 0])
                with T.ws(0):
                    for i in T.Parallel(64):
                        f[i] += s[i]
                    T.copy(f, B[0, k, 0])

    a = RNG.standard_normal((3, 64)).astype("float32")
    out = run(kernel, {"A": a, "B": np.full((2, 3, 64), np.nan, "float32")}, target)
    np.testing.assert_allclose(out["B"][0], a.cumsum(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out["B"][1], 10 + a[:, ::-1].cumsum(0), rtol=1e-5, atol=1e-5)


def test_the_barrier_of_warpgroups_is_known_where_nothing_else_is_loaded():
    """In a process of its own, whose kernel names no other word of its file."""
    text = """
import tilescale.language as T
@T.prim_func
def kernel(A: T.Tensor((3, 64), "float32"), B: T.Tensor((2, 3, 64), "float32")):
    with T.Kernel(1, threads=256):
        s = T.alloc_shared((64,), "float32")
        for k in T.serial(3):
            T.copy(A[k, 0], s)
            with T.ws(1):
                T.copy(s, B[1, k, 0])
            with T.ws(0):
                T.copy(s, B[0, k, 0])
kernel.trace()
"""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.py")
        path.write_text(text)
        done = subprocess.run(
            [sys.executable, str(path)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    assert done.returncode == 0, done.stderr


def cut(threads: int, first: int, what: str = "") -> Any:
    """Rows of A added up under a condition, their products under another one, copies by whoever is left."""

    @T.prim_func
    def kernel(A: T.Tensor((4, 64), "float32"), B: T.Tensor((3, 64), "float32")):
        with T.Kernel(1, threads=threads):
            s, f = T.alloc_shared((4, 64), "float32"), T.alloc_fragment((64,), "float32")
            n = T.alloc_var("int32", 0)
            tx = T.get_thread_binding()
            T.clear(f)
            T.copy(A, s)
            if tx < first:
                g = T.alloc_fragment((64,), "float32")
                T.clear(g)
                for k in T.serial(4):
                    for i in T.Parallel(64):
                        g[i] += s[k, i]
                if what == "fragment":
                    T.copy(g, f)
                if what == "variable":
                    n = n + 1
                if what == "barrier":
                    T.sync_threads()
                if what == "index":
                    for i in T.Parallel(64):
                        g[i] += tx
                T.copy(g, B[0, 0])
            elif tx < threads - 8:
                g = T.alloc_fragment((64,), "float32")
                T.fill(g, 1)
                for k in T.Pipelined(4, num_stages=2):
                    r = T.alloc_shared((64,), "float32")
                    T.copy(A[k, 0], r)
                    for i in T.Parallel(64):
                        g[i] *= r[i]
                T.copy(g, B[1, 0])
            else:
                T.copy(s[3, :], B[2, 0])
                if what == "use":
                    T.copy(f, B[2, 0])

    return kernel


@pytest.mark.parametrize("target", ["sim", "sm_90a", "sm_80"])
@pytest.mark.parametrize(("threads", "first"), [(96, 32), (96, 1), (256, 100), (64, 64)])
def test_conditions_that_cut_warpgroups(threads: int, first: int, target: str):
    a = RNG.standard_normal((4, 64)).astype("float32")
    out = run(cut(threads, first), {"A": a, "B": np.full((3, 64), np.nan, "float32")}, target)["B"]
    np.testing.assert_allclose(out[0], a.sum(0), rtol=1e-5, atol=1e-5)
    if first == threads:  # nobody is left
        assert np.isnan(out[1:]).all()
        return
    np.testing.assert_allclose(out[1], a.prod(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out[2], a[3])


@pytest.mark.parametrize("what", ["fragment", "variable", "barrier", "index"])
def test_branches_that_differ_by_who_runs_them(what: str):
    with pytest.raises(TileSyntaxError):
        cut(96, 32, what).trace()


def with_tiles_of_its_own(what: str) -> Any:
    """Warpgroups 0 and 2 add up what they make in memory of T.ws, 1 reverses a row in memory of a loop
    around it."""

    @T.prim_func
    def kernel(A: T.Tensor((256,), "float32"), B: T.Tensor((2, 256), "float32")):
        with T.Kernel(1, threads=384):
            for r in T.serial(2):
                u = T.alloc_shared((256,), "float32")
                with T.ws(0, 2):
                    x = T.alloc_fragment((256,), "float32")
                    if what == "variable":
                        v = T.alloc_var("float32", 1.0)
                        v = v + r
                        T.fill(x, v)
                    elif what == "view":
                        y = T.alloc_shared((4, 64), "float32")
                        T.fill(y, r + 1)
                        T.copy(T.view(y, (256,)), x)
                    else:
                        T.fill(x, r + 1)
                    for j in T.Parallel(256):
                        T.atomic_add(B[0, j], x[j] * A[j])
                with T.ws(1):
                    T.copy(A, u)
                    for j in T.Parallel(256):
                        B[1, j] = u[255 - j] + r

    return kernel


@pytest.mark.parametrize("target", ["sim", "sm_90a"])
@pytest.mark.parametrize("what", ["fragment", "variable", "view"])
def test_what_warpgroups_allocate_is_each_ones_own(what: str, target: str):
    a = RNG.integers(0, 9, 256).astype("float32")
    out = run(with_tiles_of_its_own(what), {"A": a, "B": np.zeros((2, 256), "float32")}, target)["B"]
    np.testing.assert_array_equal(out, [6 * a, a[::-1] + 1])


def test_a_tile_of_several_warpgroups_has_its_layout_in_each():
    @T.prim_func
    def kernel(B: T.Tensor((256,), "float32")):
        with T.Kernel(1, threads=384), T.ws(0, 2):
            x = T.alloc_fragment((256,), "float32")
            T.annotate_layout({x: T.Fragment((256,), lambda i: (i % 128, i // 128))})
            T.fill(x, 2)
            for j in T.Parallel(256):
                T.atomic_add(B[j], x[j])

    assert len(kernel.trace().hints["layouts"]) == 2
    out = run(kernel, {"B": np.zeros(256, "float32")}, "sm_90a")["B"]
    np.testing.assert_array_equal(out, np.full(256, 4))
