"""Votes: what the lanes of a warp, or the threads of a block, say of themselves, told to each of them.

A warp's vote orders nothing but its own values (PTX ISA 9.0, "vote.sync", "match.sync"); a block's is a
barrier of all its threads as well (PTX ISA 9.0, "barrier.red"). All lanes of the warp must come, or all that
the mask names: lanes that do not are a deadlock, which the simulator names. Names and the order of arguments
are TileLang's.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.values import as_expr, dtype_of, truth
from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.operations import Access, TileOp, register
from tilescale.compiler.ir.scales import WARP
from tilescale.compiler.ops.alloc import alloc_var
from tilescale.compiler.ops.base import emit
from tilescale.compiler.ops.mma_sync import whole_warps
from tilescale.compiler.ops.shuffle import EVERYONE, coming, is_named, lanes_of
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import TileTypeError

#: the word of each vote and what it gives; of `MATCHES` the lanes bring numbers, of the others conditions
VOTES = {
    "any": ("any_sync", "int32"),
    "all": ("all_sync", "int32"),
    "ballot": ("ballot_sync", "uint64"),
    "active": ("activemask", "uint64"),
    "match_any": ("match_any_sync", "uint32"),
    "match_all": ("match_all_sync", "uint32"),
}
MATCHES = ("match_any", "match_all")


# ---- of a warp


def any_sync(predicate: Any, mask: int = EVERYONE) -> Any:
    """1 where ``predicate`` holds on one lane or more of those that vote, else 0 (int32).

    Args:
        predicate: a condition, or an integer, which holds where it is not zero. mask: the lanes that vote,
            lane k as bit k, and alone come here; all of the warp's without.

    Raises:
        TileTypeError: a predicate that is neither; a mask that is no constant. TileValueError: a mask
        without a lane. TileSyntaxError: outside a thread's code, or in T.Parallel.
    """
    return _vote("any", _condition("T.any_sync", predicate), mask)


def all_sync(predicate: Any, mask: int = EVERYONE) -> Any:
    """1 where ``predicate`` holds on all lanes that vote, else 0. As :func:`any_sync`."""
    return _vote("all", _condition("T.all_sync", predicate), mask)


def ballot_sync(predicate: Any, mask: int = EVERYONE) -> Any:
    """The lanes of the warp on which ``predicate`` holds, lane k as bit k (uint64). As :func:`any_sync`."""
    return _vote("ballot", _condition("T.ballot_sync", predicate), mask)


def ballot(predicate: Any) -> Any:
    """`ballot_sync` of all lanes."""
    return _vote("ballot", _condition("T.ballot", predicate), EVERYONE)


def activemask() -> Any:
    """The lanes of the warp that are here, as bits (uint64). It is defined where all lanes of the warp come:
    which of them a GPU finds in a branch that some take is its own affair, and the simulator reports who did
    not come."""
    return _vote("active", as_expr(True, "bool"), EVERYONE)


def tvm_warp_activemask() -> Any:
    """`activemask` by TVM's name (uint32)."""
    return tirx.Cast("uint32", activemask())


def match_any_sync(value: Any, mask: int = EVERYONE) -> Any:
    """The lanes of the warp whose ``value`` is that of this lane, as bits (uint32).

    Args:
        value: an integer of at most 64 bits. mask: as of :func:`any_sync`.

    Raises:
        TileTypeError, TileValueError: no integer; a mask that is no constant, or has no lane.
        TileSyntaxError: outside a thread's code, or in T.Parallel.
    """
    return _vote("match_any", _number("T.match_any_sync", value), mask)


def match_all_sync(value: Any, mask: int = EVERYONE) -> Any:
    """All lanes that vote, as bits (uint32), where ``value`` is the same on all of them; else 0. As
    :func:`match_any_sync`."""
    return _vote("match_all", _number("T.match_all_sync", value), mask)


def _condition(what: str, predicate: Any) -> Any:
    dtype = str(dtype_of(predicate))
    if dtype != "bool" and "int" not in dtype:
        raise TileTypeError(
            f"{what} of a predicate of {dtype}",
            loc=source.current(),
            expected="a condition, or an integer",
            hint="x != 0",
        )
    return truth(bool(predicate) if isinstance(predicate, int) else predicate)


def _number(what: str, value: Any) -> Any:
    dtype = str(dtype_of(value))
    if "int" not in dtype:
        raise TileTypeError(
            f"{what} of {dtype}",
            loc=source.current(),
            expected="an integer",
            hint='T.reinterpret(x, "int32") compares bits',
        )
    e = as_expr(value)
    return e if dtype.endswith(("32", "64")) else tirx.Cast("int32", e)


