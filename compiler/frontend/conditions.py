"""Warp specialisation by conditions on the thread's index: ``if tx < 128: … elif tx < 256: … else: …`` around
what warpgroups do with tiles.

When the trace ends, such a condition becomes ``T.ws`` regions (frontend/groups.py): for each warpgroup the
branch that its threads take. Where a condition inside of that tells whole warps apart, each warp does its
branch in ``T.Scale("warp")``. Where a condition cuts warpgroups otherwise, all threads of the block do the
one branch and then the other, as long as nobody can tell: neither looks at the thread's index, waits or
signals, or writes what a thread holds outside of it. A branch of one warp with small tiles of its own is
that warp's. Else warps do their branches, if no registers of the block are touched. A condition around what
is a thread's own alone, and any other, is left to frontend/own.py."""

from __future__ import annotations

from math import prod
from typing import Any

from tilescale import log
from tilescale.compiler.builder import state as bld
from tilescale.compiler.frontend.groups import HELD, MARK, at_block, of_executor, of_warpgroup, touched
from tilescale.compiler.ir.numbers import constant, simplify
from tilescale.compiler.ir.operations import effects_of, find, name_of
from tilescale.compiler.ir.scales import SCALES, WARP, WARPGROUP
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.statements import sequence, statements
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, sym, tirx
from tilescale.errors import TileSyntaxError
from tilescale.language.dtypes import BITS

#: what only a whole warpgroup does
_WARPGROUPS = ("set_max_nreg",)
#: warps of a warpgroup
WARPS = WARPGROUP // WARP


def by_condition(body: Any, threads: int, builder: bld.Builder) -> Any:
    """The kernel's body with T.ws regions in the place of conditions that tell warpgroups apart.

    Raises:
        TileSyntaxError: registers are moved by what is no whole warpgroup.
    """
    made = _Conditions(threads, builder).visit(body)
    _refuse_moves(made)
    return announced(made)


def _of_tiles(s: Any) -> bool:
    """Whether a statement has what all threads that run it do together."""
    found: list[Any] = []

    def call(c: Any) -> None:
        op = find(c)
        if op is not None and at_block(c) and not op.by_thread and not op.in_iterations:
            found.append(c)

    structural_walk(s, (ir.Call, call))
    structural_walk(s, (tirx.For, lambda f: found.append(f) if f.kind == tirx.ForKind.PARALLEL else None))
    return bool(found)


def _of_lanes(s: Any) -> bool:
    """Whether no tile of a statement, and no loop over one, has more elements than a warp has lanes."""
    sizes: list[int] = []

    def count(extents: Any) -> None:
        sizes.append(prod(constant(e) or WARP + 1 for e in extents))

    def nest(f: Any) -> None:
        if f.kind == tirx.ForKind.PARALLEL:
            inner = [f]
            while isinstance(inner[-1].body, tirx.For) and inner[-1].body.kind == tirx.ForKind.PARALLEL:
                inner.append(inner[-1].body)
            count([g.extent for g in inner])

    structural_walk(s, (tirx.For, nest))
    structural_walk(s, (ir.TensorRegion, lambda r: count([x.extent for x in r.region])))
    return all(n <= WARP for n in sizes)


