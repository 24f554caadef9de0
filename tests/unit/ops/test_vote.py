"""Votes of a warp and of a block: on the CPU and the simulator as on emulated threads; what each of them
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
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError

N = 64


@T.prim_func
def votes(A: T.Tensor((N,), "int32"), C: T.Tensor((8, N), "int64")):
    with T.Kernel(1, threads=N):
        with T.Scale("thread") as (t, n):
            v = T.alloc_var("int32")
            v = A[t]
            C[0, t] = T.any_sync(v == 5)
            C[1, t] = T.all_sync(v > -5, 0xFFFFFFFF)
            C[2, t] = T.cast(T.ballot_sync(v), "int64")
            C[3, t] = T.cast(T.ballot(v > 0), "int64")
            C[4, t] = T.cast(T.activemask(), "int64")
            C[5, t] = T.cast(T.match_any_sync(v), "int64")
            C[6, t] = T.cast(T.match_all_sync(t // 32 * v), "int64")
            C[7, t] = T.cast(T.tvm_warp_activemask(), "int64")


def wanted(a: Any) -> Any:
    def bits(tests: Any) -> int:
        return int(sum(int(x) << k for k, x in enumerate(tests)))

    rows = []
    for w in range(N // 32):
        v, every = a[w * 32 : w * 32 + 32], (1 << 32) - 1
        same = w == 0 or (v == v[0]).all()
        rows.append([
            [int((v == 5).any())] * 32, [int((v > -5).all())] * 32, [bits(v != 0)] * 32, [bits(v > 0)] * 32,
            [every] * 32, [bits(v == x) for x in v], [every if same else 0] * 32, [every] * 32,
        ])  # fmt: skip
    return np.concatenate([np.array(r, np.int64) for r in rows], 1)


def on_all(kernel: Any, args: dict[str, Any], out: str = "C") -> Any:
    """The output on the simulator, the emulator and the CPU, which agree."""
    got = agree(kernel, args, exact=True)[out]
    given = {name: array.copy() for name, array in args.items()}
    run(kernel)(*given.values())
    assert (given[out] == got).all(), (given[out], got)
    return got


def test_votes_of_a_warp():
    args = {"A": data((N,), "int32", 1), "C": empty((8, N), "int64")}
    assert (on_all(votes, args) == wanted(args["A"])).all()
    assert votes.check(args=args, seeds=2)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "uint32"])
def test_numbers_of_every_size_match(dtype: str):
    @T.prim_func
    def kernel(A: T.Tensor((32,), dtype), C: T.Tensor((2, 32), "uint32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            C[0, t] = T.match_any_sync(A[t])
            C[1, t] = T.match_all_sync(A[t])

    a = data((32,), dtype, 1)
    got = on_all(kernel, {"A": a, "C": empty((2, 32), "uint32")})
    assert got[0].tolist() == [sum(1 << k for k in range(32) if a[k] == x) for x in a] and not got[1].any()


def test_votes_at_the_scale_of_the_block():
    """As TileLang's programs have them: of a condition on the thread's index, and of a constant."""

    @T.prim_func
    def kernel(C: T.Tensor((4, N), "int32")):
        with T.Kernel(1, threads=N):
            tx = T.get_thread_binding()
            some = T.any_sync(tx == 0)
            C[0, tx] = some
            C[1, tx] = T.all_sync(1)
            C[2, tx] = T.cast(T.ballot_sync(tx >= 7), "int32")
            if T.ballot(tx == 40) > 0:
                C[3, tx] = 1

    got = on_all(kernel, {"C": empty((4, N), "int32")})
    assert (got[0] == [1] * 32 + [0] * 32).all() and (got[1] == 1).all()
    assert (got[2] == [-128] * 32 + [-1] * 32).all() and (got[3] == [0] * 32 + [1] * 32).all()


@pytest.mark.parametrize("threads", [32, 128])
def test_votes_of_a_block(threads: int):
    """They are barriers: what was written before is read behind."""

    @T.prim_func
    def kernel(A: T.Tensor((threads,), "int32"), C: T.Tensor((5, threads), "int32")):
        with T.Kernel(1, threads=threads):
            s = T.alloc_shared((threads,), "int32")
            with T.Scale("thread") as (t, n):
                s[t] = A[t]
                C[0, t] = T.syncthreads_count(A[t])
                C[1, t] = s[threads - 1 - t]
                for i in T.serial(2):
                    C[2 + i, t] = T.syncthreads_and(A[t] > -4 - 4 * i)
                C[4, t] = T.syncthreads_or(A[t] == 5)

    a = data((threads,), "int32", 1)
    args = {"A": a, "C": empty((5, threads), "int32")}
    got = on_all(kernel, args)
    want = [[(a != 0).sum()] * threads, a[::-1], [(a > -4).all()] * threads, [True] * threads, [(a == 5).any()] * threads]  # fmt: skip
    assert (got == np.array(want, np.int32)).all() and kernel.check(args=args, seeds=2)
    assert "ts::block_count(" in print_kernel(lowered(kernel)[0]).text


def test_votes_of_a_block_at_its_scale():
    @T.prim_func
    def kernel(C: T.Tensor((3, N), "int32")):
        with T.Kernel(1, threads=N):
            tx = T.get_thread_binding()
            C[0, tx] = T.syncthreads_count(tx < 16)
            C[1, tx] = T.syncthreads_and(tx != 0)
            C[2, tx] = T.syncthreads_or(0)

    got = on_all(kernel, {"C": empty((3, N), "int32")})
    assert (got == np.array([[16], [0], [0]])).all()


def test_votes_beside_a_producer():
    """The block's threads are those that the author counts; who fills the stages goes its own way."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64, 256), "float16"), D: T.Tensor((64, 64), "float32"), C: T.Tensor((128,), "int32")
    ):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(4, num_stages=3):
                T.copy(A[0, k * 64], a)
                T.copy(A[0, k * 64], b)
                T.gemm(a, b, c)
            with T.Scale("thread") as (t, n):
                C[t] = T.syncthreads_count(t % 3 == 0) + T.popcount(T.cast(T.ballot(t < 40), "int32"))
            T.copy(c, D)

    made, program = lowered(kernel)
    text = print_kernel(made).text
    assert made.threads > 128 and "ts::block_count(" in text
    args = {"A": data((64, 256), "float16", 1), "D": empty((64, 64), "float32"), "C": empty((128,), "int32")}
    got = emulator.run(made, program, args, 0)["C"]
    assert got.tolist() == [43 + 32] * 32 + [43 + 8] * 32 + [43] * 64


