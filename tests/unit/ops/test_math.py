"""T.exp and its kin as kernels use them, against float64: exact ones within 2 units in the last place, fast
ones within their bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tests.kernels import refused, run
from tests.unit.cuda.emulated import agree, data, empty
from tilescale.errors import TileTypeError, TileValueError


def root(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded, which torch.sqrt is not everywhere."""
    return torch.from_numpy(np.sqrt(x.numpy()))


UNIT = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
#: name → (reference, range, greatest error in units of the last place)
UNARY = {
    "exp": (torch.exp, (-8, 8), 2),
    "exp2": (torch.exp2, (-8, 8), 2),
    "exp10": (lambda x: 10.0**x, (-4, 4), 2),
    "log": (torch.log, (0.01, 90), 2),
    "log2": (torch.log2, (0.01, 90), 2),
    "log10": (torch.log10, (0.01, 90), 2),
    "log1p": (torch.log1p, (-0.5, 9), 2),
    "sqrt": (root, (0, 90), 0.5001),
    "rsqrt": (torch.rsqrt, (0.01, 90), 2),
    "sin": (torch.sin, (-6, 6), 2),
    "cos": (torch.cos, (-6, 6), 2),
    "tan": (torch.tan, (-1.4, 1.4), 4),
    "tanh": (torch.tanh, (-4, 4), 2.1),
    "sigmoid": (torch.sigmoid, (-8, 8), 3),
    "erf": (torch.erf, (-3, 3), 3),
    "floor": (torch.floor, (-9, 9), 0),
    "ceil": (torch.ceil, (-9, 9), 0),
    "trunc": (torch.trunc, (-9, 9), 0),
    "round": (torch.round, (-9, 9), 0),
    "abs": (torch.abs, (-9, 9), 0),
    "asin": (torch.asin, (-1, 1), 3),
    "acos": (torch.acos, (-1, 1), 3),
    "atan": (torch.atan, (-9, 9), 3),
    "sinh": (torch.sinh, (-4, 4), 3),
    "cosh": (torch.cosh, (-4, 4), 3),
    "nearbyint": (torch.round, (-9, 9), 0),
    "asinh": (torch.asinh, (-9, 9), 4),
    "acosh": (torch.acosh, (1.01, 9), 4),
    "atanh": (torch.atanh, (-0.95, 0.95), 4),
    "fast_rcp": (torch.reciprocal, (0.1, 90), 1),
    "ieee_sqrt": (root, (0, 90), 0.5001),
    "ieee_fsqrt": (root, (0, 90), 0.5001),
    "ieee_frcp": (torch.reciprocal, (0.1, 90), 0.5001),
    "ieee_frsqrt": (torch.rsqrt, (0.1, 90), 2),
}
FAST = {
    "__exp": 16,
    "__exp2": 16,
    "__exp10": 32,
    "__log": 32,
    "__log2": 32,
    "__log10": 32,
    "__sin": 16,
    "__cos": 16,
    "__tan": 32,
}


def worst(got: torch.Tensor, want: torch.Tensor, name: str) -> float:
    """The greatest error in units of the last place of the wanted value (absolute near zero, where the fast
    ones are)."""
    unit = UNIT[name] * torch.exp2(torch.floor(torch.log2(want.abs().clamp_min(2.0**-14))))
    return float(((got.double() - want).abs() / unit).max())


@pytest.mark.parametrize("name", list(UNIT))
def test_functions_of_one_argument(name: str):
    functions = [*UNARY, *(FAST if name == "float32" else ())]

    @T.prim_func
    def kernel(A: T.Tensor((len(functions), 500), name), C: T.Tensor((len(functions), 500), name)):
        with T.Kernel(1):
            for k, function in enumerate(functions):
                for i in T.Parallel(500):
                    C[k, i] = getattr(T, function)(A[k, i])

    low_high = [UNARY[f.removeprefix("__")][1] for f in functions]
    g = torch.Generator().manual_seed(0)
    a = torch.stack(
        [torch.rand(500, generator=g, dtype=torch.float64) * (h - l) + l for l, h in low_high]
    ).to(getattr(torch, name))
    c = torch.zeros_like(a)
    run(kernel)(a, c)
    for k, function in enumerate(functions):
        reference, _, bound = UNARY[function.removeprefix("__")]
        bound = FAST.get(function, bound) + (0.51 if name in ("float16", "bfloat16") and bound else 0)
        error = worst(c[k], reference(a[k].double()), name)
        assert error <= bound, f"{function}({name}) is {error:.2f} units off, {bound} are allowed"


