"""In a running job a compilation knows how many ranks there are, unless smaller teams exist."""

from __future__ import annotations

from pathlib import Path

import pytest

import tilescale
import tilescale.language as T
from tests.ranks.harness import run_ranks
from tilescale import comm, env
from tilescale.errors import TileValueError


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Kernels are checked as they are compiled, and not as they are loaded; the runtime is not built anew."""
    native = env.CACHE_DIR.get() / "native"
    if native.exists():
        (tmp_path / "native").symlink_to(native)
    monkeypatch.setenv("TILESCALE_CACHE_DIR", str(tmp_path))


def everyone_to_rank_zero():
    @T.prim_func
    def main(A: T.Tensor((32,), "float32"), inbox: T.SymmTensor((32,), "float32")):
        with T.Kernel(1):
            with T.Scale("device"):
                T.copy(A, inbox, dst=0)

    return main


def test_two_ranks_that_write_one_region_do_not_compile():
    def work():
        comm.init()
        with pytest.raises(TileValueError, match="rank' = ") as refused:
            tilescale.compile(everyone_to_rank_zero())
        assert refused.value.loc.file == __file__ and "two blocks write one region of inbox" in refused.value.message

    run_ranks(2, work)


def test_a_rank_alone_may():
    def work():
        comm.init()
        tilescale.compile(everyone_to_rank_zero())

    run_ranks(1, work)


def test_in_a_job_with_smaller_teams_it_may_be_meant_for_one_rank():
    def work():
        comm.init()
        comm.team([comm.rank()])
        tilescale.compile(everyone_to_rank_zero())

    run_ranks(2, work)
