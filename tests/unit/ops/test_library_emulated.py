"""tilescale.ops on the emulated Hopper GPU, against float64: the kernels as they are printed for TMA,
mbarriers and wgmma."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels import instead_of_kernels
from tests.unit.cuda.emulated import run
from tilescale.ops import load
from tilescale.ops.case import as_tuple, worst
from tilescale.ops.routing import SCORES

CASES: list[tuple[str, dict[str, Any]]] = [
    *(
        ("gemm", {"M": 3, "N": 77, "K": 101, "trans_a": ta, "trans_b": tb})
        for ta in (False, True)
        for tb in (False, True)
    ),
    ("gemm", {"M": 70, "N": 2, "K": 4301, "bias": True, "activation": "gelu"}),
    ("row_softmax", {"m": 5, "n": 1100}),
    ("row_softmax", {"m": 1, "n": 33000}),
    ("row_softmax", {"m": 2, "n": 9001, "dtype": "float16"}),
    ("row_softmax", {"m": 1, "n": 17000, "dtype": "float32"}),
    ("row_softmax", {"m": 130, "n": 19, "dtype": "float16"}),
    *(("routing", {"t": 3, "E": 8, "k": 2, "scores": s, "biased": True, "low": 200.0}) for s in SCORES),
    ("rms_norms", {"m": 70, "n": 40, "dtype": "float16"}),
    ("rms_norms", {"m": 1, "n": 33000, "dtype": "float32"}),
    ("latent_attention", {"batch": 1, "heads": 64, "context": 200, "latent": 256, "rope": 64}),
    (
        "latent_attention",
        {"batch": 1, "heads": 64, "context": 200, "latent": 128, "rope": 64, "page": 64, "parts": 2},
    ),
    ("attention_backward", {"batch": 1, "heads": 2, "kv_heads": 1, "length": 150, "dim": 64}),
    (
        "attention_backward",
        {"batch": 2, "heads": 2, "length": 130, "dim": 64, "causal": True, "by_token": True},
    ),
    ("attention", {"batch": 2, "heads": 2, "length": 150, "dim": 64, "causal": True, "by_token": True}),
    ("attention_backward", {"batch": 1, "heads": 1, "length": 200, "dim": 64, "causal": True}),
    (
        "attention_backward",
        {"batch": 2, "heads": 1, "length": 150, "dim": 64, "packed": True, "dtype": "float16"},
    ),
    ("attention_backward", {"batch": 1, "heads": 2, "kv_heads": 1, "length": 91, "dim": 88, "causal": True}),
    ("attention_backward", {"batch": 3, "heads": 1, "length": 79, "dim": 64, "packed": True}),
    (
        "attention_backward",
        {"batch": 2, "heads": 2, "length": 150, "dim": 64, "causal": True, "deterministic": False},
    ),
    ("attention", {"batch": 3, "heads": 1, "length": 3, "dim": 200, "packed": True}),
    ("attention", {"batch": 2, "heads": 2, "kv_heads": 1, "length": 3, "dim": 256, "causal": True}),
    ("attention", {"batch": 1, "heads": 2, "length": 128, "keys": 4, "dim": 96}),
    ("attention", {"batch": 1, "heads": 1, "length": 200, "dim": 168, "causal": True}),
    (
        "w4a16",
        {"M": 11, "N": 136, "K": 1152, "warps": 2, "rows": 64, "early": 0, "panels": True, "zeros": True},
    ),
    ("w4a16", {"M": 1, "N": 72, "K": 896, "BN": 32, "warps": 4, "early": -1, "panels": False}),
    ("w4a16", {"M": 20, "N": 136, "K": 640, "split": 3, "BM": 32, "stages": 2, "panels": True}),
]


def array(tensor: torch.Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.contiguous().numpy()


def emulated(factory: Any, args: tuple[Any, ...], /, **constants: Any) -> None:
    """`host.launch` on the emulator."""
    kernel = factory(**constants)
    names = [p.name for p in kernel.trace().params]
    given = {n: array(a) if isinstance(a, torch.Tensor) else a for n, a in zip(names, args, strict=True)}
    for name, got in run(kernel, given, "sm_90a", 1).items():
        target = args[names.index(name)]
        target.copy_(
            torch.from_numpy(np.ascontiguousarray(got).view(np.int16)).view(torch.bfloat16)
            if target.dtype == torch.bfloat16
            else torch.from_numpy(got)
        )


@pytest.mark.parametrize("module, shape", CASES, ids=str)
def test_on_the_emulator(module: str, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    instead_of_kernels(monkeypatch, emulated)
    op = load(module)
    arguments = op.draw(**shape)
    for k, (g, w) in enumerate(zip(as_tuple(op.run(**arguments)), op.reference(**arguments), strict=True)):
        assert worst(g, w) <= 1, f"result {k}: {worst(g, w)} times what rounding explains"


def test_scores_that_rise_from_tile_to_tile(monkeypatch: pytest.MonkeyPatch):
    """What latent attention summed before has to shrink by more than the slack, in either half and in some
    rows alone."""
    instead_of_kernels(monkeypatch, emulated)
    op = load("latent_attention")
    arguments = op.draw(batch=1, heads=64, context=400, latent=64, rope=64)
    steps = torch.tensor([1.0, 4.0, 4.5, 9.0, 9.0, 16.0, 24.0])
    arguments["cache"][0] *= steps[torch.arange(400) // 64][:, None].to(arguments["cache"].dtype)
    (want,) = op.reference(**arguments)
    assert worst(op.run(**arguments), want) <= 1
