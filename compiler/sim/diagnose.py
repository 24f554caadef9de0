"""From what went wrong to what people read: which order is missing between two accesses, who waits for whom."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.sim.findings import Finding, Where
from tilescale.compiler.sim.memory import Site, Storage, describe

if TYPE_CHECKING:
    from tilescale.compiler.sim.machine import Executor, Machine

_DID = {"read": "reads", "write": "writes", "update": "updates"}


def owned(storage: Storage) -> str:
    """`` (memory of rank 1)``."""
    if not storage.owner:
        return ""
    rank, *block = storage.owner
    where = f", block {', '.join(map(str, block[0]))}" if block else ""
    return f" (memory of rank {rank}{where})"


def race(machine: Machine, ex: Executor, storage: Storage, site: Site, mode: str, key: Any, event: int, other: str, bad: Any) -> Finding:
    """Two accesses that nothing orders, and what would order them."""
    name, there, _, their_key = machine.events.said[event]
    number, when = int(machine.events.who[event]), int(machine.events.clock[event])
    region = describe(storage.name, key, bad if isinstance(bad, type(machine.events.who)) and bad.ndim else None)
    rank, block, path = name
    earlier = Where(there.what, there.loc, rank, block, path, describe(storage.name, their_key))
    sent = next((s for s in machine.signals.get(number, []) if s[0] >= when), None)
    text = f"this {_DID[mode]} {region}{owned(storage)}, which {earlier.who} {_DID[other]} with nothing that orders the two"
    if sent is not None:
        _, counter, loc = sent
        line = f" at line {loc.line}" if loc else ""
        text += f"; {earlier.who} signals {counter} behind it{line}, and no wait for that comes before this"
    hint = _ordering(ex.name, name, storage)
    return Finding("race", text, ex.where(site, region), (earlier,), hint)


def _ordering(here: tuple[Any, ...], there: tuple[Any, ...], storage: Storage) -> str:
    """What would bring one executor's access behind another's, by how far they are apart."""
    if here[0] != there[0]:
        pair = f"T.signal(s[i], dst={here[0]}) by rank {there[0]} behind its access, and T.wait(s[i]) before this one"
        return pair + '; or T.barrier() in T.Scale("device") between them'
    if here[1] != there[1]:
        if storage.scope.startswith("shared"):
            return 'T.barrier() in T.Scale("cta_cluster") between them, or T.signal and T.wait on a T.alloc_signal'
        return 'T.barrier() in T.Scale("grid") between them, or T.signal behind the other and T.wait before this one'
    return "T.signal behind the other access and T.wait before this one, on a T.alloc_signal that both executors see"


def deadlock(machine: Machine) -> Finding:
    """Everyone who waits, a cycle of them first where there is one."""
    waiting = [ex for ex in machine.blocked if ex.waiting is not None and not ex.children]
    # those who wait for a signal first, then by place: not by who happened to come first
    waiting.sort(key=lambda ex: (ex.waiting is not None and ex.waiting.meeting is not None, ex.number))
    cycle = _cycle(machine, waiting) or []
    order = cycle + [ex for ex in waiting if ex not in cycle]
    shown: dict[tuple[Any, ...], Where] = {}
    for ex in order:
        assert ex.waiting is not None
        what = _waits_for(machine, ex)
        shown.setdefault((ex.waiting.site.loc, ex.rank.number, what), Where(what, ex.waiting.site.loc, *ex.name))
    first = order[0]
    assert first.waiting is not None
    if cycle:
        chain = " → ".join(ex.where(first.waiting.site).who for ex in (*cycle, cycle[0]))
        text = f"nobody can go on: {chain} wait for one another"
    else:
        text = f"nobody can go on: no statement that is still to run ends the wait for {first.waiting.text}"
    return Finding("deadlock", text, first.where(first.waiting.site), tuple(shown.values())[:8])


def _waits_for(machine: Machine, ex: Executor) -> str:
    waiting = ex.waiting
    assert waiting is not None
    if waiting.meeting is not None:
        return f"for {waiting.meeting.expected} executors at {waiting.site.what}; {len(waiting.meeting.came)} have come"
    return f"for {waiting.text}"


def _cycle(machine: Machine, waiting: list[Executor]) -> list[Executor] | None:
    """A cycle in who could still end whose wait; None where there is none."""
    follows: dict[int, list[Executor]] = {}
    for ex in waiting:
        able = [(rank, other.number, other) for other in waiting if other is not ex and (rank := _could_end(machine, other, ex)) < NEVER]
        follows[ex.number] = [other for _, _, other in sorted(able, key=lambda a: a[:2])]
    for start in waiting:
        path: list[Executor] = []
        at: Executor | None = start
        while at is not None and at not in path:
            path.append(at)
            at = next(iter(follows[at.number]), None)
        if at is not None:
            return path[path.index(at) :]
    return None


SURELY, PERHAPS, NEVER = 0, 1, 2


def _could_end(machine: Machine, other: Executor, ex: Executor) -> int:
    """Whether a statement that ``other`` may still run, one behind its own wait or in a loop around it, could end the wait of ``ex``.
    Surely where, by what its variables hold now, it names that very counter."""
    mine, theirs = ex.waiting, other.waiting
    assert mine is not None and theirs is not None
    if mine.meeting is not None:
        near = other.rank is ex.rank or mine.meeting.key[0] not in ("grid", "cta_cluster")
        return SURELY if near and all(came is not other for came, _ in mine.meeting.came) else NEVER
    assert mine.counter is not None
    loops = machine.prepared.loops_of
    around = set(loops.get(theirs.site.number, ()))
    best = NEVER
    for sending in machine.prepared.signalled.get(mine.counter.name.split("[")[0], ()):
        number = sending.site.number
        if number > theirs.site.number or around & set(loops.get(number, ())):
            best = min(best, SURELY if sending.target(other) == (mine.counter.home, mine.counter.name) else PERHAPS)
    return best
