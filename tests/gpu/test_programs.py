"""Random programs and the examples on the GPU itself, against the simulator."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.device import run
from tests.unit.cuda import test_examples_compile, test_random_programs
from tests.unit.cuda.emulated import same
from tests.unit.cuda.test_examples_compile import test_examples_on_the_emulated_gpu  # noqa: F401
from tests.unit.cuda.test_random_programs import test_random_programs as test_random_programs_on_the_gpu  # noqa: F401
from tilescale.compiler.sim.run import launch


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' ``agree``, with the GPU in the emulator's place."""

    def agree(kernel: Any, args: dict[str, Any], *, exact: bool = False, arch: str = "", seed: int = 0) -> dict[str, Any]:
        got = run(kernel, args)
        want = launch(kernel, 1, args).arrays[0]
        for name, array in got.items():
            same(array, want[name], name, exact)
        return got

    monkeypatch.setattr(test_random_programs, "agree", agree)
    monkeypatch.setattr(test_examples_compile, "agree", agree)
