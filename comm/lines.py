"""Short messages between processes that share no memory: a JSON value a line, over TCP.

Launchers of several nodes keep such lines to each other (launch/nodes.py), and ranks of several nodes find
out over them whether they are on one machine (machines.py). Whoever can reach the port can speak: use
networks whose users you trust, as for torch.distributed's store."""

from __future__ import annotations

import ipaddress
import json
import socket
import time
from collections.abc import Callable
from typing import Any

from tilescale.errors import CommError

#: bytes of a message; nobody honest sends more
LONGEST = 1 << 20
#: seconds between attempts to connect to somebody who does not listen yet
AGAIN = 0.05
#: seconds that a message may take; more, and the other end counts as gone
SLOW = 5.0


class Line:
    """One end of a connection. A host that is gone without a word ends it within ten seconds."""

    def __init__(self, connection: socket.socket):
        connection.settimeout(SLOW)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 5)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
        self._socket, self._rest = connection, b""

    def fileno(self) -> int:
        """For select(2) and poll(2)."""
        return self._socket.fileno()

    def send(self, message: Any) -> bool:
        """Whether the message went out; the other end may be gone."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
            return True
        except OSError:
            return False

    def receive(self) -> list[Any] | None:
        """The messages that have come since the last call (waits for some bytes); None: the other end is
        gone, or speaks something else."""
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            return None
        *whole, self._rest = (self._rest + data).split(b"\n")
        if not data or len(self._rest) > LONGEST:
            return None
        try:
            return [json.loads(text) for text in whole]
        except ValueError:
            return None

    def close(self) -> None:
        """Ends it; the other end sees that."""
        self._socket.close()


def listen(host: str, port: int) -> socket.socket:
    """Where others may connect: on this machine alone where ``host`` is a loopback address, else on every
    interface (a host's own name may stand for a loopback address on itself). Raises CommError."""
    try:
        address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
        local = ipaddress.ip_address(str(address)).is_loopback
        return socket.create_server((str(address) if local else "", port), backlog=1024)
    except OSError as error:
        raise CommError(
            f"nobody can listen on {host}:{port}: {error.strerror or error}",
            expected="a name of this host, and a port that is free",
        ) from None


def connect(host: str, port: int, deadline: float, look: Callable[[], None] = lambda: None) -> Line:
    """A connection to somebody who may not listen yet. ``look`` is called between attempts, and may raise.
    Raises CommError after ``deadline`` (time.monotonic())."""
    while True:
        try:
            return Line(socket.create_connection((host, port), timeout=SLOW))
        except OSError as error:
            if time.monotonic() > deadline:
                raise CommError(f"nobody answers on {host}:{port}: {error.strerror or error}") from None
        look()
        time.sleep(AGAIN)
