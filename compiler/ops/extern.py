"""``T.call_extern``: a function of the author's own CUDA text, which ``T.import_source`` puts in front of the
kernel.

Each thread of the executor calls it, with pointers to memory (`access_ptr`) and numbers. The compiler knows
of the text what the pointers' modes say, and orders the call by that. The text has no meaning on the
simulator and the CPU, which refuse the call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import reduce
from operator import mul
from typing import Any, ClassVar

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.integers import fits
from tilescale.compiler.builder.values import Buffer, Memory, Region, as_expr, const, convert, index_expr
from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import Access, TileOp, register
from tilescale.compiler.ops.alloc import alloc_cell, reshape
from tilescale.compiler.ops.base import emit, is_tile, of_iterations, region
from tilescale.compiler.ops.cuda_functions import known
from tilescale.compiler.tvm_compat import ir, register_op, tirx
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError
from tilescale.language.dtypes import canonical

MODES = {"r": "r", "w": "w", "rw": "rw", "wr": "rw", 1: "r", 2: "w", 3: "rw"}
_NAME = re.compile(r"[A-Za-z_]\w*(::[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class Pointer:
    """What an external function gets of memory: where it begins, what it may touch there, and how."""

    region: Region
    mode: str


def import_source(source_code: str | None = None) -> None:
    """CUDA text that stands in front of the kernel, once, however often it is imported; None is no text.

    Raises:
        TileTypeError: no text. TileSyntaxError: outside T.Kernel.
    """
    if source_code is None:
        return
    loc, launch = source.current(), bld.current().launch
    if not isinstance(source_code, str):
        raise TileTypeError(f"T.import_source of {source_code!r}", loc=loc, expected="a text of CUDA C++")
    if launch is None:
        raise TileSyntaxError("T.import_source stands outside T.Kernel", loc=loc)
    texts = launch.hints.get("imported", ())
    launch.hints["imported"] = texts if source_code in texts else (*texts, source_code)


def access_ptr(base: Any, access_type: Any = "r", *extents: Any) -> Pointer:
    """A pointer for `call_extern` and `ptx_cp_async`: to a tile's or a tensor's first element, or to the
    element ``A[i, j]``.

    Args:
        access_type: "r", "w" or "rw", or 1, 2, 3: whether what it points to is read, written, or both.
        extents: how many elements along the last axes; one element where ``base`` names one, else all of it.

    Raises:
        TileTypeError: what is no memory. TileValueError: another mode.
    """
    loc = source.current()
    if access_type not in MODES:
        raise TileValueError(f"T.access_ptr(…, {access_type!r})", loc=loc, expected='"r", "w" or "rw"')
    if not is_tile(base):
        raise TileTypeError(
            f"T.access_ptr of {base!r}",
            loc=loc,
            expected="a tensor, an allocation, or an element A[i, j] of one",
        )
    made = region(base, "T.access_ptr", tuple(constant(index_expr(e)) or index_expr(e) for e in extents))
    if made.buffer.scope.startswith("local.fragment"):
        raise TileTypeError(
            f"T.access_ptr of {made.name}, a fragment, whose elements lie spread over the threads",
            loc=loc,
            hint="T.alloc_local for memory of each thread",
        )
    return Pointer(made, MODES[access_type])


def tvm_access_ptr(ptype: Any, data: Any, offset: Any, extent: Any, rw_mask: int = 3) -> Pointer:
    """A pointer by TVM's name: to ``extent`` elements of ``X.data`` from the one of number ``offset`` on, in
    row-major order.

    Args:
        ptype: the dtype, of `type_annotation`: that of the elements. rw_mask: 1 to read, 2 to write, 3 both.

    Raises:
        TileTypeError: no ``X.data``, or another dtype. Else as `access_ptr`.
    """
    of = data.of if isinstance(data, Memory) else data
    if not isinstance(of, Buffer) or canonical(ptype) != of.dtype:
        raise TileTypeError(
            f"T.tvm_access_ptr of {ptype} in {data}", loc=source.current(),
            expected="X.data of a tile or a tensor X, and its dtype",
        )  # fmt: skip
    flat = of if of.ndim == 1 else reshape(of, (reduce(mul, of.shape),))
    return access_ptr(flat[offset], rw_mask, extent)


def type_annotation(dtype: Any) -> Any:
    """The dtype, as TVM's pointers have it."""
    return canonical(dtype)


def address_of(base: Any) -> Pointer:
    """A pointer for `call_extern` to the element ``A[i, j]``, or to a tile's or a tensor's first one. What
    the function touches from there on is not said, so it may be all of the memory, read and written;
    ``T.access_ptr`` says it.

    Raises:
        TileTypeError: what is no memory.
    """
    return Pointer(access_ptr(base).region, "rwa")


