"""Layouts that authors make, as functions of indices and by the usual names: what they become, what is
refused, what kernels keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilescale
import tilescale.language as T
from tests.gpu.gemms import gemm
from tests.kernels import refused, run
from tests.unit.cuda.emulated import agree, data, empty
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.layout import instructions
from tilescale.compiler.layout.shared import boxed, strided
from tilescale.compiler.passes import pipeline
from tilescale.errors import TileTypeError, TileValueError
from tilescale.layout import (
    make_full_bank_swizzled_layout,
    make_half_bank_swizzled_layout,
    make_linear_layout,
    make_quarter_bank_swizzled_layout,
    make_swizzled_layout,
)


@pytest.mark.parametrize(("function", "want"), [
    (lambda i, j: i * 64 + j, strided((64, 64), 16)),
    (lambda i, j: (i, j), strided((64, 64), 16)),
    (lambda i, j: (j, i), strided((64, 64), 16, (1, 64))),
    (lambda i, j: i * 72 + j, strided((64, 64), 16, (72, 1))),
    (lambda i, j: (i, (j // 8 ^ i % 8) * 8 + j % 8), boxed((64, 64), 16, 128)),
    (lambda i, j: i * 64 + ((j // 8) ^ (i % 8)) * 8 + j % 8 if i < 64 else 0, boxed((64, 64), 16, 128)),
    (lambda i, j: (j // 32, i, (j // 8 % 4 ^ i // 2 % 4) * 8 + j % 8), boxed((64, 64), 16, 64)),
    (lambda i, j: (j // 16, i, (j // 8 % 2 ^ i // 4 % 2) * 8 + j % 8), boxed((64, 64), 16, 32)),
])  # fmt: skip
def test_functions_of_a_shared_tile(function: Callable[..., Any], want: Any):
    made = T.Layout((64, 64), function)
    assert made.shared(16) == want
    at = np.indices((64, 64))
    assert (want.byte(*at) == made.places * 2).all()


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_every_swizzle_is_found_again(bits: int):
    for width in (0, 32, 64, 128):
        shape = (16, 256 * 8 // bits)
        want = boxed(shape, bits, width) if width else strided(shape, bits)
        assert T.Layout(shape, lambda i, j, want=want: want.byte(i, j) * 8 // bits).shared(bits) == want


@pytest.mark.parametrize(
    "want",
    [
        instructions.mma_accumulator(),
        instructions.mma_a(16),
        instructions.wgmma_accumulator(64),
        instructions.accumulator(128, 64, (2, 1)),
        instructions.mma_a(8).reduced(0),
    ],
)
def test_functions_of_a_fragment(want: Any):
    copies = len(want.copies)
    if copies == 1:
        assert T.Fragment(want.shape, lambda *at: (want.thread(*at), want.slot(*at))) == want
        assert T.Fragment(want.shape, forward_thread_fn=want.thread, forward_index_fn=want.slot) == want
    else:
        far = np.asarray(want.copies)
        made = T.Fragment(
            want.shape,
            lambda *at: (want.thread(*at[:-1]) + far[at[-1]], want.slot(*at[:-1])),
            replicate=copies,
        )
        assert made == want
        assert (
            T.Fragment(
                want.shape,
                forward_thread_fn=lambda *at: want.thread(*at[:-1]) + far[at[-1]],
                replicate=copies,
            ).copies
            == want.copies
        )


def test_larger_fragments_from_smaller_ones():
    """The accumulators of wgmma, of mma's; and the same elements twice."""
    mma = T.Fragment((16, 8), lambda i, j: (i % 8 * 4 + j // 2, i // 8 * 2 + j % 2))
    assert mma == instructions.mma_accumulator()
    assert mma.repeat([1, 8]).repeat([4, 1], repeat_on_thread=True) == instructions.wgmma_accumulator(64)
    both = mma.repeat([2, 3])
    assert (
        both.slot(16, 0) == 3 * 4
        and both.slot(0, 8) == 4
        and mma.repeat([2, 3], lower_dim_first=False).slot(16, 0) == 4
    )
    assert mma.replicate(2).copies == (0, 32)


def test_slots_follow_the_order_of_elements():
    made = T.Fragment((32, 8), forward_thread_fn=lambda i, j: i)
    assert (made.slot(*np.indices((32, 8))) == np.arange(8)).all() and made.threads == 32
    # registers of 32 lanes: a row over a warp's threads, rows to warps in turn
    made = T.Fragment((8, 64), forward_thread_fn=lambda i, j: i % 4 * 32 + j // 2)
    assert made.slots == 4 and made.vector(1) == 2


def test_what_is_no_layout():
    with refused(
        TileValueError,
        "puts elements (0, 8) and (1, 0) into place 8",
        at="T.Layout((4, 16), lambda i, j: i * 8 + j)",
    ):
        T.Layout((4, 16), lambda i, j: i * 8 + j)
    with refused(TileValueError, "puts element (0, 15) at -15", expected="0 or more"):
        T.Layout((4, 16), lambda i, j: i * 16 - j)
    with refused(TileTypeError, "gives 0.0", expected="integers"):
        T.Layout((4, 16), lambda i, j: i * 16 + j / 2)
    with refused(TileTypeError, "T.Layout of the shape", expected="constant extents"):
        T.Layout((4, "n"), lambda i, j: i)
    with refused(
        TileValueError,
        "is no layout that the compiler can follow",
        expected="a sum of terms",
        write="make_swizzled_layout",
    ):
        T.Layout((32, 32), lambda i, j: i * 32 + (i + j) % 32).shared(32)
    with refused(TileValueError, "elements (0, 0) and (0, 1) into slot 0 of thread 0"):
        T.Fragment((4, 8), lambda i, j: (i, j // 2))
    with refused(TileValueError, "leaves slots empty: 8 places are taken of 7 threads × 2 slots"):
        T.Fragment((8,), lambda i: (i // 2 * 2, i % 2))
    with refused(TileValueError, "no layout that the compiler can follow", expected="each digit"):
        T.Fragment((32, 8), lambda i, j: ((i + j) % 32, j))
    with refused(TileTypeError, "takes one function", expected="forward_fn=lambda i, j: (thread, slot)"):
        T.Fragment((32, 8))
    with refused(TileTypeError, "gives one number"):
        T.Fragment((32, 8), lambda i, j: i)
    with refused(TileTypeError, "the function of T.Layout does not take 2 indices", write="lambda i, j"):
        T.Layout((8, 8), lambda i: i)
    with refused(TileTypeError, "the function of T.Fragment does not take 3 indices", expected="one more"):
        T.Fragment((8, 8), lambda i, j: (i, j), replicate=2)
    with refused(TileValueError, "T.Fragment with replicate=0"):
        T.Fragment((8, 8), lambda i, j: (i, j), replicate=0)
    made = T.Fragment((8, 8), lambda i, j: (i, j))
    for repeats in ([2], [2, 0], [1.5, 1], 2):
        with refused(
            TileValueError, f"repeat({repeats!r}) of a fragment of (8, 8)", expected="2 positive numbers"
        ):
            made.repeat(repeats)
    with refused(TileValueError, "replicate(0) of a fragment"):
        made.replicate(0)


def test_the_usual_names():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16")):
        with T.Kernel(1):
            a, odd = T.alloc_shared((64, 64), "float16"), T.alloc_shared((60, 20), "float16")
            assert make_swizzled_layout(a) == boxed((64, 64), 16, 128) == make_full_bank_swizzled_layout(a)
            assert make_half_bank_swizzled_layout(64, 64, 16) == boxed((64, 64), 16, 64)
            assert make_quarter_bank_swizzled_layout(a) == boxed((64, 64), 16, 32)
            assert make_linear_layout(a) == strided((64, 64), 16)
            line = T.alloc_shared((128,), "float32")
            assert make_linear_layout(line) == strided((128,), 32)
            assert make_swizzled_layout(odd) == strided((60, 20), 16, (28, 1))
            ring = T.alloc_shared((3, 64, 64), "float16")
            assert make_swizzled_layout(ring) == boxed((64, 64), 16, 128).staged(3)
            with refused(
                TileValueError,
                "make_swizzled_layout of a tile of 60 rows",
                at="make_swizzled_layout(odd, allow_pad=False)",
            ):
                make_swizzled_layout(odd, allow_pad=False)
            with refused(TileTypeError, "make_swizzled_layout of 3", expected="a tile of two axes"):
                make_swizzled_layout(3)

    kernel.trace()


def attention_like() -> Any:
    """Operands, accumulator and a tile for the result, all annotated the way they are usually written."""

    @T.prim_func
    def kernel(
        A: T.Tensor((256, 256), "float16"),
        B: T.Tensor((256, 128), "float16"),
        C: T.Tensor((256, 128), "float16"),
    ):
        with T.Kernel(2, threads=256) as bx:
            a, b = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, 128), "float16")
            c, out = T.alloc_fragment((128, 128), "float32"), T.alloc_shared((128, 128), "float16")
            T.annotate_layout(
                {a: tilescale.layout.make_swizzled_layout(a), out: tilescale.layout.make_swizzled_layout(out)}
            )
            T.annotate_layout(
                {b: T.Layout(b.shape, lambda i, j: (j // 64, i, (j // 8 % 8 ^ i % 8) * 8 + j % 8))}
            )
            T.clear(c)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[bx * 128, k * 64], a)
                T.copy(B[k * 64, 0], b)
                T.gemm(a, b, c)
            T.copy(c, out)
            T.copy(out, C[bx * 128, 0])

    return kernel


def printed(kernel: Any, arch: str) -> tuple[Any, str]:
    program, _ = pipeline.run(kernel.trace(), target(arch))
    return program, print_kernel(Lowering(program).run()).text


def test_what_agrees_with_the_hardware_keeps_it():
    program, text = printed(attention_like(), "sm_90a")
    assert "wgmma" in text and "tma_load" in text and not program.notes, program.notes
    args = {
        "A": data((256, 256), "float16", 1),
        "B": data((256, 128), "float16", 2),
        "C": empty((256, 128), "float16"),
    }
    agree(attention_like(), args)
    program, text = printed(attention_like(), "sm_80")
    assert "cp_async<16>" in text and "ldmatrix" in text
    agree(attention_like(), args, arch="sm_80")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_what_does_not_agree_is_kept_and_said(arch: str):
    """A padded tile: no TMA and no wgmma on Hopper, but copies ahead and ldmatrix all the same; a transposed
    one: neither."""

    def kernel(layout: Any) -> Any:
        @T.prim_func
        def kernel(
            A: T.Tensor((128, 256), "float16"),
            B: T.Tensor((256, 64), "float16"),
            C: T.Tensor((128, 64), "float32"),
        ):
            with T.Kernel(1, threads=128):
                a, b, c = (
                    T.alloc_shared((128, 32), "float16"),
                    T.alloc_shared((32, 64), "float16"),
                    T.alloc_fragment((128, 64), "float32"),
                )
                T.annotate_layout({a: layout})
                T.clear(c)
                for k in T.Pipelined(8, num_stages=2):
                    T.copy(A[0, k * 32], a)
                    T.copy(B[k * 32, 0], b)
                    T.gemm(a, b, c)
                T.copy(c, C)

        return kernel

    args = {
        "A": data((128, 256), "float16", 1),
        "B": data((256, 64), "float16", 2),
        "C": empty((128, 64), "float32"),
    }
    padded, transposed = (
        T.Layout((128, 32), lambda i, j: i * 40 + j),
        T.Layout((128, 32), lambda i, j: j * 136 + i),
    )
    program, text = printed(kernel(padded), arch)
    assert "wgmma" not in text and "cp_async<16>" in text and "ldmatrix" in text
    assert any("gives a another layout than TMA writes" in n for n in program.notes) == (arch == "sm_90a"), (
        program.notes
    )
    agree(kernel(padded), args, arch=arch)
    program, text = printed(kernel(transposed), arch)
    assert "cp_async" not in text and any(
        "chunks of 16 bytes that a is copied in apart" in n for n in program.notes
    ), program.notes
    agree(kernel(transposed), args, arch=arch)


def test_both_demands_on_a_shared_tile_are_shown():
    """What TMA writes by hand, and what a view reads, have one layout."""
    columns = T.Layout((64, 64), lambda i, j: (j, i))

    @T.prim_func
    def by_hand(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128):
            s, full = T.alloc_shared((64, 64), "float16"), T.alloc_barrier(1)
            T.annotate_layout({s: columns})
            with T.Scale("thread") as (t, n):
                if t == 0:
                    T.mbarrier_expect_tx(full, 8192)
                    T.tma_copy(A[0, 0], s, barrier=full)
                    T.mbarrier_arrive(full)
            T.mbarrier_wait_parity(full, 0)
            T.copy(s, B)

    @T.prim_func
    def seen(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 32), "uint32")):
        with T.Kernel(1, threads=128):
            s = T.alloc_shared((64, 64), "float16")
            T.annotate_layout({s: columns})  # neighbours that become one word do not lie side by side
            T.copy(A, s)
            T.copy(T.view(s, (64, 32), "uint32"), B)

    for kernel, word in ((by_hand, "T.tma_copy"), (seen, "T.view")):
        with refused(
            TileValueError,
            f"s is wanted in two layouts: {word} here wants (64, 64)",
            expected="one layout for a tile",
        ) as error:
            pipeline.run(kernel.trace(), target("sm_90a"))
        assert (
            "T.annotate_layout at" in error.text
            and "→ offset ×" in error.text
            and word in error.text.splitlines()[1]
        )


def test_what_annotations_refuse():
    def refuse(kind: Any, message: str, make: Callable[..., Any], **more: Any) -> None:
        @T.prim_func
        def kernel(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float32")):
            with T.Kernel(1, threads=128):
                s, f = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
                make(A, s, f)
                T.copy(A, s)
                T.copy(s, f)
                T.copy(f, B)

        with refused(kind, message, **more):
            pipeline.run(kernel.trace(), target("sm_90a"))

    full = make_full_bank_swizzled_layout(64, 64, 16)
    rows = T.Fragment((64, 64), lambda i, j: (i * 2 + j // 32, j % 32))
    refuse(
        TileTypeError,
        "A is a tensor",
        lambda A, s, f: T.annotate_layout({A: full}),
        expected="T.alloc_shared or T.alloc_fragment",
    )
    refuse(TileTypeError, "is no tile", lambda A, s, f: T.annotate_layout({"s": full}))
    refuse(
        TileTypeError,
        "T.annotate_layout of 3",
        lambda A, s, f: T.annotate_layout(3),
        expected="{tile: layout}",
    )
    refuse(
        TileTypeError,
        "gives f of (64, 64) a layout of (64, 64), a Shared",
        lambda A, s, f: T.annotate_layout({f: full}),
        at="T.annotate_layout({f: full})",
        expected="T.Fragment of (64, 64), since f lies in registers",
    )
    refuse(
        TileTypeError,
        "gives s of (64, 64) a layout of (32, 64)",
        lambda A, s, f: T.annotate_layout({s: T.Layout((32, 64), lambda i, j: (i, j))}),
        expected="T.Layout of (64, 64)",
    )
    refuse(TileTypeError, "gives s of float16 a layout for elements of 32 bits",
           lambda A, s, f: T.annotate_layout({s: make_full_bank_swizzled_layout(64, 64, 32)}))  # fmt: skip
    refuse(
        TileValueError,
        "over 256 threads",
        lambda A, s, f: T.annotate_layout({f: T.Fragment((64, 64), lambda i, j: (i * 4 + j // 16, j % 16))}),
        expected="over all 128 threads",
    )
    other = T.Fragment((64, 64), lambda i, j: (i + j // 32 * 64, j % 32))
    both = lambda A, s, f: [T.annotate_layout({f: layout}) for layout in (rows, other)]  # noqa: E731
    refuse(
        TileValueError, "f is given two layouts: here (64, 64) over 128 threads [i % 64 → thread × 1", both
    )


def test_a_ring_by_hand_under_a_swizzle():
    @T.prim_func
    def kernel(
        A: T.Tensor((64, 256), "float16"), B: T.Tensor((64, 256), "float16"), C: T.Tensor((64, 64), "float32")
    ):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((2, 64, 64), "float16"), T.alloc_shared((2, 64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.annotate_layout({a: make_swizzled_layout(a), b: make_swizzled_layout(b)})
            T.clear(c)
            for k in T.serial(4):
                T.copy(A[0, k * 64], a[k % 2, :, :])
                T.copy(B[0, k * 64], b[k % 2, :, :])
                T.gemm(a[k % 2, :, :], b[k % 2, :, :], c, transpose_B=True)
            T.copy(c, C)

    a, b = data((64, 256), "float16", 1), data((64, 256), "float16", 2)
    got = agree(kernel, {"A": a, "B": b, "C": empty((64, 64), "float32")}, exact=False)["C"]
    np.testing.assert_allclose(got, a.astype(float) @ b.astype(float).T, rtol=1e-3, atol=1e-2)


def test_views_of_swizzled_tiles():
    @T.prim_func
    def kernel(
        A: T.Tensor((64, 64), "float16"),
        B: T.Tensor((64, 64), "float16"),
        C: T.Tensor((64, 64), "float32"),
        D: T.Tensor((16, 4, 64), "float16"),
        E: T.Tensor((16,), "float16"),
    ):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c, f = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((16, 4, 64), "float16")
            T.annotate_layout({a: make_swizzled_layout(a), b: make_swizzled_layout(b)})
            split, flat = T.view(a, (16, 4, 64)), T.view(b, (4096,))
            T.copy(A, a)
            T.copy(B, b)
            T.copy(split, f)
            for i, j, k in T.Parallel(16, 4, 64):
                f[i, j, k] = f[i, j, k] * 2
            T.copy(f, split)
            for i in T.Parallel(16):
                split[i, 3, i] = 5
                E[i] = flat[i * 65]
            T.gemm(a, b, c, transpose_B=True, clear_accum=True)
            T.copy(c, C)
            T.copy(split, D)

    a, b = data((64, 64), "float16", 1), data((64, 64), "float16", 2)
    out = {"C": empty((64, 64), "float32"), "D": empty((16, 4, 64), "float16"), "E": empty((16,), "float16")}
    got = agree(kernel, {"A": a, "B": b, **out}, exact=False)
    want = (a * 2).reshape(16, 4, 64)
    want[np.arange(16), 3, np.arange(16)] = 5
    np.testing.assert_array_equal(got["D"], want)
    np.testing.assert_array_equal(got["E"], b.reshape(-1)[np.arange(16) * 65])
    product = want.reshape(64, 64).astype(float) @ b.astype(float).T
    np.testing.assert_allclose(got["C"], product, rtol=1e-3, atol=1e-2)


def test_a_fragment_over_a_part_of_the_threads_is_held_by_all():
    @T.prim_func
    def kernel(
        A: T.Tensor((32, 24), "float32"), B: T.Tensor((32, 24), "float32"), C: T.Tensor((32,), "float32")
    ):
        with T.Kernel(1, threads=128):
            f, sums = T.alloc_fragment((32, 24), "float32"), T.alloc_fragment((32,), "float32")
            T.annotate_layout({f: T.Fragment((32, 24), lambda i, j: (i, j))})
            T.copy(A, f)
            for i, j in T.Parallel(32, 24):
                f[i, j] = f[i, j] * 2 + j
            T.reduce_sum(f, sums)
            T.copy(f, B)
            T.copy(sums, C)
            for i in T.Parallel(32):
                T.atomic_add(C[i], sums[i])

    a = data((32, 24), "float32")
    got = agree(kernel, {"A": a, "B": np.zeros_like(a), "C": np.zeros(32, np.float32)})
    np.testing.assert_array_equal(got["B"], a * 2 + np.arange(24, dtype=np.float32))
    np.testing.assert_allclose(got["C"], got["B"].sum(1) * 2, rtol=1e-5)


def test_the_same_results_everywhere():
    kernel, args = (
        attention_like(),
        {"A": data((256, 256), "float16", 1), "B": data((256, 128), "float16", 2)},
    )
    got = np.zeros((256, 128), np.float16)
    run(kernel)(args["A"].copy(), args["B"].copy(), got)
    want = args["A"].astype(np.float64) @ args["B"].astype(np.float64)
    assert np.abs(got - want).max() < 0.1


def test_pictures(tmp_path: Any):
    pytest.importorskip("matplotlib")
    with refused(TileValueError, "there is no folder", write="os.makedirs("):
        tilescale.plot_layout(T.Fragment((32, 8), lambda i, j: (i, j)), tmp_path / "none" / "f.svg")
    assert (
        "32×8 on 32 threads"
        in tilescale.plot_layout(T.Fragment((32, 8), lambda i, j: (i, j)), tmp_path / "f.svg").read_text()
    )
    text = tilescale.plot_layout(
        T.Layout((8, 32), lambda i, j: (i, (j // 4 ^ i) * 4 + j % 4)), tmp_path / "s.svg"
    ).read_text()
    assert "swizzle 128 B" in text
    if toolchain.find_nvcc() is not None:
        made = tilescale.compile(gemm(512, 512, 512, 128, 128, 64, 2), target="cuda:sm_90a")
        assert tilescale.layout.layouts(made)["a"].shape[1:] == (128, 64)
