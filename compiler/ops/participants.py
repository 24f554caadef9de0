"""What collectives ask of the number of ranks that take part: parts for each of them, a root that is one of
them.

A launcher knows the number and refuses a launch that does not fit before anything runs, of all collectives
that every launch comes to and whose parts are a number or a symbol of a shape. All others look for
themselves, in their first barrier (`misfits`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tilescale.compiler.builder.values import as_expr
from tilescale.compiler.ir.contexts import LoweringContext
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ops.team import team_of_call
from tilescale.compiler.tvm_compat import ir, tirx
from tilescale.errors import Loc

#: as tilescale/native/ts_rt.h has them
PARTS, ROOT = 0, 1
_BY_VALUE, _BY_SYMBOL = 0, 2


@dataclass(frozen=True)
class Demand:
    """One demand of a collective. kind: PARTS or ROOT; whole: the tensor whose leading axis it is about;
    value: an integer, the place of a symbol among the program's, or None where no launcher knows it."""

    call: Any
    kind: int
    collective: str
    whole: str
    expr: Any
    known: int | None
    symbol: int | None
    loc: Loc | None

    @property
    def words(self) -> list[int]:
        return (
            [self.kind, _BY_VALUE, self.known]
            if self.known is not None
            else [self.kind, _BY_SYMBOL, self.symbol or 0]
        )

    @property
    def text(self) -> str:
        """What is wrong, where the numbers are not known."""
        if self.kind == ROOT:
            return f"{self.collective}: the root is none of those who take part"
        return f"{self.collective}: {self.whole} has not as many parts as take part"


def demands_of(call: Any, symbols: dict[str, Any] | None = None) -> list[Demand]:
    """The demands of one barrier of a collective: those of its first; none of a T.barrier."""
    if call.attrs is None or "agreed" not in call.attrs:
        return []
    texts = dict(str(text).split(": ", 1) for text in call.attrs["agreed"])
    slots = list((symbols or {}).values())
    out = []
    _, given = team_of_call(call)
    for name, e in zip(call.attrs["names"], given, strict=True):
        if str(name) not in ("parts", "parts of the source", "root"):
            continue
        symbol = next((k for k, var in enumerate(slots) if isinstance(e, ir.Var) and e.same_as(var)), None)
        whole = texts.get("symmetric tensor", "") if str(name) == "parts" else "the source"
        kind = ROOT if str(name) == "root" else PARTS
        out.append(
            Demand(
                call,
                kind,
                texts["collective"],
                whole,
                e,
                constant(e),
                symbol,
                loc_of(getattr(call, "span", None)),
            )
        )
    return out


def demands(program: TileProgram) -> list[Demand]:
    """What a launcher has to look at: of the collectives of all ranks that every block of every launch comes
    to, all that it knows."""
    calls = [call for call in _straight(program.func.body) if team_of_call(call)[0] is None]
    found = [d for call in calls for d in demands_of(call, program.symbols)]
    return [d for d in found if d.known is not None or d.symbol is not None]


def _straight(s: Any) -> Iterator[Any]:
    """The barriers of ranks that stand under no condition."""
    if isinstance(s, tirx.SeqStmt):
        for x in s.seq:
            yield from _straight(x)
    elif isinstance(s, tirx.AttrStmt) or (isinstance(s, tirx.For) and (constant(s.extent) or 0) > 0):
        yield from _straight(s.body)
    elif isinstance(s, tirx.Evaluate) and isinstance(s.value, ir.Call) and s.value.op.name == "ts.team_sync":
        yield s.value


def misfits(call: Any, cx: LoweringContext) -> list[tuple[Any, str]]:
    """For each demand of a barrier that no launcher looks at: the condition under which the launch fails, and
    what is wrong then. ``cx`` is a target's lowering."""
    if call.attrs is None or "agreed" not in call.attrs:
        return []
    among, _ = team_of_call(call)
    everyone = ir.Call(
        "ts.scale_count", [ir.StringImm(str(call.attrs["reach"]))], ret_ty=ir.PrimType("int32")
    )
    count = _long(cx.scalar(everyone if among is None else as_expr(among.count)))
    if cx.demanded is None:
        cx.demanded = {d.call for d in demands(cx.program)}
    out = []
    for d in demands_of(call, cx.program.symbols):
        if call in cx.demanded and (d.known is not None or d.symbol is not None):
            continue
        value = _long(cx.scalar(as_expr(d.expr)))
        fits = tirx.And(value >= 0, value < count) if d.kind == ROOT else tirx.EQ(value, count)
        if not cx.proven(fits):
            out.append((tirx.Not(fits), d.text))
    return out


def _long(value: Any) -> Any:
    return value if str(value.ty) == "int64" else tirx.Cast("int64", value)


def as_meta(d: Demand) -> dict[str, Any]:
    """What a kernel object says of a launch that this demand refuses, as JSON."""
    from tilescale.compiler.ir.source import location

    return {"root": d.kind == ROOT, "collective": d.collective, "whole": d.whole, "loc": location(d.loc)}


def behind_misfits(call: Any, cx: LoweringContext, fail: Callable[[str], Any], met: Any) -> Any:
    """``met``, the barrier, behind what fails the launch where a collective does not fit those who take part
    and no launcher saw that."""
    from tilescale.compiler.ops.participants import misfits

    tests = [tirx.IfThenElse(wrong, fail(text), None) for wrong, text in misfits(call, cx)]
    return sequence([*tests, met])
