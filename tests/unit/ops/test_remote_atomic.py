"""Atomic updates of a peer's memory: their values, what they order, what is refused; on the simulator and on
emulated GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import refused
from tests.unit.cuda.emulated import agree_on_ranks
from tests.unit.ops.test_signals import by_name
from tilescale.compiler.checks.run import check, launch
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.driver import backend, lower
from tilescale.errors import TileError

R = 3


def tickets(dtype: str) -> Any:
    """Every rank takes two places in a row of rank 0's, and puts its number there."""

    @T.prim_func
    def main(count: T.SymmTensor((2,), dtype), row: T.SymmTensor((8,), "int32"), P: T.Tensor((2,), dtype)):
        with T.Kernel(1, threads=32), T.Scale("device") as (rank, n):
            for k in T.serial(2):
                place = T.atomic_add(count[0], 1, dst=0, return_prev=True)
                P[k] = place
                T.copy(P[k : k + 1], count[1:2])
                number = T.alloc_shared((1,), "int32")
                number[0] = rank + 1
                T.copy(number, row[T.cast(place, "int32") : T.cast(place, "int32") + 1], dst=0)
            T.barrier()

    return main


def tickets_of(dtype: str) -> list[dict[str, Any]]:
    return [
        {"count": np.zeros(2, dtype), "row": np.zeros(8, "int32"), "P": np.zeros(2, dtype)} for _ in range(R)
    ]


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32"])
def test_places_are_handed_out_once(dtype: str):
    report = check(tickets(dtype), R, by_name(tickets_of(dtype)), schedule="adversary", seeds=6)
    assert report, report
    for arrays in (
        launch(tickets(dtype), R, by_name(tickets_of(dtype))).arrays,
        emulated(tickets(dtype), tickets_of(dtype)),
    ):
        assert arrays[0]["count"][0] == 2 * R and sorted(arrays[0]["row"][: 2 * R]) == [1, 1, 2, 2, 3, 3]
        assert sorted(p for a in arrays for p in a["P"]) == list(range(2 * R))


def emulated(kernel: Any, args: list[dict[str, Any]], seed: int = 0) -> list[dict[str, Any]]:
    from tilescale.compiler import emulator
    from tilescale.compiler.cuda.lower import Lowering
    from tilescale.compiler.passes import pipeline

    program, _ = pipeline.run(kernel.trace(), target("sm_90a"))
    return emulator.run_ranks(Lowering(program).run(), program, args, seed)


def test_every_kind():
    @T.prim_func
    def main(A: T.SymmTensor((4,), "int32"), F: T.SymmTensor((2,), "float16"), O: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=32), T.Scale("device") as (rank, n):
            nxt = (rank + 1) % n
            T.atomic_max(A[0], rank, dst=0)
            T.atomic_min(A[1], 0 - rank, dst=0)
            T.atomic_add(F[0], 1.5, dst=nxt)
            T.atomic_store(A[2], rank * 10, dst=nxt)
            T.barrier()
            O[0] = T.atomic_load(A[2], src=nxt)
            O[1] = T.atomic_max(A[3], 5, dst=rank, return_prev=True)

    args = [
        {"A": np.zeros(4, "int32"), "F": np.zeros(2, "float16"), "O": np.zeros(2, "int32")} for _ in range(R)
    ]
    arrays = launch(main, R, by_name(args)).arrays
    assert arrays[0]["A"].tolist() == [2, -2, 20, 5] and [a["O"].tolist() for a in arrays] == [
        [0, 0],
        [10, 0],
        [20, 0],
    ]
    assert all(a["F"][0] == 1.5 for a in arrays)
    assert check(main, R, by_name(args), schedule="adversary", seeds=6)
    agree_on_ranks(main, args, seeds=3)


def handed_over(*, peer: bool = True, load: bool = True) -> Any:
    """Rank 1 puts, then raises a flag of rank 0's, which polls it by atomic loads."""

    @T.prim_func
    def main(X: T.SymmTensor((8,), "float32"), f: T.SymmTensor((1,), "int32"), O: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32), T.Scale("device") as (rank, n):
            if rank == 1:
                T.copy(X, X, dst=0)
                T.atomic_add(f[0], 1, dst=0)
            elif rank == 0:
                v = T.alloc_var("int32")
                while v == 0:
                    if load:
                        if peer:
                            v = T.atomic_load(f[0], src=rank)
                        else:
                            v = T.atomic_load(f[0])
                    else:
                        v = f[0]
                T.copy(X, O)

    return main


def handed() -> list[dict[str, Any]]:
    return [
        {"X": np.full(8, r + 1, "float32"), "f": np.zeros(1, "int32"), "O": np.zeros(8, "float32")}
        for r in range(2)
    ]


def test_an_update_releases_and_a_load_acquires():
    assert (launch(handed_over(), 2, by_name(handed())).arrays[0]["O"] == 2).all()
    report = check(handed_over(), 2, by_name(handed()), schedule="exhaustive", bound=300)
    assert report and report.complete, report
    assert check(handed_over(), 2, by_name(handed()), schedule="adversary", seeds=8)
    agree_on_ranks(handed_over(), handed(), seeds=4)


