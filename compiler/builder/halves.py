"""Elements of tensors of 4-bit numbers that are stored one by one: a store writes its half of a byte and
keeps the other half.

That is a read and a write of the byte. Two who write its halves at the same time would lose one of them, so
each byte has to be one's own:

- of a nest (T.Parallel, T.vectorized), one iteration gets all numbers of a byte that the nest writes: where
  neighbours along a loop share bytes, two of its iterations become one (`of_nest`). A nest of which that
  cannot be shown is refused.
- of executors, an index that makes the half depend on which of them it is (``A[0, block]``) is refused. What
  only memory knows is judged by the simulator, whose elements are the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.held import reads_memory
from tilescale.compiler.builder.narrow import dtype_of_tensor, encoded, rounded
from tilescale.compiler.builder.values import Buffer, as_expr, binary, const
from tilescale.compiler.ir import source
from tilescale.compiler.ir.halves import store_half
from tilescale.compiler.ir.multiples import bound_in, is_multiple, spelt_out
from tilescale.compiler.ir.numbers import constant, simplify
from tilescale.compiler.ir.numeric import variables
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.statements import sequence, statements
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, sym, tirx
from tilescale.errors import TileTypeError

#: iterations of a nest that are compared one by one
MOST = 1 << 20
NESTS = ("parallel", "vectorized")


def store(tensor: Buffer, indices: list[Any], value: Any) -> None:
    """Adds ``tensor[indices] = value`` to the trace. Inside a nest it stands there with the index of a number
    and the number's bits until `of_nest`.

    Raises:
        TileTypeError: the half depends on the executor.
    """
    b, dt = bld.current(), dtype_of_tensor(tensor)
    _require_own(tensor, indices[-1])
    code = tirx.Cast(str(dt.packed), encoded(rounded(value, dt), dt))
    made = tirx.BufferStore(tensor.var, code, indices, b.span())
    b.emit(made if any(f.kind in NESTS for f in b.frames) else _half(made, b.definitions))


def _half(s: Any, names: Mapping[Any, Any]) -> Any:
    """The store of a number as one of its byte, of which the other half stays."""
    *outer, last = s.indices
    two, (byte, half) = const(2, str(last.ty)), _byte_of(last, names)
    at = [*outer, tirx.floordiv(last, two) if byte is None else byte]
    which = tirx.Cast("int32", tirx.floormod(last, two)) if half is None else const(half, "int32")
    return store_half(s.buffer, at, tirx.Cast("int32", s.value), which * const(4, "int32"), s.span)


def _byte_of(last: Any, names: Mapping[Any, Any]) -> tuple[Any, int | None]:
    """A number's byte and half; (None, None) where the half is not known."""
    spelt = spelt_out(last, names)
    half = constant(simplify(tirx.floormod(spelt, const(2, str(last.ty)))))
    if half is None:
        return None, None
    return as_expr(simplify(tirx.floordiv(spelt, const(2, str(last.ty)))), str(last.ty)), half


# ---- executors


def _require_own(tensor: Buffer, last: Any) -> None:
    b = bld.current()
    spelt = spelt_out(last, {**b.definitions, **b.counted, **_promised()})
    for term in _terms(spelt):
        if is_multiple(term, 2) or reads_memory(term):
            continue
        if (who := _executor(term)) is not None:
            raise TileTypeError(
                f"which half of a byte of {tensor.name} is stored depends on {who}: two of them would write "
                "one byte",
                loc=source.current(),
                expected=f"both {tensor.dtype} numbers of a byte by one of them: an even number for each "
                "step of it",
                hint=f"{tensor.name}[…, 2 * {who}] and {tensor.name}[…, 2 * {who} + 1] in one, or T.Parallel "
                "over the columns",
            )


def _promised() -> dict[Any, Any]:
    """What symbols are multiples of, as what stands for them."""
    b = bld.current()
    return {
        b.symbols[name]: tirx.Var(f"{name}_units", str(b.symbols[name].ty))
        * const(of, str(b.symbols[name].ty))
        for name, of in b.multiples.items()
        if name in b.symbols
    }


