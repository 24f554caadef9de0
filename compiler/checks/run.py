"""The simulator's entries: `launch` computes on given arrays, `check` runs a kernel under many schedules and
says what is wrong with it.

report = check(kernel, ranks=4, args={"X": lambda rank: …}, schedule="adversary", seeds=100)
assert report, report
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilescale.compiler.checks.explore import exhaust
from tilescale.compiler.findings import Finding, Report, Where
from tilescale.compiler.ir.scales import MOST_BLOCKS
from tilescale.compiler.passes.pipeline import tile_level
from tilescale.compiler.passes.residency import resident_blocks, synchronizes_ranks, waits_for_blocks
from tilescale.compiler.sim import numerics, schedule
from tilescale.compiler.sim.counters import Counters
from tilescale.compiler.sim.interleave import Interleaving
from tilescale.compiler.sim.machine import Machine
from tilescale.compiler.sim.memory import HOST, UNWRITTEN, Events, Shadow, Storage
from tilescale.compiler.sim.observe import Observer
from tilescale.compiler.sim.packets import Packets
from tilescale.compiler.sim.prepare import Prepared, prepare
from tilescale.compiler.sim.record import Recorder
from tilescale.compiler.sim.timeline import Timeline, Traffic
from tilescale.errors import TileTypeError, TileValueError
from tilescale.language.dtypes import Narrow
from tilescale.language.symbolic import Sym, SymExpr, replaced, settle, shown
from tilescale.packets import HEAD, each, length

#: choices of a schedule after which a launch counts as endless
STEPS = 2_000_000
#: executors of a launch, each of which has a clock with an entry for every one of them
MOST_CLOCKS = 1 << 24
#: runs after which an exhaustive exploration gives up
BOUND = 10_000


@dataclass(frozen=True)
class Writers:
    """Who wrote the elements of an argument. by: for each the rank whose block wrote it last, -1 for none of
    this launch. known: for each rank whether the end of its blocks is behind that write."""

    by: Any
    known: Any


@dataclass
class Result:
    """What a launch left behind: the report, every rank's arguments by name, which of their elements nobody
    has written (masks; all are written where there is none), what T.print showed and which ranks did, and
    where it was recorded who did what when. ``written_by()``: for each rank, of its arguments that the launch
    wrote, who did."""

    report: Report
    arrays: list[dict[str, Any]]
    unwritten: list[dict[str, Any]]
    printed: list[str]
    printers: list[int]
    timeline: Timeline | None = None
    written_by: Callable[[], list[dict[str, Writers]]] = list

    @property
    def traffic(self) -> Traffic | None:
        """Bytes and messages between the ranks."""
        return None if self.timeline is None else self.timeline.traffic


def launch(
    kernel: Any,
    ranks: int = 1,
    args: dict[str, Any] | None = None,
    *,
    order: str = "round_robin",
    seed: int = 0,
    limit: int = STEPS,
    record: bool = False,
) -> Result:
    """Runs one launch of a kernel on ``ranks`` simulated ranks.

    Args:
        kernel: a ``@T.prim_func`` or a traced program.
        args: by parameter name an array or a number for all ranks, a list of one a rank, or a function of the
            rank. Arrays are copied, never written. A NumPy masked array says which elements nobody has
            written (the masked ones). What is left out: scalars may not be; signals are zero; tensors that
            the kernel reads and never writes are random numbers of the rank; all others are unwritten memory.
        order, seed: the schedule, see :mod:`tilescale.compiler.sim.schedule`. limit: steps after which it
            counts as endless.
        record: the result has ``traffic`` and a ``timeline``, see timeline.py.

    Raises:
        TileValueError, TileTypeError: arguments that do not fit the parameters.
    """
    return Launch(prepare(tile_level(kernel)), each_rank(args, ranks), limit=limit).run(
        order, seed, record=record
    )


def check(
    kernels: Any,
    ranks: int = 1,
    args: dict[str, Any] | None = None,
    *,
    schedule: str = "adversary",
    seeds: int | Iterable[int] = 10,
    bound: int = BOUND,
    limit: int = STEPS,
    level: str = "tile",
    depth: int = 2,
    roles: tuple[str, ...] = ("producer", "consumer"),
    ahead: bool = False,
    arch: str = "",
    static: bool = False,
) -> Report:
    """Runs a kernel once in turn and then under ``schedule`` with each seed; gathers what is wrong with it.
    ``"exhaustive"`` runs one interleaving of every class that the order of dependent steps tells apart,
    ``bound`` of them at most (``report.complete``: these were all), and ``"exhaustive:<choices>"`` the one
    that a finding names.

    Args:
        kernels: a kernel, or a list of one a rank (which must be one and the same program).
        seeds: how many, or which; the exhaustive schedules have none. The other arguments are those of
            :func:`launch`.
        level: "tile", "scheduled", or "both": each run at both levels, and what they leave behind compared.
        depth, roles, ahead: what is asked of the schedule, see passes/schedule.py. arch: the schedule that
        GPUs of this architecture get,
            "sm_90a" or "sm_80", instead of those.
        static: the static checks too, for these ranks and the numbers and extents that all ranks have alike.

    Raises:
        TileValueError: a level that there is not, a scheduled program that is to run at the tile level, or an
            exhaustive schedule of another level than "tile".
    """
    from tilescale.compiler.checks import levels

    programs = [tile_level(k) for k in (kernels if isinstance(kernels, (list, tuple)) else [kernels])]
    report = Report()
    if (finding := different(programs)) is not None:
        report.add(finding)
        return report
    made = levels.launches(
        programs[0], each_rank(args, ranks), limit, level, levels.Plan(depth, tuple(roles), ahead, arch)
    )
    if level != "tile" and schedule.startswith("exhaustive"):
        raise TileValueError(
            "the exhaustive schedules know the steps of the tile level",
            expected='level="tile", or another schedule',
        )
    made.run(into=report)
    made.explore(schedule, seeds, report, bound=bound)
    if static:
        from tilescale.compiler.static import check as prove

        found = prove(programs[0], ranks=ranks, values=made.known)
        report.add_static(found)
        if found.cut_short:
            report.unchecked.add(found.unfinished())
    return report


def different(programs: Sequence[Any]) -> Finding | None:
    """Whether the ranks' programs (one a rank, or one for all) are one; the first that is not, as a
    finding."""
    if all(p is programs[0] for p in programs):
        return None
    texts = [p.func.script() for p in programs]
    for rank, text in enumerate(texts):
        if text != texts[0]:
            first, other = programs[0], programs[rank]
            lines = zip(texts[0].splitlines(), text.splitlines())
            line = next(
                ((a.strip(), b.strip()) for a, b in lines if a != b), ("a shorter program", "a longer one")
            )
            message = (
                f"rank {rank} launches {other.name} where rank 0 launches {first.name}; first "
                f"difference: {line[0]} | {line[1]}"
            )
            here, there = Where(other.name, other.loc, rank), Where(first.name, first.loc, 0)
            return Finding(
                "different-programs",
                message,
                here,
                (there,),
                "one kernel with the same constants on all ranks",
            )
    return None


def unchecked(made: Prepared) -> set[str]:
    """What no run of a kernel says anything of: a launch begins and ends here as an ordered one does, alone
    and with all ranks."""
    program = made.program
    alone = all(
        getattr(p.spec, "kind", "tensor") == "tensor" for p in program.params
    ) and not synchronizes_ranks(program.func.body)
    if program.launch.ordered or alone:
        return set()
    text = (
        "what orders its launches with those before and after them, and what they read with what hosts "
        "write, is not checked"
    )
    return {f"{program.name} has ordered=False: {text}"}


def each_rank(args: dict[str, Any] | None, ranks: int) -> list[dict[str, Any]]:
    """The arguments of :func:`launch` as one dict a rank."""
    given = args or {}
    for name, value in given.items():
        if isinstance(value, (list, tuple)) and len(value) != ranks:
            raise TileValueError(f"{name} is a list of {len(value)}", expected=f"{ranks}, one a rank")
    return [{name: _of_rank(value, rank) for name, value in given.items()} for rank in range(ranks)]


class Launch:
    """A prepared program with the arguments of every rank, to be run any number of times from the same
    beginning.

    Args:
        args: one dict a rank, parameter name → array or number; see :func:`launch` for what may be left out.
        whose: said of the ranks in findings, behind how many they are.
        only: this rank alone runs (a kernel in which ranks do not meet), as one of ``len(args)``; the others'
            dicts are not looked at.

    Raises:
        TileValueError, TileTypeError: arguments that do not fit the parameters.
    """

    def __init__(
        self,
        made: Prepared,
        args: Sequence[dict[str, Any]],
        *,
        only: int | None = None,
        limit: int = STEPS,
        whose: str = "",
    ):
        self.whose = whose
        self.first: Result | None = None
        self.refused = False  # no target would run it, and neither does this: found by its first run
        self.made, self.ranks, self.only, self.limit = made, len(args), only, limit
        with np.errstate(all="ignore"):
            self.bound = {
                rank: Arguments(made, rank, args[rank])
                for rank in (range(self.ranks) if only is None else (only,))
            }
            probe = _Values(next(iter(self.bound.values())).scalars, made)
            x, y, z = (int(n(probe)) for n in made.grid)
        self.grid = (x, y, z)
        self._check_grid()

    def _check_grid(self) -> None:
        """Refuses what other targets cannot launch, and more blocks than the simulator has room for.

        Raises:
            TileValueError: such a grid, at the kernel's T.Kernel.
        """
        launch, name = self.made.program.launch, self.made.program.name
        blocks, shown = (
            math.prod(self.grid),
            " × ".join(map(str, self.grid[: len(self.made.program.launch.grid)])),
        )
        if min(self.grid) < 0 or blocks >= MOST_BLOCKS:
            raise TileValueError(
                f"{name}: a grid of {shown} blocks cannot be launched", loc=launch.loc,
                expected="no axis negative, and fewer than 2³¹ blocks in all",
            )  # fmt: skip
        if any(extent % n for extent, n in zip(self.grid, launch.cluster, strict=True)):
            raise TileValueError(
                f"{name}: a grid of {shown} blocks is not made of whole clusters", loc=launch.loc,
                expected=f"a multiple of {' × '.join(map(str, launch.cluster))}",
            )  # fmt: skip
        if self.ranks * blocks * self.made.executors > MOST_CLOCKS:
            raise TileValueError(
                f"{name}: a grid of {shown} blocks is too large for the simulator",
                loc=launch.loc,
                expected=f"at most {MOST_CLOCKS} executors on all ranks",
                hint="a smaller problem: what goes wrong, goes wrong there too",
            )

    def keep(self) -> None:
        """The arguments as they are now, whatever becomes of the caller's memory."""
        for bound in self.bound.values():
            bound.arrays = {name: np.array(array, order="C") for name, array in bound.arrays.items()}

    @property
    def known(self) -> dict[str, int]:
        """The integers and extents that every rank that runs was called with alike, by name."""
        each = [
            {**b.symbols, **{k: int(v) for k, v in b.numbers.items() if isinstance(v, (int, np.integer))}}
            for b in self.bound.values()
        ]
        return {
            name: value for name, value in each[0].items() if all(other.get(name) == value for other in each)
        }

    def run(
        self,
        order: str | schedule.Schedule = "round_robin",
        seed: int = 0,
        *,
        into: Report | None = None,
        record: bool = False,
    ) -> Result:
        """One run, its findings marked with the schedule and added to ``into``. ``record``: what was seen is
        kept, as a Timeline."""
        chosen = schedule.make(order, seed) if isinstance(order, str) else order
        recorder = Recorder(self.made.program.name, self.ranks) if record else None
        observers: tuple[Observer, ...] = (chosen,) if isinstance(chosen, Interleaving) else ()
        observers += () if recorder is None else (recorder,)
        events, blocks = Events(), self.grid[0] * self.grid[1] * self.grid[2]
        with np.errstate(all="ignore"):  # IEEE's infinities and NaN are results like any other
            machine = Machine(self.made, self.grid, chosen, events, self.limit, observers)
            machine.clocks = 1 + self.ranks * blocks * self.made.executors
            self.refused = _static(machine, blocks)
            memories = {rank: Memory(b, events, machine.clocks) for rank, b in self.bound.items()}
            everyone = range(self.ranks)
            scalars = [self.bound[r].scalars if r in self.bound else {} for r in everyone]
            if not self.refused:
                machine.start(
                    scalars, [memories[r].slots if r in memories else {} for r in everyone], self.only
                )
                machine.run()
        report = Report(runs=1, unchecked=unchecked(self.made))
        for finding in machine.report.findings:
            report.add(
                replace(
                    finding,
                    schedule=f"{chosen.shown}, {self.ranks} rank{'s' * (self.ranks != 1)}{self.whose}",
                )
            )
        if into is not None:
            into.runs += 1
            into.unchecked |= report.unchecked
            for finding in report.findings:
                into.add(finding)
        left = list(memories.values())
        seen = None if recorder is None else recorder.finish(machine)
        machine.close()
        made = Result(
            report,
            [m.results() for m in left],
            [m.unwritten() for m in left],
            machine.printed,
            machine.printers,
            seen,
            lambda: [m.written_by(machine, blocks) for m in left],
        )
        if into is not None and not isinstance(
            chosen, Interleaving
        ):  # an observed run may end before its results are there
            into.varying |= self._differing(made)
        return made

    def _differing(self, made: Result) -> set[str]:
        """The tensors that a clean run left other than the first clean one did, bit for bit."""
        if not made.report:
            return set()
        if self.first is None:
            self.first = made
        pairs = zip(made.arrays, self.first.arrays, strict=True)
        return {
            name for mine, first in pairs for name in mine if mine[name].tobytes() != first[name].tobytes()
        }

    def explore(
        self,
        order: str,
        seeds: int | Iterable[int],
        into: Report,
        progress: Callable[[], None] | None = None,
        *,
        bound: int = BOUND,
    ) -> None:
        """Runs under ``order`` with each seed (how many, or which); findings go into the report. Round robin
        has no seeds: one run; nor have the exhaustive schedules, of which one (``exhaustive:<choices>``) is a
        run and all of them up to ``bound``.

        Raises:
            TileValueError: there is no such schedule.
        """
        if self.refused:
            into.complete = False if order == "exhaustive" else into.complete
            return
        if order == "exhaustive":
            whole = exhaust(self, into, bound, progress)
            # what an mbarrier's step touches is not told to the exploration, which may then leave out
            # schedules that differ
            told = all(b.scope != "shared.barrier" for b in self.made.buffers)
            into.complete = whole and told and into.complete is not False
            return
        schedule.make(order, 0)
        drawn = range(seeds) if isinstance(seeds, int) else seeds
        if order.startswith("exhaustive:"):
            drawn = (0,)
        for seed in () if order == "round_robin" else drawn:
            self.run(order, seed, into=into)
            if progress is not None:
                progress()


