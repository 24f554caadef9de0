"""The gradients of attention on Hopper without a GPU: numbers that come with a ring's tiles, updates by TMA,
products that overlap them."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty
from tests.unit.cuda.test_hopper import edited, lowered
from tilescale.compiler import emulator
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.ops.attention_backward import key_gradients, key_tiles, query_gradients, query_tiles
from tilescale.ops.ranks import ring_backward, ring_gradient_kernels, sequence


def sums(rounds: int, stages: int, dtype: str = "float32", wide: int = 64) -> Any:
    """For each block x: C[n] += Yᵀ·Bₓ with Y = Bₓ·Aₙᵀ - vₙ as bfloat16, and Dₓ = sum of Y·Aₙ."""

    @T.prim_func
    def sums(
        A: T.Tensor((rounds * 64, wide), "bfloat16"),
        V: T.Tensor((rounds, 64), "float32"),
        B: T.Tensor((256, wide), "bfloat16"),
        C: T.Tensor((rounds * 64 - 20, wide), dtype),
        D: T.Tensor((256, wide), "float32"),
    ):
        with T.Kernel(2, threads=256) as bx:
            a, b, v = (
                T.alloc_shared((64, wide), "bfloat16"),
                T.alloc_shared((128, wide), "bfloat16"),
                T.alloc_shared((64,), "float32"),
            )
            x, y, whole = (
                T.alloc_fragment((128, 64), "float32"),
                T.alloc_fragment((128, 64), "bfloat16"),
                T.alloc_shared((128, 64), "bfloat16"),
            )
            c, d = T.alloc_fragment((64, wide), "float32"), T.alloc_fragment((128, wide), "float32")
            T.copy(B[bx * 128, 0], b)
            T.clear(d)
            for n in T.Pipelined(rounds, num_stages=stages):
                T.copy(A[n * 64, 0], a)
                T.copy(V[n, 0], v)
                T.gemm(b, a, x, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(128, 64):
                    x[i, j] = x[i, j] - v[j]
                T.copy(x, y)
                T.copy(y, whole)
                T.gemm(
                    whole,
                    b,
                    c,
                    transpose_A=True,
                    policy=T.GemmWarpPolicy.FullRow if wide < 128 else 0,
                    clear_accum=True,
                )
                T.gemm(y, a, d)
                T.atomic_add(C[n * 64, 0], c)
            T.copy(d, D[bx * 128, 0])

    return sums


def arguments(rounds: int, wide: int = 64) -> dict[str, Any]:
    draw = np.random.default_rng(rounds)  # small integers: any order of sums is exact
    made = {n: draw.integers(-1, 2, (r, wide)).astype("float32") for n, r in (("A", rounds * 64), ("B", 256))}
    made = {n: x.astype(bfloat16) for n, x in made.items()}
    v, c = (
        draw.integers(-1, 2, (rounds, 64)).astype("float32"),
        draw.integers(-3, 4, (rounds * 64 - 20, wide)).astype("float32"),
    )
    return {**made, "V": v, "C": c, "D": empty((256, wide), "float32")}


@pytest.mark.parametrize("stages, wide", [(2, 64), (3, 64), (3, 128)])
@pytest.mark.parametrize("rounds, seed", [(1, 0), (2, 1), (4, 2)])
def test_updates_by_tma(stages: int, wide: int, rounds: int, seed: int):
    """Two rounds, or one late where there is a third stage; both are the sums, whatever lies in the tensor
    before; its rows end inside a tile."""
    kernel = sums(rounds, stages, wide=wide)
    made, program = lowered(kernel)
    text = print_kernel(made).text
    assert "ts::tma_reduce_add" in text and "ts::atomic_add" not in text and program.notes == []
    assert [r.buffers for r in program.schedule.rings] == [["a", "v"], ["b"]], (
        "the numbers come with the tile in front of them"
    )
    agree(kernel, arguments(rounds, wide), seed=seed, exact=True)


def loop_of(text: str) -> str:
    """The consumer's loop, without its comments."""
    inner = [m.group(0) for m in re.finditer(r"\n( *)for \(int n = 0;.*?\n\1}", text, re.S)]
    return next(t for t in inner if "wgmma" in t)


@pytest.mark.parametrize("stages", [2, 3])
def test_threads_meet_twice_a_round(stages: int):
    """For the operand that they hand over and for the tile that TMA reads: the latter's last reads are
    awaited in front of the first meeting."""
    text = loop_of(print_kernel(lowered(sums(6, stages))[0]).text)
    assert text.count("ts::barrier_sync") == 2 and text.count("ts::bulk_wait_read<0>") == 1
    meets, waited, update = (
        text.index("reads whole"),
        text.index("ts::bulk_wait_read"),
        text.index("ts::tma_reduce_add"),
    )
    assert waited < meets < update if stages == 2 else meets < update < waited


