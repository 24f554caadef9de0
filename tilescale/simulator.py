"""``target="sim"``: kernels that a call runs on the simulator, on the arrays that it is given; no LLVM, no C
compiler, no disk cache.

A call on a rank of its own runs at once. A call of a kernel in which ranks meet, made by a simulated rank
(tilescale.comm.sim), waits until every rank of the team has made it, and the last one runs the machine for
all. Beside the run in turn, whose results callers get, a `Checking` may ask for more runs from the same
beginning under other schedules; what is wrong with any goes into its report.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tilescale import arguments, build, comm, compat, log
from tilescale.cache import Entry
from tilescale.comm import sim
from tilescale.errors import FindingError, LaunchError, TileValueError
from tilescale.explain import place
from tilescale.hosts import Hosts
from tilescale.kernel import Kernel
from tilescale.overlapped import Windows

if TYPE_CHECKING:
    from tilescale.compiler.checks.overlap import Step
    from tilescale.compiler.ir.program import TileProgram

Call = arguments.Call["SimKernel"]
LAUNCH = "a launch"
#: steps for the static checks of a kernel, where launches are checked (compiler/static/prove.Budget)
STATIC_BUDGET = 2_000_000
#: steps after which a run of a launch counts as endless
STEPS = 2_000_000


class Program:
    """A traced kernel made ready for the simulator, once in a process: what runs it and what its calls are
    checked by."""

    def __init__(self, traced: TileProgram, key: str | None):
        from tilescale.compiler import description
        from tilescale.compiler.ir.added import mark_added
        from tilescale.compiler.passes.pipeline import tile_level
        from tilescale.compiler.passes.residency import reaches_ranks
        from tilescale.compiler.sim.prepare import prepare

        self.traced = traced
        self.key = f"program {next(_numbers)}" if key is None else key
        self.prepared = prepare(tile_level(traced))
        self.meta = {**description.metadata(traced), "target": "sim"}
        mark_added(traced, self.meta)
        self.reaches = reaches_ranks(self.prepared.program.func.body)
        self.refuted: dict[tuple[int | None, int | None], Any] = {}

    def require(self, ranks: int | None, world: int | None) -> None:
        """What `compiler.static.require` asks, once for the same numbers.

        Raises:
            TileValueError: an obligation is refuted.
        """
        from tilescale.compiler import static

        if (ranks, world) not in self.refuted:
            self.refuted[ranks, world] = static.first_refuted(self.traced, ranks, world)
        if self.refuted[ranks, world] is not None:
            raise self.refuted[ranks, world].error()

    def require_here(self) -> None:
        """What a compilation requires where it is asked for. Where launches are checked, their report says it
        instead."""
        thread = sim.here()
        if thread is None or thread.job.checking is None:
            self.require(None, build.ranks())

    @functools.cached_property
    def scheduled(self) -> Any:
        """The same as a target with asynchronous copies would have it: rings of two stages, for a producer
        and a consumer."""
        from tilescale.compiler.checks.levels import Plan
        from tilescale.compiler.sim.prepare import prepare

        return prepare(Plan().of(self.prepared.program))

    def launch(
        self, args: Sequence[dict[str, Any]], level: str, only: int | None, whose: str, limit: int
    ) -> Any:
        """A launch at a level, with the arguments of every rank: see compiler/checks/levels.py."""
        from tilescale.compiler.checks.levels import Both, Plan
        from tilescale.compiler.checks.run import Launch

        if level == "both":
            return Both(self.prepared, self.scheduled, args, Plan(), only=only, limit=limit, whose=whose)
        if level == "scheduled":
            return Launch(self.scheduled, args, only=only, limit=limit, whose=f"{whose}, {Plan()}")
        return Launch(self.prepared, args, only=only, limit=limit, whose=whose)


_programs: dict[str, Program] = {}
_numbers = itertools.count()


def program_of(key: str | None, trace: Callable[[], TileProgram]) -> Program:
    """The program behind a key (`tilescale.build.key_of`), traced and prepared by the first who asks; None:
    not to be remembered."""
    made = None if key is None else _programs.get(key)
    if made is None:
        made = Program(trace(), key)
        if key is not None:
            _programs[key] = made
    return made


@dataclass(frozen=True)
class Proof:
    """What the static checks know of a kernel on so many ranks (None: on any number), called with these
    integers and extents."""

    label: str
    ranks: int | None
    values: dict[str, int]
    found: Any

    @property
    def whose(self) -> str:
        """``product on 4 ranks, m = 100``."""
        values = "".join(f", {name} = {value}" for name, value in sorted(self.values.items()))
        count = (
            "any number of ranks" if self.ranks is None else (f"{self.ranks} rank{'s' * (self.ranks != 1)}")
        )
        return f"{self.label} on {count}{values}"

    def __str__(self) -> str:
        """The table of obligations, and a line for each that is unknown."""
        parts = [f"{self.whose}:", self.found.table(), self.found.open_questions()]
        return "\n".join(part for part in parts if part)


@dataclass
class Checking:
    """What launches do beside computing, and what came of it.

    Attributes:
        schedule, seeds: further runs of each launch, see compiler/sim/schedule.py; bound: at most so many
            where it is "exhaustive". ``exhaustive:3@4.2,9.1/0`` is one run of the third launch alone, as a
            finding names it. level: "tile", "scheduled" or "both". limit: steps after which a run counts as
            endless.
        report: what was found in all runs of all launches. kernels: what was launched, with its constants.
            launches: how many.
        incomplete: of how many launches an exhaustive exploration has not run all interleavings.
        progress: called behind each run.
        record: the timeline of every launch is kept in ``timelines``, its ranks numbered as in the job.
        static: whether kernels are checked statically too, once for each number of ranks and set of integers
            and extents; a kernel on so many ranks has STATIC_BUDGET steps for all its sets. proofs:
            what came of it, in the order of the launches.
    """

    schedule: str = "adversary"
    seeds: int = 10
    level: str = "tile"
    report: Any = None
    kernels: set[str] = field(default_factory=set)
    launches: int = 0
    incomplete: int = 0
    progress: Callable[[], None] = lambda: None
    seen: set[bytes] = field(default_factory=set)
    explored: dict[bytes, list[int]] = field(default_factory=dict)
    bound: int = 10_000
    record: bool = False
    timelines: list[Any] = field(default_factory=list)
    static: bool = True
    proofs: list[Proof] = field(default_factory=list)
    spent: dict[tuple[str, int | None], int] = field(default_factory=dict)
    limit: int = STEPS
    windows: Windows | None = None  # of launches that run overlapped
    # What ranks that waited for one another for ever were told.
    disagreed: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.report is None:
            from tilescale.compiler.findings import Report

            self.report = Report()

    def schedule_of(self, number: int) -> str | None:
        """The schedule of the launch ``number`` (the first is 1); None where it has no further runs."""
        head, at, choices = self.schedule.partition("@")
        if not at:
            return self.schedule
        return f"exhaustive:{choices}" if head == f"exhaustive:{number}" else None

    def is_new(self, mark: bytes, unwritten: bytes) -> bool:
        """Whether no launch with this mark (see `_mark`) has been explored in which as much or more was
        unwritten, of which others can only find less."""
        known, bits = self.explored.setdefault(mark, []), int.from_bytes(unwritten, "little")
        if any(not bits & ~other for other in known):
            return False
        known.append(bits)
        return True

    def prove(self, kernel: SimKernel, ranks: int, values: dict[str, int], report: Any) -> None:
        """Asks the static checks of a kernel, unless they have been asked for the same ranks and values;
        refutations go into the report. Where ranks do not meet, not all need launch: then no number of them
        is taken for granted."""
        program, count = kernel.simulated, ranks if kernel.collective else None
        mark = hashlib.blake2b(
            repr((program.key, count, sorted(values.items()))).encode(), digest_size=16
        ).digest()
        if not self.static or mark in self.seen:
            return
        self.seen.add(mark)
        from tilescale.compiler.static import check

        spent = self.spent.get((program.key, count), 0)
        found = check(program.traced, max(STATIC_BUDGET - spent, 0), ranks=count, values=values)
        self.spent[program.key, count] = spent + found.steps
        self.proofs.append(Proof(kernel.label, count, values, found))
        report.add_static(found)
        if found.cut_short:
            self.report.unchecked.add(found.unfinished(self.proofs[-1].whose))

    @property
    def obligations(self) -> Any:
        """What the static checks know of all kernels together."""
        from tilescale.compiler.static import Obligations

        each = [p.found for p in self.proofs]
        return Obligations(
            [o for found in each for o in found], sum(f.inside for f in each), sum(f.guarded for f in each),
            sum(f.milliseconds for f in each), sum(f.steps for f in each), sum(f.budget for f in each),
            any(f.cut_short for f in each),
        )  # fmt: skip

    def tells(self, error: BaseException) -> bool:
        """Whether what a rank raised is among the findings."""
        return bool(self.report.findings) and (
            isinstance(error, FindingError) or any(error is told for told in self.disagreed)
        )

    def overlap(self, steps: list[Step], whose: str) -> None:
        """Runs launches of a team overlapped, as often as each by itself."""
        from tilescale.compiler.checks.overlap import Window
        from tilescale.compiler.findings import Report

        window, report = Window(steps, limit=self.limit, whose=whose), Report()
        orders = [("round_robin", 0)]
        orders += (
            [] if self.schedule == "round_robin" else [(self.schedule, seed) for seed in range(self.seeds)]
        )
        for order, seed in orders:
            window.run(order, seed, report)
            self.progress()
        self.report.runs += report.runs
        for finding in report.findings:
            self.report.add(finding)

    def take(self, label: str, report: Any) -> None:
        """What was seen of one launch of the kernel ``label``."""
        self.kernels.add(label)
        self.launches += 1
        self.report.runs += report.runs
        for finding in report.findings:
            self.report.add(finding)
        self.report.varying |= {f"{name} of {label}" for name in report.varying}
        self.report.unchecked |= report.unchecked
        if report.traces is not None:
            self.report.traces = (self.report.traces or 0) + report.traces
        if report.complete is False:
            self.incomplete += 1


class SimKernel(Kernel):
    """A `Kernel` of the target ``sim``: the same calls, the same refusals. Calls may raise FindingError, with
    the report."""

    def __init__(self, program: Program, label: str, trace: Callable[[], TileProgram], **options: Any):
        self.simulated = program
        super().__init__(Entry("", [], [], program.meta), label, trace, **options)

    def _launcher(self, entry: Entry) -> Callable[..., Any]:
        return self._simulate

    def program(self) -> TileProgram:
        return self.simulated.traced

    def again(self, out_idx: Sequence[int], returns: Sequence[int]) -> SimKernel:
        return SimKernel(
            self.simulated,
            self.label,
            self._program,
            out_idx=out_idx,
            returns=returns,
            instrument=self.instrument,
        )

    def _carried(self, array: Any) -> Any:
        return array

    def _simulate(self, *args: Any) -> None:
        """One launch; ``args``: one for each parameter, outputs too."""
        backend = comm.behind()  # None before comm.init: a launch is then of one rank
        thread = sim.here()
        checking = None if thread is None else thread.job.checking
        rank, world = (0, 1) if backend is None else (backend.place.rank, backend.place.size)
        tensors, numbers = arguments.bind(self, args, backend)
        call = arguments.Call(self, tensors, numbers, sim.call_site())
        members = next((a.team for a in tensors.values() if a.team is not None), tuple(range(world)))
        if checking is None and self.collective:
            self.simulated.require(len(members), None)
        if world == 1 or not self.simulated.reaches:
            mine = members.index(rank) if rank in members else 0
            everyone = "" if len(members) == world else f", those of the team {list(members)}"
            _show(
                _perform([call], len(members), None if world == 1 else mine, checking, everyone, members)[0]
            )
            return
        if not isinstance(backend, sim.SimRank):
            raise LaunchError(
                f"{self.name}: the simulator runs all ranks in one process, and this job has {world} "
                "processes",
                loc=place(self._meta["loc"]),
                hint="tilescale check -n 4 script.py, or the target cpu",
            )
        ordered = self.simulated.prepared.launch.flagged
        _show(
            backend.job.meet(
                rank, members, LAUNCH, call, lambda calls: _together(calls, members, world, checking), ordered
            )
        )

    def get_kernel_source(self, kind: str | None = None, kernel_only: bool | None = None) -> str:
        """The kernel as text: ``"tile"`` (what was traced, and what runs) or ``"scheduled"``. Raises
        TileValueError for another kind. ``kernel_only`` decides nothing."""
        compat.unused("get_kernel_source", {"kernel_only": kernel_only})
        kind = self.device.shown if kind is None else kind
        if kind not in self.device.sources:
            raise TileValueError(
                f"get_kernel_source({kind!r}) of the target sim",
                expected="one of " + ", ".join(self.device.sources),
            )
        if kind == "tile":
            return self.simulated.traced.func.script()
        from tilescale.compiler.passes import pipeline

        return pipeline.run(self.simulated.traced)[0].func.script()

    def trace(self) -> list[tuple[str, str]]:
        """``(pass, program)`` after every pass, first as traced, at last as scheduled."""
        from tilescale.compiler.passes import pipeline

        return [(step.name, step.text) for step in pipeline.run(self.simulated.traced, keep=True)[1].steps]


def world(ranks: int, checking: Checking) -> sim.SimWorld:
    """A job of simulated ranks whose launches are checked; ``run`` starts it."""
    made = sim.SimWorld(ranks)
    made.checking = checking
    if checking is not None:
        made.hosts = Hosts(made, checking.report.add)
        if not checking.schedule.startswith("exhaustive"):  # which explores launches one by one
            checking.windows = Windows(made, lambda: checking.launches + 1, checking.overlap)
            made.hosts.meets, made.ended = checking.windows.met, checking.windows.finish
    made.disagree = lambda waiting, ended: _disagreement(checking, waiting, ended)
    return made


def _disagreement(checking: Checking, waiting: list[sim.Arrival], ended: list[int]) -> BaseException:
    """Ranks that wait for one another for ever, which is a finding. A program gets it as such where a launch
    is among what they wait in, else as the CommError that calls of tilescale.comm raise everywhere."""
    from tilescale.compiler.findings import Finding, Report, Where

    launches = [a for a in waiting if isinstance(a.offer, arguments.Call)]
    error = sim.disagreement(waiting, ended)

    def where(arrival: sim.Arrival) -> Where:
        call = arrival.offer
        return Where(
            call.kernel.label if isinstance(call, arguments.Call) else arrival.what, arrival.loc, arrival.rank
        )

    first = (launches or waiting)[0]
    others = [a for a in waiting if a is not first]
    rest = [f"rank {a.rank} calls {where(a).what}" for a in others if where(a).what != where(first).what]
    rest += [f"rank {r} has ended" for r in ended]
    rest = rest or [f"rank {a.rank} does with other ranks" for a in others]
    does = "launches" if launches else "calls"
    text = (
        f"rank {first.rank} {does} {where(first).what}, and not every rank of its team does: "
        f"{'; '.join(rest[:4])}"
    )
    hint = f"the same {'launches' if launches else 'calls of tilescale.comm'} in the same order on every rank"
    finding = Finding("different-programs", text, where(first), tuple(map(where, others))[:8], hint)
    checking.report.add(finding)
    if launches:
        error = FindingError(Report([finding], 1))
    checking.disagreed.append(error)
    return error


def _together(
    calls: list[Call], members: tuple[int, ...], size: int, checking: Checking | None
) -> list[list[str]]:
    """A launch that all ranks of a team have made; what each of them printed."""
    finding = _difference(calls)
    if finding is not None:
        from tilescale.compiler.findings import Report

        report = Report([finding], 1)
        if checking is not None:
            checking.report.add(finding)
        raise FindingError(report)
    everyone = len(members) == size
    made = _perform(
        calls,
        len(members),
        None,
        checking,
        "" if everyone else f", those of the team {list(members)}",
        members,
    )
    if checking is not None and checking.record and not everyone:
        checking.timelines.append(checking.timelines.pop().renumbered(members, size))
    return made


def _show(lines: list[str]) -> None:
    """What T.print showed in the run in turn; letters that the terminal's encoding lacks as their numbers."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    for line in lines:
        print(line.encode(encoding, "backslashreplace").decode(encoding))


