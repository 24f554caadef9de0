"""Layouts that an author makes: `T.Layout`, `T.Fragment` and the usual swizzles, for `T.annotate_layout` and
`plot_layout`.

A layout is written as a function of an element's indices. It is computed for every element, checked, and read
as digits (pieces.py): what the compiler can follow is a sum of terms ``index // a % b * c``, in shared memory
also under one of the hardware's swizzles.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from tilescale.compiler.ir import source
from tilescale.compiler.layout import fragment
from tilescale.compiler.layout.pieces import Piece
from tilescale.compiler.layout.shared import SWIZZLES, Shared, boxed, strided, widest_swizzle
from tilescale.errors import TileError, TileTypeError, TileValueError
from tilescale.language.dtypes import BITS

#: elements up to which a layout is computed for each of them
_FEW = 1 << 17
SUM = "a sum of terms such as i // 8 * 64, j % 8 or (j // 8 ^ i % 8) * 8"


class Layout:
    """Where the elements of a tile in shared memory lie: ``T.Layout((64, 64), lambda i, j: (i, (j // 8 ^ i %
    8) * 8 + j % 8))``.

    ``forward_fn`` takes an element's indices and gives its place, counted in elements from the tile's
    beginning, or several numbers, which are the indices of a row-major array. Places that no element takes
    are padding.

    Raises:
        TileTypeError: what the function gives is no integer. TileValueError: a place below zero, two elements
        in one place.
    """

    def __init__(self, shape: Sequence[int], forward_fn: Callable[..., Any]):
        self.shape = _shape(shape, "T.Layout")
        self.forward_fn = forward_fn
        if prod(self.shape) > _FEW:
            self.extents = _extents_by_digits(forward_fn, self.shape)
            return
        parts = _computed(forward_fn, self.shape, "T.Layout")
        self.places = np.zeros(self.shape, np.int64)
        for p in parts:
            self.places = self.places * (int(p.max()) + 1) + p
        self.extents = tuple(int(p.max()) + 1 for p in parts)
        _refuse_twice(self.shape, [self.places], "T.Layout", lambda at: f"place {at[0]}")

    def place(self, *index: Any) -> Any:
        """The place of an element, whose indices may be expressions."""
        found = self.forward_fn(*index)
        at: Any = 0
        for part, extent in zip(
            found if isinstance(found, (tuple, list)) else [found], self.extents, strict=True
        ):
            at = at * extent + part
        return at

    def __repr__(self) -> str:
        return f"T.Layout({self.shape})"

    def get_input_shape(self) -> tuple[int, ...]:
        """The tile's extents, by TileLang's name."""
        return self.shape

    def get_output_shape(self) -> tuple[int, ...]:
        """The extents of the memory that the function counts in, by TileLang's name."""
        return self.extents

    def map_forward_index(self, indices: Sequence[Any]) -> list[Any]:
        """What the function gives for an element, by TileLang's name."""
        found = self.forward_fn(*indices)
        return list(found) if isinstance(found, (tuple, list)) else [found]

    def is_equal(self, other: Any) -> bool:
        """Whether another layout has every element in the same place, by TileLang's name.

        Raises:
            TileValueError: so many elements that not each is looked at.
        """
        if prod(self.shape) > _FEW:
            raise TileValueError(f"is_equal of {self}", expected=f"at most {_FEW} elements")
        same = isinstance(other, Layout) and self.shape == other.shape
        return same and bool((self.places == other.places).all())

    def shared(self, bits: int) -> Shared:
        """The layout for elements of so many bits.

        Raises:
            TileValueError: it is no sum of digits, under none of the hardware's swizzles.
        """
        if prod(self.shape) > _FEW:
            raise TileValueError(
                f"{self} of a tile", loc=source.current(), expected=f"at most {_FEW} elements"
            )
        at = self.places * bits // 8
        for width, xors in SWIZZLES.items():
            plain = at ^ ((at >> 7 & ((1 << xors) - 1)) << 4)
            found = _digits([plain * 8 // bits]) if not (plain * 8 % bits).any() else None
            if found is not None:
                return Shared(
                    self.shape, tuple(Piece(a, u, e, "offset", s[0]) for a, u, e, s in found), bits, width
                )
        raise TileValueError(
            f"{self} is no layout that the compiler can follow, for elements of {bits} bits",
            loc=source.current(),
            expected=f"{SUM}; swizzles exchange chunks of 16 bytes within rows of 32, 64 or 128 bytes",
            hint="tilescale.layout.make_swizzled_layout(tile)",
        )


def Fragment(
    shape: Sequence[int],
    forward_fn: Callable[..., Any] | None = None,
    forward_thread_fn: Callable[..., Any] | None = None,
    replicate: int = 1,
    forward_index_fn: Callable[..., Any] | None = None,
) -> fragment.Fragment:
    """How a tile is spread over the registers of threads: ``T.Fragment((32, 8), lambda i, j: (i, j))`` gives
    each of 32 threads a row.

    Args:
        forward_fn: an element's indices (and with ``replicate`` the number of the copy) → its thread and its
            slot there; or
        forward_thread_fn: → its thread alone, and
        forward_index_fn: → its slot; without it a thread's elements lie in their row-major order.
        replicate: how many threads hold each element.

    Raises:
        TileTypeError: no function, or one that gives no integers. TileValueError: two elements in one slot of
            a thread, slots or threads that are left empty, a map that is no sum of digits.
    """
    dims = _shape(shape, "T.Fragment")
    if not isinstance(replicate, int) or replicate < 1:
        raise TileValueError(
            f"T.Fragment with replicate={replicate!r}", loc=source.current(), expected="a positive number"
        )
    if (forward_fn is None) == (forward_thread_fn is None):
        raise TileTypeError(
            "T.Fragment takes one function of an element's thread", loc=source.current(),
            expected="forward_fn=lambda i, j: (thread, slot), or forward_thread_fn=lambda i, j: thread",
        )  # fmt: skip
    whole = (*dims, replicate) if replicate > 1 else dims
    if forward_fn is not None:
        parts = _computed(forward_fn, whole, "T.Fragment")
        if len(parts) != 2:
            raise TileTypeError(
                "T.Fragment's function gives one number",
                loc=source.current(),
                expected="lambda i, j: (thread, slot)",
            )
        thread, slot = parts
    else:
        assert forward_thread_fn is not None
        (thread,) = _computed(forward_thread_fn, whole, "T.Fragment")[:1]
        slot = (
            _in_order(thread, replicate)
            if forward_index_fn is None
            else _computed(forward_index_fn, dims, "T.Fragment")[0]
        )
        slot = np.broadcast_to(slot[..., None], whole) if replicate > 1 and slot.ndim == len(dims) else slot
    _refuse_twice(whole, [thread, slot], "T.Fragment", lambda at: f"slot {at[1]} of thread {at[0]}")
    found = _digits([thread, slot])
    if (
        found is None
        or any(all(s) for *_, s in found)
        or any(a == len(dims) and s[1] for a, _, _, s in found)
    ):
        raise TileValueError(
            f"T.Fragment({dims}) is no layout that the compiler can follow", loc=source.current(),
            expected="each digit i // a % b of an index in the thread or in the slot, times a constant",
        )  # fmt: skip
    pieces = [
        Piece(
            None if a == len(dims) else a,
            0 if a == len(dims) else u,
            e,
            "slot" if s[1] else "thread",
            s[1] or s[0],
        )
        for a, u, e, s in found
    ]
    made = fragment.Fragment(dims, tuple(pieces), int(thread.max()) + 1)
    if not made.covers:
        raise TileValueError(
            f"T.Fragment({dims}) leaves slots empty: {prod(whole)} places are taken of {made.threads} "
            f"threads × {made.slots} slots",
            loc=source.current(),
            expected="every slot of every thread holds an element",
        )
    return made


# ---- the usual ones


def make_swizzled_layout(buffer: Any, k_major: bool = True, allow_pad: bool = True) -> Shared:
    """The layout that TMA writes and tensor cores read without bank conflicts: boxes of rows of 128, 64 or 32
    bytes, the widest that the tile's rows are a multiple of, under the swizzle of that width. It is the same
    whether rows run along k or not (``k_major``). Where rows are no multiple of 32 bytes, or are no multiple
    of eight, ``allow_pad`` pads each by 16 bytes. Axes in front of the last two are stages: so many such
    tiles behind one another.

    Raises:
        TileTypeError: no tile of two axes or more. TileValueError: a tile that no swizzle fits, and padding
        is not allowed.
    """
    (*stages, rows, columns), bits = _tile(buffer, "make_swizzled_layout", least=2)
    width = widest_swizzle(columns, bits)
    if (not width or rows % 8) and allow_pad:
        return _staged(strided((rows, columns), bits, (columns + 128 // bits, 1)), stages)
    return _staged(_boxed((rows, columns), bits, width, "make_swizzled_layout"), stages)


def make_full_bank_swizzled_layout(*tile: Any) -> Shared:
    """Boxes of 128-byte rows under the 128-byte swizzle, of a tile or of ``(rows, columns, bits of an
    element)``.

    Raises:
        TileValueError: rows that are no multiple of 128 bytes, or are no multiple of eight.
    """
    return _boxed(*_tile(tile, "make_full_bank_swizzled_layout"), 128, "make_full_bank_swizzled_layout")


def make_half_bank_swizzled_layout(*tile: Any) -> Shared:
    """The same with 64 bytes."""
    return _boxed(*_tile(tile, "make_half_bank_swizzled_layout"), 64, "make_half_bank_swizzled_layout")


def make_quarter_bank_swizzled_layout(*tile: Any) -> Shared:
    """The same with 32 bytes."""
    return _boxed(*_tile(tile, "make_quarter_bank_swizzled_layout"), 32, "make_quarter_bank_swizzled_layout")


def make_linear_layout(*tile: Any) -> Shared:
    """Row-major, without gaps, of a tile, of any axes, or of ``(rows, columns, bits of an element)``."""
    return strided(*_tile(tile, "make_linear_layout", axes=None))


def _boxed(shape: tuple[int, int], bits: int, width: int, what: str) -> Shared:
    try:
        return boxed(shape, bits, width)
    except TileValueError as error:
        error.message = f"{what} of {error.message}"
        raise error.at(source.current()) from None


def _staged(layout: Shared, stages: Sequence[int]) -> Shared:
    for count in reversed(stages):
        layout = layout.staged(count)
    return layout


def _axes(axes: int | None, least: int) -> str:
    return " of two axes" + (" or more" if least else "") if axes or least else ""


def _tile(given: Any, what: str, axes: int | None = 2, least: int = 0) -> tuple[Any, int]:
    """The extents of a tile and its elements' bits. ``axes``: how many it must have, or ``least``."""
    axes = None if least else axes
    items = given if isinstance(given, tuple) else (given,)
    if len(items) == 3 and all(isinstance(x, int) for x in items):
        return (items[0], items[1]), items[2]
    tile = getattr(items[0], "buffer", items[0]) if len(items) == 1 else None
    shape, dtype = getattr(tile, "shape", None), getattr(tile, "dtype", None)
    if (
        shape is None
        or str(dtype) not in BITS
        or (axes is not None and len(shape) != axes)
        or len(shape) < least
        or not all(isinstance(e, int) for e in shape)
    ):
        raise TileTypeError(
            f"{what} of {given!r}",
            loc=source.current(),
            expected=f"a tile{_axes(axes, least)}, or its rows, columns and bits",
        )
    return tuple(shape), BITS[str(dtype)]


def make_wgmma_swizzled_layout(buffer: Any, continuity: int | None = None, k_major: bool = True) -> Shared:
    """TileLang's name of `make_swizzled_layout` without padding. ``continuity``: how many columns a box has.

    Raises:
        TileTypeError, TileValueError: see there; columns that are no swizzle's width.
    """
    (*stages, rows, columns), bits = _tile(buffer, "make_wgmma_swizzled_layout", least=2)
    width = widest_swizzle(columns if continuity is None else continuity, bits)
    return _staged(_boxed((rows, columns), bits, width, "make_wgmma_swizzled_layout"), stages)


def make_gemm_fragment_8x8() -> fragment.Fragment:
    """A matrix of eight by eight elements over a warp, as ldmatrix leaves it: each thread has two
    neighbours of a row."""
    return Fragment((8, 8), lambda i, j: (i * 4 + j // 2, j % 2))


def make_gemm_fragment_8x8_transposed() -> fragment.Fragment:
    """The same of its transpose."""
    return Fragment((8, 8), lambda i, j: (j * 4 + i // 2, i % 2))


def make_fully_replicated_layout_fragment(buffer: Any, threads: int) -> fragment.Fragment:
    """A tile of which each of so many threads holds all elements.

    Raises:
        TileTypeError: no tile of constant extents.
    """
    tile = getattr(buffer, "buffer", buffer)
    shape = _shape(getattr(tile, "shape", None), "make_fully_replicated_layout_fragment")
    return fragment.row_major(shape, 1).copied(threads)


# ---- reading a function


def _shape(shape: Any, what: str) -> tuple[int, ...]:
    dims = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    if not dims or not all(isinstance(e, int) and not isinstance(e, bool) and e > 0 for e in dims):
        raise TileTypeError(
            f"{what} of the shape {shape!r}", loc=source.current(), expected="constant extents, (64, 64)"
        )
    return dims


def _computed(function: Callable[..., Any], shape: tuple[int, ...], what: str) -> list[Any]:
    """A function's results for every index, int64 arrays of ``shape``: at once where it can take arrays, else
    element by element.

    Raises:
        TileTypeError: it is no function of so many indices, or gives no integers. TileValueError: it gives a
        number below zero.
    """
    _check_arguments(function, len(shape), what)
    try:
        found = function(*np.indices(shape))
        parts = list(found) if _several(found) else [found]
        arrays = [np.asarray(p) for p in parts]
        if any(a.dtype.kind == "O" for a in arrays):
            raise TypeError("of expressions")
    except (
        TypeError,
        ValueError,
        TileError,
    ):  # a condition on an index, min(i, j), int(i): with numbers they work, or say what is wrong
        rows = [function(*(int(i) for i in at)) for at in np.ndindex(*shape)]
        rows = [tuple(map(_number, r)) if _several(r) else (_number(r),) for r in rows]
        arrays = [np.asarray(column).reshape(shape) for column in zip(*rows, strict=True)]
    for a in arrays:
        if a.dtype.kind not in "iu":
            first = a.ravel()[0].item()
            raise TileTypeError(
                f"the function of {what} gives {first!r}",
                loc=source.current(),
                expected="integers; // for a quotient",
            )
        if a.min() < 0:
            at = np.unravel_index(int(np.broadcast_to(a, shape).argmin()), shape)
            raise TileValueError(
                f"{what} puts element {_shown(at)} at {a.min()}", loc=source.current(), expected="0 or more"
            )
    return [np.broadcast_to(a, shape).astype(np.int64) for a in arrays]


def _several(found: Any) -> bool:
    """Whether a function gives a sequence of numbers, such as TVM's arrays, and not one."""
    return isinstance(found, Sequence) and not isinstance(found, str)


def _number(found: Any) -> Any:
    """A number, of an expression of numbers alone: TVM's maps of indices give such."""
    if isinstance(found, (int, np.integer)):
        return found
    from tilescale.compiler.ir.numbers import simplify
    from tilescale.compiler.tvm_compat import is_expr

    return simplify(found) if is_expr(found) else found


def _extents_by_digits(function: Callable[..., Any], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a layout with many elements: the extents of what its function gives, each a sum of functions of one
    index. That it is such a sum is checked at drawn elements, that no two share a place by the digits of each
    index.

    Raises:
        TileValueError: it is no such sum, or leaves two elements in one place.
    """
    _check_arguments(function, len(shape), "T.Layout")

    def at(index: Sequence[Any]) -> list[Any]:
        found = function(*index)
        parts = list(found) if isinstance(found, (tuple, list)) else [found]
        return [np.broadcast_to(np.asarray(p), np.shape(index[0])).astype(np.int64) for p in parts]

    lines = []  # of each axis: each part of what the function gives, for each index along it
    for axis, extent in enumerate(shape):
        zeros = np.zeros(extent, np.int64)
        lines.append(at([np.arange(extent) if k == axis else zeros for k in range(len(shape))]))
    drawn = [np.random.default_rng(0).integers(0, extent, 4096) for extent in shape]
    sums = [sum(line[k][i] for line, i in zip(lines, drawn, strict=True)) for k in range(len(lines[0]))]
    extents = tuple(int(sum(line[k].max() for line in lines)) + 1 for k in range(len(lines[0])))
    steps: list[tuple[int, int]] = []
    for line in lines:
        whole = np.zeros(len(line[0]), np.int64)
        for part, extent in zip(line, extents, strict=True):
            whole = whole * extent + part
        digits = _digits([whole])
        if digits is None:
            steps = []
            break
        steps += [(s[0], e) for _, _, e, s in digits]
    if not steps or any((a != b).any() for a, b in zip(at(drawn), sums, strict=True)):
        raise TileValueError(
            f"T.Layout of {prod(shape)} elements is no layout that the compiler can follow",
            loc=source.current(),
            expected="a sum of terms of one index each, such as i // 8 * 64 or j % 8",
        )
    reach = 0
    for step, extent in sorted(steps):
        if step <= reach:
            raise TileValueError("T.Layout puts two elements into one place", loc=source.current())
        reach += step * (extent - 1)
    return extents


def _check_arguments(function: Callable[..., Any], count: int, what: str) -> None:
    names = ", ".join("ijklmnpq"[:count]) if count <= 8 else "*at"
    try:
        inspect.signature(function).bind(*range(count))
    except ValueError:  # a builtin that does not say what it takes
        return
    except TypeError as error:
        raise TileTypeError(
            f"the function of {what} does not take {count} indices: {error}", loc=source.current(),
            expected="one argument an axis, and with replicate= one more", hint=f"lambda {names}: …",
        ) from None  # fmt: skip


def _shown(at: Sequence[Any]) -> str:
    return str(tuple(int(i) for i in at))


def _refuse_twice(shape: tuple[int, ...], values: list[Any], what: str, place: Callable[[Any], str]) -> None:
    """No two elements lie in one place."""
    at = np.stack([v.ravel() for v in values], 1)
    # Rows are compared as strings of bytes, slowly: one column is compared as the numbers that it has.
    lone = at[:, 0] if len(values) == 1 else at
    _, first, number = np.unique(lone, axis=0, return_index=True, return_inverse=True)
    again = np.flatnonzero(first[number.ravel()] != np.arange(len(at)))
    if len(again):
        b = int(again[0])
        a = int(first[number.ravel()[b]])
        raise TileValueError(
            f"{what} puts elements {_shown(np.unravel_index(a, shape))} and "
            f"{_shown(np.unravel_index(b, shape))} into {place(at[b])}",
            loc=source.current(),
            expected="a place of its own for each element",
        )


def _in_order(thread: Any, replicate: int) -> Any:
    """Slots in the row-major order of each thread's elements."""
    first = thread[..., 0] if replicate > 1 else thread
    flat = first.ravel()
    order = np.argsort(flat, kind="stable")
    begins = np.searchsorted(flat[order], flat[order])
    slots = np.empty_like(flat)
    slots[order] = np.arange(len(flat)) - begins
    return slots.reshape(first.shape)


def _digits(values: list[Any]) -> list[tuple[int, int, int, tuple[int, ...]]] | None:
    """Arrays over all indices as sums of digits: ``(axis, unit, extent, a stride for each array)``; None
    where they are none."""
    shape, found = values[0].shape, []
    if any(v.ravel()[0] for v in values):
        return None
    for axis in range(len(shape)):
        lines = [v[tuple(slice(None) if k == axis else 0 for k in range(len(shape)))] for v in values]
        unit = 1
        while unit < shape[axis]:
            rest = shape[axis] // unit
            steps = tuple(int(line[unit]) for line in lines)
            run = next(
                (
                    d
                    for d in range(2, rest)
                    if any(line[unit * d] != d * s for line, s in zip(lines, steps, strict=True))
                ),
                rest,
            )
            extent = max(d for d in range(1, run + 1) if rest % d == 0)
            if extent == 1:
                return None
            found.append((axis, unit, extent, steps))
            unit *= extent
    index = np.indices(shape)
    for k, v in enumerate(values):
        if (sum((index[a] // u % e * s[k] for a, u, e, s in found), np.zeros(shape, np.int64)) != v).any():
            return None
    return found


def shown(layout: Any) -> str:
    """A layout in a few words."""
    swizzle = f" under a swizzle of {layout.swizzle} bytes" if getattr(layout, "swizzle", 0) else ""
    over = f" over {layout.threads} threads" if isinstance(layout, fragment.Fragment) else ""
    names = "ijklmnpq"
    terms = [
        (
            "copies"
            if p.axis is None
            else f"{names[p.axis]}{f' // {p.unit}' if p.unit > 1 else ''} % {p.extent}",
            p.to,
            p.stride,
        )
        for p in layout.pieces
    ]
    return (
        f"{layout.shape}{over}{swizzle} "
        f"[{', '.join(f'{term} → {to} × {stride}' for term, to, stride in terms)}]"
    )
