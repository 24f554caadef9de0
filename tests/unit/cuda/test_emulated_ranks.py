"""Launches of several ranks on the emulated GPU: the examples' results, and what is found when an order is
missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.gpu.ranks import module
from tests.unit.cuda.emulated import agree, agree_on_ranks, data, empty
from tilescale.compiler import emulator
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.emulator import EmulationError
from tilescale.compiler.passes import pipeline
from tilescale.compiler.tvm_compat import structural_map, tirx
from tilescale.ops.ranks import ring_gradient_kernels, ulysses_kernels
from tilescale.ops.ranks.sequence import Chunks
from tilescale.packets import length

#: what lies in symmetric memory for gradients of attention, and its heads
OF_CHUNKS = (("K", 1), ("V", 1), ("Qs", 2), ("dOs", 2))
#: what a rank hands out for gradients by head, and its heads
OF_HEADS = (("Q", 4), ("K", 2), ("V", 2), ("O", 4), ("dO", 4))


def example(name: str, factory: str, *args: Any, **options: Any) -> Any:
    return getattr(module(name), factory).__wrapped__(*args, **options)


def zeros(*shape: int) -> Any:
    return np.zeros(shape, np.int64)


def f32(shape: Any, seed: int = 0) -> Any:
    return data(shape, "float32", seed)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ring_shift(ranks: int):
    args = [
        {"A": f32((600,), r), "inbox": f32((600,), 9), "arrived": zeros(3), "B": empty((600,), "float32")}
        for r in range(ranks)
    ]
    agree_on_ranks(example("05_ring_shift", "kernel", 600, block=256), args)


def test_all_gather_as_one_operation_and_put_by_put():
    args = [{"A": data((500,), "bfloat16", r), "G": empty((2, 500), "bfloat16")} for r in range(2)]
    agree_on_ranks(example("06_all_gather", "collective", 500, 2, block=256), args)
    agree_on_ranks(
        example("06_all_gather", "puts", 500, 2, block=256), [{**a, "arrived": zeros(2)} for a in args]
    )


def test_all_reduce_in_one_shot_and_in_two():
    args = [
        {
            "A": data((500,), "bfloat16", r),
            "parts": empty((2, 500), "bfloat16"),
            "arrived": zeros(2),
            "B": empty((500,), "bfloat16"),
        }
        for r in range(2)
    ]
    agree_on_ranks(example("07_all_reduce", "one_shot", 500, 2, block=256), args)
    two = [
        {
            "A": a["A"],
            "parts": empty((2, 250), "bfloat16"),
            "sums": empty((2, 250), "bfloat16"),
            "given": zeros(1),
            "done": zeros(1),
            "B": a["B"],
        }
        for a in args
    ]
    agree_on_ranks(example("07_all_reduce", "two_shot", 500, 2, block=256), two)


@pytest.mark.parametrize("seed", range(3))
def test_slots_taken_by_atomic_updates(seed: int):
    """Each row of an expert is one choice of one token, whoever came first."""
    tokens, topk, local, n = 5, 2, 2, 2
    choice = np.stack(
        [
            np.random.default_rng(r).permuted(np.tile(np.arange(n * local), (tokens, 1)), axis=1)[:, :topk]
            for r in range(n)
        ]
    )
    given = [
        {
            "X": f32((tokens, 8), r),
            "owner": (choice[r] // local).astype(np.int32),
            "which": (choice[r] % local).astype(np.int32),
            "count": np.zeros(local, np.int32),
            "inbox": empty((local, n * tokens, 8), "float32"),
            "origin": np.zeros((local, n * tokens), np.int32),
        }
        for r in range(n)
    ]
    kernel = example("13_expert_slots", "dispatch", tokens, topk, 8, local, n * tokens, blocks=3)
    program, _ = pipeline.run(kernel.trace(), target("sm_90a"))
    seen = []
    for rank, out in enumerate(emulator.run_ranks(Lowering(program).run(), program, given, seed)):
        for e in range(local):
            for row in range(out["count"][e]):
                sender, slot = divmod(int(out["origin"][e, row]), tokens * topk)
                assert choice[sender, slot // topk, slot % topk] == rank * local + e
                assert (out["inbox"][e, row] == given[sender]["X"][slot // topk]).all()
                seen.append((sender, slot))
    assert sorted(seen) == [(r, s) for r in range(n) for s in range(tokens * topk)]


SMALL = {"BM": 16, "BN": 16, "BK": 16, "blocks": 3, "dtype": "float32"}


def test_gather_then_multiply():
    args = [
        {
            "X": f32((2, 32, 32), r),
            "W": f32((32, 16), 5),
            "C": empty((2, 32, 16), "float32"),
            "here": zeros(2, 2),
        }
        for r in range(2)
    ]
    agree_on_ranks(example("08_ag_gemm", "kernel", 32, 16, 32, 2, **SMALL), args, seeds=1)


def test_multiply_then_scatter():
    args = [
        {
            "X": f32((2, 32, 32), r),
            "W": f32((32, 16), 5 + r),
            "parts": empty((2, 32, 16), "float32"),
            "arrived": zeros(2, 1),
            "C": empty((32, 16), "float32"),
        }
        for r in range(2)
    ]
    agree_on_ranks(example("09_gemm_rs", "kernel", 32, 16, 32, 2, **SMALL), args, seeds=1)


def test_a_collective_inside_a_product():
    args = [
        {
            "X": f32((32, 32), r),
            "W": f32((32, 16), 5 + r),
            "part": empty((32, 16), "float32"),
            "C": empty((32, 16), "float32"),
        }
        for r in range(2)
    ]
    agree_on_ranks(example("10_gemm_ar", "kernel", 32, 16, 32, **SMALL), args, seeds=1)


def test_ring_attention():
    args = [
        {
            "Q": f32((1, 20, 16), r),
            "KV": f32((2, 2, 1, 20, 16), 7 + r),
            "arrived": zeros(3, 1),
            "free": zeros(3, 1),
            "O": empty((1, 20, 16), "float32"),
        }
        for r in range(3)
    ]
    agree_on_ranks(
        example("12_ring_attention", "kernel", 1, 20, 16, 3, True, BM=16, dtype="float32"), args, seeds=1
    )


@pytest.mark.parametrize("parts, dim, tiles", [(2, 16, (64, 16, 128)), (1, 128, (128, 64, 256))])
def test_gradients_of_ring_attention(parts: int, dim: int, tiles: tuple[int, int, int]):
    """Queries walk over keys that are pulled, by TMA and wgmma, and pull the queries that keys walk over."""
    chunks, heads, tile = Chunks(250, 2, parts), 2, tiles[1]
    each, count = chunks.each, 2 * parts
    shape = {"heads": heads, "kv_heads": 1, "dim": dim, "batch": 1, "rows": 250, "world": 2, "parts": parts}
    what = {**shape, "packed": False, "dtype": "bfloat16", "scale": dim**-0.5, "causal": True}
    table = ring_gradient_kernels.numbers_of(chunks, heads, 64, tile)
    whole = {n: data((count, h, each, dim), "bfloat16", k) for k, (n, h) in enumerate(OF_CHUNKS)}
    for x in whole.values():
        x[-1, :, chunks.count(count - 1) :] = 0
    numbers = f32(table, 9) + 3

    def held(x: Any, rank: int) -> Any:
        """The rank's rows of each head."""
        mine = [chunks.chunk(rank, p) for p in range(parts)]
        return np.concatenate([x[c, :, : chunks.count(c)] for c in mine], 1)[None]

    def own(x: Any, rank: int) -> Any:
        """Its chunks, and nothing in the others' place."""
        to = empty(x.shape, x.dtype.name)
        for c in [chunks.chunk(rank, p) for p in range(parts)]:
            to[c] = x[c]
        return to

    args = [
        {
            "Q": held(whole["Qs"], r),
            "K": own(whole["K"], r),
            "V": own(whole["V"], r),
            "dO": held(whole["dOs"], r),
            "Qs": own(whole["Qs"], r),
            "dOs": own(whole["dOs"], r),
            "Numbers": own(numbers, r),
            "here": zeros(count, 2),
            "dQ": empty((1, heads, chunks.held(r), dim), "bfloat16"),
        }
        for r in range(2)
    ]
    how = {"BM": tiles[0], "BN": tiles[1], "threads": tiles[2], "stages": 2, "high": 64}
    kernel = ring_gradient_kernels.query_gradients(**what, **how, tile=tile, blocks=2, side=1)
    agree_on_ranks(kernel, args, seeds=1)
    how |= {"BM": tile, "BN": tiles[0], "ahead": 0, "longest_first": False}
    key, value = (held(whole[n], 1) for n in "KV")
    given = {"Q": whole["Qs"], "K": key, "V": value, "dO": whole["dOs"], "Numbers": numbers, "rank": 1}
    given |= {n: empty(key.shape, "bfloat16") for n in ("dK", "dV")}
    agree(ring_gradient_kernels.key_gradients(**what, **how), given)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_are_exchanged_for_heads(packed: bool):
    """What is handed out comes back, of copies of a head their sum; pieces of a head end in the middle of a
    warp's."""
    heads, dim, n = ulysses_kernels.split(4, 2, 3), 24, 3
    what = {"heads": 4, "kv_heads": 2, "unit": heads.unit, "dim": dim, "batch": 1, "rows": 70, "world": n}
    what |= {"parts": 2, "packed": packed, "dtype": "bfloat16", "blocks": 2, "threads": 64, "gradients": True}
    chunks = Chunks(70, n, 2)

    def own(count: int, rank: int, seed: int) -> Any:
        mine = chunks.held(rank)
        return data((mine, count, dim) if packed else (1, count, mine, dim), "bfloat16", seed)

    def whole(moved: ulysses_kernels.Moved, columns: int = dim, dtype: str = "bfloat16") -> Any:
        return empty((moved.most * 70, columns), dtype)

    given = [
        {
            **{name: own(h, r, 9 * r + k) for k, (name, h) in enumerate(OF_HEADS)},
            "Lse": f32((1, 4, chunks.held(r), 1), r),
            **{name: whole(heads.queries) for name in ("Qs", "Os", "dOs")},
            **{name: whole(heads.keys) for name in ("Ks", "Vs")},
            "Sums": whole(heads.queries, 1, "float32"),
        }
        for r in range(n)
    ]
    agree_on_ranks(ulysses_kernels.hand_out(**what), given, seeds=1)
    back = [
        {
            **{
                "d" + name: data(given[r][name].shape, "bfloat16", 5 * r + k)
                for k, name in enumerate(("Qs", "Ks", "Vs"))
            },
            **{"d" + name: empty(given[r][name].shape, "bfloat16") for name in "QKV"},
        }
        for r in range(n)
    ]
    agree_on_ranks(ulysses_kernels.bring_back(**what), back, seeds=1)


