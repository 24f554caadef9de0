"""What the passes for GPUs decide and refuse: layouts, shared memory, exchanges, prints."""

from __future__ import annotations

import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import refused
from tests.unit.cuda.emulated import agree, data, empty
from tilescale.compiler import emulator
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.layout import Fragment
from tilescale.compiler.layout.shared import boxed, strided
from tilescale.compiler.layout.spread import best, candidates, replicated, spread
from tilescale.compiler.passes import pipeline
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError


def scheduled(kernel, arch="sm_90a"):
    return pipeline.run(kernel.trace(), target(arch))[0]


def layout_of(program, name):
    return next(layout for b, layout in program.layouts.items() if b.name == name)


@pytest.mark.parametrize("shape", [(7,), (1000,), (48, 80), (1, 33), (2, 3, 40)], ids=str)
@pytest.mark.parametrize("threads", [1, 32, 96, 100])
def test_every_spread_covers(shape, threads):
    for made, vector in candidates(shape, threads, 32, len(shape) - 1, 4):
        assert made.covers and all(e <= w for e, w in zip(shape, made.shape, strict=True))
        assert made.vector(len(shape) - 1) >= vector
    assert best(shape, threads, 32, widest=1).slots <= replicated(shape, threads).slots


def test_copies_walk_memory_in_wide_steps():
    @T.prim_func
    def kernel(A: T.Tensor((64, 128), "float16"), B: T.Tensor((64, 128), "float16")):
        with T.Kernel(1, threads=128):
            f = T.alloc_fragment((64, 128), "float16")
            T.copy(A, f)
            T.copy(f, B)

    program = scheduled(kernel)
    held = layout_of(program, "f")
    lanes = held.pieces[[p.unit for p in held.pieces].index(8)]
    # 128 bytes of a row at once.
    assert held.vector(1) % 8 == 0 and lanes.to == "thread" and lanes.extent >= 8
    assert "uint4" in print_kernel(Lowering(program).run()).text


def attention(policy):
    @T.prim_func
    def kernel(
        Q: T.Tensor((64, 64), "float16"), V: T.Tensor((64, 128), "float16"), O: T.Tensor((64, 128), "float32")
    ):
        with T.Kernel(1, threads=128):
            q, v = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 128), "float16")
            s, o, p = (
                T.alloc_fragment((64, 64), "float32"),
                T.alloc_fragment((64, 128), "float32"),
                T.alloc_fragment((64, 64), "float16"),
            )
            top, total = T.alloc_fragment((64,), "float32"), T.alloc_fragment((64,), "float32")
            T.copy(Q, q)
            T.copy(V, v)
            T.clear(o)
            T.gemm(q, q, s, transpose_B=True, clear_accum=True, policy=policy)
            T.reduce_max(s, top, dim=1)
            for i, j in T.Parallel(64, 64):
                s[i, j] = T.exp2(s[i, j] - top[i])
            T.reduce_sum(s, total, dim=1)
            T.copy(s, p)
            T.gemm(p, v, o, policy=policy)
            for i, j in T.Parallel(64, 128):
                o[i, j] /= total[i]
            T.copy(o, O)

    return kernel


@pytest.mark.parametrize("policy", list(T.GemmWarpPolicy))
def test_two_products_share_their_rows(policy):
    """Rows' maxima and sums serve both accumulators: one cut of the rows, nothing goes through shared memory
    but the operand."""
    program = scheduled(attention(policy))
    s, o, top = (layout_of(program, n) for n in ("s", "o", "top"))
    assert s.reduced(1) == o.reduced(1) == top
    assert program.notes == []
    agree(
        attention(policy),
        {
            "Q": data((64, 64), "float16", 1, 0.3),
            "V": data((64, 128), "float16", 2),
            "O": empty((64, 128), "float32"),
        },
    )


def test_an_annotated_layout_is_kept():
    mine = spread((64, 64), 128, (4, 32), 2, 1)

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            f, s = T.alloc_fragment((64, 64), "float32"), T.alloc_shared((64, 64), "float32")
            T.annotate_layout({f: mine, s: boxed((64, 64), 32, 128)})
            T.copy(A, f)
            T.copy(f, s)
            T.copy(s, B)

    program = scheduled(kernel)
    assert layout_of(program, "f") == mine and layout_of(program, "s").swizzle == 128
    agree(kernel, {"A": data((64, 64), "float32"), "B": empty((64, 64), "float32")}, exact=True)