def _vote(kind: str, value: Any, mask: Any) -> Any:
    word, dtype = VOTES[kind]
    whole_warps(f"T.{word}")
    named = lanes_of(f"T.{word}", mask)
    held = alloc_var(dtype)
    bld.current().give_name(held.buffer, "vote")
    emit("vote", [held.buffer.whole().ir(), value], {"kind": kind, **named})
    return held.load()


def decided(kind: str, mine: int, values: dict[int, Any]) -> int:
    """What a lane is told, by what each lane brought."""
    if kind in MATCHES:
        same = {lane: v == values[mine] for lane, v in values.items()}
        return _bits(same) if kind == "match_any" or all(same.values()) else 0
    if kind in ("any", "all"):
        return int((any if kind == "any" else all)(values.values()))
    return _bits(values)


def _bits(tests: dict[int, Any]) -> int:
    return sum(bool(test) << lane for lane, test in tests.items())


@register
class Vote(TileOp):
    """``vote(into, value)``: all lanes of a warp come to it, or those of the mask."""

    name = "vote"
    attributes = ("kind", "mask?")
    waits = by_thread = True

    def written(self, call: Any) -> str:
        return f"T.{VOTES[str(call.attrs['kind'])][0]}"

    def effects(self, call: Any) -> list[Access]:
        return [Access(call.args[0], "write")]

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import numerics

        into, value, kind = cx.view(call.args[0], call), cx.scalar(call.args[1]), str(call.attrs["kind"])
        site, lanes = cx.site(call, self.written(call)), coming(call, WARP)

        def run(ex: Any) -> Generator[str, None, None]:
            mine, told = ex.linear % WARP, 0
            if is_named(call, ex, site):
                values = yield from ex.machine.exchange(ex, ex.linear // WARP, mine, lanes, value(ex), site)
                told = decided(kind, mine, values)
            into.write(ex, numerics.encode(told, into.dtype))

        return run


# ---- of a block


def syncthreads_count(predicate: Any) -> Any:
    """A barrier of all of the block's threads, and on how many of them ``predicate`` holds (int32).

    Raises:
        TileTypeError: a predicate that is neither a condition nor an integer. TileSyntaxError: outside a
        thread's code, or in T.Parallel.
    """
    return _block_vote("count", predicate)


def syncthreads_and(predicate: Any) -> Any:
    """As :func:`syncthreads_count`: 1 where it holds on all of them, else 0."""
    return _block_vote("and", predicate)


def syncthreads_or(predicate: Any) -> Any:
    """As :func:`syncthreads_count`: 1 where it holds on one or more, else 0."""
    return _block_vote("or", predicate)


def _block_vote(kind: str, predicate: Any) -> Any:
    what = f"T.syncthreads_{kind}"
    whole_warps(what)
    test = _condition(what, predicate)
    held = alloc_var("int32")
    bld.current().give_name(held.buffer, "vote")
    emit("block_vote", [held.buffer.whole().ir(), test], {"kind": kind})
    return held.load()


@register
class BlockVote(TileOp):
    """``block_vote(into, test)``: all threads of the block come to it, and what each did before it is known
    to all behind it."""

    name = "block_vote"
    attributes = ("kind",)
    waits = by_thread = True

    def written(self, call: Any) -> str:
        return f"T.syncthreads_{call.attrs['kind']}"

    def effects(self, call: Any) -> list[Access]:
        return [Access(call.args[0], "write")]

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import numerics

        into, test, kind = cx.view(call.args[0], call), cx.scalar(call.args[1]), str(call.attrs["kind"])
        site, threads = cx.site(call, self.written(call)), int(cx.program.launch.threads)

        def run(ex: Any) -> Generator[str, None, None]:
            mine = bool(test(ex))  # as it is in front of the barrier, which is that of T.sync_threads()
            key = ("threads", ex.block.number, ex.rank.number, 0, threads)
            yield from ex.machine.meet(ex, key, threads, site)
            tests = yield from ex.machine.exchange(ex, _BLOCK, ex.linear, threads, mine, site)
            count = sum(tests.values())
            told = {"count": count, "and": int(count == threads), "or": int(count > 0)}[kind]
            into.write(ex, numerics.encode(told, into.dtype))

        return run


#: in place of a warp's number
_BLOCK = -1
