"""Differences between the simulator and the CPU target that the fuzzer found, made small. Each runs on both
and must agree to the bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import refused, run
from tilescale.compiler.checks.run import launch
from tilescale.errors import LaunchError, TileTypeError, TileValueError

UNSIGNED = ("uint8", "uint16", "uint32", "uint64")


def agree(kernel: Any, args: dict[str, Any], *, found: tuple[str, ...] = ()) -> dict[str, Any]:
    """What both targets make of the arguments; the simulator finds nothing but ``found``."""
    done = launch(kernel, 1, args)
    assert done.report.kinds == set(found), done.report
    mine = {name: a.copy() if isinstance(a, np.ndarray) else a for name, a in args.items()}
    run(kernel)(*mine.values())
    for name, a in done.arrays[0].items():
        wide = a.astype(np.float64) if "float" in str(a.dtype) else a
        np.testing.assert_array_equal(wide, mine[name].astype(wide.dtype), err_msg=name)
    return mine


def zeros(*shape: int, dtype: Any = np.float32) -> Any:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_unsigned_integers_wrap(dtype: str):
    @T.prim_func
    def main(A: T.Tensor((64,), dtype), B: T.Tensor((64,), dtype), C: T.Tensor((7, 64), dtype)):
        with T.Kernel(1):
            for i in T.Parallel(64):
                C[0, i] = (A[i] * T.cast(4, dtype)) // T.cast(4, dtype)
                C[1, i] = A[i] + B[i]
                C[2, i] = A[i] - B[i]
                C[3, i] = A[i] * B[i] - B[i] * T.cast(3, dtype)
                C[4, i] = -A[i]
                C[5, i] = T.cast(3, dtype) - T.cast(5, dtype) + B[i]
                C[6, i] = T.truncdiv(A[i], T.max(T.abs(B[i]), T.cast(1, dtype)))

    draw = np.random.default_rng(0)
    a, b = (draw.integers(0, np.iinfo(dtype).max, 64, dtype, endpoint=True) for _ in range(2))
    c = agree(main, {"A": a, "B": b, "C": zeros(7, 64, dtype=dtype)})["C"]
    with np.errstate(over="ignore"):
        assert (
            c[:5]
            == [
                (a * np.array(4, dtype)) // np.array(4, dtype),
                a + b,
                a - b,
                a * b - b * np.array(3, dtype),
                -a,
            ]
        ).all()
    assert c[5, 0] == (int(b[0]) - 2) % 2 ** (8 * b.itemsize)


def test_an_unsigned_number_is_compared_with_more_than_it_can_be():
    """TVM's proofs subtract the two, and its unsigned constants cannot go below zero."""

    @T.prim_func
    def main(C: T.Tensor((2,), "float32")):
        with T.Kernel(1) as bx:
            held = T.alloc_var("float32", 1.0)
            if T.cast(bx, "uint64") < T.cast(1, "uint64"):
                held = held * 2
            C[0] = held
            C[1] = T.if_then_else(T.cast(bx, "uint32") >= T.cast(3, "uint32"), 5.0, held)

    assert (agree(main, {"C": zeros(2)})["C"] == 2).all()


def test_a_fill_reads_its_value_once():
    """Also where the value is an element of the tile that is filled."""

    @T.prim_func
    def main(C: T.Tensor((4, 8), "int32")):
        with T.Kernel(1):
            t = T.alloc_shared((4, 8), "int32")
            for i, j in T.Parallel(4, 8):
                t[i, j] = i * 8 + j + 1
            T.fill(t[1:3, 0:8], 3 - t[1, 1])
            T.copy(t, C)

    assert (agree(main, {"C": zeros(4, 8, dtype=np.int32)})["C"][1:3] == 3 - 10).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_a_nan_wins_in_max_and_min(dtype: str):
    @T.prim_func
    def main(A: T.Tensor((16,), dtype), B: T.Tensor((16,), dtype), C: T.Tensor((5, 16), dtype)):
        with T.Kernel(1):
            for i in T.Parallel(16):
                C[0, i] = T.max(A[i], B[i])
                C[1, i] = T.min(A[i], B[i])
                C[2, i] = T.max(A[i], B[i] - A[i])
                C[3, i] = T.max(A[i], T.cast(0, dtype))
                C[4, i] = T.min(T.cast(0, dtype), A[i])

    some = [np.nan, np.inf, -np.inf, -3.0]
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    a, b = (
        np.array(v).astype(kind) for v in ([x for x in some for _ in some], [y for _ in some for y in some])
    )
    c = agree(main, {"A": a, "B": b, "C": zeros(5, 16, dtype=kind)})["C"].astype(np.float64)
    either = np.isnan(a.astype(np.float64)) | np.isnan(b.astype(np.float64))
    assert (np.isnan(c[:2]) == either).all() and (np.isnan(c[3:]) == np.isnan(a.astype(np.float64))).all()


