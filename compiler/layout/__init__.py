"""Layouts: where each element of a tile lies. Kept beside the IR, keyed by buffer; tile operations never see them."""

from __future__ import annotations

from tilescale.compiler.layout.strided import Strided

__all__ = ["Strided"]
