"""A statement made ready to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Step:
    """``run(ex)`` does the statement for an executor. ``yields``: it is a generator, which stops where others
    may go on."""

    run: Callable[[Any], Any]
    yields: bool = False
