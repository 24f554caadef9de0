"""Allocations and views: what a kernel's own memory is. No operation of the IR: TVM's AllocBuffer and
DeclBuffer say it all."""

from __future__ import annotations

from functools import reduce
from math import prod
from operator import mul
from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.lanes import VectorTile
from tilescale.compiler.builder.symbolic import extent_of
from tilescale.compiler.builder.values import Buffer, Region, Variable, as_expr, convert
from tilescale.compiler.ir import source
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.program import Param
from tilescale.compiler.ops.base import same_extent, show
from tilescale.compiler.tvm_compat import is_expr, tirx
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError
from tilescale.language.annotations import tensor_of
from tilescale.language.dtypes import Narrow, canonical, held
from tilescale.language.symbolic import SymExpr, settle
from tilescale.language.vectors import Vector, named_vector


def _allocate(shape: Any, dtype: Any, scope: str, what: str) -> Buffer:
    b = bld.current()
    if b.launch is None:
        raise TileSyntaxError(
            f"T.{what} stands outside T.Kernel", loc=source.current(), hint="allocate inside the launch"
        )
    if scope.startswith("shared") and any(f.kind in ("parallel", "vectorized") for f in b.frames):
        raise TileSyntaxError(
            f"T.{what} in T.Parallel, whose iterations are of elements: one thread runs each",
            loc=source.current(),
            expected="shared memory allocated outside the loop",
            hint="T.alloc_local for memory of one iteration",
        )
    extents = []
    for axis, extent in enumerate(shape if isinstance(shape, (tuple, list)) else (shape,)):
        known = constant(settle(extent)) if not isinstance(extent, bool) else None
        if known is None:
            raise TileTypeError(
                f"extent {axis} of T.{what} is {extent}, which is not known when the kernel is compiled",
                loc=source.current(),
                expected="an int: a tile's size is part of the kernel",
            )
        if known <= 0:
            raise TileValueError(
                f"extent {axis} of T.{what} is {known}", loc=source.current(), expected="a positive extent"
            )
        extents.append(known)
    lanes = named_vector(dtype)
    if isinstance(lanes, Vector):
        extents.append(lanes.count)
    if prod(extents) >= 1 << 31:
        raise TileValueError(
            f"T.{what} of {prod(extents)} elements",
            loc=source.current(),
            expected="fewer than 2147483648: a tile that fits a block's memory",
        )
    dt = lanes.of if isinstance(lanes, Vector) else canonical(lanes)
    var = tirx.decl_buffer(tuple(extents), str(held(dt)), "tile", scope=scope, data_alignment=64, layout=None)
    buffer = Buffer(var, "tile", tuple(extents), dt, scope)
    b.buffers[var] = buffer
    b.unnamed.add(var)
    b.emit(tirx.AllocBuffer(var, {}, b.span()))
    return VectorTile(buffer, lanes) if isinstance(lanes, Vector) else buffer


def _check_scope(what: str, scope: str, *known: str) -> None:
    """The scope is what the function's name says.

    Raises:
        TileValueError: another one is asked for.
    """
    if scope not in known:
        raise TileValueError(
            f"T.{what} with scope={scope!r}", loc=source.current(), expected=" or ".join(known)
        )


def alloc_shared(shape: Any, dtype: Any = "float32", scope: str = "shared.dyn") -> Buffer:
    """A tile in the block's shared memory, seen by all its executors; contents undefined. Inside ``T.Scale``
    each executor has a tile of its own, seen by those below it: what warps or warpgroups share is allocated
    in front of it. A tile that some of them alone come to, as ``if w < 4:`` says of their index, takes memory
    for these."""
    _check_scope("alloc_shared", scope, "shared", "shared.dyn")
    return _allocate(shape, dtype, "shared", "alloc_shared")


def alloc_fragment(shape: Any, dtype: Any = "float32", scope: str = "local.fragment") -> Buffer:
    """A tile distributed over the registers of the executor's threads; contents undefined. With
    ``scope="local"`` it is T.alloc_local."""
    _check_scope("alloc_fragment", scope, "local.fragment", "local")
    if scope == "local":
        return alloc_local(shape, dtype)
    return _allocate(shape, dtype, "local.fragment", "alloc_fragment")


def alloc_local(shape: Any, dtype: Any = "float32", scope: str = "local") -> Buffer:
    """Memory of one thread (of one iteration of a T.Parallel loop, where allocated in it)."""
    _check_scope("alloc_local", scope, "local")
    return _allocate(shape, dtype, "local", "alloc_local")


def alloc_var(dtype: Any, init: Any = None, scope: str = "local.var") -> Variable:
    """One mutable scalar: assigning to its name stores. Zero, or ``init``, to begin with."""
    _check_scope("alloc_var", scope, "local.var")
    if isinstance(of := named_vector(dtype), Vector):
        return _lane_cell(of, init)
    made = alloc_cell(dtype)
    b = bld.current()
    value = convert(0 if init is None else init, made.dtype)
    b.emit(tirx.BufferStore(made.buffer.var, value, [tirx.IntImm("int32", 0)], b.span()))
    return made