def _difference(calls: list[Call]) -> Any:
    """What ranks that launch together do differently, as a finding."""
    from tilescale.compiler.checks.run import different
    from tilescale.compiler.findings import Finding, Where

    first = calls[0]
    for rank, call in enumerate(calls):
        finding = different([first.kernel.simulated.traced, call.kernel.simulated.traced])
        if finding is None:
            continue
        names = [c.kernel.label for c in (call, first)]
        text = f"rank {rank} launches {names[0]} where rank 0 launches {names[1]}"
        if names[0] == names[1]:
            text = finding.message.replace("rank 1", f"rank {rank}")
        here, there = (Where(c.kernel.label, c.loc, r) for r, c in ((rank, call), (0, first)))
        return Finding(finding.kind, text, here, (there,), finding.hint)
    for rank, call in enumerate(calls):
        for name, mine in call.tensors.items():
            its = first.tensors[name]
            if (
                (mine.at, mine.array.shape) == (its.at, its.array.shape)
                or mine.block is None
                or its.block is None
            ):
                continue
            text = (
                f"rank {rank} launches {first.kernel.label} with another symmetric tensor as {name} than "
                "rank 0"
            )
            here, there = (Where(c.kernel.label, c.loc, r) for r, c in ((rank, call), (0, first)))
            return Finding(
                "different-programs",
                text,
                here,
                (there,),
                "the same tensor on all ranks, from one call of tilescale.comm",
            )
    return None


