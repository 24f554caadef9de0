"""What is wrong with a program of tests/fuzz/orders.py, found without the simulator: all states that it can
reach, with vector clocks.

Every executor has a clock of one number for each executor: how many of its statements happen before (Fidge,
Mattern). Statements that release put their clock down where they release it; who acquires takes the joined
clock of what is there. All interleavings are followed, states that are alike once. A race is two accesses of
one part, one of them a write, of which neither is in the clock of the other in some interleaving; a deadlock
is a state in which somebody is not done and nobody can go on.

Nothing here is the simulator's: when a write lands says nothing about order, so writes happen where they are
issued.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.fuzz.orders import COUNTERS, Op, Orders

Clock = tuple[int, ...]
#: a statement: its executor and its number there
Statement = tuple[int, int]

_HOLDS = {
    "ge": operator.ge,
    "eq": operator.eq,
    "gt": operator.gt,
    "ne": operator.ne,
    "le": operator.le,
    "lt": operator.lt,
}
_WRITES = ("put", "put and signal", "write", "write if")


class State(NamedTuple):
    """done: statements of each executor that are over. counters: by rank · COUNTERS + counter its value, and
    for each rank the clock that its signals release. flags: of each rank the value, and the clock that
    whoever reads it acquires. skipped: conditional writes that were not made."""

    done: tuple[int, ...]
    clocks: tuple[Clock, ...]
    counters: tuple[tuple[int, tuple[Clock, ...]], ...]
    flags: tuple[tuple[int, Clock], ...]
    skipped: frozenset[Statement]


@dataclass
class Truth:
    """``races``: pairs of statements that collide in some interleaving (signals too, of which one stores and
    one adds). stuck: whether some interleaving ends before everybody is done. states: how many there are."""

    races: set[frozenset[Statement]] = field(default_factory=set)
    stuck: bool = False
    states: int = 0


def truth(program: Orders, most: int = 200_000) -> Truth | None:
    """All of it; None where there are more states than ``most``."""
    count = len(program.ops)
    nothing = (0,) * count
    counter = (0, (nothing,) * program.ranks)
    first = State(
        nothing,
        (nothing,) * count,
        (counter,) * (program.ranks * COUNTERS),
        ((0, nothing),) * program.ranks,
        frozenset(),
    )
    found, seen, due = Truth(), {first}, [first]
    while due:
        state = due.pop()
        after = _following(program, state, found)
        if not after and any(done < len(ops) for done, ops in zip(state.done, program.ops)):
            found.stuck = True
        for one in after:
            if one not in seen:
                seen.add(one)
                due.append(one)
        if len(seen) > most:
            return None
    found.states = len(seen)
    return found


def _following(program: Orders, state: State, found: Truth) -> list[State]:
    """The states that one statement more leads to; its races go into ``found``."""
    out, meeting = [], []
    for e, ops in enumerate(program.ops):
        if state.done[e] == len(ops):
            continue
        if ops[state.done[e]].kind == "barrier":
            meeting.append(e)
        elif (after := _Step(program, state, e).taken(found)) is not None:
            out.append(after)
    if len(meeting) == len(program.ops):
        done = tuple(n + 1 for n in state.done)
        clock = tuple(done)  # what everybody has done is before what anybody does next
        out.append(state._replace(done=done, clocks=(clock,) * len(done)))
    return out


class _Step:
    """The next statement of executor ``e``."""

    def __init__(self, program: Orders, state: State, e: int):
        self.program, self.state, self.e, self.n = program, state, e, state.done[e]
        self.op, self.rank = program.ops[e][self.n], program.rank(e)
        self.clock = state.clocks[e]
        self.counters, self.flags, self.skipped = list(state.counters), list(state.flags), state.skipped

    def taken(self, found: Truth) -> State | None:
        """The state behind it; None where it cannot be taken yet."""
        op, (flag, released) = self.op, self.flags[self.rank]
        if op.kind == "wait":
            value, clocks = self.counters[self.rank * COUNTERS + op.counter]
            if not _HOLDS[op.how](value, op.value):
                return None
            for sender, clock in enumerate(clocks):
                if op.scale == "device" or sender == self.rank:
                    self.acquire(clock)
        elif op.kind == "poll" and not flag:
            return None
        if op.kind in ("poll", "update", "write if"):
            self.acquire(released)
        if op.kind == "write if" and flag != op.value:
            self.skipped |= {(self.e, self.n)}
        else:
            found.races |= {frozenset(((self.e, self.n), other)) for other in self.racing()}
        self.clock = _with(self.clock, self.e, self.n + 1)
        if op.kind in ("signal", "put and signal"):
            self.signal()
        elif op.kind in ("store", "update"):
            self.flags[self.rank] = (flag + op.value if op.kind == "update" else op.value, self.clock)
        done, clocks = (
            _with(self.state.done, self.e, self.n + 1),
            _with(self.state.clocks, self.e, self.clock),
        )
        return State(done, clocks, tuple(self.counters), tuple(self.flags), self.skipped)

    def acquire(self, clock: Clock) -> None:
        self.clock = tuple(map(max, self.clock, clock))

    def signal(self) -> None:
        """A release; an addition goes on with what stood there, a stored value starts anew."""
        place = self.op.peer * COUNTERS + self.op.counter
        value, clocks = self.counters[place]
        adds = self.op.how == "add"
        before = clocks if adds else tuple((0,) * len(self.clock) for _ in clocks)
        joined = tuple(map(max, before[self.rank], self.clock))
        self.counters[place] = (
            value + self.op.value if adds else self.op.value,
            _with(before, self.rank, joined),
        )

    def racing(self) -> list[Statement]:
        """The statements behind us in time that collide with this one, and that its clock does not have."""
        return [
            (f, k)
            for f, ops in enumerate(self.program.ops)
            for k in range(self.clock[f], self.state.done[f])
            if f != self.e
            and (f, k) not in self.skipped
            and self._collide(self.op, self.rank, ops[k], self.program.rank(f))
        ]

    @staticmethod
    def _collide(op: Op, rank: int, other: Op, others: int) -> bool:
        mine, its = _touches(op, rank), _touches(other, others)
        if mine is not None and mine == its and (op.kind in _WRITES or other.kind in _WRITES):
            return True
        told, tells = (_signals(o) for o in (op, other))
        return told is not None and told == tells and op.how != other.how


def _touches(op: Op, rank: int) -> tuple[int, int] | None:
    """The part that a statement of a rank reads or writes, and whose it is."""
    if op.kind in ("put", "put and signal", "pull"):
        return op.peer, op.part
    return (rank, op.part) if op.kind in ("read", "write", "write if") else None


def _signals(op: Op) -> tuple[int, int] | None:
    """The counter that it signals."""
    return (op.peer, op.counter) if op.kind in ("signal", "put and signal") else None


def _with(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])
