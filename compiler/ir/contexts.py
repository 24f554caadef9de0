"""What operations and their lowerings are given beside the call, as far as they use it: one protocol for each
occasion. Who gives it lies in packages that this one does not know (sim, layout, passes, the targets); there
mypy compares it with the protocol, where it is handed over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.scales import Executor
from tilescale.compiler.ir.target import Target

#: in the simulator, an expression as a function of the executor that evaluates it
Value = Callable[[Any], Any]


@dataclass(frozen=True)
class Site:
    """In the simulator, a statement that touches memory, as the author wrote it."""

    what: str
    loc: Any
    number: int
    #: it reads half a byte to store it again, which need not have been written
    keeps: bool = False


class RegionView(Protocol):
    """In the simulator, a region of a buffer, as whoever runs the statement sees it (sim/view.py). ``owner``:
    the rank or block in whose memory it lies; None for the executor's own."""

    #: where executors keep the buffer
    slot: int
    #: of the buffer's elements
    dtype: str
    #: the statement that touches it
    site: Site

    def index(self, ex: Any) -> tuple[Any, ...]:
        """The indices of its first element."""
        ...

    def storage(self, ex: Any, owner: int | None) -> Any:
        """The memory that it lies in."""
        ...

    def counter(self, ex: Any, owner: int | None = None) -> Any:
        """The counter that it names; None, and a finding, outside."""
        ...

    def cut(self, ex: Any, storage: Any) -> tuple[Any, Any, tuple[int, ...]]:
        """What of it lies inside, as slices of the storage and of the region; its shape."""
        ...

    def placed(self, ex: Any, owner: int | None) -> Any:
        """It at the place where the executor's variables put it now."""
        ...

    def read(self, ex: Any, owner: int | None = None) -> Any:
        """Its elements as they lie in memory; zero outside."""
        ...

    def write(
        self,
        ex: Any,
        values: Any,
        owner: int | None = None,
        combined: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        """Stores ``values``, or what is made of the old elements and them; what is outside is dropped."""
        ...


class SimContext(Protocol):
    """What `TileOp.simulate` is given: the program on its way to functions of an executor
    (sim/prepare.py)."""

    #: the program, behind the passes of the tile level or at the scheduled level
    program: TileProgram
    #: buffer → where executors keep it
    slots: dict[Any, int]
    #: barrier of the author's → the arrivals that each of its elements expects
    barrier_counts: dict[Any, list[int]]

    def scalar(self, e: Any) -> Value:
        """An expression as a function of the executor."""
        ...

    def view(self, region: Any, call: Any) -> RegionView:
        """A region that ``call`` touches."""
        ...

    def site(self, node: Any, what: str) -> Site:
        """A new site, of a statement that the author wrote as ``what``."""
        ...

    def site_of(self, call: Any) -> Site:
        """The site of the operation that is made ready."""
        ...

    def token(self, call: Any, kind: str, ring: int) -> Site:
        """The site of a ring's token."""
        ...

    def signalling(
        self, call: Any, region: Any, amount: Any, op: str, peer: Value | None
    ) -> Callable[..., None]:
        """A signal of a counter (that ``peer`` owns), as ``signal(ex, owner)``; a third argument is who
        signals in the executor's place."""
        ...

    def awaiting(self, region: Any, call: Any) -> Site:
        """The site of a wait for a counter."""
        ...

    def peeking(self, region: Any) -> None:
        """Says that a counter is looked at without a wait: that it is not there yet says something, too."""
        ...

    def filling(self, region: Any) -> None:
        """Says that the author's copies by TMA fill a buffer."""
        ...

    def executor_count(self) -> int:
        """How many executors of a block run the statement."""
        ...


class LoweringContext(Protocol):
    """What every target's lowering of a whole program has; `Lowering.lower` is given its target's own."""

    program: TileProgram
    #: collectives whose demands the launcher looks at; None until something asks (ops/participants.py)
    demanded: set[Any] | None

    def scalar(self, e: Any) -> Any:
        """An expression as thread IR."""
        ...

    def proven(self, condition: Any) -> bool:
        """Whether a condition on thread IR holds for certain."""
        ...


class StageContext(Protocol):
    """What `Lowering.stage` is given (passes/stage_operands.py)."""

    program: TileProgram
    #: who runs the operation
    executor: Executor
    #: tiles that products sum into
    accumulators: set[Any]

    def tile(self, name: str, shape: Any, dtype: str, scope: str, span: Any = None) -> Any:
        """A new tile, all of it as a region."""
        ...

    def copy(self, src: Any, dst: Any, like: Any) -> Any:
        """``T.copy(src, dst)`` at the place of the operation ``like``."""
        ...

    def again(self, call: Any, args: list[Any], attrs: dict[str, Any] | None = None) -> Any:
        """The operation with other operands."""
        ...


class LayoutContext(Protocol):
    """What `Lowering.layouts` is given (layout/infer.py)."""

    #: what the program is compiled for
    target: Target
    #: tile → the layout that it has so far
    known: dict[Any, Any]

    def executor_of(self, call: Any) -> Executor:
        """Who runs the operation."""
        ...


class ExchangeContext(Protocol):
    """What `Lowering.exchange` is given (passes/convert_layouts.py)."""

    #: what is compiled, and for which target
    program: TileProgram
    #: tile → its layout, of all tiles
    layouts: dict[Any, Any]
    #: who runs the operation
    executor: Executor
    #: statements that stand in front of those that are returned
    made: list[Any]

    def scratch(self, name: str, shape: Any, dtype: str, span: Any = None, swizzle: int = 0) -> Any:
        """A new tile in shared memory, row-major under a swizzle of so many bytes, all of it as a region."""
        ...
