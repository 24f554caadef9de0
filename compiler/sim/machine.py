"""The machine of a launch: ranks, blocks and executors as coroutines, counters and barriers with vector
clocks, the main loop."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tilescale.compiler.findings import Finding, Report, Where
from tilescale.compiler.ir.contexts import Site
from tilescale.compiler.ir.scales import WIDTHS
from tilescale.compiler.sim import arrivals, awaited, diagnose, flights, mbarriers, numerics, packets, rings
from tilescale.compiler.sim.counters import Counter, Counters
from tilescale.compiler.sim.memory import Events, Shadow, Storage
from tilescale.compiler.sim.observe import Observer
from tilescale.compiler.sim.polling import Polling
from tilescale.compiler.sim.schedule import Schedule

if TYPE_CHECKING:
    from tilescale.compiler.sim.prepare import Prepared

_SYMBOL = {"ge": "≥", "eq": "=", "gt": ">", "ne": "≠", "le": "≤", "lt": "<"}


@dataclass
class Waiting:
    """What a blocked executor waits for. ``counter``, ``meeting`` or ``ring`` (its number, and the token):
    that which wakes it, the counter when ``cmp`` holds. ``hint``: what to write where nothing does, of a
    barrier with phases."""

    site: Site
    text: str
    counter: Counter | None = None
    meeting: Meeting | None = None
    cmp: str = ""
    ring: tuple[int, str] | None = None
    hint: str = ""


@dataclass
class Meeting:
    """A barrier: how many have come this time, and their joined clocks. ``ranks``: of a team inside the
    kernel, which is then the last part of the key, so that teams that overlap meet apart; None: everyone that
    the scale takes in."""

    key: tuple[Any, ...]
    expected: int
    ranks: tuple[int, ...] | None = None
    came: list[tuple[Executor, Site]] = field(default_factory=list)
    agreed: dict[str, Any] = field(default_factory=dict)  # what who came first believes that it is
    clock: Any = None
    round: int = 0
    gone: set[int] = field(default_factory=set)  # executors that have come, by number, and do not wait

    def all_came(self, last: Executor) -> None:
        """The next round begins; who waits, and who came last to wait, knows what all did."""
        joined, came, gone = self.clock, self.came, self.gone
        self.came, self.clock, self.gone, self.round = [], None, set(), self.round + 1
        for other, _ in came:
            if other.number not in gone:
                other.acquire(joined)
                if other is not last:
                    other.machine.wake(other)


class Stranger(int):
    """A rank that its program named inside a team and that is none of it; no rank of the launch's either."""

    named: int
    count: int

    @staticmethod
    def of(named: int, count: int) -> Stranger:
        made = Stranger(-1)
        made.named, made.count = named, count
        return made


