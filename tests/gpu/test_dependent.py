"""Programmatic dependent launches on a Hopper GPU: each reads what the one in front wrote."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale
import tilescale.language as T

torch: Any = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]

N = 132 * 4096


def rotated(pdl: bool = True) -> Any:
    """C[i] = A[i + 4097] + 1: a block reads what two blocks of the launch in front wrote."""

    @T.prim_func
    def rotated(A: T.Tensor((N,), "int32"), C: T.Tensor((N,), "int32")):
        with T.Kernel(N // 4096, threads=256, pdl=pdl) as b:
            for i in T.Parallel(4096):
                C[b * 4096 + i] = A[(b * 4096 + i + 4097) % N] + 1

    return tilescale.compile(rotated, target="cuda")


def chain(made: Any, x: Any, y: Any, rounds: int) -> Any:
    for _ in range(rounds):
        made(x, y)
        made(y, x)
    return x


@pytest.mark.parametrize("captured", [False, True])
def test_a_chain_of_launches(captured: bool):
    made, rounds = rotated(), 50
    x, y = (
        torch.randint(0, 1 << 20, (N,), device="cuda", dtype=torch.int32),
        torch.empty(N, device="cuda", dtype=torch.int32),
    )
    want = torch.roll(x, -4097 * 2 * rounds) + 2 * rounds
    if captured:
        first = x.clone()
        made(x, y)  # loads the code
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain(made, x, y, rounds)
        for _ in range(20):
            x.copy_(first)
            graph.replay()
            assert (x == want).all()
    else:
        assert (chain(made, x, y, rounds) == want).all()
