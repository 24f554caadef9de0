"""The roofline of a launch: how long each part of a GPU needs at its peak for the work that tile IR asks of
it, and which is the longest.

After Williams, Waterman, Patterson: "Roofline: an insightful visual performance model for multicore
architectures" (CACM 52(4), 2009), with lanes and special functions as further ceilings beside tensor cores
and memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilescale.compiler.cost.count import Count
from tilescale.compiler.cost.machine import Machine


@dataclass(frozen=True)
class Roofline:
    """Seconds by part ("tensor cores", "lanes", "special functions", "memory"); ``flops`` of products;
    ``operations``, those and all that lanes and special units do; ``bytes`` that memory must move at least;
    ``seconds``, the longest part, named by ``bound``; ``intensity`` and the machine's ``balance``, both in
    operations a byte."""

    parts: dict[str, float]
    flops: float
    operations: float
    bytes: float
    balance: float

    @property
    def bound(self) -> str:
        return max(self.parts, key=lambda part: self.parts[part])

    @property
    def seconds(self) -> float:
        return self.parts[self.bound]

    @property
    def intensity(self) -> float:
        return self.operations / self.bytes if self.bytes else float("inf")


def roofline(count: Count, machine: Machine) -> Roofline:
    """The bound of a launch on a machine. Products of dtypes that no tensor core takes (float32) are the
    lanes' work."""
    total = count.total
    tensor = sum(
        g.flops * n / machine.matrix[g.dtype] for g, n in total.matrix.items() if g.dtype in machine.matrix
    )
    plain = sum(g.flops * n for g, n in total.matrix.items() if g.dtype not in machine.matrix)
    lanes = plain / machine.vector_rate + total.element / (machine.lanes * machine.sms * machine.clock)
    parts = {
        "tensor cores": tensor, "lanes": lanes, "special functions": total.special / machine.special_rate,
        "memory": count.least_bytes / machine.hbm,
    }  # fmt: skip
    rates = [machine.matrix_rate(g.dtype) for g in total.matrix] or [machine.vector_rate]
    operations = total.matrix_flops + total.element + total.special
    return Roofline(parts, total.matrix_flops, operations, count.least_bytes, max(rates) / machine.hbm)
