"""NVRTC through cuda-python: compiles in this process, without nvcc's start-up."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from tilescale.compiler.gpu.printed import Printed
from tilescale.errors import TileError


@functools.lru_cache(maxsize=1)
def _binding() -> Any:
    try:
        return importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise TileError(
            "NVRTC needs cuda-python, which is not installed", hint="pip install 'cuda-python>=13,<14'"
        ) from error


def _call(what: str, result: tuple[Any, ...]) -> Any:
    code, *values = result
    if int(code) != 0:
        raise TileError(f"NVRTC: {what} failed: {code}")
    return values[0] if values else None


@functools.lru_cache(maxsize=1)
def version() -> str:
    """NVRTC's name and version.

    Raises:
        TileError: cuda-python or the library libnvrtc.so is missing.
    """
    binding = _binding()
    try:
        code, major, minor = binding.nvrtcVersion()
    except Exception as error:  # cuda-python raises errors of several kinds where the library is missing
        said = str(error).splitlines()
        raise TileError(
            f"the library libnvrtc.so was not found: {said[0] if said else type(error).__name__}",
            hint="pip install nvidia-cuda-nvrtc",
        ) from error
    if int(code) != 0:
        raise TileError(f"NVRTC: nvrtcVersion failed: {code}")
    return f"nvrtc {major}.{minor}"


def compile_code(printed: Printed, arch: str, *, ptx: bool) -> tuple[bytes, str]:
    """A kernel's cubin or PTX, and what the compiler said.

    Raises:
        TileError: NVRTC or a header is missing. InternalError: it refused the code.
    """
    from tilescale.compiler.cuda import toolchain

    version()
    binding = _binding()
    headers = toolchain.headers()
    if headers is None and "#include <cuda_" in printed.text:
        raise TileError(
            "NVRTC finds no cuda_fp16.h, which this kernel needs",
            hint="pip install nvidia-cuda-runtime, or set CUDA_HOME",
        )
    target = arch.replace("sm", "compute") if ptx else arch
    options = [
        *toolchain.FLAGS,
        f"-arch={target}",
        "-default-device",
        f"-I{toolchain.INCLUDE}",
        "-Xptxas",
        "-v",
    ]
    options += [f"-I{headers}"] if headers is not None else []
    options += ["-rdc=true"] if printed.relocatable else []
    program = _call(
        "nvrtcCreateProgram",
        binding.nvrtcCreateProgram(printed.text.encode(), f"{printed.name}.cu".encode(), 0, [], []),
    )
    try:
        code = binding.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])[0]
        said = _bytes(binding, program, "ProgramLog").decode(errors="replace")
        if int(code) != 0:
            raise toolchain.refused(printed, said)
        return _bytes(binding, program, "PTX" if ptx else "CUBIN"), said
    finally:
        binding.nvrtcDestroyProgram(program)


def _bytes(binding: Any, program: Any, what: str) -> bytes:
    get_size, get = getattr(binding, f"nvrtcGet{what}Size"), getattr(binding, f"nvrtcGet{what}")
    out: bytes = b" " * _call(f"nvrtcGet{what}Size", get_size(program))
    _call(f"nvrtcGet{what}", get(program, out))
    return out.rstrip(b"\0") if what != "CUBIN" else out
