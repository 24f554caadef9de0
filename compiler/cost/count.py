"""The work of a launch, counted from tile IR alone: products, operations of lanes, bytes of each tensor,
rounds of pipelined loops.

Counts are means over sample points: a point is a block and, inside loops, a value of each loop's variable,
drawn evenly (multiples of irrational numbers, so that the same program always gives the same counts). What
depends on neither is exact; triangular loops are within a few percent. What memory decides (ragged lengths,
polling) is counted once and said in ``notes``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from tilescale.compiler.ir.operations import effects_of, find
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.scales import SCALES, WIDTHS
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.tvm_compat import IF_THEN_ELSE, ir, tirx
from tilescale.errors import TileValueError
from tilescale.language.dtypes import canonical

POINTS = 512
#: bytes of a line of the cache
LINE = 128
_STEPS = [(root**0.5) % 1.0 for root in (5, 2, 3, 7, 11, 13, 17, 19)]
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Min": np.minimum,
    "Max": np.maximum,
    "BitwiseAnd": operator.and_,
    "LShift": operator.lshift,
    "RShift": operator.rshift,
}
_DIVIDING = {
    "FloorDiv": operator.floordiv,
    "FloorMod": operator.mod,
    "Div": operator.floordiv,
    "Mod": operator.mod,
}
#: functions that the special units compute; others are a few plain operations
_SPECIAL = ("exp", "log", "sqrt", "rsqrt", "tanh", "sin", "cos", "pow", "sigmoid", "erf", "rcp", "div")


@dataclass(frozen=True)
class Gemm:
    """A product of tiles: operands' dtype, and extents."""

    dtype: str
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k


@dataclass
class Work:
    """Amounts: products by shape, operations of float lanes, special functions, bytes read and written by
    tensor, bytes of other ranks."""

    matrix: dict[Gemm, Any] = field(default_factory=dict)
    element: Any = 0.0
    special: Any = 0.0
    read: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)
    remote: Any = 0.0

    def add(self, other: Work, times: Any) -> None:
        pairs: list[tuple[dict[Any, Any], dict[Any, Any]]] = [
            (self.matrix, other.matrix), (self.read, other.read), (self.written, other.written),
        ]  # fmt: skip
        for mine, theirs in pairs:
            for key, amount in theirs.items():
                mine[key] = mine.get(key, 0.0) + amount * times
        self.element = self.element + other.element * times
        self.special = self.special + other.special * times
        self.remote = self.remote + other.remote * times

    def each(self, of: Callable[[Any], float]) -> Work:
        """With every amount replaced."""
        amounts: list[dict[Any, Any]] = [self.matrix, self.read, self.written]
        held: list[dict[Any, Any]] = [{key: of(v) for key, v in d.items()} for d in amounts]
        return Work(held[0], of(self.element), of(self.special), held[1], held[2], of(self.remote))

    @property
    def matrix_flops(self) -> Any:
        return sum((g.flops * n for g, n in self.matrix.items()), 0.0)

    @property
    def moved(self) -> Any:
        """Bytes between blocks and this GPU's memory, whether a cache has them or not."""
        return sum(self.read.values(), 0.0) + sum(self.written.values(), 0.0)


@dataclass
class Loop:
    """A pipelined loop: how often a block enters it, rounds of one entry, its stages, and the work of one
    round."""

    entries: float
    rounds: float
    stages: int
    work: Work
    loc: Any = None


