"""Results leave by TMA: a fragment that a consumer copies to a tensor goes through a swizzled tile of shared memory, from which TMA stores
it while the threads go on (PTX ISA 9.0, "cp.async.bulk.tensor").

    for each part of so many columns:
        await_stores(staged)                     TMA has read what the part before left there
        copy(fragment[:, part] → staged)         by the threads
        copy(staged → tensor[…, part])           by TMA

The fences between these follow from their effects (passes/fences.py), the one in front of TMA's read with a proxy fence. The tile takes
what the ring leaves of shared memory; where that is not one box wide, and where TMA cannot store the tensor, threads store directly.

TMA's writes are not the threads' own: nothing orders them before a later access but a wait for the whole store, and at the kernel's end
all are visible. So only tensors that the kernel never reads go this way, in kernels that tell other ranks nothing and meet no other blocks.
Such a wait stands in front of an atomic update, which tells blocks of what came before it, in front of what threads write to the same
tensor, and in front of a store that may touch what another statement stores.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from tilescale.compiler.frontend.builder import sequence
from tilescale.compiler.frontend.values import constant
from tilescale.compiler.ir.nests import long_axes, nest_of
from tilescale.compiler.ir.rewrite import rebuild
from tilescale.compiler.layout.infer import Executor, scalar_reads, walk
from tilescale.compiler.layout.loops import bits_of, element_dtype, in_registers
from tilescale.compiler.ops import base
from tilescale.compiler.ops.bulk import await_stores, fence_writes
from tilescale.compiler.passes.gpu_stage import again, is_whole, whole
from tilescale.compiler.passes.roles import calls, meets
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, sym, tirx

#: bytes of a box's row: the widest swizzle
ROW = 128
#: axes of a tensor that TMA can copy
MOST_AXES = 5


def tma_stores(program: Any, room: int) -> Any:
    """The program with the results that TMA can store staged, in ``room`` bytes of shared memory at most."""
    if any(_tells_others(c) for c in calls(program.func.body)):
        return program
    every = Executor("block", program.launch.threads)
    statements = list(walk(program.func.body, every))
    if any(_atomics(s) and not _alone(s, ex) for s, ex in statements):
        return program
    writers = _writers(program, [s for s, _ in statements])
    tiles: dict[Any, Any] = {}
    staged: dict[Any, Any] = {}  # statement → the tile that it goes through
    for s, _ in statements:
        if isinstance(s, tirx.Evaluate) and isinstance(s.value, ir.Call) and _fits(s.value, program, writers):
            if (tile := _staging(s.value, tiles, room)) is not None:
                staged[s] = tile
    if not staged:
        return program
    through = {s.value.args[1].source: tile for s, tile in staged.items()}

    def leaf(s: Any, ex: Executor) -> list[Any] | None:
        if s in staged:
            mine = [x for x in writers[s.value.args[1].source] if not x.same_as(s) and x in staged]
            free = all(_apart(s.value.args[1], x.value.args[1]) for x in mine)
            return [*([] if free else [await_stores(whole(staged[s]), s.span, complete=True)]), *_parts(s.value, staged[s])]
        if _atomics(s):
            return [await_stores(whole(next(iter(tiles.values()))), s.span, complete=True), s]
        tile = next((t for b, t in through.items() if any(s.same_as(x) for x in writers[b])), None)
        if tile is not None:
            return [await_stores(whole(tile), s.span, complete=True), s, fence_writes(s.span)]
        return None

    return program.with_body(_around(rebuild(program.func.body, every, leaf), list(tiles.values())))


def _tells_others(call: Any) -> bool:
    """Whether a call meets other blocks, or signals."""
    return meets(call) or call.op.name == "ts.signal" or call.op.name == "ts.copy" and len(call.args) > 3


def _atomics(s: Any) -> list[Any]:
    """The atomic updates of global memory in a statement, loads aside, which tell nobody anything."""
    if isinstance(s, (tirx.For, tirx.While, tirx.IfThenElse)) and nest_of(s) is None:
        return []  # those inside are statements of their own
    found = [c for c in calls(s) if c.op.name == "ts.atomic" and str(c.attrs["kind"]) != "load"]
    return [c for c in found if c.args[0].source.ty.storage_scope.startswith("global")]


def _alone(s: Any, ex: Executor) -> bool:
    """Whether the block's first thread makes a statement's atomic updates, which is the one that issues and awaits stores."""
    single = all(constant(r.extent) == 1 for c in _atomics(s) for r in c.args[0].region)
    return single and ex.name == "block" and isinstance(s, (tirx.Evaluate, tirx.Bind))


def _apart(a: Any, b: Any) -> bool:
    """Whether two regions of a tensor are known to have no element in common: along some axis one ends before the other begins."""
    analyzer = sym.Analyzer()
    for x, y in zip(a.region, b.region, strict=True):
        distance, first, second = constant(analyzer.simplify(y.min - x.min)), constant(x.extent), constant(y.extent)
        if None not in (distance, first, second) and (distance >= first or -distance >= second):
            return True
    return False


def _fits(call: Any, program: Any, writers: dict[Any, list[Any]]) -> bool:
    """Whether a call copies a whole fragment to where TMA can store it."""
    if call.op.name != "ts.copy" or str(call.attrs["side"]) or "ring" in call.attrs or len(call.args) > 3:
        return False
    src, dst = call.args[:2]
    var = dst.source
    if not (in_registers(src.source) and is_whole(src) and len(src.source.ty.shape) == 2):
        return False
    if all(not p.var.same_as(var) for p in program.params) or var.ty.storage_scope != "global" or var not in writers:
        return False
    shape, axes = list(var.ty.shape), long_axes(dst)
    tile = [int(e) for e in src.source.ty.shape]
    row = constant(shape[-1])
    return (
        len(shape) <= MOST_AXES
        and not list(var.ty.strides)
        and str(call.attrs["executor"]) == "block"
        and len(axes) == 2
        and axes[-1] == len(shape) - 1
        and [constant(dst.region[k].extent) for k in axes] == tile
        and row is not None
        and row * bits_of(var) // 8 % 16 == 0
        and bits_of(var) >= 8
        and tile[0] % 8 == 0
        and _multiple(dst.region[axes[-1]].min, 16 * 8 // bits_of(var))
    )


def _multiple(e: Any, of: int) -> bool:
    """Whether an index is known to be a multiple: TMA's coordinates along rows must come to 16 bytes."""
    found = sym.Analyzer().modular_set(e)
    return int(found.coeff) % of == 0 and int(found.base) % of == 0


