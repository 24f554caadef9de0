"""Rounding and conversions against exact arithmetic and ml_dtypes."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from tilescale.compiler.sim import numerics

SMALL = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.parametrize("dtype", SMALL)
def test_float64_rounds_once(dtype: str):
    """Just above and below the middle of two neighbours, nearer to it than float32 can tell."""
    low, high = (float(numerics.decode(np.asarray(v, numerics.storage(dtype)), dtype)) for v in (1.0, 1.0))
    step = next(
        2.0**-k
        for k in range(1, 12)
        if float(numerics.scalar(1 + 2.0**-k - 2.0**-40, dtype)) <= 1 + 2.0**-k
        and float(numerics.scalar(1 + 2.0 ** -(k + 1), dtype)) == 1.0
    )
    middle = low + step / 2
    assert float(numerics.scalar(middle + 2.0**-40, dtype)) == high + step
    assert float(numerics.scalar(middle - 2.0**-40, dtype)) == low
    assert float(numerics.scalar(middle, dtype)) == low  # ties to even


def test_floats_become_integers_toward_zero_and_within():
    x = np.array([1.9, -1.9, 300.0, -300.0, np.nan, np.inf], np.float32)
    assert numerics.cast(x, "float32", "int8").tolist() == [1, -1, 127, -128, 0, 127]
    assert numerics.cast(x, "float32", "uint8").tolist() == [1, 0, 255, 0, 0, 255]
    assert numerics.cast(np.float32(2**31), "float32", "int32") == 2**31 - 1
    assert numerics.cast(np.float64(-1e30), "float64", "int64") == -(2**63)


def test_integers_wrap():
    assert numerics.wrap(2**31, "int32") == -(2**31)
    assert numerics.wrap(-1, "uint8") == 255
    assert numerics.cast(np.array([300, -1]), "int64", "uint8").tolist() == [44, 255]


def test_division_of_integers():
    for a in range(-7, 8):
        for b in (-3, -2, 2, 3):
            want = int(a / b)
            assert numerics.truncated_division(a, b) == want
            assert numerics.truncated_division(np.array([a]), np.array([b]))[0] == want
            assert numerics.truncated_remainder(a, b) == a - want * b


def test_fma_rounds_once():
    draw = np.random.default_rng(0)
    for dtype, fraction in (("float32", np.float32), ("float64", np.float64)):
        for _ in range(200):
            a, b = (fraction(v) for v in draw.standard_normal(2))
            c = fraction(-a * b) * fraction(1 + draw.integers(0, 3) * 2.0**-20)
            exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
            got = numerics.function("fma", [a, b, c], dtype)
            near = min(
                abs(Fraction(float(n)) - exact)
                for n in (got, np.nextafter(got, fraction(-np.inf)), np.nextafter(got, fraction(np.inf)))
            )
            assert abs(Fraction(float(got)) - exact) == near


def test_small_floats_out_of_range():
    with np.errstate(over="ignore"):
        assert np.isnan(numerics.scalar(1000.0, "float8_e4m3fn"))
        assert np.isinf(numerics.scalar(1e6, "float8_e5m2"))
        assert np.isinf(numerics.scalar(70000.0, "float16"))
    assert numerics.scalar(449.0, "float8_e4m3fn") == 448
