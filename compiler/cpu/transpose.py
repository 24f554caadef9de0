"""dst[j, i] = src[i, j] by shuffles in registers."""

from __future__ import annotations

from tilescale.compiler.cpu.codegen import host_cpu
from tilescale.compiler.cpu.expr import loop, seq
from tilescale.compiler.cpu.tile import Expr, Stmt, Tile, add, imm, mul
from tilescale.compiler.tvm_compat import tirx


def emit_transpose(src: Tile, dst: Tile) -> Stmt:
    """src is [R, C], dst is [C, R], one native dtype, both contiguous along their last axis; any extents.

    Full squares of one vector a side go through registers: log2(lanes) rounds in which vectors at distance d
    exchange the lanes whose index has, or lacks, bit d (Eklundh, "A Fast Computer Method for Matrix
    Transposing", IEEE Trans. Computers, 1972). The ragged edges go element by element.
    """
    rows, columns = src.shape
    lanes = host_cpu().lanes(src.dtype)
    full_r, full_c = rows // lanes * lanes, columns // lanes * lanes
    steps = []
    if full_r and full_c:

        def square(r: Expr, c: Expr) -> Stmt:
            return _square(src, dst, mul(_fold(r), lanes), mul(_fold(c), lanes), lanes)

        steps.append(
            loop("tr", full_r // lanes, lambda r: loop("tc", full_c // lanes, lambda c: square(r, c)))
        )
    if full_c < columns:
        steps.append(_scalar(src, dst, (0, rows), (full_c, columns)))
    if full_r < rows and full_c:
        steps.append(_scalar(src, dst, (full_r, rows), (0, full_c)))
    return seq(steps)


def _fold(value: Expr) -> Expr | int:
    return int(value.value) if isinstance(value, tirx.IntImm) else value


def _square(src: Tile, dst: Tile, r: Expr | int, c: Expr | int, lanes: int) -> Stmt:
    dtype = f"{src.dtype}x{lanes}"
    steps: list[Stmt] = []

    def bound(value: Expr) -> Expr:
        var = tirx.Var("t", dtype)
        steps.append(tirx.Bind(var, value))
        return var

    def ramp(base: Expr) -> Expr:
        return tirx.Ramp(base, imm(1, str(base.ty)), imm(lanes))

    v = [bound(tirx.BufferLoad(src.buf, [ramp(src.index(add(r, i), c))])) for i in range(lanes)]
    d = 1
    while d < lanes:
        low = [imm(i if not i & d else lanes + i - d) for i in range(lanes)]
        high = [imm(i + d if not i & d else lanes + i) for i in range(lanes)]
        for i in range(lanes):
            if not i & d:
                pair = [v[i], v[i + d]]
                v[i], v[i + d] = bound(tirx.Shuffle(pair, low)), bound(tirx.Shuffle(pair, high))
        d *= 2
    steps += [tirx.BufferStore(dst.buf, v[j], [ramp(dst.index(add(c, j), r))]) for j in range(lanes)]
    return seq(steps)


def _scalar(src: Tile, dst: Tile, rows: tuple[int, int], columns: tuple[int, int]) -> Stmt:
    def element(i: Expr, j: Expr) -> Stmt:
        i, j = add(_fold(i), rows[0]), add(_fold(j), columns[0])
        return tirx.BufferStore(dst.buf, tirx.BufferLoad(src.buf, [src.index(i, j)]), [dst.index(j, i)])

    return loop(
        "tj", columns[1] - columns[0], lambda j: loop("ti", rows[1] - rows[0], lambda i: element(i, j))
    )
