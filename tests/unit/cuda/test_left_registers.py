"""Products by mma.sync whose left operand lies in registers, of every width that tensor cores have."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty, lowered
from tilescale.compiler.cuda.printer import print_kernel

M, N, K = 32, 32, 128


def product(dtype: str, out: str, threads: int, steps: bool = False) -> Any:
    """C = op(A) Bᵀ, with A changed in registers; S, sums of it along four columns in turn, where ``steps``
    says so."""
    cut = {"precision": "tf32"} if dtype == "float32" else {}

    @T.prim_func
    def kernel(
        A: T.Tensor((M, K), dtype), B: T.Tensor((N, K), dtype), C: T.Tensor((M, N), out),
        S: T.Tensor((M, 4), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=threads):
            a, b = T.alloc_fragment((M, K), dtype), T.alloc_shared((N, K), dtype)
            c, part = T.alloc_fragment((M, N), out), T.alloc_fragment((M, 4), "float32")
            T.copy(A, a)
            T.copy(B, b)
            for i, j in T.Parallel(M, K):
                a[i, j] = a[i, j] + a[i, j]
            T.clear(part)
            if steps:
                for s in T.serial(K // 4):
                    for i, j in T.Parallel(M, 4):
                        part[i, j] += T.cast(a[i, s * 4 + j], "float32") * 0.5
            T.clear(c)
            T.gemm(a, b, c, transpose_B=True, **cut)
            T.copy(c, C)
            T.copy(part, S)

    return kernel


@pytest.mark.parametrize("threads", [32, 128])
@pytest.mark.parametrize("dtype, out, steps", [
    ("float32", "float32", True),
    ("float32", "float32", False),
    ("float16", "float32", False),
    ("float8_e4m3fn", "float32", False),
    ("int8", "int32", False),
])  # fmt: skip
def test_the_left_operand_stays_in_registers(dtype: str, out: str, steps: bool, threads: int):
    kernel = product(dtype, out, threads, steps)
    made = lowered(kernel)
    text = print_kernel(made.kernel).text
    beside = dtype in ("float8_e4m3fn", "int8") and threads == 128  # two warps would compute each row
    assert "mma_m16n8k" in text and ("a_shared" in text) == beside, text
    args = {"A": data((M, K), dtype, 1), "B": data((N, K), dtype, 2)}
    agree(kernel, args | {"C": empty((M, N), out), "S": empty((M, 4), "float32")})


def widened(rows: int) -> Any:
    """C = A Bᵀ by tf32, whose left operand a ring brings in 16 bits; rows and rounds that end outside."""

    @T.prim_func
    def kernel(
        A: T.Tensor((3 * rows - 5, 160), "bfloat16"), B: T.Tensor((24, 160), "float32"),
        C: T.Tensor((3 * rows - 5, 24), "float32"),
    ):  # fmt: skip
        with T.Kernel(3, threads=128) as x:
            a, b = T.alloc_shared((rows, 64), "bfloat16"), T.alloc_shared((32, 64), "float32")
            half, own = T.alloc_fragment((rows, 64), "bfloat16"), T.alloc_fragment((rows, 64), "float32")
            c = T.alloc_fragment((rows, 32), "float32")
            T.clear(c)
            for k in T.Pipelined(3, num_stages=2):
                T.copy(A[x * rows, k * 64], a)
                T.copy(B[0, k * 64], b)
                T.copy(a, half)
                T.copy(half, own)
                T.gemm(own, b, c, transpose_B=True, precision="tf32")
            T.copy(c, C[x * rows, 0])

    return kernel


@pytest.mark.parametrize("rows", [16, 32])
def test_few_rows_of_32_bits_have_a_producer(rows: int):
    """wgmma takes 64 rows; mma.sync reads the right operand where TMA has put it."""
    kernel = widened(rows)
    made = lowered(kernel)
    text = print_kernel(made.kernel).text
    assert len(made.program.schedule.roles) == 2 and "mma_m16n8k8_tf32" in text and "tma_load" in text, text
    args = {"A": data((3 * rows - 5, 160), "bfloat16", 1), "B": data((24, 160), "float32", 2)}
    agree(kernel, args | {"C": empty((3 * rows - 5, 24), "float32")})
