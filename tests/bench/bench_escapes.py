"""Which faults of the corpus does running them not show: each faulty kernel is launched 2,000 times on real
rank processes of the cpu target, in ten jobs (where the system places processes decides much), with new data
and poisoned memory each time, and its results are compared with those of its repaired twin, bit by bit.

A fault escapes where no launch gave another result, hung, or failed; the simulator names every one of them.
Bar: ten. What is no figure here: faults that the compiler refuses, and ranks that launch different programs.
Data are whole numbers, so that the order of sums says nothing. Figures: tests/bench/results/escapes.json.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch

from tests.bench.record import record
from tests.kernels import run
from tests.ranks.faulty.kernels import CASES, Case
from tests.ranks.harness import RanksFailed, run_ranks
from tilescale import comm
from tilescale.compiler.ir.buffers import written_buffers
from tilescale.errors import TileError

LAUNCHES, JOBS = 2000, 10
#: seconds that a wait may take, and a job
WAIT, JOB = 3, 60
#: kinds of which no launch can show a wrong result, and those whose launches never end
HARMLESS, ENDLESS = ("unawaited",), ("endless",)


class _Arguments:
    """A rank's arguments of a kernel, filled anew for each launch; the twin's results are kept to compare
    with."""

    def __init__(self, case: Case, prim: Any):
        self.given, self.rank = case.args(case.ranks), comm.rank()
        program = prim.trace()
        written = written_buffers(program)
        self.params, self.values, self.inputs = program.params, [], set()
        self.results: dict[str, Any] = {}
        for p in self.params:
            if not hasattr(p.spec, "shape"):
                self.values.append(self._of_rank(p.name))
                continue
            shape = tuple(map(int, p.spec.shape))
            if p.spec.kind == "signal":
                self.values.append(comm.signals(shape))
                continue
            symmetric = p.spec.kind != "tensor"
            made = (
                comm.empty(shape, str(p.spec.dtype))
                if symmetric
                else torch.empty(shape, dtype=getattr(torch, str(p.spec.dtype)))
            )
            self.values.append(made)
            if p.var in written:
                self.results[p.name] = made
            else:
                self.inputs.add(p.name)
        local = {p.name for p in self.params if getattr(p.spec, "kind", "") == "tensor"}
        self.results = {
            k: v for k, v in self.results.items() if k in local
        } or self.results  # of a kernel that has none: what it leaves

    def _of_rank(self, name: str) -> Any:
        value = self.given[name]
        return value[self.rank] if isinstance(value, list) else value

    def fill(self, draw: torch.Generator) -> None:
        """New whole numbers for what is read, what the case gives, poison for everything else."""
        for p, value in zip(self.params, self.values, strict=True):
            if not hasattr(p.spec, "shape"):
                continue
            if p.name in self.given:
                value.copy_(torch.as_tensor(self._of_rank(p.name)))
            elif p.spec.kind == "signal":
                pass  # zero when a launch begins
            elif p.name in self.inputs:
                value.copy_(torch.randint(-8, 9, value.shape, generator=draw))
            else:
                value.fill_(float("nan") if value.dtype.is_floating_point else -(2**30))


def wrong_launches(case: Case, faulty: Any, twin: Any, launches: range) -> int:
    """On one rank: in how many launches the faulty kernel's results differed from its twin's, on some
    rank."""
    comm.init()
    bad, good = (_Arguments(case, case.build(case.ranks, bug)) for bug in (True, False))
    both = good.results.keys() & bad.results.keys()
    if not both:
        return -1
    wrong = comm.zeros((len(launches),), torch.int32)
    for place, launch in enumerate(launches):
        for kernel, arguments in ((twin, good), (faulty, bad)):
            arguments.fill(torch.Generator().manual_seed(1_000 * launch + comm.rank()))
            kernel(*arguments.values)
        wrong[place] = int(
            not all(
                torch.equal(good.results[name].nan_to_num(1e9), bad.results[name].nan_to_num(1e9))
                for name in both
            )
        )
    comm.barrier()
    total = sum(comm.peer(wrong, r) for r in range(comm.world_size()))
    comm.barrier()
    return int((total > 0).sum())


def measured(case: Case, launches: int = LAUNCHES) -> dict[str, Any]:
    """{"wrong": launches}, or {"failed": why} for one that hung or failed, or {"refused": why}."""
    made = [case.build(case.ranks, bug) for bug in (True, False)]
    if isinstance(made[0], list):
        return {"refused": "ranks that launch different programs are told so when they meet"}
    try:
        kernels = [run(kernel) for kernel in made]
    except TileError as e:
        return {"refused": e.message}
    # blocks of one rank run on two threads at once, as ranks do on processes
    env = {"TILESCALE_WAIT_TIMEOUT": str(WAIT), "TILESCALE_NUM_THREADS": "2" if case.ranks == 1 else "1"}
    try:
        limit = 2 * WAIT if case.kind in ENDLESS else JOB
        wrong = 0
        for job in range(JOBS):
            part = range(job * launches // JOBS, (job + 1) * launches // JOBS)
            count = run_ranks(case.ranks, wrong_launches, case, *kernels, part, timeout=limit, env=env)[0]
            if count < 0:
                return {"refused": "there is no result to compare"}
            wrong += count
        return {"wrong": wrong}
    except RanksFailed as e:
        first = e.failures[0]
        return {"failed": f"{first.kind}: {first.text.splitlines()[0][:160] if first.text else ''}"}


def test_escapes() -> None:
    table = {}
    for case in CASES:
        table[case.name] = {"kind": case.kind, "ranks": case.ranks, **measured(case)}
        print(case.name, table[case.name], flush=True)
    escaped = [name for name, row in table.items() if row.get("wrong") == 0 and row["kind"] not in HARMLESS]
    figures = {
        "launches": LAUNCHES,
        "jobs": JOBS,
        "cores": multiprocessing.cpu_count(),
        "escaped": len(escaped),
        "bar": 10,
        "names": escaped,
        "faults": table,
    }
    record("escapes", figures)
    assert len(escaped) >= 10
