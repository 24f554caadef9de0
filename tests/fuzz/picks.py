"""T.argmax, T.argmin and T.topk in NumPy, and the simulator held to it: the CPU is compared with the
simulator, so this is what says that both are right."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tilescale.compiler.ops import argmax
from tilescale.compiler.sim import numerics


def places(x: Any, axis: int, count: int, least: bool) -> Any:
    """Where the ``count`` first along an axis stand, NaNs before all numbers, equal ones by their index. One
    after the other, each the lowest index among those that nothing is before."""
    lines = np.moveaxis(np.asarray(x), axis, -1)
    nan = lines != lines
    left = np.ones(lines.shape, bool)
    found = []
    for _ in range(count):
        numbers = left & ~nan
        best = np.zeros(lines.shape, bool)
        for at in range(lines.shape[-1]):  # whether no other number that is left lies before this one
            this = lines[..., at : at + 1]
            before = lines < this if least else lines > this
            best[..., at] = numbers[..., at] & ~(numbers & before).any(-1)
        wanted = np.where((left & nan).any(-1, keepdims=True), left & nan, best)
        pick = wanted.argmax(-1)[..., None]  # the first True
        np.put_along_axis(left, pick, False, -1)
        found.append(pick)
    return np.moveaxis(np.concatenate(found, -1), -1, axis)


@contextlib.contextmanager
def judged(wrong: type[Exception]) -> Iterator[None]:
    """Inside, each of the three operations that the simulator runs is compared with NumPy.

    Raises:
        wrong: it found others.
    """
    simulate = argmax._Picking.simulate

    def with_reference(self: Any, call: Any, cx: Any) -> Any:
        run, picks = simulate(self, call, cx), argmax.Picks.of(call)
        src, values, indices = (cx.view(a, call) for a in call.args)

        def both(ex: Any) -> None:
            run(ex)
            held = src.read(ex)
            at = places(numerics.decode(held, src.dtype), picks.axis, picks.count, picks.least)
            want, got = np.take_along_axis(held, at, picks.axis), values.read(ex)
            if got.tobytes() != want.tobytes() or not np.array_equal(indices.read(ex).ravel(), at.ravel()):
                raise wrong(
                    f"{self.written(call)} of {held} gives {got} at {indices.read(ex)}, not {want} at {at}"
                )

        return both

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argmax._Picking, "simulate", with_reference)
        yield
