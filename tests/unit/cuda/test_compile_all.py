"""Every kernel for Hopper and for Ampere: the compiler takes what is printed; on Hopper no register spills, and
the machine code has nothing of what `sass` finds. nvdisasm comes with the test requirements; where there is no
nvcc, nothing of this runs.

NVRTC compiles in half of nvcc's time. On Hopper, where ptxas decides whether products overlap, nvcc's has the
examples and the GEMMs as well, and under the marker slow every operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.cuda import sass
from tests.unit.cuda.corpus import cases_of_ops, kernels, kernels_of_case, printed
from tilescale.compiler.cuda import toolchain

ARCHS = ("sm_90a", "sm_80")
#: bytes that a thread may spill on Ampere, where nothing is tuned
SPILLED = 64
pytestmark = pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")


def judge(kernel: Any, arch: str) -> None:
    code = printed(kernel, arch)
    made = toolchain.compile_cubin(code, arch)
    assert (made.resources.spill_stores or 0) <= (0 if arch == "sm_90a" else SPILLED), made.resources
    assert not made.serialised, made.messages
    # What sass finds is about products of warpgroups, and local memory, which is counted in the stack. To start
    # nvdisasm takes as long as to compile a kernel.
    suspect = made.resources.stack or "wgmma.mma_async" in code.text
    if arch == "sm_90a" and suspect and sass.find_nvdisasm() is not None:
        assert sass.faults(sass.disassembled(made.code)) == []


@pytest.mark.parametrize(
    "arch, make",
    [pytest.param(a, make, id=f"{a}, {name}") for a in ARCHS for name, make in kernels(a).items()],
)
def test_examples_and_gemms(arch: str, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", "nvcc" if arch == "sm_90a" else "nvrtc")
    judge(make(), arch)


@pytest.mark.parametrize("compiler", ["nvrtc", pytest.param("nvcc", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "arch, op, case",
    [pytest.param(a, op, c, id=f"{a}, {name}") for a in ARCHS for name, op, c in cases_of_ops(a)],
)
def test_operations(arch: str, op: Any, case: Any, compiler: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", compiler)
    for kernel in kernels_of_case(op, case, monkeypatch, arch):
        judge(kernel, arch)