def _writers(program: Any, statements: list[Any]) -> dict[Any, list[Any]]:
    """The tensors that a kernel writes, never reads and never updates, each with the statements that do."""
    found: dict[Any, list[Any]] = {}
    other: set[Any] = set()
    structural_walk(program.func.body, (tirx.DeclBuffer, lambda s: other.add(s.data.args[0])))
    for s in statements:
        nest = nest_of(s)
        op = base.find(s.value) if nest is None and isinstance(s, (tirx.Evaluate, tirx.Bind)) else None
        touched = [(a.buffer, a.mode) for a in nest.accesses] if nest is not None else []
        touched += [(a.region.source, a.mode) for a in op.effects(s.value)] if op is not None else []
        touched += [(r.buffer, r.mode) for r in scalar_reads(s)] if nest is None else []
        other |= {b for b, mode in touched if mode != "write"}
        for b in {b: None for b, mode in touched if mode == "write"}:
            found.setdefault(b, []).append(s)
    return {b: of for b, of in found.items() if b not in other}


def _staging(call: Any, tiles: dict[Any, Any], room: int) -> Any:
    """The tile through which a result goes, one of ``tiles`` or a new one in what they leave of ``room``; None where it has no place."""
    rows, cols = (int(e) for e in call.args[0].source.ty.shape)
    to = call.args[1].source
    same = next((t for (high, wide, kind), t in tiles.items() if high == rows and cols % wide == 0 and kind == element_dtype(to)), None)
    if same is not None:
        return same
    used = sum(prod(int(e) for e in t.ty.shape) * bits_of(t) // 8 for t in tiles.values())
    wide = _width(rows, cols, bits_of(to), room - used)
    if not wide:
        return None
    kind = element_dtype(to)
    tiles[rows, wide, kind] = tirx.decl_buffer((rows, wide), kind, name=f"{to.name}_staged", scope="shared", layout=None)
    return tiles[rows, wide, kind]


def _width(rows: int, cols: int, bits: int, room: int) -> int:
    """Columns of a part: as many as fit, whole boxes that divide the fragment; 0 where there are none."""
    box = ROW * 8 // bits
    wide = cols
    while wide % box == 0 and wide * rows * bits // 8 > room:
        wide //= 2
    return wide if wide % box == 0 and cols % wide == 0 and wide > 0 else 0


def _region(var: Any, mins: list[Any], extents: list[Any]) -> Any:
    number = lambda x: tirx.IntImm("int32", x) if isinstance(x, int) else x  # noqa: E731
    return tirx.BufferRegion(var, [ir.Range.from_min_extent(number(m), number(e)) for m, e in zip(mins, extents, strict=True)])


def _parts(call: Any, tile: Any) -> Iterator[Any]:
    src, dst = call.args[:2]
    rows, wide = (int(e) for e in tile.ty.shape)
    staged = whole(tile)
    axis = long_axes(dst)[-1]
    for k in range(int(src.source.ty.shape[1]) // wide):
        into = [r.min + k * wide if j == axis and k else r.min for j, r in enumerate(dst.region)]
        extents = [wide if j == axis else r.extent for j, r in enumerate(dst.region)]
        yield await_stores(staged, call.span)
        yield again(call, [_region(src.source, [0, k * wide], [rows, wide]), staged, call.args[2]])
        yield again(call, [staged, _region(dst.source, into, extents), call.args[2]], {"bulk": 1})


def _around(body: Any, tiles: list[Any]) -> Any:
    """The consumer's part with the tiles in front, and behind it the wait for the last stores: their memory is this block's as long as
    it runs."""

    def consumer(s: Any) -> Any:
        if s.attr_key != "ts.role" or str(s.node.value) != "consumer":
            return s
        ends = [await_stores(whole(t), s.span) for t in tiles]
        return tirx.AttrStmt(s.node, s.attr_key, s.value, sequence([*(tirx.AllocBuffer(t) for t in tiles), s.body, *ends]), s.span)

    return structural_map(body, (tirx.AttrStmt, consumer))