def test_functions_of_small_floats_are_rounded_where_they_are_stored():
    @T.prim_func
    def main(A: T.Tensor((32,), "float16"), C: T.Tensor((32,), "float32"), D: T.Tensor((32,), "float16")):
        with T.Kernel(1):
            for i in T.Parallel(32):
                C[i] = T.sqrt(A[i])
                D[i] = T.sqrt(A[i])

    a = np.random.default_rng(1).uniform(0, 4, 32).astype(np.float16)
    out = agree(main, {"A": a, "C": zeros(32), "D": zeros(32, dtype=np.float16)})
    assert (out["C"] == np.sqrt(a.astype(np.float32))).all() and (out["C"] != out["D"]).any()


def test_a_cast_rounds_what_arithmetic_left_unrounded():
    """float16 holds every float8, and not every sum of two."""

    @T.prim_func
    def main(A: T.Tensor((8,), "float8_e5m2"), C: T.Tensor((8,), "float32")):
        with T.Kernel(1):
            for i in T.Parallel(8):
                C[i] = T.cast(A[i] / T.cast(1.75, "float8_e5m2"), "float16")

    agree(main, {"A": np.arange(8).astype(ml_dtypes.float8_e5m2), "C": zeros(8)})


def test_a_branch_that_is_never_taken_may_read_anything():
    @T.prim_func
    def main(C: T.Tensor((12,), "int32"), D: T.Tensor((12,), "int32")):
        with T.Kernel(1):
            t = T.alloc_shared((12,), "int32")
            T.fill(t, 3)
            for i in T.Parallel(12):
                C[i] = T.if_then_else(i < 12, t[i], t[i] + 1)
                if i >= 12:
                    D[i] = t[i]
                else:
                    D[i] = t[i] * 2

    agree(main, {"C": zeros(12, dtype=np.int32), "D": zeros(12, dtype=np.int32)})


def test_a_named_product_of_a_converted_index():
    """TVM's interval analysis fails on such a binding; it is hidden from it."""

    @T.prim_func
    def main(C: T.Tensor((8, 4), "float32")):
        with T.Kernel(3) as b:
            for i, j in T.Parallel(8, 4):
                x = T.max(
                    T.if_then_else(i < j, T.cast(b, "float32"), T.cast(b, "float32")),
                    T.cast(i, "float32") * T.cast(b, "float32"),
                )
                C[i, j] = (T.max(x, T.cast(j, "float32")) + T.cast(j, "float32") * x) * T.if_then_else(
                    i == j, x, T.cast(i, "float32")
                )

    done = launch(main, 1, {"C": zeros(8, 4)})
    # Three blocks write the same elements; what is asked here is that it compiles.
    assert done.report.kinds <= {"race"}
    run(main)


def test_products_and_reductions_of_parts_at_run_time_offsets():
    @T.prim_func
    def main(
        A: T.Tensor((8, 8), "float32"),
        C: T.Tensor((4,), "float32"),
        D: T.Tensor((8, 8), "float32"),
        n: T.int32,
    ):
        with T.Kernel(1):
            a, r, s = (
                T.alloc_shared((8, 8), "float32"),
                T.alloc_shared((4, 8), "float32"),
                T.alloc_fragment((4,), "float32"),
            )
            T.copy(A, a)
            T.clear(r)
            T.reduce_sum(a[n : n + 4, 0:8], s, dim=1)
            T.copy(s, C)
            T.gemm(a[n : n + 4, 0:8], a, r)
            T.gemm(r[0:4, 0:4], r, a[n : n + 4, 0:8])
            T.cumsum(a[n : n + 4, 0:8])
            T.copy(a, D)

    a = np.random.default_rng(2).integers(-2, 3, (8, 8)).astype(np.float32)
    agree(main, {"A": a, "C": zeros(4), "D": zeros(8, 8), "n": 3})
    with pytest.raises(LaunchError, match="lies outside"):
        run(main)(a, zeros(4), zeros(8, 8), 5)
    assert "out-of-bounds" in launch(main, 1, {"A": a, "n": 5}).report.kinds


