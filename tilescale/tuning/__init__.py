"""``@tilescale.autotune``: compiles and measures a list of configurations, keeps the fastest; all ranks keep
the same one."""

from __future__ import annotations

from tilescale.tuning.cost import Predicted, rank
from tilescale.tuning.tuner import Autotuned, Trial, autotune

__all__ = ["Autotuned", "Predicted", "Trial", "autotune", "rank"]
