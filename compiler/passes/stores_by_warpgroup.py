"""Results that each warpgroup stores for itself. A tile on its way out by TMA (passes/tma_stores.py) of which
every warpgroup writes rows of its own is waited for, written and stored by each warpgroup apart: its first
thread stores its rows (``attrs["groups"]``), and the fences pass synchronizes the warpgroup's threads, not
the block's. Warpgroups that never synchronize remain as far apart as the tensor cores have put them, so that
one computes its softmax under the other's products, across tiles too.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.nests import nest_of
from tilescale.compiler.ir.operations import name_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.scales import WARPGROUP, Executor
from tilescale.compiler.ir.walks import walk
from tilescale.compiler.layout.loops import choose
from tilescale.compiler.passes.owners import COORDINATE, owners_of
from tilescale.compiler.passes.stage_operands import again
from tilescale.compiler.tvm_compat import structural_map, tirx

#: rows of a swizzle's pattern, which a warpgroup's share consists of
PATTERN = 8


def stores_by_warpgroup(program: TileProgram) -> TileProgram:
    """The program with the stores of which this is true marked."""
    groups = program.launch.threads // WARPGROUP
    if groups < 2 or program.launch.threads % WARPGROUP:
        return program
    apart: dict[Any, bool] = {}
    for s, ex in walk(program.func.body, Executor("block", program.launch.threads)):
        if _is_ordered(s):
            return program
        if _outward(s):
            tile = s.value.args[0].source
            apart[tile] = (
                apart.get(tile, True)
                and ex.name == "block"
                and int(tile.ty.shape[0]) % (groups * PATTERN) == 0
            )
    for s, ex in walk(program.func.body, Executor("block", program.launch.threads)):
        nest = nest_of(s)
        if nest is None:
            continue
        for a in nest.accesses:
            if apart.get(a.buffer):
                loop, _ = choose(nest, program.layouts, ex.threads)
                apart[a.buffer] = _own_rows(owners_of(nest, loop, a), int(a.buffer.ty.shape[0]) // groups)

    def mark(s: Any) -> Any:
        return (
            again(s.value, list(s.value.args), {"groups": groups})
            if _outward(s) and apart[s.value.args[0].source]
            else s
        )

    return (
        program.with_body(structural_map(program.func.body, (tirx.Evaluate, mark)))
        if any(apart.values())
        else program
    )


def _outward(s: Any) -> bool:
    """Whether a statement stores a tile by TMA, or waits until that is read."""
    return name_of(s) in ("await_stores", "tma_store")


def _is_ordered(s: Any) -> bool:
    """Whether a statement is an update by TMA, or a wait for what stores wrote: the block's first thread does
    all of them then."""
    name = name_of(s)
    return name == "await_stores" and bool(int(s.value.attrs["complete"])) or name == "tma_reduce"


def _own_rows(owners: Any, share: int) -> bool:
    """Whether all that is touched of each share of rows is touched by threads of its warpgroup."""
    if owners is None or any(owners.origin[1:]) or (owners.threads < 0).any():
        return False
    rows = (owners.ids >> COORDINATE) - (1 << COORDINATE - 1)
    return bool((owners.threads // WARPGROUP == rows // share).all())
