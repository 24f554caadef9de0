"""Vectors of a thread: lanes, packed pairs, accesses of 32 to 256 bits, on the CPU, the simulator and emulated
threads."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

import tilescale.language as T
from tests.kernels import refused, run
from tests.unit.cuda.emulated import agree
from tests.unit.cuda.test_toolchain import ARCHES, needs_nvcc
from tests.unit.language.test_tilelang_words import everywhere
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.passes import pipeline
from tilescale.errors import TileTypeError, TileValueError

SPECIAL = [0.0, -0.0, 1.0, -2.5, np.inf, -np.inf, np.nan, 6e-8, -6e-8, 6.1e-5, 65504.0, -65504.0, 0.1, 333.25]


def numbers(n: int, dtype: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        made = (rng.standard_normal(n) * 2.0 ** rng.uniform(-12, 12, n)).astype(dtype)
    made[: len(SPECIAL)] = rng.permutation(np.array(SPECIAL)).astype(dtype)
    return made


@pytest.mark.parametrize("name", ["float16", "float32"])
def test_lanes_of_a_cell(name: str):
    vector = getattr(T, f"{name}x2")

    @T.prim_func
    def kernel(A: T.Tensor((2,), name), B: T.Tensor((4,), name)):
        with T.Kernel(1, threads=1):
            packed = T.alloc_var(vector)
            packed = vector(A[0], A[1])
            B[0] = T.extract_lane(packed, 0)
            B[1] = T.extract_lane(packed, 1)
            whole = vector(A[1])
            A[1] = 0
            B[2], B[3] = T.extract_lane(whole, 0), T.extract_lane(packed, 1)

    got = everywhere(kernel, A=np.array([1.25, -2.5], name), B=np.zeros(4, name))
    assert got["B"].tolist() == [1.25, -2.5, -2.5, -2.5]


def test_vectors_of_other_dtypes_and_their_conversion():
    """By name or by string: the bytes of a word, a vector and neighbours in memory converted lane by lane."""

    @T.prim_func
    def kernel(
        W: T.Tensor((4,), "int32"),
        A: T.Tensor((8,), "float32"),
        B: T.Tensor((8,), "int8"),
        H: T.Tensor((8,), "float16"),
        I: T.Tensor((8,), "int32"),
    ):
        with T.Kernel(1, threads=1):
            B[0:4] = T.reinterpret(T.ldg32(W[0]), T.int8x4)
            cell = T.alloc_var("uint8x4")
            cell = T.reinterpret(T.ldg32(W[1]), "uint8x4")
            for k in range(4):
                B[4 + k] = T.cast(T.extract_lane(cell, k), "int8")
            H[0:4] = T.cast(T.float32x4(A[0], A[1], A[2], A[3]), T.float16x4)
            H[4:8] = T.Cast("float16x4", A[4:8])
            I[0:8] = T.cast(A[0:8], T.int32x8)
            I[4:6] = T.cast(7, T.int32x2)

    words = np.array([0x80FF7F01, 0x01020304, 0, 0], np.uint32).view(np.int32)
    a = np.array([1.5, -2.25, 65519.0, 1e-8, 3.7, -3.7, 0.1, 1e9], "float32")
    blank = {"B": np.zeros(8, "int8"), "H": np.zeros(8, "float16"), "I": np.zeros(8, "int32")}
    got = everywhere(kernel, W=words, A=a, **blank)
    assert got["B"].tolist() == [1, 127, -1, -128, 4, 3, 2, 1]
    assert (got["H"] == torch.from_numpy(a).half().numpy()).all()
    assert got["I"].tolist() == [1, -2, 65519, 0, 7, 7, 0, 1000000000]


def exactly(word: str, rows: list[float], name: str) -> np.generic:
    dt = np.dtype(name).type
    with np.errstate(all="ignore"):
        x = [np.float64(v) for v in rows]
        plain = {
            "add2": lambda a, b: a + b,
            "sub2": lambda a, b: a - b,
            "mul2": lambda a, b: a * b,
            "fma2": lambda a, b, c: a * b + c,
            "max2": lambda a, b: a if a >= b or a != a else b,
            "min2": lambda a, b: a if a <= b or a != a else b,
            "abs2": abs,
        }[word](*x)
        if word != "fma2" or not all(map(np.isfinite, x)) or plain == 0:
            return dt(plain)
        exact = Fraction(float(x[0])) * Fraction(float(x[1])) + Fraction(float(x[2]))
        near = dt(plain)
        around = [np.nextafter(near, dt(-np.inf)), near, np.nextafter(near, dt(np.inf))]
        if not np.isfinite(near):
            return near
        gaps = [abs(Fraction(float(v)) - exact) if np.isfinite(v) else None for v in around]
        least = min(g for g in gaps if g is not None)
        best = [v for v, g in zip(around, gaps, strict=True) if g == least]
        return best[0] if len(best) == 1 else next(v for v in best if not v.view(f"u{dt().itemsize}") & 1)


@pytest.mark.parametrize("name", ["float16", "float32"])
@pytest.mark.parametrize("word", ["add2", "sub2", "mul2", "fma2", "max2", "min2", "abs2"])
def test_packed_pairs(word: str, name: str):
    count = {"fma2": 3, "abs2": 1}.get(word, 2)
    n = 512
    given = [numbers(n, name, k) for k in range(3)]

    @T.prim_func
    def kernel(
        A: T.Tensor((n,), name), B: T.Tensor((n,), name), C: T.Tensor((n,), name), D: T.Tensor((n,), name)
    ):
        with T.Kernel(1, threads=n // 2):
            at = T.Ramp(T.get_thread_binding() * 2, 1, 2)
            D[at] = getattr(T, word)(*(X[at] for X in (A, B, C)[:count]))

    want = np.array([exactly(word, list(row), name) for row in zip(*given[:count], strict=True)], name)
    got = agree(kernel, dict(zip("ABCD", (*given, np.zeros(n, name)), strict=True)), exact=True)["D"]
    out = torch.zeros(n, dtype=getattr(torch, name))
    run(kernel)(*map(torch.from_numpy, given), out)
    for made in (got, out.numpy()):
        kind = f"u{want.itemsize}"
        wrong = (made.view(kind) != want.view(kind)) & ~(np.isnan(made) & np.isnan(want))
        assert not wrong.any(), [
            (made[k], want[k], *(g[k] for g in given)) for k in np.flatnonzero(wrong)[:5]
        ]


def test_packed_pairs_of_bfloat16():
    @T.prim_func
    def kernel(
        A: T.Tensor((64,), "bfloat16"), B: T.Tensor((64,), "bfloat16"), C: T.Tensor((64,), "bfloat16")
    ):
        with T.Kernel(1, threads=32):
            at = T.Ramp(T.get_thread_binding() * 2, 1, 2)
            C[at] = T.fma2(A[at], B[at], A[at])

    a, b = (torch.from_numpy(numbers(64, "float32", k)).to(torch.bfloat16) for k in range(2))
    out = torch.zeros(64, dtype=torch.bfloat16)
    run(kernel)(a, b, out)
    want = (a.double() * b.double() + a.double()).to(torch.float32).to(torch.bfloat16)
    nan = want.isnan()
    assert (out.isnan() == nan).all()
    assert ((out == want) | nan).float().mean() > 0.98  # the reference rounds twice


@pytest.mark.parametrize("name", ["float32", "float16", "int8", "float64"])
@pytest.mark.parametrize("bits", [32, 64, 128, 256])
def test_accesses_of_a_width(bits: int, name: str):
    count = bits // (np.dtype(name).itemsize * 8)
    if not count:
        pytest.skip("an element has more bits")

    @T.prim_func
    def kernel(
        A: T.Tensor((8 * count,), name), B: T.Tensor((8 * count,), name), C: T.Tensor((8 * count,), name)
    ):
        with T.Kernel(8, threads=32) as bx:
            got = getattr(T, f"ldg{bits}")(A[bx * count : bx * count + count])
            getattr(T, f"stg{bits}")(B[bx * count], got)
            some = getattr(T, f"ldg{bits}")(A[bx * count], pred=bx < 3)
            getattr(T, f"stg{bits}")(C[bx * count : bx * count + count], some, pred=bx != 1)

    a = np.frombuffer(np.random.default_rng(1).bytes(8 * bits // 8), name).copy()
    if "float" in name:
        a = numbers(8 * count, name, 2) if count > 1 else np.resize(np.array(SPECIAL), 8).astype(name)
    c = np.full(8 * count, 7).astype(name)
    got = everywhere(kernel, A=a, B=np.zeros_like(a), C=c)
    kind = f"u{a.itemsize}"
    nan = np.isnan(a) if "float" in name else np.zeros(a.shape, bool)
    assert ((got["B"].view(kind) == a.view(kind)) | nan & np.isnan(got["B"].astype(float))).all()
    want = c.reshape(8, count).copy()
    want[0], want[2] = a.reshape(8, count)[0], a.reshape(8, count)[2]
    want[3:] = 0
    np.testing.assert_array_equal(got["C"].reshape(8, count), want)


@pytest.mark.parametrize("bits", [32, 64, 128])
def test_accesses_of_shared_memory(bits: int):
    count = bits // 32

    @T.prim_func
    def kernel(A: T.Tensor((32 * count,), "float32"), B: T.Tensor((32 * count,), "float32")):
        with T.Kernel(1, threads=32):
            s, t = T.alloc_shared((32 * count,)), T.get_thread_binding()
            getattr(T, f"sts{bits}")(s[t * count], getattr(T, f"ldg{bits}")(A[t * count : t * count + count]))
            T.sync_threads()
            val = getattr(T, f"lds{bits}")(s[(31 - t) * count])
            getattr(T, f"stg{bits}")(B[t * count], val)

    a = np.arange(32 * count, dtype=np.float32)
    got = everywhere(kernel, A=a, B=np.zeros_like(a))
    np.testing.assert_array_equal(got["B"].reshape(32, count), a.reshape(32, count)[::-1])


def test_bits_of_vectors_and_parts_of_tensors():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32"), B: T.Tensor((2, 8), "float32"), C: T.Tensor((2,), "uint32")):
        with T.Kernel(1, threads=32):
            B[1, 0:4] = T.reinterpret(T.ldg128(A[0:4]), T.float32x4)
            B[0, T.Ramp(7, -2, 4)] = T.reinterpret(T.ldg128(A[4]), dtype=T.float32x4)
            C[0] = T.ldg32(A[3])
            C[1] = T.extract_lane(T.ldg64(A[4:6]), 1)

    a = np.arange(1, 9, dtype=np.float32)
    got = everywhere(kernel, A=a, B=np.zeros((2, 8), np.float32), C=np.zeros(2, np.uint32))
    assert got["B"].tolist() == [[0, 8, 0, 7, 0, 6, 0, 5], [1, 2, 3, 4, 0, 0, 0, 0]]
    assert got["C"].tolist() == a[[3, 5]].view(np.uint32).tolist()


WRONG = {
    "a lane that there is not": ("B[0] = T.extract_lane(v, 2)", TileValueError, "lane 2 of float32x2"),
    "a lane of a scalar": (
        "B[0] = T.extract_lane(A[0], 0)",
        TileTypeError,
        "what T.extract_lane takes apart is",
    ),
    "a lane on the device": ("B[0] = T.extract_lane(v, n)", TileTypeError, "lane n of float32x2"),
    "arithmetic": ("B[0] = T.extract_lane(v + v, 0)", TileTypeError, "float32x2 is a vector, and no operand"),
    "a vector as a scalar": ("B[0] = v", TileTypeError, "float32x2 is assigned to a part of B"),
    "two dtypes": ("w = T.add2(v, T.float16x2(1, 2))", TileTypeError, "T.add2 of float32x2, float16x2"),
    "pairs of four": ("w = T.abs2(T.float32x4(1))", TileTypeError, "T.abs2 of float32x4"),
    "too few values": ("w = T.float32x4(1, 2)", TileTypeError, "T.float32x4 of 2 values"),
    "another extent": ("B[0:4] = v", TileTypeError, "float32x2 is assigned to a part of B"),
    "a scalar to several": (
        "B[T.Ramp(0, 1, 2)] = 1.0",
        TileTypeError,
        "1.0 is assigned to several elements of B",
    ),
    "shared memory by ldg": ("w = T.ldg64(s[0])", TileTypeError, "T.ldg64 of s"),
    "a tensor by lds": ("w = T.lds64(A[0])", TileTypeError, "T.lds64 of A"),
    "other neighbours": ("w = T.ldg64(A[0:4])", TileValueError, "T.ldg64 of 4 elements of float32"),
    "other bits": ("T.stg64(A[0], T.ldg32(B[0]))", TileValueError, "have different sizes"),
    "a ramp of three": ("w = A[T.Ramp(0, 1, 3)]", TileValueError, "T.Ramp of 3 lanes"),
    "a cell as a scalar": ("c = T.alloc_var(T.float32x2)\nB[0] = c + 1", TileTypeError, "is a vector"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_vectors_are_not(name: str, tmp_path):
    text, kind, message = WRONG[name]
    body = "\n".join(f"        {line}" for line in text.splitlines())
    source = (
        "import tilescale.language as T\n@T.prim_func\ndef kernel(A: T.Tensor((8,), 'float32'),"
        " B: T.Tensor((8,), 'float32'), n: T.int32):\n    with T.Kernel(1):\n        s = T.alloc_shared((8,))\n"
        f"        T.clear(s)\n        v = T.float32x2(A[0], A[1])\n{body}\n"
    )
    file = tmp_path / "wrong.py"
    file.write_text(source)
    space: dict = {}
    exec(compile(source, str(file), "exec"), space)
    with refused(kind, message):
        space["kernel"].trace()


@needs_nvcc
@pytest.mark.parametrize("arch", ARCHES)
def test_words_of_a_thread_compile(arch: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", "nvcc")

    @T.prim_func
    def kernel(
        A: T.Tensor((1024,), "float32"),
        H: T.Tensor((1024,), "float16"),
        G: T.Tensor((1024,), "bfloat16"),
        D: T.Tensor((1024,), "float64"),
    ):
        with T.Kernel(1, threads=128):
            s, t = T.alloc_shared((512,)), T.get_thread_binding()
            at = T.Ramp(t * 2, 1, 2)
            for X in (A, H, G):
                X[at] = T.fma2(X[at], T.max2(X[at], T.abs2(X[at])), T.mul2(X[at], X[at]))
            T.sts128(s[t * 4], T.ldg128(H[t * 8]))
            T.sync_threads()
            T.stg128(A[t * 4], T.lds128(s[(127 - t) * 4]), pred=t < 100)
            T.stg256(D[t * 4 : t * 4 + 4], T.ldg256(G[t * 4]))
            T.rng_init(1)
            x = T.ieee_fdiv(A[t], A[t + 1], "ru")
            for mode in ("rz", "rd"):
                x = T.ieee_fmaf(x, T.ieee_fsqrt(T.ieee_add(x, A[t], mode), mode), T.ieee_frcp(x, mode), mode)
            A[t] = T.nextafter(x, T.ldexp(T.fast_rcp(x), t)) + T.rng_rand_float(dist="normal")
            D[t] = T.ldexp(D[t], t) + T.nextafter(D[t], D[t + 1]) + T.rng_rand_float(64)
            H[t] = T.nextafter(H[t], H[t + 1])
            G[t] = T.asinh(T.acosh(T.atanh(T.nearbyint(G[t]))))

    made = Lowering(pipeline.run(kernel.trace(), target(arch))[0]).run()
    assert toolchain.compile_cubin(print_kernel(made), arch)


def test_one_value_on_all_lanes():
    @T.prim_func
    def kernel(A: T.Tensor((1,), "int8"), B: T.Tensor((36,), "int8"), C: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=1):
            own = T.alloc_local((32,), "int8")
            own[0:32] = T.Broadcast(A[0], 32)
            for i in T.serial(32):
                B[i] = own[i]
            B[32:36] = T.Broadcast(T.cast(7, "int8"), 4)
            C[0:4] = T.Broadcast(1.5, 4)

    blank = {"B": np.zeros(36, "int8"), "C": np.zeros(4, "float32")}
    got = everywhere(kernel, A=np.array([-37], "int8"), **blank)
    assert got["B"].tolist() == [-37] * 32 + [7] * 4 and got["C"].tolist() == [1.5] * 4


def test_conversions_that_do_not_fit():
    def refuse(message: str, expected: str, act: object, kind: type = TileTypeError) -> None:
        @T.prim_func
        def kernel(A: T.Tensor((4, 8), "float32")):
            with T.Kernel(1, threads=1):
                act(A)

        with refused(kind, message, expected=expected):
            kernel.trace()

    refuse("T.cast of float32x2 to T.float16x4", "2 lanes", lambda A: T.cast(T.float32x2(1, 2), T.float16x4))
    refuse("T.Broadcast to A[0, 0] lanes", "a constant", lambda A: T.Broadcast(1.0, A[0, 0]))
    refuse("is no vector", "neighbours along the last axis", lambda A: T.cast(A[0:2, 0:2], T.float16x2))
    refuse("T.Broadcast to 1 lanes", "2 … 64", lambda A: T.Broadcast(1.0, 1), TileValueError)
    refuse("T.cast of float32x4 to T.float16x2", "4 lanes", lambda A: T.cast(A[0, 0:4], "float16x2"))
