"""Copies to other ranks that TMA makes, where their author names it (``T.copy(tile, B[…], dst=rank,
prefer_instruction="tma")``), and sums (``op="add"``):

    copy(tile → staged)           by the threads, unless the tile lies in shared memory as it is
    peer_rows(staged → B, rank)   TMA stores each row, or adds it (PTX ISA 9.0, "cp.async.bulk" and
                                  "cp.reduce.async.bulk")

A sum is atomic among the blocks of one GPU alone, so two ranks that add to one element without an order
between them are a race. What TMA cannot make, threads do: their sums are atomic among all ranks, which is
more than was asked for. A note says which of the two it is, and why.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from tilescale.compiler.advice import note, reason
from tilescale.compiler.ir.multiples import bound_in, is_multiple, spelt_out
from tilescale.compiler.ir.nests import long_axes
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import name_of, operations
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.rewrite import rebuild
from tilescale.compiler.ir.scales import Executor
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.walks import walk
from tilescale.compiler.layout.loops import bits_of, element_dtype
from tilescale.compiler.ops.mbarrier import REDUCTIONS
from tilescale.compiler.ops.peer_rows import peer_rows as made_by_tma
from tilescale.compiler.passes.await_rows import without
from tilescale.compiler.passes.boxes import CHUNK
from tilescale.compiler.passes.room import BESIDE, tile_bytes
from tilescale.compiler.passes.stage_operands import copy_statement, is_whole, whole
from tilescale.compiler.tvm_compat import ir, structural_map, tirx

#: operations that read and write a tile of shared memory wherever its elements lie
ANYWHERE = ("copy", "remote_copy", "fill")


def peer_rows(program: TileProgram) -> TileProgram:
    """The program with each copy that TMA makes as one by TMA, of a tile that lies row by row."""
    every = Executor("block", program.launch.threads)
    statements = walk(program.func.body, every)
    if not any(_named(s) for s, _ in statements):
        return program
    names, laid, notes = bound_in(program.func.body), _laid_out(program, statements, every), list[str]()
    tiles: dict[Any, Any] = {}  # shape and dtype → the tile
    room = program.target.shared_bytes - BESIDE - sum(tile_bytes(program).values())

    def leaf(s: Any, ex: Executor) -> list[Any] | None:
        if not _named(s):
            return None
        call, to = s.value, s.value.args[1]
        own, why = _own(call.args[0], to, laid), _unfit(program, call, ex, names)
        if why is None and not own:
            why = _staged(to, ex, tiles, room)
        said = f"{program.name}: {to.source.name} is {'added' if 'op' in call.attrs else 'put'} to by "
        if why is not None:
            notes.append(note(f"{said}threads, not by TMA: {why}", why, loc_of(call.span)))
            return [_by_threads(s)] if "late" in call.attrs else None
        notes.append(f"{said}TMA, {prod(_shape(to))} elements at a time")
        if own:
            return [made_by_tma(call, call.args[0])]
        staged = whole(tiles[_shape(to), element_dtype(to.source)])
        return [copy_statement(call.args[0], staged, call), made_by_tma(call, staged)]

    body = rebuild(program.func.body, every, leaf)
    if not any(c.op.name == "ts.peer_rows" and "late" in c.attrs for c, _ in operations(body)):
        body = without(body)
    return replace(program.with_body(_around(body, tiles)), notes=[*program.notes, *notes])


def _named(s: Any) -> bool:
    return name_of(s) == "remote_copy" and "tma" in s.value.attrs


def _by_threads(s: Any) -> Any:
    """A copy by threads, who are done where it stands."""
    call, attrs = s.value, {k: v for k, v in dict(s.value.attrs).items() if k != "late"}
    return tirx.Evaluate(ir.Call(call.op, call.args, attrs=attrs, ret_ty=call.ty, span=call.span), s.span)


def _laid_out(program: TileProgram, statements: Any, every: Executor) -> set[Any]:
    """The tiles that something wants laid out in some way: an operand of a product, say; and those of a
    block's rings, whose stages are filled by who has no proxy fence behind it."""
    found = set(program.hints.get("layouts", {}))
    for s, ex in statements:
        kind = str((s.annotations or {}).get("ts.kind", "")) if isinstance(s, tirx.For) else ""
        if kind == "pipelined" and ex.name == "block":
            inside = [x.value for x, _ in walk(s.body, every) if name_of(x) in ANYWHERE[:2]]
            found |= {c.args[1].source for c in inside if c.args[0].source.ty.storage_scope == "global"}
        for call, op in operations(s):
            if op.name not in ANYWHERE:
                found |= {a.region.source for a in op.effects(call)}
    return found


