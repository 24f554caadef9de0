"""Copies to and from ranks whose memory this GPU cannot address, in thread IR (include/ts/nvshmem.cuh).

A tile that is put goes into registered scratch by the copy's own nest, and from there by rows to the peer;
one that is pulled comes by rows into scratch, where the nest reads it. Each executor has a part of the
scratch, and uses it again when the library has completed what was under way there: behind a quiet (puts) or
at once (gets, which block), and a barrier of its threads. Executors of different scales have different parts,
since a warp's copy and one of its block need not be apart in time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

from tilescale.compiler.gpu.build import all_of
from tilescale.compiler.gpu.build import call as do
from tilescale.compiler.gpu.places import Global, widened
from tilescale.compiler.gpu.state import State
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout.loops import bits_of, element_dtype
from tilescale.compiler.tvm_compat import ir, structural_map, tirx

#: bytes to which a block's part of the scratch is rounded up: what vectors of a warp are aligned to
GRAIN = 256


@dataclass
class Staged(Global):
    """A part of a tensor, dense in scratch, indexed as the tensor is. ``low``: where the part begins."""

    low: tuple[Any, ...] = ()

    def flat(self, at: list[Any]) -> Any:
        return super().flat(
            [widened(i, self.index) - widened(b, self.index) for i, b in zip(at, self.low, strict=True)]
        )


class Unaddressed(State):
    """Mixed into the lowering."""

    def scratch(self, like: Any, room: int, site: Any) -> Any:
        """The address of ``room`` bytes of this executor's. How much a block has, and where the executors of
        a scale have theirs, is known when all of the kernel is lowered: `with_scratch` puts it in."""
        scale = self.executor.name
        _, step, most = self.staged.setdefault(
            scale, (tirx.Var("scratch_first", "int32"), tirx.Var("scratch_step", "int32"), 0)
        )
        first, step, _ = self.staged[scale] = (*self.staged[scale][:2], max(most, room))
        at: Any = first
        if scale != "block":
            at = first + self.tid // self.executor.threads * step
        return tirx.call_extern(
            "handle", "ts::scratch", self.of_launch("team"), like, self.scratch_bytes, at, site
        )

    def with_scratch(self, body: Any) -> Any:
        """The kernel's body with the places of all executors' scratch."""
        if not self.staged:
            return body
        known, total = {}, 0
        for scale, (first, step, room) in self.staged.items():
            known[first], known[step] = total, room
            total += room * (1 if scale == "block" else self.threads // self.executor.within(scale).threads)
        known[self.scratch_bytes] = total
        return structural_map(body, (ir.Var, lambda v: tirx.IntImm("int32", known[v]) if v in known else v))

    def staged_copy(self, call: Any, nest: Any, site: Any, look: list[Any], there: Any) -> Any:
        """A nest one side of which is another rank's memory, at ``there``: a far address.

        Raises:
            TileSyntaxError: of a part whose extents are not constants, or whose rows are not contiguous.
        """
        puts = str(call.attrs["side"]) == "dst"
        region = call.args[1 if puts else 0]
        own = self.tensor_of(region.source)
        extents = [constant(self.scalar(r.extent)) for r in region.region]
        if any(e is None for e in extents) or constant(own.strides[-1]) != 1:
            raise self.refused(
                f"the copy of a part of {own.name} to or from a rank, with TILESCALE_REMOTE=nvshmem,",
                "constant extents and contiguous rows",
            )
        sizes = [int(e) for e in extents if e is not None]
        dtype = element_dtype(region.source)
        each = max(1, bits_of(region.source) // 8)
        low = tuple(self.scalar(r.min) for r in region.region)
        strides = tuple(tirx.IntImm("int32", prod(sizes[k + 1 :])) for k in range(len(sizes)))
        room = -(-prod(sizes) * each // GRAIN) * GRAIN
        scratch, far = (
            tirx.decl_buffer(shape, dtype, f"{own.name}_{name}", scope="global.symm", layout=None)
            for name, shape in (("staged", (prod(sizes),)), ("there", own.buf.ty.shape))
        )
        at = self.scratch(tirx.buffer_data(own.buf), room, site)
        pointer = ir.PointerType(ir.PrimType(dtype), "global.symm")
        decls = [
            tirx.DeclBuffer(scratch, call.span, data=tirx.reinterpret(pointer, at)),
            tirx.DeclBuffer(far, call.span, data=tirx.reinterpret(pointer, there)),
        ]
        near = Staged(scratch, own.shape, strides, own.index, own.name, low)
        rows = self._rows(own, replace(own, buf=far), near, sizes, each, puts)
        self.remote = (region.source, puts, near)
        body = self.nest(nest)
        self.remote = None
        alone = self.executor.threads == 1
        meet = sequence([] if alone else [tirx.Evaluate(self.barrier_call(self.executor.name))])
        quiet = tirx.Evaluate(tirx.call_extern("void", "ts::nvshmem_quiet"))
        # A put: the tile lies in scratch (a fence by each thread makes it visible to the network), all have
        # met; rows go; each thread completes its own; all have met: then the scratch may be used again, and
        # whoever releases in this block releases completed puts.
        steps = [body, tirx.Evaluate(tirx.call_extern("void", "ts::nvshmem_staged")), meet, rows, quiet, meet]
        if not puts:
            steps = [rows, meet, body, meet]
        return sequence([*look, *decls, *steps])

    def _rows(self, own: Global, far: Global, near: Staged, sizes: list[int], each: int, puts: bool) -> Any:
        """A call a row, without what lies outside of the tensor."""
        index = own.index
        counters = [tirx.Var(f"row{k}" if len(sizes) > 2 else "row", "int32") for k in range(len(sizes) - 1)]
        for var, size in zip(counters, sizes, strict=False):
            self.bind_range(var, size)
        at = [widened(b, index) + widened(v, index) for b, v in zip(near.low, counters, strict=False)]
        tests = [
            t
            for i, size in zip(at, own.shape, strict=False)
            for t in (i >= 0, i < widened(size, index))
            if not self.proven(t)
        ]
        low, end = widened(near.low[-1], index), widened(own.shape[-1], index)
        zero = widened(0, index)
        begin, count = low, widened(sizes[-1], index)
        if not self.proven(low >= zero):
            begin = tirx.max(low, zero)
            count = count - (begin - low)
        if not self.proven(low + widened(sizes[-1], index) <= end):
            count = tirx.min(count, end - begin)
        number: Any = tirx.IntImm("int32", 0)
        for var, size in zip(counters, sizes, strict=False):
            number = number * size + var
        place = [*at, begin]
        sides = [
            tirx.address_of(tirx.BufferLoad(side.buf, [self.analyzer.simplify(side.flat(place))]))
            for side in ((far, near) if puts else (near, far))
        ]
        length = widened(self.analyzer.simplify(count), "int64") * tirx.IntImm("int64", each)
        who = [number, self.thread(), tirx.IntImm("int32", self.executor.threads)]
        body = do("nvshmem_put" if puts else "nvshmem_get", *sides, length, *who)
        if tests:
            body = tirx.IfThenElse(all_of(tests), body, None)
        for var, size in reversed(list(zip(counters, sizes, strict=False))):
            body = tirx.For(
                var,
                tirx.IntImm("int32", 0),
                tirx.IntImm("int32", size),
                tirx.ForKind.SERIAL,
                body,
                annotations={"unroll": 1},
            )
        return body
