"""How kernels that walk over the rows of a matrix share them among blocks, and what they are tested on: what
softmax and RMSNorm have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

import tilescale.language as T

#: numbers of a row that one thread has in registers (32 bits each; of float64 half as many)
EACH = 32
#: threads of a block for a row that fits, at most
MOST = 1024
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1}
DTYPES = tuple(BYTES)


class Cut(NamedTuple):
    """``rows`` rows to a block of ``threads``, ``width`` columns of them at a time; ``turns`` times that are
    a whole row."""

    rows: int
    threads: int
    width: int
    turns: int


def cut(columns: int, dtype: str, rows: int | None = None, units: int = 132) -> Cut:
    """Short rows: several to a block of 128 threads, each in a part of a warp or in a whole one, with sixteen
    numbers a lane, eight of four bytes or where rows are not whole words of 16 bytes. Longer ones: a block
    each, of as many threads as hold it in registers, with sixteen numbers each where they come one by one.
    Rows that no block holds are walked over in several turns. Where ``rows`` are few, one has more threads: a
    short one until there are four blocks a multiprocessor, at last a block of its own; a longer one, where
    multiprocessors would be idle, until a thread has eight to sixteen numbers."""
    each, odd = EACH // 2 if dtype == "float64" else EACH, columns * BYTES[dtype] % 16 > 0
    wanted = -(-columns // each)
    if wanted <= 32:
        if rows is not None and rows <= 4 * units and columns > 256:
            return Cut(1, 128, columns, 1)
        lanes = min(32, 1 << (-(-columns // (8 if odd or BYTES[dtype] >= 4 else 16)) - 1).bit_length())
        while rows is not None and lanes < 32 and lanes < columns and rows * lanes <= 4 * 128 * units:
            lanes *= 2
        return Cut(128 // lanes, 128, columns, 1)
    threads = max(128, 1 << (wanted - 1).bit_length())
    if threads <= MOST:
        if odd:
            threads = min(MOST, max(128, 1 << (-(-2 * columns // each) - 1).bit_length()))
        while rows is not None and rows <= units and threads < MOST and columns >= threads * 2 * 8:
            threads *= 2
        return Cut(1, threads, columns, 1)
    width = 512 * each // 2
    return Cut(1, 512, width, -(-columns // width))


# ---- rows that several blocks share


#: blocks of a cluster, at most (what every Hopper GPU takes)
CLUSTER = 8


class Share(NamedTuple):
    """``blocks`` blocks of a cluster to a row, of ``threads`` each; each has ``width`` columns of it, in
    whole words of 16 bytes."""

    blocks: int
    threads: int
    width: int


def shared(columns: int, dtype: str, rows: int, units: int) -> int:
    """How many blocks share a row in a cluster, each with its part in registers; 1: none do. Of rows of more
    than 16384 columns as many as it takes for parts of 10240, eight at most; more where multiprocessors would
    be idle and parts are no less than 4096 columns. Where there are more rows than every other multiprocessor
    could take, those alone are shared that begin anywhere; where there are more than multiprocessors, of
    16-bit ones those of 40960 columns at most: others go as fast in several turns (docs/history/rows.md).
    What is longer than eight blocks of 1024 threads hold is no such row. (Of float64 half as many
    columns.)"""
    scale = 1 if dtype == "float64" else 2
    if columns > scale * (CLUSTER * MOST * EACH // 2 - 16):
        return 1
    anywhere = columns * BYTES[dtype] % 16 > 0
    if 2 * rows > units and not anywhere or rows > units and BYTES[dtype] <= 2 and columns > 40960:
        return 1
    least = -(-columns // (scale * 5120)) if columns > scale * 8192 else 1
    blocks = 1
    while blocks < CLUSTER and (
        blocks < least or (2 * blocks * rows <= units and columns >= 2 * blocks * scale * 2048)
    ):
        blocks *= 2
    return blocks


def share(columns: int, dtype: str, blocks: int, threads: int = 0) -> Share:
    """The columns of each of ``blocks`` blocks, whole words of 16 bytes for each of its threads, of which
    there are 256 to 1024: as few as have 40 numbers each, since blocks that end early make room for
    others."""
    part = -(-columns // blocks)
    if not threads:
        threads = next((n for n in (256, 512) if part <= n * (20 if dtype == "float64" else 40)), MOST)
    turn = threads * 16 // BYTES[dtype]
    return Share(blocks, threads, -(-part // turn) * turn)


# ---- rows that begin anywhere


class Ragged(NamedTuple):
    """``threads`` of a block for a row, ``words`` of 16 bytes of it at a time; ``turns`` times that are a
    whole row, wherever it begins."""

    threads: int
    words: int
    turns: int


def ragged(columns: int, dtype: str, rows: int, units: int) -> Ragged | None:
    """How long rows are cut whose beginnings are no multiples of 16 bytes, so that words of 16 bytes move all
    the same; None for others. Where there are fewer rows than multiprocessors, a block has as much of its row
    under way as it can. Rows of up to 16384 columns are none of these: threads enough to load them number by
    number are faster."""
    each, word = EACH // 2 if dtype == "float64" else EACH, 16 // BYTES[dtype]
    if (
        columns * BYTES[dtype] % 16 == 0
        or columns <= 512 * each
        or rows * columns >= 1 << 31
        or BYTES[dtype] > 2
    ):
        return None  # numbers of four bytes come in whole lines, 32 lanes side by side
    words = -(-(columns + word - 1) // word)
    threads = max(128, 1 << (-(-words * word // each) - 1).bit_length())
    if threads <= MOST:
        return Ragged(threads, words, 1)
    threads, each = (MOST, each) if rows <= units else (MOST // 2, each // 2)
    return Ragged(threads, threads * each // word, -(-words * word // (threads * each)))


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A contiguous tensor's elements in whole words of 16 bytes, and the last ones, of which there is one at
    least."""
    word = 16 // x.element_size()
    whole = (x.numel() - 1) // word * word
    return x.view(-1)[:whole], x.view(-1)[whole:]


