"""The constructs of a kernel while they are traced: an `if`, a `for`, a `while`, and the loops that the
language has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tilescale.compiler.builder import halves
from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.integers import fits
from tilescale.compiler.builder.joined import joined
from tilescale.compiler.builder.values import Scalar, as_expr, binary, to_expr
from tilescale.compiler.ir import source
from tilescale.compiler.ir.multiples import spelt_out
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ir.walks import mentions
from tilescale.compiler.tvm_compat import ir, is_expr, structural_walk, tirx
from tilescale.errors import TileSyntaxError
from tilescale.language.symbolic import SymExpr, settle

UNBOUND = object()
UNBOUND_ERRORS = (NameError, UnboundLocalError)


def peek(thunk: Callable[[], Any]) -> Any:
    """The present value of a name, or ``UNBOUND``."""
    try:
        return thunk()
    except UNBOUND_ERRORS:
        return UNBOUND


def is_device(value: Any) -> bool:
    """Whether a value is only known when the kernel runs."""
    if isinstance(value, SymExpr):
        return not isinstance(settle(value), int)
    return is_expr(value) or isinstance(value, Scalar) or hasattr(value, "asobject")


class State:
    """An ``if``, ``for`` or ``while`` under way. ``device`` decides whether names rebound in it are
    poisoned."""

    def __init__(self, what: str, snapshot: dict[str, Callable[[], Any]], device: bool):
        self.what, self.device = what, device
        self.before = {name: peek(thunk) for name, thunk in snapshot.items()} if device else {}
        self.inside = False
        self.loc = source.current()


class If(State):
    def __init__(self, test: Any, snapshot: dict[str, Callable[[], Any]]):
        device = is_device(test)
        super().__init__("if", snapshot, device)
        self.test = to_expr(test) if device else bool(test)
        self.frame: bld.Frame | None = None
        self.then_body: Any = None
        self.else_body: Any = None


class Loop(State):
    """A ``for``: iterating it runs the body, once for a device loop."""

    def __init__(self, iterable: Any, targets: tuple[str, ...], snapshot: dict[str, Callable[[], Any]]):
        self.nest = isinstance(iterable, LoopNest)
        super().__init__("for", snapshot, self.nest)
        self.iterable, self.targets = iterable, targets

    def __iter__(self) -> Iterator[Any]:
        b = bld.current()
        if not self.nest:
            frame = b.push("pyfor", device=False)
            try:
                yield from self.iterable
            finally:  # break and return close this generator
                if b.frames and b.frames[-1] is frame:
                    b.pop(frame)
            return
        self.inside = True
        yield from self.iterable.trace(self.targets)
        self.inside = False


class While(State):
    """A ``while``: Python's own as long as its condition is Python's, round by round. One of ``while True``
    is the device's if a device condition leaves it: the round in which that is seen is thrown away, and its
    body traced again as a loop's."""

    def __init__(self, snapshot: dict[str, Callable[[], Any]], forever: bool):
        super().__init__("while", snapshot, True)
        self.device = False  # decided when the condition, or an exit of the body, is seen
        self.snapshot, self.forever = snapshot, forever
        self.jumps = False  # a device condition leaves the round that is under way
        self.frame: Any = None
        self.test: Any = None

    def begin(self, test: Any) -> bool:
        """The body is a device loop's from here on."""
        b = bld.current()
        self.device, self.test = True, test
        self.frame = b.push("while", device=True)
        self.inside = True
        b.open_body()
        return True

    def begin_round(self) -> None:
        """A round of Python's; what it emits is kept apart until it is known to be one."""
        b = bld.current()
        self.before = {name: peek(thunk) for name, thunk in self.snapshot.items()}
        self.names = dict(b.names)
        self.frame = b.push("forever" if self.forever else "pywhile", device=False)
        self.frame.state, self.body = self, len(b.bodies)
        b.open_body()

    def round_ends(self) -> bool:
        """Ends a round of Python's, if one is open; whether it was none, and has to be traced again."""
        if self.frame is None:
            return False
        b = bld.current()
        if not self.jumps:
            self.leave()
            return False
        b.pop(self.frame)
        b.bodies.pop()
        b.names.clear()
        b.names.update(self.names)
        return True

    def leave(self) -> None:
        """Keeps what a round of Python's has emitted, also where `return` leaves it from inside other
        constructs."""
        b = bld.current()
        b.frames.remove(self.frame)
        b.bodies[self.body - 1].extend(b.bodies[self.body])
        del b.bodies[self.body]
        self.frame = None


