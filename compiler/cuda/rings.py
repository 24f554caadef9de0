"""The tokens of a ring as mbarriers in shared memory (PTX ISA 9.0, "Parallel Synchronization and
Communication Instructions: mbarrier").

A stage has two. ``full`` expects one arrival, the producer's, which names the bytes that TMA will bring: its
phase ends when they are there. ``empty`` expects one arrival of each consuming warp; of those that read the
ring, where warpgroups have code of their own. Round n uses stage n % depth for the (n // depth)th time, so a
consumer waits for the phase n // depth of ``full``, and the producer for the one before of ``empty``, which
in the first pass over the ring counts as over (a wait for the parity of the phase before a barrier's first
returns at once).

- What a consumer reads of a stage comes after TMA wrote it: complete_tx is a release of TMA's writes, and the
  wait acquires it.
- TMA's next write of the stage comes after those reads: a warp arrives (release) when its own are over, the
  producer's wait acquires all warps' arrivals, and it issues the copy behind that. wgmma's reads are over
  when wait_group says so; each warp waits for its own. Reads by the threads themselves are of another proxy
  than TMA's write, so each thread puts a proxy fence between them and its warp's arrival, where it has made
  none since (passes/elide_proxy_fences.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.gpu.build import at, call
from tilescale.compiler.gpu.kernel import placed
from tilescale.compiler.gpu.places import widened
from tilescale.compiler.ir.scales import WARP, WARPGROUP
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.passes.elide_proxy_fences import read_by_threads
from tilescale.compiler.passes.roles import calls
from tilescale.compiler.tvm_compat import tirx

if TYPE_CHECKING:
    from tilescale.compiler.cuda.lower import Lowering as CudaLowering


class Barriers:
    """A ring's barriers: arrays of ``depth`` words in the arena."""

    def __init__(self, cx: CudaLowering, ring: Any, readers: set[int] | None = None):
        self.depth, self.shared = ring.depth, ring.shared
        self.full, full = placed(cx.arena, f"full{ring.number}", "uint64", ring.depth, ring.barriers)
        self.empty, empty = placed(
            cx.arena, f"empty{ring.number}", "uint64", ring.depth, ring.barriers + 8 * ring.depth
        )
        cx.head += [full, empty]
        #: the warpgroups that read it, where they have code of their own; None: all consumers
        self.readers = readers
        #: of one stage, tile by tile
        self.bytes: list[int] = []
        #: whether threads read its tiles themselves, and not products alone
        self.by_threads = ring.number in read_by_threads(cx.program.func.body, cx.program.schedule.ring_of)

    def read_by(self, group: int | None) -> bool:
        """Whether the warpgroup whose code is being made reads the ring. One that does not neither waits nor
        arrives: a wait would keep it from what others wait for."""
        return self.readers is None or group in self.readers

    def stage(self, counter: Any) -> Any:
        if self.depth == 1:
            return tirx.IntImm("int32", 0)
        by = tirx.IntImm("int32", self.depth)
        return tirx.floormod(counter, by) if not self.depth & (self.depth - 1) else tirx.truncmod(counter, by)

    def phase(self, counter: Any) -> Any:
        """The parity of the round's phase."""
        by = tirx.IntImm("int32", self.depth)
        passes = (
            tirx.floordiv(counter, by) if not self.depth & (self.depth - 1) else tirx.truncdiv(counter, by)
        )
        return tirx.bitwise_and(passes, tirx.IntImm("int32", 1))


def _of(cx: CudaLowering, token: Any) -> tuple[Barriers, Any]:
    return cx.barriers[int(token.attrs["ring"])], cx.scalar(token.args[0])


def acquire(cx: CudaLowering, token: Any) -> Any:
    """The stage is empty; what will fill it is announced, so that copies may arrive in any order behind
    this."""
    b, n = _of(cx, token)
    tiles = int(token.attrs["tiles"]) if "tiles" in token.attrs else -1
    coming = sum(size for k, size in enumerate(b.bytes) if tiles >> k & 1)
    free = tirx.bitwise_xor(b.phase(n), tirx.IntImm("int32", 1))
    waited = cx.stalling(call("mbarrier_wait", at(b.empty, b.stage(n)), free, span=token.span))
    return sequence(
        [
            waited,
            call("mbarrier_expect", at(b.full, b.stage(n)), tirx.IntImm("int32", coming), span=token.span),
        ]
    )


