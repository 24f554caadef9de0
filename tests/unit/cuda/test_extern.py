"""The author's CUDA text: it stands in front of the kernel, nvcc compiles the two, other targets refuse it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import tilescale
import tilescale.language as T
from tests.kernels import refused
from tests.kernels import run as compiled
from tests.unit.cuda import emulated
from tests.unit.language.test_every_word import traced
from tests.unit.ops.test_argmax import TARGETS, run
from tilescale.compiler import driver
from tilescale.compiler.checks.run import launch
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError
from tilescale.language import UnknownName

UNPACK = """
template <typename Out>
__device__ void unpack(uint8_t* packed, Out* numbers, int count) {
  for (int k = 0; k < count; ++k) numbers[k] = Out(float((packed[k / 2] >> (4 * (k & 1))) & 15));
}
"""


@T.prim_func
def unpacking(A: T.Tensor((16, 128), "uint8"), B: T.Tensor((16, 256), "bfloat16")):
    with T.Kernel(2, threads=128) as bx:
        packed, numbers = T.alloc_local((8,), "uint8"), T.alloc_local((16,), "bfloat16")
        T.import_source(UNPACK)
        tx = T.get_thread_binding()
        row, at = bx * 8 + tx // 16, tx % 16
        T.import_source(UNPACK)
        for v in T.vectorized(8):
            packed[v] = A[row, at * 8 + v]
        T.call_extern("handle", "unpack", T.access_ptr(packed, "r"), T.access_ptr(numbers, "w"), 16)
        for v in T.vectorized(16):
            B[row, at * 16 + v] = numbers[v] * 2


DOUBLE = "__device__ void doubled(float* x, int n) { for (int k = 0; k < n; ++k) x[k] *= 2; }"


def test_an_address_may_reach_all_of_its_memory():
    """No barrier would be needed behind a function that touched one element of another thread's."""

    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128):
            T.import_source(DOUBLE)
            s = T.alloc_shared((128,), "float32")
            T.copy(A, s)
            if T.get_thread_binding() == 0:
                T.call_extern("handle", "doubled", T.address_of(s[4]), 100)
            T.copy(s, B)

    back = driver.backend("cuda:sm_90a")
    text = back.text(code(kernel), "cuda")
    call = text.index("doubled(&s[4], 100)")
    assert "ts::barrier_sync" in text[call:] or "__syncthreads" in text[call:]
    with refused(TileTypeError, "T.access_ptr of 3", expected="a tensor, an allocation"):
        traced_address(3)
    with refused(UnknownName, "the language has no T.isnullptr", write="no tensor here is null"):
        T.isnullptr  # noqa: B018


def traced_address(base: Any) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            T.call_extern("f", T.address_of(base))

    kernel.trace()


@T.prim_func
def returning(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64):
        T.import_source("__device__ float scaled(float x, unsigned by) { return x * by; }")
        for i in T.Parallel(64):
            B[i] = T.call_extern("float32", "scaled", A[i], 0xFFFFFFFF) + 1
        t = T.get_thread_binding()
        x = T.call_pure_extern("float32", "scaled", A[t], 1)
        T.call_extern("float32", "scaled", x, 2)
        B[t] += T.call_extern("scaled", x, 3, dtype="float32")


def test_what_a_function_returns(tmp_path: Any):
    lowered = code(returning)
    back = driver.backend("cuda:sm_90a")
    text = back.text(lowered, "cuda")
    assert re.search(r"= scaled\(A_in\[?\w*\]?, 4294967295u\);|= scaled\(A\[\w+\], 4294967295u\);", text)
    assert re.search(r"\n  scaled\(\w+, 2\);", text) and len(re.findall(r"= scaled\(\w+, 3\)", text)) == 1
    back.build(lowered, tmp_path / "kernel.cubin")
    with refused(TileSyntaxError, "T.call_extern of scaled on cpu", expected='target="cuda"'):
        compiled(returning)


