"""Casts to float8 by a scale: each operation rounds once, as it is written, on every target. ``x / s`` is
IEEE's quotient, nearest even decides the cast, and ``x * (448 / amax)``, which rounds in other places, is
another program."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import run
from tests.unit.cuda import emulated
from tilescale.compiler.checks.run import launch

ROWS, GROUP, MOST = 32, 128, 448.0


@T.prim_func
def divided(
    X: T.Tensor((ROWS, GROUP), "bfloat16"),
    Q: T.Tensor((ROWS, GROUP), "float8_e4m3fn"),
    S: T.Tensor((ROWS,), "float32"),
):
    with T.Kernel(1, threads=128):
        x = T.alloc_fragment((ROWS, GROUP), "float32")
        q = T.alloc_fragment((ROWS, GROUP), "float8_e4m3fn")
        amax = T.alloc_fragment((ROWS,), "float32")
        T.copy(X, x)
        T.reduce_absmax(x, amax, dim=1)
        for i in T.Parallel(ROWS):
            amax[i] = T.max(amax[i], 1e-4) / MOST
        for i, j in T.Parallel(ROWS, GROUP):
            x[i, j] = T.clamp(x[i, j] / amax[i], -MOST, MOST)
        T.copy(x, q)
        T.copy(q, Q)
        T.copy(amax, S)


def inputs() -> dict[str, Any]:
    x = np.random.default_rng(1).standard_normal((ROWS, GROUP)).astype(ml_dtypes.bfloat16)
    return {"X": x, "Q": np.zeros((ROWS, GROUP), ml_dtypes.float8_e4m3fn), "S": np.zeros(ROWS, np.float32)}


def by_the_rules(x: Any) -> tuple[Any, Any]:
    """One rounding an operation, by NumPy and ml_dtypes."""
    wide = x.astype(np.float32)
    scale = np.maximum(np.abs(wide).max(1), np.float32(1e-4)) / np.float32(MOST)
    return np.clip(wide / scale[:, None], -MOST, MOST).astype(ml_dtypes.float8_e4m3fn), scale


def on_simulator(args: dict[str, Any]) -> dict[str, Any]:
    return launch(divided, 1, args).arrays[0]


def on_cpu(args: dict[str, Any]) -> dict[str, Any]:
    run(divided)(*args.values())
    return args


TARGETS = {
    "sim": on_simulator, "cpu": on_cpu, "sm_90a": lambda args: emulated.run(divided, args, "sm_90a", 0),
    "sm_80": lambda args: emulated.run(divided, args, "sm_80", 0),
}  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_rounds_by_the_rules(target: str):
    args = inputs()
    q, scale = by_the_rules(args["X"])
    got = TARGETS[target](args)
    np.testing.assert_array_equal(got["S"], scale)
    np.testing.assert_array_equal(got["Q"].view(np.uint8), q.view(np.uint8))


def test_what_multiplies_by_a_rounded_reciprocal_differs_at_ties_alone():
    """Where the real quotient lies halfway between two numbers of float8, as those of 16-bit floats often do,
    the last bit of what was rounded before decides. Nowhere else do the two differ by what float32 loses."""
    x = inputs()["X"]
    wide, (q, _) = x.astype(np.float32), by_the_rules(x)
    most = np.maximum(np.abs(wide).max(1, keepdims=True), np.float32(1e-4))
    other = (wide * (np.float32(MOST) * (np.float32(1) / most))).astype(ml_dtypes.float8_e4m3fn)
    where = np.argwhere(q.view(np.uint8) != other.view(np.uint8))
    assert len(where)
    for i, j in where:
        exact = Fraction(float(wide[i, j])) * int(MOST) / Fraction(float(most[i, 0]))
        assert exact * 2 == Fraction(float(q[i, j])) + Fraction(float(other[i, j]))
