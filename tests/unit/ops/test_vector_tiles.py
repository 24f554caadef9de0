"""Tensors and tiles of vectors: their lanes are a last axis in memory, and one element is a vector."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tests.kernels import refused, run
from tests.unit.cuda.emulated import agree, data, empty
from tests.unit.cuda.test_hopper import lowered
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.errors import TileSyntaxError, TileTypeError


@T.prim_func
def through_tiles(
    A: T.Tensor((64,), "float32x2"), B: T.Tensor[[64], T.float32x2], C: T.Tensor((64,), "float32x2")
):
    with T.Kernel(2, threads=32) as bx:
        s = T.alloc_shared((32,), "float32x2")
        f = T.alloc_fragment(s.shape, s.dtype)
        T.copy(A[bx * 32], s)
        T.copy(B[bx * 32 : bx * 32 + 32], f)
        for i in T.Parallel(32):
            f[i] = T.add2(f[i], s[i])
        for i in T.Parallel(32):
            v = f[i]
            C[bx * 32 + i] = T.float32x2(T.extract_lane(v, 1), T.extract_lane(s[i], 0))


@T.prim_func
def of_threads(
    A: T.Tensor((64,), "float32x2"), B: T.Tensor((64,), "float32x2"), C: T.Tensor((64,), "float32x2")
):
    """A thread's own memory, values of before an assignment, one element to another."""
    with T.Kernel(2, threads=32) as bx, T.Scale("thread") as (t, n):
        own = T.alloc_local((2,), "float32x2")
        at = bx * 32 + t
        own[0] = A[at]
        before = own[0]
        own[0] = B[at]
        own[1] = T.add2(before, own[0])
        C[at] = T.float32x2(T.extract_lane(own[1], 1), T.extract_lane(before, 0))


@T.prim_func
def by_two_axes(
    A: T.Tensor((64,), "float32x2"), B: T.Tensor((64,), "float32x2"), C: T.Tensor((64,), "float32x2")
):
    with T.Kernel(2, threads=32) as bx:
        s = T.alloc_shared((2, 32), "float32x2")
        T.fill(s, 7.0)
        T.copy(A[bx * 32], s[0, :])
        T.copy(B[bx * 32], s[1, 0:32])
        for i in T.Parallel(32):
            both = T.add2(s[0, i], s[1, i])
            s[1, i] = T.float32x2(T.extract_lane(both, 1), T.extract_lane(s[0, i], 0))
        for k in T.serial(31):
            T.copy(s[1, k], C[bx * 32 + k])
        for i in T.Parallel(1):
            T.copy(s[1, 31 - i], C[bx * 32 + 31 - i])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("kernel", [through_tiles, of_threads, by_two_axes], ids=lambda k: k.name)
def test_same_on_every_target(kernel: Any, arch: str):
    a, b = data((64, 2), "float32", 1), data((64, 2), "float32", 2)
    want = np.stack([(a + b)[:, 1], a[:, 0]], 1)
    given = {"A": a, "B": b, "C": empty((64, 2), "float32")}
    got = agree(kernel, given, exact=True, arch=arch)
    np.testing.assert_array_equal(got["C"], want)
    c = np.zeros((64, 2), np.float32)
    run(kernel)(a, b, c)
    np.testing.assert_array_equal(c, want)
    assert (report := kernel.check(args=given, seeds=2)), report


def test_lanes_stay_in_their_thread():
    """A loop over vectors in registers exchanges nothing, and copies them as vectors."""
    text = print_kernel(lowered(through_tiles)[0]).text
    assert text.count("uint2*)") == 4 and "f_shared" not in text


@pytest.mark.parametrize("target", ["cpu", "sim"])
def test_outputs_of_eager_kernels(target: str):
    @tilescale.jit(target=target)
    def halves(x):
        N = T.const("N")
        x: T.Tensor((N,), "float32x4")
        kept = T.alloc_global((N,), "float32x4")
        y, z = T.empty((N,), "float16x4"), T.empty((N,), "float32x2")
        with T.Kernel(1, threads=32):
            for i in T.Parallel(N):
                kept[i] = x[i]
        with T.Kernel(1, threads=32):
            T.clear(z)
            for i in T.Parallel(N):
                y[i] = T.cast(kept[i], T.float16x4)
                if i > 0:
                    z[i] = T.float32x2(T.extract_lane(kept[i], 3))
        return y, z

    x = torch.arange(20, dtype=torch.float32).reshape(5, 4)
    y, z = halves(x)
    assert y.dtype == torch.float16 and torch.equal(y.float(), x)
    assert torch.equal(z[1:], x[1:, 3:].expand(4, 2)) and not z[0].any()
    with refused(tilescale.errors.TileValueError, "axis 1 of x has extent 3", expected="4"):
        halves(torch.zeros(5, 3))


