"""Every kernel's code as text, so that a change that should change none can show it: ``python -m
tests.printed_code OUT [--before OUT2]``.

Prints the examples, the variants of Hopper's GEMM and the kernels of every small and every measured case of
tilescale.ops, for sm_90a and sm_80, and the CPU's thread IR of the examples and of each operation's first
small case, a file each below OUT. ``--before`` names an earlier OUT, and what differs from it, line numbers
in comments aside, is listed; the exit code says whether anything did.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.ranks import module
from tests.unit.cuda.corpus import kernels, kernels_of_case
from tilescale.compiler import driver

#: the examples of several ranks: file, function, arguments
OF_RANKS: list[tuple[str, str, tuple[int, ...]]] = [
    ("05_ring_shift", "kernel", (1000,)),
    ("06_all_gather", "collective", (1000, 4)),
    ("06_all_gather", "puts", (1000, 4)),
    ("07_all_reduce", "one_shot", (1000, 4)),
    ("07_all_reduce", "two_shot", (1000, 4)),
    ("08_ag_gemm", "kernel", (200, 150, 100, 4)),
    ("09_gemm_rs", "kernel", (200, 150, 100, 4)),
    ("10_gemm_ar", "kernel", (200, 150, 100)),
    ("11_all_to_all", "dispatch", (100, 2, 64, 2, 4)),
    ("11_all_to_all", "combine", (100, 2, 64, 4)),
    ("12_ring_attention", "kernel", (2, 128, 64, 4)),
    ("13_expert_slots", "dispatch", (100, 2, 64, 2, 256)),
    ("13_expert_slots", "give_back", (100, 2, 64, 2, 256)),
    ("14_hierarchical_all_reduce", "kernel", (1000, 2)),
    ("15_small_all_reduce", "kernel", (1000, 4)),
]
GPUS = ("sm_90a", "sm_80")


def of_ranks(name: str, function: str, args: tuple[int, ...]) -> Any:
    return getattr(module(name), function).__wrapped__(*args)


def made(target: str, group: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, what makes the prim_func) of the kernels of a group for a target: "examples", or a module of
    tilescale.ops."""
    arch = target.partition(":")[2]
    if group == "examples":
        yield from kernels(arch or "sm_80").items()
        for which in OF_RANKS:
            yield f"{which[0]}, {which[1]}", partial(of_ranks, *which)
        return
    from tilescale.ops import load

    op = load(group)
    cases = (
        [c for c in op.cases if c.small or c.bar is not None]
        if arch
        else [c for c in op.cases if c.small][:1]
    )
    for case in cases:
        with pytest.MonkeyPatch.context() as patch:
            for k, prim in enumerate(kernels_of_case(op, case, patch, arch or "sm_90a")):
                yield f"{op.name}, {case}, {k}", lambda prim=prim: prim


def print_group(out: Path, target: str, group: str) -> int:
    """Writes a group's texts; how many there are. Kernels that several cases share are written once."""
    seen: dict[Any, str] = {}
    folder = out / target.replace(":", "_") / group
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in made(target, group):
        prim = make()
        program = prim.trace()
        text = program.func.script()
        if text in seen:
            continue
        seen[text] = name
        try:
            code = driver.source_text(program, "cuda" if ":" in target else "thread", target)
        except Exception as e:  # noqa: BLE001  a refusal is part of what must stay
            code = f"{type(e).__name__}: {e}\n"
        short = re.sub(r"[^\w=.]+", "_", name)[:90]
        (folder / f"{short}.{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}.txt").write_text(code)
    return len(seen)


#: where a statement stands in its file, which comments of printed code say: not what is compared
_PLACES = re.compile(r"\b\w+\.py:\d+|\bline \d+")


def compared(before: Path, after: Path, only: str) -> list[str]:
    """What of two folders differs, a line each, of groups whose names contain ``only``."""
    groups = [
        g.relative_to(after)
        for g in after.glob("*/*")
        if only in f"{g.parent.name.replace('_', ':', 1)}:{g.name}"
    ]
    files = {
        str(p.relative_to(root))
        for root in (before, after)
        for g in groups
        for p in (root / g).rglob("*.txt")
    }
    out = []
    for name in sorted(files):
        a, b = before / name, after / name
        if not a.exists() or not b.exists():
            out.append(f"{name}: only {'after' if b.exists() else 'before'}")
        elif _PLACES.sub("", a.read_text()) != _PLACES.sub("", b.read_text()):
            out.append(f"{name}: differs")
    return out


def main() -> int:
    from tilescale.ops import MODULES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--before", type=Path, help="an earlier OUT to compare with")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="", help="groups whose names contain this")
    options = parser.parse_args()
    jobs = [(f"cuda:{a}", g) for a in GPUS for g in (*MODULES, "examples")] + [
        ("cpu", g) for g in ("examples", *MODULES)
    ]
    jobs = [j for j in jobs if options.only in ":".join(j)]
    with ProcessPoolExecutor(options.jobs) as pool:
        counts = list(pool.map(partial(print_group, options.out), *zip(*jobs, strict=True)))
    print(f"{sum(counts)} kernels")
    wrong = compared(options.before, options.out, options.only) if options.before else []
    print("\n".join(wrong) if wrong else "all the same" if options.before else "", end="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
