"""Products of 8-bit floats and integers, and of float32 cut to tf32, on a GPU: by wgmma on Hopper, by
mma.sync."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale
from tests.gpu.gemms import gemm, sparse_gemm, sparse_operand

torch: Any = pytest.importorskip("torch")

from tests.gpu.device import to_gpu  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

FLOAT8, BYTES = ("float8_e4m3fn", "float8_e5m2"), ("int8", "uint8")
PAIRS = [(a, b) for kinds in (FLOAT8, BYTES) for a in kinds for b in kinds] + [("float32", "float32")]
#: what a sum may be off by, of the sum of magnitudes: Hopper's tensor cores keep 13 bits behind the point of
#: the largest of 8-bit floats' products; tf32 has 10 bits
ALLOWED = {"float8_e4m3fn": 2.0**-10, "float8_e5m2": 2.0**-10, "float32": 2.0**-9, "int8": 0.0, "uint8": 0.0}


def operand(shape: tuple[int, int], dtype: str, seed: int) -> Any:
    draw = torch.Generator("cuda").manual_seed(seed)
    if "int" in dtype:
        low, high = (0, 256) if dtype == "uint8" else (-128, 128)
        return torch.randint(low, high, shape, device="cuda", generator=draw, dtype=torch.int32).to(
            getattr(torch, dtype)
        )
    return torch.randn(shape, device="cuda", generator=draw).to(getattr(torch, dtype))


def check(shape: tuple[int, int, int], pair: tuple[str, str], instruction: str, **options: Any) -> None:
    M, N, K = shape
    left, right = pair
    whole = "int" in left
    a = operand((K, M) if options.get("trans_a") else (M, K), left, 1)
    b = operand((N, K) if options.get("trans_b") else (K, N), right, 2)
    c = torch.full((M, N), -7, device="cuda", dtype=torch.int32 if whole else torch.float32)
    precision = "tf32" if left == "float32" else ""
    made = tilescale.compile(
        gemm(
            M,
            N,
            K,
            dtype=left,
            right=right,
            out="int32" if whole else "float32",
            precision=precision,
            **options,
        ),
        target="cuda",
    )
    assert instruction in made.get_kernel_source("cuda")
    made(a, b, c)
    x, y = (a.T if options.get("trans_a") else a).double(), (b.T if options.get("trans_b") else b).double()
    want, size = x @ y, x.abs() @ y.abs()
    worst = ((c.double() - want).abs() - size * ALLOWED[left]).max().item()
    assert worst <= (0 if whole else 1e-6), f"{worst} beyond what is allowed"


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("shape", [(130, 264, 208), (1024, 776, 4096)], ids=str)
def test_wgmma(pair: tuple[str, str], shape: tuple[int, int, int]):
    check(
        shape,
        pair,
        "ts::wgmma_m64n128",
        BM=128,
        BN=128,
        BK=32 if pair[0] == "float32" else 128,
        stages=3,
        trans_b=True,
    )


@pytest.mark.parametrize("places", ["uint8", "int16", "int32"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_two_of_four(dtype: str, places: str):
    M, N, K = 200, 136, 576
    whole, kept, where = (to_gpu(x) for x in sparse_operand(M, K, dtype, places))
    b = operand((N, K), dtype, 2)
    c = torch.full((M, N), float("nan"), device="cuda")
    made = tilescale.compile(sparse_gemm(M, N, K, dtype=dtype, places=places, trans_b=True), target="cuda")
    assert "ts::mma_sp" in made.get_kernel_source("cuda")
    made(kept, where, b, c)
    want, size = whole.double() @ b.double().T, whole.double().abs() @ b.double().abs().T
    assert ((c.double() - want).abs() <= size * 2.0**-20).all()


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("trans", [(False, True), (True, False)], ids=str)
def test_mma(pair: tuple[str, str], trans: tuple[bool, bool]):
    check(
        (130, 72, 100),
        pair,
        "ts::mma_m16n8",
        BM=64,
        BN=64,
        BK=64,
        stages=0,
        threads=128,
        trans_a=trans[0],
        trans_b=trans[1],
    )
