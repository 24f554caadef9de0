"""What tvm_compat shortens in TVM's Python: fewer calls, the same answers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from tilescale.compiler.tvm_compat import ir, tirx, tvm_ffi


def calls(function: Callable[[], Any]) -> int:
    """How many functions written in Python one calls."""
    count = 0

    def look(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count - 1


def test_what_a_compilation_asks_most_often_takes_few_calls():
    x, y = tirx.Var("x", "int32"), tirx.Var("y", "int32")
    both, array, known = x + y, tvm_ffi.convert([x, y, x, y]), {x: 1, y: 2}
    assert calls(lambda: isinstance(x, tirx.IntImm)) == 0
    assert calls(lambda: list(array)) <= 2
    assert calls(lambda: array[2]) <= 2
    assert known[both.a] == 1
    assert calls(lambda: known[both.a]) <= 9  # some of them of the language's guard, where that is loaded


def test_the_answers_are_those_of_tvm():
    x, y = tirx.Var("x", "int32"), tirx.Var("y", "int32")
    array = tvm_ffi.convert([x, y])
    assert isinstance(x, ir.Expr) and isinstance(x + y, ir.Expr) and not isinstance(x, tirx.IntImm)
    assert not isinstance(3, ir.Expr) and issubclass(tirx.IntImm, ir.Expr)
    assert [e.name for e in array] == ["x", "y"] == [array[0].name, array[-1].name]
    assert [e.name for e in array[1:]] == ["y"] and list(tvm_ffi.convert([])) == []
    with pytest.raises(IndexError, match="Index out of range. size: 2, got index 2"):
        array[2]
    assert bool(x == x) and not bool(x == y) and bool(x != y) and not bool(x != x)
    assert isinstance((x == y).asobject(), tirx.EQ) and isinstance((x != y).asobject(), tirx.NE)
    buffer = tirx.decl_buffer((4,), "float32", "b")
    assert (buffer == buffer) is True and (buffer != buffer) is False  # no number: by identity
