"""A kernel as one record: its function, its parameters, its launch, and what passes have found out about
it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tilescale.compiler.ir.multiples import Promises
from tilescale.compiler.ir.target import CPU, Target
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import Loc

#: 4 KiB a warp hide the way to memory, and leave a thread some registers
COMM_DEPTH = 8


@dataclass
class Launch:
    """What ``T.Kernel`` says: the grid and the shape of a block."""

    grid: tuple[Any, ...]
    threads: int
    cluster: tuple[int, int, int] = (1, 1, 1)
    max_blocks: int = 0
    ordered: bool = True
    pdl: bool = False
    #: warps of a block that do nothing but copy to other ranks, where it has non-blocking copies
    comm_warps: int = 2
    #: accesses of 16 bytes that a thread of those has under way at once
    comm_depth: int = COMM_DEPTH
    loc: Loc | None = None
    block_vars: list[Any] = field(default_factory=list)
    hints: dict[str, Any] = field(default_factory=dict)
    #: each rank gets packets of each other one, and nothing else reaches other ranks (passes/packets.py)
    exchanges: bool = False
    #: a rank awaits all that others aim at it, so it need not hear that they have ended (passes/awaited.py)
    awaited: bool = False

    @property
    def flagged(self) -> bool:
        """Whether ranks say when they begin a launch, and also when they end it unless it is ``awaited``."""
        return self.ordered and not self.exchanges


@dataclass
class Param:
    """A parameter of the kernel as it is called. ``output``: allocated by the call (``T.empty`` in an eager
    kernel)."""

    name: str
    spec: Any
    var: Any
    loc: Loc | None = None
    output: bool = False


@dataclass
class TileProgram:
    """A kernel as tile IR. ``func``'s parameters are ``params`` followed by ``symbols``."""

    name: str
    func: Any
    params: list[Param]
    symbols: dict[str, Any]
    launch: Launch
    loc: Loc
    hints: dict[str, Any] = field(default_factory=dict)
    returns: list[int] = field(default_factory=list)
    #: how many launches a call makes, one after the other; this program is one of them
    launches: int = 1
    #: symbol → what its value is a multiple of in every call, which the launcher checks
    multiples: Promises = field(default_factory=Promises)
    schedule: Any = None
    layouts: dict[Any, Any] = field(default_factory=dict)
    #: what the program is compiled for; the CPU, until a pipeline says otherwise
    target: Target = CPU
    #: on GPUs: each tile's offset and size in the block's shared memory, in bytes, and how much that is
    arena: dict[Any, tuple[int, int]] = field(default_factory=dict)
    arena_bytes: int = 0
    #: the executors that these places are for (ir/holders.py), as the text had it when they were given
    holders: dict[Any, range] = field(default_factory=dict)
    #: whether more stages may be had by letting tiles share bytes with rings that have ended (GPUs)
    sharing: bool = True
    #: mechanisms that make some kernels faster: those that are left out, and those that this kernel has
    without: tuple[str, ...] = ()
    fired: list[str] = field(default_factory=list)
    #: what passes did that the author may want to know (log level info)
    notes: list[str] = field(default_factory=list)

    def script(self) -> str:
        """The program as text, as a ``@T.prim_func``'s."""
        return str(self.func.script())

    def with_body(self, body: Any) -> TileProgram:
        """The same kernel with another body."""
        func = tirx.PrimFunc(list(self.func.params), body, attrs=self.func.attrs)
        return replace(self, func=func)


class Traceable(Protocol):
    """What a program is traced from: a ``@T.prim_func``."""

    def trace(self) -> TileProgram:
        """The kernel as tile IR."""
        ...
