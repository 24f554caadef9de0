"""From what went wrong to what people read: which order is missing between two accesses, who waits for
whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tilescale.compiler.findings import Finding, Fix, Where
from tilescale.compiler.ir.contexts import Site
from tilescale.compiler.ir.scales import WIDTHS
from tilescale.compiler.sim import fixes, flights, mbarriers, numerics, rings
from tilescale.compiler.sim.memory import Storage, describe, elements

if TYPE_CHECKING:
    from tilescale.compiler.sim.machine import Executor, Machine, Meeting

_DID = {"read": "reads", "write": "writes", "update": "updates"}


def owned(storage: Storage) -> str:
    """`` (memory of rank 1)``."""
    if not storage.owner:
        return ""
    rank, *block = storage.owner
    where = f", block {', '.join(map(str, block[0]))}" if block else ""
    return f" (memory of rank {rank}{where})"


@dataclass(frozen=True)
class Note:
    """A signal or a wait that an executor did: how many accesses the machine had seen by then, which counter
    of whom, where, and of a wait in words what was awaited, and at which scale."""

    when: int
    counter: str
    home: tuple[Any, ...]
    loc: Any
    text: str = ""
    reach: str = ""
    amount: int = 0  # what a signal adds, stores or offers, or a wait compares with
    does: str = ""  # a signal's operation, a wait's comparison


@dataclass(frozen=True)
class Race:
    """The access ``event`` of a storage, and ``other``, which nothing orders; ``bad``: the elements of the
    later one. too_early: the access reads what the other had still to write."""

    storage: Storage
    event: int
    other: int
    bad: Any
    too_early: bool


@dataclass
class Early:
    """A read of elements that nothing had written by then; ``unwritten``: those of them whose writer has not
    shown itself since."""

    storage: Storage
    event: int
    unwritten: Any

    def take(self, storage: Storage, key: Any, bad: Any) -> bool:
        """Forgets those elements of ``key`` where ``bad`` holds, which are being written; whether there are
        any."""
        mine = self.unwritten.reshape(storage.cells)
        hit = mine[key] & bad
        mine[key] = mine[key] & ~hit
        return bool(np.any(hit))


def _placed(machine: Machine, event: int, region: str) -> Where:
    (rank, block, path), site = machine.events.said[event][:2]
    return Where(
        site.what, site.loc, rank, block, path, region, machine.of(int(machine.events.who[event])).launch
    )


def race(machine: Machine, found: Race) -> Finding:
    """Two accesses that nothing orders, and what would order them."""
    machine = machine.of(int(machine.events.who[found.event]))
    apart = _apart(machine, found)
    sent = None if apart else _sent_news(machine, found)
    if sent is not None and not _waits_of(machine, found.other, sent):
        found = Race(found.storage, found.other, found.event, found.bad, True)
    said, storage = machine.events.said, found.storage
    mode, key = said[found.event][2:]
    other, their_key = said[found.other][2:]
    bad = elements(found.bad, storage.cells, their_key if found.too_early else key)
    at = describe(storage.name, their_key if found.too_early else key, bad if bad.ndim else None)
    this = _placed(machine, found.event, at)
    that = _placed(machine, found.other, describe(storage.name, their_key))
    text = (
        f"this {_DID[mode]} {at}{storage.shared}{owned(storage)}, which {that.who} {_DID[other]} with "
        "nothing that orders the two"
    )
    if found.too_early:
        text = (
            f"this {_DID[mode]} {at}{owned(storage)} before {that.who} {_DID[other]} it: nothing orders "
            "the two"
        )
    fix: Fix | None = None
    if apart:
        return Finding("race", text, this, (that,), apart)
    if (engines := rings.race(machine, found) or flights.race(machine, found)) is not None:
        news, hint = engines
    elif (phases := mbarriers.race(machine, found)) is not None:
        news, hint, fix = phases
    else:
        news, hint, fix = _news(machine, found, that.who)
        ordering, meeting = _ordering(machine, found, storage)
        if hint and fix is None and meeting is not None:
            scale = meeting.text.splitlines()[0].removeprefix("with ").removesuffix(":")
            hint += f"; or T.barrier() in {scale} {meeting.how} this"
        hint, fix = fixes.race(machine, found) or (hint or ordering, fix or meeting)
    if (
        sent is not None
        and not found.too_early
        and all(w.when > found.other for w in _waits_of(machine, found.other, sent))
    ):
        hint = (
            f"T.wait({sent.counter}, …) in front of that read, if it is to see what is written here; "
            f"else {hint}"
        )
    return Finding("race", text + news, this, (that,), hint, fix=fix)


def _apart(machine: Machine, found: Race) -> str:
    """What to write where the two accesses are of different launches, or a host's: no edit between two
    statements orders them."""
    numbers = [int(machine.events.who[e]) for e in (found.event, found.other)]
    (here, *_), (there, *_) = (machine.events.said[e] for e in (found.event, found.other))
    if any(map(machine.is_host, numbers)):
        return (
            f"comm.barrier() between the two, or a signal of rank {there[0]} behind the one, awaited by "
            f"rank {here[0]} before the other"
        )
    this, that = (machine.of(n).launch for n in numbers)
    if this == that:
        return ""
    return (
        f"T.signal(s[i], dst={here[0]}) by rank {there[0]} behind its access in launch {that}, on a "
        "T.Signal(…, keep=True), "
        "and T.wait in front of this one for a count that only that launch reaches; or another slot in each "
        "launch; or ordered launches"
    )


def _sent_news(machine: Machine, found: Race) -> Note | None:
    """The signal by which the writer of a write behind a read tells the reader's rank of it. Where the reader
    waits for that nowhere in the launch, it read too early: what it lacks is its wait. One that does wait for
    it before has its turns, and the writer came too early."""
    said = machine.events.said
    if (
        found.too_early
        or found.storage.ring is not None
        or (said[found.event][2], said[found.other][2]) != ("write", "read")
    ):
        return None
    home = said[found.other][0][:2]
    sent = machine.signals.get(int(machine.events.who[found.event]), [])
    return next((s for s in sent if s.when > found.event and s.home == home[: len(s.home)]), None)


def _waits_of(machine: Machine, event: int, sent: Note) -> list[Note]:
    """The waits for the counter of a signal by whoever did ``event``. A copy in flight has an executor of its
    own: its role's waits come before it, and those are its block's."""
    me = int(machine.events.who[event])
    its = machine.of(me)
    each = its.prepared.executors
    first = me - (me - its.first) % each
    copies = any(at <= me - first < at + count for at, count in its.prepared.units.values())
    near = range(first, first + each) if copies else (me,)
    return [
        w for k in near for w in machine.waits.get(k, []) if (w.counter, w.home) == (sent.counter, sent.home)
    ]


def _news(machine: Machine, found: Race, who: str) -> tuple[str, str, Fix | None]:
    """Which signal of ``who`` tells of its access, why this one does not hear it, and what to write."""
    other = int(machine.events.who[found.other])
    mine = machine.events.said[found.event][0][:2]
    sent = [s for s in machine.signals.get(other, []) if s.when > found.other]
    acquired = [s for s in sent if s.home == mine[: len(s.home)]]
    if not sent:
        return "", "", None
    signal = (acquired or sent)[0]
    line = f" at line {signal.loc.line}" if signal.loc else ""
    if not acquired:
        text = (
            f"; {who} signals {signal.counter}{_of(signal.home)} behind it{line}, and nobody tells "
            f"{_of(mine)[4:]}"
        )
        return text, "", None
    here_loc = machine.events.said[found.event][1].loc
    waits = [w for w in _waits_of(machine, found.event, signal) if w.when <= found.event]
    if not waits:
        text = f"; {who} signals {signal.counter} behind it{line}, and no wait for that comes before this"
        me, reads = int(machine.events.who[found.event]), machine.events.said[found.event][2] == "read"
        fix = fixes.awaited(machine, me, signal, here_loc) if reads else None
        return text, f"T.wait({signal.counter}, …) before this", fix
    wait = waits[-1]
    at = f" at line {wait.loc.line}" if wait.loc else ""
    here, there = machine.events.said[found.event][0], machine.events.said[found.other][0]
    far = here[0] != there[0] and wait.reach != "device"
    if far or (here[1] != there[1] and wait.reach == "block"):
        scale, others = ("device", "other ranks") if far else ("cta_cluster", "other blocks")
        text = (
            f"; {who} signals {signal.counter} behind it{line}, and the wait for {wait.text}{at} stands "
            f"at the scale of the {wait.reach}"
        )
        return (
            f"{text}, where it does not acquire what {others} release",
            f'the wait inside T.Scale("{scale}")',
            None,
        )
    text = (
        f"; {who} signals {signal.counter} behind it{line}, and the wait for {wait.text}{at} ends "
        "without that"
    )
    fix = None
    mine_too = machine.waits.get(int(machine.events.who[found.event]), ())
    if (
        sum(w.counter == wait.counter for w in mine_too) == 1
    ):  # in no loop, and the counter has no second phase
        sent = [
            s
            for mine in machine.signals.values()
            for s in mine
            if (s.counter, s.home) == (signal.counter, signal.home)
        ]
        total = fixes.count_behind(signal, sent) if wait.does in ("ge", "gt") else None
        fix = (
            fixes.enough(signal.counter, wait.loc, total)
            if total is not None and total > wait.amount
            else None
        )
    want = (
        f"as many signals as must have come, {who}'s among them"
        if signal.does == "add"
        else f"a value that {who}'s signal alone brings"
    )
    return text, f"T.wait({signal.counter}, …) for {want}; or a counter of its own", fix


def _ordering(machine: Machine, found: Race, storage: Storage) -> tuple[str, Fix | None]:
    """What would bring one executor's access behind another's, by how far they are apart; as an edit, a
    meeting."""
    here, there = machine.events.said[found.event][0], machine.events.said[found.other][0]
    if here[0] != there[0]:
        pair = (
            f"T.signal(s[i], dst={here[0]}) by rank {there[0]} behind its access, and T.wait(s[i]) "
            "before this one"
        )
        return pair + '; or T.barrier() in T.Scale("device") between them', fixes.barrier(
            machine, "device", found
        )
    if here[1] != there[1]:
        if storage.scope.startswith("shared"):
            text = (
                'T.barrier() in T.Scale("cta_cluster") between them, or T.signal and T.wait on a '
                "T.alloc_signal"
            )
            return text, fixes.barrier(machine, "cta_cluster", found)
        text = (
            'T.barrier() in T.Scale("grid") between them, or T.signal behind the other and T.wait before '
            "this one"
        )
        return text, fixes.barrier(machine, "grid", found)
    if any(b.scope == "shared.barrier" for b in machine.prepared.buffers):
        return (
            "T.mbarrier_arrive behind the other access and T.mbarrier_wait_parity before this one, of a "
            "barrier of their own",
            None,
        )
    signal = (
        "T.signal behind the other access and T.wait before this one, on a T.alloc_signal that both "
        "executors see"
    )
    met = _meeting_within(here[2], there[2])
    return (f"{met} between the two accesses; or {signal}" if met else signal), None


def _meeting_within(
    this: tuple[tuple[str, int | None], ...], that: tuple[tuple[str, int | None], ...]
) -> str:
    """Where two executors of one block can meet, both of them warps, warpgroups or threads of the block by
    their index; empty for roles, engines and scales inside one another."""
    if any(len(p) != 1 or p[0][1] is None or p[0][0] not in WIDTHS for p in (this, that)):
        return ""
    warps = [
        {(index or 0) * WIDTHS[name] // 32 + k for k in range(-(-WIDTHS[name] // 32))}
        for name, index in (this[-1], that[-1])
    ]
    if warps[0] == warps[1]:
        return "T.sync_warp()"
    return (
        "T.sync_threads() where all threads of the block come to it, else T.sync_threads(1, "
        f"{32 * len(warps[0] | warps[1])})"
    )


def _of(home: tuple[Any, ...]) -> str:
    """`` of rank 1, block 0``."""
    return f" of rank {home[0]}" + (f", block {', '.join(map(str, home[1]))}" if len(home) > 1 else "")


def unwritten(machine: Machine, found: Early) -> Finding:
    """A read of memory that nothing wrote, neither before it nor, unordered, behind it."""
    storage = found.storage
    cells = elements(found.unwritten, storage.cells, (0,) * storage.data.ndim)
    at = describe(storage.name, tuple(slice(0, n) for n in storage.shape), cells)
    text = f"{at} is read, and nothing has written it{owned(storage)}"
    if storage.is_global:
        return Finding(
            "uninitialised",
            text,
            _placed(machine, found.event, at),
            hint="a write of all that is read, in front of this",
        )
    if storage.shadow.looks is not None:
        hint = "T.mbarrier_wait_parity in front of this, for the barrier of the T.tma_copy that fills it"
        return Finding("uninitialised", text, _placed(machine, found.event, at), hint=hint)
    machine = machine.of(int(machine.events.who[found.event]))
    made = next(
        (b.loc for b in machine.prepared.buffers if b.name == storage.name and b.scope == storage.scope), None
    )
    hint, fix = fixes.cleared(storage.name, made)
    return Finding("uninitialised", text, _placed(machine, found.event, at), hint=hint, fix=fix)


def mixed(this: Where, does: tuple[str, int], that: Where, did: tuple[str, int]) -> Finding:
    """Two signals of one counter that nothing orders, and whose order says something: a store and an
    addition, for example. ``does``, ``did``: what they do, and the number."""
    verbs = {
        "add": "adds",
        "set": "stores {}",
        "max": "raises it to {} at least",
        "min": "lowers it to {} at most",
    }
    mine, its = (verbs[op].format(number) for op, number in (does, did))
    to = {"add": f"adds to {this.region}", "set": f"{mine} into {this.region}"}.get(
        does[0], mine.replace("it", this.region, 1)
    )
    text = f"this {to}, and {that.who} {its}, with nothing that orders the two"
    hint = 'additions alone (op="add"), whose order says nothing; or a counter for each sender'
    stores = next((where for where, (op, _) in ((this, does), (that, did)) if op == "set"), None)
    fix = None if stores is None or stores.loc is None else Fix("replace", stores.loc, 'op="add"', 'op="set"')
    return Finding("race", text, this, (that,), hint, fix=fix)


def too_narrow(this: Where, that: Where) -> Finding:
    """Atomic updates of one element by two ranks, one of which is atomic among its own rank's blocks
    alone."""
    text = (
        f"this updates an element of {this.region} that {that.who} updates too, and one of the two is "
        "atomic within its rank alone"
    )
    return Finding(
        "race",
        text,
        this,
        (that,),
        "dst=rank (src=rank of a load) in both, also for the own memory; sums by TMA of one rank at a time",
    )


def disagreement(ex: Executor, site: Site, agreed: dict[str, Any], meeting: Meeting) -> Finding:
    """Who comes to a meeting believes that it is another one than who came first does. The statements do not
    count: the ranks of a collective may meet in several, as those of a barrier may."""
    other, there = meeting.came[0]
    names = [n for n in (*agreed, *meeting.agreed) if agreed.get(n) != meeting.agreed.get(n)]
    name = "collective" if "collective" in names else names[0]
    mine, its = agreed.get(name, "T.barrier"), meeting.agreed.get(name, "T.barrier")
    this, that = ex.where(site), other.where(there)
    if name == "collective":
        text = f"{this.who} comes to {mine} and meets {that.who}, which comes to {its}"
        return Finding("mismatch", text, this, (that,), "the same collectives in the same order")
    text = (
        f"{agreed['collective']}: for {this.who} the {name} is {mine}, and for {that.who}, whom it "
        f"meets, {its}"
    )
    return Finding("mismatch", text, this, (that,), f"one {name} for all who take part in it")


def unfit(ex: Executor, site: Site, agreed: dict[str, Any], count: int) -> Finding | None:
    """A collective of which everyone believes the same, and which does not fit the ``count`` who take
    part."""
    root = agreed.get("root")
    if root is not None and not 0 <= root < count:
        text = (
            f"{agreed['collective']}: there is no participant {root} that could be the root, there are "
            f"{count}"
        )
        return Finding("no-such-rank", text, ex.where(site), hint=f"0 ≤ root < {count}, for example n - 1")
    for name in ("parts", "parts of the source"):
        if agreed.get(name, count) != count:
            whole = agreed["symmetric tensor"] if name == "parts" else "the source"
            text = f"{agreed['collective']}: {count} take part, and {whole} has {agreed[name]} parts"
            return Finding(
                "mismatch",
                text,
                ex.where(site),
                hint=f"a leading axis of {count}, one for each who takes part",
            )
    return None


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
        where = Where(what, ex.waiting.site.loc, *ex.name, launch=ex.machine.launch)
        shown.setdefault((where.loc, where.rank, where.launch, what), where)
    first = order[0]
    machine = first.machine
    assert first.waiting is not None
    hint, fix = "", None
    if cycle:
        counter = first.waiting.counter
        chain = " → ".join(ex.where(first.waiting.site).who for ex in (*cycle, cycle[0]))
        text = f"nobody can go on: {chain} wait for one another"
        hint = "what ends the wait of one of them in front of its own wait"
        if counter is not None and (moved := fixes.turned(machine, counter, first.waiting.site)) is not None:
            hint, fix = moved
    elif first.waiting.meeting is not None:
        meeting = first.waiting.meeting
        gone = _absent(machine, first, meeting)
        text = (
            f"nobody can go on: {meeting.expected} must come to {first.waiting.site.what}{of_ranks(meeting)}"
        )
        text += f", {len(meeting.came)} have come"
        text += (
            f", and {' and '.join(gone[:4])}{' and others' * (len(gone) > 4)} ended without it"
            if gone
            else ""
        )
        hint = (
            f"{first.waiting.site.what} where all of them come to it equally often, outside of branches "
            "and loops that some leave out"
        )
        fix = fixes.outside(machine, first.waiting.site)
    else:
        text = f"nobody can go on: no statement that is still to run ends the wait for {first.waiting.text}"
        counter = first.waiting.counter
        hint = first.waiting.hint or "a count that is reached; or the missing T.signal"
        if counter is not None and counter.value > 0 and first.waiting.cmp in ("ge", "gt"):
            hint = f"T.wait({counter.name}, {counter.value}): more do not come; or the missing T.signal"
            fix = fixes.enough(counter.name, first.waiting.site.loc, counter.value)
        if first.waiting.cmp == "eq" and counter is not None and len(counter.history) > 1:
            hint, fix = fixes.overshoot(machine, counter, first.waiting.site.loc)
    return Finding(
        "deadlock", text, first.where(first.waiting.site), tuple(shown.values())[:8], hint, fix=fix
    )


def polling(machine: Machine, pollers: list[Executor]) -> Finding:
    """Everybody who can run polls in vain: what the first of them looks at, and who else polls or waits."""
    pollers = sorted(pollers, key=lambda ex: ex.number)
    first = pollers[0]
    spots = [_spot(memory, key) for memory, key in machine.polling.seen.get(first.number, {}).values()]
    what = ", ".join(spots[:3]) + (" and more" if len(spots) > 3 else "")
    if not spots:
        text, hint = (
            "this loop goes on for ever: a round of it changes nothing",
            "a condition that the rounds of the loop change",
        )
    else:
        text = f"this loop polls for ever {what}, and nobody is left who could change what it reads"
        hint = "the store that is missing; or T.wait on a T.Signal that whoever writes it signals"
    shown: dict[tuple[Any, ...], Where] = {}
    for ex in pollers[1:]:
        loop = ex.loop or ex.machine.prepared.site
        shown.setdefault((loop.loc, ex.rank.number), ex.where(loop))
    for ex in machine.blocked:
        if ex.waiting is not None and not ex.children:
            site = ex.waiting.site
            shown.setdefault(
                (site.loc, ex.rank.number),
                Where(f"{site.what}, which waits", site.loc, *ex.name, launch=ex.machine.launch),
            )
    return Finding(
        "endless",
        text,
        first.where(first.loop or first.machine.prepared.site),
        tuple(shown.values())[:8],
        hint,
    )


def _spot(memory: Any, key: Any) -> str:
    """``F[0] (memory of rank 1), which is 0``."""
    if not isinstance(memory, Storage):
        return f"{memory.name}{_of(memory.home)}, which is {memory.value}"
    values = np.asarray(memory.data[key])
    is_ = (
        f", which is {numerics.decode(np.atleast_1d(values.reshape(-1)), memory.dtype)[0]}"
        if values.size == 1
        else ""
    )
    return f"{describe(memory.name, key)}{owned(memory)}{is_}"


def of_ranks(meeting: Meeting) -> str:
    """`` of ranks 0, 2`` for a team's meeting."""
    return (
        ""
        if meeting.ranks is None
        else f" of rank{'s' * (len(meeting.ranks) > 1)} {', '.join(map(str, meeting.ranks))}"
    )


