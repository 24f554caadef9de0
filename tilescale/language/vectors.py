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


VECTORS = {
    v.name: v
    for v in (
        *(Vector(of, 2) for of in ("float16", "bfloat16", "float32", "uint32")),
        *(Vector(of, count) for of in ("float32", "uint32") for count in (4, 8)),
    )
}
