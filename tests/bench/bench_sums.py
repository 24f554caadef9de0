"""``python -m tests.bench.bench_sums``: tiles that many blocks add to one tensor, in vectors and element by
element.

Eight blocks add each a tile of a 2048² tensor. Both kernels are of the same program; the second has vectors
left out (gpu/vectors.py). Writes tests/bench/results/sums.json.
"""

from __future__ import annotations

from typing import Any

import tilescale
import tilescale.language as T
from tests.bench.gpu import captured, measure, ratios, spread
from tests.bench.record import record

SIDE, BLOCKS = 2048, 8


def sums(dtype: str, number: int) -> Any:
    """``number`` tells kernels apart that differ in how they are compiled."""

    @T.prim_func
    def kernel(C: T.Tensor((SIDE, SIDE), dtype)):
        with T.Kernel(SIDE // 128, SIDE // 64, BLOCKS, threads=128) as (bx, by, _):
            f = T.alloc_fragment((64, 128), dtype)
            T.fill(f, number)
            T.atomic_add(C[by * 64, bx * 128], f)

    return kernel


def main() -> None:
    import torch

    from tilescale.compiler.gpu import vectors

    own, out = vectors._added_at_once, {}
    for dtype in ("float32", "float16", "bfloat16"):
        made = {}
        for name, number in (("vectors", 1), ("one by one", 2)):
            vectors._added_at_once = own if number == 1 else lambda cx, place, a: 1
            made[name] = tilescale.compile(sums(dtype, number), target="cuda")
            assert ("red_add" in made[name].get_kernel_source()) == (number == 1)
        vectors._added_at_once = own
        tensors = [torch.zeros(SIDE, SIDE, dtype=getattr(torch, dtype), device="cuda") for _ in range(8)]
        graphs = {name: captured([lambda k=k, c=c: k(c) for c in tensors]) for name, k in made.items()}
        times = measure(graphs, len(tensors))
        added = BLOCKS * tensors[0].numel() * tensors[0].element_size()
        out[dtype] = {
            "seconds": {name: spread(t) for name, t in times.items()},
            "ratio": ratios(times["one by one"], times["vectors"]),
            "bytes_a_second": added / spread(times["vectors"])["median"],
        }
        print(
            f"{dtype:10} {out[dtype]['ratio']['median']:6.2f} ×, {out[dtype]['bytes_a_second'] / 1e9:.0f} GB/s added",
            flush=True,
        )
    record("sums", out)


if __name__ == "__main__":
    main()
