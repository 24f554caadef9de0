"""The tree of errors. Every refusal names the user's file, line and expression, what was expected and what to
write instead.

A leaf, so that compiler/, comm/ and launch/ may all raise from it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from tilescale import source_text


@dataclass(frozen=True)
class Loc:
    """A place in the user's source: 1-based lines, 0-based columns; ``end_col`` is exclusive, None where
    unknown."""

    file: str
    line: int
    col: int | None = None
    end_line: int | None = None
    end_col: int | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def excerpt(self) -> str:
        """The source line with a caret under the expression; empty where the source cannot be read."""
        text = source_text.line(self.file, self.line)
        if not text.strip():
            return ""
        indent = len(text) - len(text.lstrip())
        start = max(self.col if self.col is not None else indent, indent)
        end = self.end_col if self.end_col is not None and self.end_line in (None, self.line) else len(text)
        marks = "^" * max(1, min(end, len(text)) - start)
        number = str(self.line)
        gutter = " " * len(number)
        return f"  {number} | {text}\n  {gutter} | {' ' * start}{marks}"


class TileError(Exception):
    """The root of everything that TileScale refuses.

    ``message`` says what is wrong, ``expected`` what was expected, ``hint`` what to write instead, ``loc``
    where.
    """

    def __init__(
        self, message: str, *, loc: Loc | None = None, expected: str | None = None, hint: str | None = None
    ):
        self.message, self.loc, self.expected, self.hint = message, loc, expected, hint
        super().__init__(message)

    def __str__(self) -> str:
        lines = []
        if self.loc is not None:
            lines.append(f"{self.loc}: {self.message}")
            if excerpt := self.loc.excerpt():
                lines.append(excerpt)
        else:
            lines.append(self.message)
        if self.expected:
            lines.append(f"  expected: {self.expected}")
        if self.hint:
            lines.append(f"  write instead: {self.hint}")
        return "\n".join(lines)

    def at(self, loc: Loc | None) -> TileError:
        """The same error, placed at ``loc`` unless it already has a place."""
        if self.loc is None:
            self.loc = loc
        return self


class TileTypeError(TileError, TypeError):
    """A dtype, a kind of argument or a device that does not fit."""


class TileValueError(TileError, ValueError):
    """A shape, an extent, a rank or a constant that does not fit."""


class TileNameError(TileError, NameError):
    """A name that the kernel uses and that is defined nowhere."""


class TileSyntaxError(TileError):
    """Python that has no meaning inside a kernel."""


class LaunchError(TileError, RuntimeError):
    """A launch that failed while it ran: a wait's time limit, ranks that launched different things, a failed
    assertion."""


class FindingError(LaunchError):
    """A simulated launch in which something is wrong. ``report``: the findings (a
    :class:`tilescale.compiler.findings.Report`)."""

    def __init__(self, report: Any):
        self.report = report
        super().__init__(str(report), loc=report.findings[0].loc if report.findings else None)

    def __str__(self) -> str:
        return str(self.report)


class CommError(TileError, RuntimeError):
    """The ranks could not be started, joined or kept in agreement."""


class PerformanceWarning(UserWarning):
    """A kernel left its fast path because of how it is written; names the line, the reason and what to write
    instead. Python's filters silence it or make it an error (``warnings.filterwarnings("error",
    category=tilescale.PerformanceWarning)``)."""


class InternalError(TileError):
    """A broken invariant of the compiler itself: please report it with the kernel."""


def utf8(name: str) -> str:
    """A file's name as TVM and C code take it, in UTF-8. Under a locale that knows no UTF-8 Python has the
    bytes of other names as surrogates, which no text may hold."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def from_utf8(name: str) -> str:
    """A name that :func:`utf8` gave as Python opens the file."""
    return os.fsdecode(name.encode("utf-8"))
