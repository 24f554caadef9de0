"""How threads look for the first elements of a line, by value and then by index: rounds, each of which finds the first element behind the
last round's. `Search` is the same loop for all targets; what differs are loads, stores and who looks along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.tvm_compat import tirx

ZERO = tirx.IntImm("int32", 0)


def compared_in(dtype: str) -> str:
    """The dtype in which elements are compared, without loss."""
    if "float" in dtype:
        return dtype if dtype == "float64" else "float32"
    return dtype if dtype.endswith(("32", "64")) else "int32"


@dataclass(frozen=True)
class Search:
    """Of ``extent`` elements the ``count`` first.

    dtype: in which they are compared. least: the least is first, not the greatest; a NaN comes before all numbers either way.
    load: an index → the element, in that dtype. put: the pick's number, its index → the statement that writes it.
    lanes: so many threads look through the line together; ``lane`` is one's own number. shuffle: a value, a mask → that of the lane
    whose number differs in the bits of the mask.
    """

    extent: int
    count: int
    dtype: str
    least: bool
    load: Callable[[Any], Any]
    put: Callable[[Any, Any], Any]
    lanes: int = 1
    lane: Any = ZERO
    shuffle: Callable[[Any, int], Any] | None = None
    #: told of each variable and below which number it stays
    bind: Callable[[Any, int], None] = lambda var, extent: None

    def statements(self) -> Any:
        """Where no index has been found, the index is ``extent``."""
        best, at = self._name("best", self.dtype), self._name("best_at", "int32")
        prior, prior_at = self._name("prior", self.dtype), self._name("prior_at", "int32")
        number, found = tirx.Var("r", "int32"), tirx.Var("found", "int32")
        self.bind(number, self.count)
        self.bind(found, self.extent)
        round_ = [_set(at, tirx.IntImm("int32", self.extent)), _set(best, tirx.const(0, self.dtype)), self._look(best, at, prior, prior_at)]
        round_ += self._join(best, at)
        if self.count == 1:
            return sequence([tirx.AllocBuffer(best), tirx.AllocBuffer(at), *round_, tirx.Bind(found, _get(at)), self.put(ZERO, found)])
        round_ += [tirx.Bind(found, _get(at)), self.put(number, found), _set(prior, _get(best)), _set(prior_at, _get(at))]
        body = tirx.For(number, ZERO, tirx.IntImm("int32", self.count), tirx.ForKind.SERIAL, sequence(round_))
        start = [_set(prior, tirx.const(0, self.dtype)), _set(prior_at, tirx.IntImm("int32", -1))]
        return sequence([*(tirx.AllocBuffer(b) for b in (best, at, prior, prior_at)), *start, body])

    def _look(self, best: Any, at: Any, prior: Any, prior_at: Any) -> Any:
        """Every thread its own elements, by rising index: an equal one found later is not taken."""
        step, index, value = tirx.Var("s", "int32"), tirx.Var("at", "int32"), tirx.Var("value", self.dtype)
        self.bind(index, self.extent)
        better = tirx.Or(tirx.EQ(_get(at), self.extent), self._before(value, _get(best)))
        if self.count > 1:
            behind = tirx.Or(self._before(_get(prior), value), tirx.And(self._equal(_get(prior), value), _get(prior_at) < index))
            better = tirx.And(tirx.Or(_get(prior_at) < 0, behind), better)
        take = tirx.IfThenElse(better, sequence([_set(best, value), _set(at, index)]), None)
        look = sequence([tirx.Bind(value, self.load(index)), take])
        if self.extent % self.lanes:
            look = tirx.IfThenElse(index < self.extent, look, None)
        steps = -(-self.extent // self.lanes)
        if steps == 1:
            return sequence([tirx.Bind(index, self.lane), look])
        look = sequence([tirx.Bind(index, step * self.lanes + self.lane if self.lanes > 1 else step), look])
        return tirx.For(step, ZERO, tirx.IntImm("int32", steps), tirx.ForKind.SERIAL, look)

    def _join(self, best: Any, at: Any) -> list[Any]:
        """What the lanes have found, pair by pair: all end with the same."""
        out, mask = [], 1
        while mask < self.lanes:
            assert self.shuffle is not None
            there, there_at = tirx.Var("there", self.dtype), tirx.Var("there_at", "int32")
            first = tirx.Or(self._before(there, _get(best)), tirx.And(self._equal(there, _get(best)), there_at < _get(at)))
            better = tirx.And(there_at < self.extent, tirx.Or(tirx.EQ(_get(at), self.extent), first))
            out += [
                tirx.Bind(there, self.shuffle(_get(best), mask)), tirx.Bind(there_at, self.shuffle(_get(at), mask)),
                tirx.IfThenElse(better, sequence([_set(best, there), _set(at, there_at)]), None),
            ]  # fmt: skip
            mask *= 2
        return out

    def _before(self, a: Any, b: Any) -> Any:
        test = (tirx.LT if self.least else tirx.GT)(a, b)
        return tirx.Or(test, tirx.And(_nan(a), tirx.EQ(b, b))) if "float" in self.dtype else test

    def _equal(self, a: Any, b: Any) -> Any:
        test = tirx.EQ(a, b)
        return tirx.Or(test, tirx.And(_nan(a), _nan(b))) if "float" in self.dtype else test

    @staticmethod
    def _name(name: str, dtype: str) -> Any:
        return tirx.decl_buffer((1,), dtype, name, scope="local", layout=None)


def _get(b: Any) -> Any:
    return tirx.BufferLoad(b, [ZERO])


def _set(b: Any, value: Any) -> Any:
    return tirx.BufferStore(b, value, [ZERO])


def _nan(x: Any) -> Any:
    """Not by ≠, which LLVM's code has false of a NaN (compiler/cpu/expr.py)."""
    return tirx.Not(tirx.EQ(x, x))
