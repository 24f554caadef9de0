"""T.Parallel on the CPU: a nest of loops, its innermost one as vectors where every access walks memory in
steps of one or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilescale.compiler.cpu.codegen import host_cpu
from tilescale.compiler.cpu.expr import vector_loop
from tilescale.compiler.cpu.tile import const
from tilescale.compiler.cpu.view import widened
from tilescale.compiler.ir.nests import loops_of
from tilescale.compiler.ir.statements import statements
from tilescale.compiler.tvm_compat import EXTERN_CALLS, IF_THEN_ELSE, ir, structural_walk, sym, tirx


class ParallelLoops:
    """Mixed into the lowering: ``parallel(for)``."""

    _nest: list[tuple[Any, Any]] | None = None
    _hoist: list[Any] | None = None
    inside: set[Any]
    """Variables bound within the nest that is being lowered: nothing that uses one can be asked before it."""
    variables: dict[Any, Any]
    analyzer: Any
    # The parts' that it is mixed with:
    stmt: Callable[[Any], Any]
    all: Callable[[list[Any]], Any]
    bind_loop: Callable[[Any, Any], None]
    _extent: Callable[[Any], Any]
    exactly: Callable[[Any], Any]

    def parallel(self, s: Any) -> Any:
        loops = loops_of(s)
        body = loops[-1].body
        nest = []
        for loop in loops:
            var = tirx.Var(loop.loop_var.name, str(loop.loop_var.ty))
            extent = self._extent(loop.extent)
            self.variables[loop.loop_var] = var
            self.bind_loop(var, extent)
            nest.append((var, extent))
        outer = self._nest, self._hoist, self.inside
        # First without guards: tests that a bound on the nest's indices decides are gathered, and asked once
        # in front of the nest.
        self._nest, self._hoist, self.inside = nest, [], set()
        fast_body = self.stmt(body)
        conditions = self._hoist
        self._nest, self._hoist = nest, None
        slow_body = self.stmt(body) if conditions else None
        self._nest, self._hoist, self.inside = outer
        fast = self._loops(nest, fast_body)
        if slow_body is None:
            return fast
        return tirx.IfThenElse(self.all(conditions), fast, self._loops(nest, slow_body, vector=False))

    def hoisted(self, test: Any) -> bool:
        """Whether a bounds test was turned into one on the whole nest (linear in the nest's indices, so its
        extremes decide)."""
        if self._hoist is None or self._nest is None:
            return False
        extremes = self._extreme(test)
        if extremes is None:
            return False
        text = str(extremes)
        if all(str(c) != text for c in self._hoist):
            self._hoist.append(extremes)
        return True

    def _extreme(self, test: Any) -> Any:
        """``i >= 0`` or ``i < n`` at the nest's worst corner; None where that is not decided by corners."""
        kind = type(test).__name__
        if kind not in ("GE", "LT") or not hasattr(test, "a"):
            return None
        variables = [v for v, _ in self._nest or ()]
        index = self.analyzer.simplify(test.a)
        found = sym.detect_linear_equation(index, variables)
        parts = list(found) if found is not None else []
        if len(parts) != len(variables) + 1:
            return None
        names = {v for v, _ in self._nest or ()}
        value = parts[-1]
        if _uses(value, names) or _uses(test.b, names) or _loads(value) or _loads(test.b):
            return None
        if not self._fixed(value) or not self._fixed(test.b):
            return None
        for coefficient, (var, extent) in zip(parts[:-1], self._nest or (), strict=True):
            c = const(coefficient)
            if c is None:
                return None
            if (c > 0) == (kind == "LT") and c != 0:
                value = value + (widened(extent, str(var.ty)) - 1) * c
        return self.exactly((value >= test.b) if kind == "GE" else (value < test.b))

    def _fixed(self, e: Any) -> bool:
        """Whether every variable of an expression is bound outside the nest."""
        return not _uses(e, self.inside)

    def _loops(self, nest: list[tuple[Any, Any]], body: Any, vector: bool = True) -> Any:
        var, extent = nest[-1]
        count = const(extent)
        lanes = _vector_lanes(body, var) if vector and count is not None and count > 1 else 0
        if lanes:
            made = vector_loop(count, lanes, lambda i: _substitute(body, var, i))  # type: ignore[arg-type]
        else:
            made = self._serial(var, extent, body)
        for var, extent in reversed(nest[:-1]):
            made = self._serial(var, extent, made)
        return made

    @staticmethod
    def _serial(var: Any, extent: Any, body: Any) -> Any:
        dt = str(var.ty)
        return tirx.For(var, tirx.IntImm(dt, 0), widened(extent, dt), tirx.ForKind.SERIAL, body)


