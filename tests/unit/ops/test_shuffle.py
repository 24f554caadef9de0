"""Shuffles and meetings by number: on the CPU and the simulator as on emulated threads; what each of them
refuses and finds."""

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
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.ops.shuffle import taken_from
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError

KINDS = ("xor", "up", "down", "from")


def shuffles(dtype: str, width: int = 32) -> Any:
    """Each kind, by a constant and by what a thread computes."""

    @T.prim_func
    def kernel(A: T.Tensor((64,), dtype), C: T.Tensor((5, 64), dtype)):
        with T.Kernel(1, threads=64):
            with T.Scale("thread") as (t, n):
                v = T.alloc_var(dtype)
                v = A[t]
                C[0, t] = T.shfl_xor(v, 5, width)
                C[1, t] = T.shfl_up(v, 3, width)
                C[2, t] = T.shfl_down(v, 2, width)
                C[3, t] = T.shfl_sync(v, 1, width)
                C[4, t] = T.shfl_sync(v, (t * 7) % 32, width)

    return kernel


def wanted(a: Any, width: int) -> Any:
    lane, first = np.arange(64) % 32, np.arange(64) // 32 * 32
    by = (5, 3, 2, 1, np.arange(64) * 7 % 32)
    return np.stack(
        [a[first + taken_from(k, lane, b, width)] for k, b in zip((*KINDS, "from"), by, strict=True)]
    )


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "bfloat16", "float64", "int8", "uint16", "int32", "int64"]
)
def test_values_of_every_size(dtype: str):
    args = {"A": data((64,), dtype, 1), "C": empty((5, 64), dtype)}
    got = agree(shuffles(dtype), args, exact=True)["C"]
    assert (got.view(np.uint8) == wanted(args["A"], 32).view(np.uint8)).all()


@pytest.mark.parametrize("width", [1, 4, 16])
def test_groups_of_lanes(width: int):
    args = {"A": data((64,), "int32", 1), "C": empty((5, 64), "int32")}
    assert (agree(shuffles("int32", width), args, exact=True)["C"] == wanted(args["A"], width)).all()
    out = args["C"].copy()
    run(shuffles("int32", width))(args["A"].copy(), out)
    assert (out == wanted(args["A"], width)).all()


