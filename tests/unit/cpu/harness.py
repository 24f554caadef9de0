"""Builds many small functions of thread IR into one shared object and calls them on NumPy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilescale.compiler.cpu import codegen
from tilescale.compiler.cpu.convert import storage_dtype
from tilescale.compiler.cpu.tile import Tile, imm
from tilescale.compiler.tvm_compat import ir, tirx

ARENA_BYTES = 1 << 24


def pointer(dtype: str) -> Any:
    return ir.PointerType(ir.PrimType(dtype), "global")


class Scratch:
    """The emitters' context: scratch from a byte arena, 64-byte aligned, never reused."""

    def __init__(self, arena: Any) -> None:
        self.arena, self.used, self.stmts = arena, 0, []

    def scratch(self, numel: int, dtype: str) -> Any:
        bytes_ = np.dtype(dtype).itemsize
        buf = tirx.decl_buffer((numel,), dtype, f"scratch{self.used}", layout=None, data_alignment=bytes_)
        address = tirx.handle_add_byte_offset(self.arena, imm(self.used))
        self.stmts.append(tirx.DeclBuffer(buf, data=tirx.reinterpret(pointer(dtype), address)))
        self.used = (self.used + numel * bytes_ + 63) & ~63
        assert self.used <= ARENA_BYTES
        return buf


def make_func(dtypes: Sequence[str], numels: Sequence[int], body: Callable[..., Any]) -> Any:
    """A PrimFunc (uint8* p0, …, uint8* arena); ``body(cx, *bufs)`` returns its statement over flat
    buffers."""
    arena = tirx.Var("arena", pointer("uint8"))
    params, stmts, bufs = [], [], []
    for i, (dtype, numel) in enumerate(zip(dtypes, numels, strict=True)):
        storage = storage_dtype(dtype)
        param = tirx.Var(f"p{i}", pointer("uint8"))
        buf = tirx.decl_buffer(
            (numel,), storage, f"b{i}", layout=None, data_alignment=np.dtype(storage).itemsize
        )
        stmts.append(
            tirx.DeclBuffer(
                buf, data=tirx.reinterpret(pointer(storage), tirx.handle_add_byte_offset(param, imm(0)))
            )
        )
        params.append(param)
        bufs.append(buf)
    cx = Scratch(arena)
    stmt = body(cx, *bufs)
    return tirx.PrimFunc([*params, arena], tirx.SeqStmt([*stmts, *cx.stmts, stmt]))


def row_major(buf: Any, dtype: str, shape: tuple[int, ...], offset: int = 0) -> Tile:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return Tile(buf, dtype, shape, tuple(reversed(strides)), offset)


class Library:
    """Functions added before the first call; the call builds them all at once."""

    def __init__(self, folder: Path) -> None:
        self.path, self.funcs, self.lib = folder / "tests.so", {}, None
        raw = np.full(ARENA_BYTES + 64, 0xFF, np.uint8)
        self.arena = raw[-raw.ctypes.data % 64 :][:ARENA_BYTES]

    def add(self, name: str, dtypes: Sequence[str], numels: Sequence[int], body: Callable[..., Any]) -> None:
        assert self.lib is None and name not in self.funcs
        self.funcs[name] = make_func(dtypes, numels, body)

    def __call__(self, name: str, *arrays: np.ndarray) -> None:
        if self.lib is None:
            codegen.build_shared(self.funcs, self.path)
            self.lib = ctypes.CDLL(str(self.path))
        for array in arrays:
            assert array.flags.c_contiguous
        func = getattr(self.lib, name)
        func.restype = None
        func(*(ctypes.c_void_p(a.ctypes.data) for a in arrays), ctypes.c_void_p(self.arena.ctypes.data))
