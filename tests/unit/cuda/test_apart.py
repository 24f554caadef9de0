"""Warpgroups with code of their own: products that are one warpgroup's alone, on the emulated Hopper block."""

from __future__ import annotations

import re
from typing import Any

import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty
from tests.unit.cuda.test_hopper import edited, lowered
from tilescale.compiler.cuda import emulate, engines
from tilescale.compiler.cuda.printer import print_kernel


def halves(rounds: int = 3, stages: int = 1, barrier: bool = False) -> Any:
    """C = sum of (|A · B₁ᵀ| as bfloat16) · B₁ + (|A · B₂ᵀ| as bfloat16) · B₂ over pairs of tiles of B, each warpgroup with one of both
    scores and with one half of C's columns."""

    @T.prim_func
    def halves(A: T.Tensor((64, 128), "bfloat16"), B: T.Tensor((rounds * 128, 128), "bfloat16"), C: T.Tensor((64, 128), "float32")):
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
                        T.gemm(a[:, n * 64 : n * 64 + 64], tiles[k][n], s[k], False, True, T.GemmWarpPolicy.FullRow, clear_accum=n == 0)
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


def arguments(rounds: int = 3) -> dict[str, Any]:
    return {"A": data((64, 128), "bfloat16", 1, 0.1), "B": data((rounds * 128, 128), "bfloat16", 2, 0.1), "C": empty((64, 128), "float32")}


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
    # the first warpgroup reads the second pair's left tile alone, and only for c: it is awaited behind its scores' end
    waits = [re.findall(r"mbarrier_wait\(&full(\d)|(wgmma_wait<\d)", text) for text in (first, second)]
    order = [[a or b for a, b in w] for w in waits]
    assert order[0].index("2") > order[0].index("wgmma_wait<0") and "3" not in order[0], order
    assert order[1][:2] == ["2", "3"] and "0" not in order[1], order
    assert "wgmma_wait<1" in order[1], "the second one's scores are complete while what follows them runs"


def test_a_barrier_awaits_products():
    for text in texts(halves(barrier=True)):
        tail = text[text.rindex("ts::wgmma_commit") : text.index("// T.barrier") if "// T.barrier" in text else len(text)]
        assert tail.index("ts::wgmma_wait<0") < tail.index("ts::barrier_sync")
    agree(halves(barrier=True), arguments())


def test_a_wait_too_weak_for_its_queue_is_found():
    made, program = lowered(halves())
    right = emulate.run(made, program, arguments())["C"]
    broken = edited(made, lambda n, a: None if n == "ts::wgmma_wait<1>" else ...)
    for seed in range(6):
        try:
            got = emulate.run(broken, program, arguments(), seed)["C"]
        except engines.EmulationError:
            return
        if not (got == right).all():
            return
    pytest.fail("no schedule shows it")

