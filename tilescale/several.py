"""A kernel whose calls make several launches, one after the other: one ``with T.Kernel(…)`` each. Kernels
in files, of one launch or several."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilescale.arrays import arguments
from tilescale.errors import TileError
from tilescale.kernel import Kernel

if TYPE_CHECKING:
    from tilescale.compiler.findings import Report
    from tilescale.compiler.ir.program import TileProgram


class Several(Kernel):
    """The first launch, and those behind it. The first allocates what a call allocates; all get the same
    tensors. On a GPU they go to one stream, so that each comes behind the one before it.

    Attributes:
        parts: all launches, each a `Kernel`. Others are the first one's.
    """

    def __init__(self, first: Kernel, rest: list[Kernel]):
        self.__dict__.update(first.__dict__)
        self.parts = [_allocating(first), *(_given(k) for k in rest)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            args = self._positional(args, kwargs)
        made = self.parts[0](*args)
        allocated = () if not self.out_idx else made if isinstance(made, tuple) else (made,)
        full: list[Any] = [None] * len(self.params)
        for k, value in (*zip(self._inputs, args, strict=True), *zip(self.out_idx, allocated, strict=True)):
            full[k] = value
        for part in self.parts[1:]:
            part(*full)
        results = tuple(full[k] for k in self.returns)
        return results if len(results) > 1 else results[0] if results else None

    def get_kernel_source(self, kind: str | None = None, kernel_only: bool | None = None) -> str:
        """The texts of all launches, in their order."""
        return "\n".join(part.get_kernel_source(kind, kernel_only) for part in self.parts)

    def trace(self) -> list[tuple[str, str]]:
        return [step for part in self.parts for step in part.trace()]

    def check(self, ranks: int = 1, args: dict[str, Any] | None = None, **words: Any) -> Report:
        """`Kernel.check` of each launch in its order, on what the ones before it leave behind when they run
        in turn. It ends with the first launch that has findings: those behind it would run on its results."""
        import numpy

        from tilescale.compiler.checks.run import launch

        given, report = arguments(args or {}), None
        for k, part in enumerate(self.parts):
            found = part.check(ranks, given, **words)
            if report is None:
                report = found
            else:
                report.behind(found)
            if not found or k + 1 == len(self.parts):
                break
            left = launch(part.program(), ranks, given)
            for p in self.params:
                if p["kind"] in ("tensor", "symm"):
                    given[p["name"]] = [
                        numpy.ma.masked_array(array[p["name"]], unwritten.get(p["name"], False))
                        for array, unwritten in zip(left.arrays, left.unwritten, strict=True)
                    ]
        assert report is not None
        return report

    def export(self, path: str | os.PathLike[str]) -> Path:
        """See `Kernel.export`: one file holds all launches."""
        from tilescale import export

        return export.save_all(self.parts, self.returns, path)


def _allocating(kernel: Kernel) -> Kernel:
    """The same kernel, giving back all that it allocates."""
    return kernel.again(kernel.out_idx, kernel.out_idx)


def _given(kernel: Kernel) -> Kernel:
    """The same kernel, which is given everything."""
    return kernel.again((), ())


def load(path: str | os.PathLike[str]) -> Kernel:
    """The kernel in a file that `Kernel.export` wrote. It is called like the one that was exported, and knows
    its parameters, resources and errors; what needs the program (`trace`, `check`, most kinds of
    `get_kernel_source`) raises TileError.

    Raises:
        TileValueError: no such file, not one of ours, or damaged; made by another version of TileScale, for
            another processor or GPU than this machine's.
    """
    from tilescale import export

    where = Path(path)
    if (many := export.launches(where)) is not None:
        first, *rest = (_loaded(file, where) for file in many[0])
        return Several(first.again(first.out_idx, many[1]), rest)
    return _loaded(where, where)


def _loaded(file: Path, where: Path) -> Kernel:
    """The kernel of one launch in ``file``, which is ``where`` for people."""
    from tilescale import export

    entry, head, texts = export.read(file)
    made = Kernel(
        entry,
        head["label"],
        _no_program(where),
        out_idx=head["out_idx"],
        returns=head["returns"],
        from_cache=True,
        instrument=head["instrument"],
    )
    made.config, made.latency, made.has_program = head["config"], head["latency"], False
    made.texts.update(texts)
    return made


def _no_program(where: Path) -> Callable[[], TileProgram]:
    def program() -> TileProgram:
        raise TileError(
            f"the kernel was loaded from {where}, which holds its code and not its program",
            hint="compile it from its source",
        )

    return program
