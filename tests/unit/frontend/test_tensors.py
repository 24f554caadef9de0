"""Tensor parameters and their parts: symbolic shapes and strides, slices, scalars by value, indices that
cannot be."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import tilescale.language as T
from tests.kernels import refused, run
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError


def test_strides_in_brackets():
    s = T.dynamic("s")
    for made in (T.StridedTensor[[4, 8], [s, 1], "float16"], T.StridedTensor((4, 8), (s, 1), "float16")):
        assert made.shape == (4, 8) and made.strides == (s, 1) and made.dtype == "float16"
    assert T.StridedTensor[(4, 8), (8, 1)].dtype == "float32"


def ints(*shape: int) -> torch.Tensor:
    return torch.full(shape, -1, dtype=torch.int32)


def test_dynamic_extents_and_expressions_of_them():
    M, N = T.dynamic("m, n")

    @T.prim_func
    def kernel(
        A: T.Tensor((M, N), "int32"),
        B: T.Tensor((N,), "int32"),
        C: T.Tensor((M, N), "int32"),
        D: T.Tensor((6,), "int32"),
    ):
        with T.Kernel(T.ceildiv(N, 16), M // 2 + 1) as (x, y):
            for i, j in T.Parallel(2, 16):
                C[y * 2 + i, x * 16 + j] = A[y * 2 + i, x * 16 + j] + B[x * 16 + j] * M
            if x == 0 and y == 0:
                D[0] = M
                D[1] = A.shape[1] - N + N * 2
                D[2] = T.ceildiv(M, 4)
                D[3] = T.min(M, N)
                D[4] = 1 if M > N else 2
                D[5] = T.max(N // 3, 1) % 4

    made = run(kernel)
    for m, n in ((7, 33), (1, 1), (40, 3)):
        a, b, c, d = (torch.randint(-9, 9, s, dtype=torch.int32) for s in ((m, n), (n,), (m, n), (6,)))
        made(a, b, c, d)
        assert c.equal(a + b * m)
        assert d.tolist() == [m, 2 * n, -(-m // 4), min(m, n), 1 if m > n else 2, max(n // 3, 1) % 4]


def test_constants_of_a_shape_are_pythons():
    @T.prim_func
    def kernel(A: T.Tensor((6, 8), "int32"), C: T.Tensor((6, 8), "int32")):
        with T.Kernel(A.shape[0]) as b:
            if A.shape[1] == 8:
                for j in range(A.shape[1]):
                    C[b, j] = A[b, j] + len(A.shape) + A.ndim + len(A)

    a, c = torch.randint(0, 9, (6, 8), dtype=torch.int32), ints(6, 8)
    run(kernel)(a, c)
    assert c.equal(a + 10)


def test_strided_tensors_constant_and_symbolic():
    M, N, s, t = T.dynamic("m, n, s, t")

    @T.prim_func
    def kernel(
        A: T.StridedTensor((M, N), (s, 1), "float32"),
        B: T.StridedTensor((M, N), (1, t), "float32"),
        C: T.StridedTensor((M, N), (2 * 40, 2), "float32"),
        D: T.StridedTensor((M, N), (s, t), "float32"),
    ):
        with T.Kernel(T.ceildiv(M, 8), T.ceildiv(N, 8)) as (x, y):
            a = T.alloc_shared((8, 8), "float32")
            b = T.alloc_fragment((8, 8), "float32")
            T.copy(A[x * 8, y * 8], a)
            T.copy(B[x * 8, y * 8], b)
            for i, j in T.Parallel(8, 8):
                a[i, j] += b[i, j]
            T.copy(a, C[x * 8, y * 8])
            for i, j in T.Parallel(8, 8):
                if x * 8 + i < M and y * 8 + j < N:
                    D[x * 8 + i, y * 8 + j] = A[x * 8 + i, y * 8 + j] - B[x * 8 + i, y * 8 + j]

    m, n = 13, 11
    base_a, base_b, base_c, base_d = (
        torch.randn(m, 20),
        torch.randn(n, 17),
        torch.zeros(m, 80),
        torch.zeros(20 * m + 17 * n),
    )
    a, b, c = base_a[:, 3 : 3 + n], base_b.t()[:m], base_c[:, : 2 * n : 2]
    # D shares both strides with A and B, so that their symbols must agree: elements 20 i + 17 j
    d = base_d.as_strided((m, n), (20, 17))
    b = base_b.t()[:m]
    run(kernel)(a, b, c, d)
    assert c.equal(a + b)
    assert base_c[:, 1::2].count_nonzero() == 0
    want = torch.zeros_like(base_d)
    want.as_strided((m, n), (20, 17)).copy_(a - b)
    # elements of D may fall on the same address (20 i + 17 j): compare those that do not
    address = torch.arange(m)[:, None] * 20 + torch.arange(n) * 17
    unique = torch.tensor([[int((address == v).sum()) == 1 for v in row] for row in address])
    assert (d == a - b)[unique].all()


def test_slices_drop_scalar_axes_and_negative_steps_are_refused():
    @T.prim_func
    def kernel(
        A: T.Tensor((4, 6, 8), "int32"), C: T.Tensor((4, 6, 8), "int32"), D: T.Tensor((6, 4), "int32")
    ):
        with T.Kernel(4) as b:
            t = T.alloc_shared((6, 8), "int32")
            u = T.alloc_shared((3, 8), "int32")
            v = T.alloc_shared((6,), "int32")
            T.copy(A[b], t)  # a missing axis is whole
            T.copy(t[1:4], u)
            T.copy(A[b, :, 2], v)
            T.copy(v, D[0:6, b])
            T.copy(u[0:2, ...], C[b, 0:2, :])
            T.copy(A[b, 2:6, 0:8], C[b, 2, 0])

    a, c, d = torch.randint(0, 99, (4, 6, 8), dtype=torch.int32), ints(4, 6, 8), ints(6, 4)
    run(kernel)(a, c, d)
    assert d.equal(a[:, :, 2].t())
    assert c[:, 0:2].equal(a[:, 1:3]) and c[:, 2:].equal(a[:, 2:])

    def bad(slicing):
        @T.prim_func
        def kernel(A: T.Tensor((4, 8), "int32")):
            with T.Kernel(4) as b:
                t = T.alloc_shared((8, 8), "int32")
                slicing(A, t, b)

        return kernel

    for slicing, message, at in (
        (lambda A, t, b: T.copy(A[0:4:2, 0], t[0, 0]), "a slice of A has a step", "A[0:4:2, 0]"),
        (lambda A, t, b: T.copy(t[3:3], A), "the slice 3:3 of t is empty", "t[3:3]"),
        (lambda A, t, b: A[0, 0, 0], "A has 2 axes and is indexed with 3", "A[0, 0, 0]"),
        (lambda A, t, b: t[8, 0], "index 8 lies outside axis 0 of t, whose extent is 8", "t[8, 0]"),
        (lambda A, t, b: t[-1, 0], "index -1 lies outside axis 0", "t[-1, 0]"),
        (lambda A, t, b: T.copy(t[4:9], A), "4:9 lies outside axis 0", "t[4:9]"),
    ):
        with refused(TileValueError, message, at=at):
            bad(slicing).trace()
    for slicing, message, at in (
        (lambda A, t, b: t[1.5, 0], "an index must be an integer", "t[1.5, 0]"),
        (lambda A, t, b: t["x", 0], "'x' (str) has no meaning as an index", 't["x", 0]'),
        (lambda A, t, b: t[A, 0], "A is a tile, and a scalar is needed as an index", "t[A, 0]"),
        (
            lambda A, t, b: t[T.cast(b, "float32"), 0],
            "an index must be an integer",
            't[T.cast(b, "float32"), 0]',
        ),
    ):
        with refused(TileTypeError, message, at=at):
            bad(slicing).trace()


def test_whole_parts_are_not_assigned():
    @T.prim_func
    def kernel(A: T.Tensor((4, 8), "int32")):
        with T.Kernel(4) as b:
            A[b, 0:4] = 3

    @T.prim_func
    def arithmetic(A: T.Tensor((4, 8), "int32")):
        with T.Kernel(4) as b:
            A[b, 0] = A + 1

    @T.prim_func
    def tile_condition(A: T.Tensor((4, 8), "int32")):
        with T.Kernel(4) as b:
            if A > 3:
                A[b, 0] = 1

    @T.prim_func
    def fraction(A: T.Tensor((4, 8), "int32")):
        with T.Kernel(4) as b:
            A[b, 0] = 1.5

    with refused(
        TileSyntaxError, "a whole part of A is assigned at once", at="A[b, 0:4] = 3", write="T.Parallel"
    ):
        kernel.trace()
    with refused(TileTypeError, "A is a tile, and a scalar is needed", at="A + 1", write="A[i, j]"):
        arithmetic.trace()
    with refused(TileTypeError, "A is a tile, and a scalar is needed", at="A > 3", write="A[i, j]"):
        tile_condition.trace()
    with refused(TileTypeError, "1.5 is stored as int32", at="A[b, 0] = 1.5", write="T.cast"):
        fraction.trace()


def test_scalar_parameters_of_every_dtype():
    @T.prim_func
    def kernel(
        C: T.Tensor((15,), "float64"),
        p_bool: T.bool,
        p_int8: T.int8,
        p_int16: T.int16,
        p_int32: T.int32,
        p_int64: T.int64,
        p_uint8: T.uint8,
        p_uint16: T.uint16,
        p_uint32: T.uint32,
        p_uint64: T.uint64,
        p_e4m3: T.float8_e4m3fn,
        p_e5m2: T.float8_e5m2,
        p_half: T.float16,
        p_bf16: T.bfloat16,
        p_float: T.float32,
        p_double: T.float64,
    ):
        with T.Kernel(1):
            for k, value in enumerate(
                (
                    p_bool,
                    p_int8,
                    p_int16,
                    p_int32,
                    p_int64,
                    p_uint8,
                    p_uint16,
                    p_uint32,
                    p_uint64,
                    p_e4m3,
                    p_e5m2,
                    p_half,
                    p_bf16,
                    p_float,
                    p_double,
                )
            ):
                C[k] = value

    made = run(kernel)
    for sign in (1, -1):
        c = torch.zeros(15, dtype=torch.float64)
        floats = [0.3, 1.7, 0.1, 0.1, 0.1, 0.1]
        ints_ = [sign * 100, sign * 30000, sign * 2**30, sign * 2**52, 200, 60000, 2**32 - 1, 2**52]
        made(c, sign == 1, *ints_, *[sign * f for f in floats])
        want = [float(sign == 1), *map(float, ints_)]
        want += [
            torch.tensor(sign * f, dtype=torch.float64).to(d).double().item()
            for f, d in zip(
                floats,
                (
                    torch.float8_e4m3fn,
                    torch.float8_e5m2,
                    torch.float16,
                    torch.bfloat16,
                    torch.float32,
                    torch.float64,
                ),
                strict=True,
            )
        ]
        assert c.tolist() == want


def test_numpy_scalars_and_torch_dtypes_are_welcome():
    width = np.int64(6)

    @T.prim_func
    def kernel(A: T.Tensor((4, 6), torch.float16), C: T.Tensor((4, 6), torch.float32)):
        with T.Kernel(4) as b:
            t = T.alloc_fragment((6,), torch.float32)
            T.copy(A[b, 0:width], t)
            for i in T.Parallel(6):
                C[b, i] = t[i] * np.float32(2.0)

    a, c = torch.randn(4, 6).half(), torch.zeros(4, 6)
    run(kernel)(a, c)
    assert c.equal(a.float() * 2)


def test_extents_that_cannot_be():
    def refuse_parameter(kind, message, spec, **more):
        with refused(kind, message, **more):

            @T.prim_func
            def kernel(A: spec):
                with T.Kernel(1):
                    A[0] = 0

            kernel.trace()

    refuse_parameter(TileValueError, "extent 0 of A is 0", T.Tensor((0,), "float32"), expected="positive")
    refuse_parameter(TileValueError, "extent 1 of A is -3", T.Tensor((2, -3), "float32"))
    refuse_parameter(TileTypeError, "extent 0 of A is 2.5", T.Tensor((2.5,), "float32"))
    refuse_parameter(TileValueError, "A has 2 axes and 1 strides", T.StridedTensor((2, 3), (1,), "float32"))

    def refuse(kind, message, statement, **more):
        @T.prim_func
        def kernel(A: T.Tensor((T.dynamic("n"),), "float32")):
            with T.Kernel(1) as b:
                statement(A, b)

        with refused(kind, message, **more):
            kernel.trace()

    refuse(
        TileTypeError,
        "extent 0 of T.alloc_shared is n",
        lambda A, b: T.alloc_shared((A.shape[0],)),
        expected="an int",
    )
    refuse(
        TileTypeError,
        "extent 1 of T.alloc_fragment is b",
        lambda A, b: T.alloc_fragment((4, b)),
        at="T.alloc_fragment((4, b))",
    )
    refuse(
        TileValueError,
        "extent 0 of T.alloc_local is 0",
        lambda A, b: T.alloc_local((0,)),
        at="T.alloc_local((0,))",
    )
    refuse(TileValueError, "a loop with step 0", lambda A, b: T.serial(0, 4, 0), at="T.serial(0, 4, 0)")
    refuse(TileTypeError, "T.Parallel without extents", lambda A, b: T.Parallel(), write="T.Parallel(M, N)")
    refuse(TileValueError, "num_stages=-1", lambda A, b: T.Pipelined(4, num_stages=-1))

    for grid, message in (
        ((0,), "the grid has extent 0"),
        ((1, 2, 3, 4), "a grid of 4 axes"),
    ):

        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32")):
            with T.Kernel(*grid):
                A[0] = 0

        with refused(TileValueError, message, at="T.Kernel(*grid)"):
            kernel.trace()


def test_shapes_of_launches_that_cannot_be():
    def refuse(message, **launch):
        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32")):
            with T.Kernel(4, **launch) as b:
                with T.Scale("warpgroup"):
                    A[b] = 0

        with refused(TileValueError, message):
            kernel.trace()

    refuse("threads=2048", threads=2048)
    refuse("threads=0", threads=0)
    refuse("a block of 96 threads is not made of whole warpgroups", threads=96)
    refuse("a cluster of 3 blocks does not divide the grid's axis x of 4", cta_cluster=3)

    @T.prim_func
    def inside_out(A: T.Tensor((4,), "float32")):
        with T.Kernel(4) as b:
            with T.Scale("thread"):
                with T.Scale("warp"):
                    A[b] = 0

    with refused(TileValueError, "a warp inside a thread", at='with T.Scale("warp"):'):
        inside_out.trace()


def test_arithmetic_of_every_dtype_follows_python():
    dtypes = ("bool", "int8", "uint8", "int16", "int32", "int64")
    dtypes += ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64")

    def make(dt):
        @T.prim_func
        def kernel(
            A: T.Tensor((8,), dt),
            B: T.Tensor((8,), dt),
            C: T.Tensor((12, 8), "float64"),
            D: T.Tensor((8,), dt),
        ):
            with T.Kernel(1):
                for i in T.Parallel(8):
                    x, y = A[i], B[i]
                    C[0, i] = x + 1
                    C[1, i] = -x
                    C[2, i] = x**3
                    C[3, i] = x * 0.5
                    C[4, i] = x // 2
                    C[5, i] = x % 3
                    C[6, i] = x < y
                    C[7, i] = x == y or x != y
                    C[8, i] = abs(x)
                    C[9, i] = max(x, y) - min(x, 1)
                    C[10, i] = x / 4.0
                    C[11, i] = 2 - x
                    D[i] = x

        return kernel

    for name in dtypes:
        torch_dtype = getattr(torch, name)
        values = (
            torch.tensor([0.0, 1, 2, 3, 1, 0, 2, 3])
            if name in ("bool", "uint8")
            else torch.tensor([0.0, 1, 2, -3, -1, 4, -2, 3])
        )
        a, b = values.to(torch_dtype), values.flip(0).to(torch_dtype)
        c, d = torch.zeros(12, 8, dtype=torch.float64), torch.zeros(8).to(torch_dtype)
        run(make(name))(a, b, c, d)
        x, y = a.double(), b.double()
        want = torch.stack(
            [
                x + 1,
                -x,
                x**3,
                x * 0.5,
                (x / 2).floor(),
                x % 3,
                (x < y).double(),
                torch.ones(8, dtype=torch.float64),
                x.abs(),
                torch.maximum(x, y) - torch.minimum(x, torch.tensor(1.0)),
                x / 4,
                2 - x,
            ]
        )
        assert c.equal(want), (name, (c - want).nonzero().tolist(), c, want)
        assert d.double().equal(x), name


def test_a_floats_negative_zero_and_modulo():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32"), C: T.Tensor((3, 4), "float32")):
        with T.Kernel(1):
            for i in T.serial(4):
                C[0, i] = -A[i]
                C[1, i] = A[i] % -1.5
                C[2, i] = A[i] // 0.75

    a, c = torch.tensor([0.0, 1.25, -2.0, 7.5]), torch.zeros(3, 4)
    run(kernel)(a, c)
    assert torch.signbit(c[0]).tolist() == [True, True, False, True]
    assert c[1].tolist() == [v % -1.5 for v in a.tolist()]
    assert c[2].tolist() == [v // 0.75 for v in a.tolist()]


def test_arithmetic_that_is_not_defined():
    def refuse(kind, message, expression, **more):
        @T.prim_func
        def kernel(
            A: T.Tensor((4,), "float8_e4m3fn"), B: T.Tensor((4,), "float8_e5m2"), C: T.Tensor((4,), "int32")
        ):
            with T.Kernel(4) as b:
                C[b] = expression(A, B, C, b)

        with refused(kind, message, **more):
            kernel.trace()

    @T.macro
    def divided(A, B, C, b):
        return C[b] / b

    @T.macro
    def by_zero(A, B, C, b):
        return C[b] // 0

    @T.macro
    def power(A, B, C, b):
        return C[b] ** b

    @T.macro
    def text(A, B, C, b):
        return C[b] + "one"

    refuse(TileTypeError, "int32 / int32 is not defined", divided, at="C[b] / b", write="a // b")
    refuse(TileValueError, "// 0", by_zero, at="C[b] // 0")
    refuse(TileTypeError, "int32 ** int32 is not defined", power, at="C[b] ** b", write="T.pow")
    refuse(TileTypeError, "'one' (str) has no meaning as value", text, at='C[b] + "one"')


def test_slices_between_names_have_the_extent_of_their_difference():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32"), C: T.Tensor((64,), "int32")):
        with T.Kernel(4) as b:
            low = b * 16
            middle = low + 4
            high = middle + 12
            t = T.alloc_shared((16,), "int32")
            T.copy(A[low:high], t)
            T.copy(t, C[low:high])
            n = high - low
            T.copy(A[low : low + n], C[low:high])

    a, c = torch.arange(64, dtype=torch.int32), ints(64)
    run(kernel)(a, c)
    assert c.equal(a)


@pytest.mark.parametrize("dt", ["int8", "int32", "int64", "uint8"])
def test_integer_division_by_what_is_only_known_at_run_time(dt):
    """Zero, and the least number by -1: the processor raises SIGFPE for them; we give zero and wrap."""

    @T.prim_func
    def kernel(
        A: T.Tensor((36,), dt), B: T.Tensor((36,), dt), Q: T.Tensor((36,), dt), R: T.Tensor((36,), dt)
    ):
        with T.Kernel(1):
            for i in T.Parallel(36):
                Q[i] = A[i] // B[i]
                R[i] = A[i] % B[i]

    info = np.iinfo(dt)
    few = np.array([info.min, info.max, 0, 1, 7, -1 if info.min else 3], dt)
    a, b = (x.ravel().copy() for x in np.meshgrid(few, few))
    q, r = np.full(36, 77, dt), np.full(36, 77, dt)
    run(kernel)(a, b, q, r)
    with np.errstate(all="ignore"):
        assert (q == a // b).all() and (r == a % b).all()


def test_stores_that_can_only_be_slips():
    """A[-1] = v was dropped in silence, A[0, 1] called a part of A, 300 in an int8 TVM's own error without a
    place."""

    @T.prim_func
    def before(A: T.Tensor((6,), "int8")):
        with T.Kernel(1):
            A[-1] = 1

    @T.prim_func
    def many(A: T.Tensor((6,), "int8")):
        with T.Kernel(1):
            A[0, 1] = 1

    @T.prim_func
    def large(A: T.Tensor((6,), "int8")):
        with T.Kernel(1):
            A[0] = 300

    for func, message, at in (
        (before, "index -1 lies outside axis 0 of A", "A[-1] = 1"),
        (many, "A has 1 axis and is indexed with 2", "A[0, 1] = 1"),
        (large, "300 is stored as int8", "A[0] = 300"),
    ):
        with refused(TileValueError, message, at=at):
            run(func)


def test_functions_of_python_numbers():
    @T.prim_func
    def kernel(A: T.Tensor((6,), "float32")):
        with T.Kernel(1):
            A[0] = math.exp(A[1])

    @T.prim_func
    def arrays(A: T.Tensor((6,), "float32")):
        with T.Kernel(1):
            A[0] = np.exp(A[1])

    for func in (kernel, arrays):
        with refused(
            TileTypeError, "a function of Python numbers or arrays got a device value", write="T.exp"
        ):
            run(func)
