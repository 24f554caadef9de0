"""What a launch that begins early asks for: the boxes of its rings' first rounds, into the L2 cache, in front of the wait for the launches
before it (``T.Kernel(…, pdl=True)``).

A block whose multiprocessor is free has nothing to do until the last block of the launch in front has ended, and memory has less to do. So
the producer's thread asks for what its first copies will fetch (PTX ISA 9.0, "cp.async.bulk.prefetch.tensor"), as many rounds as a ring has
stages; behind the wait they come from the L2 cache.

That is no access of the program. A prefetch writes nothing and gives nobody a value: it says which lines the L2 cache should hold, and all
that multiprocessors write to this memory goes through that cache, so a line that the launch in front still writes is held as it is written
(PTX ISA 9.0, "prefetch, prefetchu": a level of the hierarchy is named, no result; CUDA C++ Programming Guide, "Global Memory": it is L1
caches that can be stale). What the copies behind the wait read is what was written before it. Addresses are those of the copies: boxes of a
tensor map, clipped to the tensor. They must be known without reading memory, since what stands there may still change: a copy whose place,
or whether it is made, depends on a tensor or a variable is not asked for.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cuda.tma import ask
from tilescale.compiler.frontend.builder import sequence
from tilescale.compiler.ops import base
from tilescale.compiler.passes.products import flat
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx


def asked(cx: Any, producer: Any, rings: list[Any]) -> list[Any]:
    """The statements by which the producer's thread asks for the first rounds of its rings; none where nothing is known so early."""
    found = _First(cx, rings).all(producer)
    return [] if found is None else [tirx.IfThenElse(tirx.EQ(cx.tid, tirx.IntImm("int32", cx.threads)), found, None)]


class _First:
    """The way to the producer's first copies: into every loop once, into one that fills a ring as often as that has stages."""

    def __init__(self, cx: Any, rings: list[Any]):
        self.cx = cx
        #: stages of the rings that nothing is asked for yet
        self.depths = {r.number: r.depth for r in rings}
        #: numbers that are known in front of the wait: of the block, among the arguments, and what follows from these
        self.known = {v for v, made in cx.variables.items() if any(made is axis for axis in cx.block)}
        self.known |= {*cx.program.symbols.values(), *(p.var for p in cx.program.params if not hasattr(p.spec, "shape"))}

    def all(self, s: Any) -> Any:
        """What a statement asks for, as thread IR; None where that is nothing."""
        made = [m for m in map(self.one, flat(s)) if m is not None]
        return sequence(made) if any(not isinstance(m, tirx.Bind) for m in made) else None

    def one(self, s: Any) -> Any:
        if isinstance(s, tirx.Bind) and self.early(s.value):
            self.known.add(s.var)
            return self.cx.stmt(s)
        if isinstance(s, tirx.AttrStmt):
            return self.all(s.body)
        if isinstance(s, tirx.IfThenElse) and self.early(s.condition):
            return self.under(s.condition, s.then_case)
        if isinstance(s, tirx.For) and self.early(s.min) and self.early(s.extent):
            return self.rounds(s)
        return ask(self.cx, s.value) if _fills(s) and all(self.early(r.min) for r in s.value.args[0].region) else None

    def under(self, condition: Any, s: Any) -> Any:
        test = self.cx.scalar(condition)
        with self.cx.given(test):
            made = self.all(s)
        return None if made is None else tirx.IfThenElse(test, made, None)

    def rounds(self, s: Any) -> Any:
        """Rounds of a loop, by a variable that counts from zero."""
        rings = {int(x.value.attrs["ring"]) for x in flat(s.body) if _fills(x)}
        most = min((self.depths[r] for r in rings if r in self.depths), default=0 if rings else 1)
        if not most:
            return None
        dt = str(s.loop_var.ty)
        count = self.cx.analyzer.simplify(tirx.min(self.cx.scalar(s.extent), tirx.IntImm(dt, most)))
        var = tirx.Var(s.loop_var.name, dt)
        self.cx.bind_range(var, count)
        self.cx.variables[s.loop_var] = self.cx.scalar(s.min) + var
        self.known.add(s.loop_var)
        with self.cx.given(var < count):
            made = self.all(s.body)
        for r in rings:
            self.depths.pop(r, None)
        return None if made is None else tirx.For(var, tirx.IntImm(dt, 0), count, tirx.ForKind.SERIAL, made, annotations={"unroll": 1})

    def early(self, value: Any) -> bool:
        """Whether a number is known without reading memory or variables."""
        found: list[bool] = []
        structural_walk(value, (ir.Var, lambda v: found.append(v in self.known)))
        structural_walk(value, (ir.TensorLoad, lambda _: found.append(False)))
        structural_walk(value, (ir.Call, lambda c: found.append(base.find(c) is None)))
        return all(found)


def _fills(s: Any) -> bool:
    call = s.value if isinstance(s, tirx.Evaluate) else None
    return isinstance(call, ir.Call) and call.op.name == "ts.copy" and "ring" in call.attrs
