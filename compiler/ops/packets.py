"""``T.put_packets`` and ``T.get_packets``: small messages to another rank, whose receiver knows by the
messages themselves that they are there.

A packet is data and the number of the launch in one store (tilescale/packets.py). So nobody signals, waits
for a counter, meets or clears. A packet orders nothing but itself: what its sender did before is no more
visible to who got it than before. In tile IR a box is an array of packets, int64 with 8 bytes of data each,
and its other side is a fragment of them. How the author's tile comes into that fragment is a T.copy like any
other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilescale import packets
from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.values import Buffer, Region, binary
from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.multiples import multiple, spelt_out
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import Access, TileOp, register
from tilescale.compiler.ops.base import emit, is_tile, region, require_same_shape, show
from tilescale.compiler.ops.team import launch_rank, launch_ranks
from tilescale.compiler.tvm_compat import sym, tirx
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError
from tilescale.language.dtypes import BITS


def put_packets(src: Any, box: Any, dst: Any = None) -> None:
    """Puts a tile into rank ``dst``'s box, as packets of this launch: ``T.put_packets(x, box[rank, 0:256],
    dst=peer)``; into that of every rank of the open team where ``dst`` is left out. Each element of a box is
    put once in a launch, and if the box is dense, taken once before its rank's launch ends.

    Args:
        src: a tile, or a part of a tensor (zero outside), of the box's dtype. box: as large a part of a
            ``T.Packets``, whose rows begin and end at multiples of 8 bytes. dst: a rank, the own one too.
            Without it all of them, beginning with the next one.

    Raises:
        TileSyntaxError: outside ``T.Scale("device")``, in a smaller scale than the block's, or in T.Parallel.
        TileTypeError: no T.Packets, or another dtype. TileValueError: another shape, or half a packet.
    """
    from tilescale.compiler.ops.alloc import alloc_fragment
    from tilescale.compiler.ops.copy import check_peer, copy
    from tilescale.compiler.ops.loops import serial

    what = "T.put_packets"
    _require_place(what)
    to = _box(box, what, region(src, "the source").shape if _has_shape(src) else ())
    frm = region(src, "the source", to.shape)
    _require_alike(frm, to, what)
    held = alloc_fragment(_packets(to), "int64")
    part = _in_packets(to, what)
    copy(frm, _seen_as(held, to))
    if dst is not None:
        emit("put_packets", [held.whole().ir(), part, check_peer(dst, to, "dst")], _kind(to))
        return
    team = bld.current().team
    count, me = (launch_ranks(), launch_rank()) if team is None else (team.count, team.index())
    for k in serial(count).trace(("k",)):
        peer = binary("%", binary("+", binary("+", me, 1), k), count)
        emit("put_packets", [held.whole().ir(), part, check_peer(peer, to, "dst")], _kind(to))


def get_packets(box: Any, dst: Any) -> None:
    """Waits until all packets of a part of the own box have come in this launch, and takes their data:
    ``T.get_packets(box[peer, 0:256], y)``. It waits for these packets alone, and acquires nothing else. Each
    packet of a dense box is taken once in a launch.

    Args:
        box: a part of a ``T.Packets``, whose rows begin and end at multiples of 8 bytes. dst: as large a
        tile,
            or part of a tensor (dropped outside), of the box's dtype.

    Raises:
        As `put_packets`.
    """
    from tilescale.compiler.ops.alloc import alloc_fragment
    from tilescale.compiler.ops.copy import copy

    what = "T.get_packets"
    _require_place(what)
    frm = _box(box, what, region(dst, "the destination").shape if _has_shape(dst) else ())
    to = region(dst, "the destination", frm.shape)
    _require_alike(to, frm, what)
    held = alloc_fragment(_packets(frm), "int64")
    emit("get_packets", [_in_packets(frm, what), held.whole().ir()], _kind(frm))
    copy(_seen_as(held, frm), to)


def _kind(box: Region) -> dict[str, Any]:
    """What an operation says of its box."""
    return {"dense": True} if box.buffer.dense else {}


def is_dense(call: Any) -> bool:
    """Whether an operation's packets have no marks."""
    return "dense" in call.attrs


def _has_shape(operand: Any) -> bool:
    """Whether an operand has extents of its own, and is no first element of a tile."""
    return isinstance(operand, (Buffer, Region))


def _require_place(what: str) -> None:
    """Packets are between ranks, and a block's."""
    from tilescale.compiler.ops.sync import not_in_parallel

    not_in_parallel(what)
    b = bld.current()
    if b.reach != "device":
        raise TileSyntaxError(
            f"{what} outside T.Scale", loc=source.current(), hint='with T.Scale("device") as (rank, n):'
        )
    if b.executor != "block":
        raise TileSyntaxError(
            f"{what} inside T.Scale({b.executor!r})",
            loc=source.current(),
            expected="packets of a block, each of whose threads stores or awaits its own",
            hint=f"outside of T.Scale({b.executor!r}), on a tile of the block's",
        )


