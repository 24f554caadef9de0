"""``T.copy``: a tile from here to there, also to or from another rank's memory; bounds are automatic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.lanes import LanesOf, scalars, vector_of
from tilescale.compiler.builder.narrow import Element
from tilescale.compiler.builder.values import Region, as_expr, index_expr
from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import VOID, Access, TileOp, register
from tilescale.compiler.ops import base, by_hand, narrow, placed
from tilescale.compiler.ops.atomic import DTYPES
from tilescale.compiler.ops.base import emit, region, require_same_shape
from tilescale.compiler.tvm_compat import ir, tirx
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError
from tilescale.language.booleans import require_bools
from tilescale.language.dtypes import Narrow

#: by what T.copy may be asked to copy
INSTRUCTIONS = ("tma", "cp_async", "sync")
#: what T.copy may say of the cache
POLICIES = ("evict_normal", "evict_first", "evict_last")


def copy(
    *operands: Any,
    src: Any = None,
    dst: Any = None,
    signal: Any = None,
    value: Any = None,
    signal_op: str | None = None,
    op: str | None = None,
    blocking: bool = True,
    coalesced_width: int | None = None,
    disable_tma: bool = False,
    eviction_policy: str | None = None,
    prefer_instruction: str | None = None,
    annotations: dict[str, Any] | None = None,
    loop_layout: Any = None,
) -> None:
    """Copies a tile: ``T.copy(A[i, k], A_s)``, ``T.copy(tile, B[r, 0], dst=peer)``, ``T.copy(B, tile,
    src=peer)``.

    Extents come from the operand that has them; both sides must agree, axes of extent one aside. Dtypes may
    differ: values are converted. What lies outside a tensor is read as zero and never written.

    Args:
        src, dst: the rank (block, inside ``T.Scale("cta_cluster")``) that owns that side, the other side
            being the caller's; or, given memory instead of an integer, the operands themselves.
        signal: a counter of the destination's rank that is signalled when the copy is complete: with
            ``dst``, and with ``src`` where it does not block. value, signal_op: what is done to it, as in
            ``T.signal``: 1 and "add" where they are left out.
        op: "add" (with ``dst``): the values are added to what lies there, each element atomically among all
            ranks, in the order of arrival: sums of floats differ from run to run.
        blocking: False: the copy, from one tensor to another with ``signal`` and ``dst`` or ``src``, begins
            here and goes on beside the statements behind it. It is complete where its signal is seen, and the
            signal tells of it and of the executor's non-blocking copies before it, of nothing else. With
            ``prefer_instruction="tma"`` and ``dst``, of a tile and without ``signal``: the tile has been read
            where the copy stands; what it writes is complete where its executor next signals or meets others,
            and at the end of its T.Scale, at the latest.
        coalesced_width, loop_layout: as in ``T.Parallel``, over the copy's extents, those of one aside. A
            layout says that threads copy, no engine beside them; a width bounds what threads move (cp.async
            too), not TMA.
        disable_tma: TMA does not make this copy.
        eviction_policy: a hint for the cache, which is not given yet.
        prefer_instruction: "tma", which copies are made by anyway where it can; "cp_async" or "sync": not by
            TMA. With ``dst`` of another rank "tma" has to be asked for. With ``op`` its additions are atomic
            among the blocks of one rank alone, so those of two ranks to one element must not come at once.
        annotations: coalesced_width, disable_tma, eviction_policy and prefer_instruction, which these take
            the place of.

    Raises:
        TileValueError: shapes that differ, both sides remote, a rank that cannot be.
        TileTypeError: a remote side that is not declared ``T.SymmTensor``; sums of a dtype that has no atomic
            additions.
        TileSyntaxError: ``op`` of what is no put to another rank, or goes on beside its executor.
    """
    if annotations is not None:
        coalesced_width, disable_tma, eviction_policy, prefer_instruction = _annotated(
            annotations, coalesced_width, disable_tma, eviction_policy, prefer_instruction
        )
    require_bools(disable_tma=disable_tma, blocking=blocking)
    if prefer_instruction not in (None, *INSTRUCTIONS):
        raise TileValueError(
            f"T.copy(prefer_instruction={prefer_instruction!r})",
            loc=source.current(),
            expected=", ".join(map(repr, INSTRUCTIONS)),
        )
    disable_tma = disable_tma or prefer_instruction in INSTRUCTIONS[1:]
    args = list(operands)
    # behind two operands both words name ranks, also where an element of a tensor says which: dst=expert[t]
    if len(args) < 2 and (base.is_tile(src) or (src is not None and not args)):
        args.insert(0, src)
        src = None
    if len(args) < 2 and base.is_tile(dst):
        args.append(dst)
        dst = None
    if len(args) != 2:
        raise TileTypeError(
            f"T.copy takes a source and a destination, not {len(args)} operands", loc=source.current()
        )
    a, b = args
    if base.of_iterations() and isinstance(a, LanesOf) and isinstance(b, LanesOf):
        b.tile[tuple(b.indices)] = a  # an element of each: an assignment
        return
    a, b = _of_scalars(a, b)
    bases = (ir.TensorLoad, ir.Var, Element)
    like_a = None if isinstance(a, bases) else region(a, "the source", narrow=True).shape
    to = region(b, "the destination", like_a or (), narrow=True)
    frm = region(a, "the source", to.shape, narrow=True)
    if like_a is None and isinstance(b, bases):
        frm, to = (
            region(x, what, (), narrow=True) for x, what in ((a, "the source"), (b, "the destination"))
        )
    if frm.buffer.flat is not None or to.buffer.flat is not None or frm.buffer.safe is not None:
        beside = [src, dst, signal, value, signal_op, op, coalesced_width, loop_layout]
        if any(w is not None for w in beside) or not blocking:
            raise TileTypeError(
                "T.copy of a tensor with a layout or a safe value, with words beside its operands",
                loc=source.current(),
            )
        require_same_shape(frm, to, "T.copy")
        placed.by_element(to, frm, lambda i, j: to.buffer.store(i, frm.buffer[j]))
        return
    require_same_shape(frm, to, "T.copy")
    if src is not None and dst is not None:
        raise TileValueError(
            "both sides of the copy are remote",
            loc=source.current(),
            expected="at most one of src= and dst=",
            hint="copy into a local tile first, then on to the other rank",
        )
    side = "src" if src is not None else "dst" if dst is not None else ""
    peer = check_peer(src if side == "src" else dst, frm if side == "src" else to, side) if side else None
    if side != "src" and to.buffer.kind == "signal" or frm.buffer.kind == "signal":
        raise TileSyntaxError(
            "T.copy of a signal", loc=source.current(), hint="T.signal(s[i], value=…, dst=rank)"
        )
    extra: list[Any] = []
    if signal is None and (value is not None or signal_op is not None):
        word = "value" if value is not None else "signal_op"
        hint = f"T.copy(…, dst=rank, signal=s[i], {word}=…)"
        raise TileSyntaxError(f"{word}= of T.copy without signal=", loc=source.current(), hint=hint)
    if signal is not None:
        value, signal_op = 1 if value is None else value, "add" if signal_op is None else signal_op
        if side != "dst" and (side != "src" or blocking):
            raise TileSyntaxError(
                "signal= goes with dst=, or with src= and blocking=False",
                loc=source.current(),
                hint="T.signal(s[i]) after the copy",
            )
        from tilescale.compiler.ir.signals import OPS
        from tilescale.compiler.ops.sync import counter

        if signal_op not in OPS:
            raise TileValueError(
                f"signal_op={signal_op!r}", loc=source.current(), expected="one of " + ", ".join(OPS)
            )
        extra = [counter(signal, "signal").ir(), as_expr(value, "int64")]
    if base.of_iterations() and not side and all(constant(e) == 1 for r in (frm, to) for e in r.extents):
        # An element of each: an assignment, as in TileLang.
        to.buffer.store(tuple(to.mins), frm.buffer[tuple(frm.mins)])
        return
    words = _by_hand(frm, to, coalesced_width, loop_layout, disable_tma, eviction_policy)
    if isinstance(to.dtype, Narrow) and to.dtype != frm.dtype or frm.buffer.packed or to.buffer.packed:
        if side or signal is not None or op is not None or not blocking or set(words) - {"by_threads"}:
            of = to.dtype if isinstance(to.dtype, Narrow) else frm.dtype
            raise TileTypeError(
                f"T.copy to or from {of}, with words beside its operands",
                loc=source.current(),
                expected="a copy within the block's own memory",
            )
        narrow.copy(frm, to, words)
        return
    if op is not None:
        _require_sum(op, to, side, blocking)
        words["op"] = op
    by_tma = prefer_instruction == INSTRUCTIONS[0]
    if not blocking and by_tma:
        _require_late(frm, side, signal, words)
        words["late"] = True
    elif not blocking:
        _require_nonblocking(frm, to, side, signal)
        words["nonblocking"] = True
    if side:
        if side == "dst" and by_tma and "by_threads" not in words and bld.current().reach == "device":
            words["tma"] = True
        emit(
            "remote_copy",
            [frm.ir(), to.ir(), peer, *extra],
            {"side": side, **({"signal_op": signal_op} if extra else {}), **words},
        )
    else:
        emit("copy", [frm.ir(), to.ir()], words)


def _require_late(frm: Region, side: str, signal: Any, words: dict[str, Any]) -> None:
    """Refuses what TMA cannot do beside its executor."""
    loc = source.current()
    if side != "dst" or bld.current().reach != "device" or "by_threads" in words:
        raise TileSyntaxError(
            'prefer_instruction="tma" of a non-blocking copy that is no put of TMA\'s',
            loc=loc,
            expected="a put to another rank, with neither disable_tma= nor loop_layout=",
            hint='T.copy(tile, B[i, 0], dst=rank, prefer_instruction="tma", blocking=False)',
        )
    if signal is not None:
        raise TileSyntaxError(
            "signal= of a non-blocking copy by TMA",
            loc=loc,
            expected="a signal of its own behind it, which awaits it",
            hint="T.signal(s[i], dst=rank)",
        )
    if frm.buffer.scope.startswith("global"):
        raise TileTypeError(
            f"a non-blocking copy of {frm.name} by TMA, which is a tensor",
            loc=loc,
            expected="a tile, which TMA stores from shared memory",
            hint="a T.copy of it to a tile of T.alloc_shared first",
        )


def _require_nonblocking(frm: Region, to: Region, side: str, signal: Any) -> None:
    """Refuses what cannot go on beside its executor."""
    loc, b = source.current(), bld.current()
    if not side or signal is None:
        raise TileSyntaxError(
            "blocking=False of a copy that nobody is told of",
            loc=loc,
            expected="dst= or src=, and signal=: its end is known by its signal alone",
            hint="T.copy(A[i, 0], B[i, 0], dst=rank, signal=s[i], blocking=False)",
        )
    if b.reach != "device" or b.executor != "block":
        raise TileSyntaxError(
            f"a non-blocking copy of a {b.executor if b.reach == 'device' else b.reach}",
            loc=loc,
            expected="one of a block's, to another rank or from it",
            hint='T.copy(…, blocking=False) inside T.Scale("device"), outside of smaller scales',
        )
    for r in (frm, to):
        if not r.buffer.scope.startswith("global"):
            raise TileTypeError(
                f"a non-blocking copy of {r.name}, which is no tensor",
                loc=loc,
                expected="a tensor on both sides: a tile may have other contents before it is read",
                hint="blocking=True, or a T.copy of the tile to a tensor first",
            )


def _require_sum(op: str, to: Region, side: str, blocking: bool) -> None:
    """Refuses what is no sum into another rank's memory."""
    loc = source.current()
    if op != "add":
        raise TileValueError(f"op={op!r} of T.copy", loc=loc, expected='"add", or nothing')
    if side != "dst" or bld.current().reach != "device":
        what = "from another rank" if side == "src" else "to another block" if side else "within one rank"
        raise TileSyntaxError(
            f'op="add" of a copy {what}',
            loc=loc,
            expected='a put: T.copy(tile, B[i, 0], dst=rank, op="add")',
            hint=f"T.atomic_add({to.name}[…], tile) in the own memory",
        )
    if to.dtype not in DTYPES:
        raise TileTypeError(
            f'op="add" of a copy to {to.dtype}', loc=loc, expected="one of " + ", ".join(DTYPES)
        )
    if not blocking:
        raise TileSyntaxError(
            'op="add" of a non-blocking copy',
            loc=loc,
            expected="the block's own threads, which add what they copy",
            hint="blocking=True",
        )


