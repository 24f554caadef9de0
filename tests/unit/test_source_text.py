"""A kernel is what its file said when it was imported, whatever the file says when the kernel is first
compiled."""

from __future__ import annotations

import importlib
import itertools
import linecache
import os
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

import tilescale.language as T
from tests.kernels import refused
from tilescale import source_text
from tilescale.errors import TileSyntaxError
from tilescale.fingerprint import Fingerprint

HEAD = "import tilescale\nimport tilescale.language as T\n\n"
KERNEL = """
@T.prim_func
def {name}(C: T.Tensor((4,), "int32")):
    with T.Kernel(4) as b:
        C[b] = {value}

"""


def kernel(name: str, value: object) -> str:
    return KERNEL.format(name=name, value=value)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``write(text)`` makes, or edits, the file of a module; ``write.module`` imports it."""
    name = f"edited_{tmp_path.name.replace('-', '_')}"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # the .pyc says what a module was compiled from

    count = itertools.count(1)

    def edit(text: str) -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text(HEAD + text)
        # Whatever the clock's grain, the file is another one.
        os.utime(path, (time.time() + 10 * next(count),) * 2)
        importlib.invalidate_caches()
        return path

    edit.load = lambda: importlib.import_module(name)  # type: ignore[attr-defined]
    yield edit
    sys.modules.pop(name, None)


def digest(value: object) -> str:
    fp = Fingerprint()
    fp.value(value, "it")
    return fp.hexdigest()


EDITS = {
    "the value": kernel("first", 2),
    "another kernel on these lines": kernel("second", 1) + kernel("first", 1),
    "one more line above": "# a note\n" + kernel("first", 1),
    "no Python any more": "def (",
    "nothing": "",
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_file_edited_after_the_import(write: Any, edit: str):
    write(kernel("first", 1))
    module = write.load()
    before = module.first.trace().func.script()
    linecache.clearcache()
    del sys.modules[module.__name__]
    module = write.load()  # another code object, which nobody has looked at
    write(EDITS[edit])
    linecache.checkcache()
    assert module.first.trace().func.script() == before


def test_the_fingerprint_is_of_the_text_that_is_compiled(write: Any):
    write(kernel("first", 1))
    module = write.load()
    write(kernel("first", 2))
    old = digest(module.first)
    del sys.modules[module.__name__]
    new = digest(write.load().first)
    assert old != new
    write(kernel("first", 1))
    del sys.modules[module.__name__]
    assert digest(write.load().first) == old


PLAIN = "def make():\n" + textwrap.indent(kernel("first", 1), "    ") + "    return first\n"


def test_a_text_that_no_longer_fits_is_refused(write: Any):
    """Nothing of the file was decorated while it was imported, so nobody read it in time."""
    path = write(PLAIN)
    module = write.load()
    write(PLAIN.replace("= 1", "= 2"))
    with refused(TileSyntaxError, f"{path} changed since it was imported", write="reload the module") as said:
        module.make().trace()
    assert "C[b] = 2" not in said.text and f"{path}:6" in said.text
    write(PLAIN)
    assert "= 1" in module.make().trace().func.script()


def test_the_annotations_of_local_names_leave_no_trace_in_bytecode(write: Any):
    eager = """
def make():
    @tilescale.jit
    def twice(A):
        A: T.Tensor((4,), T.float32)
        B = T.empty((4,), T.float32)
        with T.Kernel(4) as b:
            B[b] = A[b]
        return B
    return twice
"""
    path = write(eager)
    made = write.load().make
    write(eager.replace("A: T.Tensor((4,), T.float32)", "A: T.Tensor((4,), T.float16)"))
    with refused(TileSyntaxError, f"{path} changed since it was imported"):
        made().compile()
    again = importlib.reload(sys.modules[made.__module__])
    assert "float16" in again.make().compile().get_kernel_source("tile")


DECLARES = """
{edit}
@tilescale.jit
def twice(A):
    A: T.Tensor((4,), T.float32)
    B = T.empty((4,), T.float32)
    with T.Kernel(4) as b:
        B[b] = A[b]
    return B
"""
#: what changes the annotation in a file, once, whoever imports or runs it
EDIT = """import pathlib, time
here = pathlib.Path(__file__)
text = here.read_text()
if "A: T.Tensor((4,), T.float" + "32)" in text:
    {wait}
    here.write_text(text.replace("A: T.Tensor((4,), T.float" + "32)", "A: T.Tensor((4,), T.float{bits})"))
