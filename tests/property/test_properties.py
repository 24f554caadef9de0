"""Shapes, dtypes, tilings and rank counts drawn by hypothesis; copy, gemm, reduce and the collectives against
NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilescale.language as T
from tests.kernels import run
from tests.ranks.harness import run_ranks
from tilescale import comm

FLOATS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64")
INTS = ("int8", "uint8", "int16", "int32", "int64")
extents = st.integers(1, 40)
tiles = st.sampled_from([1, 2, 3, 4, 8, 16, 32])


def draw(shape: tuple[int, ...], name: str, seed: int) -> torch.Tensor:
    low = 0 if name in ("uint8", "bool") else -3
    return torch.randint(
        low, 2 if name == "bool" else 4, shape, generator=torch.Generator().manual_seed(seed)
    ).to(getattr(torch, name))


def numbers(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy()


def both(strategy: Any, few: int = 12) -> Any:
    """The test twice: a few examples always, many under the marker slow."""

    def wrap(check: Any) -> Any:
        @pytest.mark.parametrize("amount", ["few", pytest.param("many", marks=pytest.mark.slow)])
        def test(amount: str) -> None:
            size = few if amount == "few" else 15 * few
            settings(settings.get_profile("few"), max_examples=size)(given(strategy)(check))()

        test.__doc__ = check.__doc__
        return test

    return wrap


@st.composite
def copies(pick: Any) -> dict[str, Any]:
    rank = pick(st.integers(1, 3))
    shape = tuple(pick(extents) for _ in range(rank))
    return {
        "shape": shape,
        "tile": tuple(pick(tiles) for _ in range(rank)),
        "start": tuple(pick(st.integers(-9, e + 4)) for e in shape),
        "to": tuple(pick(st.integers(-9, e + 4)) for e in shape),
        "frm": pick(st.sampled_from([*INTS, *FLOATS, "bool"])),
        "dst": pick(st.sampled_from([*INTS, *FLOATS, "bool"])),
        "scope": pick(st.sampled_from(["shared", "fragment", "global"])),
        "dynamic": pick(st.booleans()),
        "seed": pick(st.integers(0, 99)),
    }


@both(copies(), few=24)
def test_copy(case: dict[str, Any]) -> None:
    """A tile from anywhere to anywhere, over every edge, converted, by way of a tile or straight."""
    rank, frm, dst = len(case["shape"]), case["frm"], case["dst"]
    extent = tuple(T.dynamic(f"n{k}") for k in range(rank)) if case["dynamic"] else case["shape"]
    tile, start, to = case["tile"], case["start"], case["to"]

    @T.prim_func
    def kernel(A: T.Tensor(extent, frm), C: T.Tensor(extent, dst)):
        with T.Kernel(1):
            if case["scope"] == "global":
                T.copy(
                    A[tuple(slice(s, s + e) for s, e in zip(start, tile))],
                    C[tuple(slice(s, s + e) for s, e in zip(to, tile))],
                )
            else:
                t = (T.alloc_shared if case["scope"] == "shared" else T.alloc_fragment)(tile, dst)
                T.copy(A[start], t)
                T.copy(t, C[to])

    a, c = draw(case["shape"], frm, case["seed"]), draw(case["shape"], dst, case["seed"] + 1)
    want, source = numbers(c).copy(), numbers(a)
    for index in np.ndindex(*tile):
        at = tuple(s + i for s, i in zip(to, index))
        of = tuple(s + i for s, i in zip(start, index))
        if all(0 <= i < n for i, n in zip(at, want.shape)):
            value = source[of] if all(0 <= i < n for i, n in zip(of, want.shape)) else 0
            want[at] = (
                float(value != 0) if dst == "bool" else value % 256 if dst == "uint8" and value < 0 else value
            )
    if dst == "uint8" and frm not in INTS:
        a = a.abs() if frm != "bool" else a  # a negative float has no uint8
        want = np.abs(want - 256 * (want > 200)) if (want > 200).any() else want
    run(kernel)(a, c)
    assert np.array_equal(numbers(c), want), case


@st.composite
def gemms(pick: Any) -> dict[str, Any]:
    operand = pick(
        st.sampled_from(
            ["float8_e4m3fn", "float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32"]
        )
    )
    result = {"float64": "float64", "int8": "int32", "uint8": "int32", "int32": "int32"}.get(
        operand, "float32"
    )
    return {
        "m": pick(extents),
        "n": pick(extents),
        "k": pick(extents),
        "operand": operand,
        "result": result,
        "bm": pick(st.sampled_from([1, 3, 8, 16, 33])),
        "bn": pick(st.sampled_from([1, 5, 8, 16, 40])),
        "bk": pick(st.sampled_from([1, 4, 7, 16])),
        "ta": pick(st.booleans()),
        "tb": pick(st.booleans()),
        "stages": pick(st.integers(0, 4)),
        "depth": pick(st.sampled_from([1, 2, 3])),
        "seed": pick(st.integers(0, 99)),
    }


@both(gemms(), few=16)
def test_gemm(case: dict[str, Any]) -> None:
    """Any extents, any tiling, both transposes, any number of stages: exact, since the values are small
    integers."""
    m, n, k, bm, bn, bk, ta, tb = (case[x] for x in ("m", "n", "k", "bm", "bn", "bk", "ta", "tb"))
    operand, result = case["operand"], case["result"]

    @T.prim_func
    def kernel(
        A: T.Tensor((k, m) if ta else (m, k), operand),
        B: T.Tensor((n, k) if tb else (k, n), operand),
        C: T.Tensor((m, n), result),
    ):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm)) as (x, y):
            a = T.alloc_shared((bk, bm) if ta else (bm, bk), operand)
            b = T.alloc_shared((bn, bk) if tb else (bk, bn), operand)
            c = T.alloc_fragment((bm, bn), result)
            T.clear(c)
            for i in T.Pipelined(T.ceildiv(k, bk), num_stages=case["stages"]):
                T.copy(A[i * bk, y * bm] if ta else A[y * bm, i * bk], a)
                T.copy(B[x * bn, i * bk] if tb else B[i * bk, x * bn], b)
                T.gemm(a, b, c, transpose_A=ta, transpose_B=tb)
            T.copy(c, C[y * bm, x * bn])

    a, b = (
        draw((k, m) if ta else (m, k), operand, case["seed"]),
        draw((n, k) if tb else (k, n), operand, case["seed"] + 1),
    )
    c = torch.zeros(m, n, dtype=getattr(torch, result))
    run(kernel, depth=case["depth"])(a, b, c)
    x, y = numbers(a), numbers(b)
    assert np.array_equal(numbers(c), (x.T if ta else x) @ (y.T if tb else y)), case


@st.composite
def reductions(pick: Any) -> dict[str, Any]:
    rank = pick(st.integers(1, 3))
    return {
        "shape": tuple(pick(st.integers(1, 24)) for _ in range(rank)),
        "axis": pick(st.integers(0, rank - 1)),
        "op": pick(st.sampled_from(["sum", "max", "min", "abssum", "absmax"])),
        "dtype": pick(
            st.sampled_from(["int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"])
        ),
        "clear": pick(st.booleans()),
        "keep": pick(st.booleans()),
        "seed": pick(st.integers(0, 99)),
    }


@both(reductions(), few=20)
def test_reduce(case: dict[str, Any]) -> None:
    """Any shape up to rank 3, any axis, kept or dropped, with and without clear."""
    shape, axis, dtype = case["shape"], case["axis"], case["dtype"]
    left = tuple(1 if k == axis else e for k, e in enumerate(shape) if case["keep"] or k != axis) or (1,)

    @T.prim_func
    def kernel(A: T.Tensor(shape, dtype), C: T.Tensor(left, dtype)):
        with T.Kernel(1):
            t, out = T.alloc_shared(shape, dtype), T.alloc_fragment(left, dtype)
            T.copy(A, t)
            T.copy(C, out)
            T.reduce(t, out, case["op"], dim=axis, clear=case["clear"])
            T.copy(out, C)

    a, c = draw(shape, dtype, case["seed"]), draw(left, dtype, case["seed"] + 1)
    x, before = numbers(a), numbers(c).copy()
    x = np.abs(x) if case["op"].startswith("abs") else x
    ufunc = {"sum": np.add, "max": np.maximum, "min": np.minimum}[case["op"].removeprefix("abs")]
    want = ufunc.reduce(x, axis).reshape(left)
    want = want if case["clear"] else ufunc(want, before)
    run(kernel)(a, c)
    assert np.array_equal(numbers(c), want), case


@st.composite
def gatherings(pick: Any) -> dict[str, Any]:
    return {
        "world": pick(st.sampled_from([1, 2, 3, 4])),
        "rows": pick(st.integers(1, 9)),
        "columns": pick(st.integers(1, 33)),
        "block": pick(st.integers(1, 4)),
        "dtype": pick(
            st.sampled_from(["int8", "int32", "int64", "float16", "bfloat16", "float32", "float64"])
        ),
        "op": pick(st.sampled_from(["sum", "max", "min", "prod"])),
        "root": pick(st.integers(0, 3)),
        "seed": pick(st.integers(0, 99)),
    }


@both(gatherings(), few=6)
def test_collectives(case: dict[str, Any]) -> None:
    """All five over 1 to 4 ranks, tiles of any height, edges included."""
    world, rows, columns, block, dtype, op = (
        case[x] for x in ("world", "rows", "columns", "block", "dtype", "op")
    )
    root, blocks = case["root"] % world, -(-rows // block)

    @T.prim_func
    def kernel(
        A: T.Tensor((world, rows, columns), dtype), G: T.SymmTensor((3, world, rows, columns), dtype),
        Q: T.SymmTensor((2, rows, columns), dtype),
        C: T.Tensor((5, world, rows, columns), dtype),
    ):  # fmt: skip
        with T.Kernel(blocks) as b:
            low, high = b * block, b * block + block
            with T.Scale("device"):
                t, whole = (
                    T.alloc_shared((block, columns), dtype),
                    T.alloc_shared((world, block, columns), dtype),
                )
                T.copy(A[0, low, 0], t)
                T.copy(A[0, low, 0], Q[0, low:high, 0:columns])
                T.all_gather(t, G[0, 0:world, low:high, 0:columns])
                T.copy(A[0:world, low:high, 0:columns], whole)
                T.all_to_all(whole, G[1, 0:world, low:high, 0:columns])
                T.copy(A[0:world, low:high, 0:columns], G[2, 0:world, low:high, 0:columns])
                T.reduce_scatter(G[2, 0:world, low:high, 0:columns], t, op=op)
                T.copy(t, C[2, 0, low, 0])
                T.all_reduce(Q[0, low:high, 0:columns], op=op)
                T.broadcast(A[0, low:high, 0:columns], Q[1, low:high, 0:columns], root)
                for k in range(2):
                    T.copy(G[k, 0:world, low:high, 0:columns], C[k, 0:world, low:high, 0:columns])
                    T.copy(Q[k, low:high, 0:columns], C[3 + k, 0, low:high, 0:columns])

    made = run(kernel)

    def work() -> np.ndarray:
        comm.init()
        a = draw((world, world, rows, columns), dtype, case["seed"])
        g, q = comm.empty((3, world, rows, columns), dtype), comm.empty((2, rows, columns), dtype)
        c = torch.zeros(5, world, rows, columns, dtype=a.dtype)
        made(a[comm.rank()].contiguous(), g, q, c)
        return numbers(c)

    x = numbers(draw((world, world, rows, columns), dtype, case["seed"]))
    ufunc = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}[op]
    reduced = ufunc.reduce(x, 0)
    for rank, c in enumerate(run_ranks(world, work)):
        assert np.array_equal(c[0], x[:, 0]), case
        assert np.array_equal(c[1], x[:, rank]), case
        assert np.array_equal(c[2, 0], reduced[rank]), case
        assert np.array_equal(c[3, 0], reduced[0]), case
        assert np.array_equal(c[4, 0], x[root, 0]), case
