"""TileScale: one tile program, from a thread to a machine full of GPUs.

``import tilescale`` loads neither torch nor TVM; what needs them loads them when it is used.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "pyproject.toml").exists() and (_ROOT / "compiler").is_dir():
    # A plain checkout: compiler/, comm/ and launch/ lie beside this package and belong under the same import root.
    __path__.append(str(_ROOT))

__version__ = "0.1.0"

#: name → the module that has it
_LAZY = {
    "jit": "jit", "compile": "jit", "Kernel": "kernel", "Profiler": "profiler", "autotune": "tuning", "TileError": "errors",
}  # fmt: skip
_MODULES = ("language", "comm", "errors", "env", "native", "tuning", "launch")

__all__ = ["Kernel", "Profiler", "TileError", "autotune", "comm", "compile", "jit", "language"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(import_module(f"tilescale.{_LAZY[name]}"), name)
    elif name in _MODULES:
        value = import_module(f"tilescale.{name}")
    else:
        raise AttributeError(f"module 'tilescale' has no attribute {name!r}")
    globals()[name] = value
    return value