"""


@pytest.mark.parametrize("bits", ["16", "8_e4m3fn"])
@pytest.mark.parametrize("age", [0, 100], ids=["just written", "older"])
def test_an_annotation_edited_between_import_and_decoration(write: Any, bits: str, age: int):
    path = write(DECLARES.format(edit=EDIT.format(bits=bits, wait="time.sleep(0.02)")))
    os.utime(path, (time.time() - age,) * 2)
    module = write.load()
    with refused(TileSyntaxError, f"{path} changed since it was imported", write="reload the module"):
        module.twice.compile()
    # Else Python itself takes the .pyc of this second for the edited file's.
    os.utime(path, (time.time() + 100,) * 2)
    module = importlib.reload(module)
    assert f"float{bits}" in module.twice.compile().get_kernel_source("tile")


def test_an_annotation_of_the_program_edited_while_it_starts(tmp_path: Path):
    program = tmp_path / "program.py"
    for edit in ("", EDIT.format(bits="16", wait="time.sleep(0.6)")):
        program.write_text(
            HEAD + DECLARES.format(edit=edit) + "print(twice.compile().get_kernel_source('tile'))\n"
        )
        made = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
        if edit:
            assert made.returncode and f"{program} changed since it was imported" in made.stderr
        else:
            assert made.returncode == 0 and "float32" in made.stdout, made.stderr
    made = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert made.returncode == 0 and "float16" in made.stdout, made.stderr


def test_macros_helpers_and_captured_functions(write: Any):
    text = """
@T.macro
def chosen(x):
    if x > 1:
        y = T.alloc_var("int32", 7)
    return x + 1

def plain(x):
    return x + 2

def outer():
    k = 3
    @T.macro
    def captured(x):
        return x + k
    return captured

