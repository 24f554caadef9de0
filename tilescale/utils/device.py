"""Which device torch's tensors go to, by TileLang's names."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["get_available_cpu_count", "get_current_device"]


def get_current_device() -> Any:
    """The number of torch's current GPU, or "cpu" where it has none."""
    import torch

    return torch.cuda.current_device() if torch.cuda.is_available() else "cpu"


def get_available_cpu_count() -> int:
    """How many processor cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # no Linux
        return os.cpu_count() or 1
