"""Roles and rings on GPUs. On Hopper a producer warp fills the rings of pipelined loops by TMA and the
block's threads consume them by wgmma, where all of a kernel's rings allow it; elsewhere one role does
everything in turn, with one stage. Which of the two it is, and why, is decided here, once, and said at log
level info.

What it takes (PTX ISA 9.0, "Tensors", "Asynchronous Warpgroup Level Matrix Multiply"): copies of
two-dimensional tiles of tensors of at most five axes whose strides are multiples of 16 bytes and whose rows
lie side by side, without a change of dtype; read by threads or by products that wgmma has; one to three
warpgroups of consumers. A block whose warpgroups cannot share its products consumes with fewer of them where
the program never says which of its threads do what: the others' place is the producer's. Else what they
cannot share is left to mma.sync, where wgmma makes most of the products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

from tilescale.compiler.advice import Advice, note, reason
from tilescale.compiler.ir.buffers import written_buffers
from tilescale.compiler.ir.multiples import bound_in
from tilescale.compiler.ir.operations import REGISTRY, effects_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.scales import WARPGROUP
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.statements import statements
from tilescale.compiler.layout.fragment import Fragment
from tilescale.compiler.layout.loops import bits_of, element_dtype, in_registers
from tilescale.compiler.layout.products import extents
from tilescale.compiler.ops.mbarrier import SCOPE as BARRIERS
from tilescale.compiler.passes import annotated, boxes
from tilescale.compiler.passes import roles as splitting
from tilescale.compiler.passes.allocate_shared import placed
from tilescale.compiler.passes.copied_boxes import copied_boxes
from tilescale.compiler.passes.cp_async_rings import copies_ahead
from tilescale.compiler.passes.remove_unused import remove_unused
from tilescale.compiler.passes.room import BESIDE, WHOLE, tile_bytes
from tilescale.compiler.passes.schedule import BELOW, ROLES, below_the_block, schedule
from tilescale.compiler.passes.select_wgmma import ROWS, is_narrow, unfit_parts, unfit_product
from tilescale.compiler.passes.spare_stages import SPARE
from tilescale.compiler.passes.stage_operands import stage_operands
from tilescale.compiler.passes.tma_stores import staged_bytes
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx

#: threads of the block → registers of a consumer's and of the producer's threads, which share the
#: multiprocessor's 65,536 (multiples of 8; PTX ISA, "setmaxnreg"); None: one warpgroup, whose threads can
#: have all 255 without it
REGISTERS: dict[int, tuple[int, int] | None] = {128: None, 256: (240, 24), 384: (160, 32)}
#: the same where warps beside the producer copy to other ranks, with so much under way at once
SENDING: dict[int, tuple[int, int] | None] = {256: (216, 72), 384: (152, 56)}
#: the same where those warps look up in tensors, put by put, what they copy and to whom
FINDING: dict[int, tuple[int, int] | None] = {256: (184, 136)}
#: the same where the producer looks up in a tensor, round by round, what it copies (pages)
LOOKING: dict[int, tuple[int, int] | None] = {256: (232, 40)}


#: bytes that are left for what layouts bring: parts of sums across warps
EXCHANGED = 1024


class Unfit(Exception):
    """A kernel keeps to one role; ``str`` says why, ``loc`` where, ``hint`` what its author could write
    instead, if there is anything (a reason that is `Advice` brings it). ``threads``: another number of
    threads may be what it takes."""

    def __init__(self, reason: str, node: Any = None, loc: Any = None, threads: bool = False):
        super().__init__(reason)
        self.loc, self.hint = (
            loc or loc_of(getattr(node, "span", None)),
            reason.hint if isinstance(reason, Advice) else "",
        )
        self.threads = threads


def gpu_schedule(program: TileProgram) -> TileProgram:
    """The program at the scheduled level, as its target's copies and products allow."""
    made = _formed(replace(program, notes=list(program.notes)))
    if made.schedule.rings:  # else it has been said
        below = [k for k in made.schedule.kept if k.reason == BELOW]
        made.notes += [
            note(f"a loop copies in turn, not ahead{_place(k.loc)}: {k.reason}", k.reason, k.loc)
            for k in below
        ]
    return made


