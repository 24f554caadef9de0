"""16-bit floats two at once, views of registers, and tiles that TMA brings and threads read, on emulated
threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty
from tests.unit.cuda.test_hopper import _named, edited, lowered
from tilescale.compiler import emulator
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.errors import TileValueError


def arithmetic(dtype: str, same: bool = False) -> Any:
    @T.prim_func
    def kernel(
        A: T.Tensor((64, 64), dtype),
        B: T.Tensor((64, 64), dtype),
        C: T.Tensor((4, 64, 64), dtype),
        s: T.float32,
    ):
        with T.Kernel(1, threads=128):
            x, y, z = (T.alloc_fragment((64, 64), dtype) for _ in range(3))
            rows = T.alloc_fragment((64,), dtype)
            T.copy(A, x)
            T.copy(B, y)
            for i in T.Parallel(64):
                rows[i] = A[i, 0]
            for i, j in T.Parallel(64, 64):
                z[i, j] = x[i, j] + y[i, j]
            T.copy(z, C[0, 0:64, 0:64])
            for i, j in T.Parallel(64, 64):
                z[i, j] = x[i, j] - rows[i]
            T.copy(z, C[1, 0:64, 0:64])
            for i, j in T.Parallel(64, 64):
                z[i, j] = T.cast(s, dtype) * y[i, j]
            T.copy(z, C[2, 0:64, 0:64])
            for i, j in T.Parallel(64, 64):
                x[i, j] = x[i, j] * x[i, j]
            T.copy(x, C[3, 0:64, 0:64])

    return kernel


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_two_at_once(dtype: str):
    kind = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    text = print_kernel(lowered(arithmetic(dtype))[0]).text
    assert all(f"ts::{name}2_{kind}(" in text for name in ("add", "sub", "mul"))
    args = {
        "A": data((64, 64), dtype, 1),
        "B": data((64, 64), dtype, 2, 1e-3),
        "C": empty((4, 64, 64), dtype),
        "s": 1.7,
    }
    agree(arithmetic(dtype), args, exact=True)


def test_what_stays_one_by_one():
    """Two operations round twice, a float32 in between is another meaning, neighbours must lie in one
    thread."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "bfloat16"), C: T.Tensor((64, 64), "bfloat16")):
        with T.Kernel(1, threads=128):
            x, y = T.alloc_fragment((64, 64), "bfloat16"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, x)
            for i, j in T.Parallel(64, 64):
                x[i, j] = x[i, j] * x[i, j] + x[i, j]
            for i, j in T.Parallel(64, 64):
                y[i, j] = x[i, j] + x[i, j]
            for i, j in T.Parallel(64, 64):
                x[i, j] = x[i, j] + T.cast(j, "bfloat16")
            for i, j in T.Parallel(64, 64):
                C[i, j] = x[i, j] + T.cast(y[i, j], "bfloat16")

    assert "2_bf16(" not in print_kernel(lowered(kernel)[0]).text
    agree(kernel, {"A": data((64, 64), "bfloat16"), "C": empty((64, 64), "bfloat16")})


def test_words_become_pairs():
    """What lies in registers as 32-bit words is read as 16-bit floats."""

    @T.prim_func
    def kernel(W: T.Tensor((64, 32), "uint32"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            x, c = T.alloc_fragment((64, 64), "bfloat16"), T.alloc_fragment((64, 64), "float32")
            words = T.view(x, (64, 32), "uint32")
            T.copy(W, words)
            for i, j in T.Parallel(64, 64):
                c[i, j] = x[i, j] * 2.0
            T.copy(c, C)

    words = np.random.default_rng(0).integers(0, 1 << 14, (64, 64), np.uint16).view(np.uint32)
    agree(kernel, {"W": words, "C": empty((64, 64), "float32")}, exact=True)


def test_rows_of_a_fragment_as_one_row():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), C: T.Tensor((4096,), "float16")):
        with T.Kernel(1, threads=128):
            x = T.alloc_fragment((64, 64), "float16")
            T.copy(A, x)
            flat = T.view(x, (4096,))
            T.copy(flat, C)

    given = {"A": data((64, 64), "float16"), "C": empty((4096,), "float16")}
    assert (agree(kernel, given, exact=True)["C"] == given["A"].reshape(-1)).all()


def test_a_view_that_no_layout_has_is_refused():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), C: T.Tensor((2048,), "float64")):
        with T.Kernel(1, threads=128):
            x, s = T.alloc_fragment((64, 64), "float32"), T.alloc_shared((64, 64), "float16")
            T.copy(A, s)
            T.clear(x)
            T.gemm(s, s, x)
            flat = T.view(x, (2048,), "float64")
            T.copy(flat, C)

    with pytest.raises(TileValueError, match="a view of x"):
        lowered(kernel)


def beside() -> Any:
    """A product, a copy into registers and a loop that reads element by element, all of rings."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64, 200), "float16"),
        B: T.Tensor((200, 64), "float16"),
        W: T.Tensor((64, 200), "float32"),
        C: T.Tensor((64, 64), "float32"),
        D: T.Tensor((64, 32), "float32"),
    ):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 64), "float16")
            w = T.alloc_shared((64, 32), "float32")
            c, d, e = (
                T.alloc_fragment((64, 64), "float32"),
                T.alloc_fragment((64, 32), "float32"),
                T.alloc_fragment((64, 32), "float32"),
            )
            T.clear(c)
            T.clear(d)
            for k in T.Pipelined(T.ceildiv(200, 32), num_stages=3):
                T.copy(A[0, k * 32], a)
                T.copy(B[k * 32, 0], b)
                T.copy(W[0, k * 32], w)
                T.gemm(a, b, c)
                T.copy(w, e)
                for i, j in T.Parallel(64, 32):
                    d[i, j] = d[i, j] + e[i, j] * w[i, (j + 1) % 32]
            T.copy(c, C)
            T.copy(d, D)

    return kernel


def operands() -> dict[str, Any]:
    args = {
        "A": data((64, 200), "float16", 1),
        "B": data((200, 64), "float16", 2),
        "W": data((64, 200), "float32", 3),
    }
    return {**args, "C": empty((64, 64), "float32"), "D": empty((64, 32), "float32")}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_threads_read_what_tma_brings(seed: int):
    """At any time of arrival."""
    made, program = lowered(beside())
    assert program.notes == [] and len(made.maps) >= 3
    agree(beside(), operands(), seed=seed)


@pytest.mark.parametrize("fault, message", [
    (lambda n, a: None if n == "ts::fence_proxy_async" else ..., "no proxy fence"),
    (lambda n, a: None if n == "ts::mbarrier_wait" and _named(a[0]) == "full1" else ..., "."),
    (lambda n, a: None if n == "ts::mbarrier_arrive_warp" and _named(a[0]) == "empty1" else ..., "."),
])  # fmt: skip
def test_faults_of_threads_that_read_a_ring_are_found(fault: Any, message: str):
    """A proxy fence left out, a stage read before it is full, a stage that is never released."""
    made, program = lowered(beside())
    assert "full1" in print_kernel(made).text
    with pytest.raises(emulator.EmulationError, match=message):
        emulator.run(edited(made, fault), program, operands(), 0)
