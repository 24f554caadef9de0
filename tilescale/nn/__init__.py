"""Layers for training code on several ranks: modules with gradients on top of ``tilescale.ops``.

    from tilescale import nn as tsnn
    mlp = tsnn.ParallelMLP(4096, 14336, group=mesh["tp"])

Each computes what an ordinary module of its name computes, of which each rank has a part. Nothing here
imports torch until a name is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: what people use → its file
HOME = {
    "ColumnParallelLinear": "linear",
    "ExpertParallelMoE": "experts",
    "LinearCrossEntropy": "loss",
    "ParallelAttention": "attention",
    "ParallelMLP": "mlp",
    "RMSNorm": "norm",
    "RowParallelLinear": "linear",
    "VocabParallelEmbedding": "embedding",
    "full_state_dict": "parameters",
    "parallelize": "swapping",
}

__all__ = ["HOME", *HOME]


def __getattr__(name: str) -> Any:
    if name not in HOME:
        raise AttributeError(f"module 'tilescale.nn' has no attribute {name!r}")
    value = getattr(import_module(f"tilescale.nn.{HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
