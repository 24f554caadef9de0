"""Tile IR → thread IR for the CPU: one function a block, flat indices, every tile at a constant offset of the
block's arena.

Global memory is indexed in 64 bits (`Lowering.exact`), the arena in 32. Accesses that cannot be proven inside
are guarded: reads give zero, writes of a tensor are dropped, writes outside a tile fail the launch. A
T.Parallel nest whose guards depend on its own indices is emitted twice, without guards where the whole nest
lies inside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

from tilescale.compiler.cpu import convert
from tilescale.compiler.cpu.expr import lit, seq
from tilescale.compiler.cpu.forward import candidates, reads_well
from tilescale.compiler.cpu.memory import Memory, narrow, pointer, size_of
from tilescale.compiler.cpu.parallel import ParallelLoops
from tilescale.compiler.cpu.scalars import Scalars
from tilescale.compiler.cpu.scales import Scales, any_fork
from tilescale.compiler.cpu.tile import Tile, const
from tilescale.compiler.cpu.view import View, widened
from tilescale.compiler.ir.beliefs import Beliefs
from tilescale.compiler.ir.buffers import written_buffers
from tilescale.compiler.ir.lowerings import lowering
from tilescale.compiler.ir.operations import find, name_of
from tilescale.compiler.ir.pointed import address_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.scales import SCALES
from tilescale.compiler.ir.signals import OPS
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout import Strided
from tilescale.compiler.tvm_compat import ir, structural_walk, sym, tirx
from tilescale.errors import InternalError, Loc, TileValueError

ALIGN = 64
#: nodes of an expression that is put in for the variable bound to it
SMALL_VALUE = 40
#: iterations of a long loop between two looks whether it is to end, each of which takes 4 ns: of statements
#: on elements, which take a fraction of that, and of tiles or loops; a loop inside such a one is long from so
#: many on
ELEMENTS, TILES, MANY = 1 << 16, 64, 1 << 16
_HUGE = 1 << 40
#: arithmetic of indices that 32 bits may not hold
_EXACT = (tirx.Add, tirx.Sub, tirx.Mul)
_INT = ir.PrimType("int32")
_RETURN = tirx.Return(lit(0, "int32"))  # the runtime takes anything else for a failed kernel


def _has(body: Any, kinds: Any) -> bool:
    """Whether statements of these kinds stand in a body."""
    found: list[Any] = []
    structural_walk(body, (kinds, found.append))
    return bool(found)


class Lowering(Scalars, ParallelLoops, Scales):
    """One kernel on its way to thread IR."""

    def __init__(self, program: TileProgram, *, instrument: bool = False):
        self.program, self.instrument = program, instrument
        self.ctx = tirx.Var("ctx", pointer("int8"))
        self.args_ptr = tirx.Var("args", pointer("int64"))
        self.arena = tirx.Var("arena", pointer("uint8"))
        self.block = [tirx.Var(n, "int32") for n in ("bx", "by", "bz")]
        self.analyzer = sym.Analyzer()
        self.memory: dict[Any, Memory] = {}
        self.variables: dict[Any, Any] = {}
        #: a binding that 32 bits might not hold → the same in 64
        self.wide: dict[Any, Any] = {}
        self.header: list[Any] = []
        self.pending: list[list[Any]] = []
        self.sites: list[str] = []
        self.executors: list[tuple[str, Any, int]] = []
        self.arena_bytes = self.scratch_top = self.shared_bytes = 0
        self.waits = self.device = False
        self.demanded: set[Any] | None = (
            None  # collectives whose demands the launcher looks at (ops/participants.py)
        )
        self.tables, self.lane_barriers = {}, {}
        self.regions: list[Any] = []
        self.zeroed: list[Any] = []
        self.in_cluster = self.in_rounds = False
        self.inside: set[Any] = set()
        self.beliefs = Beliefs(program)
        #: tiles that products read straight from the tensor they are copied from, and that view once the copy
        #: has been met
        self.forwardable = candidates(program, written_buffers(program))
        self.forwarded: dict[Any, View] = {}
        self.forks = any_fork(program.func.body)
        self._header_parameters()

    # -- parameters
    # -----------------------------------------------------------------------------------------------
    def _slot(self, index: int) -> Any:
        return tirx.BufferLoad(self.args, [lit(index, "int64")])

    def _header_parameters(self) -> None:
        self.args = tirx.decl_buffer((_HUGE,), "int64", "args", data_alignment=8, layout=None)
        self.header.append(tirx.DeclBuffer(self.args, data=self.args_ptr))
        params, symbols = self.program.params, self.program.symbols
        for k, (name, var) in enumerate(symbols.items()):
            value = tirx.Var(name, str(var.ty))
            self.header.append(tirx.Bind(value, narrow(self._slot(len(params) + 2 + k), str(var.ty))))
            self.variables[var] = value
            self.analyzer.bind(value, ir.Range(0, (1 << 31) - 1))
        self.rank = self._hidden("rank", len(params))
        self.world = self._hidden("world", len(params) + 1)
        for k, p in enumerate(params):
            if hasattr(p.spec, "shape"):
                self._tensor(k, p)
            else:
                self.variables[p.var] = self._scalar_parameter(k, p)

    def _hidden(self, name: str, slot: int) -> Any:
        var = tirx.Var(name, "int32")
        self.header.append(tirx.Bind(var, narrow(self._slot(slot), "int32")))
        return var

    def _scalar_parameter(self, k: int, p: Any) -> Any:
        dt = str(p.spec.dtype)
        raw = self._slot(k)
        if "float" in dt:
            value = convert.cast(tirx.reinterpret("float64", raw), "float64", dt)
        elif dt == "bool":
            value = tirx.NE(raw, lit(0, "int64"))
        else:
            value = narrow(raw, dt)
        var = tirx.Var(p.name, convert.compute_dtype(dt))
        self.header.append(tirx.Bind(var, value))
        return var

    def _tensor(self, k: int, p: Any) -> None:
        dt = str(p.spec.dtype)
        storage = convert.storage_dtype(dt)
        buf = tirx.decl_buffer((_HUGE,), storage, p.name, data_alignment=size_of(storage), layout=None)
        self.header.append(tirx.DeclBuffer(buf, data=tirx.reinterpret(pointer(storage), self._slot(k))))
        shape = tuple(self._extent(e) for e in p.var.ty.shape)
        given = list(p.var.ty.strides)
        strides = (
            tuple(self._wide_const(self.scalar(s)) for s in given)
            if given
            else self._row_major(shape, "int64")
        )
        self.memory[p.var] = Memory(buf, dt, shape, strides, p.var.ty.storage_scope, p.name, lit(0, "int64"))

    def _extent(self, e: Any) -> Any:
        known = const(e)
        return known if known is not None else self.scalar(e)

    @staticmethod
    def _wide_const(e: Any) -> Any:
        known = const(e)
        return tirx.IntImm("int64", known) if known is not None else widened(e, "int64")

    def _row_major(self, shape: tuple[Any, ...], dtype: str) -> tuple[Any, ...]:
        out: list[Any] = []
        step: Any = tirx.IntImm(dtype, 1)
        for extent in reversed(shape):
            out.insert(0, step)
            known, wide = const(step), const(extent)
            step = (
                tirx.IntImm(dtype, known * wide)
                if known is not None and wide is not None
                else step * widened(extent, dtype)
            )
        return tuple(out)

    # -- arena
    # ----------------------------------------------------------------------------------------------------
    def place(self, var: Any) -> None:
        """Gives an allocation its place: one-element variables on the stack, everything else in the arena."""
        dt, scope = _element(var), var.ty.storage_scope
        shape = tuple(int(e) for e in var.ty.shape)
        storage = convert.storage_dtype(dt)
        layout = self.program.layouts.get(var) or Strided.row_major(shape)
        numel = layout.size
        place = "local" if scope == "local.var" else ""
        buf = tirx.decl_buffer((numel,), storage, var.name, data_alignment=ALIGN, layout=None, scope=place)
        strides = tuple(lit(s, "int32") for s in layout.strides)
        self.memory[var] = Memory(buf, dt, shape, strides, scope, var.name, lit(0, "int32"))
        if scope == "local.var" and not self.forks:
            self.header.append(tirx.AllocBuffer(buf))
            return
        # Forked executors live at once, each with its own.
        copies = self.executor_count() if self.forks else 1
        if copies > 1:
            flat: Any = lit(0, "int32")
            for _, index, n in self.executors:
                flat = flat * n + index
            self.memory[var].start = flat * numel
        offset = self._reserve(copies * numel * size_of(storage))
        if scope.startswith("shared"):
            # nominal, for residency: what a GPU would hold, all stages that the author asked for and no
            # padding of ours
            stages = self.program.schedule.stages.get(var, 1) if self.program.schedule else 1
            self.shared_bytes += prod(shape) * size_of(storage) * stages * self.executor_count()
        self.header.append(self._in_arena(buf, storage, offset))
        self.memory[var].arena_offset = offset

    def _in_arena(self, buf: Any, storage: str, offset: int) -> Any:
        address = tirx.handle_add_byte_offset(self.arena, lit(offset, "int32")) if offset else self.arena
        return tirx.DeclBuffer(buf, data=tirx.reinterpret(pointer(storage), address))

    def _reserve(self, nbytes: int) -> int:
        offset = self.arena_bytes
        self.arena_bytes += -(-nbytes // ALIGN) * ALIGN
        return offset

    def scratch(self, numel: int, dtype: str) -> Any:
        """Memory for the inside of one operation; the next operation reuses it."""
        buf = tirx.decl_buffer((numel,), dtype, "scratch", data_alignment=ALIGN, layout=None)
        self._scratches.append((buf, dtype, self.scratch_used))
        self.scratch_used += -(-numel * size_of(dtype) // ALIGN) * ALIGN
        self.scratch_top = max(self.scratch_top, self.scratch_used)
        return buf

    # -- sites
    # ----------------------------------------------------------------------------------------------------
    def site(self, kind: str, name: str, node: Any, text: str = "") -> Any:
        """The index of an entry of the table that tells the runtime what and where an operation is."""
        loc = loc_of(getattr(node, "span", None)) or self.here
        file, line = (loc.file, loc.line) if loc else ("", 0)
        clean = text.replace("|", "¦").replace("\n", " ")
        entry = f"{kind}|{name.translate(_IN_NAMES)}|{file}|{line}|{clean}"
        if entry not in self.sites:
            self.sites.append(entry)
        return lit(self.sites.index(entry), "int32")

    def name_of(self, region: Any) -> str:
        return self.memory[region.source].name

    # -- views
    # ----------------------------------------------------------------------------------------------------
    def view(self, region: Any, *, peer: Any = None, reach: str = "block", site: Any = None) -> View:
        """A region as the emitters see it, in another rank's or block's memory where ``peer`` is given."""
        m = self.memory[region.source]
        mins = [self.scalar(r.min) for r in region.region]
        shape = tuple(self._extent(r.extent) for r in region.region)
        offset: Any = m.start
        for low, stride in zip(mins, m.strides, strict=True):
            offset = offset + (self.exact(low) if m.is_global else widened(low, m.index_dtype)) * stride
        valid = tuple(
            self._valid(m, k, low, e, region) for k, (low, e) in enumerate(zip(mins, shape, strict=True))
        )
        buf = m.buf if peer is None else self.remote(m, peer, reach, site)
        return View(
            buf, m.dtype, shape, m.strides, self.analyzer.simplify(offset), valid, m.index_dtype, m.is_global
        )

    def forward(self, region: Any, src: View) -> bool:
        """Whether a copy into ``region`` can be left out, because products read ``src`` in place of it
        (cpu/forward.py)."""
        if region.source not in self.forwardable or not reads_well(
            src, size_of(convert.storage_dtype(src.dtype))
        ):
            return False
        self.forwarded[region.source] = src
        return True

    def operand(self, region: Any) -> View:
        """The view of a product's operand: the tile's, or the tensor's where the copy was left out."""
        return self.forwarded.get(region.source) or self.view(region)

    def _valid(self, m: Memory, axis: int, low: Any, extent: Any, node: Any) -> tuple[Any, Any] | None:
        """The part of an axis that lies inside the tensor, None where that is proven to be all of it."""
        size = m.shape[axis]
        below = self.proven(low >= 0)
        above = self.proven(low + extent <= size)
        if below and above:
            return None
        if not m.is_global:
            first, count = const(low), const(extent)
            if first is not None and count is not None and (first < 0 or first + count > size):
                raise self.outside(m, axis, f"{first}:{first + count}", node)
        start = lit(0, "int32") if below else 0 - low
        stop = widened(size, str(low.ty)) - low
        if m.is_global and self._may_overflow(low):
            wide = self.exact(low)
            start = start if below else _clamped(0 - wide)
            stop = _clamped(self.exact(size) - wide)
        return narrow(start, "int32"), narrow(stop, "int32")

    def outside(self, m: Memory, axis: int, what: str, node: Any) -> TileValueError:
        return TileValueError(
            f"{what} lies outside axis {axis} of {m.name}, whose extent is {m.shape[axis]}",
            loc=loc_of(getattr(node, "span", None)) or self.here,
            expected=f"0 ≤ index < {m.shape[axis]}",
        )

    def remote(self, m: Memory, peer: Any, reach: str, site: Any) -> Any:
        """The flat buffer of ``m``'s twin in a peer's memory."""
        storage = convert.storage_dtype(m.dtype)
        if reach == "device":
            self.device = True
            own = tirx.address_of(tirx.BufferLoad(m.buf, [lit(0, "int64")]))
            address = tirx.call_extern(pointer("int8"), "ts_peer", self.ctx, own, narrow(peer, "int32"), site)
        else:
            self.waits = self.in_cluster = True
            base_ptr = tirx.call_extern(
                pointer("int8"), "ts_cluster_arena", self.ctx, narrow(peer, "int32"), site
            )
            held = tirx.Var("cluster_arena", pointer("int8"))
            self.pending[-1].append(tirx.Bind(held, base_ptr))
            assert m.arena_offset is not None, f"{m.name} lies in no arena"
            address = tirx.handle_add_byte_offset(held, lit(m.arena_offset, "int32"))
        twin = tirx.decl_buffer(
            (_HUGE,), storage, f"{m.name}_peer", data_alignment=size_of(storage), layout=None
        )
        ptr = tirx.Var(f"{m.name}_at", pointer(storage))
        self.pending[-1].append(tirx.Bind(ptr, tirx.reinterpret(pointer(storage), address)))
        self.pending[-1].append(tirx.DeclBuffer(twin, data=ptr))
        return twin

    def address(self, region: Any, *, peer: Any = None, reach: str = "block", site: Any = None) -> Any:
        """The address of a one-element region."""
        v = self.view(region, peer=peer, reach=reach, site=site)
        self._require_inside(v, region)
        return tirx.address_of(tirx.BufferLoad(v.buf, [v.offset]))

    def tile(self, region: Any) -> Tile:
        """A region of the block's own memory as a tile of constant shape; a launch fails where it does not
        lie inside."""
        return self.whole(self.view(region), region)

    def whole(self, v: View, region: Any) -> Tile:
        """The same of a view."""
        self._require_inside(v, region)
        return replace(v, valid=(None,) * len(v.valid)).tile()

    def _require_inside(self, v: View, region: Any) -> None:
        ends = [
            (valid, widened(e, "int32"))
            for valid, e in zip(v.valid, v.shape, strict=True)
            if valid is not None
        ]
        tests = [c for valid, extent in ends for c in (valid[0] <= 0, valid[1] >= extent)]
        if tests:
            m = self.memory[region.source]
            site = self.site("bounds", m.name, region, f"an index of {m.name} lies outside {tuple(m.shape)}")
            self.pending[-1].append(
                tirx.IfThenElse(tirx.Not(self.all(tests)), self.call("ts_fail", site), None)
            )

    # -- runtime calls
    # --------------------------------------------------------------------------------------------
    def call(self, name: str, *args: Any, ret: str = "int32") -> Any:
        return tirx.Evaluate(tirx.call_extern(ret, name, self.ctx, *args))

    def signal(self, flag: Any, value: Any, op: str) -> Any:
        return self.call("ts_signal", flag, widened(value, "int64"), lit(list(OPS).index(op), "int32"))

    def transferred(self, body: list[Any], v: View, peer: Any, site: Any) -> list[Any]:
        """Around a remote copy whose remote side is ``v``, in instrumented kernels: when it ran, with which
        rank, how many bytes."""
        if not self.instrument:
            return body
        nbytes: Any = lit(size_of(convert.storage_dtype(v.dtype)), "int64")
        for extent, valid in zip(v.shape, v.valid, strict=True):
            inside = widened(extent, "int32")
            if valid is not None:  # what lies outside the tensor never crosses
                inside = tirx.max(
                    tirx.min(valid[1], inside) - tirx.max(valid[0], lit(0, "int32")), lit(0, "int32")
                )
            nbytes = nbytes * widened(inside, "int64")
        rank = narrow(peer, "int32")
        begin, end = (self.call("ts_event", site, lit(phase, "int32"), rank, nbytes) for phase in (0, 1))
        return [begin, *body, end]

    def signalled(self, call: Any, region: Any, value: Any, op: str, peer: Any, site: Any) -> list[Any]:
        """A signal of a counter (that ``peer`` owns), in instrumented kernels behind an event: whoever awaits
        it ends later."""
        reach = str(call.attrs["reach"])
        done = self.signal(self.address(region, peer=peer, reach=reach, site=site), self.scalar(value), op)
        if not self.instrument:
            return [done]
        rank = lit(-1, "int32") if peer is None or reach != "device" else narrow(peer, "int32")
        told = self.site("signal", self.name_of(region), call, self.counter_of(region, reach))
        return [self.call("ts_event", told, lit(2, "int32"), rank, lit(8, "int64")), done]

    def counter_of(self, region: Any, reach: str) -> str:
        """The index of a counter that all blocks of a rank share, where it is a constant: by it a wait finds
        its signals in a log."""
        known = [r.min for r in region.region]
        if reach not in ("grid", "device") or not all(isinstance(i, tirx.IntImm) for i in known):
            return ""
        return ", ".join(str(int(i.value)) for i in known)

    # -- proofs
    # ---------------------------------------------------------------------------------------------------
    def proven(self, condition: Any) -> bool:
        if isinstance(condition, bool):
            return condition
        return not _compares_unsigned(condition) and bool(self.analyzer.can_prove(condition))

    @contextlib.contextmanager
    def given(self, *conditions: Any) -> Iterator[None]:
        """Inside, the conditions hold."""
        outer = self.unreachable
        with contextlib.ExitStack() as known:
            for c in conditions:
                # From what never holds anything follows, also that an index lies outside.
                self.unreachable = self.unreachable or self.proven(tirx.Not(c))
                if not _compares_unsigned(c):
                    known.enter_context(self.analyzer.constraint_scope(c))
            yield
        self.unreachable = outer

    unreachable = False

    def all(self, conditions: list[Any]) -> Any:
        result = conditions[0]
        for c in conditions[1:]:
            result = tirx.And(result, c)
        return result

    # -- statements
    # -----------------------------------------------------------------------------------------------
    here: Loc | None = None

    def stmt(self, s: Any) -> Any:
        """A statement of tile IR as thread IR."""
        method = getattr(self, "_s_" + type(s).__name__, None)
        if method is None:
            raise InternalError(f"no CPU lowering for the statement {type(s).__name__}", loc=loc_of(s.span))
        self.here = loc_of(s.span) or self.here
        self.pending.append([])
        done = method(s)
        before = self.pending.pop()
        return seq([*before, done]) if before else done

    def _s_SeqStmt(self, s: Any) -> Any:
        promise = next((k for k, x in enumerate(s.seq) if name_of(x) == "assume"), len(s.seq))
        made, rest = [self.stmt(x) for x in s.seq[: promise + 1]], list(s.seq[promise + 1 :])
        if rest:
            condition = s.seq[promise].value.args[0]
            end = self.beliefs.until(condition, rest)
            known, left = sequence(rest[:end]), sequence(rest[end:])
            with self.given(*self.beliefs.lasting(condition, self.scalar(condition), known)):
                made.append(self.stmt(known))
            made.append(self.stmt(left))
        return seq(made)

    def _s_Evaluate(self, s: Any) -> Any:
        if find(s.value) is None:
            return (
                tirx.Evaluate(self.scalar(s.value))
                if isinstance(s.value, ir.Call)
                else tirx.Evaluate(lit(0, "int32"))
            )
        self._scratches: list[tuple[Any, str, int]] = []
        self.scratch_used = 0
        done = lowering(s.value, self.program.target).lower(s.value, self)
        for buf, dtype, offset in self._scratches:
            self.header_late.append((buf, dtype, offset))
        return done

    def _s_AllocBuffer(self, s: Any) -> Any:
        if s.buffer not in self.memory:
            self.place(s.buffer)
        if s.buffer.ty.storage_scope == "shared.signal":
            m = self.memory[s.buffer]
            from tilescale.compiler.cpu import move

            whole = tirx.BufferRegion(s.buffer, [ir.Range.from_min_extent(0, e) for e in m.shape])
            self.zeroed.append(move.fill(self, self.view(whole), lit(0, "int64")))
        return tirx.Evaluate(lit(0, "int32"))

    def _s_DeclBuffer(self, s: Any) -> Any:
        """A view: the same memory under another shape or dtype; or a tensor at an address."""
        if (address := address_of(s)) is not None:
            return self._tensor_at(s, address)
        base_var = s.data.args[0]
        m = self.memory[base_var]
        dt = _element(s.buffer)
        shape = tuple(self._extent(e) for e in s.buffer.ty.shape)
        storage = convert.storage_dtype(dt)
        buf = m.buf
        if storage != convert.storage_dtype(m.dtype):
            first = tirx.address_of(tirx.BufferLoad(m.buf, [lit(0, m.index_dtype)]))
            buf = tirx.decl_buffer(
                (_HUGE,), storage, s.buffer.name, data_alignment=size_of(storage), layout=None
            )
            self.header.append(tirx.DeclBuffer(buf, data=tirx.reinterpret(pointer(storage), first)))
        start = m.start  # of this executor's own copy
        if (old := size_of(convert.storage_dtype(m.dtype))) != (new := size_of(storage)):
            start = self.analyzer.simplify(
                tirx.floordiv(start * lit(old, m.index_dtype), lit(new, m.index_dtype))
            )
        made = Memory(buf, dt, shape, self._row_major(shape, m.index_dtype), m.scope, s.buffer.name, start)
        made.arena_offset = m.arena_offset
        self.memory[s.buffer] = made
        return tirx.Evaluate(lit(0, "int32"))

    def _tensor_at(self, s: Any, address: Any) -> Any:
        b, dt = s.buffer, _element(s.buffer)
        storage = convert.storage_dtype(dt)
        buf = tirx.decl_buffer((_HUGE,), storage, b.name, data_alignment=size_of(storage), layout=None)
        shape, given = tuple(self._extent(e) for e in b.ty.shape), list(b.ty.strides)
        strides = (
            tuple(self._wide_const(self.scalar(e)) for e in given)
            if given
            else self._row_major(shape, "int64")
        )
        self.memory[b] = Memory(buf, dt, shape, strides, "global", b.name, lit(0, "int64"))
        return tirx.DeclBuffer(buf, data=tirx.reinterpret(pointer(storage), self.scalar(address)))

    def _s_Bind(self, s: Any) -> Any:
        value = self.scalar(s.value)
        flag = str(value.ty) == "bool"
        if flag and not _reads_memory(s.value):
            self.variables[s.var] = value
            return tirx.Evaluate(lit(0, "int32"))
        if flag:  # TVM's analyzer cannot bind vectors of bool, and a binding may become one
            value = tirx.Select(value, lit(1, "int8"), lit(0, "int8"))
        var = tirx.Var(s.var.name, str(value.ty))
        self.variables[s.var] = tirx.NE(var, lit(0, "int8")) if flag else var
        self.inside.add(var)
        if str(value.ty).startswith("int") and _stable(
            s.value
        ):  # TVM's unsigned constants do not bear its subtractions
            self._learn(var, value)
            if self._may_overflow(value):
                return self._bind_wide(var, value)
        return tirx.Bind(var, value)

    def _bind_wide(self, var: Any, value: Any) -> Any:
        """A binding that may stand in an index: of 64 bits there, its lower half elsewhere."""
        if self._nest is not None:  # 64 bits would halve a loop's lanes: computed where an index has it
            self.wide[var] = self.exact(value)
            return tirx.Bind(var, value)
        wide = self.wide[var] = tirx.Var(f"{var.name}_wide", "int64")
        return seq([tirx.Bind(wide, self.exact(value)), tirx.Bind(var, tirx.Cast("int32", wide))])

    def _learn(self, var: Any, value: Any) -> None:
        """Tells the analyzer what a binding is: its value where that is small, else only between what it
        lies. (Values are put in where the variable is used, so a chain of bindings would grow without
        bound.)"""
        known = self.analyzer.simplify(value)
        size, floats = 0, False

        def count(node: Any) -> None:
            nonlocal size, floats
            size += 1
            floats = floats or (isinstance(node, tirx.Cast) and "float" in str(node.value.ty))

        structural_walk(known, (object, count))
        if floats:  # of which TVM's interval analysis knows too little (cpu/opaque_calls.py)
            return
        if size <= SMALL_VALUE:
            self.analyzer.bind(var, known)
            return
        bound = self.analyzer.const_int_bound(known)
        low, high = int(bound.min_value), int(bound.max_value)
        if (
            -(1 << 31) <= low and high < (1 << 31) - 1 and high - low < (1 << 31) - 1
        ):  # an extent that wraps would prove anything
            self.analyzer.bind(
                var, ir.Range(tirx.IntImm(str(var.ty), low), tirx.IntImm(str(var.ty), high + 1))
            )

    def _s_IfThenElse(self, s: Any) -> Any:
        test = self.scalar(s.condition)
        with self.given(*self.beliefs.lasting(s.condition, test, s.then_case)):
            then = self.stmt(s.then_case)
        other = None
        if s.else_case is not None:
            with self.given(*self.beliefs.lasting(tirx.Not(s.condition), tirx.Not(test), s.else_case)):
                other = self.stmt(s.else_case)
        return tirx.IfThenElse(test, then, other)

    def _s_While(self, s: Any) -> Any:
        # Such a loop may never end: the runtime looks whether somebody wants it to.
        return tirx.While(self.scalar(s.condition), seq([self.call("ts_poll"), self.stmt(s.body)]))

    def _s_For(self, s: Any) -> Any:
        if s.kind in (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED):
            return self.parallel(s)
        extent = self._extent(s.extent)
        var = tirx.Var(s.loop_var.name, str(s.loop_var.ty))
        self.variables[s.loop_var] = var
        self.inside.add(var)
        self.bind_loop(var, extent)
        known, outer = const(extent), self.in_rounds
        size = TILES if _has(s.body, (tirx.Evaluate, tirx.For)) else ELEMENTS
        long = not outer if known is None else known > (MANY if outer else size)
        long = long and not _has(s.body, tirx.Break)  # perhaps of this very loop
        self.in_rounds = outer or long
        body = self.stmt(s.body)
        self.in_rounds = outer
        extent = widened(extent, str(var.ty))
        return (
            self._in_rounds(var, extent, size, body)
            if long
            else tirx.For(var, lit(0, str(var.ty)), extent, tirx.ForKind.SERIAL, body)
        )

    def _in_rounds(self, var: Any, extent: Any, size: int, body: Any) -> Any:
        """A loop that may be long, as two: between rounds of ``size`` iterations the runtime looks whether
        somebody wants it to end. A look in the loop itself would keep LLVM from holding in registers what the
        iterations update."""
        dt = str(var.ty)
        number, first = tirx.Var(f"{var.name}_round", dt), tirx.Var(f"{var.name}_first", dt)
        inner = tirx.For(var, first, tirx.min(lit(size, dt), extent - first), tirx.ForKind.SERIAL, body)
        rounds = tirx.floordiv(extent - lit(1, dt), lit(size, dt)) + lit(1, dt)
        each = seq([tirx.Bind(first, number * lit(size, dt)), self.call("ts_glance"), inner])
        return tirx.For(number, lit(0, dt), rounds, tirx.ForKind.SERIAL, each)

    def bind_loop(self, var: Any, extent: Any) -> None:
        self.analyzer.bind(
            var, ir.Range.from_min_extent(tirx.IntImm(str(var.ty), 0), widened(extent, str(var.ty)))
        )

    def _s_AttrStmt(self, s: Any) -> Any:
        if s.attr_key == "thread_extent":
            axis = "xyz".index(s.node.thread_tag[-1])
            var = self.block[axis]
            self.variables[s.node.var] = var
            self.bind_loop(var, self._extent(s.value))
            return self.stmt(s.body)
        if s.attr_key == "ts.scale":
            return self._scale(SCALES[int(s.value.value)], s)
        return self.stmt(s.body)

    def observed(self, waiting: Any, site: Any) -> Any:
        """A wait or a product, in instrumented kernels between two events."""
        if not self.instrument:
            return waiting
        none, zero = lit(-1, "int32"), lit(0, "int64")
        begin, end = (self.call("ts_event", site, lit(phase, "int32"), none, zero) for phase in (0, 1))
        return seq([begin, waiting, end])

    # -- single accesses
    # ------------------------------------------------------------------------------------------
    def _s_BufferStore(self, s: Any) -> Any:
        m = self.memory[s.buffer]
        flat, tests = self.access(m, [self.scalar(i) for i in s.indices], s)
        done = convert.store(m.buf, flat, self.scalar(s.value), m.dtype)
        if not tests:
            return done
        if m.is_global:
            return tirx.IfThenElse(self.all(tests), done, None)
        site = self.site("bounds", m.name, s, f"an index of {m.name} lies outside {tuple(m.shape)}")
        return tirx.IfThenElse(self.all(tests), done, self.call("ts_fail", site))

    def load(self, e: Any) -> Any:
        m = self.memory[e.source]
        flat, tests = self.access(m, [self.scalar(i) for i in e.indices], e)
        value = convert.load(m.buf, flat, m.dtype)
        if not tests:
            return value
        return tirx.if_then_else(self.all(tests), value, lit(0, str(value.ty)))

    def access(self, m: Memory, indices: list[Any], node: Any) -> tuple[Any, list[Any]]:
        """The flat index of an element, and the tests that it needs."""
        flat: Any = m.start
        tests: list[Any] = []
        for axis, (i, stride) in enumerate(zip(indices, m.strides, strict=True)):
            wide = self.exact(i) if m.is_global else widened(i, m.index_dtype)
            flat = flat + wide * stride
            size = m.shape[axis]
            known = const(i)
            if known is not None and isinstance(size, int) and not 0 <= known < size:
                raise self.outside(m, axis, f"index {known}", node)
            for test in (i >= 0, i < size):
                if not self.proven(test) and not self.hoisted(test):
                    if not m.is_global and not self.unreachable and self.proven(tirx.Not(test)):
                        raise self.outside(m, axis, f"index {i}", node)
                    tests.append(self.exactly(test) if m.is_global else test)
        return self.analyzer.simplify(flat), tests

    def exact(self, index: Any) -> Any:
        """An index of global memory in 64 bits: its sums and products, too, where 32 might not hold them. The
        analyzer's proofs and LLVM's know no overflow: of ``i * i`` nobody would test whether it is
        negative."""
        if (known := const(index)) is not None:
            return lit(known, "int64")
        if str(index.ty) != "int32":
            return widened(index, "int64")
        if isinstance(index, ir.Var) and index in self.wide:
            return self.wide[index]
        if self._may_overflow(index):
            return type(index)(self.exact(index.a), self.exact(index.b))
        return widened(index, "int64")

    def exactly(self, test: Any) -> Any:
        """A comparison of such indices."""
        if not isinstance(test, tirx.IntImm) and any(map(self._may_overflow, (test.a, test.b))):
            return type(test)(self.exact(test.a), self.exact(test.b))
        return test

    def _may_overflow(self, index: Any) -> bool:
        if isinstance(index, ir.Var) and index in self.wide:
            return True
        if not isinstance(index, _EXACT) or str(index.ty) != "int32":
            return False
        bound = self.analyzer.const_int_bound(index)
        outside = bound.min_value < -(1 << 31) or bound.max_value >= 1 << 31
        return outside or self._may_overflow(index.a) or self._may_overflow(index.b)

    # -- the whole
    # ------------------------------------------------------------------------------------------------
    def run(self) -> dict[str, Any]:
        """The functions of the kernel's shared object."""
        self.header_late: list[tuple[Any, str, int]] = []
        body = self.stmt(self.program.func.body)
        start = self.arena_bytes
        for buf, dtype, offset in self.header_late:
            self.header.append(self._in_arena(buf, dtype, start + offset))
        self.arena_bytes += self.scratch_top
        whole = seq([*self.header, *self._begin(), body, _RETURN])
        block = tirx.PrimFunc([self.ctx, self.args_ptr, self.arena, *self.block], whole, ret_type=_INT)
        out = {"ts_block": block, "ts_grid": self._grid()}
        for k, (frame, index, inner) in enumerate(self.regions):
            params = [self.ctx, self.args_ptr, self.arena, frame, index]
            out[f"ts_region_{k}"] = tirx.PrimFunc(params, seq([*self.header, inner, _RETURN]), ret_type=_INT)
        return out

    def _begin(self) -> list[Any]:
        """What a block does before its body. Its counters become zero before any executor of it starts,
        wherever they are allocated; where other blocks of the cluster signal them, none of those goes on
        before (the barrier releases the zeroes and acquires those of the others), or a signal that comes
        early would be wiped out."""
        if not self.zeroed or not self.in_cluster:
            return self.zeroed
        return [
            *self.zeroed,
            self.call(
                "ts_barrier", lit(4, "int32"), lit(1, "int32"), self.site("barrier", "cta_cluster", None)
            ),
        ]

    def _grid(self) -> Any:
        args_ptr, out_ptr = tirx.Var("args", pointer("int64")), tirx.Var("out", pointer("int64"))
        args = tirx.decl_buffer((_HUGE,), "int64", "args", data_alignment=8, layout=None)
        out = tirx.decl_buffer((3,), "int64", "out", data_alignment=8, layout=None)
        body: list[Any] = [tirx.DeclBuffer(args, data=args_ptr), tirx.DeclBuffer(out, data=out_ptr)]
        n = len(self.program.params)
        saved, self.variables = self.variables, {}

        def load(k: int) -> Any:
            return tirx.BufferLoad(args, [lit(k, "int64")])

        for k, var in enumerate(self.program.symbols.values()):
            self.variables[var] = narrow(load(n + 2 + k), str(var.ty))
        for k, p in enumerate(self.program.params):
            if not hasattr(p.spec, "shape") and "int" in str(p.spec.dtype):
                self.variables[p.var] = narrow(load(k), str(p.spec.dtype))
        for axis, extent in enumerate([*self.program.launch.grid, 1, 1][:3]):
            value = self._extent(extent)
            body.append(tirx.BufferStore(out, widened(value, "int64"), [lit(axis, "int64")]))
        self.variables = saved
        return tirx.PrimFunc([args_ptr, out_ptr], seq([*body, _RETURN]), ret_type=_INT)


