"""Dependencies run one way: launch → tilescale → compiler, tilescale → comm; leaves for all; TVM behind one
module."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "tilescale": "tilescale",
    "compiler": "tilescale.compiler",
    "comm": "tilescale.comm",
    "launch": "tilescale.launch",
}
LEAVES = (
    "tilescale.source_text",
    "tilescale.errors",
    "tilescale.env",
    "tilescale.log",
    "tilescale.folders",
    "tilescale.native",
    "tilescale.arrays",
    "tilescale.packets",
)

# Part of the house → what of ours it may import. A leaf may import the leaves before it.
ALLOWED = {
    "tilescale.source_text": set(),
    "tilescale.errors": {"tilescale.source_text"},
    "tilescale.env": {"tilescale.errors"},
    "tilescale.log": {"tilescale.errors", "tilescale.env"},
    "tilescale.arrays": set(),
    "tilescale.packets": set(),
    "tilescale.folders": {"tilescale.errors", "tilescale.env", "tilescale.log"},
    "tilescale.native": {"tilescale.errors", "tilescale.env", "tilescale.log", "tilescale.folders"},
    "tilescale.language": {
        *LEAVES,
        "tilescale.compiler",
    },  # its operations load the compiler at the first trace
    "tilescale.compiler": {*LEAVES, "tilescale.language", "tilescale.compiler"},
    "tilescale.comm": {*LEAVES, "tilescale.comm"},
    "tilescale": {*LEAVES, "tilescale", "tilescale.language", "tilescale.compiler", "tilescale.comm"},
    "tilescale.__main__": {"tilescale.launch"},  # the command, for `python -m tilescale`
    "tilescale.launch": {
        *LEAVES,
        "tilescale",
        "tilescale.language",
        "tilescale.compiler",
        "tilescale.comm",
        "tilescale.launch",
    },
}
TVM_DOOR = "compiler/tvm_compat.py"

# Package (or file) of the compiler → those before it that it may import, wherever the statement stands. Each
# may import what lies above it in this table, so there is no circle; tvm_compat may be imported by all.
COMPILER: dict[str, set[str]] = {
    "tvm_compat": set(),
    "advice": set(),
    "findings": set(),
    "ir": set(),
    "builder": {"ir"},
    "layout": {"ir", "advice"},
    "sim": {"ir", "findings"},
    "ops": {"ir", "builder", "layout", "sim", "findings"},
    "frontend": {"ir", "builder", "layout", "ops"},
    "passes": {"ir", "builder", "layout", "ops", "advice"},
    "cost": {"ir"},
    "description": {"ir", "ops", "passes"},
    "backend": {"ir", "passes", "description"},
    "static": {"ir", "passes", "findings"},
    "cpu": {"ir", "builder", "layout", "ops", "passes", "description", "backend"},
    "gpu": {"ir", "layout", "ops", "passes"},
    "cuda": {"ir", "layout", "ops", "passes", "description", "backend", "advice", "gpu"},
    "emulator": {"ir", "layout", "ops", "passes", "sim", "gpu", "cuda"},
    "checks": {"ir", "sim", "passes", "findings", "static", "cuda"},
    "driver": {"ir", "passes", "description", "backend", "static"},
}

# Module (or package) of tilescale/ → those before it that it may import, wherever the statement stands; each
# may import the leaves as well.
RUNTIME: dict[str, set[str]] = {
    "version": set(),
    "submodules": set(),
    "language": set(),
    "compat": {"language"},
    "tilelang_env": {"compat"},
    "math": {"compat"},
    "transform": {"compat"},
    "tileop": {"language"},
    "lifetime": set(),
    "tracing": set(),
    "agree": set(),
    "advice": set(),
    "fingerprint": {"language"},
    "watch": {"language"},
    "cache": set(),
    "device": {"cache"},
    "explain": {"device"},
    "cuda": {"language", "cache", "device", "explain"},
    "intrinsics": {"cuda"},
    "devices": {"fingerprint", "cache", "device", "cuda"},
    "lowered": {"compat", "devices"},
    "parameter": {"language"},
    "engine": {"compat", "lowered", "parameter", "submodules"},
    "backend": {"devices"},
    "contrib": {"devices", "submodules"},
    "pointed": {"device", "explain"},
    "absent": {"explain", "language"},
    "whole_rows": {"advice", "language"},
    "launching": {"absent", "cache", "explain", "devices", "pointed", "whole_rows", "parameter"},
    "profiler": {"compat", "agree", "language", "device", "explain", "devices", "launching"},
    "report": {"launching"},
    "export": {"version", "cache", "device", "devices", "launching"},
    "utils": {"backend", "compat", "language", "profiler", "submodules"},
    "tilelang_kernel": {"launching"},
    "kernel": {"compat", "launching", "profiler", "report", "export", "tilelang_kernel"},
    "several": {"kernel", "export"},
    "layout": {"kernel"},
    "tools": {"compat", "layout"},
    "build": {"several", "advice", "language", "fingerprint", "cache", "devices", "kernel", "launching"},
    "undecided": {"devices", "kernel"},
    "hosts": set(),
    "arguments": {"explain", "kernel"},
    "overlapped": {"arguments"},
    "simulator": {"compat", "cache", "explain", "kernel", "build", "hosts", "arguments", "overlapped"},
    "jitted": {"compat", "language", "watch", "kernel"},
    "eager": {"tracing", "language", "cache", "explain", "devices", "kernel", "build", "simulator", "jitted"},
    "jit": {
        "compat",
        "tracing",
        "language",
        "devices",
        "kernel",
        "build",
        "undecided",
        "simulator",
        "jitted",
        "eager",
    },
    "tuning": {
        "compat",
        "agree",
        "advice",
        "language",
        "devices",
        "profiler",
        "kernel",
        "build",
        "jitted",
        "jit",
    },
    "autotuner": {"compat", "language", "profiler", "kernel", "jitted", "jit", "tuning"},
    "carver": {"devices", "language", "jit", "tuning", "submodules"},
    "ops": {"agree", "advice", "language", "devices", "kernel", "jit"},
    "nn": {"ops", "agree"},
    "testing": {"compat", "lifetime", "language", "kernel", "simulator", "jit", "utils"},
    "__init__": {
        "tilelang_env",
        "version",
        "compat",
        "language",
        "lowered",
        "profiler",
        "kernel",
        "several",
        "layout",
        "jit",
        "tuning",
        "ops",
    },
    "__main__": set(),
}


def part(module: str) -> str:
    """The part of the house that a module of ours belongs to."""
    return max((p for p in ALLOWED if module == p or module.startswith(p + ".")), key=len)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement within a node, however deep. Expressions, ten times as many, hold none."""
    for where in ("body", "handlers", "cases", "orelse", "finalbody"):
        for inner in getattr(node, where, ()):
            yield inner
            yield from statements(inner)


