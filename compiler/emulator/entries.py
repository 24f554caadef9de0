"""Entry flags of an emulated launch (include/ts/team.cuh, steps 1 and 2). A rank has entered once its first
block runs, which the order of the turns decides. Each thread remembers of which ranks it knows that: by its
own look, or by one of its executor's, behind their barrier. Whoever takes a rank's address must know of that
rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilescale.compiler.emulator.copies import EmulationError
from tilescale.compiler.emulator.memory import Block

#: how the threads of an executor synchronize: (block, which threads are there, number, how many)
Barrier = Callable[[Block, Any, Any, Any], None]


def known(b: Block) -> Any:
    """(threads, ranks): whose entry a thread knows of."""
    if b.task.entered is None:
        b.task.entered = np.zeros((b.threads, len(b.world.arrays)), bool)
        b.task.entered[:, b.task.rank] = True
    return b.task.entered


def await_entry(b: Block, m: Any, rank: int) -> None:
    """Each of these threads awaits the rank's entry for itself."""
    if b.world.ordered:
        b.world.until(lambda: rank in b.world.entered)
        known(b)[m, rank] = True


def require_entry(b: Block, m: Any, rank: Any) -> None:
    """Raises EmulationError where a thread takes a rank's address and does not know of its entry."""
    if b.world.ordered and not known(b)[m, rank].all():
        unaware = int(np.flatnonzero(m & ~known(b)[:, rank])[0])
        raise EmulationError(
            f"thread {unaware} of block {b.task.block} of rank {b.task.rank} touches rank {rank}, of whose "
            "entry into the launch it does not know"
        )


def enter(barrier: Barrier, everyone: bool = False) -> Callable[..., Any]:
    """A look by an executor's threads, a part of which runs this: it ends with their barrier, which tells
    each what all of them saw."""

    def run(b: Block, m: Any, team: Any, *args: Any) -> Any:
        rank = None if everyone else int(np.unique(np.broadcast_to(args[0], m.shape)[m]).item())
        thread, threads, number, _ = args[0 if everyone else 1 :]
        if not b.world.ordered:
            return np.ones(m.shape, np.int32)
        world, count = b.world, len(b.world.arrays)
        lane, of = np.broadcast_to(thread, m.shape), int(np.asarray(threads).ravel()[0])
        # by executor: several of a scale look each for itself
        which = np.broadcast_to(number, m.shape) * b.threads + (np.arange(b.threads) - lane)
        # parts of an executor run one after another: what each saw is kept until the barrier
        for place in np.unique(which[m]):
            mine = m & (which == place)
            looked = [r for r in range(count) if (lane[mine] == r % of).any()]
            awaited = [r for r in looked if everyone or r == rank]
            world.until(lambda awaited=awaited: set(awaited) <= world.entered)
            turn = b.task.looks.setdefault((int(place), int(np.flatnonzero(mine)[0])), [])
            turn.append(None)
            saw = b.task.saw.setdefault((int(place), len(turn)), set())
            saw.update(set(looked) & world.entered)
        barrier(b, m, number, threads)
        out = np.zeros(m.shape, np.int32)
        for place in np.unique(which[m]):
            mine = m & (which == place)
            turn = b.task.looks[int(place), int(np.flatnonzero(mine)[0])]
            saw = b.task.saw[int(place), len(turn)]
            known(b)[np.ix_(mine, sorted(saw))] = True
            out[mine] = len(saw | {b.task.rank}) == count
        return out

    return run
