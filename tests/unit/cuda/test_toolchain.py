"""nvcc and NVRTC: what is printed compiles, figures are read, complaints come back about the kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import tilescale
from tests.gpu.gemms import gemm
from tests.unit.cuda import thread_kernels as tk
from tests.unit.cuda.test_printer import CASES, STORED, math, printer
from tilescale.compiler.cuda import nvrtc, targets, toolchain
from tilescale.compiler.cuda.printer import CudaPrinter, print_kernel
from tilescale.compiler.cuda.toolchain import Resources
from tilescale.compiler.gpu.printed import Printed
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import InternalError, TileError

needs_nvcc = pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
ARCHES = ("sm_90a", "sm_80")


def missing_nvrtc() -> str | None:
    try:
        nvrtc.version()
    except TileError as error:
        return error.message
    return None if toolchain.headers() is not None else "there are no headers of CUDA's own"


needs_nvrtc = pytest.mark.skipif(missing_nvrtc() is not None, reason=f"no NVRTC: {missing_nvrtc()}")


def everything() -> Any:
    """One kernel with every function and every conversion, so that one run of the compiler sees them all."""
    out = tk.pointer("out", "float64")
    inputs = {dt: tk.pointer(f"in_{dt}", dt) for dt in CudaPrinter.types}
    floats = ("float32", "float64", "float16")
    values = []
    unknown = {
        "expm1",
        "fabs",
        "rint",
        "lgamma",
        "tgamma",
        "remainder",
        "nextafter",
        "abs",
        "__tanh",
        "dp4a",  # of integers (tests/unit/ops)
    }
    two = {"pow", "fmod", "atan2", "copysign", "hypot", "fmax", "fmin", "ieee_add", "ieee_sub", "ieee_mul"}
    for name in (
        CudaPrinter.functions.keys() - unknown
    ):  # of the rest tirx has operations, and the language none
        arity = 3 if name == "fma" else 2 if name in two else 1
        values += [math(name, *[tk.load(inputs[dt], 0)] * arity) for dt in floats]
    numbers = list(CudaPrinter.types)
    values += [tirx.Cast(to, tk.load(inputs[src], 1)) for src in numbers for to in numbers if to != src]
    body = tirx.SeqStmt(
        [
            tk.store(out, k, v if str(v.ty) == "float64" else tirx.Cast("float64", v))
            for k, v in enumerate(values)
        ]
    )
    return tk.kernel("everything", [*inputs.values(), out], body)


@needs_nvcc
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", ["scale", "staged"])
def test_kernels_compile(name: str, arch: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", "nvcc")
    made = toolchain.compile_cubin(print_kernel(getattr(tk, name)()), arch)
    assert made.code.startswith(b"\x7fELF") and made.compiler.startswith("nvcc ")
    assert (
        0 < made.resources.registers <= 40 and made.resources.spill_stores == made.resources.spill_loads == 0
    )


@needs_nvcc
@pytest.mark.parametrize("arch", ARCHES)
def test_every_function_and_conversion_compiles(arch: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", "nvcc")
    ptx = toolchain.compile_ptx(print_kernel(everything()), arch)
    assert f".target {arch}" in ptx


@needs_nvcc
def test_every_expression_of_the_printers_tests_compiles(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", "nvcc")
    p = printer()
    lines = [p.value(e) for e, text in CASES if "ts::f" not in text and "ts::g" not in text] + [
        p.stored(e) for e, _ in STORED
    ]
    types = {
        "A": "float*",
        "H": "half*",
        "BF": "nv_bfloat16*",
        "E4": "ts::e4m3*",
        "i": "int",
        "j": "int",
        "n": "int",
        "w": "int64_t",
        "u": "uint32_t",
        "b": "int8_t",
        "x": "float",
        "d": "double",
        "p": "bool",
        "h": "float",
    }
    head = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n#include <ts/ts.cuh>\n#include <stdio.h>\n"
    text = f'{head}extern "C" __global__ void k({", ".join(f"{t} {v}" for v, t in types.items())}) {{\n'
    text += "".join(f"  auto v{k} = {line};\n" for k, line in enumerate(lines)) + "}\n"
    toolchain.compile_ptx(Printed(text, "k", (None,) * text.count("\n")), "sm_90a")


@needs_nvcc
def test_a_complaint_of_the_compiler_is_placed_in_the_kernel(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", "nvcc")
    _complain(tmp_path)


@needs_nvrtc
def test_nvrtc_makes_the_same(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", "nvrtc")
    made = toolchain.compile_cubin(print_kernel(tk.staged()), "sm_90a")
    assert (
        made.code.startswith(b"\x7fELF")
        and made.compiler.startswith("nvrtc ")
        and made.resources.registers > 0
    )
    assert ".target sm_80" in toolchain.compile_ptx(print_kernel(everything()), "sm_80")
    _complain(tmp_path)


def _complain(folder: Any) -> None:
    source = folder / "own.py"
    source.write_text("\n\nC[tx] = nothing(A[tx])\n")
    A, C = tk.pointer("A", "float32"), tk.pointer("C", "float32")
    body = tk.store(C, 0, tirx.call_extern("float32", "ts::nothing", tk.load(A, 0)), tk.span(3, str(source)))
    with pytest.raises(InternalError, match="nothing") as caught:
        toolchain.compile_cubin(print_kernel(tk.kernel("k", [A, C], body)), "sm_90a")
    assert caught.value.loc is not None and (caught.value.loc.file, caught.value.loc.line) == (str(source), 3)
    assert "in: C[0] = ts::nothing(A[0]);" in str(caught.value)


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", str(tmp_path / "nvcc"))
    with pytest.raises(TileError, match="there is no such program"):
        toolchain.version()
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", "nvrtc")
    monkeypatch.setattr(nvrtc, "version", lambda: (_ for _ in ()).throw(TileError("no library")))
    with pytest.raises(TileError, match="no library"):
        toolchain.version()
    monkeypatch.delenv("TILESCALE_CUDA_COMPILER")
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    with pytest.raises(TileError, match="this machine has neither"):
        toolchain.choose()


@pytest.mark.parametrize("arch", ["90a", "sm_70", "sm90", "gfx942"])
def test_architectures_that_are_none(arch: str):
    with pytest.raises(TileError):
        targets.check_arch(arch)


def test_the_oldest_architecture():
    """CUDA 13's nvcc has none older (`nvcc --list-gpu-arch`); there products are computed by the threads
    themselves."""
    with pytest.raises(
        TileError, match="sm_70 is not compiled for: CUDA 13's nvcc and NVRTC begin at sm_75"
    ) as refused:
        targets.check_arch("sm_70")
    assert "sm_75 or newer" in str(refused.value) and targets.check_arch("sm_75") == "sm_75"


@needs_nvcc
def test_products_of_the_oldest_architecture():
    text = tilescale.compile(gemm(256, 256, 256, 64, 64, 32, 2, 128), target="cuda:sm_75").get_kernel_source(
        "cuda"
    )
    assert "mma" not in text and "cp_async" not in text


def test_architectures_of_compute_capabilities():
    assert [toolchain.arch_of(*c) for c in ((9, 0), (8, 0), (8, 9), (10, 0))] == [
        "sm_90a",
        "sm_80",
        "sm_89",
        "sm_100a",
    ]


SAID = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'other' for 'sm_90a'
ptxas info    : Function properties for other
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
ptxas info    : Compiling entry function 'gemm' for 'sm_90a'
ptxas info    : Function properties for gemm
    40 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers, 40 bytes cumulative stack size, 512 bytes smem
"""