def commit(cx: CudaLowering, token: Any) -> Any:
    """Nothing: the copies name the stage's barrier themselves."""
    return tirx.Evaluate(tirx.IntImm("int32", 0))


def wait(cx: CudaLowering, token: Any) -> Any:
    b, n = _of(cx, token)
    if not b.read_by(cx.group):
        return sequence([])
    return cx.stalling(call("mbarrier_wait", at(b.full, b.stage(n)), b.phase(n), span=token.span))


def release(cx: CudaLowering, token: Any) -> Any:
    b, n = _of(cx, token)
    if not b.read_by(cx.group):
        return sequence([])
    when: Any = tirx.const(True, "bool")
    fence = (
        [call("fence_proxy_async", span=token.span)] if b.by_threads and "fenced" not in token.attrs else []
    )
    if len(token.args) > 1:  # the round before, where there was one (ops.ring.late_release)
        # counters are never negative, which makes the remainder cheap; a power of two is cheap in any case
        n, when = n - 1 if not b.depth & (b.depth - 1) else n + (b.depth - 1), cx.scalar(token.args[1])
    if b.shared:
        target, blocks = (
            cx.cluster_peer(b.shared, tirx.bitwise_and(cx.tid, tirx.IntImm("int32", WARP - 1))),
            cx.cluster_size(b.shared),
        )
        return sequence(
            [
                *fence,
                call(
                    f"mbarrier_arrive_blocks<{blocks}>",
                    at(b.empty, b.stage(n)),
                    target,
                    when,
                    span=token.span,
                ),
            ]
        )
    return sequence([*fence, call("mbarrier_arrive_warp", at(b.empty, b.stage(n)), when, span=token.span)])


def initialised(cx: CudaLowering) -> list[Any]:
    """One thread sets up all barriers. The fences make that visible to TMA (the asynchronous proxy) and the
    barrier behind them to all threads, before anyone waits or arrives."""
    made = []
    for b in cx.barriers.values():
        threads = cx.threads if b.readers is None else len(b.readers) * WARPGROUP
        warps = tirx.IntImm("int32", threads // WARP * cx.cluster_size(b.shared))
        s = tirx.Var("s", "int32")
        body = tirx.SeqStmt(
            [
                call("mbarrier_init", at(b.full, s), widened(1, "int32")),
                call("mbarrier_init", at(b.empty, s), warps),
            ]
        )
        made.append(tirx.For(s, widened(0, "int32"), widened(b.depth, "int32"), tirx.ForKind.UNROLLED, body))
    one = tirx.IfThenElse(
        tirx.EQ(cx.tid, widened(0, "int32")), tirx.SeqStmt([*made, call("fence_mbarrier_init")]), None
    )
    barrier = "ts::cluster_begins" if any(b.shared for b in cx.barriers.values()) else "__syncthreads"
    return [one, tirx.Evaluate(tirx.call_extern("void", barrier))]


def ended(cx: CudaLowering, producer: Any) -> list[Any]:
    """Behind the last round, where other blocks arrive at this one's barriers: they all have."""
    counters: dict[int, Any] = {}
    for c in calls(producer):
        if c.op.name == "ts.ring_acquire":
            counters[int(c.attrs["ring"])] = c.args[0]
    out = []
    for number, counter in counters.items():
        b = cx.barriers[number]
        if b.shared:
            s = tirx.Var("s", "int32")
            n = cx.scalar(counter) + s
            waited = call(
                "mbarrier_wait",
                at(b.empty, b.stage(n)),
                tirx.bitwise_xor(b.phase(n), tirx.IntImm("int32", 1)),
            )
            out.append(
                tirx.For(s, widened(0, "int32"), widened(b.depth, "int32"), tirx.ForKind.SERIAL, waited)
            )
    return out
