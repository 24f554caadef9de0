"""Names of short vectors, ``T.float32x2``: a thread's values that T.extract_lane takes apart."""

from __future__ import annotations

from typing import Any

from .dtypes import ALL, dtype


class Vector:
    """``T.float32x2``: two of float32. ``T.float32x2(a, b)`` is one, ``T.alloc_var(T.float32x2)`` a cell for
    it, ``T.reinterpret(v, T.float32x2)`` the bits of another one."""

    __slots__ = ("count", "of")

    def __init__(self, of: str, count: int):
        self.of: dtype = ALL[of]
        self.count = count

    @property
    def name(self) -> str:
        return f"{self.of}x{self.count}"

    def __call__(self, *values: Any) -> Any:
        from tilescale.compiler.ops.lanes_of import vector

        return vector(self, values)

    def __repr__(self) -> str:
        return f"T.{self.name}"

    def __str__(self) -> str:
        return self.name


VECTORS = {v.name: v for v in (Vector(of, count) for of in ALL if of != "bool" for count in (2, 4, 8, 16))}


def named_vector(dtype: Any) -> Any:
    """A dtype, or the vector that a string names: ``"float32x2"``."""
    return VECTORS.get(dtype, dtype) if isinstance(dtype, str) else dtype
