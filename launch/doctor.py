"""`tilescale doctor`: what this machine has, and for each feature whether it is ready or what to install."""

from __future__ import annotations

import importlib.util
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import click

from tilescale import env
from tilescale.launch import machine
from tilescale.launch.machine import Fact

SHM_ENOUGH = 256 << 20  # bytes: below this the examples' heaps do not fit (containers come with 64 MiB)


@dataclass(frozen=True)
class Feature:
    """``missing``: what to install or change, empty where the machine is ready. ``built``: whether this
    version has it."""

    name: str
    missing: list[str]
    built: bool = True

    @property
    def ready(self) -> bool:
        return self.built and not self.missing


#: what this command does not find out, and what does
UNTESTED = (
    "whether a GPU runs kernels: nothing is launched (examples/02_gemm.py does)",
    "whether GPUs reach each other's memory: links are listed, not used (tilescale launch -n 2 "
    "examples/05_ring_shift.py does)",
    "whether mpiexec, torchrun and srun start ranks: they are looked for, not run",
    "whether the C compiler and the CUDA compilers compile: they are asked for their version (any kernel "
    "does)",
    "whether caches on a network file system are seen alike by several machines",
)


def features(facts: Fact) -> list[Feature]:
    """Every feature with its needs, judged on ``facts`` (machine.collect)."""
    return [Feature(name, list(needs(facts)), built()) for name, needs, built in FEATURES]


def _has(facts: Fact, *path: str) -> Any:
    """The fact at ``path``, None where it or anything above it is absent or could not be found out."""
    value: Any = facts
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return None if isinstance(value, dict) and "error" in value else value


def _tvm(facts: Fact) -> Iterator[str]:
    pins = _has(facts, "packages", "pins") or {}
    for name, wanted in pins.items():
        found = _has(facts, "packages", name)
        if found != wanted:
            yield f"pip install {name}=={wanted} ({'here: ' + found if found else 'absent'})"


def _cpu(facts: Fact) -> Iterator[str]:
    if _has(facts, "system", "architecture") not in ("x86_64", "aarch64"):
        yield "an x86-64 or Arm processor with 64 bits"
    yield from _tvm(facts)
    if not _has(facts, "compilers", "cc"):
        yield "a C compiler: apt install gcc, or set TILESCALE_CC"


def _torch(facts: Fact) -> Iterator[str]:
    if not _has(facts, "packages", "torch"):
        yield (
            "pip install torch --index-url https://download.pytorch.org/whl/cpu (for a GPU: without the "
            "index)"
        )


def _shm(facts: Fact) -> Iterator[str]:
    if platform.system() != "Linux":
        yield "Linux"
    free = _has(facts, "memory", "shm_free")
    if free is None or not _has(facts, "memory", "shm_writable"):
        yield "a writable /dev/shm: mount -t tmpfs tmpfs /dev/shm"
    elif free < SHM_ENOUGH:
        yield (
            f"more room in /dev/shm ({_bytes(free)} free): docker run --shm-size=8g, or "
            "TILESCALE_HEAP_SIZE=32M"
        )


def _mpi(facts: Fact) -> Iterator[str]:
    yield from _shm(facts)
    if not _has(facts, "mpiexec"):
        yield 'mpiexec: pip install "tilescale[mpi]", or the system\'s MPI'
    if not _has(facts, "packages", "mpi4py"):
        yield 'mpi4py, for jobs over several machines: pip install "tilescale[mpi]"'


def _torchrun(facts: Fact) -> Iterator[str]:
    yield from _shm(facts)
    yield from _torch(facts)


def _cuda(facts: Fact) -> Iterator[str]:
    if not _has(facts, "nvidia", "gpus"):
        yield "an NVIDIA GPU with its driver (nvidia-smi lists none)"
    yield from _cuda_code(facts)
    if _has(facts, "packages", "torch") and not (_has(facts, "packages", "torch_cuda") or "").startswith(
        "cuda"
    ):
        yield "a torch built for CUDA: pip install torch"
    yield from _torch(facts)


def _as_cuda(facts: Fact) -> Iterator[str]:
    if any(_cuda(facts)):
        yield "what kernels on NVIDIA GPUs need"


