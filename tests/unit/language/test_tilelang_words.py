"""Words of TileLang's that say again what the language has, on the CPU, the simulator and emulated threads."""

from __future__ import annotations

import linecache
from textwrap import indent
from typing import Any

import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tests.kernels import refused, run
from tests.unit.cuda.emulated import agree, data, empty
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError


def everywhere(kernel, exact: bool = True, **args: Any) -> dict[str, np.ndarray]:
    """What the CPU gives, once the emulator and the simulator gave the same."""
    numbers = {k: v for k, v in args.items() if not isinstance(v, np.ndarray)}
    got = agree(kernel, {k: v if k in numbers else v.copy() for k, v in args.items()}, exact=exact)
    made = {k: v if k in numbers else torch.from_numpy(v.copy()) for k, v in args.items()}
    run(kernel)(*made.values())
    for name, value in made.items():
        if name in numbers:
            continue
        np.testing.assert_array_equal(value.numpy(), got[name])
    return got


def built(body: str, launch: bool = True) -> T.PrimFunc:
    """A kernel of these statements."""
    lines = (["with T.Kernel(1, threads=32):"] if launch else ["if True:"]) + indent(body, "    ").split("\n")
    text = "@T.prim_func\ndef kernel(A: T.Tensor((4,), 'int32'), n: T.int32):\n" + indent(
        "\n".join(lines), "    "
    )
    name = f"<built {len(linecache.cache)}>"
    linecache.cache[name] = (len(text), None, [line + "\n" for line in text.split("\n")], name)
    made: dict[str, Any] = {"T": T}
    exec(compile(text, name, "exec"), made)
    return made["kernel"]


@pytest.mark.parametrize("alloc", ["alloc_shared", "alloc_fragment"])
def test_transpose_of_tiles_and_of_their_parts(alloc: str):
    @T.prim_func
    def kernel(
        A: T.Tensor((32, 48), "float32"), B: T.Tensor((48, 32), "float32"), C: T.Tensor((16, 8), "float32")
    ):
        with T.Kernel(1, threads=128):
            a, b = getattr(T, alloc)((32, 48)), getattr(T, alloc)((48, 32))
            T.copy(A, a)
            T.transpose(a, b)
            T.copy(b, B)
            c = T.alloc_shared((16, 8))
            T.transpose(A[8:16, 4:20], c, annotations={"tl.x": 1})
            T.copy(c, C)

    a = data((32, 48), "float32")
    got = everywhere(kernel, A=a, B=empty((48, 32), "float32"), C=empty((16, 8), "float32"))
    np.testing.assert_array_equal(got["B"], a.T)
    np.testing.assert_array_equal(got["C"], a[8:16, 4:20].T)


def test_transpose_of_several_matrices():
    @T.prim_func
    def kernel(A: T.Tensor((3, 8, 16), "int32"), B: T.Tensor((3, 16, 8), "int32")):
        with T.Kernel(1, threads=64):
            a, b = T.alloc_shared((3, 8, 16), "int32"), T.alloc_shared((3, 16, 8), "int32")
            T.copy(A, a)
            T.transpose(a, b)
            T.copy(b, B)

    a = np.arange(3 * 8 * 16, dtype=np.int32).reshape(3, 8, 16)
    got = everywhere(kernel, A=a, B=np.zeros((3, 16, 8), np.int32))
    np.testing.assert_array_equal(got["B"], a.transpose(0, 2, 1))


def test_transpose_of_other_extents_is_refused():
    @T.prim_func
    def kernel(A: T.Tensor((8, 16), "float32")):
        with T.Kernel(1):
            a, b = T.alloc_shared((8, 16)), T.alloc_shared((8, 16))
            T.copy(A, a)
            T.transpose(a, b)

    with refused(TileValueError, "T.transpose of a with (8, 16) into b with (8, 16)", expected="(16, 8)"):
        kernel.trace()


