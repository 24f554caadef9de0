"""What to write instead, as edits of the source, where what went wrong says which: see `findings.Fix`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tilescale.compiler.findings import Fix
from tilescale.errors import Loc

if TYPE_CHECKING:
    from tilescale.compiler.ir.contexts import Site
    from tilescale.compiler.sim.counters import Counter
    from tilescale.compiler.sim.diagnose import Note, Race
    from tilescale.compiler.sim.machine import Machine

Hint = tuple[str, Fix | None]


def race(machine: Machine, found: Race) -> Hint | None:
    """What orders two accesses of a kernel's memory, by the most particular reason that there is; None:
    nothing more particular than that they want an order."""
    return (
        _early_release(machine, found)
        or _late_wait(machine, found)
        or _update(machine, found)
        or _shared_place(machine, found)
    )


def _early_release(machine: Machine, found: Race) -> Hint | None:
    """Whoever did the other access signalled this one's executor in front of it, behind its own last wait:
    too early."""
    events = machine.events
    other, this = (int(events.who[e]) for e in (found.other, found.event))
    loc = events.said[found.other][1].loc
    last = max(
        (w for w in machine.waits.get(other, []) if w.when <= found.other), key=lambda w: w.when, default=None
    )
    mine = events.said[found.event][0][:2]
    behind = {
        s.counter
        for s in machine.signals.get(other, [])
        if s.when > found.other and s.home == mine[: len(s.home)]
    }
    acquired = {(w.counter, w.home) for w in machine.waits.get(this, []) if w.when <= found.event}
    for sent in reversed(machine.signals.get(other, [])):
        if last is not None and (sent.when < last.when or not _in_front(last.loc, sent.loc)):
            return None
        # Else another one tells of the access.
        told = (sent.counter, sent.home) in acquired and not behind - {sent.counter}
        if sent.when <= found.other and told and _in_front(sent.loc, loc):
            text = (
                f"the signal of {sent.counter} at line {sent.loc.line} behind line {loc.line}: it is "
                "sent before that access"
            )
            return text, Fix("move behind", loc, what=sent.loc)
    return None


def _late_wait(machine: Machine, found: Race) -> Hint | None:
    """The other's signal is awaited, behind this access."""
    events = machine.events
    other, this = (int(events.who[e]) for e in (found.other, found.event))
    loc = events.said[found.event][1].loc
    home = events.said[found.event][0][:2]
    sent = {
        (s.counter, s.home)
        for s in machine.signals.get(other, [])
        if s.when > found.other and s.home == home[: len(s.home)]
    }
    mine = [w for w in machine.waits.get(this, []) if (w.counter, w.home) in sent]
    if any(w.when <= found.event for w in mine):
        return None
    late = next((w for w in mine if _in_front(loc, w.loc)), None)
    if late is None or events.said[found.event][2] != "read":
        return None
    return f"T.wait({late.counter}, …) of line {late.loc.line} before this", Fix(
        "move before", loc, what=late.loc
    )


def _update(machine: Machine, found: Race) -> Hint | None:
    """An assignment that reads what it writes, done by several: an atomic update."""
    said = machine.events.said
    site, other = said[found.event][1], said[found.other][1]
    if site.loc is None or other.loc is None or site.loc.line != other.loc.line:
        return None
    line = _text(site.loc)
    match = re.fullmatch(r"(?P<target>\w+\[.*?\])\s*(?:\+=|=\s*(?P=target)\s*\+)\s*(?P<value>.+)", line)
    if match is None:
        return None
    text = f"T.atomic_add({match['target']}, {match['value']})"
    return f"{text}: several update it", Fix("replace", site.loc, text, line)


def _shared_place(machine: Machine, found: Race) -> Hint | None:
    """One statement of several executors writes one place."""
    (here, site, mode, _), (there, other, also, _) = (
        machine.events.said[e] for e in (found.event, found.other)
    )
    if site.number != other.number or {mode, also} != {"write"}:
        return None
    what = "rank" if here[0] != there[0] else "block" if here[1] != there[1] else "executor"
    return (
        f"memory of its own for each {what} that writes, by an index that differs; or an order between them",
        None,
    )


def overshoot(machine: Machine, counter: Counter, loc: Loc | None) -> Hint:
    """A wait for one value of a counter that has gone past it."""
    hint = f'cmp="ge": {counter.name} passed the value before anyone looked, and is {counter.value}'
    return hint, None if loc is None else Fix("replace", loc, 'cmp="ge"', 'cmp="eq"')