def test_all_reduce_in_a_hierarchy():
    args = [
        {"A": f32((2, 250), r), "sums": empty((250,), "float32"), "B": empty((2, 250), "float32")}
        for r in range(4)
    ]
    agree_on_ranks(example("14_hierarchical_all_reduce", "kernel", 250, 2, block=128), args, seeds=1)


def test_packets_to_everyone():
    args = [
        {"A": f32((300,), r), "box": zeros(length((3, 512), 32)), "B": empty((300,), "float32")}
        for r in range(3)
    ]
    agree_on_ranks(example("15_small_all_reduce", "kernel", 300, 3), args)


def shift(wait: bool = True, again: bool = False) -> Any:
    @T.prim_func
    def kernel(
        A: T.Tensor((256,), "float32"),
        inbox: T.SymmTensor((256,), "float32"),
        s: T.Signal((2,)),
        B: T.Tensor((256,), "float32"),
    ):
        with T.Kernel(2, threads=64) as bx:
            with T.Scale("device") as (rank, n):
                T.copy(A[bx * 128], inbox[bx * 128 : bx * 128 + 128], dst=(rank + 1) % n, signal=s[bx])
                if wait:
                    T.wait(s[bx], 1)
                T.copy(inbox[bx * 128 : bx * 128 + 128], B[bx * 128])
                if again:
                    T.copy(A[bx * 128], inbox[bx * 128 : bx * 128 + 128], dst=(rank + 1) % n)

    return kernel


