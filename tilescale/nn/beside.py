"""What crosses between ranks beside products: on a stream of its own.

The caller's stream has the products, the other one everything that a team launches and what copies rows for
it. So a team's launches are on one stream, in host order, as every rank makes them (docs/OPS.md, Streams); a
product waits for no other rank, so it may delay them, but it ends.

Who releases and who acquires what the two share:

- The other stream begins behind all that the caller's had in front (`__enter__`), and the caller's goes on
  behind all that the other one had (`__exit__`). So memory of either stream's pool that is let go of behind
  the end is free for both, and what was held until then (`hold`) too.
- What the other stream makes is used behind `wait` for the `mark` that follows it. What it takes of the
  caller's stream is there behind `follow`.
- Memory that the other stream writes comes from the caller's pool, where a piece is free as soon as the
  caller's stream is done with it: the other one may write it behind a `follow` of the moment when it was
  allocated, and no earlier (`memory`). Pieces that it reads are held, unless the caller's stream waits for it
  before they go.
- Small tensors that are made on the other stream come from its own pool. The caller's stream may read them as
  long as somebody holds them to the end.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

#: multiprocessors that communication keeps beside products: 32 moved rows of 4096 tokens as fast as a link
#: (docs/history/ranks.md, Experts)
KEPT = 24


@functools.cache
def _stream(device: torch.device) -> Any:
    """Its blocks come first where a product's blocks end."""
    return torch.cuda.Stream(device, priority=-1)


class Beside:
    """Two streams of ``like``'s device, where there are any and they are ``wanted``; else both are one."""

    def __init__(self, like: Tensor, wanted: bool):
        self.own: Any = None
        self.callers: Any = None
        if wanted and like.is_cuda:
            self.own, self.callers = _stream(like.device), torch.cuda.current_stream(like.device)
        self.held: list[Tensor] = []

    def __bool__(self) -> bool:
        return self.own is not None

    def __enter__(self) -> Beside:
        self.follow()
        return self

    def __exit__(self, *_: object) -> None:
        if self.own is not None:
            self.callers.wait_stream(self.own)
        self.held.clear()

    def crossing(self) -> Any:
        """A context whose launches go to the other stream."""
        return contextlib.nullcontext() if self.own is None else torch.cuda.stream(self.own)

    def follow(self) -> None:
        """The other stream goes on behind all that the caller's has so far."""
        if self.own is not None:
            self.own.wait_stream(self.callers)

    def mark(self) -> Any:
        """What the other stream has done so far, for `wait`."""
        return None if self.own is None else self.own.record_event()

    def wait(self, mark: Any) -> None:
        """The caller's stream goes on behind what was marked."""
        if mark is not None:
            self.callers.wait_event(mark)

    def hold(self, *tensors: Tensor) -> None:
        """Until both streams are one again."""
        self.held += tensors if self.own is not None else ()

    def memory(self, like: Tensor, *shape: int) -> Tensor:
        """Of the caller's pool, for the other stream, which goes on behind all that the caller's has now."""
        if self.own is None:
            return like.new_empty(shape)
        with torch.cuda.stream(self.callers):
            made = like.new_empty(shape)
        self.follow()
        return made

    def blocks(self, alone: bool) -> int | None:
        """How many multiprocessors communication keeps; all where it is ``alone``."""
        return None if self.own is None or alone else KEPT
