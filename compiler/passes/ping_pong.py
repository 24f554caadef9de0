"""The warpgroups of a block take turns at the tensor cores (`ops.wgmma.PingPongBarrier`, by named barriers)
in loops whose rounds are products and then what is computed from them: side by side, all would wait for the
tensor cores and then all compute, while the tensor cores have nothing to do. In loops that
passes/overlap_products.py has arranged they fall into turns by themselves: forced ones were tried there on an
H200 and cost 1 to 3 % (attention forward; head dimension 256 without a mask gained 1.5 %).
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.nests import nest_of
from tilescale.compiler.ir.operations import REGISTRY
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.rewrite import around
from tilescale.compiler.ir.scales import WARPGROUP
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ops.wgmma import ping_pong_barrier
from tilescale.compiler.passes.overlap_products import DONE, is_open
from tilescale.compiler.passes.products import flat, has_producer, is_product, operands_of, touched
from tilescale.compiler.passes.roles import calls
from tilescale.compiler.passes.skip_masks import always
from tilescale.compiler.tvm_compat import structural_map, tirx


def ping_pong(program: TileProgram) -> TileProgram:
    """The program with turns in the loops that gain by them."""
    if not has_producer(program) or program.launch.threads < 2 * WARPGROUP:
        return program
    turned: list[Any] = []

    def visit(loop: Any) -> Any:
        made = (_in_turns(plain := always(loop)) or _a_round_each(plain)) if is_open(loop) else None
        turned.extend([] if made is None else [made])
        return loop if made is None else made

    body = structural_map(program.func.body, (tirx.For, visit))
    return program.with_body(structural_map(body, (tirx.AttrStmt, _first_and_last))) if turned else program


def _in_turns(loop: Any) -> Any | None:
    """A loop of products, each followed by what is computed from it, the warpgroups one after the other; None
    where it has another form, or where all threads may have to synchronize in a round, since who has the turn
    would wait for who waits for it."""
    stmts, span = flat(loop.body), loop.span
    if any(not b.ty.storage_scope.startswith("local") for s in stmts for b in touched(s)[1]):
        return None
    at = [k for k, s in enumerate(stmts) if is_product(s)]
    if not at or len([c for c in calls(loop.body) if REGISTRY[c.op.name].multiplies]) != len(at):
        return None
    firsts = [k for k in at if k - 1 not in at]
    body = stmts[: at[0]]
    for k, after in zip(firsts, [*firsts[1:], len(stmts)], strict=True):
        end = next(n for n in range(k, after + 1) if n not in at)
        results = {s.value.args[2].source for s in stmts[k:end]}
        if not any(nest_of(s) is not None and results & set().union(*touched(s)) for s in stmts[end:after]):
            return None
        body += [
            ping_pong_barrier("take", span),
            *stmts[k:end],
            ping_pong_barrier("pass", span),
            *stmts[end:after],
        ]
    return _with_body(loop, body)


def _a_round_each(loop: Any) -> Any | None:
    """A loop in whose rounds several products run beside what is computed from the one in front: a warpgroup
    has the turn from the first of them until the last one alone is under way. So the tensor cores begin with
    the next warpgroup's while this one computes what is left of the round, in which it has nothing for them.
    None where the loop has another form, as in `_in_turns`, and where threads compute what the products read,
    which keeps the warpgroups apart anyway: W4A16 of 128 rows took 15 % longer in turns."""
    stmts, span = flat(loop.body), loop.span
    if any(not b.ty.storage_scope.startswith("local") for s in stmts for b in touched(s)[1]):
        return None
    at = [k for k, s in enumerate(stmts) if is_product(s)]
    if len(at) < 2 or len([c for c in calls(loop.body) if REGISTRY[c.op.name].multiplies]) != len(at):
        return None
    if any(r.source.ty.storage_scope.startswith("local") for k in at for r in operands_of(stmts[k].value)):
        return None
    results = [stmts[k].value.args[2].source for k in at]
    end = next(
        (k for k in range(at[-1] + 1, len(stmts)) if results[-1] in set().union(*touched(stmts[k]))),
        len(stmts),
    )
    beside = [
        s
        for s in stmts[at[-1] + 1 : end]
        if nest_of(s) is not None and results[-2] in set().union(*touched(s))
    ]
    if not beside or results[-1] is results[-2]:
        return None
    body = [
        *stmts[: at[0]],
        ping_pong_barrier("take", span),
        *stmts[at[0] : end],
        ping_pong_barrier("pass", span),
        *stmts[end:],
    ]
    return _with_body(loop, body)


def _with_body(loop: Any, stmts: list[Any]) -> Any:
    return around(loop, sequence(stmts), {DONE: 1})


def _first_and_last(role: Any) -> Any:
    """The consumers with the turn given to the first warpgroup in front of it, and taken back behind it. Not
    around each loop: the last warpgroup, done with one loop, would give the first one the turn for the next
    before that one has taken back the turn of this."""
    if role.attr_key != "ts.role" or str(role.node.value) != "consumer":
        return role
    body = sequence([ping_pong_barrier("first", role.span), role.body, ping_pong_barrier("last", role.span)])
    return tirx.AttrStmt(role.node, role.attr_key, role.value, body, role.span)
