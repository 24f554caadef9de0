"""Non-blocking copies to other ranks by warps beside the producer (passes/remote_puts.py), on the emulated
GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.leftovers import nothing_left
from tests.unit.cuda.emulated import agree_on_ranks, data, empty
from tests.unit.cuda.seeded_ranks import gathers, relayed, without
from tilescale.compiler import driver, emulator
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.emulator import EmulationError, Emulator
from tilescale.compiler.emulator.async_units import AsyncUnits
from tilescale.compiler.emulator.memory import Block, Memory
from tilescale.compiler.emulator.ranks import Cells, World
from tilescale.compiler.passes import pipeline
from tilescale.compiler.tvm_compat import structural_map, tirx


def pushed(
    M: int,
    N: int,
    K: int,
    world: int,
    part: int = 64,
    threads: int = 128,
    warps: int = 2,
    wide: int = 0,
    depth: int = 8,
) -> Any:
    """C = all ranks' X · W, whose owners put their rows in parts of ``part`` columns, and K elements of a row
    of ``wide`` more, beside their products."""
    rows, cols, deep = -(-M // 64), -(-N // 64), -(-K // part)

    @T.prim_func
    def kernel(
        X: T.SymmTensor((world, M, K + wide), "bfloat16"),
        W: T.Tensor((K, N), "bfloat16"),
        C: T.Tensor((world, M, N), "bfloat16"),
        here: T.Signal((world, rows)),
    ):
        with T.Kernel(2, threads=threads, comm_warps=warps, comm_depth=depth) as b:
            x, w = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((64, 64), "bfloat16")
            acc = T.alloc_fragment((64, 64), "float32")
            with T.Scale("device") as (rank, n):
                for step, i, j in T.Persistent((world, rows, cols), 2, b):
                    owner = (rank + step) % n
                    if step == 0 and j == 0:
                        for hop in T.serial(1, n):
                            for c in T.serial(deep):
                                mine = X[rank, i * 64 : (i + 1) * 64, c * part : (c + 1) * part]
                                T.copy(mine, mine, dst=(rank + hop) % n, signal=here[rank, i], blocking=False)
                    if step > 0:
                        T.wait(here[owner, i], deep)
                    T.clear(acc)
                    for k in T.Pipelined(T.ceildiv(K, 64), num_stages=2):
                        T.copy(X[owner, i * 64, k * 64], x)
                        T.copy(W[k * 64, j * 64], w)
                        T.gemm(x, w, acc)
                    T.copy(acc, C[owner, i * 64, j * 64])

    return kernel


def arguments(M: int, N: int, K: int, world: int, wide: int = 0) -> list[dict[str, Any]]:
    def own(rank: int) -> Any:
        x = np.full((world, M, K + wide), np.nan).astype(data((1,), "bfloat16", 0).dtype)
        x[rank] = data((M, K + wide), "bfloat16", rank)
        return x

    return [
        {
            "X": own(r),
            "W": data((K, N), "bfloat16", 9),
            "C": empty((world, M, N), "bfloat16"),
            "here": np.zeros((world, -(-M // 64)), np.int64),
        }
        for r in range(world)
    ]


def code_of(kernel: Any) -> str:
    return driver.source_text(kernel.trace(), "cuda", "cuda:sm_90a")


@pytest.mark.parametrize(
    ("M", "N", "K", "world", "options", "call"),
    [
        (64, 64, 128, 2, {"part": 128}, "ts::put_run<8, 64>"),
        (64, 64, 128, 3, {"part": 128, "warps": 1}, "ts::put_run<8, 32>"),
        (104, 72, 136, 2, {"part": 136, "warps": 3}, "ts::put_run<8, 96>"),
        (72, 64, 128, 2, {"part": 64}, "ts::put_rows<8, 64>"),
        (64, 64, 128, 2, {"part": 64, "wide": 72}, "ts::put_rows<8, 64>"),
        (64, 128, 64, 2, {"part": 24, "threads": 256}, "ts::put_rows<8, 64>"),
        (64, 64, 128, 2, {"part": 33}, "ts::put_rows<1, 64>"),
        (64, 64, 128, 2, {"part": 128, "depth": 1}, "ts::put_run<8, 64, 1>"),
        (72, 64, 128, 2, {"part": 64, "depth": 2}, "ts::put_rows<8, 64, 2>"),
    ],
)
def test_rows_are_put_beside_products(M: int, N: int, K: int, world: int, options: dict[str, int], call: str):
    kernel = pushed(M, N, K, world, **options)
    code = code_of(kernel)
    assert call in code and "ts::tma_load(&x[" in code
    agree_on_ranks(kernel, arguments(M, N, K, world, options.get("wide", 0)), seeds=3)


def test_vectors_are_as_wide_as_names_show():
    """Bounds that are names, as programs compute them, and the own rank, which is never negative."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64, 128), "bfloat16"),
        X: T.SymmTensor((128, 128), "bfloat16"),
        C: T.Tensor((4, 64, 64), "bfloat16"),
        here: T.Signal((1,)),
    ):
        with T.Kernel(4, threads=128) as b:
            x = T.alloc_shared((64, 64), "bfloat16")
            acc = T.alloc_fragment((64, 64), "float32")
            with T.Scale("device") as (rank, n):
                first, row, col = rank * 64, b // 2 * 32, b % 2 * 64
                to = X[first + row : first + row + 32, col : col + 64]
                T.copy(
                    A[row : row + 32, col : col + 64], to, dst=(rank + 1) % n, signal=here[0], blocking=False
                )
                T.clear(acc)
                for k in T.Pipelined(2, num_stages=2):
                    T.copy(A[0, k * 64], x)
                    T.gemm(x, x, acc)
                T.copy(acc, C[b, 0, 0])
                T.wait(here[0], 4)

    code = code_of(kernel)
    assert "ts::put_rows<8, 64>" in code and "rank >= 0" not in code and "max(" not in code
    args = [
        {
            "A": data((64, 128), "bfloat16", r),
            "X": data((128, 128), "bfloat16", 5 + r),
            "C": empty((4, 64, 64), "bfloat16"),
            "here": np.zeros(1, np.int64),
        }
        for r in range(2)
    ]
    agree_on_ranks(kernel, args, seeds=2)


