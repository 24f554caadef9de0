"""The simulator's entries: `launch` computes on given arrays, `check` runs a kernel under many schedules and says what is wrong with it.

    report = check(kernel, ranks=4, args={"X": lambda rank: …}, schedule="adversary", seeds=100)
    assert report, report
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilescale.compiler.passes.expand_collectives import expand_collectives
from tilescale.compiler.passes.remove_unused import remove_unused
from tilescale.compiler.passes.residency import resident_blocks, waits_for_blocks
from tilescale.compiler.passes.structured_exits import structured_exits
from tilescale.compiler.sim import numerics, schedule
from tilescale.compiler.sim.findings import Finding, Report, Where
from tilescale.compiler.sim.machine import Counters, Machine
from tilescale.compiler.sim.memory import UNWRITTEN, Events, Shadow, Storage
from tilescale.compiler.sim.prepare import Prepared, prepare
from tilescale.compiler.tvm_compat import ir
from tilescale.errors import TileTypeError, TileValueError
from tilescale.language.symbolic import Sym, SymExpr, settle

#: choices of a schedule after which a launch counts as endless
STEPS = 2_000_000


@dataclass
class Result:
    """What a launch left behind: the report, every rank's arguments by name, and what T.print showed."""

    report: Report
    arrays: list[dict[str, Any]]
    printed: list[str]


def tile_program(kernel: Any) -> Any:
    """A kernel at the level that the simulator runs: a ``@T.prim_func``, or a program traced or scheduled already."""
    program = kernel.trace() if hasattr(kernel, "trace") else kernel
    if program.schedule is not None:
        return program
    return remove_unused(structured_exits(expand_collectives(program)))


def launch(
    kernel: Any, ranks: int = 1, args: dict[str, Any] | None = None, *, order: str = "round_robin", seed: int = 0, limit: int = STEPS
) -> Result:
    """Runs one launch of a kernel on ``ranks`` simulated ranks.

    Args:
        kernel: a ``@T.prim_func`` or a traced program.
        args: by parameter name an array or a number for all ranks, a list of one a rank, or a function of the rank. Arrays are
            copied, never written. A NumPy masked array says which elements nobody has written (the masked ones). What is left out:
            scalars may not be; signals are zero; tensors that the kernel reads and never writes are random numbers of the rank; all
            others are unwritten memory.
        order, seed: the schedule, see :mod:`tilescale.compiler.sim.schedule`. limit: steps after which it counts as endless.

    Raises:
        TileValueError, TileTypeError: arguments that do not fit the parameters.
    """
    return _launch(prepare(tile_program(kernel)), ranks, args or {}, order, seed, limit)


def check(
    kernels: Any, ranks: int = 1, args: dict[str, Any] | None = None, *, schedule: str = "adversary", seeds: int | Iterable[int] = 10,
    limit: int = STEPS,
) -> Report:  # fmt: skip
    """Runs a kernel once in turn and then under ``schedule`` with each seed; gathers what is wrong with it.

    Args:
        kernels: a kernel, or a list of one a rank (which must be one and the same program).
        seeds: how many, or which. The other arguments are those of :func:`launch`.
    """
    programs = [tile_program(k) for k in (kernels if isinstance(kernels, (list, tuple)) else [kernels])]
    report = Report()
    if (finding := _different(programs)) is not None:
        report.add(finding)
        return report
    made = prepare(programs[0])
    tries = [("round_robin", 0), *((schedule, s) for s in (range(seeds) if isinstance(seeds, int) else seeds))]
    for order, seed in tries:
        done = _launch(made, ranks, args or {}, order, seed, limit)
        report.runs += 1
        for finding in done.report.findings:
            shown = order if order == "round_robin" else f"{order}, seed {seed}"
            report.add(replace(finding, schedule=f"{shown}, {ranks} rank{'s' * (ranks != 1)}"))
    return report


