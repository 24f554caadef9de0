"""``T.print``: shows a scalar or a tile from inside a kernel."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder.values import Buffer, Region, Variable, as_expr, to_expr
from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.operations import Access, TileOp, register
from tilescale.compiler.ops.base import emit
from tilescale.compiler.tvm_compat import ir
from tilescale.errors import TileTypeError

#: dtype → the runtime's number: DLPack's code × 256 + bits
CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "bool": 6, "float8_e4m3fn": 10, "float8_e5m2": 12}


def dtype_code(dtype: str) -> int:
    """A dtype as the runtime's printer knows it: DLPack's type code × 256 + bits."""
    from tilescale.language.dtypes import BITS

    code = CODES.get(dtype)
    if code is None:
        code = CODES[dtype.rstrip("0123456789")]
    return code * 256 + BITS[dtype]


def print(obj: Any, msg: str = "") -> None:  # the language's name
    """Prints a scalar or a whole tile, once for each executor, with its rank and block in front; ``msg`` is
    its label. A text alone is printed as it is.

    Raises:
        TileTypeError: a label that is no text, also where the two are given the other way round.
    """
    if not isinstance(msg, str):
        shown = getattr(msg, "name", str(msg))
        swapped = isinstance(obj, str)
        raise TileTypeError(
            f"T.print's label is {shown}", loc=source.current(), expected="what is shown, then a text",
            hint=f'T.print({shown}, "{obj}")' if swapped else f'T.print({getattr(obj, "name", obj)}, "…")',
        )  # fmt: skip
    if isinstance(obj, str) and msg:
        hint = f'T.print("{msg}: {obj}")'
        raise TileTypeError(
            "T.print of two texts", loc=source.current(), expected="what is shown, then a text", hint=hint
        )
    if isinstance(obj, (Buffer, Region)):
        region = obj if isinstance(obj, Region) else obj.whole()
        emit("print", [region.ir()], {"msg": msg or region.name, "dropped": [int(d) for d in region.dropped]})
        return
    if isinstance(obj, str):
        emit("print", [ir.StringImm(obj)], {"msg": obj})
        return
    name = obj.name if isinstance(obj, Variable) else ""
    value = as_expr(obj, "float32" if isinstance(to_expr(obj), float) else "int32")
    emit("print", [value], {"msg": msg or name or str(value)})


@register
class Print(TileOp):
    name = "print"
    attributes = ("msg", "dropped?")
    in_iterations = True

    def effects(self, call: Any) -> list[Access]:
        return [Access(call.args[0], "read")] if isinstance(call.args[0], ir.TensorRegion) else []

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import printing

        value, label, loc = call.args[0], str(call.attrs["msg"]), source.loc_of(call.span)
        if isinstance(value, ir.StringImm):
            return lambda ex: ex.machine.show(ex, f"{printing.head(ex, loc)}{label}")
        if isinstance(value, ir.TensorRegion):
            view, dropped = cx.view(value, call), tuple(k for k, d in enumerate(call.attrs["dropped"]) if d)
            return lambda ex: ex.machine.show(
                ex,
                f"{printing.head(ex, loc)}{label} = "
                f"{printing.tile(view.read(ex).squeeze(axis=dropped), view.dtype)}",
            )
        number, dtype = cx.scalar(value), str(value.ty)
        return lambda ex: ex.machine.show(
            ex, f"{printing.head(ex, loc)}{label} = {printing.scalar(number(ex), dtype)}"
        )