def test_where_lanes_come_from():
    """By the table of PTX ISA 9.0, "shfl.sync": what lies outside the group is one's own."""
    lanes = np.arange(32)
    assert taken_from("up", lanes, 1, 8).tolist() == [
        max(k - 1, k // 8 * 8) if k % 8 else k for k in range(32)
    ]
    assert taken_from("down", lanes, 8, 32).tolist() == [k + 8 if k < 24 else k for k in range(32)]
    # Earlier groups can be reached.
    assert taken_from("xor", lanes, 8, 8).tolist() == [k ^ 8 if k & 8 else k for k in range(32)]
    assert taken_from("from", lanes, 9, 8).tolist() == [k // 8 * 8 + 1 for k in range(32)]


def sums(dtype: str = "float32") -> Any:
    """A sum over a warp by halves, in a Python loop."""

    @T.prim_func
    def kernel(A: T.Tensor((4, 128), dtype), C: T.Tensor((4, 4), dtype)):
        with T.Kernel(4, threads=128) as b:
            with T.Scale("warp") as (w, n), T.Scale("thread") as (lane, m):
                s = T.alloc_var(dtype)
                s = A[b, w * 32 + lane]
                for d in (16, 8, 4, 2, 1):
                    s = s + T.shfl_down(s, d)
                if lane == 0:
                    C[b, w] = s

    return kernel


def test_a_sum_over_a_warp():
    args = {"A": data((4, 128), "float32", 1), "C": empty((4, 4), "float32")}
    agree(sums(), args)
    out = args["C"].copy()
    run(sums())(args["A"].copy(), out)
    assert np.abs(out - args["A"].reshape(4, 4, 32).sum(-1)).max() < 1e-5


def halves(first: int = 1, count: int = 128, told: bool = True) -> Any:
    """Each half of a block's warps passes on what it wrote among itself; the whole block then reads all."""

    @T.prim_func
    def kernel(A: T.Tensor((256,), "int32"), C: T.Tensor((2, 256), "int32")):
        with T.Kernel(1, threads=256):
            s = T.alloc_shared((256,), "int32")
            with T.Scale("thread") as (t, n):
                s[t] = A[t] + 1
                if t < 128:
                    if told:
                        T.sync_threads(first, count)
                    C[0, t] = s[127 - t]
                else:
                    if told:
                        T.sync_threads(first + 1, count)
                    C[0, t] = s[383 - t]
                T.sync_threads()
                C[1, t] = s[255 - t]

    return kernel


@pytest.mark.parametrize("first", [1, 7, 13])
def test_meetings_of_some_threads(first: int):
    args = {"A": data((256,), "int32", 1), "C": empty((2, 256), "int32")}
    got = agree(halves(first), args, exact=True)["C"]
    assert (got[1] == args["A"][::-1] + 1).all() and (got[0, :128] == args["A"][127::-1] + 1).all()
    out = args["C"].copy()
    run(halves(first))(args["A"].copy(), out)
    assert (out == got).all()


def test_numbers_that_the_kernel_uses_itself():
    """Warpgroups meet at barriers of their own; the author's get others."""

    @T.prim_func
    def kernel(A: T.Tensor((256,), "int32"), C: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            s = T.alloc_shared((256,), "int32")
            with T.Scale("warpgroup") as (w, n):
                for i in T.Parallel(128):
                    s[w * 128 + i] = A[w * 128 + i]
                T.sync_threads(1, 256)
                for i in T.Parallel(128):
                    C[w * 128 + i] = s[255 - w * 128 - i]

    text = print_kernel(lowered(kernel)[0]).text
    assert "ts::named_barrier(3, 256);  // T.sync_threads(1, 256)" in text, text
    got = agree(kernel, {"A": data((256,), "int32", 1), "C": empty((256,), "int32")}, exact=True)
    assert "named_barrier(7, 128)" in print_kernel(lowered(halves(7))[0]).text and got["C"].any()


def test_a_missing_meeting_is_found():
    args = {"A": data((256,), "int32", 1), "C": empty((2, 256), "int32")}
    with pytest.raises(emulator.EmulationError, match="race in"):
        emulator.launch(halves(told=False), args)
    report = halves(told=False).check(args=args, seeds=2)
    assert any(f.kind == "race" for f in report.findings) and halves().check(args=args, seeds=2), report


def test_who_does_not_come_is_missed():
    @T.prim_func
    def few(A: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            with T.Scale("thread") as (t, n):
                if t < 32:
                    T.sync_threads(1, 64)

    @T.prim_func
    def lanes(A: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            with T.Scale("thread") as (t, n):
                if t < 8:
                    A[t] = T.shfl_xor(t, 1)

    args = {"A": data((64,), "int32", 1)}
    for kernel, text in ((few, "T.sync_threads"), (lanes, "24 lanes of warp 0 at T.shfl_xor")):
        report = kernel.check(args=args, seeds=1)
        assert any(f.kind == "deadlock" and text in str(f) for f in report.findings), report
    with pytest.raises(emulator.EmulationError, match="no role of the block can go on|meet"):
        emulator.launch(few, args)
    with pytest.raises(emulator.EmulationError, match="a shuffle in part of a warp"):
        emulator.launch(lanes, args)


def test_a_warp_meets():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32"), C: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((64,), "int32")
            with T.Scale("thread") as (t, n):
                s[t] = A[t]
                T.sync_warp()
                C[t] = s[T.get_warp_idx() * 32 + 31 - T.get_lane_idx()]

    args = {"A": data((64,), "int32", 1), "C": empty((64,), "int32")}
    got = agree(kernel, args, exact=True)["C"]
    out = args["C"].copy()
    run(kernel)(args["A"].copy(), out)
    assert (
        "__syncwarp();" in print_kernel(lowered(kernel)[0]).text
        and (out == got).all()
        and kernel.check(args=args, seeds=3)
    )


@pytest.mark.parametrize("threads", [1, 48, 64])
@pytest.mark.parametrize("scale", ["block", "thread"])
def test_a_block_of_any_number_of_threads_synchronizes(threads: int, scale: str):
    @T.prim_func
    def together(A: T.Tensor((threads,), "int32"), C: T.Tensor((threads,), "int32")):
        with T.Kernel(1, threads=threads):
            s = T.alloc_shared((threads,), "int32")
            T.copy(A, s)
            T.sync_threads()
            for i in T.Parallel(threads):
                C[i] = s[threads - 1 - i]

    @T.prim_func
    def by_thread(A: T.Tensor((threads,), "int32"), C: T.Tensor((threads,), "int32")):
        with T.Kernel(1, threads=threads):
            s = T.alloc_shared((threads,), "int32")
            t = T.get_thread_binding()
            s[t] = A[t]
            T.tvm_storage_sync("shared.dyn")
            C[t] = s[threads - 1 - t]

    kernel = together if scale == "block" else by_thread
    args = {"A": data((threads,), "int32", 1), "C": empty((threads,), "int32")}
    assert (agree(kernel, args, exact=True)["C"] == args["A"][::-1]).all()
    out = args["C"].copy()
    run(kernel)(args["A"].copy(), out)
    assert (out == args["A"][::-1]).all()


def test_what_they_refuse():
    def refuse(kind: Any, message: str, statement: Any, scale: str = "thread", **more: Any) -> None:
        @T.prim_func
        def kernel(A: T.Tensor((64,), "float32")):
            with T.Kernel(1, threads=128):
                with T.Scale(scale) as (i, n):
                    statement(A, i)

        with refused(kind, message, **more):
            kernel.trace()

    refuse(
        TileSyntaxError,
        "T.shfl_xor is a thread's",
        lambda A, i: T.shfl_xor(i, 1),
        "warp",
        write='T.Scale("thread")',
    )
    refuse(
        TileValueError,
        "T.shfl_down by 32 lanes",
        lambda A, i: T.shfl_down(i, 32),
        at="T.shfl_down(i, 32)",
        expected="0 ≤ lanes < 32",
    )
    refuse(
        TileValueError,
        "T.shfl_sync with width=12",
        lambda A, i: T.shfl_sync(i, 1, 12),
        expected="1, 2, 4, 8, 16 or 32",
    )
    refuse(
        TileTypeError,
        "T.shfl_up with mask=",
        lambda A, i: T.shfl_up(i, 1, mask=i),
        expected="a constant",
        write="leave mask out",
    )
    refuse(TileValueError, "T.sync_warp with mask=3", lambda A, i: T.sync_warp(3), expected="leave mask out")
    refuse(TileTypeError, "a tile", lambda A, i: T.shfl_up(A, 1))
    refuse(
        TileValueError,
        "T.sync_threads at barrier 16",
        lambda A, i: T.sync_threads(16),
        expected="0 ≤ barrier < 16",
    )
    refuse(
        TileValueError,
        "T.sync_threads of 48 threads",
        lambda A, i: T.sync_threads(1, 48),
        expected="a multiple of 32, at most the block's 128",
    )
    refuse(TileValueError, "T.sync_threads of 256 threads", lambda A, i: T.sync_threads(1, 256))
    refuse(
        TileValueError,
        "T.sync_threads of 64 threads at barrier 0",
        lambda A, i: T.sync_threads(0, 64),
        write="T.sync_threads(1, 64)",
    )
    refuse(
        TileTypeError,
        "T.sync_threads with the barrier",
        lambda A, i: T.sync_threads(i),
        expected="a constant",
    )
    refuse(
        TileSyntaxError,
        "T.get_warp_idx is a thread's",
        lambda A, i: T.get_warp_idx(),
        "warp",
        write='T.Scale("warp") as (w, n)',
    )
    refuse(
        TileValueError,
        "T.tvm_storage_sync of 'global'",
        lambda A, i: T.tvm_storage_sync("global"),
        expected='"shared", "shared.dyn" or "warp"',
        write="T.sync_grid()",
    )
    refuse(TileSyntaxError, "T.sync_warp is a thread's", lambda A, i: T.sync_warp(), "warpgroup")
    refuse(
        TileValueError,
        "T.named_barrier_arrive at barrier 0",
        lambda A, i: T.named_barrier_arrive(0, 128),
        expected="1 ≤ barrier < 16",
    )
    refuse(TileValueError, "T.named_barrier_arrive of 8 threads", lambda A, i: T.named_barrier_arrive(1, 8))
    refuse(
        TileTypeError,
        "T.named_barrier_arrive with the number of threads",
        lambda A, i: T.named_barrier_arrive(1, i),
        expected="a constant",
    )

    @T.prim_func
    def all_come(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=128):
            T.sync_threads(1, 64)

    with refused(
        TileValueError,
        "of 64 threads where all 128 come",
        at="T.sync_threads(1, 64)",
        write='T.Scale("warpgroup")',
    ):
        all_come.trace()

    @T.prim_func
    def all_arrive(A: T.Tensor((64,), "float32"), n: T.int32):
        with T.Kernel(1, threads=128):
            T.get_thread_binding()
            if n > 0:
                T.named_barrier_arrive(1, 128)

    with refused(
        TileValueError, "T.named_barrier_arrive where all 128 come", at="T.named_barrier_arrive(1, 128)"
    ):
        all_arrive.trace()


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
def test_nvcc_takes_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", "nvcc")
    kernels = (shuffles("bfloat16"), shuffles("int8"), shuffles("float64"), halves(), handed_on("thread", 64))
    for kernel in kernels:
        compiled(kernel, "sm_80")


def handed_on(scale: str, threads: int) -> Any:
    """One half fills a tile round by round, the other one reads it: who fills does not wait for who reads
    but for the round before."""
    half = threads // 2

    @T.prim_func
    def kernel(A: T.Tensor((4, half), "int32"), B: T.Tensor((4, half), "int32")):
        with T.Kernel(1, threads=threads):
            s = T.alloc_shared((half,), "int32")
            with T.Scale(scale) as (w, n):
                for i in T.serial(4):
                    if w * (threads // n) < half:
                        if i > 0:
                            T.sync_threads(2, threads)
                        if scale == "thread":
                            s[w] = A[i, w]
                        else:
                            first = w * (threads // n)
                            T.copy(A[i, first : first + threads // n], s[first : first + threads // n])
                        T.named_barrier_arrive(1, threads)
                    else:
                        T.sync_threads(1, threads)
                        if scale == "thread":
                            B[i, w - half] = s[threads - 1 - w]
                        else:
                            there = w * (threads // n) - half
                            T.copy(s[there : there + threads // n], B[i, there : there + threads // n])
                        if i < 3:
                            T.named_barrier_arrive(2, threads)

    return kernel


@pytest.mark.parametrize("scale, threads", [("thread", 64), ("warp", 128), ("warpgroup", 256)])
def test_arriving_without_waiting(scale: str, threads: int):
    kernel = handed_on(scale, threads)
    a = data((4, threads // 2), "int32", 1)
    args = {"A": a, "B": empty((4, threads // 2), "int32")}
    want = a[:, ::-1] if scale == "thread" else a
    assert (agree(kernel, args, exact=True)["B"] == want).all()
    got = args["B"].copy()
    run(kernel)(a.copy(), got)
    assert (got == want).all()
    assert kernel.check(args=args, seeds=3)
    text = print_kernel(lowered(kernel)[0]).text
    assert "ts::named_barrier_arrive(" in text and f"// T.named_barrier_arrive(1, {threads})" in text


def test_the_first_of_two_barriers_of_a_number_that_all_come_to():
    """Conditions on the thread's index at the scale of the block, as TileLang's programs have them."""

    @T.prim_func
    def kernel(A: T.Tensor((1,), "int32"), B: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            s = T.alloc_shared((1,), "int32")
            if tx < 32:
                if tx == 0:
                    s[0] = A[0] + 1
                T.named_barrier_arrive(10, 64)
                T.sync_threads(11, 64)
            else:
                T.sync_threads(10, 64)
                if tx == 32:
                    B[0] = s[0]
                T.named_barrier_arrive(11, 64)

    args = {"A": np.array([41], "int32"), "B": empty((1,), "int32")}
    assert kernel.check(args=args, seeds=3)
    assert agree(kernel, args)["B"] == 42


def test_numbers_that_are_constants_of_a_dtype():
    @T.prim_func
    def kernel(B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            number = T.int32(1)
            T.sync_threads(number)
            B[tx] = tx

    assert agree(kernel, {"B": empty((64,), "int32")})["B"].tolist() == list(range(64))


def test_who_arrives_knows_nothing_of_the_others():
    """It goes on before they come: what they wrote is a race, and so is what it overwrites that they read."""

    def arrives(reads: bool) -> Any:
        @T.prim_func
        def kernel(B: T.Tensor((64,), "int32")):
            with T.Kernel(1, threads=64):
                s = T.alloc_shared((64,), "int32")
                with T.Scale("thread") as (t, n):
                    s[t] = t
                    if t < 32:
                        T.named_barrier_arrive(1, 64)
                        if reads:
                            B[t] = s[t + 32]
                        else:
                            s[t] = 0
                    else:
                        T.sync_threads(1, 64)
                        B[t] = s[t - 32]

        return kernel

    args = {"B": empty((64,), "int32")}
    for reads in (False, True):
        report = arrives(reads).check(args=args, seeds=2)
        assert report.kinds == {"race"}, report
        with pytest.raises(emulator.EmulationError, match="race in"):
            emulator.launch(arrives(reads), args)


def test_an_arrival_that_nobody_makes():
    @T.prim_func
    def kernel(B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            with T.Scale("thread") as (t, n):
                if t < 32:
                    T.sync_threads(1, 64)
                B[t] = t

    args = {"B": empty((64,), "int32")}
    report = kernel.check(args=args, seeds=1)
    assert report.kinds == {"deadlock"} and "32 have come" in str(report), report


@pytest.mark.parametrize("writer, found", [(3, False), (40, True)])
def test_several_readers_of_a_warp_have_met_their_warp_alone(writer: int, found: bool):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((4,), "int32")
            T.fill(s, 1)
            T.sync_threads()
            with T.Scale("thread") as (t, n):
                if t < 32:
                    A[t] = s[0]
                T.sync_warp()
                if t == writer:
                    s[0] = 2

    if found:
        with pytest.raises(emulator.EmulationError, match="race in"):
            agree(kernel, {"A": empty((64,), "int32")})
    else:
        agree(kernel, {"A": empty((64,), "int32")})
