"""Collects statements while a kernel is run once: a stack of open bodies, each statement placed in the user's
source."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import lcm
from typing import Any

from tilescale.compiler.ir import source
from tilescale.compiler.ir.program import Launch
from tilescale.compiler.ir.scales import EXECUTORS, REACHES
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.tvm_compat import guard_equality, ir
from tilescale.errors import InternalError, Loc, TileSyntaxError, TileValueError, utf8

#: More statements than this is a Python loop that was meant to be a device loop.
STATEMENT_LIMIT = 200_000


#: symbol → what each call's value is a multiple of, as whoever traces knows
_promised: contextvars.ContextVar[Mapping[str, int]] = contextvars.ContextVar(
    "promised", default=types.MappingProxyType({})
)


@contextlib.contextmanager
def promising(multiples: Mapping[str, int]) -> Iterator[None]:
    """Kernels that are traced meanwhile have these promises beside their own (tilescale/whole_rows.py)."""
    before = _promised.set(multiples)
    try:
        yield
    finally:
        _promised.reset(before)


@dataclass(eq=False)
class Frame:
    """An open construct. ``device``: its body runs zero or many times on the device, though it is traced
    once."""

    kind: str
    device: bool
    loc: Loc | None
    detail: str = ""
    #: of a Python `while`: the loop that is under way
    state: Any = None
    #: of a T.Parallel: its variables and their ranges; how many bodies are around it; what is done behind it
    #: (ops/reducer.py). Of other loops of the language their variables.
    nest: Any = None
    outside: int = 0
    counts: list[Any] = field(default_factory=list)
    after: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Entry:
    """What is open where a function begins: device constructs, frames of all kinds. ``kernel``: the function
    is the kernel's own."""

    depth: int
    frames: int
    kernel: bool


