"""``python -m tests.bench.bench_ops matmul``: operations of tilescale.ops beside their peers on a GPU, on the
shapes in their own lists.

Random data. Peers and ours are captured in CUDA graphs over the same sets of arguments and replayed in turn
(tests/bench/gpu.py). Ours is compared with the first peer's result first. The figures go to ops_NAME.json in
tests/bench/results, or in $OUT.

Options: names of modules of tilescale.ops, all without; ``--cases M=16 …``: only cases whose text has one of
these; ``--rounds 40``; ``--config BM=128,BN=256 …``: those that take a ``config`` (their module's Config),
once with each beside the choice of their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import traceback
from collections.abc import Callable
from typing import Any

from tests.bench.gpu import ROUNDS, captured, copies, measure, ratios, spread
from tests.bench.record import record
from tilescale.ops import MODULES, load
from tilescale.ops.case import Case, Op, as_tuple

#: of the greatest magnitude of the peer's result: two roundings to bfloat16, and sums in another order
ALIKE = 2e-2


def size(value: Any) -> int:
    """Bytes of all tensors in an argument."""
    if isinstance(value, (list, tuple)):
        return sum(map(size, value))
    return value.numel() * value.element_size() if hasattr(value, "element_size") else 0


def differences(ours: Any, theirs: Any) -> float:
    """The greatest difference, relative to the peer's greatest magnitude."""
    worst = 0.0
    for a, b in zip(as_tuple(ours), as_tuple(theirs), strict=True):
        worst = max(
            worst, float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-30))
        )
    return worst


def variants(op: Op, texts: list[str]) -> dict[str, dict[str, Any]]:
    """What is measured of ours: name → more arguments."""
    found: dict[str, dict[str, Any]] = {"tilescale": {}}
    for text in texts:
        Config = sys.modules[op.run.__module__].Config  # type: ignore[attr-defined]
        fields = dict(part.split("=") for part in text.split(","))
        kinds = {f.name: type(f.default) for f in dataclasses.fields(Config)}
        found[f"tilescale {text}"] = {"config": Config(**{k: kinds[k](int(v)) for k, v in fields.items()})}
    return found


def bound(run: Callable[..., Any], arguments: dict[str, Any]) -> Callable[[], Any]:
    return lambda: run(**arguments)


def one(op: Op, case: Case, rounds: int, texts: list[str]) -> dict[str, Any]:
    """A case's figures, printed as they come."""
    import torch

    first = op.draw(**case.shape, device="cuda", seed=0)
    n = copies(sum(map(size, first.values())))
    sets = [first, *(op.draw(**case.shape, device="cuda", seed=k) for k in range(1, n))]
    peers = {name: [prepare(**s) for s in sets] for name, prepare in op.peers.items()}
    want = next(iter(peers.values()))[0]()
    graphs, alike = {name: captured(calls) for name, calls in peers.items()}, {}
    for name, more in variants(op, texts).items():
        made = op.run(**first, **more)
        alike[name] = differences(made, want)
        outs = [op.run(**s, **more) for s in sets]
        if not alike[name] <= ALIKE:
            raise ValueError(
                f"{name} differs from {next(iter(peers))} by {alike[name]} of the greatest value"
            )
        graphs[name] = captured(
            [bound(op.run, {**s, **more, "out": o}) for s, o in zip(sets, outs, strict=True)]
        )
    times = measure(graphs, n, rounds)
    torch.cuda.synchronize()
    peer = next(iter(peers))
    out: dict[str, Any] = {
        "shape": dict(case.shape),
        "sets": n,
        "rounds": rounds,
        "bar": case.bar,
        "peer": peer,
        "kernels": {},
    }
    for name, seconds in times.items():
        found, ratio = spread(seconds), ratios(times[peer], seconds)
        rates = {
            "tflops": op.flops(**case.shape) / found["median"] / 1e12,
            "gbytes_per_s": op.moved(**case.shape) / found["median"] / 1e9,
        }
        out["kernels"][name] = {
            "us": {k: v * 1e6 for k, v in found.items()},
            **rates,
            f"ratio_to_{peer}": ratio,
            "difference": alike.get(name, 0.0),
        }
        print(
            f"{op.name} {case}  {name:32s} {found['median'] * 1e6:9.2f} µs  {rates['tflops']:7.1f} TFLOP/s  {rates['gbytes_per_s']:7.0f} GB/s  "
            f"{ratio['median']:.3f} × {peer}  (p10 {ratio['p10']:.3f}, p90 {ratio['p90']:.3f}; bar {case.bar})",
            flush=True,
        )
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*")
    parser.add_argument("--cases", nargs="+", default=[])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--config", nargs="+", default=[])
    args = parser.parse_args(argv)
    failed = False
    for module in args.modules or MODULES:
        op = load(module)
        figures = []
        for case in op.cases:
            if case.bar is None or args.cases and not any(c in str(case) for c in args.cases):
                continue
            try:
                figures.append(one(op, case, args.rounds, args.config))
            except Exception:  # noqa: BLE001  # the other cases' figures are worth having
                traceback.print_exc(limit=-4)
                figures.append({"shape": dict(case.shape), "failed": traceback.format_exc(limit=-1)})
                failed = True
        if figures:
            record(f"ops_{op.name}", {"cases": figures})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
