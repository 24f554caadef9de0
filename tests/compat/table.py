"""Rows of the table, from what programs said while they ran."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tests.compat import figures
from tests.compat.programs import Program
from tests.compat.runs import Event


def rows_of(
    tried: Sequence[Program], results: Mapping[tuple[str, str], list[Event]], lowered: str, device: str | None
) -> list[dict[str, Any]]:
    """A row of the table for each program, of the ``results`` by program and mode. What was not run is None. A
    kernel is compiled if every time that any program made it was; ``lowered`` is the mode that says so."""
    kernels: dict[tuple[str, str], list[str | None]] = {}
    for (_, mode), events in results.items():
        for e in events if mode == lowered else ():
            if e["kind"] in ("compiled", "refused"):
                kernels.setdefault((e["file"], e["kernel"]), []).append(e["error"])
    rows = []
    for p in tried:
        compiled, real, timed, peer, peer_timed = (
            results.get((p.path, mode)) for mode in (lowered, device, "time", "peer", "peer-time")
        )
        first = compiled if compiled is not None else real
        found = {k: _of(kernels, p.path, k) for k in p.kernels}
        errors = [e for seen in found.values() for e in seen if e]
        imported = None if first is None else _imported(first)
        paired = figures.pairs(figures.of(timed or ()), figures.of(peer_timed or ()))
        rows.append(
            {
                "file": p.path,
                "kernels": len(p.kernels),
                "imported": first and imported is None,
                "compiled": compiled and sum(bool(s) and not any(s) for s in found.values()),
                "reached": compiled and sum(bool(s) for s in found.values()),
                "right": None if real is None else right_of(real),
                "speed": min((f.ms for f in figures.of(timed or ())), default=None),
                "peer right": None if peer is None else right_of(peer),
                "pairs": [{"kernels": a.kernels, "ms": a.ms, "peer ms": b.ms} for a, b in paired],
                "error": imported
                or (errors[0] if errors else None)
                or (real and run_error(real))
                or (compiled and run_error([e for e in compiled if e["kind"] == "run"])),
                "peer error": peer and run_error(peer),
                "errors": {k: next(filter(None, s), None) for k, s in found.items() if any(s)},
                "waiting": [k for k, s in found.items() if not s or any(s)] if compiled else [],
            }
        )
        for key in ("imported", "compiled", "reached"):
            if first is None or (key != "imported" and compiled is None):
                rows[-1][key] = None
    return rows


def _imported(events: list[Event]) -> str | None:
    """Why a program was not imported."""
    said: str | None = next(
        (e["error"] for e in events if e["kind"] == "import"), run_error(events) or "the process ended"
    )
    return said


def _of(kernels: dict[tuple[str, str], list[str | None]], path: str, name: str) -> list[str | None]:
    """What became of a kernel; a prim_func also under the names of functions in it."""
    while name:
        own = kernels.get((path, name))
        if own is not None:
            return own
        name = name.rpartition(".<locals>.")[0]
    return []


def right_of(events: Sequence[Event]) -> bool:
    """Whether a program ran to its end, its own checks included."""
    return any(e["kind"] == "run" and e["error"] is None for e in events)


def run_error(events: Sequence[Event]) -> str | None:
    return next((e["error"] for e in events if e.get("error")), None)


def ratio(row: dict[str, Any]) -> dict[str, Any] | None:
    """The pair of figures in which TileLang is the furthest ahead."""
    return min(row["pairs"], key=lambda pair: pair["peer ms"] / pair["ms"], default=None)


def recorded(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What tests/bench/record.py keeps: what was not right, and every figure beside TileLang's. Ratios are cut
    behind the third digit, so that none is better than it was."""
    ran = [r for r in rows if r["right"] is not None]
    speeds = [p["peer ms"] / p["ms"] for r in rows for p in r["pairs"]]
    made: dict[str, Any] = {
        "programs": len(ran),
        "right": sum(r["right"] for r in ran),
        "not right": {r["file"]: (r["error"] or "").split("\n")[0][:160] for r in ran if not r["right"]},
        "figures": {
            r["file"]: [
                {
                    "kernels": list(p["kernels"]),
                    "ms": round(p["ms"], 5),
                    "TileLang ms": round(p["peer ms"], 5),
                    "TileLang / ours": _cut(p["peer ms"] / p["ms"]),
                }
                for p in r["pairs"]
            ]
            for r in rows
            if r["pairs"]
        },
    }
    if speeds:
        made |= {
            "median": _cut(statistics.median(speeds)),
            "below 0.95": sum(s < 0.95 for s in speeds),
            "of": len(speeds),
        }
    return made


def _cut(ratio: float) -> float:
    return math.floor(ratio * 1000) / 1000


def table(rows: Sequence[dict[str, Any]], left: Sequence[Program]) -> str:
    lines = [
        "| file | kernels | imported | compiled | right | TileLang right | ms | TileLang ms | ratio | first error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    words = {True: "yes", False: "no", None: "–"}
    for r in rows:
        worst = ratio(r)
        ms = r["speed"] if worst is None else worst["ms"]
        speed = "" if ms is None else f"{ms:.4f}"
        theirs = "|" if worst is None else f"{worst['peer ms']:.4f} | {worst['peer ms'] / worst['ms']:.3f}"
        error = (r["error"] or "").replace("|", "\\|").replace("\n", " ")[:160]
        count = "–" if r["compiled"] is None else r["compiled"]
        lines.append(
            f"| {r['file']} | {r['kernels']} | {words[r['imported']]} | {count} | {words[r['right']]} "
            f"| {words[r['peer right']]} | {speed} | {theirs} | {error} |"
        )
    lines += [f"| {p.path} | {len(p.kernels)} | – | – | – | – | | | | left out: {p.left_out} |" for p in left]
    return "\n".join(lines) + "\n"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """What was counted; a program without results counts nowhere."""
    out = []
    imported = [r for r in rows if r["imported"] is not None]
    out.append(f"{sum(r['imported'] for r in imported)} of {len(imported)} files imported")
    if compiled := [r for r in rows if r["compiled"] is not None]:
        out.append(
            f"{sum(r['compiled'] for r in compiled)} of {sum(r['kernels'] for r in compiled)} kernels compiled"
        )
    for key, what in (("right", "programs right"), ("peer right", "right under TileLang")):
        if ran := [r for r in rows if r[key] is not None]:
            out.append(f"{sum(r[key] for r in ran)} of {len(ran)} {what}")
    if speeds := sorted(p["peer ms"] / p["ms"] for r in rows for p in r["pairs"]):
        slow = sum(s < 0.95 for s in speeds)
        out.append(
            f"{len(speeds)} figures beside TileLang's: median {statistics.median(speeds):.3f} of its speed, "
            f"{slow} below 0.95"
        )
    return ", ".join(out)
