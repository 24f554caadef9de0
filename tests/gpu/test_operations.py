"""Every operation's lowering on the GPU itself, against the simulator: the emulator's tests, run where they
are meant for."""

from __future__ import annotations

import pytest

from tests.gpu import device
from tests.unit.cuda import test_emulated
from tests.unit.cuda.test_emulated import *  # noqa: F403


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' ``agree``, with the GPU in the emulator's place."""
    monkeypatch.setattr(test_emulated, "agree", device.agree)
