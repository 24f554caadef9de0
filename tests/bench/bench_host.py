"""What the host does in a call of an operation of several ranks, and in a step of layers: kernels are left
out.

    make bench ARGS="-k host"

Two ranks, processes of this machine. A launch is nothing here, so no rank waits for another one; all in front
of it is as it is: groups, checks, choices, workspaces, results. Products are large enough for one kernel with
their collective; those "apart" and those of layers are small. What torch computes in a step of layers is in its
figure.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.bench.bench_layers import SMALL_LLAMA, Block
from tests.bench.record import record
from tests.ranks.harness import run_ranks
from tilescale import comm, launching, ops
from tilescale import nn as tsnn

WORLD = 2
#: microseconds of a call that the operations are to stay below
BAR = 25


def operations(group: Any) -> dict[str, Callable[[], Any]]:
    """Calls of operations by name."""
    x, w = torch.zeros(512, 1024, dtype=torch.bfloat16), torch.zeros(1024, 256, dtype=torch.bfloat16)
    whole = torch.zeros(1024, 1024, dtype=torch.bfloat16)
    small, smaller = x[:24, :64].contiguous(), w[:64, :32].contiguous()
    few, many = torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(1 << 16, 4, dtype=torch.bfloat16)
    out = torch.zeros(1024, 256, dtype=torch.bfloat16)
    g = {"group": group}
    tokens = torch.zeros(40, 64, dtype=torch.bfloat16)
    chosen = torch.tensor([[0, 7]]).repeat(40, 1)
    sent = ops.moe_dispatch(tokens, chosen, num_experts=8, slot=1, **g)
    rows = torch.zeros(len(sent.index), 64, dtype=torch.bfloat16)
    weight, turned = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(48, 16 * 8, dtype=torch.bfloat16)
    q, sums = torch.zeros(2, 4, 24, 8, dtype=torch.bfloat16), torch.zeros(2, 4, 24)
    return {
        "all_gather_matmul": lambda: ops.all_gather_matmul(x, w, **g),
        "all_gather_matmul, out=": lambda: ops.all_gather_matmul(x, w, out=out, **g),
        "all_gather_matmul, apart": lambda: ops.all_gather_matmul(small, smaller, **g),
        "matmul_reduce_scatter": lambda: ops.matmul_reduce_scatter(whole, w, **g),
        "matmul_reduce_scatter, apart": lambda: ops.matmul_reduce_scatter(small, smaller, **g),
        "matmul_all_reduce": lambda: ops.matmul_all_reduce(whole, w, **g),
        "matmul_all_reduce, apart": lambda: ops.matmul_all_reduce(small, smaller, **g),
        "all_gather, packets": lambda: ops.all_gather(few, **g),
        "all_gather": lambda: ops.all_gather(many, how="kernel", **g),
        "reduce_scatter, packets": lambda: ops.reduce_scatter(few, **g),
        "reduce_scatter": lambda: ops.reduce_scatter(many, how="kernel", **g),
        "all_reduce, packets": lambda: ops.all_reduce(few, **g),
        "all_reduce": lambda: ops.all_reduce(many, how="two_shot", **g),
        "moe_combine": lambda: ops.moe_combine(rows, sent),
        "moe_dispatch": lambda: ops.moe_dispatch(tokens, chosen, num_experts=8, **g),
        "rms_norm": lambda: ops.rms_norm(few, weight),
        "rms_norm_backward": lambda: ops.rms_norm_backward(few, few, weight),
        "gated_activation": lambda: ops.gated_activation(few),
        "rotary_heads": lambda: ops.rotary_heads(turned, heads=8, kv_heads=4),
        "flash_attention": lambda: ops.flash_attention(q, q, q, causal=True),
        "attention_gradients": lambda: ops.attention_gradients(q, q, q, q, q, sums, causal=True),
        "matmul": lambda: ops.matmul(few, smaller),
        "torch.mm": lambda: torch.mm(few, smaller),
    }


def layers(group: Any) -> dict[str, Callable[[], Any]]:
    """Forward, and forward and backward, of layers by name."""
    like: dict[str, Any] = {"dtype": torch.bfloat16}
    how = {"group": group, **like}
    rows = SMALL_LLAMA["tokens"] // WORLD
    made = {
        "ColumnParallelLinear": (tsnn.ColumnParallelLinear(64, 192, False, **how), 64),
        "RowParallelLinear": (tsnn.RowParallelLinear(192, 64, False, **how), 96),
        "ParallelMLP": (tsnn.ParallelMLP(64, 192, **how), 64),
        "Block": (Block(SMALL_LLAMA, group, like), 64),
    }
    found: dict[str, Callable[[], Any]] = {}
    for name, (module, wide) in made.items():
        x = torch.zeros(SMALL_LLAMA["tokens"] if wide == 96 else rows, wide, **like)

        def forward(module: Any = module, x: torch.Tensor = x.clone()) -> None:
            with torch.no_grad():
                module(x)

        def step(module: Any = module, x: torch.Tensor = x.clone(), dy: list[Any] = []) -> None:  # noqa: B006
            x.requires_grad_(True)
            y = module(x)
            if not dy:
                dy.append(torch.zeros_like(y))
            y.backward(dy[0])
            x.grad = None

        found |= {f"{name}, forward": forward, f"{name}, step": step}
    return found


def on_rank(address: int, only: str, profiled: bool) -> dict[str, float]:
    comm.init()
    where = f"tcp://127.0.0.1:{address}"
    dist.init_process_group("gloo", init_method=where, rank=comm.rank(), world_size=comm.world_size())
    launching.Launchable.__call__ = lambda self, *args, **kwargs: None  # type: ignore[method-assign]
    torch.set_num_threads(1)
    mesh = dist.init_device_mesh("cpu", (comm.world_size(),), mesh_dim_names=("tp",))["tp"]
    group = mesh.get_group()
    calls = {n: call for n, call in {**operations(group), **layers(mesh)}.items() if only in n}
    for call in calls.values():
        for _ in range(3):
            call()
    found = {}
    if comm.rank() == 0:  # the other one waits meanwhile, without a core
        for name, call in calls.items():
            if profiled:
                profile(name, call)
            found[name] = processor_time(call)
    dist.barrier()
    dist.destroy_process_group()
    return found


def processor_time(call: Callable[[], Any], rounds: int = 9) -> float:
    """Microseconds that the processor works for a call, the least of rounds: machines are shared."""
    samples = []
    for _ in range(rounds):
        number, begin = 0, time.process_time()
        while number < 50 or time.process_time() - begin < 0.05:
            call()
            number += 1
        samples.append((time.process_time() - begin) / number * 1e6)
    return min(samples)


def profile(name: str, call: Callable[[], Any], number: int = 2000) -> None:
    """Prints where the time goes."""
    import cProfile
    import pstats

    seen = cProfile.Profile()
    seen.enable()
    for _ in range(number):
        call()
    seen.disable()
    print(f"---- {name}, {number} calls", flush=True)
    pstats.Stats(seen).sort_stats("tottime").print_stats(45)


def measure(only: str = "", profiled: bool = False) -> dict[str, float]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = int(s.getsockname()[1])
    ranks = run_ranks(WORLD, on_rank, address, only, profiled, timeout=600)
    return {name: round(us, 1) for name, us in ranks[0].items()}


def test_host() -> None:
    figures = measure()
    record("host", {"us": figures, "bar_us": BAR})
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    begun = time.perf_counter()
    print(json.dumps(measure(*sys.argv[1:2], profiled="profile" in sys.argv), indent=2))
    print(f"{time.perf_counter() - begun:.0f} s")
