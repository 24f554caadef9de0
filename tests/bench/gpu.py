"""How things are measured on a GPU: launches captured in CUDA graphs, graphs replayed in turn, times read off
events.

A graph makes one call for each of several sets of arguments, more than twice the L2 cache in all, so that no
call finds its inputs there. In every round the graphs run in another order; ratios are taken round by round.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

#: bytes that the sets of arguments take together at least; an H200's L2 cache has 50 MB
TRAFFIC = 128 << 20
ROUNDS = 40


def copies(bytes_each: int) -> int:
    """How many sets of arguments a graph needs."""
    return max(2, -(-TRAFFIC // max(1, bytes_each)))


class Captured:
    """A CUDA graph and the calls in it, which hold the tensors that it uses: torch gives back to the driver
    what nobody holds."""

    def __init__(self, graph: Any, calls: list[Callable[[], Any]]):
        self.graph, self.calls = graph, calls

    def replay(self) -> None:
        self.graph.replay()


def captured(calls: list[Callable[[], Any]]) -> Captured:
    """A CUDA graph that makes these calls one after another, each made once before."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return Captured(graph, calls)


def over(call: Any, sets: list[tuple[Any, ...]]) -> list[Any]:
    """A call for each set of arguments."""
    return [functools.partial(call, *s) for s in sets]


def timed(graph: Captured, launches: int) -> float:
    """Seconds of one launch, by one replay."""
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / launches


def measure(graphs: dict[str, Captured], launches: int, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds of one launch, for each graph and round; in every round the graphs run in another order."""
    import torch

    names = list(graphs)
    times: dict[str, list[float]] = {n: [] for n in names}
    for name in names * 3:
        graphs[name].replay()
    torch.cuda.synchronize()
    for r in range(rounds):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            times[name].append(timed(graphs[name], launches))
    return times


def spread(values: list[float]) -> dict[str, float]:
    """The median and how far the values lie around it."""
    ordered = sorted(values)
    cut = lambda q: ordered[min(len(ordered) - 1, int(q * len(ordered)))]  # noqa: E731
    return {
        "median": statistics.median(values),
        "p10": cut(0.1),
        "p90": cut(0.9),
        "least": ordered[0],
        "most": ordered[-1],
    }


def ratios(theirs: list[float], ours: list[float]) -> dict[str, float]:
    """How many times as fast as theirs ours is, round by round."""
    return spread([t / o for t, o in zip(theirs, ours, strict=True)])
