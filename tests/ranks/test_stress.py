"""Many launches with delays (tests/gpu/stress.py) on processes: few of them, and what is wrong is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu import stress
from tests.ranks.harness import run_ranks
from tilescale import comm


def test_operations_among_one_another():
    done = run_ranks(2, stress.work, ["ranks.gather", "ranks.exchange", "ranks.reduce"], 12, timeout=120)
    assert all(len(found) == 4 for found in done)
    assert all(
        of == {"launches": 12, "wrong": 0, "verdict": "PASS"} for found in done for of in found.values()
    )


def tampered() -> dict[str, Any]:
    """As if rank 1 had got something else for one of its sets."""
    whole = stress.targets

    def some(module: str, device: str) -> Any:
        made = whole(module, device)
        if comm.rank() == 1:
            for target in (target for of in made.values() for target in of):
                target.want[0].view(torch.uint8)[-1] ^= 1
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stress, "targets", some)
        return stress.work(["ranks.exchange"], 60)


def test_one_wrong_bit_is_found():
    found = [next(iter(of.values())) for of in run_ranks(2, tampered, timeout=60)]
    assert found[0]["wrong"] == 0 and found[1]["wrong"] > 0 and found[1]["verdict"] == "FAIL"
