"""``python -m tests.bench.bench_scatter_alone lead=8 run=16``: the kernels of GEMM + reduce-scatter and GEMM +
all-reduce on one GPU, as one of four ranks whose peers are all itself: it multiplies, stores, puts, awaits and
adds as many tiles as it does among four, without the links. Beside them the product alone, by cuBLAS and by
`ops.matmul`; graphs replayed in turn. Each word is a field of `gemm_scatter.Config` that a variant has
otherwise. Run it with ``TILESCALE_TARGET=cuda``.

A put to rank r comes back to this rank, so what an own tile's parts are is known: the tiles of the same number
of the other owners. The result is compared with that sum.
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
from tilescale import comm, ops
from tilescale.ops import host
from tilescale.ops.gemm_kernels import ceil_div
from tilescale.ops.ranks import gemm_reduce, gemm_scatter, gemms

WORLD = 4
#: M, N and K of all four ranks together
SHAPES = {
    "scatter": ((8192, 8192, 8192), (4096, 4096, 10752), (2048, 8192, 28672), (8192, 8192, 28672)),
    "reduce": ((8192, 8192, 8192), (2048, 8192, 28672)),
}


def scattering(how: Any, x: torch.Tensor, w: torch.Tensor) -> tuple[Callable[[], Any], torch.Tensor]:
    """A launch of GEMM + reduce-scatter, and its result."""
    (M, K), N = x.shape, w.shape[1]
    each = M // WORLD
    count = ceil_div(each, how.BM) * ceil_div(N, how.BN)
    shape = (WORLD - 1, count, *gemms.packed_of("a product", how, False))
    c, none = x.new_full((each, N), float("nan")), x.new_empty(1)
    parts, arrived = comm.empty(shape, x.dtype), comm.signals((count,))
    given = gemms.checked("a product", x, w, None, "", None, None)
    constants = gemms.constants(how, given, None, "", WORLD, M=M, K=K, align=1)
    args = (x, w, none, x.new_empty(shape), parts, arrived, c)
    return partial(host.launch, gemm_scatter.gemm_scatter, args, **constants), c


def reducing(how: Any, x: torch.Tensor, w: torch.Tensor) -> tuple[Callable[[], Any], torch.Tensor]:
    """A launch of GEMM + all-reduce, and its result."""
    (M, K), N = x.shape, w.shape[1]
    count = ceil_div(ceil_div(M, how.BM) * ceil_div(N, how.BN), WORLD)
    others, finished = (WORLD - 1, count), gemms.packed_shape(how.BM, how.BN, (1, 256))
    shape = (*others, *gemms.packed_of("a product", how, False))
    c, none = x.new_full((M, N), float("nan")), x.new_empty(1)
    parts, sums = comm.empty(shape, x.dtype), comm.empty((*others, *finished), x.dtype)
    given = gemms.checked("a product", x, w, None, "", None, None)
    constants = gemms.constants(how, given, None, "", WORLD, M=M, K=K, align=1)
    arrived, done = comm.signals((count,)), comm.signals(others)
    args = (x, w, none, x.new_empty(shape), parts, x.new_empty(1, count, *finished), sums, arrived, done, c)
    return partial(host.launch, gemm_reduce.gemm_reduce, args, **constants), c


def wanted(kind: str, how: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What comes back where every peer is this rank, of whole tiles."""
    if kind == "scatter":
        return x.float().view(WORLD, -1, x.shape[1]).sum(0) @ w.float()
    product = x.float() @ w.float()
    tall, across = product.shape[0] // how.BM, product.shape[1] // how.BN
    made = torch.empty_like(product)

    def place(tile: int) -> tuple[slice, slice]:
        first = tile // (across * how.panel) * how.panel
        height = min(tall - first, how.panel)
        i, j = first + (tile - first * across) % height, (tile - first * across) // height
        return slice(i * how.BM, (i + 1) * how.BM), slice(j * how.BN, (j + 1) * how.BN)

    for number in range(tall * across // WORLD):
        tiles = [place(number * WORLD + owner) for owner in range(WORLD)]
        total = sum(product[t] for t in tiles)
        for t in tiles:
            made[t] = total
    return made


def check(
    kind: str, how: Any, x: torch.Tensor, w: torch.Tensor, run: Callable[[], Any], c: torch.Tensor
) -> None:
    """Twice, over what is left: the second launch finds the first one's parts and flags."""
    want = wanted(kind, how, x, w)
    for _ in range(2):
        c.fill_(float("nan"))
        run()
        assert torch.allclose(c.float(), want, rtol=0.02, atol=0.04), (kind, how)


def one(kind: str, M: int, N: int, K: int, words: list[str]) -> dict[str, Any]:
    module, make = (gemm_scatter, scattering) if kind == "scatter" else (gemm_reduce, reducing)
    x = torch.randn(M, K // WORLD, device="cuda").bfloat16()
    w = (torch.randn(K // WORLD, N, device="cuda") * (K // WORLD) ** -0.5).bfloat16()
    out, mine = torch.mm(x, w), torch.empty(M, N, device="cuda", dtype=x.dtype)
    units = host.multiprocessors(x.device)
    picked = replace(module.choose(M, N, K // WORLD, WORLD, "bfloat16", units), fused=True)
    graphs = {"cuBLAS alone": captured([partial(torch.mm, x, w, out=out)] * 3)}
    ops.matmul(x, w, out=mine)
    graphs["matmul alone"] = captured([partial(ops.matmul, x, w, out=mine)] * 3)
    kept, found = [], {}
    for word in ("", *words):
        name, _, value = word.partition("=")
        how = replace(picked, **{name: int(value)}) if word else picked
        run, c = make(how, x, w)
        check(kind, how, x, w, run, c)
        graphs[word or "picked"] = captured([run] * 3)
        kept.append((run, c))
    times = measure(graphs, 3, 15)
    for name, taken in times.items():
        found[name] = {
            "us": 1e6 * spread(taken)["median"],
            "ratio": ratios(times["cuBLAS alone"], taken)["median"],
        }
        line = f"{kind:8s} {M} {N} {K} {name:14s} {found[name]['us']:8.1f} µs, {found[name]['ratio']:.3f}"
        print(line, flush=True)
    return {"kind": kind, "shape": [M, N, K], "picked": vars(picked), "variants": found}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*")
    words = parser.parse_args().words
    comm.init()
    cases = [one(kind, *shape, words) for kind, shapes in SHAPES.items() for shape in shapes]
    record("scatter_alone", {"cases": cases})
    return 0


if __name__ == "__main__":
    sys.exit(main())