def _different(programs: Sequence[Any]) -> Finding | None:
    texts = [p.func.script() for p in programs]
    for rank, text in enumerate(texts):
        if text != texts[0]:
            first, other = programs[0], programs[rank]
            lines = zip(texts[0].splitlines(), text.splitlines())
            line = next(((a.strip(), b.strip()) for a, b in lines if a != b), ("a shorter program", "a longer one"))
            message = f"rank {rank} launches {other.name} where rank 0 launches {first.name}; first difference: {line[0]} | {line[1]}"
            here, there = Where(other.name, other.loc, rank), Where(first.name, first.loc, 0)
            return Finding("different-programs", message, here, (there,), "one kernel with the same constants on all ranks")
    return None


def _launch(made: Prepared, ranks: int, args: dict[str, Any], order: str, seed: int, limit: int) -> Result:
    events = Events()
    with np.errstate(all="ignore"):  # IEEE's infinities and NaN are results like any other
        bound = [_Arguments(made, rank, args, events) for rank in range(ranks)]
        probe = _Values(bound[0].scalars, made)
        x, y, z = (int(n(probe)) for n in made.grid)
        machine = Machine(made, (x, y, z), schedule.make(order, seed), events, limit)
        machine.clocks = 1 + ranks * x * y * z * made.executors
        _static(machine, x * y * z)
        machine.start([b.scalars for b in bound], [b.memory(machine.clocks) for b in bound])
        machine.run()
    return Result(machine.report, [b.results() for b in bound], machine.printed)


def _static(machine: Machine, blocks: int) -> None:
    """What is wrong before anything runs: a grid that cannot be resident, signals that no statement awaits."""
    made = machine.prepared
    waits = waits_for_blocks(made.program.func.body)
    if waits and blocks > (most := resident_blocks(made.program)):
        site = next((s for s in made.sites if s.what in ("T.wait", "T.barrier", "the collective")), made.site)
        text = f"blocks wait for others here, the grid has {blocks} blocks, and {most} are resident at once"
        hint = "a smaller grid whose blocks loop over tiles with T.Persistent"
        machine.report.add(Finding("not-resident", text, Where(site.what, site.loc), hint=hint))
    kept = {p.name for p in made.program.params if getattr(p.spec, "keep", False)}
    for name, sendings in made.signalled.items():
        awaited = made.awaited.get(name, set())
        unheard = [s for s in sendings if not awaited or not ({s.index, None} & awaited or s.index is None)]
        if unheard and name not in kept:
            site, index = unheard[0].site, unheard[0].index
            counter = f"{name}[{', '.join(map(str, index))}]" if index else f"{name}[…]"
            text = f"{counter if awaited else name} is signalled, and no statement of {made.program.name} waits for it"
            hint = f"T.wait({counter}) where its news is needed"
            machine.report.add(Finding("unawaited", text, Where(site.what, site.loc), hint=hint))


class _Values:
    """Stands for an executor where a launch's extents are computed: variables alone."""

    def __init__(self, scalars: dict[int, Any], made: Prepared):
        self.v = [scalars.get(k) for k in range(made.variables)]
        self.lanes, self.mask = None, None


