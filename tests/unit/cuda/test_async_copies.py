"""Copies into shared memory that run beside products, by cp.async."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty
from tests.unit.cuda.test_hopper import edited, lowered
from tilescale.compiler.cuda import emulate
from tilescale.compiler.cuda.engines import EmulationError
from tilescale.compiler.cuda.printer import print_kernel

ROUNDS = 4


def products(tiles: int, rows: int = 16, written: bool = False) -> Any:
    """Sums of products whose right operand goes through ``tiles`` tiles of each of two warps."""

    @T.prim_func
    def products(
        W: T.Tensor((64, 2 * ROUNDS * 32), "float16"), B: T.Tensor((rows, 2 * ROUNDS * 32), "float16"), C: T.Tensor((2, 64, 16), "float32")
    ):
        with T.Kernel(1, threads=64):
            b = [T.alloc_shared((2, 16, 32), "float16") for _ in range(tiles)]
            with T.Scale("warp") as (warp, _):
                w, acc = T.alloc_fragment((64, 32), "float16"), T.alloc_fragment((64, 16), "float32")
                T.clear(acc)
                T.copy(B[0, warp * 32], b[0][warp, :, :])
                for n in range(ROUNDS):
                    if tiles > 1 and n + 1 < ROUNDS:
                        T.copy(B[0, (2 * n + 2 + warp) * 32], b[(n + 1) % 2][warp, :, :])
                    for i, k in T.Parallel(64, 32):
                        w[i, k] = W[i, (2 * n + warp) * 32 + k] + T.cast(1, "float16")
                    T.gemm(w, b[n % tiles][warp, :, :], acc, transpose_B=True)
                    if tiles == 1 and n + 1 < ROUNDS:
                        T.copy(B[0, (2 * n + 2 + warp) * 32], b[0][warp, :, :])
                    T.barrier()
                T.copy(acc, C[warp, 0, 0])
                if written:
                    T.copy(b[0][warp, 0:1, :], B[0, warp * 32])

    return products


def arguments(rows: int = 16) -> dict[str, Any]:
    n = 2 * ROUNDS * 32
    return {"W": data((64, n), "float16", 1), "B": data((rows, n), "float16", 2), "C": empty((2, 64, 16), "float32")}


@pytest.mark.parametrize("rows", [16, 11])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_they_run_beside_products(arch: str, rows: int):
    agree(products(2, rows), arguments(rows), arch=arch)
    text = print_kernel(lowered(products(2, rows))[0]).text
    first = text.index("ts::cp_async<16>")
    assert text.count("ts::cp_async<16>") == text.count("ts::cp_async_wait<0>()") == ROUNDS - 2  # the first meets the copy in front of it
    product = text.index("ts::mma_", first)
    assert first < product < text.index("ts::cp_async_wait<0>()") < text.index("T.barrier", product)


def test_nobody_forgets_to_wait():
    made, program = lowered(products(2))
    with pytest.raises(EmulationError, match="under way"):
        emulate.run(edited(made, lambda n, a: None if n == "ts::cp_async_wait<0>" else ...), program, arguments())


def test_what_no_product_passes_by_is_copied_in_turn():
    agree(products(1), arguments())
    assert "cp_async" not in print_kernel(lowered(products(1))[0]).text


def test_what_the_kernel_writes_is_copied_in_turn():
    assert "cp_async" not in print_kernel(lowered(products(2, written=True))[0]).text