def _perform(
    calls: Sequence[Call],
    ranks: int,
    only: int | None,
    checking: Checking | None,
    whose: str = "",
    members: Sequence[int] = (),
) -> list[list[str]]:
    """Runs a launch: in turn for its results, which go into the callers' memory, and then as often as
    ``checking`` asks for. ``members``: the team's as ranks of the job.

    Returns:
        for each call what T.print showed.

    Raises:
        FindingError: something is wrong with it, and nobody gathers findings.
    """
    from tilescale.compiler.findings import Report

    kernel = calls[0].kernel
    empty: list[dict[str, Any]] = [{}] * ranks
    args = (
        [c.values() for c in calls]
        if only is None
        else [*empty[:only], calls[0].values(), *empty[only + 1 :]]
    )
    level = "tile" if checking is None else checking.level
    limit = STEPS if checking is None else checking.limit
    launch, report = kernel.simulated.launch(args, level, only, whose, limit), Report()
    unordered = only is None and not kernel.simulated.prepared.launch.flagged
    windows = checking.windows if checking is not None and unordered else None
    team = tuple(members)
    step = (
        None
        if windows is None
        else windows.begin(
            kernel.simulated.prepared, calls, team, b"".join(_mark(kernel, calls, True)), whose
        )
    )
    done = launch.run(into=report, record=checking is not None and checking.record)
    if checking is not None:
        if done.timeline is not None:
            checking.timelines.append(replace(done.timeline, name=kernel.label))
        checking.progress()
        schedule = checking.schedule_of(checking.launches + 1)
        if schedule is not None and checking.is_new(*_mark(kernel, calls, only is None)):
            launch.explore(schedule, checking.seeds, report, checking.progress, bound=checking.bound)
            report.findings = [_of_launch(f, checking.launches + 1) for f in report.findings]
        checking.prove(kernel, ranks, launch.known, report)
        if windows is not None and step is not None and windows.made(step, team, done, not report.findings):
            report.unchecked.clear()
        checking.take(kernel.label, report)
    thread = sim.rank_of_thread()
    if thread is not None and thread.job.hosts is not None:
        callers = dict(zip(members, calls)) if only is None else {thread.rank: calls[0]}
        orders = only is None and not unordered and not kernel.simulated.prepared.launch.awaited
        thread.job.hosts.launched(callers, members, done.written_by, orders)
    for call, arrays, unwritten in zip(calls, done.arrays, done.unwritten, strict=True):
        for p in kernel.params:
            argument = call.tensors.get(p["name"])
            if argument is None:
                continue
            if p["kind"] == "signal":
                # an unordered launch leaves them: others may be signalling for the next one already
                left = p["keep"] or unordered
                argument.array[...] = arrays[p["name"]] if left else 0
            elif p["kind"] == "packets":
                argument.array[...] = arrays[p["name"]]
            elif p["written"]:
                argument.take(arrays[p["name"]], unwritten.get(p["name"]))
    for text in sorted(report.unchecked) if checking is None else ():
        log.say("warning", text, once=True)
    if checking is None and not report:
        raise FindingError(report)
    lines = list(zip(done.printers, done.printed, strict=True))
    return [
        [text for rank, text in lines if rank == mine] for mine in (range(ranks) if only is None else (only,))
    ]


