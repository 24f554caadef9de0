"""What of a pipelined loop can be a ring: which of its statements fill shared tiles that only those behind
them read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import combinations
from types import MappingProxyType
from typing import Any

from tilescale.compiler.ir.buffers import buffer_uses
from tilescale.compiler.ir.operations import effects_of, find
from tilescale.compiler.ir.statements import sequence, statements
from tilescale.compiler.passes import roles as splitting
from tilescale.compiler.passes.gathers import Gather
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx


@dataclass(frozen=True)
class Pipeline:
    """A pipelined loop whose statements ``first`` to ``last`` fill buffers (→ which statement, of several the
    last) that only those behind them read."""

    loop: Any
    stmts: list[Any]
    fills: dict[Any, int]
    first: int
    last: int
    #: a copy may be one of two, as a condition says, where a producer makes it
    branches: bool = False
    #: loops of T.Parallel that fill a tile, too, with how
    gathers: Mapping[Any, Gather] = field(default_factory=dict)
    #: copies that fill a tile together, with that tile
    parts: Mapping[Any, Any] = field(default_factory=dict)
    #: what stands around these statements in a round: names, and the condition that rounds are for
    under: tuple[Any, ...] = ()

    def filled(self, stmt: Any) -> Any:
        """The buffer that a statement fills; None where it fills none of which there can be stages."""
        return self.parts.get(stmt, _filled(stmt, self.branches, self.gathers))

    def body(self, stmts: list[Any]) -> Any:
        """The loop's body with ``stmts`` in the place of its statements."""
        if not self.under:
            return sequence(stmts)
        *names, test = self.under
        return sequence([*names, tirx.IfThenElse(test.condition, sequence(stmts), None, test.span)])

    def asynchronous(self, stmts: list[Any]) -> list[Any]:
        """Statements with the gathers among them as what fills a ring that has no number yet."""
        return [self.gathers[s].asynchronous(-1) if s in self.gathers else s for s in stmts]

    def with_guards(self) -> Pipeline:
        """With the waits directly in front of the copies counted among them: they guard the copies and go
        where those go."""
        first = self.first
        for k in reversed(range(self.first)):
            if splitting.is_guard(self.stmts[k]):
                first = k
            elif not isinstance(self.stmts[k], tirx.Bind):
                break
        return replace(self, first=first)


def _filled(stmt: Any, branches: bool, gathers: Mapping[Any, Gather] = MappingProxyType({})) -> Any:
    if stmt in gathers:
        return gathers[stmt].tile
    if not branches or not isinstance(stmt, tirx.IfThenElse) or stmt.else_case is None:
        return filled_tile(stmt)
    one, other = filled_tile(stmt.then_case), filled_tile(stmt.else_case)
    return one if one is not None and other is not None and one.same_as(other) else None


def _apart(stmt: Any) -> list[Any]:
    """Of a statement whose two branches fill the same tiles in the same order, one such statement a tile. The
    condition is of numbers alone, so it is the same each time."""
    if not isinstance(stmt, tirx.IfThenElse) or stmt.else_case is None:
        return [stmt]
    ones, others, reads = statements(stmt.then_case), statements(stmt.else_case), list[Any]()
    if len(ones) < 2 or len(ones) != len(others):
        return [stmt]
    structural_walk(stmt.condition, ((ir.Call, ir.TensorLoad), reads.append))
    made = [
        tirx.IfThenElse(stmt.condition, one, other, stmt.span)
        for one, other in zip(ones, others, strict=True)
    ]
    return [stmt] if reads or any(_filled(m, True) is None for m in made) else made


