"""Kernels ahead of time: `Kernel.export` writes one file, of which `tilescale.load` makes a kernel where
neither TVM nor a compiler is installed.

The file is a zip archive of

- ``kernel.json``: what the cache keeps beside the code, the kernel's label and outputs, and what the file
  needs of a machine;
- ``kernel.bin``: a shared object for the CPU, a cubin for a GPU;
- ``libts_rt.so``: the runtime that launches it, built;
- ``kernel.cu``: the printed CUDA C++, for people.

That of a kernel of several launches holds such a file for each.

Loading takes TileScale's Python files, NumPy and apache-tvm-ffi (which the runtime links to). Nothing in the
file depends on the version of Python. Both shared objects are unpacked into the cache folder under the hash
of their contents.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilescale import devices, folders, native
from tilescale.cache import Entry
from tilescale.device import Device
from tilescale.errors import TileError, TileTypeError, TileValueError
from tilescale.launching import Launchable
from tilescale.version import __version__

FORMAT = 1
AGAIN = "export the kernel on such a machine"
HEAD, CODE, RUNTIME, TEXT = "kernel.json", "kernel.bin", "libts_rt.so", "kernel"
#: of a kernel of several launches: how many; each is a file of its own in the archive, by its number
MANY = "launches.json"


# ---- writing


def save(kernel: Launchable, path: str | os.PathLike[str]) -> Path:
    """Writes a kernel's file; see `Kernel.export`."""
    entry = kernel.entry
    if not entry.path:
        raise TileTypeError(
            f"{kernel.name} runs on the simulator, and there is no code to export",
            hint='target="cpu" or target="cuda"',
        )
    try:
        code = Path(entry.path).read_bytes()
    except OSError as error:
        raise TileError(
            f"the code of {kernel.name} is no longer at {entry.path}: {error.strerror}",
            hint="compile it again",
        ) from None
    members = {CODE: code, RUNTIME: native.library_path().read_bytes()}
    suffix = kernel.device.suffix
    if suffix and (text := Path(entry.path).with_suffix(suffix)).exists():
        members[TEXT + suffix] = text.read_bytes()
    head = {
        "format": FORMAT,
        "tilescale": __version__,
        "needs": {
            "machine": os.uname().machine,
            "runtime": native.runtime_version(),
            "instructions": sorted(kernel.device.instructions()),
        },
        "hashes": {name: _digest(data) for name, data in members.items()},
        "label": kernel.label,
        "out_idx": list(kernel.out_idx),
        "returns": list(kernel.returns),
        "instrument": kernel.instrument,
        "config": kernel.config,
        "latency": kernel.latency,
        "desc": entry.desc,
        "sites": entry.sites,
        "meta": entry.meta,
    }
    return _written(Path(path), {HEAD: json.dumps(head).encode(), **members})


def save_all(parts: Sequence[Launchable], returns: Sequence[int], path: str | os.PathLike[str]) -> Path:
    """Writes the launches of a kernel, each as `save` does, to one file. ``returns``: what a call gives
    back."""
    members = {MANY: json.dumps({"launches": len(parts), "returns": list(returns)}).encode()}
    with tempfile.TemporaryDirectory() as folder:
        for k, part in enumerate(parts):
            members[f"{k}"] = save(part, Path(folder, f"{k}")).read_bytes()
    return _written(Path(path), members)


def _written(out: Path, members: dict[str, bytes]) -> Path:
    """An archive, which nobody sees half-written."""
    handle, aside = tempfile.mkstemp(prefix=f".{out.name}-", dir=out.parent)
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in members.items():
                archive.writestr(name, data)
        os.chmod(aside, 0o666 & ~_umask())  # mkstemp's files are their owner's alone
        os.replace(aside, out)
    except BaseException:
        os.unlink(aside)
        raise
    return out


def _umask() -> int:
    was = os.umask(0)
    os.umask(was)
    return was


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# ---- reading


def launches(where: Path) -> tuple[list[Path], list[int]] | None:
    """The files of a kernel's launches and what its calls give back; None where a file is one launch's, or
    none of ours, which `read` says."""
    try:
        with zipfile.ZipFile(where) as archive:
            if MANY not in archive.namelist():
                return None
            many = json.loads(archive.read(MANY))
            files = [_unpacked(archive.read(f"{k}"), f"launch{k}") for k in range(int(many["launches"]))]
            return files, [int(k) for k in many["returns"]]
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error):
        return None


