"""How calls of several ranks are timed: ours, peers and what computes alone by one harness.

A variant is a list of calls, one for each set of arguments; the sets take more than twice a GPU's L2 cache
together, so that no call finds its inputs there. Of small arguments there are `MOST` sets: a graph has one
call of each, and before a replay other bytes fill the L2 cache. On GPUs the calls of a variant are captured
in a CUDA graph.
Before each replay the ranks meet on the device, behind a pause in which every host submits; so no rank waits
for another one's host inside the timing, and flags, the clearing of counters, a launch's end and all copies
are inside. A figure is the median over replays of the slowest rank's time. Replays of all variants take
turns.

On the machine's own processors, calls are timed by the clock, behind a barrier of the hosts: a test of the
harness more than a measurement.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import tilescale.language as T
from tilescale import comm
from tilescale.devices import of
from tilescale.jit import compile

#: bytes that the sets of arguments take together at least; an H200's L2 cache has 50 MB
TRAFFIC = 128 << 20
#: calls in a graph at least; cycles of the pause in front of a replay, some 200 µs
CALLS, PAUSE = 8, 400_000
#: seconds of a call from which on a graph has one call for each set of arguments
LONG = 0.02
#: sets of arguments at most
MOST = 32

Call = Callable[[], Any]


def size(value: Any) -> int:
    """Bytes of all tensors in an argument."""
    if isinstance(value, (list, tuple)):
        return sum(map(size, value))
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def sets(arguments: dict[str, Any], device: str) -> int:
    """How many sets of such arguments a measurement needs."""
    if not of(device).gpu:
        return 2
    return max(2, min(MOST, -(-TRAFFIC // max(1, sum(map(size, arguments.values()))))))


@T.prim_func
def meeting():
    """All ranks meet, on their streams."""
    with T.Kernel(1):
        with T.Scale("device"):
            T.barrier()


@functools.cache
def _meeting() -> Any:
    return compile(meeting, target="cuda")


@functools.cache
def _other_bytes() -> torch.Tensor:
    return torch.empty(TRAFFIC, dtype=torch.uint8, device="cuda")


class Graph:
    """A variant on a GPU: its calls in a CUDA graph, and what they use."""

    def __init__(self, calls: list[Call], group: Any):
        for call in calls:
            call()
        torch.cuda.synchronize()
        comm.barrier()
        begin = time.perf_counter()
        calls[0]()
        torch.cuda.synchronize()
        took = torch.tensor([time.perf_counter() - begin], device="cuda")
        torch.distributed.all_reduce(took, op=torch.distributed.ReduceOp.MAX, group=group)
        many = CALLS if took.item() < LONG else 1  # all ranks' graphs have as many
        self.calls = (calls * -(-many // len(calls)))[: max(many, len(calls))]
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            for call in self.calls:
                call()

    def seconds(self) -> float:
        """Of one call, by one replay."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        _other_bytes().zero_()
        torch.cuda._sleep(PAUSE)
        _meeting()()
        begin.record()
        self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / len(self.calls)


class Clocked:
    """A variant on the machine's own processors."""

    def __init__(self, calls: list[Call]):
        self.calls = calls
        for call in calls:
            call()

    def seconds(self) -> float:
        """Of one call, by one round."""
        comm.barrier()
        begin = time.perf_counter()
        for call in self.calls:
            call()
        return (time.perf_counter() - begin) / len(self.calls)


@contextlib.contextmanager
def beside(like: torch.Tensor) -> Iterator[None]:
    """Around the forward of a peer whose backward is timed: on GPUs a stream of its own. Autograd runs a
    backward on the stream of its forward, and a graph's capture may not wait for the default stream."""
    if not like.is_cuda:
        yield
        return
    before, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        yield
    before.wait_stream(stream)


def _prepared(calls: list[Call], device: str, may_fail: bool, group: Any) -> Clocked | Graph | None:
    """The variant; None where a peer cannot be captured."""
    try:
        return Graph(calls, group) if of(device).gpu else Clocked(calls)
    except RuntimeError:
        if not may_fail:
            raise
        return None


def measure(variants: dict[str, list[Call]], device: str, replays: int, group: Any) -> dict[str, list[float]]:
    """Seconds of one call on the slowest rank, for each variant and replay; alike on all ranks. Peers
    that cannot run here are left out. ``group``: torch's, of all ranks."""
    made: dict[str, Clocked | Graph] = {}
    for name, calls in variants.items():
        prepared = _prepared(calls, device, name not in ("ours", "library"), group)
        able = torch.tensor([prepared is not None], dtype=torch.int32, device=device)
        torch.distributed.all_reduce(able, op=torch.distributed.ReduceOp.MIN, group=group)
        if prepared is not None and able.item():
            made[name] = prepared
    names = list(made)
    times = torch.zeros(len(names), replays, dtype=torch.float64, device=device)
    for name in names:
        made[name].seconds()
    for r in range(replays):
        for k in [*range(r % len(names), len(names)), *range(r % len(names))]:
            times[k, r] = made[names[k]].seconds()
    torch.distributed.all_reduce(times, op=torch.distributed.ReduceOp.MAX, group=group)
    return {name: times[k].tolist() for k, name in enumerate(names)}


def spread(seconds: list[float]) -> dict[str, float]:
    """The median in microseconds, and how far replays lie around it."""
    ordered = sorted(seconds)
    cut = lambda q: ordered[min(len(ordered) - 1, int(q * len(ordered)))] * 1e6  # noqa: E731
    return {"median": statistics.median(seconds) * 1e6, "p10": cut(0.1), "p90": cut(0.9)}
