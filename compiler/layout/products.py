"""How tensor cores share a product: the ways to cut an accumulator among warps and warpgroups, and how its
operands lie."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilescale.compiler.ir.nests import matrix_axes
from tilescale.compiler.ir.scales import WARP
from tilescale.compiler.layout import Fragment, Shared, tensor_cores
from tilescale.compiler.layout.instructions import accumulator, mma_accumulator
from tilescale.compiler.layout.loops import bits_of, element_dtype, in_registers
from tilescale.compiler.layout.shared import boxed, widest_swizzle
from tilescale.compiler.layout.spread import ceil_div, divisors
from tilescale.compiler.layout.tensor_cores import HALVES, KINDS


def extents(call: Any) -> tuple[int, int, int]:
    """M, N, K."""
    a, _, c = call.args[:3]
    rows, cols = (int(a.region[k].extent) for k in matrix_axes(a))
    m, n = (int(c.region[k].extent) for k in matrix_axes(c))
    return m, n, rows if call.attrs["trans_a"] else cols


def wgmma_fragments(call: Any, threads: int) -> list[tuple[Fragment, int, int]]:
    """Every way to cut an accumulator among the warpgroups, by policy (the warpgroups below one another
    unless FullCol is asked for); a part that begins inside a row of the swizzle has no descriptor. Where
    FullRow is asked for and there are too few rows, they go to some of the warpgroups (from the call's
    ``first_thread`` on), and the rows of the others are padding."""
    m, n, _ = extents(call)
    policy = int(call.attrs["policy"])
    groups, found = threads // 128, []
    held = in_registers(call.args[0].source)
    a, b = (swizzled(r, along) for r, along in operands_of(call))
    if a is None and not held or b is None:
        return []
    widths = tensor_cores.widths(element_dtype(call.args[0].source))
    for down in divisors(groups):
        across = groups // down
        rows = ceil_div(m, 64 * down) * 64 * down if policy == 1 and m % 64 == 0 and across == 1 else m
        if rows % (64 * down) or n % across or n // across not in widths:
            continue
        a_fits = a is None or not call.attrs["trans_a"] or 64 * a.bits % (8 * a.swizzle) == 0
        b_fits = call.attrs["trans_b"] or across == 1 or n // across * b.bits % (8 * b.swizzle) == 0
        if a_fits and b_fits:
            made = accumulator(rows, n, (down, across))
            found.append(
                (
                    replace(made, first_thread=int(call.attrs.get("first_thread", 0))) if rows > m else made,
                    down,
                    across,
                )
            )
    found.sort(key=lambda f: f[1] if policy == 2 else f[2])
    return found[:1] if policy == 1 else found


def mma_fragments(m: int, n: int, threads: int, policy: int) -> list[tuple[Fragment, int, int]]:
    """Every way to cut an accumulator among the warps: padding is dearest, then an odd number of tiles side
    by side, which ldmatrix cannot bring two at a time, then the policy, then how much the warps read."""
    warps, found = threads // WARP, []
    for used in divisors(warps):
        for wm in divisors(used):
            wn = used // wm
            down, across = ceil_div(m, 16 * wm), ceil_div(n, 8 * wn)
            waste = (16 * wm * down) * (8 * wn * across) * warps / used
            shape = {0: 0, 1: wn, 2: wm}[policy]  # FullRow: warps below one another; FullCol: side by side
            reads = 16 * down + 8 * across
            odd = across > 1 and across % 2
            fragment = (
                mma_accumulator()
                .repeated(1, across)
                .repeated(0, down)
                .repeated(0, wm, "thread")
                .repeated(1, wn, "thread")
            )
            found.append(((waste, odd, shape, reads), fragment.copied(warps // used), wm, wn))
    found.sort(key=lambda f: f[0])
    return [(f, wm, wn) for _, f, wm, wn in found]


def operands_of(call: Any) -> list[tuple[Any, bool]]:
    """A and B, each with whether its rows run along k."""
    return [(call.args[0], not call.attrs["trans_a"]), (call.args[1], bool(call.attrs["trans_b"]))]


def swizzled(region: Any, along: bool) -> Shared | None:
    """The swizzled layout of an operand's tile, stages in front; None where its rows are no whole chunks, or
    do not run along k though their elements are none of 16 bits."""
    var = region.source
    dtype = element_dtype(var)
    if in_registers(var) or dtype not in KINDS or (dtype not in HALVES and not along):
        return None
    shape = [int(e) for e in var.ty.shape]
    axes = matrix_axes(region)
    if axes != (len(shape) - 2, len(shape) - 1) or len(shape) > 3:
        return None
    width = widest_swizzle(shape[-1], bits_of(var))
    if not width or shape[-2] % 8:
        return None
    made = boxed(tuple(shape[-2:]), bits_of(var), width)
    return made.staged(shape[0]) if len(shape) == 3 else made
