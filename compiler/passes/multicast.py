"""Tiles that the blocks of a cluster copy alike: each block fetches its share of them, and TMA writes it into
all of these blocks.

A ring's copy is the same in two blocks of a cluster when its coordinates, and all that decides whether and
how often it is made, do not depend on which of the two it is. That is proven here: a block's index along an
axis is written as ``cluster · extent + rank``, and what the simplifier makes of an expression must not hold
the rank. A copy is shared along every axis of the cluster of which that is true.

Blocks that share a copy go through their rings in step: a block's stage is empty when the consumers of all
blocks that it copies into have read it (cuda/rings.py argues the order). So the trip counts of everything
around must agree, which the same proof shows; where they do not, or where nothing is shared, every block
copies for itself.
"""

from __future__ import annotations

from math import prod
from typing import Any

from tilescale.compiler.ir.operations import name_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.scales import SCALES
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.passes.products import has_producer
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, sym, tirx

AXES = "xyz"
#: rows of a box come in groups of eight, the swizzle's
ROWS = 8


def multicast(program: TileProgram) -> TileProgram:
    """The scheduled program, whose copies into rings name the axes of the cluster along which they are
    shared."""
    dims = program.launch.cluster
    if prod(dims) == 1 or not has_producer(program):
        return program
    producer = _producer(program.func.body)
    found = _Shares(program, _bindings(program.func.body, producer)).of(producer)
    if not found:
        return program

    def mark(s: Any) -> Any:
        axes = found.get(s.value, "") if isinstance(s.value, ir.Call) else ""
        if not axes:
            return s
        call = ir.Call(
            s.value.op,
            list(s.value.args),
            attrs={**dict(s.value.attrs), "multicast": axes},
            ret_ty=s.value.ty,
            span=s.span,
        )
        return tirx.Evaluate(call, s.span)

    for call, axes in found.items():
        ring = program.schedule.rings[int(call.attrs["ring"])]
        ring.shared = "".join(a for a in AXES if a in ring.shared or a in axes)
    return program.with_body(structural_map(program.func.body, (tirx.Evaluate, mark)))


def without_reach(program: TileProgram) -> TileProgram:
    """The program without the scales that only say whom statements reach: the operations inside say it
    themselves."""

    def drop(s: Any) -> Any:
        return (
            s.body
            if s.attr_key == "ts.scale" and SCALES[int(s.value.value)] in ("cta_cluster", "grid")
            else s
        )

    body = structural_map(program.func.body, (tirx.AttrStmt, drop))
    return program.with_body(structural_map(body, (tirx.SeqStmt, lambda s: sequence(list(s.seq)))))


def _producer(body: Any) -> Any:
    found: list[Any] = []
    structural_walk(
        body,
        (
            tirx.AttrStmt,
            lambda s: found.append(s) if s.attr_key == "ts.role" and s.node.value == "producer" else None,
        ),
    )
    return found[0].body


def _bindings(body: Any, producer: Any) -> list[Any]:
    """The names bound around the roles, which the producer may read."""
    inside: set[Any] = set()
    structural_walk(producer, (tirx.Bind, lambda s: inside.add(s.var)))
    found: list[Any] = []
    structural_walk(body, (tirx.Bind, lambda s: None if s.var in inside else found.append(s)))
    return found


class _Shares:
    """What a producer's statements know of the block's rank in its cluster."""

    def __init__(self, program: TileProgram, around: list[Any]):
        self.program, self.dims = program, program.launch.cluster
        self.analyzer = sym.Analyzer()
        self.ranks = [tirx.Var(f"rank_{a}", "int32") for a in AXES]
        self.values: dict[Any, Any] = {}
        for k, var in enumerate(program.launch.block_vars):
            cluster = tirx.Var(f"cluster_{AXES[k]}", "int32")
            self.analyzer.bind(cluster, ir.Range(0, 1 << 28))
            self.analyzer.bind(self.ranks[k], ir.Range(0, self.dims[k]))
            self.values[var] = cluster * self.dims[k] + self.ranks[k] if self.dims[k] > 1 else var
        for s in around:
            self.values[s.var] = self.known(s.value)
        #: axes along which something that decides about copies differs
        self.apart: set[str] = set()
        self.found: dict[Any, set[str]] = {}

    def of(self, producer: Any) -> dict[Any, str]:
        """Copy → the axes along which the cluster's blocks make it alike."""
        self.visit(producer)
        axes = {a for a, n in zip(AXES, self.dims, strict=True) if n > 1} - self.apart
        found = {
            call: "".join(a for a in AXES if a in axes and a not in differs)
            for call, differs in self.found.items()
        }
        return {call: shared for call, shared in found.items() if shared and self._divides(call, shared)}

    def _divides(self, call: Any, axes: str) -> bool:
        """Whether a tile has a share of whole boxes for each block; a part of a row is not worth sharing."""
        filled = call.args[1].region
        rows = int(filled[1].extent) if len(filled) == 3 else 1
        return bool(rows % (ROWS * prod(self.dims[AXES.index(a)] for a in axes)) == 0)

    def visit(self, s: Any) -> None:
        if isinstance(s, tirx.SeqStmt):
            for x in s.seq:
                self.visit(x)
        elif isinstance(s, tirx.Bind):
            self.values[s.var] = self.known(s.value)
        elif isinstance(s, tirx.For):
            self.decides(s.min)
            self.decides(s.extent)
            self.visit(s.body)
        elif isinstance(s, tirx.IfThenElse):
            self.decides(s.condition)
            self.visit(s.then_case)
            if s.else_case is not None:
                self.visit(s.else_case)
        elif isinstance(s, tirx.While):
            self.decides(s.condition)
            self.visit(s.body)
        elif isinstance(s, tirx.AttrStmt):
            self.visit(s.body)
        elif isinstance(s, tirx.BufferStore):
            self.decides(s.value)  # a variable of the producer: it may decide what follows
        elif name_of(s) == "tma_load":
            self.found[s.value] = self.differs([r.min for r in s.value.args[0].region])

    def decides(self, e: Any) -> None:
        self.apart |= self.differs([e])

    def differs(self, expressions: list[Any]) -> set[str]:
        """The axes on whose rank expressions depend."""
        found: set[str] = set()
        for e in expressions:
            names: set[Any] = set()
            structural_walk(self.known(e), (ir.Var, names.add))
            found |= {a for a, rank in zip(AXES, self.ranks, strict=True) if rank in names}
        return found

    def known(self, e: Any) -> Any:
        """An expression with its names' values, block indices by cluster and rank, simplified."""
        found = [(ir.Var, lambda v: self.values.get(v, v)), (ir.Call, lambda c: self._scale(c))]
        made = structural_map(tirx.Evaluate(e), found).value
        return self.analyzer.simplify(made) if "int" in str(made.ty) or "bool" in str(made.ty) else made

    def _scale(self, call: Any) -> Any:
        """The own index or the count at a scale."""
        if call.op.name == "ts.scale_count" and str(call.args[0].value) == "cta_cluster":
            return tirx.IntImm("int32", prod(self.dims))
        if call.op.name != "ts.scale_index":
            return call
        own, stride = tirx.IntImm("int32", 0), 1
        for rank, n in zip(self.ranks, self.dims, strict=True):
            if n > 1:
                own, stride = own + rank * stride, stride * n
        # Of another scale: it depends on all of them.
        return own if str(call.args[0].value) == "cta_cluster" else own * call
