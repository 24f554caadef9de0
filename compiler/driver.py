"""From a traced program to a shared object and what its launcher must know, as plain data: nothing here outlives the process unasked."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilescale.compiler.cpu.codegen import build_shared
from tilescale.compiler.cpu.lower import Lowering
from tilescale.compiler.frontend.trace import TileProgram
from tilescale.compiler.ir import spec
from tilescale.compiler.ops import base
from tilescale.compiler.ops.print import dtype_code
from tilescale.compiler.passes import pipeline
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx
from tilescale.errors import TileValueError
from tilescale.language.symbolic import Sym, SymExpr

DESC_VERSION = 1
WAITS, DEVICE, UNORDERED, CLUSTER, INSTRUMENTED = 1, 2, 4, 8, 16
_TENSOR_KINDS = {"tensor": 0, "symm": 3, "signal": 4}


@dataclass
class Compiled:
    """Everything about a compiled kernel that is not machine code, JSON-able except for ``desc``.

    ``params``: one dict each with name, kind, dtype, shape (ints, symbol names or expressions as text), strides, output, loc.
    """

    name: str
    desc: bytes
    sites: str
    params: list[dict[str, Any]]
    returns: list[int]
    source: str
    loc: tuple[str, int]


def compile_cpu(program: TileProgram, path: Path, *, instrument: bool = False, fingerprint: int = 0) -> Compiled:
    """Compiles a traced program for this machine's processor into the shared object ``path``.

    Raises:
        TileError: what the passes refuse.
    """
    scheduled, _ = pipeline.run(program)
    lowering = Lowering(scheduled, instrument=instrument)
    functions = lowering.run()
    for func in functions.values():
        spec.verify(func, spec.THREAD, "lowering")
    build_shared(functions, path)
    source = "\n".join(f"# {name}\n{func.script()}" for name, func in functions.items())
    return Compiled(
        program.name,
        descriptor(program, lowering, instrument, fingerprint or _fingerprint(program)),
        "\n".join(lowering.sites),
        [describe(p) for p in program.params],
        list(program.returns),
        source,
        (program.loc.file, program.loc.line),
    )


def thread_functions(program: TileProgram) -> dict[str, Any]:
    """A traced program's functions of thread IR."""
    scheduled, _ = pipeline.run(program)
    return Lowering(scheduled).run()


def _fingerprint(program: TileProgram) -> int:
    """The kernel and its constants in 63 bits: what ranks compare when they meet."""
    digest = hashlib.sha256(program.func.script().encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def written(program: TileProgram) -> set[Any]:
    """The buffers that a program writes, by its operations' effect tables."""
    found: set[Any] = set()

    def look(call: Any) -> None:
        op = base.find(call)
        if op is not None:
            found.update(a.region.source for a in op.effects(call) if a.mode != "read")

    structural_walk(program.func.body, (ir.Call, look))
    structural_walk(program.func.body, (tirx.BufferStore, lambda s: found.add(s.buffer)))
    views: list[tuple[Any, Any]] = []
    structural_walk(program.func.body, (tirx.DeclBuffer, lambda s: views.append((s.buffer, s.data.args[0]))))
    for view, owner in reversed(views):
        if view in found:
            found.add(owner)
    return found


def descriptor(program: TileProgram, lowering: Lowering, instrument: bool, fingerprint: int) -> bytes:
    """The launcher's table (docs/ARCHITECTURE.md, "The runtime's contract")."""
    launch = program.launch
    flags = (WAITS if lowering.waits else 0) | (DEVICE if lowering.device else 0) | (INSTRUMENTED if instrument else 0)
    flags |= (0 if launch.ordered else UNORDERED) | (CLUSTER if launch.cluster != (1, 1, 1) else 0)
    head = [
        DESC_VERSION, len(program.params), len(program.symbols), lowering.arena_bytes, launch.threads, flags, *launch.cluster,
        launch.max_blocks, lowering.shared_bytes, len(lowering.regions), fingerprint,
    ]  # fmt: skip
    outputs, defined = written(program), set[str]()
    order = list(program.symbols)
    for p in program.params:
        code, bits = divmod(dtype_code(str(p.spec.dtype)), 256)
        if not hasattr(p.spec, "shape"):
            head += [2 if "float" in p.spec.dtype else 1, code, bits, 0, 0, 0]
            continue
        kind = 5 if p.spec.keep else _TENSOR_KINDS[p.spec.kind]
        head += [kind, code, bits, int(p.var in outputs), len(p.spec.shape)]
        for extent in p.spec.shape:
            head += _dimension(extent, order, defined)
        if p.spec.strides is None:
            head += [0]
        else:
            head += [1]
            for stride in p.spec.strides:
                head += _dimension(stride, order, defined)
    missing = [s for s in order if s not in defined]
    if missing:
        raise TileValueError(
            f"no tensor's shape says what {missing[0]!r} is", loc=program.loc, hint=f"use T.dynamic({missing[0]!r}) alone as an extent"
        )
    return struct.pack(f"<{len(head)}q", *head)


def _dimension(extent: Any, order: list[str], defined: set[str]) -> list[int]:
    if isinstance(extent, int):
        return [0, extent]
    if isinstance(extent, Sym):
        if extent.name in defined:
            return [2, order.index(extent.name)]
        defined.add(extent.name)
        return [1, order.index(extent.name)]
    return [3, 0]


def describe(p: Any) -> dict[str, Any]:
    """A parameter as plain data."""
    out: dict[str, Any] = {"name": p.name, "dtype": str(p.spec.dtype), "output": p.output, "loc": None}
    if p.loc is not None:
        out["loc"] = [p.loc.file, p.loc.line, p.loc.col, p.loc.end_line, p.loc.end_col]
    if hasattr(p.spec, "shape"):
        out["kind"] = p.spec.kind
        out["shape"] = [_plain(s) for s in p.spec.shape]
        out["strides"] = None if p.spec.strides is None else [_plain(s) for s in p.spec.strides]
    else:
        out["kind"] = "scalar"
    return out


def _plain(extent: Any) -> Any:
    """An extent as an int, or as a nested list [op, a, b] over symbol names."""
    if isinstance(extent, Sym):
        return extent.name
    if isinstance(extent, SymExpr):
        return [extent.op, *map(_plain, extent.args)]
    return int(extent)
