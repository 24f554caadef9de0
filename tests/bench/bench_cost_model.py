"""``python -m tests.bench.bench_cost_model``: predicted times of GEMM configurations beside measured ones.

With ``--measure`` (on a Hopper GPU): each configuration's kernel as a CUDA graph that walks through copies of
its arguments, as in bench_hopper_gemm; gemm_configs.json gets the medians, or, with ``--held-out``,
gemm_configs_held_out.json those of other shapes and configurations, to which the model was not fitted.
Without: the predictions for what these files hold, and for every shape the rank correlation (Kendall's tau-b,
Spearman's rho), where the fastest configuration stands in the predicted order, and how much slower the best
of the predicted ten is than it; results/cost_model.json.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from tests.bench.record import record, script

SHAPES = ((4096, 4096, 4096), (8192, 7168, 8192), (256, 8192, 8192))
#: BM, BN, BK, stages, threads, panel, blocks
CONFIGS = (
    (128, 256, 64, 4, 256, 0, 0),
    (128, 256, 64, 4, 256, 8, 0),
    (128, 256, 64, 3, 256, 8, 0),
    (128, 256, 64, 2, 256, 8, 0),
    (128, 256, 32, 4, 256, 8, 0),
    (256, 128, 64, 4, 256, 8, 0),
    (256, 128, 64, 3, 256, 0, 0),
    (128, 128, 64, 4, 256, 0, 0),
    (128, 128, 64, 4, 256, 8, 0),
    (128, 128, 64, 6, 256, 8, 0),
    (128, 128, 64, 2, 256, 8, 0),
    (128, 128, 128, 3, 256, 8, 0),
    (128, 128, 64, 4, 128, 8, 0),
    (64, 256, 64, 4, 128, 8, 0),
    (64, 256, 64, 4, 256, 8, 0),
    (64, 128, 64, 4, 128, 8, 0),
    (64, 128, 64, 6, 128, 0, 0),
    (128, 64, 64, 4, 128, 8, 0),
    (128, 64, 64, 4, 256, 8, 0),
    (64, 64, 64, 4, 128, 8, 0),
    (64, 64, 128, 4, 128, 0, 0),
    (64, 64, 64, 2, 128, 8, 0),
    (256, 64, 64, 4, 256, 8, 0),
    (128, 192, 64, 4, 256, 8, 0),
    (192, 128, 64, 4, 384, 8, 0),
    (128, 256, 64, 4, 256, 8, 132),
    (128, 128, 64, 5, 256, 8, 132),
    (64, 256, 64, 4, 128, 8, 132),
)
HELD_OUT = ((2048, 2048, 8192), (4096, 22016, 4096), (6000, 5000, 3000))
HELD_OUT_CONFIGS = (
    (128, 256, 64, 4, 256, 4, 0),
    (128, 256, 64, 4, 256, 16, 0),
    (128, 256, 128, 2, 256, 8, 0),
    (128, 256, 64, 4, 256, 4, 132),
    (256, 128, 64, 4, 256, 8, 132),
    (256, 128, 32, 6, 256, 4, 0),
    (128, 192, 64, 5, 256, 16, 0),
    (128, 192, 64, 5, 256, 8, 132),
    (128, 160, 64, 4, 256, 8, 0),
    (192, 128, 64, 5, 384, 8, 0),
    (128, 128, 64, 5, 256, 4, 0),
    (128, 128, 64, 3, 256, 8, 0),
    (128, 128, 128, 3, 256, 8, 132),
    (128, 128, 64, 3, 128, 8, 0),
    (128, 96, 64, 5, 256, 8, 0),
    (64, 256, 64, 5, 128, 0, 0),
    (64, 256, 64, 3, 128, 8, 132),
    (64, 192, 64, 4, 128, 8, 0),
    (64, 128, 64, 3, 128, 8, 0),
    (64, 128, 128, 3, 128, 4, 132),
    (64, 96, 64, 4, 128, 8, 0),
    (128, 64, 128, 3, 128, 8, 0),
    (64, 64, 64, 6, 128, 8, 132),
    (256, 64, 64, 3, 256, 8, 0),
    (256, 96, 64, 4, 256, 8, 0),
    (64, 64, 128, 2, 128, 8, 0),
)
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


def measured(
    shape: tuple[int, ...], configs: list[tuple[int, ...]], rounds: int
) -> dict[str, dict[str, float]]:
    """Microseconds and registers of each configuration that works, by name."""
    import torch

    import tilescale
    from tests.bench.gpu import captured, copies, measure, over, spread
    from tests.gpu.gemms import gemm

    M, N, K = shape
    count = copies(2 * (M * K + K * N + M * N))
    sets = [
        tuple(torch.randn(s, device="cuda").bfloat16() for s in ((M, K), (K, N)))
        + (torch.empty(M, N, device="cuda").bfloat16(),)
        for _ in range(count)
    ]
    want, kernels = torch.mm(*sets[0][:2]).float(), {}
    graphs = {"torch.mm": captured(over(lambda a, b, c: torch.mm(a, b, out=c), sets))}
    for config in configs:
        made = tilescale.compile(gemm(M, N, K, *config[:5], panel=config[5], blocks=config[6]), target="cuda")
        sets[0][2].fill_(float("nan"))
        made(*sets[0])
        error = ((sets[0][2].float() - want).abs().max() / want.abs().max()).item()
        if not error < 2e-2:
            print(f"{shape} {name_of(config)} is wrong by {error}", flush=True)
            continue
        graphs[name_of(config)], kernels[name_of(config)] = captured(over(made, sets)), made
    out = {}
    for name, seconds in measure(graphs, count, rounds).items():
        found = spread(seconds)
        out[name] = {"us": found["median"] * 1e6, "p10": found["p10"] * 1e6, "p90": found["p90"] * 1e6}
        if name in kernels:
            out[name]["registers"], out[name]["spills"] = (
                kernels[name].resources.get(k, -1) for k in ("registers", "spill_stores")
            )
    return out


def measure_all(rounds: int, seconds: float, held_out: bool) -> None:
    import torch

    start, figures = time.perf_counter(), []
    shapes, every = (HELD_OUT, HELD_OUT_CONFIGS) if held_out else (SHAPES, CONFIGS)
    jobs = list(itertools.product(shapes, every))
    with concurrent.futures.ProcessPoolExecutor(
        min(14, os.cpu_count() or 1), multiprocessing.get_context("spawn")
    ) as pool:
        refused = dict(zip(jobs, pool.map(compiled, jobs), strict=True))
    print(f"compiled {len(jobs)} kernels in {time.perf_counter() - start:.1f} s", flush=True)
    for shape in shapes:
        if time.perf_counter() - start > seconds:
            break
        configs = [c for c in every if not refused[shape, c]]
        figures.append(
            {
                "shape": shape,
                "refused": {name_of(c): refused[shape, c] for c in every if refused[shape, c]},
                "kernels": measured(shape, configs, rounds),
            }
        )
        best = sorted(figures[-1]["kernels"].items(), key=lambda item: item[1]["us"])
        print(shape, *(f"{name}: {f['us']:.1f}" for name, f in best[:6]), sep="\n  ", flush=True)
        made = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rounds": rounds}
        made |= {"command": [script(), *sys.argv[1:]], "figures": figures}
        folder = Path(os.environ.get("OUT") or RESULTS)
        (folder / f"gemm_configs{'_held_out' * held_out}.json").write_text(
            json.dumps(made, indent=1, ensure_ascii=False) + "\n"
        )


def config_of(name: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", name)))


def kendall(a: Any, b: Any) -> float:
    """Kendall's tau-b: 1 where both orders agree, 0 where they have nothing in common; pairs that either
    holds for equal count half."""
    import numpy as np

    x, y = (np.sign(np.subtract.outer(v, v)) for v in (np.asarray(a, float), np.asarray(b, float)))
    return float((x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum()))


def spearman(a: Any, b: Any) -> float:
    import numpy as np

    ranks = [
        np.array([(np.asarray(v) < w).sum() + ((np.asarray(v) == w).sum() - 1) / 2 for w in v])
        for v in (a, b)
    ]
    return float(np.corrcoef(ranks)[0, 1])


def predicted(shape: tuple[int, ...], names: list[str]) -> list[float]:
    """Microseconds that the cost model says."""
    from tests.gpu.gemms import gemm
    from tilescale.compiler import cost

    machine = cost.machine_of("sm_90a")
    assert machine is not None
    out = []
    for config in map(config_of, names):
        program = gemm(*shape, *config[:5], panel=config[5], blocks=config[6]).trace()
        out.append(cost.predict(cost.count(program, neighbours=machine.sms), machine, "sm_90a").seconds * 1e6)
    return out


def compare(held: dict[str, Any]) -> list[dict[str, Any]]:
    """For each shape of gemm_configs.json how the predicted order agrees with the measured one."""
    import numpy as np

    out = []
    for figure in held["figures"]:
        names = [n for n in figure["kernels"] if n != "torch.mm"]
        start = time.perf_counter()
        guess = predicted(tuple(figure["shape"]), names)
        seconds = time.perf_counter() - start
        real = [figure["kernels"][n]["us"] for n in names]
        order = sorted(range(len(names)), key=lambda k: guess[k])
        best = min(range(len(names)), key=lambda k: real[k])
        out.append(
            {
                "shape": figure["shape"],
                "configurations": len(names),
                "kendall_tau_b": kendall(real, guess),
                "spearman_rho": spearman(real, guess),
                "best_is_predicted_at_place": order.index(best) + 1,
                "first_predicted_over_best": real[order[0]] / real[best],
                "best_of_predicted_ten_over_best": min(real[k] for k in order[:10]) / real[best],
                "rms_log_error": float(np.sqrt(np.mean(np.log(np.array(guess) / np.array(real)) ** 2))),
                "milliseconds_a_configuration": seconds / len(names) * 1e3,
                "microseconds": {names[k]: {"predicted": guess[k], "measured": real[k]} for k in order},
            }
        )
    return out


def elsewhere(held: dict[str, Any]) -> list[dict[str, Any]]:
    """Kernels and shapes that the model was not fitted to: predicted beside measured microseconds."""
    from tilescale.compiler import cost
    from tilescale.ops.attention import Tile, attention

    machine = cost.machine_of("sm_90a")
    assert machine is not None
    out = []
    for f in held["figures"]:
        if f["kernel"] == "gemm":
            (guess,) = predicted(tuple(f["shape"]), [name_of(tuple(f["config"]))])
        else:
            heads, dim = f["heads"], f["dim"]
            program = attention(
                heads, heads, dim, False, "bfloat16", dim**-0.5, f["causal"], Tile(*f["tile"])
            ).trace()
            extents = {"batch": f["batch"], "queries": f["length"], "keys": f["length"]}
            found = cost.count(
                program, {name: extents[name] for name in program.symbols}, neighbours=machine.sms
            )
            guess = cost.predict(found, machine, "sm_90a").seconds * 1e6
        out.append(f | {"predicted_us": guess, "predicted_over_measured": guess / f["us"]})
    return out


def ranking() -> dict[str, float]:
    """How long it takes to predict thousands of configurations of one GEMM."""
    names = [
        name_of(c)
        for c in itertools.product(
            (64, 128, 192, 256),
            (64, 96, 128, 192, 256),
            (32, 64, 128),
            (2, 3, 4, 5, 6),
            (128, 256),
            (0, 8),
            (0,),
        )
    ]
    predicted((4096, 4096, 4096), names[:10])
    start = time.perf_counter()
    guess = predicted((4096, 4096, 4096), names)
    return {
        "configurations": len(names),
        "seconds": time.perf_counter() - start,
        "cannot_run": sum(g == float("inf") for g in guess),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args(argv)
    if args.measure:
        measure_all(args.rounds, args.seconds, args.held_out)
        return 0
    figures: dict[str, Any] = {}
    for name in ("gemm_configs", "gemm_configs_held_out"):  # the latter where somebody has measured it
        path = RESULTS / f"{name}.json"
        if path.exists():
            figures[name] = compare(json.loads(path.read_text()))
            for f in figures[name]:
                print(
                    f"{name} {f['shape']}: tau {f['kendall_tau_b']:.2f}, rho {f['spearman_rho']:.2f}, the best stands at place "
                    f"{f['best_is_predicted_at_place']} of {f['configurations']}, the predicted ten reach {f['best_of_predicted_ten_over_best']:.3f}, "
                    f"rms error {f['rms_log_error']:.0%}, {f['milliseconds_a_configuration']:.1f} ms each"
                )
    figures["elsewhere"] = elsewhere(json.loads((RESULTS / "other_times.json").read_text()))
    for f in figures["elsewhere"]:
        print({k: v for k, v in f.items() if k not in ("us", "predicted_us", "predicted_over_measured")},
              f"{f['predicted_us']:.0f} µs predicted, {f['us']:.0f} measured")  # fmt: skip
    figures["ranking"] = ranking()
    print("ranking {configurations} configurations takes {seconds:.1f} s".format(**figures["ranking"]))
    record("cost_model", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