def read(where: Path) -> tuple[Entry, dict[str, Any], dict[str, str]]:
    """What a file holds, on a machine that can run it: the code, unpacked, beside it what `save` put in its
    head, and printed sources by kind. Raises as `tilescale.load` does."""
    head, members = _read(where)
    _require(where, head)
    runtime = _unpacked(members[RUNTIME], RUNTIME)
    try:
        native.adopt(runtime)
    except OSError as error:  # of the dynamic linker: an older C library, a system of another kind
        raise TileValueError(
            f"the runtime in {where} does not load on this machine: {error}", hint=AGAIN
        ) from error
    device = devices.of_kernel(head["meta"])
    _require_arch(where, device, head["meta"].get("arch"))
    entry = Entry(str(_unpacked(members[CODE], CODE)), head["desc"], head["sites"], head["meta"])
    text = members.get(TEXT + device.suffix) if device.suffix else None
    return entry, head, {} if text is None else {device.shown: text.decode()}


def _read(where: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The description and the members, compared with their hashes."""
    try:
        with zipfile.ZipFile(where) as archive:
            head = json.loads(archive.read(HEAD))
            if head["format"] != FORMAT:
                raise TileValueError(
                    f"{where} has format {head['format']} of exported kernels, by TileScale "
                    f"{head['tilescale']}",
                    expected=f"format {FORMAT}",
                    hint=f"export the kernel with this version, {__version__}",
                )
            members = {name: archive.read(name) for name in head["hashes"]}
    except FileNotFoundError:
        raise TileValueError(
            f"there is no file {where}", expected="one that kernel.export(path) wrote"
        ) from None
    except OSError as error:
        raise TileValueError(f"{where} cannot be read: {error.strerror or error}") from None
    except (
        zipfile.BadZipFile,
        zlib.error,
        KeyError,
        TypeError,
        ValueError,
        NotImplementedError,
        EOFError,
    ) as error:
        if isinstance(error, TileError):
            raise
        raise TileValueError(
            f"{where} is damaged, or no exported kernel: {error}",
            expected="one that kernel.export(path) wrote",
        ) from None
    for name, data in members.items():
        if _digest(data) != head["hashes"][name]:
            raise TileValueError(
                f"{where} is damaged: {name} is not what was written", hint="export the kernel again"
            )
    return head, members


def _require(where: Path, head: dict[str, Any]) -> None:
    """What the file needs is here. Raises TileValueError."""
    needs = head["needs"]
    machine = os.uname().machine
    if needs["machine"] != machine:
        raise TileValueError(f"{where} is for {needs['machine']}, and this machine is {machine}", hint=AGAIN)
    if needs["runtime"] != native.runtime_version():
        theirs, ours = needs["runtime"].partition(" ")[0], native.runtime_version().partition(" ")[0]
        raise TileValueError(
            f"{where} was made with TileScale {head['tilescale']} and {theirs}, whose launcher is another",
            expected=f"a file of TileScale {__version__} and {ours}",
            hint="export the kernel with this version",
        )
    missing = sorted(set(needs["instructions"]) - devices.of_kernel(head["meta"]).instructions())
    if missing:
        raise TileValueError(
            f"{where} uses instructions that this processor lacks: {', '.join(missing)}", hint=AGAIN
        )


def _require_arch(where: Path, device: Device, arch: str | None) -> None:
    """This machine's first GPU runs the code; without one the kernel can be looked at. Raises
    TileValueError."""
    other = None if arch is None else device.other_than(arch)
    if other is not None:
        raise TileValueError(
            f"{where} is compiled for {arch}, and this machine's GPU is {other}",
            expected=f"a GPU that runs {arch}",
            hint=f'target="{device.name}:{other}" where it is compiled',
        )


def _unpacked(data: bytes, name: str) -> Path:
    """A file with these bytes, in the cache folder or, where that cannot be written, in one of this process's
    own."""
    within = f"exported/{_digest(data)}"
    for folder in folders.readable(within):
        out = folder / name
        if out.exists() and not folders.distrust(out.stat()) and out.read_bytes() == data:
            return out
    folder = folders.writable(within)
    handle, aside = tempfile.mkstemp(dir=folder)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(aside, folder / name)
    return folder / name
