"""Products of tiles that ``T.tma_copy`` or ``T.ptx_cp_async`` fills. TMA lays tiles as wgmma reads them, so
whole warpgroups multiply them by wgmma, complete where they stand. Otherwise threads would read by ldmatrix
what TMA overwrites next, and would owe it a proxy fence in front of the arrival that gives the stage back
(PTX ISA 9.0, "Proxies"). What wgmma cannot do stays with the threads, which the report says, with the fence.
Where threads write an operand in T.Scale, who multiplies makes the proxy fence behind the author's barrier.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.advice import note, reason
from tilescale.compiler.ir.multiples import bound_in, multiple, spelt_out
from tilescale.compiler.ir.nests import nest_of
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import effects_of, name_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.scales import WARPGROUP, WIDTHS, Executor
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ir.walks import walk
from tilescale.compiler.layout import tensor_cores
from tilescale.compiler.layout.loops import bits_of, in_registers
from tilescale.compiler.layout.products import extents, swizzled, wgmma_fragments
from tilescale.compiler.ops.wgmma import FREE, wgmma
from tilescale.compiler.passes.roles import calls
from tilescale.compiler.passes.stage_operands import is_whole
from tilescale.compiler.tvm_compat import ir, structural_map, sym, tirx

FENCE = "T.fence_proxy_async() in front of the arrival that gives the tile back to TMA"


def expert_products(program: TileProgram) -> TileProgram:
    """The scheduled program with those products left to wgmma, and those that the author awaits
    (``wg_wait=-1``), for sm_90a."""
    if not program.target.group_products:
        return program

    apart = _written_apart(program)

    def fenced(c: Any, made: Any) -> Any:
        """Who wrote the operands has arrived at the author's barrier, and made no proxy fence before that."""
        if str(c.attrs["executor"]) != "warpgroup" or not any(r.source in apart for r in c.args[:2]):
            return made
        where = {k: c.attrs[k] for k in ("executor", "reach")}
        fence = ir.Call("ts.fence_proxy_async", [], attrs=where, ret_ty=c.ty, span=made.span)
        return sequence([tirx.Evaluate(fence, made.span), made])

    def free(s: Any) -> Any:
        c = s.value
        if not isinstance(c, ir.Call) or not _is_plain(c) or "wg_wait" not in c.attrs:
            return s
        return fenced(c, tirx.Evaluate(wgmma(c, FREE), s.span))

    program = program.with_body(structural_map(program.func.body, (tirx.Evaluate, free)))
    every = calls(program.func.body)
    filled = {c.args[1].source for c in every if c.op.name == "ts.tma_copy" and len(c.args) > 2}
    copied = {c.args[0].source for c in every if c.op.name == "ts.thread_copy"}
    mine = [
        c
        for c in calls(program.func.body)
        if _is_plain(c) and any(r.source in filled | copied for r in c.args[:2])
    ]
    if not mine:
        return program
    names = bound_in(program.func.body)
    reasons = {c: _unfit(c, program, names) for c in mine}
    kept = {c.args[2].source: why for c, why in reasons.items() if why is not None}
    # what else is added to an accumulator by threads decides its layout
    kept |= {
        c.args[2].source: "its accumulator is also another's"
        for c in calls(program.func.body)
        if _is_plain(c) and c not in reasons
    }
    for c in mine:
        if (why := kept.get(c.args[2].source)) is not None:
            loc = loc_of(c.span)
            place = f" (line {loc.line})" if loc else ""
            why = reasons[c] or why
            said = f"T.gemm{place} is not made by wgmma: {why}"
            if any(r.source in filled for r in c.args[:2]):
                said += f"; its threads read what TMA writes next: {FENCE}"
            program.notes.append(note(said, why, loc))

    def mark(s: Any) -> Any:
        c = s.value
        if not isinstance(c, ir.Call) or c not in reasons or c.args[2].source in kept:
            return s
        return fenced(c, tirx.Evaluate(wgmma(c, 0), s.span))

    return program.with_body(structural_map(program.func.body, (tirx.Evaluate, mark)))


def _written_apart(program: TileProgram) -> set[Any]:
    """Tiles of the block's that threads write in T.Scale below it, where others learn of it by the author's
    barriers."""
    found: set[Any] = set()
    for s, ex in walk(program.func.body, Executor("block", program.launch.threads)):
        if ex.name == "block":
            continue
        if isinstance(s, tirx.BufferStore):
            found.add(s.buffer)
        elif isinstance(s, tirx.Evaluate) and name_of(s) != "tma_copy":
            found.update(a.region.source for a in effects_of(s.value) if a.mode != "read")
        elif (nest := nest_of(s)) is not None:
            found.update(a.buffer for a in nest.accesses if a.mode != "read")
    return {b for b in found if b.ty.storage_scope == "shared"}


def _is_plain(call: Any) -> bool:
    return bool(call.op.name == "ts.gemm")


def _is_fragment(region: Any) -> bool:
    """Whether a region is all of a fragment of two axes."""
    var = region.source
    return bool(
        in_registers(var)
        and var.ty.storage_scope == "local.fragment"
        and is_whole(region)
        and len(var.ty.shape) == 2
    )


def _unfit(call: Any, program: TileProgram, names: dict[Any, Any]) -> str | None:
    """Why a product is none of wgmma's; None where it is."""

    a, b, c = call.args[:3]
    threads = WIDTHS.get(str(call.attrs["executor"]), program.launch.threads)
    if why := tensor_cores.no_wgmma(call):
        return why
    if threads % WARPGROUP:
        return reason(
            f"{threads} threads are no whole warpgroups",
            f"whole warpgroups ({-(-threads // WARPGROUP) * WARPGROUP} threads)",
        )
    if constant(call.args[3]) is None:
        return reason(
            "clear_accum is a condition",
            f"T.clear({c.source.name}) in front of the loop, and T.gemm without clear_accum",
        )
    if not _is_fragment(c):
        return "its accumulator is no whole fragment"
    if any(t in program.hints.get("layouts", {}) for t in (a.source, b.source, c.source)):
        return "T.annotate_layout says how its tiles lie"
    if in_registers(a.source):
        if call.attrs["trans_a"] or bits_of(a.source) not in (8, 16) or not _is_fragment(a):
            return f"{a.source.name} is no whole fragment of 8 or 16 bits that wgmma takes from registers"
        tiles = [(b, bool(call.attrs["trans_b"]))]
    else:
        tiles = [(a, not call.attrs["trans_a"]), (b, bool(call.attrs["trans_b"]))]
    for r, along in tiles:
        layout = swizzled(r, along)
        if layout is None:
            return f"{r.source.name} is no tile of shared memory that its matrix descriptors name"
        units = (8, layout.swizzle * 8 // layout.bits)  # as TMA's boxes and the swizzle's pattern begin
        ends = zip(r.region[-2:], units, strict=True)
        if not all(
            multiple(sym.Analyzer(), spelt_out(x, names), unit)
            for part, unit in ends
            for x in (part.min, part.extent)
        ):
            return f"its part of {r.source.name} is not known to begin and end with the swizzle's pattern"
    m, n, k = extents(call)
    cuts = wgmma_fragments(call, threads)
    if k % tensor_cores.depth(bits_of(a.source)) or m % 64 or not cuts or cuts[0][0].shape[0] != m:
        return f"wgmma has no {m} × {n} × {k} for {threads} threads"
    return None
