"""A program's measurements, apart from its run: TileLang's examples have a function for them, and files that call
it. Programs of one run measure one after the other."""

from __future__ import annotations

import ast
import fcntl
import importlib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENTRY = "run_regression_perf"
_HELD: list[Any] = []


def gate(lock: str | None) -> None:
    """Until no other program of this run has the GPU; it is this one's until the process ends. Imports are done
    before it, so that they overlap with what another program measures."""
    import torch

    torch.zeros(1, device="cuda")  # a context
    if lock is not None:
        _HELD.append(open(lock, "a"))
        fcntl.flock(_HELD[-1], fcntl.LOCK_EX)


def calls(path: Path) -> list[dict[str, str]]:
    """The keywords, as expressions, by which regression_*.py beside a program call its entry; one call without any
    where none does."""
    found: list[dict[str, str]] = []
    for beside in sorted(path.parent.glob("regression_*.py")):
        for node in ast.walk(ast.parse(beside.read_text())):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).endswith("process_func")
                and node.args
                and ast.unparse(node.args[0]) == f"{path.stem}.{ENTRY}"
            ):
                found.append({k.arg: ast.unparse(k.value) for k in node.keywords if k.arg})
    return found or [{}]


def of_program(module: dict[str, Any], path: Path, say: Callable[..., None]) -> bool:
    """Calls a program's measurements; whether it has any."""
    entry = module.get(ENTRY)
    if entry is None:
        return False
    for keywords in calls(path):
        try:
            entry(
                **{
                    k: eval(v, {**module, "torch": importlib.import_module("torch")})
                    for k, v in keywords.items()
                }
            )
        except BaseException as error:  # noqa: BLE001  # the table has it
            say(kind="measurement", failed=f"{type(error).__name__}: {error}"[:400])
            say(kind="traceback", text=traceback.format_exc()[-3000:])
    return True
