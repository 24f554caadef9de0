"""Kernels written by hand down to the instruction: on the simulator and on the emulated GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale
import tilescale.language as T
from tests.unit.cuda import sass
from tests.unit.cuda.emulated import agree, data, empty
from tests.unit.cuda.test_hopper import edited, lowered
from tilescale.compiler import emulator
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.account import copies
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.emulator import EmulationError
from tilescale.compiler.sim import numerics


def gemm(
    M: int,
    N: int,
    K: int,
    BM: int = 128,
    BN: int = 128,
    BK: int = 64,
    stages: int = 3,
    dtype: str = "bfloat16",
    later: bool = True,
) -> Any:
    """C = A · B in float32: a producer warpgroup of which one thread drives TMA, consumers of 64 rows each.
    ``later``: their products are awaited by a statement of its own."""
    consumers, rounds = BM // 64, -(-K // BK)
    size = (BM * BK + BK * BN) * 2

    @T.prim_func
    def by_hand(A: T.Tensor((M, K), dtype), B: T.Tensor((K, N), dtype), C: T.Tensor((M, N), "float32")):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=128 * (consumers + 1)) as (bx, by):
            a, b = T.alloc_shared((stages, BM, BK), dtype), T.alloc_shared((stages, BK, BN), dtype)
            full, empty = T.alloc_barrier([1] * stages), T.alloc_barrier([128 * consumers] * stages)
            with T.Scale("warpgroup") as (w, n):
                if w == consumers:
                    T.dec_max_nreg(40)
                    with T.Scale("thread"):
                        if T.shuffle_elect(128):
                            for k in T.serial(rounds):
                                T.mbarrier_wait_parity(empty[k % stages], k // stages % 2 ^ 1)
                                T.mbarrier_expect_tx(full[k % stages], size)
                                T.tma_copy(A[by * BM, k * BK], a[k % stages, :, :], barrier=full[k % stages])
                                T.tma_copy(B[k * BK, bx * BN], b[k % stages, :, :], barrier=full[k % stages])
                                T.mbarrier_arrive(full[k % stages])
                else:
                    T.inc_max_nreg(232)
                    acc = T.alloc_fragment((64, BN), "float32")
                    T.clear(acc)
                    for k in T.serial(rounds):
                        T.mbarrier_wait_parity(full[k % stages], k // stages % 2)
                        T.gemm(
                            a[k % stages, w * 64 : w * 64 + 64, :],
                            b[k % stages, :, :],
                            acc,
                            wg_wait=-1 if later else 0,
                        )
                        if later:
                            T.wait_wgmma(0)
                        T.mbarrier_arrive(empty[k % stages])
                    T.copy(acc, C[by * BM + w * 64, bx * BN])

    return by_hand


SHAPE = (136, 136, 264)


def operands(M: int, N: int, K: int, dtype: str = "bfloat16") -> dict[str, Any]:
    return {"A": data((M, K), dtype, 1), "B": data((K, N), dtype, 2), "C": empty((M, N), "float32")}


@pytest.mark.parametrize("seed", [0, 1])
def test_a_gemm_by_hand(seed: int):
    kernel = gemm(*SHAPE)
    text = print_kernel(lowered(kernel)[0]).text
    for word in (
        "ts::tma_load(",
        "ts::mbarrier_expect_tx(",
        "ts::mbarrier_arrive(",
        "ts::wgmma_m64n128k16_bf16",
        "ts::wgmma_wait<0>",
        "ts::fewer_registers<40>",
        "ts::more_registers<232>",
        "__launch_bounds__(384, 1)",
    ):
        assert word in text, word
    agree(kernel, operands(*SHAPE), seed=seed)


def test_a_product_of_what_tma_copied_is_wgmmas_unasked():
    kernel = gemm(*SHAPE, later=False)
    text = print_kernel(lowered(kernel)[0]).text
    assert "ts::wgmma_m64n128k16_bf16" in text and "ts::wgmma_wait<0>" in text and "ldmatrix" not in text
    made, program = lowered(kernel)
    assert [(c["of"], c["how"]) for c in copies(program, made)][:2] == [
        ("A → a", "by TMA"),
        ("B → b", "by TMA"),
    ]
    agree(kernel, operands(*SHAPE))


def test_a_left_operand_in_registers_is_wgmmas_too():
    """What threads compute of one product is multiplied by what TMA brings for the next one."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64, 64), "float16"),
        B: T.Tensor((64, 64), "float16"),
        C: T.Tensor((64, 64), "float16"),
        O: T.Tensor((64, 64), "float32"),
    ):
        with T.Kernel(1, threads=128):
            a, b, c = (T.alloc_shared((64, 64), "float16") for _ in range(3))
            s, s_cast = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float16")
            o, full = T.alloc_fragment((64, 64), "float32"), T.alloc_barrier(128)
            T.clear(s)
            T.clear(o)
            T.tma_copy(A, a, barrier=full)
            T.tma_copy(B, b, barrier=full)
            T.tma_copy(C, c, barrier=full)
            T.mbarrier_arrive(full)
            T.mbarrier_wait_parity(full, 0)
            T.gemm(a, b, s)
            T.copy(s, s_cast)
            T.gemm(s_cast, c, o)
            T.copy(o, O)

    text = print_kernel(lowered(kernel)[0]).text
    assert "ts::wgmma_m64n64k16_f16_r1(" in text and "ts::mma_" not in text
    draw = np.random.default_rng(1)  # small whole numbers, whose sums are exact in any order
    tensors = {n: draw.integers(-2, 3, (64, 64)).astype("float16") for n in "ABC"}
    agree(kernel, {**tensors, "O": empty((64, 64), "float32")})