def _of_launch(finding: Any, number: int) -> Any:
    """A finding of an interleaving, with the number of the launch that it belongs to and how to run it
    again."""
    if not finding.schedule.startswith("exhaustive:"):
        return finding
    choices, _, rest = finding.schedule.removeprefix("exhaustive:").partition(", ")
    again = f"exhaustive:{number}@{choices}"
    return replace(finding, schedule=f"{again}, {rest}; again: --schedule {again}")


def _mark(kernel: SimKernel, calls: Sequence[Call], together: bool) -> tuple[bytes, bytes]:
    """What decides which interleavings of a launch there are: the program, extents, numbers, and the values
    of integers in tensors that it reads. Values of floats count where the program makes an integer or a
    condition of some; which rank it is does not, where ranks do not meet. Beside it a bit for each element of
    these tensors: whether nobody has written it."""
    import numpy

    digest = hashlib.blake2b(digest_size=16)
    digest.update(kernel.simulated.key.encode())
    unwritten = []
    for call in calls if together else calls[:1]:
        for name, argument in call.tensors.items():
            given = argument.array
            digest.update(f"{name}{given.shape}{given.dtype}{given.strides}".encode())
            if name in kernel.simulated.prepared.unread:
                continue
            if given.dtype.kind in "iub" or kernel.simulated.prepared.floats_decide:
                digest.update(numpy.ascontiguousarray(given).tobytes())
            block = argument.block
            mask = None if block is None else block.mask(argument.address, given.shape, given.itemsize)
            unwritten.append(
                numpy.packbits(numpy.zeros(given.shape, bool) if mask is None else mask).tobytes()
            )
        digest.update(repr(call.numbers).encode())
    return digest.digest(), b"".join(unwritten)


def kernel_of(
    program: Program,
    label: str,
    trace: Callable[[], TileProgram],
    instrument: bool,
    out_idx: tuple[int, ...] | None,
) -> SimKernel:
    """``out_idx`` None: an eager kernel, whose trace says what it allocates and returns."""
    if out_idx is None:
        outputs = [k for k, p in enumerate(program.meta["params"]) if p["output"]]
        return SimKernel(
            program, label, trace, out_idx=outputs, returns=program.meta["returns"], instrument=instrument
        )
    allocated = build.with_workspaces(out_idx, program.meta["params"])
    return SimKernel(program, label, trace, out_idx=allocated, returns=out_idx, instrument=instrument)


def from_prim_func(func: Any, out_idx: tuple[int, ...], instrument: bool, name: str | None) -> Kernel:
    """The simulated kernel of a prim_func."""
    label = name or build.label_of(func.name, build.captured(func.func))

    def part(k: int) -> Kernel:
        def trace() -> TileProgram:
            traced: TileProgram = func.trace(k)
            return traced

        made = program_of(build.key_of(func.name, func, *([k] if k else [])), trace)
        made.require_here()
        return kernel_of(made, build.label_of_launch(label, k), trace, instrument, out_idx)

    return build.in_order(part)
