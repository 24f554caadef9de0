"""`do_bench` where TileLang's programs take it from."""

from __future__ import annotations

from tilescale.profiler import do_bench

__all__ = ["do_bench"]
