"""T.Parallel: a nest's iterations as lanes of NumPy arrays, or one after another where lanes go different
ways; single elements.

Iterations are independent, so their order says nothing: what one writes and another touches is reported as a
collision.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tilescale.compiler.findings import Finding
from tilescale.compiler.ir.contexts import Site, Value
from tilescale.compiler.ir.halves import kept_half
from tilescale.compiler.ir.nests import loops_of
from tilescale.compiler.ir.operations import VOID, find
from tilescale.compiler.sim import fixes, numerics
from tilescale.compiler.sim.memory import Storage, describe
from tilescale.compiler.sim.step import Step
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx
from tilescale.errors import TileValueError

if TYPE_CHECKING:
    from tilescale.compiler.sim.expr import Expressions
    from tilescale.compiler.sim.prepare import Preparation

#: lanes that have not touched an element, and elements that several lanes have read
NOBODY, SEVERAL = -1, -2


@contextlib.contextmanager
def masked(ex: Any, where: Any) -> Iterator[bool]:
    """Inside, only the lanes where ``where`` holds (of those that run) run; gives whether there are any."""
    outer = ex.mask
    ex.mask = where if outer is None else where & outer
    try:
        yield bool(ex.mask.any())
    finally:
        ex.mask = outer


def fails(ex: Any, test: Any) -> bool:
    """Whether a condition does not hold, in some lane that runs."""
    if not numerics.is_vector(test):
        return not test and (ex.mask is None or bool(ex.mask.any()))
    return bool((~test if ex.mask is None else ~test & ex.mask).any())


# ---- single elements


def _refuse(buffer: Any, indices: Any, site: Site) -> None:
    """Refuses a constant index outside a constant extent, as every target does."""
    for axis, (i, size) in enumerate(zip(indices, buffer.ty.shape, strict=True)):
        if (
            isinstance(i, tirx.IntImm)
            and isinstance(size, tirx.IntImm)
            and not 0 <= int(i.value) < int(size.value)
        ):
            raise TileValueError(
                f"index {i} lies outside axis {axis} of {buffer.name}, whose extent is {size}",
                loc=site.loc,
                expected=f"0 ≤ index < {size}",
            )


def load(cx: Expressions, e: Any) -> Value:
    """``A[i, j]`` as a value; zero outside a tensor."""
    slot, dtype = cx.slots[e.source], cx.buffers[cx.slots[e.source]].dtype
    place = _place(cx, e.indices)
    site, private = cx.site(e, "read"), e.source in cx.lane_buffers
    _refuse(e.source, e.indices, site)
    tested, whole = e.source in cx.tested, dtype not in numerics.FLOATS and dtype != "bool"

    def run(ex: Any) -> Any:
        storage, key = ex.mem[slot], place(ex)
        if not isinstance(storage, Storage):  # a counter, looked at without waiting
            counter = storage.at(key)
            for observer in ex.machine.observers if counter is not None else ():
                observer.peeked(ex, counter)
            if ex.polled is not None and counter is not None:
                ex.polled[counter.key] = counter, None
            return 0 if counter is None else counter.value
        if ex.lanes is not None:
            return _gather(ex, storage, ex.lane_index + key if private else key, site, tested)
        if inside(key, storage.shape):
            storage.record(ex, key, "read", site)
            return storage.data.item(key) if whole else numerics.decode(storage.data[key], dtype)
        if not storage.is_global:
            ex.machine.report_outside(ex, storage.name, storage.shape, site, describe(storage.name, key))
        return numerics.scalar(0, dtype)

    return run


def store(cx: Preparation, s: Any) -> Any:
    """``A[i, j] = value``; nothing is written outside a tensor."""
    slot = cx.slots[s.buffer]
    cx.kept = kept_half(s)
    place, value = _place(cx, s.indices), cx.scalar(s.value)
    site, private, tested = cx.site(s, "assignment"), s.buffer in cx.lane_buffers, s.buffer in cx.tested
    _refuse(s.buffer, s.indices, site)

    def run(ex: Any) -> None:
        storage = ex.mem[slot]
        made, key = value(ex), place(ex)
        if ex.lanes is not None:
            _scatter(ex, storage, ex.lane_index + key if private else key, made, site, tested)
        elif inside(key, storage.shape):
            storage.record(ex, key, "write", site)
            storage.data[key] = made
        elif not storage.is_global:
            ex.machine.report_outside(ex, storage.name, storage.shape, site, describe(storage.name, key))

    return run


def _place(cx: Expressions, indices: Any) -> Callable[[Any], tuple[Any, ...]]:
    """The indices of an element. Those of one axis, and constant ones, as variables of one element have, are
    most of all."""
    values = [cx.scalar(i) for i in indices]
    if all(isinstance(i, tirx.IntImm) for i in indices):
        fixed = tuple([int(i.value) for i in indices])
        return lambda ex: fixed
    if len(values) == 1:
        (only,) = values
        return lambda ex: (only(ex),)
    return lambda ex: tuple([i(ex) for i in values])


def inside(key: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    if len(key) == 1:
        return bool(0 <= key[0] < shape[0])
    for i, n in zip(key, shape, strict=True):
        if not 0 <= i < n:
            return False
    return True


def select(ex: Any, storage: Storage, key: tuple[Any, ...], site: Site) -> tuple[Any, tuple[Any, ...] | None]:
    """The lanes that touch an element of ``storage`` (None: all of them), and their indices, one an axis,
    which NumPy spreads over the lanes; an index outside a tile is reported."""
    good: Any = None
    for i, n in zip(key, storage.shape, strict=True):
        low, high = (int(i.min()), int(i.max())) if numerics.is_vector(i) else (i, i)
        if low < 0 or high >= n:
            test = np.asarray((i >= 0) & (i < n))
            good = test if good is None else good & test
    if good is not None:
        good = _spread(good, ex.lanes)
        wrong = ~good if ex.mask is None else ~good & ex.mask
        if not storage.is_global and wrong.any():
            out = tuple(np.broadcast_to(i, ex.lanes)[wrong] for i in key)
            ex.machine.report_outside(ex, storage.name, storage.shape, site, describe(storage.name, out))
    active = ex.mask if good is None else good if ex.mask is None else good & ex.mask
    if active is None:
        # Together they mostly reach over all lanes: to spread each would cost as much as the access.
        spans = np.broadcast(*key).shape == ex.lanes
        return None, key if spans else tuple(_spread(i, ex.lanes) for i in key)
    active = _spread(active, ex.lanes)
    return active, tuple(_spread(i, ex.lanes)[active] for i in key)


def _spread(value: Any, lanes: tuple[int, ...]) -> Any:
    """A value for each lane. Many are so already, which NumPy finds out as slowly as it spreads others."""
    return value if numerics.is_vector(value) and value.shape == lanes else np.broadcast_to(value, lanes)


def _gather(ex: Any, storage: Storage, key: tuple[Any, ...], site: Site, tested: bool) -> Any:
    active, chosen = select(ex, storage, key, site)
    storage.record(ex, chosen, "read", site)
    if tested:
        _meet(ex, storage, active, chosen, "read", site)
    value = numerics.decode(np.asarray(storage.data[chosen]), storage.dtype)
    if active is None:
        return value
    out = np.zeros(ex.lanes, numerics.compute(storage.dtype))
    out[active] = value
    return out


def _scatter(ex: Any, storage: Storage, key: tuple[Any, ...], value: Any, site: Site, tested: bool) -> None:
    active, chosen = select(ex, storage, key, site)
    storage.record(ex, chosen, "write", site)
    if tested:
        _meet(ex, storage, active, chosen, "write", site)
    if numerics.is_vector(value):
        value = _spread(value, ex.lanes)
        value = value if active is None else value[active]
    storage.data[chosen] = value


def moving(ex: Any, src: Any, dst: Any, where: Any) -> Callable[[], None]:
    """A copy of an element for each lane from one view to another, of zero in lanes where ``where`` does not
    hold, as what moves the data later. Whose elements they are is settled now."""
    with masked(ex, np.broadcast_to(where, ex.lanes)) as some:
        source = src.storage(ex, None)
        active, chosen = select(ex, source, src.index(ex), src.site) if some else (None, None)
    target = dst.storage(ex, None)
    filled, places = select(ex, target, dst.index(ex), dst.site)
    lanes = ex.lanes

    def move() -> None:
        values = np.zeros(lanes, target.data.dtype)
        if chosen is not None:
            values[... if active is None else active] = source.data[chosen]
        target.data[places] = values if filled is None else values[filled]

    return move


def _meet(ex: Any, storage: Storage, active: Any, key: Any, mode: str, site: Site) -> None:
    """Compares with what other lanes of this nest did to the same elements."""
    if id(storage) not in ex.touched:
        ex.touched[id(storage)] = (
            np.full(storage.shape, NOBODY, np.int64),
            np.full(storage.shape, NOBODY, np.int64),
        )
    writers, readers = ex.touched[id(storage)]
    lanes = np.arange(int(np.prod(ex.lanes)), dtype=np.int64).reshape(ex.lanes)
    me = lanes if active is None else lanes[active]
    wrote = writers[key]
    bad = (wrote != NOBODY) & (wrote != me)
    if mode == "write":
        read = readers[key]
        bad |= (read != NOBODY) & (read != me)
        writers[key] = me
        bad |= writers[key] != me
    else:
        before = readers[key]
        readers[key] = np.where((before == NOBODY) | (before == me), me, SEVERAL)
        again = readers[key]
        readers[key] = np.where((again == me) | (again == SEVERAL), again, SEVERAL)
    if bad.any():
        region = describe(storage.name, key, bad)
        what = "writes" if mode == "write" else "reads"
        text = (
            f"an iteration of this T.Parallel loop {what} {region}{storage.shared}, which another iteration "
            "touches too, one of them writing"
        )
        hint, fix = (
            "T.serial, an atomic update, or one of T.reduce_*",
            fixes.one_by_one(ex.machine.prepared.nest_of.get(site.number)),
        )
        ex.machine.report.add(Finding("collision", text, ex.where(site, region), hint=hint, fix=fix))


# ---- the loops


@functools.lru_cache(maxsize=1024)
def _grid(lanes: tuple[int, ...], dtypes: tuple[str, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Of a nest with so many iterations: its variables' values, of ``dtypes``, and the indices of its lanes,
    each along an axis of its own. Nobody writes into them."""
    index = tuple(np.ogrid[tuple(slice(n) for n in lanes)])
    values = tuple(i.astype(dt) for i, dt in zip(index, dtypes, strict=True))
    for array in (*index, *values):
        array.flags.writeable = False
    return values, index


