"""A rank is killed inside fused kernels, and the others go on without it: starts its ranks itself, since a
launcher would end them all.

    TILESCALE_TARGET=cuda python -m tests.gpu.recover 3
    TILESCALE_TARGET=cpu python -m tests.gpu.recover 3

A line for each rank that is left: how long it took until an error named the one that died, and that
operations of the ranks that are left are right behind `comm.finalize()` and `comm.init()`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

import tilescale.cuda
from tilescale import comm, ops
from tilescale.errors import TileError
from tilescale.ops.ranks.gather_gemm import Config

ROOT = Path(__file__).resolve().parent.parent.parent
#: seconds for everything, and until the error must have come
LIMIT, SOON = 150, 10
SMALL = {"BM": 64, "BN": 64, "BK": 32, "stages": 2, "threads": 128, "blocks": 5, "panel": 2}


def on_gpu() -> bool:
    return bool(comm.signals(1).device.type == "cuda")


def settle() -> None:
    if on_gpu():
        tilescale.cuda.synchronize()


def died(doomed: bool, inside: bool) -> tuple[float, str]:
    """Fused products of all ranks one after another (or meetings of hosts), until one is killed: how long it
    took then, and what was said. The doomed rank does not return."""
    device = "cuda" if on_gpu() else "cpu"
    x, w = (torch.ones(shape, device=device).to(torch.bfloat16) for shape in ((128, 256), (256, 128)))
    config = Config(True, False, high=16, wide=48, **SMALL)
    y = ops.all_gather_matmul(x, w, config=config)  # compiles
    assert bool((y == 256).all())
    settle()
    comm.barrier()
    if doomed:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    began = time.monotonic()
    try:
        for step in range(10**9):
            if inside:
                ops.all_gather_matmul(x, w, config=config)
                ops.all_reduce(x[:8])  # packets
                if step % 20 == 0:
                    settle()
            else:
                comm.barrier()
    except TileError as error:
        return time.monotonic() - began - 0.3, str(error)
    raise AssertionError("nothing was said")


def gone_on(size: int, rank: int) -> None:
    """Joins those that are left, and works with them."""
    comm.finalize()
    comm.init(recover=True)
    assert (comm.world_size(), comm.rank()) == (size, rank), (comm.world_size(), comm.rank())
    device = "cuda" if on_gpu() else "cpu"
    x = torch.full((40, 64), 1.0 + rank, device=device)
    w = torch.ones((64, 32), device=device)
    total = sum(range(1, size + 1))
    for _ in range(20):
        assert bool((ops.all_reduce(x) == total).all())
        y = ops.all_gather_matmul(x.to(torch.bfloat16), w.to(torch.bfloat16))
        want = torch.arange(1, size + 1, device=device).repeat_interleave(40)[:, None] * 64.0
        assert bool((y == want).all())
    settle()
    comm.barrier()


def rank_of_a_job() -> int:
    comm.init(recover=True)
    rank, size = comm.rank(), comm.world_size()
    took, why = died(rank == size - 1, True)
    gone_on(size - 1, rank)
    good = took < SOON and f"rank {size - 1} " in why and "has died" in why
    print(f"{'PASS' if good else 'FAIL'} rank {rank}: named after {took:.2f} s, went on: {why}", flush=True)
    comm.finalize()
    return int(not good)


def main() -> int:
    if "RANK" in os.environ:
        return rank_of_a_job()
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    job = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    own = {"TILESCALE_WAIT_TIMEOUT": "60", "TILESCALE_HEAP_SIZE": "256M"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.recover"],
            cwd=ROOT,
            env=own | dict(os.environ) | job | {"RANK": str(r), "LOCAL_RANK": str(r)},
        )
        for r in range(size)
    ]
    until, bad = time.monotonic() + LIMIT, 0
    for rank, process in enumerate(ranks):
        try:
            code = process.wait(max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
            print(f"FAIL rank {rank}: not done after {LIMIT} s", flush=True)
        bad |= code != (-signal.SIGKILL if rank == size - 1 else 0)
    print("FAIL" if bad else "PASS", flush=True)
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
