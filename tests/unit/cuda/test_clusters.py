"""Blocks of a cluster on the emulated GPU: what they share, who meets whom, and whose shared memory a statement reaches."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty
from tests.unit.cuda.test_hopper import lowered
from tilescale.compiler.cuda.printer import print_kernel

M, N, K = 128, 128, 264


def product(body: Any, grid: tuple[int, ...], cluster: Any = 2) -> Any:
    """A GEMM whose tile and trip count ``body(block indices)`` says: (row, column, rounds, first round)."""

    @T.prim_func
    def kernel(A: T.Tensor((M, K), "bfloat16"), B: T.Tensor((K, N), "bfloat16"), C: T.Tensor((M, N), "float32"), n: T.int32):
        with T.Kernel(*grid, threads=128, cta_cluster=cluster) as blocks:
            a, b = T.alloc_shared((64, 32), "bfloat16"), T.alloc_shared((32, 64), "bfloat16")
            acc = T.alloc_fragment((64, 64), "float32")
            with T.Scale("cta_cluster") as (rank, count):
                row, col, rounds = body(blocks, rank, count, n)
                T.clear(acc)
                for k in T.Pipelined(rounds, num_stages=3):
                    T.copy(A[row * 64, k * 32], a)
                    T.copy(B[k * 32, col * 64], b)
                    T.gemm(a, b, acc)
                T.copy(acc, C[row * 64, col * 64])

    return kernel


def copies(kernel: Any) -> tuple[int, int]:
    text = print_kernel(lowered(kernel)[0]).text
    return text.count("ts::tma_load("), text.count("ts::tma_load_multicast(")


ROUNDS = -(-K // 32)
#: who copies what: grid, cluster, the tile of a block, (plain copies, shared ones)
TILES: dict[str, Any] = {
    "the second index of a grid": ((2, 2), (1, 2), lambda b, r, n, k: (b[1], b[0], ROUNDS), (1, 1)),
    "the rank in the cluster": ((4,), 2, lambda b, r, n, k: (r, b // 2, ROUNDS), (1, 1)),
    "the number of blocks in the cluster": ((4,), 2, lambda b, r, n, k: (b % n, b // n, ROUNDS), (1, 1)),
    "an argument as trip count": ((4,), 2, lambda b, r, n, k: (r, b // 2, k), (1, 1)),
    "another trip count in each block": ((4,), 2, lambda b, r, n, k: (r, b // 2, k - r), (2, 0)),
    "tiles of different rows and columns": ((4,), (4,), lambda b, r, n, k: (b // 2, b % 2, ROUNDS), (2, 0)),
}


@pytest.mark.parametrize("case", TILES)
def test_only_what_is_proven_alike_is_shared(case: str):
    grid, cluster, body, count = TILES[case]
    kernel = product(body, grid, cluster)
    assert copies(kernel) == count
    args = {"A": data((M, K), "bfloat16", 1), "B": data((K, N), "bfloat16", 2), "C": empty((M, N), "float32")}
    for seed in (0, 1):
        agree(kernel, {**args, "n": ROUNDS}, seed=seed)


def test_tiles_of_clusters_that_stay():
    """Persistent clusters: the two blocks of each take two rows of one column."""
    clusters = 2

    @T.prim_func
    def kernel(A: T.Tensor((300, K), "float16"), B: T.Tensor((K, 200), "float16"), C: T.Tensor((300, 200), "float32")):
        with T.Kernel(block=2 * clusters, threads=128, cta_cluster=2) as block:
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 64), "float16")
            acc = T.alloc_fragment((64, 64), "float32")
            for pair, col in T.Persistent((3, 4), clusters, block // 2):
                T.clear(acc)
                for k in T.Pipelined(T.ceildiv(K, 32), num_stages=3):
                    T.copy(A[(2 * pair + block % 2) * 64, k * 32], a)
                    T.copy(B[k * 32, col * 64], b)
                    with T.Scale("cta_cluster"):
                        T.gemm(a, b, acc)
                T.copy(acc, C[(2 * pair + block % 2) * 64, col * 64])

    args = {"A": data((300, K), "float16", 1), "B": data((K, 200), "float16", 2), "C": empty((300, 200), "float32")}
    assert copies(kernel) == (1, 1)
    for seed in (0, 1):
        agree(kernel, args, seed=seed)
