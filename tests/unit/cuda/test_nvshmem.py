"""TILESCALE_REMOTE=nvshmem: the same results as by addresses, with puts that are as late as the library may make
them; what is missing is found or refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import same
from tests.unit.cuda.seeded_ranks import pulled, relayed
from tests.unit.cuda.test_emulated_ranks import f32
from tilescale.compiler import emulator
from tilescale.compiler.checks.run import launch
from tilescale.compiler.cuda import nvshmem, toolchain
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.emulator import EmulationError
from tilescale.compiler.gpu.kernel import ThreadKernel
from tilescale.compiler.passes import pipeline
from tilescale.compiler.tvm_compat import structural_map, tirx
from tilescale.errors import CommError, TileError, TileSyntaxError

RANKS = 3


def zeros(shape: tuple[int, ...]) -> Any:
    return np.zeros(shape, "float32")


def lowered(kernel: Any) -> tuple[ThreadKernel, Any]:
    program, _ = pipeline.run(kernel.trace(), target("sm_90a", "nvshmem"))
    return Lowering(program).run(), program


def agree(kernel: Any, args: list[dict[str, Any]], seeds: int = 6) -> str:
    """As the simulator does, under several orders and delays; the code."""
    want = launch(kernel, len(args), {name: [a[name] for a in args] for name in args[0]}).arrays
    made, program = lowered(kernel)
    for seed in range(seeds):
        for rank, arrays in enumerate(emulator.run_ranks(made, program, args, seed)):
            for name, array in arrays.items():
                if name in ("here", "box"):
                    continue
                same(array, want[rank][name], f"{name} of rank {rank}", False)
    return print_kernel(made).text


def ring(blocks: int = 1, blocking: bool = True) -> Any:
    """Each block puts its rows to the next rank with a signal, and passes on what it got."""

    @T.prim_func
    def kernel(
        A: T.Tensor((48, 64), "float32"),
        B: T.SymmTensor((48, 64), "float32"),
        C: T.Tensor((48, 64), "float32"),
        here: T.Signal((blocks,)),
    ):
        with T.Kernel(blocks, threads=128) as b:
            tile = T.alloc_shared((48 // blocks, 64), "float32")
            first = b * (48 // blocks)
            with T.Scale("device") as (rank, n):
                T.copy(A[first, 0], tile)
                T.copy(tile, B[first, 0], dst=(rank + 1) % n, signal=here[b])
                T.wait(here[b])
                T.copy(B[first : first + 48 // blocks, 0:64], C[first : first + 48 // blocks, 0:64])

    return kernel


def arguments(blocks: int) -> list[dict[str, Any]]:
    return [
        {"A": f32((48, 64), r), "B": zeros((48, 64)), "C": zeros((48, 64)), "here": np.zeros(blocks, "int64")}
        for r in range(RANKS)
    ]


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_put_with_its_signal(blocks: int):
    code = agree(ring(blocks), arguments(blocks))
    assert "#define TS_NVSHMEM" in code and code.count("ts::nvshmem_put(") == 1
    assert (
        code.index("ts::nvshmem_put(")
        < code.index("ts::nvshmem_quiet();")
        < code.index("ts::signal_add<true>")
    )


def without(kernel: ThreadKernel, name: str) -> ThreadKernel:
    """The kernel with one call left out everywhere."""
    nothing = tirx.Evaluate(tirx.IntImm("int32", 0))
    body = structural_map(kernel.func.body, (tirx.Evaluate, lambda e: nothing if name in str(e) else e))
    return dataclasses.replace(kernel, func=kernel.func.with_body(body))


def test_a_missing_quiet_is_found():
    made, program = lowered(ring())
    assert "nvshmem_quiet" in str(made.func.body)
    wrong = without(made, "nvshmem_quiet")
    assert "nvshmem_quiet" not in str(wrong.func.body)
    for seed in range(6):
        with pytest.raises(EmulationError, match="race in B|a put by NVSHMEM is under way"):
            emulator.run_ranks(wrong, program, arguments(1), seed)


def test_scratch_is_not_used_again_before_a_quiet():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float32"), B: T.SymmTensor((4, 64, 64), "float32")):
        with T.Kernel(1, threads=128), T.Scale("device") as (rank, n):
            for r in T.serial(n):
                T.copy(A, B[rank, 0:64, 0:64], dst=r)
            T.barrier()

    args = [{"A": f32((64, 64), r), "B": zeros((4, 64, 64))} for r in range(RANKS)]
    agree(kernel, args)
    made, program = lowered(kernel)
    with pytest.raises(EmulationError, match="scratch is used again"):
        emulator.run_ranks(without(made, "nvshmem_quiet"), program, args)


def test_pulls_and_parts_that_reach_beyond():
    @T.prim_func
    def kernel(X: T.SymmTensor((50, 60), "float32"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(2, threads=128) as b:
            tile = T.alloc_fragment((32, 64), "float32")
            with T.Scale("device") as (rank, n):
                T.copy(X[b * 32, 0], tile, src=(rank + 1) % n)
                T.copy(tile, C[b * 32, 0])

    args = [{"X": f32((50, 60), r), "C": zeros((64, 64))} for r in range(RANKS)]
    assert "ts::nvshmem_get(" in agree(kernel, args)


def test_puts_that_reach_beyond():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float32"), X: T.SymmTensor((50, 60), "float32")):
        with T.Kernel(2, threads=128) as b:
            tile = T.alloc_fragment((32, 64), "float32")
            with T.Scale("device") as (rank, n):
                T.copy(A[b * 32, 0], tile)
                T.copy(tile, X[b * 32, 0], dst=(rank + 1) % n)

    agree(kernel, [{"A": f32((64, 64), r), "X": zeros((50, 60))} for r in range(RANKS)])


@pytest.mark.parametrize("make", [pulled, relayed])
def test_copies_that_need_not_block_are_made_by_the_block(make: Any):
    kernel = make(RANKS)
    args = []
    for r in range(RANKS):
        x = f32((RANKS, 64, 64), r).astype("bfloat16")
        w = f32((64, 64), 9 + r).astype("bfloat16")
        args.append({"X": x, "W": w, "C": np.zeros_like(x), "here": np.zeros(RANKS, "int64")})
    code = agree(kernel, args, seeds=4)
    assert "ts::put_r" not in code and "ts::nvshmem_" in code


def test_collectives_and_barriers():
    @T.prim_func
    def kernel(A: T.Tensor((64, 32), "float32"), G: T.SymmTensor((RANKS, 64, 32), "float32"),
               S: T.Tensor((64, 32), "float32")):  # fmt: skip
        with T.Kernel(1, threads=128):
            mine = T.alloc_fragment((64, 32), "float32")
            with T.Scale("device") as (rank, n):
                T.all_gather(A, G[0:n, 0:64, 0:32])
                T.barrier()
                T.copy(G[(rank + 1) % n, 0:64, 0:32], mine)
                T.copy(mine, S)

    args = [{"A": f32((64, 32), r), "G": zeros((RANKS, 64, 32)), "S": zeros((64, 32))} for r in range(RANKS)]
    assert "ts::barrier<true>" in agree(kernel, args)


def test_signals_are_set_and_added():
    @T.prim_func
    def kernel(out: T.Tensor((2,), "int32"), here: T.Signal((2,))):
        with T.Kernel(1, threads=32), T.Scale("device") as (rank, n):
            T.signal(here[0], value=5, op="set", dst=(rank + 1) % n)
            T.signal(here[1], value=2, dst=(rank + 1) % n)
            T.wait(here[0], value=5, cmp="eq")
            T.wait(here[1], value=2)
            T.fill(out, 1)

    agree(kernel, [{"out": np.zeros(2, "int32"), "here": np.zeros(2, "int64")} for _ in range(RANKS)])


def test_atomic_updates_of_a_rank():
    """Of counters of each width, with and without the value before; each rank's is one of them."""

    @T.prim_func
    def kernel(
        X: T.SymmTensor((2,), "int32"), Y: T.SymmTensor((1,), "float32"), Z: T.SymmTensor((2,), "float16"),
        before: T.SymmTensor((8,), "int32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=32), T.Scale("device") as (rank, n):
            place = T.atomic_add(X[1], 3, dst=(rank + 1) % n, return_prev=True)
            T.put(place, before[rank], dst=(rank + 1) % n)
            T.atomic_add(Y[0], 0.5, dst=(rank + 2) % n)
            T.atomic_max(Z[1], T.cast(rank + 1, "float16"), dst=0)
            T.barrier()

    args = [
        {
            "X": np.zeros(2, "int32"),
            "Y": zeros((1,)),
            "Z": np.zeros(2, "float16"),
            "before": np.zeros(8, "int32"),
        }
        for _ in range(RANKS)
    ]
    code = agree(kernel, args)
    assert code.index("#define TS_NVSHMEM") < code.index("#include <ts/ts.cuh>") < code.index("system_add(")


def test_greatest_and_least_signals():
    @T.prim_func
    def kernel(out: T.Tensor((1,), "int32"), here: T.Signal((2,))):
        with T.Kernel(1, threads=32), T.Scale("device") as (rank, n):
            T.signal(here[0], value=rank + 1, op="max", dst=0)
            T.signal(here[1], value=-5 - rank, op="min", dst=0)
            if rank == 0:
                T.wait(here[0], value=n)
                T.wait(here[1], value=-4 - n, cmp="le")
            T.fill(out, 1)

    agree(kernel, [{"out": np.zeros(1, "int32"), "here": np.zeros(2, "int64")} for _ in range(RANKS)])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_sums_into_a_rank(dtype: str):
    """Element by element, by the library's atomic updates: small numbers, whose sums are exact."""

    @T.prim_func
    def kernel(A: T.Tensor((16, 64), dtype), X: T.SymmTensor((16, 64), dtype)):
        with T.Kernel(1, threads=128), T.Scale("device") as (rank, n):
            tile = T.alloc_fragment((16, 64), dtype)
            T.copy(A, tile)
            for r in T.serial(n):
                T.copy(tile, X, dst=r, op="add")
            T.barrier()

    whole = np.arange(16 * 64).reshape(16, 64) % 7
    args = [{"A": (whole + r).astype(dtype), "X": np.zeros((16, 64), dtype)} for r in range(RANKS)]
    code = agree(kernel, args, seeds=2)
    assert "ts::system_red_add" in code and "remote_red_add" not in code


def test_copies_by_parts_of_a_block():
    """Warps' tiles of two sizes, threads' numbers and the block's rows, each in scratch of its own."""

    @T.prim_func
    def kernel(
        A: T.Tensor((16, 96), "float32"), X: T.SymmTensor((16, 96), "float32"),
        Y: T.SymmTensor((6, 8), "float32"), Z: T.SymmTensor((128,), "int32"),
        W: T.SymmTensor((16, 96), "float32"), C: T.Tensor((4, 96), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=128), T.Scale("device") as (rank, n):
            with T.Scale("warp") as (w, of):
                row, few = T.alloc_fragment((96,), "float32"), T.alloc_fragment((8,), "float32")
                for i in T.serial(w, 16, step=of):
                    T.copy(A[i, 0], row)
                    T.copy(row, X[i, 0], dst=(rank + 1) % n)
                    if i % 3 == 0:
                        T.copy(A[i, 8], few)
                        T.copy(few, Y[i // 3, 0], dst=(rank + 2) % n)
            with T.Scale("thread") as (t, _):
                T.put(t * 2 + rank, Z[t], dst=(rank + 1) % n)
            T.copy(A, W, dst=(rank + 1) % n)
            T.barrier()
            with T.Scale("warp") as (w, of):
                mine = T.alloc_fragment((96,), "float32")
                T.copy(W[w * 4, 0:96], mine, src=(rank + 1) % n)
                T.copy(mine, C[w, 0])

    args = [
        {
            "A": f32((16, 96), r),
            "X": zeros((16, 96)),
            "Y": zeros((6, 8)),
            "Z": np.zeros(128, "int32"),
            "W": zeros((16, 96)),
            "C": zeros((4, 96)),
        }
        for r in range(RANKS)
    ]
    code = agree(kernel, args, seeds=3)
    # the block's 16 × 96 × 4 bytes, four warps' 512, 128 threads' 256
    assert f", {16 * 96 * 4 + 4 * 512 + 128 * 256}, " in code
    made, program = lowered(kernel)
    for seed in range(3):
        with pytest.raises(EmulationError, match="race in|under way"):
            emulator.run_ranks(without(made, "nvshmem_quiet"), program, args, seed)


def test_what_is_not_there_is_refused():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float32"), X: T.SymmTensor((64, 64), "float32"), k: T.int32):
        with T.Kernel(1, threads=128), T.Scale("device") as (rank, n):
            T.copy(A[0:k, 0:64], X[0:k, 0:64], dst=(rank + 1) % n)

    with pytest.raises(TileSyntaxError, match="a copy of a part of X|the copy of a part of X"):
        lowered(kernel)


def test_pytorchs_memory_is_refused(monkeypatch: pytest.MonkeyPatch):
    from tilescale import comm

    monkeypatch.setenv("TILESCALE_REMOTE", "nvshmem")
    monkeypatch.setenv("TILESCALE_HEAP", "symm_mem")
    with pytest.raises(CommError, match="symmetric memory by PyTorch"):
        comm._memory()


def test_it_decides_the_cubin(monkeypatch: pytest.MonkeyPatch):
    if toolchain.find_nvcc() is None:
        pytest.skip("this machine has no nvcc")
    before = toolchain.fingerprint("sm_90a")
    monkeypatch.setenv("TILESCALE_REMOTE", "nvshmem")
    assert toolchain.fingerprint("sm_90a") != before


def test_kernels_are_linked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Compiled for sm_90a and linked with the library's device calls; the wrappers are compiled once."""
    if toolchain.find_nvcc() is None:
        pytest.skip("this machine has no nvcc")
    try:
        nvshmem.home()
    except TileError:
        pytest.skip("this machine has no NVSHMEM: NVSHMEM_HOME, or pip install nvidia-nvshmem-cu13")
    monkeypatch.setenv("TILESCALE_CACHE_DIR", str(tmp_path))
    printed = print_kernel(lowered(ring())[0])
    made = toolchain.compile_cubin(printed, "sm_90a")
    whole = nvshmem.linked(made, "sm_90a")
    assert len(whole.code) > len(made.code) and b"nvshmemi_device_state_d" in whole.code
    (wrappers,) = (tmp_path / "nvshmem").iterdir()
    stamp = wrappers.stat().st_mtime_ns
    nvshmem.linked(made, "sm_90a")
    assert wrappers.stat().st_mtime_ns == stamp
