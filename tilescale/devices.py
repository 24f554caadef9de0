"""The targets of the runtime, one record each, and which of them a kernel runs on. A new target is a record
here and its name in env.py."""

from __future__ import annotations

import difflib
import re
import struct
from collections.abc import Callable, Iterable
from typing import Any

from tilescale import env, native
from tilescale.cache import Entry
from tilescale.comm import sim
from tilescale.cuda import CUDA
from tilescale.device import Device
from tilescale.errors import TileValueError

#: names of instruction sets in /proc/cpuinfo that LLVM may use; others say what a system may do
_INSTRUCTIONS = re.compile(
    r"avx|sse|ssse|fma|bmi|f16c|popcnt|abm|lzcnt|movbe|adx|aes|vaes|pclmul|vpclmul|gfni|sha|amx|neon|asimd|sve|fp16|fphp|bf16|i8mm|dotprod"
)
_LATER = ("hip",)


class Cpu(Device):
    """The processor that the compiler runs on."""

    def load(self, entry: Entry, label: str) -> Callable[..., Any]:
        return native.make_kernel(
            entry.path, struct.pack(f"<{len(entry.desc)}q", *entry.desc), "\n".join(entry.sites), label
        )

    def code_key(self, arch: str) -> tuple[str, ...]:
        return () if env.CPU_OPTIMIZE.get() else ("as it stands",)

    def instructions(self) -> set[str]:
        """Instruction sets, as Linux names them: LLVM compiles for the machine it runs on."""
        from tilescale.fingerprint import processor

        words = [
            line.partition(":")[2]
            for line in processor().splitlines()
            if line.startswith(("flags", "Features"))
        ]
        return {word for word in " ".join(words).split() if _INSTRUCTIONS.match(word)}


CPU = Cpu("cpu", ("tile", "scheduled", "thread", "llvm", "asm"), "thread", aliases=("llvm", "c"))
SIM = Device("sim", ("tile", "scheduled"), "tile", simulated=True, mute="simulated launches")
#: name → target
TABLE: dict[str, Device] = {d.name: d for d in (CPU, CUDA, SIM)}
_WRITTEN = (f'"{d.name}" or "{d.name}:{d.arch}"' if d.arch else f'"{d.name}"' for d in TABLE.values())
_EXPECTED = ", ".join(_WRITTEN) + ' or "auto"'


def of(target: str) -> Device:
    """The record of a target, with or without its architecture."""
    return TABLE[target.partition(":")[0]]


def of_kernel(meta: dict[str, Any]) -> Device:
    """The record of a kernel's target, by its metadata."""
    return TABLE[meta.get("target", "cpu")]


def code_key(target: str) -> tuple[str, ...]:
    """What decides a target's code beside the program and the machine's environment; see
    `Device.code_key`."""
    name, _, arch = target.partition(":")
    return (*TABLE[name].code_key(arch), *env.WITHOUT.get())


# ---- GPUs


def may_have_gpu() -> bool:
    """Whether this machine may have a GPU of any kind."""
    return any(d.gpu and d.may_be_here() for d in TABLE.values())


def machine() -> str:
    """What a kernel that no tensor decides for runs on: "cuda" where there is such a GPU, else "cpu"."""
    return next((d.name for d in TABLE.values() if d.gpu and d.may_be_here() and d.is_here()), CPU.name)


def device_of(values: Iterable[Any]) -> str | None:
    """ "cuda" where a tensor lies on such a GPU, "cpu" where none of the tensors does; None without
    tensors."""
    found = None
    gpus = [d for d in TABLE.values() if d.gpu]
    for value in values:
        for gpu in gpus:
            there = gpu.holds(value)
            if there:
                return gpu.name
            found = found if there is None else CPU.name
    return found


def awaiting() -> Callable[[], Any] | None:
    """What returns when every GPU has done all that this process gave it; None where it gave it none."""
    return next((finish for d in TABLE.values() if (finish := d.awaiting()) is not None), None)


# ---- what people write


def _spelled(target: Any) -> str:
    """A target as a string: ``{"kind": "cuda", "arch": "sm_90a"}`` and objects with such attributes (TVM's)
    too."""
    if isinstance(target, dict):
        kind, arch = target.get("kind"), target.get("arch")
    else:
        attrs: Any = getattr(target, "attrs", None)
        kind = getattr(getattr(target, "kind", None), "name", getattr(target, "kind", None))
        arch = getattr(target, "arch", None) or (attrs.get("arch") if hasattr(attrs, "get") else None)
    if kind is None:
        return str(target)
    return f"{kind}:{arch}" if arch and str(kind) == "cuda" else str(kind)


def parse_target(target: Any) -> tuple[str, str]:
    """A target's name and its architecture, "" where it names none. "cuda -arch=sm_80" is TVM's way to write
    "cuda:sm_80".

    Raises:
        TileValueError: a target that this version does not have, by name.
    """
    words = ("auto" if target is None else _spelled(target)).replace(" -arch=", ":").split() or [""]
    name, colon, arch = words[0].partition(":")
    name = next((d.name for d in TABLE.values() if name in d.aliases), name)
    others = [w for w in words[1:] if not w.startswith("-")]
    device = TABLE.get(name)
    known = device is not None and bool(device.arch)  # its architectures
    if name not in (*env.TARGETS, *_LATER) or (colon and not (known and arch)) or others:
        close = [d.name for d in TABLE.values() if name.lower() in d.nicknames]
        close = close or difflib.get_close_matches(name.lower(), env.TARGETS, 1, 0.5) or [CPU.name]
        meant = (
            f"{name}:{others[0] if others else device.arch}"
            if colon and device is not None and known
            else close[0]
        )
        raise TileValueError(f"there is no target {target!r}", expected=_EXPECTED, hint=f'target="{meant}"')
    if name in _LATER and sim.here() is None:
        raise TileValueError(
            f"the target {name!r} is not built in this version", expected=_EXPECTED, hint='target="cpu"'
        )
    return name, arch


def resolve_target(target: Any, tensors: Iterable[Any] = ()) -> str:
    """``"cpu"``, ``"sim"``, or ``"cuda:<architecture>"``. "auto" is what TILESCALE_TARGET says; else cuda
    where a tensor lies on a GPU, cpu where none of the tensors does, and without tensors cuda where this
    machine has a GPU. "cuda" means this machine's GPU, or sm_90a where there is none. For a simulated rank
    everything runs on the simulator.

    Raises:
        TileValueError: a target that this version does not have, by name.
    """
    name, arch = ("auto", "") if target is None else parse_target(target)
    if sim.here() is not None:
        return SIM.name
    if name == "auto":
        name = env.TARGET.get()
    if name == "auto":
        name = device_of(tensors) or machine()
    return named(name, arch)


def named(name: str, arch: str = "") -> str:
    """A target with its architecture, by default this machine's."""
    arch = arch or TABLE[name].architecture()
    return f"{name}:{arch}" if arch else name


def is_auto(target: Any) -> bool:
    """Whether the tensors of a call decide what a kernel runs on."""
    return parse_target(target)[0] == "auto" and env.TARGET.get() == "auto" and sim.here() is None
