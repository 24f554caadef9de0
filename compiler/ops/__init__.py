"""The operations of the tile language, one file each: signature, checks, effects, meaning.

The language loads a file when one of its words is first used; whoever asks what a call in a program means has
loaded all of them.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path


def load() -> None:
    """Registers every operation: a program may hold any, and passes make some that no author wrote."""
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        import_module(f"{__name__}.{path.stem}")
