"""What the simulator reports: objects to ask, texts to read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from tilescale.errors import Loc

#: the schedule of what no run has met: a refutation of the static checks
STATIC = "no run: at compile time"

#: every kind of finding, and what it means
KINDS = {
    "race": "two accesses of one element, one of them a write, that nothing orders",
    "collision": "two iterations of a T.Parallel loop touch one element, one of them writing it",
    "deadlock": "nobody can run, and somebody still waits",
    "uninitialised": "a read of memory that nothing wrote",
    "out-of-bounds": "an access outside a tile or a set of counters",
    "no-such-rank": "a remote operation aims at a rank or block that is not there",
    "unawaited": "a signal is sent, and no statement of the kernel awaits it; packets are put and nobody "
    "takes them; or with awaited=True something comes to a rank that may have ended",
    "mismatch": "those who meet in a collective do not agree on what it is, or it does not fit how many "
    "they are",
    "different-programs": "the ranks of a launch run different programs",
    "not-resident": "blocks wait for others, and not all of them are resident at once",
    "assertion": "a T.device_assert does not hold",
    "arithmetic": "an integer division by zero, a shift by a count out of range, or a signed result of 32 "
    "or 64 bits out of range",
    "schedule": "the scheduled program differs from the tile program: another result, an order of tokens, a "
    "touch of what is in flight",
    "endless": "loops poll for ever what nobody is left to change, or the launch does not end within the "
    "limit of steps",
}


#: told behind all others: says what is left over, not what goes wrong
_LAST = ("unawaited",)


class Checked(Protocol):
    """What the static checks know of a program (`static.obligations.Obligations`)."""

    @property
    def counts(self) -> dict[str, dict[str, int]]: ...
    @property
    def summary(self) -> str: ...
    def of(self, status: str) -> list[Any]: ...
    def with_those_of(self, other: Any) -> Any: ...
    def open_questions(self) -> str: ...


@dataclass(frozen=True)
class Where:
    """A statement and who ran it: block coordinates as far as the grid has axes, executors below the block by
    scale and index (a role has no index). launch: its number, where launches overlap."""

    what: str
    loc: Loc | None
    rank: int | None = None
    block: tuple[int, ...] | None = None
    executor: tuple[tuple[str, int | None], ...] = ()
    region: str = ""
    launch: int | None = None

    @property
    def who(self) -> str:
        parts = [] if self.rank is None else [f"rank {self.rank}"]
        if self.block:
            parts.append(f"block {self.block[0] if len(self.block) == 1 else self.block}")
        parts += [scale if index is None else f"{scale} {index}" for scale, index in self.executor]
        parts += [] if self.launch is None else [f"launch {self.launch}"]
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """For machines: plain values alone."""
        loc = self.loc
        return {
            "what": self.what,
            "file": loc and loc.file,
            "line": loc and loc.line,
            "column": loc and loc.col,
            "rank": self.rank,
            "block": self.block and list(self.block),
            "executor": [list(e) for e in self.executor],
            "region": self.region,
            **({} if self.launch is None else {"launch": self.launch}),
        }

    def lines(self, prefix: str, shown: set[Loc | None]) -> list[str]:
        """One line, and the source below it unless it is among those ``shown``."""
        place = f"{self.loc}: " if self.loc else ""
        of, by = f" of {self.region}" if self.region else "", f" by {self.who}" if self.who else ""
        out = [f"{prefix}{place}{self.what}{of}{by}"]
        if self.loc is not None and self.loc not in shown and (excerpt := self.loc.excerpt()):
            out.append(excerpt)
        shown.add(self.loc)
        return out


@dataclass(frozen=True)
class Fix:
    """A hint as an edit of the source.

    how: "before" or "behind" puts ``text`` there, a line or more, as deep as the statement at ``at``; "move
    before" and "move behind" put the statement at ``what`` there instead, "move out" behind the branch around
    it; "replace" writes ``text`` for the words ``old`` of the statement at ``at``.
    """

    how: str
    at: Loc
    text: str = ""
    old: str = ""
    what: Loc | None = None

    def to_dict(self) -> dict[str, Any]:
        """For machines: plain values alone."""
        what = self.what
        return {
            "how": self.how, "file": self.at.file, "line": self.at.line, "text": self.text, "old": self.old,
            "what": what and {"file": what.file, "line": what.line},
        }  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One fault of a kernel. ``where``: the statement that met it; ``others``: the other access, or everyone
    who waits."""

    kind: str
    message: str
    where: Where
    others: tuple[Where, ...] = ()
    hint: str = ""
    schedule: str = ""
    fix: Fix | None = None

    @property
    def loc(self) -> Loc | None:
        return self.where.loc

    def to_dict(self) -> dict[str, Any]:
        """For machines: plain values alone."""
        return {
            "kind": self.kind,
            "message": self.message,
            "where": self.where.to_dict(),
            "others": [w.to_dict() for w in self.others],
            "hint": self.hint,
            "schedule": self.schedule,
            "fix": self.fix and self.fix.to_dict(),
        }

    @property
    def lines(self) -> set[tuple[str, int]]:
        """The lines of source that it names."""
        return {(w.loc.file, w.loc.line) for w in (self.where, *self.others) if w.loc is not None}

    @property
    def key(self) -> tuple[object, ...]:
        """Two findings with one key are the same fault, met twice."""
        places = sorted({str((w.loc, w.what)) for w in (self.where, *self.others)})
        return (self.kind, *places)

    def __str__(self) -> str:
        place = f"{self.where.loc}: " if self.where.loc else ""
        who = f" ({self.where.who})" if self.where.who else ""
        lines = [f"{place}{self.kind}: {self.message}{who}"]
        if self.where.loc is not None and (excerpt := self.where.loc.excerpt()):
            lines.append(excerpt)
        shown = {self.where.loc}
        for other in self.others:
            lines += other.lines("  and " if self.kind != "deadlock" else "  waits ", shown)
        if self.hint:
            lines.append(f"  write instead: {self.hint}")
        if self.schedule:
            lines.append(f"  seen with: {self.schedule}")
        return "\n".join(lines)


