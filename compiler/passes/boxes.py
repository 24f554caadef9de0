"""Which parts of tensors TMA can copy (PTX ISA 9.0, "Tensors"): what its loads into rings and its stores of
results ask alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilescale.compiler.advice import reason
from tilescale.compiler.ir.multiples import is_multiple, spelt_out
from tilescale.compiler.ir.nests import long_axes
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.layout.loops import bits_of

#: axes of a tensor that TMA can copy, and what its rows and its coordinates along them come to a multiple of,
#: in bytes
MOST_AXES, CHUNK = 5, 16


def unfit(
    region: Any, tile: Sequence[int], params: Any, names: Mapping[Any, Any], *, symmetric: bool = False
) -> str | None:
    """Why TMA cannot copy between a region and a tile of these extents in shared memory; None where it can.
    ``params``: the kernel's. ``names``: what names stand for. ``symmetric``: the region may be this rank's
    part of symmetric memory. A box that begins elsewhere than at a multiple of 16 bytes of a row is an
    illegal instruction."""
    var, name = region.source, region.source.name
    if (why := _unfit_shape(region, tile, params, symmetric)) is not None:
        return why
    if is_multiple(spelt_out(region.region[-1].min, names), CHUNK * 8 // bits_of(var)):
        return None
    each = CHUNK * 8 // bits_of(var)
    hint = f"a first column that is seen to be a multiple of {each}, such as k * {each}"
    return reason(f"the first column of {name}'s tile is not known to be a multiple of {CHUNK} bytes", hint)


def _unfit_shape(region: Any, tile: Sequence[int], params: Any, symmetric: bool) -> str | None:
    """The same, wherever the box begins."""
    var, name = region.source, region.source.name
    scopes = ("global", "global.symm") if symmetric else ("global",)
    if all(not p.var.same_as(var) for p in params) or var.ty.storage_scope not in scopes:
        return f"{name} is no tensor of this rank alone"
    shape, axes = list(var.ty.shape), long_axes(region)
    if len(shape) > MOST_AXES or list(var.ty.strides):
        hint = (
            "a T.Tensor without strides"
            if list(var.ty.strides)
            else f"at most {MOST_AXES} axes: those that lie side by side as one"
        )
        return reason(f"{name} has {len(shape)} axes or strides of its own", hint)
    if len(tile) == 1:
        return _unfit_vector(region, axes, tile[0])
    if (
        len(tile) != 2
        or len(axes) != 2
        or axes[-1] != len(shape) - 1
        or [constant(region.region[k].extent) for k in axes] != list(tile)
    ):
        return f"the tile of {name} is no matrix of whole rows"
    if (why := _unfit_rows(var)) is not None:
        return why
    width = tile[1] * bits_of(var) // 8
    if tile[0] % 8 or width % 32 and width != CHUNK:  # plain rows of one chunk each
        hint = f"a tile of a multiple of 8 rows and of {32 * 8 // bits_of(var)} columns"
        return reason(f"a tile of {tile[0]} × {tile[1]} has no swizzle", hint)
    return None


def _unfit_vector(region: Any, axes: list[int], count: int) -> str | None:
    """Why TMA cannot copy a part of one row, without a swizzle; None where it can. A stage begins at a
    multiple of 128 bytes."""
    var = region.source
    if axes != [len(var.ty.shape) - 1] or constant(region.region[-1].extent) != count:
        return f"the tile of {var.name} is no part of a row"
    if (why := _unfit_rows(var)) is not None:
        return why
    if count <= 256 and count * bits_of(var) // 8 % 128 == 0:
        return None
    return reason(
        f"a tile of {count} numbers is no 128·k bytes",
        f"a tile of a multiple of {128 * 8 // bits_of(var)} numbers, at most 256",
    )


def _unfit_rows(var: Any) -> str | None:
    row, each = var.ty.shape[-1], CHUNK * 8 // bits_of(var)
    if is_multiple(row, each):
        return None
    what = f"rows of {var.name} are not known to be a multiple of {CHUNK} bytes"
    if constant(row) is not None:
        return reason(what, f"{var.name} padded to rows of a multiple of {each} elements")
    promise = f"T.dynamic(…, multiple_of={each})"
    return reason(f"{what} ({promise} promises it)", f"{promise}, where every call's rows are so")
