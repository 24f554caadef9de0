"""``gated_matmul(a, b)``: the first product of a gated layer (Shazeer, "GLU Variants Improve Transformer",
2020) with the gate in its epilogue. b's columns come in turn: `RUN` of the gate, as many that it scales. So
both numbers of a pair lie in the registers of one thread when they are summed, and a layer that is split by
columns over ranks has whole runs on each.

Products in blocks that stay (`gemm.choose`) are gated in one kernel; others, of few rows, and operands that
are written anew first, by `gated_activation` behind `matmul`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilescale.comm import sim
from tilescale.ops import gemm, host
from tilescale.ops.activations import GATES, check_turns, turns_in_torch
from tilescale.ops.case import Case, Expected, Op
from tilescale.ops.gated import gated_columns, in_turns
from tilescale.ops.gemm import Config
from tilescale.ops.gemm_kernels import persistent
from tilescale.ops.prepared import Plan, Plans, signature

_plans = Plans()


# ---- what people call


@host.checked
def gated_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    gate: str = "silu",
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """act(g) · u of a · b + bias, whose columns are eight of g and eight of u in turn; summed in float32.

    Args:
        a, b, bias: as `matmul` takes them, (M, K), (K, N) and (N,); N is a multiple of 16.
        gate: "silu", "gelu" (by erf) or "relu".
        out: (M, N / 2), contiguous, takes the result. out_dtype: of the result; a's without, or float32.
        config: how the work is cut, where the choice by the shape's class is not wanted.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    return gated_product(a, b, bias, gate, out=out, out_dtype=out_dtype, config=config)


def gated_product(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    gate: str,
    *,
    product: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """`gated_matmul`. ``product``: (M, N), contiguous, of the result's dtype, takes a · b + bias itself."""
    key = None
    if config is None:
        given = signature(a), signature(b), signature(bias), signature(product), signature(out)
        key = *given, gate, out_dtype, sim.here() is None
    plan = _plans.of(key, lambda: _plan(a, b, bias, gate, product, out, out_dtype, config))
    y: torch.Tensor = plan.result(out, a)
    plan.run(a, b, bias, product, y)
    return y


def _plan(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, gate: str, product: torch.Tensor | None,
    out: torch.Tensor | None, out_dtype: torch.dtype | None, config: Config | None,
) -> Plan:  # fmt: skip
    """What `gated_product` does: of a, b, the bias, the product where it is wanted, and the result."""
    a, b, trans_a, trans_b, M, N, K, kind = gemm.checked("gated_matmul", a, b, bias, "", out, out_dtype)
    check_turns("gated_matmul", N, "", gate)
    host.taking(out, (M, N // 2), kind)
    host.taking(product, (M, N), kind, "product")
    dtype = host.dtype_name(a)
    how, aligned = config, True
    if how is None:
        how, *align = gemm.plan(M, N, K, dtype, host.multiprocessors(a.device), trans_a, trans_b)
        aligned = align == [1, 1]
    if not how.blocks or how.stream or not aligned:

        def apart(a: Any, b: Any, bias: Any, c: Any, y: torch.Tensor) -> None:
            c = y.new_empty(M, N) if c is None else c
            gemm.matmul(a, b, bias, out=c, config=config)
            gated_columns(c, gate, y)

        return Plan((M, N // 2), kind, apart)
    cut = {k: v for k, v in vars(how).items() if k not in ("split", "swap", "stream")}
    what = {"M": M if trans_a else None, "N": N, "K": K, "dtype": dtype, "out": host.dtype_of(kind)}
    what |= {"trans_a": trans_a, "trans_b": trans_b, "bias": bias is not None, "activation": ""}
    what |= {"gate": gate, "kept": product is not None}
    kernel = host.kernel(persistent, host.target_of(a.device), **what, **cut)

    def run(a: Any, b: Any, bias: Any, c: Any, y: torch.Tensor) -> None:
        a, b, none = host.lying(a, trans_a), host.lying(b, trans_b), host.absent(y)
        kernel(a, b, none if bias is None else bias.contiguous(), none if c is None else c, y)

    return Plan((M, N // 2), kind, run)


# ---- what is right, and what it is measured against


def draw(
    M: int, N: int, K: int, dtype: str = "bfloat16", gate: str = "silu", bias: bool = False, out: str = "",
    trans_b: bool = True, device: Any = "cpu", seed: int = 0, **config: Any,
) -> dict[str, Any]:  # fmt: skip
    """Normal random operands, scaled so that the gate is neither open nor shut; ``config``: fields of a
    `Config`."""
    made = gemm.draw(M, N, K, dtype, False, trans_b, bias, "", out, device, seed, **config)
    made["b"] *= K**-0.5
    del made["activation"]
    return made | {"gate": gate}


def reference(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    gate: str = "silu",
    out_dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> tuple[Expected, ...]:
    """In float64. The product itself is rounded where it is written, which is left open."""
    (product,) = gemm.reference(a, b, bias, out_dtype=out_dtype if config is None else torch.float32)
    return (in_turns(product, gate, out_dtype or a.dtype),)


def in_torch(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, gate: str = "silu", **_: Any
) -> Callable[[], Any]:
    product = gemm.cublas(a, b, bias)
    return lambda: turns_in_torch(product(), gate)


def _cases() -> tuple[Case, ...]:
    stay: dict[str, Any] = {"BM": 64, "BN": 64, "BK": 32, "stages": 2, "threads": 128, "blocks": 3}
    small: list[dict[str, Any]] = [{"M": 150, "N": 144, "K": 104, "gate": g, **stay} for g in GATES]
    small += [
        {"M": 70, "N": 80, "K": 33, "dtype": "float16", "bias": True, "out": "float32", **stay},
        {"M": 70, "N": 80, "K": 40, "dtype": "float32", "trans_b": False, **stay},
        {"M": 7, "N": 16, "K": 24, "bias": True},
        {"M": 33, "N": 80, "K": 33},
    ]
    gpu: list[dict[str, Any]] = [
        {"M": m, "N": n, "K": k} for m, n, k in ((5000, 4096, 1000), (1000, 14336, 520), (3, 4096, 2048))
    ]
    gpu += [{"M": 4096, "N": 4096, "K": 1024, "gate": "gelu", "bias": True, "trans_b": False}]
    bench = ((8192, 57344, 8192), (8192, 28672, 4096))
    return (
        *(Case(s, small=True) for s in small),
        *(Case(s) for s in gpu),
        *(Case({"M": m, "N": n, "K": k}, bar=1.0) for m, n, k in bench),
    )


OP = Op(
    name="gated_matmul",
    run=gated_matmul,
    draw=draw,
    reference=reference,
    cases=_cases(),
    peers={"cuBLAS": in_torch},
    flops=lambda M, N, K, **_: 2.0 * M * N * K,
)
