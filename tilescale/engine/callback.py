"""Callbacks on the compiler's text, which are refused by name."""

from __future__ import annotations

from tilescale.compat import register_cuda_postproc_callback

__all__ = ["register_cuda_postproc_callback"]
