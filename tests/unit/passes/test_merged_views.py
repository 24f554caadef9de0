"""Views of tensors with some axes as one, on GPUs: parts of them are parts of the tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.ops.test_argmax import TARGETS, run
from tilescale.compiler import driver


def moved(shape: tuple[int, ...], view: tuple[int, ...], rows: int, step: int) -> Any:
    """B = A, ``rows`` rows of the views at a time, each ``step`` behind the one before."""

    @T.prim_func
    def kernel(A: T.Tensor(shape, "float32"), B: T.Tensor(shape, "float32")):
        with T.Kernel(view[0] // step, threads=64) as b:
            a, out = T.Tensor(view, "float32", A.data), T.Tensor(view, "float32", B.data)
            s = T.alloc_shared((rows, view[1]), "float32")
            T.copy(a[b * step, 0], s)
            T.copy(s, out[b * step, 0])

    return kernel


CASES = [
    ((4, 2, 16, 8), (128, 8), 8, 8, True),
    ((4, 2, 16, 8), (128, 8), 16, 16, True),
    ((8, 1, 8, 8), (64, 8), 1, 1, True),
    ((1, 64, 8), (64, 8), 4, 4, True),
    ((4, 2, 12, 8), (96, 8), 8, 8, False),  # rows of two of the last axis's
    ((4, 2, 16, 8), (128, 8), 8, 4, False),  # rows that begin in the middle of a part
    ((4, 16, 8), (128, 4), 4, 4, False),  # an axis that is cut
]


@pytest.mark.parametrize("shape, view, rows, step, goes", CASES, ids=str)
def test_a_part_that_is_a_box_is_named_as_one(
    shape: tuple[int, ...], view: tuple[int, ...], rows: int, step: int, goes: bool
):
    traced = driver.lower(moved(shape, view, rows, step).trace(), "cuda:sm_90a", keep=True).trace
    text = next(s.text for s in traced.steps if s.name == "merged_views")
    assert ("T.decl_buffer" not in text) == goes, text


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape, view, rows, step", [c[:4] for c in CASES if c[2] == c[3]], ids=str)
def test_every_element_arrives(
    shape: tuple[int, ...], view: tuple[int, ...], rows: int, step: int, target: str
):
    a = np.random.default_rng(5).standard_normal(shape).astype("float32")
    out = run(moved(shape, view, rows, step), {"A": a, "B": np.full(shape, np.nan, "float32")}, target)["B"]
    assert (out.reshape(view) == a.reshape(view)).all()


@pytest.mark.parametrize("target", TARGETS)
def test_elements_and_what_lies_outside(target: str):
    @T.prim_func
    def kernel(A: T.Tensor((3, 4, 8), "int32"), B: T.Tensor((16, 8), "int32"), C: T.Tensor((12, 8), "int32")):
        with T.Kernel(2, threads=32) as b:
            a = T.Tensor((12, 8), "int32", A.data)
            s = T.alloc_shared((4, 8), "int32")
            T.copy(a[(b + 2) * 4, 0], s)  # the second one lies behind the end
            T.copy(s, B[b * 4, 0])
            for i, j in T.Parallel(6, 8):
                C[b * 6 + i, j] = a[11 - b * 6 - i, j]

    a = np.arange(96, dtype="int32").reshape(3, 4, 8) + 1
    args = {"A": a, "B": np.full((16, 8), -1, "int32"), "C": np.full((12, 8), -1, "int32")}
    out = run(kernel, args, target)
    assert (out["B"][:4] == a[2]).all() and (out["B"][4:8] == 0).all()
    assert (out["C"] == a.reshape(12, 8)[::-1]).all()
