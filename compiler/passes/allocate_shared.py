"""Shared memory of a block as one arena: tiles that are never alive together share bytes, small ones aside,
since sharing costs a barrier of the threads.

A tile lives from its first use to its last; a use inside a loop that does not hold the tile's allocation
makes it live through the whole loop, since its value may be wanted in the next round. Executors below the
block run side by side, in no order: what they use lives through their whole T.Scale, and what one of them
allocates is there once for each.

A tile of a ring lives through the whole kernel, since the producer runs ahead of the text. Where shared
memory would not do, it ends behind the last release of its ring, or behind the outermost loop around that:
then every round that was filled has been awaited and read, and there will be no other. What the block's
threads touch behind that may share its bytes; `insert_barriers` puts a barrier of these threads in front.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilescale.compiler.ir.holders import holders
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.scales import SCALES, WIDTHS
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx
from tilescale.errors import TileValueError

ALIGN = 16
#: what TMA asks of a place in shared memory (PTX ISA, "cp.async.bulk.tensor")
TMA_ALIGN = 128
#: bytes up to which a tile keeps a place of its own
SMALL = 1024


class NoRoom(TileValueError):
    """A block's tiles do not fit."""


@dataclass
class Resident:
    """A tile in shared memory: its bytes (of all executors that have one), when it lives, and where it
    lies."""

    buffer: Any
    bytes: int
    align: int
    span: Any
    first: int = -1
    last: int = -1
    offset: int = 0

    def touches(self, start: int, end: int) -> None:
        self.first = start if self.first < 0 else min(self.first, start)
        self.last = max(self.last, end)


