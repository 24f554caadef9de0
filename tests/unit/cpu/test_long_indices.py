"""Indices whose products 32 bits do not hold lie outside their tensors: nothing is read, and nothing written.

In a process of its own: what is computed in 32 bits is negative there, and nobody would test that.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.ranks.harness import run_ranks

q, n = T.dynamic("q, n")


@T.prim_func
def inline(A: T.Tensor((q,), "int32"), N: T.Tensor((n,), "int8"), out: T.Tensor((1,), "int32")):
    with T.Kernel(1):
        for i in T.serial(n):
            out[0] = out[0] + A[i * i + 1]
            A[i * i] = 1


@T.prim_func
def named(A: T.Tensor((q,), "int32"), N: T.Tensor((n,), "int8"), out: T.Tensor((1,), "int32")):
    with T.Kernel(1):
        for i in T.serial(n):
            at = i * i
            out[0] = out[0] + A[at + 1]
            A[at] = 1


@T.prim_func
def nests(A: T.Tensor((q,), "int32"), N: T.Tensor((n,), "int8"), out: T.Tensor((1,), "int32")):
    with T.Kernel(n, threads=32) as i:
        for j in T.Parallel(1):
            at = i * i + j
            A[at] = 1


@T.prim_func
def constant(A: T.Tensor((q,), "int32"), N: T.Tensor((n,), "int8"), out: T.Tensor((1,), "int32")):
    with T.Kernel(1):
        for i in T.serial(1 << 16):
            for j in T.Parallel(16):
                A[i * (1 << 16) + j] = 1


@T.prim_func
def copies(A: T.Tensor((q,), "int32"), N: T.Tensor((n,), "int8"), out: T.Tensor((1,), "int32")):
    with T.Kernel(1, threads=32):
        t = T.alloc_shared((1,), "int32")
        for i in T.serial(n):
            T.copy(A[i * i : i * i + 1], t)
            out[0] = out[0] + t[0]
            t[0] = 1
            T.copy(t, A[i * i : i * i + 1])


SQUARES = [k * k for k in range(10)]


def written(kernel: Any) -> tuple[list[int], list[int]]:
    """Which elements it writes, and what it adds up of those that it reads."""
    a, out = torch.zeros(100, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    tilescale.compile(kernel, target="cpu")(a, torch.zeros(70000, dtype=torch.int8), out)
    return a.nonzero().flatten().tolist(), out.tolist()


@pytest.mark.parametrize(
    ("kernel", "elements"),
    [
        (inline, SQUARES),
        (named, SQUARES),
        (nests, SQUARES),
        (constant, list(range(16))),
        (copies, SQUARES),
    ],
)
def test_an_index_that_32_bits_do_not_hold(kernel: Any, elements: list[int]):
    assert run_ranks(1, written, kernel) == [(elements, [0])]
