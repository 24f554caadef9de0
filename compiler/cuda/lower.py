"""What NVIDIA's GPUs add to the lowering: roles and their barriers, named barriers, tensor maps, launches
that begin early."""

from __future__ import annotations

import functools
from dataclasses import replace
from math import prod
from typing import Any

from tilescale import log
from tilescale.compiler.cuda.clusters import Clusters
from tilescale.compiler.cuda.ops.cp_async import issued_early, lower_elements
from tilescale.compiler.cuda.ops.peer_rows import by_lanes, lower_by_lanes
from tilescale.compiler.cuda.ops.tma import TensorMap
from tilescale.compiler.cuda.rings import Barriers, ended, initialised
from tilescale.compiler.cuda.stmatrix import MatrixStores
from tilescale.compiler.cuda.warpgroup_code import Apart, has_warpgroup_code
from tilescale.compiler.cuda.wgmma import TURNS
from tilescale.compiler.gpu import lower
from tilescale.compiler.gpu.build import all_of, call
from tilescale.compiler.gpu.kernel import Source, ThreadKernel
from tilescale.compiler.gpu.places import Box
from tilescale.compiler.ir.buffers import bases
from tilescale.compiler.ir.nests import Nest
from tilescale.compiler.ir.operations import operations
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.scales import WARP, WARPGROUP
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ir.walks import mentions
from tilescale.compiler.layout import Fragment
from tilescale.compiler.layout.loops import bits_of
from tilescale.compiler.ops.cp_async import element_of
from tilescale.compiler.ops.shuffle import BARRIERS
from tilescale.compiler.passes.gpu_schedule import FINDING, LOOKING, REGISTERS, SENDING
from tilescale.compiler.passes.remote_puts import COMMUNICATOR
from tilescale.compiler.passes.residency import BLOCK_SHARED, SM_SHARED
from tilescale.compiler.tvm_compat import ir, is_buffer_var, structural_walk, tirx
from tilescale.errors import TileValueError

#: the barrier of the consumers; 0 is that of __syncthreads, warpgroups have those behind it
CONSUMERS = 15
#: that of the communicator's warps
SENDERS = 14
#: registers of a consumer's tiles up to which two blocks of 256 consumers have enough: 112 for each thread
FEW = 56
#: registers of tiles from which on what ptxas keeps beside them, where it may, decides how many blocks fit
MANY = 64
#: registers of a multiprocessor; those that a thread of one warpgroup needs besides its tiles
REGISTER_FILE, SPARE = 65536, 32


