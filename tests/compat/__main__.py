"""Measures how far TileLang's programs run after their import lines are changed.

    python -m tests.compat CHECKOUT [--only GLOB] [--table FILE.md] [--json FILE] [--device cpu|cuda]

Every example of the checkout is copied with ``tilelang`` replaced by ``tilescale`` in its import lines, and
nothing else. In a process of its own each is imported and run with tensors that have no data, so that every
kernel that it makes is compiled for sm_90a (``--nvcc``: by nvcc, too). With ``--device`` it is also run for
real, and counts as right where its own check says so. Results are kept by the hash of the file and of this
tree, so that a second call only repeats what has changed.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from tests.compat import child, programs
from tests.compat.programs import Program

ROOT = Path(__file__).resolve().parents[2]


def tree_hash() -> str:
    """What decides the result beside the program."""
    digest = hashlib.blake2b(digest_size=8)
    for folder in ("tilescale", "compiler", "comm", "tests/compat"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cuh", ".h", ".c") and "__pycache__" not in path.parts:
                digest.update(path.as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def events_of(program: Program, mode: str, folder: Path, limit: float, keep: Path) -> list[dict[str, Any]]:
    """What became of a program, from the folder of results or by running it."""
    text = (folder / program.path).read_bytes()
    kept = (
        keep
        / f"{program.path.replace('/', '.')}-{mode}-{hashlib.blake2b(text, digest_size=6).hexdigest()}.json"
    )
    if kept.exists():
        found: list[dict[str, Any]] = json.loads(kept.read_text())
        return found
    path = keep / f"{os.getpid()}.events"
    path.unlink(missing_ok=True)
    path.touch()
    start = time.monotonic()
    number = os.fork()  # with torch and the compiler imported, which takes longer than most programs
    if not number:
        _become(mode, folder, program, path, keep)
    ended = _await(number, limit)
    events = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    path.unlink()
    if ended:
        events.append({"kind": "run", "error": ended})
    events.append({"kind": "time", "seconds": round(time.monotonic() - start, 1)})
    kept.write_text(json.dumps(events))
    return events


def _become(mode: str, folder: Path, program: Program, path: Path, keep: Path) -> NoReturn:
    """The forked process runs the program and ends."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    output = os.open(path.with_suffix(".output"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, to in ((0, nothing), (1, output), (2, output)):
        os.dup2(to, number)
    os.environ["TILESCALE_TARGET"] = mode if mode in ("cpu", "cuda") else "cuda"
    os.environ["TILESCALE_CACHE_DIR"] = str(keep.parent / "kernels")
    code = 1
    try:
        child.run(mode, str(folder), program.path, child.Events(str(path), str(folder)))
        code = 0
    except BaseException:  # noqa: BLE001  # a forked process ends here
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # threads and finalizers of other packages are nobody's business


