"""Every example on 1 to 8 ranks: ragged sizes, several launches in a row, outputs that hold NaN before; and
as people start them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tilescale.compiler.driver  # noqa: F401  # once here, not in each of the forked ranks
from tests.ranks.harness import run_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = sorted(p.stem for p in EXAMPLES.glob("[0-9][0-9]_*.py"))


def load(name: str) -> ModuleType:
    """The example ``name``, as ``python examples/name.py`` finds it: its folder is on the path."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


#: example → (arguments of its run, the error allowed)
CASES: dict[str, list[tuple[dict[str, Any], float]]] = {
    "01_vector_add": [({"N": 1}, 0), ({"N": 1000, "seed": 3}, 0)],
    "02_gemm": [
        ({"M": 65, "N": 33, "K": 50}, 1e-5),
        ({"M": 130, "N": 70, "K": 17, "dynamic": True, "seed": 1}, 1e-5),
    ],
    "03_softmax": [({"M": 5, "N": 3}, 1e-6), ({"M": 33, "N": 129, "seed": 4}, 1e-6)],
    "04_flash_attention": [
        ({"batch": 1, "heads": 2, "S": 65, "D": 32}, 1e-5),
        ({"batch": 2, "heads": 1, "S": 130, "D": 64, "causal": True, "seed": 2}, 1e-5),
    ],
    "05_ring_shift": [({"N": 1, "launches": 2}, 0), ({"N": 2500, "launches": 3, "seed": 5}, 0)],
    "06_all_gather": [
        ({"N": 1030, "by": "collective", "launches": 3}, 0),
        ({"N": 3000, "by": "puts", "launches": 3, "seed": 1}, 0),
    ],
    "07_all_reduce": [
        ({"N": 1100, "shots": 1, "launches": 3}, 0),
        ({"N": 1101, "shots": 2, "launches": 3, "seed": 1}, 0),
        ({"N": 3, "shots": 2, "launches": 2, "seed": 2}, 0),
    ],
    "08_ag_gemm": [
        ({"M": 64, "N": 64, "K": 64, "launches": 3}, 2e-2),
        ({"M": 70, "N": 130, "K": 33, "launches": 3, "seed": 1}, 2e-2),
    ],
    "09_gemm_rs": [({"M": 70, "N": 130, "K": 33, "launches": 3}, 3e-2)],
    "10_gemm_ar": [({"M": 70, "N": 130, "K": 33, "launches": 3}, 3e-2)],
    "11_all_to_all": [
        ({"tokens": 30, "D": 16, "launches": 3}, 3e-2),
        ({"tokens": 7, "D": 20, "local": 3, "topk": 3, "launches": 2, "seed": 6}, 3e-2),
    ],
    "12_ring_attention": [
        ({"heads": 2, "S": 70, "D": 32, "launches": 2}, 2e-2),
        ({"heads": 1, "S": 130, "D": 32, "causal": True, "launches": 3, "seed": 1}, 2e-2),
    ],
    "13_expert_slots": [
        ({"tokens": 30, "D": 16, "launches": 3}, 1e-5),
        ({"tokens": 7, "D": 20, "local": 3, "topk": 3, "launches": 2, "seed": 6}, 1e-5),
    ],
    "14_hierarchical_all_reduce": [
        ({"N": 2200, "launches": 2}, 1e-5),
        ({"N": 7, "per_node": 4, "launches": 2, "seed": 1}, 1e-5),
    ],
    "15_small_all_reduce": [
        ({"N": 600, "launches": 5}, 1e-5),
        ({"N": 3, "launches": 3, "seed": 1}, 1e-5),
    ],
    "16_moe_layer": [
        ({"tokens": 30, "D": 16, "F": 24, "launches": 2}, 2e-2),
        ({"tokens": 7, "D": 24, "F": 8, "local": 3, "topk": 3, "launches": 2, "seed": 6}, 2e-2),
    ],
}


def test_every_example_has_cases() -> None:
    assert sorted(CASES) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "n", [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_agrees_with_torch(name: str, n: int) -> None:
    check(name, n)


@pytest.mark.parametrize(
    "name", ["05_ring_shift", "07_all_reduce", "08_ag_gemm", "12_ring_attention", "13_expert_slots"]
)
def test_agrees_with_torch_on_eight_ranks(name: str) -> None:
    check(name, 8)


def check(name: str, n: int) -> None:
    module = load(name)

    def work() -> list[float]:
        return [module.run(**arguments) for arguments, _ in CASES[name]]

    for rank, errors in enumerate(run_ranks(n, work)):
        for error, (arguments, allowed) in zip(errors, CASES[name], strict=True):
            assert error <= allowed, f"rank {rank} of {n}, {arguments}: {error}"


@pytest.mark.parametrize("name", NAMES)
def test_main_prints_one_line_a_result_on_rank_0(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    module = load(name)
    assert run_ranks(2, module.main, []) == [0, 0]
    lines = capfd.readouterr().out.splitlines()
    assert lines and all(", 2 ranks: max error " in line and line.endswith(", ok") for line in lines), lines


def test_one_wrong_rank_fails_all(capfd: pytest.CaptureFixture[str]) -> None:
    common = load("common")

    def work() -> list[int]:
        rank, _ = common.ranks()
        nan = common.difference(common.poison(common.randn(3, seed=0)), common.randn(3, seed=0))
        return [
            common.report("a", 0.5 * (rank == 1), 1e-5),
            common.report("b", nan, 1e-5),
            common.report("c", 0.0, 0.0),
        ]

    assert run_ranks(3, work) == [[1, 1, 0]] * 3
    lines = capfd.readouterr().out.splitlines()
    assert lines == [
        "a, 3 ranks: max error 5.0e-01, MISMATCH, at most 1e-05 was expected",
        "b, 3 ranks: max error inf, MISMATCH, at most 1e-05 was expected",
        "c, 3 ranks: max error 0.0e+00, ok",
    ]


@pytest.mark.parametrize("n", [2, 4])
def test_ag_gemm_moves_no_byte_twice_and_computes_before_the_gather_ends(n: int) -> None:
    ag_gemm, timeline = load("08_ag_gemm"), load("timeline")
    M, N, K = 128, 256, 256

    def work() -> Any:
        ag_gemm.run(M, N, K, instrument=True)  # the first launch also pays for fresh pages
        timeline.clear()
        ag_gemm.run(M, N, K, seed=1, instrument=True)
        return timeline.collect()

    for t in run_ranks(n, work):
        assert t.sent == [[M * K * 2 * (a != b) for b in range(n)] for a in range(n)]
        assert max(t.first_product) < t.gather_ended
        assert min(t.early_products) > 0


def test_launch_runs_the_demo(tilescale_launch: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = tilescale_launch(2, EXAMPLES / "08_ag_gemm.py", "--m", 70, "--trace")
    assert done.returncode == 0, done.stderr
    assert "AG-GEMM, 140×256×512, 2 ranks: max error" in done.stdout and ", ok" in done.stdout
    assert "71680 bytes a pair of ranks moved once" in done.stdout