def test_a_view_of_a_strided_tensor_is_refused():
    @T.prim_func
    def main(A: T.StridedTensor((4, 4), (8, 2), "int32"), C: T.Tensor((16,), "int32")):
        with T.Kernel(1):
            flat = T.view(A, (16,))
            T.copy(flat, C)

    with refused(TileTypeError, "T.StridedTensor", at="T.view(A, (16,))", write="copy it into an allocation"):
        main.trace()


def test_copies_over_the_edge_of_a_tile_are_cut():
    """On the CPU nothing is written outside; the simulator says so as well."""

    @T.prim_func
    def main(C: T.Tensor((8,), "int32"), n: T.int32):
        with T.Kernel(1):
            t, u = T.alloc_shared((8,), "int32"), T.alloc_shared((4,), "int32")
            T.fill(t, 1)
            T.fill(u, 5)
            T.copy(u, t[n : n + 4])
            T.copy(t, C)

    c = agree(main, {"C": zeros(8, dtype=np.int32), "n": 6}, found=("out-of-bounds",))["C"]
    assert c.tolist() == [1] * 6 + [5] * 2


def test_arguments_that_overlap_are_refused():
    @T.prim_func
    def main(A: T.Tensor((16,), "int32"), B: T.Tensor((16,), "int32"), C: T.Tensor((16,), "int32")):
        with T.Kernel(1):
            for i in T.Parallel(16):
                C[i] = A[i] + B[i]

    x = np.arange(32, dtype=np.int32)
    agree(main, {"A": x[:16], "B": x[8:24], "C": zeros(16, dtype=np.int32)})  # both only read
    agree(main, {"A": zeros(16, dtype=np.int32), "B": zeros(16, dtype=np.int32), "C": x[:16]})
    for other in (x[:16], x[8:24]):
        with pytest.raises(TileValueError, match="share memory, and the kernel writes"):
            launch(main, 1, {"A": x[:16], "B": zeros(16, dtype=np.int32), "C": other})
        with pytest.raises(TileValueError, match="share memory, and the kernel writes"):
            run(main)(x[:16], zeros(16, dtype=np.int32), other)


def test_signed_results_out_of_range_are_findings():
    """Targets take signed arithmetic of 32 and 64 bits for exact; unsigned and narrow integers wrap."""

    @T.prim_func
    def main(
        A: T.Tensor((16,), "int32"),
        B: T.Tensor((16,), "int64"),
        C: T.Tensor((16,), "int32"),
        D: T.Tensor((16,), "int64"),
        n: T.int32,
    ):
        with T.Kernel(1):
            for i in T.Parallel(16):
                C[i] = A[i] + n
                if i < n % 4:
                    D[i] = B[i] * B[i]

    a, b = np.arange(16, dtype=np.int32), np.arange(16, dtype=np.int64) << 30
    assert launch(main, 1, {"A": a, "B": b, "n": 2**31 - 16}).report  # the products that overflow are masked
    found = launch(main, 1, {"A": a, "B": b, "n": 2**31 - 5}).report
    assert found.kinds == {"arithmetic"} and "5 + 2147483643 is 2147483648, which int32 does not hold" in str(
        found
    )


def test_a_choice_between_two_numbers_keeps_its_dtype():
    @T.prim_func
    def main(A: T.Tensor((8,), "int32"), C: T.Tensor((8,), "uint64")):
        with T.Kernel(1) as b:
            for i in T.Parallel(8):
                C[i] = T.if_then_else(i != A[0], T.cast(b, "uint64"), T.cast(3, "uint64")) | T.cast(
                    i, "uint64"
                )

    agree(main, {"A": np.arange(8, dtype=np.int32), "C": zeros(8, dtype=np.uint64)})


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_functions_of_constants(dtype: str):
    """TVM would compute 0 / 0 while the expression is built."""

    @T.prim_func
    def main(C: T.Tensor((2, 4), dtype)):
        with T.Kernel(1):
            for i in T.Parallel(4):
                C[0, i] = T.log1p(T.cast(0.0, dtype)) + T.exp(T.cast(0.0, dtype))
                C[1, i] = T.tanh(T.cast(0.0, dtype)) - T.sqrt(T.cast(2.25, dtype))

    assert (agree(main, {"C": zeros(2, 4, dtype=dtype)})["C"] == [[1.0], [-1.5]]).all()


