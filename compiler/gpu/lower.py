"""Scheduled tile IR, with layouts and fences → thread IR for a GPU: one function, run by every thread of
every block.

What all threads compute alike (indices, conditions, T.alloc_var) each computes for itself. Tiles in registers
are arrays of slots, those in shared memory lie in the arena. Accesses that cannot be proven inside are
guarded: reads give zero, writes to a tensor are dropped, a write outside a tile fails the launch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from tilescale.compiler.gpu.blocks import Blocks
from tilescale.compiler.gpu.build import all_of
from tilescale.compiler.gpu.counters import Counters
from tilescale.compiler.gpu.cprinter import symbol
from tilescale.compiler.gpu.float8 import in_fours
from tilescale.compiler.gpu.kernel import Source, ThreadKernel, placed
from tilescale.compiler.gpu.load_once import load_once
from tilescale.compiler.gpu.logs import Logs
from tilescale.compiler.gpu.nests import NestLowering
from tilescale.compiler.gpu.places import Box, Global, InShared, Place, Private, Registers, widened
from tilescale.compiler.gpu.ranks import Ranks
from tilescale.compiler.gpu.scalars import Scalars
from tilescale.compiler.gpu.tidy import tidied
from tilescale.compiler.ir import numeric
from tilescale.compiler.ir.lowerings import lowering
from tilescale.compiler.ir.multiples import spelt_out
from tilescale.compiler.ir.nests import Element, nest_of
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import effects_of, find, name_of
from tilescale.compiler.ir.pointed import address_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.scales import SCALES, WIDTHS
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ir.walks import mentions
from tilescale.compiler.layout import Fragment
from tilescale.compiler.layout.loops import element_dtype, in_registers
from tilescale.compiler.layout.shared import strided
from tilescale.compiler.layout.viewed import reshaped
from tilescale.compiler.ops.shuffle import OF_WARPS
from tilescale.compiler.passes.remote_puts import COMMUNICATOR
from tilescale.compiler.passes.residency import waits_for_blocks
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx
from tilescale.errors import InternalError, TileSyntaxError, TileValueError
from tilescale.language.dtypes import BITS

_HUGE = 1 << 40
NOTHING = tirx.Evaluate(tirx.IntImm("int32", 0))


class Lowering(Scalars, NestLowering, Logs, Ranks, Blocks, Counters):
    """One kernel on its way to thread IR. A target's own overrides what its instructions do otherwise."""

    def __init__(self, program: TileProgram, *, instrument: bool = False):
        super().__init__(program, instrument=instrument)
        self._parameters()

    # -- parameters
    # -----------------------------------------------------------------------------------------------
    def _parameters(self) -> None:
        symbols = []
        for k, (name, var) in enumerate(self.program.symbols.items()):
            made = tirx.Var(name, "int32")
            self.variables[var] = made if str(var.ty) == "int32" else tirx.Cast(str(var.ty), made)
            self.analyzer.bind(made, ir.Range(0, (1 << 31) - 1))
            self.program.multiples.of(made, name)
            symbols.append((made, Source("symbol", k)))
        for k, p in enumerate(self.program.params):
            if hasattr(p.spec, "shape"):
                self._tensor(k, p)
            else:
                var = tirx.Var(p.name, str(p.spec.dtype))
                self.variables[p.var] = var
                self.params.append((var, Source("param", k)))
        self.symbols = symbols

    def _tensor(self, k: int, p: Any) -> None:
        buf = tirx.decl_buffer((_HUGE,), str(p.spec.dtype), p.name, scope=p.var.ty.storage_scope, layout=None)
        shape = tuple(self.extent(e) for e in p.var.ty.shape)
        given = list(p.var.ty.strides)
        words = 8 if p.spec.kind == "packets" else 1  # of a box they are counted, in both halves
        known = all(isinstance(e, int) for e in shape) and not given and prod(shape) * words < (1 << 31)
        index = "int32" if known else "int64"
        shape, strides = self._row_major(p.var.ty, index)
        if p.spec.kind == "packets":
            self.places[p.var] = Box(buf, shape, strides, index, p.name, dense=p.spec.dense)
        else:
            self.places[p.var] = Global(buf, shape, strides, index, p.name)
        self.params.append((buf, Source("param", k)))

    def _row_major(self, ty: Any, index: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """A tensor's extents, and its strides: those that it was given, or row-major ones."""
        shape = tuple(self.extent(e) for e in ty.shape)
        if given := list(ty.strides):
            return shape, tuple(self.extent(s) for s in given)
        strides: tuple[Any, ...] = ()
        step: Any = 1
        for e in reversed(shape):
            strides = (step, *strides)
            step = (
                step * e
                if isinstance(step, int) and isinstance(e, int)
                else widened(step, index) * widened(e, index)
            )
        return shape, strides

    def extent(self, e: Any) -> Any:
        """An extent as an int where it is one, else as thread IR."""
        if isinstance(e, int):
            return e
        return int(e.value) if isinstance(e, tirx.IntImm) else self.scalar(e)

    # -- who runs
    # -------------------------------------------------------------------------------------------------
    def thread(self) -> Any:
        """The thread's number within its executor."""
        if self.executor.name == "block":
            return self.block_thread()
        return tirx.IntImm("int32", 0) if self.executor.threads == 1 else self.tid % self.executor.threads

    def refused(self, what: str, missing: str) -> TileSyntaxError:
        """The refusal of what the target does not do."""
        text = f"{what} is not there on the {self.target.name} target: it needs {missing}"
        return TileSyntaxError(text, loc=self.here, hint='target="cpu"')

    # -- memory
    # ---------------------------------------------------------------------------------------------------
    def _s_AllocBuffer(self, s: Any) -> Any:
        """Gives an allocation its place."""
        b, dtype = s.buffer, element_dtype(s.buffer)
        shape = tuple(int(e) for e in b.ty.shape)
        if b.ty.storage_scope.startswith("shared"):
            layout = self.layouts[b]
            tile, declared = placed(
                self.arena, b.name, dtype, layout.bytes * 8 // layout.bits, self.program.arena[b][0], s.span
            )
            self.head.append(declared)
            self.places[b] = InShared(tile, layout, shape, self._executors_own(b, layout), b.name)
            if b.ty.storage_scope == "shared.signal":
                self.zeroed.append((tile, self.program.arena[b][1] // 8))
            return NOTHING
        if self.loop is not None or b not in self.layouts:
            buf = tirx.decl_buffer((prod(shape),), dtype, b.name, scope="local", layout=None)
            self.places[b] = Private(buf, shape, b.name)
            return tirx.AllocBuffer(buf, {}, s.span)
        layout = self.layouts[b]
        buf = tirx.decl_buffer((layout.slots,), dtype, b.name, scope="local", layout=None)
        self.places[b] = Registers(buf, layout, shape, b.name)
        return tirx.AllocBuffer(buf, {}, s.span)

    def _executors_own(self, buffer: Any, layout: Any) -> Any:
        """Elements in front of this executor's own copy of a tile, of those who hold one."""
        who = self.program.holders[buffer]
        if len(who) == 1:
            return None
        align = max(16, layout.alignment)
        each = -(-layout.bytes // align) * align * 8 // layout.bits
        flat, width = tirx.IntImm("int32", 0), self.threads
        for scale, n in self.executor.outer:
            index = self.tid if width == self.threads else self.tid % width
            flat = flat * n + index // WIDTHS[scale]
            width = WIDTHS[scale]
        return (flat - who.start) * each if who.start else flat * each

    def _s_DeclBuffer(self, s: Any) -> Any:
        """T.view: the same memory under another shape or dtype; T.make_tensor: that at an address."""
        if (address := address_of(s)) is not None:
            return self._tensor_at(s, address)
        held = self.places[s.data.args[0]]
        b, dtype = s.buffer, element_dtype(s.buffer)
        if isinstance(held, Global) and element_dtype(held.buf) == dtype:
            extents, strides = self._row_major(b.ty, held.index)
            self.places[b] = Global(held.buf, extents, strides, held.index, b.name)
            return NOTHING
        shape = tuple(int(e) for e in b.ty.shape)
        if isinstance(held, InShared):
            layout = reshaped(held.layout, shape, BITS[dtype])
            if layout is None:
                if held.layout != strided(held.layout.shape, held.layout.bits):
                    raise InternalError(f"a view of {held.name}, which has a layout", loc=self.here)
                layout = strided(shape, BITS[dtype])
            tile, declared = placed(
                self.arena,
                b.name,
                dtype,
                layout.bytes * 8 // layout.bits,
                self.program.arena[self.beliefs.bases[b]][0],
                s.span,
            )
            self.head.append(declared)
            own = None if held.base is None else held.base * held.layout.bits // layout.bits
            self.places[b] = InShared(tile, layout, shape, own, b.name)
            return NOTHING
        if isinstance(held, Registers) and isinstance(self.layouts.get(b), Fragment):
            layout = self.layouts[b]
            data = tirx.reinterpret(ir.PointerType(ir.PrimType(dtype), "local"), tirx.buffer_data(held.buf))
            made = tirx.decl_buffer((layout.slots,), dtype, name=b.name, data=data)
            self.places[b] = Registers(made, layout, shape, b.name)
            return tirx.DeclBuffer(made, s.span, data=data)
        raise self.refused(f"T.view of {held.name}", "views of a tensor under another dtype")

    def _tensor_at(self, s: Any, address: Any) -> Any:
        b, dtype = s.buffer, element_dtype(s.buffer)
        made = tirx.decl_buffer((_HUGE,), dtype, b.name, scope="global", layout=None)
        shape, strides = self._row_major(b.ty, "int64")
        self.places[b] = Global(made, shape, strides, "int64", b.name)
        pointer = ir.PointerType(ir.PrimType(dtype), "global")
        return tirx.DeclBuffer(made, s.span, data=tirx.reinterpret(pointer, self.scalar(address)))

    # -- accesses
    # -------------------------------------------------------------------------------------------------
    def access(self, buffer: Any, indices: Any, node: Any, writes: bool) -> tuple[Any, Any, list[Any], Place]:
        """``(flat buffer, index, tests, place)`` of an element; it may be touched where the tests hold."""
        place = self.place_of(buffer, writes)
        if isinstance(place, Registers):
            return place.buf, self.slot(place, buffer, indices, writes), [], place
        if isinstance(place, Box):  # whose part an operation names is looked at once, in front of all
            return place.buf, place.flat([self.scalar(i) for i in indices]), [], place
        at = [self.scalar(i) for i in indices]
        tests: list[Any] = []
        for axis, (i, size) in enumerate(zip(at, place.shape, strict=True)):
            known = int(i.value) if isinstance(i, tirx.IntImm) else None
            if known is not None and isinstance(size, int) and not 0 <= known < size:
                raise TileValueError(
                    f"index {known} lies outside axis {axis} of {place.name}, whose extent is {size}",
                    loc=loc_of(getattr(node, "span", None)) or self.here,
                    expected=f"0 ≤ index < {size}",
                )
            if self.is_stage(indices[axis]):
                continue
            high = size if not isinstance(size, int) else tirx.IntImm(str(i.ty), size)
            for test in (i >= tirx.IntImm(str(i.ty), 0), i < high):
                if not self.proven(test):
                    tests.append(test)
        index = self.analyzer.simplify(place.flat(at))
        index = self.uncut(index) if isinstance(place, Global) else index
        return place.buf, self.without_names(index), tests, place

    def without_names(self, index: Any) -> Any:
        """An index of a thread's own code in the thread's index and counters of loops, where that takes the
        counters out of its quotients and remainders: the loop moves one address by constants then, which
        C++'s compiler sees only where no name of a sum stands between (it unrolls such loops, and begins
        their loads together)."""
        whole = spelt_out(index, self.own_names) if self.executor.name == "thread" else index
        if not self.cuts_rounds(whole):
            return index
        made = self.analyzer.simplify(whole)
        return index if self.cuts_rounds(made) else made

    def cuts_rounds(self, index: Any) -> bool:
        """Whether a quotient or remainder in an index is of the thread's index and of more."""
        used = [numeric.variables(cut) for cut in _cuts(index)]
        return any(self.tid in u and len(u) > 1 for u in used)

    def uncut(self, index: Any) -> Any:
        """An index that cuts a nest's indices into digits (T.annotate_layout of a tensor), in the thread's
        index and counters of rounds, where each digit is of one of them: the counters move one address by
        constants then, where each round would have an address of its own."""
        if not any(mentions(cut, name) for cut in _cuts(index) for name in self.spelling):
            return index
        made = self.analyzer.simplify(spelt_out(index, self.spelling))
        return index if any(isinstance(cut.a, (tirx.Add, tirx.Sub)) for cut in _cuts(made)) else made

    def proven(self, test: Any) -> bool:
        if isinstance(test, bool):
            return test
        return bool(self.analyzer.can_prove(test)) or bool(
            self.held and self.analyzer.can_prove(self._with_names(test))
        )

    def _with_names(self, e: Any) -> Any:
        """A condition with a name for each element, of a constant place, that it reads: the analyzer relates
        names to one another, and not loads."""

        def name(load: Any) -> Any:
            place = tuple(map(constant, load.indices))
            if None in place:
                return load
            return self.held.setdefault((load.source, place), tirx.Var(load.source.name, str(load.ty)))

        return structural_map(e, (ir.TensorLoad, name))

    def load(self, e: Any) -> Any:
        """A load, zero where it lies outside."""
        if (moved := self.in_vector(e)) is not None:
            return moved
        buf, flat, tests, place = self.access(e.source, e.indices, e, False)
        if isinstance(place, Box):
            return self.packet_in(place, flat)
        value = tirx.BufferLoad(buf, [flat])
        return value if not tests else tirx.if_then_else(all_of(tests), value, tirx.const(0, str(value.ty)))

    def _s_BufferStore(self, s: Any) -> Any:
        """A store, dropped outside a tensor; memory that threads share is written by one of those that hold
        the iteration."""
        if (moved := self.in_vector(s)) is not None:
            return tirx.BufferStore(moved.source, self.scalar(s.value), list(moved.indices), s.span)
        buf, flat, tests, place = self.access(s.buffer, s.indices, s, True)
        if isinstance(place, Box):
            data = None if place.empties else self.scalar(s.value)
            return self.once(self.packet_out(place, flat, data, s))
        done: Any = tirx.BufferStore(buf, self.scalar(s.value), [flat], s.span)
        if tests and not isinstance(place, Global):
            return self.once(
                tirx.IfThenElse(
                    all_of(tests), done, self.fail("bounds", s, f"an index of {place.name} lies outside")
                )
            )
        done = tirx.IfThenElse(all_of(tests), done, None) if tests else done
        return done if isinstance(place, (Registers, Private)) else self.once(done)

    def once(self, s: Any) -> Any:
        """A statement with effects that others see: done by one of the threads that run it."""
        test = self.holder()
        return s if test is None else tirx.IfThenElse(test, s, None)

    # -- instructions
    # ---------------------------------------------------------------------------------------------
    def sync(self, scope: str, why: str, proxy: bool = False) -> Any:
        """The threads of an executor synchronize. ``proxy``: each makes its own writes of shared memory
        visible to the asynchronous proxy first; whoever starts an engine behind the barrier then comes after
        all of them (PTX ISA, "Memory Consistency Model", "Proxies")."""
        ahead = self.before_barrier(proxy)
        if self.executor.threads == 1:
            return sequence(ahead)
        made = self.barrier_call(scope)
        return sequence(
            [*ahead, tirx.Evaluate(ir.Call(made.op, list(made.args), attrs={"comment": why}, ret_ty=made.ty))]
        )

    def barrier_call(self, scope: str) -> Any:
        """The call by which threads synchronize."""
        if scope not in ("block", "warp"):
            raise self.refused(f"a barrier of a {scope}", "barriers of part of a block")
        return tirx.call_extern("void", "__syncthreads" if scope == "block" else "__syncwarp")

    def barrier_of(self, scope: str) -> tuple[Any, Any, int]:
        """The barrier of an executor's threads, for a call that is one: this thread's number among them, the
        barrier's, which is -1 for a warp's, and how many they are."""
        if scope not in ("block", "warp"):
            raise self.refused(f"a barrier of a {scope}", "barriers of part of a block")
        number = tirx.IntImm("int32", 0 if scope == "block" else -1)
        return self.thread(), number, self.executor.threads

    def numbered_barrier(self, number: int, count: int) -> Any:
        """Threads of the block synchronize at one of its barriers."""
        if number == OF_WARPS or number == 0 and count == self.threads:
            return tirx.Evaluate(self.barrier_call("warp" if number == OF_WARPS else "block"))
        return self.named_barrier(number, count)

    def named_barrier(self, number: int, count: int, waits: bool = True) -> Any:
        """A barrier of some of its threads, at which the others wait, too."""
        raise self.refused(
            f"T.sync_threads of {count} threads of {self.threads}", "barriers of part of a block"
        )

    def fail(self, kind: str, node: Any, text: str) -> Any:
        """Fails the launch; the site says where."""
        loc = loc_of(getattr(node, "span", None)) or self.here
        entry = f"{kind}||{loc.file if loc else ''}|{loc.line if loc else 0}|{text}".replace("\n", " ")
        if entry not in self.sites:
            self.sites.append(entry)
        site = tirx.IntImm("int32", self.sites.index(entry))
        return tirx.Evaluate(tirx.call_extern("void", "ts::fail", site, self.record()))

    def record(self) -> Any:
        """Where a launch says how it failed, and finds how long a wait may take."""
        if self.failure is None:
            self.failure = tirx.decl_buffer((3,), "int64", "failure", scope="global", layout=None)
        return tirx.buffer_data(self.failure)

    # -- who runs, where threads of a block have code of their own (NVIDIA's warpgroups:
    # cuda/warpgroup_code.py) --------------
    def block_thread(self) -> Any:
        """The thread's number in the block."""
        return self.tid

    def counted_from(self, first: int) -> contextlib.AbstractContextManager[None]:
        """Inside, threads are counted from the one at which fragments begin whose first thread that is."""
        return contextlib.nullcontext()

    def own(self, test: Any) -> bool | None:
        """Whether a test on threads holds for all that run this code; None where it does not say."""
        return None

    def has(self, tile: Any) -> bool:
        """Whether those have a part of a tile."""
        return True

    def skips(self, held: Fragment, shape: Any, thread: Any) -> bool:
        """Whether those have nothing but padding of a fragment."""
        return False

    def did(self, accesses: Sequence[Any], made: Any) -> None:
        """A statement, with its accesses, stands behind what was made so far."""

    def before_barrier(self, proxy: bool) -> list[Any]:
        """What stands in front of a barrier."""
        return []

    # -- statements
    # -----------------------------------------------------------------------------------------------
    def stmt(self, s: Any) -> Any:
        """A statement of tile IR as thread IR."""
        method = getattr(self, "_s_" + type(s).__name__, None)
        if method is None:
            raise InternalError(f"no lowering for the statement {type(s).__name__}", loc=loc_of(s.span))
        self.here = loc_of(s.span) or self.here
        if self.loop is None and (nest := nest_of(s)) is not None:
            return self.remote_copy(s.value, nest) if _is_remote(s) else self.nest(nest)
        if isinstance(s, (tirx.SeqStmt, tirx.For, tirx.While, tirx.IfThenElse, tirx.AttrStmt)):
            with self.behind_looks():
                return method(s)
        return method(s)

    def _s_SeqStmt(self, s: Any) -> Any:
        seq = list(s.seq)
        promise = next((k for k, x in enumerate(seq) if name_of(x) == "assume"), None)
        if promise is None:
            return sequence(self.statements(seq))
        made, condition, rest = self.statements(seq[:promise]), seq[promise].value.args[0], seq[promise + 1 :]
        end = self.beliefs.until(condition, rest)
        with self.given(condition, self.scalar(condition), sequence(rest[:end])):
            made.append(self.stmt(sequence(rest[:end])))
        return sequence([*made, self.stmt(sequence(rest[end:]))])

    def _s_Evaluate(self, s: Any) -> Any:
        op = find(s.value)
        if op is None:
            return tirx.Evaluate(self.scalar(s.value), s.span) if isinstance(s.value, ir.Call) else NOTHING
        made = lowering(s.value, self.program.target).lower(s.value, self)
        if op.multiplies and op.name.startswith("gemm") and not self.in_span:
            made = (
                self.span(made, self.site("gemm", s.value.args[2].source.name, s.value))
                if self.instrument
                else made
            )
        mine = [a for a in effects_of(s.value) if a.proxy != "async" and not in_registers(a.region.source)]
        self.did([Element(a.region.source, (), a.mode, False, None) for a in mine], made)
        return made

    def _s_Bind(self, s: Any) -> Any:
        value = self.scalar(s.value)
        var = tirx.Var(s.var.name, str(value.ty))
        self.variables[s.var] = var
        self.learn(var, value)
        if "int" in str(value.ty) and None not in numeric.variables(s.value):
            self.definitions[s.var] = s.value
        if "int" in str(value.ty) and self.executor.name == "thread" and None not in numeric.variables(value):
            self.own_names[var] = value
        return tirx.Bind(var, value, s.span)

    def learn(self, var: Any, value: Any) -> None:
        """Tells the analyzer what a binding is, where proofs may put the value for the name."""
        if "int" in str(value.ty) and None not in numeric.variables(value):
            self.bound(var, value)

    def _s_IfThenElse(self, s: Any) -> Any:
        test = self.scalar(s.condition)
        with self.given(s.condition, test, s.then_case), self.behind_looks():
            then = self.stmt(s.then_case)
        other = None
        if s.else_case is not None:
            with self.given(tirx.Not(s.condition), tirx.Not(test), s.else_case):
                other = self.stmt(s.else_case)
        return tirx.IfThenElse(test, then, other, s.span)

    @contextlib.contextmanager
    def given(self, condition: Any, lowered: Any, body: Any) -> Iterator[None]:
        """While ``body`` is lowered, what of a condition holds in all of it is known."""
        with contextlib.ExitStack() as known:
            for part in self.beliefs.lasting(condition, lowered, body):
                known.enter_context(self.analyzer.constraint_scope(part))
                if not (named := self._with_names(part)).same_as(part):
                    known.enter_context(self.analyzer.constraint_scope(named))
            yield

    def _s_While(self, s: Any) -> Any:
        return tirx.While(self.scalar(s.condition), self.stmt(s.body), s.span)

    def _s_For(self, s: Any) -> Any:
        return self.joined(lambda: self._for(s))

    def _for(self, s: Any) -> Any:
        extent = self.extent(s.extent)
        var = tirx.Var(s.loop_var.name, str(s.loop_var.ty))
        self.variables[s.loop_var] = var
        self.bind_range(var, extent)
        unroll = str((s.annotations or {}).get("ts.kind", "")) == "unroll" and isinstance(extent, int)
        kind = tirx.ForKind.UNROLLED if unroll else tirx.ForKind.SERIAL
        # who runs beside the consumers has few registers, and waits most of the time
        notes = (
            {"unroll": 1} if self.role in ("producer", COMMUNICATOR) and kind == tirx.ForKind.SERIAL else {}
        )
        if "ts.unroll" in (s.annotations or {}):
            notes = {"unroll": int(s.annotations["ts.unroll"])}
        zero, count = tirx.IntImm(str(var.ty), 0), widened(extent, str(var.ty))
        return tirx.For(var, zero, count, kind, self.stmt(s.body), annotations=notes, span=s.span)

    def bind_range(self, var: Any, extent: Any) -> None:
        dt = str(var.ty)
        self.analyzer.bind(var, ir.Range.from_min_extent(tirx.IntImm(dt, 0), widened(extent, dt)))

    def _s_AttrStmt(self, s: Any) -> Any:
        if s.attr_key == "thread_extent":
            var = self.block["xyz".index(s.node.thread_tag[-1])]
            self.variables[s.node.var] = var
            self.bind_range(var, self.extent(s.value))
            return self.stmt(s.body)
        if s.attr_key == "ts.scale":
            name = SCALES[int(s.value.value)]
            outer, self.executor = self.executor, self.executor.within(name)
            done = self.stmt(s.body)
            self.executor = outer
            return done
        return self.stmt(s.body)

    # -- the whole
    # ------------------------------------------------------------------------------------------------
    def around(self) -> tuple[list[Any], list[Any]]:
        """What a block does before and behind all else: counters are zero."""
        begins = self.zeroing()
        return ([*begins, tirx.Evaluate(self.barrier_call("block"))] if begins else []), []

    def own_params(self, body: Any) -> list[tuple[Any, Source]]:
        """The parameters for the kernel's own."""
        return self.params

    def run(self) -> ThreadKernel:
        """The kernel's function and what its launcher must know."""
        order = self.panels()
        body = self.stmt(self.program.func.body)
        begins, ends = self.around()
        numbers, counts = self.launches_of_boxes()
        tells, leaves = self.ends_of_launch()
        leaves = [self.span(s, self.site_here("wait", "exit")) for s in leaves] if self.instrument else leaves
        steps = [*tells, *begins, *self.entries(), *numbers, body, *counts, *ends, *leaves]
        body = sequence(self.whole(steps))
        smem = [tirx.AllocBuffer(self.arena)] if self.program.arena_bytes else []
        whole = self.with_scratch(sequence([*order, *smem, *self.head, body]))
        whole = load_once(tidied(in_fours(whole) if self.target.float8_pairs else whole))
        launch = self.program.launch
        grid = [*(self.extent(e) for e in launch.grid), 1, 1][:3]
        for axis in reversed(range(3)):
            whole = _thread_extent(self.raw[axis], f"blockIdx.{'xyz'[axis]}", grid[axis], whole)
        threads = self.threads + self.extra
        whole = _thread_extent(self.tid, "threadIdx.x", threads, whole)
        written = {k for k, p in enumerate(self.program.params) if p.var in self.written}
        params = self.own_params(whole) + self.symbols + self.ranked
        params += [] if self.failure is None else [(self.failure, Source("failure"))]
        func = tirx.PrimFunc([v for v, _ in params], whole)
        return ThreadKernel(
            func,
            symbol(self.program.name),
            tuple([*launch.grid, 1, 1][:3]),
            threads,
            tuple(s for _, s in params),
            frozenset(written),
            self.program.arena_bytes,
            cooperative=bool(waits_for_blocks(self.program.func.body)),
            sites=tuple(self.sites),
            device=self.device,
            ordered=launch.flagged,
            bare=launch.exchanges,
            awaited=launch.awaited,
            widths=self.widths,
            wave=self.target.wave,
            team=self.device or any(source.kind != "log" for _, source in self.ranked),
            remote=self.target.remote,
            imported=tuple(self.program.hints.get("imported", ())),
        )


def _is_remote(s: Any) -> bool:
    call = s.value if isinstance(s, tirx.Evaluate) else None
    return isinstance(call, ir.Call) and call.op.name == "ts.remote_copy"


def _cuts(index: Any) -> list[Any]:
    """The quotients and remainders in an index."""
    found: list[Any] = []
    structural_walk(index, ((tirx.FloorDiv, tirx.FloorMod), found.append))
    return found


def _thread_extent(var: Any, tag: str, extent: Any, body: Any) -> Any:
    extent = widened(extent, "int32")
    iv = tirx.IterVar(ir.Range.from_min_extent(0, extent), var, tirx.IterVar.ThreadIndex, tag)
    return tirx.AttrStmt(iv, "thread_extent", extent, body)
