"""What a kernel may not say is refused where it is traced, so on every target; and what other languages
refuse for want of a way to do it (an element that another thread holds) means the same on all of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import refused, run
from tests.unit.cuda.emulated import agree, data, empty
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.ir.target import CPU
from tilescale.compiler.passes import pipeline
from tilescale.errors import TileError, TileSyntaxError, TileTypeError, TileValueError


def stored(value: Any) -> Callable[..., None]:
    def put(A: Any, s: Any) -> None:
        A[0, 0] = value

    return put


def filled(A: Any, s: Any) -> None:
    T.fill(s, 1e9)


def reads_a_part(A: Any, s: Any) -> None:
    T.reshape(s[0:2, 0:8], (16,))


def loads(order: str) -> Callable[..., None]:
    return lambda A, s: T.atomic_load(A[0, 0], memory_order=order)


def acquires(A: Any, s: Any) -> None:
    T.atomic_store(A[0, 0], 1, memory_order="acquire")


MISUSES: dict[str, tuple[str, Any, type[TileError], str]] = {
    "another size": (
        "float32",
        lambda A, s: T.reshape(s, (8, 9)),
        TileValueError,
        "has 256 bytes, a view of (8, 9) float32 has 288",
    ),
    "another size by dtype": (
        "float32",
        lambda A, s: T.view(s, (8, 8), "float16"),
        TileValueError,
        "has 256 bytes",
    ),
    "negative extents": (
        "float32",
        lambda A, s: T.reshape(s, (-8, -8)),
        TileValueError,
        "extent 0 of a view of s is -8",
    ),
    "no extent": ("float32", lambda A, s: T.view(s, (0, 0)), TileValueError, "extent 0 of a view of s is 0"),
    "a truth as extent": (
        "float32",
        lambda A, s: T.view(s, (True, 64)),
        TileTypeError,
        "extent 0 of a view of s is True",
    ),
    "an extent to guess": (
        "float32",
        lambda A, s: T.reshape(s, (-1, 4)),
        TileValueError,
        "extent 0 of a view of s is -1",
    ),
    "part of a tile": ("float32", reads_a_part, TileTypeError, "a view of a part of s"),
    "a number": ("float32", lambda A, s: T.view(3, (1,)), TileTypeError, "a view of 3"),
    "more than float32 holds": ("float32", stored(1e300), TileValueError, "1e+300 is no value of float32"),
    "less than float16 holds": ("float16", stored(-1e5), TileValueError, "-100000.0 is no value of float16"),
    "more than bfloat16 holds": ("bfloat16", stored(2**200), TileValueError, "is no value of bfloat16"),
    "more than a small float holds": (
        "float8_e4m3fn",
        stored(449),
        TileValueError,
        "449 is no value of float8_e4m3fn",
    ),
    "a fill that does not fit": ("float16", filled, TileValueError, "1000000000.0 is no value of float16"),
    "a variable's beginning": (
        "float32",
        lambda A, s: T.alloc_var("float32", 1e39),
        TileValueError,
        "1e+39 is no value of float32",
    ),
    "fast functions of integers": ("int32", lambda A, s: T.__exp(A[0, 0]), TileTypeError, "T.__exp of int32"),
    "a load that releases": ("int32", loads("release"), TileTypeError, "'release' of T.atomic_load"),
    "a load that does both": ("int32", loads("acq_rel"), TileTypeError, "'acq_rel' of T.atomic_load"),
    "a store that acquires": ("int32", acquires, TileTypeError, "'acquire' of T.atomic_store"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuses_are_refused_at_their_place(name: str):
    dtype, use, kind, message = MISUSES[name]

    @T.prim_func
    def kernel(A: T.Tensor((8, 8), dtype)):
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((8, 8), dtype)
            use(A, s)

    with refused(kind, message) as error:
        kernel.trace()
    assert __file__ in error.text and "^" in error.text


def test_a_negative_constant_is_an_unsigned_ones_ones():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "uint8"), B: T.Tensor((4,), "uint32")):
        with T.Kernel(1, threads=32):
            A[0] = -1
            B[0] = -2

    a, b = np.zeros(4, np.uint8), np.zeros(4, np.uint32)
    run(kernel)(a, b)
    assert a[0] == 255 and b[0] == 2**32 - 2


def test_a_condition_that_is_computed_anew_reads_no_fragment():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            f = T.alloc_fragment((64,), "int32")
            T.copy(A, f)
            n = T.alloc_var("int32")
            while f[n] > 0:
                n += 1

    for where in (CPU, target("sm_90a")):
        with refused(
            TileSyntaxError,
            "the condition of this while reads f, which is spread over threads",
            write="a T.alloc_var",
        ):
            pipeline.run(kernel.trace(), where)


# ---- an element that another thread holds


def summed(A: Any, f: Any, out: Any) -> None:
    for i in T.Parallel(64):
        for j in T.serial(32):
            out[i] += f[i, j]


def summed_by_everyone(A: Any, f: Any, out: Any) -> None:
    total = T.alloc_var("float32")
    for j in T.serial(32):
        total += f[3, j]
    out[0] = total


def neighbours(A: Any, f: Any, out: Any) -> None:
    for i in T.Parallel(64):
        out[i] = f[(i + 1) % 64, i % 32]


def set_one_by_one(A: Any, f: Any, out: Any) -> None:
    for j in T.serial(32):
        f[j, 31 - j] = A[j, 0]
    for i in T.Parallel(64):
        out[i] = f[i, 31 - i % 32]


def private(A: Any, f: Any, out: Any) -> None:
    own = T.alloc_local((64,), "float32")
    for i in T.Parallel(64):
        own[i] = A[i, 1]
    for i in T.serial(64):
        out[i] = own[63 - i]


@pytest.mark.parametrize("made_by", ["copy", "product"])
@pytest.mark.parametrize("body", [summed, summed_by_everyone, neighbours, set_one_by_one, private])
def test_elements_that_other_threads_hold(body: Any, made_by: str):
    """TileLang refuses most of these. Here the fragment goes through shared memory, and the report says
    so."""
    body = T.macro(body)

    @T.prim_func
    def kernel(A: T.Tensor((64, 32), "float32"), C: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=128):
            f, out = T.alloc_fragment((64, 32), "float32"), T.alloc_shared((64,), "float32")
            T.clear(out)
            if made_by == "copy":
                T.copy(A, f)
            else:
                a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 32), "float16")
                T.copy(A, a)
                T.fill(b, 1)
                T.gemm(a, b, f, clear_accum=True)
            body(A, f, out)
            T.copy(out, C)

    args = {"A": data((64, 32), "float32"), "C": empty((64,), "float32")}
    wanted = agree(kernel, args)["C"]
    c = np.zeros(64, np.float32)
    run(kernel)(args["A"], c)
    np.testing.assert_allclose(c, wanted, rtol=1e-3, atol=1e-3)
