"""What a kernel's conditions and T.assume say of indices: believed as long as it holds, and no longer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import refused, run
from tests.unit.cuda.emulated import agree
from tilescale.compiler.checks.run import check
from tilescale.errors import LaunchError, TileTypeError, TileValueError
from tilescale.lowered import lower


def behind(condition: Any, step: int) -> Any:
    """Reads an element behind a condition on its index, which it has moved by ``step`` since."""

    @T.prim_func
    def kernel(A: T.Tensor((8,), "int32"), O: T.Tensor((2,), "int32"), n: T.int32):
        with T.Kernel(1, threads=32):
            x = T.alloc_var("int32")
            x = n
            if condition(x):
                O[0] = A[x] + 1
                x = x + step
                O[1] = A[x] + 1
            else:
                x = x - step
                O[1] = A[x] + 1

    return kernel


@pytest.mark.parametrize("step", [-5, 3, 100])
@pytest.mark.parametrize("n", [4, 9])
def test_a_variable_that_changes_behind_its_condition(n: int, step: int):
    args = {"A": np.arange(10, 18, dtype=np.int32), "O": np.zeros(2, np.int32), "n": n}
    kernel = behind(lambda x: (x >= 0) & (x < 8), step)
    got = agree(kernel, args, exact=True)["O"].tolist()
    here = args["O"].copy()
    run(kernel)(args["A"], here, n)

    def read(x: int) -> int:
        return 10 + x + 1 if 0 <= x < 8 else 1

    assert got == here.tolist() == ([read(n), read(n + step)] if n < 8 else [0, read(n - step)])


def filled(step: int = 0) -> Any:
    N = T.dynamic("N")

    @T.prim_func
    def kernel(A: T.Tensor((N,), "float32"), first: T.int32, last: T.int32):
        T.assume(N >= 3 and N < 1000)
        with T.Kernel(1, threads=32):
            x = T.alloc_var("int32")
            x = first
            for _ in T.serial(last - first):
                T.assume(x >= 0 and x < N)
                A[x] = 7
                x = x + 1
                if step:
                    A[x + step] = 3

    return kernel


def test_promises_drop_checks_of_what_they_say():
    text = lower(filled(), "cuda:sm_90a").kernel_source
    assert "A[x] = 7.0f" in text and "x <" not in text and "x >=" not in text
    text = lower(filled(1), "cuda:sm_90a").kernel_source
    assert "x <" not in text.partition("A[x] = 7.0f")[0] and "< N" in text.partition("x = x + 1")[2]
    args = {"A": np.zeros(6, np.float32), "first": 2, "last": 5}
    there, here = agree(filled(1), args, exact=True)["A"], args["A"].copy()
    run(filled(1))(here, 2, 5)
    assert there.tolist() == here.tolist() == [0, 0, 7, 7, 7, 3]


def test_broken_promises():
    args = {"A": np.zeros(6, np.float32), "first": 2, "last": 8}
    report = check(filled(), 1, args)
    assert report.findings and "T.assume promises" in str(report.findings[0])
    with refused(LaunchError, "T.assume promises"):
        run(filled())(args["A"], 2, 8)
    with refused(LaunchError, "T.assume promises"):
        run(filled())(np.zeros(2, np.float32), 0, 1)


def test_refused():
    def promised(what: Any) -> Any:
        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32")):
            with T.Kernel(1):
                T.assume(what(A))

        return kernel.trace()

    with refused(TileValueError, "T.assume of what is false"):
        promised(lambda a: False)
    with refused(TileTypeError, ""):
        promised(lambda a: a)
