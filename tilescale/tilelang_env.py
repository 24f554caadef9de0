"""What TileLang's ``env`` says, of this package: ``tilescale.env.TILELANG_CACHE_DIR``, or of ``env`` itself
(``from tilescale.env import env``). Values are text, as there."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

from tilescale import compat, env
from tilescale.errors import TileValueError


def _cache() -> str:
    return str(env.CACHE_DIR.get())


def _target() -> str:
    return env.TARGET.get()


def _printed() -> str:
    return str(int(env.LOG.get() in ("info", "debug")))


#: TileLang's name → what it is here
_VALUES: dict[str, Callable[[], str]] = {
    "TILELANG_CACHE_DIR": _cache,
    "TILELANG_TMP_DIR": lambda: os.path.join(_cache(), "tmp"),
    "TILELANG_DEFAULT_TARGET": _target,
    "TILELANG_DEFAULT_EXECUTION_BACKEND": lambda: "auto",
    "TILELANG_DEFAULT_VERBOSE": _printed,
    "TILELANG_PRINT_ON_COMPILATION": _printed,
    "TILELANG_DISABLE_CACHE": lambda: "0",
    "TILELANG_AUTO_TUNING_DISABLE_CACHE": lambda: "0",
    "CUDA_HOME": lambda: os.environ.get("CUDA_HOME", ""),
}
#: names that may be set → the variable that decides it here; "" where nothing does
_SET = {
    "TILELANG_CACHE_DIR": "TILESCALE_CACHE_DIR",
    "TILELANG_DEFAULT_TARGET": "TILESCALE_TARGET",
    "TILELANG_TMP_DIR": "",
    "TILELANG_PRINT_ON_COMPILATION": "",
    "TILELANG_DEFAULT_VERBOSE": "",
    "TILELANG_DEFAULT_EXECUTION_BACKEND": "",
    "TILELANG_DISABLE_CACHE": "",
    "TILELANG_AUTO_TUNING_DISABLE_CACHE": "",
}
#: TileLang's questions → the answer here
_ANSWERS: dict[str, Callable[[], Any]] = {
    "is_cache_enabled": lambda: True,
    "is_cache_globally_disabled": lambda: False,
    "is_autotune_cache_disabled": lambda: False,
    "is_print_on_compilation_enabled": lambda: _printed() == "1",
    "get_default_target": _target,
    "get_default_execution_backend": lambda: "auto",
    "get_default_verbose": lambda: _printed() == "1",
}


def value(name: str) -> Any:
    """The value of one of TileLang's names.

    Raises:
        AttributeError: a name that means nothing here.
    """
    if name in _VALUES:
        return _VALUES[name]()
    if name in _ANSWERS:
        return _ANSWERS[name]
    if name in ("enable_cache", "disable_cache"):
        return getattr(compat, name)
    _unknown(name)


def assign(name: str, given: Any) -> None:
    """Sets one of them, for this process.

    Raises:
        AttributeError: a name that means nothing here. TileValueError: a value that the variable does not
        take.
    """
    if name not in _SET:
        _unknown(name)
    if not (variable := _SET[name]):
        compat.unused("env", {name: given})
        return
    before = os.environ.get(variable)
    os.environ[variable] = str(given)
    try:
        next(v for v in env.ALL if v.name == variable).get()
    except TileValueError:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
        raise


def _unknown(name: str) -> NoReturn:
    known = ", ".join(sorted({*_VALUES, *_ANSWERS}))
    raise AttributeError(f"env has no {name} here; it has {known}, and tilescale.env's own variables")


class Environment:
    """TileLang's object of variables."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return value(name)

    def __setattr__(self, name: str, given: Any) -> None:
        assign(name, given)


env.answer_by(Environment())
