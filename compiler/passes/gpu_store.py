"""Results leave by TMA: a fragment that a consumer copies to a tensor goes through a swizzled tile of shared memory, from which TMA stores
it while the threads go on (PTX ISA 9.0, "cp.async.bulk.tensor").

    for each part of so many columns:
        await_stores(staged)                     TMA has read what the part before left there
        copy(fragment[:, part] → staged)         by the threads
        copy(staged → tensor[…, part])           by TMA

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
from tilescale.compiler.ir.nests import long_axes, nest_of
from tilescale.compiler.layout.loops import bits_of, element_dtype, in_registers
from tilescale.compiler.ops import base
from tilescale.compiler.ops.bulk import await_stores
from tilescale.compiler.passes.gpu_stage import again, is_whole, whole
from tilescale.compiler.passes.roles import calls, meets, polls, releases
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx

#: bytes of a box's row: the widest swizzle
ROW = 128
#: axes of a tensor that TMA can copy
MOST_AXES = 5


def tma_stores(program: Any, room: int) -> Any:
    """The program with the results that TMA can store staged, in at most ``room`` bytes of shared memory each."""
    body = program.func.body
    if any(meets(c) or polls(c) for c in calls(body)) or releases(body):
        return program
    touched = _touched(program.func.body)
    names = _names(body)
    staged: dict[Any, Any] = {}

    def store(s: Any) -> Any:
        call = s.value
        if not _fits(call, program, touched, names):
            return s
        rows, cols = (int(e) for e in call.args[0].source.ty.shape)
        kind = element_dtype(call.args[1].source)
        wide = _width(rows, cols, bits_of(call.args[1].source), room)
        if not wide:
            return s
        tile = staged.setdefault((rows, wide, kind), _tile(call.args[1].source.name, rows, wide, kind))
        return sequence(list(_parts(call, tile, cols // wide, wide)))

    body = structural_map(body, (tirx.Evaluate, lambda s: store(s) if isinstance(s.value, ir.Call) else s))
    if not staged:
        return program
    return program.with_body(_around(body, list(staged.values())))


def _fits(call: Any, program: Any, touched: dict[Any, int], names: dict[Any, Any]) -> bool:
    """Whether a call copies a whole fragment to where TMA can store it. ``names``: what names stand for."""
    if call.op.name != "ts.copy" or str(call.attrs["side"]) or "ring" in call.attrs or len(call.args) > 3:
        return False
    src, dst = call.args[:2]
    var = dst.source
    if not (in_registers(src.source) and is_whole(src) and len(src.source.ty.shape) == 2):
        return False
    if all(not p.var.same_as(var) for p in program.params) or var.ty.storage_scope != "global" or touched.get(var, 0) != 1:
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
        and _multiple(_spelt_out(dst.region[axes[-1]].min, names), 16 * 8 // bits_of(var))
    )


def _multiple(e: Any, of: int) -> bool:
    """Whether an index is known to be a multiple: TMA's coordinates along rows must come to 16 bytes."""
    from tilescale.compiler.tvm_compat import sym

    found = sym.Analyzer().modular_set(e)
    return int(found.coeff) % of == 0 and int(found.base) % of == 0


def _names(body: Any) -> dict[Any, Any]:
    """What names are bound to; only names of other names and of loops' counters can be spelt out, memory stays."""
    found: dict[Any, Any] = {}
    structural_walk(body, (tirx.Bind, lambda s: found.__setitem__(s.var, s.value)))
    return found


def _spelt_out(e: Any, names: dict[Any, Any]) -> Any:
    from tilescale.compiler.cuda.vectors import spelt_out

    return spelt_out(e, names)


def _touched(s: Any) -> dict[Any, int]:
    """How many of a statement's own statements touch each tensor, at most: of two branches one is taken."""
    if isinstance(s, tirx.SeqStmt):
        return _summed([_touched(x) for x in s.seq])
    if isinstance(s, tirx.IfThenElse):
        ways = [_touched(s.then_case), {} if s.else_case is None else _touched(s.else_case)]
        either = {b: max(w.get(b, 0) for w in ways) for b in {*ways[0], *ways[1]}}
        return _summed([_counted(tirx.Evaluate(s.condition)), either])
    if isinstance(s, tirx.AttrStmt) or isinstance(s, tirx.For) and nest_of(s) is None:
        return _touched(s.body)
    return _counted(s)


def _summed(counts: list[dict[Any, int]]) -> dict[Any, int]:
    return {b: sum(c.get(b, 0) for c in counts) for b in {b for c in counts for b in c}}


def _counted(s: Any) -> dict[Any, int]:
    """How often a statement touches each tensor."""
    found: dict[Any, int] = {}

    def one(buffer: Any) -> None:
        found[buffer] = found.get(buffer, 0) + 1

    def operation(c: Any) -> None:
        op = base.find(c)
        for buffer in {a.region.source for a in op.effects(c)} if op is not None else ():
            one(buffer)

    structural_walk(s, (ir.Call, operation))
    structural_walk(s, (ir.TensorLoad, lambda e: one(e.source)))
    structural_walk(s, (tirx.BufferStore, lambda x: one(x.buffer)))
    structural_walk(s, (tirx.DeclBuffer, lambda x: one(x.data.args[0])))
    return found


def _width(rows: int, cols: int, bits: int, room: int) -> int:
    """Columns of a part: as many as fit, whole boxes that divide the fragment; 0 where there are none."""
    box = ROW * 8 // bits
    wide = cols
    while wide % box == 0 and wide * rows * bits // 8 > room:
        wide //= 2
    return wide if wide % box == 0 and cols % wide == 0 and wide > 0 else 0


def _tile(name: str, rows: int, cols: int, dtype: str) -> Any:
    return tirx.decl_buffer((rows, cols), dtype, name=f"{name}_staged", scope="shared", layout=None)


def _region(var: Any, mins: list[Any], extents: list[Any]) -> Any:
    number = lambda x: tirx.IntImm("int32", x) if isinstance(x, int) else x  # noqa: E731
    return tirx.BufferRegion(var, [ir.Range.from_min_extent(number(m), number(e)) for m, e in zip(mins, extents, strict=True)])


def _parts(call: Any, tile: Any, count: int, wide: int) -> Iterator[Any]:
    src, dst = call.args[:2]
    rows = int(src.source.ty.shape[0])
    staged = whole(tile)
    axis = long_axes(dst)[-1]
    for k in range(count):
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
