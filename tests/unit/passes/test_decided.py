"""Rounds and conditions that a launch's constants decide, and those that they do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty, lowered
from tilescale.compiler.cuda.printer import print_kernel


def pooled(rows: int) -> Any:
    """Y = the sums of 64 rows of X each, 32 rows a round, of which the last ones may not be there."""

    @T.prim_func
    def program(X: T.Tensor((rows, 32), "float32"), Y: T.Tensor((T.ceildiv(rows, 64), 32), "float32")):
        with T.Kernel(T.ceildiv(rows, 64), threads=64) as bx:
            x, total = T.alloc_fragment((32, 32), "float32"), T.alloc_fragment((32,), "float32")
            first = bx * 64
            end = T.min(first + 64, rows)
            T.clear(total)
            for k in T.serial(T.ceildiv(end - first, 32)):
                start = first + k * 32
                left = T.min(first + (k + 1) * 32, end) - start
                T.copy(X[start : start + 32, :], x)
                for i, j in T.Parallel(32, 32):
                    if i >= left:
                        x[i, j] = 0.0
                T.reduce_sum(x, total, dim=0, clear=False)
            T.copy(total, Y[bx, :])

    return program


@pytest.mark.parametrize("rows", [192, 160, 150])
def test_masks_of_rows_that_are_there(rows: int):
    program = pooled(rows)
    x = data((rows, 32), "float32", 1)
    got = agree(program, {"X": x, "Y": empty((-(-rows // 64), 32), "float32")})["Y"]
    np.testing.assert_allclose(got, np.add.reduceat(x, np.arange(0, rows, 64)), rtol=1e-4, atol=1e-4)
    text = print_kernel(lowered(program).kernel).text
    whole = rows % 64 == 0
    assert ("k < 2" in text) == whole and ("left" in text) != whole and (f"< {rows}" in text) != whole, text
    assert ("decided" in lowered(program).program.fired) == whole


def test_what_memory_or_other_integers_say_stays():
    """A variable changes, and numbers without a sign and of 8 bits wrap."""

    @T.prim_func
    def program(Y: T.Tensor((4, 8), "int32")):
        with T.Kernel(4, threads=32) as bx:
            count = T.alloc_var("int32", 0)
            before = count + 1
            for k in T.serial(2):
                count += 1
                if count >= before:
                    Y[bx, k] = 1
            byte = T.cast(bx + 254, "uint8")
            if byte + T.cast(1, "uint8") >= byte:
                Y[bx, 2] = 1
            near = T.cast(bx + 126, "int8")
            if near + T.cast(1, "int8") >= near:
                Y[bx, 3] = 1
            if bx < 3:
                Y[bx, 4] = 1
            if bx < 4:
                Y[bx, 5] = 1
            else:
                Y[bx, 6] = 1
            if bx >= 4:
                Y[bx, 7] = 1

    got = agree(program, {"Y": np.zeros((4, 8), "int32")}, exact=True)["Y"]
    rows = [[1, 1, bx != 1, bx != 1, bx < 3, 1, 0, 0] for bx in range(4)]
    np.testing.assert_array_equal(got, np.array(rows, "int32"))
    text = print_kernel(lowered(program).kernel).text
    assert text.count("if (") == 4 + text.count("if (tid"), text
