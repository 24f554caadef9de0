"""Short vectors of a thread: values that are two, four or eight of a dtype, as TileLang's programs have them.

They are Python's: each lane is a scalar of the IR, so that every target knows them. A GPU's compiler makes of
neighbours one access where it can prove their alignment; nothing here depends on that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.held import held, named
from tilescale.compiler.builder.lanes import Lanes
from tilescale.compiler.builder.values import Region, Variable, as_expr, binary, convert, dtype_of, truth
from tilescale.compiler.ir import source
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ops import math as own
from tilescale.compiler.ops import rounding
from tilescale.compiler.ops.base import region
from tilescale.compiler.tvm_compat import is_expr, tirx
from tilescale.errors import TileTypeError, TileValueError
from tilescale.language.dtypes import canonical
from tilescale.language.vectors import Vector


class LaneCell(Variable):
    """``T.alloc_var(T.float32x2)``: a cell for each lane."""

    def __init__(self, of: Vector, cells: list[Variable]):
        super().__init__(cells[0].buffer)
        self.of, self.cells = of, cells

    def load(self) -> Any:
        raise TileTypeError(
            f"{self.name} is a vector, and a scalar is needed", loc=source.current(),
            hint=f"T.extract_lane({self.name}, 0)",
        )  # fmt: skip

    def lanes(self) -> Lanes:
        return Lanes(self.of.of, [held(c.load()) for c in self.cells])

    def store(self, value: Any) -> None:
        made = lanes(value, f"what is assigned to {self.name}")
        if made.dtype != self.of.of or len(made.values) != self.of.count:
            raise TileTypeError(
                f"{made} is assigned to {self.name}", loc=source.current(), expected=repr(self.of)
            )
        for cell, one in zip(self.cells, made.values, strict=True):
            cell.store(one)


def vector(of: Vector, values: tuple[Any, ...]) -> Lanes:
    """A vector of its lanes' values; one scalar is all of them.

    Raises:
        TileTypeError: more or fewer values than lanes.
    """
    if len(values) == 1:
        values = values * of.count
    if len(values) != of.count:
        raise TileTypeError(
            f"{of!r} of {len(values)} values", loc=source.current(), expected=f"{of.count} of them, or one"
        )
    return Lanes(of.of, [_kept(convert(v, of.of)) for v in values])


def _kept(e: Any) -> Any:
    return named(e, "lane") if is_expr(e) else e


def lanes(value: Any, what: str) -> Lanes:
    """A value as the vector that it is.

    Raises:
        TileTypeError: it is none.
    """
    if isinstance(value, LaneCell):
        return value.lanes()
    if not isinstance(value, Lanes):
        raise TileTypeError(
            f"{what} is {value}",
            loc=source.current(),
            expected="a vector, as T.float32x2(a, b) or T.ldg64(A[i])",
        )
    return value


def extract_lane(vector: Any, lane: int) -> Any:
    """The ``lane``-th value of a vector.

    Raises:
        TileTypeError: what is no vector, or a lane that is not known when the kernel is compiled.
        TileValueError: a lane that the vector does not have.
    """
    made, k = lanes(vector, "what T.extract_lane takes apart"), constant(lane)
    if not isinstance(k, int) or isinstance(lane, bool):
        raise TileTypeError(f"lane {lane} of {made}", loc=source.current(), expected="a constant")
    if not 0 <= k < len(made.values):
        raise TileValueError(
            f"lane {k} of {made}", loc=source.current(), expected=f"0 … {len(made.values) - 1}"
        )
    return made.values[k]


def Broadcast(value: Any, lanes: int) -> Lanes:
    """A vector of so many lanes, all of them ``value``: ``a[0:32] = T.Broadcast(x, 32)``.

    Raises:
        TileTypeError: no constant count. TileValueError: less than two lanes, or more than 64.
    """
    count = constant(lanes)
    if not isinstance(count, int) or isinstance(lanes, bool):
        raise TileTypeError(f"T.Broadcast to {lanes} lanes", loc=source.current(), expected="a constant")
    if not 2 <= count <= 64:
        raise TileValueError(f"T.Broadcast to {count} lanes", loc=source.current(), expected="2 … 64")
    one = _kept(as_expr(value, str(dtype_of(value))))
    return Lanes(canonical(str(one.ty)), [one] * count)


def cast(value: Any, to: Vector) -> Lanes:
    """A vector's lanes converted. What is no vector, or neighbours in memory, becomes all of its lanes.

    Raises:
        TileTypeError: another number of lanes.
    """
    if isinstance(value, Region):
        value = _neighbours(value)
    if not isinstance(value, (Lanes, LaneCell)):
        return vector(to, (value,))
    frm = lanes(value, "what T.cast converts")
    if len(frm.values) != to.count:
        raise TileTypeError(
            f"T.cast of {frm} to {to!r}", loc=source.current(), expected=f"{len(frm.values)} lanes"
        )
    return Lanes(to.of, [_kept(convert(v, to.of)) for v in frm.values])


def _neighbours(part: Region) -> Lanes:
    """``A[i, j:j + 4]``."""
    count = constant(part.extents[-1])
    if count is None or any(constant(e) != 1 for e in part.extents[:-1]):
        raise TileTypeError(
            f"{part} is no vector", loc=source.current(),
            expected="neighbours along the last axis, A[i, j:j + 4]",
        )  # fmt: skip
    at = [held(as_expr(m), "at") for m in part.mins]
    places = [(*at[:-1], binary("+", at[-1], k)) for k in range(count)]
    return Lanes(part.dtype, [named(part.buffer[p], "lane") for p in places])


# -- pairs
def _pairs(word: str, operands: tuple[Any, ...], act: Callable[..., Any]) -> Lanes:
    made = [lanes(v, f"an operand of T.{word}") for v in operands]
    kinds = {str(m) for m in made}
    if len(kinds) > 1 or len(made[0].values) != 2 or not made[0].dtype.is_float:
        raise TileTypeError(
            f"T.{word} of {', '.join(map(str, made))}",
            loc=source.current(),
            expected="vectors of one dtype: T.float32x2, T.float16x2 or T.bfloat16x2",
        )
    return Lanes(made[0].dtype, [_kept(act(*row)) for row in zip(*(m.values for m in made), strict=True)])


def _once(act: Callable[..., Any]) -> Callable[..., Any]:
    """Of 16-bit floats in float32, rounded to their dtype: float32's sums and products of them are rounded
    twice without harm, since it has more than twice their digits (Figueroa, "When is double rounding
    innocuous?", 1995)."""

    def run(*values: Any) -> Any:
        dt = str(values[0].ty)
        return act(*values) if dt == "float32" else convert(act(*(convert(v, "float32") for v in values)), dt)

    return run


def add2(x: Any, y: Any) -> Lanes:
    """The sums of two vectors' lanes, each rounded once."""
    return _pairs("add2", (x, y), _once(own.ieee_add))


def sub2(x: Any, y: Any) -> Lanes:
    """The differences of two vectors' lanes, each rounded once."""
    return _pairs("sub2", (x, y), _once(own.ieee_sub))


def mul2(x: Any, y: Any) -> Lanes:
    """The products of two vectors' lanes, each rounded once."""
    return _pairs("mul2", (x, y), _once(own.ieee_mul))


def fma2(x: Any, y: Any, z: Any) -> Lanes:
    """``x * y + z`` of three vectors' lanes, each rounded once."""
    return _pairs("fma2", (x, y, z), rounding.fused)


def max2(x: Any, y: Any) -> Lanes:
    """The greater of two vectors' lanes, as T.max of each."""
    return _pairs("max2", (x, y), own.max)


def min2(x: Any, y: Any) -> Lanes:
    """The lesser of two vectors' lanes, as T.min of each."""
    return _pairs("min2", (x, y), own.min)


def abs2(x: Any) -> Lanes:
    """The magnitudes of a vector's lanes."""
    return _pairs("abs2", (x,), own.abs)


# -- bits
def words(values: list[Any], dtype: str) -> list[Any]:
    """Values as words of 32 bits, the first one in the lowest bits."""
    bits = canonical(dtype).bits
    if bits == 64:
        wide = [_kept(tirx.reinterpret("uint64", v)) for v in values]
        return [convert(w >> tirx.const(s, "uint64"), "uint32") for w in wide for s in (0, 32)]
    if bits == 32:
        return [v if str(v.ty) == "uint32" else tirx.reinterpret("uint32", v) for v in values]
    kind, each, mask = f"uint{bits}", 32 // bits, tirx.const(2**bits - 1, "uint32")
    parts = [
        convert(v, "uint32") & mask if "int" in str(v.ty) else convert(tirx.reinterpret(kind, v), "uint32")
        for v in values
    ]
    out = []
    for k in range(0, len(parts), each):
        word = parts[k]
        for n in range(1, each):
            word = word | parts[k + n] << tirx.const(bits * n, "uint32")
        out.append(word)
    return out


def values(given: list[Any], dtype: str) -> list[Any]:
    """Words of 32 bits as the values that `words` made them of."""
    bits = canonical(dtype).bits
    if bits == 64:
        wide = [
            convert(low, "uint64") | convert(high, "uint64") << tirx.const(32, "uint64")
            for low, high in zip(given[::2], given[1::2], strict=True)
        ]
        return [tirx.reinterpret(dtype, w) for w in wide]
    if bits == 32:
        return [w if dtype == "uint32" else tirx.reinterpret(dtype, w) for w in given]
    kind = f"uint{bits}"
    parts = [
        convert(w >> tirx.const(bits * n, "uint32"), dtype if "int" in dtype else kind)
        for w in given
        for n in range(32 // bits)
    ]
    return [p if "int" in dtype else tirx.reinterpret(dtype, p) for p in parts]


def reinterpret(value: Any, to: Any) -> Any:
    """The bits of a vector, or of a scalar, as another vector or a scalar of 32 bits or more.

    Raises:
        TileValueError: they have different sizes.
    """
    frm = lanes(value, "a vector") if isinstance(value, (Lanes, LaneCell)) else Lanes(
        canonical(str((e := as_expr(value)).ty)), [e])  # fmt: skip
    of, count = (to.of, to.count) if isinstance(to, Vector) else (canonical(to), 1)
    if frm.dtype.bits * len(frm.values) != of.bits * count or of.bits * count < 32:
        raise TileValueError(
            f"{frm} and {to if isinstance(to, Vector) else of} have different sizes, or less than 32 bits",
            loc=source.current(),
        )
    given = [_kept(w) for w in words(list(frm.values), frm.dtype)]
    made = [_kept(v) for v in values(given, of)]
    return Lanes(of, made) if isinstance(to, Vector) else made[0]


# -- memory
def _place(memory: Any, bits: int, word: str) -> tuple[Any, list[tuple[Any, ...]]]:
    """The buffer, and the indices of so many bits of neighbours from where ``memory`` begins."""
    where, loc = ("global", "shared")[word[2] == "s"], source.current()
    of = region(memory, f"the memory of T.{word}", ())
    each = of.dtype.bits
    count, last = bits // each, constant(of.extents[-1])
    if not of.buffer.scope.startswith(where) or of.buffer.kind == "signal":
        raise TileTypeError(
            f"T.{word} of {of.name}", loc=loc,
            expected="a tensor" if where == "global" else "a tile of T.alloc_shared",
        )  # fmt: skip
    if bits % each or isinstance(last, int) and last not in (1, count) and of.shape:
        raise TileValueError(
            f"T.{word} of {last} elements of {of.dtype}", loc=loc,
            expected=f"{max(count, 1)} neighbours of the last axis, or the first of them",
        )  # fmt: skip
    at = [held(as_expr(m), "at") for m in of.mins]
    return of.buffer, [(*at[:-1], binary("+", at[-1], k)) for k in range(count)]


def _loaded(memory: Any, bits: int, word: str, pred: Any = None) -> Any:
    buffer, places = _place(memory, bits, word)
    test = None if pred is None else _kept(truth(pred))
    got = []
    for at in places:
        one = buffer[at]
        got.append(
            named(one if test is None else own.if_then_else(test, one, convert(0, buffer.dtype)), "loaded")
        )
    made = [_kept(w) for w in words(got, buffer.dtype)]
    return made[0] if bits == 32 else Lanes(canonical("uint32"), made)


def _stored(memory: Any, value: Any, bits: int, word: str, pred: Any = None) -> None:
    buffer, places = _place(memory, bits, word)
    raw = reinterpret(value, Vector("uint32", bits // 32))
    made = [_kept(v) for v in values(list(raw.values), buffer.dtype)]
    b = bld.current()
    if pred is None:
        for at, one in zip(places, made, strict=True):
            buffer.store(at, one)
        return
    test = truth(pred)
    frame = b.push("if", device=True)
    b.open_body()
    for at, one in zip(places, made, strict=True):
        buffer.store(at, one)
    body = b.close_body()
    b.pop(frame)
    b.emit(tirx.IfThenElse(test, body, None, b.span()))


def _load(word: str, bits: int, where: str) -> Any:
    what = f"{bits} bits of neighbours from {where}, as uint32{'' if bits == 32 else f'x{bits // 32}'}"
    if word.startswith("ldg"):

        def call(src: Any, pred: Any = None) -> Any:
            return _loaded(src, bits, word, pred)

        call.__doc__ = f"{what}; zero where ``pred`` does not hold."
    else:

        def call(src: Any) -> Any:  # type: ignore[misc]
            return _loaded(src, bits, word)

        call.__doc__ = f"{what}."
    call.__name__ = call.__qualname__ = word
    return call


def _store(word: str, bits: int, where: str) -> Any:
    what = f"Writes {bits} bits, of a vector or a scalar, to neighbours in {where}"
    if word.startswith("stg"):

        def call(dst: Any, value: Any, pred: Any = None) -> None:
            _stored(dst, value, bits, word, pred)

        call.__doc__ = f"{what}, where ``pred`` holds."
    else:

        def call(dst: Any, value: Any) -> None:  # type: ignore[misc]
            _stored(dst, value, bits, word)

        call.__doc__ = f"{what}."
    call.__name__ = call.__qualname__ = word
    return call


ldg32, ldg64, ldg128, ldg256 = (_load(f"ldg{n}", n, "a tensor") for n in (32, 64, 128, 256))
stg32, stg64, stg128, stg256 = (_store(f"stg{n}", n, "a tensor") for n in (32, 64, 128, 256))
lds32, lds64, lds128 = (_load(f"lds{n}", n, "a shared tile") for n in (32, 64, 128))
sts32, sts64, sts128 = (_store(f"sts{n}", n, "a shared tile") for n in (32, 64, 128))
