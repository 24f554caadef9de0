"""A few launches to be traced: docs/ag_gemm.svg, and of a layer of experts docs/moe_step.svg.

    tilescale trace -n 2 --target cuda --svg docs/ag_gemm.svg -m tests.gpu.look ag_gemm
    tilescale trace -n 2 --target cuda --svg docs/moe_step.svg --svg-launches 7 -m tests.gpu.look moe

Where ranks share a GPU by MPS, kernels have so few blocks that all that wait for each other fit on it, and
the layer is smaller.
"""

from __future__ import annotations

import dataclasses
import sys

import torch

from tests.bench.bench_moe_step import layer, tokens_of, weights_of
from tilescale import comm, ops
from tilescale.ops.ranks import gather_gemm
from tilescale.ops.ranks.groups import share

#: rows a rank, its columns, depth
PRODUCT = (2048, 4096, 4096)
MOE = {"tokens": 4096, "hidden": 7168, "experts": 64, "inner": 2048, "topk": 8}
SMALL_MOE = {"tokens": 2048, "hidden": 4096, "experts": 32, "inner": 1024, "topk": 4}
#: launches; blocks of a rank that wait where a GPU is shared, of experts and of products
TIMES, FEW, HALF = 4, 32, 66


def alone() -> bool:
    """Whether each rank has a GPU of its own."""
    return torch.cuda.device_count() >= comm.world_size()


def ag_gemm() -> None:
    rows, N, K = PRODUCT
    world = comm.world_size()
    x = torch.randn(rows, K, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(K, N, device="cuda", dtype=torch.bfloat16) * K**-0.5
    chosen = gather_gemm.choose(rows * world, N, K, world, "bfloat16")
    config = dataclasses.replace(chosen, fused=True, blocks=chosen.blocks if alone() else HALF)
    for _ in range(TIMES):
        ops.all_gather_matmul(x, w, config=config)


def moe() -> None:
    shape, blocks = (MOE, None) if alone() else (SMALL_MOE, FEW)
    local = share(shape["experts"], comm.world_size())
    up, down = weights_of({**shape, "experts": local}, 7 + comm.rank())
    for k in range(TIMES):
        layer(*tokens_of(shape, comm.rank(), k), up, down, shape, blocks)


def main() -> int:
    comm.init()
    {"ag_gemm": ag_gemm, "moe": moe}[sys.argv[1]]()
    torch.cuda.synchronize()
    comm.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