def _formed(program: TileProgram) -> TileProgram:
    stages, below = _stages(program.func.body)
    limit = program.target.shared_bytes
    if program.target.tensor_copies and program.target.group_products and (stages or below == 1):
        boxed = copied_boxes(program, _copyable(program))
        made, refused = _by_roles(boxed, limit)
        if (
            made is None and boxed is not program
        ):  # such copies have no say in whether the others have a producer
            made, _ = _by_roles(program, limit)
        if made is not None:
            return made
        program.notes.append(refused)
    if max(stages, below) > 1 and program.target.async_copies:
        ahead, kept, where = copies_ahead(program, _depth_ahead(program, limit, stages))
        if ahead is None:  # gathers may take the room of copies, which stand alone then
            ahead, *_ = copies_ahead(program, _depth_ahead(program, limit, stages, False), False)
        if ahead is not None:
            return ahead
        if _spare(program, max(stages, below)):
            return schedule(program)
        loc = getattr(where, "loc", None) or loc_of(getattr(where, "span", None))
        said = f"{program.name} copies in turn, not ahead{_place(loc)}: {kept}"
        warned = any(isinstance(n, Advice) for n in program.notes)  # of what is the first thing to change
        program.notes.append(said if warned else note(said, kept, loc))
    return schedule(program)


def _by_roles(program: TileProgram, limit: int) -> tuple[TileProgram | None, str]:
    """The program as roles, on another number of threads or with products by mma.sync among wgmma's where it
    takes that; or None, and why it is none."""
    try:
        return _with_roles(program, limit), ""
    except Unfit as why:
        other = _on_other_threads(program, limit) if why.threads else None
        if other is not None and other.launch.threads < program.launch.threads and not sees_threads(program):
            parts = f"{other.launch.threads} of {program.launch.threads} threads"
            other.notes.append(
                f"{program.name} computes on {parts}, others fill its rings{_place(why.loc)}: {why}"
            )
            return other, ""
        if why.threads and other is None and _mostly_fit(program):
            try:
                return _with_roles(program, limit, mixed=True), ""
            except Unfit:
                pass
        said = f"{program.name} does without TMA{_place(why.loc)}: {why}"
        hint = why.hint if other is None else _threads_hint(other.launch.threads)
        return None, Advice(said, why.loc, hint) if hint else said


def _copyable(program: TileProgram) -> Callable[[Any], bool]:
    """Whether TMA can make a copy into a tile that has no stages yet."""
    names = bound_in(program.func.body)

    def able(call: Any) -> bool:
        return _unfit_copy(call, program.params, list(call.args[1].source.ty.shape), names) is None

    return able


def _on_other_threads(program: TileProgram, limit: int) -> TileProgram | None:
    """The program as roles of a block with another number of threads, with which wgmma makes its products and
    whose accumulators leave each thread half of its registers for more: the next smaller number, else the
    next larger one; None where there is none."""
    products = [c for c in splitting.calls(program.func.body) if REGISTRY[c.op.name].multiplies]
    held = max(prod(int(e) for e in c.args[2].source.ty.shape) for c in products)
    given = program.launch.threads
    for threads in sorted(REGISTERS, key=lambda n: (n > given, abs(n - given))):
        if threads == given or held > threads * 128:
            continue
        try:
            return _with_roles(
                replace(program, launch=replace(program.launch, threads=threads), notes=list(program.notes)),
                limit,
            )
        except Unfit:
            continue
    return None


