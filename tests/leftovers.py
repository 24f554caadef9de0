"""What runs leave behind: memory that Python finds only when it looks for cycles, which is when so many
objects have been made. A run's objects are few, and their arrays are large."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def nothing_left(*kinds: type) -> Iterator[None]:
    """Objects of these classes that are made within are gone at its end, without a look for cycles."""
    looks = gc.isenabled()
    gc.disable()
    try:
        # by their type: isinstance asks what weak references stand for, too, which may be gone
        before = {id(o) for o in gc.get_objects() if issubclass(type(o), kinds)}
        yield
        left = [
            type(o).__name__ for o in gc.get_objects() if issubclass(type(o), kinds) and id(o) not in before
        ]
    finally:
        if looks:
            gc.enable()
    assert not left, f"{len(left)} are left: {', '.join(sorted(set(left)))}"
