"""A tile belongs to who allocates it: to the block, or, inside ``T.Scale``, to each warpgroup, warp or
thread. Refused here, for every target alike, is what would mean something else on each of them:

- a tile of a ``T.Scale``, or a name bound in it, outside of it, where there is no one to say whose is meant;
- a fragment in a narrower scope than its own, whose executors have a part of its elements each. They may read
  single elements of one so small that all threads hold it whole (layout/infer.py; a GPU refuses one that an
  instruction lays otherwise, in convert_layouts), in the lanes of a T.Parallel that of one number;
- an element of a larger fragment in the condition of a while, which is computed anew in every round: to bring
  it to all threads is a statement, and there is no place for one;
- a variable or T.alloc_local tile that is written in a narrower scope: every thread has a copy, and they
  would no longer agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from tilescale.compiler.ir.nests import is_nest
from tilescale.compiler.ir.operations import effects_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.scales import SCALES, WIDTHS
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.layout.infer import REPLICATED
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx
from tilescale.errors import Loc, TileSyntaxError, TileValueError


@dataclass(frozen=True)
class Scope:
    """The block, or a ``T.Scale`` below it: ``number`` tells two of the same name apart, ``around`` is what
    it stands in."""

    name: str
    threads: int
    number: int = 0
    around: Scope | None = None
    loc: Loc | None = None

    def is_inside(self, other: Scope) -> bool:
        """Whether this is the other one, or stands in it."""
        return self == other or self.around is not None and self.around.is_inside(other)

    @property
    def shown(self) -> str:
        return "the block" if self.around is None else f'T.Scale("{self.name}")'


@dataclass(frozen=True)
class Use:
    """One use of a tile: as an operation's (``whole``), else a single element."""

    buffer: Any
    writes: bool
    whole: bool
    loc: Loc | None


def tile_owners(program: TileProgram) -> TileProgram:
    """The program as it is.

    Raises:
        TileValueError: a tile used where it does not belong, at the statement.
    """
    _Owners(program.launch.threads).stmt(program.func.body)
    return program


class _Owners:
    """One walk through a program, in the order of its text."""

    def __init__(self, threads: int):
        self.scope = Scope("block", threads)
        self.owner: dict[Any, Scope] = {}
        self.bound: dict[Any, Scope] = {}  # names, by the T.Scale that they are bound in
        self.scopes = 0
        self.lanes = False

    def stmt(self, s: Any) -> None:
        if isinstance(s, tirx.SeqStmt):
            for inner in s.seq:
                self.stmt(inner)
        elif isinstance(s, tirx.AttrStmt):
            self._attribute(s)
        elif isinstance(s, tirx.AllocBuffer):
            self.owner[s.buffer] = self.scope
        elif isinstance(s, tirx.DeclBuffer):
            held = s.data.args[0]
            self._check(Use(held, False, False, loc_of(s.span)))
            if held in self.owner:
                self.owner[s.buffer] = self.owner[held]
        elif isinstance(s, tirx.IfThenElse):
            self._uses(s, s.condition)
            self.stmt(s.then_case)
            if s.else_case is not None:
                self.stmt(s.else_case)
        elif isinstance(s, (tirx.For, tirx.While)):
            self._uses(s, s.extent if isinstance(s, tirx.For) else s.condition)
            if isinstance(s, tirx.While):
                self._condition(s)
            outer, self.lanes = self.lanes, self.lanes or is_nest(s)
            self.stmt(s.body)
            self.lanes = outer
        else:
            self._uses(s, s)
            if isinstance(s, tirx.Bind) and self.scope.around is not None:
                self.bound[s.var] = self.scope

    def _condition(self, s: Any) -> None:
        found: list[Any] = []
        structural_walk(s.condition, (ir.TensorLoad, lambda e: found.append(e.source)))
        for buffer in found:
            if (
                buffer.ty.storage_scope == "local.fragment"
                and prod(int(e) for e in buffer.ty.shape) > REPLICATED
            ):
                raise in_condition(buffer.name, loc_of(s.span))

    def _attribute(self, s: Any) -> None:
        name = SCALES[int(s.value.value)] if s.attr_key == "ts.scale" else ""
        if name not in WIDTHS:
            self.stmt(s.body)
            return
        self.scopes += 1
        outer = self.scope
        self.scope = Scope(name, WIDTHS[name], self.scopes, outer, loc_of(s.span))
        self.stmt(s.body)
        self.scope = outer

    def _uses(self, s: Any, part: Any) -> None:
        """Looks at what a statement, or a part of one, uses. Raised behind the walk: an error of a callback
        would come out as TVM's."""
        found: list[Use] = []
        here = loc_of(getattr(s, "span", None))

        def call(c: Any) -> None:
            for a in effects_of(c):
                found.append(Use(a.region.source, a.mode != "read", True, loc_of(c.span) or here))

        def load(e: Any) -> None:
            found.append(Use(e.source, False, False, loc_of(getattr(e, "span", None)) or here))

        structural_walk(part, (ir.Call, call))
        structural_walk(part, (ir.TensorLoad, load))
        structural_walk(
            part,
            (tirx.BufferStore, lambda x: found.append(Use(x.buffer, True, False, loc_of(x.span) or here))),
        )
        names: list[Any] = []
        if any(not self.scope.is_inside(scope) for scope in self.bound.values()):
            structural_walk(part, (ir.Var, lambda v: names.append(v) if v in self.bound else None))
        for var in names:
            if not self.scope.is_inside(self.bound[var]):
                raise _unnamed(var, self.bound[var], here)
        for use in sorted(found, key=lambda u: not u.writes):
            self._check(use)

    def _check(self, use: Use) -> None:
        owner = self.owner.get(use.buffer)
        if owner is None:  # a parameter
            return
        if not self.scope.is_inside(owner):
            raise _escapes(use, owner)
        if self.scope.threads == owner.threads:
            return
        kind = use.buffer.ty.storage_scope
        few = 1 if self.lanes else REPLICATED
        if kind == "local.fragment" and (
            use.writes or use.whole or prod(int(e) for e in use.buffer.ty.shape) > few
        ):
            raise spread(use.buffer.name, owner.threads, self.scope.name, self.scope.threads, use.loc)
        if kind in ("local", "local.var") and use.writes:
            raise _disagree(use, owner, self.scope)


