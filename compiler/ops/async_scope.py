"""``with T.attr("default", "async_scope", 1):``, TVM's way to say that a thread does not wait for what it
copies. In it a loop of T.vectorized that copies neighbours from a tensor into shared memory is
T.ptx_cp_async."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.ir import source
from tilescale.compiler.ir.numbers import constant, simplify
from tilescale.compiler.ir.operations import VOID
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.statements import sequence, statements
from tilescale.compiler.ops.thread_copies import SIZES
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx
from tilescale.errors import TileTypeError
from tilescale.language.dtypes import BITS

SCOPE = "async_scope"


class AsyncScope:
    """
    Raises:
        TileTypeError: it stores into shared memory what is no copy of 4, 8 or 16 bytes by T.vectorized.
    """

    def __enter__(self) -> None:
        b = bld.current()
        self.frame = b.push("async_scope", device=False)
        b.open_body()

    def __exit__(self, kind: Any, error: Any, tb: Any) -> None:
        if error is not None:
            return
        b = bld.current()
        body = b.close_body()
        b.pop(self.frame)
        where = {"executor": b.executor, "reach": b.reach}

        def loop(s: Any) -> Any:
            copies = [_copies(x, s, where) for x in statements(s.body)]
            return s if None in copies else sequence([c for made in copies for c in made or ()])

        b.emit(_whole(structural_map(body, (tirx.For, loop))))


def _copies(s: Any, loop: Any, where: dict[str, str]) -> list[Any] | None:
    """The copies that one statement of a vectorized loop is; None where it is something else."""
    count, v = constant(loop.extent), loop.loop_var
    frm = s.value if isinstance(s, tirx.BufferStore) else None
    if (
        loop.kind != tirx.ForKind.VECTORIZED
        or not isinstance(frm, ir.TensorLoad)
        or not isinstance(count, int)
    ):
        return None
    scopes = s.buffer.ty.storage_scope, frm.source.ty.storage_scope
    dtypes = {str(s.buffer.ty.dtype), str(frm.source.ty.dtype)}
    bits = BITS[dtypes.pop()]
    size = next((n for n in sorted(SIZES, reverse=True) if count * bits % (n * 8) == 0), 0)
    starts = [_start(places, v) for places in (s.indices, frm.indices)]
    if scopes[0] != "shared" or not scopes[1].startswith("global") or dtypes or not size or None in starts:
        return None
    each = size * 8 // bits

    def part(buffer: Any, start: Any, first: int) -> Any:
        places = [*start[:-1], start[-1] + first]
        extents = [1] * (len(places) - 1) + [each]
        return tirx.BufferRegion(
            buffer, [ir.Range.from_min_extent(*p) for p in zip(places, extents, strict=True)]
        )

    made = []
    for k in range(0, count, each):
        ends = [part(b, start, k) for b, start in zip((s.buffer, frm.source), starts, strict=True)]
        made.append(
            tirx.Evaluate(ir.Call("ts.thread_copy", ends, attrs=where, ret_ty=VOID, span=s.span), s.span)
        )
    return made


def _start(places: Any, v: Any) -> list[Any] | None:
    """Where the first of the neighbours is; None where iterations are no neighbours along the last axis."""

    def put(e: Any, k: int) -> Any:
        return structural_map(e, (ir.Var, lambda x: tirx.IntImm("int32", k) if x.same_as(v) else x))

    steps = [constant(simplify(put(p, 1) - put(p, 0))) for p in places]
    return [put(p, 0) for p in places] if steps == [0] * (len(steps) - 1) + [1] else None


def _whole(body: Any) -> Any:
    """The body, where it stores nothing else in shared memory."""
    left: list[Any] = []
    structural_walk(body, (tirx.BufferStore, lambda s: left.append(s) if _is_shared(s.buffer) else None))
    if left:
        name = bld.current().renames.get(left[0].buffer, left[0].buffer.name)
        raise TileTypeError(
            f'T.attr(…, "{SCOPE}", …) around what stores into {name}',
            loc=loc_of(left[0].span) or source.current(),
            expected="loops of T.vectorized that copy 4, 8 or 16 bytes of a row of a tensor into a tile of "
            "its dtype in shared memory",
            hint="T.async_copy of a tile, or T.ptx_cp_async",
        )
    return body


def _is_shared(buffer: Any) -> bool:
    return bool(buffer.ty.storage_scope == "shared")
