"""T.gemm as the language has it: shapes, transposes, dtypes, accumulation; and pipelined loops around it at
several ring depths."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import tilescale.language as T
from tests.kernels import refused, run
from tilescale.compiler.checks.run import launch
from tilescale.errors import TileTypeError, TileValueError

#: (operands, accumulator): which products the language has
PAIRS = [
    ("float64", "float64"),
    ("float32", "float32"),
    ("float16", "float32"),
    ("float16", "float16"),
    ("bfloat16", "float32"),
    ("bfloat16", "bfloat16"),
    ("float8_e4m3fn", "float32"),
    ("float8_e5m2", "float32"),
    ("float8_e4m3fn", "float16"),
    ("int8", "int32"),
    ("uint8", "int32"),
    ("int32", "int32"),
]


def small(shape: tuple[int, ...], name: str) -> torch.Tensor:
    """Integers, so that every product and sum is exact in every accumulator used here."""
    return torch.randint(0 if name == "uint8" else -3, 4, shape).to(getattr(torch, name))


@pytest.mark.parametrize(("operand", "accumulator"), PAIRS)
def test_transposes_and_dtypes(operand: str, accumulator: str):
    M, N, K = 24, 40, 16

    @T.prim_func
    def kernel(
        A: T.Tensor((M, K), operand),
        At: T.Tensor((K, M), operand),
        B: T.Tensor((K, N), operand),
        Bt: T.Tensor((N, K), operand),
        C: T.Tensor((4, M, N), accumulator),
    ):
        with T.Kernel(1):
            for k, (ta, tb) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):
                a = T.alloc_shared((K, M) if ta else (M, K), operand)
                b = T.alloc_fragment((N, K) if tb else (K, N), operand)
                c = T.alloc_fragment((M, N), accumulator)
                T.copy(At if ta else A, a)
                T.copy(Bt if tb else B, b)
                T.fill(c, 2)
                T.gemm(a, b, c, transpose_A=bool(ta), transpose_B=bool(tb))
                T.copy(c, C[k, 0:M, 0:N])

    a, b = small((M, K), operand), small((K, N), operand)
    c = torch.zeros(4, M, N, dtype=getattr(torch, accumulator))
    run(kernel)(
        a,
        a.to(torch.float64).t().contiguous().to(a.dtype),
        b,
        b.to(torch.float64).t().contiguous().to(b.dtype),
        c,
    )
    want = a.double() @ b.double() + 2
    for k in range(4):
        assert c[k].double().equal(want), (k, operand, accumulator)


def test_clear_accum_and_mixed_fp8_and_parts_of_tiles():
    @T.prim_func
    def kernel(
        A: T.Tensor((32, 32), "float8_e4m3fn"),
        B: T.Tensor((32, 32), "float8_e5m2"),
        C: T.Tensor((4, 32, 32), "float32"),
        n: T.int32,
    ):
        with T.Kernel(1):
            a, b = T.alloc_shared((2, 32, 32), "float8_e4m3fn"), T.alloc_shared((32, 32), "float8_e5m2")
            c = T.alloc_fragment((32, 32), "float32")
            T.copy(A, a[1, :, :])
            T.copy(B, b)
            T.fill(c, float("nan"))
            T.gemm(a[1, 0:32, 0:32], b, c, clear_accum=True)
            T.copy(c, C[0, :, :])
            for k in T.serial(3):  # a device value: fresh in the first round alone
                T.gemm(a[1, :, :], b, c, clear_accum=(k == 0))
            T.copy(c, C[1, :, :])
            T.clear(c)
            T.gemm(a[1, 8:24, 0:8], b[0:8, 16:32], c[4:20, 8:24])
            T.copy(c, C[2, :, :])
            T.fill(c, float("inf"))
            T.gemm(a[1, :, :], b, c, clear_accum=n > 2, policy=T.GemmWarpPolicy.FullRow)
            T.copy(c, C[3, :, :])

    a, b = small((32, 32), "float8_e4m3fn"), small((32, 32), "float8_e5m2")
    c = torch.zeros(4, 32, 32)
    run(kernel)(a, b, c, 3)
    product = a.float() @ b.float()
    assert c[0].equal(product) and c[1].equal(3 * product) and c[3].equal(product)
    want = torch.zeros(32, 32)
    want[4:20, 8:24] = a.float()[8:24, :8] @ b.float()[:8, 16:]
    assert c[2].equal(want)


def test_half_accumulators_round_once_a_call():
    @T.prim_func
    def kernel(
        A: T.Tensor((16, 64), "float16"), B: T.Tensor((64, 16), "float16"), C: T.Tensor((16, 16), "float16")
    ):
        with T.Kernel(1):
            a, b, c = (
                T.alloc_shared((16, 64), "float16"),
                T.alloc_shared((64, 16), "float16"),
                T.alloc_fragment((16, 16), "float16"),
            )
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c, clear_accum=True)
            T.copy(c, C)

    a, b = torch.rand(16, 64).half(), torch.rand(64, 16).half()
    c = torch.zeros(16, 16).half()
    run(kernel)(a, b, c)
    exact = a.double() @ b.double()
    assert ((c.double() - exact).abs() <= exact.abs() * 2**-11 + 64 * 2**-24 * exact.abs()).all()


@pytest.mark.parametrize("stages", [0, 1, 2, 3, 4])
def test_pipelined_gemm_at_every_depth_of_its_ring(stages: int):
    M, N, K = T.dynamic("m"), 80, T.dynamic("k")

    @T.prim_func
    def kernel(
        A: T.Tensor((M, K), "float32"), B: T.Tensor((K, N), "float32"), C: T.Tensor((M, N), "float32")
    ):
        with T.Kernel(T.ceildiv(N, 32), T.ceildiv(M, 32), threads=128) as (bx, by):
            T.use_swizzle(panel_size=4)
            a, b = T.alloc_shared((32, 16), "float32"), T.alloc_shared((16, 32), "float32")
            c = T.alloc_fragment((32, 32), "float32")
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, 16), num_stages=stages):
                T.copy(A[by * 32, k * 16], a)
                T.copy(B[k * 16, bx * 32], b)
                T.gemm(a, b, c)
            for i, j in T.Parallel(32, 32):
                c[i, j] = T.max(c[i, j], 0)
            T.copy(c, C[by * 32, bx * 32])

    m, k = 50, 70
    a, b = small((m, k), "float32"), small((k, N), "float32")
    want = torch.relu(a @ b)
    for depth in (1, 2, 3):
        c = torch.full((m, N), float("nan"))
        run(kernel, depth=depth)(a, b, c)
        assert c.equal(want), depth


def test_pipelined_loops_with_other_statements_keep_their_meaning_at_every_depth():
    """Readers between the copies, buffers used behind the loop, conditional copies, nested pipelines, a start
    other than zero."""

    @T.prim_func
    def kernel(A: T.Tensor((8, 16), "int32"), C: T.Tensor((6, 16), "int32"), n: T.int32):
        with T.Kernel(1):
            a, b = T.alloc_shared((16,), "int32"), T.alloc_shared((16,), "int32")
            s = T.alloc_fragment((16,), "int32")
            T.clear(s)
            for k in T.Pipelined(n, num_stages=3):  # a reader between two copies
                T.copy(A[k, 0], a)
                for i in T.Parallel(16):
                    s[i] += a[i]
                T.copy(A[k, 0], b)
                for i in T.Parallel(16):
                    s[i] += 2 * b[i]
            T.copy(s, C[0, 0])
            T.copy(a, C[1, 0])  # read behind the loop: the last stage
            c = T.alloc_shared((16,), "int32")
            T.clear(s)
            for k in T.Pipelined(1, n, num_stages=2):
                T.copy(A[k, 0], c)
                if k % 2 == 0:
                    for i in T.Parallel(16):
                        s[i] += c[i] * k
            T.copy(s, C[2, 0])
            d, e = T.alloc_shared((16,), "int32"), T.alloc_shared((4,), "int32")
            T.clear(s)
            for k in T.Pipelined(n, num_stages=2):
                T.copy(A[k, 0], d)
                for j in T.Pipelined(4, num_stages=3):
                    T.copy(A[k, j * 4], e)
                    for i in T.Parallel(4):
                        s[j * 4 + i] += d[i] * e[i]
            T.copy(s, C[3, 0])
            f = T.alloc_shared((16,), "int32")
            T.clear(f)
            for k in T.Pipelined(n, num_stages=2):  # filled on some rounds only: no ring
                if k % 2 == 1:
                    T.copy(A[k, 0], f)
                for i in T.Parallel(16):
                    s[i] += f[i]
            T.copy(s, C[4, 0])
            g = T.alloc_shared((16,), "int32")
            for t in T.serial(2):  # the ring's counter lives on across entries of the loop
                for k in T.Pipelined(n - t, num_stages=3):
                    T.copy(A[k, 0], g)
                    for i in T.Parallel(16):
                        s[i] = s[i] * 3 + g[i]
            T.copy(s, C[5, 0])

    a = torch.randint(-3, 4, (8, 16), dtype=torch.int32)
    n = 7
    want = torch.zeros(6, 16, dtype=torch.int32)
    want[0], want[1] = 3 * a[:n].sum(0), a[n - 1]
    want[2] = sum(a[k] * k for k in range(1, n) if k % 2 == 0)
    for k, j in itertools.product(range(n), range(4)):
        want[3, j * 4 : j * 4 + 4] += a[k, :4] * a[k, j * 4 : j * 4 + 4]
    s, f = want[3].clone(), torch.zeros(16, dtype=torch.int32)
    for k in range(n):
        f = a[k] if k % 2 == 1 else f
        s = s + f
    want[4] = s
    for t in range(2):
        for k in range(n - t):
            s = s * 3 + a[k]
    want[5] = s
    for depth in (1, 2, 3):
        c = torch.full((6, 16), -99, dtype=torch.int32)
        run(kernel, depth=depth)(a, c, n)
        assert c.equal(want), (depth, (c != want).any(1))


def test_what_gemm_refuses():
    def refuse(kind, message, statement, **more):
        @T.prim_func
        def kernel(A: T.Tensor((16, 16), "float16")):
            with T.Kernel(1):
                a, b, c = (
                    T.alloc_shared((16, 8), "float16"),
                    T.alloc_shared((8, 32), "float16"),
                    T.alloc_fragment((16, 32), "float32"),
                )
                statement(A, a, b, c)

        with refused(kind, message, **more):
            kernel.trace()

    v, t = TileValueError, TileTypeError
    refuse(
        v,
        "T.gemm of A (16, 8), B (8, 32)ᵀ into C (16, 32)",
        lambda A, a, b, c: T.gemm(a, b, c, transpose_B=True),
        at="T.gemm(a, b, c, transpose_B=True)",
        expected="here K is 8 and 32, C should be (16, 8)",
    )
    refuse(
        v, "into C (16, 16)", lambda A, a, b, c: T.gemm(a, b, c[0:16, 0:16]), expected="C should be (16, 32)"
    )
    refuse(
        v,
        "A of T.gemm is a, a tile of (16,)",
        lambda A, a, b, c: T.gemm(a[0:16, 0], b, c),
        expected="two constant extents",
    )
    refuse(
        t,
        "A of T.gemm is A, which lies in global memory",
        lambda A, a, b, c: T.gemm(A, b, c),
        write="T.alloc_shared",
    )
    refuse(
        t,
        "T.gemm of float16 by float16 into int32",
        lambda A, a, b, c: T.gemm(a, b, T.alloc_fragment((16, 32), "int32")),
        expected="into float32",
    )
    refuse(
        t, "T.gemm of float16 by float32", lambda A, a, b, c: T.gemm(a, T.alloc_shared((8, 32), "float32"), c)
    )
    refuse(
        v,
        "precision='tf32' in T.gemm of float16",
        lambda A, a, b, c: T.gemm(a, b, c, precision="tf32"),
        expected="operands of float32",
    )
    refuse(v, "precision='bf16x3'", lambda A, a, b, c: T.gemm(a, b, c, precision="bf16x3"), expected='"tf32"')


def test_precision_allows_operands_to_be_cut():
    """What is asked for by name: the simulator cuts both to 10 bits of mantissa; without a word it does
    not."""

    def kernel(precision):
        @T.prim_func
        def product(
            A: T.Tensor((16, 32), "float32"),
            B: T.Tensor((32, 16), "float32"),
            C: T.Tensor((16, 16), "float32"),
        ):
            with T.Kernel(1, threads=32):
                a, b, c = (
                    T.alloc_shared((16, 32), "float32"),
                    T.alloc_shared((32, 16), "float32"),
                    T.alloc_fragment((16, 16), "float32"),
                )
                T.copy(A, a)
                T.copy(B, b)
                T.gemm(a, b, c, clear_accum=True, precision=precision)
                T.copy(c, C)

        return product

    draw = np.random.default_rng(0)
    args = {
        "A": draw.standard_normal((16, 32), "float32"),
        "B": draw.standard_normal((32, 16), "float32"),
        "C": np.zeros((16, 16), "float32"),
    }
    cut = {n: (x.view("uint32") >> 13 << 13).view("float32").astype("float64") for n, x in args.items()}
    plain = launch(kernel(""), 1, args).arrays[0]["C"]
    less = launch(kernel("tf32"), 1, args).arrays[0]["C"]
    assert np.array_equal(plain, (args["A"].astype("float64") @ args["B"]).astype("float32"))
    assert np.array_equal(less, (cut["A"] @ cut["B"]).astype("float32")) and not np.array_equal(plain, less)


@pytest.mark.parametrize("policy", ["fullrow", 7, None], ids=str)
def test_a_policy_that_there_is_not(policy: object):
    @T.prim_func
    def kernel(A: T.Tensor((16, 16), "float32")):
        with T.Kernel(1, threads=32):
            a, c = T.alloc_shared((16, 16), "float32"), T.alloc_fragment((16, 16), "float32")
            T.gemm(a, a, c, policy=policy)

    with refused(TileValueError, "in T.gemm", expected="T.GemmWarpPolicy.FullRow"):
        kernel.trace()
