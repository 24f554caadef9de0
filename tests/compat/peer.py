"""One program as it was, under TileLang: ``python -m tests.compat.peer MODE FOLDER FILE EVENTS [LOCK]``, with the
folder that TileLang is installed in on PYTHONPATH and nothing of ours: both bring an apache-tvm-ffi, of versions that
do not go together. Our own folder leaves the path once this file and child.py are loaded."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.compat import child


def main() -> None:
    mode, folder, file, events, *lock = sys.argv[1:]
    own = Path(__file__).resolve().parents[2]
    sys.path[:] = [p for p in sys.path if p and Path(p).resolve() != own]
    said = child.Events(events, folder)
    try:
        import tilelang  # type: ignore[import-not-found]  # noqa: F401
        import torch  # noqa: F401
    except Exception as error:  # noqa: BLE001  # the table has it
        said.say(kind="import", error=f"TileLang: {child.shown(error)}")
        os._exit(1)
    child.run(mode, folder, file, said, *lock)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
