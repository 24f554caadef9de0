"""Binds the arguments of a launch and runs it on the emulated GPU."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.emulator.arguments import laid_out, strides_of
from tilescale.compiler.emulator.logs import Log
from tilescale.compiler.emulator.machine import Emulator
from tilescale.compiler.gpu.kernel import ThreadKernel
from tilescale.compiler.ir import numeric
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.passes import pipeline
from tilescale.errors import TileValueError
from tilescale.language.symbolic import Sym, settle


def launch(prim: Any, args: dict[str, Any], arch: str = "sm_90a", seed: int = 0) -> dict[str, Any]:
    """Runs one launch of a ``@T.prim_func`` (or a traced program) on the emulated GPU and gives the arrays it
    leaves, by name.

    Args:
        args: by parameter name arrays in storage dtypes (never written) and numbers.

    Raises:
        EmulationError: what would go wrong on a GPU. TileError: what the target refuses.
    """
    program = prim.trace() if hasattr(prim, "trace") else prim
    scheduled, _ = pipeline.run(program, target(arch))
    return run(Lowering(scheduled).run(), scheduled, args, seed)


def run(kernel: ThreadKernel, program: TileProgram, args: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """Runs a lowered kernel."""
    grid, flat, arrays, symbols = _bound(kernel, program, args)
    made = Emulator(kernel, [p.name for p in program.params])
    made.launch(grid, flat, symbols, seed, {k: v.shape for k, v in arrays.items()})
    return arrays


def run_ranks(
    kernel: ThreadKernel,
    program: TileProgram,
    args: list[dict[str, Any]],
    seed: int = 0,
    log: Log | None = None,
) -> list[dict[str, Any]]:
    """Runs a lowered kernel on as many ranks as ``args`` has entries, once; counters are left as they are
    then. ``log``: where an instrumented kernel logs."""
    bound = [_bound(kernel, program, a) for a in args]
    made = Emulator(kernel, [p.name for p in program.params], log)
    made.ranks(
        bound[0][0],
        [flat for _, flat, _, _ in bound],
        [symbols for _, _, _, symbols in bound],
        seed,
        [{k: v.shape for k, v in arrays.items()} for _, _, arrays, _ in bound],
    )
    return [arrays for _, _, arrays, _ in bound]


def _bound(
    kernel: ThreadKernel, program: TileProgram, args: dict[str, Any]
) -> tuple[tuple[int, int, int], dict[str, Any], dict[str, Any], list[int]]:
    """A launch's grid, its arguments as the kernel takes them, its arrays by name, and its symbolic
    extents."""
    symbols: dict[str, int] = {}
    arrays: dict[str, Any] = {}
    flat = dict(args)
    values: dict[Any, int] = {}
    for p in program.params:
        if not hasattr(p.spec, "shape"):
            values[p.var] = args[p.name]
            continue
        for extent, n in zip(p.spec.shape, args[p.name].shape, strict=True):
            known = settle(extent)
            if isinstance(known, Sym) and symbols.setdefault(known.name, n) != n:
                raise TileValueError(f"{p.name}: {known.name} is {symbols[known.name]} and {n}")
        flat[p.name], arrays[p.name] = laid_out(args[p.name], strides_of(p.spec, args[p.name], symbols))
    for name, var in program.symbols.items():
        values[var] = symbols[name]
    grid = [int(numeric.evaluate(e, values)) for e in kernel.grid]
    return (grid[0], grid[1], grid[2]), flat, arrays, [symbols[n] for n in program.symbols]