@T.prim_func
def by_cuda_s_names(
    A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "float16"), C: T.Tensor((6, 32), "uint32")
):
    with T.Kernel(1, threads=32):
        for i in T.Parallel(32):
            B[i] = T.call_extern(T.float16, "__float2half_rz", A[i])
            C[0, i] = T.call_pure_extern("uint32", "__popc", i)
            C[1, i] = T.call_extern("uint32", "__float_as_uint", A[i])
        t = T.get_thread_binding()
        C[2, t] = T.call_extern("uint32", "__match_any_sync", 0xFFFFFFFF, t // 3)
        C[3, t] = T.call_extern("uint32", "__shfl_xor_sync", -1, t, 3)
        C[4, t] = T.call_extern("uint32", "__reduce_add_sync", 0xFFFFFFFF, t)
        C[5, t] = T.call_extern("uint32", "__ballot_sync", 0xFFFFFFFF, t % 5 == 0)


@pytest.mark.parametrize("target", TARGETS)
def test_cuda_s_own_functions_are_the_language_s(target: str):
    a = (np.random.default_rng(5).standard_normal(32) * 40000).astype(np.float32)
    a[:4] = np.inf, -65519.9, 1e-9, 2049.5
    out = run(
        by_cuda_s_names, {"A": a, "B": np.zeros(32, np.float16), "C": np.zeros((6, 32), np.uint32)}, target
    )
    with np.errstate(over="ignore"):
        near = a.astype(np.float16)
    past = np.abs(near.astype(np.float32)) > np.abs(a)
    np.testing.assert_array_equal(
        out["B"], np.where(past, (near.view(np.uint16) - past).view(np.float16), near)
    )
    t = np.arange(32)
    groups = [sum(1 << k for k in range(32) if k // 3 == n // 3) for n in t]
    fives = sum(1 << k for k in range(0, 32, 5))
    want = [[n.bit_count() for n in range(32)], a.view(np.uint32), groups, t ^ 3, [496] * 32, [fives] * 32]
    np.testing.assert_array_equal(out["C"], np.array(want, np.uint32))


def code(kernel: Any, arch: str = "sm_90a") -> Any:
    return driver.lower(kernel.trace(), f"cuda:{arch}")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_text_stands_in_front_once_and_compiles(arch: str, tmp_path: Any):
    lowered = code(unpacking, arch)
    back = driver.backend(f"cuda:{arch}")
    text = back.text(lowered, "cuda")
    assert text.count("__device__ void unpack") == 1
    assert text.index("__device__ void unpack") < text.index('extern "C" __global__')
    assert "unpack(&packed[0], &numbers[0], 16);" in text
    assert re.search(r"alignas\(16\) uint8_t packed\[8\]", text)
    back.build(lowered, tmp_path / "kernel.cubin")
    assert (tmp_path / "kernel.cubin").stat().st_size > 0


def test_a_kernel_s_prelude_stands_there_too():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64, prelude=UNPACK):
            T.import_source(UNPACK)
            T.import_source("// more")
            T.fill(A, 1)

    text = driver.backend("cuda:sm_90a").text(code(kernel), "cuda")
    assert text.count("__device__ void unpack") == 1
    assert text.index("__device__ void unpack") < text.index("// more") < text.index('extern "C" __global__')
    assert traced("T.Kernel(1, prelude=3)") == "T.Kernel(prelude=3)"


def test_other_targets_refuse_it_by_name():
    args = {"A": np.zeros((16, 128), np.uint8), "B": np.zeros((16, 256), np.uint16)}
    with refused(TileSyntaxError, "T.call_extern of unpack on sim", at=None, expected='target="cuda"'):
        launch(unpacking, 1, args)
    with refused(TileSyntaxError, "T.call_extern of unpack on cpu", expected='target="cuda"'):
        compiled(unpacking)
    with pytest.raises(Exception, match="unpack"):
        emulated.run(unpacking, args, "sm_90a", 0)


def test_a_swizzled_tile_has_no_pointer():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, c = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.gemm(a, a, c, clear_accum=True)
            T.call_extern("f", T.access_ptr(a, "rw"))
            T.copy(c, C)

    with refused(
        TileValueError, "a pointer to a, whose elements are swizzled", write="make_linear_layout(a)"
    ):
        code(kernel)


@pytest.mark.parametrize(
    "text, message",
    [
        ("T.import_source(3)", "T.import_source of 3"),
        ("T.call_extern(3)", "T.call_extern of 3"),
        ('T.call_extern("f g")', "T.call_extern of 'f g'"),
        ('T.call_extern("f", a)', "argument 0 of f is a, a tile"),
        ('T.call_extern("f", T.access_ptr(f))', "T.access_ptr of f, a fragment, whose elements lie spread over the threads"),
        ('T.call_extern("f", T.access_ptr(a, "x"))', "T.access_ptr(…, 'x')"),
        ("T.access_ptr(3)", "T.access_ptr of 3"),
        ('for p in T.Parallel(4):\n    T.call_extern("f", T.access_ptr(a))', "T.call_extern of a tile in T.Parallel, whose "
         "iterations are of elements: one thread runs each"),
        ("T.dp4a(h[0, 0], h[0, 0], i[0, 0])", "T.dp4a of float16, float16, int32"),
    ],
)  # fmt: skip
def test_refusals(text: str, message: str):
    assert traced(text) == message


@T.prim_func
def dots(A: T.Tensor((64, 24), "int8"), B: T.Tensor((64, 24), "int8"), C: T.Tensor((64,), "int32")):
    with T.Kernel(1, threads=64):
        a, b, c = T.alloc_local((24,), "int8"), T.alloc_local((24,), "int8"), T.alloc_local((1,), "int32")
        tx = T.get_thread_binding()
        T.clear(c)
        for v in T.vectorized(24):
            a[v] = A[tx, v]
            b[v] = B[tx, v]
        for k in T.serial(6):
            T.dp4a(a[k * 4], b[k * 4], c[0])
        C[tx] = c[0]


@pytest.mark.parametrize("target", TARGETS)
def test_dp4a(target: str):
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-128, 128, (64, 24), dtype=np.int8) for _ in range(2))
    out = run(dots, {"A": a, "B": b, "C": np.zeros(64, np.int32)}, target)
    assert (out["C"] == (a.astype(np.int32) * b).sum(1)).all()