def test_functions_of_several_arguments_and_special_values():
    @T.prim_func
    def kernel(
        A: T.Tensor((64,), "float32"),
        B: T.Tensor((64,), "float32"),
        C: T.Tensor((10, 64), "float32"),
        D: T.Tensor((6, 64), "bool"),
    ):
        with T.Kernel(1):
            for i in T.Parallel(64):
                x, y = A[i], B[i]
                C[0, i] = T.pow(T.abs(x) + 0.1, y)
                C[1, i] = T.fmod(x, y)
                C[2, i] = T.atan2(x, y)
                C[3, i] = T.copysign(x, y)
                C[4, i] = T.hypot(x, y)
                C[5, i] = T.ieee_fmaf(x, y, 1.5)
                C[6, i] = T.clamp(x, -0.5, 0.5)
                C[7, i] = T.max(x, y, 0.25)
                C[8, i] = T.min(x, -y)
                C[9, i] = T.ieee_fdiv(x, y)
                big = T.if_then_else(
                    i % 3 == 0, T.infinity("float32"), T.if_then_else(i % 3 == 1, x / 0.0 * 0.0, x)
                )
                D[0, i] = T.isinf(big)
                D[1, i] = T.isnan(big)
                D[2, i] = T.isfinite(big)
                D[3, i] = big != big
                D[4, i] = big == big or big < 0 or big >= 0
                D[5, i] = not big > 0

    a, b = torch.randn(64), torch.randn(64)
    c, d = torch.zeros(10, 64), torch.zeros(6, 64, dtype=torch.bool)
    run(kernel)(a, b, c, d)
    x, y = a.double(), b.double()
    want = [
        (x.abs() + 0.1) ** y,
        torch.fmod(x, y),
        torch.atan2(x, y),
        torch.copysign(x, y),
        torch.hypot(x, y),
        x * y + 1.5,
        x.clamp(-0.5, 0.5),
        torch.maximum(torch.maximum(x, y), torch.tensor(0.25)),
        torch.minimum(x, -y),
        x / y,
    ]
    for k, w in enumerate(want):
        assert worst(c[k], w, "float32") <= 3, k
    assert c[9].equal(a / b), "division is correctly rounded"
    third = torch.arange(64) % 3
    assert d[0].equal(third == 0) and d[1].equal(third == 1) and d[2].equal(third == 2)
    assert (
        d[3].equal(third == 1)
        and d[4].equal(third != 1)
        and d[5].equal((third == 1) | (third == 2) & (a <= 0))
    )


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_what_is_written_ieee_is_never_contracted(name: str):
    @T.prim_func
    def kernel(
        X: T.Tensor((512,), name),
        Y: T.Tensor((512,), name),
        Z: T.Tensor((512,), name),
        C: T.Tensor((3, 512), name),
    ):
        with T.Kernel(4, threads=128) as bx:
            for i in T.Parallel(128):
                at = bx * 128 + i
                C[0, at] = T.ieee_add(T.ieee_mul(X[at], Y[at]), Z[at])
                C[1, at] = T.ieee_sub(X[at] * Y[at], Z[at])
                C[2, at] = T.ieee_mul(X[at], Y[at]) - Z[at]

    x, y, z = torch.randn(3, 512, dtype=getattr(torch, name))
    c = torch.zeros(3, 512, dtype=x.dtype)
    run(kernel)(x, y, z, c)
    assert c[0].equal(x * y + z) and c[1].equal(x * y - z) and c[2].equal(x * y - z)


def test_python_values_stay_pythons():
    @T.prim_func
    def kernel(C: T.Tensor((6,), "float64")):
        with T.Kernel(1):
            for k, value in enumerate(
                (T.exp(1.0), T.max(2, 7), T.pow(2, 10), T.ceildiv(7, 2), T.clamp(5, 0, 3), T.abs(-4))
            ):
                C[k] = T.cast(value, "float64") if isinstance(value, int) else value * 1.0

    c = torch.zeros(6, dtype=torch.float64)
    run(kernel)(c)
    assert torch.allclose(c, torch.tensor([math.e, 7, 1024, 4, 3, 4], dtype=torch.float64), rtol=1e-7)


