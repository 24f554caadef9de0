"""Elementwise functions against mpmath or NumPy's float64: special values, sweeps, and that the loops are
vector code."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.unit.cpu.harness import Library, make_func
from tilescale.compiler.cpu import codegen, convert
from tilescale.compiler.cpu.expr import vector_loop
from tilescale.compiler.cpu.vmath import MAX_ULP, SCALAR, functions, lower_call
from tilescale.errors import TileTypeError

N = 4096
DTYPES = ["float32", "float64"]
SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    np.inf,
    -np.inf,
    np.nan,
    1e-40,
    -1e-40,
    1e-310,
    5e-324,
    3.4e38,
    1.7e308,
    -1.7e308,
]
SPECIAL += [
    88.72,
    88.73,
    -87.3,
    -103.9,
    -104.5,
    709.78,
    709.79,
    -745.1,
    -746.0,
    127.99,
    128.0,
    -149.0,
    -150.0,
    1024.0,
    -1074.0,
]
RANGES = {
    "exp": (-110, 90),
    "exp2": (-152, 129),
    "exp10": (-46, 39),
    "expm1": (-30, 80),
    "tanh": (-12, 12),
    "sigmoid": (-100, 100),
    "erf": (-7, 7),
    "sin": (-1000, 1000),
    "cos": (-1000, 1000),
    "tan": (-100, 100),
    "__exp": (-80, 80),
    "__exp2": (-120, 120),
    "__exp10": (-30, 30),
    "__sin": (-100, 100),
    "__cos": (-100, 100),
    "__tan": (-10, 10),
    "__tanh": (-12, 12),
}
POSITIVE = {"log", "log2", "log10", "__log", "__log2", "__log10", "sqrt", "rsqrt"}
UNARY = sorted(functions() - SCALAR - {"pow", "copysign", "fma", "ieee_add", "ieee_sub", "ieee_mul"})


def reference(name: str, x: np.ndarray) -> np.ndarray:
    """In extended precision (80 bits), which resolves a thousandth of a float64's last place."""
    x = x.astype(np.longdouble)
    name = name.lstrip("_")
    with np.errstate(all="ignore"):
        if name == "sigmoid":
            return 1 / (1 + np.exp(-x))
        if name == "rcp":
            return 1 / x
        if name == "rsqrt":
            return 1 / np.sqrt(x)
        if name == "exp10":
            return np.power(np.longdouble(10), x)
        if name == "erf":
            import mpmath

            mpmath.mp.prec = 80
            return np.array(
                [np.longdouble(mpmath.nstr(mpmath.erf(mpmath.mpf(repr(float(v)))), 24)) for v in x]
            )
        if name in ("round", "nearbyint"):
            return np.rint(x)
        return getattr(np, "abs" if name == "abs" else name)(x)


