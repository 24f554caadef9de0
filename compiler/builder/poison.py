"""A name that stands for no one value."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir import source
from tilescale.errors import Loc, TileSyntaxError


class Poison:
    """A name whose value depends on a device construct that was traced once; every use is refused."""

    def __init__(self, name: str, where: Loc | None, what: str, state: Any = None, instead: str = ""):
        object.__setattr__(self, "_info", (name, where, what, instead))
        object.__setattr__(self, "state", state)

    @property
    def instead(self) -> str:
        """What to write, where the name's kind is known."""
        return str(object.__getattribute__(self, "_info")[3])

    def refuse(self) -> Any:
        name, where, what, instead = object.__getattribute__(self, "_info")
        at = f" at line {where.line}" if where else ""
        raise TileSyntaxError(
            f"{name!r} is rebound under the device {what}{at}, so its value here is not one value",
            loc=source.current(),
            hint=instead
            or f'{name} = T.alloc_var("int32") before it; then assign to it inside and read it here',
        )

    def _use(self, *_: Any, **__: Any) -> Any:
        return self.refuse()

    def __getattr__(self, name: str) -> Any:
        return self.refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _use
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __lshift__ = __rshift__ = _use
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __neg__ = __invert__ = __abs__ = _use
    __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = __setitem__ = __call__ = __iter__ = __len__ = _use
    __bool__ = __int__ = __index__ = __float__ = __enter__ = __exit__ = _use

    def __eq__(self, other: object) -> Any:
        return self.refuse()

    def __ne__(self, other: object) -> Any:
        return self.refuse()

    def __hash__(self) -> int:
        return id(self)
