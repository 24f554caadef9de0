"""`tilescale launch`: output, exit codes, and that every way of ending ends everything, soon, and says
why."""

from __future__ import annotations

import os
import pty
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tilescale.launch import processes

LIMIT = 20.0  # seconds in which a job must end here; five are promised of a quiet machine

# Each rank starts a child in the same session, one that left the session, and one that left it and cleared
# its environment, leaves a file in /dev/shm, says so, and then does what the test asks: FATE of rank VICTIM,
# an endless sleep of the others.
FAMILY = """
import os, pathlib, signal, subprocess, sys, time
rank, job = os.environ["RANK"], os.environ["TILESCALE_JOB"]
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
sleep = ["sleep", "1000"]
pids = [os.getpid(), subprocess.Popen(sleep).pid, subprocess.Popen(sleep, start_new_session=True).pid]
if "hermit" in sys.argv:
    pids.append(subprocess.Popen(sleep, start_new_session=True, env={}).pid)
pathlib.Path(f"/dev/shm/ts-{job}-{rank}").write_text("x")
pathlib.Path(sys.argv[1], rank).write_text(" ".join(map(str, [job, *pids])))
print("started", flush=True)
exec(sys.argv[2]) if rank == sys.argv[3] else time.sleep(1000)
"""


class Job:
    """A running launcher of FAMILY ranks: their processes and files, and whether they are gone."""

    def __init__(self, folder: Path, process: subprocess.Popen[str], count: int):
        self.folder, self.process, self.count = folder, process, count
        self.pids: list[int] = []
        self.name = ""

    def wait_started(self) -> None:
        end = time.monotonic() + 20
        files = [self.folder / str(rank) for rank in range(self.count)]
        while not all(f.exists() and f.read_text() for f in files):
            assert self.process.poll() is None and time.monotonic() < end, self.process.communicate()
            time.sleep(0.01)
        for f in files:
            self.name, *pids = f.read_text().split()
            self.pids += map(int, pids)

    def rank_pid(self, rank: int) -> int:
        return int((self.folder / str(rank)).read_text().split()[1])

    def end(self) -> tuple[int, str, str]:
        """Waits for the launcher's output to close; asserts that nothing is left of the job."""
        begin = time.monotonic()
        out, err = self.process.communicate(timeout=LIMIT)
        while alive := [pid for pid in self.pids if is_alive(pid)]:
            assert time.monotonic() - begin < LIMIT, alive
            time.sleep(0.01)
        assert not list(Path("/dev/shm").glob(f"ts-{self.name}-*"))
        assert not processes.find(self.name, [])
        return self.process.returncode, out, err


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def _heed() -> None:
    """A test run in the background, or by nohup, ignores these, and so would what it starts."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def start(tmp_path: Path, clean_env: dict[str, str]) -> Iterator[Callable[..., Job]]:
    jobs = []

    def run(
        fate: str = "time.sleep(1000)",
        victim: int = 2,
        *flags: str,
        count: int = 3,
        module: tuple[str, ...] = ("-m", "tilescale.launch"),
    ) -> Job:
        script, folder = tmp_path / "family.py", tmp_path / "pids"
        script.write_text(FAMILY)
        folder.mkdir()
        command = [
            sys.executable,
            *module,
            "launch",
            "-n",
            str(count),
            str(script),
            str(folder),
            fate,
            str(victim),
        ]
        process = subprocess.Popen(
            [*command, *flags],
            env=clean_env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_heed,
        )
        jobs.append(Job(folder, process, count))
        return jobs[-1]

    yield run
    for job in jobs:
        job.process.kill()
        processes.send([pid for pid in job.pids if is_alive(pid)], signal.SIGKILL)


def last_line(err: str) -> str:
    return err.splitlines()[-1]


@pytest.mark.parametrize(
    ("fate", "code", "reason"),
    [
        ("sys.exit(7)", 7, "rank 2 exited with code 7; the other ranks were ended"),
        (
            "1 / 0",
            1,
            "rank 2 exited with code 1 (ZeroDivisionError: division by zero); the other ranks were ended",
        ),
        (
            "os.kill(os.getpid(), 9)",
            137,
            "rank 2 was killed by signal 9 (SIGKILL); the other ranks were ended",
        ),
        (
            "os.kill(os.getpid(), 11)",
            139,
            "rank 2 was killed by signal 11 (SIGSEGV); the other ranks were ended",
        ),
    ],
)
def test_a_failing_rank_ends_all(start: Callable[..., Job], fate: str, code: int, reason: str):
    job = start("time.sleep(0.2); " + fate, 2, "hermit")
    job.wait_started()
    ended, _, err = job.end()
    assert (ended, last_line(err)) == (code, f"tilescale: {reason}")


def test_the_reason_is_the_last_line(start: Callable[..., Job]):
    job = start("1 / 0")
    code, out, err = job.end()
    assert "[2] ZeroDivisionError: division by zero" in err.splitlines()
    assert (
        last_line(err)
        == "tilescale: rank 2 exited with code 1 (ZeroDivisionError: division by zero); the other ranks were ended"
    )


# The others fail because rank 2 has, and end before it does: it takes a while to leave.
CAUSE = """
import atexit, os, sys, time
if os.environ["RANK"] == "2":
    atexit.register(time.sleep, 0.8)