@dataclass
class Count:
    """A launch: the mean of its blocks' ``work`` (pipelined loops included), and what a block holds, rings
    with all their stages. ``longest``: the block with the most work, in means. ``tensors``: bytes of each
    parameter. ``shared_reads``: of the tiles of a tensor that neighbouring blocks read in one round, the
    share that is different: 1 where each reads its own. ``straddling``: the tensors whose rows begin within
    lines of the cache, which are no multiple of 128 bytes."""

    name: str
    grid: tuple[int, ...]
    threads: int
    work: Work
    loops: list[Loop]
    shared_bytes: int
    fragment_bytes: int
    longest: float
    tensors: dict[str, int]
    notes: list[str]
    shared_reads: dict[str, float] = field(default_factory=dict)
    straddling: frozenset[str] = frozenset()

    @property
    def blocks(self) -> int:
        return prod(self.grid)

    @property
    def total(self) -> Work:
        """Of all blocks."""
        return self.work.each(lambda v: v * self.blocks)

    @property
    def least_bytes(self) -> float:
        """What memory must move at least: each tensor's touched bytes once, in each direction."""
        total = self.total
        both = [(name, n) for amounts in (total.read, total.written) for name, n in amounts.items()]
        return float(sum(min(n, self.tensors[name]) for name, n in both))


class _Unknown(Exception):
    """An expression that memory decides."""


def count(program: TileProgram, extents: dict[str, int] | None = None, *, neighbours: int = 0) -> Count:
    """The work of one launch of a traced kernel.

    Args:
        extents: values of its T.dynamic extents and integer parameters, by name.
        neighbours: so many blocks run at once; with them `Count.shared_reads` is known.

    Raises:
        TileValueError: one of them is missing where the grid or a tensor's shape depends on it.
    """
    made = _Counting(program, extents or {}).run()
    if neighbours:
        made.shared_reads = _Counting(program, extents or {}, neighbours).distinct()
    return made


