"""Pipelined products whose operands other ranks put: rings, TMA and wgmma behind signals, on the emulated
GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree_on_ranks, data, empty
from tests.unit.cuda.seeded_ranks import without
from tilescale.compiler import driver, emulator
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.emulator import EmulationError
from tilescale.compiler.passes import pipeline
from tilescale.compiler.tvm_compat import structural_map, tirx


def gather_multiply(M: int, N: int, K: int, world: int, blocks: int = 2) -> Any:
    """C = all ranks' X · W: who owns rows puts them, with a signal for each 64; the others wait once a
    tile."""
    rows, cols = -(-M // 64), -(-N // 64)

    @T.prim_func
    def kernel(
        X: T.SymmTensor((world, M, K), "bfloat16"),
        W: T.Tensor((K, N), "bfloat16"),
        C: T.Tensor((world, M, N), "bfloat16"),
        here: T.Signal((world, rows)),
    ):
        with T.Kernel(blocks, threads=128) as b:
            x, w = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((64, 64), "bfloat16")
            acc = T.alloc_fragment((64, 64), "float32")
            with T.Scale("device") as (rank, n):
                for step, i, j in T.Persistent((world, rows, cols), blocks, b):
                    owner = (rank + step) % n
                    if step == 0:
                        mine = X[rank, i * 64 : (i + 1) * 64, 0:K]
                        for hop in T.serial(j + 1, n, step=cols):
                            T.copy(mine, mine, dst=(rank + hop) % n, signal=here[rank, i])
                    else:
                        T.wait(here[owner, i])
                    T.clear(acc)
                    for k in T.Pipelined(T.ceildiv(K, 64), num_stages=2):
                        T.copy(X[owner, i * 64, k * 64], x)
                        T.copy(W[k * 64, j * 64], w)
                        T.gemm(x, w, acc)
                    T.copy(acc, C[owner, i * 64, j * 64])

    return kernel


def arguments(M: int, N: int, K: int, world: int) -> list[dict[str, Any]]:
    rows = -(-M // 64)
    return [
        {
            "X": data((world, M, K), "bfloat16", r),
            "W": data((K, N), "bfloat16", 9),
            "C": empty((world, M, N), "bfloat16"),
            "here": np.zeros((world, rows), np.int64),
        }
        for r in range(world)
    ]


def run(kernel: Any, args: Any, change: Callable[[Any], Any], seed: int) -> Any:
    program, _ = pipeline.run(kernel.trace(), target("sm_90a"))
    program = program.with_body(structural_map(program.func.body, (tirx.AttrStmt, change)))
    return emulator.run_ranks(Lowering(program).run(), program, args, seed)


@pytest.mark.parametrize(("M", "N", "K", "world"), [(64, 64, 128, 2), (40, 72, 72, 3)])
def test_rows_that_others_put_go_through_a_ring(M: int, N: int, K: int, world: int):
    agree_on_ranks(gather_multiply(M, N, K, world), arguments(M, N, K, world), seeds=4)


def test_the_producer_awaits_a_tile_once_and_puts_a_proxy_fence_behind():
    code = driver.source_text(gather_multiply(64, 64, 256, 2).trace(), "cuda", "cuda:sm_90a")
    marks = ["ts::wait<true>", "ts::fence_proxy_async_global()", "ts::mbarrier_wait(&empty0", "tma_load(&x["]
    places = [code.index(m) for m in marks]
    assert places == sorted(places) and "ts::wgmma_m64n64k16_bf16" in code
    assert code.count("what the wait acquired") == 1, "once a tile, in front of its loop"


@pytest.mark.parametrize("name", ["proxy_fence", "wait"])
def test_neither_the_wait_nor_its_proxy_fence_can_go(name: str):
    gone: list[Any] = []
    with pytest.raises(EmulationError, match=r"race in X of rank \d .* nothing orders the two"):
        for seed in range(8):
            run(
                gather_multiply(64, 64, 128, 2),
                arguments(64, 64, 128, 2),
                without(name, "producer", gone),
                seed,
            )
    assert gone


def one_behind_the_other() -> Any:
    """Two blocks store one tile; the second one waits for the first one's signal."""

    @T.prim_func
    def kernel(
        A: T.Tensor((128, 128), "bfloat16"),
        B: T.Tensor((128, 64), "bfloat16"),
        C: T.Tensor((64, 64), "bfloat16"),
        s: T.Signal((1,)),
    ):
        with T.Kernel(2, threads=128) as b:
            x, w = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((64, 64), "bfloat16")
            acc = T.alloc_fragment((64, 64), "float32")
            T.clear(acc)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[b * 64, k * 64], x)
                T.copy(B[k * 64, 0], w)
                T.gemm(x, w, acc)
            with T.Scale("grid"):
                if b == 1:
                    T.wait(s[0])
                T.copy(acc, C)
                if b == 0:
                    T.signal(s[0])

    return kernel


def test_a_signal_follows_what_tma_stored():
    args = [
        {
            "A": data((128, 128), "bfloat16", 1),
            "B": data((128, 64), "bfloat16", 2),
            "C": empty((64, 64), "bfloat16"),
            "s": np.zeros(1, np.int64),
        }
    ]
    code = driver.source_text(one_behind_the_other().trace(), "cuda", "cuda:sm_90a")
    assert "ts::tma_store(C_map" in code and "ts::bulk_wait<0>()" in code
    agree_on_ranks(one_behind_the_other(), args, seeds=4)

    def without(s: Any) -> Any:
        def leaf(e: Any) -> Any:
            name = getattr(getattr(e.value, "op", None), "name", "")
            gone = name == "ts.await_stores" and int(e.value.attrs["complete"])
            return tirx.Evaluate(tirx.IntImm("int32", 0)) if gone else e

        return tirx.AttrStmt(
            s.node, s.attr_key, s.value, structural_map(s.body, (tirx.Evaluate, leaf)), s.span
        )

    with pytest.raises(EmulationError, match="race in C of rank 0"):
        for seed in range(8):
            run(one_behind_the_other(), args, without, seed)
