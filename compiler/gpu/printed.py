"""Printed code, as the compilers take it. Imports no TVM: a warm start asks the toolchain for its
fingerprint."""

from __future__ import annotations

from dataclasses import dataclass

from tilescale.errors import Loc


@dataclass(frozen=True)
class Printed:
    """A kernel's code. ``places``: of every line (the first is ``places[0]``) where in the user's source it
    comes from. ``relocatable``: it calls functions that are linked to it."""

    text: str
    name: str
    places: tuple[Loc | None, ...]
    relocatable: bool = False
