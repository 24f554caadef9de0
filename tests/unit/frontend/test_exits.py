"""Early returns of a kernel and `while True`: simulator, CPU and emulated GPU alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import refused, run
from tests.unit.cuda.emulated import agree
from tilescale.compiler.checks.run import launch
from tilescale.errors import TileSyntaxError


def on_all_targets(kernel: Any, args: dict[str, Any]) -> dict[str, np.ndarray]:
    """The arrays behind a launch, the same on the simulator, the emulated GPU and the CPU."""
    there = agree(kernel, args, exact=True)
    here = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in args.items()}
    run(kernel)(*here.values())
    for name, array in there.items():
        assert np.array_equal(array, here[name]), name
    return there


def test_a_block_returns_early():
    @T.prim_func
    def kernel(C: T.Tensor((6, 8), "int32"), n: T.int32):
        with T.Kernel(6, threads=32) as b:
            if b == 1:
                return
            tile = T.alloc_shared((8,), "int32")
            T.fill(tile, b)
            if b > n:
                T.fill(tile, -b)
                T.copy(tile, C[b, :])
                return
            elif b == 0:
                T.fill(tile, 100)
            T.copy(tile, C[b, :])
            if b == 2:
                if n > 3:
                    return
                C[b, 0] = 50
            for i in T.Parallel(8):
                C[b, i] += 7

    for n in (3, 4):
        got = on_all_targets(kernel, {"C": np.zeros((6, 8), np.int32), "n": n})["C"]
        want = {0: [107] * 8, 1: [0] * 8, 2: [2] * 8 if n > 3 else [57] + [9] * 7, 3: [10] * 8}
        want[4], want[5] = ([11] * 8 if n > 3 else [-4] * 8), [-5] * 8
        assert got.tolist() == [want[b] for b in range(6)]


def test_a_block_returns_from_loops():
    @T.prim_func
    def kernel(C: T.Tensor((4, 4), "int32"), E: T.Tensor((4,), "int32")):
        with T.Kernel(4, threads=32) as b:
            with T.Scale("grid"):
                for i in T.serial(4):
                    for j in T.serial(4):
                        if i * 4 + j == 3 * b:
                            return
                        C[b, i] += 1
                    if b == 3 and i == 2:
                        return
                C[b, 0] = -1
            E[b] = 1

    got = on_all_targets(kernel, {"C": np.zeros((4, 4), np.int32), "E": np.zeros(4, np.int32)})
    assert got["C"].tolist() == [[0, 0, 0, 0], [3, 0, 0, 0], [4, 2, 0, 0], [4, 4, 1, 0]]
    assert got["E"].tolist() == [0, 0, 0, 0]


def test_a_pipelined_product_behind_a_return():
    @T.prim_func
    def kernel(
        A: T.Tensor((64, 64), "float16"),
        B: T.Tensor((64, 64), "float16"),
        C: T.Tensor((64, 64), "float32"),
        n: T.int32,
    ):
        with T.Kernel(4, threads=128) as by:
            if by * 16 >= n:
                return
            a, b = T.alloc_shared((16, 16), "float16"), T.alloc_shared((16, 64), "float16")
            c = T.alloc_fragment((16, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[by * 16, k * 16], a)
                T.copy(B[k * 16, 0], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * 16, 0])

    rng = np.random.default_rng(1)
    a, b = (rng.integers(-3, 4, (64, 64)).astype(np.float16) for _ in range(2))
    got = on_all_targets(kernel, {"A": a, "B": b, "C": np.zeros((64, 64), np.float32), "n": 40})["C"]
    assert np.array_equal(got[:48], a[:48].astype(np.float32) @ b.astype(np.float32)) and not got[48:].any()


@pytest.mark.parametrize("where", ["behind", "in the loop"])
def test_a_return_that_others_would_wait_for(where: str):
    def kernel_of(condition: Any, meet: Any, scale: str = "device") -> Any:
        @T.prim_func
        def behind(C: T.Tensor((8,), "int32"), S: T.SymmTensor((8,), "int32"), n: T.int32):
            with T.Kernel(4, threads=32) as b:
                with T.Scale(scale) as (rank, ranks):
                    if condition(C, b, n, rank):
                        return
                    meet(S)

        @T.prim_func
        def in_loop(C: T.Tensor((8,), "int32"), S: T.SymmTensor((8,), "int32"), n: T.int32):
            with T.Kernel(4, threads=32) as b:
                with T.Scale(scale) as (rank, ranks):
                    for _ in T.serial(4):
                        meet(S)
                        if condition(C, b, n, rank):
                            return

        return behind if where == "behind" else in_loop

    own = [lambda C, b, n, rank: b > 2, lambda C, b, n, rank: C[0] == 1, lambda C, b, n, rank: T.any_of(C)]
    message = "blocks that return here never come to line"
    for condition in own:
        for meet, scale in (
            (lambda S: T.barrier(), "grid"),
            (lambda S: T.sync_grid(), "grid"),
            (lambda S: T.barrier(), "device"),
            (lambda S: T.all_reduce(S[0:4]), "device"),
        ):
            with refused(TileSyntaxError, message, at="return", expected="the same in all of them"):
                kernel_of(condition, meet, scale).trace()
    with refused(TileSyntaxError, message, at="return"):
        kernel_of(lambda C, b, n, rank: rank == 0, lambda S: T.barrier()).trace()
    kernel_of(lambda C, b, n, rank: rank == 0, lambda S: T.sync_grid()).trace()
    alike = kernel_of(lambda C, b, n, rank: n // 2 == 1, lambda S: T.barrier())
    for n in (2, 4):
        launch(alike, 2, {"C": np.zeros(8, np.int32), "S": np.zeros(8, np.int32), "n": n})


def test_returns_that_have_no_meaning():
    def refuse(message: str, kernel: Any, **more: str) -> None:
        with refused(TileSyntaxError, message, **more):
            T.prim_func(kernel).trace()

    def parallel(C: T.Tensor((8,), "int32")):
        with T.Kernel(1):
            for i in T.Parallel(8):
                if i > 2:
                    return
                C[i] = 1

    def warp(C: T.Tensor((8,), "int32")):
        with T.Kernel(1):
            with T.Scale("warp") as (w, n):
                if w > 2:
                    return
            C[0] = 1

    def value(C: T.Tensor((8,), "int32")):
        with T.Kernel(1) as b:
            if b > 2:
                return C[0]

    def outside(C: T.Tensor((8,), "int32"), n: T.int32):
        if n > 2:
            return
        with T.Kernel(1) as b:
            C[b] = 1

    refuse("return in T.Parallel", parallel, at="return", expected="T.serial")
    refuse('return in T.Scale("warp")', warp, at="return", write="an `if` around")
    refuse("return depends on a device value", value, at="return C[0]", expected="it gives a value")
    refuse("return depends on a device value", outside, at="return", expected="outside T.Kernel")


def test_while_true_with_a_break():
    @T.prim_func
    def kernel(C: T.Tensor((4, 8), "int32"), n: T.int32):
        with T.Kernel(4, threads=32) as b:
            i = T.alloc_var("int32")
            while True:
                if i >= n + b:
                    break
                i += 1
                if i % 2 == 0:
                    continue
                x = i * 10
                C[b, i] = x
            C[b, 0] = i
            sizes, size = [], 1
            while True:  # Python's own: nothing of the device leaves it
                size *= 2
                if size > 5:
                    break
                sizes.append(size)
            C[b, 2] = sum(sizes)
            k = 0
            while True:  # Python's first two rounds, then the device's loop
                k += 1
                C[b, 4] += k
                if k < 3:
                    continue
                v = T.alloc_var("int32", 0)
                while True:
                    v += 1
                    if v > b:
                        break
                C[b, 6] = v
                break

    got = on_all_targets(kernel, {"C": np.zeros((4, 8), np.int32), "n": 3})["C"]
    for b in range(4):
        want = [3 + b, 10, 6, 30, 6, 50 if b > 1 else 0, b + 1, 0]
        assert got[b].tolist() == want


def test_a_break_belongs_to_its_own_loop():
    @T.prim_func
    def kernel(C: T.Tensor((4,), "int32")):
        with T.Kernel(1):
            for i in T.serial(4):
                k = 0
                while k < 10:  # Python's
                    if k == 2:
                        break
                    k += 1
                    C[i] += 1
            i = T.alloc_var("int32")
            while True:
                i += 1
                if i > 3:
                    return
                C[0] += 100

    c = np.zeros(4, np.int32)
    run(kernel)(c)
    assert c.tolist() == [302, 2, 2, 2]


def test_loops_that_cannot_be():
    def refuse(message: str, kernel: Any, **more: str) -> None:
        with refused(TileSyntaxError, message, **more):
            T.prim_func(kernel).trace()

    def nothing_ends(C: T.Tensor((4,), "int32")):
        with T.Kernel(1):
            while True:
                C[0] += 1

    def a_name_that_the_rounds_bind(C: T.Tensor((4,), "int32")):
        with T.Kernel(4) as b:
            k = 0
            while True:
                k += 1
                if k > b:
                    break
            C[b] = 1

    def of_python(C: T.Tensor((4,), "int32")):
        with T.Kernel(4) as b:
            for _ in T.serial(4):
                k = 0
                while k < 4:
                    k += 1
                    if b > 2:
                        break

    refuse("a loop that nothing ends", nothing_ends, write="`break` in it")
    refuse(
        "'k' is rebound under the device while",
        a_name_that_the_rounds_bind,
        at="k += 1",
        write='k = T.alloc_var("int32")',
    )
    refuse("break leaves a Python loop on a device condition", of_python, at="break", write="T.serial")
