"""``python -m tests.bench.bench_hopper_gemm``: the plain tile program's GEMM on a Hopper GPU beside torch.mm
(cuBLAS).

Random bf16 data. Both are captured in CUDA graphs of several launches that walk through copies of their
arguments, more than 100 MB in all, so that the L2 cache holds none of the next launch's; graphs are replayed
in turn, at least 30 times each, and timed by events. The medians are compared; ratios are taken pair by pair
(tests/bench/gpu.py).

Options: ``--shapes 8192,8192,8192 …`` (M,N,K), ``--tiles 128,256,64,4,256,0,0 …``
(BM,BN,BK,stages,threads,panel, blocks, and a cluster's blocks along M where there are more; the default has
one tile on 256 threads and on 384, of which 256 compute: their times should be equal), ``--rounds 40``,
``--transposed`` (B as (N, K)), ``--float16``. The figures go to $OUT/hopper_gemm.json, or without OUT to
tests/bench/results.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from tests.bench.gpu import captured, copies, measure, over, ratios, spread
from tests.bench.record import record

SHAPES = ("8192,8192,8192", "4096,4096,4096", "8192,7168,8192")
TILES = (
    "128,256,64,4,256,0,0",
    "128,256,64,4,256,8,0",
    "128,256,64,4,384,8,0",
    "128,256,64,4,256,16,0",
    "128,256,64,4,256,8,132",
    "128,256,64,4,256,16,132",
)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def one(
    shape: tuple[int, ...], tiles: list[tuple[int, ...]], rounds: int, transposed: bool, dtype: str
) -> dict[str, Any]:
    import torch

    import tilescale
    from tests.gpu.gemms import gemm

    M, N, K = shape
    kind = getattr(torch, dtype)
    bytes_each = 2 * (M * K + K * N + M * N)
    count = copies(bytes_each)
    b_shape = (N, K) if transposed else (K, N)
    sets = [
        tuple(torch.randn(s, device="cuda").to(kind) for s in ((M, K), b_shape))
        + (torch.empty(M, N, device="cuda", dtype=kind),)
        for _ in range(count)
    ]
    want = torch.mm(sets[0][0], sets[0][1].T if transposed else sets[0][1]).float()
    theirs = (
        (lambda a, b, c: torch.mm(a, b.T, out=c)) if transposed else (lambda a, b, c: torch.mm(a, b, out=c))
    )
    graphs, resources, errors = {"torch.mm": captured(over(theirs, sets))}, {}, {}
    for tile in tiles:
        name = (
            "×".join(map(str, tile[:3]))
            + f" {tile[3]} stages {tile[4]} threads panel {tile[5]} blocks {tile[6]}"
        )
        rows = tile[7] if len(tile) > 7 else 1
        name += f" cluster {rows}" if rows > 1 else ""
        options = {"panel": tile[5], "blocks": tile[6], "cluster": rows if tile[6] else (1, rows)}
        made = tilescale.compile(
            gemm(M, N, K, *tile[:5], dtype=dtype, trans_b=transposed, **options), target="cuda"
        )
        made(*sets[0])
        errors[name] = ((sets[0][2].float() - want).abs().max() / want.abs().max()).item()
        if errors[name] > 2e-2:
            raise SystemExit(f"{name} is wrong by {errors[name]} of the greatest value")
        resources[name] = {k: v for k, v in made.resources.items() if isinstance(v, (int, float, str))}
        graphs[name] = captured(over(made, sets))
    times = measure(graphs, count, rounds)
    work = 2.0 * M * N * K
    out: dict[str, Any] = {"shape": [M, N, K], "copies": count, "rounds": rounds, "kernels": {}}
    for name, seconds in times.items():
        found = spread(seconds)
        ratio = ratios(times["torch.mm"], seconds)
        out["kernels"][name] = {
            "us": {k: v * 1e6 for k, v in found.items()},
            "tflops": work / found["median"] / 1e12,
            "ratio_to_torch": ratio,
            "relative_error": errors.get(name, 0.0),
            "resources": resources.get(name, {}),
        }
        print(
            f"{M}×{N}×{K}  {name:58s} {found['median'] * 1e6:9.1f} µs  {work / found['median'] / 1e12:6.1f} TFLOP/s  "
            f"{ratio['median']:.3f} × torch.mm  (p10 {ratio['p10']:.3f}, p90 {ratio['p90']:.3f})",
            flush=True,
        )
    return out


def main(argv: list[str] | None = None) -> int:
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--tiles", nargs="+", default=list(TILES))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--transposed", action="store_true")
    parser.add_argument("--float16", action="store_true")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    tiles = [numbers(t) for t in args.tiles]
    dtype = "float16" if args.float16 else "bfloat16"
    found = [one(numbers(s), tiles, args.rounds, args.transposed, dtype) for s in args.shapes]
    record("hopper_gemm", {"dtype": dtype, "transposed_b": args.transposed, "shapes": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