def cleared(name: str, loc: Loc | None) -> Hint:
    """A tile that nothing has written, allocated at ``loc``."""
    hint = f"T.clear({name}) or T.fill in front of this"
    return hint, None if loc is None else Fix("behind", loc, f"T.clear({name})")


def barrier(machine: Machine, scale: str, found: Race) -> Fix | None:
    """A meeting in front of an access; behind it where one stands between the two already, and they are of
    different rounds. Where the access stands in a T.Parallel loop, around that."""
    said = machine.events.said
    site, other = said[found.event][1], said[found.other][1]
    loc = machine.prepared.nest_of.get(site.number, site.loc)
    if loc is None or not _together(machine, site, other):
        return None
    wide: tuple[str, ...] = (
        ("device", "team") if scale == "device" else ("device", "team", "grid", "cta_cluster")
    )
    # Outside of a team its meeting lacks some.
    wide += ("some ranks",) * (site.number in machine.prepared.team_of)
    met = machine.met.get(int(machine.events.who[found.event]), set())
    between = any(kind in wide and _in_front(other.loc, at) and _in_front(at, loc) for kind, at in met)
    return Fix("behind" if between else "before", loc, f'with T.Scale("{scale}"):\n    T.barrier()')


def awaited(machine: Machine, executor: int, note: Note, loc: Loc | None) -> Fix | None:
    """A wait for a signal in front of a statement; None where the executor waits for other counters of that
    signal, whose index varies."""
    others = {
        w.counter
        for w in machine.waits.get(executor, ())
        if w.counter.split("[")[0] == note.counter.split("[")[0]
    }
    return None if loc is None or others - {note.counter} else Fix("before", loc, f"T.wait({note.counter})")


def count_behind(signal: Note, sent: list[Note]) -> int | None:
    """The value that a counter has only when ``signal``, one of all that were ``sent`` to it, has come; None
    where there is none. Of additions it is the sum; of maxima its own, where no other one is as large."""
    if {s.does for s in sent} == {"add"}:
        return sum(s.amount for s in sent)
    largest = all(s.amount < signal.amount for s in sent if s is not signal)
    return signal.amount if largest and {s.does for s in sent} == {"max"} else None


def enough(counter: str, loc: Loc | None, total: int) -> Fix | None:
    """A wait that ends too early, or never, for ``total`` instead."""
    line = "" if loc is None else _text(loc)
    if loc is None or not re.fullmatch(r"T\.wait\(.*\)", line):
        return None
    return Fix("replace", loc, f"T.wait({counter}, {total})", line)


def turned(machine: Machine, counter: Counter, site: Site) -> Hint | None:
    """Of a cycle of waits: the wait that everybody comes to first, behind the signal that ends it."""
    if site.loc is None or machine.prepared.loops_of.get(site.number):
        return None
    for sending in machine.prepared.signalled.get(counter.name.split("[")[0], ()):
        if not (_together(machine, sending.site, site) and _together(machine, site, sending.site)):
            continue
        if _in_front(site.loc, sending.site.loc):
            text = (
                f"this wait behind the signal of line {sending.site.loc.line}, which ends it and which "
                "nobody comes to"
            )
            return text, Fix("move behind", sending.site.loc, what=site.loc)
    return None


def outside(machine: Machine, site: Site) -> Fix | None:
    """A meeting behind the branch that some leave out."""
    if site.loc is None or machine.prepared.loops_of.get(site.number):
        return None
    return Fix("move out", site.loc, what=site.loc)


def one_by_one(loc: Loc | None) -> Fix | None:
    """A nest whose iterations collide."""
    return (
        None
        if loc is None or not re.search(r"T\.Parallel\([^,()]*\)", _text(loc))
        else Fix("replace", loc, "T.serial(", "T.Parallel(")
    )


def _together(machine: Machine, site: Site, other: Site) -> bool:
    """Whether everybody for whom ``other`` is there comes to ``site``: it stands in no branch; or in teams'
    alone, in which both are."""
    made = machine.prepared
    if site.number not in made.guarded:
        return True
    return made.team_of.get(site.number, ()) == made.team_of.get(other.number)


def _in_front(one: Any, other: Any) -> bool:
    return one is not None and other is not None and one.file == other.file and one.line < other.line


def _text(loc: Loc) -> str:
    """The line of source, without what stands around the statement."""
    import linecache

    return linecache.getline(loc.file, loc.line).split("  #")[0].strip()
