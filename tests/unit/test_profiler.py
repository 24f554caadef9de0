"""The profiler: inputs from declarations, times, and comparisons that fail when they should."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tests.kernels import refused
from tilescale import TensorSupplyType, devices
from tilescale.errors import LaunchError, TileTypeError, TileValueError
from tilescale.profiler import compare, measure

m = T.dynamic("m")


@T.prim_func
def scale(A: T.Tensor((m, 4), "float32"), n: T.int32, f: T.float32, B: T.Tensor((m, 4), "float32")):
    with T.Kernel(m) as bx:
        for j in T.Parallel(4):
            B[bx, j] = A[bx, j] * f + n


def kernel(**options) -> tilescale.Kernel:
    return tilescale.compile(scale, **options)


def test_inputs_fit_and_repeat():
    profiler = kernel().get_profiler(m=6, f=2.5)
    a, n, f, b = profiler.inputs()
    assert a.shape == b.shape == (6, 4) and a.dtype == torch.float32 and (n, f) == (1, 2.5)
    assert profiler.inputs()[0].equal(a) and not a.equal(b)
    assert len(kernel(out_idx=-1).get_profiler(m=6).inputs()) == 3


@pytest.mark.parametrize(
    ("supply", "fits"),
    [
        (None, lambda a: a.abs().max() <= 1 and 0.4 < a.std() < 0.7),
        (TensorSupplyType.Normal, lambda a: -1.3 < a.mean() < -0.7 and 0.8 < a.std() < 1.2),
        ("randn", lambda a: abs(a.mean()) < 0.3 and 0.8 < a.std() < 1.2),
        ("uniform", lambda a: a.abs().max() <= 1 and a.std() > 0),
        (TensorSupplyType.Integer, lambda a: set(a.unique().tolist()) == {-2, -1, 0, 1, 2}),
        (TensorSupplyType.Zero, lambda a: not a.any()),
        ("one", lambda a: a.eq(1).all()),
        (lambda p: torch.full(p["shape"], 7.0) if p["kind"] == "tensor" else 2, lambda a: a.eq(7).all()),
    ],
)
def test_supplies(supply, fits):
    assert fits(kernel().get_profiler(supply, m=50).inputs()[0])


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint8", "int64", "float16", "bfloat16", "float8_e4m3fn", "float64"]
)
def test_every_dtype_has_inputs(dtype: str):
    s = T.dynamic("s")

    @T.prim_func
    def main(A: T.StridedTensor((5, 3), (s, 1), dtype), B: T.Tensor((5, 3), dtype)):
        with T.Kernel(1):
            for i, j in T.Parallel(5, 3):
                B[i, j] = A[i, j]

    profiler = tilescale.compile(main, -1).get_profiler(s=8)
    (a,) = profiler.inputs()
    assert a.stride() == (8, 1) and a.dtype == getattr(torch, dtype) and len(set(a.flatten().tolist())) > 1
    profiler.assert_allclose(lambda a: a.contiguous())


def test_extents_may_come_with_the_measurement():
    """As TileLang's programs say them, beside the words for what is measured and where."""
    seen: list[int] = []
    time = kernel().get_profiler().do_bench(
        func=lambda *args: seen.append(args[0].shape[0]), n_warmup=1, n_repeat=2,
        dynamic_symbolic_constraints={"m": 40}, device=0,
    )  # fmt: skip
    assert time >= 0 and set(seen) == {40}


def test_extents_are_asked_for():
    with refused(TileValueError, "nothing says what m is", write="kernel.get_profiler(m=1024)"):
        kernel().get_profiler().inputs()
    with refused(TileValueError, "scale has no T.dynamic('k')", expected="m, n, f"):
        kernel().get_profiler(m=3, k=4)
    with refused(TileValueError, "tensor_supply='much'"):
        kernel().get_profiler("much", m=3)
    with refused(TileValueError, "scale has no inputs with m=-3", expected="0 or more"):
        kernel().get_profiler(m=-3)