def sees_threads(program: TileProgram) -> bool:
    """Whether a program says which of its threads do what, or how many: parts of the block, layouts over its
    threads, arrivals that are counted. Any other means the same on fewer."""
    body = program.func.body
    found = _below(body)
    structural_walk(
        body, (tirx.AllocBuffer, lambda s: found.append(s) if s.buffer.ty.storage_scope == BARRIERS else None)
    )
    structural_walk(
        body, (tirx.For, lambda s: found.append(s) if (s.annotations or {}).get("ts.layout") else None)
    )
    return bool(found) or any(
        isinstance(layout, Fragment) for layout, _ in program.hints.get("layouts", {}).values()
    )


def _below(body: Any) -> list[Any]:
    """Every T.Scale whose executors are parts of a block."""
    found: list[Any] = []
    structural_walk(body, (tirx.AttrStmt, lambda s: found.append(s) if splitting.below(s) else None))
    return found


def _threads_hint(threads: int) -> str:
    groups = threads // WARPGROUP
    return f"threads={threads}" + (
        f", whose {groups} warpgroups share the rows in parts of {ROWS}, or the columns" if groups > 1 else ""
    )


def _place(loc: Any) -> str:
    return f" (line {loc.line})" if loc else ""


def _stages(body: Any) -> tuple[int, int]:
    """The most stages that a loop of the block asks for, and one of warps or other parts of it."""
    inside = below_the_block(body)
    stages: dict[bool, list[int]] = {True: [0], False: [0]}

    def look(f: Any) -> None:
        stages[f.loop_var in inside].append(int((f.annotations or {}).get("ts.num_stages", 0)))

    structural_walk(body, (tirx.For, look))
    return max(stages[False]), max(stages[True])


def _spare(program: TileProgram, stages: int) -> bool:
    """Whether no loop's author asked for so many stages, but memory that is left over (spare_stages.py)."""
    return stages == SPARE and "spare_stages" in program.hints


def _mostly_fit(program: TileProgram) -> bool:
    """Whether wgmma makes most of a program's products, as their multiply-adds count, and whole sums of them;
    threads make the others, by mma.sync."""
    work, sums = {True: 0, False: 0}, {True: set[Any](), False: set[Any]()}
    for call in splitting.calls(program.func.body):
        if REGISTRY[call.op.name].multiplies:
            fits = unfit_parts(call, program.launch.threads) is None
            work[fits] += prod(extents(call))
            sums[fits].add(call.args[2].source)
    return work[True] > work[False] and sums[True].isdisjoint(sums[False])


def _with_roles(program: TileProgram, limit: int, mixed: bool = False) -> TileProgram:
    """``mixed``: products that wgmma cannot share among so many threads are left to the threads."""
    if program.launch.threads not in REGISTERS:
        multiplies = any(REGISTRY[c.op.name].multiplies for c in splitting.calls(program.func.body))
        why = f"a block of {program.launch.threads} threads is no 1, 2 or 3 warpgroups"
        hint = "threads=128, 256 or 384, and tiles of T.gemm that so many threads hold in registers"
        raise Unfit(reason(why, hint) if multiplies else why, loc=program.launch.loc, threads=multiplies)
    asked, _ = _stages(program.func.body)
    made = _scheduled(program, asked)
    depth = _depth(limit, made)
    if depth < asked and program.sharing:
        depth = max(depth, _shared_depth(limit, made, asked))
    if depth < 1:
        raise Unfit(reason("its tiles fill shared memory, whole", "smaller tiles in shared memory"))
    if depth < asked:
        made = _scheduled(program, depth)
    if any(r.single for r in made.schedule.rings):
        made = _double_buffered(program, depth, limit) or made
    made = remove_unused(made)  # names that only the producer reads
    plan = made.schedule
    if not plan.rings or any(r.form != ROLES for r in plan.rings):
        first = plan.kept[0] if plan.kept else None
        raise Unfit(first.reason if first else "no copy fills a ring", loc=first.loc if first else None)
    _check_place(made)
    _check_copies(made)
    _check_readers(made, mixed)
    if (refused := annotated.unfit(made)) is not None:
        raise Unfit(refused[0], loc=refused[1])
    if depth < asked and not _spare(program, asked):
        where = next(r.loc for r in plan.rings if r.asked == asked)
        room = f"no more fit into {limit:,} bytes of shared memory"
        said = f"{program.name} has {depth} stages where {asked} were asked for: {room}"
        made.notes.append(Advice(said, where, f"num_stages={depth}, or smaller tiles, of which more fit"))
    return made


