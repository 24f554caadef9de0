"""Products by hand, by TileLang's names: what each thread of a block loads from shared tiles into its own
registers, multiplies with the others of its warp (T.mma_sync), and writes back.

A block's product has block_row_warps × block_col_warps warps, each of which has warp_row_tiles rows and
warp_col_tiles columns of it, in squares of 16 × 16 (16 × 8 where the columns are no multiple of 16). Where an
operand's elements lie among the lanes is said in layout/mma_layout.py.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import tilescale.language as T
from tilescale.cuda.intrinsics.layout.mma_layout import (
    _element_a,
    _element_b,
    _row_a,
    _row_b,
    mma_store_32x8_to_shared_16x16_layout,
)
from tilescale.errors import TileTypeError, TileValueError
from tilescale.language.dtypes import canonical


class TransformKind(IntEnum):
    """How an operand lies in shared memory. NonTransform: as rows. InterWarpTransform: as a grid of the
    instruction's tiles, (rows // 16, k // micro_size_k, 16, micro_size_k). IntraWarpTransform: in each of
    them the rows of 16 bytes that ldmatrix takes, in the order of the lanes that name them.
    LDMatrixTransform: in each of them every lane's registers."""

    NonTransform = 0
    InterWarpTransform = 1
    IntraWarpTransform = 2
    LDMatrixTransform = 3


@T.macro
def _load(registers: Any, value: Callable[[Any, Any], Any], tiles: int, each: int) -> None:
    for i in T.unroll(tiles):
        for s in T.unroll(each):
            registers[i * each + s] = value(i, s)


@T.macro
def _load_rows(registers: Any, row: Callable[[Any], Any], tiles: int, each: int, transposed: bool) -> None:
    for i in T.unroll(tiles):
        T.ldmatrix(row(i), registers[i * each], transposed)


@T.macro
def _multiply(emitter: Any, A: Any, B: Any, C: Any) -> None:
    for i in T.unroll(emitter.warp_rows):
        for j in T.unroll(emitter.warp_cols):
            emitter._atom(A, B, C, i, j)


@T.macro
def _store(emitter: Any, registers: Any, store: Callable[..., None], lane: Any, rounds: Any) -> None:
    each = emitter.local_size_out
    for i in rounds(emitter.warp_rows):
        for j in rounds(emitter.warp_cols):
            for s in rounds(each):
                row, column = mma_store_32x8_to_shared_16x16_layout(lane, s)
                store(i, j, row, column, registers[(i * emitter.warp_cols + j) * each + s])


@T.macro
def _halves(packed: Any, low: Any, high: Any, count: int) -> None:
    """The signed numbers of 4 bits in each byte, as bytes."""
    for s in T.unroll(count):
        byte = T.cast(packed[s], "int32")
        low[s] = T.cast(((byte & 15) ^ 8) - 8, "int8")
        high[s] = T.cast(byte >> 4, "int8")


@T.macro
def _multiply_halves(emitter: Any, A: Any, B: Any, C: Any, of_a: int, of_b: int) -> None:
    a_low, a_high = T.alloc_local((of_a,), "int8"), T.alloc_local((of_a,), "int8")
    b_low, b_high = T.alloc_local((of_b,), "int8"), T.alloc_local((of_b,), "int8")
    _halves(A, a_low, a_high, of_a)
    _halves(B, b_low, b_high, of_b)
    _multiply(emitter, a_low, b_low, C)
    _multiply(emitter, a_high, b_high, C)


