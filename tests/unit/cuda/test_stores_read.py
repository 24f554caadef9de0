"""Results that TMA stores and the kernel reads behind all stores, on the emulated Hopper GPU and the
simulator."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty
from tilescale.compiler import driver
from tilescale.compiler.checks.run import check
from tilescale.compiler.passes import tma_stores


def product_and_more(again: bool) -> Any:
    """Y = A · B by tiles, then C = 2 · Y; ``again``: tile by tile."""

    @T.prim_func
    def kernel(
        A: T.Tensor((128, 64), "bfloat16"),
        B: T.Tensor((64, 128), "bfloat16"),
        Y: T.Tensor((128, 128), "bfloat16"),
        C: T.Tensor((128, 128), "bfloat16"),
    ):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 32), "bfloat16"), T.alloc_shared((32, 128), "bfloat16")
            acc = T.alloc_fragment((64, 128), "float32")
            for i in T.serial(2):
                T.clear(acc)
                for k in T.Pipelined(2, num_stages=2):
                    T.copy(A[i * 64, k * 32], a)
                    T.copy(B[k * 32, 0], b)
                    T.gemm(a, b, acc)
                T.copy(acc, Y[i * 64, 0])
                if again:
                    for r, c in T.Parallel(64, 128):
                        C[i * 64 + r, c] = 2 * Y[i * 64 + 63 - r, c]
            if not again:
                for r, c in T.Parallel(128, 128):
                    C[r, c] = 2 * Y[127 - r, c]

    return kernel


def arguments() -> dict[str, Any]:
    found = {"A": data((128, 64), "bfloat16", 1), "B": data((64, 128), "bfloat16", 2)}
    return found | {name: empty((128, 128), "bfloat16") for name in "YC"}


def judged(kernel: Any) -> Any:
    return check(kernel, 1, arguments(), level="both", seeds=2, arch="sm_90a")


@pytest.mark.parametrize("again", [False, True])
def test_only_what_is_read_behind_all_stores_goes_by_tma(again: bool):
    kernel = product_and_more(again)
    agree(kernel, arguments())
    assert (report := judged(kernel)), report
    code = driver.source_text(kernel.trace(), "cuda", "cuda:sm_90a")
    assert ("ts::tma_store(Y_map" in code) is not again


def test_stores_are_awaited_in_front_of_that(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tma_stores, "_closed", lambda body, *_: body)
    report = judged(product_and_more(False))
    assert not report and "the store is in flight until it is awaited" in str(report)
