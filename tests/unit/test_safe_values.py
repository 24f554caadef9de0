"""T.annotate_safe_value: what is read outside a tensor instead of zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilescale.language as T
from tests.kernels import refused
from tests.unit.cuda.emulated import agree, data, empty
from tilescale.errors import TileTypeError, TileValueError
from tilescale.jit import compile


def kernel(how: str, value: Any, dtype: str = "float16") -> Any:
    @T.prim_func
    def shifted(A: T.Tensor((50, 40), dtype), B: T.Tensor((64, 64), dtype), n: T.int32):
        with T.Kernel(2, threads=128) as b:
            tile = T.alloc_shared((32, 64), dtype)
            T.annotate_safe_value({A: n if value is None else value})
            if how == "elements":
                for i, j in T.Parallel(32, 64):
                    tile[i, j] = A[b * 32 + i - 10, j + 3]
            else:
                T.copy(A[b * 32 - 10, 3], tile)
            T.copy(tile, B[b * 32, 0])

    return shifted


@pytest.mark.parametrize("how", ["elements", "copy"])
@pytest.mark.parametrize("value", [10, -1.5, float("nan"), -0.0, 0, None])
@pytest.mark.parametrize("target", ["cpu", "sim"])
def test_values(how: str, value: float | None, target: str):
    a, b = torch.randn(50, 40).half(), torch.empty(64, 64).half()
    compile(kernel(how, value), target=target)(a, b, 7)
    want = torch.full((64, 64), 7.0 if value is None else float(value)).half()
    want[10:60, :37] = a[:, 3:]
    assert torch.equal(b.nan_to_num(99), want.nan_to_num(99))


@pytest.mark.parametrize("how", ["elements", "copy"])
def test_on_the_emulated_gpu(how: str):
    args = {"A": data((50, 40), "float16", 1), "B": empty((64, 64), "float16"), "n": 3}
    agree(kernel(how, None), args)


def test_integers():
    a, b = torch.randint(0, 9, (50, 40), dtype=torch.int32), torch.empty(64, 64, dtype=torch.int32)
    compile(kernel("copy", 5, "int32"), target="cpu")(a, b, 0)
    assert (b[:10] == 5).all() and torch.equal(b[10:60, :37], a[:, 3:]) and (b[60:] == 5).all()


def test_what_is_no_safe_value():
    with refused(TileTypeError, "T.annotate_safe_value of tile"):
        kernel_of_a_tile().trace()
    for value in (1.5, 1 << 31):
        with refused(TileValueError, f"{value} is read outside A", expected="a whole number"):
            kernel("copy", value, "int32").trace()


def kernel_of_a_tile() -> Any:
    @T.prim_func
    def of_a_tile(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((64,), "float32")
            T.annotate_safe_value({tile: 1})
            T.copy(A, tile)

    return of_a_tile
