"""A GPU whose threads run in waves of 64 and that has no instruction of its own: what layouts, passes and
lowerings make for it counts 64 lanes where NVIDIA's count 32, and runs on emulated waves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import data, empty, same
from tilescale.compiler import emulator
from tilescale.compiler.checks.run import launch
from tilescale.compiler.gpu.kernel import ThreadKernel
from tilescale.compiler.gpu.lower import Lowering
from tilescale.compiler.ir.operations import operations
from tilescale.compiler.ir.target import Target
from tilescale.compiler.layout import Fragment, Piece
from tilescale.compiler.layout.folds import digits_across
from tilescale.compiler.layout.match import Loop, idle
from tilescale.compiler.layout.spread import best
from tilescale.compiler.passes import pipeline
from tilescale.compiler.tvm_compat import EXTERN_CALLS, ir, structural_walk

#: two machines that differ in their waves alone
WIDE = Target("gpu", family="gpu", shared_bytes=64 << 10, wave=64)
NARROW = replace(WIDE, wave=32)


def made(kernel: Any, target: Target) -> tuple[ThreadKernel, Any]:
    program, _ = pipeline.run(kernel.trace(), target)
    return Lowering(program).run(), program


def called(kernel: ThreadKernel, name: str) -> list[Any]:
    """The arguments of a function's calls in thread IR."""
    found: list[Any] = []

    def look(c: Any) -> None:
        if c.op.name in EXTERN_CALLS and str(c.args[0].value) == name:
            found.append(list(c.args[1:]))

    structural_walk(kernel.func.body, (ir.Call, look))
    return found


def masks(kernel: ThreadKernel) -> set[int]:
    """Between which lanes values go."""
    return {int(args[1].value) for args in called(kernel, "ts::shuffle_xor")}


def agree(kernel: Any, args: dict[str, Any], target: Target = WIDE, exact: bool = False) -> None:
    """A launch on emulated threads, against the simulator."""
    lowered, program = made(kernel, target)
    assert lowered.wave == target.wave
    got, want = emulator.run(lowered, program, args), launch(kernel, 1, args).arrays[0]
    for name, array in got.items():
        same(array, want[name], name, exact)


def rows(m: int, n: int, threads: int, dtype: str = "float32") -> Any:
    """The greatest element and the sum of each row of a fragment."""

    @T.prim_func
    def kernel(A: T.Tensor((m, n), dtype), B: T.Tensor((m,), dtype), C: T.Tensor((m,), dtype)):
        with T.Kernel(1, threads=threads):
            a = T.alloc_fragment((m, n), dtype)
            most, total = T.alloc_fragment((m,), dtype), T.alloc_fragment((m,), dtype)
            T.copy(A, a)
            T.reduce_max(a, most, dim=1)
            T.reduce_sum(a, total, dim=1)
            T.copy(most, B)
            T.copy(total, C)

    return kernel


