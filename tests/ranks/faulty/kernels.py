"""The corpus: faulty kernels and their repaired twins, by what they get wrong.

Each is one function: ``bug`` chooses between the fault and its repair. ``CASES`` says for each what the
simulator must call the fault and which words its text must hold; a comment marks the lines at which it may be
reported.
"""

from __future__ import annotations

from tests.ranks.faulty import blocks, buffers, collectives, memory, packets, pipelines, signals, teams
from tests.ranks.faulty.case import CASES, Case

__all__ = [
    "CASES",
    "Case",
    "blocks",
    "buffers",
    "collectives",
    "memory",
    "packets",
    "pipelines",
    "signals",
    "teams",
]
