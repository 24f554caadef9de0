"""Atomic updates of a rank's own memory, which its blocks share; their order is the order of arrival. A
peer's: remote_atomic.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.lanes import Lanes
from tilescale.compiler.builder.values import Buffer, Region, binary, convert
from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import VOID, Access, TileOp, register
from tilescale.compiler.ops import placed
from tilescale.compiler.ops.base import (
    emit,
    is_tile,
    region,
    require_inside,
    require_same_shape,
    show,
    unheeded,
)
from tilescale.compiler.tvm_compat import ir, tirx
from tilescale.errors import TileTypeError
from tilescale.language.booleans import require_bools

KINDS = ("add", "max", "min", "load", "store")
ORDERS = (None, "relaxed", "consume", "acquire", "release", "acq_rel", "seq_cst")
#: what a load, or a store, cannot do: C++ has no such order for them
_NOT_OF = {"load": ("release", "acq_rel"), "store": ("consume", "acquire", "acq_rel")}
#: of bits, for integers alone
BITWISE = ("or", "and", "xor")
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint32", "uint64")


def _atomic(kind: str, dst: Any, value: Any, return_prev: bool, neighbours: int = 1) -> Any:
    require_bools(return_prev=return_prev)
    tile = isinstance(value, (Buffer, Region))
    to = region(dst, f"the target of T.atomic_{kind}", region(value, "the value").shape if tile else ())
    loc = source.current()
    if to.buffer.kind == "signal":
        instead = {
            "load": "T.test({0}[i], value) or T.wait({0}[i], value), which acquire",
            "store": 'T.signal({0}[i], value, op="set")',
        }
        raise TileTypeError(
            f"T.atomic_{kind} of {to.name}, which is a signal", loc=loc, expected="memory",
            hint=instead.get(kind, "T.signal({0}[i], value), which releases").format(to.name),
        )  # fmt: skip
    dtypes = tuple(d for d in DTYPES if "int" in d) if kind in BITWISE else DTYPES
    if to.dtype not in dtypes:
        raise TileTypeError(f"T.atomic_{kind} of {to.dtype}", loc=loc, expected="one of " + ", ".join(dtypes))
    if not to.buffer.scope.startswith(("global", "shared")):
        raise TileTypeError(f"{to.name} is private to its executor", loc=loc, hint=f"{to.name}[…] += …")
    if tile or (isinstance(dst, (Buffer, Region)) and to.shape):
        if return_prev:
            raise TileTypeError(
                f"T.atomic_{kind} of a whole tile returns nothing", loc=loc, hint="loop over T.Parallel"
            )
        frm: Any = region(value, "the value", to.shape) if is_tile(value) else convert(value, to.dtype)
        if isinstance(frm, Region):
            require_same_shape(frm, to, f"T.atomic_{kind}")
            if frm.dtype != to.dtype:
                raise TileTypeError(
                    f"T.atomic_{kind} of {frm.dtype} into {to.dtype}", loc=loc, expected="one dtype"
                )
            if to.buffer.flat is not None or frm.buffer.flat is not None:
                held = frm.buffer
                placed.by_element(to, frm, lambda i, j: _atomic(kind, to.buffer[i], held[j], False))
                return None
            frm = frm.ir()
        emit("atomic", [to.ir(), frm], {"kind": kind})
        return None
    if neighbours == 1:
        require_inside(to)
    if kind == "load" or return_prev:
        b = bld.current()
        dt = ir.PrimType(str(to.dtype))
        prev = tirx.Var(b.unique("prev"), dt)
        args = [to.ir(), convert(value, to.dtype)]
        call = ir.Call(
            "ts.atomic",
            args,
            attrs={"kind": kind, "executor": b.executor, "reach": b.reach},
            ret_ty=dt,
            span=b.span(),
        )
        b.emit(tirx.Bind(prev, call, b.span()))
        return prev
    emit(
        "atomic",
        [to.ir(), convert(value, to.dtype)],
        {"kind": kind, **({"neighbours": neighbours} if neighbours > 1 else {})},
    )
    return None


def check_order(order: str | None, kind: str = "") -> None:
    """Every atomic operation acquires and releases (docs/LANGUAGE.md, "Order"), whatever weaker order is
    asked for.

    Raises:
        TileTypeError: an order that there is not, or that a load or a store cannot have.
    """
    orders = [o for o in ORDERS if o not in _NOT_OF.get(kind, ())]
    if order not in orders:
        of = f" of T.atomic_{kind}" if order in ORDERS else ""
        known = ", ".join(str(o) for o in orders if o)
        raise TileTypeError(f"memory_order={order!r}{of}", loc=source.current(), expected=f"one of {known}")


def _anywhere(kind: str, side: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Behind an operand ``dst=`` (of a load ``src=``) names the rank whose memory it is: an operation of its
    own (ops/remote_atomic.py)."""

    def decorated(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def checked(*args: Any, **kwargs: Any) -> Any:
            named = next(
                (
                    name
                    for name in ("dst", "src")
                    if name in kwargs and (args or isinstance(kwargs[name], int))
                ),
                None,
            )
            if named is None:
                return fn(*args, **kwargs)
            if named != side or not kind:
                raise TileTypeError(
                    f"T.{fn.__name__} has no {named}=",
                    loc=source.current(),
                    hint=f"T.{fn.__name__}(…, {side}=rank)"
                    if kind
                    else "T.atomic_add or atomic_store of each element, with dst=rank",
                )
            from tilescale.compiler.ops.remote_atomic import remote

            return remote(kind, kwargs.pop(named), *args, **kwargs)

        return checked

    return decorated


@_anywhere("add", "dst")
def atomic_add(
    dst: Any, value: Any, memory_order: str | None = None, return_prev: bool = False, use_tma: bool = False,
    annotations: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Adds a scalar to an element, or a tile to a region; the sum's order is the order of arrival. May return
    the value before. TMA adds tiles where it can, whether it is asked to (``use_tma``) or not."""
    unheeded("atomic_add", annotations)
    check_order(memory_order)
    require_bools(use_tma=use_tma)
    return _atomic("add", dst, value, return_prev)


@_anywhere("max", "dst")
def atomic_max(dst: Any, value: Any, memory_order: str | None = None, return_prev: bool = False) -> Any:
    """The greater of an element and a value (a region and a tile)."""
    check_order(memory_order)
    return _atomic("max", dst, value, return_prev)


@_anywhere("min", "dst")
def atomic_min(dst: Any, value: Any, memory_order: str | None = None, return_prev: bool = False) -> Any:
    """The lesser of an element and a value (a region and a tile)."""
    check_order(memory_order)
    return _atomic("min", dst, value, return_prev)


@_anywhere("", "dst")
def atomic_or(dst: Any, value: Any, memory_order: str | None = None, return_prev: bool = False) -> Any:
    """The bits of an element or of a value (of a region and a tile), of integers."""
    check_order(memory_order)
    return _atomic("or", dst, value, return_prev)


@_anywhere("", "dst")
def atomic_and(dst: Any, value: Any, memory_order: str | None = None, return_prev: bool = False) -> Any:
    """The bits that an element and a value have in common, of integers."""
    check_order(memory_order)
    return _atomic("and", dst, value, return_prev)


@_anywhere("", "dst")
def atomic_xor(dst: Any, value: Any, memory_order: str | None = None, return_prev: bool = False) -> Any:
    """The bits in which an element and a value differ, of integers."""
    check_order(memory_order)
    return _atomic("xor", dst, value, return_prev)


@_anywhere("", "dst")
def atomic_exch(dst: Any, value: Any, memory_order: str | None = None) -> Any:
    """Writes an element; the value before it is the result."""
    check_order(memory_order)
    return _atomic("exch", dst, value, True)


def _several(dst: Any, value: Any, count: int, return_prev: bool) -> Any:
    """Neighbours along the last axis; in a T.Parallel loop one update each, which passes/neighbours.py makes
    iterations of. What was there comes back as a vector, of an update for each lane."""
    what = f"T.atomic_addx{count}"
    require_bools(return_prev=return_prev)
    if not is_tile(value):
        raise TileTypeError(
            f"{what} adds {value!r}",
            loc=source.current(),
            expected=f"the first of {count} neighbours, as A[i] or f[i, j]",
            hint="T.atomic_add of each element",
        )
    to, frm = region(dst, f"the target of {what}", (count,)), region(value, f"the value of {what}", (count,))
    for r in (to, frm):
        if [constant(e) for e in r.extents] != [1] * (len(r.extents) - 1) + [count]:
            raise TileTypeError(
                f"{what} of {r.name} with a tile of {show(r.shape)}",
                loc=source.current(),
                expected=f"{count} neighbours of its last axis",
            )
    if not return_prev and not any(f.kind in ("parallel", "vectorized") for f in bld.current().frames):
        _atomic("add", to, frm, False)
        return None
    before = []
    for k in range(count):
        at, of = (r.buffer.__getitem__((*r.mins[:-1], binary("+", r.mins[-1], k))) for r in (to, frm))
        before.append(_atomic("add", at, of, return_prev, 1 if return_prev else count))
    return Lanes(to.dtype, before) if return_prev else None


@_anywhere("", "dst")
def atomic_addx2(dst: Any, value: Any, return_prev: bool = False) -> Any:
    """Adds two neighbours along the last axis, each atomically: ``T.atomic_addx2(C[i, j], t[i, j])``, also in
    ``T.Parallel``. May return what was there, as a vector of two.

    Raises:
        TileTypeError: a value that is no memory, more than two elements.
    """
    return _several(dst, value, 2, return_prev)


@_anywhere("", "dst")
def atomic_addx4(dst: Any, value: Any, return_prev: bool = False) -> Any:
    """Adds four neighbours along the last axis, each atomically, as :func:`atomic_addx2` does two."""
    return _several(dst, value, 4, return_prev)


@_anywhere("load", "src")
def atomic_load(src: Any, memory_order: str = "seq_cst") -> Any:
    """Reads an element at once, after everything that its writer released."""
    check_order(memory_order, "load")
    return _atomic("load", src, 0, True)


@_anywhere("store", "dst")
def atomic_store(dst: Any, value: Any, memory_order: str = "seq_cst") -> None:
    """Writes an element at once, releasing what was written before."""
    check_order(memory_order, "store")
    _atomic("store", dst, value, False)


@register
class Atomic(TileOp):
    name = "atomic"
    attributes: ClassVar[tuple[str, ...]] = ("kind", "neighbours?")
    in_lanes = in_iterations = observed = True

    def acquires(self, call: Any) -> bool:
        return True

    def written(self, call: Any) -> str:
        return f"T.atomic_{call.attrs['kind']}"

    def effects(self, call: Any) -> list[Access]:
        kind = str(call.attrs["kind"])
        out = [Access(call.args[0], "update", half=kind if kind in ("load", "store") else "")]
        return [*out, Access(call.args[1], "read")] if isinstance(call.args[1], ir.TensorRegion) else out

    def nest(self, call: Any) -> Any:
        from tilescale.compiler.ir.nests import element_nest, indexed, long_axes

        if str(call.ty) != str(VOID):
            return None
        dst, value = call.args
        kept = long_axes(dst)
        frm = long_axes(value) if isinstance(value, ir.TensorRegion) else []

        def one(at: list[Any]) -> Any:
            operand = (
                tirx.BufferLoad(value.source, indexed(value, at, frm))
                if isinstance(value, ir.TensorRegion)
                else value
            )
            where = tirx.BufferRegion(
                dst.source, [ir.Range.from_min_extent(i, 1) for i in indexed(dst, at, kept)]
            )
            return tirx.Evaluate(
                ir.Call(call.op, [where, operand], attrs=dict(call.attrs), ret_ty=VOID, span=call.span),
                call.span,
            )

        return element_nest([dst.region[k].extent for k in kept], one, call, f"T.atomic_{call.attrs['kind']}")

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import atomics

        target, kind = cx.view(call.args[0], call), str(call.attrs["kind"])
        if isinstance(call.args[1], ir.TensorRegion):
            source = cx.view(call.args[1], call)
            return lambda ex: atomics.tile(ex, target, kind, lambda: source.read(ex))
        value, single = cx.scalar(call.args[1]), all(constant(r.extent) == 1 for r in call.args[0].region)
        asked = str(call.ty) != str(VOID)
        if single:
            return lambda ex: atomics.elements(ex, target, kind, value(ex), result=asked)
        return lambda ex: atomics.tile(ex, target, kind, lambda: value(ex))
