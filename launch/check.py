"""`tilescale check`: a program of many ranks on the simulator, and what is wrong with its kernels."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import click

from tilescale import simulator
from tilescale.comm import bootstrap, sim
from tilescale.errors import CommError, FindingError, InternalError, Loc, TileError
from tilescale.launch import personas, ranks

#: exit codes: something was found; the program itself failed (2 is click's, for the command line)
FOUND, FAILED, INTERRUPTED = 1, 3, 130
MAX_RANKS = 64


@click.command("check", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "-n",
    "--ranks",
    "count",
    type=click.IntRange(1, MAX_RANKS),
    required=True,
    help="How many ranks to simulate.",
)
@click.option(
    "--schedule", default="adversary", show_default=True, help="Who runs when: see docs/LANGUAGE.md."
)
@click.option(
    "--seeds",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    help="How many runs of each launch under the schedule.",
)
@click.option(
    "--level", type=click.Choice(["tile", "scheduled", "both"]), default="tile", show_default=True,
    help="What runs: the program, what a schedule with rings and roles makes of it, or both, compared.",
)  # fmt: skip
@click.option(
    "--bound",
    type=click.IntRange(1),
    default=10_000,
    show_default=True,
    help="At most so many runs of an exhaustive schedule.",
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=simulator.STEPS,
    show_default=True,
    help="Steps after which a run is endless.",
)
@click.option(
    "--static",
    "table",
    is_flag=True,
    help="Print what the static checks know of each kernel, and why of what they do not.",
)
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a module, as in `python -m`.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object on stdout; what the ranks print goes to stderr.",
)
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    ctx: click.Context,
    count: int,
    schedule: str,
    seeds: int,
    level: str,
    bound: int,
    limit: int,
    table: bool,
    module: bool,
    as_json: bool,
    program: str,
    args: tuple[str, ...],
) -> None:
    """Run PROGRAM as N simulated ranks in one process, and say what is wrong with the kernels that it
    launches.

    The program runs unmodified, once for each rank; its kernels run on the simulator, whatever target they
    ask for. Each launch is run in turn (these are the results that the program gets) and again under the
    schedule with every seed; the static checks look at each kernel once for its ranks, integers and extents.
    Findings go to stderr, a summary to stdout. Exit code: 0 where nothing was found, 1 where something was, 3
    where the program itself failed.
    """
    require_program(program, module)
    _require_schedule(schedule)
    if level != "tile" and schedule.startswith("exhaustive"):
        raise click.UsageError(
            "the exhaustive schedules know the steps of the tile level: --level tile, or another schedule"
        )
    checking = simulator.Checking(schedule, seeds, level, bound=bound, limit=limit)
    ctx.exit(Check(count, checking, module, program, args, as_json, table).run())


def require_program(program: str, module: bool) -> None:
    """Raises UsageError where PROGRAM is nothing that Python can run."""
    if module:
        return
    path = Path(program)
    if not path.exists():
        raise click.UsageError(f"there is no file {program!r} (a module: -m {program})")
    if path.is_dir() and not (path / "__main__.py").exists():
        raise click.UsageError(f"{program!r} is a folder without __main__.py")


def _require_schedule(schedule: str) -> None:
    """Raises UsageError where there is no such schedule, before any of the program runs."""
    from tilescale.compiler.sim.schedule import SCHEDULES

    step = r"\d+\.\d+(?:/-?\d+)?"  # as compiler/sim/interleave.py spells it, which loads NumPy
    if schedule in SCHEDULES or re.fullmatch(rf"exhaustive:(?:[1-9]\d*@)?(?:-|{step}(?:,{step})*)", schedule):
        return
    if schedule.partition(":")[0] != "exhaustive":
        also = "; --seeds says how many of them" if schedule.partition(":")[0] in SCHEDULES else ""
        raise click.UsageError(f"there is no schedule {schedule!r}: {', '.join(SCHEDULES)}{also}")
    raise click.UsageError(
        f"there is no schedule {schedule!r}: exhaustive:<launch>@<choices>, as a finding says it"
    )


class Check:
    """One run of the command."""

    def __init__(
        self,
        count: int,
        checking: simulator.Checking,
        module: bool,
        program: str,
        args: tuple[str, ...],
        as_json: bool,
        table: bool = False,
    ):
        from tqdm import tqdm

        self.count, self.module, self.program, self.as_json, self.checking = (
            count,
            module,
            program,
            as_json,
            checking,
        )
        self.table = table
        self.lost: list[Loc] = []  # where threads that ranks started ended in an error of ours
        self.world = simulator.world(count, self.checking)
        personas.Persona.share()
        self.process = personas.Persona(0, {}, sys.argv, list(sys.path), (sys.stdout, sys.stderr))
        self.process.take_off()
        self.bar = tqdm(
            unit=" runs", leave=False, file=sys.stderr, disable=not sys.stderr.isatty(), desc="checking"
        )
        self.checking.progress = lambda: self.bar.update() and None
        ranks.share_processors(os.environ, count)  # torch reads it when the program imports it
        # Ranks take turns, and products of small tiles are slower on several threads; NumPy reads this when
        # it is loaded.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        for name in set(os.environ) - set(bootstrap.without_ranks(os.environ)):
            del os.environ[name]
        path = [os.getcwd() if module else str(Path(program).resolve().parent), *sys.path[1:]]
        under = (sys.stderr if as_json else sys.stdout, sys.stderr)
        outputs = self.outputs = [personas.Output(r, under, self.bar.clear) for r in range(count)]
        streams = (
            personas.OfTurn(lambda: outputs[self.world.turn].streams[0]),
            personas.OfTurn(lambda: outputs[self.world.turn].streams[1]),
        )
        argv = [program, *args]
        self.personas = [
            personas.Persona(r, self._environ(r), list(argv), list(path), streams) for r in range(count)
        ]
        self.world.enter = lambda rank: self.personas[rank].put_on()
        self.world.leave = lambda rank: self.personas[rank].take_off()

    def _environ(self, rank: int) -> dict[str, str]:
        n = str(self.count)
        return {
            "RANK": str(rank),
            "WORLD_SIZE": n,
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": n,
            "TILESCALE_JOB": "sim",
        }

    def run(self) -> int:
        """Runs the ranks and reports. Returns the exit code."""
        start = time.perf_counter()
        watch: Any = personas.Imports(lambda: self.personas[self.world.turn])
        sys.meta_path.insert(0, watch)
        self.hook, threading.excepthook = threading.excepthook, self._thread_ended
        broken: sim.Broken | None = None
        # A shell's background jobs begin with interrupts ignored.
        interrupts = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with personas.sleeping():
                endings = self.world.run(self._rank)
        except KeyboardInterrupt:
            click.echo(f"\ntilescale: interrupted{_place_of(self.world)}", err=True)
            return INTERRUPTED
        except sim.Broken as error:
            broken = error
        finally:
            signal.signal(signal.SIGINT, signal.SIG_DFL if interrupts is None else interrupts)
            with contextlib.nullcontext() if broken is None else contextlib.suppress(Exception):
                self.process.put_on()
            for output in self.outputs:
                output.finish()
            threading.excepthook = self.hook
            sys.meta_path.remove(watch)
            self.bar.close()
        if broken is not None:
            click.echo(
                "".join(traceback.format_exception(broken.__cause__))
                + f"tilescale: the check itself failed: {broken}",
                err=True,
            )
            return FAILED
        failed = next((e for e in endings if e.told is not None), None)
        if (
            failed is not None
            and isinstance(failed.error, (FindingError, CommError))
            and self.checking.tells(failed.error)
        ):
            failed = None  # it is told as a finding
        self._report(failed, time.perf_counter() - start)
        return FOUND if self.checking.report.findings else FAILED if failed is not None or self.lost else 0

    def _thread_ended(self, args: Any) -> None:
        """A thread that a rank started ended in an exception, of which nobody else hears."""
        if isinstance(args.exc_value, TileError):
            frames = [f for f in traceback.extract_tb(args.exc_traceback) if not _ours(f.filename)]
            self.lost += [Loc(f.filename, f.lineno or 0) for f in frames[-1:]]
        self.hook(args)

    def _rank(self, rank: int) -> None:
        if self.module:
            runpy.run_module(self.program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(Path(self.program).absolute()), run_name="__main__")

    def _tell(self, failed: sim.Ending | None) -> None:
        """Findings and failures, on stderr."""
        for finding in self.checking.report.findings:
            click.echo(f"{finding}\n", err=True)
        for loc in dict.fromkeys(self.lost):
            click.echo(
                f"{loc}: a call in a thread that a rank started is lost: such threads have no turns among "
                "the ranks",
                err=True,
            )
        if failed is not None:
            click.echo(_why(failed), err=True)

    def _report(self, failed: sim.Ending | None, seconds: float) -> None:
        checking = self.checking
        findings, kernels, static = checking.report.findings, sorted(checking.kernels), checking.obligations
        self._tell(failed)
        if self.table:
            for proof in checking.proofs:
                click.echo(f"{proof}\n", err=True)
        if self.as_json:
            facts = {
                "ranks": self.count,
                "schedule": checking.schedule,
                "seeds": checking.seeds,
                "level": checking.level,
                "kernels": kernels,
                "launches": checking.launches,
                "runs": checking.report.runs,
                "seconds": round(seconds, 3),
                "traces": checking.report.traces,
                "incomplete": checking.incomplete,
                "varying": sorted(checking.report.varying),
                "unchecked": sorted(checking.report.unchecked),
                "static": {
                    "obligations": len(static.items),
                    "kinds": static.counts,
                    "cut_short": static.cut_short,
                    **{s: len(static.of(s)) for s in ("proven", "refuted", "unknown")},
                },
                "findings": [f.to_dict() for f in findings],
                "lost": [str(loc) for loc in self.lost],
                "failure": None if failed is None else _why(failed),
            }
            click.echo(json.dumps(facts, indent=2))
            return
        for name in sorted(checking.report.varying):
            click.echo(f"tilescale: {name} comes out different from schedule to schedule", err=True)
        for text in sorted(checking.report.unchecked):
            click.echo(f"tilescale: {text}", err=True)
        found = _count(len(findings), "finding") if findings else "no finding"
        if not findings and (failed is not None or self.lost):
            found = "what was run has no fault, and not all was run"
        if checking.schedule == "exhaustive":
            left = checking.incomplete
            found += (
                ", all interleavings" if not left else f", not all interleavings of {_count(left, 'launch')}"
            )
        found += f", rank {failed.rank} failed" if failed is not None else ""
        found += f", {_count(len(self.lost), 'call')} in threads of the program lost" if self.lost else ""
        found += f", static: {static.summary}" if checking.proofs else ""
        click.echo(
            f"tilescale: checked {_count(len(kernels), 'kernel')} on {_count(self.count, 'rank')}: "
            f"{_count(checking.launches, 'launch')}, "
            f"{_count(checking.report.runs, 'run')}, {found}, {seconds:.1f} s"
        )


def _count(n: int, what: str) -> str:
    return f"{n} {what if n == 1 else what + ('es' if what.endswith('ch') else 's')}"


def _place_of(world: sim.SimWorld) -> str:
    """Where in the program the rank is whose turn it is."""
    frame = sys._current_frames().get(world.threads[world.turn].ident or 0)
    while frame is not None and not personas.is_programs(frame):
        frame = frame.f_back
    return (
        ""
        if frame is None
        else f" while rank {world.turn} was at {frame.f_code.co_filename}:{frame.f_lineno}"
    )


def _why(ending: sim.Ending) -> str:
    """How the rank that failed first ended: its traceback without our own frames around the program's, or its
    exit code."""
    error = ending.error
    assert error is not None
    if isinstance(error, SystemExit):
        said = f": {error.code}" if isinstance(error.code, str) else f" with exit code {error.code}"
        return f"tilescale: rank {ending.rank} ended{said}"
    told = ending.told
    assert told is not None
    frames = list(told.stack)
    ours = ("runpy", str(Path(__file__).parent), str(Path(sim.__file__)))
    while len(frames) > 1 and any(name in frames[0].filename for name in ours):
        frames.pop(0)
    if isinstance(error, TileError) and not isinstance(error, InternalError):  # it says itself what is wrong
        while len(frames) > 1 and _ours(frames[-1].filename):
            frames.pop()
    told.stack[:] = frames
    return f"{''.join(told.format())}tilescale: rank {ending.rank} failed"


def _ours(file: str) -> bool:
    """Whether a frame's file is one of ours, or generated by us."""
    parts = [
        sys.modules[f"tilescale{part}"]
        for part in ("", ".comm", ".launch", ".compiler")
        if f"tilescale{part}" in sys.modules
    ]
    return file.startswith("<call of") or any(
        file.startswith(str(folder) + os.sep) for part in parts for folder in part.__path__
    )
