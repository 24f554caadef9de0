"""What was seen of a launch, or of several: who did what when, and what went between the ranks; as a file for
Perfetto.

The file is in the Trace Event Format of Chrome ("Trace Event Format", Google, 2016), which ui.perfetto.dev
and chrome://tracing open: a process for each rank, a thread for each block (and executor below it), slices
for operations, arrows from a signal to the wait that it ended, a counter for the bytes on their way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

#: bytes of a signal on its way to another rank: the counter's
SIGNAL_BYTES = 8


@dataclass(frozen=True)
class Slice:
    """Something that took time: what (``kind``: copy, gemm, wait, barrier, signal, atomic …; ``name``: with
    what), who (rank, and a thread of it), from when for how long, where in the program, and what else is to
    be told."""

    kind: str
    name: str
    rank: int
    thread: int
    start: float
    duration: float
    file: str = ""
    line: int = 0
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def end(self) -> float:
        return self.start + self.duration

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" if self.file else ""


@dataclass(frozen=True)
class Arrow:
    """A signal and the wait that it ended, each as rank, thread and a time within the slice."""

    name: str
    source: tuple[int, int, float]
    target: tuple[int, int, float]


class Traffic:
    """What went between ranks, by (from, to): ``bytes``, ``messages`` (remote copies and signals) and
    ``pulls``, those of the messages that the rank that they went to read by itself. int64 arrays of (ranks,
    ranks); nothing on the diagonal."""

    def __init__(self, ranks: int):
        self.bytes, self.messages, self.pulls = (np.zeros((ranks, ranks), np.int64) for _ in range(3))

    def add(self, source: int, target: int, nbytes: int, *, pulled: bool = False) -> None:
        if source != target:
            self.bytes[source, target] += nbytes
            self.messages[source, target] += 1
            self.pulls[source, target] += pulled

    def __str__(self) -> str:
        """A table of bytes, with the messages in parentheses: a line for each rank that sends."""
        n = len(self.bytes)
        cells = [["from \\ to", *(f"rank {r}" for r in range(n))]]
        for a in range(n):
            row = ["·" if a == b else f"{self.bytes[a, b]:,} ({self.messages[a, b]})" for b in range(n)]
            cells.append([f"rank {a}", *row])
        widths = [max(len(row[k]) for row in cells) for k in range(n + 1)]
        return "\n".join(
            "  ".join(text.rjust(w) for text, w in zip(row, widths, strict=True)) for row in cells
        )


@dataclass
class Timeline:
    """One launch. unit: what times are in ("steps", logical, or "µs"); threads: the names of (rank, thread);
    flight: (rank, when, how many bytes more or fewer are on their way)."""

    name: str
    traffic: Traffic
    unit: str = "steps"
    slices: list[Slice] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    threads: dict[tuple[int, int], str] = field(default_factory=dict)
    flight: list[tuple[int, float, int]] = field(default_factory=list)

    @property
    def start(self) -> float:
        return min((s.start for s in self.slices), default=0)

    @property
    def end(self) -> float:
        return max((s.end for s in self.slices), default=0)

    @property
    def waits(self) -> list[Slice]:
        """Waits and barriers, the longest first."""
        return sorted(
            (s for s in self.slices if s.kind in ("wait", "barrier")),
            key=lambda s: (-s.duration, s.rank, s.thread, s.start),
        )

    def renumbered(self, members: Sequence[int], ranks: int) -> Timeline:
        """The same where this launch's rank r is rank ``members[r]`` of ``ranks``."""
        traffic = Traffic(ranks)
        for kind in ("bytes", "messages", "pulls"):
            getattr(traffic, kind)[np.ix_(members, members)] = getattr(self.traffic, kind)
        arrows = [
            Arrow(a.name, (members[a.source[0]], *a.source[1:]), (members[a.target[0]], *a.target[1:]))
            for a in self.arrows
        ]
        return Timeline(
            self.name, traffic, self.unit, [replace(s, rank=members[s.rank]) for s in self.slices], arrows,
            {(members[r], thread): name for (r, thread), name in self.threads.items()},
            [(members[r], when, more) for r, when, more in self.flight],
        )  # fmt: skip

    def summary(self, most: int = 8) -> str:
        """The matrix, and the longest waits by signal and line: how long in all, how often, and the longest
        of them."""
        lines = [f"{self.name}: {self.end - self.start:,.6g} {self.unit}, {len(self.slices)} operations"]
        if len(self.traffic.bytes) > 1:
            lines += [
                "  bytes (messages) between ranks:",
                *("    " + line for line in str(self.traffic).splitlines()),
            ]
        places: dict[tuple[str, str], list[Slice]] = {}
        for s in self.waits:
            places.setdefault((s.name.partition("[")[0], s.place), []).append(s)
        ranked = sorted(places.items(), key=lambda p: -sum(s.duration for s in p[1]))[:most]
        if ranked:
            lines.append("  waits:")
        for (name, place), waits in ranked:
            longest, total = waits[0], sum(s.duration for s in waits)
            where = f"rank {longest.rank}, {self.threads.get((longest.rank, longest.thread), longest.thread)}"
            lines.append(
                f"    {name} at {place}: {total:,.6g} {self.unit} in {len(waits)} "
                f"wait{'s' * (len(waits) != 1)}, "
                f"at most {longest.duration:,.6g} for {longest.name} ({where})"
            )
        return "\n".join(lines)