class _Conditions:
    def __init__(self, threads: int, builder: bld.Builder):
        self.threads, self.builder = threads, builder
        self.known: dict[Any, Any] = {}  # names of values that the thread's index decides

    def visit(self, s: Any) -> Any:
        if isinstance(s, tirx.SeqStmt):
            return sequence([self.visit(x) for x in s.seq])
        if isinstance(s, tirx.AttrStmt):
            if s.attr_key == "ts.scale" and int(s.value.value) < SCALES.index("block"):
                return s
            return tirx.AttrStmt(s.node, s.attr_key, s.value, self.visit(s.body), s.span)
        if isinstance(s, tirx.Bind) and self.index_in(s.value):
            self.known[s.var] = s.value
        if isinstance(s, tirx.IfThenElse) and self.index_in(s.condition) and _of_tiles(s):
            return self.branches(s)
        return s

    def index_in(self, e: Any) -> bool:
        found: list[Any] = []
        structural_walk(e, (ir.Call, lambda c: found.append(c) if _is_index(c) else None))
        structural_walk(e, (ir.Var, lambda v: found.append(v) if v in self.known else None))
        return bool(found)

    def branches(self, s: Any) -> Any:
        """The branch of each warpgroup; the statement as it is where one of them has no branch of its own."""
        if self.threads <= WARPGROUP or self.threads % WARPGROUP:
            return self.in_turn(s)
        taken = [self.taken(s, g) for g in range(self.threads // WARPGROUP)]
        if any(t is None for t in taken):
            return self.in_turn(s)
        out = []
        for g, parts in enumerate(taken):
            body = sequence([of_warpgroup(self.by_warp(p, g)) for p in parts or ()])
            if parts:
                out.append(tirx.AttrStmt(ir.StringImm(str(g)), MARK, tirx.IntImm("int32", 0), body, s.span))
        return sequence(out)

    def by_warp(self, s: Any, group: int) -> Any:
        """What a warpgroup does, with T.Scale("warp") in the place of conditions that tell its warps
        apart."""
        if isinstance(s, tirx.SeqStmt):
            return sequence([self.by_warp(x, group) for x in s.seq])
        if isinstance(s, tirx.For) and s.kind != tirx.ForKind.PARALLEL:
            notes = dict(s.annotations) if s.annotations else {}
            body = self.by_warp(s.body, group)
            return tirx.For(s.loop_var, s.min, s.extent, s.kind, body, annotations=notes, span=s.span)
        if isinstance(s, tirx.Bind) and self.index_in(s.value):
            self.known[s.var] = s.value
        if not isinstance(s, tirx.IfThenElse):
            return s
        if not self.index_in(s.condition):
            other = None if s.else_case is None else self.by_warp(s.else_case, group)
            return tirx.IfThenElse(s.condition, self.by_warp(s.then_case, group), other, s.span)
        return (self.of_warps(s, group * WARPS, WARPS) if _of_tiles(s) else None) or s

    def of_warps(self, s: Any, first: int, count: int) -> Any:
        """T.Scale("warp") in the place of a condition; None where the threads of a warp differ."""
        found = ((w, self.taken(s, first + w, WARP)) for w in range(count))
        taken = {w: parts for w, parts in found if parts is not None}
        return self.each_warp(taken, s.span) if len(taken) == count else None

    def each_warp(self, taken: dict[int, list[Any]], span: Any) -> Any:
        """T.Scale("warp") in which warps do what is theirs."""
        which = tirx.Var(self.builder.unique("warp"), "int32")
        index = ir.Call("ts.scale_index", [ir.StringImm("warp")], ret_ty=ir.PrimType("int32"))
        chosen: Any = None
        for w, parts in reversed(taken.items()):
            if parts:
                body = sequence([of_executor(p, "warp") for p in parts])
                chosen = tirx.IfThenElse(tirx.EQ(which, _number(w)), body, chosen, span)
        inside = sequence([tirx.Bind(which, index, span), chosen])
        level = _number(SCALES.index("warp"))
        return tirx.AttrStmt(ir.StringImm("warp"), "ts.scale", level, inside, span)

    def in_turn(self, s: Any) -> Any:
        """The branches that threads take, one behind the other, by all threads, or by the one warp that takes
        it; where that is not the same, by warps; the statement as it is where threads of a warp differ, or
        touch registers of the block."""
        found = self.branches_of(s, list(range(self.threads)))
        if found is None or not all(self.is_anybodys(part) for part, _ in found):
            alone = self.threads % WARP == 0 and not any(b.ty.storage_scope in HELD for b in touched(s))
            return (self.of_warps(s, 0, self.threads // WARP) if alone else None) or s
        log.say(
            "info",
            f"{loc_of(s.span)}: what some threads do with tiles and what others do is done in turn, by all",
            once=True,
        )
        return sequence([self.by_one(part, members) or part for part, members in found])

    def by_one(self, s: Any, members: list[int]) -> Any:
        """What one warp does, by that warp: where all threads would hold no more of any tile than its lanes
        do, it has no barrier of the block, and the others need not do it, too. None where it is otherwise,
        and where memory of the block would become the warp's."""
        first = members[0]
        one = self.threads % WARP == 0 and first % WARP == 0 and members == list(range(first, first + WARP))
        if not one or not _of_lanes(s):
            return None
        inside: set[Any] = set()
        structural_walk(s, (tirx.AllocBuffer, lambda a: inside.add(a.buffer)))
        if any((b.ty.storage_scope in HELD) != (b in inside) for b in touched(s) | inside):
            return None
        return self.each_warp({first // WARP: [s]}, getattr(s, "span", None))

    def branches_of(self, s: Any, members: list[int]) -> list[tuple[Any, list[int]]] | None:
        """What these threads do of a condition, and which of them; None where more than their index decides
        it."""
        if not isinstance(s, tirx.IfThenElse) or not self.index_in(s.condition):
            return [(s, members)]
        thread = tirx.Var("thread", "int32")
        test = self.in_terms_of(s.condition, thread)
        sides: tuple[list[int], list[int]] = ([], [])
        for k in members:
            holds = simplify(
                structural_map(test, (ir.Var, lambda v, k=k: _number(k) if v.same_as(thread) else v))
            )
            known = constant(holds)
            if known is None:
                return None
            sides[not known].append(k)
        out: list[tuple[Any, list[int]]] = []
        for body, those in zip((s.then_case, s.else_case), sides, strict=True):
            if body is not None and those:
                found = self.branches_of(body, those)
                if found is None:
                    return None
                out += found
        return out

    def is_anybodys(self, s: Any) -> bool:
        """Whether it is the same, whoever of the block's threads do a statement together."""
        inside: set[Any] = set()
        bad: list[Any] = []

        def call(c: Any) -> None:
            op = find(c)
            if _is_index(c) or (op is not None and (not op.plain or op.by_thread or not at_block(c))):
                bad.append(c)

        structural_walk(s, (tirx.AllocBuffer, lambda a: inside.add(a.buffer)))
        structural_walk(s, (ir.Call, call))
        structural_walk(s, (ir.Var, lambda v: bad.append(v) if v in self.known else None))
        structural_walk(s, (tirx.AttrStmt, lambda a: bad.append(a) if a.attr_key == "ts.scale" else None))
        held = [b for b in written(s) if b.ty.storage_scope.startswith("local") and b not in inside]
        return not bad and not held

    def in_terms_of(self, test: Any, thread: Any) -> Any:
        """A condition with the names in it spelt out, and the thread's index as a variable."""
        for _ in range(8):  # names of names
            test = structural_map(test, (ir.Var, lambda v: self.known.get(v, v)))
        return structural_map(test, (ir.Call, lambda c: thread if _is_index(c) else c))

    def taken(self, s: Any, group: int, width: int = WARPGROUP) -> list[Any] | None:
        """What a warpgroup, or a warp, does of a condition; None where its threads differ."""
        if not isinstance(s, tirx.IfThenElse) or not self.index_in(s.condition):
            return statements(s)
        thread, analyzer = tirx.Var("thread", "int32"), sym.Analyzer()
        analyzer.bind(thread, ir.Range.from_min_extent(group * width, width))
        test = self.in_terms_of(s.condition, thread)
        if analyzer.can_prove(test):
            return self.taken(s.then_case, group, width)
        if analyzer.can_prove(tirx.Not(test)):
            return [] if s.else_case is None else self.taken(s.else_case, group, width)
        return None


def written(s: Any) -> set[Any]:
    """The buffers that a statement writes."""
    found: set[Any] = set()

    def call(c: Any) -> None:
        found.update(a.region.source for a in effects_of(c) if a.mode != "read")

    structural_walk(s, (ir.Call, call))
    structural_walk(s, (tirx.BufferStore, lambda b: found.add(b.buffer)))
    return found


def _number(k: int) -> Any:
    return tirx.IntImm("int32", k)


def announced(body: Any) -> Any:
    """The kernel's body where copies by TMA announce their bytes at barriers of which the author never
    does."""
    told: set[Any] = set()

    def look(c: Any) -> None:
        if getattr(c.op, "name", "") == "ts.mbarrier_expect_tx":
            told.add(c.args[0].source)

    structural_walk(body, (ir.Call, look))

    def evaluate(e: Any) -> Any:
        if name_of(e) != "tma_copy" or len(e.value.args) < 3 or e.value.args[2].source in told:
            return e
        tile, barrier = e.value.args[1:3]
        size = prod(int(r.extent) for r in tile.region) * BITS[str(tile.source.ty.dtype)] // 8
        where = {k: e.value.attrs[k] for k in ("executor", "reach")}
        bytes_of = [barrier, tirx.IntImm("int32", size)]
        made = ir.Call("ts.mbarrier_expect_tx", bytes_of, attrs=where, ret_ty=e.value.ty, span=e.span)
        return sequence([tirx.Evaluate(made, e.span), e])

    return structural_map(body, (tirx.Evaluate, evaluate))


def _is_index(e: Any) -> bool:
    return getattr(e.op, "name", "") == "ts.scale_index" and str(e.args[0].value) == "thread"


def _refuse_moves(body: Any) -> None:
    found: list[Any] = []

    def look(c: Any) -> None:
        op = find(c)
        if op is not None and op.name in _WARPGROUPS and str(c.attrs["executor"]) in ("block", "warp"):
            found.append(c)

    structural_walk(body, (ir.Call, look))
    if found:
        raise TileSyntaxError(
            "registers move between warpgroups",
            loc=loc_of(found[0].span),
            hint='inside T.Scale("warpgroup"), or under a condition that holds for the threads of whole '
            "warpgroups",
        )
