"""Benches and GPU tests run where the suite does not: what they import of ours, late or early, is there and
takes what they give it."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests/bench", "tests/gpu", "tests/ranks", "tests/fuzz")
OURS = ("tests", "tilescale")


def of_tests(name: str) -> Path | None:
    """The file of a module under tests, which is read and not run: it may ask for a GPU or for a package that
    is not here."""
    path = ROOT / Path(*name.split("."))
    found = (path.with_suffix(".py"), path / "__init__.py")
    return (
        next((p for p in found if p.exists()), path if path.is_dir() else None)
        if name.split(".")[0] == "tests"
        else None
    )


def defined(path: Path) -> dict[str, ast.AST]:
    """What a module binds outside of its functions and classes, by name."""
    out: dict[str, ast.AST] = {}
    rest: list[ast.AST] = list(ast.parse(path.read_text()).body) if path.is_file() else []
    while rest:
        node = rest.pop()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            out[node.name] = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            out |= {(alias.asname or alias.name).split(".")[0]: node for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            out[node.id] = node
        else:
            rest += ast.iter_child_nodes(node)
    return out


def refused(name: str, what: str) -> str:
    """Why ``from name import what`` would fail; nothing where it would not."""
    if name.split(".")[0] == "tests":
        path = of_tests(name)
        if path is None:
            return f"there is no module {name}"
        return (
            ""
            if what == "*" or what in defined(path) or of_tests(f"{name}.{what}")
            else f"{name} has no {what}"
        )
    try:
        if hasattr(importlib.import_module(name), what):
            return ""
        importlib.import_module(f"{name}.{what}")
    except ImportError as error:
        return f"{name} has no {what}: {error}"
    return ""


def signature(node: ast.FunctionDef) -> inspect.Signature:
    one, kinds = node.args, inspect.Parameter
    first = [*one.posonlyargs, *one.args]
    given = len(first) - len(one.defaults)
    out = [
        kinds(a.arg, kinds.POSITIONAL_OR_KEYWORD, default=kinds.empty if k < given else None)
        for k, a in enumerate(first)
    ]
    out += [kinds(one.vararg.arg, kinds.VAR_POSITIONAL)] if one.vararg else []
    out += [
        kinds(a.arg, kinds.KEYWORD_ONLY, default=kinds.empty if d is None else None)
        for a, d in zip(one.kwonlyargs, one.kw_defaults, strict=True)
    ]
    return inspect.Signature(out + ([kinds(one.kwarg.arg, kinds.VAR_KEYWORD)] if one.kwarg else []))


def wrong(source: str, file: str) -> Iterator[str]:
    """What of ours ``source`` imports in vain, or calls with arguments that it does not take."""
    tree, known, modules = ast.parse(source), dict[str, inspect.Signature](), dict[str, dict[str, ast.AST]]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "tests" and of_tests(alias.name) is None:
                    yield f"{file}:{node.lineno}: there is no module {alias.name}"
        elif (
            isinstance(node, ast.ImportFrom)
            and node.module
            and not node.level
            and node.module.split(".")[0] in OURS
        ):
            for alias in node.names:
                if why := refused(node.module, alias.name):
                    yield f"{file}:{node.lineno}: {why}"
                path = of_tests(node.module)
                found = defined(path).get(alias.name) if path else None
                inner = of_tests(f"{node.module}.{alias.name}")
                if isinstance(found, ast.FunctionDef) and not found.decorator_list:
                    known[alias.asname or alias.name] = signature(found)
                elif inner is not None and inner.is_file():
                    modules[alias.asname or alias.name] = defined(inner)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            if node.attr not in modules[node.value.id] and not node.attr.startswith("__"):
                yield f"{file}:{node.lineno}: {node.value.id} has no {node.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
            if any(isinstance(a, ast.Starred) for a in node.args) or any(
                k.arg is None for k in node.keywords
            ):
                continue
            try:
                known[node.func.id].bind(*node.args, **{str(k.arg): k.value for k in node.keywords})
            except TypeError as error:
                yield f"{file}:{node.lineno}: {node.func.id}: {error}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_runs_elsewhere_finds_what_it_imports(folder: str):
    files = sorted((ROOT / folder).glob("*.py"))
    assert files, folder
    found = [line for path in files for line in wrong(path.read_text(), str(path.relative_to(ROOT)))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "def f():\n    from tests.bench.bench_hopper_gemm import TRAFFIC_OF_OLD",
            ":2: tests.bench.bench_hopper_gemm has no TRAFFIC_OF_OLD",
        ),
        ("def f():\n    from tests.bench.nowhere import x", "no module tests.bench.nowhere"),
        ("import tests.bench.nowhere", "no module tests.bench.nowhere"),
        ("from tilescale.errors import NoSuchError", "tilescale.errors has no NoSuchError"),
        (
            "def f():\n    from tests.bench.gpu import captured\n    captured(print, [1])",
            ":3: captured: too many positional",
        ),
        ("from tests.bench.gpu import measure\nmeasure({}, 1, turns=3)", "turns"),
        ("from tests.bench.gpu import measure as m\nm({})", "missing a required argument"),
        ("from tests.gpu import device\ndef f():\n    device.nothing()", ":3: device has no nothing"),
        ("from tests.bench.gpu import captured, TRAFFIC\nfrom tests.gpu import gemms\ncaptured([])", ""),
        ("from tests.bench.gpu import measure\nmeasure({}, 1, rounds=3)\nmeasure(*[{}, 1])", ""),
        ("from tilescale.compiler import cost\nimport numpy.nowhere", ""),
    ],
)
def test_the_check_itself(source: str, says: str):
    found = list(wrong(source, "x.py"))
    assert (len(found) == 1 and says in found[0]) if says else not found