def spread(name: str, held: int, scale: str, threads: int, loc: Loc | None) -> TileValueError:
    """The refusal of a fragment in a narrower scope than its own."""
    return TileValueError(
        f"{name} is spread over {held} threads and touched by a {scale} of {threads}",
        loc=loc,
        expected=f"a fragment that is allocated in the {scale}'s own scope, or a tile in shared memory, "
        "which all threads of the block see",
        hint=f"allocate {name} inside the T.Scale, or in shared memory (T.copy takes it there in front of "
        "the T.Scale)",
    )


def in_condition(name: str, loc: Loc | None) -> TileSyntaxError:
    """The refusal of a fragment's element in the condition of a while."""
    return TileSyntaxError(
        f"the condition of this while reads {name}, which is spread over threads", loc=loc,
        hint=f"a T.alloc_var that is set to {name}[…] at the end of the body",
    )  # fmt: skip


def _escapes(use: Use, owner: Scope) -> TileValueError:
    name, where = use.buffer.name, "" if owner.loc is None else f" (line {owner.loc.line})"
    return TileValueError(
        f"{name} is allocated inside {owner.shown}{where}, once for each {owner.name}, and used outside of "
        "it",
        loc=use.loc,
        expected=f"every use inside that {owner.shown}",
        hint=f"a T.alloc_shared tile of the block's, in front of the T.Scale, into which each {owner.name} "
        "copies its part",
    )


def _unnamed(var: Any, owner: Scope, loc: Loc | None) -> TileValueError:
    where = "" if owner.loc is None else f" (line {owner.loc.line})"
    return TileValueError(
        f"{var.name} is another value for each {owner.name} of {owner.shown}{where}, and used outside of it",
        loc=loc,
        expected=f"every use inside that {owner.shown}",
        hint="move the statement into it, or leave the value in shared memory there",
    )


def _disagree(use: Use, owner: Scope, scope: Scope) -> TileValueError:
    name = use.buffer.name
    each = (
        "each thread of the block has a copy"
        if owner.around is None
        else f"each thread of the {owner.name} has a copy"
    )
    return TileValueError(
        f"{name} belongs to {owner.shown} and is set in {scope.shown}: {each}, and {scope.name}s that set "
        "theirs would disagree on it",
        loc=use.loc,
        expected=f"a variable of the {scope.name}'s own, or shared memory for what others shall see",
        hint=f"allocate {name} inside the T.Scale, or as T.alloc_shared((1,)), with T.sync_threads() behind "
        f"what one {scope.name} writes",
    )
