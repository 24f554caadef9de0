"""Copies between memories of a GPU: a thread's loads are under way together, in front of its stores."""

from __future__ import annotations

import re
from typing import Any

import pytest

import tilescale.language as T
from tests.unit.cuda import sass
from tests.unit.cuda.corpus import printed
from tests.unit.cuda.emulated import agree, agree_on_ranks, data, empty
from tilescale.compiler import driver
from tilescale.compiler.cuda import toolchain
from tilescale.ops.ranks import combine_kernels


def moved(n: int, size: int, threads: int, dtype: str, rows: int = 1) -> Any:
    """B = A, ``rows`` × ``size`` at a time; what lies beyond the end is left alone."""

    @T.prim_func
    def kernel(A: T.Tensor((rows, n), dtype), B: T.Tensor((rows, n), dtype)):
        with T.Kernel(T.ceildiv(n, size), threads=threads) as b:
            T.copy(A[0:rows, b * size : (b + 1) * size], B[0:rows, b * size : (b + 1) * size])

    return kernel


@pytest.mark.parametrize(
    "n, size, threads, dtype, rows, together",
    [
        (4096, 4096, 64, "float32", 1, 8),
        (5000, 4096, 64, "float32", 1, 8),
        (3072, 3072, 64, "float32", 1, 6),
        (1000, 1024, 128, "float16", 1, 0),
        (3000, 1024, 32, "bfloat16", 3, 4),
        (777, 512, 32, "int8", 2, 8),
        (3001, 1024, 128, "int16", 1, 8),
        (600, 512, 512, "int8", 3, 3),
    ],
)
def test_loads_go_in_front_of_stores(n: int, size: int, threads: int, dtype: str, rows: int, together: int):
    kernel = moved(n, size, threads, dtype, rows)
    agree(kernel, {"A": data((rows, n), dtype), "B": empty((rows, n), dtype)})
    code = driver.source_text(kernel.trace(), "cuda", "cuda:sm_90a")
    counts = [int(c) for c in re.findall(r"for \(int u\w*_one = 0; u\w*_one < (\d+)", code)]
    assert counts == ([together] * 2 if together else []), code
    if together:
        found = [re.search(what, code) for what in (r"B_under_way\[", r"= .*\bA\[.*;", r"\bB\[.* = .*;")]
        first = [f.start() for f in found if f]
        assert len(first) == 3 and first == sorted(first), code


