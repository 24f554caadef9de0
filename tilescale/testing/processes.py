"""Runs a function on n ranks: forked from this process, so that what it has imported (torch) is there at
once.

    results = run_ranks(4, worker, 3, "x")      # [worker(3, "x") on rank 0, … on rank 3]

The function may be a closure; what it returns is pickled. A rank that raises stops the others through the
job's abort word; ranks end with this process, however it ends.
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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilescale.lifetime import tie_to_parent

_numbers = itertools.count()


@dataclass
class RankFailure:
    """One rank's end: the exception's type name and text with its traceback, or how the process ended.
    ``trace`` of a rank that was not done in time is where its threads were."""

    rank: int
    kind: str
    text: str
    trace: str


class RanksFailed(AssertionError):
    """Some ranks failed; ``failures`` in the order of ranks, ``seconds`` how long all of it took."""

    def __init__(self, failures: list[RankFailure], seconds: float):
        self.failures, self.seconds = failures, seconds
        super().__init__("\n".join(f"--- rank {f.rank}: {f.kind}: {f.text}\n{f.trace}" for f in failures))


#: asks a process that show_where() has prepared where it is
WHERE = signal.SIGUSR1
#: seconds that it has to say so
TELLING = 0.5


def show_where(file: int) -> None:
    """Prepares this process for end_hanging(): it will write where its threads are to ``file``.

    By a signal and not by faulthandler.dump_traceback_later: its watchdog is a thread, which a fork leaves
    behind, and arming it again in the child waits for that thread for ever.
    """
    faulthandler.register(WHERE, file=file, all_threads=True, chain=False)


def end_hanging(pids: Iterable[int]) -> None:
    """Lets processes say where they are, then kills them. Their parent still has to wait for them."""
    asked = list(pids)
    for pid in asked:
        os.kill(pid, WHERE)
    if asked:
        time.sleep(TELLING)
    for pid in asked:
        os.kill(pid, signal.SIGKILL)


def _child(
    rank: int, n: int, job: str, fn: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str], pipe: int
) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(n), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(n), TILESCALE_JOB=job,
        TILESCALE_NUM_THREADS=os.environ.get("TILESCALE_NUM_THREADS", "1"),
    )  # fmt: skip
    os.environ.setdefault("TILESCALE_WAIT_TIMEOUT", "20")
    os.environ.setdefault("TILESCALE_HEAP_SIZE", "64M")
    os.environ.update(env)
    if "torch" in sys.modules:
        # The parent's OpenMP threads do not exist here, and cores are shared.
        sys.modules["torch"].set_num_threads(1)
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


@dataclass
class _Rank:
    """A forked rank: what it answers comes through ``pipe``; ``where`` has what show_where() wrote;
    ``answer`` is what it returned."""

    pid: int
    pipe: int
    where: int
    data: bytes = b""
    answer: Any = None

    def failure(self, rank: int, hung: float | None, status: int) -> RankFailure | None:
        """Why it gave no answer; None where it did. ``hung``: the limit that it ran past."""
        if hung is not None:
            size = os.fstat(self.where).st_size
            return RankFailure(
                rank,
                "Timeout",
                f"not done after {hung:g} s",
                os.pread(self.where, size, 0).decode(errors="replace"),
            )
        if not self.data:
            return RankFailure(rank, "Died", _how(status), "")
        kind, *rest = pickle.loads(self.data)
        if kind != "ok":
            return RankFailure(rank, *rest)
        (self.answer,) = rest
        return None


def _fork(
    rank: int, n: int, job: str, fn: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str]
) -> _Rank:
    mine, its = os.pipe()
    where = os.memfd_create(f"{job}-{rank}")
    tie = tie_to_parent()
    with warnings.catch_warnings():
        # Fork beside threads: the runtime rebuilds its pool, and torch uses one thread.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            tie()
            show_where(where)
            os.close(mine)
            _child(rank, n, job, fn, args, env, its)
            code = 0
        finally:
            os._exit(code)
    os.close(its)
    return _Rank(pid, mine, where)


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

    ``env``: further environment of the ranks. Raises RanksFailed when a rank raises, dies or is not done
    after ``timeout`` seconds (then all are killed); AssertionError when something is left in /dev/shm.
    """
    job = f"test{os.getpid()}x{next(_numbers)}"
    start = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    ranks = [_fork(r, n, job, fn, args, env or {}) for r in range(n)]
    with selectors.DefaultSelector() as sel:
        for r, rank in enumerate(ranks):
            sel.register(rank.pipe, selectors.EVENT_READ, r)
        while sel.get_map() and time.monotonic() - start < timeout:
            for key, _ in sel.select(0.02):
                piece = os.read(key.fd, 1 << 20)
                ranks[key.data].data += piece
                if not piece:
                    sel.unregister(key.fd)
        hanging = {key.data for key in sel.get_map().values()}
    end_hanging(ranks[r].pid for r in hanging)
    failures = []
    for r, rank in enumerate(ranks):
        _, status = os.waitpid(rank.pid, 0)
        why = rank.failure(r, timeout if r in hanging else None, status)
        failures += [] if why is None else [why]
        os.close(rank.pipe)
        os.close(rank.where)
    left = leftovers(job)
    for name in left:
        (Path("/dev/shm") / name).unlink(missing_ok=True)
    if failures:
        raise RanksFailed(failures, time.monotonic() - start)
    assert not left, f"left in /dev/shm: {left}"
    return [rank.answer for rank in ranks]
