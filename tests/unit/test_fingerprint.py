"""Fingerprints: values that differ differ, values that agree agree, and what has no value of its own is
refused."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import tilescale.language as T
from tilescale.fingerprint import Fingerprint, Unhashable, processor, sources

GLOBAL = 3


def digest(value: object) -> str:
    fp = Fingerprint()
    fp.value(value, "it")
    return fp.hexdigest()


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Config:
    size: int
    color: Color = Color.RED

    def area(self) -> int:
        return self.size * GLOBAL


class Slots:
    __slots__ = ("x",)

    def __init__(self, x: int):
        self.x = x


class Plain:
    def __init__(self, x: object):
        self.x = x


DIFFERENT = [
    None,
    True,
    False,
    1,
    0,
    1.0,
    0.0,
    -0.0,
    "1",
    b"1",
    "",
    (),
    [],
    {},
    set(),
    (1,),
    [1],
    (1, 2),
    (1, (2,)),
    ((1,), 2),
    {1: 2},
    {2: 1},
    {1, 2},
    {1, 3},
    lambda x: x in {"a", "b", "c", "d", "e", "f"},
    range(3),
    range(4),
    slice(1),
    float("nan"),
    float("inf"),
    1j,
    ...,
    T.float16,
    T.dynamic("a"),
    T.dynamic("b"),
    T.dynamic("a", "int64"),
    T.dynamic("a") + 1,
    T.dynamic("a") * 2,
    T.Tensor((1, 2), "float32"),
    T.Tensor((2, 1), "float32"),
    T.Tensor((1, 2), "float16"),
    T.SymmTensor((1, 2), "float32"),
    T.StridedTensor((1, 2), (2, 1), "float32"),
    T.Signal((1, 2)),
    T.Signal((1, 2), keep=True),
    T.ceildiv,
    math.ceil,
    math.floor,
    math,
    os,
    torch.float16,
    torch.float32,
    np.dtype("float16"),
    np.float32(1),
    np.int64(1),
    np.arange(3),
    np.arange(4),
    np.arange(3.0),
    Color.RED,
    Color.BLUE,
    Config(1),
    Config(2),
    Config(1, Color.BLUE),
    Slots(1),
    Slots(2),
    Plain(1),
    Plain(Config(1)),
    Config,
    Plain,
    functools.partial(min, 1),
    functools.partial(min, 2),
    functools.partial(max, 1),
    len,
    torch.device("cpu"),
    Config(1).area,
]


def test_different_values_differ_and_equal_ones_agree():
    found: dict[str, object] = {}
    for value in DIFFERENT:
        key = digest(value)
        assert key not in found, f"{value!r} and {found[key]!r}"
        assert digest(value) == key
        found[key] = value
    assert digest(Config(1)) == digest(Config(1)) and digest({1, 2, 3}) == digest({3, 2, 1})
    assert digest("float16") == digest(T.float16)  # the language takes both for the same


def test_where_a_sequence_ends_counts():
    assert digest(("ab", "c")) != digest(("a", "bc")) and digest([[1], 2]) != digest([[1, 2]])


def test_functions_by_source_place_defaults_and_what_they_name():
    def make(value, default=1):
        def f(x, y=default):
            return x + y + value

        return f

    assert digest(make(1)) == digest(make(1)) != digest(make(2)) and digest(make(1, 2)) != digest(make(1))
    first = lambda x: x + 1  # noqa: E731
    second = lambda x: x + 2  # noqa: E731
    assert digest(first) != digest(second)


def test_globals_by_their_value_now(monkeypatch: pytest.MonkeyPatch):
    def uses(x):
        return x + GLOBAL

    def names(x):
        return x.GLOBAL

    before, other, method = digest(uses), digest(names), digest(Config(1))
    monkeypatch.setattr(sys.modules[__name__], "GLOBAL", 4)
    assert digest(uses) != before and digest(names) == other
    assert digest(Config(1)) != method  # its method names the global


def test_what_a_module_has_is_followed_to_the_attribute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "ours_a.py").write_text("import ours_b\nX = 1\nY = 1\n")
    (tmp_path / "ours_b.py").write_text("def f(x):\n    return x\n\nZ = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # the .pyc says what a module was compiled from
    import ours_a  # type: ignore[import-not-found]

    def uses(x):
        return ours_a.X + ours_a.ours_b.f(x)

    before = digest(uses)
    ours_a.Y, ours_a.ours_b.Z = 2, 2
    assert digest(uses) == before
    ours_a.X = 2
    after = digest(uses)
    assert after != before
    ours_a.ours_b.f = ours_a.ours_b.__dict__["f"].__class__(
        compile("def f(x): return 2", "x", "exec").co_consts[0], {}
    )
    assert digest(uses) != after

    def passes_it_on(x):
        return helper(ours_a, x)

    def helper(module, x):
        return module.Y

    before = digest(passes_it_on)  # by its whole source, and its file, which errors name
    monkeypatch.setattr(ours_a, "__file__", str(shutil.copy2(ours_a.__file__, tmp_path / "elsewhere.py")))
    assert digest(passes_it_on) != before
    del sys.modules["ours_a"], sys.modules["ours_b"]


def test_recursion_and_cycles_end():
    def even(n):
        return True if n == 0 else odd(n - 1)

    def odd(n):
        return False if n == 0 else even(n - 1)

    assert digest(even) and digest(even) != digest(odd)
    a, b = Plain(None), Plain(None)
    a.x, b.x = b, a
    assert digest(a)
    one = Plain(1)
    # Sharing shows: what is done to one is done to the other.
    assert digest((one, one)) != digest((one, Plain(1)))


def test_what_has_no_value_is_refused_by_name():
    with open(os.devnull) as file:
        for value, text in [
            (file, "it is a _io.TextIOWrapper"),
            (torch.zeros(2), "it is a torch.Tensor"),
            (np.zeros(1 << 18), "it is an array of 2097152 bytes"),
            (np.array([object()]), "it is an array"),
            ({"a": [file]}, r"it\['a'\]\[0\] is a _io"),
            (iter([1]), "list_iterator"),
        ]:
            with pytest.raises(Unhashable, match=text):
                digest(value)


def test_constants_of_the_language_have_their_value():
    """A factory that has ``low = -T.infinity(dtype)`` outside its kernel is kept on disk like any other."""
    low = [-T.infinity("float32"), T.infinity("float32"), T.infinity("float16")]
    assert len({digest(x) for x in low}) == 3
    assert digest(-T.infinity("float32")) == digest(low[0])


def test_the_same_in_every_process():
    """Sets and the addresses of objects must not show."""
    code = (
        "import tests.unit.test_fingerprint as t\n"
        "print(*[t.digest(v) for v in t.DIFFERENT], t.digest(t.test_recursion_and_cycles_end), t.sources(), t.processor() != '')"
    )
    root = Path(__file__).resolve().parents[2]

    def run(seed: str) -> str:
        env = {**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, cwd=root
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("1") == run("2")
    assert len(sources()) == 32 and os.uname().machine in processor()