def test_the_consumer_has_no_part_in_it():
    code = code_of(pushed(64, 64, 128, 2))
    assert code.index("ts::put_r") < code.index(
        "ts::more_registers" if "more_registers" in code else "float acc["
    )
    assert code.count("ts::put_r") == 1 and code.count("ts::signal_add") == 1


def test_the_consumer_waits_for_rounds_alone():
    code = code_of(pushed(64, 64, 128, 2))
    assert code.count("ts::wait<true>") == 2, "the producer's and the communicator's"
    assert code.rindex("ts::wait<true>") < code.index("float acc[")


def told(stored: bool, signalled: bool) -> Any:
    """The consumer reads what others put (or not), and tells of it (or not)."""

    @T.prim_func
    def kernel(
        X: T.SymmTensor((2, 64, 64), "bfloat16"),
        C: T.Tensor((64, 64), "bfloat16"),
        D: T.Tensor((64, 64), "bfloat16"),
        here: T.Signal((2,)),
    ):
        with T.Kernel(1, threads=128):
            x = T.alloc_shared((64, 64), "bfloat16")
            acc = T.alloc_fragment((64, 64), "float32")
            with T.Scale("device") as (rank, n):
                there = X[rank, 0:64, 0:64]
                T.copy(there, there, dst=(rank + 1) % n, signal=here[0], blocking=False)
                T.wait(here[0])
                T.clear(acc)
                for k in T.Pipelined(1, num_stages=2):
                    T.copy(X[(rank + n - 1) % n, 0, k * 64], x)
                    T.gemm(x, x, acc)
                T.copy(acc, C)
                if stored:
                    T.copy(X[(rank + n - 1) % n, 0:64, 0:64], D)
                if signalled:
                    T.signal(here[1])

    return kernel


@pytest.mark.parametrize(("stored", "signalled"), [(False, False), (True, False), (False, True)])
def test_a_consumer_that_reads_or_tells_waits_too(stored: bool, signalled: bool):
    code = code_of(told(stored, signalled))
    assert code.count("ts::wait<true>") == 1 + (stored or signalled), code
    args = [
        {
            "X": arguments(64, 64, 64, 2)[r]["X"],
            "C": empty((64, 64), "bfloat16"),
            "D": empty((64, 64), "bfloat16"),
            "here": np.zeros(2, np.int64),
        }
        for r in range(2)
    ]
    agree_on_ranks(told(stored, signalled), args, seeds=3)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_what_others_put_is_forwarded_behind_its_wait(world: int):
    assert "ts::barrier_sync(14, 64);  // behind the wait" in code_of(relayed(world))
    agree_on_ranks(relayed(world), gathers(world), seeds=4)


