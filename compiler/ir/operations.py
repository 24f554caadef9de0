"""What every operation is made of: a registered call in the IR, an effect table, a meaning."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.tvm_compat import ir, register_op, structural_walk, tirx
from tilescale.errors import InternalError

VOID = ir.PrimType("void")


@dataclass(frozen=True)
class Access:
    """One line of an operation's effect table.

    region: what is touched (a TensorRegion). mode: "read", "write" or "update" (atomic read-modify-write).
    owner: None where the executor's own memory is touched, else the rank or block index that owns it.
    asynchronous: issued here, complete only at a later wait. when: None, or an expression: it happens only
    where that holds. half: of an "update" that does one half alone, "load" or "store". proxy: "async" where
    not the threads themselves but an engine beside them touches it (PTX ISA, "Async proxy"), so that a proxy
    fence must stand between their writes and this.
    """

    region: Any
    mode: str
    owner: Any = None
    asynchronous: bool = False
    when: Any = None
    half: str = ""
    proxy: str = ""


class TileOp:
    """An operation. Subclasses give ``name``, ``effects`` and ``simulate``, its meaning; instances have no
    state. How targets do it is registered with them (ir/lowerings.py). An operation that is a loop over
    elements gives ``nest``: GPUs need no more."""

    name: ClassVar[str]
    #: ``T.<spelling>`` is what the author wrote; where a subclass or ``name`` says nothing else, the base
    #: class's, or the name
    spelling: ClassVar[str]
    #: the levels (ir/spec.py) at which it may stand
    levels: ClassVar[tuple[str, ...]] = ("tile", "scheduled")
    #: the attributes of a call beside the scales that it acts at; those with "?" may be left out
    attributes: ClassVar[tuple[str, ...]] = ()
    #: its first operand, a tile or a part of a tensor, goes to where the second one is
    moves: ClassVar[bool] = False
    #: it adds the product of its first two operands to the third, from zero where the fourth holds; others
    #: are read
    multiplies: ClassVar[bool] = False
    #: it moves a part of a tensor into a stage of the ring ``attrs["ring"]``, and is complete where its round
    #: is awaited
    fills: ClassVar[bool] = False
    #: it may copy to another rank beside its executor (``queue``)
    puts: ClassVar[bool] = False
    #: the ring's own barriers order what it writes: no barrier of threads has to
    guarded: ClassVar[bool] = False
    #: what ``simulate`` gives is a generator, which stops where it has to wait for others
    waits: ClassVar[bool] = False
    #: it touches nothing itself: its effects say what engines are done with behind it
    completes: ClassVar[bool] = False
    #: what ``simulate`` gives also works in the lanes of a T.Parallel nest, where the regions are single
    #: elements
    in_lanes: ClassVar[bool] = False
    #: an iteration of T.Parallel may do it, with single elements as operands
    in_iterations: ClassVar[bool] = False
    #: each thread of the executor does it by itself: at the block's scale it is the threads' own code
    by_thread: ClassVar[bool] = False
    #: it does what its effects say and nothing else, with no order among its elements: it may change places
    #: with whatever its effects leave alone, and what it writes lies apart from what it reads
    plain: ClassVar[bool] = False
    #: of a plain one: where a region that it writes is one that it reads, each element is read in its place
    #: before it is written
    in_place: ClassVar[bool] = False
    #: it folds its first operand into the second by ``attrs["op"]``, along ``attrs["axis"]``, counted from
    #: the back
    folds: ClassVar[bool] = False
    #: what ``simulate`` gives says of each element itself, to the run's observers, what it did
    observed: ClassVar[bool] = False

    def written(self, call: Any) -> str:
        """What the author wrote, for people."""
        return f"T.{self.spelling}"

    def work(self, call: Any) -> int:
        """How many operations of single lanes the call takes, one for each element that it computes with; 0
        where it only moves them, or multiplies tiles (``multiplies``)."""
        return 0

    def synchronizes(self, call: Any) -> str:
        """The scale, from the cluster outward, whose blocks all come to this call before one goes on; ""
        where they need not."""
        return ""

    def signals(self, call: Any) -> bool:
        """Whether it updates a counter for which others wait."""
        return False

    def acquires(self, call: Any) -> bool:
        """Whether accesses of other blocks or ranks may be known to have happened behind it."""
        return self.synchronizes(call) != ""

    def stops(self, call: Any) -> bool:
        """Whether what ``simulate`` gives for this call is a generator: it waits, or others may go on between
        its parts."""
        return self.waits

    def queue(self, call: Any) -> str:
        """In whose queue the call runs on beside its executor until it is awaited ("product", "store":
        sim/flights.py); "" where it is complete where it stands, or where its ring's round is awaited."""
        return ""

    def effects(self, call: Any) -> list[Access]:
        """What the call reads and writes."""
        raise NotImplementedError

    def nest(self, call: Any) -> Any:
        """The call as independent iterations over elements (a :class:`tilescale.compiler.ir.nests.Nest`);
        None where it is no such loop."""
        return None

    def order(self, call: Any) -> tuple[bool, bool]:
        """On GPUs, of what one thread does for all of its executor: whether it releases (what all threads did
        comes before it), and whether it acquires (what all threads do comes behind it)."""
        return False, False

    def simulate(self, call: Any, cx: SimContext) -> Any:
        """The call as a function of the executor that performs it. What it reads and writes by the effect
        table is recorded by then. Of an asynchronous call that goes into no ring the function takes the
        engine that performs it as well (sim/flights.py)."""
        raise NotImplementedError


