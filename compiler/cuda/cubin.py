"""What a cubin says of its kernels: an ELF file whose section .nv.info holds a list of attributes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from tilescale.errors import InternalError

# of .nv.info, as `cuobjdump -elf` names them
_REGCOUNT, _FRAME_SIZE = 0x2F, 0x11
_WITH_BYTES = 4  # the format whose payload follows its length
#: bytes in front of a block's shared memory that the system keeps, counted in the section of the kernel's own
#: since sm_90
_RESERVED_SHARED = 1024


@dataclass(frozen=True)
class Section:
    """name, place in the file, bytes (in memory where there are none in the file)."""

    name: str
    offset: int
    size: int
    kind: int
    link: int


def sections(code: bytes) -> list[Section]:
    """The sections of a 64-bit ELF file. Raises InternalError where it is none."""
    if code[:5] != b"\x7fELF\x02" or len(code) < 64:
        raise InternalError("the CUDA compiler made no cubin: its output is no 64-bit ELF file")
    (at,) = struct.unpack_from("<Q", code, 40)
    each, count, names = struct.unpack_from("<HHH", code, 58)
    # name, type, flags, address, offset, size, link, info, alignment, size of an entry
    rows = [struct.unpack_from("<IIQQQQIIQQ", code, at + k * each) for k in range(count)]
    return [Section(_text(code, rows[names][4] + r[0]), r[4], r[5], r[1], r[6]) for r in rows]


def figures(code: bytes, name: str) -> dict[str, int]:
    """``registers`` and ``stack`` (bytes) of a thread, ``shared``: static bytes of a block; of the kernel
    ``name``.

    Raises:
        InternalError: the cubin holds no such kernel.
    """
    found = {s.name: s for s in sections(code)}
    symbol = _symbol(code, found, name)
    info = found.get(".nv.info")
    attributes = dict(_attributes(code, info, symbol)) if info is not None and symbol is not None else {}
    if _REGCOUNT not in attributes:
        raise InternalError(f"the cubin says nothing of the registers of {name}")
    shared = found.get(f".nv.shared.{name}")
    static = (
        0 if shared is None else shared.size - (_RESERVED_SHARED if ".nv.shared.reserved.0" in found else 0)
    )
    return {"registers": attributes[_REGCOUNT], "stack": attributes.get(_FRAME_SIZE, 0), "shared": static}


def _symbol(code: bytes, found: dict[str, Section], name: str) -> int | None:
    table = found.get(".symtab")
    if table is None:
        return None
    strings = next(s for s in found.values() if s.name == ".strtab")
    for k in range(table.size // 24):
        (at,) = struct.unpack_from("<I", code, table.offset + k * 24)
        if _text(code, strings.offset + at) == name:
            return k
    return None


def _attributes(code: bytes, info: Section, symbol: int) -> Iterator[tuple[int, int]]:
    """Attribute and value of each that is about one symbol: a format, an attribute, a length, the symbol, the
    value."""
    at, end = info.offset, info.offset + info.size
    while at + 4 <= end:
        form, attribute, length = struct.unpack_from("<BBH", code, at)
        at += 4
        if form != _WITH_BYTES:
            continue
        if length == 8:
            of, value = struct.unpack_from("<II", code, at)
            if of == symbol:
                yield attribute, value
        at += length


def _text(code: bytes, at: int) -> str:
    return code[at : code.index(b"\0", at)].decode(errors="replace")
