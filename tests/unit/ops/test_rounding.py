"""Directed roundings, T.nextafter, T.ldexp and T.fast_rcp, bit by bit, on the CPU, the simulator and emulated
threads."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import tilescale.language as T
from tests.kernels import refused, run
from tests.unit.cuda.emulated import agree
from tilescale.errors import TileTypeError, TileValueError

SPECIAL = np.array(
    [
        0.0,
        -0.0,
        1.0,
        -1.0,
        np.inf,
        -np.inf,
        np.nan,
        1e-45,
        -1e-45,
        1.2e-38,
        3.4e38,
        -3.4e38,
        0.1,
        3.0,
        -7.5,
        1e20,
    ],
    np.float32,
)


def pairs(dtype: str = "float32") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All pairs of special values, and random ones of all magnitudes."""
    a, b = (x.ravel() for x in np.meshgrid(SPECIAL, SPECIAL))
    rng = np.random.default_rng(5)
    with np.errstate(all="ignore"):
        more = [
            (rng.standard_normal(256) * 2.0 ** rng.uniform(-80, 80, 256)).astype(np.float32) for _ in range(3)
        ]
    near = np.nextafter(more[0], np.float32(0)) * np.float32(-1)  # sums that cancel
    a, b = np.concatenate([a, more[0], more[0]]), np.concatenate([b, more[1], near])
    c = np.concatenate([np.resize(SPECIAL, 256), more[2], np.resize(SPECIAL, 256)])
    return a.astype(dtype), b.astype(dtype), c.astype(dtype)


def rounded(exact: Fraction, mode: str) -> np.float32:
    """A number that is not zero, as a float32."""
    with np.errstate(all="ignore"):
        near = (
            np.float32(float(exact))
            if abs(exact) < Fraction(2) ** 200
            else np.float32(math.copysign(np.inf, exact))
        )
    for _ in range(4):  # float() rounded once already: correct it to the nearest below or equal
        if near != np.inf and (near == -np.inf or Fraction(float(near)) <= exact):
            break
        near = np.nextafter(near, np.float32(-np.inf))
    while True:
        with np.errstate(over="ignore"):
            above = np.nextafter(near, np.float32(np.inf))
        if above == np.inf or Fraction(float(above)) > exact:
            break
        near = above
    low = near
    with np.errstate(over="ignore"):
        above = np.nextafter(low, np.float32(np.inf))
    high = low if low != -np.inf and Fraction(float(low)) == exact else above
    toward = low if exact > 0 else high
    made = {"rd": low, "ru": high, "rz": toward}[mode]
    return np.copysign(made, np.float32(1 if exact > 0 else -1))


def reference(word: str, mode: str, a: float, b: float, c: float) -> np.float32:
    given = {"ieee_frcp": [a], "ieee_fsqrt": [a], "ieee_fmaf": [a, b, c]}.get(word, [a, b])
    with np.errstate(all="ignore"):
        x, y, z = np.float64(a), np.float64(b), np.float64(c)
        plain = {
            "ieee_add": lambda: x + y,
            "ieee_sub": lambda: x - y,
            "ieee_mul": lambda: x * y,
            "ieee_fdiv": lambda: x / y,
            "ieee_frcp": lambda: 1.0 / x,
            "ieee_fsqrt": lambda: np.sqrt(x),
            "ieee_fmaf": lambda: x * y + z,
        }[word]()
    infinite = not all(map(math.isfinite, given)) or word in ("ieee_fdiv", "ieee_frcp") and given[-1] == 0
    if infinite or word == "ieee_fsqrt" and a <= 0:
        return np.float32(plain)
    f = [Fraction(float(v)) for v in given]
    if word == "ieee_fsqrt":
        with np.errstate(all="ignore"):
            low = np.float32(math.isqrt(int(f[0] * 2**400)) / 2**200)
        while Fraction(float(low)) ** 2 > f[0]:
            low = np.nextafter(low, np.float32(0))
        while Fraction(float(np.nextafter(low, np.float32(np.inf)))) ** 2 <= f[0]:
            low = np.nextafter(low, np.float32(np.inf))
        exact = Fraction(float(low)) ** 2 == f[0]
        return low if exact or mode != "ru" else np.nextafter(low, np.float32(np.inf))
    exact = {
        "ieee_add": lambda: f[0] + f[1],
        "ieee_sub": lambda: f[0] - f[1],
        "ieee_mul": lambda: f[0] * f[1],
        "ieee_fdiv": lambda: f[0] / f[1],
        "ieee_frcp": lambda: 1 / f[0],
        "ieee_fmaf": lambda: f[0] * f[1] + f[2],
    }[word]()
    if exact:
        return rounded(exact, mode)
    if word in ("ieee_add", "ieee_sub", "ieee_fmaf") and mode == "rd":
        terms = {"ieee_add": (x, y), "ieee_sub": (x, -y), "ieee_fmaf": (x * y, z)}[word]
        return np.float32(-0.0 if any(math.copysign(1, t) < 0 for t in terms) else 0.0)
    return np.float32(plain)


def same_bits(got: np.ndarray, want: np.ndarray, *inputs: np.ndarray) -> None:
    nan = np.isnan(want)
    kind = f"u{want.dtype.itemsize}"
    wrong = np.flatnonzero((got.view(kind) != want.view(kind)) & ~(nan & np.isnan(got)))
    assert not len(wrong), [(got[k], want[k], *(i[k] for i in inputs)) for k in wrong[:6]]


