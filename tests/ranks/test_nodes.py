"""Jobs of two nodes of two ranks, all on this machine: places, shared memory, and how they end."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tilescale.comm import lines, machines
from tilescale.comm.bootstrap import World
from tilescale.errors import CommError, TileError
from tilescale.launch import hosts, nodes, processes

# Every rank writes its number into the memory of the next one, of the other node too. NumPy: no torch is needed.
SHIFT = """
import os, sys
from tilescale import comm
comm.init(16 << 20)
me = comm.world()
box = comm.zeros(4, "int64", like="numpy")
comm.peer(box, (me.rank + 1) % me.size)[:] = me.rank
comm.barrier()
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK".split()
words = ["at", *(os.environ[name] for name in names), me.node, me.local_rank, int(box[0])]
os.write(1, (" ".join(map(str, words)) + "\\n").encode())
comm.barrier()
"""
EXPECTED = [f"at {r} 4 {r % 2} 2 {r // 2} {r // 2} {r % 2} {(r - 1) % 4}" for r in range(4)]
LAUNCH = [sys.executable, "-m", "tilescale.launch", "launch"]


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


@pytest.fixture
def shift(tmp_path: Path) -> Path:
    (tmp_path / "shift.py").write_text(SHIFT)
    return tmp_path / "shift.py"


class Jobs:
    """Launchers that run at once."""

    def __init__(self, env: Mapping[str, str]):
        self.env, self.running = env, list[subprocess.Popen[str]]()

    def start(self, *command: object, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        self.running.append(
            subprocess.Popen(
                [str(word) for word in command],
                env={**self.env, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return self.running[-1]

    def end(self, limit: float = 60) -> list[tuple[int, str, str]]:
        """Exit code, stdout and stderr of each, in the order of their starts."""
        found = []
        for one in self.running:
            out, err = one.communicate(timeout=limit)
            found.append((one.returncode, out, err))
        return found


@pytest.fixture
def jobs(clean_env: dict[str, str]) -> Iterator[Jobs]:
    made = Jobs(clean_env)
    yield made
    for one in made.running:
        if one.poll() is None:
            one.kill()
            one.wait()


def places(found: list[tuple[int, str, str]]) -> list[str]:
    """What SHIFT's ranks said, without the launchers' marks."""
    assert [code for code, _, _ in found] == [0] * len(found), found
    text = "\n".join(out for _, out, _ in found)
    return sorted(line[line.index("at ") :] for line in text.splitlines() if "at " in line)


def our_node(number: int, port: int, *more: object, nodes: int = 2) -> list[object]:
    flags = ["--nnodes", nodes, "--node-rank", number, "--rendezvous", f"127.0.0.1:{port}", "-n", 2]
    return [*LAUNCH, *flags, *more]


def test_two_launchers(jobs: Jobs, shift: Path, port: int):
    jobs.start(*our_node(1, port, shift))
    jobs.start(*our_node(0, port, shift))
    found = jobs.end()
    assert places(found) == EXPECTED
    assert sorted(line[:4] for line in found[0][1].splitlines()) == ["[2] ", "[3] "]


def test_torchs_names_of_the_options(jobs: Jobs, shift: Path, port: int):
    for number in range(2):
        where = ["--master-addr", "127.0.0.1", "--master-port", port]
        jobs.start(*LAUNCH, "--nnodes", 2, "--node-rank", number, *where, "--nproc-per-node", 2, shift)
    assert places(jobs.end()) == EXPECTED


def test_nodes_of_different_sizes(jobs: Jobs, tmp_path: Path, port: int):
    script = tmp_path / "who.py"
    script.write_text(
        "import os; from tilescale.comm import world; me = world();"
        "os.write(1, f'at {me.rank} {me.size} {me.local_rank} {me.local_size} {me.node}\\n'.encode())"
    )
    for number, count in enumerate((1, 3)):
        where = ["--rdzv-endpoint", f"127.0.0.1:{port}"]
        jobs.start(*LAUNCH, "--nnodes", 2, "--node-rank", number, *where, "-n", count, script)
    assert places(jobs.end()) == ["at 0 4 0 1 0", "at 1 4 0 3 1", "at 2 4 1 3 1", "at 3 4 2 3 1"]


def test_hosts_file(jobs: Jobs, shift: Path, tmp_path: Path):
    file = tmp_path / "hosts"
    file.write_text("# two nodes of this machine\nlocalhost slots=2\nlocalhost slots=2\n")
    ssh = {"TILESCALE_SSH": """sh -c 'exec sh -c "$1"'"""}  # as ssh: a host, and a line for its shell
    jobs.start(*LAUNCH, "--hosts", file, shift, env=ssh)
    assert places(jobs.end()) == EXPECTED


def test_hosts_that_cannot_be_reached(jobs: Jobs, shift: Path, tmp_path: Path):
    (tmp_path / "hosts").write_text("localhost slots=2\nlocalhost slots=2\n")
    ssh = {
        "TILESCALE_SSH": """sh -c 'case "$1" in *"--node-rank 1 --rendezvous"*) exit 255;; esac; exec sh -c "$1"'"""
    }
    jobs.start(*LAUNCH, "--hosts", tmp_path / "hosts", shift, env=ssh)
    ((code, _, err),) = jobs.end(20)
    assert code == 1
    assert err.splitlines()[-1] == (
        "tilescale: node 1 (localhost): its launcher exited with code 255; all nodes were ended"
    )


@pytest.mark.parametrize(
    "text", [b"", b"n1", b"n1 slots=0", b"n1 slots=2 x", b"-oProxyCommand=x slots=1", b"n\xff slots=1"]
)
def test_hosts_files_are_checked(tmp_path: Path, text: bytes):
    (tmp_path / "hosts").write_bytes(text)
    with pytest.raises(CommError, match="slots="):
        hosts.read(tmp_path / "hosts")


def test_under_torchrun(jobs: Jobs, shift: Path, port: int):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("the environment has no torch")
    for number in range(2):
        where = ["--master-addr", "127.0.0.1", "--master-port", port]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--node-rank", number]
        jobs.start(*torchrun, *where, "--nproc-per-node", 2, shift)
    assert places(jobs.end(100)) == EXPECTED


def test_under_mpiexec_with_two_hosts(jobs: Jobs, shift: Path):
    """Two names of this machine are two nodes to MPICH, each with an agent of its own."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if not mpiexec.exists() or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("the environment has no mpich with mpi4py")
    two = ["-launcher", "fork", "-hosts", "localhost,127.0.0.1", "-ppn", 2, "-n", 4]
    jobs.start(mpiexec, *two, sys.executable, shift)
    assert places(jobs.end()) == EXPECTED


