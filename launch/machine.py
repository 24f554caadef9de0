"""What this machine has: facts alone, as plain dictionaries. Nothing here imports torch or TVM, or opens a
GPU."""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tilescale import env, folders
from tilescale.errors import TileError

Fact = dict[str, Any]

# What matters to the micro-kernels; flags of /proc/cpuinfo on x86 and Arm.
FEATURES = re.compile(
    r"(avx|avx2|fma|f16c|avx512\w+|avx_vnni|avx10\w*|amx_\w+|asimd|asimdhp|bf16|i8mm|sve|sve2|sme|sme2)"
)
PACKAGES = (
    "torch",
    "apache-tvm",
    "apache-tvm-ffi",
    "numpy",
    "ml_dtypes",
    "mpi4py",
    "mpich",
    "cuda-python",
    "matplotlib",
)
GPU_FIELDS = {
    "name": "name",
    "memory": "memory.total",
    "capability": "compute_cap",
    "driver": "driver_version",
}
NVSHMEM = ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")
NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
LIBRARIES = {
    "libcuda": "libcuda.so.1",
    "nccl": "libnccl.so.2",
    "nvshmem": "libnvshmem_host.so.3",
    "rccl": "librccl.so.1",
    "rocshmem": "librocshmem.so",
}
TIMEOUT = 20.0  # seconds; the first nvidia-smi after a boot wakes every GPU

# What a machine without the file, the tool or the permission raises: a fact about it, not a bug here.
ODD = (OSError, ValueError, LookupError, subprocess.SubprocessError, TileError)


def collect() -> Fact:
    """All facts. A probe that finds its file or tool broken leaves ``{"error": …}``."""
    probes: dict[str, Callable[[], Any]] = {
        "system": system,
        "processor": processor,
        "memory": memory,
        "nvidia": nvidia,
        "amd": amd,
        "compilers": compilers,
        "libraries": libraries,
        "packages": packages,
        "mpiexec": lambda: tool("mpiexec"),
        "environment": environment,
        "cache": cache,
    }
    with ThreadPoolExecutor(len(probes)) as pool:
        return dict(zip(probes, pool.map(_safely, probes.values()), strict=True))


