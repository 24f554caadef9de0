"""C[M, N] += op(A)[M, K] · op(B)[K, N] on tiles: packed panels and a register-blocked kernel of explicit
vector FMAs.

The scheme is that of Goto and van de Geijn ("Anatomy of High-Performance Matrix Multiplication", ACM TOMS
34(3), 2008) with the outer loops left out: tiles are already in the cache. For each panel of a few vectors of
columns, B is brought into a contiguous strip [K, columns] that stays in L1; for each block of rows, the
accumulators stay in vector registers over the whole of K, one broadcast of A feeding one FMA a vector.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilescale.compiler.cpu import convert
from tilescale.compiler.cpu.codegen import host_cpu
from tilescale.compiler.cpu.copy import emit_copy, emit_fill
from tilescale.compiler.cpu.expr import fma, lit, loop, seq
from tilescale.compiler.cpu.tile import Buf, Context, Expr, Stmt, Tile, add, imm, mul
from tilescale.compiler.cpu.transpose import emit_transpose
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import TileTypeError, TileValueError

K_BLOCK = 256
"""Depth of one pass: a panel of two AVX-512 vectors of fp32 is then 32 KB."""


@dataclass(frozen=True)
class Blocking:
    """Rows of a block, and the columns of a panel as vectors: (first column, lanes)."""

    rows: int
    vectors: tuple[tuple[int, int], ...]

    @property
    def columns(self) -> int:
        return sum(lanes for _, lanes in self.vectors)


def acc_dtype(a: str, b: str, c: str) -> str:
    """What a product accumulates in: C's own integer dtype, float64 where any operand is, else float32.

    Raises:
        TileTypeError: a float product into an integer C.
    """
    floats = [d for d in (a, b, c) if convert.is_float(d)]
    if not convert.is_float(c):
        if floats or c == "bool":
            raise TileTypeError(
                f"T.gemm of {a} and {b} cannot accumulate into {c}",
                expected="an accumulator of a float dtype for float operands, of an integer dtype for "
                "integers",
                hint='T.alloc_fragment(…, "float32") or "int32"',
            )
        return convert.canonical(c)
    return "float64" if "float64" in floats else "float32"


def emit_gemm(
    cx: Context,
    a: Tile,
    b: Tile,
    c: Tile,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    clear: bool = False,
) -> Stmt:
    """C += op(A)·op(B), or C = op(A)·op(B) with ``clear``. Sums run over k in order, one FMA each, so results
    repeat exactly.

    Shapes: A is [M, K] ([K, M] with ``trans_a``), B is [K, N] ([N, K] with ``trans_b``), C is [M, N]; any
    extents ≥ 1, any strides. Operands are converted to the accumulator's dtype (`acc_dtype`); a C narrower
    than it is rounded once.

    Raises:
        TileTypeError: dtypes that do not go together.
        TileValueError: shapes that do not.
    """
    if trans_a:
        a = _transposed(a)
    if trans_b:
        b = _transposed(b)
    m, n, k = _extents(a, b, c)
    acc = acc_dtype(a.dtype, b.dtype, c.dtype)
    if c.strides[1] != 1 and c.strides[0] == 1:  # a column-major C: its transpose is B^T · A^T
        a, b, c = _transposed(b), _transposed(a), _transposed(c)
        m, n = n, m
    steps: list[Stmt] = []
    out = c
    if convert.storage_dtype(c.dtype) != acc or c.strides[1] != 1:
        # Accumulated aside: a narrow C is rounded once, after the last k.
        out = Tile(cx.scratch(m * n, acc), acc, (m, n), (n, 1))
        if not clear:
            steps.append(emit_copy(c, out))
    a, packs_a = _operand_a(cx, a, acc)
    steps += packs_a
    k_block = min(k, K_BLOCK)
    strip_of = _Panels(cx, b, acc, m, k_block)
    if k > k_block and clear:
        steps.append(emit_fill(out, lit(0, acc)))
        clear = False
    for start, count, depth in _cuts(k, k_block):

        def one_pass(p: Expr, start: int = start, depth: int = depth) -> Stmt:
            k0 = add(start, mul(_small(p), depth))
            return _pass(_slice(a, 1, k0, depth), _slice(b, 0, k0, depth), out, acc, strip_of, clear)

        steps.append(loop("kp", count, one_pass))
    if out is not c:
        steps.append(emit_copy(out, c))
    return seq(steps)


def _extents(a: Tile, b: Tile, c: Tile) -> tuple[int, int, int]:
    if not (len(a.shape) == len(b.shape) == len(c.shape) == 2):
        raise TileValueError(f"T.gemm wants tiles of two axes, got {a.shape}, {b.shape} and {c.shape}")
    (m, k), (k2, n) = a.shape, b.shape
    if k != k2 or c.shape != (m, n):
        raise TileValueError(
            f"T.gemm: op(A) is [{m}, {k}], op(B) is [{k2}, {n}], C is {list(c.shape)}",
            expected="op(A) [M, K], op(B) [K, N], C [M, N]",
            hint="transpose_A=True or transpose_B=True, where an operand is stored the other way",
        )
    return m, n, k


def _transposed(t: Tile) -> Tile:
    return replace(t, shape=(t.shape[1], t.shape[0]), strides=(t.strides[1], t.strides[0]))


def _slice(t: Tile, axis: int, start: Expr | int, extent: int) -> Tile:
    shape = tuple(extent if i == axis else e for i, e in enumerate(t.shape))
    return replace(t, shape=shape, offset=add(t.offset, mul(_small(start), t.strides[axis])))


def _small(value: Expr | int) -> Expr | int:
    """A constant expression as an int, so that it folds."""
    return int(value.value) if isinstance(value, tirx.IntImm) else value


def _cuts(extent: int, block: int) -> Iterator[tuple[int, int, int]]:
    """(start, count, size): ``count`` blocks of ``size`` from ``start``, then the rest as one block."""
    full = extent // block
    if full:
        yield 0, full, block
    if extent % block:
        yield full * block, 1, extent % block


def _rows_of(m: int, limit: int) -> int:
    """Rows of a block: as few blocks as ``limit`` allows, as equal as they can be."""
    blocks = -(-m // limit)
    return -(-m // blocks)


def _panel_vectors(m: int) -> int:
    """Vectors of columns in a panel. Two make the tallest blocks, so the fewest loads an FMA (rows broadcasts
    and 2 loads feed 2·rows FMAs); few rows need more, as eight accumulators or so hide the latency of an
    FMA."""
    return 2 if m >= 4 else 4 if m >= 2 else 8


def _blocking(m: int, n: int, acc: str) -> list[tuple[int, int, Blocking]]:
    """The panels, each as (first column, count, blocking)."""
    cpu = host_cpu()
    lanes = cpu.lanes(acc)
    registers = cpu.vector_registers
    # Registers hold rows·vectors accumulators, a vector of B for each, and the broadcasts in flight.
    per_panel = _panel_vectors(m)
    limit = max(1, (registers - per_panel - 2) // per_panel)
    panels = []
    wide = lanes * per_panel
    done = 0
    if n // wide:
        vectors = tuple((i * lanes, lanes) for i in range(per_panel))
        panels.append((0, n // wide, Blocking(_rows_of(m, limit), vectors)))
        done = n // wide * wide
    if n > done:
        rest: list[tuple[int, int]] = []
        at, width = 0, lanes
        while done + at < n:
            while width > n - done - at:
                width //= 2
            rest.append((at, width))
            at += width
        limit = max(1, (registers - len(rest) - 2) // len(rest))
        panels.append((done, 1, Blocking(_rows_of(m, limit), tuple(rest))))
    return panels


def _operand_a(cx: Context, a: Tile, acc: str) -> tuple[Tile, list[Stmt]]:
    """A in the accumulator's dtype: broadcasts read it at any strides, so only a conversion needs a copy."""
    if convert.storage_dtype(a.dtype) == acc:
        return a, []
    return _converted(cx, a, acc)


