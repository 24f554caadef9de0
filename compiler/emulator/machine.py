"""Runs a GPU kernel's thread IR without a GPU: all threads of a block in step, as lanes of NumPy arrays, one
block after another.

What in step would hide is looked for instead: every byte of shared memory and every element of global memory
remembers who touched it since the block's threads last met, and two threads that touch one without a meeting
between them, one of them writing, are a race. Memory and registers begin as garbage. A barrier that not all
of its threads reach is an error.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tilescale.compiler.emulator import (
    async_units,
    clusters,
    entries,
    interleaving,
    isa,
    logs,
    matrices,
    puts,
    ranks,
    threads,
)
from tilescale.compiler.emulator.copies import EmulationError
from tilescale.compiler.emulator.maps import TensorMap
from tilescale.compiler.emulator.memory import (
    Block,
    Clocks,
    Memory,
    Moments,
    Pointer,
    Registers,
    Tile,
    decoded,
    encoded,
    garbage,
    load,
    spread,
    store,
)
from tilescale.compiler.gpu.kernel import ThreadKernel
from tilescale.compiler.ir.scales import WARP, WARPGROUP
from tilescale.compiler.ops.vote import VOTES
from tilescale.compiler.sim import numerics
from tilescale.compiler.tvm_compat import EXTERN_CALLS, IF_THEN_ELSE, REINTERPRET, ir, structural_walk, tirx
from tilescale.errors import InternalError

#: the named barrier of a block's consumers (`lower.CONSUMERS`)
CONSUMERS = 15
#: that of its communicator (`lower.SENDERS`)
SENDERS = 14
#: those of warpgroups' turns (`wgmma.TURNS`)
TURNS = range(8, 14)
#: instructions by which executors of a block wait for one another as the author says
BY_HAND = ("ts::mbarrier_arrive", "ts::mbarrier_arrive_at", "ts::named_barrier", "ts::named_barrier_arrive")
#: waits for a phase of a barrier
WAITS = ("ts::mbarrier_wait", "ts::mbarrier_wait_cluster")
Value = Callable[["Block", Any], Any]


# ---- the kernel


class Emulator:
    """A kernel ready to run."""

    def __init__(self, kernel: ThreadKernel, names: list[str], log: logs.Log | None = None):
        self.kernel, self.names, self.log = kernel, names, log
        self.numbers: dict[Any, int] = {}
        self.thread_vars: dict[str, int] = {}
        self.called = _called(kernel.func.body)
        #: whether engines write what they must know nobody reads
        self.watches = any(name.startswith("ts::tma_load") for name in self.called)
        #: whether executors wait for each other by counters, wherever that stands
        self.waits = any(name.startswith("ts::shared_wait") or name in BY_HAND for name in self.called)
        self.body = self.stmt(kernel.func.body)

    def number(self, var: Any) -> int:
        """What stands for a variable while the kernel runs: TVM's variables take long to compare, and each is
        looked up many times."""
        return self.numbers.setdefault(var, len(self.numbers))

    def launch(
        self,
        grid: tuple[int, int, int],
        args: dict[str, Any],
        symbols: list[int],
        seed: int = 0,
        shapes: dict[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Runs all blocks. ``args``: by parameter name flat arrays in storage dtypes, changed in place, and
        numbers. ``shapes``: the arrays' extents, for tensor maps."""
        shapes = shapes or {}
        draw = np.random.default_rng(seed)
        values: dict[int, Any] = {}
        memory: dict[int, Any] = {}
        for var, source in zip(self.kernel.func.params, self.kernel.sources, strict=True):
            of = self.number(var)
            if source.kind == "symbol":
                values[of] = np.int32(symbols[source.index])
            elif source.kind == "map":
                m = self.kernel.maps[source.index]
                name = self.names[m.param]
                values[of] = TensorMap(args[name].reshape(shapes[name]), m.box, m.swizzle)
            elif source.kind == "failure":
                memory[of] = Memory(var.name, np.zeros(3, np.int64), 3)
            elif source.kind == "log":
                values[of] = self.log
            elif source.kind == "param" and tirx.is_buffer_var(var):
                memory[of] = Memory(
                    var.name, args[self.names[source.index]], args[self.names[source.index]].size
                )
            else:
                values[of] = _typed(args[self.names[source.index]], str(var.ty))
        dims = self.kernel.cluster
        firsts = [range(0, g, c) for g, c in zip(grid, dims, strict=True)]
        within = list(itertools.product(*(range(c) for c in reversed(dims))))  # x counts first
        with np.errstate(all="ignore"):
            for z, y, x in itertools.product(*reversed(firsts)):
                for mem in memory.values():
                    mem.clear()
                self._cluster([(x + i, y + j, z + k) for k, j, i in within], values, memory, draw, seed)

    def ranks(self, grid: tuple[int, int, int], args: list[dict[str, Any]], symbols: list[list[int]],
              seed: int, shapes: list[dict[str, tuple[int, ...]]]) -> None:  # fmt: skip
        """Runs all blocks of several ranks in turns; ``args``, ``symbols`` and ``shapes`` have one entry a
        rank, as in `launch`."""
        draw = np.random.default_rng(seed)
        blocks = [(x, y, z) for z, y, x in itertools.product(*(range(g) for g in reversed(grid)))]
        warps = -(-self.kernel.threads // WARP) if "__syncwarp" in self.called else 1
        world = ranks.World(args, len(blocks), warps, draw, seed, self.kernel.ordered)

        def run(task: Any) -> None:
            values: dict[int, Any] = {}
            memory: dict[int, Any] = {}
            for var, source in zip(self.kernel.func.params, self.kernel.sources, strict=True):
                of = self.number(var)
                name = self.names[source.index] if source.kind == "param" else ""
                if source.kind == "param" and tirx.is_buffer_var(var):
                    memory[of] = world.view(task, task.rank, name)
                elif source.kind == "failure":
                    memory[of] = Memory(var.name, np.zeros(3, np.int64), 3)
                elif source.kind == "map":
                    m = self.kernel.maps[source.index]
                    name = self.names[m.param]
                    array = args[task.rank][name].reshape(shapes[task.rank][name])
                    values[of] = TensorMap(array, m.box, m.swizzle, world.view(task, task.rank, name))
                elif source.kind == "log":
                    values[of] = self.log
                else:
                    own = {
                        "param": args[task.rank].get(name),
                        "rank": task.rank,
                        "world": len(args),
                        "team": None,
                    }
                    symbol = source.kind == "symbol"
                    value = symbols[task.rank][source.index] if symbol else own[source.kind]
                    values[of] = value if value is None else _typed(value, str(var.ty))
            (b,) = self._made([blocks[task.block]], values, memory, world.interleaving)
            b.world, b.task = world, task
            try:
                self._block(b)
            finally:
                b.units.close()

        with np.errstate(all="ignore"):
            try:
                world.interleaving.together([partial(run, t) for t in world.tasks])
            finally:
                world.interleaving.close()

    def _cluster(
        self,
        blocks: list[tuple[int, int, int]],
        values: dict[int, Any],
        memory: dict[int, Any],
        draw: Any,
        seed: int,
    ) -> None:
        """Runs the blocks of a cluster, in turns."""
        order = interleaving.Interleaving(draw, seed)
        made = self._made(blocks, values, memory, order)
        try:
            if len(made) == 1:
                self._block(made[0])
            else:
                order.together([partial(self._block, b) for b in made])
        finally:
            for b in made:
                b.units.close()
            order.close()

    def _made(
        self, blocks: list[tuple[int, int, int]], values: dict[int, Any], memory: dict[int, Any], order: Any
    ) -> list[Block]:
        """The blocks of a cluster, by rank, before they begin."""
        n = self.kernel.threads
        everyone = np.zeros((n * len(blocks), 5), np.int64)
        cluster: list[async_units.AsyncUnits] = []
        told = any(name.startswith("ts::shared_") or name in BY_HAND for name in self.called)
        clocks, moments = Clocks(everyone[:, 4]) if told else None, Moments(everyone)
        made = []
        for rank, at in enumerate(blocks):
            cluster.append(async_units.AsyncUnits(order, cluster))
            b = Block(n, dict(values), dict(memory), moments, rank * n, order.draw, cluster[-1], clocks)
            b.wave = self.kernel.wave
            b.by_hand = told and not any(n.startswith("ts::mbarrier_arrive_blocks") for n in self.called)
            b.early = np.ones(n, bool) if self.kernel.dependent else None
            for tag, var in self.thread_vars.items():
                b.values[var] = (
                    np.arange(n, dtype=np.int32)
                    if tag == "threadIdx.x"
                    else np.int32(at["xyz".index(tag[-1])])
                )
            made.append(b)
        return made

    def _block(self, b: Block) -> None:
        if self.waits:
            self._split(b)
        else:
            self.body(b, np.ones(b.threads, bool))
        b.units.finish()
        if b.failed:
            raise EmulationError(f"the launch failed: {self.kernel.sites[b.failed[0]]}")

    def _split(self, b: Block) -> None:
        """Runs the warps of a block each on its own (its warpgroups, where they multiply), since some wait
        for others."""
        width = WARPGROUP if any(name.startswith("ts::wgmma") for name in self.called) else WARP
        parts = []
        for g in range(-(-b.threads // width)):
            own = replace(b, values=dict(b.values), memory=dict(b.memory), split=True)
            mine = np.arange(b.threads) // width == g
            parts.append(lambda own=own, mine=mine: self.body(own, mine))
        b.units.interleaving.together(parts)

    # -- statements
    def stmt(self, s: Any) -> Callable[[Block, Any], None]:
        made: Callable[[Block, Any], None] = getattr(self, "s_" + type(s).__name__)(s)
        return made

    def s_SeqStmt(self, s: Any) -> Any:
        steps = [self.stmt(x) for x in s.seq]

        def run(b: Block, m: Any) -> None:
            for step in steps:
                step(b, m)

        return run

    def s_AttrStmt(self, s: Any) -> Any:
        self.thread_vars[s.node.thread_tag] = self.number(s.node.var)
        return self.stmt(s.body)

    def s_For(self, s: Any) -> Any:
        low, extent, body = self.expr(s.min), self.expr(s.extent), self.stmt(s.body)
        var, dtype = self.number(s.loop_var), str(s.loop_var.ty)

        def run(b: Block, m: Any) -> None:
            start, count = low(b, m), spread(extent(b, m), m)
            k = 0
            while np.count_nonzero(live := m & (k < count)):  # a fifth of any()
                b.values[var] = np.asarray(start + k).astype(dtype)
                body(b, live)
                k += 1

        return run

    def s_While(self, s: Any) -> Any:
        test, body = self.expr(s.condition), self.stmt(s.body)

        def run(b: Block, m: Any) -> None:
            rounds = 0
            while np.count_nonzero(m := m & test(b, m)):
                body(b, m)
                rounds += 1
                if rounds > 100_000:
                    raise EmulationError("a while loop does not end")

        return run

    def s_IfThenElse(self, s: Any) -> Any:
        test, then = self.expr(s.condition), self.stmt(s.then_case)
        other = None if s.else_case is None else self.stmt(s.else_case)
        if other is not None and _waits(s.then_case) and _waits(s.else_case):
            return self._roles(test, (then, _actor(s.then_case)), (other, _actor(s.else_case)))

        def run(b: Block, m: Any) -> None:
            holds = spread(test(b, m), m)
            if np.count_nonzero(yes := m & holds):
                then(b, yes)
            if other is not None and np.count_nonzero(no := m & ~holds):
                other(b, no)

        return run

    def _roles(self, test: Value, *branches: tuple[Any, int]) -> Any:
        """Both branches at once, each warpgroup on its own: they wait for one another, or others for them.
        ``branches``: with who of the block runs them, where that is not who came here."""

        def run(b: Block, m: Any) -> None:
            holds = spread(test(b, m), m)
            parts = []
            for (body, is_), mask in zip(branches, (m & holds, m & ~holds), strict=True):
                actor = is_ or b.actor
                for g in np.unique(np.flatnonzero(mask) // WARPGROUP):
                    own = replace(b, values=dict(b.values), memory=dict(b.memory), actor=actor)
                    mine = mask & (np.arange(b.threads) // WARPGROUP == g)
                    parts.append(lambda body=body, own=own, mine=mine: body(own, mine))
            b.units.interleaving.together(parts)

        return run

    def s_Bind(self, s: Any) -> Any:
        value, var = self.expr(s.value), self.number(s.var)

        def run(b: Block, m: Any) -> None:
            b.values[var] = value(b, m)

        return run

    def s_Evaluate(self, s: Any) -> Any:
        value = self.expr(s.value)

        def run(b: Block, m: Any) -> None:
            value(b, m)

        return run

    def s_AllocBuffer(self, s: Any) -> Any:
        buf, name, dtype, count = (
            self.number(s.buffer),
            s.buffer.name,
            str(s.buffer.ty.dtype),
            int(s.buffer.ty.shape[0]),
        )
        if s.buffer.ty.storage_scope == "shared":
            watches = self.watches

            def arena(b: Block, m: Any) -> None:
                if b.units.arena is None:
                    b.units.arena = Memory("shared memory", b.draw.integers(0, 256, count, np.uint8), count)
                    b.units.arena.watched = watches
                b.memory[buf] = b.units.arena

            return arena

        def registers(b: Block, m: Any) -> None:
            b.memory[buf] = Registers(name, garbage(b.draw, (b.threads, count), dtype))

        return registers

    def s_DeclBuffer(self, s: Any) -> Any:
        buf, name, dtype = self.number(s.buffer), s.buffer.name, str(s.buffer.ty.dtype)
        if (there := _elsewhere(s.data)) is not None:
            pointer = self.expr(there)

            def twin(b: Block, m: Any) -> None:
                found = pointer(b, m).memory
                b.memory[buf] = (
                    found if not isinstance(found, Tile) else Tile(name, found.arena, found.offset, dtype)
                )

            return twin
        var, offset = _placed(s.data)
        arena = self.number(var)
        if var.ty.storage_scope != "shared":  # a view of registers

            def view(b: Block, m: Any) -> None:
                b.memory[buf] = Registers(name, b.memory[arena].data.view(numerics.storage(dtype)))

            return view

        if offset % np.dtype(numerics.storage(dtype)).itemsize:
            raise InternalError(f"{name} lies at byte {offset}")

        def run(b: Block, m: Any) -> None:
            b.memory[buf] = Tile(name, b.memory[arena], offset, dtype)

        return run

    def s_BufferStore(self, s: Any) -> Any:
        index, lanes = self._index(s.indices[0])
        dtype, buf = str(s.buffer.ty.dtype), self.number(s.buffer)
        if lanes > 1 and isinstance(s.value, ir.TensorLoad):
            from_index, _ = self._index(s.value.indices[0])
            source = self.number(s.value.source)

            def vector(b: Block, m: Any) -> None:
                store(
                    b,
                    m,
                    b.memory[buf],
                    index(b, m),
                    load(b, m, b.memory[source], from_index(b, m), lanes),
                    lanes,
                )

            return vector
        value = self.expr(s.value.value if lanes > 1 else s.value)

        def run(b: Block, m: Any) -> None:
            v = spread(encoded(value(b, m), dtype), m)
            store(
                b, m, b.memory[buf], index(b, m), v if lanes == 1 else np.repeat(v[:, None], lanes, 1), lanes
            )

        return run

    def _index(self, e: Any) -> tuple[Value, int]:
        if isinstance(e, tirx.Ramp):
            if int(e.stride.value) != 1:
                raise InternalError(f"a vector access with stride {e.stride}")
            return self.expr(e.base), int(e.lanes)
        return self.expr(e), 1

    # -- expressions
    def expr(self, e: Any) -> Value:
        kind = type(e).__name__
        if isinstance(e, ir.Var):
            var = self.number(e)
            return lambda b, m: b.values[var]
        if isinstance(e, (tirx.IntImm, tirx.FloatImm)):
            fixed = _typed(e.value, str(e.ty))
            return lambda b, m: fixed
        if isinstance(e, ir.StringImm):
            return lambda b, m: str(e.value)
        if isinstance(e, ir.TensorLoad):
            index, dtype, buf = self.expr(e.indices[0]), str(e.source.ty.dtype), self.number(e.source)
            return lambda b, m: decoded(load(b, m, b.memory[buf], index(b, m), 1), dtype)
        if kind == "Cast":
            inner, src, dst = self.expr(e.value), str(e.value.ty), str(e.ty)
            return lambda b, m: numerics.cast(np.atleast_1d(inner(b, m)), src, dst)
        if kind == "Not":
            inner = self.expr(e.a)
            return lambda b, m: ~np.asarray(inner(b, m), bool)
        if kind == "BitwiseNot":
            flipped, of = self.expr(e.a), numerics.storage(str(e.ty))
            return lambda b, m: ~np.asarray(flipped(b, m)).astype(of)
        if kind == "Select" or (isinstance(e, ir.Call) and e.op.name == IF_THEN_ELSE):
            return self._chosen(*((e.condition, e.true_value, e.false_value) if kind == "Select" else e.args))
        if kind in ("And", "Or"):
            return self._logic(e, kind == "And")
        if isinstance(e, ir.Call):
            return self._call(e)
        op, a, b_ = _BINARY[kind], self.expr(e.a), self.expr(e.b)
        if (
            kind in ("FloorDiv", "FloorMod", "Div", "Mod")
            and "int" in str(e.ty)
            and not (isinstance(e.b, tirx.IntImm) and int(e.b.value))
        ):
            return lambda b, m: op(a(b, m), np.where(np.asarray(y := b_(b, m)) == 0, np.ones_like(y), y))
        return lambda b, m: op(a(b, m), b_(b, m))

    def _chosen(self, condition: Any, yes: Any, no: Any) -> Value:
        test, a, c = self.expr(condition), self.expr(yes), self.expr(no)

        def run(b: Block, m: Any) -> Any:
            holds = spread(test(b, m), m)
            return np.where(holds, a(b, m & holds), c(b, m & ~holds))

        return run

    def _logic(self, e: Any, both: bool) -> Value:
        a, c = self.expr(e.a), self.expr(e.b)

        def run(b: Block, m: Any) -> Any:
            left = spread(a(b, m), m)
            right = spread(c(b, m & (left if both else ~left)), m)
            return left & right if both else left | right

        return run

    def _call(self, e: Any) -> Value:
        name, dtype = e.op.name, str(e.ty)
        if name == "tirx.address_of":
            index, buf = self.expr(e.args[0].indices[0]), self.number(e.args[0].source)
            return lambda b, m: Pointer(b.memory[buf], spread(index(b, m), m))
        if name == "tirx.buffer_data":
            whole = self.number(e.args[0])
            return lambda b, m: Pointer(b.memory[whole], np.zeros(m.shape, np.int64))
        if name in EXTERN_CALLS:
            name = str(e.args[0].value)
            isa.check(name)
            function = (
                FUNCTIONS.get(name)
                or matrices.find(name)
                or ranks.FUNCTIONS.get(name)
                or puts.find(name)
                or async_units.find(name)
                or clusters.find(name)
            )
            args = [self.expr(a) for a in e.args[1:]]
            if function is None:
                raise InternalError(f"the emulator does not know {e.args[0].value}")
            return lambda b, m: function(b, m, *(a(b, m) for a in args))
        args, source = [self.expr(a) for a in e.args], str(e.args[0].ty)

        def vectors(b: Block, m: Any) -> list[Any]:
            return [np.atleast_1d(a(b, m)) for a in args]

        if name.startswith("ts.math."):
            short = name[len("ts.math.") :]
            return lambda b, m: numerics.function(short, vectors(b, m), source)
        if name == REINTERPRET:
            return lambda b, m: numerics.reinterpret(vectors(b, m)[0], source, dtype)
        return lambda b, m: numerics.intrinsic(name, vectors(b, m), dtype, source)


def _truncated(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: op(np.atleast_1d(a), np.atleast_1d(b))


def _divide(a: Any, b: Any) -> Any:
    return (
        np.asarray(a / b)
        if np.asarray(a).dtype.kind == "f"
        else _truncated(numerics.truncated_division)(a, b)
    )


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": _divide,
    "Mod": _truncated(numerics.truncated_remainder),
    "FloorDiv": operator.floordiv,
    "FloorMod": operator.mod,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
    "LShift": operator.lshift,
    "RShift": operator.rshift,
    "BitwiseAnd": operator.and_,
    "BitwiseOr": operator.or_,
    "BitwiseXor": operator.xor,
    "Min": numerics.minimum,
    "Max": numerics.maximum,
}


def _typed(value: Any, dtype: str) -> Any:
    return (
        np.asarray(value).astype(numerics.compute(dtype))[()] if dtype not in ("bool",) else np.bool_(value)
    )


def _elsewhere(data: Any) -> Any:
    """The call that gives an address in another rank's memory; None where a DeclBuffer lies in the arena."""
    inner = data.args[0] if data.op.name == REINTERPRET else data
    return inner if isinstance(inner, ir.Call) and inner.op.name in EXTERN_CALLS else None


def _placed(data: Any) -> tuple[Any, int]:
    """The arena and the byte offset of a DeclBuffer's address."""
    if data.op.name == REINTERPRET:
        return _placed(data.args[0])
    if data.op.name == "tirx.handle_add_byte_offset":
        return _placed(data.args[0])[0], int(data.args[1].value)
    return data.args[0], 0


# ---- instructions


def _meet(column: int, width: int) -> Callable[..., None]:
    def run(b: Block, m: Any, *_: Any) -> None:
        groups = np.arange(b.threads) // (width or b.threads)
        for g in np.unique(groups[m]):
            mine = groups == g
            if m[mine].all():
                b.met(mine, column)
            elif b.split:
                b.units.interleaving.meet(
                    (b.units, column, g), int(mine.sum()), int(m[mine].sum()), partial(b.met, mine, column)
                )
            else:
                raise EmulationError("a barrier that not all of its threads reach")

    return run


def _await_launches(b: Block, m: Any) -> None:
    assert b.early is not None, "a launch that does not begin early"
    b.early[m] = False


def _cluster_address(b: Block, m: Any, where: Pointer, rank: Any) -> Pointer:
    """The same place of another block's shared memory."""
    tile = where.memory
    return Pointer(Tile(tile.name, clusters.peer_arena(b, m, rank), tile.offset, "uint8"), where.index)


def _barrier_sync(b: Block, m: Any, number: Any, threads: Any) -> None:
    """A warpgroup meets, or the consumers, who are the block's first threads. A turn is a meeting too, but
    nothing may depend on it."""
    numbers = np.unique(np.broadcast_to(number, m.shape)[m])
    count, which = int(np.asarray(threads).ravel()[0]), int(numbers[0])
    if len(numbers) > 1 and (which in TURNS or {CONSUMERS, SENDERS} & set(numbers)):
        raise EmulationError(f"threads of one instruction meet at different barriers: {numbers}")
    if which in TURNS:
        b.units.interleaving.meet((b.units, which), count, int(m.sum()), lambda: None)
        return
    if which not in (CONSUMERS, SENDERS):
        _meet(1, WARPGROUP)(b, m)
        return

    def met() -> None:
        if which == CONSUMERS:
            b.met(np.arange(b.threads) < count, 0)
        else:  # warps of one warpgroup, the others of which never meet them
            b.met(m, 1)

    b.units.interleaving.meet((b.units, which), count, int(m.sum()), met)


def _barrier_of(b: Block, m: Any, number: Any, threads: Any) -> None:
    """That of an executor: 0 is the block's, -1 a warp's."""
    which = int(np.broadcast_to(number, m.shape)[m].flat[0])
    if which > 0:
        _barrier_sync(b, m, number, threads)
    else:
        (_meet(0, 0) if which == 0 else _meet(2, WARP))(b, m)


def _barrier_arrive(b: Block, m: Any, number: Any, threads: Any) -> None:
    b.units.interleaving.arrive(
        (b.units, int(async_units.one(m, number))), int(np.asarray(threads).ravel()[0]), int(m.sum())
    )
    b.units.yields()


def _waits(s: Any) -> bool:
    """Whether a statement waits for a phase of a barrier, or puts what other ranks wait for."""
    return bool(_called(s) & {*WAITS, *puts.PUTS})


def _actor(s: Any) -> int:
    """Who of a block runs a branch: who fills rings for the others, or puts for them; else who came to it."""
    called = _called(s)
    if "ts::mbarrier_expect" in called and not called & puts.PUTS:
        return ranks.PRODUCER
    return ranks.COMMUNICATOR if called & puts.PUTS and "ts::mbarrier_wait" not in called else 0


def _called(s: Any) -> set[str]:
    """The functions that a statement calls, without what their templates are given."""
    names: set[str] = set()
    structural_walk(
        s,
        (
            ir.Call,
            lambda c: names.add(str(c.args[0].value).split("<")[0]) if c.op.name in EXTERN_CALLS else None,
        ),
    )
    return names


def _fail(b: Block, m: Any, site: Any, record: Any) -> None:
    b.failed.append(int(np.asarray(site).ravel()[0]))


#: what kernels printed
PRINTED: list[str] = []


def _printf(b: Block, m: Any, text: str, *values: Any) -> Any:
    for t in np.flatnonzero(m):
        PRINTED.append(text.replace("lld", "d") % tuple(np.broadcast_to(v, m.shape)[t] for v in values))
    return np.int32(0)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "__syncthreads": _meet(0, 0),
    "ts::barrier_sync": _barrier_sync,
    "ts::barrier_arrive": _barrier_arrive,
    "__syncwarp": _meet(2, WARP),
    "ts::cluster_address": _cluster_address,
    "ts::await_launches": _await_launches,
    "ts::admit_launches": lambda b, m: None,
    "ts::enter": entries.enter(_barrier_of),
    "ts::enter_all": entries.enter(_barrier_of, everyone=True),
    "ts::any": threads.vote,
    "ts::uniform": threads.uniform,
    "ts::shuffle_xor": threads.shuffle_xor,
    **{f"ts::lane_{kind}": threads.lane(kind) for kind in ("xor", "up", "down", "from")},
    **{f"ts::vote_{kind}": threads.ballot(kind) for kind in VOTES},
    **{f"ts::block_{kind}": threads.block_vote(kind, _barrier_of) for kind in ("count", "and", "or")},
    "ts::named_barrier": threads.named_barrier,
    "ts::named_barrier_arrive": threads.named_barrier_arrive,
    "ts::fail": _fail,
    "printf": _printf,
    **logs.FUNCTIONS,
    **matrices.FUNCTIONS,
    **{
        f"ts::{how}red_add{n}_{k}": threads.red_add(n, d)
        for k, d in (("f32", "float32"), ("f16", "float16"), ("bf16", "bfloat16"))
        for n in (2, 4, 8)
        for how in ("", "publishing_")
    },
    **{
        f"ts::remote_red_add{n}_{k}": threads.remote_add(n) for k in ("f32", "f16", "bf16") for n in (2, 4, 8)
    },
    **{f"ts::system_red_add{k}": threads.remote_add(1) for k in ("", "_f16", "_bf16")},
    **{
        f"ts::{how}_{kind}": threads.atomic(kind.partition("_")[0])
        for kind in ("add", "add_f16", "add_bf16", "max", "min", "or", "and", "xor", "exch", "load", "store")
        for how in ("atomic", "publishing")
    },
}
