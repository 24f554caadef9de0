"""Words of TileLang's that say again what the language has, on the CPU, the simulator and emulated threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tests.kernels import refused, run
from tests.unit.cuda.emulated import agree, data, empty
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError


def everywhere(kernel, exact: bool = True, **args: np.ndarray) -> dict[str, np.ndarray]:
    """What the CPU gives, once the emulator and the simulator gave the same."""
    got = agree(kernel, {k: v.copy() for k, v in args.items()}, exact=exact)
    made = {k: torch.from_numpy(v.copy()) for k, v in args.items()}
    run(kernel)(*made.values())
    for name, value in made.items():
        np.testing.assert_array_equal(value.numpy(), got[name])
    return got


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
