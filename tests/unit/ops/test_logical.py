"""T.any_of and T.all_of of tiles, and operands that only run where they are asked for: simulator, CPU and
emulated GPU alike."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import refused, run
from tests.unit.cuda.emulated import agree
from tilescale.errors import TileSyntaxError, TileTypeError

DTYPES = {"bool": bool, "float16": np.float16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "int32": np.int32}


def on_all_targets(kernel: Any, args: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays behind a launch, the same on the simulator, the emulated GPU and the CPU."""
    there = agree(kernel, args, exact=True)
    here = {name: array.copy() for name, array in args.items()}
    run(kernel)(*here.values())
    for name, array in there.items():
        assert np.array_equal(array, here[name]), name
    return here


@pytest.mark.parametrize("word", ["any_of", "all_of"])
@pytest.mark.parametrize(
    "memory, dtype, shape",
    [("tensor", "bool", (2, 4)), ("tensor", "float16", (3, 40)), ("shared", "float8_e4m3fn", (2, 4)), ("shared", "bool", (3, 40)),
     ("fragment", "bool", (2, 4)), ("fragment", "float16", (3, 40)), ("local", "int32", (2, 4)), ("local", "bool", (3, 40))],
)  # fmt: skip
def test_of_a_tile(memory: str, dtype: str, shape: tuple[int, int], word: str):
    of = getattr(T, word)

    @T.prim_func
    def kernel(M: T.Tensor((6, *shape), dtype), O: T.Tensor((6, 4), "int32")):
        with T.Kernel(6, threads=64) as b:
            if memory == "tensor":
                whole, part = M[b], M[b, 1, 1:3]
            else:
                alloc = {"shared": T.alloc_shared, "fragment": T.alloc_fragment, "local": T.alloc_local}[
                    memory
                ]
                tile = alloc(shape, dtype)
                if memory == "local":
                    for i, j in T.grid(*shape):
                        tile[i, j] = M[b, i, j]
                else:
                    T.copy(M[b, :, :], tile)
                whole, part = tile, tile[1, 1:3]
            if of(whole):
                O[b, 0] = 1
            if not of(part):
                O[b, 1] = 1
            O[b, 2] = of(part, b > 2)
            O[b, 3] = 7 if b < 4 and of(part) else -7

    m = np.zeros((6, *shape), np.float32)
    m[1] = m[4] = m[5] = 1
    m[2, 1, 1], m[4, 1, 2], m[5, 0, 0] = 1, 0, 0
    m[3] = np.random.default_rng(0).integers(0, 2, shape)
    got = on_all_targets(kernel, {"M": m.astype(DTYPES[dtype]), "O": np.zeros((6, 4), np.int32)})["O"]
    fold = np.any if word == "any_of" else np.all
    for b in range(6):
        part = fold(m[b, 1, 1:3])
        assert got[b].tolist() == [fold(m[b]), not part, fold([part, b > 2]), 7 if b < 4 and part else -7]


def test_of_a_part_whose_extent_is_an_argument():
    @T.prim_func
    def kernel(M: T.Tensor((100,), "int32"), O: T.Tensor((2,), "int32"), n: T.int32):
        with T.Kernel(1, threads=32):
            O[0] = T.any_of(M[0:n])
            O[1] = T.all_of(M[0:n])

    m = np.ones(100, np.int32)
    m[50] = 0
    for n, want in ((50, [1, 1]), (51, [1, 0])):
        o = np.zeros(2, np.int32)
        run(kernel)(m, o, n)
        assert o.tolist() == want


def test_a_pipelined_product_of_the_blocks_that_a_mask_keeps():
    """As in TileLang's block-sparse products: the mask decides what is copied and multiplied."""
    M = N = K = 64

    @T.prim_func
    def kernel(
        A: T.Tensor((M, K), "float16"),
        B: T.Tensor((K, N), "float16"),
        mask: T.Tensor((2, 4, 2), "bool"),
        C: T.Tensor((M, N), "float32"),
    ):
        with T.Kernel(2, threads=128) as by:
            a, b = T.alloc_shared((32, 16), "float16"), T.alloc_shared((16, N), "float16")
            c = T.alloc_fragment((32, N), "float32")
            T.clear(c)
            for k in T.Pipelined(4, num_stages=2):
                if T.any_of(mask[by, k, :]):
                    T.copy(A[by * 32, k * 16], a)
                    T.copy(B[k * 16, 0], b)
                    T.gemm(a, b, c)
            T.copy(c, C[by * 32, 0])

    rng = np.random.default_rng(1)
    a, b = (rng.integers(-3, 4, (64, 64)).astype(np.float16) for _ in range(2))
    mask = np.zeros((2, 4, 2), bool)
    mask[0, 1, 1] = mask[1, 0, 0] = mask[1, 3] = True
    got = on_all_targets(kernel, {"A": a, "B": b, "mask": mask, "C": np.zeros((M, N), np.float32)})["C"]
    kept = np.repeat(np.repeat(mask.any(-1), 32, 0), 16, 1)
    assert np.array_equal(got, (a * kept).astype(np.float32) @ b.astype(np.float32))