def _own(src: Any, to: Any, laid: set[Any]) -> bool:
    """Whether a tile lies where TMA reads it, as it is."""
    var = src.source
    return (
        var.ty.storage_scope == "shared"
        and is_whole(src)
        and var not in laid
        and element_dtype(var) == element_dtype(to.source)
        and tuple(constant(e) for e in var.ty.shape) == _shape(to)
    )


def _shape(to: Any) -> tuple[int, ...]:
    return tuple(int(constant(to.region[k].extent) or 0) for k in long_axes(to))


def _staged(to: Any, ex: Executor, tiles: dict[Any, Any], room: int) -> str | None:
    """Why there is no tile for what goes to a region; None where it has one, in ``tiles``."""
    if ex.name != "block":
        hint = "a tile of the region's shape and dtype by T.alloc_shared inside the T.Scale"
        return reason(f"what a {ex.name} copies lies in no tile of its own in shared memory", hint)
    key = _shape(to), element_dtype(to.source)
    if key in tiles:
        return None
    tile = tirx.decl_buffer(key[0], key[1], name=f"{to.source.name}_rows", scope="shared", layout=None)
    if sum(_bytes(t) for t in (*tiles.values(), tile)) > room:
        return reason("its tile has no room in shared memory", "a smaller tile")
    tiles[key] = tile
    return None


def _bytes(tile: Any) -> int:
    return prod(int(e) for e in tile.ty.shape) * bits_of(tile) // 8


def _unfit(program: TileProgram, call: Any, ex: Executor, names: Any) -> str | None:
    """Why TMA cannot make a copy, wherever it comes from; None where it can."""
    to, target = call.args[1], program.target
    var, name, kind = to.source, to.source.name, element_dtype(to.source)
    if not target.tensor_copies:
        return f"{target.arch} has no TMA"
    if target.remote:
        return "other ranks' memory has no addresses"
    if ex.threads == 1:  # who meets nobody has no barrier with a proxy fence in front of TMA's read
        return reason("a thread alone copies it", "the copy of a warp, or of the block")
    if "op" in call.attrs and kind not in REDUCTIONS["add"]:
        return f"TMA has no sums of {kind}"
    if bits_of(var) % 8:
        return f"elements of {name} are smaller than a byte"
    if all(not p.var.same_as(var) for p in program.params):
        return f"{name} is a view"
    if list(var.ty.strides):
        return reason(f"{name} has strides of its own", "a T.SymmTensor without strides")
    axes, each = long_axes(to), CHUNK * 8 // bits_of(var)
    if not axes or axes[-1] != len(var.ty.shape) - 1:
        return f"{name}'s part is a column"
    if any(constant(to.region[k].extent) is None for k in axes):
        return reason(f"the extents of {name}'s part are not constant", "a part of constant extents")
    last, hint = to.region[-1], f"multiples of {each} elements: {CHUNK} bytes"
    for what, e in (
        (f"rows of {name}", var.ty.shape[-1]),
        (f"rows of {name}'s part", last.extent),
        (f"first columns of {name}'s part", spelt_out(last.min, names)),
    ):
        if not is_multiple(e, each):
            return reason(f"the {what} are not known to be multiples of {CHUNK} bytes", hint)
    return None


def _around(body: Any, tiles: dict[Any, Any]) -> Any:
    """The kernel with the tiles at its head."""

    def enter(s: Any) -> Any:
        inner = isinstance(s.body, tirx.AttrStmt) and s.body.attr_key == "thread_extent"
        if s.attr_key != "thread_extent" or inner or not tiles:
            return s
        made = tirx.SeqStmt([*(tirx.AllocBuffer(t) for t in tiles.values()), s.body])
        return tirx.AttrStmt(s.node, s.attr_key, s.value, made, s.span)

    return structural_map(body, (tirx.AttrStmt, enter))
