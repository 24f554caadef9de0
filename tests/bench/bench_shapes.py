"""``python -m tests.bench.bench_shapes matmul softmax … --count 300``: random shapes beside the best of the
peers, on a GPU.

Extents are drawn log-uniformly by a seed, half of the shapes with extents that are multiples of 8 (rows of
whole 16 bytes), half with any. Ours is compared with the first peer's result, into poisoned memory, then both
are replayed in turn as in tests/bench/gpu.py; a shape's ratio is the median of the rounds' against the peer
whose median is the least. Kernels are compiled by several processes while others are timed. The median, the
tenth percentile and the least of all shapes, the worst ten and every shape go to shapes_NAME.json in
tests/bench/results, or in $OUT.

Options: ``--jobs 14`` processes that compile; ``--rounds 15``; ``--seconds 200`` of one operation, after
which it stops with what it has; ``--resume FOLDER`` with such files: shapes that they have are not measured
again; ``--only TEXT``: shapes whose text has it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.bench.bench_ops import ALIKE, bound, differences, size
from tests.bench.gpu import TRAFFIC, captured, measure, ratios, spread
from tests.bench.record import record
from tests.bench.shapes import OPS, Pool, drawn, text

#: sets of arguments that a graph has at most: those of small shapes may lie in the L2 cache, for ours and for
#: the peer
SETS = 128


#: in a process that compiles: the operation whose kernels are wanted; those of one that has stopped are not
wanted: Any = None


def begin(shared: Any) -> None:
    global wanted
    wanted = shared


def compiled(job: tuple[str, dict[str, Any]]) -> str:
    """Compiles what a shape launches, without launching it, into the disk cache; the error as text."""
    if wanted is not None and list(OPS).index(job[0]) != wanted.value:
        return "not wanted any more"
    import torch

    from tilescale.ops import host

    name, shape = job

    def compile_only(factory: Any, args: Any, /, **constants: Any) -> None:
        host.kernel(factory, "cuda:sm_90a", **constants)

    host.launch = compile_only
    try:
        OPS[name].op.run(**OPS[name].make(Pool(None), **shape))
        torch.cuda.empty_cache()
    except Exception as error:  # noqa: BLE001  # the other shapes' figures are worth having
        return f"{type(error).__name__}: {str(error)[:400]}"
    return ""


def one(name: str, shape: dict[str, Any], pool: Pool, rounds: int) -> dict[str, Any]:
    """A shape's figures."""
    import torch

    what = OPS[name]
    first = what.make(pool, **shape)
    count = min(SETS, max(2, -(-TRAFFIC // max(1, sum(map(size, first.values()))))))
    sets = [first, *(what.make(pool, **shape) for _ in range(1, count))]
    made = what.op.run(**first)
    for t in made if isinstance(made, tuple) else (made,):
        t.fill_(float("nan"))
    made = what.op.run(**first, out=made)
    off = differences(made, what.right(first))
    if not off <= ALIKE:
        raise ValueError(f"off by {off} of the greatest value")
    outs = [what.op.run(**s) for s in sets]
    graphs, failed = (
        {"ours": captured([bound(what.op.run, {**s, "out": o}) for s, o in zip(sets, outs, strict=True)])},
        {},
    )
    for peer, prepare in what.peers.items():
        try:
            graphs[peer] = captured([prepare(**s) for s in sets])
        except Exception as error:  # noqa: BLE001  # a peer that does not take the shape
            failed[peer] = str(error).splitlines()[0][:120]
            torch.cuda.synchronize()
    times = measure(graphs, count, rounds)
    medians = {k: spread(v)["median"] for k, v in times.items()}
    ours = medians.pop("ours")
    if not medians:
        raise ValueError(f"no peer: {failed}")
    peer = min(medians, key=lambda k: medians[k])
    return {
        "shape": shape,
        "us": ours * 1e6,
        "peer": peer,
        "peer_us": medians[peer] * 1e6,
        "ratio": ratios(times[peer], times["ours"])["median"],
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of an operation."""
    right = [r for r in rows if "ratio" in r]

    def line(r: dict[str, Any]) -> str:
        return f"{text(r['shape'])}: {r['us']:.2f} µs, {r['peer']} {r['peer_us']:.2f} µs, {r['ratio']:.3f}"

    worst = [line(r) for r in sorted(right, key=lambda r: r["ratio"])[:10]]
    failed = {text(r["shape"]): r["failed"] for r in rows if "failed" in r}
    halves = {
        n: spread([r["ratio"] for r in right if r["shape"].get("aligned", True) == a])
        for n, a in (("aligned", True), ("any", False))
        if any(r["shape"].get("aligned", True) == a for r in right)
    }
    ratio = spread([r["ratio"] for r in right]) if right else {}
    return {"shapes": len(rows), "ratio": ratio, **halves, "failed": failed, "worst": worst, "rows": right}


def known(folder: str, name: str) -> dict[str, dict[str, Any]]:
    """Shapes that were measured before, by their text."""
    path = Path(folder) / f"shapes_{name}.json"
    if not folder or not path.exists():
        return {}
    return {text(r["shape"]): r for r in json.loads(path.read_text())["figures"]["rows"]}


def sweep(name: str, args: argparse.Namespace, workers: Any, now: Any, pool: Pool) -> bool:
    """All shapes of an operation; whether all were right."""
    now.value = list(OPS).index(name)
    shapes, rows, before = drawn(name, args.count), [], known(args.resume, name)
    shapes = [s for s in shapes if args.only in text(s)]
    begun = time.perf_counter()
    for shape, bad in zip(shapes, workers.imap(compiled, [(name, s) for s in shapes]), strict=True):
        if time.perf_counter() - begun > args.seconds:
            break
        try:
            rows.append(
                before.get(text(shape))
                or ({"shape": shape, "failed": bad} if bad else one(name, shape, pool, args.rounds))
            )
        except Exception:  # noqa: BLE001
            rows.append({"shape": shape, "failed": traceback.format_exc(limit=-2)[-600:]})
    made = summary(rows)
    record(f"shapes_{name}", {"seconds": round(time.perf_counter() - begun), **made})
    short = {
        k: {n: round(v, 3) for n, v in made[k].items()} for k in ("ratio", "aligned", "any") if k in made
    }
    print(
        f"== {name}: {len(rows)} of {len(shapes)} shapes, {len(made['failed'])} failed, {time.perf_counter() - begun:.0f} s\n   {short}",
        flush=True,
    )
    print(
        *made["worst"],
        *(f"FAILED {k}: {v[-300:]}" for k, v in list(made["failed"].items())[:5]),
        sep="\n",
        flush=True,
    )
    return not made["failed"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(OPS))
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--resume", default="")
    parser.add_argument("--only", default="")
    args = parser.parse_args(argv)
    context, pool = multiprocessing.get_context("spawn"), Pool("cuda")
    now = context.Value("i", -1)
    with context.Pool(args.jobs, begin, (now,)) as workers:
        right = [sweep(name, args, workers, now, pool) for name in args.names or OPS]
        workers.terminate()
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
