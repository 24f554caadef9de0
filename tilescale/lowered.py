"""A kernel's code without a kernel, by TileLang's names: `lower`. And TVM, whose nodes such programs name."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from tilescale.devices import of, resolve_target

__all__ = ["Artifact", "lower"]


@dataclass(frozen=True)
class Artifact:
    """What `lower` gives. ``kernel_source``: the code as text, CUDA C++ for "cuda". ``target``: what it is
    for. ``params``: one for each parameter, with ``name``, ``spec`` and where it is declared."""

    kernel_source: str
    target: str
    params: list[Any]


def lower(func: Any, target: Any = None, **words: Any) -> Artifact:
    """Compiles a ``@T.prim_func`` as far as its text: ``lower(func, "cuda").kernel_source``. Other words of
    TileLang's decide nothing, which the log says.

    Raises:
        TileError: whatever the language or the target refuses, placed in the kernel's source.
    """
    from tilescale.compat import unused
    from tilescale.compiler import driver

    unused("lower()", words)
    chosen = resolve_target(target)
    program = func.trace()
    return Artifact(driver.source_text(program, of(chosen).shown, chosen), chosen, list(program.params))


def __getattr__(name: str) -> Any:
    if name != "tvm":
        raise AttributeError(name)
    from tilescale.compiler.tvm_compat import tirx, tvm

    # TileLang's TVM calls the class of expressions so; programs name it in annotations alone.
    if not hasattr(tirx, "PrimExpr"):
        setattr(tirx, "PrimExpr", tirx.Expr)  # noqa: B010  # TVM does not declare it
    # TileLang's TVM also has its test marks at once, this one among them. Marks are pytest's.
    if importlib.util.find_spec("pytest") is not None:
        testing = importlib.import_module("tvm.testing")
        if not hasattr(testing, "requires_package"):
            from tilescale.compat import requires_package

            setattr(testing, "requires_package", requires_package)  # noqa: B010  # TVM does not declare it
    return tvm