def _static(machine: Machine, blocks: int) -> bool:
    """What is wrong before anything runs: a grid that cannot be resident, signals that no statement awaits.
    Returns whether it is such that nothing can run: blocks that wait for one another and are not all
    there."""
    made, refused = machine.prepared, False
    waits = waits_for_blocks(made.program.func.body)
    if waits and blocks > (most := resident_blocks(made.program)):
        site = next((s for s in made.sites if s.what in ("T.wait", "T.barrier", "the collective")), made.site)
        text = f"blocks wait for others here, the grid has {blocks} blocks, and {most} are resident at once"
        hint = "a smaller grid whose blocks loop over tiles with T.Persistent"
        machine.report.add(Finding("not-resident", text, Where(site.what, site.loc), hint=hint))
        refused = True
    kept = {p.name for p in made.program.params if getattr(p.spec, "keep", False)}
    for name, sendings in made.signalled.items():
        awaited = made.awaited.get(name, set())
        unacquired = [
            s for s in sendings if not awaited or not ({s.index, None} & awaited or s.index is None)
        ]
        if unacquired and name not in kept:
            site, index = unacquired[0].site, unacquired[0].index
            counter = f"{name}[{', '.join(map(str, index))}]" if index else f"{name}[…]"
            text = (
                f"{counter if awaited else name} is signalled, and no statement of {made.program.name} "
                "waits for it"
            )
            hint = f"T.wait({counter}) where its news is needed"
            machine.report.add(Finding("unawaited", text, Where(site.what, site.loc), hint=hint))
    return refused