def slurm(rank: int, job: int) -> dict[str, str]:
    """What srun gives a task of a step of two nodes with two tasks each."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_NODEID": str(rank // 2),
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": "localhost,127.0.0.1",
    }


def test_under_slurm(jobs: Jobs, shift: Path):
    for rank in range(4):
        jobs.start(sys.executable, shift, env=slurm(rank, os.getpid()))
    assert places(jobs.end()) == EXPECTED


# ---- several machines


def test_ranks_of_two_machines_are_refused(jobs: Jobs, tmp_path: Path, shift: Path):
    """The ranks of node 1 take themselves for another machine's."""
    script = tmp_path / "far.py"
    script.write_text(
        "import os, socket\nfrom tilescale.comm import machines\n"
        "if os.environ['SLURM_NODEID'] == '1':\n"
        "    machines.identity = lambda: 'elsewhere'\n    socket.gethostname = lambda: 'far'\n" + SHIFT
    )
    for rank in range(4):
        jobs.start(sys.executable, script, env=slurm(rank, os.getpid()))
    for code, out, err in jobs.end():
        assert code == 1 and not out
        assert "4 ranks on 2 machines (" in err and "far: ranks 2, 3)" in err, err


def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch, port: int):
    monkeypatch.setenv("TILESCALE_WAIT_TIMEOUT", "0.3")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    world = World(0, 4, 0, 2, f"never{port}", "slurm")
    with pytest.raises(CommError, match=r"rank 0: waited 0\.3 s in init\(\) for ranks 1, 2, 3"):
        machines.check(world, lambda awaited: [])
    with pytest.raises(CommError, match=r"ranks 1, 3 have ended without a call of init\(\)"):
        machines.check(world, lambda awaited: [1, 3])


