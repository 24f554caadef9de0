"""Jobs of several launchers, one a node: who is where, and that all of them end when one fails.

The hub is a small process of node 0's launcher (or `tilescale launch --hosts` itself). Every launcher, node
0's too, keeps one line to it (comm/lines.py) and says, a message each:

- ``hello``: node, nodes, count of its ranks, its hostname and a free port. When all nodes have said it, each
  gets ``start``: the job's name, its first rank, the world's size, and where torch.distributed meets.
- ``failed``: exit code, reason, and how long ranks have to end by themselves where that is longer than always
  (behind a SIGTERM). The first one goes to all others, who end their ranks for it.
- ``hurry``: somebody has asked twice. All others end their ranks at once, too.
- ``done``: its ranks have ended well. When all have said it, each gets ``over`` and may go.

A line that ends before ``over`` is a node that is gone: that, too, is a failure of the job.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from tilescale import env, lifetime
from tilescale.comm import bootstrap, lines
from tilescale.errors import CommError, TileError

#: exit code of a job whose failure has none of its own: a node that is gone
GONE = 1


@dataclass(frozen=True)
class Node:
    """A launcher's place: the ``number`` of ``count`` nodes, which meet at ``host:port``. ``hub``: whether
    its launcher makes the hub, as node 0's does where nobody else has."""

    number: int
    count: int
    host: str
    port: int
    hub: bool


@dataclass(frozen=True)
class Start:
    """What every node is told: ``first`` is the number of its first rank."""

    job: str
    first: int
    size: int
    addr: str
    port: int


class Failure(NamedTuple):
    """Why a job ends. ``grace``: seconds that ranks have to end by themselves; None: as always."""

    code: int
    reason: str
    grace: float | None = None


class Hub:
    """The meeting point. ``hosts``: the nodes' names as given, where somebody has; else node 0 is reached
    where the hub is."""

    def __init__(self, count: int, host: str, port: int, hosts: list[str] | None = None):
        self.count, self.host, self.hosts = count, host, hosts
        self.server = lines.listen(host, port)
        self.port: int = self.server.getsockname()[1]
        self.hellos: dict[int, dict[str, Any]] = {}
        self.nodes: dict[lines.Line, int] = {}
        self.strangers: list[lines.Line] = []
        self.done: set[int] = set()
        self.failure: Failure | None = None
        self.started = self.over = False
        self.deadline = time.monotonic() + env.WAIT_TIMEOUT.get()

    def step(self, timeout: float | None) -> None:
        """Handles what comes within ``timeout`` seconds."""
        ends: list[Any] = [*self.nodes, *self.strangers] + ([] if self.server.fileno() < 0 else [self.server])
        for end in select.select(ends, [], [], timeout)[0]:
            if end is self.server:
                with suppress(OSError):
                    self.strangers.append(lines.Line(self.server.accept()[0]))
                continue
            messages = end.receive()
            if messages is None:
                self._lost(end)
            for message in messages or ():
                self._hear(end, message)
        if not self.started and not self.failure and time.monotonic() > self.deadline:
            missing = ", ".join(str(n) for n in range(self.count) if n not in self.hellos)
            self.fail(GONE, f"waited {env.WAIT_TIMEOUT.get():g} s for node {missing}")

    def fail(
        self, code: int, reason: str, grace: float | None = None, origin: lines.Line | None = None
    ) -> None:
        """Ends the job for this reason on all nodes but the one that said it; the first reason counts."""
        if self.failure is None and not self.over:
            self.failure = Failure(code, reason, grace)
            self._send({"failed": list(self.failure)}, origin)

    def hurry(self, origin: lines.Line | None = None) -> None:
        """Ends at once what has still time to end."""
        self._send({"hurry": True}, origin)

    def _send(self, message: dict[str, Any], origin: lines.Line | None) -> None:
        for line in self.nodes:
            if line is not origin:
                line.send(message)

    def close(self) -> None:
        """Nobody can come any more, and who is still here sees the end."""
        for line in (*self.nodes, *self.strangers):
            line.close()
        self.server.close()

    def _lost(self, line: lines.Line) -> None:
        if line in self.strangers:
            self.strangers.remove(line)
        elif (node := self.nodes.pop(line)) not in self.done:
            self.fail(
                GONE, f"node {node}{self._on(node)} is gone: its launcher has ended or cannot be reached"
            )
        line.close()

    def _on(self, node: int) -> str:
        return f" ({self.hellos[node]['hostname']})"

    def _hear(self, line: lines.Line, message: Any) -> None:
        if not isinstance(message, dict):
            return
        if line in self.strangers:
            if "hello" in message:
                self._greet(line, message["hello"])
            return
        node = self.nodes[line]
        if "failed" in message:
            self.done.add(node)  # it ends by itself
            code, reason, grace = message["failed"]
            self.fail(int(code), f"node {node}{self._on(node)}: {reason}", grace, origin=line)
        if "hurry" in message:
            self.hurry(origin=line)
        if "done" in message:
            self.done.add(node)
            if len(self.done) == self.count and self.failure is None:
                self.over = True
                for other in sorted(self.nodes, key=lambda one: -self.nodes[one]):  # node 0, our parent, last
                    other.send({"over": True})

    def _greet(self, line: lines.Line, hello: dict[str, Any]) -> None:
        node, nodes = int(hello["node"]), int(hello["nodes"])
        why = None
        if nodes != self.count:
            why = f"it was started with --nnodes {nodes}, others with --nnodes {self.count}"
        elif not 0 <= node < self.count:
            why = f"--node-rank is one of 0 … {self.count - 1}"
        elif node in self.hellos:
            why = f"there is a node {node} already{self._on(node)}"
        if why is not None:
            line.send({"refused": why})
            return
        self.strangers.remove(line)
        self.nodes[line], self.hellos[node] = node, hello
        if self.failure:
            line.send({"failed": list(self.failure)})
        elif len(self.hellos) == self.count:
            self._start()

    def _start(self) -> None:
        self.started = True
        counts = [int(self.hellos[node]["count"]) for node in range(self.count)]
        addr = self.hosts[0] if self.hosts else self.host
        common = {
            "job": secrets.token_hex(8),
            "size": sum(counts),
            "addr": addr,
            "port": self.hellos[0]["port"],
        }
        for line, node in self.nodes.items():
            line.send({"start": common | {"first": sum(counts[:node])}})


