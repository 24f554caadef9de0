"""Applies what a finding says to write instead to the source of a kernel."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import textwrap
from pathlib import Path
from typing import Any

from tests.ranks.faulty.case import Case
from tilescale.compiler.findings import Fix


def repaired(case: Case, fix: Fix, folder: Path) -> Case:
    """The case with its source edited; its module lies in ``folder``."""
    path = Path(inspect.getfile(case.build))
    assert Path(fix.at.file) == path, "the edit is of another file"
    lines = edited(path.read_text(), fix)
    stem = f"repaired_{case.name}"
    folder.mkdir()
    made = folder / f"{stem}.py"
    # of the module only what the case needs: its imports, constants and helpers, and the case itself
    tree = ast.parse(lines)
    kept = [
        n
        for n in tree.body
        if not (isinstance(n, ast.FunctionDef) and n.decorator_list and n.name != case.name)
    ]
    for node in kept:
        if isinstance(node, ast.FunctionDef) and node.name == case.name:
            node.decorator_list = []
    made.write_text("\n".join(ast.unparse(n) for n in kept) + "\n")
    spec = importlib.util.spec_from_file_location(stem, made)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[stem] = module
    spec.loader.exec_module(module)
    return Case(getattr(module, case.name), case.kind, case.says, case.ranks, case.args, case.limit)


def edited(source: str, fix: Fix) -> str:
    """The source behind the edit."""
    lines = source.splitlines()
    first, behind = statement(source, fix.at.line)
    if fix.how == "replace":
        whole = "\n".join(lines[first:behind])
        assert fix.old in whole, (fix.old, whole)
        return "\n".join([*lines[:first], whole.replace(fix.old, fix.text, 1), *lines[behind:]])
    if fix.how == "move out":
        around = statement_around(source, first)
        moved = textwrap.indent(
            textwrap.dedent("\n".join(lines[first:behind])), " " * _depth(lines[around[0]])
        ).splitlines()
        hole = " " * _depth(lines[first]) + "pass"
        return "\n".join([*lines[:first], hole, *lines[behind : around[1]], *moved, *lines[around[1] :]])
    indent = " " * (len(lines[first]) - len(lines[first].lstrip()))
    text = textwrap.indent(fix.text, indent).splitlines()
    if fix.what is not None:
        start, end = statement(source, fix.what.line)
        text = textwrap.indent(textwrap.dedent("\n".join(lines[start:end])), indent).splitlines()
        hole = " " * (len(lines[start]) - len(lines[start].lstrip())) + "pass"
        lines[start:end] = [hole, *[""] * (end - start - 1)]
    at = behind if fix.how.endswith("behind") else first
    return "\n".join([*lines[:at], *text, *lines[at:]])


def statement(source: str, line: int) -> tuple[int, int]:
    """The innermost statement that begins at a line: its first line, and the one behind it, from 0."""
    best = None
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line):
            size = (node.end_lineno or line) - node.lineno
            if best is None or size < best[1] - best[0] - 1:
                best = (node.lineno - 1, node.end_lineno or line)
    assert best is not None, f"no statement at line {line}"
    return best


def statement_around(source: str, first: int) -> tuple[int, int]:
    """The branch or loop in which the statement at a line (from 0) stands, as `statement` says it."""
    around = [
        (n.lineno - 1, n.end_lineno or n.lineno)
        for n in ast.walk(ast.parse(source))
        if isinstance(n, (ast.If, ast.For, ast.While)) and n.lineno - 1 < first < (n.end_lineno or n.lineno)
    ]
    return max(around)


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())
