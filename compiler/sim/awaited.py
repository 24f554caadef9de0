"""What launches with ``awaited=True`` promise (passes/awaited.py): at the end of a rank's blocks everything
that others aimed at it has come, because they waited for it and not by luck."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tilescale.compiler.findings import Finding, Where
from tilescale.compiler.sim.counters import Counters
from tilescale.compiler.sim.memory import HOST, Storage, describe

if TYPE_CHECKING:
    from tilescale.compiler.sim.machine import Machine, Rank

_END = ", which does not await it before it ends"
_HINT = "a wait for it in the kernel, or no awaited=True"


def judge(machine: Machine) -> None:
    """Adds what comes to a rank and may come behind its end."""
    if not machine.prepared.launch.awaited:
        return
    for rank in machine.ranks:
        end = machine.final.get(rank.number)
        if end is None:
            end = np.zeros(machine.clocks, np.int64)
        for memory in rank.memory.values():
            if isinstance(memory, Counters):
                _signals(machine, rank, memory, end)
            elif (
                isinstance(memory, Storage)
                and memory.shadow.tracked
                and memory.is_global
                and memory.data.size
            ):
                _writes(machine, rank, memory, end)


def _signals(machine: Machine, rank: Rank, counters: Counters, end: Any) -> None:
    for counter in counters.made.values():
        for sent in counter.history:
            others = sent.block is not None and sent.block.rank is not rank
            if others and sent.where is not None and sent.at > end[sent.who]:
                text = f"this signals {counter.name} of rank {rank.number}{_END}"
                machine.report.add(Finding("unawaited", text, sent.where, hint=_HINT))
                break


def _writes(machine: Machine, rank: Rank, memory: Storage, end: Any) -> None:
    events = machine.events
    last = memory.shadow.last.reshape(*memory.shape, -1)[..., -1]
    who, clock = events.who[last], events.clock[last]
    sender = (who - machine.first) * len(machine.ranks) // machine.every
    late = (last > HOST) & (sender != rank.number) & (end[who] < clock)
    if late.any():
        whole = tuple(slice(0, n) for n in memory.shape)
        text = f"this writes {describe(memory.name, whole, late)} of rank {rank.number}{_END}"
        (sent, block, path), site = events.said[int(last[late].flat[0])][:2]
        where = Where(site.what, site.loc, sent, block, path)
        machine.report.add(Finding("unawaited", text, where, hint=_HINT))
