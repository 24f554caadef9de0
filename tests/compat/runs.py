"""Runs programs, several at a time, each in a process of its own, and keeps what became of each as it ends."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tests.compat import child
from tests.compat.programs import Program

ROOT = Path(__file__).resolve().parents[2]
Event = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A program, and how it is run: a mode of child.py."""

    program: Program
    mode: str

    @property
    def peer(self) -> bool:
        return self.mode.startswith("peer")

    @property
    def measured(self) -> bool:
        return self.mode in ("time", "peer-time")


@dataclass
class _Process:
    job: Job
    events: Path
    kept: Path
    start: float
    began: float | None  # when its time limit begins

    def said(self) -> list[Event]:
        return [json.loads(line) for line in self.events.read_text().splitlines() if line.endswith("}")]


@dataclass
class Runner:
    """Where results are kept, and what the runs may take.

    Attributes:
        keep: the folder of results. folder, originals: the programs with their import lines changed, and as they were.
        jobs: processes at a time. limit: seconds for a program, from when the GPU is its own where it is measured.
        until: when, by the monotonic clock, all is to be over; what is not done then is not kept.
        site: for TileLang's process, its PYTHONPATH.
        report: is told a line for each program that ended.
    """

    keep: Path
    folder: Path
    originals: Path
    jobs: int = 1
    limit: float = 180.0
    until: float = float("inf")
    site: str | None = None
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
    results: dict[tuple[str, str], list[Event]] = field(default_factory=dict)

    def run(self, jobs: Iterable[Job], at_once: int | None = None, again: bool = False) -> None:
        """Puts the events of every job into `results`; those not done when time is over are not there. ``again``:
        also those whose results are kept."""
        at_once = at_once or self.jobs
        pending = deque[tuple[Job, Path]]()
        for job in jobs:
            kept = self._kept(job)
            if kept.exists() and not again:
                self.results[job.program.path, job.mode] = json.loads(kept.read_text())
            else:
                pending.append((job, kept))
        total, running = len(pending), dict[int, _Process]()
        try:
            while pending or running:
                while pending and len(running) < at_once and time.monotonic() < self.until:
                    job, kept = pending.popleft()
                    number, process = self._start(job, kept)
                    running[number] = process
                if time.monotonic() >= self.until:
                    return
                for number in [n for n, p in running.items() if self._ended(n, p)]:
                    process = running.pop(number)
                    done = total - len(pending) - len(running)
                    took = time.monotonic() - process.start
                    self.report(
                        f"[{done}/{total}] {process.job.mode} {process.job.program.path} {took:.1f} s"
                    )
                time.sleep(0.02)
        finally:
            for number in running:
                _kill(number)

    def _kept(self, job: Job) -> Path:
        text = ((self.originals if job.peer else self.folder) / job.program.path).read_bytes()
        digest = hashlib.blake2b(text, digest_size=6).hexdigest()
        return self.keep / f"{job.program.path.replace('/', '.')}-{job.mode}-{digest}.json"

    def _start(self, job: Job, kept: Path) -> tuple[int, _Process]:
        path = kept.with_suffix(".events")
        path.unlink(missing_ok=True)
        path.touch()
        start = time.monotonic()
        number = os.fork()  # with torch imported, which takes longer than most programs
        if not number:
            self._become(job, path)
        return number, _Process(job, path, kept, start, None if job.measured else start)

    def _become(self, job: Job, path: Path) -> NoReturn:
        """The forked process runs the program and ends."""
        code = 1
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            nothing = os.open(os.devnull, os.O_RDWR)
            output = os.open(path.with_suffix(".output"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for number, to in ((0, nothing), (1, output), (2, output)):
                os.dup2(to, number)
            lock = str(self.keep / "gpu.lock")
            if job.peer:
                self._become_peer(job, path, lock)
            os.environ["TILESCALE_TARGET"] = "cpu" if job.mode == "cpu" else "cuda"
            os.environ["TILESCALE_CACHE_DIR"] = str(self.keep.parent / "kernels")
            child.run(
                job.mode, str(self.folder), job.program.path, child.Events(str(path), str(self.folder)), lock
            )
            code = 0
        except BaseException:  # noqa: BLE001  # a forked process ends here
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)  # threads and finalizers of other packages are nobody's business

    def _become_peer(self, job: Job, path: Path, lock: str) -> NoReturn:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("TILESCALE", "PYTHONPATH"))}
        cache = self.keep.parent / "peer-kernels"
        env |= {
            "PYTHONPATH": self.site or "",
            "TILELANG_CACHE_DIR": str(cache),
            "TILELANG_TMP_DIR": str(cache / "tmp"),
            "TILELANG_AUTO_TUNING_DISABLE_CACHE": "1",  # a choice made while others ran must not be kept
        }
        args = [job.mode, str(self.originals), job.program.path, str(path), lock]
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, "-m", "tests.compat.peer", *args], env)

    def _ended(self, number: int, process: _Process) -> bool:
        """Whether a process has ended, or has had its time; then its results are kept."""
        found, status = os.waitpid(number, os.WNOHANG)
        wrong = None
        if not found:
            if process.began is None and any(e["kind"] == "began" for e in process.said()):
                process.began = time.monotonic()
            waits = process.start + self.limit * self.jobs  # the others measure first
            if time.monotonic() < (waits if process.began is None else process.began) + self.limit:
                return False
            _kill(number)
            wrong = f"not done after {self.limit:.0f} s"
        elif status:
            wrong = f"the process ended with {os.waitstatus_to_exitcode(status)}"
        events = process.said()
        process.events.unlink()
        if wrong:
            events.append({"kind": "run", "error": wrong})
        events.append({"kind": "time", "seconds": round(time.monotonic() - process.start, 1)})
        aside = process.kept.with_suffix(".part")
        aside.write_text(json.dumps(events))
        aside.replace(process.kept)
        self.results[process.job.program.path, process.job.mode] = events
        return True


def _kill(number: int) -> None:
    """Ends a process and all that it started."""
    try:
        os.killpg(number, signal.SIGKILL)
    except ProcessLookupError:  # it is younger than its group
        os.kill(number, signal.SIGKILL)
    os.waitpid(number, 0)
