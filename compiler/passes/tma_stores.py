"""Results leave by TMA: a fragment that a consumer copies to a tensor goes through a swizzled tile of shared
memory, from which TMA stores it while the threads go on (PTX ISA 9.0, "cp.async.bulk.tensor").

    for each part of so many columns:
        await_stores(staged)                     TMA has read what the part before left there
        copy(fragment[:, part] → staged)         by the threads
        copy(staged → tensor[…, part])           by TMA

An atomic update of a region by a whole fragment (T.atomic_add, _min, _max) goes the same way, as TMA combines
what it stores with what lies there (PTX ISA 9.0, "cp.reduce.async.bulk.tensor").

The fences between these follow from their effects (passes/insert_barriers.py), the one in front of TMA's read
with a proxy fence. The tile takes what the ring leaves of shared memory; where that is not one box wide, and
where TMA cannot store the tensor, threads store directly.

A tile of shared memory that the author fills and copies to a tensor, or adds to one by T.atomic_add, is read
by TMA where it lies (passes/given_tiles.py).

TMA's writes are not the threads' own: nothing orders them before a later access but a wait for the whole
store, and at the kernel's end all are visible. So only tensors that the kernel never reads go this way, or
reads behind all stores. Such a wait stands in front of a signal to other blocks or ranks and of a barrier
with them, and in front of an atomic update by the block's first thread, which release what came before them;
in front of what threads write to the same tensor; and in front of a store that may touch what another
statement stores.

What follows the last store of a kernel is its end. It may read what was stored, and executors below the block
may tell others there: in front of it the thread that issued the stores waits for all of them, and then the
block's threads synchronize. So all of them know that the stores are complete, and no store follows that could
touch what they read (a wait makes what TMA wrote visible to the thread that waits, and the barrier orders
that before what is behind it: PTX ISA 9.0, "cp.async.bulk.wait_group", "Causality order").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

from tilescale.compiler.ir.nests import long_axes, nest_of
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import name_of, operations
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.rewrite import rebuild
from tilescale.compiler.ir.scales import Executor
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ir.walks import scalar_reads, walk
from tilescale.compiler.layout.loops import bits_of, element_dtype, in_registers
from tilescale.compiler.layout.shared import widest_swizzle
from tilescale.compiler.ops.fence import fence, proxy_fence
from tilescale.compiler.ops.mbarrier import REDUCTIONS
from tilescale.compiler.ops.tma import await_stores, tma_reduce, tma_store
from tilescale.compiler.passes import boxes
from tilescale.compiler.passes.given_tiles import awaited, given, is_shared_tile, own_touches
from tilescale.compiler.passes.products import has_producer, touched
from tilescale.compiler.passes.remote_puts import is_put
from tilescale.compiler.passes.roles import calls
from tilescale.compiler.passes.room import BESIDE, tile_bytes
from tilescale.compiler.passes.stage_operands import copy_statement, is_whole, whole
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, sym, tirx


def tma_stores(program: TileProgram) -> TileProgram:
    """The program with the results that TMA can store staged, in what its tiles leave of shared memory."""
    if not has_producer(program):
        return program
    room = program.target.shared_bytes - BESIDE - sum(tile_bytes(program).values())
    every = Executor("block", program.launch.threads)
    statements = list(walk(program.func.body, every))
    writers, names = _writers(program, [s for s, _ in statements]), _names([s for s, _ in statements])
    tiles: dict[Any, Any] = {}
    staged: dict[Any, Any] = {}  # statement → the tile that it goes through
    for s, _ in statements:
        if (
            isinstance(s, tirx.Evaluate)
            and isinstance(s.value, ir.Call)
            and _fits(s.value, program, writers, names)
        ):
            if (tile := _staging(s.value, tiles, room)) is not None:
                staged[s] = tile
    parts = _outermost(program.func.body)

    def lies(call: Any) -> bool:
        if not _fits(call, program, writers, names, is_shared_tile):
            return False
        src, dst = _ends(call)
        return element_dtype(src.source) == element_dtype(dst.source)

    own = given(program, list(statements), parts, lies) if parts else {}
    staged |= own
    front = {s for s in _front(parts, staged) if _updates(s)}  # they release no store
    others = [s for s, ex in statements if _updates(s) and s not in staged and not _alone(s, ex)]
    if not staged or any(s not in front for s in others):
        return program
    end = _end(program.func.body, staged, every)
    stored = {_ends(s.value)[1].source for s in staged}
    apart = [s for s, ex in statements if _tells_others(s) and ex.name != "block"]
    behind = apart + [s for s, _ in statements if own_touches(s)[0] & stored]
    if any(s not in end for s in behind):
        return program  # nothing orders the thread that awaits stores before those who tell, or read
    body = program.func.body
    if behind:
        body = _closed(body, end, list(dict.fromkeys(staged.values())), behind[0].span)
    else:
        end = set()
    body, refilled = _read_in_place(body, own)

    def put(s: Any, ex: Any) -> list[Any] | None:
        if s in refilled:
            return [await_stores(whole(refilled[s]), s.span), s]
        return None if s in end or s in front else _in_order(s, staged, writers, own)

    return program.with_body(_around(rebuild(body, every, put), list(tiles.values())))


def _front(parts: list[Any], stores: dict[Any, Any]) -> set[Any]:
    """What stands in front of all stores, in no loop with one: none is under way there."""
    found: set[Any] = set()
    for part in parts:
        inside = {s for s, _ in walk(part, Executor("block", 1))}
        if any(s in stores for s in inside):
            break
        found |= inside
    return found


def _read_in_place(body: Any, own: dict[Any, Any]) -> tuple[Any, dict[Any, Any]]:
    """A body with the waits for what TMA reads of tiles that the author fills (passes/given_tiles.py), and
    the statements that fill one that TMA may be reading."""
    refilled: dict[Any, Any] = {}

    def consumer(s: Any) -> Any:
        if not _is_consumer(s) or not own:
            return s
        parts, found = awaited(list(s.body.seq), own)
        refilled.update(found)
        return tirx.AttrStmt(s.node, s.attr_key, s.value, sequence(parts), s.span)

    return structural_map(body, (tirx.AttrStmt, consumer)), refilled


def _outermost(body: Any) -> list[Any]:
    """The statements that the consumer's part is a sequence of."""
    found: list[Any] = []
    structural_walk(body, (tirx.AttrStmt, lambda s: found.append(s) if _is_consumer(s) else None))
    return list(found[0].body.seq) if found and isinstance(found[0].body, tirx.SeqStmt) else []


