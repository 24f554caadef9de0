"""Regions of buffers as whoever runs a statement sees them: where they lie, what they hold, and that they
were touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tilescale.compiler.ir.contexts import Site
from tilescale.compiler.sim import nest
from tilescale.compiler.sim.counters import Counter, Counters
from tilescale.compiler.sim.memory import Storage, describe
from tilescale.compiler.tvm_compat import tirx

if TYPE_CHECKING:
    from tilescale.compiler.sim.machine import Executor
    from tilescale.compiler.sim.prepare import Preparation


@dataclass
class BufferInfo:
    """A buffer of the kernel. ``cells``: shadow cells an element; ``base``: the slot that it is a view of;
    viewed: there is one of it; ``ring``: whose stages it has; ``depth``: the scales below the block around
    its allocation, whose executors have one each; ``filled``: by the author's copies by TMA; ``loc``: where
    it is allocated."""

    name: str
    dtype: str
    shape: tuple[Any, ...]
    scope: str
    cells: int = 1
    tracked: bool = False
    base: int | None = None
    viewed: bool = False
    ring: int | None = None
    depth: int = 0
    filled: bool = False
    loc: Any = None


class Placed(NamedTuple):
    """A region at its place: what of it lies inside, as slices of the storage and (None: all of it) of the
    region, and its shape."""

    storage: Any
    key: tuple[slice, ...]
    part: tuple[slice, ...] | None
    shape: tuple[int, ...]

    def read(self) -> Any:
        """The elements as they lie in memory; zero outside."""
        if self.part is None:
            return self.storage.data[self.key]
        out = np.zeros(self.shape, self.storage.data.dtype)
        out[self.part] = self.storage.data[self.key]
        return out

    def write(self, values: Any) -> None:
        """Stores ``values``, as they lie in memory; what is outside is dropped."""
        values = np.broadcast_to(values, self.shape) if np.ndim(values) == 0 else values.reshape(self.shape)
        self.storage.data[self.key] = values if self.part is None else values[self.part]


class View:
    """A region of a buffer, its place computed by whoever runs the statement."""

    def __init__(self, cx: Preparation, region: Any, reach: str, site: Site):
        self.slot = cx.slots[region.source]
        self.info = cx.buffers[self.slot]
        self.dtype, self.reach, self.site = self.info.dtype, reach, site
        self.mins = [cx.scalar(r.min) for r in region.region]
        self.extents = [cx.scalar(r.extent) for r in region.region]
        constant = all(isinstance(r.extent, tirx.IntImm) for r in region.region)
        self.shape = tuple([int(r.extent) for r in region.region]) if constant else None

    def storage(self, ex: Any, owner: int | None) -> Any:
        """The executor's own memory, or that of rank (block of the cluster) ``owner``."""
        if owner is None:
            return ex.mem[self.slot]
        machine = ex.machine
        if self.reach == "device":
            return machine.of_rank(owner, self.slot)
        return machine.clustered(ex, owner).tile(self.slot, ex.place(self.info.depth))

    def index(self, ex: Any) -> tuple[Any, ...]:
        """The indices of its first element; arrays in the lanes of a nest."""
        return tuple([m(ex) for m in self.mins])

    def counter(self, ex: Any, owner: int | None = None) -> Counter | None:
        """The counter that the region names; None, and a finding, outside."""
        counters, index = self.storage(ex, owner), self.index(ex)
        assert isinstance(counters, Counters)
        made = counters.at(index)
        if made is None:
            ex.machine.report_outside(
                ex, counters.name, counters.shape, self.site, describe(counters.name, index), signal=True
            )
        return made

    def cut(
        self, ex: Any, storage: Storage
    ) -> tuple[tuple[slice, ...], tuple[slice, ...] | None, tuple[int, ...]]:
        """What of the region lies inside, as slices of the storage and (None: all of it) of the region, and
        the region's shape."""
        shape = tuple([n(ex) for n in self.extents]) if self.shape is None else self.shape
        index = self.index(ex)
        key = []
        for low, extent, n in zip(index, shape, storage.shape, strict=True):
            if not 0 <= low <= low + extent <= n:
                break
            key.append(slice(low, low + extent))
        else:
            return tuple(key), None, shape
        key, part = [], []
        for low, extent, n in zip(index, shape, storage.shape, strict=True):
            first = max(low, 0)
            last = max(first, min(low + extent, n))
            key.append(slice(first, last))
            part.append(slice(first - low, last - low))
        return tuple(key), tuple(part), shape

    def placed(self, ex: Any, owner: int | None) -> Placed:
        """The region where the executor's variables put it now."""
        storage = self.storage(ex, owner)
        return Placed(storage, *self.cut(ex, storage))

    def read(self, ex: Any, owner: int | None = None) -> Any:
        """The region's elements as they lie in memory; zero outside."""
        return self.placed(ex, owner).read()

    def write(
        self,
        ex: Any,
        values: Any,
        owner: int | None = None,
        combined: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        """Stores ``values``, as they lie in memory; what is outside is dropped. ``combined``: what is made of
        the elements that lie there by then, and of the values."""
        storage = self.storage(ex, owner)
        key, part, shape = self.cut(ex, storage)
        values = np.broadcast_to(values, shape) if np.ndim(values) == 0 else values.reshape(shape)
        chosen = values if part is None else values[part]
        make = combined or (lambda old, new: new)
        if not self.posts(ex, owner):
            storage.data[key] = make(storage.data[key], chosen)
            return
        assert owner is not None
        kept = chosen.copy()

        def land() -> None:
            for observer in ex.machine.observers:
                observer.accessed(ex, storage, key, "land", False)
            storage.data[key] = make(storage.data[key], kept)

        ex.post(self.peer(owner), land)

    def posts(self, ex: Executor, owner: int | None) -> bool:
        """Whether a write to memory of ``owner`` is on its way for a while: that of another rank (another
        block of the cluster)."""
        if owner is None or not ex.machine.late:
            return False
        return owner != (ex.rank.number if self.reach == "device" else ex.block.cluster_index)

    def peer(self, owner: int) -> int:
        """The number of ``owner`` among the peers of an executor: a rank, or (below zero) a block of the
        cluster."""
        return owner if self.reach == "device" else -1 - owner

    def record(self, ex: Any, mode: str, owner: int | None, by: Any = None) -> None:
        """An access by the operation's effect table. ``by``: the engine that performs it for the executor."""
        storage = self.storage(ex, owner)
        if ex.lanes is not None:
            _, chosen = nest.select(ex, storage, self.index(ex), self.site)
            storage.record(ex if by is None else by, chosen, mode, self.site)
            return
        key, part, shape = self.cut(ex, storage)
        if part is not None and not storage.is_global:
            wanted = tuple(slice(low, low + n) for low, n in zip(self.index(ex), shape, strict=True))
            ex.machine.report_outside(
                ex, storage.name, storage.shape, self.site, describe(storage.name, wanted)
            )
        if all(k.stop > k.start for k in key):
            storage.record(
                ex if by is None else by,
                key,
                mode,
                self.site,
                mode in ("write", "add") and self.posts(ex, owner),
            )
