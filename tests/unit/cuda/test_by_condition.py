"""Warpgroups apart by conditions on the thread's index: on the simulator and on emulated threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tests.kernels import refused
from tests.unit.cuda import emulated
from tests.unit.language.test_every_word import traced
from tilescale.compiler.checks.run import launch
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.ir.text import text as program_text
from tilescale.errors import TileSyntaxError

RNG = np.random.default_rng(23)


def gathered(rounds: int, rows: int, valid: bool, scope: bool = False) -> Any:
    """C = A Bᵀ, where A's rows are those of X that the indices name: one warpgroup copies them, 16 bytes a thread,
    the other multiplies. ``scope``: it says so by T.attr."""

    @T.prim_func
    def kernel(
        X: T.Tensor((rows, 64 * rounds), "float16"),
        index: T.Tensor((64,), "int32"),
        B: T.Tensor((128, 64 * rounds), "float16"),
        C: T.Tensor((64, 128), "float32"),
    ):
        with T.Kernel(1, threads=256):
            a, b = T.alloc_shared((2, 64, 64), "float16"), T.alloc_shared((2, 128, 64), "float16")
            acc, most = T.alloc_fragment((64, 128), "float32"), T.alloc_fragment((64,), "float32")
            ready, free = T.alloc_barrier([128] * 2), T.alloc_barrier([128] * 2)
            places = T.alloc_fragment((4,), "int32")
            tx = T.get_thread_binding()
            if tx < 128:
                T.set_max_nreg(240, 1)
                T.clear(acc)
                for k in T.serial(rounds):
                    T.barrier_wait(ready[k % 2], (k // 2) & 1)
                    T.wgmma_gemm(a[k % 2, :, :], b[k % 2, :, :], acc, transpose_B=True)
                    T.wait_wgmma(0)
                    T.barrier_arrive(free[k % 2])
                T.reduce_max(acc, most, dim=1)
                for i, j in T.Parallel(64, 128):
                    acc[i, j] = acc[i, j] - most[i]
                T.copy(acc, C)
            else:
                T.set_max_nreg(80, 0)
                for r in T.serial(4):
                    places[r] = index[r * 16 + (tx - 128) // 8]
                for k in T.serial(rounds):
                    T.barrier_wait(free[k % 2], (k // 2) & 1 ^ 1)
                    for r in T.serial(4):
                        if not valid or places[r] < rows:
                            T.ptx_cp_async(
                                T.access_ptr(a[k % 2, r * 16 + (tx - 128) // 8, (tx - 128) % 8 * 8], "w", 8),
                                T.access_ptr(X[places[r], k * 64 + (tx - 128) % 8 * 8], "r", 8),
                                8,
                            )
                    if scope:
                        with T.attr("default", "async_scope", 1):
                            for r in T.serial(8):
                                for v in T.vectorized(8):
                                    b[k % 2, r * 16 + (tx - 128) // 8, (tx - 128) % 8 * 8 + v] = B[
                                        r * 16 + (tx - 128) // 8, k * 64 + (tx - 128) % 8 * 8 + v
                                    ]
                    else:
                        for r in T.serial(8):
                            T.ptx_cp_async(
                                T.access_ptr(b[k % 2, r * 16 + (tx - 128) // 8, (tx - 128) % 8 * 8], "w", 8),
                                T.access_ptr(
                                    B[r * 16 + (tx - 128) // 8, k * 64 + (tx - 128) % 8 * 8], "r", 8
                                ),
                                8,
                            )
                    T.cp_async_barrier_noinc(ready[k % 2])

    return kernel


@pytest.mark.parametrize("rounds, valid, scope", [(1, True, False), (5, True, True), (4, False, False)])
def test_a_producer_that_gathers(rounds: int, valid: bool, scope: bool):
    rows = 100
    x, b = (RNG.standard_normal((n, 64 * rounds)).astype("float16") for n in (rows, 128))
    index = RNG.integers(0, rows, 64, dtype="int32")
    if not valid:
        index[7] = rows + 3  # outside of the tensor, where copies give zero
    args = {"X": x, "index": index, "B": b, "C": np.full((64, 128), np.nan, "float32")}
    left = np.where((index < rows)[:, None], x[np.minimum(index, rows - 1)], 0).astype(float)
    want = left @ b.astype(float).T
    want -= want.max(1, keepdims=True)
    kernel = gathered(rounds, rows, valid, scope)
    found = launch(kernel, 1, args)
    assert not found.report.findings, found.report
    np.testing.assert_allclose(found.arrays[0]["C"], want, rtol=1e-3, atol=1e-2)
    out = emulated.run(kernel, args, "sm_90a", 0)
    np.testing.assert_allclose(out["C"], want, rtol=1e-3, atol=1e-2)
    text = print_kernel(emulated.lowered(kernel, "sm_90a").kernel).text
    assert "ts::wgmma_m64n128k16_f16" in text and "ts::cp_async_arrive(&ready" in text
    assert text.count("ts::cp_async<16>") == 2


def shared_scores(rounds: int, awaited: bool) -> Any:
    """O = Σ (Q Kᵀ) V over blocks of 64 rows of K and V: one warpgroup makes the scores and the left half of O,
    another one the right half, a third one copies. TMA brings Q, in parts of its columns, for all of them."""

    @T.prim_func
    def kernel(
        Q: T.Tensor((64, 128), "float16"),
        K: T.Tensor((64 * rounds, 128), "float16"),
        O: T.Tensor((64, 128), "float32"),
    ):
        with T.Kernel(1, threads=384):
            q, kv = T.alloc_shared((64, 128), "float16"), T.alloc_shared((2, 64, 128), "float16")
            scores, s = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            left, right = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            came, ready, free = T.alloc_barrier(384), T.alloc_barrier([128] * 2), T.alloc_barrier([256] * 2)
            made, used = T.alloc_barrier(256), T.alloc_barrier(256)
            turn = T.alloc_var("int32", 0)
            tx = T.get_thread_binding()
            T.tma_copy(Q[:, 0:64], q[:, 0:64], barrier=came)
            T.tma_copy(Q[:, 64:128], q[:, 64:128], barrier=came)
            T.barrier_arrive(came)
            if tx < 128:
                T.set_max_nreg(240, 1)
                T.clear(left)
                T.barrier_wait(came, 0)
                for k in T.serial(rounds):
                    T.barrier_wait(ready[k % 2], (k // 2) & 1)
                    T.clear(s)
                    T.wgmma_gemm(q[:, :64], kv[k % 2, :, :64], s, transpose_B=True)
                    T.wgmma_gemm(q[:, 64:], kv[k % 2, :, 64:], s, transpose_B=True)
                    T.wait_wgmma(0)
                    if k > 0:
                        T.barrier_arrive(used)
                        T.barrier_wait(used, (k - 1) & 1)
                    T.copy(s, scores)
                    T.gemm(scores, kv[k % 2, :, 0:64], left)
                    T.barrier_arrive(made)
                    T.barrier_arrive(free[k % 2])
                    turn += 1
                T.copy(left, O[:, 0:64])
            elif tx >= 128 and tx < 256:
                T.set_max_nreg(168, 1)
                T.clear(right)
                for k in T.serial(rounds):
                    T.barrier_arrive(made)
                    T.barrier_wait(made, turn & 1)
                    if awaited:
                        T.wgmma_gemm(scores, kv[k % 2, :, 64:], right)
                        T.wait_wgmma(0)
                    else:
                        T.gemm(scores, kv[k % 2, :, 64:], right)
                    T.barrier_arrive(free[k % 2])
                    if k != rounds - 1:
                        T.barrier_arrive(used)
                    turn += 1
                T.copy(right, O[:, 64:128])
            elif tx >= 256:
                T.set_max_nreg(80, 0)
                for k in T.serial(rounds):
                    T.barrier_wait(free[k % 2], (k // 2) & 1 ^ 1)
                    for r in T.serial(4):
                        for u in T.serial(2):
                            row, col = r * 16 + (tx - 256) // 8, u * 64 + (tx - 256) % 8 * 8
                            T.ptx_cp_async(
                                T.access_ptr(kv[k % 2, row, col], "w", 8),
                                T.access_ptr(K[k * 64 + row, col], "r", 8),
                                8,
                            )
                    T.cp_async_barrier_noinc(ready[k % 2])

    return kernel


@pytest.mark.parametrize("rounds, awaited", [(1, False), (4, False), (5, True)])
def test_two_warpgroups_share_scores(rounds: int, awaited: bool):
    q, k = (RNG.standard_normal((n, 128)).astype("float16") for n in (64, 64 * rounds))
    args = {"Q": q, "K": k, "O": np.full((64, 128), np.nan, "float32")}
    s = (q.astype(float) @ k.astype(float).T).astype("float16").astype(float)
    want = s @ k.astype(float)
    kernel = shared_scores(rounds, awaited)
    found = launch(kernel, 1, args)
    assert not found.report.findings, found.report
    for out in (found.arrays[0]["O"], emulated.run(kernel, args, "sm_90a", 0)["O"]):
        np.testing.assert_allclose(out, want, rtol=2e-3, atol=2e-1)


@pytest.mark.parametrize("fault", ["fence", "arrive"])
def test_what_is_left_out_is_found(fault: str, monkeypatch: pytest.MonkeyPatch):
    """Without the proxy fence in front of products, and where a thread arrives before its copies have come."""
    from tilescale.compiler.emulator import async_units
    from tilescale.compiler.passes import expert_products

    if fault == "fence":
        monkeypatch.setattr(expert_products, "_written_apart", lambda program: set())
    else:
        monkeypatch.setattr(async_units, "copies_arrive", async_units.barrier_arrive)
    x, b = (RNG.standard_normal((n, 192)).astype("float16") for n in (90, 128))
    args = {"X": x, "index": np.arange(64, dtype="int32"), "B": b, "C": np.zeros((64, 128), "float32")}
    with pytest.raises(AssertionError, match="without fence.proxy.async|while a copy into it is under way"):
        emulated.run(gathered(3, 90, True), args, "sm_90a", 0)


def shared_out_by_warps(rounds: int) -> Any:
    """C = A of rows scaled: one warpgroup multiplies; of the other one, a warp copies A, by TMA while rows are
    whole, another one the factors. A third warp sets a variable of the block for itself and stores what it
    counts."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64 * rounds, 64), "float16"),
        V: T.Tensor((64 * rounds,), "float32"),
        C: T.Tensor((64 * rounds, 64), "float32"),
        D: T.Tensor((32,), "int32"),
    ):
        with T.Kernel(1, threads=256):
            a, v = T.alloc_shared((2, 64, 64), "float16"), T.alloc_shared((2, 64), "float32")
            acc = T.alloc_fragment((64, 64), "float32")
            ready, free = T.alloc_barrier([64] * 2), T.alloc_barrier([128] * 2)
            last = T.alloc_var("int32", init=1)
            tx = T.get_thread_binding()
            if tx < 128:
                T.set_max_nreg(240, 1)
                for k in T.serial(rounds):
                    T.barrier_wait(ready[k % 2], k // 2 % 2)
                    for i, j in T.Parallel(64, 64):
                        acc[i, j] = a[k % 2, i, j] * v[k % 2, i]
                    T.fence_proxy_async()
                    T.barrier_arrive(free[k % 2])
                    T.copy(acc, C[k * 64, 0])
            else:
                T.set_max_nreg(24, 0)
                if tx < 160:
                    for k in T.serial(rounds):
                        T.barrier_wait(free[k % 2], (k // 2 + 1) % 2)
                        if k + 1 < rounds:
                            T.tma_copy(A[k * 64 : k * 64 + 64, :], a[k % 2, :, :], barrier=ready[k % 2])
                        else:
                            for i, j in T.Parallel(64, 64):
                                a[k % 2, i, j] = A[k * 64 + i, j]
                        T.barrier_arrive(ready[k % 2])
                elif tx < 192:
                    for k in T.serial(rounds):
                        T.barrier_wait(free[k % 2], (k // 2 + 1) % 2)
                        for i in T.Parallel(64):
                            v[k % 2, i] = V[k * 64 + i]
                        T.barrier_arrive(ready[k % 2])
                elif tx < 224:
                    last = last + rounds
                    for i in T.Parallel(32):
                        D[i] = last * i

    return kernel


@pytest.mark.parametrize("rounds", [1, 5])
def test_warps_of_a_warpgroup_do_what_their_condition_says(rounds: int):
    a, v = RNG.standard_normal((64 * rounds, 64)).astype("float16"), RNG.random(64 * rounds, "float32")
    args = {"A": a, "V": v, "C": np.zeros(a.shape, "float32"), "D": np.zeros(32, "int32")}
    want = {"C": a.astype("float32") * v[:, None], "D": np.arange(32) * (rounds + 1)}
    kernel = shared_out_by_warps(rounds)
    found = launch(kernel, 1, args)
    assert not found.report.findings, found.report
    for out in (found.arrays[0], emulated.run(kernel, args, "sm_90a", 0)):
        for name, array in want.items():
            np.testing.assert_array_equal(out[name], array)


@pytest.mark.parametrize("threads", [64, 160, 256])
def test_two_warps_of_a_block_hand_rows_over(threads: int):
    @T.prim_func
    def kernel(A: T.Tensor((7, 64), "float32"), C: T.Tensor((7, 64), "float32")):
        with T.Kernel(1, threads=threads):
            a = T.alloc_shared((2, 64), "float32")
            full, empty = T.alloc_barrier([32] * 2), T.alloc_barrier([32] * 2)
            tx = T.get_thread_binding()
            if tx < 32:
                for k in T.serial(7):
                    T.barrier_wait(empty[k % 2], (k // 2 + 1) % 2)
                    T.tma_copy(A[k, 0:64], a[k % 2, :], barrier=full[k % 2])
                    T.barrier_arrive(full[k % 2])
            elif tx < 64:
                for k in T.serial(7):
                    T.barrier_wait(full[k % 2], k // 2 % 2)
                    for i in T.Parallel(64):
                        C[k, i] = a[k % 2, i] * 2
                    T.fence_proxy_async()
                    T.barrier_arrive(empty[k % 2])

    args = {"A": RNG.random((7, 64), "float32"), "C": np.zeros((7, 64), "float32")}
    found = launch(kernel, 1, args)
    assert not found.report.findings, found.report
    for out in (found.arrays[0], emulated.run(kernel, args, "sm_90a", 0)):
        np.testing.assert_array_equal(out["C"], args["A"] * 2)


def one_warp_beside_two(side: int, second: bool = False) -> Any:
    """Rows of S, a square, are scaled to sums of one by warp 0, or by the second of three warps, between what
    the others do: D = Σ v A."""

    @T.prim_func
    def kernel(
        S: T.Tensor((side, side), "float32"),
        A: T.Tensor((4, 192), "float32"),
        C: T.Tensor((side, side), "float32"),
        D: T.Tensor((192,), "float32"),
    ):
        with T.Kernel(1, threads=96):
            v = T.alloc_shared((4,), "float32")
            tx = T.get_thread_binding()
            if (tx // 32 == 1) if second else (tx < 32):
                square, sums = T.alloc_fragment((side, side), "float32"), T.alloc_fragment((side,), "float32")
                T.copy(S, square)
                for _ in T.serial(3):
                    T.reduce_sum(square, sums, dim=1)
                    for i, j in T.Parallel(side, side):
                        square[i, j] /= sums[i]
                T.copy(square, C)
            else:
                total = T.alloc_fragment((192,), "float32")
                for i in T.Parallel(4):
                    v[i] = S[i, 0] + 1.0
                T.clear(total)
                for i in T.serial(4):
                    for j in T.Parallel(192):
                        total[j] += v[i] * A[i, j]
                T.copy(total, D)

    return kernel


@pytest.mark.parametrize("side, second, alone", [(4, False, True), (5, True, True), (6, False, False)])
def test_what_one_warp_does_with_small_tiles_is_its_own(side: int, second: bool, alone: bool):
    kernel = one_warp_beside_two(side, second)
    traced = program_text(kernel.trace())
    assert (f'copy(S[0:{side}, 0:{side}], square[0:{side}, 0:{side}], executor="warp")' in traced) == alone
    code = print_kernel(emulated.lowered(kernel, "sm_90a").kernel).text
    start = code.index("T.copy(S, square)")
    assert not alone or "__syncthreads" not in code[start : code.index("T.copy(square, C)", start)], code
    s, a = RNG.random((side, side), "float32") + 0.5, RNG.random((4, 192), "float32")
    args = {"S": s, "A": a, "C": np.full(s.shape, np.nan, "float32"), "D": np.full(192, np.nan, "float32")}
    want = {"C": s / s.sum(1, keepdims=True), "D": ((s[:4, :1] + 1) * a).sum(0)}
    found = launch(kernel, 1, args)
    assert not found.report.findings, found.report
    compiled = {k: torch.from_numpy(x.copy()) for k, x in args.items()}
    tilescale.compile(kernel, target="cpu")(*compiled.values())
    on_cpu = {k: x.numpy() for k, x in compiled.items()}
    for out in (found.arrays[0], on_cpu, *(emulated.run(kernel, args, x, 0) for x in ("sm_80", "sm_90a"))):
        for name, array in want.items():
            np.testing.assert_allclose(out[name], array, rtol=1e-5)


def test_registers_move_between_whole_warpgroups_alone():
    def kernel(edge: int) -> Any:
        @T.prim_func
        def moved(A: T.Tensor((256,), "float32")):
            with T.Kernel(1, threads=256):
                tx = T.get_thread_binding()
                if tx < edge:
                    T.set_max_nreg(240, 1)

        return moved

    kernel(128).trace()
    with refused(TileSyntaxError, "registers move between warpgroups", write="threads of whole warpgroups"):
        kernel(64).trace()


POINTERS = 'T.ptx_cp_async(T.access_ptr({}, "w", {}), T.access_ptr({}, "r", {}), {})'


@pytest.mark.parametrize(
    "text, message",
    [
        ("T.ptx_cp_async(h[0, 0], H[0, 0], 8)", "T.ptx_cp_async from H[0, 0] to tile[0, 0]"),
        (POINTERS.format("h[0, 0]", 8, "A[0, 0]", 8, 8), "from A of float32 to h of float16"),
        (POINTERS.format("h[0, 0]", 4, "H[0, 0]", 8, 8), "pointers to 4 and 8"),
        (POINTERS.format("h[0, 0]", 3, "H[0, 0]", 3, 3), "3 elements of float16"),
        ("T.ptx_wait_group(n)", "T.ptx_wait_group(n)"),
        ("T.cp_async_barrier_noinc(a)", "T.cp_async_barrier_noinc is a tile of (64, 64)"),
        ("T.wgmma_gemm(h, g, f, annotations={'a': 1})", "T.wgmma_gemm with annotations={'a': 1}"),
        (
            "with T.attr('d', 'async_scope', 1):\n    for v in T.vectorized(8): h[0, v] = 0",
            "what stores into h",
        ),
        ("with T.attr('d', 'async_scope', 0):\n    pass", "T.attr of 'async_scope'"),
    ],
)
def test_refusals(text: str, message: str):
    assert message in traced(text)


def test_the_cpu_refuses_instructions_of_gpus():
    from tests.kernels import run as compiled

    with refused(TileSyntaxError, "is not there on the cpu target"):
        compiled(gathered(1, 80, True))
