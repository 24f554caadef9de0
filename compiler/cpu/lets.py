"""Let expressions become bindings in front of the statement that holds them, each evaluated once."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.tvm_compat import IF_THEN_ELSE, ir, tirx, tvm_ffi


class _Binder:
    """Rewrites one statement: collects its bindings in evaluation order.

    An expression built by operators is a graph: `y = exp(x); z = y * y` holds the same Let twice. The first meeting binds
    it, later ones within the statement use the variable; in another statement it is bound anew, under a new variable.
    """

    def __init__(self, used: set[int]) -> None:
        self.used = used
        self.binds: list[Any] = []
        self.results: dict[int, Any] = {}

    def rewrite(self, value: Any) -> Any:
        return tvm_ffi.structural_mutate(value, [(tirx.Let, self.on_let), (ir.Call, self.on_call)])

    def on_let(self, node: Any, _mutator: Any) -> Any:
        key = hash(node)  # the address of the object, which `node` keeps alive
        if key not in self.results:
            var, body, value = node.var, node.body, self.rewrite(node.value)
            if hash(var) in self.used:
                fresh = tirx.Var(var.name, str(var.ty))
                body = tvm_ffi.structural_map(body, (tirx.Var, lambda v: fresh if v.same_as(var) else v))
                var = fresh
            self.used.add(hash(var))
            self.binds.append(tirx.Bind(var, value))
            self.results[key] = (node, self.rewrite(body))
        return self.results[key][1]

    def on_call(self, node: Any, mutator: Any) -> Any:
        # The branches of if_then_else run only when taken (they may guard a load): their Lets stay inside.
        return node if getattr(node.op, "name", "") == IF_THEN_ELSE else mutator.default_mutate(node)


def _on_statement(stmt: Any, used: set[int]) -> Any:
    binder = _Binder(used)
    if isinstance(stmt, tirx.BufferStore):
        value = binder.rewrite(stmt.value)
        indices = [binder.rewrite(i) for i in stmt.indices]
        if not binder.binds:
            return stmt
        new = tirx.BufferStore(stmt.buffer, value, indices, stmt.span)
    elif isinstance(stmt, tirx.Bind):
        value = binder.rewrite(stmt.value)
        if not binder.binds:
            return stmt
        new = tirx.Bind(stmt.var, value, stmt.span)
    else:
        value = binder.rewrite(stmt.value)
        if not binder.binds:
            return stmt
        new = tirx.Evaluate(value, stmt.span)
    return tirx.SeqStmt([*binder.binds, new])


def bind_lets() -> Any:
    """The pass: Lets in stores, bindings and evaluated calls become ``Bind`` statements in front of them."""

    def run(func: Any, _module: Any, _context: Any) -> Any:
        found: list[Any] = []
        tvm_ffi.structural_walk(func.body, (tirx.Let, found.append))
        if not found:
            return func
        used: set[int] = set()

        def visit(stmt: Any, _mutator: Any) -> Any:
            return _on_statement(stmt, used)

        kinds = (tirx.BufferStore, tirx.Bind, tirx.Evaluate)
        body = tvm_ffi.structural_mutate(func.body, [(kind, visit) for kind in kinds])
        return func.with_body(body)

    return tirx.transform.prim_func_pass(run, opt_level=0, name="tilescale.bind_lets")
