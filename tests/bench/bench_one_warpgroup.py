"""``python -m tests.bench.bench_one_warpgroup``: what `release_late` gains in blocks of one warpgroup, as in
TileLang's first example, by tiles and stages. It fires from four stages on; the kernel without it has the same
source, and cuBLAS stands beside both. Graphs are replayed in turn.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import torch

import tilescale
from tests.bench.gpu import captured, measure, ratios, spread
from tests.bench.record import record
from tests.gpu.gemms import gemm
from tilescale.env import WITHOUT

TILES = ((128, 128), (128, 64), (64, 128), (64, 256), (64, 64))


def one(n: int, BM: int, BN: int, stages: int) -> dict[str, Any]:
    a, b, c = (torch.randn(n, n, device="cuda").half() for _ in range(3))
    graphs, kept = {"cuBLAS": captured([partial(torch.mm, a, b, out=c)] * 4)}, []
    options = {"BM": BM, "BN": BN, "BK": 64, "stages": stages, "threads": 128, "dtype": "float16"}
    for name, without in (("with", ""), ("without", "release_late")):
        os.environ[WITHOUT.name] = without
        kept.append(tilescale.compile(gemm(n, n, n, **options), target="cuda"))
        os.environ.pop(WITHOUT.name)
        graphs[name] = captured([partial(kept[-1], a, b, c)] * 4)
    times = measure(graphs, 4, 11)
    found = {name: 1e6 * spread(taken)["median"] for name, taken in times.items()}
    gain = ratios(times["without"], times["with"])["median"]
    print(f"{n}³ {BM} × {BN} × 64, {stages} stages: {found}, gain {gain:.3f}", flush=True)
    return {"n": n, "tile": [BM, BN, 64], "stages": stages, "us": found, "gain": gain}


def main() -> int:
    fits = [(BM, BN, s) for BM, BN in TILES for s in (2, 3, 4, 5) if s * (BM + BN) * 128 < 200_000]
    record("one_warpgroup", {"cases": [one(n, *case) for n in (4096, 8192) for case in fits]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
