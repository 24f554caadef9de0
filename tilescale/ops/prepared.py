"""What calls of operations do, prepared once for calls that are alike.

A call of an operation checks its arguments, chooses a way by their shapes, and takes or compiles a kernel:
some fifty microseconds of Python, in which small kernels run. All of it follows from the arguments'
descriptions (`signature`) and what is said beside them, so it is done once for each of these, and what comes
out is kept: a function that does the rest.

What is kept holds no tensor, no group and no memory, so it keeps nothing alive; and what is refused is not
kept, so it is refused at every call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tilescale import env

#: calls that are kept at most, of each group, and of operations of one rank
MOST = 1024
#: what choices are made of beside arguments
VARIABLES = (env.TARGET, env.SPARE, env.REMOTE)


class Plan(NamedTuple):
    """The result's shape and dtype, and what fills it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    run: Callable[..., Any]

    def result(self, out: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """``out``, which was looked at when the plan was made, or a new tensor."""
        return like.new_empty(self.shape, dtype=self.dtype) if out is None else out


def signature(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    """All that may be asked of a tensor but for its numbers and where it lies: how it begins, within vectors
    of 16 bytes, is part of it."""
    if tensor is None:
        return None
    t = tensor
    unlike = t.is_neg() or t.is_conj()
    return t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15, t.storage_offset() & 15, unlike


class Plans:
    """What was prepared, at most `MOST` calls; the oldest go first."""

    def __init__(self, most: int = MOST):
        self._made: dict[Any, Any] = {}
        self._most, self._lock = most, threading.Lock()

    def __len__(self) -> int:
        return len(self._made)

    def of(self, key: tuple[Any, ...] | None, make: Callable[[], Any]) -> Any:
        """What was made for this key under the environment of now. None: of what is made for a single
        call."""
        if key is None:
            return make()
        try:
            found = self._made.get(key := (env.texts(*VARIABLES), key))
        except TypeError:  # an argument without a hash: ``make`` says what is wrong with it
            return make()
        if found is None:
            found = make()
            with self._lock:
                while len(self._made) >= self._most:
                    del self._made[next(iter(self._made))]
                self._made[key] = found
        return found

    def clear(self) -> None:
        with self._lock:
            self._made.clear()
