"""float8_e4m3fn of registers, converted four at once."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np

import tilescale.language as T
from tests.unit.cuda.emulated import agree, empty, lowered
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.gpu.float8 import in_fours
from tilescale.compiler.tvm_compat import tirx

F8 = "float8_e4m3fn"
NAMES = ("ts::widen4_e4m3", "ts::narrow_e4m3<")


@T.prim_func
def scaled(
    A: T.Tensor((64, 128), F8),
    S: T.Tensor((64,), "float32"),
    B: T.Tensor((64, 128), F8),
    C: T.Tensor((64, 128), "float32"),
    D: T.Tensor((128,), "float32"),
):
    with T.Kernel(1, threads=128):
        x, s = T.alloc_fragment((64, 128), F8), T.alloc_fragment((64,), "float32")
        total = T.alloc_fragment((128,), "float32")
        T.copy(A, x)
        T.copy(S, s)
        for i, j in T.Parallel(64, 128):
            x[i, j] = x[i, j] * s[i]
        T.copy(x, B)
        for i, j in T.Parallel(64, 128):
            C[i, j] = x[i, j] + 1.0
        T.reduce_sum(x, total, dim=0)
        T.copy(total, D)


def test_conversions_of_four():
    """Every code is converted and scaled by what leaves it as it is, makes it subnormal, or too great; none of
    the bytes is converted by itself."""
    codes = np.arange(64 * 128).astype("uint8").reshape(64, 128).view(ml_dtypes.float8_e4m3fn)
    args: dict[str, Any] = {
        "A": np.where(np.isnan(codes.astype("float32")), 0, codes).astype(codes.dtype),
        "S": np.resize(np.array([1, 1.037, 0.004, 0.3, -1], "float32"), 64),
        "B": empty((64, 128), F8),
        "C": empty((64, 128), "float32"),
        "D": empty((128,), "float32"),
    }
    agree(scaled, args)
    args["A"], args["S"] = codes, np.resize(np.array([1, 1.035714, 1.0358, 2, np.inf], "float32"), 64)
    got = agree(scaled, args)["B"]
    with np.errstate(all="ignore"):
        want = (codes.astype("float32") * args["S"][:, None]).astype(codes.dtype)
    np.testing.assert_array_equal(got.view("uint8") & 0x7F, want.view("uint8") & 0x7F)
    made = print_kernel(lowered(scaled).kernel)
    assert all(name in made.text for name in NAMES) and "ts::e4m3(" not in made.text, made.text
    assert "float(x" not in made.text and "<ts/float8.cuh>" in made.text
    toolchain.compile_cubin(made, "sm_90a")


def test_all_neighbours_are_looked_at_at_once():
    """Whether one of them is too great, and so becomes NaN: one call converts all 16 of a vector."""

    @T.prim_func
    def program(A: T.Tensor((160, 128), F8), S: T.Tensor((5,), "float32"), B: T.Tensor((160, 128), F8)):
        with T.Kernel(5, threads=128) as bx:
            x = T.alloc_fragment((32, 128), F8)
            T.copy(A[bx * 32, 0], x)
            for i, j in T.Parallel(32, 128):
                x[i, j] = x[i, j] * S[bx]
            T.copy(x, B[bx * 32, 0])

    codes = np.arange(160 * 128).astype("uint8").reshape(160, 128).view(ml_dtypes.float8_e4m3fn)
    scales = np.array([1, 1.035714, 1.0358, np.inf, np.nan], "float32")
    got = agree(program, {"A": codes, "S": scales, "B": empty((160, 128), F8)})["B"]
    with np.errstate(all="ignore"):
        want = (codes.astype("float32") * scales.repeat(32)[:, None]).astype(codes.dtype)
    np.testing.assert_array_equal(got.view("uint8") & 0x7F, want.view("uint8") & 0x7F)
    made = print_kernel(lowered(program).kernel)
    assert re.search(r"ts::narrow_e4m3<16>\(&x\[[^v]*\], &x_wide_out\[0\]\);", made.text), made.text
    toolchain.compile_cubin(made, "sm_90a")


def test_older_processors_convert_one_by_one():
    assert not any(name in print_kernel(lowered(scaled, "sm_80").kernel).text for name in NAMES)


def test_what_other_rounds_write_is_converted_when_it_is_read():
    def loop(shift: int) -> Any:
        u, x = tirx.Var("u", "int32"), tirx.decl_buffer((32,), F8, "x", scope="local", layout=None)
        value = tirx.Cast(
            F8, tirx.Cast("float32", tirx.BufferLoad(x, [u + shift])) * tirx.const(2.0, "float32")
        )
        zero, count = tirx.IntImm("int32", 0), tirx.IntImm("int32", 16)
        return tirx.For(u, zero, count, tirx.ForKind.UNROLLED, tirx.BufferStore(x, value, [u]))

    assert "widen4" in str(in_fours(loop(0))) and "widen4" not in str(in_fours(loop(1)))
