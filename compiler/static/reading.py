"""Expressions of tile IR as terms and conditions, and the reads that stand in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from tilescale.compiler.ir.operations import find
from tilescale.compiler.static.terms import TRUE, Cond, Poly, Terms, at_least, equals, negation, number
from tilescale.compiler.tvm_compat import IF_THEN_ELSE, ir

_WIDE = {"int32": 1 << 31, "int64": 1 << 63}


class Reading:
    """Mixed into the collector: ``term``, ``cond`` and ``visit`` of an expression."""

    def __init__(self) -> None:
        self.terms = Terms()
        self.names: dict[Any, Poly] = {}
        self.tests: dict[Any, Cond] = {}

    def load(self, e: Any) -> None:
        raise NotImplementedError

    def operation(self, op: Any, call: Any) -> None:
        raise NotImplementedError

    def scale_value(self, name: str, which: int) -> Poly:
        raise NotImplementedError

    def given(self, *conds: Cond) -> AbstractContextManager[None]:
        raise NotImplementedError

    # -- terms
    # ----------------------------------------------------------------------------------------------------
    def term(self, e: Any) -> Poly:
        """An integer expression as a term; unknown where it is not one of the forms that are understood."""
        kind = type(e).__name__
        if kind == "IntImm":
            return number(int(e.value))
        if kind == "Var":
            known = self.names.get(e)
            return known if known is not None else self._unknown(str(e.name))
        dtype = str(e.ty)
        if kind == "Cast":
            inner = str(e.value.ty)
            return (
                self.term(e.value)
                if dtype in _WIDE and inner in _WIDE
                else self._unknown("a converted value")
            )
        if dtype not in _WIDE:
            return self._unknown("a value")
        if kind in (
            "Add",
            "Sub",
            "Mul",
            "FloorDiv",
            "FloorMod",
            "Min",
            "Max",
            "LShift",
            "RShift",
            "BitwiseAnd",
            "BitwiseOr",
            "BitwiseXor",
        ):
            return self._fits(self._pair(kind, self.term(e.a), self.term(e.b)), dtype)
        if kind in ("Div", "Mod"):  # rounds to zero, which is down where nothing is negative
            a, b = self.term(e.a), self.term(e.b)
            low, _ = self.terms.range(a)
            if low is not None and low >= 0:
                return self.terms.div(a, b) if kind == "Div" else self.terms.mod(a, b)
        if kind == "Select":
            return self.terms.choice(
                self.cond(e.condition), self.term(e.true_value), self.term(e.false_value)
            )
        if kind == "Call":
            return self._call(e)
        return self._unknown("a value in memory" if kind in ("TensorLoad", "BufferLoad") else "a value")

    def nobody_knows(self) -> Cond:
        """A condition of which nothing is known."""
        return at_least(self.terms.opaque("a condition"))

    def _unknown(self, name: str) -> Poly:
        return self.terms.opaque(name)

    def _pair(self, kind: str, a: Poly, b: Poly) -> Poly:
        t = self.terms
        if kind in ("Add", "Sub", "Mul"):
            return a + b if kind == "Add" else a - b if kind == "Sub" else a * b
        if kind in ("FloorDiv", "FloorMod"):
            return t.div(a, b) if kind == "FloorDiv" else t.mod(a, b)
        if kind in ("Min", "Max"):
            return t.least(a, b) if kind == "Min" else t.greatest(a, b)
        if kind in ("LShift", "RShift"):
            by = b.const
            if by is None or not 0 <= by < 63:
                return self._unknown("a shifted value")
            return a * (1 << by) if kind == "LShift" else t.div(a, number(1 << by))
        return t.bitwise({"BitwiseAnd": "&", "BitwiseOr": "|", "BitwiseXor": "^"}[kind], a, b)

    def _fits(self, p: Poly, dtype: str) -> Poly:
        """A term that is known to leave its dtype wraps, and then nothing is known of it."""
        low, high = self.terms.range(p)
        wide = _WIDE[dtype]
        return (
            self._unknown("a value that wraps")
            if (low is not None and low < -wide) or (high is not None and high >= wide)
            else p
        )

    def _call(self, e: Any) -> Poly:
        name = e.op.name
        if name in ("ts.scale_index", "ts.scale_count"):
            return self.scale_value(str(e.args[0].value), int(name == "ts.scale_count"))
        if name == IF_THEN_ELSE:
            return self.terms.choice(self.cond(e.args[0]), self.term(e.args[1]), self.term(e.args[2]))
        if name == "ts.scale_rank":
            return self.term(e.args[2])
        return self._unknown("a value")

    # -- conditions
    # -----------------------------------------------------------------------------------------------
    def cond(self, e: Any) -> Cond:
        """A boolean expression as a condition."""
        kind = type(e).__name__
        if kind in ("LT", "LE", "GT", "GE", "EQ", "NE"):
            if str(e.a.ty) not in _WIDE:
                return self.nobody_knows()
            a, b = self.term(e.a), self.term(e.b)
            made = {
                "LT": lambda: at_least(b - a - 1),
                "LE": lambda: at_least(b - a),
                "GT": lambda: at_least(a - b - 1),
                "GE": lambda: at_least(a - b),
                "EQ": lambda: equals(a, b),
                "NE": lambda: negation(equals(a, b)),
            }[kind]()
            return self.terms.replace_cond(made, {-1: number(0)})  # folds what is known
        if kind in ("And", "Or"):
            parts = (self.cond(e.a), self.cond(e.b))
            return Cond("and" if kind == "And" else "or", parts=parts)
        if kind == "Not":
            return negation(self.cond(e.a))
        if kind == "IntImm":
            return TRUE if int(e.value) else negation(TRUE)
        if kind == "Var":
            return self.tests[e] if e in self.tests else self.nobody_knows()
        return self.nobody_knows()

    # -- reads
    # ----------------------------------------------------------------------------------------------------
    def visit(self, e: Any) -> None:
        """Notes what an expression reads, each read under the conditions under which it is evaluated."""
        for part, test in self._parts(e):
            if test is None:
                self.visit(part)
            else:
                with self.given(test):
                    self.visit(part)

    def _parts(self, e: Any) -> Iterator[tuple[Any, Cond | None]]:
        kind = type(e).__name__
        if kind in ("Var", "IntImm", "FloatImm", "StringImm"):
            return
        if kind in ("And", "Or"):
            yield e.a, None
            left = self.cond(e.a)
            yield e.b, left if kind == "And" else negation(left)
        elif kind in ("TensorLoad", "BufferLoad"):
            for i in e.indices:
                yield i, None
            self.load(e)
        elif kind == "Select":
            yield from self._branches(e.condition, e.true_value, e.false_value)
        elif kind == "Call":
            op = find(e)
            if op is not None:
                self.operation(op, e)
            elif getattr(e.op, "name", "") == IF_THEN_ELSE:
                yield from self._branches(*e.args)
            else:
                for a in e.args:
                    if not isinstance(a, ir.StringImm):
                        yield a, None
        elif kind in ("Cast", "Let"):
            yield e.value, None
            if kind == "Let":
                yield e.body, None
        elif kind in ("Not", "BitwiseNot"):
            yield e.a, None
        elif hasattr(e, "a") and hasattr(e, "b"):
            yield e.a, None
            yield e.b, None

    def _branches(self, condition: Any, yes: Any, no: Any) -> Iterator[tuple[Any, Cond | None]]:
        yield condition, None
        test = self.cond(condition)
        yield yes, test
        yield no, negation(test)