class Lowering(Clusters, Apart, MatrixStores):
    """One kernel on its way to thread IR."""

    def __init__(self, program: TileProgram, *, instrument: bool = False):
        #: registers that say where the numbers of sparse operands belong
        self.asked: list[Any] = []
        #: the author's barriers, with the arrivals that each expects
        self.by_hand: list[tuple[Any, list[int]]] = []
        #: those of them at which other blocks of the cluster may arrive
        self.among_blocks: set[Any] = set()
        #: whether registers are moved by hand, which takes a bound on blocks
        self.one_block = False
        #: the number of the consumer's warpgroup, where something asks for it
        self.mine: Any = None
        self.maps: list[tuple[Any, TensorMap]] = []
        self.barriers: dict[int, Barriers] = {}
        #: the author's barriers → the block's
        self.named: dict[int, int] = {}
        self.flying = []
        #: commits that stand behind the If in which they are, for rounds without copies too
        self.closed: set[Any] = set()
        #: a loop of a thread's own loads ahead of what it computes
        self.loads_ahead = False
        super().__init__(program, instrument=instrument)
        self.dependent = bool(program.launch.pdl) and self.target.dependent_launches

    def warpgroup(self) -> Any:
        """The number of a consumer's warpgroup, named once: a value that the machine's compiler knows to be
        the same for a warp, so that what is computed from it, such as matrix descriptors, is computed once a
        warp and not in each lane."""
        if self.group is not None:
            return tirx.IntImm("int32", self.group)
        if self.mine is None:
            self.mine = tirx.Var("warpgroup", "int32")
            self.bind_range(self.mine, self.threads // WARPGROUP)
        return self.mine

    def _s_Bind(self, s: Any) -> Any:
        """A warpgroup's number that the author asks for is the same for a warp to the machine's compiler
        too, where products are issued: else what it decides, and what follows from it, is each lane's own."""
        made = super()._s_Bind(s)
        index = isinstance(s.value, ir.Call) and s.value.op.name == "ts.scale_index"
        if not index or str(s.value.args[0].value) != "warpgroup" or not self.multiplies:
            return made
        return tirx.Bind(made.var, tirx.call_extern("int32", "ts::uniform", made.value), s.span)

    @functools.cached_property
    def multiplies(self) -> bool:
        """Whether warpgroups issue products."""
        return any(c.op.name.startswith("ts.wgmma") for c, _ in operations(self.program.func.body))

    def _s_AllocBuffer(self, s: Any) -> Any:
        b = s.buffer
        if (
            b.ty.storage_scope.startswith("shared") and b in self.places
        ):  # another warpgroup's code has it already
            return lower.NOTHING
        made = super()._s_AllocBuffer(s)
        if b.ty.storage_scope == "shared.barrier":
            self.by_hand.append((self.places[b].buf, [int(n) for n in s.annotations["ts.counts"]]))
            if "ts.cluster" in s.annotations:
                self.among_blocks.add(b)
        return made

    def holder(self) -> Any:
        """One thread alone runs the producer's part; of the communicator's the first one signals and
        waits."""
        if self.role == COMMUNICATOR:
            return tirx.EQ(self.communicator_thread(), tirx.IntImm("int32", 0))
        return None if self.role == "producer" else super().holder()

    def communicator_thread(self) -> Any:
        """The number of a thread among the communicator's, whose warps stand behind the producer's."""
        return self.tid - tirx.IntImm("int32", self.threads + WARP)

    # -- barriers
    # -------------------------------------------------------------------------------------------------
    def barrier_call(self, scope: str) -> Any:
        if scope == "warpgroup":
            number = self.tid // WARPGROUP + 1  # 0 is that of __syncthreads
            return tirx.call_extern("void", "ts::barrier_sync", number, tirx.IntImm("int32", WARPGROUP))
        if scope == COMMUNICATOR:
            threads = tirx.IntImm("int32", self.program.launch.comm_warps * WARP)
            return tirx.call_extern("void", "ts::barrier_sync", tirx.IntImm("int32", SENDERS), threads)
        if scope == "block" and self.role == "consumer":  # the producer goes its own way
            return tirx.call_extern(
                "void",
                "ts::barrier_sync",
                tirx.IntImm("int32", CONSUMERS),
                tirx.IntImm("int32", self.threads),
            )
        return super().barrier_call(scope)

    def barrier_of(self, scope: str) -> tuple[Any, Any, int]:
        if scope == "warpgroup":
            return self.tid % WARPGROUP, self.tid // WARPGROUP + 1, WARPGROUP
        if scope == "block" and self.role == COMMUNICATOR:
            threads = self.program.launch.comm_warps * WARP
            return self.communicator_thread(), tirx.IntImm("int32", SENDERS), threads
        if scope == "block":  # a producer's threads go their own way
            number = tirx.IntImm("int32", CONSUMERS if self.role == "consumer" else 0)
            return self.tid, number, self.threads
        return super().barrier_of(scope)

    def named_barrier(self, number: int, count: int, waits: bool = True) -> Any:
        """At the author's number where this kernel does not use it itself."""
        if number not in self.named:
            groups, plan = self.threads // WARPGROUP, self.program.schedule
            turns = range(TURNS, TURNS + groups) if plan is not None and len(plan.roles) > 1 else ()
            own = {0, CONSUMERS, SENDERS, *range(1, groups + 1), *turns}
            free = [n for n in (number, *range(BARRIERS)) if n not in own and n not in self.named.values()]
            if not free:
                text = (
                    f"T.sync_threads at barrier {number}: {len(self.named)} are named, and this kernel "
                    "uses the others itself"
                )
                raise TileValueError(text, loc=self.here, expected=f"at most {BARRIERS - len(own)} of them")
            self.named[number] = free[0]
        name = "ts::named_barrier" if waits else "ts::named_barrier_arrive"
        made = tirx.call_extern(
            "void", name, tirx.IntImm("int32", self.named[number]), tirx.IntImm("int32", count)
        )
        why = {"comment": f"T.{'sync_threads' if waits else 'named_barrier_arrive'}({number}, {count})"}
        return tirx.Evaluate(ir.Call(made.op, list(made.args), attrs=why, ret_ty=made.ty))

    # -- statements
    # -----------------------------------------------------------------------------------------------
    def _s_SeqStmt(self, s: Any) -> Any:
        out, seq = [], list(s.seq)
        if not any(_role(x) for x in seq):
            return super()._s_SeqStmt(s)
        for k, x in enumerate(seq):
            if _role(x) == "producer":
                *beside, consumer = (s for s in seq[k:] if _role(s))
                out.append(self._roles(beside, consumer))
            elif not _role(x):
                out.append(self.stmt(x))
        return sequence(out)

    def _roles(self, beside: list[Any], consumer: Any) -> Any:
        """Roles side by side: behind the block's own threads, which consume, the producer's warp, of which
        one thread does all, and the warps that copy to other ranks; a whole warpgroup where registers move
        from it to the consumers."""
        producer, *senders = beside
        plan = self.program.schedule
        if apart := "warpgroup_code" not in self.program.without and has_warpgroup_code(
            self.program, consumer.body, self.threads
        ):
            self.program.fired.append("warpgroup_code")
        readers = self.readers(consumer.body) if apart else {}
        self.barriers = {r.number: Barriers(self, r, readers.get(r.number)) for r in plan.rings}
        for b, number in plan.ring_of.items():
            shape = [int(e) for e in b.ty.shape[1:]]
            self.barriers[number].bytes.append(prod(shape) * bits_of(b) // 8)
        head = initialised(self)
        if self.dependent:  # setting up is what may go on before the launch in front has ended
            self.head += [*head, *_awaits_launches()]
            head = []
        moved = None if not senders and self._several_fit() else REGISTERS[self.threads]
        if moved is not None and (
            self.instrument or _looks_up(producer.body)
        ):  # what logs has registers, too
            moved = LOOKING.get(self.threads, moved)
        count = self.program.launch.comm_warps * WARP if senders else 0
        if moved is not None and senders:
            moved = SENDING[self.threads]
            if _looks_up(senders[0].body):
                moved = FINDING.get(self.threads, moved)
        self.extra = self.target.wave + count if moved is None else WARPGROUP
        self.role = "producer"
        fills = sequence([self.stmt(producer.body), *ended(self, producer.body)])
        send: Any = None
        if senders:
            self.role = COMMUNICATOR
            first = self.communicator_thread()
            zero, behind = tirx.IntImm("int32", 0), tirx.IntImm("int32", count)
            there = first >= zero if self.extra == WARP + count else all_of([first >= zero, first < behind])
            send = tirx.IfThenElse(there, self.stmt(senders[0].body), None)
        fill: Any = tirx.IfThenElse(tirx.EQ(self.tid, self.threads), fills, send)
        self.role = "consumer"
        rest: Any = self.apart(consumer.body) if apart else self.stmt(consumer.body)
        self.role = None
        if self.mine is not None:
            rest = sequence(
                [tirx.Bind(self.mine, tirx.call_extern("int32", "ts::uniform", self.tid // WARPGROUP)), rest]
            )
        if moved is not None:
            fill = sequence([call(f"fewer_registers<{moved[1]}>"), fill])
            rest = sequence([call(f"more_registers<{moved[0]}>"), rest])
        return sequence([*head, tirx.IfThenElse(self.tid >= self.threads, fill, rest)])

    def _several_fit(self) -> bool:
        """Whether a multiprocessor has room for a second block, with what the tiles of one are: two hide each
        other's waits, and registers that move to the consumers would keep the second one out."""
        alone = prod(self.program.launch.cluster) == 1
        return alone and self._held() <= FEW and 2 * (self.program.arena_bytes + BLOCK_SHARED) <= SM_SHARED

    def _held(self) -> int:
        """How many registers of a thread the tiles are, one under several names once."""
        views, tiles = bases(self.program.func.body), self.program.layouts.items()
        bits = sum(f.slots * bits_of(b) for b, f in tiles if isinstance(f, Fragment) and b not in views)
        return -(-bits // 32)

    def nest(self, nest: Nest) -> Any:
        """A nest as thread IR; one that fills a ring is copies that the threads do not wait for."""
        if (element := element_of(nest.node)) is None:
            return super().nest(nest)
        made = lower_elements(nest, element, self)
        self.did(nest.accesses, made)
        return made

    def _s_For(self, s: Any) -> Any:
        self.wrote = True  # in the round before, for all that is known
        self.loads_ahead |= self.executor.threads == 1 and _loads_ahead(s.body, self.written)
        return super()._s_For(s)

    def _s_IfThenElse(self, s: Any) -> Any:
        commits = issued_early(s, self.program)
        self.closed.update(commits)
        return sequence([super()._s_IfThenElse(s), *(call("cp_async_commit", span=c.span) for c in commits)])

    def _for(self, s: Any) -> Any:
        return lower_by_lanes(s, self) if by_lanes(s, self) else super()._for(s)

    def tensor_map(self, wanted: TensorMap, name: str) -> Any:
        """The parameter that is this tensor map."""
        for var, made in self.maps:
            if made == wanted:
                return var
        var = tirx.Var(name, "handle")
        self.maps.append((var, wanted))
        return var

    # -- the whole
    # ------------------------------------------------------------------------------------------------
    def around(self) -> tuple[list[Any], list[Any]]:
        begins, ends = super().around()
        if self.maps and "prefetched_maps" not in self.program.without:
            # The first copy by a map waits for the map itself: that of a result at the end of the kernel.
            fetched = [call("prefetch_map", var) for var, _ in self.maps]
            self.head.insert(
                0, tirx.IfThenElse(tirx.EQ(self.tid, tirx.IntImm("int32", 0)), sequence(fetched), None)
            )
            self.program.fired.append("prefetched_maps")
        return begins + (_awaits_launches() if self.dependent and not self.barriers else []), ends

    def own_params(self, body: Any) -> list[tuple[Any, Source]]:
        """Tensors that only engines touch go by their maps."""
        maps = [(var, Source("map", k)) for k, (var, _) in enumerate(self.maps)]
        return [p for p in self.params if not maps or not is_buffer_var(p[0]) or mentions(body, p[0])] + maps

    def run(self) -> ThreadKernel:
        return replace(
            super().run(),
            cluster=self.program.launch.cluster if self.target.clusters else (1, 1, 1),
            maps=tuple(m for _, m in self.maps),
            dependent=self.dependent,
            min_blocks=self._min_blocks(),
        )

    def _min_blocks(self) -> int | None:
        """How many blocks of a multiprocessor ptxas leaves registers for; None where nobody asks."""
        asked = self.program.hints.get("min_blocks")
        if not (self.extra or self.one_block or self._holds_packets()):
            return 1 if asked is None and self.loads_ahead else asked
        if asked not in (None, 1):
            said = (
                f"T.annotate_min_blocks_per_sm({asked}) decides nothing: {self.program.name} shares out the"
            )
            log.say("info", f"{said} registers of one block", once=True)
        return self._beside_producers() if self.threads == WARPGROUP and not self.one_block else 1

    def _beside_producers(self) -> int:
        """How many blocks of one warpgroup, with its producer's warp, a multiprocessor has room for if each
        thread has `SPARE` registers besides its tiles. Where ptxas keeps in registers what it could compute
        anew, the producer's warp would cost a block."""
        if self.extra != WARP or prod(self.program.launch.cluster) > 1 or self._held() < MANY:
            return 1
        threads, each = self.threads + self.extra, self._held() + SPARE
        by_shared = SM_SHARED // (self.program.arena_bytes + BLOCK_SHARED)
        return max(1, min(by_shared, REGISTER_FILE // (threads * (-(-each // 8) * 8))))

    def _holds_packets(self) -> bool:
        """Whether threads have packets of dense boxes in registers. Without a bound ptxas (13.0) spills some
        of them for one more block of a multiprocessor, where all blocks are resident anyway."""
        return any(isinstance(p := self.places[box], Box) and p.dense for box in self.boxes)


def _awaits_launches() -> list[Any]:
    """Every thread that touches memory must have awaited the launches in front for itself; then the launch
    behind may begin, which does the same with this one, so nothing that it touches is earlier than this
    launch's end."""
    return [call("await_launches"), call("admit_launches")]


def _looks_up(part: Any) -> bool:
    """Whether a loop of the producer's part, or the communicator's, reads a tensor for what it copies."""
    found: list[Any] = []
    structural_walk(
        part, (tirx.For, lambda f: structural_walk(f, (ir.TensorLoad, lambda e: found.append(e.source))))
    )
    return any(b.ty.storage_scope == "global" for b in found)


def _loads_ahead(body: Any, written: Any) -> bool:
    """Whether a thread's own loop loads of tensors what it computes with. There is no ring, so the bytes in
    flight are of the rounds whose loads ptxas issues together. Without a bound on blocks ptxas (13.0) keeps
    to the registers that leave room for most of them, and issues few of the loads of the rounds that it
    unrolls in front of the first product. It may issue all of them: nobody writes such a tensor during the
    launch, so its loads are of ``const __restrict__`` memory, and nothing in the loop waits for others."""
    found: list[Any] = []
    structural_walk(body, (ir.TensorLoad, lambda e: found.append(e.source)))
    read = any(b.ty.storage_scope == "global" and b not in written for b in found)
    return read and not any(op.waits for _, op in operations(body))


def _role(s: Any) -> str:
    return str(s.node.value) if isinstance(s, tirx.AttrStmt) and s.attr_key == "ts.role" else ""
