"""A thread's own code at the scale of the block: what depends on ``T.get_thread_binding()`` outside of
T.Scale.

Statements that name the thread's index, and what follows from it, become ``T.Scale("thread")`` regions;
what all threads do together (T.copy of a tile, T.gemm, T.Parallel) stands between them at the block's scale.
Variables
and T.alloc_local memory in which threads would disagree get a row for each thread: a tile of (threads, …) in
shared memory, of which a region touches the own row. So the simulator and the CPU run it as it is written,
and
see who reads what another one wrote; a GPU takes the rows back into registers (passes/own_registers.py).

Two statements of which one writes shared memory that the other one touches stand in regions of their own.
Behind a region all threads have come to its end, so that what was written before is read behind it;
passes/insert_barriers.py derives the barrier, as between any two statements of the block. A kernel whose
author orders its threads by hand (`ORDERED_BY_HAND`) is not cut there: a region ends where threads do
something together, and within it the author's barriers alone order them.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.ir.operations import effects_of, find
from tilescale.compiler.ir.scales import SCALES, WARPGROUP
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.statements import sequence, statements
from tilescale.compiler.ops.shuffle import OF_WARPS, where_all_come
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx
from tilescale.errors import TileSyntaxError
from tilescale.language.funcs import ORDERED_BY_HAND

_THREAD = "thread"
_HELD = ("local", "local.var")
#: of barriers with phases, what a thread may do alone
_PHASES = ("ts.mbarrier_arrive", "ts.mbarrier_expect_tx", "ts.mbarrier_wait_parity")


def threads_own(body: Any, threads: int, builder: bld.Builder) -> tuple[Any, dict[Any, Any]]:
    """The kernel's body with a thread's own code in T.Scale("thread"), and tile of rows → what each thread
    has of
    it. Unchanged where no thread's index is asked for outside of T.Scale.

    Raises:
        TileSyntaxError: what all threads do together stands under a condition of a thread's own.
    """
    found = _Own(threads, builder)
    if not found.asked(body):
        return body, {}
    found.settle(body)
    found.refuse_all(body)
    made = found.block(body)
    return made, {rows: own for own, rows in found.rows.items()}


def _is_index(e: Any) -> bool:
    """Whether a call is what makes code a thread's own: its index, or what each thread does by itself."""
    by_thread = (op := find(e)) is not None and op.by_thread
    where = str(e.attrs["executor"]) if by_thread else ""
    own = where == "block" or where == "warpgroup" and op is not None and not op.waits
    return own or _names_thread(e)


def _names_thread(e: Any) -> bool:
    return getattr(e.op, "name", "") == "ts.scale_index" and str(e.args[0].value) == _THREAD


def _synchronizes(s: Any) -> bool:
    """Whether the author orders what threads do in a statement (T.sync_threads of some of them, votes)."""
    found: list[Any] = []
    ordering = ("ts.sync_threads", "ts.arrive_threads", "ts.block_vote")
    structural_walk(s, (ir.Call, lambda c: found.append(c) if _name(c) in ordering else None))
    return bool(found)


def _name(c: Any) -> str:
    return str(getattr(c.op, "name", ""))


def _scale(s: Any) -> str:
    """The executor or the reach that an AttrStmt opens; "" for anything else."""
    opens = isinstance(s, tirx.AttrStmt) and s.attr_key == "ts.scale"
    return SCALES[int(s.value.value)] if opens else ""


