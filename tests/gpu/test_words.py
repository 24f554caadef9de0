"""On a GPU: numbers of 4 bits stored one by one, barriers and copies by TMA of a cluster, tiles of vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale
from tests.unit.ops import test_cluster_barriers as barriers
from tests.unit.ops import test_narrow_stores as narrow
from tests.unit.ops import test_tma_copy_shared as copies
from tests.unit.ops import test_vector_tiles as vectors

torch: Any = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]


@pytest.mark.parametrize("dtype", narrow.DTYPES)
@pytest.mark.parametrize("way", narrow.WAYS, ids=lambda w: w.__name__)
def test_numbers_of_four_bits(way: Any, dtype: str):
    kernel = narrow.stored(way, dtype)
    low = 0 if dtype == "uint4" else -4
    x = torch.randint(low, 5, (32, 64)).float()
    a = torch.randint(0, 0x45, (32, 32), dtype=torch.uint8) & 0x77
    a = a.view(torch.int8) if dtype == "int4" else a
    want, got = a.clone(), a.cuda()
    tilescale.compile(kernel, target="cpu")(x, want)
    tilescale.compile(kernel, target="cuda")(x.cuda(), got)
    assert torch.equal(got.cpu(), want)


def test_barriers_of_a_cluster():
    made = tilescale.compile(barriers.gathered(), target="cuda")
    for _ in range(100):
        c = torch.zeros(3, 8, 32, dtype=torch.int32, device="cuda")
        made(c)
        np.testing.assert_array_equal(c.cpu().numpy(), barriers.WANT)


@pytest.mark.parametrize(("mask", "blocks"), [(0b11, 2), (0b10, 2), (0b0110, 4), (0b1111, 4)])
def test_copies_that_blocks_share(mask: int, blocks: int):
    made = tilescale.compile(copies.shared(mask, blocks=blocks), target="cuda")
    a = torch.randn(copies.ROUNDS, 16, 32, device="cuda")
    for _ in range(100):
        c = torch.zeros(blocks, copies.ROUNDS, 16, 32, device="cuda")
        made(a, c)
        assert torch.equal(c, (a * 2).expand_as(c))


@pytest.mark.parametrize(("threads", "width"), [(128, 32), (256, 64)])
def test_copies_of_each_warp(threads: int, width: int):
    a, c = torch.randn(16, 64, device="cuda"), torch.zeros(16, device="cuda")
    tilescale.compile(copies.per_warp(threads, width), target="cuda")(a, c)
    assert torch.equal(c, a[:, 0] + a[:, 63])


@pytest.mark.parametrize(
    "kernel", [vectors.through_tiles, vectors.of_threads, vectors.by_two_axes], ids=lambda k: k.name
)
def test_vectors(kernel: Any):
    a, b, c = (torch.randn(64, 2, device="cuda") for _ in range(3))
    tilescale.compile(kernel, target="cuda")(a, b, c)
    assert torch.equal(c, torch.stack([(a + b)[:, 1], a[:, 0]], 1))
