"""What a job runs, and what of it ranks can share: the modules that it imports before it does anything else.

Ranks of a Python program are forked from the launcher, which has imported these modules once. Nothing of the
program itself runs there: its text is read, and so is that of modules in its own folder.
"""

from __future__ import annotations

import ast
import io
import sys
from dataclasses import dataclass
from pathlib import Path

#: packages that the launcher imports for the ranks: large, and without effects that depend on who imports
#: them
SHARED = ("numpy", "torch", "ml_dtypes", "tilescale")


@dataclass(frozen=True)
class Program:
    """``kind``: "script", "module" (as in `python -m`) or "executable"."""

    kind: str
    name: str
    args: tuple[str, ...] = ()

    @property
    def argv(self) -> list[str]:
        """The command that runs it in a process of its own."""
        python = {"script": [sys.executable], "module": [sys.executable, "-m"], "executable": []}[self.kind]
        return [*python, self.name, *self.args]

    def folder(self) -> Path:
        """Where its own modules lie: what Python puts first on sys.path."""
        return Path.cwd() if self.kind == "module" else Path(self.name).resolve().parent

    def source(self) -> Path | None:
        """Its file of Python source; None where it has none, or none that can be found without running
        code."""
        if self.kind == "script":
            path = Path(self.name)
        elif self.kind == "module":
            path = self.folder().joinpath(*self.name.split(".")).with_suffix(".py")
        else:
            return None
        return path if path.is_file() and _tree(path) is not None else None

    def shared(self) -> list[str]:
        """Which of SHARED it imports before it does anything else, in that order."""
        source = self.source()
        found: list[str] = []
        if source is not None:
            _collect(source, self.folder(), found, set())
        return found


def _tree(path: Path) -> ast.Module | None:
    """None for what is no Python source: an archive, byte code, a syntax error. Python itself says what is
    wrong with it."""
    try:
        with io.open_code(str(path)) as file:
            return ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _collect(path: Path, folder: Path, found: list[str], seen: set[Path]) -> bool:
    """Adds what a file imports; False where it stops at a statement that may change what later imports do,
    such as ``os.environ["OMP_NUM_THREADS"] = "4"``."""
    seen.add(path)
    tree = _tree(path)
    if tree is None:
        return False
    for node in tree.body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if node.level == 0 else []
        elif _is_harmless(node):
            continue
        else:
            return False
        for name in names:
            top = name.partition(".")[0]
            local = next(
                (p for p in (folder / f"{top}.py", folder / top / "__init__.py") if p.is_file()), None
            )
            if local is not None:
                if local not in seen and not _collect(local, folder, found, seen):
                    return False
            elif top in SHARED and top not in found:
                found.append(top)
    return True


def _is_harmless(node: ast.stmt) -> bool:
    """Definitions, constants, texts, and what is done to sys.path."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return True
    if isinstance(node, ast.Expr):
        if isinstance(node.value, ast.Call):
            return ast.unparse(node.value.func).startswith("sys.path.")
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Assign):
        targets = [
            name
            for target in node.targets
            for name in (target.elts if isinstance(target, ast.Tuple) else [target])
        ]
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    else:
        return False
    calls = node.value is not None and any(isinstance(part, ast.Call) for part in ast.walk(node.value))
    return not calls and all(isinstance(target, ast.Name) for target in targets)