inner = outer()
""" + kernel("first", "chosen(b) + plain(b) + inner(b)")
    write(text)
    module = write.load()
    before = module.first.trace().func.script()
    del sys.modules[module.__name__]
    module = write.load()
    whole = digest(module.first)
    del sys.modules[module.__name__]
    module = write.load()
    write(text.replace("x + 1", "x + 10").replace("x + 2", "x + 20").replace("x + k", "x - k"))
    assert digest(module.first) == whole
    assert module.first.trace().func.script() == before


def test_a_helper_read_too_late_counts_by_its_bytecode(write: Any):
    write("def plain(x):\n    return x + 2\n")
    module = write.load()
    write("def plain(x):\n    return x + 3\n")
    old = digest(module.plain)
    module = importlib.reload(module)
    assert digest(module.plain) != old


def test_a_module_that_is_passed_on_counts_by_what_was_imported(write: Any):
    from tilescale.fingerprint import Unhashable

    write("X = 1\n")
    module = write.load()
    assert digest(module)
    write("X = 2\n")
    with pytest.raises(Unhashable, match="has changed since it was imported"):
        digest(module)


@pytest.mark.parametrize(
    "text",
    [
        # what makes the lines around a definition no statement of their own
        'WORDS = """\n@T.prim_func\ndef first(C):\n"""\n' + kernel("first", 1),
        "class Holder:\n    '''\nat the margin\n    '''\n" + textwrap.indent(kernel("first", 1), "    ") + "first = Holder.first\n",
        "if not T:\n    pass\nelse:\n" + textwrap.indent(kernel("first", 1), "    "),
        "def same(f):\n    return f\n\n@T.prim_func\n@same\n@same\n# why\ndef first(\n    C: T.Tensor((4,), 'int32'),\n):\n    with T.Kernel(4) as b:\n        C[b] = 1\n",
        "from __future__ import annotations\n" + kernel("first", 1),
        "X = 1\f\n\x0c\n" + kernel("first", '1 if "\u2028" else 2'),
        "try:\n    raise ValueError\nexcept ValueError:\n" + textwrap.indent(kernel("first", 1), "    "),
        "def make(n):\n" + textwrap.indent(kernel("first", "n"), "    ") + "# a comment at the margin\n    return first\nfirst = make(1)\n",
    ],
)  # fmt: skip
def test_definitions_are_found_wherever_they_stand(tmp_path: Path, text: str):
    head = HEAD if "__future__" not in text else ""
    text = head + text if head else text.replace("annotations\n", "annotations\n" + HEAD)
    path = tmp_path / "stands.py"
    path.write_text(text, newline="")
    space: dict[str, Any] = {"__name__": "stands", "__file__": str(path)}
    exec(compile(text, str(path), "exec"), space)
    assert "= 1" in space["first"].trace().func.script()


def test_zip_files_notebooks_and_loaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as archive:
        archive.writestr("zipped_kernels.py", HEAD + kernel("first", 1))
    monkeypatch.syspath_prepend(str(tmp_path / "packed.zip"))
    import zipped_kernels  # type: ignore[import-not-found]

    assert "= 1" in zipped_kernels.first.trace().func.script()
    name, space = "<ipython-input-1-0123>", {"__name__": "__main__"}
    for value in (1, 2):  # a cell that is run again under its name
        text = HEAD + kernel("first", value)
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        exec(compile(text, name, "exec"), space)
        if value == 1:
            old = space["first"]
    assert "= 1" in old.trace().func.script() and "= 2" in space["first"].trace().func.script()

    class Loader:
        def get_source(self, module: str) -> str:
            return HEAD + kernel("first", 3)

    known: dict[str, Any] = {"__name__": "made", "__file__": "/nowhere/made.py", "__loader__": Loader()}
    exec(compile(Loader().get_source("made"), "/nowhere/made.py", "exec"), known)
    assert "= 3" in known["first"].trace().func.script()


def test_what_exec_keeps_for_itself_is_refused():
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(HEAD + kernel("first", 1), space)
    with refused(TileSyntaxError, "the source of first cannot be read", write="not through exec"):
        space["first"].trace()


@pytest.mark.parametrize("options", [["-c"], ["-Wignore", "-Bc"]])
def test_python_c(clean_env: dict[str, str], options: list[str]):
    program = HEAD + kernel("first", "1 +  missing")
    program += "try:\n    first.trace()\nexcept tilescale.TileError as error:\n    print(error)\n"
    done = subprocess.run(
        [sys.executable, *options, program], env=clean_env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:3] == [
        "<string>:8: 'missing' is not defined",
        "  8 |         C[b] = 1 +  missing",
        "    |                     ^^^^^^^",
    ], done.stdout


def test_assertions_that_pytest_rewrites():
    """This file was compiled by pytest, so a kernel with an assertion has other code than its text says."""

    @T.prim_func
    def asserts(C: T.Tensor((4,), "int32")):
        with T.Kernel(4) as b:
            assert b < 4
            C[b] = b

    assert not any(
        c == asserts.func.__code__
        for c in source_text._all_codes(compile(Path(__file__).read_text(), __file__, "exec"))
    )
    assert "assert" in asserts.trace().func.script()


def test_errors_show_the_lines_that_were_imported(write: Any):
    write(kernel("first", "missing"))
    module = write.load()
    write("\n\n" + kernel("first", "missing"))
    with pytest.raises(Exception, match="is not defined") as error:
        module.first.trace()
    assert "C[b] = missing" in str(error.value)


def test_a_file_is_read_once_for_all_its_kernels(write: Any, monkeypatch: pytest.MonkeyPatch):
    reads: list[str] = []
    read = source_text._readable
    monkeypatch.setattr(
        source_text, "_readable", lambda code, scope: (reads.append(code.co_filename), read(code, scope))[1]
    )
    write("".join(kernel(f"k{n}", n) for n in range(50)))
    module = write.load()
    assert len(reads) == 1
    for n in range(50):
        T.prim_func(getattr(module, f"k{n}").func)
    assert len(reads) == 1


def test_decorating_brings_neither_torch_nor_tvm(tmp_path: Path, clean_env: dict[str, str]):
    program = tmp_path / "many.py"
    many = (
        "".join(kernel(f"k{n}", n) for n in range(20))
        + "@T.macro\ndef m(x): return x\n@tilescale.jit\ndef f(n): return k0\n"
    )
    program.write_text(
        HEAD
        + many
        + "import sys\nprint([m for m in ('torch', 'tvm', 'tvm_ffi', 'numpy') if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)], env=clean_env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


WITHOUT_PYC = """
import importlib.util, pathlib, sys

def load(name, text):
    path = pathlib.Path(sys.argv[1]) / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, path

text = pathlib.Path(sys.argv[2]).read_text()
for name in ("first", "second"):  # the first one imports tilescale
    module, path = load(name, text)
    assert "int32" in module.make().trace().func.script()
module, path = load("third", text)
path.write_text(text.replace("x: T.int32", "x: T.int16"))
try:
    module.make().trace()
except Exception as error:
    assert "changed since it was imported" in str(error), error
else:
    raise AssertionError("an edited annotation was taken")
"""


def test_a_file_that_is_written_and_imported_where_python_keeps_no_bytecode(
    tmp_path: Path, clean_env: dict[str, str]
):
    inner = kernel("first", "x").replace("        C[b] = x", "        x: T.int32 = b * 2\n        C[b] = x")
    (tmp_path / "text").write_text(
        HEAD + "def make():\n" + textwrap.indent(inner, "    ") + "    return first\n"
    )
    (tmp_path / "program.py").write_text(WITHOUT_PYC)
    done = subprocess.run(
        [sys.executable, "-B", tmp_path / "program.py", tmp_path, tmp_path / "text"],
        env=clean_env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
