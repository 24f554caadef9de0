"""``python -m tests.bench.bench_cost_model``: predicted times of GEMM configurations beside measured ones.

With ``--measure`` (on a Hopper GPU): each configuration's kernel as a CUDA graph that walks through copies of its arguments, as in
bench_hopper_gemm; results/gemm_configs.json gets the medians. Without: the predictions for what that file holds, and for every shape the rank
correlation (Kendall's tau-b, Spearman's rho), where the fastest configuration stands in the predicted order, and how much slower the best
of the predicted ten is than it; results/cost_model.json.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

SHAPES = ((4096, 4096, 4096), (8192, 7168, 8192), (256, 8192, 8192))
#: BM, BN, BK, stages, threads, panel, blocks
CONFIGS = (
    (128, 256, 64, 4, 256, 0, 0), (128, 256, 64, 4, 256, 8, 0), (128, 256, 64, 3, 256, 8, 0), (128, 256, 64, 2, 256, 8, 0),
    (128, 256, 32, 4, 256, 8, 0), (256, 128, 64, 4, 256, 8, 0), (256, 128, 64, 3, 256, 0, 0), (128, 128, 64, 4, 256, 0, 0),
    (128, 128, 64, 4, 256, 8, 0), (128, 128, 64, 6, 256, 8, 0), (128, 128, 64, 2, 256, 8, 0), (128, 128, 128, 3, 256, 8, 0),
    (128, 128, 64, 4, 128, 8, 0), (64, 256, 64, 4, 128, 8, 0), (64, 256, 64, 4, 256, 8, 0), (64, 128, 64, 4, 128, 8, 0),
    (64, 128, 64, 6, 128, 0, 0), (128, 64, 64, 4, 128, 8, 0), (128, 64, 64, 4, 256, 8, 0), (64, 64, 64, 4, 128, 8, 0),
    (64, 64, 128, 4, 128, 0, 0), (64, 64, 64, 2, 128, 8, 0), (256, 64, 64, 4, 256, 8, 0), (128, 192, 64, 4, 256, 8, 0),
    (192, 128, 64, 4, 384, 8, 0), (128, 256, 64, 4, 256, 8, 132), (128, 128, 64, 5, 256, 8, 132), (64, 256, 64, 4, 128, 8, 132),
)  # fmt: skip
RESULTS = Path(__file__).resolve().parent / "results"


def name_of(config: tuple[int, ...]) -> str:
    return "×".join(map(str, config[:3])) + " {3} stages {4} threads panel {5} blocks {6}".format(*config)


def compiled(job: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
    """Puts a kernel into the disk cache; why it could not be, else nothing."""
    import tilescale
    from tests.gpu.gemms import gemm
    from tilescale.errors import TileError

    shape, config = job
    try:
        tilescale.compile(gemm(*shape, *config[:5], panel=config[5], blocks=config[6]), target="cuda:sm_90a")
    except TileError as error:
        return error.message.splitlines()[0]
    return ""


def measured(shape: tuple[int, ...], configs: list[tuple[int, ...]], rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds and registers of each configuration that works, by name."""
    import torch

    import tilescale
    from tests.bench.bench_hopper_gemm import TRAFFIC, captured, measure, spread
    from tests.gpu.gemms import gemm

    M, N, K = shape
    copies = max(2, -(-TRAFFIC // (2 * (M * K + K * N + M * N))))
    sets = [tuple(torch.randn(s, device="cuda").bfloat16() for s in ((M, K), (K, N))) + (torch.empty(M, N, device="cuda").bfloat16(),)
            for _ in range(copies)]  # fmt: skip
    want, graphs, kernels = torch.mm(*sets[0][:2]).float(), {"torch.mm": captured(lambda a, b, c: torch.mm(a, b, out=c), sets)}, {}
    for config in configs:
        made = tilescale.compile(gemm(M, N, K, *config[:5], panel=config[5], blocks=config[6]), target="cuda")
        sets[0][2].fill_(float("nan"))
        made(*sets[0])
        error = ((sets[0][2].float() - want).abs().max() / want.abs().max()).item()
        if not error < 2e-2:
            print(f"{shape} {name_of(config)} is wrong by {error}", flush=True)
            continue
        graphs[name_of(config)], kernels[name_of(config)] = captured(made, sets), made
    out = {}
    for name, seconds in measure(graphs, copies, rounds).items():
        found = spread(seconds)
        out[name] = {"us": found["median"] * 1e6, "p10": found["p10"] * 1e6, "p90": found["p90"] * 1e6}
        if name in kernels:
            out[name]["registers"], out[name]["spills"] = (kernels[name].resources.get(k, -1) for k in ("registers", "spill_stores"))
    return out


def measure_all(rounds: int, seconds: float) -> None:
    import torch

    start, figures = time.perf_counter(), []
    jobs = list(itertools.product(SHAPES, CONFIGS))
    with concurrent.futures.ProcessPoolExecutor(min(14, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        refused = dict(zip(jobs, pool.map(compiled, jobs), strict=True))
    print(f"compiled {len(jobs)} kernels in {time.perf_counter() - start:.1f} s", flush=True)
    for shape in SHAPES:
        if time.perf_counter() - start > seconds:
            break
        configs = [c for c in CONFIGS if not refused[shape, c]]
        figures.append({"shape": shape, "refused": {name_of(c): refused[shape, c] for c in CONFIGS if refused[shape, c]},
                        "kernels": measured(shape, configs, rounds)})  # fmt: skip
        best = sorted(figures[-1]["kernels"].items(), key=lambda item: item[1]["us"])
        print(shape, *(f"{name}: {f['us']:.1f}" for name, f in best[:6]), sep="\n  ", flush=True)
        made = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rounds": rounds, "command": sys.argv, "figures": figures}
        folder = Path(os.environ.get("OUT") or RESULTS)
        (folder / "gemm_configs.json").write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args(argv)
    if args.measure:
        measure_all(args.rounds, args.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
