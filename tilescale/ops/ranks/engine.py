"""Copies between ranks that engines make, between meetings of all ranks on their streams, piece by piece
beside what multiprocessors do with the pieces that have come (`cross`).

Behind the first meeting every rank's stream has reached this call, so what its earlier work reads there is
read. The copies come next on the stream. A meeting's kernel begins when they are complete (a stream's order),
and its barrier is a release and an acquire at the scope of the system: behind it all ranks see everything.

One stream moves all peers' copies: on 4 H200 one engine's copy went at 368 GB/s, two or three at once at 210
to 230 in all. The own part is copied beside them, by multiprocessors. In a CUDA graph it is the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

import tilescale.language as T
from tilescale import comm, env
from tilescale.comm.backend import Team
from tilescale.ops import host
from tilescale.ops.ranks import flat
from tilescale.ops.ranks.flat_kernels import carry
from tilescale.ops.ranks.workspace import workspace

#: What engines are modelled with: bytes a second that leave a rank; seconds of a meeting, of one copy more on
#: the stream, and before the first one moves. On 4 H200, 2026-11-26, 64 MB a rank were gathered in 559 µs,
#: 512 MB in 4,151, by three copies between two meetings: that is the rate, and 46 µs whatever the size. A
#: meeting took 5 to 8 of them, a cut of a copy in two 3
CROSSING, MEETING, COPY, START = 392e9, 8e-6, 3e-6, 20e-6
#: bytes a second that local work reads and writes, together
LOCAL = 4e12
#: of what is left, the share that is not in the next piece. A piece has to be worked on while the next one
#: crosses: of a gather that takes a fifth of the time that it crosses itself, of sums of three ranks as well
LEFT = 0.25

#: what one step copies: (where to, what)
Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]


def able() -> bool:
    """Whether engines reach other ranks' memory: they take addresses."""
    return not env.REMOTE.get()


def pieces(count: int, step: int, local: float, copies: int) -> list[tuple[int, int]]:
    """0 … count, cut at multiples of ``step``. Only the work on the last piece is not done beside copies, so
    pieces get smaller, until one more of them, which is ``copies`` copies more, costs more than it hides.
    ``local``: seconds of the work on one of ``count``."""
    low, found = 0, list[tuple[int, int]]()
    while (left := count - low) * (1 - LEFT) * local > copies * COPY:
        size = int(left * (1 - LEFT)) // step * step
        if not size:
            break
        found.append((low, low + size))
        low += size
    return [*found, (low, count)]


def gathers(size: int, world: int) -> list[tuple[int, int, int]]:
    """Which bytes, from where to where, of a rank's ``size`` cross to the rank that is so many places on, in
    turn. What came from one rank is copied on while the next one's crosses; so only the last one's is cut."""
    cut = pieces(size, 16, 2 / LOCAL, 1)
    return [(hop, 0, size) for hop in range(1, world - 1)] + [
        (world - 1, *piece) for piece in (cut if world > 1 else [])
    ]


def sums(n: int, step: int, itemsize: int, world: int) -> list[tuple[int, int]]:
    """The pieces of each rank's ``n`` numbers, which cross to it from all others before those of the next
    piece: sums of all ranks take all."""
    return pieces(n, step, (world + 1) * itemsize / LOCAL, world - 1)


def seconds(size: int, world: int, copies: int, last: float) -> float:
    """Of ``size`` bytes to each other rank in so many copies, behind which ``last`` bytes are read or
    written."""
    return START + 2 * MEETING + copies * COPY + (world - 1) * size / CROSSING + last / LOCAL


def meeting(ordered: bool) -> Any:
    """All ranks of a team meet, on their streams. ``ordered``: with the flags of a launch, too, which a
    stream makes needless; the copies of simulated ranks' hosts are ordered by such launches alone."""

    @T.prim_func
    def ranks_meet(team: T.Signal((1,))):
        with T.Kernel(1, ordered=ordered):
            with T.Scale("device"):
                T.barrier()

    return ranks_meet


