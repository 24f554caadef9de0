"""Blocks that wait for other blocks must fit on the nominal device: refused at compile time where the grid is
static."""

from __future__ import annotations

import pytest
import torch

import tilescale.language as T
from tests.kernels import refused, run
from tilescale.errors import TileValueError


def make(grid, statement, *, threads=128, shared=0, **launch):
    @T.prim_func
    def kernel(s: T.Signal((4,)), C: T.Tensor((T.dynamic("n"),), "int32")):
        with T.Kernel(grid if grid else C.shape[0], threads=threads, **launch) as b:
            if shared:
                t = T.alloc_shared((shared,), "uint8")
                T.clear(t)
            statement(s)
            C[b] = 1

    return kernel


@T.macro
def nothing(s):
    pass


@T.macro
def grid_barrier(s):
    with T.Scale("grid"):
        T.barrier()


@T.macro
def wait(s):
    with T.Scale("device"):
        T.wait(s[0], 0)


@T.macro
def collective_free_barrier(s):
    with T.Scale("device"):
        T.barrier()


@T.macro
def roles(s):
    own = T.alloc_signal((1,))
    with T.Scale("warp") as (w, n):
        if w == 0:
            T.wait(own[0])
        else:
            T.signal(own[0])


@T.macro
def in_cluster(s):
    with T.Scale("cta_cluster"):
        T.barrier()


@pytest.mark.parametrize(
    ("limit", "launch"),
    [
        (132 * 16, {}),
        (132 * 2, {"threads": 1024}),
        (132 * 32, {"threads": 32}),
        (132, {"shared": 200 << 10}),
        (132 * 2, {"shared": 100 << 10}),
        (24, {"max_blocks": 24}),
        (132 // 8 * 8, {"shared": 200 << 10, "cta_cluster": 8}),
    ],
)
def test_the_limit(limit: int, launch: dict):
    step = launch.get("cta_cluster", 1)
    make_at = lambda n: make(n, grid_barrier, **launch)  # noqa: E731
    from tests.kernels import scheduled

    scheduled(make_at(limit))
    message = f"blocks of kernel wait for others here, its grid has {limit + step} blocks, and {limit} are resident at once"
    with refused(
        TileValueError,
        message,
        at="T.barrier()",
        expected=f"at most {limit} blocks where",
        write="T.Persistent",
    ):
        scheduled(make_at(limit + step))


def test_who_waits():
    for statement, at in ((wait, "T.wait(s[0], 0)"), (collective_free_barrier, "T.barrier()")):
        with refused(
            TileValueError, "blocks of kernel wait for others here, its grid has 3000 blocks, and 2112", at=at
        ):
            run(make(3000, statement))
    for statement in (nothing, roles):  # nobody waits for another block
        run(make(3000, statement))
    run(make(3000, in_cluster, cta_cluster=2))


def test_waits_within_a_block_or_cluster_ask_for_no_residency():
    @T.prim_func
    def kernel(C: T.Tensor((T.dynamic("n"),), "int32")):
        with T.Kernel(C.shape[0], threads=64) as b:
            own = T.alloc_signal((1,))
            with T.Scale("warp") as (w, n):
                if w == 0:
                    T.wait(own[0])
                    C[b] = 1
                else:
                    T.signal(own[0])

    @T.prim_func
    def clusters(C: T.Tensor((T.dynamic("n"),), "int32")):
        with T.Kernel(C.shape[0], threads=64, cta_cluster=2) as b:
            t, u = T.alloc_shared((1,), "int32"), T.alloc_shared((1,), "int32")
            t[0] = b
            with T.Scale("cta_cluster") as (c, n):
                T.barrier()
                T.copy(t, u, src=1 - c)
            C[b] = u[0]

    for k in (kernel, clusters):
        c = torch.zeros(6000, dtype=torch.int32)
        run(k)(c)
        assert c.tolist() == [1] * 6000 if k is kernel else [b ^ 1 for b in range(6000)]


def test_a_grid_known_at_launch_is_refused_there():
    @T.prim_func
    def kernel(C: T.Tensor((T.dynamic("n"),), "int32")):
        with T.Kernel(C.shape[0], threads=1024) as b:
            with T.Scale("grid"):
                T.barrier()
            C[b] = 1

    made = run(kernel)
    c = torch.zeros(264, dtype=torch.int32)
    made(c)
    assert c.all()
    message = "kernel: blocks wait for others, the grid has 265 blocks, and 264 are resident"
    with refused(TileValueError, message, expected="at most 264", write="T.Persistent"):
        made(torch.zeros(265, dtype=torch.int32))
