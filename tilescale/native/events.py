"""What instrumented kernels logged: when each remote operation began and ended, and how much went to and from
each rank."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from tilescale.native import build

_MAX_RANKS = 128
PHASES = ("begin", "end", "instant")


class _Event(ctypes.Structure):
    _fields_ = [
        ("ns", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("kernel", ctypes.c_int32),
        ("block", ctypes.c_int32),
        ("site", ctypes.c_int32),
        ("phase", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("worker", ctypes.c_int32),
    ]


@dataclass(frozen=True)
class Event:
    """``ns``: the machine's monotonic clock, the same for all ranks of one machine. ``block``: the block's
    linear index. ``phase``: one of PHASES. ``rank``: the world rank of the peer, -1 without one. ``kind``,
    ``name``, ``file``, ``line``: the operation's place in the program. ``text``: of a copy "pull" where it
    read the peer's memory; of a signal or a wait the counter's index, where the program names it with a
    constant."""

    ns: int
    kernel: str
    block: int
    phase: str
    rank: int
    bytes: int
    thread: int
    site: int
    kind: str
    name: str
    file: str
    line: int
    text: str = ""


def _read() -> tuple[int, int, int | None, list[int]]:
    lib = build.library()
    count, kept = ctypes.c_int64(), ctypes.c_int64()
    moved = (ctypes.c_int64 * (2 * _MAX_RANKS))()
    lib.ts_events.restype = ctypes.c_void_p
    start = lib.ts_events(ctypes.byref(count), ctypes.byref(kept), moved)
    return count.value, kept.value, start, list(moved)


def events() -> list[Event]:
    """This process's log, in order of time; 1,048,576 events are kept between two ``clear_events`` (see
    ``lost_events``)."""
    _, kept, start, _ = _read()
    out = []
    for e in (_Event * kept).from_address(start) if start and kept else ():
        name, sites = build.kernels.get(e.kernel, ("", []))
        parts = (sites[e.site] if 0 <= e.site < len(sites) else "").split("|", 4) + [""] * 5
        line = int(parts[3]) if parts[3].isdigit() else 0
        phase = PHASES[e.phase] if 0 <= e.phase < len(PHASES) else str(e.phase)
        out.append(
            Event(
                e.ns,
                name,
                e.block,
                phase,
                e.rank,
                e.bytes,
                e.worker,
                e.site,
                parts[0],
                parts[1],
                parts[2],
                line,
                parts[4],
            )
        )
    return sorted(out, key=lambda e: e.ns)


def lost_events() -> int:
    """How many events did not fit into the log."""
    count, kept, _, _ = _read()
    return count - kept


def traffic() -> dict[int, tuple[int, int]]:
    """World rank → (bytes, messages) that this process's instrumented kernels exchanged with it, whichever
    way they went."""
    moved = _read()[3]
    return {r: (moved[2 * r], moved[2 * r + 1]) for r in range(_MAX_RANKS) if moved[2 * r + 1]}


def clear_events() -> None:
    """Empties the log and the counters."""
    build.library().ts_events_clear()
