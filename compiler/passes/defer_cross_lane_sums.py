"""Sums that a loop goes on with, lane by lane. Where a tile of sums begins at zero and is then only added to
by reductions, or multiplied element by element, as the row sums of attention are,

    clear(total); loop: total *= shrink; reduce_sum(score, total, clear=False)

each lane keeps the sum of its own elements, and the lanes add theirs up once, behind the loop, not by
shuffles in every round: a sum of products by one factor is the product of the sum. The order of additions is
another one, and as fixed. A factor that is infinite makes NaN of a lane that has only zeros so far, as it
does of a sum that is zero.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.buffers import bases
from tilescale.compiler.ir.nests import nest_of
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import find, name_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout import Fragment
from tilescale.compiler.layout.folds import axis_of, by_thread, digits_across, result
from tilescale.compiler.ops.lanes import join_lanes
from tilescale.compiler.passes.products import touched
from tilescale.compiler.passes.stage_operands import again, is_whole, whole
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx


def defer_cross_lane_sums(program: TileProgram) -> TileProgram:
    """The program with the sums of which this is true kept by lanes."""
    lanes = _Lanes(program)
    structural_walk(program.func.body, (tirx.Evaluate, lanes.look))
    if not lanes.sums:
        return program
    done = program.with_body(structural_map(program.func.body, (tirx.SeqStmt, lanes.sequence)))
    done.layouts = lanes.layouts
    return done


class _Lanes:
    def __init__(self, program: TileProgram):
        self.layouts, self.wave = dict(program.layouts), program.target.wave
        self.threads = program.launch.threads
        #: tiles that have another name, by which the sum may be read, and those names
        self.viewed = {b for pair in bases(program.func.body).items() for b in pair}
        #: tiles that reductions add to → between which lanes, as the masks of the shuffles, or the layout of
        #: what threads of several warps have; () where they differ
        self.sums: dict[Any, tuple[int, ...] | Fragment] = {}

    def look(self, s: Any) -> None:
        op = find(s.value)
        if op is None or not op.folds:
            return
        tile, parts = s.value.args[1].source, self.parts(s.value)
        self.sums[tile] = parts if self.sums.get(tile, parts) == parts else ()

    def parts(self, call: Any) -> tuple[int, ...] | Fragment:
        """Who has parts of a sum; () where it is another reduction, or one of integers, or the tile has
        another layout than what it leaves."""
        src, dst = call.args
        held = self.layouts.get(src.source)
        plain = (
            str(call.attrs["op"]) == "sum"
            and not call.attrs["clear"]
            and str(dst.source.ty.dtype) == "float32"
            and is_whole(dst)
        )
        if not plain or not isinstance(held, Fragment) or src.source.same_as(dst.source):
            return ()
        if dst.source in self.viewed or self.layouts.get(dst.source) != result(call, held):
            return ()
        near, far = digits_across(held, axis_of(call), self.wave)
        if not far:
            return tuple(p.stride << k for p in near for k in range(p.extent.bit_length() - 1))
        made = by_thread(held, axis_of(call))
        same = made.shape[1:] == tuple(int(e) for e in dst.source.ty.shape)
        return made if same and held.threads == self.threads else ()

    def sequence(self, s: Any) -> Any:
        stmts = list(s.seq)
        for k in range(len(stmts)):
            tile = _cleared(stmts[k])
            if tile is None or not self.sums.get(tile):
                continue
            far = isinstance(self.sums[tile], Fragment)
            end = next(
                (n for n in range(k + 1, len(stmts)) if not self.linear(stmts[n], tile, far)), len(stmts)
            )
            if any(_repeats(x, tile) for x in stmts[k + 1 : end]):
                stmts[k + 1 :] = [*self.apart(stmts[k], stmts[k + 1 : end], tile), *stmts[end:]]
        return sequence(stmts)

    def apart(self, cleared: Any, adding: list[Any], tile: Any) -> list[Any]:
        """What adds to a tile behind the statement that clears it: lane by lane, or thread by thread, and
        all of them behind that."""
        parts = self.sums[tile]

        def each(kept: Any) -> list[Any]:
            return [structural_map(x, (tirx.Evaluate, lambda e: _by_lane(e, tile, kept))) for x in adding]

        if not isinstance(parts, Fragment):
            return [*each(whole(tile)), join_lanes(whole(tile), parts, cleared.span)]
        calls: list[Any] = []
        for x in adding:
            structural_walk(x, (tirx.Evaluate, lambda e: calls.append(e.value) if _adds(e, tile) else None))
        rows = (parts.shape[0], *tile.ty.shape)
        name = f"{tile.name}_by_thread"
        own = tirx.decl_buffer(rows, "float32", name, scope="local.fragment", layout=None)
        self.layouts[own] = parts
        total = again(calls[0], [whole(own), whole(tile)], {"axis": -len(rows), "clear": 1})
        start = again(cleared.value, [whole(own), *cleared.value.args[1:]])
        return [tirx.AllocBuffer(own, {}, cleared.span), start, *each(whole(own)), total]

    def linear(self, s: Any, tile: Any, far: bool) -> bool:
        """Whether a statement does nothing with a tile of sums but add to it by reductions, or multiply
        it; only add where its parts are ``far``."""
        if not any(tile in group for group in touched(s)):
            return True
        if isinstance(s, tirx.SeqStmt):
            return all(self.linear(x, tile, far) for x in s.seq)
        if (nest := nest_of(s)) is not None:
            return not far and _scales(nest, tile)
        if isinstance(s, tirx.For):
            return self.linear(s.body, tile, far)
        if isinstance(s, tirx.IfThenElse):
            reads: list[Any] = []
            structural_walk(s.condition, (ir.TensorLoad, lambda e: reads.append(e.source)))
            return tile not in reads and all(
                x is None or self.linear(x, tile, far) for x in (s.then_case, s.else_case)
            )
        return _adds(s, tile) or _computed_beside(s, tile)


def _cleared(s: Any) -> Any:
    """The tile that a statement fills with zeros; None where it does not."""
    if name_of(s) != "fill" or not is_whole(s.value.args[0]):
        return None
    value = s.value.args[1]
    zero = isinstance(value, tirx.FloatImm) and float(value.value) == 0.0 or constant(value) == 0
    return s.value.args[0].source if zero else None


def _adds(s: Any, tile: Any) -> bool:
    """Whether a statement adds a reduction to a tile; what is reduced is another one."""
    op = find(s.value) if isinstance(s, tirx.Evaluate) else None
    return op is not None and op.folds and bool(s.value.args[1].source.same_as(tile))


def _computed_beside(s: Any, tile: Any) -> bool:
    """Whether a statement is a wait for products that only names a tile as what is computed beside them."""
    if name_of(s) != "await_products":
        return False
    return all(
        not r.source.same_as(tile) for r in s.value.args[: len(s.value.args) - int(s.value.attrs["behind"])]
    )


def _repeats(s: Any, tile: Any) -> bool:
    """Whether a loop in a statement adds to a tile."""
    loops: list[Any] = []
    found: list[Any] = []
    structural_walk(s, (tirx.For, loops.append))
    for loop in loops:
        structural_walk(loop.body, (tirx.Evaluate, lambda e: found.append(e) if _adds(e, tile) else None))
    return bool(found)


def _scales(nest: Any, tile: Any) -> bool:
    """Whether a nest does nothing with a tile but ``tile[…] = tile[…] * factor``, always."""
    mine = [a for a in nest.accesses if a.buffer.same_as(tile)]
    stores = [a for a in mine if a.mode == "write"]
    if len(stores) != 1 or len(mine) != 2 or any(a.conditional for a in mine):
        return False
    made = stores[0].node.value
    if not isinstance(made, tirx.Mul):
        return False
    sides = [x for x in (made.a, made.b) if isinstance(x, ir.TensorLoad) and x.source.same_as(tile)]
    return len(sides) == 1 and all(
        i.same_as(j) for i, j in zip(sides[0].indices, stores[0].indices, strict=True)
    )


def _by_lane(s: Any, tile: Any, kept: Any) -> Any:
    return again(s.value, [s.value.args[0], kept], {"lanes": 1}) if _adds(s, tile) else s