def call_extern(*args: Any, dtype: Any = None) -> Any:
    """Each thread calls a function of CUDA text: ``T.call_extern("decode", T.access_ptr(a, "r"),
    T.access_ptr(b, "w"), 8)``. With a dtype in front of the name, ``T.call_extern("float32", "f", x)``, it is
    what the function returns. CUDA's own functions that the language has under another name (``__popc``,
    ``__shfl_xor_sync``; ops/cuda_functions.py) are that, on every target.

    Args:
        args: the name, and what the function gets: pointers (`access_ptr`) and numbers.
        dtype: of what it returns, in the place of the first argument; "handle" of what returns nothing.

    Raises:
        TileTypeError: no name; a tile without T.access_ptr. TileSyntaxError: in T.Parallel, with pointers to
            several elements.
    """
    loc, words, gives = source.current(), list(args), dtype
    if len(words) > 1 and isinstance(words[0], str) and isinstance(words[1], str):
        gives, *words = words
    if not words or not isinstance(words[0], str) or _NAME.fullmatch(str(words[0])) is None:
        raise TileTypeError(
            f"T.call_extern of {words[0] if words else 'nothing'!r}",
            loc=loc,
            expected="the name of a function",
        )
    gives = None if gives in (None, "handle", "void") else canonical(gives)
    name, given, modes = str(words[0]), [], []
    if gives is not None and (word := known(name, words[1:])) is not None:
        return convert(word(*words[1:]), gives)
    for k, value in enumerate(words[1:]):
        if isinstance(value, Pointer):
            given.append(value.region.ir())
            modes.append(value.mode)
        elif isinstance(value, (bool, int, float)):
            given.append(const(value, _literal(value)))
            modes.append("v")
        elif is_tile(value) and not isinstance(value, (ir.TensorLoad, ir.Var)) and not hasattr(value, "load"):
            raise TileTypeError(
                f"argument {k} of {name} is {value}, a tile", loc=loc, hint='T.access_ptr(tile, "r")'
            )
        else:
            given.append(as_expr(value, what=f"argument {k} of {name}"))
            modes.append("v")
    result = None
    if gives is not None:
        result = alloc_cell(gives)
        bld.current().give_name(result.buffer, "returned")
        given.append(region(result.buffer, "what it returns").ir())
        modes.append("=")
    where = {"executor": "thread"} if of_iterations() else {}
    emit("call_extern", given, {**where, "function": name, "modes": ",".join(modes)})
    return None if result is None else result.load()


def call_pure_extern(dtype: Any, func_name: str, *args: Any) -> Any:
    """What a function of CUDA text returns: ``T.call_extern(dtype, func_name, …)``."""
    return call_extern(str(dtype), func_name, *args)


def _literal(value: Any) -> Any:
    """The dtype of a number of Python's: int32 or float32, of a greater one what holds it."""
    if isinstance(value, int) and not fits(value, "int32"):
        return canonical("uint32" if fits(value, "uint32") else "int64")
    return canonical(type(value))


register_op("ts.math.dp4a", pure=True)  # four of int8, four of int8, an int32: one instruction of NVIDIA's


def dp4a(A: Any, B: Any, C: Any) -> None:
    """C += A[0] · B[0] + … + A[3] · B[3]: four neighbours of int8 along the last axis from the elements that
    A and B name, added to the int32 that C names.

    Raises:
        TileTypeError: other dtypes. TileValueError: fewer than four neighbours.
    """
    loc = source.current()
    ops = [region(r, f"{n} of T.dp4a", (4,) if n != "C" else ()) for r, n in ((A, "A"), (B, "B"), (C, "C"))]
    if [str(r.dtype) for r in ops] != ["int8", "int8", "int32"]:
        told = ", ".join(str(r.dtype) for r in ops)
        raise TileTypeError(f"T.dp4a of {told}", loc=loc, expected="int8, int8 and an accumulator of int32")
    values = [_element(r, k) for r in ops[:2] for k in range(4)]
    total = ir.Call("ts.math.dp4a", [*values, _element(ops[2], 0)], ret_ty=ir.PrimType("int32"))
    ops[2].buffer.store(ops[2].mins, total)


def _element(of: Region, k: int) -> Any:
    """The k-th one behind the first of a region, along the last axis."""
    last = len(of.mins) - 1
    return of.buffer[tuple(m + k if axis == last else m for axis, m in enumerate(of.mins))]


@register
class CallExtern(TileOp):
    """``ts.call_extern(…)``. function: its name; modes: of each argument "v" (a number) or how the memory
    that it points to is touched, with "a" anywhere in it; "=": no argument, but where the result goes."""

    name = "call_extern"
    attributes: ClassVar[tuple[str, ...]] = ("function", "modes")
    by_thread = in_iterations = True

    def effects(self, call: Any) -> list[Access]:
        made = []
        for value, mode in zip(call.args, str(call.attrs["modes"]).split(","), strict=False):
            if "a" in mode:
                source, zero = value.source, tirx.IntImm("int32", 0)
                value = tirx.BufferRegion(source, [ir.Range(zero, e) for e in source.ty.shape])
            if "r" in mode:
                made.append(Access(value, "read"))
            if "w" in mode or mode == "=":
                made.append(Access(value, "write"))
        return made

    def simulate(self, call: Any, cx: SimContext) -> Any:
        raise refused(call, "sim")


def refused(call: Any, target: str) -> TileSyntaxError:
    """Why a target does not call the author's CUDA text."""
    return TileSyntaxError(
        f"T.call_extern of {call.attrs['function']} on {target}: text of CUDA has no meaning there",
        loc=source.loc_of(call.span),
        expected='target="cuda"',
        hint="the language's own words, which every target has",
    )
