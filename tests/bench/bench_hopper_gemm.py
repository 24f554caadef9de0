"""``python -m tests.bench.bench_hopper_gemm``: the plain tile program's GEMM on a Hopper GPU beside torch.mm (cuBLAS).

Random bf16 data. Both are captured in CUDA graphs of several launches that walk through copies of their arguments, more than 100 MB in
all, so that the L2 cache holds none of the next launch's; graphs are replayed in turn, at least 30 times each, and timed by events. The
medians are compared; ratios are taken pair by pair.

Options: ``--shapes 8192,8192,8192 …`` (M,N,K), ``--tiles 128,256,64,4,256,0,0 …`` (BM,BN,BK,stages,threads,panel,blocks), ``--rounds 40``,
``--transposed`` (B as (N, K)), ``--float16``. The figures go to $OUT/hopper_gemm.json, or without OUT to tests/bench/results.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

SHAPES = ("8192,8192,8192", "4096,4096,4096", "8192,7168,8192")
TILES = ("128,256,64,4,256,0,0", "128,256,64,4,256,8,0", "128,256,64,4,256,16,0", "128,256,64,4,256,8,132", "128,256,64,4,256,16,132")
TRAFFIC = 128 << 20


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def captured(call: Any, sets: list[tuple[Any, ...]]) -> Any:
    """A graph that makes one call for each set of arguments."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for s in sets:
            call(*s)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for s in sets:
            call(*s)
    return graph


def measure(graphs: dict[str, Any], launches: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of one launch, for each graph and round; in every round the graphs run in another order."""
    import torch

    names = list(graphs)
    times: dict[str, list[float]] = {n: [] for n in names}
    for name in names * 3:
        graphs[name].replay()
    torch.cuda.synchronize()
    for r in range(rounds):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / 1e3 / launches)
    return times


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    cut = lambda q: ordered[min(len(ordered) - 1, int(q * len(ordered)))]  # noqa: E731
    return {"median": statistics.median(values), "p10": cut(0.1), "p90": cut(0.9), "least": ordered[0], "most": ordered[-1]}


def one(shape: tuple[int, ...], tiles: list[tuple[int, ...]], rounds: int, transposed: bool, dtype: str) -> dict[str, Any]:
    import torch

    import tilescale
    from tests.gpu.gemms import gemm

    M, N, K = shape
    kind = getattr(torch, dtype)
    bytes_each = 2 * (M * K + K * N + M * N)
    copies = max(2, -(-TRAFFIC // bytes_each))
    b_shape = (N, K) if transposed else (K, N)
    sets = [tuple(torch.randn(s, device="cuda").to(kind) for s in ((M, K), b_shape)) + (torch.empty(M, N, device="cuda", dtype=kind),) for _ in range(copies)]
    want = torch.mm(sets[0][0], sets[0][1].T if transposed else sets[0][1]).float()
    theirs = (lambda a, b, c: torch.mm(a, b.T, out=c)) if transposed else (lambda a, b, c: torch.mm(a, b, out=c))
    graphs, resources, errors = {"torch.mm": captured(theirs, sets)}, {}, {}
    for tile in tiles:
        name = "×".join(map(str, tile[:3])) + f" {tile[3]} stages {tile[4]} threads panel {tile[5]} blocks {tile[6]}"
        made = tilescale.compile(gemm(M, N, K, *tile[:5], dtype=dtype, trans_b=transposed, panel=tile[5], blocks=tile[6]), target="cuda")
        made(*sets[0])
        errors[name] = ((sets[0][2].float() - want).abs().max() / want.abs().max()).item()
        if errors[name] > 2e-2:
            raise SystemExit(f"{name} is wrong by {errors[name]} of the greatest value")
        resources[name] = {k: v for k, v in made.resources.items() if isinstance(v, (int, float, str))}
        graphs[name] = captured(made, sets)
    times = measure(graphs, copies, rounds)
    work = 2.0 * M * N * K
    out: dict[str, Any] = {"shape": [M, N, K], "copies": copies, "rounds": rounds, "kernels": {}}
    for name, seconds in times.items():
        found = spread(seconds)
        ratios = [t / o for t, o in zip(times["torch.mm"], seconds, strict=True)]
        out["kernels"][name] = {
            "us": {k: v * 1e6 for k, v in found.items()}, "tflops": work / found["median"] / 1e12, "ratio_to_torch": spread(ratios),
            "relative_error": errors.get(name, 0.0), "resources": resources.get(name, {}),
        }  # fmt: skip
        print(f"{M}×{N}×{K}  {name:58s} {found['median'] * 1e6:9.1f} µs  {work / found['median'] / 1e12:6.1f} TFLOP/s  "
              f"{statistics.median(ratios):.3f} × torch.mm  (p10 {spread(ratios)['p10']:.3f}, p90 {spread(ratios)['p90']:.3f})", flush=True)  # fmt: skip
    return out


def main(argv: list[str] | None = None) -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    made = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda, "dtype": dtype,
            "transposed_b": args.transposed, "command": sys.argv, "figures": found}  # fmt: skip
    folder = Path(os.environ.get("OUT") or Path(__file__).resolve().parent / "results")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hopper_gemm.json").write_text(json.dumps(made, indent=2, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
