"""Ranks that are forked from the launcher, which has imported what they share: a fraction of the time and
memory of processes that each load it for themselves.

The launcher forks only while it has one thread, and never on machines where ranks may use a GPU: a driver's
state does not survive a fork. A forked rank leaves the launcher's frames (``Forked`` is raised up to the
command's entry point) and becomes what `python program` would have made of it: its own session, streams,
environment, ``sys.argv``, ``sys.path``, ``__main__``, random state and signals, and Python's own way to end.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.machinery
import io
import os
import random
import runpy
import signal
import sys
import types
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TextIO

from tilescale import devices, env
from tilescale.launch import output
from tilescale.launch.program import Program

#: what kernels from the cache run with, beside what a program names; neither TVM nor a GPU's driver
OF_OURS = (
    "tilescale.language",
    "tilescale.build",
    "tilescale.kernel",
    "tilescale.fingerprint",
    "tilescale.comm.heap",
    "tilescale.comm.shm",
    "tilescale.comm.tensors",
)


def is_possible(program: Program) -> bool:
    """Whether ranks of a program may be forked: Python source, on processors, where TILESCALE_FORK does not
    forbid it."""
    if not env.FORK.get() or program.source() is None:
        return False
    if env.HEAP.get() in ("symm_mem", "nvshmem"):
        return False
    device = devices.TABLE.get(env.TARGET.get())  # None: "auto"
    return not (devices.may_have_gpu() if device is None else device.gpu)


def warm(program: Program) -> bool:
    """Imports what the ranks share. Whether this process can be forked then: it has no other thread."""
    atexit.register(_spare)  # the first to be registered is the last to run
    before = set(sys.modules)
    for name in program.shared():
        with contextlib.suppress(
            Exception
        ):  # whatever is wrong with it, the ranks' own import says so, at its line
            importlib.import_module(name)
            if name == "tilescale":
                _load_ours()
    _shared.update((name, module) for name, module in sys.modules.items() if name not in before)
    gc.collect()
    gc.freeze()  # collections in the ranks leave these objects' pages alone: they stay shared
    # A first fork lets libraries end their pools (OpenBLAS does, by pthread_atfork) which the ranks start
    # anew when they need them.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task")) == 1


#: what the launcher has imported for the ranks
_shared: dict[str, types.ModuleType] = {}
_is_forked = False


def _spare() -> None:
    """At the end of a forked rank, after all that the program asked for: Python takes modules apart as it
    ends, which would copy every page that ranks share. It does so with the program's modules (files are
    flushed), and not with these, which the process's end frees."""
    if _is_forked:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_shared))
        for name, module in _shared.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


def _load_ours() -> None:
    for name in OF_OURS:
        importlib.import_module(name)
    from tilescale import native

    native.import_tvm_ffi()
    native.library()


class Forked(BaseException):
    """Raised in a forked rank, to leave the launcher's frames; ``run`` is called where nothing of them is
    left."""

    def __init__(self, program: Program):
        super().__init__()
        self.program = program

    def run(self) -> None:
        """Runs the program as ``__main__``, to Python's own end of it."""
        gc.enable()
        for name in [name for name in sys.modules if name.partition(".")[0] == "click"]:
            del sys.modules[name]  # the launcher's own; the program may mean another
        try:
            _run(self.program)
        except SystemExit:
            raise
        except BaseException as error:
            # The traceback begins at the program's first frame; Python does the rest: the exit code, or
            # SIGINT's fate.
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename in (
                __file__,
                runpy.__file__,
                "<frozen runpy>",
            ):
                trace = trace.tb_next
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            sys.excepthook = lambda *_: None
            raise


def _run(program: Program) -> None:
    main = types.ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=sys.modules["builtins"])
    sys.modules["__main__"] = main
    if program.kind == "module":
        runpy._run_module_as_main(program.name)  # type: ignore[attr-defined]  # what `python -m` itself calls
        return
    path = str(Path(program.name).absolute())
    main.__dict__.update(
        __file__=path, __loader__=importlib.machinery.SourceFileLoader("__main__", path), __cached__=None
    )
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def fork(
    program: Program,
    environ: Mapping[str, str],
    streams: tuple[int, int, int],
    keep: Collection[int],
    tie: Callable[[], None],
) -> int:
    """Forks a rank and returns its process; raises ``Forked`` in it.

    ``environ``: its whole environment. ``streams``: what becomes its descriptors 0, 1 and 2. ``keep``: the
    descriptors that libraries have opened; all others of the launcher are closed. ``tie``:
    processes.tie_to_parent's.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        tie()
        _become(program, environ, streams, keep)
    except BaseException as error:  # noqa: BLE001  # nothing may unwind the launcher's frames here
        with contextlib.suppress(OSError):
            os.write(2, f"tilescale: a rank cannot be set up: {type(error).__name__}: {error}\n".encode())
        os._exit(127)
    raise Forked(program)


def _become(
    program: Program, environ: Mapping[str, str], streams: tuple[int, int, int], keep: Collection[int]
) -> None:
    global _is_forked
    _is_forked = True
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for to, fd in enumerate(streams):
        os.dup2(fd, to)
    for fd in open_descriptors():
        if fd > 2 and fd not in keep:
            os.close(fd)
    os.environ.clear()
    os.environ.update(environ)
    _open_streams()
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    _end_early()
    sys.argv = [program.name, *program.args]
    sys.orig_argv = program.argv
    if not getattr(sys.flags, "safe_path", False):  # from Python 3.11 on
        sys.path[0] = str(program.folder())


def _end_early() -> None:
    """Lets the C library end the process when it has called what is registered from now on and has written
    out its streams: destructors of the libraries that ranks share would only copy what they take apart (of
    torch 80 MiB a rank, and a third of a second).

    on_exit(3)'s handlers get the exit status first and run in reverse order, so ``_exit`` can be one of them.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # glibc's; elsewhere it takes longer
        for last in (libc._exit, libc.fcloseall):
            libc.on_exit(ctypes.cast(last, ctypes.c_void_p), None)


def open_descriptors() -> list[int]:
    """The numbers of this process's open files."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.fstat(int(name))  # not the folder's own, which is closed by now
            found.append(int(name))
    return found


def _open_streams() -> None:
    """sys.stdin, stdout and stderr anew, as Python makes them: nothing buffered of the launcher's is in
    them."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    encoding = next((old.encoding for old in (sys.stdin, sys.stdout, sys.stderr) if old is not None), "utf-8")
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        old: TextIO | None = getattr(sys, name)  # none: it was closed when the launcher began
        raw = io.FileIO(fd, "rb" if fd == 0 else "wb", closefd=False)
        raw.name = f"<{name}>"
        binary = io.BufferedReader(raw) if fd == 0 else raw if unbuffered else io.BufferedWriter(raw)
        new = io.TextIOWrapper(
            binary,
            encoding=encoding,
            errors=output.errors_of(name, old)
            if old is not None
            else "backslashreplace"
            if fd == 2
            else "strict",
            newline=None if fd == 0 else "\n",
            line_buffering=fd == 2 and not unbuffered,
            write_through=unbuffered,
        )
        new.mode = "r" if fd == 0 else "w"  # type: ignore[misc]
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
