"""Builds the C runtime once with the system's C compiler, loads it, and makes kernels' launchers.

A leaf: imports nothing of ours but ``tilescale.errors``, ``env``, ``log`` and ``folders``. Importing this
module is cheap; the library is built and loaded, and ``tvm_ffi`` imported, by the first call.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tilescale import env, folders, log
from tilescale.errors import TileError, utf8

HERE = Path(__file__).resolve().parent
SOURCES = (
    "report.c",
    "fiber.c",
    "pool.c",
    "sync.c",
    "packets.c",
    "check.c",
    "launch.c",
    "cuda.c",
    "gpu_graph.c",
    "gpu_log.c",
    "gpu_team.c",
    "heap.c",
    "team.c",
    "atomics.c",
)
# -fcf-protection=none: the context switch leaves a shadow stack behind, so the library must not be marked as
# fit for one.
FLAGS = (
    "-O2",
    "-std=gnu11",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-Wall",
    "-Wextra",
)
X86_FLAGS = ("-fcf-protection=none",)


def import_tvm_ffi() -> ModuleType:
    """``tvm_ffi``, without importing torch for its sake: its own import would, and that takes a second."""
    if "tvm_ffi" in sys.modules:
        return sys.modules["tvm_ffi"]
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import tvm_ffi
    finally:
        if hidden:
            del sys.modules["torch"]
    return tvm_ffi


def compiler() -> list[str]:
    """The C compiler's command: ``TILESCALE_CC``, else ``CC``, else ``cc`` or ``gcc`` or ``clang`` from the
    path.

    Raises TileError where there is none.
    """
    asked = env.CC.get() or shlex.split(os.environ.get("CC", ""))
    if asked:
        if shutil.which(asked[0]) is None:
            raise TileError(
                f"{shlex.join(asked)} (TILESCALE_CC or CC) is no program on this machine",
                expected="a C compiler",
            )
        return asked
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise TileError(
        "the CPU target builds a small C runtime once and found no C compiler",
        expected="cc, gcc or clang on the PATH, or TILESCALE_CC=/path/to/compiler",
        hint="apt-get install gcc libc6-dev (Debian, Ubuntu), dnf install gcc (Fedora), conda install -c "
        "conda-forge gcc",
    )


def _programs(command: list[str]) -> str:
    """Which compiler this is, by its file: asking it for its version takes as long as everything else in a
    warm start."""
    found = [path for word in command if (path := shutil.which(word))]
    return " ".join(f"{os.path.realpath(p)} {os.stat(p).st_size} {os.stat(p).st_mtime_ns}" for p in found)


def _tvm_ffi_root() -> Path:
    spec = importlib.util.find_spec("tvm_ffi")
    if spec is None or spec.origin is None:
        raise TileError("the package apache-tvm-ffi is not installed", hint="pip install apache-tvm-ffi")
    return Path(spec.origin).parent


def _sources() -> Any:
    h = hashlib.sha256()
    for name in ("ts_rt.h", "ts_heap.h", "ts_gpu.h", *SOURCES):
        h.update(name.encode() + b"\0" + (HERE / name).read_bytes())
    return h


def runtime_version() -> str:
    """What a built runtime must agree in to serve this TileScale: ``apache-tvm-ffi-<version> <hash of the
    runtime's sources>``."""
    return f"apache-tvm-ffi-{importlib.metadata.version('apache-tvm-ffi')} {_sources().hexdigest()[:20]}"


def _key(command: list[str]) -> str:
    h = _sources()
    import platform

    parts = [*command, *FLAGS, platform.machine(), _programs(command)]
    h.update("\0".join([*parts, importlib.metadata.version("apache-tvm-ffi")]).encode())
    return h.hexdigest()[:20]


