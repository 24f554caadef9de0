"""What GPUs share (compiler/gpu) stands alone: kernels for a GPU that adds nothing of its own, on emulated
threads against the simulator."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale.language as T
from tests.gpu.gemms import sparse_gemm, sparse_operand
from tests.unit.cuda.emulated import data, empty, same
from tilescale.compiler import emulator
from tilescale.compiler.checks.run import launch
from tilescale.compiler.gpu.lower import Lowering
from tilescale.compiler.ir import lowerings
from tilescale.compiler.ir.target import Target
from tilescale.compiler.passes import pipeline
from tilescale.errors import TileSyntaxError

#: waves of 64, and none of the instructions that a target may have
PLAIN = Target("gpu", family="gpu", shared_bytes=64 << 10, wave=64)


@T.prim_func
def sums(
    A: T.Tensor((70, 100), "float32"),
    B: T.Tensor((70,), "float32"),
    C: T.Tensor((70, 100), "float32"),
    N: T.Tensor((1,), "int32"),
):
    with T.Kernel(T.ceildiv(70, 16), threads=128) as bx:
        a, s = T.alloc_fragment((16, 100), "float32"), T.alloc_shared((16, 100), "float32")
        total = T.alloc_fragment((16,), "float32")
        T.copy(A[bx * 16, 0], a)
        T.reduce_sum(a, total, dim=1)
        for i, j in T.Parallel(16, 100):
            if a[i, j] > 0:
                s[i, j] = a[i, j] * 2
            else:
                s[i, j] = T.exp(a[i, j])
        T.cumsum(s, dim=1)
        T.copy(total, B[bx * 16])
        T.copy(s, C[bx * 16, 0])
        T.atomic_add(N[0], 1)


@T.prim_func
def columns(A: T.Tensor((96, 64), "float32"), B: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64):
        a, total = T.alloc_shared((16, 64), "float32"), T.alloc_fragment((64,), "float32")
        T.clear(total)
        for k in T.Pipelined(6, num_stages=3):
            T.copy(A[k * 16, 0], a)
            for j in T.Parallel(64):
                for i in T.serial(16):
                    total[j] += a[i, j]
        T.copy(total, B)


@pytest.mark.parametrize(
    ("kernel", "args"),
    [
        (
            sums,
            {
                "A": data((70, 100), "float32"),
                "B": empty((70,), "float32"),
                "C": empty((70, 100), "float32"),
                "N": data((1,), "int32"),
            },
        ),
        (columns, {"A": data((96, 64), "float32"), "B": empty((64,), "float32")}),
    ],
    ids=["sums", "columns"],
)
def test_a_gpu_that_adds_nothing(kernel: Any, args: dict[str, Any]):
    agree(kernel, args)


def agree(kernel: Any, args: dict[str, Any]) -> None:
    """A launch on emulated threads, against the simulator."""
    program, _ = pipeline.run(kernel.trace(), PLAIN)
    got = emulator.run(Lowering(program).run(), program, args)
    want = launch(kernel, 1, args).arrays[0]
    for name, array in got.items():
        same(array, want[name], name, False)


@pytest.mark.parametrize(
    ("dtype", "out", "trans"),
    [
        ("float32", "float32", (False, False)),
        ("float16", "float32", (True, False)),
        ("bfloat16", "bfloat16", (False, True)),
        ("float64", "float64", (True, True)),
        ("int8", "int32", (False, True)),
        ("float8_e4m3fn", "float16", (False, False)),
    ],
)
def test_products_by_multiply_adds(dtype: str, out: str, trans: tuple[bool, bool]):
    """A pipelined product, of a shape that divides nothing, one operand in registers."""
    m, n, k, step = 33, 50, 40, 16

    @T.prim_func
    def product(
        A: T.Tensor((k, m) if trans[0] else (m, k), dtype),
        B: T.Tensor((n, k) if trans[1] else (k, n), dtype),
        C: T.Tensor((m, n), out),
    ):
        with T.Kernel(T.ceildiv(n, 32), threads=128) as bx:
            a = T.alloc_shared((step, m) if trans[0] else (m, step), dtype)
            b = T.alloc_fragment((32, step) if trans[1] else (step, 32), dtype)
            c = T.alloc_fragment((m, 32), out)
            T.clear(c)
            for i in T.Pipelined(T.ceildiv(k, step), num_stages=2):
                if trans[0]:
                    T.copy(A[i * step, 0], a)
                else:
                    T.copy(A[0, i * step], a)
                if trans[1]:
                    T.copy(B[bx * 32, i * step], b)
                else:
                    T.copy(B[i * step, bx * 32], b)
                T.gemm(a, b, c, transpose_A=trans[0], transpose_B=trans[1])
            T.copy(c, C[0, bx * 32])

    args = {
        "A": data((k, m) if trans[0] else (m, k), dtype),
        "B": data((n, k) if trans[1] else (k, n), dtype),
        "C": empty((m, n), out),
    }
    agree(product, args)


def test_a_sparse_product_is_written_out():
    _, kept, places = sparse_operand(64, 128, "float16", "int32")
    args = {"A": kept, "E": places, "B": data((128, 40), "float16"), "C": empty((64, 40), "float32")}
    agree(sparse_gemm(64, 40, 128, places="int32", threads=128), args)


def test_it_refuses_by_name():
    @T.prim_func
    def kernel(A: T.Tensor((128,), "int32")):
        with T.Kernel(1, threads=128):
            with T.Scale("warpgroup"):
                T.barrier()
            A[0] = 1

    program, _ = pipeline.run(kernel.trace(), PLAIN)
    with pytest.raises(
        TileSyntaxError,
        match="a barrier of a warpgroup is not there on the gpu target: it needs barriers of part of a block",
    ):
        Lowering(program).run()


def test_a_target_takes_its_familys_lowerings():
    found = {
        name: lowerings._of("cuda", "gpu", f"ts.{name}")
        for name in ("shuffle", "ring_wait", "gemm", "nothing")
    }
    shared = {name: lowerings._of("gpu", "", f"ts.{name}") for name in found}
    assert found["shuffle"] is shared["shuffle"] is not shared["nothing"]
    assert found["ring_wait"] is not shared["ring_wait"] is not shared["nothing"]
    assert found["gemm"] is not shared["gemm"] and isinstance(found["gemm"], type(shared["gemm"]))
    assert found["nothing"] is shared["nothing"] is not shared["gemm"]