def multiplied(scale: str, rows: int, fence: bool, first: int = 0, M: int = 64, wide: int = 64) -> Any:
    """One thread copies, each executor multiplies its rows of the tile."""

    @T.prim_func
    def kernel(
        A: T.Tensor((128, 128), "float16"), B: T.Tensor((128, 64), "float16"), C: T.Tensor((M, 64), "float32")
    ):
        with T.Kernel(1, threads=128):
            a, b, full = (
                T.alloc_shared((128, 64), "float16"),
                T.alloc_shared((64, 64), "float16"),
                T.alloc_barrier(1),
            )
            with T.Scale(scale) as (w, n):
                c = T.alloc_fragment((rows, 64), "float32")
                T.clear(c)
                for k in T.serial(2):
                    with T.Scale("thread") as (t, m):
                        if w == 0 and t == 0:
                            T.mbarrier_expect_tx(full, (128 + 64) * 64 * 2)
                            T.tma_copy(A[0, k * 64], a, barrier=full)
                            T.tma_copy(B[k * 64, 0], b, barrier=full)
                            T.mbarrier_arrive(full)
                    T.mbarrier_wait_parity(full, k)
                    T.gemm(a[w * rows + first : w * rows + first + rows, 0:wide], b[0:wide, :], c)
                    if fence:
                        T.fence_proxy_async()
                    T.sync_threads()
                T.copy(c, C[w * rows, 0])

    return kernel


