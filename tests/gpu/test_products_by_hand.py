"""Products by hand (tilescale.intrinsics) on a GPU: the kernels of tests/unit/ops/test_mma_emitters.py."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale
from tests.unit.ops.test_mma_emitters import product
from tilescale.intrinsics import INT4TensorCoreIntrinEmitter, TensorCoreIntrinEmitter

torch: Any = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
KINDS = [
    ("float16", "float32"),
    ("float16", "float16"),
    ("bfloat16", "float32"),
    ("int8", "int32"),
    ("uint8", "int32"),
]


def operands(dtype: str) -> list[Any]:
    """Two of 64 × 64."""
    draw = torch.Generator().manual_seed(1)
    if "int" in dtype:
        low, high = (0, 256) if dtype == "uint8" else (-128, 128)
        made = [torch.randint(low, high, (64, 64), generator=draw) for _ in range(2)]
    else:
        made = [torch.randn((64, 64), generator=draw) for _ in range(2)]
    return [v.to(getattr(torch, dtype)) for v in made]


@pytest.mark.parametrize("a_turned", [False, True])
@pytest.mark.parametrize("b_turned", [False, True])
@pytest.mark.parametrize("dtype, sums", KINDS)
def test_products(dtype: str, sums: str, a_turned: bool, b_turned: bool):
    emitter = TensorCoreIntrinEmitter(dtype, dtype, sums, a_turned, b_turned, 2, 2, 32, 32, 64)
    kernel = tilescale.compile(product(emitter, 64, 64, 64, (64, 64), (64, 64)), target="cuda")
    a, b = operands(dtype)
    c = torch.zeros((64, 64), dtype=getattr(torch, sums), device="cuda")
    kernel(a.cuda(), b.cuda(), c)
    wanted = (a.T if a_turned else a).double() @ (b.T if b_turned else b).double()
    # Sums of float16 are rounded at each of 4 steps, to 2^-7 where they are below 32.
    allowed = {"int32": 0.0, "float32": 1e-4, "float16": 2.0**-4}[sums]
    assert (c.cpu().double() - wanted).abs().max() <= allowed


def test_numbers_of_4_bits():
    emitter = INT4TensorCoreIntrinEmitter("int8", "int8", "int32", False, True, 2, 2, 32, 32, 64)
    kernel = tilescale.compile(product(emitter, 64, 64, 64, (64, 64), (64, 64)), target="cuda")
    a, b = operands("int8")
    c = torch.zeros((64, 64), dtype=torch.int32, device="cuda")
    kernel(a.cuda(), b.cuda(), c)
    low, high = [((v.int() & 15) ^ 8) - 8 for v in (a, b)], [v.int() >> 4 for v in (a, b)]
    wanted = sum(x.double() @ y.double().T for x, y in (low, high))
    assert (c.cpu().double() == wanted).all()
