"""Where in the user's source we are: found by walking the Python stack, so that helpers and macros are placed
as well."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tilescale import source_text
from tilescale.errors import Loc, from_utf8

_COMPILER = Path(__file__).resolve().parent.parent
#: Folders whose frames are never the user's: ours, and those of what we call (found without importing it).
OURS = tuple(
    str(p) + "/"
    for p in (
        _COMPILER,
        Path(sys.modules["tilescale.errors"].__file__ or "").resolve().parent,
        *(
            Path(s.origin).resolve().parent
            for s in map(importlib.util.find_spec, ("tvm", "tvm_ffi"))
            if s and s.origin
        ),
    )
)
#: Of those, what holds kernels like anybody's. A place in them is of their own text, which the cache's key
#: covers; the line of the program that called first would be another program's error, too.
_KERNELS = str(Path(sys.modules["tilescale.errors"].__file__ or "").resolve().parent / "ops") + "/"
_STDLIB = sysconfig.get_paths()["stdlib"] + "/"

_positions: dict[CodeType, list[tuple[int | None, ...]]] = {}


def is_ours(filename: str) -> bool:
    """Whether a file belongs to TileScale, TVM or Python rather than to the user (whose notebook cells have
    names in <…> too)."""
    if filename.startswith(("<frozen", "<string", "<__array")):
        # Of `python -c`, whose functions are called <string> as what Python makes itself.
        return not source_text.is_known(filename)
    if filename.endswith((".h", ".cc", ".pyx", ".pxi")):  # TVM's errors bring the frames of its C++ with them
        return True
    if filename.startswith(OURS):
        return not filename.startswith(_KERNELS)
    return filename.startswith(_STDLIB) and "-packages/" not in filename


def loc_of_frame(frame: FrameType, lasti: int | None = None) -> Loc:
    """The place that ``frame`` is executing: line and columns (columns from Python 3.11 on)."""
    code = frame.f_code
    at = frame.f_lasti if lasti is None else lasti
    if sys.version_info >= (3, 11):
        table = _positions.get(code)
        if table is None:
            table = _positions[code] = list(code.co_positions())
        line, end_line, col, end_col = table[at // 2]
        if line is not None:
            return Loc(
                code.co_filename, line, _chars(code, line, col), end_line, _chars(code, end_line, end_col)
            )
    return Loc(code.co_filename, frame.f_lineno)


def _chars(code: CodeType, line: int | None, col: int | None) -> int | None:
    """Columns come as UTF-8 bytes; carets count characters. (ASCII lines need no look at the source.)"""
    if col is None or line is None or col == 0:
        return col
    text = source_text.line(code.co_filename, line)
    if text.isascii():
        return col
    return len(text.encode()[:col].decode(errors="ignore"))


def current() -> Loc | None:
    """The innermost place in the user's source on the current stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_ours(frame.f_code.co_filename):
            return loc_of_frame(frame)
        frame = frame.f_back
    return None


def of_exception(error: BaseException) -> Loc | None:
    """The innermost place in the user's source that an exception passed through."""
    found = None
    tb = error.__traceback__
    while tb is not None:
        if not is_ours(tb.tb_frame.f_code.co_filename):
            found = loc_of_frame(tb.tb_frame, tb.tb_lasti)
        tb = tb.tb_next
    return found


def loc_of(span: Any) -> Loc | None:
    """The user's place that a TVM span stands for."""
    if span is None or not hasattr(span, "line"):
        return None
    col, end = int(span.column) - 1, int(span.end_column) - 1
    file = from_utf8(str(span.source_name.name))
    return Loc(file, int(span.line), col if col >= 0 else None, int(span.end_line), end if end >= 0 else None)


def location(loc: Loc | None) -> list[Any] | None:
    """A place as JSON, see tilescale.explain.place."""
    return None if loc is None else [loc.file, loc.line, loc.col, loc.end_line, loc.end_col]