def _depth(limit: int, made: TileProgram) -> int:
    """The most stages that every ring of loops can have, beside everything else that the block has in shared
    memory, by a schedule of any depth."""
    sizes, rings = tile_bytes(made), made.schedule.rings
    staged = {b: rings[n] for b, n in made.schedule.ring_of.items() if b in sizes and not rings[n].single}
    one = sum(-(-(sizes[b] // r.depth) // WHOLE) * WHOLE for b, r in staged.items())
    rest = sum(n for b, n in sizes.items() if b not in staged)
    return int((limit - rest - BESIDE) // one) if one else limit  # no ring wants room


def _shared_depth(limit: int, made: TileProgram, asked: int) -> int:
    """The same where tiles that are never alive together share bytes, those of rings with what is touched
    behind their loops; ``asked`` at most. 0: not even one stage fits."""
    sizes, plan = tile_bytes(made), made.schedule

    def fits(depth: int) -> bool:
        def size(buffer: Any) -> tuple[int, int]:
            nbytes, ring = sizes[buffer], plan.ring_of.get(buffer)
            if ring is not None and not plan.rings[ring].single:
                nbytes = nbytes // plan.rings[ring].depth * depth
            return nbytes, WHOLE if nbytes >= WHOLE else 128

        return placed(made, size, ends=True)[1] + BESIDE + EXCHANGED <= limit

    return next((depth for depth in range(asked, 0, -1) if fits(depth)), 0)


def _depth_ahead(program: TileProgram, limit: int, asked: int, gathers: bool = True) -> int:
    """The most stages that every ring can have whose copies run ahead."""
    two = stage_operands(schedule(program, depth=2, ahead=True, gathers=gathers))
    depth = _depth(limit, two)
    return max(depth, _shared_depth(limit, two, asked)) if depth < asked and program.sharing else depth


def _double_buffered(program: TileProgram, depth: int, limit: int) -> TileProgram | None:
    """The program with two stages for tiles that are filled anew in every round of a loop around, where they
    fit beside the results on their way out; else None. A block that stays then copies what its next tile
    needs while it works on this one."""
    made = _scheduled(program, depth, 2)
    fits = sum(tile_bytes(made).values()) + staged_bytes(made) + BESIDE <= limit
    return made if fits and any(r.single and r.depth == 2 for r in made.schedule.rings) else None


def _scheduled(program: TileProgram, depth: int, single_depth: int = 1) -> TileProgram:
    written, able = written_buffers(program), _copyable(program)

    def alone(call: Any) -> bool:
        return call.args[0].source not in written and able(call)

    return schedule(
        program, depth=depth, roles=splitting.ROLES, by_reader=True, alone=alone, single_depth=single_depth
    )


# ---- what it takes


def _check_place(program: TileProgram) -> None:
    """One region, the whole kernel: what stands around it is variables alone."""
    body = program.func.body
    while isinstance(body, tirx.AttrStmt) and body.attr_key != "ts.role":
        if splitting.below(body):
            raise Unfit("its loops stand inside a T.Scale", body)
        body = body.body
    stmts = statements(body)
    roles = [s for s in stmts if isinstance(s, tirx.AttrStmt) and s.attr_key == "ts.role"]
    inside: list[Any] = []
    structural_walk(body, (tirx.AttrStmt, lambda s: inside.append(s) if s.attr_key == "ts.role" else None))
    plain = [s for s in stmts if not any(s is r for r in roles)]
    if (
        len(roles) not in (2, 3)
        or len(inside) != len(roles)
        or any(not isinstance(s, (tirx.AllocBuffer, tirx.BufferStore, tirx.Bind)) for s in plain)
    ):
        raise Unfit(
            "what its loops copy and what they compute cannot be taken apart for the kernel as a whole",
            program.launch,
        )


def _check_copies(program: TileProgram) -> None:
    """Every fill of a ring is a copy that TMA can do."""
    names = bound_in(program.func.body)
    for call in splitting.calls(program.func.body):
        if REGISTRY[call.op.name].fills:
            tile = call.args[1].region[1:]
            why = _unfit_copy(call, program.params, [r.extent for r in tile], names)
            if why := why or _unfit_part(call.args[1]):
                raise Unfit(why, call)


def _unfit_part(dst: Any) -> str | None:
    """Why TMA cannot fill this part of a ring's stage; None where it can, as it can the whole. A part begins
    and ends where groups of the widest swizzle do, eight rows of 128 bytes."""
    tile, shape = dst.region[1:], [int(e) for e in dst.source.ty.shape[1:]]
    if [int(r.extent) for r in tile] == shape:
        return None
    each = (8, 1024 // bits_of(dst.source))
    if len(shape) == 2 and all(
        int(r.extent) == e or int(r.min) % n == 0 == int(r.extent) % n
        for r, e, n in zip(tile, shape, each, strict=True)
    ):
        return None
    return reason(
        f"a copy fills a part of {dst.source.name} that a swizzle does not end with",
        f"parts of multiples of {each[0]} rows and {each[1]} columns",
    )


def _unfit_copy(call: Any, params: Any, extents: list[Any], names: dict[Any, Any]) -> str | None:
    """Why TMA cannot make a copy into a tile of these extents; None where it can. ``names``: what names stand
    for."""
    src, dst = call.args[:2]
    var, name = src.source, src.source.name
    if "by_threads" in call.attrs:
        return f"T.copy(…, disable_tma=True) of {name}"
    if len(call.args) > 2:
        return f"{name} is no tensor of this rank alone"
    if element_dtype(var) != element_dtype(dst.source):
        hint = (
            f"a tile of {element_dtype(var)}, and the change of dtype in a T.copy of that tile into a "
            "fragment"
        )
        return reason(f"the copy of {name} changes the dtype", hint)
    return boxes.unfit(src, [int(e) for e in extents], params, names, symmetric=True)


def _check_readers(program: TileProgram, mixed: bool) -> None:
    """Rings are read element by element, by copies into registers, and by products that wgmma can do, unless
    they are ``mixed``; all of them by the whole block."""
    rings = program.schedule.ring_of
    views: list[Any] = []
    structural_walk(
        program.func.body,
        (tirx.DeclBuffer, lambda s: views.append(s.data) if s.data.args[0] in rings else None),
    )
    if views:
        raise Unfit("a tile of a ring is viewed", views[0])
    scaled = [s for s in _below(program.func.body) if splitting.below(s) != "thread"]
    for s in scaled:
        structural_walk(s, (ir.TensorLoad, lambda e: views.append(e) if e.source in rings else None))
        if views or any(a.region.source in rings for c in splitting.calls(s) for a in effects_of(c)):
            raise Unfit("a tile of a ring is read inside a T.Scale", s)
    for call in splitting.calls(program.func.body):
        op = REGISTRY[call.op.name]
        touched = [a.region.source.name for a in effects_of(call) if a.region.source in rings]
        if not touched or op.fills:
            continue
        if op.moves and in_registers(call.args[1].source) or op.name == "gemm" and is_narrow(call):
            continue
        if not op.multiplies:
            hint = f"T.copy of {touched[0]} into a fragment, which T.{op.name} reads instead"
            raise Unfit(reason(f"T.{op.name} reads {touched[0]}", hint), call)
        if why := unfit_product(call, program):
            raise Unfit(why, call)
        if not mixed and (why := unfit_parts(call, program.launch.threads)):
            raise Unfit(why, call, threads=True)