REGISTRY: dict[str, TileOp] = {}


def register(cls: type[TileOp]) -> type[TileOp]:
    """Class decorator: makes the operation known under ``ts.<name>``."""
    key = f"ts.{cls.name}"
    if key in REGISTRY:
        raise InternalError(f"operation {key} is registered twice")
    register_op(key)
    if not hasattr(cls, "spelling"):
        cls.spelling = cls.name
    REGISTRY[key] = cls()
    return cls


def written(call: Any) -> str:
    """What a call comes from, as the author wrote it."""
    op = find(call)
    return f"T.{call.op.name.removeprefix('ts.')}" if op is None else op.written(call)


def elements(region: Any) -> int:
    """How many elements a region of constant extents has."""
    return prod(int(r.extent) for r in region.region)


@functools.lru_cache(maxsize=4096)
def operations(body: Any) -> tuple[tuple[Any, TileOp], ...]:
    """Every operation's call in a statement, with what it is, innermost first. Statements never change, are
    compared by identity, and many passes ask: the answer is kept."""
    found: list[Any] = []
    structural_walk(body, (ir.Call, found.append))
    return tuple((c, op) for c in found if (op := REGISTRY.get(getattr(c.op, "name", ""))) is not None)


def effects_of(call: Any) -> tuple[Access, ...]:
    """What an operation's call reads and writes; nothing for any other. Every pass asks; the operation itself
    is asked once for each call."""
    known = _EFFECTS.get(hash(call))
    if known is not None:
        return known[1]
    op = find(call)
    made = () if op is None else tuple(op.effects(call))
    if len(_EFFECTS) >= _MOST_EFFECTS:
        _EFFECTS.clear()
    _EFFECTS[hash(call)] = call, made
    return made


#: a call's address → the call, so that no other gets its address, and its effects
_EFFECTS: dict[int, tuple[Any, tuple[Access, ...]]] = {}
_MOST_EFFECTS = 8192


def name_of(s: Any) -> str:
    """The operation that a statement is, without its prefix; empty where it is none."""
    name = (
        getattr(s.value.op, "name", "")
        if isinstance(s, tirx.Evaluate) and isinstance(s.value, ir.Call)
        else ""
    )
    return name.removeprefix("ts.") if name in REGISTRY else ""


def find(call: Any) -> TileOp | None:
    """The operation that a Call stands for; None for anything else."""
    return REGISTRY.get(call.op.name) if isinstance(call, ir.Call) and hasattr(call.op, "name") else None
