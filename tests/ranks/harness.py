"""Functions on ranks that are processes, under the name that the tests here know."""

from tilescale.testing.processes import RankFailure, RanksFailed, leftovers, run_ranks

__all__ = ["RankFailure", "RanksFailed", "leftovers", "run_ranks"]
