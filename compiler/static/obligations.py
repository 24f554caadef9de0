"""What must hold of a program, and what is known of it: proven, refuted with a counterexample, or unknown
with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tilescale.compiler.findings import STATIC, Finding, Where
from tilescale.errors import Loc, TileValueError

PROVEN, REFUTED, UNKNOWN = "proven", "refuted", "unknown"

#: every kind of obligation, what it asks, and the simulator's word for the fault
KINDS = {
    "collision": ("iterations of a T.Parallel nest touch elements of their own", "collision"),
    "coverage": ("a tile's elements are written before they are read", "uninitialised"),
    "bounds": ("an access lies inside its tile", "out-of-bounds"),
    "counter": ("a counter's index lies inside its T.Signal", "out-of-bounds"),
    "peer": ("src=, dst= and team= name ranks (blocks of the cluster) that are there", "no-such-rank"),
    "wait": ("the signals that name a counter can reach what is awaited", "deadlock"),
    "part": ("a rank's part of another rank's tensor is there", "out-of-bounds"),
    "overlap": (
        "remote writes of two blocks or ranks that nothing orders touch elements of their own",
        "race",
    ),
}


#: kinds that stop no compilation and no launch: what they find has a meaning, though hardly the one that is
#: wanted
ALLOWED = ("part",)


@dataclass(frozen=True)
class Counterexample:
    """Values of variables by the names that the author gave them; a prime marks the other iteration or
    executor."""

    values: dict[str, int]
    index: str = ""

    def __str__(self) -> str:
        shown = ", ".join(f"{name} = {value}" for name, value in self.values.items())
        return f"{self.index} with {shown}" if self.index and shown else self.index or shown


@dataclass
class Obligation:
    """One thing that must hold at one statement.

    reason: why it is unknown. counterexample: where it fails; beside ``unknown`` it fails for some arguments
    of the kernel and not for all. other: the second statement of a pair.
    """

    kind: str
    what: str
    loc: Loc | None
    status: str = UNKNOWN
    text: str = ""
    reason: str = ""
    counterexample: Counterexample | None = None
    hint: str = ""
    other: tuple[str, Loc | None] | None = None

    def finding(self) -> Finding:
        """A refuted obligation in the simulator's words."""
        values = self.counterexample.values if self.counterexample else {}
        region = self.counterexample.index if self.counterexample else ""
        others = () if self.other is None else (Where(self.other[0], self.other[1]),)
        where = Where(self.what, self.loc, values.get("rank"), None, (), region)
        return Finding(
            KINDS[self.kind][1], f"{self.text}: {self.counterexample}", where, others, self.hint, STATIC
        )

    def error(self) -> TileValueError:
        """A refuted obligation as the error that stops a compilation."""
        rule = KINDS[self.kind][0]
        return TileValueError(
            f"{self.text}: {self.counterexample}", loc=self.loc, expected=rule, hint=self.hint or None
        )


@dataclass
class Obligations:
    """All obligations of the program ``name``. ``inside``, ``guarded``: accesses of tensors that are proven
    inside, and those that keep a guard (outside, reads give zero and writes are dropped: no obligation).
    ``steps``: what of ``budget`` was spent; ``cut_short``: it ended before all were looked at."""

    items: list[Obligation] = field(default_factory=list)
    inside: int = 0
    guarded: int = 0
    milliseconds: float = 0.0
    steps: int = 0
    budget: int = 0
    cut_short: bool = False
    name: str = ""

    def __iter__(self) -> Iterator[Obligation]:
        return iter(self.items)

    def with_those_of(self, other: Obligations) -> Obligations:
        """Those of two programs, of which one call launches both."""
        return Obligations(
            [*self.items, *other.items],
            self.inside + other.inside,
            self.guarded + other.guarded,
            self.milliseconds + other.milliseconds,
            self.steps + other.steps,
            self.budget + other.budget,
            self.cut_short or other.cut_short,
        )

    def of(self, status: str) -> list[Obligation]:
        return [o for o in self.items if o.status == status]

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """kind → status → how many."""
        out: dict[str, dict[str, int]] = {}
        for o in self.items:
            row = out.setdefault(o.kind, {PROVEN: 0, REFUTED: 0, UNKNOWN: 0})
            row[o.status] += 1
        return out

    @property
    def summary(self) -> str:
        """``212 obligations, 210 proven, 2 unknown``."""
        parts = [f"{n} {status}" for status in (PROVEN, REFUTED, UNKNOWN) if (n := len(self.of(status)))]
        count = len(self.items)
        late = ["not all looked at"] if self.cut_short else []
        return ", ".join([f"{count} obligation{'s' * (count != 1)}", *parts, *late])

    def unfinished(self, whose: str = "") -> str:
        """Where the budget ended too early, a sentence that says so (``whose``: of what instead of the
        program); else empty."""
        if not self.cut_short:
            return ""
        return (
            f"{whose or self.name}: the static checks spent their {self.budget} steps and left the rest open"
        )

    def __str__(self) -> str:
        """The table, and a line for each that is refuted or unknown."""
        refuted = [f"{o.loc or '?'}: {o.kind}: {o.text}: {o.counterexample}" for o in self.of(REFUTED)]
        return "\n".join(part for part in (self.table(), *refuted, self.open_questions()) if part)

    def open_questions(self) -> str:
        """What is unknown, a line each: where, of which kind, for which arguments it fails, and why it is not
        decided."""
        lines = []
        for o in self.of(UNKNOWN):
            fails = f"; {o.text}: {o.counterexample}" if o.counterexample else ""
            lines.append(f"{o.loc or '?'}: {o.kind}: {o.what}: {o.reason or 'not decided'}{fails}")
        return "\n".join(lines)

    def table(self) -> str:
        """The counts as lines of text."""
        rows: list[tuple[str, ...]] = [("", PROVEN, REFUTED, UNKNOWN)]
        rows += [
            (kind, *(str(row[s]) for s in (PROVEN, REFUTED, UNKNOWN))) for kind, row in self.counts.items()
        ]
        lines = [f"{a:<10}{b:>8}{c:>9}{d:>9}" for a, b, c, d in rows]
        total = self.inside + self.guarded
        return "\n".join([*lines, f"accesses of tensors proven inside: {self.inside} of {total}"])
