"""The examples on several ranks, many launches each, every one with new data and compared with torch: a
program for a launcher. tests/bench/bench_ranks.py runs it under all of them.

    TILESCALE_TARGET=cuda tilescale launch -n 2 -m tests.gpu.ranks --launches 1000
    TILESCALE_TARGET=cuda torchrun --nproc-per-node 2 -m tests.gpu.ranks --launches 1000 05_ring_shift
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import sys
import time
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"

#: name → arguments of the example's ``run``, what it may differ by; one line a variant
VARIANTS: dict[str, list[tuple[tuple[Any, ...], dict[str, Any], float]]] = {
    "01_vector_add": [((5000,), {}, 0)],
    "02_gemm": [((100, 130, 70), {}, 1e-3)],
    "03_softmax": [((50, 130), {}, 1e-5)],
    "04_flash_attention": [((1, 2, 100, 64), {}, 1e-5)],
    "05_ring_shift": [((20_000,), {}, 0)],
    "06_all_gather": [((20_000, "collective"), {}, 0), ((20_000, "puts"), {}, 0)],
    "07_all_reduce": [((20_000, 1), {}, 0), ((20_000, 2), {}, 0)],
    "08_ag_gemm": [((128, 128, 192), {}, 2e-2)],
    "09_gemm_rs": [((128, 128, 96), {}, 3e-2)],
    "10_gemm_ar": [((128, 192, 96), {}, 3e-2)],
    "11_all_to_all": [((60, 64), {}, 3e-2)],
    "12_ring_attention": [((2, 150, 64, False), {}, 2e-2), ((2, 150, 64, True), {}, 2e-2)],
    "13_expert_slots": [((60, 64), {}, 1e-4)],
    "14_hierarchical_all_reduce": [((20_000,), {}, 1e-5)],
    "15_small_all_reduce": [((3_000,), {}, 1e-5)],
    "16_moe_layer": [((60, 64, 96), {}, 2e-2)],
}


def module(name: str) -> Any:
    """An example, as a module."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


class Unhurried:
    """What the examples share, without a look at the GPU in every launch: ranks that share one would wait for
    their turns."""

    def __init__(self, common: Any):
        self.worst: Any = None
        self.made: dict[Any, Any] = {}
        self.randn, common.randn = common.randn, self.numbers
        self.common, common.difference = common, self.difference

    def numbers(self, *shape: int, seed: int, rank: int = 0, scale: float = 1.0) -> Any:
        """Five sets of random numbers in turn, kept where they are used."""
        key = (shape, seed // 1000 * 1000 + seed % 1000 % 5, rank, scale)
        if key not in self.made:
            self.made[key] = self.randn(*shape, seed=key[1], rank=rank, scale=scale)
        return self.made[key]

    def difference(self, got: Any, want: Any) -> float:
        """Remembered where it is computed, NaN as something huge; ``total`` has the largest."""
        worst = (got.double() - want.double()).abs().nan_to_num(1e30).max()
        self.worst = worst if self.worst is None else worst.maximum(self.worst)
        return 0.0

    def total(self) -> float:
        worst, self.worst = self.worst, None
        return 0.0 if worst is None else float(worst.item())


def launched(example: Any, args: tuple[Any, ...], options: dict[str, Any], count: int) -> float:
    """The example's largest error over so many launches, each with new data."""
    if "launches" in inspect.signature(example.run).parameters:
        return float(example.run(*args, **options, launches=count))
    return max(float(example.run(*args, **options, seed=seed)) for seed in range(count))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--launches", type=int, default=20)
    parser.add_argument("--out", help="a file for what was measured, written again behind every line")
    parser.add_argument("names", nargs="*", help="how the examples' names begin; default: all")
    given = parser.parse_args()
    bad, shared, figures = 0, None, dict[str, Any]()
    for name, variants in VARIANTS.items():
        if given.names and not any(name.startswith(n) for n in given.names):
            continue
        example = module(name)
        common = sys.modules["common"]
        shared = shared or Unhurried(common)
        for args, options, tolerance in variants:
            begun = time.monotonic()
            worst = max(launched(example, args, options, 1), shared.total())  # compiles
            start = time.monotonic()
            worst = max(worst, launched(example, args, options, given.launches), shared.total())
            each = (time.monotonic() - start) / given.launches * 1e3
            what = f"{name} {args}"
            wrong = common.report(
                f"{what}, {given.launches} launches, {each:.2f} ms each, first in {start - begun:.1f} s",
                worst,
                tolerance,
            )
            bad |= wrong
            figures[what] = {
                "launches": given.launches,
                "ms_each": round(each, 3),
                "max_error": worst,
                "right": not wrong,
            }
            if given.out and common.ranks()[0] == 0:
                Path(given.out).write_text(json.dumps(figures))
    return bad


if __name__ == "__main__":
    raise SystemExit(main())
