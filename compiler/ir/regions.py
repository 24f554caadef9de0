"""How two regions of a program lie to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, sym, tirx

#: proven to have no element in common; element for element the same; neither of the two is known
APART, SAME, MIXED = "apart", "same", "mixed"


class _Buffer(Protocol):
    @property
    def var(self) -> Any: ...


class Part(Protocol):
    """A part of a buffer (`builder.values.Region`): where it begins on each axis, and how far it goes."""

    @property
    def buffer(self) -> _Buffer: ...
    @property
    def mins(self) -> Sequence[Any]: ...
    @property
    def extents(self) -> Sequence[Any]: ...


class Regions:
    """What regions of one program share, through views and by the names that stand for the own place at a
    scale."""

    def __init__(self, body: Any):
        self.bases: dict[Any, Any] = {}
        self.names: dict[Any, Any] = {}
        self.places: dict[tuple[str, ...], Any] = {}
        structural_walk(body, (tirx.DeclBuffer, lambda s: self.bases.__setitem__(s.buffer, s.data.args[0])))
        structural_walk(body, (tirx.Bind, self._named))

    def _named(self, s: Any) -> None:
        if self._is_place(s.value):
            self.names[s.var] = self._place(s.value)

    @staticmethod
    def _is_place(e: Any) -> bool:
        return isinstance(e, ir.Call) and getattr(e.op, "name", "") in ("ts.scale_index", "ts.scale_count")

    def _place(self, e: Any) -> Any:
        """One variable for an own index or count, which is one value wherever it is asked for."""
        key = (str(e.op.name), *(str(a) for a in e.args))
        if key not in self.places:
            self.places[key] = tirx.Var("place", str(e.ty))
        return self.places[key]

    def base(self, buffer: Any) -> Any:
        """The buffer that this one is a view of; itself."""
        while buffer in self.bases:
            buffer = self.bases[buffer]
        return buffer

    def relation(self, a: Part, b: Part) -> str:
        """APART, SAME or MIXED."""
        if not self.base(a.buffer.var).same_as(self.base(b.buffer.var)):
            return APART
        if not a.buffer.var.same_as(b.buffer.var):
            return MIXED  # two shapes of one memory
        analyzer, same = sym.Analyzer(), True
        for low, extent, first, wide in zip(a.mins, a.extents, b.mins, b.extents, strict=True):
            low, extent, first, wide = (self._spelled(e) for e in (low, extent, first, wide))
            ahead = constant(analyzer.simplify(first - low))
            if ahead is not None and (
                analyzer.can_prove(extent <= ahead) or analyzer.can_prove(wide <= -ahead)
            ):
                return APART
            same = same and ahead == 0 and constant(analyzer.simplify(wide - extent)) == 0
        return SAME if same else MIXED

    def _spelled(self, e: Any) -> Any:
        """An index without the names of places."""
        if isinstance(e, int):
            return tirx.IntImm("int32", e)
        called = (ir.Call, lambda c: self._place(c) if self._is_place(c) else c)
        return structural_map(e, [(tirx.Var, lambda v: self.names.get(v, v)), called])
