"""What both styles of ``@tilescale.jit`` share: kernels by their arguments, forgotten where what they were
made from has changed."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tilescale.comm import sim as comm_sim
from tilescale.compat import unused
from tilescale.errors import Loc, TileError, TileTypeError
from tilescale.watch import Watch

if TYPE_CHECKING:
    from tilescale.compiler.ir.program import TileProgram
    from tilescale.kernel import Kernel


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Python's collector rests: loading and compiling make many objects that live on, and a full collection
    in the middle would walk all of torch (60 ms) to find nothing."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


# ---- arguments as keys


class _ById:
    """An argument that has no value to compare by: equal to itself alone, and kept alive by the key that
    holds it."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def frozen(value: Any) -> Any:
    """A compile-time argument as a dictionary key; 1, 1.0 and True differ, symbolic extents go by name."""
    kind = type(value)
    if kind in (int, float, bool, str, type(None)):
        return (kind, value)
    from tilescale.language.symbolic import SymExpr, symbols_of

    if isinstance(value, SymExpr):  # its == is a device comparison
        return (
            "symbol",
            str(value),
            getattr(value, "dtype", None),
            *((s.name, s.multiple_of) for s in symbols_of(value)),
        )
    if isinstance(value, (list, tuple)):
        return (kind, *map(frozen, value))
    if isinstance(value, dict):
        return (kind, *((frozen(k), frozen(v)) for k, v in value.items()))
    try:
        hash(value)
    except TypeError:
        return _ById(value)
    return (kind, value)


def loc_of(func: types.FunctionType) -> Loc:
    return Loc(func.__code__.co_filename, func.__code__.co_firstlineno)


def one_by_one(
    make: Callable[..., Kernel], configs: Iterable[Any], num_workers: int | None, ignore_error: bool
) -> list[Kernel | None]:
    """A kernel for each of ``configs``, a tuple of arguments or a dict of named ones. They are made one after
    the other: TVM's analyzers are not meant for several threads. ``ignore_error``: None for one that is
    refused."""
    unused("par_compile", {"num_workers": num_workers})
    made: list[Kernel | None] = []
    for config in configs:
        try:
            made.append(make(**config) if isinstance(config, dict) else make(*config))
        except TileError:
            if not ignore_error:
                raise
            made.append(None)
    return made


class Jit:
    """What both styles share. ``options`` are the decorator's."""

    def __init__(self, func: types.FunctionType, out_idx: Any, target: Any, instrument: bool):
        functools.update_wrapper(self, func)
        self.func = func
        self.name = func.__name__
        self.out_idx, self.target, self.instrument = out_idx, target, instrument
        self.signature = inspect.signature(func)
        self.kernels: dict[Any, Kernel] = {}
        self._watch: Watch | None = None
        self._epoch = 0

    def fresh(self) -> bool:
        """Whether kernels made so far still stand for what the function would make now; forgets them where
        they do not."""
        if self._watch is None:
            self._watch, self._epoch = Watch(self.func), comm_sim.epoch
        elif (
            self._watch.changed() or self._epoch != comm_sim.epoch
        ):  # simulated ranks have come or gone: the target changes
            self._epoch = comm_sim.epoch
            self.kernels.clear()
            self._watch = Watch(self.func)
            return False
        return True

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TileTypeError(
                f"{self.name}: {error}", loc=loc_of(self.func), expected=f"{self.name}{self.signature}"
            ) from None
        bound.apply_defaults()
        return bound

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def compile(self, *args: Any, **kwargs: Any) -> Kernel:
        """The kernel for these arguments."""
        raise NotImplementedError

    def program(self, *args: Any, **kwargs: Any) -> TileProgram:
        """The tile program for these arguments (a :class:`tilescale.compiler.ir.program.TileProgram`), traced
        and not compiled."""
        raise NotImplementedError
