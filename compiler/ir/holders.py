"""Which executors below the block have a tile in shared memory: all of its ``T.Scale``, or those alone that
come to where it is used, as conditions on their index say: ``if w < 8:``.

A tile of a few warps takes the memory of a few: what the others never touch needs no place for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tilescale.compiler.ir.buffers import bases
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.scales import SCALES, WIDTHS, Executor
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx

#: what a comparison of an executor's index with a number leaves of the indices, from a first one up to one
#: behind the last
_LEFT: dict[type, Callable[[int, int, int], tuple[int, int]]] = {
    tirx.LT: lambda low, high, c: (low, min(high, c)),
    tirx.LE: lambda low, high, c: (low, min(high, c + 1)),
    tirx.GT: lambda low, high, c: (max(low, c + 1), high),
    tirx.GE: lambda low, high, c: (max(low, c), high),
    tirx.EQ: lambda low, high, c: (max(low, c), min(high, c + 1)),
}
_OPPOSITE = {tirx.LT: tirx.GE, tirx.LE: tirx.GT, tirx.GT: tirx.LE, tirx.GE: tirx.LT, tirx.NE: tirx.EQ}
_TURNED = {tirx.LT: tirx.GT, tirx.LE: tirx.GE, tirx.GT: tirx.LT, tirx.GE: tirx.LE, tirx.EQ: tirx.EQ}


def holders(program: TileProgram) -> dict[Any, range]:
    """Tile in shared memory → the numbers of a block's executors that have one, without gaps. Views are left
    out: they are part of another tile."""
    return _found(program.func.body, program.launch.threads)


@functools.lru_cache(maxsize=64)
def _found(body: Any, threads: int) -> dict[Any, range]:
    walk = _Walk(body)
    walk.stmt(body, Executor("block", threads), range(1))
    return {
        buffer: walk.used.get(buffer, everyone) if len(ex.outer) == 1 else everyone
        for buffer, ex in walk.owner.items()
        for everyone in [range(ex.count)]
    }


class _Walk:
    """One walk through a program. ``here``: the executors of the outermost scale that may come to a
    statement; those of scales inside it are not told apart."""

    def __init__(self, body: Any) -> None:
        self.owner: dict[Any, Executor] = {}
        self.used: dict[Any, range] = {}
        self.bases = bases(body)
        self.indices: list[Any] = []

    def stmt(self, s: Any, ex: Executor, here: range) -> None:
        if isinstance(s, tirx.SeqStmt):
            for inner in s.seq:
                self.stmt(inner, ex, here)
        elif isinstance(s, tirx.AttrStmt):
            scale = SCALES[int(s.value.value)] if s.attr_key == "ts.scale" else ""
            inside = ex.within(scale)
            entered = scale in WIDTHS and not ex.outer
            self.stmt(s.body, inside, range(inside.count) if entered else here)
        elif isinstance(s, (tirx.For, tirx.While)):
            self._uses(s.extent if isinstance(s, tirx.For) else s.condition, here)
            self.stmt(s.body, ex, here)
        elif isinstance(s, tirx.IfThenElse):
            self._uses(s.condition, here)
            self.stmt(s.then_case, ex, self._left(s.condition, here))
            if s.else_case is not None:
                self.stmt(s.else_case, ex, self._left(s.condition, here, otherwise=True))
        elif isinstance(s, tirx.AllocBuffer):
            if s.buffer.ty.storage_scope.startswith("shared"):
                self.owner[s.buffer] = ex
        else:
            if isinstance(s, tirx.Bind) and len(ex.outer) == 1 and _is_index(s.value, ex.name):
                self.indices.append(s.var)
            self._uses(s, here)

    def _left(self, condition: Any, here: range, otherwise: bool = False) -> range:
        """Those of ``here`` for which a condition may hold, or may not."""
        if isinstance(condition, (tirx.And, tirx.BitwiseAnd)) and not otherwise:
            return self._left(condition.b, self._left(condition.a, here))
        kind = type(condition)
        if kind not in _LEFT and kind not in _OPPOSITE:
            return here
        a, b = condition.a, condition.b
        if isinstance(a, tirx.IntImm):
            a, b, kind = b, a, _TURNED.get(kind, kind)
        if not isinstance(b, tirx.IntImm) or not any(a.same_as(v) for v in self.indices):
            return here
        rule = _LEFT.get(_OPPOSITE.get(kind, type(None)) if otherwise else kind)
        if rule is None:
            return here
        low, high = rule(here.start, here.stop, int(b.value))
        return range(low, max(low, high))

    def _uses(self, node: Any, here: range) -> None:
        if isinstance(node, int) or not here:
            return

        def note(buffer: Any) -> None:
            buffer = self.bases.get(buffer, buffer)
            had = self.used.get(buffer, here)
            self.used[buffer] = range(min(had.start, here.start), max(had.stop, here.stop))

        structural_walk(node, ((ir.TensorRegion, ir.TensorLoad), lambda n: note(n.source)))
        structural_walk(node, (tirx.BufferStore, lambda n: note(n.buffer)))
        structural_walk(node, (tirx.DeclBuffer, lambda n: note(n.data.args[0])))


def _is_index(e: Any, scale: str) -> bool:
    return isinstance(e, ir.Call) and e.op.name == "ts.scale_index" and str(e.args[0].value) == scale
