"""What a kernel's names stand for while it is traced: buffers, regions, one-element variables, poisoned
names; scalars are IR."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.integers import (
    converted,
    fits,
    folded,
    in_int32,
    index_constant,
    promoted,
    require_64_bits,
    too_large,
)
from tilescale.compiler.builder.poison import Poison
from tilescale.compiler.builder.quotients import is_float, is_zero, reciprocal
from tilescale.compiler.ir import source
from tilescale.compiler.ir.numbers import constant, simplify
from tilescale.compiler.tvm_compat import (
    give_words,
    guard_iteration,
    ir,
    is_expr,
    structural_map,
    structural_walk,
    tirx,
)
from tilescale.errors import Loc, TileSyntaxError, TileTypeError, TileValueError
from tilescale.language.dtypes import GREATEST, Narrow, canonical, dtype
from tilescale.language.symbolic import COMPARE, Const, Sym, SymExpr, settle


def to_expr(value: Any, what: str = "value") -> Any:
    """``value`` as IR: an expression, or a Python number left as it is.

    Raises:
        TileTypeError: it has no meaning as a scalar.
    """
    if isinstance(value, (bool, int, float)):
        return value
    if is_expr(value):
        return value
    if isinstance(value, Scalar):
        return value.load()
    if isinstance(value, SymExpr):
        return symbol_expr(value)
    if hasattr(value, "asobject"):  # TVM's deferred == and !=
        return value.asobject()
    if isinstance(value, Poison):
        value.refuse()
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a NumPy scalar
        return value.item()
    if isinstance(value, (Buffer, Region)):
        raise TileTypeError(
            f"{value} is a tile, and a scalar is needed as {what}",
            loc=source.current(),
            hint=f"index it: {value.element()}",
        )
    raise TileTypeError(f"{value!r} ({type(value).__name__}) has no meaning as {what}", loc=source.current())


def const(value: Any, dt: str) -> Any:
    """A constant of the given dtype. A negative one of an unsigned dtype is what a device value would be: -1
    is all ones.

    Raises:
        TileValueError: the dtype does not hold it.
    """
    dt = str(dt)
    if dt in GREATEST and GREATEST[dt] < abs(value) < float("inf"):
        raise too_large(value, dt)
    if dt.startswith("uint") and value < 0:
        value %= 1 << int(dt[4:])
    return tirx.const(in_int32(value) if dt == "int32" else value, dt)


def as_expr(value: Any, dt: str = "int32", what: str = "value") -> Any:
    """``value`` as an IR expression; Python numbers become constants of dtype ``dt``."""
    e = to_expr(value, what)
    return const(e, dt) if isinstance(e, (bool, int, float)) else e


def truth(value: Any) -> Any:
    """``value`` as a condition in IR: a number holds where it is not zero."""
    e = as_expr(value, "bool", "a condition")
    return e if str(e.ty) == "bool" else tirx.NE(e, tirx.const(0, str(e.ty)))


def index_expr(value: Any) -> Any:
    """``value`` as an integer index expression."""
    e = to_expr(value, "an index")
    if isinstance(e, bool) or isinstance(e, float) or (is_expr(e) and "int" not in str(e.ty)):
        raise TileTypeError(
            f"an index must be an integer, not {e}", loc=source.current(), hint='T.cast(…, "int32")'
        )
    return index_constant(e) if isinstance(e, int) else e


def dtype_of(value: Any) -> dtype:
    """The dtype of a scalar value (Python numbers: int32, float32, bool)."""
    if isinstance(value, bool):
        return canonical("bool")
    if isinstance(value, int):
        return canonical("int32")
    if isinstance(value, float):
        return canonical("float32")
    return canonical(str(to_expr(value).ty))


def symbol_expr(value: SymExpr) -> Any:
    """A symbolic extent as IR: the trace's variable of that name."""
    settled = settle(value)
    if isinstance(settled, int):
        return const(settled, "int32")
    if isinstance(settled, Sym):
        table, solved = bld.current().symbols, bld.current().solved
        if settled.name in solved:
            return symbol_expr(solved[settled.name])
        bld.current().promise(settled.name, settled.multiple_of)
        if settled.name not in table:
            table[settled.name] = tirx.Var(settled.name, settled.dtype)
            if isinstance(settled, Const):
                bld.current().unknown.append(settled)
        return table[settled.name]
    a, b = (symbol_expr(x) if isinstance(x, SymExpr) else x for x in settled.args)
    return binary(settled.op, a, b)


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "<<": operator.lshift, ">>": operator.rshift, "&": operator.and_, "|": operator.or_,
    "^": operator.xor, "**": operator.pow, "@": operator.matmul,
}  # fmt: skip


