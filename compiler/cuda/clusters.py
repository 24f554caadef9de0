"""Blocks of a cluster: their ranks, as thread IR. A block's rank along an axis is its index modulo the cluster's extent, and its number
in the cluster counts x first (PTX ISA, "%cluster_ctarank")."""

from __future__ import annotations

from math import prod
from typing import Any

from tilescale.compiler.tvm_compat import tirx

AXES = "xyz"


class Clusters:
    """Mixed into the lowering. ``axes``: those along which blocks are looked at, some of "xyz"."""

    program: Any
    raw: Any

    def cluster_size(self, axes: str) -> int:
        """How many blocks there are along ``axes``."""
        return prod(n for a, n in zip(AXES, self.program.launch.cluster, strict=True) if a in axes)

    def _rank_along(self, axis: int) -> Any:
        return tirx.floormod(self.raw[axis], tirx.IntImm("int32", self.program.launch.cluster[axis]))

    def cluster_rank(self, axes: str) -> Any:
        """This block's number among those along ``axes``."""
        made, stride = tirx.IntImm("int32", 0), 1
        for k, n in enumerate(self.program.launch.cluster):
            if AXES[k] in axes and n > 1:
                made, stride = made + self._rank_along(k) * stride, stride * n
        return made

    def cluster_peer(self, axes: str, number: Any) -> Any:
        """The rank in the cluster of the block with a number among those along ``axes``, as this block sees them."""
        dims = self.program.launch.cluster
        made, stride, unit = tirx.IntImm("int32", 0), 1, 1
        last = max((k for k, n in enumerate(dims) if AXES[k] in axes and n > 1), default=-1)
        for k, n in enumerate(dims):
            if n == 1:
                continue
            if AXES[k] in axes:
                part = number if unit == 1 else tirx.floordiv(number, tirx.IntImm("int32", unit))
                made = made + (part if k == last else tirx.floormod(part, tirx.IntImm("int32", n))) * stride
                unit *= n
            else:
                made = made + self._rank_along(k) * stride
            stride *= n
        return made

    def cluster_mask(self, axes: str) -> Any:
        """A bit for each block that a copy along ``axes`` reaches (PTX ISA, "cp.async.bulk.tensor", ctaMask)."""
        dims = self.program.launch.cluster
        bits, base, stride = {0}, tirx.IntImm("int32", 0), 1
        for k, n in enumerate(dims):
            if AXES[k] in axes:
                bits = {b + i * stride for b in bits for i in range(n)}
            elif n > 1:
                base = base + self._rank_along(k) * stride
            stride *= n
        mask = tirx.IntImm("int32", sum(1 << b for b in bits))
        return mask if isinstance(base, tirx.IntImm) else tirx.shift_left(mask, base)
