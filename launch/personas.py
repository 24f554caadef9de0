"""What a process is to a program, for simulated ranks that share one: environment, arguments, modules, random
numbers, output.

Ranks take turns (tilescale.comm.sim), so all of it can be exchanged when the turn goes on: each rank sees its
own ``os.environ``, ``sys.argv``, ``sys.path``, ``__main__``, its own copies of the program's modules and the
state of the random number generators that it left. Installed packages and the standard library are one for
all, and so is what they keep (torch's default dtype, the working directory).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import io
import os
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from tilescale.comm import sim
from tilescale.errors import CommError
from tilescale.launch import output

_INSTALLED = tuple({str(Path(sysconfig.get_path(name))) + os.sep for name in ("stdlib", "platstdlib")})
_EXTENSIONS = tuple(importlib.machinery.EXTENSION_SUFFIXES)
_PACKAGES = ("site-packages", "dist-packages")


class Marked(io.RawIOBase):
    """A stream of one rank: whole lines, each marked with its number, go to ``under``; ``before`` is called
    first."""

    def __init__(self, under: TextIO, mark: bytes, before: Callable[[], None]):
        self.under, self.mark, self.before = under, mark, before
        self.tail = b""

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self.under.isatty()

    def write(self, data: Any) -> int:
        lines = (self.tail + bytes(data)).split(b"\n")
        self.tail = lines.pop()
        if lines:
            self._put(b"".join(self.mark + line + b"\n" for line in lines))
        return len(data)

    def finish(self) -> None:
        """The rank has ended: its last line ends here, with or without a newline."""
        if self.tail:
            self._put(self.mark + self.tail + b"\n")
            self.tail = b""

    def _put(self, data: bytes) -> None:
        self.before()
        self.under.flush()
        self.under.buffer.write(data)
        self.under.buffer.flush()


class Output:
    """What a rank prints: ``streams``, its stdout and stderr, over those of the process (``under``)."""

    def __init__(self, rank: int, under: tuple[TextIO, TextIO], before: Callable[[], None]):
        marks = (output.Sink(1).prefix(rank), output.Sink(2).prefix(rank))
        self.marked = [Marked(file, mark, before) for file, mark in zip(under, marks, strict=True)]
        buffers = [io.BufferedWriter(m, 1 << 13) for m in self.marked]
        self.streams = [io.TextIOWrapper(b, "utf-8", "replace", line_buffering=True) for b in buffers]

    def finish(self) -> None:
        """The rank has ended."""
        for stream, marked in zip(self.streams, self.marked, strict=True):
            stream.flush()
            marked.finish()


class OfTurn:
    """``sys.stdout`` of all ranks: the stream of the rank whose turn it is, also for what keeps it (handlers
    of logging)."""

    def __init__(self, now: Callable[[], Any]):
        self.__dict__["_now"] = now

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now(), name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())


class Persona:
    """One rank's view of the process. ``put_on`` when its turn begins, ``take_off`` before it ends.

    Args:
        environ: what of the environment is the rank's own; the rest is the process's. streams: stdout and
            stderr.
    """

    #: name of a module → whether it belongs to the program, of which each rank has its own
    _own: dict[str, bool] = {}

    def __init__(
        self,
        rank: int,
        environ: Mapping[str, str],
        argv: list[str],
        path: list[str],
        streams: tuple[Any, Any],
    ):
        self.rank = rank
        self.environ = {**os.environ, **environ}
        self.argv, self.path, self.streams = argv, path, streams
        self.modules: dict[str, Any] = {}
        self.main: Any = None
        self.randoms: dict[str, Any] = {}

    def put_on(self) -> None:
        """The process becomes this rank."""
        sys.stdout, sys.stderr = self.streams
        _exchange(self.environ)
        sys.argv, sys.path[:] = self.argv, self.path
        sys.modules.update(self.modules)
        if self.main is not None:
            sys.modules["__main__"] = self.main
        for name in _RANDOMS:
            if _draws(name):
                self.seed(name)

    def seed(self, module: str) -> None:
        """The module's random numbers go on where this rank left them."""
        _, restore, initial = _RANDOMS[module]
        restore(self.randoms[module] if module in self.randoms else initial(self.rank))

    def take_off(self) -> None:
        """Keeps what the rank has made of the process."""
        self.streams = sys.stdout, sys.stderr
        self.environ, self.argv, self.path = dict(os.environ), sys.argv, list(sys.path)
        self.main = sys.modules.get("__main__")
        self.modules = {}
        locks: dict[str, Any] = getattr(importlib._bootstrap, "_module_locks", {})
        for name in list(sys.modules):
            if self._is_own(name):
                self.modules[name] = sys.modules.pop(name)
                # A module that waits in its import is no reason for other ranks to wait for theirs.
                locks.pop(name, None)
        for name, (state, _, _) in _RANDOMS.items():
            if _draws(name):
                self.randoms[name] = state()

    @classmethod
    def share(cls) -> None:
        """What is imported by now is one for all ranks."""
        cls._own = dict.fromkeys(sys.modules, False)

    def _is_own(self, name: str) -> bool:
        known = self._own.get(name)
        if known is None:
            known = self._own[name] = _is_programs(name, sys.modules[name])
        return known