def _await(number: int, limit: float) -> str | None:
    """Until a process has ended, which is killed with all that it started where that takes too long; what went
    wrong."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        found, status = os.waitpid(number, os.WNOHANG)
        if found:
            return None if status == 0 else f"the process ended with {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.05)
    os.killpg(number, signal.SIGKILL)
    os.waitpid(number, 0)
    return f"not done after {limit:.0f} s"


def rows_of(tried: list[Program], compiled: dict[str, Any], ran: dict[str, Any]) -> list[dict[str, Any]]:
    """A row of the table for each program. A kernel is compiled if every time that any program made it
    was."""
    kernels: dict[tuple[str, str], list[str | None]] = {}
    for events in compiled.values():
        for e in events:
            if e["kind"] in ("compiled", "refused"):
                kernels.setdefault((e["file"], e["kernel"]), []).append(e["error"])
    rows = []
    for p in tried:
        events = compiled[p.path]
        imported = next((e for e in events if e["kind"] == "import"), {"error": "the process ended"})
        found = {k: _of(kernels, p.path, k) for k in p.kernels}
        errors = [e for seen in found.values() for e in seen if e]
        run = next((e["error"] for e in events if e["kind"] == "run" and e["error"]), None)
        real = ran.get(p.path)
        rows.append(
            {
                "file": p.path,
                "kernels": len(p.kernels),
                "imported": imported["error"] is None,
                "compiled": sum(bool(s) and not any(s) for s in found.values()),
                "reached": sum(bool(s) for s in found.values()),
                "right": None if real is None else right_of(real),
                "speed": min((e["ms"] for e in real or () if e["kind"] == "speed"), default=None),
                "error": imported["error"]
                or (errors[0] if errors else None)
                or (real and run_error(real))
                or run,
                "errors": {k: next(filter(None, s), None) for k, s in found.items() if any(s)},
                "waiting": [k for k, s in found.items() if not s or any(s)],
            }
        )
    return rows


def _of(kernels: dict[tuple[str, str], list[str | None]], path: str, name: str) -> list[str | None]:
    """What became of a kernel; a prim_func also under the names of functions in it."""
    while name:
        own = kernels.get((path, name))
        if own is not None:
            return own
        name = name.rpartition(".<locals>.")[0]
    return []


def right_of(events: list[dict[str, Any]]) -> bool:
    """Whether a program ran to its end, its own checks included."""
    return any(e["kind"] == "run" and e["error"] is None for e in events)


def run_error(events: list[dict[str, Any]]) -> str | None:
    return next((e["error"] for e in events if e.get("error")), None)


def table(rows: list[dict[str, Any]], left: list[Program]) -> str:
    lines = [
        "| file | kernels | imported | compiled | right | ms | first error |",
        "|---|---|---|---|---|---|---|",
    ]
    words = {True: "yes", False: "no", None: "–"}
    for r in rows:
        speed = "" if r["speed"] is None else f"{r['speed']:.3f}"
        error = (r["error"] or "").replace("|", "\\|").replace("\n", " ")[:160]
        lines.append(
            f"| {r['file']} | {r['kernels']} | {words[r['imported']]} | {r['compiled']} | {words[r['right']]} "
            f"| {speed} | {error} |"
        )
    lines += [f"| {p.path} | {len(p.kernels)} | – | – | – | | left out: {p.left_out} |" for p in left]
    return "\n".join(lines) + "\n"


def summary(rows: list[dict[str, Any]]) -> str:
    ran = [r for r in rows if r["right"] is not None]
    return (
        f"{sum(r['imported'] for r in rows)} of {len(rows)} files imported, "
        f"{sum(r['compiled'] for r in rows)} of {sum(r['kernels'] for r in rows)} kernels compiled"
        + (f", {sum(r['right'] for r in ran)} of {len(ran)} programs right" if ran else "")
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m tests.compat", description="TileLang's programs, run by TileScale."
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", default="*", help="programs whose path within examples/ fits this pattern")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="run the programs for real, too")
    parser.add_argument("--nvcc", action="store_true", help="compile the CUDA text by nvcc, too")
    parser.add_argument("--limit", type=float, default=180, help="seconds for a program")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "tilescale-compat")
    parser.add_argument("--reasons", action="store_true", help="print what kernels wait for, most first")
    chosen = parser.parse_args()
    folder = chosen.keep / "examples"
    programs.copy(chosen.checkout, folder)
    found = [
        p for p in programs.programs(chosen.checkout / "examples") if fnmatch.fnmatch(p.path, chosen.only)
    ]
    tried, left = [p for p in found if not p.left_out], [p for p in found if p.left_out]
    keep = chosen.keep / tree_hash()
    keep.mkdir(parents=True, exist_ok=True)
    child.preload(chosen.device)
    compiled: dict[str, Any] = {}
    ran: dict[str, Any] = {}
    for n, p in enumerate(tried):
        compiled[p.path] = events_of(p, "nvcc" if chosen.nvcc else "compile", folder, chosen.limit, keep)
        if chosen.device:
            ran[p.path] = events_of(p, chosen.device, folder, chosen.limit, keep)
        took = sum(e.get("seconds", 0) for e in (*compiled[p.path], *ran.get(p.path, ())))
        print(f"[{n + 1}/{len(tried)}] {p.path} {took:.1f} s", file=sys.stderr, flush=True)
    rows = rows_of(tried, compiled, ran)
    if chosen.table:
        chosen.table.write_text(table(rows, left))
    if chosen.json:
        chosen.json.write_text(json.dumps({"rows": rows, "events": compiled, "ran": ran}, indent=1))
    if chosen.reasons:
        counts: Counter[str] = Counter()
        for r in rows:
            for kernel in r["waiting"]:
                counts[r["errors"].get(kernel) or f"not reached: {r['error']}"] += 1
        for reason, count in counts.most_common():
            print(f"{count:4d}  {reason}")
    print(summary(rows))


if __name__ == "__main__":
    main()
