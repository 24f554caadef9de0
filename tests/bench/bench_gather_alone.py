"""``TILESCALE_TARGET=cuda python -m tests.bench.bench_gather_alone wide=256 high=128``: AG-GEMM's kernels on one
GPU, as the only rank.

By puts: all rows are put by the kernel's own communicators into its own memory, as many bytes as they put where
there are several GPUs, without the links. By pulls: as one of four ranks, whose others are itself: three
quarters of the rows are read and written where they lie. Beside them the product alone, by cuBLAS; graphs
replayed in turn. Each word is a field of `gather_gemm.Config` that a variant of both has otherwise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tests.bench.gpu import captured, measure, ratios, spread
from tests.bench.record import record
from tilescale import comm
from tilescale.ops import host
from tilescale.ops.ranks import gather_gemm, gemms

#: M, N of a rank and K of the products of four ranks. With eight rows less there are no whole tiles of them, and
#: the own ones are put, too
SHAPES = ((8192, 2560, 8192), (4096, 5504, 4096), (512, 14336, 8192))
FEWER = 8


def gathering(how: Any, x: Any, w: Any) -> tuple[Callable[[], Any], Any]:
    """A launch of the kernel as the only rank, and its result."""
    (M, K), N, world = x.shape, w.shape[1], 4 if how.pull else 1
    everyone, here = comm.empty((M, K), torch.bfloat16), comm.signals((-(-M // how.BM), how.groups))
    c, none = x.new_full((M, N), float("nan")), x.new_empty(1)
    everyone.copy_(x) if how.pull else everyone.fill_(float("nan"))
    given = gemms.checked("a product", x, w, None, "", c, None)
    constants = gemms.constants(how, given, None, "", world, M=M, K=K)
    if constants.pop("pull"):
        return partial(host.launch, gather_gemm.pull_gemm, (everyone, w, none, here, c), **constants), c
    return partial(host.launch, gather_gemm.gather_gemm, (x, everyone, w, none, here, c), **constants), c


def one(M: int, N: int, K: int, words: list[str]) -> dict[str, Any]:
    x = torch.randn(M, K, device="cuda").bfloat16()
    w = (torch.randn(K, N, device="cuda") * K**-0.5).bfloat16()
    out, picked = torch.mm(x, w), gather_gemm.choose(M, N, K, 4, "bfloat16", host.multiprocessors(x.device))
    graphs, kept = {"cuBLAS alone": captured([partial(torch.mm, x, w, out=out)] * 3)}, []
    for pull in (True, False):
        for word in ("", *words):
            name, _, value = word.partition("=")
            how = replace(picked, pull=pull, **({name: int(value)} if word else {}))
            rows = x if pull else x[: M - FEWER]
            run, c = gathering(how, rows, w)
            run()
            assert torch.allclose(c.float(), rows.float() @ w.float(), rtol=0.02, atol=0.02), (pull, word)
            graphs[f"{'pulls' if pull else 'puts'} {word}".strip()] = captured([run] * 3)
            kept.append(run)
    times = measure(graphs, 3, 15)
    found = {}
    for name, taken in times.items():
        found[name] = {
            "us": 1e6 * spread(taken)["median"],
            "ratio": ratios(times["cuBLAS alone"], taken)["median"],
        }
        print(f"{M} {N} {K} {name:14s} {found[name]['us']:8.1f} µs, {found[name]['ratio']:.3f}", flush=True)
    return {"shape": [M, N, K], "variants": found}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*")
    words = parser.parse_args().words
    comm.init()
    record("gather_alone", {"cases": [one(*shape, words) for shape in SHAPES]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
