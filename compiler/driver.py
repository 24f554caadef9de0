"""From a traced kernel to a shared object and what the runtime must know of it: the one place that runs every stage.

`compile_program` runs the passes, the target's lowering and LLVM, and returns an `Artifact`: everything that a later process needs to
call the kernel without TVM, as plain integers, strings and dicts.
"""

from __future__ import annotations

import hashlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilescale.compiler import static
from tilescale.compiler.cpu import codegen
from tilescale.compiler.cpu.lower import Lowering
from tilescale.compiler.ir import spec as levels
from tilescale.compiler.ir.buffers import written_buffers
from tilescale.compiler.ops.print import dtype_code
from tilescale.compiler.passes import pipeline
from tilescale.compiler.passes.residency import waits_for_blocks
from tilescale.errors import Loc, TileValueError
from tilescale.language.annotations import TensorSpec
from tilescale.language.symbolic import Sym, SymExpr, settle

#: The runtime's contract (docs/ARCHITECTURE.md): kinds of parameters, rules of extents, flags of a kernel.
KINDS = {"tensor": 0, "int": 1, "float": 2, "symm": 3, "signal": 4}
SIGNAL_KEPT = 5
EQUALS, DEFINES, SAME, UNCHECKED = 0, 1, 2, 3
WAITS, DEVICE, UNORDERED, CLUSTER, INSTRUMENTED, LOCAL = 1, 2, 4, 8, 16, 32

# Passes keep state while they run, and TVM's analyzers are not meant for several threads.
_lock = threading.RLock()


@dataclass
class Artifact:
    """A compiled kernel beside its shared object. ``meta`` is JSON: what `tilescale.kernel` needs to call it and to explain refusals."""

    meta: dict[str, Any]
    desc: list[int]
    sites: list[str]


@dataclass
class Lowered:
    """A kernel as thread IR, with the program it came from at the scheduled level."""

    program: Any
    lowering: Lowering
    funcs: dict[str, Any]
    trace: pipeline.Trace


def lower(program: Any, *, instrument: bool = False, keep: bool = False) -> Lowered:
    """Passes and lowering, each step verified. ``keep``: the trace keeps every step's text.

    Raises:
        TileError: the program cannot run on the target; InternalError: a pass broke it.
    """
    with _lock:
        scheduled, trace = pipeline.run(program, keep=keep)
        lowering = Lowering(scheduled, instrument=instrument)
        funcs = lowering.run()
        for name, func in funcs.items():
            levels.verify(func, levels.THREAD, f"lowering of {name}")
        return Lowered(scheduled, lowering, funcs, trace)


def compile_program(
    program: Any, path: str | os.PathLike[str], *, instrument: bool = False, fingerprint: int | None = None,
    ranks: int | None = None, world: int | None = None,
) -> Artifact:  # fmt: skip
    """Compiles a traced kernel to the shared object ``path``.

    Args:
        program: what `frontend.trace` returns.
        instrument: log remote operations and waits (tilescale.native.events).
        fingerprint: what ranks compare when they launch together; by default made from the tile IR.
        ranks, world: on how many ranks the kernel will run, and on how many at most, for the static checks; open without.

    Raises:
        TileError: anything that the target refuses, and what the static checks refute, placed in the user's source.
    """
    with _lock:
        lowered = lower(program, instrument=instrument)
        static.require(program, ranks, world)  # behind the refusals of the passes, which say the same of what is constant, and before LLVM
        artifact = describe(lowered, instrument, _own_fingerprint(program) if fingerprint is None else fingerprint)
        codegen.build_shared(lowered.funcs, Path(path))
        return artifact