class _Lifetimes:
    """Numbers the statements of a program and notes when tiles are used. ``size``: the bytes of a tile, and
    what its place is a multiple of. ``ends``: rings end with their last release."""

    def __init__(self, program: TileProgram, size: Callable[[Any], tuple[int, int]], ends: bool):
        self.size, self.ends, self.rings = size, ends, program.schedule
        self.clock = 0
        self.tiles: dict[Any, Resident] = {}
        self.bases: dict[Any, Any] = {}
        self.open: list[
            tuple[int, list[Any]]
        ] = []  # loops and scales around: their start, the tiles used inside
        self.inside: dict[Any, int] = {}  # how many of them are around a tile's allocation
        self.holders = holders(program)
        self.visit(program.func.body)

    def visit(self, s: Any) -> None:
        if isinstance(s, tirx.SeqStmt):
            for inner in s.seq:
                self.visit(inner)
        elif isinstance(s, tirx.AttrStmt):
            name = SCALES[int(s.value.value)] if s.attr_key == "ts.scale" else ""
            if name in WIDTHS:
                self.scope(s.body, scale=True)
            else:
                self.visit(s.body)
        elif isinstance(s, (tirx.For, tirx.While)):
            self.uses(s.extent if isinstance(s, tirx.For) else s.condition)
            self.scope(s.body)
            self.uses(s.extent if isinstance(s, tirx.For) else s.condition)
        elif isinstance(s, tirx.IfThenElse):
            self.uses(s.condition)
            self.visit(s.then_case)
            if s.else_case is not None:
                self.visit(s.else_case)
        elif isinstance(s, tirx.AllocBuffer):
            self.allocate(s)
        elif isinstance(s, tirx.DeclBuffer):
            self.bases[s.buffer] = s.data.args[0]
            self.uses(s)
        else:
            self.uses(s)

    def allocate(self, s: Any) -> None:
        if not s.buffer.ty.storage_scope.startswith("shared"):
            return
        nbytes, align = self.size(s.buffer)
        staged = self.rings is not None and s.buffer in self.rings.ring_of and len(self.rings.roles) > 1
        align = max(ALIGN, align)
        total = -(-nbytes // align) * align * len(self.holders[s.buffer])
        self.tiles[s.buffer] = Resident(s.buffer, total, align, s.span)
        self.inside[s.buffer] = len(self.open)
        if staged:  # the producer runs ahead of the text, across tiles
            self.tiles[s.buffer].touches(0, 0 if self.ends else 1 << 30)
            self.inside[s.buffer] = 0
            self.tiles[s.buffer].align = max(align, TMA_ALIGN)
        # others may reach a signal from the first statement to the last
        if s.buffer.ty.storage_scope in ("shared.signal", "shared.barrier") or total <= SMALL:
            self.tiles[s.buffer].touches(0, 1 << 30)

    def scope(self, body: Any, scale: bool = False) -> None:
        """A loop's or a scale's body: what it uses and did not allocate lives through all of it; in a scale
        all that it uses."""
        start = self.clock
        used: list[Any] = []
        self.open.append((start, used))
        self.visit(body)
        self.open.pop()
        for b in used:
            if scale or self.inside[b] <= len(self.open):
                self.tiles[b].touches(start, self.clock)

    def uses(self, node: Any) -> None:
        self.clock += 1
        if isinstance(node, int):
            return

        def note(buffer: Any) -> None:
            while buffer in self.bases:
                buffer = self.bases[buffer]
            if buffer in self.tiles:
                self.tiles[buffer].touches(self.clock, self.clock)
                for _, used in self.open:
                    used.append(buffer)

        def reached(call: Any) -> None:
            if call.op.name == "ts.remote_copy" and str(call.attrs["reach"]) == "cta_cluster":
                tile = call.args[1 if str(call.attrs["side"]) == "dst" else 0].source
                if tile in self.tiles:  # when other blocks are there, the text of this one does not say
                    self.tiles[tile].touches(0, 1 << 30)
            elif call.op.name == "ts.ring_release" and self.rings is not None:
                for buffer, number in self.rings.ring_of.items():  # whoever read it has by now
                    if number == int(call.attrs["ring"]):
                        note(buffer)

        structural_walk(node, (ir.Call, reached))
        structural_walk(node, ((ir.TensorRegion, ir.TensorLoad), lambda n: note(n.source)))
        structural_walk(node, (tirx.BufferStore, lambda n: note(n.buffer)))
        structural_walk(node, (tirx.DeclBuffer, lambda n: note(n.data.args[0])))


def allocate_shared(program: TileProgram) -> TileProgram:
    """The program with ``arena`` (tile → byte offset and bytes), ``arena_bytes`` and ``holders``.

    Raises:
        NoRoom: more than a block may have; the text is a table of who uses what.
    """

    def size(buffer: Any) -> tuple[int, int]:
        layout = program.layouts[buffer]
        return layout.bytes, layout.alignment

    plan, limit = program.schedule, program.target.shared_bytes
    roles = plan is not None and len(plan.roles) > 1
    barriers = sum(2 * 8 * ring.depth for ring in plan.rings) if roles else 0
    tiles, total = placed(program, size)
    if roles and total + barriers > limit:
        tiles, total = placed(program, size, ends=True)
    program.arena = {t.buffer: (t.offset, t.bytes) for t in tiles}
    program.arena_bytes, program.holders = total, holders(program)
    if roles:
        program.arena_bytes += -program.arena_bytes % 8
        for ring in plan.rings:  # full and empty, a word of 8 bytes for each stage
            ring.barriers = program.arena_bytes
            program.arena_bytes += 2 * 8 * ring.depth
    if program.arena_bytes > limit:
        raise _too_much(program, tiles, limit)
    return program


def placed(
    program: TileProgram, size: Callable[[Any], tuple[int, int]], ends: bool = False
) -> tuple[list[Resident], int]:
    """The tiles of a program with their places, and the bytes of all; see `_Lifetimes`."""
    tiles = list(_Lifetimes(program, size, ends).tiles.values())
    done: list[Resident] = []
    for t in sorted(tiles, key=lambda t: (-t.align, -t.bytes)):
        t.offset = _lowest(t, [p for p in done if t.first <= p.last and p.first <= t.last])
        done.append(t)
    return tiles, max((t.offset + t.bytes for t in tiles), default=0)


def _lowest(t: Resident, others: list[Resident]) -> int:
    """The lowest offset at which a tile does not overlap any of ``others``."""
    at = 0
    for p in sorted(others, key=lambda p: p.offset):
        if at + t.bytes <= p.offset:
            break
        at = max(at, -(-(p.offset + p.bytes) // t.align) * t.align)
    return at


def _too_much(program: TileProgram, tiles: list[Resident], limit: int) -> NoRoom:
    rows = []
    for t in sorted(tiles, key=lambda t: -t.bytes):
        loc = loc_of(t.span)
        place = f"{loc.file}:{loc.line}" if loc else ""
        rows.append(f"  {t.buffer.name:<20} {t.bytes:>9}  {place}")
    table = "\n".join([f"  {'tile':<20} {'bytes':>9}  allocated at", *rows])
    largest = max(tiles, key=lambda t: t.bytes)
    return NoRoom(
        f"{program.name} needs {program.arena_bytes} bytes of shared memory, and a block has "
        f"{limit}:\n{table}",
        loc=loc_of(largest.span) or program.launch.loc,
        expected=f"at most {limit} bytes alive at once",
        hint="smaller tiles, or fewer stages",
    )
