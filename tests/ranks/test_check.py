"""`tilescale check`: programs of many ranks, unmodified, on simulated ones. Most runs are in this process,
which must be itself again behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tilescale import simulator
from tilescale.launch.cli import commands

HEAD = """
import os, sys
import numpy as np
import tilescale, tilescale.language as T
from tilescale import comm

@tilescale.jit
def ring(N, wait=True):
    @T.prim_func
    def main(A: T.Tensor((N,), "float32"), inbox: T.SymmTensor((N,), "float32"), got: T.Signal((1,)), B: T.Tensor((N,), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as rank, n:
                T.copy(A, inbox, dst=(rank + 1) % n, signal=got[0])
                if wait:
                    T.wait(got[0])
                T.copy(inbox, B)
    return main

comm.init()
rank, n = comm.rank(), comm.world_size()
a, b = np.full(8, rank, "float32"), np.zeros(8, "float32")
inbox, got = comm.empty(8, like="numpy"), comm.signals(1, like="numpy")
"""


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., Result]:
    """``check(n, body, *options, args=())``: runs HEAD and ``body`` as a program."""

    def run(n: int, body: str, *options: str, args: tuple[str, ...] = (), head: str = HEAD) -> Result:
        script = tmp_path / "program.py"
        script.write_text(head + body)
        before = (
            dict(os.environ),
            list(sys.path),
            list(sys.argv),
            sys.modules["__main__"],
            sys.stdout,
            set(sys.modules),
        )
        done = CliRunner().invoke(
            commands, ["check", "-n", str(n), "--seeds", "2", *options, str(script), *args]
        )
        assert (dict(os.environ), sys.path, sys.argv, sys.modules["__main__"]) == before[:4]
        assert all(
            not str(getattr(sys.modules[m], "__file__", "")).startswith(str(tmp_path))
            for m in set(sys.modules) - before[5]
        )
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done

    return run


def test_a_clean_program(check):
    done = check(3, 'ring(8)(a, inbox, got, b)\nassert (b == (rank - 1) % n).all()\nprint("got", b[0])\n')
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sorted(lines[:3]) == ["[0] got 2.0", "[1] got 0.0", "[2] got 1.0"]
    assert lines[3].startswith("tilescale: checked 1 kernel on 3 ranks: 1 launch, 3 runs, no finding, ")
    assert done.stderr == ""


def test_a_fault_is_told_by_file_line_and_caret(check, tmp_path):
    done = check(3, "ring(8, wait=False)(a, inbox, got, b)\n")
    assert done.exit_code == 1
    line = HEAD.splitlines().index("                T.copy(inbox, B)") + 1
    assert f"{tmp_path}/program.py:{line}: race: this reads inbox[0:8]" in done.stderr
    told = done.stderr.splitlines()
    at = next(k for k, text in enumerate(told) if ": race: " in text)
    assert told[at + 1].endswith("T.copy(inbox, B)") and set(told[at + 2].split("|")[1].strip()) == {"^"}
    assert "seen with: round_robin, 3 ranks" in done.stderr
    assert "finding" in done.stdout and "no finding" not in done.stdout


def test_one_rank_and_eight(check):
    for n in (1, 8):
        done = check(n, "ring(8)(a, inbox, got, b)\nassert (b == (rank - 1) % n).all()\n", "--seeds", "1")
        assert done.exit_code == 0, done.stderr


def test_sixty_four_ranks(check):
    done = check(64, "ring(8)(a, inbox, got, b)\nassert (b == (rank - 1) % n).all()\n", "--seeds", "1")
    assert done.exit_code == 0, done.stderr
    assert "on 64 ranks" in done.stdout


def test_json(check):
    done = check(
        2, 'print("hello")\nring(8, wait=False)(a, inbox, got, b)\n', "--json", "--schedule", "random"
    )
    facts = json.loads(done.stdout)
    assert (
        done.exit_code == 1 and facts["ranks"] == 2 and facts["schedule"] == "random" and facts["runs"] == 3
    )
    assert facts["kernels"] == ["ring(N=8, wait=False)"] and facts["failure"] is None
    kinds = {f["kind"] for f in facts["findings"]}
    assert "race" in kinds
    race = next(f for f in facts["findings"] if f["kind"] == "race")
    assert (
        race["where"]["file"].endswith("program.py")
        and race["where"]["line"] > 1
        and race["others"][0]["rank"] in (0, 1)
    )
    assert "[0] hello" in done.stderr


def test_a_rank_that_raises_ends_the_job_with_its_traceback(check):
    done = check(
        3, 'if rank == 1:\n    raise ValueError("no luck")\nring(8)(a, inbox, got, b)\nprint("never")\n'
    )
    assert done.exit_code == 3
    assert (
        done.stderr.startswith("Traceback (most recent call last):\n")
        and "program.py" in done.stderr.splitlines()[1]
    )
    assert "ValueError: no luck\ntilescale: rank 1 failed\n" in done.stderr
    assert "never" not in done.stdout and "rank 1 failed" in done.stdout
    assert (
        "no finding" not in done.stdout
        and "what was run has no fault, and not all was run, rank 1 failed" in done.stdout
    )


def test_a_rank_that_exits(check):
    done = check(2, "if rank:\n    sys.exit(7)\ncomm.barrier()\n")
    assert (
        done.exit_code == 3
        and done.stderr == "tilescale: rank 1 ended with exit code 7\n"
        and "no finding" not in done.stdout
    )
    assert check(2, "sys.exit(0)\n").exit_code == 0


def test_a_rank_that_stops_the_job(check):
    done = check(3, "comm.abort('enough') if rank == 1 else comm.barrier()\n")
    assert done.exit_code == 3 and "rank 1 stopped the job: enough" in done.stderr


def test_a_wrong_result_that_the_program_notices_is_no_finding(check):
    done = check(2, "ring(8)(a, inbox, got, b)\nassert (b == 99).all()\n")
    assert done.exit_code == 3 and "AssertionError" in done.stderr


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "ring(8, wait=rank != 1)(a, inbox, got, b)",
            "rank 1 launches ring(N=8, wait=False) where rank 0 launches ring(N=8, wait=True)",
        ),
        (
            "k = tilescale.compile(ring.get_tir(8), -1)\nif rank != 1: k(a, inbox, got)",
            "rank 0 launches main(wait=True), and not every",
        ),
        ("if rank != 1: ring(8)(a, inbox, got, b)", "not every rank of its team does: rank 1 has ended"),
        (
            "ring(8)(a, inbox, got, b) if rank else comm.barrier()",
            "not every rank of its team does: rank 0 calls barrier()",
        ),
        (
            "o = comm.empty(8, like='numpy')\nring(8)(a, o if rank else inbox, got, b)",
            "with another symmetric tensor as inbox than rank 0",
        ),
    ],
)
def test_ranks_that_do_not_launch_the_same(check, body, said):
    done = check(3, body + "\n")
    assert done.exit_code == 1 and "different-programs: " in done.stderr and said in done.stderr
    assert "program.py:" in done.stderr and "^^^" in done.stderr


def test_hosts_that_do_not_do_the_same(check):
    done = check(3, "comm.empty(3, like='numpy') if rank else comm.barrier()\n")
    assert (
        done.exit_code == 1
        and "different-programs: rank 0 calls barrier(), and not every rank of its team does: " in done.stderr
    )
    assert "rank 1 calls empty((3,), float32)" in done.stderr and "1 finding" in done.stdout
    done = check(3, "if rank: comm.barrier()\n")
    assert done.exit_code == 1 and "different-programs: rank 1 calls barrier(), and not every" in done.stderr
    assert (
        "rank 0 has ended" in done.stderr and "Traceback" not in done.stderr and "failed" not in done.stdout
    )


def test_a_traceback_ends_in_the_program(check):
    done = check(2, "comm.team([0, 7]).barrier()\n")
    assert done.exit_code == 3 and "Traceback" in done.stderr and done.stderr.count('  File "') == 1, (
        done.stderr
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_calls_in_threads_of_the_program_are_not_lost_in_silence(check):
    body = "import threading\nt = threading.Thread(target=lambda: ring(8)(a, inbox, got, b))\nt.start(); t.join()\n"
    done = check(2, body)
    assert done.exit_code == 3 and "2 calls in threads of the program lost" in done.stdout, done.stdout
    assert "program.py:" in done.stderr and "a call in a thread that a rank started is lost" in done.stderr
    assert check(2, "ring(8)(a, inbox, got, b)\n").exit_code == 0


@pytest.mark.parametrize(
    "schedule",
    [
        "random:5",
        "exhaustive:zz",
        "exhaustive:",
        "exhaustive:1@",
        "exhaustive:0@-",
        "exhaustive:1@2@-",
        "hope",
    ],
)
def test_schedules_that_there_are_not_end_before_the_program_runs(check, schedule):
    done = check(2, "print('ran')\n", "--schedule", schedule)
    assert done.exit_code == 2 and "there is no schedule" in done.stderr and "ran" not in done.stdout


def test_a_folder_is_a_program_only_with_a_main(tmp_path):
    done = CliRunner().invoke(commands, ["check", "-n", "2", str(tmp_path)])
    assert done.exit_code == 2 and "without __main__.py" in done.stderr
    (tmp_path / "__main__.py").write_text("print('ran')\n")
    assert CliRunner().invoke(commands, ["check", "-n", "2", str(tmp_path)]).exit_code == 0


def test_each_rank_sees_its_own_process(check, tmp_path):
    (tmp_path / "helper.py").write_text(
        "import functools, random\nfrom tilescale import comm\ncount = 0\n"
        "@functools.cache\ndef once(): return comm.empty(1, like='numpy')\n"
    )
    body = """
assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals()
import helper, random
import numpy.random
mine = random.Random(rank).random()
helper.count += 1
comm.barrier()
helper.count += 1
helper.once()                                  # collective, cached in a module that is this rank's own
assert helper.count == 2 and random.random() == mine
os.environ["LEFT"] = str(rank)
sys.argv.append(str(rank))
comm.barrier()
want = {"RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(n), "LEFT": str(rank)}
assert {k: os.environ[k] for k in want} == want and comm.local_rank() == rank
assert sys.argv[1:] == ["--size", "3", str(rank)] and os.path.basename(sys.argv[0]) == "program.py"
assert __file__ == os.path.abspath(sys.argv[0])
"""
    done = check(3, body, args=("--size", "3"))
    assert done.exit_code == 0, done.stderr


def test_a_module_that_meets_others_while_it_is_imported(check, tmp_path):
    (tmp_path / "meets.py").write_text(
        "from tilescale import comm\ncomm.barrier()\nx = comm.full(1, comm.rank(), like='numpy')\n"
    )
    done = check(
        3, "import meets\ncomm.barrier()\nassert comm.peer(meets.x, (rank + 1) % n)[0] == (rank + 1) % n\n"
    )
    assert done.exit_code == 0, done.stderr


def test_process_groups_are_refused_in_a_module_that_is_the_program():
    done = subprocess.run(
        [sys.executable, "-m", "tilescale.launch", "check", "-n", "2", "-m", "asks"],
        cwd=Path(__file__).parent / "programs",
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3 and "simulated ranks are threads of one process" in done.stderr, done.stderr
    assert "write instead: tilescale.comm.init()" in done.stderr


def test_memory_that_nobody_wrote(check):
    reads = """
@T.prim_func
def total(X: T.SymmTensor((16,), "DTYPE"), got: T.Signal((1,)), B: T.Tensor((1,), "DTYPE")):
    with T.Kernel(1):
        with T.Scale("device") as rank, n:
            T.signal(got[0], dst=(rank + 1) % n)
            T.wait(got[0])
        x = T.alloc_fragment((16,), "DTYPE")
        T.copy(X, x)
        for i in T.serial(16):
            B[0] = x[i]

x = comm.empty(16, "DTYPE", like="LIKE")
WRITES
tilescale.compile(total)(x, got, np.zeros(1, "DTYPE"))
"""
    for dtype, writes, clean in [
        ("float32", "x[:] = 1", True),
        ("float32", "x[:15] = 1", False),
        ("float32", "x[:] = np.nan", True),
        ("float16", "x[1:] = 1", False),
        ("int32", "x[:15] = 7", False),
        ("int32", "x[:] = 7", True),
        ("int8", "x[:8] = 7", False),
        ("int8", "x[:] = np.arange(16) * 37", True),
        ("float64", "comm.peer(x, (rank + 1) % n)[:] = 2", True),
        ("float32", "pass", False),
    ]:
        like = "torch" if "peer" in writes else "numpy"
        done = check(
            2,
            reads.replace("DTYPE", dtype)
            .replace("WRITES", f"{writes}\ncomm.barrier()")
            .replace("LIKE", like),
        )
        assert done.exit_code == (0 if clean else 1), (dtype, writes, done.stderr)
        assert clean or "uninitialised: X[" in done.stderr


def test_what_a_launch_wrote_is_written_for_the_next(check):
    done = check(
        2,
        "ring(8)(a, inbox, got, b)\nring(8)(inbox.copy(), inbox, got, b)\nc = inbox + 1\nassert (b == (rank - 2) % n).all()\n",
    )
    assert done.exit_code == 0, done.stderr


def test_what_a_launch_left_unwritten_stays_so(check):
    half = """
@T.prim_func
def half(X: T.KIND((16,), "float32")):
    with T.Kernel(1):
        for i in T.Parallel(8):
            X[i] = i

x = comm.empty(16, like="numpy")
tilescale.compile(half)(x)
assert x[:8].tolist() == list(range(8))
print("again")
"""
    reads = """
@T.prim_func
def reads(X: T.SymmTensor((16,), "float32"), B: T.Tensor((16,), "float32")):
    with T.Kernel(1):
        for i in T.Parallel(16):
            B[i] = X[i] + 1

tilescale.compile(reads)(x, np.zeros(16, "float32"))
"""
    for kind in ("SymmTensor", "Tensor"):
        done = check(2, half.replace("KIND", kind) + reads)
        assert done.exit_code == 1 and "uninitialised: X[8:16] is read" in done.stderr, done.stderr
        assert check(2, half.replace("KIND", kind) + "x[8:] = 0\ncomm.barrier()\n" + reads).exit_code == 0


def test_signals_start_at_zero_unless_they_are_kept(check):
    body = """
@T.prim_func
def counts(got: T.Signal((1,)), kept: T.Signal((1,), keep=True), B: T.Tensor((2,), "int64"), k: T.int64):
    with T.Kernel(1):
        with T.Scale("device") as rank, n:
            T.signal(got[0], dst=(rank + 1) % n)
            T.signal(kept[0], dst=(rank + 1) % n)
            T.wait(got[0], 1, cmp="eq")
            T.wait(kept[0], k, cmp="eq")
        B[0] = 1

kept = comm.signals(1, like="numpy")
call = tilescale.compile(counts)
for k in range(3):
    call(got, kept, np.zeros(2, "int64"), k + 1)
    assert got[0] == 0 and kept[0] == k + 1
"""
    done = check(2, body)
    assert done.exit_code == 0, done.stderr


def test_teams(check):
    body = """
t = comm.team([3, 1])
assert bool(t) == (rank in (3, 1))
if t:
    me, x, s = t.rank, comm.empty(8, team=t, like="numpy"), comm.signals(1, team=t, like="numpy")
    comm.barrier(team=t)
    ring(8, WAIT)(np.full(8, me, "float32"), x, s, b)
    assert (b == 1 - me).all() and me == [3, 1].index(rank)
    try:
        ring(8)(a, x, got, b)
    except ValueError as error:
        assert "different teams" in str(error)
    else:
        raise SystemExit("two teams in one launch")
ring(8)(a, inbox, got, b)
comm.finalize()
assert not comm.is_initialized()
"""
    done = check(4, body.replace("WAIT", "True"))
    assert done.exit_code == 0, done.stderr
    done = check(4, body.replace("WAIT", "False"))
    assert done.exit_code == 1 and "2 ranks, those of the team [3, 1]" in done.stderr


def test_refusals_in_a_program(check):
    done = check(2, "ring(8)(a, np.zeros(8, 'float32'), got, b)\n")
    assert done.exit_code == 3 and "inbox is an ordinary tensor" in done.stderr
    done = check(2, "ring(8)(a, comm.peer(inbox, 1 - rank), got, b)\n")
    assert done.exit_code == 3 and "a view of another rank's memory" in done.stderr
    body = "import threading\nout = []\ndef f():\n    try: comm.rank()\n    except comm.CommError as e: out.append(e)\n"
    done = check(
        2,
        body + "t = threading.Thread(target=f); t.start(); t.join()\nassert 'is not a rank' in str(out[0])\n",
    )
    assert done.exit_code == 0, done.stderr


def test_kernels_for_other_targets_run_on_the_simulator(check):
    for target in ("cpu", "cuda", "auto"):
        done = check(
            2,
            f"k = tilescale.compile(ring.get_tir(8), target={target!r})\nk(a, inbox, got, b)\nassert k.target == 'sim'\n",
        )
        assert done.exit_code == 0 and "1 kernel on" in done.stdout, done.stderr


def test_a_kernel_without_symmetric_memory_runs_for_its_rank_alone(check):
    body = """
@T.prim_func
def number(B: T.Tensor((2,), "int32")):
    with T.Kernel(1):
        with T.Scale("device") as rank, n:
            B[0] = rank
            B[1] = n

out = np.zeros(2, "int32")
if rank != 1:
    tilescale.compile(number)(out)
    assert out.tolist() == [rank, n]
"""
    done = check(3, body)
    assert done.exit_code == 0, done.stderr
    assert "1 kernel on 3 ranks: 2 launches, 4 runs" in done.stdout  # explored once, and run in turn for each


def test_ranks_that_sleep_let_others_go_on(check, tmp_path, monkeypatch):
    poll = "import time\nif rank == 1:\n    time.sleep(0.01)\n    open('flag', 'w').close()\n"
    monkeypatch.chdir(tmp_path)
    done = check(2, poll + "while not os.path.exists('flag'): time.sleep(0.01)\n")
    assert done.exit_code == 0, done.stderr
    done = check(
        2,
        "import time\nos.environ['TILESCALE_WAIT_TIMEOUT'] = '0.2'\nif rank: comm.barrier()\nwhile True: time.sleep(0.05)\n",
    )
    assert (
        done.exit_code == 3
        and "rank 0 has slept for 0.25 s while all other ranks waited for it or had ended" in done.stderr
    )


def test_what_ranks_print(check):
    body = """
import contextlib, io, logging
log = logging.getLogger("of all ranks")
if not log.handlers:
    log.addHandler(logging.StreamHandler())
    log.propagate = False
held = io.StringIO()
with contextlib.redirect_stdout(held):
    print("kept", rank)
    comm.barrier()
    print("kept", rank)
assert held.getvalue() == f"kept {rank}\\n" * 2
log.warning("logged %d", rank)
sys.stdout.buffer.write(b"bytes\\n")

@T.prim_func
def says(got: T.Signal((1,))):
    with T.Kernel(1):
        with T.Scale("device") as r, n:
            T.signal(got[0], dst=(r + 1) % n)
            T.wait(got[0])
            T.print(r, "I am")

tilescale.compile(says)(got)
"""
    done = check(2, body)
    assert done.exit_code == 0, done.stderr
    said = [f"[{r}] {line}" for r in (0, 1) for line in ("bytes", f"rank {r} block (0, 0, 0) I am = {r}")]
    assert sorted(re.sub(r"\) \S+:\d+: ", ") ", line) for line in done.stdout.splitlines()[:-1]) == sorted(
        said
    )
    assert sorted(done.stderr.splitlines()) == ["[0] logged 0", "[1] logged 1"]


def test_results_that_the_schedule_decides_are_told(check):
    body = """
@T.prim_func
def sums(A: T.Tensor((4,), "float32"), S: T.SymmTensor((1,), "float32"), B: T.Tensor((1,), "float32")):
    with T.Kernel(4) as b:
        T.atomic_add(S[0], A[b])
        with T.Scale("grid"):
            T.barrier()
        if b == 0:
            B[0] = S[0]

s = comm.zeros(1, like="numpy")
tilescale.compile(sums)(np.array([1e8, 1, -1e8, 3], "float32"), s, np.zeros(1, "float32"))
"""
    done = check(1, body, "--schedule", "random", "--seeds", "10")
    assert done.exit_code == 0 and "of sums comes out different from schedule to schedule" in done.stderr, (
        done.stderr
    )


def test_what_no_run_says_anything_of_is_told(check):
    body = """
@T.prim_func
def early(A: T.Tensor((8,), "float32"), inbox: T.SymmTensor((8,), "float32")):
    with T.Kernel(1, ordered=False), T.Scale("device") as (me, world):
        T.copy(A, inbox, dst=(me + 1) % world)

tilescale.compile(early)(a, inbox)
"""
    assert "not checked" not in check(2, body).stderr  # its launches run overlapped
    one_by_one = ("--schedule", "exhaustive")
    done = check(2, body, *one_by_one)
    assert done.exit_code == 0, done.stderr
    assert "early has ordered=False: what orders its launches" in done.stderr
    told = json.loads(check(2, body, *one_by_one, "--json").stdout)
    assert len(told["unchecked"]) == 1 and not told["findings"]
    assert "not checked" not in check(2, body.replace(", ordered=False", ""), *one_by_one).stderr


def test_every_interleaving(check):
    done = check(2, "ring(8)(a, inbox, got, b)\n", "--schedule", "exhaustive")
    assert done.exit_code == 0 and "no finding, all interleavings, " in done.stdout, done.stderr


def test_both_levels(check):
    body = """
@T.prim_func
def gemm(A: T.Tensor((40, 48), "float32"), B: T.Tensor((48, 32), "float32"), C: T.SymmTensor((40, 32), "float32")):
    with T.Kernel(2, 3) as (bx, by):
        a, b, c = T.alloc_shared((16, 16), "float32"), T.alloc_shared((16, 16), "float32"), T.alloc_fragment((16, 16), "float32")
        T.clear(c)
        for k in T.Pipelined(3, num_stages=2):
            T.copy(A[by * 16, k * 16], a)
            T.copy(B[k * 16, bx * 16], b)
            T.gemm(a, b, c)
        T.copy(c, C[by * 16, bx * 16])

x, w = np.random.rand(40, 48).astype("float32"), np.random.rand(48, 32).astype("float32")
c = comm.empty((40, 32), like="numpy")
tilescale.compile(gemm)(x, w, c)
assert np.abs(c - x @ w).max() < 1e-4
"""
    for level, runs in (
        ("both", 8),
        ("scheduled", 4),
    ):  # no rank reaches another, so each has a launch of its own, of which one is explored
        done = check(2, body, "--level", level)
        assert done.exit_code == 0 and f"2 launches, {runs} runs, no finding" in done.stdout, (
            done.stderr + done.stdout
        )
    done = check(2, "ring(8, wait=False)(a, inbox, got, b)\n", "--level", "scheduled")
    assert done.exit_code == 1 and "scheduled with rings of 2 for producer and consumer" in done.stderr
    assert check(2, "", "--level", "both", "--schedule", "exhaustive").exit_code == 2


def test_tuning_and_timing(check, tmp_path, monkeypatch):
    monkeypatch.setenv("TILESCALE_CACHE_DIR", str(tmp_path / "cache"))
    body = """
@tilescale.autotune(configs={"wait": [True]})
@tilescale.jit
def tuned(N, wait=True):
    return ring.get_tir(N, wait)

k = tuned(8)
k(a, inbox, got, b)
assert (b == (rank - 1) % n).all()
assert ring(8).get_profiler().do_bench() > 0
"""
    done = check(2, body)
    assert done.exit_code == 0, done.stderr
    assert not list(tmp_path.rglob("tuned/*"))


def test_an_example_that_traces_says_why_it_cannot(check):
    example = Path(__file__).parents[2] / "examples" / "08_ag_gemm.py"
    args = ["--m", "8", "--n", "8", "--k", "8", "--trace"]
    done = CliRunner().invoke(commands, ["check", "-n", "2", "--seeds", "1", str(example), *args])
    assert done.exit_code == 3 and "2 ranks: max error" in done.stdout, done.stderr
    assert (
        "nothing was logged: is the kernel compiled with instrument=True, and not run on the simulator?"
        in done.stderr
    )


def test_an_interrupt_says_where_it_was(clean_env, tmp_path):
    script = tmp_path / "spins.py"
    script.write_text(
        "from tilescale import comm\ncomm.init()\nprint('spinning', flush=True)\nwhile True:\n    pass\n"
    )
    command = [sys.executable, "-m", "tilescale.launch", "check", "-n", "2", str(script)]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as jobs in a shell's background begin
    with subprocess.Popen(
        command, env=clean_env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        signal.signal(signal.SIGINT, before)
        assert job.stdout is not None and "spinning" in job.stdout.readline()
        job.send_signal(signal.SIGINT)
        try:
            _, said = job.communicate(timeout=30)
        finally:
            job.kill()
    assert (
        job.returncode == 130
        and "tilescale: interrupted while rank 1 was at " in said
        and "spins.py:" in said
    )


def test_a_module_that_a_program_forbids():
    """In a process of its own: what the program does to torch is seen by all ranks, and by whoever started
    them."""
    script = "import sys\nsys.modules['torch'] = None\nimport numpy as np\nfrom tilescale import comm\ncomm.init()\ncomm.barrier()\n"
    done = separately(script)
    assert done.returncode == 0 and ", no finding, " in done.stdout, done.stderr


def test_an_error_between_the_turns_of_ranks_ends_the_job():
    script = "import sys\nfrom tilescale import comm\ncomm.init()\nsys.path = 5\nprint('here', flush=True)\ncomm.barrier()\n"
    done = separately(script)
    assert done.returncode == 3 and "] here" in done.stdout
    assert (
        "TypeError: 'int' object is not iterable\ntilescale: the check itself failed: TypeError between the turns of ranks"
        in done.stderr
    )


def separately(script: str) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(script)
        file.flush()
        command = [sys.executable, "-m", "tilescale.launch", "check", "-n", "2", file.name]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_ranks_that_never_call_init(check):
    head = HEAD[: HEAD.index("comm.init()")]
    body = """
@T.prim_func
def fills(B: T.Tensor((8,), "int32")):
    with T.Kernel(BLOCKS):
        with T.Scale("device") as rank, n:
            for i in T.Parallel(8):
                B[i] = rank * 10 + n

b = np.zeros(8, "int32")
tilescale.compile(fills)(b)
assert (b == 1).all()   # alone, as on the CPU
"""
    assert check(2, body.replace("BLOCKS", "1"), head=head).exit_code == 0
    done = check(2, body.replace("BLOCKS", "2"), head=head)
    assert done.exit_code == 1 and "race: this writes B" in done.stderr, done.stderr
    done = check(2, "comm.barrier()\n", head=head)
    assert done.exit_code == 3 and "tilescale.comm is not initialised" in done.stderr


def test_processes_cannot_be_simulated(tilescale_launch, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(HEAD + "ring(8)(a, inbox, got, b)\n")
    done = tilescale_launch(2, script, env={"TILESCALE_TARGET": "sim"})
    assert (
        done.returncode != 0
        and "the simulator runs all ranks in one process, and this job has 2 processes" in done.stderr
    )


def test_usage(check, tmp_path):
    assert check(2, "", "--schedule", "fast").exit_code == 2
    run = CliRunner().invoke
    assert run(commands, ["check", "-n", "2", str(tmp_path / "none.py")]).exit_code == 2
    assert run(commands, ["check", "-n", "65", __file__]).exit_code == 2


def test_from_a_shell(clean_env, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(HEAD + "ring(8, len(sys.argv) < 2)(a, inbox, got, b)\nsys.stdout.write('no newline')\n")
    command = [sys.executable, "-m", "tilescale.launch", "check", "-n", "2", "--seeds", "1", "program.py"]
    for args, code in (([], 0), (["wrong"], 1)):
        done = subprocess.run(
            [*command, *args], cwd=tmp_path, env=clean_env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == code, done.stderr
        assert "[0] no newline\n" in done.stdout and "[1] no newline\n" in done.stdout


COUNTING = """
@tilescale.jit
def count():
    @T.prim_func
    def main(x: T.Tensor((1,), "int32")):
        with T.Kernel(4):
            T.atomic_add(x[0], 1)
    return main

count()(np.zeros(1, "int32"))
"""


def test_how_much_of_an_exploration_was_run_is_told(check):
    """Four atomic updates of one element come in 24 orders."""
    options = ("--schedule", "exhaustive", "--json")
    facts = json.loads(check(1, COUNTING, *options).stdout)
    assert (facts["traces"], facts["incomplete"]) == (24, 0)
    facts = json.loads(check(1, COUNTING, *options, "--bound", "5").stdout)
    assert (facts["traces"], facts["incomplete"], facts["runs"]) == (5, 1, 6)
    assert (
        "not all interleavings of 1 launch"
        in check(1, COUNTING, "--schedule", "exhaustive", "--bound", "5").stdout
    )


LATE = """
@tilescale.jit
def late():
    @T.prim_func
    def main(x: T.Tensor((1,), "int32")):
        with T.Kernel(2) as b:
            if b == 0:
                T.atomic_add(x[0], 1)
            else:
                T.device_assert(T.atomic_load(x[0]) == 1)
    return main

late()(np.zeros(1, "int32"))
"""


COPIED = """
@tilescale.jit
def copied():
    @T.prim_func
    def main(A: T.Tensor((4,), "int32"), B: T.Tensor((4,), "int32")):
        with T.Kernel(2) as b:
            for i in T.serial(2):
                B[b * 2 + i] = A[b * 2 + i]
    return main
x, y = np.arange(4, dtype="int32"), np.zeros(4, "int32")
copied()(x, y)
"""


@pytest.mark.parametrize(
    "ranks, body, runs",
    [
        (1, COPIED, 3),
        (1, COPIED + "copied()(x, y)\n", 4),  # B is only written: what lies there decides nothing
        (1, COPIED + "x[0] = 7\ncopied()(x, y)\n", 6),
        (2, 2 * "ring(8)(a, inbox, got, b)\n", 4),  # the second time less is unwritten
        (2, "inbox[:] = 0\nring(8)(a, inbox, got, b)\nring(8)(a, comm.empty(8, like='numpy'), got, b)\n", 6),
    ],
)
def test_a_launch_of_which_all_interleavings_have_been_tried_runs_once(check, ranks, body, runs):
    facts = json.loads(check(ranks, body, "--json").stdout)
    assert facts["runs"] == runs and not facts["findings"]


DECIDED = LATE.replace("main(x:", "main(a: T.Tensor((1,), 'float32'), x:").replace(
    "if b == 0:", "if a[0] == 0.0:\n                return\n            if b == 0:"
).replace(
    'late()(np.zeros(1, "int32"))',
    'for value in (0, 1):\n    late()(np.full(1, value, "float32"), np.zeros(1, "int32"))',
)  # fmt: skip


def test_floats_that_decide_make_another_launch(check):
    """Nothing is wrong with any interleaving of the first launch."""
    facts = json.loads(check(1, DECIDED, "--schedule", "exhaustive", "--json").stdout)
    assert [f["schedule"].partition("@")[0] for f in facts["findings"]] == ["exhaustive:2"]
    stays = COPIED.replace("int32", "float32")  # floats that are only copied decide nothing
    assert json.loads(check(1, stays + "x[0] = 7\ncopied()(x, y)\n", "--json").stdout)["runs"] == 4


def test_an_interleaving_is_run_again_in_the_launch_that_it_was_found_in(check):
    (found,) = json.loads(check(1, COUNTING + LATE, "--schedule", "exhaustive", "--json").stdout)["findings"]
    again = found["schedule"].partition("--schedule ")[2]
    assert (
        found["kind"] == "assertion"
        and again.startswith("exhaustive:2@")
        and found["schedule"].startswith(f"{again}, 1 rank; again: ")
    )
    facts = json.loads(check(1, COUNTING + LATE, "--schedule", again, "--json").stdout)
    assert facts["runs"] == 3 and [f["kind"] for f in facts["findings"]] == ["assertion"]
    other = again.replace("2@", "3@")
    assert json.loads(check(1, COUNTING + LATE, "--schedule", other, "--json").stdout)["runs"] == 2
    assert check(1, COUNTING, "--schedule", "exhaustive:x@-").exit_code == 2


# ---- the static checks

FAULTS = """
@tilescale.jit
def far(N):
    @T.prim_func
    def main(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32"), at: T.int32):
        with T.Kernel(1):
            tile = T.alloc_shared((8,), "float32")
            T.copy(A[0:8], tile)
            tile[at] = 1.0
            T.copy(tile, B[0:8])
    return main

@tilescale.jit
def own(N):
    @T.prim_func
    def main(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32")):
        with T.Kernel(1):
            tile = T.alloc_shared((8,), "float32")
            T.copy(A[0:8], tile)
            with T.Scale("device") as rank, n:
                tile[8 * rank] = 1.0
            T.copy(tile, B[0:8])
    return main
"""


def test_the_static_checks_are_told_in_the_closing_line_and_in_a_table(check):
    done = check(3, "ring(8)(a, inbox, got, b)\nring(8)(a, inbox, got, b)\n", "--static")
    assert done.exit_code == 0, done.stderr
    assert ", no finding, static: 5 obligations, 5 proven, " in done.stdout
    assert (
        done.stderr.count("ring(N=8, wait=True) on 3 ranks:\n") == 1
        and "proven  refuted  unknown\npeer             1" in done.stderr
    )


def test_json_has_the_counts_of_the_static_checks(check):
    facts = json.loads(check(2, "ring(8)(a, inbox, got, b)\n", "--json").stdout)["static"]
    assert (facts["obligations"], facts["proven"], facts["refuted"], facts["unknown"]) == (5, 5, 0, 0)
    assert facts["kinds"]["wait"] == {"proven": 1, "refuted": 0, "unknown": 0} and not facts["cut_short"]


def test_a_budget_of_the_static_checks_that_ends_too_early_is_told(check, monkeypatch):
    monkeypatch.setattr(simulator, "STATIC_BUDGET", 20)
    done = check(2, "ring(8)(a, inbox, got, b)\n")
    told = "ring(N=8, wait=True) on 2 ranks: the static checks spent their 20 steps and left the rest open"
    assert f"tilescale: {told}\n" in done.stderr and ", not all looked at, " in done.stdout


def test_a_fault_that_a_run_met_is_told_once(check):
    done = check(1, "far(8)(a, b, 9)\n", "--json", head=HEAD + FAULTS)
    facts = json.loads(done.stdout)
    assert facts["static"]["refuted"] == 1 and done.exit_code == 1
    assert [f["kind"] for f in facts["findings"]] == ["out-of-bounds"] and facts["findings"][0][
        "schedule"
    ].startswith("round_robin")


def test_each_set_of_integers_is_checked_once_and_what_is_wrong_with_one_is_a_finding(check):
    done = check(2, "for at in (1, 2, 1, 2):\n    far(8)(a, b, at)\n", "--static", head=HEAD + FAULTS)
    assert done.exit_code == 0 and done.stderr.count("far(N=8) on any number of ranks, at = ") == 2, (
        done.stderr
    )


def test_ranks_that_launch_alone_are_not_blamed_for_those_that_do_not(check):
    assert check(2, "if rank == 0:\n    own(8)(a, b)\n", head=HEAD + FAULTS).exit_code == 0
    assert check(2, "own(8)(a, b)\n", head=HEAD + FAULTS).exit_code == 1


def test_limit_is_of_steps(check):
    body = "k = ring(8)\nk(a, inbox, got, b)\n"
    assert check(2, body).exit_code == 0
    done = check(2, body, "--limit", "5")
    assert done.exit_code == 1 and "has not ended after 5 steps" in done.stderr


def test_different_launches_are_named_with_their_constants(check):
    done = check(2, "ring(8, wait=rank != 1)(a, inbox, got, b)\n")
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("  and ")]
    assert "ring(N=8, wait=True) by rank 0" in line


@pytest.mark.parametrize("command", ["check", "trace"])
def test_products_have_one_thread_unless_the_user_says_more(tmp_path, command):
    """NumPy reads the variable when it is loaded, which must be behind that."""
    script = tmp_path / "program.py"
    script.write_text("import os, sys\nprint(os.environ['OPENBLAS_NUM_THREADS'], 'numpy' in sys.modules)\n")
    for given, seen in ((None, "1"), ("3", "3")):
        environ = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
        environ |= {
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            **({} if given is None else {"OPENBLAS_NUM_THREADS": given}),
        }
        argv = [sys.executable, "-m", "tilescale.launch", command, "-n", "1", str(script)]
        ran = subprocess.run(argv, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0 and f"{seen} False" in ran.stdout, ran.stdout + ran.stderr
