"""The ranks' output: whole lines, each marked with its rank, in the order in which they arrive."""

from __future__ import annotations

import io
import os
import re
import sys
from dataclasses import dataclass
from typing import TextIO

COLOURS = (36, 33, 35, 32, 34, 31)  # ANSI foregrounds, taken in turn by the ranks

# A pipe that poll(2) calls writable takes this much without blocking (PIPE_BUF, pipe(7)).
CHUNK = 4096
# More than this without a newline is passed on as it is.
LONGEST = 1 << 16
# Beyond this backlog the ranks are not read, so that they block as they would on the terminal itself.
BACKLOG = 1 << 20


# How a traceback names its exception, at the beginning of a line: `module.Error: why`.
ERROR = re.compile(rb"^[A-Za-z_][\w.]*(?:Error|Exception|UnknownName): .+$", re.MULTILINE)


@dataclass(eq=False)
class Source:
    """One output stream of one rank: its mark, and the beginning of a line whose end has not come yet."""

    prefix: bytes
    tail: bytes = b""
    error: bytes = b""
    """The last line that names an exception, as a traceback does after its frames."""


class Sink:
    """One of the launcher's own streams. Nothing here blocks: what was fed is written when poll(2) says that
    it can be."""

    def __init__(self, fd: int):
        self.fd = fd
        self.live = os.isatty(fd)
        self.colour = self.live and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self.queue = bytearray()
        self._open: Source | None = None  # whose line is unfinished on the screen

    def prefix(self, rank: int) -> bytes:
        """How lines of a rank begin: ``[0] ``, coloured on a terminal."""
        if self.colour:
            return b"\x1b[%dm[%d]\x1b[0m " % (COLOURS[rank % len(COLOURS)], rank)
        return b"[%d] " % rank

    def feed(self, source: Source, data: bytes) -> None:
        """Takes what a rank wrote; its complete lines go out."""
        source.tail += data
        cut = source.tail.rfind(b"\n") + 1
        if not cut and len(source.tail) > LONGEST:
            cut = len(source.tail)
        for found in ERROR.finditer(source.tail, 0, cut):
            source.error = found[0]
        self._emit(source, cut)

    def show_partial(self, source: Source) -> None:
        """Puts out an unfinished line: a prompt, a progress bar."""
        self._emit(source, len(source.tail))

    def finish(self, source: Source) -> None:
        """The rank has closed this stream: its last line ends here, with or without a newline."""
        self._emit(source, len(source.tail))
        if self._open is source:
            self._end_line()

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        if self._open is not None:
            self._end_line()
        self.queue += f"tilescale: {text}\n".encode(errors="replace")

    def write_some(self) -> None:
        """Writes one chunk. Raises OSError where the stream cannot be written, such as BrokenPipeError."""
        del self.queue[: os.write(self.fd, self.queue[:CHUNK])]

    def _end_line(self) -> None:
        self.queue += b"\n"
        self._open = None

    def _emit(self, source: Source, count: int) -> None:
        text, source.tail = source.tail[:count], source.tail[count:]
        if not text:
            return
        if self._open not in (None, source):
            self._end_line()
        if self._open is None:
            self.queue += source.prefix
        ended = text.endswith(b"\n")
        body = text[:-1] if ended else text
        if self.live:
            # A progress bar returns to the line's beginning: there the mark stands.
            body = body.replace(b"\r\n", b"\n").removesuffix(b"\r").replace(b"\r", b"\r" + source.prefix)
        self.queue += body.replace(b"\n", b"\n" + source.prefix)
        self._open = source
        if ended:
            self._end_line()


#: how the standard streams treated what their encoding lacks, by name
_errors: dict[str, str] = {}


def forgive() -> None:
    """From now on what this process prints reaches a stream of any encoding: what an ASCII locale lacks is
    spelled ``\\u2013``."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            _errors[name] = stream.errors
            stream.reconfigure(errors="backslashreplace")


def errors_of(name: str, stream: TextIO) -> str | None:
    """How Python made a standard stream to treat what its encoding lacks, which is what programs expect."""
    return _errors.get(name, stream.errors)


def sinks() -> tuple[Sink, Sink]:
    """The launcher's stdout and stderr: one sink where both are the same file, so that the order between them
    is kept."""
    out, err = os.fstat(1), os.fstat(2)
    first = Sink(1)
    same = (out.st_dev, out.st_ino, out.st_rdev) == (err.st_dev, err.st_ino, err.st_rdev)
    return first, (first if same else Sink(2))
