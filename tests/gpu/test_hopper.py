"""GEMMs by TMA and wgmma on a Hopper GPU, against float64; every launch gives the same bits."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale
from tests.gpu.gemms import gemm

torch: Any = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]

SHAPES = [
    (128, 256, 64),
    (128, 256, 8),
    (1, 8, 8),
    (1000, 776, 520),
    (257, 264, 200),
    (4096, 512, 1024),
    (129, 1032, 4096),
]
TILES = [
    {},
    {"stages": 3},
    {"BM": 128, "BN": 128, "threads": 128},
    {"BM": 64, "BN": 128, "threads": 256, "stages": 2},
    {"BM": 256, "BN": 128},
    {"panel": 3},
    {"BM": 128, "BN": 128, "panel": 2, "blocks": 5},
    {"BM": 192, "BN": 128, "threads": 384, "stages": 3},
    {"BM": 192, "threads": 384, "stages": 3},
    {"BM": 64, "BN": 48, "BK": 32, "threads": 128, "stages": 3},
]


def operands(
    M: int, N: int, K: int, dtype: str, trans_a: bool, trans_b: bool, seed: int = 0
) -> tuple[Any, Any]:
    draw = torch.Generator("cuda").manual_seed(seed)
    shapes = (K, M) if trans_a else (M, K), (N, K) if trans_b else (K, N)
    a, b = (
        torch.randn(s, device="cuda", generator=draw, dtype=torch.float32).to(getattr(torch, dtype))
        for s in shapes
    )
    return a, b


def compiled(**options: Any) -> Any:
    """The kernel, which must use TMA and wgmma: no silent way around them."""
    made = tilescale.compile(gemm(**options), target="cuda")
    code = made.get_kernel_source("cuda")
    assert "ts::tma_load" in code and "ts::wgmma_m64" in code
    assert made.resources.get("spill_stores", 0) == 0  # nvcc says; NVRTC does not
    return made


def right(c: Any, a: Any, b: Any, trans_a: bool, trans_b: bool) -> None:
    """Sums of products in float32, rounded once: K terms of the magnitudes that there are, and half a unit of
    C's last place."""
    x, y = (a.T if trans_a else a).double(), (b.T if trans_b else b).double()
    want, size = x @ y, x.abs() @ y.abs()
    unit = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[c.dtype]
    allowed = size * (2.0**-24 * x.shape[1] ** 0.5 * 8) + want.abs() * unit * 1.01 + 1e-7
    worst = ((c.double() - want).abs() / allowed).max().item()
    assert worst <= 1, f"{worst} times what rounding explains"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("trans_a", [False, True])
def test_shapes(shape: tuple[int, int, int], dtype: str, trans_a: bool, trans_b: bool):
    M, N, K = shape
    if trans_a and M % 8:
        M += -M % 8  # TMA's rows are whole 16 bytes
    a, b = operands(M, N, K, dtype, trans_a, trans_b)
    c = torch.full((M, N), float("nan"), device="cuda", dtype=getattr(torch, dtype))
    compiled(M=M, N=N, K=K, dtype=dtype, trans_a=trans_a, trans_b=trans_b)(a, b, c)
    right(c, a, b, trans_a, trans_b)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("trans", [(False, False), (True, True)], ids=str)
def test_tiles(tile: dict[str, int], trans: tuple[bool, bool]):
    M, N, K = 520, 776, 1000
    trans = (trans[0] and "blocks" not in tile, trans[1])
    a, b = operands(M, N, K, "bfloat16", *trans)
    c = torch.full((M, N), float("nan"), device="cuda")
    compiled(M=M, N=N, K=K, out="float32", trans_a=trans[0], trans_b=trans[1], **tile)(a, b, c)
    right(c, a, b, *trans)


CLUSTERS = [
    {"cluster": (1, 2)},
    {"cluster": 2},
    {"cluster": (2, 2), "panel": 4},
    {"BM": 128, "BN": 128, "cluster": (1, 4), "panel": 8},
    {"BM": 64, "BN": 128, "threads": 128, "cluster": (2, 4), "stages": 3},
    {"BM": 192, "BN": 128, "threads": 384, "cluster": (1, 2), "stages": 3},
]


@pytest.mark.parametrize("tile", CLUSTERS, ids=str)
@pytest.mark.parametrize("trans", [(False, False), (True, True)], ids=str)
def test_clusters_share_by_multicast(tile: dict[str, Any], trans: tuple[bool, bool]):
    M, N, K = 1480, 2000, 1000
    a, b = operands(M, N, K, "bfloat16", *trans)
    made = compiled(M=M, N=N, K=K, out="float32", trans_a=trans[0], trans_b=trans[1], **tile)
    assert "ts::tma_load_multicast" in made.get_kernel_source("cuda")
    first, c = (torch.full((M, N), float("nan"), device="cuda") for _ in range(2))
    made(a, b, first)
    right(first, a, b, *trans)
    for _ in range(50):
        c.fill_(float("nan"))
        made(a, b, c)
        assert (c == first).all()


def test_what_lies_beside_a_tensor_stays():
    M, N, K = 130, 264, 200
    a, b = operands(M, N, K, "bfloat16", False, False)
    room = torch.full((M * N + 4096,), 7.0, device="cuda", dtype=torch.bfloat16)
    c = room[2048 : 2048 + M * N].view(M, N)
    compiled(M=M, N=N, K=K)(a, b, c)
    right(c, a, b, False, False)
    assert (room[:2048] == 7).all() and (room[2048 + M * N :] == 7).all()


@pytest.mark.parametrize(
    "tile", [{}, {"BM": 128, "BN": 128, "threads": 128, "stages": 3}, {"blocks": 7, "panel": 2}], ids=str
)
def test_a_thousand_launches_give_the_same_bits(tile: dict[str, int]):
    M, N, K = 1024, 1288, 2056
    made = compiled(M=M, N=N, K=K, **tile)
    a, b = operands(M, N, K, "bfloat16", False, False)
    first, c = (torch.empty(M, N, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    made(a, b, first)
    right(first, a, b, False, False)
    different = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(1000):
        c.fill_(float("nan"))
        made(a, b, c)
        different += (c.view(torch.int16) != first.view(torch.int16)).any()
    assert different.item() == 0