def chrome(timelines: Iterable[Timeline], *, apart: float = 0) -> dict[str, Any]:
    """Launches as one object of the Trace Event Format. Times of logical launches begin at zero each: they
    are laid one behind another, ``apart`` between them; real times stay as they are. A logical step is shown
    as a microsecond."""
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, int], str] = {}
    offset, arrows, unit = 0.0, 0, "µs"
    for timeline in timelines:
        shift, unit = (
            (offset - timeline.start, timeline.unit) if timeline.unit == "steps" else (0.0, timeline.unit)
        )
        threads.update(timeline.threads)
        for s in sorted(timeline.slices, key=lambda s: (s.start, -s.duration)):
            args = {"kernel": timeline.name, **({"at": s.place} if s.file else {}), **s.more}
            event = {
                "name": f"{s.kind} {s.name}".strip(),
                "cat": s.kind,
                "ph": "X",
                "ts": s.start + shift,
                "dur": s.duration,
            }
            events.append({**event, "pid": s.rank, "tid": s.thread, "args": args})
        for arrow in timeline.arrows:
            arrows += 1
            for phase, (rank, thread, when) in (("s", arrow.source), ("f", arrow.target)):
                event = {
                    "name": arrow.name,
                    "cat": "signal",
                    "ph": phase,
                    "id": arrows,
                    "ts": when + shift,
                    "pid": rank,
                    "tid": thread,
                }
                # Bound to the wait around it, not to what follows.
                events.append({**event, "bp": "e"} if phase == "f" else event)
        events += _flight(timeline, shift)
        offset = max(offset, timeline.end + shift + apart)
    return {"traceEvents": [*_names(threads), *events], "displayTimeUnit": "ns", "otherData": {"unit": unit}}


def _flight(timeline: Timeline, shift: float) -> list[dict[str, Any]]:
    """A counter for each rank."""
    out, level = [], dict.fromkeys(range(len(timeline.traffic.bytes)), 0)
    changes: dict[tuple[float, int], int] = {}
    for rank, when, more in timeline.flight:
        changes[when, rank] = changes.get((when, rank), 0) + more
    for (when, rank), more in sorted(changes.items()):
        level[rank] += more
        out.append(
            {
                "name": "bytes on their way",
                "ph": "C",
                "ts": when + shift,
                "pid": rank,
                "args": {"bytes": level[rank]},
            }
        )
    return out


def _names(threads: dict[tuple[int, int], str]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for rank in sorted({rank for rank, _ in threads}):
        out.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        out.append({"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}})
    for (rank, thread), name in sorted(threads.items()):
        out.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}})
        out.append(
            {
                "name": "thread_sort_index",
                "ph": "M",
                "pid": rank,
                "tid": thread,
                "args": {"sort_index": thread},
            }
        )
    return out


def write(path: str | Path, timelines: Iterable[Timeline], *, apart: float = 0) -> None:
    """Writes the file."""
    Path(path).write_text(json.dumps(chrome(timelines, apart=apart)), encoding="utf-8")
