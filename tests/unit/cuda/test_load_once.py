"""Loads that an expression has several times are made once (gpu/load_once.py)."""

from __future__ import annotations

import numpy as np

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, lowered
from tilescale.compiler.cuda.printer import print_kernel


def folded(x):
    return T.if_then_else(x < 0, -x * 2, x + x)


@T.prim_func
def gathered(
    X: T.Tensor((50,), "float32"),
    at: T.Tensor((64,), "int32"),
    Y: T.Tensor((64,), "float32"),
    Z: T.Tensor((64,), "float32"),
):
    """Y: a load in any case. Z: one that only some iterations make."""
    with T.Kernel(1, threads=64):
        for i in T.Parallel(64):
            Y[i] = folded(X[at[i]])
            Z[i] = T.if_then_else(i % 3 == 0, X[at[i] + 9] * X[at[i] + 9], 0.0)


def test_what_an_expression_names_again_is_loaded_once():
    text = print_kernel(lowered(gathered).kernel).text
    code = [line for line in text.splitlines() if not line.lstrip().startswith("//")]
    loads = [line.count(" X[") for line in code if " X[" in line]
    assert loads == [1, 2], text  # behind its condition each stays as it is
    args = {"X": data((50,), "float32", 1), "at": np.arange(64, dtype=np.int32) * 7 % 64 - 5}
    agree(gathered, args | {n: np.full(64, np.nan, np.float32) for n in "YZ"})
