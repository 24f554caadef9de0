"""Layouts of a block's tiles on a GPU, beside the IR: ``program.layouts``. Registers by inference
(layout/infer.py); shared memory by what reads it: a swizzle where ldmatrix does, or where copies alone pass
on what registers hold, row-major rows elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from tilescale.compiler.ir.buffers import buffer_uses, views_of
from tilescale.compiler.ir.lowerings import lowering
from tilescale.compiler.ir.operations import name_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.layout import Fragment, Shared
from tilescale.compiler.layout.infer import Demand, Uses, conflict, gather, infer
from tilescale.compiler.layout.loops import bits_of, in_registers
from tilescale.compiler.layout.shared import boxed, strided, widest_swizzle
from tilescale.compiler.layout.viewed import carries
from tilescale.compiler.passes.annotated import layouts
from tilescale.compiler.tvm_compat import structural_walk, tirx
from tilescale.errors import TileValueError

#: bytes that the widest swizzle permutes in, and in which memory has each bank once
WIDEST = 128


def infer_layouts(program: TileProgram) -> TileProgram:
    """The program with a layout for each allocated tile.

    Raises:
        TileValueError: two statements demand different layouts of one tile.
    """
    uses = gather(program)
    annotated = _annotated(program, uses.owners)
    chosen: dict[Any, Any] = infer(
        program, {b: d for b, d in annotated.items() if isinstance(d.layout, Fragment)}
    )
    shared = {b: d.layout for b, d in annotated.items() if isinstance(d.layout, Shared)}
    over = views_of(program.func.body)
    for b, d in annotated.items():
        if b in over and b in shared and shared[b] != (plain := _row_major(b)):
            if not carries(shared[b], b, over):
                raise conflict(b, d, Demand(b, plain, "T.view", _viewed_at(program, b)))
    for use in uses.items:
        how = lowering(use.call, program.target)
        for b, layout in how.shared_layouts(use.call).items():
            if not carries(layout, b, over):  # a view reads the same bytes in row-major order
                continue
            if b in annotated and shared[b] != layout and how.insists(use.call):
                raise conflict(
                    b,
                    annotated[b],
                    Demand(b, layout, use.call.op.name.replace("ts.", "T.", 1), loc_of(use.call.span)),
                )
            shared.setdefault(b, layout)
    passing = _passing(program, uses, chosen)
    for b in uses.owners:
        if not in_registers(b):
            made = shared.get(b) or _ring_layout(program, b)
            chosen[b] = made or (_boxed(b) if b in passing else None) or _row_major(b)
    program.layouts = chosen
    return program


def _viewed_at(program: TileProgram, buffer: Any) -> Any:
    """Where a view of a tile is declared."""
    found: list[Any] = []
    structural_walk(
        program.func.body,
        (tirx.DeclBuffer, lambda s: found.append(s) if s.data.args[0].same_as(buffer) else None),
    )
    return loc_of(found[0].span)


def _row_major(buffer: Any) -> Shared:
    return strided(tuple(int(e) for e in buffer.ty.shape), bits_of(buffer))


def _passing(program: TileProgram, uses: Uses, held: Mapping[Any, Any]) -> set[Any]:
    """The block's tiles of shared memory through which copies by its threads pass on what accumulators hold,
    and which nothing else names: no view, no address and no operation of another kind. Where a thread has
    more than two neighbours, ptxas gathers its loads in front of their stores only along plain rows (the sum
    of a decoding's parts: 2 µs of 33)."""
    filled: set[Any] = set()
    passed: Counter[Any] = Counter()
    for use in uses.items:
        if use.nest is not None and name_of(use.stmt) == "copy" and use.executor.name == "block":
            src, dst = use.stmt.value.args[:2]
            passed.update(buffer_uses(use.stmt))
            layout = held.get(src.source)
            two = isinstance(layout, Fragment) and layout.vector(len(layout.shape) - 1) == 2
            if two and dst.source.ty.storage_scope == "shared":
                filled.add(dst.source)
    every = buffer_uses(program.func.body)
    return {
        b for b in filled if b in uses.owners and uses.owners[b].name == "block" and passed[b] == every[b]
    }


def _boxed(buffer: Any) -> Shared | None:
    """A tile of 16-bit numbers, whose rows are whole lines of 128 bytes, under a swizzle of as many; None for
    another. Row-major, all its rows begin in one bank, and what holds an accumulator writes eight rows at
    once (by stmatrix, or two numbers a thread). Along a row, 16 bytes a thread, nothing has conflicts either
    way."""
    shape, bits = tuple(int(e) for e in buffer.ty.shape), bits_of(buffer)
    if len(shape) != 2 or bits != 16 or shape[0] % 8 or widest_swizzle(shape[1], bits) != WIDEST:
        return None
    return boxed(shape, bits, WIDEST)


def _ring_layout(program: TileProgram, buffer: Any) -> Shared | None:
    """A ring's tile that TMA fills and threads read, as TMA writes it: boxes under the widest swizzle, or
    plain rows of 16 bytes. None for any other tile."""
    plan = program.schedule
    if plan is None or len(plan.roles) < 2 or buffer not in plan.ring_of:
        return None
    stages, *shape = (int(e) for e in buffer.ty.shape)
    if len(shape) == 1:
        return None  # numbers side by side, as they come
    bits = bits_of(buffer)
    swizzle = widest_swizzle(shape[-1], bits)
    return (boxed(tuple(shape), bits, swizzle) if swizzle else strided(tuple(shape), bits)).staged(stages)


def _annotated(program: TileProgram, owners: Mapping[Any, Any]) -> dict[Any, Demand]:
    """What T.annotate_layout fixes. A fragment over a part of the threads that divides them all is held by
    the others, too: they do what those do."""
    found: dict[Any, Demand] = {}
    for var, layout, loc in layouts(program):
        threads = owners[var].threads if var in owners else program.launch.threads
        if isinstance(layout, Fragment) and layout.threads < threads and threads % layout.threads == 0:
            layout = layout.copied(threads // layout.threads)
        if isinstance(layout, Fragment) and not (
            layout.covers and var in owners and layout.threads == threads
        ):
            raise TileValueError(
                f"T.annotate_layout gives {var.name} a fragment over {layout.threads} threads",
                loc=loc,
                expected=f"one over all {threads} threads of the executor that allocates the tile",
            )
        found[var] = Demand(var, layout, "T.annotate_layout", loc)
    return found