def test_async_copy_waits_where_it_is_read():
    @T.prim_func
    def kernel(
        A: T.Tensor((64, 128), "float16"), B: T.Tensor((128, 64), "float16"), C: T.Tensor((64, 64), "float32")
    ):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(4, num_stages=2):
                T.async_copy(A[0, k * 32], a)
                T.ptx_wait_group(0)
                T.async_copy(B[k * 32, 0], b, coalesced_width=4)
                T.ptx_wait_group(0)
                T.gemm(a, b, c)
            T.copy(c, C)

    a, b = data((64, 128), "float16"), data((128, 64), "float16")
    got = agree(kernel, {"A": a, "B": b, "C": empty((64, 64), "float32")})
    np.testing.assert_allclose(got["C"], a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=1e-4)
    made = [torch.from_numpy(x) for x in (a, b, empty((64, 64), "float32"))]
    run(kernel)(*made)
    np.testing.assert_allclose(made[2].numpy(), got["C"], rtol=1e-5, atol=1e-4)


def test_async_copy_is_from_a_tensor_to_shared_memory():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            a, b = T.alloc_shared((4,)), T.alloc_shared((4,))
            T.async_copy(A, a)
            T.async_copy(a, b)

    with refused(
        TileTypeError, "T.async_copy from a to b", expected="a tensor, and a tile of T.alloc_shared"
    ):
        kernel.trace()


def test_with_while_is_while():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "int32"), B: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=32):
            state, k = T.alloc_fragment((1,), "int32"), T.alloc_var("int32")
            state[0] = 0
            with T.While(state[0] == 0):
                state[0] = A[k]
                k += 1
            B[0], B[1] = state[0], k

    got = everywhere(kernel, A=np.array([0, 0, 0, 5, 0, 7, 0, 0], np.int32), B=np.zeros(2, np.int32))
    assert got["B"].tolist() == [5, 4]

    @T.prim_func
    def alone(A: T.Tensor((8,), "int32")):
        with T.Kernel(1):
            T.While(A[0] == 0)

    with refused(TileSyntaxError, "T.While(", write="while condition:"):
        alone.trace()


def test_with_if_then_else_is_if():
    @T.macro
    def put(B, i, value):
        with T.If(value > 10), T.Then():
            B[i] = value

    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32"), n: T.int32):
        with T.Kernel(4, threads=32) as bx, T.If(bx < n):
            with T.Then():
                for i in T.Parallel(16):
                    with T.If(A[bx * 16 + i] % 2 == 0):
                        with T.Then():
                            B[bx * 16 + i] = -A[bx * 16 + i]
                        with T.Else():
                            put(B, bx * 16 + i, A[bx * 16 + i])
            with T.Else(), T.If(bx == 3), T.Then():
                B[bx * 16] = 7

    a = np.arange(64, dtype=np.int32)
    got = everywhere(kernel, A=a, B=np.zeros(64, np.int32), n=2)["B"]
    expected = np.where(a % 2 == 0, -a, np.where(a > 10, a, 0)) * (a < 32)
    expected[48] = 7
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("with T.If(n > 0):\n    A[0] = 1", "T.If has no T.Then here"),
        ("with T.If(n > 0):\n    with T.Else():\n        A[0] = 1", "T.If has no T.Then here"),
        ("with T.If(n > 0):\n    with T.Then():\n        A[0] = 1\n    A[0] = 2", "T.If has no T.Else here"),
        ("with T.If(n > 0, n > 1), T.Then():\n    A[0] = 1", "T.If with more than a condition"),
        ("with T.If(n > 0), T.Then(1):\n    A[0] = 1", "T.Then of something"),
        ("with T.Then():\n    A[0] = 1", "T.Then() by itself"),
    ],
)
def test_if_has_its_sides_and_nothing_else(text: str, message: str):
    with refused(TileSyntaxError, message):
        built(text).trace()


