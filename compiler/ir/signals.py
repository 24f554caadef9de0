"""What a signal makes of a counter, and what a wait compares it by."""

from __future__ import annotations

import operator
from collections.abc import Callable

#: what a signal makes of a counter, and a number of it
OPS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "set": lambda old, new: new,
    "max": max,
    "min": min,
}
COMPARISONS = ("ge", "eq", "gt", "ne", "le", "lt")
