"""Nests in thread IR: each thread runs its share of the iterations, slot by slot of the loop's layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

from tilescale.compiler.gpu import packed_halves
from tilescale.compiler.gpu.build import all_of
from tilescale.compiler.gpu.ops.atomic import emit_neighbours
from tilescale.compiler.gpu.places import Box, Global, Registers, digit, widened
from tilescale.compiler.gpu.state import State
from tilescale.compiler.gpu.vectors import Plan, plan
from tilescale.compiler.ir.multiples import bound_in, spelt_out
from tilescale.compiler.ir.nests import Nest
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout.loops import bits_of, choose, fragments_of, in_registers
from tilescale.compiler.layout.match import Loop, Slots, everywhere, idle, match, seen_by
from tilescale.compiler.layout.spread import replicated
from tilescale.compiler.tvm_compat import EXTERN_CALLS, ir, structural_walk, sym, tirx
from tilescale.errors import InternalError, TileValueError

#: rounds of a loop without registers that are laid out one by one; longer ones stay loops
UNROLLED = 16
#: rounds from which on a branch is worth its while
DECIDED = 8
#: vectors of a copy from memory to memory that a thread has under way at once. A load takes 600 to 1000 ns
#: there, so 256 threads with one of 16 bytes each move some 5 GB/s
UNDER_WAY = 8


class _Irregular(Exception):
    """An access whose slot is no linear function of the loops' counters: every round is laid out with
    constants."""


class NestLowering(State):
    """Mixed into the lowering: ``nest(nest)``."""

    two_packets: Callable[[Any], Any]
    strided: bool = False
    #: one holder of the iteration runs already
    only: bool = False

    def nest(self, nest: Nest) -> Any:
        """A nest as thread IR.

        Raises:
            TileValueError: more iterations than 32 bits count.
        """
        known = [n for n in map(constant, nest.extents) if n is not None]
        if len(known) == len(nest.extents) and prod(known) >= 1 << 31:
            raise TileValueError(
                f"{nest.what} of {prod(known)} elements by one executor",
                loc=self.here,
                expected="fewer than 2147483648",
                hint="T.Kernel with more blocks, each of which takes a part",
            )
        loop, bad = choose(nest, self.layouts, self.executor.threads)
        if bad:
            raise InternalError(f"{bad[0][0].buffer.name} does not fit the loop: {bad[0][1]}", loc=self.here)
        if loop is None:
            return self._strided(nest)
        with self.counted_from(loop.fragment.first_thread):
            try:
                made = self._looped(nest, loop)
            except _Irregular:
                made = self._laid_out(nest, loop)
        self.did(nest.accesses, made)
        return made

    # -- constant extents
    # -----------------------------------------------------------------------------------------
    def _looped(self, nest: Nest, loop: Loop) -> Any:
        """One loop a digit of the slots."""
        if not nest.width and (made := self.by_matrices(nest, loop)) is not None:
            return made
        inner, test = _guarded(nest, loop)
        if (vectors := plan(self, inner, loop)) is not None:
            return self._vectorised(inner, loop, vectors, test)
        if (
            "packed_halves" not in self.program.without
            and (two := packed_halves.pairs(self, nest, loop)) is not None
        ):
            self.program.fired.append("packed_halves")
            return self._packed(nest, loop, two)
        starts, binds = self.starts(loop)
        counters = [
            tirx.Var(f"u{k}" if len(loop.digits) > 1 else "u", "int32") for k in range(len(loop.digits))
        ]
        for var, p in zip(counters, loop.digits, strict=True):
            self.bind_range(var, p.extent)
        around = list(zip(counters, loop.counts, strict=True))
        if (single := self._one_by_one(nest, loop)) is not None:
            together = self._together(nest, loop, single, starts, around, None)
            if together is not None:
                return sequence([*binds, self.by_those(loop, together)])
        if (outer := self._deciding(nest, loop)) is not None:
            body = self._decided(nest, loop, starts, around, outer)
        else:
            body = self.loops(nest, self.round_of(nest, loop, starts, counters, None), around)
        return sequence([*binds, self.by_those(loop, body)])

    def _deciding(self, nest: Nest, loop: Loop) -> list[bool] | None:
        """Which digits of the slots decide about the condition around a nest's whole body, where the others
        are so many that a branch is worth its while and the condition is one of whole waves' registers; None
        where there is no such condition."""
        s = nest.body
        if (
            not isinstance(s, tirx.IfThenElse)
            or s.else_case is not None
            or self.executor.threads % self.target.wave
            or nest.alone
        ):
            return None
        reads: list[Any] = []
        structural_walk(s.condition, (ir.TensorLoad, lambda e: reads.append(e.source)))
        calls: list[Any] = []
        structural_walk(
            s.condition, (ir.Call, lambda c: calls.append(c) if c.op.name in EXTERN_CALLS else None)
        )
        written = {a.buffer for a in nest.accesses if a.mode != "read"}
        if not reads or calls or not all(in_registers(b) and b not in written for b in reads):
            return None
        used: set[Any] = set()
        structural_walk(s.condition, (ir.Var, used.add))
        outer = [p.axis is None or nest.vars[p.axis] in used for p in loop.digits]
        return outer if prod(n for n, o in zip(loop.counts, outer, strict=True) if not o) >= DECIDED else None

    def _decided(
        self, nest: Nest, loop: Loop, starts: list[Any], around: list[tuple[Any, int]], outer: list[bool]
    ) -> Any:
        """The loops, those of the deciding digits outside, and a branch in them that a wave takes if one of
        its lanes does."""
        zero = tirx.IntImm("int32", 0)
        counters = [v for v, _ in around]

        def inside() -> Any:
            test = tirx.call_extern("bool", "ts::any", self.scalar(nest.body.condition))
            body = self.round_of(nest, loop, starts, counters, None)
            return tirx.IfThenElse(
                test, self.loops(nest, body, [a for a, o in zip(around, outer, strict=True) if not o]), None
            )

        held = [v if o else zero for v, o in zip(counters, outer, strict=True)]
        body = self.round_of(nest, loop, starts, held, None, inside)
        return self.loops(nest, body, [a for a, o in zip(around, outer, strict=True) if o])

    def by_those(self, loop: Loop, body: Any) -> Any:
        """The body for the waves that have any of a nest's iterations."""
        for axis in range(len(loop.vars)):
            p = idle(loop, axis, self.target.wave)
            if p is not None:
                mine = digit(
                    self.thread(), p.stride, p.extent, last=p.stride * p.extent == loop.fragment.threads
                )
                test = mine < loop.extents[axis] // p.unit
                if (known := self.own(test)) is None:
                    body = tirx.IfThenElse(test, body, None)
                elif not known:
                    return sequence([])
        return body

    def _packed(self, nest: Nest, loop: Loop, two: packed_halves.Pairs) -> Any:
        """The innermost digit two by two, one instruction each."""
        starts, binds = self.starts(loop)
        counters = [tirx.Var(f"u{k}", "int32") for k in range(len(loop.digits))]
        extents = [*loop.counts[:-1], loop.counts[-1] // 2]
        for var, n in zip(counters, extents, strict=True):
            self.bind_range(var, n)
        around = list(zip(counters, extents, strict=True))
        first = counters[-1] * 2 if extents[-1] > 1 else tirx.IntImm("int32", 0)
        body = self.round_of(
            nest, loop, starts, [*counters[:-1], first], None, lambda: packed_halves.emit(self, nest, two)
        )
        return sequence(
            [*binds, self.by_those(loop, self.loops(nest, body, around if extents[-1] > 1 else around[:-1]))]
        )

    def by_matrices(self, nest: Nest, loop: Loop) -> Any | None:
        """The nest by instructions that store a wave's elements as matrices; None where the target, or this
        nest, does not."""
        return None

    def loops(self, nest: Nest, body: Any, counters: list[tuple[Any, int]]) -> Any:
        """Loops around a round, unrolled where they index registers or are short."""
        indexed = any(
            prod(self.layouts[a.buffer].shape) > 1 for a in fragments_of(nest) if a.buffer in self.layouts
        )
        unroll = indexed or prod(n for _, n in counters) <= UNROLLED
        kind = tirx.ForKind.UNROLLED if unroll else tirx.ForKind.SERIAL
        for var, n in reversed(counters):
            body = tirx.For(
                var, tirx.IntImm("int32", 0), tirx.IntImm("int32", n), kind, body, span=nest.node.span
            )
        return body

    # -- several neighbours at once
    # ---------------------------------------------------------------------------------
    def _vectorised(self, nest: Nest, loop: Loop, vectors: Plan, test: Any = None) -> Any:
        """The innermost digit in groups of neighbours; a group runs where ``test`` holds."""
        starts, binds = self.starts(loop)
        chunks = loop.digits[-1].extent // vectors.count
        counters = [tirx.Var(f"u{k}", "int32") for k in range(len(loop.digits))]
        extents = [*loop.counts[:-1], chunks]
        for var, n in zip(counters, extents, strict=True):
            self.bind_range(var, n)
        outside = [m for m in vectors.moves if isinstance(self.places[m.element.buffer], Global)]
        self.widths[nest.node] = max((m.width * bits_of(m.element.buffer) // 8 for m in outside), default=0)
        group = counters[-1] * vectors.count if chunks > 1 else tirx.IntImm("int32", 0)

        def moved() -> Any:
            there = None if test is None else self.scalar(test)
            made = (self._direct if vectors.direct else self._group)(nest, vectors, group)
            return made if there is None else tirx.IfThenElse(there, made, None)

        copied = _rereads_copies(nest, loop)

        def make() -> Any:
            return self._by_holder(moved) if copied else moved()

        around = list(zip(counters, extents, strict=True))[: None if chunks > 1 else -1]
        if test is None and not copied and vectors.direct and self._between_memories(nest):
            together = self._together(nest, loop, vectors, starts, around, group)
            if together is not None:
                return sequence([*binds, self.by_those(loop, together)])
        body = self.round_of(nest, loop, starts, [*counters[:-1], group], None, make)
        return sequence([*binds, self.by_those(loop, self.loops(nest, body, around))])

    def _one_by_one(self, nest: Nest, loop: Loop) -> Plan | None:
        """The plan of a copy between two tensors of a GPU's memory whose elements go one by one: threads that
        waited for each would have one access under way."""
        s, axis = nest.body, loop.digits[-1].axis if loop.digits else None
        if (
            axis is None
            or axis >= len(nest.vars)
            or nest.alone
            or not isinstance(s, tirx.BufferStore)
            or not isinstance(s.value, ir.TensorLoad)
            or str(s.value.ty) != str(s.buffer.ty.dtype)
            or s.value.source.same_as(s.buffer)
            or not self._between_memories(nest)
        ):
            return None
        return Plan(axis, 1, [], direct=True)

    def _between_memories(self, nest: Nest) -> bool:
        """Whether a nest reads memory of a GPU and writes such."""
        s = nest.body
        return isinstance(s.value, ir.TensorLoad) and all(
            isinstance(self.place_of(buffer, writes), Global)
            for buffer, writes in ((s.buffer, True), (s.value.source, False))
        )

    def _together(
        self,
        nest: Nest,
        loop: Loop,
        vectors: Plan,
        starts: list[Any],
        around: list[tuple[Any, int]],
        group: Any,
    ) -> Any | None:
        """A copy between memories whose rounds are taken `UNDER_WAY` at once, all loads in front of all
        stores; None where there is nothing to take together."""
        if not around:
            return None
        best = max(range(len(around)), key=lambda k: (at_once(around[k][1]), k))
        some = at_once(around[best][1])
        if some == 1:
            return None
        var, extent = around[best]
        outer, one = tirx.Var(var.name, "int32"), tirx.Var(f"{var.name}_one", "int32")
        self.bind_range(outer, extent // some)
        self.bind_range(one, some)
        at = one if extent == some else outer * some + one
        counters = [at if v.same_as(var) else v for v, _ in around]
        if len(counters) == len(loop.digits):
            counters[-1] = counters[-1] * vectors.count
        else:
            counters.append(group)
        s = nest.body
        width = min((m.width for m in vectors.moves), default=1)
        dtype = str(s.buffer.ty.dtype)
        tile = tirx.decl_buffer(
            (some * vectors.count,), dtype, f"{s.buffer.name}_under_way", scope="local", layout=None
        )

        def move(loads: bool) -> Any:
            first, out = self._first(nest, vectors), []
            for k in range(0, vectors.count, width):
                self._step(nest, vectors, counters[-1], first, tirx.IntImm("int32", k))
                here = [_run(one * vectors.count + k, width)]
                if loads:
                    out.append(self._fetched(tile, here, s.value.source, s.value.indices, s.value))
                    continue
                buf, flat, tests, _ = self.access(s.buffer, s.indices, s, True)
                made = tirx.BufferStore(buf, tirx.BufferLoad(tile, here), [_run(flat, width)], s.span)
                out.append(self.once(tirx.IfThenElse(all_of(tests), made, None) if tests else made))
            return sequence(out)

        zero = tirx.IntImm("int32", 0)

        def rounds(loads: bool) -> Any:
            made = self.round_of(nest, loop, starts, counters, None, lambda: move(loads))
            count = tirx.IntImm("int32", some)
            return tirx.For(one, zero, count, tirx.ForKind.UNROLLED, made, span=nest.node.span)

        body = sequence([tirx.AllocBuffer(tile), rounds(True), rounds(False)])
        rest = [(outer, n // some) if v.same_as(var) else (v, n) for v, n in around]
        for v, n in reversed([r for r in rest if r[1] > 1 or not r[0].same_as(outer)]):
            body = tirx.For(v, zero, tirx.IntImm("int32", n), tirx.ForKind.SERIAL, body, span=nest.node.span)
        return body

    def _step(self, nest: Nest, vectors: Plan, group: Any, first: Any, offset: Any) -> None:
        """Turns to the element ``offset`` behind the first of the group."""
        var = nest.vars[vectors.axis]
        at = self.analyzer.simplify(first + offset)
        self.variables[var] = at if str(var.ty) == "int32" else tirx.Cast(str(var.ty), at)
        self.counters = [*self.counters[:-1], group + offset]

    def _first(self, nest: Nest, vectors: Plan) -> Any:
        first = self.variables[nest.vars[vectors.axis]]
        return first.value if isinstance(first, tirx.Cast) else first

    def _direct(self, nest: Nest, vectors: Plan, group: Any) -> Any:
        """Nothing but the vectors' moves."""
        s, first, out = nest.body, self._first(nest, vectors), []
        width = min(m.width for m in vectors.moves)
        for k in range(0, vectors.count, width):
            self._step(nest, vectors, group, first, tirx.IntImm("int32", k))
            buf, flat, tests, place = self.access(s.buffer, s.indices, s, True)
            if Box in map(type, (place, self.places.get(getattr(s.value, "source", None)))):
                out.append(self.two_packets(s))
                continue
            into = [tirx.Ramp(flat, tirx.IntImm(str(flat.ty), 1), width)]
            zero = tirx.Broadcast(tirx.const(0, str(buf.ty.dtype)), width)
            if isinstance(s.value, ir.TensorLoad):
                frm, at, reads, _ = self.access(s.value.source, s.value.indices, s.value, False)
                value = tirx.BufferLoad(frm, [tirx.Ramp(at, tirx.IntImm(str(at.ty), 1), width)])
                made: Any = tirx.BufferStore(buf, value, into, s.span)
                if reads:
                    made = tirx.IfThenElse(all_of(reads), made, tirx.BufferStore(buf, zero, into, s.span))
            else:
                made = tirx.BufferStore(buf, zero, into, s.span)
            made = tirx.IfThenElse(all_of(tests), made, None) if tests else made
            out.append(made if isinstance(place, Registers) else self.once(made))
        return sequence(out)

    def _fetched(self, tile: Any, here: list[Any], buffer: Any, indices: Any, node: Any) -> Any:
        """A vector of memory into registers, the ramp ``here`` of ``tile``; zeros where it lies outside."""
        width = int(here[0].lanes) if isinstance(here[0], tirx.Ramp) else 1
        buf, flat, tests, _ = self.access(buffer, indices, node, False)
        made = tirx.BufferStore(tile, tirx.BufferLoad(buf, [_run(flat, width)]), here)
        if not tests:
            return made
        zeros = tirx.const(0, str(tile.ty.dtype))
        zeros = tirx.Broadcast(zeros, width) if width > 1 else zeros
        return tirx.IfThenElse(all_of(tests), made, tirx.BufferStore(tile, zeros, here))

    def _group(self, nest: Nest, vectors: Plan, group: Any) -> Any:
        """Vectors into registers, the elements one by one, vectors out of registers."""
        first, before, after, held = self._first(nest, vectors), [], [], []
        names = bound_in(nest.body)  # the body's own names are not there yet where its vectors are read
        for m in vectors.moves:
            node = m.element.node
            indices = [spelt_out(e, names) for e in m.element.indices]
            reads = m.element.mode == "read"
            dtype = str(m.element.buffer.ty.dtype)
            way = "in" if reads else "more" if m.element.mode == "update" else "out"
            name = f"{m.element.buffer.name}_{way}"
            tile = tirx.decl_buffer((vectors.count,), dtype, name, scope="local", layout=None)
            before.append(tirx.AllocBuffer(tile))
            for k in range(0, vectors.count, m.width):
                self._step(nest, vectors, group, first, tirx.IntImm("int32", k))
                here = [tirx.Ramp(tirx.IntImm("int32", k), tirx.IntImm("int32", 1), m.width)]
                if reads:
                    before.append(self._fetched(tile, here, m.element.buffer, indices, node))
                    continue
                buf, flat, tests, _ = self.access(m.element.buffer, indices, node, True)
                there = [tirx.Ramp(flat, tirx.IntImm(str(flat.ty), 1), m.width)]
                made: Any = tirx.BufferStore(buf, tirx.BufferLoad(tile, here), there, node.span)
                if m.element.mode == "update":
                    made = emit_neighbours(
                        self,
                        node,
                        m.width,
                        tirx.BufferLoad(buf, [flat]),
                        tirx.BufferLoad(tile, [here[0].base]),
                    )
                after.append(self.once(tirx.IfThenElse(all_of(tests), made, None) if tests else made))
            held.append((node, tile))
        u = tirx.Var("u", "int32")
        self.bind_range(u, vectors.count)
        self._step(nest, vectors, group, first, u)
        var, at = tirx.Var(nest.vars[vectors.axis].name, "int32"), self._first(nest, vectors)
        self.bound(var, at)
        self.spelling[var] = at
        kind = str(nest.vars[vectors.axis].ty)
        self.variables[nest.vars[vectors.axis]] = var if kind == "int32" else tirx.Cast(kind, var)
        outer, self.moved = self.moved, [(node, tirx.BufferLoad(tile, [u])) for node, tile in held]
        try:
            body = sequence([tirx.Bind(var, at), self.stmt(nest.body)])
        finally:
            self.moved = outer  # where slots turn out irregular, each element moves by itself
        return sequence([*before, self.loops(nest, body, [(u, vectors.count)]), *after])

    def in_vector(self, node: Any) -> Any:
        """The register that stands for an access which moves as part of a vector; None for any other."""
        return next((e for n, e in self.moved if n.same_as(node)), None)

    def _laid_out(self, nest: Nest, loop: Loop) -> Any:
        starts, out = self.starts(loop)
        for number, counters in enumerate(itertools.product(*[range(n) for n in loop.counts])):
            out.append(self.round_of(nest, loop, starts, list(counters), number))
        return sequence(out)

    def starts(self, loop: Loop, instead: dict[int, Any] | None = None) -> tuple[list[Any], list[Any]]:
        """Where along each axis a thread begins, and the bindings that say so. ``instead``: what stands for a
        lane's own part, by axis."""
        thread, starts, binds = self.thread(), [], []
        for axis, var in enumerate(loop.vars):
            total: Any = None if instead is None else instead.get(axis)
            for p in loop.thread_digits:
                if p.axis == axis and (instead is None or p.stride >= self.target.wave):
                    part = digit(
                        thread, p.stride, p.extent, last=p.stride * p.extent == loop.fragment.threads
                    )
                    part = part * p.unit if p.unit != 1 else part
                    total = part if total is None else total + part
            shift = loop.shifts[axis]
            if total is None:
                starts.append(tirx.IntImm("int32", -shift))
                continue
            total = self.analyzer.simplify(total - shift if shift else total)
            if isinstance(total, (tirx.IntImm,)) or total.same_as(thread):
                starts.append(total)
                continue
            start = tirx.Var(f"{var.name}{0 if instead is None else '_row'}", "int32")
            self.bound(start, total)
            self.spelling[start] = total
            starts.append(start)
            binds.append(tirx.Bind(start, total))
        return starts, binds

    def round_of(
        self,
        nest: Nest,
        loop: Loop,
        starts: list[Any],
        counters: list[Any],
        number: int | None,
        make: Any = None,
    ) -> Any:
        binds, tests = [], []
        for axis, var in enumerate(loop.vars):
            total = starts[axis]
            for p, c in zip(loop.digits, counters, strict=True):
                if p.axis == axis:
                    total = total + c * p.unit
            total = self.analyzer.simplify(total)
            extent, reach = loop.extents[axis], loop.fragment.shape[axis]
            mine = [total >= 0] if loop.shifts[axis] else []
            mine += (
                [total < extent]
                if reach - loop.shifts[axis] > extent and idle(loop, axis, self.target.wave) is None
                else []
            )
            tests += [t for t in mine if not self.analyzer.can_prove(t)]
            if isinstance(total, tirx.IntImm) or not hasattr(total, "a"):
                made = total if str(var.ty) == "int32" else widened(total, str(var.ty))
                self.variables[var] = made
                continue
            made = tirx.Var(var.name, "int32")
            binds.append(tirx.Bind(made, total))
            self.spelling[made] = total
            self.bind_range(made, extent)  # outside it nothing of the round runs
            self.variables[var] = made if str(var.ty) == "int32" else tirx.Cast(str(var.ty), made)
            tests = [_with(t, total, made) for t in tests]
        outer = self.loop, self.counters, self.round
        self.loop, self.counters, self.round = loop, counters, number
        try:
            if tests:
                test = all_of(tests)
                with self.analyzer.constraint_scope(test):
                    body: Any = tirx.IfThenElse(test, make() if make else self._body(nest), None)
            else:
                body = make() if make else self._body(nest)
        finally:
            self.loop, self.counters, self.round = outer
        return sequence([*binds, body])

    def _body(self, nest: Nest) -> Any:
        """The body of an iteration; by one of the threads that hold it where it may run only once, or where
        the others would read what it writes."""
        if not nest.alone and not _rereads_copies(nest, self.loop):
            return self.stmt(nest.body)
        return self._by_holder(lambda: self.stmt(nest.body))

    def _by_holder(self, make: Callable[[], Any]) -> Any:
        """What is made, by one of the threads that hold the current iteration."""
        test = self.holder()
        outer, self.only = self.only, True
        body = make()
        self.only = outer
        return body if test is None else tirx.IfThenElse(test, body, None)

    # -- extents known only at run time
    # ---------------------------------------------------------------------------
    def _strided(self, nest: Nest) -> Any:
        """Iteration after iteration in steps of the executor's threads."""
        thread, threads = self.thread(), self.executor.threads
        extents = [self.extent(e) for e in nest.extents]
        total: Any = 1
        for e in extents:
            total = (
                total * e
                if isinstance(total, int) and isinstance(e, int)
                else widened(total, "int32") * widened(e, "int32")
            )
        steps = tirx.Var("step", "int32")
        flat = tirx.Var("at", "int32")
        binds: list[Any] = [tirx.Bind(flat, steps * threads + thread)]
        self.bind_range(steps, (widened(total, "int32") + (threads - 1)) // threads)
        rest: Any = flat
        inside = flat < widened(total, "int32")
        self.bind_range(flat, total)
        for k in reversed(range(len(nest.vars))):
            var = tirx.Var(nest.vars[k].name, "int32")
            binds.append(tirx.Bind(var, rest % widened(extents[k], "int32") if k else rest))
            self.bind_range(var, extents[k])
            dt = str(nest.vars[k].ty)
            self.variables[nest.vars[k]] = var if dt == "int32" else tirx.Cast(dt, var)
            rest = rest // widened(extents[k], "int32")
        outer, self.strided = self.strided, True
        before, self.loop = self.loop, Loop((), (), seen_by(replicated((), threads), threads), ())
        body = tirx.IfThenElse(inside, sequence([*binds[1:], self.stmt(nest.body)]), None)
        self.loop, self.strided = before, outer
        count = (widened(total, "int32") + (threads - 1)) // threads
        return tirx.For(
            steps,
            tirx.IntImm("int32", 0),
            count,
            tirx.ForKind.SERIAL,
            sequence([binds[0], body]),
            span=nest.node.span,
        )

    def bound(self, var: Any, value: Any) -> None:
        """Tells the analyzer between what a binding lies. (Told the value, it would put it in the variable's
        place.)"""
        known = self.analyzer.const_int_bound(value)
        low, high = int(known.min_value), int(known.max_value)
        if low < 0 and str(var.ty).startswith("uint"):
            return  # a difference wraps, which the analyzer does not know
        if low < 0 and self.analyzer.can_prove(
            value >= tirx.IntImm(str(value.ty), 0), sym.ProofStrength.SYMBOLIC_BOUND
        ):
            low = 0  # by what its parts have to do with one another
        most = {"int8": 127, "uint8": 255, "int16": 32767, "uint16": 65535}.get(
            str(var.ty), (1 << 31) - 1
        )  # the range's end is a value of the dtype, too
        if (
            -(1 << 31) <= low and high < most and high - low < (1 << 31) - 1
        ):  # an extent that wraps would prove anything
            self.analyzer.bind(
                var, ir.Range(tirx.IntImm(str(var.ty), low), tirx.IntImm(str(var.ty), high + 1))
            )

    # -- what stands inside
    # ---------------------------------------------------------------------------------------
    def slot(self, place: Registers, buffer: Any, indices: Any, writes: bool) -> Any:
        """The slot of an element in this thread's registers."""
        held = seen_by(place.layout, self.executor.threads)
        if self.loop is None or self.strided:
            found: Slots | str = everywhere(indices, held)
        else:
            found = match(self.loop, indices, held, writes)
        if isinstance(found, str):
            raise InternalError(f"{place.name}[{', '.join(map(str, indices))}]: {found}", loc=self.here)
        total: Any = tirx.IntImm("int32", found.base)
        if self.loop is not None and not self.strided and self.round is not None and found.table:
            total = tirx.IntImm("int32", found.table[self.round])
        elif found.coefficients is not None:
            for c, counter in zip(found.coefficients, self.counters, strict=True):
                total = total + counter * c
        elif found.table:
            raise _Irregular
        for e, unit, extent, stride in found.dynamic:
            total = total + self.scalar(e) // unit % extent * stride
        return self.analyzer.simplify(total)

    def holder(self) -> Any:
        """Whether this thread stands for all that hold the current iteration; None where it is the only
        one."""
        if self.strided or self.only:
            return None
        thread = self.thread()
        if self.loop is None:
            return None if self.executor.threads == 1 else tirx.EQ(thread, 0)
        tests = []
        for p in self.loop.thread_digits:
            if p.axis is None:
                last = p.stride * p.extent == self.loop.fragment.threads
                tests.append(
                    tirx.EQ(thread if p.stride == 1 and last else digit(thread, p.stride, p.extent, last), 0)
                )
        return all_of(tests) if tests else None


def _rereads_copies(nest: Nest, loop: Loop | None) -> bool:
    """Whether several threads hold an iteration of a nest that writes memory which it reads: all but one of
    them would read what that one writes meanwhile."""
    return nest.rereads and loop is not None and loop.fragment.copies != (0,)


def _guarded(nest: Nest, loop: Loop) -> tuple[Nest, Any]:
    """A nest without a condition around its whole body that is the same for all neighbours of the innermost
    digit, and that condition."""
    s = nest.body
    axis = loop.digits[-1].axis if loop.digits else None
    if (
        not isinstance(s, tirx.IfThenElse)
        or s.else_case is not None
        or axis is None
        or axis >= len(nest.vars)
    ):
        return nest, None
    found: list[Any] = []
    structural_walk(s.condition, (ir.Var, lambda v: found.append(v) if v.same_as(nest.vars[axis]) else None))
    structural_walk(s.condition, (ir.TensorLoad, found.append))
    structural_walk(s.condition, (ir.Call, lambda c: found.append(c) if c.op.name in EXTERN_CALLS else None))
    return (nest, None) if found else (replace(nest, body=s.then_case), s.condition)


def _run(first: Any, width: int) -> Any:
    """The index of ``width`` neighbours."""
    return tirx.Ramp(first, tirx.IntImm(str(first.ty), 1), width) if width > 1 else first


def at_once(rounds: int) -> int:
    """How many of a loop's rounds are taken at once."""
    return next(n for n in range(min(UNDER_WAY, rounds), 0, -1) if rounds % n == 0)


def _with(test: Any, value: Any, name: Any) -> Any:
    """A test on ``value`` as one on the variable bound to it."""
    return type(test)(name, test.b) if test.a.same_as(value) else test
