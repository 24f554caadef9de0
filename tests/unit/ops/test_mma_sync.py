"""T.mma_sync: a warp's product of the lanes' own registers, on every target; what each of them refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import refused
from tests.unit.cuda.corpus import compiled
from tests.unit.cuda.emulated import data, lowered
from tests.unit.ops.test_argmax import TARGETS, run
from tilescale.compiler import emulator
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.emulator import isa
from tilescale.compiler.layout.instructions import mma_a, mma_accumulator, mma_b
from tilescale.compiler.ops.mma_sync import has_product
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError
from tilescale.layout import make_swizzled_layout

KINDS = [
    ("float16", "float16", "float32"),
    ("float16", "float16", "float16"),
    ("bfloat16", "bfloat16", "float32"),
    ("int8", "int8", "int32"),
    ("uint8", "int8", "int32"),
]
WARPS = 2


def of_registers(a: str, b: str, c: str, own: bool = False) -> Any:
    """Each warp's operands as its lanes have them, two products into one sum, the second one of registers
    behind the first one's. ``own``: at the scale of the block."""
    n = 4 if a in ("int8", "uint8") else 2

    @T.macro
    def body(A: Any, B: Any, C: Any, t: Any) -> None:
        x, y, z = T.alloc_local((2, 4 * n), a), T.alloc_local((4 * n,), b), T.alloc_local((4,), c)
        for k in T.serial(4 * n):
            x[0, k] = A[0, t, k]
            x[1, k] = A[1, t, k]
            y[k] = B[k // (2 * n), t, k % (2 * n)]
        for k in T.serial(4):
            z[k] = C[t, k]
        T.mma_sync(x[0, 0], y[0], z)
        T.mma_sync(x[1, 0], y[2 * n], z)
        for k in T.serial(4):
            C[t, k] = z[k]

    @T.prim_func
    def kernel(
        A: T.Tensor((2, WARPS * 32, 4 * n), a),
        B: T.Tensor((2, WARPS * 32, 2 * n), b),
        C: T.Tensor((WARPS * 32, 4), c),
    ):
        with T.Kernel(1, threads=WARPS * 32):
            if own:
                body(A, B, C, T.get_thread_binding())
            else:
                with T.Scale("thread") as (t, _):
                    body(A, B, C, t)

    return kernel


def spread(matrices: Any, fragment: Any, slots: int) -> Any:
    """A matrix of each warp as its threads have it, (warps · 32, slots)."""
    out = np.zeros((len(matrices) * 32, slots), matrices.dtype)
    at = np.indices(fragment.shape)
    for w, m in enumerate(matrices):
        out[w * 32 + fragment.thread(*at), fragment.slot(*at)] = m
    return out


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("own", [False, True], ids=["threads", "block"])
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_products_of_registers(kinds: tuple[str, str, str], own: bool, target: str):
    a, b, c = kinds
    bits, n = (8, 4) if a in ("int8", "uint8") else (16, 2)
    x, y, z = data((2, WARPS, 16, 8 * n), a, 1), data((2, WARPS, 8 * n, 8), b, 2), data((WARPS, 16, 8), c, 3)
    args = {
        "A": np.stack([spread(part, mma_a(bits), 4 * n) for part in x]),
        "B": np.stack([spread(part, mma_b(bits), 2 * n) for part in y]),
        "C": spread(z, mma_accumulator(), 4),
    }
    got = run(of_registers(*kinds, own), args, target)["C"]
    exact = z.astype(float) + sum(x[k].astype(float) @ y[k].astype(float) for k in range(2))
    wanted = spread(exact, mma_accumulator(), 4)
    if c == "int32":
        assert (got == wanted).all()
    else:
        # Two roundings of a float16 sum, of which the first is of a number below 32.
        np.testing.assert_allclose(
            got.astype(float), wanted, rtol=1e-5, atol=0.04 if c == "float16" else 1e-5
        )


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_instructions_that_are_printed(kinds: tuple[str, str, str]):
    a, _, c = kinds
    text = print_kernel(lowered(of_registers(*kinds), "sm_80").kernel).text
    name = {
        ("float16", "float32"): "ts::mma_m16n8k16_f16(",
        ("float16", "float16"): "ts::mma_f16_m16n8k16_f16(",
        ("bfloat16", "float32"): "ts::mma_m16n8k16_bf16(",
        ("int8", "int32"): "ts::mma_m16n8k32_s8(",
        ("uint8", "int32"): "ts::mma_m16n8k32_u8_s8(",
    }[a, c]
    assert text.count(name) == 2 and text.count("ts::mma_") == 2, text
    isa.check(name[:-1])


def test_instructions_that_ptx_has_not():
    with pytest.raises(emulator.EmulationError, match="no instruction of PTX"):
        isa.check("ts::mma_f16_m16n8k16_bf16")
    assert not has_product("bfloat16", "bfloat16", "bfloat16") and not has_product("int8", "int8", "float32")


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
@pytest.mark.parametrize("kinds", KINDS[:2] + KINDS[3:4], ids="-".join)
def test_nvcc_takes_it(kinds: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", "nvcc")
    compiled(of_registers(*kinds), "sm_80")


def of_rows(dtype: str, transposed: bool, pad: int = 0, swizzled: bool = False) -> Any:
    """Each warp's lanes name rows of its half of a tile: lane l the one that stands l · 5 places behind."""
    wide = 16 if dtype == "int8" else 8

    @T.prim_func
    def kernel(A: T.Tensor((WARPS * 32, 2 * wide + pad), dtype), C: T.Tensor((WARPS * 32, wide), dtype)):
        with T.Kernel(1, threads=WARPS * 32):
            s, got = T.alloc_shared((WARPS * 32, 2 * wide + pad), dtype), T.alloc_local((wide,), dtype)
            if swizzled:
                T.annotate_layout({s: make_swizzled_layout(s)})
            T.copy(A, s)
            t = T.get_thread_binding()
            T.ldmatrix(s[t // 32 * 32 + t * 5 % 32, t % 2 * wide], got, transposed)
            for k in T.serial(wide):
                C[t, k] = got[k]

    return kernel


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype, transposed, swizzled", [
    ("float16", False, False), ("bfloat16", True, False), ("float16", True, True), ("int8", False, True),
])  # fmt: skip
def test_rows_of_shared_memory(dtype: str, transposed: bool, swizzled: bool, target: str):
    """PTX ISA 9.0, "ldmatrix": of each matrix a lane has a register, of row lane / 4, or of column lane / 4."""
    n, wide = (4, 16) if dtype == "int8" else (2, 8)
    a = data((WARPS * 32, 2 * wide), dtype, 1)
    kernel = of_rows(dtype, transposed, swizzled=swizzled)
    got = run(kernel, {"A": a, "C": np.zeros((WARPS * 32, wide), a.dtype)}, target)["C"]
    wanted = np.zeros_like(got)
    for w in range(WARPS):
        named = [a[w * 32 + l * 5 % 32, l % 2 * wide : (l % 2 + 1) * wide] for l in range(32)]
        for m in range(4):
            matrix = np.stack(named[8 * m : 8 * m + 8])
            matrix = matrix.T if transposed else matrix
            for l in range(32):
                wanted[w * 32 + l, m * n : (m + 1) * n] = matrix[l // 4, l % 4 * n : (l % 4 + 1) * n]
    assert (got.view(np.uint8) == wanted.view(np.uint8)).all()


def test_rows_that_do_not_lie_together():
    with refused(
        TileValueError, "T.ldmatrix from s, at an index that may lie outside or between", expected="a multiple of 8",
        write="make_swizzled_layout",
    ):  # fmt: skip
        lowered(of_rows("float16", False, pad=1), "sm_80")


def test_lanes_that_do_not_come():
    @T.prim_func
    def few(C: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32):
            with T.Scale("thread") as (t, _):
                x, y, z = (
                    T.alloc_local((8,), "float16"),
                    T.alloc_local((4,), "float16"),
                    T.alloc_local((4,), "float32"),
                )
                T.clear(x)
                T.clear(y)
                T.clear(z)
                if t < 8:
                    T.mma_sync(x, y, z)
                C[t] = z[0]

    args = {"C": np.zeros(32, "float32")}
    report = few.check(args=args, seeds=1)
    assert any(
        f.kind == "deadlock" and "24 lanes of warp 0 at T.mma_sync" in str(f) for f in report.findings
    ), report
    with pytest.raises(emulator.EmulationError, match="in part of a warp"):
        emulator.launch(few, args)


def test_what_it_refuses():
    def refuse(
        kind: Any, message: str, statement: Any, scale: str = "thread", threads: int = 128, **more: Any
    ) -> None:
        @T.prim_func
        def kernel(A: T.Tensor((64,), "float16")):
            with T.Kernel(1, threads=threads):
                s = T.alloc_shared((8,), "float16")
                with T.Scale(scale) as (i, n):
                    x, y, z = (
                        T.alloc_local((16,), "float16"),
                        T.alloc_local((4,), "float16"),
                        T.alloc_local((8,), "float32"),
                    )
                    statement(x, y, z, s)

        with refused(kind, message, **more):
            kernel.trace()

    refuse(
        TileValueError,
        "A of T.mma_sync is x of 16 numbers",
        lambda x, y, z, s: T.mma_sync(x, y, z[0]),
        at="T.mma_sync(x, y, z[0])",
        expected="8 of float16 for each lane",
        write="x[i] for the 8 that begin at i",
    )
    refuse(TileValueError, "C of T.mma_sync is z of 8 numbers", lambda x, y, z, s: T.mma_sync(x[8], y, z))
    refuse(
        TileTypeError,
        "T.mma_sync of float16 by float32 into float32",
        lambda x, y, z, s: T.mma_sync(x[0], z[0], z[4]),
        expected="bfloat16 into float32",
        write="T.gemm",
    )
    refuse(
        TileTypeError,
        "A of T.mma_sync is s, which lies in shared",
        lambda x, y, z, s: T.mma_sync(s, y, z[0]),
        expected="T.alloc_local",
    )
    refuse(
        TileTypeError,
        "B of T.mma_sync is 3",
        lambda x, y, z, s: T.mma_sync(x[0], 3, z[0]),
        expected="T.alloc_local",
    )
    refuse(
        TileTypeError,
        "T.ldmatrix from float16 to float32",
        lambda x, y, z, s: T.ldmatrix(s[0], z),
        expected="one dtype of 16 bits",
    )
    refuse(
        TileTypeError,
        "the source of T.ldmatrix is x, which lies in local",
        lambda x, y, z, s: T.ldmatrix(x[0], x[8]),
        expected="T.alloc_shared",
    )
    refuse(
        TileValueError,
        "the destination of T.ldmatrix is y of 4 numbers",
        lambda x, y, z, s: T.ldmatrix(s[0], y),
        expected="8 of float16 for each lane",
    )
    refuse(
        TileSyntaxError, "T.ldmatrix is a thread's", lambda x, y, z, s: T.ldmatrix(s[0], x[0]), "warpgroup"
    )
    refuse(
        TileSyntaxError,
        "T.mma_sync is a thread's",
        lambda x, y, z, s: T.mma_sync(x[0], y, z[0]),
        "warp",
        write='T.Scale("thread")',
    )
    refuse(
        TileValueError,
        "T.mma_sync by 48 threads",
        lambda x, y, z, s: T.mma_sync(x[0], y, z[0]),
        threads=48,
        expected="a multiple of 32",
    )
