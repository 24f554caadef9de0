"""Numbers of 4 bits: tensors of two a byte, tiles of 8 bits that hold them, what is stored, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tests.kernels import refused, run
from tests.unit.cuda.emulated import agree, data, empty
from tilescale.compiler.checks.run import check
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.passes import pipeline
from tilescale.errors import TileTypeError, TileValueError

GRID = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
ARCHES = pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])


def packed(codes: np.ndarray, dtype: str = "uint8") -> np.ndarray:
    low, high = codes[..., ::2] & 15, codes[..., 1::2] & 15
    return (low | high << 4).astype("uint8").view(dtype)


def codes_of(values: np.ndarray) -> np.ndarray:
    """The nearest of float4_e2m1fn, halfway to the even code."""
    size = np.minimum(np.abs(np.nan_to_num(values.astype(np.float64), nan=6.0)), 6.0)
    far = np.abs(size[..., None] - GRID)
    best = far.min(-1, keepdims=True)
    even = np.where(far == best, np.arange(8) % 2, 2)
    return even.argmin(-1) | np.where(np.signbit(values), 8, 0)


def product(dtype: Any, out: Any, m: int = 96, pipelined: bool = True) -> Any:
    @T.prim_func
    def kernel(A: T.Tensor((m, 128), dtype), B: T.Tensor((64, 128), dtype), C: T.Tensor((m, 64), out)):
        with T.Kernel(2, threads=128) as x:
            a, b = T.alloc_shared((64, 64), dtype), T.alloc_shared((64, 64), dtype)
            c = T.alloc_fragment((64, 64), out)
            T.clear(c)
            for k in T.Pipelined(2, num_stages=2 if pipelined else 0):
                T.copy(A[x * 64, k * 64], a)
                T.copy(B[0, k * 64], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[x * 64, 0])

    return kernel


@ARCHES
@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_products_of_integers(dtype: str, arch: str):
    rng, low = np.random.default_rng(1), -8 if dtype == "int4" else 0
    a, b = rng.integers(low, low + 16, (96, 128)), rng.integers(low, low + 16, (64, 128))
    store = "int8" if dtype == "int4" else "uint8"
    args = {"A": packed(a, store), "B": packed(b, store), "C": empty((96, 64), "int32")}
    kernel = product(T.dtype(dtype), "int32")
    agree(kernel, args, arch=arch, exact=True)
    rings = pipeline.run(kernel.trace(), target(arch))[0].schedule.rings
    if arch == "sm_90a":  # where each first reader has a ring of its own
        assert sorted(b for r in rings for b in r.buffers) == ["A_bytes", "B_bytes"]
    got = np.zeros((96, 64), np.int32)
    run(kernel)(args["A"], args["B"], got)
    np.testing.assert_array_equal(got, a @ b.T)


def test_products_of_floats():
    rng = np.random.default_rng(2)
    a, b = rng.integers(0, 16, (96, 128)), rng.integers(0, 16, (64, 128))
    value = lambda c: GRID[c & 7] * np.where(c & 8, -1, 1)  # noqa: E731
    args = {"A": packed(a), "B": packed(b), "C": empty((96, 64), "float32")}
    agree(product(T.float4_e2m1fn, "float32"), args, arch="sm_90a", exact=True)
    got = np.zeros((96, 64), np.float32)
    run(product(T.float4_e2m1fn, "float32"))(args["A"], args["B"], got)
    np.testing.assert_array_equal(got, value(a) @ value(b).T)  # sums of quarters are exact


def quantized(through: str) -> Any:
    @T.prim_func
    def kernel(
        X: T.Tensor((30, 64), "float32"),
        Q: T.Tensor((30, 64), T.float4_e2m1fn),
        Y: T.Tensor((30, 64), "float32"),
    ):
        with T.Kernel(1, threads=64):
            x = T.alloc_fragment((32, 64), "float32")
            q = T.alloc_fragment((32, 64), T.float4_e2m1fn)
            s = T.alloc_shared((32, 64), T.float4_e2m1fn)
            T.copy(X[0, 0], x)
            if through == "elements":
                for i, j in T.Parallel(32, 64):
                    q[i, j] = x[i, j]
                T.copy(q, s)
            elif through == "copies":
                T.copy(x, q)
                T.copy(q, s)
            else:
                T.copy(X[0, 0], s)
            T.copy(s if through != "copies" else q, Q[0, 0])
            for i, j in T.Parallel(32, 64):
                if i < 30:
                    Y[i, j] = T.cast(s[i, j], "float32")

    return kernel


@ARCHES
@pytest.mark.parametrize("through", ["elements", "copies", "a tensor"])
def test_floats_round_to_the_nearest_even(through: str, arch: str):
    x = data((30, 64), "float32", 3).reshape(-1) * 3
    middle = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 1e9, 0.0, np.inf, 2.4999], np.float32)
    x[:24] = np.concatenate([middle, -middle])
    x = x.reshape(30, 64)
    args = {"X": x, "Q": np.zeros((30, 32), np.uint8), "Y": empty((30, 64), "float32")}
    agree(quantized(through), args, arch=arch, exact=True)
    q, y = np.zeros((30, 32), np.uint8), np.zeros((30, 64), np.float32)
    run(quantized(through))(x, q, y)
    codes = codes_of(x)
    np.testing.assert_array_equal(q, packed(codes))
    np.testing.assert_array_equal(y, GRID[codes & 7] * np.where(codes & 8, -1, 1))


def test_the_simulator_finds_nothing():
    args = {
        "X": data((30, 64), "float32"),
        "Q": np.zeros((30, 32), np.uint8),
        "Y": empty((30, 64), "float32"),
    }
    for arch in ("sm_90a", "sm_80"):
        assert (report := check(quantized("copies"), 1, args, level="both", seeds=2, arch=arch)), report


def dequantized(dtype: Any) -> Any:
    """Elements of a tensor, one by one, and values that are cast and whose bits are taken."""

    @T.prim_func
    def kernel(
        A: T.Tensor((5, 6), dtype), s: T.Tensor((5,), "float32"), C: T.Tensor((5, 6), "float32"),
        D: T.Tensor((5, 6), "uint8"),
    ):  # fmt: skip
        with T.Kernel(1, threads=32):
            for i, j in T.Parallel(5, 6):
                C[i, j] = A[i, j] * s[i]
                D[i, j] = T.reinterpret(T.cast(A[i, j], dtype), "uint8")

    return kernel


@ARCHES
@pytest.mark.parametrize("dtype", ["int4", "uint4", "float4_e2m1fn"])
def test_elements_of_tensors(dtype: str, arch: str):
    codes = np.random.default_rng(4).integers(0, 16, (5, 6))
    codes[0] = [0, 1, 7, 8, 9, 15]
    values = {
        "int4": (codes ^ 8) - 8, "uint4": codes, "float4_e2m1fn": GRID[codes & 7] * np.where(codes & 8, -1, 1)
    }[dtype]  # fmt: skip
    scale = np.arange(1, 6, dtype=np.float32)
    store = "int8" if dtype == "int4" else "uint8"
    args = {
        "A": packed(codes, store), "s": scale, "C": empty((5, 6), "float32"), "D": np.zeros((5, 6), np.uint8)
    }  # fmt: skip
    agree(dequantized(T.dtype(dtype)), args, arch=arch, exact=True)
    c, d = np.zeros((5, 6), np.float32), np.zeros((5, 6), np.uint8)
    run(dequantized(T.dtype(dtype)))(args["A"], scale, c, d)
    np.testing.assert_array_equal(c, values * scale[:, None])
    np.testing.assert_array_equal(d, codes)


def test_torch_s_pairs_of_floats():
    @tilescale.jit(target="cpu")
    def negated(x):
        M, N = T.const("M, N")
        x: T.Tensor((M, N), T.float4_e2m1fn)
        y = T.empty((M, N), T.float4_e2m1fn)
        with T.Kernel(T.ceildiv(M, 8), threads=32) as b:
            s = T.alloc_shared((8, 16), T.float4_e2m1fn)
            T.copy(x[b * 8, 0], s)
            for i, j in T.Parallel(8, 16):
                s[i, j] = -T.cast(s[i, j], "float32")
            T.copy(s, y[b * 8, 0])
        return y

    codes = np.random.default_rng(5).integers(0, 16, (20, 16))
    given = torch.from_numpy(packed(codes)).view(torch.float4_e2m1fn_x2)
    got = negated(given)
    assert got.dtype == torch.float4_e2m1fn_x2 and got.shape == (20, 8)
    np.testing.assert_array_equal(got.view(torch.uint8).numpy(), packed(codes ^ 8))


def test_the_names_are_dtypes_of_their_own():
    assert T.int4 != T.int8 and T.int4 == "int4" and T.dtype("uint4") is T.uint4 and T.int4.bits == 4
    assert T.dtype(torch.float4_e2m1fn_x2) is T.float4_e2m1fn and T.float4_e2m1fn.is_float
    assert T.int4.as_torch() is torch.int8 and T.float4_e2m1fn.as_torch() is torch.float4_e2m1fn_x2


def one(act: Any, shape: tuple[int, int] = (8, 16), dtype: Any = "int4") -> Any:
    @T.prim_func
    def kernel(A: T.Tensor(shape, dtype), n: T.int32):
        with T.Kernel(1, threads=32):
            t, f = T.alloc_shared((8, 16), dtype), T.alloc_fragment((8,), "float32")
            act(A, t, f, n)

    return kernel


@pytest.mark.parametrize(
    ("act", "kind", "message", "expected"),
    [
        (lambda A, t, f, n: T.reduce_max(t, f, dim=1), TileTypeError, "is t, of int4", "for tiles of 4 bits"),
        (lambda A, t, f, n: T.copy(A[0, n], t), TileTypeError, "which may be odd", "an even number"),
        (lambda A, t, f, n: T.copy(A[0, 1:3], t[0, 0:2]), TileTypeError, "is 1, which may be odd", "an even number"),
        (lambda A, t, f, n: T.fill(t, 8), TileValueError, "8 is no value of int4", "-8 to 7"),
        (lambda A, t, f, n: T.fill(A, 0), TileTypeError, "A is a tensor of int4", "T.copy of a part"),
        (lambda A, t, f, n: T.reinterpret(t[0, 0], "float32"), TileTypeError, "T.reinterpret of int4", "lower 4 bits"),
        (lambda A, t, f, n: T.view(t, (16, 8), "int8"), TileTypeError, "a view of t, of int4, as int8", "the same dtype"),
    ],
)  # fmt: skip
def test_refused(act: Any, kind: Any, message: str, expected: str):
    with refused(kind, message, expected=expected):
        one(act).trace()


def test_refused_tensors():
    with refused(TileValueError, "the rows of A are of 15 numbers of int4", expected="an even last extent"):
        one(lambda A, t, f, n: None, (8, 15)).trace()
    with refused(TileValueError, "0.7 is no value of float4_e2m1fn", expected="0, 0.5, 1"):
        one(lambda A, t, f, n: T.fill(t, 0.7), dtype="float4_e2m1fn").trace()
    with refused(TileTypeError, "that is a symm", expected="share a byte"):
        T.SymmTensor((8, 16), "int4")
    for strides in ((32, 2), (31, 1), (32, T.dynamic("s"))):
        with refused(TileTypeError, "a tensor of int4 with strides", expected="1 along a row"):
            T.StridedTensor((8, 16), strides, "int4")


def packed_rows(last: Any, beside: bool = False) -> Any:
    """Sums of rows whose length only the call knows; ``beside``: a tensor of bytes has it as well."""
    n = T.dynamic("n")
    columns = last(n)

    @T.prim_func
    def kernel(A: T.Tensor((4, columns), "int4"), C: T.Tensor((4, columns) if beside else (4, 2), "int32")):
        with T.Kernel(4, threads=32) as i:
            if beside:
                for j in T.serial(columns):
                    C[i, j] = A[i, j]
            else:
                total = T.alloc_var("int32")
                total = 0
                for j in T.serial(columns):
                    total += A[i, j] * (j + 1)
                C[i, 0] = total
                C[i, 1] = n

    return kernel


@pytest.mark.parametrize("target", ["cpu", "sim"])
@pytest.mark.parametrize(
    ("last", "columns", "n"),
    [(lambda n: n, 10, 10), (lambda n: n * 4, 12, 3), (lambda n: n * 3, 18, 6), (lambda n: n * 1, 2, 2)],
)
def test_rows_of_a_plain_dynamic(last: Any, columns: int, n: int, target: str):
    """The call's bytes say how many numbers there are: twice as many."""
    bytes_ = np.random.default_rng(n).integers(0, 256, (4, columns // 2)).astype(np.uint8).view(np.int8)
    wide = np.stack([bytes_ << 4 >> 4, bytes_ >> 4], -1).reshape(4, columns).astype(np.int64)
    out = np.zeros((4, 2), np.int32)
    tilescale.compile(packed_rows(last), target=target)(bytes_, out)
    assert out[:, 0].tolist() == (wide * np.arange(1, columns + 1)).sum(1).tolist()
    assert out[:, 1].tolist() == [n] * 4


def test_rows_of_a_plain_dynamic_that_another_tensor_has():
    kernel = tilescale.compile(packed_rows(lambda n: n, beside=True), target="cpu")
    a, c = torch.randint(-128, 127, (4, 5), dtype=torch.int8), torch.zeros(4, 10, dtype=torch.int32)
    kernel(a, c)
    assert torch.equal(c[:, 1::2], (a >> 4).int()) and torch.equal(c[:, ::2], (a << 4 >> 4).int())
    with refused(TileValueError, "axis 1 of A has extent 5", expected="4 = n // 2"):
        kernel(a, c[:, :8].contiguous())
    with refused(TileValueError, "n is 11", expected="rows of 4-bit numbers, two a byte"):
        kernel(a, torch.zeros(4, 11, dtype=torch.int32))
    thirds = tilescale.compile(packed_rows(lambda n: n * 3), target="cpu")
    with refused(TileValueError, "axis 1 of A has extent 5", expected="a multiple of 3"):
        thirds(a, torch.zeros(4, 2, dtype=torch.int32))


def test_rows_of_a_plain_dynamic_on_the_emulated_gpu():
    a = np.random.default_rng(1).integers(0, 256, (4, 7)).astype(np.uint8).view(np.int8)
    agree(packed_rows(lambda n: n), {"A": a, "C": np.zeros((4, 2), np.int32)}, exact=True)


def test_rows_that_may_be_odd():
    n = T.dynamic("n")

    @T.prim_func
    def kernel(A: T.Tensor((4, n + 1), "int4"), B: T.Tensor((n,), "int32")):
        with T.Kernel(1, threads=32):
            B[0] = A[0, n]

    with refused(TileValueError, "the rows of A are of (n + 1) numbers", expected="an even last extent"):
        kernel.trace()


def gapped(stride: Any) -> Any:
    m, s = T.dynamic("m"), stride

    @T.prim_func
    def kernel(
        A: T.StridedTensor((m, 16), (s, 1), "int4"), B: T.Tensor((m, 16), "int8"), C: T.Tensor((2,), "int32")
    ):
        with T.Kernel(1, threads=32):
            t = T.alloc_shared((8, 16), "int4")
            T.copy(A[0, 0], t)
            for i, j in T.Parallel(m, 16):
                B[i, j] = t[i, j]
            C[0] = A[m - 1, 3]
            C[1] = s

    return kernel


@pytest.mark.parametrize("target", ["cpu", "sim"])
@pytest.mark.parametrize("stride", [64, None])
def test_rows_with_gaps(stride: int | None, target: str):
    """Strides count numbers, as extents do; a call's count its bytes."""
    whole = torch.from_numpy(np.random.default_rng(1).integers(-128, 128, (8, 16)).astype(np.int8))
    kernel = tilescale.compile(gapped(stride or T.dynamic("s")), target=target)
    for a in (
        [whole[::2][:4, :8]] if stride else [whole[::2][:4, :8], whole[:, :8], whole[:6, :8].contiguous()]
    ):
        b, c = torch.zeros(a.shape[0], 16, dtype=torch.int8), torch.zeros(2, dtype=torch.int32)
        kernel(a, b, c)
        assert torch.equal(b[:, 1::2], a >> 4) and torch.equal(b[:, ::2], a << 4 >> 4)
        assert c.tolist() == [int(b[-1, 3]), 2 * a.stride(0)]
    if stride:
        with refused(TileValueError, "axis 0 of A has stride 8", expected="32"):
            kernel(whole[:, :8].contiguous(), torch.zeros(8, 16, dtype=torch.int8), c)


def test_strides_of_numbers_and_of_bytes():
    """One symbol for both: the bytes' is half of it, which is even."""
    s = T.dynamic("s")

    @T.prim_func
    def kernel(A: T.StridedTensor((4, 16), (s, 1), "int4"), B: T.StridedTensor((4, 16), (s, 1), "int8")):
        with T.Kernel(1, threads=32):
            for i, j in T.Parallel(4, 16):
                B[i, j] = A[i, j]

    made = tilescale.compile(kernel, target="cpu")
    whole = torch.from_numpy(np.random.default_rng(2).integers(-128, 128, (4, 20)).astype(np.int8))
    b = torch.zeros(4, 32, dtype=torch.int8)
    a = whole.as_strided((4, 8), (16, 1))
    made(a, b[:, :16])
    assert torch.equal(b[:, 1:16:2], a >> 4)
    with refused(TileValueError, "axis 0 of A has stride 20", expected="16"):
        made(whole[:, :8], b[:, :16])
    with refused(TileValueError, "s is 33", expected="two a byte"):
        made(a, torch.zeros(4, 33, dtype=torch.int8)[:, :16])


def test_rows_with_gaps_on_the_emulated_gpu():
    from tests.unit.cuda.test_hopper import lowered
    from tilescale.compiler.cuda.printer import print_kernel

    assert "A_stride_0" in print_kernel(lowered(gapped(T.dynamic("s")))[0]).text


def test_bytes_of_either_sign():
    """Pairs of 4-bit floats lie in what torch has for them, or in bytes, whatever their sign."""

    @tilescale.jit
    def eager(A, B):
        M, K = T.const("M K")
        A: T.Tensor((M, K), T.float4_e2m1fn)
        B: T.Tensor((M, K), T.float32)
        with T.Kernel(1, threads=32):
            for i, j in T.Parallel(M, K):
                B[i, j] = A[i, j]

    a = torch.from_numpy(np.random.default_rng(4).integers(0, 256, (4, 8)).astype(np.uint8))
    made = []
    for given in (a, a.view(torch.int8), a.view(torch.float4_e2m1fn_x2)):
        made.append(torch.zeros(4, 16))
        eager(given, made[-1])
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2]) and made[0].unique().numel() > 8


@tilescale.jit
def related(x, y, out):
    """As extents of both stand in TileLang's programs: n by itself only in a row of packed numbers."""
    m, n = T.dynamic("m, n")
    x: T.Tensor[(m, n * 2), T.float4_e2m1fn]
    y: T.Tensor[(m * 2, n), T.float4_e2m1fn]
    out: T.Tensor[(3,), T.int32]
    with T.Kernel(1, threads=32):
        out[0], out[1] = m, n
        out[2] = T.cast(y[1, n - 1] * 2, T.int32)


def test_a_symbol_of_two_packed_rows():
    x, y = torch.zeros(3, 8, dtype=torch.uint8), torch.zeros(6, 4, dtype=torch.uint8)
    y[1, 3] = 0x70
    out = torch.zeros(3, dtype=torch.int32)
    related(x, y, out)
    assert out.tolist() == [3, 8, 12]
    with refused(TileValueError, "axis 1 of y has extent 5", expected="4"):
        related(x, torch.zeros(6, 5, dtype=torch.uint8), out)
