"""`tilescale trace`: a program's launches as a timeline that Perfetto opens, simulated or as they really ran
on the CPU or on GPUs."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from tilescale import cuda, env
from tilescale.comm import sim
from tilescale.launch import overlap, picture, ranks
from tilescale.launch.check import MAX_RANKS, Check, require_program
from tilescale.launch.program import Program
from tilescale.simulator import Checking

if TYPE_CHECKING:  # it loads NumPy, which must see the environment that Check makes
    from tilescale.compiler.sim.timeline import Slice, Timeline

#: launches of which the summary tells; the file has all
SHOWN = 12
_KINDS = {"collective": "barrier"}
#: what a warp is for, by what only such warps log
_ROLES = {"load": "producer", "copy": "copies"}
#: warps of a block, and threads of a timeline behind which those of GPUs' blocks begin
WARP, MAX_WARPS, FIRST_WARP = 32, 32, 1 << 20


@click.command("trace", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "-n", "--ranks", "count", type=click.IntRange(1, MAX_RANKS), required=True, help="How many ranks."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("trace.json"),
    show_default=True,
)
@click.option(
    "--target", type=click.Choice(["sim", "cpu", "cuda"]), default="sim", show_default=True,
    help="sim: simulated ranks, in logical time; cpu, cuda: processes, in real time.",
)  # fmt: skip
@click.option(
    "--svg",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw launches into this file, too; not of simulated ranks.",
)
@click.option(
    "--svg-launches",
    "launches",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="How many: 1, the last one of the kernel that took longest; more, the last ones of all kernels.",
)
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a module, as in `python -m`.")
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    ctx: click.Context,
    count: int,
    output: Path,
    target: str,
    svg: Path | None,
    launches: int,
    module: bool,
    program: str,
    args: tuple[str, ...],
) -> None:
    """Run PROGRAM as N ranks and write who did what when, and what went between the ranks, for
    ui.perfetto.dev or chrome://tracing.

    On the simulator each launch is run in turn; times are logical (a step is shown as a microsecond),
    findings are reported as by `tilescale check`, and so is the exit code. On the CPU and on GPUs the
    program's kernels are instrumented, its file is not touched; times are this machine's, one clock for all
    ranks, and the exit code is the program's.
    """
    require_program(program, module)
    for file, option in ((output, "--output"), (svg, "--svg")):
        if file is not None and not file.absolute().parent.is_dir():  # not when all has been run
            raise click.BadParameter(f"there is no folder {file.parent}", param_hint=option)
    if svg is None and ctx.get_parameter_source("launches") is not ParameterSource.DEFAULT:
        raise click.UsageError("--svg-launches says how many launches --svg FILE draws: without it, none")
    if target == "sim":
        if svg is not None:
            raise click.UsageError("--svg draws real times: add --target cpu or --target cuda")
        ctx.exit(Simulated(count, module, program, args, output).run())
    if target == "cuda":
        require_gpu()
        os.environ[env.TARGET.name] = "cuda"
    ctx.exit(_real(count, Program("module" if module else "script", program, args), output, svg, launches))


class Simulated(Check):
    """A run on the simulator, one interleaving a launch, whose timelines are kept."""

    def __init__(self, count: int, module: bool, program: str, args: tuple[str, ...], output: Path):
        super().__init__(
            count, Checking("round_robin", 0, record=True, static=False), module, program, args, False
        )
        self.output = output.absolute()

    def _report(self, failed: sim.Ending | None, seconds: float) -> None:
        from tilescale.compiler.sim.timeline import write

        self._tell(failed)
        timelines = self.checking.timelines
        write(self.output, timelines)
        _summarize(timelines, self.output)


def _summarize(timelines: list[Timeline], output: Path) -> None:
    for timeline in timelines[:SHOWN]:
        click.echo(timeline.summary())
        for line in overlap.report(timeline) if timeline.unit == "µs" else ():
            click.echo(line)
    if len(timelines) > SHOWN:
        click.echo(f"and {len(timelines) - SHOWN} more launches")
    events = sum(len(t.slices) for t in timelines)
    click.echo(
        f"tilescale: {events} operations of {len(timelines)} launch{'es' * (len(timelines) != 1)} are in "
        f"{output}"
    )


# ---- real times


def require_gpu() -> None:
    """A look at files: a process that opened the driver could not start ranks that use it.

    Raises:
        ClickException: this machine has no NVIDIA GPU.
    """
    if not cuda.CUDA.may_be_here():
        raise click.ClickException(
            "this machine has no GPU to trace: the NVIDIA driver's device file is missing "
            f"({' or '.join(cuda.FILES)}); --target cpu and --target sim trace the same program here"
        )


def _real(count: int, program: Program, output: Path, drawing: Path | None, launches: int = 1) -> int:
    from tilescale.compiler.sim.timeline import write

    folder, owner = tempfile.mkdtemp(prefix="tilescale-trace-"), os.getpid()
    os.environ["TILESCALE_TRACE"] = folder
    try:
        code = ranks.run(program, count)
        logs = [_read(path) for path in sorted(Path(folder).glob("rank-*.json"))]
    finally:
        if os.getpid() == owner:  # a forked rank comes by here too (fork.Forked)
            shutil.rmtree(folder, ignore_errors=True)
    missing = set(range(count)) - {log["rank"] for log in logs}
    if missing:
        click.echo(
            f"tilescale: nothing is known of rank {', '.join(map(str, sorted(missing)))}: it was killed or "
            "used no kernel",
            err=True,
        )
    if lost := sum(log["lost"] for log in logs):
        click.echo(f"tilescale: {lost} events did not fit into the log: trace a smaller problem", err=True)
    for line in _clocks(logs):
        click.echo(line)
    timelines = merged(logs, count)
    write(output, timelines)
    _summarize(timelines, output)
    if drawing is not None:
        _draw(timelines, drawing, launches)
    return code


def _read(path: Path) -> dict[str, Any]:
    """What one process left (tilescale/tracing.py)."""
    log = json.loads(path.read_text(encoding="utf-8"))
    log["events"] = [dict(zip(log["fields"], event, strict=True)) for event in log["events"]]
    return dict(log)


def _clocks(logs: list[dict[str, Any]]) -> list[str]:
    """How the GPUs' clocks were set against this machine's, a line each."""
    out = []
    for log in sorted(logs, key=lambda g: int(g["rank"])):
        for c in log["clocks"]:
            drift = "compared once: its drift is not known" if c["drift"] is None else (
                f"drifting by {c['drift'][0]:+.1f} ± {c['drift'][1]:.1f} parts in a million"
            )  # fmt: skip
            out.append(
                f"rank {log['rank']}: GPU {c['device']}'s clock, in steps of {c['tick']} ns, is known to ± "
                f"{c['within'] / 1e3:.2f} µs, {drift}"
            )
    return out


def _draw(timelines: list[Timeline], path: Path, launches: int = 1) -> None:
    try:
        path.write_text(picture.svg(timelines, launches), encoding="utf-8")
    except ValueError as error:
        click.echo(f"tilescale: {path} is not written: {error}", err=True)
    else:
        click.echo(f"tilescale: {'a launch is' if launches == 1 else 'launches are'} drawn in {path}")


def merged(logs: list[dict[str, Any]], count: int) -> list[Timeline]:
    """The logs of all ranks, which share a clock, as one timeline a kernel: all its launches. Times are µs
    behind the first event."""
    start = min((e["ns"] for log in logs for e in log["events"]), default=0)
    by_kernel: dict[str, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for log in logs:
        for event in log["events"]:
            by_kernel[event["kernel"]].append((log["rank"], event))
    threads: dict[tuple[int, str], int] = {}  # (rank, who) → thread, for all kernels
    return [_Merging(name, count, start, threads).of(events) for name, events in sorted(by_kernel.items())]


class _Merging:
    """One kernel's events on their way to a timeline."""

    def __init__(self, name: str, count: int, start: int, threads: dict[tuple[int, str], int]):
        from tilescale.compiler.sim.timeline import Timeline, Traffic

        self.timeline = Timeline(name, Traffic(count), "µs")
        self.start, self.threads = start, threads
        # (rank, block, site, thread of a GPU) → its begun operations.
        self.open: dict[tuple[int, int, int, int], list[dict[str, Any]]] = defaultdict(list)
        # (rank, block) → until when each of its threads is.
        self.busy: dict[tuple[int, int], list[float]] = defaultdict(list)
        # Warp of a GPU's block → what it does beside the block's own threads.
        self.roles: dict[int, str] = {}
        # (rank, counter) → when, who.
        self.signals: dict[tuple[int, str], list[tuple[float, tuple[int, int, float]]]] = defaultdict(list)

    def of(self, events: list[tuple[int, dict[str, Any]]]) -> Timeline:
        waits = []
        done: list[tuple[float, float, int, dict[str, Any]]] = []
        self.roles |= {
            e["thread"] // WARP: _ROLES[e["kind"]]
            for _, e in events
            if e["device"] >= 0 and e["kind"] in _ROLES
        }
        for rank, e in sorted(events, key=lambda p: p[1]["ns"]):
            now = (e["ns"] - self.start) / 1e3
            key = (rank, e["block"], e["site"], e["thread"] if e["device"] >= 0 else -1)
            if e["phase"] == "begin":
                self.open[key].append(e)
            elif e["phase"] == "instant":
                done.append((now, now, rank, e))
            elif self.open[key]:
                done.append(((self.open[key].pop(0)["ns"] - self.start) / 1e3, now, rank, e))
        for begin, end, rank, e in sorted(done, key=lambda d: (d[0], -d[1])):
            made = self._slice(begin, end, rank, e)
            if made.kind == "wait":
                waits.append((made, e))
        for wait, e in waits:
            self._arrow(wait, e)
        return self.timeline

    def _slice(self, begin: float, end: float, rank: int, e: dict[str, Any]) -> Slice:
        from tilescale.compiler.sim.timeline import Slice

        peer, kind = e["rank"], _KINDS.get(e["kind"], e["kind"])
        more: dict[str, Any] = {
            "block": e["block"],
            ("thread" if e["device"] >= 0 else "worker"): e["thread"],
        }
        if e["waited"]:
            more["waited for stages"] = e["waited"] / 1e3
        if e["bytes"]:
            more["bytes"] = e["bytes"]
        if peer >= 0 and not (
            kind == "copy" and peer == rank
        ):  # a copy from or to oneself is a local one, as on the simulator
            more["peer"] = peer
        name = e["name"]
        if kind == "copy":
            pulled = e["text"] == "pull"
            if peer != rank:
                more["direction"] = "pull" if pulled else "put"
            source, target = (peer, rank) if pulled else (rank, peer)
            self.timeline.traffic.add(source, target, e["bytes"], pulled=pulled)
            self.timeline.flight += (
                [(rank, begin, e["bytes"]), (rank, end, -e["bytes"])] if peer != rank else []
            )
        elif kind == "packets":
            kind = f"{e['text']}_packets"
            if peer >= 0:
                more["direction"] = "put"
                self.timeline.traffic.add(rank, peer, e["bytes"])
        elif kind in ("wait", "signal"):
            name += f"[{e['text']}]" if e["text"] else ""
            if kind == "signal" and peer >= 0:
                self.timeline.traffic.add(rank, peer, e["bytes"])
        made = Slice(
            kind,
            name,
            rank,
            self._warp(rank, e) if e["device"] >= 0 else self._thread(rank, e["block"], begin, end),
            begin,
            end - begin,
            e["file"],
            e["line"],
            more,
        )
        self.timeline.slices.append(made)
        if kind == "signal" and e["text"]:
            self.signals[rank if peer < 0 else peer, name].append((begin, (rank, made.thread, begin)))
        return made

    def _warp(self, rank: int, e: dict[str, Any]) -> int:
        """The thread of a warp of a GPU's block, of which one thread logs; named for what such warps do."""
        warp = e["thread"] // WARP
        number = FIRST_WARP + e["block"] * MAX_WARPS + warp
        role = f", {self.roles.get(warp, f'warp {warp}')}" if warp else ""
        self.timeline.threads[rank, number] = f"block {e['block']}{role}"
        return number

    def _thread(self, rank: int, block: int, begin: float, end: float) -> int:
        """A block's thread on which nothing else runs then: warps of a block run at once, and the log does
        not tell which is which."""
        busy = self.busy[rank, block]
        place = next((k for k, until in enumerate(busy) if until <= begin), len(busy))
        busy[place:] = [end, *busy[place + 1 :]]
        name = f"block {block}" + (f" ({place + 1})" if place else "")
        number = self.threads.setdefault((rank, name), len(self.threads))
        self.timeline.threads[rank, number] = name
        return number

    def _arrow(self, wait: Slice, e: dict[str, Any]) -> None:
        """The last signal of the counter before the wait's end ended it, if it was sent while the wait
        lasted."""
        from tilescale.compiler.sim.timeline import Arrow

        sent = (
            [s for s in self.signals.get((wait.rank, wait.name), ()) if wait.start <= s[0] <= wait.end]
            if e["text"]
            else []
        )
        if sent:
            self.timeline.arrows.append(Arrow(wait.name, sent[-1][1], (wait.rank, wait.thread, wait.end)))
