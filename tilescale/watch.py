"""Whether what a kernel was made from is still what its functions see: a global that is bound anew, a helper
that is defined anew.

Looked at on every call of a ``@tilescale.jit`` function, so by identity alone: a list or an object that is
changed in place is not noticed within the process (the disk cache, which compares values, notices it in the
next one).
"""

from __future__ import annotations

import types
from typing import Any

from tilescale.language.funcs import Macro, PrimFunc

#: Packages whose functions do not change under a program.
_FOREIGN = ("tilescale", "torch", "numpy", "ml_dtypes", "math", "builtins")


class Watch:
    """The globals and closure values that a function, and the user's functions that it can reach, look at."""

    def __init__(self, func: types.FunctionType):
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._seen: set[int] = set()
        self._add(func)

    def changed(self) -> bool:
        """Whether any of them is another object now."""
        for scope, name, value in self._globals:
            if scope.get(name, self) is not value:
                return True
        for cell, value in self._cells:
            if _content(cell) is not value:
                return True
        return False

    def _add(self, value: Any) -> None:
        func = value.func if isinstance(value, (PrimFunc, Macro)) else value
        if not isinstance(func, types.FunctionType) or id(func) in self._seen:
            return
        self._seen.add(id(func))
        if (func.__module__ or "").split(".")[0] in _FOREIGN:
            return
        scope = func.__globals__
        for name in sorted(_names(func.__code__) & scope.keys()):
            if not isinstance(scope[name], types.ModuleType):
                self._globals.append((scope, name, scope[name]))
                self._add(scope[name])
        for cell in func.__closure__ or ():
            self._cells.append((cell, _content(cell)))
            self._add(_content(cell))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _names(code: types.CodeType) -> set[str]:
    found = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= _names(const)
    return found
