"""Programs that were once accepted in silence."""

from __future__ import annotations

import pytest

import tilescale.language as T
from tests.kernels import refused, run
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError


def test_a_statement_behind_the_launch():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            A[0] = 1
        A[1] = 2

    with refused(TileSyntaxError, "behind the kernel's launch", at="A[1] = 2", write="with T.Kernel"):
        kernel.trace()


@pytest.mark.parametrize("store", [False, True])
def test_a_constant_index_outside_a_constant_extent(store: bool):
    @T.prim_func
    def kernel(A: T.Tensor((10,), "float32"), B: T.Tensor((10,), "float32")):
        with T.Kernel(1):
            if store:
                B[12] = A[0]
            else:
                B[0] = A[12]

    with refused(TileValueError, f"index 12 lies outside axis 0 of {'B' if store else 'A'}, whose extent is 10"):
        run(kernel)


def test_an_unknown_dtype_has_a_place():
    with refused(TileTypeError, "unknown dtype 'float33'", at='T.Tensor((4,), "float33")', write="float3"):
        T.Tensor((4,), "float33")
