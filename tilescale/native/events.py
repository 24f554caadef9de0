"""What instrumented kernels logged: when each remote operation began and ended, and how much went to and from
each rank."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

from tilescale.native import build
from tilescale.native.gpu_log import GpuLog, gpu_logs, gpu_lost

_MAX_RANKS = 128
PHASES = ("begin", "end", "instant")
#: of a signal to another rank: its counter's
SIGNAL_BYTES = 8


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
    """``ns``: the machine's monotonic clock, the same for all ranks of one machine; of a GPU its own clock as
    the host's (`GpuLog.host_ns`). ``block``: the block's linear index. ``phase``: one of PHASES. ``rank``:
    the world rank of the peer, -1 without one. ``thread``: the processor's thread, or the block's on a GPU.
    ``kind``, ``name``, ``file``, ``line``: the operation's place in the program. ``text``: of a copy "pull"
    where it read the peer's memory; of a signal or a wait the counter's index, on the CPU where the program
    names it with a constant. ``waited``: of a loop on a GPU the ns for which it waited for stages of its
    rings. ``device``: the GPU, -1: the processor."""

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
    waited: int = 0
    device: int = -1


def _read() -> tuple[int, int, int | None, list[int]]:
    lib = build.library()
    count, kept = ctypes.c_int64(), ctypes.c_int64()
    moved = (ctypes.c_int64 * (2 * _MAX_RANKS))()
    lib.ts_events.restype = ctypes.c_void_p
    start = lib.ts_events(ctypes.byref(count), ctypes.byref(kept), moved)
    return count.value, kept.value, start, list(moved)


def _site(kernel: int, number: int) -> tuple[str, tuple[str, str, str, int, str]]:
    """The kernel's name; kind, name, file, line and text of one of its sites."""
    name, sites = build.kernels.get(kernel, ("", []))
    parts = (sites[number] if 0 <= number < len(sites) else "").split("|", 4) + [""] * 5
    line = int(parts[3]) if parts[3].isdigit() else 0
    return name, (parts[0], parts[1], parts[2], line, parts[4])


def events() -> list[Event]:
    """This process's log, in order of time; 1,048,576 events of the processor and as many spans of each GPU
    are kept between two ``clear_events`` (see ``lost_events``). Waits for the GPUs that have some."""
    _, kept, start, _ = _read()
    out = []
    for e in (_Event * kept).from_address(start) if start and kept else ():
        kernel, at = _site(e.kernel, e.site)
        phase = PHASES[e.phase] if 0 <= e.phase < len(PHASES) else str(e.phase)
        out.append(Event(e.ns, kernel, e.block, phase, e.rank, e.bytes, e.worker, e.site, *at))
    for log in gpu_logs():
        out += _spans(log)
    return sorted(out, key=lambda e: e.ns)


def _spans(log: GpuLog) -> Iterator[Event]:
    """Each span as its begin and its end."""
    for e in log.spans:
        kernel, at = _site(e.kernel, e.site)
        size, waited = (0, e.amount) if at[0] in ("gemm", "load") else (e.amount, 0)
        if at[0] in ("wait", "signal"):
            size = SIGNAL_BYTES if at[0] == "signal" and e.rank >= 0 else 0
            at = (*at[:4], _index(at[4], e.amount))
        for phase, ns in (("begin", e.begin), ("end", e.end)):
            who = (kernel, e.block, phase, e.rank, size, e.thread, e.site)
            yield Event(log.host_ns(ns), *who, *at, waited, log.device)


def _index(extents: str, place: int) -> str:
    """The index of a counter at a place, by its signal's extents; "?" is one that only the call knew, and
    which the place does not need if it is the first."""
    out: list[str] = []
    sizes = extents.split(", ") if extents else []
    for k, size in reversed(list(enumerate(sizes))):
        if k and not size.isdigit():
            return f"at {place}"
        out.insert(0, str(place % int(size) if k else place))
        place //= int(size) if k else 1
    return ", ".join(out)


def lost_events() -> int:
    """How many events did not fit into the logs."""
    count, kept, _, _ = _read()
    return count - kept + gpu_lost()


def traffic() -> dict[int, tuple[int, int]]:
    """World rank → (bytes, messages) that this process's instrumented kernels exchanged with it, whichever
    way they went."""
    moved = _read()[3]
    out = {r: (moved[2 * r], moved[2 * r + 1]) for r in range(_MAX_RANKS) if moved[2 * r + 1]}
    for log in gpu_logs():
        for e in log.spans:
            if e.rank >= 0:
                size, messages = out.get(e.rank, (0, 0))
                signal = _site(e.kernel, e.site)[1][0] == "signal"
                out[e.rank] = size + (SIGNAL_BYTES if signal else e.amount), messages + 1
    return out


def clear_events() -> None:
    """Empties the logs and the counters; waits for the GPUs that have some."""
    lib = build.library()
    lib.ts_events_clear()
    lib.ts_gpu_events_clear()