def alloc_cell(dtype: Any) -> Variable:
    """The same, for what is stored before it is read."""
    return Variable(_allocate((1,), dtype, "local.var", "alloc_var"))


def _lane_cell(of: Vector, init: Any) -> Variable:
    from tilescale.compiler.ops.lanes_of import LaneCell

    made = LaneCell(of, [alloc_var(of.of) for _ in range(of.count)])
    for k, cell in enumerate(made.cells[1:], 1):
        bld.current().give_name(cell.buffer, f"lane{k}")
    if init is not None:
        made.store(init)
    return made


def alloc_signal(shape: Any = (1,)) -> Buffer:
    """Counters (int64) in shared memory for T.signal and T.wait between the executors of a block or a
    cluster; zero to begin with.

    Raises:
        TileSyntaxError: inside T.Scale below the block, where each executor would have counters that no other
        one signals.
    """
    b = bld.current()
    if b.launch is not None and b.executor != "block":
        raise TileSyntaxError(
            "T.alloc_signal inside T.Scale", loc=source.current(), hint="allocate it in front of T.Scale"
        )
    buffer = _allocate(shape, "int64", "shared.signal", "alloc_signal")
    buffer.kind = "signal"
    return buffer


def empty(*shape: Any, dtype: Any = None) -> Buffer:
    """An output of an eager kernel: allocated by the call and returned. ``T.empty((m, n), "float16")`` or
    ``T.empty(m, n, dtype="float16")``; float32 without one.

    Raises:
        TileSyntaxError: in a @T.prim_func. TileTypeError: no extents, or two dtypes.
    """
    extents = list(shape)
    if dtype is None:
        named = len(extents) > 1 and not isinstance(extents[-1], (int, SymExpr)) and not is_expr(extents[-1])
        dtype = extents.pop() if named else "float32"
    if len(extents) == 1 and isinstance(extents[0], (tuple, list)):
        extents = list(extents[0])
    if not extents or any(isinstance(e, (str, tuple, list)) for e in extents):
        raise TileTypeError(
            f"T.empty of {', '.join(map(repr, shape))}", loc=source.current(),
            expected='T.empty((m, n), "float16") or T.empty(m, n, dtype="float16")',
        )  # fmt: skip
    eager = bld.current().eager
    if eager is None:
        raise TileSyntaxError(
            "T.empty makes an output of an eager kernel, and this is a @T.prim_func",
            loc=source.current(),
            hint="a tensor parameter, with out_idx=[…] in @tilescale.jit; or T.alloc_shared / "
            "T.alloc_fragment for scratch",
        )
    made: Buffer = eager.declare_output(tuple(map(extent_of, extents)), dtype)
    return made


def alloc_global(shape: Any, dtype: Any = "float32", scope: str = "global") -> Buffer:
    """Memory on the device that each call allocates for its launches: a tensor that nobody passes or gets
    back.
    Its contents are undefined until written.

    Raises:
        TileSyntaxError: inside T.Kernel. TileValueError: another scope.
    """
    _check_scope("alloc_global", scope, "global")
    b = bld.current()
    if b.launch is not None and not b.launched:
        raise TileSyntaxError(
            "T.alloc_global inside T.Kernel",
            loc=source.current(),
            hint="in front of the launch, whose blocks share it",
        )
    name = f"workspace{len(b.workspaces)}"
    extents = tuple(settle(e) for e in (shape if isinstance(shape, (tuple, list)) else (shape,)))
    spec = tensor_of("tensor", extents, dtype)
    made: Buffer = b.make_tensor(name, spec, source.current())
    b.workspaces[name] = Param(name, spec, made.var, source.current(), output=True)
    return made


def alloc_buffer(shape: Any, dtype: Any = "float32", scope: str = "global") -> Buffer:
    """An allocation by TVM's name, which says where: T.alloc_global, T.alloc_shared, T.alloc_fragment or
    T.alloc_local.

    Raises:
        TileValueError: another scope.
    """
    by_scope = {
        "global": alloc_global,
        "shared": alloc_shared,
        "shared.dyn": alloc_shared,
        "local": alloc_local,
        "local.fragment": alloc_fragment,
    }
    _check_scope("alloc_buffer", scope, *by_scope)
    return by_scope[scope](shape, dtype)


