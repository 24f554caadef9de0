"""``target="cuda"`` without a GPU: kernels compile, are cached and can be looked at; calls say what is
missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tests.kernels import refused
from tests.runtime import with_runtime
from tilescale import cache, native
from tilescale.compiler.cuda import toolchain
from tilescale.errors import LaunchError, TileError, TileValueError

pytestmark = pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
no_gpu = pytest.mark.skipif(native.cuda_missing() == "", reason="this machine has a GPU")


@T.prim_func
def add(
    A: T.Tensor((T.dynamic("n"), 64), "float32"),
    B: T.Tensor((T.dynamic("n"), 64), "float32"),
    C: T.Tensor((T.dynamic("n"), 64), "float32"),
):
    with T.Kernel(T.ceildiv(A.shape[0], 32), threads=128) as bx:
        for i, j in T.Parallel(32, 64):
            C[bx * 32 + i, j] = A[bx * 32 + i, j] + B[bx * 32 + i, j]


@tilescale.jit(target="cuda:sm_80")
def factory(n: int):
    @T.prim_func
    def fill(A: T.Tensor((n,), "int32")):
        with T.Kernel(T.ceildiv(n, 128), threads=128) as bx:
            for i in T.Parallel(128):
                A[bx * 128 + i] = i

    return fill


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tilescale.compile(add, target="cuda:sm_90a")


def test_the_kernel_object(kernel: Any):
    assert (kernel.target, kernel.arch, kernel.inputs, kernel.symbols) == (
        "cuda",
        "sm_90a",
        ["A", "B", "C"],
        ["n"],
    )
    r = kernel.resources
    assert (
        0 < r["registers"] <= 128
        and r["threads"] == 128
        and 0 < r["occupancy"] <= 1
        and r["blocks"] >= 1
        and r["spill_stores"] == 0
    )


def test_its_texts(kernel: Any):
    code = kernel.get_kernel_source()
    assert (
        code == kernel.get_kernel_source("cuda")
        and 'extern "C" __global__ void __launch_bounds__(128) add(' in code
    )
    line = next(
        k
        for k, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if text.strip().startswith("C[bx")
    )
    assert (
        f"// {Path(__file__).name}:{line}  C[bx * 32 + i, j] = A[bx * 32 + i, j] + B[bx * 32 + i, j]" in code
    )
    assert ".visible .entry add(" in kernel.get_kernel_source("ptx")
    assert "ts.kernel" in kernel.get_kernel_source("tile") and "blockIdx.x" in kernel.get_kernel_source(
        "thread"
    )
    assert kernel.trace()[-1][0] == "lower:add"
    with refused(
        TileValueError, "get_kernel_source('llvm')", expected="tile, scheduled, thread, cuda, ptx, sass"
    ):
        kernel.get_kernel_source("llvm")


def test_machine_code(kernel: Any):
    try:
        text = kernel.get_kernel_source("sass")
    except TileError as error:
        assert "needs nvdisasm or cuobjdump" in str(error)
    else:
        assert "EXIT" in text


def test_it_is_cached_by_architecture(kernel: Any):
    assert tilescale.compile(add, target="cuda:sm_90a").from_cache
    other = tilescale.compile(add, target="cuda:sm_80")
    assert other.arch == "sm_80" and tilescale.compile(add, target="cuda:sm_80").from_cache
    assert factory(100).arch == "sm_80" and factory(100).name == "fill"


def test_the_source_lies_beside_the_code(kernel: Any):
    sources = [p.read_text() for p in cache.folder().glob("*/kernel.cu")]
    assert kernel.get_kernel_source() in sources


def test_a_warm_start_needs_neither_tvm_nor_nvcc(clean_env: dict[str, str], tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, tilescale, tilescale.language as T\n"
        "@T.prim_func\n"
        "def fill(A: T.Tensor((128,), 'int32')):\n"
        "    with T.Kernel(1, threads=128):\n"
        "        for i in T.Parallel(128):\n"
        "            A[i] = i\n"
        "k = tilescale.compile(fill, target='cuda:sm_80')\n"
        "print(k.from_cache, 'tvm' in sys.modules, 'torch' in sys.modules)\n"
    )
    env = clean_env | {"TILESCALE_CACHE_DIR": str(with_runtime(tmp_path / "cache"))}
    said = [
        subprocess.run(
            [sys.executable, str(program)], env=env, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    assert said == ["False True False\n", "True False False\n"]


@no_gpu
def test_a_call_without_a_gpu_says_so(kernel: Any):
    a = torch.zeros(4, 64)
    with refused(LaunchError, "add: this machine has no CUDA driver", write='target="cpu"'):
        kernel(a, a, a)
    with refused(LaunchError, "add: this machine has no CUDA driver"):
        kernel(*[np.zeros((4, 64), "float32")] * 3)


@no_gpu
def test_cuda_means_hopper_where_there_is_no_gpu():
    assert tilescale.compile(add, target="cuda").arch == "sm_90a"


def test_architectures_that_are_none():
    with refused(TileError, "the architecture 'volta'", expected="one such as sm_90a"):
        tilescale.compile(add, target="cuda:volta")


def test_what_is_compiled_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.setenv("TILESCALE_LOG", "info")
    monkeypatch.setenv("TILESCALE_CACHE_DIR", str(tmp_path))
    tilescale.compile(add, target="cuda:sm_90a")
    assert "compiled add for cuda:sm_90a by nv" in capsys.readouterr().err
