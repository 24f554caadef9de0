"""Rewrites a kernel's AST so that control flow, assignments and comparisons call the hooks of :mod:`hooks`;
nothing is interpreted here. The result keeps the user's file, lines and columns, closures and globals:
scoping and everything else stays Python's own.

A device ``if`` cannot skip its body in Python and a device loop runs its body once, so every construct asks a
hook what it is:

    if c: a          __t = ts.cond(c)              for x in it: a        __l = ts.loop(it, …)
    else: b          if ts.then(__t): a                                  for x in __l: a
                     if ts.else_(__t): b           while c: a            while ts.while_(__w, lambda: c): a
                     ts.endif(__t)

A name that is rebound under a device construct is poisoned behind it (and, in a loop, before it), since
tracing sees one path only.
"""

from __future__ import annotations

import ast
import types
from typing import Any, TypeVar, cast

from tilescale import source_text
from tilescale.compiler.frontend import frames, ranges
from tilescale.errors import Loc, TileSyntaxError

HOOKS = "__ts__"
_BUILTINS = {
    "range",
    "min",
    "max",
    "abs",
    "int",
    "float",
    "bool",
    "round",
    "print",
    "len",
    "sum",
    "pow",
    "divmod",
}


def _assigned(nodes: list[ast.stmt]) -> list[str]:
    """Names that these statements bind, in order of appearance, not looking into nested functions."""
    found: dict[str, None] = {}

    class Find(ast.NodeVisitor):
        def visit_Name(self, n: ast.Name) -> None:
            if isinstance(n.ctx, ast.Store) and not n.id.startswith("__"):
                found[n.id] = None

        def visit_FunctionDef(self, n: ast.FunctionDef) -> None:
            found[n.name] = None

        def visit_Lambda(self, n: ast.Lambda) -> None:
            pass

        visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_Lambda  # type: ignore[assignment]

    for node in nodes:
        Find().visit(node)
    return list(found)


