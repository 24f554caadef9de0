"""``target="sim"``: the kernel object's face over the simulator; findings as errors; symmetric memory of one
rank."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tests.kernels import refused
from tilescale.errors import FindingError, LaunchError, TileTypeError, TileValueError

m, s0, s1 = T.dynamic("m"), T.dynamic("s0"), T.dynamic("s1")
SMALL = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


@T.prim_func
def add(A: T.Tensor((m, 8), "float32"), B: T.Tensor((m, 8), "float32"), C: T.Tensor((m, 8), "float32")):
    with T.Kernel(T.ceildiv(m, 4), threads=32) as bx:
        for i, j in T.Parallel(4, 8):
            C[bx * 4 + i, j] = A[bx * 4 + i, j] + B[bx * 4 + i, j]


@T.prim_func
def scaled(A: T.Tensor((4,), "float32"), k: T.int8, f: T.float32, B: T.Tensor((4,), "float32")):
    with T.Kernel(1):
        for i in T.Parallel(4):
            B[i] = A[i] * f + k


@T.prim_func
def everyone_writes(A: T.Tensor((16,), "float32"), B: T.Tensor((16,), "float32")):
    with T.Kernel(2):
        for i in T.Parallel(16):
            B[i] = A[i]


@pytest.fixture(scope="module")
def kernel() -> tilescale.Kernel:
    return tilescale.compile(add, target="sim")


def test_the_face_is_that_of_a_kernel(kernel):
    a, b, c = torch.randn(10, 8), torch.randn(10, 8), torch.full((10, 8), float("nan"))
    assert kernel(a, C=c, B=b) is None and c.equal(a + b)
    assert (
        kernel.target == "sim"
        and kernel.inputs == ["A", "B", "C"]
        and kernel.symbols == ["m"]
        and not kernel.collective
    )
    assert repr(kernel) == repr(tilescale.compile(add))
    assert [{k: v for k, v in p.items() if k != "loc"} for p in kernel.params] == [
        {k: v for k, v in p.items() if k != "loc"} for p in tilescale.compile(add).params
    ]
    assert "T.prim_func" in kernel.get_kernel_source() and "T.prim_func" in kernel.get_kernel_source(
        "scheduled"
    )
    with refused(TileValueError, "get_kernel_source('llvm') of the target sim"):
        kernel.get_kernel_source("llvm")
    steps = [name for name, _ in kernel.trace()]
    assert steps[0] == "trace" and "schedule" in steps


def test_outputs_are_allocated_and_returned():
    a, b = torch.randn(5, 8), torch.randn(5, 8)
    made = tilescale.compile(add, -1, target="sim")
    c = made(a, b)
    assert type(c) is torch.Tensor and c.equal(a + b)
    n = made(a.numpy(), b.numpy())
    assert type(n) is np.ndarray and (n == c.numpy()).all()


@pytest.mark.parametrize(
    "dtype",
    ["float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "uint16", "int64", "bool"],
)
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_dtypes_of_both_libraries(dtype: str, library: str):
    @T.prim_func
    def copied(A: T.Tensor((8,), dtype), B: T.Tensor((8,), dtype)):
        with T.Kernel(1):
            for i in T.Parallel(8):
                B[i] = A[7 - i]

    values = np.array([0, 1, 1, 0, 1, 0, 0, 1] if dtype == "bool" else [0, 1, 2, 3, 4, 6, 8, 12])
    a = values.astype(getattr(ml_dtypes, dtype, None) or dtype)
    if library == "torch":
        a = torch.from_numpy(values).to(getattr(torch, dtype))
    b = tilescale.compile(copied, -1, target="sim")(a)
    assert type(b) is type(a) and b.dtype == a.dtype
    assert [float(x) for x in b] == [float(x) for x in values[::-1]]


@pytest.mark.parametrize("name", SMALL)
def test_small_floats_round_as_the_language_says(name: str):
    @T.prim_func
    def halved(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), name)):
        with T.Kernel(1):
            for i in T.Parallel(64):
                B[i] = A[i] * 0.5

    a = torch.randn(64)
    assert tilescale.compile(halved, -1, target="sim")(a).float().equal((a * 0.5).to(SMALL[name]).float())


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_strided_tensors(library: str):
    @T.prim_func
    def transposed(
        A: T.StridedTensor((m, 8), (s0, s1), "bfloat16"), B: T.StridedTensor((m, 8), (8, 1), "bfloat16")
    ):
        with T.Kernel(m) as i:
            for j in T.Parallel(8):
                B[i, j] = A[i, j]

    a = torch.randn(8, 24).bfloat16()[:, ::2].T  # 12 × 8, strides (2, 24)
    b = torch.zeros(12, 8).bfloat16()
    call = tilescale.compile(transposed, target="sim")
    if library == "torch":
        call(a, b)
    else:
        bits = a.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        call(bits, b.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    assert b.equal(a)
    out = torch.zeros(16, 8).bfloat16()[::2]
    with refused(TileValueError, "axis 0 of B has stride 16"):
        call(torch.zeros(8, 8).bfloat16(), out)


def test_numbers():
    a = torch.arange(4.0)
    b = torch.zeros(4)
    call = tilescale.compile(scaled, target="sim")
    call(a, 3, 0.5, b)
    assert b.equal(a * 0.5 + 3)
    with refused(TileValueError, "k is 200", expected="int8"):
        call(a, 200, 0.5, b)
    with refused(TileTypeError, "k is a float", expected="an int"):
        call(a, 1.5, 0.5, b)
    with refused(TileTypeError, "f is a str"):
        call(a, 1, "x", b)


def test_refusals_are_those_of_the_cpu_target(kernel):
    a, b, c = (torch.zeros(6, 8) for _ in range(3))
    cpu = tilescale.compile(add)
    meta = torch.empty(6, 8, device="meta")
    bad = [
        (a, b),
        (a, b, c, c),
        (a, b, 3),
        (a, b, None),
        (a, b.double(), c),
        (a, b, c[0]),
        (a, b[:, :7], c),
        (a, b[:5], c),
        (torch.zeros(8, 6).T, b, c),
        (a, b, b),
        (a, c[:], c),
        (a, b, torch.zeros(6, 16)[:, ::2]),
        (a, b.to_sparse(), c),
    ]
    for args in bad:
        texts = []
        for call in (cpu, kernel):
            with pytest.raises((TileTypeError, TileValueError)) as caught:
                call(*args)
            texts.append(str(caught.value))
        assert texts[0] == texts[1]
    with refused(TileTypeError, "A is on meta, and the kernel is compiled for the sim target"):
        kernel(meta, b, c)
    held = np.zeros((6, 8), "float32")
    held.flags.writeable = False
    with refused(TileValueError, "C is read-only, and the kernel writes it"):
        kernel(a, b, held)
    kernel(held, b, c)


def test_a_finding_is_an_error_with_the_report():
    b = torch.zeros(16)
    with pytest.raises(FindingError, match="race: this writes B") as caught:
        tilescale.compile(everyone_writes, target="sim")(torch.ones(16), b)
    assert isinstance(caught.value, LaunchError)
    assert (
        caught.value.report.kinds == {"race"}
        and caught.value.loc.line == caught.value.report.findings[0].loc.line
    )
    assert b.equal(torch.ones(16))  # what it computed is there to look at


def test_outputs_are_unwritten_memory_and_arguments_are_written():
    @T.prim_func
    def adds(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(1):
            for i in T.Parallel(8):
                B[i] += A[i]

    a, b = torch.ones(8), torch.ones(8)
    tilescale.compile(adds, target="sim")(a, b)
    assert b.equal(a + 1)
    with pytest.raises(FindingError, match="uninitialised: B"):
        tilescale.compile(adds, -1, target="sim")(a)


def test_check_of_kernels_and_prim_funcs():
    for subject in (
        everyone_writes,
        tilescale.compile(everyone_writes),
        tilescale.compile(everyone_writes, target="sim"),
    ):
        report = subject.check()
        assert report.kinds == {"race"} and report.runs == 11
    assert add.check(args={"A": torch.ones(4, 8)}, schedule="random", seeds=2).runs == 3
    with refused(TileValueError, "nothing says what m is"):
        add.check()


def test_check_takes_tensors_of_every_rank():
    @T.prim_func
    def shift(
        A: T.Tensor((8,), "bfloat16"),
        inbox: T.SymmTensor((8,), "bfloat16"),
        got: T.Signal((1,)),
        B: T.Tensor((8,), "bfloat16"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, n:
                T.copy(A, inbox, dst=(rank + 1) % n, signal=got[0])
                T.wait(got[0])
                T.copy(inbox, B)

    for a in (
        torch.ones(8).bfloat16(),
        [torch.ones(8).bfloat16()] * 3,
        lambda rank: torch.full((8,), rank).bfloat16(),
    ):
        assert shift.check(3, {"A": a}), shift.check(3, {"A": a})
    with refused(TileValueError, "A is a list of 2", expected="3, one a rank"):
        shift.check(3, {"A": [torch.ones(8).bfloat16()] * 2})


@tilescale.jit(target="sim")
def doubled(A):
    n = T.const("n")
    A: T.Tensor((n,), T.float32)
    B = T.empty((n,), T.float32)
    with T.Kernel(1):
        for i in T.Parallel(n):
            B[i] = A[i] * 2
    return B


@tilescale.jit(target="sim", out_idx=-1)
def tripled(n):
    @T.prim_func
    def main(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
        with T.Kernel(1):
            for i in T.Parallel(n):
                B[i] = A[i] * 3

    return main


def test_both_styles_of_jit():
    for n in (4, 6, 4):
        a = torch.randn(n)
        assert doubled(a).equal(a * 2) and doubled(A=a).equal(a * 2)
        assert tripled(n)(a).equal(a * 3)
    assert doubled.compile(n=5).target == "sim" and doubled.compile(torch.empty(4)).target == "sim"
    assert tripled(4) is tripled(4)


ONE_RANK = """
import sys, numpy as np
import tilescale, tilescale.language as T
from tilescale import comm

