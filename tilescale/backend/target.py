"""Which target a word means, by TileLang's name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, overload

from tilescale.devices import resolve_target

__all__ = ["Target", "determine_target"]


@dataclass(frozen=True)
class Kind:
    """What a target is called."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Target:
    """A target as programs look at TVM's: ``kind.name``, "cuda" or "cpu", and ``arch``, "" where there is
    none. All that takes a target takes one."""

    kind: Kind
    arch: str

    @property
    def attrs(self) -> dict[str, str]:
        """Its architecture, by name."""
        return {"arch": self.arch} if self.arch else {}

    def __str__(self) -> str:
        return f"{self.kind}:{self.arch}" if self.arch else str(self.kind)


@overload
def determine_target(target: Any = "auto", return_object: Literal[False] = False) -> str: ...
@overload
def determine_target(target: Any = "auto", *, return_object: Literal[True]) -> Target: ...
def determine_target(target: Any = "auto", return_object: bool = False) -> str | Target:
    """The target that ``target`` means on this machine: ``"cuda:sm_90a"``, ``"cpu"`` or ``"sim"``; with
    ``return_object`` as a `Target`. "auto" is this machine's GPU where it has one.

    Raises:
        TileValueError: a target that this version does not have, by name.
    """
    found = resolve_target(target)
    name, _, arch = found.partition(":")
    return Target(Kind(name), arch) if return_object else found
