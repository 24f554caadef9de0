"""Which 8-bit float a target has, by TileLang's names: NVIDIA's, since there are no others."""

from __future__ import annotations

from typing import Any, Literal

from .dtypes import ALL, canonical, dtype


def determine_fp8_type(fp8_format: Literal["e4m3", "e5m2"] = "e4m3") -> dtype:
    """T.float8_e4m3fn for "e4m3", T.float8_e5m2 for "e5m2".

    Raises:
        TileTypeError: another format.
    """
    return canonical(fp8_format if fp8_format in ("e4m3", "e5m2") else f"float8_{fp8_format}")


def determine_torch_fp8_type(fp8_format: Literal["e4m3", "e5m2"] = "e4m3") -> Any:
    """The same as a torch dtype."""
    return ALL[determine_fp8_type(fp8_format)].as_torch()
