"""Strided layouts, and the ones that the CPU's tiles get."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilescale.language as T
from tests.kernels import run, scheduled
from tilescale.compiler.layout import Strided
from tilescale.errors import TileValueError


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=3))
def test_injectivity_is_what_counting_says(axes: list[tuple[int, int]]):
    layout = Strided(tuple(e for e, _ in axes), tuple(s for _, s in axes))
    places = [layout(*index) for index in itertools.product(*(range(e) for e in layout.shape))]
    assert layout.is_injective() == (len(set(places)) == len(places))
    assert max(places) + 1 == layout.size


def test_row_major_padded_and_permuted():
    plain, padded = Strided.row_major((2, 3, 4)), Strided.row_major((2, 3, 4), pad=2)
    assert plain.strides == (12, 4, 1) and plain.is_contiguous and plain.size == 24
    assert padded.strides == (18, 6, 1) and not padded.is_contiguous and padded.is_injective()
    assert padded.permuted((2, 0, 1)).strides == (1, 18, 6)
    with pytest.raises(TileValueError, match="strides"):
        Strided((2, 3), (1,))


def transposed(view: bool):
    @T.prim_func
    def kernel(A: T.Tensor((8, 512), "float32"), B: T.Tensor((512, 8), "float32")):
        with T.Kernel(1):
            wide, small = T.alloc_shared((8, 512), "float32"), T.alloc_shared((8, 100), "float32")
            T.copy(A, wide)
            T.clear(small)
            if view:
                flat = T.view(wide, (4096,))
                T.device_assert(flat[512] == wide[1, 0])
            for i, j in T.Parallel(512, 8):
                B[i, j] = wide[j, i] + small[j, i % 100]

    return kernel


@pytest.mark.parametrize("view", [False, True])
def test_rows_that_alias_in_the_cache_are_padded_unless_viewed(view: bool):
    prim = transposed(view)
    strides = {var.name: layout.strides for var, layout in scheduled(prim).layouts.items()}
    assert strides["wide"] == ((512, 1) if view else (528, 1)) and strides["small"] == (100, 1)
    a, b = torch.randn(8, 512), torch.full((512, 8), float("nan"))
    run(prim)(a, b)
    assert b.equal(a.T)
