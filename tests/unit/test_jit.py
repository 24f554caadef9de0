"""``@tilescale.jit`` in both its styles, and ``tilescale.compile``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tests.kernels import refused
from tilescale.devices import resolve_target
from tilescale.eager import Eager
from tilescale.errors import TileError, TileTypeError, TileValueError
from tilescale.jit import Factory, frozen


@dataclass
class Tensor:
    """What says where it lies."""

    is_cuda: bool


@tilescale.jit(out_idx=-1)
def scale(n, factor=2, dtype="float32"):
    @T.prim_func
    def main(A: T.Tensor((n,), dtype), B: T.Tensor((n,), dtype)):
        with T.Kernel(T.ceildiv(n, 16)) as bx:
            for i in T.Parallel(16):
                B[bx * 16 + i] = A[bx * 16 + i] * factor

    return main


@tilescale.jit
def matmul(A, B, block: int = 16, dtype=T.float32):
    K, N = T.const("K, N")
    M = T.dynamic("m")
    A: T.Tensor((M, K), dtype)
    B: T.Tensor[[K, N], dtype]
    C = T.empty((M, N), dtype)
    with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block)) as (bx, by):
        a = T.alloc_shared((block, block), dtype)
        b = T.alloc_shared((block, block), dtype)
        c = T.alloc_fragment((block, block), T.float32)
        T.clear(c)
        for k in T.Pipelined(T.ceildiv(K, block), num_stages=2):
            T.copy(A[by * block, k * block], a)
            T.copy(B[k * block, bx * block], b)
            T.gemm(a, b, c)
        T.copy(c, C[by * block, bx * block])
    return C


def close(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(c.float(), a.float() @ b.float(), rtol=1e-4, atol=1e-4)


# ---- factories


def test_a_factory_makes_one_kernel_for_equal_arguments():
    assert isinstance(scale, Factory) and scale.__name__ == "scale"
    kernel = scale(40)
    a = torch.randn(40)
    assert kernel(a).equal(a * 2)
    assert scale(40) is kernel and scale(n=40) is not scale(41) and scale(40, 3)(a).equal(a * 3)
    assert scale.compile(40) is kernel
    assert scale.get_tir(40).name == "main" and kernel.label == "scale(n=40, factor=2, dtype=float32)"


def test_arguments_that_only_look_equal_make_different_kernels():
    a = torch.tensor([1.25] * 16)
    whole, real, true = scale(16, 1), scale(16, 1.0), scale(16, True)
    assert len({id(whole), id(real), id(true)}) == 3
    assert whole(a).equal(a) and real(a).equal(a)


def test_symbolic_extents_are_arguments_by_name():
    kernel = scale(T.dynamic("n"))
    assert scale(T.dynamic("n")) is kernel and scale(T.dynamic("other")) is not kernel
    for n in (1, 16, 50):
        a = torch.randn(n)
        assert kernel(a).equal(a * 2)


def test_arguments_without_a_hash():
    @tilescale.jit(out_idx=-1)
    def table(values, names):
        @T.prim_func
        def main(B: T.Tensor((3,), "int32")):
            with T.Kernel(1):
                for i in range(3):
                    B[i] = values[i] + names["x"]

        return main

    assert table([1, 2, 3], {"x": 1})().tolist() == [2, 3, 4]
    assert table([1, 2, 3], {"x": 1}) is table([1, 2, 3], {"x": 1}) is not table([1, 2, 3], {"x": 2})
    assert table([1, 2, 4], {"x": 1})().tolist() == [2, 3, 5]


def test_frozen_keys():
    class Thing:
        __hash__ = None  # type: ignore[assignment]

    one, other = Thing(), Thing()
    assert frozen(one) == frozen(one) != frozen(other) and hash(frozen(one)) == hash(frozen(one))
    assert frozen(1) != frozen(True) != frozen(1.0) and frozen((1, 2)) != frozen([1, 2])
    assert frozen(T.dynamic("a")) == frozen(T.dynamic("a")) != frozen(T.dynamic("a", "int64"))
    assert frozen({"a": [1, {2: 3}]}) == frozen({"a": [1, {2: 3}]})
    assert frozen(torch.float16) == frozen(torch.float16) != frozen(torch.float32)


def test_a_factory_that_returns_no_kernel():
    @tilescale.jit
    def nothing(n):
        return n

    with refused(TileTypeError, "nothing returned a int", expected="a @T.prim_func that it defines"):
        nothing(3)
    with refused(TileTypeError, "scale: missing a required argument: 'n'", expected="scale(n, factor=2"):
        scale()
    with refused(TileTypeError, "scale: got an unexpected keyword argument 'm'"):
        scale(3, m=4)


def test_factories_as_methods():
    class Layer:
        factor = 5

        @tilescale.jit(out_idx=-1)
        def kernel(self, n):
            factor = self.factor

            @T.prim_func
            def main(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
                with T.Kernel(1):
                    for i in T.Parallel(n):
                        B[i] = A[i] * factor

            return main

    a = torch.randn(4)
    assert Layer().kernel(4)(a).equal(a * 5)


# ---- eager kernels


def test_an_eager_kernel_compiles_runs_and_returns():
    assert isinstance(matmul, Eager)
    a, b = torch.randn(37, 24), torch.randn(24, 40)
    c = matmul(a, b)
    assert type(c) is torch.Tensor and c.shape == (37, 40) and close(c, a, b)


def test_dynamic_extents_share_a_kernel_and_constant_ones_do_not():
    b = torch.randn(20, 30)
    for rows in (5, 50, 1):
        a = torch.randn(rows, 20)
        assert close(matmul(a, b), a, b)
    kernels = {id(matmul.compile(torch.randn(rows, 20), b)) for rows in (5, 50, 77)}
    assert len(kernels) == 1 and matmul.baked == {"A": {1}, "B": {0, 1}}
    assert id(matmul.compile(torch.randn(5, 20), torch.randn(20, 31))) not in kernels


def test_arguments_by_name_and_constants():
    a, b = torch.randn(16, 16), torch.randn(16, 16)
    for c in (
        matmul(a, b, 32),
        matmul(a, B=b, block=8),
        matmul(B=b, A=a),
        matmul(a, b, block=32),
        matmul(a, B=b, block=8),
    ):
        assert close(c, a, b)
    assert matmul.compile(a, b, block=8) is not matmul.compile(a, b, block=32) is matmul.compile(a, b, 32)


def test_dtypes_and_libraries():
    a, b = torch.randn(9, 16), torch.randn(16, 8)
    with refused(TileTypeError, "A is of bfloat16", expected="float32"):
        matmul(a.bfloat16(), b.bfloat16())
    c = matmul(a.bfloat16(), b.bfloat16(), dtype=T.bfloat16)
    assert c.dtype == torch.bfloat16 and torch.allclose(
        c.float(), a.bfloat16().float() @ b.bfloat16().float(), rtol=2e-2, atol=2e-2
    )
    n = matmul(a.numpy(), b.numpy())
    assert type(n) is np.ndarray and matmul.compile(a, b) is matmul.compile(a.numpy(), b.numpy())
    x = matmul(a.numpy().astype(ml_dtypes.bfloat16), b.numpy().astype(ml_dtypes.bfloat16), dtype=T.bfloat16)
    assert x.dtype == ml_dtypes.bfloat16 and (x.astype("float32") == c.float().numpy()).all()


def test_the_fast_path_sees_every_change():
    """The second call of a kind goes through a generated function: what decides the code must still be looked
    at."""

    @tilescale.jit
    def tag(A, kind: int = 0):
        N = T.const("N")
        A: T.Tensor((N,), T.float32)
        B = T.empty((2,), T.int32)
        with T.Kernel(1):
            B[0] = N
            B[1] = kind
        return B

    for _ in range(3):
        assert tag(torch.zeros(4)).tolist() == [4, 0] and tag(torch.zeros(5)).tolist() == [5, 0]
        assert tag(torch.zeros(4), 7).tolist() == [4, 7] and tag(torch.zeros(4), kind=8).tolist() == [4, 8]
        assert tag(np.zeros(4, "float32")).tolist() == [4, 0]
        with refused(TileTypeError, "A is of float64"):
            tag(torch.zeros(4, dtype=torch.float64))
        with refused(TileValueError, "A has 2 axes"):
            tag(torch.zeros(4, 1))
        with refused(TileTypeError, "missing a required argument: 'A'"):
            tag()
        with refused(TileError, "A is annotated as a tensor and is not a tensor argument"):
            tag(3)
    assert tag(torch.zeros(4), kind=True).tolist() == [4, 1] and tag(torch.zeros(4), kind=1).tolist() == [
        4,
        1,
    ]


def test_more_extents_may_turn_out_to_be_baked_in():
    """What the first trace calls dynamic another one may bake in; nothing that was found under the smaller
    key is used then."""

    @tilescale.jit
    def odd(A, B):
        N = T.const("N")
        B: T.Tensor((N,), T.float32)
        M = T.dynamic("m")
        if int(N) > 4:
            M = T.const("M")
        A: T.Tensor((M,), T.float32)
        C = T.empty((2,), T.int32)
        with T.Kernel(1):
            C[0] = N
            C[1] = M
        return C

    for _ in range(2):
        for n, rows in [(2, 3), (2, 4), (8, 3), (8, 5), (2, 5), (2, 3)]:
            assert odd(torch.zeros(rows), torch.zeros(n)).tolist() == [n, rows]
    assert odd.baked == {"A": {0}, "B": {0}}


def test_a_constant_that_a_later_tensor_tells():
    """``n * heads`` alone says of neither what it is."""

    @tilescale.jit
    def weighted(A, W):
        heads = T.const("heads")
        n = T.dynamic("n")
        A: T.Tensor((n * heads,), T.float32)
        W: T.Tensor((n, heads), T.float32)
        C = T.empty((n,), T.float32)
        with T.Kernel(n) as b:
            row, w = T.alloc_fragment((heads,), T.float32), T.alloc_fragment((heads,), T.float32)
            T.copy(A[b * heads], row)
            T.copy(W[b, 0], w)
            C[b] = 0
            for h in T.serial(heads):
                C[b] += row[h] * w[h]
        return C

    for n, heads in ((3, 4), (5, 4), (2, 8)):
        a, w = torch.randn(n * heads), torch.randn(n, heads)
        assert torch.allclose(weighted(a, w), (a.view(n, heads) * w).sum(1), atol=1e-5)
    with refused(TileValueError, "axis 0 of A has extent 13"):
        weighted(torch.zeros(13), torch.zeros(3, 4))

    @tilescale.jit
    def blocks(A, W):
        n = T.const("n")
        A: T.Tensor((T.ceildiv(n, 4),), T.float32)
        W: T.Tensor((n,), T.float32)
        with T.Kernel(T.ceildiv(n, 4)) as b:
            A[b] = W[b * 4]

    a = torch.zeros(3)
    blocks(a, torch.arange(10.0))
    assert a.tolist() == [0, 4, 8]


def test_kernels_that_return_several_things_or_nothing():
    @tilescale.jit
    def both(A):
        A: T.Tensor((4,), T.float32)
        B = T.empty((4,), T.float32)
        C = T.empty((), T.int32) if False else T.empty((1,), T.int32)
        with T.Kernel(1):
            for i in T.Parallel(4):
                B[i] = A[i] + 1
                A[i] = 0
            C[0] = 3
        return C, A, B

    a = torch.ones(4)
    c, same, b = both(a)
    assert c.tolist() == [3] and same is a and a.tolist() == [0] * 4 and b.tolist() == [2] * 4

    @tilescale.jit
    def fill(A, value: int):
        A: T.Tensor((4,), T.float32)
        with T.Kernel(1):
            for i in T.Parallel(4):
                A[i] = value

    assert fill(a, 3) is None and a.tolist() == [3] * 4


def test_tensors_declared_in_the_signature():
    @tilescale.jit
    def negate(A: T.Tensor((8,), T.float32)):
        B = T.empty((8,), T.float32)
        with T.Kernel(1):
            for i in T.Parallel(8):
                B[i] = -A[i]
        return B

    a = torch.randn(8)
    assert negate(a).equal(-a)


def test_compiled_ahead_of_a_call():
    ahead = matmul.compile(K=24, N=40, block=8)
    a, b = torch.randn(37, 24), torch.randn(24, 40)
    assert close(ahead(a, b), a, b)
    assert close(matmul.compile(a.to("meta"), b.to("meta"))(a, b), a, b)
    assert "ts_block" in matmul.get_kernel_source(a, b)
    with refused(TileValueError, "extent N of B is not given", write="matmul.compile(N=…)"):
        matmul.compile(K=24)
    with refused(TileTypeError, "matmul has no parameter 'size'"):
        matmul.compile(K=24, N=40, size="big")


def test_a_tensor_that_an_eager_kernel_has_not_declared():
    @tilescale.jit
    def reads(A, B):
        with T.Kernel(1) as b:
            for i in T.Parallel(8):
                B[i] = A[i]

    @tilescale.jit
    def copies(A, B):
        with T.Kernel(1) as b:
            s = T.alloc_shared((8,), "float32")
            T.copy(A, s)

    with refused(TileTypeError, "A is not declared", at="A[i]", write='A: T.Tensor((…,), "float32")'):
        reads(torch.zeros(8), torch.zeros(8))
    with refused(TileTypeError, "the source is A, which the kernel has not declared"):
        copies(torch.zeros(8), torch.zeros(8))


def test_an_eager_kernels_arguments_are_checked_by_the_launcher():
    a, b = torch.randn(16, 16), torch.randn(16, 16)
    matmul(a, b)
    with refused(
        TileValueError, "B is not contiguous: axis 1 has stride 16", at="B: T.Tensor[[K, N], dtype]"
    ):
        matmul(a, b.T)
    with refused(TileTypeError, "A is on meta"):
        matmul(a.to("meta"), b)
    with refused(
        TileTypeError, "matmul: B is a tensor of torch.complex64, which the language does not have", at="B"
    ):
        matmul(a, b.to(torch.complex64))


# ---- the decorator


def test_targets():
    assert tilescale.compile(scale.get_tir(8), target="cpu").inputs == ["A", "B"]
    with refused(TileValueError, "the target 'hip' is not built in this version", write='target="cpu"'):
        tilescale.compile(scale.get_tir(8), target="hip")
    with refused(TileValueError, "the target 'hip' is not built"):
        tilescale.jit(target="hip")(scale.func)
    meant = {
        "tpu": "cpu",
        "cpu:avx2": "cpu",
        "": "cpu",
        "cud": "cuda",
        "GPU": "cuda",
        "CPU": "cpu",
        "simm": "sim",
        "cuda:": "cuda:sm_90a",
        "cuda: sm_80": "cuda:sm_80",
        "cuda sm_80": "cuda",
        "sim:": "sim",
    }
    for name, instead in meant.items():
        with refused(
            TileValueError,
            f"there is no target {name!r}",
            expected='"cuda:sm_90a"',
            write=f'target="{instead}"',
        ):
            tilescale.compile(scale.get_tir(8), target=name)


@pytest.mark.parametrize(
    "target, tensors, chosen",
    [
        (None, (), "cpu"), ("auto", (Tensor(False),), "cpu"), ("auto", (1, Tensor(True)), "cuda:sm_90a"), ("cpu", (Tensor(True),), "cpu"),
        ("cuda", (), "cuda:sm_90a"), ("cuda:sm_80", (), "cuda:sm_80"), ("cuda -arch=sm_80", (), "cuda:sm_80"), ("llvm -mcpu=native", (), "cpu"),
        ("sim", (Tensor(True),), "sim"),
    ],
)  # fmt: skip
def test_what_a_target_stands_for(target: Any, tensors: Any, chosen: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tilescale.cuda.architecture", lambda: "sm_90a")
    assert resolve_target(target, tensors) == chosen


def test_the_environment_chooses_for_auto_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tilescale.cuda.architecture", lambda: "sm_90a")
    monkeypatch.setenv("TILESCALE_TARGET", "cuda")
    assert (resolve_target("auto"), resolve_target("cpu")) == ("cuda:sm_90a", "cpu")
    monkeypatch.setenv("TILESCALE_TARGET", "cpu")
    assert resolve_target("auto", [Tensor(True)]) == "cpu"


def test_of_a_prim_func_jit_is_compile():
    @tilescale.jit(out_idx=-1, target="cpu")
    @T.prim_func
    def twice(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            for i in T.Parallel(8):
                B[i] = A[i] * 2

    a = torch.randn(8)
    assert torch.equal(twice(a), 2 * a)


def test_jit_of_a_bound_method_is_what_its_decorator_makes():
    class Operation:
        def __init__(self, factor: int):
            self.factor = factor
            self.kernel = tilescale.jit(out_idx=-1, target="cpu")(self.made)(8)

        def made(self, n):
            return scale.get_tir(n, self.factor)

    a = torch.randn(8)
    assert torch.equal(Operation(3).kernel(a), 3 * a)
    assert torch.equal(Operation(5).kernel(a), 5 * a)


def test_what_the_decorators_refuse():
    with refused(TileTypeError, "@tilescale.jit takes a function or a @T.prim_func, and this is a type"):
        tilescale.jit(Tensor)
    with refused(TileTypeError, "tilescale.compile takes a @T.prim_func, and this is a Factory"):
        tilescale.compile(scale)
    with refused(
        TileError, "matmul is an eager kernel, whose outputs are not named by out_idx", write="return C"
    ):
        tilescale.jit(out_idx=-1)(matmul.func)
    with pytest.raises(TypeError):
        tilescale.jit(fast=True)(scale.func)


def test_pass_configs_are_named_and_ignored(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TILESCALE_LOG", "info")
    made = tilescale.jit(
        out_idx=-1, pass_configs={tilescale.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True}
    )(scale.func)
    a = torch.randn(8)
    assert made(8)(a).equal(a * 2)
    assert "pass_configs decides nothing here" in capfd.readouterr().err


def eager_exponentials(x: Any):
    x: T.Tensor((3,), "float32")
    with T.Kernel(1), T.Scale("thread"):
        x[0], x[1], x[2] = T.exp2(x[0]), T.exp(x[1]), T.rsqrt(x[2])


@pytest.mark.parametrize("key", [tilescale.PassConfigKey.TL_ENABLE_FAST_MATH, "tl.enable_fast_math"])
def test_fast_math_is_what_the_kernel_asks_for(key: str):
    """In an eager kernel, a factory and a prim_func: functions of float32 that have a fast form, no others."""

    @T.prim_func
    def prim(x: T.Tensor((3,), "float32")):
        with T.Kernel(1), T.Scale("thread"):
            x[0], x[1], x[2] = T.exp2(x[0]), T.exp(x[1]), T.rsqrt(x[2])

    @T.prim_func
    def double(x: T.Tensor((3,), "float64")):
        with T.Kernel(1), T.Scale("thread"):
            x[0], x[1], x[2] = T.exp2(x[0]), T.exp(x[1]), T.rsqrt(x[2])

    def factory():
        extent = 3  # which the annotation names

        @T.prim_func
        def prim(x: T.Tensor((extent,), "float32")):
            with T.Kernel(1), T.Scale("thread"):
                x[0], x[1], x[2] = T.exp2(x[0]), T.exp(x[1]), T.rsqrt(x[2])

        return prim

    asked = {"pass_configs": {key: True}, "target": "cuda:sm_90a"}
    plain = tilescale.compile(prim, target="cuda:sm_90a").get_kernel_source()
    assert "exp2f(" in plain and "expf(" in plain and "fast" not in plain
    eager = tilescale.jit(**asked)(eager_exponentials).compile(torch.empty(3, device="meta"))
    for made in (tilescale.compile(prim, **asked), tilescale.jit(**asked)(factory)(), eager):
        text = made.get_kernel_source()
        assert "ts::fast_exp2(" in text and "__expf(" in text and "rsqrt" in text and "exp2f(" not in text
    assert tilescale.compile(prim, target="cuda:sm_90a").get_kernel_source() == plain
    assert "fast" not in tilescale.compile(double, **asked).get_kernel_source()


@pytest.mark.parametrize("target", ["cpu", "sim"])
def test_fast_math_divides_by_reciprocals(target: str):
    """Of float32 and by no constant; of the others, and where the author asks for it, quotients are rounded once."""

    @T.prim_func
    def prim(x: T.Tensor((64, 2), "float32"), y: T.Tensor((64, 5), "float32"), z: T.Tensor((64,), "float64")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                a, b = x[i, 0], x[i, 1]
                y[i, 0], y[i, 1], y[i, 2] = a / b, 1.0 / b, 2 / b
                y[i, 3], y[i, 4] = T.ieee_fdiv(a, b), a / 3.0
                z[i] /= z[i] + 1.0

    fast = {"pass_configs": {tilescale.PassConfigKey.TL_ENABLE_FAST_MATH: True}}
    text, plain = (
        re.sub("//.*", "", tilescale.compile(prim, target="cuda:sm_90a", **how).get_kernel_source())
        for how in (fast, dict[str, Any]())
    )
    assert text.count("ts::fast_rcp(") == 3 and text.count(" / ") == 3
    assert "fast_rcp" not in plain and plain.count(" / ") == 6
    draw = torch.Generator().manual_seed(5)
    x = torch.rand(64, 2, generator=draw) * 100 + 0.01
    y, z = torch.full((64, 5), torch.nan), torch.rand(64, generator=draw, dtype=torch.float64)
    a, b = x.double().unbind(1)
    want, exact = torch.stack([a / b, 1 / b, 2 / b, a / b, a / 3], 1), z / (z + 1)
    tilescale.compile(prim, target=target, **fast)(x, y, z)
    off = (y.double() / want - 1).abs() * 2**24  # half a unit in the last place is 1 at most
    assert off[:, :3].max() < 4 and off[:, 3:].max() <= 1 and torch.equal(z, exact)


def test_the_style_is_seen_without_running_or_reading_the_source():
    namespace = {"T": T}
    exec("def eager(A):\n    with T.Kernel(1):\n        A[0] = 0\n", namespace)
    inner = "    @T.prim_func\n    def main(A):\n        with T.Kernel(1):\n            A[0] = 0\n"
    exec(f"def factory(n):\n{inner}    return main\n", namespace)
    assert isinstance(tilescale.jit(namespace["eager"]), Eager) and isinstance(
        tilescale.jit(namespace["factory"]), Factory
    )


ELSEWHERE = """
import sys
import numpy as np
import tilescale
import tilescale.language as T