def _converted(cx: Context, t: Tile, acc: str) -> tuple[Tile, list[Stmt]]:
    """A contiguous copy in ``acc``, stored in the source's own order so that the conversion runs along
    memory."""
    if t.strides[0] == 1 and t.strides[1] != 1:
        copy, steps = _converted(cx, _transposed(t), acc)
        return _transposed(copy), steps
    out = Tile(cx.scratch(t.numel, acc), acc, t.shape, (t.shape[1], 1))
    return out, [emit_copy(t, out)]


class _Panels:
    """Brings a panel of B into the form the kernel reads: rows of contiguous columns in the accumulator's
    dtype."""

    def __init__(self, cx: Context, b: Tile, acc: str, m: int, k_block: int) -> None:
        self.acc = acc
        self.along_k = b.strides[1] != 1 and b.strides[0] == 1
        self.converts = convert.storage_dtype(b.dtype) != acc
        self.direct = b.strides[1] == 1 and not self.converts
        columns = min(b.shape[1], _panel_vectors(m) * host_cpu().lanes(acc))
        self.strip: Buf = None if self.direct else cx.scratch(k_block * columns, acc)
        self.middle: Buf = None
        if self.along_k and self.converts:
            self.middle = cx.scratch(k_block * columns, acc)

    def __call__(self, panel: Tile) -> tuple[Tile, list[Stmt]]:
        """``panel`` is [K, columns] of B; returns what the kernel reads and the statements that prepare
        it."""
        if self.direct:
            return panel, []
        k, columns = panel.shape
        strip = Tile(self.strip, self.acc, (k, columns), (columns, 1))
        if not self.along_k:
            return strip, [emit_copy(panel, strip)]
        steps = []
        stored = _transposed(panel)  # [columns, K], contiguous along K
        if self.converts:
            middle = Tile(self.middle, self.acc, (columns, k), (k, 1))
            steps.append(emit_copy(stored, middle))
            stored = middle
        return strip, [*steps, emit_transpose(stored, strip)]


