"""Names for conditions inside T.Parallel, and selections between elements of tiles: right, and in vectors."""

from __future__ import annotations

import torch

import tilescale.language as T
from tests.kernels import run, scheduled
from tilescale.compiler.cpu.lower import Lowering


@T.prim_func
def named(A: T.Tensor((4, 64), "float32"), C: T.Tensor((4, 64), "float32"), D: T.Tensor((4, 64), "float32")):
    with T.Kernel(4) as bx:
        a, c, d = (T.alloc_fragment((64,), "float32") for _ in range(3))
        T.copy(A[bx, 0], a)
        for i in T.Parallel(64):
            seen = i < 16 * bx + 5
            c[i] = T.if_then_else(seen, a[i], -1.0)
        for i in T.Parallel(64):
            positive = a[i] > 0
            a[i] = 7
            d[i] = T.if_then_else(positive, 1.0, 0.0)  # the condition of before a[i] was overwritten
        T.copy(c, C[bx, 0])
        T.copy(d, D[bx, 0])


def test_a_named_condition_is_evaluated_where_it_stands() -> None:
    a, c, d = torch.randn(4, 64), torch.full((4, 64), float("nan")), torch.full((4, 64), float("nan"))
    run(named)(a, c, d)
    seen = torch.arange(64)[None] < 16 * torch.arange(4)[:, None] + 5
    assert torch.equal(c, torch.where(seen, a, torch.tensor(-1.0)))
    assert torch.equal(d, (a > 0).float())


def test_selections_between_tile_elements_stay_vectors() -> None:
    text = Lowering(scheduled(named)).run()["ts_block"].script()
    assert "if_then_else" not in text