def _own_fingerprint(program: Any) -> int:
    digest = hashlib.blake2b(f"{program.name}\n{program.func.script()}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


# ---- the description


class Symbols:
    """Where each symbolic extent gets its value: the first extent or stride, in order of parameters, that is it alone."""

    def __init__(self, program: Any):
        self.slots = {name: k for k, name in enumerate(program.symbols)}
        self.defined: set[str] = set()

    def rule(self, value: Any) -> tuple[int, int]:
        """``(how, value)`` of one extent or stride."""
        known = settle(value)
        if isinstance(known, int):
            return EQUALS, known
        if isinstance(known, Sym):
            slot = self.slots[known.name]
            if known.name in self.defined:
                return SAME, slot
            self.defined.add(known.name)
            return DEFINES, slot
        return UNCHECKED, 0  # an expression: the kernel object computes and compares it


def describe(lowered: Lowered, instrument: bool, fingerprint: int) -> Artifact:
    """The runtime's description of a kernel, and what Python keeps of it."""
    program, low = lowered.program, lowered.lowering
    written = written_parameters(program)
    symbols = Symbols(program)
    desc: list[int] = []
    params: list[dict[str, Any]] = []
    for k, p in enumerate(program.params):
        desc += _parameter(p, k in written, symbols)
        params.append(_metadata(p, k in written))
    _require_defined(program, symbols)
    launch = program.launch
    clustered = launch.cluster != (1, 1, 1)
    flags = (WAITS * low.waits) | (DEVICE * low.device) | (CLUSTER * clustered) | (INSTRUMENTED * instrument)
    flags |= UNORDERED * (not launch.ordered) | LOCAL * (not waits_for_blocks(program.func.body))
    head = [1, len(program.params), len(program.symbols), low.arena_bytes, launch.threads, flags, *launch.cluster, launch.max_blocks]
    head += [low.shared_bytes, len(low.regions), fingerprint]
    meta = {
        "name": program.name,
        "params": params,
        "symbols": list(program.symbols),
        "returns": list(program.returns),
        "loc": _loc(program.loc),
        "launch_loc": _loc(launch.loc),
        "collective": bool(low.device) or any(p["kind"] in ("symm", "signal") for p in params),
        "threads": launch.threads,
        "shared_bytes": low.shared_bytes,
    }
    sites = [*low.sites, *(f"param|{p.name}|||" for p in program.params)]
    return Artifact(meta, head + desc, sites)


def _parameter(p: Any, written: bool, symbols: Symbols) -> list[int]:
    code, bits = divmod(dtype_code(str(p.spec.dtype)), 256)
    if not isinstance(p.spec, TensorSpec):
        return [KINDS["float" if p.spec.dtype.is_float else "int"], code, bits, 0, 0, 0]
    kind = SIGNAL_KEPT if p.spec.kind == "signal" and p.spec.keep else KINDS[p.spec.kind]
    out = [kind, code, bits, int(written), len(p.spec.shape)]
    for extent in p.spec.shape:
        out += symbols.rule(extent)
    out.append(0 if p.spec.strides is None else 1)
    for stride in p.spec.strides or ():
        out += symbols.rule(stride)
    return out


def _require_defined(program: Any, symbols: Symbols) -> None:
    for name in program.symbols:
        if name not in symbols.defined:
            raise TileValueError(
                f"T.dynamic({name!r}) stands alone in no extent or stride of a parameter of {program.name}, so no call says what it is",
                loc=program.loc,
                expected=f"a tensor parameter with {name} itself as an extent, before any with an expression of it",
            )


def _metadata(p: Any, written: bool) -> dict[str, Any]:
    out: dict[str, Any] = {"name": p.name, "dtype": str(p.spec.dtype), "loc": _loc(p.loc), "written": written, "output": p.output}
    if not isinstance(p.spec, TensorSpec):
        return {**out, "kind": "scalar"}
    strides = None if p.spec.strides is None else [expression(s) for s in p.spec.strides]
    return {**out, "kind": p.spec.kind, "shape": [expression(s) for s in p.spec.shape], "strides": strides}


def expression(value: Any) -> Any:
    """A symbolic extent as JSON: an int, a symbol's name, or [operator, a, b]."""
    known = settle(value)
    if isinstance(known, Sym):
        return known.name
    if isinstance(known, SymExpr):
        return [known.op, *(expression(a) for a in known.args)]
    return int(known)


def _loc(loc: Loc | None) -> list[Any] | None:
    return None if loc is None else [loc.file, loc.line, loc.col, loc.end_line, loc.end_col]


def written_parameters(program: Any) -> set[int]:
    """Parameters that the kernel may write."""
    touched = written_buffers(program)
    return {k for k, p in enumerate(program.params) if p.var in touched}


# ---- for people


def source_text(program: Any, kind: str, *, instrument: bool = False) -> str:
    """A kernel as text: ``tile`` (as traced), ``scheduled``, ``thread`` (what LLVM gets), ``llvm`` or ``asm`` (optimised)."""
    if kind == "tile":
        return program.func.script()
    lowered = lower(program, instrument=instrument)
    if kind == "scheduled":
        return lowered.program.func.script()
    if kind == "thread":
        return "\n".join(f"# {name}\n{func.script()}" for name, func in lowered.funcs.items())
    with _lock:
        return codegen.get_llvm_ir(lowered.funcs) if kind == "llvm" else codegen.get_asm(lowered.funcs)


def steps(program: Any, *, instrument: bool = False) -> list[tuple[str, str]]:
    """``(name, text)`` of the program as traced, after every pass, and lowered."""
    lowered = lower(program, instrument=instrument, keep=True)
    out = [(name, text) for name, text, _ in lowered.trace.steps]
    return [*out, *((f"lower:{name}", func.script()) for name, func in lowered.funcs.items())]
