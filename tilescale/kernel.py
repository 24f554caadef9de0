"""Kernels as people have them: called, looked at, checked, measured, kept in a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilescale import compat
from tilescale.arrays import arguments
from tilescale.errors import TileTypeError, TileValueError
from tilescale.launching import NoResources
from tilescale.tilelang_kernel import Named

if TYPE_CHECKING:
    from tilescale.compiler.findings import Report
    from tilescale.profiler import Profiler
    from tilescale.report import ResourceReport

__all__ = ["Kernel", "NoResources"]


class Kernel(Named):
    """What `tilescale.compile` and a ``@tilescale.jit`` factory return.

    ``kernel(a, b, c)``, by position or by the parameters' names. Tensors are torch's, NumPy's or anything
    with DLPack. Parameters in ``out_idx`` are left out of the call, allocated by it and returned: one as it
    is, several as a tuple.

    Attributes:
        name: the kernel's. device: its target's record (tilescale/device.py). arch: on GPUs the architecture,
            such as "sm_90a".
        params: one dict a parameter (name, kind, dtype, shape, strides, written, loc).
        out_idx, returns: indices of the parameters that calls allocate, and of those that they return.
        entry: the code and what is kept beside it. texts: sources that are known without the program, by
            kind.
        has_program: whether the kernel can be traced again: not one that was loaded from a file.
        from_cache: whether the code came from the disk. config, latency: what the autotuner chose, and its
            milliseconds.

    Raises (calls):
        TileTypeError, TileValueError: arguments that do not fit, placed at the parameter's declaration.
        LaunchError: a launch that failed while it ran, placed at the statement.
    """

    def get_kernel_source(self, kind: str | None = None, kernel_only: bool | None = None) -> str:
        """The kernel as text: ``"tile"`` (what was traced), ``"scheduled"``, ``"thread"`` (loops and
        indices); on the CPU ``"llvm"`` and ``"asm"`` (optimised), for CUDA ``"cuda"`` (C++), ``"ptx"`` and
        ``"sass"`` (machine code; needs nvdisasm or cuobjdump). Without a kind thread IR, or CUDA C++. Traces
        the kernel again; raises TileValueError for another kind. ``kernel_only`` is TileLang's word: the
        text has nothing of the host's in any case."""
        compat.unused("get_kernel_source", {"kernel_only": kernel_only})
        kind = self.device.shown if kind is None else kind
        if kind not in self.device.sources:
            raise TileValueError(
                f"get_kernel_source({kind!r})", expected="one of " + ", ".join(self.device.sources)
            )
        if kind in self.texts:
            return self.texts[kind]
        program = self.program()
        from tilescale.compiler import driver

        return driver.source_text(program, kind, self.built_for, instrument=self.instrument)

    def again(self, out_idx: Sequence[int], returns: Sequence[int]) -> Kernel:
        """The same code behind other calls: they allocate and give back these parameters."""
        made = Kernel(
            self.entry, self.label, self._program, out_idx=out_idx, returns=returns,
            from_cache=self.from_cache,
            instrument=self.instrument,
        )  # fmt: skip
        made.has_program = self.has_program
        made.with_second(self._second)
        made.texts.update(self.texts)
        return made

    def check(
        self,
        ranks: int = 1,
        args: dict[str, Any] | None = None,
        *,
        schedule: str = "adversary",
        seeds: int = 10,
        bound: int = 10_000,
        limit: int = 2_000_000,
        level: str = "tile",
        depth: int = 2,
        roles: tuple[str, ...] = ("producer", "consumer"),
    ) -> Report:
        """Runs the kernel on the simulator, whatever its target: once in turn, and under ``schedule`` with
        each seed; and asks the static checks, for these ranks and the numbers and extents of ``args``.

        Args:
            ranks: how many simulated ranks launch it. schedule: see compiler/sim/schedule.py; bound: at most
                so many runs of "exhaustive".
            limit: steps after which a run counts as endless.
            args: by parameter name a tensor or a number for all ranks, a list of one a rank, or a function of
                the rank; tensors are copied. What may be left out: see
                :func:`tilescale.compiler.checks.run.launch`.
            level: "tile"; "scheduled" runs what a target with asynchronous copies makes of it, with rings of
                ``depth`` stages and these ``roles``; "both" compares the two.

        Returns:
            The report: true where nothing was found; ``report.findings`` otherwise. ``report.static`` has
            what was proven.
        """
        program = self.program()
        from tilescale.compiler.checks.run import check

        given = arguments(args or {})
        return check(
            program,
            ranks,
            given,
            schedule=schedule,
            seeds=seeds,
            bound=bound,
            limit=limit,
            level=level,
            depth=depth,
            roles=roles,
            static=True,
        )

    def trace(self) -> list[tuple[str, str]]:
        """``(pass, program)`` after every pass, first as traced, at last the functions that are compiled."""
        program = self.program()
        from tilescale.compiler import driver

        return driver.steps(program, self.built_for, instrument=self.instrument)

    def report(self, *, latency: float | None = None, **extents: int) -> ResourceReport:
        """What the kernel takes (registers, spills, shared memory, occupancy, waves), what a launch has to do
        (products, lanes, bytes) and the least time that takes, by the peaks of the GPU that its architecture
        stands for. ``print(kernel.report())`` shows a table.

        Args:
            latency: milliseconds of a call, to be compared with the bound; by default what the autotuner
                measured.
            extents: the values of its T.dynamic extents and integer parameters, by name.

        Raises:
            TileValueError: an extent is missing that the grid or a shape depends on.
        """
        from tilescale.report import report

        return report(self, extents, latency)

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Writes the kernel to one file, which `tilescale.load` makes a kernel of where neither TVM nor a
        compiler is installed: on a machine with this one's kind of processor (CPU kernels: with its
        instruction sets) and, for CUDA, a GPU of the kernel's architecture. Returns the path.

        Raises:
            TileTypeError: a kernel of the target sim, which has no code.
        """
        from tilescale import export

        return export.save(self, path)

    def get_profiler(
        self, tensor_supply: Any = None, *, tensor_supply_type: Any = None, **extents: int
    ) -> Profiler:
        """Measures and checks this kernel on random inputs. ``extents``: the values of its T.dynamic extents,
        by name.

        ``tensor_supply``: "auto" (default, uniform), "normal" (of mean -1), "randn", "integer", "zero", "one"
        (see :class:`tilescale.profiler.Profiler`), or a function from a parameter (an entry of ``params``,
        its extents put in) to an argument. ``tensor_supply_type`` is TileLang's word for it.
        """
        from tilescale.profiler import Profiler

        if tensor_supply is not None and tensor_supply_type is not None:
            raise TileTypeError(
                "tensor_supply= and tensor_supply_type= mean the same", hint="tensor_supply= alone"
            )
        return Profiler(self, tensor_supply if tensor_supply is not None else tensor_supply_type, extents)
