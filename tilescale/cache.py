"""Compiled kernels on disk. A kernel is a folder named by its fingerprint; it appears whole or not at all.

Eight ranks that start at once compile once: whoever holds the key's lock builds, the others find the result.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilescale.env import CACHE_DIR
from tilescale.kernel import Artifact
from tilescale.log import say

_LIBRARY, _META = "kernel.so", "kernel.json"
_FORMAT = 2
#: Kernels kept at most; the ones not used for longest go first.
_LIMIT = 4096


def folder() -> Path:
    """Where kernels are kept."""
    return Path(CACHE_DIR.get()) / "kernels"


def load(key: str) -> Artifact | None:
    """The kernel of that fingerprint; None where there is none, or only a damaged one."""
    place = folder() / key
    try:
        meta = json.loads((place / _META).read_text())
        data = (place / _LIBRARY).read_bytes()
    except (OSError, ValueError):
        return None
    if meta.get("format") != _FORMAT or hashlib.sha256(data).hexdigest() != meta.get("sha256"):
        say("warning", f"the cached kernel {place} is damaged and is built again")
        return None
    with contextlib.suppress(OSError):  # a read-only cache is a cache all the same
        os.utime(place)
    a = meta["artifact"]
    return Artifact(**{**a, "library": place / _LIBRARY, "desc": bytes.fromhex(a["desc"]), "loc": tuple(a["loc"])})


@contextlib.contextmanager
def _locked(key: str) -> Iterator[None]:
    base = folder()
    base.mkdir(parents=True, exist_ok=True)
    with open(base / f".{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        with contextlib.suppress(FileNotFoundError):
            os.unlink(base / f".{key}.lock")


def get_or_build(key: str, build: Callable[[Path], Artifact]) -> Artifact:
    """The kernel of that fingerprint, built by ``build(path of the library)`` where it is not there yet."""
    found = load(key)
    if found is not None:
        return found
    with _locked(key):
        found = load(key)  # another process may have built it while this one waited
        if found is not None:
            return found
        with tempfile.TemporaryDirectory(dir=folder(), prefix=".build") as temporary:
            inside = Path(temporary) / key
            inside.mkdir()
            artifact = build(inside / _LIBRARY)
            plain = {**asdict(artifact), "library": "", "desc": artifact.desc.hex()}
            digest = hashlib.sha256((inside / _LIBRARY).read_bytes()).hexdigest()
            (inside / _META).write_text(json.dumps({"format": _FORMAT, "sha256": digest, "artifact": plain}))
            place = folder() / key
            if place.exists():  # damaged, see load
                shutil.rmtree(place)
            os.rename(inside, place)
        artifact.library = place / _LIBRARY
    _trim()
    return artifact


def _trim() -> None:
    """Keeps the cache below its limit."""
    kept = [p for p in folder().iterdir() if p.is_dir() and not p.name.startswith(".")]
    if len(kept) <= _LIMIT:
        return

    def used(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except OSError:  # another process trims too
            return 0.0

    for path in sorted(kept, key=used)[: len(kept) - _LIMIT]:
        shutil.rmtree(path, ignore_errors=True)


def remember(key: str, value: Any) -> None:
    """Keeps a small JSON value under a key (an autotuner's choice)."""
    base = folder()
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=base, delete=False, prefix=".note") as out:
        json.dump(value, out)
    os.replace(out.name, base / f"{key}.json")


def recall(key: str) -> Any:
    """What `remember` kept, None where nothing is."""
    try:
        return json.loads((folder() / f"{key}.json").read_text())
    except (OSError, ValueError):
        return None
