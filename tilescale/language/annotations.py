"""What stands behind a kernel's parameters: tensors, symmetric tensors, signals and scalars. Free of TVM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilescale import packets
from tilescale.errors import TileTypeError

from .booleans import require_bools
from .dtypes import BITS, Narrow, canonical, dtype
from .vectors import Vector, named_vector


@dataclass(frozen=True, eq=False)
class TensorSpec:
    """A tensor parameter: ``shape`` of ints and symbolic extents, ``strides`` likewise (None: row-major), in
    elements.

    ``kind``: "tensor", "symm" (lives in the symmetric heap of every rank), "signal" (int64 counters there) or
    "packets" (a box there, as it lies in memory: see tilescale/packets.py). Of a box, and of a tensor of
    4-bit numbers, ``slots`` and ``of``: the extents and the dtype that its author sees; ``of`` also of a
    tensor of vectors, whose lanes are the last axis. ``dense``: of a box, whose packets have no marks.
    ``pointer``: one address, for which a call gives a tensor, or a number.
    ``declared``: the same as its author wrote it, where the compiler puts other symbols into the extents.
    """

    kind: str
    shape: tuple[Any, ...]
    dtype: dtype
    strides: tuple[Any, ...] | None = None
    keep: bool = False
    slots: tuple[Any, ...] | None = None
    of: Any = None
    pointer: bool = False
    dense: bool = False
    declared: TensorSpec | None = None


@dataclass(frozen=True, eq=False)
class ScalarSpec:
    """A scalar parameter of the given dtype, passed by value at each call."""

    dtype: dtype


def tensor_of(kind: str, shape: tuple[Any, ...], dt: Any, strides: Any = None) -> TensorSpec:
    """A tensor of a dtype, of 4-bit numbers, or of vectors.

    Raises:
        TileTypeError: no dtype; vectors in another rank's memory, or with strides.
    """
    known = named_vector(dt)
    if isinstance(known, Vector):
        if kind != "tensor" or strides is not None:
            raise TileTypeError(
                f"{'a tensor with strides' if strides is not None else f'a {kind}'} of {known}",
                expected="T.Tensor, whose vectors lie side by side; or "
                f"{known.of} with a last axis of {known.count}",
            )
        return TensorSpec(kind, (*shape, known.count), known.of, of=known)
    number = canonical(known)
    if isinstance(number, Narrow):
        return packed(kind, shape, number, strides)
    return TensorSpec(kind, shape, number, None if strides is None else _shape(strides))


def packed(kind: str, shape: tuple[Any, ...], dt: Narrow, strides: Any = None) -> TensorSpec:
    """A tensor of 4-bit numbers: in memory a byte for every two of a row. Whether rows are of whole bytes is
    known where constants are (compiler/frontend/trace.py). ``strides`` count numbers, too.

    Raises:
        TileTypeError: another rank's memory, no axis; rows whose numbers do not lie side by side.
    """
    if kind != "tensor" or not shape:
        raise TileTypeError(
            f"a tensor of {dt} that is a {kind} of {shape}",
            expected="T.Tensor: two numbers of a row share a byte",
        )
    if strides is not None:
        *outer, last = _shape(strides)
        if not isinstance(last, int) or last != 1 or any(isinstance(s, int) and s % 2 for s in outer):
            raise TileTypeError(
                f"a tensor of {dt} with strides {tuple(_shape(strides))}",
                expected="1 along a row, whose numbers share bytes, and even ones between rows",
            )
        strides = (*(s // 2 for s in outer), 1)
    return TensorSpec(kind, (*shape[:-1], shape[-1] // 2), dt.packed, strides, slots=shape, of=dt)


def _shape(shape: Any) -> tuple[Any, ...]:
    if isinstance(shape, (tuple, list)):
        return tuple(shape)
    return (shape,)


class _TensorFactory:
    """``T.Tensor((M, N), dtype)`` and ``T.Tensor[[M, N], dtype]``."""

    def __init__(self, kind: str):
        self._kind = kind

    def __call__(self, shape: Any, dtype: Any = "float32", strides: Any = None) -> Any:
        """What is behind a parameter; in a kernel, with the memory of a tensor (``X.data``) in the place of
        strides, that tensor under this shape and dtype, as T.view gives it."""
        of = getattr(strides, "of", None)
        if of is not None:
            from tilescale.compiler.ops.alloc import view

            return view(of, shape, dtype)
        return tensor_of(self._kind, _shape(shape), dtype, strides)

    def __getitem__(self, item: Any) -> TensorSpec:
        shape, dtype_ = item if isinstance(item, tuple) and len(item) == 2 else (item, "float32")
        return self(shape, dtype_)


class _StridedFactory(_TensorFactory):
    """``T.StridedTensor((M, N), (s, 1), dtype)``: strides in elements, ints or ``T.dynamic``."""

    def __call__(self, shape: Any, strides: Any = None, dtype: Any = "float32") -> TensorSpec:  # type: ignore[override]
        return super().__call__(shape, dtype, strides)

    def __getitem__(self, item: Any) -> TensorSpec:
        """``T.StridedTensor[[M, N], [s, 1], dtype]``."""
        return self(*item) if isinstance(item, tuple) and len(item) in (2, 3) else self(item)


Tensor = _TensorFactory("tensor")
StridedTensor = _StridedFactory("tensor")
SymmTensor = _TensorFactory("symm")


def Signal(shape: Any = (1,), *, keep: bool = False) -> TensorSpec:
    """Counters (int64) in symmetric memory, zero when a launch begins; with ``keep=True`` they live on
    between launches."""
    require_bools(keep=keep)
    return TensorSpec("signal", _shape(shape), canonical("int64"), None, keep)


def Packets(shape: Any, dtype: Any = "float32", *, dense: bool = False) -> TensorSpec:
    """A box of small messages in symmetric memory, for ``T.put_packets`` and ``T.get_packets``: each element
    may be put once in a launch, and lasts for that launch. ``tilescale.comm.packets`` allocates one. The last
    extent is a multiple of 8 bytes.

    ``dense``: half of the bytes that cross otherwise, since packets have no marks. Each is taken once in a
    launch, and bits change in one case: 8 bytes whose bits are all ones, NaNs, may come with the lowest bit
    zero, as NaNs still.

    Raises:
        TileTypeError: a dense box of another dtype than bfloat16, float16 and float32.
    """
    require_bools(dense=dense)
    slots, of = _shape(shape), canonical(dtype)
    if dense and str(of) not in packets.DENSE:
        raise TileTypeError(
            f"a dense box of packets of {of}: a packet that is no NaN could look like an empty place",
            expected="one of " + ", ".join(packets.DENSE),
            hint=f'T.Packets({shape!r}, "{of}")',
        )
    size = packets.length(slots, BITS[of], dense)
    return TensorSpec("packets", (size,), canonical("int64"), slots=slots, of=of, dense=dense)


class Ref:
    """Of a macro's parameter, ``x: T.Ref``: the caller gives a cell of T.alloc_var, and assignments in the
    macro are stores to it. ``T.Var`` says the same there. Parameters without it take cells too."""