def _of_scalars(a: Any, b: Any) -> tuple[Any, Any]:
    """The operands of a copy, those of vectors as their lanes.

    Raises:
        TileTypeError: vectors on one side alone, or of different ones.
    """
    of, to = vector_of(a), vector_of(b)
    if of is not to:
        raise TileTypeError(
            f"T.copy of {of or 'scalars'} to {to or 'scalars'}",
            loc=source.current(),
            expected="the same vectors on both sides",
            hint=f"{(of or to).of} with a last axis of {(of or to).count} on both",
        )
    alone = isinstance(a, LanesOf) and isinstance(b, LanesOf)
    return scalars(a, alone), scalars(b, alone)


def require_policy(eviction: Any) -> None:
    """
    Raises:
        TileValueError: an eviction_policy that there is not.
    """
    if not (eviction is None or isinstance(eviction, str) and eviction in POLICIES):
        raise TileValueError(
            f"eviction_policy={eviction!r}", loc=source.current(), expected="one of " + ", ".join(POLICIES)
        )


def _by_hand(
    frm: Region, to: Region, width: Any, layout: Any, disable_tma: bool, eviction: Any
) -> dict[str, Any]:
    """What the author says of how threads copy, as attributes."""
    require_policy(eviction)
    made: dict[str, Any] = {} if width is None else {"width": by_hand.width(width)}
    if layout is not None:
        sizes = [
            [constant(e) if constant(e) is not None else e for e in r.shape if constant(e) != 1]
            for r in (frm, to)
        ]
        made["layout"] = by_hand.layout(
            layout, [a if isinstance(a, int) else b for a, b in zip(*sizes, strict=True)], "T.copy"
        )
    return made | ({"by_threads": True} if disable_tma or layout is not None else {})


