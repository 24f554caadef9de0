"""What TileScale says on stderr, by TILESCALE_LOG (error, warning, info, debug)."""

from __future__ import annotations

import sys

from tilescale.env import LOG, LOG_LEVELS

_said: set[str] = set()


def say(level: str, message: str, *, once: bool = False) -> None:
    """Prints ``message`` where the level is asked for; ``once``: at most once a process."""
    if LOG_LEVELS.index(level) > LOG_LEVELS.index(LOG.get()) or (once and message in _said):
        return
    _said.add(message)
    print(f"tilescale: {message}", file=sys.stderr, flush=True)
