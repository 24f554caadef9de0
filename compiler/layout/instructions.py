"""The fragments that instructions demand. Sources: PTX ISA 9.0, "Matrix Fragments for mma.m16n8k*" and
"Register Fragments for wgmma.mma_async.m64nNk*"; ``g`` = lane / 4 and ``t`` = lane % 4 there."""

from __future__ import annotations

from tilescale.compiler.ir.scales import WARP
from tilescale.compiler.layout.fragment import Fragment
from tilescale.compiler.layout.pieces import Piece
from tilescale.errors import TileValueError


def mma_accumulator() -> Fragment:
    """C and D of mma.m16n8k*, 32-bit or f16: rows g and g + 8, columns 2t and 2t + 1."""
    rows = Piece(0, 1, 8, "thread", 4), Piece(0, 8, 2, "slot", 2)
    columns = Piece(1, 1, 2, "slot", 1), Piece(1, 2, 4, "thread", 1)
    return Fragment((16, 8), (*rows, *columns), WARP)


def mma_a(bits: int) -> Fragment:
    """A of mma.m16n8k(256 / bits): each register holds ``32 / bits`` neighbours of a row; registers run over
    the two halves of the rows first, then over the two halves of k."""
    each = _each(bits)
    rows = Piece(0, 1, 8, "thread", 4), Piece(0, 8, 2, "slot", each)
    k = Piece(1, 1, each, "slot", 1), Piece(1, each, 4, "thread", 1), Piece(1, 4 * each, 2, "slot", 2 * each)
    return Fragment((16, 8 * each), (*rows, *k), WARP)


def mma_b(bits: int) -> Fragment:
    """B (k × 8) of mma.m16n8k(256 / bits): column g, a register's neighbours along k."""
    each = _each(bits)
    k = Piece(0, 1, each, "slot", 1), Piece(0, each, 4, "thread", 1), Piece(0, 4 * each, 2, "slot", each)
    return Fragment((8 * each, 8), (*k, Piece(1, 1, 8, "thread", 4)), WARP)


def _each(bits: int) -> int:
    if bits not in (8, 16, 32):
        raise TileValueError(f"an operand of mma with elements of {bits} bits", expected="8, 16 or 32")
    return 32 // bits


def wgmma_accumulator(n: int) -> Fragment:
    """D of wgmma.m64nNk*: four warps below one another, each with mma's accumulators side by side.

    Raises:
        TileValueError: n is no multiple of 8 between 8 and 256.
    """
    if n % 8 or not 8 <= n <= 256:
        raise TileValueError(f"wgmma with n = {n}", expected="a multiple of 8, at most 256")
    return mma_accumulator().repeated(1, n // 8).repeated(0, 4, "thread")


def wgmma_a(bits: int) -> Fragment:
    """A of wgmma.m64nNk(256 / bits) from registers: four warps below one another, each with mma's operand."""
    return mma_a(bits).repeated(0, 4, "thread")


def accumulator(m: int, n: int, warpgroups: tuple[int, int]) -> Fragment:
    """The accumulator of a block's m × n product on ``warpgroups`` (along m, along n): every warpgroup owns a
    contiguous part, in which wgmma's 64 rows repeat.

    Raises:
        TileValueError: the parts are no multiples of 64 rows, or not of a width that wgmma has.
    """
    down, across = warpgroups
    if m % (64 * down) or n % across:
        raise TileValueError(
            f"a product of {m} × {n} on {down} × {across} warpgroups",
            expected="64·k rows each, equal columns",
        )
    own = wgmma_accumulator(n // across).repeated(0, m // (64 * down))
    return own.repeated(0, down, "thread").repeated(1, across, "thread")


def wgmma_operand(m: int, k: int, warpgroups: tuple[int, int], bits: int = 16) -> Fragment:
    """A of such a product from registers: every warpgroup of a row of them has the whole depth of its rows.
    For 16-bit elements a thread's slots are those of an accumulator of the same shape, so that one becomes
    the other without a shuffle.

    Raises:
        TileValueError: the parts are no multiples of 64 rows, or the depth none of 256 bits.
    """
    (down, across), each = warpgroups, 256 // bits
    if m % (64 * down) or k % each:
        raise TileValueError(
            f"an operand of {m} × {k} on {down} × {across} warpgroups",
            expected=f"64·i rows each, {each}·j columns",
        )
    own = wgmma_a(bits).repeated(1, k // each).repeated(0, m // (64 * down))
    return own.repeated(0, down, "thread").copied(across)