def test_operators_by_the_names_of_expressions():
    @T.prim_func
    def kernel(
        A: T.Tensor((32,), "int32"),
        B: T.Tensor((32,), "int32"),
        X: T.Tensor((32,), "float32"),
        C: T.Tensor((10, 32), "int32"),
        Y: T.Tensor((5, 32), "float32"),
    ):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(32):
                C[0, i] = T.Add(A[i], T.Mul(B[i], 2))
                C[1, i] = T.Div(A[i], B[i])
                C[2, i] = T.Mod(A[i], B[i])
                C[3, i] = T.FloorDiv(A[i], B[i])
                C[4, i] = T.FloorMod(A[i], B[i])
                C[5, i] = T.Max(A[i], T.Min(B[i], 2))
                C[6, i] = T.if_then_else(T.And(T.LT(A[i], 3), T.GE(A[i], -3)), 1, 0)
                C[7, i] = T.if_then_else(T.Or(T.GT(A[i], 3), T.LE(A[i], -3)), 1, 0)
                C[8, i] = T.if_then_else(T.Not(T.EQ(A[i], 3)), 1, 0)
                C[9, i] = T.if_then_else(T.And(i >= 8, T.NE(A[i - 8], 0)), T.Sub(A[i], 1), 0)
                Y[0, i] = T.Div(X[i], 2)
                Y[1, i] = T.Mod(X[i], 1.5)
                Y[2, i] = T.FloorDiv(X[i], 1.5)
                Y[3, i] = T.FloorMod(X[i], 1.5)
                Y[4, i] = T.Max(X[i], T.Sub(0.5, X[i]))

    a = np.arange(-16, 16, dtype=np.int32)
    b = np.array([3, -2, 5, -7] * 8, np.int32)
    x = data((32,), "float32")
    got = everywhere(
        kernel, A=a, B=b, X=x, C=np.zeros((10, 32), np.int32), Y=empty((5, 32), "float32")
    )  # fmt: skip
    quotient = np.trunc(a / b).astype(np.int32)
    before = np.concatenate([np.zeros(8, np.int32), a[:-8]])
    ints = [
        a + 2 * b, quotient, a - quotient * b, a // b, a % b, np.maximum(a, np.minimum(b, 2)),
        (a < 3) & (a >= -3), (a > 3) | (a <= -3), a != 3, np.where(before != 0, a - 1, 0),
    ]  # fmt: skip
    np.testing.assert_array_equal(got["C"], np.array(ints, np.int32))
    floats = [x / 2, np.fmod(x, 1.5), x // 1.5, x % 1.5, np.maximum(x, 0.5 - x)]
    np.testing.assert_allclose(got["Y"], np.array(floats, np.float32), rtol=1e-6, atol=1e-7)
    assert T.And(True, False) is False and T.Not(0) is True and T.Div(-7, 2) == -3


def test_thread_return_leaves_out_the_rest():
    @T.macro
    def last(alone: bool, B, i):
        B[i] = 1
        if alone:
            T.thread_return()

    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32"), n: T.int32):
        with T.Kernel(2, threads=32) as bx:
            i = bx * 32 + T.get_thread_binding()
            if i >= n:
                T.thread_return()
            x = T.alloc_local((2,), "int32")
            for k in T.unroll(2):
                x[k] = A[(i + k) % 64]
            B[i] = x[0] + x[1]

    @T.prim_func
    def by_macro(B: T.Tensor((64,), "int32"), n: T.int32):
        with T.Kernel(4) as bx:
            if bx >= n:
                B[bx] = 5
                T.thread_return()
            last(True, B, bx)
            B[bx] = 2

    a = np.arange(64, dtype=np.int32)
    got = everywhere(kernel, A=a, B=np.zeros(64, np.int32), n=40)["B"]
    np.testing.assert_array_equal(got, np.where(a < 40, a + (a + 1) % 64, 0))
    assert everywhere(by_macro, B=np.zeros(64, np.int32), n=3)["B"][:5].tolist() == [1, 1, 1, 5, 0]
    with refused(TileSyntaxError, "T.thread_return outside T.Kernel", write="return"):
        built("T.thread_return()", launch=False).trace()
    with refused(TileSyntaxError, "T.thread_return in T.Parallel"):
        built("for i in T.Parallel(4):\n    if i > n:\n        T.thread_return()\n    A[i] = 1").trace()


def test_a_fence_of_registers_takes_a_tile_in_registers():
    with refused(TileTypeError, "T.warpgroup_fence_operand of A", expected="a tile in registers"):
        built("T.warpgroup_fence_operand(A)").trace()


def test_let_gives_a_cell_its_value():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=32):
            for k in T.serial(4):
                offset = T.int32()
                T.let(offset, k * 16)
                for i in T.Parallel(4):
                    B[k * 4 + i] = A[offset + i]

    a = data((64,), "float32")
    got = everywhere(kernel, A=a, B=empty((16,), "float32"))
    np.testing.assert_array_equal(got["B"], a.reshape(4, 16)[:, :4].ravel())

    @T.prim_func
    def no_cell(A: T.Tensor((4,), "int32")):
        with T.Kernel(1):
            T.let(A[0], 3)

    with refused(TileTypeError, "T.let of A[0]", expected="a cell"):
        no_cell.trace()