def flat(dtype: str) -> tuple[Any, Any]:
    """The types of what `halves` gives."""
    return T.Tensor((T.dynamic("whole", multiple_of=16 // BYTES[dtype]),), dtype), T.Tensor(
        (T.dynamic("rest"),), dtype
    )


@T.macro
def fetch(X: Any, rest: Any, x: Any, row: Any, last: Any, columns: int, skip: Any, acc: str, outside: Any):
    """x (1, words, word) = the words of a row from the ``skip``th on, ``outside`` where they reach beyond the
    row. Neighbouring rows share a word. ``last``: the row is the tensor's last one."""
    word = x.shape[2]
    end = T.alloc_shared((word,), X.dtype)  # the last elements' places decide nothing about the row's
    for i, w, e in T.Parallel(*x.shape):
        x[i, w, e] = T.cast(X[row * columns // word * word + (skip + w) * word + e], acc)
    if last:
        T.copy(rest[0:word], end)
        for i, w, e in T.Parallel(*x.shape):
            if row * columns // word + skip + w == X.shape[0] // word:
                x[i, w, e] = T.cast(end[e], acc)
    for i, w, e in T.Parallel(*x.shape):
        at = (skip + w) * word + e - row * columns % word
        x[i, w, e] = T.if_then_else(at >= 0 and at < columns, x[i, w, e], outside)


@T.macro
def leave(x: Any, Y: Any, rest: Any, row: Any, last: Any, columns: int, skip: Any, dtype: str):
    """The same the other way: whole words at once, elements of those that are shared one by one."""
    word = x.shape[2]
    end = T.alloc_shared((word,), dtype)
    for i, w, e in T.Parallel(*x.shape):
        if (skip + w) * word >= row * columns % word and (
            skip + w
        ) * word + word <= columns + row * columns % word:
            Y[row * columns // word * word + (skip + w) * word + e] = T.cast(x[i, w, e], dtype)
    for i, w, e in T.Parallel(*x.shape):
        if (skip + w) * word < row * columns % word or (
            skip + w
        ) * word + word > columns + row * columns % word:
            if (skip + w) * word + e >= row * columns % word and (
                skip + w
            ) * word + e < columns + row * columns % word:
                Y[row * columns // word * word + (skip + w) * word + e] = T.cast(x[i, w, e], dtype)
    if last:
        for i, w, e in T.Parallel(*x.shape):
            if row * columns // word + skip + w == Y.shape[0] // word:
                end[e] = T.cast(x[i, w, e], dtype)
        if (
            row * columns // word + skip <= Y.shape[0] // word
            and Y.shape[0] // word < row * columns // word + skip + x.shape[1]
        ):
            T.copy(end, rest[0:word])


def error(dtype: torch.dtype) -> float:
    """A rounding of what rows of a dtype are computed in; where that is float64 the reference has such
    roundings too."""
    return 2.0**-52 if dtype == torch.float64 else 2.0**-24


def shapes(small: bool) -> Iterator[dict[str, Any]]:
    """What is tested: every dtype, every way to cut rows, extents that are no multiples of anything, and of
    vectors."""
    if small:
        for dtype in DTYPES:
            yield {"m": 5, "n": 77, "dtype": dtype}
        yield from ({"m": m, "n": n} for m, n in ((1, 1), (33, 16), (3, 1100), (2, 4096)))
        yield {"m": 2, "n": 33000}
        yield {"m": 1, "n": 16640, "dtype": "float64"}
        # Rows that begin anywhere, whole and in turns.
        yield from ({"m": m, "n": n} for m, n in ((3, 1101), (8, 1027), (3, 33001)))
        yield from ({"m": 3, "n": 1030, "dtype": d} for d in ("float16", "float8_e4m3fn"))
        # As many as to move in words.
        yield from ({"m": 133, "n": n, "dtype": d} for n, d in ((1030, "float16"), (1099, "float8_e4m3fn")))
        # Several blocks to a row.
        yield from ({"m": m, "n": n} for m, n in ((2, 9000), (2, 9001), (2, 16411)))
        # Turns, where even eight blocks do not hold a row.
        yield from ({"m": 1, "n": n} for n in (262144, 262145))
        yield from ({"m": 1, "n": n, "dtype": d} for n, d in ((17000, "float32"), (9003, "float8_e4m3fn")))
        yield from ({"m": m, "n": 19} for m in (1, 300, 5000))  # four lanes to 32 for a row
        yield from ({"m": m, "n": 56, "dtype": "float32"} for m in (2, 1100))
        return
    for dtype in DTYPES:
        for m, n in ((333, 1000), (77, 1001), (3, 40000)):
            yield {"m": m, "n": n, "dtype": dtype}
    for dtype in ("bfloat16", "float32"):
        for m, n in (
            (1000, 64),
            (5, 8192),
            (3, 32768),
            (2, 100001),
            (37, 100003),
            (333, 1025),
            (200, 50001),
            (77, 9999),
            (2, 270000),
            (3, 270001),
            (150, 20001),
            (140, 131072),
            (33000, 19),
            (9000, 60),
            (131, 5000),
            (132, 3001),
            (133, 3001),
        ):
            yield {"m": m, "n": n, "dtype": dtype}