class Builder:
    """The trace of one kernel."""

    def __init__(self, name: str):
        self.name = name
        self.bodies: list[list[Any]] = [[]]
        self.frames: list[Frame] = []
        self.launch: Launch | None = None
        self.launched = False  # its body has been closed
        #: the launches in front of this one, each with its statements
        self.earlier: list[tuple[Launch, list[Any]]] = []
        #: memory that a call allocates for its launches (T.alloc_global): parameters, by name
        self.workspaces: dict[str, Any] = {}
        #: the buffer of a tensor, by its name, what is declared of it, and where (frontend/trace.py)
        self.make_tensor: Any = None
        self.entered = False  # the kernel's own function has been
        self.scales: list[str] = []
        #: the open reducers of T.attr (ops/allreduce.py)
        self.reducers: list[Any] = []
        #: plain fragments into which iterations of a T.Parallel fold, and where (ops/reducer.py)
        self.folded: dict[Any, Any] = {}
        #: what T.rng_rand draws from (ops/random.py)
        self.random: Any = None
        #: what the kernel is asked for (language.funcs.SWITCHES)
        self.switches: frozenset[str] = frozenset()
        #: how many T.ws are open (frontend/groups.py)
        self.by_hand = 0
        #: the open teams (compiler/ops/team.py), the innermost last
        self.teams: list[Any] = []
        self.buffers: dict[Any, Any] = {}
        self.symbols: dict[str, Any] = {}
        #: symbols that follow from extents (frontend/solved.py)
        self.solved: dict[str, Any] = {}
        #: T.const names that were used before anything had said what they are
        self.unknown: list[Any] = []
        #: symbol → what each call's value is promised to be a multiple of
        self.multiples: dict[str, int] = dict(_promised.get())
        self.origins: dict[Any, Any] = {}
        self.definitions: dict[Any, Any] = {}
        #: names that say which executor it is (T.Scale); of a loop's variable, what it counts from and by
        self.executors: set[Any] = set()
        self.counted: dict[Any, Any] = {}
        self.unnamed: set[Any] = set()
        self.renames: dict[Any, str] = {}
        #: what an eager kernel's trace knows of its arguments (frontend/trace.py); None in a @T.prim_func
        self.eager: Any = None
        self.returned: Any = None
        self.count = 0
        self.fixed_span: Any = None
        self._sources: dict[str, Any] = {}
        self.names: dict[str, int] = {}

    def promise(self, name: str, multiple: int) -> None:
        """A symbol's value is a multiple of a number, in every call."""
        if multiple > 1:
            self.multiples[name] = lcm(self.multiples.get(name, 1), multiple)

    def next_launch(self) -> None:
        """A second ``with T.Kernel(…)`` begins: names in front of the first one hold for it, too."""
        assert self.launch is not None
        body = self.bodies[0]
        self.earlier.append((self.launch, body))
        self.bodies[0] = body[:-1]  # without the launch itself, which is the last statement
        self.launch, self.launched = None, False

    # -- places
    # ---------------------------------------------------------------------------------------------------
    def span(self, loc: Loc | None = None) -> Any:
        """The TVM span of ``loc``, or of the user's current place."""
        if self.fixed_span is not None:
            return self.fixed_span
        loc = loc or source.current()
        if loc is None:
            return None
        name = self._sources.get(loc.file)
        if name is None:
            name = self._sources[loc.file] = ir.SourceName(utf8(loc.file))
        end_col = loc.end_col if loc.end_col is not None else -1
        return ir.Span(
            name,
            loc.line,
            loc.end_line or loc.line,
            (loc.col if loc.col is not None else -1) + 1,
            end_col + 1,
        )

    # -- statements
    # -----------------------------------------------------------------------------------------------
    def emit(self, stmt: Any) -> None:
        self.count += 1
        if self.count > STATEMENT_LIMIT:
            raise TileValueError(
                f"the kernel has more than {STATEMENT_LIMIT} statements",
                loc=source.current(),
                hint="a Python loop is unrolled as it is traced: use T.serial for a loop that runs on the "
                "device",
            )
        if self.launched and len(self.bodies) == 1:
            raise TileSyntaxError(
                "a statement stands behind the kernel's launch",
                loc=source.current(),
                hint="move it into the `with T.Kernel(…)`",
            )
        self.bodies[-1].append(stmt)

    @contextlib.contextmanager
    def body(self) -> Iterator[list[Any]]:
        """Collects the statements emitted inside into a list of its own."""
        opened: list[Any] = []
        self.bodies.append(opened)
        yield opened
        # Not in a finally: a refusal inside ends the trace, and is what people should see.
        if self.bodies.pop() is not opened:
            raise InternalError("bodies were closed out of order")

    def open_body(self) -> None:
        self.bodies.append([])

    def close_body(self) -> Any:
        return sequence(self.bodies.pop())

    # -- frames
    # ---------------------------------------------------------------------------------------------------
    def push(self, kind: str, *, device: bool, detail: str = "") -> Frame:
        frame = Frame(kind, device, source.current(), detail)
        self.frames.append(frame)
        return frame

    def pop(self, frame: Frame) -> None:
        if not self.frames or self.frames[-1] is not frame:
            raise TileSyntaxError(
                "control left a device construct in the middle",
                loc=source.current(),
                hint="break, continue and return may not depend on device values here",
            )
        self.frames.pop()

    def device_depth(self) -> int:
        return sum(f.device for f in self.frames)

    def enter(self) -> Entry:
        """What is open where a function begins; the first one is the kernel's own."""
        first, self.entered = not self.entered, True
        return Entry(self.device_depth(), len(self.frames), first)

    # -- names
    # ----------------------------------------------------------------------------------------------------
    def unique(self, name: str) -> str:
        """``name``, or ``name_1`` … where it is taken: the dumps and the printed code keep the user's
        names."""
        n = self.names.get(name, -1) + 1
        self.names[name] = n
        return name if n == 0 else f"{name}_{n}"

    def give_name(self, buffer: Any, name: str) -> Any:
        """Gives an allocation its name, or one made of it; the buffer."""
        self.unnamed.discard(buffer.var)
        buffer.name = self.renames[buffer.var] = self.unique(name)
        return buffer

    @property
    def executor(self) -> str:
        """The innermost scale up to the block: who runs a statement."""
        return next((s for s in reversed(self.scales) if s in EXECUTORS), "block")

    @property
    def reach(self) -> str:
        """The innermost scale from the cluster outward: with whom a statement talks; the block where none is
        open."""
        return next((s for s in reversed(self.scales) if s in REACHES), "block")

    @property
    def team(self) -> Any:
        """The innermost open team; None where ranks are the launch's."""
        return self.teams[-1] if self.teams else None


_local = threading.local()


def asks_for(switch: str) -> bool:
    """Whether the trace that is under way, if one is, is of a kernel that is asked for this
    (`language.funcs.SWITCHES`)."""
    stack: list[Builder] | None = getattr(_local, "stack", None)
    return bool(stack and switch in stack[-1].switches)


def current() -> Builder:
    """The trace that is under way.

    Raises:
        TileSyntaxError: none is: an operation of the language was called outside a kernel.
    """
    stack = getattr(_local, "stack", None)
    if not stack:
        raise TileSyntaxError(
            "an operation of the tile language was called outside a kernel",
            loc=source.current(),
            hint="call it in the body of a @T.prim_func or an eager @tilescale.jit function",
        )
    top: Builder = stack[-1]
    return top


def _refuse_truth(frame: types.FrameType) -> None:
    if active() and not source.is_ours(frame.f_code.co_filename):
        raise TileSyntaxError(
            "the truth of a device value is not known while the kernel is traced",
            loc=source.loc_of_frame(frame),
            hint="decorate the helper with @T.macro, so that its if, while, and, or, not become device code",
        )


guard_equality(_refuse_truth)


def active() -> bool:
    """Whether a kernel is being traced in this thread."""
    return bool(getattr(_local, "stack", None))


@contextlib.contextmanager
def tracing(builder: Builder) -> Iterator[Builder]:
    stack = getattr(_local, "stack", None)
    if stack is None:
        stack = _local.stack = []
    stack.append(builder)
    try:
        yield builder
    finally:
        stack.pop()
