"""Shapes near those that `tilescale bench` measures, drawn at random: whether choices by shape hold beside
the shapes that they were made for."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

#: operations that are drawn for where none is named
NAMES = (
    "all_gather", "all_gather_matmul", "all_reduce", "broadcast", "matmul_all_reduce",
    "matmul_reduce_scatter", "reduce_scatter",
)  # fmt: skip
#: what is drawn of a shape, anew within a factor of `FACTOR`; a hidden size is a model's, of whole vectors
SIZES, FACTOR = ("M", "N", "K", "size", "rows", "columns", "tokens", "hidden", "inner", "length"), 2.0
WHOLE = {"hidden": 64}
#: how much of the fastest peer's speed is expected at least
BAR = 0.97


def near(shape: Mapping[str, Any], draw: random.Random, whole: int) -> dict[str, Any]:
    """A shape whose sizes are within a factor of two of this one's: multiples of ``whole`` where that is
    possible."""
    made = dict(shape)
    for name in SIZES:
        if name not in shape:
            continue
        low, high = math.ceil(shape[name] / FACTOR), int(shape[name] * FACTOR)
        value = round(shape[name] * FACTOR ** draw.uniform(-1, 1))
        of = WHOLE.get(name, whole)
        rounded = value // of * of
        made[name] = rounded if low <= rounded <= high else value
    return made


def drawn(
    listed: Mapping[str, Sequence[Mapping[str, Any]]], count: int, seed: int
) -> list[tuple[str, dict[str, Any]]]:
    """``count`` shapes for each name, near its ``listed`` ones in turn; of a name every second one divides
    nothing. Names take turns, so that a run that ends early has some of all."""
    found = []
    for k in range(count):
        for name, shapes in listed.items():
            draw = random.Random(f"{seed} {name} {k}")
            found.append((name, near(shapes[k % len(shapes)], draw, 1 if k % 2 else 64)))
    return found


def fastest_peer(line: Mapping[str, Any]) -> tuple[str, float]:
    """The fastest peer of a measured case, and how many times as fast as it ours is."""
    us = {name: t["median"] for name, t in line["us"].items() if name in ("library", "torch")}
    name = min(us, key=lambda n: us[n])
    return name, us[name] / line["us"]["ours"]["median"]
