"""Every kernel for Hopper and for Ampere: nvcc takes what is printed, without spilling registers, and the machine code has nothing of what
`sass` finds. nvdisasm comes with the test requirements; where there is no nvcc, nothing of this runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.cuda import sass
from tests.unit.cuda.corpus import compiled, kernels
from tilescale.compiler.cuda import toolchain

CASES = [pytest.param(arch, make, id=f"{arch}, {name}") for arch in ("sm_90a", "sm_80") for name, make in kernels(arch).items()]


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
@pytest.mark.parametrize("arch, make", CASES)
def test_compiles(arch: str, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", "nvcc")
    made = compiled(make(), arch)
    assert made.resources.spill_stores == 0 and made.resources.stack == 0, made.resources
    assert not made.serialised, made.messages
    if sass.find_nvdisasm() is not None:
        assert sass.faults(sass.disassembled(made.code)) == []
