"""What of a reduced axis lies in which threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilescale.compiler.layout.fragment import Fragment, packed
from tilescale.compiler.layout.pieces import Piece


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


def result(call: Any, held: Fragment) -> Fragment:
    """The fragment that a reduction of ``held`` leaves, under the result's shape."""
    left = held.reduced(axis_of(call))
    return reshaped(
        left,
        [int(e) for e in call.args[1].source.ty.shape],
        [int(r.extent) for r in call.args[0].region],
        axis_of(call),
    )


def reshaped(left: Fragment, shape: list[int], source: list[int], axis: int) -> Fragment:
    """The same places under ``shape``, which differs from what is left only in axes of extent one."""
    rest = source[:axis] + source[axis + 1 :]
    long = [k for k, e in enumerate(rest) if e != 1]
    onto = dict(zip(long, [k for k, e in enumerate(shape) if e != 1], strict=True))
    kept = [p for p in left.pieces if p.axis is None or p.axis in onto]
    pieces = [p if p.axis is None else Piece(onto[p.axis], p.unit, p.extent, p.to, p.stride) for p in kept]
    whole = [1] * len(shape)
    for k, j in onto.items():
        whole[j] = left.shape[k]
    return Fragment(tuple(whole), tuple(pieces), left.threads, left.first_thread)


def by_thread(held: Fragment, axis: int) -> Fragment:
    """What a reduction of ``held`` leaves in the slots of `result` where each thread keeps its own part:
    axis 0, in front of those that are left, counts the parts."""
    pieces, parts = [], 1
    for p in sorted(held.pieces, key=lambda p: p.unit):
        if p.axis is None or p.axis > axis:
            pieces.append(p)
        elif p.axis < axis:
            pieces.append(replace(p, axis=p.axis + 1))
        elif p.to == "thread":
            pieces.append(Piece(0, parts, p.extent, "thread", p.stride))
            parts *= p.extent
    shape = (parts, *held.shape[:axis], *held.shape[axis + 1 :])
    return Fragment(shape, packed(pieces), held.threads, held.first_thread)
