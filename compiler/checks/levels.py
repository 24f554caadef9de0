"""The tile program against the scheduled one: what a schedule makes of a kernel must give what the kernel
says.

Both run under the same schedule of executors, and every rank's arrays must agree: bit for bit, since a
schedule changes who computes a tile and when, never the order of arithmetic within it. Where blocks add to
floats atomically, in order of arrival, the sums agree within some roundings. A kernel that looks at what its
atomic operations return may decide by the order of arrival what it computes where: its arrays are not
compared, its findings at both levels are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilescale.compiler.checks.run import STEPS, Launch, Result
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.findings import Finding, Report, Where
from tilescale.compiler.ir import spec
from tilescale.compiler.ir.operations import VOID
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.passes.pipeline import gpu_scheduled
from tilescale.compiler.passes.schedule import schedule
from tilescale.compiler.sim import numerics
from tilescale.compiler.sim.prepare import Prepared, prepare
from tilescale.compiler.sim.schedule import Schedule
from tilescale.compiler.tvm_compat import ir, structural_walk
from tilescale.errors import TileValueError

LEVELS = ("tile", "scheduled", "both")
#: machine epsilons by which sums in different orders may differ, relative to the largest element
ROUNDINGS = 64


@dataclass(frozen=True)
class Plan:
    """A schedule that is asked for: see passes/schedule.py. ``arch``: the one that GPUs of an architecture
    get, whatever the others say."""

    depth: int = 2
    roles: tuple[str, ...] = ("producer", "consumer")
    ahead: bool = False
    arch: str = ""

    def __str__(self) -> str:
        if self.arch:
            return f"scheduled for {self.arch}"
        how = (
            " and ".join(self.roles)
            if len(self.roles) > 1
            else "one role that copies ahead"
            if self.ahead
            else "one role"
        )
        return f"scheduled with rings of {self.depth} for {how}"

    def of(self, program: TileProgram) -> TileProgram:
        """A tile program at the scheduled level, verified; one that has a schedule as it is.

        Raises:
            InternalError: the schedule is not well formed.
        """
        if program.schedule is not None:
            return program
        if self.arch:
            return gpu_scheduled(program, target(self.arch))
        made = schedule(program, self.depth, self.roles, self.ahead)
        spec.verify(made.func, spec.SCHEDULED, "schedule")
        return made


class Both(Launch):
    """A launch at both levels: each run is one of the tile program and one of the scheduled one, and compares
    what they leave behind.

    Args:
        scheduled: what ``plan`` made of the program of ``made``. The others are those of :class:`Launch`.
    """

    def __init__(
        self,
        made: Prepared,
        scheduled: Prepared,
        args: Sequence[dict[str, Any]],
        plan: Plan,
        *,
        only: int | None = None,
        limit: int = STEPS,
        whose: str = "",
    ):
        super().__init__(made, args, only=only, limit=limit, whose=whose)
        self.program, self.plan = made.program, plan
        self.scheduled = Launch(scheduled, args, only=only, limit=limit, whose=f"{whose}, {plan}")

    def run(
        self,
        order: str | Schedule = "round_robin",
        seed: int = 0,
        *,
        into: Report | None = None,
        record: bool = False,
    ) -> Result:
        """The tile program's run; its report has what was found at either level."""
        tile = super().run(order, seed, into=into, record=record)
        other = self.scheduled.run(order, seed, into=into)
        for finding in other.report.findings:
            tile.report.add(finding)
        if tile.report:  # what a faulty run leaves behind says nothing
            seen = f"{order}, seed {seed}, " if order != "round_robin" else f"{order}, "
            for finding in compare(self.program, tile.arrays, other.arrays):
                for report in (tile.report, into) if into is not None else (tile.report,):
                    report.add(
                        replace(
                            finding,
                            schedule=f"{seen}{self.ranks} "
                            f"rank{'s' * (self.ranks != 1)}{self.scheduled.whose}",
                        )
                    )
        return tile