class LoopNest:
    """What ``T.serial`` and its kin return. ``kind``: serial, parallel, pipelined, persistent, unroll,
    vectorized."""

    def __init__(
        self,
        kind: str,
        ranges: list[tuple[Any, Any, Any]],
        annotations: dict[str, Any] | None = None,
        wrap: Any = None,
    ):
        self.kind, self.ranges, self.annotations, self.wrap = kind, ranges, annotations or {}, wrap
        self.loc = source.current()

    def __iter__(self) -> Iterator[Any]:
        raise TileSyntaxError(
            f"{self.word} is used outside a `for` of a kernel",
            loc=source.current(),
            hint=f"for i in {self.word}(…): in a kernel, or in a helper under @T.macro",
        )

    @property
    def word(self) -> str:
        """As the author writes it."""
        titled = self.kind in ("parallel", "pipelined", "persistent")
        return f"T.{self.kind.capitalize() if titled else self.kind}"

    def trace(self, targets: tuple[str, ...]) -> Iterator[Any]:
        b = bld.current()
        names = (
            list(targets) if len(targets) == len(self.ranges) else [f"i{k}" for k in range(len(self.ranges))]
        )
        variables = []
        for name, (low, high, _) in zip(names, self.ranges, strict=True):
            wide = any(str(x.ty) == "int64" if is_expr(x) else not fits(x, "int32") for x in (low, high))
            variables.append(tirx.Var(b.unique(name), "int64" if wide else "int32"))
        for v, (low, _, step) in zip(variables, self.ranges, strict=True):
            if constant(low) != 0 or constant(step) != 1:
                b.counted[v] = tirx.Var(f"{v.name}_n", v.ty) * as_expr(step, str(v.ty)) + as_expr(
                    low, str(v.ty)
                )
        span = b.span(self.loc)
        frame = b.push(self.kind, device=True)
        frame.nest = (variables, self.ranges) if self.kind == "parallel" else None
        frame.outside, frame.counts = len(b.bodies), variables
        with b.body() as body:
            value = (
                self.wrap(variables)
                if self.wrap
                else tuple(variables)
                if len(variables) > 1
                else variables[0]
            )
            self._check_names(targets, len(value) if isinstance(value, tuple) else 1)
            yield value
        b.pop(frame)
        kind, variables, ranges, inner = self._by_bytes(variables, sequence(body))
        if kind == "vectorized" and _adds_up(variables[0], inner):
            kind = "serial"  # as TileLang does
        made = self._stmt(kind, variables, ranges, inner, span)
        b.emit(joined(made) if made.kind == tirx.ForKind.PARALLEL else made)
        for act in frame.after:
            act()

    def _check_names(self, targets: tuple[str, ...], count: int) -> None:
        """One name takes all indices; more are one each.

        Raises:
            TileSyntaxError: more or fewer names than indices.
        """
        if len(targets) > 1 and len(targets) != count:
            names = [*targets, *(f"i{k}" for k in range(len(targets), count))][:count]
            what = self.word
            indices = "1 index" if count == 1 else f"{count} indices"
            raise TileSyntaxError(
                f"{what} has {indices}, and {len(targets)} names take {'it' if count == 1 else 'them'}: "
                f"{', '.join(targets)}",
                loc=self.loc,
                expected="a name for each extent",
                hint=f"for {', '.join(names)} in {what}(…):",
            )

    def _by_bytes(self, variables: list[Any], body: Any) -> tuple[str, list[Any], list[Any], Any]:
        """The loop's kind, variables, ranges and body, those of a complete nest with stores of bytes for
        those of 4-bit numbers. A loop inside of a nest that has such stores goes in order: its iterations may
        share bytes, and one thread, or lane, runs all of them."""
        kind, ranges = self.kind, self.ranges
        if kind not in halves.NESTS or not halves.within(body):
            return kind, variables, ranges, body
        if any(f.kind in halves.NESTS for f in bld.current().frames):
            return "serial", variables, ranges, body
        return kind, *halves.of_nest(variables, ranges, body, self.word, "ts.layout" in self.annotations)

    def _stmt(
        self, kind: str, variables: list[Any], ranges: list[tuple[Any, Any, Any]], body: Any, span: Any
    ) -> Any:
        kinds = {
            "parallel": tirx.ForKind.PARALLEL,
            "unroll": tirx.ForKind.UNROLLED,
            "vectorized": tirx.ForKind.VECTORIZED,
        }
        how = kinds.get(kind, tirx.ForKind.SERIAL)
        for depth in reversed(range(len(variables))):
            low, high, step = ranges[depth]
            v = variables[depth]
            zero = tirx.const(0, str(v.ty))
            if isinstance(step, int) and step == 1 and isinstance(low, int) and low == 0:
                start, extent, inner = zero, high, body
            else:  # loops count from zero in steps of one, so that every pass sees one form
                counter = tirx.Var(v.name + "_n", v.ty)
                inner = sequence([tirx.Bind(v, counter * step + low, span), body])
                extent = binary("//", binary("+", binary("-", high, low), binary("-", step, 1)), step)
                start, v = zero, counter
            notes = {"ts.kind": kind, **(self.annotations if kind == self.kind else {})} if depth == 0 else {}
            if kind == "parallel":
                notes["ts.depth"] = len(variables) - depth
            body = tirx.For(v, start, as_expr(extent, str(v.ty)), how, inner, annotations=notes, span=span)
        return body


def _adds_up(v: Any, body: Any) -> bool:
    """Whether rounds of a loop go on from what the one before left in one element: ``acc[0] += A[k]``."""
    stores: list[Any] = []
    made: dict[Any, Any] = {}
    structural_walk(body, (tirx.Bind, lambda s: made.update({s.var: s.value})))
    structural_walk(body, (tirx.BufferStore, stores.append))

    def reads(s: Any) -> bool:
        found: list[Any] = []
        structural_walk(spelt_out(s.value, made), (ir.TensorLoad, lambda e: found.append(e.source)))
        return any(x.same_as(s.buffer) for x in found)

    return any(not any(mentions(spelt_out(i, made), v) for i in s.indices) and reads(s) for s in stores)
