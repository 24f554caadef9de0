"""What a kernel costs, read off its tile IR: the work of a launch (`count`), the figures of machines, the
time that it should take."""

from __future__ import annotations

from tilescale.compiler.cost.count import Count, Gemm, Loop, Work, count
from tilescale.compiler.cost.machine import MACHINES, Machine, machine_of
from tilescale.compiler.cost.predict import Prediction, predict
from tilescale.compiler.cost.roofline import Roofline, roofline

__all__ = [
    "MACHINES",
    "Count",
    "Gemm",
    "Loop",
    "Machine",
    "Prediction",
    "Roofline",
    "Work",
    "count",
    "machine_of",
    "predict",
    "roofline",
]
