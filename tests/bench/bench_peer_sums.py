"""``tilescale launch -n 2 -m tests.bench.bench_peer_sums``: tiles added to another rank's memory, by threads and
by TMA (``T.copy(…, dst=rank, op="add", prefer_instruction=…)``), beside the same tiles copied there. GB/s of what
crosses, for several dtypes and widths of a tile; each rank adds to the next one, so nobody else does."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import tilescale
import tilescale.language as T
from tests.bench.gpu import captured, measure, spread
from tests.bench.record import record
from tilescale import comm

#: elements of a rank's tensor, and the blocks that add them
SIZE, BLOCKS = 1 << 24, 132
HOW = ("copied", "by threads", "by TMA")


@tilescale.jit
def adding(rows: int, wide: int, dtype: str, how: str, tall: int = 128, threads: int = 256) -> Any:
    @T.prim_func
    def main(A: T.Tensor((rows, wide), dtype), total: T.SymmTensor((rows, wide), dtype)):
        with T.Kernel(BLOCKS, threads=threads) as b, T.Scale("device") as (rank, n):
            held = T.alloc_fragment((tall, 64), dtype)
            for i, j in T.Persistent((rows // tall, wide // 64), BLOCKS, b):
                T.copy(A[i * tall, j * 64], held)
                to = total[i * tall : (i + 1) * tall, j * 64 : (j + 1) * 64]
                if how == "copied":
                    T.copy(held, to, dst=(rank + 1) % n)
                elif how == "by TMA":
                    T.copy(held, to, dst=(rank + 1) % n, op="add", prefer_instruction="tma")
                else:
                    T.copy(held, to, dst=(rank + 1) % n, op="add")

    return main


def main() -> int:
    comm.init()
    cases = []
    for dtype in ("float32", "bfloat16", "float16"):
        for wide in (64, 4096):
            kind = getattr(torch, dtype)
            rows = SIZE // wide
            a, total = torch.ones(rows, wide, device="cuda", dtype=kind), comm.empty((rows, wide), dtype)
            graphs = {}
            for how in HOW:
                kernel = adding(rows, wide, dtype, how)
                total.fill_(1)
                kernel(a, total)
                assert bool((total == (1 if how == "copied" else 2)).all()), (dtype, wide, how)
                total.zero_()
                graphs[how] = captured([partial(kernel, a, total)] * 2)
            times = measure(graphs, 2, 12)
            found = {how: spread(times[how])["median"] for how in HOW}
            nbytes = SIZE * a.element_size()
            row = {"dtype": dtype, "wide": wide} | {how: nbytes / t / 1e9 for how, t in found.items()}
            cases.append(row)
            if comm.rank() == 0:
                print(dtype, wide, {how: f"{row[how]:.0f} GB/s" for how in HOW}, flush=True)
    if comm.rank() == 0:
        record("peer_sums", {"ranks": comm.world_size(), "cases": cases})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
