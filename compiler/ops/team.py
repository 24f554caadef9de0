"""Teams inside a kernel: ``T.Scale("device", team=…)``.

A team is some of the launch's ranks. All that names a rank inside it (``dst=``, ``src=``, roots) becomes a
rank of the launch when the kernel is traced, so that passes and lowerings know launch ranks alone; what
synchronizes (T.barrier, the barriers of collectives) says who does in its last operands. So a team within a
team is nothing new: its members are found among those of the outer one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.constructs import LoopNest, is_device
from tilescale.compiler.builder.values import as_expr, binary, compare, difference, index_expr
from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import LoweringContext, SimContext
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import register
from tilescale.compiler.ops.assertion import Assert
from tilescale.compiler.ops.base import emit
from tilescale.compiler.tvm_compat import ir, register_op, structural_walk, tirx
from tilescale.errors import TileTypeError, TileValueError

#: a rank that is outside of its team, for the runtimes: this plus the lower 16 bits of what the program named
#: (TS_OUTSIDE in ts_rt.h)
OUTSIDE = -(1 << 30)
#: at most so many ranks in a launch (TS_MAX_RANKS)
MAX_RANKS = 128
_FORMS = "a list of ranks, [0, 1], or a range, range(first, stop, step), whose bounds may be device values"

#: index, count, rank of the launch: the third where 0 ≤ index < count, an error of whoever uses it elsewhere
register_op("ts.scale_rank", pure=True)


def launch_rank() -> Any:
    """The own rank in the launch's team."""
    return ir.Call("ts.scale_index", [ir.StringImm("device")], ret_ty=ir.PrimType("int32"))


def launch_ranks() -> Any:
    """How many ranks the launch's team has."""
    return ir.Call("ts.scale_count", [ir.StringImm("device")], ret_ty=ir.PrimType("int32"))


@dataclass(frozen=True)
class Team:
    """Ranks of the launch, in the team's order; ints where they are known when the kernel is compiled.

    form: "range", of ``terms`` first, count and step (positive); or "list", of the count and then ranks, of
    which those behind the count are -1. nobody: nobody is inside. What it says there is traced all the same,
    as of the launch's ranks, since it may divide by their number.
    """

    form: str
    terms: tuple[Any, ...]
    nobody: bool = False

    @staticmethod
    def of(members: list[Any], count: Any = None) -> Team:
        """The team of these ranks, a range where they are evenly spaced."""
        steps = (
            {b - a for a, b in zip(members, members[1:], strict=False)}
            if all(isinstance(m, int) for m in members)
            else {0}
        )
        if count is None and len(steps) <= 1 and min(steps, default=1) > 0:
            return Team("range", (members[0], len(members), min(steps, default=1)))
        return Team("list", (len(members) if count is None else count, *members))

    @property
    def count(self) -> Any:
        return self.terms[1] if self.form == "range" else self.terms[0]

    def member(self, index: Any) -> Any:
        """The launch's rank of a member; 0 ≤ index < count."""
        if self.form == "range":
            first, _, step = self.terms
            return binary("+", first, binary("*", index, step))
        members = self.terms[1:]
        return members[index] if isinstance(index, int) else _one_of(index, range(len(members)), members)

    def index(self) -> Any:
        """The own place among the members, on those."""
        if self.form == "list":
            members = self.terms[1:]
            return _one_of(launch_rank(), members, range(len(members)))
        first, _, step = self.terms
        return binary("//", binary("-", launch_rank(), first), step)

    def inside(self) -> Any:
        """Whether this rank is a member."""
        me = launch_rank()
        if self.nobody:
            return compare("<", me, 0)
        if self.form == "list":
            return _any(compare("==", me, m) for m in self.terms[1:])
        first, count, step = self.terms
        parts = [compare(">=", me, first), compare("<", binary("//", binary("-", me, first), step), count)]
        if not _is_one(step):
            parts.append(compare("==", binary("%", binary("-", me, first), step), 0))
        return _all(parts)

    def rank(self, index: Any, side: str) -> Any:
        """The launch's rank of what a program names inside the team; an error when the kernel runs where that
        is no member.

        Raises:
            TileValueError: it is known to be none.
        """
        known, count = constant(index), constant(self.count)
        if known is not None and count is not None:
            if not 0 <= known < count:
                raise TileValueError(
                    f"{side}={known} is no rank of the team, which has {count}",
                    loc=source.current(),
                    expected=f"0 ≤ rank < {count}",
                )
            return index_expr(self.member(known))
        # of a range what is named may stand in the copy itself, which then keeps its place in a pipelined
        # loop
        named = as_expr(index) if self.form == "range" and not _reads(index) else bound("member", index)
        there = self.member(named if known is None else known)
        return ir.Call(
            "ts.scale_rank",
            [as_expr(named), as_expr(self.count), as_expr(there)],
            ret_ty=ir.PrimType("int32"),
        )

    # -- as operands
    # ----------------------------------------------------------------------------
    def operands(self) -> list[Any]:
        return [as_expr(t) for t in self.terms]


