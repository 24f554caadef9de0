"""What instrumented kernels log on the emulated GPU (include/ts/trace.cuh). Its clock counts the looks at it,
of all ranks alike: what is logged later happened later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilescale.compiler.emulator.copies import EmulationError
from tilescale.compiler.emulator.memory import Block, Pointer


@dataclass(frozen=True)
class Logged:
    """One span. block: its linear number; site: of the kernel's; peer: a rank of the launch, -1 without
    one."""

    rank: int
    block: int
    thread: int
    site: int
    begin: int
    end: int
    peer: int
    amount: int


@dataclass
class Log:
    """Of one launch of several ranks, or of several launches one behind another."""

    events: list[Logged] = field(default_factory=list)
    #: of loops that threads are in: bytes by rank, and when the first of their copies began
    joined: dict[tuple[int, int, int], dict[Any, int]] = field(default_factory=dict)


class _Clock:
    ticks = 0

    def time(self) -> int:
        self.ticks += 1
        return self.ticks


_CLOCK = _Clock()


def _logging(b: Block, log: Log | None) -> Log:
    if log is None or b.task is None:
        raise EmulationError("an instrumented kernel runs as ranks, with a log (run_ranks(…, log=Log()))")
    return log


def _each(m: Any, thread: Any, *told: Any) -> Iterator[tuple[int, ...]]:
    """Of each thread that logs, its number and what it says."""
    for t in np.flatnonzero(m):
        who, *numbers = (int(np.broadcast_to(x, m.shape)[t]) for x in (thread, *told))
        if who != t:
            raise EmulationError(f"thread {t} logs as thread {who}")
        yield who, *numbers


def _logged(b: Block, log: Log, *told: int) -> None:
    assert b.task is not None
    who, where, since, far, much = told
    log.events.append(Logged(b.task.rank, b.task.block, who, where, since, _CLOCK.time(), far, much))


def _span(
    b: Block, m: Any, log: Log | None, slots: Pointer, began: Any, site: Any, thread: Any, peer: Any,
    amount: Any,
) -> None:  # fmt: skip
    log = _logging(b, log)
    for told in _each(m, thread, site, began, peer, amount):
        _logged(b, log, *told)


def _joins(
    b: Block, m: Any, log: Log | None, slots: Pointer, joined: Pointer, site: Any, thread: Any, peer: Any,
    amount: Any,
) -> None:  # fmt: skip
    """Copies of threads are added to those of their loop."""
    held = _logging(b, log).joined
    for who, where, far, much in _each(m, thread, site, peer, amount):
        mine = held.setdefault((id(b), who, where), {"began": _CLOCK.time()})
        mine[far] = mine.get(far, 0) + much


def _joined(
    b: Block, m: Any, log: Log | None, slots: Pointer, joined: Pointer, site: Any, thread: Any
) -> None:
    """Each rank's of them become a span."""
    log = _logging(b, log)
    for who, where in _each(m, thread, site):
        mine = log.joined.pop((id(b), who, where), {})
        began = mine.pop("began", 0)
        for far, much in mine.items():
            if much > 0:
                _logged(b, log, who, where, began, far, much)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ts::log_time": lambda b, m: np.full(m.shape, _CLOCK.time(), np.int64),
    "ts::log_span": _span,
    "ts::log_joins": _joins,
    "ts::log_joined": _joined,
}