@pytest.mark.parametrize("mode", ["rz", "ru", "rd"])
@pytest.mark.parametrize(
    "word", ["ieee_add", "ieee_sub", "ieee_mul", "ieee_fdiv", "ieee_frcp", "ieee_fsqrt", "ieee_fmaf"]
)
def test_results_rounded_in_a_direction(word: str, mode: str):
    a, b, c = pairs()
    n = len(a)

    @T.prim_func
    def kernel(A: T.Tensor((n,)), B: T.Tensor((n,)), C: T.Tensor((n,)), D: T.Tensor((n,))):
        with T.Kernel(1, threads=128):
            for i in T.Parallel(n):
                if word in ("ieee_frcp", "ieee_fsqrt"):
                    D[i] = getattr(T, word)(A[i], mode)
                elif word == "ieee_fmaf":
                    D[i] = T.ieee_fmaf(A[i], B[i], C[i], mode)
                else:
                    D[i] = getattr(T, word)(A[i], B[i], rounding_mode=mode)

    want = np.array(
        [reference(word, mode, *map(float, row)) for row in zip(a, b, c, strict=True)], np.float32
    )
    got = agree(kernel, {"A": a, "B": b, "C": c, "D": np.zeros(n, np.float32)}, exact=True)["D"]
    same_bits(got, want, a, b, c)
    out = torch.zeros(n)
    run(kernel)(*map(torch.from_numpy, (a, b, c)), out)
    same_bits(out.numpy(), want, a, b, c)


@pytest.mark.parametrize("mode", ["rn", "rz"])
def test_roundings_that_there_are_not(mode: str):
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float16")):
        with T.Kernel(1):
            A[0] = T.ieee_fsqrt(A[1], "up" if mode == "rn" else mode)

    if mode == "rn":
        with refused(TileValueError, "T.ieee_fsqrt with rounding 'up'", expected='"rz" (toward zero)'):
            kernel.trace()
    else:
        with refused(TileTypeError, "T.ieee_fsqrt of float16 with rounding 'rz'", expected="float32"):
            kernel.trace()


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_the_next_number(name: str):
    dtype = getattr(torch, name)
    a, b, _ = pairs()
    a, b = (torch.from_numpy(x).to(dtype) for x in (a, b))
    n = len(a)

    @T.prim_func
    def kernel(A: T.Tensor((n,), name), B: T.Tensor((n,), name), C: T.Tensor((n,), name)):
        with T.Kernel(1, threads=128):
            for i in T.Parallel(n):
                C[i] = T.nextafter(A[i], B[i])

    out = torch.zeros(n, dtype=dtype)
    run(kernel)(a, b, out)
    if name == "float16":
        want = torch.from_numpy(np.nextafter(a.numpy(), b.numpy())).where(
            a != b, b
        )  # NumPy's has a's zero there
    else:
        want = torch.nextafter(a, b)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    same_bits(out.view(bits).numpy(), want.view(bits).where(~want.isnan(), out.view(bits)).numpy())
    assert (out.isnan() == want.isnan()).all()
    if name != "bfloat16":
        args = {"A": a.numpy(), "B": b.numpy(), "C": np.zeros(n, name)}
        same_bits(agree(kernel, args, exact=True)["C"], want.numpy())


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_powers_of_two(name: str):
    with np.errstate(over="ignore"):
        a = pairs()[0].astype(name)
    if name == "float64":
        a[-200:] *= 2.0**-900
    n = len(a)
    rng = np.random.default_rng(3)
    k = np.concatenate([rng.integers(-60, 60, n // 2), rng.integers(-1300, 1300, n - n // 2)]).astype(
        np.int32
    )
    k[:4] = [2**31 - 1, -(2**31), 2200, -2200]

    @T.prim_func
    def kernel(A: T.Tensor((n,), name), K: T.Tensor((n,), "int32"), C: T.Tensor((n,), name)):
        with T.Kernel(1, threads=128):
            for i in T.Parallel(n):
                C[i] = T.ldexp(A[i], K[i])

    with np.errstate(all="ignore"):
        want = np.ldexp(a, k).astype(name)
    same_bits(agree(kernel, {"A": a, "K": k, "C": np.zeros(n, name)}, exact=True)["C"], want, a, k)
    out = torch.zeros(n, dtype=getattr(torch, name))
    run(kernel)(torch.from_numpy(a), torch.from_numpy(k), out)
    same_bits(out.numpy(), want, a, k)


def test_numbers_of_python():
    assert T.ldexp(1.5, 4) == 24.0 and T.nextafter(1.0, 2.0) == math.nextafter(1.0, 2.0)
    assert T.fast_rcp(4) == 0.25 and T.nearbyint(2.5) == 2 and T.atanh(0.0) == 0.0


def test_an_exponent_is_an_integer():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            A[0] = T.ldexp(A[1], 1.5)

    with refused(TileTypeError, "n of T.ldexp is 1.5", expected="an integer"):
        kernel.trace()


def test_halves_and_reciprocals():
    a = np.concatenate([SPECIAL, np.arange(-6, 6, 0.5, np.float32)])
    n = len(a)

    @T.prim_func
    def kernel(A: T.Tensor((n,)), B: T.Tensor((n,)), C: T.Tensor((n,)), D: T.Tensor((n,), "float64")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(n):
                B[i] = T.nearbyint(A[i])
                C[i] = T.fast_rcp(A[i])
                D[i] = T.fast_rcp(T.cast(A[i], "float64"))

    def zeros():
        return np.zeros(n, np.float32), np.zeros(n, np.float32), np.zeros(n)

    got = agree(kernel, dict(zip("ABCD", (a, *zeros()), strict=True)), exact=True)
    out = [torch.from_numpy(z) for z in zeros()]
    run(kernel)(torch.from_numpy(a), *out)
    with np.errstate(all="ignore"):
        want = np.rint(a), np.float32(1) / a, 1.0 / a.astype(np.float64)
    for name, made, w in zip("BCD", out, want, strict=True):
        same_bits(got[name], w, a)
        same_bits(made.numpy(), w, a)