UNFIT = {
    "a warp": (("warp", 16), "32 threads are no whole warpgroups"),
    "rows between the pattern's": (
        ("warpgroup", 64, True, 4),
        "its part of a is not known to begin and end with the swizzle's pattern",
    ),
    "half of its columns": (
        ("warpgroup", 64, True, 0, 64, 32),
        "its part of a is not known to begin and end",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_where_wgmma_does_not_fit_the_report_says_what_to_write(name: str):
    (scale, rows, *more), reason = UNFIT[name]
    kernel = multiplied(scale, rows, *(more or (True,)))
    made, program = lowered(kernel)
    assert "wgmma_m64" not in print_kernel(made).text
    assert any(reason in note and "T.fence_proxy_async() in front of" in note for note in program.notes), (
        program.notes
    )
    args = {
        "A": data((128, 128), "float16", 1),
        "B": data((128, 64), "float16", 2),
        "C": empty((64, 64), "float32"),
    }
    agree(kernel, args)
    if name == "a warp":
        with pytest.raises(EmulationError, match="proxy fence"):
            agree(multiplied(scale, rows, False), args)


def _wait(n: str, a: Any, which: str) -> bool:
    return n == "ts::mbarrier_wait" and a[0].args[0].source.name == which


FAULTS: dict[str, Any] = {
    "nobody waits for a full stage": lambda n, a: None if _wait(n, a, "full") else ...,
    "nobody waits for an empty stage": lambda n, a: None if _wait(n, a, "empty") else ...,
    "a wrong phase": lambda n, a: (n, [a[0], 1 - a[1]]) if _wait(n, a, "full") else ...,
    "no bytes are expected": lambda n, a: None if n == "ts::mbarrier_expect_tx" else ...,
    "stages are released before their products": lambda n, a: None if n == "ts::wgmma_wait<0>" else ...,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str):
    made, program = lowered(gemm(64, 64, 520, BM=64, BN=64))
    args = operands(64, 64, 520)
    right = emulator.run(made, program, args)["C"]
    broken = edited(made, FAULTS[fault])
    for seed in range(8):
        try:
            got = emulator.run(broken, program, args, seed)["C"]
        except EmulationError:
            return
        if not (got == right).all():
            return
    pytest.fail("no schedule shows it")


def stored(reduce: str = "", dtype: str = "float32") -> Any:
    """Blocks of columns, through shared memory, by TMA into C (or onto what lies there)."""

    @T.prim_func
    def stored(A: T.Tensor((100, 128), dtype), C: T.Tensor((100, 128), dtype)):
        with T.Kernel(2, 2, threads=128) as (bx, by):
            tile = T.alloc_shared((64, 64), dtype)
            T.copy(A[by * 64, bx * 64], tile)
            T.fence_proxy_async()
            T.sync_threads()
            T.tma_copy(tile, C[by * 64, bx * 64], reduce=reduce)
            T.tma_store_arrive()
            T.tma_store_wait(0)

    return stored


@pytest.mark.parametrize(
    "reduce, dtype", [("", "float32"), ("add", "float32"), ("max", "int32"), ("min", "bfloat16")]
)
def test_stores_and_reductions_by_tma(reduce: str, dtype: str):
    kernel = stored(reduce, dtype)
    assert ("ts::tma_store(" if not reduce else f"ts::tma_reduce_{reduce}(") in print_kernel(
        lowered(kernel)[0]
    ).text
    agree(kernel, {"A": data((100, 128), dtype, 1), "C": data((100, 128), dtype, 2)}, exact=True)


def refilled(wait: bool) -> Any:
    """A tile is stored by TMA and filled with the same values again."""

    @T.prim_func
    def refilled(C: T.Tensor((2, 64, 64), "float32")):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((64, 64), "float32")
            for k in T.serial(2):
                T.fill(tile, 1.0)
                T.fence_proxy_async()
                T.sync_threads()
                T.tma_copy(tile, C[k, 0:64, 0:64])
                T.tma_store_arrive()
                if wait:
                    T.tma_store_wait(0, read=True)
                    T.sync_threads()
            T.tma_store_wait(0)

    return refilled


def test_a_tile_that_a_store_may_still_read_is_not_written():
    """Whatever is written: here the very values that lie there."""
    args = {"C": empty((2, 64, 64), "float32")}
    agree(refilled(True), args)
    made, program = lowered(refilled(False))
    with pytest.raises(EmulationError, match="a store by TMA reads it: nobody has awaited the store"):
        emulator.run(made, program, args)


@T.prim_func
def filled_by_halves(
    A: T.Tensor((64, 512), "float16"), B: T.Tensor((64, 512), "float16"), C: T.Tensor((64, 64), "float32")
):
    """C = A Bᵀ by one warpgroup, which fills its tiles again, two parts each, when it has multiplied them."""
    with T.Kernel(1, threads=128):
        a, b = T.alloc_shared((64, 128), "float16"), T.alloc_shared((64, 128), "float16")
        c, ready = T.alloc_fragment((64, 64), "float32"), T.alloc_barrier([128] * 2)
        for j in T.unroll(2):
            T.tma_copy(A[0:64, j * 64 : (j + 1) * 64], a[:, j * 64 : (j + 1) * 64], barrier=ready[j])
            T.tma_copy(B[0:64, j * 64 : (j + 1) * 64], b[:, j * 64 : (j + 1) * 64], barrier=ready[j])
            T.barrier_arrive(ready[j])
        T.clear(c)
        for k in T.serial(4):
            for j in T.unroll(2):
                T.barrier_wait(ready[j], k % 2)
                T.wgmma_gemm(a[:, j * 64 : (j + 1) * 64], b[:, j * 64 : (j + 1) * 64], c, transpose_B=True)
            T.wait_wgmma(0)
            if k < 3:
                for j in T.unroll(2):
                    at = (k + 1) * 128 + j * 64
                    T.tma_copy(A[0:64, at : at + 64], a[:, j * 64 : (j + 1) * 64], barrier=ready[j])
                    T.tma_copy(B[0:64, at : at + 64], b[:, j * 64 : (j + 1) * 64], barrier=ready[j])
                    T.barrier_arrive(ready[j])
        T.copy(c, C)


def test_copies_by_hand_need_no_barriers_of_the_block_but_behind_products():
    """Whoever reads a tile has waited for the barrier that its copy names. But who fills it again waits for
    all threads' products: a thread knows of its own warp's alone."""
    text = print_kernel(lowered(filled_by_halves)[0]).text
    (why,) = [line.partition("// ")[2] for line in text.splitlines() if "__syncthreads();  // " in line]
    assert why.startswith("T.tma_copy writes a that T.gemm, line ")
    assert text.index(why) > text.index("T.wait_wgmma(0)")
    a, b = data((64, 512), "float16", 1), data((64, 512), "float16", 2)
    agree(filled_by_halves, {"A": a, "B": b, "C": empty((64, 64), "float32")})


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
def test_it_compiles():
    made = toolchain.compile_cubin(
        print_kernel(lowered(gemm(4096, 4096, 4096, BN=256, stages=4))[0]), "sm_90a"
    )
    assert made.resources.spill_stores == 0 and not made.serialised, made.messages
    made = toolchain.compile_cubin(
        print_kernel(lowered(gemm(4096, 4096, 4096, stages=4, later=False))[0]), "sm_90a"
    )
    assert made.resources.spill_stores == 0 and not made.serialised, made.messages
    if sass.find_nvdisasm() is not None:
        assert sass.faults(sass.disassembled(made.code)) == []
    for reduce, dtype in (("", "float16"), ("add", "float32"), ("min", "int32"), ("max", "bfloat16")):
        toolchain.compile_cubin(print_kernel(lowered(stored(reduce, dtype))[0]), "sm_90a")


def two_sums(rounds: int = 6) -> Any:
    """Each of two warpgroups has products of its own, of tiles that lie at fixed places, which it awaits by a
    statement; both are 64 × 256, so a thread has no registers for both."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64, 64), "float16"),
        B: T.Tensor((64, 256), "float16"),
        C: T.Tensor((2, 64, 256), "float32"),
    ):
        with T.Kernel(1, threads=256):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 256), "float16")
            there = T.alloc_barrier(arrive_count=256)
            first, second = (T.alloc_fragment((64, 256), "float32") for _ in range(2))
            T.tma_copy(A, a, barrier=there)
            T.tma_copy(B, b, barrier=there)
            T.barrier_arrive(there)
            T.barrier_wait(there, 0)
            with T.ws(0):
                T.clear(first)
                for _ in T.serial(rounds):
                    T.wgmma_gemm(a, b, first)
                    T.wait_wgmma(0)
                T.copy(first, C[0, :, :])
            with T.ws(1):
                T.clear(second)
                for _ in T.serial(rounds // 2):
                    T.wgmma_gemm(a, b, second)
                    T.wait_wgmma(0)
                T.copy(second, C[1, :, :])

    return kernel


def test_a_condition_says_where_sums_begin():
    """``clear_accum`` of a product by hand, in a loop that the device unrolls: what the registers had before is not
    added, which the emulator fills with NaN."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64, 256), "float16"), B: T.Tensor((256, 64), "float16"), C: T.Tensor((64, 64), "float32")
    ):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 256), "float16"), T.alloc_shared((256, 64), "float16")
            c, there = T.alloc_fragment((64, 64), "float32"), T.alloc_barrier(arrive_count=128)
            T.tma_copy(A, a, barrier=there)
            T.tma_copy(B, b, barrier=there)
            T.barrier_arrive(there)
            T.barrier_wait(there, 0)
            for j in T.unroll(4):
                here = slice(j * 64, (j + 1) * 64)
                T.wgmma_gemm(a[:, here], b[here, :], c, clear_accum=(j == 0))
            T.wait_wgmma(0)
            T.copy(c, C)

    agree(
        kernel,
        {
            "A": data((64, 256), "float16", 1),
            "B": data((256, 64), "float16", 2),
            "C": empty((64, 64), "float32"),
        },
    )


