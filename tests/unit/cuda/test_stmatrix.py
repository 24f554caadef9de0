"""Fragments stored to shared memory by stmatrix: on emulated threads against the simulator, their bank
conflicts, and who meets whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty, lowered
from tilescale.compiler import emulator
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.layout.shared import bank_conflicts, boxed
from tilescale.compiler.passes import pipeline
from tilescale.compiler.tvm_compat import ir, structural_map, tirx


def stored(
    m: int = 64,
    n: int = 64,
    threads: int = 64,
    dtype: str = "float16",
    how: str = "plain",
    policy: Any = T.GemmWarpPolicy.Square,
) -> Any:
    """An accumulator that goes through 16-bit shared memory, ``how`` it is written there."""
    tile = {"transposed": (n, m), "part": (m, 2 * n), "stage": (3, m, n)}.get(how, (m, n))

    @T.prim_func
    def kernel(A: T.Tensor((m, 32), "float16"), B: T.Tensor((32, n), "float16"), C: T.Tensor(tile, dtype)):
        with T.Kernel(1, threads=threads):
            a, b, s = (
                T.alloc_shared((m, 32), "float16"),
                T.alloc_shared((32, n), "float16"),
                T.alloc_shared(tile, dtype),
            )
            acc = T.alloc_fragment((m, n), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.clear(s)
            T.gemm(a, b, acc, clear_accum=True, policy=policy)
            if how == "plain":
                T.copy(acc, s)
            elif how == "scaled":
                for i, j in T.Parallel(m, n):
                    s[i, j] = acc[i, j] * 2 + i
            elif how == "transposed":
                for i, j in T.Parallel(m, n):
                    s[j, i] = acc[i, j]
            elif how == "part":
                T.copy(acc, s[0:m, n : 2 * n])
            elif how == "stage":
                T.copy(acc, s[1, 0:m, 0:n])
            elif how == "odd":
                for i, j in T.Parallel(m, n - 1):
                    s[i, j + 1] = acc[i, j]
            T.copy(s, C)

    return kernel


def printed(kernel: Any, arch: str = "sm_90a") -> Any:
    return print_kernel(lowered(kernel, arch).kernel)


CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "stmatrix_x4("),
    ({"dtype": "bfloat16", "how": "scaled", "n": 48, "threads": 128}, "stmatrix_x"),
    ({"how": "transposed"}, "stmatrix_trans_x4("),
    ({"how": "transposed", "m": 16, "n": 8, "threads": 32}, "stmatrix_trans_x2("),
    ({"how": "part"}, "stmatrix_x4("),
    ({"how": "stage", "threads": 128}, "stmatrix_x4("),
    ({"m": 16, "n": 8, "threads": 32}, "stmatrix_x2("),
    ({"m": 128, "n": 40, "threads": 256, "policy": T.GemmWarpPolicy.FullRow}, "stmatrix_x"),
    ({"m": 32, "n": 8, "threads": 128}, "stmatrix_x2("),  # two warps have copies
    (
        {"m": 64, "n": 64, "threads": 256, "policy": T.GemmWarpPolicy.FullRow},
        "stmatrix_x4(",
    ),  # a warpgroup has padding alone
]


@pytest.mark.parametrize("options, instruction", CASES, ids=str)
def test_stores(options: dict[str, Any], instruction: str):
    kernel = stored(**options)
    m, n, dtype = options.get("m", 64), options.get("n", 64), options.get("dtype", "float16")
    shape = {"transposed": (n, m), "part": (m, 2 * n), "stage": (3, m, n)}.get(options.get("how", ""), (m, n))
    assert f"ts::{instruction}" in printed(kernel).text
    assert "ts::stmatrix" not in printed(kernel, "sm_80").text
    agree(kernel, {"A": data((m, 32), "float16"), "B": data((32, n), "float16", 1), "C": empty(shape, dtype)})


@pytest.mark.parametrize("options", [{"how": "odd"}, {"m": 24}, {"dtype": "float32"}, {"n": 20}], ids=str)
def test_what_goes_otherwise(options: dict[str, Any]):
    """Rows that begin elsewhere, tiles with padding, other widths."""
    kernel = stored(**options)
    m, n, dtype = options.get("m", 64), options.get("n", 64), options.get("dtype", "float16")
    assert "ts::stmatrix" not in printed(kernel).text
    agree(
        kernel, {"A": data((m, 32), "float16"), "B": data((32, n), "float16", 1), "C": empty((m, n), dtype)}
    )


@pytest.mark.parametrize("swizzle", [128, 64, 32])
def test_rows_of_a_matrix_lie_in_different_banks(swizzle: int):
    layout = boxed((16, 64), 16, swizzle)
    for chunk in range(8):
        rows = np.array([layout.byte(i, 8 * chunk) for i in range(8)])
        words = (rows[:, None] + np.arange(0, 16, 4)).ravel()  # what one matrix writes
        assert bank_conflicts(words, 4) == 0


def test_those_who_read_it_have_met():
    """A lane reads what it held, which another lane has written."""

    @T.prim_func
    def kernel(A: T.Tensor((16, 16), "float16"), C: T.Tensor((16, 16), "float16")):
        with T.Kernel(1, threads=32):
            a, s = T.alloc_shared((16, 16), "float16"), T.alloc_shared((16, 16), "float16")
            x, y = T.alloc_fragment((16, 16), "float32"), T.alloc_fragment((16, 16), "float32")
            T.copy(A, a)
            T.gemm(a, a, x, clear_accum=True)
            T.copy(x, s)
            for i, j in T.Parallel(16, 16):
                y[i, j] = s[i, j] + x[i, j]
            T.copy(y, C)

    args = {"A": data((16, 16), "float16"), "C": empty((16, 16), "float16")}
    agree(kernel, args)
    program, _ = pipeline.run(kernel.trace(), target("sm_90a"))
    assert "ts::stmatrix" in print_kernel(Lowering(program).run()).text
    syncs: list[Any] = []

    def drop(s: Any) -> Any:
        if isinstance(s.value, ir.Call) and s.value.op.name == "ts.sync":
            syncs.append(s)
            if len(syncs) == 2:  # the first orders A's copy and the product
                return tirx.Evaluate(tirx.IntImm("int32", 0))
        return s

    without = program.with_body(structural_map(program.func.body, (tirx.Evaluate, drop)))
    assert len(syncs) >= 2
    with pytest.raises(emulator.EmulationError, match="race"):
        emulator.run(Lowering(without).run(), without, args)


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="needs nvcc")
def test_machine_code():
    text = toolchain.sass(toolchain.compile_cubin(printed(stored(64, 64, 64)), "sm_90a").code)
    assert text.count("STSM.16.M88.4") == 8
    assert "STSM.16.MT88.4" in toolchain.sass(
        toolchain.compile_cubin(printed(stored(how="transposed")), "sm_90a").code
    )


def passed_on(how: str, n: int = 128, dtype: str = "float16") -> Any:
    """An accumulator that goes through a tile s to C, whose rows TMA cannot store. ``how``: "copies", or what else
    names the tile: an "element", a "view", an "address" or a "fill"."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64, 32), "float16"), B: T.Tensor((32, n), "float16"), C: T.Tensor((64, n + 1), dtype)
    ):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, n), "float16")
            s, acc = T.alloc_shared((64, n), dtype), T.alloc_fragment((64, n), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, acc, clear_accum=True)
            if how == "fill":
                T.clear(s)
            T.copy(acc, s)
            if how == "view":
                T.copy(T.view(s, (64, n), dtype), C[0:64, 0:n])
            else:
                T.copy(s, C[0:64, 0:n])
            if how == "element":
                for i in T.Parallel(64):
                    C[i, n] = s[i, 0]
            if how == "address":
                with T.Scale("thread"):
                    T.call_extern("void", "peek", T.access_ptr(s, "r"))

    return kernel


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("n, swizzle", [(128, 128), (64, 128), (96, 0)])
def test_a_tile_that_copies_pass_on_has_no_conflicts(n: int, swizzle: int, arch: str):
    """Eight rows of it are written at once; row-major they would begin in the same bank."""
    kernel = passed_on("copies", n)
    args = {
        "A": data((64, 32), "float16", 1),
        "B": data((32, n), "float16", 2),
        "C": empty((64, n + 1), "float16"),
    }
    agree(kernel, args, arch=arch)
    layouts = lowered(kernel, arch).program.layouts
    layout = next(layouts[b] for b in layouts if b.name == "s")
    assert layout.swizzle == swizzle
    if swizzle:
        rows = np.arange(8)
        assert bank_conflicts(layout.byte(rows, 0 * rows), 16) == 0
        lanes = np.arange(8)
        assert bank_conflicts(layout.byte(0 * lanes, lanes * 8), 16) == 0


@pytest.mark.parametrize("how", ["element", "view", "address", "fill"])
def test_what_else_names_a_tile_has_it_row_major(how: str):
    layouts = lowered(passed_on(how)).program.layouts
    assert next(layouts[b] for b in layouts if b.name == "s").swizzle == 0
