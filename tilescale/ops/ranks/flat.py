"""Tensors as rows of numbers: how collectives cut them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilescale import env
from tilescale.comm.backend import Team
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import host
from tilescale.ops.case import Expected, expected
from tilescale.ops.case import summed as summed_up
from tilescale.ops.ranks import picks
from tilescale.ops.ranks.groups import number_of

#: bytes that are added together, in registers: of all ranks
ADDED = 64 << 10
#: of four blocks so many put where a tensor is large, the others take what arrives. On 2 H100 64 MB a rank
#: were gathered in 276 µs with 0, 213 with 1 and 204 with 2
GIVERS = 2
#: dtypes that sums are taken of
SUMMED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Cut:
    """Numbers that are added together, numbers of a put, blocks, threads of a block, and how many of the
    blocks put (0: all do all)."""

    P: int
    Q: int
    blocks: int
    threads: int
    givers: int = 0


def kept(team: Team, operation: str, x: torch.Tensor, blocks: int | None, **shape: Any) -> dict[str, Any]:
    """What was measured for this shape, with a caller's bound of ``blocks``: words ``how`` and ``blocks``,
    None where there are none, and what an operation has beside them.

    Raises:
        TileTypeError, TileValueError: a bound that is no number of blocks.
    """
    blocks = bound(blocks)
    found = picks.found(team, operation, x.device, **shape) if team.size > 1 else {}
    return {"how": None, **found, "blocks": found.get("blocks") if blocks is None else blocks}


def allowed(kept: dict[str, Any], ways: tuple[str, ...], torch_group: Any) -> str | None:
    """The way that was measured, one of ``ways``, unless it is the library's and there is none, or that of
    engines that reach nobody."""
    way: str | None = kept["how"]
    able = {"library": torch_group is not None, "engine": not env.REMOTE.get()}
    return way if way in ways and able.get(way, True) else None


def bound(blocks: int | None) -> int | None:
    """A caller's bound of blocks, as an int.

    Raises:
        TileTypeError, TileValueError: one that is no number of blocks.
    """
    return None if blocks is None else number_of(blocks, "blocks", least=1)


def multiprocessors(device: torch.device, blocks: int | None) -> int:
    """Of a device, at most ``blocks``.

    Raises:
        TileTypeError, TileValueError: a bound that is no number of blocks.
    """
    units, most = host.units(device), bound(blocks)
    return units if most is None else min(units, most)


#: bytes of a put at most. On 4 H200, 2026-11-26, 64 MB a rank were gathered in 772 µs by puts of 256 KB, 673
#: of 128, 645 of 64 and 661 of 32; scattered in 777 of 256, 647 of 64. 4 MB took 55 µs by puts of 32 KB, one
#: of each block, 72 by two of 16 KB and 57 by puts of 64 KB of half of the blocks; scattered 57, 67 and 60
PUT = 64 << 10

#: seconds that kernels take whatever is moved, and bytes a second that leave a rank then. On 4 H200,
#: 2026-11-26, 4 MB a rank were gathered in 55 µs, 64 MB in 645, and scattered in 57 and 647. On 2 H100,
#: 2026-11-24, 64 MB in 205 µs, 512 MB in 1,479
MOVED = (16e-6, 320e9)
MOVED_BY_TWO = (22e-6, 368e9)


def seconds(size: int, world: int) -> float:
    """That kernels take to move large parts, ``size`` bytes to each other rank."""
    begin, rate = MOVED if world > 2 else MOVED_BY_TWO
    return begin + (world - 1) * size / rate


#: bytes to each rank from which some blocks put and others take what arrives
SHARED = 8 << 20

#: bytes of a block's packets for each rank: eight a thread of 128; of dense ones sixteen, two packets
EACH, DENSE = 1 << 10, 2 << 10
#: blocks with dense packets of up to 8 ranks that are on a multiprocessor at once: of 128 registers a thread
TOGETHER = 4


def boxes(size: int, each: int = EACH) -> int:
    """How many blocks put and get ``size`` bytes for each rank as packets, ``each`` so many: a power of two,
    so that few boxes serve all sizes."""
    return power(-(-size // each))


def in_pieces(size: int, units: int, world: int) -> tuple[int, int, int]:
    """How many pieces of `DENSE` bytes each block has of ``size`` bytes in dense packets, how many blocks
    there are, all of them on ``units`` multiprocessors at once, and how many pieces a box has room for: a
    power of four, so that boxes of all sizes take little more memory than the largest."""
    count = -(-size // DENSE)
    together = max(1, TOGETHER * 8 // max(8, world))
    pieces = power(-(-count // (together * units)))
    blocks = -(-count // pieces)
    return pieces, blocks, max(64, 1 << -(-(pieces * blocks - 1).bit_length() // 2) * 2)


def power(count: int) -> int:
    """The least power of two that is so many, or more."""
    return 1 << max(0, count - 1).bit_length()


def resident(size: int, units: int) -> bool:
    """Whether those blocks, which all wait, are on ``units`` multiprocessors at once: eight on each always
    are, of dense packets, of which half as many blocks have twice as many, `TOGETHER`."""
    return boxes(size) <= 8 * units


#: what tuning tries of a collective: multiprocessors that its kernel keeps
BLOCKS = tuple({"blocks": n} for n in (8, 16, 32, 64, None))


def cut(size: int, itemsize: int, units: int, world: int = 2) -> Cut:
    """For ``size`` bytes to each of ``world`` ranks on ``units`` multiprocessors: a vector of 16 bytes a
    thread for small messages, whose time is the trip's; for large ones one put of each block to each rank,
    since the release behind each costs microseconds, of 16 to `PUT` bytes."""
    if size <= 256 << 10:
        put = 2 << 10
        return Cut(put // itemsize, put // itemsize, max(1, min(units, -(-size // put))), 128)
    put = min(PUT, max(16 << 10, power(-(-size // units))))
    added = max(4 << 10, min(16 << 10, 1 << (ADDED // world).bit_length() - 1))
    blocks = min(units, -(-size // put))
    givers = blocks * GIVERS // 4 if size >= SHARED else 0
    return Cut(added // itemsize, put // itemsize, blocks, 256, givers)


def in_place(
    operation: str,
    x: torch.Tensor,
    out: torch.Tensor | None,
    form: str,
    where: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> bool:
    """Whether a call is in place, which is one ``form`` of sharing memory: where the two tensors that
    ``where`` gives of ``out`` are one. Every other sharing is refused, by each rank that does it before it
    sends anything, whatever way the call would go.

    Raises:
        TileValueError: x and ``out`` share memory otherwise.
    """
    if out is None or not host.share_memory(x, out):
        return False
    if where is not None and host.same(*where(out)):
        return True
    raise TileValueError(
        f"{operation}: x and out share memory",
        expected=f"{form + ', or ' if form else ''}an out that shares no memory with x",
        hint=f"{operation}(x.clone(), out=out)",
    )


def words(*sizes: int) -> tuple[torch.dtype, int]:
    """The widest integers that rows of so many bytes are made of, and how many of them make a vector. All
    ranks have to choose alike: ``sizes`` are what they agree on."""
    step = math.gcd(16, *sizes)
    kind = {16: torch.int64, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[step]
    return kind, step // kind.itemsize


def begins(tensor: torch.Tensor) -> bool:
    """Whether a tensor begins at a multiple of 16 bytes, as kernels are made for, and does so in its storage,
    too: else torch views it as none of another dtype. A storage may begin anywhere (NumPy's), and an empty
    tensor has no address, but a place in its storage."""
    return tensor.data_ptr() % 16 == 0 and tensor.storage_offset() * tensor.element_size() % 16 == 0


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in order that `begins` as kernels are made for; copied where it does not."""
    made = tensor.contiguous()
    return made if begins(made) else made.clone()


def line(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor along one axis. A single number may have any stride, and torch views only those of
    stride 1 as another dtype."""
    return tensor.as_strided((1,), (1,)) if tensor.numel() == 1 else tensor.view(-1)


def row(tensor: torch.Tensor, kind: torch.dtype | None = None) -> torch.Tensor:
    """A contiguous tensor as a row of numbers, of ``kind`` where that is given; copied where it does not
    begin (`begins`)."""
    flat = line(tensor.resolve_conj().resolve_neg().contiguous())
    if kind is not None and flat.numel() == 0:
        return flat.new_empty(0, dtype=kind)
    flat = flat if begins(flat) else flat.clone()
    return flat if kind is None else flat.view(kind)


def summed(x: torch.Tensor, what: str) -> None:
    """Refuses what no sum is taken of.

    Raises:
        TileTypeError: a dtype that is none of `SUMMED`.
    """
    if x.dtype not in SUMMED:
        raise TileTypeError(
            f"{what} of {str(x.dtype).removeprefix('torch.')}",
            expected="one of " + ", ".join(str(d).removeprefix("torch.") for d in SUMMED),
        )


def padded(count: int, itemsize: int) -> int:
    """Numbers of a row that other ranks write and that holds so many: whole vectors of 16 bytes."""
    step = 16 // itemsize
    return -(-count // step) * step


def landing(out: torch.Tensor) -> torch.Tensor:
    """A row that a kernel writes ``out`` as: itself, or where it does not begin (`begins`), other memory."""
    return line(out) if begins(out) else out.new_empty(out.numel())


def landed(row: torch.Tensor, out: torch.Tensor) -> None:
    """What a kernel wrote is in ``out``."""
    if row.data_ptr() != out.data_ptr():
        out.view(-1).copy_(row)


def way(how: str | None, choice: str, ways: tuple[str, ...], order: str, torch_group: Any) -> str:
    """``how``, checked, or the choice by size.

    Raises:
        TileValueError: an order or a way that there is not, or the library where it may not add.
    """
    if order not in ("rank", "any"):
        raise TileValueError(f"order={order!r}", expected='"rank" or "any"')
    if how is None:
        return choice
    free = order == "any" and torch_group is not None
    if how not in ways and not (how == "library" and free):
        needs = 'where torch has a process group of these ranks, "library" with order="any"'
        raise TileValueError(f"how={how!r}", expected=", ".join(f'"{w}"' for w in ways) + f"; {needs}")
    return how


def constants(
    cut: Cut,
    world: int,
    dtype: torch.dtype,
    out: torch.dtype,
    bias: int,
    activation: str,
    *extents: int,
) -> dict[str, Any]:
    """What a kernel that adds is made of. ``bias``: its numbers, 0: there is none; ``extents``: lengths of
    rows that all ranks agree on."""
    size = max(dtype.itemsize, out.itemsize)
    return {
        "world": world,
        "P": cut.P,
        "Q": cut.Q,
        "blocks": cut.blocks,
        "threads": cut.threads,
        "dtype": host.dtype_of(dtype),
        "align": math.gcd(16 // size, *extents),
        "out": host.dtype_of(out),
        "bias": bias,
        "activation": activation,
    }


def reference_sum(everyone: list[torch.Tensor]) -> Expected:
    """The sum in float64, and what one in float32 may be off."""
    parts = [x.double() for x in everyone]
    magnitude = torch.stack([p.abs() for p in parts]).sum(0)
    noise = summed_up(magnitude, len(parts))
    noise = noise * 2.0**-29 if everyone[0].dtype == torch.float64 else noise
    return expected(torch.stack(parts).sum(0), everyone[0].dtype, noise=noise)