def check_peer(peer: Any, owned: Region, side: str) -> Any:
    """The rank of the launch (or block of the cluster) that owns ``owned``, as an expression; ``peer`` counts
    within the open team.

    Raises:
        TileSyntaxError, TileTypeError, TileValueError: no such scale is open, or the memory cannot be reached
        there.
    """
    b = bld.current()
    reach = b.reach
    loc = source.current()
    if reach not in ("device", "cta_cluster"):
        raise TileSyntaxError(
            f"{side}= reaches another rank outside T.Scale",
            loc=loc,
            hint='with T.Scale("device") as (rank, n):',
        )
    if reach == "device" and owned.buffer.scope not in ("global.symm", "global.signal", "global.packets"):
        raise TileTypeError(
            f"{owned.name} is remote ({side}=) and is not in symmetric memory",
            loc=loc,
            expected=f"a parameter declared {owned.name}: T.SymmTensor(shape, dtype)",
        )
    if reach == "cta_cluster" and not owned.buffer.scope.startswith("shared"):
        raise TileTypeError(
            f"{owned.name} belongs to another block ({side}=) and is not in shared memory",
            loc=loc,
            hint="T.alloc_shared",
        )
    e = index_expr(peer)
    known = constant(e)
    if known is not None and known < 0:
        raise TileValueError(f"{side}={known} is no rank", loc=loc, expected="0 ≤ rank < world size")
    if known is not None and reach == "cta_cluster" and b.launch is not None:
        x, y, z = b.launch.cluster
        if known >= x * y * z:
            raise TileValueError(
                f"{side}={known} is no block of the cluster", loc=loc, expected=f"0 ≤ block < {x * y * z}"
            )
    return b.team.rank(e, side) if reach == "device" and b.team is not None else e