def test_what_has_no_elements_to_ask_for():
    def refuse(kind: Any, message: str, statement: Any, **more: str):
        @T.prim_func
        def kernel(S: T.Signal((4,)), A: T.Tensor((8,), "int32"), n: T.int32):
            with T.Kernel(1, threads=32):
                f = T.alloc_fragment((8, 8), "int32")
                T.clear(f)
                for i in T.Parallel(8):
                    statement(S, A, f, n, i)

        with refused(kind, message, **more):
            kernel.trace()

    refuse(
        TileTypeError,
        "T.any_of of S, which is a signal",
        lambda S, A, f, n, i: T.any_of(S),
        write="T.wait(S[i]",
    )
    refuse(
        TileSyntaxError,
        "T.all_of of a fragment in T.Parallel",
        lambda S, A, f, n, i: T.all_of(f[i, :]),
        at="T.all_of(f[i, :])",
        write="in front of the loop",
    )
    refuse(
        TileTypeError,
        "A is a tile, and a scalar is needed as a condition",
        lambda S, A, f, n, i: bool(A),
        write="T.any_of(A)",
    )


def test_a_region_taken_for_a_scalar_is_told_as_it_was_written():
    def refuse(statement: Any, what: str, write: str):
        @T.prim_func
        def kernel(A: T.Tensor((8,), "int32"), n: T.int32):
            with T.Kernel(1, threads=32):
                s, fr = T.alloc_shared((8, 8), "int32"), T.alloc_fragment((8,), "int32")
                T.clear(s)
                T.clear(fr)
                statement(A, s, fr, n)

        with refused(TileTypeError, f"{what} is a tile, and a scalar is needed", write=write):
            kernel.trace()

    refuse(lambda A, s, fr, n: bool(s[0, :]), "s[0, :]", "T.any_of(s[0, :]) or T.all_of(s[0, :])")
    refuse(lambda A, s, fr, n: bool(s[n, 2:4]), "s[n, 2:4]", "T.any_of(s[n, 2:4])")
    refuse(lambda A, s, fr, n: bool(s[n : n + 2, :3]), "s[n:n + 2, :3]", "T.all_of(s[n:n + 2, :3])")
    refuse(lambda A, s, fr, n: bool(A[n:]), "A[n:]", "T.any_of(A[n:])")
    refuse(lambda A, s, fr, n: fr + 1, "fr", "index it: fr[i]")
    refuse(lambda A, s, fr, n: s * 2, "s", "index it: s[i, j]")
    refuse(lambda A, s, fr, n: s[:, n] > 2, "s[:, n]", "index it: s[i, n]")


def test_an_operand_acts_only_where_it_is_asked_for():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "int32"), O: T.Tensor((6, 5), "int32")):
        with T.Kernel(6, threads=64) as b:
            tile = T.alloc_shared((3, 40), "int32")
            T.fill(tile, 1)
            if b < 3 and T.any_of(tile[b, :]):  # behind the guard: outside the tile else
                O[b, 0] = 1
            if b >= 3 or T.all_of(tile[b, :]):
                O[b, 1] = 1
            O[b, 2] = T.atomic_add(A[0], 1, return_prev=True) if b == 2 else -1
            O[b, 3] = b == 4 and T.atomic_add(A[1], 1, return_prev=True) == 0
            O[b, 4] = b != 5 or T.atomic_add(A[2], 1, return_prev=True) > 0

    got = on_all_targets(kernel, {"A": np.zeros(4, np.int32), "O": np.zeros((6, 5), np.int32)})
    assert got["A"].tolist() == [1, 1, 1, 0]
    assert got["O"].tolist() == [[b < 3, 1, 0 if b == 2 else -1, b == 4, b != 5] for b in range(6)]