def _is_programs(name: str, module: Any) -> bool:
    """Whether a module is part of the program, and not ours, installed, or of the standard library."""
    if name.partition(".")[0] in ("tilescale", "__main__"):
        return False
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    if not isinstance(file, str) or file.endswith(_EXTENSIONS):  # compiled modules do not load twice
        return False
    return not _installed(file)


def _installed(file: str) -> bool:
    return file.startswith((*_INSTALLED, "<frozen")) or any(part in _PACKAGES for part in Path(file).parts)


def is_programs(frame: FrameType) -> bool:
    """Whether a frame runs code of the program, and not ours, of an installed package or of the standard
    library."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] != "tilescale" and not _installed(
        frame.f_code.co_filename
    )


def _exchange(environ: Mapping[str, str]) -> None:
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    for name, value in environ.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _torch_state(rank: int) -> Any:
    import torch

    return torch.Generator().manual_seed(rank).get_state()


def _numpy_state(rank: int) -> Any:
    import numpy

    return numpy.random.RandomState(rank).get_state()


def _of_module(module: str, name: str) -> Callable[..., Any]:
    return lambda *args: getattr(sys.modules[module], name)(*args)


#: module → how its global generator's state is read, set, and what it is at first, by rank: ranks that seed
#: nothing draw differently
_RANDOMS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[int], Any]]] = {
    "random": (random.getstate, random.setstate, lambda rank: random.Random(rank).getstate()),
    "numpy.random": (
        _of_module("numpy.random", "get_state"),
        _of_module("numpy.random", "set_state"),
        _numpy_state,
    ),
    "torch": (_of_module("torch", "get_rng_state"), _of_module("torch", "set_rng_state"), _torch_state),
}


#: module → the function that its import is complete with
_COMPLETE = {"random": "getstate", "numpy.random": "get_state", "torch": "get_rng_state"}


def _draws(module: str) -> bool:
    """Whether a module's generator is there: not of one whose import is under way, nor of one that a program
    has replaced or forbidden (``sys.modules["torch"] = None``)."""
    return hasattr(sys.modules.get(module), _COMPLETE[module])


@contextlib.contextmanager
def sleeping() -> Iterator[None]:
    """Inside, a rank whose program sleeps lets others go on: perhaps it polls for what they do."""
    slept = time.sleep

    def sleep(seconds: float) -> None:
        rank = sim.rank_of_thread()
        if rank is None or not is_programs(sys._getframe(1)):
            slept(seconds)
        else:
            rank.job.sleep(rank.rank, seconds)

    time.sleep = sleep  # type: ignore[assignment]
    try:
        yield
    finally:
        time.sleep = slept


class Imports:
    """A finder of modules that acts behind the import of two: torch's generator begins as the rank's own, and
    ``torch.distributed.init_process_group`` says why it cannot work here, instead of waiting."""

    def __init__(self, now: Callable[[], Persona]):
        self.behind = {
            "torch": lambda module: now().seed("torch"),
            "torch.distributed.distributed_c10d": lambda module: setattr(
                module, "init_process_group", refuse_process_group
            ),
        }

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in self.behind:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self.behind[name](module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def refuse_process_group(*args: Any, **kwargs: Any) -> None:
    raise CommError(
        "torch.distributed.init_process_group: simulated ranks are threads of one process, and a process "
        "group needs processes",
        expected="tilescale.comm, which simulated ranks have",
        hint="tilescale.comm.init(), then comm.rank(), comm.world_size(), comm.barrier()",
    )
