"""Statements that read what they write, on the emulated GPU: every thread has what was there before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data


@T.prim_func
def shared_fill(A: T.Tensor((16, 64), "float32")):
    with T.Kernel(1, threads=64):
        a = T.alloc_shared((16, 64), "float32")
        T.fill(a, 3)
        T.fill(a, a[3, 3] + 1)
        T.copy(a, A)


@T.prim_func
def fragment_fill(A: T.Tensor((16, 64), "float32")):
    with T.Kernel(1, threads=64):
        a = T.alloc_fragment((16, 64), "float32")
        T.fill(a, 3)
        T.fill(a, a[3, 3] + 1)
        T.copy(a, A)


@T.prim_func
def tensor_fill(A: T.Tensor((16, 64), "float32")):
    with T.Kernel(1, threads=64):
        T.fill(A, A[3, 3] + 1)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("kernel", [shared_fill, fragment_fill, tensor_fill], ids=lambda k: k.name)
def test_a_tile_filled_with_one_of_its_elements(kernel: Any, arch: str):
    agree(kernel, {"A": data((16, 64), "float32")}, exact=True, arch=arch)


@T.prim_func
def taken(A: T.Tensor((64,), "int32"), B: T.Tensor((128, 64), "int32")):
    """Each warp has a copy of the sums."""
    with T.Kernel(1, threads=128):
        a, s = T.alloc_fragment((128, 64), "int32"), T.alloc_fragment((64,), "int32")
        T.copy(B, a)
        T.reduce_sum(a, s, dim=0)
        for i in T.Parallel(64):
            s[i] += A[i]
            A[i] = 0
        for i, j in T.Parallel(128, 64):
            a[i, j] += s[j]
        T.copy(a, B)


@T.prim_func
def swapped(A: T.Tensor((64,), "int32"), B: T.Tensor((128, 64), "int32")):
    with T.Kernel(1, threads=128):
        a, s = T.alloc_fragment((128, 64), "int32"), T.alloc_fragment((64,), "int32")
        b = T.alloc_shared((64,), "int32")
        T.copy(B, a)
        T.copy(A, b)
        T.reduce_sum(a, s, dim=0)
        for i in T.Parallel(64):
            t = b[i]
            b[i] = s[i]
            s[i] = t
        for i, j in T.Parallel(128, 64):
            a[i, j] += s[j]
        T.copy(a, B)
        T.copy(b, A)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("kernel", [taken, swapped], ids=lambda k: k.name)
def test_memory_that_a_nest_takes_from_and_writes(kernel: Any, arch: str):
    args = {"A": data((64,), "int32", 1), "B": data((128, 64), "int32", 2)}
    for seed in range(3):
        agree(kernel, args, exact=True, arch=arch, seed=seed)


@pytest.mark.parametrize("scope", ["global", "shared"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_an_iteration_reads_what_it_has_written(arch: str, scope: str):
    """Neighbours that could be read as a vector in front of the iterations, and are written by then."""

    @T.prim_func
    def kernel(X: T.Tensor((64,), "int32"), A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=16):
            s = T.alloc_shared((64,), "int32")
            T.fill(s, 7)
            to = A if scope == "global" else s
            for i in T.Parallel(64):
                to[i] = X[i] * 2
                B[i] = to[i] + 1
            T.copy(to, A)

    x = data((64,), "int32")
    got = agree(kernel, {"X": x, "A": x * 0 - 1, "B": x * 0}, exact=True, arch=arch)
    assert (got["B"] == x * 2 + 1).all()


def narrow(what: str, dtype: str, n: int) -> Any:
    """A nest of fewer groups of neighbours than threads, each of which several of them hold."""

    @T.prim_func
    def kernel(X: T.Tensor((n,), dtype), Y: T.Tensor((n,), dtype)):
        with T.Kernel(1, threads=64):
            if what == "tensor":
                for j in T.Parallel(n):
                    X[j] = X[j] + 1
            elif what == "part":
                for j in T.Parallel(n // 2):
                    X[j] = X[j + n // 2]
            elif what == "condition":
                for j in T.Parallel(n):
                    if X[j] > 3:
                        X[j] = 2
            else:
                s, f = T.alloc_shared((n,), dtype), T.alloc_fragment((n,), dtype)
                T.copy(X, s)
                for j in T.Parallel(n):
                    f[j] = s[j] + 1
                    s[j] = f[j] * 2
                for j in T.Parallel(n):
                    Y[n - 1 - j] = f[j] + s[j]

    return kernel


@pytest.mark.parametrize("dtype", ["int8", "int16"])
@pytest.mark.parametrize("what", ["tensor", "part", "condition", "fragment"])
def test_nobody_else_reads_what_the_one_who_writes_it_writes(what: str, dtype: str):
    kernel = narrow(what, dtype, 32)
    given = {"X": np.arange(32, dtype=dtype) % 7, "Y": np.zeros(32, dtype)}
    for seed in range(3):
        agree(kernel, given, exact=True, seed=seed)
