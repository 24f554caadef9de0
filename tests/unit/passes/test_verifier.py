"""The verifier judges what passes have changed, and nothing twice."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale.language as T
from tilescale.compiler.ir import spec
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import InternalError


@T.prim_func
def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=32):
        T.copy(A, B)


def test_a_function_that_a_pass_leaves_alone_is_not_walked_again(monkeypatch: pytest.MonkeyPatch):
    walked: list[Any] = []
    walk = spec.structural_walk
    monkeypatch.setattr(spec, "structural_walk", lambda root, calls: walked.append(root) or walk(root, calls))
    verifier, func = spec.Verifier(), kernel.trace().func
    verifier.verify(func, spec.TILE, "trace")
    once = len(walked)
    verifier.verify(func, spec.TILE, "a pass")
    assert once > 0 and len(walked) == once
    verifier.verify(func, spec.SCHEDULED, "a pass to the next level")
    assert len(walked) > once


def test_what_a_pass_changes_is_judged():
    verifier, func = spec.Verifier(), kernel.trace().func
    verifier.verify(func, spec.TILE, "trace")
    x = tirx.Var("x", "int32")
    twice = [tirx.Bind(x, tirx.IntImm("int32", k)) for k in range(2)]
    broken = func.with_body(tirx.SeqStmt([*twice, func.body]))
    with pytest.raises(InternalError, match="after a pass: x is defined twice"):
        verifier.verify(broken, spec.TILE, "a pass")
    with pytest.raises(InternalError, match="after another: x is defined twice"):
        verifier.verify(broken, spec.TILE, "another")
    verifier.verify(func, spec.TILE, "a third")