def _cuda_code(facts: Fact) -> Iterator[str]:
    yield from _tvm(facts)
    if not _has(facts, "compilers", "nvcc") and not _has(facts, "packages", "cuda-python"):
        yield 'nvcc (CUDA 12.4 or newer) or NVRTC: pip install "tilescale[cuda]"'


def _gpu_ranks(facts: Fact) -> Iterator[str]:  # one GPU will do: ranks may share it
    yield from _shm(facts)
    yield from _as_cuda(facts)


def _nvshmem(facts: Fact) -> Iterator[str]:
    if not _has(facts, "libraries", "nvshmem") and not any(
        _has(facts, "packages", name) for name in machine.NVSHMEM
    ):
        yield "NVSHMEM: torch for CUDA brings it"
    if not _has(facts, "packages", "nvshmem4py-cu13"):
        yield 'nvshmem4py: pip install "tilescale[cuda]"'
    yield from _as_cuda(facts)


def _nccl(facts: Fact) -> Iterator[str]:
    if not _has(facts, "libraries", "nccl") and not any(
        _has(facts, "packages", name) for name in machine.NCCL
    ):
        yield "NCCL: torch for CUDA brings it"
    yield from _as_cuda(facts)


def _hip(facts: Fact) -> Iterator[str]:
    if not _has(facts, "amd", "gpus"):
        yield "an AMD GPU with its driver (none in /sys/class/kfd)"
    if not _has(facts, "compilers", "hipcc"):
        yield "hipcc: ROCm 6 or newer"


def _pictures(facts: Fact) -> Iterator[str]:
    if not _has(facts, "packages", "matplotlib"):
        yield 'matplotlib: pip install "tilescale[vis]"'


def _module(name: str) -> Callable[[], bool]:
    return lambda: importlib.util.find_spec(f"tilescale.{name}") is not None


# What a user wants to do; what that needs; whether this version can do it.
FEATURES: list[tuple[str, Callable[[Fact], Iterator[str]], Callable[[], bool]]] = [
    ("kernels on the simulator: tilescale check", _tvm, _module("compiler.sim")),
    ("kernels on the CPU", _cpu, _module("compiler.cpu")),
    ("torch tensors", _torch, _module("compiler.cpu")),
    ("ranks: tilescale launch", _shm, _module("comm.bootstrap")),
    ("ranks: torchrun", _torchrun, _module("comm.bootstrap")),
    ("ranks: mpiexec", _mpi, _module("comm.bootstrap")),
    ("CUDA code, to read", _cuda_code, _module("compiler.cuda")),
    ("kernels on NVIDIA GPUs", _cuda, _module("compiler.cuda")),
    ("ranks on NVIDIA GPUs, one machine", _gpu_ranks, _module("comm.symm_mem")),
    ("ranks on NVIDIA GPUs, one machine, by NVSHMEM", _nvshmem, _module("comm.nvshmem")),
    ("ranks on NVIDIA GPUs, several machines", _nvshmem, lambda: False),
    ("collectives by NCCL", _nccl, _module("comm.nccl")),
    ("kernels on AMD GPUs", _hip, _module("compiler.hip")),
    ("pictures of timelines", _pictures, _module("launch.trace")),
]


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def command(as_json: bool) -> None:
    """Say what this machine has, and for each feature whether it is ready or what to install."""
    facts = machine.collect()
    found = features(facts)
    if as_json:
        click.echo(
            json.dumps(
                facts | {"features": [asdict(f) | {"ready": f.ready} for f in found], "untested": UNTESTED},
                indent=2,
            )
        )
        return
    _print(facts, found)