@dataclass
class Report:
    """All that one `check` found; true where it found nothing. ``runs``: how many runs that took. Of an
    exhaustive exploration ``traces``: how many classes of interleavings they showed, and ``complete``:
    whether these are all; else None. ``varying``: parameters that clean runs left with different bits, which
    is no fault by itself (atomic additions of floats do). ``unchecked``: what the runs say nothing of, in
    sentences. ``static``: what the static checks know, where they were asked."""

    findings: list[Finding] = field(default_factory=list)
    runs: int = 0
    traces: int | None = None
    complete: bool | None = None
    varying: set[str] = field(default_factory=set)
    unchecked: set[str] = field(default_factory=set)
    static: Checked | None = None

    def add(self, finding: Finding) -> None:
        """Keeps a finding unless the same fault is known. What a run has met says more than what the static
        checks say of the same kind on one of the same lines, and takes its place."""
        alike = [f for f in self.findings if f.kind == finding.kind and f.lines & finding.lines]
        if finding.schedule == STATIC and any(f.schedule != STATIC for f in alike):
            return
        if finding.schedule != STATIC:
            self.findings = [f for f in self.findings if f.schedule != STATIC or f not in alike]
        if all(f.key != finding.key for f in self.findings):
            first = finding.kind not in _LAST
            place = next(
                (k for k, f in enumerate(self.findings) if first and f.kind in _LAST), len(self.findings)
            )
            self.findings.insert(place, finding)

    def add_static(self, found: Checked) -> None:
        """What the static checks know, its refutations among the findings."""
        self.static = found
        for o in found.of("refuted"):
            self.add(o.finding())

    def behind(self, other: Report) -> None:
        """Adds what was found of the launch behind this one."""
        for finding in other.findings:
            self.add(finding)
        self.runs += other.runs
        if self.traces is not None and other.traces is not None:
            self.traces, self.complete = self.traces + other.traces, bool(self.complete and other.complete)
        self.varying |= other.varying
        self.unchecked |= other.unchecked
        if self.static is not None and other.static is not None:
            self.static = self.static.with_those_of(other.static)

    @property
    def kinds(self) -> set[str]:
        return {f.kind for f in self.findings}

    def __bool__(self) -> bool:
        return not self.findings

    @property
    def explored(self) -> str:
        """How much was run, in words."""
        runs = f"{self.runs} run{'s' * (self.runs != 1)}"
        if self.static is not None:
            runs += f" (static: {self.static.summary})"
        if self.complete is None:
            return runs
        shown = f"{self.traces} class{'es' * (self.traces != 1)} of interleavings"
        return (
            f"{runs}: {shown}, which are all"
            if self.complete
            else f"{runs}: {shown}, and others were not run"
        )

    def __str__(self) -> str:
        if not self.findings:
            varying = f"; {', '.join(sorted(self.varying))} came out different" if self.varying else ""
            return "\n".join((f"no finding in {self.explored}{varying}", *sorted(self.unchecked)))
        told = [*map(str, self.findings), *sorted(self.unchecked)]
        return "\n\n".join(told if self.complete is None else [*told, f"found in {self.explored}"])