def _annotated(annotations: Any, *given: Any) -> tuple[Any, ...]:
    """Words of T.copy, those that its annotations have taken from there."""
    names = ("coalesced_width", "disable_tma", "eviction_policy", "prefer_instruction")
    if isinstance(annotations, dict):
        base.unheeded("copy", {k: v for k, v in annotations.items() if k not in names})
        return tuple(annotations.get(name, value) for name, value in zip(names, given, strict=True))
    base.unheeded("copy", annotations)
    return given


@register
class Copy(TileOp):
    """``ts.copy(src, dst)``: both sides are the executor's own."""

    name = "copy"
    attributes: ClassVar[tuple[str, ...]] = ("width?", "layout?", "by_threads?", "pinned?")
    moves = plain = in_place = True

    def effects(self, call: Any) -> list[Access]:
        return [Access(call.args[0], "read"), Access(call.args[1], "write")]

    def nest(self, call: Any) -> Any:
        from tilescale.compiler.ir.nests import element_nest, indexed, long_axes

        src, dst = call.args[:2]
        from_axes, to_axes = long_axes(src), long_axes(dst)
        sizes = [a.region[k].extent if constant(a.region[k].extent) is not None else b.region[j].extent
                 for k, j in zip(from_axes, to_axes, strict=True) for a, b in ((src, dst),)]  # fmt: skip

        def element(at: list[Any]) -> Any:
            value = tirx.BufferLoad(src.source, indexed(src, at, from_axes))
            kind = str(tirx.BufferLoad(dst.source, [r.min for r in dst.region]).ty)
            value = value if str(value.ty) == kind else tirx.Cast(kind, value)
            return self.stored(call, indexed(dst, at, to_axes), value)

        asked = {"layout": str(call.attrs["layout"])} if "layout" in call.attrs else {}
        return element_nest(
            sizes,
            element,
            call,
            "T.copy",
            width=int(call.attrs["width"]) if "width" in call.attrs else 0,
            **asked,
        )

    def stored(self, call: Any, indices: list[Any], value: Any) -> Any:
        """What the nest does with an element's value."""
        return tirx.BufferStore(call.args[1].source, value, indices, call.span)

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import tiles

        src, dst = cx.view(call.args[0], call), cx.view(call.args[1], call)
        return lambda ex: dst.write(ex, tiles.converted(src.read(ex), src.dtype, dst.dtype))