def arguments(ranks: int = 2) -> list[dict[str, Any]]:
    return [
        {"A": f32((256,), r), "inbox": f32((256,), 7), "s": zeros(2), "B": empty((256,), "float32")}
        for r in range(ranks)
    ]


def run(kernel: Any, args: Any, change: Any = None, seed: int = 0) -> Any:
    program, _ = pipeline.run(kernel.trace(), target("sm_90a"))
    program = (
        program
        if change is None
        else program.with_body(structural_map(program.func.body, (tirx.Evaluate, change)))
    )
    return emulator.run_ranks(Lowering(program).run(), program, args, seed)


def test_a_shift_is_right_under_many_orders():
    agree_on_ranks(shift(), arguments(3), seeds=10)


def test_a_missing_wait_is_a_race():
    with pytest.raises(EmulationError, match=r"race in inbox of rank \d .* nothing orders the two"):
        for seed in range(10):
            run(shift(wait=False), arguments(), seed=seed)


def test_a_put_before_the_reader_is_done_is_a_race():
    with pytest.raises(EmulationError, match="race in inbox of rank"):
        for seed in range(10):
            run(shift(again=True), arguments(), seed=seed)


@pytest.mark.parametrize("why", ["the signal tells of what all threads did", "behind the wait"])
def test_every_meeting_around_a_signal_is_needed(why: str):
    gone: list[Any] = []

    def without(s: Any) -> Any:
        if (
            getattr(s.value, "op", None) is None
            or s.value.op.name != "ts.sync"
            or str(s.value.attrs["why"]) != why
        ):
            return s
        gone.append(s)
        return tirx.Evaluate(tirx.IntImm("int32", 0))

    with pytest.raises(EmulationError, match="race in inbox"):
        for seed in range(10):
            run(shift(), arguments(), without, seed)
    assert gone


