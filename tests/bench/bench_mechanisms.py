"""``python -m tests.bench.bench_mechanisms``: what each of the compiler's mechanisms for some kernels gains.

For each that TILESCALE_WITHOUT may leave out, measured cases of the operations that have it (tests/mechanisms.py)
with it and without it, by CUDA graphs that are replayed in turn over the same arguments. A ratio above 1: it is
faster with it. ``--jobs``: processes that compile first.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import traceback
from typing import Any

from tests.bench.bench_ops import bound, size
from tests.bench.gpu import captured, copies, measure, ratios, spread
from tests.bench.record import record
from tilescale.env import WITHOUT
from tilescale.ops import host, load

#: mechanism → operations that have it, and parts of the texts of their cases
WHOM: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    "multicast": [
        ("gemm", ("M=8192 N=7168", "M=64 ")),
        ("latent_attention", ("batch=132 heads=128 context=8192",)),
    ],
    "release_late": [("gemm", ("M=4096 N=4096", "M=64 ")), ("grouped", ("",))],
    "overlap_products": [
        ("attention", ("heads=32 length=4096 dim=128",)),
        ("attention_backward", ("batch=1 heads=32 length=4096 dim=128",)),
    ],
    "ping_pong": [("fp8_gemm", ("M=4096 N=4096",))],
    "split_rounds": [
        ("attention", ("batch=1 heads=32 length=4096 dim=128 causal=True",)),
        ("attention_backward", ("batch=1 heads=32 length=4096 dim=64 causal=True",)),
    ],
    "tma_stores": [("gemm", ("M=4096 N=4096", "M=640 ")), ("attention", ("batch=16",))],
    "hoist_store_waits": [("attention_backward", ("batch=1 heads=32 length=4096 dim=128 causal=False",))],
    "defer_cross_lane_sums": [("attention", ("batch=1 heads=32 length=4096 dim=128",))],
    "stores_by_warpgroup": [("gemm", ("M=4096 N=4096",)), ("attention", ("batch=16",))],
    "elide_proxy_fences": [
        ("fp8_gemm", ("M=4096 N=4096",)),
        ("attention_backward", ("batch=1 heads=32 length=4096 dim=64 causal=False",)),
    ],
    "warpgroup_code": [("latent_attention", ("batch=132 heads=128 context=8192",))],
    "packed_halves": [("w4a16", ("M=16 ", "M=128 "))],
}


CACHED: Any = host.kernel


def kernels(held: dict[Any, Any]) -> Any:
    """In the place of `host.kernel`: keeps what it makes in ``held``, which must live as long as a graph does."""

    def kernel(factory: Any, target: str, /, **constants: Any) -> Any:
        key = factory, target, str(constants)
        if key not in held:
            held[key] = CACHED.__wrapped__(factory, target, **constants)
        return held[key]

    return kernel


def calls(op: Any, sets: list[dict[str, Any]], without: str) -> Any:
    """A graph of one call for each set, of kernels without a mechanism."""
    os.environ[WITHOUT.name] = without
    host.kernel = kernels(held := {})
    outs = [op.run(**s) for s in sets]
    made = captured([bound(op.run, {**s, "out": o}) for s, o in zip(sets, outs, strict=True)])
    os.environ.pop(WITHOUT.name)
    made.kernels = held
    return made


def one(op: Any, case: Any, mechanism: str, rounds: int) -> dict[str, Any]:
    first = op.draw(**case.shape, device="cuda", seed=0)
    n = copies(sum(map(size, first.values())))
    sets = [first, *(op.draw(**case.shape, device="cuda", seed=k) for k in range(1, n))]
    times = measure({"with": calls(op, sets, ""), "without": calls(op, sets, mechanism)}, n, rounds)
    ratio = ratios(times["without"], times["with"])
    us = {name: {k: v * 1e6 for k, v in spread(t).items()} for name, t in times.items()}
    print(
        f"{mechanism:22s} {op.name} {case}  {us['with']['median']:9.2f} µs, without {us['without']['median']:9.2f}: "
        f"{ratio['median']:.3f} (p10 {ratio['p10']:.3f}, p90 {ratio['p90']:.3f})",
        flush=True,
    )
    return {"operation": op.name, "shape": dict(case.shape), "us": us, "gain": ratio}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mechanisms", nargs="*")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--jobs", type=int, default=0)
    args = parser.parse_args()
    figures: dict[str, list[dict[str, Any]]] = {}
    failed = False
    for mechanism in args.mechanisms or WHOM:
        figures[mechanism] = []
        for module, texts in WHOM[mechanism]:
            op = load(module)
            if args.jobs:
                compiling = [
                    sys.executable,
                    "-m",
                    "tests.gpu.compile_ops",
                    "--jobs",
                    str(args.jobs),
                    "--bench",
                ]
                for without in ("", mechanism):
                    env = {**os.environ, WITHOUT.name: without}
                    subprocess.run([*compiling, "--of", module, "--only", *texts], env=env, check=True)
            for case in op.cases:
                if case.bar is None or not any(t in str(case) for t in texts):
                    continue
                try:
                    figures[mechanism].append(one(op, case, mechanism, args.rounds))
                except Exception:  # noqa: BLE001  # the other cases' figures are worth having
                    traceback.print_exc(limit=-3)
                    figures[mechanism].append(
                        {"shape": dict(case.shape), "failed": traceback.format_exc(limit=-1)}
                    )
                    failed = True
    record("mechanisms", {"mechanisms": figures})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