# ---- the end

# Rank VICTIM does FATE when all have come; the others wait for it in a barrier, or sleep.
FATED = """
import os, pathlib, signal, sys, time
from tilescale import comm
comm.init(16 << 20)
comm.barrier()
pathlib.Path(sys.argv[1], str(comm.rank())).write_text(f"{os.getpid()} {comm.world().job}")
if comm.rank() == int(sys.argv[2]):
    exec(sys.argv[3])
exec(sys.argv[4])
"""


def fated(jobs: Jobs, tmp_path: Path, port: int, victim: int, fate: str, others: str) -> None:
    script = tmp_path / "fated.py"
    script.write_text(FATED)
    for number in range(2):
        jobs.start(*our_node(number, port, script, tmp_path, victim, fate, others))


def wait_started(tmp_path: Path) -> list[tuple[int, str]]:
    end = time.monotonic() + 30
    files = [tmp_path / str(rank) for rank in range(4)]
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < end
        time.sleep(0.01)
    return [(int(pid), job) for pid, job in (file.read_text().split() for file in files)]


def wait_listening(tmp_path: Path) -> None:
    end = time.monotonic() + 30
    while len(list(tmp_path.glob("* listens"))) < 4:
        assert time.monotonic() < end
        time.sleep(0.01)


def nothing_is_left(jobs: Jobs, started: list[tuple[int, str]]) -> None:
    name = started[0][1]
    assert not processes.find(name, [])
    assert not list(Path("/dev/shm").glob(f"ts-{name}-*"))


@pytest.mark.parametrize("others", ["time.sleep(1000)", "comm.barrier()"])
def test_a_killed_rank_of_node_1_ends_node_0(jobs: Jobs, tmp_path: Path, port: int, others: str):
    fated(jobs, tmp_path, port, 3, "os.kill(os.getpid(), 9)", others)
    started = wait_started(tmp_path)
    begin = time.monotonic()
    (code, _, err), (other_code, _, other_err) = jobs.end()
    assert time.monotonic() - begin < 40  # TILESCALE_WAIT_TIMEOUT is 120 s
    why, host = "rank 3 was killed by signal 9 (SIGKILL)", socket.gethostname()
    assert (code, other_code) == (137, 137), (err, other_err)
    assert err.splitlines()[-1].startswith(f"tilescale: node 1 ({host}): {why}"), err
    assert other_err.splitlines()[-1].startswith(f"tilescale: {why}"), other_err
    nothing_is_left(jobs, started)


#: what takes three seconds is saved behind a SIGTERM
SAVES = (
    "signal.signal(signal.SIGTERM, lambda *_: (time.sleep({}), print('saved', flush=True), sys.exit(0)));"
    "pathlib.Path(sys.argv[1], f'{{comm.rank()}} listens').touch(); time.sleep(1000)"
)


@pytest.mark.parametrize("asked", [[1], [0, 1]], ids=str)
def test_ranks_of_all_nodes_have_time_behind_a_sigterm(
    jobs: Jobs, tmp_path: Path, port: int, asked: list[int]
):
    """To one launcher, or to all, as schedulers send it."""
    fated(jobs, tmp_path, port, 0, "pass", SAVES.format(3))
    started = wait_started(tmp_path)
    wait_listening(tmp_path)
    for number in asked:
        jobs.running[number].send_signal(signal.SIGTERM)
        time.sleep(0.5)
    for code, out, err in jobs.end():
        assert code == 143 and out.count("saved") == 2 and "ended by SIGTERM" in err, (out, err)
    nothing_is_left(jobs, started)


