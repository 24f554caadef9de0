"""Atomic updates, one element after another. A load acquires what the update that it sees released, a store
releases, all others do both: what a load saw says nothing to whoever stores next."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tilescale.compiler.sim import diagnose, nest, numerics, tiles
from tilescale.compiler.sim.memory import describe

if TYPE_CHECKING:
    from tilescale.compiler.ir.contexts import RegionView, Site
    from tilescale.compiler.sim.machine import Executor


def elements(
    ex: Executor, target: RegionView, kind: str, value: Any, owner: int | None = None, result: bool = False
) -> Any:
    """The update of one element (of rank ``owner``), or of one for each lane; the value before it, zero where
    there is no such element, which is a finding where somebody asks for it (``result``)."""
    if kind != "load" or owner is not None:
        ex.flush()
    storage, index = target.storage(ex, owner), target.index(ex)
    if ex.lanes is not None:
        active, chosen = nest.select(ex, storage, index, target.site)
        assert chosen is not None
        given = np.broadcast_to(value, ex.lanes)
        keys = list(zip(*(c.ravel().tolist() for c in np.broadcast_arrays(*chosen)), strict=True))
        amounts = (given if active is None else given[active]).ravel()
        for key, amount in zip(keys, amounts, strict=True):
            storage.data[key] = tiles.updated(
                numerics.decode(storage.data[key], target.dtype), amount, kind, target.dtype
            )
        if kind != "load":
            ex.machine.polling.changed()
        _published(ex, storage, keys, kind, target.site)
        return None
    if not nest.inside(index, storage.shape):
        if result and storage.is_global:  # a tile's is a finding by the effect table
            ex.machine.report_outside(
                ex, storage.name, storage.shape, target.site, describe(storage.name, index)
            )
        return numerics.scalar(0, target.dtype)
    stood = storage.data[index].tobytes()
    before = numerics.decode(storage.data[index], target.dtype)
    _published(ex, storage, [index], kind, target.site, wide=owner is not None)
    storage.data[index] = tiles.updated(before, value, kind, target.dtype)
    if storage.data[index].tobytes() != stood:
        ex.machine.polling.changed()
    return before


def tile(ex: Executor, target: RegionView, kind: str, value: Callable[[], Any]) -> None:
    """The update of a whole tile by a tile (as it lies in memory) or by one value; what lies outside is
    dropped."""
    if kind != "load":
        ex.flush()
    storage, dtype = target.storage(ex, None), target.dtype
    key, part, shape = target.cut(ex, storage)
    if kind != "load":
        ex.machine.polling.changed()
        given = np.asarray(value())
        amount = np.broadcast_to(given, shape) if given.ndim == 0 else given.reshape(shape)
        amount = amount if part is None else amount[part]
        if kind == "store":
            storage.data[key] = amount
        else:
            wide = numerics.decode(np.atleast_1d(storage.data[key]), dtype)
            made = tiles.ATOMIC[kind](wide, numerics.decode(np.atleast_1d(amount), dtype))
            storage.data[key] = made.astype(numerics.storage(dtype))
    _published(
        ex,
        storage,
        list(np.ndindex(*(k.stop - k.start for k in key))),
        kind,
        target.site,
        tuple(k.start for k in key),
    )


def posted(ex: Executor, target: RegionView, values: Any, owner: int, wide: bool = True) -> None:
    """A tile, as it lies in memory, added to a region of rank ``owner``'s, when it lands there. Each element
    is added at once; nobody acquires or releases anything by that. wide: atomic to all ranks, not only to the
    own one's blocks."""
    storage, dtype = target.storage(ex, owner), target.dtype
    key, _, _ = target.cut(ex, storage)
    if storage.shadow.tracked:
        places = [
            (id(storage.shadow), int(np.ravel_multi_index(at, storage.shape)))
            for at in np.ndindex(*(k.stop - k.start for k in key))
            for at in [tuple(i + k.start for i, k in zip(at, key, strict=True))]
        ]
        _scopes(ex, storage, places, target.site, wide)

    def added(old: Any, new: Any) -> Any:
        both = (numerics.decode(np.atleast_1d(x), dtype) for x in (old, new))
        return numerics.encode(tiles.ATOMIC["add"](*both), dtype).reshape(np.shape(old))

    target.write(ex, values, owner, added)


def _published(
    ex: Executor,
    storage: Any,
    keys: list[tuple[int, ...]],
    kind: str,
    site: Site,
    origin: tuple[int, ...] = (),
    wide: bool = False,
) -> None:
    """Acquires what earlier updates of these elements released, and releases in turn, each where the kind of
    update does. wide: it names a rank, and is atomic to all of them."""
    released = ex.machine.released
    shadow = id(storage.shadow)
    if origin:
        keys = [tuple(o + k for o, k in zip(origin, key, strict=True)) for key in keys]
    places = [(shadow, int(np.ravel_multi_index(key, storage.shape))) for key in keys]
    if storage.scope == "global.symm":
        _scopes(ex, storage, places, site, wide)
    for observer in ex.machine.observers if keys and storage.shadow.tracked else ():
        chosen = tuple(np.array(axis) for axis in zip(*keys, strict=True))
        observer.accessed(ex, storage, chosen, "load" if kind == "load" else "atomic", False)
    if kind != "store":
        for place in places:
            if place in released:
                ex.acquire(released[place])
    if kind != "load":
        clock = ex.release()
        for place in places:
            # With what it has acquired: an update continues what stood there, a store starts anew.
            released[place] = clock


def _scopes(ex: Executor, storage: Any, places: list[tuple[int, int]], site: Site, wide: bool) -> None:
    """Two updates of one element are atomic to each other only where the scope of each takes in the other: an
    update without a rank is so among its own rank's blocks alone (PTX ISA, "Memory Consistency Model",
    "Morally strong operations")."""
    for place in places:
        seen = ex.machine.updates.setdefault(place, {})
        for number, (at, rank, far, there) in seen.items():
            if rank != ex.rank.number and not (wide and far) and at > ex.vc[number]:
                ex.machine.report.add(diagnose.too_narrow(ex.where(site, storage.name), there))
        seen[ex.number] = (
            ex.now,
            ex.rank.number,
            wide and (ex.number not in seen or seen[ex.number][2]),
            ex.where(site, storage.name),
        )
