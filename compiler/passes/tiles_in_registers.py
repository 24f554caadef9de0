"""Shared tiles of which each thread touches no element but its own become registers. Of

    T.copy(X[row, 0], x); T.copy(weight, w)
    for j in T.Parallel(N): x[j] = x[j] * scale * w[j]
    T.copy(x, Y[row, 0])

no thread reads what another one has written, so the tiles are a detour: twice through shared memory, of
which the L1 cache, where ``weight`` would stay for the next blocks, has all the less. (Layernorm of 8,192
columns on an H200: 48 µs, and 39 without the tiles, of four blocks that left L1 28 KiB.)

Only where nothing else is decided by it: every use is of the whole tile, element by element in its order, and
the layout that the tile has among the fragments beside it is that of a copy between memories, 16 bytes a
thread, side by side. A tile that brings a product's result into that order stays. So does one that needs more
registers than a quarter of a thread's."""

from __future__ import annotations

from math import prod
from typing import Any

from tilescale.compiler.ir.buffers import buffer_uses, redirected
from tilescale.compiler.ir.nests import nest_of
from tilescale.compiler.ir.operations import name_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.scales import Executor
from tilescale.compiler.ir.walks import walk
from tilescale.compiler.layout import Fragment
from tilescale.compiler.layout.infer import infer
from tilescale.compiler.layout.loops import bits_of, element_dtype, plain_index
from tilescale.compiler.passes.products import has_producer
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx
from tilescale.errors import TileValueError

#: bytes of registers that such tiles may take of each thread
BUDGET = 256
#: bits of an access to memory, the widest that there are
WIDE = 128
#: bits that neighbours should have side by side: a line of the L1 cache
SIDE_BY_SIDE = 1024


def tiles_in_registers(program: TileProgram) -> TileProgram:
    """The program, whose tiles of that kind are fragments."""
    tiles = [] if has_producer(program) else _candidates(program)
    while tiles:
        new = {b: _fragment(b) for b in tiles}
        made = program.with_body(_with(program.func.body, new))
        try:
            layouts = infer(made)
        except TileValueError:  # two statements want it otherwise, each in its own way
            return program
        fit = [b for b in tiles if _is_straight(layouts.get(new[b]), b)]
        if fit == tiles:
            return made
        tiles = fit
    return program


def _candidates(program: TileProgram) -> list[Any]:
    """The block's shared tiles that are used whole, element by element in their order, and nowhere else, in
    the order of the program, as many as there are registers for."""
    uses, seen = buffer_uses(program.func.body), dict[Any, int]()
    refused: set[Any] = set(program.hints.get("layouts", {})) | set(program.schedule.ring_of)
    allocated: list[Any] = []
    block = Executor("block", program.launch.threads)
    for s, ex in walk(program.func.body, block):
        if ex != block:
            continue
        if isinstance(s, tirx.AllocBuffer):
            allocated.append(s.buffer)
        elif (nest := nest_of(s)) is not None and (isinstance(s, tirx.For) or name_of(s) in ("copy", "fill")):
            tiles = [a for a in nest.accesses if a.buffer.ty.storage_scope == "shared"]
            refused |= {a.buffer for a in tiles if a.conditional or not _in_order(nest, a)}
            if isinstance(s, tirx.For):
                refused |= _updated(s)
            for b, n in buffer_uses(s).items():
                seen[b] = seen.get(b, 0) + n
    found, taken = list[Any](), 0
    for b in allocated:
        if b.ty.storage_scope != "shared" or b in refused or seen.get(b, 0) != uses.get(b, 0):
            continue
        each = prod(int(e) for e in b.ty.shape) * bits_of(b) // 8 // program.launch.threads
        if each >= WIDE // 8 and taken + each <= BUDGET:
            found.append(b)
            taken += each
    return found


def _updated(nest: Any) -> set[Any]:
    """What operations in a loop over elements name: atomics, which registers have none of."""
    found: set[Any] = set()
    structural_walk(nest, (ir.TensorRegion, lambda r: found.add(r.source)))
    return found


def _in_order(nest: Any, access: Any) -> bool:
    """Whether a nest's iterations are the elements of a tile, in its order: axes of more than one element are
    its variables of more than one value."""
    if not nest.is_static:
        return False
    extents = [(k, int(e)) for k, e in enumerate(nest.extents) if int(e) > 1]
    axes = [
        (plain_index(i, nest.vars), int(e))
        for i, e in zip(access.indices, access.buffer.ty.shape, strict=True)
        if int(e) > 1
    ]
    return [(k, e) for k, e in extents] == [
        (at[0], e) if at is not None and at[1] == 0 else (-1, e) for at, e in axes
    ]


def _is_straight(layout: Any, tile: Any) -> bool:
    """Whether a layout is that of a copy: each element in one thread, 16 or 32 bytes of a row in each, those
    of neighbours side by side for 128 bytes, or the row's end."""
    if not isinstance(layout, Fragment) or layout.slots * layout.threads != prod(layout.shape):
        return False
    last, bits = len(layout.shape) - 1, bits_of(tile)
    vector = layout.vector(last)
    beside = next((p for p in layout.pieces if p.to == "thread" and p.stride == 1), None)
    return (
        vector * bits in (WIDE, 2 * WIDE)
        and beside is not None
        and (beside.axis, beside.unit) == (last, vector)
        and (beside.extent * vector * bits >= SIDE_BY_SIDE or beside.extent * vector == layout.shape[last])
    )


def _fragment(tile: Any) -> Any:
    return tirx.decl_buffer(
        tuple(tile.ty.shape),
        element_dtype(tile),
        tile.name,
        scope="local.fragment",
        data_alignment=64,
        layout=None,
    )


def _with(body: Any, new: dict[Any, Any]) -> Any:
    def allocated(s: Any) -> Any:
        return tirx.AllocBuffer(new[s.buffer], {}, s.span) if s.buffer in new else s

    return structural_map(redirected(body, new), (tirx.AllocBuffer, allocated))
