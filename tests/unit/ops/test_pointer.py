"""T.ptr and T.make_tensor: tensors at addresses that a kernel reads, on the CPU and in CUDA's text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tests.kernels import refused, run
from tilescale.compiler.checks.run import launch
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError
from tilescale.lowered import lower


def addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([t.data_ptr() for t in tensors])


def grouped(groups: int, rows: int, k: int, n: int) -> Any:
    """C of each group is A B: the group is chosen by what the kernel reads."""

    @T.prim_func
    def kernel(
        a: T.Tensor((groups,), T.ptr),
        b: T.Tensor((groups,), T.ptr),
        c: T.Tensor((groups,), T.ptr),
        order: T.Tensor((groups,), "int32"),
    ):
        with T.Kernel(groups, T.ceildiv(n, 32), threads=128) as (g, by):
            which = T.alloc_var("int32")
            which = order[g]
            A = T.make_tensor(a[which], (rows, k), "float16")
            B = T.make_tensor(b[which], (k, n), "float16")
            C = T.make_tensor(c[which], (rows, n), "float16")
            x, y = T.alloc_shared((32, 32), "float16"), T.alloc_shared((32, 32), "float16")
            acc = T.alloc_fragment((32, 32), "float32")
            T.clear(acc)
            for step in T.Pipelined(T.ceildiv(k, 32), num_stages=2):
                T.copy(A[0, step * 32], x)
                T.copy(B[step * 32, by * 32], y)
                T.gemm(x, y, acc)
            T.copy(acc, C[0, by * 32])

    return kernel


def test_groups_by_a_table():
    kernel = grouped(3, 20, 80, 48)
    a, b = [torch.randn(20, 80).half() for _ in range(3)], [torch.randn(80, 48).half() for _ in range(3)]
    c = [torch.zeros(20, 48).half() for _ in range(3)]
    run(kernel)(addresses(a), addresses(b), addresses(c), torch.tensor([2, 0, 1], dtype=torch.int32))
    for x, y, z in zip(a, b, c):
        assert torch.allclose(z.float(), x.float() @ y.float(), atol=0.05, rtol=0.01)
    text = lower(kernel, "cuda:sm_90a").kernel_source
    assert all(
        f"half* const {x.upper()} = (half*)(which >= 0 && which < 3 ? {x}[which] : 0L);" in text
        for x in "abc"
    )
    assert "tma" not in text  # nobody has made its map


def scaled(strided: bool = False) -> Any:
    @T.prim_func
    def kernel(a: T.ptr, b: T.ptr, m: T.int32, n: T.int32):
        A = T.make_tensor(a, (m, n), "float32", (n, 1)) if strided else T.make_tensor(a, (m, n), "float32")
        B = T.make_tensor(b, (n, m), "float32", strides=(1, n)) if strided else T.make_tensor(b, (m, n))
        with T.Kernel(T.ceildiv(m, 8), threads=32) as g:
            for i, j in T.Parallel(8, 16):
                if strided:
                    B[j, g * 8 + i] = A[g * 8 + i, j] * 2
                else:
                    B[g * 8 + i, j] = A[g * 8 + i, j] * 2

    return kernel


@pytest.mark.parametrize("strided", [False, True])
def test_one_tensor_by_itself(strided: bool):
    """Given a tensor of any library, or its address; elements outside of the extents are not touched."""
    made = tilescale.compile(scaled(strided), target="cpu")
    a = torch.randn(11, 9)
    for give in (lambda t: t, lambda t: t.data_ptr(), lambda t: t.numpy()):
        b = torch.zeros(12, 9)
        made(give(a), give(b), 11, 9)
        assert torch.equal(b[:11], a * 2) and not b[11].any()
    with refused(TileTypeError, "kernel takes an address, not str"):
        made("a", a, 11, 9)
    for number in (-1, 1 << 64):
        with refused(TileValueError, f"kernel: a is {number}, which is no address"):
            made(number, a, 11, 9)
    text = lower(scaled(strided), "cuda:sm_90a").kernel_source
    assert "float* const A = (float*)a[0];" in text and "< m" in text


def test_a_tensor_by_itself_is_looked_at():
    """It has to be what the kernel takes its memory for, as far as the call tells."""
    made = tilescale.compile(scaled(), target="cpu")
    a, b = torch.randn(11, 9), torch.zeros(11, 9)
    declared = "T.make_tensor takes it"
    with refused(TileTypeError, "a is a tensor of float64", expected=f"float32, of which {declared}"):
        made(a.double(), b, 11, 9)
    with refused(TileTypeError, "b is a tensor of int32", write='b.astype("float32")'):
        made(a, b.int().numpy(), 11, 9)
    with refused(TileValueError, "a is not contiguous", expected="row-major", write="a.contiguous()"):
        made(torch.randn(9, 11).T, b, 11, 9)
    with refused(TileValueError, "b has 90 elements", expected="99 at least: T.make_tensor(b, (m, n))"):
        made(a, b[:10], 11, 9)
    with refused(TileTypeError, "a is on meta"):
        made(a.to("meta"), b, 11, 9)
    assert not b.any()
    strided = tilescale.compile(scaled(True), target="cpu")
    strided(a, b.T, 11, 9)
    assert torch.equal(b, a * 2)
    with refused(
        TileValueError, "has 97 elements", expected="99 at least: T.make_tensor(b, (n, m), strides=(1, n))"
    ):
        strided(a, torch.zeros(108).as_strided((9, 9), (1, 11)), 11, 9)


def test_what_only_some_calls_take_a_tensor_for_is_not_asked_of_all():
    @T.prim_func
    def kernel(a: T.ptr, X: T.Tensor((T.dynamic("n"),), "float32"), wanted: T.int32):
        with T.Kernel(1):
            if wanted > 0:
                A = T.make_tensor(a, (X.shape[0] * 2,), "float32")
                A[X.shape[0]] = X[0]

    made, x = tilescale.compile(kernel, target="cpu"), torch.ones(4)
    made(torch.zeros(1, dtype=torch.int8), x, 0)

    @T.prim_func
    def always(a: T.ptr, X: T.Tensor((T.dynamic("n"),), "float32")):
        A = T.make_tensor(a, (X.shape[0] * 2,), "float32")
        with T.Kernel(1):
            A[X.shape[0]] = X[0]

    made = tilescale.compile(always, target="cpu")
    with refused(TileValueError, "a has 7 elements", expected="8 at least: T.make_tensor(a, (n * 2,))"):
        made(torch.zeros(7), x)
    made(torch.zeros(8), x)


def test_what_is_no_tensor():
    def made(of: Any) -> Any:
        @T.prim_func
        def kernel(p: T.Tensor((2,), T.ptr), f: T.Tensor((2,), "float32"), n: T.int64):
            with T.Kernel(1):
                X = of(p, f, n)
                X[0] = 1

        return kernel.trace()

    for of in (
        lambda p, f, n: T.make_tensor(f[0], (4,)),
        lambda p, f, n: T.make_tensor(p, (4,)),
        lambda p, f, n: T.make_tensor(n, (4,)),
    ):
        with refused(TileTypeError, "T.make_tensor at", expected="T.ptr"):
            made(of)
    with refused(TileTypeError, "T.make_tensor of int4"):
        made(lambda p, f, n: T.make_tensor(p[0], (4,), "int4"))
    with refused(TileValueError, "extent 0 of T.make_tensor is 0"):
        made(lambda p, f, n: T.make_tensor(p[0], (0,)))
    with refused(TileValueError, "T.make_tensor of 1 axes with 2 strides"):
        made(lambda p, f, n: T.make_tensor(p[0], (4,), strides=(4, 1)))


def test_the_simulator_has_no_addresses():
    args = {"a": np.zeros(1, np.int64), "b": np.zeros(1, np.int64), "m": 8, "n": 8}
    with refused(TileSyntaxError, "T.make_tensor is not there on the simulator"):
        launch(scaled(), 1, args)


def test_a_tensor_that_begins_between_vectors():
    """A kernel moves what a pointer points to in 16 bytes."""

    @T.prim_func
    def kernel(p: T.ptr, C: T.Tensor((16, 8), "float32")):
        with T.Kernel(1, threads=32):
            A, s = T.make_tensor(p, (16, 8), "float32"), T.alloc_shared((16, 8), "float32")
            T.copy(A, s)
            T.copy(s, C)

    made, x, c = tilescale.compile(kernel, target="cpu"), torch.arange(256.0), torch.zeros(16, 8)
    with refused(TileValueError, "p begins at an address that is no multiple of 16", write="p.clone()"):
        made(x[1:129], c)
    made(x[4:132], c)
    assert c.flatten().equal(x[4:132])
