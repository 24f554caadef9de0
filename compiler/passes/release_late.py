"""Loops that only multiply await their products one round late, so that the tensor cores never run dry: the
stage of round n - 1 is released behind the products of round n, and the last round's behind the loop.

A stage is held one round longer, so the producer has one less to fill meanwhile: blocks of one warpgroup gain
up to 1.17 with four stages and more and lose as much with three or two (docs/history/mechanisms.md)."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.operations import name_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ir.tokens import late_release
from tilescale.compiler.ops.wgmma import await_products, wgmma
from tilescale.compiler.passes.products import flat, has_producer, is_product, operands_of
from tilescale.compiler.tvm_compat import structural_map, tirx

#: the fewest stages of a ring of which one can be spared, where two rounds are under way at once
STAGES = 4
#: the same where one is: its stage is released when the next round's has come, so of two stages one would be
#: filled at a time (T.gemm_sp of 128 × 256 × 128, two stages: 735 of 999 TFLOP/s, docs/history/gemm.md)
STAGES_OF_ONE = 3


def release_late(program: TileProgram) -> TileProgram:
    """The program, whose loops of that form are so."""
    if not has_producer(program):
        return program
    return program.with_body(
        structural_map(program.func.body, (tirx.For, lambda f: _late(f, program.schedule)))
    )


def _one_at_a_time(products: list[Any]) -> bool:
    """Whether those of a round are awaited before the next round's begin: a stage is held until then."""
    return any(c.op.name == "ts.wgmma_sp" for c in products)


def _late_round(begin: Any, products: list[Any], release: Any, count: Any) -> list[Any]:
    """A round of products and the release of the round before's stage, whose products are complete by then:
    behind this round's, as many groups may be under way as it has. A product of a sparse operand reads its
    places from registers that the round before's read until they are complete: where there is one, those are
    awaited in front."""
    if _one_at_a_time(products):
        return [
            begin,
            await_products([], products[0].span, straight=True),
            *map(tirx.Evaluate, products),
            release,
            count,
        ]
    *others, last = products
    return [begin, *map(tirx.Evaluate, others), tirx.Evaluate(wgmma(last, len(products))), release, count]


def _late(loop: Any, plan: Any) -> Any:
    """A loop that only multiplies, its products awaited one round late; any other as it is, and one whose
    ring has too few stages.

    Round n's products are behind those of n - 1 in the tensor cores' queue, so ``wait_group`` with as many
    groups as a round has leaves only its own in flight: those of round n - 1 are complete, nobody reads their
    stage any more, and it is released."""
    # An unused name leaves a number behind.
    stmts = [
        s for s in flat(loop.body) if not (isinstance(s, tirx.Evaluate) and isinstance(s.value, tirx.IntImm))
    ]
    kinds = [name_of(s) for s in stmts[:-1]]
    if (
        len(kinds) < 3
        or kinds[0] != "ring_wait"
        or kinds[-1] != "ring_release"
        or not all(is_product(s) for s in stmts[1:-2])
    ):
        return loop
    products = [s.value for s in stmts[1:-2]]
    if not isinstance(stmts[-1], tirx.BufferStore) or plan.rings[int(stmts[-2].value.attrs["ring"])].depth < (
        STAGES_OF_ONE if _one_at_a_time(products) else STAGES
    ):
        return loop
    first, number, span = stmts[-2].value, int(stmts[-2].value.attrs["ring"]), loop.span
    zero = tirx.IntImm(str(loop.loop_var.ty), 0)
    body = _late_round(
        stmts[0],
        products,
        late_release(number, first.args[0], loop.loop_var > zero, stmts[-2].span),
        stmts[-1],
    )
    notes = {**dict(loop.annotations), "ts.late": 1}
    made = tirx.For(
        loop.loop_var, loop.min, loop.extent, loop.kind, sequence(body), annotations=notes, span=span
    )
    tiles = list({c.args[2].source: c.args[2] for c in products}.values())
    operands = list(
        {r.source: r for c in products for r in operands_of(c) if r.source not in plan.ring_of}.values()
    )
    some = loop.extent > tirx.IntImm(str(loop.extent.ty), 0)
    run = sequence(
        [
            made,
            await_products(tiles, span, operands),
            late_release(number, first.args[0], some, stmts[-2].span),
        ]
    )
    # Products stay in flight from round to round only where no way leads around the loop and joins that of
    # the last round before its products are awaited (ptxas awaits each of them then, C7515): a loop that may
    # have no round is passed by whole, with its wait.
    return run if isinstance(loop.extent, tirx.IntImm) else tirx.IfThenElse(some, run, None, span)
