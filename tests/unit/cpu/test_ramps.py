"""Accesses to global memory in vector loops are contiguous for LLVM, whatever their 64-bit indices are made
of."""

from __future__ import annotations

import re

import pytest
import torch

import tilescale.language as T
from tests.kernels import run, scheduled
from tilescale.compiler.cpu import codegen
from tilescale.compiler.cpu.lower import Lowering


def rows(n: int) -> T.PrimFunc:
    @T.prim_func
    def main(
        A: T.Tensor((n, 96), "float32"), B: T.Tensor((n, 96), "float32"), C: T.Tensor((n, 96), "float32")
    ):
        with T.Kernel(n) as b:
            t = T.alloc_shared((96,), "float32")
            T.copy(A[b, 0], t)
            for i in T.Parallel(96):
                C[b, i] = t[i] + B[b, i] * B[n - 1 - b, 0]

    return main


def test_no_lane_is_loaded_alone() -> None:
    module = codegen.lower(Lowering(scheduled(rows(7))).run())
    text = module.script()
    assert not re.search(r'Cast\("int64x', text), text
    if codegen.host_cpu().vector_bytes == 64:
        assert not re.search(
            r"vinsertps|vpextrq|vgather", codegen.get_asm(Lowering(scheduled(rows(7))).run())
        )


@pytest.mark.parametrize("n", [1, 7])
def test_values(n: int) -> None:
    a, b, c = torch.randn(n, 96), torch.randn(n, 96), torch.full((n, 96), float("nan"))
    run(rows(n))(a, b, c)
    torch.testing.assert_close(c, a + b * b.flip(0)[:, :1])
