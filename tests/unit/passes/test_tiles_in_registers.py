"""Shared tiles of which each thread touches its own elements alone."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty, lowered
from tilescale.compiler.cuda.printer import print_kernel

ROWS, COLUMNS = 5, 1024


@T.prim_func
def norm(
    X: T.Tensor((ROWS, COLUMNS), "bfloat16"), W: T.Tensor((COLUMNS,), "bfloat16"),
    Y: T.Tensor((ROWS, COLUMNS), "bfloat16"),
):  # fmt: skip
    """Rows divided by their mean square: two tiles that come in, of which one goes out again."""
    with T.Kernel(ROWS, threads=128) as row:
        x, w = T.alloc_shared((1, COLUMNS), "bfloat16"), T.alloc_shared((COLUMNS,), "bfloat16")
        own, square = (T.alloc_fragment((1, COLUMNS), "float32") for _ in range(2))
        total = T.alloc_fragment((1,), "float32")
        T.copy(X[row, 0], x)
        T.copy(W, w)
        for i, j in T.Parallel(1, COLUMNS):
            own[i, j] = T.cast(x[i, j], "float32")
        for i, j in T.Parallel(1, COLUMNS):
            square[i, j] = own[i, j] * own[i, j]
        T.reduce_sum(square, total, dim=1)
        for i, j in T.Parallel(1, COLUMNS):
            x[i, j] = T.cast(own[i, j] * T.rsqrt(total[i] / COLUMNS + 1e-5), "bfloat16") * w[j]
        T.copy(x, Y[row, 0])


def ragged(width: int, rows: int = 32) -> Any:
    """Sums of two tensors, as many columns of which a block has as ``width`` says: parts lie outside."""

    @T.prim_func
    def kernel(
        A: T.Tensor((70, 200), "float16"),
        B: T.Tensor((70, 200), "float16"),
        C: T.Tensor((70, 200), "float16"),
    ):
        with T.Kernel(T.ceildiv(200, width), T.ceildiv(70, rows), threads=128) as (x, y):
            a, b, c = (T.alloc_shared((rows, width), "float16") for _ in range(3))
            own = T.alloc_fragment((rows, width), "float16")
            T.copy(A[y * rows, x * width], a)
            T.copy(B[y * rows, x * width], b)
            for i, j in T.Parallel(rows, width):
                own[i, j] = a[i, j] + b[i, j]
            T.copy(own, c)
            T.copy(c, C[y * rows, x * width])

    return kernel


def rows_of(name: str) -> dict[str, Any]:
    made = {"A": data((70, 200), "float16", 1), "B": data((70, 200), "float16", 2)}
    return made | {name: empty((70, 200), "float16")}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_no_shared_memory_is_left_but_of_sums(arch: str):
    made = lowered(norm, arch)
    text = print_kernel(made.kernel).text
    assert "tiles_in_registers" in made.program.fired and "x = T.alloc_shared" not in text
    assert "smem[];  // 16 bytes" in text, text
    args = {"X": data((ROWS, COLUMNS), "bfloat16", 1), "W": data((COLUMNS,), "bfloat16", 2)}
    agree(norm, args | {"Y": empty((ROWS, COLUMNS), "bfloat16")}, arch=arch)


@pytest.mark.parametrize("width", [64, 128])
def test_parts_outside_of_a_tensor_are_zero_and_not_written(width: int):
    kernel = ragged(width)
    text = print_kernel(lowered(kernel).kernel).text
    assert "smem" not in text and "uint4" in text, text
    agree(kernel, rows_of("C"))


@T.macro
def backwards(a: Any, own: Any) -> None:
    for i, j in T.Parallel(32, 128):
        own[i, j] = a[i, 127 - j]


@T.macro
def across(a: Any, own: Any) -> None:
    for i, j in T.Parallel(32, 32):
        own[i, j] = a[j, i]


@T.macro
def part(a: Any, own: Any) -> None:
    for i, j in T.Parallel(32, 64):
        own[i, j] = a[i, j]


@T.macro
def by_threads(a: Any, own: Any) -> None:
    with T.Scale("warp") as (w, n):
        T.copy(a[w * 8 : w * 8 + 8, :], own[w * 8 : w * 8 + 8, :])


@T.macro
def multiplied(a: Any, own: Any) -> None:
    c = T.alloc_fragment((32, 32), "float32")
    T.clear(c)
    T.gemm(a, a, c, transpose_B=True)
    T.copy(c, own[:, :32])


@T.macro
def view(a: Any, own: Any) -> None:
    flat = T.view(a, (32 * 128,))
    for i in T.Parallel(32 * 128):
        own[i // 128, i % 128] = flat[i]


@T.macro
def updated(a: Any, own: Any) -> None:
    for i, j in T.Parallel(32, 128):
        T.atomic_add(own[i, j], a[i, j])
        T.atomic_max(a[i, j], T.cast(i, "float16"))


def other(read: Any) -> Any:
    @T.prim_func
    def kernel(A: T.Tensor((32, 128), "float16"), C: T.Tensor((32, 128), "float16")):
        with T.Kernel(1, threads=128):
            a, own = T.alloc_shared((32, 128), "float16"), T.alloc_shared((32, 128), "float16")
            T.copy(A, a)
            T.fill(own, 0)
            T.sync_threads()
            read(a, own)
            T.sync_threads()
            for i, j in T.Parallel(32, 128):
                C[i, 127 - j] = own[i, 127 - j]

    return kernel


@pytest.mark.parametrize(
    "read", [backwards, across, part, by_threads, multiplied, view, updated], ids=lambda r: str(r.__name__)
)
def test_what_other_threads_read_stays_in_shared_memory(read: Any):
    kernel = other(read)
    text = print_kernel(lowered(kernel).kernel).text
    assert "a = (half*)smem" in text.replace("const ", "") or "a = (half*)(smem" in text, text
    agree(kernel, {"A": data((32, 128), "float16", 1), "C": empty((32, 128), "float16")})


def product() -> Any:
    """A result whose tile is there to bring it into the order of memory."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float16")
    ):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c, out = T.alloc_fragment((64, 64), "float32"), T.alloc_shared((64, 64), "float16")
            T.copy(A, a)
            T.copy(B, b)
            T.clear(c)
            T.gemm(a, b, c)
            T.copy(c, out)
            T.copy(out, C)

    return kernel


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_a_products_result_goes_through_its_tile(arch: str):
    made = lowered(product(), arch)
    assert "tiles_in_registers" not in made.program.fired
    args = {"A": data((64, 64), "float16", 1), "B": data((64, 64), "float16", 2)}
    agree(product(), args | {"C": empty((64, 64), "float16")}, arch=arch)


def test_more_than_there_are_registers_for_stays():
    """Three tiles of 128 bytes a thread: two of them are registers."""
    made = lowered(ragged(128, 64))
    assert (
        print_kernel(made.kernel).text.count("(half*)smem") == 1
        and "tiles_in_registers" in made.program.fired
    )
    agree(ragged(128, 64), rows_of("C"))
