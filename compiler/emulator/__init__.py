"""The emulated GPU: runs a kernel's thread IR as NumPy, all threads of a block in step, and looks for what a
GPU would not forgive."""

from __future__ import annotations

from tilescale.compiler.emulator.copies import EmulationError
from tilescale.compiler.emulator.logs import Log, Logged
from tilescale.compiler.emulator.machine import FUNCTIONS, PRINTED, Emulator
from tilescale.compiler.emulator.start import launch, run, run_ranks

__all__ = [
    "FUNCTIONS",
    "PRINTED",
    "EmulationError",
    "Emulator",
    "Log",
    "Logged",
    "launch",
    "run",
    "run_ranks",
]