def test_what_is_atomic_within_a_rank_alone():
    (found,) = check(handed_over(peer=False), 2, by_name(handed()), seeds=5).findings
    assert found.kind == "race" and "atomic within its rank alone" in found.message
    assert any(
        f.kind == "race" for f in check(handed_over(load=False), 2, by_name(handed()), seeds=5).findings
    )


def test_a_rank_that_is_not_there():
    @T.prim_func
    def main(A: T.SymmTensor((4,), "int32"), O: T.Tensor((1,), "int32"), peer: T.int32):
        with T.Kernel(1), T.Scale("device"):
            O[0] = T.atomic_add(A[0], 1, dst=peer, return_prev=True)

    args = {"A": [np.zeros(4, "int32")] * 2, "O": [np.zeros(1, "int32")] * 2, "peer": [2, 2]}
    assert {f.kind for f in check(main, 2, args, seeds=1).findings} == {"no-such-rank"}


@pytest.mark.parametrize("asked", [True, False])
def test_an_element_that_is_not_there(asked: bool):
    @T.prim_func
    def main(A: T.SymmTensor((4,), "int32"), O: T.Tensor((1,), "int32"), k: T.int32):
        with T.Kernel(1), T.Scale("device"):
            if asked:
                O[0] = T.atomic_add(A[k], 1, dst=0, return_prev=True)
            else:
                T.atomic_add(A[k], 1, dst=0)  # dropped

    args = {"A": [np.zeros(4, "int32")] * 2, "O": [np.zeros(1, "int32")] * 2, "k": [4, 4]}
    assert {f.kind for f in check(main, 2, args, seeds=1).findings} == ({"out-of-bounds"} if asked else set())


@pytest.mark.parametrize(
    "what, body",
    [
        ("T.atomic_add has no src=", lambda A, B, t, s: T.atomic_add(A[0], 1, src=1)),
        ("T.atomic_load has no dst=", lambda A, B, t, s: T.atomic_load(A[0], dst=1)),
        ("T.atomic_addx2 has no dst=", lambda A, B, t, s: T.atomic_addx2(A[0], t[0], dst=1)),
        (
            "B is remote (dst=) and is not in symmetric memory",
            lambda A, B, t, s: T.atomic_add(B[0], 1, dst=1),
        ),
        ("T.atomic_add of a peer's memory is of one element", lambda A, B, t, s: T.atomic_add(A, t, dst=1)),
        ("T.atomic_max of the signal s", lambda A, B, t, s: T.atomic_max(s[0], 1, dst=1)),
    ],
)
def test_refusals(what: str, body: Any):
    @T.prim_func
    def main(A: T.SymmTensor((4,), "int32"), B: T.Tensor((4,), "int32"), s: T.Signal((1,))):
        with T.Kernel(1), T.Scale("device"):
            body(A, B, T.alloc_shared((4,), "int32"), s)

    with refused(TileError, what):
        main.trace()


def test_in_a_parallel_loop_it_is_refused():
    @T.prim_func
    def main(A: T.SymmTensor((4,), "int32")):
        with T.Kernel(1), T.Scale("device"):
            for i in T.Parallel(4):
                T.atomic_add(A[i], 1, dst=0)

    with refused(TileError, "T.atomic_add of a peer's memory in T.Parallel"):
        main.trace()


def test_what_gpus_are_told():
    made = lower(tickets("int32").trace(), "cuda:sm_90a")
    assert "ts::system_add(ts::peer(team, &count[0], 0" in backend("cuda:sm_90a").text(made, "cuda")


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="no nvcc")
def test_every_kind_of_every_dtype_compiles(arch: str = "sm_75"):
    @T.prim_func
    def main(
        A: T.SymmTensor((4,), "float16"),
        B: T.SymmTensor((4,), "bfloat16"),
        C: T.SymmTensor((4,), "float64"),
        D: T.SymmTensor((4,), "uint32"),
        E: T.SymmTensor((4,), "int64"),
        s: T.Signal((2,)),
        O: T.Tensor((4,), "float32"),
    ):
        with T.Kernel(1, threads=32), T.Scale("device"):
            for X in (A, B, C, D, E):
                T.atomic_add(X[0], 1, dst=0)
                T.atomic_max(X[1], 1, dst=0)
                T.atomic_min(X[2], 1, dst=0)
                T.atomic_store(X[3], 1, dst=0)
                T.put(2, X[3], dst=0, signal=s[0], signal_op="max")
                O[0] = T.cast(T.atomic_load(X[3], src=0), "float32")
            T.signal(s[1], 3, op="min", dst=0)
            if T.test(s[1], 3, cmp="le"):
                O[1] = 1.0

    toolchain.compile_cubin(backend(f"cuda:{arch}").printed(lower(main.trace(), f"cuda:{arch}")), arch)