def test_figures_of_ptxas():
    assert toolchain.resources_of(SAID, b"", "gemm") == Resources(168, 12, 16, 40, 512)
    with pytest.raises(InternalError, match="no 64-bit ELF file"):
        toolchain.resources_of("nothing", b"nothing", "gemm")


STATIC = """\
extern "C" __global__ void other(float* a) { a[0] = 1; }
extern "C" __global__ void __launch_bounds__(128) own(float* a, int n) {
  __shared__ float t[300];
  float many[64];
  for (int i = 0; i < n; i++) many[i % 64] = a[i];
  t[threadIdx.x] = a[threadIdx.x];
  __syncthreads();
  a[threadIdx.x] = t[(threadIdx.x + 1) % 300] + many[n % 64];
}
"""


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_figures_of_a_cubin_are_those_of_ptxas(arch: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", "nvcc")
    made = toolchain.compile_cubin(Printed(STATIC, "own", (None,) * STATIC.count("\n")), arch)
    silent = toolchain.resources_of("", made.code, "own")
    assert made.resources.stack >= 256 and made.resources.shared == 1200
    assert silent == replace(made.resources, spill_stores=None, spill_loads=None)
    assert (
        "spill_stores" not in silent.as_dict() and silent.as_dict()["registers"] == made.resources.registers
    )
    with pytest.raises(InternalError, match="nothing of the registers of absent"):
        toolchain.resources_of("", made.code, "absent")


# From NVIDIA's occupancy calculator (cuda_occupancy.h) for these kernels.
@pytest.mark.parametrize(
    "registers, arch, threads, shared, blocks, bound",
    [
        (32, "sm_90a", 128, 0, 16, "threads"), (168, "sm_90a", 384, 200 << 10, 1, "registers"), (64, "sm_90a", 256, 0, 4, "registers"),
        (32, "sm_90a", 128, 48 << 10, 4, "shared memory"), (32, "sm_80", 32, 0, 32, "blocks"), (40, "sm_80", 128, 0, 12, "registers"),
        (32, "sm_80", 128, 80 << 10, 2, "shared memory"),
    ],
)  # fmt: skip
def test_occupancy(registers: int, arch: str, threads: int, shared: int, blocks: int, bound: str):
    got = toolchain.occupancy(Resources(registers, 0, 0, 0, 0), arch, threads, shared)
    assert got is not None and (got.blocks, got.bound) == (blocks, bound)


def test_occupancy_of_an_unknown_architecture_is_not_guessed():
    assert toolchain.occupancy(Resources(32, 0, 0, 0, 0), "sm_999", 128, 0) is None


@pytest.mark.parametrize("compiler", ["nvcc", "nvrtc"])
def test_the_key_has_all_that_decides_the_code(compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("one")
    monkeypatch.setattr(toolchain, "choose", lambda: compiler)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: str(nvcc))
    monkeypatch.setattr(toolchain, "version", lambda: "nvrtc 13.0")
    seen = [toolchain.fingerprint("sm_90a"), toolchain.fingerprint("sm_80")]
    monkeypatch.setattr(toolchain, "version", lambda: "nvrtc 13.1")
    nvcc.write_text("another")
    seen.append(toolchain.fingerprint("sm_90a"))
    monkeypatch.setattr(toolchain, "headers_hash", lambda: "other")
    seen.append(toolchain.fingerprint("sm_90a"))
    assert len(set(seen)) == 4