class Rewriter(ast.NodeTransformer):
    def __init__(self, filename: str):
        self.filename = filename
        self.count = 0

    # -- small makers
    # ---------------------------------------------------------------------------------------------
    def temp(self, stem: str = "t") -> str:
        self.count += 1
        return f"__{stem}{self.count}"

    def hook(self, name: str, *args: ast.expr, at: ast.AST) -> ast.Call:
        func = ast.Attribute(ast.Name(HOOKS, ast.Load()), name, ast.Load())
        return _place(ast.Call(func, list(args), []), at)

    def refuse(self, node: ast.AST, message: str, hint: str | None = None) -> TileSyntaxError:
        line, col = getattr(node, "lineno", 1), getattr(node, "col_offset", None)
        loc = Loc(
            self.filename, line, col, getattr(node, "end_lineno", None), getattr(node, "end_col_offset", None)
        )
        return TileSyntaxError(message, loc=loc, hint=hint)

    @staticmethod
    def thunk(body: ast.expr) -> ast.Lambda:
        return ast.Lambda(ast.arguments([], [], None, [], [], None, []), body)

    def peek(self, name: str) -> ast.Lambda:
        return self.thunk(ast.Name(name, ast.Load()))

    def assign(self, name: str, value: ast.expr, at: ast.AST) -> ast.stmt:
        return _place(ast.Assign([ast.Name(name, ast.Store())], value), at)

    def poison(self, state: str, names: list[str], at: ast.AST) -> list[ast.stmt]:
        """``if state.device: x = ts.poison("x", lambda: x, state)`` for every rebound name."""
        if not names:
            return []
        is_device = ast.Attribute(ast.Name(state, ast.Load()), "device", ast.Load())
        body = [
            self.assign(
                n, self.hook("poison", ast.Constant(n), self.peek(n), ast.Name(state, ast.Load()), at=at), at
            )
            for n in names
        ]
        return [_place(ast.If(is_device, body, []), at)]

    # -- functions
    # ------------------------------------------------------------------------------------------------
    def visit_FunctionDef(self, n: ast.FunctionDef) -> Any:
        n.body = self.block(n.body)
        n.args.defaults = [self.visit(d) for d in n.args.defaults]
        for a in [*n.args.args, *n.args.kwonlyargs, *n.args.posonlyargs]:
            a.annotation = None
        n.returns = None
        entry = self.assign("__entry", self.hook("enter", at=n.body[0]), n.body[0])
        n.body = [entry, *n.body]
        return n

    def visit_AsyncFunctionDef(self, n: ast.AsyncFunctionDef) -> Any:
        raise self.refuse(n, "an async function has no meaning in a kernel")

    def visit_Yield(self, n: ast.Yield) -> Any:
        raise self.refuse(n, "yield has no meaning in a kernel")

    visit_YieldFrom = visit_Yield  # type: ignore[assignment]

    def visit_Lambda(self, n: ast.Lambda) -> Any:
        n.body = self.visit(n.body)
        return n

    def visit_Return(self, n: ast.Return) -> Any:
        leaves = self.hook("leaves", ast.Name("__entry", ast.Load()), ast.Constant(n.value is not None), at=n)
        n.value = self.visit(n.value) if n.value is not None else None
        return _place(ast.If(leaves, [n], []), n)

    def block(self, stmts: list[ast.stmt]) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for s in stmts:
            leaves = isinstance(s, (ast.Return, ast.Break, ast.Continue))
            r = self.visit(s)
            out.extend(r if isinstance(r, list) else [r] if r is not None else [])
            if (
                leaves
            ):  # Python never comes to what stands behind it, and a trace goes on where it became device code
                break
        return out or [ast.Pass()]

    # -- control flow
    # ---------------------------------------------------------------------------------------------
    def visit_If(self, n: ast.If) -> Any:
        state = self.temp("if")
        names = _assigned([*n.body, *n.orelse])
        snapshot = ast.Dict([ast.Constant(x) for x in names], [self.peek(x) for x in names])
        out: list[ast.stmt] = [
            self.assign(state, self.hook("cond", self.condition(n.test), snapshot, at=n.test), n)
        ]
        here = ast.Name(state, ast.Load())
        out.append(_place(ast.If(self.hook("then", here, at=n.test), self.block(n.body), []), n))
        if n.orelse:
            out.append(_place(ast.If(self.hook("else_", here, at=n.test), self.block(n.orelse), []), n))
        out.append(_place(ast.Expr(self.hook("endif", here, at=n.test)), n))
        return [*out, *self.poison(state, names, n)]

    def visit_For(self, n: ast.For) -> Any:
        if n.orelse:
            raise self.refuse(n, "for … else has no meaning in a kernel")
        state = self.temp("for")
        targets = [t.id for t in ast.walk(n.target) if isinstance(t, ast.Name)]
        names = _assigned(n.body)
        snapshot = ast.Dict([ast.Constant(x) for x in names], [self.peek(x) for x in names])
        elements = n.target.elts if isinstance(n.target, (ast.Tuple, ast.List)) else [n.target]
        # No (i, (j, k)), no *rest.
        plain = len(elements) == len(targets) and all(isinstance(e, ast.Name) for e in elements)
        operands, real = ranges.operands(n) or (None, False)
        read: ast.expr = ast.Constant(None)
        if operands is not None:
            read = ast.Dict([ast.Constant(x) for x in operands], [self.peek(x) for x in operands])
        known = _constant(tuple(targets) if plain else ())
        made = self.hook("loop", self.visit(n.iter), known, snapshot, read, ast.Constant(real), at=n.iter)
        # The loop gives its own names a value in each round, whatever an inner loop leaves behind.
        entry = [x for x in names if x not in targets]
        body = [*self.poison(state, entry, n), *self.block(n.body)]
        loop = _place(ast.For(n.target, ast.Name(state, ast.Load()), body, []), n)
        after = names + [t for t in targets if t not in names]
        return [self.assign(state, made, n), loop, *self.poison(state, after, n)]

    def visit_While(self, n: ast.While) -> Any:
        if n.orelse:
            raise self.refuse(n, "while … else has no meaning in a kernel")
        forever = isinstance(n.test, ast.Constant) and bool(n.test.value)
        if forever and not any(isinstance(x, (ast.Break, ast.Return)) for x in ast.walk(n)):
            raise self.refuse(
                n, "a loop that nothing ends", "`break` in it, under the condition that ends it"
            )
        state = self.temp("while")
        names = _assigned(n.body)
        snapshot = ast.Dict([ast.Constant(x) for x in names], [self.peek(x) for x in names])
        test = self.thunk(self.condition(n.test))
        head = self.assign(state, self.hook("while_state", snapshot, ast.Constant(forever), at=n.test), n)
        call = self.hook("while_", ast.Name(state, ast.Load()), test, at=n.test)
        loop = _place(ast.While(call, [*self.poison(state, names, n), *self.block(n.body)], []), n)
        end = _place(ast.Expr(self.hook("endwhile", ast.Name(state, ast.Load()), at=n.test)), n)
        return [head, loop, end, *self.poison(state, names, n)]

    def visit_Break(self, n: ast.Break) -> Any:
        return _place(ast.If(self.hook("break_", at=n), [n], []), n)

    def visit_Continue(self, n: ast.Continue) -> Any:
        return _place(ast.If(self.hook("continue_", at=n), [n], []), n)

    def visit_With(self, n: ast.With) -> Any:
        if (plain := frames.plain(n, self.refuse)) is not n:
            return self.visit(plain)
        items: list[ast.withitem] = []
        joined: list[ast.expr] = []
        for (
            item
        ) in n.items:  # `with T.Scale("device") as rank, n:` parses as two items, the second a bare name
            last = items[-1] if items else None
            bare = item.optional_vars is None and isinstance(item.context_expr, ast.Name)
            if (
                bare
                and last is not None
                and last.optional_vars is not None
                and isinstance(last.context_expr, ast.Call)
            ):
                name = item.context_expr
                assert isinstance(name, ast.Name)
                also = _place(ast.Name(name.id, ast.Store()), name)
                first = last.optional_vars
                # a tuple of the author's, `(x, y), n`, is one of the two
                elts = (
                    [*first.elts, also] if isinstance(first, ast.Tuple) and first in joined else [first, also]
                )
                last.optional_vars = _place(ast.Tuple(elts, ast.Store()), first)
                joined.append(last.optional_vars)
            else:
                items.append(item)
        state, rebound = self.temp("with"), _assigned(n.body)
        here = ast.Name(state, ast.Load())
        for item in items:
            target = item.optional_vars
            names = () if target is None else _names(target)
            rebound += [
                t.id
                for t in ast.walk(target or ast.Tuple([]))
                if isinstance(t, ast.Name) and t.id not in rebound
            ]
            expr = self.visit(item.context_expr)
            one = isinstance(names, tuple) and len(names) == 1  # `as (bx,):` takes one value apart
            given = _constant((names,) if one or not isinstance(names, tuple) else names)
            item.context_expr = self.hook("with_", expr, given, here, at=item.context_expr)
        snapshot = ast.Dict([ast.Constant(x) for x in rebound], [self.peek(x) for x in rebound])
        head = self.assign(state, self.hook("with_state", snapshot, at=n), n)
        n.items, n.body = items, self.block(n.body)
        return [head, n, *self.poison(state, rebound, n)]

    def visit_Assert(self, n: ast.Assert) -> Any:
        message = self.thunk(self.visit(n.msg) if n.msg is not None else ast.Constant(ast.unparse(n.test)))
        return _place(ast.Expr(self.hook("assert_", self.condition(n.test), message, at=n)), n)

    # -- assignments
    # ----------------------------------------------------------------------------------------------
    def visit_Assign(self, n: ast.Assign) -> Any:
        value = self.value(n.value, n.targets[0])
        if len(n.targets) == 1:
            return self.bind(n.targets[0], value, n)
        name = self.temp("v")
        out = [self.assign(name, self.hook("now", value, ast.Constant("value"), at=n), n)]
        for target in n.targets:
            out += self.bind(target, _place(ast.Name(name, ast.Load()), n), n)
        return out

    def value(self, n: ast.expr, target: ast.expr) -> ast.expr:
        """What is assigned. A name, alone or for one of several targets, stands for what its cell holds
        now; so does one that `and`, `or` or a choice gives."""
        several = isinstance(target, (ast.Tuple, ast.List))
        if isinstance(n, (ast.Name, ast.BoolOp, ast.IfExp)):
            name = n.id if isinstance(n, ast.Name) else "value"
            name = target.id if isinstance(target, ast.Name) else name
            return self.hook("contents", self.visit(n), ast.Constant(name), at=n)
        if isinstance(n, (ast.Tuple, ast.List)) and several:
            n.elts = [e if isinstance(e, ast.Starred) else self.value(e, ast.Constant(None)) for e in n.elts]
            return n
        return cast(ast.expr, self.visit(n))

    def bind(self, target: ast.expr, value: ast.expr, at: ast.stmt) -> list[ast.stmt]:
        if isinstance(target, ast.Name):
            call = self.hook("bind", ast.Constant(target.id), value, self.peek(target.id), at=at)
            return [self.assign(target.id, call, at)]
        if isinstance(target, ast.Subscript):
            call = self.hook("store", self.visit(target.value), self.index(target.slice), value, at=at)
            return [_place(ast.Expr(call), at)]
        if isinstance(target, (ast.Tuple, ast.List)):
            temps: list[ast.expr] = []
            kept: list[ast.stmt] = []  # all values are there before the first target is written
            later: list[ast.stmt] = []
            for element in target.elts:
                name = self.temp("v")
                inner = element.value if isinstance(element, ast.Starred) else element
                store: ast.expr = ast.Name(name, ast.Store())
                temps.append(ast.Starred(store, ast.Store()) if isinstance(element, ast.Starred) else store)
                own = [self.peek(inner.id)] if isinstance(inner, ast.Name) else []
                called = ast.Constant(inner.id if isinstance(inner, ast.Name) else "value")
                kept.append(
                    self.assign(
                        name, self.hook("now", ast.Name(name, ast.Load()), called, *own, at=element), at
                    )
                )
                later += self.bind(inner, _place(ast.Name(name, ast.Load()), element), at)
            first = _place(ast.Assign([ast.Tuple(temps, ast.Store())], value), at)
            return [first, *kept, *later]
        return [_place(ast.Assign([self.visit(target)], value), at)]

    def visit_AnnAssign(self, n: ast.AnnAssign) -> Any:
        if not isinstance(n.target, ast.Name):
            raise self.refuse(n, "only a plain name can be annotated in a kernel")
        value = self.thunk(self.visit(n.value)) if n.value is not None else ast.Constant(None)
        call = self.hook(
            "declare", ast.Constant(n.target.id), n.annotation, value, self.peek(n.target.id), at=n
        )
        return self.assign(n.target.id, call, n)

    def visit_AugAssign(self, n: ast.AugAssign) -> Any:
        op = ast.Constant(_OPERATORS[type(n.op)])
        value = self.visit(n.value)
        if isinstance(n.target, ast.Name):
            call = self.hook("aug", ast.Constant(n.target.id), op, self.peek(n.target.id), value, at=n)
            return self.assign(n.target.id, call, n)
        if isinstance(n.target, ast.Subscript):
            call = self.hook(
                "aug_store", self.visit(n.target.value), self.index(n.target.slice), op, value, at=n
            )
            return _place(ast.Expr(call), n)
        return n

    def index(self, node: ast.expr) -> ast.expr:
        """An index as an expression: slices become ``slice(…)`` so that a hook can take them."""
        if isinstance(node, ast.Tuple):
            return _place(ast.Tuple([self.index(e) for e in node.elts], ast.Load()), node)
        if isinstance(node, ast.Slice):
            parts = [
                self.visit(p) if p is not None else ast.Constant(None)
                for p in (node.lower, node.upper, node.step)
            ]
            return self.hook("slice_", *parts, at=node)
        return cast(ast.expr, self.visit(node))

    # -- expressions
    # ----------------------------------------------------------------------------------------------
    def visit_Subscript(self, n: ast.Subscript) -> Any:
        n.value = self.visit(n.value)
        if isinstance(n.slice, ast.Tuple):  # an index, which is used at once
            n.slice.elts = [self.visit(e) for e in n.slice.elts]
        else:
            n.slice = self.visit(n.slice)
        return n

    def visit_Tuple(self, n: ast.Tuple | ast.List) -> Any:
        self.generic_visit(n)
        plain = all(isinstance(e, (ast.Constant, ast.Name, ast.Starred)) for e in n.elts)
        return (
            n
            if plain or not isinstance(n.ctx, ast.Load)
            else self.hook("now", n, ast.Constant("value"), at=n)
        )

    visit_List = visit_Tuple  # type: ignore[assignment]

    def visit_Dict(self, n: ast.Dict) -> Any:
        self.generic_visit(n)
        n.values = [
            v if isinstance(v, (ast.Constant, ast.Name)) else self.hook("now", v, ast.Constant("value"), at=v)
            for v in n.values
        ]
        return n

    def visit_ListComp(self, n: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> Any:
        self.generic_visit(n)
        n.elt = self.hook("now", n.elt, ast.Constant("value"), at=n.elt)
        return n

    visit_SetComp = visit_GeneratorExp = visit_ListComp  # type: ignore[assignment]

    def visit_DictComp(self, n: ast.DictComp) -> Any:
        self.generic_visit(n)
        n.value = self.hook("now", n.value, ast.Constant("value"), at=n.value)
        return n

    def visit_BoolOp(self, n: ast.BoolOp) -> Any:
        name = "either_and" if isinstance(n.op, ast.And) else "either_or"
        return self.hook(name, *[self.thunk(self.visit(v)) for v in n.values], at=n)

    def condition(self, n: ast.expr) -> Any:
        """``n`` where nothing but whether it holds is asked for."""
        if not isinstance(n, ast.BoolOp):
            return self.visit(n)
        name = "and_" if isinstance(n.op, ast.And) else "or_"
        return self.hook(name, *[self.thunk(self.condition(v)) for v in n.values], at=n)

    def visit_UnaryOp(self, n: ast.UnaryOp) -> Any:
        n.operand = self.condition(n.operand) if isinstance(n.op, ast.Not) else self.visit(n.operand)
        if isinstance(n.op, ast.Not):
            return self.hook("not_", n.operand, at=n)
        if isinstance(n.op, ast.USub) and not isinstance(n.operand, ast.Constant):
            return self.hook("neg", n.operand, at=n)
        return n

    def visit_BinOp(self, n: ast.BinOp) -> Any:
        left, right = self.visit(n.left), self.visit(n.right)
        if isinstance(left, ast.Constant) and isinstance(right, ast.Constant):
            n.left, n.right = left, right
            return n
        return self.hook("binop", ast.Constant(_OPERATORS[type(n.op)]), left, right, at=n)

    def visit_Compare(self, n: ast.Compare) -> Any:
        left, rights = self.visit(n.left), [self.visit(c) for c in n.comparators]
        if all(isinstance(o, (ast.Is, ast.IsNot)) for o in n.ops):
            n.left, n.comparators = left, rights
            return n
        ops = ast.Tuple([ast.Constant(type(o).__name__) for o in n.ops], ast.Load())
        return self.hook("cmp", ops, left, *[self.thunk(r) for r in rights], at=n)

    def visit_IfExp(self, n: ast.IfExp) -> Any:
        test, a, b = self.condition(n.test), self.visit(n.body), self.visit(n.orelse)
        return self.hook("ifexp", test, self.thunk(a), self.thunk(b), at=n)

    def visit_Call(self, n: ast.Call) -> Any:
        self.generic_visit(n)
        if isinstance(n.func, ast.Name) and n.func.id in _BUILTINS:
            call = self.hook("builtin", n.func, *n.args, at=n)
            call.keywords = n.keywords
            return call
        return n

    def visit_NamedExpr(self, n: ast.NamedExpr) -> Any:
        n.value = self.hook(
            "bind", ast.Constant(n.target.id), self.visit(n.value), self.peek(n.target.id), at=n
        )
        return n


_OPERATORS: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.LShift: "<<", ast.RShift: ">>", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.MatMult: "@",
}  # fmt: skip