def parallel(cx: Preparation, s: Any) -> Step:
    """A nest of T.Parallel (or T.vectorized) loops."""
    loops = loops_of(s)
    body = loops[-1].body
    variables, dtypes = [cx.slot(x.loop_var) for x in loops], tuple(str(x.loop_var.ty) for x in loops)
    extents = [cx.scalar(x.extent) for x in loops]
    if _diverges(body, {x.loop_var for x in loops}):
        return _one_by_one(cx, variables, extents, body)
    outer = cx.lane_buffers, cx.tested
    cx.lane_buffers = {*outer[0], *_allocated(body)}
    cx.tested = _to_test(body, [x.loop_var for x in loops]) - cx.lane_buffers
    inner = cx.stmt(body, quiet=True)
    cx.lane_buffers, cx.tested = outer

    def run(ex: Any) -> None:
        lanes = tuple(n(ex) for n in extents)
        if min(lanes) <= 0:
            return
        values, ex.lane_index = _grid(lanes, dtypes)
        for slot, value in zip(variables, values, strict=True):
            ex.v[slot] = value
        ex.lanes = lanes
        ex.touched = {}
        inner.run(ex)
        ex.lanes, ex.mask, ex.lane_index = None, None, ()

    return Step(run)


def _one_by_one(cx: Preparation, variables: list[int], extents: list[Any], body: Any) -> Step:
    inner = cx.stmt(body)

    def rounds(ex: Any) -> Iterator[None]:
        for index in np.ndindex(*(max(0, n(ex)) for n in extents)):
            for slot, i in zip(variables, index, strict=True):
                ex.v[slot] = i
            yield

    def run(ex: Any) -> None:
        for _ in rounds(ex):
            inner.run(ex)

    def slowly(ex: Any) -> Iterator[str]:
        for _ in rounds(ex):
            yield from inner.run(ex)

    return Step(slowly, True) if inner.yields else Step(run)