@pytest.mark.parametrize("name", ["wait", "sync"])
def test_neither_its_wait_nor_the_barrier_behind_can_go(name: str):
    program, _ = pipeline.run(relayed(3).trace(), target("sm_90a"))
    gone: list[Any] = []
    program = program.with_body(
        structural_map(program.func.body, (tirx.AttrStmt, without(name, "communicator", gone)))
    )
    made = Lowering(program).run()
    assert gone
    with pytest.raises(EmulationError, match="race in X of rank"):
        for seed in range(16):
            emulator.run_ranks(made, program, gathers(3), seed)


def test_the_barrier_in_front_of_its_signal_cannot_go(monkeypatch: pytest.MonkeyPatch):
    kernel, args = pushed(64, 64, 128, 2), arguments(64, 64, 128, 2)
    program, _ = pipeline.run(kernel.trace(), target("sm_90a"))
    from tilescale.compiler.cuda.ops import remote_put

    monkeypatch.setattr(remote_put, "fence", lambda *a: tirx.Evaluate(tirx.IntImm("int32", 0)))
    made = Lowering(program).run()
    with pytest.raises(EmulationError, match="race in X of rank"):
        for seed in range(16):
            emulator.run_ranks(made, program, args, seed)


def test_a_launch_is_gone_when_it_is_over():
    """With what is known of each element, whether or not it is right."""
    program, _ = pipeline.run(relayed(3).trace(), target("sm_90a"))
    broken = program.with_body(
        structural_map(program.func.body, (tirx.AttrStmt, without("wait", "communicator", [])))
    )
    right, wrong = Lowering(program).run(), Lowering(broken).run()
    with nothing_left(World, Cells, Memory, Block, AsyncUnits, Emulator):
        emulator.run_ranks(right, program, gathers(3))
        with pytest.raises(EmulationError):
            for seed in range(16):
                emulator.run_ranks(wrong, broken, gathers(3), seed)


def either(world: int) -> Any:
    """The own rows come from one tensor, those of others from another one, in one pipelined loop."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64, 128), "bfloat16"),
        X: T.SymmTensor((world, 64, 128), "bfloat16"),
        W: T.Tensor((128, 64), "bfloat16"),
        C: T.Tensor((world, 64, 64), "bfloat16"),
        here: T.Signal((world,)),
    ):
        with T.Kernel(1, threads=128):
            x, w = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((64, 64), "bfloat16")
            acc = T.alloc_fragment((64, 64), "float32")
            with T.Scale("device") as (rank, n):
                for hop in T.serial(1, n):
                    to = X[rank, 0:64, 0:128]
                    T.copy(A[0:64, 0:128], to, dst=(rank + hop) % n, signal=here[rank], blocking=False)
                for step in T.serial(n):
                    owner = (rank + step) % n
                    if owner != rank:
                        T.wait(here[owner])
                    T.clear(acc)
                    for k in T.Pipelined(2, num_stages=2):
                        if owner == rank:
                            T.copy(A[0, k * 64], x)
                        else:
                            T.copy(X[owner, 0, k * 64], x)
                        T.copy(W[k * 64, 0], w)
                        T.gemm(x, w, acc)
                    T.copy(acc, C[owner, 0, 0])

    return kernel


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_a_ring_is_filled_from_either_of_two_tensors(arch: str):
    args = [
        {
            "A": data((64, 128), "bfloat16", r),
            "X": empty((3, 64, 128), "bfloat16"),
            "W": data((128, 64), "bfloat16", 9),
            "C": empty((3, 64, 64), "bfloat16"),
            "here": np.zeros(3, np.int64),
        }
        for r in range(3)
    ]
    agree_on_ranks(either(3), args, arch=arch, seeds=4)
    if arch == "sm_90a":
        code = code_of(either(3))
        assert code.count("ts::tma_load(&x[") == 2 and code.count("ts::mbarrier_expect(") == 1


# ---- who makes them, and why


def note_of(kernel: Any, arch: str = "sm_90a") -> str:
    notes = driver.lower(kernel.trace(), f"cuda:{arch}").program.notes
    return next(str(n) for n in notes if "non-blocking" in n)


def test_the_report_says_who_makes_them():
    assert note_of(pushed(64, 64, 128, 2)) == "kernel: 1 non-blocking copy by 2 warps beside the producer"
    assert "own threads" in note_of(pushed(64, 64, 128, 2, warps=0))
    assert "comm_warps=0" in note_of(pushed(64, 64, 128, 2, warps=0))
    assert "no producer fills rings" in note_of(pushed(64, 64, 128, 2), "sm_80")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_blocks_own_threads_can_make_them(arch: str):
    kernel = pushed(64, 64, 128, 2, warps=0)
    agree_on_ranks(kernel, arguments(64, 64, 128, 2), arch=arch, seeds=2)
    assert "ts::put_r" not in driver.source_text(kernel.trace(), "cuda", f"cuda:{arch}")


def written(read: bool) -> Any:
    """Puts what the block itself writes (``read`` aside)."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64, 64), "bfloat16"),
        X: T.SymmTensor((2, 64, 64), "bfloat16"),
        C: T.Tensor((64, 64), "bfloat16"),
        here: T.Signal((1,)),
    ):
        with T.Kernel(1, threads=128):
            x = T.alloc_shared((64, 64), "bfloat16")
            acc = T.alloc_fragment((64, 64), "float32")
            with T.Scale("device") as (rank, n):
                if not read:
                    T.copy(A, X[0, 0, 0])
                T.copy(X[0, 0:64, 0:64], X[1, 0:64, 0:64], dst=1 - rank, signal=here[0], blocking=False)
                T.clear(acc)
                for _ in T.Pipelined(2, num_stages=2):
                    T.copy(A, x)
                    T.gemm(x, x, acc)
                T.copy(acc, C)
                T.wait(here[0])

    return kernel


