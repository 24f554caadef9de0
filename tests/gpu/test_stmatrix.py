"""Fragments stored by stmatrix on a Hopper GPU, against the simulator."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import device
from tests.unit.cuda import test_stmatrix
from tests.unit.cuda.test_stmatrix import test_stores as test_stores_on_the_gpu  # noqa: F401
from tests.unit.cuda.test_stmatrix import test_what_goes_otherwise as test_what_goes_otherwise_on_the_gpu  # noqa: F401

torch: Any = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' ``agree``, with the GPU in the emulator's place."""
    monkeypatch.setattr(test_stmatrix, "agree", device.agree)
