"""Copies that no ring takes, side by side in a loop (passes/copies_together.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty, lowered
from tilescale.compiler.cuda.printer import print_kernel

N, D = 64, 64


def rounds(between: str = "", nest: bool = False) -> Any:
    """Two products a round, each of a tile of its own that is copied in front of it, under a condition."""

    @T.prim_func
    def kernel(
        Q: T.Tensor((N, D), "float16"),
        K: T.Tensor((4 * N, D), "float16"),
        V: T.Tensor((4 * N, D), "float16"),
        M: T.Tensor((4,), "int32"),
        O: T.Tensor((N, D), "float32"),
        W: T.Tensor((8,), "int32"),
    ):
        with T.Kernel(1, threads=128):
            q, k = T.alloc_shared((N, D), "float16"), T.alloc_shared((N, D), "float16")
            v, p = T.alloc_shared((N, D), "float16"), T.alloc_fragment((N, N), "float16")
            s, o = T.alloc_fragment((N, N), "float32"), T.alloc_fragment((N, D), "float32")
            last, places = T.alloc_var("int32"), T.alloc_shared((4,), "int32")
            last = 0
            T.copy(Q, q)
            T.clear(o)
            for r in T.serial(4):
                if M[r] > 0:
                    T.copy(K[r * N, 0], k)
                    T.clear(s)
                    T.gemm(q, k, s, transpose_B=True)
                    for i, j in T.Parallel(N, N):
                        p[i, j] = T.cast(s[i, j] * 0.125, "float16")
                    if between == "written":
                        V[r * N, 0] = T.cast(1, "float16")
                    if between == "atomic":
                        T.atomic_add(W[r], 1)
                    if between == "counted":
                        last += 1
                    if between == "looked up":
                        for i in T.Parallel(4):
                            places[i] = (M[i] + r) % 4
                    at = T.cast(s[0, 0] * 0.0, "int32") + r if between == "named" else r
                    at = last if between == "counted" else at
                    at = places[r] if between == "looked up" else at
                    if nest:
                        for i, j in T.Parallel(N, D):
                            v[i, j] = V[at * N + i, j]
                    else:
                        T.copy(V[at * N, 0], v)
                    T.gemm(p, v, o)
            T.copy(o, O)

    return kernel


def given() -> dict[str, Any]:
    return {
        "Q": data((N, D), "float16", 1),
        "K": data((4 * N, D), "float16", 2),
        "V": data((4 * N, D), "float16", 3),
        "M": np.array([1, 0, 1, 1], np.int32),
        "O": empty((N, D), "float32"),
        "W": np.zeros(8, np.int32),
    }


def together(kernel: Any) -> bool:
    """Whether the tile of the second product is written in front of the first product."""
    text = print_kernel(lowered(kernel).kernel).text
    return text.index("&v[") < text.index("ts::wgmma_m64n64k16_f16_00(")


@pytest.mark.parametrize("nest", [False, True])
def test_a_later_copy_goes_up_behind_an_earlier_one(nest: bool) -> None:
    kernel = rounds(nest=nest)
    assert together(kernel)
    agree(kernel, given())
    text = print_kernel(lowered(kernel).kernel).text
    loop = text[text.index("for (int r") :]
    assert loop[: loop.index("wgmma_wait<0>")].count("__syncthreads") == 2  # free again, and there


@pytest.mark.parametrize("between", ["written", "atomic", "named", "counted", "looked up"])
def test_what_keeps_a_copy_where_it_is(between: str) -> None:
    kernel = rounds(between)
    assert not together(kernel)
    agree(kernel, given())
