"""Random programs and the examples on the GPU itself, against the simulator."""

from __future__ import annotations

import pytest

from tests.gpu import device
from tests.unit.cuda import test_examples_compile, test_random_programs
from tests.unit.cuda.test_examples_compile import test_examples_on_the_emulated_gpu  # noqa: F401
from tests.unit.cuda.test_random_programs import test_random_programs as test_random_programs_on_the_gpu  # noqa: F401


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' ``agree``, with the GPU in the emulator's place."""
    monkeypatch.setattr(test_random_programs, "agree", device.agree)
    monkeypatch.setattr(test_examples_compile, "agree", device.agree)
