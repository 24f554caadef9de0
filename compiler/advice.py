"""Notes that their author can do something about: a kernel left its fast path because of how it is
written."""

from __future__ import annotations

from typing import Any

from tilescale.errors import Loc


class Advice(str):
    """A note as any other in a program's ``notes``; the kernel also warns of it. ``hint``: what to write
    instead.

    Also a reason, of which such a note is made: who says why something cannot be returns one where its author
    can change it, else a plain ``str``."""

    loc: Loc | None
    hint: str

    def __new__(cls, text: str, loc: Loc | None, hint: str) -> Advice:
        made = super().__new__(cls, text)
        made.loc, made.hint = loc, hint
        return made


def reason(text: str, hint: str) -> Advice:
    """Why something cannot be, and what to write so that it can."""
    return Advice(text, None, hint)


def note(text: str, why: str, loc: Loc | None) -> str:
    """A note made of a reason: advice where the reason says what to write instead."""
    return Advice(text, loc, why.hint) if isinstance(why, Advice) else text


def listed(notes: list[str], loc: Loc | None) -> list[dict[str, Any]]:
    """The advice among notes as metadata, each at its statement or, without one, at ``loc``."""
    found = [n for n in dict.fromkeys(notes) if isinstance(n, Advice)]
    return [
        {"text": str(n), "file": at.file, "line": at.line, "hint": n.hint}
        for n in found
        if (at := n.loc or loc) is not None
    ]
