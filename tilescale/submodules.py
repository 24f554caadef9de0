"""Modules of a package as its attributes, loaded when they are asked for: programs write
``tilelang.contrib.nvcc`` under ``import tilelang`` alone."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def late(package: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package: its modules by their names."""

    def attribute(name: str) -> Any:
        if name.startswith("_") or find_spec(f"{package}.{name}") is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(f"{package}.{name}")

    return attribute