def _print(facts: Fact, found: list[Feature]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in summary(facts):
        table.add_row(name, Text(text))
    console.print(table)
    console.print()
    table = Table(title="What it is ready for", title_justify="left", title_style="bold")
    table.add_column("feature")
    table.add_column("state", no_wrap=True)
    table.add_column("to do", overflow="fold")
    for feature in found:
        state = Text("ready", "green") if feature.ready else Text("missing", "red")
        if not feature.built:
            state = Text("not in this version", "dim")
        table.add_row(Text(feature.name), state, Text("\n".join(feature.missing)))
    console.print(table)
    table = Table(title="Environment variables", title_justify="left", title_style="bold")
    for title in ("variable", "value", "meaning"):
        table.add_column(title, overflow="fold")
    for var in _has(facts, "environment", "variables") or []:
        value = Text(_show_value(var["value"]), "green" if var["name"] in facts["environment"]["set"] else "")
        table.add_row(var["name"], value, Text(var["doc"]))
    console.print(table)
    console.print(Text("Not tested: " + "; ".join(UNTESTED) + "."))
    for name in _has(facts, "environment", "unknown") or []:
        console.print(
            Text(
                f"{name} is set, but nothing reads it; known: {', '.join(v.name for v in env.ALL)}", "yellow"
            )
        )


def summary(facts: Fact) -> list[tuple[str, str]]:
    """The facts as lines for people."""
    lines = []
    shows: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
        (
            "system",
            "system",
            lambda f: f"{f['os']}, {f['architecture']}, Python {f['python']} ({f['executable']})",
        ),
        ("processor", "processor", _show_processor),
        ("memory", "memory", _show_memory),
        ("NVIDIA GPUs", "nvidia", _show_nvidia),
        ("AMD GPUs", "amd", lambda f: ", ".join(gpu["name"] for gpu in f["gpus"]) or "none"),
        ("compilers", "compilers", lambda f: "\n".join(f"{n}: {_show_tool(t)}" for n, t in f.items())),
        ("MPI", "mpiexec", _show_tool),
        (
            "libraries",
            "libraries",
            lambda f: ", ".join(path for path in f.values() if path) or "none of NCCL, NVSHMEM, RCCL",
        ),
        ("packages", "packages", _show_packages),
        ("cache", "cache", _show_cache),
        (
            "environment",
            "environment",
            lambda f: ", ".join(f"{n}={v}" for n, v in f["set"].items()) or "nothing of ours set",
        ),
    )
    for name, key, show in shows:
        fact = facts.get(key)
        error = fact.get("error") if isinstance(fact, dict) else None
        lines.append((name, f"could not be found out: {error}" if error else show(fact)))
    return lines


def _show_value(value: Any) -> str:
    if isinstance(value, dict):
        return str(value["error"])
    return "–" if value is None else str(value)


def _show_cache(fact: Fact) -> str:
    return f"{fact['folder']}, " + (f"not used: {fact['why']}" if fact["why"] else "written, read and locked")


def _show_processor(fact: Fact) -> str:
    return f"{fact['model']}, {fact['usable_cores']} of {fact['cores']} cores\n{' '.join(fact['features'])}"


def _show_memory(fact: Fact) -> str:
    shm = (
        f"/dev/shm {_bytes(fact['shm_free'])} free of {_bytes(fact['shm_total'])}"
        if "shm_free" in fact
        else "no /dev/shm"
    )
    return f"{_bytes(fact['available'])} available of {_bytes(fact['total'])}; {shm}"


def _show_nvidia(fact: Fact) -> str:
    words = (("name", ""), ("memory", ""), ("capability", "compute capability "), ("driver", "driver "))
    gpus = [", ".join(word + gpu[key] for key, word in words if key in gpu) for gpu in fact["gpus"]]
    lines = [f"{gpus.count(gpu)} × {gpu}" for gpu in dict.fromkeys(gpus)] or ["none"]
    kinds = list(fact["links"].values())
    if kinds:
        lines.append(
            "links: " + ", ".join(f"{kinds.count(kind)} pairs by {kind}" for kind in dict.fromkeys(kinds))
        )
    return "\n".join(lines)


def _show_tool(fact: Fact | None) -> str:
    if fact is None:
        return "none"
    return f"{fact['path']} ({fact['version']})" if "path" in fact else str(fact.get("error"))


def _show_packages(fact: Fact) -> str:
    shown = []
    for name, version in fact.items():
        if not isinstance(version, str) or name == "torch_cuda":
            continue
        pin = fact["pins"].get(name)
        built = f" ({fact['torch_cuda'] or 'CPU only'})" if name == "torch" else ""
        shown.append(f"{name} {version}{built}{f' (needs {pin})' if pin not in (None, version) else ''}")
    return ", ".join(shown) or "none"


def _bytes(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"
