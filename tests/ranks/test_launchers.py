"""The same script under torchrun and mpiexec knows its place, and torch.distributed can start from it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

WHO = """
import os
from tilescale.comm import world
me = world()
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
words = [me.rank, me.size, me.local_rank, me.local_size, me.launcher, me.job, *map(os.environ.get, names)]
# One write: what mpiexec passes on must not be torn.
os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""

RENDEZVOUS = """
import os, torch, torch.distributed as dist
from tilescale.comm import world
me = world()
dist.init_process_group("gloo")
t = torch.tensor([me.rank + 1])
dist.all_reduce(t)
os.write(1, f"{dist.get_rank()} {dist.get_world_size()} {int(t)}\\n".encode())
dist.destroy_process_group()
"""


@pytest.fixture
def who(tmp_path: Path) -> Path:
    (tmp_path / "who.py").write_text(WHO)
    return tmp_path / "who.py"


@pytest.fixture
def mpiexec(clean_env: dict[str, str]) -> str:
    path = Path(sys.executable).with_name("mpiexec")
    if not path.exists():
        pytest.skip("the environment has no mpich")
    return str(path)


def lines(command: list[str], env: dict[str, str]) -> list[list[str]]:
    done = subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return sorted(line.split() for line in done.stdout.splitlines())


def check(found: list[list[str]], n: int, launcher: str) -> str:
    """Asserts ranks 0..n-1 of one machine; returns their one job."""
    places = [[str(r), str(n), str(r), str(n), launcher] for r in range(n)]
    assert [line[:5] for line in found] == places
    assert [line[6:10] for line in found] == [place[:4] for place in places]
    assert len({tuple(line[10:]) for line in found}) == 1, "they meet at one address"
    (job,) = {line[5] for line in found}
    return job


def test_under_mpiexec(mpiexec: str, who: Path, clean_env: dict[str, str]):
    command = [mpiexec, "-n", "3", sys.executable, str(who)]
    assert check(lines(command, clean_env), 3, "mpich") != check(lines(command, clean_env), 3, "mpich")


def test_under_mpiexec_inside_a_shell(mpiexec: str, who: Path, clean_env: dict[str, str]):
    """A wrapper between mpiexec and the rank is not taken for the launcher."""
    check(lines([mpiexec, "-n", "2", "sh", "-c", f"{sys.executable} {who}; true"], clean_env), 2, "mpich")


def test_mpi_itself_still_starts(mpiexec: str, who: Path, clean_env: dict[str, str]):
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("the environment has no mpi4py")
    code = (
        "from tilescale.comm import world; me = world(); from mpi4py import MPI; import os; c = MPI.COMM_WORLD; "
        "assert (c.rank, c.size) == (me.rank, me.size); os.write(1, f'{c.allreduce(me.rank)}\\n'.encode())"
    )
    assert lines([mpiexec, "-n", "2", sys.executable, "-c", code], clean_env) == [["1"], ["1"]]


def test_machines_agree_through_mpi(mpiexec: str, clean_env: dict[str, str], tmp_path: Path):
    """Two machines, played by one: each rank is told that it is alone on its own, so the name must come
    through MPI."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("the environment has no mpi4py")
    script = tmp_path / "far.py"
    script.write_text('import os\nos.environ.update(MPI_LOCALRANKID="0", MPI_LOCALNRANKS="1")\n' + WHO)
    found = lines([mpiexec, "-n", "2", sys.executable, str(script)], clean_env)
    assert [line[:5] for line in found] == [["0", "2", "0", "1", "mpich"], ["1", "2", "0", "1", "mpich"]]
    assert len({(line[5], *line[10:]) for line in found}) == 1


# Rank 1 fails; the others are busy with something that never looks at it.
FAILS = """
import os, sys, time
{first}
from tilescale import comm
comm.init()
if comm.rank() == 1:
    {fate}
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("first", "fate", "code"),
    [("", "sys.exit(3)", 3), ("", "1 / 0", 1), ("from mpi4py import MPI", "1 / 0", 1)],
)
def test_a_job_under_mpiexec_ends_as_a_whole(
    mpiexec: str, clean_env: dict[str, str], tmp_path: Path, first: str, fate: str, code: int
):
    if first and importlib.util.find_spec("mpi4py") is None:
        pytest.skip("the environment has no mpi4py")
    (tmp_path / "fails.py").write_text(FAILS.format(first=first, fate=fate))
    begin = time.monotonic()
    command = [mpiexec, "-n", "2", sys.executable, str(tmp_path / "fails.py")]
    done = subprocess.run(
        command, env=clean_env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert time.monotonic() - begin < 50
    assert done.returncode == code, done.stderr
    assert ("ZeroDivisionError" in done.stderr) == ("1 / 0" in fate)


@pytest.mark.parametrize("launcher", ["torchrun", "mpiexec"])
def test_a_rank_that_never_calls_init_is_noticed(
    launcher: str, mpiexec: str, clean_env: dict[str, str], tmp_path: Path
):
    script = tmp_path / "early.py"
    script.write_text(
        "import os\nif int(os.environ.get('PMI_RANK') or os.environ['RANK']) == 0:\n    from tilescale import comm\n    comm.init()\n"
    )
    command = (
        [mpiexec, "-n", "2"]
        if launcher == "mpiexec"
        else [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    )
    command += [sys.executable] if launcher == "mpiexec" else ["--standalone"]
    begin = time.monotonic()
    done = subprocess.run([*command, str(script)], env=clean_env, capture_output=True, text=True, timeout=100)
    assert time.monotonic() - begin < 80  # TILESCALE_WAIT_TIMEOUT is 120 s
    assert (
        done.returncode == 1 and "rank 0: in init(): rank 1 has ended without a call of init()" in done.stderr
    ), done.stderr


def test_under_torchrun(who: Path, clean_env: dict[str, str]):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("the environment has no torch")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(who),
    ]
    check(lines(command, clean_env), 2, "torchrun")


@pytest.mark.parametrize("launcher", ["tilescale", "mpiexec"])
def test_torch_can_meet(launcher: str, clean_env: dict[str, str], tmp_path: Path):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("the environment has no torch")
    script = tmp_path / "meet.py"
    script.write_text(RENDEZVOUS)
    if launcher == "mpiexec":
        command = [str(Path(sys.executable).with_name("mpiexec")), "-n", "2", sys.executable, str(script)]
        if not shutil.which(command[0]):
            pytest.skip("the environment has no mpich")
    else:
        command = [sys.executable, "-m", "tilescale.launch", "launch", "-n", "2", str(script)]
    found = [line[-3:] for line in lines(command, clean_env)]
    assert found == [["0", "2", "3"], ["1", "2", "3"]]
