"""Tiles in registers that loops of each thread walk along: what a step moves along lies in a thread's slots."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty
from tilescale.compiler import driver
from tilescale.compiler.ir.numeric import evaluate
from tilescale.compiler.layout.fragment import Fragment
from tilescale.compiler.layout.match import Loop, match
from tilescale.compiler.layout.pieces import Piece
from tilescale.compiler.layout.walked import walk
from tilescale.compiler.tvm_compat import tirx

I, J, K = (tirx.Var(name, "int32") for name in "ijk")


@T.prim_func
def mixed(A: T.Tensor((4, 4), "float32"), B: T.Tensor((4, 256), "float32"), C: T.Tensor((4, 256), "float32")):
    """A loop of each iteration walks along the rows of both tiles."""
    with T.Kernel(1, threads=128):
        a, b = T.alloc_fragment((4, 4), "float32"), T.alloc_fragment((4, 256), "float32")
        c = T.alloc_fragment((4, 256), "float32")
        T.copy(A, a)
        T.copy(B, b)
        for i, j in T.Parallel(4, 256):
            c[i, j] = 0
            for k in T.serial(4):
                c[i, j] += a[k, i] * b[k, j]
        T.copy(c, C)


@T.prim_func
def quarters(X: T.Tensor((32, 64), "float32"), S: T.Tensor((32,), "float32")):
    """A loop around the nest walks along the columns, four at a time."""
    with T.Kernel(1, threads=128):
        x, part = T.alloc_fragment((32, 64), "float32"), T.alloc_fragment((32, 4), "float32")
        s = T.alloc_fragment((32,), "float32")
        T.copy(X, x)
        T.clear(part)
        for step in T.serial(16):
            for i, j in T.Parallel(32, 4):
                part[i, j] += x[i, step * 4 + j] * x[i, step * 4 + j]
        T.reduce_sum(part, s, dim=1)
        T.copy(s, S)


@T.prim_func
def rows(X: T.Tensor((4, 192), "float32"), Y: T.Tensor((4, 192), "float32")):
    """The rows are written one after another; 192 columns are no whole round of 128 threads."""
    with T.Kernel(1, threads=128):
        x, y = T.alloc_fragment((4, 192), "float32"), T.alloc_fragment((4, 192), "float32")
        T.copy(X, x)
        for k in T.serial(4):
            for j in T.Parallel(192):
                y[k, j] = x[3 - k, j] + x[k, j]
        T.copy(y, Y)


@T.prim_func
def large(X: T.Tensor((256, 32), "float32"), Y: T.Tensor((32,), "float32")):
    """More than a thread may hold of a tile."""
    with T.Kernel(1, threads=128):
        x, y = T.alloc_fragment((256, 32), "float32"), T.alloc_fragment((32,), "float32")
        T.copy(X, x)
        T.clear(y)
        for k in T.serial(256):
            for j in T.Parallel(32):
                y[j] += x[k, j]
        T.copy(y, Y)


@pytest.mark.parametrize("kernel", [mixed, quarters, rows, large], ids=lambda k: k.name)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_results_are_those_of_the_simulator(kernel: Any, arch: str):
    func = kernel.trace()
    shapes = {p.name: tuple(int(e) for e in p.spec.shape) for p in func.params}
    last = list(shapes)[-1]
    args = {n: data(s, "float32", k) for k, (n, s) in enumerate(shapes.items()) if n != last}
    agree(kernel, args | {last: empty(shapes[last], "float32")}, arch=arch)


@pytest.mark.parametrize("kernel", [mixed, quarters, rows], ids=lambda k: k.name)
def test_a_step_needs_no_shared_memory(kernel: Any):
    code = driver.source_text(kernel.trace(), "cuda", "cuda:sm_90a")
    assert "__shared__" not in code and "__syncthreads" not in code, code


def test_what_a_thread_cannot_hold_goes_through_shared_memory():
    code = driver.source_text(large.trace(), "cuda", "cuda:sm_90a")
    assert "x_shared" in code, code
    assert code.index("x_shared[") < code.index("for (int k = 0; k < 256") < code.rindex("x_shared["), code
    assert code[code.index("for (int k = 0; k < 256") :].count("__syncthreads") == 0, code


def test_a_fragment_that_changes_goes_through_shared_memory_in_every_round():
    """A copy that is made once would be that of the first round."""

    @T.prim_func
    def kernel(X: T.Tensor((256, 32), "float32"), Y: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=128):
            x, y = T.alloc_fragment((256, 32), "float32"), T.alloc_fragment((32,), "float32")
            T.copy(X, x)
            T.clear(y)
            for k in T.serial(256):
                for j in T.Parallel(32):
                    y[j] += x[k, j]
                for i, j in T.Parallel(256, 32):
                    x[i, j] = x[i, j] * 0.5
            T.copy(y, Y)

    code = driver.source_text(kernel.trace(), "cuda", "cuda:sm_90a")
    assert code.index("for (int k = 0; k < 256") < code.index("x_shared["), code
    agree(kernel, {"X": data((256, 32), "float32", 1), "Y": empty((32,), "float32")})


@pytest.mark.parametrize("index, extent, grain", [
    (K, 8, 1),
    (K * 4 + J, 64, 4),
    (K * 8 + J, 64, 4),
    (K * 16 + I * 4 + J, 64, 16),
])  # fmt: skip
def test_an_index_taken_apart(index: Any, extent: int, grain: int):
    found = walk(index, (I, J), (4, 4), extent)
    assert found is not None and found.grain == grain
    for k in range(3):
        for i in range(4):
            for j in range(4):
                at = {I: i, J: j, K: k}
                assert _value(index, at) == _value(found.own, at) + _value(found.step, at)
                assert _value(found.step, at) % grain == 0 and 0 <= _value(found.own, at) < grain


@pytest.mark.parametrize("index, extent, why", [
    (I * 4 + J, 16, "nothing but the nest's variables"),
    (K * 3 + J, 64, "a step that moves the same digit"),
    (K * J, 64, "no sum"),
    (K * 4 + J - 1, 64, "below zero"),
    (K * 4 + J, 6, "no grain divides the axis"),
])  # fmt: skip
def test_no_walk(index: Any, extent: int, why: str):
    assert walk(index, (I, J), (4, 4), extent) is None, why


def test_a_step_finds_the_slots_that_it_moves_to():
    """Threads share the lowest two bits of the columns, each has all of the others."""
    pieces = (Piece(0, 1, 4, "thread", 4), Piece(1, 1, 4, "thread", 1), Piece(1, 4, 16, "slot", 1))
    held = Fragment((4, 64), pieces, 16)
    loop = Loop((I, J), (4, 4), Fragment((4, 4), pieces[:2], 16), (0, 0))
    found = match(loop, [I, K * 4 + J], held, False)
    assert not isinstance(found, str) and found.base == 0
    ((step, unit, extent, stride),) = found.dynamic
    assert (unit, extent, stride) == (4, 16, 1) and _value(step, {K: 5, I: 0, J: 0}) == 20
    assert isinstance(match(loop, [I, K * 2 + J], held, False), str)  # it would be another thread's


def _value(e: Any, at: dict[Any, int]) -> int:
    return int(evaluate(e, at))
