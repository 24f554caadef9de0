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

TMA's writes are not the threads' own: nothing orders them before a later access of this kernel but a wait for the whole store, so only
tensors that the kernel touches nowhere else go this way, and kernels that tell no one anything. At the kernel's end all are visible.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilescale.compiler.frontend.builder import sequence
from tilescale.compiler.frontend.values import constant
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

#: bytes of a box's row: the widest swizzle
ROW = 128
#: axes of a tensor that TMA can copy
MOST_AXES = 5


def tma_stores(program: Any, room: int) -> Any:
    """The program with the results that TMA can store staged, in at most ``room`` bytes of shared memory each."""
    body = program.func.body
    tensors, names = _touched(body), _names(body)
    if any(_tells(s) and not _fits(s.value, program, tensors, names) for s in _operations(body)):
        return program
    staged: dict[Any, Any] = {}

    def store(s: Any) -> Any:
        call = s.value
        if not _fits(call, program, tensors, names):
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


def _fits(call: Any, program: Any, tensors: dict[Any, list[str]], names: dict[Any, Any]) -> bool:
    """Whether a call takes a whole fragment to where TMA can store it. ``names``: what names stand for."""
    if not _leaves(call):
        return False
    src, dst = _ends(call)
    var = dst.source
    if not (in_registers(src.source) and is_whole(src) and len(src.source.ty.shape) == 2):
        return False
    if all(not p.var.same_as(var) for p in program.params) or var.ty.storage_scope != "global":
        return False
    if tensors[var] not in ([call.op.name], ["ts.atomic"] * len(tensors[var])):
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
        and is_multiple(_spelt_out(dst.region[axes[-1]].min, names), 16 * 8 // bits_of(var))
    )


def _names(body: Any) -> dict[Any, Any]:
    """What names are bound to."""
    found: dict[Any, Any] = {}
    structural_walk(body, (tirx.Bind, lambda s: found.__setitem__(s.var, s.value)))
    return found


def _spelt_out(e: Any, names: dict[Any, Any]) -> Any:
    from tilescale.compiler.cuda.vectors import spelt_out

    return spelt_out(e, names)


def _touched(s: Any) -> dict[Any, list[str]]:
    """Which of a statement's operations touch each tensor; "" for what is none. Of two branches one is taken, so what they do alike counts
    once."""
    if isinstance(s, tirx.SeqStmt):
        return _joined([_touched(x) for x in s.seq])
    if isinstance(s, tirx.IfThenElse):
        one, other = _touched(s.then_case), {} if s.else_case is None else _touched(s.else_case)
        alike = {b for b in one if one[b] == other.get(b)}
        return _joined([_by_one(tirx.Evaluate(s.condition)), one, {b: by for b, by in other.items() if b not in alike}])
    if isinstance(s, tirx.AttrStmt) or isinstance(s, tirx.For) and nest_of(s) is None:
        return _touched(s.body)
    return _by_one(s)


def _joined(parts: list[dict[Any, list[str]]]) -> dict[Any, list[str]]:
    found: dict[Any, list[str]] = {}
    for part in parts:
        for b, by in part.items():
            found.setdefault(b, []).extend(by)
    return found


def _by_one(s: Any) -> dict[Any, list[str]]:
    found: dict[Any, list[str]] = {}

    def one(buffer: Any, by: str = "") -> None:
        found.setdefault(buffer, []).append(by)

    def operation(c: Any) -> None:
        op = base.find(c)
        for buffer in {a.region.source for a in op.effects(c)} if op is not None else ():
            one(buffer, c.op.name)

    structural_walk(s, (ir.Call, operation))
    structural_walk(s, (ir.TensorLoad, lambda e: one(e.source)))
    structural_walk(s, (tirx.BufferStore, lambda x: one(x.buffer)))
    structural_walk(s, (tirx.DeclBuffer, lambda x: one(x.data.args[0])))
    return found


def _width(rows: int, cols: int, bits: int, room: int) -> int:
    """Columns of a part: as many as fit, whole boxes that divide the fragment; 0 where there are none."""
    box = ROW * 8 // bits
    return max((w for w in range(box, cols + 1, box) if cols % w == 0 and w * rows * bits // 8 <= room), default=0)


def _tile(name: str, rows: int, cols: int, dtype: str) -> Any:
    return tirx.decl_buffer((rows, cols), dtype, name=f"{name}_staged", scope="shared", layout=None)


def _region(var: Any, mins: list[Any], extents: list[Any]) -> Any:
    number = lambda x: tirx.IntImm("int32", x) if isinstance(x, int) else x  # noqa: E731
    return tirx.BufferRegion(var, [ir.Range.from_min_extent(number(m), number(e)) for m, e in zip(mins, extents, strict=True)])


def _parts(call: Any, tile: Any, count: int, wide: int) -> Iterator[Any]:
    src, dst = _ends(call)
    rows = int(src.source.ty.shape[0])
    staged = whole(tile)
    axis = long_axes(dst)[-1]
    for k in range(count):
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
