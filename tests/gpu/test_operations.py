"""Every operation's lowering on the GPU itself, against the simulator: the emulator's tests, run where they are meant for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.device import run
from tests.unit.cuda import test_emulated
from tests.unit.cuda.emulated import same
from tests.unit.cuda.test_emulated import *  # noqa: F403
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

    monkeypatch.setattr(test_emulated, "agree", agree)