def test_a_second_sigterm_ends_all_nodes_at_once(jobs: Jobs, tmp_path: Path, port: int):
    fated(jobs, tmp_path, port, 0, "pass", SAVES.format(25))
    started = wait_started(tmp_path)
    wait_listening(tmp_path)
    begin = time.monotonic()
    for _ in range(2):
        jobs.running[0].send_signal(signal.SIGTERM)
        time.sleep(0.5)
    for code, out, err in jobs.end():
        assert code == 143 and "saved" not in out, (out, err)
    assert time.monotonic() - begin < 20
    nothing_is_left(jobs, started)


def test_time_behind_a_sigterm_by_a_hosts_file(jobs: Jobs, tmp_path: Path):
    (tmp_path / "hosts").write_text("localhost slots=2\nlocalhost slots=2\n")
    (tmp_path / "fated.py").write_text(FATED)
    ssh = {"TILESCALE_SSH": """sh -c 'exec sh -c "$1"'"""}
    args = [tmp_path / "fated.py", tmp_path, 0, "pass", SAVES.format(3)]
    jobs.start(*LAUNCH, "--hosts", tmp_path / "hosts", *args, env=ssh)
    started = wait_started(tmp_path)
    wait_listening(tmp_path)
    jobs.running[0].send_signal(signal.SIGTERM)
    ((code, out, err),) = jobs.end()
    assert code == 143 and out.count("saved") == 4, (out, err)
    nothing_is_left(jobs, started)


def test_a_failure_after_a_node_has_ended_well(jobs: Jobs, tmp_path: Path, port: int):
    fated(jobs, tmp_path, port, 3, "time.sleep(1); sys.exit(5)", "comm.world().node and time.sleep(1000)")
    (code, _, err), (other_code, _, _) = jobs.end()
    assert (code, other_code) == (5, 5)
    assert err.splitlines()[-1].endswith("rank 3 exited with code 5"), err


@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_launcher_ends_the_other_node(jobs: Jobs, tmp_path: Path, port: int, number: int):
    fated(jobs, tmp_path, port, 0, "time.sleep(1000)", "time.sleep(1000)")
    started = wait_started(tmp_path)
    begin = time.monotonic()
    jobs.running[number].send_signal(signal.SIGKILL)
    found = jobs.end()
    assert time.monotonic() - begin < 40  # TILESCALE_WAIT_TIMEOUT is 120 s
    code, _, err = found[1 - number]
    # With its launcher the hub is ended: it may still say so, or the line to it ends.
    said = ["the launcher of node 0 is gone"] * (number == 0) + [
        f"node {number} ({socket.gethostname()}) is gone"
    ]
    assert code == 1 and any(text in err.splitlines()[-1] for text in said), err
    nothing_is_left(jobs, started)


def test_a_node_that_never_comes_is_named(jobs: Jobs, shift: Path, port: int):
    jobs.start(*our_node(0, port, shift), env={"TILESCALE_WAIT_TIMEOUT": "1"})
    ((code, _, err),) = jobs.end(20)
    assert code == 1 and "waited 1 s for node 1" in err, err


def test_nodes_that_do_not_fit_are_refused(jobs: Jobs, shift: Path, port: int):
    short = {"TILESCALE_WAIT_TIMEOUT": "3"}
    jobs.start(*our_node(0, port, shift), env=short)
    jobs.start(*our_node(1, port, shift, nodes=3), env=short)
    _, (code, _, err) = jobs.end(20)
    assert code == 1 and "it was started with --nnodes 3, others with --nnodes 2" in err, err


@pytest.mark.parametrize("text", ["host", ":1", "host:0", "host:x", "host:70000", "[::1]:2000"])
def test_endpoints_are_checked(text: str):
    with pytest.raises(TileError, match="HOST:PORT"):
        nodes.endpoint(text)


def test_a_line_that_speaks_something_else_ends(port: int):
    server = lines.listen("127.0.0.1", port)
    client = socket.create_connection(("127.0.0.1", port))
    line = lines.Line(server.accept()[0])
    client.sendall(b'{"a": 1}\n[2')
    assert line.receive() == [{"a": 1}]
    client.sendall(b"]\nGET / HTTP/1.1\n")
    assert line.receive() is None
    for end in (client, line, server):
        end.close()