def member_operands(team: Team | None) -> tuple[list[Any], dict[str, Any]]:
    """What a call says of who takes part: its last operands, and the attributes that name them. Nothing
    where it is everyone."""
    if team is None:
        return [], {}
    made = team.operands()
    return made, {"team": team.form, "team_operands": len(made)}


def team_of_call(call: Any) -> tuple[Team | None, list[Any]]:
    """The team of a call (None: everyone) and its other operands."""
    args = list(call.args)
    if call.attrs is None or "team" not in call.attrs:
        return None, args
    n = int(call.attrs["team_operands"])
    terms = [known if (known := constant(a)) is not None else a for a in args[-n:]]
    return Team(str(call.attrs["team"]), tuple(terms)), args[:-n]


# ---- made by the author


def open_team(given: Any, outer: Team | None) -> Team:
    """The team that ``team=`` names among the members of ``outer`` (None: the launch's ranks), with what must
    hold of it when the kernel runs added to the trace.

    Raises:
        TileTypeError: what is no team. TileValueError: ranks that are negative, there twice, or not there.
    """
    if isinstance(given, LoopNest) and given.kind == "serial" and len(given.ranges) == 1:
        return _of_range(*given.ranges[0], outer)
    if isinstance(given, range) and not given:
        return _of_range(0, 0, 1, outer)
    if not isinstance(given, (list, tuple, range)):
        hint = (
            "a team of tilescale.comm is the launch's, by the symmetric arguments that are allocated for it"
        )
        raise TileTypeError(
            f"team={given!r} ({type(given).__name__})", loc=source.current(), expected=_FORMS, hint=hint
        )
    return _of_list(list(given), outer)


def _of_list(members: list[Any], outer: Team | None) -> Team:
    loc = source.current()
    for m in members:
        if isinstance(m, bool) or not isinstance(m, int):
            raise TileTypeError(
                f"team={members!r} has a {'device value' if is_device(m) else type(m).__name__} in it",
                loc=loc,
                expected="ints in a list",
                hint="range(first, stop, step) of device values",
            )
        if not 0 <= m < MAX_RANKS:
            raise TileValueError(
                f"team={members!r}: {m} is no rank", loc=loc, expected=f"0 ≤ rank < {MAX_RANKS}"
            )
    if not members:
        raise TileValueError("a team of nobody", loc=loc, expected="one rank or more")
    if len(set(members)) < len(members):
        twice = next(m for m in members if members.count(m) > 1)
        raise TileValueError(f"team={members!r} has rank {twice} twice", loc=loc, expected="every rank once")
    _must_be_there(f"team={members!r}", 1, min(members), max(members), outer)
    return Team.of([m if outer is None else outer.member(m) for m in members])


def _of_range(low: Any, high: Any, step: Any, outer: Team | None) -> Team:
    low, high, step = (bound(name, v) for name, v in (("first", low), ("stop", high), ("step", step)))
    if isinstance(low, int) and isinstance(high, int) and isinstance(step, int) and range(low, high, step):
        return _of_list(list(range(low, high, step)), outer)
    if not isinstance(step, int):
        emit("assert", [compare(">=", step, 1), ir.StringImm("the step of a team's range is positive")])
    width = difference(high, low)
    length = width if _is_one(step) else binary("//", binary("+", width, binary("-", step, 1)), step)
    if isinstance(length, int) and length <= 0:
        return Team("range", (0, bound("members", launch_ranks()), 1), nobody=True)
    count = length if isinstance(length, int) else bound("members", binary("max", length, 0))
    last = binary("+", low, binary("*", binary("-", count, 1), step))
    _must_be_there("the range", count, low, last, outer)
    if outer is None:
        return Team("range", (low, count, step))
    if outer.form == "range":
        first, _, by = outer.terms
        return Team(
            "range",
            (
                bound("first", binary("+", first, binary("*", low, by))),
                count,
                bound("step", binary("*", step, by)),
            ),
        )
    members = [
        binary_if(compare("<", k, count), outer.member(binary("+", low, binary("*", step, k))), -1)
        for k in range(len(outer.terms) - 1)
    ]
    return Team.of([bound("member", m) for m in members], count)