def test_a_signal_that_nobody_sends_is_told():
    @T.prim_func
    def kernel(s: T.Signal((1,))):
        with T.Kernel(1, threads=32), T.Scale("device"):
            T.wait(s[0], 1)

    with pytest.raises(EmulationError, match="can go on"):
        run(kernel, [{"s": zeros(1)}, {"s": zeros(1)}])


@pytest.mark.parametrize("scale", ["grid", "device"])
def test_what_was_written_before_a_barrier_is_read_behind_it(scale: str):
    @T.prim_func
    def kernel(A: T.SymmTensor((256,), "int32"), B: T.Tensor((256,), "int32")):
        with T.Kernel(2, threads=128) as bx:
            with T.Scale(scale) as (me, n):
                for i in T.Parallel(128):
                    A[bx * 128 + i] = bx * 1000 + i
                T.barrier()
                for i in T.Parallel(128):
                    B[bx * 128 + i] = A[(1 - bx) * 128 + i]

    agree_on_ranks(kernel, [{"A": np.zeros(256, np.int32), "B": np.zeros(256, np.int32)} for _ in range(2)])

    def without(s: Any) -> Any:
        return (
            s
            if getattr(s.value, "op", None) is None or s.value.op.name != "ts.barrier"
            else tirx.Evaluate(tirx.IntImm("int32", 0))
        )

    with pytest.raises(EmulationError, match="race in A"):
        for seed in range(10):
            run(
                kernel,
                [{"A": np.zeros(256, np.int32), "B": np.zeros(256, np.int32)} for _ in range(2)],
                without,
                seed,
            )


def test_a_product_of_tma_and_wgmma_is_put_by_its_consumers():
    @T.prim_func
    def kernel(
        A: T.Tensor((64, 128), "float16"),
        B: T.Tensor((128, 64), "float16"),
        C: T.SymmTensor((64, 64), "float32"),
        s: T.Signal((1,)),
        D: T.Tensor((64, 64), "float32"),
    ):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[0, k * 64], a)
                T.copy(B[k * 64, 0], b)
                T.gemm(a, b, c)
            with T.Scale("device") as (rank, n):
                T.copy(c, C, dst=(rank + 1) % n, signal=s[0])
                T.wait(s[0])
                T.copy(C, D)

    program, _ = pipeline.run(kernel.trace(), target("sm_90a"))
    assert Lowering(program).run().maps, "the operands come by TMA"
    args = [
        {
            "A": data((64, 128), "float16", r),
            "B": data((128, 64), "float16", 7 + r),
            "C": f32((64, 64)),
            "s": zeros(1),
            "D": f32((64, 64)),
        }
        for r in range(2)
    ]
    agree_on_ranks(kernel, args)


def test_pipelined_pulls_behind_waits():
    @T.prim_func
    def kernel(
        A: T.SymmTensor((64, 128), "float16"),
        B: T.Tensor((128, 64), "float16"),
        C: T.Tensor((64, 64), "float32"),
        s: T.Signal((2,)),
    ):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            with T.Scale("device") as (rank, n):
                for k in T.serial(2):
                    T.signal(s[k], dst=(rank + 1) % n)
                for k in T.Pipelined(2, num_stages=2):
                    T.wait(s[k])
                    T.copy(A[0, k * 64], a, src=(rank + 1) % n)
                    T.copy(B[k * 64, 0], b)
                    T.gemm(a, b, c)
            T.copy(c, C)

    args = [
        {
            "A": data((64, 128), "float16", r),
            "B": data((128, 64), "float16", 7),
            "C": f32((64, 64)),
            "s": zeros(2),
        }
        for r in range(2)
    ]
    for arch in ("sm_90a", "sm_80"):
        agree_on_ranks(kernel, args, seeds=1, arch=arch)


def asserting(low: float) -> Any:
    @T.prim_func
    def kernel(
        A: T.Tensor((64,), "float32"),
        inbox: T.SymmTensor((64,), "float32"),
        s: T.Signal((1,)),
        B: T.Tensor((64,), "float32"),
    ):
        with T.Kernel(1, threads=64):
            with T.Scale("device") as (rank, n):
                T.device_assert(A[5] > low, "A is large enough")
                T.copy(A, inbox, dst=(rank + 1) % n, signal=s[0])
                T.wait(s[0])
                T.copy(inbox, B)

    return kernel


def test_assertions_of_kernels_that_reach_other_ranks():
    args = [
        {"A": np.full(64, r, "float32"), "inbox": f32((64,)), "s": zeros(1), "B": f32((64,))}
        for r in range(2)
    ]
    agree_on_ranks(asserting(-1.0), args, seeds=1)
    with pytest.raises(EmulationError, match="A is large enough"):
        agree_on_ranks(asserting(0.0), args, seeds=1)
