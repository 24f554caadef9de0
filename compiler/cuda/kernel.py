"""A kernel as thread IR, and what the launcher must know of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tilescale.compiler.tvm_compat import ir, tirx

#: the arena's alignment: what TMA's 128-byte swizzle asks of a tile (PTX ISA, "Tensor Swizzling Modes")
ARENA_ALIGN = 1024


@dataclass(frozen=True)
class Source:
    """Where the launcher takes one parameter of the function from.

    kind: "param" (the kernel's parameter ``index``: a pointer or a scalar), "map" (``ThreadKernel.maps[index]``), "symbol" (the symbolic
    extent ``index``), "rank", "world", "team" (a ``ts::Team``), or "failure" (three words of the host's memory: two in which
    ``ts::fail`` says who failed, and how long a wait may take, ns).
    """

    kind: str
    index: int = 0


@dataclass(frozen=True)
class TensorMap:
    """A tensor map (CUtensorMap) of a parameter, encoded by the launcher for the pointer and the extents of each call.

    param: the parameter's index. box: extents of the tile, outermost axis first like the tensor's shape. swizzle: bytes, 0, 32, 64 or
    128. l2: bytes that a miss brings into the L2 cache, 0, 64, 128 or 256; a box's rows have 128 at most, and with 256 products of 16 rows,
    which are bound by reading the other operand, took 3 % longer. Elements outside read zero. A copy's coordinates may be negative, but the
    one along the innermost axis must come to a multiple of 16 bytes: anything else stops the kernel as an illegal instruction.
    """

    param: int
    box: tuple[int, ...]
    swizzle: int = 0
    l2: int = 128


@dataclass(frozen=True)
class ThreadKernel:
    """What `cuda.lower` returns.

    func: the PrimFunc; its parameters are buffers and variables, ``sources`` has one entry for each. name: of the function in the code.
    grid: three extents, ints or expressions of the kernel's scalar parameters and symbolic extents (``program``'s variables).
    threads: of a block. shared_bytes: the arena's size. written: parameters that the kernel may write.
    min_blocks: how many blocks of a multiprocessor the compiler must leave registers for; None: its own choice.
    cooperative: all blocks must be resident together (cuLaunchAttributeCooperative). dependent: may start before the kernel in front
    of it has ended (programmatic dependent launch); the code then holds griddepcontrol. device: other ranks are reached, between the
    flags at both ends of the launch; those are left out where it is not ``ordered``. team: the code holds ts_enter and ts_leave.
    widths: copies (of the scheduled program) that threads make in vectors → the bytes of one.
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
    maps: tuple[TensorMap, ...] = ()
    sites: tuple[str, ...] = field(default=())
    device: bool = False
    ordered: bool = True
    team: bool = False
    widths: dict[Any, int] = field(default_factory=dict, compare=False)


def arena(size: int) -> Any:
    """The buffer of a block's shared memory; its AllocBuffer stands in front of every tile in it."""
    return tirx.decl_buffer((size,), "uint8", name="smem", scope="shared")


def placed(whole: Any, name: str, dtype: str, numel: int, offset: int, span: Any = None) -> tuple[Any, Any]:
    """A tile at a byte offset of the arena: its buffer, and the statement that declares it."""
    at = tirx.handle_add_byte_offset(tirx.buffer_data(whole), offset)
    data = tirx.reinterpret(ir.PointerType(ir.PrimType(dtype), "shared"), at)
    tile = tirx.decl_buffer((numel,), dtype, name=name, data=data)
    return tile, tirx.DeclBuffer(tile, span, data=data)
