"""What TVM's analyses fail on is hidden from them, behind calls that they know nothing of.

LowerIntrin and the code generator bind every variable, and LowerIntrin takes every condition for granted in
its branches. The interval analysis that they ask stumbles

- over the product of a float and a converted integer with known bounds: it asks for the integer constant 0 of
  a float type;
- over a signed integer taken for an unsigned one: it makes an unsigned constant of a negative bound;
- over a condition that holds a Let (inside a branch it cannot be bound in front): the Let is bound anew for
  each branch, and refused where its value had become simpler.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cpu.expr import lit
from tilescale.compiler.tvm_compat import (
    IF_THEN_ELSE,
    REINTERPRET,
    hidden,
    ir,
    register_op,
    structural_mutate,
    structural_walk,
    tirx,
)

CHOSEN = "ts.chosen"
register_op(CHOSEN, pure=True)


def _odd(cast: Any) -> bool:
    """Whether a conversion is one that the interval analysis fails on."""
    src, dst = str(cast.value.ty), str(cast.ty)
    if _called(cast.value, REINTERPRET) or isinstance(cast.value, tirx.IntImm):
        return False
    return src.startswith(("int", "uint")) and (
        dst.startswith("float") or (src.startswith("int") and dst.startswith("uint"))
    )


def _called(e: Any, name: str) -> bool:
    return isinstance(e, ir.Call) and getattr(e.op, "name", "") == name


def _holds_let(e: Any) -> bool:
    found: list[Any] = []
    structural_walk(e, (tirx.Let, found.append))
    return bool(found)


def hide_from_analysis() -> Any:
    """The pass that hides them: the integer of a conversion behind a reinterpretation as itself, which is no
    instruction and stays; a condition with a Let behind an operation of its own, until ``show_again``."""

    def call(node: Any, mutator: Any) -> Any:
        made = mutator.default_mutate(node)
        if _called(made, IF_THEN_ELSE) and _holds_let(made.args[0]):
            return ir.Call(CHOSEN, list(made.args), ret_ty=made.ty)
        return made

    def cast(node: Any, mutator: Any) -> Any:
        made = mutator.default_mutate(node)
        if not _odd(made):
            return made
        return tirx.Cast(made.ty, hidden(made.value))

    def run(func: Any, _module: Any, _context: Any) -> Any:
        found: list[Any] = []
        structural_walk(func.body, (tirx.Let, found.append))
        structural_walk(func.body, (tirx.Cast, lambda c: found.append(c) if _odd(c) else None))
        return (
            func.with_body(structural_mutate(func.body, [(ir.Call, call), (tirx.Cast, cast)]))
            if found
            else func
        )

    return tirx.transform.prim_func_pass(run, opt_level=0, name="tilescale.hide_from_analysis")


def _zero(e: Any) -> bool:
    """Whether an expression is the constant 0 read as another type: the code generator takes that for a null
    pointer, and fails."""
    return (
        _called(e, REINTERPRET)
        and isinstance(e.args[0], tirx.IntImm)
        and int(e.args[0].value) == 0
        and str(e.ty) in _NUMBERS
    )


_NUMBERS = (
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
)


def show_again() -> Any:
    """The pass that shows the conditions again, and of hidden integers those that turned out to be 0."""

    def call(node: Any, mutator: Any) -> Any:
        made = mutator.default_mutate(node)
        if _zero(made):
            return lit(0, str(made.ty))
        return tirx.if_then_else(*made.args) if _called(made, CHOSEN) else made

    def cast(node: Any, mutator: Any) -> Any:
        return (
            lit(0, str(node.ty))
            if _zero(node.value) and str(node.ty) in _NUMBERS
            else mutator.default_mutate(node)
        )

    def run(func: Any, _module: Any, _context: Any) -> Any:
        found: list[Any] = []
        structural_walk(
            func.body, (ir.Call, lambda c: found.append(c) if _called(c, CHOSEN) or _zero(c) else None)
        )
        return (
            func.with_body(structural_mutate(func.body, [(ir.Call, call), (tirx.Cast, cast)]))
            if found
            else func
        )

    return tirx.transform.prim_func_pass(run, opt_level=0, name="tilescale.show_again")
