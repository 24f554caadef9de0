"""Warnings about speed: what a kernel's metadata says of how it is written, cold or from the cache."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tilescale.errors import PerformanceWarning

_registry: dict[Any, Any] = {}  # Python's, by which the default filter warns once of a place
_withheld = 0


def give(meta: dict[str, Any]) -> None:
    """Warns of what makes a kernel slow, at its lines."""
    if _withheld:
        return
    for said in meta.get("slow", ()):
        message = f"{said['text']}\n  write instead: {said['hint']}"
        warnings.warn_explicit(message, PerformanceWarning, said["file"], said["line"], registry=_registry)


@contextmanager
def withheld() -> Iterator[None]:
    """While a tuner tries configurations, of which most are slow."""
    global _withheld
    _withheld += 1
    try:
        yield
    finally:
        _withheld -= 1
