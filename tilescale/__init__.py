"""TileScale: one tile program, from a thread to a machine full of GPUs.

    import tilescale
    import tilescale.language as T

Importing loads neither torch nor TVM: the compiler comes with the first kernel that the disk cache does not
have.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "pyproject.toml").exists() and (_ROOT / "compiler").is_dir():
    # A plain checkout: compiler/, comm/ and launch/ lie beside this package and belong under the same import
    # root.
    __path__.append(str(_ROOT))

from tilescale import tilelang_env as _tilelang_env  # noqa: E402, F401  # tilescale.env answers to TileLang's names
from tilescale.jit import compile, jit  # noqa: E402  # now: importing the module later would put it in the function's place
from tilescale.version import __version__  # noqa: E402

if TYPE_CHECKING:
    from tilescale import comm, env, errors, language, layout, ops
    from tilescale.compat import PassConfigKey
    from tilescale.errors import PerformanceWarning, TileError
    from tilescale.kernel import Kernel
    from tilescale.layout import plot_layout
    from tilescale.log import set_log_level
    from tilescale.profiler import Profiler, TensorSupplyType
    from tilescale.several import load
    from tilescale.tuning import autotune

#: name → the module that has it; a module's own name: itself
_LAZY = {
    "DataType": "tilescale.language.dtypes",
    "Fragment": "tilescale.language",
    "JITKernel": "tilescale.jit",
    "Kernel": "tilescale.kernel",
    "Layout": "tilescale.language",
    "PassConfigKey": "tilescale.compat",
    "PerformanceWarning": "tilescale.errors",
    "Profiler": "tilescale.profiler",
    "TensorSupplyType": "tilescale.profiler",
    "TileError": "tilescale.errors",
    "autotune": "tilescale.tuning",
    "autotuner": "",
    "carver": "",
    "cdiv": "tilescale.compat",
    "comm": "",
    "contrib": "",
    "disable_cache": "tilescale.compat",
    "enable_cache": "tilescale.compat",
    "dtypes": "tilescale.language",
    "engine": "",
    "env": "",
    "errors": "",
    "intrinsics": "",
    "language": "",
    "layout": "",
    "lower": "tilescale.lowered",
    "math": "",
    "next_power_of_2": "tilescale.compat",
    "ops": "",
    "par_compile": "tilescale.jit",
    "profiler": "",
    "testing": "",
    "tileop": "",
    "tools": "",
    "transform": "",
    "tvm": "tilescale.lowered",
    "utils": "",
    "load": "tilescale.several",
    "plot_layout": "tilescale.layout",
    "set_log_level": "tilescale.log",
}

__all__ = [
    "Kernel",
    "PassConfigKey",
    "PerformanceWarning",
    "Profiler",
    "TensorSupplyType",
    "TileError",
    "__version__",
    "autotune",
    "comm",
    "compile",
    "env",
    "errors",
    "jit",
    "language",
    "layout",
    "load",
    "ops",
    "plot_layout",
    "set_log_level",
]


def __getattr__(name: str) -> Any:
    home = _LAZY.get(name)
    if home is None:
        raise AttributeError(f"module 'tilescale' has no attribute {name!r}")
    value = getattr(import_module(home), name) if home else import_module(f"tilescale.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
