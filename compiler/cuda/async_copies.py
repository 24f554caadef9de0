"""Copies from global to shared memory that products pass by: threads start them (PTX ISA 9.0, "cp.async") and await them where somebody
may need what they bring, so that neither a thread nor a register waits for memory.

A loop of plain loads and stores becomes one of cp.async where, between it and the next statement of the same sequence that may need the
tile, there is a product. May need it: what touches its bytes, and whatever may let other threads go on. In front of that the thread's
copies are committed and awaited, so its own accesses, and whomever it meets behind, find them done: a thread's cp.async is like its
store from the wait on. Sources are tensors that no block writes, whose numbers are the same at any time until then; in front of the copy
the tile's earlier readers and writers have been met, since a plain store would ask for that too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from tilescale.compiler.cuda.cp_async import SIZES
from tilescale.compiler.cuda.rings import call
from tilescale.compiler.frontend.builder import sequence
from tilescale.compiler.layout.loops import bits_of
from tilescale.compiler.tvm_compat import EXTERN_CALLS, ir, structural_map, structural_walk, tirx

PRODUCTS = ("ts::mma_",)
#: what only computes, beside the memory that its arguments name
HARMLESS = (*PRODUCTS, "ts::ldmatrix", "ts::add2", "ts::sub2", "ts::mul2", "ts::and_or", "ts::cp_async<", "ts::ask")


def async_copies(body: Any, tensors: set[Any]) -> Any:
    """Thread IR in which copies of ``tensors`` run beside the products behind them."""
    places: dict[Any, tuple[int, int]] = {}
    structural_walk(body, (tirx.DeclBuffer, lambda s: _place(s, places)))
    return _Copies(tensors, places).statement(body)


def _place(s: Any, places: dict[Any, tuple[int, int]]) -> None:
    """The bytes of a tile in the arena; of a view of one those of the whole tile."""
    found: list[int] = []
    seen: list[Any] = []
    structural_walk(s.data, (ir.Call, lambda c: found.append(int(c.args[1])) if c.op.name == "tirx.handle_add_byte_offset" else None))
    structural_walk(s.data, (ir.Var, lambda v: seen.append(v) if v in places else None))
    if found:
        places[s.buffer] = (found[0], found[0] + prod(int(e) for e in s.buffer.ty.shape) * bits_of(s.buffer) // 8)
    elif seen:
        places[s.buffer] = places[seen[0]]


@dataclass
class _Copies:
    tensors: set[Any]
    #: tile → its bytes in the arena
    places: dict[Any, tuple[int, int]]

    def statement(self, s: Any) -> Any:
        """Behind conditions nothing changes: all threads of a warp must commit together."""
        if isinstance(s, tirx.SeqStmt):
            return self.sequence(list(s.seq))
        if isinstance(s, tirx.For) and s.kind == tirx.ForKind.SERIAL:
            notes = dict(s.annotations) if s.annotations else {}
            return tirx.For(s.loop_var, s.min, s.extent, s.kind, self.statement(s.body), annotations=notes, span=s.span)
        if isinstance(s, tirx.AttrStmt):
            return tirx.AttrStmt(s.node, s.attr_key, s.value, self.statement(s.body), s.span)
        return s

    def sequence(self, stmts: list[Any]) -> Any:
        started: dict[int, Any] = {}
        awaited: set[int] = set()
        for k, s in enumerate(stmts):
            tile = self.copied(s)
            if tile is None:
                continue
            end = next((j for j in range(k + 1, len(stmts)) if self.needs(stmts[j], tile)), None)
            if end is not None and any(_called(x, PRODUCTS) for x in stmts[k + 1 : end]):
                started[k] = structural_map(s, (tirx.BufferStore, self.copy))
                awaited.add(end)
        out: list[Any] = []
        for k, s in enumerate(stmts):
            if k in awaited:
                out += [call("cp_async_commit"), call("cp_async_wait<0>")]
            out.append(started[k] if k in started else self.statement(s))
        return sequence(out)

    def copied(self, s: Any) -> Any | None:
        """The one tile that a statement copies into, if it does nothing else."""
        stores: list[Any] = []
        structural_walk(s, (tirx.BufferStore, stores.append))
        calls: list[Any] = []
        structural_walk(s, (ir.Call, lambda c: calls.append(c) if c.op.name in EXTERN_CALLS else None))
        tiles = {t.buffer for t in stores}
        loads = [t for t in stores if self.asynchronous(t)]
        constant = [t for t in stores if _constant(t.value)]
        if not loads or calls or len(tiles) != 1 or len(loads) + len(constant) < len(stores):
            return None
        (tile,) = tiles
        return tile if tile in self.places else None

    def asynchronous(self, store: Any) -> bool:
        """Whether a store is what one instruction can do: from a tensor, without a change of dtype, 4, 8 or 16 bytes side by side."""
        load = store.value
        if not isinstance(load, ir.TensorLoad) or load.source not in self.tensors or len(store.indices) != 1:
            return False
        sides = [load.indices[0], store.indices[0]]
        same = str(load.source.ty.dtype) == str(store.buffer.ty.dtype)
        lanes = {int(i.lanes) if isinstance(i, tirx.Ramp) and int(i.stride) == 1 else 1 for i in sides}
        return same and len(lanes) == 1 and lanes.pop() * bits_of(store.buffer) // 8 in SIZES

    def copy(self, store: Any) -> Any:
        if not self.asynchronous(store):
            return store
        (to,), (start,) = store.indices, store.value.indices
        size = (int(to.lanes) if isinstance(to, tirx.Ramp) else 1) * bits_of(store.buffer) // 8
        first = [i.base if isinstance(i, tirx.Ramp) else i for i in (to, start)]
        ends = [tirx.address_of(tirx.BufferLoad(b, [i])) for b, i in zip((store.buffer, store.value.source), first, strict=True)]
        return call(f"cp_async<{size}>", *ends, span=store.span)

    def needs(self, s: Any, tile: Any) -> bool:
        """Whether a statement touches the tile's bytes, or may let other threads go on."""
        touched: set[Any] = set()
        unknown: list[Any] = []
        structural_walk(s, (tirx.BufferStore, lambda x: touched.add(x.buffer)))
        structural_walk(s, (ir.TensorLoad, lambda e: touched.add(e.source)))
        structural_walk(s, (ir.Call, lambda c: unknown.append(c) if c.op.name in EXTERN_CALLS and not _one_of(c, HARMLESS) else None))
        structural_walk(s, (ir.Call, lambda c: touched.add(c.args[0]) if c.op.name == "tirx.buffer_data" else None))
        begin, end = self.places[tile]
        near = [self.places.get(b) for b in touched if str(b.ty.storage_scope).startswith("shared")]
        return bool(unknown) or any(p is None or (p[0] < end and begin < p[1]) for p in near)


def _one_of(c: Any, names: tuple[str, ...]) -> bool:
    return str(c.args[0].value).startswith(names)


def _called(s: Any, names: tuple[str, ...]) -> bool:
    found: list[Any] = []
    structural_walk(s, (ir.Call, lambda c: found.append(c) if c.op.name in EXTERN_CALLS and _one_of(c, names) else None))
    return bool(found)


def _constant(value: Any) -> bool:
    return isinstance(value.value if isinstance(value, tirx.Broadcast) else value, (tirx.IntImm, tirx.FloatImm))
