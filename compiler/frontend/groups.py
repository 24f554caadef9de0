"""Warp specialisation by hand, as TileLang's programs write it: ``with T.ws(0):`` around what warpgroup 0
does,
in loops that all warpgroups share.

When the trace ends, each warpgroup gets a program of its own: the statements from the first ``T.ws`` to the
last,
without those of the others, in one ``T.Scale("warpgroup")``. Fragments of the block that one warpgroup alone
touches become its own. Between warpgroups the author's barriers order, as in any T.Scale.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from importlib import import_module
from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.ir import source
from tilescale.compiler.ir.buffers import redirected, stored
from tilescale.compiler.ir.operations import find
from tilescale.compiler.ir.scales import SCALES, WARPGROUP
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.statements import sequence, statements
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError

MARK = "ts.ws"
HELD = ("local.fragment", "local", "local.var")


class ws:
    """``with T.ws(0):`` holds what warpgroup 0 of the block does; ``T.ws(0, 1)`` what both do, each by
    itself.
    T.tma_copy in it announces its bytes on its barrier.

    Raises:
        TileTypeError: what is no number. TileValueError: one that no warpgroup of the block has.
        TileSyntaxError: outside T.Kernel, or in T.Scale.
    """

    def __init__(self, *warp_group_idx: int):
        if not all(isinstance(g, int) for g in warp_group_idx):
            told = ", ".join(map(str, warp_group_idx))
            raise TileTypeError(f"T.ws({told})", loc=source.current(), expected="numbers of warpgroups")
        self.groups = warp_group_idx

    def __enter__(self) -> None:
        b, loc = bld.current(), source.current()
        if b.launch is None or b.executor != "block":
            raise TileSyntaxError(
                "T.ws stands outside of T.Kernel or in T.Scale", loc=loc, hint="at the block's scale"
            )
        count = b.launch.threads // WARPGROUP
        if b.launch.threads % WARPGROUP or not self.groups or not all(g in range(count) for g in self.groups):
            raise TileValueError(
                f"T.ws({', '.join(map(str, self.groups))}) of a block of {b.launch.threads} threads",
                loc=loc,
                expected=f"warpgroups 0 … {count - 1}, of {WARPGROUP} threads each"
                if count
                else "128 threads or more",
            )
        self.loc = loc
        self.frame = b.push("scale", device=False, detail="warpgroup")
        b.by_hand += 1
        b.scales.append("warpgroup")
        b.open_body()

    def __exit__(self, kind: Any, error: Any, tb: Any) -> None:
        if error is not None:
            return
        b = bld.current()
        body = b.close_body()
        b.by_hand -= 1
        b.scales.pop()
        b.pop(self.frame)
        names = ",".join(map(str, self.groups))
        b.emit(tirx.AttrStmt(ir.StringImm(names), MARK, tirx.IntImm("int32", 0), body, b.span(self.loc)))


def by_warpgroup(body: Any, threads: int, builder: bld.Builder) -> Any:
    """The kernel's body with a program for each warpgroup; as it is without T.ws.

    Raises:
        TileSyntaxError: what all threads do stands between T.ws; a fragment that all threads touch, too.
    """
    return _Groups(threads, builder).kernel(body) if _has(body) else body


def _has(s: Any) -> bool:
    found: list[Any] = []
    structural_walk(s, (tirx.AttrStmt, lambda a: found.append(a) if a.attr_key == MARK else None))
    return bool(found)


def _allocated(parts: list[Any]) -> list[Any]:
    """The allocations of all threads between T.ws, in loops and conditions too."""
    found: list[Any] = []
    for p in parts:
        if isinstance(p, tirx.AllocBuffer):
            found.append(p)
        elif isinstance(p, tirx.SeqStmt):
            found += _allocated(list(p.seq))
        elif isinstance(p, tirx.For):
            found += _allocated([p.body])
        elif isinstance(p, tirx.IfThenElse):
            found += _allocated([x for x in (p.then_case, p.else_case) if x is not None])
    return found


def touched(s: Any) -> set[Any]:
    found: set[Any] = set()
    structural_walk(s, (ir.TensorLoad, lambda e: found.add(e.source)))
    structural_walk(s, (ir.TensorRegion, lambda r: found.add(r.source)))
    structural_walk(s, (tirx.BufferStore, lambda x: found.add(x.buffer)))
    return found


def at_block(c: Any) -> bool:
    """Whether a call is of an operation that the block does."""
    return c.attrs is not None and "executor" in c.attrs and str(c.attrs["executor"]) == "block"


def of_warpgroup(s: Any) -> Any:
    """A statement of the block's as one of a warpgroup's."""
    return of_executor(s, "warpgroup")


def of_executor(s: Any, executor: str) -> Any:
    """A statement of the block's as one of a smaller executor's."""

    def call(c: Any) -> Any:
        if not at_block(c) or find(c) is None:
            return c
        attrs = {k: (executor if k == "executor" else v) for k, v in c.attrs.items()}
        return ir.Call(c.op, list(c.args), attrs=attrs, ret_ty=c.ty, span=c.span)

    return structural_map(s, (ir.Call, call))


def _free_barrier(parts: list[Any]) -> int:
    """The number of a barrier that the author does not name."""
    used: set[int] = set()

    def look(c: Any) -> None:
        if getattr(c.op, "name", "") in ("ts.sync_threads", "ts.arrive_threads"):
            used.add(int(c.attrs["barrier"]))

    for s in parts:
        structural_walk(s, (ir.Call, look))
    return next(n for n in range(1, len(used) + 2) if n not in used)


def _is_of_warps(s: Any) -> bool:
    return (
        isinstance(s, tirx.AttrStmt)
        and s.attr_key == "ts.scale"
        and int(s.value.value) == SCALES.index("warp")
    )


def _is_held(buffer: Any) -> bool:
    return buffer.ty.storage_scope in HELD


class _Groups:
    def __init__(self, threads: int, builder: bld.Builder):
        self.threads, self.builder = threads, builder
        self.members: list[int] = []  # warpgroups that have a T.ws
        self.barrier = 1  # at which all of them meet
        self.taken: set[Any] = set()  # the tiles of T.ws that a warpgroup has

    def kernel(self, s: Any) -> Any:
        """Down to the statements of the launch."""
        if isinstance(s, tirx.AttrStmt) and s.attr_key != MARK:
            return tirx.AttrStmt(s.node, s.attr_key, s.value, self.kernel(s.body), s.span)
        parts = statements(s)
        if any(isinstance(p, tirx.AttrStmt) and p.attr_key in ("ts.kernel", "thread_extent") for p in parts):
            return sequence([self.kernel(p) if _has(p) else p for p in parts])
        return self.split(parts)

    def split(self, parts: list[Any]) -> Any:
        marked = [k for k, p in enumerate(parts) if _has(p)]
        front, middle, tail = parts[: marked[0]], parts[marked[0] : marked[-1] + 1], parts[marked[-1] + 1 :]
        self.barrier = _free_barrier(parts)
        groups = self.members = sorted({g for p in middle for g in self.groups(p)})
        made = {g: [x for p in self.of(middle, g) for x in statements(p)] for g in groups}
        held = {b for parts in made.values() for p in parts for b in touched(p) if _is_held(b)}
        written = {b for parts in made.values() for p in parts for b in stored(p)}
        before, behind = (set().union(*map(touched, x), set()) for x in (front, tail))
        between = _allocated(middle)
        allocated = [*(p for p in front if isinstance(p, tirx.AllocBuffer)), *between]
        # what the warpgroups only read is all threads' alike; of what they set each goes on with its own
        own = [p for p in allocated if p.buffer in held and p.buffer not in before | behind]
        begun = [p for p in allocated if p.buffer in held & written and p.buffer in before | behind]
        for p in begun:
            if p.buffer in behind or p.buffer.ty.storage_scope != "local.var":
                raise TileSyntaxError(
                    f"{self.builder.renames.get(p.buffer, p.buffer.name)} is set by warpgroups, and touched "
                    "by all threads of the block, too",
                    loc=loc_of(p.span),
                    expected="registers of T.ws alone, or a tile in shared memory",
                )
        shared = [p for p in front if p not in own]
        shared += [p for p in between if p not in own]
        held_by_warps = [p for p in [*own, *begun] if self.to_warps(made, p, p in begun)]
        own, begun = ([p for p in x if p not in held_by_warps] for x in (own, begun))
        copies, mine = self.copied(begun)
        which = tirx.Var(self.builder.unique("warpgroup"), "int32")
        index = ir.Call("ts.scale_index", [ir.StringImm("warpgroup")], ret_ty=ir.PrimType("int32"))
        span = getattr(middle[0], "span", None)
        chosen: Any = None
        for g in reversed(groups):
            test = tirx.EQ(which, tirx.IntImm("int32", g))
            chosen = tirx.IfThenElse(test, sequence([mine(p) for p in made[g]]), chosen, span)
        inside = sequence([tirx.Bind(which, index, span), *own, *copies, chosen])
        level = tirx.IntImm("int32", SCALES.index("warpgroup"))
        scale = tirx.AttrStmt(ir.StringImm("warpgroup"), "ts.scale", level, inside, span)
        return sequence([*shared, scale, *tail])

    def to_warps(self, made: dict[int, list[Any]], p: Any, begun: bool) -> bool:
        """Puts an allocation into the T.Scale("warp") in which alone warpgroups touch it, so that each warp
        has its own; says whether there are such. ``begun``: with the block's value to begin with."""
        found = [(g, k) for g, parts in made.items() for k, x in enumerate(parts) if p.buffer in touched(x)]
        if not all(_is_of_warps(made[g][k]) for g, k in found):
            return False
        for n, (g, k) in enumerate(found):
            s = made[g][k]
            which, *rest = statements(s.body)
            if begun:
                first, mine = self.copied([p])
            else:
                tile = self.another(p.buffer) if n else p.buffer
                first, mine = [tirx.AllocBuffer(tile, {}, p.span)], partial(self.put, old=p.buffer, new=tile)
            inside = sequence([which, *first, *map(mine, rest)])
            made[g][k] = tirx.AttrStmt(s.node, s.attr_key, s.value, inside, s.span)
        return bool(found)

    def copied(self, allocated: list[Any]) -> tuple[list[Any], Any]:
        """Variables of the warpgroup's own that begin with the block's values, and a function that puts them
        in the place of those."""
        zero, made, out = tirx.IntImm("int32", 0), {}, []
        for p in allocated:
            name = self.builder.renames.get(p.buffer, p.buffer.name)
            fresh = tirx.decl_buffer((1,), str(p.buffer.ty.dtype), name, scope="local.var", layout=None)
            self.builder.renames[fresh] = self.builder.unique(name)
            made[p.buffer] = fresh
            out.append(tirx.AllocBuffer(fresh, {}, p.span))
            out.append(tirx.BufferStore(fresh, tirx.BufferLoad(p.buffer, [zero]), [zero], p.span))

        return out, lambda s: redirected(s, made)

    def groups(self, s: Any) -> set[int]:
        found: set[int] = set()

        def look(a: Any) -> None:
            if a.attr_key == MARK:
                found.update(int(g) for g in str(a.node.value).split(","))

        structural_walk(s, (tirx.AttrStmt, look))
        return found

    def of(self, parts: list[Any], group: int) -> list[Any]:
        """The statements that a warpgroup runs, with names of its own."""
        out: list[Any] = []
        left = [x for p in parts for x in statements(p)]
        while left:
            p = left.pop(0)
            if isinstance(p, tirx.AllocBuffer):
                continue
            if isinstance(p, tirx.AttrStmt) and p.attr_key == MARK:
                if group in self.groups(p):
                    out.append(self.renamed(p.body))
            elif isinstance(p, tirx.Bind):
                fresh = tirx.Var(self.builder.unique(p.var.name), str(p.var.ty))
                out.append(tirx.Bind(fresh, p.value, p.span))
                left = [self.put(x, p.var, fresh) for x in left]
            elif _has(p):
                made = self.inner(p, group)
                out += [] if made is None else [made]
            else:
                out += self.of_all(p, group)
        return out

    def of_all(self, s: Any, group: int) -> list[Any]:
        """What all threads of the block do between T.ws: the first warpgroup does it, and all of them come
        before and behind it.

        Raises:
            TileSyntaxError: it touches registers, or is no copy or the like; a warpgroup has no T.ws.
        """
        op = find(s.value) if isinstance(s, tirx.Evaluate) else None
        whole = self.members == list(range(self.threads // WARPGROUP))
        if op is None or not op.plain or any(map(_is_held, touched(s))) or not whole:
            raise TileSyntaxError(
                "all threads of the block do this, between what T.ws gives to each warpgroup",
                loc=loc_of(getattr(s, "span", None)),
                expected="statements in T.ws from the first one to the last; copies between tensors and "
                "shared memory, where every warpgroup has a T.ws",
                hint="T.ws of the warpgroup that shall do it, and a barrier of T.alloc_barrier",
            )
        import_module("tilescale.compiler.ops.shuffle")  # whose operation this is
        attrs = {"executor": "warpgroup", "reach": "block", "barrier": self.barrier, "count": self.threads}
        met = ir.Call("ts.sync_threads", [], attrs=attrs, ret_ty=s.value.ty, span=s.span)
        sync = tirx.Evaluate(met, s.span)
        return [sync, *([of_warpgroup(s)] if group == self.members[0] else []), sync]

    def inner(self, s: Any, group: int) -> Any:
        """A loop or a condition around T.ws."""
        if isinstance(s, tirx.For):
            body = self.of(statements(s.body), group)
            fresh = tirx.Var(self.builder.unique(s.loop_var.name), str(s.loop_var.ty))
            if not body:
                return None
            inside = self.put(sequence(body), s.loop_var, fresh)
            return tirx.For(fresh, s.min, s.extent, tirx.ForKind.SERIAL, inside, annotations={}, span=s.span)
        if isinstance(s, tirx.IfThenElse):
            then = self.of(statements(s.then_case), group)
            other = [] if s.else_case is None else self.of(statements(s.else_case), group)
            if not then and not other:
                return None
            return tirx.IfThenElse(s.condition, sequence(then), sequence(other) if other else None, s.span)
        raise TileSyntaxError(
            "T.ws in a construct that warpgroups cannot run apart",
            loc=loc_of(getattr(s, "span", None)),
            expected="T.serial, T.Pipelined and `if` around T.ws",
        )

    @staticmethod
    def put(s: Any, old: Any, new: Any) -> Any:
        return structural_map(s, (ir.Var, lambda v: new if v.same_as(old) else v))

    def renamed(self, s: Any) -> Any:
        """A statement whose own names, loops and tiles are fresh: several warpgroups may run it. Its tiles
        stay what they are for the first one that does."""
        names: list[Any] = []
        tiles: list[Any] = []
        structural_walk(s, (tirx.Bind, lambda x: names.append(x.var)))
        structural_walk(s, (tirx.For, lambda x: names.append(x.loop_var)))
        structural_walk(s, ((tirx.AllocBuffer, tirx.DeclBuffer), lambda x: tiles.append(x.buffer)))
        fresh = {v: tirx.Var(self.builder.unique(v.name), str(v.ty)) for v in names}
        fresh |= {b: self.another(b) for b in tiles if b in self.taken}
        self.taken.update(tiles)
        return structural_map(s, (ir.Var, lambda v: fresh.get(v, v)))

    def another(self, tile: Any) -> Any:
        """A tile like one that another warpgroup has, under a name of its own, with its layout."""
        name = self.builder.unique(self.builder.renames.get(tile, tile.name))
        made = tirx.decl_buffer(
            tuple(tile.ty.shape),
            str(tile.ty.dtype),
            name,
            scope=tile.ty.storage_scope,
            data_alignment=64,
            layout=None,
        )
        launch = self.builder.launch
        layouts = launch.hints.get("layouts", {}) if launch is not None else {}
        for b, given in list(layouts.items()):
            if b.var.same_as(tile):
                like = copy(b)
                like.var = made
                layouts[like] = given
        return made
