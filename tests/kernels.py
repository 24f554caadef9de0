"""Kernels for tests: compiles a ``@T.prim_func`` through the whole pipeline, at a chosen depth of its rings, into a callable.

    run(kernel)(a, b)                 # the kernel as users get it
    run(kernel, depth=3)(a, b)        # with rings of up to three stages, as targets with asynchronous copies have them
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilescale.errors import TileError
from tilescale.language.symbolic import Const, Sym

_folder = tempfile.TemporaryDirectory(prefix="ts-test-")
_count = itertools.count()


def scheduled(prim: Any, depth: int = 1) -> Any:
    """The program at the scheduled level, verified."""
    from tilescale.compiler.ir import spec
    from tilescale.compiler.passes import pipeline
    from tilescale.compiler.passes.schedule import schedule

    program = prim.trace()
    if depth == 1:
        return pipeline.run(program)[0]
    spec.verify(program.func, spec.TILE, "trace")
    for step in pipeline.PASSES:
        program = schedule(program, depth) if step.name == "schedule" else step.run(program)
        spec.verify(program.func, step.level, step.name)
    return program


def run(prim: Any, depth: int = 1) -> Callable[..., None]:
    """The compiled kernel: call it with tensors and scalars."""
    from tilescale.compiler.cpu.codegen import build_shared
    from tilescale.compiler.cpu.lower import Lowering
    from tilescale.compiler.ir import spec
    from tilescale.native import build

    program = scheduled(prim, depth)
    lowering = Lowering(program)
    funcs = lowering.run()
    for func in funcs.values():
        spec.verify(func, spec.THREAD, "lower")
    path = Path(_folder.name) / f"k{os.getpid()}_{next(_count)}.so"
    build_shared(funcs, path)
    made = build.make_kernel(path, description(program, lowering), "\n".join(lowering.sites), prim.name)
    path.unlink()
    return made


def description(program: Any, lowering: Any) -> bytes:
    """docs/ARCHITECTURE.md, "The runtime's contract"."""
    from tilescale.compiler.ops.print import dtype_code

    kinds = {"tensor": 0, "symm": 3, "signal": 4}
    defined: set[str] = set()
    names = list(program.symbols)

    def extent(e: Any) -> list[int]:
        if isinstance(e, int):
            return [0, e]
        if isinstance(e, Const) or not isinstance(e, Sym):
            return [3, 0]
        how = 2 if e.name in defined else 1
        defined.add(e.name)
        return [how, names.index(e.name)]

    body: list[int] = []
    for p in program.params:
        code, bits = divmod(dtype_code(str(p.spec.dtype)), 256)
        if not hasattr(p.spec, "shape"):
            body += [2 if "float" in p.spec.dtype else 1, code, bits, 0, 0, 0]
            continue
        kind = 5 if p.spec.keep else kinds[p.spec.kind]
        body += [kind, code, bits, int(p.spec.kind != "tensor" or p.name[0] in "CDEF"), len(p.spec.shape)]
        for e in p.spec.shape:
            body += extent(e)
        body.append(0 if p.spec.strides is None else 1)
        for e in p.spec.strides or ():
            body += extent(e)
    launch = program.launch
    flags = int(lowering.waits) | 2 * int(lowering.device) | 4 * int(not launch.ordered) | 8 * int(launch.cluster != (1, 1, 1))
    head = [1, len(program.params), len(names), lowering.arena_bytes, launch.threads, flags, *launch.cluster]
    head += [launch.max_blocks, lowering.shared_bytes, len(lowering.regions), ctypes.c_int64(hash(program.name)).value]
    return struct.pack(f"<{len(head) + len(body)}q", *head, *body)


class refused:
    """``with refused(TileValueError, "text", at="T.copy(A, b)", write="…"):`` — the block is refused with this text, and the caret of
    the error stands under ``at`` in this very file.
    """

    def __init__(self, kind: type[TileError], message: str, *, at: str | None = None, expected: str = "", write: str = ""):
        self.kind, self.message, self.at, self.expected, self.write = kind, message, at, expected, write

    def __enter__(self) -> refused:
        return self

    def __exit__(self, kind: Any, error: Any, tb: Any) -> bool:
        if error is None:
            pytest.fail(f"nothing was refused; expected {self.kind.__name__}: {self.message}")
        if not isinstance(error, TileError):
            return False
        text = str(error)
        self.text = text
        assert isinstance(error, self.kind), text
        assert self.message in error.message, text
        assert self.expected in (error.expected or ""), text
        assert self.write in (error.hint or ""), text
        if self.at is not None:
            assert error.loc is not None, text
            lines = text.splitlines()
            assert lines[0].startswith(f"{error.loc.file}:{error.loc.line}: "), text
            source, marks = lines[1], lines[2]
            start, end = marks.index("^"), marks.rindex("^") + 1
            assert source[start:end] == self.at, f"the caret is under {source[start:end]!r}, not {self.at!r}\n{text}"
        return True