def test_an_annotated_ring_is_staged():
    @T.prim_func
    def kernel(A: T.Tensor((128, 64), "float16"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            s, c = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            T.annotate_layout({s: boxed((64, 64), 16, 64)})
            T.clear(c)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[k * 64, 0], s)
                T.gemm(s, s, c)
            T.copy(c, B)

    made = layout_of(scheduled(kernel), "s")
    assert made.swizzle == 64 and made.shape == (2, 64, 64)
    agree(kernel, {"A": data((128, 64), "float16"), "B": empty((64, 64), "float32")})


def test_two_demands_that_cannot_both_be_met():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, c = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            T.annotate_layout({c: spread((64, 64), 128, (32, 4), 1, 1)})
            T.copy(A, a)
            T.gemm(a, a, c, clear_accum=True)
            T.copy(c, B)

    with refused(
        TileValueError,
        "c is wanted in two layouts",
        at="T.gemm(a, a, c, clear_accum=True)",
        write="T.copy(c, other)",
    ) as error:
        scheduled(kernel)
    assert (
        "T.gemm (mma.sync" in error.text
        and "T.annotate_layout at" in error.text
        and error.text.count("threads [") == 2
    )


def test_layouts_that_do_not_fit_their_tile():
    @T.prim_func
    def kernel(B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=128):
            f = T.alloc_fragment((64,), "float32")
            T.annotate_layout({f: strided((64,), 32)})
            T.copy(f, B)

    with refused(TileTypeError, "T.annotate_layout gives f", expected="a T.Fragment of (64,)"):
        scheduled(kernel)


def test_what_goes_through_shared_memory_is_said():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            for i, j in T.Parallel(64, 64):
                b[i, j] = a[i, (j + 1) % 64]
            T.copy(b, B)

    (note,) = scheduled(kernel).notes
    assert (
        "goes through shared memory for T.Parallel: a thread needs an element that another thread has" in note
    )


def test_tiles_that_never_meet_share_their_bytes():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            first, second = T.alloc_shared((64, 64), "float32"), T.alloc_shared((64, 64), "float32")
            f = T.alloc_fragment((64, 64), "float32")
            T.copy(A, first)
            T.copy(first, f)
            T.copy(f, second)
            for i, j in T.Parallel(64, 64):
                B[i, j] = second[j, i]

    program = scheduled(kernel)
    assert program.arena_bytes == 64 * 64 * 4
    agree(kernel, {"A": data((64, 64), "float32"), "B": empty((64, 64), "float32")}, exact=True)


def test_too_much_shared_memory_is_a_table():
    @T.prim_func
    def kernel(A: T.Tensor((256, 192), "float32"), B: T.Tensor((256, 192), "float32")):
        with T.Kernel(1, threads=128):
            big = T.alloc_shared((256, 192), "float32")
            small = T.alloc_shared((16, 8), "float32")
            T.copy(A, big)
            T.copy(A[0:16, 0:8], small)
            for _ in T.serial(2):
                for i, j in T.Parallel(256, 192):
                    B[i, j] = big[i, j] + small[0, 0]

    assert scheduled(kernel).arena_bytes == 256 * 192 * 4 + 512
    with refused(TileValueError, "needs 197120 bytes of shared memory, and a block has 166912") as error:
        scheduled(kernel, "sm_80")
    assert "big " in error.text and "196608" in error.text and "small " in error.text


def test_a_fragment_of_the_block_inside_a_warp():
    @T.prim_func
    def kernel(B: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128):
            f = T.alloc_fragment((128,), "float32")
            T.clear(f)
            with T.Scale("warp") as (w, n):
                for i in T.Parallel(32):
                    f[w * 32 + i] = 1
            T.copy(f, B)

    with refused(
        TileValueError,
        "f is spread over 128 threads and touched by a warp of 32",
        write="allocate f inside the T.Scale",
    ):
        scheduled(kernel)


def test_conditions_that_read_a_spread_tile():
    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32"), C: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=128):
            f = T.alloc_fragment((128,), "float32")
            T.copy(A, f)
            if f[3] > 100:
                T.clear(f)
            elif f[5] < 100:
                for k in T.serial(T.cast(f[7] * 0, "int32") + 2):
                    C[0] = k + 3
            T.copy(f, B)

    args = {"A": data((128,), "float32"), "B": empty((128,), "float32"), "C": empty((1,), "int32")}
    assert agree(kernel, args)["C"][0] == 4


def test_a_loop_that_changes_its_own_extent():
    """How often it runs was settled when it began."""

    @T.prim_func
    def kernel(C: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=32):
            n = T.alloc_var("int32", 8)
            for i in T.serial(n):
                n = n - 1
                C[i] = n

    args = {"C": empty((8,), "int32")}
    assert agree(kernel, args)["C"].tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    text = print_kernel(Lowering(scheduled(kernel)).run()).text
    assert "const int value = n;" in text and "i < value;" in text


def test_a_while_that_reads_a_spread_tile():
    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128):
            f = T.alloc_fragment((128,), "float32")
            T.copy(A, f)
            while f[3] < 100:
                for i in T.Parallel(128):
                    f[i] = f[i] + 50
            T.copy(f, B)

    with refused(
        TileSyntaxError, "the condition of this while reads f", write="a T.alloc_var that is set to f"
    ):
        scheduled(kernel)


