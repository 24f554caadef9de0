"""One file a pass; pipeline.py is the list."""

from __future__ import annotations

from tilescale.compiler import ops

ops.load()