def _absent(machine: Machine, ex: Executor, meeting: Meeting) -> list[str]:
    """The blocks that have ended and should have come to a meeting where ``ex`` waits."""
    still = {(other.rank.number, other.block.number) for other in machine.blocked}
    kind, *where = meeting.key if meeting.ranks is None else meeting.key[:-1]
    out = []
    for (rank, number), block in machine.blocks.items():
        if meeting.ranks is not None and rank not in meeting.ranks:
            continue
        called = {
            "cta_cluster": [rank, block.cluster],
            "grid": [rank],
            "device": [],
            "team": [number, *where[1:]],
        }.get(kind) == where
        if called and (rank, number) not in still:
            out.append(Where("", None, rank, block.shown).who)
    return out


def _waits_for(machine: Machine, ex: Executor) -> str:
    waiting = ex.waiting
    assert waiting is not None
    if waiting.meeting is not None:
        of = of_ranks(waiting.meeting)
        return (
            f"for {waiting.meeting.expected} executors at {waiting.site.what}{of}; "
            f"{len(waiting.meeting.came)} have come"
        )
    return f"for {waiting.text}"


def _cycle(machine: Machine, waiting: list[Executor]) -> list[Executor] | None:
    """A cycle in who could still end whose wait; None where there is none."""
    follows: dict[int, list[Executor]] = {}
    for ex in waiting:
        able = [
            (rank, other.number, other)
            for other in waiting
            if other is not ex and (rank := _could_end(machine, other, ex)) < NEVER
        ]
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
    """Whether a statement that ``other`` may still run could end the wait of ``ex``.
    Surely where, by what its variables hold now, it names that very counter."""
    mine, theirs = ex.waiting, other.waiting
    assert mine is not None and theirs is not None
    if mine.meeting is not None:
        near = other.rank is ex.rank or mine.meeting.key[0] not in ("grid", "cta_cluster")
        near = near and (other.block.cluster == ex.block.cluster or mine.meeting.key[0] != "cta_cluster")
        near = near and (mine.meeting.ranks is None or other.rank.number in mine.meeting.ranks)
        return SURELY if near and all(came is not other for came, _ in mine.meeting.came) else NEVER
    if mine.ring is not None:
        sites = other.machine.prepared.tokens.get(mine.ring, ()) if other.block is ex.block else ()
        return SURELY if any(_may_run(machine, other, site) for site in sites) else NEVER
    if mine.counter is None:
        return NEVER
    best = NEVER
    for sending in other.machine.prepared.signalled.get(mine.counter.name.split("[")[0], ()):
        if _may_run(machine, other, sending.site):
            best = min(
                best, SURELY if sending.target(other) == (mine.counter.home, mine.counter.name) else PERHAPS
            )
    return best


def _may_run(machine: Machine, other: Executor, site: Site) -> bool:
    """Whether a blocked executor may still come to a statement: one of its role, behind where it waits or in
    a loop around that."""
    assert other.waiting is not None
    made, here = other.machine.prepared, other.waiting.site
    role = made.role_of.get(site.number)
    if role is not None and (role, None) not in other.path:
        return False
    return site.number > here.number or bool(
        set(made.loops_of.get(here.number, ())) & set(made.loops_of.get(site.number, ()))
    )
