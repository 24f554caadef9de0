"""Small builders of thread IR that the emitters share: typed constants, Let-bound temporaries, loops, bit
casts."""

from __future__ import annotations

from collections.abc import Callable

from tilescale.compiler.cpu.tile import Expr, Stmt, imm
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.tvm_compat import tirx


def dtype_of(value: Expr) -> str:
    return str(value.ty)


def lit(value: float | int | bool, dtype: str) -> Expr:
    """A constant of a native dtype (never bf16 or fp8: those are computed with in float32)."""
    if dtype == "bool":
        return tirx.IntImm("bool", int(value))
    if dtype.startswith("float"):
        return tirx.FloatImm(dtype, float(value))
    return tirx.IntImm(dtype, int(value))


def let(value: Expr, body: Callable[[Expr], Expr]) -> Expr:
    """``body(t)`` where ``t`` is evaluated once. codegen turns it into a binding in front of the
    statement."""
    if isinstance(value, (tirx.Var, tirx.IntImm, tirx.FloatImm)):
        return body(value)
    var = tirx.Var("t", dtype_of(value))
    return tirx.Let(var, value, body(var))


def bits(value: Expr, dtype: str) -> Expr:
    """The same bits read as ``dtype`` of the same width."""
    return tirx.reinterpret(dtype, value)


def select(cond: Expr, yes: Expr, no: Expr) -> Expr:
    """Both sides are evaluated; ``if_then_else`` would branch and keep the loop from being vectorised."""
    return tirx.Select(cond, yes, no)


def not_equal(a: Expr, b: Expr) -> Expr:
    """IEEE's ≠, true when either is NaN: tirx.NE of floats becomes LLVM's ordered comparison, which is false
    then."""
    return tirx.Not(tirx.EQ(a, b))


def is_nan(x: Expr) -> Expr:
    return not_equal(x, x)


def native_cast(value: Expr, dtype: str) -> Expr:
    if dtype_of(value) == dtype:
        return value
    if isinstance(value, tirx.IntImm) and dtype.startswith(
        ("int", "uint")
    ):  # TVM makes no unsigned number of a negative one
        return wrapped(int(value.value), dtype)
    return tirx.Cast(dtype, value)


def wrapped(value: int, dtype: str) -> Expr:
    """The constant of an integer dtype that ``value`` becomes there."""
    width = int(dtype.lstrip("uint"))
    value %= 2**width
    if value < 2 ** (width - 1) or (dtype[0] == "u" and width < 64):
        return lit(value, dtype)
    least = lit(value - 2**width, f"int{width}")
    return least if dtype[0] == "i" else bits(least, dtype)  # an IntImm holds 63 bits and a sign


def intrin(name: str, dtype: str, *args: Expr) -> Expr:
    """An LLVM intrinsic of scalars; vectorised with the loop around it."""
    return tirx.call_llvm_pure_intrin(dtype, name, *args)


def fma(a: Expr, b: Expr, c: Expr) -> Expr:
    """a·b + c, rounded once."""
    return intrin("llvm.fma", dtype_of(a), a, b, c)


seq = sequence


def loop(name: str, extent: int, body: Callable[[Expr], Stmt], *, kind: int | None = None) -> Stmt:
    """``for name in range(extent)``; a single round becomes the body at 0."""
    if extent == 1:
        return body(imm(0))
    var = tirx.Var(name, "int32")
    return tirx.For(var, imm(0), imm(extent), tirx.ForKind.SERIAL if kind is None else kind, body(var))


def vector_loop(extent: int, lanes: int, body: Callable[[Expr], Stmt]) -> Stmt:
    """``body(i)`` for i in range(extent), ``lanes`` at a time, the rest by halves; ``body`` is written for a
    scalar ``i``."""
    stmts: list[Stmt] = []
    done = 0
    while done < extent:
        while lanes > extent - done:
            lanes //= 2
        count = (extent - done) // lanes
        start = done

        def chunk(o: Expr, lanes: int = lanes, start: int = start) -> Stmt:
            base = o * lanes + start if not isinstance(o, tirx.IntImm) else imm(int(o.value) * lanes + start)
            return loop("v", lanes, lambda v: body(base + v), kind=tirx.ForKind.VECTORIZED)

        stmts.append(loop("o", count, chunk))
        done += count * lanes
    return seq(stmts)