def _names(target: ast.expr) -> Any:
    """The names of a `with` target as they nest: ``(x, y), n`` is (("x", "y"), "n"); what is no name is a
    value."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return tuple(_names(e) for e in target.elts)
    return target.id if isinstance(target, ast.Name) else "value"


def _constant(value: Any) -> ast.Constant:
    return ast.Constant(value)


Node = TypeVar("Node", bound=ast.AST)


def _place(node: Node, at: ast.AST) -> Node:
    return ast.copy_location(node, at)


#: id of a code object → it and its rewritten form. By identity: two equal ones may differ in the annotations
#: of local names, which the bytecode does not hold, and come from different files (a notebook's cells).
_compiled: dict[int, tuple[types.CodeType, types.CodeType]] = {}


def _copied(node: Any) -> Any:
    """A syntax tree of its own; copy.deepcopy takes several times as long."""
    if isinstance(node, list):
        return [_copied(each) for each in node]
    if not isinstance(node, ast.AST):
        return node
    made = type(node).__new__(type(node))
    for name, value in vars(node).items():
        setattr(made, name, _copied(value) if isinstance(value, (ast.AST, list)) else value)
    return made


def _inner_code(func: types.FunctionType) -> types.CodeType:
    """The rewritten code object of ``func``; cached by the original's code, since a factory defines the same
    kernel many times."""
    original = func.__code__
    hit = _compiled.get(id(original))
    if hit is not None:
        return hit[1]
    filename = original.co_filename
    source = source_text.find(func)
    if source is None:
        raise _lost(func)
    definition = _copied(source.node)
    if not isinstance(definition, ast.FunctionDef):
        raise TileSyntaxError(
            f"{func.__name__} is not a plain function", loc=Loc(filename, original.co_firstlineno)
        )
    definition.decorator_list = []
    definition.args.defaults, definition.args.kw_defaults = [], [None] * len(definition.args.kwonlyargs)
    rewritten = Rewriter(filename).visit(definition)
    # By its own name a function that calls itself would find the rewritten one, in a cell of its own.
    rewritten.name = "__traced__"
    free = original.co_freevars
    outer_args = ast.arguments([], [ast.arg(x) for x in free], None, [], [], None, [])
    outer = ast.FunctionDef(
        "__outer__", outer_args, [rewritten, ast.Return(ast.Name(definition.name, ast.Load()))], []
    )
    outer.type_params = []  # type: ignore[attr-defined]  # Python 3.12 wants it
    module = ast.fix_missing_locations(ast.Module([outer], []))
    compiled = compile(module, filename, "exec")
    code = next(c for c in compiled.co_consts if isinstance(c, types.CodeType))
    inner = next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == definition.name)
    inner = inner.replace(co_name=original.co_name)
    _compiled[id(original)] = (original, inner)
    return inner


def _lost(func: types.FunctionType) -> TileSyntaxError:
    """What to say of a function without the text that it was compiled from."""
    name, at = func.__name__, Loc(func.__code__.co_filename, func.__code__.co_firstlineno)
    if source_text.has_changed(func):
        return TileSyntaxError(
            f"{at.file} changed since it was imported, before the source of {name} was read",
            loc=at,
            expected="the lines that Python compiled",
            hint="start the program again, or reload the module",
        )
    return TileSyntaxError(
        f"the source of {name} cannot be read",
        loc=at,
        hint="define the kernel in a file (or a notebook cell), not through exec; or tell linecache.cache "
        "its text, under its file name",
    )


def rewritten(func: types.FunctionType, hooks: Any) -> types.FunctionType:
    """``func`` with its control flow handed to ``hooks``, over the same globals and closure values.

    Raises:
        TileSyntaxError: the source cannot be read or holds Python that has no meaning in a kernel.
    """
    code = _inner_code(func)
    names: dict[str, Any] = {**func.__globals__, HOOKS: hooks}
    names["__builtins__"] = func.__globals__.get("__builtins__", __builtins__)
    cells = dict(zip(func.__code__.co_freevars, func.__closure__ or (), strict=True))
    closure = tuple(_cell(cells[name]) for name in code.co_freevars)
    made = types.FunctionType(code, names, func.__name__, func.__defaults__, closure)
    made.__kwdefaults__ = func.__kwdefaults__
    return made


def _cell(cell: types.CellType) -> types.CellType:
    """A cell of the trace's own with the same content."""
    try:
        return types.CellType(cell.cell_contents)
    except ValueError:  # an empty cell: a name that the enclosing function has not bound yet
        return cell
