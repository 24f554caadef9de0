"""Sums into another rank's memory by TMA (``T.copy(tile, B[…], dst=rank, op="add",
prefer_instruction="tma")``):

    copy(tile → staged)          by the threads, which convert and let go of the tile
    peer_sum(staged → B, rank)   TMA adds each row (PTX ISA 9.0, "cp.reduce.async.bulk")

Such a sum is atomic among the blocks of one GPU alone, so nobody gets it who has not named it, and two ranks
that add to one element without an order between them are a race. What TMA cannot add, threads do: their sums
are atomic among all ranks, which is more than was asked for. A note says which of the two it is, and why.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from tilescale.compiler.advice import note, reason
from tilescale.compiler.ir.multiples import bound_in, is_multiple, spelt_out
from tilescale.compiler.ir.nests import long_axes
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import name_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.rewrite import rebuild
from tilescale.compiler.ir.scales import Executor
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.layout.loops import bits_of, element_dtype
from tilescale.compiler.ops.mbarrier import REDUCTIONS
from tilescale.compiler.ops.peer_sum import peer_sum
from tilescale.compiler.passes.room import BESIDE, tile_bytes
from tilescale.compiler.passes.stage_operands import copy_statement, whole
from tilescale.compiler.tvm_compat import structural_map, tirx

#: TMA's rows begin at a multiple of so many bytes and are as long
CHUNK = 16


def peer_sums(program: TileProgram) -> TileProgram:
    """The program with each sum that TMA makes as a copy into a tile and the sum of that."""
    names, notes = bound_in(program.func.body), list[str]()
    tiles: dict[Any, Any] = {}  # shape and dtype → the tile
    room = program.target.shared_bytes - BESIDE - sum(tile_bytes(program.func.body).values())

    def leaf(s: Any, ex: Executor) -> list[Any] | None:
        if name_of(s) != "remote_copy" or "tma" not in s.value.attrs:
            return None
        call = s.value
        why = _unfit(program, call, ex, names)
        if why is None:
            to = call.args[1]
            shape = tuple(int(constant(to.region[k].extent) or 0) for k in long_axes(to))
            key = shape, element_dtype(to.source)
            if key not in tiles:
                used = sum(_bytes(t) for t in tiles.values())
                tile = tirx.decl_buffer(
                    shape, key[1], name=f"{to.source.name}_added", scope="shared", layout=None
                )
                if used + _bytes(tile) <= room:
                    tiles[key] = tile
            if key not in tiles:
                why = reason("its tile has no room in shared memory", "a smaller tile")
        text = f"{program.name}: {call.args[1].source.name} is added to by "
        if why is not None:
            notes.append(note(f"{text}threads, not by TMA: {why}", why, loc_of(call.span)))
            return None
        notes.append(f"{text}TMA, {prod(shape)} elements at a time")
        staged = whole(tiles[key])
        return [copy_statement(call.args[0], staged, call), peer_sum(call, staged)]

    body = rebuild(program.func.body, Executor("block", program.launch.threads), leaf)
    if not notes:
        return program
    return replace(program.with_body(_around(body, tiles)), notes=[*program.notes, *notes])


def _bytes(tile: Any) -> int:
    return prod(int(e) for e in tile.ty.shape) * bits_of(tile) // 8


def _unfit(program: TileProgram, call: Any, ex: Executor, names: Any) -> str | None:
    """Why TMA cannot add what a call adds; None where it can."""
    to, target = call.args[1], program.target
    var, name, kind = to.source, to.source.name, element_dtype(to.source)
    if not target.tensor_copies:
        return f"{target.arch} has no TMA"
    if target.remote:
        return "other ranks' memory has no addresses"
    if ex.name != "block":
        return reason(f"a {ex.name} adds", "the copy outside of T.Scale below the block")
    if kind not in REDUCTIONS["add"]:
        return f"TMA has no sums of {kind}"
    if all(not p.var.same_as(var) for p in program.params):
        return f"{name} is a view"
    if list(var.ty.strides):
        return reason(f"{name} has strides of its own", "a T.SymmTensor without strides")
    axes, each = long_axes(to), CHUNK * 8 // bits_of(var)
    if not axes or axes[-1] != len(var.ty.shape) - 1:
        return f"{name}'s part is a column"
    if any(constant(to.region[k].extent) is None for k in axes):
        return reason(f"the extents of {name}'s part are not constant", "a part of constant extents")
    rows = [*var.ty.shape[-1:]] if len(var.ty.shape) > 1 else []
    for what, e in (
        ("rows", [*rows, to.region[-1].extent]),
        ("first columns", [spelt_out(to.region[-1].min, names)]),
    ):
        if not all(is_multiple(x, each) for x in e):
            hint = f"multiples of {each} elements: {CHUNK} bytes"
            return reason(f"the {what} of {name}'s part are not known to be multiples of {CHUNK} bytes", hint)
    if len(var.ty.shape) == 1 and not is_multiple(var.ty.shape[-1], each):
        return reason(f"{name} may end within {CHUNK} bytes", f"an extent of a multiple of {each}")
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
