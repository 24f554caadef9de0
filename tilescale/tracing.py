"""TILESCALE_TRACE: what the instrumented kernels of this process logged, left in a folder when the process
ends.

`tilescale trace --target cpu` (or cuda) sets the variable for its ranks and makes one file of what they leave
(launch/trace.py). The program knows nothing of it; a process that is killed leaves nothing.
"""

from __future__ import annotations

import atexit
import json
import os
from dataclasses import fields
from pathlib import Path

from tilescale import env

_folders: list[Path] = []


def wanted() -> bool:
    """Whether kernels are to be instrumented for a trace; the first time, the log is booked to be left when
    the process ends."""
    folder = env.TRACE.get()
    if folder is None:
        return False
    if not _folders:
        _folders.append(folder)
        atexit.register(leave, folder)
    return True


def leave(folder: Path) -> None:
    """Writes this process's events into the folder."""
    from tilescale import native
    from tilescale.comm import bootstrap
    from tilescale.native import build

    world = bootstrap.world()
    names = [f.name for f in fields(native.Event)]
    logged = [[getattr(e, name) for name in names] for e in (native.events() if build.kernels else [])]
    lost = native.lost_events() if build.kernels else 0
    clocks = [
        {"device": g.device, "within": g.within, "drift": g.drift, "tick": g.tick}
        for g in (native.gpu_logs() if build.kernels else [])
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{world.rank}.{os.getpid()}.json"
    path.write_text(
        json.dumps(
            {
                "rank": world.rank,
                "ranks": world.size,
                "lost": lost,
                "clocks": clocks,
                "fields": names,  # of each event, which is a list: logs are long
                "events": logged,
            }
        ),
        encoding="utf-8",
    )
