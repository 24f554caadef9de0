"""``T.call_extern``: a function of the author's own CUDA text, which ``T.import_source`` puts in front of the
kernel.

Each thread of the executor calls it, with pointers to memory (`access_ptr`) and numbers. The compiler knows
of the text what the pointers' modes say, and orders the call by that. The text has no meaning on the
simulator and the CPU, which refuse the call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.values import Region, as_expr, const, index_expr
from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import Access, TileOp, register
from tilescale.compiler.ops.base import emit, is_tile, region
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


def address_of(base: Any) -> Pointer:
    """A pointer for `call_extern` to the element ``A[i, j]``, or to a tile's or a tensor's first one. What
    the function touches from there on is not said, so it may be all of the memory, read and written;
    ``T.access_ptr`` says it.

    Raises:
        TileTypeError: what is no memory.
    """
    return Pointer(access_ptr(base).region, "rwa")


def call_extern(*args: Any, dtype: Any = None) -> None:
    """Each thread calls a function of CUDA text: ``T.call_extern("decode", T.access_ptr(a, "r"),
    T.access_ptr(b, "w"), 8)``. TVM's form has a dtype, which says nothing here, in front of the name.

    Args:
        args: the name, and what the function gets: pointers (`access_ptr`) and numbers.
        dtype: TileLang's; the call stands for itself and gives no value.

    Raises:
        TileTypeError: no name; a tile without T.access_ptr. TileSyntaxError: in T.Parallel.
    """
    loc, words = source.current(), list(args)
    if len(words) > 1 and isinstance(words[0], str) and isinstance(words[1], str):
        words = words[1:]
    if not words or not isinstance(words[0], str) or _NAME.fullmatch(str(words[0])) is None:
        raise TileTypeError(
            f"T.call_extern of {words[0] if words else 'nothing'!r}",
            loc=loc,
            expected="the name of a function",
        )
    if dtype not in (None, "handle"):
        canonical(dtype)
    name, given, modes = str(words[0]), [], []
    for k, value in enumerate(words[1:]):
        if isinstance(value, Pointer):
            given.append(value.region.ir())
            modes.append(value.mode)
        elif isinstance(value, (bool, int, float)):
            given.append(const(value, canonical(type(value))))
            modes.append("v")
        elif is_tile(value) and not isinstance(value, (ir.TensorLoad, ir.Var)) and not hasattr(value, "load"):
            raise TileTypeError(
                f"argument {k} of {name} is {value}, a tile", loc=loc, hint='T.access_ptr(tile, "r")'
            )
        else:
            given.append(as_expr(value, what=f"argument {k} of {name}"))
            modes.append("v")
    emit("call_extern", given, {"function": name, "modes": ",".join(modes)})


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
    that it points to is touched, with "a" anywhere in it."""

    name = "call_extern"
    attributes: ClassVar[tuple[str, ...]] = ("function", "modes")
    by_thread = True

    def effects(self, call: Any) -> list[Access]:
        made = []
        for value, mode in zip(call.args, str(call.attrs["modes"]).split(","), strict=False):
            if "a" in mode:
                source, zero = value.source, tirx.IntImm("int32", 0)
                value = tirx.BufferRegion(source, [ir.Range(zero, e) for e in source.ty.shape])
            if "r" in mode:
                made.append(Access(value, "read"))
            if "w" in mode:
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