def _allocated(body: Any) -> set[Any]:
    found: set[Any] = set()
    structural_walk(body, (tirx.AllocBuffer, lambda s: found.add(s.buffer)))
    return found


def _diverges(body: Any, variables: set[Any]) -> bool:
    """Whether lanes may need different control flow than masks give: loops whose bounds depend on the lane,
    operations on tiles."""
    own = set(variables)
    structural_walk(body, (tirx.Bind, lambda s: own.add(s.var)))
    found: list[Any] = []

    def loop(s: Any) -> None:
        if s.kind in (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED):
            found.append(s)
        structural_walk(s.extent, (ir.Var, lambda v: found.append(v) if v in own else None))
        structural_walk(s.extent, (ir.TensorLoad, found.append))

    def call(c: Any) -> None:
        op = find(c)
        if op is not None and not (op.in_lanes and str(c.ty) == str(VOID) and _single(c)):
            found.append(c)

    structural_walk(body, (tirx.For, loop))
    structural_walk(body, ((tirx.While, tirx.DeclBuffer), found.append))
    structural_walk(body, (ir.Call, call))
    return bool(found)


def _single(call: Any) -> bool:
    """Whether every region of a call is one element."""
    regions = [a for a in call.args if isinstance(a, ir.TensorRegion)]
    return all(
        isinstance(r.extent, tirx.IntImm) and int(r.extent.value) == 1
        for region in regions
        for r in region.region
    )


def _to_test(body: Any, variables: list[Any]) -> set[Any]:
    """Buffers that the nest stores to, unless every access of one has the same indices and they name each
    loop variable: then every iteration has elements of its own."""
    accesses: dict[Any, list[Any]] = {}
    stored: set[Any] = set()
    structural_walk(
        body, (ir.TensorLoad, lambda e: accesses.setdefault(e.source, []).append(list(e.indices)))
    )

    def note(s: Any) -> None:
        stored.add(s.buffer)
        accesses.setdefault(s.buffer, []).append(list(s.indices))

    structural_walk(body, (tirx.BufferStore, note))

    def safe(lists: list[Any]) -> bool:
        first = lists[0]
        texts = [str(i) for i in first]
        return all(any(i.same_as(v) for i in first) for v in variables) and all(
            [str(i) for i in other] == texts for other in lists
        )

    return {buffer for buffer in stored if not safe(accesses[buffer])}
