"""T.PersistentTileScheduler, T.ClusterKernel and T.block_rank_in_cluster."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import refused, run
from tests.unit.cuda.emulated import agree
from tilescale.errors import TileSyntaxError, TileValueError


def visits(rows: int, cols: int, workers: int, cluster: int = 1, state: bool = True, **words: Any) -> Any:
    """Writes for each tile who came in which of its rounds, and the order of its number."""

    @T.prim_func
    def kernel(W: T.Tensor((rows, cols), "int32"), R: T.Tensor((rows, cols), "int32")):
        with T.ClusterKernel(workers * cluster, threads=32, cluster_dims=cluster) as b:
            s = T.PersistentTileScheduler(rows, cols, cluster_size=cluster, stateful=state, name="s", **words)
            rank = T.block_rank_in_cluster()
            if state:
                s.init(b // cluster)
                while s.valid():
                    i, j = s.m_idx * cluster + rank, s.n_idx
                    if i < rows:
                        W[i, j] = b * 1000 + s.linear_idx
                        R[i, j] = s.current_iter
                    s.next_tile()
            else:
                for n in T.serial(T.ceildiv(rows * cols, workers)):
                    i, j = s.coord(b + n * workers)
                    if i < rows and j < cols:
                        W[i, j] = b * 1000 + b + n * workers
                        R[i, j] = n

    return kernel


def expected(
    rows: int, cols: int, workers: int, cluster: int = 1, swizzle_size: int = 1, column_major: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """By walking panels, columns of a panel and tiles of a column in turn."""
    clusters = -(-rows // cluster)
    fast, slow = (clusters, cols) if column_major else (cols, clusters)
    order = [
        (f, s)
        for first in range(0, slow, swizzle_size)
        for f in range(fast)
        for s in range(first, min(first + swizzle_size, slow))
    ]
    who, when = np.zeros((rows, cols), np.int32), np.zeros((rows, cols), np.int32)
    for number, (f, s) in enumerate(order):
        m, n = (f, s) if column_major else (s, f)
        for rank in range(cluster):
            if m * cluster + rank < rows:
                block = number % workers * cluster + rank
                who[m * cluster + rank, n], when[m * cluster + rank, n] = (
                    block * 1000 + number,
                    number // workers,
                )
    return who, when


CASES = [
    {},
    {"swizzle_size": 2},
    {"swizzle_size": 3, "column_major": False},
    {"column_major": False},
    {"cluster": 2, "swizzle_size": 2},
]


@pytest.mark.parametrize("words", CASES)
@pytest.mark.parametrize("state", [True, False])
def test_every_tile_in_its_order(words: dict[str, Any], state: bool):
    if not state and "cluster" in words:
        words = {k: v for k, v in words.items() if k != "cluster"}
    args = {"W": np.full((5, 4), -1, np.int32), "R": np.full((5, 4), -1, np.int32)}
    who, when = expected(5, 4, 3, **words)
    for found in (
        agree(visits(5, 4, 3, state=state, **words), args, exact=True),
        dict(zip("WR", on_cpu(visits(5, 4, 3, state=state, **words)), strict=True)),
    ):
        np.testing.assert_array_equal(found["W"], who)
        np.testing.assert_array_equal(found["R"], when)


def on_cpu(kernel: Any) -> tuple[np.ndarray, np.ndarray]:
    w, r = np.full((5, 4), -1, np.int32), np.full((5, 4), -1, np.int32)
    run(kernel)(w, r)
    return w, r


def test_workers_that_are_given():
    w = np.full((5, 4), -1, np.int32)
    run(visits(5, 4, 3, num_workers=4))(w, w.copy())
    # Worker 3 is nobody's: its tiles stay.
    assert (w == -1).sum() == 5


def test_refused():
    with refused(TileValueError, "swizzle_size=0", expected="an int of 1 or more"):
        visits(5, 4, 3, swizzle_size=0).trace()
    with refused(TileSyntaxError, "m_idx of a T.PersistentTileScheduler", expected="coord"):

        @T.prim_func
        def kernel(A: T.Tensor((4,), "int32")):
            with T.Kernel(1, threads=32):
                A[0] = T.PersistentTileScheduler(2, 2, stateful=False).m_idx

        kernel.trace()


def test_ranks_of_a_cluster_in_two_axes():
    @T.prim_func
    def kernel(A: T.Tensor((4, 2), "int32")):
        with T.ClusterKernel(4, 2, cluster_dims=(2, 2), threads=32) as (x, y):
            A[x, y] = T.block_rank_in_cluster()

    got = agree(kernel, {"A": np.zeros((4, 2), np.int32)}, exact=True)["A"]
    np.testing.assert_array_equal(got, [[0, 2], [1, 3], [0, 2], [1, 3]])
