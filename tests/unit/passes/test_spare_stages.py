"""Loops that ask for one stage, where the grid leaves shared memory over."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty, lowered
from tilescale.compiler.advice import Advice

BK = 64


def product(grid: Any, BN: int = 64, stages: int = 1, rounds: int = 3, other: int = 0) -> Any:
    """Sums of tiles of A times those of B; ``other``: rows of a tile more in shared memory."""
    M = T.dynamic("m") if grid is None else grid * 64

    @T.prim_func
    def kernel(
        A: T.Tensor((M, rounds * BK), "float16"), B: T.Tensor((BN, rounds * BK), "float16"),
        C: T.Tensor((M, BN), "float32"),
    ):  # fmt: skip
        with T.Kernel(T.ceildiv(M, 64), threads=128) as x:
            a, b = T.alloc_shared((64, BK), "float16"), T.alloc_shared((BN, BK), "float16")
            c = T.alloc_fragment((64, BN), "float32")
            T.clear(c)
            for k in T.Pipelined(rounds, num_stages=stages):
                T.copy(A[x * 64, k * BK], a)
                T.copy(B[0, k * BK], b)
                T.gemm(a, b, c, transpose_B=True)
            if other:
                held = T.alloc_shared((other, 512), "float32")
                for i, j in T.Parallel(other, 512):
                    held[i, 511 - j] = T.cast(i + j, "float32")
                for i, j in T.Parallel(64, BN):
                    c[i, j] += held[i % other, j]
            T.copy(c, C[x * 64, 0])

    return kernel


def arguments(blocks: int, rounds: int = 3) -> dict[str, Any]:
    made = {"A": data((blocks * 64, rounds * BK), "float16", 1), "B": data((64, rounds * BK), "float16", 2)}
    return made | {"C": empty((blocks * 64, 64), "float32")}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("rounds", [1, 3])
def test_a_grid_of_one_wave_has_a_second_stage(arch: str, rounds: int):
    kernel = product(2, rounds=rounds)
    program = lowered(kernel, arch).program
    assert "spare_stages" in program.fired and {r.depth for r in program.schedule.rings} == {2}
    agree(kernel, arguments(2, rounds), arch=arch)


@pytest.mark.parametrize(
    "kernel, depth",
    [
        (product(132), 2),
        (product(133), 1),
        (product(None), 1),
        (product(2, stages=3), 3),
        (product(2, other=96), 1),
    ],
    ids=["132 blocks", "133 blocks", "as many as a call says", "it asks for more", "no room"],
)
def test_only_memory_that_nobody_else_can_use(kernel: Any, depth: int):
    program = lowered(kernel).program
    assert {r.depth for r in program.schedule.rings} == {depth}
    assert ("spare_stages" in program.fired) == (depth == 2)
    assert not [n for n in program.notes if isinstance(n, Advice)]


def test_a_loop_without_stages_stays():
    program = lowered(product(2, stages=0)).program
    assert "spare_stages" not in program.fired