def test_a_warpgroup_awaits_its_own_products():
    """Nothing else is named behind the wait; numbers of warpgroups and descriptors take no registers."""
    kernel = two_sums()
    text = tilescale.compile(kernel, target="cuda:sm_90a").get_kernel_source()
    own, other = (text.index(f"if (warpgroup == {g})") for g in (0, 1))
    assert text.count("wgmma_arrived<128>(second)") and "(second)" not in text[own:other]
    assert "(first)" not in text[other:] and "ts::uniform(tid >> 7)" in text
    assert text.count("ts::descriptor_here<128>") == 4 and "matrix_descriptor" not in text
    args = {
        "A": data((64, 64), "float16", 1),
        "B": data((64, 256), "float16", 2),
        "C": empty((2, 64, 256), "float32"),
    }
    agree(kernel, args)


def rows_by_hand(stages: int, width: int, dtype: str) -> Any:
    """Rows of A through a ring of single rows, doubled, and out again by TMA."""
    size = width * (4 if dtype == "float32" else 2)

    @T.prim_func
    def kernel(A: T.Tensor((7, 2 * width), dtype), C: T.Tensor((7, 2 * width), dtype)):
        with T.Kernel(1, threads=128):
            ring, out = T.alloc_shared((stages, width), dtype), T.alloc_shared((width,), dtype)
            full = T.alloc_barrier([1] * stages)
            for k in T.serial(7):
                with T.Scale("thread"):
                    if T.shuffle_elect(128):
                        T.mbarrier_expect_tx(full[k % stages], size)
                        T.tma_copy(A[k, width : 2 * width], ring[k % stages, :], barrier=full[k % stages])
                        T.mbarrier_arrive(full[k % stages])
                T.mbarrier_wait_parity(full[k % stages], k // stages % 2)
                for i in T.Parallel(width):
                    out[i] = ring[k % stages, i] + ring[k % stages, i]
                T.fence_proxy_async()
                T.sync_threads()
                with T.Scale("thread"):
                    if T.shuffle_elect(128):
                        T.tma_copy(out, C[k, width : 2 * width])
                        T.tma_store_arrive()
                        T.tma_store_wait(0)
                T.sync_threads()

    return kernel


@pytest.mark.parametrize(("stages", "width", "dtype"), [(1, 64, "bfloat16"), (3, 1024, "float32")])
def test_rows_by_tma(stages: int, width: int, dtype: str):
    kernel = rows_by_hand(stages, width, dtype)
    made = print_kernel(lowered(kernel)[0])
    assert made.text.count("ts::tma_load(") == max(1, width // 256)
    given = data((7, 2 * width), dtype, 3)
    left = agree(kernel, {"A": given, "C": np.zeros_like(given)}, exact=True)
    wide = numerics.decode(given, dtype)
    want = np.zeros_like(wide)
    want[:, width:] = 2 * wide[:, width:]
    assert np.array_equal(numerics.decode(left["C"], dtype), want)
