"""A program whose host code goes on behind a statement that fails: what stands in it alone does not keep the
kernels behind it from being made.

Tensors have no data when kernels are only compiled, so references and comparisons raise. Each statement of host
code stands in a ``try``; names that it would have set become `Anything`. Kernels, and whatever a trace runs, are
as they were: an error there is the program's.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

MARKS = ("jit", "lazy_jit", "prim_func", "macro", "autotune", "inline")
HOOK = "__compat_failed__"


def compiled(text: str, path: str) -> Any:
    """The code of a program that goes on; its namespace has the function `HOOK` of `failed`."""
    tree = ast.parse(text, path)
    return compile(ast.fix_missing_locations(_Lenient().visit(tree)), path, "exec")


def failed(report: Callable[[BaseException], None], anything: Any) -> Callable[[BaseException], Any]:
    """What a statement that failed gives its names. While a kernel is traced the error goes on."""

    def hook(error: BaseException) -> Any:
        from tilescale.compiler.builder import state

        if state.active():
            raise error
        report(error)
        return anything()

    return hook


def _of_kernels(node: ast.AST) -> bool:
    """Whether a function is a kernel, or makes one by a definition in it."""
    for f in ast.walk(node):
        if isinstance(f, ast.FunctionDef):
            words = [ast.unparse(d).partition("(")[0].rpartition(".")[2] for d in f.decorator_list]
            if any(w in MARKS for w in words):
                return True
    return False


class _Lenient(ast.NodeTransformer):
    def visit_Module(self, node: ast.Module) -> Any:
        node.body = [y for x in node.body for y in self.guarded(x, True)]
        return node

    def guarded(self, s: ast.stmt, top: bool = False) -> list[ast.stmt]:
        """A statement, and what it holds, each in a try of its own."""
        if isinstance(s, (ast.FunctionDef, ast.ClassDef)):
            if isinstance(s, ast.FunctionDef) and not _of_kernels(s):
                s.body = [y for x in s.body for y in self.guarded(x)]
            return [s]
        if isinstance(s, (ast.Import, ast.ImportFrom, ast.Return, ast.Global, ast.Nonlocal, ast.Pass)):
            return [s]
        if isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant):  # what a docstring is
            return [s]
        if isinstance(s, (ast.Raise, ast.Break, ast.Continue, ast.Delete)):
            return [s]
        for name in ("body", "orelse", "finalbody"):
            held = getattr(s, name, None)
            if isinstance(held, list):
                setattr(s, name, [y for x in held for y in self.guarded(x)])
        targets = s.targets if isinstance(s, ast.Assign) else []
        sets = [ast.Assign([t], ast.Name("__failed__", ast.Load())) for t in targets]
        call = ast.Call(ast.Name(HOOK, ast.Load()), [ast.Name("__error__", ast.Load())], [])
        first = ast.Assign([ast.Name("__failed__", ast.Store())], call)
        handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), "__error__", [first, *sets])
        made = ast.Try([s], [handler], [], [])
        for part in (made, handler, first, *sets):
            ast.copy_location(part, s)
        return [made]
