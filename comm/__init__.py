"""Ranks: who they are (bootstrap), the symmetric heap, signals, teams and barriers."""

from __future__ import annotations

from tilescale.comm.bootstrap import World, world

__all__ = ["World", "world"]
