"""Results leave by TMA: a fragment that a consumer copies to a tensor goes through a swizzled tile of shared memory, from which TMA stores
it while the threads go on (PTX ISA 9.0, "cp.async.bulk.tensor").

    for each part of so many columns:
        await_stores(staged)                     TMA has read what the part before left there
        copy(fragment[:, part] → staged)         by the threads
        copy(staged → tensor[…, part])           by TMA

An atomic update of a region by a whole fragment (T.atomic_add, _min, _max) goes the same way, as TMA combines what it stores with what
lies there (PTX ISA 9.0, "cp.reduce.async.bulk.tensor").

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
<<<<<<< HEAD
from tilescale.compiler.ir.nests import long_axes, nest_of
from tilescale.compiler.ir.rewrite import rebuild
from tilescale.compiler.layout.infer import Executor, scalar_reads, walk
from tilescale.compiler.layout.loops import bits_of, element_dtype, in_registers
from tilescale.compiler.ops import base
from tilescale.compiler.ops.bulk import await_stores, fence_writes
from tilescale.compiler.passes.gpu_stage import again, is_whole, whole
from tilescale.compiler.passes.roles import calls, meets
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, sym, tirx
=======
from tilescale.compiler.ir.multiples import is_multiple
from tilescale.compiler.ir.nests import long_axes, nest_of
from tilescale.compiler.layout.loops import bits_of, element_dtype, in_registers
from tilescale.compiler.ops import base
from tilescale.compiler.ops.bulk import await_stores
from tilescale.compiler.ops.mbarrier import REDUCTIONS
from tilescale.compiler.passes.gpu_stage import again, copy_statement, is_whole, whole
from tilescale.compiler.passes.products import flat, name_of, touched
from tilescale.compiler.passes.roles import meets, polls, releases
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx
>>>>>>> main

#: bytes of a box's row: the widest swizzle
ROW = 128
#: axes of a tensor that TMA can copy
MOST_AXES = 5


def tma_stores(program: Any, room: int) -> Any:
<<<<<<< HEAD
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
=======
    """The program with the results that TMA can store staged, in at most ``room`` bytes of shared memory each."""
    body = program.func.body
    tensors = _touched(program)
    if any(_tells(s) and not _fits(s.value, program, tensors) for s in _operations(body)):
        return program
    staged: dict[Any, Any] = {}

    def store(s: Any) -> Any:
        call = s.value
        if not _fits(call, program, tensors):
            return s
        src, dst = _ends(call)
        rows, cols = (int(e) for e in src.source.ty.shape)
        kind = element_dtype(dst.source)
        wide = _width(rows, cols, bits_of(dst.source), room)
        if not wide or wide < cols and call.op.name == "ts.atomic":
            return s  # parts of an update would wait for one another in the middle of a loop
        tile = staged.setdefault((rows, wide, kind), _tile(dst.source.name, rows, wide, kind))
        return sequence(list(_parts(call, tile, cols // wide, wide)))

    body = structural_map(body, (tirx.Evaluate, lambda s: store(s) if isinstance(s.value, ir.Call) else s))
    if not staged:
        return program
    body = structural_map(body, (tirx.For, lambda f: _awaited_early(f, set(staged.values()))))
    return program.with_body(_around(body, list(staged.values())))


def _awaited_early(loop: Any, staged: set[Any]) -> Any:
    """A loop whose stores of a round before are awaited in front of what threads write to shared memory last before this round's, and of
    the meeting with its readers: that one then orders TMA's reads before the next writes of their tile too, which need none of their own.
    Where the last such write stands behind the stores, in the round before, the first round's wait is in front of the loop."""
    if not isinstance(loop.body, tirx.SeqStmt) or nest_of(loop) is not None:
        return loop
    stmts, outside = flat(loop.body), []
    for s in list(stmts):
        tile = s.value.args[0].source if name_of(s) == "await_stores" else None
        if tile not in staged or sum(name_of(x) == "await_stores" and x.value.args[0].source.same_as(tile) for x in stmts) > 1:
            continue
        k = stmts.index(s)
        end = next(i for i in reversed(range(len(stmts))) if _uses(stmts[i], tile)) + 1
        turned = stmts[end:] + stmts[:k]  # from the last use of the tile to the next
        for at in reversed(range(len(turned))):
            written = {b for b in touched(turned[at])[1] if b.ty.storage_scope == "shared"}
            if written and any(written & touched(x)[0] for x in turned[at + 1 :]):
                place = turned[at]
                break
        else:
            continue
        if any(x is place for x in stmts[end:]):
            outside.append(s)
        stmts = [x for x in stmts if x is not s]
        stmts.insert(next(i for i, x in enumerate(stmts) if x is place), s)
    made = sequence(stmts)
    notes = dict(loop.annotations or {})
    return sequence([*outside, tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, made, annotations=notes, span=loop.span)])


def _uses(s: Any, buffer: Any) -> bool:
    return any(buffer in found for found in touched(s))


