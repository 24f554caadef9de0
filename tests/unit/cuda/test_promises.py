"""Extents that calls promise to be multiples of a number: what GPUs make of it, and that every target refuses
calls that break it."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import tilescale
import tilescale.language as T
from tests.kernels import refused, run
from tests.unit.cuda.emulated import agree, data, empty
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.ir import multiples
from tilescale.compiler.passes import pipeline
from tilescale.errors import TileValueError
from tilescale.jit import frozen
from tilescale.language.symbolic import Sym


def product(multiple: int, assumed: int = 1) -> Any:
    """A product whose three extents only the call knows."""
    M, N, K = T.dynamic("m"), T.dynamic("n", multiple_of=multiple), T.dynamic("k", multiple_of=multiple)

    @T.prim_func
    def gemm(A: T.Tensor((M, K), "float16"), B: T.Tensor((K, N), "float16"), C: T.Tensor((M, N), "float16")):
        with T.Kernel(T.ceildiv(N, 64), T.ceildiv(M, 64), threads=128) as (bx, by):
            if assumed > 1:
                T.assume(N % assumed == 0)
                T.assume(K % assumed == 0)
            a, b, c = (
                T.alloc_shared((64, 32), "float16"),
                T.alloc_shared((32, 64), "float16"),
                T.alloc_fragment((64, 64), "float32"),
            )
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, 32), num_stages=3):
                T.copy(A[by * 64, k * 32], a)
                T.copy(B[k * 32, bx * 64], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * 64, bx * 64])

    return gemm


def args(m: int = 100, n: int = 72, k: int = 88) -> dict[str, Any]:
    return {"A": data((m, k), "float16", 1), "B": data((k, n), "float16", 2), "C": empty((m, n), "float16")}


def printed(kernel: Any, arch: str) -> tuple[Any, str]:
    program, _ = pipeline.run(kernel.trace(), target(arch))
    return program, print_kernel(Lowering(program).run()).text


def test_hoppers_engines_take_promised_rows():
    program, text = printed(product(8), "sm_90a")
    assert all(word in text for word in ("ts::tma_load(", "ts::tma_store(", "wgmma")) and not program.notes
    assert printed(product(1, assumed=8), "sm_90a")[1].replace("assumed", "") == text.replace("assumed", "")
    program, text = printed(product(4), "sm_90a")
    assert "tma_load" not in text and "cp_async<8>" in text
    assert any(
        "rows of A are not known" in n and "T.dynamic(…, multiple_of=8) promises it" in n
        for n in program.notes
    ), program.notes


def test_ampere_copies_ahead_as_wide_as_is_promised():
    for multiple, text in (
        (1, ""),
        (2, "cp_async<4>"),
        (4, "cp_async<8>"),
        (8, "cp_async<16>"),
        (24, "cp_async<16>"),
    ):
        made = printed(product(multiple), "sm_80")[1]
        assert text in made and ("cp_async" in made) == bool(text)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("multiple", [1, 4, 8])
def test_the_results_are_the_same(arch: str, multiple: int):
    agree(product(multiple), args(), arch=arch)


def test_threads_move_and_add_vectors():
    n = T.dynamic("n", multiple_of=4)

    @T.prim_func
    def kernel(
        A: T.Tensor((16, n), "float32"), C: T.Tensor((16, n), "float32"), D: T.Tensor((16, 2 * n), "float32")
    ):
        with T.Kernel(T.ceildiv(n, 64), threads=64) as b:
            f = T.alloc_fragment((16, 64), "float32")
            T.copy(A[0:16, b * 64 : b * 64 + 64], f)
            T.atomic_add(C[0:16, b * 64 : b * 64 + 64], f)
            for i, j in T.Parallel(16, 64):
                D[i, n + b * 64 + j] = f[i, j]

    text = printed(kernel, "sm_90a")[1]
    assert "ts::red_add4_f32" in text and text.count("(const uint4*)&A") == 1 and "*(uint4*)&D" in text, text
    agree(
        kernel,
        {"A": data((16, 68), "float32"), "C": data((16, 68), "float32", 1), "D": empty((16, 136), "float32")},
    )


@pytest.mark.parametrize("target", ["cpu", "sim"])
def test_calls_that_break_a_promise_are_refused(target: str):
    made = tilescale.compile(product(8), target=target)
    a, b, c = (np.zeros(s, np.float16) for s in ((10, 64), (64, 60), (10, 60)))
    with refused(
        TileValueError,
        "n is 60, the extent of axis 1 of B",
        at='B: T.Tensor((K, N), "float16")',
        expected='a multiple of 8, which the kernel was promised: T.dynamic("n", multiple_of=8)',
        write="pad B",
    ):
        made(a, b, c)
    made(a, np.zeros((64, 56), np.float16), np.zeros((10, 56), np.float16))
    assert made.multiples == {"n": 8, "k": 8}


def test_strides_may_be_promised_too():
    s = T.dynamic("s", multiple_of=16)

    @T.prim_func
    def kernel(A: T.StridedTensor((4, 8), (s, 1), "float32"), B: T.Tensor((4, 8), "float32")):
        with T.Kernel(1):
            T.copy(A, B)

    out = np.zeros((4, 8), np.float32)
    whole = np.arange(128, dtype=np.float32).reshape(4, 32)
    for made in (run(kernel), tilescale.compile(kernel, target="sim")):
        made(whole[:, :8], out)
        assert (out == whole[:, :8]).all()
        with refused(TileValueError, "s is 24, the stride of axis 0 of A"):
            made(whole.reshape(-1)[:96].reshape(4, 24)[:, :8], out)


def test_the_checker_refuses_them():
    with refused(TileValueError, "axis 1 of B has extent 60", expected="a multiple of 8"):
        product(8).check(args=args(n=60))


def test_promises_live_as_long_as_their_program():
    gc.collect()
    before = dict(multiples._promised)
    program, _ = pipeline.run(product(8).trace(), target("sm_90a"))
    lowered = Lowering(program)
    lowered.run()
    assert len(multiples._promised) == len(before) + 4  # n and k, in the program and in the lowering
    del program, lowered
    gc.collect()
    assert dict(multiples._promised) == before


def test_what_is_no_promise():
    with refused(TileValueError, "T.dynamic with multiple_of=0", expected="a positive int"):
        T.dynamic("n", multiple_of=0)

    def refuse(kind: Any, message: str, condition: Any, **more: Any) -> None:
        n = T.dynamic("n")

        @T.prim_func
        def kernel(A: T.Tensor((n,), "float32")):
            with T.Kernel(1) as b:
                T.assume(condition(n, b))

        with refused(kind, message, **more):
            kernel.trace()

    refuse(TileValueError, "T.assume of what is false", lambda n, b: False)


def test_promises_tell_kernels_apart():
    """Two promises about one extent both hold; kernels that differ in them are different kernels."""
    a, b = T.dynamic("n", multiple_of=4), T.dynamic("n", multiple_of=6)

    @T.prim_func
    def kernel(A: T.Tensor((a,), "float32"), B: T.Tensor((b,), "float32")):
        with T.Kernel(1):
            pass

    assert kernel.trace().multiples == {"n": 12}
    assert (
        frozen(a) != frozen(b)
        and frozen(a) == frozen(Sym("n", "int32", 4))
        and frozen(a + 1) != frozen(b + 1)
    )
    from tilescale.fingerprint import Fingerprint

    def digest(value: Any) -> str:
        made = Fingerprint()
        made.value(value, "n")
        return made.hexdigest()

    assert digest(a) != digest(b) != digest(T.dynamic("n")) and digest(a) == digest(
        T.dynamic("n", multiple_of=4)
    )
