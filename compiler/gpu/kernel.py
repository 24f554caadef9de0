"""A kernel as thread IR, and what the launcher must know of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tilescale.compiler.ir.scales import WARP
from tilescale.compiler.tvm_compat import ir, tirx


@dataclass(frozen=True)
class Source:
    """Where the launcher takes one parameter of the function from.

    kind: "param" (the kernel's parameter ``index``: a pointer or a scalar), "map"
    (``ThreadKernel.maps[index]``), "symbol" (the symbolic extent ``index``), "rank", "world", "team" (a
    ``ts::Team``), "log" (a ``ts::Log``), or "failure" (three words of the host's memory: two in which
    ``ts::fail`` says who failed, and how long a wait may take, ns).
    """

    kind: str
    index: int = 0


@dataclass(frozen=True)
class ThreadKernel:
    """What `lower` returns.

    func: the PrimFunc; its parameters are buffers and variables, ``sources`` has one entry for each. name: of
    the function in the code. grid: three extents, ints or expressions of the kernel's scalar parameters and
    symbolic extents (``program``'s variables). threads: of a block. shared_bytes: the arena's size. written:
    parameters that the kernel may write. min_blocks: how many blocks of a multiprocessor the compiler must
    leave registers for; None: its own choice. cooperative: all blocks must be resident together (a
    cooperative launch). dependent: may start before the kernel in front of it has ended (programmatic
    dependent launch); the code then says what it waits for. device: other ranks are reached, between the
    flags at both ends of the launch; those are left out where it is not ``ordered``, and where it is ``bare``
    nobody counts the launch either; where it is ``awaited`` the flags at its end are. team: the code holds
    ts_pass. maps: what the launcher makes of parameters beside passing them on; on NVIDIA's GPUs
    `cuda.ops.tma.TensorMap`. widths: copies (of the scheduled program) that threads make in vectors → the
    bytes of one. wave: threads that run in step (`Target.wave`). remote: how other ranks are reached
    (`Target.remote`). imported: texts of the author's in front of it.
    """

    func: Any
    name: str
    grid: tuple[Any, Any, Any]
    threads: int
    sources: tuple[Source, ...]
    written: frozenset[int] = frozenset()
    shared_bytes: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    min_blocks: int | None = None
    cooperative: bool = False
    dependent: bool = False
    maps: tuple[Any, ...] = ()
    sites: tuple[str, ...] = field(default=())
    device: bool = False
    ordered: bool = True
    bare: bool = False
    awaited: bool = False
    team: bool = False
    wave: int = WARP
    widths: dict[Any, int] = field(default_factory=dict, compare=False)
    remote: str = ""
    imported: tuple[str, ...] = ()


def arena(size: int) -> Any:
    """The buffer of a block's shared memory; its AllocBuffer stands in front of every tile in it."""
    return tirx.decl_buffer((size,), "uint8", name="smem", scope="shared")


def placed(whole: Any, name: str, dtype: str, numel: int, offset: int, span: Any = None) -> tuple[Any, Any]:
    """A tile at a byte offset of the arena: its buffer, and the statement that declares it."""
    at = tirx.handle_add_byte_offset(tirx.buffer_data(whole), offset)
    data = tirx.reinterpret(ir.PointerType(ir.PrimType(dtype), "shared"), at)
    tile = tirx.decl_buffer((numel,), dtype, name=name, data=data)
    return tile, tirx.DeclBuffer(tile, span, data=data)