def fork_hub(count: int, host: str, port: int) -> int:
    """A hub in a process of its own, which the kernel ends with this one; returns its pid. Fork it from a
    launcher with one thread. Raises CommError where nobody can listen there."""
    hub, tie = Hub(count, host, port), lifetime.tie_to_parent()
    pid = os.fork()
    if pid:
        hub.server.close()
        return pid
    status = 1
    try:
        tie()
        os.setsid()  # Ctrl-C is the launcher's, which says why the job ends
        lifetime.prctl(lifetime.PR_SET_NAME, b"tilescale-hub")
        for fd in os.listdir("/proc/self/fd"):
            if int(fd) not in (2, hub.server.fileno()):
                with suppress(OSError):
                    os.close(int(fd))
        while not hub.over and not (hub.failure and not hub.nodes):
            hub.step(0.5)
        status = 0
    finally:
        os._exit(status)


class Link:
    """A launcher's line to the hub."""

    def __init__(self, node: Node, ranks: int, port: int):
        """Collective among the launchers of a job: returns when all nodes have come, with ``start``.
        ``port``: free on this host. Raises CommError where they do not come, or are not of one job."""
        self.node = node
        #: the failure of another node that ended the job
        self.failure: Failure | None = None
        #: told: of our own failure. hurried: another node wants all to end at once. ended: nobody is there.
        self.over = self.told = self.hurried = self.ended = False
        self.hub = fork_hub(node.count, node.host, node.port) if node.hub else None
        limit = env.WAIT_TIMEOUT.get()
        self.line = lines.connect(node.host, node.port, time.monotonic() + limit)
        hello = {"node": node.number, "nodes": node.count, "count": ranks, "port": port}
        self.line.send({"hello": hello | {"hostname": socket.gethostname()}})
        while (messages := self.line.receive()) == []:
            pass
        first: dict[str, Any] = messages[0] if messages else {"refused": "the hub of the job has ended"}
        if "start" not in first:
            self.line.close()
            why = first.get("refused") or first["failed"][1]
            raise CommError(f"node {node.number} cannot join the job at {node.host}:{node.port}: {why}")
        self.start = Start(**first["start"])
        for message in messages[1:] if messages else ():
            self._hear(message)

    def hear(self) -> None:
        """Takes what has come; call it when the line can be read."""
        messages = self.line.receive()
        self.ended = messages is None
        if self.ended and not self.over and self.failure is None:
            where = f"{self.node.host}:{self.node.port}"
            self.failure = Failure(GONE, f"the launcher of node 0 is gone: nobody answers at {where}")
        for message in messages or ():
            self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        if "failed" in message and self.failure is None:
            self.failure = Failure(*message["failed"])
        self.hurried |= "hurry" in message
        self.over |= "over" in message

    def fail(self, code: int, reason: str, grace: float | None) -> None:
        """Tells all nodes why the job ends, once."""
        if not self.told and self.failure is None:
            self.told = True
            self.line.send({"failed": [code, reason, grace]})

    def hurry(self) -> None:
        """Ends all nodes' ranks at once, where the job is ending."""
        self.line.send({"hurry": True})

    def done(self) -> None:
        """The ranks of this node have ended well."""
        self.line.send({"done": True})

    def close(self) -> None:
        """Leaves the job. The hub of this launcher ends with it."""
        self.line.close()


def endpoint(text: str) -> tuple[str, int]:
    """``HOST:PORT`` in its parts. Raises TileError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise TileError(
            f"{text!r} is no HOST:PORT", hint=f"--rendezvous {host or text}:{bootstrap.FIRST_PORT}"
        )
    if host.startswith("["):
        expected = "HOST:PORT with a host's name, or an address of IPv4"
        raise TileError(f"{text!r} is an address of IPv6", expected=expected)
    return host, int(port)
