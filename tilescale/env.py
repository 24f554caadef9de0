"""Every environment variable of ours, in one place.

A leaf: imports nothing of ours but the errors. Nothing is read at import time; ``env.WAIT_TIMEOUT.get()``
reads the environment when it is called, so that a test or a program may set a variable before it matters. An
empty value counts as unset. ``tilescale doctor`` prints this table.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from tilescale.errors import TileValueError

T = TypeVar("T")

PREFIX = "TILESCALE_"
#: target → what maps its ranks' symmetric memory where TILESCALE_HEAP is open
TARGETS = {"auto": "shm", "cpu": "shm", "cuda": "symm_mem", "sim": "shm"}
HEAPS = ("auto", "shm", "symm_mem", "nvshmem")
LOG_LEVELS = ("error", "warning", "info", "debug")
SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Var(Generic[T]):
    """One variable: ``parse`` turns its text into a value and raises ValueError where the text does not fit
    ``expected``."""

    name: str
    default: Callable[[], T]
    parse: Callable[[str], T]
    expected: str
    doc: str
    #: the name as the table behind ``os.environ`` has it
    key: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", os.fsencode(self.name))

    def get(self, environ: Mapping[str, str] | None = None) -> T:
        """The value now. Raises TileValueError, naming the variable, where its text does not fit."""
        if environ is None and not texts(self)[0]:
            return self.default()
        text = (os.environ if environ is None else environ).get(self.name, "").strip()
        if not text:
            return self.default()
        try:
            return self.parse(text)
        except ValueError:
            raise TileValueError(
                f"the environment variable {self.name} is {text!r}",
                expected=self.expected,
                hint=f"unset {self.name}",
            ) from None


def texts(*variables: Var) -> tuple[bytes | str | None, ...]:
    """What the environment says of variables now, as a key of what was made of it. By the table behind
    ``os.environ``, where there is one: itself it takes a microsecond and an exception to say that a variable
    is not there."""
    said = getattr(os.environ, "_data", None)
    if said is None:
        return tuple([os.environ.get(v.name) for v in variables])
    return tuple([said.get(v.key) for v in variables])


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if match is None:
        raise ValueError(text)
    size = int(float(match[1]) * SIZE_UNITS[match[2].upper()])
    if size < 1:
        raise ValueError(text)
    return size


def _switch(text: str) -> bool:
    return bool(("0", "1").index(text))


def _level(text: str) -> str:
    if text.lower() not in LOG_LEVELS:
        raise ValueError(text)
    return text.lower()


def _job(text: str) -> str:
    # It becomes part of file names in /dev/shm; a dash would let the sweep of job "a" match files of job
    # "a-b".
    if not re.fullmatch(r"[0-9A-Za-z]{1,32}", text):
        raise ValueError(text)
    return text


def _target(text: str) -> str:
    if text.lower() not in TARGETS:
        raise ValueError(text)
    return text.lower()


def _heap(text: str) -> str:
    if text.lower() not in HEAPS:
        raise ValueError(text)
    return text.lower()


def _remote(text: str) -> str:
    if text.lower() != "nvshmem":
        raise ValueError(text)
    return text.lower()


def _folder(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "tilescale"


def _nothing() -> None:
    return None


CACHE_DIR: Var[Path] = Var(
    "TILESCALE_CACHE_DIR",
    _default_cache_dir,
    _folder,
    "a folder",
    "where compiled kernels and the built runtime are kept; default $XDG_CACHE_HOME/tilescale or "
    "~/.cache/tilescale",
)
CACHE_SIZE: Var[int] = Var(
    "TILESCALE_CACHE_SIZE",
    lambda: 4 << 30,
    _size,
    "bytes, with K, M, G or T if wanted, such as 512M",
    "how much disk compiled kernels may take; those that were not used for longest go first; default 4G",
)
WAIT_TIMEOUT: Var[float] = Var(
    "TILESCALE_WAIT_TIMEOUT",
    lambda: 120.0,
    _seconds,
    "seconds, more than 0",
    "how long a rank waits for a signal, a barrier or another rank before it reports and ends the job; "
    "default 120",
)
STOP_GRACE: Var[float] = Var(
    "TILESCALE_STOP_GRACE",
    lambda: 30.0,
    _seconds,
    "seconds, more than 0",
    "how long ranks of all nodes have to end by themselves behind a SIGTERM to `tilescale launch`, so that "
    "they may write a checkpoint; a second one ends them at once; default 30",
)
NUM_THREADS: Var[int | None] = Var(
    "TILESCALE_NUM_THREADS",
    _nothing,
    _positive_int,
    "a number of threads, at least 1",
    "threads that run a rank's blocks on the CPU; default: this process's processors, shared among the "
    "machine's ranks",
)
HEAP_SIZE: Var[int] = Var(
    "TILESCALE_HEAP_SIZE",
    lambda: 1 << 30,
    _size,
    "bytes, with K, M, G or T if wanted, such as 512M",
    "size of each rank's symmetric heap; pages that nobody touches take no memory; default 1G",
)
HEAP: Var[str] = Var(
    "TILESCALE_HEAP",
    lambda: "auto",
    _heap,
    "one of " + ", ".join(HEAPS),
    "where symmetric memory lies: shm, the machine's memory; symm_mem, GPUs' memory mapped by PyTorch; "
    "nvshmem, by NVSHMEM; auto: "
    "symm_mem where TILESCALE_TARGET is cuda, else shm; default auto",
)
REMOTE: Var[str] = Var(
    "TILESCALE_REMOTE",
    lambda: "",
    _remote,
    "nvshmem",
    "kernels for CUDA reach other ranks by NVSHMEM's device calls, even where GPUs address each other's "
    "memory; takes TILESCALE_HEAP=nvshmem; default: by addresses",
)
LOG: Var[str] = Var(
    "TILESCALE_LOG",
    lambda: "warning",
    _level,
    "one of " + ", ".join(LOG_LEVELS),
    "how much is said on stderr; info names every fallback and every compilation; default warning",
)
DUMP: Var[Path | None] = Var(
    "TILESCALE_DUMP",
    _nothing,
    _folder,
    "a folder",
    "write the program after every pass into this folder; default: no dump",
)
WITHOUT: Var[tuple[str, ...]] = Var(
    "TILESCALE_WITHOUT",
    tuple,
    lambda text: tuple(name.strip() for name in text.split(",")),
    "names of the compiler's passes for GPUs, with commas",
    "these mechanisms that make some kernels faster are left out (`kernel.report()` names those that a "
    "kernel has); default: none",
)
CC: Var[list[str] | None] = Var(
    "TILESCALE_CC",
    _nothing,
    shlex.split,
    "a command, such as 'gcc' or 'ccache clang'",
    "the C compiler that builds the runtime and links kernels; default: $CC, else cc, gcc or clang from the "
    "PATH",
)
CUDA_COMPILER: Var[str | None] = Var(
    "TILESCALE_CUDA_COMPILER",
    _nothing,
    str,
    "nvcc, nvrtc or the path of an nvcc",
    "what compiles kernels for CUDA; default: nvcc where there is one, else NVRTC",
)
CPU_OPTIMIZE: Var[bool] = Var(
    "TILESCALE_CPU_OPTIMIZE",
    lambda: True,
    _switch,
    "0 or 1",
    "whether LLVM optimises kernels for the CPU; 0, for programs that compile much and compute little: "
    "kernels compile in about two thirds of the time, run more slowly, and may round differently; default 1",
)
LAUNCH_GRAPHS: Var[bool] = Var(
    "TILESCALE_LAUNCH_GRAPHS",
    lambda: True,
    _switch,
    "0 or 1",
    "whether a GPU's kernel that is called again and again is launched by a CUDA graph, which takes the "
    "host less time; default 1",
)
SPARE: Var[int] = Var(
    "TILESCALE_SPARE",
    lambda: 0,
    _count,
    "a number of multiprocessors",
    "how many of a GPU's multiprocessors the kernels of several ranks leave to others that wait for ranks, "
    "such as NCCL's beside them, alike on all ranks (docs/OPS.md, Streams); default 0",
)
JOB: Var[str | None] = Var(
    "TILESCALE_JOB",
    _nothing,
    _job,
    "letters and digits, at most 32",
    "set by `tilescale launch` for its ranks: the job's name, part of every file name in /dev/shm",
)
TARGET: Var[str] = Var(
    "TILESCALE_TARGET",
    lambda: "auto",
    _target,
    "one of " + ", ".join(TARGETS),
    "what kernels are compiled for that name no target; auto: cuda where an eager kernel's tensors lie on a "
    "GPU, else cpu; "
    "sim: the simulator, for one rank (`tilescale check` runs several); default auto",
)
TRACE: Var[Path | None] = Var(
    "TILESCALE_TRACE",
    _nothing,
    _folder,
    "a folder",
    "kernels of the targets cpu and cuda are instrumented, and each process leaves what they logged in this "
    "folder when it ends; set by `tilescale trace --target cpu` (or cuda); default: no log",
)

FORK: Var[bool] = Var(
    "TILESCALE_FORK",
    lambda: True,
    _switch,
    "0 or 1",
    "whether `tilescale launch` forks its ranks from one process that has imported what they share, which "
    "saves time and memory; 0, and "
    "where ranks may use a GPU: each is a process that begins with nothing; default 1",
)
SSH: Var[list[str]] = Var(
    "TILESCALE_SSH",
    lambda: ["ssh", "-o", "BatchMode=yes"],
    shlex.split,
    "a command, such as 'ssh -p 2222'",
    "what `tilescale launch --hosts` starts launchers with: it gets a host and a shell's command line; "
    "default ssh -o BatchMode=yes",
)

ALL: tuple[Var, ...] = (
    CACHE_DIR,
    CACHE_SIZE,
    WAIT_TIMEOUT,
    STOP_GRACE,
    NUM_THREADS,
    HEAP_SIZE,
    HEAP,
    REMOTE,
    LOG,
    DUMP,
    WITHOUT,
    CC,
    CUDA_COMPILER,
    CPU_OPTIMIZE,
    LAUNCH_GRAPHS,
    SPARE,
    JOB,
    TARGET,
    TRACE,
    FORK,
    SSH,
)


def table() -> str:
    """What docs/LANGUAGE.md says of the variables: a row each, in Markdown."""
    rows = (
        f"| `{var.name}` | {var.expected.replace('|', chr(92) + '|')} | "
        f"{var.doc.replace('|', chr(92) + '|')} |"
        for var in ALL
    )
    return "\n".join(["| variable | value | meaning |", "|---|---|---|", *rows])


def unknown(environ: Mapping[str, str] | None = None) -> list[str]:
    """Variables that begin with TILESCALE_ and that nothing reads: most likely misspelt."""
    known = {var.name for var in ALL}
    return sorted(
        name
        for name in (os.environ if environ is None else environ)
        if name.startswith(PREFIX) and name not in known
    )


class _Module(types.ModuleType):
    """This module, which answers to TileLang's names, too: its programs read, and set,
    ``tilelang.env.TILELANG_…``."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or not _others:
            raise AttributeError(name)
        return _others[0] if name == "env" else getattr(_others[0], name)

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("TILELANG_") and _others:
            setattr(_others[0], name, value)
        else:
            super().__setattr__(name, value)


#: the object that has TileLang's names (tilelang_env.py); this module imports nothing of ours
_others: list[object] = []


def answer_by(others: object) -> None:
    """From here on names that this module does not have are those of an object, which is also its ``env``."""
    _others[:] = [others]


sys.modules[__name__].__class__ = _Module
