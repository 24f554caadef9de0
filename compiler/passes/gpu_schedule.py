"""Roles and rings on GPUs. On Hopper a producer warp fills the rings of pipelined loops by TMA and the block's threads consume them by
wgmma, where all of a kernel's rings allow it; elsewhere one role does everything in turn, with one stage. Which of the two it is, and
why, is decided here, once, and said at log level info.

What it takes (PTX ISA 9.0, "Tensors", "Asynchronous Warpgroup Level Matrix Multiply"): copies of two-dimensional tiles of tensors of at
most five axes whose strides are multiples of 16 bytes and whose rows lie side by side, without a change of dtype; read by threads
or by products that wgmma has; one to three warpgroups of consumers. A block whose warpgroups cannot share its products consumes with
fewer of them where the program never says which of its threads do what: the others' place is the producer's.

A stage is read until the products that read it are complete. Where a loop does nothing but multiply, they are awaited one round late, so
that the tensor cores never run dry: the stage of round n - 1 is released behind the products of round n, and the last round's behind
the loop.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from tilescale.compiler.advice import Advice, note, reason
from tilescale.compiler.ir.buffers import written_buffers
from tilescale.compiler.ir.multiples import bound_in
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import REGISTRY
from tilescale.compiler.ir.scales import SCALES, WARPGROUP
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ir.tokens import late_release
from tilescale.compiler.layout import tensor_cores
from tilescale.compiler.layout.fragment import Fragment
from tilescale.compiler.layout.loops import bits_of, element_dtype, in_registers
from tilescale.compiler.layout.products import extents, swizzled, wgmma_fragments
from tilescale.compiler.layout.sparse import sparse_fragments, unfit_sparse
from tilescale.compiler.ops.mbarrier import SCOPE as BARRIERS
from tilescale.compiler.ops.wgmma import FREE, await_products, wgmma
from tilescale.compiler.passes import annotated, boxes
from tilescale.compiler.passes import roles as splitting
from tilescale.compiler.passes.gpu_ahead import copies_ahead
from tilescale.compiler.passes.gpu_stage import gpu_stage, is_whole
from tilescale.compiler.passes.gpu_store import staged_bytes, tma_stores
from tilescale.compiler.passes.multicast import multicast, without_reach
from tilescale.compiler.passes.products import awaited, flat, is_product, name_of, operands_of, overlapped
from tilescale.compiler.passes.products_by_hand import products_by_hand
from tilescale.compiler.passes.remove_unused import remove_unused
from tilescale.compiler.passes.schedule import BELOW, ROLES, schedule
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx

ROWS = 64
#: the policy by which warpgroups lie below one another (T.GemmWarpPolicy)
FULL_ROW = 1
#: threads of the block → registers of a consumer's and of the producer's threads, which share the multiprocessor's 65,536
#: (multiples of 8; PTX ISA, "setmaxnreg"); None: one warpgroup, whose threads can have all 255 without it
REGISTERS: dict[int, tuple[int, int] | None] = {128: None, 256: (240, 24), 384: (160, 32)}
#: the same where the producer looks up in a tensor, round by round, what it copies (pages)
LOOKING: dict[int, tuple[int, int] | None] = {256: (232, 40)}
#: columns of a product that mma.sync does as well where its left operand lies in registers
NARROW = 16
#: bytes of shared memory beside the tiles: barriers
BESIDE = 1024


class Unfit(Exception):
    """A kernel keeps to one role; ``str`` says why, ``loc`` where, ``hint`` what its author could write instead, if there is anything
    (a reason that is `Advice` brings it). ``threads``: another number of threads may be what it takes."""

    def __init__(self, reason: str, node: Any = None, loc: Any = None, threads: bool = False):
        super().__init__(reason)
        self.loc, self.hint = loc or loc_of(getattr(node, "span", None)), reason.hint if isinstance(reason, Advice) else ""
        self.threads = threads


def gpu_schedule(program: Any) -> Any:
    """The program at the scheduled level, as its target's copies and products allow."""
    made = _formed(without_reach(replace(program, notes=list(program.notes))))
    if made.schedule.rings:  # else it has been said
        below = [k for k in made.schedule.kept if k.reason == BELOW]
        made.notes += [note(f"a loop copies in turn, not ahead{_place(k.loc)}: {k.reason}", k.reason, k.loc) for k in below]
    return products_by_hand(made) if program.target.group_products else made


