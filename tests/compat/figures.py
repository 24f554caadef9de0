"""A program's own measurements, taken the same way whether its kernels are ours or TileLang's.

Both have a ``do_bench``, which clear caches and average differently. `hook` puts one way in place of both, by the
GPU's events with a cleared L2 cache, so that two figures can be divided. Before a function is measured it is called
once to see which kernels it calls: a program also measures references, and those are no figures. Nothing of ours is
imported here, because TileLang's process must not have it.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

#: bytes that are written between two calls: more than an H200's L2 cache
FLUSH = 256 << 20
#: milliseconds of samples for a figure, and for what is no figure
FULL, BRIEF = 60.0, 5.0


@dataclass(frozen=True)
class Figure:
    """One measurement: the names of the kernels that were called, in alphabetical order, and the median."""

    kernels: tuple[str, ...]
    ms: float


# ---- which kernels a function calls


class Calls:
    """The names of kernels called while it listens; a kernel's own launches are not counted beside it."""

    def __init__(self) -> None:
        self.names: set[str] | None = None
        self.depth = 0

    @contextmanager
    def listening(self) -> Any:
        self.names, found = set(), set()
        try:
            yield found
        finally:
            found |= self.names
            self.names = None

    def watch(self, kind: type, name: Callable[[Any], str]) -> None:
        """Says it when an object of a class is called."""
        own: Any = kind.__call__

        def call(this: Any, *args: Any, **kwargs: Any) -> Any:
            if self.names is None:
                return own(this, *args, **kwargs)
            if not self.depth:
                self.names.add(name(this))
            self.depth += 1
            try:
                return own(this, *args, **kwargs)
            finally:
                self.depth -= 1

        kind.__call__ = call  # type: ignore[method-assign]


# ---- time


def once(fn: Callable[[], Any]) -> list[float]:
    """Milliseconds of one call by the clock."""
    start = time.perf_counter()
    fn()
    return [(time.perf_counter() - start) * 1e3]


def samples(fn: Callable[[], Any], ms: float) -> list[float]:
    """Milliseconds of single calls on a GPU, over about ``ms`` milliseconds, by its events. Each call comes behind a
    cleared cache, which also gives the host time to be ahead."""
    import torch

    flush = torch.empty(FLUSH // 4, dtype=torch.int32, device="cuda")

    def taken(count: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for begin, end in events:
            flush.zero_()
            begin.record()
            fn()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in events]

    estimate = max(1e-3, min(taken(3)))
    return taken(max(5, min(200, round(ms / (estimate + 0.15)))))


def summary(found: list[float], return_mode: str = "mean", quantiles: Sequence[float] | None = None) -> Any:
    """What do_bench gives of samples."""
    if quantiles is not None:
        ordered = sorted(found)
        picked = [ordered[round(q * (len(ordered) - 1))] for q in quantiles]
        return picked[0] if len(picked) == 1 else picked
    pick: dict[str, Callable[[list[float]], float]] = {
        "mean": statistics.fmean, "median": statistics.median, "min": min, "max": max,
    }  # fmt: skip
    return pick[return_mode](found)


class Meter:
    """Measures in place of a package's own way.

    Args:
        say: takes the event of a figure.
        tuner: the name of the package's module that tries configurations: what it measures is no figure.
        brief: one call for each figure: whether there is one is all that is asked.
        gpu: whether the kernels run on a GPU; if not, ``brief``.
    """

    def __init__(self, say: Callable[..., None], tuner: str, brief: bool, gpu: bool = True):
        self.say, self.tuner, self.brief, self.gpu, self.calls = say, tuner, brief or not gpu, gpu, Calls()

    def tuning(self) -> bool:
        frame = sys._getframe(1)
        while frame is not None:
            if str(frame.f_globals.get("__name__", "")).startswith(self.tuner):
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False

    def measure(self, fn: Callable[[], Any], *_: Any, **__: Any) -> list[float]:
        """Samples of ``fn()`` in milliseconds; of a kernel an event says them."""
        with self.calls.listening() as names:
            fn()
        tuning = self.tuning()
        if not names or tuning:
            return samples(fn, BRIEF) if self.gpu else once(fn)
        found = once(fn) if self.brief else samples(fn, FULL)
        self.say(kind="speed", kernels=sorted(names), ms=statistics.median(found), calls=len(found))
        return found


def hook(say: Callable[..., None], brief: bool, gpu: bool = True) -> None:
    """Measurements of this process's TileScale."""
    profiler = importlib.import_module("tilescale.profiler")
    meter = Meter(say, "tilescale.tuning", brief, gpu)
    profiler.measure = meter.measure
    launchable = importlib.import_module("tilescale.launching").Launchable
    several = importlib.import_module("tilescale.several").Several
    for kind in (launchable, several):
        meter.calls.watch(kind, lambda kernel: str(kernel.name))
    if brief:  # a choice among calls that others disturbed must not be kept
        tuner = importlib.import_module("tilescale.tuning.tuner").Autotuned
        tuner._remember = lambda self, key, configs, found: (configs[found[0]], found[1])


def hook_peer(say: Callable[..., None], brief: bool) -> None:
    """Measurements of this process's TileLang."""
    bench = importlib.import_module("tilelang.profiler.bench")
    kernel = importlib.import_module("tilelang.jit.kernel").JITKernel
    adapter = importlib.import_module("tilelang.jit.adapter").BaseKernelAdapter
    meter, own = Meter(say, "tilelang.autotuner", brief), bench.do_bench

    def do_bench(
        fn: Callable[[], Any], *_: Any, return_mode: str = "mean", quantiles: Any = None, **__: Any
    ) -> Any:
        return summary(meter.measure(fn), return_mode, quantiles)

    for module in list(sys.modules.values()):
        if getattr(module, "do_bench", None) is own:
            module.do_bench = do_bench

    def name(called: Any) -> str:
        function = getattr(called, "prim_func", None)
        try:
            return str(function.attrs["global_symbol"])  # type: ignore[union-attr]
        except (AttributeError, KeyError, TypeError):
            return "?"

    kinds = [kernel, *(k for k in _below(adapter) if "__call__" in vars(k))]
    for kind in kinds:
        meter.calls.watch(kind, name)


def _below(kind: type) -> list[type]:
    return [kind, *(k for sub in kind.__subclasses__() for k in _below(sub))]


# ---- pairs


def of(events: Sequence[dict[str, Any]]) -> list[Figure]:
    """The figures that a program's events say, in their order."""
    return [Figure(tuple(e["kernels"]), e["ms"]) for e in events if e["kind"] == "speed"]


def pairs(ours: Sequence[Figure], theirs: Sequence[Figure]) -> list[tuple[Figure, Figure]]:
    """Figures that belong together: of those that call the same kernels the n-th and the n-th, where both sides have
    as many. What is left on both sides, because names differ, belongs together in its order if that is as many."""
    left: list[list[Figure]] = [list(ours), list(theirs)]
    found: list[tuple[Figure, Figure]] = []
    for kernels in dict.fromkeys(f.kernels for f in ours):
        a, b = ([f for f in side if f.kernels == kernels] for side in (ours, theirs))
        if len(a) == len(b):
            found += zip(a, b)
            left = [[f for f in side if f.kernels != kernels] for side in left]
    if len(left[0]) == len(left[1]):
        found += zip(*left)
    return sorted(found, key=lambda pair: list(ours).index(pair[0]))
