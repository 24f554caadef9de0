"""AG-GEMM (examples/08) on 2 and 4 ranks: what crosses between each pair of ranks, and when each computes and
sends.

Every byte of a rank's rows crosses to every other rank once; every rank has begun to compute before the
gather ends.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import tilescale.compiler.driver  # noqa: F401  # once here, not in each of the forked ranks
from tests.bench.record import record
from tests.examples.test_examples import load
from tests.ranks.harness import run_ranks

M, N, K = 256, 512, 512  # rows a rank, columns a rank, inner dimension


@pytest.mark.parametrize("ranks", [2, 4])
def test_ag_gemm_overlaps(ranks: int) -> None:
    ag_gemm, timeline = load("08_ag_gemm"), load("timeline")

    def work() -> Any:
        ag_gemm.run(M, N, K, instrument=True)  # the first launch also pays for fresh pages
        timeline.clear()
        error = ag_gemm.run(M, N, K, seed=1, instrument=True)
        return error, timeline.collect()

    results = run_ranks(ranks, work)
    assert max(error for error, _ in results) < 2e-2
    t = results[0][1]
    assert t.sent == [[M * K * 2 * (a != b) for b in range(ranks)] for a in range(ranks)]
    assert max(t.first_product) < t.gather_ended
    figures = {
        f"{key}_us" if key != "sent" and "early" not in key else key: value
        for key, value in dataclasses.asdict(t).items()
    }
    figures |= {"rows_columns_inner": [M, N, K], "gather_ended_us": t.gather_ended, "bytes_a_pair": M * K * 2}
    record(f"ag_gemm_{ranks}", figures)
    print(
        f"{ranks} ranks: first products at {t.first_product} µs, gather ended at {t.gather_ended} µs, early {t.early_products}"
    )
