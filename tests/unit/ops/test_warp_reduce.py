"""A value of all lanes of a warp; words that TileLang has for what this language says otherwise, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import refused
from tests.unit.cuda.corpus import compiled
from tests.unit.cuda.emulated import agree, data, empty
from tests.unit.ops.test_vote import on_all
from tilescale.compiler.cuda import toolchain
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError

WORDS = {
    "sum": np.add, "max": np.maximum, "min": np.minimum, "bitand": np.bitwise_and, "bitor": np.bitwise_or,
}  # fmt: skip


def reduced(op: str, dtype: str) -> Any:
    word = getattr(T, f"warp_reduce_{op}")

    @T.prim_func
    def kernel(A: T.Tensor((64,), dtype), C: T.Tensor((64,), dtype)):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding(0)
            mine = T.alloc_local([1], dtype)
            mine[0] = A[tx]
            C[tx] = word(mine[0])

    return kernel


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "int16"])
@pytest.mark.parametrize("op", WORDS)
def test_integers(op: str, dtype: str):
    draw = np.random.default_rng(1)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    a = draw.integers(low, high, 64, dtype=dtype, endpoint=True)
    got = on_all(reduced(op, dtype), {"A": a, "C": empty((64,), dtype)})
    want = WORDS[op].reduce(a.reshape(2, 32), 1, dtype=dtype)  # sums go round
    assert (got.reshape(2, 32) == want[:, None]).all()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_floats(op: str, dtype: str):
    a = data((64,), dtype, 1)
    got = agree(reduced(op, dtype), {"A": a, "C": empty((64,), dtype)}, exact=True)["C"].reshape(2, 32)
    want = WORDS[op].reduce(a.astype(np.float64).reshape(2, 32), 1)
    assert (got == got[:, :1]).all()
    error = np.abs(got[:, 0].astype(np.float64) - want).max()
    assert error <= {"float16": 0.02, "bfloat16": 0.2}.get(dtype, 1e-5) * (op == "sum")


def test_conditions_and_constants():
    @T.prim_func
    def kernel(C: T.Tensor((4, 32), "int32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            C[0, t] = T.cast(T.warp_reduce_bitor(t == 3), "int32")
            C[1, t] = T.cast(T.warp_reduce_bitand(t < 31), "int32")
            C[2, t] = T.warp_reduce_sum(2)
            C[3, t] = T.warp_reduce_max(t // 2)

    got = on_all(kernel, {"C": empty((4, 32), "int32")})
    assert (got == np.array([[1], [0], [64], [15]])).all()


def test_leading_zeros():
    @T.prim_func
    def kernel(A: T.Tensor((6,), "uint64"), C: T.Tensor((4, 6), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.serial(6):
                C[0, i] = T.clz(A[i])
                C[1, i] = T.clz(T.cast(A[i], "uint32"))
                C[2, i] = T.clz(T.cast(A[i], "int64"))
                C[3, i] = T.clz(i - 1) + T.clz(5)

    a = np.array([0, 1, 2**31 - 1, 2**31, 2**63, 2**64 - 1], np.uint64)
    got = on_all(kernel, {"A": a, "C": empty((4, 6), "int32")})
    wide = [64 - int(x).bit_length() for x in a]
    narrow = [32 - (int(x) & 0xFFFFFFFF).bit_length() for x in a]
    assert got[0].tolist() == got[2].tolist() == wide and got[1].tolist() == narrow
    assert got[3].tolist() == [29 + n for n in (0, 32, 31, 30, 30, 29)]


@pytest.mark.parametrize("size, warps", [(None, None), (64, 2), (16, 3), (20, 1)])
def test_where_a_thread_is(size: int | None, warps: int | None):
    @T.prim_func
    def kernel(C: T.Tensor((4, 320), "int32")):
        with T.Kernel(1, threads=320):
            t = T.get_thread_binding()
            C[0, t] = T.get_lane_idx(size)
            C[1, t] = T.get_warp_idx(size)
            C[2, t] = T.get_warp_idx_sync(size)
            C[3, t] = T.get_warp_group_idx(size, warps)

    got, t, lanes = on_all(kernel, {"C": empty((4, 320), "int32")}), np.arange(320), size or 32
    want = [t % lanes, t // lanes, t // lanes, t // (lanes * (warps or 4))]
    assert (got == np.array(want)).all()


def test_shuffles_by_the_names_of_tvm():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32"), C: T.Tensor((2, 64), "int32")):
        with T.Kernel(1, threads=64):
            t = T.get_thread_binding()
            C[0, t] = T.tvm_warp_shuffle_up(0xFFFFFFFF, A[t], 1, 32, 32)
            C[1, t] = T.tvm_warp_shuffle_down(0xFFFFFFFF, A[t], 3, 8, 32)

    a = data((64,), "int32", 1)
    got, t = on_all(kernel, {"A": a, "C": empty((2, 64), "int32")}), np.arange(64)
    assert (got[0] == a[np.where(t % 32, t - 1, t)]).all()
    assert (got[1] == a[np.where(t % 8 < 5, np.minimum(t + 3, 63), t)]).all()


def test_break_as_a_word():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "int32"), C: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            s = T.alloc_var("int32")
            for i in T.serial(8):
                if A[i] > 3:
                    T.loop_break()
                s = s + A[i] + t
            C[t] = s

    a = np.array([1, 2, 3, 4, 1, 1, 1, 1], np.int32)
    assert (on_all(kernel, {"A": a, "C": empty((32,), "int32")}) == 6 + 3 * np.arange(32)).all()


def test_what_they_refuse():
    def refuse(kind: Any, message: str, statement: Any, threads: int = 128, **more: Any) -> None:
        @T.prim_func
        def kernel(A: T.Tensor((64,), "float32")):
            with T.Kernel(1, threads=threads):
                with T.Scale("thread") as (i, k):
                    statement(A)

        with refused(kind, message, **more):
            kernel.trace()

    refuse(TileTypeError, "T.warp_reduce_bitor of float32", lambda A: T.warp_reduce_bitor(A[0]))
    refuse(TileTypeError, "of conditions", lambda A: T.warp_reduce_sum(A[0] > 0), write="T.any_sync")
    refuse(TileTypeError, "a tile", lambda A: T.warp_reduce_max(A))
    refuse(TileValueError, "by 24 threads", lambda A: T.warp_reduce_sum(A[0]), 24, expected="whole warps")
    refuse(TileTypeError, "T.clz of float32", lambda A: T.clz(A[0]), expected="32 or 64 bits")
    refuse(TileValueError, "T.get_warp_idx with warp_size=0", lambda A: T.get_warp_idx(0))
    refuse(
        TileValueError,
        "T.get_warp_group_idx with warps_per_group=True",
        lambda A: T.get_warp_group_idx(None, True),
    )
    refuse(
        TileSyntaxError, "T.loop_break leaves a loop of Python's", lambda A: T.loop_break(), write="T.serial"
    )
    refuse(
        TileValueError,
        "T.tvm_warp_shuffle_up in groups of 16 of a warp of 8",
        lambda A: T.tvm_warp_shuffle_up(0xFFFFFFFF, A[0], 1, 16, 8),
    )


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
def test_nvcc_takes_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", "nvcc")

    @T.prim_func
    def zeros(A: T.Tensor((4,), "uint64"), C: T.Tensor((2, 4), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.serial(4):
                C[0, i] = T.clz(A[i])
                C[1, i] = T.clz(T.cast(A[i], "int32"))

    for kernel in (reduced("sum", "int16"), reduced("min", "bfloat16"), reduced("bitand", "int64"), zeros):
        compiled(kernel, "sm_80")