class Block:
    """A block of a launch on one rank, with its shared memory; tiles appear when somebody first names
    them."""

    def __init__(self, machine: Machine, rank: Rank, number: int, index: tuple[int, int, int]):
        self.machine, self.rank, self.number, self.index = machine, rank, number, index
        dims, grid = machine.prepared.cluster, machine.grid
        self.cluster = tuple(b // d for b, d in zip(index, dims, strict=True))
        x, y, z = (b % d for b, d in zip(index, dims, strict=True))
        self.cluster_index = x + dims[0] * (y + dims[1] * z)
        self.shown = index[: len(machine.prepared.launch.grid)]
        self.linear = index[0] + grid[0] * (index[1] + grid[1] * index[2])
        self.tiles: dict[tuple[int, tuple[int, ...]], Any] = {}
        self.owners: dict[tuple[int, tuple[int, ...]], Executor] = {}
        self.rings: dict[tuple[int, tuple[int, ...]], Any] = {}  # of whom, see rings.py
        self.mbarriers: dict[tuple[int, int], Any] = {}  # see mbarriers.py
        self.flights: dict[tuple[int, str], Any] = {}  # (executor, kind) → its queue, see flights.py
        self.stores: dict[int, Any] = {}  # executor → the author's stores by TMA, see mbarriers.py

    def tile(self, slot: int, place: tuple[int, ...] = ()) -> Any:
        """This block's shared tile (or counters) of a buffer; of one that is allocated below the block, that
        of the executor ``place``."""
        made = self.tiles.get((slot, place))
        if made is None:
            made = self.machine.allocate(
                slot, (self.rank.number, self.shown), lambda base: self.tile(base, place), place
            )
            self.tiles[slot, place] = made
        return made

    def close(self) -> None:
        """See `Machine.close`."""
        for held in (self.tiles, self.owners, self.rings, self.mbarriers, self.flights, self.stores):
            held.clear()

    def own_tile(self, slot: int, ex: Executor, depth: int) -> Any:
        """`tile` as ``ex`` allocates it: a new one where another executor of its place did before, in an
        earlier round of a loop around their T.Scale, whose values are no value of this one's. What a peer put
        there before anyone allocated it stays."""
        at = slot, ex.place(depth)
        if depth and self.owners.setdefault(at, ex) is not ex:
            self.tiles.pop(at, None)
            self.owners[at] = ex
        made = self.tile(*at)
        if (ring := self.machine.prepared.buffers[slot].ring) is not None:
            made.ring = rings.of(ex, ring)
        return made


class Rank:
    """One rank: its tensors by buffer, and the views of them through which others have reached it."""

    def __init__(self, number: int, memory: dict[int, Any]):
        self.number, self.memory = number, memory
        self.views: dict[int, Any] = {}


class Executor:
    """A block, or a warp, warpgroup or thread of one: a coroutine with its variables and its vector clock."""

    def __init__(
        self,
        machine: Machine,
        number: int,
        block: Block,
        path: tuple[tuple[str, int | None], ...] = (),
        clock: Any = None,
    ):
        """``clock``: what it knows as it begins, an array that nobody changes; nothing without it."""
        self.machine, self.number, self.block, self.rank = machine, number, block, block.rank
        self.path = path
        # A block's first executor, and the own place among those of the same scales.
        self.root, self.linear = (
            number,
            0,
        )
        self.name = (block.rank.number, block.shown, path)
        self.v: list[Any] = []
        self.mem: list[Any] = []
        self.scales: dict[str, tuple[int, int]] = {}
        self.lanes: tuple[int, ...] | None = None
        self.lane_index: tuple[Any, ...] = ()
        self.mask: Any = None
        self.touched: dict[int, Any] = {}
        #: its vector clock; while it ``shares`` that of others, its own place there is behind ``now``
        self.known, self.shares = np.zeros(machine.clocks, np.int64) if clock is None else clock, True
        self.now = int(self.known[number]) + 1
        self.steps: Any = None
        self.intent = "run"
        self.waiting: Waiting | None = None
        self.loop: Site | None = None  # the while loop that it came to last
        self.awaits: tuple[Counter, str, int] | None = (
            None  # the condition of the wait that it stands in front of
        )
        #: the packets that it waits for: their box, the launch's number, and which
        self.takes: tuple[packets.Packets, int, Any] | None = None
        self.pulls: int | None = None  # the peer whose memory its next step reads
        self.polled: dict[Any, Any] | None = (
            None  # what the round of its loop has read, where that is watched
        )
        self.outbox: dict[
            int, list[Callable[[], None]]
        ] = {}  # by peer: what it wrote there and has not landed, oldest first
        self.parent: Executor | None = None
        self.children = 0

    def place(self, depth: int) -> tuple[int, ...]:
        """Its indices in the first ``depth`` scales below the block: whose a tile is that is allocated
        there."""
        return (
            tuple([index for name, index in self.path if name in WIDTHS and index is not None][:depth])
            if depth
            else ()
        )

    # -- clocks
    # ---------------------------------------------------------------------------------------------------
    @property
    def vc(self) -> Any:
        """Its vector clock, an array of its own. Most threads of a kernel learn nothing, and need none: a
        launch of six thousand executors would spend a fifth of its time on copies."""
        if self.shares:
            self.known, self.shares = self.known.copy(), False
            self.known[self.number] = self.now
        return self.known

    def release(self) -> Any:
        """What others acquire from here; later steps of this executor are not in it."""
        clock = self.known.copy()
        clock[self.number] = self.now
        self.now += 1
        if not self.shares:
            self.known[self.number] = self.now
        return clock

    def acquire(self, clock: Any) -> None:
        np.maximum(self.vc, clock, out=self.known)

    # -- remote writes
    # --------------------------------------------------------------------------------------------
    def post(self, peer: int, land: Callable[[], None]) -> None:
        """A remote write, on its way to ``peer`` until the schedule delivers it or something orders it. Those
        to one peer land in their order, those to different peers in any."""
        self.outbox.setdefault(peer, []).append(land)
        self.machine.deliveries[self.number, peer] = self
        self.machine.polling.changed()
        for observer in self.machine.observers:
            observer.posted(self, peer)

    def deliver(self, peer: int) -> None:
        """The oldest write on its way to ``peer`` lands."""
        queue = self.outbox[peer]
        land = queue.pop(0)
        if not queue:
            del self.outbox[peer], self.machine.deliveries[self.number, peer]
        self.machine.polling.changed()
        for observer in self.machine.observers:
            observer.landed(self, peer)
        land()

    def flush(self, peer: int | None = None) -> None:
        """What was posted (to one peer) lands: all of it before this executor releases, whomever it releases
        to, since others may pass the news on; that of a peer before this executor looks into its memory
        itself."""
        for one in list(self.outbox) if peer is None else [peer] if peer in self.outbox else []:
            while one in self.outbox:
                self.deliver(one)

    def where(self, site: Site, region: str = "") -> Where:
        return Where(site.what, site.loc, *self.name, region, self.machine.launch)


class Machine:
    """A launch of a prepared program on ``len(memories)`` ranks.

    Args:
        memories: for each rank, buffer slot → Storage or Counters of its parameters.
        schedule: see schedule.py. limit: choices after which a launch counts as endless. observers: are told
            what happens.
    """

    def __init__(
        self, prepared: Prepared, grid: tuple[int, int, int], schedule: Schedule, events: Events, limit: int,
        observers: tuple[Observer, ...] = (),
    ):  # fmt: skip
        self.prepared, self.grid, self.schedule, self.events, self.limit = (
            prepared,
            grid,
            schedule,
            events,
            limit,
        )
        self.late, self.observers = schedule.late, observers
        self.polling = Polling(bool(observers))
        self.report = Report()
        #: of elements of symmetric memory, by executor: its last atomic update, see atomics.py
        self.updates: dict[tuple[int, int], dict[int, tuple[int, int, bool, Where]]] = {}
        self.printed: list[str] = []
        self.printers: list[int] = []  # the rank of each line
        self.meetings: dict[tuple[Any, ...], Meeting] = {}
        #: of clusters, by rank and cluster
        self.arrivals: dict[tuple[Any, ...], arrivals.Arrivals] = {}
        #: values that lanes brought, and who came
        self.exchanges: dict[tuple[int, ...], tuple[dict[int, Any], list[Executor]]] = {}
        self.deliveries: dict[
            tuple[int, int], Executor
        ] = {}  # (executor, peer) → who has writes on their way there
        self.released: dict[
            tuple[int, int], Any
        ] = {}  # (storage, element) → what its atomic updates released
        self.signals: dict[int, list[diagnose.Note]] = {}  # executor → its signals
        self.waits: dict[int, list[diagnose.Note]] = {}  # executor → its waits that are over
        self.phases: dict[
            int, list[mbarriers.Phase]
        ] = {}  # executor → its arrivals at barriers with phases, and its waits that are over
        self.met: dict[int, set[Any]] = {}  # executor → where it has met others
        self.races: dict[tuple[Any, ...], diagnose.Race] = {}  # two statements → their first race
        self.early: dict[
            tuple[Any, ...], diagnose.Early
        ] = {}  # statement of an executor → what it read that nothing had written
        self.ready: list[Executor] = []
        self.blocked: list[Executor] = []
        self.ranks: list[Rank] = []
        self.blocks: dict[tuple[int, int], Block] = {}
        self.final: dict[int, Any] = {}  # rank → what is behind the end of its blocks
        self.running: dict[int, int] = {}  # rank → how many of its blocks have not ended
        self.scalars: list[dict[int, Any]] = []
        self.clocks = 0
        self.first = 1  # the number of its first executor
        self.launch: int | None = None  # which of a window of launches it is, see overlap.py
        self.launches = [self]  # those of the window, in stream order
        self.hosts: dict[
            int, Callable[[Executor], None]
        ] = {}  # rank → what its host does in front of this launch

    def behind(self, other: Machine) -> None:
        """The next launch of the window that ``other`` belongs to: one loop runs them all, over the same
        counters and memory. Meetings are a launch's own, as are its blocks."""
        for name in (
            "report",
            "polling",
            "updates",
            "printed",
            "printers",
            "deliveries",
            "released",
            "signals",
            "waits",
            "met",
            "races",
            "early",
            "ready",
            "blocked",
            "clocks",
            "launches",
        ):
            setattr(self, name, getattr(other, name))
        self.launches.append(self)

    def of(self, number: int) -> Machine:
        """The launch of the window that an executor belongs to."""
        return next(m for m in reversed(self.launches) if m.first <= number)

    @property
    def every(self) -> int:
        """How many executors there are on all ranks, hosts aside, whose numbers come behind theirs."""
        return len(self.ranks) * self.grid[0] * self.grid[1] * self.grid[2] * self.prepared.executors

    def is_host(self, number: int) -> bool:
        made = self.of(number)
        return made.launch is not None and number >= made.first + made.every

    def place(self, scalars: list[dict[int, Any]], memories: list[dict[int, Any]]) -> None:
        """What the launch is given. ``scalars``: for each rank, variable slot → value."""
        self.ranks, self.scalars = [Rank(r, m) for r, m in enumerate(memories)], scalars

    def start(
        self, scalars: list[dict[int, Any]], memories: list[dict[int, Any]], only: int | None = None
    ) -> None:
        """Puts every block of every rank (of the rank ``only``) at its beginning."""
        self.place(scalars, memories)
        for rank in self.ranks if only is None else [self.ranks[only]]:
            self.begin(rank, np.zeros(self.clocks, np.int64))

    def begin(self, rank: Rank, clock: Any) -> None:
        """A rank's blocks begin, behind what ``clock`` knows: the end of its launch before this one."""
        gx, gy, gz = self.grid
        self.polling.changed()
        for memory in rank.memory.values():
            if isinstance(memory, packets.Packets) and (gx * gy * gz or not self.prepared.launch.exchanges):
                memory.begin(self)
        if (does := self.hosts.get(rank.number)) is not None:
            host = Executor(self, self.first + self.every + rank.number, Block(self, rank, -1, (0, 0, 0)))
            host.name = (rank.number, (), (("host", None),))
            host.acquire(clock)
            does(host)
            clock = host.release()
        self.running[rank.number] = gx * gy * gz
        if not self.running[rank.number]:
            self._over(rank, clock)
        for n in range(gx * gy * gz):
            block = Block(self, rank, n, (n % gx, n // gx % gy, n // (gx * gy)))
            self.blocks[rank.number, n] = block
            number = self.first + (rank.number * gx * gy * gz + n) * self.prepared.executors
            ex = Executor(self, number, block)
            ex.acquire(clock)
            ex.v = [None] * self.prepared.variables
            ex.mem = [None] * len(self.prepared.buffers)
            for slot, value in self.scalars[rank.number].items():
                ex.v[slot] = value
            for slot, memory in rank.memory.items():
                ex.mem[slot] = memory
            ex.steps = self._whole(ex, self.prepared.body)
            self.ready.append(ex)

    def _ended(self, ex: Executor) -> None:
        """A block has ended; with its rank's last one the rank's next launch begins. No other rank is
        awaited."""
        mine = self.final.get(ex.rank.number)
        self.final[ex.rank.number] = ex.vc if mine is None else np.maximum(mine, ex.vc)
        self.running[ex.rank.number] -= 1
        if not self.running[ex.rank.number]:
            self._over(ex.rank, self.final[ex.rank.number])

    def _over(self, rank: Rank, clock: Any) -> None:
        for memory in rank.memory.values():
            if isinstance(memory, packets.Packets):
                memory.end(self)
        at = next(k for k, m in enumerate(self.launches) if m is self) + 1
        if at < len(self.launches):
            following = self.launches[at]
            following.begin(following.ranks[rank.number], clock)

    def _whole(self, ex: Executor, body: Any) -> Generator[str, None, None]:
        """An executor from its first statement to its end."""
        if body.yields:
            yield from body.run(ex)
        else:
            body.run(ex)
        if ex.outbox:
            yield "end"
        ex.flush()

    def clustered(self, ex: Executor, index: int) -> Block:
        """Block ``index`` of the executor's cluster."""
        dims = self.prepared.cluster
        offsets = (index % dims[0], index // dims[0] % dims[1], index // (dims[0] * dims[1]))
        x, y, z = (c * d + o for c, d, o in zip(ex.block.cluster, dims, offsets, strict=True))
        return self.blocks[ex.rank.number, x + self.grid[0] * (y + self.grid[1] * z)]

    def allocate(
        self, slot: int, owner: tuple[Any, ...], base: Callable[[int], Any], place: tuple[int, ...] = ()
    ) -> Any:
        """New memory for a buffer of the kernel; ``base`` gives the memory of the buffer that this one is a
        view of. ``place``: which of the block's executors it belongs to."""
        info = self.prepared.buffers[slot]
        if info.base is not None:
            return self.view(slot, base(info.base), info.shape)
        if info.scope == "shared.signal":
            return Counters(info.name, np.zeros(info.shape, np.int64), self.clocks, owner, slot)
        data = np.zeros(info.shape, numerics.storage(info.dtype))
        cells, key = data.size * info.cells, (*owner, slot, *place)
        shadow = Shadow(cells, self.events, tracked=info.tracked, written=False, key=key, viewed=info.viewed)
        shadow.looks = [] if info.filled else None
        return Storage(info.name, info.dtype, data, shadow, scope=info.scope, owner=owner)

    def view(self, slot: int, old: Any, shape: tuple[int, ...]) -> Any:
        """The memory of another buffer under this one's dtype and a shape."""
        info = self.prepared.buffers[slot]
        data = old.data.view(np.uint8).reshape(-1).view(numerics.storage(info.dtype)).reshape(shape)
        return Storage(info.name, info.dtype, data, old.shadow, scope=info.scope, owner=old.owner)

    def of_rank(self, number: int, slot: int) -> Any:
        """The memory of rank ``number`` that a buffer names, a tensor or a view of one."""
        rank = self.ranks[number]
        if slot in rank.memory:
            return rank.memory[slot]
        if slot not in rank.views:
            rank.views[slot] = self.allocate(slot, (number,), lambda base: self.of_rank(number, base))
        return rank.views[slot]

    # -- the main loop
    # --------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Until everyone has ended or nobody can go on; then the report is complete."""
        self._loop()
        mixed = [{f.loc, *(w.loc for w in f.others)} for f in self.report.findings if f.kind == "mismatch"]
        for race in self.races.values():
            made = diagnose.race(self, race)
            if not any(
                {made.loc, made.others[0].loc} <= places for places in mixed
            ):  # else no more than what follows from meeting there
                self.report.add(made)
        for early in self.early.values():
            if early.unwritten.any():
                self.report.add(diagnose.unwritten(self, early))

    def _loop(self) -> None:
        left = self.limit
        while self.ready:
            ex = self.schedule.pick(self.ready, self.deliveries)
            left -= 1
            if ex is None:
                return
            if isinstance(ex, tuple):
                self.deliveries[ex].deliver(ex[1])
                continue
            self.ready.remove(ex)
            if left < 0:
                text = f"the launch has not ended after {self.limit} steps"
                hint = "a condition that the rounds of the loop change; or more steps, limit="
                self.report.add(Finding("endless", text, ex.where(ex.loop or self.prepared.site), hint=hint))
                return
            try:
                ex.intent = next(ex.steps)
            except StopIteration:
                self.polling.changed()
                for observer in self.observers:
                    observer.ended(ex)
                if ex.parent is not None:
                    self._joined(ex, ex.parent)
                else:
                    ex.machine._ended(ex)
                continue
            if ex.waiting is None:
                self.ready.append(ex)
            else:
                self.polling.changed()
                self.blocked.append(ex)
            if len(self.polling.idle) == len(self.ready) > 0 and not self.deliveries:
                self.report.add(diagnose.polling(self, self.ready))
                return
        if self.blocked:
            self.report.add(diagnose.deadlock(self))
        else:
            for made in self.launches:
                rings.unread(made)
                flights.left(made)
                mbarriers.left(made)
                packets.left(made)
                awaited.judge(made)

    def close(self) -> None:
        """Lets go of executors, blocks and memory, which refer to one another and to this. Else a run's
        arrays are there until Python looks for cycles. It does so when so many objects have been made, and
        these are few and large. What is left says who wrote what."""
        for ex in (*self.ready, *self.blocked):
            ex.steps, ex.mem, ex.waiting, ex.awaits, ex.takes = None, [], None, None, None
        for block in self.blocks.values():
            block.close()
        for rank in self.ranks:
            rank.memory, rank.views = {}, {}
        self.schedule, self.observers, self.launches = Schedule(), (), []
        self.polling = Polling(False)
        for held in (self.blocks, self.meetings, self.arrivals, self.exchanges, self.deliveries):
            held.clear()
        for said in (self.races, self.early, self.hosts):
            said.clear()
        self.ready, self.blocked = [], []

    def wake(self, ex: Executor) -> None:
        self.blocked.remove(ex)
        ex.waiting, ex.intent = None, "resume"
        self.polling.changed()
        self.ready.append(ex)

    def wait(
        self, ex: Executor, counter: Counter, cmp: str, value: int, site: Site, reach: str
    ) -> Generator[str, None, None]:
        """Until ``counter cmp value``; an acquire at the scale ``reach``."""
        ex.awaits = (counter, cmp, value)
        yield "wait"  # what holds now need not hold when the wait looks
        for observer in self.observers:
            observer.waits(ex, site, counter)
        while not counter.observe(ex, cmp, value, reach):
            counter.waiters.append(ex)
            text = f"{counter.name} {_SYMBOL[cmp]} {value}, and it is {counter.value}"
            ex.waiting = Waiting(site, text, counter=counter, cmp=cmp)
            yield "wait"
        ex.awaits = None
        for observer in self.observers:
            observer.observed(ex, site, counter, cmp, value)
        self._awaited(ex, counter, cmp, value, site, reach)

    def test(self, ex: Executor, counter: Counter, cmp: str, value: int, site: Site, reach: str) -> bool:
        """Whether ``counter cmp value`` now; if so an acquire at the scale ``reach``."""
        for observer in self.observers:
            observer.peeked(ex, counter)
        if ex.polled is not None:
            ex.polled[counter.key] = counter, None
        if not counter.observe(ex, cmp, value, reach):
            return False
        self._awaited(ex, counter, cmp, value, site, reach)
        return True

    def _awaited(self, ex: Executor, counter: Counter, cmp: str, value: int, site: Site, reach: str) -> None:
        """Notes, for hints, what an executor acquired by."""
        note = self.note(counter, site, f"{counter.name} {_SYMBOL[cmp]} {value}", reach, value, cmp)
        self.waits.setdefault(ex.number, []).append(note)

    def note(
        self, counter: Counter, site: Site, text: str = "", reach: str = "", amount: int = 0, does: str = ""
    ) -> diagnose.Note:
        return diagnose.Note(
            len(self.events.said), counter.name, counter.home, site.loc, text, reach, amount, does
        )

    def meet(
        self, ex: Executor, key: tuple[Any, ...], each: int, site: Site, agreed: dict[str, Any] | None = None,
        ranks: tuple[int, ...] | None = None,
    ) -> Generator[str, None, None]:  # fmt: skip
        """Until ``each`` executors (of each of ``ranks``, where these are given) have come; everyone acquires
        what all released. ``agreed``: of a collective, what all who meet must have alike, by name."""
        yield "meet"
        ex.flush()
        key, expected = (key, each) if ranks is None else ((*key, ranks), each * len(ranks))
        if key not in self.meetings:
            self.meetings[key] = Meeting(key, expected, ranks)
        meeting = self.meetings[key]
        agreed = agreed or {}
        if meeting.came and agreed != meeting.agreed:
            self.report.add(diagnose.disagreement(ex, site, agreed, meeting))
        elif (
            agreed
            and (
                made := diagnose.unfit(ex, site, agreed, expected if key[0] == "team" else self.cluster_size)
            )
            is not None
        ):
            self.report.add(made)
        if not meeting.came:
            meeting.agreed = agreed
        clock = ex.release()
        meeting.clock = clock if meeting.clock is None else np.maximum(meeting.clock, clock)
        meeting.came.append((ex, site))
        self.met.setdefault(ex.number, set()).add((key[0] if ranks is None else "some ranks", site.loc))
        for observer in self.observers:
            observer.came(ex, site, meeting)
        if len(meeting.came) == expected:
            meeting.all_came(ex)
            yield "resume"  # who came last goes on like all others
            return
        mine = meeting.round
        while meeting.round == mine:
            ex.waiting = Waiting(
                site, f"{expected} at {site.what}{diagnose.of_ranks(meeting)}", meeting=meeting
            )
            yield "wait"

    def arrive(
        self, ex: Executor, key: tuple[Any, ...], expected: int, site: Site
    ) -> Generator[str, None, None]:
        """Comes to where others `meet`, and goes on: it releases, and acquires nothing."""
        yield "meet"
        ex.flush()
        meeting = self.meetings.setdefault(key, Meeting(key, expected))
        clock = ex.release()
        meeting.clock = clock if meeting.clock is None else np.maximum(meeting.clock, clock)
        meeting.came.append((ex, site))
        meeting.gone.add(ex.number)
        for observer in self.observers:
            observer.came(ex, site, meeting)
        if len(meeting.came) == expected:
            meeting.all_came(ex)

    def exchange(
        self, ex: Executor, warp: int, lane: int, lanes: int, value: Any, site: Site
    ) -> Generator[str, None, Any]:
        """The values that the lanes of a warp brought to the statement ``site``. It orders nothing else, so
        no clock is joined. No lane can bring its next value before all have come again, and so none is lost
        to who is late."""
        yield "meet"
        key = (ex.rank.number, ex.block.number, warp, site.number)
        brought, came = self.exchanges.setdefault(key, ({}, []))
        brought[lane] = value
        came.append(ex)
        if len(came) == lanes:
            del self.exchanges[key]
            for other in came[:-1]:
                self.wake(other)
            yield "resume"
        while len(came) < lanes:
            ex.waiting = Waiting(site, f"{lanes - len(came)} lanes of warp {warp} at {site.what}")
            yield "wait"
        return brought

    def fork(
        self, ex: Executor, parts: list[tuple[tuple[str, int | None], Any]], first: int, site: Site
    ) -> Generator[str, None, None]:
        """Executors below this one, concurrently: for each its scale (or role) and index, and what it runs.
        Returns when all have ended. ``first``: where the numbers of executors of these scales begin within a
        block."""
        count = len(parts)
        if ex.outbox:
            yield "fork"
        ex.flush()  # the children's accesses come behind
        self.polling.changed()
        clock = ex.release()
        for index, (label, body) in enumerate(parts):
            linear = ex.linear * count + index
            child = Executor(self, ex.root + first + linear, ex.block, (*ex.path, label), clock)
            child.root, child.linear = ex.root, linear
            child.v, child.mem = list(ex.v), list(ex.mem)
            child.scales = {**ex.scales, label[0]: (index, count)}
            child.steps, child.parent = self._whole(child, body), ex
            for observer in self.observers:
                observer.forked(ex, child)
            self.ready.append(child)
        ex.children = count
        while ex.children:
            ex.waiting = Waiting(site, f"the end of {ex.children} executors at {site.what}")
            yield "wait"

    def _joined(self, child: Executor, parent: Executor) -> None:
        if child.shares:  # it has learned nothing since its parent began it
            parent.vc[child.number] = child.now
        else:
            parent.acquire(child.known)
        parent.children -= 1
        if not parent.children:
            self.wake(parent)

    @property
    def cluster_size(self) -> int:
        """Blocks of a cluster."""
        x, y, z = self.prepared.cluster
        return x * y * z

    def barrier(
        self,
        ex: Executor,
        reach: str,
        each: int,
        site: Site,
        agreed: dict[str, Any] | None = None,
        ranks: tuple[int, ...] | None = None,
    ) -> Generator[str, None, None]:
        """T.barrier (or a meeting of a collective) at the scale ``reach``, which ``each`` executors of a
        block call; ``ranks``: those of the open team."""
        blocks = self.grid[0] * self.grid[1] * self.grid[2]
        if reach == "cta_cluster":
            yield from self.meet(
                ex, (reach, ex.rank.number, ex.block.cluster), each * self.cluster_size, site, agreed
            )
        elif reach == "grid":
            yield from self.meet(ex, (reach, ex.rank.number), each * blocks, site)
        elif reach == "device":
            yield from self.meet(
                ex, (reach,), each * blocks * (1 if ranks else len(self.ranks)), site, ranks=ranks
            )
        # an executor's own threads act as one: their program order is enough

    def show(self, ex: Executor, text: str) -> None:
        """What T.print shows, see printing.py."""
        self.polling.changed()
        self.printers.append(ex.rank.number)
        self.printed.append(text)

    # -- findings
    # -------------------------------------------------------------------------------------------------
    def raced(self, storage: Storage, event: int, ids: Any, bad: Any, other: str) -> None:
        """The access ``event`` collides with the events ``ids`` where ``bad`` holds, which did ``other``.
        Told when the launch is over: what comes behind the two says what orders them."""
        said = self.events.said
        name, site, mode, key = said[event]
        for there in np.unique(ids[bad]).tolist():
            their_site = said[there][1]
            early = (
                self.early.get((int(self.events.who[there]), their_site.number, id(storage.shadow)))
                if other != "write"
                else None
            )
            where = bad & (ids == there)
            too_early = early is not None and bool(early.take(storage, key, where))
            pair = (id(storage.shadow), site, mode, their_site, other, too_early)
            first, second = (there, event) if too_early else (event, there)
            self.races.setdefault(pair, diagnose.Race(storage, first, second, where, too_early))

    def read_early(self, ex: Executor, storage: Storage, site: Site, event: int, unwritten: Any) -> None:
        """The read ``event`` finds elements that nothing has written. A write that it should have awaited may
        still come."""
        key = (ex.number, site.number, id(storage.shadow))
        if key not in self.early:
            self.early[key] = diagnose.Early(storage, event, np.zeros(storage.cells, bool))
        self.early[key].unwritten[self.events.said[event][3]] |= unwritten

    def report_outside(
        self, ex: Executor, name: str, shape: tuple[int, ...], site: Site, region: str, signal: bool = False
    ) -> None:
        text = f"{region} lies outside {name}, whose shape is {shape}"
        hint = f"a smaller region, a condition around it, or a larger {name}"
        if signal:
            counts = ", ".join(f"0 ≤ index < {n}" for n in shape)
            hint = f"a counter that is there, {counts}; or more of them where {name} is declared"
        self.report.add(Finding("out-of-bounds", text, ex.where(site, region), hint=hint))

    def reaches(self, ex: Executor, owner: int, reach: str, site: Site) -> bool:
        """Whether there is a rank (a block of the cluster) ``owner``; a finding where not."""
        dims = self.prepared.cluster
        count = len(self.ranks) if reach == "device" else dims[0] * dims[1] * dims[2]
        if 0 <= owner < count:
            return True
        if isinstance(owner, Stranger):
            text = f"there is no rank {owner.named}: the team has {owner.count}"
            hint = f"0 ≤ rank < {owner.count}, for example (rank + 1) % n"
        elif reach == "device":
            text, hint = (
                f"there is no rank {owner}: there are {count}",
                f"0 ≤ rank < {count}, for example (rank + 1) % n",
            )
        else:
            text, hint = (
                f"the cluster has no block {owner}: it has {count}",
                f"an index of a block with 0 ≤ index < {count}",
            )
        self.report.add(Finding("no-such-rank", text, ex.where(site), hint=hint))
        return False
