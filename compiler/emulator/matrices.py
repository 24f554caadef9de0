"""A warp's matrices on emulated threads: ldmatrix, stmatrix, products by mma.sync, arithmetic of two 16-bit
floats and conversions of four 8-bit ones at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilescale.compiler.emulator import isa
from tilescale.compiler.emulator.copies import EmulationError
from tilescale.compiler.emulator.memory import Block, Pointer, decoded, encoded, load, store
from tilescale.compiler.emulator.products import accumulates, factors
from tilescale.compiler.emulator.threads import whole_warps
from tilescale.compiler.ir.scales import WARP
from tilescale.compiler.layout.instructions import mma_a, mma_accumulator, mma_b
from tilescale.compiler.ops.gemm_sp import expanded
from tilescale.compiler.sim import numerics


def _packed(name: str, dtype: str) -> Callable[..., None]:
    compute = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name]

    def run(b: Block, m: Any, to: Pointer, *operands: Pointer) -> None:
        x, y = (decoded(load(b, m, p.memory, p.index, 2), dtype).astype(np.float32) for p in operands)
        store(b, m, to.memory, to.index, encoded(compute(x, y), dtype), 2)

    return run


def _ldmatrix(trans: bool) -> Callable[..., None]:
    def run(b: Block, m: Any, to: Pointer, row: Pointer) -> None:
        whole_warps(b, m, "ldmatrix")
        if ((row.index * row.memory.size + row.memory.offset) % 16)[m].any():
            raise EmulationError("ldmatrix from an address that is no multiple of 16 bytes")
        each = 4 // row.memory.size
        rows = load(b, m, row.memory, row.index, 4 * each)
        # Each lane has so many of each of four matrices.
        lanes, elements = (
            np.flatnonzero(m)[:, None],
            np.arange(4 * each),
        )
        beside, below = each * (lanes % 4) + elements % each, lanes % WARP // 4
        line, col = (beside, below) if trans else (below, beside)
        to.memory.data[lanes, to.index[m][:, None] + elements] = rows[
            lanes // WARP * WARP + 8 * (elements // each) + line, col
        ]

    return run


def _stmatrix(count: int, trans: bool) -> Callable[..., None]:
    """The lane that names a row writes it."""

    def run(b: Block, m: Any, row: Pointer, held: Pointer) -> None:
        whole_warps(b, m, "stmatrix")
        lanes = np.arange(b.threads)
        there = m & (lanes % WARP < 8 * count)
        if ((row.index * row.memory.size + row.memory.offset) % 16)[there].any():
            raise EmulationError("stmatrix to an address that is no multiple of 16 bytes")
        matrix, line, first = lanes % WARP // 8 % count, lanes % 8, lanes // WARP * WARP
        rows = np.zeros((b.threads, 8), row.memory.data.dtype)
        for col in range(8):
            r, c = (np.full_like(lanes, col), line) if trans else (line, np.full_like(lanes, col))
            holder = first + 4 * r + c // 2
            rows[there, col] = held.memory.data[holder, held.index[holder] + 2 * matrix + c % 2].view(
                rows.dtype
            )[there]
        store(b, there, row.memory, row.index, rows, 8)

    return run


class _Places:
    """Which thread of a warp holds each element of a matrix, and in which register. Counted once: every
    product of a warp asks."""

    def __init__(self, fragment: Any):
        at = np.indices(fragment.shape)
        self.thread, self.slot = fragment.thread(*at), fragment.slot(*at)

    def of(self, p: Pointer, warps: Any) -> tuple[Any, Any]:
        """Threads and elements of ``p``'s registers, for the matrices of several warps, (warps, 1, 1)."""
        return warps * WARP + self.thread, p.index[warps * WARP] + self.slot


def _each(b: Block, m: Any, what: str) -> Any:
    """The warps that run an instruction, (warps, 1, 1): one product of many matrices is faster than many
    products."""
    return np.array(whole_warps(b, m, what), np.int64)[:, None, None]


