"""Compiled kernels on disk. An entry appears whole or not at all, is checked when read, and is built once
however many ask at once.

``<cache>/kernels/<key>/`` holds ``kernel.bin`` (a shared object, or a GPU's code) and ``kernel.json`` (the
description, the sites, what Python must know of the parameters, and the hash of the code); whatever else the
compiler left beside them is for people. The key is a fingerprint of everything that decides the code
(tilescale/fingerprint.py).
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilescale import env, folders, log

#: the file of an entry that has the code
CODE = "kernel.bin"
_LOCKS = 64
_SWEEP_EVERY = 64


@dataclass(frozen=True)
class Entry:
    """A compiled kernel: the path of its code, and kernel.json's description, sites and metadata."""

    path: str
    desc: list[int]
    sites: list[str]
    meta: dict[str, Any]

    @property
    def key(self) -> str | None:
        """What it is kept by; None of code that is not kept."""
        place = Path(self.path)
        return place.parent.name if place.name == CODE else None


def folder() -> Path:
    """Where compiled kernels are kept: in the cache, or in a folder of this process's where that cannot be
    written."""
    return folders.writable("kernels")


def lookup(key: str) -> Entry | None:
    """The entry of a key; None where there is none. A damaged one, and one that others may have written, is
    removed and counts as none."""
    for place in folders.readable("kernels"):
        found = _read(place / key)
        if found is not None:
            return found
    return None


def _read(place: Path) -> Entry | None:
    """The entry in a folder."""
    try:
        with open(place / "kernel.json", "rb") as f:
            raw, why = f.read(), folders.distrust(os.fstat(f.fileno()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        log.say("warning", f"the cache entry {place} cannot be read: {error.strerror}", once=True)
        return None
    try:
        held = json.loads(raw)
        with open(place / CODE, "rb") as f:
            code, why = f.read(), why or folders.distrust(os.fstat(f.fileno()))
        if why:
            raise ValueError(why)
        if hashlib.blake2b(code, digest_size=16).hexdigest() != held["code"]:
            raise ValueError("the code is not what was stored")
        entry = Entry(str(place / CODE), held["desc"], held["sites"], held["meta"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.say("warning", f"the cache entry {place} is damaged ({error}) and will be rebuilt")
        _discard(place)
        return None
    with contextlib.suppress(OSError):  # read-only caches serve as well; only the order of eviction suffers
        os.utime(place / "kernel.json")
    return entry


def discard(key: str) -> None:
    """Removes an entry at once for everybody; processes that have it loaded keep their mapping."""
    for root in folders.readable("kernels"):
        _discard(root / key)


def _discard(place: Path) -> None:
    with contextlib.suppress(OSError):
        aside = tempfile.mkdtemp(prefix=".gone-", dir=place.parent)
        os.rename(place, os.path.join(aside, place.name))
        shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def locked(key: str, purpose: str = "") -> Iterator[None]:
    """Held by one process (and one thread) at a time, for each purpose. 64 lock files serve all keys: they
    are never removed, so none is ever stale, and the kernel frees a lock whose holder was killed."""
    place = folder() / "locks"
    place.mkdir(exist_ok=True, mode=folders.FOLDER_MODE)
    with open(place / f"{purpose}{int(key[:8], 16) % _LOCKS:02x}", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            # Some network file systems have no locks. Nothing breaks: several processes build, the last
            # rename loses.
            log.say(
                "info",
                f"{place} has no file locks ({error.strerror}): processes compile each for itself",
                once=True,
            )
        yield


def get(
    key: str, build: Callable[[str], tuple[dict[str, Any], list[int], list[str]]], name: str
) -> tuple[Entry, bool]:
    """The entry of ``key``, built where there is none; and whether it was there.

    ``build(path)`` writes the code and returns metadata, description and sites. Of several processes that ask
    at once one builds, the others wait for it. Errors of ``build`` are the caller's; nothing is stored then.
    """
    entry = lookup(key)
    if entry is not None:
        log.say("debug", f"{name}: from the cache, {key}")
        return entry, True
    with locked(key):
        entry = lookup(key)
        if entry is not None:
            log.say("debug", f"{name}: another process compiled it, {key}")
            return entry, True
        return store(key, build, name), False


def store(key: str, build: Callable[[str], tuple[dict[str, Any], list[int], list[str]]], name: str) -> Entry:
    """Builds an entry; the caller holds a lock."""
    root = folder()
    with tempfile.TemporaryDirectory(prefix=".new-", dir=root) as aside:
        code = Path(aside, "kernel", CODE)
        code.parent.mkdir()
        meta, desc, sites = build(str(code))
        held = {
            "code": hashlib.blake2b(code.read_bytes(), digest_size=16).hexdigest(),
            "desc": desc,
            "sites": sites,
            "meta": meta,
        }
        text = json.dumps(held)
        (code.parent / "kernel.json").write_text(text)
        for part in (code.parent, *code.parent.iterdir()):
            folders.keep_from_others(part)
        place = root / key
        try:
            os.rename(code.parent, place)
        except (
            OSError
        ):  # something is there: another process's entry (where there are no locks), or remains of one
            if lookup(key) is None:
                discard(key)
                os.rename(code.parent, place)
    held = json.loads(text)  # what a reader will see: tuples have become lists
    if int(key[8:16], 16) % _SWEEP_EVERY == 0:  # not by a count: most processes store few kernels, or one
        sweep(root)
    return Entry(str(place / CODE), held["desc"], held["sites"], held["meta"])


def amend(entry: Entry, meta: dict[str, Any]) -> Entry:
    """The entry with other metadata, for later readers too unless the cache cannot be written. The code
    stays; whoever writes last wins."""
    path = Path(entry.path).with_name("kernel.json")
    with contextlib.suppress(OSError):
        held = json.loads(path.read_bytes()) | {"meta": meta}
        handle, aside = tempfile.mkstemp(prefix=".new-", dir=path.parent)
        with os.fdopen(handle, "w") as f:
            json.dump(held, f)
        os.chmod(aside, os.stat(path).st_mode & 0o777)  # mkstemp's files are their owner's alone
        os.replace(aside, path)
    return Entry(entry.path, entry.desc, entry.sites, meta)


# ---- eviction


def sweep(root: Path | None = None, limit: int | None = None) -> int:
    """Removes the entries that were not used for longest until the rest takes at most ``limit`` bytes
    (default TILESCALE_CACHE_SIZE), and what killed processes left half-built an hour ago or more. Returns how
    many entries went."""
    import time

    root = root or folder()
    limit = env.CACHE_SIZE.get() if limit is None else limit
    entries: list[tuple[float, int, str]] = []
    for item in os.scandir(root):
        with contextlib.suppress(OSError):  # another process may sweep as well
            if item.name.startswith("."):
                if time.time() - item.stat().st_mtime > 3600:
                    shutil.rmtree(item.path, ignore_errors=True)
            elif item.name != "locks" and item.is_dir():
                sizes = [f.stat().st_size for f in os.scandir(item.path)]
                entries.append(
                    (os.stat(os.path.join(item.path, "kernel.json")).st_mtime, sum(sizes), item.name)
                )
    total = sum(size for _, size, _ in entries)
    gone = 0
    for _, size, key in sorted(entries):
        if total <= limit:
            break
        discard(key)
        total -= size
        gone += 1
    if gone:
        log.say("info", f"the cache {root} was over {limit} bytes: {gone} kernels removed")
    return gone