def one(act: Any) -> Any:
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32x2"), B: T.Tensor((64, 2), "float32")):
        with T.Kernel(1, threads=32):
            s, f = T.alloc_shared((64,), "float32x2"), T.alloc_fragment((64,), "float32")
            act(A, B, s, f)

    return kernel


@pytest.mark.parametrize(
    ("act", "kind", "message", "expected"),
    [
        (lambda A, B, s, f: T.copy(B, s), TileTypeError, "T.copy of scalars to float32x2", "the same vectors"),
        (lambda A, B, s, f: T.copy(s[0:4], B[0:4, :]), TileTypeError, "T.copy of float32x2 to scalars", "the same vectors"),
        (lambda A, B, s, f: T.reduce_sum(s, f, dim=0), TileTypeError, "is s, of float32x2", "T.copy, T.fill and elements"),
        (lambda A, B, s, f: T.atomic_add(A[0:4], 1.0), TileTypeError, "of float32x2", "T.copy, T.fill and elements"),
        (lambda A, B, s, f: T.atomic_add(A[0], 1.0), TileTypeError, "float32x2", "a tensor, an allocation"),
        (lambda A, B, s, f: s.__setitem__(0, 1.0), TileTypeError, "1.0 is assigned to an element of s", "a vector, T.float32x2"),
        (lambda A, B, s, f: s.__setitem__(0, T.float32x4(1.0)), TileTypeError, "float32x4 is assigned to an element of s", "a vector, T.float32x2"),
        (lambda A, B, s, f: s.__setitem__(slice(0, 4), 1.0), TileSyntaxError, "a whole part of s is assigned", ""),
        (lambda A, B, s, f: s[T.Ramp(0, 1, 2)], TileTypeError, "T.Ramp as an index of s", "one vector"),
        (lambda A, B, s, f: T.view(s, (128,)), TileTypeError, "a view of s, of float32x2", "a scalar dtype"),
        (lambda A, B, s, f: T.view(f, (32,), "float32x2"), TileTypeError, "as float32x2", "a scalar dtype"),
        (lambda A, B, s, f: T.annotate_layout({s: T.Layout((64,), lambda i: i)}), TileTypeError, "T.annotate_layout of s", "a tile of scalars"),
        (lambda A, B, s, f: T.annotate_safe_value({A: 1.0}), TileTypeError, "T.annotate_safe_value of A", ""),
        (lambda A, B, s, f: s[0] + 1.0, TileTypeError, "is a vector, and no operand", "a scalar"),
    ],
)  # fmt: skip
def test_refused(act: Any, kind: Any, message: str, expected: str):
    with refused(kind, message, **({"expected": expected} if expected else {})):
        one(act).trace()


def test_refused_tensors():
    for make in (lambda: T.SymmTensor((8,), "float32x2"), lambda: T.StridedTensor((8,), (2,), "float32x2")):
        with refused(TileTypeError, "of float32x2", expected="a last axis of 2"):
            make()


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
def test_nvcc_takes_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", "nvcc")
    for kernel in (through_tiles, of_threads):
        toolchain.compile_cubin(print_kernel(lowered(kernel)[0]), "sm_90a")


@pytest.mark.parametrize("alloc, shape", [("shared", (128,)), ("shared", (64, 2)), ("fragment", (64, 2))])
def test_a_view_of_vectors_is_of_their_lanes(alloc: str, shape: tuple[int, ...]):
    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=32):
            v = getattr(T, f"alloc_{alloc}")((64,), T.float32x2)
            lanes = T.view(v, shape, "float32")
            for i in T.Parallel(64):
                v[i] = T.add2(T.float32x2(A[2 * i], A[2 * i + 1]), T.float32x2(1.0))
            for i in T.Parallel(128):
                B[i] = lanes[i] if len(shape) == 1 else lanes[i // 2, i % 2]

    a = data((128,), "float32")
    np.testing.assert_array_equal(agree(kernel, {"A": a, "B": empty((128,), "float32")})["B"], a + 1)
