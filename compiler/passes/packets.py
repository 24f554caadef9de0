"""Boxes of packets: nothing but packets goes there, and kernels that need no flags around their launches.

**Why two halves are enough, and no flag stands around a launch.** Launches that use a box are numbered alike
on all ranks, and launch e writes the half e % 2 (tilescale/packets.py). Let rank B put a packet into the box
of rank A in launch e + 2. It writes over one of launch e, which A must have taken. B's launch e + 1 has
ended, as launches of a rank follow one another. If in every launch each rank gets a packet that each other
rank puts, B has got one of A in launch e + 1, which A put in its launch e + 1, and so behind the end of A's
launch e with all that it took there. So a kernel in which each rank gets a packet of each other rank,
whatever it is called with, needs nobody's word that a launch has begun or ended. Between two such launches
any ordered launch may stand: it does not end on B before A has reached its end. Of several boxes of a kernel
one is enough: it says for all of them that A's launch e has ended.

**Dense boxes** have no numbers (tilescale/packets.py): who takes a packet in launch e empties its place, and
a place that is not empty has arrived. The same order is enough. A stores EMPTY before its launch e ends, and
behind that puts the packet of its launch e + 1 that B has got when B's launch e + 1 ends. So the packet of
B's launch e + 2 comes into an empty place, and nothing empties it but its taker. A launch in which a packet
is left, or that fails before it has taken all, would hand it to launch e + 2: the simulator reports packets
that nobody takes, and what becomes of failures is argued in tilescale/packets.py.

That is causality through relaxed accesses: hardware keeps it, since launch e has ended on A, whose memory it
is, before A stores the packet. The memory model has no edge for it (PTX ISA, "Memory Consistency Model").

A launch without blocks is not counted where there are no flags: it puts nothing, and ranks that did would
wait for it in vain. (With flags it is counted, since ranks may launch different grids.)

What is proven: every put names its own rank as the place, along one axis of the box; block 0 of each rank
puts something wherever it is called; and what block 0 gets covers, along that axis, all other ranks. This is
tried out for every number of ranks up to the axis' extent: one more, and a put fails the launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tilescale.compiler.ir import numeric
from tilescale.compiler.ir.multiples import bound_in, spelt_out
from tilescale.compiler.ir.nests import is_nest
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import effects_of, operations
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, sym, tirx
from tilescale.errors import TileSyntaxError

PUT, GET = "ts.put_packets", "ts.get_packets"
#: ranks up to which exchanges are tried out, and statements and iterations that this may take
MOST_RANKS, MOST_STEPS = 32, 1 << 16
#: how the report says what became of it
WITHOUT = "launches begin and end without flags: each rank gets packets of each other one (T.get_packets)"
WITH = "launches begin and end with flags, though packets are exchanged: "
EXITS = "launches end with flags, though awaited=True: "


class _Unproven(Exception):
    """Why flags stay."""


def packets(program: TileProgram) -> TileProgram:
    """The program, whose launch needs no flags where that is proven.

    Raises:
        TileSyntaxError: a box that is used as memory.
    """
    boxes = {p.var for p in program.params if getattr(p.spec, "kind", "") == "packets"}
    if not boxes:
        return program
    _require_packets_alone(program.func.body, boxes)
    if not program.launch.ordered:
        return program
    launch, notes = program.launch, list(program.notes)
    if launch.awaited:
        try:
            _require_packets_of_all(program, boxes)
        except _Unproven as why:
            launch, notes = replace(launch, awaited=False), [*notes, f"{EXITS}{why}"]
    try:
        _require_exchange(program, boxes)
    except _Unproven as why:
        return replace(program, launch=launch, notes=[*notes, f"{WITH}{why}"])
    return replace(program, launch=replace(launch, exchanges=True), notes=[*notes, WITHOUT])


def _require_packets_alone(body: Any, boxes: set[Any]) -> None:
    """Raises TileSyntaxError, at the statement."""
    found: list[tuple[Any, Any]] = []

    def look(buffer: Any, at: Any) -> None:
        if buffer in boxes:
            found.append((buffer, loc_of(getattr(at, "span", None))))

    for call, _ in operations(body):
        for a in effects_of(call) if call.op.name not in (PUT, GET) else ():
            look(a.region.source, call)
    structural_walk(body, (tirx.BufferStore, lambda s: look(s.buffer, s)))
    structural_walk(body, (tirx.DeclBuffer, lambda s: look(s.data.args[0], s)))
    for kind in (tirx.IfThenElse, tirx.While, tirx.For, tirx.Bind, tirx.Evaluate, tirx.BufferStore):
        structural_walk(
            body, (kind, lambda s: structural_walk(s, (ir.TensorLoad, lambda e: look(e.source, s))))
        )  # the innermost statement comes first, and the last kind has no statements inside
    if found:
        box, at = found[-1]
        raise TileSyntaxError(
            f"{box.name} is a box of packets and is used as memory",
            loc=at,
            hint=f"T.put_packets(x, {box.name}[…], dst=rank), T.get_packets({box.name}[…], y)",
        )


# ---- the proof


def _require_exchange(program: TileProgram, boxes: set[Any]) -> None:
    """Raises _Unproven where a launch may need its flags."""
    body = program.func.body
    for p in program.params:
        if getattr(p.spec, "kind", "") == "signal":
            raise _Unproven(f"counters ({p.name}) are zeroed behind a launch")
    for call, op in operations(body):
        far = op.synchronizes(call) == "device" or any(a.owner is not None for a in effects_of(call))
        if far and call.op.name != PUT and str(call.attrs["reach"]) == "device":
            raise _Unproven(f"{op.written(call)} reaches other ranks too")
    _require_packets_of_all(program, boxes)


def _require_packets_of_all(program: TileProgram, boxes: set[Any]) -> None:
    """Raises _Unproven where a rank may end a launch without packets of each other rank."""
    body, names = program.func.body, bound_in(program.func.body)
    reasons = []
    for box in boxes:
        try:
            _try_out(program, box, _axis(body, box, names), names)
            return
        except _Unproven as why:
            reasons.append(str(why))
    raise _Unproven("; ".join(dict.fromkeys(reasons)))


def _axis(body: Any, box: Any, names: Any) -> int:
    """The axis of a box along which every put names its own rank."""
    puts = [c.args[1] for c, _ in operations(body) if c.op.name == PUT and c.args[1].source.same_as(box)]
    for axis in range(len(box.ty.shape)):
        if puts and all(
            constant(r.region[axis].extent) == 1 and _is_scale(spelt_out(r.region[axis].min, names), "index")
            for r in puts
        ):
            return axis
    raise _Unproven(f"no axis of {box.name} is the rank whose packets they are, in every T.put_packets")


def _is_scale(e: Any, which: str) -> bool:
    """Whether an expression is the rank among those of the launch, or their count."""
    return isinstance(e, ir.Call) and e.op.name == f"ts.scale_{which}" and str(e.args[0].value) == "device"


def _try_out(program: TileProgram, box: Any, axis: int, names: Any) -> None:
    """Whether block 0 gets packets of all other ranks, for every rank of every number of ranks."""
    extent = constant(box.ty.shape[axis])
    if extent is None or extent > MOST_RANKS:
        raise _Unproven(f"{box.name} has places for {extent or 'a number that calls say'} of ranks")
    if not _always_puts(program.func.body, box, names, {}):
        raise _Unproven("no T.put_packets stands where block 0 comes to it on every rank")
    steps = [MOST_STEPS]
    for count in range(2, extent + 1):
        for rank in range(count):
            got: set[int] = set()
            for low, size in _gets(program.func.body, box, axis, {}, (rank, count), steps):
                got.update(range(low, low + size))
            if missing := set(range(count)) - got - {rank}:
                raise _Unproven(
                    f"of {count} ranks, rank {rank} is not known to get packets of rank {min(missing)}"
                )


def _always_puts(s: Any, box: Any, names: Any, env: dict[Any, Any]) -> bool:
    """Whether block 0 comes to a put of the box on every rank, however many there are."""
    if isinstance(s, tirx.SeqStmt):
        return any(_always_puts(x, box, names, env) for x in s.seq)
    if isinstance(s, tirx.AttrStmt):
        if s.attr_key == "thread_extent":
            env = {**env, s.node.var: 0}
        return _always_puts(s.body, box, names, env)
    if isinstance(s, tirx.IfThenElse):
        holds = _known(spelt_out(s.condition, names), env)
        chosen = None if holds is None else s.then_case if holds else s.else_case
        return chosen is not None and _always_puts(chosen, box, names, env)
    if isinstance(s, tirx.For):
        extent = spelt_out(s.extent, names)
        found: list[Any] = []
        structural_walk(extent, (ir.Call, lambda c: found.append(c) if _is_scale(c, "count") else None))
        left = sym.Analyzer().simplify(found[0] - extent) if found else None
        runs = (constant(extent) or 0) > 0 or (constant(left) if left is not None else None) in (0, 1)
        return not is_nest(s) and runs and _always_puts(s.body, box, names, env)
    call = s.value if isinstance(s, tirx.Evaluate) else None
    return isinstance(call, ir.Call) and call.op.name == PUT and bool(call.args[1].source.same_as(box))


def _gets(
    s: Any, box: Any, axis: int, env: dict[Any, Any], who: tuple[int, int], steps: list[int]
) -> Iterator[tuple[int, int]]:
    """The places along an axis of which block 0 of a rank certainly gets packets: first and count."""
    steps[0] -= 1
    if not steps[0]:
        raise _Unproven("its loops are too long to be tried out")
    if isinstance(s, tirx.SeqStmt):
        for x in s.seq:
            yield from _gets(x, box, axis, env, who, steps)
    elif isinstance(s, tirx.AttrStmt):
        if s.attr_key == "thread_extent":
            env[s.node.var] = 0
        yield from _gets(s.body, box, axis, env, who, steps)
    elif isinstance(s, tirx.Bind):
        value = _value(s.value, env, who)
        if value is not None:
            env[s.var] = value
    elif isinstance(s, tirx.For) and not is_nest(s):
        for i in range(_value(s.extent, env, who) or 0):
            yield from _gets(s.body, box, axis, {**env, s.loop_var: i}, who, steps)
    elif isinstance(s, tirx.IfThenElse):
        holds = _value(s.condition, env, who)
        chosen = None if holds is None else s.then_case if holds else s.else_case
        if chosen is not None:
            yield from _gets(chosen, box, axis, env, who, steps)
    elif isinstance(s, tirx.Evaluate) and isinstance(s.value, ir.Call) and s.value.op.name == GET:
        region = s.value.args[0]
        low, size = (_value(e, env, who) for e in (region.region[axis].min, region.region[axis].extent))
        if region.source.same_as(box) and low is not None and size is not None:
            yield low, size


def _value(e: Any, env: dict[Any, Any], who: tuple[int, int]) -> int | None:
    """An expression as a number, for a rank and a number of ranks; None where it is none."""

    def known(call: Any) -> Any:
        which = 0 if _is_scale(call, "index") else 1 if _is_scale(call, "count") else None
        return call if which is None else tirx.IntImm(str(call.ty), who[which])

    return _known(e if isinstance(e, int) else structural_map(e, (ir.Call, known)), env)


def _known(e: Any, env: dict[Any, Any]) -> int | None:
    """An expression as a number, the same for every rank; None where it is none."""
    try:
        return int(numeric.evaluate(e, env))
    except numeric.Unknown:
        return None
