"""Indices whose products 32 bits do not hold lie outside their tensors: nothing is read, and nothing written.

In a process of its own: what is computed in 32 bits is negative there, and nobody would test that.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import torch
import tilescale
import tilescale.language as T

q, n = T.dynamic("q, n")

@T.prim_func
def inline(A: T.Tensor((q,), "int32"), N: T.Tensor((n,), "int8"), out: T.Tensor((1,), "int32")):
    with T.Kernel(1):
        for i in T.serial(n):
            out[0] = out[0] + A[i * i + 1]
            A[i * i] = 1

@T.prim_func
def named(A: T.Tensor((q,), "int32"), N: T.Tensor((n,), "int8"), out: T.Tensor((1,), "int32")):
    with T.Kernel(1):
        for i in T.serial(n):
            at = i * i
            out[0] = out[0] + A[at + 1]
            A[at] = 1

@T.prim_func
def nests(A: T.Tensor((q,), "int32"), N: T.Tensor((n,), "int8"), out: T.Tensor((1,), "int32")):
    with T.Kernel(n, threads=32) as i:
        for j in T.Parallel(1):
            at = i * i + j
            A[at] = 1

@T.prim_func
def constant(A: T.Tensor((q,), "int32"), N: T.Tensor((n,), "int8"), out: T.Tensor((1,), "int32")):
    with T.Kernel(1):
        for i in T.serial(1 << 16):
            for j in T.Parallel(16):
                A[i * (1 << 16) + j] = 1

@T.prim_func
def copies(A: T.Tensor((q,), "int32"), N: T.Tensor((n,), "int8"), out: T.Tensor((1,), "int32")):
    with T.Kernel(1, threads=32):
        t = T.alloc_shared((1,), "int32")
        for i in T.serial(n):
            T.copy(A[i * i : i * i + 1], t)
            out[0] = out[0] + t[0]
            t[0] = 1
            T.copy(t, A[i * i : i * i + 1])

a, out = torch.zeros(100, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
tilescale.compile(globals()[sys.argv[1]], target="cpu")(a, torch.zeros(70000, dtype=torch.int8), out)
print(a.nonzero().flatten().tolist(), out.tolist())
"""
SQUARES = [k * k for k in range(10)]


@pytest.mark.parametrize(
    ("kernel", "written"),
    [
        ("inline", SQUARES),
        ("named", SQUARES),
        ("nests", SQUARES),
        ("constant", list(range(16))),
        ("copies", SQUARES),
    ],
)
def test_an_index_that_32_bits_do_not_hold(kernel: str, written: list[int], tmp_path: Path):
    (tmp_path / "program.py").write_text(PROGRAM)
    call = [sys.executable, str(tmp_path / "program.py"), kernel]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[0] == f"{written} [0]", done.stderr[-2000:]
