"""From printed CUDA C++ to a cubin: nvcc, or NVRTC in this process. What the compiler says of the code comes
back about the kernel.

``TILESCALE_CUDA_COMPILER`` chooses; by default nvcc where there is one, else NVRTC. No fast math: divisions
and square roots are correctly rounded, denormals are kept; a·b + c may be contracted to a fused multiply-add.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tilescale import env
from tilescale.compiler.cuda import cubin
from tilescale.compiler.cuda.targets import check_arch
from tilescale.compiler.gpu.printed import Printed
from tilescale.errors import InternalError, Loc, TileError

INCLUDE = Path(__file__).resolve().parent / "include"
FLAGS = ("-std=c++17", "-lineinfo")
#: architectures whose own instructions (wgmma, setmaxnreg …) need the feature set of exactly that chip
_SPECIFIC = {90: "sm_90a", 100: "sm_100a", 103: "sm_103a", 120: "sm_120a"}


@dataclass(frozen=True)
class Resources:
    """What ptxas gave a kernel, in registers of 32 bits a thread and bytes. ``shared``: static, the arena not
    included. Spills are None where the compiler said nothing and the cubin, which does not tell them from the
    rest of the stack, is all there is."""

    registers: int
    spill_stores: int | None
    spill_loads: int | None
    stack: int
    shared: int

    def as_dict(self) -> dict[str, int]:
        """What is known."""
        return {k: v for k, v in asdict(self).items() if v is not None}


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel, its resources, the compiler's name and version, and what it said."""

    code: bytes
    resources: Resources
    compiler: str
    messages: str = ""

    @property
    def serialised(self) -> bool:
        """Whether ptxas makes each product of a warpgroup wait for the one before."""
        return "wgmma.mma_async instructions are serialized" in self.messages


def arch_of(major: int, minor: int) -> str:
    """The architecture to compile for on a GPU of this compute capability."""
    return _SPECIFIC.get(major * 10 + minor, f"sm_{major}{minor}")


# ---- which compiler


