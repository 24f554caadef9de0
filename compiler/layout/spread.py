"""Fragments that no instruction asks for: how a tile is spread over threads where only memory and registers
have a say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from tilescale.compiler.layout.fragment import Fragment
from tilescale.compiler.layout.pieces import Piece
from tilescale.errors import InternalError

#: bytes of global memory that are fetched together, and of a line of the cache
SECTOR, LINE = 32, 128


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def replicated(shape: Sequence[int], threads: int) -> Fragment:
    """Every thread holds the whole tile."""
    pieces, step = [], 1
    for axis in range(len(shape) - 1, -1, -1):
        pieces.append(Piece(axis, 1, shape[axis], "slot", step))
        step *= shape[axis]
    return Fragment(tuple(shape), (*pieces, Piece(None, 0, threads, "thread", 1)), threads)


def spread(shape: Sequence[int], threads: int, shares: Sequence[int], vector: int, along: int) -> Fragment:
    """A tile cut among ``prod(shares)`` threads, ``shares[k]`` of them along axis ``k``, the axis ``along``
    varying fastest, with ``vector`` neighbours along it in each thread. Extents are rounded up to whole
    shares; the other threads hold copies."""
    order = [along, *(k for k in range(len(shape) - 1, -1, -1) if k != along)]
    whole, pieces, thread, slot = list(shape), [], 1, 1
    if vector > 1:
        pieces.append(Piece(along, 1, vector, "slot", 1))
        slot = vector
    for axis in order:
        unit = vector if axis == along else 1
        if shares[axis] > 1:
            pieces.append(Piece(axis, unit, shares[axis], "thread", thread))
        rest = ceil_div(shape[axis], unit * shares[axis])
        if rest > 1:
            pieces.append(Piece(axis, unit * shares[axis], rest, "slot", slot))
        whole[axis] = unit * shares[axis] * rest
        thread *= shares[axis]
        slot *= rest
    if threads // thread > 1:
        pieces.append(Piece(None, 0, threads // thread, "thread", thread))
    return Fragment(tuple(whole), tuple(pieces), threads)


def candidates(
    shape: Sequence[int],
    threads: int,
    bits: int,
    along: int,
    widest: int,
    grains: Mapping[int, int] | None = None,
) -> Iterator[tuple[Fragment, int]]:
    """Ways to spread a tile, each with its vector's length. ``widest``: the most neighbours that one access
    of memory may take, whose elements may be smaller than the tile's. ``grains``: how many neighbours along
    an axis may lie in several threads, where all others are one thread's."""
    most = {} if grains is None else grains
    vectors = [v for v in (16, 8, 4, 2, 1) if v <= widest]
    others = [k for k in range(len(shape) - 1, -1, -1) if k != along]
    for vector in vectors:
        cells = ceil_div(shape[along], vector)
        for first in divisors(threads):
            if first > 1 and first >= 2 * cells:
                continue
            if first > 1 and along in most and most[along] % (vector * first):
                continue
            shares, left = [1] * len(shape), threads // first
            shares[along] = first
            for axis in others:
                shares[axis] = max(
                    d
                    for d in divisors(left)
                    if d < 2 * shape[axis]
                    and _waste(shape[axis], d) <= 1.25
                    and (d == 1 or most.get(axis, d) % d == 0)
                )
                left //= shares[axis]
            yield spread(shape, threads, shares, vector, along), vector


def _waste(extent: int, share: int) -> float:
    return ceil_div(extent, share) * share / extent


def cost(
    fragment: Fragment, vector: int, bits: int, along: int, reduced: Sequence[int] = (), wave: int = 0
) -> float:
    """Registers, accesses to memory and the bytes that they waste, and exchanges between waves (of so many
    threads) for the axes that are reduced."""
    registers = ceil_div(fragment.slots * bits, 32)
    sweeps = fragment.slots / vector
    run = vector * bits / 8 * prod(p.extent for p in fragment.pieces if p.axis == along and p.to == "thread")
    scattered = sweeps * (max(0.0, SECTOR / run - 1) + 0.1 * max(0.0, LINE / run - 1))
    exchanges = sum(
        8.0
        for axis in reduced
        for p in fragment.pieces
        if p.axis == axis and p.to == "thread" and p.stride * p.extent > wave
    )
    shuffles = sum(0.5 * len(fragment.across(axis)) for axis in reduced)
    return registers + sweeps + scattered + exchanges + shuffles


def best(
    shape: Sequence[int],
    threads: int,
    bits: int,
    along: int = -1,
    widest: int = 16,
    reduced: Sequence[int] = (),
    wave: int = 0,
    grains: Mapping[int, int] | None = None,
) -> Fragment:
    """The cheapest way to spread a tile. ``grains``: see `candidates`. ``wave``: threads that give each
    other values by shuffles, which only what is ``reduced`` asks for."""
    if not shape:
        return replicated(shape, threads)
    along %= len(shape)
    found: Fragment | None = None
    least = 0.0
    for made, vector in candidates(shape, threads, bits, along, widest, grains):
        price = cost(made, vector, bits, along, reduced, wave)
        if found is None or price < least:
            found, least = made, price
    if found is None:
        raise InternalError(f"no way to spread {tuple(shape)} over {threads} threads")
    return found