@register
class RemoteCopy(Copy):
    """``ts.remote_copy(src, dst, owner)``: a rank (block of the cluster) owns the side that ``attrs["side"]``
    names, "src" or "dst". With two operands more, the rank of ``dst`` is signalled: a counter and what
    ``attrs["signal_op"]`` does to it. With ``attrs["op"]`` the values are combined with what lies there, each
    element by an atomic update that orders nothing else: as those of a copy, they are there behind a
    signal."""

    name = "remote_copy"
    attributes = (*Copy.attributes, "side", "signal_op?", "op?", "tma?", "nonblocking?", "late?")
    plain = False
    puts = True

    def effects(self, call: Any) -> list[Access]:
        side, owner, queue = self.side(call), call.args[2], self.queue(call)
        beside = queue in ("put", "pull")
        to = owner if side == "dst" else None
        told = [Access(call.args[3], "update", to)] if self.signals(call) else []
        return [
            Access(call.args[0], "read", owner if side == "src" else None, asynchronous=beside),
            Access(call.args[1], "update", owner, half="add")
            if self.adds(call)
            else Access(call.args[1], "write", to, asynchronous=queue != ""),
            *told,
        ]

    def adds(self, call: Any) -> bool:
        """Whether it adds to what lies there."""
        return "op" in call.attrs

    def stored(self, call: Any, indices: list[Any], value: Any) -> Any:
        if not self.adds(call):
            return super().stored(call, indices, value)
        where = tirx.BufferRegion(call.args[1].source, [ir.Range.from_min_extent(i, 1) for i in indices])
        attrs = {"kind": call.attrs["op"], "executor": call.attrs["executor"], "reach": call.attrs["reach"]}
        return tirx.Evaluate(
            ir.Call("ts.atomic", [where, value], attrs=attrs, ret_ty=VOID, span=call.span), call.span
        )

    def side(self, call: Any) -> str:
        return str(call.attrs["side"])

    def signals(self, call: Any) -> bool:
        """Whether it signals."""
        return len(call.args) > 4

    def queue(self, call: Any) -> str:
        if "late" in call.attrs:
            return "copy"
        if "nonblocking" not in call.attrs or not self.signals(call):
            return ""
        return "put" if self.side(call) == "dst" else "pull"

    def stops(self, call: Any) -> bool:
        return self.signals(call)  # the signal is a step of its own: what was copied may land long before it

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import atomics, flights, tiles

        side, adds, wide = self.side(call), self.adds(call), "tma" not in call.attrs
        src, dst, peer = cx.view(call.args[0], call), cx.view(call.args[1], call), cx.scalar(call.args[2])
        told = peer if side == "dst" else None
        signal = (
            cx.signalling(call, call.args[3], call.args[4], str(call.attrs["signal_op"]), told)
            if self.signals(call)
            else None
        )

        def run(ex: Any) -> None:
            owner = peer(ex)
            values = tiles.converted(src.read(ex, owner if side == "src" else None), src.dtype, dst.dtype)
            if adds:
                atomics.posted(ex, dst, values, owner, wide)
            else:
                dst.write(ex, values, owner if side == "dst" else None)

        def with_signal(ex: Any) -> Iterator[str]:
            run(ex)
            yield "signal"
            assert signal is not None
            signal(ex, None if told is None else told(ex))

        def beside(ex: Any, unit: Any) -> Iterator[str]:
            run(ex)
            yield "signal"
            assert signal is not None
            signal(ex, None if told is None else told(ex), flights.Put(ex, unit))

        if "late" in call.attrs:  # it has read its tile, and is awaited
            return lambda ex, unit: run(ex)
        if signal is None:
            return run
        return beside if self.queue(call) else with_signal