def beginning(dtype: str, axes: int) -> Any:
    """The first of a call's meetings, with the flags of a launch everywhere: those compare what ranks launch,
    and nothing else would show that they bring different shapes. ``into``: the memory that is copied into."""

    @T.prim_func
    def ranks_begin(
        team: T.Signal((1,)), into: T.SymmTensor(tuple(T.dynamic(f"n{k}") for k in range(axes)), dtype)
    ):
        with T.Kernel(1):
            with T.Scale("device"):
                T.barrier()

    return ranks_begin


@functools.cache
def _beside(device: torch.device, number: int = 0) -> Any:
    """A stream; number 0 is that of the copies."""
    return torch.cuda.Stream(device)


def _meet(team: Team) -> None:
    counters = workspace(team).counters(1)  # none of what is copied
    host.launch(meeting, (counters,), ordered=not counters.is_cuda)


def _begin(team: Team, into: torch.Tensor) -> None:
    args = (workspace(team).counters(1), into)
    host.launch(beginning, args, dtype=host.dtype_name(into), axes=into.dim())


def cross(
    steps: Sequence[Copies],
    team: Team,
    into: torch.Tensor,
    first: Callable[[], Iterable[Any]] | None = None,
) -> Iterator[int]:
    """Copies into other ranks' memory, ``steps`` one behind another, beside what the caller launches. As many
    steps on all ranks, of which any may be empty. What is returned gives the number of each step in turn:
    behind that, on the caller's stream, what all ranks copied in that step has arrived. It has to be used up,
    on the stream of this call. ``into``: the symmetric memory that the copies go to, by whose shape and dtype
    ranks are compared.

    Who has read what: the copies await the first meeting, on the caller's streams of all ranks, so all that
    was launched there before, which is everything that used the workspace, has ended everywhere, and what was
    aimed at this rank has arrived (launches of a team are one sequence, whatever their streams; see
    `Workspace`). What the caller launches behind a step stands on his stream, in front of the first meeting
    of the next call and of the entry of every other launch of the team: nobody writes there before it has
    ended. The stream of copies is awaited whole at the last step, so x may be written behind this call.

    Meetings stand on the caller's stream, as all launches of a team do, which would await each other on two
    of them. A local launch between two meetings does not keep the copies waiting: those go on.

    ``first``: launches on other streams, which await the caller's, what makes the copies' sources; it is
    called once behind the first meeting, and gives a `mark` for each copy in turn, and perhaps more: a copy
    awaits its own. Whoever reads the rest of what it makes awaits those streams (`merged`)."""
    _begin(team, into)
    marks = list(first()) if first else [None] * sum(map(len, steps))
    if not into.is_cuda:
        return _in_turn(steps, team)
    beside, arrived, made = _beside(into.device), [], iter(marks)
    beside.wait_stream(torch.cuda.current_stream(into.device))
    with torch.cuda.stream(beside):
        for copies in steps:
            for copy, mark in zip(copies, made, strict=False):
                if mark is not None:
                    beside.wait_event(mark)
                _copy([copy])
            arrived.append(beside.record_event())
    return _behind(arrived, team, into.device, steps)


def _behind(arrived: list[Any], team: Team, device: torch.device, steps: Sequence[Copies]) -> Iterator[int]:
    """``steps``: kept until the stream of this call has awaited their copies, so that nobody else is given
    their memory."""
    for k, event in enumerate(arrived):
        torch.cuda.current_stream(device).wait_event(event)
        _meet(team)
        yield k
    del steps


def _in_turn(steps: Sequence[Copies], team: Team) -> Iterator[int]:
    """Where there are no engines."""
    for k, copies in enumerate(steps):
        _copy(copies)
        _meet(team)
        yield k


def _copy(copies: Copies) -> None:
    for to, x in copies:
        if x.numel():
            to.copy_(x)


def used_up(arrived: Iterator[int]) -> None:
    """Behind that all steps of `cross` have arrived."""
    deque(arrived, maxlen=0)


