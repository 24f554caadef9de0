"""A layer of experts in chunks, whose communication runs on a stream of its own, beside the same layer on one
stream: the same bits, but for gradients of weights, whose rows are added up in another order; with delays on
some ranks; and captured in a CUDA graph, forward and backward, replayed with other tokens and choices.

    TILESCALE_TARGET=cuda tilescale launch -n 2 -m tests.gpu.experts
    TILESCALE_TARGET=cpu tilescale launch -n 2 -m tests.gpu.experts      # without streams and graphs

A line for each case: PASS or FAIL.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import Tensor

from tilescale import comm
from tilescale import nn as tsnn

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"recompute": True},
    {"keep_rows": True, "capacity": 0.9},
    {"dispatch_dtype": torch.float8_e4m3fn},
)
#: what errors of gradients of weights may be, relative to the greatest number
ROUNDED = 0.02


def drawn(seed: int, rows: int, shape: dict[str, int], device: str) -> Tensor:
    g = torch.Generator(device).manual_seed(1000 * seed + comm.rank())
    x = torch.randn(rows, shape["features"], generator=g, device=device, dtype=torch.bfloat16)
    return x if seed % 3 else x[:1] + 0.01 * x  # some seeds: nearly all tokens to the same experts


def late(on_gpu: bool) -> None:
    """Some of the time this rank's stream."""
    if on_gpu and random.random() < 0.4:
        torch.cuda._sleep(random.randrange(1_000_000))


def results(layer: Any, x: Tensor, dy: Tensor, every: int, on_gpu: bool) -> list[Tensor]:
    """y, then gradients of x and of the parameters."""
    x = x.detach().requires_grad_()
    late(on_gpu)
    y = layer(x, rows=every)
    late(on_gpu)
    return [y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), dy)]


def worst(got: list[Tensor], want: list[Tensor]) -> list[float]:
    """Of each the greatest error, relative to the greatest number; 0 of the same bits."""
    errors = []
    for a, b in zip(got, want, strict=True):
        error = float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30))
        errors.append(0.0 if a.equal(b) else error if error == error else float("inf"))
    return errors


def captured(layer: Any, shape: dict[str, int], rows: int, dy: Tensor) -> list[float]:
    """Replays of a graph beside calls."""
    x = drawn(1, rows, shape, "cuda").requires_grad_()
    given = (x, *layer.parameters())
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(2):
            torch.autograd.grad(layer(x, rows=shape["every"]), given, dy)
    torch.cuda.current_stream().wait_stream(beside)
    torch.cuda.synchronize()
    comm.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = layer(x, rows=shape["every"])
        grads = torch.autograd.grad(y, given, dy)
    errors = [0.0]
    for seed in range(2, 7):
        other = drawn(seed, rows, shape, "cuda")
        with torch.no_grad():
            x.copy_(other)
        late(True)
        graph.replay()
        got = [t.clone() for t in (y.detach(), *grads)]
        errors += worst(got, results(layer, other, dy, shape["every"], True))
    comm.barrier()
    return errors


def main() -> int:
    comm.init()
    rank, world = comm.rank(), comm.world_size()
    on_gpu = comm.empty(1).device.type == "cuda"
    device, bad = "cuda" if on_gpu else "cpu", 0
    random.seed(rank)
    scale = 16 if on_gpu else 1
    shape = {"features": 24 * scale, "hidden": 16 * scale, "every": (40 * world - 3) * scale}
    each = -(-shape["every"] // world)
    rows = max(0, min(each, shape["every"] - rank * each))
    for kind in KINDS:
        torch.manual_seed(3)
        like = {"device": device, "dtype": torch.bfloat16}
        layer: Any = tsnn.ExpertParallelMoE(shape["features"], shape["hidden"], 4 * world, 3, **like, **kind)
        dy = drawn(99, rows, shape, device)
        for chunks in (1, 2, 3, 8):
            errors = [0.0] * 5
            for seed in range(1, 5 if on_gpu else 2):
                x, found = drawn(seed, rows, shape, device), {}
                for n in (0, chunks):
                    layer.chunks = n
                    found[n] = results(layer, x, dy, shape["every"], on_gpu)
                errors = [max(pair) for pair in zip(errors, worst(found[chunks], found[0]), strict=True)]
            right = max(errors[:3]) == 0 and max(errors[3:]) < ROUNDED
            told = f"{kind} in {chunks} chunks: y, dx, d router {errors[:3]}, d weights {max(errors[3:]):.1e}"
            if on_gpu:
                again = max(captured(layer, shape, rows, dy))
                right &= again < ROUNDED
                told += f", replayed {again:.1e}"
            bad += not right
            if rank == 0 or not right:
                print(f"{'PASS' if right else 'FAIL'} rank {rank}: {told}", flush=True)
    comm.barrier()
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
