"""Neighbours that are added to global memory by one instruction: which sums go so, and that they are the
simulator's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import refused, run
from tests.unit.cuda.corpus import compiled
from tests.unit.cuda.emulated import agree, data, empty
from tests.unit.cuda.test_hopper import lowered
from tilescale.compiler import emulator
from tilescale.compiler.checks.run import launch
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.passes import pipeline
from tilescale.compiler.sim import numerics
from tilescale.errors import TileTypeError

WIDEST = {"float32": "red_add4_f32", "float16": "red_add8_f16", "bfloat16": "red_add8_bf16"}


def tiles(dtype: str) -> Any:
    """A fragment, a shared tile, one number, over the edge, guarded; four blocks add to the same elements."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), dtype), C: T.Tensor((5, 64, 64), dtype)):
        with T.Kernel(4, threads=128):
            f, s = T.alloc_fragment((64, 64), dtype), T.alloc_shared((64, 64), dtype)
            T.copy(A, f)
            T.copy(A, s)
            T.atomic_add(C[0, 0:64, 0:64], f)
            T.atomic_add(C[1, 0:64, 0:64], s)
            T.atomic_add(C[2, 0:64, 0:64], 1)
            T.atomic_add(C[3, 32:96, 32:96], f)
            for i, j in T.Parallel(64, 64):
                if i < 40:
                    T.atomic_add(C[4, i, j], f[i, j] * T.cast(2, dtype))

    return kernel


@pytest.mark.parametrize("dtype", WIDEST)
def test_tiles_are_added_in_vectors(dtype: str):
    text = print_kernel(lowered(tiles(dtype))[0]).text
    assert text.count(f"ts::{WIDEST[dtype]}(") == 5 and "ts::atomic_add" not in text, text
    agree(tiles(dtype), {"A": data((64, 64), dtype, 1), "C": data((5, 64, 64), dtype, 2)})


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int32"])
def test_what_ampere_has(dtype: str):
    """Pairs of float16, and nothing else."""
    made = pipeline.run(tiles(dtype).trace(), target("sm_80"))[0]
    text = print_kernel(Lowering(made).run()).text
    assert ("ts::red_add2_f16(" in text) == (dtype == "float16") and text.count("ts::red_add") == text.count(
        "ts::red_add2_f16("
    )
    assert ("ts::atomic_add(" in text) == (dtype != "float16") and "add_bf16" not in text
    agree(tiles(dtype), {"A": data((64, 64), dtype, 1), "C": data((5, 64, 64), dtype, 2)}, arch="sm_80")


