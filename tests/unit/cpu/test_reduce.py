"""Reductions and scans against NumPy: every op, ragged shapes, all axes, all dtypes, NaN, strides."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.unit.cpu.harness import Library, row_major
from tilescale.compiler.cpu.reduce import OPS, emit_cumsum, emit_reduce
from tilescale.compiler.cpu.tile import Tile
from tilescale.errors import TileTypeError, TileValueError

KINDS = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
SHAPES = [(1, 1), (5, 7), (33, 17), (16, 64), (3, 200), (130, 19), (2, 3, 40), (4, 37, 5), (77,)]
NUMBER = ["sum", "prod", "max", "min", "abssum", "absmax"]
CASES = [(shape, axis, op, "float32", "float32", clear) for shape in SHAPES for axis in range(len(shape))
         for op, clear in (("sum", 1), ("max", 0))]  # fmt: skip
CASES += [
    ((33, 17), axis, op, "float32", "float32", clear) for axis in (0, 1) for op in NUMBER for clear in (0, 1)
]
CASES += [
    ((6, 70), axis, op, dtype, dtype, 1)
    for axis in (0, 1)
    for dtype in ("float64", "float16", "bfloat16", "int8", "int32", "int64", "uint8", "uint32")
    for op in ("sum", "max", "min", "absmax")
]
CASES += [((6, 70), axis, op, dtype, dtype, clear) for axis in (0, 1) for dtype in ("int32", "uint8", "int64")
          for op in ("bitand", "bitor", "bitxor") for clear in (0, 1)]  # fmt: skip
CASES += [
    ((6, 70), axis, op, dtype, "bool", clear)
    for axis in (0, 1)
    for dtype in ("bool", "float32", "int16")
    for op in ("any", "all")
    for clear in (0, 1)
]
CASES += [
    ((6, 70), axis, "sum", src, dst, 0)
    for axis in (0, 1)
    for src, dst in (
        ("bfloat16", "float32"),
        ("int8", "int32"),
        ("float8_e4m3fn", "float32"),
        ("float8_e5m2", "float16"),
        ("float32", "float64"),
        ("bool", "int32"),
    )
]
CASES = sorted(set(CASES))
SCANS = [
    ((5, 40), axis, reverse, op, dtype)
    for axis in (0, 1)
    for reverse in (0, 1)
    for op, dtype in (
        ("sum", "float32"),
        ("max", "float32"),
        ("sum", "int32"),
        ("min", "int8"),
        ("sum", "bfloat16"),
    )
]
SCANS += [((3, 19, 6), 1, 0, "sum", "float32"), ((50,), 0, 1, "sum", "float64")]


def kind(dtype: str) -> np.dtype:
    return KINDS.get(dtype) or np.dtype(dtype)


def name_of(case: tuple) -> str:
    return "_".join("x".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in case)


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if "int" in dtype:
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    values = np.where(rng.random(shape) < 0.1, 0, rng.standard_normal(shape) * 1.5)
    return values.astype(kind(dtype))


def combine(op: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    table = {
        "sum": np.add,
        "abssum": np.add,
        "prod": np.multiply,
        "max": np.maximum,
        "absmax": np.maximum,
        "min": np.minimum,
        "bitand": np.bitwise_and,
        "bitor": np.bitwise_or,
        "bitxor": np.bitwise_xor,
        "any": np.logical_or,
        "all": np.logical_and,
    }
    with np.errstate(all="ignore"):
        return table[op](a, b)


def expected(x: np.ndarray, axis: int, op: str, dst: str) -> np.ndarray:
    wide = x.astype(bool) if op in ("any", "all") else x.astype(np.float64 if "float" in dst else dst)
    if op.startswith("abs") and not dst.startswith("u"):
        with np.errstate(all="ignore"):
            wide = np.abs(wide)
    table = {
        "sum": np.add,
        "abssum": np.add,
        "prod": np.multiply,
        "max": np.maximum,
        "absmax": np.maximum,
        "min": np.minimum,
        "bitand": np.bitwise_and,
        "bitor": np.bitwise_or,
        "bitxor": np.bitwise_xor,
        "any": np.logical_or,
        "all": np.logical_and,
    }
    extra = {} if op in ("any", "all") else {"dtype": wide.dtype}
    if "bit" in op or op in ("max", "min", "absmax"):
        extra = {}
    return table[op].reduce(wide, axis=axis, **extra)


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> Library:
    library = Library(Path(tmp_path_factory.mktemp("reduce")))
    for case in CASES:
        shape, axis, op, src, dst, clear = case
        out = tuple(e for i, e in enumerate(shape) if i != axis)

        def body(cx, x, y, case=case, out=out):
            shape, axis, op, src, dst, clear = case
            return emit_reduce(cx, row_major(x, src, shape), row_major(y, dst, out), axis, op, bool(clear))

        numel = int(np.prod(out)) if out else 1
        library.add(name_of(case), (src, dst), (int(np.prod(shape)), numel), body)
    for case in SCANS:

        def scan(cx, x, y, case=case):
            shape, axis, reverse, op, dtype = case
            return emit_cumsum(
                cx, row_major(x, dtype, shape), row_major(y, dtype, shape), axis, bool(reverse), op
            )

        library.add("scan" + name_of(case), (case[4],) * 2, (int(np.prod(case[0])),) * 2, scan)

    def strided(cx, x, y):
        return emit_reduce(
            cx,
            Tile(x, "float32", (9, 11), (3, 40), 5),
            Tile(y, "float32", (9, 1), (4, 7), 2),
            1,
            "sum",
            False,
        )

    library.add("strided", ("float32",) * 2, (500, 50), strided)
    return library


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_reduce(lib: Library, case: tuple) -> None:
    shape, axis, op, src, dst, clear = case
    rng = np.random.default_rng(len(name_of(case)))
    x = random(rng, shape, src)
    if op == "all" and axis == 1:
        x[1] = x[1].dtype.type(1)
    want = expected(x, axis, op, dst)
    y = (
        np.full(want.shape, 1 if dst == "bool" else np.nan if "float" in dst else 99, kind(dst))
        if clear
        else random(rng, want.shape, dst)
    )
    y = np.array(y)
    if not clear:
        want = combine(op, y.astype(want.dtype), want)
    lib(name_of(case), x, y)
    if "float" not in dst or op in ("max", "min", "absmax"):
        np.testing.assert_array_equal(y.astype(want.dtype), want)
        return
    eps = {"float64": 2**-53, "float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}[dst]
    size = np.abs(x.astype(np.float64)).sum(axis=axis) if op != "prod" else np.abs(want)
    assert (
        np.abs(y.astype(np.float64) - want) <= 1.01 * eps * np.abs(want) + 20 * min(eps, 2**-24) * (size + 2)
    ).all()


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("op", ["max", "absmax", "min"])
def test_nan_wins(lib: Library, op: str, axis: int) -> None:
    for place in ((0, 0), (20, 9), (32, 16)):
        x = np.random.default_rng(1).standard_normal((33, 17)).astype(np.float32)
        x[place] = np.nan
        y = np.zeros(33 if axis else 17, np.float32)
        lib(name_of(((33, 17), axis, op, "float32", "float32", 1)), x, y)
        assert np.isnan(y).sum() == 1 and np.isnan(y[place[0] if axis else place[1]])


def test_repeats_exactly(lib: Library) -> None:
    x = np.random.default_rng(1).standard_normal((3, 200)).astype(np.float32)
    results = []
    for _ in range(3):
        y = np.zeros(3, np.float32)
        lib(name_of(((3, 200), 1, "sum", "float32", "float32", 1)), x.copy(), y)
        results.append(y.tobytes())
    assert len(set(results)) == 1


def test_strides_and_kept_axis(lib: Library) -> None:
    rng = np.random.default_rng(5)
    x, y = rng.standard_normal(500).astype(np.float32), rng.standard_normal(50).astype(np.float32)
    want = y.copy()
    want[2:38:4] += np.lib.stride_tricks.as_strided(x[5:], (9, 11), (12, 160)).sum(1)
    lib("strided", x, y)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", SCANS, ids=name_of)
def test_scan(lib: Library, case: tuple) -> None:
    shape, axis, reverse, op, dtype = case
    x = random(np.random.default_rng(2), shape, dtype)
    table = {"sum": np.add, "max": np.maximum, "min": np.minimum}
    wide = x.astype(np.float64) if "float" in dtype else x
    flip = np.flip(wide, axis) if reverse else wide
    want = table[op].accumulate(flip, axis=axis, dtype=wide.dtype)
    want = np.flip(want, axis) if reverse else want
    y = np.full(shape, 77, kind(dtype))
    lib("scan" + name_of(case), x, y)
    if "float" in dtype and op == "sum":
        tolerance = 2**-8 if dtype == "bfloat16" else 1e-5
        np.testing.assert_allclose(y.astype(np.float64), want, rtol=tolerance, atol=tolerance)
    else:
        np.testing.assert_array_equal(y, want)


def test_refusals() -> None:
    x, y = Tile(None, "float32", (4, 8), (8, 1)), Tile(None, "float32", (8,), (1,))
    with pytest.raises(TileValueError, match="along axis 1 into"):
        emit_reduce(None, x, y, 1, "sum")
    with pytest.raises(TileValueError, match="axis 2 of a tile with 2 axes"):
        emit_reduce(None, x, y, 2, "sum")
    with pytest.raises(TileValueError, match="unknown reduction 'mean'"):
        emit_reduce(None, x, y, 0, "mean")
    with pytest.raises(TileTypeError, match="expected: integers"):
        emit_reduce(None, x, y, 0, "bitor")
    assert set(OPS) >= {"sum", "max", "min", "abssum", "absmax", "any", "all"}
