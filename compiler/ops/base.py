"""What every operation is made of: a registered call in the IR, an effect table, lowerings by target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tilescale.compiler.frontend import builder as bld
from tilescale.compiler.frontend import source
from tilescale.compiler.frontend.values import Buffer, Poison, Region, Variable, constant, difference
from tilescale.compiler.tvm_compat import ir, register_op, tirx
from tilescale.errors import InternalError, TileSyntaxError, TileTypeError, TileValueError

VOID = ir.PrimType("void")


@dataclass(frozen=True)
class Access:
    """One line of an operation's effect table.

    region: what is touched (a TensorRegion). mode: "read", "write" or "update" (atomic read-modify-write).
    owner: None where the executor's own memory is touched, else the rank or block index that owns it.
    asynchronous: issued here, complete only at a later wait. when: None, or an expression: it happens only where that holds.
    half: of an "update" that does one half alone, "load" or "store". proxy: "async" where not the threads themselves but an engine beside
    them touches it (PTX ISA, "Async proxy"), so that a proxy fence must stand between their writes and this.
    """

    region: Any
    mode: str
    owner: Any = None
    asynchronous: bool = False
    when: Any = None
    half: str = ""
    proxy: str = ""


class TileOp:
    """An operation. Subclasses give ``name``, ``effects``, one ``lower_<target>`` a target and ``simulate``, its meaning; instances
    have no state. On GPUs an operation that is a loop over elements gives ``nest`` instead of a lowering."""

    name: ClassVar[str]
    #: what ``simulate`` gives is a generator, which stops where it has to wait for others
    waits: ClassVar[bool] = False
    #: it touches nothing itself: its effects say what engines are done with behind it
    completes: ClassVar[bool] = False
    #: what ``simulate`` gives also works in the lanes of a T.Parallel nest, where the regions are single elements
    in_lanes: ClassVar[bool] = False
    #: what ``layouts`` gives is asked for by an instruction, and follows from no other layout
    demands: ClassVar[bool] = False

    def meets(self, call: Any) -> str:
        """At which scale, from the cluster outward, all blocks come to this call before one goes on; "" where they need not."""
        return ""

    def stops(self, call: Any) -> bool:
        """Whether what ``simulate`` gives for this call is a generator: it waits, or others may go on between its parts."""
        return self.waits

    def effects(self, call: Any) -> list[Access]:
        """What the call reads and writes."""
        raise NotImplementedError

    def lower_cpu(self, call: Any, cx: Any) -> Any:
        """The call as thread IR for the CPU; ``cx`` is a :class:`tilescale.compiler.cpu.lower.Lowering`."""
        raise NotImplementedError

    def nest(self, call: Any) -> Any:
        """The call as independent iterations over elements (a :class:`tilescale.compiler.ir.nests.Nest`); None where it is no such loop."""
        return None

    def stage(self, call: Any, cx: Any) -> list[Any] | None:
        """On GPUs: the call as statements whose operands lie where the operation can reach them; None where they do. ``cx`` is a
        :class:`tilescale.compiler.passes.gpu_stage.Staging`."""
        return None

    def layouts(self, call: Any, cx: Any) -> list[Any]:
        """On GPUs: ranked alternatives, each a list of :class:`tilescale.compiler.layout.infer.Demand`, given what ``cx.known`` has of
        the other operands; ``cx`` is a :class:`tilescale.compiler.layout.infer.Solver`."""
        return []

    def shared_layouts(self, call: Any) -> dict[Any, Any]:
        """On GPUs: tile → the Shared layout that the operation reads best."""
        return {}

    def insists(self, call: Any) -> bool:
        """On GPUs: whether it works on tiles in shared memory under the layouts of `shared_layouts` alone."""
        return False

    def exchange(self, call: Any, cx: Any) -> list[Any] | None:
        """On GPUs: the call as several, the parts between which threads meet; None where it is one. ``cx`` is a
        :class:`tilescale.compiler.passes.gpu_exchange.Exchange`, which knows all layouts."""
        return None

    def order(self, call: Any) -> tuple[bool, bool]:
        """On GPUs, of what one thread does for all of its executor: whether it tells others (what all threads did comes before it), and
        whether it hears of them (what all threads do comes behind it)."""
        return False, False

    def lower_cuda(self, call: Any, cx: Any) -> Any:
        """The call as thread IR for a GPU; ``cx`` is a :class:`tilescale.compiler.cuda.lower.Lowering`."""
        raise NotImplementedError

    def simulate(self, call: Any, cx: Any) -> Any:
        """The call as a function of the executor that performs it; ``cx`` is a :class:`tilescale.compiler.sim.prepare.Preparation`.
        What it reads and writes by the effect table is recorded by then. Of an asynchronous call that goes into no ring the function takes
        the engine that performs it as well (sim/flights.py)."""
        raise NotImplementedError


REGISTRY: dict[str, TileOp] = {}


def register(cls: type[TileOp]) -> type[TileOp]:
    """Class decorator: makes the operation known under ``ts.<name>``."""
    key = f"ts.{cls.name}"
    if key in REGISTRY:
        raise InternalError(f"operation {key} is registered twice")
    register_op(key)
    REGISTRY[key] = cls()
    return cls


def find(call: Any) -> TileOp | None:
    """The operation that a Call stands for; None for anything else."""
    return REGISTRY.get(call.op.name) if isinstance(call, ir.Call) and hasattr(call.op, "name") else None


#: what an iteration of T.Parallel may do beside computing elements
_OF_ITERATIONS = ("atomic", "assert", "print")


def of_iterations() -> str:
    """The innermost open loop whose iterations are of one element each: "T.Parallel", "T.vectorized", or "" where none is open."""
    names = {"parallel": "T.Parallel", "vectorized": "T.vectorized"}
    return next((names[frame.kind] for frame in reversed(bld.current().frames) if frame.kind in names), "")


def _refuse_tiles(name: str, args: list[Any], attrs: dict[str, Any]) -> None:
    """An iteration of T.Parallel belongs to one thread (of a GPU) or lane, a tile operation to all of an executor's.

    Raises:
        TileSyntaxError: a tile operation in T.Parallel or T.vectorized.
    """
    loop = of_iterations()
    single = all(constant(r.extent) == 1 for a in args if isinstance(a, ir.TensorRegion) for r in a.region)
    if not loop or (name in _OF_ITERATIONS and single):
        return
    spelled = {"reduce": f"reduce_{attrs.get('op')}", "cumsum": f"cum{attrs.get('op')}", "atomic": f"atomic_{attrs.get('kind')}"}
    raise TileSyntaxError(
        f"T.{spelled.get(name, name)} of a tile in {loop}, whose iterations are of elements: one thread runs each", loc=source.current(),
        expected="elements (D[i, j] = A[i, j], T.atomic_add of one), T.print and T.device_assert",
        hint="for i in T.serial(n), where each round has a tile of its own, or one operation on the whole tile outside the loop",
    )  # fmt: skip


def emit(name: str, args: list[Any], attrs: dict[str, Any] | None = None) -> None:
    """Adds ``ts.<name>(args)`` to the trace, with the scales it acts at.

    Raises:
        TileSyntaxError: a tile operation in T.Parallel or T.vectorized.
    """
    b = bld.current()
    _refuse_tiles(name, args, attrs or {})
    where = {"executor": b.executor, "reach": b.reach, **(attrs or {})}
    span = b.span()
    b.emit(tirx.Evaluate(ir.Call(f"ts.{name}", args, attrs=where, ret_ty=VOID, span=span), span))


def is_tile(value: Any) -> bool:
    """Whether a value names memory: a buffer, a region, or an element that stands for the base of one."""
    if isinstance(value, (Buffer, Region, Variable, ir.TensorLoad)):
        return True
    return isinstance(value, ir.Var) and value in bld.current().origins


def region(value: Any, what: str, like: tuple[Any, ...] | None = None) -> Region:
    """The part of memory that an operand names. An element ``A[i, j]`` is the base of a tile shaped ``like`` the other operand.

    Raises:
        TileTypeError: the operand is no memory.
    """
    b = bld.current()
    if isinstance(value, Poison):
        value.refuse()
    if isinstance(value, Region):
        return value
    if isinstance(value, Variable):
        return value.buffer.whole()
    if isinstance(value, Buffer):
        return value.whole()
    if isinstance(value, ir.Var) and value in b.origins:
        value = b.origins[value]
    if isinstance(value, ir.TensorLoad):
        buffer = b.buffers[value.source]
        indices = list(value.indices)
        tail = tuple(like or ())
        if len(tail) > len(indices):
            extra, tail = tail[: len(tail) - len(indices)], tail[len(tail) - len(indices) :]
            if any(constant(e) != 1 for e in extra):
                raise TileValueError(
                    f"{what}: {buffer.name} has {len(indices)} axes, too few for a tile of {show(like)}", loc=source.current()
                )
        extents = (1,) * (len(indices) - len(tail)) + tail
        dropped = tuple([True] * (len(indices) - len(tail)) + [False] * len(tail))
        made = Region(buffer, tuple(indices), extents, dropped)
        if buffer.scope.startswith(("shared", "local")):
            for axis, (m, e) in enumerate(zip(made.mins, made.extents, strict=True)):
                buffer._check_constant(axis, m, e)
        return made
    raise TileTypeError(
        f"{what} is {value!r} ({type(value).__name__})",
        loc=source.current(),
        expected="a tensor, an allocation, a slice A[i:i+m, j] or the first element A[i, j] of a tile",
    )


def element(value: Any, what: str) -> Region:
    """The single element that an operand names."""
    if isinstance(value, (Buffer, Variable)):
        buffer = value.buffer if isinstance(value, Variable) else value
        if all(constant(s) == 1 for s in buffer.shape):
            return buffer.whole()
    made = region(value, what, ())
    if any(constant(e) != 1 for e in made.extents):
        raise TileValueError(f"{what} is a tile of {show(made.shape)}", loc=source.current(), expected=f"one element, {made.name}[i]")
    return made


def squeeze(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """A shape without its axes of extent one."""
    return tuple(e for e in shape if constant(e) != 1)


def same_extent(a: Any, b: Any) -> bool:
    x, y = constant(a), constant(b)
    if x is not None and y is not None:
        return x == y
    return constant(difference(a, b)) == 0


def require_same_shape(a: Region, b: Region, what: str) -> None:
    """Both regions have one shape, axes of extent one aside.

    Raises:
        TileValueError: they differ; the text shows both.
    """
    x, y = squeeze(a.shape), squeeze(b.shape)
    if len(x) != len(y) or not all(same_extent(p, q) for p, q in zip(x, y, strict=True)):
        raise TileValueError(
            f"{what}: {a.name} has a tile of {show(a.shape)} and {b.name} one of {show(b.shape)}",
            loc=source.current(),
            expected="the same shape on both sides",
        )


def show(shape: Any) -> str:
    return "(" + ", ".join(map(str, shape or ())) + ("," if shape is not None and len(shape) == 1 else "") + ")"