def _mma(a_dtype: str, b_dtype: str, bits: int, small: bool = False) -> Callable[..., None]:
    a_at, b_at, c_at = _Places(mma_a(bits)), _Places(mma_b(bits)), _Places(mma_accumulator())
    wide, sums = (np.float64, "float32") if a_dtype in numerics.FLOATS else (np.int64, "int32")
    sums = "float16" if small else sums

    def run(b: Block, m: Any, d: Pointer, pa: Pointer, pb: Pointer) -> None:
        accumulates(d, sums, f"mma.sync of {a_dtype}")
        warps = _each(b, m, "mma")
        x = factors(pa.memory.data[a_at.of(pa, warps)], a_dtype).astype(wide)
        y = factors(pb.memory.data[b_at.of(pb, warps)], b_dtype).astype(wide)
        there = c_at.of(d, warps)
        d.memory.data[there] = (d.memory.data[there].astype(wide) + x @ y).astype(d.memory.data.dtype)

    return run


def _mma_sp(dtype: str) -> Callable[..., None]:
    """Each thread's register of places: of the even thread of a quad's first two those of 16 elements, of the
    odd one of the next 16."""
    a_at, b_at, c_at = _Places(mma_a(16)), _Places(mma_b(16)), _Places(mma_accumulator())

    def run(b: Block, m: Any, d: Pointer, pa: Pointer, pb: Pointer, next_: Pointer, where: Any) -> None:
        accumulates(d, "float32", f"mma.sp of {dtype}")
        words = np.broadcast_to(where, m.shape).astype(np.uint32)
        for w in whole_warps(b, m, "mma.sp"):

            def get(f: Any, p: Any, w: int = w) -> Any:
                return factors(p.memory.data[f.of(p, w)], dtype).astype(np.float64)

            quads = words[w * WARP : (w + 1) * WARP].reshape(8, 4)[:, :2]
            rows = np.concatenate([quads & 0xFFFF, quads >> 16]).astype(np.uint16)
            x = expanded(get(a_at, pa), rows)
            there = c_at.of(d, w)
            made = d.memory.data[there].astype(np.float64) + x @ np.concatenate(
                [get(b_at, pb), get(b_at, next_)]
            )
            d.memory.data[there] = made.astype(d.memory.data.dtype)

    return run


def _widen4(b: Block, m: Any, to: Pointer, frm: Pointer) -> None:
    four = decoded(load(b, m, frm.memory, frm.index, 4), "float8_e4m3fn")
    store(b, m, to.memory, to.index, np.asarray(four, np.float32), 4)


def _narrow(count: int) -> Callable[..., None]:
    def run(b: Block, m: Any, to: Pointer, frm: Pointer) -> None:
        wide = load(b, m, frm.memory, frm.index, count)
        store(b, m, to.memory, to.index, encoded(wide, "float8_e4m3fn"), count)

    return run


def find(name: str) -> Callable[..., Any] | None:
    """The conversion of a name, with its template's argument."""
    plain, _, number = name.rstrip(">").partition("<")
    return _narrow(int(number)) if plain == "ts::narrow_e4m3" else None


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ts::widen4_e4m3": _widen4,
    **{
        f"ts::{n}2_{k}": _packed(n, d)
        for n in ("add", "sub", "mul")
        for k, d in (("f16", "float16"), ("bf16", "bfloat16"))
    },
    "ts::ldmatrix_x4": _ldmatrix(False),
    "ts::ldmatrix_x4_trans": _ldmatrix(True),
    **{
        f"ts::stmatrix{'_trans' if trans else ''}_x{n}": _stmatrix(n, trans)
        for n in (1, 2, 4)
        for trans in (False, True)
    },
    "ts::mma_m16n8k16_f16": _mma("float16", "float16", 16),
    "ts::mma_f16_m16n8k16_f16": _mma("float16", "float16", 16, small=True),
    "ts::mma_m16n8k16_bf16": _mma("bfloat16", "bfloat16", 16),
    "ts::mma_sp_m16n8k32_f16": _mma_sp("float16"),
    "ts::mma_sp_m16n8k32_bf16": _mma_sp("bfloat16"),
    "ts::mma_m16n8k8_tf32": _mma("float32", "float32", 32),
    **{
        f"ts::mma_m16n8k32_{x if x == y else f'{x}_{y}'}": _mma(isa.DTYPES[x], isa.DTYPES[y], 8)
        for kinds in (("s8", "u8"), ("e4m3", "e5m2"))
        for x in kinds
        for y in kinds
    },
}
