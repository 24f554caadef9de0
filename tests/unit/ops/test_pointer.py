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
    text = lower(scaled(strided), "cuda:sm_90a").kernel_source
    assert "float* const A = (float*)a[0];" in text and "< m" in text


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