class _Values:
    """Stands for an executor where a launch's extents are computed: variables alone."""

    def __init__(self, scalars: dict[int, Any], made: Prepared):
        self.v = [scalars.get(k) for k in range(made.variables)]
        self.lanes, self.mask = None, None


class Arguments:
    """One rank's arguments: checked, with what is known of who wrote them. Never written: each run has a
    `Memory` of its own."""

    def __init__(self, made: Prepared, rank: int, args: dict[str, Any]):
        self.made, self.rank = made, rank
        self.scalars: dict[int, Any] = {}
        self.numbers: dict[str, Any] = {}
        self.arrays: dict[str, Any] = {}
        self.masks: dict[str, Any] = {}
        self.symbols: dict[str, int] = {}
        params = made.program.params
        unknown = set(args) - {p.name for p in params}
        if unknown:
            raise TileTypeError(
                f"{made.program.name} has no parameter {sorted(unknown)[0]!r}",
                expected=", ".join(p.name for p in params),
            )
        for p in params:
            if p.name in args:
                self._given(p, args[p.name])
        self._apart()
        for name, var in made.program.symbols.items():
            if name not in self.symbols:
                raise TileValueError(
                    f"nothing says what {name} is", hint=f"an array for a parameter with {name} as an extent"
                )
            if var in made.names:
                self.scalars[made.names[var]] = self.symbols[name]
        for p in params:
            if p.name not in args:
                self._left_out(p)

    def _given(self, p: Any, value: Any) -> None:
        dtype = str(p.spec.dtype)
        if not hasattr(p.spec, "shape"):
            self.numbers[p.name] = value
            if p.var in self.made.names:
                self.scalars[self.made.names[p.var]] = numerics.scalar(value, dtype)
            return
        array = np.asarray(value) if not np.ma.isMaskedArray(value) else value.data
        want = np.dtype(np.int64) if p.spec.kind in ("signal", "packets") else numerics.storage(dtype)
        if array.dtype != want or array.ndim != len(p.spec.shape):
            of = f"({', '.join(map(shown, (p.spec.declared or p.spec).shape))})"
            raise TileTypeError(
                f"{p.name} is {array.dtype} of {array.shape}", loc=p.loc, expected=f"{dtype} of {of}"
            )
        declared = (p.spec.declared or p.spec).shape
        for axis, (extent, n) in enumerate(zip(p.spec.shape, array.shape, strict=True)):
            # of a box in words, which its own check knows to say
            settled = settle(extent) if p.spec.kind == "packets" else replaced(extent, self.symbols)
            what = f"axis {axis} of {p.name} has extent {n}"
            if isinstance(symbol := settle(extent), Sym):
                if n % (multiple := self.made.program.multiples.get(symbol.name, 1)):
                    of = "" if declared[axis] is extent else f", as {shown(declared[axis])} is"
                    raise TileValueError(what, loc=p.loc, expected=f"a multiple of {multiple}{of}")
                settled = self.symbols.setdefault(symbol.name, n)
            if isinstance(settled, int) and settled != n:
                of = "" if isinstance(extent, int) else f" = {shown(declared[axis])}"
                raise TileValueError(what, loc=p.loc, expected=f"{settled}{of}")
        self._strides(p, array)
        self.arrays[p.name] = array
        if np.ma.isMaskedArray(value):
            self.masks[p.name] = np.ma.getmaskarray(value)

    def _apart(self) -> None:
        """Arguments that share memory are refused, unless the kernel only reads them: as every target
        does."""
        given = [p for p in self.made.program.params if p.name in self.arrays]
        for k, p in enumerate(given):
            for q in given[:k]:
                if not any(
                    self.made.buffers[self.made.slots[x.var]].tracked
                    for x in (p, q)
                    if x.var in self.made.slots
                ):
                    continue
                a, b = self.arrays[p.name], self.arrays[q.name]
                if np.may_share_memory(a, b) and np.shares_memory(a, b):
                    raise TileValueError(
                        f"{self.made.program.name}: {p.name} and {q.name} share memory, and the kernel "
                        "writes one of them",
                        loc=p.loc,
                        expected="arguments that do not overlap, unless all are only read",
                        hint=f"{p.name}.copy()",
                    )

    def _strides(self, p: Any, array: Any) -> None:
        """Symbols that are strides, in elements: read off the array as it was given."""
        for stride, n in zip(p.spec.strides or (), array.strides):
            settled = settle(stride)
            if isinstance(settled, Sym):
                self.symbols.setdefault(settled.name, n // array.itemsize)

    def _left_out(self, p: Any) -> None:
        if not hasattr(p.spec, "shape"):
            raise TileTypeError(
                f"the number {p.name} is not given", loc=p.loc, hint=f"args={{{p.name!r}: …}}"
            )
        shape = tuple(self._extent(e, p) for e in p.spec.shape)
        dtype = str(p.spec.dtype)
        if p.spec.kind in ("signal", "packets"):
            self.arrays[p.name] = np.zeros(shape, np.int64)
            return
        if p.spec.kind == "tensor" and not self.made.buffers[self.made.slots[p.var]].tracked:
            draw = np.random.default_rng([self.rank, len(p.name), *p.name.encode()])
            wide = (
                draw.standard_normal(shape)
                if dtype in numerics.FLOATS
                else draw.integers(0, 2 if dtype == "bool" else 8, shape)
            )
            self.arrays[p.name] = numerics.encode(wide, dtype)
            return
        self.arrays[p.name] = np.zeros(shape, numerics.storage(dtype))
        self.masks[p.name] = np.ones(shape, bool)

    def box(self, p: Any, words: Any, slot: int) -> Packets:
        """A box of packets; ``words``: what lies there."""
        *outer, last = slots = [self._extent(e, p) for e in p.spec.slots]
        dense = ", dense=True" if p.spec.dense else ""
        another = f'tilescale.comm.packets({tuple(slots)}, "{p.spec.of}"{dense})'
        if len(words) != (want := length(slots, p.spec.of.bits, p.spec.dense)):
            raise TileValueError(
                f"{p.name} has {len(words)} words",
                loc=p.loc,
                expected=f"{want}",
                hint=another,
            )
        if dense and words[HEAD:].any():
            raise TileValueError(
                f"{p.name} has packets before the launch begins, which no launch has taken",
                loc=p.loc,
                expected="an empty box: one that only whole launches have used",
                hint=another,
            )
        count = each(p.spec.of.bits)
        return Packets(p.name, words, (*outer, last // count), (self.rank,), slot, count, p.spec.dense)

    def _extent(self, extent: Any, p: Any) -> int:
        settled = settle(extent)
        if isinstance(settled, Sym):
            if settled.name not in self.symbols:
                raise TileValueError(
                    f"nothing says what {settled.name} is", loc=p.loc, hint=f"an array for {p.name}"
                )
            return self.symbols[settled.name]
        if isinstance(settled, SymExpr):
            a, b = (self._extent(x, p) for x in settled.args)
            return {"+": a + b, "-": a - b, "*": a * b, "//": a // b if b else 0, "%": a % b if b else 0}[
                settled.op
            ]
        return int(settled)


class Memory:
    """One rank's arguments in one run: copies, and beside them who wrote what.

    Attributes:
        slots: buffer slot → the parameter's memory.
    """

    def __init__(self, bound: Arguments, events: Events, clocks: int):
        self.slots: dict[int, Any] = {}
        self.named: dict[str, Any] = {}
        made, owner = bound.made, (bound.rank,)
        for p in made.program.params:
            if p.name not in bound.arrays:
                continue  # a number
            array = np.array(bound.arrays[p.name], order="C")
            slot = made.slots[p.var]
            info = made.buffers[slot]
            if p.spec.kind == "signal":
                self.slots[slot] = self.named[p.name] = Counters(p.name, array, clocks, owner, slot)
                continue
            if p.spec.kind == "packets":
                self.slots[slot] = self.named[p.name] = bound.box(p, array, slot)
                continue
            mask = bound.masks.get(p.name)
            fresh = mask is not None and bool(mask.any())
            cells, key = array.size * info.cells, (*owner, slot)
            shadow = Shadow(
                cells, events, tracked=info.tracked, written=not fresh, key=key, viewed=info.viewed
            )
            if fresh:
                shadow.last[:] = HOST
                shadow.last.reshape(*array.shape, info.cells)[mask] = UNWRITTEN
            storage = Storage(p.name, info.dtype, array, shadow, scope=info.scope, owner=owner)
            if isinstance(p.spec.of, Narrow):
                storage.shared = f", counted in bytes of two {p.spec.of} numbers,"
            self.slots[slot] = self.named[p.name] = storage

    def results(self) -> dict[str, Any]:
        """The arrays as the launch left them; counters at their last values."""
        out = {}
        for name, memory in self.named.items():
            if isinstance(memory, Counters):
                for index, counter in memory.made.items():
                    memory.values[index] = counter.value
                out[name] = memory.values
            else:
                out[name] = memory.data
        return out

    def written_by(self, machine: Machine, blocks: int) -> dict[str, Writers]:
        """Of the arrays that a launch wrote, who did."""
        out, events = {}, machine.events
        nobody = np.zeros(machine.clocks, np.int64)
        final = [machine.final.get(r, nobody) for r in range(len(machine.ranks))]
        for name, memory in self.named.items():
            if not isinstance(memory, Storage) or not memory.shadow.tracked or not memory.data.size:
                continue
            last = memory.shadow.last.reshape(*memory.shape, -1)[..., -1]
            who, clock = events.who[last], events.clock[last]
            here = last > HOST
            by = np.where(here, (who - 1) // (blocks * machine.prepared.executors), -1)
            out[name] = Writers(by, np.stack([f[who] >= clock for f in final]))
        return out

    def unwritten(self) -> dict[str, Any]:
        """Masks of what nobody has written, for the arrays of which that holds somewhere."""
        out = {}
        for name, memory in self.named.items():
            if isinstance(memory, Storage) and not memory.shadow.whole:
                cells = (memory.shadow.last == UNWRITTEN).reshape(*memory.shape, -1).any(-1)
                if cells.any():
                    out[name] = cells
        return out


def _of_rank(value: Any, rank: int) -> Any:
    if isinstance(value, Callable):  # type: ignore[arg-type]
        return value(rank)
    return value[rank] if isinstance(value, (list, tuple)) else value
