"""Rows that loops of T.Parallel gather into shared tiles, as copies by cp.async that run ahead: where they
lie is looked up, or they are zero; and what stays in its place."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, lowered
from tilescale.compiler import emulator
from tilescale.compiler.checks.run import check
from tilescale.compiler.cuda import account, toolchain
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.passes.schedule import AHEAD
from tilescale.compiler.sim import numerics
from tilescale.compiler.tvm_compat import EXTERN_CALLS, ir, structural_map, tirx

ARCHS = ["sm_90a", "sm_80"]


def attention(top: int, mask: bool, stages: int = 2, rows: int = 90) -> Any:
    """Sums of the rows that a block names, weighted by their products with q: tiles that two products read,
    one of them by its rows, and a second tile of other columns."""

    @T.prim_func
    def kernel(
        Q: T.Tensor((64, 96), "bfloat16"),
        KV: T.Tensor((rows, 96), "bfloat16"),
        I: T.Tensor((2, top), "int32"),
        O: T.Tensor((2, 64, 64), "float32"),
    ):
        with T.Kernel(2, threads=128) as bx:
            q, tail = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((64, 32), "bfloat16")
            kv, k_tail = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((64, 32), "bfloat16")
            s_tile = T.alloc_shared((64, 64), "bfloat16")
            s, o = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            valid = T.alloc_fragment((64,), "bool")
            T.copy(Q[0:64, 0:64], q)
            T.copy(Q[0:64, 64:96], tail)
            T.clear(o)
            for k in T.Pipelined(T.ceildiv(top, 64), num_stages=stages):
                for i in T.Parallel(64):
                    valid[i] = I[bx, k * 64 + i] >= 0
                for i, j in T.Parallel(64, 64):
                    if mask:
                        kv[i, j] = T.if_then_else(k * 64 + i < top, KV[I[bx, k * 64 + i], j], 0)
                    else:
                        kv[i, j] = KV[I[bx, k * 64 + i], j]
                for i, j in T.Parallel(64, 32):
                    row = I[bx, k * 64 + i]
                    k_tail[i, j] = KV[row, 64 + j]
                for h, i in T.Parallel(64, 64):
                    s[h, i] = T.if_then_else(valid[i], 0.0, 1.0)
                T.gemm(q, kv, s, transpose_B=True)
                T.gemm(tail, k_tail, s, transpose_B=True)
                T.copy(s, s_tile)
                T.gemm(s_tile, kv, o)
            T.copy(o, O[bx, 0, 0])

    return kernel


def small(shape: tuple[int, ...], seed: int, dtype: str = "bfloat16") -> Any:
    """Numbers whose sums are exact."""
    return numerics.encode(np.random.default_rng(seed).integers(-1, 2, shape).astype("float32"), dtype)


def named(shape: tuple[int, ...], rows: int, dtype: str = "int32") -> Any:
    """Indices of rows: some again and again, some of none, on both sides."""
    found = np.random.default_rng(3).integers(-2, rows + 5, shape).astype(dtype)
    found[..., 5:9], found[..., 20:30] = 7, -1
    return found


def poisoned(shape: tuple[int, ...], dtype: str = "float32") -> Any:
    return numerics.encode(np.full(shape, np.nan, "float32"), dtype)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("top, mask, stages", [(192, False, 2), (150, True, 3), (64, True, 3)], ids=str)
def test_products_of_gathered_rows(top: int, mask: bool, stages: int, arch: str):
    kernel = attention(top, mask, stages)
    made = lowered(kernel, arch)
    (ring,) = made.program.schedule.rings
    assert (ring.form, ring.depth, ring.buffers) == (AHEAD, stages, ["kv", "k_tail"])
    text = print_kernel(made.kernel).text
    assert ("ts::wgmma_m64n64" in text) == (arch == "sm_90a") and "ts::cp_async<16>(&kv" in text
    rows = account.copies(made.program, made.kernel)
    assert {"line": rows[2]["line"], "of": "KV → kv", "how": "by cp.async, 16 bytes at a time"} == rows[2]
    args = {
        "Q": small((64, 96), 1),
        "KV": small((90, 96), 2),
        "I": named((2, top), 90),
        "O": poisoned((2, 64, 64)),
    }
    report = check(kernel, 1, args, level="both", arch=arch, seeds=2)
    assert report, report
    agree(kernel, args, exact=True, arch=arch)


# ---- what says where rows lie


def summed(fill: Any, *, rounds: int = 4, tile: tuple[int, ...] = (16, 32), dtype: str = "float32") -> Any:
    """Sums the tiles that ``fill(tile, A, I, round, base)`` fills; A has 40 rows of 64 columns."""

    @T.prim_func
    def kernel(A: T.Tensor((40, 64), dtype), I: T.Tensor((4, 16), "int32"), B: T.Tensor(tile, "float32")):
        with T.Kernel(1, threads=64):
            a, total = T.alloc_shared(tile, dtype), T.alloc_fragment(tile, "float32")
            looked = T.alloc_shared((4, 16), "int32")
            base = T.alloc_var("int32")
            base = I[0, 0] + 1
            T.copy(I, looked)
            T.clear(total)
            for k in T.Pipelined(rounds, num_stages=3):
                fill(a, A, I, k, base, looked)
                for at in T.Parallel(*tile):
                    total[at] += a[at] * (k + 1)
            T.copy(total, B)

    return kernel


@T.macro
def of_a_tensor(a: Any, A: Any, I: Any, k: Any, base: Any, looked: Any):
    for i, j in T.Parallel(16, 32):
        a[i, j] = A[I[k, i], j + 32]


@T.macro
def of_a_tile(a: Any, A: Any, I: Any, k: Any, base: Any, looked: Any):
    for i, j in T.Parallel(16, 32):
        a[i, j] = A[looked[k, i] + base, j]


@T.macro
def of_64_bits(a: Any, A: Any, I: Any, k: Any, base: Any, looked: Any):
    for i, j in T.Parallel(16, 32):
        row = T.cast(I[k, i], "int64") * 2 - 3
        a[i, j] = A[row, j]


@T.macro
def every_third(a: Any, A: Any, I: Any, k: Any, base: Any, looked: Any):
    for i, j in T.Parallel(16, 32):
        a[i, j] = A[k * 8 + i * 3 - 4, j]


@T.macro
def parts_of_one_row(a: Any, A: Any, I: Any, k: Any, base: Any, looked: Any):
    for j, i in T.Parallel(32, 16):
        a[i, j] = A[I[k, 3], i % 2 * 32 + j]


@T.macro
def some(a: Any, A: Any, I: Any, k: Any, base: Any, looked: Any):
    for i, j in T.Parallel(16, 32):
        a[i, j] = T.if_then_else(I[k, i] % 2 == 0, A[k * 8 + i, j], 0)


@T.macro
def others(a: Any, A: Any, I: Any, k: Any, base: Any, looked: Any):
    for i, j in T.Parallel(16, 32):
        inner = T.if_then_else(i + k > base, A[I[k, i], j], 0.0)
        a[i, j] = T.if_then_else(looked[k, i] < 0, 0.0, inner)


@T.macro
def of_columns(a: Any, A: Any, I: Any, k: Any, base: Any, looked: Any):
    for i, j in T.Parallel(16, 32):
        a[i, j] = T.if_then_else(i != k, A[I[k, i], I[k, 0] * 4 + j], 0)


@T.macro
def by_two_stores(a: Any, A: Any, I: Any, k: Any, base: Any, looked: Any):
    for i, j in T.Parallel(16, 32):
        if k * 16 + i < 40:
            a[i, j] = A[k * 16 + i, j]
        else:
            a[i, j] = 0.0


@T.macro
def never_looked_up(a: Any, A: Any, I: Any, k: Any, base: Any, looked: Any):
    for i, j in T.Parallel(16, 32):
        a[i, j] = T.if_then_else(k * 4 + i < 16, A[looked[k, k * 4 + i], j], 0)


@T.macro
def nobody(a: Any, A: Any, I: Any, k: Any, base: Any, looked: Any):
    for i, j in T.Parallel(16, 32):
        a[i, j] = T.if_then_else(I[k, i] > 1000, A[looked[k, i + 1000], j], 0)


AHEAD_OF = {
    "of a tensor": of_a_tensor,
    "of a tile": of_a_tile,
    "of 64 bits": of_64_bits,
    "every third": every_third,
    "parts of one row": parts_of_one_row,
    "some": some,
    "others": others,
    "of columns": of_columns,
    "by two stores": by_two_stores,
    "never looked up": never_looked_up,
    "nobody": nobody,
}


@pytest.mark.parametrize("name", AHEAD_OF)
def test_what_is_looked_up(name: str):
    """In memory, before the loop or never written, under a condition only where it holds."""
    kernel = summed(AHEAD_OF[name])
    made = lowered(kernel, "sm_80")
    assert [(r.form, r.depth) for r in made.program.schedule.rings] == [(AHEAD, 3)]
    assert "ts::cp_async<16>(&a" in print_kernel(made.kernel).text
    args = {"A": data((40, 64), "float32", 1), "I": named((4, 16), 40), "B": poisoned((16, 32))}
    report = check(kernel, 1, args, level="both", arch="sm_80", seeds=2)
    assert report, report
    agree(kernel, args, exact=True, arch="sm_80")


@T.macro
def eight(a: Any, A: Any, I: Any, k: Any, base: Any, looked: Any):
    for i, j in T.Parallel(16, 36):
        a[i, j] = A[I[k, i], j + 4]


@T.macro
def four(a: Any, A: Any, I: Any, k: Any, base: Any, looked: Any):
    for i, j in T.Parallel(5, 22):
        a[i, j] = A[I[k, i], j + 2]


@T.macro
def bounded(a: Any, A: Any, I: Any, k: Any, base: Any, looked: Any):
    for i, j in T.Parallel(3, 64, coalesced_width=4):
        a[i, j] = A[I[k, i], j]


@T.macro
def of_three_axes(a: Any, A: Any, I: Any, k: Any, base: Any, looked: Any):
    for g, i, j in T.Parallel(3, 5, 8):
        a[g, i, j] = A[I[k, g * 5 + i], g * 16 + j]


@pytest.mark.parametrize(
    "fill, tile, size",
    [(eight, (16, 36), 8), (four, (5, 22), 4), (bounded, (3, 64), 8), (of_three_axes, (3, 5, 8), 16)],
    ids=["eight", "four", "bounded", "of three axes"],
)
def test_bytes_of_one_copy(fill: Any, tile: tuple[int, ...], size: int):
    """Rows that the threads do not share evenly, too."""
    kernel = summed(fill, tile=tile, dtype="float16")
    made = lowered(kernel, "sm_80")
    assert f"ts::cp_async<{size}>(&a" in print_kernel(made.kernel).text
    args = {"A": small((40, 64), 1, "float16"), "I": named((4, 16), 40), "B": poisoned(tile)}
    agree(kernel, args, exact=True, arch="sm_80")


@pytest.mark.parametrize(
    "rows, columns, loop", [(16, 1024, "for (int w = 0; w < 32"), (68, 32, "for (int v = 0; v < 17")], ids=str
)
def test_many_copies_of_a_thread_are_loops(rows: int, columns: int, loop: str):
    """Long rows, and many of them."""

    @T.prim_func
    def kernel(
        A: T.Tensor((40, columns), "float32"),
        I: T.Tensor((3, rows), "int32"),
        B: T.Tensor((columns,), "float32"),
    ):
        with T.Kernel(1, threads=32):
            a, total = T.alloc_shared((rows, columns), "float32"), T.alloc_fragment((columns,), "float32")
            T.clear(total)
            for k in T.Pipelined(3, num_stages=2):
                for i, j in T.Parallel(rows, columns):
                    a[i, j] = A[I[k, i], j]
                for i in T.serial(rows):
                    for j in T.Parallel(columns):
                        total[j] += a[i, j] * (k + i)
            T.copy(total, B)

    made = lowered(kernel, "sm_80")
    lines = print_kernel(made.kernel).text.splitlines()
    at = [k for k, line in enumerate(lines) if loop in line]
    assert at and not any("unroll" in lines[k - 1] for k in at)
    args = {"A": small((40, columns), 1, "float32"), "I": named((3, rows), 40), "B": poisoned((columns,))}
    agree(kernel, args, exact=True, arch="sm_80")


def test_rows_of_a_line():
    """A tensor of one axis, whose rows are the author's; where the condition does not hold, no part of any row
    is read."""

    @T.prim_func
    def kernel(
        A: T.Tensor((2560,), "float16"), I: T.Tensor((4, 16), "int32"), B: T.Tensor((16, 32), "float32")
    ):
        with T.Kernel(1, threads=64):
            a, total = T.alloc_shared((16, 32), "float16"), T.alloc_fragment((16, 32), "float32")
            T.clear(total)
            for k in T.Pipelined(4, num_stages=2):
                for i, j in T.Parallel(16, 32):
                    a[i, j] = T.if_then_else(I[k, i] > 5, A[I[k, i] * 64 + j], 0)
                for i, j in T.Parallel(16, 32):
                    total[i, j] += a[i, j]
            T.copy(total, B)

    made = lowered(kernel, "sm_80")
    assert "ts::cp_async<16>(&a" in print_kernel(made.kernel).text
    args = {"A": small((2560,), 1, "float16"), "I": named((4, 16), 40), "B": poisoned((16, 32))}
    agree(kernel, args, exact=True, arch="sm_80")


# ---- what stays in its place


@T.macro
def under_a_condition_on_columns(a: Any, A: Any, I: Any, k: Any, base: Any, looked: Any):
    for i, j in T.Parallel(16, 32):
        a[i, j] = T.if_then_else(i + j < 20, A[I[k, i], j], 0)


@T.macro
def at_odd_columns(a: Any, A: Any, I: Any, k: Any, base: Any, looked: Any):
    for i, j in T.Parallel(16, 32):
        a[i, j] = A[I[k, i], I[k, 0] + j]


@T.macro
def of_what_the_loop_writes(a: Any, A: Any, I: Any, k: Any, base: Any, looked: Any):
    for i in T.Parallel(16):
        looked[0, i] = I[k, 15 - i]
    for i, j in T.Parallel(16, 32):
        a[i, j] = A[looked[0, i], j]


@T.macro
def of_a_variable_of_the_loop(a: Any, A: Any, I: Any, k: Any, base: Any, looked: Any):
    last = T.alloc_var("int32")
    last = I[k, 2]
    for i, j in T.Parallel(16, 32):
        a[i, j] = A[last + I[k, i], j]


@T.macro
def of_registers(a: Any, A: Any, I: Any, k: Any, base: Any, looked: Any):
    held = T.alloc_fragment((16,), "int32")
    T.copy(I[k, 0:16], held)
    for i, j in T.Parallel(16, 32):
        a[i, j] = A[held[i], j]


@T.macro
def or_one(a: Any, A: Any, I: Any, k: Any, base: Any, looked: Any):
    for i, j in T.Parallel(16, 32):
        a[i, j] = T.if_then_else(i < 3, A[I[k, i], j], 1)


@T.macro
def turned(a: Any, A: Any, I: Any, k: Any, base: Any, looked: Any):
    for i, j in T.Parallel(16, 32):
        a[i, j] = A[j, I[k, i]]


STAY = {
    "under a condition on columns": under_a_condition_on_columns,
    "at odd columns": at_odd_columns,
    "of what the loop writes": of_what_the_loop_writes,
    "of a variable of the loop": of_a_variable_of_the_loop,
    "of registers": of_registers,
    "or one": or_one,
    "turned": turned,
}


@pytest.mark.parametrize("name", STAY)
def test_what_stays(name: str):
    kernel = summed(STAY[name], dtype="float16")
    made = lowered(kernel, "sm_80")
    assert all(r.form != AHEAD for r in made.program.schedule.rings)
    args = {"A": small((40, 64), 1, "float16"), "I": named((4, 16), 40), "B": poisoned((16, 32))}
    agree(kernel, args, exact=True, arch="sm_80")


def test_what_the_kernel_writes_is_no_source():
    """Neither rows, nor what says which, may be written in the loop; a copy beside them runs ahead alone."""

    @T.prim_func
    def kernel(
        A: T.Tensor((40, 32), "float32"), C: T.Tensor((64, 32), "float32"), I: T.Tensor((4, 16), "int32")
    ):
        with T.Kernel(1, threads=64):
            a, c = T.alloc_shared((16, 32), "float32"), T.alloc_shared((16, 32), "float32")
            total = T.alloc_fragment((16, 32), "float32")
            T.clear(total)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(C[k * 16, 0], c)
                for i, j in T.Parallel(16, 32):
                    a[i, j] = A[I[k, i], j]
                for i, j in T.Parallel(16, 32):
                    total[i, j] += a[i, j] + c[i, j]
                T.copy(total, A[k * 8 : k * 8 + 16, 0:32])

    made = lowered(kernel, "sm_80")
    assert [(r.form, r.buffers) for r in made.program.schedule.rings] == [(AHEAD, ["c"])]
    args = {
        "A": data((40, 32), "float32", 1),
        "C": data((64, 32), "float32", 2),
        "I": np.random.default_rng(0).integers(0, 40, (4, 16)).astype("int32"),
    }
    agree(kernel, args, exact=True, arch="sm_80")


def test_a_copy_runs_ahead_without_a_gather_that_has_no_room():
    """Two stages of the gathered tile do not fit; the copy beside it has its own."""

    @T.prim_func
    def kernel(
        A: T.Tensor((40, 256), "float32"),
        C: T.Tensor((64, 32), "float32"),
        I: T.Tensor((4, 64), "int32"),
        B: T.Tensor((16, 32), "float32"),
    ):
        with T.Kernel(1, threads=64):
            a, c = T.alloc_shared((64, 256), "float32"), T.alloc_shared((16, 32), "float32")
            total = T.alloc_fragment((16, 32), "float32")
            T.clear(total)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(C[k * 16, 0], c)
                for i, j in T.Parallel(64, 256):
                    a[i, j] = A[I[k, i], j]
                for i, j in T.Parallel(16, 32):
                    total[i, j] += a[i * 4, j] + c[i, j]
            T.copy(total, B)

    made = lowered(kernel, "sm_86")  # 99 KB
    assert [(r.form, r.depth, r.buffers) for r in made.program.schedule.rings] == [(AHEAD, 2, ["c"])]
    args = {
        "A": data((40, 256), "float32", 1),
        "C": data((64, 32), "float32", 2),
        "I": named((4, 64), 40),
        "B": poisoned((16, 32)),
    }
    agree(kernel, args, exact=True, arch="sm_86")


# ---- order


FAULTS: dict[str, Any] = {
    "rounds are not awaited": lambda n: None if n.startswith("ts::cp_async_wait") else n,
    "nothing is committed": lambda n: None if n == "ts::cp_async_commit" else n,
    "threads do not meet": lambda n: None if n == "__syncthreads" else n,
    "products read by another proxy": lambda n: None if n == "ts::fence_proxy_async" else n,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str):
    made = lowered(attention(192, False), "sm_90a")
    args = {
        "Q": small((64, 96), 1),
        "KV": small((90, 96), 2),
        "I": named((2, 192), 90),
        "O": poisoned((2, 64, 64)),
    }
    emulator.run(made.kernel, made.program, args)

    def change(s: Any) -> Any:
        call = s.value
        if not isinstance(call, ir.Call) or call.op.name not in EXTERN_CALLS:
            return s
        name = FAULTS[fault](str(call.args[0].value))
        made = tirx.IntImm("int32", 0) if name is None else tirx.call_extern("void", name, *call.args[1:])
        return tirx.Evaluate(made)

    func = made.kernel.func
    body = structural_map(func.body, (tirx.Evaluate, change))
    broken = dataclasses.replace(made.kernel, func=tirx.PrimFunc(list(func.params), body))
    with pytest.raises(emulator.EmulationError):
        emulator.run(broken, made.program, args)


# ---- groups that the author awaits


def by_hand(rounds: int, tail: int, fits: bool = True) -> Any:
    """Products of rows that the author's own two stages hold. ``tail``: groups under way behind the last
    wait."""

    @T.macro
    def begin(A: Any, I: Any, a: Any, stage: Any, k: Any):
        for i, j in T.Parallel(
            64, 64, prefer_async=True, annotations={"parallel_async_without_async_commit_wait": True}
        ):
            there = I[k * 64 + i] >= 0
            a[stage, i, j] = T.if_then_else(there if fits else there & (j >= 0), A[I[k * 64 + i], j], 0)
        T.ptx_commit_group()

    @T.prim_func
    def kernel(
        Q: T.Tensor((64, 64), "bfloat16"),
        A: T.Tensor((40, 64), "bfloat16"),
        I: T.Tensor((rounds * 64,), "int32"),
        O: T.Tensor((64, 64), "float32"),
    ):
        with T.Kernel(1, threads=128):
            q, a = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((2, 64, 64), "bfloat16")
            o = T.alloc_fragment((64, 64), "float32")
            T.copy(Q, q)
            T.clear(o)
            begin(A, I, a, 0, 0)
            for k in T.serial(rounds - 1):
                begin(A, I, a, (k + 1) % 2, k + 1)
                T.ptx_wait_group(1)
                T.gemm(q, a[k % 2, :, :], o)
            T.ptx_wait_group(tail)
            T.gemm(q, a[(rounds - 1) % 2, :, :], o)
            T.copy(o, O)

    return kernel


def of_hand(rounds: int) -> dict[str, Any]:
    return {
        "Q": small((64, 64), 1),
        "A": small((40, 64), 2),
        "I": named((rounds * 64,), 40),
        "O": poisoned((64, 64)),
    }


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("fits", [True, False])
def test_groups_of_the_author(fits: bool, arch: str):
    """What cp.async cannot do is complete where it stands."""
    kernel = by_hand(4, 0, fits)
    made = lowered(kernel, arch)
    assert ("ts::cp_async<16>(&a" in print_kernel(made.kernel).text) == fits
    report = check(kernel, 1, of_hand(4), level="both", arch=arch, seeds=2)
    assert report, report
    agree(kernel, of_hand(4), exact=True, arch=arch)


def test_a_group_that_the_author_does_not_await():
    made = lowered(by_hand(4, 1), "sm_80")
    with pytest.raises(emulator.EmulationError):
        emulator.run(made.kernel, made.program, of_hand(4))


def test_without_groups_nothing_is_begun():
    """A loop whose author awaits nothing is complete where it stands."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=64):
            a = T.alloc_shared((64, 64), "float32")
            for i, j in T.Parallel(
                64, 64, prefer_async=True, annotations={"parallel_async_without_async_commit_wait": True}
            ):
                a[i, j] = A[63 - i, j]
            T.copy(a, B)

    assert "cp_async" not in print_kernel(lowered(kernel, "sm_80").kernel).text
    args = {"A": data((64, 64), "float32"), "B": poisoned((64, 64))}
    agree(kernel, args, exact=True, arch="sm_80")


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
def test_the_machine_copies_beside_its_products():
    made = toolchain.compile_cubin(print_kernel(lowered(attention(192, True), "sm_90a").kernel), "sm_90a")
    assert made.resources.spill_stores == 0 and "LDGSTS.E.BYPASS.128" in toolchain.sass(made.code)
