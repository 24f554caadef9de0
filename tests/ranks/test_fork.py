"""Ranks that are forked from the launcher: what a program sees of it, nothing; what it costs, less."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime import with_runtime
from tilescale.launch import fork
from tilescale.launch.program import Program

# What a process of Python's is made of; the same where it was forked and where it was started.
FACTS = """
'''A program.'''
import numpy
import atexit, faulthandler, json, os, signal, sys, threading

def stream(s):
    wide = s.buffer if hasattr(s, "buffer") else None
    return [s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through, type(wide).__name__, s.fileno(), s.closed, s.newlines]

ours = sys.modules["__main__"]
names = {k: os.environ[k] for k in sorted(os.environ) if k not in ("TILESCALE_JOB", "MASTER_PORT", "TILESCALE_FORK")}
facts = {
    "main": [ours.__name__, ours.__file__, ours.__doc__, str(ours.__spec__ and ours.__spec__.name), type(ours.__loader__).__name__],
    "same": ours.__dict__ is globals(), "keys": sorted(globals()), "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path[:2],
    "environ": names, "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "streams": [stream(s) for s in (sys.stdin, sys.stdout, sys.stderr)], "same_streams": sys.stdout is sys.__stdout__,
    "signals": {str(s): str(signal.getsignal(s)) for s in ("INT", "TERM", "HUP", "CHLD", "PIPE", "USR1") for s in [getattr(signal, "SIG" + s)]},
    "fds": sorted(int(n) for n in os.listdir("/proc/self/fd"))[:3], "more": len(os.listdir("/proc/self/fd")),
    "threads": [threading.current_thread() is threading.main_thread(), threading.active_count()],
    "fault": faulthandler.is_enabled(), "click": "click" in sys.modules, "wakeup": signal.set_wakeup_fd(-1), "input": sys.stdin.read(),
}
print(json.dumps(facts))
"""

ENDS = """
import numpy
import atexit, os, sys
kept = open(sys.argv[1] + os.environ["RANK"], "w")
kept.write("written")
atexit.register(lambda: print("last words"))
def inner():
    {fate}
