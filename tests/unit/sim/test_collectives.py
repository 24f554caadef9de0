"""What those who meet in a collective must have alike, and what they need not: the statement."""

from __future__ import annotations

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree_on_ranks
from tilescale.compiler.checks.run import check, launch

S = 16


def broadcast(root, ranks: int = 3):
    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), G: T.SymmTensor((S,), "float32")):
        with T.Kernel(1), T.Scale("device") as rank, world:
            T.broadcast(A, G, root(rank, world))

    return check(main, ranks, seeds=3)


def test_roots_that_differ_in_one_statement():
    (found,) = broadcast(lambda rank, n: T.if_then_else(rank == 2, 1, 0)).findings
    assert found.kind == "mismatch" and "the root is" in found.message and "T.broadcast" in found.message


@pytest.mark.parametrize("root", [lambda rank, n: n, lambda rank, n: n - 4])
def test_a_root_that_is_no_rank(root):
    (found,) = broadcast(root).findings
    assert found.kind == "no-such-rank" and "root" in found.message


def test_a_root_that_is_one():
    assert broadcast(lambda rank, n: n - 1)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_to_all"])
def test_a_part_for_each_rank(op: str, ranks: int):
    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"), G: T.SymmTensor((3, S), "float32"), H: T.SymmTensor((3, S), "float32")
    ):
        with T.Kernel(1), T.Scale("device"):
            for k in T.serial(3):
                T.copy(A, H[k, 0:S])
            if op == "all_gather":
                T.all_gather(A, G)
            elif op == "all_to_all":
                T.all_to_all(H, G)
            else:
                T.reduce_scatter(H, G[0, 0:S])

    report = check(main, ranks, seeds=2)
    if ranks == 3:
        assert report, report
    else:
        (found,) = [f for f in report.findings if f.kind == "mismatch"]
        assert f"{ranks} take part, and {'H' if op == 'reduce_scatter' else 'G'} has 3 parts" in found.message


@pytest.mark.parametrize("waits", [True, False])
def test_views_of_symmetric_memory_are_reached_by_other_ranks(waits: bool):
    @T.prim_func
    def main(B: T.SymmTensor((3, S), "float32"), got: T.Signal((1,))):
        with T.Kernel(1), T.Scale("device") as rank, n:
            V = T.view(B, (3 * S,))
            for i in T.Parallel(S):
                V[i] = rank + 1
            W = T.view(V, (3, 4, S // 4))
            T.all_reduce(V[0:S], V[S // 2 : S // 2 + S])
            T.copy(W[0, :, :], W[2, :, :], dst=(rank + 1) % n, signal=got[0])
            if waits:
                T.wait(got[0])
            V[S] = V[3 * S - 1]

    def args() -> list[dict[str, np.ndarray]]:
        return [{"B": np.zeros((3, S), "float32"), "got": np.zeros(1, "int64")} for _ in range(3)]

    report = check(main, 3, {name: [a[name] for a in args()] for name in args()[0]}, seeds=3)
    assert report.kinds == (set() if waits else {"race", "unawaited"}), report
    if not waits:
        return
    arrays = launch(main, 3, {name: [a[name] for a in args()] for name in args()[0]}).arrays
    for rank, a in enumerate(arrays):
        own, before = np.full(S, rank + 1), np.full(S, (rank - 1) % 3 + 1)
        own[S // 2 :] = before[S // 2 :] = 6
        last = before[-1]
        np.testing.assert_array_equal(a["B"][0], own)
        np.testing.assert_array_equal(a["B"][1], [last] + [6] * (S // 2 - 1) + [0] * (S // 2))
        np.testing.assert_array_equal(a["B"][2], before)
    agree_on_ranks(main, args())


def test_one_collective_in_two_branches():
    """Ranks meet whom they meet wherever that stands, on every target."""

    @T.prim_func
    def main(A: T.SymmTensor((S,), "float32"), X: T.Tensor((S,), "float32"), B: T.Tensor((S,), "float32")):
        with T.Kernel(1), T.Scale("device") as rank, world:
            T.copy(X, A)
            if rank == 0:
                T.all_reduce(A, B)
            else:
                T.all_reduce(A, B)

    assert check(main, 3, seeds=5)


@pytest.mark.parametrize("what", ["op", "kind", "tensor", "place", "extent"])
def test_two_branches_with_collectives_that_differ(what: str):
    @T.prim_func
    def main(
        A: T.SymmTensor((2 * S,), "float32"),
        C: T.SymmTensor((2 * S,), "float32"),
        B: T.Tensor((2 * S,), "float32"),
    ):
        with T.Kernel(1), T.Scale("device") as rank, world:
            T.clear(A)
            T.clear(C)
            if rank == 0:
                T.all_reduce(A[0:S], B[0:S])
            elif what == "op":
                T.all_reduce(A[0:S], B[0:S], "max")
            elif what == "kind":
                T.broadcast(B[0:S], A[0:S])
            elif what == "tensor":
                T.all_reduce(C[0:S], B[0:S])
            elif what == "place":
                T.all_reduce(A[S : 2 * S], B[0:S])
            else:
                T.all_reduce(A, B)

    (found,) = [f for f in check(main, 3, seeds=3).findings if f.kind == "mismatch"]
    assert len(found.lines) == 2


def test_blocks_of_a_cluster_that_differ():
    @T.prim_func
    def main(A: T.Tensor((2, S), "float32")):
        with T.Kernel(2, cluster_dims=2, threads=32) as b:
            tile, out = T.alloc_shared((S,), "float32"), T.alloc_shared((S,), "float32")
            T.copy(A[b, 0:S], tile)
            with T.Scale("cta_cluster"):
                T.broadcast(tile, out, b)

    (found,) = check(main, 1, seeds=2).findings
    assert found.kind == "mismatch" and "root" in found.message
