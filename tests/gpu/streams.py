"""Operations of several ranks on two streams, of two teams, in two branches of a CUDA graph, and beside NCCL's
work of a training step, with random delays that let GPUs begin in other orders. Starts its ranks itself, twice:
as it is, and with CUDA_DEVICE_MAX_CONNECTIONS=1.

    TILESCALE_TARGET=cuda python -m tests.gpu.streams 2
    TILESCALE_TARGET=cpu python -m tests.gpu.streams 2      # without streams: one after another

A line for each case: PASS or FAIL. Results are compared on the device with the bits of a first call.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tests.gpu.jobs import Job
from tilescale import comm, ops
from tilescale.ops import host
from tilescale.ops.ranks import gather_gemm, gemm_scatter

#: seconds for a job; steps of a case; cycles of a delay at most, some 300 µs
LIMIT, STEPS, DELAY = 240, 200, 500_000
#: multiprocessors that NCCL takes at most, and those that are left to it
NCCL, SPARE = 8, 16


class Streams:
    """Two streams, where there are any."""

    def __init__(self) -> None:
        self.gpu = comm.signals(1).device.type == "cuda"
        self.device = "cuda" if self.gpu else "cpu"
        self.pair = [torch.cuda.Stream(), torch.cuda.Stream()] if self.gpu else [None, None]
        self.draw = random.Random(comm.rank())

    def on(self, k: int) -> Any:
        return torch.cuda.stream(self.pair[k]) if self.gpu else contextlib.nullcontext()

    def late(self) -> None:
        """Some of the time, on this rank's current stream or its host."""
        where = self.draw.random()
        if where < 0.3 and self.gpu and not torch.cuda.is_current_stream_capturing():
            torch.cuda._sleep(int(DELAY * self.draw.random()))
        elif where > 0.97:
            time.sleep(1e-3 * self.draw.random())

    def fork(self) -> None:
        for stream in self.pair if self.gpu else ():
            stream.wait_stream(torch.cuda.current_stream())

    def join(self) -> None:
        for stream in self.pair if self.gpu else ():
            torch.cuda.current_stream().wait_stream(stream)

    def settle(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()
        comm.barrier()


class Work:
    """A call, and whether its result has the bits of the first one."""

    def __init__(self, call: Callable[[], torch.Tensor]):
        self.call, self.want = call, call().clone()
        self.bad = torch.zeros((), dtype=torch.int64, device=self.want.device)

    def __call__(self) -> None:
        self.bad += (self.call().view(torch.uint8) != self.want.view(torch.uint8)).any()


def works(at: Streams) -> list[Work]:
    """A gather with its product and a product with its scatter, each in one kernel that takes the whole GPU."""
    rank, world = comm.rank(), comm.world_size()
    M, N, K = (2048, 1024, 1024) if at.gpu else (128, 64, 64)
    g = torch.Generator(at.device).manual_seed(rank)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device=at.device).to(torch.bfloat16)

    x, w, y = some(M // world, K), some(K, N), some(M, K)
    units = host.units(x.device)
    if at.gpu:
        first = replace(gather_gemm.choose(M, N, K, world, "bfloat16", units), fused=True)
        second = replace(gemm_scatter.choose(M, N, K, world, "bfloat16", units), fused=True)
    else:
        first = replace(gather_gemm.choose(M, N, K, world, "bfloat16"), fused=True, **SMALL, high=16, wide=32)
        second = replace(gemm_scatter.choose(M, N, K, world, "bfloat16"), fused=True, **SMALL, run=2, lead=4)
    gathered = Work(lambda: ops.all_gather_matmul(x, w, config=first))
    whole = ops.all_gather(x).float() @ w.float()
    assert torch.allclose(gathered.want.float(), whole, rtol=2e-2, atol=0.5)
    return [gathered, Work(lambda: ops.matmul_reduce_scatter(y, w, config=second))]


SMALL = {"BM": 64, "BN": 64, "BK": 32, "stages": 2, "threads": 128, "blocks": 5, "panel": 2}


def on_two_streams(at: Streams, pair: list[Work]) -> None:
    """Two operations of one team."""
    for _ in range(STEPS if at.gpu else 5):
        for k, work in enumerate(pair):
            with at.on(k):
                at.late()
                work()


def of_two_teams(at: Streams, pair: list[Work]) -> None:
    """All ranks, and all ranks the other way round: GPUs may become ready for them in other orders."""
    other = comm.team(list(range(comm.world_size()))[::-1])
    x = torch.full((50_000,), 1.0 + comm.rank(), device=at.device)
    sums = Work(lambda: ops.all_reduce(x, group=other, how="two_shot"))
    at.settle()
    on_two_streams(at, [pair[0], sums])
    at.settle()
    pair.append(sums)


def in_two_branches(at: Streams, pair: list[Work]) -> None:
    """One graph, whose branches hold an operation each, three times."""
    if not at.gpu:
        return
    at.settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        at.fork()
        for _ in range(3):
            for k, work in enumerate(pair[:2]):
                with at.on(k):
                    work()
        at.join()
    for _ in range(STEPS // 4):
        at.late()
        graph.replay()


def training_step(at: Streams, pair: list[Work], grads: list[torch.Tensor], sums: Work) -> None:
    """Gradients are summed by torch's library on its own stream while fused products run on another one: either
    may begin first, on each GPU."""
    at.fork()
    pending = []
    for grad in grads:
        with at.on(1):
            grad.fill_(1.0 + comm.rank())
            at.late()
            pending.append(dist.all_reduce(grad, async_op=True))
        with at.on(0):
            at.late()
            for work in pair[:2]:
                work()
    with at.on(1):
        for one in pending:
            one.wait()
        sums()
    at.join()


def beside_nccl(at: Streams, pair: list[Work], captured: bool = False) -> None:
    grads = [torch.empty(1 << (22 if at.gpu else 10), device=at.device) for _ in range(3)]
    total = sum(range(1, comm.world_size() + 1))
    for grad in grads:
        grad.fill_(total)
    sums = Work(lambda: torch.stack([(grad == total).all() for grad in grads]))
    pair.append(sums)
    if captured:
        at.settle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            training_step(at, pair, grads, sums)
    for _ in range(STEPS // 4 if at.gpu else 3):
        at.late()
        graph.replay() if captured else training_step(at, pair, grads, sums)
    at.settle()


def beside_nccl_in_a_graph(at: Streams, pair: list[Work]) -> None:
    """The same step, captured: NCCL's branch beside that of the fused kernels."""
    if at.gpu:
        beside_nccl(at, pair, captured=True)


def rank_of_a_job() -> int:
    comm.init()
    rank, world, at, bad = comm.rank(), comm.world_size(), Streams(), 0
    dist.init_process_group("nccl" if at.gpu else "gloo", rank=rank, world_size=world)
    for case in (on_two_streams, of_two_teams, in_two_branches, beside_nccl, beside_nccl_in_a_graph):
        begun = time.monotonic()
        made = works(at)
        at.settle()
        at.fork()
        case(at, made)
        at.join()
        at.settle()
        wrong = sum(int(work.bad) for work in made)
        bad += wrong
        if rank == 0 or wrong:
            verdict = "FAIL" if wrong else "PASS"
            print(
                f"{verdict} {case.__name__}: {wrong} wrong, {time.monotonic() - begun:.1f} s on rank {rank}",
                flush=True,
            )
    at.settle()
    dist.destroy_process_group()
    return int(bad > 0)


def main() -> int:
    if "RANK" in os.environ:
        return rank_of_a_job()
    ranks, bad = int(sys.argv[1]) if len(sys.argv) > 1 else 2, False
    own = {"TILESCALE_WAIT_TIMEOUT": "20", "NCCL_MAX_CTAS": str(NCCL), "TILESCALE_SPARE": str(SPARE)}
    for more in ({}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}):
        code, text = Job("tilescale", ranks, ["tests.gpu.streams"], own | dict(os.environ) | more).wait(LIMIT)
        right = code == 0 and text.count("PASS") == 5
        bad |= not right
        what = "CUDA_DEVICE_MAX_CONNECTIONS=1" if more else "as it is"
        print(f"{text.rstrip()}\n{'PASS' if right else 'FAIL'} {what}, exit code {code}", flush=True)
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