@pytest.mark.parametrize("dtype", ["int8", "int64", *UNSIGNED])
def test_conversions_of_constants(dtype: str):
    """Negative numbers become unsigned ones by wrapping, floats by saturating."""

    @T.prim_func
    def main(C: T.Tensor((8, 4), dtype)):
        with T.Kernel(1) as b:
            for i in T.Parallel(4):
                one, least, float_ = (
                    T.cast(1, dtype),
                    T.cast(T.cast(-7, "int16"), dtype),
                    T.cast(T.cast(-1.0, "float32"), dtype),
                )
                C[6, i] = T.truncmod(T.cast(b, dtype) ^ T.cast(i, dtype), T.max(least, one))
                C[7, i] = T.truncdiv(
                    T.truncmod(T.cast(b, dtype), T.max(T.cast(b, dtype), one)), T.max(float_, one)
                )
                C[0, i] = T.max(T.cast(T.cast(-7, "int16"), dtype), T.cast(1, dtype))
                C[1, i] = T.max(T.cast(T.cast(-1.0, "float32"), dtype), T.cast(1, dtype))
                C[2, i] = T.truncmod(
                    T.cast(T.cast(-7, "int64"), dtype), T.cast(T.cast(5.5, "float64"), dtype)
                )
                C[3, i] = T.cast(T.cast(-1e30, "float32"), dtype)
                C[4, i] = T.cast(T.cast(1e30, "float64"), dtype)
                C[5, i] = T.cast(T.cast(T.cast(-1, "int32"), "uint8"), dtype)

    info = np.iinfo(dtype)
    seven = -7 % 2**info.bits if info.min == 0 else -7
    c = agree(main, {"C": zeros(8, 4, dtype=dtype)})["C"]
    byte = 255 if info.max >= 255 else -1
    assert c[:6, 0].tolist() == [
        max(seven, 1),
        1,
        int(np.fmod(seven, 5)) if seven < 0 else seven % 5,
        info.min,
        info.max,
        byte,
    ]