def _formed(program: Any) -> Any:
    stages = _stages(program.func.body)
    limit = program.target.shared_bytes
    if program.target.tensor_copies and program.target.group_products and stages:
        try:
            return _with_roles(program, limit)
        except Unfit as why:
            other = _on_other_threads(program, limit) if why.threads else None
            if other is not None and other.launch.threads < program.launch.threads and not sees_threads(program):
                parts = f"{other.launch.threads} of {program.launch.threads} threads"
                other.notes.append(f"{program.name} computes on {parts}, others fill its rings{_place(why.loc)}: {why}")
                return other
            said = f"{program.name} does without TMA and wgmma{_place(why.loc)}: {why}"
            hint = why.hint if other is None else _threads_hint(other.launch.threads)
            program.notes.append(Advice(said, why.loc, hint) if hint else said)
    if stages > 1 and program.target.async_copies:
        made, kept, where = copies_ahead(program, _depth(limit, gpu_stage(schedule(program, depth=1))))
        if made is not None:
            return made
        loc = getattr(where, "loc", None) or loc_of(getattr(where, "span", None))
        said = f"{program.name} copies in turn, not ahead{_place(loc)}: {kept}"
        warned = any(isinstance(n, Advice) for n in program.notes)  # of what is the first thing to change
        program.notes.append(said if warned else note(said, kept, loc))
    return schedule(program)


def _on_other_threads(program: Any, limit: int) -> Any | None:
    """The program as roles of a block with another number of threads, with which wgmma makes its products and whose accumulators leave each
    thread half of its registers for more: the next smaller number, else the next larger one; None where there is none."""
    products = [c for c in splitting.calls(program.func.body) if REGISTRY[c.op.name].multiplies]
    held = max(prod(int(e) for e in c.args[2].source.ty.shape) for c in products)
    given = program.launch.threads
    for threads in sorted(REGISTERS, key=lambda n: (n > given, abs(n - given))):
        if threads == given or held > threads * 128:
            continue
        try:
            return _with_roles(replace(program, launch=replace(program.launch, threads=threads), notes=list(program.notes)), limit)
        except Unfit:
            continue
    return None


def sees_threads(program: Any) -> bool:
    """Whether a program says which of its threads do what, or how many: parts of the block, layouts over its threads, arrivals that are
    counted. Any other means the same on fewer."""
    body, found = program.func.body, list[Any]()
    structural_walk(body, (tirx.AttrStmt, lambda s: found.append(s) if s.attr_key == "ts.scale" and _scale(s) in splitting.BELOW else None))
    structural_walk(body, (tirx.AllocBuffer, lambda s: found.append(s) if s.buffer.ty.storage_scope == BARRIERS else None))
    structural_walk(body, (tirx.For, lambda s: found.append(s) if (s.annotations or {}).get("ts.layout") else None))
    return bool(found) or any(isinstance(layout, Fragment) for layout, _ in program.hints.get("layouts", {}).values())


def _scale(s: Any) -> str:
    return SCALES[int(s.value.value)]


def _threads_hint(threads: int) -> str:
    groups = threads // WARPGROUP
    return f"threads={threads}" + (f", whose {groups} warpgroups share the rows in parts of {ROWS}, or the columns" if groups > 1 else "")


def _place(loc: Any) -> str:
    return f" (line {loc.line})" if loc else ""


def _stages(body: Any) -> int:
    """The most stages that a loop asks for."""
    stages: list[int] = [0]
    structural_walk(body, (tirx.For, lambda f: stages.append(int((f.annotations or {}).get("ts.num_stages", 0)))))
    return max(stages)