def _uses(e: Any, variables: Any) -> bool:
    found: list[Any] = []
    structural_walk(e, (ir.Var, lambda v: found.append(v) if v in variables else None))
    return bool(found)


def _loads(e: Any) -> bool:
    found: list[Any] = []
    structural_walk(e, (ir.TensorLoad, found.append))
    return bool(found)


def _substitute(body: Any, var: Any, value: Any) -> Any:
    """``body`` with fresh bindings, so that each copy of it defines its own variables."""
    from tilescale.compiler.tvm_compat import structural_map

    fresh: dict[Any, Any] = {}

    def note(s: Any) -> None:
        fresh[s.var] = tirx.Var(s.var.name, s.var.ty)

    structural_walk(body, (tirx.Bind, note))
    value = widened(value, str(var.ty)) if not isinstance(value, int) else tirx.IntImm(str(var.ty), value)
    return structural_map(body, (ir.Var, lambda v: value if v.same_as(var) else fresh.get(v, v)))


def _vector_lanes(body: Any, var: Any) -> int:
    """How many lanes the body may run in along ``var``: 0 unless it only binds and stores, in steps of one
    along ``var``."""
    stmts = statements(body)
    width = 1
    varying = {var}
    for s in stmts:
        if isinstance(s, tirx.Bind):
            if _branches(s.value) or not _accesses_ok(s.value, var, varying):
                return 0
            if _uses(s.value, varying):
                varying.add(s.var)
            width = max(width, _widest(s.value))
        elif isinstance(s, tirx.BufferStore):
            if (
                _branches(s.value)
                or not _accesses_ok(s.value, var, varying)
                or _step(s.indices[0], var, varying) != 1
            ):
                return 0
            width = max(width, _widest(s.value))
        elif not (isinstance(s, tirx.Evaluate) and isinstance(s.value, tirx.IntImm)):
            return 0
    return max(2, host_cpu().vector_bytes // max(width, 1))


def _branches(e: Any) -> bool:
    found: list[Any] = []
    structural_walk(e, (ir.Call, lambda c: found.append(c) if c.op.name in _SCALAR_ONLY else None))
    return bool(found)


_SCALAR_ONLY = EXTERN_CALLS | {IF_THEN_ELSE}


def _accesses_ok(e: Any, var: Any, varying: set[Any]) -> bool:
    bad: list[Any] = []

    def look(load: Any) -> None:
        if _step(load.indices[0], var, varying) not in (0, 1):
            bad.append(load)

    structural_walk(e, (ir.TensorLoad, look))
    return not bad


def _step(index: Any, var: Any, varying: set[Any]) -> int | None:
    """By how many elements an index moves a step of ``var``; None where that is not a constant."""
    if not _uses(index, varying):
        return 0
    if _uses(index, varying - {var}):
        return None
    if isinstance(index, tirx.Cast):
        index = index.value
    total = 0
    for term, sign in _terms(index, 1):
        found = sym.detect_linear_equation(term, [var])
        parts = list(found) if found is not None else []
        coefficient = const(parts[0]) if len(parts) == 2 else None
        if coefficient is None:
            return None
        total += sign * coefficient
    return total


def _terms(e: Any, sign: int) -> list[tuple[Any, int]]:
    """The summands of an index, conversions between index widths taken off."""
    if isinstance(e, tirx.Add):
        return _terms(e.a, sign) + _terms(e.b, sign)
    if isinstance(e, tirx.Sub):
        return _terms(e.a, sign) + _terms(e.b, -sign)
    if isinstance(e, tirx.Cast) and "int" in str(e.ty):
        return _terms(e.value, sign)
    return [(e, sign)]


def _widest(e: Any) -> int:
    """Bytes of the widest value in an expression, at least four: smaller ones are computed in float32."""
    widest = [4]

    def look(x: Any) -> None:
        dt = str(x.ty) if hasattr(x, "ty") else ""
        if dt in ("float64", "int64", "uint64"):
            widest.append(8)

    structural_walk(e, ((ir.TensorLoad, tirx.Cast), look))
    return max(widest)
