"""The text of functions, as it was when Python compiled them.

A kernel is compiled from its text, long after its module was imported, and a file may be edited in between.
So a file is read when a function of it is decorated (`keep`), and a text counts only where it fits: what it
compiles to must be the very code object that the function has, with its lines and columns (`find`). A helper
that nobody decorated is read when it is first reached, under the same rule.

Bytecode has forgotten one thing, the annotations of local names, with which an eager kernel declares its
tensors. Where there are any the text must also lie in a file that nobody touched since the module was
compiled, or have been read while its module ran with nothing that tells of an edit: neither the file's times
against those of the process and of the module's .pyc, nor what that was made from. Where Python writes no
.pyc, as in many containers, the file's times are taken when importlib reads it.

A leaf that imports nothing of ours, so that `errors` may show the lines that were imported and not those that
a file has now.
"""

from __future__ import annotations
import __future__ as futures

import ast
import functools
import importlib.util
import linecache
import os
import sys
import time
import tokenize
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from typing import Any


def _process_began() -> float:
    """When this process began, before it compiled anything; now where the system does not tell (proc(5),
    "starttime")."""
    try:
        with open("/proc/self/stat", "rb") as f:
            ticks = int(f.read().rpartition(b")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time()
    return time.time() - max(age, 0) if ticks else time.time()


#: file → its times when importlib last read it; of a process that writes no .pyc
_read: dict[str, _Stamp] = {}
#: What is older has not changed since any module of this process was compiled.
_BEGAN = _process_began()
#: Seconds by which a file's times may be ahead of ours: clocks of file systems are coarse, those of file
#: servers are others.
_SLACK = 0.5
#: What `from __future__ import …` in a module leaves in its functions' flags.
_FUTURES = sum(
    {getattr(futures, name).compiler_flag for name in futures.all_feature_names}
    - {futures.nested_scopes.compiler_flag}
)
#: Loaders that compile a module's text as it stands. pytest's, for one, does not: it rewrites assertions.
_LOADERS = ("_frozen_importlib", "_frozen_importlib_external", "importlib._bootstrap_external", "zipimport")
#: Texts that are kept of one file; a notebook that reloads a module for weeks must not grow without end.
_LIMIT = 64
#: Syntax trees that are kept, which is as many kernels as a program compiles in a row.
_TREES = 256


Definition = ast.FunctionDef | ast.AsyncFunctionDef
#: of a file: time of change, modification time (both in nanoseconds), size
_Stamp = tuple[int, int, int]


@dataclass(eq=False)
class _Text:
    """One state of a file. ``stamp``: of the file that it was read from, None where there is no file;
    ``running``: read while its module was being executed, with nothing that tells of an edit before."""

    lines: list[str]
    stamp: _Stamp | None = None
    running: bool = False

    @functools.cached_property
    def imports(self) -> list[ast.stmt]:
        """The imports at the margin. Python calls the functions of a name that its module imports with other
        instructions."""
        out, k = "", 0
        while k < len(self.lines):
            if self.lines[k].startswith(("import ", "from ")):
                out += self.lines[k]
                while k + 1 < len(self.lines) and (
                    self.lines[k].endswith("\\\n") or out.count("(") > out.count(")")
                ):
                    k += 1
                    out += self.lines[k]
            k += 1
        tree = _parsed(out)
        return [] if tree is None else tree.body


@dataclass(frozen=True)
class Source:
    """The definition of a function: its node in the syntax tree, with the file's own lines and columns, and
    its text."""

    node: Definition
    text: str


_texts: dict[str, list[_Text]] = {}
#: file → the lines to show of it: those of the text that was used last
_shown: dict[str, list[str]] = {}
#: id of a code object → it and its source. By identity: two that are equal may come from different files (a
#: notebook's cells).
_found: dict[int, tuple[types.CodeType, Source]] = {}


def keep(func: types.FunctionType) -> None:
    """Reads the file of a function that is being decorated, unless it was read as it is now."""
    code = func.__code__
    if id(code) in _found:
        return
    texts = _texts.setdefault(code.co_filename, [])
    stamp = _stamp(code.co_filename)
    frame = _running(func.__globals__)
    running = frame is not None and not _edited(stamp, func.__globals__, frame)
    if texts and stamp is not None and texts[-1].stamp == stamp:
        texts[-1].running |= running
        return
    text = next(_readable(code, func.__globals__), None)
    if text is not None:
        text.running = running
        texts.append(text)
    del texts[:-_LIMIT]


def find(func: types.FunctionType) -> Source | None:
    """The definition of a function; None where no text that can be read compiles to the code that it has."""
    code = func.__code__
    held = _found.get(id(code))
    if held is not None:
        return held[1]
    texts = _texts.setdefault(code.co_filename, [])
    for text in (*reversed(texts), *_readable(code, func.__globals__)):
        source = _fitting(text, func)
        if source is not None:
            if text not in texts:
                texts.append(text)
            _shown[code.co_filename] = text.lines
            if len(_found) >= _TREES:
                del _found[next(iter(_found))]
            _found[id(code)] = (code, source)
            return source
    return None


def is_known(file: str) -> bool:
    """Whether a function's text was found under this name, which need not be a file's."""
    return file in _shown


def has_changed(func: types.FunctionType) -> bool:
    """Of a function that is not found: whether there is a text under its file's name, which is another one by
    now. From then on no line of it is shown."""
    code = func.__code__
    if code.co_filename == "<string>":  # of any `exec`, whose text never was there
        return False
    if not _texts.get(code.co_filename) and next(_readable(code, func.__globals__), None) is None:
        return False
    _shown[code.co_filename] = []
    return True


def module_as_imported(module: types.ModuleType) -> bytes | None:
    """The source of a module; None where it has none, or its file may have changed since the import."""
    file = getattr(module, "__file__", None)
    if not file or not file.endswith(".py") or not _untouched(_stamp(file), vars(module)):
        return None
    with open(file, "rb") as f:
        return f.read()


def line(file: str, number: int) -> str:
    """A line of a file without its end, as it was when the functions that are compiled now were imported;
    empty where there is none."""
    lines = _shown.get(file)
    if lines is None:
        return linecache.getline(file, number).rstrip("\n")
    return lines[number - 1].rstrip("\n") if 0 < number <= len(lines) else ""


# ---- reading


def _stamp(file: str) -> _Stamp | None:
    try:
        s = os.stat(file)
    except (OSError, ValueError):
        return None
    return s.st_ctime_ns, s.st_mtime_ns, s.st_size


def _readable(code: types.CodeType, scope: dict[str, Any]) -> Iterator[_Text]:
    """Every text that is known under a code object's file name, one look each: the file; what the module's
    loader has (a zip file); what linecache has been told (the cells of notebooks, the lines of a REPL); what
    stands behind ``python -c``."""
    file = code.co_filename
    try:
        with open(file, "rb") as raw:
            s = os.fstat(raw.fileno())
            encoding, _ = tokenize.detect_encoding(raw.readline)
            raw.seek(0)
            text = raw.read().decode(encoding)
        yield _Text(_lines(text), (s.st_ctime_ns, s.st_mtime_ns, s.st_size))
    except (OSError, SyntaxError, ValueError):
        pass
    loader: Any = scope.get("__loader__")
    if scope.get("__file__") == file and hasattr(loader, "get_source") and not os.path.exists(file):
        try:
            given = loader.get_source(scope.get("__name__"))
        except ImportError:
            given = None
        if given:
            yield _Text(_lines(given))
    # Python 3.13 keeps what a REPL compiled by code object.
    by_code = getattr(linecache, "_getlines_from_code", None)
    lines = by_code(code) if by_code is not None else None
    if lines:
        yield _Text(list(lines))
    lines = linecache.getlines(file, scope)
    if lines:
        entry: Any = linecache.cache.get(file, ())  # (size, time of modification or None, lines, name)
        modified = entry[1] if len(entry) > 1 else None
        yield _Text(
            list(lines), None if modified is None else (int(modified * 1e9), int(modified * 1e9), entry[0])
        )
    if file == "<string>" and sys.argv[:1] == ["-c"]:
        for option, text in zip(sys.orig_argv, sys.orig_argv[1:]):
            if option.startswith("-") and option.endswith("c"):
                yield _Text(_lines(text))


def _lines(text: str) -> list[str]:
    """As Python's tokenizer counts them: form feeds and their kin end no line."""
    return [part + "\n" for part in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]


# ---- does it fit?


def _fitting(text: _Text, func: types.FunctionType) -> Source | None:
    code = func.__code__
    node = _statement(text, code)
    if (
        node is not None
        and not text.running
        and not _untouched(text.stamp, func.__globals__)
        and _declares(node)
    ):
        return None
    if node is None and _has_own_loader(func.__globals__) and _untouched(text.stamp, func.__globals__):
        node = _definition(_parsed("".join(text.lines)), code, exactly=False)
    return (
        None if node is None else Source(node, "".join(text.lines[code.co_firstlineno - 1 : node.end_lineno]))
    )


def _statement(text: _Text, code: types.CodeType) -> Definition | None:
    """The definition, from the lines of the statement around it alone, which takes a tenth of a file's time;
    from the whole file where these lines do not compile to the function's code."""
    lines, first = text.lines, code.co_firstlineno
    if first > len(lines):
        return None

    def begins(k: int) -> bool:
        """Whether a statement of the module begins here: what stands at the margin and continues nothing."""
        return lines[k][0] not in " \t\f\n#)]}" and not lines[k].startswith(
            ("else", "elif", "except", "finally")
        )

    start = end = first - 1
    while start > 0 and not begins(start):
        start -= 1
    while (
        end < len(lines) - 1 and lines[end][0] in "@ \t\f\n#)]}" and lines[start][0] == "@"
    ):  # from decorators on to their def
        end += 1
    end += 1
    while end < len(lines) and not begins(end):
        end += 1
    alone = _parsed("\n" * start + "".join(lines[start:end]))
    if alone is not None:
        alone.body = text.imports + alone.body
        if (found := _definition(alone, code)) is not None:
            return found
    return _definition(_parsed("".join(lines)), code)


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _definition(module: ast.Module | None, code: types.CodeType, exactly: bool = True) -> Definition | None:
    """The function's definition in a module; None where the module does not hold it or, ``exactly``, compiles
    to other code."""
    if module is None or exactly and not _holds(module, code):
        return None
    wanted = code.co_name, code.co_firstlineno
    return next((n for n in _functions(module.body) if (n.name, _first_line(n)) == wanted), None)


def _functions(statements: Iterable[Any]) -> Iterator[Definition]:
    for s in statements:
        if isinstance(s, Definition):
            yield s
        for inner in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _functions(getattr(s, inner, ()))


def _holds(module: ast.Module, code: types.CodeType) -> bool:
    try:
        made = compile(module, code.co_filename, "exec", code.co_flags & _FUTURES, True)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return any(inner == code for inner in _all_codes(made))


def _first_line(node: Definition) -> int:
    return min([node.lineno, *(d.lineno for d in node.decorator_list)])


def _all_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _all_codes(constant)


def _declares(node: ast.AST) -> bool:
    """Whether a function annotates names of its own."""
    return any(isinstance(n, ast.AnnAssign) for n in ast.walk(node))


# ---- what the bytecode cannot tell


def _running(scope: dict[str, Any]) -> types.FrameType | None:
    """The frame of the module, or the cell, with these globals where its body is being executed: its text was
    read just now."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals is scope and frame.f_code.co_name == "<module>":
            return frame
        frame = frame.f_back
    return None


def _edited(stamp: _Stamp | None, scope: dict[str, Any], frame: types.FrameType) -> bool:
    """Whether a file was edited since its module, whose body runs in ``frame``, was compiled. Of a module
    without a .pyc nothing tells, but of the program's own file, which was compiled when the process began."""
    if stamp is None or stamp[0] / 1e9 < _BEGAN:
        return False
    if frame.f_back is None:
        return max(stamp[:2]) / 1e9 > _BEGAN + _SLACK
    name = getattr(scope.get("__spec__"), "name", "")
    if (
        vars(sys.modules.get(name, types)) is not scope
        or _has_own_loader(scope)
        or (kept := _compiled(scope)) is None
    ):
        return False
    source, made = kept
    if source == _as_kept(stamp):
        return _later(stamp, made)
    renewed = not sys.dont_write_bytecode and os.access(os.path.dirname(scope["__cached__"]), os.W_OK)
    return renewed or made / 1e9 > _BEGAN  # else a .pyc of long ago, which nobody could replace


def _untouched(stamp: _Stamp | None, scope: dict[str, Any]) -> bool:
    """Whether a file is as it was when its module was compiled: older than this process, what importlib has
    read, or what the module's .pyc was made from. What is no file (a cell, a zip archive) is not edited in
    place."""
    if stamp is None or max(stamp[:2]) / 1e9 < _BEGAN or _read.get(scope.get("__file__", "")) == stamp:
        return True
    kept = _compiled(scope)
    return kept is not None and kept[0] == _as_kept(stamp) and not _later(stamp, kept[1])


def _note_reading() -> None:
    """From here on importlib leaves a file's times where it reads one. Modules that are running now, and
    import this one, were read just before."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and (stamp := _stamp(frame.f_code.co_filename)) is not None:
            _read[frame.f_code.co_filename] = stamp
        frame = frame.f_back
    ask = SourceFileLoader.path_stats

    def path_stats(self: SourceFileLoader, path: str) -> Any:
        if (stamp := _stamp(path)) is not None:
            _read[path] = stamp
        return ask(self, path)

    SourceFileLoader.path_stats = path_stats  # type: ignore[method-assign]


def _later(stamp: _Stamp, made: int) -> bool:
    """Whether a file was written behind its .pyc, within the second to which that keeps its time. One of the
    future tells nothing."""
    return made < stamp[1] <= time.time_ns()


def _compiled(scope: dict[str, Any]) -> tuple[tuple[int, int], int] | None:
    """What a module's .pyc was made from, its modification time and size as they are kept there, and when
    (importlib, "PEP 552")."""
    try:
        with open(scope.get("__cached__") or importlib.util.cache_from_source(scope["__file__"]), "rb") as f:
            head, made = f.read(16), os.fstat(f.fileno()).st_mtime_ns
    except (OSError, KeyError, NotImplementedError, TypeError):
        return None
    if head[:4] != importlib.util.MAGIC_NUMBER or head[4:8] != bytes(4):
        return None
    return (int.from_bytes(head[8:12], "little"), int.from_bytes(head[12:16], "little")), made


def _as_kept(stamp: _Stamp) -> tuple[int, int]:
    """The modification time and size of a file as a .pyc has them: to the second, in 32 bits each."""
    return stamp[1] // 10**9 & 0xFFFFFFFF, stamp[2] & 0xFFFFFFFF


def _has_own_loader(scope: dict[str, Any]) -> bool:
    """Whether a module's loader may have compiled something else than its text."""
    loader = scope.get("__loader__")
    kind = loader if isinstance(loader, type) else type(loader)
    return loader is not None and kind.__module__ not in _LOADERS


if sys.dont_write_bytecode:
    _note_reading()