def test_a_copy_to_shared_memory_has_none():
    @T.prim_func
    def kernel(A: T.Tensor((4096,), "float32"), B: T.Tensor((4096,), "float32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((4096,), "float32")
            T.copy(A, s)
            T.copy(s, B)

    agree(kernel, {"A": data((4096,), "float32"), "B": empty((4096,), "float32")})
    assert "B_under_way" not in driver.source_text(kernel.trace(), "cuda", "cuda:sm_80")


needs_tools = pytest.mark.skipif(
    toolchain.find_nvcc() is None or sass.find_nvdisasm() is None, reason="needs nvcc and nvdisasm"
)


@needs_tools
@pytest.mark.parametrize("givers", [0, 8])
def test_rows_to_another_rank_are_stored_in_vectors(givers: int):
    """The address in another rank's memory is one value, whatever rank is asked for: where it was one of two,
    nvcc cut 16 bytes into words."""

    kernel = combine_kernels.combine(1024, 2, 2, 512, 2, 1, givers, 0, 8, 512, "bfloat16", True)
    text = sass.disassembled(toolchain.compile_cubin(printed(kernel, "sm_90a"), "sm_90a").code)
    assert text.count("STG.E.128") == 4, text  # of both lines, to the other rank and to C
    assert not re.search(r" STG\.E (?!64)", text), text


def far(n: int, size: int, threads: int, pull: bool) -> Any:
    """B of the next rank = A, or A of the next one here, ``size`` numbers at a time; B's rows are whole
    vectors."""
    w = -(-n // 8) * 8
    A, B = (T.Tensor((n,), "int16"), T.SymmTensor((w,), "int16"))

    @T.prim_func
    def put(A: A, B: B, there: T.Signal((1,))):
        with T.Kernel(1, threads=threads), T.Scale("device") as (rank, world):
            for k in T.serial(T.ceildiv(n, size)):
                T.copy(A[k * size : (k + 1) * size], B[k * size : (k + 1) * size], dst=(rank + 1) % world)
            T.signal(there[0], dst=(rank + 1) % world)
            T.wait(there[0], 1)

    @T.prim_func
    def take(A: B, B: A):
        with T.Kernel(1, threads=threads), T.Scale("device") as (rank, world):
            for k in T.serial(T.ceildiv(n, size)):
                T.copy(A[k * size : (k + 1) * size], B[k * size : (k + 1) * size], src=(rank + 1) % world)

    return take if pull else put


@pytest.mark.parametrize("pull", [False, True], ids=["put", "take"])
def test_what_crosses_goes_in_vectors_though_the_own_side_cannot(pull: bool):
    """Numbers one by one on the side whose rows end anywhere, 16 bytes at a time over the links."""
    n, threads = 1001, 64
    kernel = far(n, 512, threads, pull)
    args = []
    for r in range(2):
        own, other = data((n,), "int16", r), data((1008,), "int16", r + 2)
        args.append(
            {"A": other, "B": empty((n,), "int16")}
            if pull
            else {"A": own, "B": empty((1008,), "int16"), "there": data((1,), "int64") * 0}
        )
    agree_on_ranks(kernel, args, seeds=1)
    code = driver.source_text(kernel.trace(), "cuda", "cuda:sm_90a")
    line = next(x for x in code.splitlines() if "_there[" in x)
    assert "uint4*)&" in line, code


def dotted(how: str = "") -> Any:
    """C = B · A, a row a thread, which loads eight numbers of both at a time. ``how``: "" or what else there is:
    "writes" to both, "waits" for other threads in the loop, "asks" for two blocks."""

    @T.prim_func
    def kernel(
        A: T.Tensor((512,), "float16"), B: T.Tensor((128, 512), "float16"), C: T.Tensor((128,), "float16")
    ):
        with T.Kernel(1, threads=128):
            if how == "asks":
                T.annotate_min_blocks_per_sm(2)
            t = T.get_thread_binding()
            a, b, c = (T.alloc_local((n,), "float16") for n in (8, 8, 1))
            c[0] = 0
            for k in T.serial(64):
                for v in T.vectorized(8):
                    a[v] = A[k * 8 + v]
                    b[v] = B[t, k * 8 + v]
                for v in T.serial(8):
                    c[0] += a[v] * b[v]
                if how == "waits":
                    c[0] = T.shfl_xor(c[0], 1)
            C[t] = c[0]
            if how == "writes":
                A[t] = 0
                B[t, 0] = 0

    return kernel


@needs_tools
def test_a_threads_own_loop_loads_ahead():
    """Without a bound on blocks ptxas (13.0) issues five of them before the first product, with one 21."""
    agree(
        dotted(),
        {"A": data((512,), "float16", 1), "B": data((128, 512), "float16", 2), "C": empty((128,), "float16")},
    )
    made = toolchain.compile_cubin(printed(dotted(), "sm_90a"), "sm_90a")
    (function,) = sass.functions(sass.disassembled(made.code))
    codes = " ".join(i.opcode for i in function.instructions if i.opcode.startswith(("LDG", "HFMA2")))
    ahead = max(len(run.split()) for run in re.findall(r"(?:LDG\S+ )+", codes))
    assert ahead >= 16, codes


@pytest.mark.parametrize("how, bound", [("", ", 1"), ("asks", ", 2"), ("waits", ""), ("writes", "")])
def test_whose_registers_are_spared(how: str, bound: str):
    """Loads that nothing keeps in their place get what they need, where the author asks for nothing else."""
    code = driver.source_text(dotted(how).trace(), "cuda", "cuda:sm_90a")
    assert f"__launch_bounds__(128{bound})" in code, code