def _compile(command: list[str], out: Path) -> None:
    import platform

    root = _tvm_ffi_root()
    extra = X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else ()
    with tempfile.TemporaryDirectory(dir=out.parent) as tmp:
        aside = Path(tmp) / out.name
        # No rpath: the loaded tvm_ffi of whichever environment runs this is found by its soname.
        line = [
            *command,
            *FLAGS,
            *extra,
            f"-I{root / 'include'}",
            *(str(HERE / s) for s in SOURCES),
            "-o",
            str(aside),
        ]
        line += [f"-L{root / 'lib'}", "-ltvm_ffi", "-ldl", "-lrt"]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode:
            raise TileError(
                f"the C runtime did not compile: {shlex.join(line)}\n{done.stderr.strip()}",
                expected="a working C11 compiler with the C library's headers",
                hint="apt-get install gcc libc6-dev, or point TILESCALE_CC to another compiler",
            )
        folders.keep_from_others(aside)
        # Its sum comes first: without the one the other counts as damaged, and both are the same whoever
        # builds.
        total = aside.with_suffix(".sum")
        total.write_text(hashlib.blake2b(aside.read_bytes(), digest_size=16).hexdigest())
        os.replace(total, _sum_of(out))
        os.replace(aside, out)


def library_path() -> Path:
    """Where the built runtime lies; builds it when this version of it has not been built yet.

    Several processes that start at once build once: the others wait for a file lock.
    """
    if _adopted is not None:
        return _adopted
    command = compiler()
    name = f"libts_rt-{_key(command)}.so"
    if (found := _built(name, quiet=True)) is not None:
        return found
    folder = folders.writable("native")
    with open(folder / "build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = _built(name)
        if found is None:
            found = folder / name
            _compile(command, found)
    return found


def _built(name: str, quiet: bool = False) -> Path | None:
    """A built runtime that is what was built, by this user or root; None where there is none. A damaged one
    would end the process (SIGBUS) where it is loaded. ``quiet``: who builds says why."""
    for folder in folders.readable("native"):
        path = folder / name
        try:
            why = folders.distrust(path.stat())
            if (
                not why
                and _sum_of(path).read_text()
                != hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
            ):
                why = "it is damaged"
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            why = str(error)
        if not why:
            return path
        if not quiet:
            log.say("warning", f"the runtime {path} is built again: {why}")
    return None


def _sum_of(path: Path) -> Path:
    return path.with_suffix(".sum")


def configure(local_ranks: int | None = None) -> None:
    """Reads TILESCALE_NUM_THREADS, TILESCALE_WAIT_TIMEOUT, TILESCALE_LAUNCH_GRAPHS and TILESCALE_SPARE
    (again) and hands them to the runtime.

    ``local_ranks``: how many ranks share this machine; by default what the launcher's environment says.
    """
    if local_ranks is None:
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    threads = env.NUM_THREADS.get() or max(1, len(os.sched_getaffinity(0)) // local_ranks)
    limit = int(env.WAIT_TIMEOUT.get() * 1e9)
    library().ts_configure(
        ctypes.c_int32(threads),
        ctypes.c_int64(limit),
        ctypes.c_int32(env.LAUNCH_GRAPHS.get()),
        ctypes.c_int32(env.SPARE.get()),
    )


_lib: ctypes.CDLL | None = None
_adopted: Path | None = None  # a runtime that was built elsewhere, from these sources


def adopt(path: Path) -> None:
    """Uses a built runtime of this very `runtime_version`, so that no compiler is needed. One that is loaded
    already stays: a process has one, since kernels find its functions by name.

    Raises:
        OSError: it does not load on this machine.
    """
    global _adopted
    if _lib is not None or _adopted is not None:
        return
    _adopted = path
    try:
        library()
    except OSError:
        _adopted = None
        raise


def library() -> ctypes.CDLL:
    """The runtime, loaded with its symbols global so that kernels find them. Does not import ``tvm_ffi``."""
    global _lib
    if _lib is None:
        path = library_path()
        if "tvm_ffi" not in sys.modules:
            # The runtime needs libtvm_ffi; tvm_ffi's own import will load the same file again, which is then
            # the same library.
            ctypes.CDLL(str(_tvm_ffi_root() / "lib" / "libtvm_ffi.so"), mode=ctypes.RTLD_GLOBAL)
        _lib = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        _lib.ts_configure.restype = None
        for name in ("ts_heap_control_bytes", "ts_heap_base", "ts_gpu_control_bytes", "ts_stop_word"):
            getattr(_lib, name).restype = ctypes.c_int64
        configure()
    return _lib


_module: Any = None
kernels: dict[int, tuple[str, list[str]]] = {}  # a kernel's number → its name and its lines of sites


def _ffi_module() -> Any:
    global _module
    if _module is None:
        tvm_ffi = import_tvm_ffi()
        library()
        _module = tvm_ffi.load_module(utf8(str(library_path())))
    return _module


def make_kernel(path: str | os.PathLike[str], desc: bytes, sites: str, name: str) -> Callable[..., None]:
    """A launcher for the compiled kernel in the shared object ``path``: a ``tvm_ffi.Function`` that takes
    tensors and scalars.

    ``desc`` and ``sites`` are docs/RUNTIME.md's, "The runtime's contract". Lines ``param|NAME|||`` at
    the end of ``sites`` name the parameters in order, for reports. ``name`` is the kernel's; constants in
    parentheses after it, as in ``gemm(BM=64)``, let ranks that launched different constants be told so.

    Calls raise TypeError and ValueError with ``TS:<check>:…`` for arguments, RuntimeError with
    ``TS:run:<site>:…`` for a launch that failed. Raises RuntimeError when the shared object or the
    description does not fit.
    """
    module = _ffi_module()
    f = module.make_kernel(utf8(os.fspath(path)), desc, utf8(sites), utf8(name))
    kernels[module.last_kernel_id()] = (name, sites.split("\n"))
    return f


def make_cuda_kernel(
    code: bytes, desc: bytes, name: str, symbol: str, sites: str = ""
) -> Callable[..., None]:
    """A launcher of the function ``symbol`` in a cubin: a ``tvm_ffi.Function`` that takes tensors on a GPU
    and scalars, and returns when the launch is on the current stream.

    ``desc`` is tilescale/native/cuda.c's. The GPU's driver is opened by the first call; the code is loaded by
    the first on a device. ``sites`` are as in `make_kernel`. Calls raise as `make_kernel`'s do; RuntimeError
    with ``TS:run:-1:…`` where the driver is missing or refuses the launch, with
    ``TS:failed:<kernel>|<file>|<line>|<message>`` where it does since a kernel has failed.
    """
    module = _ffi_module()
    f = module.make_cuda_kernel(code, desc, utf8(name), symbol, utf8(sites))
    kernels[module.last_kernel_id()] = (name, sites.split("\n"))
    return f


def cuda_synchronize() -> None:
    """Waits for the current GPU. Raises RuntimeError, as `make_cuda_kernel`'s calls do."""
    _ffi_module().cuda_synchronize()


def cuda_failure() -> str:
    """The text of a failure that a kernel recorded and no call has raised yet, once; empty where there is
    none."""
    return str(_ffi_module().cuda_failure())


def cuda_missing() -> str:
    """Why CUDA kernels cannot be launched on this machine; empty where they can."""
    return str(_ffi_module().cuda_missing())


def cuda_capability(device: int = 0) -> tuple[int, int] | None:
    """The compute capability of a GPU; None where there is none."""
    found = int(_ffi_module().cuda_capability(device))
    return divmod(found, 10) if found else None


def retype(array: Any, code: int, bits: int) -> Any:
    """A kernel argument that is ``array``'s memory (anything DLPack) under the dtype that DLPack calls
    ``code``, ``bits``.

    For dtypes that the array's own library cannot hand over: ``retype(x.view(numpy.uint16), 4, 16)`` is a
    bfloat16 argument.
    """
    module = _ffi_module()
    return module.retype(import_tvm_ffi().from_dlpack(array), code, bits)