def inputs(name: str, dtype: str) -> np.ndarray:
    rng = np.random.default_rng(7)
    special = np.array(SPECIAL).astype(dtype)
    low, high = RANGES.get(name, (-50, 50))
    if dtype == "float64" and name in ("exp", "exp2"):
        low, high = low * 7, high * 7
    count = N - 2 * len(special)
    near = rng.standard_normal(count // 3)
    tiny = rng.standard_normal(count // 3) * 10.0 ** rng.uniform(-30, 0, count // 3)
    wide = rng.uniform(low, high, count - 2 * (count // 3))
    if name in POSITIVE or name == "log1p":
        wide = 10.0 ** rng.uniform(-37, 38, len(wide))
    values = np.concatenate([special, special, near, tiny, wide]).astype(dtype)
    return values[:N]


def ulps(got: np.ndarray, want: np.ndarray, dtype: str) -> np.ndarray:
    """Distance in units of the last place of the exact result; 0 where both are the same special value."""
    with np.errstate(all="ignore"):
        rounded = want.astype(dtype)
        spacing = np.spacing(np.abs(rounded)).astype(np.longdouble)
        error = np.abs(got.astype(np.longdouble) - want) / spacing
        same = (np.isnan(got) & np.isnan(rounded)) | (got == rounded)
        mixed = np.isnan(got) != np.isnan(rounded)
        error = np.where(same & ~np.isfinite(rounded), 0, error)
        edge = ~np.isfinite(rounded) & ~same & (np.abs(got) == np.finfo(dtype).max)
        return np.where(edge, 1, np.where(mixed | ~np.isfinite(error), np.inf, error))


def unary(name: str, dtype: str):
    def body(cx, x, y):
        lanes = codegen.host_cpu().lanes(convert.compute_dtype(dtype))

        def element(i):
            value = lower_call(name, [convert.load(x, i, dtype)], dtype)
            return convert.store(y, i, value, dtype)

        return vector_loop(N, lanes, element)

    return body


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> Library:
    library = Library(Path(tmp_path_factory.mktemp("vmath")))
    for dtype in DTYPES:
        for name in UNARY:
            library.add(f"{name}_{dtype}", (dtype, dtype), (N, N), unary(name, dtype))

        def power(cx, x, y, z, dtype=dtype):
            lanes = codegen.host_cpu().lanes(dtype)
            return vector_loop(
                N,
                lanes if dtype == "float32" else 1,
                lambda i: convert.store(
                    z,
                    i,
                    lower_call("pow", [convert.load(x, i, dtype), convert.load(y, i, dtype)], dtype),
                    dtype,
                ),
            )

        library.add(f"pow_{dtype}", (dtype,) * 3, (N,) * 3, power)
    for dtype in ("float16", "bfloat16"):
        library.add(f"exp_{dtype}", (dtype, dtype), (N, N), unary("exp", dtype))
    return library


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", UNARY)
def test_accuracy(lib: Library, name: str, dtype: str) -> None:
    x = inputs(name, dtype)
    if name in ("sin", "cos", "tan", "__sin", "__cos", "__tan"):
        x = x[~(np.abs(x) > 1e15)]
        x = np.resize(x, N)
    y = np.full(N, np.nan, dtype)
    lib(f"{name}_{dtype}", x, y)
    want = reference(name, x)
    error = ulps(y, want, dtype)
    if name.startswith("__"):
        want32 = want.astype(dtype)
        fine = (np.abs(want32) > 1e-37) & np.isfinite(want32)
        error = np.where(fine | np.isnan(want32) | np.isinf(want32), error, 0)
        if "log" in name:  # fast logarithms: subnormal inputs and results near zero are outside the promise
            error = np.where((np.abs(x) < 1e-37) & (x != 0) | (np.abs(want32) < 0.1), 0, error)
    worst = int(np.argmax(error))
    bound = MAX_ULP[name][DTYPES.index(dtype)]
    assert error[worst] <= bound, (
        f"{name}({x[worst]!r}) = {y[worst]!r}, want {want[worst]!r}: {error[worst]:.3f} ulp"
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_pow(lib: Library, dtype: str) -> None:
    rng = np.random.default_rng(3)
    x = np.exp(rng.uniform(-20, 20, N)).astype(dtype)
    y = rng.uniform(-4, 4, N).astype(dtype)
    x[:600] *= -1
    y[:300] = np.rint(y[:300])
    special = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 2.0, 3.0, 0.5, -0.5, -3.0], dtype)
    grid = np.array(np.meshgrid(special, special)).reshape(2, -1)
    x[600 : 600 + grid.shape[1]], y[600 : 600 + grid.shape[1]] = grid
    z = np.full(N, 7, dtype)
    lib(f"pow_{dtype}", x, y, z)
    with np.errstate(all="ignore"):
        want = np.power(x.astype(np.longdouble), y.astype(np.longdouble))
    error = ulps(z, want, dtype)
    worst = int(np.argmax(error))
    assert error[worst] <= 1.0, (x[worst], y[worst], z[worst], want[worst], error[worst])


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_large_angles(lib: Library, name: str) -> None:
    x = np.resize(np.array([2.0**50, -(2.0**60), 1e30, 3e38, 1e9, 12345678.0], np.float32), N)
    y = np.empty(N, np.float32)
    lib(f"{name}_float32", x, y)
    assert np.isnan(y[:4]).all()
    np.testing.assert_allclose(y[4:6], getattr(np, name)(x[4:6].astype(np.float64)), rtol=1e-6)


def test_small_floats(lib: Library) -> None:
    import ml_dtypes

    for dtype, kind in (("float16", np.dtype("float16")), ("bfloat16", np.dtype(ml_dtypes.bfloat16))):
        x = np.linspace(-12, 11, N).astype(kind)
        y = np.zeros(N, kind)
        lib(f"exp_{dtype}", x, y)
        want = np.exp(x.astype(np.float64))
        half_place = np.spacing(want.astype(kind)).astype(np.float64) / 2
        assert (np.abs(y.astype(np.float64) - want) <= half_place * 1.001).all()


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.skipif(
    codegen.host_cpu().vector_bytes == codegen.host_cpu().vector_registers == 16, reason="SSE has no FMA"
)
def test_loops_are_vector_code(name: str) -> None:
    """No call at all, and no scalar float arithmetic, in the loop of any function."""
    for dtype in DTYPES:
        asm = codegen.get_asm({"f": make_func((dtype, dtype), (N, N), unary(name, dtype))})
        body = asm[asm.index("\nf:") : asm.index(".size\tf")]
        assert not re.search(r"\bcall", body), f"{name} of {dtype} calls a function"
        if "avx" in codegen.host_cpu().features:
            assert not re.search(r"\bv?(add|mul|sub|div|fn?madd\d+)s[sd]\b", body), (
                f"{name} of {dtype} has scalar arithmetic"
            )


def test_refusals() -> None:
    with pytest.raises(TileTypeError, match="T.frobnicate is not known"):
        lower_call("frobnicate", [], "float32")
    with pytest.raises(TileTypeError, match="T.exp of int32"):
        lower_call("exp", [None], "int32")
    with pytest.raises(TileTypeError, match="takes 2 arguments"):
        lower_call("pow", [None], "float32")
