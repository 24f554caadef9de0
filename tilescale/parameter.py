"""One of a kernel's parameters, as ``kernel.params`` has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.language.dtypes import DataType, canonical

if TYPE_CHECKING:
    import torch


class KernelParam(dict[str, Any]):
    """What a kernel declares of a parameter: ``p["name"]``, ``p["kind"]`` ("tensor", "scalar", …),
    ``p["dtype"]``, ``p["shape"]``, an extent that each call says by its text; and, by TileLang's names, the
    same as attributes."""

    __slots__ = ()

    @property
    def dtype(self) -> DataType:
        """The dtype of its elements, or of a scalar."""
        return canonical(self["dtype"])

    @property
    def shape(self) -> list[Any]:
        """Its extents, none of a scalar."""
        return list(self.get("shape") or ())

    def torch_dtype(self) -> torch.dtype:
        """torch's name of its dtype."""
        found: torch.dtype = self.dtype.as_torch()
        return found

    def tilelang_dtype(self) -> DataType:
        """The same as ``dtype``."""
        return self.dtype

    def is_scalar(self) -> bool:
        """Whether it is a number, and no tensor."""
        return not self.shape

    def is_unsigned(self) -> bool:
        """Whether it holds unsigned integers."""
        return self.dtype.startswith("uint")

    def is_float8(self) -> bool:
        """Whether it holds floats of 8 bits."""
        return self.dtype.startswith("float8")

    def is_float4(self) -> bool:
        """Whether it holds floats of 4 bits."""
        return str(self.get("of", "")).startswith("float4")

    def is_boolean(self) -> bool:
        """Whether it holds truth values."""
        return self.dtype == "bool"
