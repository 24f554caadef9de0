"""Fences: enough of them (the emulated threads find a race where any one is taken out) and none to spare."""

from __future__ import annotations

import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty
from tilescale.compiler import emulator
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.passes import pipeline
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx
from tilescale.env import WITHOUT


def scheduled(kernel):
    return pipeline.run(kernel.trace(), target("sm_80"))[0]


def reasons(program):
    found = []
    structural_walk(
        program.func.body,
        (
            ir.Call,
            lambda c: (
                found.append((str(c.attrs["scope"]), str(c.attrs["why"]))) if c.op.name == "ts.sync" else None
            ),
        ),
    )
    return found


def without(program, number):
    """The program without its fence ``number``."""
    seen = []

    def drop(s):
        if isinstance(s.value, ir.Call) and s.value.op.name == "ts.sync":
            seen.append(s)
            if len(seen) - 1 == number:
                return tirx.Evaluate(tirx.IntImm("int32", 0))
        return s

    return program.with_body(structural_map(program.func.body, (tirx.Evaluate, drop)))


def tiles(stages: int):
    @T.prim_func
    def pipeline_of_tiles(
        A: T.Tensor((64, 96), "float16"), B: T.Tensor((96, 64), "float16"), C: T.Tensor((64, 64), "float32")
    ):
        with T.Kernel(1, threads=128):
            a, b, c = (
                T.alloc_shared((64, 32), "float16"),
                T.alloc_shared((32, 64), "float16"),
                T.alloc_fragment((64, 64), "float32"),
            )
            T.clear(c)
            for k in T.Pipelined(3, num_stages=stages):
                T.copy(A[0, k * 32], a)
                T.copy(B[k * 32, 0], b)
                T.gemm(a, b, c)
            T.copy(c, C)

    return pipeline_of_tiles


pipeline_of_tiles = tiles(1)


@T.prim_func
def across_warps(A: T.Tensor((4, 512), "float32"), B: T.Tensor((4,), "float32")):
    with T.Kernel(1, threads=256):
        f, total = T.alloc_fragment((512,), "float32"), T.alloc_fragment((1,), "float32")
        for r in T.serial(4):
            T.copy(A[r, 0], f)
            T.reduce_sum(f, total)
            B[r] = total[0]


@T.prim_func
def through_memory(
    A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32"), C: T.Tensor((128,), "float32")
):
    with T.Kernel(1, threads=64):
        s = T.alloc_shared((128,), "float32")
        T.copy(A, s)
        for i in T.Parallel(128):
            B[i] = s[127 - i]
        for i in T.Parallel(128):
            s[i] = B[i] * 2
        for i in T.Parallel(128):
            C[i] = s[i ^ 1] + B[127 - i]


@T.prim_func
def by_warps(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64):
        s = T.alloc_shared((64,), "float32")
        T.copy(A, s)
        with T.Scale("warp") as (w, n):
            t = T.alloc_shared((32,), "float32")
            for i in T.Parallel(32):
                t[31 - i] = s[w * 32 + (i + 7) % 32]
            for i in T.Parallel(32):
                s[w * 32 + i] = t[i]
        for i in T.Parallel(64):
            B[i] = s[63 - i]


@T.prim_func
def last_block(
    A: T.Tensor((256,), "float32"),
    P: T.Tensor((4,), "float32"),
    count: T.Tensor((1,), "int32"),
    S: T.Tensor((1,), "float32"),
):
    with T.Kernel(4, threads=64) as bx:
        f, part = T.alloc_fragment((64,), "float32"), T.alloc_fragment((1,), "float32")
        p, total = T.alloc_fragment((4,), "float32"), T.alloc_fragment((1,), "float32")
        T.copy(A[bx * 64], f)
        T.reduce_sum(f, part)
        P[bx] = part[0]
        before = T.atomic_add(count[0], 1, return_prev=True)
        if before == 3:
            T.copy(P, p)
            T.reduce_sum(p, total)
            S[0] = total[0]


