"""``python -m tests.bench.bench_tilelang --site FOLDER --example FILE``: beside TileLang, which runs in a
process and a site folder of its own.

TileLang and ours need different versions of apache-tvm-ffi, and so no process can have both. FOLDER is where
``pip install --target FOLDER tilelang`` put it (its python is this one), FILE its repository's
examples/deepseek_mla/example_mla_decode.py, whose kernel is compiled by the constants of its own main. The
peer prepares a CUDA graph and waits; then ours and the peer's are replayed in turn, so that never more than
one of them is at work, over two sets of inputs of more than the L2 cache each. Without ``--example`` only
compilation is measured: each sample a new process, the peer's cache empty.

The figures go to tilelang.json in tests/bench/results, or in $OUT.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.bench_cold_compile import samples
from tests.bench.bench_ops import bound
from tests.bench.gpu import captured, ratios, spread, timed
from tests.bench.record import record
from tilescale.ops import load

BATCHES = (132, 64, 200)
HEADS, CONTEXT, LATENT, ROPE = 128, 8192, 512, 64
SETS = 2


class Peer:
    """The other process: one question, one answer."""

    def __init__(self, site: str, cache: str):
        here = Path(__file__).resolve().parent
        env = {k: v for k, v in os.environ.items() if not k.startswith("TILESCALE")}
        env |= {"PYTHONPATH": site, "TILELANG_CACHE_DIR": cache, "TILELANG_TMP_DIR": str(Path(cache, "tmp"))}
        self.process = subprocess.Popen(
            [sys.executable, str(here / "tilelang_peer.py")],
            env=env,
            cwd=cache,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps({"do": do, **more}), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"TileLang's process ended with {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise RuntimeError(f"TileLang's process: {answer['failed']}")
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def decoding(peer: Peer, example: str, batch: int, rounds: int) -> dict[str, Any]:
    """One batch of MLA decode: ours in float16, which is the example's dtype, and in bfloat16."""
    op = load("latent_attention")
    found = peer.ask(
        "mla",
        example=str(Path(example).resolve()),
        batch=batch,
        heads=HEADS,
        context=CONTEXT,
        latent=LATENT,
        rope=ROPE,
        sets=SETS,
    )
    graphs = {}
    for dtype in ("float16", "bfloat16"):
        sets = [
            op.draw(batch=batch, heads=HEADS, context=CONTEXT, dtype=dtype, device="cuda", seed=k)
            for k in range(SETS)
        ]
        outs = [op.run(**s) for s in sets]
        graphs[dtype] = captured([bound(op.run, {**s, "out": o}) for s, o in zip(sets, outs, strict=True)])
    names = ["TileLang", *graphs]
    times: dict[str, list[float]] = {n: [] for n in names}
    for r in range(-3, rounds):  # three to warm up
        for name in names[r % 3 :] + names[: r % 3]:
            seconds = peer.ask("time")["seconds"] if name == "TileLang" else timed(graphs[name], SETS)
            if r >= 0:
                times[name].append(seconds)
    work = op.flops(batch=batch, heads=HEADS, context=CONTEXT)
    out: dict[str, Any] = {
        "batch": batch,
        "rounds": rounds,
        "the peer's difference from float64": found["difference"],
        "kernels": {},
    }
    for name, seconds in times.items():
        ratio, of = ratios(times["TileLang"], seconds), spread(seconds)
        out["kernels"][name] = {
            "us": {k: v * 1e6 for k, v in of.items()},
            "tflops": work / of["median"] / 1e12,
            "ratio_to_TileLang": ratio,
        }
        print(
            f"mla_decode batch={batch} {name:9s} {of['median'] * 1e6:8.1f} µs {work / of['median'] / 1e12:6.1f} TFLOP/s  "
            f"{ratio['median']:.3f} × TileLang (p10 {ratio['p10']:.3f}, p90 {ratio['p90']:.3f})",
            flush=True,
        )
    return out


def compilation(site: str, count: int) -> dict[str, Any]:
    """Milliseconds from a tile program to a kernel: a process's first GEMM and its second, and ours by
    nvcc."""
    theirs: list[list[float]] = []
    for _ in range(count):
        with tempfile.TemporaryDirectory() as cache:
            peer = Peer(site, cache)
            theirs.append(
                peer.ask("gemm", sizes=[128 * k for k in random.sample(range(8, 400), 2)])["seconds"]
            )
            peer.close()
    first, second = (statistics.median(t[k] for t in theirs) * 1e3 for k in (0, 1))
    ours = samples("nvcc", count)
    print(
        f"a GEMM compiled: TileLang's first in a process {first:.0f} ms, its second {second:.0f}; "
        f"ours {ours['first in a process']['median_ms']:.0f}, {ours['imported']['median_ms']:.0f}",
        flush=True,
    )
    return {
        "samples": count,
        "TileLang": {"first in a process, ms": first, "second, ms": second},
        "tilescale, nvcc": ours,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--site", required=True)
    parser.add_argument("--example")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--samples", type=int, default=3)
    args = parser.parse_args(argv)
    site, figures = str(Path(args.site).resolve()), {}
    with tempfile.TemporaryDirectory() as cache:
        peer = Peer(site, cache)
        figures["versions of the peer"] = peer.ask("versions")
        if args.example:
            figures["mla_decode"] = [decoding(peer, args.example, batch, args.rounds) for batch in BATCHES]
        peer.close()
    figures["compilation"] = compilation(site, args.samples)
    record("tilelang", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