class Filling(Copy):
    """A part of a tensor into a stage of a ring, complete where the ring's round is awaited: ``(src, dst)``,
    with a third operand from the memory of the rank that it names."""

    levels = ("scheduled",)
    attributes = (*Copy.attributes, "ring")
    fills = True
    plain = False

    def effects(self, call: Any) -> list[Access]:
        owner = call.args[2] if len(call.args) > 2 else None
        return [
            Access(call.args[0], "read", owner, asynchronous=True),
            Access(call.args[1], "write", asynchronous=True),
        ]

    def nest(self, call: Any) -> Any:
        return None

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import rings, tiles

        src, dst = cx.view(call.args[0], call), cx.view(call.args[1], call)
        owner = cx.scalar(call.args[2]) if len(call.args) > 2 else lambda ex: None

        def begin(
            ex: Any,
        ) -> None:  # where it copies is settled when it is issued, what it copies when it moves
            source, target = src.placed(ex, owner(ex)), dst.placed(ex, None)
            rings.start(
                ex,
                int(call.attrs["ring"]),
                lambda: target.write(tiles.converted(source.read(), src.dtype, dst.dtype)),
            )

        return begin


def filling(name: str, call: Any, ring: int) -> Any:
    """A ``T.copy`` as an operation that fills a ring."""
    owner = call.args[2:3]
    attrs = {k: v for k, v in dict(call.attrs).items() if k not in ("side", "signal_op")}
    return ir.Call(
        f"ts.{name}", [*call.args[:2], *owner], attrs={**attrs, "ring": ring}, ret_ty=call.ty, span=call.span
    )
