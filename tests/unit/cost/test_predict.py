"""Predicted times: their order against measured figures, and what they are refused for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.bench.bench_cost_model import RESULTS, compare
from tests.gpu.gemms import gemm
from tilescale.compiler import cost

H200 = cost.machine_of("sm_90a")


def predicted(*constants: Any, arch: str = "sm_90a", **more: Any) -> cost.Prediction:
    machine = cost.machine_of(arch)
    assert machine is not None
    return cost.predict(cost.count(gemm(*constants, **more).trace(), neighbours=machine.sms), machine, arch)


@pytest.mark.parametrize("held", ["gemm_configs", "gemm_configs_held_out"])
def test_the_order_agrees_with_what_was_measured(held: str):
    """Kendall's tau of at least 0.55 for every shape, and the best or one within 4 % of it among the
    predicted ten."""
    for figure in compare(json.loads((RESULTS / f"{held}.json").read_text())):
        assert figure["kendall_tau_b"] > 0.55 and figure["spearman_rho"] > 0.7, figure["shape"]
        assert figure["best_of_predicted_ten_over_best"] < 1.04, figure["shape"]


def test_shapes_that_nothing_was_fitted_to():
    """Within 10 % of what was measured, so that times of different shapes compare as well."""
    held = json.loads((RESULTS / "other_times.json").read_text())
    for f in (f for f in held["figures"] if f["kernel"] == "gemm"):
        M, N, K = f["shape"]
        *tile, panel, blocks = f["config"]
        assert predicted(M, N, K, *tile, panel=panel, blocks=blocks).seconds * 1e6 == pytest.approx(
            f["us"], rel=0.1
        ), f


def test_rows_that_begin_within_a_line_take_two():
    even, uneven = (
        cost.count(gemm(6000, N, K).trace(), neighbours=132) for N, K in ((4992, 3008), (5000, 3000))
    )
    assert not even.straddling and uneven.straddling == {"A", "B", "C"}
    assert (
        H200 is not None
        and cost.predict(uneven, H200, "sm_90a").seconds > 1.2 * cost.predict(even, H200, "sm_90a").seconds
    )


def test_what_does_not_fit_is_refused():
    p = predicted(4096, 4096, 4096, 256, 256, 64, 6)
    assert p.seconds == float("inf") and p.blocks == 0 and "bytes of shared memory" in p.refused


def test_more_stages_hide_latency_until_nothing_is_left_to_hide():
    times = [predicted(4096, 4096, 4096, 128, 128, 64, s).seconds for s in (2, 3, 4, 6)]
    assert times[0] > 1.5 * times[2] and times == sorted(times, reverse=True)


def test_spills_and_waves_cost():
    # 256 × 256 floats on 128 threads do not fit into registers
    assert (
        predicted(4096, 4096, 4096, 256, 256, 32, 2, 128).seconds
        > 2 * predicted(4096, 4096, 4096, 128, 256, 32, 2, 256).seconds
    )
    # 132 blocks, 144 blocks.
    one, two = (
        predicted(128 * 11, 256 * 12, 4096),
        predicted(128 * 12, 256 * 12, 4096),
    )
    assert two.seconds > 1.7 * one.seconds


def test_ampere_has_its_own_figures():
    assert (
        predicted(4096, 4096, 4096, 128, 128, 32, 3, 128, arch="sm_80").seconds
        > predicted(4096, 4096, 4096).seconds
    )
