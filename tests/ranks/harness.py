"""Functions on ranks that are processes, under the name that the tests here know.

What every rank would load and compute for its first kernel is there before the fork: the compiler for the CPU,
and the part of a cache's key that all kernels share."""

import tilescale.compiler.cpu.backend
import tilescale.compiler.driver
import tilescale.simulator  # noqa: F401
from tilescale.fingerprint import environment
from tilescale.testing.processes import RankFailure, RanksFailed, leftovers, run_ranks

environment()

__all__ = ["RankFailure", "RanksFailed", "leftovers", "run_ranks"]
