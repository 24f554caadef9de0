"""Scheduled tile IR, with layouts and fences → thread IR for a GPU: one function, run by every thread of every block.

What all threads compute alike (indices, conditions, T.alloc_var) each computes for itself. Tiles in registers are arrays of slots, those
in shared memory lie in the arena. Accesses that cannot be proven inside are guarded: reads give zero, writes to a tensor are dropped, a
write outside a tile fails the launch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from math import prod
from typing import Any

from tilescale.compiler.cuda.apart import Apart, is_apart
from tilescale.compiler.cuda.clusters import Clusters
from tilescale.compiler.cuda.rings import Barriers, ended, initialised
from tilescale.compiler.cuda.stmatrix import MatrixStores
from tilescale.compiler.cuda.tma import TensorMap
from tilescale.compiler.cuda.wgmma import TURNS
from tilescale.compiler.gpu.build import all_of, call
from tilescale.compiler.gpu.cprinter import symbol
from tilescale.compiler.gpu.kernel import Source, ThreadKernel, arena, placed
from tilescale.compiler.gpu.places import Global, InShared, Private, Registers, widened
from tilescale.compiler.gpu.ranks import Ranks
from tilescale.compiler.gpu.scalars import Scalars, rounds_of
from tilescale.compiler.gpu.tidy import tidied
from tilescale.compiler.ir import numeric
from tilescale.compiler.ir.buffers import written_buffers
from tilescale.compiler.ir.lowerings import lowering
from tilescale.compiler.ir.nests import Element, nest_of
from tilescale.compiler.ir.operations import find
from tilescale.compiler.ir.scales import SCALES, WIDTHS, Executor
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout import Fragment
from tilescale.compiler.layout.loops import bits_of, element_dtype, in_registers
from tilescale.compiler.ops.shuffle import BARRIERS, OF_WARPS
from tilescale.compiler.passes.fences import published
from tilescale.compiler.passes.gpu_schedule import LOOKING, REGISTERS
from tilescale.compiler.passes.residency import waits_for_blocks
from tilescale.compiler.tvm_compat import ir, is_buffer_var, structural_walk, sym, tirx
from tilescale.errors import InternalError, Loc, TileSyntaxError, TileValueError

_HUGE = 1 << 40
#: the barrier at which consumers meet; 0 is that of __syncthreads, warpgroups have those behind it
CONSUMERS = 15
NOTHING = tirx.Evaluate(tirx.IntImm("int32", 0))


class Lowering(Scalars, MatrixStores, Ranks, Clusters, Apart):
    """One kernel on its way to thread IR."""

    def __init__(self, program: Any):
        self.program, self.target = program, program.target
        self.analyzer = sym.Analyzer()
        self.variables: dict[Any, Any] = {}
        self.places: dict[Any, Any] = {}
        self.layouts: dict[Any, Any] = program.layouts
        self.params: list[tuple[Any, Source]] = []
        self.ranked = []
        self.head: list[Any] = []
        #: counters in shared memory, with how many words they have for all executors
        self.zeroed: list[tuple[Any, int]] = []
        #: registers that say where the numbers of sparse operands belong
        self.asked: list[Any] = []
        #: the author's barriers, with the arrivals that each expects
        self.by_hand: list[tuple[Any, list[int]]] = []
        #: whether registers are moved by hand, which takes a bound on blocks
        self.one_block = False
        #: names of the program that stand for integer expressions
        self.definitions: dict[Any, Any] = {}
        self.written = written_buffers(program)
        self.rounds = rounds_of(program)
        self.sites: list[str] = []
        self.demanded: set[Any] | None = None  # collectives whose demands the launcher looks at (ops/participants.py)
        self.here: Loc | None = None
        self.loop = None
        self.moved: list[tuple[Any, Any]] = []
        self.widths: dict[Any, int] = {}
        self.threads = program.launch.threads
        self.executor = Executor("block", self.threads)
        self.tid = tirx.Var("tid", "int32")
        self.analyzer.bind(self.tid, ir.Range.from_min_extent(0, self.threads))
        #: the number of the consumer's warpgroup, where something asks for it
        self.mine: Any = None
        self.block = [tirx.Var(n, "int32") for n in ("bx", "by", "bz")]
        self.raw = self.block
        #: blocks can tell each other something through tensors: atomic updates carry what was written before them
        self.publishes = bool(published(program))
        self.arena = arena(max(1, program.arena_bytes))
        #: who runs a statement where a block has a producer: "producer" or "consumer"; None where all threads are alike
        self.role: str | None = None
        self.maps: list[tuple[Any, TensorMap]] = []
        self.barriers: dict[int, Barriers] = {}
        self.dependent = bool(program.launch.pdl) and self.target.dependent_launches
        #: where a failing thread says who it is; None where none can fail
        self.failure: Any = None
        #: the author's barriers → the block's
        self.named: dict[int, int] = {}
        self.flying = []
        #: threads beside the block's own
        self.extra = 0
        self._parameters()

    # -- parameters -----------------------------------------------------------------------------------------------
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
        known = all(isinstance(e, int) for e in shape) and not given and prod(shape) < (1 << 31)
        index = "int32" if known else "int64"
        if given:
            strides = tuple(self.extent(s) for s in given)
        else:
            strides, step = (), 1
            for e in reversed(shape):
                strides = (step, *strides)
                step = step * e if isinstance(step, int) and isinstance(e, int) else widened(step, index) * widened(e, index)
        self.places[p.var] = Global(buf, shape, strides, index, p.name)
        self.params.append((buf, Source("param", k)))

    def extent(self, e: Any) -> Any:
        """An extent as an int where it is one, else as thread IR."""
        if isinstance(e, int):
            return e
        return int(e.value) if isinstance(e, tirx.IntImm) else self.scalar(e)

    # -- who runs -------------------------------------------------------------------------------------------------
    def warpgroup(self) -> Any:
        """The number of a consumer's warpgroup, named once: a value that the machine's compiler knows to be the same for a warp, so that
        what is computed from it, such as matrix descriptors, is computed once a warp and not in each lane."""
        if self.group is not None:
            return tirx.IntImm("int32", self.group)
        if self.mine is None:
            self.mine = tirx.Var("warpgroup", "int32")
            self.bind_range(self.mine, self.threads // WIDTHS["warpgroup"])
        return self.mine

    def thread(self) -> Any:
        """The thread's number within its executor."""
        if self.executor.name == "block":
            return self.block_thread()
        return tirx.IntImm("int32", 0) if self.executor.threads == 1 else self.tid % self.executor.threads

    def scale_value(self, name: str, which: int) -> Any:
        """The own index (0) or the count (1) at a scale."""
        width = self.threads
        for scale, n in self.executor.outer:
            inner = WIDTHS[scale]
            if scale == name:
                index = self.tid if width == self.threads else self.tid % width
                return tirx.IntImm("int32", n) if which else (index // inner if inner > 1 else index)
            width = inner
        if name in WIDTHS:
            return tirx.IntImm("int32", which)
        grid = [*(self.extent(e) for e in self.program.launch.grid), 1, 1][:3]
        if name in ("grid", "block"):
            return _linear(self.block, grid, which)
        if name == "cta_cluster":
            return tirx.IntImm("int32", self.cluster_size("xyz")) if which else self.cluster_rank("xyz")
        return self.of_launch("world" if which else "rank")

    def refused(self, what: str, missing: str) -> TileSyntaxError:
        """The refusal of what the target does not do."""
        return TileSyntaxError(f"{what} is not there on the cuda target: it needs {missing}", loc=self.here, hint='target="cpu"')

    # -- memory ---------------------------------------------------------------------------------------------------
    def allocate(self, s: Any) -> Any:
        """Gives an allocation its place."""
        b, dtype = s.buffer, element_dtype(s.buffer)
        shape = tuple(int(e) for e in b.ty.shape)
        if b.ty.storage_scope.startswith("shared"):
            if b in self.places:  # another warpgroup's code has it already
                return NOTHING
            layout = self.layouts[b]
            tile, declared = placed(self.arena, b.name, dtype, layout.bytes * 8 // layout.bits, self.program.arena[b][0], s.span)
            self.head.append(declared)
            self.places[b] = InShared(tile, layout, shape, self._executors_own(layout), b.name)
            if b.ty.storage_scope == "shared.signal":
                self.zeroed.append((tile, self.program.arena[b][1] // 8))
            if b.ty.storage_scope == "shared.barrier":
                self.by_hand.append((tile, [int(n) for n in s.annotations["ts.counts"]]))
            return NOTHING
        if self.loop is not None or b not in self.layouts:
            buf = tirx.decl_buffer((prod(shape),), dtype, b.name, scope="local", layout=None)
            self.places[b] = Private(buf, shape, b.name)
            return tirx.AllocBuffer(buf, {}, s.span)
        layout = self.layouts[b]
        buf = tirx.decl_buffer((layout.slots,), dtype, b.name, scope="local", layout=None)
        self.places[b] = Registers(buf, layout, shape, b.name)
        return tirx.AllocBuffer(buf, {}, s.span)

    def _executors_own(self, layout: Any) -> Any:
        """Elements in front of this executor's own copy of a tile."""
        if self.executor.count == 1:
            return None
        align = max(16, layout.alignment)
        each = -(-layout.bytes // align) * align * 8 // layout.bits
        flat, width = tirx.IntImm("int32", 0), self.threads
        for scale, n in self.executor.outer:
            index = self.tid if width == self.threads else self.tid % width
            flat = flat * n + index // WIDTHS[scale]
            width = WIDTHS[scale]
        return flat * each

    def view(self, s: Any) -> Any:
        """T.view: the same memory under another shape or dtype."""
        held = self.places[s.data.args[0]]
        b, dtype = s.buffer, element_dtype(s.buffer)
        shape = tuple(int(e) for e in b.ty.shape)
        if isinstance(held, InShared):
            if held.layout.swizzle:
                raise InternalError(f"a view of {held.name}, which is swizzled", loc=self.here)
            from tilescale.compiler.layout.shared import strided
            from tilescale.language.dtypes import BITS

            layout = strided(shape, BITS[dtype])
            root = next(v for v in self.program.arena if self.places.get(v) is held or self.places.get(v, held).buf is held.buf)
            tile, declared = placed(self.arena, b.name, dtype, layout.bytes * 8 // layout.bits, self.program.arena[root][0], s.span)
            self.head.append(declared)
            own = None if held.base is None else held.base * held.layout.bits // layout.bits
            self.places[b] = InShared(tile, layout, shape, own, b.name)
            return NOTHING
        if isinstance(held, Global) and element_dtype(held.buf) == dtype:
            strides = tuple(prod(shape[k + 1 :]) for k in range(len(shape)))
            self.places[b] = Global(held.buf, shape, strides, held.index, b.name)
            return NOTHING
        if isinstance(held, Registers) and isinstance(self.layouts.get(b), Fragment):
            layout = self.layouts[b]
            data = tirx.reinterpret(ir.PointerType(ir.PrimType(dtype), "local"), tirx.buffer_data(held.buf))
            made = tirx.decl_buffer((layout.slots,), dtype, name=b.name, data=data)
            self.places[b] = Registers(made, layout, shape, b.name)
            return tirx.DeclBuffer(made, s.span, data=data)
        raise self.refused(f"T.view of {held.name}", "views of a tensor under another dtype")

    # -- accesses -------------------------------------------------------------------------------------------------
    def access(self, buffer: Any, indices: Any, node: Any, writes: bool) -> tuple[Any, Any, list[Any], Any]:
        """``(flat buffer, index, tests, place)`` of an element; it may be touched where the tests hold."""
        place = self.place_of(buffer, writes)
        if isinstance(place, Registers):
            return place.buf, self.slot(place, buffer, indices, writes), [], place
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
            high = size if not isinstance(size, int) else tirx.IntImm(str(i.ty), size)
            for test in (i >= tirx.IntImm(str(i.ty), 0), i < high):
                if not self.proven(test):
                    tests.append(test)
        return place.buf, self.analyzer.simplify(place.flat(at)), tests, place

    def proven(self, test: Any) -> bool:
        return bool(test) if isinstance(test, bool) else bool(self.analyzer.can_prove(test))

    def load(self, e: Any) -> Any:
        """A load, zero where it lies outside."""
        if (moved := self.in_vector(e)) is not None:
            return moved
        buf, flat, tests, _ = self.access(e.source, e.indices, e, False)
        value = tirx.BufferLoad(buf, [flat])
        return value if not tests else tirx.if_then_else(all_of(tests), value, tirx.const(0, str(value.ty)))

    def store(self, s: Any) -> Any:
        """A store, dropped outside a tensor; memory that threads share is written by one of those that hold the iteration."""
        if (moved := self.in_vector(s)) is not None:
            return tirx.BufferStore(moved.source, self.scalar(s.value), list(moved.indices), s.span)
        buf, flat, tests, place = self.access(s.buffer, s.indices, s, True)
        done: Any = tirx.BufferStore(buf, self.scalar(s.value), [flat], s.span)
        if tests and not isinstance(place, Global):
            return self.once(tirx.IfThenElse(all_of(tests), done, self.fail("bounds", s, f"an index of {place.name} lies outside")))
        done = tirx.IfThenElse(all_of(tests), done, None) if tests else done
        return done if isinstance(place, (Registers, Private)) else self.once(done)

    def once(self, s: Any) -> Any:
        """A statement with effects that others see: done by one of the threads that run it."""
        test = self.holder()
        return s if test is None else tirx.IfThenElse(test, s, None)

    # -- instructions ---------------------------------------------------------------------------------------------
    def sync(self, scope: str, why: str, proxy: bool = False) -> Any:
        """The threads of an executor meet. ``proxy``: each makes its own writes of shared memory visible to the asynchronous proxy first;
        whoever starts an engine behind the meeting then comes after all of them (PTX ISA, "Memory Consistency Model", "Proxies")."""
        ahead, proxy = self.before_meeting(proxy)
        ahead += [call("fence_proxy_async")] if proxy else []
        if self.executor.threads == 1:
            return sequence(ahead) if ahead else NOTHING
        made: Any
        if scope == "block" and self.role == "consumer":  # the producer goes its own way
            made = tirx.call_extern("void", "ts::barrier_sync", tirx.IntImm("int32", CONSUMERS), tirx.IntImm("int32", self.threads))
        elif scope == "block":
            made = tirx.call_extern("void", "__syncthreads")
        elif scope == "warp":
            made = tirx.call_extern("void", "__syncwarp")
        else:
            number = self.tid // WIDTHS["warpgroup"] + 1  # 0 is that of __syncthreads
            made = tirx.call_extern("void", "ts::barrier_sync", number, tirx.IntImm("int32", WIDTHS["warpgroup"]))
        return sequence([*ahead, tirx.Evaluate(ir.Call(made.op, list(made.args), attrs={"comment": why}, ret_ty=made.ty))])

    def numbered_meeting(self, number: int, count: int) -> Any:
        """Threads of the block meet at one of its barriers: at the author's number where this kernel does not use it itself."""
        if number == OF_WARPS:
            return tirx.Evaluate(tirx.call_extern("void", "__syncwarp"))
        if count == self.threads and number == 0:
            consumers = tirx.call_extern("void", "ts::barrier_sync", tirx.IntImm("int32", CONSUMERS), tirx.IntImm("int32", count))
            return tirx.Evaluate(consumers if self.role == "consumer" else tirx.call_extern("void", "__syncthreads"))
        if number not in self.named:
            groups, plan = self.threads // WIDTHS["warpgroup"], self.program.schedule
            turns = range(TURNS, TURNS + groups) if plan is not None and len(plan.roles) > 1 else ()
            own = {0, CONSUMERS, *range(1, groups + 1), *turns}
            free = [n for n in (number, *range(BARRIERS)) if n not in own and n not in self.named.values()]
            if not free:
                text = f"T.sync_threads at barrier {number}: {len(self.named)} are named, and this kernel uses the others itself"
                raise TileValueError(text, loc=self.here, expected=f"at most {BARRIERS - len(own)} of them")
            self.named[number] = free[0]
        made = tirx.call_extern("void", "ts::named_barrier", tirx.IntImm("int32", self.named[number]), tirx.IntImm("int32", count))
        why = {"comment": f"T.sync_threads({number}, {count})"}
        return tirx.Evaluate(ir.Call(made.op, list(made.args), attrs=why, ret_ty=made.ty))

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

    # -- statements -----------------------------------------------------------------------------------------------
    def stmt(self, s: Any) -> Any:
        """A statement of tile IR as thread IR."""
        method = getattr(self, "_s_" + type(s).__name__, None)
        if method is None:
            raise InternalError(f"no CUDA lowering for the statement {type(s).__name__}", loc=loc_of(s.span))
        self.here = loc_of(s.span) or self.here
        if self.loop is None and (nest := nest_of(s)) is not None:
            return self.remote_copy(s.value, nest) if _is_remote(s) else self.nest(nest)
        return method(s)

    def _s_SeqStmt(self, s: Any) -> Any:
        out, seq = [], list(s.seq)
        for k, x in enumerate(seq):
            if _role(x) == "producer":
                out.append(self._roles(x, seq[k + 1]))
            elif _role(x) != "consumer":
                out.append(self.stmt(x))
        return sequence(out)

    def _roles(self, producer: Any, consumer: Any) -> Any:
        """Two roles side by side: behind the block's own threads, which consume, the producer's warp, of which one thread does all; a
        whole warpgroup where registers move from it to the consumers."""
        plan = self.program.schedule
        apart = is_apart(self.program, consumer.body, self.threads)
        readers = self.readers(consumer.body) if apart else {}
        self.barriers = {r.number: Barriers(self, r, readers.get(r.number)) for r in plan.rings}
        for b, number in plan.ring_of.items():
            shape = [int(e) for e in b.ty.shape[1:]]
            self.barriers[number].bytes += prod(shape) * bits_of(b) // 8
        head = initialised(self)
        if self.dependent:  # setting up is what may go on before the launch in front has ended
            self.head += [*head, *_awaits_launches()]
            head = []
        moved = REGISTERS[self.threads]
        if moved is not None and _looks_up(producer.body):
            moved = LOOKING.get(self.threads, moved)
        self.extra = 32 if moved is None else WIDTHS["warpgroup"]
        self.role = "producer"
        fills = sequence([self.stmt(producer.body), *ended(self, producer.body)])
        fill: Any = tirx.IfThenElse(tirx.EQ(self.tid, self.threads), fills, None)
        self.role = "consumer"
        rest: Any = self.apart(consumer.body) if apart else self.stmt(consumer.body)
        self.role = None
        if self.mine is not None:
            rest = sequence([tirx.Bind(self.mine, tirx.call_extern("int32", "ts::uniform", self.tid // WIDTHS["warpgroup"])), rest])
        if moved is not None:
            fill = sequence([call(f"fewer_registers<{moved[1]}>"), fill])
            rest = sequence([call(f"more_registers<{moved[0]}>"), rest])
        return sequence([*head, tirx.IfThenElse(self.tid >= self.threads, fill, rest)])

    def tensor_map(self, wanted: TensorMap, name: str) -> Any:
        """The parameter that is this tensor map."""
        for var, made in self.maps:
            if made == wanted:
                return var
        var = tirx.Var(name, "handle")
        self.maps.append((var, wanted))
        return var

    def _s_Evaluate(self, s: Any) -> Any:
        op = find(s.value)
        if op is None:
            return tirx.Evaluate(self.scalar(s.value), s.span) if isinstance(s.value, ir.Call) else NOTHING
        made = lowering(s.value, self.program.target).lower(s.value, self)
        mine = [a for a in op.effects(s.value) if a.proxy != "async" and not in_registers(a.region.source)]
        self.did([Element(a.region.source, (), a.mode, False, None) for a in mine], made)
        return made

    def _s_AllocBuffer(self, s: Any) -> Any:
        return self.allocate(s)

    def _s_DeclBuffer(self, s: Any) -> Any:
        return self.view(s)

    def _s_BufferStore(self, s: Any) -> Any:
        return self.store(s)

    def _s_Bind(self, s: Any) -> Any:
        value = self.scalar(s.value)
        var = tirx.Var(s.var.name, str(value.ty))
        self.variables[s.var] = var
        self.learn(var, value)
        if "int" in str(value.ty) and None not in numeric.variables(s.value):
            self.definitions[s.var] = s.value
        return tirx.Bind(var, value, s.span)

    def learn(self, var: Any, value: Any) -> None:
        """Tells the analyzer what a binding is, where proofs may put the value for the name."""
        if "int" in str(value.ty) and None not in numeric.variables(value):
            self.bound(var, value)

    def _s_IfThenElse(self, s: Any) -> Any:
        test = self.scalar(s.condition)
        with self.given(test):
            then = self.stmt(s.then_case)
        other = None
        if s.else_case is not None:
            with self.given(tirx.Not(test)):
                other = self.stmt(s.else_case)
        return tirx.IfThenElse(test, then, other, s.span)

    @contextlib.contextmanager
    def given(self, condition: Any) -> Iterator[None]:
        """Inside, ``condition`` holds."""
        with self.analyzer.constraint_scope(condition):
            yield

    def _s_While(self, s: Any) -> Any:
        return tirx.While(self.scalar(s.condition), self.stmt(s.body), s.span)

    def _s_For(self, s: Any) -> Any:
        extent = self.extent(s.extent)
        var = tirx.Var(s.loop_var.name, str(s.loop_var.ty))
        self.variables[s.loop_var] = var
        self.bind_range(var, extent)
        unroll = str((s.annotations or {}).get("ts.kind", "")) == "unroll" and isinstance(extent, int)
        self.wrote = True  # in the round before, for all that is known
        kind = tirx.ForKind.UNROLLED if unroll else tirx.ForKind.SERIAL
        # a producer has few registers, and waits most of the time
        notes = {"unroll": 1} if self.role == "producer" and kind == tirx.ForKind.SERIAL else {}
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

    def _panels(self) -> list[Any]:
        """T.use_swizzle: blocks that start together lie in a panel of a few rows ("row"; of columns with "column"), one column after the
        other, so that they share what they read in the L2 cache. The last panel may be lower."""
        panel, order = self.program.hints.get("swizzle", (0, "row"))
        grid, dims = [*(self.extent(e) for e in self.program.launch.grid), 1, 1][:3], self.program.launch.cluster
        across, down = (0, 1) if order == "row" else (1, 0)  # the axis along a panel, the one that is cut into panels
        if panel < 2 or grid[2] != 1:
            return []
        # blocks of a cluster stay together: what is ordered is clusters, as high as they are
        panel = max(1, panel // dims[down])
        self.raw = [tirx.Var(f"block_{axis}", "int32") for axis in "xyz"]
        self.block = [*self.block[:2], self.raw[2]]
        wide, high = (self._clusters(grid[k], k) for k in (across, down))
        names = {n: tirx.Var(n, "int32") for n in ("panel", "first", "rows", "within")}
        flat = self._clusters(self.raw[0], 0) + self._clusters(self.raw[1], 1) * self._clusters(grid[0], 0)
        values = {
            "panel": flat // (wide * panel), "first": names["panel"] * panel,
            "rows": tirx.min(high - names["first"], widened(panel, "int32")), "within": flat - names["first"] * wide,
        }  # fmt: skip
        ends = {down: names["first"] + tirx.truncmod(names["within"], names["rows"]), across: tirx.truncdiv(names["within"], names["rows"])}
        ends = {k: e * dims[k] + self._rank_along(k) if dims[k] > 1 else e for k, e in ends.items()}
        return [*(tirx.Bind(names[n], v) for n, v in values.items()), *(tirx.Bind(self.block[k], ends[k]) for k in (0, 1))]

    def _clusters(self, blocks: Any, axis: int) -> Any:
        """How many clusters so many blocks along an axis are, or the cluster of such a block."""
        return self.analyzer.simplify(tirx.floordiv(widened(blocks, "int32"), tirx.IntImm("int32", self.program.launch.cluster[axis])))

    # -- the whole ------------------------------------------------------------------------------------------------
    def run(self) -> ThreadKernel:
        """The kernel's function and what its launcher must know."""
        order = self._panels()
        body = self.stmt(self.program.func.body)
        begins, ends = self.cluster_ends()
        if self.dependent and not self.barriers:
            begins += _awaits_launches()
        body = sequence([*begins, body, *ends])
        smem = [tirx.AllocBuffer(self.arena)] if self.program.arena_bytes else []
        whole = tidied(sequence([*order, *smem, *self.head, body]))
        launch = self.program.launch
        grid = [*(self.extent(e) for e in launch.grid), 1, 1][:3]
        for axis in reversed(range(3)):
            whole = _thread_extent(self.raw[axis], f"blockIdx.{'xyz'[axis]}", grid[axis], whole)
        threads = self.threads + self.extra
        whole = _thread_extent(self.tid, "threadIdx.x", threads, whole)
        written = {k for k, p in enumerate(self.program.params) if p.var in self.written}
        maps = [(var, Source("map", k)) for k, (var, _) in enumerate(self.maps)]
        params = [p for p in self.params if not maps or not is_buffer_var(p[0]) or _used(whole, p[0])] + maps + self.symbols + self.ranked
        params += [] if self.failure is None else [(self.failure, Source("failure"))]
        func = tirx.PrimFunc([v for v, _ in params], whole)
        return ThreadKernel(
            func, symbol(self.program.name), tuple([*launch.grid, 1, 1][:3]), threads, tuple(s for _, s in params), frozenset(written),
            self.program.arena_bytes, launch.cluster if self.target.clusters else (1, 1, 1), maps=tuple(m for _, m in self.maps),
            cooperative=bool(waits_for_blocks(self.program.func.body)), sites=tuple(self.sites), dependent=self.dependent,
            min_blocks=1 if self.extra or self.one_block else None,
            device=self.device, ordered=launch.ordered,
            widths=self.widths, team=self.device or bool(self.ranked) or any(zeroed(p) for p in self.program.params),
        )  # fmt: skip


def _awaits_launches() -> list[Any]:
    """Every thread that touches memory must have awaited the launches in front for itself; then the launch behind may begin, which does
    the same with this one, so nothing that it touches is earlier than this launch's end."""
    return [call("await_launches"), call("admit_launches")]


def zeroed(p: Any) -> bool:
    """Whether a parameter is a T.Signal whose counters are zero when a launch begins."""
    return getattr(p.spec, "kind", "") == "signal" and not p.spec.keep


def _looks_up(producer: Any) -> bool:
    """Whether a loop of the producer's reads a tensor for what it copies."""
    found: list[Any] = []
    structural_walk(producer, (tirx.For, lambda f: structural_walk(f, (ir.TensorLoad, lambda e: found.append(e.source)))))
    return any(b.ty.storage_scope == "global" for b in found)


def _is_remote(s: Any) -> bool:
    call = s.value if isinstance(s, tirx.Evaluate) else None
    return isinstance(call, ir.Call) and call.op.name == "ts.copy" and bool(str(call.attrs["side"]))


def _role(s: Any) -> str:
    return str(s.node.value) if isinstance(s, tirx.AttrStmt) and s.attr_key == "ts.role" else ""


def _used(body: Any, buffer: Any) -> bool:
    found: list[Any] = []
    structural_walk(body, (ir.Var, lambda v: found.append(v) if v.same_as(buffer) else None))
    structural_walk(body, (ir.TensorLoad, lambda e: found.append(e) if e.source.same_as(buffer) else None))
    structural_walk(body, (tirx.BufferStore, lambda s: found.append(s) if s.buffer.same_as(buffer) else None))
    return bool(found)




def _linear(index: list[Any], extents: list[Any], which: int) -> Any:
    (x, y, z), (gx, gy, gz) = index, (widened(e, "int32") for e in extents)
    return gx * gy * gz if which else x + gx * (y + gy * z)


def _thread_extent(var: Any, tag: str, extent: Any, body: Any) -> Any:
    extent = widened(extent, "int32")
    iv = tirx.IterVar(ir.Range.from_min_extent(0, extent), var, tirx.IterVar.ThreadIndex, tag)
    return tirx.AttrStmt(iv, "thread_extent", extent, body)