LOW, HIGH = 0x0000FFFF, 0xFFFF0000


@T.prim_func
def halves(A: T.Tensor((N,), "int32"), C: T.Tensor((6, N), "int64")):
    with T.Kernel(1, threads=N):
        t = T.get_thread_binding()
        if t % 32 < 16:
            C[0, t] = T.any_sync(A[t] == 5, LOW)
            C[1, t] = T.all_sync(A[t] > -5, mask=LOW)
            C[2, t] = T.cast(T.ballot_sync(A[t] > 0, LOW), "int64")
            C[3, t] = T.cast(T.match_any_sync(A[t], LOW), "int64")
            C[4, t] = T.cast(T.match_all_sync(t // 32 * A[t], LOW), "int64")
            C[5, t] = T.shfl_xor(A[t], 3, mask=LOW)
        else:
            for i in T.serial(3):
                C[i, t] = T.any_sync(A[t] == i, HIGH)
            C[3, t] = T.cast(T.ballot_sync(A[t] > 0, HIGH), "int64")
            C[5, t] = T.shfl_down(A[t], 1, width=16, mask=HIGH)


def test_some_lanes_of_a_warp():
    """Two parts of a warp vote apart, each about its own lanes, at different places of the program."""
    a = data((N,), "int32", 1)
    args = {"A": a, "C": empty((6, N), "int64")}
    got = on_all(halves, args)
    assert halves.check(args=args, seeds=3)
    for w in range(N // 32):
        v, low, high = a[w * 32 : w * 32 + 32], slice(w * 32, w * 32 + 16), slice(w * 32 + 16, w * 32 + 32)
        bits = [sum(int(x > 0) << k for k, x in enumerate(v) if k // 16 == part) for part in range(2)]
        assert (got[0, low] == (v[:16] == 5).any()).all() and (got[1, low] == (v[:16] > -5).all()).all()
        assert (got[2, low] == bits[0]).all() and (got[3, high] == bits[1]).all()
        assert got[3, low].tolist() == [sum(int(y == x) << k for k, y in enumerate(v[:16])) for x in v[:16]]
        assert (got[4, low] == (0 if w else LOW)).all()
        assert (got[5, low] == v[np.arange(16) ^ 3]).all()
        assert [got[i, high].tolist() for i in range(3)] == [
            [int((v[16:] == i).any())] * 16 for i in range(3)
        ]
        assert got[5, high].tolist() == [*v[17:], v[31]]


def test_lanes_that_the_mask_does_not_name():
    @T.prim_func
    def too_many(C: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=N):
            t = T.get_thread_binding()
            C[t] = T.any_sync(t == 0, LOW)

    @T.prim_func
    def too_few(C: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=N):
            t = T.get_thread_binding()
            if t % 32 < 15:
                C[t] = T.any_sync(t == 0, LOW)

    @T.prim_func
    def from_outside(C: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=N):
            t = T.get_thread_binding()
            if t % 32 < 16:
                C[t] = T.shfl_xor(t, 16, mask=LOW)

    args = {"C": empty((N,), "int32")}
    for kernel, kind, text in (
        (too_many, "mismatch", "lane 16 comes to T.any_sync, whose mask 0x0000ffff does not name it"),
        (too_few, "deadlock", "1 lanes of warp 0 at T.any_sync"),
        (from_outside, "mismatch", "lane 0 asks for the value of lane 16, which is not in the mask"),
    ):
        report = kernel.check(args=args, seeds=1)
        assert any(f.kind == kind and text in str(f) for f in report.findings), report
        with pytest.raises(
            emulator.EmulationError, match="not of the lanes of its mask|lane that does not come"
        ):
            emulator.launch(kernel, args)


def test_who_does_not_come_is_missed():
    @T.prim_func
    def lanes(C: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=N):
            with T.Scale("thread") as (t, n):
                if t < 8:
                    C[t] = T.any_sync(t == 0)

    @T.prim_func
    def threads(C: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=N):
            with T.Scale("thread") as (t, n):
                if t < 32:
                    C[t] = T.syncthreads_count(t == 0)

    args = {"C": empty((N,), "int32")}
    for kernel, text in ((lanes, "24 lanes of warp 0 at T.any_sync"), (threads, "T.syncthreads_count")):
        report = kernel.check(args=args, seeds=1)
        assert any(f.kind == "deadlock" and text in str(f) for f in report.findings), report
    with pytest.raises(emulator.EmulationError, match="a vote in part of a warp"):
        emulator.launch(lanes, args)
    with pytest.raises(emulator.EmulationError, match="a barrier that not all of its threads reach"):
        emulator.launch(threads, args)


def test_what_they_refuse():
    def refuse(
        kind: Any, message: str, statement: Any, scale: str = "thread", threads: int = 128, **more: Any
    ) -> None:
        @T.prim_func
        def kernel(A: T.Tensor((64,), "float32"), n: T.int32):
            with T.Kernel(1, threads=threads):
                with T.Scale(scale) as (i, k):
                    statement(A, n)

        with refused(kind, message, **more):
            kernel.trace()

    refuse(
        TileSyntaxError,
        "T.any_sync is a thread's",
        lambda A, n: T.any_sync(1),
        "warp",
        write='T.Scale("thread")',
    )
    refuse(
        TileTypeError, "T.all_sync of a predicate of float32", lambda A, n: T.all_sync(A[0]), write="x != 0"
    )
    refuse(TileTypeError, "T.ballot of a predicate of float32", lambda A, n: T.ballot(0.5))
    refuse(
        TileTypeError, "T.match_any_sync of float32", lambda A, n: T.match_any_sync(A[0]), expected="integer"
    )
    refuse(TileTypeError, "a tile", lambda A, n: T.any_sync(A))
    refuse(
        TileValueError,
        "T.any_sync with mask=0",
        lambda A, n: T.any_sync(1, 0),
        at="T.any_sync(1, 0)",
        expected="0 < mask",
    )
    refuse(TileValueError, "T.all_sync with mask=", lambda A, n: T.all_sync(1, 1 << 32))
    refuse(
        TileTypeError,
        "T.ballot_sync with mask=",
        lambda A, n: T.ballot_sync(1, mask=n),
        expected="a constant",
    )
    refuse(TileTypeError, "T.ballot_sync with mask=True", lambda A, n: T.ballot_sync(1, mask=True))
    refuse(TileValueError, "by 24 threads", lambda A, n: T.activemask(), threads=24, expected="whole warps")
    refuse(TileTypeError, "T.syncthreads_or of a predicate of float32", lambda A, n: T.syncthreads_or(A[0]))


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
def test_nvcc_takes_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", "nvcc")

    @T.prim_func
    def block(A: T.Tensor((N,), "int64"), C: T.Tensor((4, N), "int32")):
        with T.Kernel(1, threads=N):
            t = T.get_thread_binding()
            C[0, t] = T.syncthreads_count(A[t])
            C[1, t] = T.syncthreads_and(A[t])
            C[2, t] = T.syncthreads_or(A[t])
            C[3, t] = T.cast(T.match_all_sync(A[t]), "int32")

    for kernel in (votes, block, halves):
        compiled(kernel, "sm_80")