@pytest.mark.parametrize("kind", [T.Var, T.Ref, "T.Ref"])
def test_a_macro_that_takes_a_cell_is_given_one(kind):
    def set_to_seven(x, y):
        x = y * 7

    set_to_seven.__annotations__ = {"x": kind}
    macro = T.macro(set_to_seven)

    @T.prim_func
    def kernel(A: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=32):
            x = T.alloc_var("int32")
            macro(x, 3)
            A[0] = x

    assert everywhere(kernel, A=np.zeros(1, np.int32))["A"][0] == 21

    @T.prim_func
    def elements(A: T.Tensor((8,), "int32"), B: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=32):
            at, local = T.alloc_var("int32"), T.alloc_fragment((8,), "int32")
            for i in T.Parallel(8):
                local[i] = A[i]
                macro(local[i], A[i] + i)
            T.copy(local, B)
            at = 3
            macro(B[at], 5)

    got = everywhere(elements, A=np.arange(8, dtype=np.int32), B=np.zeros(8, np.int32))["B"]
    assert got.tolist() == [0, 14, 28, 35, 56, 70, 84, 98]

    @T.prim_func
    def wrong(A: T.Tensor((1,), "int32")):
        with T.Kernel(1):
            x = 1
            macro(x, 3)
            A[0] = x

    with refused(
        TileValueError, "x of set_to_seven is 1, and the macro takes a cell", write="T.alloc_var(dtype, 1)"
    ):
        wrong.trace()


def test_symbols_are_vars():
    assert isinstance(T.dynamic("m"), T.Var) and not isinstance(7, T.Var)
    made = T.Var("x", T.int64)
    assert (made.name, made.dtype) == ("x", "int64")


def test_what_a_launch_says_of_itself():
    @T.prim_func
    def kernel(A: T.Tensor((6, 64), "int32"), B: T.Tensor((5,), "int32")):
        with T.Kernel(2, 3, threads=(32, 2)):
            bx, by = T.get_block_bindings()
            x, y, z = T.get_thread_bindings()
            A[by * T.get_block_extent(0) + bx, y * T.get_thread_extent() + x] = (
                (bx * 10 + by) * 100 + x + y + z
            )
            for k in range(3):
                B[k] = T.get_thread_extents()[k]
            B[3], B[4] = T.get_block_extents()[0], T.get_block_extent(1)

    got = everywhere(kernel, A=np.zeros((6, 64), np.int32), B=np.zeros(5, np.int32))
    assert got["B"].tolist() == [32, 2, 1, 2, 3]
    want = [[(b % 2 * 10 + b // 2) * 100 + t % 32 + t // 32 for t in range(64)] for b in range(6)]
    np.testing.assert_array_equal(got["A"], want)


@pytest.mark.parametrize(
    ("word", "message"),
    [("get_block_extent(2)", "axis 2 of the grid"), ("get_thread_extent(3)", "axis 3 of the block")],
)
def test_axes_that_there_are_not(word: str, message: str):
    name, dim = word[:-1].split("(")

    @T.prim_func
    def kernel(A: T.Tensor((4,), "int32")):
        with T.Kernel(1, 2):
            A[0] = getattr(T, name)(int(dim))

    with refused(TileValueError, message):
        kernel.trace()


def test_annotations_for_tilelangs_compiler(capfd: pytest.CaptureFixture[str]):
    def made(asked: bool):
        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32")):
            T.annotate_pass_configs({tilescale.PassConfigKey.TL_ENABLE_FAST_MATH: asked})
            T.annotate_compile_flags(["-O3", "--use_fast_math"])
            with T.Kernel(1):
                T.annotate_restrict_buffers(A)
                for i in T.Parallel(4):
                    A[i] = T.exp(A[i])

        return kernel.trace().func.script()

    assert "__exp" in made(True) and "__exp" not in made(False)


@pytest.mark.parametrize(
    ("word", "given"),
    [("annotate_pass_configs", 3), ("annotate_compile_flags", 3), ("annotate_restrict_buffers", 3)],
)
def test_annotations_of_something_else_are_refused(word: str, given: int):
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            getattr(T, word)(given)
            A[0] = 1

    with refused(TileTypeError, f"T.{word}"):
        kernel.trace()
