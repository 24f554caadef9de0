"""Kernels with teams inside, and what they compute: run on the simulator, on processes and on emulated
threads.

A case gives the kernel for n ranks, the arguments of each and what each must hold behind the launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tilescale.language as T

S = 16
H = S // 2


def given(n: int) -> Any:
    """Everyone's vectors: row r is rank r's."""
    return np.arange(n * S, dtype=np.int32).reshape(n, S) + 1


def args(n: int, **extents: Any) -> list[dict[str, Any]]:
    """Arguments of each rank: its vector, zeros of the extents that are named, signals where an extent is an
    int."""
    a = given(n)
    zeros = lambda e: np.zeros(e, np.int64 if isinstance(e, int) else np.int32)  # noqa: E731
    return [{"A": a[r].copy(), **{name: zeros(e) for name, e in extents.items()}} for r in range(n)]


Case = tuple[Any, list[dict[str, Any]], Callable[[int], dict[str, Any]]]


def nodes(n: int) -> Case:
    """All nodes of two ranks at once, the last perhaps of one; then the first ranks of all nodes, beside the
    second ones."""

    @T.prim_func
    def kernel(
        A: T.Tensor((S,), "int32"),
        G: T.SymmTensor((2, S), "int32"),
        R: T.SymmTensor((S,), "int32"),
        B: T.Tensor((2, S), "int32"),
        C: T.Tensor((S,), "int32"),
    ):
        with T.Kernel(2, threads=32) as b:
            with T.Scale("device") as (rank, world):
                node, low = rank // 2, b * H
                T.copy(A[low : low + H], R[low : low + H])
                with T.Scale("device", team=range(node * 2, min(node * 2 + 2, world))) as (me, m):
                    T.all_gather(A[low : low + H], G[0:m, low : low + H])
                    for r in T.serial(m):
                        T.copy(G[r, low : low + H], B[r, low : low + H])
                with T.Scale("device", team=range(rank % 2, world, 2)):
                    T.all_reduce(R[low : low + H], C[low : low + H])

    def want(r: int) -> dict[str, Any]:
        a = given(n)
        b = np.zeros((2, S), np.int32)
        mates = a[r // 2 * 2 : r // 2 * 2 + 2]
        b[: len(mates)] = mates
        return {"B": b, "C": a[r % 2 :: 2].sum(0)}

    return kernel, args(n, G=(2, S), R=(S,), B=(2, S), C=(S,)), want


def listed(n: int) -> Case:
    """Ranks in an order of their own: puts with signals round a ring, pulls, a root, parts; others skip it
    all."""
    team = [n - 1, 0] if n == 2 else [n - 1, 0, 1]
    m = len(team)

    @T.prim_func
    def kernel(
        A: T.Tensor((S,), "int32"),
        inbox: T.SymmTensor((S,), "int32"),
        P: T.SymmTensor((m, S), "int32"),
        Q: T.SymmTensor((m, S), "int32"),
        s: T.Signal((2,)),
        B: T.Tensor((5, S), "int32"),
        D: T.Tensor((m, S), "int32"),
    ):
        with T.Kernel(2, threads=32) as b:
            low = b * H
            with T.Scale("device", team=team) as (me, count):
                T.copy(A[low : low + H], inbox[low : low + H], dst=(me + 1) % count, signal=s[b])
                T.wait(s[b])
                T.copy(inbox[low : low + H], B[0, low : low + H])
                T.barrier()
                T.copy(inbox[low : low + H], B[1, low : low + H], src=(me + 1) % count)
                T.barrier()
                T.broadcast(A[low : low + H], inbox[low : low + H], root=1)
                T.copy(inbox[low : low + H], B[2, low : low + H])
                for r in range(count):
                    for i in T.Parallel(H):
                        P[r, low + i] = A[low + i] * 10 + r
                T.reduce_scatter(P[0:count, low : low + H], B[3, low : low + H])
                T.all_to_all(P[0:count, low : low + H], Q[0:count, low : low + H])
                T.copy(Q[0:count, low : low + H], D[0:count, low : low + H])
                if b == 0:
                    B[4, 0] = T.get_rank() * 100 + T.get_world_size() * 10 + me

    def want(r: int) -> dict[str, Any]:
        a, b, d = given(n), np.zeros((5, S), np.int32), np.zeros((m, S), np.int32)
        if r in team:
            me = team.index(r)
            b[0] = a[team[(me - 1) % m]]
            b[1] = a[r]
            b[2] = a[team[1]]
            b[3] = sum(a[q] * 10 + me for q in team)
            b[4, 0] = r * 100 + n * 10 + me
            d[:] = [a[q] * 10 + me for q in team]
        return {"B": b, "D": d}

    return kernel, args(n, inbox=(S,), P=(m, S), Q=(m, S), s=2, B=(5, S), D=(m, S)), want


def nested(n: int) -> Case:
    """A team within a team counts within that one: lists in ranges, ranges in lists, ranges in ranges, and
    the same team again."""

    @T.prim_func
    def kernel(A: T.Tensor((S,), "int32"), R: T.SymmTensor((4, S), "int32"), B: T.Tensor((4, S), "int32")):
        with T.Kernel(1, threads=32):
            with T.Scale("device") as (rank, world):
                for k in range(4):
                    T.copy(A, R[k, 0:S])
                T.barrier()
                with T.Scale("device", team=range(1, world)) as (me, m):
                    with T.Scale("device", team=range(me % 2, m, 2)):  # 1, 3 and 2, 4
                        T.all_reduce(R[0, 0:S], B[0, 0:S])
                    with T.Scale("device", team=[1, 0]) as (place, pair):  # 2 and 1
                        T.copy(A, R[1, 0:S], dst=1 - place)
                        with T.Scale("device"):
                            T.barrier()
                        T.copy(R[1, 0:S], B[1, 0:S])
                with T.Scale("device", team=[2, 0, 1]) as (me, m):
                    with T.Scale("device", team=range(me % 2, m, 2)) as (place, count):  # 2 and 1; 0
                        T.copy(A, R[2, 0:S], dst=(place + 1) % count)
                        T.barrier()
                        T.copy(R[2, 0:S], B[2, 0:S])
                    with T.Scale("device", team=[0, 2]):  # 2 and 1
                        T.all_reduce(R[3, 0:S], B[3, 0:S])

    def want(r: int) -> dict[str, Any]:
        a, b = given(n), np.zeros((4, S), np.int32)
        if r >= 1:
            b[0] = a[1 + (r - 1) % 2 :: 2].sum(0)
        if r in (1, 2):
            b[1], b[2], b[3] = a[3 - r], a[3 - r], a[1] + a[2]
        if r == 0:
            b[2] = a[0]
        return {"B": b}

    return kernel, args(n, R=(4, S), B=(4, S)), want


def overlapping(n: int) -> Case:
    """Teams that share ranks meet one after another, many times, all blocks of each: nobody is taken for
    another team's."""
    teams = [[0, 1], [1, 2], [2, 0, 1], list(range(n)), [0, n - 1]]
    rounds = 3

    @T.prim_func
    def kernel(
        A: T.Tensor((S,), "int32"),
        X: T.SymmTensor((rounds, len(teams), 3, S), "int32"),
        B: T.Tensor((rounds, len(teams), 3, S), "int32"),
    ):
        with T.Kernel(3, threads=32) as b:
            for k in T.serial(rounds):
                for t, team in enumerate(teams):
                    with T.Scale("device", team=team) as (me, m):
                        for i in T.Parallel(S):
                            X[k, t, b, i] = A[i] + 100 * k + b
                        T.barrier()
                        T.copy(X[k, t, (b + 1) % 3, 0:S], B[k, t, b, 0:S], src=(me + 1) % m)

    def want(r: int) -> dict[str, Any]:
        out = np.zeros((rounds, len(teams), 3, S), np.int32)
        for k in range(rounds):
            for t, team in enumerate(teams):
                for b in range(3 * (r in team)):
                    out[k, t, b] = given(n)[team[(team.index(r) + 1) % len(team)]] + 100 * k + (b + 1) % 3
        return {"B": out}

    return kernel, args(n, X=(rounds, len(teams), 3, S), B=(rounds, len(teams), 3, S)), want


#: case → on how many ranks
CASES: dict[str, tuple[Callable[[int], Case], tuple[int, ...]]] = {
    "nodes": (nodes, (1, 3, 5)),
    "listed": (listed, (2, 4)),
    "nested": (nested, (3, 5)),
    "overlapping": (overlapping, (3,)),
}
ALL = [(name, n) for name, (_, counts) in CASES.items() for n in counts]
