"""What an instrumented kernel logs: when each wait, copy between ranks, signal and loop of products began and
ended (include/ts/trace.cuh).

A span is logged by one thread: the one that acts where one acts for all, else the first of those that run the
statement. What others of them still do behind its part lies outside of the span.

Copies between ranks that a part of a block makes in a loop are joined: one span for each loop, statement and
rank, from when the first of them is made to the loop's end, with the bytes of all: a warp's row takes less
time than to log it. Those of single threads in a loop are not logged: a block has hundreds of them, of a few
bytes each (a dispatch of 2,048 tokens took ten times as long on an H200).

Of loops only those are logged that products, or copies into rings, stand in directly: one span a loop, with
the time for which its rounds waited for stages. A span a round would be a branch among products in flight,
each of which ptxas would then await at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilescale.compiler.gpu.build import at, call
from tilescale.compiler.gpu.places import widened
from tilescale.compiler.gpu.state import State
from tilescale.compiler.ir.operations import find
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.passes.roles import calls
from tilescale.compiler.tvm_compat import structural_walk, tirx

#: executors whose copies in a loop are joined, and ranks of which bytes are (include/ts/trace.cuh)
PARTS, JOINED = ("warpgroup", "warp"), 64
#: copies that fill rings
_LOADS = ("ts.tma_load", "ts.cp_async", "ts.cp_async_element")
#: what may stand between a loop and the wait for its last products
_AWAITED = "ts.await_products"


class Logs(State):
    """Mixed into the lowering."""

    # -- what the launcher and the thread know
    # ---------------------------------------------------------------------------------------------------
    def _own(self, name: str, words: int) -> Any:
        """Registers of the thread's own, zero at the kernel's head."""
        if name not in self.logged:
            self.logged[name] = tirx.decl_buffer((words,), "int64", name, scope="local", layout=None)
        return self.logged[name]

    def log_registers(self) -> list[Any]:
        """At the head of the kernel nothing is logged."""
        out: list[Any] = []
        for buffer in self.logged.values():
            out.append(tirx.AllocBuffer(buffer))
            for k in range(int(buffer.ty.shape[0])):
                out.append(tirx.BufferStore(buffer, tirx.IntImm("int64", 0), [tirx.IntImm("int32", k)]))
        return out

    def site_here(self, kind: str, name: str) -> Any:
        """The number of a site at the statement that is being lowered."""
        file, line = (self.here.file, self.here.line) if self.here else ("", 0)
        entry = f"{kind}|{name}|{file}|{line}|"
        if entry not in self.sites:
            self.sites.append(entry)
        return tirx.IntImm("int32", self.sites.index(entry))

    def recorder(self) -> Any:
        """Whether this thread logs what several run; None where one runs it."""
        return self.holder()

    # -- spans
    # ---------------------------------------------------------------------------------------------------
    def began(self) -> tuple[Any, Any]:
        """The variable that holds when a span began, and the statement that reads the clock."""
        var = tirx.Var("began", "int64")
        return var, tirx.Bind(var, tirx.call_extern("int64", "ts::log_time"))

    def logs(self, began: Any, site: Any, peer: Any = None, amount: Any = None) -> Any:
        """The statement that logs a span, by whoever runs it."""
        peer = tirx.IntImm("int32", -1) if peer is None else widened(self.scalar(peer), "int32")
        amount = tirx.IntImm("int64", 0) if amount is None else widened(amount, "int64")
        own = at(self._own("log_slots", 2), tirx.IntImm("int32", 0))
        return call("log_span", self.of_launch("log"), own, began, site, self.tid, peer, amount)

    def span(self, body: Any, site: Any, *, peer: Any = None, amount: Any = None, alone: bool = False) -> Any:
        """``body`` between two looks at the clock, in instrumented kernels. alone: one thread runs it."""
        if not self.instrument or self.loop is not None:
            return body
        if self.by_threads and self.sites[int(site)].startswith("copy|"):
            return body
        if self.joins is not None and peer is not None and not alone:
            return sequence([body, self._recorded(self._joining(site, peer, amount))])
        began, look = self.began()
        done = self.logs(began, site, peer, amount)
        return sequence([look, body, done if alone else self._recorded(done)])

    def _recorded(self, done: Any) -> Any:
        """A statement that one of several threads runs."""
        test = self.recorder()
        return done if test is None else tirx.IfThenElse(test, done, None)

    # -- copies in loops
    # ---------------------------------------------------------------------------------------------------
    def _joining(self, site: Any, peer: Any, amount: Any) -> Any:
        """The statement that adds a copy to those of its loop."""
        assert self.joins is not None
        number = int(site)
        self.joins.add(number)
        self._own(f"joined{number}", JOINED + 1)
        far = widened(self.scalar(peer), "int32")
        return call("log_joins", *self._log_of(number), site, self.tid, far, widened(amount, "int64"))

    def _log_of(self, number: int) -> tuple[Any, ...]:
        """The launch's log, the thread's own slots in it, and a statement's joined copies."""
        zero = tirx.IntImm("int32", 0)
        return (
            self.of_launch("log"),
            at(self._own("log_slots", 2), zero),
            at(self.logged[f"joined{number}"], zero),
        )

    def joined(self, lower: Callable[[], Any]) -> Any:
        """A loop as ``lower`` makes it, whose copies between ranks are joined where they are those of a part
        of a block, and left out where they are those of single threads; loops inside are joined with it."""
        if self.instrument and self.executor.name == "thread" and not self.by_threads:
            self.by_threads = True
            try:
                return lower()
            finally:
                self.by_threads = False
        if not self.instrument or self.joins is not None or self.executor.name not in PARTS:
            return lower()
        self.joins = set()
        made, sites = lower(), self.joins
        self.joins = None
        ends = [
            call("log_joined", *self._log_of(n), tirx.IntImm("int32", n), self.tid) for n in sorted(sites)
        ]
        return sequence([made, self._recorded(sequence(ends))]) if ends else made

    def crossing(self, region: Any, shape: Any, nbytes: int) -> Any:
        """The bytes of a region that lie inside its tensor, of ``nbytes`` an element: what is outside never
        crosses."""
        out: Any = tirx.IntImm("int64", nbytes)
        zero = tirx.IntImm("int64", 0)
        for r, size in zip(region.region, shape, strict=True):
            low, extent = (widened(self.scalar(x), "int64") for x in (r.min, r.extent))
            end = widened(size, "int64")
            if not (self.proven(low >= zero) and self.proven(low + extent <= end)):
                extent = tirx.max(tirx.min(low + extent, end) - tirx.max(low, zero), zero)
            out = out * extent
        return self.analyzer.simplify(out)

    def whole(self, body: list[Any]) -> list[Any]:
        """A block of the launch from its first statement to its last."""
        if not self.instrument:
            return body
        self.here = self.program.loc
        began, look = self.began()
        first = tirx.EQ(self.tid, tirx.IntImm("int32", 0))
        done = self.logs(began, self.site_here("kernel", self.program.name))
        return [*self.log_registers(), look, *body, tirx.IfThenElse(first, done, None)]

    # -- loops
    # ---------------------------------------------------------------------------------------------------
    def stalling(self, wait: Any) -> Any:
        """A wait for a stage of a ring, whose time is added to that of the loop around it."""
        if not self.instrument:
            return wait
        began, look = self.began()
        stalled, zero = self._own("stalled", 1), tirx.IntImm("int32", 0)
        spent = tirx.call_extern("int64", "ts::log_time") - began
        return sequence(
            [look, wait, tirx.BufferStore(stalled, tirx.BufferLoad(stalled, [zero]) + spent, [zero])]
        )

    def statements(self, seq: list[Any]) -> list[Any]:
        """Statements one behind another; of instrumented kernels loops of products in spans, which last until
        the products are awaited."""
        if not self.instrument or self.in_span:
            return [self.stmt(s) for s in seq]
        out, k = [], 0
        while k < len(seq):
            logged = self.looped(seq[k]) if isinstance(seq[k], tirx.For) else None
            if logged is None:
                out.append(self.stmt(seq[k]))
                k += 1
                continue
            end = k + 1
            for j in range(k + 1, len(seq)):
                if isinstance(seq[j], tirx.For) and self.looped(seq[j]) is not None:
                    break
                if _name(seq[j]) == _AWAITED:
                    end = j + 1
            out.append(self._loop_span(seq[k:end], logged))
            k = end
        return out

    def _loop_span(self, stmts: list[Any], logged: tuple[str, Any]) -> Any:
        kind, product = logged
        site = self.site(kind, product.args[2 if kind == "gemm" else 1].source.name, product)
        stalled, zero = self._own("stalled", 1), tirx.IntImm("int32", 0)
        self.in_span = True
        body = [self.stmt(s) for s in stmts]
        self.in_span = False
        reset = tirx.BufferStore(stalled, tirx.IntImm("int64", 0), [zero])
        return self.span(sequence([reset, *body]), site, amount=tirx.BufferLoad(stalled, [zero]))

    def looped(self, s: Any) -> tuple[str, Any] | None:
        """What a loop is logged as, and the first operation that makes it that: of the loops around a product
        the innermost that is not unrolled."""
        wanted = _products if self.role != "producer" else _loads
        if any(wanted(f) for f in _rolled(s.body)):
            return None
        found = wanted(s)
        return (("load" if self.role == "producer" else "gemm"), found[0]) if found else None


def _name(s: Any) -> str:
    return str(s.value.op.name) if isinstance(s, tirx.Evaluate) and find(s.value) is not None else ""


def _products(s: Any) -> list[Any]:
    return [c for c in calls(s) if (op := find(c)) is not None and op.multiplies]


def _loads(s: Any) -> list[Any]:
    return [c for c in calls(s) if c.op.name in _LOADS]


def _rolled(s: Any) -> list[Any]:
    """The loops inside a statement that are not unrolled."""
    found: list[Any] = []
    structural_walk(s, (tirx.For, found.append))
    return [f for f in found if str((f.annotations or {}).get("ts.kind", "")) != "unroll"]
