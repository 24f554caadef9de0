"""Names that TileLang's programs use and that decide nothing here, so that they run unchanged."""

from __future__ import annotations


class _AnyName(type):
    """Every attribute is its own name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class PassConfigKey(metaclass=_AnyName):
    """TileLang's switches for its passes: ``pass_configs={PassConfigKey.TL_…: True}`` is accepted and has no
    effect (TILESCALE_LOG=info says so). Fast math is asked for by name instead: ``T.__exp``."""
