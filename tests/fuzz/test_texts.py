"""Printed text as C++ understands it, beside the CPU target and the simulator."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.fuzz import texts

pytestmark = pytest.mark.skipif(texts.COMPILER is None, reason="there is no C++ compiler")


def kernel_of(text: str, folder: Path) -> Any:
    path = folder / "drawn.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("drawn", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


@pytest.mark.parametrize("seed", range(4))
def test_what_is_printed_means_what_was_drawn(seed: int, tmp_path: Path):
    text = texts.module(seed, count=30, depth=3)  # TVM lowers nested remainders in exponential time
    args = texts.arguments(seed, re.findall(r'(\w+): T.Tensor\([^"]*"(\w+)"', text))
    made = texts.all_ways(kernel_of(text, tmp_path), args, tmp_path, texts.BLOCKS)
    wrong = [(n, w) for n in args for w in ("sim", "text") if not (made[w][n] == made["cpu"][n]).all()]
    assert not wrong, f"{wrong} of\n{text}"


def test_casts_that_wrap_signs_and_narrow_quotients(tmp_path: Path):
    """A conversion that does not keep its number has any sign; 0 − (0 − x) is no decrement; a quotient of 8 bits by a
    constant, which C has as an int, is one function; a truth turned around is no number."""

    @T.prim_func
    def kernel(
        u: T.Tensor((64,), "uint32"),
        b: T.Tensor((64,), "uint8"),
        w: T.Tensor((64,), "uint64"),
        x: T.Tensor((64,), "int32"),
        y: T.Tensor((9, 64), "int32"),
    ):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                signed, narrow = T.cast(u[i], "int32"), T.cast(b[i], "int8")
                y[0, i] = signed % 97
                y[1, i] = signed // 97
                y[2, i] = T.cast(narrow % T.cast(97, "int8"), "int32")
                y[3, i] = T.cast(narrow // T.cast(3, "int8"), "int32")
                y[4, i] = T.cast(T.cast(w[i], "int64") % T.cast(97, "int64"), "int32")
                y[5, i] = T.cast(T.cast(x[i], "uint32") >> T.cast(31, "uint32"), "int32")
                y[6, i] = 0 - (0 - x[i])
                y[7, i] = T.cast(T.cast(x[i] & 255, "int8") // T.cast(5, "int8"), "int32")
                if ~(x[i] < 0):
                    y[8, i] = T.if_then_else(T.cast(x[i], "uint8") < T.cast(128, "uint8"), 1, 2)
                else:
                    y[8, i] = 3

    u = np.linspace(0, 2**32 - 1, 64).astype("uint32")
    b, w = np.arange(100, 164).astype("uint8"), np.linspace(0, 2**64 - 2**12, 64).astype("uint64")
    x = np.arange(-256, 256, 8).astype("int32") + np.arange(64, dtype="int32") % 7
    args = {"u": u, "b": b, "w": w, "x": x, "y": np.zeros((9, 64), "int32")}
    signed, narrow = u.view("int32"), b.view("int8").astype("int32")
    byte = (x & 255).astype("uint8").view("int8").astype("int32")
    want = np.stack([
        signed % 97, signed // 97, narrow % 97, narrow // 3, w.view("int64") % 97, x < 0, x, byte // 5,
        np.where(x < 0, 3, np.where((x & 255) < 128, 1, 2)),
    ])  # fmt: skip
    for way, made in texts.all_ways(kernel, args, tmp_path).items():
        assert (made["y"] == want).all(1).all(), (way, (made["y"] == want).all(1))