class _Own:
    """What is the threads' own in one kernel."""

    def __init__(self, threads: int, builder: bld.Builder):
        self.threads, self.builder = threads, builder
        self.by_hand = ORDERED_BY_HAND in builder.switches
        self.group: Any = None  # in T.Scale("warpgroup"): the warpgroup's number
        self.private: set[Any] = set()  # fragments that only threads' own code touches
        self.names: set[Any] = set()  # bound to values that differ among threads
        self.held: set[Any] = set()  # variables and local memory in which they differ
        self.rows: dict[Any, Any] = {}
        self.bound: dict[Any, Any] = {}  # names in front of the place that is rebuilt → their Bind

    # -- what differs
    # --------------------------------------------------------------------------------------------
    def asked(self, s: Any) -> bool:
        """Whether a statement outside of T.Scale names the thread's index."""
        if isinstance(s, tirx.AttrStmt) and _scale(s) in ("thread", "warp"):
            return False
        if isinstance(s, tirx.SeqStmt):
            return any(map(self.asked, s.seq))
        if isinstance(s, tirx.AttrStmt):
            return self.asked(s.body)
        if isinstance(s, (tirx.For, tirx.While)):
            return self.own(s.extent if isinstance(s, tirx.For) else s.condition) or self.asked(s.body)
        if isinstance(s, tirx.IfThenElse):
            others = [s.then_case, *([s.else_case] if s.else_case is not None else [])]
            return self.own(s.condition) or any(map(self.asked, others))
        return self.own(s)

    def own(self, e: Any) -> bool:
        """Whether an expression or a statement names what differs among threads."""
        found: list[Any] = []
        structural_walk(e, (ir.Call, lambda c: found.append(c) if _is_index(c) else None))
        return bool(found) or self.differs(e)

    def differs(self, e: Any) -> bool:
        """Whether it names what threads have set differently."""
        found: list[Any] = []
        structural_walk(e, (ir.Var, lambda v: found.append(v) if v in self.names or v in self.held else None))
        structural_walk(e, (ir.TensorLoad, lambda x: found.append(x) if x.source in self.held else None))
        structural_walk(e, (ir.TensorRegion, lambda x: found.append(x) if x.source in self.held else None))
        structural_walk(e, (tirx.BufferStore, lambda x: found.append(x) if x.buffer in self.held else None))
        return bool(found)

    def settle(self, body: Any) -> None:
        """Finds all names and memory in which threads differ."""
        self.indices: set[Any] = set()
        count = -1
        while count != len(self.indices):
            count = len(self.indices)
            structural_walk(
                body, (tirx.Bind, lambda s: self.indices.add(s.var) if self.names_index(s.value) else None)
            )
        self.private = self.privates(body)
        before = (-1, -1)
        while before != (len(self.names), len(self.held)):
            before = (len(self.names), len(self.held))
            self.spread(body, False)

    def refuse_all(self, s: Any) -> None:
        """
        Raises:
            TileValueError: a barrier of some threads stands where all of the block's come.
        """
        if isinstance(s, tirx.SeqStmt):
            for x in s.seq:
                self.refuse_all(x)
        elif isinstance(s, (tirx.AttrStmt, tirx.For, tirx.While)):
            self.refuse_all(s.body)
        elif isinstance(s, tirx.IfThenElse) and not self.own(s.condition):
            self.refuse_all(s.then_case)
            if s.else_case is not None:
                self.refuse_all(s.else_case)
        if not isinstance(s, tirx.Evaluate) or not isinstance(s.value, ir.Call):
            return
        name, attrs = _name(s.value), s.value.attrs
        if name not in ("ts.sync_threads", "ts.arrive_threads") or str(attrs["executor"]) != "block":
            return
        if name == "ts.sync_threads" and int(attrs["barrier"]) == OF_WARPS:
            return
        what = f"T.sync_threads of {int(attrs['count'])} threads"
        if name == "ts.arrive_threads":
            what = "T.named_barrier_arrive"
        elif int(attrs["count"]) == self.threads:
            return
        raise where_all_come(what, self.threads, loc_of(s.span))

    def may_hold(self, buffer: Any) -> bool:
        return buffer.ty.storage_scope in _HELD or buffer in self.private

    def privates(self, body: Any) -> set[Any]:
        """Fragments of which threads set elements by what differs among them, and which nothing that threads
        do together touches: each thread has all of it, as of T.alloc_local."""
        written: set[Any] = set()
        together: set[Any] = set()

        def region(r: Any) -> None:
            together.add(r.source)

        def nest(f: Any) -> None:
            if f.kind == tirx.ForKind.PARALLEL:
                structural_walk(f, (ir.TensorLoad, lambda e: together.add(e.source)))
                structural_walk(f, (tirx.BufferStore, lambda s: together.add(s.buffer)))

        def store(s: Any) -> None:
            if s.buffer.ty.storage_scope == "local.fragment" and self.names_index(s):
                written.add(s.buffer)

        structural_walk(body, (ir.TensorRegion, region))
        structural_walk(body, (tirx.For, nest))
        structural_walk(body, (tirx.BufferStore, store))
        return written - together

    def names_index(self, e: Any) -> bool:
        """Whether a statement names the thread's index, or a name of it."""
        found: list[Any] = []
        structural_walk(e, (ir.Call, lambda c: found.append(c) if _names_thread(c) else None))
        structural_walk(e, (ir.Var, lambda v: found.append(v) if v in self.indices else None))
        return bool(found)

    def spread(self, s: Any, under: bool) -> None:
        """``under``: a condition of a thread's own decides whether it runs, or how often; or it stands in
        what becomes the threads' own as a whole."""
        if isinstance(s, tirx.SeqStmt):
            for x in s.seq:
                self.spread(x, under)
        elif isinstance(s, tirx.AttrStmt):
            self.spread(s.body, under)
        elif isinstance(s, (tirx.For, tirx.While)):
            head = [s.min, s.extent] if isinstance(s, tirx.For) else [s.condition]
            inner = under or any(map(self.own, head)) or (self.own(s) and not self.together(s))
            if inner and isinstance(s, tirx.For) and any(map(self.own, head)):
                self.names.add(s.loop_var)
            self.spread(s.body, inner)
        elif isinstance(s, tirx.IfThenElse):
            inner = under or self.own(s.condition) or (self.own(s) and not self.together(s))
            self.spread(s.then_case, inner)
            if s.else_case is not None:
                self.spread(s.else_case, inner)
        elif isinstance(s, tirx.Bind):
            if self.own(s.value):
                self.names.add(s.var)
        elif isinstance(s, tirx.BufferStore):
            if self.may_hold(s.buffer) and (under or self.own(s)):
                self.held.add(s.buffer)
        elif isinstance(s, tirx.Evaluate):
            each = (op := find(s.value)) is not None and op.by_thread
            for a in effects_of(s.value):
                if (
                    (a.mode != "read" or each)
                    and a.region.source.ty.storage_scope in _HELD
                    and (under or self.own(s))
                ):
                    self.held.add(a.region.source)

    # -- regions
    # -------------------------------------------------------------------------------------------------
    def block(self, s: Any) -> Any:
        """A statement at the block's scale."""
        if isinstance(s, tirx.AttrStmt):
            if _scale(s) in ("thread", "warp"):
                return s
            held = self.threads, self.group
            if _scale(s) == "warpgroup":
                first = statements(s.body)[0]
                self.threads, self.group = WARPGROUP, first.var if isinstance(first, tirx.Bind) else None
            made = tirx.AttrStmt(s.node, s.attr_key, s.value, self.block(s.body), s.span)
            self.threads, self.group = held
            return made
        out: list[Any] = []
        run: list[Any] = []
        outer = dict(self.bound)

        def close() -> None:
            if run:
                out.append(self.region(run))
                run.clear()

        left = statements(s)
        while left:
            x = left.pop(0)
            if isinstance(x, tirx.Bind) and x.var in self.names and not self.pure(x.value):
                x, left = self.kept(x, left, out)  # what it reads may change before it is named again
            if isinstance(x, tirx.AllocBuffer) and x.buffer in self.held:
                out.append(tirx.AllocBuffer(self.row_of(x.buffer), {}, x.span))
            elif isinstance(x, tirx.Bind) and x.var in self.names:
                self.bound[x.var] = x
            elif not self.own(x) or (self.together(x) and not isinstance(x, tirx.SeqStmt)):
                close()
                out.append(self.mixed(x))
            else:
                if run and self.conflict(run, x):
                    close()
                run.append(x)
        close()
        self.bound = outer
        return sequence(out)

    def mixed(self, s: Any) -> Any:
        """A statement of which a part at least is all threads' together."""
        if not self.own(s):
            return s
        head = (
            s.condition
            if isinstance(s, (tirx.IfThenElse, tirx.While))
            else s.extent
            if isinstance(s, tirx.For)
            else s
        )
        if _scale(s) in ("block", "warpgroup"):
            return self.block(s)
        if _scale(s) in ("thread", "warp") and not self.differs(s):
            return s  # the author's own
        if self.own(head) or _scale(s):
            raise TileSyntaxError(
                "what all threads of the block do together depends on a thread's index",
                loc=loc_of(getattr(s, "span", None)),
                expected="elements, loops and conditions of a thread's own, and tiles outside of them",
                hint='T.Scale("warpgroup") or T.Scale("warp") for what some of the threads do with tiles',
            )
        if isinstance(s, tirx.IfThenElse):
            other = None if s.else_case is None else self.block(s.else_case)
            return tirx.IfThenElse(s.condition, self.block(s.then_case), other, s.span)
        if isinstance(s, tirx.While):
            return tirx.While(s.condition, self.block(s.body), s.span)
        if isinstance(s, tirx.AttrStmt):
            return self.block(s)
        notes = dict(s.annotations) if s.annotations else {}
        return tirx.For(
            s.loop_var, s.min, s.extent, s.kind, self.block(s.body), annotations=notes, span=s.span
        )

    def together(self, s: Any, under: bool = False) -> bool:
        """Whether a statement, or one in it, is all threads' together; a loop also where a round reads in
        shared memory what another thread may write there. ``under``: a condition, or the rounds, of a
        thread's own decide about it, so that its order among other threads' is the author's; arrivals and
        waits are the thread's."""
        if isinstance(s, tirx.SeqStmt):
            return any(self.together(x, under) for x in s.seq)
        if isinstance(s, tirx.AttrStmt):
            return s.attr_key == "ts.scale" or self.together(s.body, under)
        if isinstance(s, tirx.For):
            kind = str(s.annotations["ts.kind"]) if s.annotations and "ts.kind" in s.annotations else ""
            if kind == "vectorized":
                # Each thread has all of the elements that it names by its index. Rounds have no order: none
                # reads what another one wrote.
                return self.together(s.body, under)
            if kind in ("parallel", "pipelined") or s.kind == tirx.ForKind.PARALLEL:
                return True
            alone = under or self.own(s.min) or self.own(s.extent)  # rounds that all threads have in turn?
            if self.together(s.body, alone):
                return True
            ordered = alone or _synchronizes(s.body) or "ts.apart" in (s.annotations or {})
            return not ordered and self.conflict([s.body], s.body)
        if isinstance(s, tirx.While):
            return self.together(s.body, under or self.own(s.condition))
        if isinstance(s, tirx.IfThenElse):
            inner = under or self.own(s.condition)
            cases = [s.then_case, *([] if s.else_case is None else [s.else_case])]
            return any(self.together(x, inner) for x in cases)
        if not isinstance(s, tirx.Evaluate):
            return False
        op = find(s.value)
        alone = under or self.own(s)
        if op is None or alone and _name(s.value) in _PHASES or "alone" in (s.value.attrs or {}):
            return False
        own = [a for a in effects_of(s.value) if a.region.source in self.held]
        return not own and not op.in_iterations and not op.by_thread

    def conflict(self, run: list[Any], s: Any) -> bool:
        """Whether one of the two writes shared memory that the other one touches, and nobody but the compiler
        says in which order; atomic updates have any order."""
        if self.by_hand:
            return False
        reads, writes, updates = (set().union(*each) for each in zip(*map(self.shared, run), strict=True))
        read, written, updated = self.shared(s)
        return bool(
            writes & (read | written | updated) or updates & (read | written) or reads & (written | updated)
        )

    def shared(self, s: Any) -> tuple[set[Any], set[Any], set[Any]]:
        """The shared tiles that a statement reads, writes, and updates atomically."""
        reads: set[Any] = set()
        writes: set[Any] = set()
        updates: set[Any] = set()
        by_mode = {"read": reads, "update": updates}

        def touch(buffer: Any, into: set[Any]) -> None:
            if buffer.ty.storage_scope == "shared":
                into.add(buffer)

        structural_walk(s, (ir.TensorLoad, lambda e: touch(e.source, reads)))
        structural_walk(s, (tirx.BufferStore, lambda x: touch(x.buffer, writes)))

        def call(c: Any) -> None:
            if _name(c) == "ts.thread_copy":  # whose order the author's barriers say
                return
            for a in effects_of(c):
                touch(a.region.source, by_mode.get(a.mode, writes))

        structural_walk(s, (ir.Call, call))
        return reads, writes, updates

    # -- rows
    # ----------------------------------------------------------------------------------------------------
    def row_of(self, buffer: Any) -> Any:
        """The tile with a row for each thread."""
        made = self.rows.get(buffer)
        if made is None:
            shape = (self.threads, *buffer.ty.shape)
            dtype = str(buffer.ty.dtype)
            made = tirx.decl_buffer(shape, dtype, buffer.name, scope="shared", data_alignment=64, layout=None)
            self.rows[buffer] = made
            if buffer in self.builder.renames:
                self.builder.renames[made] = self.builder.renames[buffer]
        return made

    @staticmethod
    def pure(e: Any) -> bool:
        found: list[Any] = []
        structural_walk(e, (ir.TensorLoad, found.append))
        return not found

    def kept(self, s: Any, left: list[Any], out: list[Any]) -> tuple[Any, list[Any]]:
        """A name of what a thread reads becomes a variable of the thread's own: its assignment, and the
        statements behind it with the variable in the name's place."""
        dtype = str(s.var.ty)
        held = tirx.decl_buffer((1,), dtype, self.builder.unique(s.var.name), scope="local.var", layout=None)
        self.held.add(held)
        out.append(tirx.AllocBuffer(self.row_of(held), {}, s.span))
        zero = tirx.IntImm("int32", 0)
        read = (ir.Var, lambda v: tirx.BufferLoad(held, [zero]) if v.same_as(s.var) else v)
        return tirx.BufferStore(held, s.value, [zero], s.span), [structural_map(x, read) for x in left]

    def region(self, run: list[Any]) -> Any:
        """Statements of a thread's own, in T.Scale("thread")."""
        own = tirx.Var(self.builder.unique("thread"), "int32")
        index = ir.Call("ts.scale_index", [ir.StringImm(_THREAD)], ret_ty=ir.PrimType("int32"))
        head, known = self.names_for(run)
        body = sequence([*head, *run])
        renamed = {old: tirx.Var(self.builder.unique(old.name), str(old.ty)) for old in known}
        body = structural_map(body, (ir.Var, lambda v: renamed.get(v, v)))
        number = own if self.group is None else own + self.group * WARPGROUP
        body = structural_map(body, (ir.Call, lambda c: number if _names_thread(c) else c))

        inner: set[Any] = set()  # memory that only this region's statements have
        structural_walk(body, (tirx.AllocBuffer, lambda s: inner.add(s.buffer)))
        held = self.held - inner

        def load(e: Any) -> Any:
            return tirx.BufferLoad(self.row_of(e.source), [own, *e.indices]) if e.source in held else e

        def region(r: Any) -> Any:
            if r.source not in held:
                return r
            return tirx.BufferRegion(self.row_of(r.source), [ir.Range.from_min_extent(own, 1), *r.region])

        def store(s: Any) -> Any:
            if s.buffer not in held:
                return s
            return tirx.BufferStore(self.row_of(s.buffer), s.value, [own, *s.indices], s.span)

        def call(c: Any) -> Any:
            if find(c) is None or "executor" not in c.attrs:
                return c
            attrs = {k: (_THREAD if k == "executor" else v) for k, v in c.attrs.items()}
            return ir.Call(c.op, list(c.args), attrs=attrs, ret_ty=c.ty, span=c.span)

        body = structural_map(body, (ir.TensorLoad, load))
        body = structural_map(body, (ir.TensorRegion, region))
        body = structural_map(body, (tirx.BufferStore, store))
        body = structural_map(body, (ir.Call, call))
        span = getattr(run[0], "span", None)
        inside = sequence([tirx.Bind(own, index, span), body])
        level = tirx.IntImm("int32", SCALES.index(_THREAD))
        return tirx.AttrStmt(ir.StringImm(_THREAD), "ts.scale", level, inside, span)

    def names_for(self, run: list[Any]) -> tuple[list[Any], list[Any]]:
        """The bindings in front that a region's statements name, each in front of those that name it."""
        head: list[Any] = []
        seen: list[Any] = []

        def want(s: Any) -> None:
            found: list[Any] = []
            structural_walk(s, (ir.Var, lambda v: found.append(v) if v in self.bound else None))
            for v in found:
                if not any(v.same_as(w) for w in seen):
                    seen.append(v)
                    want(self.bound[v].value)
                    head.append(self.bound[v])

        for s in run:
            want(s)
        return head, seen
