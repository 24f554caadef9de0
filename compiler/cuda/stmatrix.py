"""Nests that store by stmatrix (layout/matrices.py): whether one does here, and what a lane adds to the
address that it gives."""

from __future__ import annotations

import contextlib
from typing import Any

from tilescale.compiler.gpu import lower
from tilescale.compiler.gpu.places import InShared, digit
from tilescale.compiler.ir.nests import Nest
from tilescale.compiler.ir.scales import WARP
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout.match import Loop
from tilescale.compiler.layout.matrices import SIDE, Matrices, matrices
from tilescale.compiler.tvm_compat import tirx


class _Guarded(Exception):
    """An access that must be guarded, where all lanes of a warp have to make it."""


class MatrixStores(lower.Lowering):
    """Mixed into the lowering."""

    def by_matrices(self, nest: Nest, loop: Loop) -> Any | None:
        if (made := _plan(self, nest, loop)) is not None:
            with contextlib.suppress(_Guarded):
                return self._by_matrices(nest, loop, made)
        return None

    def _by_matrices(self, nest: Nest, loop: Loop, made: Matrices) -> Any:
        """Up to four matrices at a time: each lane's elements of them into registers, then one instruction.
        Of the counters of the slots' digits a part counts an instruction's matrices, the rest instructions;
        the innermost counts a register's two elements."""
        s, span, zero = nest.body, nest.node.span, tirx.IntImm("int32", 0)
        starts, binds = self.starts(loop)
        lane = tirx.Var("lane", "int32")
        self.bind_range(lane, WARP)
        row, among = _lane_part(made, lane)
        firsts, more = self.starts(loop, row)
        factors = dict(made.bits)
        outer = [(tirx.Var(f"u{k}", "int32"), n // factors.get(k, 1)) for k, n in enumerate(loop.counts[:-1])]
        inner = [(tirx.Var(f"m{k}", "int32"), k, n) for k, n in made.bits]
        pair = tirx.Var("u", "int32")
        for var, n in [*outer, *((v, n) for v, _, n in inner), (pair, 2)]:
            self.bind_range(var, n)
        whole = [(var * factors.get(k, 1) if n > 1 else zero) for k, (var, n) in enumerate(outer)]

        def counted(parts: dict[int, Any]) -> list[Any]:
            return [c + parts[k] if k in parts else c for k, c in enumerate(whole)]

        held = tirx.decl_buffer(
            (2 * made.count,), str(s.buffer.ty.dtype), f"{s.buffer.name}_out", scope="local", layout=None
        )
        at, unit = pair, 2
        for var, _, n in inner:
            at, unit = var * unit + at, unit * n
        before, self.moved = self.moved, [(s, tirx.BufferLoad(held, [at]))]
        value = self.round_of(nest, loop, starts, [*counted({k: v for v, k, _ in inner}), pair], None)
        self.moved = before
        values = self.loops(nest, value, [*((v, n) for v, _, n in reversed(inner)), (pair, 2)])
        store = self.round_of(
            nest, loop, firsts, [*counted(among), zero], None, lambda: self._matrix(s, held, made)
        )
        body = sequence([tirx.AllocBuffer(held, {}, span), values, store])
        loops = self.loops(nest, body, [(v, n) for v, n in outer if n > 1])
        return sequence([*binds, tirx.Bind(lane, self.thread() % WARP), *more, self.by_those(loop, loops)])

    def _matrix(self, s: Any, held: Any, made: Matrices) -> Any:
        """The instruction, at the place of a lane's row."""
        buf, flat, tests, _ = self.access(s.buffer, s.indices, s, True)
        if tests:
            raise _Guarded

        def address(b: Any, at: Any) -> Any:
            return tirx.address_of(tirx.BufferLoad(b, [at]))

        name = f"ts::stmatrix{'_trans' if made.trans else ''}_x{made.count}"
        return self.once(
            tirx.Evaluate(
                tirx.call_extern("void", name, address(buf, flat), address(held, tirx.IntImm("int32", 0))),
                s.span,
            )
        )


def _plan(cx: lower.Lowering, nest: Nest, loop: Loop) -> Matrices | None:
    """How a nest of this kernel goes by matrices; None where it does not."""
    place = cx.places.get(nest.body.buffer) if isinstance(nest.body, tirx.BufferStore) else None
    if not isinstance(place, InShared) or place.base is not None or cx.remote is not None:
        return None
    return matrices(nest, loop, place.layout, cx.target)


def _lane_part(made: Matrices, lane: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """What a lane that names a row adds to the place of its warp's elements, by axis of the loop, and to the
    counters of the slots' digits: lane l names row l % 8 of matrix l / 8."""
    row = lane % tirx.IntImm("int32", SIDE)
    counters, unit = {}, SIDE
    for k, n in made.bits:
        counters[k] = digit(lane, unit, n, last=unit * n == WARP)
        unit *= n
    return {made.cols if made.trans else made.rows: row}, counters
