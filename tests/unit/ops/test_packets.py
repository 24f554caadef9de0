"""T.put_packets and T.get_packets: small messages that are their own signal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import refused
from tests.unit.cuda.emulated import agree_on_ranks, lowered
from tilescale.compiler import emulator
from tilescale.compiler.checks.run import check, launch
from tilescale.compiler.sim import numerics
from tilescale.errors import TileError
from tilescale.language.dtypes import BITS
from tilescale.packets import HEAD, SHIFT, length


def all_to_all(n: int, rows: int, row: int, dtype: str, blocks: int = 1, ordered: bool = True) -> Any:
    """Every rank gets a tile of each, its own too."""

    @T.prim_func
    def main(
        X: T.Tensor((n, blocks, rows, row), dtype),
        box: T.Packets((n, blocks, rows, row), dtype),
        Y: T.Tensor((n, blocks, rows, row), dtype),
    ):
        with T.Kernel(blocks, threads=64, ordered=ordered) as bx, T.Scale("device") as (rank, count):
            x, y = T.alloc_fragment((rows, row), dtype), T.alloc_fragment((rows, row), dtype)
            for peer in T.serial(count):
                T.copy(X[peer, bx, 0, 0], x)
                T.put_packets(x, box[rank, bx, 0, 0], dst=peer)
            for peer in T.serial(count):
                T.get_packets(box[peer, bx, 0, 0], y)
                T.copy(y, Y[peer, bx, 0, 0])

    return main


def given(n: int, shape: tuple[int, ...], dtype: str) -> list[Any]:
    draw = np.random.default_rng(5)
    return [numerics.encode(draw.integers(0, 100, (n, *shape)).astype(np.float64)
                            if dtype in numerics.FLOATS else draw.integers(0, 100, (n, *shape)), dtype)
            for _ in range(n)]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "int32", "int64", "float8_e4m3fn"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_rank_gets_what_each_has_put(n: int, dtype: str):
    kernel, X = all_to_all(n, 3, 16, dtype, blocks=2), given(n, (2, 3, 16), dtype)
    done = launch(kernel, n, {"X": X})
    assert done.report, done.report
    for rank in range(n):
        want = np.stack([X[peer][rank] for peer in range(n)])
        assert (done.arrays[rank]["Y"].view(np.uint8) == want.view(np.uint8)).all()
        assert done.arrays[rank]["box"][0] == 1 << SHIFT
        assert len(done.arrays[rank]["box"]) == length((n, 2, 3, 16), BITS[dtype])
    report = check(kernel, n, {"X": X}, schedule="adversary", seeds=3)
    assert report, report


@pytest.mark.parametrize("dtype, row", [("float32", 16), ("bfloat16", 40), ("int8", 8), ("int64", 3)])
def test_threads_put_and_get_each_their_own(dtype: str, row: int):
    n = 3
    kernel, X = all_to_all(n, 5, row, dtype, blocks=2), given(n, (2, 5, row), dtype)
    args = [
        {
            "X": X[rank],
            "box": np.zeros(length((n, 2, 5, row), BITS[dtype]), np.int64),
            "Y": np.zeros_like(X[rank]),
        }
        for rank in range(n)
    ]
    agree_on_ranks(kernel, args, seeds=3)


def one_shot(n: int, N: int, block: int, dtype: str, threads: int = 128) -> Any:
    """An all-reduce in one trip: everyone puts to everyone, and adds in rank order."""

    @T.prim_func
    def main(A: T.Tensor((N,), dtype), box: T.Packets((n, N), dtype), B: T.Tensor((N,), dtype)):
        with T.Kernel(T.ceildiv(N, block), threads=threads) as bx, T.Scale("device") as (rank, count):
            x, parts = T.alloc_fragment((block,), dtype), T.alloc_fragment((n, block), dtype)
            total = T.alloc_fragment((block,), "float32")
            T.copy(A[bx * block], x)
            for k in T.serial(count):
                T.put_packets(x, box[rank, bx * block], dst=(rank + k) % count)
            T.get_packets(box[0:n, bx * block : bx * block + block], parts)
            T.clear(total)
            for i in T.Parallel(block):
                for r in T.serial(n):
                    total[i] += parts[r, i]
            T.copy(total, B[bx * block])

    return main


@pytest.mark.parametrize("n, dtype", [(2, "float32"), (3, "bfloat16"), (4, "float16")])
def test_an_all_reduce_in_one_shot(n: int, dtype: str):
    N, block = 512, 256
    draw = np.random.default_rng(3)
    A = [numerics.encode(draw.standard_normal(N), dtype) for _ in range(n)]
    want = np.zeros(N, "float32")
    for a in A:
        want = want + numerics.decode(a, dtype).astype("float32")
    kernel = one_shot(n, N, block, dtype)
    report = check(kernel, n, {"A": A}, schedule="adversary", seeds=4)
    assert report, report
    for of in launch(kernel, n, {"A": A}).arrays:
        assert (of["B"].view(np.uint8) == numerics.encode(want, dtype).view(np.uint8)).all()
    size = length((n, N), BITS[dtype])
    args = [{"A": a, "box": np.zeros(size, np.int64), "B": np.zeros_like(a)} for a in A]
    for made in (lowered(kernel), lowered(kernel, "sm_80")):
        for seed in range(3):
            for of in emulator.run_ranks(made.kernel, made.program, args, seed):
                assert (of["B"].view(np.uint8) == numerics.encode(want, dtype).view(np.uint8)).all()
