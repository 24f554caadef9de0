"""T.test: a look at a counter that does not wait, on the simulator and on emulated GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import refused
from tests.unit.cuda.emulated import agree, agree_on_ranks
from tests.unit.ops.test_signals import by_name
from tilescale.compiler.checks.run import check, launch
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.driver import backend, lower
from tilescale.errors import TileError

S = 8


def polled(*, guarded: bool = True, sent: bool = True, reach: str = "device") -> Any:
    """Rank 0 looks until rank 1's put has come; ``rounds`` counts how often."""

    @T.prim_func
    def main(X: T.SymmTensor((S,), "float32"), s: T.Signal((2,)), O: T.Tensor((S,), "float32")):
        with T.Kernel(1, threads=32), T.Scale("device") as (rank, n):
            if rank == 1:
                T.copy(X, X, dst=0)
                if sent:
                    T.signal(s[1], dst=0)
            elif rank == 0:
                come = T.alloc_var("int32")
                while come == 0:
                    with T.Scale(reach):
                        if T.test(s[1]):
                            come = 1
                        elif not guarded:
                            T.copy(X, O)
                T.copy(X, O)

    return main


def arguments() -> list[dict[str, Any]]:
    return [
        {"X": np.full(S, r + 1, "float32"), "s": np.zeros(2, "int64"), "O": np.zeros(S, "float32")}
        for r in range(2)
    ]


def test_what_was_released_is_there_once_it_holds():
    assert (launch(polled(), 2, by_name(arguments())).arrays[0]["O"] == 2).all()
    report = check(polled(), 2, by_name(arguments()), schedule="adversary", seeds=10)
    assert report, report
    explored = check(polled(), 2, by_name(arguments()), schedule="exhaustive", bound=200)
    assert explored and explored.complete, explored
    agree_on_ranks(polled(), arguments(), seeds=4)


@pytest.mark.parametrize(
    "options, kind", [({"guarded": False}, "race"), ({"reach": "grid"}, "race"), ({"sent": False}, "endless")]
)
def test_a_look_that_fails_orders_nothing(options: dict[str, Any], kind: str):
    found = check(polled(**options), 2, by_name(arguments()), schedule="exhaustive", bound=12).findings
    assert [f.kind for f in found] == [kind], found


def test_in_a_block_and_in_a_cluster():
    @T.prim_func
    def main(O: T.Tensor((2, 4), "int32")):
        with T.Kernel(2, cluster_dims=2, threads=64) as b:
            t = T.alloc_shared((4,), "int32")
            s = T.alloc_signal((2,))
            T.fill(t, 0)
            with T.Scale("cta_cluster") as (me, n):
                T.barrier()
                for i in T.Parallel(4):
                    t[i] = b * 10 + i
                T.signal(s[1], dst=1 - me)
                come = T.alloc_var("int32")
                while come == 0:
                    if T.test(s[1], 1, cmp="eq"):
                        come = 1
                T.copy(t, O[b, 0:4], src=1 - me)
                T.barrier()

    args = {"O": np.zeros((2, 4), "int32")}
    assert (launch(main, 1, args).arrays[0]["O"][:, 0] == [10, 0]).all()
    assert check(main, 1, args, schedule="adversary", seeds=5)
    agree(main, args)


def test_refusals():
    def refuse(what: str, body: Any) -> None:
        @T.prim_func
        def main(A: T.Tensor((4,), "float32"), s: T.Signal((2,))):
            with T.Kernel(1), T.Scale("device"):
                body(A, s)

        with refused(TileError, what):
            main.trace()

    refuse("T.test with cmp=", lambda A, s: T.test(s[0], cmp="about"))
    refuse("A is a float32 tensor and no signal", lambda A, s: T.test(A[0]))
    refuse("T.test is a tile of", lambda A, s: T.test(s[0:2]))


def test_what_gpus_are_told():
    text = backend("cuda:sm_90a").text(lower(polled().trace(), "cuda:sm_90a"), "cuda")
    assert "ts::test<true>(team, s, 1" in text and text.count("__syncthreads") >= 2


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="no nvcc")
def test_those_of_a_cluster_compile():
    @T.prim_func
    def main(O: T.Tensor((2,), "int32")):
        with T.Kernel(2, threads=64, cluster_dims=2) as b:
            s = T.alloc_signal((2,))
            with T.Scale("cta_cluster") as (me, n):
                T.signal(s[0], 3, op="max", dst=1 - me)
                T.signal(s[1], 3, op="min", dst=1 - me)
                if T.test(s[0], 3):
                    O[b] = 1
                T.barrier()

    toolchain.compile_cubin(backend("cuda:sm_90a").printed(lower(main.trace(), "cuda:sm_90a")), "sm_90a")
