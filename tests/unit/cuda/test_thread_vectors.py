"""What a thread does by its own index at the scale of the block: in vectors where neighbours lie side by side,
and from tiles that a ring brings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale
import tilescale.language as T
from tests.unit.cuda.emulated import agree, lowered
from tilescale.env import WITHOUT

THREADS, ROUNDS = 128, 3


def decoded(stages: int, step: int = 1) -> Any:
    """C = A · Bᵀ, where B comes as bytes of two numbers each, which threads take apart into a tile of their
    own, eight numbers each time. ``step``: bytes between those that are neighbours in a thread's loop."""

    @T.prim_func
    def gemm(
        A: T.Tensor((64, 64 * ROUNDS), "float16"),
        B: T.Tensor((64, 32 * ROUNDS), "uint8"),
        C: T.Tensor((64, 64), "float32"),
    ):
        with T.Kernel(1, threads=THREADS):
            a, packed = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 32), "uint8")
            b, acc = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            tx = T.get_thread_binding()
            x, y = T.alloc_local((4,), "uint8"), T.alloc_local((8,), "float16")
            T.clear(acc)
            for k in T.Pipelined(ROUNDS, num_stages=stages):
                T.copy(A[0, k * 64], a)
                T.copy(B[0, k * 32], packed)
                for i in T.serial(64 * 64 // 8 // THREADS):
                    for v in T.vectorized(4):
                        index = (i * THREADS + tx) * 4 + v * step % 4
                        x[v] = packed[index // 32, index % 32]
                    for v in T.vectorized(8):
                        y[v] = T.cast((x[v // 2] >> (v % 2 * 4)) & 15, "float16")
                    for v in T.vectorized(8):
                        index = (i * THREADS + tx) * 8 + v
                        b[index // 64, index % 64] = y[v]
                T.gemm(a, b, acc, transpose_B=True)
            T.copy(acc, C)

    return gemm


def drawn() -> dict[str, Any]:
    g = np.random.default_rng(5)
    return {
        "A": g.integers(-4, 5, (64, 64 * ROUNDS)).astype("float16"),
        "B": g.integers(0, 256, (64, 32 * ROUNDS)).astype("uint8"),
        "C": np.full((64, 64), np.nan, "float32"),
    }


def product(args: dict[str, Any]) -> Any:
    b = np.stack([args["B"] & 15, args["B"] >> 4], -1).reshape(64, -1)
    return args["A"].astype("float64") @ b.T.astype("float64")


def source(stages: int, step: int = 1) -> str:
    text: str = tilescale.compile(decoded(stages, step), target="cuda:sm_90a").get_kernel_source()
    return text[text.index("__global__") :]


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_threads_read_what_a_ring_brings(stages: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(WITHOUT.name, "spare_stages")
    kernel, args = decoded(stages), drawn()
    made = lowered(kernel, "sm_90a")
    assert [r.depth for r in made.program.schedule.rings] == [stages, stages]
    assert len(made.program.schedule.roles) == 2 and not made.program.notes
    for seed in range(3):
        got = agree(kernel, args, exact=True, seed=seed)
        assert (got["C"] == product(args)).all()  # small whole numbers


def test_neighbours_go_as_vectors():
    """Four bytes in, sixteen out, though what they lie at is j // 64, j % 64 of an index with a name."""
    text = source(2)
    assert "*(const uint32_t*)&packed[" in text and "*(uint4*)&b[" in text


def test_what_is_no_neighbour_goes_alone():
    """Three bytes on, around four: the same place for v = 0, another order behind it."""
    text = source(2, 3)
    assert "*(const uint32_t*)&packed[" not in text and "*(uint4*)&b[" in text
    args = drawn()
    agree(decoded(2, 3), args, exact=True)


def rows(width: int, offset: int) -> Any:
    @T.prim_func
    def kernel(X: T.Tensor((64 * 8 + 8,), "float32"), Y: T.Tensor((64, 8), "float32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            for v in T.vectorized(8):
                at = tx * 8 + v
                Y[at // width, at % width] = X[at + offset]

    return kernel


@pytest.mark.parametrize("width, offset, loads, stores", [(8, 0, True, True), (8, 1, False, True)])
def test_of_tensors(width: int, offset: int, loads: bool, stores: bool):
    made = tilescale.compile(rows(width, offset), target="cuda:sm_90a").get_kernel_source()
    assert ("*(const uint4*)&X[" in made) == loads and ("*(uint4*)&Y[" in made) == stores
    x = np.arange(64 * 8 + 8, dtype="float32")
    got = agree(rows(width, offset), {"X": x, "Y": np.full((64, 8), np.nan, "float32")}, exact=True)
    assert (got["Y"].ravel() == x[offset : offset + 512]).all()


def test_an_index_that_is_read_is_read_where_it_stands():
    """A name of what lies in memory: it may be another value by then."""

    @T.prim_func
    def kernel(P: T.Tensor((64,), "int32"), X: T.Tensor((1024,), "float32"), Y: T.Tensor((64, 4), "float32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            for v in T.vectorized(4):
                at = P[tx] * 4 + v
                Y[tx, v] = X[at]

    g = np.random.default_rng(0)
    args = {
        "P": g.integers(0, 256, 64).astype("int32"),
        "X": g.standard_normal(1024).astype("float32"),
        "Y": np.full((64, 4), np.nan, "float32"),
    }
    got = agree(kernel, args, exact=True)
    assert (got["Y"] == args["X"].reshape(256, 4)[args["P"]]).all()
