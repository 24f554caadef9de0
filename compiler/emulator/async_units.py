"""What runs beside a block's threads on Hopper, for `machine`: barriers with phases, tensor copies, products
of warpgroups; and a block's roles, which take turns.

A role is a function in a thread of its own, of which one runs at a time; it gives the turn away at every
operation on a barrier. Who comes next is drawn, and copies arrive one by one, in any order: with an odd seed
at any time, with an even one only when nobody else can go on. Until a copy has arrived its destination holds
garbage. Products read their operands when they are issued and again when they are awaited, and must find the
same; until then their accumulators hold NaN. What threads wrote to shared memory they read only behind a
proxy fence of the writer and a meeting with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilescale.compiler.emulator import isa
from tilescale.compiler.emulator.copies import Copies, EmulationError, overlap
from tilescale.compiler.emulator.interleaving import Interleaving
from tilescale.compiler.emulator.maps import Row, TensorMap
from tilescale.compiler.emulator.memory import spread
from tilescale.compiler.emulator.products import SWIZZLE_OF, Held, Product, accumulates, factors, in_memory
from tilescale.compiler.ir.scales import WARP, WARPGROUP
from tilescale.compiler.layout.instructions import wgmma_a, wgmma_accumulator
from tilescale.compiler.ops.gemm_sp import expanded
from tilescale.compiler.sim import numerics
from tilescale.errors import InternalError

#: what an accumulator holds while products are under way
UNKNOWN = {"float32": np.nan, "int32": -0x5EED5EED}


@dataclass
class Barrier:
    """An mbarrier: arrivals and bytes that the current phase still expects. ``owner`` initialised it, at the
    moment ``then``. fenced: the asynchronous proxy knows. ``coming``, ``over``: what threads have released in
    it, and in the last one that ended, where that is looked at (`Clocks`)."""

    count: int
    pending: int
    owner: int
    then: Any
    fenced: bool = False
    bytes: int = 0
    phases: int = 0
    coming: Any = None
    over: Any = None
    #: the same of arrivals that release at the scope of the cluster, which a wait at that scope acquires
    coming_far: Any = None
    over_far: Any = None
    #: the same of what several ranks' blocks know (`ranks`): of all phases that ended
    told: Any = None
    heard: Any = None

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phases += 1
            self.pending = self.count
            self.over, self.coming = self.coming, None
            self.over_far, self.coming_far = self.coming_far, None
            self.heard = self.told

    def arrive(self, count: int = 1) -> None:
        self.pending -= count
        if self.pending < 0:
            raise EmulationError("more arrivals than a phase expects")
        self.settle()

    def tell(self, clock: Any) -> None:
        if clock is not None:
            self.told = clock if self.told is None else np.maximum(self.told, clock)

    def release(self, handed: Any) -> None:
        if handed is not None:
            self.coming = handed if self.coming is None else np.maximum(self.coming, handed)

    def release_far(self, handed: Any) -> None:
        self.coming_far = handed if self.coming_far is None else np.maximum(self.coming_far, handed)


@dataclass
class Load:
    """A copy under way: its bytes and where each goes. ``own``: it was issued by the block that it goes
    to."""

    units: Any
    own: bool
    handed: Any
    barrier: Barrier
    cells: Any
    data: Any
    clock: Any = None

    def arrive(self) -> None:
        """A copy's bytes are there. Those that another block sent may come before this block has announced
        them, though not once its phase expects nothing else."""
        self.units.arena.data[self.cells] = self.data
        self.units.arena.unfenced[self.cells] = -1
        barrier = self.barrier
        barrier.release(self.handed)
        barrier.tell(self.clock)
        barrier.bytes -= self.data.size
        if barrier.bytes < 0 and (self.own or barrier.pending == 0):
            raise EmulationError("a copy brings more bytes than its barrier expects")
        barrier.settle()


@dataclass
class Store:
    """A store under way: the bytes that it reads, what they were when it was issued, the box for them and its
    coordinates."""

    cells: Any
    seen: Any
    tmap: TensorMap | Row
    coordinates: list[int]
    reduce: str = ""
    #: the number of its group among those that the thread has committed; 0: of none yet
    committed: int = 0
    #: whether it has read what it stores; what it writes may come much later
    read: bool = False
    #: where several ranks run: what to do when it has been awaited (`ranks.World.stored`)
    awaited: Callable[[], None] | None = None

    def land(self) -> None:
        """What was stored is there."""
        if (parts := self.tmap.inside(self.coordinates)) is None:
            return
        to, dtype = self.tmap.array, str(self.tmap.array.dtype)
        box = np.frombuffer(self.seen.tobytes(), to.dtype).reshape(self.tmap.box)[parts[0]]
        if self.reduce:
            combine = {"add": np.add, "min": np.minimum, "max": np.maximum}[self.reduce]
            box = numerics.encode(
                combine(numerics.decode(to[parts[1]], dtype), numerics.decode(box, dtype)), dtype
            )
        to[parts[1]] = box


@dataclass
class Flight:
    """An accumulator that products are writing."""

    registers: Any
    lanes: Any
    slots: Any
    value: Any
    left: int = 0


@dataclass
class Group:
    """A warpgroup's queue of products."""

    fenced: bool = False
    open: list[Product] = field(default_factory=list)
    committed: list[list[Product]] = field(default_factory=list)


