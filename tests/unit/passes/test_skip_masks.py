"""Masks that hold for a whole tile: decided once for it, and loops cut where their rounds begin to have some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty, lowered
from tilescale.compiler.checks.run import check
from tilescale.compiler.cuda.printer import print_kernel

M, N, D, LOW = 64, 64, 32, -1e30


def attention(mask: Callable[..., Any], stages: int = 2, threads: int = 128) -> Any:
    """One block of queries: O = softmax(Q Kᵀ, masked) V, the exponentials as they are. ``mask(s, n, length)``
    masks the n-th tile of scores."""

    @T.prim_func
    def kernel(
        Q: T.Tensor((M, D), "float16"), K: T.Tensor((5 * N, D), "float16"), V: T.Tensor((5 * N, D), "float16"),
        O: T.Tensor((M, D), "float32"), length: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, threads=threads):
            q, k, v = (T.alloc_shared((e, D), "float16") for e in (M, N, N))
            s, p = T.alloc_fragment((M, N), "float32"), T.alloc_fragment((M, N), "float16")
            o, total = T.alloc_fragment((M, D), "float32"), T.alloc_fragment((M,), "float32")
            part = T.alloc_fragment((M,), "float32")
            T.copy(Q, q)
            T.clear(o)
            T.clear(total)
            for n in T.Pipelined(T.ceildiv(length, N), num_stages=stages):
                T.copy(K[n * N, 0], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                mask(s, n, length)
                for i, j in T.Parallel(M, N):
                    s[i, j] = T.exp2(s[i, j] * 0.1)
                T.reduce_sum(s, part, dim=1)
                for i in T.Parallel(M):
                    total[i] += part[i]
                T.copy(s, p)
                T.copy(V[n * N, 0], v)
                T.gemm(p, v, o)
            for i, j in T.Parallel(M, D):
                o[i, j] /= T.max(total[i], 1e-30)
            T.copy(o, O)

    return kernel


@T.macro
def ragged(s: Any, n: Any, length: Any) -> None:
    for i, j in T.Parallel(M, N):
        s[i, j] = T.if_then_else(n * N + j < length, s[i, j], LOW)


@T.macro
def from_behind(s: Any, n: Any, length: Any) -> None:
    """The first tiles have masks, not the last ones; two comparisons."""
    for i, j in T.Parallel(M, N):
        s[i, j] = T.if_then_else(T.And(n * N + j >= 100, n * N + j + i >= 80), s[i, j], LOW)


@T.macro
def turned(s: Any, n: Any, length: Any) -> None:
    """The other side is masked, and a name stands for the place."""
    for i, j in T.Parallel(M, N):
        at = n * N + j
        s[i, j] = T.if_then_else(at > length - 1, LOW, s[i, j])


@T.macro
def by_memory(s: Any, n: Any, length: Any) -> None:
    for i, j in T.Parallel(M, N):
        s[i, j] = T.if_then_else(s[i, j] < 1.0, s[i, j], LOW)


def arguments(length: int) -> dict[str, Any]:
    made = {name: data((5 * N, D), "float16", ord(name)) for name in "KV"}
    return made | {"Q": data((M, D), "float16", 1), "O": empty((M, D), "float32"), "length": length}


MASKS = [ragged, from_behind, turned]


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128, 300, 320])
@pytest.mark.parametrize("mask", MASKS, ids=lambda m: str(m.__name__))
def test_masked_rounds_are_a_loop_of_their_own(mask: Any, length: int):
    kernel = attention(mask)
    made = lowered(kernel)
    assert {"skip_masks", "overlap_products"} <= set(made.program.fired)
    agree(kernel, arguments(length))


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: str(m.__name__))
def test_nothing_is_compared_in_rounds_without_a_mask(mask: Any):
    """Of the loops that multiply, one has no choice in it, and none a branch: products are under way there."""
    text = print_kernel(lowered(attention(mask)).kernel).text
    loops = text.split("for (int n = 0")[-2:]
    assert all("wgmma_m64" in loop for loop in loops)
    assert [" ? " in loop.split("wgmma_wait<0>")[0] for loop in loops] in ([False, True], [True, False]), text
    assert "if (!(" not in text


@pytest.mark.parametrize("arch, stages", [("sm_80", 2), ("sm_90a", 0)])
@pytest.mark.parametrize("length", [1, 128, 300])
def test_without_a_producer_a_branch_stands_around_the_mask(arch: str, stages: int, length: int):
    kernel = attention(ragged, stages)
    assert "if (!(n * 64 + 63 < length))" in print_kernel(lowered(kernel, arch).kernel).text
    agree(kernel, arguments(length), arch=arch)


@T.macro
def computed(s: Any, n: Any, length: Any) -> None:
    for i, j in T.Parallel(M, N):
        s[i, j] = T.if_then_else(n * N + j < length, s[i, j] * 2.0, LOW)


@pytest.mark.parametrize("mask", [by_memory, computed], ids=["what memory holds", "a nest that computes"])
def test_other_choices_stay(mask: Any):
    assert "skip_masks" not in lowered(attention(mask)).program.fired


def causal(first: bool) -> Any:
    """Scores that begin at zero or at the mask, several tiles of queries, and a mask of two tiles at once."""

    @T.prim_func
    def kernel(
        Q: T.Tensor((4 * M, D), "float16"),
        K: T.Tensor((4 * N, D), "float16"),
        S: T.Tensor((4 * M,), "float32"),
    ):
        with T.Kernel(4, threads=128) as b:
            q, k = T.alloc_shared((M, D), "float16"), T.alloc_shared((N, D), "float16")
            s, most = T.alloc_fragment((M, N), "float32"), T.alloc_fragment((M,), "float32")
            T.copy(Q[b * M, 0], q)
            T.fill(most, LOW)
            for n in T.Pipelined(4, num_stages=2):
                T.copy(K[n * N, 0], k)
                if first:
                    for i, j in T.Parallel(M, N):
                        s[i, j] = T.if_then_else(b * M + i >= n * N + j, 0.0, -T.infinity("float32"))
                    T.gemm(q, k, s, transpose_B=True)
                else:
                    T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                    for i, j in T.Parallel(M, N):
                        s[i, j] = T.if_then_else(b * M + i >= n * N + j, s[i, j], -T.infinity("float32"))
                T.reduce_max(s, most, dim=1, clear=False)
            T.copy(most, S[b * M])

    return kernel


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_a_product_is_added_to_the_mask_or_masked(first: bool, arch: str):
    kernel = causal(first)
    assert "skip_masks" in lowered(kernel, arch).program.fired
    args = {"Q": data((4 * M, D), "float16", 1), "K": data((4 * N, D), "float16", 2)}
    agree(kernel, args | {"S": empty((4 * M,), "float32")}, arch=arch)


def test_the_simulator_finds_the_same_bits_at_both_levels():
    report = check(attention(ragged), 1, arguments(130), level="both", arch="sm_90a", seeds=2)
    assert report, report
