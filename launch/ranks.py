"""Running a job of ranks on this machine: starts them, passes on what they print, and ends all of them when
one fails.

One thread and one poll(2) loop over the ranks' pipes, the launcher's own streams and a pipe that signals
write to. Who ends what: a rank that fails, Ctrl-C, SIGTERM or SIGHUP → the launcher asks all processes of the
job to end, then kills what is left; the launcher itself is killed → the kernel kills the ranks
(lifetime.tie_to_parent) and the watcher the rest (watch.py).
"""

from __future__ import annotations

import os
import secrets
import select
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field

from tilescale import env, lifetime
from tilescale.comm import bootstrap
from tilescale.comm.journal import Journal
from tilescale.launch import fork, output, processes
from tilescale.launch.nodes import Link, Node, Start
from tilescale.launch.program import Program
from tilescale.launch.watch import Watcher

# Seconds. All ends within five of the cause: LEAVING + GRACE + LEFTOVERS, and what killing takes. Behind a
# SIGTERM ranks have longer (TILESCALE_STOP_GRACE): whoever sends it may want the work to be kept.
SETTLE = 0.3  # others that fail for the same reason may still say so
NOTICED = 1.0  # another node's launcher may still notice why
LEAVING = (
    1.5  # for a rank whose failure came before that of one that has ended, and whose exit code is to come
)
GRACE = 2.0  # between asking and killing
LEFTOVERS = 0.5  # for helpers that end when their rank has, and clean up (multiprocessing's resource tracker)
DRAIN = 0.5  # to read the pipes of a dead job, which somebody out of reach may still hold open
PARTIAL = 0.1  # a line that has not ended after this is shown on a terminal: a prompt

LONGEST_REASON = 400  # characters of an exception's message that the last line repeats

STOPPERS = {
    signal.SIGINT: "interrupted (Ctrl-C)",
    signal.SIGTERM: "ended by SIGTERM",
    signal.SIGHUP: "the terminal is gone (SIGHUP)",
}


@dataclass(eq=False)
class Rank:
    """One rank's process. Its zombie is kept until the job is over, so that its number cannot become somebody
    else's."""

    number: int
    pid: int
    stdin: int | None  # the writing end of its input, where the launcher feeds it
    streams: list[Stream] = field(default_factory=list)
    status: int | None = None  # exit code, or minus the signal
    stderr: output.Source | None = None

    def look(self) -> bool:
        """Whether it has ended since the last look."""
        if self.status is not None:
            return False
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return False
        self.status = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        return True

    def fate(self) -> str:
        assert self.status is not None
        if self.status >= 0:
            return f"rank {self.number} exited with code {self.status}"
        return f"rank {self.number} was killed by signal {-self.status} ({_signal_name(-self.status)})"

    def why(self) -> str:
        """The exception that its last traceback named, where one ended it: Python exits with 1 then."""
        if self.status != 1 or self.stderr is None:
            return ""
        text = self.stderr.error.decode(errors="replace")
        return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"


@dataclass(eq=False)
class Stream:
    """The reading end of a rank's stdout or stderr."""

    fd: int
    source: output.Source
    sink: output.Sink
    since: float = 0.0  # when its unfinished line arrived


#: starts a rank, given its part of the environment and its descriptors 0, 1 and 2; returns its process
Begin = Callable[[dict[str, str], tuple[int, int, int]], int]


def run(program: Program, count: int, node: Node | None = None) -> int:
    """Runs ``program`` as ``count`` ranks, those of one ``node`` where the job has several, and returns the
    exit code of the job. In a rank that is forked it does not return: fork.Forked goes up to the command's
    entry point, and frames on its way must leave alone what is the launcher's.

    0 where all ranks exited with 0; the code of the first rank that failed, 128 + the signal where one killed
    it; 128 + the signal that ended the launcher; alike on all nodes. Raises CommError where this system
    cannot tie ranks to their launcher, or the other nodes do not come. Call it from the only thread of a
    process that does nothing else: it takes over signals and adopts orphans."""
    _open_standard_streams()
    return _Job(program, count, node).run()


def share_processors(environ: MutableMapping[str, str], count: int) -> None:
    """OpenMP's threads, which are also torch's, of each of ``count`` ranks on this machine, unless somebody
    has said how many."""
    environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))


