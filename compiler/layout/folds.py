"""What of a reduced axis lies in which threads."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.layout import Fragment, Piece


def axis_of(call: Any) -> int:
    return int(call.attrs["axis"]) % len(call.args[0].region)


def digits_across(held: Fragment, axis: int, wave: int) -> tuple[list[Piece], list[Piece]]:
    """The digits of an axis that are folded by shuffles, which reach the threads of a ``wave``, and those
    that go through shared memory."""
    mine = [p for p in held.pieces if p.axis == axis and p.to == "thread"]

    def power(n: int) -> bool:
        return n & (n - 1) == 0

    near, far = [], []
    for p in sorted(mine, key=lambda p: p.stride):
        whole = held.threads % wave == 0 or held.threads < wave and power(held.threads)
        if not whole or not power(p.stride) or not power(p.extent) or p.stride >= wave:
            far.append(p)
        elif p.stride * p.extent > wave:
            low, high = p.split(wave // p.stride)
            near.append(low)
            far.append(high)
        else:
            near.append(p)
    return near, far
