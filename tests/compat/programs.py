"""Which programs of a TileLang checkout are tried, which kernels they have, and their import lines
changed."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

#: what a path, or a kernel's file, says of the machine that it is for: (pattern, why it is left out)
ELSEWHERE = (
    (r"(^|/)amd/|_amd|mfma|cdna|rocm", "AMD"),
    (r"sm100|sm120|tcgen0?5|deepseek_v4/fp8_fp4", "Blackwell"),
    (r"(^|/)aws/", "Trainium"),
    (r"(^|/)iket/", "TileLang's own tools for traces"),
)
_IMPORT = re.compile(
    r"^(?P<pad>\s*)(?:from\s+(?P<source>tilelang(?:\.[\w.]+)?)\s+import\s+(?P<names>.*)"
    r"|import\s+(?P<module>tilelang(?:\.[\w.]+)?)(?:\s+as\s+(?P<alias>\w+))?\s*(?P<rest>#.*)?)$"
)


@dataclass
class Program:
    """One file: its path within examples/, the kernels in it, and why it is not tried."""

    path: str
    kernels: list[str] = field(default_factory=list)
    left_out: str | None = None
    tests: bool = False


def changed_line(line: str) -> str:
    """An import line of TileLang's, or of its TVM's expressions, as one of TileScale's; any other line as it
    is."""
    if line.strip() == "from tvm import tirx":  # TileLang's own copy of TVM
        return line.replace("from tvm", "from tilescale.compiler.tvm_compat")
    found = _IMPORT.match(line)
    if found is None:
        return line
    pad = found["pad"]
    if found["source"] is not None:
        return f"{pad}from tilescale{found['source'][len('tilelang') :]} import {found['names']}"
    module = "tilescale" + found["module"][len("tilelang") :]
    if found["alias"]:
        return f"{pad}import {module} as {found['alias']}"
    # `import tilelang.testing` gives the name of the package: so does this.
    more = "" if module == "tilescale" else f"import {module}; "
    return f"{pad}{more}import tilescale as tilelang"


def changed(text: str) -> str:
    """A program with its import lines changed, and nothing else."""
    return "\n".join(map(changed_line, text.split("\n")))


def uses_tilelang(text: str) -> bool:
    return any(_IMPORT.match(line) for line in text.split("\n"))


def kernels_of(text: str) -> list[str]:
    """Qualified names of functions that a jit makes kernels of, and of prim_funcs outside of such
    functions."""
    found: list[str] = []

    def visit(node: ast.AST, prefix: str, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                words = [ast.unparse(d) for d in child.decorator_list]
                jitted = any(re.match(r"((tilelang|tl)\.)?(lazy_)?jit\b", w) for w in words)
                plain = any(re.match(r"(T\.)?prim_func\b", w) for w in words)
                if jitted or (plain and not inside):
                    found.append(prefix + child.name)
                visit(child, f"{prefix}{child.name}.<locals>.", inside or jitted or plain)
            elif isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.", inside)
            else:
                visit(child, prefix, inside)

    visit(ast.parse(text), "", False)
    return found


def programs(examples: Path) -> list[Program]:
    """Every Python file below ``examples`` that imports TileLang, in the order of their paths."""
    out = []
    for path in sorted(examples.rglob("*.py")):
        text = path.read_text()
        name = path.relative_to(examples).as_posix()
        if not uses_tilelang(text) or path.name.startswith("regression_"):
            continue
        why = next((why for pattern, why in ELSEWHERE if re.search(pattern, name)), None)
        out.append(Program(name, kernels_of(text), why, path.name.startswith("test_")))
    return out


def copy(checkout: Path, to: Path, change: bool = True) -> None:
    """The checkout's examples in the folder ``to``, with the import lines changed or not."""
    examples = checkout / "examples"
    for path in sorted(examples.rglob("*")):
        if path.is_dir() or path.stat().st_size > 4 << 20:
            continue
        target = to / path.relative_to(examples)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".py" and change:
            target.write_text(changed(path.read_text()))
        elif path.suffix in (".py", ".json", ".txt", ".h", ".cu", ".cpp", ".ini", ".csv"):
            target.write_bytes(path.read_bytes())
