"""Let expressions become bindings in front of the statement that holds them, each evaluated once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilescale.compiler.tvm_compat import (
    IF_THEN_ELSE,
    ir,
    structural_map,
    structural_mutate,
    structural_walk,
    tirx,
)

#: A binding may stand on so many others before it goes by way of a slot: TVM's analyses grow with the power
#: of it, and three on one another may take half a second. In a vectorised loop there may be more: behind a
#: slot an index is no ramp of the lane any more, and its access is a gather.
CHAIN, CHAIN_OF_LANES = 1, 4


class _Binder:
    """Rewrites one statement: collects its bindings in evaluation order.

    An expression built by operators is a graph: `y = exp(x); z = y * y` holds the same Let twice. The first
    meeting binds it, later ones within the statement use the variable; in another statement it is bound anew,
    under a new variable.
    """

    def __init__(self, used: set[int]) -> None:
        self.used = used
        self.binds: list[Any] = []
        self.results: dict[int, Any] = {}
        self.results_of_branches: list[Any] = []  # keeps what they name by address

    def rewrite(self, value: Any) -> Any:
        return structural_mutate(value, [(tirx.Let, self.on_let), (ir.Call, self.on_call)])

    def on_let(self, node: Any, _mutator: Any) -> Any:
        key = hash(node)  # the address of the object, which `node` keeps alive
        if key not in self.results:
            var, body, value = node.var, node.body, self.rewrite(node.value)
            if hash(var) in self.used:
                fresh = tirx.Var(var.name, str(var.ty))
                body = structural_map(body, (tirx.Var, lambda v: fresh if v.same_as(var) else v))
                var = fresh
            self.used.add(hash(var))
            self.binds.append(tirx.Bind(var, value))
            self.results[key] = (node, self.rewrite(body))
        return self.results[key][1]

    def on_call(self, node: Any, mutator: Any) -> Any:
        """A choice whose branches hold Lets becomes a statement: they run only when taken (they may guard a
        load), and a Let that stays inside an expression is bound more than once by TVM's analyses, which
        refuse it where its value has become simpler."""
        if getattr(node.op, "name", "") != IF_THEN_ELSE:
            return mutator.default_mutate(node)
        if not _holds_let(node):
            return node
        key = hash(node)
        if key not in self.results:
            test, branches = self.rewrite(node.args[0]), []
            for value in node.args[1:]:
                inner = _Binder(self.used)
                inner.results = dict(self.results)
                made = inner.rewrite(value)
                branches.append((inner.binds, made))
                self.results_of_branches.append(inner.results)
            var = tirx.Var("t", str(node.ty))
            self.used.add(hash(var))
            self.binds.append(_Choice(var, test, branches[0], branches[1]))
            self.results[key] = (node, var)
        return self.results[key][1]


@dataclass
class _Choice:
    """``var`` is one of two values, each behind bindings of its own."""

    var: Any
    test: Any
    yes: tuple[list[Any], Any]
    no: tuple[list[Any], Any]


def _holds_let(e: Any) -> bool:
    found: list[Any] = []
    structural_walk(e, (tirx.Let, found.append))
    return bool(found)


class _Pass:
    """Walks a function's statements, knowing the vectorised loop around them."""

    def __init__(self) -> None:
        self.used: set[int] = set()
        self.lane: Any = None
        self.extent = 1
        self.slots: list[Any] = []
        self.depth: dict[int, int] = {}  # by the variable's address, which `kept` keeps from being used again
        self.kept: list[Any] = []

    def on_for(self, node: Any, mutator: Any) -> Any:
        if node.kind != tirx.ForKind.VECTORIZED or self.lane is not None:
            return mutator.default_mutate(node)
        self.lane, self.extent, self.slots = node.loop_var, int(node.extent.value), []
        new = mutator.default_mutate(node)
        slots, self.lane, self.extent, self.slots = self.slots, None, 1, []
        return tirx.SeqStmt([*slots, new]) if slots else new

    def on_statement(self, stmt: Any, _mutator: Any) -> Any:
        binder = _Binder(self.used)
        value = binder.rewrite(stmt.value)
        indices = [binder.rewrite(i) for i in stmt.indices] if isinstance(stmt, tirx.BufferStore) else []
        if not binder.binds:
            return self.chained(stmt) if isinstance(stmt, tirx.Bind) else stmt
        steps = [part for bind in binder.binds for part in self.held(bind)]
        if isinstance(stmt, tirx.BufferStore):
            steps.append(tirx.BufferStore(stmt.buffer, value, indices, stmt.span))
        elif isinstance(stmt, tirx.Bind):
            steps += self.held(tirx.Bind(stmt.var, value, stmt.span))
        else:
            steps.append(tirx.Evaluate(value, stmt.span))
        if self.lane is None:
            steps = [*self.slots, *steps]
            self.slots = []
        return tirx.SeqStmt(steps)

    def chained(self, bind: Any) -> Any:
        """A binding of the author's: by way of a slot where it stands on too many others (see `held`)."""
        depth = 0

        def look(var: Any) -> None:
            nonlocal depth
            depth = max(depth, self.depth.get(hash(var), 0))

        structural_walk(bind.value, (ir.Var, look))
        if (
            depth < (CHAIN if self.lane is None else CHAIN_OF_LANES)
            or str(bind.var.ty) == "bool"
            or not isinstance(bind.var.ty, ir.PrimType)
        ):  # an address comes from a call
            self.depth[hash(bind.var)] = depth + 1
            self.kept.append(bind.var)
            return bind
        steps = self.held(bind)
        if self.lane is None:
            steps = [*self.slots, *steps]
            self.slots = []
        return tirx.SeqStmt(steps)

    def held(self, bind: Any) -> list[Any]:
        """The binding by way of a local slot, which LLVM turns into a register again.

        TVM's passes and code generator substitute the value of every binding into the expressions that use
        it, to know more about them: twenty temporaries, each used twice, are a million nodes. A load stops
        them.
        """
        if isinstance(bind, _Choice):
            return self.chosen(bind)
        if str(bind.var.ty) == "bool":
            return [bind]
        slot, at = self.slot(bind.var)
        if isinstance(bind.var.ty, ir.PointerType):  # a peer's address, held as the integer that it is
            load = tirx.reinterpret(bind.var.ty, tirx.BufferLoad(slot, at))
            return [
                tirx.BufferStore(slot, tirx.reinterpret("int64", bind.value), at),
                tirx.Bind(bind.var, load, bind.span),
            ]
        return [
            tirx.BufferStore(slot, bind.value, at),
            tirx.Bind(bind.var, tirx.BufferLoad(slot, at), bind.span),
        ]

    def slot(self, var: Any) -> tuple[Any, list[Any]]:
        """A local buffer for a variable, an element for each lane, and where its element stands."""
        dtype = (
            "uint8"
            if str(var.ty) == "bool"
            else "int64"
            if isinstance(var.ty, ir.PointerType)
            else str(var.ty)
        )
        slot = tirx.decl_buffer(
            (self.extent,), dtype, var.name, layout=None, scope="local", data_alignment=64
        )
        self.slots.append(tirx.AllocBuffer(slot))
        return slot, [self.lane if self.lane is not None else tirx.IntImm("int32", 0)]

    def chosen(self, choice: _Choice) -> list[Any]:
        """A choice as a statement that fills a slot."""
        slot, at = self.slot(choice.var)
        truth = str(choice.var.ty) == "bool"

        def branch(binds: list[Any], value: Any) -> Any:
            kept = tirx.BufferStore(slot, tirx.Cast("uint8", value) if truth else value, at)
            return (
                tirx.SeqStmt([*(part for bind in binds for part in self.held(bind)), kept]) if binds else kept
            )

        load = tirx.BufferLoad(slot, at)
        value = tirx.NE(load, tirx.IntImm("uint8", 0)) if truth else load
        return [
            tirx.IfThenElse(choice.test, branch(*choice.yes), branch(*choice.no)),
            tirx.Bind(choice.var, value),
        ]


def bind_lets() -> Any:
    """The pass: Lets in stores, bindings and evaluated calls become ``Bind`` statements in front of them."""

    def run(func: Any, _module: Any, _context: Any) -> Any:
        found: list[Any] = []
        structural_walk(func.body, ((tirx.Let, tirx.Bind), found.append))
        if len(found) <= CHAIN and not any(isinstance(node, tirx.Let) for node in found):
            return func
        state = _Pass()
        kinds = (tirx.BufferStore, tirx.Bind, tirx.Evaluate)
        body = structural_mutate(
            func.body, [(tirx.For, state.on_for), *((kind, state.on_statement) for kind in kinds)]
        )
        return func.with_body(body)

    return tirx.transform.prim_func_pass(run, opt_level=0, name="tilescale.bind_lets")
