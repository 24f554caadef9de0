"""Scalar expressions of tile IR as Python functions of an executor; in a T.Parallel nest the same functions
give arrays over its lanes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tilescale.compiler.findings import Finding
from tilescale.compiler.ir.contexts import Site, Value
from tilescale.compiler.ir.operations import TileOp, find
from tilescale.compiler.sim import nest, numerics
from tilescale.compiler.sim.teams import simulated_rank
from tilescale.compiler.sim.view import BufferInfo
from tilescale.compiler.tvm_compat import IF_THEN_ELSE, REINTERPRET
from tilescale.errors import InternalError
from tilescale.language.dtypes import BITS

if TYPE_CHECKING:
    from tilescale.compiler.sim.machine import Executor

_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul,
    "BitwiseAnd": operator.and_, "BitwiseOr": operator.or_, "BitwiseXor": operator.xor,
}  # fmt: skip
_COMPARISON: dict[str, Callable[[Any, Any], Any]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}
_SHIFTS: dict[str, Callable[[Any, Any], Any]] = {
    "LShift": operator.lshift,
    "shift_left": operator.lshift,
    "RShift": operator.rshift,
    "shift_right": operator.rshift,
}
_SIGN = {"Add": "+", "Sub": "-", "Mul": "*"}
_DIVISION: dict[str, Callable[[Any, Any], Any]] = {
    "FloorDiv": operator.floordiv, "FloorMod": operator.mod,
    "Div": numerics.truncated_division, "Mod": numerics.truncated_remainder,
}  # fmt: skip


class Expressions:
    """Mixed into the preparation: ``scalar(e)`` is a function that evaluates ``e`` for an executor."""

    slots: dict[Any, int]
    buffers: list[BufferInfo]
    #: buffers that each lane of a nest has for itself, and those of which lanes may touch the same elements
    lane_buffers: set[Any]
    tested: set[Any]
    # The preparation's own:
    site: Callable[[Any, str], Site]
    slot: Callable[[Any], int]
    performed: Callable[[TileOp, Any], Any]

    def scalar(self, e: Any) -> Value:
        kind = type(e).__name__
        if kind in _SHIFTS:
            return self._shifted(_SHIFTS[kind], e, e.a, e.b)
        if kind in _ARITHMETIC or kind in _COMPARISON or kind in _DIVISION or kind in ("Min", "Max"):
            return self._pair(kind, e)
        method = getattr(self, "_x_" + kind, None)
        if method is None:
            raise InternalError(f"the simulator does not know the expression {kind}: {e}")
        made: Value = method(e)
        return made

    def _pair(self, kind: str, e: Any) -> Value:
        a, b, dtype = self.scalar(e.a), self.scalar(e.b), str(e.a.ty)
        if kind in _COMPARISON:
            test = _COMPARISON[kind]
            return lambda ex: test(a(ex), b(ex))
        if kind in ("Min", "Max"):
            choose = numerics.minimum if kind == "Min" else numerics.maximum
            return lambda ex: choose(a(ex), b(ex))
        if kind in _DIVISION and "float" not in dtype:
            return self._divided(_DIVISION[kind], a, b, e, dtype)
        op = operator.truediv if kind == "Div" else np.mod if kind == "FloorMod" else _ARITHMETIC[kind]
        if "float" in dtype or dtype == "bool":
            return lambda ex: op(a(ex), b(ex))
        low, high = numerics.limits(dtype)
        if dtype in ("int32", "int64") and kind in numerics.EXACT:
            return self._exact(kind, op, a, b, e, dtype)

        def integers(ex: Any) -> Any:
            r = op(a(ex), b(ex))
            return r if type(r) is not int or low <= r <= high else numerics.wrap(r, dtype)

        return integers

    def _exact(
        self, kind: str, op: Callable[[Any, Any], Any], a: Value, b: Value, e: Any, dtype: str
    ) -> Value:
        """Signed arithmetic of 32 and 64 bits, which targets and their compilers take for exact: a result out
        of range is a finding."""
        low, high = numerics.limits(dtype)
        leaves = numerics.EXACT[kind]
        site = self.site(e, f"{dtype} arithmetic")

        def integers(ex: Any) -> Any:
            x, y = a(ex), b(ex)
            r = op(x, y)
            if type(r) is int:
                if low <= r <= high:
                    return r
                if ex.mask is None or ex.mask.any():
                    self._overflowed(ex, site, f"{x} {_SIGN[kind]} {y} is {r}", dtype)
                return numerics.wrap(r, dtype)
            bad = leaves(x, y, r)
            if bad is not None and (bad := bad if ex.mask is None else bad & ex.mask).any():
                first = [int(np.broadcast_to(v, bad.shape)[bad].flat[0]) for v in (x, y)]
                self._overflowed(ex, site, f"{first[0]} {_SIGN[kind]} {first[1]} is {op(*first)}", dtype)
            return r

        return integers

    @staticmethod
    def _overflowed(ex: Any, site: Any, text: str, dtype: str) -> None:
        ex.machine.report.add(
            Finding(
                "arithmetic", f"{text}, which {dtype} does not hold", ex.where(site), hint="a wider dtype"
            )
        )

    def _divided(self, op: Callable[[Any, Any], Any], a: Value, b: Value, e: Any, dtype: str) -> Value:
        site = self.site(e, "integer division")

        def run(ex: Any) -> Any:
            x, y = a(ex), b(ex)
            zero = y == 0
            if not (zero.any() if numerics.is_vector(zero) else zero):
                return (
                    op(x, y)
                    if numerics.is_vector(x) or numerics.is_vector(y)
                    else numerics.wrap(op(x, y), dtype)
                )
            wanted = zero if ex.mask is None else zero & ex.mask
            if wanted.any() if numerics.is_vector(wanted) else wanted:
                hint = "T.max(divisor, 1), or a condition"
                ex.machine.report.add(
                    Finding("arithmetic", "an integer is divided by zero", ex.where(site), hint=hint)
                )
            if not numerics.is_vector(zero):
                return 0
            return np.where(zero, 0, op(x, np.where(zero, 1, y).astype(y.dtype)))

        return run

    def _shifted(self, op: Callable[[Any, Any], Any], e: Any, value: Any, by: Any) -> Value:
        """A shift, which targets define for counts from zero up to the width alone; with another one, as of
        all bits, and a finding."""
        a, b, dtype = self.scalar(value), self.scalar(by), str(value.ty)
        bits, site = BITS[dtype], self.site(e, "shift")

        def run(ex: Any) -> Any:
            x, n = a(ex), b(ex)
            bad = (n < 0) | (n >= bits)
            if np.any(bad if ex.mask is None else bad & ex.mask):
                count = int(np.broadcast_to(n, np.shape(bad))[bad].flat[0]) if np.ndim(bad) else int(n)
                text = f"{dtype} has {bits} bits and is shifted by {count}"
                ex.machine.report.add(
                    Finding("arithmetic", text, ex.where(site), hint=f"a count n with 0 ≤ n < {bits}")
                )
            if not numerics.is_vector(x) and not numerics.is_vector(n):
                return numerics.wrap(op(x, bits if bad else n), dtype)
            most = np.where(bad, bits - 1, n).astype(numerics.compute(dtype))
            made = op(np.asarray(x, numerics.compute(dtype)), most)
            return np.where(bad, op(made, 1), made).astype(numerics.compute(dtype))

        return run

    def _x_Var(self, e: Any) -> Value:
        slot = self.slot(e)
        return lambda ex: ex.v[slot]

    def _x_IntImm(self, e: Any) -> Value:
        value = numerics.scalar(int(e.value), str(e.ty))
        return lambda ex: value

    def _x_FloatImm(self, e: Any) -> Value:
        value = numerics.scalar(float(e.value), str(e.ty))
        return lambda ex: value

    def _x_Cast(self, e: Any) -> Value:
        value, src, dst = self.scalar(e.value), str(e.value.ty), str(e.ty)
        if src == dst:
            return value
        if "int" in src and "int" in dst:  # mostly indices

            def integers(ex: Any) -> Any:
                v = value(ex)
                return numerics.wrap(v, dst) if type(v) is int else numerics.cast(v, src, dst)

            return integers
        return lambda ex: numerics.cast(value(ex), src, dst)

    def _x_Not(self, e: Any) -> Value:
        a = self.scalar(e.a)

        def run(ex: Any) -> Any:
            v = a(ex)
            return ~v if numerics.is_vector(v) else not v

        return run

    def _x_BitwiseNot(self, e: Any) -> Value:
        if (dtype := str(e.ty)) == "bool":  # Python's ~True is −2
            return self._x_Not(e)
        a = self.scalar(e.a)

        def run(ex: Any) -> Any:
            v = ~a(ex)
            return numerics.wrap(v, dtype) if type(v) is int else v

        return run

    def _x_And(self, e: Any) -> Value:
        return self._decided(e, False)

    def _x_Or(self, e: Any) -> Value:
        return self._decided(e, True)

    def _decided(self, e: Any, by: bool) -> Value:
        """``and`` / ``or``: the right side is evaluated only where the left one does not decide."""
        a, b = self.scalar(e.a), self.scalar(e.b)

        def run(ex: Any) -> Any:
            left = a(ex)
            if not numerics.is_vector(left):
                return left if bool(left) is by else b(ex)
            with nest.masked(ex, ~left if by else left) as some:
                right = b(ex) if some else by
            return left | right if by else left & right

        return run

    def _x_Select(self, e: Any) -> Value:
        return self._chosen(e.condition, e.true_value, e.false_value)

    def _chosen(self, condition: Any, yes: Any, no: Any) -> Value:
        test, a, b, kind = (
            self.scalar(condition),
            self.scalar(yes),
            self.scalar(no),
            numerics.compute(str(yes.ty)),
        )

        def run(ex: Any) -> Any:
            chosen = test(ex)
            if not numerics.is_vector(chosen):
                return a(ex) if chosen else b(ex)
            with nest.masked(ex, chosen) as some:
                x = a(ex) if some else None
            with nest.masked(ex, ~chosen) as others:
                y = b(ex) if others else None
            if x is None or y is None:
                return y if x is None else x
            return np.asarray(np.where(chosen, x, y), dtype=kind)  # of two Python numbers NumPy makes 64 bits

        return run

    def _x_Let(self, e: Any) -> Value:
        value, slot = self.scalar(e.value), self.slot(e.var)
        body = self.scalar(e.body)

        def run(ex: Any) -> Any:
            ex.v[slot] = value(ex)
            return body(ex)

        return run

    def _x_TensorLoad(self, e: Any) -> Value:
        return nest.load(self, e)

    _x_BufferLoad = _x_TensorLoad

    def _x_Call(self, e: Any) -> Value:
        name, dtype = e.op.name, str(e.ty)
        if name in ("ts.scale_index", "ts.scale_count"):
            return self._scale_value(str(e.args[0].value), int(name == "ts.scale_count"))
        if name == IF_THEN_ELSE:
            return self._chosen(*e.args)
        if name == "ts.scale_rank":
            return simulated_rank(self, e)
        if (op := find(e)) is not None:
            run: Value = self.performed(op, e)
            return run
        if (shift := _SHIFTS.get(name.rpartition(".")[2])) is not None and name.startswith("tirx."):
            return self._shifted(shift, e, *e.args)
        args = [self.scalar(a) for a in e.args]
        source = str(e.args[0].ty)
        if name.startswith("ts.math."):
            short = name[len("ts.math.") :]
            return lambda ex: numerics.function(short, [a(ex) for a in args], source)
        if name == REINTERPRET:
            return lambda ex: numerics.reinterpret(args[0](ex), source, dtype)
        if name.startswith("ts."):
            raise InternalError(f"{name} is no scalar in the simulator")
        return lambda ex: numerics.intrinsic(name, [a(ex) for a in args], dtype, source)

    def _scale_value(self, name: str, which: int) -> Value:
        """The own index (0) or the count (1) at a scale."""

        def run(ex: Executor) -> int:
            if name in ex.scales:
                return ex.scales[name][which]
            machine, block = ex.machine, ex.block
            if name == "device":
                return (ex.rank.number, len(machine.ranks))[which]
            if name in ("grid", "block"):
                return (block.linear, machine.grid[0] * machine.grid[1] * machine.grid[2])[which]
            if name == "cta_cluster":
                dims = machine.prepared.cluster
                return (block.cluster_index, dims[0] * dims[1] * dims[2])[which]
            return (0, 1)[which]

        return run
