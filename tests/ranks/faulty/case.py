"""What a case of the corpus is: one function that makes the faulty kernel and its repaired twin, and what
must be said of the fault."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilescale.compiler.checks.run import STEPS, check
from tilescale.compiler.findings import Finding, Report

#: stands behind every line at which a finding of the fault may be reported
MARK = "# here"


@dataclass(frozen=True)
class Case:
    """``build(n, bug)`` gives the kernel for n ranks (or a list of one a rank).

    kind: the finding. says: words of its text. ranks: how many run it. args: what the launch is given. limit:
    steps of a launch.
    """

    build: Callable[[int, bool], Any]
    kind: str
    says: tuple[str, ...]
    ranks: int
    args: Callable[[int], dict[str, Any]]
    limit: int

    @property
    def name(self) -> str:
        return self.build.__name__

    @property
    def lines(self) -> set[int]:
        """The marked lines of its source."""
        source, first = inspect.getsourcelines(self.build)
        return {first + k for k, line in enumerate(source) if line.rstrip().endswith(MARK)}

    def check(self, bug: bool, schedule: str, seeds: int | Iterable[int], level: str = "tile") -> Report:
        made = self.build(self.ranks, bug)
        return check(
            made,
            self.ranks,
            self.args(self.ranks),
            schedule=schedule,
            seeds=seeds,
            limit=self.limit,
            level=level,
        )

    def belongs(self, finding: Finding) -> bool:
        """Whether a finding is of the fault's kind and all its statements are marked ones of this very
        function (a deadlock names whoever waits)."""
        places = (
            [finding.loc] if finding.kind == "deadlock" else [finding.loc, *(w.loc for w in finding.others)]
        )
        here, lines = Path(inspect.getfile(self.build)), self.lines
        return finding.kind == self.kind and all(
            p is not None and Path(p.file) == here and p.line in lines for p in places
        )

    def named(self, report: Report) -> bool:
        """Whether a report names the fault, with its words, and nothing else."""
        return all(map(self.belongs, report.findings)) and any(
            all(w in str(f) for w in self.says) for f in report.findings
        )


CASES: list[Case] = []


def case(
    kind: str,
    *says: str,
    ranks: int = 3,
    args: Callable[[int], dict[str, Any]] = lambda n: {},
    limit: int = STEPS,
) -> Callable[[Callable[[int, bool], Any]], Callable[[int, bool], Any]]:
    """Adds the function below to the corpus."""

    def add(build: Callable[[int, bool], Any]) -> Callable[[int, bool], Any]:
        CASES.append(Case(build, kind, says, ranks, args, limit))
        return build

    return add
