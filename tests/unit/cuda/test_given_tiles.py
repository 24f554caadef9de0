"""Tiles of shared memory that the author fills and copies or adds to a tensor: TMA reads them where they lie."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree
from tests.unit.cuda.test_attention_backward import FAULTS, arguments, loop_of, shows
from tests.unit.cuda.test_hopper import lowered
from tilescale.compiler import emulator
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.tvm_compat import EXTERN_CALLS, ir, structural_map, tirx
from tilescale.layout import make_linear_layout

WIDE = 64


def sums(rounds: int, loop: str = "tile", also: str = "") -> Any:
    """For each block x: C[n] += Yᵀ·Bₓ with Y = Bₓ·Aₙᵀ - vₙ as bfloat16, and Dₓ += sum of Y·Aₙ. ``loop``: by
    what C is updated. ``also``: what else becomes of the tile that C takes."""

    @T.prim_func
    def sums(
        A: T.Tensor((rounds * 64, WIDE), "bfloat16"),
        V: T.Tensor((rounds, 64), "float32"),
        B: T.Tensor((256, WIDE), "bfloat16"),
        C: T.Tensor((rounds * 64 - 20, WIDE), "float32"),
        D: T.Tensor((256, WIDE), "float32"),
    ):
        with T.Kernel(2, threads=256) as bx:
            a, b = T.alloc_shared((64, WIDE), "bfloat16"), T.alloc_shared((128, WIDE), "bfloat16")
            v, whole = T.alloc_shared((64,), "float32"), T.alloc_shared((128, 64), "bfloat16")
            x, y = T.alloc_fragment((128, 64), "float32"), T.alloc_fragment((128, 64), "bfloat16")
            c, d = T.alloc_fragment((64, WIDE), "float32"), T.alloc_fragment((128, WIDE), "float32")
            given, last = T.alloc_shared((64, WIDE), "float32"), T.alloc_shared((128, WIDE), "float32")
            if also == "laid":
                T.annotate_layout({given: make_linear_layout(given)})
            T.copy(B[bx * 128, 0], b)
            T.clear(d)
            for n in T.Pipelined(rounds, num_stages=2):
                T.copy(A[n * 64, 0], a)
                T.copy(V[n, 0], v)
                T.gemm(b, a, x, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(128, 64):
                    x[i, j] = x[i, j] - v[j]
                T.copy(x, y)
                T.copy(y, whole)
                T.gemm(whole, b, c, transpose_A=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                T.gemm(y, a, d)
                if also == "inside":
                    inner = T.alloc_shared((64, WIDE), "float32")
                    T.copy(c, inner)
                    T.atomic_add(C[n * 64, 0], inner)
                elif loop == "tile":
                    T.copy(c, given)
                    T.atomic_add(C[n * 64, 0], given)
                else:
                    for i, j in T.Parallel(64, WIDE):
                        T.atomic_add(C[n * 64 + i, j], c[i, j])
                if also == "read":
                    for i, j in T.Parallel(128, WIDE):
                        d[i, j] += given[i % 64, j] * 0
            T.copy(d, last)
            T.atomic_add(D[bx * 128, 0], last)

    return sums


def given_arguments(rounds: int) -> dict[str, Any]:
    made = arguments(rounds)
    return {**made, "D": np.arange(256 * WIDE, dtype="float32").reshape(256, WIDE) % 7}


def read_by_tma(text: str) -> set[str]:
    return set(re.findall(r"ts::tma_reduce_add\(\w+, &(\w+)\[", text))


@pytest.mark.parametrize("loop", ["tile", "threads"])
@pytest.mark.parametrize("rounds, seed", [(1, 0), (2, 1), (4, 2)])
def test_tma_reads_them(loop: str, rounds: int, seed: int):
    """The last one takes the bytes of the loop's. Threads may update a tensor in front of all of TMA's."""
    kernel = sums(rounds, loop)
    made, program = lowered(kernel)
    text = print_kernel(made).text
    assert read_by_tma(text) == ({"given", "last"} if loop == "tile" else {"last"}) and program.notes == []
    assert ("ts::red_add" in text) == (loop == "threads")
    agree(kernel, given_arguments(rounds), seed=seed, exact=True)


def test_threads_meet_twice_a_round():
    """Neither for the reads of the round before, which are awaited in front of a barrier that is there."""
    text = loop_of(print_kernel(lowered(sums(6))[0]).text)
    assert text.count("ts::barrier_sync") == 2 and text.count("ts::bulk_wait_read<0>") == 1
    assert text.index("ts::bulk_wait_read") < text.index("reads whole") < text.index("ts::tma_reduce_add")


@pytest.mark.parametrize("also", ["read", "laid", "inside"])
def test_tiles_that_something_else_needs_stay_the_threads(also: str):
    """The other updates are theirs then, too: each releases what came before it."""
    kernel = sums(2, also=also)
    text = print_kernel(lowered(kernel)[0]).text
    assert read_by_tma(text) == {"last"} and "ts::red_add4_f32(" in text
    agree(kernel, given_arguments(2), exact=True)


@pytest.mark.parametrize("fault", [f for f in FAULTS if f != "numbers of another round"])
def test_faults_are_found(fault: str):
    assert shows(sums(4), given_arguments(4), fault)


def results(stay: int, also: str = "", kind: str = "float16") -> Any:
    """C = A·B by blocks that take tiles of rows in turn, through a tile that the author fills."""

    @T.prim_func
    def results(
        A: T.Tensor((250, 96), "float16"), B: T.Tensor((96, WIDE), "float16"), C: T.Tensor((250, WIDE), kind)
    ):
        with T.Kernel(stay, threads=128) as bx:
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, WIDE), "float16")
            c, out = T.alloc_fragment((64, WIDE), "float32"), T.alloc_shared((64, WIDE), "float16")
            for tile in T.serial(bx, 4, step=stay):
                T.clear(c)
                for k in T.Pipelined(3, num_stages=2):
                    T.copy(A[tile * 64, k * 32], a)
                    T.copy(B[k * 32, 0], b)
                    T.gemm(a, b, c)
                T.copy(c, out)
                if also == "changed":
                    for i, j in T.Parallel(64, WIDE):
                        out[i, j] = out[i, j] * 2
                T.copy(out, C[tile * 64, 0])
                if also == "others":
                    for i, j in T.Parallel(64, WIDE):
                        if tile == 0 and i < 3:
                            C[i, j] = T.cast(1.0, kind)

    return results


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("stay", [1, 3])
@pytest.mark.parametrize("also", ["", "others", "changed"])
def test_results_that_the_author_puts_into_a_tile(also: str, stay: int, seed: int):
    """Rows behind the tensor's last one are left out. By threads where the tile is read besides."""
    kernel = results(stay, also)
    text = print_kernel(lowered(kernel)[0]).text
    assert ("ts::tma_store(C_map, &out[" in text) == (also != "changed"), text
    rng = np.random.default_rng(seed)
    args = {"A": rng.standard_normal((250, 96)), "B": rng.standard_normal((96, WIDE))}
    args = {n: x.astype(np.float16) for n, x in args.items()}
    agree(kernel, args | {"C": np.full((250, WIDE), np.nan, np.float16)}, seed=seed)


def test_a_tile_of_another_dtype_is_stored_by_threads():
    assert "tma_store" not in print_kernel(lowered(results(1, kind="float32"))[0]).text


@pytest.mark.parametrize("gone", ["fence_proxy_async", "bulk_wait_read<0>", "barrier_sync"])
def test_what_orders_results_is_needed(gone: str):
    """The tile is filled in front of TMA's read, and refilled behind it."""
    made, program = lowered(results(1))
    rng = np.random.default_rng(5)
    args = {"A": rng.standard_normal((250, 96)), "B": rng.standard_normal((96, WIDE))}
    args = {n: x.astype(np.float16) for n, x in args.items()} | {
        "C": np.full((250, WIDE), np.nan, np.float16)
    }

    def without(s: Any) -> Any:
        call = s.value
        here = isinstance(call, ir.Call) and call.op.name in EXTERN_CALLS
        return tirx.Evaluate(tirx.IntImm("int32", 0)) if here and gone in str(call.args[0].value) else s

    body = structural_map(made.func.body, (tirx.Evaluate, without))
    broken = replace(made, func=tirx.PrimFunc(list(made.func.params), body))
    with pytest.raises(emulator.EmulationError):
        emulator.run(broken, program, args)
