"""The list of passes, in the order in which they run. Read it aloud: each line says what it does and why it
stands there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tilescale.compiler.ir import spec
from tilescale.compiler.ir.program import TileProgram, Traceable
from tilescale.compiler.ir.target import CPU, Target
from tilescale.compiler.ir.text import text
from tilescale.compiler.ops.gemm_sp import written_out
from tilescale.compiler.passes.allocate_shared import NoRoom, allocate_shared
from tilescale.compiler.passes.await_products import awaited_products
from tilescale.compiler.passes.await_rows import await_rows
from tilescale.compiler.passes.awaited import awaited
from tilescale.compiler.passes.check_aliasing import check_aliasing
from tilescale.compiler.passes.convert_layouts import convert_layouts
from tilescale.compiler.passes.copies_together import copies_together
from tilescale.compiler.passes.decided import decided
from tilescale.compiler.passes.defer_cross_lane_sums import defer_cross_lane_sums
from tilescale.compiler.passes.elide_proxy_fences import elide_proxy_fences
from tilescale.compiler.passes.expand_collectives import expand_collectives
from tilescale.compiler.passes.expert_products import expert_products
from tilescale.compiler.passes.gathers import begun_copies
from tilescale.compiler.passes.gpu_schedule import gpu_schedule
from tilescale.compiler.passes.hoist_store_waits import hoist_store_waits
from tilescale.compiler.passes.infer_layouts import infer_layouts
from tilescale.compiler.passes.insert_barriers import insert_barriers
from tilescale.compiler.passes.issue_early import issue_early
from tilescale.compiler.passes.layouts import layouts
from tilescale.compiler.passes.manual_stages import manual_stages
from tilescale.compiler.passes.merged_views import merged_views
from tilescale.compiler.passes.multicast import multicast, without_reach
from tilescale.compiler.passes.narrow_tiles import narrow_tiles
from tilescale.compiler.passes.neighbours import neighbours
from tilescale.compiler.passes.overlap_products import overlap_products, split_rounds
from tilescale.compiler.passes.own_registers import own_registers
from tilescale.compiler.passes.packets import packets
from tilescale.compiler.passes.peer_rows import peer_rows
from tilescale.compiler.passes.ping_pong import ping_pong
from tilescale.compiler.passes.release_late import release_late
from tilescale.compiler.passes.remote_puts import remote_puts
from tilescale.compiler.passes.remove_unused import remove_unused
from tilescale.compiler.passes.residency import residency
from tilescale.compiler.passes.schedule import schedule
from tilescale.compiler.passes.select_wgmma import select_wgmma
from tilescale.compiler.passes.skip_masks import skip_masks
from tilescale.compiler.passes.spare_stages import spare_stages
from tilescale.compiler.passes.spelt_indices import spelt_indices
from tilescale.compiler.passes.split_puts import split_puts
from tilescale.compiler.passes.stage_operands import stage_operands
from tilescale.compiler.passes.stores_by_warpgroup import stores_by_warpgroup
from tilescale.compiler.passes.structured_exits import structured_exits
from tilescale.compiler.passes.tile_owners import tile_owners
from tilescale.compiler.passes.tiles_in_registers import tiles_in_registers
from tilescale.compiler.passes.tma_stores import tma_stores
from tilescale.compiler.tvm_compat import same_structure
from tilescale.env import DUMP, WITHOUT
from tilescale.errors import TileValueError


@dataclass(frozen=True)
class Pass:
    """A named step from a level to a level (see ir/spec.py)."""

    name: str
    run: Callable[[TileProgram], TileProgram]
    level: str
    #: it makes some kernels faster, and none of them right: TILESCALE_WITHOUT may leave it out
    optional: bool = False


#: Tile IR → tile IR → scheduled tile IR. What follows is the target's: compiler/cpu/lower.py makes thread IR
#: of it.
PASSES: tuple[Pass, ...] = (
    # What means something else on each target is refused on all of them, as it is written.
    Pass("tile_owners", tile_owners, spec.TILE),
    Pass("check_aliasing", check_aliasing, spec.TILE),
    # The author's own schedule next: its entries count the statements as they are written.
    Pass("manual_stages", manual_stages, spec.TILE),
    # Collectives next: what they become (remote copies, barriers) is scheduled like anything that the author
    # wrote.
    Pass("expand_collectives", expand_collectives, spec.TILE),
    # Exits: the passes behind it may cut, guard and move statements of a loop without minding jumps.
    Pass("structured_exits", structured_exits, spec.TILE),
    # Names bound to a tile's base (`tile = A[i, 0]`) leave a load behind that nobody reads and that may lie
    # outside.
    Pass("remove_unused", remove_unused, spec.TILE),
    # Behind exits and unused names, as which it would take a return for a put that may not happen, and a part
    # of a box for a read of it.
    Pass("packets", packets, spec.TILE),
    Pass("awaited", awaited, spec.TILE),
    # Where copies end that TMA makes beside their executor: all that others may hear of them by stands there.
    Pass("await_rows", await_rows, spec.TILE),
    # Whatever asks how a loop's iterations lie among threads sees the one form of it.
    Pass("neighbours", neighbours, spec.TILE),
    # Rings and roles last: every copy that they move is known by now.
    Pass("schedule", schedule, spec.SCHEDULED),
    # Behind the schedule, whose rings decide how much shared memory a block has and so how many blocks are
    # resident.
    Pass("residency", residency, spec.SCHEDULED),
    # Products of what is kept of a sparse operand are those of a whole tile on the CPU; its layout is chosen
    # with the others'.
    Pass("written_out", written_out, spec.SCHEDULED),
    # Layouts behind the rings: a stage axis is part of a tile's shape by now.
    Pass("layouts", layouts, spec.SCHEDULED),
)


#: The list for GPUs. What follows is the target's lowering: compiler/cuda/lower.py.
GPU_PASSES: tuple[Pass, ...] = (
    *(p for p in PASSES if p.level == spec.TILE),
    # What is known needs no room, no mask and no rounds in all that follows.
    Pass("decided", decided, spec.TILE, optional=True),
    # Rows of a thread's own are registers to all that follows.
    Pass("own_registers", own_registers, spec.TILE),
    # A part of a view is a part of its tensor to all that asks what engines can copy.
    Pass("merged_views", merged_views, spec.TILE),
    # Which copies engines can make is asked from here on.
    Pass("narrow_tiles", narrow_tiles, spec.TILE, optional=True),
    # A branch of the whole block is cut in two with its round, wherever rounds are.
    Pass("skip_masks", skip_masks, spec.TILE, optional=True),
    # As many stages as there will be, of tiles of the dtype that they will have.
    Pass("spare_stages", spare_stages, spec.TILE, optional=True),
    # A put is a copy like others to all that follows, and its signal a signal.
    Pass("split_puts", split_puts, spec.TILE),
    # Copies by TMA to other ranks come without their signals, and their tiles take of the rings' room.
    Pass("peer_rows", peer_rows, spec.TILE),
    # What says only whom statements reach would keep a region of two roles from being the whole kernel.
    Pass("without_reach", without_reach, spec.TILE),
    # Which copies run ahead, and who makes them, depends on what the target's copies and products can do.
    Pass("schedule", gpu_schedule, spec.SCHEDULED),
    # Nests that the author awaits are copies of threads from here on; none of them fills a ring.
    Pass("begun_copies", begun_copies, spec.SCHEDULED),
    # What has found no ring by now is copied in turn.
    Pass("copies_together", copies_together, spec.SCHEDULED, optional=True),
    # Who makes non-blocking copies to other ranks follows from the roles.
    Pass("remote_puts", remote_puts, spec.SCHEDULED),
    # Where a producer fills the rings: blocks of a cluster copy for each other, by the copies' own
    # coordinates.
    Pass("multicast", multicast, spec.SCHEDULED, optional=True),
    # Products are wgmma's before loops are arranged around them.
    Pass("select_wgmma", select_wgmma, spec.SCHEDULED),
    # A loop is arranged in one of four ways, the one that gains most first.
    Pass("release_late", release_late, spec.SCHEDULED, optional=True),
    Pass("overlap_products", overlap_products, spec.SCHEDULED, optional=True),
    Pass("ping_pong", ping_pong, spec.SCHEDULED, optional=True),
    Pass("split_rounds", split_rounds, spec.SCHEDULED, optional=True),
    # Behind all that moves products: each wait stands in front of what it is for.
    Pass("await_products", awaited_products, spec.SCHEDULED),
    # Results leave by TMA through what the rings leave of shared memory, and their waits go where a barrier
    # is anyway.
    Pass("tma_stores", tma_stores, spec.SCHEDULED, optional=True),
    Pass("hoist_store_waits", hoist_store_waits, spec.SCHEDULED, optional=True),
    # The author's own TMA copies and products.
    Pass("expert_products", expert_products, spec.SCHEDULED),
    Pass("residency", residency, spec.SCHEDULED),
    # Layouts follow indices, not names.
    Pass("spelt_indices", spelt_indices, spec.SCHEDULED),
    # Operands first: the tiles that this adds take part in everything below.
    Pass("stage_operands", stage_operands, spec.SCHEDULED),
    # Whoever needs a tile in shared memory has it there by now.
    Pass("tiles_in_registers", tiles_in_registers, spec.SCHEDULED, optional=True),
    Pass("infer_layouts", infer_layouts, spec.SCHEDULED),
    # Only layouts say who has parts of a sum, and which threads need what others hold: sums across warps are
    # exchanged there once their loops are done.
    Pass("defer_cross_lane_sums", defer_cross_lane_sums, spec.SCHEDULED, optional=True),
    Pass("convert_layouts", convert_layouts, spec.SCHEDULED),
    # The arena before the fences: tiles that share bytes must be ordered too.
    Pass("allocate_shared", allocate_shared, spec.SCHEDULED),
    # Who writes what is known now, and the fences follow from who stores it.
    Pass("stores_by_warpgroup", stores_by_warpgroup, spec.SCHEDULED, optional=True),
    # How many stages a ring has is known, and who reads them.
    Pass("issue_early", issue_early, spec.SCHEDULED, optional=True),
    # Fences last: they order what all the others made.
    Pass("insert_barriers", insert_barriers, spec.SCHEDULED),
    # Behind them: whoever gives a stage back may have made a fence already.
    Pass("elide_proxy_fences", elide_proxy_fences, spec.SCHEDULED, optional=True),
)
#: what the lowering does for some kernels and may be left out too: code of its own for each warpgroup, 16-bit
#: arithmetic two at a time, tensor maps fetched at the kernel's beginning
LOWERED = ("warpgroup_code", "packed_halves", "prefetched_maps")
#: the last pass that leaves the order of arithmetic as it is, so that the simulator may compare to the bit
SIMULATED = "stage_operands"


@dataclass
class Step:
    """What a pass left behind, for people. ``changed``: it made another text; where no texts are kept, nobody
    knows."""

    name: str
    text: str
    milliseconds: float
    changed: bool


@dataclass
class Trace:
    """What every pass left behind."""

    steps: list[Step] = field(default_factory=list)


def passes_for(target: Target) -> tuple[Pass, ...]:
    """The list for a target."""
    return GPU_PASSES if target.gpu else PASSES


def chosen(target: Target) -> Iterator[Pass]:
    """The passes for a target but those that TILESCALE_WITHOUT names.

    Raises:
        TileValueError: it names one that there is not, or that kernels cannot do without.
    """
    left_out = WITHOUT.get()
    optional = [p.name for p in GPU_PASSES if p.optional]
    if wrong := [name for name in left_out if name not in (*optional, *LOWERED)]:
        raise TileValueError(
            f"TILESCALE_WITHOUT={','.join(left_out)}: {wrong[0]}",
            expected="some of " + ", ".join([*optional, *LOWERED]),
        )
    return (p for p in passes_for(target) if p.name not in left_out)


def run(program: TileProgram, target: Target = CPU, *, keep: bool = False) -> tuple[TileProgram, Trace]:
    """See `_run`. How many stages fit is decided before there are layouts; where those bring more than was
    left for them, once more with as many stages as fit beside everything else."""
    try:
        return _run(program, target, keep)
    except NoRoom:
        if not program.sharing:
            raise
        return _run(replace(program, sharing=False), target, keep)


def _run(program: TileProgram, target: Target, keep: bool) -> tuple[TileProgram, Trace]:
    """A traced program at the scheduled level. Every step is verified; ``TILESCALE_DUMP=dir`` writes what
    each left behind.

    Args:
        target: what it is compiled for.
        keep: keep the text of every step in the returned trace.

    Raises:
        InternalError: a pass left something that its level does not allow.
    """
    trace = Trace()
    folder = DUMP.get()
    verify = spec.Verifier().verify
    verify(program.func, spec.TILE, "trace")
    program = replace(program, target=target, without=WITHOUT.get())
    shown = _show(trace, program, "trace", 0.0, "", keep, folder)
    fired: list[str] = []
    for step in chosen(target):
        start, before = time.perf_counter(), program.func.body
        program = step.run(program)
        took = (time.perf_counter() - start) * 1e3
        verify(program.func, step.level, step.name)
        if (
            step.optional
            and not before.same_as(program.func.body)
            and not same_structure(before, program.func.body)
        ):
            fired.append(step.name)
        shown = _show(trace, program, step.name, took, shown, keep, folder)
    return replace(program, fired=fired), trace


def tile_level(kernel: TileProgram | Traceable) -> TileProgram:
    """A kernel behind the passes that stay at the tile level: a ``@T.prim_func`` or a traced program; a
    scheduled one as it is."""
    program = kernel if isinstance(kernel, TileProgram) else kernel.trace()
    if program.schedule is not None:
        return program
    for step in PASSES:
        if step.level == spec.TILE:
            program = step.run(program)
    return program


def gpu_scheduled(program: TileProgram, target: Target) -> TileProgram:
    """A program of the tile level behind a GPU's passes up to `SIMULATED`: roles, rings, engines, and where
    operands lie. What refuses grids (residency) is left out."""
    program = replace(program, target=target)
    shared = {p.name for p in PASSES if p.level == spec.TILE}
    for step in chosen(target):
        if step.name not in shared and step.name != "residency":
            program = step.run(program)
            spec.verify(program.func, step.level, step.name)
        if step.name == SIMULATED:
            break
    return program


def _show(
    trace: Trace, program: TileProgram, name: str, took: float, before: str, keep: bool, folder: Any
) -> str:
    """Adds a step, whose text it returns; ``before``: the step before's."""
    shown = text(program) if keep or folder else ""
    trace.steps.append(Step(name, shown, took, shown != before))
    if folder:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        said = f"# {name}: {'' if shown != before else 'nothing changed, '}{took:.2f} ms\n"
        (path / f"{program.name}.{len(list(path.glob(f'{program.name}.*'))):02d}.{name}.py").write_text(
            said + shown, encoding="utf-8"
        )
    return shown
