"""``T.make_tensor``: a tensor that lies at an address which the kernel reads.

In IR it is a view of the tensor of addresses, the table: what is written at one of its addresses may be read
at another. ``data`` of its DeclBuffer is the call ``ts.tensor_at(table, address)``.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.values import Buffer, as_expr, index_expr, to_expr
from tilescale.compiler.ir import source
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.pointed import POINTED
from tilescale.compiler.tvm_compat import ir, tirx
from tilescale.errors import TileTypeError, TileValueError
from tilescale.language.dtypes import Narrow, canonical


def make_tensor(ptr: Any, shape: Any, dtype: Any = "float32", strides: Any = None) -> Buffer:
    """A tensor at an address, on the targets cpu and cuda: ``T.make_tensor(ptrs[g], (M, K), "float16")``,
    where ``ptrs`` is a ``T.Tensor((groups,), T.ptr)`` of what torch's ``data_ptr()`` gives, or at a parameter
    ``p: T.ptr`` itself.

    Nobody looks at what lies at an address: its extents, dtype and strides (row-major by default), that the
    address is a multiple of 16, and that it lives as long as the launch, are the caller's word. A tensor that
    a call gives for ``p`` is looked at (tilescale/pointed.py). Tensors of different tables do not overlap, as
    parameters do not.

    Raises:
        TileTypeError: no address, extents that are no integers, a dtype of 4 bits. TileValueError: an extent
        below one.
    """
    b, loc = bld.current(), source.current()
    if isinstance(ptr, Buffer) and ptr.shape == (1,):
        ptr = ptr[0]
    load = None if isinstance(ptr, Buffer) else to_expr(ptr, "an address")
    known = isinstance(load, ir.TensorLoad) and load.source.ty.storage_scope == "global"
    if load is None or not known or str(load.ty) != "int64":
        raise TileTypeError(
            f"T.make_tensor at {ptr!r}", loc=loc,
            expected="a parameter p: T.ptr, or an element of a T.Tensor((n,), T.ptr)",
        )  # fmt: skip
    dt = canonical(dtype)
    if isinstance(dt, Narrow):
        raise TileTypeError(f"T.make_tensor of {dt}", loc=loc, expected="elements of whole bytes")

    def extents(given: Any) -> tuple[Any, ...]:
        found = (index_expr(e) for e in (given if isinstance(given, (tuple, list)) else (given,)))
        return tuple(e if (known := constant(e)) is None else known for e in found)

    dims, steps = extents(shape), None if strides is None else extents(strides)
    for axis, e in enumerate(dims):
        if isinstance(e, int) and e < 1:
            raise TileValueError(f"extent {axis} of T.make_tensor is {e}", loc=loc, expected="1 or more")
    if steps is not None and len(steps) != len(dims):
        raise TileValueError(f"T.make_tensor of {len(dims)} axes with {len(steps)} strides", loc=loc)
    var = tirx.decl_buffer(
        dims, str(dt), "tensor", strides=None if steps is None else [as_expr(s) for s in steps],
        scope="global", data_alignment=1, layout=None,
    )  # fmt: skip
    made = Buffer(var, "tensor", dims, dt, "global", "tensor")
    b.buffers[var] = made
    b.unnamed.add(var)
    pointer = ir.PointerType(ir.PrimType(str(dt)), "global")
    b.emit(tirx.DeclBuffer(var, b.span(), data=ir.Call(POINTED, [load.source, load], ret_ty=pointer)))
    return made


#: TileLang's name where the address is an expression
make_tensor_from_addr = make_tensor
