"""tilescale.ops of several ranks on processes: every small case on 1 to 8 ranks, torch's groups, memory that
is shared by calls of different shapes, ranks that call different things."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist  # once here, not in each of the forked ranks

import tilescale.ops
from tests.ranks.harness import RanksFailed, run_ranks
from tests.unit.ops.rank_cases import nothing_left, right, run
from tilescale import comm
from tilescale.ops import RANK_MODULES, load_ranks
from tilescale.ops.ranks.workspace import release

CASES = {m: [c for c in load_ranks(m).cases if c.small] for m in RANK_MODULES}


def all_cases(module: str) -> list[dict[str, Any]]:
    return [run(module, dict(c.shape), seeds=1) for c in CASES[module]]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("module", RANK_MODULES)
def test_meaning(module: str, world: int):
    """All cases one after another, in the same workspace."""
    done = run_ranks(world, all_cases, module, timeout=120)
    for k, case in enumerate(CASES[module]):
        right([results[k] for results in done], case, alike=load_ranks(module).alike)


def port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def with_torch(address: int, what: Any, *args: Any) -> Any:
    """On a rank that has joined torch's job, too."""
    comm.init()
    where = f"tcp://127.0.0.1:{address}"
    dist.init_process_group("gloo", init_method=where, rank=comm.rank(), world_size=comm.world_size())
    try:
        return what(*args)
    finally:
        comm.barrier()
        dist.destroy_process_group()


def groups(modules: tuple[str, ...]) -> list[bool]:
    """Every operation in a process group, a mesh and by the library."""
    pair = dist.new_group([0, 2])
    mesh = dist.init_device_mesh("cpu", (comm.world_size(),), mesh_dim_names=("tp",))
    right = []
    for module in modules:
        op, case = load_ranks(module), CASES[module][0]
        for group, members in ((None, [0, 1, 2]), (mesh["tp"], [0, 1, 2]), (pair, [0, 2])):
            if comm.rank() not in members:
                continue
            me, world = members.index(comm.rank()), len(members)
            everyone = [op.draw(**case.shape, rank=r, world=world) for r in range(world)]
            want = op.reference(everyone)[me]
            got = op.run(**everyone[me], group=group)
            right.append(bool(((got.double() - want.value).abs() <= want.allowed).all()))
            process_group = pair if group is pair else dist.group.WORLD
            theirs = op.peers["library"](**everyone[me], group=process_group)()
            right.append(bool(torch.allclose(theirs.double(), got.double(), rtol=0.02, atol=0.02)))
    return right


def test_torch_groups_and_peers():
    """A process group and a mesh name the ranks; the peers of benchmarks compute the same."""
    done = run_ranks(3, with_torch, port(), groups, RANK_MODULES, timeout=120)
    assert all(all(r) for r in done) and [len(r) for r in done] == [
        6 * len(RANK_MODULES),
        4 * len(RANK_MODULES),
        6 * len(RANK_MODULES),
    ], done


def by_the_library() -> bool:
    x = torch.arange(8.0).reshape(-1, 2) + 100 * comm.rank()
    return bool(tilescale.ops.all_gather(x, how="library").equal(tilescale.ops.all_gather(x)))


def test_the_library_gathers_the_same():
    assert run_ranks(2, with_torch, port(), by_the_library) == [True, True]


def growing() -> list[bool]:
    """Calls that outgrow the workspace, go back to small ones and give it back; symmetric results."""
    comm.init()
    rank, world, right = comm.rank(), comm.world_size(), []
    for n in (10, 3_000_000, 20, 5_000_000, 7):
        got = tilescale.ops.all_gather(torch.full((n,), rank, dtype=torch.uint8))
        right.append(bool(got.equal(torch.arange(world).repeat_interleave(n).to(torch.uint8))))
        right.append(nothing_left())
    release()
    out = comm.full((2 * world, 3), -1.0)
    x = torch.randn(2, 3) + rank
    got = tilescale.ops.all_gather(x, out=out)
    right.append(got is out and bool(got.equal(tilescale.ops.all_gather(x))))
    return right


def test_the_workspace_grows_and_is_given_back():
    assert all(all(r) for r in run_ranks(3, growing))


def different() -> None:
    comm.init()
    tilescale.ops.all_gather(torch.ones(4))
    tilescale.ops.all_gather(torch.ones(4 + comm.rank()))


def test_ranks_that_bring_different_shapes_are_told():
    with pytest.raises(RanksFailed, match="different|launch 2"):
        run_ranks(2, different)


def test_without_init():
    def work() -> None:
        tilescale.ops.all_gather(torch.ones(4))

    with pytest.raises(RanksFailed, match=r"not initialised"):
        run_ranks(2, work)