def _with_roles(program: Any, limit: int) -> Any:
    if program.launch.threads not in REGISTERS:
        multiplies = any(REGISTRY[c.op.name].multiplies for c in splitting.calls(program.func.body))
        why = f"a block of {program.launch.threads} threads is no 1, 2 or 3 warpgroups"
        hint = "threads=128, 256 or 384, and tiles of T.gemm that so many threads hold in registers"
        raise Unfit(reason(why, hint) if multiplies else why, loc=program.launch.loc, threads=multiplies)
    depth = _depth(limit, _scheduled(program, 1))
    if depth < 1:
        raise Unfit(reason("its tiles fill shared memory, whole", "smaller tiles in shared memory"))
    made = _scheduled(program, depth)
    if any(r.single for r in made.schedule.rings):
        made = _aside(program, depth, limit) or made
    made = remove_unused(made)  # names that only the producer reads
    plan = made.schedule
    if not plan.rings or any(r.form != ROLES for r in plan.rings):
        first = plan.kept[0] if plan.kept else None
        raise Unfit(first.reason if first else "no copy fills a ring", loc=first.loc if first else None)
    _check_place(made)
    _check_copies(made)
    _check_readers(made)
    if (refused := annotated.unfit(made)) is not None:
        raise Unfit(refused[0], loc=refused[1])
    if depth < (asked := _stages(program.func.body)):
        where = next(r.loc for r in plan.rings if r.asked == asked)
        room = f"no more fit into {limit:,} bytes of shared memory"
        said = f"{program.name} has {depth} stages where {asked} were asked for: {room}"
        made.notes.append(Advice(said, where, f"num_stages={depth}, or smaller tiles, of which more fit"))
    made = multicast(made)
    body = structural_map(_products(made), (tirx.For, lambda f: _late(f, plan)))
    made = made.with_body(awaited(made, overlapped(made, body)))
    return tma_stores(made, limit - BESIDE - sum(_shared(made.func.body).values()))


