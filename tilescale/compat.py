"""Names that TileLang's programs use and that decide nothing here, so that they run unchanged; each is said
in the log (TILESCALE_LOG=info), and docs/TILELANG.md lists them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from tilescale import log
from tilescale.language import funcs


class _AnyName(type):
    """Every attribute is its own name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class PassConfigKey(metaclass=_AnyName):
    """TileLang's switches for its passes. ``pass_configs={PassConfigKey.TL_ENABLE_FAST_MATH: True}`` makes
    T.exp and its kin of float32 the fast ones, as ``T.__exp`` does by name, and a / b a * T.fast_rcp(b), on
    every target. With
    ``TL_DISABLE_THREAD_STORAGE_SYNC`` the author's barriers alone order what threads do by their index
    (docs/LANGUAGE.md, "A thread's own code"). The others are accepted and have no effect
    (TILESCALE_LOG=info says so)."""


def switches(pass_configs: Any) -> tuple[frozenset[str], Any]:
    """What these ask for, and those that decide nothing; None where there are none."""
    if not isinstance(pass_configs, dict):
        return frozenset(), pass_configs
    asked, others = funcs.switches(pass_configs)
    return asked, others or None


def unused(where: str, given: dict[str, Any]) -> None:
    """Says once that words were given which decide nothing here; ``given``: name → value, None where the
    caller left it out."""
    names = [name for name, value in given.items() if value is not None]
    if names:
        log.say(
            "info",
            f"{where}: {', '.join(names)} decide{'s' if len(names) == 1 else ''} nothing here",
            once=True,
        )


def simplify_prim_func(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself: every program is simplified as it is compiled."""
    return func


def register_cuda_postproc_callback(func: Callable[..., Any]) -> Callable[..., Any]:
    """TileLang gives the text of its CUDA code to such a function before it is compiled. Here nobody calls
    it: the text belongs to the compiler.

    Raises:
        TileTypeError: always, by name.
    """
    from tilescale.errors import TileTypeError

    raise TileTypeError(
        "functions that rewrite the compiler's CUDA text have no place here",
        hint="kernel.get_kernel_source() shows the text",
    )


def disable_cache() -> None:
    """TileLang compiles every kernel anew behind this. Here a kernel's key holds everything that decides it,
    so that a kept kernel is the same one."""
    unused("disable_cache()", {"it": True})


enable_cache = disable_cache


def cdiv(a: Any, b: Any) -> Any:
    """``a / b`` rounded up, of ints or extents."""
    from tilescale.language.symbolic import ceildiv

    return ceildiv(a, b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is ``n`` or more."""
    return 1 << max(int(n) - 1, 0).bit_length()


def requires_package(*names: str) -> Any:
    """A mark of pytest's that skips a test where a package is not installed."""
    import pytest

    missing = [n for n in names if importlib.util.find_spec(n) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")