def _must_be_there(what: str, count: Any, low: Any, high: Any, outer: Team | None) -> None:
    """Adds the check that ranks ``low`` to ``high`` (where count is not 0) are ranks of what encloses the
    team.

    Raises:
        TileValueError: they are known not to be.
    """
    ranks, around = (launch_ranks(), "launch") if outer is None else (outer.count, "team around it")
    if all(isinstance(x, int) for x in (low, high, ranks)):
        if high >= ranks:
            raise TileValueError(
                f"{what}: the {around} has no rank {high}",
                loc=source.current(),
                expected=f"0 ≤ rank < {ranks}",
            )
        return
    there = _all([compare(">=", low, 0), compare("<", high, ranks)])
    there = _any([compare("<=", count, 0), there]) if not isinstance(count, int) else there
    emit(
        "team",
        [
            there,
            ir.StringImm(f"{what} of T.Scale has a rank that the {around} has not"),
            *map(as_expr, (count, low, high, ranks)),
        ],
    )


# ---- expressions over ints and device values


def bound(name: str, value: Any) -> Any:
    """A name for a device value, so that it is computed once; ints, constants and names as they are."""
    known = constant(value)
    if known is not None:
        return known
    e = index_expr(value)
    if isinstance(e, ir.Var):
        return e
    e = e if str(e.ty) == "int32" else tirx.Cast("int32", e)
    b = bld.current()
    var = tirx.Var(b.unique(name), "int32")
    b.emit(tirx.Bind(var, e, b.span()))
    b.definitions[var] = e
    return var


def _reads(value: Any) -> bool:
    """Whether an expression reads memory."""
    found: list[Any] = []
    if is_device(value):
        structural_walk(as_expr(value), (ir.TensorLoad, found.append))
    return bool(found)


def binary_if(condition: Any, yes: Any, no: Any) -> Any:
    return (
        (yes if condition else no)
        if isinstance(condition, bool)
        else tirx.if_then_else(condition, as_expr(yes), as_expr(no))
    )


def _is_one(step: Any) -> bool:
    return isinstance(step, int) and step == 1


def _one_of(value: Any, cases: Iterable[Any], results: Iterable[Any]) -> Any:
    """The result beside the case that ``value`` equals; the last where it is none of them."""
    pairs = list(zip(cases, results, strict=True))
    made = as_expr(pairs[-1][1])
    for case, result in reversed(pairs[:-1]):
        made = binary_if(compare("==", value, case), result, made)
    return made


def _all(conditions: Iterable[Any]) -> Any:
    made: Any = True
    for c in conditions:
        made = (
            made if c is True else c if made is True else tirx.And(as_expr(made, "bool"), as_expr(c, "bool"))
        )
    return made


def _any(conditions: Iterable[Any]) -> Any:
    made: Any = False
    for c in conditions:
        made = (
            made if c is False else c if made is False else tirx.Or(as_expr(made, "bool"), as_expr(c, "bool"))
        )
    return made


# ---- on the targets


@register
class Exists(Assert):
    """What must hold of a team when the kernel runs. Operands: condition, text, count, lowest and highest
    rank, how many there are."""

    name = "team"
    in_lanes = in_iterations = False

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.findings import Finding

        holds, high, ranks, site = (
            cx.scalar(call.args[0]),
            cx.scalar(call.args[4]),
            cx.scalar(call.args[5]),
            cx.site(call, "T.Scale"),
        )

        def run(ex: Any) -> None:
            if not holds(ex):
                text = f"{call.args[1].value}: it needs {int(high(ex)) + 1}, and there are {int(ranks(ex))}"
                ex.machine.report.add(
                    Finding("no-such-rank", text, ex.where(site), hint=f"ranks below {int(ranks(ex))}")
                )

        return run


def checked_rank(cx: LoweringContext, call: Any) -> Any:
    """``ts.scale_rank`` in thread IR: the launch's rank, or what the runtime takes for a rank outside of the
    team."""
    index, count, rank = (cx.scalar(a) for a in call.args)
    there = tirx.And(tirx.GE(index, as_expr(0)), tirx.LT(index, count))
    if cx.proven(there):
        return rank
    return tirx.if_then_else(there, rank, as_expr(OUTSIDE) + tirx.floormod(index, as_expr(1 << 16)))


def ranks_of(call: Any, cx: SimContext, in_order: bool = False) -> Callable[[Any], tuple[int, ...] | None]:
    """For the simulator: who synchronizes in ``call``, as ranks of the launch (those that it has); None where
    it is everyone."""
    among, _ = team_of_call(call)
    if among is None:
        return lambda ex: None
    terms = [cx.scalar(as_expr(t)) for t in among.terms]

    def members(ex: Any) -> tuple[int, ...]:
        values = [int(t(ex)) for t in terms]
        if among.form == "range":
            first, count, step = values
            ranks = [first + k * step for k in range(count)]
        else:
            ranks = values[1:]
        there = [r for r in ranks if 0 <= r < len(ex.machine.ranks)]
        return tuple(there if in_order else sorted(there))

    return members