def _is_consumer(s: Any) -> bool:
    return s.attr_key == "ts.role" and str(s.node.value) == "consumer"


def _end(body: Any, stores: Any, every: Executor) -> set[Any]:
    """The statements of the consumer's part behind the last one in which some of ``stores`` are."""
    inside = [{s for s, _ in walk(part, every)} for part in _outermost(body)]
    last = max((k for k, part in enumerate(inside) if any(s in part for s in stores)), default=len(inside))
    return {s for part in inside[last + 1 :] for s in part}


def _closed(body: Any, end: set[Any], tiles: list[Any], span: Any) -> Any:
    """A body, in front of whose ``end`` all of the block's threads know that all stores are complete."""
    why = "all that TMA stored is there for who reads it, and tells others, behind this"
    awaited = [
        *(await_stores(whole(tile), span, complete=True) for tile in tiles),
        proxy_fence(why, span),
        fence("block", why, span),
    ]

    def consumer(s: Any) -> Any:
        if not _is_consumer(s):
            return s
        parts = list(s.body.seq)
        at = next(
            k for k, part in enumerate(parts) if any(x in end for x, _ in walk(part, Executor("block", 1)))
        )
        made = sequence([*parts[:at], *awaited, *parts[at:]])
        return tirx.AttrStmt(s.node, s.attr_key, s.value, made, s.span)

    return structural_map(body, (tirx.AttrStmt, consumer))