def binary(op: str, a: Any, b: Any, *, exact: bool = False) -> Any:
    """``a op b`` over Python values, symbols and IR; ``exact``: a quotient is rounded once, always.

    Raises:
        TileTypeError: the operands' dtypes do not fit the operator.
    """
    a, b = to_expr(a), to_expr(b)
    if not is_expr(a) and not is_expr(b):
        return BINARY[op](a, b)
    require_64_bits(a, b)
    if op in ("&", "|", "^"):
        return _operate(op, a, b)
    counted = (tirx.Cast("int32", x) if is_expr(x) and str(x.ty) == "bool" else x for x in (a, b))
    a, b = promoted(op, *counted)  # True counts as one, as in Python
    if op in ("min", "max"):
        return (tirx.min if op == "min" else tirx.max)(a, b)
    if is_expr(a) and is_expr(b) and str(a.ty) != str(b.ty) and {str(a.ty), str(b.ty)} <= _SMALL_FLOATS:
        a, b = tirx.Cast("float32", a), tirx.Cast("float32", b)  # neither holds the other's values
    ints = all(isinstance(x, int) or (is_expr(x) and "int" in str(x.ty)) for x in (a, b))
    if op in ("//", "%") and ints and constant(b) == 0:
        raise TileValueError(f"{a} {op} 0", loc=source.current(), expected="a divisor other than zero")
    if op == "//":
        return tirx.floordiv(a, b) if ints else tirx.floor(_operate("/", a, b))
    if op == "%" and not ints:
        return _float_modulo(a, b)
    if op == "**":
        return _power(a, b, ints)
    if op == "/" and not exact and (part := reciprocal(a, b)) is not None:
        return _operate("*", a, part)
    return _operate(op, a, b)


