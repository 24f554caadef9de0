"""What a file in the Trace Event Format must be, as far as Perfetto and chrome://tracing rely on it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

PHASES = {"X", "s", "f", "C", "M"}


def validated(source: Path | dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a file (or of an object that becomes one): every one has what its phase needs, the slices
    of a thread nest, every arrow has two ends in slices and does not point into the past."""
    text = source.read_text(encoding="utf-8") if isinstance(source, Path) else json.dumps(source)
    made = json.loads(text)
    assert made["displayTimeUnit"] in ("ms", "ns")
    events = made["traceEvents"]
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    ends: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for e in events:
        assert e["ph"] in PHASES and isinstance(e["name"], str) and isinstance(e["pid"], int), e
        if e["ph"] == "M":
            assert (
                e["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
                and e["args"]
            ), e
            continue
        assert isinstance(e["ts"], (int, float)) and e["ts"] >= 0, e
        if e["ph"] == "C":
            assert all(isinstance(v, (int, float)) and v >= 0 for v in e["args"].values()), e
            continue
        assert isinstance(e["tid"], int), e
        if e["ph"] == "X":
            assert e["dur"] >= 0, e
            slices[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
        else:
            assert e["ph"] not in ends[e["id"]], e
            ends[e["id"]][e["ph"]] = e
    for thread in slices.values():
        _nested(thread)
    for pair in ends.values():
        assert set(pair) == {"s", "f"}, pair
        first, last = pair["s"], pair["f"]
        assert (
            first["ts"] <= last["ts"]
            and last["bp"] == "e"
            and (first["name"], first["cat"]) == (last["name"], last["cat"])
        ), pair
        for e in (first, last):
            assert any(begin <= e["ts"] <= end for begin, end in slices[e["pid"], e["tid"]]), e
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(slices) <= named
    return events


def _nested(thread: list[tuple[float, float]]) -> None:
    around: list[float] = []
    for begin, end in sorted(thread, key=lambda s: (s[0], -s[1])):
        while around and around[-1] <= begin:
            around.pop()
        assert not around or end <= around[-1], (
            f"a slice from {begin} to {end} sticks out of one that ends at {around[-1]}"
        )
        around.append(end)
