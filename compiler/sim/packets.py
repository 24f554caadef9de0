"""Boxes of packets (tilescale/packets.py): what a launch puts there, and what it takes.

A packet is awaited as the launch's number in it, as on every target, and makes nothing else visible: no clock
is joined. What goes wrong with a box is found by its state: a packet that is put twice in one launch, one
that a later launch writes over before its receiver has taken it, one that nobody takes. Of a dense box also
one that is taken twice in one launch, and one that a later launch puts where its receiver may have still to
empty the place, since threads do that any time before their launch ends."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from tilescale.compiler.findings import Finding, Where
from tilescale.compiler.ir.contexts import RegionView, Site
from tilescale.compiler.sim.memory import describe
from tilescale.packets import EMPTY, HEAD, SHIFT, words

if TYPE_CHECKING:
    from tilescale.compiler.sim.machine import Executor, Machine

#: bits of the number in a packet
BITS = 32


class Packets:
    """A rank's box. ``data``: its words as they lie in memory; ``shape``: of its packets, which have no marks
    where it is ``dense``; ``each``: elements of a packet, as which people are told of it."""

    scope = "global.packets"

    def __init__(
        self,
        name: str,
        data: Any,
        shape: tuple[int, ...],
        owner: tuple[Any, ...],
        slot: int,
        each: int,
        dense: bool = False,
    ):
        self.name, self.data, self.shape, self.owner, self.dense = name, data, shape, owner, dense
        self.each = each
        self.key = (*owner, slot)
        #: machine of a launch → the launch's number; those that have not ended on this rank
        self.numbers: dict[int, int] = {}
        self.running: set[int] = set()
        #: of each half: who put each packet last (a place in ``puts``), and whether it has been taken
        self.puts: list[Where] = []
        self.by = np.zeros((2, *shape), np.int32)
        self.taken = np.zeros((2, *shape), bool)
        #: … and in which launch, by its number
        self.sent = np.zeros((2, *shape), np.int64)
        #: of a dense box: in which launch each packet has been taken last, and by whom (a place in ``takes``)
        self.took = np.zeros((2, *shape), np.int64)
        self.takes: list[Where] = []
        self.taker = np.zeros((2, *shape), np.int32)
        self.waiters: list[Executor] = []

    @property
    def elements(self) -> tuple[int, ...]:
        """The shape that its author gave it."""
        return (*self.shape[:-1], self.shape[-1] * self.each)

    def part(self, key: Any, bad: Any = None) -> str:
        """The packets that ``key`` names (those where ``bad`` holds), in elements: ``box[0, 8:16]``."""
        *outer, row = key
        if bad is not None:
            bad = np.repeat(bad, self.each, axis=-1)
        return describe(self.name, (*outer, slice(row.start * self.each, row.stop * self.each)), bad)

    def begin(self, machine: Machine) -> None:
        """The rank begins a launch that uses the box."""
        self.data[0] += 1 << SHIFT
        self.numbers[id(machine)] = number = int(self.data[0]) >> SHIFT
        self.running.add(number)

    def end(self, machine: Machine) -> None:
        """Its blocks have ended, if it has counted as a launch."""
        self.running.discard(self.numbers.get(id(machine), 0))

    def number(self, machine: Machine) -> int:
        """Of a launch, among those that use the box."""
        return self.numbers[id(machine)]

    def half(self, number: int) -> Any:
        """The packets of a launch, each as data, number, data, number; of a dense box as a word."""
        each = words(self.dense)
        size = each * int(np.prod(self.shape))
        first = HEAD + number % 2 * size
        half = self.data[first : first + size]
        return half.reshape(self.shape) if self.dense else half.view(np.uint32).reshape(*self.shape, 2 * each)

    def come(self, number: int, key: Any) -> Any:
        """Which of the packets ``key`` of a launch have come."""
        seen = self.half(number)[key]
        return seen != EMPTY if self.dense else (seen[..., 1::2] == number % (1 << BITS)).all(-1)

    def there(self, number: int, key: Any) -> bool:
        """Whether all of them have."""
        return bool(self.come(number, key).all())


def _place(ex: Executor, box: RegionView, storage: Packets, site: Site) -> Any:
    """The packets that a region names, as slices; None, and a finding, outside."""
    key, part, shape = box.cut(ex, storage)
    if part is None:
        return key
    wanted = tuple(slice(low, low + n) for low, n in zip(box.index(ex), shape, strict=True))
    ex.machine.report_outside(ex, storage.name, storage.elements, site, _shown(storage, wanted))
    return None


def _shown(box: Packets, key: Any, bad: Any = None) -> str:
    return f"packets {box.part(key, bad)} of rank {box.owner[0]}"


def put(ex: Executor, box: RegionView, owner: int, values: Any, site: Site) -> None:
    """Puts int64 ``values`` into the box of rank ``owner``."""
    storage, mine = box.storage(ex, owner), box.storage(ex, None)
    key = _place(ex, box, storage, site)
    if key is None:
        return
    number = mine.number(ex.machine)
    half, by, taken = storage.half(number)[key], storage.by[number % 2][key], storage.taken[number % 2][key]
    where = ex.where(site, _shown(storage, key))
    sent = storage.sent[number % 2][key]
    again = (sent == number) & (by > 0)
    if again.any():
        ex.machine.report.add(_again(storage, key, again, by, where))
    lost = (by > 0) & ~again
    if number - 2 in storage.running and (lost & ~taken).any():
        ex.machine.report.add(_lost(storage, key, lost & ~taken, by, where))
    elif number - 2 in storage.running and storage.dense and lost.any():
        ex.machine.report.add(_early(storage, key, lost, by, where))
    storage.puts.append(where)
    by[...], taken[...] = len(storage.puts), again  # of what is put twice nobody shall miss one
    sent[...] = number
    data = np.ascontiguousarray(values.reshape(by.shape))
    if storage.dense:
        half[...] = np.where(~data == EMPTY, 1, ~data)
    else:
        half[..., 0::2] = data.view(np.uint32).reshape(*by.shape, 2)
        half[..., 1::2] = number % (1 << BITS)
    for observer in ex.machine.observers:
        observer.put(ex, storage, key, site, owner)
    ex.machine.polling.changed()
    waiters, storage.waiters = storage.waiters, []
    for waiter in waiters:
        ex.machine.wake(waiter)


def get(ex: Executor, box: RegionView, site: Site) -> Generator[str, None, None]:
    """Until the packets of this launch have come."""
    storage = box.storage(ex, None)
    key = _place(ex, box, storage, site)
    if key is None:
        return
    number = storage.number(ex.machine)
    if storage.dense:
        again = storage.took[number % 2][key] == number
        if again.any():
            ex.machine.report.add(_taken_again(storage, number, key, again, ex.where(site, "")))
            return
    ex.takes = storage, number, key
    yield "wait"
    for observer in ex.machine.observers:
        observer.awaits(ex, storage, key, site)
    while not storage.there(number, key):
        from tilescale.compiler.sim.machine import Waiting

        missing = ~storage.come(number, key)
        storage.waiters.append(ex)
        text = _shown(storage, key, missing)
        hint = (
            f"T.put_packets(…, {storage.part(key, missing)}, dst={ex.rank.number}) by some rank, "
            "in the same launch"
        )
        ex.waiting = Waiting(site, text, hint=hint)
        yield "wait"
    ex.takes = None
    for observer in ex.machine.observers:
        observer.took(ex, storage, key, site)


def taken(ex: Executor, box: RegionView, site: Site) -> Any:
    """The data of packets that have come, as int64; zero outside."""
    storage = box.storage(ex, None)
    key, part, shape = box.cut(ex, storage)
    if part is not None:
        return np.zeros(shape, np.int64)
    number = storage.number(ex.machine)
    storage.taken[number % 2][key] = True
    half = storage.half(number)[key]
    if not storage.dense:
        return np.ascontiguousarray(half[..., 0::2]).view(np.int64)[..., 0]
    storage.takes.append(ex.where(site, ""))
    storage.took[number % 2][key], storage.taker[number % 2][key] = number, len(storage.takes)
    data = ~half
    half[...] = EMPTY
    return data


def left(machine: Machine) -> None:
    """What a launch has put and nobody has taken."""
    for rank in machine.ranks:
        for box in rank.memory.values():
            if not isinstance(box, Packets) or id(machine) not in box.numbers:
                continue
            number = box.number(machine)
            mine = (box.sent[number % 2] == number) & (box.by[number % 2] > 0)
            lost = mine & ~box.taken[number % 2]
            if lost.any():
                whole = tuple(slice(0, n) for n in box.shape)
                text = f"nobody takes {_shown(box, whole, lost)}, which this puts there"
                region = box.part(whole, lost)
                hint = f"T.get_packets({region}, …) on rank {box.owner[0]}, or no put"
                where = box.puts[int(box.by[number % 2][lost].flat[0]) - 1]
                machine.report.add(Finding("unawaited", text, where, hint=hint))


def _again(box: Packets, key: Any, bad: Any, by: Any, where: Where) -> Finding:
    text = f"this puts {_shown(box, key, bad)} a second time in one launch"
    return Finding(
        "race", text, where, (box.puts[int(by[bad].flat[0]) - 1],),
        f"a place of {box.name} for each put of a launch: what is put has no other mark than the launch",
    )  # fmt: skip


def _early(box: Packets, key: Any, bad: Any, by: Any, where: Where) -> Finding:
    text = (
        f"this puts {_shown(box, key, bad)} in a launch while the one before the last, which empties their "
        f"places, goes on on rank {box.owner[0]}"
    )
    return Finding("race", text, where, (box.puts[int(by[bad].flat[0]) - 1],), _EXCHANGE)


def _taken_again(box: Packets, number: int, key: Any, bad: Any, where: Where) -> Finding:
    text = f"this takes {_shown(box, key, bad)} a second time in one launch: their places are empty again"
    first = box.takes[int(box.taker[number % 2][key][bad].flat[0]) - 1]
    hint = f"one T.get_packets for each packet of {box.name}, a dense box"
    return Finding("race", text, where, (first,), hint)


_EXCHANGE = (
    "in every launch a rank gets packets from each rank to which it puts some; "
    "or T.Kernel without ordered=False"
)


def _lost(box: Packets, key: Any, bad: Any, by: Any, where: Where) -> Finding:
    text = (
        f"this puts {_shown(box, key, bad)} over those of the launch before the last, which rank "
        f"{box.owner[0]} has not taken"
    )
    return Finding("race", text, where, (box.puts[int(by[bad].flat[0]) - 1],), _EXCHANGE)