def _depth(limit: int, one: Any) -> int:
    """The most stages that fit beside everything else that the block has in shared memory, which is ``one`` with a single stage."""
    sizes = _shared(one.func.body)
    rings = one.schedule.rings
    ring = sum(n for b, n in sizes.items() if b in one.schedule.ring_of and not rings[one.schedule.ring_of[b]].single)
    rest = sum(sizes.values()) - ring
    return int((limit - rest - BESIDE) // ring) if ring else limit  # no ring wants room


def _aside(program: Any, depth: int, limit: int) -> Any | None:
    """The program with two stages for tiles that are filled anew in every round of a loop around, where they fit beside the results on
    their way out; else None. A block that stays then copies what its next tile needs while it works on this one."""
    made = _scheduled(program, depth, 2)
    fits = sum(_shared(made.func.body).values()) + staged_bytes(made) + BESIDE <= limit
    return made if fits and any(r.single and r.depth == 2 for r in made.schedule.rings) else None


def _scheduled(program: Any, depth: int, aside: int = 1) -> Any:
    written, names = written_buffers(program), bound_in(program.func.body)

    def alone(call: Any) -> bool:
        return call.args[0].source not in written and _unfit_copy(call, program.params, list(call.args[1].source.ty.shape), names) is None

    return schedule(program, depth=depth, roles=splitting.ROLES, by_reader=True, alone=alone, aside=aside)


def _shared(body: Any) -> dict[Any, int]:
    """The bytes of each tile in shared memory, in whole kilobytes, which is what swizzled tiles are aligned to; rows of numbers in less."""
    sizes: dict[Any, int] = {}

    def size(s: Any) -> None:
        shape = [int(e) for e in s.buffer.ty.shape]
        if s.buffer.ty.storage_scope.startswith("shared"):
            unit = 1024 if len(shape) > 1 else 128
            sizes[s.buffer] = -(-prod(shape) * bits_of(s.buffer) // 8 // unit) * unit

    structural_walk(body, (tirx.AllocBuffer, size))
    return sizes


# ---- what it takes


def _check_place(program: Any) -> None:
    """One region, the whole kernel: what stands around it is variables alone."""
    body = program.func.body
    while isinstance(body, tirx.AttrStmt) and body.attr_key != "ts.role":
        if body.attr_key == "ts.scale":
            raise Unfit("its loops stand inside a T.Scale", body)
        body = body.body
    stmts = list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]
    roles = [s for s in stmts if isinstance(s, tirx.AttrStmt) and s.attr_key == "ts.role"]
    inside: list[Any] = []
    structural_walk(body, (tirx.AttrStmt, lambda s: inside.append(s) if s.attr_key == "ts.role" else None))
    plain = [s for s in stmts if not any(s is r for r in roles)]
    if len(roles) != 2 or len(inside) != 2 or any(not isinstance(s, (tirx.AllocBuffer, tirx.BufferStore, tirx.Bind)) for s in plain):
        raise Unfit("what its loops copy and what they compute cannot be taken apart for the kernel as a whole", program.launch)
    for call in splitting.calls(roles[0]):
        if call.op.name == "ts.wait":
            raise Unfit("copies wait for signals", call)


def _check_copies(program: Any) -> None:
    """Every fill of a ring is a copy that TMA can do."""
    names = bound_in(program.func.body)
    for call in splitting.calls(program.func.body):
        if REGISTRY[call.op.name].fills:
            if why := _unfit_copy(call, program.params, list(call.args[1].source.ty.shape[1:]), names):
                raise Unfit(why, call)


def _unfit_copy(call: Any, params: Any, extents: list[Any], names: dict[Any, Any]) -> str | None:
    """Why TMA cannot make a copy into a tile of these extents; None where it can. ``names``: what names stand for."""
    src, dst = call.args[:2]
    var, name = src.source, src.source.name
    if "by_threads" in call.attrs:
        return f"T.copy(…, disable_tma=True) of {name}"
    if len(call.args) > 2:
        return f"{name} is no tensor of this rank alone"
    if element_dtype(var) != element_dtype(dst.source):
        hint = f"a tile of {element_dtype(var)}, and the change of dtype in a T.copy of that tile into a fragment"
        return reason(f"the copy of {name} changes the dtype", hint)
    return boxes.unfit(src, [int(e) for e in extents], params, names)


def _check_readers(program: Any) -> None:
    """Rings are read element by element, by copies into registers, and by products that wgmma can do, all of them by the whole block."""
    rings = program.schedule.ring_of
    views: list[Any] = []
    structural_walk(program.func.body, (tirx.DeclBuffer, lambda s: views.append(s.data) if s.data.args[0] in rings else None))
    if views:
        raise Unfit("a tile of a ring is viewed", views[0])
    scaled: list[Any] = []
    structural_walk(program.func.body, (tirx.AttrStmt, lambda s: scaled.append(s) if s.attr_key == "ts.scale" else None))
    for s in scaled:
        structural_walk(s, (ir.TensorLoad, lambda e: views.append(e) if e.source in rings else None))
        if views or any(a.region.source in rings for c in splitting.calls(s) for a in REGISTRY[c.op.name].effects(c)):
            raise Unfit("a tile of a ring is read inside a T.Scale", s)
    for call in splitting.calls(program.func.body):
        op = REGISTRY[call.op.name]
        touched = [a.region.source.name for a in op.effects(call) if a.region.source in rings]
        if not touched or op.fills:
            continue
        if op.moves and in_registers(call.args[1].source) or op.name == "gemm" and _narrow(call):
            continue
        if not op.multiplies:
            hint = f"T.copy of {touched[0]} into a fragment, which T.{op.name} reads instead"
            raise Unfit(reason(f"T.{op.name} reads {touched[0]}", hint), call)
        if why := _unfit_product(call, program):
            raise Unfit(why, call)
        if why := _unfit_parts(call, program.launch.threads):
            raise Unfit(why, call, threads=True)


def _no_wgmma(call: Any, program: Any) -> str | None:
    """Why a product is not one of wgmma; None where it is."""
    return _unfit_product(call, program) or _unfit_parts(call, program.launch.threads)


def _unfit_product(call: Any, program: Any) -> str | None:
    """The same, whatever the number of threads."""

    a, b, c = call.args[:3]
    rings = program.schedule.ring_of
    sparse = call.op.name == "ts.gemm_sp"
    what = "T.gemm_sp" if sparse else "T.gemm"
    if why := tensor_cores.no_wgmma(call):
        return why
    if str(call.attrs["executor"]) != "block":
        return f"{what} inside a T.Scale"
    if constant(call.args[3]) is None:
        hint = f"T.clear({c.source.name}) in front of the loop, and {what} without clear_accum"
        return reason(f"{what} with a condition for clear_accum", hint)
    if not (in_registers(c.source) and is_whole(c) and len(c.source.ty.shape) == 2):
        return reason(f"{what} into what is no whole fragment", "an accumulator that is a T.alloc_fragment of two axes, whole")
    if sparse and (why := unfit_sparse(call)):
        return why
    for r in (a, b):
        shape = r.source.ty.shape
        axes = list(zip(r.region, shape, strict=True))[1 if r.source in rings else 0 :]
        if len(axes) != 2 or not all(_has_descriptor(r, k, x, int(e)) for k, (x, e) in enumerate(axes)):
            return f"{what} of a part of {r.source.name}"
        if in_registers(r.source) and (r is b or call.attrs["trans_a"] or r.source.ty.storage_scope != "local.fragment"):
            hint = f"T.copy of {r.source.name} into a shared tile, which T.gemm reads instead"
            return reason(f"T.gemm of {r.source.name}, which lies in registers", hint)
        if in_registers(r.source) and bits_of(r.source) not in (8, 16):
            hint = f"T.copy of {r.source.name} into a shared tile, which T.gemm reads instead"
            return reason(f"T.gemm of {element_dtype(r.source)} from registers", hint)
    k, step = int(a.region[-2 if call.attrs["trans_a"] else -1].extent), tensor_cores.depth(bits_of(a.source))
    return reason(f"{what} over {k} numbers", f"tiles that are a multiple of {step} long along k") if k % step else None


def _unfit_parts(call: Any, threads: int) -> str | None:
    """Why warpgroups of so many threads cannot share a product that is otherwise wgmma's; None where they can."""

    sparse = call.op.name == "ts.gemm_sp"
    if (sparse_fragments if sparse else wgmma_fragments)(call, threads):
        return None
    m, n, k = extents(call)
    return f"{'T.gemm_sp' if sparse else 'T.gemm'} of {m} × {n} × {k} on {threads} threads"


def _has_descriptor(operand: Any, axis: int, part: Any, extent: int) -> bool:
    """Whether a matrix descriptor can name this part of an operand's rows or columns: all of them, or, in shared memory, whole rows of
    the swizzle's pattern, or whole boxes (PTX ISA 9.0, "Matrix Descriptor Format": the pattern begins where the matrix does)."""

    first, count = constant(part.min), constant(part.extent)
    if first == 0 and count == extent:
        return True
    if first is None or count is None or in_registers(operand.source) or (layout := swizzled(operand, True)) is None:
        return False
    unit = 8 if axis == 0 else layout.swizzle * 8 // layout.bits
    return first % unit == 0 and count % unit == 0


# ---- products, and when they are awaited


def _products(program: Any) -> Any:
    """The body with every product that wgmma can do marked as its own."""

    def able(c: Any) -> bool:
        return REGISTRY[c.op.name].multiplies and not _narrow(c) and _no_wgmma(c, program) is None

    turns = _turns([c for c in splitting.calls(program.func.body) if able(c)], program.launch.threads)

    def mark(s: Any) -> Any:
        c = s.value
        if not isinstance(c, ir.Call) or not able(c):
            return s
        return tirx.Evaluate(wgmma(c, FREE, **({"turn": turns[c.args[2].source]} if _of_one(c) else {})), s.span)

    return structural_map(program.func.body, (tirx.Evaluate, mark))


def _of_one(call: Any) -> bool:
    """Whether one warpgroup alone has a product's accumulator, by FullRow."""
    return int(call.attrs["policy"]) == FULL_ROW and int(call.args[2].source.ty.shape[0]) == ROWS


def _turns(products: list[Any], threads: int) -> dict[Any, int]:
    """Accumulators that one warpgroup alone has → its first thread. They go to the warpgroups in turn, in the order of their first
    products; those that are multiplied from one operand in registers go together."""
    together: dict[Any, list[Any]] = {}
    by: dict[Any, Any] = {}
    for c in products:
        if not _of_one(c):
            continue
        held, tile = c.args[0].source, c.args[2].source
        mine = together.setdefault(tile, [tile])
        other = together[by.setdefault(held, tile)] if in_registers(held) else mine
        if other is not mine:
            other += mine
            together.update(dict.fromkeys(mine, other))
    order = list({id(tiles): tiles for tiles in together.values()}.values())
    return {tile: k * WARPGROUP % threads for k, tiles in enumerate(order) for tile in tiles}


def _narrow(call: Any) -> bool:
    """Whether a product is left to mma.sync: its left operand is computed by the threads anew for few columns. A warp's mma follows the
    computation of its operand instruction by instruction; a warpgroup's would wait for all four warps, and for itself, each time."""
    a, _, c = call.args[:3]
    computed = in_registers(a.source) and bits_of(a.source) == 16 and a.source.ty.storage_scope == "local.fragment"
    return computed and call.op.name == "ts.gemm" and not call.attrs["trans_a"] and int(c.source.ty.shape[-1]) <= NARROW


def _late_round(begin: Any, products: list[Any], release: Any, count: Any) -> list[Any]:
    """A round of products and the release of the round before's stage, whose products are complete by then: behind this round's, as many
    groups may be under way as it has. A product of a sparse operand reads its places from registers that the round before's read until
    they are complete: where there is one, those are awaited in front."""
    if any(c.op.name == "ts.wgmma_sp" for c in products):
        return [begin, await_products([], products[0].span, straight=True), *map(tirx.Evaluate, products), release, count]
    *others, last = products
    return [begin, *map(tirx.Evaluate, others), tirx.Evaluate(wgmma(last, len(products))), release, count]


def _late(loop: Any, plan: Any) -> Any:
    """A loop that only multiplies, its products awaited one round late; any other as it is, and one whose ring has a single stage, which
    must be empty before the next round.

    Round n's products are behind those of n - 1 in the tensor cores' queue, so ``wait_group`` with as many groups as a round has leaves
    only its own in flight: those of round n - 1 are complete, nobody reads their stage any more, and it is released."""
    # An unused name leaves a number behind.
    stmts = [s for s in flat(loop.body) if not (isinstance(s, tirx.Evaluate) and isinstance(s.value, tirx.IntImm))]
    kinds = [name_of(s) for s in stmts[:-1]]
    if len(kinds) < 3 or kinds[0] != "ring_wait" or kinds[-1] != "ring_release" or not all(is_product(s) for s in stmts[1:-2]):
        return loop
    products = [s.value for s in stmts[1:-2]]
    if not isinstance(stmts[-1], tirx.BufferStore) or plan.rings[int(stmts[-2].value.attrs["ring"])].depth < 2:
        return loop
    first, number, span = stmts[-2].value, int(stmts[-2].value.attrs["ring"]), loop.span
    zero = tirx.IntImm(str(loop.loop_var.ty), 0)
    body = _late_round(stmts[0], products, late_release(number, first.args[0], loop.loop_var > zero, stmts[-2].span), stmts[-1])
    notes = {**dict(loop.annotations), "ts.late": 1}
    made = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, sequence(body), annotations=notes, span=span)
    tiles = list({c.args[2].source: c.args[2] for c in products}.values())
    operands = list({r.source: r for c in products for r in operands_of(c) if r.source not in plan.ring_of}.values())
    some = loop.extent > tirx.IntImm(str(loop.extent.ty), 0)
    run = sequence([made, await_products(tiles, span, operands), late_release(number, first.args[0], some, stmts[-2].span)])
    # Products stay in flight from round to round only where no way leads around the loop and meets that of the last round before its
    # products are awaited (ptxas awaits each of them then, C7515): a loop that may have no round is passed by whole, with its wait.
    return run if isinstance(loop.extent, tirx.IntImm) else tirx.IfThenElse(some, run, None, span)
