"""What tests and benchmarks know of an operation of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tilescale.ops.case import Case, Expected

__all__ = ["Case", "Expected", "Pick", "RankOp", "device_of"]


def device_of(arguments: Mapping[str, Any]) -> torch.device:
    """The device of a rank's drawn arguments."""
    return next(a.device for a in arguments.values() if isinstance(a, torch.Tensor))


@dataclass(frozen=True)
class Pick:
    """How a shape is computed, in a word, and by how many blocks, which is how many multiprocessors it keeps
    (None: a library decides)."""

    way: str
    blocks: int | None


@dataclass(frozen=True)
class RankOp:
    """An operation of several ranks with everything that its tests and benchmarks need.

    Attributes:
        run: what people call; takes a rank's drawn arguments by name, ``group=`` and ``out=``.
        draw: (shape's items by name, rank=, world=, device=, seed=) → that rank's arguments. Every rank can
            draw every other one's.
        reference: all ranks' arguments, in order → the result of each as `Expected`, or its results as a
            tuple of them, as ``run`` gives a tuple and takes one as ``out=``.
        pick: (world=, units=, shape's items by name) → the choice for this shape on a GPU of so many
            multiprocessors, where torch has a library.
        ways: (the same) → way's name → arguments that ask for it.
        base: (the same) → the choice as a table of words, from which tuning starts.
        knobs: (the same) → what tuning may set otherwise, one knob after another: of each the words of its
            alternatives.
        asked: such a table → arguments that ask for it. shape_of: (world=, shape's items) → what choices are
            kept by (`picks`).
        peers: name → from a rank's arguments and a torch process group a call without any. Raises
            NotImplementedError where the backend or the machine has no such thing.
        timed: where ``run`` is more than what people call: (that, with ``out=``) → the call that is measured.
        same: whether that call gives what ``run`` gives; else peers are compared with ``run``.
        seen: what such a call gave → a tensor, to be compared with a peer's.
        alike: whether all ranks get the same bits.
        alone: from a rank's arguments a call of what a GPU computes without any communication, or None.
        flops: of one rank, from the shape's items and world=. remote: bytes that leave one rank at least.
        cases: those that are `small` run on simulated ranks and on processes; those with a `bar` are
            measured.
    """

    name: str
    run: Callable[..., Any]
    draw: Callable[..., dict[str, Any]]
    reference: Callable[[list[dict[str, Any]]], list[Any]]
    pick: Callable[..., Pick]
    ways: Callable[..., dict[str, dict[str, Any]]]
    cases: tuple[Case, ...]
    remote: Callable[..., float]
    peers: Mapping[str, Callable[..., Callable[[], Any]]] = field(default_factory=dict)
    alone: Callable[..., Callable[[], Any]] | None = None
    base: Callable[..., dict[str, Any]] = lambda **_: {}
    knobs: Callable[..., tuple[tuple[dict[str, Any], ...], ...]] = lambda **_: ()
    shape_of: Callable[..., dict[str, Any]] = lambda world, **shape: shape
    asked: Callable[[dict[str, Any]], dict[str, Any]] = dict
    timed: Callable[..., Callable[[], Any]] | None = None
    same: bool = True
    seen: Callable[[Any], Any] = lambda given: given
    alike: bool = False
    flops: Callable[..., float] = lambda **_: 0.0

    def call(self, arguments: dict[str, Any], out: Any = None) -> Callable[[], Any]:
        """What is measured, of a rank's arguments: a call without any."""
        if self.timed is not None:
            return self.timed(**arguments, out=out)
        return lambda: self.run(**arguments, out=out)
