"""Ranks that go on when another one has died: `comm.init(recover=True)`."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

import tilescale.ops
from tests.gpu.recover import died, gone_on
from tests.ranks.harness import RanksFailed, run_ranks
from tilescale import comm
from tilescale.errors import CommError, TileValueError


def survivors(n: int, *doomed: int, inside: bool = True) -> list[Any]:
    """What ranks gave of which some are killed."""
    with pytest.raises(RanksFailed) as failed:
        run_ranks(n, went_on, doomed, inside, timeout=60)
    assert [(f.rank, f.kind, f.text) for f in failed.value.failures if f.rank in doomed] == [
        (r, "Died", "killed by SIGKILL") for r in doomed
    ]
    return [f for f in failed.value.failures if f.rank not in doomed]


def went_on(doomed: tuple[int, ...], inside: bool) -> None:
    comm.init(recover=True)
    me = comm.rank()
    took, why = died(me in doomed, inside)
    assert took < 40 and any(f"rank {r} " in why and "has died" in why for r in doomed), why
    gone_on(
        comm.world_size() - len(doomed), sum(r < me and r not in doomed for r in range(comm.world_size()))
    )


@pytest.mark.parametrize(("n", "doomed"), [(2, (1,)), (3, (0,)), (4, (1, 2))])
def test_a_rank_that_is_killed_inside_fused_kernels(n: int, doomed: tuple[int, ...]):
    assert survivors(n, *doomed) == []


def test_a_rank_that_is_killed_while_hosts_meet():
    assert survivors(3, 1, inside=False) == []


def again() -> None:
    """A second rank dies behind the first one."""
    for doomed, left in ((2, 2), (1, 1)):
        comm.init(recover=True)
        died(comm.rank() == doomed, True)
        gone_on(left, comm.rank())
        comm.finalize()


def test_one_after_another():
    with pytest.raises(RanksFailed) as failed:
        run_ranks(3, again, timeout=60)
    assert [(f.rank, f.kind) for f in failed.value.failures] == [(1, "Died"), (2, "Died")]


def unhurt() -> Any:
    """Without a death everything is as it is without the word."""
    comm.init(recover=True)
    comm.init()
    assert tilescale.ops.all_reduce(torch.ones(3)).tolist() == [2, 2, 2]
    comm.finalize()
    comm.init()
    with pytest.raises(TileValueError, match="recover=True in the first init"):
        comm.init(recover=True)
    return comm.world_size()


def test_nobody_dies():
    assert run_ranks(2, unhurt) == [2, 2]


def late() -> str:
    comm.init(recover=True)
    if comm.rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommError, match="rank 2 .*has died"):
        comm.barrier()
    if comm.rank() == 1:
        time.sleep(3)
        return ""
    with pytest.raises(CommError) as error:
        comm.finalize()
    return str(error.value)


def test_a_rank_that_does_not_come_to_go_on_is_awaited_so_long():
    with pytest.raises(RanksFailed) as failed:
        run_ranks(3, late, env={"TILESCALE_WAIT_TIMEOUT": "1"}, timeout=30)
    assert [f.rank for f in failed.value.failures] == [2]
