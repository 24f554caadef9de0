"""Makes a failing program smaller: takes statements away, with what is inside them, while it fails in the
same way."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace

from tests.fuzz.programs import Program


def shrink(
    program: Program, fails: Callable[[Program], bool], most: int = 300, seconds: float = float("inf")
) -> Program:
    """The smallest program found in which ``fails`` still holds, in at most ``most`` attempts and about so
    many seconds. Statements go whole; loops and conditions also go alone, their body staying; parameters that
    nobody names any more go last."""
    left, behind = most, time.monotonic() + seconds

    def holds(lines: list[str]) -> bool:
        nonlocal left
        left = left - 1 if time.monotonic() < behind else 0
        return left > 0 and fails(_trimmed(replace(program, text="\n".join(lines))))

    lines = program.text.split("\n")
    again = True
    while again and left > 0:
        again = False
        k = _body(lines)
        while k < len(lines):
            end = _end(lines, k)
            inner = [line[4:] for line in lines[k + 1 : end]]
            for fewer in [lines[:k] + lines[end:], *([lines[:k] + inner + lines[end:]] if inner else [])]:
                if lines[k].strip() and holds(fewer):
                    lines, again = fewer, True
                    break
            else:
                k += 1
    return _trimmed(replace(program, text="\n".join(lines)))


def _body(lines: list[str]) -> int:
    """Where the statements of the launch begin."""
    return next(k for k, line in enumerate(lines) if "T.Kernel(" in line) + 1


def _end(lines: list[str], k: int) -> int:
    """Behind the statement at ``k`` and all that is inside it (its else too)."""
    depth = len(lines[k]) - len(lines[k].lstrip())
    end = k + 1
    while end < len(lines) and (
        len(lines[end]) - len(lines[end].lstrip()) > depth
        or lines[end].strip() == "else:"
        and len(lines[end]) - len(lines[end].lstrip()) == depth
        and lines[k].strip() != "else:"
    ):
        end += 1
    return end


def _trimmed(program: Program) -> Program:
    """Without the parameters that no statement names."""
    head, body = program.text.split("T.Kernel(", 1)

    def used(name: str) -> bool:
        return re.search(rf"\b{name}\b", body) is not None

    for name in [p.name for p in program.params] + list(program.scalars):
        if not used(name):
            head = re.sub(rf"\n        {name}: [^\n]*,(?=\n)", "", head)
    return replace(
        program, text=head + "T.Kernel(" + body, params=[p for p in program.params if used(p.name)],
        scalars={name: v for name, v in program.scalars.items() if used(name)},
    )  # fmt: skip
