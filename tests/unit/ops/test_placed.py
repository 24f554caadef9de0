"""T.annotate_layout of a tensor: its elements lie where the layout says, on every target."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.corpus import printed
from tests.unit.ops.test_argmax import TARGETS, run
from tilescale.errors import TileTypeError, TileValueError

RNG = np.random.default_rng(13)
B, L, H, D = 2, 24, 3, 16


def layout() -> Any:
    return T.Layout((B, L, H, D), lambda b, l, h, d: [b, l // 8, h, d // 8, d % 2, 4 * (l % 8) + d % 8 // 2])


def lying(plain: Any) -> Any:
    """A tensor as it lies in memory under `layout`."""
    out, made = np.empty(plain.size, plain.dtype), layout()
    for at in np.ndindex(plain.shape):
        out[made.place(*at)] = plain[at]
    return out.reshape(plain.shape)


@T.prim_func
def written(A: T.Tensor((B, L, H, D), "float32"), Q: T.Tensor((B, L, H, D), "float32")):
    with T.Kernel(B, H, threads=64) as (b, h):
        T.annotate_layout({Q: layout()})
        for i, j in T.Parallel(L, D):
            Q[b, i, h, j] = A[b, i, h, j]


@T.prim_func
def added(A: T.Tensor((B, L, H, D), "float32"), Q: T.Tensor((B, L, H, D), "float32")):
    with T.Kernel(B, H, threads=64) as (b, h):
        f = T.alloc_fragment((32, D), "float32")
        T.annotate_layout({Q: layout()})
        T.copy(A[b, 0:32, h, 0:D], f)  # the last rows lie outside
        for i, j in T.Parallel(8, D):
            T.atomic_add(Q[b, i, h, j], f[i, j])
        T.atomic_add(Q[b, 8:40, h, 0:D], f)


@T.prim_func
def copied(Q: T.Tensor((B, L, H, D), "float32"), C: T.Tensor((B, L, H, D), "float32")):
    with T.Kernel(B, H, threads=64) as (b, h):
        T.annotate_layout({Q: layout()})
        T.copy(Q[b, 0:32, h, :], C[b, 0:32, h, :])


@pytest.mark.parametrize("target", TARGETS)
def test_elements_lie_where_the_layout_says(target: str):
    a = RNG.standard_normal((B, L, H, D)).astype("float32")
    nothing = np.full_like(a, np.nan)
    assert (run(written, {"A": a, "Q": nothing}, target)["Q"] == lying(a)).all()
    assert (run(copied, {"Q": lying(a), "C": nothing}, target)["C"] == a).all()
    want = np.zeros_like(a)
    want[:, :8] += a[:, :8]
    want[:, 8:] += a[:, :16]
    assert (run(added, {"A": a, "Q": np.zeros_like(a)}, target)["Q"] == lying(want)).all()


@T.prim_func
def turned(
    A: T.Tensor((L, H, D), "float32"),
    first: T.Tensor((1,), "int32"),
    Q: T.Tensor((L, H, D), "float32"),
    C: T.Tensor((L, H, D), "float32"),
):
    with T.Kernel(H, threads=64) as h:
        f = T.alloc_fragment((32, D), "float32")
        T.annotate_layout({Q: T.Layout((L, H, D), lambda l, h, d: [h, l, d])})
        T.copy(Q[0:32, h, :], C[0:32, h, :])
        T.copy(A[0:32, h, 0:D], f)
        T.atomic_add(Q[first[0] : first[0] + 32, h, :], f)
        for i, j in T.Parallel(4, D):
            Q[i, h, j] = Q[i, h, j] + A[i, h, j]


@pytest.mark.parametrize("target", TARGETS)
def test_axes_in_another_order_stay_in_their_extents(target: str):
    """Rows outside are dropped, not the next head's."""
    a, q = RNG.standard_normal((2, L, H, D)).astype("float32")
    lies = q.transpose(1, 0, 2).reshape(q.shape)
    args = {"A": a, "first": np.array([8], "int32"), "Q": lies, "C": np.full_like(a, np.nan)}
    done = run(turned, args, target)
    want = q.copy()
    want[8:] += a[: L - 8]
    want[:4] += a[:4]
    assert (done["Q"].reshape(H, L, D).transpose(1, 0, 2) == want).all() and (done["C"] == q).all()


def test_axes_in_another_order_are_copied_and_added_to_as_vectors():
    """Each access tests whether its row is outside, and no more."""
    text = printed(turned, "sm_90a").text
    assert "red_add4_f32(" in text and "ts::atomic_add(" not in text and ": -1" not in text
    assert re.search(r"\(const uint4\*\)&Q\[", text)


def test_places_are_sums_of_the_threads_part_and_the_rounds():
    """Rounds move one address by constants, where digits of a sum of both are an address a round."""
    for kernel in (written, added):
        made = re.search(r"\bQ\[(bx [^?]*?)\](, f| = )", printed(kernel, "sm_90a").text)
        assert made is not None and not re.search(r"\b[ij]\w*", made[1])


def test_layouts_of_many_elements_are_read_as_digits():
    made = T.Layout(
        (8, 1024, 32, 64), lambda b, l, h, d: [b, l // 8, h, d // 8, d % 2, 4 * (l % 8) + d % 8 // 2]
    )
    assert made.extents == (8, 128, 32, 8, 2, 32) and not hasattr(made, "places")
    small = layout()
    index = np.indices(small.shape)
    assert (small.place(*index) == small.places).all()
    with pytest.raises(TileValueError, match="no layout that the compiler can follow"):
        T.Layout((1024, 1024), lambda i, j: (i, (j // 8 ^ i % 8) * 8 + j % 8))
    with pytest.raises(TileValueError, match="two elements into one place"):
        T.Layout((1024, 1024), lambda i, j: i + j)


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("gaps", TileValueError, "takes 2016 elements"),
        ("shape", TileValueError, "a layout of"),
        ("fill", TileTypeError, "a tile of A, whose elements"),
        ("words", TileTypeError, "with words beside its operands"),
    ],
)
def test_refusals(how: str, kind: type[Exception], message: str):
    @T.prim_func
    def kernel(A: T.Tensor((32, 32), "float32")):
        with T.Kernel(1, threads=32):
            t = T.alloc_shared((32, 32), "float32")
            shape = (32, 16) if how == "shape" else (32, 32)
            T.annotate_layout({A: T.Layout(shape, lambda i, j: (j, 2 * i if how == "gaps" else i))})
            if how == "fill":
                T.fill(A, 0)
            if how == "words":
                T.copy(A, t, coalesced_width=2)

    with pytest.raises(kind, match=message):
        kernel.trace()