def _terms(e: Any) -> list[Any]:
    if isinstance(e, (tirx.Add, tirx.Sub)):
        return [*_terms(e.a), *_terms(e.b)]
    return [e]


def _executor(e: Any) -> str | None:
    """The name of what in an index says which executor it is; None where nothing does."""
    b, found = bld.current(), []
    launch = b.launch
    blocks = (
        {v for v, n in zip(launch.block_vars, launch.grid, strict=True) if constant(n) != 1}
        if launch is not None
        else set()
    )

    def call(c: Any) -> None:
        if getattr(c.op, "name", "") == "ts.scale_index" and c.args[0].value != "device":
            found.append(str(c.args[0].value))

    structural_walk(e, (ir.Var, lambda v: found.append(v.name) if v in blocks or v in b.executors else None))
    structural_walk(e, (ir.Call, call))
    return found[0] if found else None


# ---- nests


def is_half(s: Any) -> bool:
    """Whether a statement stores a number of a tensor of 4-bit numbers, and still has the number's index."""
    buffer = bld.current().buffers.get(s.buffer)
    return buffer is not None and bool(buffer.packed)


def within(body: Any) -> list[Any]:
    """The stores of 4-bit numbers in a nest's body."""
    found: list[Any] = []
    structural_walk(body, (tirx.BufferStore, lambda s: found.append(s) if is_half(s) else None))
    return found


@dataclass(frozen=True)
class _Index:
    """An index as a sum: of variables of the nest and its inner loops, by coefficient, and of ``rest``, which
    does not change within the nest. ``parts`` is None where it is no such sum."""

    parts: dict[Any, int] | None
    rest: Any
    #: what of the nest decides it; None among them: memory
    of: frozenset[Any]

    def same(self, other: _Index) -> bool:
        """Whether both are known to be one number in each iteration."""
        if self.parts is None or self.parts != other.parts:
            return self.parts is None and other.parts is None and str(self.rest) == str(other.rest)
        return self.beyond(other) == 0

    def beyond(self, other: _Index) -> int | None:
        """By how much this one's rest is greater; None where that is no number."""
        return constant(simplify(self.rest - other.rest))


@dataclass(frozen=True)
class _Store:
    node: Any
    indices: tuple[_Index, ...]


