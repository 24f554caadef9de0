"""T.alloc_reducer on every target: sums along the axes of a T.Parallel nest, over several rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale
import tilescale.language as T
from tests.kernels import refused
from tests.unit.ops.test_argmax import TARGETS, run
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError

RNG = np.random.default_rng(17)


@T.prim_func
def product(A: T.Tensor((40, 90), "float32"), x: T.Tensor((90,), "float32"), y: T.Tensor((40,), "float32")):
    with T.Kernel(T.ceildiv(40, 16), threads=64) as bx:
        total = T.alloc_reducer(16, "float32", replication="all")
        a, b = T.alloc_fragment((16, 32), "float32"), T.alloc_fragment((32,), "float32")
        T.clear(total)
        for k in T.Pipelined(T.ceildiv(90, 32), num_stages=2):
            T.copy(A[bx * 16, k * 32], a)
            T.copy(x[k * 32], b)
            for i, j in T.Parallel(16, 32):
                total[i] += a[i, j] * b[j]
        T.finalize_reducer(total)
        T.copy(total, y[bx * 16])


@T.prim_func
def two_axes(A: T.Tensor((4, 8, 16), "int32"), B: T.Tensor((8,), "int32")):
    with T.Kernel(1, threads=32):
        total, a = T.alloc_reducer((8,), "int32"), T.alloc_fragment((4, 8, 16), "int32")
        T.copy(A, a)
        T.fill(total, 3)
        for i, j, k in T.Parallel(4, 8, 16):
            total[j] += a[i, j, k]
        T.finalize_reducer(total)
        T.copy(total, B)


@pytest.mark.parametrize("target", TARGETS)
def test_a_product_by_sums(target: str):
    a, x = RNG.standard_normal((40, 90)).astype("float32"), RNG.standard_normal(90).astype("float32")
    out = run(product, {"A": a, "x": x, "y": np.full(40, np.nan, "float32")}, target)
    np.testing.assert_allclose(out["y"], a.astype(float) @ x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("target", TARGETS)
def test_sums_along_two_axes(target: str):
    a = RNG.integers(-9, 9, (4, 8, 16), dtype="int32")
    out = run(two_axes, {"A": a, "B": np.full(8, -1, "int32")}, target)
    assert (out["B"] == 3 + a.sum((0, 2))).all()


def folded(op: str, dtype: str, seed: Any = None) -> Any:
    """Along the second axis, along both, and along none, in two rounds."""

    @T.prim_func
    def kernel(
        A: T.Tensor((16, 64), dtype), rows: T.Tensor((16,), dtype), whole: T.Tensor((1,), dtype),
        each: T.Tensor((16,), dtype),
    ):  # fmt: skip
        with T.Kernel(1, threads=64):
            a, out = T.alloc_fragment((16, 32), dtype), T.alloc_fragment((16,), dtype)
            r, w = T.alloc_reducer((16,), dtype, op=op), T.alloc_reducer((1,), dtype, op=op)
            e = T.alloc_reducer((16,), dtype, op=op)
            T.reducer_init(r)
            T.reducer_init(w, seed)
            T.reducer_init(e)
            for k in T.serial(2):
                T.copy(A[0, k * 32], a)
                for i, j in T.Parallel(16, 32):
                    T.reducer_update(r[i], a[i, j])
                    T.reducer_update(w[0], a[i, j])
                for i in T.Parallel(16):
                    T.reducer_update(e[i], A[i, k])
            T.finalize_reducer(r, out)
            T.copy(out, rows)
            T.finalize_reducer(w, whole)
            T.finalize_reducer(e)
            T.copy(e, each)

    return kernel


FOLDS = {
    "sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply, "bitand": np.bitwise_and,
    "bitor": np.bitwise_or, "bitxor": np.bitwise_xor,
}  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", FOLDS)
def test_every_op(op: str, target: str):
    a, of = RNG.integers(-99, 99, (16, 64), dtype="int32"), FOLDS[op]
    zeros = {"rows": np.zeros(16, "int32"), "whole": np.zeros(1, "int32"), "each": np.zeros(16, "int32")}
    out = run(folded(op, "int32", 5), {"A": a, **{k: v.copy() for k, v in zeros.items()}}, target)
    with np.errstate(over="ignore"):
        assert (out["rows"] == of.reduce(a, axis=1, dtype="int32")).all()
        assert out["whole"][0] == of(of.reduce(a, axis=None, dtype="int32"), np.int32(5))
        assert (out["each"] == of(a[:, 0], a[:, 1])).all()


@pytest.mark.parametrize("target", TARGETS)
def test_extremes_of_floats_begin_with_infinity(target: str):
    a = RNG.standard_normal((16, 64)).astype("float16") - np.float16(50)
    zeros = {k: np.zeros(n, "float16") for k, n in (("rows", 16), ("whole", 1), ("each", 16))}
    out = run(folded("max", "float16"), {"A": a, **zeros}, target)
    assert (out["rows"] == a.max(1)).all() and out["whole"][0] == a.max()


@T.prim_func
def anywhere(A: T.Tensor((16, 24), "int32"), N: T.Tensor((1,), "int32"), B: T.Tensor((6, 24), "int32")):
    with T.Kernel(1, threads=32):
        a, n = T.alloc_fragment((16, 24), "int32"), N[0]
        some, thirds = T.alloc_reducer((16,), "int32"), T.alloc_reducer((3,), "int32")
        turned, several = T.alloc_reducer((24, 16), "int32"), T.alloc_reducer((16,), "int32")
        one, most = T.alloc_reducer((2, 4), "int32"), T.alloc_reducer((1,), "int32", op="max")
        T.copy(A, a)
        for r in (some, thirds, turned, several, one, most):
            T.reducer_init(r)
        for i, j in T.Parallel(16, 24):
            if i < n:  # under a condition
                some[i] += a[i, j]
                if j > 3:
                    T.reducer_update(most[0], a[i, j])
            third = j // 8
            thirds[T.min(2, third)] += a[i, j]  # several iterations of one element
            turned[j, i] += a[i, j] + 1
        for i in T.Parallel(8):
            for k in T.serial(3):  # in other loops of an iteration
                several[i + 1] += a[i, k]
        for k in T.serial(2):  # an element that outer loops name
            for l in T.serial(4):
                for i, j in T.Parallel(16, 24):
                    one[k, l] += a[i, j] * k + l
        for r in (some, thirds, turned, several, one, most):
            T.finalize_reducer(r)
        T.copy(some, B[0, 0:16])
        T.copy(thirds, B[1, 0:3])
        for j in T.Parallel(24):
            B[2, j] = turned[j, 5]
        T.copy(several, B[3, 0:16])
        for k, l in T.Parallel(2, 4):
            B[4, k * 4 + l] = one[k, l]
        B[5, 0] = most[0]


@pytest.mark.parametrize("target", TARGETS)
def test_additions_anywhere_in_the_nest(target: str):
    a, n = RNG.integers(-99, 99, (16, 24), dtype="int32"), 11
    out = run(anywhere, {"A": a, "N": np.array([n], "int32"), "B": np.zeros((6, 24), "int32")}, target)["B"]
    want = np.zeros((6, 24), "int32")
    want[0, :n] = a[:n].sum(1)
    want[1, :3] = a.reshape(16, 3, 8).sum((0, 2))
    want[2] = a[5] + 1
    want[3, 1:9] = a[:8, :3].sum(1)
    want[4, :8] = [a.sum() * k + 16 * 24 * l for k in range(2) for l in range(4)]
    want[5, 0] = a[:n, 4:].max()
    np.testing.assert_array_equal(out, want)


@T.prim_func
def by_assignment(A: T.Tensor((16, 24), "float32"), B: T.Tensor((3, 16), "float32")):
    with T.Kernel(1, threads=32):
        a = T.alloc_fragment((16, 24), "float32")
        most, least = T.alloc_reducer((16,), "float32", op="max"), T.alloc_reducer((1,), "float32", op="min")
        total = T.alloc_reducer((16,), "float32", replication="all")
        T.copy(A, a)
        T.fill(most, 0.5)
        T.reducer_init(least)
        T.clear(total)
        for i, j in T.Parallel(16, 24):
            most[i] = T.max(most[i], a[i, j])
            least[0] = T.min(a[i, j], least[0])
            total[i] = total[i] + a[i, j]
        T.finalize_reducer(most)
        T.finalize_reducer(least)
        T.finalize_reducer(total)
        T.copy(most, B[0, :])
        B[1, 0] = least[0]
        T.copy(total, B[2, :])


@pytest.mark.parametrize("target", TARGETS)
def test_an_assignment_of_the_op_s_own_value_is_an_update(target: str):
    a = RNG.standard_normal((16, 24)).astype("float32")
    out = run(by_assignment, {"A": a, "B": np.zeros((3, 16), "float32")}, target)["B"]
    np.testing.assert_array_equal(out[0], np.maximum(a.max(1), 0.5))
    assert out[1, 0] == a.min()
    np.testing.assert_allclose(out[2], a.sum(1), rtol=1e-4, atol=1e-5)


def refusing(how: str) -> Any:
    @T.prim_func
    def kernel(A: T.Tensor((8, 8), "float32")):
        with T.Kernel(1, threads=32):
            f = T.alloc_fragment((8,), "float32")
            r = T.alloc_reducer(
                (8,),
                "float32",
                op="mean" if how == "op" else "sum",
                replication="some" if how == "who" else "all",
            )
            T.clear(r)
            if how == "outside":
                r[0] += 1
            if how == "again":
                T.finalize_reducer(f)
            if how.startswith("done"):
                T.finalize_reducer(r)
            if how == "done twice":
                T.finalize_reducer(r)
            for i, j in T.Parallel(8, 8):
                if how == "done and added to":
                    T.reducer_update(r[i], 1)
                if how == "times":
                    r[i] *= 2
                if how == "place":
                    r[T.cast(A[i, j], "int32")] += 1
                if how == "counted":
                    for k in T.serial(8):
                        r[k] += A[i, k]
                if how == "axes":
                    r[i, j] += 1
            if how == "who is meant":
                T.reducer_update(f[0], 1)
            if how == "opened":
                T.reducer_init(f)

    return kernel


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("op", TileValueError, "op='mean'"),
        ("who", TileValueError, "replication='some'"),
        ("outside", TileSyntaxError, "outside of T.Parallel"),
        ("counted", TileTypeError, "is added to at k"),
        ("axes", TileTypeError, "is added to at i, j"),
        ("again", TileTypeError, "T.finalize_reducer of f"),
        ("times", TileTypeError, "which is a sum"),
        ("place", TileTypeError, "is added to at"),
        ("who is meant", TileTypeError, r"T.reducer_update of \w+\[0\]"),
        ("opened", TileTypeError, "T.reducer_init of f"),
        ("done twice", TileTypeError, r"T.finalize_reducer of r, which line \d+ has finalized"),
        ("done and added to", TileTypeError, r"T.reducer_update of r, which line \d+ has finalized"),
    ],
)
def test_refusals(how: str, kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        refusing(how).trace()


@T.prim_func
def plain(A: T.Tensor((20, 70), "float32"), S: T.Tensor((20,), "float32"), M: T.Tensor((1,), "float32")):
    """Fragments that nobody declared as accumulators."""
    with T.Kernel(1, threads=64):
        a, s = T.alloc_shared((32, 32), "float32"), T.alloc_fragment((32,), "float32")
        m = T.alloc_fragment((1,), "float32")
        T.fill(s, 1)
        T.fill(m, -T.infinity("float32"))
        for k in T.Pipelined(T.ceildiv(70, 32), num_stages=2):
            T.copy(A[0, k * 32], a)
            for i, j in T.Parallel(32, 32):
                x = a[i, j]
                if k * 32 + j < 70 and i < 20:
                    s[i] += x * x
                    m[0] = T.max(m[0], x)
        T.copy(s[0:20], S)
        M[0] = m[0]


@pytest.mark.parametrize("target", TARGETS)
def test_iterations_that_share_an_element_of_a_fragment_fold_into_it(target: str):
    a = RNG.standard_normal((20, 70)).astype("float32")
    out = run(plain, {"A": a, "S": np.zeros(20, "float32"), "M": np.zeros(1, "float32")}, target)
    np.testing.assert_allclose(out["S"], 1 + (a.astype(float) ** 2).sum(1), rtol=1e-5)
    assert out["M"][0] == a.max()


def test_what_else_a_nest_does_with_what_it_folds_into_is_refused():
    def refuse(kind: Any, message: str, statement: Any, behind: Any = None, **more: Any) -> None:
        @T.prim_func
        def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
            with T.Kernel(1, threads=32):
                s = T.alloc_fragment((1,), "float32")
                T.clear(s)
                for i in T.Parallel(64):
                    s[0] += A[i]
                    statement(s, i, B)
                if behind is not None:
                    behind(s, B)

        with refused(kind, message, **more):
            kernel.trace()

    @T.macro
    def reads(s, i, B):
        B[i] = s[0]

    @T.macro
    def another(s, i, B):
        s[0] = T.max(s[0], B[i])

    @T.macro
    def nothing(s, i, B):
        B[i] = 1

    @T.macro
    def together(s, B):
        B[T.get_thread_binding()] = T.warp_reduce_sum(s[0])

    text = "iterations of this T.Parallel add to one element of s, which it touches in another way"
    refuse(TileSyntaxError, text, reads, write="T.serial where each iteration goes on")
    refuse(TileSyntaxError, text, another)
    refuse(
        TileTypeError, "T.warp_reduce_sum of s, which has what all threads added", nothing, together,
        write="leave T.warp_reduce_sum out",
    )  # fmt: skip


def test_large_nests_and_shared_tiles_are_races_as_before():
    @T.prim_func
    def shared(A: T.Tensor((64,), "float32"), B: T.Tensor((1,), "float32")):
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((1,), "float32")
            T.clear(s)
            for i in T.Parallel(64):
                s[0] += A[i]
            T.copy(s, B)

    @T.prim_func
    def large(A: T.Tensor((1 << 20,), "float32"), B: T.Tensor((1,), "float32")):
        with T.Kernel(1, threads=32):
            s = T.alloc_fragment((1,), "float32")
            T.clear(s)
            for i in T.Parallel(1 << 20):
                s[0] += A[i]
            T.copy(s, B)

    for kernel in (shared, large):
        with refused(TileValueError, "two iterations of this T.Parallel loop touch one element of s"):
            tilescale.compile(kernel, target="cpu")