def _box(operand: Any, what: str, like: tuple[Any, ...]) -> Region:
    """The part of a box that an operand names.

    Raises:
        TileTypeError: it is no T.Packets.
    """
    if not is_tile(operand):
        raise TileTypeError(
            f"{what} is given {operand!r}", loc=source.current(), expected="a part of a T.Packets parameter"
        )
    made = region(operand, f"the box of {what}", like)
    if made.buffer.kind != "packets":
        raise TileTypeError(
            f"{made.name} is {'a signal' if made.buffer.kind == 'signal' else f'a {made.dtype} tensor'} and "
            "no box of packets",
            loc=source.current(),
            expected=f'{made.name}: T.Packets(shape, "{made.dtype}")',
            hint="T.copy(…, dst=rank, signal=s[i]) into a T.SymmTensor" if what == "T.put_packets" else None,
        )
    return made


def _require_alike(tile: Region, box: Region, what: str) -> None:
    """Both sides have one shape and one dtype.

    Raises:
        TileTypeError, TileValueError: they have not.
    """
    if tile.buffer.kind in ("signal", "packets"):
        raise TileTypeError(f"{what} of {tile.name}", loc=source.current(), expected="a tile or a tensor")
    if tile.dtype != box.dtype:
        raise TileTypeError(
            f"{tile.name} is of {tile.dtype}, the packets of {box.name} of {box.dtype}",
            loc=source.current(),
            expected="one dtype on both sides",
            hint=f'a tile of "{box.dtype}", and T.copy(…), which converts, '
            + ("in front" if what == "T.put_packets" else "behind"),
        )
    require_same_shape(tile, box, what)


def _packets(box: Region) -> tuple[int, ...]:
    """The shape of a part of a box, in packets.

    Raises:
        TileValueError: its rows are no whole packets, or their length is no constant.
    """
    count, shape = packets.each(BITS[box.dtype]), [constant(e) for e in box.shape]
    if not shape or shape[-1] is None or shape[-1] % count:
        raise TileValueError(
            f"{box} has rows of {show(box.shape[-1:])} elements, and a packet has {count} of {box.dtype}",
            loc=source.current(),
            expected=f"rows of a multiple of {count} elements ({packets.DATA} bytes)",
            hint=f"{box.name}[…, i:i + {count}]",
        )
    if None in shape:
        raise TileValueError(
            f"{box} is of {show(box.shape)}", loc=source.current(), expected="a part of constant extents"
        )
    return (*(int(e) for e in shape[:-1] if e is not None), shape[-1] // count)


def _in_packets(box: Region, what: str) -> Any:
    """A part of a box as a region of its packets.

    Raises:
        TileValueError: it does not begin at a packet, or lies outside.
    """
    count = packets.each(BITS[box.dtype])
    for axis, (low, extent) in enumerate(zip(box.mins, box.extents, strict=True)):
        box.buffer._check_constant(axis, low, extent)
    *mins, first = box.mins
    *extents, row = box.extents
    known = bld.current().definitions
    analyzer = sym.Analyzer()
    if box.dropped[-1] or not multiple(analyzer, spelt_out(first, known), count):
        raise TileValueError(
            f"{box} begins at {first} of a row, and a packet has {count} elements of {box.dtype}",
            loc=source.current(),
            expected=f"a first element that is a multiple of {count} ({packets.DATA} bytes)",
            hint=f"{box.name}[…, i * {count}:…]",
        )
    start = constant(first)
    at = start // count if start is not None else tirx.floordiv(first, tirx.IntImm(str(first.ty), count))
    units = (constant(row) or 0) // count
    return Region(box.buffer, (*mins, at), (*extents, units), box.dropped).ir()


def _seen_as(held: Buffer, box: Region) -> Buffer:
    """A fragment of packets as elements of the box's dtype."""
    from tilescale.compiler.ops.alloc import view

    shape = tuple(constant(e) for e in box.shape)
    return held if box.dtype == "int64" else view(held, shape, box.dtype)


@register
class PutPackets(TileOp):
    """``ts.put_packets(fragment, box, owner)``."""

    name = "put_packets"
    attributes = ("dense?",)
    observed = True

    def effects(self, call: Any) -> list[Access]:
        return [Access(call.args[0], "read"), Access(call.args[1], "update", call.args[2])]

    def stops(self, call: Any) -> bool:
        return True  # others may do something between what stands in front and this

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import packets as boxes

        frm, box, owner = cx.view(call.args[0], call), cx.view(call.args[1], call), cx.scalar(call.args[2])
        site = cx.site_of(call)

        def run(ex: Any) -> Iterator[str]:
            yield "run"
            boxes.put(ex, box, owner(ex), frm.read(ex), site)

        return run


@register
class GetPackets(TileOp):
    """``ts.get_packets(box, fragment)``."""

    name = "get_packets"
    attributes = ("dense?",)
    waits = observed = True

    def effects(self, call: Any) -> list[Access]:
        # who takes a packet of a dense box empties its place
        return [Access(call.args[0], "update" if is_dense(call) else "read"), Access(call.args[1], "write")]

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import packets as boxes

        box, to, site = cx.view(call.args[0], call), cx.view(call.args[1], call), cx.site_of(call)

        def run(ex: Any) -> Iterator[str]:
            yield from boxes.get(ex, box, site)
            to.write(ex, boxes.taken(ex, box, site))

        return run
