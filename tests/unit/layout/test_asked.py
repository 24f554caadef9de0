"""What an author fixes of a T.Parallel nest: ``loop_layout`` and ``coalesced_width``, heeded or refused."""

from __future__ import annotations

import random
from typing import Any

import pytest

import tilescale.language as T
from tests.kernels import refused
from tests.unit.cuda.emulated import agree, data, empty
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.ir.nests import nest_of
from tilescale.compiler.ir.scales import Executor
from tilescale.compiler.ir.walks import walk
from tilescale.compiler.layout import Fragment, Piece, asked
from tilescale.compiler.layout.loops import choose
from tilescale.compiler.passes import pipeline
from tilescale.errors import TileError, TileSyntaxError, TileTypeError, TileValueError

ROWS = T.Fragment((64, 64), lambda i, j: (i * 2 + j // 32, j % 32))
COLUMNS = T.Fragment((64, 64), lambda i, j: (j * 2 + i // 32, i % 32))
TWICE = T.Fragment((64, 64), lambda i, j, c: (c * 64 + j, i), replicate=2)


def scheduled(kernel: Any) -> Any:
    return pipeline.run(kernel.trace(), target("sm_90a"))[0]


def every_loop(program: Any) -> list[tuple[str, Any]]:
    """A program's loops over elements in the order of the text: what they are, and their layouts."""
    nests = [(nest_of(s), ex) for s, ex in walk(program.func.body, Executor("block", program.launch.threads))]
    return [(n.what, choose(n, program.layouts, ex.threads)[0].fragment) for n, ex in nests if n is not None]


def loops_of(program: Any) -> list[Any]:
    """The layouts of its T.Parallel nests."""
    return [layout for what, layout in every_loop(program) if what == "T.Parallel"]


@pytest.mark.parametrize("layout", [ROWS, COLUMNS, TWICE], ids=["rows", "columns", "copies"])
def test_iterations_run_where_the_author_says(layout: Any):
    @T.prim_func
    def kernel(
        A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32"), C: T.Tensor((64,), "int32")
    ):
        with T.Kernel(1, threads=128):
            for i, j in T.Parallel(64, 64, loop_layout=layout):
                B[i, j] = A[i, j] * 2 + i
                T.atomic_add(C[i], 1)

    assert loops_of(scheduled(kernel)) == [layout]
    agree(
        kernel, {"A": data((64, 64), "float32"), "B": empty((64, 64), "float32"), "C": empty((64,), "int32")}
    )


@pytest.mark.parametrize("layout", [ROWS, COLUMNS], ids=["rows", "columns"])
def test_tiles_that_nobody_else_decides_follow(layout: Any):
    """Also those of the loops in front: what they compute comes to where the fixed loop runs."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64, 64), "float32"), R: T.Tensor((64,), "float32"), B: T.Tensor((64, 64), "float32")
    ):
        with T.Kernel(1, threads=128):
            a, b, r = (
                T.alloc_fragment((64, 64), "float32"),
                T.alloc_fragment((64, 64), "float32"),
                T.alloc_fragment((64,), "float32"),
            )
            T.copy(A, a)
            T.copy(R, r)
            for i, j in T.Parallel(64, 64):
                a[i, j] += 1
            for i, j in T.Parallel(64, 64, loop_layout=layout):
                b[i, j] = a[i, j] * r[i]
            T.copy(b, B)

    program = scheduled(kernel)
    assert loops_of(program) == [layout, layout] and not program.notes
    assert {b.name: f for b, f in program.layouts.items() if b.name in "ab"} == {"a": layout, "b": layout}
    agree(
        kernel,
        {"A": data((64, 64), "float32"), "R": data((64,), "float32", 1), "B": empty((64, 64), "float32")},
        exact=True,
    )


def test_neighbours_stay_with_their_iteration():
    quarters = T.Fragment((64, 16), lambda i, j: (i * 2 + j % 2, j // 2))

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            for i, j in T.Parallel(64, 16, loop_layout=quarters):
                T.atomic_addx4(B[i, 4 * j], a[i, 4 * j])

    program = scheduled(kernel)
    (loop,) = loops_of(program)
    assert loop == T.Fragment((64, 64), lambda i, j: (i * 2 + j // 4 % 2, j // 8 * 4 + j % 4))
    assert "ts::red_add4_f32" in print_kernel(Lowering(program).run()).text
    agree(kernel, {"A": data((64, 64), "float32"), "B": empty((64, 64), "float32")}, exact=True)


def drawn(shape: tuple[int, int], threads: int, rnd: random.Random) -> Fragment:
    """A layout of digits in any order, some over threads and others over rounds; threads that are left have
    copies."""
    digits = []
    for axis, extent in enumerate(shape):
        unit = 1
        while unit < extent:
            count = rnd.choice([d for d in range(2, extent // unit + 1) if extent // unit % d == 0])
            digits.append((axis, unit, count))
            unit *= count
    rnd.shuffle(digits)
    pieces, thread, slot = [], 1, 1
    for axis, unit, count in digits:
        if threads // thread % count == 0 and rnd.random() < 0.8:
            pieces.append(Piece(axis, unit, count, "thread", thread))
            thread *= count
        else:
            pieces.append(Piece(axis, unit, count, "slot", slot))
            slot *= count
    left = [Piece(None, 0, threads // thread, "thread", thread)] if thread < threads else []
    return Fragment(shape, (*pieces, *left), threads)


@pytest.mark.parametrize("seed", range(16))
def test_any_layout(seed: int):
    """Reads and writes of memory and fragments, under a condition, atomic updates, and in the warps of a
    block."""
    rnd = random.Random(seed)
    M, N, threads = rnd.choice([16, 32, 48]), rnd.choice([16, 24, 32]), rnd.choice([32, 64, 96, 128])
    layout, of_warps, width = drawn((M, N), threads, rnd), drawn((M, N), 32, rnd), rnd.choice([None, 1, 2, 4])

    @T.prim_func
    def kernel(
        A: T.Tensor((M - 3, N), "float32"),
        B: T.Tensor((M, N), "float32"),
        C: T.Tensor((M,), "int32"),
        D: T.Tensor((4, M, N), "float32"),
    ):
        with T.Kernel(1, threads=threads):
            s, f = T.alloc_shared((M, N), "float32"), T.alloc_fragment((M, N), "float32")
            T.copy(A[0:M, 0:N], s)
            for i, j in T.Parallel(M, N, loop_layout=layout, coalesced_width=width):
                f[i, j] = s[i, j] * 2 + i
                T.atomic_add(C[i], j)
                if i + j > 9:
                    B[i, j] = f[i, j]
            with T.Scale("warp") as (w, count):
                g = T.alloc_fragment((M, N), "float32")
                for i, j in T.Parallel(M, N, loop_layout=of_warps):
                    g[i, j] = s[i, j] + w
                T.copy(g, D[w, 0:M, 0:N])

    assert layout.covers and of_warps.covers and loops_of(scheduled(kernel)) == [layout, of_warps]
    shapes = {"A": (M - 3, N), "B": (M, N), "C": (M,), "D": (4, M, N)}
    args = {
        name: (data if name == "A" else empty)(shape, "int32" if name == "C" else "float32")
        for name, shape in shapes.items()
    }
    agree(kernel, args, exact=True, seed=seed, arch="sm_80" if seed % 2 else "sm_90a")


def test_a_layout_is_kept_as_text():
    for f in (ROWS, COLUMNS, TWICE):
        assert asked.read(asked.written(f)) == f


@pytest.mark.parametrize(
    ("width", "access"), [(None, "uint4"), (8, "uint4"), (4, "uint2"), (2, "uint32_t"), (1, "")]
)
def test_accesses_are_no_wider_than_asked(width: int | None, access: str):
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128):
            for i, j in T.Parallel(64, 64, coalesced_width=width):
                B[i, j] = A[i, j]

    program = scheduled(kernel)
    text = print_kernel(Lowering(program).run()).text
    body = text[text.index("__global__") :]
    assert (access in body) if access else not any(w in body for w in ("uint4", "uint2", "uint32_t")), body
    agree(kernel, {"A": data((64, 64), "float16"), "B": empty((64, 64), "float16")}, exact=True)
    (loop,) = loops_of(program)
    assert loop.vector(1) == min(8, width or 8)


def both(error: TileError, *words: str) -> None:
    """Both demands are in the text, each with what asks and as a layout."""
    assert error.text.count("threads [") == 2 and all(
        w in error.text for w in ("T.Parallel(loop_layout=…)", *words)
    ), error.text


def test_demands_that_cannot_both_be_met():
    @T.prim_func
    def product(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, c = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.gemm(a, a, c, clear_accum=True)
            for i, j in T.Parallel(64, 64, loop_layout=ROWS):
                c[i, j] *= 2
            T.copy(c, B)

    @T.prim_func
    def annotated(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            c = T.alloc_fragment((64, 64), "float32")
            T.annotate_layout({c: COLUMNS})
            T.copy(A, c)
            for i, j in T.Parallel(64, 64, loop_layout=ROWS):
                B[i, j] = c[i, j]

    @T.prim_func
    def two(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            c = T.alloc_fragment((64, 64), "float32")
            for i, j in T.Parallel(64, 64, loop_layout=COLUMNS):
                c[i, j] = A[i, j]
            for i, j in T.Parallel(64, 64, loop_layout=ROWS):
                B[i, j] = c[i, j]

    for kernel, word in (
        (product, "T.gemm ("),
        (annotated, "T.annotate_layout at"),
        (two, "(loop_layout=…) at"),
    ):
        with refused(
            TileValueError,
            "c is wanted in two layouts",
            at="T.Parallel(64, 64, loop_layout=ROWS)",
            write="T.copy(c, other)",
        ) as error:
            scheduled(kernel)
        both(error, word)


def test_a_second_fragment_takes_it_over():
    """What the refusal says to write."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, c, d = (
                T.alloc_shared((64, 64), "float16"),
                T.alloc_fragment((64, 64), "float32"),
                T.alloc_fragment((64, 64), "float32"),
            )
            T.copy(A, a)
            T.gemm(a, a, c, clear_accum=True)
            T.copy(c, d)
            for i, j in T.Parallel(64, 64, loop_layout=ROWS):
                d[i, j] *= 2
            T.copy(d, B)

    assert loops_of(scheduled(kernel)) == [ROWS]
    agree(kernel, {"A": data((64, 64), "float16"), "B": empty((64, 64), "float32")})


def test_elements_that_no_layout_of_the_tile_brings_to_the_loop():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A, c)
            for i, j in T.Parallel(64, 64, loop_layout=ROWS):
                B[i, j] = c[i, j] + c[63 - i, j]

    with refused(
        TileValueError,
        "c lies as (64, 64) over 128 threads",
        at="T.Parallel(64, 64, loop_layout=ROWS)",
        write="in shared memory",
    ):
        scheduled(kernel)


def copies(src: str, dst: str, **words: Any) -> Any:
    """A to B through shared memory, the first or the second copy with words of its own."""
    first, second = (words, {}) if src == "A" else ({}, words)

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128):
            s = T.alloc_shared((64, 64), "float16")
            T.copy(A, s, **first)
            T.copy(s, B, **second)

    return kernel


@pytest.mark.parametrize("ends", [("A", "s"), ("s", "B")], ids="".join)
@pytest.mark.parametrize("layout", [ROWS, COLUMNS], ids=["rows", "columns"])
def test_copies_run_where_the_author_says(layout: Any, ends: tuple[str, str]):
    program = scheduled(copies(*ends, loop_layout=layout))
    made = [f for _, f in every_loop(program)]
    assert made[ends[0] == "s"] == layout != made[ends[0] == "A"]
    agree(
        copies(*ends, loop_layout=layout),
        {"A": data((64, 64), "float16"), "B": empty((64, 64), "float16")},
        exact=True,
    )


@pytest.mark.parametrize(("width", "access"), [(8, "uint4"), (4, "uint2"), (2, "uint32_t"), (1, "")])
def test_copies_are_no_wider_than_asked(width: int, access: str):
    text = print_kernel(Lowering(scheduled(copies("A", "s", coalesced_width=width))).run()).text
    first = text[text.index("T.copy(A, s") : text.index("T.copy(s, B")]
    assert (access in first) if access else not any(w in first for w in ("uint4", "uint2", "uint32_t")), first
    agree(
        copies("A", "s", coalesced_width=width),
        {"A": data((64, 64), "float16"), "B": empty((64, 64), "float16")},
        exact=True,
    )


def pipelined(**words: Any) -> Any:
    @T.prim_func
    def kernel(
        A: T.Tensor((64, 256), "float16"), B: T.Tensor((256, 64), "float16"), C: T.Tensor((64, 64), "float32")
    ):
        with T.Kernel(1, threads=128):
            a, b, c = (
                T.alloc_shared((64, 32), "float16"),
                T.alloc_shared((32, 64), "float16"),
                T.alloc_fragment((64, 64), "float32"),
            )
            T.clear(c)
            for k in T.Pipelined(8, num_stages=2):
                T.copy(A[0, k * 32], a, **words)
                T.copy(B[k * 32, 0], b)
                T.gemm(a, b, c)
            T.copy(c, C)

    return kernel


PIPELINED = {
    "A": data((64, 256), "float16", 1),
    "B": data((256, 64), "float16", 2),
    "C": empty((64, 64), "float32"),
}


def test_what_goes_without_an_engine():
    """Without TMA where the author says so, by cp.async still, in parts of 8 bytes; by threads, and not
    ahead, where they have a layout."""
    spread = T.Fragment((64, 32), lambda i, j: (i * 2 + j // 16, j % 16))
    for words, has, lacks in (
        ({}, ("tma_load",), ("cp_async<",)),
        ({"disable_tma": True}, ("cp_async<16>",), ("tma_load",)),
        ({"loop_layout": spread}, ("tma_load",), ("cp_async<",)),
        ({"coalesced_width": 4, "disable_tma": True}, ("cp_async<8>",), ("tma_load",)),
    ):
        program = scheduled(pipelined(**words))
        text = print_kernel(Lowering(program).run()).text
        assert all(w in text for w in has) and not any(w in text for w in lacks), (words, text)
        assert bool(program.notes) == ("disable_tma" in words), program.notes
        agree(pipelined(**words), PIPELINED)
    (ring,) = scheduled(pipelined(loop_layout=spread)).schedule.rings
    assert ring.buffers == ["b"]


def test_results_go_out_by_threads_where_asked():
    @T.prim_func
    def kernel(
        A: T.Tensor((64, 256), "float16"), B: T.Tensor((256, 64), "float16"), C: T.Tensor((64, 64), "float16")
    ):
        with T.Kernel(1, threads=128):
            a, b, c = (
                T.alloc_shared((64, 32), "float16"),
                T.alloc_shared((32, 64), "float16"),
                T.alloc_fragment((64, 64), "float32"),
            )
            T.clear(c)
            for k in T.Pipelined(8, num_stages=2):
                T.copy(A[0, k * 32], a)
                T.copy(B[k * 32, 0], b)
                T.gemm(a, b, c)
            T.copy(c, C, disable_tma=True)

    text = print_kernel(Lowering(scheduled(kernel)).run()).text
    assert "tma_load" in text and "tma_store" not in text
    agree(kernel, PIPELINED | {"C": empty((64, 64), "float16")})


def test_what_the_words_refuse():
    def refuse(kind: Any, message: str, make: Any, **more: Any) -> None:
        @T.prim_func
        def kernel(B: T.Tensor((64, 64), "float32"), n: T.int32):
            with T.Kernel(1, threads=128):
                make(B, n)

        with refused(kind, message, **more):
            scheduled(kernel)

    @T.macro
    def nest(B: Any, *extents: Any, **words: Any) -> None:
        for i, j in T.Parallel(*extents, **words):
            B[i, j] = 1

    @T.macro
    def inside(B: Any, n: Any) -> None:
        for i in T.Parallel(64):
            for j in T.Parallel(64, loop_layout=T.Fragment((64,), lambda j: (j, 0))):
                B[i, j] = 1

    @T.macro
    def of_a_warp(B: Any, n: Any) -> None:
        with T.Scale("warp") as (w, count):
            for i, j in T.Parallel(64, 64, loop_layout=ROWS):
                B[i, j] = 1

    half, half1 = T.Fragment((64, 64), lambda i, j: (i, j)), T.Fragment((64,), lambda i: (i, 0))
    refuse(
        TileTypeError,
        "T.Parallel(64, 32) is one of (64, 64, 2)",
        expected="a T.Fragment of (64, 32)",
        write="lambda i, j: (thread, round)",
        make=lambda B, n: nest(
            B, 64, 32, loop_layout=T.Fragment((64, 64, 2), lambda i, j, k: (i * 2 + k, j))
        ),
    )
    refuse(TileTypeError, "T.Parallel(64, 64) is 7", lambda B, n: nest(B, 64, 64, loop_layout=7))
    refuse(
        TileTypeError,
        "known only when the kernel runs",
        lambda B, n: nest(B, n, 64, loop_layout=ROWS),
        expected="constant extents",
    )
    refuse(TileSyntaxError, "inside another one", inside, write="one T.Parallel")
    refuse(
        TileValueError,
        "over 64 threads, and the block here has 128",
        lambda B, n: nest(B, 64, 64, loop_layout=half),
        write="replicate=2",
    )
    refuse(
        TileValueError,
        "over 128 threads, and the warp here has 32",
        of_a_warp,
        expected="over all 32 threads",
    )
    for width in (0, 3, -4, 2.0, "4"):
        refuse(
            TileValueError,
            f"coalesced_width={width!r}",
            lambda B, n, w=width: nest(B, 64, 64, coalesced_width=w),
            expected="a power of two",
        )
    refuse(
        TileTypeError,
        "T.copy(64, 64) is one of (64,)",
        lambda B, n: T.copy(T.alloc_shared((64, 64), "float32"), B, loop_layout=half1),
        expected="a T.Fragment of (64, 64)",
    )
    refuse(
        TileValueError,
        "eviction_policy='sometimes'",
        lambda B, n: T.copy(T.alloc_shared((64, 64), "float32"), B, eviction_policy="sometimes"),
    )