@pytest.mark.parametrize("lanes", [3, 16])
def test_converted_integers_that_turn_out_to_be_zero(lanes: int):
    """Hidden from the interval analysis, they must not reach the code generator as a zero of another type."""

    @T.prim_func
    def main(C: T.Tensor((2, lanes), "float16"), D: T.Tensor((2, lanes), "float32")):
        with T.Kernel(2, threads=64) as b:
            t, u = T.alloc_fragment((lanes,), "float16"), T.alloc_fragment((lanes,), "float32")
            for i in T.Parallel(lanes):
                t[i] = T.cast(
                    (T.cast(i, "int32") // 32) % T.max(T.cast(b, "int32"), T.cast(1, "int32")), "float16"
                )
                u[i] = T.cast(i // 32, "float32") + T.reinterpret(i // 64, "float32")
            T.copy(t, C[b, 0:lanes])
            T.copy(u, D[b, 0:lanes])

    out = agree(main, {"C": np.ones((2, lanes), np.float16), "D": np.ones((2, lanes), np.float32)})
    assert not out["C"].any() and not out["D"].any()


def test_functions_in_branches_in_functions():
    """Bindings within bindings within a branch: TVM's analyses bind them twice and refuse values that have
    become simpler."""

    @T.prim_func
    def main(
        A: T.Tensor((8, 4), "float16"),
        C: T.Tensor((8, 4), "float16"),
        D: T.Tensor((8, 4), "float16"),
        E: T.Tensor((8, 4), "bool"),
    ):
        with T.Kernel(1, threads=64):
            t = T.alloc_shared((64, 4), "float16")
            with T.Scale("thread") as (w, n):
                for j in T.serial(4):
                    least = T.min(T.exp2(T.cast(-1.25, "float16")), T.sin(T.cast(1.5, "float16")))
                    t[w, j] = T.if_then_else(
                        w % 2 == 0, T.atan(T.cast(T.cast(j, "float32"), "float16")), least
                    )
            T.copy(t[0:8, 0:4], D)
            for i, j in T.Parallel(8, 4):
                x = T.floor(A[i, j])
                inner = T.if_then_else(A[7 - i, j] < x, T.max(T.ceil(A[i, j]), A[i + j, 0]), T.sqrt(T.abs(x)))
                C[i, j] = T.max(
                    T.if_then_else(x > T.cast(0, "float16"), T.floor(T.max(inner, x)), T.max(x, A[i - 3, j])),
                    x,
                )
                E[i, j] = T.if_then_else(i < j, T.isnan(T.sqrt(A[i, j - 9])), T.floor(T.max(inner, x)) > x)

    a = (np.random.default_rng(0).integers(-16, 17, (8, 4)) / 4).astype(np.float16)
    out = agree(
        main,
        {
            "A": a,
            "C": zeros(8, 4, dtype=np.float16),
            "D": zeros(8, 4, dtype=np.float16),
            "E": zeros(8, 4, dtype=bool),
        },
    )
    assert np.allclose(
        out["D"], np.where(np.arange(8)[:, None] % 2 == 0, np.arctan(np.arange(4)), 2**-1.25), rtol=1e-3
    )
    assert out["E"].any() and not out["E"].all()


def test_a_constant_index_outside_is_refused_by_all():
    """Where the index is known only when the kernel runs, the read gives zero."""

    @T.prim_func
    def main(A: T.Tensor((4,), "int32"), C: T.Tensor((4,), "int32")):
        with T.Kernel(1):
            for k in range(2):
                for i in T.Parallel(4):
                    C[i] = T.if_then_else(i < 0, A[k - 1], 2)

    for attempt in (
        lambda: launch(main, 1, {"A": np.ones(4, np.int32), "C": zeros(4, dtype=np.int32)}),
        lambda: run(main),
    ):
        with refused(TileValueError, "index -1 lies outside axis 0 of A, whose extent is 4"):
            attempt()


def test_kept_counters_go_on_from_launch_to_launch():
    """What a launch leaves behind is what the next one is given."""

    @T.prim_func
    def main(
        S: T.SymmTensor((4,), "int32"),
        k: T.Signal((1,), keep=True),
        C: T.Tensor((4,), "int32"),
        launch: T.int32,
    ):
        with T.Kernel(1):
            with T.Scale("device") as (rank, world):
                t = T.alloc_shared((4,), "int32")
                T.fill(t, rank * 10 + launch)
                T.copy(t, S, dst=(rank + 1) % world, signal=k[0])
                T.wait(k[0], launch)
                T.copy(S, C)

    args: dict[str, Any] = {}
    for number in range(1, 4):
        done = launch(main, 3, {**args, "launch": number}, order="adversary", seed=number)
        assert done.report, done.report
        args = {name: [o[name] for o in done.arrays] for name in ("S", "k")}
        assert [o["C"].tolist() for o in done.arrays] == [[(r + 2) % 3 * 10 + number] * 4 for r in range(3)]
    assert [o["k"].tolist() for o in done.arrays] == [[3]] * 3
    assert "deadlock" in launch(main, 3, {"launch": 2}).report.kinds  # without the first


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64"])
def test_named_quotients_by_what_may_be_negative(dtype: str):
    """A quotient under a name, by numbers that are negative, zero, the least there is, or known to the call
    alone."""
    least = int(np.iinfo(dtype).min)
    divisors = (-3, 4, -4, least, 7)
    n = len(divisors)

    @T.prim_func
    def main(
        A: T.Tensor((9,), dtype), by: T.int32, C: T.Tensor((2 * n + 4, 9), dtype), D: T.Tensor((5,), dtype)
    ):
        with T.Kernel(1):
            for i in T.Parallel(5):
                bounded = T.cast(i, dtype) // T.cast(-3, dtype)
                D[i] = bounded + T.cast(i, dtype) % T.cast(-3, dtype)
            for i in T.Parallel(9):
                for k in range(n):
                    quotient, rest = A[i] // divisors[k], A[i] % divisors[k]
                    C[2 * k, i] = quotient
                    C[2 * k + 1, i] = T.if_then_else(quotient < 3, rest, rest)
                given = T.cast(by, dtype)
                q, r, t, m = A[i] // given, A[i] % given, T.truncdiv(A[i], given), T.truncmod(A[i], given)
                C[2 * n, i] = q
                C[2 * n + 1, i] = r
                C[2 * n + 2, i] = T.if_then_else(q > 2, t, t)
                C[2 * n + 3, i] = m

    values = np.array([0, 1, -1, 7, -7, least, -least - 1, 100, -100], dtype)
    for by in (-3, 5):
        got = agree(
            main, {"A": values, "by": by, "C": zeros(2 * n + 4, 9, dtype=dtype), "D": zeros(5, dtype=dtype)}
        )
        assert got["D"].tolist() == [i // -3 + i % -3 for i in range(5)]
        wide = values.astype(object)
        for k, d in enumerate((*divisors, by)):
            np.testing.assert_array_equal(got["C"][2 * k], (wide // d).astype(dtype))
            np.testing.assert_array_equal(got["C"][2 * k + 1], (wide % d).astype(dtype))


def test_a_loop_that_only_names_values():
    """Beside a tile that nobody uses: what is left of the statements is one that does nothing."""

    @T.prim_func
    def main(A: T.Tensor((1,), "int32")):
        with T.Kernel(1):
            t = T.alloc_shared((5,), "int32")
            for i in T.Parallel(5):
                x = T.cast(i, "int16") // T.cast(-3, "int16")

    agree(main, {"A": zeros(1, dtype="int32")})