def test_prints():
    @T.prim_func
    def kernel(A: T.Tensor((2, 3), "float32"), B: T.Tensor((2, 3), "float32")):
        with T.Kernel(2, threads=64) as bx:
            f = T.alloc_fragment((2, 3), "float32")
            T.copy(A, f)
            T.print(f, "100 %")
            T.print(bx, "block")
            T.copy(f, B)

    emulator.PRINTED.clear()
    emulator.launch(kernel, {"A": data((2, 3), "float32") * 0 + 2.5, "B": empty((2, 3), "float32")})
    lines = "".join(emulator.PRINTED).splitlines()
    assert (
        lines[0].startswith("block (0, 0, 0) ")
        and lines[0].endswith(": 100 % =")
        and lines[1:3] == [f"block (0, 0, 0) 100 %[{r}, 0:3]: 2.5 2.5 2.5" for r in (0, 1)]
    )
    assert lines[3].endswith("block = 0") and lines[7].endswith("block = 1") and len(lines) == 8


def test_printed_lines_say_what_they_are_about():
    """Rows of constant extent in lines of sixteen, others element by element; one element as a scalar."""
    n = T.dynamic("n")

    @T.prim_func
    def kernel(A: T.Tensor((2, 35), "int32"), B: T.Tensor((n,), "float32")):
        with T.Kernel(1, threads=32):
            T.print(A[1, 1:34], "row")
            T.print(B)
            T.print(A[0, 3])

    emulator.PRINTED.clear()
    emulator.launch(
        kernel, {"A": np.arange(70, dtype="int32").reshape(2, 35), "B": np.arange(3, dtype="float32") / 4}
    )
    lines = "".join(emulator.PRINTED).splitlines()
    head = "block (0, 0, 0) "
    rows = [
        f"{head}row[{c}:{min(c + 16, 33)}]: {' '.join(str(36 + k) for k in range(c, min(c + 16, 33)))}"
        for c in (0, 16, 32)
    ]
    assert lines[1:4] == rows and lines[5:8] == [
        f"{head}B[{k}:{k + 1}]: {v}" for k, v in enumerate(("0", "0.25", "0.5"))
    ]
    assert (
        lines[0].endswith("row =")
        and lines[4].endswith("B =")
        and lines[8].endswith("= 3")
        and len(lines) == 9
    )


def test_a_failed_assertion_says_where():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                T.device_assert(A[i] < 7, "too great")

    agree(kernel, {"A": data((8,), "int32")})
    with pytest.raises(emulator.EmulationError, match="assert.*too great"):
        emulator.launch(kernel, {"A": data((8,), "int32") * 0 + 9})


def test_layouts_are_fragments_or_shared():
    program = scheduled(attention(T.GemmWarpPolicy.Square))
    assert {type(x) for x in program.layouts.values()} == {Fragment, type(layout_of(program, "q"))}


@pytest.mark.parametrize("threads", [32, 128, 256])
def test_the_left_operand_stays_in_registers(threads):
    """P goes from the accumulator of one product to the operand of the next without shared memory, where
    warps lie below one another."""

    @T.prim_func
    def kernel(
        Q: T.Tensor((60, 32), "bfloat16"), V: T.Tensor((48, 40), "bfloat16"), O: T.Tensor((60, 40), "float32")
    ):
        with T.Kernel(1, threads=threads):
            q, k, v = (
                T.alloc_shared((60, 32), "bfloat16"),
                T.alloc_shared((48, 32), "bfloat16"),
                T.alloc_shared((48, 40), "bfloat16"),
            )
            s, p, o = (
                T.alloc_fragment((60, 48), "float32"),
                T.alloc_fragment((60, 48), "bfloat16"),
                T.alloc_fragment((60, 40), "float32"),
            )
            T.copy(Q, q)
            T.copy(Q[0:48, :], k)
            T.copy(V, v)
            T.gemm(q, k, s, transpose_B=True, clear_accum=True)
            T.copy(s, p)
            T.gemm(p, v, o, clear_accum=True)
            T.copy(o, O)

    program = scheduled(kernel)
    assert program.notes == [] and not any(b.name.startswith("p_shared") for b in program.layouts)
    agree(
        kernel,
        {
            "Q": data((60, 32), "bfloat16", 1, 0.3),
            "V": data((48, 40), "bfloat16", 2),
            "O": empty((60, 40), "float32"),
        },
    )


def test_an_accumulator_that_is_an_operand_goes_through_shared_memory():
    @T.prim_func
    def kernel(Q: T.Tensor((32, 32), "float16"), O: T.Tensor((32, 32), "float16")):
        with T.Kernel(1, threads=64):
            q, s, o = (
                T.alloc_shared((32, 32), "float16"),
                T.alloc_fragment((32, 32), "float16"),
                T.alloc_fragment((32, 32), "float16"),
            )
            T.copy(Q, q)
            T.gemm(q, q, s, clear_accum=True)
            T.gemm(s, q, o, clear_accum=True)
            T.copy(o, O)

    agree(kernel, {"Q": data((32, 32), "float16", 1, 0.3), "O": empty((32, 32), "float16")})