def test_inputs_on_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    made = kernel()
    monkeypatch.setattr(made, "device", devices.of("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refused(LaunchError, "scale takes tensors on a GPU, and torch finds none", write='target="cpu"'):
        made.get_profiler(m=4).do_bench()


def test_times(monkeypatch: pytest.MonkeyPatch):
    """In milliseconds; how long the machine takes at most is its own affair."""
    profiler = kernel(out_idx=-1).get_profiler(m=8)
    samples = profiler.do_bench(warmup=1, rep=5, return_mode="all")
    assert profiler.do_bench(warmup=1, rep=5) > 1e-4 and len(samples) >= 3 and min(samples) > 1e-4
    assert profiler.do_bench(lambda a, n, f: time.sleep(0.003), warmup=0, rep=10) >= 3
    assert profiler.do_bench(lambda: time.sleep(0.003), warmup=0, rep=10, return_mode="min") >= 3
    monkeypatch.setattr("tilescale.profiler.measure", lambda *_, **__: [4.0, 1.0, 2.0, 9.0])
    for mode, want in {"median": 3.0, "mean": 4.0, "min": 1.0, "max": 9.0}.items():
        assert profiler.do_bench(return_mode=mode) == want
    with refused(TileValueError, "return_mode='best'", expected="median, mean, min, max, all"):
        profiler.do_bench(return_mode="best")


def test_ranks_that_agree_call_equally_often():
    """Two ranks of different speed: the slower one's estimate decides for both."""
    calls = {"fast": 0, "slow": 0}

    def rank(name: str, seconds: float) -> list[float]:
        def call() -> None:
            calls[name] += 1
            time.sleep(seconds)

        return measure(call, 0, 20, lambda estimate: 2.0)

    rank("fast", 0.0002)
    rank("slow", 0.002)
    assert calls["fast"] == calls["slow"] == 1 + 3 + 10


def test_comparisons():
    profiler = kernel(out_idx=-1).get_profiler(m=8, f=3.0)
    profiler.assert_allclose(lambda a, n, f: a * f + n)
    with pytest.raises(
        AssertionError,
        match=r"scale: the result differs from the reference in 32 of 32 elements .* most at \[",
    ):
        profiler.assert_allclose(lambda a, n, f: a * f)
    with pytest.raises(AssertionError, match=r"has shape \(8, 4\), the reference's \(4, 8\)"):
        profiler.assert_allclose(lambda a, n, f: (a * f + n).T)
    with pytest.raises(AssertionError, match="gives 1 tensors, the reference 2"):
        profiler.assert_allclose(lambda a, n, f: (a, a))
    profiler.assert_allclose(lambda a, n, f: a * f + n + 0.01, atol=0.02)


def test_kernels_that_write_their_arguments():
    profiler = kernel().get_profiler(m=8)

    def in_place(a, n, f, b):
        b.copy_(a * f + n)

    profiler.assert_allclose(in_place)
    profiler.assert_allclose(lambda a, n, f: a * f + n)  # takes what is only read, returns what is written
    with pytest.raises(AssertionError, match="scale: B differs"):
        profiler.assert_allclose(lambda a, n, f, b: None)
    with refused(TileTypeError, "takes neither 4 arguments (all) nor 3 (those only read)"):
        profiler.assert_allclose(lambda a: a)


def test_compare_sees_infinities_and_nans():
    x = torch.tensor([1.0, float("inf"), float("nan")])
    compare("x", x, x.clone())
    for k, value in [(1, 1.0), (1, float("-inf")), (2, 0.0), (0, float("nan"))]:
        y = x.clone()
        y[k] = value
        with pytest.raises(AssertionError, match=rf"in 1 of 3 elements .*most at \[{k}\]"):
            compare("x", y, x)
    compare("n", np.array([1, 2]), torch.tensor([1, 2]))
    with pytest.raises(AssertionError):
        compare("n", np.array([1 << 60]), np.array([(1 << 60) + 1]))


def test_do_bench_of_any_function() -> None:
    from tilescale.profiler import do_bench

    calls = []
    samples = do_bench(lambda: calls.append(1), warmup=0, rep=1, return_mode="all")
    assert len(samples) >= 3 and all(s >= 0 for s in samples) and len(calls) >= len(samples)
    assert do_bench(lambda: None, rep=1) >= 0
    with pytest.raises(TileValueError, match="return_mode"):
        do_bench(lambda: None, return_mode="mode")


def test_comparisons_are_tilelang_s_by_default():
    """A hundredth of the elements may differ by more than 0.01 and a hundredth; of integers none may."""
    profiler = kernel(out_idx=-1).get_profiler(m=100, f=3.0)  # 400 elements

    def off(count: int, by: float) -> Any:
        def reference(a, n, f):
            made = a * f + n
            made.flatten()[:count] += by
            return made

        return reference

    profiler.assert_allclose(off(400, 0.009))
    profiler.assert_allclose(off(4, 99.0))
    with pytest.raises(AssertionError, match="5 of 400"):
        profiler.assert_allclose(off(5, 99.0))
    with pytest.raises(AssertionError, match="4 of 400"):
        profiler.assert_allclose(off(4, 99.0), max_mismatched_ratio=0.0)

    @T.prim_func
    def whole(A: T.Tensor((400,), "int32"), B: T.Tensor((400,), "int32")):
        with T.Kernel(1):
            for i in T.Parallel(400):
                B[i] = A[i]

    def one_off(a):
        made = a.clone()
        made[7] += 1
        return made

    with pytest.raises(AssertionError, match="1 of 400"):
        tilescale.compile(whole, -1, target="cpu").get_profiler().assert_allclose(one_off)