class _Arguments:
    """One rank's arguments: checked, copied, with what is known of who wrote them."""

    def __init__(self, made: Prepared, rank: int, args: dict[str, Any], events: Events):
        self.made, self.rank, self.events = made, rank, events
        self.scalars: dict[int, Any] = {}
        self.arrays: dict[str, Any] = {}
        self.masks: dict[str, Any] = {}
        self.symbols: dict[str, int] = {}
        params = made.program.params
        unknown = set(args) - {p.name for p in params}
        if unknown:
            raise TileTypeError(f"{made.program.name} has no parameter {sorted(unknown)[0]!r}", expected=", ".join(p.name for p in params))
        for p in params:
            if p.name in args:
                self._given(p, _of_rank(args[p.name], rank))
        for name, var in made.program.symbols.items():
            if name not in self.symbols:
                raise TileValueError(f"nothing says what {name} is", hint=f"an array for a parameter with {name} as an extent")
            if var in made.names:
                self.scalars[made.names[var]] = self.symbols[name]
        for p in params:
            if p.name not in args:
                self._left_out(p)

    def _given(self, p: Any, value: Any) -> None:
        dtype = str(p.spec.dtype)
        if not hasattr(p.spec, "shape"):
            if p.var in self.made.names:
                self.scalars[self.made.names[p.var]] = numerics.scalar(value, dtype)
            return
        array = np.asarray(value) if not np.ma.isMaskedArray(value) else value.data
        want = np.dtype(np.int64) if p.spec.kind == "signal" else numerics.storage(dtype)
        if array.dtype != want or array.ndim != len(p.spec.shape):
            shown = f"({', '.join(map(str, p.spec.shape))})"
            raise TileTypeError(f"{p.name} is {array.dtype} of {array.shape}", loc=p.loc, expected=f"{dtype} of {shown}")
        for extent, n in zip(p.spec.shape, array.shape, strict=True):
            settled = settle(extent)
            if isinstance(settled, Sym):
                settled = self.symbols.setdefault(settled.name, n)
            if isinstance(settled, int) and settled != n:
                raise TileValueError(f"an axis of {p.name} has extent {n}", loc=p.loc, expected=f"{extent} = {settled}")
        self.arrays[p.name] = array.copy()
        if np.ma.isMaskedArray(value):
            self.masks[p.name] = np.ma.getmaskarray(value)

    def _left_out(self, p: Any) -> None:
        if not hasattr(p.spec, "shape"):
            raise TileTypeError(f"the number {p.name} is not given", loc=p.loc, hint=f"args={{{p.name!r}: …}}")
        shape = tuple(self._extent(e, p) for e in p.spec.shape)
        dtype = str(p.spec.dtype)
        if p.spec.kind == "signal":
            self.arrays[p.name] = np.zeros(shape, np.int64)
            return
        if p.spec.kind == "tensor" and not self.made.buffers[self.made.slots[p.var]].tracked:
            draw = np.random.default_rng([self.rank, len(p.name), *p.name.encode()])
            wide = draw.standard_normal(shape) if dtype in numerics.FLOATS else draw.integers(0, 2 if dtype == "bool" else 8, shape)
            self.arrays[p.name] = numerics.encode(wide, dtype)
            return
        self.arrays[p.name] = np.zeros(shape, numerics.storage(dtype))
        self.masks[p.name] = np.ones(shape, bool)

    def _extent(self, extent: Any, p: Any) -> int:
        settled = settle(extent)
        if isinstance(settled, Sym):
            if settled.name not in self.symbols:
                raise TileValueError(f"nothing says what {settled.name} is", loc=p.loc, hint=f"an array for {p.name}")
            return self.symbols[settled.name]
        if isinstance(settled, SymExpr):
            a, b = (self._extent(x, p) for x in settled.args)
            return {"+": a + b, "-": a - b, "*": a * b, "//": a // b if b else 0, "%": a % b if b else 0}[settled.op]
        return int(settled)

    def memory(self, clocks: int) -> dict[int, Any]:
        """Buffer slot → the parameter's memory."""
        out: dict[int, Any] = {}
        for p in self.made.program.params:
            if not isinstance(p.var, ir.Var) or p.var not in self.made.slots:
                continue
            slot = self.made.slots[p.var]
            info, array = self.made.buffers[slot], self.arrays[p.name]
            if p.spec.kind == "signal":
                out[slot] = Counters(p.name, array, clocks, (self.rank,))
                continue
            mask = self.masks.get(p.name)
            shadow = Shadow(array.size * info.cells, self.events, tracked=info.tracked, written=mask is None or not mask.any())
            if mask is not None and mask.any():
                shadow.last[:] = 1
                shadow.last.reshape(*array.shape, info.cells)[mask] = UNWRITTEN
            out[slot] = Storage(p.name, info.dtype, array, shadow, scope=info.scope, owner=(self.rank,))
        self.counters = {made.name: made for made in out.values() if isinstance(made, Counters)}
        return out

    def results(self) -> dict[str, Any]:
        """The arrays as the launch left them; counters at their last values."""
        for counters in self.counters.values():
            for index, counter in counters.made.items():
                counters.values[index] = counter.value
        return dict(self.arrays)


def _of_rank(value: Any, rank: int) -> Any:
    if isinstance(value, Callable):  # type: ignore[arg-type]
        return value(rank)
    return value[rank] if isinstance(value, (list, tuple)) else value
