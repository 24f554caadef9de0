"""Kernels for tests: compiles a ``@T.prim_func`` through the whole pipeline, at a chosen depth of its rings,
into a callable.

run(kernel)(a, b)                 # the kernel as users get it run(kernel, depth=3)(a, b)        # with rings
of up to three stages, as targets with asynchronous copies have them
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tilescale.errors import TileError


@contextlib.contextmanager
def ring_depth(depth: int) -> Iterator[None]:
    """Inside, the schedule makes rings of up to ``depth`` stages, as a target with asynchronous copies asks
    for."""
    from tilescale.compiler.passes import pipeline
    from tilescale.compiler.passes.schedule import schedule

    before = pipeline.PASSES
    pipeline.PASSES = tuple(
        replace(p, run=partial(schedule, depth=depth)) if p.name == "schedule" else p for p in before
    )
    try:
        yield
    finally:
        pipeline.PASSES = before


def instead_of_kernels(monkeypatch: pytest.MonkeyPatch, launch: Callable[..., None]) -> None:
    """``launch(factory, args, **constants)`` in the place of every launch of the library's own kernels, also
    of calls whose kernels were taken before."""
    from tilescale.ops import host
    from tilescale.ops.prepared import Plans

    def kernel(factory: Callable[..., Any], target: str, **constants: Any) -> Callable[..., None]:
        return lambda *args: launch(factory, args, **constants)

    monkeypatch.setattr(host, "kernel", kernel)
    monkeypatch.setattr(Plans, "of", lambda self, key, make: make())


def scheduled(prim: Any, depth: int = 1) -> Any:
    """The program at the scheduled level, verified after every pass."""
    from tilescale.compiler.passes import pipeline

    with ring_depth(depth):
        return pipeline.run(prim.trace())[0]


def run(prim: Any, depth: int = 1, **options: Any) -> Any:
    """The kernel compiled afresh, past the disk cache (what is tested here is the compiler)."""
    from tilescale.cache import Entry
    from tilescale.compiler.driver import compile_program
    from tilescale.jit import normal_out_idx
    from tilescale.kernel import Kernel

    with tempfile.TemporaryDirectory(prefix="ts-test-") as folder, ring_depth(depth):
        path = Path(folder) / "kernel.so"
        made = compile_program(prim.trace(), path)
        entry = Entry(str(path), made.desc, made.sites, made.meta)
        out_idx = normal_out_idx(options.pop("out_idx", None), len(prim.params), prim)
        return Kernel(entry, prim.name, prim.trace, out_idx=out_idx, **options)


class refused:
    """``with refused(TileValueError, "text", at="T.copy(A, b)", write="…"):`` — the block is refused with
    this text, and the caret of the error stands under ``at`` in this very file.
    """

    def __init__(
        self,
        kind: type[TileError],
        message: str,
        *,
        at: str | None = None,
        expected: str = "",
        write: str = "",
    ):
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
            assert source[start:end] == self.at, (
                f"the caret is under {source[start:end]!r}, not {self.at!r}\n{text}"
            )
        return True
