"""Blocks of more threads than warpgroups can share their products' rows among: some compute, the others'
place is the producer's, and the program is the same. A program that names its threads keeps them all, and
warns."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale.language as T
from tests.gpu.gemms import gemm
from tests.unit.cuda.emulated import agree, data, empty, lowered
from tilescale.compiler.advice import Advice
from tilescale.compiler.cuda.printer import print_kernel

#: (M, N, K), options, threads that compute, seed of the schedule
CASES = [
    ((130, 264, 136), {"BM": 128, "BN": 256, "stages": 3}, 256, 0),
    (
        (130, 136, 136),
        {"BM": 128, "BN": 128, "stages": 3, "dtype": "float16", "out": "float32", "trans_b": True},
        256,
        1,
    ),
    ((70, 264, 136), {"BM": 64, "BN": 256, "stages": 2}, 256, 2),
    ((70, 72, 200), {"BM": 64, "BN": 64, "stages": 3}, 128, 3),
    ((200, 136, 136), {"BM": 192, "BN": 128, "stages": 2, "dtype": "float16"}, 384, 4),
    (
        (130, 136, 208),
        {"BM": 128, "BN": 128, "BK": 128, "stages": 2, "trans_b": True, "dtype": "int8", "out": "int32"},
        256,
        5,
    ),
    ((300, 264, 136), {"BM": 128, "BN": 256, "stages": 3, "blocks": 2, "panel": 2}, 256, 6),
    ((260, 136, 136), {"BM": 256, "BN": 128, "stages": 2, "threads": 512}, 256, 7),
    ((70, 72, 136), {"BM": 64, "BN": 64, "stages": 2, "threads": 192}, 128, 8),
]


def scheduled(kernel: Any) -> tuple[Any, Any, str]:
    made = lowered(kernel)
    return made.program, made.kernel, print_kernel(made.kernel).text


@pytest.mark.parametrize("shape, options, computing, seed", CASES, ids=str)
def test_as_many_threads_compute_as_share_the_products(
    shape: tuple[int, int, int], options: dict[str, Any], computing: int, seed: int
):
    options = {"threads": 384, **options}
    kernel = gemm(*shape, **options)
    program, made, text = scheduled(kernel)
    assert program.launch.threads == computing and all(word in text for word in ("ts::tma_load(", "wgmma"))
    assert not [n for n in program.notes if isinstance(n, Advice)]
    assert made.threads <= options["threads"] or computing == 384
    said = f"gemm computes on {computing} of {options['threads']} threads"
    assert bool(program.notes) == (computing < options["threads"]) and all(said in n for n in program.notes)
    M, N, K = shape
    dtype = options.get("dtype", "bfloat16")
    b = data((N, K) if options.get("trans_b") else (K, N), dtype, 2)
    agree(
        kernel,
        {"A": data((M, K), dtype, 1), "B": b, "C": empty((M, N), options.get("out", dtype))},
        seed=seed,
    )


def test_it_is_the_code_of_a_block_of_two_warpgroups():
    options = {"BM": 128, "BN": 256, "stages": 3}
    (_, three, text), (_, two, other) = (
        scheduled(gemm(512, 512, 512, threads=n, **options)) for n in (384, 256)
    )
    assert text == other and three.threads == two.threads == 384


def attention_like(dtype: str, scoped: str = "") -> Any:
    """Two products with arithmetic between and behind them, on three warpgroups. ``scoped``: how the program
    names its threads."""
    M, N, D = 128, 200, 64

    @T.prim_func
    def wide(
        Q: T.Tensor((M, D), dtype),
        K: T.Tensor((N, D), dtype),
        V: T.Tensor((N, D), dtype),
        bias: T.Tensor((D,), "float32"),
        O: T.Tensor((M, D), dtype),
    ):
        with T.Kernel(T.ceildiv(M, 128), threads=384) as bx:
            q, k, v = (
                T.alloc_shared((128, D), dtype),
                T.alloc_shared((64, D), dtype),
                T.alloc_shared((64, D), dtype),
            )
            s, p, acc = (
                T.alloc_fragment((128, 64), "float32"),
                T.alloc_fragment((128, 64), dtype),
                T.alloc_fragment((128, D), "float32"),
            )
            top, total = T.alloc_fragment((128,), "float32"), T.alloc_fragment((128,), "float32")
            T.copy(Q[bx * 128, 0], q)
            T.clear(acc)
            T.clear(total)
            for n in T.Pipelined(T.ceildiv(N, 64), num_stages=2):
                T.copy(K[n * 64, 0], k)
                T.copy(V[n * 64, 0], v)
                T.clear(s)
                T.gemm(q, k, s, transpose_B=True)
                for i, j in T.Parallel(128, 64):
                    p[i, j] = T.max(s[i, j], 0) * 0.125
                T.reduce_max(s, top, dim=1)
                for i in T.Parallel(128):
                    total[i] += top[i]
                T.gemm(p, v, acc)
            for i, j in T.Parallel(128, D):
                acc[i, j] = acc[i, j] + bias[j] * total[i]
            T.copy(acc, O[bx * 128, 0])
            if scoped == "warpgroup":
                with T.Scale("warpgroup") as (w, _groups):
                    with T.Scale("thread") as (t, _threads):
                        if t == 0:
                            T.device_assert(w < 3, "three warpgroups")
            if scoped == "barrier":
                arrived = T.alloc_barrier(384)
                T.barrier_arrive(arrived[0])

    return wide


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_arithmetic_between_and_behind_products(dtype: str):
    kernel = attention_like(dtype)
    program, _, text = scheduled(kernel)
    assert program.launch.threads == 256 and all(
        word in text for word in ("ts::tma_load(", "wgmma", "more_registers<240>")
    )
    args = {
        name: data((n, 64), dtype, seed)
        for seed, (name, n) in enumerate({"Q": 128, "K": 200, "V": 200}.items())
    }
    agree(kernel, args | {"bias": data((64,), "float32", 3), "O": empty((128, 64), dtype)}, seed=1)


@pytest.mark.parametrize("scoped", ["warpgroup", "barrier"])
def test_a_program_that_names_its_threads_keeps_them(scoped: str):
    program, _, text = scheduled(attention_like("float16", scoped))
    (said,) = [n for n in program.notes if isinstance(n, Advice)]
    assert program.launch.threads == 384 and "wgmma" not in text
    assert "T.gemm of 128 × 64 × 64 on 384 threads" in said and said.hint.startswith(
        "threads=256, whose 2 warpgroups share the rows"
    )