class _Counting:
    def __init__(self, program: TileProgram, extents: dict[str, int], neighbours: int = 0):
        self.program, self.notes = program, []  # type: ignore[var-annotated]
        self.env: dict[Any, Any] = {
            var: extents[name] for name, var in program.symbols.items() if name in extents
        }
        self.env |= {p.var: extents[p.name] for p in program.params if p.name in extents}
        self.names = {p.var: p.name for p in program.params}
        self.shapes: dict[Any, tuple[Any, ...]] = {}
        self.depth, self.executors, self.neighbours = 0, 1, neighbours
        self.origins: dict[str, float] = {}
        self.loops: list[tuple[Any, Any, int, Work, Any]] = []
        self.stages: dict[Any, int] = {}
        self.allocated: list[tuple[Any, int]] = []  # tiles, and how many executors of a block have one each

    def run(self) -> Count:
        launch = self.program.launch
        grid = tuple(self.required(e, "the grid") for e in launch.grid)
        blocks = max(1, prod(grid))
        if self.neighbours:
            number = self.launch_order(np.arange(min(self.neighbours, blocks)), grid)
        elif blocks <= POINTS:
            number = np.tile(np.arange(blocks), -(-POINTS // blocks))
        else:  # evenly, and in no step with the grid's extents
            number = (np.arange(POINTS) * _STEPS[-1] % 1.0 * blocks).astype(np.int64)
        self.points = np.arange(len(number))
        for var, extent in zip(launch.block_vars, grid, strict=True):
            self.env[var], number = number % max(extent, 1), number // max(extent, 1)
        tensors = {p.name: self.bytes_of(p) for p in self.program.params if hasattr(p.spec, "shape")}
        work = Work()
        self.stmt(self.program.func.body, 1.0, work)
        heavy = work.matrix_flops + work.element + work.moved
        mean = self.mean(heavy)
        loops = [
            Loop(self.mean(e), self.mean(r * e) / max(self.mean(e), 1e-9), s, w.each(self.mean), loc)
            for e, r, s, w, loc in self.loops
        ]
        held = {"shared": 0, "local": 0}
        for buffer, count in self.allocated:
            scope = buffer.ty.storage_scope.partition(".")[0]
            size = (
                prod(int(e) for e in buffer.ty.shape)
                * canonical(str(getattr(buffer.ty.dtype, "dtype", buffer.ty.dtype))).bytes
            )
            held[scope] = held.get(scope, 0) + size * self.stages.get(buffer, 1) * (
                count if scope == "shared" else 1
            )
        return Count(
            self.program.name,
            grid,
            launch.threads,
            work.each(self.mean),
            loops,
            held["shared"],
            held["local"],
            float(np.max(heavy)) / mean if mean else 1.0,
            tensors,
            list(dict.fromkeys(self.notes)),
            straddling=self.straddling(),
        )

    def straddling(self) -> frozenset[str]:
        """See `Count.straddling`."""
        rows = {v: s[-1] * _bytes(v) for v, s in self.shapes.items() if len(s) > 1}
        return frozenset(v.name for v, bytes_ in rows.items() if bytes_ % LINE)

    def launch_order(self, number: Any, grid: tuple[int, ...]) -> Any:
        """Where in the grid the first blocks lie: row by row, or in the panels of T.use_swizzle (as
        `cuda.lower` orders them)."""
        panel, order = self.program.hints.get("swizzle", (0, "row"))
        if panel < 2 or len(grid) < 2 or prod(grid[2:]) != 1:
            return number
        wide, high = (grid[0], grid[1]) if order == "row" else (grid[1], grid[0])
        first = number // (wide * panel) * panel
        rows, within = np.minimum(high - first, panel), number - first * wide
        down, across = first + within % rows, within // rows
        return across + grid[0] * down if order == "row" else down + grid[0] * across

    def distinct(self) -> dict[str, float]:
        """See `Count.shared_reads`: counted in the first round of each loop."""
        self.run()
        return self.origins

    @staticmethod
    def mean(amount: Any) -> float:
        return float(np.mean(amount))

    def required(self, value: Any, what: str) -> int:
        try:
            return int(value) if isinstance(value, int) else int(self.value(value))
        except _Unknown:
            names = ", ".join(self.program.symbols)
            raise TileValueError(
                f"{what} of {self.program.name} depends on {value}, and no value was given",
                loc=self.program.loc,
                hint=f"the values by name ({names})",
            ) from None

    def bytes_of(self, p: Any) -> int:
        shape = tuple(self.required(e, f"the shape of {p.name}") for e in p.var.ty.shape)
        self.shapes[p.var] = shape
        return prod(shape) * canonical(str(p.spec.dtype)).bytes

    # -- expressions
    # ----------------------------------------------------------------------------------------------
    def value(self, e: Any) -> Any:
        """An int, or an array over the points. Raises _Unknown."""
        kind = type(e).__name__
        if kind in ("IntImm", "FloatImm"):
            return e.value
        if kind == "Var":
            if e not in self.env:
                raise _Unknown
            return self.env[e]
        if kind in _BINARY:
            return _BINARY[kind](self.value(e.a), self.value(e.b))
        if kind in _DIVIDING:
            a, b = self.value(e.a), self.value(e.b)
            return _DIVIDING[kind](a, np.where(b == 0, 1, b) if isinstance(b, np.ndarray) else b or 1)
        if kind == "Cast":
            return self.value(e.value)
        if kind == "Not":
            return np.logical_not(self.value(e.a))
        if kind == "Call" and getattr(e.op, "name", "") == IF_THEN_ELSE:
            return np.where(self.value(e.args[0]), self.value(e.args[1]), self.value(e.args[2]))
        raise _Unknown

    def operations(self, e: Any, weight: Any, work: Work) -> None:
        """What computing a scalar costs: float operations, special functions, elements of tensors."""
        kind = type(e).__name__
        if kind == "TensorLoad":
            self.element(e.source, e.indices, weight, work.read)
            for index in e.indices:
                self.operations(index, weight, work)
            return
        floating = "float" in str(getattr(e, "ty", ""))
        if kind == "Call":
            name = getattr(e.op, "name", "")
            if name.startswith("ts.math.") or (floating and name != IF_THEN_ELSE):
                part = "special" if any(word in name for word in _SPECIAL) else "element"
                setattr(work, part, getattr(work, part) + weight)
            for arg in e.args:
                if ir.is_prim_expr(arg):
                    self.operations(arg, weight, work)
            return
        if kind in _BINARY or kind in _DIVIDING:
            if floating or "float" in str(e.a.ty):
                if kind == "Div":
                    work.special = work.special + weight
                else:
                    work.element = work.element + weight
            self.operations(e.a, weight, work)
            self.operations(e.b, weight, work)
        elif kind == "Cast":
            self.operations(e.value, weight, work)

    def element(self, buffer: Any, indices: Any, weight: Any, amounts: dict[str, Any]) -> None:
        """One access of an element: bytes where it is a tensor's."""
        if buffer not in self.shapes:
            return
        inside: Any = weight
        for index, extent in zip(indices, self.shapes[buffer], strict=True):
            try:
                at = self.value(index)
            except _Unknown:
                continue
            inside = inside * np.logical_and(at >= 0, at < extent)
        name = self.names[buffer]
        amounts[name] = amounts.get(name, 0.0) + inside * _bytes(buffer)

    def region(self, region: Any, weight: Any, amounts: dict[str, Any]) -> None:
        """The part of a tensor's region that lies inside it."""
        size: Any = weight * _bytes(region.source)
        for r, extent in zip(region.region, self.shapes[region.source], strict=True):
            wide = self.required(r.extent, "a tile")
            try:
                low = self.value(r.min)
            except _Unknown:
                size = size * min(wide, extent)
                continue
            size = size * np.maximum(np.minimum(low + wide, extent) - np.maximum(low, 0), 0)
        name = self.names[region.source]
        amounts[name] = amounts.get(name, 0.0) + size

    def note_origin(self, region: Any) -> None:
        key: Any = np.zeros(len(self.points), np.int64)
        for r in region.region:
            try:
                key = key * 1_000_003 + self.value(r.min)
            except _Unknown:
                key = key * 1_000_003 + self.points  # nobody's but its own
        share = len(np.unique(key)) / len(self.points)
        self.origins[self.names[region.source]] = max(share, self.origins.get(self.names[region.source], 0.0))

    # -- statements
    # -----------------------------------------------------------------------------------------------
    def stmt(self, s: Any, weight: Any, work: Work) -> None:
        method = getattr(self, "_s_" + type(s).__name__, None)
        if method is not None:
            method(s, weight, work)
        elif hasattr(s, "body"):
            self.stmt(s.body, weight, work)

    def _s_SeqStmt(self, s: Any, weight: Any, work: Work) -> None:
        for x in s.seq:
            self.stmt(x, weight, work)

    def _s_AllocBuffer(self, s: Any, weight: Any, work: Work) -> None:
        self.allocated.append((s.buffer, self.executors))

    def _s_Bind(self, s: Any, weight: Any, work: Work) -> None:
        self.operations(s.value, weight, work)
        call = s.value if isinstance(s.value, ir.Call) else None
        if call is not None and getattr(call.op, "name", "") in ("ts.scale_index", "ts.scale_count"):
            self.env[s.var] = 0 if call.op.name == "ts.scale_index" else self.executors
            return
        try:
            self.env[s.var] = self.value(s.value)
        except _Unknown:
            self.env.pop(s.var, None)

    def _s_AttrStmt(self, s: Any, weight: Any, work: Work) -> None:
        name = SCALES[int(s.value.value)] if s.attr_key == "ts.scale" else ""
        if name not in WIDTHS:
            return self.stmt(s.body, weight, work)
        was, self.executors = self.executors, max(1, self.program.launch.threads // WIDTHS[name])
        self.stmt(s.body, weight * (self.executors / was), work)
        self.executors = was

    def _s_For(self, s: Any, weight: Any, work: Work) -> None:
        try:
            rounds = np.maximum(self.value(s.extent), 0)
            rounds = int(rounds) if not isinstance(rounds, np.ndarray) or rounds.ndim == 0 else rounds
        except _Unknown:
            rounds = 1
            self.say(s, "a loop whose length memory decides is counted once")
        step = _STEPS[self.depth % len(_STEPS)]
        drawn = ((self.points * step) % 1.0 * rounds * (not self.neighbours)).astype(np.int64)
        try:
            self.env[s.loop_var] = drawn + self.value(s.min)
        except _Unknown:
            self.env.pop(s.loop_var, None)
        self.depth += 1
        kind = str((s.annotations or {}).get("ts.kind", ""))
        if kind == "pipelined":
            inner = Work()
            stages = max(1, int(s.annotations.get("ts.num_stages", 1) or 1))
            if self.executors == 1:  # below the block a loop has no ring
                self.ring(s.body, stages)
            self.stmt(s.body, 1.0, inner)
            # rounds of points where the loop is entered at all
            self.loops.append((weight, rounds, stages, inner, loc_of(s.span)))
            work.add(inner, weight * rounds)
        else:
            self.stmt(s.body, weight * rounds, work)
        self.depth -= 1

    def ring(self, body: Any, stages: int) -> None:
        """Tiles that a pipelined loop's copies fill have a place for each stage."""
        for x in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
            call: Any = x.value if isinstance(x, tirx.Evaluate) else None
            op = None if call is None else find(call)
            if (
                op is not None
                and op.moves
                and call.args[0].source in self.shapes
                and call.args[1].source not in self.shapes
            ):
                self.stages[call.args[1].source] = stages

    def _s_While(self, s: Any, weight: Any, work: Work) -> None:
        self.say(s, "a while loop is counted once")
        self.stmt(s.body, weight, work)

    def _s_IfThenElse(self, s: Any, weight: Any, work: Work) -> None:
        self.operations(s.condition, weight, work)
        try:
            share = np.asarray(self.value(s.condition), dtype=bool)
        except _Unknown:
            self.say(s, "a condition that memory decides is counted as true")
            share = np.asarray(True)
        self.stmt(s.then_case, weight * share, work)
        if s.else_case is not None:
            self.stmt(s.else_case, weight * ~share, work)

    def _s_BufferStore(self, s: Any, weight: Any, work: Work) -> None:
        self.operations(s.value, weight, work)
        self.element(s.buffer, s.indices, weight, work.written)

    def _s_Evaluate(self, s: Any, weight: Any, work: Work) -> None:
        op = find(s.value)
        if op is None:
            if ir.is_prim_expr(s.value):
                self.operations(s.value, weight, work)
            return
        call = s.value
        for access in effects_of(call):
            region = access.region
            if not isinstance(region, ir.TensorRegion) or region.source not in self.shapes:
                continue
            if access.owner is not None:
                away: dict[str, Any] = {}
                self.region(region, weight, away)
                work.remote = work.remote + sum(away.values())
            else:
                if self.neighbours and access.mode == "read":
                    self.note_origin(region)
                for amounts in {"read": (work.read,), "write": (work.written,)}.get(
                    access.mode, (work.read, work.written)
                ):
                    self.region(region, weight, amounts)
        if op.multiplies:  # of a sparse operand what it keeps
            a, c = call.args[0], call.args[2]
            rows, columns = (int(r.extent) for r in c.region[-2:])
            shape = Gemm(str(a.source.ty.dtype), rows, columns, prod(int(r.extent) for r in a.region) // rows)
            work.matrix[shape] = work.matrix.get(shape, 0.0) + weight
        elif lanes := op.work(call):
            work.element = work.element + weight * lanes

    def say(self, node: Any, text: str) -> None:
        loc = loc_of(node.span)
        self.notes.append(f"{loc}: {text}" if loc else text)


def _bytes(buffer: Any) -> int:
    return canonical(str(getattr(buffer.ty.dtype, "dtype", buffer.ty.dtype))).bytes
