"""Collectives that do not fit the ranks that launch: refused by name, before anything runs where a launcher
can know it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tilescale.language as T
from tests.kernels import refused, run
from tests.ranks.harness import RanksFailed, run_ranks
from tilescale import comm
from tilescale.compiler import driver, emulator
from tilescale.compiler.emulator import EmulationError
from tilescale.errors import TileValueError

S = 8
OPS = ["all_gather", "reduce_scatter", "all_to_all", "broadcast"]


def moving(op: str, parts, when=None, lead=4):
    """A collective of ``parts`` parts (with that root). when: it stands under this condition on the number of
    ranks."""

    def move(A, G, H, n):
        if op == "all_gather":
            T.all_gather(A, G[0 : parts(n), 0:S])
        elif op == "all_to_all":
            T.all_to_all(H[0 : parts(n), 0:S], G[0 : parts(n), 0:S])
        elif op == "reduce_scatter":
            T.reduce_scatter(H[0 : parts(n), 0:S], A)
        else:
            T.broadcast(A, G[0, 0:S], parts(n))

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        G: T.SymmTensor((lead, S), "float32"),
        H: T.SymmTensor((lead, S), "float32"),
    ):
        with T.Kernel(1), T.Scale("device") as (rank, n):
            if when is None:
                move(A, G, H, n)
            else:
                if when(n):
                    move(A, G, H, n)

    return main


def test_what_a_launcher_refuses():
    """Parts that are a number or a symbol, of a collective that every launch comes to; one under a condition
    asks only whoever gets there."""
    fixed = {op: run(moving(op, lambda n: 2 if op != "broadcast" else 3)) for op in OPS}
    given = run(moving("all_gather", lambda n: T.dynamic("p"), lead=T.dynamic("p")))
    fitting = [run(moving(op, lambda n: 3 if op != "broadcast" else 2)) for op in OPS]
    fitting.append(run(moving("all_gather", lambda n: 2, when=lambda n: n == 2)))

    def work():
        comm.init()
        a, g, h = torch.ones(S), comm.full((4, S), 7), comm.full((4, S), 7)
        said = {}
        for op, kernel in fixed.items():
            with pytest.raises(TileValueError) as error:
                kernel(a, g, h)
            said[op] = str(error.value)
        with pytest.raises(TileValueError, match="3 take part, and G has 4 parts"):
            given(a, g, h)
        assert (a == 1).all() and (g == 7).all() and (h == 7).all()
        for kernel in fitting:
            kernel(a, g, h)
        assert (g[0] == 21).all() and (g[3] == 7).all()  # sums of three sevens, handed on
        return said

    said = run_ranks(3, work)[0]
    assert (
        "T.all_gather: 3 take part, and G has 2 parts" in said["all_gather"]
        and "T.all_gather(A, G[0" in said["all_gather"]
    )
    assert "T.reduce_scatter: 3 take part, and H has 2 parts" in said["reduce_scatter"]
    assert "T.all_to_all: 3 take part, and G has 2 parts" in said["all_to_all"]
    assert "T.broadcast: there is no participant 3 that could be the root, there are 3" in said["broadcast"]


@pytest.mark.parametrize(
    "op, parts, when",
    [
        ("all_gather", lambda n: n - 1, None),
        ("broadcast", lambda n: n + 1, None),
        ("reduce_scatter", lambda n: 2, lambda n: n > 2),
    ],
)
def test_what_only_the_launch_can_know_fails_in_it(op: str, parts, when):
    kernel = run(moving(op, parts, when))

    def work():
        comm.init()
        kernel(torch.ones(S), comm.full((4, S), 7), comm.full((4, S), 7))

    with pytest.raises(RanksFailed) as error:
        run_ranks(3, work)
    wanted = (
        "the root is none of those who take part"
        if op == "broadcast"
        else "has not as many parts as take part"
    )
    assert f"T.{op}: " in str(error.value) and wanted in str(error.value)


def test_gpus_get_the_same_questions():
    """What the launcher asks stands at the description's end, the same on both; what it cannot know is asked
    by the kernel."""
    asked = {}
    for target in ("cpu", "cuda:sm_90a"):
        lowered = driver.lower(moving("all_to_all", lambda n: 2).trace(), target)
        asked[target] = driver.backend(target).describe(lowered, instrument=False, fingerprint=1).desc[-7:]
    assert asked["cpu"] == asked["cuda:sm_90a"] == [2, 0, 0, 2, 0, 0, 2]
    lowered = driver.lower(moving("all_gather", lambda n: n - 1).trace(), "cuda:sm_90a")
    args = [
        {"A": np.ones(S, "float32"), "G": np.ones((4, S), "float32"), "H": np.ones((4, S), "float32")}
        for _ in range(2)
    ]
    with pytest.raises(EmulationError, match="G has not as many parts as take part"):
        emulator.run_ranks(lowered.own, lowered.program, args, 0)


@pytest.mark.parametrize("op", ["all_gather", "all_to_all", "reduce_scatter", "broadcast"])
def test_a_cluster_whose_size_is_known(op: str):
    @T.prim_func
    def main(A: T.Tensor((S,), "float32")):
        with T.Kernel(2, cluster_dims=2, threads=32):
            one, many, more = (
                T.alloc_shared((S,), "float32"),
                T.alloc_shared((3, S), "float32"),
                T.alloc_shared((3, S), "float32"),
            )
            with T.Scale("cta_cluster"):
                if op == "all_gather":
                    T.all_gather(one, many)
                elif op == "all_to_all":
                    T.all_to_all(more, many)
                elif op == "reduce_scatter":
                    T.reduce_scatter(many, one)
                else:
                    T.broadcast(one, many[0, 0:S], 2)

    wanted = (
        "root=2 is no block of the cluster"
        if op == "broadcast"
        else "2 blocks of the cluster take part, and many has 3 parts"
    )
    with refused(TileValueError, wanted):
        main.trace()
