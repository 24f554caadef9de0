"""Products with fewer rows than warpgroups, products of parts of tiles, and rounds that share a ring, on the
emulated Hopper block."""

from __future__ import annotations

import re
from typing import Any

import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty
from tests.unit.cuda.test_hopper import edited, lowered
from tilescale.compiler import emulator
from tilescale.compiler.cuda.printer import print_kernel


def sums(policy: Any, rounds: int = 5, depth: int = 128, stages: int = 2) -> Any:
    """C = sum of (|A · Bᵀ| as bfloat16) · B's first columns over tiles of B; A (64, depth), C (64, 128)."""

    @T.prim_func
    def sums(
        A: T.Tensor((64, depth), "bfloat16"),
        B: T.Tensor((rounds * 64, depth), "bfloat16"),
        C: T.Tensor((64, 128), "float32"),
    ):
        with T.Kernel(1, threads=256):
            a, b, p = (
                T.alloc_shared((64, depth), "bfloat16"),
                T.alloc_shared((64, depth), "bfloat16"),
                T.alloc_shared((64, 64), "bfloat16"),
            )
            s, c, most = (
                T.alloc_fragment((64, 64), "float32"),
                T.alloc_fragment((64, 128), "float32"),
                T.alloc_fragment((64,), "float32"),
            )
            T.copy(A, a)
            T.clear(c)
            for t in T.Pipelined(rounds, num_stages=stages):
                T.copy(B[t * 64, 0], b)
                T.gemm(a, b, s, transpose_B=True, policy=policy, clear_accum=True)
                T.reduce_absmax(s, most, dim=1)
                for i, j in T.Parallel(64, 64):
                    s[i, j] = T.abs(s[i, j]) / most[i]
                T.copy(s, p)
                for i, j in T.Parallel(64, 128):
                    c[i, j] *= most[i]
                T.gemm(p, b[:, 0:128], c)
            T.copy(c, C)

    return sums


def arguments(rounds: int = 5, depth: int = 128) -> dict[str, Any]:
    return {
        "A": data((64, depth), "bfloat16", 1, 0.1),
        "B": data((rounds * 64, depth), "bfloat16", 2, 0.1),
        "C": empty((64, 128), "float32"),
    }


@pytest.mark.parametrize("depth", [128, 192])
@pytest.mark.parametrize("seed", [0, 1])
def test_rows_of_one_warpgroup(depth: int, seed: int):
    """Where FullRow asks for it the other warpgroup, whose code is its own, has no part in the product;
    elsewhere each has half of the columns. Both give the same."""
    row, either = sums(T.GemmWarpPolicy.FullRow, depth=depth), sums(T.GemmWarpPolicy.Square, depth=depth)
    text = re.sub(r"\s*//.*", "", print_kernel(lowered(row)[0]).text)
    assert text.count("ts::wgmma_m64n64k16_bf16_00(&s[0], a_desc, b_desc, 0)") == 1, text
    assert text.count("ts::wgmma_m64n64k16_bf16_01(&c[0]") == 2 * 4, "both have the second product"
    assert "wgmma_m64n64k16_bf16_01" in text, "the second product has half of the columns in each warpgroup"
    assert "wgmma_m64n32k16_bf16_00" in print_kernel(lowered(either)[0]).text
    for kernel in (row, either):
        agree(kernel, arguments(depth=depth), seed=seed)


def test_a_part_that_begins_inside_a_box_keeps_to_one_role():
    @T.prim_func
    def kernel(
        A: T.Tensor((64, 128), "bfloat16"),
        B: T.Tensor((128, 128), "bfloat16"),
        C: T.Tensor((64, 64), "float32"),
    ):
        with T.Kernel(1, threads=128):
            a, b, c = (
                T.alloc_shared((64, 64), "bfloat16"),
                T.alloc_shared((64, 128), "bfloat16"),
                T.alloc_fragment((64, 64), "float32"),
            )
            T.clear(c)
            for t in T.Pipelined(2, num_stages=2):
                T.copy(A[0, t * 64], a)
                T.copy(B[t * 64, 0], b)
                T.gemm(a, b[:, 32:96], c)
            T.copy(c, C)

    assert any("a part of b" in note for note in lowered(kernel)[1].notes)
    agree(
        kernel,
        {
            "A": data((64, 128), "bfloat16", 1),
            "B": data((128, 128), "bfloat16", 2),
            "C": empty((64, 64), "float32"),
        },
    )


def chain(stages: int) -> Any:
    """C = sum of (A · Bᵀ as bfloat16) · B over tiles of B, whose ring both products read."""

    @T.prim_func
    def chain(
        A: T.Tensor((64, 64), "bfloat16"),
        B: T.Tensor((320, 64), "bfloat16"),
        C: T.Tensor((64, 64), "float32"),
    ):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((64, 64), "bfloat16")
            s, p, c = (
                T.alloc_fragment((64, 64), "float32"),
                T.alloc_fragment((64, 64), "bfloat16"),
                T.alloc_fragment((64, 64), "float32"),
            )
            T.copy(A, a)
            T.clear(c)
            for t in T.Pipelined(5, num_stages=stages):
                T.copy(B[t * 64, 0], b)
                T.gemm(a, b, s, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(64, 64):
                    s[i, j] = T.exp(s[i, j])
                T.copy(s, p)
                T.gemm(p, b, c)
            T.copy(c, C)

    return chain


CHAIN = {
    "A": data((64, 64), "bfloat16", 1, 0.1),
    "B": data((320, 64), "bfloat16", 2, 0.1),
    "C": empty((64, 64), "float32"),
}


@pytest.mark.parametrize("stages, products", [(2, 2), (3, 4)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rounds_that_share_a_ring(stages: int, products: int, seed: int):
    """With three stages the first product of a round and the last one of the round before are under way
    together."""
    text = print_kernel(lowered(chain(stages))[0]).text
    assert text.count("wgmma_commit();") == products, text
    assert (
        "ring0_read + 1"
        in text.split("tid >= 128")[1].split("} else {")[-1].replace("ring0_read = ring0_read + 1", "")
    ) == (stages == 3)
    agree(chain(stages), CHAIN, seed=seed)


def test_a_stage_released_a_round_early_is_found():
    made, program = lowered(chain(3))
    right = emulator.run(made, program, CHAIN)["C"]
    broken = edited(made, lambda n, a: None if n == "ts::wgmma_wait<0>" else ...)
    for seed in range(12):
        try:
            got = emulator.run(broken, program, CHAIN, seed)["C"]
        except emulator.EmulationError:
            return
        if not (got == right).all():
            return
    pytest.fail("no schedule shows it")
