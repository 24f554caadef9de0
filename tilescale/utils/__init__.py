"""Helpers of host code, by TileLang's names."""

from __future__ import annotations

from tilescale.submodules import late
from tilescale.utils.tensor import TensorSupplyType, get_tensor_supply, torch_assert_close

__all__ = ["TensorSupplyType", "get_tensor_supply", "torch_assert_close"]

__getattr__ = late(__name__)
