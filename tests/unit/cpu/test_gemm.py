"""GEMM tiles against NumPy: ragged shapes, every transposition, dtypes, strides, clear and accumulate."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.unit.cpu.harness import Library, row_major
from tilescale.compiler.cpu import codegen, copy, gemm, transpose
from tilescale.compiler.cpu.gemm import emit_gemm
from tilescale.compiler.cpu.tile import Tile
from tilescale.errors import TileTypeError, TileValueError

NUMPY = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
SHAPES = [(1, 1, 1), (3, 5, 7), (16, 16, 16), (29, 33, 17), (64, 64, 40), (15, 47, 65), (2, 100, 300)]
DTYPES = [
    ("float32", "float32", "float32"),
    ("float64", "float64", "float64"),
    ("float16", "float16", "float32"),
    ("float16", "float16", "float16"),
    ("bfloat16", "bfloat16", "float32"),
    ("bfloat16", "bfloat16", "bfloat16"),
    ("float8_e4m3fn", "float8_e4m3fn", "float32"),
    ("float8_e5m2", "float8_e4m3fn", "float32"),
    ("int8", "int8", "int32"),
    ("uint8", "int8", "int32"),
    ("float32", "float32", "float64"),
]
CASES = [(s, d, ta, tb) for s, d in itertools.product(SHAPES, DTYPES[:1]) for ta in (0, 1) for tb in (0, 1)]
CASES += [(s, d, ta, tb) for s in SHAPES[3:4] + SHAPES[6:] for d in DTYPES[1:] for ta, tb in ((0, 0), (1, 1))]


def numpy_dtype(name: str) -> np.dtype:
    return NUMPY.get(name) or np.dtype(name)


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if "int" in dtype:
        low = 0 if dtype.startswith("u") else -100
        return rng.integers(low, 100, shape).astype(dtype)
    return rng.standard_normal(shape).astype(numpy_dtype(dtype))


def name_of(case: tuple) -> str:
    (m, n, k), dtypes, ta, tb = case
    return f"g_{m}_{n}_{k}_{'_'.join(dtypes)}_{ta}{tb}"


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> Library:
    library = Library(Path(tmp_path_factory.mktemp("gemm")))
    for case in CASES:
        (m, n, k), (da, db, dc), ta, tb = case
        for clear in (0, 1):

            def body(cx, a, b, c, case=case, clear=clear):
                (m, n, k), (da, db, dc), ta, tb = case
                return emit_gemm(
                    cx,
                    row_major(a, da, (k, m) if ta else (m, k)),
                    row_major(b, db, (n, k) if tb else (k, n)),
                    row_major(c, dc, (m, n)),
                    trans_a=bool(ta),
                    trans_b=bool(tb),
                    clear=bool(clear),
                )

            library.add(f"{name_of(case)}_{clear}", (da, db, dc), (m * k, k * n, m * n), body)
    for clear in (0, 1):
        library.add(f"strided_{clear}", ("float32",) * 3, (4000,) * 3, partial(strided, clear))
    return library


def strided(clear, cx, a, b, c):
    return emit_gemm(
        cx,
        Tile(a, "float32", (20, 18), (60, 3), 7),
        Tile(b, "float32", (18, 21), (70, 2), 5),
        Tile(c, "float32", (20, 21), (2, 50), 3),
        clear=bool(clear),
    )


def check(got: np.ndarray, want: np.ndarray, bound: np.ndarray, dtype: str) -> None:
    if "int" in dtype:
        np.testing.assert_array_equal(got, want)
        return
    eps = {"float64": 2**-53, "float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}[dtype]
    error = np.abs(got.astype(np.float64) - want)
    limit = eps * np.abs(want) + (2**-53 if dtype == "float64" else 2**-24) * 20 * bound + 1e-30
    assert (error <= limit).all(), f"worst {np.max(error / limit)} times the limit"


@pytest.mark.parametrize("case", CASES, ids=name_of)
@pytest.mark.parametrize("clear", [0, 1])
def test_gemm(lib: Library, case: tuple, clear: int) -> None:
    (m, n, k), (da, db, dc), ta, tb = case
    rng = np.random.default_rng(m + n + k)
    a, b = random(rng, (m, k), da), random(rng, (k, n), db)
    c = (
        np.full((m, n), np.nan if "float" in dc else 77, numpy_dtype(dc))
        if clear
        else random(rng, (m, n), dc)
    )
    wide = np.int64 if "int" in dc else np.float64
    want = a.astype(wide) @ b.astype(wide) + (0 if clear else c.astype(wide))
    bound = np.abs(a.astype(wide)) @ np.abs(b.astype(wide)) + 1
    lib(
        f"{name_of(case)}_{clear}",
        np.ascontiguousarray(a.T if ta else a),
        np.ascontiguousarray(b.T if tb else b),
        c,
    )
    check(c, want, bound, dc)


@pytest.mark.parametrize("clear", [0, 1])
def test_strides_leave_the_gaps_alone(lib: Library, clear: int) -> None:
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(4000).astype(np.float32) for _ in range(3))
    view = np.lib.stride_tricks.as_strided
    av, bv = view(a[7:], (20, 18), (240, 12)), view(b[5:], (18, 21), (280, 8))
    want = c.copy()
    cv = view(want[3:], (20, 21), (8, 200))
    cv[:] = av.astype(np.float64) @ bv.astype(np.float64) + (0 if clear else cv)
    lib(f"strided_{clear}", a, b, c)
    np.testing.assert_allclose(c, want, rtol=1e-5, atol=1e-5)


def test_refusals() -> None:
    def tile(shape: tuple[int, int], dtype: str) -> Tile:
        return Tile(None, dtype, shape, (shape[1], 1))

    with pytest.raises(TileValueError, match=r"op\(A\) is \[4, 8\], op\(B\) is \[4, 8\]"):
        emit_gemm(None, tile((4, 8), "float32"), tile((4, 8), "float32"), tile((4, 4), "float32"))
    with pytest.raises(TileTypeError, match="cannot accumulate into int32"):
        emit_gemm(None, tile((4, 8), "float32"), tile((8, 4), "float32"), tile((4, 4), "int32"))


@pytest.mark.parametrize("width, registers", [(32, 16), (16, 32)])
def test_other_processors_blocking(
    width: int, registers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emitters' code for AVX2 and NEON vectors, run on this processor."""
    host = codegen.host_cpu()
    other = codegen.HostCPU(host.name, host.features, width, registers)
    for module in (copy, gemm, transpose):
        monkeypatch.setattr(module, "host_cpu", lambda: other)
    library = Library(tmp_path)
    m, n, k = 37, 45, 29

    def body(cx, a, b, c):
        tiles = (
            row_major(a, "bfloat16", (m, k)),
            row_major(b, "float32", (n, k)),
            row_major(c, "float32", (m, n)),
        )
        return emit_gemm(cx, *tiles, trans_b=True)

    library.add("f", ("bfloat16", "float32", "float32"), (m * k, n * k, m * n), body)
    rng = np.random.default_rng(0)
    a, b = random(rng, (m, k), "bfloat16"), random(rng, (n, k), "float32")
    c = np.ones((m, n), np.float32)
    library("f", a, b, c)
    np.testing.assert_allclose(c, a.astype(np.float64) @ b.T.astype(np.float64) + 1, rtol=1e-5, atol=1e-5)
