"""TileScale: one tile program, from a thread to a machine full of GPUs."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "pyproject.toml").exists() and (_ROOT / "compiler").is_dir():
    # A plain checkout: compiler/, comm/ and launch/ lie beside this package and belong under the same import root.
    __path__.append(str(_ROOT))

__version__ = "0.1.0"
