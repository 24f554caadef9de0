"""In a job a compilation stops at what is wrong on every number of ranks up to all; what is wrong on just so
many, launches refuse."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tilescale
import tilescale.language as T
from tests.ranks.harness import run_ranks
from tilescale import comm, env, simulator
from tilescale.compiler import driver
from tilescale.errors import TileValueError


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each test finds no kernels on the disk; the runtime is not built anew."""
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


def nobody_there():
    @T.prim_func
    def main(A: T.Tensor((32,), "float32"), inbox: T.SymmTensor((32,), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as rank, n:
                T.copy(A, inbox, dst=n)

    return main


def launch_on(kernel, team=None):
    """One launch; whether anything came, None where it was refused."""
    inbox = comm.zeros((32,), "float32", like="numpy", team=team)
    comm.barrier()
    try:
        kernel(np.ones(32, "float32"), inbox)
    except TileValueError as error:
        assert (
            error.loc.file == __file__
            and "two blocks write one region of inbox" in error.message
            and "rank' = " in error.message
        )
        assert not inbox.any()
        return None
    return bool(inbox.all())


def test_a_launch_on_two_ranks_that_write_one_region_is_refused():
    def work():
        comm.init()
        return launch_on(tilescale.compile(everyone_to_rank_zero()))

    assert run_ranks(2, work) == [None, None]


def test_a_kernel_may_be_compiled_before_the_team_is_made_that_it_is_meant_for():
    def work():
        comm.init()
        kernel = tilescale.compile(everyone_to_rank_zero())
        alone = launch_on(kernel, comm.team([comm.rank()]))
        return alone, launch_on(kernel)

    assert run_ranks(2, work) == [(True, None)] * 2


def test_a_rank_alone_may():
    def work():
        comm.init()
        return launch_on(tilescale.compile(everyone_to_rank_zero()))

    assert run_ranks(1, work) == [True]


@pytest.mark.parametrize("n", [1, 2])
def test_what_is_wrong_on_any_number_of_ranks_does_not_compile(n):
    def work():
        comm.init()
        with pytest.raises(TileValueError, match="names a rank that is not there") as refused:
            tilescale.compile(nobody_there())
        assert refused.value.loc.file == __file__

    run_ranks(n, work)


def test_a_cached_kernel_is_checked_for_a_job_of_another_size_once(tmp_path, monkeypatch):
    made = tilescale.compile(everyone_to_rank_zero())  # nobody knows on how many ranks
    assert not made.from_cache and made._meta["on_ranks"] == {}

    def work():
        comm.init()
        kernel = tilescale.compile(everyone_to_rank_zero())
        return kernel.from_cache, launch_on(kernel)

    assert run_ranks(2, work) == [(True, None)] * 2
    assert run_ranks(1, work) == [(True, True)]
    (entry,) = (tmp_path / "kernels").glob("*/kernel.json")
    known = json.loads(entry.read_text())["meta"]["on_ranks"]
    assert set(known) == {"1", "2"} and known["1"] is None and known["2"]["loc"][0] == __file__

    def again(*args):
        raise AssertionError("checked again")

    monkeypatch.setattr(driver, "on_ranks", again)
    assert run_ranks(2, work) == [(True, None)] * 2
    assert not list(entry.parent.glob(".new-*"))


def test_simulated_ranks_are_refused_alike():
    def work(rank):
        comm.init()
        kernel = tilescale.compile(everyone_to_rank_zero(), target="sim")
        seen.append((launch_on(kernel, comm.team([comm.rank()])), launch_on(kernel)))
        with pytest.raises(TileValueError, match="names a rank that is not there"):
            tilescale.compile(nobody_there(), target="sim")

    seen = []
    world = simulator.world(2, None)
    endings = world.run(work)
    assert all(e.error is None for e in endings), endings
    assert seen == [(True, None)] * 2