def test_dp4a_is_one_instruction():
    assert tilescale.compile(dots, target="cuda:sm_90a").get_kernel_source().count("ts::dp4a(") >= 1


def test_dp4a_wraps_on_the_cpu_as_elsewhere():
    @T.prim_func
    def much(A: T.Tensor((4,), "int8"), C: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=32):
            T.dp4a(A[0], A[0], C[0])

    a, c = np.full(4, -128, np.int8), np.array([2**31 - 1], np.int32)
    tilescale.compile(much, target="cpu")(a, c)
    assert c[0] == -(2**31) + 4 * 128 * 128 - 1


@T.prim_func
def asked(A: T.Tensor((32,), "uint8"), B: T.Tensor((32,), "float16")):
    with T.Kernel(1, threads=32):
        for k in T.Parallel(32):
            x = A[k]
            assert x.dtype == T.uint8 and x.astype("float32").dtype == T.float32
            B[k] = x.astype(T.float16) / 2


@pytest.mark.parametrize("target", TARGETS)
def test_a_value_says_its_dtype_and_becomes_another(target: str):
    a = np.arange(32, dtype=np.uint8) * 8
    out = run(asked, {"A": a, "B": np.zeros(32, np.float16)}, target)
    assert (out["B"] == a.astype(np.float16) / 2).all()
