"""NVSHMEM's device library: small wrappers of its calls (include/nvshmem/wrappers.cu), compiled once for an
architecture and kept, and linked to each kernel that calls them."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tilescale import env
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.toolchain import Cubin
from tilescale.errors import TileError

SOURCE = toolchain.INCLUDE / "nvshmem" / "wrappers.cu"


def home() -> Path:
    """Where NVSHMEM lies: NVSHMEM_HOME, or NVIDIA's wheel.

    Raises:
        TileError: nowhere.
    """
    asked = os.environ.get("NVSHMEM_HOME", "")
    spec = importlib.util.find_spec("nvidia")
    homes = [Path(asked)] if asked else []
    homes += (
        [Path(folder, "nvshmem") for folder in (spec.submodule_search_locations or ()) if folder]
        if spec
        else []
    )
    for found in homes:
        if (found / "lib" / "libnvshmem_device.a").exists() and (found / "include" / "nvshmemx.h").exists():
            return found
    raise TileError(
        "TILESCALE_REMOTE=nvshmem needs NVSHMEM's device library, which is not here",
        hint="pip install nvshmem4py-cu13 (nvidia-nvshmem-cu13 has the library), or set NVSHMEM_HOME",
    )


def linked(made: Cubin, arch: str) -> Cubin:
    """A kernel's cubin (compiled with ``-rdc=true``) with the wrappers and the library.

    Raises:
        TileError: NVSHMEM, nvcc or nvlink is missing, or one of them fails.
    """
    wrappers = _wrappers(arch)
    with tempfile.TemporaryDirectory(prefix="tilescale-nvlink-") as folder:
        kernel, out = Path(folder, "kernel.cubin"), Path(folder, "out.cubin")
        kernel.write_bytes(made.code)
        inputs = [str(kernel), str(wrappers), str(home() / "lib" / "libnvshmem_device.a")]
        _run([_tool("nvlink"), f"-arch={arch}", *inputs, "-o", str(out)], "linking NVSHMEM's device calls")
        return replace(made, code=out.read_bytes())


def _wrappers(arch: str) -> Path:
    """The wrappers' cubin in the cache; made where it is not there: seconds, once for an architecture and a
    library."""
    library = home() / "lib" / "libnvshmem_device.a"
    stamp = (
        f"{library} {library.stat().st_size} {library.stat().st_mtime_ns} {arch} {toolchain.nvcc_version()}"
    )
    key = hashlib.blake2b(SOURCE.read_bytes() + stamp.encode(), digest_size=16).hexdigest()
    path = env.CACHE_DIR.get() / "nvshmem" / f"{key}.cubin"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, aside = tempfile.mkstemp(suffix=".cubin", dir=path.parent)
    os.close(handle)
    try:
        virtual = arch.replace("sm", "compute")
        flags = ["-std=c++17", "-O3", "-rdc=true", f"-gencode=arch={virtual},code={arch}", "-cubin"]
        line = [_tool("nvcc"), *flags, f"-I{home() / 'include'}", "-o", aside, str(SOURCE)]
        _run(line, "compiling the wrappers of NVSHMEM's device calls")
        os.replace(aside, path)  # ranks that start at once each make it; whoever comes last replaces the same
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
    return path


def _tool(name: str) -> str:
    nvcc = toolchain.find_nvcc()
    beside = str(Path(os.path.realpath(nvcc)).parent / name) if nvcc else name
    found = nvcc if name == "nvcc" else shutil.which(beside) or shutil.which(name)
    if found is None:
        raise TileError(
            f"TILESCALE_REMOTE=nvshmem needs {name}", expected="a CUDA toolkit on the PATH or under CUDA_HOME"
        )
    return found


def _run(line: Sequence[str], what: str) -> None:
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TileError(f"{what} failed: {(done.stdout + done.stderr).strip()[:2000]}")