def _safely(probe: Callable[[], Any]) -> Any:
    try:
        return probe()
    except ODD as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _output(*command: str) -> str:
    """What a command prints, also to stderr; raises as subprocess.run does where it cannot run, fails or
    hangs."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIMEOUT,
        check=True,
    )
    return done.stdout.decode(errors="replace")


def system() -> Fact:
    return {
        "os": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "executable": sys.executable,
    }


def processor() -> Fact:
    text = Path("/proc/cpuinfo").read_text()
    fields = dict(re.findall(r"^(.*?)\s*:\s*(.*)$", text, re.MULTILINE))
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return {
        "model": fields.get("model name") or fields.get("CPU part") or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "features": sorted(flag for flag in set(flags) if FEATURES.fullmatch(flag)),
    }


def memory() -> Fact:
    """Bytes. ``shm`` is what the ranks' symmetric heaps live in."""
    info = dict(re.findall(r"^(\w+):\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    fact: Fact = {"total": int(info["MemTotal"]) << 10, "available": int(info["MemAvailable"]) << 10}
    if os.path.isdir("/dev/shm"):
        shm = shutil.disk_usage("/dev/shm")
        fact |= {"shm_total": shm.total, "shm_free": shm.free, "shm_writable": os.access("/dev/shm", os.W_OK)}
    return fact


def nvidia() -> Fact:
    """The GPUs that the driver shows, and how each pair is linked (NV18: 18 NVLinks; PIX … SYS: PCIe, near to
    far)."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        # A container without the tool: the driver's own files name the GPUs at least.
        files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        names = [
            match[1]
            for file in files
            if (match := re.search(r"^Model:\s*(.*)$", file.read_text(), re.MULTILINE))
        ]
        return {"gpus": [{"name": name} for name in names], "links": {}}
    rows = (
        _output(smi, f"--query-gpu={','.join(GPU_FIELDS.values())}", "--format=csv,noheader")
        .strip()
        .splitlines()
    )
    gpus = [dict(zip(GPU_FIELDS, row.split(", "), strict=True)) for row in rows]
    return {"gpus": gpus, "links": links(_output(smi, "topo", "-m"), len(gpus)) if len(gpus) > 1 else {}}


def links(text: str, count: int) -> dict[str, str]:
    """``{"0-1": "NV18"}`` for ``count`` GPUs from the matrix that `nvidia-smi topo -m` prints; its further
    columns are NICs."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    found = {}
    for line in text.splitlines():
        if match := re.match(r"GPU(\d+)\s+(.*)", line):
            row, words = int(match[1]), match[2].split()[:count]
            found.update({f"{row}-{column}": word for column, word in enumerate(words) if row < column})
    return found


def amd() -> Fact:
    """AMD GPUs, as their kernel driver lists them: gfx90a, gfx942."""
    gpus = []
    for path in sorted(Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        version = re.search(r"^gfx_target_version (\d+)$", path.read_text(), re.MULTILINE)
        if version and int(version[1]):  # 0: a processor
            number = int(version[1])  # 90402 → gfx942: major, two digits of minor, two of stepping
            gpus.append({"name": f"gfx{number // 10000}{number // 100 % 100:x}{number % 100:x}"})
    return {"gpus": gpus}


def compilers() -> Fact:
    """Command and first telling line of each, None where there is none."""
    configured = _safely(env.CC.get)
    if isinstance(configured, dict):  # the variable itself is broken: say so
        cc: Fact | None = configured
    else:
        names = (
            [configured[0]] if configured else [*filter(None, [os.environ.get("CC")]), "cc", "gcc", "clang"]
        )
        cc = next((found for name in names if (found := tool(name))), None)
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    rocm = os.environ.get("ROCM_PATH", "/opt/rocm")
    return {"cc": cc, "nvcc": tool("nvcc", f"{cuda}/bin"), "hipcc": tool("hipcc", f"{rocm}/bin")}


def tool(name: str, folder: str | None = None) -> Fact | None:
    """Path and version line of a command on the PATH, beside this Python or in ``folder``."""
    beside = str(Path(sys.executable).parent)
    places = os.pathsep.join(filter(None, [os.environ.get("PATH", os.defpath), beside, folder]))
    path = shutil.which(name, path=places)
    if path is None:
        return None
    version = _safely(lambda: _version_line(_output(path, "--version")))
    return {"path": path, "version": version if isinstance(version, str) else version["error"]}


def _version_line(text: str) -> str:
    """The first line with a version number, the release where it is named so (nvcc's first lines are
    copyright)."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for pattern in (r"release \d", r"[Vv]ersion:?\s+\d", r"\d+\.\d+"):
        for line in lines:
            if re.search(pattern, line):
                return re.sub(r"\s+", " ", line)
    return lines[0] if lines else "unknown"


def libraries() -> Fact:
    """The linker's own list: what it can load, and from where; wheels bring further ones (packages)."""
    ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"
    text = _output(ldconfig, "-p")
    found = {}
    for key, name in LIBRARIES.items():
        match = re.search(rf"^\s*{re.escape(name)}\b.*=> (.*)$", text, re.MULTILINE)
        found[key] = match[1] if match else None
    return found


def packages() -> Fact:
    """Installed versions, None where absent; ``pins`` is what this version of ours demands exactly."""
    found: Fact = {name: _version(name) for name in (*PACKAGES, "nvshmem4py-cu13", *NVSHMEM, *NCCL)}
    found["torch_cuda"] = _torch_cuda()
    found["pins"] = pins()
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def pins() -> dict[str, str]:
    """``{"apache-tvm": "0.27.0.post1", …}``, from the installed metadata, or a checkout's pyproject.toml."""
    try:
        text = "\n".join(importlib.metadata.requires("tilescale") or [])
    except importlib.metadata.PackageNotFoundError:
        text = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text()
    return dict(re.findall(r"^[ \"]*(apache-tvm[a-z-]*)==([\w.]+)", text, re.MULTILINE))


def _torch_cuda() -> str | None:
    """The CUDA (or HIP) that torch was built for, read from its sources: importing it takes a second."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text()
    match = re.search(r"^(cuda|hip)\b[^=]*=\s*'([\d.]+)", text, re.MULTILINE)
    return f"{match[1]} {match[2]}" if match else None


def cache() -> Fact:
    """Whether compiled code can be kept, tried: a file is written, read back and locked. ``why`` is empty
    where it can."""
    folder = env.CACHE_DIR.get()
    fact: Fact = {"folder": str(folder), "why": folders.unusable("kernels"), "locks": False}
    if fact["why"]:
        fact["why"] += "; each process compiles for itself"
        return fact
    data = os.urandom(4096)
    with tempfile.NamedTemporaryFile(dir=folder / "kernels", prefix=".new-") as file:
        file.write(data)
        file.flush()
        if Path(file.name).read_bytes() != data:
            fact["why"] = "what was written is not what is read"
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fact["locks"] = True
        except OSError as error:
            fact["why"] = (
                f"no file locks ({error.strerror}): processes that start together compile each for itself"
            )
    return fact


def environment() -> Fact:
    """Our variables, those of them that are set, and those that nothing reads."""
    variables = [
        {"name": v.name, "value": _plain(_safely(v.get)), "expected": v.expected, "doc": v.doc}
        for v in env.ALL
    ]
    return {
        "variables": variables,
        "set": {v.name: os.environ[v.name] for v in env.ALL if v.name in os.environ},
        "unknown": env.unknown(),
    }


def _plain(value: Any) -> Any:
    """A variable's value, or its error, for JSON."""
    return (
        value
        if isinstance(value, (int, float, bool, type(None), dict))
        else " ".join(value)
        if isinstance(value, list)
        else str(value)
    )
