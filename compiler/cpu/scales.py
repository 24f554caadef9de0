"""T.Scale on the CPU: who a statement's executor is, how many there are, and how those run that wait for one
another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilescale.compiler.cpu.expr import lit, seq
from tilescale.compiler.cpu.memory import narrow, pointer, size_of
from tilescale.compiler.cpu.view import widened
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.scales import SCALES, WARP, WIDTHS
from tilescale.compiler.ops.shuffle import EVERYONE, OF_WARPS
from tilescale.compiler.tvm_compat import ir, is_buffer_var, structural_walk, tirx


class Scales:
    """Mixed into the lowering: the values of a scale, and its body once for each executor."""

    program: TileProgram
    executors: list[tuple[str, Any, int]]
    header: list[Any]
    regions: list[Any]
    inside: set[Any]
    waits: bool
    block: Any
    rank: Any
    world: Any
    ctx: Any
    args_ptr: Any
    arena: Any
    #: storage dtype, elements a thread → where lanes exchange values
    tables: dict[tuple[str, int], Any]
    #: lanes of a warp that are not all → their barriers, one for each warp
    lane_barriers: dict[int, Any]
    zeroed: list[Any]
    # The parts' that it is mixed with:
    stmt: Callable[[Any], Any]
    call: Callable[..., Any]
    bind_loop: Callable[[Any, Any], None]
    site: Callable[..., Any]
    _extent: Callable[[Any], Any]
    _reserve: Callable[[int], int]
    _in_arena: Callable[[Any, str, int], Any]

    def scale_value(self, name: str, which: int) -> Any:
        """The index (0) or count (1) at a scale."""
        for scale, index, count in reversed(self.executors):
            if scale == name:
                return (index, lit(count, "int32"))[which]
        if name == "device":
            return (self.rank, self.world)[which]
        grid = [*(self._extent(e) for e in self.program.launch.grid), 1, 1][:3]
        if name in ("grid", "block"):
            return self._linear(self.block, grid)[which]
        if name == "cta_cluster":
            dims = list(self.program.launch.cluster)
            local = [
                b if d == 1 and g == 1 else tirx.floormod(b, lit(d, "int32"))
                for b, d, g in zip(self.block, dims, grid, strict=True)
            ]
            return self._linear(local, dims)[which]
        return (lit(0, "int32"), lit(1, "int32"))[which]

    @staticmethod
    def _linear(index: list[Any], extents: list[Any]) -> tuple[Any, Any]:
        (x, y, z), (gx, gy, gz) = index, (widened(e, "int32") for e in extents)
        return x + gx * (y + gy * z), gx * gy * gz

    def _scale(self, name: str, s: Any) -> Any:
        """Executors run one after another; where they wait for one another they are fibers, forked and
        joined."""
        if name not in WIDTHS:
            return self.stmt(s.body)
        outer = next((WIDTHS[sc] for sc, _, _ in reversed(self.executors)), self.program.launch.threads)
        n = outer // WIDTHS[name]
        var = tirx.Var(f"{name}_id", "int32")
        self.bind_loop(var, n)
        self.inside.add(var)
        self.executors.append((name, var, n))
        body = self.stmt(s.body)
        self.executors.pop()
        if synchronizes(s.body):
            return self._fork(var, n, body)
        return tirx.For(var, lit(0, "int32"), lit(n, "int32"), tirx.ForKind.SERIAL, body)

    def _fork(self, var: Any, n: int, body: Any) -> Any:
        """``body`` as a function of its own, run by ``n`` fibers. Scalars that it uses travel in a frame of
        64-bit slots."""
        used, defined = free_variables(body)
        fixed = {self.ctx, self.args_ptr, self.arena, var, self.rank, self.world}
        own = {s.var for s in self.header if isinstance(s, tirx.Bind)}
        captured = [
            v for v in used if v not in defined and v not in fixed and v not in own and not is_buffer_var(v)
        ]
        frame = tirx.decl_buffer(
            (len(captured) + 1,), "int64", "frame", data_alignment=8, layout=None, scope="local"
        )
        out: list[Any] = [tirx.AllocBuffer(frame)]
        frame_ptr = tirx.Var("frame", pointer("int64"))
        there = tirx.decl_buffer((len(captured) + 1,), "int64", "frame", data_alignment=8, layout=None)
        entry: list[Any] = [tirx.DeclBuffer(there, data=frame_ptr)]
        for k, v in enumerate(captured):
            dt, slot = str(v.ty), lit(k, "int32")
            packed = (
                tirx.reinterpret("int64", tirx.Cast("float64", v)) if "float" in dt else tirx.Cast("int64", v)
            )
            out.append(tirx.BufferStore(frame, packed, [slot]))
            raw = tirx.BufferLoad(there, [slot])
            entry.append(
                tirx.Bind(
                    v, tirx.Cast(dt, tirx.reinterpret("float64", raw)) if "float" in dt else narrow(raw, dt)
                )
            )
        index = len(self.regions)
        self.regions.append((frame_ptr, var, seq([*entry, body])))
        self.waits = True
        address = tirx.address_of(tirx.BufferLoad(frame, [lit(0, "int32")]))
        out.append(self.call("ts_fork", lit(index, "int32"), address, lit(n, "int32")))
        return seq(out)

    def executor_count(self) -> int:
        """How many executors of a block run the current statement."""
        count = 1
        for _, _, n in self.executors:
            count *= n
        return count

    def thread_number(self) -> Any:
        """The executor's number among those of its scale in the block: in T.Scale("thread") the thread's."""
        number: Any = lit(0, "int32")
        for _, index, count in self.executors:
            number = number * count + index
        return number

    def exchange_table(self, storage: str, each: int = 1) -> Any:
        """``each`` elements for each thread of the block, in which the lanes of a warp leave values for one
        another."""
        if (storage, each) not in self.tables:
            count = self.program.launch.threads * each
            buf = tirx.decl_buffer((count,), storage, f"exchanged_{storage}", data_alignment=64, layout=None)
            self.header.append(self._in_arena(buf, storage, self._reserve(count * size_of(storage))))
            self.tables[storage, each] = buf
        return self.tables[storage, each]

    def barrier_of_lanes(self, mask: int, call: Any) -> Any:
        """The lanes of a thread's warp that ``mask`` names synchronize. Masks that are not all lanes have
        barriers of their own, which are zero when the block begins."""
        warp, threads = tirx.floordiv(self.thread_number(), lit(WARP, "int32")), self.program.launch.threads
        lanes = (mask & ((1 << min(WARP, threads)) - 1)).bit_count()
        site = self.site("barrier", "warp", call)
        if mask == EVERYONE:
            return self.numbered_barrier(warp + OF_WARPS, lanes, site)
        self.waits = True
        if mask not in self.lane_barriers:
            count = 2 * -(-threads // WARP)
            buf = tirx.decl_buffer((count,), "int64", "lanes_meet", data_alignment=64, layout=None)
            self.header.append(self._in_arena(buf, "int64", self._reserve(8 * count)))
            zero = tirx.const(0, "int64")
            self.zeroed += [tirx.BufferStore(buf, zero, [lit(k, "int32")]) for k in range(count)]
            self.lane_barriers[mask] = buf
        where = tirx.address_of(tirx.BufferLoad(self.lane_barriers[mask], [warp * 2]))
        return self.call("ts_barrier_at", where, lit(lanes, "int32"), site)

    def numbered_barrier(self, number: Any, executors: int, site: Any) -> Any:
        """So many executors of the block synchronize at one of its barriers."""
        self.waits = True
        return self.call("ts_barrier", -number, lit(executors, "int32"), site)


#: operations at which executors of a block wait for one another
_SYNCHRONIZE = (
    "ts.wait",
    "ts.get_packets",
    "ts.team_sync",
    "ts.sync_threads",
    "ts.arrive_threads",
    "ts.shuffle",
    "ts.vote",
    "ts.block_vote",
    "ts.mma_sync",
    "ts.ldmatrix",
)


def synchronizes(body: Any) -> bool:
    """Whether executors of a block may wait for one another (or for others) in a statement."""
    found: list[Any] = []

    def look(call: Any) -> None:
        name = getattr(call.op, "name", "")
        outward = name == "ts.barrier" and str(call.attrs["reach"]) != "block"
        outward = outward or name in ("ts.cluster_arrive", "ts.cluster_wait")
        if outward or name in _SYNCHRONIZE:
            found.append(call)

    structural_walk(body, (ir.Call, look))
    return bool(found)


def any_fork(body: Any) -> bool:
    """Whether a kernel forks executors anywhere."""
    found: list[Any] = []

    def look(s: Any) -> None:
        if s.attr_key == "ts.scale" and SCALES[int(s.value.value)] in WIDTHS and synchronizes(s.body):
            found.append(s)

    structural_walk(body, (tirx.AttrStmt, look))
    return bool(found)


def free_variables(body: Any) -> tuple[list[Any], set[Any]]:
    """The variables that a statement uses, in order of appearance, and those that it defines."""
    used: dict[Any, None] = {}
    defined: set[Any] = set()
    structural_walk(body, (ir.Var, lambda v: used.setdefault(v)))
    structural_walk(body, (tirx.Bind, lambda s: defined.add(s.var)))
    structural_walk(body, (tirx.For, lambda s: defined.add(s.loop_var)))
    structural_walk(body, (tirx.Let, lambda e: defined.add(e.var)))
    structural_walk(body, ((tirx.AllocBuffer, tirx.DeclBuffer), lambda s: defined.add(s.buffer)))
    return list(used), defined
