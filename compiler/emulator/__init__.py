"""The emulated GPU: runs a kernel's thread IR as NumPy, all threads of a block in step, and looks for what a GPU would not forgive.

start.py       the entry: binds a launch's arguments and runs it, on one rank or on several
machine.py     statements and expressions of thread IR as functions of a block; launches, clusters, roles
memory.py      memory and registers of a block, and who touched what: races
threads.py     what threads do with one another: named barriers, shuffles, atomic updates
matrices.py    a warp's matrices: ldmatrix, stmatrix, mma.sync
copies.py      copies by cp.async
engines.py     what runs beside the threads: barriers with phases, tensor copies, products of warpgroups
maps.py        tensor maps and swizzles, as these engines see them
products.py    products of warpgroups: where their operands lie, and what they are
clusters.py    blocks of a cluster that reach each other
ranks.py       a launch of several ranks
turns.py       blocks, roles and warps in threads of their own, of which one runs at a time
arguments.py   a launch's arrays as flat memory
"""

from __future__ import annotations

from tilescale.compiler.emulator.copies import EmulationError
from tilescale.compiler.emulator.machine import FUNCTIONS, PRINTED, Emulator
from tilescale.compiler.emulator.start import launch, run, run_ranks

__all__ = ["FUNCTIONS", "PRINTED", "EmulationError", "Emulator", "launch", "run", "run_ranks"]
