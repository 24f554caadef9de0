"""Products read the tensor itself where a tile is only a copy of it for them, and the tile wherever that
could be seen."""

from __future__ import annotations

import pytest
import torch

import tilescale.language as T
from tests.kernels import run


def product(n, k, *, trans=False, also_read=False, written=False, aliasing=False):
    width = 1024 if aliasing else (k if trans else n)

    @T.prim_func
    def kernel(
        A: T.Tensor((32, k), "float32"),
        B: T.Tensor((n if trans else k, width), "float32"),
        C: T.Tensor((32, n), "float32"),
    ):
        with T.Kernel(T.ceildiv(n, 48)) as bx:
            a, c = T.alloc_shared((32, 16), "float32"), T.alloc_fragment((32, 48), "float32")
            b = T.alloc_shared((48, 16) if trans else (16, 48), "float32")
            T.clear(c)
            for t in T.Pipelined(T.ceildiv(k, 16), num_stages=2):
                T.copy(A[0, t * 16], a)
                if trans:
                    T.copy(B[bx * 48, t * 16], b)
                else:
                    T.copy(B[t * 16, bx * 48], b)
                T.gemm(a, b, c, transpose_B=trans)
                if also_read:
                    for i in T.Parallel(32):
                        c[i, 0] += 0 * b[0, i % 16]
            if written:
                B[0, 0] = B[0, 0]
            T.copy(c, C[0, bx * 48])

    return kernel


def copies_b(kernel) -> bool:
    """Whether the tile b has a place in the kernel's thread IR that is written."""
    return " b[" in kernel.get_kernel_source("thread").replace("\t", " ")


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("n", [96, 100])
def test_same_product_with_and_without_the_tile(n: int, trans: bool):
    torch.manual_seed(n)
    k = 64
    a, b = torch.randn(32, k), torch.randn(n, k) if trans else torch.randn(k, n)
    want = a @ (b.T if trans else b)
    results = []
    for depth in (1, 2):  # a ring of two stages is never forwarded
        c = torch.full((32, n), float("nan"))
        kernel = run(product(n, k, trans=trans), depth)
        kernel(a, b, c)
        torch.testing.assert_close(c, want, rtol=1e-5, atol=1e-5)
        results.append(c)
    assert results[0].equal(results[1])


def test_left_out_only_where_nobody_sees_it():
    assert not copies_b(run(product(96, 64)))
    assert not copies_b(run(product(96, 64, trans=True)))
    assert copies_b(run(product(100, 64)))  # the last tile lies over the edge: it needs its zeros
    assert copies_b(run(product(96, 64, also_read=True)))
    assert copies_b(run(product(96, 64, written=True)))
    assert copies_b(run(product(96, 64, aliasing=True)))
