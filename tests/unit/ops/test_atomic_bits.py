"""T.atomic_or, _and, _xor and _exch on the CPU, the simulator, emulated threads and nvcc."""

from __future__ import annotations

import functools
import operator

import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import refused
from tests.unit.cuda.test_toolchain import ARCHES, needs_nvcc
from tests.unit.language.test_tilelang_words import everywhere
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.passes import pipeline
from tilescale.errors import TileTypeError

BITS = {"or": operator.or_, "and": operator.and_, "xor": operator.xor}


def updates(kind: str, name: str):
    @T.prim_func
    def kernel(
        A: T.Tensor((4, 64), name), B: T.Tensor((2,), name), C: T.Tensor((64,), name), D: T.Tensor((4,), name)
    ):
        with T.Kernel(4, threads=64) as bx:
            word = getattr(T, f"atomic_{kind}")
            s, f = T.alloc_shared((1,), name), T.alloc_fragment((64,), name)
            s[0] = A[bx, 0]
            for i in T.Parallel(64):
                word(B[0], A[bx, i], memory_order="release")
                word(s[0], A[bx, i])
            T.copy(A[bx, :], f)
            word(C, f)
            D[bx] = s[0]
            if bx == 3:
                B[1] = word(s[0], A[0, 1], return_prev=True)

    return kernel


@pytest.mark.parametrize("name", ["int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("kind", BITS)
def test_updates_of_bits(kind: str, name: str):
    a = (
        np.frombuffer(np.random.default_rng(4).bytes(256 * np.dtype(name).itemsize), name)
        .reshape(4, 64)
        .copy()
    )
    if kind == "and":
        a |= np.array(0x5A5A0F, name)
    b, c = a[:2, 5].copy(), a[1].copy()
    got = everywhere(updates(kind, name), A=a, B=b, C=c, D=np.zeros(4, name))
    fold = functools.partial(functools.reduce, BITS[kind])
    assert got["B"][0] == fold(a.ravel(), b[0])
    np.testing.assert_array_equal(got["C"], fold(list(a), c))
    np.testing.assert_array_equal(got["D"], [fold(row, row[0]) for row in a])
    assert got["B"][1] == got["D"][3]


@pytest.mark.parametrize("name", ["int32", "float32", "float16", "float64"])
def test_exchanges(name: str):
    @T.prim_func
    def kernel(A: T.Tensor((33,), name), B: T.Tensor((1,), name), C: T.Tensor((32,), name)):
        with T.Kernel(1, threads=32):
            for k in T.serial(32):
                C[k] = T.atomic_exch(B[0], A[k])

    a = np.arange(33).astype(name) * 3 - 5
    got = everywhere(kernel, A=a, B=np.array([7], name), C=np.zeros(32, name))
    assert got["C"].tolist() == [7, *a[:31].tolist()] and got["B"][0] == a[31]


def test_bits_are_of_integers():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            T.atomic_or(A[0], 1.0)

    with refused(TileTypeError, "T.atomic_or of float32", expected="int32"):
        kernel.trace()


@needs_nvcc
@pytest.mark.parametrize("arch", ARCHES)
def test_updates_compile(arch: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", "nvcc")

    @T.prim_func
    def kernel(A: T.Tensor((4,), "int32"), B: T.Tensor((4,), "uint64"), C: T.Tensor((4,), "float16")):
        with T.Kernel(4) as bx:
            for word in (T.atomic_or, T.atomic_and, T.atomic_xor):
                word(A[bx], 5)
                word(B[bx], A[bx])
            C[0] = T.atomic_exch(C[bx], T.float16(A[0]))
            A[0] = T.atomic_exch(A[bx], 3)
            B[0] = T.atomic_exch(B[bx], B[1])

    made = Lowering(pipeline.run(kernel.trace(), target(arch))[0]).run()
    assert toolchain.compile_cubin(print_kernel(made), arch)