def pipeline_of(
    loop: Any,
    uses: dict[Any, int],
    views: set[Any],
    by_reader: bool = False,
    branches: bool = False,
    shared: Set[Any] = frozenset(),
    between: bool = False,
    gathers: Mapping[Any, Gather] = MappingProxyType({}),
) -> Pipeline | None:
    """The ring that a loop can be; None where its copies fill nothing that fits. A view, another's memory,
    has no stages of its own. ``by_reader``: readers may stand among the copies, since each has a ring of its
    own. ``branches``: a copy may be one of two, as a condition says. ``shared``: what other such loops fill
    and read, too. ``between``: readers may stand among the copies, since all of these run ahead of them; but
    no wait, which would have to come with the copies. ``gathers``: loops of T.Parallel that are
    copies, too. A round that is one condition, of which a producer makes the copies, is what stands under it:
    a ring counts the rounds that fill it, whichever those of the loop are."""
    under = splitting.conditional(loop.body) if by_reader else ()
    stmts = splitting.of_round(loop) if by_reader else statements(loop.body)
    if branches:
        stmts = [part for s in stmts for part in _apart(s)]
    parts = _parts(stmts)
    filled = [parts.get(s, _filled(s, branches, gathers)) for s in stmts]
    inside = buffer_uses(loop.body)
    fills: dict[Any, int] = {}
    for k, buffer in enumerate(filled):
        # used in this loop alone, written once, and read by no statement before: the previous round's value
        # is never wanted
        if (
            buffer is not None
            and buffer not in fills
            and buffer not in views
            and (inside[buffer] == uses[buffer] or buffer in shared)
        ):
            mine = [i for i, b in enumerate(filled) if stmts[i] in parts and buffer.same_as(b)]
            mine = mine if k in mine else [k]
            before, behind = stmts[: mine[-1]], stmts[mine[-1] + 1 :]
            if not any(buffer in buffer_uses(t) for i, t in enumerate(before) if i not in mine) and not any(
                writes(t, buffer) for t in behind
            ):
                fills[buffer] = mine[-1]
    if not fills:
        return None
    first, last = next(k for k, b in enumerate(filled) if b in fills), max(fills.values())
    amid = not by_reader and any(
        fills.keys() & buffer_uses(s).keys()
        for s, b in zip(stmts[first:last], filled[first:], strict=False)
        if b not in fills
    )
    if amid and (not between or any(splitting.waits(s) for s in stmts[first:last])):
        return None  # a reader stands between the copies: the stage would be committed too late for it
    return Pipeline(loop, stmts, fills, first, last, branches, gathers, parts, under)


def filled_tile(stmt: Any) -> Any:
    """The shared buffer that a statement fills whole from global memory by a local or remote copy; None for
    anything else, and for copies that the author keeps where they stand."""
    dst, box = _box(stmt)
    return dst if box is not None and box == [(0, int(e)) for e in dst.ty.shape] else None


def _box(stmt: Any) -> tuple[Any, list[tuple[int, int]] | None]:
    """The shared buffer into which a copy from global memory goes, and where its places begin and end along
    each axis, if constants say so; (None, None) for anything else."""
    call = stmt.value if isinstance(stmt, tirx.Evaluate) else None
    if not isinstance(call, ir.Call) or call.op.name not in ("ts.copy", "ts.remote_copy"):
        return None, None
    src, dst = call.args[:2]
    if "pinned" in call.attrs or "layout" in call.attrs or str(call.attrs.get("side", "")) == "dst":
        return None, None
    if dst.source.ty.storage_scope != "shared" or not src.source.ty.storage_scope.startswith("global"):
        return None, None
    known = all(isinstance(r.min, tirx.IntImm) and isinstance(r.extent, tirx.IntImm) for r in dst.region)
    ranges = [(int(r.min), int(r.min) + int(r.extent)) for r in dst.region] if known else None
    return dst.source, ranges


def _parts(stmts: list[Any]) -> dict[Any, Any]:
    """Copies of boxes that do not overlap and are a tile together → that tile."""
    boxes: dict[Any, dict[Any, list[tuple[int, int]]]] = {}
    for s in stmts:
        tile, box = _box(s)
        if box is not None:
            boxes.setdefault(tile, {})[s] = box
    found: dict[Any, Any] = {}
    for tile, of in boxes.items():
        whole = math.prod(int(e) for e in tile.ty.shape)
        if (
            len(of) > 1
            and sum(math.prod(end - begin for begin, end in box) for box in of.values()) == whole
            and not any(_overlap(one, other) for one, other in combinations(of.values(), 2))
        ):
            found |= dict.fromkeys(of, tile)
    return found


def _overlap(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> bool:
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True))


def writes(stmt: Any, buffer: Any) -> bool:
    found: list[Any] = []

    def look(call: Any) -> None:
        op = find(call)
        if op is not None and any(
            a.region.source.same_as(buffer) and a.mode != "read" for a in effects_of(call)
        ):
            found.append(call)

    structural_walk(stmt, (ir.Call, look))
    structural_walk(stmt, (tirx.BufferStore, lambda s: found.append(s) if s.buffer.same_as(buffer) else None))
    structural_walk(
        stmt, (tirx.DeclBuffer, lambda s: found.append(s) if s.data.args[0].same_as(buffer) else None)
    )
    return bool(found)
