"""The examples' kernels for GPUs: nvcc takes what is printed for Hopper and for Ampere, without spilling registers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels import refused
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.passes import pipeline
from tilescale.errors import TileSyntaxError

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
KERNELS = {
    "01_vector_add": ((1000,), {}),
    "02_gemm": ((400, 500), {}),
    "03_softmax": ((500, 1000), {}),
    "04_flash_attention": ((1, 4, 300, 64), {"causal": True}),
}


def prim_func(name: str, args: Any, options: Any) -> Any:
    """The example's kernel for these constants, traced afresh."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.kernel.__wrapped__(*args, **options)


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("name", KERNELS)
def test_examples_compile(name: str, arch: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", "nvcc")
    program, _ = pipeline.run(prim_func(name, *KERNELS[name]).trace(), passes=pipeline.gpu_passes(arch))
    made = toolchain.compile_cubin(print_kernel(Lowering(program, arch).run()), arch)
    assert made.resources.spill_stores == 0 and program.notes == []


def test_ranks_are_refused_by_name():
    ring = prim_func("05_ring_shift", (5000,), {}).trace()
    with refused(TileSyntaxError, 'T.Scale("device") is not there on the cuda target', write='target="cpu"'):
        program, _ = pipeline.run(ring, passes=pipeline.gpu_passes("sm_90a"))
        Lowering(program).run()
