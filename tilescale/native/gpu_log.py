"""The logs that instrumented kernels leave on GPUs (gpu_log.c), and a GPU's clock as the host's."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

from tilescale.native import build

_MAX_DEVICES = 64


class _Event(ctypes.Structure):
    _fields_ = [
        ("begin", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("amount", ctypes.c_int64),
        ("site", ctypes.c_int32),
        ("peer", ctypes.c_int32),
        ("block", ctypes.c_int32),
        ("thread", ctypes.c_int32),
        ("kernel", ctypes.c_int32),
        ("place", ctypes.c_int32),
    ]


@dataclass(frozen=True)
class Span:
    """What a thread of a block logged. begin, end: ns of the GPU's clock; amount: bytes; of a loop the ns
    for which it waited for stages; of a signal or wait the counter's place; rank: the world rank of the peer,
    -1 without one; multiprocessor: where the block ran."""

    begin: int
    end: int
    amount: int
    site: int
    rank: int
    block: int
    thread: int
    kernel: int
    multiprocessor: int


@dataclass(frozen=True)
class Sample:
    """One comparison of clocks: both read the same moment, give or take ``within`` ns."""

    gpu: int
    host: int
    within: int


@dataclass(frozen=True)
class GpuLog:
    """Of one GPU. lost: events that did not fit. samples: comparisons of its clock with the host's, one or
    two; one where the GPU failed before the log was read, and its drift is not known."""

    device: int
    spans: tuple[Span, ...]
    lost: int
    samples: tuple[Sample, ...]

    def host_ns(self, ns: int) -> int:
        """A time of the GPU's as the host's monotonic clock shows it: the clocks drift evenly from the first
        comparison to the last, between which all launches run."""
        first, last = self.samples[0], self.samples[-1]
        offset = first.host - first.gpu
        if last.gpu > first.gpu:
            gained = (last.host - last.gpu) - offset
            offset += gained * (min(max(ns, first.gpu), last.gpu) - first.gpu) // (last.gpu - first.gpu)
        return ns + offset

    @property
    def within(self) -> int:
        """By how many ns `host_ns` may be off, as far as the comparisons say."""
        return max(s.within for s in self.samples)

    @property
    def drift(self) -> tuple[float, float] | None:
        """By how many parts in a million the GPU's clock is slower than the host's, and how far that may be
        off; None where it was compared once."""
        first, last = self.samples[0], self.samples[-1]
        if last.gpu <= first.gpu:
            return None
        apart = last.gpu - first.gpu
        return ((last.host - first.host) / apart - 1) * 1e6, (first.within + last.within) / apart * 1e6

    @cached_property
    def tick(self) -> int:
        """The ns by which the GPU's clock moves at once: the smallest step between two times of the log; 0
        where it has one time at most."""
        times = sorted({t for s in self.spans for t in (s.begin, s.end)})
        return min((b - a for a, b in zip(times, times[1:], strict=False)), default=0)


def gpu_logs() -> list[GpuLog]:
    """The logs of this process, for each GPU that ran an instrumented kernel; waits for all that these GPUs
    were given."""
    lib = build.library()
    out = []
    for device, (start, kept, lost, samples) in _heads().items():
        spans = [
            Span(
                e.begin, e.end, e.amount, e.site,
                e.peer if e.peer < 0 else int(lib.ts_gpu_log_rank(e.place >> 16, e.peer)),
                e.block, e.thread, e.kernel, e.place & 0xFFFF,
            )
            for e in (_Event * kept).from_address(start)
            if e.end
        ]  # fmt: skip
        out.append(GpuLog(device, tuple(spans), lost, samples))
    return out


def gpu_lost() -> int:
    """How many events did not fit into these logs."""
    return sum(lost for _, _, lost, _ in _heads().values())


def _heads() -> dict[int, tuple[int, int, int, tuple[Sample, ...]]]:
    """GPU → where its log begins, how many slots of it were taken, the events that found none, and the
    comparisons of clocks."""
    lib, out = build.library(), {}
    lib.ts_gpu_events.restype = ctypes.c_void_p
    for device in range(_MAX_DEVICES):
        kept, lost, count = ctypes.c_int64(), ctypes.c_int64(), ctypes.c_int32()
        read = (ctypes.c_int64 * 6)()
        numbers = (ctypes.byref(n) for n in (kept, lost, count))
        start = lib.ts_gpu_events(device, *numbers, read)
        if start:
            samples = tuple(Sample(*read[3 * k : 3 * k + 3]) for k in range(count.value))
            out[device] = (int(start), kept.value, lost.value, samples)
    return out
