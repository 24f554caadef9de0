"""How operations are done on targets: what a target registers for an operation, and what passes and its
lowering find.

Lowerings of the operations in compiler/ops/NAME.py stand in compiler/TARGET/ops/NAME.py, for every target and
family of targets; a target that has none for an operation takes its family's. Where there is none either it
refuses the operation, or gives it to threads as a loop over elements (`TileOp.nest`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, ClassVar, Generic, TypeVar

from tilescale.compiler.ir.contexts import ExchangeContext, LayoutContext, LoweringContext, StageContext
from tilescale.compiler.ir.target import Target
from tilescale.compiler.tvm_compat import ir
from tilescale.errors import InternalError

#: a target's lowering of whole programs
Cx = TypeVar("Cx", bound=LoweringContext)


class Lowering(Generic[Cx]):
    """How one operation is done on one target, or on a family of targets, whose lowering of whole programs is
    ``Cx``. Instances have no state."""

    #: what ``layouts`` gives is asked for by an instruction, and follows from no other layout
    demands: ClassVar[bool] = False

    def lower(self, call: Any, cx: Cx) -> Any:
        """The call as thread IR."""
        raise NotImplementedError

    def stage(self, call: Any, cx: StageContext) -> list[Any] | None:
        """On GPUs: the call as statements whose operands lie where the operation can reach them; None where
        they do."""
        return None

    def layouts(self, call: Any, cx: LayoutContext) -> list[Any]:
        """On GPUs: ranked alternatives, each a list of :class:`tilescale.compiler.layout.infer.Demand`, given
        what ``cx.known`` has of the other operands."""
        return []

    def shared_layouts(self, call: Any) -> dict[Any, Any]:
        """On GPUs: tile → the Shared layout that the operation reads best."""
        return {}

    def insists(self, call: Any) -> bool:
        """On GPUs: whether it works on tiles in shared memory under the layouts of `shared_layouts` alone."""
        return False

    def exchange(self, call: Any, cx: ExchangeContext) -> list[Any] | None:
        """On GPUs: the call as several, the parts between which threads synchronize; None where it is one."""
        return None


_TABLE: dict[tuple[str, str], Lowering[Any]] = {}
_NONE: Lowering[Any] = Lowering()
Made = TypeVar("Made", bound="type[Lowering[Any]] | Callable[[Any, Any], Any]")


def lowers(target: str, *names: str) -> Callable[[Made], Made]:
    """Decorator: a `Lowering`, or a function ``(call, cx)`` that is all of one, is how a target does the
    operations ``ts.<name>``."""

    def register(made: Made) -> Made:
        if isinstance(made, type):
            one: Lowering[Any] = made()
        else:
            one = type(made.__name__, (Lowering,), {"lower": staticmethod(made)})()
        for name in names:
            if (target, f"ts.{name}") in _TABLE:
                raise InternalError(f"{target} lowers ts.{name} twice")
            _TABLE[target, f"ts.{name}"] = one
        return made

    return register


def lowering(call: Any, target: Target) -> Lowering[Any]:
    """How a target does what a Call stands for; one that asks for nothing where it has registered none."""
    return (
        _of(target.name, target.family, call.op.name)
        if isinstance(call, ir.Call) and hasattr(call.op, "name")
        else _NONE
    )


@functools.cache
def _of(target: str, family: str, name: str) -> Lowering[Any]:
    for owner in filter(None, (target, family)):
        _load(f"tilescale.compiler.{owner}.ops")
    return _TABLE.get((target, name)) or _TABLE.get((family, name), _NONE)


@functools.cache
def _load(package: str) -> None:
    """Imports a target's lowerings, all modules of a package."""
    for module in iter_modules(import_module(package).__path__):
        import_module(f"{package}.{module.name}")
