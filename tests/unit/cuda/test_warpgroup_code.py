"""Warpgroups with code of their own: products that are one warpgroup's alone, on the emulated Hopper
block."""

from __future__ import annotations

import re
from typing import Any

import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty
from tests.unit.cuda.test_hopper import edited, lowered
from tilescale.compiler import emulator
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.env import WITHOUT
from tilescale.ops.latent_attention import decode


def halves(rounds: int = 3, stages: int = 1, barrier: bool = False) -> Any:
    """C = sum of (|A · B₁ᵀ| as bfloat16) · B₁ + (|A · B₂ᵀ| as bfloat16) · B₂ over pairs of tiles of B, each
    warpgroup with one of both scores and with one half of C's columns."""

    @T.prim_func
    def halves(
        A: T.Tensor((64, 128), "bfloat16"),
        B: T.Tensor((rounds * 128, 128), "bfloat16"),
        C: T.Tensor((64, 128), "float32"),
    ):
        with T.Kernel(1, threads=256):
            a, p = T.alloc_shared((64, 128), "bfloat16"), T.alloc_shared((64, 64), "bfloat16")
            tiles = [[T.alloc_shared((64, 64), "bfloat16") for _ in range(2)] for _ in range(2)]
            s, c = ([T.alloc_fragment((64, 64), "float32") for _ in range(2)] for _ in range(2))
            T.copy(A, a)
            for k in range(2):
                T.clear(c[k])
            for t in T.Pipelined(rounds, num_stages=stages):
                for k in range(2):
                    for n in range(2):
                        T.copy(B[(2 * t + k) * 64, n * 64], tiles[k][n])
                for k in range(2):
                    for n in range(2):
                        T.gemm(
                            a[:, n * 64 : n * 64 + 64],
                            tiles[k][n],
                            s[k],
                            False,
                            True,
                            T.GemmWarpPolicy.FullRow,
                            clear_accum=n == 0,
                        )
                for k in range(2):
                    for i, j in T.Parallel(64, 64):
                        s[k][i, j] = T.abs(s[k][i, j])
                    T.copy(s[k], p)
                    for n in range(2):
                        T.gemm(p, tiles[k][n], c[n], policy=T.GemmWarpPolicy.FullRow)
                if barrier:
                    T.barrier()
            for n in range(2):
                T.copy(c[n], C[:, n * 64 : n * 64 + 64])

    return halves


def pairs(rounds: int = 3) -> Any:
    """As `halves`, but C has 128 columns for each of the pair's tiles, and its half is one warpgroup's own in
    two accumulators, from scores that stay in registers."""

    @T.prim_func
    def pairs(
        A: T.Tensor((64, 128), "bfloat16"),
        B: T.Tensor((rounds * 128, 128), "bfloat16"),
        C: T.Tensor((64, 256), "float32"),
    ):
        with T.Kernel(1, threads=256):
            a = T.alloc_shared((64, 128), "bfloat16")
            tiles = [[T.alloc_shared((64, 64), "bfloat16") for _ in range(2)] for _ in range(2)]
            s = [T.alloc_fragment((64, 64), "float32") for _ in range(2)]
            p = [T.alloc_fragment((64, 64), "bfloat16") for _ in range(2)]
            c = [[T.alloc_fragment((64, 64), "float32") for _ in range(2)] for _ in range(2)]
            T.copy(A, a)
            for x in (*c[0], *c[1]):
                T.clear(x)
            for t in T.Pipelined(rounds, num_stages=1):
                for k in range(2):
                    for n in range(2):
                        T.copy(B[(2 * t + k) * 64, n * 64], tiles[k][n])
                for k in range(2):
                    for n in range(2):
                        T.gemm(
                            a[:, n * 64 : n * 64 + 64],
                            tiles[k][n],
                            s[k],
                            False,
                            True,
                            T.GemmWarpPolicy.FullRow,
                            clear_accum=n == 0,
                        )
                for k in range(2):
                    T.copy(s[k], p[k])
                    for n in range(2):
                        T.gemm(p[k], tiles[k][n], c[k][n], policy=T.GemmWarpPolicy.FullRow)
                T.barrier()
            for k in range(2):
                for n in range(2):
                    T.copy(c[k][n], C[0, k * 128 + n * 64])

    return pairs