def _operations(body: Any) -> list[Any]:
    found: list[Any] = []
    structural_walk(body, (tirx.Evaluate, lambda s: found.append(s) if base.find(s.value) is not None else None))
    structural_walk(body, (tirx.Bind, lambda s: found.append(s) if base.find(s.value) is not None else None))
    return found


def _tells(s: Any) -> bool:
    """Whether others may learn by an operation what the block did before it."""
    return meets(s.value) or polls(s.value) or releases(s)


def _ends(call: Any) -> tuple[Any, Any]:
    """What a copy or an update reads, and what it writes."""
    return (call.args[1], call.args[0]) if call.op.name == "ts.atomic" else (call.args[0], call.args[1])


def _leaves(call: Any) -> bool:
    """Whether a call copies a tile of this rank's, or combines one with what lies where it goes, as TMA can."""
    if call.op.name == "ts.atomic":
        kind, tile = str(call.attrs["kind"]), call.args[1]
        return isinstance(tile, ir.TensorRegion) and element_dtype(call.args[0].source) in REDUCTIONS.get(kind, ())
    return call.op.name == "ts.copy" and not str(call.attrs["side"]) and "ring" not in call.attrs and len(call.args) <= 3


def _fits(call: Any, program: Any, tensors: dict[Any, list[str]]) -> bool:
    """Whether a call takes a whole fragment to where TMA can store it."""
    if not _leaves(call):
>>>>>>> main
        return False
    src, dst = _ends(call)
    var = dst.source
    if not (in_registers(src.source) and is_whole(src) and len(src.source.ty.shape) == 2):
        return False
<<<<<<< HEAD
    if all(not p.var.same_as(var) for p in program.params) or var.ty.storage_scope != "global" or var not in writers:
=======
    if all(not p.var.same_as(var) for p in program.params) or var.ty.storage_scope != "global":
        return False
    if tensors[var] not in ([call.op.name], ["ts.atomic"] * len(tensors[var])):
>>>>>>> main
        return False
    shape, axes = list(var.ty.shape), long_axes(dst)
    tile = [int(e) for e in src.source.ty.shape]
    return (
        len(shape) <= MOST_AXES
        and not list(var.ty.strides)
        and str(call.attrs["executor"]) == "block"
        and len(axes) == 2
        and axes[-1] == len(shape) - 1
        and [constant(dst.region[k].extent) for k in axes] == tile
        and is_multiple(shape[-1], 16 * 8 // bits_of(var))
        and bits_of(var) >= 8
        and tile[0] % 8 == 0
        and is_multiple(dst.region[axes[-1]].min, 16 * 8 // bits_of(var))
    )


<<<<<<< HEAD
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
=======
def _touched(program: Any) -> dict[Any, list[str]]:
    """Which operations touch each tensor; "" for what is none."""
    found: dict[Any, list[str]] = {}

    def one(buffer: Any, by: str = "") -> None:
        found.setdefault(buffer, []).append(by)

    def operation(c: Any) -> None:
        op = base.find(c)
        for buffer in {a.region.source for a in op.effects(c)} if op is not None else ():
            one(buffer, c.op.name)

    structural_walk(program.func.body, (ir.Call, operation))
    structural_walk(program.func.body, (ir.TensorLoad, lambda e: one(e.source)))
    structural_walk(program.func.body, (tirx.BufferStore, lambda s: one(s.buffer)))
    structural_walk(program.func.body, (tirx.DeclBuffer, lambda s: one(s.data.args[0])))
    return found
>>>>>>> main


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


<<<<<<< HEAD
def _parts(call: Any, tile: Any) -> Iterator[Any]:
    src, dst = call.args[:2]
    rows, wide = (int(e) for e in tile.ty.shape)
=======
def _parts(call: Any, tile: Any, count: int, wide: int) -> Iterator[Any]:
    src, dst = _ends(call)
    rows = int(src.source.ty.shape[0])
>>>>>>> main
    staged = whole(tile)
    axis = long_axes(dst)[-1]
    for k in range(int(src.source.ty.shape[1]) // wide):
        into = [r.min + k * wide if j == axis and k else r.min for j, r in enumerate(dst.region)]
        extents = [wide if j == axis else r.extent for j, r in enumerate(dst.region)]
        yield await_stores(staged, call.span)
        yield copy_statement(_region(src.source, [0, k * wide], [rows, wide]), staged, call)
        to = _region(dst.source, into, extents)
        yield again(call, [to, staged] if call.op.name == "ts.atomic" else [staged, to, call.args[2]], {"bulk": 1})


def _around(body: Any, tiles: list[Any]) -> Any:
    """The consumer's part with the tiles in front, and behind it the wait for the last stores: their memory is this block's as long as
    it runs."""

    def consumer(s: Any) -> Any:
        if s.attr_key != "ts.role" or str(s.node.value) != "consumer":
            return s
        ends = [await_stores(whole(t), s.span) for t in tiles]
        return tirx.AttrStmt(s.node, s.attr_key, s.value, sequence([*(tirx.AllocBuffer(t) for t in tiles), s.body, *ends]), s.span)

    return structural_map(body, (tirx.AttrStmt, consumer))
