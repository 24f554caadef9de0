"""When the products of a consumer, which the tensor cores compute beside its threads, are awaited.

A product is issued where it stands, and awaited in front of the first statement that touches its accumulator
or writes what it reads. Products are complete in the order of their issue, so the wait names how many of the
later ones may still run. A ring's release behind a product means that its stage has been read: it goes behind
that product's wait. Nothing is in flight where ways part or join (loops, branches), since ptxas awaits every
product there (warning C7515). What is computed between issue and wait should run beside the product: the wait
names the largest tile among it, so that the machine's compiler does not move it up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

from tilescale.compiler.ir.nests import nest_of
from tilescale.compiler.ir.operations import name_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout.loops import element_dtype
from tilescale.compiler.ops.wgmma import await_products
from tilescale.compiler.passes.products import flat, has_producer, is_product, operands_of, touched
from tilescale.compiler.passes.roles import calls
from tilescale.compiler.passes.stage_operands import whole
from tilescale.compiler.tvm_compat import structural_walk, tirx


@dataclass
class Flight:
    """A product under way. ``held``: releases that follow its end, with the counters that they move on."""

    call: Any
    held: list[Any] = field(default_factory=list)
    counters: set[Any] = field(default_factory=set)

    @property
    def result(self) -> Any:
        return self.call.args[2].source

    @property
    def operands(self) -> set[Any]:
        return {r.source for r in operands_of(self.call)}


def awaited_products(program: TileProgram) -> TileProgram:
    """The program with every product awaited."""
    body = program.func.body
    if not has_producer(program) and not any(is_product(tirx.Evaluate(c)) for c in calls(body)):
        return program
    bases: dict[Any, Any] = {}
    structural_walk(body, (tirx.DeclBuffer, lambda s: bases.__setitem__(s.buffer, s.data.args[0])))
    single = {k for k, r in enumerate(program.schedule.rings) if r.depth == 1}
    alone = {c.args[2].source: int(c.attrs["first_thread"]) for c in calls(body) if "first_thread" in c.attrs}
    return program.with_body(_Awaiting(program.schedule.ring_of, bases, single, alone).around(body))


class _Awaiting:
    def __init__(self, rings: dict[Any, int], bases: dict[Any, Any], single: set[int], alone: dict[Any, int]):
        """``single``: rings of one stage. ``alone``: accumulators that one warpgroup alone has."""
        self.rings, self.bases, self.single, self.alone = rings, bases, single, alone

    def around(self, s: Any) -> Any:
        """A statement at whose ends nothing is in flight."""
        if not any(is_product(tirx.Evaluate(c)) for c in calls(s)) or "ts.late" in (
            getattr(s, "annotations", None) or {}
        ):
            return s
        if isinstance(s, tirx.IfThenElse):
            other = None if s.else_case is None else self.around(s.else_case)
            return tirx.IfThenElse(s.condition, self.around(s.then_case), other, s.span)
        if isinstance(s, tirx.For):
            return tirx.For(
                s.loop_var,
                s.min,
                s.extent,
                s.kind,
                self.around(s.body),
                annotations=dict(s.annotations or {}),
                span=s.span,
            )
        if isinstance(s, tirx.While):
            return tirx.While(s.condition, self.around(s.body), s.span)
        if isinstance(s, tirx.AttrStmt):
            return tirx.AttrStmt(s.node, s.attr_key, s.value, self.around(s.body), s.span)
        return self.in_order(flat(s))

    def in_order(self, stmts: list[Any]) -> Any:
        out: list[Any] = []
        flying: list[Flight] = []
        skipped: set[int] = set()
        since: list[Any] = []  # behind the last product
        for k, s in enumerate(stmts):
            if k in skipped:
                continue
            if (
                name_of(s) == "ring_release"
                and (f := self._reader(flying, int(s.value.attrs["ring"]))) is not None
            ):
                counter = s.value.args[0].source
                f.held.append(s)
                if (
                    k + 1 < len(stmts)
                    and isinstance(stmts[k + 1], tirx.BufferStore)
                    and stmts[k + 1].buffer.same_as(counter)
                ):
                    skipped.add(k + 1)
                    f.held.append(stmts[k + 1])
                    f.counters.add(counter)
                continue
            self._land(flying, self._needed(flying, s), out, s, since)
            since = [] if is_product(s) else [*since, s]
            if is_product(s):
                flying.append(Flight(s.value))
            out.append(s if is_product(s) else self.around(s))
        self._land(flying, len(flying), out, None, since if self.alone else [])
        return sequence(out)

    def _reader(self, flying: list[Flight], ring: int) -> Flight | None:
        """The last product under way that reads a stage of a ring."""
        return next((f for f in reversed(flying) if any(self.rings.get(b) == ring for b in f.operands)), None)

    def _needed(self, flying: list[Flight], s: Any) -> int:
        """How many of the products under way must be complete in front of a statement."""
        if (
            isinstance(s, (tirx.While, tirx.AttrStmt, tirx.IfThenElse))
            or isinstance(s, tirx.For)
            and nest_of(s) is None
        ):
            return len(flying)
        if name_of(s) == "barrier":  # what stands in front of a barrier that the author wrote is done there
            return len(flying)
        if (nest := nest_of(s)) is not None and any(
            a.conditional and a.mode == "write" for a in nest.accesses
        ):
            return self._branching(flying, {a.buffer for a in nest.accesses})
        read, written = ({self._root(b) for b in buffers} for buffers in touched(s))
        if is_product(s):  # products into one accumulator follow one another by themselves
            own = s.value.args[2].source
            read, written = read - {own}, written - {own}
        for k in reversed(range(len(flying))):
            f = flying[k]
            if f.result in read | written or written & f.operands or (read | written) & f.counters:
                return k + 1
        return 0

    def _branching(self, flying: list[Flight], buffers: set[Any]) -> int:
        """In front of a branch: all, or those of the one warpgroup that has what it computes."""
        own = {self.alone[b] for b in buffers if b in self.alone}
        concerned = [
            k for k, f in enumerate(flying) if len(own) != 1 or self.alone.get(f.result) in {None, *own}
        ]
        return concerned[-1] + 1 if concerned else 0

    def _root(self, b: Any) -> Any:
        while b in self.bases:
            b = self.bases[b]
        return b

    def _land(self, flying: list[Flight], count: int, out: list[Any], s: Any, since: list[Any]) -> None:
        """The first products end here, in front of ``s``, and what waited for them follows. ``since``: the
        statements behind the last product, which run beside it."""
        if not count:
            return
        done, flying[:] = flying[:count], flying[count:]
        # What other warpgroups compute beside their products says nothing.
        by = {self.alone.get(f.result) for f in done}
        others = {b for b, first in self.alone.items() if by.isdisjoint((first, None))}
        beside = [] if flying else [whole(b) for b in _beside(since, others)[: None if self.alone else 1]]
        parts = self._apart(done)
        for k, part in enumerate(parts, 1):
            later = [f for p in parts[k:] for f in p] + flying
            tiles = list({f.result: f.call.args[2] for f in part}.values())
            kept = {*self.rings, *(b for f in later for b in f.operands)}
            operands = list(
                {r.source: r for f in part for r in operands_of(f.call) if r.source not in kept}.values()
            )
            straight = part is parts[-1] and _is_straight(s)
            out.append(await_products(tiles, part[-1].call.span, operands, len(later), beside, straight))
            out += [s for f in part for s in f.held]

    def _apart(self, done: list[Flight]) -> list[list[Flight]]:
        """Products that end here, in parts that are awaited one by one: a stage that the next copy waits for,
        since its ring has no other, is free as soon as it has been read."""
        parts: list[list[Flight]] = [[]]
        for k, f in enumerate(done):
            parts[-1].append(f)
            free = any(
                int(s.value.attrs["ring"]) in self.single for s in f.held if name_of(s) == "ring_release"
            )
            if (
                free
                and k + 1 < len(done)
                and not {x.result for x in done[: k + 1]} & {x.result for x in done[k + 1 :]}
            ):
                parts.append([])
        return parts


def _beside(stmts: list[Any], but: set[Any]) -> list[Any]:
    """The largest fragments of float32 that statements write, of others than those: the ones whose
    computation takes longest."""
    written = [
        b
        for s in stmts
        for b in touched(s)[1]
        if b.ty.storage_scope == "local.fragment" and element_dtype(b) == "float32"
    ]
    sizes = {b: prod(int(e) for e in b.ty.shape) for b in written if b not in but}
    return [b for b, size in sizes.items() if size == max(sizes.values())]


def _is_straight(s: Any) -> bool:
    """Whether a statement becomes instructions without a branch: a nest over fragments alone."""
    nest = None if s is None else nest_of(s)
    return nest is not None and all(
        a.buffer.ty.storage_scope == "local.fragment" and not a.conditional for a in nest.accesses
    )