def imported(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every module that ``source`` may import, wherever the statement stands."""
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            base_name = ".".join([*base, *([node.module] if node.module else [])])
            # `from tilescale import env` imports tilescale.env where there is such a module, tilescale's own
            # name otherwise.
            for alias in node.names:
                name = f"{base_name}.{alias.name}"
                yield node.lineno, name if is_module(name) else base_name


def is_module(name: str) -> bool:
    if not name.startswith("tilescale."):
        return False
    for folder, root in FOLDERS.items():
        if root != "tilescale" and (name == root or name.startswith(root + ".")):
            path = ROOT / folder / Path(*name[len(root) + 1 :].split("."))
            break
    else:
        path = ROOT / Path(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


@functools.cache
def module_of(source: str, file: str) -> tuple[str, list[tuple[int, str]]]:
    """The module that a file (relative to the root) is, and what it may import, each once."""
    path = Path(file)
    inner = path.with_suffix("").parts[1:]
    is_package = bool(inner) and inner[-1] == "__init__"
    module = ".".join([FOLDERS[path.parts[0]], *(inner[:-1] if is_package else inner)])
    return module, list(dict.fromkeys(imported(source, module, is_package)))


def violations(source: str, file: str) -> list[str]:
    """What is wrong with the imports of ``source`` as the file ``file`` (relative to the root), one line
    each."""
    module, names = module_of(source, file)
    found = []
    for line, name in names:
        top = name.split(".")[0]
        if top == "tilescale" and part(name) not in ALLOWED[part(module)] | {part(module)}:
            found.append(f"{file}:{line}: {part(module)} may not import {name}")
        if top in ("compiler", "comm", "launch") and (ROOT / top).is_dir():
            found.append(f"{file}:{line}: {name} is installed as tilescale.{name}")
        if top == "tvm" and file != TVM_DOOR:
            found.append(f"{file}:{line}: TVM is imported by {TVM_DOOR} alone")
        if top == "torch" and part(module) == "tilescale.compiler":
            found.append(f"{file}:{line}: the compiler does not know torch")
    return found


def test_the_sources_import_one_way():
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found += violations(path.read_text(), str(path.relative_to(ROOT)))
    assert not found, "\n".join(found)


def inner_violations(source: str, file: str) -> list[str]:
    """The same of the packages inside compiler/ and of what lies in tilescale/, by their tables."""
    module, names = module_of(source, file)
    above, table, free = (
        (["tilescale", "compiler"], COMPILER, {"tvm_compat"}) if file.startswith("compiler/")
        else (["tilescale"], RUNTIME, {leaf.split(".")[1] for leaf in LEAVES})
    )  # fmt: skip
    own = ([*module.split("."), "__init__"])[len(above)]
    if own in free:
        return []
    found = []
    for line, name in names:
        parts = [*name.split("."), "__init__"]
        other = parts[len(above)] if parts[: len(above)] == above else ""
        if other in table and other not in table[own] | {own, *free}:
            found.append(f"{file}:{line}: {'/'.join([*above[-1:], own])} may not import {name}")
    return found


def is_in_order(table: dict[str, set[str]]) -> bool:
    """Whether each may import what lies above it alone, so that there is no circle."""
    names = list(table)
    return all(names.index(b) < names.index(a) for a, allowed in table.items() for b in allowed)


def test_the_runtime_imports_one_way():
    assert is_in_order(RUNTIME)
    there = {p.stem for p in (ROOT / "tilescale").glob("[_a-z]*") if p.is_dir() or p.suffix == ".py"} - {
        "__pycache__"
    }
    assert there == {*RUNTIME, *(leaf.split(".")[1] for leaf in LEAVES)}
    found = []
    for path in sorted((ROOT / "tilescale").rglob("*.py")):
        found += inner_violations(path.read_text(), str(path.relative_to(ROOT)))
    assert not found, "\n".join(found)


def test_the_packages_of_the_compiler_import_one_way():
    assert is_in_order(COMPILER)
    there = {p.stem for p in (ROOT / "compiler").glob("[a-z]*") if p.is_dir() or p.suffix == ".py"} - {
        "__pycache__"
    }
    assert there == set(COMPILER)
    found = []
    for path in sorted((ROOT / "compiler").rglob("*.py")):
        if path.parent != ROOT / "compiler" or path.stem != "__init__":
            found += inner_violations(path.read_text(), str(path.relative_to(ROOT)))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "source", "wrong"),
    [
        (
            "tilescale/profiler.py",
            "def f():\n    from tilescale.tuning import tuner",
            ":2: tilescale/profiler may not import",
        ),
        (
            "tilescale/report.py",
            "from tilescale.kernel import Kernel",
            "tilescale/report may not import tilescale.kernel",
        ),
        ("tilescale/ops/x.py", "import tilescale", "tilescale/ops may not import tilescale"),
        (
            "tilescale/__init__.py",
            "from tilescale import launching",
            "tilescale/__init__ may not import tilescale.launching",
        ),
        (
            "tilescale/ops/x.py",
            "import tilescale.language as T\nfrom tilescale import errors, jit\nfrom .case import Op",
            "",
        ),
        (
            "compiler/ir/x.py",
            "def f():\n    from tilescale.compiler.ops import base",
            ":2: compiler/ir may not import",
        ),
        (
            "compiler/passes/x.py",
            "from tilescale.compiler import cuda",
            "compiler/passes may not import tilescale.compiler.cuda",
        ),
        (
            "compiler/sim/x.py",
            "from ..passes.pipeline import run",
            "compiler/sim may not import tilescale.compiler.passes",
        ),
        (
            "compiler/cuda/x.py",
            "from tilescale.compiler.ir import source\nfrom tilescale.compiler import tvm_compat",
            "",
        ),
    ],
)
def test_the_check_of_packages(file: str, source: str, wrong: str):
    found = inner_violations(source, file)
    assert (wrong in found[0]) if wrong else not found


@pytest.mark.parametrize(
    ("file", "source", "wrong"),
    [
        (
            "compiler/passes/x.py",
            "from tilescale.comm import world",
            "tilescale.compiler may not import tilescale.comm",
        ),
        (
            "compiler/passes/x.py",
            "def f():\n    from ...comm import bootstrap",
            ":2: tilescale.compiler may not import",
        ),
        ("compiler/passes/x.py", "from tilescale import jit", "tilescale.compiler may not import tilescale"),
        ("compiler/x.py", "import torch.nn", "does not know torch"),
        ("compiler/x.py", "from tvm import tirx", "by compiler/tvm_compat.py alone"),
        ("tilescale/language/x.py", "import tvm", "by compiler/tvm_compat.py alone"),
        (
            "tilescale/jit.py",
            "from tilescale.launch import ranks",
            "tilescale may not import tilescale.launch",
        ),
        ("tilescale/jit.py", "from compiler import ir", "installed as tilescale.compiler"),
        ("comm/x.py", "import tilescale.compiler.ir", "tilescale.comm may not import tilescale.compiler"),
        ("tilescale/errors.py", "from . import env", "tilescale.errors may not import tilescale.env"),
        (
            "tilescale/native/__init__.py",
            "from ..comm import world",
            "tilescale.native may not import tilescale.comm",
        ),
        (
            "compiler/passes/x.py",
            "from tilescale import env, errors\nfrom ..ir import nodes\nfrom .. import tvm_compat",
            "",
        ),
        ("compiler/tvm_compat.py", "import tvm", ""),
        ("comm/__init__.py", "from .bootstrap import world\nimport torch", ""),
        ("launch/cli.py", "from tilescale.comm import bootstrap\nfrom . import ranks\nimport tilescale", ""),
    ],
)
def test_the_check_itself(file: str, source: str, wrong: str):
    found = violations(source, file)
    assert (wrong in found[0]) if wrong else not found


@pytest.mark.parametrize(
    "module", ["tilescale", "tilescale.language", "tilescale.comm", "tilescale.launch.cli"]
)
def test_importing_brings_neither_torch_nor_tvm(module: str, clean_env: dict[str, str]):
    code = f"import sys, {module}; print([m for m in ('torch', 'tvm', 'tvm_ffi') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean_env, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
