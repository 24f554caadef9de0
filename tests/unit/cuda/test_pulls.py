"""Non-blocking copies from other ranks (``T.copy(…, src=rank, signal=s[i], blocking=False)``) on every target."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree_on_ranks
from tests.unit.cuda.test_communicator import arguments, code_of, note_of
from tests.unit.ops.test_signals import by_name
from tilescale.compiler import emulator
from tilescale.compiler.checks.run import check, launch
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.emulator import EmulationError
from tilescale.compiler.passes import pipeline
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import TileError


def pulled(
    M: int, N: int, K: int, world: int, part: int = 64, threads: int = 128, warps: int = 2, enough: int = 0
) -> Any:
    """C = all ranks' X · W: each rank pulls the others' rows in parts of ``part`` columns beside its
    products, of which it awaits all but ``enough``."""
    rows, cols, deep = -(-M // 64), -(-N // 64), -(-K // part)
    count = rows * deep

    @T.prim_func
    def kernel(
        X: T.SymmTensor((world, M, K), "bfloat16"),
        W: T.Tensor((K, N), "bfloat16"),
        C: T.Tensor((world, M, N), "bfloat16"),
        here: T.Signal((world, rows)),
    ):
        with T.Kernel(2, threads=threads, comm_warps=warps) as b:
            x, w = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((64, 64), "bfloat16")
            acc = T.alloc_fragment((64, 64), "float32")
            with T.Scale("device") as (rank, n):
                for step in T.serial(-(-(world - 1) * count // 2)):
                    p = step * 2 + b
                    if p < (world - 1) * count:
                        owner, i, c = (rank + 1 + p // count) % n, p % count // deep, p % deep
                        theirs = X[owner, i * 64 : (i + 1) * 64, c * part : (c + 1) * part]
                        T.copy(theirs, theirs, src=owner, signal=here[owner, i], blocking=False)
                for step, i, j in T.Persistent((world, rows, cols), 2, b):
                    owner = (rank + step) % n
                    if step > 0:
                        T.wait(here[owner, i], deep - enough)
                    T.clear(acc)
                    for k in T.Pipelined(T.ceildiv(K, 64), num_stages=2):
                        T.copy(X[owner, i * 64, k * 64], x)
                        T.copy(W[k * 64, j * 64], w)
                        T.gemm(x, w, acc)
                    T.copy(acc, C[owner, i * 64, j * 64])

    return kernel


@pytest.mark.parametrize(
    ("M", "N", "K", "world", "options", "call"),
    [
        (64, 64, 128, 2, {"part": 128}, "ts::put_run<8, 64>"),
        (104, 72, 136, 3, {"part": 136, "warps": 1}, "ts::put_run<8, 32>"),
        (72, 64, 128, 2, {"part": 64}, "ts::put_rows<8, 64>"),
        (64, 128, 64, 4, {"part": 24, "threads": 256, "warps": 3}, "ts::put_rows<8, 96>"),
    ],
)
def test_rows_are_pulled_beside_products(M: int, N: int, K: int, world: int, options: Any, call: str):
    kernel = pulled(M, N, K, world, **options)
    code = code_of(kernel)
    assert call in code and "ts::tma_load(&x[" in code and code.count("ts::put_r") == 1
    agree_on_ranks(kernel, arguments(M, N, K, world), seeds=3)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_blocks_own_threads_can_pull(arch: str):
    kernel = pulled(64, 64, 128, 2, warps=0)
    agree_on_ranks(kernel, arguments(64, 64, 128, 2), arch=arch, seeds=2)
    assert "own threads" in note_of(kernel, arch)


def test_the_report_says_who_pulls():
    assert note_of(pulled(64, 64, 128, 2)) == "kernel: 1 non-blocking copy by 2 warps beside the producer"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_on_the_simulator(world: int):
    args = arguments(70, 72, 100, world)
    done = launch(pulled(70, 72, 100, world, part=48), world, by_name(args))
    want = [np.float32(a["X"][r]) @ np.float32(a["W"]) for r, a in enumerate(args)]
    assert not done.report.findings
    for got in done.arrays:
        for r in range(world):
            assert np.allclose(np.float32(got["C"][r]), want[r], rtol=0.02, atol=0.05)


def test_rows_that_are_not_awaited_are_a_race():
    report = check(pulled(64, 64, 128, 2, enough=1), 2, by_name(arguments(64, 64, 128, 2)))
    assert any(f.kind == "race" for f in report.findings)
    made, program, args = emulated(pulled(64, 64, 128, 2, enough=1))
    with pytest.raises(EmulationError, match="race in X of rank|NaN|not"):
        for seed in range(16):
            emulator.run_ranks(made, program, args, seed)


def emulated(kernel: Any) -> tuple[Any, Any, Any]:
    program, _ = pipeline.run(kernel.trace(), target("sm_90a"))
    return Lowering(program).run(), program, arguments(64, 64, 128, 2)


def test_the_barrier_in_front_of_its_signal_cannot_go(monkeypatch: pytest.MonkeyPatch):
    from tilescale.compiler.cuda.ops import remote_put

    monkeypatch.setattr(remote_put, "fence", lambda *a: tirx.Evaluate(tirx.IntImm("int32", 0)))
    made, program, args = emulated(pulled(64, 64, 128, 2))
    with pytest.raises(EmulationError, match="race in X of rank"):
        for seed in range(16):
            emulator.run_ranks(made, program, args, seed)


def touched(before: str) -> Any:
    """A block that touches what it pulls before it pulls it, or what its peer pulls from it."""

    @T.prim_func
    def kernel(X: T.SymmTensor((2, 64), "float32"), Y: T.Tensor((64,), "float32"), s: T.Signal((2,))):
        with T.Kernel(1, threads=64), T.Scale("device") as (rank, n):
            peer = (rank + 1) % n
            if before == "read":
                T.copy(X[peer, 0:64], Y)
            if before == "write":
                T.fill(X[peer, 0:64], 1.0)
            if before == "source":
                T.fill(X[rank, 0:64], 1.0)
            if before == "told":
                T.fill(X[rank, 0:64], 1.0)
                T.signal(s[1], dst=peer)
                T.wait(s[1])
            T.copy(X[peer, 0:64], X[peer, 0:64], src=peer, signal=s[0], blocking=False)
            T.wait(s[0])
            if before != "read":
                T.copy(X[peer, 0:64], Y)

    return kernel


@pytest.mark.parametrize("before", ["", "read", "write", "source", "told"])
def test_nobody_touches_what_is_pulled_unasked(before: str):
    args = [{"X": np.zeros((2, 64), "float32"), "Y": np.zeros(64, "float32"), "s": np.zeros(2, "int64")}] * 2
    kinds = {f.kind for f in check(touched(before), 2, by_name(args)).findings}
    assert kinds == (set() if before in ("", "told") else {"race"})


def blocking(X: Any, s: Any, other: Any) -> None:
    T.copy(X[1, 0:64], X[0, 0:64], src=other, signal=s[0])


def untold(X: Any, s: Any, other: Any) -> None:
    T.copy(X[1, 0:64], X[0, 0:64], src=other, blocking=False)


def into_a_tile(X: Any, s: Any, other: Any) -> None:
    T.copy(X[1, 0:64], T.alloc_shared((64,), "float32"), src=other, signal=s[0], blocking=False)


@pytest.mark.parametrize(
    "wrong, told",
    [(blocking, "signal= goes with dst=, or with src= and blocking=False"), (untold, "nobody is told of"),
     (into_a_tile, "no tensor")],
)  # fmt: skip
def test_refusals(wrong: Any, told: str):
    @T.prim_func
    def kernel(X: T.SymmTensor((2, 64), "float32"), s: T.Signal((2,))):
        with T.Kernel(1, threads=64), T.Scale("device") as (rank, n):
            T.macro(wrong)(X, s, (rank + 1) % n)

    with pytest.raises(TileError, match=told.replace("(", "[(]")):
        kernel.trace()
