"""T.put: one number into a peer's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import refused
from tests.unit.cuda.emulated import agree_on_ranks
from tests.unit.ops.test_signals import by_name
from tilescale.compiler.checks.run import check, launch
from tilescale.errors import TileError

R = 3


def exchange(wait: bool = True) -> Any:
    """Every rank tells all of them how much it has: the sizes of a ragged exchange."""

    @T.prim_func
    def main(
        sizes: T.SymmTensor((R, 2), "int32"),
        halves: T.SymmTensor((R,), "float16"),
        s: T.Signal((2,)),
        O: T.Tensor((R, 2), "int32"),
    ):
        with T.Kernel(1, threads=64), T.Scale("device") as (rank, n):
            for k in T.serial(n):
                T.put(rank * 10 + k, sizes[rank, 1], dst=k, signal=s[0])
                T.put(rank + 0.5, halves[rank], dst=k, signal=s[1], signal_value=rank + 1, signal_op="max")
            if wait:
                T.wait(s[0], n)
            for k in T.serial(n):
                O[k, 1] = sizes[k, 1]
            T.wait(s[1], n)
            T.barrier()

    return main


def arguments() -> list[dict[str, Any]]:
    return [
        {
            "sizes": np.zeros((R, 2), "int32"),
            "halves": np.zeros(R, "float16"),
            "s": np.zeros(2, "int64"),
            "O": np.zeros((R, 2), "int32"),
        }
        for _ in range(R)
    ]


def test_sizes_of_a_ragged_exchange():
    arrays = launch(exchange(), R, by_name(arguments())).arrays
    for rank, got in enumerate(arrays):
        assert got["O"][:, 1].tolist() == [k * 10 + rank for k in range(R)] and got["halves"].tolist() == [
            0.5,
            1.5,
            2.5,
        ]
    report = check(exchange(), R, by_name(arguments()), schedule="adversary", seeds=6)
    assert report, report
    assert any(
        f.kind == "race"
        for f in check(exchange(wait=False), R, by_name(arguments()), schedule="adversary", seeds=6).findings
    )
    agree_on_ranks(exchange(), arguments(), seeds=3)


@pytest.mark.parametrize(
    "what, body",
    [
        ("T.put of a tile", lambda A, B, t: T.put(t, A[0], dst=0)),
        ("T.put without dst=", lambda A, B, t: T.put(1, A[0])),
        ("the target of T.put is a tile of", lambda A, B, t: T.put(1, A[0:2], dst=0)),
        ("B is remote (dst=) and is not in symmetric memory", lambda A, B, t: T.put(1, B[0], dst=0)),
        ("T.put into 3", lambda A, B, t: T.put(1, 3, dst=0)),
    ],
)
def test_refusals(what: str, body: Any):
    @T.prim_func
    def main(A: T.SymmTensor((4,), "int32"), B: T.Tensor((4,), "int32")):
        with T.Kernel(1), T.Scale("device"):
            body(A, B, T.alloc_shared((4,), "int32"))

    with refused(TileError, what):
        main.trace()
