"""What reaches other blocks and other ranks, in thread IR: peers' addresses, signals, waits and barriers
(include/ts/team.cuh).

One thread of an executor signals or waits for all of its threads, which synchronize in front of it (signal)
or behind it (wait): those barriers are statements of their own (passes/insert_barriers.py). Symmetric memory
is read and written by plain loads and stores, never by TMA or through the non-coherent cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tilescale.compiler.gpu.build import all_of, cast
from tilescale.compiler.gpu.build import call as do
from tilescale.compiler.gpu.kernel import Source
from tilescale.compiler.gpu.places import Box, Global, Place, Registers, widened
from tilescale.compiler.gpu.unaddressed import Unaddressed
from tilescale.compiler.ir.operations import VOID
from tilescale.compiler.ir.signals import COMPARISONS
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout.loops import element_dtype
from tilescale.compiler.ops.team import team_of_call
from tilescale.compiler.tvm_compat import ir, same_expression, structural_walk, tirx
from tilescale.errors import InternalError
from tilescale.language.dtypes import BITS
from tilescale.packets import words

#: more than any launch has
MOST_RANKS = 1 << 16
#: scales whose signals and waits are seen by this GPU alone; those of others by the whole system
_SCOPES = {"grid": "false", "device": "true"}


class Ranks(Unaddressed):
    """Mixed into the lowering."""

    # -- what the launcher says
    # ---------------------------------------------------------------------------------------
    def of_launch(self, kind: str) -> Any:
        """The parameter that holds the team, the own rank in it, or how many ranks it has."""
        for var, source in self.ranked:
            if source.kind == kind:
                return var
        name, dtype = {
            "team": ("team", "handle"),
            "log": ("events", "handle"),
            "rank": ("my_rank", "int32"),
            "world": ("ranks", "int32"),
        }[kind]
        var = tirx.Var(name, dtype)
        self.ranked.append((var, Source(kind)))
        if dtype == "int32":
            self.analyzer.bind(var, ir.Range(int(kind == "world"), MOST_RANKS + int(kind == "world")))
        return var

    def site(self, kind: str, name: str, node: Any, text: str = "") -> Any:
        """The number of an entry of the table that tells the runtime what and where an operation is."""
        loc = loc_of(getattr(node, "span", None))
        file, line = (loc.file, loc.line) if loc else ("", 0)
        entry = f"{kind}|{name}|{file}|{line}|{text.replace('|', '¦')}"
        if entry not in self.sites:
            self.sites.append(entry)
        return tirx.IntImm("int32", self.sites.index(entry))

    # -- copies
    # -------------------------------------------------------------------------------------------------------
    def place_of(self, buffer: Any, writes: bool) -> Place:
        """Where an access goes: the own memory, or in a remote copy the other rank's."""
        if self.remote is not None and buffer.same_as(self.remote[0]) and writes == self.remote[1]:
            return self.remote[2]
        return self.places[buffer]

    def remote_copy(self, call: Any, nest: Any) -> Any:
        """A nest one side of which is another rank's memory."""
        if str(call.attrs["reach"]) == "cta_cluster":
            return self.cluster_copy(call, nest)
        side = str(call.attrs["side"])
        param = call.args[1 if side == "dst" else 0].source
        own = self.tensor_of(param)
        tile = tirx.decl_buffer(
            own.buf.ty.shape, str(own.buf.ty.dtype), f"{own.name}_there", scope="global.symm", layout=None
        )
        site = self.site("copy", own.name, call, "pull" if side == "src" else "")
        look = self.look(call.args[2], site)
        there = self.peer_address(tirx.buffer_data(own.buf), call.args[2], site)
        if self.target.remote and "op" not in call.attrs:  # sums are atomic updates of far addresses
            return self.staged_copy(call, nest, site, look, there)
        data = tirx.reinterpret(ir.PointerType(ir.PrimType(str(own.buf.ty.dtype)), "global.symm"), there)
        self.remote = (param, side == "dst", Global(tile, own.shape, own.strides, own.index, own.name))
        body = self.nest(nest)
        self.remote = None
        if self.instrument:
            region = call.args[1 if side == "dst" else 0]
            crosses = self.crossing(region, own.shape, BITS[str(own.buf.ty.dtype)] // 8)
            body = self.span(body, site, peer=call.args[2], amount=crosses)
        return sequence([*look, tirx.DeclBuffer(tile, call.span, data=data), body])

    def peer_address(self, address: Any, rank: Any, site: Any, alone: bool = False) -> Any:
        """The same place in another rank's memory. What stands behind a `look` at the rank's entry, or in a
        launch without entries, is arithmetic; a thread looks for itself (``ts::peer``) where it is ``alone``,
        in an expression or in what no other thread of an executor runs."""
        self.device = True
        looks = self.program.launch.flagged and (alone or not (self.by_lanes or self._looks_together()))
        name = "ts::peer" if looks else "ts::twin"
        return tirx.call_extern(
            "handle", name, self.of_launch("team"), address, widened(self.scalar(rank), "int32"), site
        )

    def look(self, rank: Any, site: Any) -> list[Any]:
        """What stands in front of an executor's access to a rank's memory: its threads look at the entries of
        this launch, together, until they have once seen all (include/ts/team.cuh argues why that is enough).
        ``rank``: None awaits all of them.

        The look is a barrier of the executor, which may stand there: all of its threads come to the access,
        or none (nests have their conditions inside), as for the barriers around signals and waits."""
        if not self.program.launch.flagged or self.by_lanes or not self._looks_together():
            return []
        self.device = True
        scale = self.executor.name
        asked = None if rank is None else widened(self.scalar(rank), "int32")
        if any((role, on) == (self.role, scale) and _same(r, asked) for role, on, r in self.looked):
            return []  # that rank's entry is known here: a put's signal follows its copy
        self.looked.append((self.role, scale, asked))
        if scale not in self.entered:
            name = "entered" if scale == "block" else f"entered_{scale}"
            self.entered[scale] = tirx.decl_buffer((1,), "int32", name, scope="local", layout=None)
        seen, zero = self.entered[scale], tirx.IntImm("int32", 0)
        who = [self.of_launch("team"), *([] if asked is None else [asked])]
        thread, number, threads = self.barrier_of(scale)
        meets = [thread, tirx.IntImm("int32", threads), number, site]
        looked = tirx.call_extern("int32", "ts::enter_all" if rank is None else "ts::enter", *who, *meets)
        unseen = tirx.EQ(tirx.BufferLoad(seen, [zero]), zero)
        looks: Any = tirx.BufferStore(seen, looked, [zero])
        if self.instrument:
            looks = self.span(looks, self.site_here("wait", "entry"))
        return [tirx.IfThenElse(unseen, looks, None)]

    @contextlib.contextmanager
    def behind_looks(self) -> Iterator[None]:
        """Around a statement, or a branch of one: what its looks saw is not known behind it, since they may
        not have been made."""
        known = list(self.looked)
        yield
        self.looked = known

    def _looks_together(self) -> bool:
        """Whether several threads run what is being lowered, and have a barrier of their own."""
        return self.executor.threads > 1 and self.role != "producer" and self.loop is None

    def entries(self) -> list[Any]:
        """At the head of the kernel nobody has looked."""
        zero = tirx.IntImm("int32", 0)
        return [
            s for b in self.entered.values() for s in (tirx.AllocBuffer(b), tirx.BufferStore(b, zero, [zero]))
        ]

    # -- signals
    # ------------------------------------------------------------------------------------------------------
    def signal(self, call: Any) -> Any:
        """``T.signal`` at the scale of the grid or of the ranks."""
        region, reach = call.args[0], str(call.attrs["reach"])
        site = self.site("signal", region.source.name, call, self.extents(region))
        buf, index, tests = self.counter(region, call)
        at = tirx.address_of(tirx.BufferLoad(buf, [index]))
        look: list[Any] = []
        if len(call.args) > 2:
            look = self.look(call.args[2], site)
            at = self.peer_address(at, call.args[2], site)
        done = do(
            f"signal_{call.attrs['op']}<{_SCOPES[reach]}>", at, self._long(call.args[1]), span=call.span
        )
        far = call.args[2] if len(call.args) > 2 else None
        done = self.span(done, site, peer=far, amount=index, alone=True)
        return sequence([*look, self._checked(done, tests, site)])

    def wait(self, call: Any) -> Any:
        """``T.wait`` there."""
        region, reach = call.args[0], str(call.attrs["reach"])
        site = self.site("wait", region.source.name, call, self.extents(region))
        buf, index, tests = self.counter(region, call)
        compare = tirx.IntImm("int32", COMPARISONS.index(str(call.attrs["cmp"])))
        where = (tirx.buffer_data(buf), widened(index, "int64"))
        value = self._long(call.args[1])
        done = do(
            f"wait<{_SCOPES[reach]}>", self.of_launch("team"), *where, value, compare, site, span=call.span
        )
        return self._checked(self.span(done, site, amount=index, alone=True), tests, site)

    def extents(self, region: Any) -> str:
        """In instrumented kernels a signal's extents, "?" for those that a call decides: by them the index of
        a counter is told from its place."""
        if not self.instrument:
            return ""
        return ", ".join(str(e) if isinstance(e, int) else "?" for e in self.tensor_of(region.source).shape)

    def test(self, call: Any) -> Any:
        """``T.test`` there, as a value."""
        region, reach = call.args[0], str(call.attrs["reach"])
        site = self.site("wait", region.source.name, call)
        buf, index, tests = self.counter(region, call)
        compare = tirx.IntImm("int32", COMPARISONS.index(str(call.attrs["cmp"])))
        inside = all_of(tests) if tests else tirx.IntImm("bool", 1)
        where = (
            tirx.buffer_data(buf),
            widened(index, "int64"),
            inside,
            self._long(call.args[1]),
            compare,
            site,
        )
        return tirx.call_extern("int32", f"ts::test<{_SCOPES[reach]}>", self.of_launch("team"), *where)

    # -- atomic updates
    # -----------------------------------------------------------------------------------------------
    def remote_atomic(self, call: Any) -> Any:
        """An update of a rank's memory at the scope of the system: a statement, or the value before it. The
        executor's threads synchronize in front of it and behind it (`TileOp.order`), so its release and
        acquire are those of all of them."""
        region, value, peer = call.args
        site = self.site("atomic", region.source.name, call)
        buf, index, tests, _ = self.access(region.source, [r.min for r in region.region], call, True)
        dtype = element_dtype(buf)
        operand = cast(self.scalar(value), dtype)
        asked = str(call.ty) != str(VOID)
        look = [] if asked else self.look(peer, site)
        at = self.peer_address(tirx.address_of(tirx.BufferLoad(buf, [index])), peer, site, alone=asked)
        done = tirx.call_extern(dtype, f"ts::system_{call.attrs['kind']}", at, operand)
        if asked:
            return done if not tests else tirx.if_then_else(all_of(tests), done, tirx.const(0, dtype))
        made = tirx.Evaluate(done, call.span)
        made = self.once(made if not tests else tirx.IfThenElse(all_of(tests), made, None))
        return sequence([*look, made])

    # -- packets
    # -----------------------------------------------------------------------------------------------------
    def packets(
        self,
        call: Any,
        nest: Any,
        region: Any,
        rank: Any = None,
        *,
        several: bool = False,
        empties: Any = None,
        shared: bool = False,
    ) -> Any:
        """A nest one side of which is a part of a box, in the memory of ``rank``: each thread stores, or
        awaits, its own packets. several: a thread awaits more than one, and looks at all of them in turn, so
        that its loads are under way together. empties: the nest that empties what has been taken, of a dense
        box; shared: threads hold copies, so that each has to have seen what one of them empties."""
        own = self.places[region.source]
        if not isinstance(own, Box):
            raise InternalError(f"{own.name} is no box", loc=self.here)
        site = self.site("packets", own.name, call)
        number = self.boxes.get(region.source)
        if number is None:
            number = self.boxes[region.source] = tirx.Var(f"{own.name}_launch", "int32")
        there, before = own.buf, []
        if rank is not None:
            there = tirx.decl_buffer(
                own.buf.ty.shape, "int64", f"{own.name}_there", scope="global.packets", layout=None
            )
            before += self.look(rank, site)
            at = self.peer_address(tirx.buffer_data(own.buf), rank, site)
            data = tirx.reinterpret(ir.PointerType(ir.PrimType("int64"), "global.packets"), at)
            before.append(tirx.DeclBuffer(there, call.span, data=data))
        late = tirx.decl_buffer((1,), "int32", "late", scope="local", layout=None) if several else None
        self.places[region.source] = replace(own, buf=there, number=number, site=site, late=late)
        tests = self._outside(region, own)
        with self.analyzer.constraint_scope(all_of(tests)) if tests else contextlib.nullcontext():
            body = self.nest(nest)
            if empties is not None:
                self.places[region.source] = replace(own, number=number, empties=True)
                behind = self.nest(empties)
        self.places[region.source] = own
        if late is not None:
            body = self._until_all(body, late, number, site)
        if empties is not None:
            met = [tirx.Evaluate(self.barrier_call("block"))] if shared else []
            body = sequence([body, *met, behind])
        if self.instrument:
            told = self.site("packets", own.name, call, "get" if rank is None else "put")
            crosses = 0 if rank is None else self.crossing(region, own.shape, 8 * words(own.dense))
            body = self.span(body, told, peer=rank, amount=crosses)
        if tests:
            failed = self.once(do("no_counter", self.of_launch("team"), site))
            body = tirx.IfThenElse(all_of(tests), body, failed)
        return sequence([*before, body])

    def _outside(self, region: Any, box: Box) -> list[Any]:
        """What must hold for a part of a box to lie inside, as far as it is not proven."""
        tests = []
        for r, size in zip(region.region, box.shape, strict=True):
            low = self.scalar(r.min)
            zero, end = tirx.IntImm(str(low.ty), 0), widened(size, str(low.ty))
            for test in (low >= zero, low + widened(self.scalar(r.extent), str(low.ty)) <= end):
                if not self.proven(test):
                    tests.append(test)
        return tests

    def packet_out(self, box: Box, word: Any, data: Any, s: Any) -> Any:
        at = tirx.address_of(tirx.BufferLoad(box.buf, [word]))
        if box.empties:
            return do("empty_dense", at, span=s.span)
        if box.dense:
            return do("put_dense", at, data, span=s.span)
        return do("put_packet", at, data, box.number, span=s.span)

    def two_packets(self, s: Any) -> Any:
        """The same, or a look, of two neighbours of a dense box: of a copy from or to neighbouring slots."""
        first, second = (
            self.access(buffer, indices, s, writes)
            for buffer, indices, writes in (
                (s.buffer, s.indices, True),
                (s.value.source, s.value.indices, False),
            )
        )
        out = isinstance(first[-1], Box)
        (_, word, _, box), (_, slot, _, held) = (first, second) if out else (second, first)
        assert isinstance(box, Box) and isinstance(held, Registers)
        at = tirx.address_of(tirx.BufferLoad(box.buf, [word]))
        if box.empties:
            return self.once(do("empty_two_dense", at, span=s.span))
        if out:
            both = [tirx.BufferLoad(held.buf, [slot + k]) for k in range(2)]
            return self.once(do("put_two_dense", at, *both, span=s.span))
        late, first = (
            tirx.address_of(tirx.BufferLoad(buf, [k]))
            for buf, k in ((box.late, tirx.IntImm("int32", 0)), (held.buf, slot))
        )
        return do("look_for_two_dense", at, late, first, span=s.span)

    def packet_in(self, box: Box, word: Any) -> Any:
        at = tirx.address_of(tirx.BufferLoad(box.buf, [word]))
        if box.late is not None:
            late = tirx.address_of(tirx.BufferLoad(box.late, [tirx.IntImm("int32", 0)]))
            if box.dense:
                return tirx.call_extern("int64", "ts::look_for_dense", at, late)
            return tirx.call_extern("int64", "ts::look_for_packet", at, box.number, late)
        return tirx.call_extern("int64", "ts::get_packet", self.of_launch("team"), at, box.number, box.site)

    def _until_all(self, look: Any, late: Any, number: Any, site: Any) -> Any:
        """``look`` again and again, until none is ``late``."""
        zero = tirx.IntImm("int32", 0)
        since = tirx.decl_buffer((2,), "int64", "since", scope="local", layout=None)
        begins = [
            tirx.AllocBuffer(late),
            tirx.AllocBuffer(since),
            tirx.BufferStore(late, tirx.IntImm("int32", 1), [zero]),
            tirx.BufferStore(since, tirx.IntImm("int64", 0), [zero]),
        ]
        words = [tirx.address_of(tirx.BufferLoad(b, [zero])) for b in (late, since)]
        again = tirx.call_extern("bool", "ts::await_packets", self.of_launch("team"), *words, number, site)
        return sequence([*begins, tirx.While(again, look)])

    def launches_of_boxes(self) -> tuple[list[Any], list[Any]]:
        """What a block does before and behind all else: its threads read the number of this launch, and when
        all of them have, one counts the block. The number changes with the last block."""
        numbers, counts = [], []
        for box, var in self.boxes.items():
            words = tirx.buffer_data(self.places[box].buf)
            numbers.append(tirx.Bind(var, tirx.call_extern("int32", "ts::launch_of_packets", words)))
            counts.append(do("count_packets", words))
        if counts:
            first = tirx.EQ(self.tid, tirx.IntImm("int32", 0))
            counts = [
                tirx.Evaluate(self.barrier_call("block")),
                tirx.IfThenElse(first, sequence(counts), None),
            ]
        return numbers, counts

    def ends_of_launch(self) -> tuple[list[Any], list[Any]]:
        """What the first block of a launch does before all else, and every block behind it: ranks tell each
        other of the launch's beginning and end, and counters are zero when the next one begins."""
        needed = self.device or any(_zeroed(p) for p in self.program.params)
        if not needed or self.program.launch.exchanges:
            return [], []
        team = self.of_launch("team")
        return [do("begin_launch", team, self.tid)], [do("end_launch", team, self.tid)]

    def counter(self, region: Any, call: Any) -> tuple[Any, Any, list[Any]]:
        buf, flat, tests, _ = self.access(region.source, [r.min for r in region.region], call, True)
        return buf, flat, tests

    def _checked(self, done: Any, tests: list[Any], site: Any) -> Any:
        if tests:
            done = tirx.IfThenElse(all_of(tests), done, do("no_counter", self.of_launch("team"), site))
        return self.once(done)

    def _long(self, value: Any) -> Any:
        return widened(self.scalar(value), "int64")

    # -- barriers
    # -----------------------------------------------------------------------------------------------------
    def barrier(self, call: Any) -> Any:
        """``T.barrier`` of all blocks of this rank, or of all ranks."""
        reach = str(call.attrs["reach"])
        self.device = self.device or reach == "device"
        executors = tirx.IntImm("int32", self.executor.count)
        site = self.site("barrier", reach, call)
        if (among := self._among(call)) is not None:
            met = do("barrier_among", self.of_launch("team"), executors, site, among, span=call.span)
        else:
            met = do(f"barrier<{_SCOPES[reach]}>", self.of_launch("team"), executors, site, span=call.span)
        return self.once(self.span(met, site, alone=True))

    def team_sync(self, call: Any) -> Any:
        """The same block of every rank."""
        if self.executor.name != "block":
            raise self.refused(
                f"a collective of ranks inside T.Scale({self.executor.name!r})", "one barrier a block"
            )
        self.device = True
        site = self.site("collective", "", call)
        if (among := self._among(call)) is not None:
            met = do("team_sync_among", self.of_launch("team"), site, among, span=call.span)
            return self.once(self.span(met, site, alone=True))
        lane = self.block_thread()
        meet = do("team_sync", self.of_launch("team"), lane, site, span=call.span)
        first = lane < tirx.IntImm("int32", self.target.wave)
        return sequence([*self.look(None, site), tirx.IfThenElse(first, self.span(meet, site), None)])

    def _among(self, call: Any) -> Any:
        """The members of the team inside the kernel that synchronizes in ``call``; None where it is
        everyone."""
        among, _ = team_of_call(call)
        if among is None:
            return None
        # a list's count is of no use there: ranks behind it are -1
        terms = among.operands() if among.form == "range" else among.operands()[1:]
        return tirx.call_extern(
            "handle", f"ts::{among.form}_of_ranks", *(widened(self.scalar(t), "int32") for t in terms)
        )


def _same(seen: Any, asked: Any) -> bool:
    """Whether a look at one rank is one at the other: the same expression of names, which keep their
    values."""
    if seen is None or asked is None:
        return seen is None
    loads: list[Any] = []
    structural_walk(asked, (ir.TensorLoad, loads.append))
    return not loads and same_expression(seen, asked)


def _zeroed(p: Any) -> bool:
    """Whether a parameter is a T.Signal whose counters are zero when a launch begins."""
    return getattr(p.spec, "kind", "") == "signal" and not p.spec.keep
