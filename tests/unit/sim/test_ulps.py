"""The measure that targets are compared with."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.ulps import ulps


@pytest.mark.parametrize(
    "dtype",
    [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2],
)
def test_neighbours_are_one_apart(dtype):
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[np.dtype(dtype).itemsize]
    one = np.ones(1, dtype)
    above = (one.view(bits) + bits(1)).view(dtype)
    assert (
        ulps(one, above).tolist() == [1]
        and ulps(-one, -above).tolist() == [1]
        and ulps(one, one).tolist() == [0]
    )
    least = np.array([1], bits).view(dtype)  # the least subnormal, on both sides of zero
    assert ulps(least, -least).tolist() == [2] and ulps(np.zeros(1, dtype), -np.zeros(1, dtype)).tolist() == [
        0
    ]


def test_special_values_and_integers():
    a, b = (
        np.array([np.nan, np.nan, np.inf, 1.0], np.float32),
        np.array([np.nan, 1.0, np.inf, np.inf], np.float32),
    )
    assert ulps(a, b)[:3].tolist() == [0, np.inf, 0] and ulps(a, b)[3] > 1e8
    assert ulps(np.array([3, 250], np.uint8), np.array([5, 2], np.uint8)).tolist() == [2, 248]
    with pytest.raises(TypeError, match="no common last place"):
        ulps(np.ones(1, np.float32), np.ones(1, np.float64))
