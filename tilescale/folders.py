"""Where compiled code lies on disk, and whether it may be loaded: what is in these folders is code, run as
this user.

A leaf: imports the errors, env and log alone. ``TILESCALE_CACHE_DIR`` is read and written where that can be;
read alone where it cannot be written (a shared cache); and not looked at where others may have put something
into it. What cannot be kept there goes to a folder of this process's own, which ends with it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
from pathlib import Path

from tilescale import env, log

#: of what we make: others may read it and never write it, whatever the umask
FOLDER_MODE, NOT_OTHERS = 0o755, ~0o022

_private: dict[int, Path] = {}  # by the process that made it, which removes it


def distrust(found: os.stat_result) -> str:
    """Why a file or folder may hold another user's code; empty where only this user, or root, can have
    written it."""
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & 0o022 and not stat.S_ISLNK(found.st_mode):
        return "others may write to it"
    return ""


def readable(name: str) -> list[Path]:
    """The folders ``name`` of the caches, to be looked in, in this order."""
    base = env.CACHE_DIR.get()
    found = [base / name] if not _refused(base, name) and (base / name).is_dir() else []
    return found + [path / name for path in _private.values() if (path / name).is_dir()]


def writable(name: str) -> Path:
    """The folder ``name`` of the cache, made where it is missing; one of this process's own where the cache
    cannot be written."""
    base = env.CACHE_DIR.get()
    why = unusable(name)
    if not why:
        return base / name
    if not _private:
        made = Path(tempfile.mkdtemp(prefix="tilescale-"))  # only its owner enters it
        _private[os.getpid()] = made
        atexit.register(_remove, os.getpid(), made)
        log.say(
            "warning",
            f"the cache folder {base} is not used: {why}; what is compiled is lost with this process "
            f"({made})",
            once=True,
        )
    place = next(iter(_private.values())) / name
    place.mkdir(parents=True, exist_ok=True)
    return place


def _chain(base: Path, name: str) -> list[Path]:
    """The cache's folder and those within it that lead to ``name``."""
    return [base, *(base.joinpath(*Path(name).parts[: k + 1]) for k in range(len(Path(name).parts)))]


def _remove(pid: int, made: Path) -> None:
    if os.getpid() == pid:  # and not one of its forks, which go on without it
        shutil.rmtree(made, ignore_errors=True)


def unusable(name: str) -> str:
    """Why the folder ``name`` of the cache is not written to; empty where it is."""
    base = env.CACHE_DIR.get()
    return _refused(base, name) or _unwritable(base, name)


def _refused(base: Path, name: str) -> str:
    """Why nothing is read from it: the first reason found from the cache's folder inwards."""
    for place in _chain(base, name):
        try:
            if why := distrust(place.stat()):
                return f"{place}: {why} (chmod go-w, or set TILESCALE_CACHE_DIR)"
        except OSError:
            continue  # not there
    return ""


def _unwritable(base: Path, name: str) -> str:
    try:
        for place in _chain(base, name):
            place.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
    except OSError as error:
        return f"{place} cannot be made: {error.strerror}"
    if not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
        return f"{place} cannot be written"
    return ""


def keep_from_others(path: str | os.PathLike[str]) -> None:
    """Takes from others the right to write to a file of ours, which compilers give by the umask."""
    os.chmod(path, os.stat(path).st_mode & 0o777 & NOT_OTHERS)
