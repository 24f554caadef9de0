"""Conversions between all dtypes against NumPy and ml_dtypes: every code of the small formats, random and
special values."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.unit.cpu.harness import Library, make_func, row_major
from tilescale.compiler.cpu import codegen, convert
from tilescale.compiler.cpu.copy import emit_copy
from tilescale.errors import TileTypeError

N = 8192 + 13
KINDS = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
PAIRS = [(a, b) for a in convert.DTYPES for b in convert.DTYPES]


def kind(dtype: str) -> np.dtype:
    return KINDS.get(dtype) or np.dtype(dtype)


def values(dtype: str) -> np.ndarray:
    """All codes of the 8- and 16-bit formats; else specials, ties between neighbouring small floats, and
    random bits."""
    rng = np.random.default_rng(11)
    k = kind(dtype)
    if dtype == "bool":
        return rng.random(N) < 0.5
    if k.itemsize <= 2:
        codes = np.arange(N, dtype=np.uint32) * (7 if k.itemsize == 2 else 1)
        return codes.astype(np.uint16 if k.itemsize == 2 else np.uint8).view(k)
    if "int" in dtype:
        out = rng.integers(np.iinfo(k).min, np.iinfo(k).max, N, dtype=k, endpoint=True)
        out[: N // 2] = rng.integers(0 if dtype[0] == "u" else -500, 500, N // 2)
        return out
    special = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        448,
        463.9,
        464,
        465,
        57344,
        61439,
        61440,
        65504,
        65519,
        65520,
        1e-45,
        2.0**-10,
    ]
    special += [
        2.0**31,
        -(2.0**31),
        2.0**31 - 1,
        2.0**63,
        -(2.0**63),
        2.0**64,
        1e20,
        -1e20,
        127.5,
        128.0,
        -128.5,
        255.9,
        256.0,
        -0.9,
    ]
    parts = [np.array(special), rng.standard_normal(1500) * 10.0 ** rng.uniform(-9, 6, 1500)]
    for small in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        width = kind(small).itemsize
        codes = rng.integers(0, 256**width, 1200).astype(np.uint16 if width == 2 else np.uint8)
        a, b = (
            codes.view(kind(small)).astype(np.float64),
            (codes + 1).astype(codes.dtype).view(kind(small)).astype(np.float64),
        )
        with np.errstate(all="ignore"):
            tie = (a + b) / 2
            parts += [tie, tie * (1 + 2.0**-30)]  # just above a tie: visible in float64 alone
    flat = np.concatenate(parts)
    with np.errstate(all="ignore"):
        return np.resize(flat, N).astype(k)


def reference(x: np.ndarray, src: str, dst: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        if dst == "bool":
            return x.astype(np.float64 if convert.is_float(src) else kind(src)) != 0
        if convert.is_float(src) and not convert.is_float(dst):
            wide, info = (
                np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0, posinf=np.inf, neginf=-np.inf),
                np.iinfo(dst),
            )
            result = np.zeros(x.shape, dst)
            low, high = wide <= float(info.min), wide >= float(info.max)
            result[~low & ~high] = wide[~low & ~high].astype(dst)
            result[low], result[high] = info.min, info.max
            return result
        if not convert.is_float(src) and convert.is_float(dst) and kind(dst).itemsize <= 2:
            return x.astype(np.float32).astype(kind(dst))
        if src == "float64" and kind(dst).itemsize <= 2 and dst != "float16":
            return round_to_odd(x).astype(kind(dst))
        return x.astype(kind(dst))


def round_to_odd(x: np.ndarray) -> np.ndarray:
    """float64 → float32 by truncation with a sticky bit: ml_dtypes itself would round twice."""
    near = x.astype(np.float32)
    inexact = (near.astype(np.float64) != x) & ~np.isnan(x)
    grown = np.abs(near.astype(np.float64)) > np.abs(x)
    code = near.view(np.uint32).copy()
    code[inexact & grown] -= 1
    code[inexact] |= 1
    return code.view(np.float32)


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> Library:
    library = Library(Path(tmp_path_factory.mktemp("convert")))
    for src, dst in PAIRS:
        library.add(
            f"{src}_{dst}",
            (src, dst),
            (N, N),
            lambda cx, x, y, s=src, d=dst: emit_copy(row_major(x, s, (N,)), row_major(y, d, (N,))),
        )
    return library


@pytest.mark.parametrize("dst", convert.DTYPES)
@pytest.mark.parametrize("src", convert.DTYPES)
def test_cast(lib: Library, src: str, dst: str) -> None:
    x = values(src)
    y = np.full(N, 0x5A, np.uint8).astype(kind(dst))
    lib(f"{src}_{dst}", x, y)
    want = reference(x, src, dst)
    if convert.is_float(dst):
        got64, want64 = y.astype(np.float64), want.astype(np.float64)
        same = (got64 == want64) & (np.signbit(got64) == np.signbit(want64)) | (
            np.isnan(got64) & np.isnan(want64)
        )
    else:
        same = y == want
    bad = np.flatnonzero(~same)
    assert not len(bad), [(x[i], y[i], want[i]) for i in bad[:5]]


@pytest.mark.skipif(
    codegen.host_cpu().vector_bytes == codegen.host_cpu().vector_registers == 16, reason="SSE has no fp16"
)
@pytest.mark.parametrize(
    "pair",
    [
        ("bfloat16", "float32"),
        ("float32", "bfloat16"),
        ("float16", "float32"),
        ("float32", "float16"),
        ("float8_e4m3fn", "float32"),
        ("float32", "float8_e4m3fn"),
        ("float32", "float8_e5m2"),
        ("float32", "int32"),
        ("float32", "int8"),
        ("int8", "float32"),
    ],
)
def test_casts_are_vector_code(pair: tuple[str, str]) -> None:
    asm = codegen.get_asm(
        {
            "f": make_func(
                pair,
                (4096, 4096),
                lambda cx, x, y: emit_copy(row_major(x, pair[0], (4096,)), row_major(y, pair[1], (4096,))),
            )
        }
    )
    body = asm[asm.index("\nf:") : asm.index(".size\tf")]
    assert not re.search(r"\bcall", body)
    if codegen.host_cpu().vector_bytes > 16:
        assert re.search(r"%[yz]mm", body) and not re.search(r"\bv?cvt\w*s[sd]2?\w*\b.*%[er]", body)


def test_unknown_dtype() -> None:
    with pytest.raises(TileTypeError, match="float4"):
        convert.storage_dtype("float4")
    assert convert.canonical("e4m3") == "float8_e4m3fn"
