"""Thread IR → LLVM → object file → shared object, for this machine's own processor."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tilescale import env
from tilescale.compiler.cpu.lets import bind_lets
from tilescale.compiler.cpu.masked_loops import has_masked_loop
from tilescale.compiler.cpu.opaque_calls import hide_from_analysis, show_again
from tilescale.compiler.cpu.ramps import fold_ramps
from tilescale.compiler.tvm_compat import transform, tvm
from tilescale.errors import InternalError, utf8
from tilescale.native import compiler as c_compiler

PrimFunc = Any


@dataclass(frozen=True)
class HostCPU:
    """The processor that we compile for: LLVM's name, the features that decide the shape of micro-kernels."""

    name: str
    features: frozenset[str]
    vector_bytes: int
    """Widest vector register that pays: 64 with AVX-512, 32 with AVX, else 16 (SSE, NEON)."""
    vector_registers: int

    def lanes(self, dtype: str) -> int:
        """Elements of ``dtype`` in one vector register."""
        return self.vector_bytes * 8 // int(tvm.DataType(dtype).bits)


@cache
def host_cpu() -> HostCPU:
    """This machine's processor as LLVM sees it ("native" is a name that TVM takes for a generic
    processor)."""
    name = str(tvm.get_global_func("tvm.codegen.llvm.GetHostCPUName")())
    found = tvm.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")()
    features = frozenset(str(key) for key, on in found.items() if bool(on))
    if "avx512f" in features:
        return HostCPU(name, features, 64, 32)
    if "avx" in features:
        return HostCPU(name, features, 32, 16)
    arm = "neon" in features or "fp-armv8" in features
    return HostCPU(name, features, 16, 32 if arm else 16)


@cache
def _llvm_target(level: int, scalar: bool) -> Any:
    options = {"cl-opt": ["-vectorize-loops:bool=false"]} if scalar else {}
    return tvm.target.Target({"kind": "llvm", "mcpu": host_cpu().name, "opt-level": level, **options})


def llvm_target(funcs: Mapping[str, PrimFunc]) -> Any:
    """The TVM target of `host_cpu`, for some functions. LLVM would keep to 256-bit vectors on some AVX-512
    processors; our vectors are explicit."""
    return _llvm_target(2 if env.CPU_OPTIMIZE.get() else 0, any(map(has_masked_loop, funcs.values())))


def passes() -> list[Any]:
    """The passes between thread IR and LLVM, in order."""
    # No FlattenBuffer: thread IR is flat already, and it would turn the ramps of local buffers into gathers.
    # No StmtSimplify: it copies the value of a binding to each of its uses, and nested ones grow without
    # bound.
    return [
        bind_lets(),  # before vectorisation, which refuses an expression that holds the same Let twice
        transform.VectorizeLoop(),  # loops marked VECTORIZED become vector expressions
        fold_ramps(),  # what became of their indices: LLVM is shown contiguous accesses
        hide_from_analysis(),
        transform.LowerIntrin(),  # what LLVM has an intrinsic for, floordiv to C's division
        show_again(),
    ]


def lower(funcs: Mapping[str, PrimFunc], target: Any = None) -> Any:
    """The IRModule that LLVM gets: every function under its plain C name. ``target``: theirs, where the
    caller has it.

    ``tirx.noalias`` is never set: under it TVM tells LLVM that no two buffers overlap, but buffers of ours
    share the arena.
    """
    target = target or llvm_target(funcs)
    ready = {}
    for name, func in funcs.items():
        func = func.without_attr("tirx.noalias") if "tirx.noalias" in (func.attrs or {}) else func
        ready[name] = func.with_attrs({"global_symbol": name, "calling_conv": 0, "target": target})
    module = tvm.IRModule(ready)
    for step in passes():
        module = step(module)
    return module


def llvm_module(funcs: Mapping[str, PrimFunc]) -> Any:
    """TVM's LLVM module of the functions, optimised."""
    target = llvm_target(funcs)
    return tvm.get_global_func("target.build.llvm")(lower(funcs, target), target)


def get_llvm_ir(funcs: Mapping[str, PrimFunc]) -> str:
    """The optimised LLVM IR, for people and tests."""
    return str(llvm_module(funcs).inspect_source("ll"))


def get_asm(funcs: Mapping[str, PrimFunc]) -> str:
    """The assembly of the functions, for people and tests."""
    return str(llvm_module(funcs).inspect_source("asm"))


@cache
def _linker() -> tuple[str, ...]:
    """The command that links: the C compiler, which knows where libm lies. It takes 10 ms."""
    return (*c_compiler(), "-shared", "-nostdlib", "-nostartfiles")


def build_shared(funcs: Mapping[str, PrimFunc], path: str | os.PathLike[str]) -> None:
    """Compiles functions of thread IR to the shared object ``path``, which appears there whole or not at all.

    The functions get plain C names and the C calling convention, and return int32. Symbols that they call and
    do not define (``ts_*``, ``memcpy``) are left to the dynamic loader.

    Raises:
        TileError: no C compiler, or the linker refused.
    """
    module = llvm_module(funcs)
    path = Path(path)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".link") as folder:
        obj, out = Path(folder, "kernel.o"), Path(folder, "kernel.so")
        module.write_to_file(utf8(str(obj)), "o")
        # libm: TVM has scalar calls (fmod, lgamma, …) without a vector form of ours; --as-needed drops it
        # where unused.
        command = [*_linker(), "-o", str(out), str(obj), "-Wl,--as-needed", "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise InternalError(f"linking a kernel failed: {' '.join(command)}\n{done.stderr.strip()}")
        os.replace(out, path)
