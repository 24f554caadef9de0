"""Runs a function on n ranks: forked from this process, so that what it has imported (torch) is there at once.

    results = run_ranks(4, worker, 3, "x")      # [worker(3, "x") on rank 0, … on rank 3]

The function may be a closure; what it returns is pickled. A rank that raises stops the others through the job's abort word.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import pickle
import selectors
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_numbers = itertools.count()


@dataclass
class RankFailure:
    """One rank's end: the exception's type name and text with its traceback, or how the process ended."""

    rank: int
    kind: str
    text: str
    trace: str


class RanksFailed(AssertionError):
    """Some ranks failed; ``failures`` in the order of ranks, ``seconds`` how long all of it took."""

    def __init__(self, failures: list[RankFailure], seconds: float):
        self.failures, self.seconds = failures, seconds
        super().__init__("\n".join(f"--- rank {f.rank}: {f.kind}: {f.text}\n{f.trace}" for f in failures))


def _child(
    rank: int, n: int, job: str, fn: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str], pipe: int, limit: float
) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(n), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(n), TILESCALE_JOB=job,
        TILESCALE_NUM_THREADS=os.environ.get("TILESCALE_NUM_THREADS", "1"),
    )  # fmt: skip
    os.environ.setdefault("TILESCALE_WAIT_TIMEOUT", "20")
    os.environ.setdefault("TILESCALE_HEAP_SIZE", "64M")
    os.environ.update(env)
    faulthandler.dump_traceback_later(limit, file=sys.__stderr__ or 2)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # the parent's OpenMP threads do not exist here, and cores are shared
    from tilescale import comm
    from tilescale.comm import bootstrap

    bootstrap.world.cache_clear()  # the parent may have asked who it is
    try:
        answer: Any = ("ok", fn(*args))
        data = pickle.dumps(answer)
    except BaseException as e:  # noqa: BLE001  # whatever it is, the parent has to hear of it
        comm.abort(f"{type(e).__name__}: {e}")
        data = pickle.dumps(("error", type(e).__name__, str(e), traceback.format_exc()))
    comm._leave()
    sys.stdout.flush()
    sys.stderr.flush()
    view = memoryview(data)
    while view:
        view = view[os.write(pipe, view) :]


def _fork(
    rank: int, n: int, job: str, fn: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str], limit: float
) -> tuple[int, int]:
    mine, its = os.pipe()
    with warnings.catch_warnings():
        # Fork beside threads: the runtime rebuilds its pool, and torch uses one thread.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(mine)
            _child(rank, n, job, fn, args, env, its, limit)
            code = 0
        finally:
            os._exit(code)
    os.close(its)
    return pid, mine


def _how(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit code {os.WEXITSTATUS(status)}"


def leftovers(job: str) -> list[str]:
    """Names of the job's segments that still lie in /dev/shm."""
    return sorted(p.name for p in Path("/dev/shm").glob(f"ts-{job}-*"))


def run_ranks(
    n: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, env: dict[str, str] | None = None
) -> list[Any]:
    """``fn(*args)`` on ``n`` ranks; their results in rank order.

    ``env``: further environment of the ranks. Raises RanksFailed when a rank raises, dies or is not done after ``timeout``
    seconds (then all are killed); AssertionError when something is left in /dev/shm.
    """
    job = f"test{os.getpid()}x{next(_numbers)}"
    start = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    ranks = [_fork(r, n, job, fn, args, env or {}, timeout) for r in range(n)]
    data = [b""] * n
    with selectors.DefaultSelector() as sel:
        for r, (_, pipe) in enumerate(ranks):
            sel.register(pipe, selectors.EVENT_READ, r)
        while sel.get_map() and time.monotonic() - start < timeout:
            for key, _ in sel.select(0.02):
                piece = os.read(key.fd, 1 << 20)
                data[key.data] += piece
                if not piece:
                    sel.unregister(key.fd)
        hanging = {key.data for key in sel.get_map().values()}
    failures = []
    results: list[Any] = [None] * n
    for r, (pid, pipe) in enumerate(ranks):
        if r in hanging:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(pipe)
        if r in hanging:
            failures.append(RankFailure(r, "Timeout", f"not done after {timeout:g} s", ""))
        elif data[r]:
            kind, *rest = pickle.loads(data[r])
            if kind == "ok":
                results[r] = rest[0]
            else:
                failures.append(RankFailure(r, *rest))
        else:
            failures.append(RankFailure(r, "Died", _how(status), ""))
    left = leftovers(job)
    for name in left:
        (Path("/dev/shm") / name).unlink(missing_ok=True)
    if failures:
        raise RanksFailed(failures, time.monotonic() - start)
    assert not left, f"left in /dev/shm: {left}"
    return results