class TensorCoreIntrinEmitter:
    """The code of each thread of a block's product: ``ldmatrix_a``, ``ldmatrix_b``, ``mma``, ``stmatrix``,
    called in a kernel at the scale of the block.

    Args:
        a_dtype, b_dtype, accum_dtype: float16 into float32 or float16, bfloat16 into float32, 8-bit integers
            into int32.
        a_transposed: A lies as (k, rows). b_transposed: B lies as (columns, k).
        chunk: the depth of a shared tile. reduce_k: how many groups of warps share the depth; ``rk`` of the
            methods says which one a thread is in. num_elems_per_byte: numbers in an element of B's registers.
        is_m_first: whether neighbouring warps lie beside one another, and not below.
        thread_var: the thread's index; the kernel's own without it.

    Raises:
        TileTypeError: dtypes that no instruction of T.mma_sync has. TileValueError: tiles that are no
            multiples of 16 × 8, a chunk that is none of the instruction's depth.
    """

    M_DIM = 16
    WARP_SIZE = 32

    def __init__(
        self,
        a_dtype: Any = "float16",
        b_dtype: Any = "float16",
        accum_dtype: Any = "float16",
        a_transposed: bool = False,
        b_transposed: bool = False,
        block_row_warps: int = 2,
        block_col_warps: int = 2,
        warp_row_tiles: int = 16,
        warp_col_tiles: int = 8,
        chunk: int = 16,
        reduce_k: int = 1,
        num_elems_per_byte: int = 1,
        is_m_first: bool | None = False,
        thread_var: Any = None,
    ):
        from tilescale.compiler.ops.mma_sync import has_product

        name = type(self).__name__
        self.a_dtype, self.b_dtype, self.accum_dtype = map(canonical, (a_dtype, b_dtype, accum_dtype))
        if not has_product(str(self.a_dtype), str(self.b_dtype), str(self.accum_dtype)):
            raise TileTypeError(
                f"{name} of {self.a_dtype} by {self.b_dtype} into {self.accum_dtype}",
                expected="float16 into float32 or float16, bfloat16 into float32, 8-bit integers into int32",
                hint="T.gemm of tiles in shared memory or fragments",
            )
        self.a_transposed, self.b_transposed = a_transposed, b_transposed
        self.block_row_warps, self.block_col_warps = block_row_warps, block_col_warps
        self.warp_row_tiles, self.warp_col_tiles = warp_row_tiles, warp_col_tiles
        self.chunk, self.reduce_k, self.num_elems_per_byte = chunk, reduce_k, num_elems_per_byte
        self.is_m_first, self.thread_var = bool(is_m_first), thread_var
        self.k_dim = self.micro_size_k = 256 // canonical(a_dtype).bits
        if warp_row_tiles < 16 or warp_row_tiles % 16 or warp_col_tiles < 8 or warp_col_tiles % 8:
            raise TileValueError(
                f"{name} of {warp_row_tiles} × {warp_col_tiles} for each warp",
                expected="warp_row_tiles a multiple of 16, warp_col_tiles one of 8",
            )
        if chunk < self.k_dim or chunk % self.k_dim:
            raise TileValueError(
                f"{name} of a chunk of {chunk} {self.a_dtype}", expected=f"a multiple of {self.k_dim}"
            )
        self.n_dim = self.micro_size_y = 16 if warp_col_tiles % 16 == 0 else 8
        self.micro_size_x = self.M_DIM
        self.warp_rows, self.warp_cols = warp_row_tiles // 16, warp_col_tiles // self.n_dim
        self.local_size_a = 16 * self.k_dim // self.WARP_SIZE
        self.local_size_b = self.n_dim * self.k_dim // self.WARP_SIZE
        self.local_size_out = 16 * self.n_dim // self.WARP_SIZE
        self.threads = self.WARP_SIZE * block_row_warps * block_col_warps * reduce_k
        #: numbers of an operand in a register
        self.each = 32 // canonical(a_dtype).bits

    @property
    def mma_num_inst_m(self) -> int:
        """Tiles of a warp below one another."""
        return self.warp_rows

    @property
    def mma_num_inst_n(self) -> int:
        """Tiles of a warp beside one another."""
        return self.warp_cols

    def get_thread_binding(self) -> Any:
        """The thread's index in its group of warps."""
        return T.get_thread_binding() if self.thread_var is None else self.thread_var

    def extract_thread_binding(self, thread_id: Any, is_m_first: bool | None = None) -> tuple[Any, Any, Any]:
        """The thread's lane, and its warp's place along the columns and along the rows."""
        warp, rows, columns = thread_id // self.WARP_SIZE, self.block_row_warps, self.block_col_warps
        if self.is_m_first if is_m_first is None else is_m_first:
            warp_n, warp_m = warp % columns, warp // columns % rows
        else:
            warp_n, warp_m = warp // rows % columns, warp % rows
        return thread_id % self.WARP_SIZE, warp_n, warp_m

    def ldmatrix_a(self, A_local_buf: Any, A_shared_buf: Any, ki: Any, rk: Any = 0) -> None:
        """The thread's numbers of A, of the ``ki``-th step of ``micro_size_k`` along the chunk.

        Args:
            A_local_buf: T.alloc_local of warp_rows · local_size_a. A_shared_buf: a tile, or an element at
                which it begins.
        """
        lane, _, warp_m = self.extract_thread_binding(self.get_thread_binding())
        tile, depth = _Tile(A_shared_buf, "A"), rk * self.chunk + ki * self.micro_size_k
        turned, first = self.a_transposed, warp_m * self.warp_row_tiles
        if tile.in_rows(turned):
            named = (_row_b if turned else _row_a)(self.each)(lane, 0)

            def row(i: Any) -> Any:
                return tile.at(first + i * 16, depth, turned, named)

            _load_rows(A_local_buf, row, self.warp_rows, self.local_size_a, turned)
            return

        def value(i: Any, s: Any) -> Any:
            row, k = _element_a(self.each)(lane, s)
            return tile.at(first + i * 16 + row, depth + k, turned)

        _load(A_local_buf, value, self.warp_rows, self.local_size_a)

    def ldmatrix_b(self, B_local_buf: Any, B_shared_buf: Any, ki: Any, rk: Any = 0) -> None:
        """The thread's numbers of B. As `ldmatrix_a`, of warp_cols · local_size_b."""
        lane, warp_n, _ = self.extract_thread_binding(self.get_thread_binding())
        tile, depth = _Tile(B_shared_buf, "B"), rk * self.chunk + ki * self.micro_size_k
        turned, first = not self.b_transposed, warp_n * self.warp_col_tiles
        if self.n_dim == 16 and tile.in_rows(turned):
            named = (_row_a if turned else _row_b)(self.each)(lane, 0)

            def row(j: Any) -> Any:
                return tile.at(first + j * 16, depth, turned, named)

            _load_rows(B_local_buf, row, self.warp_cols, self.local_size_b, turned)
            return

        def value(j: Any, s: Any) -> Any:
            column, k = _element_b(self.each)(lane, s)
            return tile.at(first + j * self.micro_size_y + column, depth + k, turned)

        _load(B_local_buf, value, self.warp_cols, self.local_size_b)

    def mma(self, A_local_buf: Any, B_local_buf: Any, C_local_buf: Any, k_inner: Any = 0) -> None:
        """C += A · B of the warp's tiles.

        Args:
            C_local_buf: T.alloc_local of warp_rows · warp_cols · local_size_out. k_inner: TileLang's, of
                registers that hold several steps along k; those of T.alloc_local hold one.
        """
        _multiply(self, A_local_buf, B_local_buf, C_local_buf)

    def mma_atom(
        self, A_local_buf: Any, B_local_buf: Any, C_local_buf: Any, inst_m_idx: Any, inst_n_idx: Any,
        k_inner: Any = 0,
    ) -> None:  # fmt: skip
        """The same of one tile of the warp."""
        self._atom(A_local_buf, B_local_buf, C_local_buf, inst_m_idx, inst_n_idx)

    def _atom(self, A: Any, B: Any, C: Any, i: Any, j: Any) -> None:
        a, b = i * self.local_size_a, j * self.local_size_b
        c = (i * self.warp_cols + j) * self.local_size_out
        for half in range(self.n_dim // 8):  # of 8 columns each
            T.mma_sync(A[a], B[b + half * (2 * self.each)], C[c + half * 4])

    def stmatrix(self, C_local_buf: Any, C_buf: Any, pid_m: Any = None, pid_n: Any = None) -> None:
        """The thread's sums into a tile of (rows, columns), or of (rows // 16, columns // micro_size_y, 16,
        micro_size_y); with ``pid_m`` and ``pid_n`` into the block's place of a tensor.

        Raises:
            TileValueError: C_buf has neither two axes nor four.
        """
        from tilescale.compiler.ops.loops import unroll_apart

        axes = len(C_buf.shape)
        if axes not in (2, 4):
            raise TileValueError(f"stmatrix into {axes} axes", expected="(rows, columns), or a grid of tiles")
        lane, warp_n, warp_m = self.extract_thread_binding(self.get_thread_binding())
        first_m, first_n = warp_m * self.warp_rows, warp_n * self.warp_cols
        if pid_m is not None and pid_n is not None:
            first_m = first_m + pid_m * self.block_row_warps * self.warp_rows
            first_n = first_n + pid_n * self.block_col_warps * self.warp_cols

        def store(i: Any, j: Any, row: Any, column: Any, value: Any) -> None:
            if axes == 2:
                C_buf[(first_m + i) * 16 + row, (first_n + j) * self.n_dim + column] = value
            else:
                C_buf[first_m + i, first_n + j, row, column] = value

        _store(self, C_local_buf, store, lane, unroll_apart)


class _Tile:
    """An operand in shared memory, which may begin at an element."""

    def __init__(self, value: Any, what: str):
        from tilescale.compiler.ops.base import region

        of = region(value, f"{what} of a product by hand")
        self.buffer, self.mins = of.buffer, list(of.mins)

    def in_rows(self, turned: bool) -> bool:
        """Whether T.ldmatrix takes it: rows of whole chunks of 16 bytes, and 16-bit numbers where they run
        across k."""
        bits = canonical(self.buffer.dtype).bits
        first = self.mins[-1]
        known = first if isinstance(first, int) else getattr(first, "value", None)
        chunk = 128 // bits
        aligned = known is not None and int(known) % chunk == 0
        return bits in ((16,) if turned else (8, 16)) and aligned and int(self.buffer.shape[-1]) % chunk == 0

    def at(self, row: Any, k: Any, turned: bool, further: tuple[Any, Any] = (0, 0)) -> Any:
        """An element of its last two axes, rows along k; ``turned``: they run along rows. further: places
        behind it, as the axes lie."""
        *others, first, second = self.mins
        i, j = (k, row) if turned else (row, k)
        index = (*others, first + i + further[0], second + j + further[1])
        return self.buffer[index]

    def in_grid(self, i: Any, j: Any, row: Any, column: Any) -> Any:
        """An element of a tile of a grid."""
        index = (m + x for m, x in zip(self.mins, (i, j, row, column), strict=True))
        return self.buffer[tuple(index)]


class TensorCoreIntrinEmitterWithLadderTransform(TensorCoreIntrinEmitter):
    """The same with operands that lie as the instructions take them (`TransformKind`).

    Args:
        transform_kind_a, transform_kind_b: how A and B lie. A grid of tiles has four axes, the last one of
            micro_size_k numbers; B under LDMatrixTransform may be packed, ``num_elems_per_byte`` numbers in
            an element, and is loaded as it is.

    Raises:
        TileValueError: no kind of 0 to 3; a transposed operand as a grid; packed numbers under another kind.
    """

    def __init__(
        self, *args: Any, transform_kind_a: int = 0, transform_kind_b: int = 0, **words: Any
    ):  # fmt: skip
        super().__init__(*args, **words)
        kinds = (transform_kind_a, transform_kind_b)
        if not all(k in tuple(TransformKind) for k in kinds):
            raise TileValueError(f"transform kinds {kinds}", expected="0, 1, 2 or 3: a TransformKind")
        self.transform_kind_a, self.transform_kind_b = map(TransformKind, kinds)
        turned = self.transform_kind_a and self.a_transposed, self.transform_kind_b and not self.b_transposed
        if any(turned):
            raise TileValueError(
                f"a grid of tiles of {'A' if turned[0] else 'B'} whose rows do not run along k",
                expected="a_transposed=False and b_transposed=True",
            )
        if self.num_elems_per_byte != 1 and self.transform_kind_b != TransformKind.LDMatrixTransform:
            raise TileValueError(
                f"B of {self.num_elems_per_byte} numbers a byte as {self.transform_kind_b.name}",
                expected="transform_kind_b=TransformKind.LDMatrixTransform",
            )

    def ldmatrix_a(self, A_local_buf: Any, A_shared_buf: Any, ki: Any, rk: Any = 0) -> None:
        """As `TensorCoreIntrinEmitter.ldmatrix_a`."""
        if self.transform_kind_a == TransformKind.NonTransform:
            super().ldmatrix_a(A_local_buf, A_shared_buf, ki, rk)
            return
        lane, _, warp_m = self.extract_thread_binding(self.get_thread_binding())
        tile, kind = _Tile(A_shared_buf, "A"), self.transform_kind_a
        inside = _inside(kind, _element_a(self.each), lane, self.each, self.local_size_a, self.micro_size_k)
        deep = rk * (self.chunk // self.micro_size_k) + ki
        _load(
            A_local_buf,
            lambda i, s: tile.in_grid(warp_m * self.warp_rows + i, deep, *inside(s)),
            self.warp_rows,
            self.local_size_a,
        )

    def ldmatrix_b(self, B_local_buf: Any, B_shared_buf: Any, ki: Any, rk: Any = 0) -> None:
        """As `TensorCoreIntrinEmitter.ldmatrix_b`."""
        if self.transform_kind_b == TransformKind.NonTransform:
            super().ldmatrix_b(B_local_buf, B_shared_buf, ki, rk)
            return
        lane, warp_n, _ = self.extract_thread_binding(self.get_thread_binding())
        tile, kind = _Tile(B_shared_buf, "B"), self.transform_kind_b
        held, wide = (
            self.local_size_b // self.num_elems_per_byte,
            self.micro_size_k // self.num_elems_per_byte,
        )
        inside = _inside(kind, _element_b(self.each), lane, self.each, held, wide)
        deep = rk * (self.chunk // self.micro_size_k) + ki
        _load(
            B_local_buf,
            lambda j, s: tile.in_grid(warp_n * self.warp_cols + j, deep, *inside(s)),
            self.warp_cols,
            held,
        )


def _inside(
    kind: TransformKind, element: Callable[[Any, Any], Any], lane: Any, each: int, held: int, wide: int
) -> Callable[[Any], Any]:
    """Row and column in a tile of a grid, of the number in a lane's slot. held: slots of a lane; wide: of a
    row of the tile."""
    if kind == TransformKind.InterWarpTransform:
        return lambda s: element(lane, s)

    def place(s: Any) -> tuple[Any, Any]:
        if kind == TransformKind.LDMatrixTransform:
            at = lane * held + s
        else:  # register s // each is of matrix s // each, whose row lane // 4 a lane of that number names
            named = s // each * 8 + lane // 4
            at = named * (4 * each) + lane % 4 * each + s % each
        return at // wide, at % wide

    return place


class INT4TensorCoreIntrinEmitter(TensorCoreIntrinEmitter):
    """The same of signed numbers of 4 bits, two in each int8: of the lower four bits of A's bytes with those
    of B's, and of the upper ones. Extents along k count bytes.

    Raises:
        TileTypeError: other dtypes.
    """

    def __init__(self, *args: Any, **words: Any):
        super().__init__(*args, **words)
        if (self.a_dtype, self.b_dtype) != (canonical("int8"), canonical("int8")):
            raise TileTypeError(
                f"INT4TensorCoreIntrinEmitter of {self.a_dtype} by {self.b_dtype}",
                expected="int8, each with two numbers of 4 bits",
            )

    def mma(self, A_local_buf: Any, B_local_buf: Any, C_local_buf: Any, k_inner: Any = 0) -> None:
        """As `TensorCoreIntrinEmitter.mma`: the halves of bytes as bytes, and two products."""
        _multiply_halves(
            self, A_local_buf, B_local_buf, C_local_buf,
            self.warp_rows * self.local_size_a, self.warp_cols * self.local_size_b,
        )  # fmt: skip

    def mma_atom(self, *args: Any, **words: Any) -> None:
        """Refused: the halves of bytes are made once for all of the warp's tiles.

        Raises:
            TileTypeError: always.
        """
        raise TileTypeError("mma_atom of INT4TensorCoreIntrinEmitter", hint="mma, of all of the warp's tiles")