inner()
"""


def run(
    clean_env: dict[str, str], forked: bool, *command: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    env = clean_env | {"TILESCALE_FORK": str(int(forked))}
    argv = [sys.executable, "-m", "tilescale", "launch", *command]
    return subprocess.run(argv, env=env, cwd=cwd, input="typed\n", capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("module", "unbuffered"), [(False, "1"), (False, ""), (True, "1")])
def test_a_forked_rank_is_like_any_process(
    clean_env: dict[str, str], tmp_path: Path, module: bool, unbuffered: str
):
    (tmp_path / "facts.py").write_text(FACTS)
    command = ["-n", "1", *(["-m", "facts"] if module else ["facts.py"]), "-x", "y"]
    made = [
        run(clean_env | {"PYTHONUNBUFFERED": unbuffered}, forked, *command, cwd=tmp_path)
        for forked in (False, True)
    ]
    assert all(m.returncode == 0 for m in made), made
    started, forked = (json.loads(m.stdout.removeprefix("[0] ")) for m in made)
    assert forked == started


@pytest.mark.parametrize(
    ("fate", "code"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('no')", 1),
        ("1 / 0", 1),
        ("raise KeyboardInterrupt", 130),
        ("os.kill(os.getpid(), 15)", 143),
        ("os.abort()", 134),
        ("os._exit(9)", 9),
    ],
)
def test_it_ends_like_any_process(clean_env: dict[str, str], tmp_path: Path, fate: str, code: int):
    (tmp_path / "ends.py").write_text(ENDS.format(fate=fate))
    made = [run(clean_env, forked, "-n", "1", "ends.py", "out", cwd=tmp_path) for forked in (False, True)]
    started, forked = (
        (m.returncode, m.stdout, [x for x in m.stderr.splitlines() if "0x" not in x and "xtension" not in x])
        for m in made
    )
    if fate != "os.abort()":  # faulthandler's list of extension modules and threads is not the program's
        assert forked == started
    assert forked[0] == code and (tmp_path / "out0").read_text() == (
        "written" if code in (0, 1, 3, 130) else ""
    )


def test_ranks_share_what_they_import_and_no_randomness(tilescale_launch, tmp_path: Path):
    script = tmp_path / "draws.py"
    script.write_text(
        "import numpy, random\nprint(id(numpy), random.random(), numpy.random.rand(), numpy.random.default_rng().random())\n"
    )
    lines = [line.split()[1:] for line in tilescale_launch(4, script).stdout.splitlines()]
    assert [len(set(column)) for column in zip(*lines, strict=True)] == [1, 4, 4, 4]


def test_a_rank_may_start_processes_of_its_own(tilescale_launch, tmp_path: Path):
    script = tmp_path / "pool.py"
    script.write_text(
        "import numpy, multiprocessing\ndef twice(x): return 2 * x\nif __name__ == '__main__':\n"
        "    for how in ('spawn', 'fork'):\n        with multiprocessing.get_context(how).Pool(1) as pool: print(pool.map(twice, [1, 2]))\n"
    )
    done = tilescale_launch(2, script)
    assert sorted(done.stdout.splitlines()) == [f"[{r}] [2, 4]" for r in (0, 0, 1, 1)], done.stderr


def test_one_rank_looks_at_a_kernel_for_all(tilescale_launch, clean_env: dict[str, str], tmp_path: Path):
    """A kernel that a job of another size has compiled is checked for this one by a single rank: the others
    load no compiler."""
    script = tmp_path / "shift.py"
    script.write_text(
        "import sys, numpy as np, tilescale, tilescale.language as T\nfrom tilescale import comm\n"
        "@tilescale.jit\ndef shift(N):\n    @T.prim_func\n"
        "    def main(A: T.Tensor((N,), 'float32'), B: T.SymmTensor((N,), 'float32'), done: T.Signal((1,))):\n"
        "        with T.Kernel(1) as bx:\n            with T.Scale('device') as rank, n:\n"
        "                T.copy(A, B, dst=(rank + 1) % n, signal=done[0])\n                T.wait(done[0])\n    return main\n"
        "comm.init()\nb, s = comm.zeros(8, like='numpy'), comm.signals(1, like='numpy')\n"
        "shift(8)(np.full(8, comm.rank(), 'float32'), b, s)\nassert (b == (comm.rank() - 1) % comm.world_size()).all()\n"
        "print('tvm' in sys.modules)\n"
    )
    env = {"TILESCALE_CACHE_DIR": str(with_runtime(tmp_path / "cache")), "TILESCALE_HEAP_SIZE": "16M"}
    for count in (2, 5):
        done = tilescale_launch(count, script, env=env)
        assert sorted(line.split()[1] for line in done.stdout.splitlines()) == ["False"] * (count - 1) + [
            "True"
        ], done.stderr


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "'''A text.'''\nfrom __future__ import annotations\nimport os, torch.nn\nimport numpy as np",
            ["torch", "numpy"],
        ),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '3'\nimport torch", []),
        ("import os\nos.environ.setdefault('A', '3')\nimport torch", []),
        (
            "import sys\nsys.path.insert(0, 'x')\nN: int = 3\nA, B = 1, 2\ndef f(): import torch\nfrom tilescale import comm",
            ["tilescale"],
        ),
        ("N = len('abc')\nimport numpy", []),
        ("import near\nimport tilescale", ["ml_dtypes", "tilescale"]),
        ("import stops\nimport tilescale", ["numpy"]),
        ("from pack import thing\nimport os", ["torch"]),
        ("from . import x\nimport json", []),
        ("import (", []),
    ],
)
def test_what_a_program_imports_first(tmp_path: Path, text: str, found: list[str]):
    (tmp_path / "main.py").write_text(text)
    (tmp_path / "near.py").write_text("import near, ml_dtypes\n")
    (tmp_path / "stops.py").write_text("import numpy\nprint('here')\nimport torch\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("import torch\n")
    assert Program("script", str(tmp_path / "main.py")).shared() == found


@pytest.mark.parametrize(
    ("environ", "possible"),
    [
        ({}, True),
        ({"TILESCALE_FORK": "0"}, False),
        ({"TILESCALE_TARGET": "cuda"}, False),
        ({"TILESCALE_HEAP": "nvshmem"}, False),
    ],
)
def test_where_ranks_are_forked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environ: dict[str, str], possible: bool
):
    (tmp_path / "main.py").write_text("import os")
    for name in ("TILESCALE_FORK", "TILESCALE_HEAP"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TILESCALE_TARGET": "cpu"} | environ).items():  # cpu: also on a machine with a GPU
        monkeypatch.setenv(name, value)
    assert fork.is_possible(Program("script", str(tmp_path / "main.py"))) is possible
    assert not fork.is_possible(Program("executable", "echo"))
    # A folder with a __main__.py: Python's own business.
    assert not fork.is_possible(Program("script", str(tmp_path)))


def test_a_process_with_threads_is_not_forked(tmp_path: Path):
    code = (
        "import threading\nfrom tilescale.launch import fork\nfrom tilescale.launch.program import Program\n"
        f"p = Program('script', {str(tmp_path / 'main.py')!r})\nprint(fork.warm(p))\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\nprint(fork.warm(p))\n"
    )
    (tmp_path / "main.py").write_text("import numpy")  # with a pool of threads of its own
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "False"], done.stderr
