"""From a traced kernel to its code and what the runtime must know of it: the one place that runs every stage.

`compile_program` runs the passes, the target's lowering and its compiler, and returns an `Artifact`:
everything that a later process needs to call the kernel without TVM, as plain integers, strings and dicts.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import threading
from pathlib import Path
from typing import Any

from tilescale.compiler import static
from tilescale.compiler.backend import Backend, Lowered
from tilescale.compiler.description import Artifact
from tilescale.compiler.ir.added import mark_added
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.source import location

#: target → the module of its back end, which is loaded when it is first asked for
BACKENDS = {"cpu": "tilescale.compiler.cpu.backend", "cuda": "tilescale.compiler.cuda.backend"}

# Passes keep state while they run, and TVM's analyzers are not meant for several threads.
_lock = threading.RLock()


def backend(target: str) -> Backend[Any]:
    """The back end of a target, written ``"cpu"`` or, with its architecture, ``"cuda:sm_90a"``."""
    name, _, arch = target.partition(":")
    made: Backend[Any] = importlib.import_module(BACKENDS[name]).Backend(arch)
    return made


def lower(
    program: TileProgram, target: str = "cpu", *, instrument: bool = False, keep: bool = False
) -> Lowered[Any]:
    """Passes and lowering, each step verified. ``keep``: the trace keeps every step's text.

    Raises:
        TileError: the program cannot run on the target; InternalError: a pass broke it.
    """
    with _lock:
        return backend(target).lower(program, instrument=instrument, keep=keep)


def compile_program(
    program: TileProgram,
    path: str | os.PathLike[str],
    *,
    target: str = "cpu",
    instrument: bool = False,
    fingerprint: int | None = None,
    world: int | None = None,
) -> Artifact:
    """Compiles a traced kernel to the file ``path``: a shared object, or a GPU's code.

    Args:
        program: what `frontend.trace` returns.
        target: see `backend`.
        instrument: log remote operations and waits (tilescale.native.events).
        fingerprint: what ranks compare when they launch together; by default made from the tile IR.
        world: on how many ranks the kernel will run at most, for the static checks; open without. What is
            wrong on every number up to it stops the compilation; of a kernel in which ranks meet,
            ``meta["on_ranks"]`` has what is wrong on just so many.

    Raises:
        TileError: anything that the target refuses, and what the static checks refute, placed in the user's
        source.
    """
    with _lock:
        lowered = lower(program, target, instrument=instrument)
        # Behind the refusals of the passes, which say the same of constants, and before the code.
        known = static.require(program, world=world)
        made = backend(target)
        number = _own_fingerprint(program) if fingerprint is None else fingerprint
        artifact = made.describe(lowered, instrument=instrument, fingerprint=number)
        artifact.meta |= made.build(lowered, Path(path))
        mark_added(program, artifact.meta)
        if known.cut_short:
            artifact.meta["notes"] = [*artifact.meta.get("notes", ()), known.unfinished()]
        if artifact.meta["collective"]:
            artifact.meta["on_ranks"] = {} if world is None else on_ranks(program, world)
        return artifact


def on_ranks(program: TileProgram, ranks: int) -> dict[str, Any]:
    """``{str(ranks): what the static checks refuse of a launch on just so many}``, as JSON: TileValueError's
    arguments, or None."""
    with _lock:
        found = static.first_refuted(program, ranks)
    if found is None:
        return {str(ranks): None}
    error = found.error()
    return {
        str(ranks): {
            "message": error.message,
            "loc": location(error.loc),
            "expected": error.expected,
            "hint": error.hint,
        }
    }


def _own_fingerprint(program: TileProgram) -> int:
    digest = hashlib.blake2b(f"{program.name}\n{program.func.script()}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


# ---- for people


def source_text(program: TileProgram, kind: str, target: str = "cpu", *, instrument: bool = False) -> str:
    """A kernel as text: ``tile`` (as traced), ``scheduled``, ``thread`` (loops and indices), or one of the
    target's own ``texts``."""
    if kind == "tile":
        return str(program.func.script())
    lowered = lower(program, target, instrument=instrument)
    if kind == "scheduled":
        return str(lowered.program.func.script())
    if kind == "thread":
        return "\n".join(f"# {name}\n{func.script()}" for name, func in lowered.funcs.items())
    with _lock:
        return backend(target).text(lowered, kind)


def steps(program: TileProgram, target: str = "cpu", *, instrument: bool = False) -> list[tuple[str, str]]:
    """``(name, text)`` of the program as traced, after every pass, and lowered."""
    lowered = lower(program, target, instrument=instrument, keep=True)
    out = [(step.name, step.text) for step in lowered.trace.steps]
    return [*out, *((f"lower:{name}", func.script()) for name, func in lowered.funcs.items())]
