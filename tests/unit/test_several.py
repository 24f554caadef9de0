"""Kernels of several launches: one call, in order, on memory that the call allocates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tests.unit.cuda import emulated
from tilescale.errors import TileError, TileSyntaxError, TileValueError

N, PARTS = 64, 4


def sums(n: int = N, parts: int = PARTS) -> Any:
    """B: the sum of A, C: that of each part, by way of a workspace."""

    @T.prim_func
    def main(A: T.Tensor((n,), "float32"), B: T.Tensor((1,), "float32"), C: T.Tensor((parts,), "float32")):
        own = T.alloc_global((parts,), "float32")
        with T.Kernel(parts, threads=32) as bx:
            f, s = T.alloc_fragment((n // parts,), "float32"), T.alloc_fragment((1,), "float32")
            T.copy(A[bx * (n // parts)], f)
            T.reduce_sum(f, s)
            T.copy(s, own[bx])
        with T.Kernel(1, threads=64):
            g, s = T.alloc_fragment((parts,), "float32"), T.alloc_fragment((1,), "float32")
            T.copy(own, g)
            T.reduce_sum(g, s)
            T.copy(s, B)
            T.copy(own, C)

    return main


class Launch:
    """One launch of `sums`, as the emulator takes a kernel."""

    def __init__(self, part: int):
        self.part, self.func, self.params, self.name = part, sums, part, f"launch {part}"

    def trace(self) -> Any:
        return sums().trace(self.part)


def eager(A: Any, parts: int = PARTS) -> Any:
    n = T.dynamic("n")
    A: T.Tensor((n,), "float32")
    B = T.empty((n,), "float32")
    own = T.alloc_global((n,), "float32")
    with T.Kernel(T.ceildiv(n, parts), threads=32) as bx:
        for i in T.Parallel(parts):
            own[bx * parts + i] = A[bx * parts + i] + 1
    with T.Kernel(T.ceildiv(n, parts), threads=32) as bx:
        for i in T.Parallel(parts):
            B[bx * parts + i] = own[n - 1 - bx * parts - i] * 2
    return B


@pytest.mark.parametrize("target", ["cpu", "sim"])
def test_each_launch_comes_behind_the_one_before(target: str):
    kernel = tilescale.compile(sums(), [1, 2], target=target)
    a = torch.randn(N)
    for given in (a, a * 2):
        total, parts = kernel(given)
        torch.testing.assert_close(parts, given.reshape(PARTS, -1).sum(1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(total, given.sum().reshape(1), rtol=1e-5, atol=1e-5)
    assert kernel.launches == 2 and kernel.inputs == ["A"]
    b, c = torch.full((1,), float("nan")), torch.full((PARTS,), float("nan"))
    tilescale.compile(sums(), target=target)(a, C=c, B=b)
    torch.testing.assert_close(b, a.sum().reshape(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", ["cpu", "sim"])
@pytest.mark.parametrize("n", [5, 64])
def test_eager_kernels_of_several_launches(target: str, n: int):
    a = torch.randn(n)
    assert torch.equal(tilescale.jit(eager, target=target)(a), (a.flip(0) + 1) * 2)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_on_the_emulator(arch: str):
    a = np.random.default_rng(3).standard_normal(N).astype("float32")
    args = {"A": a, "B": np.full(1, np.nan, "float32"), "C": np.full(PARTS, np.nan, "float32")}
    args["workspace0"] = np.full(PARTS, np.nan, "float32")
    for part in range(2):
        args = emulated.run(Launch(part), args, arch, 0)
    np.testing.assert_allclose(args["B"], [a.sum()], rtol=1e-5)


def test_its_text_is_that_of_all_launches():
    kernel = tilescale.compile(sums(), target="cuda:sm_90a")
    assert kernel.get_kernel_source().count("__global__") == 2
    assert {name for name, _ in kernel.trace()} and kernel.params[-1]["name"] == "workspace0"


def test_what_looks_at_one_launch_is_refused():
    with pytest.raises(TileSyntaxError, match="main has 2 launches"):
        sums().trace()


@pytest.mark.parametrize(
    ("where", "kind", "message"),
    [
        ("inside", TileSyntaxError, "inside T.Kernel"),
        ("scope", TileValueError, "scope='shared'"),
        ("nested", TileSyntaxError, "a T.Kernel in another one"),
        ("between", TileError, "behind the kernel's launch"),
    ],
)
def test_refusals(where: str, kind: type[Exception], message: str):
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        if where == "scope":
            T.alloc_global((4,), "float32", scope="shared")
        with T.Kernel(4, threads=32) as bx:
            if where == "inside":
                T.alloc_global((4,), "float32")
            if where == "nested":
                with T.Kernel(4) as by:
                    A[by] = 0
            A[bx] = 1
        if where == "between":
            A[0] = 2

    with pytest.raises(kind, match=message):
        kernel.trace()


@tilescale.jit
def shadowed(K, n: int = 32):
    K = n
    half = K // 2
    K: T.Tensor((n,), "float32")
    out = T.empty((n,), "float32")
    scratch = T.alloc_buffer((n,), "float32")
    with T.Kernel(1, threads=32):
        for i in T.Parallel(n):
            scratch[i] = K[i] + half
    with T.Kernel(1, threads=32):
        for i in T.Parallel(n):
            out[i] = scratch[i] * 2
    return out


def test_a_declaration_names_the_parameter_whatever_its_name_holds():
    a = torch.arange(32, dtype=torch.float32)
    assert torch.equal(shadowed(a), (a + 16) * 2)


def test_a_file_holds_all_launches(tmp_path: Path):
    a = np.random.default_rng(3).standard_normal(N).astype("float32")
    for out_idx in (None, [1, 2]):
        kernel = tilescale.compile(sums(), target="cpu", out_idx=out_idx)
        loaded = tilescale.load(kernel.export(tmp_path / "k.ts"))
        assert len(loaded.parts) == 2 and [p["name"] for p in loaded.params] == [
            p["name"] for p in kernel.params
        ]
        b, c = np.zeros(1, "float32"), np.zeros(PARTS, "float32")
        if out_idx:
            b, c = loaded(a)
        else:
            assert loaded(a, b, c) is None
        np.testing.assert_allclose(c, a.reshape(PARTS, -1).sum(1), rtol=1e-5)
        np.testing.assert_allclose(b, [c.sum()], rtol=1e-5)
    eagerly = tilescale.jit(target="cpu")(eager)
    x = np.arange(8, dtype="float32")
    want = eagerly(x)
    np.testing.assert_array_equal(tilescale.load(eagerly.compile(n=8).export(tmp_path / "e.ts"))(x), want)
    (tmp_path / "k.ts").write_bytes((tmp_path / "k.ts").read_bytes()[:-200])
    with pytest.raises(TileValueError, match="k.ts"):
        tilescale.load(tmp_path / "k.ts")


def faulty(what: str) -> Any:
    @T.prim_func
    def main(A: T.Tensor((4,), "float32"), B: T.Tensor((4,), "float32")):
        own = T.alloc_global((4,), "float32")
        with T.Kernel(4, threads=32) as bx:
            if what != "unwritten" or bx < 3:
                own[bx] = A[bx]
        with T.Kernel(4, threads=32) as bx:
            if what == "race":
                own[0] = A[bx]
            B[bx] = own[bx]

    return main


def test_check_runs_all_launches():
    report = tilescale.compile(sums(), target="cpu").check(seeds=2)
    assert report and report.runs >= 6 and report.static is not None
    assert tilescale.compile(faulty(""), target="cpu").check(seeds=2)
    race = tilescale.compile(faulty("race"), target="cpu").check(seeds=2)
    assert race.kinds == {"race"} and "workspace0" in str(race)
    unwritten = tilescale.compile(faulty("unwritten"), target="cpu").check(seeds=2)
    assert not unwritten and len(unwritten.findings) == 1, unwritten
