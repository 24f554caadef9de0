"""Expressions of thread IR as C: minimal parentheses by precedence, small floats computed in float32, 64-bit
indices without noise.

A value has two forms. *Computed*: what arithmetic is done in; small floats are ``float``. *Stored*: the C++
type of its dtype in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from tilescale.compiler.tvm_compat import EXTERN_CALLS, IF_THEN_ELSE, REINTERPRET, ir, sym, tirx
from tilescale.errors import InternalError

SMALL = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
# precedence in C, loosest first
TERNARY, OR, AND, BIT_OR, BIT_XOR, BIT_AND, EQUAL, LESS, SHIFT, SUM, PRODUCT, UNARY, POSTFIX = range(1, 14)

_COMPARE = {
    "LT": ("<", LESS),
    "LE": ("<=", LESS),
    "GT": (">", LESS),
    "GE": (">=", LESS),
    "EQ": ("==", EQUAL),
    "NE": ("!=", EQUAL),
}
_LOGIC = {"And": ("&&", AND), "Or": ("||", OR)}
_BITS = {
    "LShift": ("<<", SHIFT),
    "RShift": (">>", SHIFT),
    "BitwiseAnd": ("&", BIT_AND),
    "BitwiseXor": ("^", BIT_XOR),
    "BitwiseOr": ("|", BIT_OR),
}

Text = tuple[str, int]


def dtype_of(e: Any) -> str:
    return str(e.ty)


def is_int(dtype: str) -> bool:
    return "int" in dtype


def bits_of(dtype: str) -> int:
    return (
        8
        if dtype.startswith("float8") or dtype == "bool"
        else int(dtype.lstrip("abcdefghijklmnopqrstuvwxyz"))
    )


def compute(dtype: str) -> str:
    """The dtype that values of ``dtype`` are computed in."""
    return "float32" if dtype in SMALL else dtype


def constant(e: Any) -> int | None:
    return int(e.value) if isinstance(e, tirx.IntImm) else None


class Expressions:
    """The printer's half for expressions. Targets override the tables and the few methods that name their own
    functions."""

    #: dtype → C type in memory
    types: ClassVar[dict[str, str]]
    #: function of ts.math or tirx → C function for float32; "{t}" takes the place of the f where the names
    #: differ by it
    functions: ClassVar[dict[str, str]]
    #: the same where float64 is not the name without the f
    double_functions: ClassVar[dict[str, str]] = {}

    def __init__(self) -> None:
        self.analyzer = sym.Analyzer()
        self.names: dict[Any, str] = {}
        self.scalars: set[Any] = set()  # buffers of one element, printed as plain variables
        self.used: set[str] = set()  # dtypes and prefixes of functions: what the text must include
        self.called: set[str] = set()  # functions of ours by name

    # -- what the statements' half and targets give
    def name(self, var: Any) -> str:
        """The C name of a variable or buffer."""
        return self.names[var]

    def ctype(self, dtype: str) -> str:
        """The C type of a dtype in memory."""
        if dtype not in self.types:
            raise InternalError(f"no C type for {dtype}")
        self.used.add(dtype)
        return self.types[dtype]

    # -- entries
    def value(self, e: Any, at: int = 0) -> str:
        """The computed form, in parentheses where the place binds tighter."""
        return _wrapped(self.text(e), at)

    def stored(self, e: Any, at: int = 0) -> str:
        """The stored form."""
        dtype = dtype_of(e)
        if dtype not in SMALL:
            return self.value(e, at)
        if self._is_stored(e):
            return _wrapped(self._native(e), at)
        if isinstance(e, tirx.Cast):
            return self._rounded(e)
        chosen = _choice(e)
        if chosen is not None:  # a value that is only moved is not computed with
            test, yes, no = (
                self.value(chosen[0], TERNARY + 1),
                self.stored(chosen[1], TERNARY + 1),
                self.stored(chosen[2], TERNARY),
            )
            return _wrapped((f"{test} ? {yes} : {no}", TERNARY), at)
        made = self.small(e)
        return self.narrowed(self.value(e), dtype) if made is None else made

    def small(self, e: Any) -> str | None:
        """Arithmetic of small floats by an instruction of their dtype, in its stored form; None where the
        target has none."""
        return None

    def text(self, e: Any) -> Text:
        """The computed form and how loosely it binds."""
        if self._is_stored(e):
            return (f"float({self._native(e)[0]})", POSTFIX) if dtype_of(e) in SMALL else self._native(e)
        kind = type(e).__name__
        method: Callable[[Any], Text] | None = getattr(self, "x_" + kind, None)
        if method is not None:
            return method(e)
        if kind in _COMPARE:
            return self._comparison(e, *_COMPARE[kind])
        if kind in _LOGIC:
            sign, p = _LOGIC[kind]
            return f"{self.value(e.a, p)} {sign} {self.value(e.b, p)}", p
        if kind in _BITS:
            return self.bitwise(e)
        raise InternalError(f"no C for the expression {kind}: {e}")

    def bitwise(self, e: Any) -> Text:
        sign, p = _BITS[type(e).__name__]
        # Sums and other operators beside these are put in parentheses, though C needs none: nobody knows that
        # table by heart.
        left = p if type(e.a) is type(e) else PRODUCT
        return self._within(e, f"{self.value(e.a, left)} {sign} {self.value(e.b, PRODUCT)}", p)

    # -- the two forms
    def _is_stored(self, e: Any) -> bool:
        return isinstance(e, ir.TensorLoad) or (
            isinstance(e, ir.Call)
            and (e.op.name in EXTERN_CALLS or (e.op.name == REINTERPRET and not _as_itself(e)))
        )

    def _native(self, e: Any) -> Text:
        if isinstance(e, ir.TensorLoad):
            return self.element(e.source, e.indices), POSTFIX
        if e.op.name == REINTERPRET:
            return self.reinterpreted(self.stored(e.args[0]), dtype_of(e)), POSTFIX
        self.used.add(str(e.args[0].value).rpartition("::")[0])
        self.called.add(str(e.args[0].value))
        return f"{e.args[0].value}({', '.join(self.stored(a) for a in e.args[1:])})", POSTFIX

    def narrowed(self, text: str, dtype: str) -> str:
        """A float or double rounded to a small float; the types' constructors round to nearest even, once."""
        return f"{self.ctype(dtype)}({text})"

    def _rounded(self, e: Any) -> str:
        """A Cast to a small float, in its stored form. Integers get there through float32."""
        inner = self.value(e.value)
        return self.narrowed(
            f"float({inner})" if is_int(dtype_of(e.value)) or dtype_of(e.value) == "bool" else inner,
            dtype_of(e),
        )

    def element(self, buffer: Any, indices: Any) -> str:
        if len(indices) != 1:
            raise InternalError(f"an access of {buffer.name} with {len(indices)} indices")
        return (
            self.name(buffer) if buffer in self.scalars else f"{self.name(buffer)}[{self.index(indices[0])}]"
        )

    def index(self, e: Any) -> str:
        """An index in brackets or behind a pointer: any width serves, so a widening around the whole of it
        says nothing."""
        while isinstance(e, tirx.Cast) and _widens(e):
            e = e.value
        return str(constant(e)) if constant(e) is not None else self.value(e)

    # -- leaves
    def x_Var(self, e: Any) -> Text:
        return self.name(e), POSTFIX

    def x_StringImm(self, e: Any) -> Text:
        text = str(e.value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{text}"', POSTFIX

    def x_IntImm(self, e: Any) -> Text:
        return self.integer(int(e.value), dtype_of(e))

    def integer(self, v: int, dtype: str) -> Text:
        """A literal whose C type is that of the dtype; int64_t is long where CUDA runs."""
        if dtype == "bool":
            return ("true" if v else "false"), POSTFIX
        if dtype in ("int32", "int64") and v == -(
            1 << (bits_of(dtype) - 1)
        ):  # its magnitude is no literal of the type
            return f"{v + 1}{'L' if dtype == 'int64' else ''} - 1", SUM
        suffix = {"int64": "L", "uint64": "UL", "uint32": "u"}.get(dtype, "")
        return f"{v}{suffix}", UNARY if v < 0 else POSTFIX

    def x_FloatImm(self, e: Any) -> Text:
        dtype, v = dtype_of(e), float(e.value)
        if dtype in SMALL:
            import ml_dtypes

            v = float(np.asarray(v).astype(np.float16 if dtype == "float16" else getattr(ml_dtypes, dtype)))
        return self.floating(v, compute(dtype))

    def floating(self, v: float, dtype: str) -> Text:
        """A literal of exactly this float32 or float64: shortest decimals, hexadecimal where they would be
        denormal."""
        if dtype == "float32":
            v = float(np.float32(v))
        if not math.isfinite(v):
            return self.not_finite(v, dtype)
        tiny = 2.0**-126 if dtype == "float32" else 2.0**-1022
        text = repr(v) if dtype == "float64" else str(np.float32(v))
        if v and abs(v) < tiny:
            head, _, exponent = v.hex().partition("p")
            text = f"{head.rstrip('0').rstrip('.')}p{exponent}"
        return text + ("f" if dtype == "float32" else ""), UNARY if text.startswith("-") else POSTFIX

    def not_finite(self, v: float, dtype: str) -> Text:
        """An infinity or a NaN."""
        raise NotImplementedError

    # -- arithmetic
    def x_Add(self, e: Any) -> Text:
        return self._sum(e)

    x_Sub = x_Add

    def _minus(self, e: Any) -> str:
        """−e, which is no decrement where e begins with a sign."""
        text = self.value(e, UNARY)
        return f"-({text})" if text.startswith("-") else f"-{text}"

    def _sum(self, e: Any) -> Text:
        """A chain of sums. Integers lose the parentheses of nested sums and, where a 64-bit term comes first,
        the widening of others."""
        dtype = dtype_of(e)
        if isinstance(e, tirx.Sub) and is_int(dtype) and constant(e.a) == 0:
            return self._within(e, self._minus(e.b), UNARY)
        if dtype not in ("int32", "int64"):
            sign = "+" if isinstance(e, tirx.Add) else "-"
            return self._within(e, f"{self.value(e.a, SUM)} {sign} {self.value(e.b, SUM + 1)}", SUM)
        terms = _terms(e)
        wide = dtype == "int64"
        out, is_wide = "", False
        for k, (sign, t) in enumerate(terms):
            known = constant(t)
            if known is not None and known < 0 and k and -known < 1 << 31:
                sign, t, known = ("-" if sign == "+" else "+"), tirx.IntImm(dtype, -known), -known
            plain = is_wide or (k == 0 and len(terms) > 1 and _surely_wide(terms[1][1]))
            text = self._operand(t, SUM if k == 0 else SUM + 1, plain and wide)
            is_wide = is_wide or not (plain and isinstance(t, tirx.Cast))
            out = text if k == 0 else f"{out} {sign} {text}"
        return out, SUM

    def _operand(self, e: Any, at: int, beside_wide: bool) -> str:
        """An operand of 64-bit arithmetic. Beside one that is 64 bits wide C widens this one itself."""
        if beside_wide and isinstance(e, tirx.Cast) and _widens(e):
            return self.value(e.value, at)
        known = constant(e)
        if beside_wide and known is not None and dtype_of(e) == "int64" and -(1 << 31) < known < 1 << 31:
            return str(known) if known >= 0 else f"({known})"
        return self.value(e, at)

    def x_Mul(self, e: Any) -> Text:
        dtype, a, b = dtype_of(e), e.a, e.b
        if dtype == "int64" and constant(a) is not None:
            a, b = b, a
        if _is_minus_one(b):
            return self._within(e, self._minus(a), UNARY)
        if dtype != "int64":
            return self._within(e, f"{self.value(a, PRODUCT)} * {self.value(b, PRODUCT + 1)}", PRODUCT)
        left = self._operand(a, PRODUCT, _surely_wide(b))
        return f"{left} * {self._operand(b, PRODUCT + 1, True)}", PRODUCT  # one side is 64 bits wide by now

    def _comparison(self, e: Any, sign: str, p: int) -> Text:
        if dtype_of(e.a) != "int64":
            return f"{self.value(e.a, p)} {sign} {self.value(e.b, p + 1)}", p
        left = self._operand(e.a, p, _surely_wide(e.b))
        return f"{left} {sign} {self._operand(e.b, p + 1, True)}", p

    def x_Div(self, e: Any) -> Text:
        return self._within(e, f"{self.value(e.a, PRODUCT)} / {self.value(e.b, PRODUCT + 1)}", PRODUCT)

    def x_Mod(self, e: Any) -> Text:
        if not is_int(dtype_of(e)):
            raise InternalError(f"Mod of {dtype_of(e)}")
        return self._within(e, f"{self.value(e.a, PRODUCT)} % {self.value(e.b, PRODUCT + 1)}", PRODUCT)

    def x_FloorDiv(self, e: Any) -> Text:
        by = constant(e.b)
        if (
            by is not None and by > 0 and by & (by - 1) == 0
        ):  # an arithmetic shift rounds down, whatever the sign
            return (
                (f"{self.value(e.a, PRODUCT)} >> {by.bit_length() - 1}", SHIFT) if by > 1 else self.text(e.a)
            )
        return self.x_Div(e) if self._as_in_c(e) else self._rounding_down("floordiv", e)

    def x_FloorMod(self, e: Any) -> Text:
        by = constant(e.b)
        if by is not None and by > 0 and by & (by - 1) == 0:
            return f"{self.value(e.a, PRODUCT)} & {by - 1}", BIT_AND
        return self.x_Mod(e) if self._as_in_c(e) else self._rounding_down("floormod", e)

    def _as_in_c(self, e: Any) -> bool:
        """Whether rounding down is rounding toward zero here."""
        if dtype_of(e).startswith("uint"):
            return True
        zero = tirx.IntImm(dtype_of(e), 0)
        return bool(self.analyzer.can_prove(e.a >= zero) and self.analyzer.can_prove(e.b > zero))

    def _rounding_down(self, name: str, e: Any) -> Text:
        self.used.add("ts")
        dtype = dtype_of(e)
        of = f"<{self.ctype(dtype)}>" if bits_of(dtype) < 32 else ""  # a constant, and a sum, is an int in C
        return f"ts::{name}{of}({self.value(e.a)}, {self.value(e.b)})", POSTFIX

    def _within(self, e: Any, text: str, p: int) -> Text:
        """C computes in int what is narrower; the dtype wraps."""
        dtype = dtype_of(e)
        if is_int(dtype) and bits_of(dtype) < 32:
            return f"{self.ctype(dtype)}({text})", POSTFIX
        return text, p

    def x_Min(self, e: Any) -> Text:
        return self.extreme("min", e)

    def x_Max(self, e: Any) -> Text:
        """Of a number between two constants the upper bound comes last: ptxas 13.0.88 takes
        ``max(0, min(x, 23)) == 23`` for its opposite on sm_90 (docs/history/mechanisms.md)."""
        if is_int(dtype_of(e)):
            for low, inner in ((e.a, e.b), (e.b, e.a)):
                if not isinstance(low, tirx.IntImm) or not isinstance(inner, tirx.Min):
                    continue
                for high, x in ((inner.a, inner.b), (inner.b, inner.a)):
                    if isinstance(high, tirx.IntImm) and int(low.value) <= int(high.value):
                        return self.extreme("min", tirx.Min(tirx.Max(x, low), high))
        return self.extreme("max", e)

    def extreme(self, name: str, e: Any) -> Text:
        """min, max. A NaN on either side of a float is the result. A function, never a condition: an operand
        may be a shuffle, which all lanes take part in, whatever the values, and once. Operands narrower than
        int are ints by then: one overload fits."""
        if dtype_of(e) == "bool":
            sign, p = _BITS["BitwiseAnd" if name == "min" else "BitwiseOr"]
            return f"bool({self.value(e.a, p)} {sign} {self.value(e.b, p + 1)})", POSTFIX
        if not is_int(dtype_of(e)):
            self.used.add("ts")
            name = f"ts::{name}"
        return self._within(e, f"{name}({self.value(e.a)}, {self.value(e.b)})", POSTFIX)

    def x_Not(self, e: Any) -> Text:
        return f"!{self.value(e.a, UNARY)}", UNARY

    def x_BitwiseNot(self, e: Any) -> Text:
        if dtype_of(e) == "bool":  # an int in C, of which ~ makes −1 or −2: both are true
            return self.x_Not(e)
        return self._within(e, f"~{self.value(e.a, UNARY)}", UNARY)

    def x_Select(self, e: Any) -> Text:
        test, yes, no = _choice(e)  # type: ignore[misc]
        return (
            f"{self.value(test, TERNARY + 1)} ? {self.value(yes, TERNARY + 1)} : {self.value(no, TERNARY)}",
            TERNARY,
        )

    # -- casts
    def x_Cast(self, e: Any) -> Text:
        src, dst = dtype_of(e.value), dtype_of(e)
        if src == dst or (dst == "float32" and src in SMALL):
            return self.text(e.value)
        if dst in SMALL:
            if (
                src in SMALL and src.startswith("float8") and not dst.startswith("float8")
            ):  # every fp8 is a float16 and a bfloat16
                return self.text(e.value)
            return f"float({self._rounded(e)})", POSTFIX
        if dst == "bool":
            return f"{self.value(e.value, EQUAL)} != 0", EQUAL
        if is_int(dst) and src.startswith(("float", "bfloat")):
            self.used.add("ts")
            return f"ts::to<{self.ctype(dst)}>({self.value(e.value)})", POSTFIX
        return f"{self.ctype(dst)}({self.value(e.value)})", POSTFIX

    def reinterpreted(self, text: str, dtype: str) -> str:
        """The bits of a stored value as another type of the same size."""
        self.used.add("ts")
        return f"ts::bits<{self.ctype(dtype)}>({text})"

    # -- calls
    def x_Call(self, e: Any) -> Text:
        name = e.op.name
        if name == IF_THEN_ELSE:
            return self.x_Select(e)
        if name == "tirx.address_of":
            return f"&{self.value_address(e.args[0])}", UNARY
        if name == "tirx.buffer_data":
            return (
                (f"&{self.name(e.args[0])}", UNARY)
                if e.args[0] in self.scalars
                else (self.name(e.args[0]), POSTFIX)
            )
        if name == "tirx.handle_add_byte_offset":
            return (
                (f"{self.value(e.args[0], SUM)} + {self.index(e.args[1])}", SUM)
                if constant(e.args[1]) != 0
                else self.text(e.args[0])
            )
        if name.rpartition(".")[2] == "likely" or name == REINTERPRET:  # as itself
            return self.text(e.args[0])
        if (counted := name.rpartition(".")[2]) in ("popcount", "clz"):
            wide = bits_of(dtype_of(e.args[0])) == 64
            call = {"popcount": ("__popc", "__popcll"), "clz": ("__clz", "__clzll")}[counted][wide]
            return f"{call}({self.value(e.args[0])})", POSTFIX
        return self.function(
            name.rpartition(".")[2], list(e.args), dtype_of(e.args[0]) if e.args else ""
        ), POSTFIX

    def value_address(self, load: Any) -> str:
        return self.element(load.source, load.indices)

    def function(self, name: str, args: list[Any], dtype: str) -> str:
        """A scalar function of floats."""
        if name not in self.functions:
            raise InternalError(f"no C for the function {name} of {dtype}")
        double = dtype == "float64"
        made = self.double_functions.get(name) if double else None
        if made is None:
            made = self.functions[name]
            made = made if made.startswith("ts::") or not double else made.removesuffix("f")
        if made.startswith("ts::"):
            self.used.add("ts")
        return f"{made}({', '.join(self.value(a) for a in args)})"


def _wrapped(text: Text, at: int) -> str:
    return f"({text[0]})" if text[1] < at else text[0]


def _as_itself(e: Any) -> bool:
    """Whether a reinterpretation is as the dtype it is of: what hides a value from TVM's analyses."""
    return dtype_of(e) == dtype_of(e.args[0])


def _choice(e: Any) -> tuple[Any, Any, Any] | None:
    """Condition and both values of an expression that chooses. C evaluates the chosen one alone, which serves
    both kinds."""
    if isinstance(e, tirx.Select):
        return e.condition, e.true_value, e.false_value
    return tuple(e.args) if isinstance(e, ir.Call) and e.op.name == IF_THEN_ELSE else None


def _widens(e: Any) -> bool:
    """A Cast that C does by itself beside an int64."""
    return dtype_of(e) == "int64" and dtype_of(e.value) in (
        "int8",
        "int16",
        "int32",
        "uint8",
        "uint16",
        "int64",
    )


def _surely_wide(e: Any) -> bool:
    """Whether an int64 expression is 64 bits wide in C however it is printed: no widening that may be left
    out, no literal."""
    return (
        dtype_of(e) == "int64"
        and not isinstance(e, tirx.IntImm)
        and not (isinstance(e, tirx.Cast) and _widens(e))
    )


def _terms(e: Any) -> list[tuple[str, Any]]:
    """A sum of integers as signs and terms, the first one's sign a plus."""
    if isinstance(e, tirx.Add):
        return _terms(e.a) + _terms(e.b)
    if isinstance(e, tirx.Sub) and constant(e.a) != 0:
        return [*_terms(e.a), ("-", e.b)]
    return [("+", e)]


def _is_minus_one(e: Any) -> bool:
    return (isinstance(e, tirx.IntImm) and int(e.value) == -1) or (
        isinstance(e, tirx.FloatImm) and float(e.value) == -1.0
    )
