"""Notes that their author can do something about: a kernel left its fast path because of how it is written."""

from __future__ import annotations

from typing import Any

from tilescale.errors import Loc


class Advice(str):
    """A note as any other in a program's ``notes``; the kernel also warns of it. ``hint``: what to write instead."""

    loc: Loc | None
    hint: str

    def __new__(cls, text: str, loc: Loc | None, hint: str) -> Advice:
        made = super().__new__(cls, text)
        made.loc, made.hint = loc, hint
        return made


def listed(notes: list[str], loc: Loc | None) -> list[dict[str, Any]]:
    """The advice among notes as metadata, each at its statement or, without one, at ``loc``."""
    found = [n for n in dict.fromkeys(notes) if isinstance(n, Advice)]
    return [{"text": str(n), "file": at.file, "line": at.line, "hint": n.hint} for n in found if (at := n.loc or loc) is not None]
