"""Functions, conversions and constants on the GPU against the simulator's numbers, over every special value
there is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.gpu.device import run
from tilescale.compiler.sim import numerics

SMALL = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float32", "float64", *SMALL)
#: units in the last place of the dtype that the functions may be off by: those of CUDA's library (CUDA C++
#: Programming Guide, "Mathematical Functions"), one more for the simulator's own rounding
ULPS = {
    "exp": 3,
    "exp2": 3,
    "exp10": 3,
    "log": 2,
    "log2": 2,
    "log10": 3,
    "log1p": 2,
    "sqrt": 0,
    "rsqrt": 3,
    "sin": 3,
    "cos": 3,
    "tan": 5,
    "tanh": 3,
    "sinh": 4,
    "cosh": 3,
    "asin": 3,
    "acos": 3,
    "atan": 3,
    "sigmoid": 5,
    "erf": 3,
    "floor": 0,
    "ceil": 0,
    "trunc": 0,
    "round": 0,
}
#: fast forms: the greatest absolute error for x between 0 and π, by x and the result (CUDA C++ Programming
#: Guide, "Intrinsic Functions"; exp2: PTX ISA, "ex2"). __tanf is __sinf(x) · (1 / __cosf(x)): close to π/2
#: the cosine's absolute error is all there is.
FAST = {
    "__exp": lambda x, y: (2 + np.floor(1.173 * x)) * ulp(y),
    "__exp2": lambda x, y: 2.0**-22 * y,
    "__exp10": lambda x, y: (2 + np.floor(2.97 * x)) * ulp(y),
    "__log": lambda x, y: np.where((x >= 0.5) & (x <= 2), 2.0**-21.41, 3 * ulp(y)),
    "__log2": lambda x, y: np.where((x >= 0.5) & (x <= 2), 2.0**-22, 2 * ulp(y)),
    "__log10": lambda x, y: np.where((x >= 0.5) & (x <= 2), 2.0**-24, 3 * ulp(y)),
    "__sin": lambda x, y: np.full_like(x, 2.0**-21.41),
    "__cos": lambda x, y: np.full_like(x, 2.0**-21.19),
    "__tan": lambda x, y: (
        np.abs(y) * (2.0**-21.41 / np.abs(np.sin(x)) + 2.0**-21.19 / np.abs(np.cos(x))) * 1.01 + 4 * ulp(y)
    ),
}
BINARY = {"pow": 5, "fmod": 0, "atan2": 4, "copysign": 0, "hypot": 4}


def specials(dtype: str, n: int = 4096) -> Any:
    """Random numbers of many sizes, zeros of both signs, infinities, a NaN, the least and the greatest,
    halves."""
    draw = np.random.default_rng(7)
    wide = draw.standard_normal(n) * np.exp2(draw.integers(-30, 30, n))
    wide[: n // 2] = draw.uniform(-4, 4, n // 2)
    small = np.asarray(
        [
            0.0,
            -0.0,
            np.inf,
            -np.inf,
            np.nan,
            0.5,
            1.5,
            2.5,
            -0.5,
            -1.5,
            1e-40,
            -1e-40,
            3e38,
            65504,
            65520,
            448,
            464,
            463.9,
            57344,
            61440,
            1e-9,
            2.0**-149,
            2.0**31,
            2.0**31 - 1,
            -(2.0**31),
            2.0**63,
            2.0**32,
            127.5,
            255.5,
            -128.5,
        ]
    )
    return numerics.encode(np.concatenate([wide, small]), dtype)


def ulp(y: Any) -> Any:
    """The distance of float32 numbers at y."""
    return np.spacing(np.abs(y).astype("float32")).astype(np.float64)


def distance(a: Any, b: Any) -> Any:
    """How many numbers of the dtype lie between; infinite and not-a-number results must be equal in kind."""
    integer = f"i{a.dtype.itemsize}"

    def ordered(v: Any) -> Any:
        bits = v.view(integer).astype(np.int64)
        return np.where(bits < 0, np.iinfo(integer).min - bits, bits)

    nan = np.isnan(a.astype(np.float64)) & np.isnan(b.astype(np.float64))
    return np.where(nan, 0, np.abs(ordered(a) - ordered(b)))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_functions(dtype: str):
    names, x = list(ULPS), specials(dtype)
    n, m = len(names), x.size

    @T.prim_func
    def kernel(X: T.Tensor((m,), dtype), Y: T.Tensor((n, m), dtype)):
        with T.Kernel(T.ceildiv(m, 128), threads=128) as bx:
            for i in T.Parallel(128):
                for k in range(n):
                    Y[k, bx * 128 + i] = getattr(T, names[k])(X[bx * 128 + i])

    got = run(kernel, {"X": x, "Y": np.zeros((n, m), x.dtype)})["Y"]
    with np.errstate(all="ignore"):
        for k, name in enumerate(names):
            want = numerics.encode(
                numerics.function(name, [numerics.decode(x, dtype)], "float32" if dtype in SMALL else dtype),
                dtype,
            )
            off = distance(got[k], want)
            # Rounded to 16 bits, results that differ in the last place of a float32 differ by one at most.
            allowed = min(ULPS[name], 1) if dtype in SMALL else ULPS[name]
            worst = int(off.argmax())
            assert off[worst] <= allowed, (
                f"{name}({x[worst]}) = {got[k][worst]}, not {want[worst]}: {off[worst]} ulp"
            )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_functions_of_two(dtype: str):
    names, x = list(BINARY), specials(dtype)
    y = np.roll(x, 17)
    n, m = len(names), x.size

    @T.prim_func
    def kernel(X: T.Tensor((m,), dtype), Y: T.Tensor((m,), dtype), Z: T.Tensor((n, m), dtype)):
        with T.Kernel(T.ceildiv(m, 128), threads=128) as bx:
            for i in T.Parallel(128):
                for k in range(n):
                    Z[k, bx * 128 + i] = getattr(T, names[k])(X[bx * 128 + i], Y[bx * 128 + i])

    got = run(kernel, {"X": x, "Y": y, "Z": np.zeros((n, m), x.dtype)})["Z"]
    with np.errstate(all="ignore"):
        for k, name in enumerate(names):
            want = numerics.encode(numerics.function(name, [x, y], dtype), dtype)
            off = distance(got[k], want)
            worst = int(off.argmax())
            assert off[worst] <= BINARY[name], (
                f"{name}({x[worst]}, {y[worst]}) = {got[k][worst]}, not {want[worst]}: {off[worst]} ulp"
            )


def test_fast_functions():
    names = list(FAST)
    x = np.random.default_rng(3).uniform(0.01, 3, 1024).astype("float32")
    n, m = len(names), x.size

    @T.prim_func
    def kernel(X: T.Tensor((m,), "float32"), Y: T.Tensor((n, m), "float32")):
        with T.Kernel(m // 128, threads=128) as bx:
            for i in T.Parallel(128):
                for k in range(n):
                    Y[k, bx * 128 + i] = getattr(T, names[k])(X[bx * 128 + i])

    got = run(kernel, {"X": x, "Y": np.zeros((n, m), "float32")})["Y"]
    for k, name in enumerate(names):
        want = numerics.function(name, [x], "float32").astype(np.float64)
        # One more for the rounding of `want`.
        over = np.abs(got[k] - want) - FAST[name](x.astype(np.float64), want) - ulp(want)
        worst = int(over.argmax())
        assert over[worst] <= 0, f"{name}({x[worst]}) = {got[k][worst]}, not {want[worst]}"


def bits(array: Any) -> Any:
    return array.view(f"u{array.dtype.itemsize}")


def equal(got: Any, want: Any, src: Any, what: str) -> None:
    """To the bit, but for the payload of NaNs."""
    if want.dtype.kind in "iub":
        same = got == want
    else:
        same = (bits(got) == bits(want)) | (
            np.isnan(got.astype(np.float64)) & np.isnan(want.astype(np.float64))
        )
    bad = np.flatnonzero(~same)
    assert bad.size == 0, (
        f"{what}: {src[bad[0]]} becomes {got[bad[0]]}, not {want[bad[0]]}; {bad.size} of {same.size} differ"
    )


@pytest.mark.parametrize("src", [*FLOATS, *INTS, "bool"])
def test_conversions(src: str):
    """From every dtype to every other; all values of the small ones."""
    if src == "bool":
        x = np.asarray([False, True] * 64)
    elif src.startswith(("float8", "int8", "uint8")):
        x = np.arange(256, dtype="uint8").view(numerics.storage(src))
    elif src in ("float16", "bfloat16", "int16", "uint16"):
        x = np.arange(65536, dtype="uint16").view(numerics.storage(src))
    elif src in INTS:
        edge = np.asarray([0, 1, 127, 128, 255, 256, 65535, 65536, 2**24 + 1, 2**31 - 1], dtype=src)
        x = np.concatenate(
            [
                edge,
                np.random.default_rng(1).integers(
                    np.iinfo(src).min, np.iinfo(src).max, 4096, dtype=src, endpoint=True
                ),
            ]
        )
    else:
        x = specials(src)
    m, others = x.size, [d for d in (*FLOATS, *INTS, "bool") if d != src]
    for start in range(0, len(others), 5):
        group = others[start : start + 5]
        while len(group) < 5:
            group.append(group[-1])
        a, b, c, d, e = group

        @T.prim_func
        def kernel(
            X: T.Tensor((m,), src),
            A: T.Tensor((m,), a),
            B: T.Tensor((m,), b),
            C: T.Tensor((m,), c),
            D: T.Tensor((m,), d),
            E: T.Tensor((m,), e),
        ):
            with T.Kernel(T.ceildiv(m, 128), threads=128) as bx:
                for i in T.Parallel(128):
                    at = bx * 128 + i
                    A[at] = T.cast(X[at], a)
                    B[at] = T.cast(X[at], b)
                    C[at] = T.cast(X[at], c)
                    D[at] = T.cast(X[at], d)
                    E[at] = T.cast(X[at], e)

        outputs = {name: np.zeros(m, numerics.storage(dst)) for name, dst in zip("ABCDE", group)}
        got = run(kernel, {"X": x, **outputs})
        with np.errstate(all="ignore"):
            for name, dst in zip("ABCDE", group):
                want = (
                    numerics.encode(numerics.cast(numerics.decode(x, src), src, dst), dst)
                    if dst in FLOATS
                    else numerics.cast(numerics.decode(x, src), src, dst)
                )
                equal(got[name], np.asarray(want, numerics.storage(dst)), x, f"{src} to {dst}")


def test_small_floats_are_computed_in_float32_and_rounded_once():
    x = specials("float16")
    y = np.roll(x, 5)
    m = x.size

    @T.prim_func
    def kernel(X: T.Tensor((m,), "float16"), Y: T.Tensor((m,), "float16"), Z: T.Tensor((m,), "float16")):
        with T.Kernel(T.ceildiv(m, 128), threads=128) as bx:
            for i in T.Parallel(128):
                Z[bx * 128 + i] = X[bx * 128 + i] * Y[bx * 128 + i] - X[bx * 128 + i]

    got = run(kernel, {"X": x, "Y": y, "Z": np.zeros(m, "float16")})["Z"]
    with np.errstate(
        all="ignore"
    ):  # the product of two float16 is exact in float32, so contraction changes nothing
        want = (x.astype("float32") * y.astype("float32") - x.astype("float32")).astype("float16")
    equal(got, want, x, "x * y - x")


def test_what_is_never_contracted():
    x = specials("float32")
    y, z = np.roll(x, 5), np.roll(x, 11)
    m = x.size

    @T.prim_func
    def kernel(
        X: T.Tensor((m,), "float32"),
        Y: T.Tensor((m,), "float32"),
        Z: T.Tensor((m,), "float32"),
        C: T.Tensor((2, m), "float32"),
    ):
        with T.Kernel(T.ceildiv(m, 128), threads=128) as bx:
            for i in T.Parallel(128):
                at = bx * 128 + i
                C[0, at] = T.ieee_add(T.ieee_mul(X[at], Y[at]), Z[at])
                C[1, at] = T.ieee_fmaf(X[at], Y[at], Z[at])

    got = run(kernel, {"X": x, "Y": y, "Z": z, "C": np.zeros((2, m), "float32")})["C"]
    with np.errstate(all="ignore"):
        equal(got[0], x * y + z, x, "x * y + z")
        equal(got[1], numerics.function("fma", [x, y, z], "float32"), x, "fma")


def test_minimum_and_maximum_keep_nan():
    x = specials("float32")
    y = np.roll(x, 5)
    m = x.size

    @T.prim_func
    def kernel(X: T.Tensor((m,), "float32"), Y: T.Tensor((m,), "float32"), Z: T.Tensor((2, m), "float32")):
        with T.Kernel(T.ceildiv(m, 128), threads=128) as bx:
            for i in T.Parallel(128):
                Z[0, bx * 128 + i] = T.max(X[bx * 128 + i], Y[bx * 128 + i])
                Z[1, bx * 128 + i] = T.min(X[bx * 128 + i], Y[bx * 128 + i])

    got = run(kernel, {"X": x, "Y": y, "Z": np.zeros((2, m), "float32")})["Z"]
    for k, f in enumerate((numerics.maximum, numerics.minimum)):
        want = f(x, y)
        assert np.array_equal(got[k], want, equal_nan=True)


@pytest.mark.parametrize("dtype", ["int32", "int64", "int8", "uint32"])
def test_division_rounds_down(dtype: str):
    draw = np.random.default_rng(2)
    low, high = (0 if dtype.startswith("u") else -100), 100
    x, y = draw.integers(low, high, 1024).astype(dtype), draw.integers(1, high, 1024).astype(dtype)
    if not dtype.startswith("u"):
        y[::2] = -y[::2]
    m = x.size

    @T.prim_func
    def kernel(X: T.Tensor((m,), dtype), Y: T.Tensor((m,), dtype), Z: T.Tensor((6, m), dtype)):
        with T.Kernel(m // 128, threads=128) as bx:
            for i in T.Parallel(128):
                at = bx * 128 + i
                Z[0, at] = X[at] // Y[at]
                Z[1, at] = X[at] % Y[at]
                Z[2, at] = X[at] // 8
                Z[3, at] = X[at] % 8
                Z[4, at] = X[at] // 7
                Z[5, at] = X[at] % 7

    got = run(kernel, {"X": x, "Y": y, "Z": np.zeros((6, m), dtype)})["Z"]
    eight, seven = np.asarray(8, dtype), np.asarray(7, dtype)
    for k, want in enumerate((x // y, x % y, x // eight, x % eight, x // seven, x % seven)):
        assert np.array_equal(got[k], want), k


def test_constants_to_the_bit():
    values = [
        float("inf"),
        float("-inf"),
        float("nan"),
        2.0**-149,
        -(2.0**-126),
        0.1,
        3.4028234663852886e38,
        -0.0,
        1e-45,
        16777217.0,
    ]
    n, halves = (
        len(values),
        [v if abs(v) < 65504 or v != v or abs(v) == float("inf") else 0.0 for v in values],
    )

    @T.prim_func
    def kernel(F: T.Tensor((n,), "float32"), D: T.Tensor((n,), "float64"), H: T.Tensor((n,), "float16")):
        with T.Kernel(1, threads=32):
            for k in range(n):
                F[k] = T.cast(values[k], "float32")
                D[k] = T.cast(values[k], "float64")
                H[k] = T.cast(halves[k], "float16")

    got = run(kernel, {"F": np.zeros(n, "float32"), "D": np.zeros(n, "float64"), "H": np.zeros(n, "float16")})
    with np.errstate(all="ignore"):
        equal(got["F"], np.asarray(values).astype("float32"), np.asarray(values), "float32")
        equal(got["D"], np.asarray(values), np.asarray(values), "float64")
        equal(got["H"], np.asarray(halves).astype("float16"), np.asarray(halves), "float16")


def test_scalars_by_value():
    @T.prim_func
    def kernel(
        A: T.Tensor((8,), "float64"),
        b: T.int8,
        l: T.int64,
        u: T.uint32,
        h: T.float16,
        f: T.float32,
        d: T.float64,
        p: T.bool,
    ):
        with T.Kernel(1, threads=32):
            A[0] = T.cast(b, "float64")
            A[1] = T.cast(l, "float64")
            A[2] = T.cast(u, "float64")
            A[3] = T.cast(h, "float64")
            A[4] = T.cast(f, "float64")
            A[5] = d
            A[6] = T.if_then_else(p, 1.0, 2.0)

    got = run(
        kernel,
        {"A": np.zeros(8), "b": -3, "l": -(2**40), "u": 2**32 - 1, "h": 0.1, "f": 0.1, "d": 0.1, "p": True},
    )["A"]
    want = [-3, -(2.0**40), 2.0**32 - 1, float(np.float16(0.1)), float(np.float32(0.1)), 0.1, 1.0, 0.0]
    assert got.tolist() == want, got.tolist()