def test_what_the_block_writes_is_handed_on():
    assert "2 warps" in note_of(written(False)) and "2 warps" in note_of(written(True))
    assert "ts::shared_wait<false>(&handed[0], taken" in code_of(written(False))
    assert "handed" not in code_of(written(True))
    args = [
        {
            "A": data((64, 64), "bfloat16", r),
            "X": data((2, 64, 64), "bfloat16", 5 + r),
            "C": empty((64, 64), "bfloat16"),
            "here": np.zeros(1, np.int64),
        }
        for r in range(2)
    ]
    for read in (False, True):
        agree_on_ranks(written(read), args, seeds=3)


def elsewhere() -> Any:
    """Puts rows of another tensor, which may end elsewhere than the place for them."""

    @T.prim_func
    def kernel(
        A: T.Tensor((100, 64), "bfloat16"),
        X: T.SymmTensor((256, 64), "bfloat16"),
        C: T.Tensor((64, 64), "bfloat16"),
        here: T.Signal((1,)),
    ):
        with T.Kernel(2, threads=128) as b:
            x = T.alloc_shared((64, 64), "bfloat16")
            acc = T.alloc_fragment((64, 64), "float32")
            with T.Scale("device") as (rank, n):
                T.copy(
                    A[b * 64 : b * 64 + 64, 0:64],
                    X[b * 64 : b * 64 + 64, 0:64],
                    dst=1 - rank,
                    signal=here[0],
                    blocking=False,
                )
                T.clear(acc)
                for _ in T.Pipelined(2, num_stages=2):
                    T.copy(A[0:64, 0:64], x)
                    T.gemm(x, x, acc)
                T.copy(acc, C)
                T.wait(here[0], 2)

    return kernel


def of_some_ranks(world: int, there: int) -> Any:
    """Puts rows that only the first ``there`` ranks have: zeros behind them."""

    @T.prim_func
    def kernel(
        A: T.Tensor((there, 64, 64), "bfloat16"),
        X: T.SymmTensor((world, 64, 64), "bfloat16"),
        C: T.Tensor((64, 64), "bfloat16"),
        here: T.Signal((1,)),
    ):
        with T.Kernel(1, threads=128):
            x = T.alloc_shared((64, 64), "bfloat16")
            acc = T.alloc_fragment((64, 64), "float32")
            with T.Scale("device") as (rank, n):
                T.copy(
                    A[rank, 0:64, 0:64],
                    X[rank, 0:64, 0:64],
                    dst=(rank + 1) % n,
                    signal=here[0],
                    blocking=False,
                )
                T.clear(acc)
                for _ in T.Pipelined(2, num_stages=2):
                    T.copy(A[0, 0:64, 0:64], x)
                    T.gemm(x, x, acc)
                T.copy(acc, C)
                T.wait(here[0])

    return kernel


def test_a_part_that_is_not_there_is_zeros():
    assert "ts::put_zeros<8, 64>" in code_of(of_some_ranks(3, 2))
    args = [
        {
            "A": data((2, 64, 64), "bfloat16", r),
            "X": data((3, 64, 64), "bfloat16", 5 + r),
            "C": empty((64, 64), "bfloat16"),
            "here": np.zeros(1, np.int64),
        }
        for r in range(3)
    ]
    agree_on_ranks(of_some_ranks(3, 2), args, seeds=2)


def test_zeros_from_beyond_a_tensor_are_the_threads_part():
    assert "may reach beyond the end of axis 0" in note_of(elsewhere())
