"""What the parts of the lowering share: a kernel's state, and by name what each part asks of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from tilescale.compiler.gpu.kernel import Source, arena
from tilescale.compiler.gpu.places import Box, Global, InShared, Memory, Place, Registers
from tilescale.compiler.ir.beliefs import Beliefs
from tilescale.compiler.ir.buffers import written_buffers
from tilescale.compiler.ir.nests import Nest
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.scales import Executor
from tilescale.compiler.layout.match import Loop
from tilescale.compiler.passes.insert_barriers import published
from tilescale.compiler.tvm_compat import ir, structural_walk, sym, tirx
from tilescale.errors import InternalError, Loc, TileSyntaxError

#: a kind of place
Kind = TypeVar("Kind", Global, InShared, Registers)


class State:
    """A kernel on its way to thread IR."""

    scalar: Callable[[Any], Any]
    load: Callable[[Any], Any]
    nest: Callable[[Nest], Any]
    stmt: Callable[[Any], Any]
    thread: Callable[[], Any]
    counted_from: Callable[[int], AbstractContextManager[None]]
    own: Callable[[Any], bool | None]
    did: Callable[[Sequence[Any], Any], None]
    extent: Callable[[Any], Any]
    bind_range: Callable[[Any, Any], None]
    access: Callable[[Any, Any, Any, bool], tuple[Any, Any, list[Any], Place]]
    place_of: Callable[[Any, bool], Place]
    counter: Callable[[Any, Any], tuple[Any, Any, list[Any]]]
    once: Callable[[Any], Any]
    proven: Callable[[Any], bool]
    refused: Callable[[str, str], TileSyntaxError]
    fail: Callable[[str, Any, str], Any]
    record: Callable[[], Any]
    scale_value: Callable[[str, int], Any]
    of_launch: Callable[[str], Any]
    cluster_copy: Callable[[Any, Nest], Any]
    barrier_call: Callable[[str], Any]
    barrier_of: Callable[[str], tuple[Any, Any, int]]
    block_thread: Callable[[], Any]
    holder: Callable[[], Any]
    site: Callable[..., Any]
    span: Callable[..., Any]
    site_here: Callable[[str, str], Any]
    crossing: Callable[[Any, Any, int], Any]

    def __init__(self, program: TileProgram, *, instrument: bool = False):
        self.program, self.target = program, program.target
        #: whether the kernel logs what it does (logs.py)
        self.instrument = instrument
        #: registers that a thread logs by, and whether what is being lowered is inside a loop that is logged
        self.logged: dict[str, Any] = {}
        self.in_span = False
        #: the sites of copies that the loop joins which is being lowered; None: it joins none
        self.joins: set[int] | None = None
        #: each thread of a warp runs rounds of its own of a loop that puts (cuda/ops/peer_rows.py)
        self.by_lanes = False
        #: a loop of single threads is being lowered
        self.by_threads = False
        self.analyzer = sym.Analyzer()
        self.variables: dict[Any, Any] = {}
        self.places: dict[Any, Place] = {}
        self.layouts: dict[Any, Any] = program.layouts
        self.params: list[tuple[Any, Source]] = []
        self.head: list[Any] = []
        #: counters in shared memory, with how many words they have for all executors
        self.zeroed: list[tuple[Any, int]] = []
        #: names of the program that stand for integer expressions
        self.definitions: dict[Any, Any] = {}
        #: names of a thread's own code that stand for integer expressions, in thread IR
        self.own_names: dict[Any, Any] = {}
        #: what the names of a nest's indices stand for, in the thread's index and counters of rounds
        self.spelling: dict[Any, Any] = {}
        self.written = written_buffers(program)
        self.beliefs = Beliefs(program)
        #: element of memory → its name where conditions on it are believed
        self.held: dict[Any, Any] = {}
        #: the variables that count rounds of rings
        self.rounds = rounds_of(program)
        self.sites: list[str] = []
        self.demanded: set[Any] | None = (
            None  # collectives whose demands the launcher looks at (ops/participants.py)
        )
        self.here: Loc | None = None
        self.threads = program.launch.threads
        self.executor = Executor("block", self.threads)
        self.tid = tirx.Var("tid", "int32")
        self.analyzer.bind(self.tid, ir.Range.from_min_extent(0, self.threads))
        self.block = [tirx.Var(n, "int32") for n in ("bx", "by", "bz")]
        self.raw = self.block
        #: blocks can signal each other through tensors: atomic updates carry what was written before
        #: them
        self.publishes = bool(published(program))
        self.arena = arena(max(1, program.arena_bytes))
        #: who runs a statement where a block has a producer: "producer" or "consumer"; None where all threads
        #: are alike
        self.role: str | None = None
        #: where a failing thread says who it is; None where none can fail
        self.failure: Any = None
        #: threads beside the block's own
        self.extra = 0
        #: the loop that is being lowered, its counters (variables, or ints where rounds are laid out), and
        #: the number of the round then
        self.loop: Loop | None = None
        self.counters: list[Any] = []
        self.round: int | None = None
        #: accesses that move as parts of vectors, each with the register that stands for it
        self.moved: list[tuple[Any, Any]] = []
        #: nests (by their node) that move neighbours of a tensor as vectors → the bytes of one
        self.widths: dict[Any, int] = {}
        #: parameters that the launcher adds where the code uses them
        self.ranked: list[tuple[Any, Source]] = []
        #: the tensor whose remote twin a nest touches, whether it writes it there, and where that lies
        self.remote: tuple[Any, bool, Place] | None = None
        #: by scale, of executors whose copies to ranks are staged: the variables that say where the first one
        #: has its scratch and how far apart they are, and how much each one has; and how much a block has
        self.staged: dict[str, tuple[Any, Any, int]] = {}
        self.scratch_bytes = tirx.Var("scratch_bytes", "int32")
        #: boxes of packets, with the variable that holds the number of this launch in each
        self.boxes: dict[Any, Any] = {}
        #: by scale of an executor that looks at entries: the variable that says whether it has seen all
        self.entered: dict[str, Any] = {}
        #: the looks that stand in front of what is being lowered: role, scale, and the rank (None: all)
        self.looked: list[tuple[str | None, str, Any]] = []
        #: whether other ranks are reached
        self.device = False

    # -- where what an operation takes must lie, by what passes have staged
    def registers_of(self, tile: Any) -> Registers:
        """The place of a tile in registers."""
        return self._placed(tile, Registers)

    def shared_of(self, tile: Any) -> InShared:
        """The place of a tile in shared memory."""
        return self._placed(tile, InShared)

    def tensor_of(self, tensor: Any) -> Global:
        """The place of a tensor."""
        return self._placed(tensor, Global)

    def memory_of(self, buffer: Any) -> Memory:
        """The place of what is not in registers."""
        place = self.places[buffer]
        if isinstance(place, (Registers, Box)):
            raise InternalError(f"{place.name} is no memory of elements", loc=self.here)
        return place

    def _placed(self, buffer: Any, kind: type[Kind]) -> Kind:
        place = self.places[buffer]
        if not isinstance(place, kind):
            raise InternalError(f"{place.name} is {type(place).__name__}, not {kind.__name__}", loc=self.here)
        return place


def rounds_of(program: TileProgram) -> set[Any]:
    """The variables that count the rounds of a program's rings."""
    found: set[Any] = set()

    def look(c: Any) -> None:
        if c.op.name in ("ts.ring_commit", "ts.ring_wait") and isinstance(c.args[0], ir.TensorLoad):
            found.add(c.args[0].source)

    structural_walk(program.func.body, (ir.Call, look))
    return found