def fill(to: torch.Tensor, x: torch.Tensor, units: int) -> None:
    """to = x, rows of bytes, by at most ``units`` multiprocessors. torch's kernel for several tensors has one
    block for 65,536 numbers: a few blocks for a piece of some MB."""
    if to.data_ptr() == x.data_ptr() or not x.numel():
        return
    at = (x.numel(), *(p for t in (to, x) for p in (t.data_ptr(), t.storage_offset())))
    if any(k % 16 for k in at):
        torch._foreach_copy_([to], [x])  # by a kernel, not by an engine
        return
    a, c, P = x.view(torch.int64), to.view(torch.int64), flat.ADDED // 8
    host.launch(carry, (a, c), P=P, blocks=units if a.numel() > P else 1, threads=512, dtype="int64")


@contextlib.contextmanager
def lane(number: int, like: torch.Tensor) -> Iterator[None]:
    """Around launches that may run beside those of the other of two lanes, behind what the caller's stream
    holds now; `merged` brings both back. A product's last wave leaves multiprocessors to the next one so."""
    if not like.is_cuda:
        yield
        return
    stream = _beside(like.device, 1 + number % 2)
    stream.wait_stream(torch.cuda.current_stream(like.device))
    with torch.cuda.stream(stream):
        yield


def mark(like: torch.Tensor) -> Any:
    """An event behind what the current stream holds, where there are streams."""
    return torch.cuda.current_stream(like.device).record_event() if like.is_cuda else None


def merged(like: torch.Tensor) -> None:
    """The caller's stream awaits both lanes."""
    if like.is_cuda:
        for number in (1, 2):
            torch.cuda.current_stream(like.device).wait_stream(_beside(like.device, number))


def _bytes(whole: torch.Tensor) -> torch.Tensor:
    """Kernels do not know every dtype that is gathered."""
    return flat.line(whole).view(torch.uint8)


def _own(x: torch.Tensor, whole: torch.Tensor, team: Team) -> slice:
    """This rank's rows of ``whole``."""
    first = team.rank * (whole.shape[0] // team.size)
    return slice(first, first + x.shape[0])


def puts(x: torch.Tensor, whole: torch.Tensor, team: Team) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """x into its rows of the others' ``whole``, the next rank's first."""
    mine = _own(x, whole, team)
    peers = (comm.peer(whole, (team.rank + hop) % team.size) for hop in range(1, team.size))
    return [(peer[mine], x) for peer in peers]


def push(x: torch.Tensor, whole: torch.Tensor, team: Team) -> None:
    """Puts x (m, …) into this rank's part of ``whole`` (n ranks' parts, one behind another) on every rank.
    Both are contiguous and ``whole`` is symmetric memory of the team."""
    mine = _own(x, whole, team)
    if x.numel() and whole.is_cuda:
        main, beside = torch.cuda.current_stream(x.device), _beside(x.device)
        beside.wait_stream(main)
        with torch.cuda.stream(beside):
            torch._foreach_copy_([whole[mine]], [x])  # by a kernel, not by an engine
    else:
        whole[mine].copy_(x)
    _begin(team, _bytes(whole))
    _copy(puts(x, whole, team))
    if x.numel() and whole.is_cuda:
        main.wait_stream(beside)
    _meet(team)


def begin(x: torch.Tensor, whole: torch.Tensor, team: Team) -> Callable[[], None]:
    """The same beside what this rank launches meanwhile, which may reach other ranks, but not ``whole``. What
    is returned ends it, on the same stream: behind that ``whole`` is complete.

    A launch between the meetings neither awaits the copies nor keeps them waiting: engines need no
    multiprocessors, and the second meeting stands behind it on the stream anyway. The first one is all that
    the copies await, so what was launched before this call has read ``whole`` on every rank."""
    whole[_own(x, whole, team)].copy_(x)
    arrived = cross([puts(x, whole, team)], team, _bytes(whole))
    return lambda: used_up(arrived)