def test_what_is_no_update_of_its_own():
    """A tensor that something else touches, a dtype that TMA cannot add to."""

    @T.prim_func
    def kernel(
        A: T.Tensor((512, 64), "bfloat16"),
        B: T.Tensor((64, 64), "bfloat16"),
        C: T.Tensor((64, 64), "float32"),
        D: T.Tensor((64, 64), "float32"),
    ):
        with T.Kernel(2, threads=128) as bx:
            a, b, c = (
                T.alloc_shared((64, 64), "bfloat16"),
                T.alloc_shared((64, 64), "bfloat16"),
                T.alloc_fragment((64, 64), "float32"),
            )
            T.copy(B, b)
            for n in T.Pipelined(4, num_stages=2):
                T.copy(A[bx * 256 + n * 64, 0], a)
                T.gemm(a, b, c, clear_accum=True)
                T.atomic_add(C, c)
                T.atomic_max(D, c)
            T.atomic_add(C[0, 0], 1.0)

    text = print_kernel(lowered(kernel)[0]).text
    assert "ts::tma_load" in text and "ts::tma_reduce" not in text
    agree(
        kernel,
        {
            "A": data((512, 64), "bfloat16", 1),
            "B": data((64, 64), "bfloat16", 2),
            "C": data((64, 64), "float32", 3),
            "D": data((64, 64), "float32", 4),
        },
        seed=1,
    )


FAULTS: dict[str, Any] = {
    "numbers of another round": lambda n, a: (
        (n, [a[0], a[1], a[2], a[3], 0, *a[5:]])
        if n == "ts::tma_load" and len(a) == 5 and "V" in str(a[1])
        else ...
    ),
    "an update's tile is written too soon": lambda n, a: None if n == "ts::bulk_wait_read<0>" else ...,
    "an update stores": lambda n, a: ("ts::tma_store", a) if n == "ts::tma_reduce_add" else ...,
    "no meeting in a round": lambda n, a: None if n == "ts::barrier_sync" else ...,
    "no proxy fence": lambda n, a: None if n == "ts::fence_proxy_async" else ...,
}


def shows(kernel: Any, args: dict[str, Any], fault: str) -> bool:
    """Whether some schedule shows a fault: wrong sums, or an error of the emulator."""
    made, program = lowered(kernel)
    right = emulator.run(made, program, {k: v.copy() for k, v in args.items()})
    broken = edited(made, FAULTS[fault])
    for seed in range(6):
        try:
            got = emulator.run(broken, program, {k: v.copy() for k, v in args.items()}, seed)
        except emulator.EmulationError:
            return True
        if not all((got[n] == right[n]).all() for n in "CD"):
            return True
    return False


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, stages: int):
    assert shows(sums(4, stages), arguments(4), fault)


COMPILED: list[tuple[Any, dict[str, Any]]] = [
    *[(key_gradients, {"dim": dim, "added": True, "causal": causal, "ragged": ragged, **key_tiles(dim, True)})
      for dim in (64, 128) for causal, ragged in ((False, True), (True, False))],
    *[(key_gradients, {"dim": dim, **key_tiles(dim, False)}) for dim in (64, 128, 256)],
    (query_gradients, {"dim": 128, "TILE": 64, **query_tiles(128, 1024, 16, 132)}),
]  # fmt: skip


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
@pytest.mark.parametrize("factory, constants", COMPILED, ids=lambda v: getattr(v, "__name__", str(v)))
def test_products_stay_in_flight(factory: Any, constants: dict[str, Any]):
    given = {
        "heads": 32,
        "kv_heads": 8,
        "packed": False,
        "dtype": "bfloat16",
        "scale": 0.1,
        "causal": False,
        **constants,
    }
    made = toolchain.compile_cubin(print_kernel(lowered(factory(**given))[0]), "sm_90a")
    assert made.resources.spill_stores == 0 and made.resources.stack == 0
    assert not made.serialised, made.messages


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
@pytest.mark.parametrize("causal, rows", [(True, 131072), pytest.param(False, 8191, marks=pytest.mark.slow)])
def test_products_of_long_sequences_stay_in_flight(causal: bool, rows: int):
    """Also beside warps that pull, whose own registers may spill."""
    given = sequence.Operands(False, 1, 32, 8, 128, sequence.Chunks(rows, 4, 2), 0.1)
    how = ring_backward.choose(128, given.chunks.each, 32)
    what = {"heads": 32, "kv_heads": 8, "dim": 128, "batch": 1, "rows": rows, "world": 4, "parts": 2}
    what |= {"packed": False, "dtype": "bfloat16", "scale": 0.1, "causal": causal}
    by_query = {**ring_backward.by_queries(how, given), "tile": how.keys.BM}
    by_key = {**asdict(how.keys), "high": how.high, "longest_first": False}
    for factory, more in (
        (ring_gradient_kernels.query_gradients, by_query),
        (ring_gradient_kernels.key_gradients, by_key),
    ):
        made = toolchain.compile_cubin(print_kernel(lowered(factory(**what, **more))[0]), "sm_90a")
        assert not made.serialised, made.messages
    assert made.resources.spill_stores == 0  # of the keys', beside which no warps pull
