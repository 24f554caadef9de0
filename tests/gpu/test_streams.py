"""Graphs and streams where a launch has more than pointers: tensor maps, failure records, allocated outputs,
several threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.gpu.gemms import gemm
from tests.gpu.test_launch import add, normal
from tilescale.cuda import synchronize

N = T.dynamic("n")


@T.prim_func
def checked(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32")):
    with T.Kernel(T.ceildiv(N, 64), threads=64) as bx:
        for i in T.Parallel(64):
            T.device_assert(A[bx * 64 + i] < 1e6, "too large")
            B[bx * 64 + i] = A[bx * 64 + i] + 1.0


def product() -> Any:
    """A GEMM whose operands come by TMA on Hopper."""
    return tilescale.compile(gemm(512, 384, 256, 128, 128, 64, 2), target="cuda")


def operands() -> tuple[Any, Any, Any]:
    return (
        normal(512, 256, dtype=torch.bfloat16),
        normal(256, 384, dtype=torch.bfloat16),
        torch.zeros(512, 384, device="cuda", dtype=torch.bfloat16),
    )


def agrees(a: Any, b: Any, c: Any) -> bool:
    return torch.allclose(c.float(), a.float() @ b.float(), rtol=2e-2, atol=2e-1)


def test_a_graph_keeps_the_tensor_maps_of_its_launches():
    """Launches with other tensors than the captured ones, so many that the launcher forgets the captured
    maps, leave the graph as it is."""
    run, sets = product(), [operands() for _ in range(9)]
    run(*sets[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(*sets[0])
        run(*sets[1])
    for one in sets[2:]:
        run(*one)
    for one in sets[:2]:
        one[0].normal_()
        one[2].zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(agrees(*one) for one in sets)


def test_the_first_launch_of_a_kernel_that_can_fail_may_be_captured():
    run = tilescale.compile(checked, target="cuda", name="captured at once")
    a, b = normal(1000), torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(a, b)
    graph.replay()
    synchronize()
    assert torch.equal(b, a + 1)


def test_outputs_allocated_in_a_graph_live_in_its_pool():
    run = tilescale.compile(add, -1, target="cuda")
    a, b = normal(5000), normal(5000)
    run(a, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = run(a, b)
        d = run(c, a)
    for _ in range(3):
        a.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(d, a + b + a)


@pytest.mark.parametrize("threads", [2, 8])
def test_threads_launch_on_streams_of_their_own(threads: int):
    """One kernel object, whose launcher keeps tensor maps, called by all at once."""
    run, wrong = product(), []
    run(*operands())
    torch.cuda.synchronize()

    def work() -> None:
        stream, sets = torch.cuda.Stream(), [operands() for _ in range(6)]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for k in range(120):
                run(*sets[k % 6])
        stream.synchronize()
        wrong.extend(k for k, one in enumerate(sets) if not agrees(*one))

    started = [threading.Thread(target=work) for _ in range(threads)]
    for t in started:
        t.start()
    for t in started:
        t.join()
    assert not wrong


def test_a_stream_that_torch_did_not_make():
    made = torch.cuda.Stream(priority=-1)
    run, a, b, c = (
        tilescale.compile(add, target="cuda"),
        normal(1 << 20),
        normal(1 << 20),
        torch.zeros(1 << 20, device="cuda"),
    )
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(made.cuda_stream)):
        torch.cuda._sleep(20_000_000)
        a.mul_(2)
        run(a, b, c)
    made.synchronize()
    assert torch.equal(c, a + b)


def test_launches_follow_one_another_on_a_stream():
    """A thousand launches that each read what the one before wrote."""
    run, a, b = (
        tilescale.compile(checked, target="cuda"),
        torch.zeros(1000, device="cuda"),
        torch.zeros(1000, device="cuda"),
    )
    for _ in range(500):
        run(a, b)
        run(b, a)
    synchronize()
    assert bool((a == 1000).all())
