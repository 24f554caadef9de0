"""Caches that hold the C runtime already: to build it takes two seconds."""

import shutil
from pathlib import Path

from tilescale.native import build


def with_runtime(folder: Path) -> Path:
    """A new cache with the C runtime as the process of the tests has built it, and without a kernel."""
    folder.mkdir(mode=0o700)
    shutil.copytree(build.library_path().parent, folder / "native")
    return folder
