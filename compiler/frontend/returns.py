"""A ``return`` of the kernel under a device ``if``: the block leaves out the rest of the kernel.

No block ends early. The rest becomes the other side of the ``if``, or is guarded by a flag where the
``return`` stands deeper, so that what a target puts at a kernel's end (an exit flag, the end of a cluster
whose blocks reach into each other) is still done by all blocks. What is left out must not be a barrier with
other blocks, which would wait for ever. That is refused, unless all blocks decide alike.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.ir import source
from tilescale.compiler.ir.statements import sequence, statements
from tilescale.compiler.tvm_compat import ir, register_op, structural_walk, tirx
from tilescale.errors import TileSyntaxError

RETURN = "ts.return"
ZERO, ONE = tirx.IntImm("int32", 0), tirx.IntImm("int32", 1)

#: how far a value is the same: nowhere beyond the block, in all blocks of a rank, on all ranks
ALIKE = ("", "grid", "device")

register_op(RETURN)


def mark(b: bld.Builder) -> None:
    """Emits a return, which `settled` takes away again."""
    span = b.span()
    b.emit(tirx.Evaluate(ir.Call(RETURN, [], ret_ty=ir.PrimType("void"), span=span), span))


def settled(body: Any, block_vars: list[Any]) -> Any:
    """A launch's body without returns.

    Raises:
        TileSyntaxError: blocks that return would leave others waiting at a barrier.
    """
    if not _returns(body):
        return body
    _Meetings(block_vars).visit(body, [])
    flag = tirx.decl_buffer((1,), "int32", "returned", scope="local.var", data_alignment=64, layout=None)
    made = _Guard(flag)
    body = made.guarded(body, in_loop=False, told=False)
    if not made.used:
        return body
    return sequence([tirx.AllocBuffer(flag, {}), tirx.BufferStore(flag, ZERO, [ZERO]), body])


def _is_return(s: Any) -> bool:
    return (
        isinstance(s, tirx.Evaluate)
        and isinstance(s.value, ir.Call)
        and getattr(s.value.op, "name", "") == RETURN
    )


def _returns(s: Any) -> list[Any]:
    found: list[Any] = []
    structural_walk(s, (tirx.Evaluate, lambda e: found.append(e) if _is_return(e) else None))
    return found


class _Guard:
    """Takes returns out of statements. ``told``: something outside asks the flag, so that a return has to set
    it."""

    def __init__(self, flag: Any):
        self.flag, self.used = flag, False

    def guarded(self, s: Any, *, in_loop: bool, told: bool) -> Any:
        if _is_return(s):
            done = [tirx.BufferStore(self.flag, ONE, [ZERO], s.span)] if told else []
            self.used = self.used or told
            return sequence([*done, tirx.Break(s.span)] if in_loop else done)
        if not _returns(s):
            return s
        if isinstance(s, tirx.SeqStmt):
            return self.sequence(list(s.seq), in_loop, told)
        if isinstance(s, tirx.IfThenElse):
            sides = [
                None if x is None else self.guarded(x, in_loop=in_loop, told=told)
                for x in (s.then_case, s.else_case)
            ]
            return tirx.IfThenElse(s.condition, *sides, s.span)
        if isinstance(s, tirx.AttrStmt):
            return tirx.AttrStmt(
                s.node, s.attr_key, s.value, self.guarded(s.body, in_loop=in_loop, told=told), s.span
            )
        # A loop: a return breaks it, and what is around it asks the flag.
        inner = self.guarded(s.body, in_loop=True, told=told or in_loop)
        if isinstance(s, tirx.While):
            loop: Any = tirx.While(s.condition, inner, s.span)
        else:
            loop = tirx.For(
                s.loop_var, s.min, s.extent, s.kind, inner, annotations=dict(s.annotations), span=s.span
            )
        return (
            sequence([loop, tirx.IfThenElse(self.asked(ONE), tirx.Break(s.span), None)]) if in_loop else loop
        )

    def sequence(self, stmts: list[Any], in_loop: bool, told: bool) -> Any:
        at = next(k for k, s in enumerate(stmts) if _returns(s))
        first, rest = stmts[at], stmts[at + 1 :]
        if _is_return(first):  # nothing comes to what stands behind it in the same body
            rest = []
        if in_loop or not rest:  # what a Break leaves out is structured_exits' matter
            done = [*stmts[:at], self.guarded(first, in_loop=in_loop, told=told)]
            return sequence(
                [*done, self.guarded(sequence(rest), in_loop=in_loop, told=told)] if rest else done
            )
        if isinstance(first, tirx.IfThenElse) and (either := self.either(first, rest, told)) is not None:
            return sequence([*stmts[:at], either])
        inner = self.guarded(first, in_loop=False, told=True)
        remaining = self.guarded(sequence(rest), in_loop=False, told=told)
        return sequence([*stmts[:at], inner, tirx.IfThenElse(self.asked(ZERO), remaining, None)])

    def either(self, s: Any, rest: list[Any], told: bool) -> Any:
        """An ``if`` one of whose sides ends in a return, with the rest on the other side; None where it is
        not so simple."""
        sides = [s.then_case, s.else_case]
        for leaving, other in ((0, 1), (1, 0)):
            if (
                sides[leaving] is None
                or not _is_return(statements(sides[leaving])[-1])
                or len(_returns(sides[leaving])) > 1
            ):
                continue
            if sides[other] is not None and _returns(sides[other]):
                continue
            alone = len(statements(sides[leaving])) == 1 and not told
            here = [] if sides[other] is None else statements(sides[other])
            sides[leaving] = self.guarded(sides[leaving], in_loop=False, told=told)
            sides[other] = self.guarded(sequence([*here, *rest]), in_loop=False, told=told)
            if alone:
                return tirx.IfThenElse(
                    tirx.Not(s.condition) if leaving == 0 else s.condition, sides[other], None, s.span
                )
            return tirx.IfThenElse(s.condition, *sides, s.span)
        return None

    def asked(self, value: Any) -> Any:
        self.used = True
        return tirx.EQ(tirx.BufferLoad(self.flag, [ZERO]), value)


class _Meetings:
    """Refuses a return that other blocks would wait for: behind it, or in a loop around it, stands a barrier
    of blocks, and the conditions under which it stands may hold in some blocks and not in others."""

    def __init__(self, block_vars: list[Any]):
        #: name → how far its value is the same; numbers and extents are the launch's
        self.alike: dict[Any, str] = dict.fromkeys(block_vars, "")
        #: the returns so far, each with how far the conditions around it are the same
        self.pending: list[tuple[Any, str]] = []

    def visit(self, s: Any, conditions: list[str]) -> None:
        if isinstance(s, tirx.SeqStmt):
            for x in s.seq:
                self.visit(x, conditions)
        elif isinstance(s, tirx.Bind):
            self.alike[s.var] = self.scale_of(s.value)
        elif isinstance(s, tirx.IfThenElse):
            inner = [*conditions, self.scale_of(s.condition)]
            self.visit(s.then_case, inner)
            if s.else_case is not None:
                self.visit(s.else_case, inner)
        elif isinstance(s, (tirx.For, tirx.While)):
            if isinstance(s, tirx.For):
                self.alike[s.loop_var] = min((self.scale_of(e) for e in (s.min, s.extent)), key=ALIKE.index)
            inner = [
                *conditions,
                *([self.scale_of(s.condition)] if isinstance(s, tirx.While) else [self.scale_of(s.extent)]),
            ]
            self.visit(s.body, inner)
            if _returns(s.body):  # the next round comes behind the return, too
                self.check_barriers(s.body)
        elif isinstance(s, tirx.AttrStmt):
            self.visit(s.body, conditions)
        elif _is_return(s):
            self.pending.append((s, min(conditions, key=ALIKE.index, default="device")))
        else:
            self.check_barriers(s)

    def scale_of(self, e: Any) -> str:
        found = ["device"]
        structural_walk(e, (ir.Var, lambda v: found.append(self.alike.get(v, "device"))))
        structural_walk(e, (ir.TensorLoad, lambda load: found.append("")))
        structural_walk(e, (ir.Call, lambda c: found.append(self._of_call(c))))
        return min(found, key=ALIKE.index)

    @staticmethod
    def _of_call(call: Any) -> str:
        name = getattr(call.op, "name", "")
        if name == "ts.scale_index":
            return "grid" if str(call.args[0].value) == "device" else ""
        return (
            "" if name.startswith("ts.") and not name.startswith(("ts.math.", "ts.scale_count")) else "device"
        )

    def check_barriers(self, s: Any) -> None:
        from tilescale.compiler.ir.operations import find

        calls: list[Any] = []
        structural_walk(s, (ir.Call, calls.append))
        for call in calls:
            op = find(call)
            reach = op.synchronizes(call) if op is not None else ""
            left = [
                at
                for at, alike in self.pending
                if reach and ALIKE.index(alike) < ALIKE.index(reach if reach == "device" else "grid")
            ]
            if left:
                there = source.loc_of(call.span)
                raise TileSyntaxError(
                    f"blocks that return here never come to line {there.line if there else '?'}, where all "
                    f"blocks of the {reach} synchronize",
                    loc=source.loc_of(left[0].span),
                    expected="a condition that is the same in all of them, of the kernel's numbers and "
                    "extents alone",
                    hint="an `if` around what a block leaves out, and the barrier behind it",
                )