def view(buffer: Buffer, shape: Any = None, dtype: Any = None) -> Buffer:
    """The same memory under another shape or dtype; row-major order and total bytes stay.

    Raises:
        TileValueError: the sizes differ, or an extent is not positive. TileTypeError: no whole tile or
            tensor, or a tensor that has strides of its own; extents that are not constants, of a tile or
            under another dtype.
    """
    if not isinstance(buffer, Buffer):
        raise TileTypeError(
            f"a view of {'a part of ' + buffer.name if isinstance(buffer, Region) else buffer}",
            loc=source.current(),
            expected="a whole tile or tensor",
            hint="a view of all of it, and an index into that",
        )
    to_vectors = isinstance(named_vector(dtype), Vector)
    if isinstance(buffer, VectorTile) and dtype is not None and not to_vectors:
        return view(buffer.of, shape, dtype)  # their lanes, as its last axis
    if isinstance(buffer, VectorTile) or to_vectors:
        raise TileTypeError(
            f"a view of {buffer.name}, of {buffer.dtype}{'' if dtype is None else f', as {dtype}'}",
            loc=source.current(),
            expected="a scalar dtype: vectors lie as a last axis of it",
        )
    if list(buffer.var.ty.strides):
        raise TileTypeError(
            f"a view of {buffer.name}, which is a T.StridedTensor: its elements do not lie in row-major "
            "order",
            loc=source.current(),
            hint="copy it into an allocation first",
        )
    dt = canonical(dtype) if dtype is not None else buffer.dtype
    new = (
        tuple(shape) if isinstance(shape, (tuple, list)) else (shape,) if shape is not None else buffer.shape
    )
    new = tuple(e if isinstance(e, bool) else settle(e) for e in new)
    for axis, extent in enumerate(new):
        if isinstance(extent, bool):
            raise TileTypeError(
                f"extent {axis} of a view of {buffer.name} is {extent}",
                loc=source.current(),
                expected="an int",
            )
        if isinstance(extent, int) and extent <= 0:
            raise TileValueError(
                f"extent {axis} of a view of {buffer.name} is {extent}",
                loc=source.current(),
                expected="a positive extent",
            )
    if not all(isinstance(e, int) for e in (*new, *buffer.shape)):
        return _symbolic_view(buffer, new, dt)
    if (buffer.packed or isinstance(buffer.dtype, Narrow) or isinstance(dt, Narrow)) and dt != buffer.dtype:
        raise TileTypeError(
            f"a view of {buffer.name}, of {buffer.dtype}, as {dt}",
            loc=source.current(),
            expected="the same dtype: tiles of 4-bit numbers hold each in 8 bits",
            hint="T.copy into a tile of the other dtype",
        )
    if buffer.packed:
        raise TileTypeError(
            f"a view of {buffer.name}, a tensor of {buffer.dtype}",
            loc=source.current(),
            expected="a tile of it: T.copy",
        )
    if prod(new) * held(dt).bits != prod(buffer.shape) * held(buffer.dtype).bits:
        raise TileValueError(
            f"{buffer.name} of {buffer.shape} {buffer.dtype} has "
            f"{prod(buffer.shape) * held(buffer.dtype).bytes} bytes, "
            f"a view of {new} {dt} has {prod(new) * held(dt).bytes}",
            loc=source.current(),
            expected="the same number of bytes",
        )
    return _view_of(buffer, new, dt)


def _view_of(buffer: Buffer, new: tuple[Any, ...], dt: Any) -> Buffer:
    b = bld.current()
    var = tirx.decl_buffer(new, str(held(dt)), "view", scope=buffer.scope, data_alignment=64, layout=None)
    made = Buffer(var, "view", new, dt, buffer.scope, buffer.kind)
    b.buffers[var] = made
    b.unnamed.add(var)
    b.emit(tirx.DeclBuffer(var, b.span(), data=tirx.buffer_data(buffer.var)))
    return made


def _symbolic_view(buffer: Buffer, shape: tuple[Any, ...], dt: Any) -> Buffer:
    """A tensor under extents that each call says.

    Raises:
        TileTypeError: of a tile, of other ranks' memory, or under another dtype. TileValueError: it is not
            known that both have as many elements.
    """
    what = f"a view of {buffer.name}, whose extents are not constants"
    if buffer.scope != "global" or buffer.kind != "tensor" or buffer.packed:
        raise TileTypeError(what, loc=source.current(), expected="a T.Tensor of the kernel")
    if dt != buffer.dtype:
        raise TileTypeError(
            f"{what}, as {dt}", loc=source.current(), expected=f"its own dtype, {buffer.dtype}"
        )
    new = tuple(as_expr(extent_of(e)) for e in shape)
    old = tuple(map(as_expr, buffer.shape))
    if not same_extent(reduce(mul, new), reduce(mul, old)):
        raise TileValueError(
            f"{what}: {show(old)} as {show(new)}", loc=source.current(),
            expected="extents of which it is clear that their product is the same",
        )  # fmt: skip
    known = tuple(e if (n := constant(e)) is None else n for e in new)
    return _view_of(buffer, known, dt)


def reshape(buffer: Buffer, shape: Any) -> Buffer:
    """The same memory under another shape."""
    return view(buffer, shape)