class AsyncUnits:
    """Those of one block. ``cluster``: of all its blocks, by rank; one list, which they share."""

    def __init__(self, interleaving: Interleaving, cluster: list[AsyncUnits] | None = None):
        self.interleaving, self.draw = interleaving, interleaving.draw
        self.cluster = [self] if cluster is None else cluster
        self.arena: Any = None
        self.barriers: dict[int, Barrier] = {}
        #: the author's named barriers: who waits, and what those who have gone on handed on
        self.named: dict[int, tuple[list[Any], list[Any]]] = {}
        #: the phase of the cluster's barrier at which its threads have arrived
        self.cluster_turn = 0
        #: votes of the block: how many threads have come, and on how many of them the test holds
        self.votes: list[list[int]] = []
        #: by the thread that issued them
        self.stores: dict[int, list[Store]] = {}
        self.committed: dict[int, int] = {}
        self.groups: dict[int, Group] = {}
        self.flights: dict[tuple[int, int, int], Flight] = {}
        #: copies that the threads started themselves
        self.copies = Copies()
        self.ended = False

    def yields(self, ready: Callable[[], bool] | None = None) -> None:
        self.interleaving.yields(ready)

    def peer(self, rank: int) -> AsyncUnits:
        """The engines of another block of the cluster, which has begun and not ended."""
        if not 0 <= rank < len(self.cluster):
            raise EmulationError(f"block {rank} of a cluster of {len(self.cluster)}")
        other = self.cluster[rank]
        if other.ended:
            raise EmulationError("a block reaches into another that has ended")
        return other

    def finish(self) -> None:
        """The block is over."""
        self.ended = True
        self.copies.finish()
        if any(x.units is self for x in self.interleaving.loads):
            raise EmulationError("a block ends while copies into its shared memory are under way")
        if self.flights:
            raise EmulationError("a block ends while its products are under way")
        if any(arrived for key, (arrived, _) in self.interleaving.meetings.items() if key[0] is self):
            raise EmulationError("a block ends while threads are awaited at a named barrier")
        for s in (s for of in self.stores.values() for s in of):
            if not s.read:
                raise EmulationError("a block ends while stores read its shared memory")
            s.land()

    def close(self) -> None:
        """Lets go of what refers to it, when all blocks of the cluster have ended. Python looks for cycles
        when so many objects have been made, and these are few and large: megabytes a block."""
        self.cluster.clear()
        for held in (self.stores, self.groups, self.flights, self.named):
            held.clear()

    # -- barriers
    # -----------------------------------------------------------------------------------------------------
    def barrier(self, at: int) -> Barrier:
        if at not in self.barriers:
            raise EmulationError(f"a barrier at byte {at} that nobody initialised")
        return self.barriers[at]

    # -- copies
    # -------------------------------------------------------------------------------------------------------
    def load(
        self,
        to: int,
        tmap: TensorMap,
        barrier: Barrier,
        coordinates: list[int],
        own: bool = True,
        handed: Any = None,
        clock: Any = None,
    ) -> None:
        """A box of a tensor on its way to byte ``to`` of this block's shared memory."""
        if not barrier.fenced:
            raise EmulationError(
                "a copy names a barrier that the asynchronous proxy does not know of (fence_mbarrier_init)"
            )
        box = np.zeros(tmap.box, tmap.array.dtype)
        if (parts := tmap.inside(coordinates)) is not None:
            box[parts[0]] = tmap.array[parts[1]]
        data = np.frombuffer(box.tobytes(), np.uint8)
        cells = tmap.cells(to)
        self.overwritten(cells)
        for other in self.interleaving.loads:
            if other.units is self and overlap(cells, other.cells):
                raise EmulationError("two copies under way write the same bytes of shared memory")
        for group in self.groups.values():
            for p in [*group.open, *(x for g in group.committed for x in g)]:
                if any(overlap(cells, p.reads(which)) for which in in_memory(p)):
                    raise EmulationError(
                        "a copy overwrites a stage that products still read: it was released too early"
                    )
        self.arena.data[cells] = self.draw.integers(0, 256, cells.size, np.uint8)
        self.interleaving.loads.append(Load(self, own, handed, barrier, cells, data, clock))

    def store(
        self,
        frm: int,
        tmap: TensorMap | Row,
        coordinates: list[int],
        issuer: int,
        reduce: str,
        awaited: Callable[[], None] | None = None,
    ) -> None:
        cells = tmap.cells(frm)
        self.fenced(cells)
        self.stores.setdefault(issuer, []).append(
            Store(cells, self.arena.data[cells].copy(), tmap, coordinates, reduce, awaited=awaited)
        )

    def overwritten(self, cells: Any) -> None:
        """Shared memory is about to be written: no store may still read it, whatever is written there."""
        if any(not s.read and overlap(cells, s.cells) for of in self.stores.values() for s in of):
            raise EmulationError(
                "shared memory is written while a store by TMA reads it: nobody has awaited the store"
            )

    def commit_stores(self, issuer: int) -> None:
        number = self.committed[issuer] = self.committed.get(issuer, 0) + 1
        for s in self.stores.get(issuer, []):
            s.committed = s.committed or number

    def await_stores(self, b: Any, issuer: int, pending: int, complete: bool) -> None:
        """The stores of all but the last ``pending`` groups of a thread have read what they store: it alone
        knows, so that is a read of its own. What they write is there only where they are to be ``complete``,
        or at the block's end."""
        last = self.committed.get(issuer, 0) - pending
        for s in [s for s in self.stores.get(issuer, []) if 0 < s.committed <= last]:
            if not s.read and not np.array_equal(self.arena.data[s.cells], s.seen):
                raise EmulationError("shared memory was written while a store was reading it")
            if not s.read:
                b.touch(self.arena, s.cells, np.full(s.cells.shape, issuer), False)
            s.read = True
            if complete:
                s.land()
                if s.awaited is not None:
                    s.awaited()
                self.stores[issuer].remove(s)

    def fenced(self, cells: Any, reader: int | None = None) -> None:
        """What threads wrote to ``cells`` is there for the asynchronous proxy: its writers have made a proxy
        fence behind it, or the warpgroup that lets the engine read has since it met them (PTX ISA 9.0,
        "Causality order")."""
        closed = self.arena.unfenced[cells] >= 0
        if reader is not None:
            closed &= (self.arena.seen[cells] >> reader & 1) == 0
        if closed.any():
            raise EmulationError(
                "an engine reads what a thread wrote, without fence.proxy.async between them"
            )

    # -- products
    # -----------------------------------------------------------------------------------------------------
    def group(self, number: int) -> Group:
        return self.groups.setdefault(number, Group())

    def read(self, p: Product) -> tuple[Any, Any]:
        made: list[Any] = []
        for which, dtype in enumerate(p.dtypes):
            if isinstance(p.a, Held) and not which:
                made.append(p.a.registers[p.a.lanes, p.a.slots].view(numerics.storage(dtype)))
                continue
            cells = p.reads(which)[..., None] + np.arange(p.size)
            if int(cells.max()) >= self.arena.data.size:
                raise EmulationError("a matrix descriptor reaches beyond shared memory")
            if (self.arena.writer[cells] >= 0).any():  # threads had to do with it, not TMA alone
                p.block.touch(self.arena, cells, np.full(cells.shape, p.key[1] * WARPGROUP), False)
                self.fenced(cells, p.block.first // WARPGROUP + p.key[1])
            made.append(np.ascontiguousarray(self.arena.data[cells]).view(numerics.storage(dtype))[..., 0])
        return made[0], made[1]

    def issue(self, number: int, registers: Any, base: int, n: int, p: Product) -> None:
        """A product of warpgroup ``number`` into 64 × n accumulators that begin at slot ``base``."""
        group = self.group(number)
        p.seen, p.asked = self.read(p), None if p.places is None else p.places()
        if p.key not in self.flights:
            if not group.fenced:
                raise EmulationError("a product without wgmma.fence behind other writes of its registers")
            f = wgmma_accumulator(n)
            index = np.indices(f.shape)
            lanes, slots = number * WARPGROUP + f.thread(*index), base + f.slot(*index)
            self.flights[p.key] = Flight(registers, lanes, slots, registers[lanes, slots].astype(p.wide))
            registers[lanes, slots] = UNKNOWN[p.sums]
        self.flights[p.key].left += 1
        group.open.append(p)

    def wait(self, number: int, pending: int) -> None:
        group = self.group(number)
        while len(group.committed) > pending:
            for p in group.committed.pop(0):
                self._complete(p, group)

    def _complete(self, p: Product, group: Group) -> None:
        now = self.read(p)
        if not all(
            np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in zip(now, p.seen, strict=True)
        ):
            raise EmulationError("the operands of a product changed while it was under way")
        a, b = (factors(x, dtype).astype(p.wide) for x, dtype in zip(now, p.dtypes, strict=True))
        if p.places is not None:
            if not np.array_equal(p.places(), p.asked):
                raise EmulationError("the places of a product changed while it was under way")
            a = expanded(a, p.asked)
        flight = self.flights[p.key]
        flight.value = ((flight.value if p.keep else 0) + a @ b.T).astype(p.sums).astype(p.wide)
        flight.left -= 1
        if flight.left == 0:
            held = flight.registers[flight.lanes, flight.slots]
            if not (np.isnan(held) if p.sums == "float32" else held == UNKNOWN[p.sums]).all():
                raise EmulationError("an accumulator was written while products were under way")
            flight.registers[flight.lanes, flight.slots] = flight.value
            del self.flights[p.key]
            group.fenced = False


# ---- the instructions, as `machine.FUNCTIONS` has them


def one(m: Any, value: Any) -> Any:
    """What all running lanes agree on."""
    values = spread(value, m)[m]
    if not len(values) or np.count_nonzero(values == values[0]) != len(values):
        raise EmulationError(f"threads of one instruction disagree: {np.unique(values)[:4]}")
    return values[0]


def byte(m: Any, pointer: Any) -> int:
    tile = pointer.memory
    return int(tile.offset + one(m, pointer.index) * tile.size)


def _groups(b: Any, m: Any) -> list[int]:
    whole = m[: len(m) // WARPGROUP * WARPGROUP].reshape(-1, WARPGROUP)
    if m[len(m) // WARPGROUP * WARPGROUP :].any() or not (whole.all(1) | ~whole.any(1)).all():
        raise EmulationError("an instruction of a warpgroup in part of one")
    return [int(g) for g in np.flatnonzero(whole.all(1))]


def barrier_init(b: Any, m: Any, where: Any, count: Any) -> None:
    if m.sum() != 1:
        raise EmulationError(f"{m.sum()} threads initialise a barrier")
    n, owner = int(one(m, count)), int(np.flatnonzero(m)[0]) + b.first
    b.units.barriers[byte(m, where)] = Barrier(n, n, owner, b.moments.now()[owner])


def fence_init(b: Any, m: Any) -> None:
    for made in b.units.barriers.values():
        made.fenced |= bool(np.isin(made.owner - b.first, np.flatnonzero(m)))


def usable(b: Any, m: Any, made: Barrier) -> Barrier:
    """A barrier, by threads that have met the one that initialised it since."""
    who = np.flatnonzero(m) + b.first
    who = who[who != made.owner]
    if who.size and not b.ordered(np.full(who.shape, made.owner), who, np.full(who.shape, made.then)).all():
        raise EmulationError("a barrier is used by threads that have not met the one that initialised it")
    return made


def barrier_expect(b: Any, m: Any, where: Any, count: Any) -> None:
    if m.sum() != 1:
        raise EmulationError(f"{m.sum()} threads expect a stage's bytes")
    made = usable(b, m, b.units.barrier(byte(m, where)))
    made.bytes += int(one(m, count))
    made.arrive()
    b.units.yields()


def barrier_wait(b: Any, m: Any, where: Any, parity: Any) -> None:
    for some, at in apart(m, where):
        made, p = usable(b, some, b.units.barrier(at)), int(one(some, parity))
        b.units.yields(lambda made=made, p=p: made.phases & 1 != p)
        if b.clocks is not None and made.over is not None:
            b.clocks.acquire(np.flatnonzero(some) + b.first, made.over)
        if b.world is not None and made.heard is not None:
            b.world.hear(b, np.flatnonzero(some), made.heard)


def barrier_arrive(b: Any, m: Any, where: Any) -> None:
    """One arrival of each thread."""
    for some, at in apart(m, where):
        made = b.units.barrier(at)
        made.release(b.clocks.release(np.flatnonzero(some) + b.first))
        made.arrive(int(some.sum()))
    b.units.yields()


def apart(m: Any, pointer: Any) -> list[tuple[Any, int]]:
    """The threads that name one byte of shared memory, for each that they name."""
    tile = pointer.memory
    index = np.broadcast_to(pointer.index, m.shape)
    found = np.unique(index[m])
    return [(m & (index == k), int(tile.offset + k * tile.size)) for k in found]


def copies_arrive(b: Any, m: Any, where: Any) -> None:
    """An arrival of each thread, behind its copies by cp.async."""
    b.units.copies.own(b, m)
    barrier_arrive(b, m, where)


def barrier_expect_tx(b: Any, m: Any, where: Any, count: Any) -> None:
    if m.sum() != 1:
        raise EmulationError(f"{m.sum()} threads expect bytes")
    b.units.barrier(byte(m, where)).bytes += int(one(m, count))


def barrier_arrive_warp(b: Any, m: Any, where: Any, when: Any) -> None:
    warps = m.reshape(-1, WARP)
    if not (warps.all(1) | ~warps.any(1)).all():
        raise EmulationError("an arrival of part of a warp")
    synced(b, warps)
    made = usable(b, m, b.units.barrier(byte(m, where)))
    for w in np.flatnonzero(warps.all(1)) if one(m, when) else ():
        if b.clocks is not None:
            made.release(b.clocks.release(np.arange(WARP) + w * WARP + b.first))
        arrived(made, b)


def synced(b: Any, warps: Any) -> None:
    """__syncwarp of whole warps."""
    for w in np.flatnonzero(warps.all(1)):
        b.met(np.arange(b.threads) // WARP == w, 2)


def arrived(made: Barrier, b: Any) -> None:
    made.arrive()
    b.units.yields()


def tma_load(b: Any, m: Any, to: Any, tmap: Any, where: Any, *coordinates: Any) -> None:
    """Each thread makes its own copy; several that are alike were to be one."""
    b.late_enough(m)
    seen: set[tuple[int, ...]] = set()
    for who in map(int, np.flatnonzero(m)):
        only = np.zeros_like(m)
        only[who] = True
        at = [int(one(only, c)) for c in coordinates]
        if (place := (byte(only, to), *at)) in seen:
            raise EmulationError(f"{m.sum()} threads make one copy")
        seen.add(place)
        _load(b, only, who, byte(only, to), tmap, b.units.barrier(byte(only, where)), at)
    b.units.yields()


def _load(b: Any, m: Any, who: int, to: int, tmap: Any, barrier: Barrier, at: list[int]) -> None:
    looked, own = b.units.arena.looked, slice(b.first // WARP, -(-(b.first + len(m)) // WARP))
    if looked is not None and looked[own, tmap.cells(to)].any():
        raise EmulationError(
            "TMA writes what threads of the block have read, and they have made no proxy fence since"
        )
    handed = clock = None
    if (
        b.clocks is not None
    ):  # as if the thread wrote the box: who reads it must come behind the barrier, and it behind who read it
        arena, cells = b.units.arena, tmap.cells(to)
        b.touch(arena, cells, np.full(cells.shape, who), True)
        arena.unfenced[cells] = -1
        handed = b.clocks.release(np.array([who + b.first]))
    if b.world is not None:
        clock = b.world.loaded(b, who, tmap.memory, tmap.elements(at))
    b.units.load(to, tmap, barrier, at, handed=handed, clock=clock)


def storing(reduce: str) -> Callable[..., None]:
    def tma_store(b: Any, m: Any, tmap: Any, frm: Any, *coordinates: Any) -> None:
        b.late_enough(m)
        seen: set[tuple[int, ...]] = set()
        for who in map(int, np.flatnonzero(m)):  # each thread makes its own
            only = np.zeros_like(m)
            only[who] = True
            start, where = byte(only, frm), [int(one(only, c)) for c in coordinates]
            if (start, *where) in seen:
                raise EmulationError(f"{m.sum()} threads make one store")
            seen.add((start, *where))
            cells = tmap.cells(start)
            b.touch(frm.memory.arena, cells, np.full(cells.shape, who), False)
            awaited = None
            if b.world is not None:
                awaited = b.world.stored(b, who, tmap.memory, tmap.elements(where))
            b.units.store(start, tmap, where, who, reduce, awaited)
        b.units.yields()

    return tma_store


def bulk_commit(b: Any, m: Any) -> None:
    for who in np.flatnonzero(m):
        b.units.commit_stores(int(who))


def bulk_wait(pending: int, complete: bool) -> Callable[..., None]:
    def run(b: Any, m: Any) -> None:
        for who in np.flatnonzero(m):
            b.units.await_stores(b, int(who), pending, complete)

    return run


def fence_proxy(b: Any, m: Any) -> None:
    unfenced = b.units.arena.unfenced
    fences = np.zeros(len(b.everyone) + 1, bool)  # the last one is of cells that nobody wrote: -1
    fences[np.flatnonzero(m) + b.first] = True
    unfenced[fences[unfenced]] = -1
    arena, left = b.units.arena, np.flatnonzero(unfenced >= 0)
    if left.size:
        whole = m[: len(m) // WARPGROUP * WARPGROUP].reshape(-1, WARPGROUP).all(1)
        for g in np.flatnonzero(whole):
            first = g * WARPGROUP + b.first
            met = b.ordered(arena.writer[left], np.full(left.shape, first), arena.written[left])
            arena.seen[left[met]] |= np.uint32(1 << (first // WARPGROUP))
    if (looked := b.units.arena.looked) is not None:
        whole = np.flatnonzero(m[: len(m) // WARP * WARP].reshape(-1, WARP).all(1))
        looked[whole + b.first // WARP] = False


def fence_global(b: Any, m: Any) -> None:
    """Stores by TMA land when they are awaited, which comes before threads' writes: it matters to what TMA
    reads."""
    if b.world is not None:
        b.world.fence(b, np.flatnonzero(m))


def descriptor(swizzle: int) -> Callable[..., Any]:
    mode = next(k for k, w in SWIZZLE_OF.items() if w == swizzle)

    def run(b: Any, m: Any, start: Any, leading: Any) -> Any:
        at = (start.memory.offset + start.index * start.memory.size).astype(np.uint64)
        if (at[m] % 16).any():
            raise EmulationError("a matrix descriptor of an address that is no multiple of 16 bytes")
        rest = np.uint64(int(one(m, leading)) >> 4 << 16 | 8 * swizzle >> 4 << 32 | mode << 62)
        return (at >> np.uint64(4)) | rest

    return run


def product(name: str) -> Callable[..., None]:
    """``ts::wgmma_m64n256k16_bf16_01``, ``ts::wgmma_m64n256k32_e4m3_e5m2_00``."""
    made = isa.wgmma(name)
    dtypes, sums = _types(made, name)

    def run(b: Any, m: Any, d: Any, a: Any, bb: Any, keep: Any) -> None:
        accumulates(d, sums, name)
        for g in _groups(b, m):
            mine = np.zeros(m.shape, bool)
            mine[g * WARPGROUP : (g + 1) * WARPGROUP] = True
            base = int(one(mine, d.index))
            key = (id(d.memory), g, base)
            right = (int(one(mine, bb)), made.n, made.across[1])
            left: Any = None
            if made.held:
                f = wgmma_a(8 * np.dtype(numerics.storage(dtypes[0])).itemsize)
                index = np.indices(f.shape)
                left = Held(
                    a.memory.data, g * WARPGROUP + f.thread(*index), int(one(mine, a.index)) + f.slot(*index)
                )
            else:
                left = (int(one(mine, a)), 64, made.across[0])
            b.units.issue(
                g,
                d.memory.data,
                base,
                made.n,
                Product(key, left, right, bool(one(mine, keep)), (None, None), dtypes, sums, b),
            )

    return run


def _types(made: isa.Wgmma, name: str) -> tuple[tuple[str, str], str]:
    """The dtypes of an instruction's operands and of its accumulator."""
    if made.sums == "f16":
        raise InternalError(f"the emulator has no accumulators of 16 bits ({name})")
    return (isa.DTYPES[made.a], isa.DTYPES[made.b]), isa.SUMS[made.sums]


def sparse_product(name: str) -> Callable[..., None]:
    """``ts::wgmma_sp_m64n256k32_bf16_01_s0``."""
    instruction = isa.wgmma(name)
    dtypes, sums = _types(instruction, name)
    n, across, pair = instruction.n, instruction.across, instruction.selector or 0
    size = numerics.storage(dtypes[0]).itemsize
    if size == 4 or instruction.held:  # of tf32 one in each two is kept, which T.gemm_sp does not have
        raise InternalError(f"the emulator does not know {name}")

    def run(b: Any, m: Any, d: Any, a: Any, bb: Any, places: Any, keep: Any) -> None:
        accumulates(d, sums, name)
        for g in _groups(b, m):
            mine = np.zeros(m.shape, bool)
            mine[g * WARPGROUP : (g + 1) * WARPGROUP] = True
            base = int(one(mine, d.index))
            who, at = np.flatnonzero(mine), int(one(mine, places.index))

            def words(who: Any = who, at: int = at) -> Any:
                return places.memory.data[who, at].reshape(4, 8, 4)  # warp, lane // 4, lane % 4

            left, right = (int(one(mine, a)), 64, across[0]), (int(one(mine, bb)), n, across[1])
            made = Product(
                (id(d.memory), g, base), left, right, bool(one(mine, keep)), (None, None), dtypes, sums, b
            )
            made.places = lambda words=words: kept_places(words(), size, pair)
            b.units.issue(g, d.memory.data, base, n, made)

    return run


def kept_places(words: Any, size: int, pair: int) -> Any:
    """The places of a warpgroup's 64 rows, (64, words of 16 or 32 bits), from its threads' registers, (4, 8,
    4): PTX ISA, "Sparse matrix storage". Of 16-bit operands the selector's two threads of each four have
    those of 16 elements, of rows g and g + 8; of 8-bit ones each has 32 elements of a row, the odd ones those
    of g + 8."""
    if size == 2:
        two = words[..., 2 * pair : 2 * pair + 2]
        return np.concatenate([two & 0xFFFF, two >> 16], axis=1).reshape(64, 2).astype(np.uint16)
    return np.concatenate([words[..., 0::2], words[..., 1::2]], axis=1).reshape(64, 2)


def copy(size: int) -> Callable[..., None]:
    def run(b: Any, m: Any, to: Any, source: Any, count: Any = size) -> None:
        b.units.arena = to.memory.arena
        b.units.copies.issue(b, m, size, to, source, count)

    return run


def fence(b: Any, m: Any) -> None:
    for g in _groups(b, m):
        b.units.group(g).fenced = True


def commit(b: Any, m: Any) -> None:
    for g in _groups(b, m):
        group = b.units.group(g)
        group.committed.append(group.open)
        group.open = []


def waited(pending: int) -> Callable[..., None]:
    def run(b: Any, m: Any) -> None:
        for g in _groups(b, m):
            b.units.wait(g, pending)

    return run


def _nothing(b: Any, m: Any, *_: Any) -> None:
    pass


def find(name: str) -> Callable[..., Any] | None:
    """The instruction of a name, with its template's argument."""
    plain, _, number = name.rstrip(">").partition("<")
    if plain.startswith("ts::wgmma_sp_m64"):
        return sparse_product(plain)
    if plain.startswith("ts::wgmma_m64"):
        return product(plain)
    if plain in ("ts::matrix_descriptor", "ts::descriptor_here"):
        return descriptor(int(number))
    if plain == "ts::cp_async":
        return copy(int(number))
    if plain == "ts::cp_async_wait":
        return lambda b, m: b.units.copies.wait(b, m, int(number))
    if plain in ("ts::bulk_wait", "ts::bulk_wait_read"):
        return bulk_wait(int(number), plain == "ts::bulk_wait")
    if plain.startswith("ts::tma_reduce_"):
        return storing(plain.rpartition("_")[2])
    if plain == "ts::wgmma_wait":
        return waited(int(number.partition(",")[0]))
    plain_ones: dict[str, Callable[..., Any]] = {
        "ts::cp_async_commit": lambda b, m: b.units.copies.commit(m),
        "ts::cp_async_arrive": copies_arrive,
        "ts::mbarrier_init": barrier_init,
        "ts::mbarrier_expect": barrier_expect,
        "ts::mbarrier_wait": barrier_wait,
        "ts::mbarrier_arrive": barrier_arrive,
        "ts::mbarrier_expect_tx": barrier_expect_tx,
        "ts::mbarrier_arrive_warp": barrier_arrive_warp,
        "ts::fence_mbarrier_init": fence_init,
        "ts::prefetch_map": _nothing,
        "ts::tma_load": tma_load,
        "ts::tma_store": storing(""),
        "ts::bulk_commit": bulk_commit,
        "ts::fence_proxy_async": fence_proxy,
        "ts::fence_proxy_async_global": fence_global,
        "ts::wgmma_fence": fence,
        "ts::wgmma_commit": commit,
        "ts::wgmma_arrived": _nothing,
        "ts::fewer_registers": _nothing,
        "ts::more_registers": _nothing,
        "ts::wgmma_behind": _nothing,
        "ts::block_ends": _nothing,
        "ts::wgmma_read": _nothing,
    }
    return plain_ones.get(plain)
