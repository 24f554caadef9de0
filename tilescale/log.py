"""What is said on stderr: every fallback and every compilation at ``info``, passes and cache keys at
``debug``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tilescale import env
from tilescale.errors import TileValueError

_level: int | None = None
_said: set[str] = set()
_own = 0


def _wanted() -> int:
    return env.LOG_LEVELS.index(env.LOG.get()) if _level is None else _level


def set_log_level(level: str | None) -> None:
    """How much is said: "error", "warning", "info" or "debug"; None: what TILESCALE_LOG says (by default
    "warning").

    Raises TileValueError for anything else.
    """
    global _level
    if level is not None and level.lower() not in env.LOG_LEVELS:
        raise TileValueError(f"the log level {level!r}", expected="one of " + ", ".join(env.LOG_LEVELS))
    _level = None if level is None else env.LOG_LEVELS.index(level.lower())


def enabled(level: str) -> bool:
    """Whether something of this level is said."""
    return env.LOG_LEVELS.index(level) <= _wanted()


def say(level: str, message: str, *, once: bool = False) -> None:
    """Writes ``message`` to stderr where the level is wanted; ``once``: only the first time in this
    process."""
    if not enabled(level) or (once and message in _said):
        return
    _said.add(message)
    sys.stderr.write(f"tilescale {level}: {message}\n")


@contextmanager
def own_kernel() -> Iterator[None]:
    """While the library compiles a kernel of its own, whose lines a caller cannot change."""
    global _own
    _own += 1
    try:
        yield
    finally:
        _own -= 1


def of_caller() -> bool:
    """Whether what is said of a kernel reaches somebody who wrote it."""
    return not _own