def _pass(a: Tile, b: Tile, c: Tile, acc: str, strip_of: _Panels, clear: bool) -> Stmt:
    """C += A·B for one block of K: panels of columns outside, blocks of rows inside (the panel stays in
    L1)."""
    m, n = a.shape[0], b.shape[1]
    panels = _blocking(m, n, acc)
    steps = []
    for first, count, blocking in panels:

        def panel(j: Expr, first: int = first, blocking: Blocking = blocking) -> Stmt:
            column = add(first, mul(_small(j), blocking.columns))
            strip, packs = strip_of(_slice(b, 1, column, blocking.columns))
            c_panel = _slice(c, 1, column, blocking.columns)
            body = list(packs)
            for top, blocks, rows in _cuts(m, blocking.rows):

                def block(i: Expr, top: int = top, rows: int = rows) -> Stmt:
                    row = add(top, mul(_small(i), rows))
                    return _micro(
                        _slice(a, 0, row, rows),
                        strip,
                        _slice(c_panel, 0, row, rows),
                        blocking.vectors,
                        acc,
                        clear,
                    )

                body.append(loop("ib", blocks, block))
            return seq(body)

        steps.append(loop("jp", count, panel))
    return seq(steps)


def _micro(a: Tile, b: Tile, c: Tile, vectors: tuple[tuple[int, int], ...], acc: str, clear: bool) -> Stmt:
    """The kernel: rows × vectors accumulators over all of K. LLVM keeps the local array in registers (its
    indices are constant)."""
    rows, k = a.shape
    columns = c.shape[1]
    regs = tirx.decl_buffer((rows * columns,), acc, "acc", layout=None, scope="local", data_alignment=64)
    steps: list[Stmt] = [tirx.AllocBuffer(regs)]
    places = [(i, at, lanes) for i in range(rows) for at, lanes in vectors]
    for i, at, lanes in places:
        zero = lit(0, acc) if lanes == 1 else tirx.Broadcast(lit(0, acc), imm(lanes))
        start = zero if clear else tirx.BufferLoad(c.buf, [_ramp(c.index(i, at), lanes)])
        steps.append(tirx.BufferStore(regs, start, [_ramp(imm(i * columns + at), lanes)]))
    steps.append(loop("k", k, lambda kk: _rank_one(a, b, regs, kk, vectors, acc)))
    for i, at, lanes in places:
        total = tirx.BufferLoad(regs, [_ramp(imm(i * columns + at), lanes)])
        steps.append(tirx.BufferStore(c.buf, total, [_ramp(c.index(i, at), lanes)]))
    return seq(steps)


def _vec(acc: str, lanes: int) -> str:
    return acc if lanes == 1 else f"{acc}x{lanes}"


def _ramp(base: Expr, lanes: int) -> Expr:
    return base if lanes == 1 else tirx.Ramp(base, imm(1, str(base.ty)), imm(lanes))


def _rank_one(a: Tile, b: Tile, regs: Buf, k: Expr, vectors: tuple[tuple[int, int], ...], acc: str) -> Stmt:
    """One k: the outer product of a column of A and a row of B."""
    rows, columns = a.shape[0], sum(lanes for _, lanes in vectors)
    k = _small(k)
    steps: list[Stmt] = []
    row = []
    for at, lanes in vectors:
        var = tirx.Var("b", _vec(acc, lanes))
        steps.append(tirx.Bind(var, tirx.BufferLoad(b.buf, [_ramp(b.index(k, at), lanes)])))
        row.append(var)
    widths = {lanes for _, lanes in vectors}
    for i in range(rows):
        scalar = tirx.Var("a", acc)
        steps.append(tirx.Bind(scalar, tirx.BufferLoad(a.buf, [a.index(i, k)])))
        splat = {1: scalar}
        for lanes in widths - {1}:
            splat[lanes] = tirx.Var("av", _vec(acc, lanes))
            steps.append(tirx.Bind(splat[lanes], tirx.Broadcast(scalar, imm(lanes))))
        for (at, lanes), bv in zip(vectors, row, strict=True):
            place = [_ramp(imm(i * columns + at), lanes)]
            old = tirx.BufferLoad(regs, place)
            product = fma(splat[lanes], bv, old) if acc.startswith("float") else old + splat[lanes] * bv
            steps.append(tirx.BufferStore(regs, product, place))
    return seq(steps)