import tilescale.comm as comm
comm.init()
if comm.rank() == 2:
    {fate}
comm.barrier()
"""


@pytest.mark.parametrize(
    ("fate", "code", "reason"),
    [
        ("sys.exit(3)", 3, "rank 2 exited with code 3"),
        ("os._exit(3)", 3, "rank 2 exited with code 3"),
        ("os.kill(os.getpid(), 9)", 137, "rank 2 was killed by signal 9 (SIGKILL)"),
        ("raise ValueError('out of data')", 1, "rank 2 exited with code 1 (ValueError: out of data)"),
    ],
)
def test_the_first_failure_is_the_jobs(tilescale_launch, tmp_path: Path, fate: str, code: int, reason: str):
    (tmp_path / "cause.py").write_text(CAUSE.format(fate=fate))
    done = tilescale_launch(4, tmp_path / "cause.py")
    assert (done.returncode, last_line(done.stderr).partition("; ")[0]) == (code, f"tilescale: {reason}"), (
        done.stderr
    )


def test_a_rank_that_ends_well_is_not_blamed(tilescale_launch, tmp_path: Path):
    (tmp_path / "cause.py").write_text(CAUSE.format(fate="sys.exit(0)"))
    done = tilescale_launch(3, tmp_path / "cause.py")
    assert done.returncode == 1 and "rank 2 has ended" in last_line(done.stderr), done.stderr


def test_a_rank_that_never_calls_init_is_noticed(tilescale_launch, tmp_path: Path):
    script = tmp_path / "early.py"
    script.write_text("import os, tilescale.comm as comm\nif os.environ['RANK'] == '0': comm.init()\n")
    begin = time.monotonic()
    done = tilescale_launch(3, script)
    assert time.monotonic() - begin < 60  # TILESCALE_WAIT_TIMEOUT is 120 s
    assert done.returncode == 1
    # Whoever is seen to have ended first, or both.
    assert re.search(
        r"rank 0: in init\(\): (rank [12] has|ranks 1, 2 have) ended without a call of init\(\)", done.stderr
    ), done.stderr


def test_ranks_that_do_not_listen_are_killed(start: Callable[..., Job]):
    job = start("time.sleep(0.2); sys.exit(3)", 2, "hermit", "deaf")
    job.wait_started()
    code, _, err = job.end()
    assert (code, last_line(err)) == (3, "tilescale: rank 2 exited with code 3; the other ranks were ended")


def test_kill_9_of_a_rank(start: Callable[..., Job]):
    job = start()
    job.wait_started()
    os.kill(job.rank_pid(1), signal.SIGKILL)
    code, _, err = job.end()
    assert (code, last_line(err)) == (
        137,
        "tilescale: rank 1 was killed by signal 9 (SIGKILL); the other ranks were ended",
    )


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGINT, "interrupted (Ctrl-C); all ranks were ended"),
        (signal.SIGTERM, "ended by SIGTERM; all ranks were ended"),
        (signal.SIGHUP, "the terminal is gone (SIGHUP); all ranks were ended"),
    ],
)
def test_a_signal_to_the_launcher_ends_all(start: Callable[..., Job], number: int, reason: str):
    job = start("time.sleep(1000)", 0, "hermit")
    job.wait_started()
    job.process.send_signal(number)
    code, out, err = job.end()
    assert (code, last_line(err)) == (128 + number, f"tilescale: {reason}")
    assert sorted(out.splitlines()) == [f"[{rank}] started" for rank in range(3)]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_ranks_have_time_behind_a_sigterm(start: Callable[..., Job], number: int, code: int):
    """More than in other ends: what takes three seconds is saved behind SIGTERM alone."""
    save = (
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(3), print('saved', flush=True), sys.exit(0)));"
        "signal.signal(signal.SIGINT, lambda *_: time.sleep(1000));"
        "pathlib.Path(sys.argv[1], 'ready').touch(); time.sleep(1000)"
    )
    job = start(save, 0)
    job.wait_started()
    while not (job.folder / "ready").exists():
        time.sleep(0.01)
    job.process.send_signal(number)
    found, out, _ = job.end()
    assert (found, "[0] saved" in out.splitlines()) == (code, number == signal.SIGTERM)


#: the launcher with a grace period in which no test waits for it
PATIENT = """
import runpy
from tilescale.launch import ranks
ranks.GRACE = 1000
runpy.run_module("tilescale.launch", run_name="__main__", alter_sys=True)
"""


def test_a_second_signal_does_not_wait(start: Callable[..., Job]):
    job = start("time.sleep(1000)", 0, "deaf", module=("-c", PATIENT))
    job.wait_started()
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGINT)
    assert job.end()[0] == 130


@pytest.mark.parametrize("whole_group", [False, True])
def test_kill_9_of_the_launcher(start: Callable[..., Job], whole_group: bool):
    job = start("time.sleep(1000)", 0, "deaf")
    job.wait_started()
    (os.killpg if whole_group else os.kill)(job.process.pid, signal.SIGKILL)
    code, _, err = job.end()
    assert (code, last_line(err)) == (-9, "tilescale: the launcher was killed; all ranks were ended")


def test_what_ranks_leave_behind_when_all_is_well(start: Callable[..., Job]):
    job = start("sys.exit(0)", 0, "hermit", count=1)
    code, _, err = job.end()
    assert code == 0
    assert last_line(err).startswith("tilescale: killed what the ranks had left running: ")


def test_nobody_reads_the_output(start: Callable[..., Job]):
    job = start("while True: print('x' * 1000)", 0)
    job.wait_started()
    assert job.process.stdout is not None
    job.process.stdout.close()
    job.process.stdout = open(os.devnull)
    code, _, err = job.end()
    assert (code, last_line(err)) == (
        141,
        "tilescale: stdout cannot be written: Broken pipe; all ranks were ended",
    )


def test_each_rank_knows_its_place(tilescale_launch, tmp_path: Path):
    script = tmp_path / "who.py"
    script.write_text(
        "import os, sys\nfrom tilescale.comm import world\n"
        "assert 'torch' not in sys.modules\n"
        "me = world(); print(me.rank, me.size, me.local_rank, me.local_size, me.launcher, sys.argv[1:])\n"
        "print(me.job, os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'], file=sys.stderr)\n"
    )
    # Variables of an outer job do not reach the ranks.
    done = tilescale_launch(
        3, script, "--flag", "-n", "5", env={"PMI_RANK": "1", "PMI_SIZE": "2", "RANK": "7"}
    )
    expected = [f"[{r}] {r} 3 {r} 3 tilescale ['--flag', '-n', '5']" for r in range(3)]
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, expected), done.stderr
    shared = {line.partition("] ")[2] for line in done.stderr.splitlines()}
    assert len(shared) == 1
    assert tilescale_launch(1, script).stderr[4:].split()[0] not in shared.pop()


def test_lines_stay_whole(tilescale_launch, tmp_path: Path):
    script = tmp_path / "talk.py"
    script.write_text(
        "import os, sys, time\nr = os.environ['RANK']\n"
        "for i in range(2000):\n    sys.stdout.write(f'{r}:{i}:'); sys.stdout.write('x' * 50 + '\\n')\n"
        "sys.stdout.write('no newline')\n"
    )
    done = tilescale_launch(3, script)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    for rank in range(3):
        mine = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert mine == [*(f"[{rank}] {rank}:{i}:" + "x" * 50 for i in range(2000)), f"[{rank}] no newline"]
    assert len(lines) == 3 * 2001


def test_a_slow_reader_loses_nothing(clean_env: dict[str, str], tmp_path: Path):
    """More than the pipes and the launcher hold, read long after the rank has ended its work."""
    script = tmp_path / "talk.py"
    script.write_text("import sys\nfor _ in range(20000): sys.stdout.write('x' * 199 + '\\n')\n")
    command = f"{sys.executable} -m tilescale.launch launch -n 1 {script} | (sleep 1.2; wc -c)"
    done = subprocess.run(["sh", "-c", command], env=clean_env, capture_output=True, text=True, timeout=30)
    assert done.stdout.split() == [str(20000 * 204)], done.stderr


def test_stdin_goes_to_rank_0(clean_env: dict[str, str], tmp_path: Path):
    script = tmp_path / "read.py"
    script.write_text("import sys; print(repr(sys.stdin.read()))")
    command = [sys.executable, "-m", "tilescale.launch", "launch", "-n", "2", str(script)]
    done = subprocess.run(command, env=clean_env, input="a\nb", capture_output=True, text=True, timeout=30)
    assert sorted(done.stdout.splitlines()) == ["[0] 'a\\nb'", "[1] ''"]
    closed = ["sh", "-c", 'exec "$@" <&-', "sh", *command]
    done = subprocess.run(closed, env=clean_env, capture_output=True, text=True, timeout=30)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] ''", "[1] ''"]), done.stderr


def test_on_a_terminal(clean_env: dict[str, str], tmp_path: Path):
    """Marks are coloured, a prompt shows before its line ends, and what is typed reaches rank 0."""
    script = tmp_path / "ask.py"
    script.write_text("import os\nif os.environ['RANK'] == '0': print('hello ' + input('name? '))")
    command = [sys.executable, "-m", "tilescale.launch", "launch", "-n", "2", str(script)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, command, clean_env | {"TERM": "xterm"})
    seen, end = b"", time.monotonic() + 20
    try:
        while b"name? " not in seen and time.monotonic() < end:
            seen += os.read(terminal, 1000)
        os.write(terminal, b"you\n")
        while b"hello you" not in seen and time.monotonic() < end:
            seen += os.read(terminal, 1000)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        os.close(terminal)
    assert b"\x1b[36m[0]\x1b[0m name? " in seen
    assert b"hello you\r\n" in seen


def test_modules_and_executables(clean_env: dict[str, str], tmp_path: Path):
    (tmp_path / "mod.py").write_text("import sys; print(__name__, sys.argv[1:])")
    launch = [sys.executable, "-m", "tilescale.launch", "launch", "-n", "1"]

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*launch, *args], env=clean_env, cwd=tmp_path, capture_output=True, text=True, timeout=30
        )

    assert run("-m", "mod", "-x").stdout == "[0] __main__ ['-x']\n"
    assert run("--no-python", "echo", "-n", "hi").stdout == "[0] hi\n"
    assert (run("gone.py").returncode, run("-n", "0", "mod.py").returncode) == (2, 2)
    assert "there is no file 'gone.py'" in run("gone.py").stderr
    missing = run("--no-python", "no-such-command")
    assert (missing.returncode, missing.stderr) == (
        127,
        "tilescale: no-such-command cannot be run: No such file or directory\n",
    )


# `tilescale launch`, of which the launcher and each rank say at their end for how long they slept, which of their waits for
# events ran out, and what they have imported that takes long.
COUNTING = """
import sys, time
from tilescale.launch import cli, ranks

slept, out, sleep, step = [], [], time.sleep, ranks._Job._step

def counted(job, timeout):
    came, select = [], job.selector.select
    job.selector.select = lambda t: came.extend(select(t)) or came
    step(job, timeout)
    del job.selector.select
    out.extend([] if came else [timeout])

time.sleep = lambda seconds: slept.append(seconds) or sleep(seconds)
ranks._Job._step = counted
try:
    cli.main()
finally:
    print(slept, out, [m for m in ("numpy", "torch", "tvm", "tilescale.compiler") if m in sys.modules])
"""


def test_an_empty_job_is_fast(clean_env: dict[str, str], tmp_path: Path):
    """Nobody waits for a time to pass and nobody imports what takes long; so that this does not depend on what
    else the machine does, the time is the processors': of the launcher, its ranks and its watcher."""
    script, launcher = tmp_path / "empty.py", tmp_path / "launcher.py"
    script.write_text("")
    launcher.write_text(COUNTING)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, launcher, "launch", "-n", "4", script]
    done = subprocess.run(command, env=clean_env, capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = [f"{who}[] [] []" for who in ("", "[0] ", "[1] ", "[2] ", "[3] ")]
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, sorted(said)), done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