_SMALL_FLOATS = {"float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}


def _operate(op: str, a: Any, b: Any) -> Any:
    # TVM folds x * 0.0 to zero and fails on x / 0.0; IEEE 754 has infinities, and no number, there (x / 0.0
    # is x * infinity)
    if op == "/" and is_float(a) and is_zero(b):
        sign = math.copysign(1.0, float(b if isinstance(b, (int, float)) else b.value))
        return tirx.Mul(a, const(sign * math.inf, str(a.ty)))
    if op == "*" and (is_float(a) and is_zero(b) or is_float(b) and is_zero(a)):
        x, zero = (a, b) if is_zero(b) else (b, a)
        return tirx.Mul(x, const(float(zero if isinstance(zero, (int, float)) else zero.value), str(x.ty)))
    if (known := folded(op, a, b)) is not None:
        return known
    try:
        return BINARY[op](a, b)
    except Exception as error:  # whatever TVM raises, the reason is the operands' dtypes
        hint = (
            'a // b for the integer quotient, or T.cast(a, "float32") / b'
            if op == "/"
            else "T.cast(…) one of them"
        )
        raise TileTypeError(
            f"{dtype_of(a)} {op} {dtype_of(b)} is not defined", loc=source.current(), hint=hint
        ) from error


def _float_modulo(a: Any, b: Any) -> Any:
    """Python's: the sign of the divisor."""
    r = float_function("fmod", a, b)
    zero = const(0, str(r.ty))
    other = tirx.NE(tirx.LT(r, zero), compare("<", b, 0) if is_expr(b) else const(b < 0, "bool"))
    return tirx.if_then_else(tirx.And(tirx.NE(r, zero), other), r + b, r)


def _power(a: Any, b: Any, ints: bool) -> Any:
    """By multiplication where the exponent is a small constant (so that integers stay exact), else
    ``T.pow``."""
    n = constant(b) if not isinstance(b, bool) else None
    if n is not None and 0 < n <= 64:
        result, square = None, a
        while n:
            if n & 1:
                result = square if result is None else result * square
            n >>= 1
            square = square * square if n else square
        return result
    if ints:
        raise TileTypeError(
            f"{dtype_of(a)} ** {dtype_of(b)} is not defined",
            loc=source.current(),
            hint='T.pow(T.cast(a, "float32"), b)',
        )
    return float_function("pow", a, b)


def negative(value: Any) -> Any:
    """``-value``; a float keeps the sign of its zero, an unsigned integer wraps as its subtraction from zero
    does."""
    e = to_expr(value)
    if not is_expr(e):
        return -e
    return (
        binary("*", e, -1.0 if str(e.ty) in ("float32", "float64") else -1)
        if "float" in str(e.ty)
        else binary("-", 0, e)
    )


def compare(op: str, a: Any, b: Any) -> Any:
    """``a op b`` as a bool, or as IR where either side is a device value."""
    a, b = to_expr(a), to_expr(b)
    if not is_expr(a) and not is_expr(b):
        return COMPARE[op](a, b)
    require_64_bits(a, b)
    result = COMPARE[op](a, b)  # TVM's operators bring both sides to one dtype
    return result.asobject() if hasattr(result, "asobject") else result


class _Arithmetic:
    """Operators for values that read as a scalar."""

    def __add__(self, o: Any) -> Any:
        return binary("+", self, o)

    def __radd__(self, o: Any) -> Any:
        return binary("+", o, self)

    def __sub__(self, o: Any) -> Any:
        return binary("-", self, o)

    def __rsub__(self, o: Any) -> Any:
        return binary("-", o, self)

    def __mul__(self, o: Any) -> Any:
        return binary("*", self, o)

    def __rmul__(self, o: Any) -> Any:
        return binary("*", o, self)

    def __truediv__(self, o: Any) -> Any:
        return binary("/", self, o)

    def __rtruediv__(self, o: Any) -> Any:
        return binary("/", o, self)

    def __floordiv__(self, o: Any) -> Any:
        return binary("//", self, o)

    def __rfloordiv__(self, o: Any) -> Any:
        return binary("//", o, self)

    def __mod__(self, o: Any) -> Any:
        return binary("%", self, o)

    def __rmod__(self, o: Any) -> Any:
        return binary("%", o, self)

    def __pow__(self, o: Any) -> Any:
        return binary("**", self, o)

    def __lshift__(self, o: Any) -> Any:
        return binary("<<", self, o)

    def __rlshift__(self, o: Any) -> Any:
        return binary("<<", o, self)

    def __rshift__(self, o: Any) -> Any:
        return binary(">>", self, o)

    def __rrshift__(self, o: Any) -> Any:
        return binary(">>", o, self)

    def __and__(self, o: Any) -> Any:
        return binary("&", self, o)

    def __rand__(self, o: Any) -> Any:
        return binary("&", o, self)

    def __or__(self, o: Any) -> Any:
        return binary("|", self, o)

    def __ror__(self, o: Any) -> Any:
        return binary("|", o, self)

    def __xor__(self, o: Any) -> Any:
        return binary("^", self, o)

    def __rxor__(self, o: Any) -> Any:
        return binary("^", o, self)

    def __neg__(self) -> Any:
        return negative(self)

    def __invert__(self) -> Any:
        return ~to_expr(self)

    def __abs__(self) -> Any:
        return tirx.abs(to_expr(self))

    def __lt__(self, o: Any) -> Any:
        return compare("<", self, o)

    def __le__(self, o: Any) -> Any:
        return compare("<=", self, o)

    def __gt__(self, o: Any) -> Any:
        return compare(">", self, o)

    def __ge__(self, o: Any) -> Any:
        return compare(">=", self, o)

    def __eq__(self, o: object) -> Any:
        return compare("==", self, o)

    def __ne__(self, o: object) -> Any:
        return compare("!=", self, o)

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise TileSyntaxError(
            "the truth of a device value is not known while the kernel is traced",
            loc=source.current(),
            hint="decorate the helper with @T.macro, so that its if, while, and, or, not become device code",
        )


def _refuse_iteration(value: Any) -> Any:
    raise TileTypeError(
        f"{value} is one value of {dtype_of(value)}, and no sequence that Python can take apart",
        loc=source.current(),
        hint="for i in T.serial(n): where n is a number; A[i] for the elements of a tensor or a tile",
    )


guard_iteration(_refuse_iteration)
give_words(lambda e: dtype_of(e), lambda e, dt: convert(e, canonical(dt)))


class Scalar(_Arithmetic):
    """What stands for a value until it is used."""

    def load(self) -> Any:
        raise NotImplementedError


class Variable(Scalar):
    """``T.alloc_var``: a one-element cell of the executor; assigning to its name stores, reading loads."""

    def __init__(self, buffer: Buffer):
        self.buffer = buffer

    @property
    def name(self) -> str:
        return self.buffer.name

    @property
    def dtype(self) -> dtype:
        return self.buffer.dtype

    def load(self) -> Any:
        return tirx.BufferLoad(self.buffer.var, [const(0, "int32")])

    def store(self, value: Any) -> None:
        self.buffer.store((0,), value)

    def __iter__(self) -> Any:
        return _refuse_iteration(self)

    def __getitem__(self, index: Any) -> Any:
        return self.buffer[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.buffer[index] = value

    def __repr__(self) -> str:
        return self.name


class _Tile:
    """A tile is no scalar: arithmetic, comparisons, truth and iteration are refused where they are written,
    with what to write instead, however many elements it has. Nothing here may fall back to Python's own,
    which takes every object for true."""

    def _refuse(self, *_: Any) -> Any:
        return to_expr(self, "an operand")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = (
        __floordiv__
    ) = __rfloordiv__ = _refuse
    __mod__ = __rmod__ = __pow__ = __rpow__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = (
        _refuse
    )
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __matmul__ = __rmatmul__ = __neg__ = __pos__ = (
        __invert__
    ) = _refuse
    __abs__ = __round__ = __floor__ = __ceil__ = __trunc__ = __int__ = __float__ = __index__ = __divmod__ = (
        __rdivmod__
    ) = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse  # else Python compares identities
    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        of: Any = self
        raise TileTypeError(
            f"{self} is a tile, and a scalar is needed as a condition", loc=source.current(),
            hint=f"T.any_of({of}) or T.all_of({of}) of its elements; `is not None` asks whether it is given",
        )  # fmt: skip

    def __iter__(self) -> NoReturn:
        of: Any = self
        raise TileTypeError(
            f"{self} is a tile, and is not taken apart by Python", loc=source.current(),
            expected="its elements by index", hint=f"for i in T.serial({of.name}.shape[0]):, {of.name}[i]",
        )  # fmt: skip

    def __contains__(self, value: Any) -> bool:
        self.__iter__()


@dataclass(frozen=True, eq=False)
class Region(_Tile):
    """A rectangular part of a buffer. ``mins`` and ``extents`` have one entry an axis of the buffer;
    ``dropped`` axes were indexed by a scalar and do not count in :attr:`shape`."""

    buffer: Buffer
    mins: tuple[Any, ...]
    extents: tuple[Any, ...]
    dropped: tuple[bool, ...]

    @property
    def axes(self) -> list[int]:
        """The axes of the buffer that :attr:`shape` has."""
        return [axis for axis, dropped in enumerate(self.dropped) if not dropped]

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(self.extents[axis] for axis in self.axes)

    @property
    def dtype(self) -> dtype:
        return self.buffer.dtype

    @property
    def name(self) -> str:
        return self.buffer.name

    def ir(self) -> Any:
        if self.buffer.flat is not None:
            raise TileTypeError(
                f"a tile of {self.name}, whose elements T.annotate_layout has put elsewhere",
                loc=source.current(),
                expected="its elements, T.copy, or T.atomic_add of a tile",
            )
        if self.buffer.packed:
            _narrow().refuse_part(self)
        ranges = [ir.Range.from_min_extent(m, e) for m, e in zip(self.mins, self.extents, strict=True)]
        return tirx.BufferRegion(self.buffer.var, ranges)

    def element(self) -> str:
        """One of its elements, as it could be written: ``s[0, i]`` of ``s[0, :]``."""
        names = iter("ijklmnop")
        index = [str(m) if d else next(names) for m, d in zip(self.mins, self.dropped, strict=True)]
        return f"{self.name}[{', '.join(index)}]"

    def __str__(self) -> str:
        """As it is written: ``s[0, :]``, ``s[k:k + 4, :2]``."""
        parts = []
        for low, extent, dropped, whole in zip(
            self.mins, self.extents, self.dropped, self.buffer.shape, strict=True
        ):
            first = "" if constant(low) == 0 else str(low)
            last = (
                ""
                if constant(difference(difference(whole, low), extent)) == 0
                else str(simplify(low + extent))
            )
            parts.append(str(low) if dropped else f"{first}:{last}")
        return f"{self.name}[{', '.join(parts)}]"


class Buffer(_Tile):
    """A tensor parameter or an allocation, as the kernel's author holds it."""

    def __init__(self, var: Any, name: str, shape: tuple[Any, ...], dt: str, scope: str, kind: str = "alloc"):
        self.var, self.name, self.shape, self.scope, self.kind = var, name, shape, scope, kind
        self.dtype = canonical(dt)
        self.loc = source.current()
        #: of a tensor whose elements lie elsewhere (T.annotate_layout): a row-major view, and what gives the
        #: indices into it (ops/placed.py)
        self.flat: Buffer | None = None
        #: of an accumulator, how T.Parallel nests add to it (ops/reducer.py)
        self.reducer = ""
        #: where it was finalized
        self.finalized: Loc | None = None
        self.place: Any = None
        #: of a tensor of 4-bit numbers: ``var`` has their bytes
        self.packed = False
        #: of a tensor: what a read outside gives instead of zero (T.annotate_safe_value)
        self.safe: Any = None
        #: of a box of packets: they have no marks
        self.dense = False
        #: of barriers: other blocks of the cluster may arrive there
        self.among = False

    @property
    def data(self) -> Memory:
        """The memory, for a view of it: ``T.Tensor(shape, dtype, X.data)``."""
        return Memory(self)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        if isinstance(self.shape[0], int):
            return self.shape[0]
        raise TileTypeError(
            f"the first extent of {self.name} is not a constant",
            loc=source.current(),
            hint=f"{self.name}.shape[0]",
        )

    def element(self) -> str:
        """One of its elements, as it could be written."""
        return self.whole().element()

    def whole(self) -> Region:
        zero = const(0, "int32")
        return Region(self, (zero,) * self.ndim, self.shape, (False,) * self.ndim)

    def _check_constant(self, axis: int, low: Any, extent: Any) -> None:
        size, first, count = self.shape[axis], constant(low), constant(extent)
        if first is None or count is None or not isinstance(size, int):
            return
        if first < 0 or first + count > size:
            what = f"index {first}" if count == 1 else f"{first}:{first + count}"
            raise TileValueError(
                f"{what} lies outside axis {axis} of {self.name}, whose extent is {size}",
                loc=source.current(),
                expected=f"0 ≤ index < {size}",
            )

    def _check_count(self, items: tuple[Any, ...]) -> None:
        if len(items) > self.ndim:
            axes = "1 axis" if self.ndim == 1 else f"{self.ndim} axes"
            raise TileValueError(
                f"{self.name} has {axes} and is indexed with {len(items)}", loc=source.current()
            )

    def __getitem__(self, index: Any) -> Any:
        items = index if isinstance(index, tuple) else (index,)
        if Ellipsis in [i for i in items if i is Ellipsis]:
            at = next(k for k, i in enumerate(items) if i is Ellipsis)
            items = items[:at] + (slice(None),) * (self.ndim - len(items) + 1) + items[at + 1 :]
        self._check_count(items)
        if _lanes().is_ramp(items):
            return _lanes().load(self, items)
        if len(items) == self.ndim and not any(isinstance(i, slice) for i in items):
            indices = [index_expr(i) for i in items]
            for axis, i in enumerate(indices):
                if self.scope.startswith(("shared", "local")):
                    self._check_constant(axis, i, 1)
            if self.packed:
                return _narrow().Element(self, indices)
            return self.read(indices) if self.safe is None else _outside().Guarded(self, indices)
        items = items + (slice(None),) * (self.ndim - len(items))
        mins, extents, dropped = [], [], []
        for axis, item in enumerate(items):
            if isinstance(item, slice):
                low, extent = self._slice(axis, item)
            else:
                low, extent = index_expr(item), 1
            if self.scope.startswith(("shared", "local")):
                self._check_constant(axis, low, extent)
            mins.append(low)
            extents.append(extent)
            dropped.append(not isinstance(item, slice))
        return Region(self, tuple(mins), tuple(extents), tuple(dropped))

    def read(self, indices: list[Any]) -> Any:
        """The element, zero outside."""
        if self.flat is not None:
            return tirx.BufferLoad(self.flat.var, list(self.place(indices)))
        return tirx.BufferLoad(self.var, indices)

    def _slice(self, axis: int, item: slice) -> tuple[Any, Any]:
        if item.step is not None and constant(to_expr(item.step)) != 1:
            raise TileValueError(
                f"a slice of {self.name} has a step",
                loc=source.current(),
                hint="index with a loop over T.Parallel",
            )
        low = index_expr(0 if item.start is None else item.start)
        high = index_expr(self.shape[axis] if item.stop is None else item.stop)
        extent = difference(high, low)
        known = constant(extent)
        if known is not None and known <= 0:
            raise TileValueError(f"the slice {low}:{high} of {self.name} is empty", loc=source.current())
        return low, extent if known is None else known

    def __setitem__(self, index: Any, value: Any) -> None:
        items = index if isinstance(index, tuple) else (index,)
        self._check_count(items)
        for axis, i in enumerate(items):
            if (
                isinstance(i, int) and i < 0
            ):  # a tile may begin before a tensor; an element stored there is a slip
                raise TileValueError(
                    f"index {i} lies outside axis {axis} of {self.name}",
                    loc=source.current(),
                    expected="0 ≤ index",
                    hint=f"{self.name}.shape[{axis}] - {-i}: indices do not count from the end",
                )
        if _lanes().stored(self, items, value):
            return
        if len(items) != self.ndim or any(isinstance(i, slice) for i in items):
            raise TileSyntaxError(
                f"a whole part of {self.name} is assigned at once",
                loc=source.current(),
                hint=f"T.copy(…, {self.name}[…]), T.fill(…), or a loop over T.Parallel",
            )
        self.store(items, value)

    def store(self, items: tuple[Any, ...], value: Any, exact: bool = False) -> None:
        """``exact``: of a tile of 4-bit numbers, the value is one of theirs already."""
        b = bld.current()
        indices = [index_expr(i) for i in items]
        if self.scope.startswith(("shared", "local")):
            for axis, i in enumerate(indices):
                self._check_constant(axis, i, 1)
        if self.kind == "signal":
            raise TileSyntaxError(
                f"{self.name} is a signal and is written as memory",
                loc=source.current(),
                hint=f"T.signal({self.name}[i], value=…), T.wait({self.name}[i], value=…)",
            )
        if self.flat is not None:
            self.flat.store(self.place(indices), value)
            return
        if self.packed:
            _halves().store(self, indices, value)
            return
        b.emit(tirx.BufferStore(self.var, value if exact else convert(value, self.dtype), indices, b.span()))

    def __repr__(self) -> str:
        return self.name

    @property
    def strides(self) -> tuple[Any, ...]:
        given = list(self.var.ty.strides)
        if given:
            return tuple(given)
        out: list[Any] = [1]
        for extent in reversed(self.shape[1:]):
            out.insert(
                0,
                simplify(extent * out[0])
                if not isinstance(extent, int) or not isinstance(out[0], int)
                else extent * out[0],
            )
        return tuple(out)


def _outside() -> Any:
    from tilescale.compiler.builder import outside

    return outside


def _narrow() -> Any:
    """What knows of 4-bit numbers; it needs this module."""
    from tilescale.compiler.builder import narrow

    return narrow


def _halves() -> Any:
    """What stores 4-bit numbers one by one; it needs this module."""
    from tilescale.compiler.builder import halves

    return halves


def _lanes() -> Any:
    """What knows of vectors; it needs this module."""
    from tilescale.compiler.builder import lanes

    return lanes


@dataclass(frozen=True)
class Memory:
    """A tensor's or a tile's memory, without its shape."""

    of: Buffer


def convert(value: Any, dt: str) -> Any:
    """``value`` as an expression of dtype ``dt``; for one of 4 bits, of the dtype that tiles hold."""
    if isinstance(dt, Narrow):
        return _narrow().rounded(value, dt)
    e = to_expr(value, "a stored value")
    dt = str(dt)
    if isinstance(e, (bool, int, float)):
        if dt.startswith("float8"):
            if GREATEST[dt] < abs(e) < float("inf"):
                raise too_large(e, dt)
            return tirx.Cast(ir.PrimType(dt), const(float(e), "float32"))
        if "int" in dt and isinstance(e, float) and not e.is_integer():
            raise TileTypeError(f"{e} is stored as {dt}", loc=source.current(), hint=f'T.cast({e}, "{dt}")')
        if "int" in dt and not fits(int(e), dt):
            raise TileValueError(
                f"{e} is stored as {dt}", loc=source.current(), expected=f"a value that fits {dt}"
            )
        return const(e if dt != "bool" else bool(e), dt)
    if str(e.ty) == dt:
        return e
    return converted(e, dt)


def difference(a: Any, b: Any) -> Any:
    """``a - b``, an int where it is one once named values are put in: ``low = i * 64; high = low + 64;
    A[low:high]``."""
    return resolved(a - b)


def resolved(e: Any) -> Any:
    """An expression simplified, an int where it is one once named values are put in."""
    plain = simplify(e)
    if isinstance(plain, int) or not bld.active():
        return plain
    known = bld.current().definitions
    for _ in range(8):  # names of names; a longer chain stays symbolic
        found: list[Any] = []
        structural_walk(e, (ir.Var, lambda v, found=found: found.append(v) if v in known else None))
        if not found:
            break
        e = structural_map(e, (ir.Var, lambda v: known.get(v, v)))
    full = simplify(e)
    return full if isinstance(full, int) else plain


def same_dtype(a: Any, b: Any, what: str) -> tuple[Any, Any, str]:
    """Both operands as expressions of one dtype: the floating, then the wider one."""
    a, b = to_expr(a, what), to_expr(b, what)
    if not is_expr(a):
        a = as_expr(
            a, str(dtype_of(b)) if not (isinstance(a, float) and "float" not in str(b.ty)) else "float32"
        )
    if not is_expr(b):
        b = as_expr(b, str(a.ty) if not (isinstance(b, float) and "float" not in str(a.ty)) else "float32")
    x, y = canonical(str(a.ty)), canonical(str(b.ty))
    if x != y:
        wide = x if (x.is_float, x.bits) >= (y.is_float, y.bits) else y
        a, b = convert(a, wide), convert(b, wide)
    return a, b, str(a.ty)


def float_function(name: str, a: Any, b: Any) -> Any:
    """A call of a function of two floats; integers become float32."""
    a, b, dt = same_dtype(a, b, f"an argument of T.{name}")
    if "float" not in dt:
        a, b, dt = convert(a, "float32"), convert(b, "float32"), "float32"
    return ir.Call(f"ts.math.{name}", [a, b], ret_ty=ir.PrimType(dt))
