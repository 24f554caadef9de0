"""What T.print shows, in the form of the other targets: ``block (1, 0, 0) kernel.py:7: x = 0.5``, with the
rank in front where there are several; a tile as its dtype, shape and rows (tilescale/native/report.c,
compiler/gpu/ops/print.py)."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.sim import numerics

#: digits of an element of a tile; a scalar is widened and has 9
DIGITS = {"float64": 10, "float32": 6, "float16": 5}
FEW = 4
#: more elements are shown by their edges: so many at each end of axes longer than ``WIDE``
MANY, EDGE, WIDE = 1000, 3, 8


def head(ex: Any, loc: Any) -> str:
    """Who prints, and where."""
    x, y, z = ex.block.index
    rank = f"rank {ex.rank.number} " if len(ex.machine.ranks) > 1 else ""
    return f"{rank}block ({x}, {y}, {z}) " + (f"{loc.file}:{loc.line}: " if loc else "")


def scalar(value: Any, dtype: str) -> str:
    """A number; a bool is 0 or 1."""
    return f"{float(value):.9g}" if "float" in dtype else str(int(value))


def tile(stored: Any, dtype: str) -> str:
    """An array as it lies in memory: its dtype and shape, and its rows below."""
    shape = f"({', '.join(map(str, stored.shape))})"
    return f"{dtype}{shape}\n{_axis(numerics.decode(stored, dtype), dtype, 0, stored.size > MANY)}"


def _axis(values: Any, dtype: str, depth: int, brief: bool) -> str:
    if not values.ndim:
        return f"{float(values):.{DIGITS.get(dtype, FEW)}g}" if "float" in dtype else str(values.item())
    parts = (
        [_axis(v, dtype, depth + 1, brief) for v in values]
        if not brief or len(values) <= WIDE
        else [
            *(_axis(v, dtype, depth + 1, brief) for v in values[:EDGE]),
            "...",
            *(_axis(v, dtype, depth + 1, brief) for v in values[-EDGE:]),
        ]
    )
    between = ", " if values.ndim == 1 else ",\n" + " " * (depth + 1)
    return f"[{between.join(parts)}]"
