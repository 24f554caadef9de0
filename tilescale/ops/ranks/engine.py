"""Whole tensors that copy engines move to other ranks, between two meetings of all ranks on their streams.

Behind the first meeting every rank's stream has reached this call, so what its earlier work reads there is
read. The copies come next on the stream. A meeting's kernel begins when they are complete (a stream's order),
and its barrier is a release and an acquire at the scope of the system: behind it all ranks see everything.

One stream moves all peers' copies: on 4 H200 one engine's copy went at 368 GB/s, two or three at once at 210
to 230 in all. The own part is copied beside them, by multiprocessors. In a CUDA graph it is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import tilescale.language as T
from tilescale import comm
from tilescale.comm.backend import Team
from tilescale.ops import host


def meeting(n: int, dtype: str) -> Any:
    """All ranks of G's team meet, on their streams."""

    @T.prim_func
    def ranks_meet(G: T.SymmTensor((n,), dtype)):
        with T.Kernel(1, ordered=False):
            with T.Scale("device"):
                T.barrier()

    return ranks_meet


@functools.cache
def _beside(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def _meet(whole: torch.Tensor) -> None:
    first = whole.view(-1)[:1]
    host.launch(meeting, (first,), n=1, dtype=host.dtype_name(first))


def _own(x: torch.Tensor, whole: torch.Tensor, team: Team) -> slice:
    """This rank's rows of ``whole``."""
    first = team.rank * (whole.shape[0] // team.size)
    return slice(first, first + x.shape[0])


def _put(x: torch.Tensor, whole: torch.Tensor, team: Team) -> None:
    """x into the others' ``whole``."""
    for hop in range(1, team.size if x.numel() else 1):
        comm.peer(whole, (team.rank + hop) % team.size)[_own(x, whole, team)].copy_(x)


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
    _meet(whole)
    _put(x, whole, team)
    if x.numel() and whole.is_cuda:
        main.wait_stream(beside)
    _meet(whole)


def begin(x: torch.Tensor, whole: torch.Tensor, team: Team) -> Callable[[], None]:
    """The same beside what this rank launches meanwhile, which may reach other ranks, but not ``whole``. What
    is returned ends it, on the same stream: behind that ``whole`` is complete.

    A launch between the meetings neither awaits the copies nor keeps them waiting: engines need no
    multiprocessors, and the second meeting stands behind it on the stream anyway. The first one is all that
    the copies await, so what was launched before this call has read ``whole`` on every rank."""
    whole[_own(x, whole, team)].copy_(x)
    _meet(whole)
    if not whole.is_cuda:
        _put(x, whole, team)
        return lambda: _meet(whole)
    beside = _beside(x.device)
    beside.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(beside):
        _put(x, whole, team)

    def end() -> None:
        torch.cuda.current_stream(x.device).wait_stream(beside)
        _meet(whole)

    return end