class _Job:
    def __init__(self, program: Program, count: int, node: Node | None):
        self.program, self.count = program, count
        self.number = None if node is None else node.number
        self.pid = os.getpid()
        port = _free_port()
        self.link = None if node is None else Link(node, count, port)
        self.start = (
            self.link.start if self.link else Start(secrets.token_hex(8), 0, count, "127.0.0.1", port)
        )
        self.name = self.start.job
        self.ranks: list[Rank] = []
        self.out, self.err = output.sinks()
        # poll, not epoll: that refuses regular files, which stdout may be.
        self.selector = selectors.PollSelector()
        self.code = 0
        self.reason = ""
        self.failed: Rank | None = None  # which the reason is about
        self.order: list[Rank] = []  # that failed, left or stopped the job: causes before their consequences
        self.stop_at: float | None = None  # when the ranks are to be asked to end
        self.kill_at: float | None = None  # when they are to be killed
        self.stop_signal = signal.SIGTERM
        self.grace: float | None = None  # between the two, where that is not GRACE
        self.signalled = False  # a person or a scheduler has asked this launcher to end
        self.asked = 0  # ranks that were running when all were asked to end

    def run(self) -> int:
        lifetime.prctl(lifetime.PR_SET_CHILD_SUBREAPER, 1)
        self.wake, wake_end = os.pipe()
        for fd in (self.wake, wake_end):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *STOPPERS):
            # What was ignored when we came (nohup, a background job of a plain shell) stays ignored.
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        self.selector.register(self.wake, selectors.EVENT_READ, self._signals)
        if self.link:
            self.selector.register(self.link.line, selectors.EVENT_READ, self._hear)
        self.watcher = Watcher(self.name, self.number)
        self.journal = Journal(self.name, shared=self.link is not None)
        try:
            self._start()
            while any(rank.status is None for rank in self.ranks):
                self._step(self._deadline())
            self._await_nodes()
            self._finish()
        finally:
            if os.getpid() == self.pid:  # and no forked rank
                self._clean_up()
        return self.code

    def _clean_up(self) -> None:
        """Also when an error of our own ends the job: no process and no file stays."""
        processes.end(self._living, patience=0)
        processes.sweep(self.name)
        self.watcher.close()
        self.journal.close()
        if self.link:
            self.link.close()
        for rank in self.ranks:
            os.waitpid(rank.pid, os.WNOHANG)

    def _await_nodes(self) -> None:
        """Our ranks have ended. Where all is well the other nodes' may still fail, which is this node's
        failure too; else all nodes are told."""
        if self.link is None:
            return
        while self.stop_at is not None and self._is_awaited(time.monotonic()):
            self._step(self._deadline())
        if self.reason:
            self.link.fail(self.code, self._says(), self.grace)
            return
        self.link.done()
        while not self.link.over and not self.reason:
            self._step(None)

    def _hear(self) -> None:
        """What the hub says: another node's failure is ours."""
        assert self.link is not None
        known = self.link.failure
        self.link.hear()
        if self.link.ended:
            self.selector.unregister(self.link.line)
        found = self.link.failure
        if found is not known and found is not None and self.kill_at is None and not self.link.told:
            # A failure of ours that has not been said yet counts as its consequence: the hub came first.
            self.code, self.reason, self.grace = found
            self.failed, self.stop_at = None, time.monotonic()
        if self.link.hurried:
            self.link.hurried = False
            self._at_once()

    def _at_once(self) -> None:
        """Somebody has asked twice: ranks that are ending are killed."""
        if self.kill_at is not None:
            self.kill_at = 0.0
        elif self.stop_at is not None:
            self.stop_at = self.grace = 0.0

    def _start(self) -> None:
        environ = self._environ()
        begin = self._forking(environ) or self._executing(environ)
        for local in range(self.count):
            number = self.start.first + local
            out, err = os.pipe(), os.pipe()
            feed = os.pipe() if number == 0 and os.isatty(0) else None
            stdin = feed[0] if feed else 0 if number == 0 else os.open(os.devnull, os.O_RDONLY)
            try:
                pid = begin({"RANK": str(number), "LOCAL_RANK": str(local)}, (stdin, out[1], err[1]))
            except OSError as error:
                code = 126 if isinstance(error, PermissionError) else 127
                self._fail(code, f"{self.program.argv[0]} cannot be run: {error.strerror}")
                return
            self.watcher.add(pid)
            for fd in {stdin, out[1], err[1]} - {0}:
                os.close(fd)
            rank = Rank(number, pid, feed[1] if feed else None)
            self.ranks.append(rank)
            for fd, sink in ((out[0], self.out), (err[0], self.err)):
                os.set_blocking(fd, False)
                source = output.Source(sink.prefix(number))
                rank.streams.append(Stream(fd, source, sink))
                rank.stderr = source  # the later of the two
            if feed:
                self.selector.register(0, selectors.EVENT_READ, self._carry_input)

    def _executing(self, environ: dict[str, str]) -> Begin:
        """Starts ranks as processes that begin with nothing."""
        tie = lifetime.tie_to_parent()

        def begin(own: dict[str, str], streams: tuple[int, int, int]) -> int:
            # One thread and no locks held here, so that code between fork and exec is safe.
            stdin, out, err = streams
            process = subprocess.Popen(
                self.program.argv,
                stdin=stdin,
                stdout=out,
                stderr=err,
                env=environ | own,
                start_new_session=True,
                preexec_fn=tie,
            )
            process.returncode = 0  # the job looks after it: no warning that it still runs
            return process.pid

        return begin

    def _forking(self, environ: dict[str, str]) -> Begin | None:
        """Starts ranks as forks of this process, which imports what they share; None where that cannot be."""
        if not fork.is_possible(self.program):
            return None
        # Libraries read the environment when they are loaded: it must be the ranks'.
        os.environ.clear()
        os.environ.update(environ)
        before = set(fork.open_descriptors())
        if not fork.warm(self.program):
            return None
        keep, tie = set(fork.open_descriptors()) - before, lifetime.tie_to_parent()
        return lambda own, streams: fork.fork(self.program, environ | own, streams, keep, tie)

    def _environ(self) -> dict[str, str]:
        environ = bootstrap.without_ranks(os.environ) | {
            "TILESCALE_JOB": self.name,
            "WORLD_SIZE": str(self.start.size),
            "LOCAL_WORLD_SIZE": str(self.count),
            "NODE_RANK": str(self.number or 0),
            "MASTER_ADDR": self.start.addr,
            "MASTER_PORT": str(self.start.port),
        }
        share_processors(environ, self.count)
        # What a rank had printed before it died must be seen, and where it crashed.
        environ.setdefault("PYTHONUNBUFFERED", "1")
        environ.setdefault("PYTHONFAULTHANDLER", "1")
        return environ

    # The loop

    def _step(self, timeout: float | None) -> None:
        """Waits for the next event, at most ``timeout`` seconds, and handles all that have come."""
        backlog = len(self.out.queue) + len(self.err.queue) > output.BACKLOG
        for stream in self._streams():
            self._watch_fd(stream.fd, selectors.EVENT_READ, stream, not backlog)
        for sink in {self.out, self.err}:
            self._watch_fd(sink.fd, selectors.EVENT_WRITE, sink, bool(sink.queue))
        for key, _ in self.selector.select(timeout):
            if isinstance(key.data, Stream):
                self._read(key.data)
            elif isinstance(key.data, output.Sink):
                self._write(key.data)
            else:
                key.data()
        now = time.monotonic()
        for stream in self._streams():
            if stream.since and stream.since + PARTIAL <= now:
                stream.sink.show_partial(stream.source)
                stream.since = 0.0
        if self.stop_at is not None and self.stop_at <= now and not self._is_awaited(now):
            self.stop_at, self.kill_at = None, now + (GRACE if self.grace is None else self.grace)
            self.asked = sum(rank.status is None for rank in self.ranks)
            if self.link:
                self.link.fail(self.code, self._says(), self.grace)
            processes.send(self._living(), self.stop_signal)
        if self.kill_at is not None and self.kill_at <= now:
            self.kill_at = now + GRACE
            processes.send(self._living(), signal.SIGKILL)

    def _deadline(self) -> float | None:
        """Seconds until something is to be done although nothing happens."""
        times = [stream.since + PARTIAL for stream in self._streams() if stream.since]
        now = time.monotonic()
        if self.stop_at is not None:
            times.append(max(self.stop_at, now + 0.05) if self._is_awaited(now) else self.stop_at)
        if self.kill_at is not None:
            times.append(self.kill_at)
        return max(0.0, min(times) - now) if times else None

    def _watch_fd(self, fd: int, event: int, data: object, wanted: bool) -> None:
        if wanted and fd not in self.selector.get_map():
            self.selector.register(fd, event, data)
        elif not wanted and fd in self.selector.get_map():
            self.selector.unregister(fd)

    def _streams(self) -> list[Stream]:
        return [stream for rank in self.ranks for stream in rank.streams]

    def _living(self) -> list[int]:
        sessions = [rank.pid for rank in self.ranks]
        pids = processes.find(self.name, sessions, ancestor=os.getpid(), node=self.number)
        return [pid for pid in pids if pid not in self._helpers()]

    def _helpers(self) -> set[int]:
        """Processes of the launcher's own."""
        return {self.watcher.pid} | ({self.link.hub} if self.link and self.link.hub else set())

    # What happens

    def _signals(self) -> None:
        for number in os.read(self.wake, 4096):
            if number in STOPPERS:
                self._stop(signal.Signals(number))
        self._look()
        self._bury_orphans()

    def _stop(self, number: signal.Signals) -> None:
        """A signal asks the job to end; the second one, at once."""
        again, self.signalled = self.signalled, True
        if not again and number == signal.SIGTERM and self.link and self.grace is not None:
            return  # a scheduler sends it to all launchers, and another's was faster
        if self.kill_at is not None or again:
            self._at_once()
        elif self.stop_at is not None:
            self.stop_at = 0.0
        else:
            self.stop_signal = number
            if number == signal.SIGTERM:
                self.grace = env.STOP_GRACE.get()
            self._fail(128 + number, STOPPERS[number])
            return
        if self.link:
            self.link.hurry()

    def _look(self) -> None:
        """Who has ended, and whose failure came first. The journal is read before the processes are looked
        at: what a line of it is the consequence of has happened by then. A rank that ended without a line of
        its own (killed, os._exit) is such a cause."""
        self.journal.read()
        first = self.start.first
        told = [self.ranks[n - first] for n in self.journal.told if first <= n < first + len(self.ranks)]
        ended = [rank for rank in self.ranks if rank.look()]
        for rank in ended:
            self.journal.note_end(rank.number)
        silent = [rank for rank in ended if rank.status != 0 and rank not in told]
        self.order += [rank for rank in [*silent, *told] if rank not in self.order]
        # Others may notice a killed rank, and say so, before its end has come to this launcher.
        killed = [rank for rank in silent if rank.status == -signal.SIGKILL]
        self.order = [*killed, *(rank for rank in self.order if rank not in killed)]
        failed = next((rank for rank in self.order if rank.status), None)
        if failed is None or (self.reason and self.failed is None) or self.kill_at is not None:
            return
        assert failed.status is not None
        if self.failed is None:
            self._fail(0, failed.fate(), settle=SETTLE)
        self.failed, self.reason = failed, failed.fate()
        self.code = failed.status if failed.status > 0 else 128 - failed.status

    def _is_awaited(self, now: float) -> bool:
        """Whether the reason may be a consequence: a rank that left or stopped the job earlier is still on
        its way out."""
        if self.failed is None or self.stop_at is None or now > self.stop_at + LEAVING - SETTLE:
            return False
        if self.link is not None and self.link.failure is None:
            if self._is_consequence(self.failed.number):
                return True  # the other node is about to say why
            # A rank notices a killed one of another node before that node's launcher does.
            if self.failed.number in self.journal.told and now < self.stop_at + NOTICED:
                return True
        return any(rank.status is None for rank in self.order[: self.order.index(self.failed)])

    def _is_consequence(self, number: int) -> bool:
        """Whether a rank of another node on this machine left or stopped the job before this one, or ended
        without a line of its own (killed), which this one may have noticed before its launcher did."""
        self.journal.read()  # the ranks of this node in it have been looked at, or will be when they end
        told, mine = self.journal.told, range(self.start.first, self.start.first + self.count)
        if number not in told:
            return False  # killed itself: a cause
        before = [*told[: told.index(number)], *(self.journal.gone - set(told))]
        return any(n not in mine for n in before)

    def _fail(self, code: int, reason: str, settle: float = 0.0) -> None:
        """The first cause counts; what fails because of it does not."""
        if not self.reason:
            self.code, self.reason, self.stop_at = code, reason, time.monotonic() + settle

    def _bury_orphans(self) -> None:
        """Reaps adopted processes; not the ranks, nor the watcher."""
        own = self._helpers() | {rank.pid for rank in self.ranks}
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                adopted = [int(pid) for pid in file.read().split() if int(pid) not in own]
        except FileNotFoundError:
            return  # a kernel without CONFIG_PROC_CHILDREN: they are reaped when the launcher ends
        for pid in adopted:
            os.waitpid(pid, os.WNOHANG)

    def _read(self, stream: Stream) -> None:
        try:
            data = os.read(stream.fd, 1 << 16)
        except BlockingIOError:
            return
        if data:
            stream.sink.feed(stream.source, data)
            stream.since = time.monotonic() if stream.sink.live and stream.source.tail else 0.0
        else:
            self._close(stream)

    def _close(self, stream: Stream) -> None:
        self._watch_fd(stream.fd, selectors.EVENT_READ, stream, False)
        os.close(stream.fd)
        stream.sink.finish(stream.source)
        for rank in self.ranks:
            if stream in rank.streams:
                rank.streams.remove(stream)

    def _write(self, sink: output.Sink) -> None:
        try:
            sink.write_some()
        except OSError as error:
            # Nobody reads on, or the disk is full: what the ranks print goes nowhere, as does their work.
            sink.queue.clear()
            name = "stdout" if sink.fd == 1 else "stderr"
            code = 128 + signal.SIGPIPE if isinstance(error, BrokenPipeError) else 1
            self._fail(code, f"{name} cannot be written: {error.strerror}")

    def _carry_input(self) -> None:
        """A terminal's line to rank 0, which sits in another session and cannot read the terminal itself."""
        stdin = self.ranks[0].stdin
        assert stdin is not None
        # A full pipe would block us, and in the background a read would stop us: later.
        if not select.select([], [stdin], [], 0)[1] or not _in_foreground():
            time.sleep(0.01)
            return
        try:
            data = os.read(0, output.CHUNK)
            if data:
                os.write(stdin, data)
                return
        except (
            OSError
        ):  # the terminal is gone (EIO), or rank 0 reads no more (EPIPE): either way its input ends
            pass
        self.selector.unregister(0)
        os.close(stdin)

    # The end

    def _finish(self) -> None:
        """All ranks have ended: ends what they left behind, passes on the rest of the output, says why."""
        killed, left = processes.end(self._living, LEFTOVERS)
        until = time.monotonic() + DRAIN
        while self._streams() and time.monotonic() < until:
            self._step(DRAIN)
            if (self.out.queue or self.err.queue) and not self.reason:
                until = time.monotonic() + DRAIN  # all is well, only our reader is slow
        for stream in self._streams():
            self._close(stream)
        if left:
            self.err.say(f"processes {left} cannot be killed: they hang in the kernel")
        elif killed and not self.reason:
            self.err.say(f"killed what the ranks had left running: {', '.join(map(str, sorted(killed)))}")
        if self.reason:
            who = "all" if self.asked == self.count else "the other"
            self.err.say(f"{self._says()}; {who} ranks were ended" if self.asked else self._says())
        self._drain()

    def _says(self) -> str:
        """The reason, with the exception that ended the rank."""
        why = self.failed.why() if self.failed is not None else ""
        return f"{self.reason} ({why})" if why else self.reason

    def _drain(self) -> None:
        """Writes what is queued; a reader that stalls may take its time unless the job is to end."""
        while self.out.queue or self.err.queue:
            before = len(self.out.queue) + len(self.err.queue)
            hurried = bool(self.reason)
            self._step(DRAIN if hurried else None)
            if bool(self.reason) and len(self.out.queue) + len(self.err.queue) == before:
                return


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return True  # not our controlling terminal: nobody will stop us for reading it


def _free_port() -> int:
    """A port for the ranks' rendezvous, below those that outgoing connections take."""
    while True:
        port = bootstrap.FIRST_PORT + secrets.randbelow(bootstrap.PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


def _open_standard_streams() -> None:
    """Numbers 0, 1 and 2 must be taken, or a pipe would get them."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