@T.prim_func
def shift(A: T.Tensor((8,), "float32"), inbox: T.SymmTensor((8,), "float32"), got: T.Signal((1,)), B: T.Tensor((8,), "float32")):
    with T.Kernel(1):
        with T.Scale("device") as rank, n:
            T.copy(A, inbox, dst=(rank + 1) % n, signal=got[0])
            T.wait(got[0])
            T.copy(inbox, B)

comm.init()
a, b = np.arange(8, dtype="float32"), np.zeros(8, "float32")
tilescale.compile(shift)(a, comm.empty(8, like="numpy"), comm.signals(1, like="numpy"), b)
assert (a == b).all()
print(tilescale.compile(shift).target, "torch" in sys.modules)
"""


def test_the_environment_chooses_and_no_c_compiler_or_cache_is_needed(clean_env, tmp_path):
    script = tmp_path / "one.py"
    script.write_text(ONE_RANK)
    cache = tmp_path / "cache"
    env = clean_env | {
        "TILESCALE_TARGET": "sim",
        "TILESCALE_CC": "no-such-compiler",
        "TILESCALE_CACHE_DIR": str(cache),
    }
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.split() == ["sim", "False"], done.stderr
    assert not cache.exists()


def test_the_static_checks_stop_a_compilation_for_the_simulator_too():
    @T.prim_func
    def outside(A: T.Tensor((8,), "float32")):
        with T.Kernel(4) as b:
            tile = T.alloc_shared((8,), "float32")
            T.clear(tile)
            tile[b * 3] = 1.0
            T.copy(tile, A)

    with pytest.raises(TileValueError, match=r"tile\[9\]"):
        tilescale.compile(outside, target="sim")


def test_a_kernels_check_says_what_is_proven():
    @T.prim_func
    def picks(A: T.Tensor((8,), "float32"), at: T.int32):
        with T.Kernel(1):
            tile = T.alloc_shared((8,), "float32")
            T.copy(A, tile)
            tile[at] = 1.0
            T.copy(tile, A)

    kernel = tilescale.compile(picks, target="sim")
    report = kernel.check(args={"A": np.zeros(8, "float32"), "at": 7}, seeds=1)
    assert (
        report
        and report.static.counts["bounds"]["refuted"] == 0
        and "(static: " in str(report)
        and "bounds" in report.static.table()
    )
    (found,) = kernel.check(args={"A": np.zeros(8, "float32"), "at": 8}, seeds=1).findings
    assert found.kind == "out-of-bounds" and not found.schedule.startswith("no run")
