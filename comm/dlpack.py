"""A GPU's memory handed to torch by DLPack (its C structures, https://dmlc.github.io/dlpack, version 0):
torch frees nothing, and the block behind it lives as long as any view of the tensor."""

from __future__ import annotations

import atexit
import ctypes
from typing import Any

from tilescale.comm.backend import Block

_CUDA, _UINT = 2, 1
_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


#: what torch still holds: address of the structure → it, what it points to, the block
_held: dict[int, tuple[Any, ...]] = {}


def _drop(managed: int) -> None:
    _held.pop(managed, None)


_deleter = _Deleter(_drop)


@atexit.register
def _forget() -> None:
    """Tensors that outlive the interpreter must not call back into it."""
    for managed, *_ in _held.values():
        managed.deleter = _Deleter(0)


class Carrier:
    """The bytes of a block, once, for ``torch.from_dlpack``."""

    def __init__(self, block: Block):
        self._block = block

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self._block.device or 0

    def __dlpack__(self, **_: Any) -> Any:
        block = self._block
        shape, strides = (ctypes.c_int64 * 1)(block.nbytes), (ctypes.c_int64 * 1)(1)
        tensor = _Tensor(
            block.address, _Device(_CUDA, block.device or 0), 1, _DataType(_UINT, 8, 1), shape, strides, 0
        )
        managed = _Managed(tensor, None, _deleter)
        at = ctypes.addressof(managed)
        _held[at] = (managed, shape, strides, block)
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(at, b"dltensor", None)
