"""The printed tile IR and scheduled IR of three kernels: a pipelined GEMM, a softmax, an all-gather fused
with a reduction."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import tilescale.language as T
from tests.kernels import scheduled
from tilescale.compiler.ir.text import text
from tilescale.compiler.passes.pipeline import tile_level
from tilescale.compiler.passes.schedule import schedule

Golden = Callable[[str, str], None]


@T.prim_func
def gemm(
    A: T.Tensor((T.dynamic("m"), 96), "float16"),
    B: T.Tensor((96, 128), "float16"),
    C: T.Tensor((T.dynamic("m"), 128), "float16"),
):
    with T.Kernel(2, T.ceildiv(A.shape[0], 64), threads=128) as (bx, by):
        A_s, B_s = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 64), "float16")
        C_l = T.alloc_fragment((64, 64), "float32")
        T.clear(C_l)
        for k in T.Pipelined(3, num_stages=3):
            T.copy(A[by * 64, k * 32], A_s)
            T.copy(B[k * 32, bx * 64], B_s)
            T.gemm(A_s, B_s, C_l)
        for i, j in T.Parallel(64, 64):
            C_l[i, j] = T.max(C_l[i, j], 0)
        T.copy(C_l, C[by * 64, bx * 64])


@T.prim_func
def softmax(A: T.Tensor((32, 100), "float32"), C: T.Tensor((32, 100), "float32")):
    with T.Kernel(32, threads=64) as row:
        x, top, total = (
            T.alloc_fragment((100,), "float32"),
            T.alloc_fragment((1,), "float32"),
            T.alloc_fragment((1,), "float32"),
        )
        T.copy(A[row, 0], x)
        T.reduce_max(x, top)
        for i in T.Parallel(100):
            x[i] = T.exp(x[i] - top[0])
        T.reduce_sum(x, total)
        for i in T.Parallel(100):
            x[i] = x[i] / total[0]
        T.copy(x, C[row, 0])


@T.prim_func
def gather_sum(
    A: T.Tensor((64,), "float32"),
    G: T.SymmTensor((4, 64), "float32"),
    ready: T.Signal((4,)),
    C: T.Tensor((64,), "float32"),
):
    with T.Kernel(1, threads=64):
        with T.Scale("device") as (rank, num):
            t, total = T.alloc_shared((64,), "float32"), T.alloc_fragment((64,), "float32")
            T.clear(total)
            for r in T.serial(num):
                T.copy(A, G[rank, 0:64], dst=(rank + r) % num, signal=ready[rank])
            for r in T.serial(num):
                if r == 3:
                    break
                T.wait(ready[r])
                T.copy(G[r, 0], t)
                for i in T.Parallel(64):
                    total[i] += t[i]
            T.copy(total, C)
            T.all_gather(A, G)


@pytest.mark.parametrize("kernel", [gemm, softmax, gather_sum], ids=lambda k: k.name)
def test_tile_and_scheduled_ir(kernel: T.PrimFunc, golden: Golden):
    golden(f"{kernel.name}.tile.txt", text(kernel.trace()))
    golden(f"{kernel.name}.scheduled.txt", text(scheduled(kernel)))


def test_rings_of_three_stages(golden: Golden):
    program = scheduled(gemm, depth=3)
    assert [(r.depth, r.buffers) for r in program.schedule.rings] == [(3, ["A_s", "B_s"])]
    golden("gemm.scheduled3.txt", text(program))


@T.prim_func
def guarded(X: T.SymmTensor((4, 64), "float32"), ready: T.Signal((4,)), C: T.Tensor((64,), "float32")):
    """The copies of a round wait for the rank that owns it."""
    with T.Kernel(1, threads=64), T.Scale("device") as (rank, num):
        x, total = T.alloc_shared((64,), "float32"), T.alloc_fragment((64,), "float32")
        T.clear(total)
        for r in T.serial(num):
            T.signal(ready[rank], dst=r)
        for k in T.Pipelined(4, num_stages=2):
            owner = (rank + k) % num
            T.wait(ready[owner])
            T.copy(X[owner, 0], x)
            for i in T.Parallel(64):
                total[i] += x[i]
        T.copy(total, C)


@pytest.mark.parametrize("kernel", [gemm, guarded], ids=lambda k: k.name)
def test_two_roles_and_copies_ahead(kernel: T.PrimFunc, golden: Golden):
    program = scheduled(kernel).func.script()
    for name, plan in (("roles", {"roles": ("producer", "consumer")}), ("ahead", {"ahead": True})):
        made = schedule(tile_level(kernel), 3, **plan)
        assert [r.form for r in made.schedule.rings] == [name] and not made.schedule.kept
        assert made.func.script() != program
        golden(f"{kernel.name}.{name}.txt", text(made))


def test_printing_is_deterministic():
    assert gemm.trace().func.script() == gemm.trace().func.script()
