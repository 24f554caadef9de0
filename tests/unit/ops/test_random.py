"""T.rng_init and T.rng_rand: Philox's numbers, the same on every target and under every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.language.test_every_word import traced
from tests.unit.ops.test_argmax import TARGETS, run


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Four words of Philox4x32-10, in Python's integers."""
    mask = (1 << 32) - 1
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [b >> 32 ^ counter[1] ^ key[0], b & mask, a >> 32 ^ counter[3] ^ key[1], a & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return counter


def number(place: int, seed: int, sequence: int = 0) -> int:
    """The number at a place of a sequence."""
    n, mask = place >> 2, (1 << 32) - 1
    made = philox([n & mask, n >> 32, sequence & mask, sequence >> 32], [seed & mask, seed >> 32])
    return made[place & 3]


def test_the_reference_is_philox():
    """Known answers of the paper's own implementation (Random123, kat_vectors)."""
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([(1 << 32) - 1] * 4, [(1 << 32) - 1] * 2) == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]


def drawing(seed: int, threads: int, first: int) -> Any:
    @T.prim_func
    def kernel(A: T.Tensor((3, 5, 7), "uint32"), B: T.Tensor((3, 6), "uint32")):
        with T.Kernel(3, threads=threads) as bx:
            T.rng_init(seed, 11, first + bx * 100)
            for i, j in T.Parallel(5, 7):
                if j < 6:
                    A[bx, i, j] = T.rng_rand()
            for i in T.serial(4):
                B[bx, i] = T.rng_rand()
            for i in T.Parallel(2):
                x = T.rng_rand()
                B[bx, 4 + i] = x ^ T.rng_rand()

    return kernel


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("seed, threads, first", [(42, 1, 0), (1 << 40 | 7, 64, 3), (0, 32, (1 << 34) - 60)])
def test_numbers_by_their_places(seed: int, threads: int, first: int, target: str):
    args = {"A": np.zeros((3, 5, 7), np.uint32), "B": np.zeros((3, 6), np.uint32)}
    out = run(drawing(seed, threads, first), args, target)
    for b in range(3):
        at = first + b * 100
        want = np.array([number(at + k, seed, 11) for k in range(35)], np.uint32).reshape(5, 7)
        want[:, 6] = 0
        assert (out["A"][b] == want).all()
        rest = [number(at + 35 + k, seed, 11) for k in range(8)]
        assert out["B"][b].tolist() == [*rest[:4], rest[4] ^ rest[6], rest[5] ^ rest[7]]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("bit", [32, 64])
def test_floats_are_made_of_the_numbers(bit: int, target: str):
    dt, first = f"float{bit}", 5

    @T.prim_func
    def kernel(A: T.Tensor((64,), dt), B: T.Tensor((64,), dt), C: T.Tensor((3,), dt)):
        with T.Kernel(1, threads=64):
            T.rng_init(9, 2, first)
            for i in T.Parallel(64):
                A[i] = T.rng_rand_float(bit)
            for i in T.Parallel(64):
                B[i] = T.rng_rand_float(bit=bit, dist="normal")
            for i in T.serial(3):
                C[i] = T.rng_rand_float(bit, "normal")

    def unit(place: int) -> np.float64:
        word = np.dtype(dt).type(number(place, 9, 2))
        return np.float64(np.dtype(dt).type(word * 2.0**-32 + 2.0**-33))

    def normal(place: int) -> np.float64:
        pair = place // 2 * 2
        radius = np.sqrt(-2.0 * np.log(unit(pair)))
        return radius * (np.cos if place % 2 else np.sin)(2 * np.pi * unit(pair + 1))

    zeros = {"A": np.zeros(64, dt), "B": np.zeros(64, dt), "C": np.zeros(3, dt)}
    out = run(kernel, zeros, target)
    assert out["A"].tolist() == [unit(first + k) for k in range(64)]
    tolerance = 1e-5 if bit == 32 else 1e-13
    want = [normal(first + 64 + k) for k in range(67)]
    np.testing.assert_allclose(np.concatenate([out["B"], out["C"]]), want, rtol=tolerance, atol=tolerance)


def test_floats_of_a_sequence_are_distributed_as_they_should_be():
    @T.prim_func
    def kernel(A: T.Tensor((8, 4096), "float32"), B: T.Tensor((8, 4096), "float32")):
        with T.Kernel(8, threads=128) as bx:
            T.rng_init(1, bx)
            for i in T.Parallel(4096):
                A[bx, i] = T.rng_rand_float()
            for i in T.Parallel(4096):
                B[bx, i] = T.rng_rand_float(dist="normal")

    zeros = {"A": np.zeros((8, 4096), np.float32), "B": np.zeros((8, 4096), np.float32)}
    out = run(kernel, zeros, "cpu")
    uniform, normal = out["A"].astype(np.float64), out["B"].astype(np.float64)
    assert 0 < uniform.min() and uniform.max() <= 1
    assert abs(uniform.mean() - 0.5) < 0.01 and abs(uniform.var() - 1 / 12) < 0.002
    assert abs(normal.mean()) < 0.03 and abs(normal.var() - 1) < 0.04 and abs((normal**4).mean() - 3) < 0.3


@pytest.mark.parametrize("words, message", [("bit=16", "bit=16"), ("dist='poisson'", "dist='poisson'")])
def test_floats_that_there_are_not(words: str, message: str):
    said = traced(f"T.rng_init(n)\nA[0, 0] = T.rng_rand_float({words})")
    assert isinstance(said, str) and message in said


@T.prim_func
def own(seeds: T.Tensor((2,), "int64"), A: T.Tensor((2, 64, 3), "uint32")):
    with T.Kernel(2, threads=64) as bx:
        tid = T.get_thread_binding()
        T.rng_init(seeds[bx])
        for k in T.serial(3):
            A[bx, tid, k] = T.rng_rand()


@pytest.mark.parametrize("target", TARGETS)
def test_a_sequence_of_each_thread_with_a_key_from_memory(target: str):
    seeds = np.array([5, (1 << 35) + 9], np.int64)
    out = run(own, {"seeds": seeds, "A": np.zeros((2, 64, 3), np.uint32)}, target)
    want = [
        [[number(k, int(s), b * 64 + t) for k in range(3)] for t in range(64)] for b, s in enumerate(seeds)
    ]
    assert (out["A"] == np.array(want, np.uint32)).all()


@pytest.mark.parametrize(
    "text, message",
    [
        ("y = T.rng_rand()", "T.rng_rand without T.rng_init"),
        ("T.rng_init(1.5)", "seed of T.rng_init is 1.5"),
        ('T.rng_init(1, generator="mt19937")', "T.rng_init with generator='mt19937'"),
        ("for p in T.Parallel(4):\n    T.rng_init(1)", "T.rng_init outside of T.Kernel, or in T.Parallel"),
        (
            "T.rng_init(1)\nfor p in T.Parallel(4):\n    for q in T.serial(2):\n        I[p, q] = T.rng_rand()",
            "T.rng_rand in a loop in T.Parallel",
        ),
    ],
)
def test_refusals(text: str, message: str):
    assert traced(text) == message