@T.prim_func
def kernel(A: T.Tensor((8,), "int32"), n: T.int32):
    with T.Kernel(1, threads=32):
        for i in T.serial(8):
            T.device_assert(i < n, "zu groß")
            A[i] = i + n
        T.print(n, "Größe")


for target in ("cpu", "sim"):
    made, a = tilescale.compile(kernel, target=target), np.zeros(8, np.int32)
    made(a, 9)
    assert a.tolist() == [9 + i for i in range(8)]
    try:
        made(a, 2)
    except tilescale.errors.TileError as error:
        lines = str(error).splitlines()
        assert "zu groß" in lines[0] and lines[1].strip().startswith("12 |"), lines
    else:
        raise AssertionError("no failure")
assert tilescale.compile(kernel, target="cuda:sm_90a").get_kernel_source("cuda")
"""


@pytest.mark.parametrize("utf8", ["1", "0"])
def test_names_of_files_that_the_locale_does_not_know(tmp_path, utf8: str):
    """With PYTHONUTF8=0 Python holds the bytes of such a name as surrogates, which TVM takes from nobody."""
    folder = tmp_path / "grün"
    folder.mkdir()
    (folder / "kernül.py").write_text(ELSEWHERE, encoding="utf-8")
    locale = {
        "LC_ALL": "C",
        "PYTHONUTF8": utf8,
        "PYTHONCOERCECLOCALE": "0",
        "TILESCALE_CACHE_DIR": str(folder / "größer"),
    }
    done = subprocess.run(
        [sys.executable, str(folder / "kernül.py")],
        env={**os.environ, **locale},
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")
    assert done.stdout.count(b"l.py:14: Gr") == 2, done.stdout


def test_a_constant_is_learnt_from_an_expression_of_it():
    """Its own extent stands in a later parameter."""

    @tilescale.jit(target="cpu")
    def every(A, B, heads: int = 4):
        n, m = T.const("n, m")
        A: T.Tensor[[n * heads, m + 1], T.float32]
        B: T.Tensor[[n, 9 - m], T.float32]
        C = T.empty((n, m), "float32")
        with T.Kernel(n, threads=32) as i:
            for j in T.Parallel(m):
                C[i, j] = A[i * heads, j + 1] + B[i, 0]
        return C

    for n in (3, 5):
        a, b = np.random.rand(4 * n, 9).astype("float32"), np.random.rand(n, 1).astype("float32")
        np.testing.assert_array_equal(every(a, b), a[::4, 1:] + b)
    with refused(TileValueError, "axis 0 of A has extent 21", expected="n * 4 of a whole number n"):
        every(np.zeros((21, 9), "float32"), b)
    with refused(
        TileValueError, "axis 0 of B has extent 5", expected="6 = n, where n * 4 is 24 by axis 0 of A"
    ):
        every(np.zeros((24, 9), "float32"), b)


@tilescale.jit(target="cpu")
def first_numbers(dtype: str):
    m = T.dynamic("m", dtype)

    @T.prim_func
    def main(A: T.Tensor((m,), "int8"), C: T.Tensor((8,), "int8")):
        with T.Kernel(1):
            for i in T.Parallel(8):
                C[i] = A[i]

    return main


def test_extents_that_32_bits_do_not_hold_are_refused_or_asked_for():
    long, c = (
        torch.empty(2**31 + 8, dtype=torch.int8),
        torch.zeros(8, dtype=torch.int8),
    )  # untouched but for 8
    long[:8] = 1
    with refused(TileError, f"the extent m is {2**31 + 8}", expected="at most 2147483647"):
        first_numbers("int32")(long, c)
    first_numbers("int32")(long[: 2**31 - 1], c)
    assert int(c.sum()) == 8
    c.zero_()
    first_numbers("int64")(long, c)
    assert int(c.sum()) == 8


def test_tilelangs_class_of_kernels_compiles():
    made = tilescale.JITKernel(scale.get_tir(8), out_idx=-1, target="cpu")
    assert isinstance(made, tilescale.JITKernel) and isinstance(made, tilescale.Kernel)
    assert torch.equal(made(torch.ones(8)), torch.full((8,), 2.0)) and not isinstance(8, tilescale.JITKernel)


@pytest.mark.parametrize("target", ["cpu", "sim"])
@pytest.mark.parametrize("ordered", [False, True])
def test_outputs_that_a_kernel_only_adds_to_begin_with_zeros(target: str, ordered: bool):
    @tilescale.jit(out_idx=[1], target=target)
    def sums(n):
        @T.prim_func
        def kernel(A: T.Tensor((n, 64), "float32"), B: T.Tensor((64,), "float32")):
            with T.Kernel(n // 16, threads=64) as b:
                if ordered:
                    T.annotate_layout({B: T.Layout((64,), lambda i: [63 - i])})
                for i, j in T.Parallel(16, 64):
                    T.atomic_add(B[j], A[b * 16 + i, j])

        return kernel

    a = torch.randint(-9, 9, (64, 64)).float()
    want = a.sum(0).flip(0) if ordered else a.sum(0)
    for given in (a, a.numpy()):
        held = [torch.full((64,), float("nan")) for _ in range(8)]
        del held  # memory that a call may be given is no zeros
        assert torch.as_tensor(sums(64)(given)).equal(want)