def several(count: int, dtype: str = "float32") -> Any:
    """T.atomic_addx2 and x4, from each kind of memory, in loops and outside."""
    add = {2: T.atomic_addx2, 4: T.atomic_addx4}[count]

    @T.prim_func
    def kernel(A: T.Tensor((32, 64), dtype), C: T.Tensor((6, 32, 64), dtype)):
        with T.Kernel(3, threads=128):
            f, s = T.alloc_fragment((32, 64), dtype), T.alloc_shared((32, 64), dtype)
            T.copy(A, f)
            T.copy(A, s)
            for i, j in T.Parallel(32, 64 // count):
                add(C[0, i, j * count], f[i, j * count])
            for i, j in T.Parallel(31, 64 // count):
                add(C[1, i + 1, j * count], s[i, j * count])
            for i, j in T.Parallel(32, 64 // count):
                if i % 3 == 0:
                    add(C[2, i, j * count], f[i, j * count])
            for i, j in T.Parallel(32, 64 // count):  # every second group: not all neighbours of a thread
                if (i + j) % 2 == 0:
                    add(C[5, i, j * count], A[i, j * count])
            add(C[3, 1, 4], s[2, 8])
            with T.Scale("thread") as (t, n):
                if t < 64 // count:
                    add(C[4, 3, t * count], s[7, t * count])

    return kernel


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_two_and_four_at_once(count: int, arch: str):
    args = {"A": data((32, 64), "float32", 1), "C": data((6, 32, 64), "float32", 2)}
    agree(several(count), args, arch=arch)
    program = pipeline.run(several(count).trace(), target(arch))[0]
    text = print_kernel(Lowering(program).run()).text
    assert text.count("ts::red_add") == (4 if arch == "sm_90a" else 0), text
    assert "f_shared" not in text, "a fragment is read where it lies"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_was_there_is_a_vector(dtype: str):
    @T.prim_func
    def kernel(A: T.Tensor((12,), dtype), C: T.Tensor((12,), dtype), P: T.Tensor((12,), dtype)):
        with T.Kernel(1, threads=32):
            P[0:4] = T.atomic_addx4(C[0:4], A[0], return_prev=True)
            for i in T.Parallel(4):
                P[4 + i * 2 : 6 + i * 2] = T.atomic_addx2(C[4 + i * 2], A[4 + i * 2], return_prev=True)

    args = {"A": data((12,), dtype, 1), "C": data((12,), dtype, 2), "P": empty((12,), dtype)}
    got = agree(kernel, args, exact=True)
    assert (got["P"] == args["C"]).all() and (got["C"] == args["C"] + args["A"]).all()
    made = {k: v.copy() for k, v in args.items()}
    run(kernel)(*made.values())
    assert (made["P"] == args["C"]).all() and (made["C"] == got["C"]).all()


def test_products_leave_in_pairs():
    """An accumulator has two neighbours in each thread."""

    @T.prim_func
    def kernel(
        A: T.Tensor((128, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((128, 64), "float32")
    ):
        with T.Kernel(2, threads=128):
            a, b, c = (
                T.alloc_shared((128, 64), "float16"),
                T.alloc_shared((64, 64), "float16"),
                T.alloc_fragment((128, 64), "float32"),
            )
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c, clear_accum=True)
            T.atomic_add(C, c)

    assert "ts::red_add2_f32(" in print_kernel(lowered(kernel)[0]).text
    agree(
        kernel,
        {
            "A": data((128, 64), "float16", 1),
            "B": data((64, 64), "float16", 2),
            "C": data((128, 64), "float32", 3),
        },
    )


def single(dtype: str) -> Any:
    """Sums of one element, in global and in shared memory, with and without the value before."""

    @T.prim_func
    def kernel(A: T.Tensor((256,), dtype), C: T.Tensor((4,), dtype), D: T.Tensor((256,), dtype)):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((1,), dtype)
            s[0] = T.cast(0, dtype)
            for i in T.Parallel(256):
                T.atomic_add(C[i % 3], A[i])
                T.atomic_add(s[0], A[i])
            with T.Scale("thread") as (t, n):
                D[t] = T.cast(T.atomic_add(C[3], 1, return_prev=True), dtype)
            T.copy(s, D[128:129])

    return kernel


@pytest.mark.parametrize(
    "dtype, arch, name",
    [
        ("float16", "sm_90a", "atomic_add_f16("),
        ("bfloat16", "sm_90a", "atomic_add_bf16("),
        ("float16", "sm_80", "atomic_add_f16("),
        ("bfloat16", "sm_80", "atomic_add("),
    ],
)
def test_sums_of_small_floats_have_an_instruction(dtype: str, arch: str, name: str):
    """Of whole numbers, so that their order does not matter."""
    program = pipeline.run(single(dtype).trace(), target(arch))[0]
    assert print_kernel(Lowering(program).run()).text.count(f"ts::{name}") == 3
    got = emulator.launch(single(dtype), whole_numbers(dtype), arch)
    check_single(dtype, got)


def whole_numbers(dtype: str) -> dict[str, Any]:
    ones = (np.arange(256) % 5 - 2).astype(np.float32)
    return {"A": numerics.encode(ones, dtype), "C": empty((4,), dtype), "D": empty((256,), dtype)}


def check_single(dtype: str, got: dict[str, Any]) -> None:
    a, c, d = (numerics.decode(got[n], dtype).astype(np.float64) for n in "ACD")
    assert c[:3].tolist() == [a[k::3].sum() for k in range(3)] and c[3] == 64 and d[128] == a.sum()
    assert sorted(d[:64].tolist()) == list(range(64))


def test_where_alignment_is_not_known():
    """Rows of a length that only the call knows, and a tile that begins anywhere."""
    n = T.dynamic("n")

    @T.prim_func
    def kernel(
        A: T.Tensor((16, 64), "float32"),
        C: T.Tensor((16, n), "float32"),
        D: T.Tensor((16, 68), "float32"),
        first: T.int32,
    ):
        with T.Kernel(2, threads=64):
            f = T.alloc_fragment((16, 64), "float32")
            T.copy(A, f)
            T.atomic_add(C[0:16, 0:64], f)
            T.atomic_add(D[0:16, first : first + 64], f)

    assert "red_add" not in print_kernel(lowered(kernel)[0]).text
    args = {
        "A": data((16, 64), "float32", 1),
        "C": empty((16, 61), "float32"),
        "D": empty((16, 68), "float32"),
        "first": 3,
    }
    agree(kernel, args)


def test_what_was_written_before_is_carried():
    """Blocks tell each other by the sums that they have written something else."""

    @T.prim_func
    def kernel(
        A: T.Tensor((4, 512), "float32"), C: T.Tensor((512,), "float32"), D: T.Tensor((512,), "float32")
    ):
        with T.Kernel(4, threads=64) as b:
            f = T.alloc_fragment((512,), "float32")
            T.fill(f, 1)
            T.copy(f, A[b, 0:512])
            T.atomic_add(C, f)
            if T.atomic_load(C[0]) == 4.0:
                T.copy(A[0, 0:512], D)

    assert "ts::publishing_red_add4_f32(" in print_kernel(lowered(kernel)[0]).text


def test_the_emulator_finds_what_is_not_aligned(monkeypatch: pytest.MonkeyPatch):
    from tilescale.compiler.gpu import vectors

    monkeypatch.setattr(vectors, "_aligned", lambda *_: True)

    @T.prim_func
    def kernel(C: T.Tensor((66,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                T.atomic_add(C[i + 1], 1.0)

    with pytest.raises(emulator.EmulationError, match="no multiple of 2"):
        emulator.launch(kernel, {"C": empty((66,), "float32")})


@pytest.mark.parametrize("level", ["tile", "raw"])
def test_the_simulator_and_the_cpu_add_the_same(level: str):

    kernel, args = several(2), {"A": data((32, 64), "float32", 1), "C": data((6, 32, 64), "float32", 2)}
    want = launch(kernel, 1, args).arrays[0]["C"]
    if level == "tile":
        got = args["C"].copy()
        run(kernel)(args["A"].copy(), got)
    else:  # as it was written, one update after the other
        got = launch(kernel.trace(), 1, args).arrays[0]["C"]
    assert np.abs(got - want).max() < 1e-5 and np.abs(want - args["C"]).max() > 1


def test_what_they_refuse():
    def refuse(kind: Any, message: str, statement: Any, **more: Any) -> None:
        @T.prim_func
        def kernel(A: T.Tensor((16, 8), "float32")):
            with T.Kernel(1):
                statement(A, T.alloc_shared((8, 4), "float32"), T.alloc_fragment((8,), "float16"))

        with refused(kind, message, **more):
            kernel.trace()

    refuse(
        TileTypeError,
        "T.atomic_addx4 adds 1.0",
        lambda A, s, f: T.atomic_addx4(A[0, 0], 1.0),
        expected="first of 4 neighbours",
    )
    refuse(
        TileTypeError,
        "T.atomic_addx2 of A with a tile of (4,)",
        lambda A, s, f: T.atomic_addx2(A[0, 0:4], s[0, 0]),
        at="T.atomic_addx2(A[0, 0:4], s[0, 0])",
        expected="2 neighbours of its last axis",
    )
    refuse(
        TileTypeError,
        "T.atomic_addx2 of A with a tile of (2, 1)",
        lambda A, s, f: T.atomic_addx2(A[0:2, 0:1], s[0, 0]),
    )


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
@pytest.mark.parametrize(
    "dtype, arch",
    [("float32", "sm_90a"), ("float16", "sm_90a"), ("bfloat16", "sm_90a"), ("float16", "sm_80")],
)
def test_nvcc_takes_it(dtype: str, arch: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", "nvcc")
    compiled(tiles(dtype), arch)
    compiled(single(dtype), arch)


def drawn(draw: Any) -> tuple[Any, dict[str, Any]]:
    """A program that adds tiles at drawn places of a drawn tensor, and its arguments: whole numbers, so that
    no order shows."""
    dtype = str(draw.choice(["float32", "float16", "bfloat16"]))
    rows, cols = int(draw.choice([1, 3, 8, 16])), int(draw.choice([4, 6, 8, 24, 64]))
    high, wide = (
        max(3, rows + int(draw.integers(0, 4))),
        int(draw.choice([cols, cols + 2, cols + 8, 2 * cols, 63])),
    )
    down, right = int(draw.integers(-1 if rows > 1 else 0, 3)), int(draw.choice([0, 1, 2, 4, 8, -2]))
    source, form, threads = (
        str(draw.choice(["fragment", "shared", "tensor"])),
        int(draw.integers(4)),
        int(draw.choice([32, 64, 128])),
    )
    n = T.dynamic("n", multiple_of=int(draw.choice([1, 2, 4])) if wide % 4 == 0 else 1)

    @T.prim_func
    def kernel(A: T.Tensor((rows, cols), dtype), C: T.Tensor((high, n), dtype), first: T.int32):
        with T.Kernel(3, threads=threads) as b:
            held = (
                T.alloc_fragment((rows, cols), dtype)
                if source == "fragment"
                else T.alloc_shared((rows, cols), dtype)
            )
            T.copy(A, held)
            tile = A if source == "tensor" else held
            if form == 0 and source != "tensor":
                T.atomic_add(C[down : down + rows, right : right + cols], tile)
            elif form == 1:
                for i, j in T.Parallel(rows, cols):
                    if i % 2 == b % 2:
                        T.atomic_add(C[i + down, j + right], tile[i, j])
            elif form == 2:
                for i, j in T.Parallel(rows, cols // 2):
                    T.atomic_addx2(C[i + down, j * 2 + right], tile[i, j * 2])
            else:
                for i, j in T.Parallel(rows, cols):
                    T.atomic_add(C[i, j + first], tile[i, j] * T.cast(2, dtype))

    numbers = lambda shape: numerics.encode(draw.integers(-3, 4, shape).astype(np.float32), dtype)  # noqa: E731
    return kernel, {"A": numbers((rows, cols)), "C": numbers((high, wide)), "first": int(draw.integers(0, 5))}


@pytest.mark.parametrize("seed", range(16))
def test_drawn_programs(seed: int):
    draw = np.random.default_rng(seed)
    for arch in ("sm_90a", "sm_80"):
        kernel, args = drawn(draw)
        agree(kernel, args, exact=True, arch=arch, seed=seed)
