"""Scalar expressions of tile IR as thread IR: flat indices, guarded accesses, small floats computed in
float32, our own math."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tilescale.compiler.cpu import convert
from tilescale.compiler.cpu.expr import is_nan, let, lit, select
from tilescale.compiler.ir.lowerings import lowering
from tilescale.compiler.ir.operations import find
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ops import team
from tilescale.compiler.tvm_compat import (
    BINARY,
    EXTERN_CALLS,
    IF_THEN_ELSE,
    REINTERPRET,
    hidden,
    ir,
    structural_walk,
    tirx,
)
from tilescale.errors import InternalError
from tilescale.language.dtypes import BITS

Expr = Any
_CLASSES = {"ts.math.isnan": tirx.GT, "ts.math.isinf": tirx.EQ, "ts.math.isfinite": tirx.LT}
_COMPARISONS = ("LT", "LE", "GT", "GE", "EQ", "NE")


class Scalars:
    """Mixed into the lowering: ``scalar(e)`` maps an expression of tile IR to one of thread IR in its compute
    dtype."""

    _hoist: list[Any] | None
    program: TileProgram
    demanded: set[Any] | None
    variables: dict[Any, Any]
    # The parts' that it is mixed with:
    proven: Callable[[Any], bool]
    given: Callable[[Any], AbstractContextManager[None]]
    load: Callable[[Any], Any]
    scale_value: Callable[[str, int], Any]

    def scalar(self, e: Any) -> Expr:
        method = getattr(self, "_x_" + type(e).__name__, None)
        if method is None:
            kind = type(e).__name__
            if kind in BINARY:
                return self._pair(e)
            raise InternalError(f"no CPU lowering for the expression {kind}: {e}")
        return method(e)

    def _pair(self, e: Any) -> Expr:
        a, b = self.scalar(e.a), self.scalar(e.b)
        if isinstance(e, (tirx.And, tirx.Or)) and _may_trap(b):  # LLVM's and, or evaluate both sides
            decided = tirx.IntImm("bool", isinstance(e, tirx.Or))
            return (
                tirx.if_then_else(a, decided, b)
                if isinstance(e, tirx.Or)
                else tirx.if_then_else(a, b, decided)
            )
        if str(a.ty) == "bool" and type(e).__name__ in _COMPARISONS:  # TVM takes a bool for a float there
            a, b = tirx.Cast("int8", a), tirx.Cast("int8", b)
        if isinstance(e, tirx.NE) and "float" in str(
            a.ty
        ):  # LLVM gets an ordered comparison from TVM, and a NaN differs from all
            return tirx.Not(tirx.EQ(a, b))
        small = convert.compute_dtype(str(e.a.ty)) != str(e.a.ty)
        if small and type(e).__name__ in ("FloorDiv", "FloorMod", "Mod"):
            raise InternalError(f"{type(e).__name__} of {e.a.ty}")
        if isinstance(e, (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)) and "int" in str(b.ty):
            return self._divided(type(e), a, b)
        if isinstance(e, (tirx.Max, tirx.Min)) and "float" in str(a.ty):
            return _extreme(type(e), a, b)
        if type(e).__name__ in _WRAPS and str(a.ty).startswith("uint"):
            return _WRAPS[type(e).__name__](a, b)
        return type(e)(a, b)

    def _divided(self, op: Any, a: Any, b: Any) -> Expr:
        """An integer division. The processor raises SIGFPE for a zero divisor and for the least number by -1,
        where a GPU goes on: the first gives 0 here, the second wraps."""
        if isinstance(b, tirx.IntImm) and int(b.value) > 0:
            return op(a, b)
        zero, one = lit(0, str(b.ty)), lit(1, str(b.ty))
        none = tirx.EQ(b, zero)
        if str(b.ty).startswith("uint"):  # TVM's proofs subtract, which its unsigned constants do not bear
            return tirx.Select(none, zero, op(a, tirx.Select(none, one, b)))
        if self.proven(b > zero):
            return op(a, b)
        if isinstance(b, tirx.IntImm) and int(b.value) == -(1 << (BITS[str(b.ty)] - 1)):
            return _by_least(op, a, b)
        minus = tirx.EQ(b, lit(-1, str(b.ty)))
        by_minus_one = zero if op in (tirx.Mod, tirx.FloorMod) else zero - a
        usual = _floored(op, a, tirx.Select(tirx.Or(none, minus), one, b))
        return tirx.Select(none, zero, tirx.Select(minus, by_minus_one, usual))

    def _x_Var(self, e: Any) -> Expr:
        return self.variables.get(e, e)

    def _x_IntImm(self, e: Any) -> Expr:
        return e

    def _x_FloatImm(self, e: Any) -> Expr:
        dt = str(e.ty)
        compute = convert.compute_dtype(dt)
        if compute == dt:
            return e
        import ml_dtypes
        import numpy as np

        kind = {"float16": np.float16}.get(dt) or getattr(ml_dtypes, dt)
        return lit(float(np.asarray(float(e.value)).astype(kind)), compute)

    def _x_StringImm(self, e: Any) -> Expr:
        return e

    def _x_Cast(self, e: Any) -> Expr:
        rounded = isinstance(e.value, (ir.TensorLoad, tirx.Cast, tirx.FloatImm, tirx.IntImm))
        return convert.cast(self.scalar(e.value), str(e.value.ty), str(e.ty), rounded=rounded)

    def _x_Not(self, e: Any) -> Expr:
        return tirx.Not(self.scalar(e.a))

    def _x_BitwiseNot(self, e: Any) -> Expr:
        return tirx.BitwiseNot(self.scalar(e.a))

    def _x_Select(self, e: Any) -> Expr:
        return tirx.Select(self.scalar(e.condition), self.scalar(e.true_value), self.scalar(e.false_value))

    def _x_Let(self, e: Any) -> Expr:
        value = self.scalar(e.value)
        var = tirx.Var(e.var.name, str(value.ty))
        self.variables[e.var] = var
        return tirx.Let(var, value, self.scalar(e.body))

    def _x_TensorLoad(self, e: Any) -> Expr:
        return self.load(e)

    _x_BufferLoad = _x_TensorLoad

    def _chosen(self, e: Any) -> Expr:
        """``if_then_else``: a Select, whose lanes stay lanes, where both sides may be evaluated; else a
        branch."""
        test = self.scalar(e.args[0])
        hoisted = len(self._hoist or ())
        yes, no = self.scalar(e.args[1]), self.scalar(e.args[2])
        if _speculable(yes) and _speculable(no):
            return tirx.Select(test, yes, no)
        # The condition protects these accesses, not a test in front of the nest.
        del (self._hoist or [])[hoisted:]
        with self.given(test):
            yes = self.scalar(e.args[1])
        with self.given(tirx.Not(test)):
            no = self.scalar(e.args[2])
        return tirx.if_then_else(test, yes, no)

    def _x_Call(self, e: Any) -> Expr:
        name = e.op.name
        dt = str(e.ty)
        if name in _CLASSES:
            return _classified(name, self.scalar(e.args[0]))
        if name == "prim.clz":  # LLVM's, as TVM calls it, has no value at zero
            x = self.scalar(e.args[0])
            bits, zero = 64 if str(x.ty).endswith("64") else 32, tirx.const(0, str(x.ty))
            return let(x, lambda x: select(tirx.EQ(x, zero), tirx.IntImm("int32", bits), tirx.clz(x)))
        if name == "ts.math.dp4a":
            *factors, total = map(self.scalar, e.args)
            for a, b in zip(factors[:4], factors[4:], strict=True):
                total = total + tirx.Cast("int32", a) * tirx.Cast("int32", b)
            return total
        if name.startswith("ts.math."):
            from tilescale.compiler.cpu.vmath import lower_call

            return lower_call(
                name[len("ts.math.") :],
                [self.scalar(a) for a in e.args],
                convert.compute_dtype(str(e.args[0].ty)),
            )
        if name == "ts.scale_index":
            return self.scale_value(str(e.args[0].value), 0)
        if name == "ts.scale_count":
            return self.scale_value(str(e.args[0].value), 1)
        if name == "ts.scale_rank":
            return team.checked_rank(self, e)
        if name == IF_THEN_ELSE:
            return self._chosen(e)
        if name == REINTERPRET:
            value, src = e.args[0], str(e.args[0].ty)
            if src == dt:
                return hidden(self.scalar(value))
            return convert.decode(
                tirx.reinterpret(convert.storage_dtype(dt), convert.encode(self.scalar(value), src)), dt
            )
        if find(e) is not None:
            return lowering(e, self.program.target).lower(e, self)
        if name.startswith("ts."):
            raise InternalError(f"{name} is no scalar on the CPU")
        return ir.Call(
            e.op,
            [self.scalar(a) for a in e.args],
            attrs=e.attrs,
            ret_ty=ir.PrimType(convert.compute_dtype(dt)),
        )


def _extreme(op: Any, a: Expr, b: Expr) -> Expr:
    """Max or Min of floats, where a NaN wins. TVM's, ``a > b ? a : b``, is one instruction and keeps a NaN on
    the right alone."""
    if isinstance(a, tirx.FloatImm):
        return op(a, b)
    if isinstance(b, tirx.FloatImm):
        return op(b, a)
    return let(a, lambda x: select(is_nan(x), x, op(x, b)))


def _unsigned_add(a: Expr, b: Expr) -> Expr:
    dt = str(a.ty)
    return tirx.Cast(dt, _signed(a) + _signed(b)) if dt != "uint64" else _halves(a, b, 0)


def _unsigned_sub(a: Expr, b: Expr) -> Expr:
    dt = str(a.ty)
    return tirx.Cast(dt, _signed(a) - _signed(b)) if dt != "uint64" else _halves(a, tirx.BitwiseNot(b), 1)


def _unsigned_mul(a: Expr, b: Expr) -> Expr:
    dt = str(a.ty)
    if dt != "uint64":  # the product of 32 bits fits into 64
        return tirx.Cast(dt, tirx.Cast("uint64", a) * tirx.Cast("uint64", b))

    def product(x: Expr) -> Expr:
        def of(y: Expr) -> Expr:
            (xl, xh), (yl, yh) = _parts(x), _parts(y)
            mask, shift = lit(0xFFFFFFFF, "uint64"), lit(32, "uint64")
            across = tirx.BitwiseAnd(tirx.Mul(xl, yh), mask) + tirx.BitwiseAnd(tirx.Mul(xh, yl), mask)
            return _halves(tirx.Mul(xl, yl), tirx.LShift(across, shift), 0)

        return let(b, of)

    return let(a, product)


def _signed(x: Expr) -> Expr:
    return tirx.Cast("int64", x)


def _parts(x: Expr) -> tuple[Expr, Expr]:
    """The lower and the upper half of a uint64."""
    return tirx.BitwiseAnd(x, lit(0xFFFFFFFF, "uint64")), tirx.RShift(x, lit(32, "uint64"))


def _halves(a: Expr, b: Expr, carry: int) -> Expr:
    """a + b + carry modulo 2**64, in halves that cannot overflow."""

    def sum_of(x: Expr) -> Expr:
        def and_of(y: Expr) -> Expr:
            (xl, xh), (yl, yh) = _parts(x), _parts(y)
            low = xl + yl + lit(carry, "uint64") if carry else xl + yl
            shift = lit(32, "uint64")

            def joined(lower: Expr) -> Expr:
                upper = xh + yh + tirx.RShift(lower, shift)
                return tirx.BitwiseOr(
                    tirx.LShift(upper, shift), tirx.BitwiseAnd(lower, lit(0xFFFFFFFF, "uint64"))
                )

            return let(low, joined)

        return let(b, and_of)

    return let(a, sum_of)


#: Unsigned integers wrap, and TVM tells LLVM that those of 32 and 64 bits do not: they are computed where
#: they cannot overflow. (LLVM turns the way through 64 bits back into one instruction of 32.)
_WRAPS = {"Add": _unsigned_add, "Sub": _unsigned_sub, "Mul": _unsigned_mul}


def _classified(name: str, x: Expr) -> Expr:
    """isnan, isinf, isfinite of a float32 or float64: its bits without the sign against those of infinity."""
    bits, infinity, magnitude = (
        ("int64", 0x7FF << 52, (1 << 63) - 1)
        if str(x.ty) == "float64"
        else ("int32", 0xFF << 23, (1 << 31) - 1)
    )
    return _CLASSES[name](
        tirx.reinterpret(bits, x) & tirx.IntImm(bits, magnitude), tirx.IntImm(bits, infinity)
    )


def _speculable(e: Any) -> bool:
    """Whether an expression of thread IR may be evaluated where nobody wants it: it reads only where it may
    and cannot trap."""
    found: list[Any] = []
    structural_walk(
        e,
        (
            ir.Call,
            lambda c: found.append(c) if c.op.name == IF_THEN_ELSE or c.op.name in EXTERN_CALLS else None,
        ),
    )
    return not found and not _may_trap(e)


def _floored(op: Any, a: Any, b: Any) -> Expr:
    """A division by what may be negative. Of FloorDiv and FloorMod TVM's LowerIntrin would make Lets there,
    which its interval analysis binds twice and refuses: they are computed from the processor's division,
    which truncates. LLVM divides once."""
    zero, one = lit(0, str(b.ty)), lit(1, str(b.ty))
    if isinstance(b, tirx.IntImm) and int(b.value) == -(
        2 ** (int(str(b.ty)[3:]) - 1)
    ):  # TVM negates a constant divisor
        above = tirx.And(a > zero, tirx.IntImm("bool", op in (tirx.FloorDiv, tirx.FloorMod)))
        if op in (tirx.Mod, tirx.FloorMod):
            return tirx.Select(tirx.EQ(a, b), zero, tirx.Select(above, a + b, a))
        return tirx.Select(tirx.EQ(a, b), one, tirx.Select(above, lit(-1, str(b.ty)), zero))
    if op in (tirx.Div, tirx.Mod):
        return op(a, b)
    rest = tirx.Mod(a, b)
    # Of unlike signs: the exact quotient lies below the truncated one.
    below = tirx.And(tirx.NE(rest, zero), (rest ^ b) < zero)
    if op is tirx.FloorMod:
        return rest + tirx.Select(below, b, zero)
    return tirx.Div(a, b) - tirx.Select(below, one, zero)


def _by_least(op: Any, a: Any, least: Any) -> Expr:
    """A division by the least number, which TVM would negate. Only itself is as large: every other quotient
    lies between -1 and 1."""
    zero, one, itself = lit(0, str(a.ty)), lit(1, str(a.ty)), tirx.EQ(a, least)
    below = tirx.GT(a, zero) if op in (tirx.FloorDiv, tirx.FloorMod) else tirx.const(False, "bool")
    if op in (tirx.Div, tirx.FloorDiv):
        return tirx.Select(itself, one, tirx.Select(below, zero - one, zero))
    return tirx.Select(itself, zero, tirx.Select(below, a ^ least, a))  # of a positive number ^ adds the sign


def _may_trap(e: Any) -> bool:
    """Whether evaluating an expression of thread IR may stop the program: an integer division by what may be
    zero. (Loads guard themselves.)"""
    found: list[Any] = []

    def look(x: Any) -> None:
        if "int" in str(x.ty) and not (isinstance(x.b, tirx.IntImm) and int(x.b.value) not in (0, -1)):
            found.append(x)

    structural_walk(e, ((tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod), look))
    return bool(found)