def test_digits_that_shuffles_reach():
    """An axis over 128 threads: 64 lanes by shuffles, two waves through shared memory."""
    held = Fragment((128,), (Piece(0, 1, 128, "thread", 1),), 128)
    for wave in (32, 64):
        near, far = digits_across(held, 0, wave)
        assert [(p.stride, p.extent) for p in near] == [(1, wave)]
        assert [(p.stride, p.extent) for p in far] == [(wave, 128 // wave)]
    # A block of half a wave, and one that is no whole number of waves.
    half = Fragment((32,), (Piece(0, 1, 32, "thread", 1),), 32)
    assert digits_across(half, 0, 64) == (list(half.pieces), [])
    odd = Fragment((32,), (Piece(0, 1, 32, "thread", 1), Piece(None, 0, 3, "thread", 32)), 96)
    assert digits_across(odd, 0, 64)[0] == [] and len(digits_across(odd, 0, 32)[0]) == 1


def test_the_cheapest_spread_reduces_within_a_wave():
    """64 threads along a row cost no exchange where they are one wave."""
    for wave in (32, 64):
        found = best((1, 256), 256, 32, widest=4, reduced=(1,), wave=wave)
        across = max(p.stride * p.extent for p in found.pieces if p.axis == 1 and p.to == "thread")
        assert across == wave


@pytest.mark.parametrize("threads", [64, 128, 256])
def test_reductions_fold_64_lanes(threads: int):
    kernel = rows(threads // 64, 512, threads)
    wide, narrow = (made(kernel, t) for t in (WIDE, NARROW))
    assert masks(wide[0]) == {1, 2, 4, 8, 16, 32} and masks(narrow[0]) == {1, 2, 4, 8, 16}
    args = {"A": data((threads // 64, 512), "float32"), "B": empty((threads // 64,), "float32")}
    agree(kernel, {**args, "C": args["B"].copy()})


def test_a_reduction_of_all_threads_has_a_part_for_each_wave():
    kernel = rows(1, 8192, 256)
    for target in (WIDE, NARROW):
        _, program = made(kernel, target)
        parts = [c.args[1] for c, op in operations(program.func.body) if op.name == "reduce_part"]
        assert [int(p.region[0].extent) for p in parts] == [256 // target.wave] * 2
    agree(kernel, {"A": data((1, 8192), "float32"), "B": empty((1,), "float32"), "C": empty((1,), "float32")})


def test_sums_that_a_loop_keeps_by_lane_are_joined_over_64():
    @T.prim_func
    def kernel(A: T.Tensor((2, 1024), "float32"), B: T.Tensor((2,), "float32")):
        with T.Kernel(1, threads=128):
            a, total = T.alloc_fragment((2, 256), "float32"), T.alloc_fragment((2,), "float32")
            T.clear(total)
            for k in T.serial(4):
                T.copy(A[0, k * 256], a)
                T.reduce_sum(a, total, dim=1, clear=False)
            T.copy(total, B)

    for target in (WIDE, NARROW):
        _, program = made(kernel, target)
        (joined,) = [c for c, op in operations(program.func.body) if op.name == "join_lanes"]
        assert str(joined.attrs["masks"]) == ",".join(
            str(1 << k) for k in range(target.wave.bit_length() - 1)
        )
    agree(kernel, {"A": data((2, 1024), "float32"), "B": empty((2,), "float32")})


def test_picks_are_looked_for_by_64_lanes():
    @T.prim_func
    def kernel(
        A: T.Tensor((5, 200), "float32"), V: T.Tensor((5, 3), "float32"), I: T.Tensor((5, 3), "int32")
    ):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((5, 200), "float32")
            v, i = T.alloc_shared((5, 3), "float32"), T.alloc_shared((5, 3), "int32")
            T.copy(A, a)
            T.topk(a, v, i, 3)
            T.copy(v, V)
            T.copy(i, I)

    wide, narrow = (made(kernel, t)[0] for t in (WIDE, NARROW))
    assert max(masks(wide)) == 32 and max(masks(narrow)) == 16
    a = np.round(data((5, 200), "float32") * 4)
    a[1, 70] = np.nan
    agree(kernel, {"A": a, "V": empty((5, 3), "float32"), "I": empty((5, 3), "int32")}, exact=True)


def test_padding_is_skipped_by_whole_waves():
    """Of four parts of 32 threads one is padding: a wave of 64 has threads on both sides."""
    pieces = (Piece(1, 1, 32, "thread", 1), Piece(0, 1, 4, "thread", 32))
    loop = Loop(("i", "j"), (3, 32), Fragment((4, 32), pieces, 128), (0, 0))
    assert idle(loop, 0, 32) is not None and idle(loop, 0, 64) is None
    wide = (Piece(1, 1, 64, "thread", 1), Piece(0, 1, 4, "thread", 64))
    assert idle(Loop(("i", "j"), (3, 64), Fragment((4, 64), wide, 256), (0, 0)), 0, 64) is not None


@pytest.mark.parametrize("threads", [64, 96, 128])
def test_nests(threads: int):
    """Conditions that a wave decides together are asked of whole waves: not where a block ends inside one."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64, 256), "float32"), R: T.Tensor((64,), "int32"), B: T.Tensor((64, 256), "float32")
    ):
        with T.Kernel(1, threads=threads):
            a, b = T.alloc_fragment((64, 256), "float32"), T.alloc_fragment((64, 256), "float32")
            r = T.alloc_fragment((64,), "int32")
            T.copy(A, a)
            T.copy(R, r)
            T.clear(b)
            for i, j in T.Parallel(64, 256):
                if r[i] > 0:
                    b[i, j] = T.exp(a[i, j]) + a[i, j]
            T.copy(b, B)

    for target in (WIDE, NARROW):
        votes = called(made(kernel, target)[0], "ts::any")
        assert bool(votes) == (threads % target.wave == 0)
        args = {"A": data((64, 256), "float32"), "R": data((64,), "int32"), "B": empty((64, 256), "float32")}
        agree(kernel, args, target)


def test_executors_below_the_block():
    """The language's warp has 32 threads on every target: half a wave, of which each is an executor."""

    @T.prim_func
    def kernel(A: T.Tensor((4, 96), "float32"), B: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=128):
            s = T.alloc_shared((4, 96), "float32")
            T.copy(A, s)
            with T.Scale("warp") as (w, _):
                a, total = T.alloc_fragment((96,), "float32"), T.alloc_fragment((1,), "float32")
                if w != 2:
                    T.copy(s[w, 0:96], a)
                    T.reduce_sum(a, total, dim=0)
                    B[w] = total[0]

    assert max(masks(made(kernel, WIDE)[0])) == 16
    agree(kernel, {"A": data((4, 96), "float32"), "B": empty((4,), "float32")})


def test_a_product_and_softmax():
    """A product by multiply-adds, and reductions of its rows."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 128), "float16"), C: T.Tensor((64, 128), "float32")
    ):
        with T.Kernel(1, threads=256):
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 128), "float16")
            c, most = T.alloc_fragment((64, 128), "float32"), T.alloc_fragment((64,), "float32")
            total = T.alloc_fragment((64,), "float32")
            T.clear(c)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[0, k * 32], a)
                T.copy(B[k * 32, 0], b)
                T.gemm(a, b, c)
            T.reduce_max(c, most, dim=1)
            for i, j in T.Parallel(64, 128):
                c[i, j] = T.exp((c[i, j] - most[i]) * 0.125)
            T.reduce_sum(c, total, dim=1)
            for i, j in T.Parallel(64, 128):
                c[i, j] = c[i, j] / total[i]
            T.copy(c, C)

    lowered, program = made(kernel, WIDE)
    assert not [name for name in emulator.machine._called(lowered.func.body) if "mma" in name]
    assert not any(
        "warpgroup" in str(c.attrs["scope"]) for c, op in operations(program.func.body) if op.name == "sync"
    )
    args = {
        "A": data((64, 64), "float16"),
        "B": data((64, 128), "float16"),
        "C": empty((64, 128), "float32"),
    }
    agree(kernel, args)


def test_threads_of_part_of_a_block_have_no_barrier():
    """What each 128 threads keep to themselves is ordered by a barrier of the block, where a target has none
    of part of it."""

    @T.prim_func
    def kernel(A: T.Tensor((1024,), "int32"), B: T.Tensor((1024,), "int32")):
        with T.Kernel(1, threads=256):
            s, a = T.alloc_shared((1024,), "int32"), T.alloc_fragment((1024,), "int32")
            T.copy(A, a)
            T.copy(a, s)
            for i in T.Parallel(1024):
                a[i] = s[i // 8 * 8 + (i + 4) % 8]
            T.copy(a, B)

    scopes = {}
    for target in (WIDE, replace(WIDE, named_barriers=True)):
        program, _ = pipeline.run(kernel.trace(), target)
        calls = [c for c, op in operations(program.func.body) if op.name == "sync"]
        scopes[target.named_barriers] = [str(c.attrs["scope"]) for c in calls]
    assert scopes == {False: ["block"], True: ["warpgroup"]}
    agree(kernel, {"A": data((1024,), "int32"), "B": empty((1024,), "int32")}, exact=True)


def test_code_for_64_lanes_is_refused_on_waves_of_32():
    lowered, program = made(rows(2, 512, 128), WIDE)
    args = {"A": data((2, 512), "float32"), "B": empty((2,), "float32"), "C": empty((2,), "float32")}
    with pytest.raises(emulator.EmulationError, match="a shuffle with a lane that there is not"):
        emulator.run(replace(lowered, wave=32), program, args)
