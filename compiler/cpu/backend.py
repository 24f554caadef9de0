"""The CPU target: thread IR made by `cpu.lower`, a shared object made by LLVM."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from tilescale.compiler import backend, description
from tilescale.compiler.backend import Lowered
from tilescale.compiler.cpu import codegen
from tilescale.compiler.cpu.lower import Lowering
from tilescale.compiler.description import Artifact
from tilescale.compiler.ir import spec as levels
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.passes import pipeline
from tilescale.compiler.passes.residency import waits_for_blocks

#: flags of a kernel (docs/RUNTIME.md, "The runtime's contract")
WAITS, DEVICE, UNORDERED, CLUSTER, INSTRUMENTED, LOCAL, BARE = 1, 2, 4, 8, 16, 32, 64


class Backend(backend.Backend[Lowering]):
    """This machine's processor."""

    texts: ClassVar[tuple[str, ...]] = ("llvm", "asm")

    def lower(self, program: TileProgram, *, instrument: bool, keep: bool) -> Lowered[Lowering]:
        scheduled, trace = pipeline.run(program, keep=keep)
        lowering = Lowering(scheduled, instrument=instrument)
        funcs = lowering.run()
        for name, func in funcs.items():
            levels.verify(func, levels.THREAD, f"lowering of {name}")
        return Lowered(scheduled, lowering, funcs, trace)

    def describe(self, lowered: Lowered[Lowering], *, instrument: bool, fingerprint: int) -> Artifact:
        program, low = lowered.program, lowered.own
        launch = program.launch
        clustered = launch.cluster != (1, 1, 1)
        flags = (
            (WAITS * low.waits) | (DEVICE * low.device) | (CLUSTER * clustered) | (INSTRUMENTED * instrument)
        )
        flags |= BARE * launch.exchanges
        flags |= UNORDERED * (not launch.flagged) | LOCAL * (not waits_for_blocks(program.func.body))
        head = [
            1,
            len(program.params),
            len(program.symbols),
            low.arena_bytes,
            launch.threads,
            flags,
            *launch.cluster,
            launch.max_blocks,
        ]
        head += [low.shared_bytes, len(low.regions), fingerprint]
        meta = description.metadata(program)
        meta["collective"] = meta["collective"] or bool(low.device)
        meta["shared_bytes"] = low.shared_bytes
        sites = [*low.sites, *(f"param|{p.name}|||" for p in program.params)]
        return Artifact(meta, head + description.parameter_words(program), sites)

    def build(self, lowered: Lowered[Lowering], path: Path) -> dict[str, Any]:
        codegen.build_shared(lowered.funcs, path)
        return {}

    def text(self, lowered: Lowered[Lowering], kind: str) -> str:
        return codegen.get_llvm_ir(lowered.funcs) if kind == "llvm" else codegen.get_asm(lowered.funcs)
