"""No word of the language is taken and forgotten: a parameter is used, refused, or stands in the table of
those that change nothing."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import refused, run
from tests.unit.cuda.emulated import agree, data, empty
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.passes import pipeline
from tilescale.errors import TileTypeError, TileValueError

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted(
    [
        *(ROOT / "compiler/ops").glob("*.py"),
        ROOT / "compiler/frontend/launch.py",
        ROOT / "compiler/layout/made.py",
    ]
)
#: function → parameters that are accepted for TileLang's sources and change nothing, as docs/LANGUAGE.md says
NOTHING = {
    "Kernel": {"is_cpu"},
    "gemm": {"k_pack"},
    "gemm_sp": {"k_pack"},
    "warpgroup_fence_operand": {"offset", "num_regs", "dtype"},
    "atomic_add": {"use_tma"},
    "Persistent": {"group_size"},
    "make_swizzled_layout": {"k_major"},
}


def forgotten(path: Path) -> dict[str, set[str]]:
    """The parameters of a module's public functions, and of its classes, that their bodies do not name."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        for f in (
            f
            for f in inner
            if isinstance(f, ast.FunctionDef) and f.name in (getattr(node, "name", ""), "__init__")
        ):
            names = {
                a.arg
                for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs, f.args.vararg, f.args.kwarg)
                if a is not None
            }
            # To look at a word is not to use it.
            checks = [s for s in f.body if ast.unparse(s).startswith("require_bools(")]
            used = {n.id for s in f.body if s not in checks for n in ast.walk(s) if isinstance(n, ast.Name)}
            if hasattr(T, node.name) and not node.name.startswith("_") and names - used - {"self"}:
                found[node.name] = names - used - {"self"}
    return found


def test_every_parameter_is_used_or_told():
    found: dict[str, set[str]] = {}
    for path in FILES:
        found |= forgotten(path)
    assert found == {name: words for name, words in NOTHING.items() if hasattr(T, name)}
    text = (ROOT / "docs/LANGUAGE.md").read_text()
    assert all(f"`{word}" in text for words in NOTHING.values() for word in words)


def unrolled(**words: Any) -> Any:
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), C: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            a, s = T.alloc_shared((64,), "float32"), T.alloc_fragment((64,), "float32")
            T.copy(A, a)
            T.clear(s)
            for k in T.unroll(8, **words):
                for i in T.Parallel(64):
                    s[i] += a[(i + k) % 64]
            T.copy(s, C)

    return kernel


@pytest.mark.parametrize(
    ("words", "pragma"),
    [
        ({}, "#pragma unroll\n"),
        ({"explicit": True}, "#pragma unroll\n"),
        ({"unroll_factor": 4}, "#pragma unroll 4\n"),
    ],
)
def test_loops_are_unrolled_as_asked(words: dict[str, Any], pragma: str):
    kernel = unrolled(**words)
    text = print_kernel(Lowering(pipeline.run(kernel.trace(), target("sm_90a"))[0]).run()).text
    loop = text.index("for (int k ")
    assert text[:loop].rstrip(" ").endswith(pragma), text
    agree(kernel, {"A": data((64,), "float32"), "C": empty((64,), "float32")}, exact=True)
    a, c = data((64,), "float32"), np.zeros(64, np.float32)
    run(kernel)(a, c)
    np.testing.assert_allclose(c, sum(np.roll(a, -k) for k in range(8)), rtol=1e-5)


def test_what_words_refuse():
    def refuse(kind: Any, message: str, make: Any, **more: Any) -> None:
        @T.prim_func
        def kernel(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
            with T.Kernel(1, threads=128):
                make(A, C)

        with refused(kind, message, **more):
            kernel.trace()

    def multiplied(**words: Any) -> Any:
        def make(A: Any, C: Any) -> None:
            a, c = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            T.gemm(a, a, c, **words)

        return make

    def sparse(A: Any, C: Any) -> None:
        a, e = T.alloc_shared((64, 32), "float16"), T.alloc_shared((64, 4), "int16")
        T.gemm_sp(
            a, e, T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32"), wg_wait=-1
        )

    refuse(TileValueError, "T.gemm with mbar=", multiplied(mbar=1), write="T.wait_wgmma")
    refuse(TileValueError, "T.gemm with wg_wait=2", multiplied(wg_wait=2))
    refuse(TileValueError, "T.gemm_sp with wg_wait=-1", sparse)
    refuse(
        TileValueError,
        "annotations={'a': 1} of T.serial",
        lambda A, C: T.serial(4, annotations={"a": 1}),
        write="T.Pipelined",
    )
    refuse(
        TileValueError,
        "unroll_factor=0",
        lambda A, C: T.unroll(4, unroll_factor=0),
        expected="a positive number",
    )
    refuse(
        TileValueError,
        "unroll_factor=2, explicit=True",
        lambda A, C: T.unroll(4, unroll_factor=2, explicit=True),
    )
    refuse(
        TileTypeError,
        "memory_order='strong'",
        lambda A, C: T.atomic_add(C[0, 0], 1, memory_order="strong"),
        expected="acq_rel",
    )
    refuse(TileTypeError, "memory_order='weak'", lambda A, C: T.atomic_load(C[0, 0], memory_order="weak"))
    refuse(
        TileValueError,
        "T.alloc_shared with scope='local'",
        lambda A, C: T.alloc_shared((4,), "int32", scope="local"),
        expected="shared.dyn",
    )
    refuse(
        TileValueError,
        "T.alloc_fragment with scope='shared'",
        lambda A, C: T.alloc_fragment((4,), "int32", scope="shared"),
    )
