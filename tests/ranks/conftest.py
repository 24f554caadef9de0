"""What tests on ranks share: kernels that LLVM need not optimise."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def unoptimised(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of many kernels that run for microseconds: to optimise them takes longer than the rest. Tests
    that are slow run optimised ones, and so do all where the environment asks for it."""
    if "TILESCALE_CPU_OPTIMIZE" not in os.environ and not request.node.get_closest_marker("slow"):
        monkeypatch.setenv("TILESCALE_CPU_OPTIMIZE", "0")