def staged_bytes(program: TileProgram) -> int:
    """The shared memory that results take on their way out where none of them goes in parts."""
    statements = [s for s, _ in walk(program.func.body, Executor("block", program.launch.threads))]
    writers, names = _writers(program, statements), _names(statements)
    found = [_ends(c) for c in calls(program.func.body) if _fits(c, program, writers, names)]
    tiles = {(*(int(e) for e in src.source.ty.shape), bits_of(dst.source)) for src, dst in found}
    return sum(rows * cols * bits // 8 for rows, cols, bits in tiles)


def _in_order(
    s: Any, staged: dict[Any, Any], writers: dict[Any, list[Any]], own: dict[Any, Any]
) -> list[Any] | None:
    """What a statement becomes: parts that TMA stores, or itself behind the stores before it; None where none
    of them matter to it. ``own``: those of ``staged`` whose tile the author fills."""
    if s in staged:
        to = _ends(s.value)[1]
        others = [x for x in writers[to.source] if not x.same_as(s) and x in staged]
        # Updates may come in any order.
        free = name_of(s) == "atomic" or all(_apart(to, _ends(x.value)[1]) for x in others)
        return [
            *([] if free else [await_stores(whole(staged[s]), s.span, complete=True)]),
            *([_leaving(s.value, to, whole(own[s]))] if s in own else _parts(s.value, staged[s])),
        ]
    if _tells_others(s):
        tiles = [await_stores(whole(tile), s.span, complete=True) for tile in dict.fromkeys(staged.values())]
        return [*tiles, proxy_fence("what TMA stored comes before what the others are told", s.span), s]
    if _updates(s):
        return [await_stores(whole(next(iter(staged.values()))), s.span, complete=True), s]
    for other, tile in staged.items():
        if any(s.same_as(x) for x in writers[_ends(other.value)[1].source]):
            why = "what threads write comes before what TMA stores there later"
            return [await_stores(whole(tile), s.span, complete=True), s, proxy_fence(why, s.span)]
    return None


def _tells_others(s: Any) -> bool:
    """Whether a statement synchronizes with other blocks, or signals: they come behind all that the block
    stored. The signal of a put by the communicator tells of puts alone, and a signal within the block nobody
    else: executors of it that would tell others in turn are not here."""
    if isinstance(s, (tirx.For, tirx.While, tirx.IfThenElse)) and nest_of(s) is None:
        return False  # those inside are statements of their own
    return any(
        op.synchronizes(c) or op.signals(c) and not is_put(c) and str(c.attrs["reach"]) != "block"
        for c, op in operations(s)
    )


def _updates(s: Any) -> list[Any]:
    """The atomic updates of tensors in a statement, loads aside, which release nothing."""
    if isinstance(s, (tirx.For, tirx.While, tirx.IfThenElse)) and nest_of(s) is None:
        return []  # those inside are statements of their own
    found = [c for c, _ in operations(s) if c.op.name == "ts.atomic" and str(c.attrs["kind"]) != "load"]
    return [c for c in found if c.args[0].source.ty.storage_scope.startswith("global")]


def _alone(s: Any, ex: Executor) -> bool:
    """Whether the block's first thread makes a statement's atomic updates, which is the one that issues and
    awaits stores."""
    single = all(constant(r.extent) == 1 for c in _updates(s) for r in c.args[0].region)
    return single and ex.name == "block" and isinstance(s, (tirx.Evaluate, tirx.Bind))


def _apart(a: Any, b: Any) -> bool:
    """Whether two regions of a tensor are known to have no element in common: along some axis one ends before
    the other begins."""
    analyzer = sym.Analyzer()
    for x, y in zip(a.region, b.region, strict=True):
        distance, first, second = (
            constant(analyzer.simplify(y.min - x.min)),
            constant(x.extent),
            constant(y.extent),
        )
        if (
            distance is not None
            and first is not None
            and second is not None
            and (distance >= first or -distance >= second)
        ):
            return True
    return False


def _ends(call: Any) -> tuple[Any, Any]:
    """What a copy or an update reads, and what it writes."""
    return (call.args[1], call.args[0]) if call.op.name == "ts.atomic" else (call.args[0], call.args[1])


def _leaves(call: Any) -> bool:
    """Whether a call copies a tile of this rank's, or combines one with what lies where it goes, as TMA
    can."""
    if call.op.name == "ts.atomic":
        kind, tile = str(call.attrs["kind"]), call.args[1]
        return isinstance(tile, ir.TensorRegion) and element_dtype(call.args[0].source) in REDUCTIONS.get(
            kind, ()
        )
    return call.op.name == "ts.copy" and "by_threads" not in call.attrs


def _in_fragment(region: Any) -> bool:
    return in_registers(region.source)


def _fits(
    call: Any,
    program: TileProgram,
    writers: dict[Any, list[Any]],
    names: dict[Any, Any],
    lies: Callable[[Any], bool] = _in_fragment,
) -> bool:
    """Whether a call takes a whole tile, which ``lies`` in a fragment, to where TMA can store it. ``names``:
    what names stand for."""
    if not _leaves(call):
        return False
    src, dst = _ends(call)
    var = dst.source
    if not (lies(src) and is_whole(src) and len(src.source.ty.shape) == 2):
        return False
    kinds = {"ts.atomic" if _updates(s) else "ts.copy" for s in writers.get(var, [])}
    if call.op.name not in kinds or str(call.attrs["executor"]) != "block":
        return False
    return boxes.unfit(dst, [int(e) for e in src.source.ty.shape], program.params, names) is None


def _names(statements: list[Any]) -> dict[Any, Any]:
    """What names are bound to."""
    return {s.var: s.value for s in statements if isinstance(s, tirx.Bind)}


def _writers(program: TileProgram, statements: list[Any]) -> dict[Any, list[Any]]:
    """The tensors that a kernel writes or updates, not both, and reads nowhere, or behind all of its writes,
    each with the statements that do."""
    every = Executor("block", program.launch.threads)
    found: dict[Any, list[Any]] = {}
    readers: dict[Any, list[Any]] = {}
    modes: dict[Any, set[str]] = {}
    structural_walk(
        program.func.body, (tirx.DeclBuffer, lambda s: modes.setdefault(s.data.args[0], set()).add("viewed"))
    )
    for s in statements:
        effects: list[tuple[Any, str]] = []
        if isinstance(s, (tirx.For, tirx.While, tirx.IfThenElse)) and nest_of(s) is None:
            effects = [(r.buffer, r.mode) for r in scalar_reads(s)]
        else:
            read, written = touched(s)
            updated = {c.args[0].source for c in calls(s) if c.op.name == "ts.atomic"}
            effects = [
                *((b, "read") for b in read),
                *((b, "update" if b in updated else "write") for b in written | updated),
            ]
        for b, mode in effects:
            modes.setdefault(b, set()).add(mode)
            (readers if mode == "read" else found).setdefault(b, []).append(s)
    for b in [b for b in found if modes[b] == {"read", "write"}]:
        end = _end(program.func.body, found[b], every)
        if all(s in end for s in readers[b]):
            modes[b] = {"write"}
    return {b: of for b, of in found.items() if modes[b] in ({"write"}, {"update"})}


def _staging(call: Any, tiles: dict[Any, Any], room: int) -> Any:
    """The tile through which a result goes, one of ``tiles`` or a new one in what they leave of ``room``;
    None where it has no place."""
    src, dst = _ends(call)
    rows, cols = (int(e) for e in src.source.ty.shape)
    # Parts of an update would wait for one another in a loop.
    kind, whole_rows = (
        element_dtype(dst.source),
        call.op.name == "ts.atomic",
    )
    for (high, wide, dtype), tile in tiles.items():
        if (high, dtype) == (rows, kind) and cols % wide == 0 and (wide == cols or not whole_rows):
            return tile
    used = sum(prod(int(e) for e in t.ty.shape) * bits_of(t) // 8 for t in tiles.values())
    wide = _width(rows, cols, bits_of(dst.source), room - used)
    if not wide or whole_rows and wide < cols:
        return None
    tile = tirx.decl_buffer((rows, wide), kind, name=f"{dst.source.name}_staged", scope="shared", layout=None)
    return tiles.setdefault((rows, wide, kind), tile)


def _width(rows: int, cols: int, bits: int, room: int) -> int:
    """Columns of a part: as many as fit, whole boxes of the widest swizzle that divide the fragment; 0 where
    there are none."""
    box = widest_swizzle(cols, bits) * 8 // bits
    return (
        max(
            (w for w in range(box, cols + 1, box) if cols % w == 0 and w * rows * bits // 8 <= room),
            default=0,
        )
        if box
        else 0
    )


def _region(var: Any, mins: list[Any], extents: list[Any]) -> Any:
    first, count = (
        [tirx.IntImm("int32", x) if isinstance(x, int) else x for x in part] for part in (mins, extents)
    )
    return tirx.BufferRegion(var, [ir.Range.from_min_extent(m, e) for m, e in zip(first, count, strict=True)])


def _parts(call: Any, tile: Any) -> Iterator[Any]:
    src, dst = _ends(call)
    rows, wide = (int(e) for e in tile.ty.shape)
    staged = whole(tile)
    axis = long_axes(dst)[-1]
    for k in range(int(src.source.ty.shape[1]) // wide):
        into = [r.min + k * wide if j == axis and k else r.min for j, r in enumerate(dst.region)]
        extents = [wide if j == axis else r.extent for j, r in enumerate(dst.region)]
        yield await_stores(staged, call.span)
        yield copy_statement(_region(src.source, [0, k * wide], [rows, wide]), staged, call)
        yield _leaving(call, _region(dst.source, into, extents), staged)


def _leaving(call: Any, to: Any, tile: Any) -> Any:
    """TMA's part in a copy or an update."""
    return tma_reduce(call, to, tile) if call.op.name == "ts.atomic" else tma_store(call, tile, to)


def _around(body: Any, tiles: list[Any]) -> Any:
    """The consumer's part with the tiles in front, and behind it the wait for the last stores: their memory
    is this block's as long as it runs."""

    def consumer(s: Any) -> Any:
        if s.attr_key != "ts.role" or str(s.node.value) != "consumer":
            return s
        ends = [await_stores(whole(t), s.span) for t in tiles]
        return tirx.AttrStmt(
            s.node,
            s.attr_key,
            s.value,
            sequence([*(tirx.AllocBuffer(t) for t in tiles), s.body, *ends]),
            s.span,
        )

    return structural_map(body, (tirx.AttrStmt, consumer))
