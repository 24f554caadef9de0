"""The rows of a convolution as a matrix, tile by tile. No operation of the IR: a T.copy where a tile is a box
of the image, which engines can fetch, and a loop over the tile's elements where it is none."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder.constructs import LoopNest
from tilescale.compiler.builder.values import Buffer, as_expr, binary, compare
from tilescale.compiler.ir import source
from tilescale.compiler.ops.base import unheeded
from tilescale.compiler.ops.copy import copy, require_policy
from tilescale.compiler.ops.math import if_then_else
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import TileTypeError, TileValueError
from tilescale.language.symbolic import settle


def im2col(
    img: Buffer,
    col: Buffer,
    nhw_step: Any,
    c_step: Any,
    kernel: int,
    stride: int,
    dilation: int,
    pad: int,
    eviction_policy: str | None = None,
    annotations: dict[str, Any] | None = None,
) -> None:
    """Fills ``col``, a tile of (rows, columns), with that part of the matrix whose row (n · OH + y) · OW + x
    holds what a convolution's window at (y, x) of image n reads, channels last: column (ky · kernel + kx) ·
    C +
    c is ``img[n, y · stride + ky · dilation - pad, x · stride + kx · dilation - pad, c]``, or zero outside.
    ``nhw_step`` and ``c_step`` count tiles along both axes. ``eviction_policy`` and ``annotations`` decide
    nothing.

    Raises:
        TileTypeError: what is no tensor of four axes with constant extents, or no tile of two axes.
        TileValueError: a window that does not fit into the image.
    """
    loc = source.current()
    unheeded("im2col", annotations)
    require_policy(eviction_policy)
    kernel, stride, dilation, pad = map(settle, (kernel, stride, dilation, pad))
    if not isinstance(img, Buffer) or img.ndim != 4 or not all(isinstance(e, int) for e in img.shape[1:]):
        raise TileTypeError(
            f"T.im2col of {img!r}", loc=loc, expected="a tensor of (n, height, width, channels)"
        )
    if not isinstance(col, Buffer) or col.ndim != 2:
        raise TileTypeError(f"T.im2col into {col!r}", loc=loc, expected="a whole tile of two axes")
    for name, value, least in (
        ("kernel", kernel, 1),
        ("stride", stride, 1),
        ("dilation", dilation, 1),
        ("pad", pad, 0),
    ):
        if not isinstance(value, int) or value < least:
            raise TileValueError(
                f"{name}={value!r} of T.im2col", loc=loc, expected=f"an int, {least} or more"
            )
    _, height, width, channels = img.shape
    reach = (kernel - 1) * dilation + 1
    out_h, out_w = ((e + 2 * pad - reach) // stride + 1 for e in (height, width))
    if min(out_h, out_w) < 1:
        raise TileValueError(
            f"a window of {reach} does not fit into {img.name} of {height} × {width} with pad={pad}", loc=loc
        )
    rows, columns = col.shape
    if channels % columns == 0:
        # The columns of a tile belong to one window, and those of `each` tiles are its channels.
        each = channels // columns
        moved = (binary("//", c_step, each), binary("*", binary("%", c_step, each), columns))
        if stride == 1 and (out_w % rows == 0 or _boxes(rows, out_w)):
            _copied(img, col, nhw_step, moved, (kernel, dilation, pad), (out_h, out_w))
            return
    nest = LoopNest("parallel", [(0, rows, 1), (0, columns, 1)])
    for i, j in nest.trace(("i", "j")):
        row = binary("+", binary("*", as_expr(nhw_step), rows), i)
        column = binary("+", binary("*", as_expr(c_step), columns), j)
        window, c = binary("//", column, channels), binary("%", column, channels)
        if channels % columns == 0:
            window, c = moved[0], binary("+", moved[1], j)
        n, at = binary("//", row, out_h * out_w), binary("%", row, out_h * out_w)

        def place(out: Any, step: Any) -> Any:
            moved = binary("+", binary("*", out, stride), binary("*", step, dilation))
            return binary("-", moved, pad)

        y = place(binary("//", at, out_w), binary("//", window, kernel))
        x = place(binary("%", at, out_w), binary("%", window, kernel))
        inside = compare("<", window, kernel * kernel)  # the last tile of columns may reach past the matrix
        for value, extent in ((y, height), (x, width)):
            inside = tirx.And(inside, tirx.And(compare(">=", value, 0), compare("<", value, extent)))
        col[i, j] = if_then_else(inside, img[n, y, x, c], 0)


#: its older name
c2d_im2col = im2col


def _boxes(rows: int, out_w: int) -> int:
    """How many whole rows of results a tile holds, where each is a box that engines place: whole groups of
    the eight rows that a swizzle permutes, and so few that a thread issues them all. Zero where it is not
    so."""
    boxes = rows // out_w
    return boxes if boxes * out_w == rows and out_w % 8 == 0 and boxes <= 8 else 0


def _copied(
    img: Buffer,
    col: Buffer,
    nhw_step: Any,
    column: tuple[Any, Any],
    how: tuple[int, int, int],
    out: tuple[int, int],
) -> None:
    """A tile within a row of results, or of whole rows: neighbours in a row of the image, and what lies
    outside reads as zero. ``column``: the window that the tile's columns belong to, and their first channel.
    ``how``: kernel, dilation, pad. ``out``: the rows and columns of results."""
    (window, c), (kernel, dilation, pad), (out_h, out_w) = column, how, out
    boxes = max(1, col.shape[0] // out_w)
    length = col.shape[0] // boxes
    each = out_w // length

    def place(at: Any, step: Any) -> Any:
        return binary("-", binary("+", at, binary("*", step, dilation)), pad)

    # windows behind the last one, where a caller goes on beyond the matrix, lie below the image
    beyond = tirx.max(as_expr(binary("-", window, kernel * kernel - 1)), as_expr(0))
    x = place(binary("*", binary("%", nhw_step, each), length), binary("%", window, kernel))
    for k in range(boxes):
        row = binary("+", binary("*", binary("//", nhw_step, each), boxes), k)
        y = place(binary("%", row, out_h), binary("//", window, kernel))
        y = binary("+", y, binary("*", beyond, int(img.shape[1]) + pad))
        copy(
            img[binary("//", row, out_h), y, x, c],
            col[k * length : (k + 1) * length, :] if boxes > 1 else col,
        )