def launches(
    program: TileProgram, args: Sequence[dict[str, Any]], limit: int, level: str, plan: Plan
) -> Launch:
    """What runs a program at a level.

    Raises:
        TileValueError: there is no such level, or the program is scheduled already and has no other.
    """
    if level not in LEVELS:
        raise TileValueError(f"there is no level {level!r}", expected="one of " + ", ".join(LEVELS))
    if level == "both":
        if program.schedule is not None:
            raise TileValueError(
                "the program is scheduled already",
                expected="a kernel or a tile program",
                hint='level="scheduled"',
            )
        return Both(prepare(program), prepare(plan.of(program)), args, plan, limit=limit)
    if level == "scheduled":
        return Launch(prepare(plan.of(program)), args, limit=limit, whose=f", {plan}")
    return Launch(prepare(program), args, limit=limit)


def compare(
    program: TileProgram, tile: list[dict[str, Any]], scheduled: list[dict[str, Any]]
) -> Iterator[Finding]:
    """Where the arrays that the two levels left behind (a dict a rank) differ; one finding an array."""
    exact, comparable = _arithmetic(program)
    if not comparable:
        return
    for p in program.params:
        for rank, (want, got) in enumerate(zip(tile, scheduled, strict=True)):
            if (
                p.name in want
                and (bad := _differ(want[p.name], got[p.name], str(p.spec.dtype), exact)) is not None
            ):
                yield _finding(program, p, rank, want[p.name], got[p.name], bad)
                break


def _arithmetic(program: TileProgram) -> tuple[bool, bool]:
    """Whether sums have one order, and whether what is computed where has nothing to do with the order of
    arrival."""
    atomics: list[Any] = []
    added: list[Any] = []

    def look(c: Any) -> None:
        if c.op.name == "ts.atomic":
            atomics.append(c)
        if c.op.name == "ts.atomic" and str(c.attrs["kind"]) == "add":
            added.append(c.args[0].source)
        if c.op.name == "ts.remote_copy" and "op" in c.attrs:
            added.append(c.args[1].source)

    structural_walk(program.func.body, (ir.Call, look))
    sums = any("float" in str(getattr(b.ty.dtype, "dtype", b.ty.dtype)) for b in added)
    return not sums, all(str(c.ty) == str(VOID) for c in atomics)


def _differ(want: Any, got: Any, dtype: str, exact: bool) -> Any:
    """Where two arrays differ, as a mask; None where nowhere."""
    if exact or "float" not in dtype:
        bad = (
            want.view(np.uint8).reshape(*want.shape, -1) != got.view(np.uint8).reshape(*got.shape, -1)
            if want.size
            else np.zeros(0)
        )
        bad = bad.any(-1) if want.size else bad
    else:
        a, b = (numerics.decode(x, dtype).astype(np.float64) for x in (want, got))
        epsilon = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10}.get(dtype, 2.0**-7)
        scale = float(np.abs(a[np.isfinite(a)]).max(initial=1.0))
        with np.errstate(all="ignore"):
            bad = ~((a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= ROUNDINGS * epsilon * scale))
    return bad if bad.any() else None


def _finding(program: TileProgram, p: Any, rank: int, want: Any, got: Any, bad: Any) -> Finding:
    where = np.argwhere(bad)
    low, high = where.min(0), where.max(0) + 1
    box = ", ".join(f"{a}" if b == a + 1 else f"{a}:{b}" for a, b in zip(low, high, strict=True))
    first = tuple(int(i) for i in where[0])
    dtype = str(p.spec.dtype)
    a, b = (numerics.decode(np.atleast_1d(x[first]), dtype)[0] for x in (want, got))
    region = f"{p.name}[{box}]"
    text = (
        f"{region} of rank {rank} differs between the tile program and the scheduled one in {len(where)} of "
        f"{bad.size} elements: "
        f"{p.name}[{', '.join(map(str, first))}] is {a} and {b}"
    )
    return Finding("schedule", text, Where(program.name, program.loc, rank, region=region))