KERNELS = {
    "pipeline_of_tiles": (
        pipeline_of_tiles,
        lambda: {
            "A": data((64, 96), "float16"),
            "B": data((96, 64), "float16"),
            "C": empty((64, 64), "float32"),
        },
        2,
    ),
    "copies_ahead": (
        tiles(2),
        lambda: {
            "A": data((64, 96), "float16"),
            "B": data((96, 64), "float16"),
            "C": empty((64, 64), "float32"),
        },
        2,
    ),
    "across_warps": (across_warps, lambda: {"A": data((4, 512), "float32"), "B": empty((4,), "float32")}, 2),
    "through_memory": (through_memory, lambda: {n: data((128,), "float32") for n in "ABC"}, 2),
    "by_warps": (by_warps, lambda: {n: data((64,), "float32") for n in "AB"}, 3),
}


@pytest.mark.parametrize("name", KERNELS)
def test_every_fence_is_needed_and_no_more_are(name):
    kernel, args, count = KERNELS[name]
    program = scheduled(kernel)
    assert len(reasons(program)) == count, reasons(program)
    emulator.run(Lowering(program).run(), program, args())
    for k in range(count):
        broken = without(program, k)
        with pytest.raises(emulator.EmulationError, match="race"):
            emulator.run(Lowering(broken).run(), broken, args())


def test_a_fence_says_what_it_orders(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(WITHOUT.name, "spare_stages")
    why = reasons(scheduled(pipeline_of_tiles))
    assert any("T.gemm reads" in w and "T.copy" in w and "writes" in w for _, w in why), why
    assert {scope for scope, _ in reasons(scheduled(by_warps))} == {"warp", "block"}


def test_no_fence_where_each_thread_touches_its_own():
    @T.prim_func
    def kernel(A: T.Tensor((256,), "float32"), B: T.Tensor((256,), "float32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((256,), "float32")
            T.copy(A, s)
            for _ in T.serial(3):
                for i in T.Parallel(256):
                    s[i] = s[i] * 2
            T.copy(s, B)

    assert reasons(scheduled(kernel)) == []


def test_an_atomic_update_publishes_what_the_block_wrote():
    program = scheduled(last_block)
    assert any("updates" in w for _, w in reasons(program)), reasons(program)
    kernel = Lowering(program).run()
    assert "publishing_add" in kernel.func.script()
    args = {
        "A": data((256,), "float32"),
        "P": empty((4,), "float32"),
        "count": empty((1,), "int32"),
        "S": empty((1,), "float32"),
    }
    got = emulator.run(kernel, program, args)
    assert abs(got["S"][0] - args["A"].sum()) < 1e-4


@pytest.mark.parametrize("seed", [0, 1])
def test_a_view_meets_what_it_is_a_view_of(seed: int):
    """The same bytes under two shapes: who touches which is not told by the indices alone."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 128), "float32"), C: T.Tensor((64, 128), "float32")):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((64, 128), "float32")
            T.copy(A, a)
            flat = T.reshape(a, (128, 64))
            for i, j in T.Parallel(128, 64):
                flat[i, j] = flat[i, j] * 2.0
            T.copy(a, C)

    agree(kernel, {"A": data((64, 128), "float32", 1), "C": empty((64, 128), "float32")}, seed=seed)


def test_rows_one_behind_the_other_need_no_fence():
    """Six elements of a layout that has room for eight: what it has room for is not written, and those of the
    next round begin behind the six."""

    @T.prim_func
    def rows(A: T.Tensor((4, 6), "float32"), B: T.Tensor((24,), "float32")):
        with T.Kernel(1, threads=64):
            a = T.alloc_fragment((6,), "float32")
            for r in T.serial(4):
                for i in T.Parallel(6):
                    a[i] = A[r, i]
                for i in T.Parallel(6):
                    B[r * 6 + i] = a[i] + 1

    assert reasons(scheduled(rows)) == []
    agree(rows, {"A": data((4, 6), "float32"), "B": empty((24,), "float32")})