def arguments(rounds: int = 3) -> dict[str, Any]:
    return {
        "A": data((64, 128), "bfloat16", 1, 0.1),
        "B": data((rounds * 128, 128), "bfloat16", 2, 0.1),
        "C": empty((64, 128), "float32"),
    }


def texts(kernel: Any) -> list[str]:
    """The loops of both warpgroups, without comments."""
    text = re.sub(r"\s*//.*", "", print_kernel(lowered(kernel)[0]).text)
    first, second = text.split("const int lane = tid")[1:]
    return [part[part.index("for (int t") :] for part in (first, second)]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_each_warpgroup_has_its_own_products(stages: int, seed: int):
    for group, text in enumerate(texts(halves(stages=stages))):
        issued = re.findall(r"ts::wgmma_m64n64k16_bf16_0(\d)\(&(\w+)\[0\], \w+, \w+, (\d)\)", text)
        scores, values = ({name for kind, name, _ in issued if kind == k} for k in "01")
        assert len(scores) == len(values) == 1, (group, issued)
    agree(halves(stages=stages), arguments(), seed=seed)


def test_waits_are_those_of_the_own_queue_and_stages():
    first, second = texts(halves())
    # the first warpgroup reads the second pair's left tile alone, and only for c: it is awaited behind its
    # scores' end
    waits = [re.findall(r"mbarrier_wait\(&full(\d)|(wgmma_wait<\d)", text) for text in (first, second)]
    order = [[a or b for a, b in w] for w in waits]
    assert order[0].index("2") > order[0].index("wgmma_wait<0") and "3" not in order[0], order
    assert order[1][:2] == ["2", "3"] and "0" not in order[1], order
    assert "wgmma_wait<1" in order[1], "the second one's scores are complete while what follows them runs"


def test_a_barrier_awaits_products():
    for text in texts(halves(barrier=True)):
        tail = text[
            text.rindex("ts::wgmma_commit") : text.index("// T.barrier")
            if "// T.barrier" in text
            else len(text)
        ]
        assert tail.index("ts::wgmma_wait<0") < tail.index("ts::barrier_sync")
    agree(halves(barrier=True), arguments())


def test_accumulators_of_one_operand_in_registers_go_together():
    for k, text in enumerate(texts(pairs())):
        made = re.findall(r"wgmma_m64n64k16_bf16_r1\(&(\w+)\[0\], &(\w+)\[\d+\]", text)
        assert len(set(made)) == 2 and len({p for _, p in made}) == 1, (k, made)
    agree(pairs(), {**arguments(), "C": empty((64, 256), "float32")})


def test_stages_are_given_back_one_by_one(monkeypatch: pytest.MonkeyPatch):
    """Where a ring has one stage, which the next copy waits for, behind the product that read it last and not
    behind all."""
    monkeypatch.setenv(WITHOUT.name, "spare_stages")
    for text in texts(pairs()):
        behind = text[text.rindex("ts::wgmma_commit") : text.index("ts::barrier_sync")]
        found = re.findall(r"wgmma_wait<\d|mbarrier_arrive", behind)
        assert found == ["wgmma_wait<1", "mbarrier_arrive", "wgmma_wait<0", "mbarrier_arrive"], found


def test_a_branch_leaves_another_warpgroups_products_alone():
    """Latent attention's second warpgroup computes its exponentials under a product, though the first one's
    result may shrink meanwhile."""
    first, second = texts(decode(64, 128, 64, 1.0, "bfloat16", 0, 1, 64, 64))
    beside = second[second.index("m64n64k16_bf16_01") :]
    beside = beside[: beside.index("wgmma_wait")]
    assert "fast_exp2" in beside and "barrier_sync" in beside
    hears = first[first.index("one_peer_scale[u] = two_fall") :]
    assert hears.index("wgmma_wait<0>") < hears.index("ts::any") < hears.index("m64n64k16_bf16_01")
    assert all(text.count("shuffle_xor") == 4 for text in (first, second)), (
        "sums stay apart until the loop's end"
    )


def test_a_wait_too_weak_for_its_queue_is_found():
    made, program = lowered(halves())
    right = emulator.run(made, program, arguments())["C"]
    broken = edited(made, lambda n, a: None if n == "ts::wgmma_wait<1>" else ...)
    for seed in range(6):
        try:
            got = emulator.run(broken, program, arguments(), seed)["C"]
        except emulator.EmulationError:
            return
        if not (got == right).all():
            return
    pytest.fail("no schedule shows it")
