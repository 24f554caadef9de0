"""Launches that go on for ever: everybody who can run polls, and nobody is left who could change what the
loops look at.

A round of a ``while`` is in vain where nobody has changed anything since it began and its executor holds at
its end what it held at its beginning. Steps are deterministic, so the next round is the same. Where everybody
who can run is in such a round, none has changed anything since, and no write is on its way, the launch never
ends. Anything but reads counts as a change, whether or not it leaves another value behind (an atomic update
that leaves the value alone is the exception), so that nothing that may still end is called endless.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tilescale.compiler.sim.machine import Executor
    from tilescale.compiler.sim.memory import Storage


class Polling:
    """What the loops of one run look at, and who polls in vain.

    Attributes:
        idle: by number the executors that poll in vain, as things stand. seen: by executor what the last
            round that was watched has read: the memory and the elements, or a counter.
    """

    def __init__(self, eager: bool):
        """``eager``: watch every round; else only those behind a round in which nobody changed anything."""
        self.eager = eager
        self.changes = 0
        self.idle: dict[int, Executor] = {}
        self.seen: dict[int, dict[Any, Any]] = {}
        self.rounds: dict[
            tuple[int, int], tuple[int, bytes | None]
        ] = {}  # (executor, loop) → changes before its round, what it held

    def changed(self) -> None:
        """Somebody did something that others, or the same executor, may notice."""
        self.changes += 1
        if self.idle:
            self.idle.clear()

    def turned(self, ex: Executor, loop: int) -> None:
        """A ``while`` goes into its next round."""
        changes, before = self.rounds.get((ex.number, loop), (-1, None))
        if ex.polled is not None:
            self.seen[ex.number], ex.polled = ex.polled, None
        quiet = changes == self.changes
        now = held(ex) if quiet or self.eager else None
        if quiet and before is not None and before == now:
            self.idle[ex.number] = ex
        if now is not None:
            ex.polled = {}
        self.rounds[ex.number, loop] = self.changes, now


def looked(ex: Any, storage: Storage, key: Any) -> None:
    """Notes what a watched round reads, a region once; of the elements that lanes gather from one memory the
    last ones."""
    spot = (
        repr(key)
        if not isinstance(key, tuple) or not any(isinstance(k, np.ndarray) for k in key)
        else "lanes"
    )
    ex.polled[id(storage), spot] = storage, key


def held(ex: Executor) -> bytes:
    """All that decides what the executor does next, other executors aside: its variables and its own
    memory."""
    parts = [v.tobytes() if isinstance(v, np.ndarray) else repr(v).encode() for v in ex.v]
    parts += [memory.data.tobytes() for memory in ex.mem if getattr(memory, "scope", "").startswith("local")]
    return b"|".join(parts)