#: what would end a name or its line in the table of sites, as `native/launch.c` knows it
_IN_NAMES = {ord("\n"): "\x1e", ord("|"): "\x1f"}


def _element(var: Any) -> str:
    dt = var.ty.dtype
    return str(getattr(dt, "dtype", dt))


def _stable(e: Any) -> bool:
    """Whether evaluating an expression again gives the same value and does nothing else, so that proofs may
    put it for its name."""
    calls: list[Any] = []
    structural_walk(e, (ir.Call, lambda c: calls.append(c) if find(c) is not None else None))
    return not calls and not _reads_memory(e)


def _reads_memory(e: Any) -> bool:
    found: list[Any] = []
    structural_walk(e, (ir.TensorLoad, found.append))
    return bool(found)


def _clamped(wide: Any) -> Any:
    """A distance that counts elements, which are fewer than 2³¹, in 32 bits."""
    most = (1 << 31) - 1
    return tirx.Cast("int32", tirx.Max(tirx.Min(wide, lit(most, "int64")), lit(-most, "int64")))


def _compares_unsigned(e: Any) -> bool:
    """Whether a condition compares unsigned integers: TVM's proofs subtract the sides, and its constants
    cannot go below zero."""
    found: list[Any] = []
    kinds = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)
    structural_walk(e, (kinds, lambda c: found.append(c) if str(c.a.ty).startswith("uint") else None))
    return bool(found)
