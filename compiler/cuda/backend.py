"""The CUDA target: thread IR made by `cuda.lower`, printed as CUDA C++, compiled to a cubin."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any, ClassVar

from tilescale import env
from tilescale.compiler import backend, description
from tilescale.compiler.advice import Advice, listed
from tilescale.compiler.backend import Lowered
from tilescale.compiler.cuda import account, nvshmem, targets, toolchain
from tilescale.compiler.cuda.describe import description as table
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.description import Artifact
from tilescale.compiler.gpu.kernel import ThreadKernel
from tilescale.compiler.gpu.printed import Printed
from tilescale.compiler.ir import spec as levels
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.passes import pipeline
from tilescale.errors import TileValueError


def _require_budget(program: TileProgram) -> None:
    """``T.Kernel(max_blocks=…)``: a GPU holds as many blocks of a grid as fit, and can be told nothing else.

    Raises:
        TileValueError: a grid that may be larger.
    """
    launch = program.launch
    if launch.max_blocks and not (
        all(isinstance(e, int) for e in launch.grid) and prod(launch.grid) <= launch.max_blocks
    ):
        raise TileValueError(
            f"{program.name} asks for max_blocks={launch.max_blocks}, and its grid may have more",
            loc=launch.loc,
            expected=f"on a GPU, a constant grid of at most {launch.max_blocks} blocks",
            hint=f"T.Kernel({launch.max_blocks}, …), and T.Persistent over the tiles",
        )


#: bytes that a thread may keep in memory and be none the slower
SPILLED = 64


class Backend(backend.Backend[ThreadKernel]):
    """NVIDIA GPUs of one architecture (sm_90a, sm_80 …)."""

    texts: ClassVar[tuple[str, ...]] = ("cuda", "ptx", "sass")

    def __init__(self, arch: str):
        super().__init__(targets.check_arch(arch or targets.DEFAULT_ARCH))
        self.target = targets.target(self.arch, env.REMOTE.get())

    def lower(self, program: TileProgram, *, instrument: bool, keep: bool) -> Lowered[ThreadKernel]:
        _require_budget(program)
        scheduled, trace = pipeline.run(program, self.target, keep=keep)
        kernel = Lowering(scheduled, instrument=instrument).run()
        levels.verify(kernel.func, levels.THREAD, f"lowering of {kernel.name}")
        return Lowered(scheduled, kernel, {kernel.name: kernel.func}, trace)

    def describe(self, lowered: Lowered[ThreadKernel], *, instrument: bool, fingerprint: int) -> Artifact:
        program, kernel = lowered.program, lowered.own
        meta = description.metadata(program)
        meta |= {
            "target": "cuda",
            "arch": self.arch,
            "symbol": kernel.name,
            "shared_bytes": kernel.shared_bytes,
        }
        meta["collective"] = meta["collective"] or kernel.device
        meta["notes"] = list(dict.fromkeys(program.notes))
        meta["slow"] = listed(program.notes, program.loc)
        meta |= {"copies": account.copies(program, kernel), "loops": account.loops(program)}
        meta["mechanisms"] = list(dict.fromkeys(program.fired))
        sites = [*kernel.sites, *(f"param|{p.name}|||" for p in program.params)]
        return Artifact(
            meta, table(kernel, program, description.parameter_words(program), fingerprint), sites
        )

    def build(self, lowered: Lowered[ThreadKernel], path: Path) -> dict[str, Any]:
        """The cubin; its source lies beside it, where profilers look for what a line number means."""
        kernel = lowered.own
        printed = self.printed(lowered)
        made = toolchain.compile_cubin(printed, self.arch)
        if lowered.own.remote and lowered.own.team:
            made = nvshmem.linked(made, self.arch)
        path.write_bytes(made.code)
        path.with_suffix(".cu").write_text(printed.text, encoding="utf-8")
        out: dict[str, Any] = {"compiler": made.compiler, "resources": self.resources(kernel, made.resources)}
        slow: list[str] = []
        if made.serialised:
            why = "ptxas found its accumulators in use between them"
            text = f"{kernel.name} awaits each product of a warpgroup before the next: {why}"
            slow.append(
                Advice(
                    text,
                    None,
                    "smaller accumulators, or none that is touched between products, and no branch there",
                )
            )
        logs = any(source.kind == "log" for source in kernel.sources)  # whose registers are not the author's
        if (made.resources.spill_stores or 0) > SPILLED and not logs:
            spilled = f"{made.resources.spill_stores} bytes of each thread's registers lie in memory"
            text = (
                f"{kernel.name} has more in fragments than a thread has registers: {spilled} (smaller "
                "tiles, or more threads)"
            )
            slow.append(
                Advice(
                    text,
                    None,
                    "smaller tiles in fragments, or more threads a block, so that each has a smaller part "
                    "of them",
                )
            )
        if slow:
            notes = [*dict.fromkeys(lowered.program.notes), *slow]
            out |= {"notes": notes, "slow": listed(notes, lowered.program.loc)}
        return out

    def printed(self, lowered: Lowered[ThreadKernel]) -> Printed:
        """The kernel's CUDA C++."""
        return print_kernel(lowered.own)

    def resources(self, kernel: ThreadKernel, r: toolchain.Resources) -> dict[str, Any]:
        """What a block takes, and how many a multiprocessor holds."""
        out: dict[str, Any] = {
            **r.as_dict(),
            "dynamic_shared": kernel.shared_bytes,
            "threads": kernel.threads,
        }
        held = toolchain.occupancy(r, self.arch, kernel.threads, kernel.shared_bytes)
        return (
            out
            if held is None
            else out | {"blocks": held.blocks, "occupancy": held.fraction, "bound": held.bound}
        )

    def text(self, lowered: Lowered[ThreadKernel], kind: str) -> str:
        printed = self.printed(lowered)
        if kind == "cuda":
            return printed.text
        if kind == "ptx":
            return toolchain.compile_ptx(printed, self.arch)
        return toolchain.sass(toolchain.compile_cubin(printed, self.arch).code)
