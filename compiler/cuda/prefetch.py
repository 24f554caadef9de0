"""What the next round of a producer's loop will fetch, asked into the L2 cache while this one is fetched.

A ring of one stage has its next copy issued only when the stage is free; its data would come from memory then. The producer asks for
each box of the next round behind the copies of this one (PTX ISA 9.0, "cp.async.bulk.prefetch.tensor"): a hint, which writes nothing that
the program sees and needs no order. Deeper rings do without: their copies are issued early enough.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.frontend.builder import sequence
from tilescale.compiler.passes.products import flat
from tilescale.compiler.passes.roles import inside, renewed
from tilescale.compiler.tvm_compat import ir, structural_map, tirx


def asked_ahead(producer: Any, rings: list[Any]) -> Any:
    """A producer's body whose pipelined loops ask for the next round of what goes through rings of one stage."""
    shallow = {r.number for r in rings if r.depth == 1 and not r.single}

    def ask(loop: Any) -> Any:
        if str((loop.annotations or {}).get("ts.kind", "")) != "pipelined":
            return loop
        stmts = flat(loop.body)
        hints = [h for s in stmts if (h := _hint(s, shallow)) is not None]
        if not any(isinstance(h, tirx.Evaluate) for h in hints) or any(inside(s) for s in stmts):
            return loop
        following = loop.loop_var + tirx.IntImm(str(loop.loop_var.ty), 1)
        ahead = tirx.IfThenElse(following < loop.extent, renewed(sequence(hints), {loop.loop_var: following}), None, loop.span)
        notes = dict(loop.annotations)
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, sequence([*stmts, ahead]), annotations=notes, span=loop.span)

    return structural_map(producer, (tirx.For, ask)) if shallow else producer


def _hint(s: Any, rings: set[int]) -> Any | None:
    """What a statement is in the round that is asked for: a name, a copy that only asks; None for all else."""
    if isinstance(s, tirx.Bind):
        return s
    if not isinstance(s, tirx.Evaluate) or not isinstance(s.value, ir.Call) or s.value.op.name != "ts.copy":
        return None
    call = s.value
    if int(call.attrs.get("ring", -1)) not in rings:
        return None
    attrs = {**dict(call.attrs), "prefetch": 1}
    return tirx.Evaluate(ir.Call(call.op, list(call.args), attrs=attrs, ret_ty=call.ty, span=call.span), s.span)
