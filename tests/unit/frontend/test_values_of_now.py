"""A name, a tuple, a list, an argument has the value of the moment at which it was made, as in Python: what
is written later changes none."""

from __future__ import annotations

import itertools
import linecache
import textwrap
from typing import Any

import numpy as np
import pytest

import tilescale
import tilescale.language as T

_number = itertools.count()


@T.macro
def writes_first(x: Any, s: Any, O: Any):
    s[1] = 5
    O[0] = x


def kernel(body: str) -> Any:
    """The body of a kernel of one block, with eight numbers A and O."""
    name = f"<values of now {next(_number)}>"
    head = "@T.prim_func\ndef main(A: T.Tensor((8,), 'int32'), O: T.Tensor((8,), 'int32')):\n    with T.Kernel(1) as bx:\n"
    text = head + textwrap.indent(textwrap.dedent(body).strip(), " " * 8) + "\n"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    names: dict[str, Any] = {"T": T, "writes_first": writes_first}
    exec(compile(text, name, "exec"), names)
    return names["main"]


CELLS = 'a = T.alloc_var("int32", 1)\nb = T.alloc_var("int32", 2)\nc = T.alloc_var("int32", 3)\n'
TILE = 's = T.alloc_shared((4,), "int32")\nfor i in T.serial(4):\n    s[i] = i\n'
OUT = "\nfor i in T.serial(4):\n    O[i] = s[i]"
CASES = {
    "cells swapped": (CELLS + "a, b = b, a\nO[0] = a\nO[1] = b", [2, 1]),
    "three cells": (CELLS + "a, b, c = c, a, b\nO[0] = a\nO[1] = b\nO[2] = c", [3, 1, 2]),
    "by a third name": (CELLS + "t = a\na = b\nb = t\nO[0] = a\nO[1] = b", [2, 1]),
    "one cell's value in another": (CELLS + "a = b\nb = 7\nO[0] = a", [2]),
    "fibonacci": (
        "a = T.alloc_var('int32', 0)\nb = T.alloc_var('int32', 1)\nfor i in T.serial(10):\n    a, b = b, a + b\nO[0] = a",
        [55],
    ),
    "gcd": (
        "a = T.alloc_var('int32', 48)\nb = T.alloc_var('int32', 18)\nwhile b != 0:\n    a, b = b, a % b\nO[0] = a",
        [6],
    ),
    "elements swapped": (TILE + "s[0], s[3] = s[3], s[0]" + OUT, [3, 1, 2, 0]),
    "in lanes": (
        TILE + "for i in T.Parallel(2):\n    s[2 * i], s[2 * i + 1] = s[2 * i + 1], s[2 * i]" + OUT,
        [1, 0, 3, 2],
    ),
    "one after the other": (
        TILE + "for i in T.serial(3):\n    s[i], s[i + 1] = s[i + 1], s[i]" + OUT,
        [1, 2, 3, 0],
    ),
    "an element and a name": (TILE + "s[0], x = 9, s[0]\nO[0] = x\nO[1] = s[0]", [0, 9]),
    "a list": (TILE + "l = [s[1], s[2]]\ns[1] = 7\ns[2] = 8\nO[0] = l[0]\nO[1] = l[1]", [1, 2]),
    "made by a loop": (
        TILE + "l = [s[i] for i in range(1, 3)]\ns[1] = 7\nt = (l[1], l[0])\nO[0] = t[0]\nO[1] = t[1]",
        [2, 1],
    ),
    "a dict": (TILE + "l = {1: s[1]}\ns[1] = 7\nO[0] = l[1]", [1]),
    "the rest": (CELLS + "x, *y = a, b\na = 7\nb = 8\nO[0] = x\nO[1] = y[0]", [1, 2]),
    "two targets": (CELLS + "p = q = a\na = 5\nO[0] = p\nO[1] = q", [1, 1]),
    "an argument": (TILE + "writes_first(s[1], s, O)", [1]),
    "an argument by name": (TILE + "writes_first(x=s[1] + 0, s=s, O=O)", [1]),
    "where a region begins": (
        "v = T.alloc_var('int32', 1)\nr = A[v : v + 2]\nv = 5\nT.copy(r, O[0:2])",
        [1, 2],
    ),
    "where a tile begins": ("v = T.alloc_var('int32', 1)\nx = A[v]\nv = 5\nT.copy(x, O[0:2])", [1, 2]),
    "membership": (
        "O[0] = 5 if bx in {0: 1} else 7\nO[1] = 5 if A[3] in (1, 3) else 7\nO[2] = 5 if A[3] not in range(2, 4) else 7\n"
        "O[3] = 5 if 3 in [A[1], A[2]] else 7\nO[4] = 5 if A[3] in [] else 7\nO[5] = 5 if A[4] in range(0, 8, 3) else 7",
        [5, 5, 7, 7, 7, 7],
    ),
}


@pytest.mark.parametrize("target", ["sim", "cpu"])
@pytest.mark.parametrize("body, want", CASES.values(), ids=CASES.keys())
def test_as_in_python(body: str, want: list[int], target: str):
    out = np.zeros(8, np.int32)
    tilescale.compile(kernel(body), target=target)(np.arange(8, dtype=np.int32), out)
    assert out[: len(want)].tolist() == want


def test_membership_of_what_python_does_not_list():
    with pytest.raises(tilescale.errors.TileTypeError, match="a device value in str"):
        kernel("O[0] = 1 if A[0] in 'abc' else 2").trace()