class _Nest:
    """A nest with stores of 4-bit numbers. ``extents``: an int or an expression for each variable."""

    def __init__(self, extents: dict[Any, Any], body: Any, word: str):
        self.extents, self.body, self.word = extents, body, word
        self.own = bound_in(body)
        self.names = {**bld.current().definitions, **self.own}
        self.inner: dict[Any, int | None] = {}
        structural_walk(body, (tirx.For, lambda s: self.inner.__setitem__(s.loop_var, constant(s.extent))))
        self.stores = [_Store(s, tuple(map(self._index, s.indices))) for s in within(body)]

    def _index(self, e: Any) -> _Index:
        spelt, counted = spelt_out(e, self.names), [*self.extents, *self.inner]
        used = variables(spelt)
        of = frozenset(used & {None, *counted})
        summed = None not in of and not used & set(self.own)  # a long chain of names is not spelt out
        parts = list(sym.detect_linear_equation(spelt, counted)) if summed else []
        if len(parts) != len(counted) + 1 or variables(parts[-1]) & {None, *counted}:
            return _Index(None, spelt, of)
        numbers = [constant(simplify(p)) for p in parts[:-1]]
        if None in numbers:
            return _Index(None, spelt, of)
        return _Index({v: n for v, n in zip(counted, numbers, strict=True) if n}, parts[-1], of)

    # -- which iterations become one
    # ------------------------------------------------------------------------------
    def pairs(self) -> tuple[Any, int] | None:
        """The variable two of whose iterations share bytes, and 1 where a byte begins at odd ones; None where
        no two do.

        Raises:
            TileTypeError: iterations of more than one variable, or of places that are not known.
        """
        found: set[tuple[Any, int]] = set()
        for s in self.stores:
            last = s.indices[-1]
            for v, n in (last.parts or {}).items():
                if n % 2 and v in self.extents and self.extents[v] != 1:
                    half = self._parity(s)
                    found.add((v, half if n > 0 else 1 - half))
        if len(found) > 1:
            self.refuse(self.stores[0])
        return found.pop() if found else None

    def _parity(self, s: _Store) -> int:
        """Whether the number of a nest's first iteration lies in the upper half of its byte."""
        rest = spelt_out(s.indices[-1].rest, _promised())
        for half in (0, 1):
            if is_multiple(simplify(rest - half), 2):
                return half
        self.refuse(s)

    def check(self, pair: Any, shift: int) -> None:
        """Each byte is one iteration's; ``pair``: two neighbours along it, from ``shift`` on, are one.

        Raises:
            TileTypeError: that is not so, or is not known.
        """
        for buffer in {s.node.buffer: s for s in self.stores}:
            of = [s for s in self.stores if s.node.buffer.same_as(buffer)]
            if not self._apart(of, pair, shift):
                self.refuse(of[-1])

    def _apart(self, of: list[_Store], pair: Any, shift: int) -> bool:
        axes, left = list(range(len(of[0].indices))), [v for v, n in self.extents.items() if n != 1]
        for axis in list(axes):  # along which iterations lie apart, whatever else they do
            first = of[0].indices[axis]
            if all(first.same(s.indices[axis]) for s in of[1:]) and (
                own := self._alone(first, axis, of, pair)
            ):
                left = [v for v in left if v not in own]
                axes.remove(axis)
        if not left:
            return True
        axes = [axis for axis in axes if self._counts(of, axis)]
        used = {v for s in of for axis in axes for v in s.indices[axis].parts or {}} - set(self.extents)
        counted = {**{v: self.extents[v] for v in left}, **{v: self.inner[v] for v in used}}
        if not all(isinstance(n, int) for n in counted.values()) or np.prod([*counted.values()]) > MOST:
            return False
        return self._compared(of, axes, left, counted, pair, shift)

    def _alone(self, index: _Index, axis: int, of: list[_Store], pair: Any) -> set[Any]:
        """The variables that an axis tells apart by itself; none where it tells of more than one, unless the
        author names rows by what memory holds: those are as different as the numbers have to be, and the
        simulator sees whether they are."""
        own = {v for v in index.of if v in self.extents}
        if index.parts is None:
            rows = axis < len(of[0].indices) - 1 and None in index.of
            return own if rows and all(s.indices[-1].parts is not None for s in of) else set()
        if len(index.parts) != 1 or not own:
            return set()
        (v,) = own
        whole = index.parts[v] % 2 == 0 or (v.same_as(pair) and abs(index.parts[v]) == 1)
        return own if axis < len(of[0].indices) - 1 or whole else set()

    def _counts(self, of: list[_Store], axis: int) -> bool:
        """Whether an axis can be compared in numbers: all of its indices are sums, of one rest, and the inner
        loops in them are of known lengths."""
        first = of[0].indices[axis]
        return all(
            (index := s.indices[axis]).parts is not None
            and index.beyond(first) is not None
            and all(v in self.extents or self.inner[v] is not None for v in index.parts)
            for s in of
        )

    def _compared(
        self,
        of: list[_Store],
        axes: list[int],
        left: list[Any],
        counted: dict[Any, int],
        pair: Any,
        shift: int,
    ) -> bool:
        grid = dict(zip(counted, np.indices([*counted.values()]).reshape(len(counted), -1), strict=True))
        lane = np.zeros_like(next(iter(grid.values())))
        for v in left:
            lane = lane * (counted[v] + 1) + ((grid[v] + shift) // 2 if v.same_as(pair) else grid[v])
        rows = []
        for s in of:
            row = [lane]
            for axis in axes:
                index, first = s.indices[axis], of[0].indices[axis]
                at = sum(
                    (grid[v] * n for v, n in (index.parts or {}).items() if v in grid), np.zeros_like(lane)
                )
                at = at + (index.beyond(first) or 0)
                last = axis == len(s.indices) - 1
                row.append((at + self._parity(of[0])) // 2 if last else at)
            rows.append(np.stack(row))
        every = np.unique(np.concatenate(rows, 1), axis=1)
        return bool(np.unique(every[1:], axis=1).shape[1] == every.shape[1])

    def refuse(self, s: _Store) -> NoReturn:
        tensor = bld.current().buffers[s.node.buffer]
        at = ", ".join(str(simplify(i)) for i in s.node.indices)
        raise TileTypeError(
            f"iterations of this {self.word} share bytes of {tensor.name}: {tensor.name}[{at}]",
            loc=loc_of(s.node.span),
            expected=f"both {tensor.dtype} numbers of a byte in neighbouring iterations of one of its loops: "
            "a column that is an even number plus that loop's index",
            hint='for j in T.serial(…) inside of it, T.Scale("thread") with a row for each thread, or T.copy '
            f"of a tile of T.{tensor.dtype}",
        )


def of_nest(
    names: list[Any], ranges: list[tuple[Any, Any, Any]], body: Any, word: str, laid_out: bool
) -> Any:
    """A nest that is complete, as its variables, their ranges and its body: with the stores of bytes for
    those of 4-bit numbers. ``laid_out``: the author says which thread runs which iteration.

    Raises:
        TileTypeError: iterations would share bytes, or a layout asks for what it cannot have.
    """
    held = within(body)
    ranges, body = _from_zero(names, ranges, body)
    nest = _Nest({v: high for v, (_, high, _) in zip(names, ranges, strict=True)}, body, word)
    found = nest.pairs()
    pair, shift = found or (None, 0)
    nest.check(pair, shift)
    if pair is None:
        return names, ranges, _in_bytes(body, nest.names)
    if laid_out:
        raise TileTypeError(
            f"loop_layout= of a {word} whose neighbours along {pair.name} store numbers of one byte",
            loc=loc_of(held[0].span),
            expected="no loop_layout=: two of its iterations become one",
        )
    at = next(k for k, v in enumerate(names) if v.same_as(pair))
    extent, two = as_expr(nest.extents[pair], str(pair.ty)), const(2, str(pair.ty))
    half = tirx.Var(bld.current().unique(f"{pair.name}_pair"), pair.ty)
    count = simplify(tirx.floordiv(extent + (shift + 1), two))
    made = _Pairs(nest, pair, half * two - shift, extent, shift).of(body)
    return [*names[:at], half, *names[at + 1 :]], [*ranges[:at], (0, count, 1), *ranges[at + 1 :]], made


def _from_zero(
    names: list[Any], ranges: list[tuple[Any, Any, Any]], body: Any
) -> tuple[list[tuple[Any, Any, Any]], Any]:
    """The same nest whose variables count from zero in steps of one."""
    put, out = {}, []
    for v, (low, high, step) in zip(names, ranges, strict=True):
        if constant(low) != 0 or constant(step) != 1:
            put[v] = v * as_expr(step, str(v.ty)) + as_expr(low, str(v.ty))
            high = binary("//", binary("+", binary("-", high, low), binary("-", step, 1)), step)
        out.append((0, high, 1))
    return out, structural_map(body, (ir.Var, lambda v: put.get(v, v))) if put else body


def _in_bytes(body: Any, names: Mapping[Any, Any]) -> Any:
    return structural_map(body, (tirx.BufferStore, lambda s: _half(s, names) if is_half(s) else s))


class _Pairs:
    """The body of a nest for two iterations: ``first`` and the next one of ``pair``, one after the other."""

    def __init__(self, nest: _Nest, pair: Any, first: Any, extent: Any, shift: int):
        self.names, self.pair = nest.names, pair
        self.at = [first, simplify(first + 1)]
        self.guards = [
            tirx.GE(first, const(0, str(pair.ty))) if shift else None,
            None if is_multiple(extent + shift, 2) else tirx.LT(self.at[1], extent),
        ]

    def of(self, s: Any) -> Any:
        """What does not differ between the two (a condition around all, names in front) stands once."""
        if isinstance(s, tirx.IfThenElse) and self._common(s.condition):
            other = None if s.else_case is None else self.of(s.else_case)
            return tirx.IfThenElse(s.condition, self.of(s.then_case), other, s.span)
        parts = statements(s)
        count = next(
            (k for k, x in enumerate(parts) if not (isinstance(x, tirx.Bind) and self._common(x.value))),
            len(parts),
        )
        if count:
            return sequence([*parts[:count], *([self.of(sequence(parts[count:]))] if parts[count:] else [])])
        whole = self._whole(parts)
        copies = [self._copy(parts, half, whole) for half in (0, 1)]
        for half, guard in enumerate(self.guards):
            if guard is not None:
                copies[half] = tirx.IfThenElse(guard, copies[half], None)
        return sequence(copies)

    def _common(self, e: Any) -> bool:
        return not variables(spelt_out(e, self.names)) & {None, self.pair}

    def _whole(self, parts: list[Any]) -> Any:
        """The store of which both iterations make a whole byte: the only one to its tensor, which nothing of
        the body reads; always made. None where there is no such store."""
        if any(g is not None for g in self.guards):
            return None
        touched: list[Any] = []
        every = sequence(parts)
        structural_walk(every, (ir.TensorLoad, lambda e: touched.append(e.source)))
        structural_walk(every, (ir.TensorRegion, lambda e: touched.append(e.source)))
        structural_walk(every, (tirx.BufferStore, lambda s: touched.append(s.buffer)))
        for s in parts:
            if (
                isinstance(s, tirx.BufferStore)
                and is_half(s)
                and sum(s.buffer.same_as(t) for t in touched) == 1
            ):
                places = [
                    (outer, *self._byte(s, half)) for half in (0, 1) for outer in [self._outer(s, half)]
                ]
                (a, byte, low), (c, other, high) = places
                alike = (
                    a == c
                    and byte is not None
                    and other is not None
                    and constant(simplify(byte - other)) == 0
                )
                if alike and {low, high} == {0, 1}:
                    return s
        return None

    def _outer(self, s: Any, half: int) -> list[str]:
        return [str(simplify(self._put(spelt_out(e, self.names), half))) for e in s.indices[:-1]]

    def _byte(self, s: Any, half: int) -> tuple[Any, int | None]:
        return _byte_of(self._put(spelt_out(s.indices[-1], self.names), half), {})

    def _put(self, e: Any, half: int) -> Any:
        return structural_map(e, (ir.Var, lambda v: self.at[half] if v.same_as(self.pair) else v))

    def _copy(self, parts: list[Any], half: int, whole: Any) -> Any:
        """The body of one of the two. The second one's names, loops and memory are its own."""
        b, own = bld.current(), dict[Any, Any]()

        def fresh(v: Any) -> None:
            own[v] = ir.Var(b.unique(b.renames.get(v, v.name)), v.ty)

        body = sequence(parts)
        if half:
            structural_walk(body, (tirx.Bind, lambda x: fresh(x.var)))
            structural_walk(body, (tirx.For, lambda x: fresh(x.loop_var)))
            structural_walk(body, (tirx.AllocBuffer, lambda x: fresh(x.buffer)))

        def store(s: Any) -> Any:
            return self._stored(s, half, s.same_as(whole)) if is_half(s) else s

        body = structural_map(body, (tirx.BufferStore, store))
        put = lambda v: own.get(v, self.at[half] if v.same_as(self.pair) else v)  # noqa: E731
        return structural_map(body, (ir.Var, put))

    def _stored(self, s: Any, half: int, whole: bool) -> Any:
        """The store of a number by one of the two. Of a whole byte the first one's is a name for its bits."""
        *outer, last = s.indices
        at = self._put(spelt_out(last, self.names), half)
        if not whole:
            return _half(tirx.BufferStore(s.buffer, s.value, [*outer, at], s.span), {})
        if not half:
            self.code = tirx.Var(bld.current().unique("first"), "int32")
            return tirx.Bind(self.code, tirx.Cast("int32", s.value), s.span)
        byte, place = _byte_of(at, {})
        codes = [tirx.Cast("int32", s.value), self.code]
        low, high = codes if place == 0 else codes[::-1]
        both = tirx.bitwise_or(low, tirx.shift_left(high, const(4, "int32")))
        return tirx.BufferStore(s.buffer, tirx.Cast(str(s.value.ty), both), [*outer, byte], s.span)