def test_limits_of_dtypes():
    dtypes = (
        "int8",
        "uint8",
        "int16",
        "int32",
        "float8_e4m3fn",
        "float8_e5m2",
        "float16",
        "bfloat16",
        "float32",
        "float64",
    )

    @T.prim_func
    def kernel(C: T.Tensor((len(dtypes), 2), "float64"), D: T.Tensor((2,), "int64")):
        with T.Kernel(1):
            for k, name in enumerate(dtypes):
                C[k, 0] = T.max_value(name)
                C[k, 1] = T.min_value(name)
            D[0] = T.max_value("int64")
            D[1] = T.min_value("int64")

    c, d = torch.zeros(len(dtypes), 2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    run(kernel)(c, d)
    for k, name in enumerate(dtypes):
        info = (torch.finfo if "float" in name else torch.iinfo)(getattr(torch, name))
        assert c[k].tolist() == [info.max, info.min], name
    assert d.tolist() == [2**63 - 1, -(2**63)]
    assert (T.max_value(T.float4_e2m1fn), T.min_value("int4"), T.max_value("uint4")) == (6.0, -8, 15)
    with refused(TileTypeError, "float8_e4m3fn has no infinity", write="T.max_value"):
        T.infinity("float8_e4m3fn")
    with refused(TileTypeError, "int32 has no infinity"):
        T.infinity("int32")

    @T.prim_func
    def sizes(C: T.Tensor((4,), "float32")):
        with T.Kernel(4) as b:
            C[b] = T.reinterpret(b, "float16")

    with refused(TileValueError, "int32 and float16 have different sizes", at='T.reinterpret(b, "float16")'):
        sizes.trace()

    @T.prim_func
    def rounding(C: T.Tensor((4,), "float32")):
        with T.Kernel(4) as b:
            C[b] = T.ieee_add(C[b], 1.0, rounding_mode="up")

    with refused(TileValueError, "T.ieee_add with rounding 'up'", expected='"rn"'):
        rounding.trace()


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint8", "int16"])
def test_bits_on_emulated_threads(dtype: str):
    @T.prim_func
    def kernel(A: T.Tensor((40,), dtype), B: T.Tensor((40,), dtype), C: T.Tensor((5, 40), dtype)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                C[0, i] = ~A[i]
                C[1, i] = T.bitwise_not(A[i] & B[i])
                C[2, i] = A[i] | ~B[i]
                C[3, i] = ~(A[i] ^ B[i]) + 1
                C[4, i] = ~T.cast(i, dtype)

    a, b = data((40,), dtype, 1), data((40,), dtype, 2)
    for arch in ("sm_90a", "sm_80"):
        got = agree(kernel, {"A": a, "B": b, "C": empty((5, 40), dtype)}, arch=arch)["C"]
        assert (got[:3] == [~a, ~(a & b), a | ~b]).all()


def test_the_opposite_of_a_truth():
    """In C the opposite of a truth is ``!``: ``~`` of it is −1 or −2, and both hold."""

    @T.prim_func
    def kernel(A: T.Tensor((40,), "int32"), C: T.Tensor((4, 40), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                outside = (A[i] < 3) | (A[i] > 5)
                C[0, i] = T.if_then_else(~outside, 1, 2)
                C[1, i] = T.cast(T.bitwise_not(A[i] == 2), "int32")
                C[2, i] = T.cast(~T.any_of(A[i] == 1, A[i] == 7), "int32")
            for i in T.serial(40):
                if ~(A[i] < 3):
                    C[3, i] = 1
                else:
                    C[3, i] = 2

    a = torch.arange(40, dtype=torch.int32) % 9
    between = (a >= 3) & (a <= 5)
    want = torch.stack([2 - between.int(), a != 2, (a != 1) & (a != 7), 2 - (a >= 3).int()]).int()
    for target in ("cpu", "sim"):
        got = torch.zeros_like(want)
        tilescale.compile(kernel, target=target)(a, got)
        assert got.equal(want), target
    text = tilescale.compile(kernel, target="cuda").get_kernel_source()
    assert not [line for line in text.splitlines() if "~" in line.split("//")[0]]
    assert agree(kernel, {"A": a.numpy(), "C": empty((4, 40), "int32")})["C"].tolist() == want.tolist()


def test_constants_that_wrap():
    """They are folded where they are written; TVM's own folding refuses what the dtype does not hold."""

    @T.prim_func
    def kernel(C: T.Tensor((6,), "int64")):
        with T.Kernel(1, threads=32):
            C[0] = T.cast(1, "int32") << 31
            C[1] = T.cast(T.cast(3, "uint32") - T.cast(5, "uint32"), "int64")
            C[2] = T.cast(T.cast(200, "uint8") << T.cast(2, "uint8"), "int64")
            C[3] = T.cast(T.cast(100, "int8") << T.cast(2, "int8"), "int64")
            C[4] = T.cast(-T.cast(3, "uint32"), "int64")
            C[5] = T.cast(T.cast(T.cast(-3, "int32"), "uint8"), "int64")

    for target in ("cpu", "sim"):
        got = torch.zeros(6, dtype=torch.int64)
        tilescale.compile(kernel, target=target)(got)
        assert got.tolist() == [-(2**31), 2**32 - 2, 800, 400, 2**32 - 3, 253]
    assert tilescale.compile(kernel, target="cuda").get_kernel_source()


def test_differences_of_unsigned_numbers_wrap():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                exponent = (T.reinterpret("uint32", A[i]) >> 23) & 0xFF
                power = exponent - 127
                B[i] = T.cast(power, "int32") * 2 + T.if_then_else(power > T.uint32(300), 5, 1)

    powers = np.arange(-20, 44)
    a, got = (2.0**powers).astype(np.float32), np.zeros(64, np.int32)
    run(kernel)(a.copy(), got)
    np.testing.assert_array_equal(got, powers * 2 + np.where(powers < 0, 5, 1))
    np.testing.assert_array_equal(agree(kernel, {"A": a, "B": np.zeros(64, np.int32)})["B"], got)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
def test_left_shifts_of_small_integers_are_c_s(dtype: str):
    """Of 32 bits, until they are stored or cast; sums and products wrap in their dtype."""

    @T.prim_func
    def kernel(A: T.Tensor((64,), dtype), C: T.Tensor((4, 64), "int32"), D: T.Tensor((2, 64), dtype)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                C[0, i] = T.cast((A[i] & 15) << 20, "int32")
                C[1, i] = T.cast(((A[i] & 3) << 9) | (A[i] & 7), "int32")
                C[2, i] = T.cast(1 << (A[i] & 15), "int32")
                C[3, i] = T.if_then_else((A[i] & 1) << 8 > 100, 1, 0)
                D[0, i] = A[i] << 3
                D[1, i] = A[i] * A[i] + A[i]

    info, draw = np.iinfo(dtype), np.random.default_rng(4)
    a = draw.integers(info.min, info.max, 64, dtype, endpoint=True)
    wide = a.astype(np.int64)
    want = [(wide & 15) << 20, ((wide & 3) << 9) | (wide & 7), 1 << (wide & 15), wide & 1]
    low = [(wide << 3).astype(dtype), (wide * wide + wide).astype(dtype)]
    got = agree(kernel, {"A": a, "C": np.zeros((4, 64), np.int32), "D": np.zeros((2, 64), dtype)})
    on_cpu = (
        torch.from_numpy(a.copy()),
        torch.zeros(4, 64, dtype=torch.int32),
        torch.from_numpy(np.zeros((2, 64), dtype)),
    )
    run(kernel)(*on_cpu)
    for c, d in ((got["C"], got["D"]), (on_cpu[1].numpy(), on_cpu[2].numpy())):
        np.testing.assert_array_equal(c, np.array(want, np.int32))
        np.testing.assert_array_equal(d, low)


def test_extremes_of_extents_in_front_of_a_kernel():
    n, m = T.dynamic("n"), T.dynamic("m")
    blocks = T.max(n, T.min(m, 3))

    @T.prim_func
    def kernel(A: T.Tensor((n,), "int32"), B: T.Tensor((m,), "int32"), C: T.Tensor((64,), "int32")):
        with T.Kernel(blocks, threads=32) as bx:
            C[bx] = 1

    for target in ("cpu", "sim"):
        for sizes in ((2, 5), (1, 2), (6, 2)):
            a, b, c = (torch.zeros(k, dtype=torch.int32) for k in (*sizes, 64))
            tilescale.compile(kernel, target=target)(a, b, c)
            assert int(c.sum()) == max(sizes[0], min(sizes[1], 3))
    assert tilescale.compile(kernel, target="cuda:sm_90a").get_kernel_source()