def find_nvcc() -> str | None:
    """nvcc's path: TILESCALE_CUDA_COMPILER where that is a path, else the PATH's, else CUDA_HOME's or
    /usr/local/cuda's."""
    asked = env.CUDA_COMPILER.get()
    if asked not in (None, "nvcc", "nvrtc"):
        return shutil.which(str(asked))
    homes = [
        os.path.join(home, "bin", "nvcc")
        for home in (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda")
        if home
    ]
    return next(filter(None, map(shutil.which, ("nvcc", *homes))), None)


def choose() -> str:
    """ "nvcc" or "nvrtc".

    Raises:
        TileError: neither is there, or the one that was asked for is not.
    """
    asked = env.CUDA_COMPILER.get()
    if asked == "nvrtc":
        from tilescale.compiler.cuda import nvrtc

        nvrtc.version()  # says what is missing
        return "nvrtc"
    if find_nvcc() is not None:
        return "nvcc"
    if asked is not None:
        raise TileError(
            f"TILESCALE_CUDA_COMPILER={asked}, and there is no such program", expected="a CUDA toolkit's nvcc"
        )
    from tilescale.compiler.cuda import nvrtc

    try:
        nvrtc.version()
    except TileError as error:
        raise TileError(
            "compiling for CUDA needs nvcc or NVRTC, and this machine has neither",
            expected=f"nvcc on the PATH or under CUDA_HOME; or NVRTC ({error.message})",
            hint="pip install cuda-python nvidia-cuda-nvrtc, or install the CUDA toolkit",
        ) from error
    return "nvrtc"


def toolkits() -> list[Path]:
    """Where a CUDA toolkit may lie: around nvcc, CUDA_HOME, /usr/local/cuda, NVIDIA's wheels."""
    nvcc = find_nvcc()
    homes = [Path(nvcc).resolve().parent.parent] if nvcc else []
    homes += [Path(home) for home in (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda") if home]
    spec = importlib.util.find_spec("nvidia")
    return (
        homes + [Path(folder, "cu13") for folder in (spec.submodule_search_locations or ()) if folder]
        if spec
        else homes
    )


def headers() -> Path | None:
    """The folder of CUDA's own headers, where there is one. nvcc knows it by itself; NVRTC brings none."""
    return next(
        (home / "include" for home in toolkits() if (home / "include" / "cuda_fp16.h").exists()), None
    )


@functools.cache
def _nvcc_version(path: str, stamp: int) -> str:
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"release [\d.]+, V([\d.]+)", done.stdout)
    if found is None:
        raise TileError(
            f"{path} --version says nothing known: {(done.stdout + done.stderr).strip()[:200]}",
            expected="NVIDIA's nvcc",
        )
    return f"nvcc {found[1]}"


def nvcc_version() -> str:
    """nvcc's name and version. Raises TileError where there is none."""
    path = find_nvcc()
    if path is None:
        raise TileError("there is no nvcc on this machine", expected="nvcc on the PATH or under CUDA_HOME")
    return _nvcc_version(path, os.stat(os.path.realpath(path)).st_mtime_ns)


def version() -> str:
    """The chosen compiler's name and version. Raises TileError where there is none."""
    if choose() == "nvcc":
        return nvcc_version()
    from tilescale.compiler.cuda import nvrtc

    return nvrtc.version()


@functools.lru_cache(maxsize=1)
def headers_hash() -> str:
    """Of our headers: part of what decides a cubin."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(INCLUDE.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(INCLUDE)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def fingerprint(arch: str) -> str:
    """Everything beside the kernel itself that decides its cubin: for the cache's key. nvcc counts by its
    file: asking it for its version takes longer than everything else in a warm start.

    Raises:
        TileError: there is no compiler.
    """
    if choose() == "nvcc":
        path = os.path.realpath(find_nvcc() or "")
        compiler = f"{path} {os.stat(path).st_size} {os.stat(path).st_mtime_ns}"
    else:
        compiler = version()
    return "\0".join(("cuda", arch, compiler, env.REMOTE.get(), *FLAGS, headers_hash()))


# ---- compiling


def compile_cubin(printed: Printed, arch: str) -> Cubin:
    """A kernel's cubin.

    Raises:
        TileError: there is no compiler.
        InternalError: the compiler refused the code; placed at the user's line that it was printed for.
    """
    check_arch(arch)
    if choose() == "nvrtc":
        from tilescale.compiler.cuda import nvrtc

        code, said = nvrtc.compile_code(printed, arch, ptx=False)
        return Cubin(code, resources_of(said, code, printed.name), nvrtc.version(), said)
    code, said = _nvcc(printed, arch, "-cubin", ("-Xptxas", "-v"))
    return Cubin(code, resources_of(said, code, printed.name), nvcc_version(), said)


def compile_ptx(printed: Printed, arch: str) -> str:
    """A kernel's PTX. Raises as `compile_cubin`."""
    check_arch(arch)
    if choose() == "nvrtc":
        from tilescale.compiler.cuda import nvrtc

        return nvrtc.compile_code(printed, arch, ptx=True)[0].decode().rstrip("\0")
    return _nvcc(printed, arch, "-ptx", ())[0].decode()


def _nvcc(printed: Printed, arch: str, what: str, more: Sequence[str]) -> tuple[bytes, str]:
    path = find_nvcc()
    assert path is not None
    with tempfile.TemporaryDirectory(prefix="tilescale-nvcc-") as folder:
        source, out = Path(folder, f"{printed.name}.cu"), Path(folder, "out")
        source.write_text(printed.text, encoding="utf-8")
        virtual = arch.replace("sm", "compute")
        gencode = f"-gencode=arch={virtual},code={arch if what == '-cubin' else virtual}"
        more = (*more, "-rdc=true") if printed.relocatable else more
        line = [path, *FLAGS, "-O3", gencode, f"-I{INCLUDE}", *more, what, "-o", str(out), source.name]
        done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
        said = done.stdout + done.stderr
        if done.returncode:
            raise refused(printed, said)
        return out.read_bytes(), said


def refused(printed: Printed, said: str) -> InternalError:
    """The compiler's first complaint as an error about the user's line, with the printed line that it was
    about."""
    found = re.search(r"\.cu\((\d+)\)(?::\s*|\s+)(?:catastrophic )?error\b:?\s*(.*)", said)
    if found is None:
        first = next(filter(None, printed.places), None)
        return InternalError(f"the CUDA compiler refused {printed.name}:\n{said.strip()[:4000]}", loc=first)
    number = int(found[1])
    shown = printed.text.splitlines()[number - 1].strip() if number <= len(printed.places) else ""
    return InternalError(
        f"the CUDA compiler refused the code of {printed.name}: {found[2].strip()}\n  in: {shown}",
        loc=place_of(printed, number),
    )


def place_of(printed: Printed, number: int) -> Loc | None:
    """The user's place behind a printed line (from 1): its own, or that of the last one before it that has
    any."""
    return next((p for p in reversed(printed.places[:number]) if p is not None), None)


# ---- what the code costs


def resources_of(said: str, code: bytes, name: str) -> Resources:
    """The figures of ``ptxas -v``; those of the cubin where ptxas said nothing, as under some versions of
    NVRTC.

    Raises:
        InternalError: neither tells of this kernel.
    """
    said = said[max(said.find(f"'{name}'"), 0) :]
    used = re.search(r"Used (\d+) registers", said)
    if used is None:
        return Resources(spill_stores=None, spill_loads=None, **cubin.figures(code, name))
    numbers = {
        key: int(m[1]) if (m := re.search(rf"(\d+) bytes {text}", said)) else 0
        for key, text in (
            ("stack", "stack frame"),
            ("spill_stores", "spill stores"),
            ("spill_loads", "spill loads"),
            ("shared", "smem"),
        )
    }
    return Resources(int(used[1]), **numbers)


@dataclass(frozen=True)
class Limits:
    """A multiprocessor, from the table of compute capabilities (CUDA C++ Programming Guide, "Technical
    Specifications")."""

    threads: int
    blocks: int
    shared: int
    registers: int = 65536
    warp_registers: int = 256  # registers are handed out in units of so many a warp
    reserved_shared: int = 1024  # bytes of each block that the system keeps


_LIMITS = {
    "sm_75": Limits(1024, 16, 65536, reserved_shared=0),
    "sm_80": Limits(2048, 32, 167936),
    "sm_86": Limits(1536, 16, 102400),
    "sm_87": Limits(1536, 16, 167936),
    "sm_89": Limits(1536, 24, 102400),
    "sm_90": Limits(2048, 32, 233472),
    "sm_100": Limits(2048, 32, 233472),
    "sm_103": Limits(2048, 32, 233472),
    "sm_120": Limits(1536, 24, 102400),
}


@dataclass(frozen=True)
class Occupancy:
    """How many blocks a multiprocessor holds, of how many threads it could hold that is, and what bounds
    it."""

    blocks: int
    fraction: float
    bound: str


def occupancy(r: Resources, arch: str, threads: int, shared_bytes: int) -> Occupancy | None:
    """Of a kernel with blocks of so many threads and an arena of so many bytes; None for an architecture that
    is not in the table."""
    limits = _LIMITS.get(arch.rstrip("af"))
    if limits is None:
        return None
    warps = -(-threads // 32)
    unit = limits.warp_registers
    per_warp = max(-(-r.registers * 32 // unit) * unit, unit)
    shared = -(-(shared_bytes + r.shared + limits.reserved_shared) // 128) * 128
    # Four schedulers share the registers: whole warps fit into a quarter each.
    by = {
        "threads": limits.threads // (warps * 32),
        "blocks": limits.blocks,
        "registers": limits.registers // 4 // per_warp * 4 // warps,
        "shared memory": limits.shared // shared if shared else limits.blocks,
    }
    bound = min(by, key=lambda k: by[k])
    return Occupancy(by[bound], by[bound] * warps * 32 / limits.threads, bound)


# ---- for people


def sass(code: bytes) -> str:
    """A cubin's machine code, by the toolkit's nvdisasm or cuobjdump.

    Raises:
        TileError: neither is there.
    """
    for name, options in (("nvdisasm", ("-c",)), ("cuobjdump", ("-sass",))):
        tool = next(
            filter(None, map(shutil.which, (name, *(str(home / "bin" / name) for home in toolkits())))), None
        )
        if tool is None:
            continue
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(code)
            file.flush()
            done = subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=False)
        if done.returncode:
            raise TileError(f"{tool} failed: {done.stderr.strip()}")
        return done.stdout
    raise TileError(
        "showing machine code needs nvdisasm or cuobjdump, and this machine has neither",
        expected="the CUDA toolkit's binary utilities on the PATH or beside nvcc",
        hint='get_kernel_source("ptx")',
    )
