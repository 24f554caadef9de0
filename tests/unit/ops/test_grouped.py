"""How the tiles of grouped products are shared out, and what `grouped_matmul_backward` refuses of parts."""

from __future__ import annotations

import heapq

import pytest
import torch

from tilescale import ops
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops.grouped import SHARES, share_of


def shares(tiles: int, units: int, count: int) -> list[range]:
    return [range(*share_of(b, tiles, units, count), units) for b in range(units * count)]


@pytest.mark.parametrize("count", [1, 2, SHARES])
@pytest.mark.parametrize("tiles", [0, 1, 5, 131, 132, 133, 4352, 28672])
def test_each_tile_is_in_one_share(tiles: int, count: int):
    found = sorted(t for share in shares(tiles, 132, count) for t in share)
    assert found == list(range(tiles))


def ends(tiles: int, late: list[int], count: int) -> int:
    """When all tiles are done, each in a unit of time, where a multiprocessor begins as late as ``late`` says and
    takes the next share when it is through with one."""
    free = [*late]
    heapq.heapify(free)
    for share in shares(tiles, len(late), count):
        heapq.heappush(free, heapq.heappop(free) + len(share))
    return max(free)


@pytest.mark.parametrize("kept", [1, 24, 60])
@pytest.mark.parametrize("tiles", [4352, 28672])
def test_multiprocessors_that_begin_late_have_less_to_do(tiles: int, kept: int):
    units = 132
    for late in (tiles // units // 8, tiles // units // 2):
        begin = [late] * kept + [0] * (units - kept)
        least = (tiles + late * kept) / units
        assert ends(tiles, begin, SHARES) <= least + tiles / units / 2 ** (SHARES - 2) + 2
        assert ends(tiles, begin, 1) >= tiles // units + late


def test_parts_that_do_not_fit_are_refused():
    a, dy = torch.zeros(6, 8, dtype=torch.bfloat16), torch.zeros(6, 8, dtype=torch.bfloat16)
    sizes = torch.tensor([[1, 2], [2, 1]], dtype=torch.int32)
    with pytest.raises(TileValueError, match=r"sizes and firsts \(parts, G\)"):
        ops.grouped_matmul_backward(a, dy, sizes)
    with pytest.raises(TileValueError, match=r"firsts \(2,\)"):
        ops.grouped_matmul_backward(a, dy, sizes, firsts=sizes[0])
    with pytest.raises(TileTypeError, match="int32"):
        ops.grouped_matmul_backward(a, dy, sizes, firsts=sizes.long())
    with pytest.raises(TileValueError, match="extents of 1"):
        ops.grouped_matmul_backward(a, dy, sizes[:0], firsts=sizes[:0])


def test_no_rows_at_all():
    a, b = torch.empty(0, 16, dtype=torch.bfloat16), torch.zeros(2, 16, 8, dtype=torch.bfloat16)
    assert ops.grouped_matmul(a, b, torch.zeros(2, dtype=torch.int32)).shape == (0, 8)


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gates_far_from_zero(activation: str, dtype: torch.dtype):
    """Where exponentials overflow gates are open or shut, gradients too, as torch's are."""
    x = torch.tensor([-1e4, -200.0, -100.0, -88.5, -20.0, -0.0, 20.0, 88.5, 100.0, 1e4])
    h = torch.stack([x, torch.linspace(-2, 2, 10)]).to(dtype).T.contiguous()
    act = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu, "relu": torch.relu}[activation]
    given = h.double().requires_grad_()
    want = act(given[:, :1]) * given[:, 1:]
    (dh,) = torch.autograd.grad(want.sum(), given)
    dy = torch.ones(len(h), 1, dtype=dtype)
    tight = {"rtol": 1e-2 if dtype != torch.float32 else 1e-5, "atol": 1e-7}
    got = ops.gated_activation(h, activation).double()
    torch.testing.assert_close(got, want.detach().to(dtype).double(), **tight)
    back = ops.gated_activation_backward(dy, h, activation).double()
    torch.testing.assert_close(back, dh.to(dtype).double(), **tight)
