"""T.Parallel nests in one form: those that are all of another one's body are part of it, and a constant bound
around the body is an extent."""

from __future__ import annotations

from typing import Any

import torch

import tilescale
import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.ir.nests import is_nest, nest_of
from tilescale.compiler.passes import pipeline
from tilescale.compiler.tvm_compat import structural_walk, tirx


def extents(kernel: Any) -> list[tuple[int, ...]]:
    """Of the nests of a kernel as traced, the outermost alone."""
    found: list[Any] = []
    structural_walk(kernel.trace().func.body, (tirx.For, lambda s: found.append(s) if is_nest(s) else None))
    return [nest_of(s).extents for s in found if "ts.kind" in s.annotations]


def test_a_nest_in_a_nest_is_one():
    """And its tiles lie as a whole nest's: a row to several threads."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32"), n: T.int32):
        with T.Kernel(1, threads=128):
            a = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            for i in T.Parallel(64):
                for j in T.Parallel(64):
                    if i >= n:
                        a[i, j] = 0.0
            T.copy(a, B)

    assert extents(kernel) == [(64, 64)]
    agree(kernel, {"A": data((64, 64), "float32"), "B": empty((64, 64), "float32"), "n": 40})


def test_iterations_that_follow_one_another_stay_a_thread_s():
    @T.prim_func
    def kernel(
        A: T.Tensor((64, 8), "float32"), B: T.Tensor((64,), "float32"), C: T.Tensor((64, 8), "float32")
    ):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                for j in T.Parallel(8):
                    B[i] += A[i, j]
            for i in T.Parallel(64):
                for j in T.Parallel(7):
                    C[i, j + 1] = C[i, j] + 1

    assert sorted(extents(kernel)) == [(7,), (8,), (64,), (64,)]
    a, b, c = torch.arange(512.0).reshape(64, 8), torch.zeros(64), torch.zeros(64, 8)
    tilescale.compile(kernel, target="cpu")(a, b, c)
    assert torch.equal(b, a.sum(1))


def test_a_constant_bound_around_the_body_is_the_extent():
    """Of each loop that it bounds; other conditions stay where they are."""

    @T.prim_func
    def kernel(A: T.Tensor((32, 32), "float32"), B: T.Tensor((32, 32), "float32"), n: T.int32):
        with T.Kernel(1, threads=128):
            for i, j in T.Parallel(32, 32):
                if i < 16 and j < 8:
                    B[i, j] = A[i + 16, j]
            for i, j in T.Parallel(32, 32):
                if i < n:
                    if j < 40:
                        B[i, j] = B[i, j] + 1.0

    assert extents(kernel) == [(16, 8), (32, 32)]
    agree(kernel, {"A": data((32, 32), "float32"), "B": empty((32, 32), "float32"), "n": 5})


def test_parts_of_an_accumulator_find_its_rows():
    """Half of a product's rows at a time, as gradients of sparse attention store them: the bound is no reason to pad
    the product to the rows that the loop would have without it."""

    @T.prim_func
    def kernel(
        A: T.Tensor((32, 64), "float16"),
        B: T.Tensor((64, 128), "float16"),
        C: T.Tensor((2, 16, 128), "float32"),
    ):
        with T.Kernel(1, threads=256):
            a, b = T.alloc_shared((32, 64), "float16"), T.alloc_shared((64, 128), "float16")
            c, part = T.alloc_fragment((32, 128), "float32"), T.alloc_shared((16, 128), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.clear(c)
            T.gemm(a, b, c, policy=T.GemmWarpPolicy.FullCol)
            for s in range(2):
                for i, j in T.Parallel(32, 128):
                    if i < 16:
                        part[i, j] = c[i + s * 16, j]
                T.copy(part, C[s, :, :])

    layouts = pipeline.run(kernel.trace(), target("sm_90a"))[0].layouts
    assert next(f.slots for tile, f in layouts.items() if tile.name == "c") == 32 * 128 // 256
    agree(
        kernel,
        {
            "A": data((32, 64), "float16", 1),
            "B": data((64, 128), "float16", 2),
            "C": empty((2, 16, 128), "float32"),
        },
    )
