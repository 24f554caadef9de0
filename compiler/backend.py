"""What a target gives the driver: passes and lowering, code, its description, texts for people."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from tilescale.compiler.description import Artifact
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.passes.pipeline import Trace

#: what a back end keeps of a kernel that it has lowered
Own = TypeVar("Own")


@dataclass
class Lowered(Generic[Own]):
    """A kernel as thread IR, with the program it came from at the scheduled level. ``own``: what only its
    back end understands; ``funcs``: the functions of the code, by name."""

    program: TileProgram
    own: Own
    funcs: dict[str, Any]
    trace: Trace


class Backend(Generic[Own]):
    """A target, for one architecture where it has several. `driver.BACKENDS` lists them."""

    #: kinds of `text`, beside "tile", "scheduled" and "thread", which every target has
    texts: ClassVar[tuple[str, ...]] = ()

    def __init__(self, arch: str):
        self.arch = arch

    def lower(self, program: TileProgram, *, instrument: bool, keep: bool) -> Lowered[Own]:
        """A traced program as thread IR. ``keep``: the trace keeps every step's text.

        Raises:
            TileError: the program cannot run on the target; InternalError: a pass broke it.
        """
        raise NotImplementedError

    def describe(self, lowered: Lowered[Own], *, instrument: bool, fingerprint: int) -> Artifact:
        """What the launcher and the kernel object must know."""
        raise NotImplementedError

    def build(self, lowered: Lowered[Own], path: Path) -> dict[str, Any]:
        """Writes the code; returns what only the code tells, for the metadata."""
        raise NotImplementedError

    def text(self, lowered: Lowered[Own], kind: str) -> str:
        """The kernel as one of ``texts``."""
        raise NotImplementedError
