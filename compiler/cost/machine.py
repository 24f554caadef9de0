"""Figures of GPUs, as their makers and the instructions' manuals give them, for bounds and predictions.

H200 SXM: NVIDIA H200 datasheet (dense rates: half of those "with sparsity"; 4.8 TB/s), H100 whitepaper (132
multiprocessors, 50 MB of L2, 1.83 GHz at which its tensor rates are given). A100 SXM 80 GB: A100 datasheet
and whitepaper (108 multiprocessors, 40 MB, 1.41 GHz). Lanes a clock: CUDA C++ Programming Guide, "Throughput
of Native Arithmetic Instructions" (compute capability 8.0 and 9.0).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """One GPU. ``matrix``: dense flops a second of the tensor cores by operand dtype; ``hbm``: bytes a second
    of its memory; ``l2``: bytes of its cache; ``clock``: hertz; ``lanes``, ``special``: float32 operations
    and special functions of a multiprocessor each clock; ``shared``: bytes that a multiprocessor reads from
    shared memory each clock."""

    name: str
    sms: int
    clock: float
    matrix: dict[str, float]
    hbm: float
    l2: int
    lanes: int
    special: int = 16
    shared: int = 128

    def matrix_rate(self, dtype: str) -> float:
        """Flops a second of products with such operands; those of the plain lanes where no tensor core takes
        them."""
        return self.matrix.get(dtype, self.vector_rate)

    @property
    def vector_rate(self) -> float:
        """Float32 flops a second without tensor cores, a multiply-add counted as two."""
        return 2.0 * self.lanes * self.sms * self.clock

    @property
    def special_rate(self) -> float:
        """Exponentials, logarithms, roots a second."""
        return float(self.special * self.sms) * self.clock


#: architecture (without its suffix) → the GPU that is meant where only the architecture is known
MACHINES: dict[str, Machine] = {
    "sm_90": Machine(
        "H200",
        132,
        1.83e9,
        {
            "float16": 989e12,
            "bfloat16": 989e12,
            "tfloat32": 494e12,
            "float8_e4m3fn": 1979e12,
            "float8_e5m2": 1979e12,
            "int8": 1979e12,
            "uint8": 1979e12,
            "float64": 67e12,
        },
        4.8e12,
        50 << 20,
        128,
    ),
    "sm_80": Machine(
        "A100 80GB",
        108,
        1.41e9,
        {
            "float16": 312e12,
            "bfloat16": 312e12,
            "tfloat32": 156e12,
            "int8": 624e12,
            "uint8": 624e12,
            "float64": 19.5e12,
        },
        2.039e12,
        40 << 20,
        64,
    ),
}


def machine_of(arch: str) -> Machine | None:
    """The GPU that an architecture stands for; None where there are no figures."""
    return MACHINES.get(arch.rstrip("af"))
