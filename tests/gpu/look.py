"""A few launches to be traced, of two ranks that share a GPU by MPS: blocks that wait for each other fit on it
together. docs/ag_gemm.svg is made so; of a layer of experts the second:

    tilescale trace -n 2 --target cuda --svg docs/ag_gemm.svg -m tests.gpu.look ag_gemm
    tilescale trace -n 2 --target cuda --svg moe_step.svg --svg-launches 7 -m tests.gpu.look moe
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
MOE = {"tokens": 2048, "hidden": 4096, "experts": 32, "inner": 1024, "topk": 4}
#: launches; blocks of a rank that wait, of experts and of products
TIMES, FEW, HALF = 4, 32, 66


def ag_gemm() -> None:
    rows, N, K = PRODUCT
    world = comm.world_size()
    x = torch.randn(rows, K, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(K, N, device="cuda", dtype=torch.bfloat16) * K**-0.5
    chosen = gather_gemm.choose(rows * world, N, K, world, "bfloat16")
    config = dataclasses.replace(chosen, fused=True, blocks=HALF)
    for _ in range(TIMES):
        ops.all_gather_matmul(x, w, config=config)


def moe() -> None:
    local = share(MOE["experts"], comm.world_size())
    up, down = weights_of({**MOE, "experts": local}, 7 + comm.rank())
    for k in range(TIMES):
        layer(*tokens_of(MOE, comm.rank(), k), up, down, MOE, FEW)


def main() -> int:
    comm.init()
    {"ag_gemm": ag_gemm, "moe": moe}[sys.argv[1]]()
    torch.cuda.synchronize()
    comm.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
