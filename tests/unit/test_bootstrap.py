"""Who am I: every launcher's variables, nested launchers, contradictions."""

from __future__ import annotations

import pytest

from tilescale.comm.bootstrap import World, detect, without_ranks
from tilescale.errors import CommError


def torch_env(rank: int, size: int, **more: str) -> dict[str, str]:
    local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        **local,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        **more,
    }


def ours(rank: int, size: int, job: str = "abc123") -> dict[str, str]:
    return torch_env(rank, size, TILESCALE_JOB=job)


def torchrun(rank: int, size: int, agents: int = 1, **more: str) -> dict[str, str]:
    elastic = {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GROUP_WORLD_SIZE": str(agents),
    }
    return torch_env(rank, size, **elastic) | more


def mpich(rank: int, size: int) -> dict[str, str]:
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "MPI_LOCALRANKID": str(rank),
        "MPI_LOCALNRANKS": str(size),
    }


def openmpi(rank: int, size: int) -> dict[str, str]:
    values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}


def slurm(
    rank: int, size: int, per_node: str = "", node: int = 0, local: int | None = None, **more: str
) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_LOCALID": str(rank if local is None else local),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_TASKS_PER_NODE": per_node or str(size),
        "SLURM_STEP_NODELIST": "n[003-004,007]-x,m2",
        **more,
    }


def who(environ: dict[str, str]) -> tuple[int, int, int, int, str]:
    me = detect(environ)[0]
    return me.rank, me.size, me.local_rank, me.local_size, me.launcher


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1, 0, 1, "none")),
        ({"WORLD_SIZE": "1"}, (0, 1, 0, 1, "none")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, 0, 1, "none")),
        (ours(2, 4), (2, 4, 2, 4, "tilescale")),
        (torchrun(1, 2), (1, 2, 1, 2, "torchrun")),
        (torch_env(1, 2), (1, 2, 1, 2, "env")),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, (1, 2, 1, 2, "env")),
        (openmpi(3, 4), (3, 4, 3, 4, "openmpi")),
        (mpich(1, 4), (1, 4, 1, 4, "mpich")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}, (1, 2, 1, 2, "mpich")),
        (slurm(5, 7, "3(x2),1", node=1, local=2), (5, 7, 2, 3, "slurm")),
        (slurm(6, 7, "3(x2),1", node=2, local=0), (6, 7, 0, 1, "slurm")),
        # srun with its own PMI says the same twice, and PMI names no local rank.
        (slurm(1, 2) | {"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2, 1, 2, "slurm")),
        # A batch script is no task of a step.
        ({"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}, (0, 1, 0, 1, "none")),
        # mpiexec in a Slurm job: its daemons are Slurm's tasks.
        (slurm(0, 2, "1(x2)", local=0) | mpich(3, 4), (3, 4, 3, 4, "mpich")),
        (slurm(0, 1) | openmpi(1, 2), (1, 2, 1, 2, "openmpi")),
        # One torchrun agent in each of two tasks.
        (slurm(1, 2, "1(x2)", 1, 0) | torchrun(5, 8, 2, LOCAL_RANK="1", LOCAL_WORLD_SIZE="4"), (5, 8, 1, 4, "torchrun")),
        (mpich(0, 1) | torchrun(1, 2), (1, 2, 1, 2, "torchrun")),
        # By hand beside MPI: agreeing, or a container's default of one rank.
        (mpich(1, 2) | torch_env(1, 2), (1, 2, 1, 2, "mpich")),
        (mpich(1, 2) | torch_env(0, 1), (1, 2, 1, 2, "mpich")),
    ],
)  # fmt: skip
def test_who(environ: dict[str, str], expected: tuple[int, int, int, int, str]):
    assert who(environ) == expected


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"RANK": "1"}, "RANK is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK is not"),
        ({"TILESCALE_JOB": "x"}, "TILESCALE_JOB is set but RANK is not"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT is not"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1", "MASTER_ADDR": "other"},
            "LOCAL_RANK is not set",
        ),
        (torch_env(4, 4), "rank 4 of 4"),
        (mpich(0, 2) | openmpi(1, 2), "openmpi says rank 1 of 2"),
        (mpich(0, 2) | torch_env(1, 2), "mpich says rank 0 of 2"),
        (mpich(0, 2) | torchrun(0, 4), "torchrun says rank 0 of 4"),
        (mpich(1, 2) | ours(0, 4), "tilescale says rank 0 of 4"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI_LOCALRANKID is not set"),
    ],
)
def test_contradictions_are_explained(environ: dict[str, str], text: str):
    with pytest.raises(CommError, match=text):
        detect(environ)


@pytest.mark.parametrize("make", [ours, torchrun, torch_env, mpich, openmpi, slurm])
def test_ranks_of_a_job_agree_on_its_name(make):
    jobs = {detect(make(rank, 3))[0].job for rank in range(3)}
    assert len(jobs) == 1
    (job,) = jobs
    assert job.isalnum() and len(job) <= 32


def test_jobs_have_different_names():
    pairs = [
        (ours(0, 2, "a"), ours(0, 2, "b")),
        (torchrun(0, 2), torchrun(0, 2, TORCHELASTIC_RESTART_COUNT="1")),
        (torchrun(0, 2), torchrun(0, 2, TORCHELASTIC_RUN_ID="x")),
        (torch_env(0, 2), torch_env(0, 2, ) | {"MASTER_PORT": "29501"}),
        (slurm(0, 2), slurm(0, 2, SLURM_STEP_ID="1")),
        (slurm(0, 2), slurm(0, 2, SLURM_RESTART_COUNT="1")),
    ]  # fmt: skip
    for one, other in pairs:
        assert detect(one)[0].job != detect(other)[0].job


def test_where_torch_may_meet():
    assert detect(slurm(0, 2))[1][0] == "127.0.0.1"
    host, port = detect(slurm(0, 2, "1(x2)"))[1]
    assert host == "n003-x" and 20000 <= port < 32000
    assert detect(slurm(1, 2, "1(x2)", node=1, local=0))[1] == (host, port)


def test_a_new_job_inherits_no_rank():
    outer = {"PATH": "/bin", "SLURM_JOB_ID": "77"}
    for environ in (ours(0, 2), torchrun(0, 2), mpich(0, 2), openmpi(0, 2), slurm(0, 2)):
        assert detect(without_ranks(environ))[0] == World(0, 1, 0, 1, detect({})[0].job, "none")
    assert without_ranks(outer) == outer
