"""Blocks that wait for other blocks must be resident together: a static grid that cannot be is refused here,
at compile time.

The device is nominal (132 SMs with 2048 threads, 32 blocks and 227 KiB of shared memory each), so that what
passes on one target passes on all. A grid known only at launch is checked there, by the same formula
(tilescale/native/launch.c). Waits for executors of the own block and for blocks of the own cluster ask for
nothing: a block and a cluster are always resident whole.
"""

from __future__ import annotations

import functools
from math import prod
from typing import Any

from tilescale.compiler.ir.holders import holders
from tilescale.compiler.ir.operations import effects_of, operations
from tilescale.compiler.ir.program import TileProgram
from tilescale.errors import TileValueError
from tilescale.language.dtypes import canonical

SMS, SM_THREADS, SM_BLOCKS, SM_SHARED, BLOCK_SHARED = 132, 2048, 32, 227 << 10, 1 << 10


def residency(program: TileProgram) -> TileProgram:
    """Refuses a static grid of blocks that wait for other blocks and cannot all be resident; the program is
    unchanged.

    Raises:
        TileValueError: at the first such wait.
    """
    grid = program.launch.grid
    waits = waits_for_blocks(program.func.body)
    if not waits or not all(isinstance(e, int) for e in grid):
        return program
    blocks, limit = prod(grid), resident_blocks(program)
    if blocks > limit:
        from tilescale.compiler.ir.source import loc_of

        raise TileValueError(
            f"blocks of {program.name} wait for others here, its grid has {blocks} blocks, and {limit} are "
            "resident at once "
            f"({program.launch.threads} threads and {shared_bytes(program)} bytes of shared memory each)",
            loc=loc_of(getattr(waits[0], "span", None)) or program.launch.loc,
            expected=f"at most {limit} blocks where blocks wait",
            hint="a smaller grid whose blocks loop over tiles with T.Persistent",
        )
    return program


@functools.lru_cache(maxsize=256)
def waits_for_blocks(body: Any) -> tuple[Any, ...]:
    """The operations of a kernel that wait for blocks other than those of the own cluster."""

    return tuple(
        call
        for call, op in operations(body)
        if op.synchronizes(call) in ("grid", "device")
        or op.name == "get_packets"
        or op.acquires(call)
        and any(a.region.source.ty.storage_scope == "global.signal" for a in effects_of(call))
    )


def synchronizes_ranks(body: Any) -> bool:
    """Whether a kernel synchronizes with other ranks by itself, without any symmetric memory."""
    return any(
        str(call.attrs["reach"]) == "device" for call in waits_for_blocks(body) if "reach" in call.attrs
    )


@functools.lru_cache(maxsize=256)
def reaches_ranks(body: Any) -> bool:
    """Whether a kernel touches other ranks' memory or synchronizes with them, as its blocks or as
    participants of a collective: only then its launch synchronizes with theirs."""
    far = [
        (call, op)
        for call, op in operations(body)
        if call.attrs is not None and str(call.attrs.get("reach", "")) == "device"
    ]
    return any(
        op.synchronizes(call) or any(a.owner is not None for a in effects_of(call)) for call, op in far
    )


def shared_bytes(program: TileProgram) -> int:
    """Shared memory of one block."""
    total = 0
    for buffer, who in holders(program).items():
        ty = buffer.ty
        each = canonical(str(getattr(ty.dtype, "dtype", ty.dtype))).bytes
        total += prod(int(e) for e in ty.shape) * each * len(who)
    return total


def resident_blocks(program: TileProgram) -> int:
    """How many blocks of a kernel the nominal device holds at once: whole clusters, and no more than
    ``T.Kernel(max_blocks=…)``."""
    launch = program.launch
    per_sm = min(SM_BLOCKS, SM_THREADS // launch.threads, SM_SHARED // (shared_bytes(program) + BLOCK_SHARED))
    total = min(SMS * per_sm, launch.max_blocks or SMS * per_sm)
    cluster = prod(launch.cluster)
    return int(total // cluster * cluster)
